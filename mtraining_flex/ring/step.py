"""Compute one step, forward and backward, on each backend.

The only place that knows backends. A step gets queries, keys, values and a `StepMask`.
Its forward gives out and natural lse of these keys alone, or, where a backend
`continues`, of these keys and all that came before. Its backward takes the *global* out
and lse and so needs nothing of the forward's steps.

    eager   dense masked math in fp32 (fp64 for fp64), for the CPU and as a twin
    flex    FlexAttention's Triton templates
    flash   FlexAttention's FLASH backend for slashes, our kernels for columns
    triton  our kernels (`kernels_triton`), which walk the pattern itself
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mtraining_flex.block_mask import StepMask
from mtraining_flex.ring.merge import compute_dtype

# Logits of eager math at a time, over all heads.
_EAGER_LOGITS = 2**20


@dataclass(frozen=True)
class Part:
    """Keys to attend to, and which of them."""

    k: Tensor  # [B, HK, S_k, D]; of columns [B, H, J g, D]
    v: Tensor
    mask: StepMask


@dataclass(frozen=True)
class Finished:
    """The rows of a finished forward, which every step of the backward reads."""

    dout: Tensor  # [B, H, S, D]
    out: Tensor  # [B, H, S, D], of all steps
    lse: Tensor  # [B, H, S], natural
    delta: Tensor | None  # [B, H, S] fp32, sum of out * dout, for those who want it


@dataclass(frozen=True)
class Gradients:
    """What one backward step gives."""

    dq: Tensor  # [B, H, S, D]
    dkv: Tensor  # [2, *k.shape] of the part
    dcolumns: Tensor | None = None  # likewise of `columns`, where they came along


class Step(Protocol):
    """One backend."""

    fuses: bool
    """Takes slashes and columns in one launch (`columns=`)."""

    def continues(self, mask: StepMask) -> bool:
        """Whether it goes on from a partial result (`running=`) instead of merging."""
        ...

    def executed(self, mask: StepMask) -> Tensor:
        """Blocks that a step computes, per head: int64 [B, H]."""
        ...

    def finish(self, dout: Tensor, out: Tensor, lse: Tensor) -> Finished:
        """What the backward steps of this call share."""
        ...

    def forward(
        self,
        q: Tensor,
        part: Part,
        scale: float,
        *,
        columns: Part | None = None,
        running: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """out `[B, H, S, D]` and natural lse `[B, H, S]`.

        `columns` only where it `fuses`, `running` (out and lse) and the `dtype` of out
        only where it `continues`.
        """
        ...

    def backward(
        self,
        q: Tensor,
        part: Part,
        done: Finished,
        scale: float,
        *,
        columns: Part | None = None,
        running: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Gradients:
        """Gradients through these keys; dq on top of `running`, in `dtype`."""
        ...


def get_step(backend: str) -> Step:
    """The step of a resolved backend ("auto" is resolved by `attention`)."""
    if backend == "eager":
        return EagerStep()
    if backend == "triton":
        from mtraining_flex.ring.triton_step import TritonStep

        return TritonStep()
    from mtraining_flex.ring.flex_step import FlexStep

    return FlexStep(backend)


class EagerStep:
    """Dense math under the `mask_mod`: slow, right, and without the tables.

    Rows are taken a few at a time, so that what is held stays in the cache, and keys
    behind the last of these rows are left out: they ascend in every layout. The G heads
    of a group are rows of one product.
    """

    fuses = False

    def continues(self, mask: StepMask) -> bool:
        return False

    def executed(self, mask: StepMask) -> Tensor:
        return mask.tables.executed()

    def finish(self, dout: Tensor, out: Tensor, lse: Tensor) -> Finished:
        return Finished(dout, out, lse, None)

    def forward(
        self,
        q: Tensor,
        part: Part,
        scale: float,
        *,
        columns: Part | None = None,
        running: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert columns is None and running is None and dtype is None
        k, v, mask = part.k, part.v, part.mask
        wide, kv_heads = compute_dtype(q.dtype), k.shape[1]
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = q.new_full(q.shape[:3], -torch.inf)
        for rows, keys in _tiles(q, mask):
            here = (*q.shape[:2], rows.stop - rows.start, -1)
            x = _logits(_group(q[:, :, rows] * scale, kv_heads), k, mask, rows, keys)
            top = x.amax(-1, keepdim=True)  # [B, HK, G R, 1]
            top = torch.where(top == -torch.inf, 0.0, top)
            p = x.sub_(top).exp_()
            total = p.sum(-1, keepdim=True)
            o = (p @ v[:, :, :keys]) / torch.where(total == 0, 1.0, total)
            out[:, :, rows] = o.view(here)
            lse[:, :, rows] = (top + total.log()).view(here).squeeze(-1)
        return out, lse

    def backward(
        self,
        q: Tensor,
        part: Part,
        done: Finished,
        scale: float,
        *,
        columns: Part | None = None,
        running: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Gradients:
        assert columns is None and running is None and dtype is None
        mask, lse, kv_heads = part.mask, done.lse, part.k.shape[1]
        wide = compute_dtype(q.dtype)
        q, k, v, dout = (x.to(wide) for x in (q, part.k, part.v, done.dout))
        delta = (dout * done.out.to(wide)).sum(-1, keepdim=True)  # [B, H, S, 1]
        lse = torch.where(lse == -torch.inf, 0.0, lse)[..., None]
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for rows, keys in _tiles(q, mask):
            q_here, do, lse_here, delta_here = (
                _group(x[:, :, rows], kv_heads) for x in (q, dout, lse, delta)
            )
            x = _logits(q_here * scale, k, mask, rows, keys)
            p = x.sub_(lse_here).exp_()  # 0 in a row without keys
            dv[:, :, :keys] += p.mT @ do
            ds = (do @ v[:, :, :keys].mT).sub_(delta_here).mul_(p).mul_(scale)
            dq[:, :, rows] = (ds @ k[:, :, :keys]).view_as(q[:, :, rows])
            dk[:, :, :keys] += ds.mT @ q_here
        return Gradients(dq, torch.stack([dk, dv]))


def _tiles(q: Tensor, mask: StepMask) -> Iterator[tuple[slice, int]]:
    """Rows to take together, and how many keys they can see."""
    q_pos, kv_pos = mask.buffers[0], mask.buffers[1]
    heads = q.shape[0] * q.shape[1]
    size = max(_EAGER_LOGITS // (heads * max(mask.kv_len, 1)), 16)
    for first in range(0, q.shape[2], size):
        rows = slice(first, min(first + size, q.shape[2]))
        keys = int((kv_pos <= q_pos[rows.stop - 1]).sum(-1).max())
        if keys:
            yield rows, keys


def _group(x: Tensor, kv_heads: int) -> Tensor:
    """Rows of all heads of a group: [B, H, R, D] -> [B, HK, G R, D]."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _logits(q: Tensor, k: Tensor, mask: StepMask, rows: slice, keys: int) -> Tensor:
    """Masked logits of grouped and scaled rows: [B, HK, G R, keys]."""
    logits = q @ k[:, :, :keys].mT
    return logits.masked_fill_(
        ~_group(_allowed(q, mask, rows, keys), k.shape[1]), -torch.inf
    )


def _allowed(q: Tensor, mask: StepMask, rows: slice, keys: int) -> Tensor:
    """The `mask_mod` of some rows: [B, H, R, keys]."""
    device = q.device
    bitmap = mask.buffers[-1]  # [B, H, 2 NB]
    q_idx = torch.arange(rows.start, rows.stop, device=device)[:, None]
    kv_idx = torch.arange(keys, device=device)
    if mask.kind == "slash":
        # One index for all heads, which is much faster than one for each.
        every = slice(None)
        return mask.truth(every, every, q_idx, kv_idx, *mask.buffers)
    b = torch.arange(bitmap.shape[0], device=device)[:, None, None, None]
    h = torch.arange(bitmap.shape[1], device=device)[:, None, None]
    return mask.truth(b, h, q_idx, kv_idx, *mask.buffers)

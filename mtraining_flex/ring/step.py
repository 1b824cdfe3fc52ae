"""Compute one step, forward and backward, on each backend.

The only place that knows backends. A step gets queries, keys, values and a `StepMask`;
its forward gives out and natural lse of these keys alone, its backward takes the
*global* out and lse and so needs nothing of the forward's steps.

    eager   dense masked math in fp32 (fp64 for fp64), for the CPU and as a twin
    flex    FlexAttention's Triton templates
    flash   FlexAttention's FLASH backend for slashes, Triton templates for columns
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from mtraining_flex.block_mask import MASKS, StepMask, slash_mask
from mtraining_flex.ring.merge import compute_dtype

# Logits of eager math at a time, over all heads.
_EAGER_LOGITS = 2**20


class Step(Protocol):
    """One backend."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: StepMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out `[B, H, S, D]` and natural lse `[B, H, S]` over this step's keys."""
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: StepMask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this step, from the global out and natural lse."""
        ...


def get_step(backend: str) -> Step:
    """The step of a resolved backend ("auto" is resolved by `attention`)."""
    if backend == "eager":
        return EagerStep()
    from mtraining_flex.ring.flex_step import FlexStep

    return FlexStep(backend)


class EagerStep:
    """Dense math under the `mask_mod`: slow, right, and without the tables.

    Rows are taken a few at a time, so that what is held stays in the cache, and keys
    behind the last of these rows are left out: they ascend in every layout. The G heads
    of a group are rows of one product.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: StepMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype, kv_heads = compute_dtype(q.dtype), k.shape[1]
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
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
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: StepMask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, kv_heads = compute_dtype(q.dtype), k.shape[1]
        q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
        delta = (dout * out.to(dtype)).sum(-1, keepdim=True)  # [B, H, S, 1]
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
        return dq, dk, dv


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
        return slash_mask(every, every, q_idx, kv_idx, *mask.buffers)
    b = torch.arange(bitmap.shape[0], device=device)[:, None, None, None]
    h = torch.arange(bitmap.shape[1], device=device)[:, None, None]
    return MASKS[mask.kind](b, h, q_idx, kv_idx, *mask.buffers)

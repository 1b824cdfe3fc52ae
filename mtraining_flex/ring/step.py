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

from mtraining_flex.block_mask import MASKS, StepMask
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
    behind the last of these rows are left out: they ascend in every layout.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: StepMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(q.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = q.new_full(q.shape[:3], -torch.inf)
        for rows, keys in _tiles(q, mask):
            x = _logits(q[:, :, rows] * scale, k[:, :, :keys], mask, rows)
            top = x.amax(-1, keepdim=True)  # [B, HK, G, R, 1]
            top = torch.where(top == -torch.inf, 0.0, top)
            p = x.sub_(top).exp_()
            total = p.sum(-1, keepdim=True)
            o = (p @ v[:, :, None, :keys]) / torch.where(total == 0, 1.0, total)
            out[:, :, rows] = o.flatten(1, 2)
            lse[:, :, rows] = (top + total.log()).squeeze(-1).flatten(1, 2)
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

        def grouped(x: Tensor, rows: slice) -> Tensor:
            return x[:, :, rows].unflatten(1, (kv_heads, -1))  # [B, HK, G, R, ...]

        for rows, keys in _tiles(q, mask):
            k_here, v_here = k[:, :, None, :keys], v[:, :, None, :keys]
            x = _logits(q[:, :, rows] * scale, k[:, :, :keys], mask, rows)
            p = x.sub_(grouped(lse, rows)).exp_()  # 0 in a row without keys
            do = grouped(dout, rows)
            dv[:, :, :keys] += (p.mT @ do).sum(2)
            ds = (do @ v_here.mT).sub_(grouped(delta, rows)).mul_(p).mul_(scale)
            dq[:, :, rows] = (ds @ k_here).flatten(1, 2)
            dk[:, :, :keys] += (ds.mT @ grouped(q, rows)).sum(2)
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


def _logits(q: Tensor, k: Tensor, mask: StepMask, rows: slice) -> Tensor:
    """Masked logits of some scaled rows: [B, HK, G, R, K]."""
    batch, heads = q.shape[:2]
    logits = q.unflatten(1, (k.shape[1], -1)) @ k[:, :, None].mT
    device = q.device
    allowed = MASKS[mask.kind](
        torch.arange(batch, device=device)[:, None, None, None],
        torch.arange(heads, device=device)[None, :, None, None],
        torch.arange(rows.start, rows.stop, device=device)[None, None, :, None],
        torch.arange(k.shape[2], device=device)[None, None, None, :],
        *mask.buffers,
    )
    return logits.masked_fill_(~allowed.unflatten(1, (k.shape[1], -1)), -torch.inf)

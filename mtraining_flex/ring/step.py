"""Compute one step, forward and backward, on each backend.

The only place that knows backends. A step gets queries, keys, values and a `StepMask`;
its forward gives out and natural lse of these keys alone, its backward takes the
*global* out and lse and so needs nothing of the forward's steps.

    eager   dense masked math in fp32 (fp64 for fp64), for the CPU and as a twin
    flex    FlexAttention's Triton templates
    flash   FlexAttention's FLASH backend for slashes, Triton templates for columns
"""

from typing import Protocol

import torch
from torch import Tensor

from mtraining_flex.block_mask import MASKS, StepMask

# Query rows of eager math at a time: bounds the logits that are held.
_EAGER_ROWS = 2048


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
    from mtraining_flex.compat import FlexStep

    return FlexStep(backend)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays, everything else is accumulated in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class EagerStep:
    """Dense math under the `mask_mod`: slow, right, and without the tables."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: StepMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(q.dtype)
        k, v = _per_group(k.to(dtype)), _per_group(v.to(dtype))
        outs, lses = [], []
        for rows in torch.arange(q.shape[2], device=q.device).split(_EAGER_ROWS):
            logits = _logits(q[:, :, rows].to(dtype), k, mask, rows, scale)
            lse = logits.logsumexp(-1)  # [B, HK, G, R], -inf for a row without keys
            p = _probabilities(logits, lse)
            outs.append((p @ v).flatten(1, 2))
            lses.append(lse.flatten(1, 2))
        return torch.cat(outs, 2), torch.cat(lses, 2)

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
        dtype = compute_dtype(q.dtype)
        kv_heads = k.shape[1]
        k, v = _per_group(k.to(dtype)), _per_group(v.to(dtype))
        dk, dv, dqs = torch.zeros_like(k[:, :, 0]), torch.zeros_like(v[:, :, 0]), []
        for rows in torch.arange(q.shape[2], device=q.device).split(_EAGER_ROWS):
            q_rows = q[:, :, rows].to(dtype)
            p = _probabilities(
                _logits(q_rows, k, mask, rows, scale),
                lse[:, :, rows].unflatten(1, (kv_heads, -1)),
            )
            q_rows = q_rows.unflatten(1, (kv_heads, -1))
            do = dout[:, :, rows].to(dtype).unflatten(1, (kv_heads, -1))
            o = out[:, :, rows].to(dtype).unflatten(1, (kv_heads, -1))
            delta = (do * o).sum(-1, keepdim=True)
            ds = p * (do @ v.mT - delta) * scale  # [B, HK, G, R, S]
            dqs.append((ds @ k).flatten(1, 2))
            dk += (ds.mT @ q_rows).sum(2)
            dv += (p.mT @ do).sum(2)
        return torch.cat(dqs, 2), dk, dv


def _per_group(x: Tensor) -> Tensor:
    """[B, HK, S, D] -> [B, HK, 1, S, D], to broadcast over the G heads of a group."""
    return x[:, :, None]


def _logits(q: Tensor, k: Tensor, mask: StepMask, rows: Tensor, scale: float) -> Tensor:
    """Masked scaled logits of some rows: [B, HK, G, R, S]."""
    batch, heads = q.shape[:2]
    logits = scale * (q.unflatten(1, (k.shape[1], -1)) @ k.mT)
    device = q.device
    allowed = MASKS[mask.kind](
        torch.arange(batch, device=device)[:, None, None, None],
        torch.arange(heads, device=device)[None, :, None, None],
        rows[None, None, :, None],
        torch.arange(mask.kv_len, device=device)[None, None, None, :],
        *mask.buffers,
    )
    return logits.masked_fill(~allowed.unflatten(1, (k.shape[1], -1)), -torch.inf)


def _probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse), 0 in a row without keys."""
    return (logits - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()

"""Fold a ring step's result into the running result: one kernel, each number read once.

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

A row that has seen no key has lse -inf and weight 0, whatever stands in its out. All
arithmetic is fp32. The twin `naive.merge` says what is computed.

For callers of kernels. In the recipe, backend `triton` goes on from the running result
and merges nothing, and `flex` and `flash` fold in a graph, which is one kernel as well
(`mtraining_flex/ring/merge.py`).

Letters: B batch, H heads, S tokens, D head dim, DP D padded to a power of two, BM rows
of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_triton.common import check_device
from kernels_triton.naive import check_merge

# Elements of a tile: two tiles and their sum are 48 fp32 registers of each thread.
_TILE = 2048


@triton.jit
def _weigh(weight, x):
    """weight * x, and 0 where the weight is 0, whatever x is."""
    weight = weight[:, None]
    return tl.where(weight == 0.0, 0.0, weight * x.to(tl.float32))


@triton.jit
def _merge_kernel(
    out,  # [B, H, S, D]
    lse,  # [B, H, S]
    step_out,
    step_lse,
    merged,  # [B, H, S, D]
    merged_lse,  # [B, H, S] contiguous
    stride_ob,
    stride_oh,
    stride_os,
    stride_lb,
    stride_lh,
    stride_ls,
    stride_pb,
    stride_ph,
    stride_ps,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_mb,
    stride_mh,
    stride_ms,
    S,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
):
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    dim = tl.arange(0, DP)
    real = row < S
    inside = real[:, None] & (dim < D)[None, :]

    at = lse + b * stride_lb + h * stride_lh + row * stride_ls
    a = tl.load(at, mask=real, other=float("-inf"))
    at = step_lse + b * stride_qb + h * stride_qh + row * stride_qs
    b_lse = tl.load(at, mask=real, other=float("-inf"))
    top = tl.maximum(a, b_lse)
    top = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp(a - top)
    new = tl.exp(b_lse - top)
    total = old + new
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)

    at = out + b * stride_ob + h * stride_oh + row * stride_os
    x = tl.load(at[:, None] + dim[None, :], mask=inside, other=0.0)  # [BM, DP]
    at = step_out + b * stride_pb + h * stride_ph + row * stride_ps
    y = tl.load(at[:, None] + dim[None, :], mask=inside, other=0.0)
    tile = _weigh(old * inverse, x) + _weigh(new * inverse, y)
    at = merged + b * stride_mb + h * stride_mh + row * stride_ms
    at = at[:, None] + dim[None, :]
    tl.store(at, tile.to(merged.dtype.element_ty), mask=inside)
    at = merged_lse + (b * H + h) * S + row
    tl.store(at, top + tl.log(total), mask=real)


def merge(
    out: Tensor,
    lse: Tensor,
    step_out: Tensor,
    step_lse: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine two partial results over disjoint keys.

    Arguments and errors as in `naive.merge`. An out whose last dim is not in one piece
    is copied.

    Returns:
        out: [B, H, S, D] in `dtype` (default fp32), in the memory order of out.
        lse: [B, H, S] fp32, contiguous.
    """
    check_merge(out, lse, step_out, step_lse)
    check_device(lse)
    B, H, S, D = out.shape
    merged = torch.empty_like(out, dtype=dtype or torch.float32)
    merged_lse = torch.empty(B, H, S, dtype=torch.float32, device=out.device)
    target = _rows(merged)
    out, step_out = _rows(out), _rows(step_out)
    DP = triton.next_power_of_2(D)
    BM = max(1, _TILE // DP)
    with torch.cuda.device_of(out):
        _merge_kernel[(triton.cdiv(S, BM), B * H)](
            out,
            lse,
            step_out,
            step_lse,
            target,
            merged_lse,
            *out.stride()[:3],
            *lse.stride(),
            *step_out.stride()[:3],
            *step_lse.stride(),
            *target.stride()[:3],
            S,
            H=H,
            D=D,
            DP=DP,
            BM=BM,
            num_warps=4,
        )
    return merged if target is merged else merged.copy_(target), merged_lse


def _rows(x: Tensor) -> Tensor:
    """x, or a copy if its last dim is not in one piece."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()

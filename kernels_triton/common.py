"""What the attention kernels share: tiles, one softmax step, checks of arguments.

Letters: B batch, H query heads, HK kv heads, G = H / HK, S tokens, D head dim, DP head
dim padded to a power of two, g granularity (block edge in tokens), N local blocks, BM
and BN rows and keys of a tile (both divide g).

Logits are kept in base 2: `exp2` is one instruction. With c = scale / ln 2,

    p = 2^(c q k - m),   lse = ln 2 (m + log2(sum of p))

A row that has seen no key has m = -inf and sum 0; it gives out 0 and lse -inf, and in a
backward pass p = 0, since its lse is read as +inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
_LN2 = tl.constexpr(LN2)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GRANULARITIES = (16, 32, 64, 128)
MAX_HEAD_DIM = 128


@triton.jit
def load(x, b, h, row, ROWS: tl.constexpr, DP: tl.constexpr):
    """x[b, h, row : row + ROWS] of a descriptor: [ROWS, DP], 0 beyond the head dim."""
    return tl.reshape(x.load([b, h, row, 0]), (ROWS, DP))


@triton.jit
def store(x, tile, b, h, row, ROWS: tl.constexpr, DP: tl.constexpr):
    """The inverse of `load`, in x's dtype; nothing beyond the head dim is written."""
    x.store([b, h, row, 0], tl.reshape(tile.to(x.dtype), (1, 1, ROWS, DP)))


@triton.jit
def softmax_step(acc, m, total, x, v, c, SAFE: tl.constexpr, PRECISION: tl.constexpr):
    """Fold one tile of logits into a running softmax.

    Args:
        acc: [BM, DP] fp32, sum of p v.
        m: [BM], largest logit so far in base 2.
        total: [BM], sum of p.
        x: [BM, BN] logits without the scale, -inf where masked.
        v: [BN, DP].
        c: scale / ln 2, positive.
        SAFE: whether a row may have seen no key yet.
    """
    top = tl.maximum(m, tl.max(x, 1) * c)
    shift = top
    if SAFE:
        shift = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(x * c - shift[:, None])
    alpha = tl.exp2(m - shift)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total


@triton.jit
def load_lse(lse, at):
    """Natural lse as the exponent's shift: +inf for a row without keys, so p = 0."""
    x = tl.load(lse + at) * (1.0 / _LN2)
    return tl.where(x == float("-inf"), float("inf"), x)


@triton.jit
def finish_softmax(acc, m, total):
    """out and natural lse of a running softmax; 0 and -inf in a row without a key."""
    empty = total == 0.0
    acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    return acc, (m + tl.log2(tl.where(empty, 1.0, total))) * _LN2


@triton.jit
def dq_tile(
    dq, q_tile, do_tile, lse, delta, k_tile, v_tile, keep, c,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dq (without the scale); lse in base 2."""
    x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BM, BN]
    p = tl.exp2(x * c - lse[:, None])
    if MASKED:
        p = tl.where(keep, p, 0.0)
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)


@triton.jit
def dkdv_tile(
    dk, dv, k_tile, v_tile, q_tile, do_tile, lse, delta, keep, c,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of queries to dk (without the scale) and dv; keep is transposed."""
    x = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [BN, BM]
    p = tl.exp2(x * c - lse[None, :])
    if MASKED:
        p = tl.where(keep, p, 0.0)
    dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
    dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@dataclass(frozen=True)
class Tile:
    """How a kernel is launched."""

    rows: int  # BM
    keys: int  # BN
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread


def tile_of(kernel: str, dtype: torch.dtype, granularity: int) -> Tile:
    """Tile and launch sizes of a kernel ("forward", "dq", "dkdv" or "columns").

    Two programs must fit a processor, so that one multiplies while the other takes
    exponents: hence the cap on registers, and two stages. Measured on H200 at D 128
    and 131072 tokens (`recipes/LOG.md`).
    """
    g = granularity
    if dtype == torch.float32:
        return Tile(min(g, 32), min(g, 32), 8 if g > 16 else 4, 2)  # exact, not fast
    if kernel == "forward" and g == 128:
        return Tile(128, 64, 8, 2, max_registers=128)
    if kernel == "columns" and g == 128:
        return Tile(64, 128, 8, 3)
    return Tile(min(g, 64), min(g, 64), 4, 2)


def launch_options(tile: Tile, q: Tensor, granularity: int) -> dict[str, Any]:
    """Constants that all attention kernels take."""
    return {
        "H": q.shape[1],
        "DP": triton.next_power_of_2(q.shape[3]),
        "g": granularity,
        "BM": tile.rows,
        "BN": tile.keys,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.max_registers,
    }


def written(x: Tensor, target: Tensor) -> Tensor:
    """x, after a kernel has written to `target = addressable(x)`."""
    return x if target.data_ptr() == x.data_ptr() else x.copy_(target)


def check_supported(granularity: int, head_dim: int, dtype: torch.dtype) -> None:
    """Refuse a shape or dtype that has no tile.

    Raises:
        ValueError: with the number and its bound.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"granularity ({granularity}) must be one of {list(GRANULARITIES)} for the "
            "Triton kernels"
        )
    if not 16 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(
            f"head_dim ({head_dim}) must be a multiple of 8 from 16 to {MAX_HEAD_DIM} "
            "for the Triton kernels"
        )
    if dtype not in DTYPES:
        raise ValueError(
            f"the Triton kernels compute bfloat16, float16 and float32, got {dtype}"
        )


def check_device_type(device_type: str, dtype: torch.dtype) -> None:
    """Refuse a device that the kernels, as they were imported, cannot run on.

    Raises:
        ValueError: says what to set.
    """
    if device_type == "cuda":
        return
    if isinstance(load, triton.JITFunction):
        raise ValueError(
            f"the Triton kernels need a CUDA device, got '{device_type}'; set "
            "TRITON_INTERPRET=1 before importing triton to interpret them on the CPU"
        )
    if dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter multiplies bfloat16 tiles wrongly; use float16 or "
            "float32 on the CPU"
        )
    # Of Triton 3.6 alone, which comes with torch 2.11.
    if _version(triton.__version__) < (3, 7) and _version(np.__version__) >= (2, 4):
        raise ValueError(
            f"the interpreter of Triton {triton.__version__} cannot loop with numpy "
            f"{np.__version__}; install numpy < 2.4"
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def check_device(x: Tensor) -> None:
    """`check_device_type` of a tensor."""
    check_device_type("cuda" if x.is_cuda else x.device.type, x.dtype)


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe [B, H, S, D] for tiles of some rows and the whole, padded head dim.

    Addresses are computed by the hardware, in 64 bits; what lies beyond D reads as 0.
    """
    block = [1, 1, rows, triton.next_power_of_2(x.shape[3])]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def addressable(x: Tensor) -> Tensor:
    """x as a descriptor can describe it; a copy if it cannot be.

    Its rows must be in one piece, and all strides and the base multiples of 16 bytes.
    The expanded gradient of `out.sum()` and oddly cut views are not.
    """
    unit = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and x.stride(-1) == 1
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        aligned &= size == 1 or (stride > 0 and stride % unit == 0)
    if not aligned:
        x = x.clone(memory_format=torch.contiguous_format)
    if all(stride % unit == 0 and stride > 0 for stride in x.stride()[:-1]):
        return x
    # Of a dimension of one element the stride says nothing, but it is looked at.
    strides = [
        stride if size > 1 else 16 * unit
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    return x.as_strided(x.shape, (*strides, 1))

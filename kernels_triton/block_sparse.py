"""Attention over the blocks of any lists: for patterns that are not vertical-slash.

One call computes one ring step. A query block attends to the key blocks in its two
lists: all pairs of a *full* block, and those with `k_pos <= q_pos` of a *partial* one;
in both only pairs of one document, if documents are given. The lists are those of
FlexAttention (`BlockLists`), so a BlockMask whose partial blocks are causal runs here.

The backward takes the *global* lse and delta = sum(out dout), so it recomputes nothing
of other steps. dq is made by query blocks from the kv tables, dk and dv by key blocks
from the q tables: every number is summed by one program in one order. There are no
atomics, and results repeat bit for bit. The query heads that share a kv head are served
by one program.

The twins in `naive.py` say what is computed and are the oracles.

Letters: B batch, H query heads, HK kv heads, G = H / HK, S queries, S_k keys, N = S / g
query blocks, M = S_k / g key blocks, C columns of a list, D head dim, DP D padded to a
power of two, g granularity, BM and BN rows and keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_triton.common import (
    LOG2E,
    Tile,
    addressable,
    check_device,
    check_supported,
    descriptor,
    dkdv_tile,
    dq_tile,
    finish_softmax,
    launch_options,
    load,
    load_lse,
    softmax_step,
    store,
    tile_of,
    written,
)
from kernels_triton.naive import BlockLists, check_block_sparse


@triton.jit
def _list_at(num, idx, C, b, h, block, blocks, stride_tb, stride_th):
    """Count and first entry of a block's list; lists are contiguous but for B and H."""
    at = (b.to(tl.int64) * stride_tb + h * stride_th) * blocks + block
    return tl.load(num + at), idx + at * C


@triton.jit
def _keep(
    q_pos, k_pos, q_doc, k_doc, rows, keys, CAUSAL: tl.constexpr, DOCS: tl.constexpr
):
    """Which pairs are kept: bool; of rows [BM, 1] and keys [1, BN], or transposed."""
    if CAUSAL:
        keep = tl.load(k_pos + keys) <= tl.load(q_pos + rows)
        if DOCS:
            keep &= tl.load(k_doc + keys) == tl.load(q_doc + rows)
    else:
        keep = tl.load(k_doc + keys) == tl.load(q_doc + rows)
    return keep


@triton.jit
def _forward_blocks(
    acc, m, total, q_tile, k, v, q_pos, k_pos, q_doc, k_doc, idx, count, b, hk, row, c,
    DP: tl.constexpr, g: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the key blocks of one list into a running softmax."""
    for i in range(0, count * (g // BN)):
        key = tl.load(idx + i // (g // BN)) * g + i % (g // BN) * BN
        k_tile = load(k, b, hk, key, BN, DP)
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if CAUSAL or DOCS:
            rows = row + tl.arange(0, BM)[:, None]
            keys = key + tl.arange(0, BN)[None, :]
            keep = _keep(q_pos, k_pos, q_doc, k_doc, rows, keys, CAUSAL, DOCS)
            x = tl.where(keep, x, float("-inf"))
        v_tile = load(v, b, hk, key, BN, DP)
        acc, m, total = softmax_step(
            acc, m, total, x, v_tile, c, CAUSAL or DOCS, PRECISION
        )
    return acc, m, total


@triton.jit
def _forward_kernel(
    q,  # [B, H, S, D]
    k,  # [B, HK, S_k, D]
    v,
    out,  # [B, H, S, D]
    lse,  # [B, H, S] contiguous
    kv_num,  # [B, H, N]
    kv_idx,  # [B, H, N, C]
    full_kv_num,
    full_kv_idx,  # [B, H, N, C_full]
    q_pos,  # [S]
    k_pos,  # [S_k]
    q_doc,  # [B, S]
    k_doc,  # [B, S_k]
    stride_tb,  # in rows of N; 0 where one stands for all
    stride_th,
    C,
    C_full,
    c,  # scale / ln 2
    S,
    S_k,
    H: tl.constexpr,
    G: tl.constexpr,
    DP: tl.constexpr,
    g: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DOCS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The last rows first: where lists are causal they are the longest.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    row = tile * BM
    block = row // g
    if DOCS:
        q_doc += b.to(tl.int64) * S
        k_doc += b.to(tl.int64) * S_k

    q_tile = load(q, b, h, row, BM, DP)
    acc = tl.zeros([BM, DP], dtype=tl.float32)
    m = tl.full([BM], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    count, idx = _list_at(
        full_kv_num, full_kv_idx, C_full, b, h, block, S // g, stride_tb, stride_th
    )
    acc, m, total = _forward_blocks(
        acc, m, total, q_tile, k, v, q_pos, k_pos, q_doc, k_doc, idx, count, b, h // G,
        row, c, DP, g, BM, BN, False, DOCS, PRECISION,
    )  # fmt: skip
    count, idx = _list_at(kv_num, kv_idx, C, b, h, block, S // g, stride_tb, stride_th)
    acc, m, total = _forward_blocks(
        acc, m, total, q_tile, k, v, q_pos, k_pos, q_doc, k_doc, idx, count, b, h // G,
        row, c, DP, g, BM, BN, True, DOCS, PRECISION,
    )  # fmt: skip

    acc, row_lse = finish_softmax(acc, m, total)
    store(out, acc, b, h, row, BM, DP)
    at = (b.to(tl.int64) * H + h) * S + row + tl.arange(0, BM)
    tl.store(lse + at, row_lse)


@triton.jit
def _dq_blocks(
    dq, q_tile, do_tile, row_lse, row_delta, k, v, q_pos, k_pos, q_doc, k_doc, idx,
    count, b, hk, row, c,
    DP: tl.constexpr, g: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the key blocks of one list to dq (without the scale); lse in base 2."""
    for i in range(0, count * (g // BN)):
        key = tl.load(idx + i // (g // BN)) * g + i % (g // BN) * BN
        k_tile = load(k, b, hk, key, BN, DP)
        v_tile = load(v, b, hk, key, BN, DP)
        rows = row + tl.arange(0, BM)[:, None]
        keys = key + tl.arange(0, BN)[None, :]
        keep = keys >= 0
        if CAUSAL or DOCS:
            keep = _keep(q_pos, k_pos, q_doc, k_doc, rows, keys, CAUSAL, DOCS)
        dq = dq_tile(
            dq, q_tile, do_tile, row_lse, row_delta, k_tile, v_tile, keep, c,
            CAUSAL or DOCS, PRECISION,
        )  # fmt: skip
    return dq


@triton.jit
def _dq_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dq_out,
    kv_num,
    kv_idx,
    full_kv_num,
    full_kv_idx,
    q_pos,
    k_pos,
    q_doc,
    k_doc,
    stride_tb,
    stride_th,
    C,
    C_full,
    c,
    scale,
    S,
    S_k,
    H: tl.constexpr,
    G: tl.constexpr,
    DP: tl.constexpr,
    g: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DOCS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    row = tile * BM
    block = row // g
    if DOCS:
        q_doc += b.to(tl.int64) * S
        k_doc += b.to(tl.int64) * S_k

    q_tile = load(q, b, h, row, BM, DP)
    do_tile = load(dout, b, h, row, BM, DP)
    at = (b.to(tl.int64) * H + h) * S + row + tl.arange(0, BM)
    row_lse = load_lse(lse, at)
    row_delta = tl.load(delta + at)
    dq = tl.zeros([BM, DP], dtype=tl.float32)
    count, idx = _list_at(
        full_kv_num, full_kv_idx, C_full, b, h, block, S // g, stride_tb, stride_th
    )
    dq = _dq_blocks(
        dq, q_tile, do_tile, row_lse, row_delta, k, v, q_pos, k_pos, q_doc, k_doc, idx,
        count, b, h // G, row, c, DP, g, BM, BN, False, DOCS, PRECISION,
    )  # fmt: skip
    count, idx = _list_at(kv_num, kv_idx, C, b, h, block, S // g, stride_tb, stride_th)
    dq = _dq_blocks(
        dq, q_tile, do_tile, row_lse, row_delta, k, v, q_pos, k_pos, q_doc, k_doc, idx,
        count, b, h // G, row, c, DP, g, BM, BN, True, DOCS, PRECISION,
    )  # fmt: skip
    store(dq_out, dq * scale, b, h, row, BM, DP)


@triton.jit
def _dkdv_blocks(
    dk, dv, k_tile, v_tile, q, dout, lse, delta, q_pos, k_pos, q_doc, k_doc, idx, count,
    b, h, key, c,
    DP: tl.constexpr, g: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the query blocks of one list to dk (without the scale) and dv; transposed."""
    for i in range(0, count * (g // BM)):
        row = tl.load(idx + i // (g // BM)) * g + i % (g // BM) * BM
        q_tile = load(q, b, h, row, BM, DP)
        do_tile = load(dout, b, h, row, BM, DP)
        row_lse = load_lse(lse, row + tl.arange(0, BM))
        row_delta = tl.load(delta + row + tl.arange(0, BM))
        rows = row + tl.arange(0, BM)[None, :]
        keys = key + tl.arange(0, BN)[:, None]
        keep = keys >= 0
        if CAUSAL or DOCS:
            keep = _keep(q_pos, k_pos, q_doc, k_doc, rows, keys, CAUSAL, DOCS)
        dk, dv = dkdv_tile(
            dk, dv, k_tile, v_tile, q_tile, do_tile, row_lse, row_delta, keep, c,
            CAUSAL or DOCS, PRECISION,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _dkdv_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk_out,  # [B, HK, S_k, D]
    dv_out,
    q_num,  # [B, H, M]
    q_idx,  # [B, H, M, C]
    full_q_num,
    full_q_idx,  # [B, H, M, C_full]
    q_pos,
    k_pos,
    q_doc,
    k_doc,
    stride_tb,
    stride_th,
    C,
    C_full,
    c,
    scale,
    S,
    S_k,
    H: tl.constexpr,
    G: tl.constexpr,
    DP: tl.constexpr,
    g: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DOCS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Where lists are causal, early keys are seen by the most queries; they come first.
    b = tl.program_id(1) // (H // G)
    hk = tl.program_id(1) % (H // G)
    key = tl.program_id(0) * BN
    block = key // g
    if DOCS:
        q_doc += b.to(tl.int64) * S
        k_doc += b.to(tl.int64) * S_k

    k_tile = load(k, b, hk, key, BN, DP)
    v_tile = load(v, b, hk, key, BN, DP)
    dk = tl.zeros([BN, DP], dtype=tl.float32)
    dv = tl.zeros([BN, DP], dtype=tl.float32)
    for j in range(G):
        h = hk * G + j
        rows = (b.to(tl.int64) * H + h) * S
        count, idx = _list_at(
            full_q_num, full_q_idx, C_full, b, h, block, S_k // g, stride_tb, stride_th
        )
        dk, dv = _dkdv_blocks(
            dk, dv, k_tile, v_tile, q, dout, lse + rows, delta + rows, q_pos, k_pos,
            q_doc, k_doc, idx, count, b, h, key, c, DP, g, BM, BN, False, DOCS,
            PRECISION,
        )  # fmt: skip
        count, idx = _list_at(
            q_num, q_idx, C, b, h, block, S_k // g, stride_tb, stride_th
        )
        dk, dv = _dkdv_blocks(
            dk, dv, k_tile, v_tile, q, dout, lse + rows, delta + rows, q_pos, k_pos,
            q_doc, k_doc, idx, count, b, h, key, c, DP, g, BM, BN, True, DOCS,
            PRECISION,
        )  # fmt: skip
    store(dk_out, dk * scale, b, hk, key, BN, DP)
    store(dv_out, dv, b, hk, key, BN, DP)


@dataclass(frozen=True)
class _Problem:
    """The arguments that all kernels of a call share, checked and addressable."""

    q: Tensor
    k: Tensor
    v: Tensor
    lists: BlockLists
    scale: float
    granularity: int
    pairs: tuple[Tensor, ...]
    """q_pos, k_pos, q_doc, k_doc; the documents are any two if there are none."""
    documents: bool

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lists: BlockLists,
        *,
        scale: float,
        granularity: int,
        q_pos: Tensor | None,
        k_pos: Tensor | None,
        q_doc: Tensor | None,
        k_doc: Tensor | None,
        check: bool,
        **rows: Tensor,
    ) -> _Problem:
        check_block_sparse(
            q, k, v, lists, granularity=granularity, q_pos=q_pos, k_pos=k_pos,
            q_doc=q_doc, k_doc=k_doc, values=check, **rows,
        )  # fmt: skip
        check_supported(granularity, q.shape[3], q.dtype)
        check_device(q)
        if not scale > 0:
            raise ValueError(f"scale ({scale}) must be positive")
        if q_pos is None:
            q_pos = torch.arange(q.shape[2], dtype=torch.int32, device=q.device)
        if k_pos is None:
            k_pos = torch.arange(k.shape[2], dtype=torch.int32, device=q.device)
        pairs = tuple(
            x.contiguous()
            for x in (
                q_pos,
                k_pos,
                q_pos if q_doc is None else q_doc,
                k_pos if k_doc is None else k_doc,
            )
        )
        return _Problem(
            addressable(q), addressable(k), addressable(v), lists, scale, granularity,
            pairs, q_doc is not None,
        )  # fmt: skip

    def tile(self, kernel: str) -> Tile:
        return tile_of(kernel, self.q.dtype, self.granularity)

    def tables(self, name: str) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """The lists by "kv" or "q"; their strides in rows, and both column counts."""
        num, idx, full_num, full_idx = (
            getattr(self.lists, f"{full}{name}_{part}").contiguous()
            for full in ("", "full_")
            for part in ("num", "idx")
        )
        batch, heads = num.shape[:2]
        strides = (heads if batch > 1 else 0, 1 if heads > 1 else 0)
        return (num, idx, full_num, full_idx), (
            *strides,
            idx.shape[-1],
            full_idx.shape[-1],
        )

    def options(self, tile: Tile) -> dict[str, Any]:
        group = self.q.shape[1] // self.k.shape[1]
        options = launch_options(tile, self.q, self.granularity)
        return {"G": group, "DOCS": self.documents, **options}


def block_sparse_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: BlockLists,
    *,
    scale: float,
    granularity: int,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_doc: Tensor | None = None,
    k_doc: Tensor | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention over the blocks of any lists.

    Arguments and errors as in `naive.block_sparse_forward`. q is bf16, fp16 or fp32,
    D a multiple of 8 from 16 to 128, g 16, 32, 64 or 128.

    Returns:
        out: [B, H, S, D] in q's dtype and memory order.
        lse: [B, H, S] fp32, natural.
    """
    problem = _Problem.of(
        q, k, v, lists, scale=scale, granularity=granularity, q_pos=q_pos, k_pos=k_pos,
        q_doc=q_doc, k_doc=k_doc, check=check,
    )  # fmt: skip
    tile = problem.tile("forward")
    (B, H, S, _), S_k = q.shape, k.shape[2]
    out = torch.empty_like(q)
    target = addressable(out)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    tables, strides = problem.tables("kv")
    with torch.cuda.device_of(q):
        _forward_kernel[(S // tile.rows, B * H)](
            descriptor(problem.q, tile.rows),
            descriptor(problem.k, tile.keys),
            descriptor(problem.v, tile.keys),
            descriptor(target, tile.rows),
            lse,
            *tables,
            *problem.pairs,
            *strides,
            scale * LOG2E,
            S,
            S_k,
            **problem.options(tile),
        )
    return written(out, target), lse


def block_sparse_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    lists: BlockLists,
    *,
    scale: float,
    granularity: int,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_doc: Tensor | None = None,
    k_doc: Tensor | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of these keys and of the queries through them.

    Arguments and errors as in `naive.block_sparse_backward`.

    Returns:
        dq: [B, H, S, D] in q's dtype and memory order.
        dk: [B, HK, S_k, D] fp32, contiguous; dv likewise.
    """
    problem = _Problem.of(
        q, k, v, lists, scale=scale, granularity=granularity, q_pos=q_pos, k_pos=k_pos,
        q_doc=q_doc, k_doc=k_doc, check=check, dout=dout, lse=lse, delta=delta,
    )  # fmt: skip
    (B, H, S, _), (HK, S_k) = q.shape, k.shape[1:3]
    rows = (lse.float().contiguous(), delta.float().contiguous())
    dout = addressable(dout)
    dq = torch.empty_like(q)
    target = addressable(dq)
    dk, dv = (
        torch.empty(k.shape, dtype=torch.float32, device=k.device) for _ in range(2)
    )
    numbers = (scale * LOG2E, scale, S, S_k)
    with torch.cuda.device_of(q):
        tile = problem.tile("dq")
        tables, strides = problem.tables("kv")
        _dq_kernel[(S // tile.rows, B * H)](
            descriptor(problem.q, tile.rows),
            descriptor(problem.k, tile.keys),
            descriptor(problem.v, tile.keys),
            descriptor(dout, tile.rows),
            *rows,
            descriptor(target, tile.rows),
            *tables,
            *problem.pairs,
            *strides,
            *numbers,
            **problem.options(tile),
        )
        tile = problem.tile("dkdv")
        tables, strides = problem.tables("q")
        _dkdv_kernel[(S_k // tile.keys, B * HK)](
            descriptor(problem.q, tile.rows),
            descriptor(problem.k, tile.keys),
            descriptor(problem.v, tile.keys),
            descriptor(dout, tile.rows),
            *rows,
            descriptor(dk, tile.keys),
            descriptor(dv, tile.keys),
            *tables,
            *problem.pairs,
            *strides,
            *numbers,
            **problem.options(tile),
        )
    return written(dq, target), dk, dv

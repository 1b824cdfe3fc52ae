"""Score all keys by a few probe rows: the first half of the pattern search, in Triton.

Path: probe rows -> `probe_row_stats` on each shard -> one lse per row over all ranks ->
`probe_scores` on each shard -> vertical and slash scores -> the pattern. The twins in
`naive.py` say what is computed and are its oracle.

One program owns one key block of one kv head. It loads the keys once and walks the G
query heads that share them; the logits of a head are one tile [RP, g] that never leaves
the registers. A block's numbers are made by one program in one order: no split, no
atomics, no tuning, and no tile that depends on the number of blocks, so they are the
same bits in every shard.

Rows of packed documents (`ProbeRows`) are P groups for each batch entry, and a program
scores one block for one group. Most blocks lie outside the group's document: their
programs see that from three numbers and leave before they load a key, so that P groups
read little more than the keys of their own documents. A program takes positions only
from its group's row of `ProbeRows`, never from the shard, and the values are data:
nothing is compiled for them.

Letters: B batch, H query heads, HK kv heads, G = H / HK, R probe rows, D head dim, g
granularity, N local key blocks, S = N * g, RG query blocks that the rows touch, C slash
columns; P groups of rows of a batch entry (B is then B P in q and the results); RP and
DP are R and D padded to powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_triton.common import check_device
from kernels_triton.naive import ProbeGeometry, ProbeRows, check_probe

MAX_ROWS = 128
"""Rows that fit one tile of logits in the registers."""

# `blocks`, `first_q` and the like differ between shards and steps: compiling once for
# all their values keeps one program, and with it one order of additions.
_UNSPECIALIZED = ["n_blocks", "first_q", "first_rel", "num_blocks"]


@triton.jit
def _load_tile(base, row_stride, col_stride, rows, cols, N_ROWS, N_COLS):
    """Load base[rows, cols] with zeros beyond [N_ROWS, N_COLS]; int64 addresses."""
    at = base + rows.to(tl.int64)[:, None] * row_stride
    at = at + cols.to(tl.int64)[None, :] * col_stride
    inside = (rows[:, None] < N_ROWS) & (cols[None, :] < N_COLS)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _is_unseen(blocks, block_idx, pos, start, b, R: tl.constexpr, GRAN: tl.constexpr):
    """Whether the block lies before the document of the rows, or after the last row."""
    first_pos = tl.load(blocks + block_idx).to(tl.int32) * GRAN
    before = first_pos + GRAN <= tl.load(start + b)
    return before | (first_pos > tl.load(pos + b * R + R - 1))


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _row_stats_kernel(
    q,  # [B, H, R, D]
    k,  # [B, HK, S, D]
    blocks,  # [N]
    row_max,  # [B, H, N, R] contiguous
    row_sum,  # [B, H, N, R] contiguous
    pos,  # [B, R] contiguous if DOCS, else None
    start,  # [B] likewise
    stride_qb,
    stride_qh,
    stride_qr,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    scale,
    n_blocks,
    first_q,  # None if DOCS
    HK: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DOCS: tl.constexpr,
    RP: tl.constexpr,
    DP: tl.constexpr,
    GRAN: tl.constexpr,
):
    block_idx = tl.program_id(0).to(tl.int64)
    b = (tl.program_id(1) // HK).to(tl.int64)
    kv_head = (tl.program_id(1) % HK).to(tl.int64)
    row_idx = tl.arange(0, RP)
    key_idx = tl.arange(0, GRAN)
    dim_idx = tl.arange(0, DP)

    if DOCS:
        if _is_unseen(blocks, block_idx, pos, start, b, R, GRAN):
            for i in range(G):
                head = kv_head * G + i
                at = ((b * HK * G + head) * n_blocks + block_idx) * R + row_idx
                nothing = tl.zeros([RP], tl.float32)
                tl.store(row_max + at, nothing - float("inf"), mask=row_idx < R)
                tl.store(row_sum + at, nothing, mask=row_idx < R)
            return

    k_base = (
        k + (b // P) * stride_kb + kv_head * stride_kh + block_idx * GRAN * stride_ks
    )
    keys = _load_tile(k_base, stride_ks, stride_kd, key_idx, dim_idx, GRAN, D)
    keys_t = tl.trans(keys)  # [DP, g]
    k_pos = tl.load(blocks + block_idx).to(tl.int32) * GRAN + key_idx
    if DOCS:
        row_pos = tl.load(pos + b * R + row_idx, mask=row_idx < R, other=0)
        seen = k_pos[None, :] <= row_pos[:, None]
        seen = seen & (k_pos >= tl.load(start + b))[None, :]  # [RP, g]
    else:
        seen = k_pos[None, :] <= first_q + row_idx[:, None]  # [RP, g]

    for i in range(G):
        head = kv_head * G + i
        q_base = q + b * stride_qb + head * stride_qh
        rows = _load_tile(q_base, stride_qr, stride_qd, row_idx, dim_idx, R, D)
        x = tl.dot(rows, keys_t, input_precision="ieee") * scale
        x = tl.where(seen, x, float("-inf"))  # [RP, g]
        top = tl.max(x, 1)
        # A row without keys would give -inf - -inf.
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(x - shift[:, None]), 1)
        at = ((b * HK * G + head) * n_blocks + block_idx) * R + row_idx
        tl.store(row_max + at, top, mask=row_idx < R)
        tl.store(row_sum + at, total, mask=row_idx < R)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _scores_kernel(
    q,  # [B, H, R, D]
    k,  # [B, HK, S, D]
    lse,  # [B, H, R] contiguous
    blocks,  # [N]
    vertical,  # [B, H, RG, S] contiguous
    slash,  # [B, H, N, C] contiguous
    pos,  # [B, R] contiguous if DOCS, else None
    start,  # [B] likewise
    stride_qb,
    stride_qh,
    stride_qr,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    scale,
    n_blocks,
    first_q,  # None if DOCS
    first_rel,  # first_q - (NB - 1) * g; None if DOCS
    num_blocks,  # NB if DOCS, else None
    HK: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    RG: tl.constexpr,
    C: tl.constexpr,
    DOCS: tl.constexpr,
    RP: tl.constexpr,
    DP: tl.constexpr,
    GRAN: tl.constexpr,
):
    block_idx = tl.program_id(0).to(tl.int64)
    b = (tl.program_id(1) // HK).to(tl.int64)
    kv_head = (tl.program_id(1) % HK).to(tl.int64)
    row_idx = tl.arange(0, RP)
    key_idx = tl.arange(0, GRAN)
    dim_idx = tl.arange(0, DP)

    if DOCS:
        if _is_unseen(blocks, block_idx, pos, start, b, R, GRAN):
            for i in range(G):
                out_head = b * HK * G + kv_head * G + i
                for j in tl.static_range(RG):
                    at = ((out_head * RG + j) * n_blocks + block_idx) * GRAN + key_idx
                    tl.store(vertical + at, tl.zeros([GRAN], tl.float32))
                for c in tl.static_range(C):
                    tl.store(slash + (out_head * n_blocks + block_idx) * C + c, 0.0)
            return

    k_base = (
        k + (b // P) * stride_kb + kv_head * stride_kh + block_idx * GRAN * stride_ks
    )
    keys = _load_tile(k_base, stride_ks, stride_kd, key_idx, dim_idx, GRAN, D)
    keys_t = tl.trans(keys)  # [DP, g]
    if DOCS:
        row_pos = tl.load(pos + b * R + row_idx, mask=row_idx < R, other=0)
        first_block = tl.load(pos + b * R) // GRAN
        top = first_block + RG - 1
        row_group = row_pos // GRAN - first_block  # [RP]
        row_rel = row_pos - top * GRAN
    else:
        row_group = (first_q % GRAN + row_idx) // GRAN  # [RP]
        row_rel = first_rel + row_idx

    # Where a pair lies between the slash columns: exact, since g is a power of two.
    column = row_rel.to(tl.float32)[:, None] * (1.0 / GRAN)
    column = column - key_idx.to(tl.float32)[None, :] * (1.0 / GRAN) + (C - 2)

    for i in range(G):
        head = kv_head * G + i
        out_head = b * HK * G + head
        q_base = q + b * stride_qb + head * stride_qh
        rows = _load_tile(q_base, stride_qr, stride_qd, row_idx, dim_idx, R, D)
        row_lse = tl.load(
            lse + out_head * R + row_idx, mask=row_idx < R, other=float("-inf")
        )
        # Rows of padding and rows without any key count for nothing: exp(x - inf) = 0.
        row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
        x = tl.dot(rows, keys_t, input_precision="ieee") * scale
        # Loaded again for each head, or the compiler would compute what depends on it
        # once and keep C more tiles in registers: half the programs on a processor.
        block = tl.load(blocks + block_idx).to(tl.int32)
        k_pos = block * GRAN + key_idx
        if DOCS:
            seen = k_pos[None, :] <= row_pos[:, None]
            seen = seen & (k_pos >= tl.load(start + b))[None, :]  # [RP, g]
        else:
            seen = k_pos[None, :] <= first_q + row_idx[:, None]  # [RP, g]
        p = tl.where(seen, tl.exp(x - row_lse[:, None]), 0.0)  # [RP, g]

        for j in tl.static_range(RG):
            if RG == 1:
                by_key = tl.sum(p, 0)
            else:
                by_key = tl.sum(tl.where((row_group == j)[:, None], p, 0.0), 0)
            at = ((out_head * RG + j) * n_blocks + block_idx) * GRAN + key_idx
            tl.store(vertical + at, by_key)

        # Block 0 reaches offset NB, which no pair of blocks has: keep it at NB - 1.
        if DOCS:
            # The column of NB - 1: far beyond C - 1 if no row is near the end.
            last_column = (num_blocks - 1 - top + block).to(tl.float32) + (C - 2.0)
        else:
            last_column = tl.where(block == 0, C - 2.0, C - 1.0)
        kept_column = tl.minimum(column, last_column)  # [RP, g]
        for c in tl.static_range(C):
            # From 1 on the column, linearly to 0 on its neighbours.
            share = tl.maximum(1.0 - tl.abs(kept_column - c), 0.0)
            by_offset = tl.sum(tl.sum(p * share, 1), 0)
            tl.store(slash + (out_head * n_blocks + block_idx) * C + c, by_offset)


def probe_row_stats(
    q: Tensor,
    k: Tensor,
    blocks: Tensor,
    *,
    first_q: int | None = None,
    scale: float,
    granularity: int,
    rows: ProbeRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax statistics of each probe row in each local key block.

    As `naive.probe_row_stats`, with both results in fp32. With `rows`, B is B P in q
    and in the results.

    Args:
        q: [B, H, R, D] bf16, fp16 or fp32; R at most 128, D from 16 to 128.
        k: [B, HK, S, D] of the same dtype, any strides.
        blocks: [N] int32 or int64.
        first_q: position of the first probe row; None with `rows`.
        scale: factor of the logits.
        granularity: 16, 32, 64 or 128.
        rows: where the rows of packed documents lie; None with `first_q`.

    Returns:
        row_max: [B, H, N, R] fp32, -inf where the row sees no key of the block.
        row_sum: [B, H, N, R] fp32, 0 there.

    Raises:
        ValueError: the arguments do not fit together or are not supported here.
    """
    geo = check_probe(q, k, blocks, first_q=first_q, granularity=granularity, rows=rows)
    _check_supported(q, geo)
    blocks = blocks.contiguous()
    shape = (geo.batch, geo.heads, geo.blocks, geo.rows)
    row_max = torch.empty(shape, dtype=torch.float32, device=q.device)
    row_sum = torch.empty_like(row_max)
    with torch.cuda.device_of(q):
        _row_stats_kernel[(geo.blocks, geo.batch * geo.kv_heads)](
            q,
            k,
            blocks,
            row_max,
            row_sum,
            *_contiguous(rows),
            *q.stride(),
            *k.stride(),
            float(scale),
            geo.blocks,
            first_q,
            HK=geo.kv_heads,
            G=geo.group,
            P=geo.probes,
            R=geo.rows,
            D=geo.head_dim,
            DOCS=rows is not None,
            GRAN=granularity,
            **_tile(geo),
        )
    return row_max, row_sum


def probe_scores(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    blocks: Tensor,
    *,
    first_q: int | None = None,
    seq_len: int,
    scale: float,
    granularity: int,
    rows: ProbeRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention mass of the probe rows by key and by block offset.

    As `naive.probe_scores`; q, k, blocks, rows as in `probe_row_stats`, lse [B, H, R]
    fp32 or fp64 (rounded to fp32 here).

    Returns:
        vertical: [B, H, RG, S] fp32.
        slash: [B, H, N, C] fp32, C = ceil(R / g) + 2, or RG + 2 with `rows`.

    Raises:
        ValueError: the arguments do not fit together or are not supported here.
    """
    geo = check_probe(
        q,
        k,
        blocks,
        first_q=first_q,
        granularity=granularity,
        lse=lse,
        seq_len=seq_len,
        rows=rows,
    )
    _check_supported(q, geo)
    blocks = blocks.contiguous()
    lse = lse.float().contiguous()
    B, H, N, g = geo.batch, geo.heads, geo.blocks, granularity
    vertical = torch.empty(
        B, H, geo.row_groups, N * g, dtype=torch.float32, device=q.device
    )
    slash = torch.empty(
        B, H, N, geo.slash_columns, dtype=torch.float32, device=q.device
    )
    with torch.cuda.device_of(q):
        _scores_kernel[(N, B * geo.kv_heads)](
            q,
            k,
            lse,
            blocks,
            vertical,
            slash,
            *_contiguous(rows),
            *q.stride(),
            *k.stride(),
            float(scale),
            N,
            first_q,
            None if first_q is None else first_q - (geo.num_blocks - 1) * g,
            None if rows is None else geo.num_blocks,
            HK=geo.kv_heads,
            G=geo.group,
            P=geo.probes,
            R=geo.rows,
            D=geo.head_dim,
            RG=geo.row_groups,
            C=geo.slash_columns,
            DOCS=rows is not None,
            GRAN=g,
            **_tile(geo),
        )
    return vertical, slash


def _contiguous(rows: ProbeRows | None) -> tuple[Tensor | None, Tensor | None]:
    """pos and start for a kernel."""
    if rows is None:
        return None, None
    return rows.pos.contiguous(), rows.start.contiguous()


def _tile(geo: ProbeGeometry) -> dict[str, int]:
    """Tile and launch sizes: a function of R, D and g alone, never of the shard."""
    rows = max(16, triton.next_power_of_2(geo.rows))
    return {
        "RP": rows,
        "DP": triton.next_power_of_2(geo.head_dim),
        "num_warps": 8 if rows * geo.granularity > 64 * 64 else 4,
        "num_stages": 2,
    }


def check_supported(
    probe_rows: int, granularity: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Refuse what these kernels have no tile for.

    Raises:
        ValueError: with the number and its bound.
    """
    if granularity not in (16, 32, 64, 128):
        raise ValueError(
            f"granularity ({granularity}) must be 16, 32, 64 or 128 for the Triton "
            "probe; use kernels_triton.naive"
        )
    if probe_rows > MAX_ROWS:
        raise ValueError(
            f"probe_rows ({probe_rows}) must be at most {MAX_ROWS} for the Triton probe"
        )
    if not 16 <= head_dim <= 128:
        raise ValueError(
            f"head_dim ({head_dim}) must be 16 to 128 for the Triton probe"
        )
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"q and k must be bfloat16, float16 or float32, got {dtype}")


def _check_supported(q: Tensor, geo: ProbeGeometry) -> None:
    check_supported(geo.rows, geo.granularity, geo.head_dim, q.dtype)
    check_device(q)

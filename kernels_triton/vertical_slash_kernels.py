"""The kernels of `vertical_slash`, where the idea and the letters stand.

All walk windows of a head's offset list, or tiles of its columns; what they do with a
tile is in `common`. There is more than one segment of queries and keys (X, Y) in the
zigzag layout alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels_triton.common import (
    LN2,
    dkdv_tile,
    dq_tile,
    finish_softmax,
    load,
    load_lse,
    softmax_step,
    store,
)
from kernels_triton.lists import SENTINEL

_SENTINEL = tl.constexpr(SENTINEL)
_LN2 = tl.constexpr(LN2)


@triton.jit
def _window(
    offsets,  # [C] ascending
    low,  # entries up to this one are before the window
    high,  # and entries behind this one after it
    C: tl.constexpr,
    CP: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """First entry, and entry behind the last, with low < t <= high."""
    entry = tl.arange(0, CP)
    t = tl.load(offsets + entry, mask=entry < C, other=_SENTINEL)
    last = tl.sum((t <= high).to(tl.int32), 0)
    first = last * 0
    if WINDOWED:
        first = tl.sum((t <= low).to(tl.int32), 0)
    return first, last


@triton.jit
def _row_window(
    offsets,
    a,  # query block within its segment
    n,
    first_key_row,  # first key row of the segment
    k_doc,  # document of each key
    doc_first,  # document of the block's first query
    C: tl.constexpr,
    CP: tl.constexpr,
    g: tl.constexpr,
    WINDOWED: tl.constexpr,
    DOCS: tl.constexpr,
):
    """The part of the list that a query block walks."""
    first, last = _window(offsets, a - n, a, C, CP, WINDOWED)
    if DOCS:
        # Later entries are earlier keys: those of earlier documents are a suffix.
        entry = tl.arange(0, CP)
        inside = (entry >= first) & (entry < last)
        t = tl.load(offsets + entry, mask=inside, other=0)
        end = first_key_row + (a - t + 1) * g - 1
        doc = tl.load(k_doc + end, mask=inside, other=-1)
        last = first + tl.sum((inside & (doc >= doc_first)).to(tl.int32), 0)
    return first, last


@triton.jit
def _keep_columns(
    pos,  # [BN] positions of columns
    bitmap,
    q_block,
    NB,
    q_pos,  # [BM, 1] or transposed; the documents alike
    q_doc,
    doc,
    EDGE: tl.constexpr,
    DOCS: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    g: tl.constexpr,
):
    """Which pairs with columns are kept: bool, one row for all queries if it can be.

    Where the tile is no EDGE, all of its real columns are before the queries.
    """
    real = pos < _SENTINEL
    # All queries of a block have the same block offset to a column.
    at = bitmap + NB + q_block - pos // g
    keep = tl.load(at, mask=real, other=1) == 0
    if ROWS_FIRST:
        keep = keep[None, :]
        pos = pos[None, :]
    else:
        keep = keep[:, None]
        pos = pos[:, None]
    if EDGE:
        keep = keep & (pos <= q_pos)
    if DOCS:
        keep = keep & (q_doc == doc)
    return keep


@triton.jit
def _attend(
    acc, m, total, q_tile, k, v, b, h, key, keep, c,
    BN: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys from `key` on into a running softmax."""
    k_tile = load(k, b, h, key, BN, DP)
    x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    if MASKED:
        x = tl.where(keep, x, float("-inf"))
    v_tile = load(v, b, h, key, BN, DP)
    return softmax_step(acc, m, total, x, v_tile, c, MASKED, PRECISION)


@triton.jit
def _add_dq(
    dq, q_tile, do_tile, lse, delta, k, v, b, h, key, keep, c,
    BN: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys from `key` on to dq."""
    k_tile = load(k, b, h, key, BN, DP)
    v_tile = load(v, b, h, key, BN, DP)
    return dq_tile(
        dq, q_tile, do_tile, lse, delta, k_tile, v_tile, keep, c, MASKED, PRECISION
    )


@triton.jit
def _add_dkdv(
    dk, dv, k_tile, v_tile, q, dout, lse, delta, b, h, row, keep, c,
    BM: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the queries from `row` on to dk and dv; lse and delta are the head's."""
    q_tile = load(q, b, h, row, BM, DP)
    do_tile = load(dout, b, h, row, BM, DP)
    row_lse = load_lse(lse, row + tl.arange(0, BM))
    row_delta = tl.load(delta + row + tl.arange(0, BM))
    return dkdv_tile(
        dk, dv, k_tile, v_tile, q_tile, do_tile, row_lse, row_delta, keep, c,
        MASKED, PRECISION,
    )  # fmt: skip


@triton.jit
def forward_kernel(
    q,  # [B, H, S, D]
    k,  # [B, HK, S_k, D]
    v,
    col_k,  # [B, H, NC, D]
    col_v,
    out,  # [B, H, S, D]
    lse,  # [B, H, S] contiguous
    offsets,  # [X Y, B, H, C]
    col_pos,  # [B, H, NC]
    bitmap,  # [B, H, 2 NB]
    q_blocks,  # [N]
    cols_before,  # [B, H, N]
    cols_visible,  # [B, H, N]
    run_out,  # [B, H, S, D]
    run_lse,  # [B, H, S] contiguous
    q_doc,  # [B, S]
    k_doc,  # [B, S_k]
    col_doc,  # [B, H, NC]
    stride_tp,
    stride_tb,
    stride_th,
    stride_pb,
    stride_ph,
    stride_mb,
    stride_mh,
    stride_nb,
    stride_nh,
    c,  # scale / ln 2
    S,
    S_k,
    n,
    NB,
    H: tl.constexpr,
    G: tl.constexpr,
    DP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    Y: tl.constexpr,
    g: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SLASHES: tl.constexpr,
    DIAGONAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNNING: tl.constexpr,
    DOCS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The longest rows first, so that none is left for the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    row = tile * BM
    block = row // g
    key_idx = tl.arange(0, BN)

    q_tile = load(q, b, h, row, BM, DP)
    stat_at = (b.to(tl.int64) * H + h) * S + row + tl.arange(0, BM)
    if RUNNING:
        acc = load(run_out, b, h, row, BM, DP).to(tl.float32)
        m = tl.load(run_lse + stat_at) * (1.0 / _LN2)
        seen = m != float("-inf")
        acc = tl.where(seen[:, None], acc, 0.0)
        total = seen.to(tl.float32)
    else:
        acc = tl.zeros([BM, DP], dtype=tl.float32)
        m = tl.full([BM], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BM], dtype=tl.float32)
    doc_first = 0
    rows = row + tl.arange(0, BM)[:, None]
    rows_doc = rows
    if DOCS:
        q_doc += b.to(tl.int64) * S
        rows_doc = tl.load(q_doc + rows)
        doc_first = tl.load(q_doc + row)

    if SLASHES:
        hk = h // G
        a = block % n
        if DOCS:
            k_doc += b.to(tl.int64) * S_k
        for y in tl.static_range(Y):
            pair = block // n * Y + y
            ts = offsets + pair * stride_tp + b * stride_tb + h * stride_th
            first, last = _row_window(
                ts, a, n, y * n * g, k_doc, doc_first, C, CP, g, WINDOWED, DOCS
            )
            if DIAGONAL:
                own = (block // n == y) & (tl.load(ts) == 0)
                if own:
                    first += 1
                    for i in range(0, tl.cdiv(row % g + BM, BN)):
                        key = block * g + i * BN
                        keep = (key + key_idx)[None, :] <= rows
                        if DOCS:
                            doc = tl.load(k_doc + key + key_idx)[None, :]
                            keep &= doc == rows_doc
                        acc, m, total = _attend(
                            acc, m, total, q_tile, k, v, b, hk, key, keep, c,
                            BN, DP, True, PRECISION,
                        )  # fmt: skip
            for i in range(first * (g // BN), last * (g // BN)):
                t = tl.load(ts + i // (g // BN))
                key = (y * n + a - t) * g + i % (g // BN) * BN
                keep = rows_doc == 0
                if DOCS:
                    keep = tl.load(k_doc + key + key_idx)[None, :] == rows_doc
                acc, m, total = _attend(
                    acc, m, total, q_tile, k, v, b, hk, key, keep, c,
                    BN, DP, DOCS, PRECISION,
                )  # fmt: skip

    if COLUMNS:
        col_pos += b * stride_pb + h * stride_ph
        bitmap += b * stride_mb + h * stride_mh
        count_at = b * stride_nb + h * stride_nh + block
        before = tl.load(cols_before + count_at) // BN
        visible = tl.cdiv(tl.load(cols_visible + count_at), BN)
        q_block = tl.load(q_blocks + block)
        q_pos = q_block * g + row % g + tl.arange(0, BM)[:, None]
        doc = key_idx
        if DOCS:
            col_doc += b * stride_pb + h * stride_ph
        for j in range(0, before):
            pos = tl.load(col_pos + j * BN + key_idx)
            if DOCS:
                doc = tl.load(col_doc + j * BN + key_idx)
            keep = _keep_columns(
                pos, bitmap, q_block, NB, q_pos, rows_doc, doc[None, :],
                False, DOCS, True, g,
            )  # fmt: skip
            acc, m, total = _attend(
                acc, m, total, q_tile, col_k, col_v, b, h, j * BN, keep, c,
                BN, DP, True, PRECISION,
            )  # fmt: skip
        for j in range(before, visible):
            pos = tl.load(col_pos + j * BN + key_idx)
            if DOCS:
                doc = tl.load(col_doc + j * BN + key_idx)
            keep = _keep_columns(
                pos, bitmap, q_block, NB, q_pos, rows_doc, doc[None, :],
                True, DOCS, True, g,
            )  # fmt: skip
            acc, m, total = _attend(
                acc, m, total, q_tile, col_k, col_v, b, h, j * BN, keep, c,
                BN, DP, True, PRECISION,
            )  # fmt: skip

    acc, row_lse = finish_softmax(acc, m, total)
    store(out, acc, b, h, row, BM, DP)
    tl.store(lse + stat_at, row_lse)


@triton.jit
def dq_kernel(
    q,
    k,
    v,
    col_k,
    col_v,
    dout,
    lse,
    delta,
    dq_out,
    offsets,
    col_pos,
    bitmap,
    q_blocks,
    cols_before,
    cols_visible,
    run_dq,
    q_doc,
    k_doc,
    col_doc,
    stride_tp,
    stride_tb,
    stride_th,
    stride_pb,
    stride_ph,
    stride_mb,
    stride_mh,
    stride_nb,
    stride_nh,
    c,
    scale,
    S,
    S_k,
    n,
    NB,
    H: tl.constexpr,
    G: tl.constexpr,
    DP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    Y: tl.constexpr,
    g: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SLASHES: tl.constexpr,
    DIAGONAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNNING: tl.constexpr,
    DOCS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    row = tile * BM
    block = row // g
    key_idx = tl.arange(0, BN)

    q_tile = load(q, b, h, row, BM, DP)
    do_tile = load(dout, b, h, row, BM, DP)
    stat_at = (b.to(tl.int64) * H + h) * S + row + tl.arange(0, BM)
    row_lse = load_lse(lse, stat_at)
    row_delta = tl.load(delta + stat_at)
    dq = tl.zeros([BM, DP], dtype=tl.float32)
    doc_first = 0
    rows = row + tl.arange(0, BM)[:, None]
    rows_doc = rows
    if DOCS:
        q_doc += b.to(tl.int64) * S
        rows_doc = tl.load(q_doc + rows)
        doc_first = tl.load(q_doc + row)

    if SLASHES:
        hk = h // G
        a = block % n
        if DOCS:
            k_doc += b.to(tl.int64) * S_k
        for y in tl.static_range(Y):
            pair = block // n * Y + y
            ts = offsets + pair * stride_tp + b * stride_tb + h * stride_th
            first, last = _row_window(
                ts, a, n, y * n * g, k_doc, doc_first, C, CP, g, WINDOWED, DOCS
            )
            if DIAGONAL:
                own = (block // n == y) & (tl.load(ts) == 0)
                if own:
                    first += 1
                    for i in range(0, tl.cdiv(row % g + BM, BN)):
                        key = block * g + i * BN
                        keep = (key + key_idx)[None, :] <= rows
                        if DOCS:
                            doc = tl.load(k_doc + key + key_idx)[None, :]
                            keep &= doc == rows_doc
                        dq = _add_dq(
                            dq, q_tile, do_tile, row_lse, row_delta, k, v, b, hk, key,
                            keep, c, BN, DP, True, PRECISION,
                        )  # fmt: skip
            for i in range(first * (g // BN), last * (g // BN)):
                t = tl.load(ts + i // (g // BN))
                key = (y * n + a - t) * g + i % (g // BN) * BN
                keep = rows_doc == 0
                if DOCS:
                    keep = tl.load(k_doc + key + key_idx)[None, :] == rows_doc
                dq = _add_dq(
                    dq, q_tile, do_tile, row_lse, row_delta, k, v, b, hk, key,
                    keep, c, BN, DP, DOCS, PRECISION,
                )  # fmt: skip

    if COLUMNS:
        col_pos += b * stride_pb + h * stride_ph
        bitmap += b * stride_mb + h * stride_mh
        count_at = b * stride_nb + h * stride_nh + block
        before = tl.load(cols_before + count_at) // BN
        visible = tl.cdiv(tl.load(cols_visible + count_at), BN)
        q_block = tl.load(q_blocks + block)
        q_pos = q_block * g + row % g + tl.arange(0, BM)[:, None]
        doc = key_idx
        if DOCS:
            col_doc += b * stride_pb + h * stride_ph
        for j in range(0, before):
            pos = tl.load(col_pos + j * BN + key_idx)
            if DOCS:
                doc = tl.load(col_doc + j * BN + key_idx)
            keep = _keep_columns(
                pos, bitmap, q_block, NB, q_pos, rows_doc, doc[None, :],
                False, DOCS, True, g,
            )  # fmt: skip
            dq = _add_dq(
                dq, q_tile, do_tile, row_lse, row_delta, col_k, col_v, b, h, j * BN,
                keep, c, BN, DP, True, PRECISION,
            )  # fmt: skip
        for j in range(before, visible):
            pos = tl.load(col_pos + j * BN + key_idx)
            if DOCS:
                doc = tl.load(col_doc + j * BN + key_idx)
            keep = _keep_columns(
                pos, bitmap, q_block, NB, q_pos, rows_doc, doc[None, :],
                True, DOCS, True, g,
            )  # fmt: skip
            dq = _add_dq(
                dq, q_tile, do_tile, row_lse, row_delta, col_k, col_v, b, h, j * BN,
                keep, c, BN, DP, True, PRECISION,
            )  # fmt: skip

    dq = dq * scale
    if RUNNING:
        dq += load(run_dq, b, h, row, BM, DP)
    store(dq_out, dq, b, h, row, BM, DP)


@triton.jit
def dkdv_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk_out,  # [B, HK, S_k, D] contiguous
    dv_out,
    offsets,
    q_doc,
    k_doc,
    stride_tp,
    stride_tb,
    stride_th,
    c,
    scale,
    S,
    S_k,
    n,
    H: tl.constexpr,
    G: tl.constexpr,
    DP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    g: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DIAGONAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    DOCS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Early keys are seen by the most queries, and come first.
    tile = tl.program_id(0)
    b = tl.program_id(1) // (H // G)
    hk = tl.program_id(1) % (H // G)
    key = tile * BN
    block = key // g
    y = block // n
    b_idx = block % n
    row_idx = tl.arange(0, BM)
    keys = key + tl.arange(0, BN)[:, None]

    k_tile = load(k, b, hk, key, BN, DP)
    v_tile = load(v, b, hk, key, BN, DP)
    dk = tl.zeros([BN, DP], dtype=tl.float32)
    dv = tl.zeros([BN, DP], dtype=tl.float32)
    keys_doc = keys
    doc_last = 0
    if DOCS:
        q_doc += b.to(tl.int64) * S
        k_doc += b.to(tl.int64) * S_k
        keys_doc = tl.load(k_doc + keys)
        doc_last = tl.load(k_doc + block * g + g - 1)

    for j in range(G):
        h = hk * G + j
        lse_h = lse + (b.to(tl.int64) * H + h) * S
        delta_h = delta + (b.to(tl.int64) * H + h) * S
        for x in tl.static_range(X):
            pair = x * Y + y
            ts = offsets + pair * stride_tp + b * stride_tb + h * stride_th
            # -b <= t < n - b
            first, last = _window(ts, -b_idx - 1, n - b_idx - 1, C, CP, WINDOWED)
            if DOCS:
                # Later entries are later queries: other documents are a suffix.
                entry = tl.arange(0, CP)
                inside = (entry >= first) & (entry < last)
                every = tl.load(ts + entry, mask=inside, other=0)
                at = q_doc + (x * n + b_idx + every) * g
                doc = tl.load(at, mask=inside, other=_SENTINEL)
                last = first + tl.sum((inside & (doc <= doc_last)).to(tl.int32), 0)
            if DIAGONAL:
                own = (x == y) & (tl.load(ts) == 0)
                if own:
                    first += 1
                    for i in range(key % g // BM, g // BM):
                        row = block * g + i * BM
                        keep = keys <= (row + row_idx)[None, :]
                        if DOCS:
                            keep &= keys_doc == tl.load(q_doc + row + row_idx)[None, :]
                        dk, dv = _add_dkdv(
                            dk, dv, k_tile, v_tile, q, dout, lse_h, delta_h, b, h, row,
                            keep, c, BM, DP, True, PRECISION,
                        )  # fmt: skip
            for i in range(first * (g // BM), last * (g // BM)):
                t = tl.load(ts + i // (g // BM))
                row = (x * n + b_idx + t) * g + i % (g // BM) * BM
                keep = keys >= 0
                if DOCS:
                    keep = keys_doc == tl.load(q_doc + row + row_idx)[None, :]
                dk, dv = _add_dkdv(
                    dk, dv, k_tile, v_tile, q, dout, lse_h, delta_h, b, h, row,
                    keep, c, BM, DP, DOCS, PRECISION,
                )  # fmt: skip

    dk = dk * scale
    store(dk_out, dk, b, hk, key, BN, DP)
    store(dv_out, dv, b, hk, key, BN, DP)


@triton.jit
def column_dkdv_kernel(
    q,
    col_k,
    col_v,
    dout,
    lse,
    delta,
    dk_out,  # [PARTS B, H, NC, D]
    dv_out,
    col_pos,
    bitmap,
    q_blocks,
    q_doc,
    col_doc,
    stride_pb,
    stride_ph,
    stride_mb,
    stride_mh,
    c,
    scale,
    S,
    NB,
    B: tl.constexpr,
    H: tl.constexpr,
    NP: tl.constexpr,  # query blocks, padded to a power of two
    DP: tl.constexpr,
    PARTS: tl.constexpr,
    g: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DOCS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    row_idx = tl.arange(0, BM)
    key_idx = tl.arange(0, BN)
    col = tile * BN

    col_pos += b * stride_pb + h * stride_ph
    bitmap += b * stride_mb + h * stride_mh
    pos = tl.load(col_pos + col + key_idx)
    real = pos < _SENTINEL
    k_tile = load(col_k, b, h, col, BN, DP)
    v_tile = load(col_v, b, h, col, BN, DP)
    dk = tl.zeros([BN, DP], dtype=tl.float32)
    dv = tl.zeros([BN, DP], dtype=tl.float32)
    keys_doc = key_idx[:, None]
    if DOCS:
        q_doc += b.to(tl.int64) * S
        col_doc += b * stride_pb + h * stride_ph + col
        keys_doc = tl.load(col_doc + key_idx)[:, None]

    # Query blocks before `start` see none of these columns; from `edge` on they lie
    # behind all of them. Each part takes an equal share of the rest.
    N = S // g
    entry = tl.arange(0, NP)
    blocks = tl.load(q_blocks + entry, mask=entry < N, other=_SENTINEL)
    first_block = tl.load(col_pos + col) // g
    last_block = tl.max(tl.where(real, pos, -1), 0) // g
    start = tl.sum((blocks < first_block).to(tl.int32), 0)
    edge = tl.sum((blocks <= last_block).to(tl.int32), 0)
    if last_block < 0:  # no column at all
        start = N
        edge = N
    share = tl.cdiv(N - start, PARTS)
    low = tl.minimum(start + part * share, N)
    high = tl.minimum(low + share, N)
    middle = tl.maximum(tl.minimum(edge, high), low)
    R: tl.constexpr = g // BM

    lse_h = lse + (b.to(tl.int64) * H + h) * S
    delta_h = delta + (b.to(tl.int64) * H + h) * S
    for i in range(low * R, middle * R):
        row = i * BM
        q_block = tl.load(q_blocks + i // R)
        q_pos = q_block * g + row % g + row_idx[None, :]
        doc = row_idx
        if DOCS:
            doc = tl.load(q_doc + row + row_idx)
        keep = _keep_columns(
            pos, bitmap, q_block, NB, q_pos, doc[None, :], keys_doc,
            True, DOCS, False, g,
        )  # fmt: skip
        dk, dv = _add_dkdv(
            dk, dv, k_tile, v_tile, q, dout, lse_h, delta_h, b, h, row,
            keep, c, BM, DP, True, PRECISION,
        )  # fmt: skip
    for i in range(middle * R, high * R):
        row = i * BM
        q_block = tl.load(q_blocks + i // R)
        q_pos = q_block * g + row % g + row_idx[None, :]
        doc = row_idx
        if DOCS:
            doc = tl.load(q_doc + row + row_idx)
        keep = _keep_columns(
            pos, bitmap, q_block, NB, q_pos, doc[None, :], keys_doc,
            False, DOCS, False, g,
        )  # fmt: skip
        dk, dv = _add_dkdv(
            dk, dv, k_tile, v_tile, q, dout, lse_h, delta_h, b, h, row,
            keep, c, BM, DP, True, PRECISION,
        )  # fmt: skip

    dk = dk * scale
    store(dk_out, dk, part * B + b, h, col, BN, DP)
    store(dv_out, dv, part * B + b, h, col, BN, DP)


@triton.jit
def delta_kernel(
    out,
    dout,
    delta,  # [B, H, S] contiguous
    S,
    H: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
):
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    row = tl.program_id(0) * BM
    o = load(out, b, h, row, BM, DP)
    do = load(dout, b, h, row, BM, DP)
    total = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = (b.to(tl.int64) * H + h) * S + row + tl.arange(0, BM)
    tl.store(delta + at, total)

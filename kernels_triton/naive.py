"""Slow twins: plain torch versions of the Triton kernels, with the same signatures.

They are the oracles of the kernel tests, and what runs where there is no GPU.

Letters: B batch, H query heads, HK kv heads, G = H / HK, D head dim, g granularity
(block edge in tokens), N local key blocks, S = N * g local keys, NB blocks of the
whole sequence, R probe rows, P groups of probe rows of one batch entry.

The probe
---------
The search for a pattern begins by scoring every key with a few probe rows, the last R
rows of the sequence. The keys of one shard are scored in two calls: `probe_row_stats`
gives the softmax statistics of each key block, which are merged over all blocks and
ranks into one `lse` per row; `probe_scores` then turns the logits into probabilities
and adds them up by key (vertical scores) and by block offset (slash scores).

Where documents share a sequence, no row sees another document's keys, and one set of
last rows would score one document alone. The rows then come as `ProbeRows`: P groups of
R rows for each batch entry, each group from one document.

A block must get the same bits in whatever shard it sits, or the number of ranks would
move a cut. Three things are done for that:

- Each (key block, kv head) has a matrix product of its own, of one fixed shape, whose
  right operand is contiguous. A batched product picks its code by the size of the
  batch, and a transposed right operand by the number of threads: both were seen to
  change the last bit.
- Sums are taken by halving (`_halving_sum`): additions of whole tensors, whose order
  follows from the length alone, not from threads or vector width.
- All else is elementwise, in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels_triton.lists import SENTINEL, Columns, Slashes, check_vertical_slash

# fp64 logits held at a time, with a handful of temporaries of the same size. A piece
# that stays in the cache is twice as fast as one of 64 MiB.
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class ProbeRows:
    """Probe rows of packed documents: each group of R rows is of one document.

    Group b * P + p belongs to batch entry b. A row sees the keys with
    start <= k_pos <= pos. The values are the device's alone: no check and no shape
    depends on them.
    """

    pos: Tensor
    """[B P, R] int32, not descending within a group, and pos[:, -1] - pos[:, 0] < R. A
    row that repeats counts as often as it stands there."""
    start: Tensor
    """[B P] int32, the position where the document of these rows begins."""


@dataclass(frozen=True)
class ProbeGeometry:
    """The numbers that fix a probe call's tiles; all of them checked.

    Built by `check_probe`. Positions are global.
    """

    batch: int
    """Entries of q: B, or B P of `ProbeRows`."""
    heads: int
    kv_heads: int
    rows: int
    """Probe rows R, at first_q .. first_q + R - 1 or where `ProbeRows` says."""
    head_dim: int
    blocks: int
    """Local key blocks N."""
    granularity: int
    first_q: int | None
    """None where `ProbeRows` are given."""
    seq_len: int | None
    """Tokens of the whole sequence; None where neither first_q nor the caller says."""
    probes: int = 1
    """Entries of q for each batch entry of k, P."""

    @property
    def group(self) -> int:
        """Query heads for each kv head, G."""
        return self.heads // self.kv_heads

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole sequence, NB."""
        assert self.seq_len is not None
        return self.seq_len // self.granularity

    @property
    def row_groups(self) -> int:
        """Query blocks that the probe rows touch, RG; of `ProbeRows`, at most."""
        if self.first_q is None:
            return (self.rows + self.granularity - 2) // self.granularity + 1
        return self.num_blocks - self.first_q // self.granularity

    @property
    def diagonal_column(self) -> int:
        """The slash column C - 2, for block offset top - kb: ceil(R / g), or RG.

        Where top is the last of the RG query blocks, and NB - 1 with first_q.
        """
        if self.first_q is None:
            return self.row_groups
        return -(-self.rows // self.granularity)

    @property
    def slash_columns(self) -> int:
        """C. Column c of block kb is offset top - kb - (C - 2) + c."""
        return self.diagonal_column + 2


def check_probe(
    q: Tensor,
    k: Tensor,
    blocks: Tensor,
    *,
    first_q: int | None,
    granularity: int,
    lse: Tensor | None = None,
    seq_len: int | None = None,
    rows: ProbeRows | None = None,
) -> ProbeGeometry:
    """Check a probe call's arguments and give its geometry.

    The values in `blocks` and `rows` are not looked at: that would wait for the device.

    Raises:
        ValueError: a shape, dtype, device or position does not fit, with both numbers.
    """
    if (first_q is None) == (rows is None):
        given = None if rows is None else tuple(rows.pos.shape)
        raise ValueError(
            f"give either first_q or rows, got first_q ({first_q}) and rows ({given})"
        )
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(
            f"q and k must be [B, H, R, D] and [B, HK, S, D], got {tuple(q.shape)} "
            f"and {tuple(k.shape)}"
        )
    B, H, R, D = q.shape
    HK, S = k.shape[1], k.shape[2]
    g = granularity
    if (rows is None and k.shape[0] != B) or k.shape[3] != D:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and head "
            "dim"
        )
    if min(B, H, R, D, k.shape[0], HK, S) < 1:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must not be empty")
    if H % HK:
        raise ValueError(f"query heads ({H}) must be a multiple of kv heads ({HK})")
    if g < 1:
        raise ValueError(f"granularity ({g}) must be positive")
    if blocks.ndim != 1 or blocks.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"blocks must be [N] of int32 or int64, got {tuple(blocks.shape)} of "
            f"{blocks.dtype}"
        )
    if S != blocks.shape[0] * g:
        raise ValueError(
            f"k has {S} keys, but {blocks.shape[0]} blocks of granularity {g} are "
            f"{blocks.shape[0] * g}"
        )
    if not q.is_floating_point() or q.dtype != k.dtype:
        raise ValueError(
            f"q and k must have one floating dtype, got {q.dtype} and {k.dtype}"
        )
    if not q.device == k.device == blocks.device:
        raise ValueError(
            f"q, k and blocks must be on one device, got {q.device}, {k.device} and "
            f"{blocks.device}"
        )
    if rows is not None:
        _check_rows(q, k, rows, g, seq_len)
    elif first_q is not None:
        seq_len = _check_last_rows(R, first_q, g, seq_len)
    if lse is not None:
        if tuple(lse.shape) != (B, H, R):
            raise ValueError(
                f"lse must be [B, H, R] = {(B, H, R)}, got {tuple(lse.shape)}"
            )
        if lse.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"lse must be float32 or float64, got {lse.dtype}")
        if lse.device != q.device:
            raise ValueError(f"lse is on {lse.device}, q on {q.device}")
    return ProbeGeometry(
        batch=B,
        heads=H,
        kv_heads=HK,
        rows=R,
        head_dim=D,
        blocks=blocks.shape[0],
        granularity=g,
        first_q=first_q,
        seq_len=seq_len,
        probes=B // k.shape[0],
    )


def _check_last_rows(R: int, first_q: int, g: int, seq_len: int | None) -> int:
    """Check where the last rows of the sequence lie and give its length."""
    if first_q < 0 or (first_q + R) % g:
        raise ValueError(
            f"first_q ({first_q}) must not be negative, and first_q + rows "
            f"({first_q} + {R} = {first_q + R}) must be a multiple of the granularity "
            f"({g})"
        )
    if seq_len is not None and seq_len != first_q + R:
        raise ValueError(
            f"the probe rows must be the last rows: first_q + rows ({first_q} + {R} = "
            f"{first_q + R}) must be seq_len ({seq_len})"
        )
    return first_q + R


def _check_rows(
    q: Tensor, k: Tensor, rows: ProbeRows, g: int, seq_len: int | None
) -> None:
    """Check the rows of packed documents, but for their values."""
    entries, _, R, _ = q.shape
    pos, start = rows.pos, rows.start
    if entries % k.shape[0]:
        raise ValueError(
            f"entries of q ({entries}) must be a multiple of the batch of k "
            f"({k.shape[0]})"
        )
    if tuple(pos.shape) != (entries, R) or tuple(start.shape) != (entries,):
        raise ValueError(
            f"rows.pos must be [B P, R] = {(entries, R)} and rows.start [B P] = "
            f"{(entries,)}, got {tuple(pos.shape)} and {tuple(start.shape)}"
        )
    if not pos.dtype == start.dtype == torch.int32:
        raise ValueError(
            f"rows.pos and rows.start must be int32, got {pos.dtype} and {start.dtype}"
        )
    if not pos.device == start.device == q.device:
        raise ValueError(
            f"rows.pos is on {pos.device} and rows.start on {start.device}, q on "
            f"{q.device}"
        )
    if seq_len is not None and (seq_len < 1 or seq_len % g):
        raise ValueError(
            f"seq_len ({seq_len}) must be a positive multiple of the granularity ({g})"
        )


@torch.no_grad()
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

    Args:
        q: the probe rows, [B, H, R, D], at positions first_q .. first_q + R - 1, which
            are the last of the sequence; with `rows` [B P, H, R, D], and B P for B in
            the results.
        k: the keys of this shard, [B, HK, S, D], any strides.
        blocks: global block index of each local block, [N] int32 or int64, any order,
            each in [0, NB).
        first_q: position of the first probe row; None with `rows`.
        scale: factor of the logits.
        granularity: block edge g in tokens; first_q + R must be a multiple of it.
        rows: where the rows of packed documents lie; None with `first_q`.

    Returns:
        row_max: [B, H, N, R] fp64, largest scaled logit among the block's keys that
            the row sees; -inf if it sees none.
        row_sum: [B, H, N, R] fp64, sum of exp(logit - row_max); 0 if it sees none.

    Raises:
        ValueError: the arguments do not fit together.
    """
    geo = check_probe(q, k, blocks, first_q=first_q, granularity=granularity, rows=rows)
    rows = _row_positions(geo, rows, q.device)
    row_max, row_sum = [], []
    for _, x in _logit_chunks(q, k, blocks, geo, rows, scale):
        top = x.amax(-1)  # [n, B, H, R]
        # A row without keys would give -inf - -inf.
        shift = torch.where(top == -torch.inf, 0.0, top)
        row_max.append(top)
        row_sum.append(_halving_sum(x.sub_(shift[..., None]).exp_(), -1))
    # [N, B, H, R] -> [B, H, N, R]
    return (
        torch.cat(row_max).permute(1, 2, 0, 3).contiguous(),
        torch.cat(row_sum).permute(1, 2, 0, 3).contiguous(),
    )


@torch.no_grad()
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

    With P = exp(logit - lse), 0 where the row does not see the key. A pair at token
    distance s = q_pos - k_pos gives the share 1 - (s % g) / g of its P to block offset
    s // g and the rest to the next one, as the rows of its diagonal do.

    Args:
        q, k, blocks, first_q, scale, granularity, rows: as in `probe_row_stats`.
        lse: [B, H, R] fp32 or fp64, natural log of the sum of exp(logit) over the keys
            of all shards; -inf makes a row count for nothing.
        seq_len: tokens of the whole sequence, NB * g; first_q + R without `rows`.

    Returns:
        vertical: [B, H, RG, S] fp32, for each local key the sum of P over the probe
            rows in query block first_q // g + j.
        slash: [B, H, N, C] fp32, C = ceil(R / g) + 2. Column c of the local block
            with global index kb is block offset NB - 1 - kb - ceil(R / g) + c. Offset
            NB, which only block 0 can reach and no pair of blocks has, is counted as
            NB - 1, so that slash.sum() is the sum of all P. Columns of offsets outside
            [0, NB) are 0.

        With `rows`, which may lie anywhere, the tiles are as large as the worst case:
        RG = (R + g - 2) // g + 1 query blocks from pos[:, 0] // g on, of which
        top = pos[:, 0] // g + RG - 1 is the last, perhaps beyond NB - 1; C = RG + 2,
        and column c is block offset top - kb - RG + c.

    Raises:
        ValueError: the arguments do not fit together.
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
    lse = lse.double()
    lse = torch.where(lse == -torch.inf, torch.inf, lse)[..., None]  # [B, H, R, 1]
    rows = _row_positions(geo, rows, q.device)
    weights = _slash_weights(geo, rows)
    column = torch.arange(geo.slash_columns, device=q.device)
    vertical, slash = [], []
    for chunk_blocks, x in _logit_chunks(q, k, blocks, geo, rows, scale):
        p = x.sub_(lse).exp_()  # [n, B, H, R, g]
        vertical.append(_sum_by_row_group(p, geo, rows))  # [n, B, H, RG, g]

        by_offset = torch.stack(
            [_halving_sum((p * w).flatten(-2), -1) for w in weights], -1
        )  # [n, B, H, C]
        diagonal = _top_block(geo, rows) - chunk_blocks[:, None]  # [n, B]
        offset = diagonal[:, :, None, None] - geo.diagonal_column + column
        beyond = torch.where(offset == geo.num_blocks, by_offset, 0.0)
        by_offset -= beyond
        by_offset[..., :-1] += beyond[..., 1:]
        slash.append(by_offset)
    # [N, B, H, RG, g] -> [B, H, RG, N, g] -> [B, H, RG, S]
    return (
        torch.cat(vertical).permute(1, 2, 3, 0, 4).flatten(-2).float(),
        torch.cat(slash).permute(1, 2, 0, 3).float().contiguous(),
    )


def _row_positions(
    geo: ProbeGeometry, rows: ProbeRows | None, device: torch.device
) -> ProbeRows:
    """The rows in int64; the last rows as one group, [1, R], that stands for any b."""
    if rows is not None:
        return ProbeRows(rows.pos.long(), rows.start.long())
    assert geo.first_q is not None
    pos = geo.first_q + torch.arange(geo.rows, device=device)
    return ProbeRows(pos[None], pos.new_zeros(1))


def _top_block(geo: ProbeGeometry, rows: ProbeRows) -> Tensor:
    """The last of the RG query blocks, [B]; NB - 1 with first_q."""
    return rows.pos[:, 0] // geo.granularity + geo.row_groups - 1


def _sum_by_row_group(p: Tensor, geo: ProbeGeometry, rows: ProbeRows) -> Tensor:
    """Add [n, B, H, R, g] up over the rows of each query block: [n, B, H, RG, g]."""
    g = geo.granularity
    by_key = []
    for j in range(geo.row_groups):
        if geo.first_q is None:
            here = rows.pos // g == rows.pos[:, :1] // g + j  # [B, R]
            by_key.append(_halving_sum(torch.where(here[:, None, :, None], p, 0.0), -2))
        else:
            group_start = j * g - geo.first_q % g  # row where the query block begins
            lo, hi = max(0, group_start), min(geo.rows, group_start + g)
            by_key.append(_halving_sum(p[..., lo:hi, :], -2))
    return torch.stack(by_key, -2)


def _slash_weights(geo: ProbeGeometry, rows: ProbeRows) -> Tensor:
    """Share of each (row, key of a block) in each slash column, [C, B, 1, R, g] fp64.

    It is the same for every block: moving a key by g moves the offset by 1, and the
    columns of its block with it.
    """
    g = geo.granularity
    top_pos = _top_block(geo, rows)[:, None] * g + torch.arange(
        g, device=rows.pos.device
    )  # [B, g]
    s = rows.pos[:, :, None] - top_pos[:, None]  # [B, R, g], negative above diagonal
    offset = s.div(g, rounding_mode="floor") + geo.diagonal_column
    share = s.remainder(g).double() / g
    column = torch.arange(geo.slash_columns, device=s.device)[:, None, None, None]
    weights = torch.where(column == offset, 1 - share, 0.0) + torch.where(
        column == offset + 1, share, 0.0
    )
    return weights[:, :, None]


def _logit_chunks(
    q: Tensor,
    k: Tensor,
    blocks: Tensor,
    geo: ProbeGeometry,
    rows: ProbeRows,
    scale: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (blocks [n], scaled and masked logits [n, B, H, R, g] fp64) piece by piece.

    The logits are the caller's to overwrite.
    """
    B, H, HK, R, D = geo.batch, geo.heads, geo.kv_heads, geo.rows, geo.head_dim
    g, G = geo.granularity, geo.group
    q_rows = q.double().reshape(B, HK, G * R, D)
    key_idx = torch.arange(g, device=q.device)
    step = max(1, _CHUNK_BYTES // (B * H * R * g * 8))
    for start in range(0, geo.blocks, step):
        chunk_blocks = blocks[start : start + step].long()
        n = chunk_blocks.shape[0]
        keys = k[:, :, start * g : (start + n) * g].double()
        # [B, HK, n * g, D] -> [n, B, HK, D, g]
        keys = keys.unflatten(2, (n, g)).permute(2, 0, 1, 4, 3).contiguous()
        x = q_rows.new_empty(n, B, HK, G * R, g)
        for a in range(n):
            for b in range(B):
                for h in range(HK):
                    torch.mm(q_rows[b, h], keys[a, b // geo.probes, h], out=x[a, b, h])
        x = x.mul_(scale).view(n, B, H, R, g)
        k_pos = chunk_blocks[:, None, None, None] * g + key_idx  # [n, 1, 1, g]
        unseen = k_pos > rows.pos[:, :, None]  # [n, B, R, g]
        unseen |= k_pos < rows.start[:, None, None]
        yield chunk_blocks, x.masked_fill_(unseen[:, :, None], -torch.inf)


def _halving_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim` by adding one half to the other until one element is left.

    Unlike torch.sum, its order of additions depends on the length alone.
    """
    while (n := x.shape[dim]) > 1:
        half = n // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        if n % 2:
            folded.narrow(dim, 0, 1).add_(x.narrow(dim, n - 1, 1))
        x = folded
    return x.squeeze(dim)


# --- vertical slash -------------------------------------------------------------------


def _vertical_slash_mask(
    q: Tensor,
    k_len: int,
    slashes: Slashes | None,
    columns: Columns | None,
    granularity: int,
    q_doc: Tensor | None,
    k_doc: Tensor | None,
) -> Tensor:
    """Which pairs are kept: bool [B, H, S, S_k + NC], keys first, then columns."""
    B, H, S, _ = q.shape
    g, device = granularity, q.device
    row = torch.arange(S, device=device)[:, None]
    parts = []
    if slashes is not None:
        key = torch.arange(k_len, device=device)
        n = S // g // slashes.q_segments
        q_block, k_block = row // g, key // g
        pair = q_block // n * slashes.k_segments + k_block // n  # [S, S_k]
        offset = q_block % n - k_block % n
        kept = torch.zeros(B, H, S, k_len, dtype=torch.bool, device=device)
        for c in range(slashes.offsets.shape[-1]):
            kept |= slashes.offsets[..., c].movedim(0, -1)[..., pair] == offset
        if slashes.diagonal:
            kept &= (q_block != k_block) | (key <= row)
        if q_doc is not None and k_doc is not None:
            kept &= (q_doc[:, :, None] == k_doc[:, None])[:, None]
        parts.append(kept)
    if columns is not None:
        pos = columns.pos.long()[:, :, None]  # [B, H, 1, NC]
        block = columns.q_blocks.long()[row // g]  # [S, 1]
        real = pos < SENTINEL
        at = columns.bitmap.shape[-1] // 2 + block - torch.where(real, pos, 0) // g
        bitmap = columns.bitmap[:, :, None].expand(*at.shape[:2], S, -1)
        seen = real & (pos <= block * g + row % g) & ~bitmap.gather(-1, at)
        seen = seen.expand(B, H, -1, -1)
        if q_doc is not None and columns.doc is not None:
            seen = seen & (q_doc[:, None, :, None] == columns.doc[:, :, None])
        parts.append(seen)
    return torch.cat(parts, -1)


def _all_keys(
    x: Tensor | None, columns: Tensor | None, heads: int
) -> Tensor:  # [B, H, S_k + NC, D] fp64
    parts = [] if x is None else [x.repeat_interleave(heads // x.shape[1], 1)]
    if columns is not None:
        parts.append(columns)
    return torch.cat(parts, 2).double()


@torch.no_grad()
def vertical_slash_forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slashes: Slashes | None,
    columns: Columns | None,
    *,
    scale: float,
    granularity: int,
    q_doc: Tensor | None = None,
    k_doc: Tensor | None = None,
    running: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of a shard's queries along slashes and columns.

    Args:
        q: [B, H, S, D], S a multiple of g.
        k: [B, HK, S_k, D], HK divides H; v likewise. None without slashes.
        slashes: the block diagonals, or None.
        columns: the gathered columns, or None.
        scale: factor of the logits, positive.
        granularity: block edge g in tokens.
        q_doc: int32 [B, S], document of each query, not descending along a segment;
            pairs of different documents are not kept. None: one document.
        k_doc: int32 [B, S_k].
        running: (out, natural lse) of other keys, to be continued.
        dtype: of out, by default q's (here: fp64 always).
        check: look at the values in the lists, too.

    Returns:
        out: [B, H, S, D]; 0 in a row without a key.
        lse: [B, H, S], natural; -inf in a row without a key.

    Raises:
        ValueError: the arguments do not fit together.
    """
    check_vertical_slash(
        q, k, v, slashes, columns, granularity=granularity, q_doc=q_doc, k_doc=k_doc,
        values=check,
    )  # fmt: skip
    heads = q.shape[1]
    k = k if slashes is not None else None
    keys = _all_keys(k, columns.k if columns else None, heads)
    values = _all_keys(
        v if slashes is not None else None, columns.v if columns else None, heads
    )
    kept = _vertical_slash_mask(
        q, 0 if k is None else k.shape[2], slashes, columns, granularity, q_doc, k_doc
    )
    x = scale * q.double() @ keys.mT
    x = x.masked_fill(~kept, -torch.inf)
    if running is not None:
        # The partial result is one more key: its lse the logit, its out the value.
        x = torch.cat([x, running[1].double()[..., None]], -1)
    lse = x.logsumexp(-1)
    p = (x - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    size = keys.shape[2]
    out = p[..., :size] @ values
    if running is not None:
        before = running[0].double().masked_fill(p[..., size:] == 0, 0.0)
        out += p[..., size:] * before
    return out, lse


@torch.no_grad()
def vertical_slash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    slashes: Slashes | None,
    columns: Columns | None,
    *,
    scale: float,
    granularity: int,
    q_doc: Tensor | None = None,
    k_doc: Tensor | None = None,
    running: Tensor | None = None,
    dtype: torch.dtype | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of these keys and of the queries through them.

    Args:
        dout: [B, H, S, D].
        lse: [B, H, S], the *global* natural lse, over all keys of all steps.
        delta: [B, H, S], sum of out * dout over D (`delta`), with the global out.
        running: dq of other keys, to be added to.
        dtype: of dq, by default q's (here: fp64 always).
        Others as in `vertical_slash_forward`.

    Returns:
        dq: [B, H, S, D].
        dkv: [2, B, HK, S_k, D] fp32 (here: fp64), dk and dv; None without slashes.
        dcolumns: [2, B, H, NC, D] likewise; None without columns. 0 in columns behind
            the last.

    Raises:
        ValueError: the arguments do not fit together.
    """
    check_vertical_slash(
        q, k, v, slashes, columns, granularity=granularity, q_doc=q_doc, k_doc=k_doc,
        values=check,
    )  # fmt: skip
    heads = q.shape[1]
    k = k if slashes is not None else None
    keys = _all_keys(k, columns.k if columns else None, heads)
    values = _all_keys(
        v if slashes is not None else None, columns.v if columns else None, heads
    )
    size = 0 if k is None else k.shape[2]
    kept = _vertical_slash_mask(q, size, slashes, columns, granularity, q_doc, k_doc)
    q64, do = q.double(), dout.double()
    x = (scale * q64 @ keys.mT).masked_fill(~kept, -torch.inf)
    lse = lse.double()
    p = (x - torch.where(lse == -torch.inf, torch.inf, lse)[..., None]).exp()
    ds = p * (do @ values.mT - delta.double()[..., None]) * scale
    dq = ds @ keys
    if running is not None:
        dq += running.double()
    both = torch.stack([ds.mT @ q64, p.mT @ do])  # [2, B, H, S_k + NC, D]
    dkv = dcolumns = None
    if k is not None:
        dkv = both[:, :, :, :size].unflatten(2, (k.shape[1], -1)).sum(3)
    if columns is not None:
        dcolumns = both[:, :, :, size:]
    return dq, dkv, dcolumns


@torch.no_grad()
def delta(out: Tensor, dout: Tensor) -> Tensor:
    """Sum of out * dout over the head dim, which every backward step needs.

    Args:
        out: [B, H, S, D], the global result; dout likewise.

    Returns:
        [B, H, S] fp32 (here: fp64).
    """
    return (out.double() * dout.double()).sum(-1)


# --- block_sparse ---------------------------------------------------------------------


@dataclass(frozen=True)
class BlockLists:
    """Which blocks are computed: FlexAttention's tables, int32.

    N query blocks, M key blocks; B and H may be 1 and then stand for all, alike in all
    eight. Entries behind a count are not read; those before it ascend. A block is in a
    partial list, where causality is looked at pair by pair, or in a full one, where it
    is not; in both it would count twice. The q tables are the kv tables transposed.
    """

    kv_num: Tensor
    """[B, H, N] partial key blocks of each query block."""
    kv_idx: Tensor
    """[B, H, N, C]"""
    full_kv_num: Tensor
    """[B, H, N] full key blocks of each query block."""
    full_kv_idx: Tensor
    """[B, H, N, C'], where C' need not be C; likewise R'."""
    q_num: Tensor
    """[B, H, M] partial query blocks of each key block."""
    q_idx: Tensor
    """[B, H, M, R]"""
    full_q_num: Tensor
    """[B, H, M] full query blocks of each key block."""
    full_q_idx: Tensor
    """[B, H, M, R']"""


def check_block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: BlockLists,
    *,
    granularity: int,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_doc: Tensor | None = None,
    k_doc: Tensor | None = None,
    dout: Tensor | None = None,
    lse: Tensor | None = None,
    delta: Tensor | None = None,
    values: bool = True,
) -> None:
    """Check that the arguments of a block-sparse call fit together.

    Args:
        values: look into the lists too. That waits for the device and makes maps of
            N * M blocks.

    Raises:
        ValueError: what does not fit, with both numbers.
    """
    g = granularity
    if q.ndim != 4 or k.ndim != 4 or v.shape != k.shape:
        raise ValueError(
            "q must be [B, H, S, D], k and v [B, HK, S_k, D], got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    (B, H, S, D), (HK, S_k) = q.shape, k.shape[1:3]
    if k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and head "
            "dim"
        )
    if min(B, H, S, D, HK, S_k) < 1:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must not be empty")
    if H % HK:
        raise ValueError(f"query heads ({H}) must be a multiple of kv heads ({HK})")
    if g < 1 or S % g or S_k % g:
        raise ValueError(
            f"queries ({S}) and keys ({S_k}) must be multiples of the granularity ({g})"
        )
    for name, x in (("q_pos", q_pos), ("k_pos", k_pos)):
        length = S if name == "q_pos" else S_k
        if x is not None:
            _check_like(name, x, (length,), (torch.int32,), q.device)
    if (q_doc is None) != (k_doc is None):
        raise ValueError("q_doc and k_doc must be given together")
    if q_doc is not None and k_doc is not None:
        _check_like("q_doc", q_doc, (B, S), (torch.int32,), q.device)
        _check_like("k_doc", k_doc, (B, S_k), (torch.int32,), q.device)
    _check_like("k", k, k.shape, (q.dtype,), q.device)
    _check_like("v", v, k.shape, (q.dtype,), q.device)
    if dout is not None:
        _check_like("dout", dout, q.shape, (q.dtype,), q.device)
    statistics = (torch.float32, torch.float64)
    for name, x in (("lse", lse), ("delta", delta)):
        if x is not None:
            _check_like(name, x, (B, H, S), statistics, q.device)
    _check_lists(lists, q, S // g, S_k // g, values)


def _check_like(
    name: str,
    x: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if tuple(x.shape) != tuple(shape) or x.dtype not in dtypes or x.device != device:
        raise ValueError(
            f"{name} must be {tuple(shape)} of {' or '.join(map(str, dtypes))} on "
            f"{device}, got {tuple(x.shape)} of {x.dtype} on {x.device}"
        )


def _check_lists(lists: BlockLists, q: Tensor, n: int, m: int, values: bool) -> None:
    lead = tuple(lists.kv_num.shape[:2])
    if len(lead) < 2 or any(
        x not in (1, y) for x, y in zip(lead, q.shape[:2], strict=True)
    ):
        raise ValueError(
            f"the lists' batch and heads {lead} must each be 1 or those of q "
            f"{tuple(q.shape[:2])}"
        )
    int32 = (torch.int32,)
    for name, rows, columns in _LISTS:
        size, bound = (n, m) if rows == "N" else (m, n)
        num, idx = getattr(lists, f"{name}_num"), getattr(lists, f"{name}_idx")
        _check_like(f"{name}_num", num, (*lead, size), int32, q.device)
        width = idx.shape[-1] if idx.ndim else 0
        _check_like(f"{name}_idx", idx, (*lead, size, width), int32, q.device)
        if values:
            _check_list(name, num, idx, bound, columns)
    if not values:
        return
    partial = block_map(lists.kv_num, lists.kv_idx, m)
    full = block_map(lists.full_kv_num, lists.full_kv_idx, m)
    if (both := partial & full).any():
        b, h, row, key = both.nonzero()[0].tolist()
        raise ValueError(
            f"key block {key} of query block {row} (batch {b}, head {h}) is in kv_idx "
            "and in full_kv_idx, and would count twice"
        )
    for name, by_row in (("", partial), ("full_", full)):
        num, idx = getattr(lists, f"{name}q_num"), getattr(lists, f"{name}q_idx")
        by_key = block_map(num, idx, n).mT
        if (wrong := by_row != by_key).any():
            b, h, row, key = wrong.nonzero()[0].tolist()
            there, missing = f"{name}kv_idx", f"{name}q_idx"
            if by_key[b, h, row, key]:
                there, missing = missing, there
            raise ValueError(
                f"query block {row} and key block {key} (batch {b}, head {h}) are in "
                f"{there} but not in {missing}"
            )


# Name of a list, its rows and what its entries are.
_LISTS = (
    ("kv", "N", "key"),
    ("full_kv", "N", "key"),
    ("q", "M", "query"),
    ("full_q", "M", "query"),
)


def _check_list(name: str, num: Tensor, idx: Tensor, bound: int, what: str) -> None:
    """Counts and the entries before them."""
    width = idx.shape[-1]
    wrong = (num < 0) | (num > width)
    if wrong.any():
        raise ValueError(
            f"{name}_num ({int(num[wrong][0])}) must be from 0 to the columns of "
            f"{name}_idx ({width})"
        )
    valid = torch.arange(width, device=idx.device) < num[..., None]
    wrong = valid & ((idx < 0) | (idx >= bound))
    if wrong.any():
        raise ValueError(
            f"{name}_idx ({int(idx[wrong][0])}) must be a {what} block in [0, {bound})"
        )
    # An int32 difference of garbage may overflow, but is not looked at.
    wrong = valid[..., 1:] & (idx.diff(dim=-1) <= 0)
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        pair = idx[(*at[:-1], slice(at[-1], at[-1] + 2))].tolist()
        raise ValueError(f"{name}_idx must be strictly ascending, got {pair} at {at}")


def block_map(num: Tensor, idx: Tensor, blocks: int) -> Tensor:
    """Lists as a map: bool [B, H, rows, blocks]."""
    width = idx.shape[-1]
    valid = torch.arange(width, device=idx.device) < num[..., None]
    place = torch.where(valid, idx, blocks).long()
    kept = torch.zeros(*num.shape, blocks + 1, dtype=torch.bool, device=idx.device)
    return kept.scatter_(-1, place, True)[..., :blocks]


def _block_sparse_mask(
    lists: BlockLists,
    q: Tensor,
    k: Tensor,
    granularity: int,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    q_doc: Tensor | None,
    k_doc: Tensor | None,
) -> Tensor:
    """Which pairs are computed: bool [B or 1, H or 1, S, S_k].

    From the kv tables alone.
    """
    S, S_k = q.shape[2], k.shape[2]
    q_pos = torch.arange(S, device=q.device) if q_pos is None else q_pos
    k_pos = torch.arange(S_k, device=q.device) if k_pos is None else k_pos
    partial, full = (
        block_map(num, idx, S_k // granularity)
        .repeat_interleave(granularity, 2)
        .repeat_interleave(granularity, 3)
        for num, idx in (
            (lists.kv_num, lists.kv_idx),
            (lists.full_kv_num, lists.full_kv_idx),
        )
    )
    kept = full | (partial & (k_pos <= q_pos[:, None]))
    if q_doc is not None and k_doc is not None:
        kept = kept & (q_doc[:, None, :, None] == k_doc[:, None, None, :])
    return kept


@torch.no_grad()
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

    Args:
        q: [B, H, S, D], S a multiple of g.
        k: [B, HK, S_k, D], S_k a multiple of g, HK divides H; v likewise.
        lists: the blocks. A full block keeps every pair, a partial one those with
            k_pos <= q_pos.
        scale: factor of the logits, positive.
        granularity: block edge g in tokens.
        q_pos: int32 [S], position of each query; k_pos: int32 [S_k]. Default: arange.
        q_doc: int32 [B, S], document of each query; k_doc: int32 [B, S_k]. Pairs of
            different documents are not kept. None: one document.
        check: look at the values in the lists, too.

    Returns:
        out: [B, H, S, D]; 0 in a row without a key.
        lse: [B, H, S], natural; -inf in a row without a key.

    Raises:
        ValueError: the arguments do not fit together.
    """
    check_block_sparse(
        q, k, v, lists, granularity=granularity, q_pos=q_pos, k_pos=k_pos, q_doc=q_doc,
        k_doc=k_doc, values=check,
    )  # fmt: skip
    kept = _block_sparse_mask(lists, q, k, granularity, q_pos, k_pos, q_doc, k_doc)
    heads = q.shape[1]
    x = scale * q.double() @ _all_keys(k, None, heads).mT
    x = x.masked_fill(~kept, -torch.inf)
    lse = x.logsumexp(-1)
    p = (x - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    return p @ _all_keys(v, None, heads), lse


@torch.no_grad()
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

    Args:
        dout: [B, H, S, D].
        lse: [B, H, S], the *global* natural lse, over all keys of all steps.
        delta: [B, H, S], sum of out * dout over D (`delta`), with the global out.
        Others as in `block_sparse_forward`.

    Returns:
        dq: [B, H, S, D] in q's dtype (here: fp64).
        dk: [B, HK, S_k, D] fp32 (here: fp64); dv likewise.

    Raises:
        ValueError: the arguments do not fit together.
    """
    check_block_sparse(
        q, k, v, lists, granularity=granularity, q_pos=q_pos, k_pos=k_pos, q_doc=q_doc,
        k_doc=k_doc, dout=dout, lse=lse, delta=delta, values=check,
    )  # fmt: skip
    kept = _block_sparse_mask(lists, q, k, granularity, q_pos, k_pos, q_doc, k_doc)
    heads, kv_heads = q.shape[1], k.shape[1]
    keys, values = _all_keys(k, None, heads), _all_keys(v, None, heads)
    q64, do, lse = q.double(), dout.double(), lse.double()
    x = (scale * q64 @ keys.mT).masked_fill(~kept, -torch.inf)
    p = (x - torch.where(lse == -torch.inf, torch.inf, lse)[..., None]).exp()
    ds = p * (do @ values.mT - delta.double()[..., None]) * scale
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (ds.mT @ q64, p.mT @ do))
    return ds @ keys, dk, dv


# --- merge ----------------------------------------------------------------------------


def check_merge(out: Tensor, lse: Tensor, step_out: Tensor, step_lse: Tensor) -> None:
    """Check that two partial results can be merged.

    Raises:
        ValueError: a shape, dtype or device does not fit, with both.
    """
    if out.ndim != 4 or out.numel() == 0:
        raise ValueError(f"out must be [B, H, S, D], not empty, got {tuple(out.shape)}")
    floats = (torch.float32, torch.bfloat16, torch.float16)
    _check_like("out", out, out.shape, floats, out.device)
    _check_like("step_out", step_out, out.shape, floats, out.device)
    for name, x in (("lse", lse), ("step_lse", step_lse)):
        _check_like(name, x, out.shape[:3], (torch.float32,), out.device)


@torch.no_grad()
def merge(
    out: Tensor,
    lse: Tensor,
    step_out: Tensor,
    step_lse: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine two partial results over disjoint keys.

    A row whose lse is -inf has weight 0, whatever stands in its out; two of them give
    out 0 and lse -inf.

    Args:
        out: [B, H, S, D] fp32, bf16 or fp16, any strides; step_out likewise.
        lse: [B, H, S] fp32, natural; step_lse likewise.
        dtype: of the merged out, by default fp32 (here: fp64 always).

    Returns:
        out: [B, H, S, D] in the memory order of out.
        lse: [B, H, S] fp32 (here: fp64).

    Raises:
        ValueError: the arguments do not fit together.
    """
    check_merge(out, lse, step_out, step_lse)
    both = torch.stack([lse.double(), step_lse.double()])
    top = both.amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = (both - top).exp()
    total = weights.sum(0)
    merged = torch.zeros_like(out, dtype=torch.float64)
    for part, weight in zip((out, step_out), weights, strict=True):
        share = torch.where(total == 0, 0.0, weight / total)[..., None]
        merged += torch.where(share == 0, 0.0, share * part.double())
    return merged, top + total.log()

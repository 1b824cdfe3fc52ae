"""A pattern and two shards to the block mask of one ring step, in closed form.

Two kinds of step exist. A *slash step* meets this rank's queries with one rank's keys
and computes the slashes between them. The *vertical step* meets them with the gathered
columns and computes the verticals that no slash keeps. Each gets the four table pairs
of FlexAttention's BlockMask (partial and full blocks, by query row and by key column)
and a `mask_mod` that states the whole truth; the tables only index it, and a test holds
the two equal.

Slash step. For two segments of a layout (`layout`) with first blocks s_q and s_k,
stride w and n blocks each, local blocks a and b are `(a - b) w + s_q - s_k` blocks
apart. A slash d is thus the local diagonal `t = (d - (s_q - s_k)) / w` if that divides,
and none otherwise. With T the ascending local diagonals of a head,

    row a     keeps  a - t  for  a - n < t <= a     a window of T
    column b  keeps  b + t  for  -b <= t < n - b    a window of T

so a table is a shifted copy of T: no sort per row and no [N, N] map. In the striped
layout t is never negative, and each window starts at 0. The diagonal block (d = 0) is
the only partial one.

Documents (`pattern.documents`) end a window early. A query block sees no key block that
ends before its first query's document begins, and a key block is seen by no query block
that begins behind its last key's document: both keep the windows contiguous, and two
more counts cut them. Of what is left a block is full if its first key is of the last
query's document, which again is the front of a window; the rest is partial.

The hand-written kernels read T itself (`slash_lists`), with offset 0 where a rank meets
its own keys, and of the columns their positions and two counts (`column_lists`).

Letters: N blocks per shard, NS columns of a slash table, J column blocks of the
vertical step, NB global blocks, g granularity.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mtraining_flex.compat import fused
from mtraining_flex.layout import Layout, positions_on
from mtraining_flex.pattern.types import SENTINEL, VerticalSlash


@dataclass(frozen=True)
class Tables:
    """FlexAttention's block lists, int32; the pattern's B and H, which may be 1.

    On torch 2.11 the kernels read full and partial lists with one stride: each pair has
    equal column counts.
    """

    kv_num: Tensor  # [B, H, N] partial key blocks of a query block
    kv_idx: Tensor  # [B, H, N, C]
    full_kv_num: Tensor  # [B, H, N]
    full_kv_idx: Tensor  # [B, H, N, C]
    q_num: Tensor  # [B, H, M] partial query blocks of a key block
    q_idx: Tensor  # [B, H, M, R]
    full_q_num: Tensor  # [B, H, M]
    full_q_idx: Tensor  # [B, H, M, R]

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def executed(self) -> Tensor:
        """Blocks that this step computes, per head: int64 [B, H]."""
        return (self.kv_num + self.full_kv_num).sum(-1)


@dataclass(frozen=True)
class SlashLists:
    """The local diagonals of a slash step, T of every pair of segments."""

    offsets: Tensor  # int32 [X Y, B, H, C], ascending, padded with SENTINEL
    q_segments: int  # X
    k_segments: int  # Y
    diagonal: bool  # the keys are the queries' own: t = 0 of a pair (x, x) is causal
    windowed: bool  # t can be negative
    n: int  # blocks of a segment
    q_documents: Tensor | None = None  # int32 [B, S_q], where the document begins
    k_documents: Tensor | None = None  # int32 [B, S_k]

    def executed(self) -> Tensor:
        """Blocks that this step computes, per head: int64 [B, H]."""
        if self.q_documents is None or self.k_documents is None:
            blocks = (self.n - self.offsets.abs()).clamp(min=0)
            return blocks.long().sum(-1).sum(0)
        n, g = self.n, self.q_documents.shape[1] // (self.q_segments * self.n)
        total: Tensor | None = None
        for x in range(self.q_segments):
            for y in range(self.k_segments):
                t = self.offsets[x * self.k_segments + y]  # [B, H, C]
                seen = _Documents.of(self.q_documents, self.k_documents, x, y, n, g)
                local = torch.arange(n, dtype=torch.int32, device=t.device)
                t = t.expand(seen.first_key.shape[0], *t.shape[1:]).contiguous()
                high, low = (
                    torch.searchsorted(
                        t,
                        bound[:, None].expand(-1, t.shape[1], -1).contiguous(),
                        right=True,
                    )
                    for bound in (
                        local - seen.first_key,
                        (local - n).expand_as(seen.first_key),
                    )
                )
                blocks = (high - low).sum(-1)
                total = blocks if total is None else total + blocks
        assert total is not None
        return total


@dataclass(frozen=True)
class ColumnLists:
    """The columns of a vertical step, and how many each query block sees."""

    pos: Tensor  # int32 [B, H, J g], ascending, SENTINEL behind the last
    bitmap: Tensor  # bool [B, H, 2 NB]
    q_blocks: Tensor  # int32 [N]
    before: Tensor  # int32 [B, H, N] columns before the query block
    visible: Tensor  # int32 [B, H, N] columns up to its end
    granularity: int
    q_documents: Tensor | None = None  # int32 [B, S_q], where the document begins
    documents: Tensor | None = None  # int32 [B, H, J g], likewise of each column

    def executed(self) -> Tensor:
        """Blocks of columns that this step computes, per head: int64 [B, H]."""
        g = self.granularity
        return ((self.visible.long() + g - 1) // g).sum(-1)


@dataclass(frozen=True)
class StepMask:
    """What one step computes, in the two forms that backends read.

    Tables and the tensors of `mask_mod` are for FlexAttention and eager math, lists for
    the hand-written kernels, which walk the offsets themselves. Each is built when it
    is first asked for, and kept.
    """

    kind: str  # "slash" or "vertical"
    q_len: int
    kv_len: int
    granularity: int
    build_tables: Callable[[], tuple[Tables, tuple[Tensor, ...]]]
    build_lists: Callable[[], "SlashLists | ColumnLists"]
    documents: bool = False  # whether there are several

    @cached_property
    def _tables_and_buffers(self) -> tuple[Tables, tuple[Tensor, ...]]:
        return self.build_tables()

    @property
    def tables(self) -> Tables:
        return self._tables_and_buffers[0]

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Arguments of the kind's mask function."""
        return self._tables_and_buffers[1]

    @cached_property
    def lists(self) -> "SlashLists | ColumnLists":
        return self.build_lists()

    @property
    def name(self) -> str:
        """Of the mask function in `MASKS`."""
        return f"{self.kind}_documents" if self.documents else self.kind

    @property
    def truth(self) -> Callable[..., Tensor]:
        """The mask function, which takes the buffers as well."""
        return MASKS[self.name]

    @property
    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        truth, buffers = self.truth, self.buffers
        return lambda b, h, q, kv: truth(b, h, q, kv, *buffers)

    @property
    def kernel_mask(self) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """What a kernel that obeys the tables must still look up, and its buffers.

        It evaluates partial blocks only. In a slash step those are kept diagonal
        blocks, where causality is all that is left of the truth (5 to 8 % of the time
        on H200), and those where a document begins.
        """
        if self.kind == "vertical":
            return self.truth, self.buffers
        if not self.documents:
            return diagonal_mask, ()
        q_pos, kv_pos, _, _, start, _ = self.buffers
        return document_mask, (q_pos, kv_pos, start)

    def block_mask(self) -> BlockMask:
        """As a BlockMask, with the tables as they are and the whole truth."""
        return build_block_mask(
            self.tables, self.q_len, self.kv_len, self.granularity, self.mask_mod
        )


def build_block_mask(
    tables: Tables,
    q_len: int,
    kv_len: int,
    granularity: int,
    mask_mod: Callable[..., Tensor],
) -> BlockMask:
    """A BlockMask from ready tables (`from_kv_blocks` would sort a dense map)."""
    return BlockMask(
        seq_lengths=(q_len, kv_len),
        kv_num_blocks=tables.kv_num,
        kv_indices=tables.kv_idx,
        full_kv_num_blocks=tables.full_kv_num,
        full_kv_indices=tables.full_kv_idx,
        q_num_blocks=tables.q_num,
        q_indices=tables.q_idx,
        full_q_num_blocks=tables.full_q_num,
        full_q_indices=tables.full_q_idx,
        BLOCK_SIZE=(granularity, granularity),
        mask_mod=mask_mod,
    )


def slash_mask(
    b: Tensor | slice,
    h: Tensor | slice,
    q: Tensor,
    kv: Tensor,
    q_pos: Tensor,  # int32 [S_q]
    kv_pos: Tensor,  # int32 [S_kv]
    q_row: Tensor,  # int32 [S_q], NB + block of the query
    kv_row: Tensor,  # int32 [S_kv], block of the key
    bitmap: Tensor,  # bool [B, H, 2 NB]
) -> Tensor:
    """Causal, and in a kept slash."""
    return (kv_pos[kv] <= q_pos[q]) & bitmap[b, h, q_row[q] - kv_row[kv]]


def vertical_mask(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    q_pos: Tensor,  # int32 [S_q]
    column_pos: Tensor,  # int32 [B, H, J g], SENTINEL behind the last column
    q_row: Tensor,  # int32 [S_q], NB + block of the query
    column_row: Tensor,  # int32 [B, H, J g], block of the column
    bitmap: Tensor,  # bool [B, H, 2 NB]
) -> Tensor:
    """Causal, and in no kept slash: what a slash keeps is computed there."""
    kept = bitmap[b, h, q_row[q] - column_row[b, h, kv]]
    return (column_pos[b, h, kv] <= q_pos[q]) & ~kept


def document_mask(
    b: Tensor | slice,
    h: Tensor | slice,
    q: Tensor,
    kv: Tensor,
    q_pos: Tensor,  # int32 [S_q]
    kv_pos: Tensor,  # int32 [S_kv]
    start: Tensor,  # int32 [B, H, S_q], where the query's document begins
) -> Tensor:
    """Causal, and of the query's document."""
    return (kv_pos[kv] <= q_pos[q]) & (kv_pos[kv] >= start[b, h, q])


def slash_documents_mask(
    b: Tensor | slice,
    h: Tensor | slice,
    q: Tensor,
    kv: Tensor,
    q_pos: Tensor,
    kv_pos: Tensor,
    q_row: Tensor,
    kv_row: Tensor,
    start: Tensor,  # int32 [B, H, S_q], where the query's document begins
    bitmap: Tensor,
) -> Tensor:
    """`slash_mask` within a document."""
    kept = slash_mask(b, h, q, kv, q_pos, kv_pos, q_row, kv_row, bitmap)
    return kept & (kv_pos[kv] >= start[b, h, q])


def vertical_documents_mask(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    q_pos: Tensor,
    column_pos: Tensor,
    q_row: Tensor,
    column_row: Tensor,
    start: Tensor,  # int32 [B, H, S_q], where the query's document begins
    bitmap: Tensor,
) -> Tensor:
    """`vertical_mask` within a document."""
    kept = vertical_mask(b, h, q, kv, q_pos, column_pos, q_row, column_row, bitmap)
    return kept & (column_pos[b, h, kv] >= start[b, h, q])


MASKS: dict[str, Callable[..., Tensor]] = {
    "slash": slash_mask,
    "vertical": vertical_mask,
    "slash_documents": slash_documents_mask,
    "vertical_documents": vertical_documents_mask,
}


def diagonal_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Causal inside a diagonal block, by local indices."""
    return kv <= q


def slash_step(
    pattern: VerticalSlash,
    bitmap: Tensor,
    layout: Layout,
    q_rank: int,
    kv_rank: int,
    heads: tuple[int, int],
) -> StepMask:
    """The slashes between the queries of one rank and the keys of another.

    Args:
        bitmap: `slash_bitmap` of the pattern.
        heads: (B, H) of the queries.
    """
    return StepMask(
        "slash",
        layout.local_len,
        layout.local_len,
        layout.granularity,
        lambda: _slash_parts(pattern, bitmap, layout, q_rank, kv_rank, heads),
        lambda: slash_lists(pattern, layout, q_rank, kv_rank),
        pattern.documents is not None,
    )


def _slash_parts(
    pattern: VerticalSlash,
    bitmap: Tensor,
    layout: Layout,
    q_rank: int,
    kv_rank: int,
    heads: tuple[int, int],
) -> tuple[Tables, tuple[Tensor, ...]]:
    """Tables and mask buffers of a slash step."""
    device = pattern.slash.device
    q_pos, q_row = _positions(layout, q_rank, device, shift=layout.num_blocks)
    kv_pos, kv_row = _positions(layout, kv_rank, device, shift=0)
    shape = _Shape.of(pattern, layout)
    base = _bases(layout, q_rank, kv_rank, device)
    if pattern.documents is not None:
        start = pattern.documents[:, q_pos]  # [B, S_q]
        own = q_rank == kv_rank
        found = fused(
            ("document_tables", shape, own),
            partial(_document_tables, shape=shape, own=own),
            pattern.slash,
            base,
            start,
            pattern.documents[:, kv_pos],
        )
        start = start[:, None].expand(*heads, -1)
        kept = bitmap.expand(*heads, -1)
        return Tables(*found), (q_pos, kv_pos, q_row, kv_row, start, kept)
    full = fused(
        ("slash_tables", shape),
        lambda slash, base: _slash_tables(slash, base, shape),
        pattern.slash,
        base,
    )
    diagonal = _diagonal_table(full[1].shape, device)
    if q_rank == kv_rank:
        # Only the diagonal block is partial, where offset 0 is kept.
        num = (pattern.slash[..., :1] == 0).int().expand_as(full[0]).contiguous()
    else:
        num = torch.zeros_like(full[0])
    tables = Tables(num, diagonal, full[0], full[1], num, diagonal, full[2], full[3])
    return tables, (q_pos, kv_pos, q_row, kv_row, bitmap.expand(*heads, -1))


def slash_lists(
    pattern: VerticalSlash, layout: Layout, q_rank: int, kv_rank: int
) -> SlashLists:
    """The slashes between two shards as lists of local diagonals."""
    shape, own = _Shape.of(pattern, layout), q_rank == kv_rank
    segments = len(layout.segments(q_rank))
    if layout.cp_size == 1 and segments == 1:
        offsets = pattern.slash[None]  # already local
    else:

        def call(slash: Tensor, base: Tensor) -> Tensor:
            pairs = [
                _Diagonals(slash, each, shape, with_own=own and x == y).t
                for x, row in enumerate(base)
                for y, each in enumerate(row)
            ]
            return torch.stack(pairs)

        offsets = fused(
            ("slash_lists", shape, own),
            call,
            pattern.slash,
            _bases(layout, q_rank, kv_rank, pattern.slash.device),
        )
    documents: tuple[Tensor | None, ...] = None, None
    if pattern.documents is not None:
        device = pattern.slash.device
        documents = tuple(
            pattern.documents[:, positions_on(layout, rank, device)]
            for rank in (q_rank, kv_rank)
        )
    return SlashLists(
        offsets, segments, segments, own, shape.windowed, shape.n, *documents
    )


def vertical_step(
    pattern: VerticalSlash,
    bitmap: Tensor,
    layout: Layout,
    q_rank: int,
    heads: tuple[int, int],
) -> StepMask:
    """The verticals for the queries of one rank, against the gathered columns.

    Columns are ascending, so a query block sees a prefix of column blocks and a column
    block is seen by a suffix of query blocks. All blocks are partial: a column is
    dropped wherever a slash keeps its block.
    """
    g = layout.granularity
    return StepMask(
        "vertical",
        layout.local_len,
        pattern.vertical.shape[-1] + -pattern.vertical.shape[-1] % g,
        g,
        lambda: _vertical_parts(pattern, bitmap, layout, q_rank, heads),
        lambda: column_lists(pattern, bitmap, layout, q_rank),
        pattern.documents is not None,
    )


def _vertical_parts(
    pattern: VerticalSlash,
    bitmap: Tensor,
    layout: Layout,
    q_rank: int,
    heads: tuple[int, int],
) -> tuple[Tables, tuple[Tensor, ...]]:
    """Tables and mask buffers of a vertical step."""
    g, device = layout.granularity, pattern.vertical.device
    q_pos, q_row = _positions(layout, q_rank, device, shift=layout.num_blocks)
    column_pos, column_row, kv_num, kv_idx, no_kv, q_num, q_idx, no_q = fused(
        ("vertical_tables", g),
        lambda vertical, q_pos: _vertical_tables(vertical, q_pos, g),
        pattern.vertical,
        q_pos,
    )
    start: tuple[Tensor, ...] = ()
    if pattern.documents is not None:
        start = (pattern.documents[:, None, q_pos].expand(*heads, -1),)
    buffers = (
        q_pos,
        column_pos.expand(*heads, -1),
        q_row,
        column_row.expand(*heads, -1),
        *start,
        bitmap.expand(*heads, -1),
    )
    # No block is full: behind counts of 0, any list will do.
    tables = Tables(kv_num, kv_idx, no_kv, kv_idx, q_num, q_idx, no_q, q_idx)
    return tables, buffers


def column_lists(
    pattern: VerticalSlash, bitmap: Tensor, layout: Layout, q_rank: int
) -> ColumnLists:
    """The verticals for the queries of one rank, as lists."""
    from kernels_triton.lists import column_counts

    g = layout.granularity

    def call(vertical: Tensor, q_blocks: Tensor) -> tuple[Tensor, ...]:
        pos = pad_columns(vertical, g)
        return pos, *column_counts(pos, q_blocks, g)

    vertical, device = pattern.vertical, pattern.vertical.device
    if pattern.documents is not None:  # one list for each batch entry
        batch = pattern.documents.shape[0]
        vertical = vertical.expand(batch, *vertical.shape[1:])
    q_blocks = _q_blocks(layout, q_rank, device)
    pos, before, visible = fused(("column_lists", g), call, vertical, q_blocks)
    documents: tuple[Tensor, ...] = ()
    if pattern.documents is not None:
        everywhere = pattern.documents[:, None].expand(*pos.shape[:2], -1)
        at = pos.clamp(max=layout.seq_len - 1).long()
        of_queries = pattern.documents[:, positions_on(layout, q_rank, device)]
        documents = of_queries, everywhere.gather(-1, at)
    return ColumnLists(pos, bitmap, q_blocks, before, visible, g, *documents)


@lru_cache(maxsize=64)
def _q_blocks(layout: Layout, cp_rank: int, device: torch.device) -> Tensor:
    """Global block of each local block: int32 [N]."""
    return layout.blocks(cp_rank).int().to(device)


def _vertical_tables(vertical: Tensor, q_pos: Tensor, g: int) -> tuple[Tensor, ...]:
    """Positions and blocks of the padded columns; counts, lists and zeros of both."""
    column_pos = pad_columns(vertical, g)  # [B, H, J g]
    batch, num_heads, padded = column_pos.shape
    count, n = padded // g, q_pos.shape[0] // g
    first = column_pos[..., ::g].contiguous()  # [B, H, J]
    last_query = q_pos[g - 1 :: g].expand(batch, num_heads, n).contiguous()
    kv_num = torch.searchsorted(first, last_query, right=True).int()  # [B, H, N]
    start = torch.searchsorted(last_query, first).int()  # [B, H, J]
    rows = torch.arange(n, dtype=torch.int32, device=q_pos.device)
    blocks = torch.arange(count, dtype=torch.int32, device=q_pos.device)
    kv_idx = blocks.expand(batch, num_heads, n, count).contiguous()
    q_idx = (start[..., None] + rows).clamp(max=n - 1)  # [B, H, J, N]
    # Past the last column any block will do: the position already says no.
    column_row = torch.where(column_pos == SENTINEL, 0, column_pos // g)
    no_kv, no_q = torch.zeros_like(kv_num), torch.zeros_like(start)
    return column_pos, column_row, kv_num, kv_idx, no_kv, n - start, q_idx, no_q


def pad_columns(vertical: Tensor, granularity: int) -> Tensor:
    """Verticals `[B, H, NV]`, padded to whole blocks: int32 [B, H, J g]."""
    pad = -vertical.shape[-1] % granularity
    return torch.nn.functional.pad(vertical, (0, pad), value=SENTINEL).contiguous()


@dataclass(frozen=True)
class _Shape:
    """What the code of a slash table depends on, besides tensors."""

    stride: int  # global blocks between neighbours of a segment
    n: int  # blocks of a segment
    width: int  # columns of a table
    windowed: bool  # whether a diagonal can be negative

    @staticmethod
    def of(pattern: VerticalSlash, layout: Layout) -> "_Shape":
        width = min(pattern.slash.shape[-1], layout.local_blocks)
        # Striped segments start within a stride of each other, and so no diagonal is
        # negative; neither is one between a segment and itself.
        windowed = layout.name == "zigzag" or (
            layout.name == "contiguous" and layout.cp_size > 1
        )
        return _Shape(layout.stride, layout.segment_len, width, windowed)


@lru_cache(maxsize=1024)
def _bases(layout: Layout, q_rank: int, kv_rank: int, device: torch.device) -> Tensor:
    """s_q - s_k of each pair of segments: int32 [Q segments, K segments]."""
    s_q = torch.tensor(layout.segments(q_rank), dtype=torch.int32)
    s_k = torch.tensor(layout.segments(kv_rank), dtype=torch.int32)
    return (s_q[:, None] - s_k).to(device)


def _slash_tables(slash: Tensor, base: Tensor, shape: _Shape) -> tuple[Tensor, ...]:
    """Lists of full blocks: kv_num, kv_idx, q_num, q_idx over all segments."""
    n, width = shape.n, shape.width
    pairs = [[_Diagonals(slash, each, shape) for each in row] for row in base]
    rows = [
        _join([pair.rows(y * n, width) for y, pair in enumerate(row)], width)
        for row in pairs
    ]
    columns = [
        _join([row[y].columns(x * n, width) for x, row in enumerate(pairs)], width)
        for y in range(base.shape[1])
    ]
    parts = (*zip(*rows, strict=True), *zip(*columns, strict=True))
    return tuple(torch.cat(part, 2) for part in parts)


def _document_tables(
    slash: Tensor,
    base: Tensor,
    q_documents: Tensor,
    k_documents: Tensor,
    *,
    shape: _Shape,
    own: bool,
) -> tuple[Tensor, ...]:
    """The eight tensors of `Tables` where a sequence has several documents."""
    n, width = shape.n, shape.width
    g = q_documents.shape[1] // (n * base.shape[0])
    slash = slash.expand(q_documents.shape[0], *slash.shape[1:])
    pairs = [
        [
            _Diagonals(slash, each, shape).cut_by(
                _Documents.of(q_documents, k_documents, x, y, n, g)
            )
            for y, each in enumerate(row)
        ]
        for x, row in enumerate(base)
    ]
    keeps_own = (slash[..., :1] == 0).int().expand(-1, -1, n)  # [B, H, n]
    local = torch.arange(n, dtype=torch.int32, device=slash.device)
    local = local[:, None].expand(*keeps_own.shape, width)
    rows: list[tuple[Tensor, ...]] = []
    for x, row in enumerate(pairs):
        first = [(keeps_own, x * n + local)] if own else []
        some = [each.partial_rows(y * n, width) for y, each in enumerate(row)]
        full = [each.rows(y * n, width) for y, each in enumerate(row)]
        rows.append((*_join(first + some, width), *_join(full, width)))
    columns: list[tuple[Tensor, ...]] = []
    for y in range(base.shape[1]):
        column = [row[y] for row in pairs]
        first = [(keeps_own, y * n + local)] if own else []
        some = [each.partial_columns(x * n, width) for x, each in enumerate(column)]
        full = [each.columns(x * n, width) for x, each in enumerate(column)]
        columns.append((*_join(first + some, width), *_join(full, width)))
    parts = (*zip(*rows, strict=True), *zip(*columns, strict=True))
    return tuple(torch.cat(part, 2) for part in parts)


@dataclass(frozen=True)
class _Documents:
    """How far the blocks of two segments see each other: int32 [B, n].

    Blocks are counted within their segments. Starts ascend with positions, so each is
    one binary search.
    """

    first_key: Tensor  # first key block of which a query block sees anything
    first_full_key: Tensor  # first key block of which it sees all, if before it
    last_query: Tensor  # behind the last query block that sees anything of a key block
    last_full_query: Tensor  # behind the last one that sees all, if behind it

    @staticmethod
    def of(
        q_documents: Tensor, k_documents: Tensor, x: int, y: int, n: int, g: int
    ) -> "_Documents":
        """Of query segment x and key segment y, n blocks of g tokens each."""

        def edges(documents: Tensor, segment: int) -> tuple[Tensor, Tensor]:
            """Of each block's first and last token."""
            blocks = documents.unflatten(1, (-1, g))[:, segment * n : (segment + 1) * n]
            return blocks[..., 0].contiguous(), blocks[..., -1].contiguous()

        q_first, q_last = edges(q_documents, x)
        k_first, k_last = edges(k_documents, y)
        return _Documents(
            torch.searchsorted(k_last, q_first).int(),
            torch.searchsorted(k_first, q_last).int(),
            torch.searchsorted(q_first, k_last, right=True).int(),
            torch.searchsorted(q_last, k_first, right=True).int(),
        )


class _Diagonals:
    """T of two segments: the local diagonals of each head's slashes.

    Without the diagonal block, which the tables keep apart, unless `with_own`.
    """

    def __init__(
        self, slash: Tensor, base: Tensor, shape: _Shape, with_own: bool = False
    ):
        n = shape.n
        difference = slash - base
        t = torch.div(difference, shape.stride, rounding_mode="floor")
        least = 0 if with_own else 1
        valid = (slash >= least) & (slash < SENTINEL)
        valid &= difference % shape.stride == 0
        valid &= (t > -n) & (t < n)
        t = torch.where(valid, t, SENTINEL).sort(-1).values
        distinct = 2 * n - 1 if shape.windowed else n
        self.t = t[..., : min(distinct, t.shape[-1])].contiguous()  # [B, H, C]
        self.n, self.windowed = n, shape.windowed
        local = torch.arange(n, dtype=torch.int32, device=slash.device)
        self.local = local.expand(*slash.shape[:2], n)  # [B, H, n]
        self.documents: _Documents | None = None

    def cut_by(self, documents: _Documents) -> "_Diagonals":
        """The same, seen through documents: `rows` and `columns` are full blocks."""
        self.documents = documents
        return self

    def _count(self, bound: Tensor, right: bool) -> Tensor:
        """How many diagonals lie below `bound` [B, H, n] (or at it, if `right`)."""
        bound = bound.contiguous()
        return torch.searchsorted(self.t, bound, right=right).int()

    def _window(self, start: Tensor | None, width: int) -> Tensor:
        """T from `start` on, `width` entries: [B, H, n or 1, width]."""
        t = torch.nn.functional.pad(
            self.t, (0, max(width - self.t.shape[-1], 0)), value=SENTINEL
        )
        if start is None:
            return t[:, :, None, :width]
        place = start[..., None] + torch.arange(width, device=t.device)
        place = place.clamp(max=t.shape[-1] - 1)
        return t[:, :, None].expand(-1, -1, self.n, -1).gather(-1, place.long())

    def rows(self, first: int, width: int) -> tuple[Tensor, Tensor]:
        """Key blocks (local, from `first` on) of each query block: counts, indices."""
        low = self._count(self.local - self.n, right=True) if self.windowed else None
        bound = self.local
        if self.documents is not None:
            bound = self.local - self.documents.first_full_key[:, None]
        high = self._count(bound, right=True)
        t = self._window(low, width)
        index = first + (self.local[..., None] - t).clamp(0, self.n - 1)
        return high if low is None else high - low, index

    def partial_rows(self, first: int, width: int) -> tuple[Tensor, Tensor]:
        """Key blocks of which a query block sees a part: counts, indices."""
        assert self.documents is not None
        start = self._count(
            self.local - self.documents.first_full_key[:, None], right=True
        )
        end = self._count(self.local - self.documents.first_key[:, None], right=True)
        t = self._window(start, width)
        index = first + (self.local[..., None] - t).clamp(0, self.n - 1)
        return end - start, index

    def partial_columns(self, first: int, width: int) -> tuple[Tensor, Tensor]:
        """Query blocks that see a part of a key block: counts, indices."""
        assert self.documents is not None
        start = self._count(
            self.documents.last_full_query[:, None] - self.local, right=False
        )
        end = self._count(self.documents.last_query[:, None] - self.local, right=False)
        t = self._window(start, width)
        index = first + (self.local[..., None] + t).clamp(0, self.n - 1)
        return end - start, index

    def columns(self, first: int, width: int) -> tuple[Tensor, Tensor]:
        """Query blocks (local, from `first` on) of each key block: counts, indices."""
        low = self._count(-self.local, right=False) if self.windowed else None
        bound = self.n - self.local
        if self.documents is not None:
            bound = self.documents.last_full_query[:, None] - self.local
        high = self._count(bound, right=False)
        t = self._window(low, width)
        index = first + (self.local[..., None] + t).clamp(0, self.n - 1)
        return high if low is None else high - low, index


def _join(parts: list[tuple[Tensor, Tensor]], width: int) -> tuple[Tensor, Tensor]:
    """Concatenate lists whose valid entries are a prefix, row by row."""
    num, index = parts[0]
    for more_num, more_index in parts[1:]:
        place = torch.arange(width, device=num.device)
        later = (place - num[..., None]).clamp(min=0)
        moved = more_index.gather(-1, later)
        index = torch.where(place < num[..., None], index, moved)
        num = num + more_num
    return num, index.contiguous()


@lru_cache(maxsize=32)
def _diagonal_table(shape: torch.Size, device: torch.device) -> Tensor:
    """Row a names block a, in every column: int32, constant."""
    rows = torch.arange(shape[2], dtype=torch.int32, device=device)
    return rows[:, None].expand(shape).contiguous()


@lru_cache(maxsize=256)
def _positions(
    layout: Layout, cp_rank: int, device: torch.device, shift: int
) -> tuple[Tensor, Tensor]:
    """Positions of a rank's tokens and `shift` + their blocks: int32 [S_local]."""
    positions = positions_on(layout, cp_rank, device)
    return positions, positions // layout.granularity + shift

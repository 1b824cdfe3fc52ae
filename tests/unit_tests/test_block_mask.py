"""Block tables index exactly what `mask_mod` says, and no pair is computed twice."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtraining_flex.block_mask import (
    StepMask,
    pad_columns,
    slash_step,
    vertical_step,
)
from mtraining_flex.layout import LAYOUTS, Layout, build_layout
from mtraining_flex.pattern.quality import executed_blocks
from mtraining_flex.pattern.types import (
    SENTINEL,
    VerticalSlash,
    dense_pattern,
    pack_pattern,
    slash_bitmap,
)
from mtraining_flex.reference import allowed_pairs
from mtraining_flex.ring.schedule import ring_sources
from mtraining_flex.ring.step import EagerStep, Part
from tests.helpers import (
    assert_close,
    random_documents,
    random_pattern,
    random_qkv,
)

G = 4  # granularity
SIZES = (1, 2, 3, 4, 8)

pytestmark = pytest.mark.usefixtures("one_thread")
every_layout = pytest.mark.parametrize("name", LAYOUTS)
every_size = pytest.mark.parametrize("cp_size", SIZES)


def _cases(
    name: str, cp_size: int, batch: int = 1, heads: int = 6
) -> Iterator[tuple[Layout, VerticalSlash]]:
    """Patterns of every kind of head, on sequences of 1 to 4 blocks a segment.

    Lists are shorter or longer than a shard, and than the sequence.
    """
    for seed, cycles in enumerate((1, 2, 4)):
        chunks = 2 if name == "zigzag" else 1
        layout = build_layout(name, cycles * chunks * cp_size * G, cp_size, G)
        pattern = random_pattern(
            batch,
            heads,
            layout.seq_len,
            G,
            max_slash=(2, 20, 7)[seed],
            max_vertical=(13, 4, 0)[seed],
            seed=seed + cp_size,
            always_diagonal=seed != 1,
        )
        yield layout, pattern


def _slash_step(pattern: VerticalSlash, layout: Layout, q: int, kv: int) -> StepMask:
    bitmap = slash_bitmap(pattern, layout.num_blocks)
    batch, heads = pattern.num_slash.shape
    return slash_step(pattern, bitmap, layout, q, kv, (batch, heads))


def _vertical_step(pattern: VerticalSlash, layout: Layout, q: int) -> StepMask:
    bitmap = slash_bitmap(pattern, layout.num_blocks)
    batch, heads = pattern.num_slash.shape
    return vertical_step(pattern, bitmap, layout, q, (batch, heads))


def _expand(num: Tensor, idx: Tensor, columns: int) -> Tensor:
    """How often a list names each block: int64 [B, H, rows, columns]."""
    assert num.dtype == idx.dtype == torch.int32
    assert num.is_contiguous() and idx.is_contiguous()
    assert (num >= 0).all() and (num <= idx.shape[-1]).all()
    assert (idx >= 0).all() and (idx < columns).all(), (
        "an index that no kernel may load"
    )
    valid = torch.arange(idx.shape[-1]) < num[..., None]
    counts = torch.zeros(*num.shape, columns, dtype=torch.int64)
    return counts.scatter_add_(-1, idx.long(), valid.long())


def _blocks(mask: StepMask) -> tuple[Tensor, Tensor]:
    """Partial and full blocks of a step [B, H, N, M]; query and key side agree."""
    t, g = mask.tables, mask.granularity
    rows, columns = mask.q_len // g, mask.kv_len // g
    sides = (
        (t.kv_num, t.kv_idx, t.q_num, t.q_idx),
        (t.full_kv_num, t.full_kv_idx, t.full_q_num, t.full_q_idx),
    )
    partial, full = (_expand(kv_num, kv_idx, columns) for kv_num, kv_idx, _, _ in sides)
    for blocks, (_, _, q_num, q_idx) in zip((partial, full), sides, strict=True):
        assert torch.equal(blocks, _expand(q_num, q_idx, rows).mT)
    assert (partial + full <= 1).all(), "a block is listed twice"
    return partial, full


def _truth(mask: StepMask, batch: int, heads: int) -> Tensor:
    """`mask_mod` of every pair of a step: bool [B, H, S_q, S_kv]."""
    return mask.mask_mod(
        torch.arange(batch)[:, None, None, None],
        torch.arange(heads)[None, :, None, None],
        torch.arange(mask.q_len)[None, None, :, None],
        torch.arange(mask.kv_len)[None, None, None, :],
    )


def _tokens(blocks: Tensor, granularity: int) -> Tensor:
    return blocks.repeat_interleave(granularity, 2).repeat_interleave(granularity, 3)


def _executed(mask: StepMask) -> Tensor:
    """How often the tables compute each pair: full blocks whole, partial by truth."""
    partial, full = _blocks(mask)
    truth = _truth(mask, *partial.shape[:2])
    return _tokens(full, mask.granularity) + _tokens(partial, mask.granularity) * truth


def _all_pairs(pattern: VerticalSlash, layout: Layout) -> Tensor:
    """How often all ranks and ring steps together compute each global pair."""
    seq_len, size = layout.seq_len, layout.cp_size
    batch, heads = pattern.num_slash.shape
    total = torch.zeros(batch, heads, seq_len, seq_len, dtype=torch.int64)
    for rank in range(size):
        q_pos = layout.positions(rank)
        for source in ring_sources(rank, size):
            if layout.is_causally_empty(rank, source):
                continue  # as the ring does
            pairs = _executed(_slash_step(pattern, layout, rank, source))
            total[:, :, q_pos[:, None], layout.positions(source)] += pairs
        if pattern.vertical.shape[-1] == 0:
            continue
        mask = _vertical_step(pattern, layout, rank)
        pairs = _executed(mask)
        columns = pad_columns(pattern.vertical, layout.granularity)
        for b in range(batch):
            for h in range(heads):
                kept = columns[b, h] < SENTINEL
                assert not pairs[b, h][:, ~kept].any(), "padding is attended to"
                where = q_pos[:, None], columns[b, h][kept].long()
                total[b, h].index_put_(where, pairs[b, h][:, kept], accumulate=True)
    return total


# Tables and truth


@every_layout
@every_size
def test_slash_tables_are_the_mask(name: str, cp_size: int) -> None:
    for layout, pattern in _cases(name, cp_size):
        for q_rank in range(cp_size):
            for kv_rank in range(cp_size):
                mask = _slash_step(pattern, layout, q_rank, kv_rank)
                partial, full = _blocks(mask)
                truth = _truth(mask, *partial.shape[:2])
                assert torch.equal(_executed(mask), truth.long())
                by_block = truth.unflatten(2, (-1, G)).unflatten(4, (-1, G))
                assert torch.equal(full.bool(), by_block.all(-1).all(3))
                # The diagonal block is the only partial one.
                diagonal = layout.blocks(q_rank)[:, None] == layout.blocks(kv_rank)
                kept = (pattern.slash == 0).any(-1)[..., None, None]
                assert torch.equal(partial.bool(), diagonal & kept)
                if layout.is_causally_empty(q_rank, kv_rank):
                    assert mask.tables.executed().sum() == 0


@every_layout
@every_size
def test_vertical_tables_hold_the_mask(name: str, cp_size: int) -> None:
    for layout, pattern in _cases(name, cp_size):
        if pattern.vertical.shape[-1] == 0:
            continue
        for rank in range(cp_size):
            mask = _vertical_step(pattern, layout, rank)
            assert mask.kv_len % G == 0
            partial, full = _blocks(mask)
            truth = _truth(mask, *partial.shape[:2])
            assert not full.any(), "what a slash keeps must be dropped in each block"
            assert torch.equal(_executed(mask), truth.long())
            # A query block reads a prefix of the column blocks: those with a column
            # that begins before its end.
            columns = pad_columns(pattern.vertical, G)
            last = layout.positions(rank)[G - 1 :: G]
            seen = columns[:, :, None, ::G] <= last[:, None]
            assert torch.equal(partial.bool(), seen)


@every_layout
@every_size
def test_partial_and_full_lists_have_equal_widths(name: str, cp_size: int) -> None:
    """torch 2.11 reads both with one stride, and unequal ones wrongly."""
    for layout, pattern in _cases(name, cp_size):
        masks = [_slash_step(pattern, layout, cp_size - 1, 0)]
        if pattern.vertical.shape[-1]:
            masks.append(_vertical_step(pattern, layout, cp_size - 1))
        for mask in masks:
            t = mask.tables
            assert t.kv_idx.shape == t.full_kv_idx.shape
            assert t.kv_idx.stride() == t.full_kv_idx.stride()
            assert t.q_idx.shape == t.full_q_idx.shape
            assert t.q_idx.stride() == t.full_q_idx.stride()
            assert t.kv_num.shape == t.full_kv_num.shape
            assert t.q_num.shape == t.full_q_num.shape


@every_layout
@pytest.mark.parametrize("cp_size", [1, 3])
def test_torch_builds_the_same_slash_mask(name: str, cp_size: int) -> None:
    """From `mask_mod` alone, pair by pair."""
    for layout, pattern in _cases(name, cp_size, batch=2, heads=3):
        for kv_rank in range(cp_size):
            mask = _slash_step(pattern, layout, cp_size - 1, kv_rank)
            batch, heads = pattern.num_slash.shape
            expected = create_block_mask(
                mask.mask_mod,
                batch,
                heads,
                mask.q_len,
                mask.kv_len,
                device="cpu",
                BLOCK_SIZE=G,
            )
            actual = mask.block_mask()
            # `to_dense` would take the width NS of the lists for the number of blocks.
            blocks = sum(_blocks(mask))
            assert torch.equal(blocks, expected.to_dense().long())
            assert torch.equal(actual.kv_num_blocks, expected.kv_num_blocks)
            assert torch.equal(actual.full_kv_num_blocks, expected.full_kv_num_blocks)
            assert torch.equal(actual.q_num_blocks, expected.q_num_blocks)
            assert torch.equal(actual.full_q_num_blocks, expected.full_q_num_blocks)
            assert actual.sparsity() == expected.sparsity()


# All ranks and steps together


@every_layout
@every_size
def test_each_kept_pair_is_computed_once(name: str, cp_size: int) -> None:
    for layout, pattern in _cases(name, cp_size):
        expected = allowed_pairs(pattern, layout.seq_len, G)
        assert torch.equal(_all_pairs(pattern, layout), expected.long())


@every_layout
def test_each_pair_of_two_batch_entries_is_computed_once(name: str) -> None:
    for layout, pattern in _cases(name, 2, batch=2, heads=3):
        expected = allowed_pairs(pattern, layout.seq_len, G)
        assert torch.equal(_all_pairs(pattern, layout), expected.long())


@every_layout
@every_size
def test_executed_blocks_are_those_of_the_pattern(name: str, cp_size: int) -> None:
    for layout, pattern in _cases(name, cp_size):
        total = sum(
            _slash_step(pattern, layout, q_rank, kv_rank).tables.executed()
            for q_rank in range(cp_size)
            for kv_rank in range(cp_size)
        )
        assert total.dtype == torch.int64
        assert torch.equal(total, executed_blocks(pattern, layout.num_blocks))


@every_size
def test_striped_ranks_do_the_same_slashes_at_a_step(cp_size: int) -> None:
    """Within one block a slash and rank, which is where a diagonal begins."""
    for layout, pattern in _cases("striped", cp_size):
        for step in range(cp_size):
            here = (pattern.slash % cp_size == step) & (pattern.slash < SENTINEL)
            work = torch.stack(
                [
                    _slash_step(
                        pattern, layout, r, (r - step) % cp_size
                    ).tables.executed()
                    for r in range(cp_size)
                ]
            )
            spread = work.max(0).values - work.min(0).values
            assert (spread <= here.sum(-1)).all()


def test_every_shard_is_at_one_rank_in_every_step() -> None:
    for size in SIZES:
        sources = torch.tensor([ring_sources(r, size) for r in range(size)])
        ranks = torch.arange(size)
        assert torch.equal(sources[:, 0], ranks), "own keys first"
        assert torch.equal(sources.sort(0).values, ranks[:, None].expand(size, size))
        assert torch.equal(sources.sort(1).values, ranks.expand(size, size))
        # What a rank has at a step, the previous rank had before.
        assert torch.equal(sources[:, 1:], sources.roll(1, 0)[:, :-1])


# Documents


@every_layout
@every_size
@pytest.mark.parametrize("shared", [False, True])
def test_documents_cut_tables_and_mask(name: str, cp_size: int, shared: bool) -> None:
    for seed, (layout, pattern) in enumerate(_cases(name, cp_size, 3, 2)):
        if shared:  # one pattern for all batch entries
            pattern = VerticalSlash(*(t[:1].contiguous() for t in pattern.tensors()))
        documents = random_documents(3, layout.seq_len, seed)
        pattern = replace(pattern, documents=documents)
        bitmap = slash_bitmap(pattern, layout.num_blocks)
        expected = allowed_pairs(pattern, layout.seq_len, G)
        total = torch.zeros_like(expected, dtype=torch.int64)
        for q_rank in range(cp_size):
            q_pos = layout.positions(q_rank)
            for kv_rank in range(cp_size):
                mask = slash_step(pattern, bitmap, layout, q_rank, kv_rank, (3, 2))
                partial, full = _blocks(mask)
                truth = _truth(mask, 3, 2)
                assert torch.equal(_executed(mask), truth.long())
                by_block = truth.unflatten(2, (-1, G)).unflatten(4, (-1, G))
                every = by_block.all(-1).all(3)
                assert torch.equal(full.bool(), every)
                some = by_block.any(-1).any(3) & ~every
                assert torch.equal(partial.bool(), some)
                count = (partial + full).sum((2, 3))
                assert torch.equal(mask.tables.executed(), count)
                assert torch.equal(mask.lists.executed(), count)
                total[:, :, q_pos[:, None], layout.positions(kv_rank)] += truth
            if pattern.vertical.shape[-1] == 0:
                continue
            mask = vertical_step(pattern, bitmap, layout, q_rank, (3, 2))
            columns = pad_columns(pattern.vertical, G).expand(3, 2, -1)
            truth = _truth(mask, 3, 2)
            pairs = _tokens(_blocks(mask)[0], G) * truth
            assert torch.equal(pairs, truth.long())
            for b, h in itertools.product(range(3), range(2)):
                kept = columns[b, h] < SENTINEL
                assert not pairs[b, h][:, ~kept].any()
                where = q_pos[:, None], columns[b, h][kept].long()
                total[b, h].index_put_(where, pairs[b, h][:, kept], accumulate=True)
        assert torch.equal(total, expected.long())


# Shapes of patterns


@every_layout
def test_one_pattern_stands_for_all_heads(name: str) -> None:
    layout = build_layout(name, 64, 2, G)
    one = pack_pattern([[[0, 3, 5]]], [[[1, 17, 40]]])
    each = VerticalSlash(
        *(t.expand(2, 3, *t.shape[2:]).contiguous() for t in one.tensors())
    )
    for make in (
        lambda p, heads: slash_step(p, slash_bitmap(p, 16), layout, 1, 1, heads),
        lambda p, heads: slash_step(p, slash_bitmap(p, 16), layout, 1, 0, heads),
        lambda p, heads: vertical_step(p, slash_bitmap(p, 16), layout, 1, heads),
    ):
        shared, own = make(one, (2, 3)), make(each, (2, 3))
        assert torch.equal(_truth(shared, 2, 3), _truth(own, 2, 3))
        for a, b in zip(shared.tables.tensors(), own.tables.tensors(), strict=True):
            assert a.shape[:2] == (1, 1)
            assert torch.equal(a.expand_as(b), b)


def test_a_pattern_of_each_batch_entry_or_of_each_head() -> None:
    layout = build_layout("striped", 64, 2, G)
    for shape in ((1, 3), (2, 1)):
        pattern = random_pattern(*shape, 64, G, max_slash=5, max_vertical=6, seed=3)
        bitmap = slash_bitmap(pattern, 16)
        mask = slash_step(pattern, bitmap, layout, 1, 0, (2, 3))
        partial, full = _blocks(mask)
        executed = _tokens(full + partial, G).expand(2, 3, -1, -1)
        assert torch.equal(executed.bool(), _truth(mask, 2, 3))


def test_a_head_that_keeps_nothing_computes_nothing() -> None:
    layout = build_layout("striped", 32, 2, G)
    pattern = pack_pattern([[[]]], [[[]]], max_slash=3, max_vertical=5)
    for q_rank in range(2):
        for kv_rank in range(2):
            mask = _slash_step(pattern, layout, q_rank, kv_rank)
            assert not _executed(mask).any() and not mask.tables.executed().any()
        mask = _vertical_step(pattern, layout, q_rank)
        assert not _executed(mask).any() and not mask.tables.executed().any()


# As a BlockMask


def _is_as_given(block_mask: BlockMask, mask: StepMask) -> None:
    """`BlockMask` neither sorts nor copies nor drops a list."""
    t = mask.tables
    assert block_mask.kv_indices is t.kv_idx
    assert block_mask.full_kv_indices is t.full_kv_idx
    assert block_mask.q_indices is t.q_idx
    assert block_mask.full_q_indices is t.full_q_idx
    assert block_mask.BLOCK_SIZE == (mask.granularity, mask.granularity)


@every_layout
def test_eager_flex_attention_takes_the_masks(name: str) -> None:
    layout = build_layout(name, 64, 2, 8)
    pattern = random_pattern(
        1, 4, 64, 8, max_slash=4, max_vertical=9, seed=4, always_diagonal=True
    )
    q, k, v = random_qkv(1, 4, 4, 32, 16, torch.float64, seed=0)
    masks = [
        _slash_step(pattern, layout, q_rank, kv_rank)
        for q_rank in range(2)
        for kv_rank in range(2)
    ]
    masks += [_vertical_step(pattern, layout, rank) for rank in range(2)]
    compared = 0
    for mask in masks:
        block_mask = mask.block_mask()
        _is_as_given(block_mask, mask)
        k_here, v_here = k[:, :, : mask.kv_len], v[:, :, : mask.kv_len]
        out, lse = EagerStep().forward(q, Part(k_here, v_here, mask), 0.25)
        if not out.any():
            continue
        expected = flex_attention(q, k_here, v_here, block_mask=block_mask, scale=0.25)
        # A row without a key is no concern of eager flex.
        filled = (lse > -torch.inf)[..., None]
        assert_close(out, torch.where(filled, expected, 0.0), 1e-7)
        compared += 1
    assert compared >= 4


# Pitfalls


def _sparse_95(num_blocks: int, heads: int) -> VerticalSlash:
    """About 5% of the causal blocks: the diagonal and a few far ones, per head."""
    budget = 0.05 * num_blocks * (num_blocks + 1) / 2
    slashes = []
    for head in range(heads):
        offsets, held = [0], num_blocks
        offset = num_blocks // 2 + head
        while held + (num_blocks - offset) <= budget and offset < num_blocks:
            held += num_blocks - offset
            offsets.append(offset)
            offset += 3
        slashes.append(offsets)
    return pack_pattern([slashes], [[[]] * heads])


@every_layout
def test_b02_a_sparse_mask_stays_sparse_on_two_ranks(name: str) -> None:
    """S 8192, 16 heads, 95% sparse: sharding drops no block list.

    torch's context parallelism rebuilds a mask from its `mask_mod` by block; the masks
    here are born on their rank, and count the same blocks as the unsharded one.
    """
    seq_len, heads, g = 8192, 16, 128
    num_blocks = seq_len // g
    pattern = _sparse_95(num_blocks, heads)
    whole = build_layout(name, seq_len, 1, g)
    one = _slash_step(pattern, whole, 0, 0).tables
    causal = heads * num_blocks * (num_blocks + 1) // 2
    assert 0.94 < 1 - one.executed().sum().item() / causal < 0.96
    # The same mask by torch's constructor, which wants a column for each block.
    wide = (0, num_blocks - one.kv_idx.shape[-1])
    rebuilt = BlockMask.from_kv_blocks(
        one.kv_num,
        torch.nn.functional.pad(one.kv_idx, wide),
        one.full_kv_num,
        torch.nn.functional.pad(one.full_kv_idx, wide),
        BLOCK_SIZE=g,
        seq_lengths=(seq_len, seq_len),
    )
    dense = rebuilt.to_dense().long()
    shards = build_layout(name, seq_len, 2, g)
    two = torch.zeros_like(dense)
    executed = 0
    for q_rank in range(2):
        for kv_rank in range(2):
            mask = _slash_step(pattern, shards, q_rank, kv_rank)
            rows, columns = shards.blocks(q_rank), shards.blocks(kv_rank)
            two[:, :, rows[:, None], columns] += sum(_blocks(mask))
            given = mask.block_mask()
            executed += int((given.kv_num_blocks + given.full_kv_num_blocks).sum())
    assert torch.equal(two, dense)
    assert executed == int(executed_blocks(pattern, num_blocks).sum())
    assert executed == int(one.executed().sum())


class _Allocations(TorchDispatchMode):
    """Bytes of all that operators return, freed or not: a bound on the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        for x in tree_leaves(out):
            # Views and in-place results allocate nothing.
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in inputs:
                self.total += x.untyped_storage().nbytes()
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("cp_size", [32, 1])
@pytest.mark.parametrize(
    ("name", "build_bound"), [("striped", 16), ("contiguous", 32), ("zigzag", 64)]
)
def test_b26_a_build_at_524288_tokens_is_small(
    name: str, build_bound: int, cp_size: int
) -> None:
    """16 heads, 64 slashes: a table is H N NS, never H N N.

    A mask holds less than six of them (0.5 MB each with W = 32, 16 MB with W = 1), and
    its build allocates `build_bound` of them over all of its operators together.
    """
    seq_len, heads, g, max_slash = 524288, 16, 128, 64
    layout = build_layout(name, seq_len, cp_size, g)
    n, num_blocks = layout.local_blocks, layout.num_blocks
    slashes = [[0, *range(1 + h, 1 + h + 63 * 40, 40)] for h in range(heads)]
    pattern = pack_pattern([slashes], [[[0]] * heads], max_slash=max_slash)
    bitmap = slash_bitmap(pattern, num_blocks)
    table = heads * n * max_slash * 4
    dense_map = heads * n * n
    ranks = {(0, 0), (cp_size - 1, cp_size // 2)}
    for q_rank, kv_rank in ranks:
        with _Allocations() as allocated:
            mask = slash_step(pattern, bitmap, layout, q_rank, kv_rank, (1, heads))
            mask.tables  # noqa: B018  (built when asked for)
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in (*mask.tables.tensors(), *mask.buffers)
        }
        held = sum(storages.values())
        assert held <= 6 * table, held / table
        assert allocated.total <= build_bound * table, allocated.total / table
        if cp_size == 1:
            assert held <= 100 << 20
            assert allocated.largest < dense_map, "a map of all pairs of blocks"
    if cp_size == 1:
        total = mask.tables.executed()
        assert torch.equal(total, executed_blocks(pattern, num_blocks))


def test_b26_the_vertical_step_at_524288_tokens_is_small() -> None:
    heads, columns, g = 16, 1024, 128
    layout = build_layout("striped", 524288, 32, g)
    every = torch.arange(columns) * 511 + 7
    pattern = pack_pattern([[[0]] * heads], [[every.tolist()] * heads])
    bitmap = slash_bitmap(pattern, layout.num_blocks)
    with _Allocations() as allocated:
        mask = vertical_step(pattern, bitmap, layout, 31, (1, heads))
        mask.tables  # noqa: B018  (built when asked for)
    assert allocated.total < 4 << 20
    assert mask.tables.kv_idx.shape == (1, heads, layout.local_blocks, columns // g)


@pytest.mark.parametrize("name", ["striped", "zigzag"])
def test_b26_lists_at_524288_tokens_are_tiny(name: str) -> None:
    """16 heads, 256 slashes, 1024 columns: pattern, bitmap and lists of a layer."""
    heads, g, width = 16, 128, 256
    layout = build_layout(name, 524288, 1, g)
    every = [[list(range(0, 16 * width, 16))] * heads]
    columns = [[(torch.arange(1024) * 511 + 7).tolist()] * heads]
    pattern = pack_pattern(every, columns)
    with _Allocations() as allocated:
        bitmap = slash_bitmap(pattern, layout.num_blocks)
        slash = slash_step(pattern, bitmap, layout, 0, 0, (1, heads)).lists
        vertical = vertical_step(pattern, bitmap, layout, 0, (1, heads)).lists
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*pattern.tensors(), *vars(slash).values(), *vars(vertical).values())
        if isinstance(t, Tensor)
    }
    assert sum(held.values()) < 2 << 20
    assert allocated.total < 8 << 20  # over all operators of the builds together
    assert torch.equal(slash.executed(), executed_blocks(pattern, layout.num_blocks))


def test_the_dense_pattern_is_the_causal_triangle() -> None:
    layout = build_layout("zigzag", 64, 2, G)
    pattern = dense_pattern(16, "cpu")
    expected = torch.ones(1, 1, 64, 64).tril().long()
    assert torch.equal(_all_pairs(pattern, layout), expected)

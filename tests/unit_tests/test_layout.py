"""Which rank owns which block: every layout is a permutation with a closed form."""

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
)

from mtraining_flex.layout import LAYOUTS, Layout, build_layout, shard_batch

GRANULARITY = 4
SIZES = (1, 2, 3, 4, 8)

every_layout = pytest.mark.parametrize("name", LAYOUTS)
every_size = pytest.mark.parametrize("cp_size", SIZES)


def _layout(name: str, cp_size: int, cycles: int = 3) -> Layout:
    return build_layout(name, cycles * 2 * cp_size * GRANULARITY, cp_size, GRANULARITY)


@every_layout
@every_size
def test_positions_are_a_permutation(name: str, cp_size: int) -> None:
    layout = _layout(name, cp_size)
    shards = [layout.positions(rank) for rank in range(cp_size)]
    assert all(len(shard) == layout.local_len for shard in shards)
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(layout.seq_len))
    assert all((shard.diff() > 0).all() for shard in shards), "local order is causal"


@every_layout
@every_size
def test_positions_are_whole_blocks(name: str, cp_size: int) -> None:
    layout = _layout(name, cp_size)
    for rank in range(cp_size):
        by_block = layout.positions(rank).view(layout.local_blocks, GRANULARITY)
        first = layout.blocks(rank)[:, None] * GRANULARITY
        assert torch.equal(by_block, first + torch.arange(GRANULARITY))


@every_size
def test_owners(cp_size: int) -> None:
    striped, contiguous, zigzag = (
        _layout(name, cp_size) for name in ("striped", "contiguous", "zigzag")
    )
    n = striped.local_blocks
    for j in range(striped.num_blocks):
        assert striped.blocks(j % cp_size)[j // cp_size] == j
        assert contiguous.blocks(j // n)[j % n] == j
        chunk, within = j // (n // 2), j % (n // 2)
        if chunk < cp_size:
            assert zigzag.blocks(chunk)[within] == j
        else:
            assert zigzag.blocks(2 * cp_size - 1 - chunk)[n // 2 + within] == j


@every_size
def test_zigzag_is_the_head_tail_of_torch(cp_size: int) -> None:
    layout = _layout("zigzag", cp_size)
    theirs = _HeadTailLoadBalancer(layout.seq_len, cp_size, "cpu")._generate_indices()
    assert theirs is not None
    ours = torch.cat([layout.positions(rank) for rank in range(cp_size)])
    assert torch.equal(ours, theirs[0].long())


@every_layout
@every_size
def test_segments_describe_the_blocks(name: str, cp_size: int) -> None:
    layout = _layout(name, cp_size)
    for rank in range(cp_size):
        segments = layout.segments(rank)
        assert len(segments) * layout.segment_len == layout.local_blocks
        pieces = layout.blocks(rank).view(len(segments), layout.segment_len)
        assert tuple(pieces[:, 0].tolist()) == segments
        assert (pieces.diff(dim=1) == layout.stride).all()


@every_layout
@every_size
def test_a_block_pair_is_a_closed_form_apart(name: str, cp_size: int) -> None:
    """What `block_mask` builds on: (a - b) w + s_q - s_k blocks between a and b."""
    layout = _layout(name, cp_size, cycles=2)
    n = layout.segment_len
    local = torch.arange(n)
    for q_rank in range(cp_size):
        for kv_rank in range(cp_size):
            apart = layout.blocks(q_rank)[:, None] - layout.blocks(kv_rank)
            for x, s_q in enumerate(layout.segments(q_rank)):
                for y, s_k in enumerate(layout.segments(kv_rank)):
                    piece = apart[x * n : (x + 1) * n, y * n : (y + 1) * n]
                    closed = (local[:, None] - local) * layout.stride + s_q - s_k
                    assert torch.equal(piece, closed)


@every_layout
@every_size
def test_local_index_inverts_positions(name: str, cp_size: int) -> None:
    layout = _layout(name, cp_size)
    everything = torch.arange(layout.seq_len)
    owners = torch.zeros(layout.seq_len, dtype=torch.int64)
    for rank in range(cp_size):
        index, owned = layout.local_index(everything, rank)
        assert torch.equal(layout.positions(rank)[index[owned]], everything[owned])
        assert (index[~owned] == 0).all()
        owners += owned
    assert (owners == 1).all()


@every_layout
def test_local_index_keeps_shape_and_refuses_padding(name: str) -> None:
    layout = _layout(name, 4)
    positions = torch.tensor([[0, layout.seq_len - 1], [2**30, 5]], dtype=torch.int32)
    owners = torch.zeros(2, 2, dtype=torch.int64)
    for rank in range(4):
        index, owned = layout.local_index(positions, rank)
        assert index.shape == owned.shape == (2, 2)
        assert ((index >= 0) & (index < layout.local_len)).all()
        owners += owned
    assert owners.tolist() == [[1, 1], [0, 1]]


@every_layout
@every_size
@pytest.mark.parametrize("cycles", [1, 3])
def test_is_causally_empty(name: str, cp_size: int, cycles: int) -> None:
    layout = _layout(name, cp_size, cycles)
    for q_rank in range(cp_size):
        for kv_rank in range(cp_size):
            q_pos, kv_pos = layout.positions(q_rank), layout.positions(kv_rank)
            empty = not (kv_pos <= q_pos[:, None]).any()
            assert layout.is_causally_empty(q_rank, kv_rank) == empty


def test_a_single_block_for_each_rank() -> None:
    striped = build_layout("striped", 32, 8, 4)
    assert striped.local_blocks == 1 and striped.is_causally_empty(2, 3)
    assert not striped.is_causally_empty(3, 2)
    assert not striped.is_causally_empty(3, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring", 64, 2, 4), "ring.layout ('ring') must be one of"),
        (("striped", 64, 2, 0), "granularity (0) and cp_size (2)"),
        (("striped", 64, 0, 4), "granularity (4) and cp_size (0)"),
        (
            ("striped", 1000, 4, 128),
            "seq_len (1000) must be a multiple of cp_size * granularity "
            "(4 * 128 = 512)",
        ),
        (
            ("contiguous", 1000, 4, 128),
            "seq_len (1000) must be a multiple of cp_size * granularity "
            "(4 * 128 = 512)",
        ),
        (
            ("zigzag", 1536, 4, 128),
            "seq_len (1536) must be a multiple of 2 * cp_size * granularity "
            "(2 * 4 * 128 = 1024)",
        ),
        (
            ("striped", 384, 4, 128),
            "cp_size (4) gives more ranks than blocks: seq_len (384) holds 3 blocks",
        ),
        (("zigzag", 512, 4, 128), "(2 * 4 * 128 = 1024)"),
        (("striped", 0, 2, 4), "seq_len (0)"),
    ],
)
def test_errors_name_both_numbers(
    arguments: tuple[str, int, int, int], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        build_layout(*arguments)
    assert message in str(error.value)


@every_layout
def test_one_rank_keeps_the_batch_as_it_is(name: str) -> None:
    layout = _layout(name, 1)
    tokens = torch.randint(0, 99, (2, layout.seq_len))
    (shard, labels), positions = shard_batch(layout, None, tokens, tokens + 1)
    assert torch.equal(shard, tokens) and torch.equal(labels, tokens + 1)
    assert torch.equal(positions, torch.arange(layout.seq_len)[None])


def test_a_batch_of_another_length_is_refused() -> None:
    layout = _layout("striped", 1)
    with pytest.raises(ValueError, match=r"batch of 23 tokens .* layout of 24"):
        shard_batch(layout, None, torch.zeros(2, 23))

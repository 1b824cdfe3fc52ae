"""Which rank owns which block of the sequence, and in which order it keeps them.

The tokens, labels and positions of a batch are permuted once, at the input
(`shard_batch`), and never again: the model sees true positions for RoPE, and the ring
sees blocks whose global index follows from the layout.

A layout is described by *segments*: arithmetic progressions of global blocks.

    striped      rank r owns blocks r, r + W, r + 2 W, ...             one segment
    contiguous   rank r owns blocks r n, r n + 1, ...                  one segment
    zigzag       rank r owns chunks r and 2 W - 1 - r of 2 W chunks    two segments

All segments of a layout have the same length and stride, and this is what makes a block
mask a closed form: for two segments with first blocks s_q and s_k and stride w, local
blocks a and b are `(a - b) w + s_q - s_k` blocks apart, so a slash is again a local
diagonal (`block_mask`).

Letters: W ranks (cp_size), g granularity (block edge in tokens), N blocks per rank,
S_local = N g tokens per rank.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

LAYOUTS = ("striped", "contiguous", "zigzag")


@dataclass(frozen=True)
class Layout:
    """How a sequence of `seq_len` tokens is spread over `cp_size` ranks.

    Build it with `build_layout`, which checks the sizes.
    """

    name: str
    seq_len: int  # global, tokens
    cp_size: int
    granularity: int  # tokens per block

    @property
    def num_blocks(self) -> int:
        """Global blocks."""
        return self.seq_len // self.granularity

    @property
    def local_blocks(self) -> int:
        """Blocks per rank, N."""
        return self.num_blocks // self.cp_size

    @property
    def local_len(self) -> int:
        """Tokens per rank, S_local."""
        return self.seq_len // self.cp_size

    @property
    def stride(self) -> int:
        """Global blocks between neighbours of a segment."""
        return self.cp_size if self.name == "striped" else 1

    @property
    def segment_len(self) -> int:
        """Blocks per segment."""
        return self.local_blocks // (2 if self.name == "zigzag" else 1)

    def segments(self, cp_rank: int) -> tuple[int, ...]:
        """First global block of each segment of a rank, in local order."""
        n = self.segment_len
        if self.name == "striped":
            return (cp_rank,)
        if self.name == "contiguous":
            return (cp_rank * n,)
        return (cp_rank * n, (2 * self.cp_size - 1 - cp_rank) * n)

    def blocks(self, cp_rank: int) -> Tensor:
        """Global block of each local block: int64 [N], ascending."""
        steps = torch.arange(self.segment_len) * self.stride
        return torch.cat([steps + first for first in self.segments(cp_rank)])

    def positions(self, cp_rank: int) -> Tensor:
        """Global position of each local token: int64 [S_local]."""
        g = self.granularity
        return (self.blocks(cp_rank)[:, None] * g + torch.arange(g)).flatten()

    def local_index(self, positions: Tensor, cp_rank: int) -> tuple[Tensor, Tensor]:
        """Where a rank keeps global positions.

        Returns:
            Local token indices (0 where not owned), and whether the rank owns each.
        """
        g, n = self.granularity, self.segment_len
        block, within = positions // g, positions % g
        index = torch.zeros_like(positions)
        owned = torch.zeros_like(positions, dtype=torch.bool)
        for number, first in enumerate(self.segments(cp_rank)):
            steps, slot = (block - first) % self.stride, (block - first) // self.stride
            here = (steps == 0) & (slot >= 0) & (slot < n)
            index = torch.where(here, (number * n + slot) * g + within, index)
            owned |= here
        return index, owned

    def is_causally_empty(self, q_rank: int, kv_rank: int) -> bool:
        """True if no query of `q_rank` may see any key of `kv_rank`."""
        last_query = max(self.segments(q_rank)) + (self.segment_len - 1) * self.stride
        return min(self.segments(kv_rank)) > last_query


@lru_cache(maxsize=256)
def build_layout(name: str, seq_len: int, cp_size: int, granularity: int) -> Layout:
    """The layout of one sequence length over one ring.

    Args:
        name: "striped", "contiguous" or "zigzag" (torch's head-tail).
        seq_len: global tokens.
        cp_size: ranks of the ring.
        granularity: tokens per block.

    Raises:
        ValueError: an unknown name, or a length that does not divide.
    """
    if name not in LAYOUTS:
        raise ValueError(f"ring.layout ('{name}') must be one of {list(LAYOUTS)}")
    if granularity < 1 or cp_size < 1:
        raise ValueError(
            f"granularity ({granularity}) and cp_size ({cp_size}) must be at least 1"
        )
    chunks = 2 if name == "zigzag" else 1
    cycle = chunks * cp_size * granularity
    factor = f"{'2 * ' if chunks == 2 else ''}cp_size * granularity"
    product = f"{'2 * ' if chunks == 2 else ''}{cp_size} * {granularity} = {cycle}"
    if seq_len < cycle:
        raise ValueError(
            f"cp_size ({cp_size}) gives more ranks than blocks: seq_len ({seq_len}) "
            f"holds {seq_len // granularity} blocks of {granularity} tokens and must "
            f"be at least {factor} ({product})"
        )
    if seq_len % cycle:
        raise ValueError(
            f"seq_len ({seq_len}) must be a multiple of {factor} ({product}) "
            f"in layout '{name}'"
        )
    return Layout(name, seq_len, cp_size, granularity)


@lru_cache(maxsize=256)
def positions_on(layout: Layout, cp_rank: int, device: torch.device) -> Tensor:
    """`layout.positions(cp_rank)` as int32 on a device, kept for the next call."""
    return layout.positions(cp_rank).int().to(device)


def shard_batch(
    layout: Layout, cp_mesh: DeviceMesh | None, *buffers: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Keep this rank's share of `[B, S]` buffers, in the layout's order.

    Labels must have been shifted before. The one way into the model for Trainer and
    Validator alike.

    Returns:
        The shards `[B, S_local]`, and their global positions, int64 `[1, S_local]`.

    Raises:
        ValueError: a buffer whose length is not the layout's.
    """
    for buffer in buffers:
        if buffer.shape[1] != layout.seq_len:
            raise ValueError(
                f"a batch of {buffer.shape[1]} tokens does not fit a layout of "
                f"{layout.seq_len}"
            )
    order = _order(layout, buffers[0].device)
    if cp_mesh is None:
        assert layout.cp_size == 1, "a ring needs its mesh"
        return buffers, order
    from mtraining_flex.compat import context_parallel_shard

    first = cp_mesh.get_local_rank() * layout.local_len
    positions = order[:, first : first + layout.local_len]
    return context_parallel_shard(cp_mesh, buffers, order), positions


@lru_cache(maxsize=8)
def _order(layout: Layout, device: torch.device) -> Tensor:
    """Positions of all ranks' tokens, rank by rank: int64 [1, S]."""
    ranks = [layout.positions(r) for r in range(layout.cp_size)]
    return torch.cat(ranks)[None].to(device)

"""Blocks that each rank executes in each ring step: the counts of `StepMask`, in numpy.

A slash d meets two segments of a layout with first blocks s_q and s_k and stride w as
the local diagonal `t = (d - (s_q - s_k)) / w`, where that divides, and executes `n -
|t|` blocks of it (`mtraining_flex.block_mask`). So only the number of heads that keep
each offset matters, and a pair of ranks costs one pass over the offsets. A query block
executes as many blocks of columns as its last row can see.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mtraining_flex.config import SparseAttention
from mtraining_flex.counters import imbalance
from mtraining_flex.layout import Layout
from mtraining_flex.pattern import VerticalSlash, dense_pattern, pack_pattern
from mtraining_flex.pattern.budget import layer_budget, list_widths
from mtraining_flex.ring.schedule import sources
from recipes.planning.problem import Problem
from recipes.record_patterns import Recorded

_LOCAL = 8  # nearest diagonals of a synthetic head, where its budget has as many
_SINKS = 16  # first columns of one


@dataclass(frozen=True)
class Work:
    """Executed blocks of one layer, over all heads of a batch."""

    slash: np.ndarray  # int64 [W query ranks, W source ranks]
    columns: np.ndarray  # int64 [W]

    def steps(self, rotation: str, node_ranks: int) -> np.ndarray:
        """In the order of computing: int64 [W ranks, W steps]."""
        size = len(self.columns)
        order = [sources(rotation, rank, size, node_ranks) for rank in range(size)]
        return np.take_along_axis(self.slash, np.array(order), axis=1)

    def imbalance(self, rotation: str, node_ranks: int) -> tuple[float, float]:
        """Worker and step imbalance, as `ring/worker_imbalance` counts them: the ring
        steps and, last, the columns."""
        steps = self.steps(rotation, node_ranks)
        work = np.concatenate([steps, self.columns[:, None]], axis=1)
        return imbalance(torch.from_numpy(work).double())


def count_work(pattern: VerticalSlash, layout: Layout, heads: int) -> Work:
    """Blocks of one layer.

    Args:
        pattern: of B and H, either of which may be 1 and stands for all.
        heads: B H of the queries.
    """
    copies = heads // pattern.num_slash.numel()
    offsets = pattern.slash.numpy().ravel()
    offsets = offsets[offsets < layout.num_blocks]
    kept = np.bincount(offsets, minlength=layout.num_blocks)  # heads by offset
    segments = [layout.segments(rank) for rank in range(layout.cp_size)]
    by_base: dict[int, int] = {}

    def meet(base: int) -> int:
        if base not in by_base:
            by_base[base] = _between_segments(kept, base, layout)
        return by_base[base]

    slash = [
        [sum(meet(s - p) for s in queries for p in keys) for keys in segments]
        for queries in segments
    ]
    by_block = _column_blocks(pattern, layout)
    blocks = [layout.blocks(rank).numpy() for rank in range(layout.cp_size)]
    columns = [int(by_block[own].sum()) for own in blocks]
    return Work(np.array(slash) * copies, np.array(columns) * copies)


def _between_segments(kept: np.ndarray, base: int, layout: Layout) -> int:
    """Blocks between two segments whose first blocks are `base` apart."""
    n, stride = layout.segment_len, layout.stride
    t = np.arange(-n + 1, n)
    offset = t * stride + base
    inside = (offset >= 0) & (offset < len(kept))
    return int((kept[offset[inside]] * (n - np.abs(t[inside]))).sum())


def _column_blocks(pattern: VerticalSlash, layout: Layout) -> np.ndarray:
    """Column blocks that each global query block executes, all heads: int64 [NB]."""
    g = layout.granularity
    ends = (np.arange(layout.num_blocks) + 1) * g
    total = np.zeros(layout.num_blocks, dtype=np.int64)
    if pattern.vertical.shape[-1] == 0:
        return total
    for columns in pattern.vertical.numpy().reshape(-1, pattern.vertical.shape[-1]):
        total += -(-np.searchsorted(columns, ends) // g)  # padded with large numbers
    return total


def synthetic_patterns(
    config: SparseAttention,
    layers: int,
    heads: int,
    layout: Layout,
    *,
    density: float | None = None,
    verticals: int | None = None,
    seed: int = 0,
) -> list[VerticalSlash]:
    """A pattern for each layer: nearest diagonals, first columns, the rest anywhere.

    At the budget of `[sparse_attention]`: of a mass ("top_p") nobody knows beforehand
    how many entries hold it, and the caps are taken.

    Args:
        density: of slash blocks among the causal ones, instead of the budget's count.
        verticals: columns of each head, instead of the budget's.

    Raises:
        ValueError: a density or a number of columns that cannot be.
    """
    if config.pattern == "dense":
        if (density, verticals) != (None, None):
            raise ValueError(
                "--density and --verticals are for sparse_attention.pattern "
                "'vertical_slash', got 'dense', which keeps all"
            )
        return [dense_pattern(layout.num_blocks, "cpu")] * layers
    if density is not None and not 0 < density <= 1:
        raise ValueError(f"--density ({density}) must be in (0, 1]")
    if verticals is not None and not 0 <= verticals <= layout.seq_len:
        raise ValueError(
            f"--verticals ({verticals}) must be from 0 to the sequence's length "
            f"({layout.seq_len})"
        )
    rng = np.random.default_rng(seed)
    widest = list_widths(config, layout.seq_len)
    patterns = []
    for layer in range(layers):
        budget = layer_budget(config, heads, layer)
        slashes, columns = [], []
        for head in range(heads):
            count = min(int(budget.slash.cap[head]), widest[1])
            slashes.append(_slashes(rng, config, layout.num_blocks, count, density))
            count = min(int(budget.vertical.cap[head]), widest[0])
            count = count if verticals is None else verticals
            columns.append(_columns(rng, config, layout.seq_len, count))
        patterns.append(pack_pattern([slashes], [columns]))
    return patterns


def _slashes(
    rng: np.random.Generator,
    config: SparseAttention,
    num_blocks: int,
    count: int,
    density: float | None,
) -> list[int]:
    local = max(min(_LOCAL, count), config.local_window)
    local = min(local, num_blocks)
    near, far = np.arange(local), rng.permutation(np.arange(local, num_blocks))
    order: np.ndarray = np.concatenate([near, far])
    if density is None:
        return order[:count].tolist()
    size = np.cumsum(num_blocks - order)
    target = density * num_blocks * (num_blocks + 1) / 2
    return order[: int(np.searchsorted(size, target)) + 1].tolist()


def _columns(
    rng: np.random.Generator, config: SparseAttention, seq_len: int, count: int
) -> list[int]:
    sinks = min(max(config.sink, min(_SINKS, count // 4)), count)
    rest = rng.choice(seq_len - sinks, count - sinks, replace=False) + sinks
    return [*range(sinks), *rest.tolist()]


def recorded_patterns(recorded: Recorded, problem: Problem) -> list[VerticalSlash]:
    """The layers of a recording, if it is one of such a run.

    Raises:
        ValueError: it is of another shape.
    """
    model, layout = problem.model, problem.layout
    for name, have, want in (
        ("seq_len", recorded.seq_len, layout.seq_len),
        ("granularity", recorded.granularity, layout.granularity),
        ("heads", recorded.heads, model.heads),
        ("layers", len(recorded.patterns), model.layers),
    ):
        if have != want:
            raise ValueError(
                f"--patterns: the recording's {name} ({have}) is not this run's "
                f"({want}); record them with this configuration"
            )
    patterns = [recorded.patterns[layer] for layer in sorted(recorded.patterns)]
    batch = patterns[0].num_slash.shape[0]
    if batch not in (1, problem.batch):
        raise ValueError(
            f"--patterns: the recording's batch ({batch}) is not "
            f"training.local_batch_size ({problem.batch})"
        )
    return patterns


def check_caps(
    patterns: Sequence[VerticalSlash], config: SparseAttention, seq_len: int
) -> None:
    """Refuse patterns that no search of this configuration would return.

    Raises:
        ValueError: a head keeps more than the caps.
    """
    if config.pattern == "dense":
        return
    widths = list_widths(config, seq_len)
    for kind, cap in zip(("vertical", "slash"), widths, strict=True):
        most = max(int(getattr(p, f"num_{kind}").max()) for p in patterns)
        if most > cap:
            raise ValueError(
                f"the patterns have a head that keeps {most} {kind}s, more than "
                f"sparse_attention.max_{kind} ({cap}): raise it, or ask for less"
            )


def count_all(
    patterns: Sequence[VerticalSlash], layout: Layout, heads: int
) -> list[Work]:
    """`count_work` of each layer; a pattern that all share is counted once."""
    counted: dict[int, Work] = {}
    for pattern in patterns:
        if id(pattern) not in counted:
            counted[id(pattern)] = count_work(pattern, layout, heads)
    return [counted[id(pattern)] for pattern in patterns]


def slash_density(patterns: Sequence[VerticalSlash], num_blocks: int) -> float:
    """Slash blocks among the causal ones, mean over layers and heads."""
    kept = heads = 0
    for pattern in patterns:
        offsets = pattern.slash[pattern.slash < num_blocks]
        kept += int((num_blocks - offsets.long()).sum())
        heads += pattern.num_slash.numel()
    return kept / heads / (num_blocks * (num_blocks + 1) / 2)

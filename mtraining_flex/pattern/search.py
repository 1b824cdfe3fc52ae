"""Find the pattern of one layer: score, rank, cut.

`find_pattern` is the whole search; `search` is what the operator calls with its budgets
ready. No gradient, no host synchronisation, static shapes.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mtraining_flex.compat import fused
from mtraining_flex.config import SparseAttention
from mtraining_flex.layout import Layout, build_layout, positions_on
from mtraining_flex.pattern.budget import LayerBudget, layer_budget, list_widths
from mtraining_flex.pattern.documents import (
    check_documents,
    forced_sinks,
    probe_groups,
)
from mtraining_flex.pattern.scores import Scores, score_keys
from mtraining_flex.pattern.select import best, cut, rank_keys, take
from mtraining_flex.pattern.types import VerticalSlash, dense_pattern
from mtraining_flex.ring.comm import Comm, comm_for


@dataclass(frozen=True)
class SearchOptions:
    """The numbers of a search that are not budgets."""

    max_vertical: int  # NV
    max_slash: int  # NS
    probe_rows: int
    sink: int
    local_window: int
    scale: float


@torch.no_grad()
def find_pattern(
    q: Tensor,
    k: Tensor,
    config: SparseAttention,
    *,
    layout: Layout | None = None,
    group: ProcessGroup | Comm | None = None,
    layer: int | None = None,
    scale: float | None = None,
    documents: Tensor | None = None,
) -> VerticalSlash:
    """What each head should keep of this sequence.

    Args:
        q: `[B, H, S, D]`, after RoPE; this rank's shard when a group is given.
        k: `[B, HK, S, D]`.
        config: the `[sparse_attention]` section.
        layout: order of the shards; None is striped.
        group: the ring's process group; None is a sequence in one piece. Collective.
        layer: index into `config.budget_file`; needed if there is one.
        scale: of the logits, default `D ** -0.5`.
        documents: int32 `[B, S]` of the whole sequence, the same on every rank: where
            the document of each position begins. None is one document.

    Returns:
        The same pattern, bit for bit, on every rank, for any number of ranks and any
        layout (design section 2).

    Raises:
        ValueError: a setting that cannot be, or a layout that does not fit.
    """
    config.validate()
    comm = comm_for(group)
    seq_len = q.shape[2] * comm.size
    if layout is None:
        layout = build_layout("striped", seq_len, comm.size, config.granularity)
    check_layout(layout, seq_len, comm.size, config.granularity)
    if documents is not None:
        check_documents(documents, q.shape[0], seq_len)
    if config.pattern == "dense":
        return dense_pattern(layout.num_blocks, q.device, documents)
    if config.probe_rows > seq_len:
        raise ValueError(
            f"sparse_attention.probe_rows ({config.probe_rows}) must not exceed the "
            f"sequence length ({seq_len})"
        )
    budget = layer_budget(config, q.shape[1], layer).to(q.device)
    options = SearchOptions(
        *list_widths(config, seq_len),
        config.probe_rows,
        config.sink,
        config.local_window,
        q.shape[-1] ** -0.5 if scale is None else scale,
    )
    pattern, _ = search(q, k, budget, options, layout, comm, documents)
    return pattern


def check_layout(layout: Layout, seq_len: int, cp_size: int, granularity: int) -> None:
    """Refuse a layout that was built for something else.

    Raises:
        ValueError: with both numbers.
    """
    for name, have, want in (
        ("seq_len", layout.seq_len, seq_len),
        ("cp_size", layout.cp_size, cp_size),
        ("granularity", layout.granularity, granularity),
    ):
        if have != want:
            raise ValueError(
                f"the layout's {name} ({have}) is not this call's ({want})"
            )


def search(
    q: Tensor,
    k: Tensor,
    budget: LayerBudget,
    options: SearchOptions,
    layout: Layout,
    comm: Comm,
    documents: Tensor | None = None,
) -> tuple[VerticalSlash, Scores]:
    """The search itself; also returns the scores, from which recall is read."""
    groups = None
    if documents is not None:
        groups = probe_groups(documents, options.probe_rows)
    scores = score_keys(q, k, layout, comm, options.probe_rows, options.scale, groups)
    if comm.size == 1 and documents is None:
        return _select_alone(scores, budget, options, layout), scores
    position = positions_on(layout, comm.rank, q.device)
    forced: tuple[Tensor, ...] = ()
    forced_count = None
    if documents is not None and groups is not None and options.sink:
        everywhere, forced_count = forced_sinks(documents, groups, options.sink)
        forced = (everywhere[:, position],)
    num_forced = options.sink if documents is None else 0
    candidates = fused(
        ("column_keys", num_forced, len(forced)),
        lambda mass, position, *forced: rank_keys(
            mass.sum(2), position, num_forced, *forced
        ),
        scores.vertical,
        position,
        *forced,
    )
    columns = best(candidates, options.max_vertical, comm)
    vertical, num_vertical = take(columns, budget.vertical, num_forced, forced_count)
    candidates = fused(
        ("slash_keys", options.local_window),
        lambda mass, offset: rank_keys(mass, offset, options.local_window),
        scores.slash,
        _offsets(layout.num_blocks, q.device),
    )
    diagonals = best(candidates, options.max_slash)
    slash, num_slash = take(diagonals, budget.slash, options.local_window)
    pattern = VerticalSlash(slash, num_slash, vertical, num_vertical, documents)
    return pattern, scores


def _select_alone(
    scores: Scores, budget: LayerBudget, options: SearchOptions, layout: Layout
) -> VerticalSlash:
    """Rank and cut where nothing travels: one graph, bound by launches otherwise."""
    sink, window = options.sink, options.local_window
    widths = options.max_vertical, options.max_slash

    def call(
        mass: Tensor,
        slash_mass: Tensor,
        position: Tensor,
        offset: Tensor,
        threshold: Tensor,
        cap: Tensor,
        slash_threshold: Tensor,
        slash_cap: Tensor,
    ) -> tuple[Tensor, ...]:
        columns = best(rank_keys(mass.sum(2), position, sink), widths[0])
        diagonals = best(rank_keys(slash_mass, offset, window), widths[1])
        vertical, num_vertical = cut(columns, threshold, cap, num_forced=sink)
        slash, num_slash = cut(diagonals, slash_threshold, slash_cap, num_forced=window)
        return slash, num_slash, vertical, num_vertical

    found = fused(
        ("select", sink, window, *widths),
        call,
        scores.vertical,
        scores.slash,
        positions_on(layout, 0, scores.vertical.device),
        _offsets(layout.num_blocks, scores.vertical.device),
        budget.vertical.threshold,
        budget.vertical.cap,
        budget.slash.threshold,
        budget.slash.cap,
    )
    return VerticalSlash(*found)


@lru_cache(maxsize=64)
def _offsets(num_blocks: int, device: torch.device) -> Tensor:
    return torch.arange(num_blocks, dtype=torch.int32, device=device)

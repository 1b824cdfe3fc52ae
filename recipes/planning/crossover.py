"""From which length on sparse attention pays, on one GPU.

Search, masks, columns and launches cost something at any length, dense attention little
at a short one. Two lengths follow for one layer, forward and backward:

    floor    below it search and masks alone cost more than dense attention does: sparse
             attention cannot pay, whatever it keeps
    whole    from it on, all of sparse attention costs less than dense attention

Sparse attention takes at least as long as the CPU needs to launch it; dense attention
is cuDNN's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mtraining_flex.config import SparseAttention
from mtraining_flex.layout import Layout
from mtraining_flex.pattern.budget import list_widths
from recipes.planning.hardware import Hardware
from recipes.planning.problem import Problem
from recipes.planning.timing import attention_ms, masks_ms, search_ms
from recipes.planning.work import Work, count_work, synthetic_patterns

LONGEST = 2**20  # tokens
_PER_OCTAVE = 8  # lengths that are tried


@dataclass(frozen=True)
class Crossover:
    """Lengths of one sequence, in tokens; None: not up to `LONGEST`."""

    floor: int | None
    whole: int | None


def crossover(
    problem: Problem,
    hardware: Hardware,
    config: SparseAttention,
    density: float | None,
    verticals: int | None,
) -> Crossover | None:
    """Of a run's model and backend; None for dense attention.

    Args:
        density: of slash blocks, at all lengths; None takes the budget's counts.
        verticals: columns of each head; None takes the budget's. A shorter sequence
            keeps all it has.
    """
    if problem.pattern == "dense":
        return None

    def pays_at_all(seq_len: int) -> bool:
        alone = _alone(problem, config, seq_len)
        return floor_ms(alone, hardware) < dense_ms(alone, hardware)

    def pays(seq_len: int) -> bool:
        alone = _alone(problem, config, seq_len)
        count = verticals if verticals is None else min(verticals, seq_len)
        work = _one_layer(alone, config, density, count)
        return sparse_ms(alone, hardware, work) < dense_ms(alone, hardware)

    lengths = _lengths(problem.layout.granularity)
    return Crossover(_first(lengths, pays_at_all), _first(lengths, pays))


def _lengths(granularity: int) -> list[int]:
    """Multiples of the granularity, ascending."""
    octaves = (LONGEST // 1024).bit_length() - 1
    steps = [1024 * 2 ** (i / _PER_OCTAVE) for i in range(octaves * _PER_OCTAVE + 1)]
    return sorted({-int(-step // granularity) * granularity for step in steps})


def _first(lengths: list[int], pays: Callable[[int], bool]) -> int | None:
    """The length from which on all pay."""
    first = None
    for seq_len in reversed(lengths):
        if not pays(seq_len):
            break
        first = seq_len
    return first


def _alone(problem: Problem, config: SparseAttention, seq_len: int) -> Problem:
    """The same on one rank, at another length."""
    widths = list_widths(config, seq_len)
    return replace(
        problem,
        layout=Layout("striped", seq_len, 1, problem.layout.granularity),
        rotation="ring",
        inner_rotation="ring",
        node_ranks=1,
        max_vertical=widths[0],
        max_slash=widths[1],
    )


def _one_layer(
    alone: Problem,
    config: SparseAttention,
    density: float | None,
    verticals: int | None,
) -> Work:
    heads = alone.model.heads
    (pattern,) = synthetic_patterns(
        config, 1, heads, alone.layout, density=density, verticals=verticals
    )
    return count_work(pattern, alone.layout, alone.batch * heads)


def dense_ms(alone: Problem, hardware: Hardware) -> float:
    """Dense causal attention by cuDNN, forward and backward, of one layer."""
    model, seq_len = alone.model, alone.layout.seq_len
    pairs = seq_len * (seq_len + 1) / 2 * model.heads * alone.batch
    rate = hardware.dense
    cost = 4 / rate.forward_tflops + 10 / rate.backward_tflops
    return pairs * model.head_dim * cost / 1e9


def floor_ms(alone: Problem, hardware: Hardware) -> float:
    """Search and masks of one layer, forward and backward."""
    device = search_ms(alone, hardware) + 2 * masks_ms(alone, hardware)
    return max(device, hardware.host_search_ms)


def sparse_ms(alone: Problem, hardware: Hardware, work: Work) -> float:
    """Sparse attention of one layer, forward and backward."""
    there = attention_ms(alone, hardware, work, backward=False)
    back = attention_ms(alone, hardware, work, backward=True)
    rates = hardware.backends[alone.backend]
    host = hardware.host_search_ms + rates.host_forward_ms + rates.host_backward_ms
    return max(there.total + back.total, host)

"""The time line of a step.

One direction of the ring. A step lasts as long as the slowest rank computes, or the
transfers under way take, whichever is more: every rank waits for what its neighbour
sends.

    flat         sum over steps of max(slowest compute, hop)
    two-level    sum over rounds of max(the same sum over the inner ring, outer hop)
    all-gather   gather + the slowest rank's sum: nothing hides the gather, and no rank
                 waits for another in between

In the backward a step also carries the gradients of the step before, over the same
links, and the last hop home hides behind the columns alone.

`ring_ms` is the whole of it. It gives the paper's 34.10 and 19.53 ms from the paper's
own times (shared/mtraining-spec.md, section 8.3), which is a test.

A layer's compute is matrix products at the rate of `linear_tflops`, what only moves
data at that of the memory, and attention by its executed blocks. The CPU launches all
of it; a step cannot be shorter than that takes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipes.planning.hardware import Hardware, Rate
from recipes.planning.problem import Problem, recomputed_linears
from recipes.planning.traffic import (
    collective,
    column_bytes,
    dkv_bytes,
    kv_bytes,
)
from recipes.planning.work import Work

# An eager step reads and writes what a compiled one keeps in registers: counted on the
# operators of a block of Qwen2.5's shape.
_EAGER_TRAFFIC = 2.8
# Numbers of a parameter that are moved: AdamW reads p, g, m, v and writes p, m, v, in
# one kernel or in about eight; clipping reads g, then reads and writes it.
_ADAM_NUMBERS = {"fused": 7, "foreach": 20, "for-loop": 20}
_CLIP_NUMBERS = 3


@dataclass(frozen=True)
class Links:
    """Milliseconds of one hop of one tensor, or of one gather of all."""

    inner_ms: float  # to the next rank of the node
    outer_ms: float  # to the next node
    node_gather_ms: float = 0.0  # among the ranks of a node
    gather_ms: float = 0.0  # among all ranks


@dataclass(frozen=True)
class Ring:
    """How the keys go round."""

    rotation: str
    inner_rotation: str
    node_ranks: int
    nodes: int

    @staticmethod
    def of(problem: Problem) -> "Ring":
        return Ring(
            problem.rotation, problem.inner_rotation, problem.node_ranks, problem.nodes
        )


def ring_ms(
    compute: np.ndarray,
    columns: np.ndarray,
    ring: Ring,
    kv: Links,
    dkv: Links | None = None,
) -> float:
    """One direction of the ring, with the columns behind it.

    Args:
        compute: ms of each rank and step, in the order of computing: [W, W].
        columns: ms of each rank's vertical step: [W].
        kv: transfers of keys and values.
        dkv: of their gradients, in the backward.
    """
    steps = compute.max(0)  # of the slowest rank
    size = len(steps)
    tail = float(columns.max())
    if size == 1:
        return float(steps[0]) + tail
    if ring.rotation == "allgather":
        home = 0.0 if dkv is None else dkv.gather_ms
        return kv.gather_ms + float((compute.sum(1) + columns).max()) + home
    if ring.rotation == "ring":
        crosses = ring.nodes > 1
        hop = kv.outer_ms if crosses else kv.inner_ms
        back = 0.0 if dkv is None else dkv.outer_ms if crosses else dkv.inner_ms
        loads = _loads(size, hop, back, first=True)
        return float(np.maximum(steps, loads).sum()) + max(tail, back)
    return _two_level_ms(compute, ring, kv, dkv, tail)


def _loads(size: int, hop: float, back: float, first: bool) -> np.ndarray:
    """ms of transfers in each step: keys move in all but the last, the gradients of a
    step in the next one (those of the last step of a round in the next round)."""
    loads = np.full(size, hop)
    loads[-1] = 0.0
    loads += back
    if first:
        loads[0] -= back
    return loads


def _two_level_ms(
    compute: np.ndarray, ring: Ring, kv: Links, dkv: Links | None, tail: float
) -> float:
    total = 0.0
    M, O = ring.node_ranks, ring.nodes  # noqa: E741
    back_in = 0.0 if dkv is None else dkv.inner_ms
    back_out = 0.0 if dkv is None else dkv.outer_ms
    for number in range(O):
        steps = compute[:, number * M : (number + 1) * M]
        if ring.inner_rotation == "allgather":
            gathers = kv.node_gather_ms + (0.0 if dkv is None else dkv.node_gather_ms)
            inner = gathers + float(steps.sum(1).max())
        else:
            loads = _loads(M, kv.inner_ms, back_in, first=number == 0)
            inner = float(np.maximum(steps.max(0), loads).sum())
        outer = kv.outer_ms if number < O - 1 else 0.0
        outer += back_out if number > 0 else 0.0
        total += max(inner, outer)
    # The last sum comes round the inner ring before it leaves for the next node.
    exposed = back_in if ring.inner_rotation == "ring" else 0.0
    return total + exposed + max(tail, back_out)


def links(problem: Problem, hardware: Hardware, size: float) -> Links:
    """Transfers of `size` bytes of each rank."""
    W, M = problem.cp, problem.node_ranks
    inner, outer = hardware.inner, hardware.outer
    return Links(
        inner_ms=inner.ms(size),
        outer_ms=outer.ms(size),
        node_gather_ms=inner.ms((M - 1) * size, M - 1),
        gather_ms=_collective_ms(problem, hardware, (W - 1) * size, W - 1),
    )


def _collective_ms(
    problem: Problem, hardware: Hardware, size: float, hops: float
) -> float:
    """Rings that carry `size` bytes past each rank, in so many hops."""
    if problem.cp == 1:
        return 0.0
    sent = collective(problem, size)
    times = [hardware.inner.ms(sent.inner, hops)]
    if sent.outer:
        times.append(hardware.outer.ms(sent.outer, hops))
    return max(times)


def all_reduce_ms(problem: Problem, hardware: Hardware, size: float) -> float:
    """All-reduce of one tensor of `size` bytes over the ring."""
    around = 2 * (problem.cp - 1)
    return _collective_ms(problem, hardware, around / problem.cp * size, around)


# --- attention ------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """ms of the attention of one layer, one direction, on the device."""

    search: float  # forward only
    masks: float
    columns: float  # gathering them, and scattering their gradients
    ring: float  # all steps and transfers

    @property
    def total(self) -> float:
        return self.search + self.masks + self.columns + self.ring


def search_ms(problem: Problem, hardware: Hardware) -> float:
    """Finding the pattern of one layer."""
    if problem.pattern == "dense":
        return 0.0
    head_tokens = problem.tokens * problem.model.heads
    own = hardware.search_fixed_ms
    own += head_tokens * hardware.search_ns_per_head_token / 1e6
    # Probe rows, maxima, sums and the histogram are small: four collectives of latency.
    return own + _collective_ms(problem, hardware, 0.0, 4 * (problem.cp - 1))


def masks_ms(problem: Problem, hardware: Hardware) -> float:
    """Lists or tables of all steps, one direction."""
    per_step = 2 * hardware.kernel_us / 1e3
    if problem.backend != "triton":
        model, n = problem.model, problem.layout.local_blocks
        tables = 2 * problem.batch * model.heads * n * min(problem.max_slash, n) * 4
        per_step += 2 * hardware.kernel_us / 1e3 + hardware.hbm_ms(2 * tables)
    return problem.cp * per_step


def block_ms(problem: Problem, rate: Rate, backward: bool) -> float:
    """One executed block of one head."""
    pairs = problem.layout.granularity**2
    flop = (10 if backward else 4) * problem.model.head_dim * pairs
    return flop / (rate.backward_tflops if backward else rate.forward_tflops) / 1e9


def step_overhead_ms(problem: Problem, hardware: Hardware, backward: bool) -> float:
    """What a ring step moves besides the kernel's tiles: merging, sums, launches.

    Partial results are fp32 where another step follows.
    """
    model = problem.model
    q = problem.tokens * model.heads * model.head_dim
    k = problem.tokens * model.kv_heads * model.head_dim
    if problem.cp == 1:
        # triton and flash continue in place; delta reads out and dout once.
        size = {"flex": 6 * q, "flash": 0, "triton": 0}[problem.backend]
        size += (4 * q + 20 * k) if backward else 0
    else:
        size = {"flex": 10 * q, "flash": 10 * q, "triton": 8 * q}[problem.backend]
        size += 24 * k if backward else 0
    return hardware.hbm_ms(size) + hardware.kernel_us / 1e3


def attention_ms(
    problem: Problem, hardware: Hardware, work: Work, backward: bool
) -> Attention:
    """One direction of one layer."""
    rates = hardware.backends[problem.backend]
    steps = work.steps(problem.rotation, problem.node_ranks)
    overhead = step_overhead_ms(problem, hardware, backward)
    compute = steps * block_ms(problem, rates.slash, backward)
    compute = np.where(steps > 0, compute + overhead, 0.0)
    columns = work.columns * block_ms(problem, rates.column, backward)
    gather = 0.0
    if problem.max_vertical:
        kernels = hardware.gather_columns_ms
        size = column_bytes(problem, 2)
        gather = kernels + all_reduce_ms(problem, hardware, size)
        if backward:
            gather += hardware.scatter_columns_ms
            gather += all_reduce_ms(problem, hardware, 2 * size)
    time = ring_ms(
        compute,
        columns,
        Ring.of(problem),
        links(problem, hardware, kv_bytes(problem)),
        links(problem, hardware, dkv_bytes(problem)) if backward else None,
    )
    return Attention(
        search=0.0 if backward else search_ms(problem, hardware),
        masks=masks_ms(problem, hardware),
        columns=gather,
        ring=time,
    )


# --- a whole step ---------------------------------------------------------------------


@dataclass(frozen=True)
class StepTime:
    """One optimiser step, ms. All but `host` add up to the time of the device."""

    linear: float  # matrix products of the blocks
    elementwise: float  # what only moves data in the blocks
    search: float
    masks: float
    columns: float
    ring: float
    output: float  # embedding, logits and loss
    sharding: float  # of parameters: what no compute hides
    optimizer: float
    host: float  # what the CPU needs to launch it all

    @property
    def device(self) -> float:
        return (
            self.linear
            + self.elementwise
            + self.search
            + self.masks
            + self.columns
            + self.ring
            + self.output
            + self.sharding
            + self.optimizer
        )

    @property
    def total(self) -> float:
        return max(self.device, self.host)


def step_ms(problem: Problem, hardware: Hardware, works: Sequence[Work]) -> StepTime:
    """One optimiser step.

    Args:
        works: of each layer.
    """
    assert len(works) == problem.model.layers, (len(works), problem.model.layers)
    linear = _linear_ms(problem, hardware)
    moved = _elementwise_ms(problem, hardware)
    parts = dict.fromkeys(("search", "masks", "columns", "ring", "sharding"), 0.0)
    again = problem.checkpointing == "full"  # the ring, but never the search
    fetch = _sharding_ms(problem, hardware)
    for work in works:
        there = attention_ms(problem, hardware, work, backward=False)
        back = attention_ms(problem, hardware, work, backward=True)
        parts["search"] += there.search
        for name in ("masks", "columns", "ring"):
            once = getattr(there, name)
            parts[name] += once * (2 if again else 1) + getattr(back, name)
        forward = linear[0] + moved[0] + there.total
        backward = linear[1] + moved[1] + back.total
        parts["sharding"] += max(fetch[0] - forward, 0.0)
        parts["sharding"] += max(fetch[1] - backward, 0.0)
    layers, passes = problem.model.layers, problem.passes
    return StepTime(
        linear=passes * layers * sum(linear),
        elementwise=passes * layers * sum(moved),
        **{name: passes * ms for name, ms in parts.items()},
        output=passes * _output_ms(problem, hardware),
        optimizer=_optimizer_ms(problem, hardware),
        host=passes * layers * _host_layer_ms(problem, hardware),
    )


def _linear_ms(problem: Problem, hardware: Hardware) -> tuple[float, float]:
    """Matrix products of a block, forward and backward, with what is recomputed."""
    flop = 2 * problem.tokens * problem.model.block_weights
    again = 2 * problem.tokens * sum(x.weights for x in recomputed_linears(problem))
    return hardware.linear_ms(flop), hardware.linear_ms(2 * flop + again)


def _elementwise_ms(problem: Problem, hardware: Hardware) -> tuple[float, float]:
    """Norms, rotation, activation and residuals of a block, and casts of its weights.

    Bytes a token as Inductor fuses them (both norms, q and k once for the search and
    once for the ring), forward and backward.
    """
    model, e = problem.model, problem.residual_bytes
    d, F = model.dim, model.hidden
    qk = (model.heads + model.kv_heads) * model.head_dim
    there: float = 4 * e * d + 10 * d + 6 * qk + 6 * F
    back: float = 8 * e * d + 30 * d + 12 * qk + 12 * F
    if not problem.compiled:
        there, back = _EAGER_TRAFFIC * there, _EAGER_TRAFFIC * back
        back += 0.0 if problem.checkpointing == "none" else there
    # To bf16 and, for the gradients, back to fp32: by autocast or by FSDP.
    casts = 6 * model.block_weights, 12 * model.block_weights
    return (
        hardware.hbm_ms(there * problem.tokens + casts[0]),
        hardware.hbm_ms(back * problem.tokens + casts[1]),
    )


def _output_ms(problem: Problem, hardware: Hardware) -> float:
    """Logits, loss and embedding, forward and backward."""
    model, tokens = problem.model, problem.tokens
    products = hardware.linear_ms(6 * tokens * model.vocab_weights)
    # Compiled: two passes over bf16 logits forward, one that reads and writes backward.
    # Eager: fp32 copies, log_softmax and its gradient, and back to bf16.
    size = tokens * model.vocab * (8 if problem.compiled_loss else 36)
    if problem.loss_chunk > 0:
        # No second pass over the logits in the backward; but each chunk's gradient of
        # the weight is written in bf16, and read to be added to the sum in fp32.
        size = tokens * model.vocab * (6 if problem.compiled_loss else 30)
        size += 12 * model.vocab_weights * math.ceil(tokens / problem.loss_chunk)
    size += 18 * model.vocab_weights  # casts of the weight and its gradient
    size += (16 if model.tied else 4) * model.vocab_weights  # the embedding's gradient
    size += 6 * problem.residual_bytes * tokens * model.dim
    return products + hardware.hbm_ms(size)


def _optimizer_ms(problem: Problem, hardware: Hardware) -> float:
    numbers = _ADAM_NUMBERS[problem.optimizer] + _CLIP_NUMBERS
    share = problem.model.parameters / problem.shard
    return hardware.hbm_ms(numbers * problem.state_bytes * share)


def _sharding_ms(problem: Problem, hardware: Hardware) -> tuple[float, float]:
    """Fetching a block's parameters, and in the backward scattering its gradients.

    bf16 there, fp32 back. Copies (`replicate`) add an all-reduce of the shards.
    """
    parameters = problem.model.block_parameters
    group = problem.shard
    if group == 1:
        return 0.0, 0.0
    rate = hardware.inner.gb_per_s
    if group > problem.node_gpus:
        rate = min(rate, problem.node_gpus * hardware.outer.gb_per_s)
    size = (group - 1) / group * parameters
    gather, scatter = 2 * size / rate / 1e6, 4 * size / rate / 1e6
    copies = problem.replicate
    reduce = 2 * (copies - 1) / copies * 4 * parameters / group
    return gather, gather + scatter + reduce / hardware.outer.gb_per_s / 1e6


def _host_layer_ms(problem: Problem, hardware: Hardware) -> float:
    """What the CPU needs for one layer, both directions."""
    rates = hardware.backends[problem.backend]
    search = 0.0 if problem.pattern == "dense" else hardware.host_search_ms
    steps = (problem.cp - 1) * hardware.host_ring_step_ms
    there, back = rates.host_forward_ms + steps, rates.host_backward_ms + steps
    again = there if problem.checkpointing == "full" else 0.0
    rest = hardware.host_layer_ms if problem.compiled else hardware.host_eager_layer_ms
    return search + there + back + again + rest

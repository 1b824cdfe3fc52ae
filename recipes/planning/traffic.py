"""Bytes that the ranks of a ring send, and over which links.

Keys and values travel in bf16, their gradients in fp32 (`mtraining_flex.ring.drive`).
In a flat ring over O nodes of M ranks, the last rank of each node sends over the
network and all others inside; every step waits for the slowest. A collective over nodes
is taken as NCCL does it: as many rings side by side as a node has ranks, each crossing
the network at another one.
"""

from dataclasses import dataclass

from recipes.planning.problem import Problem


@dataclass(frozen=True)
class Bytes:
    """What the rank that sends most sends, over each kind of link."""

    inner: float = 0.0
    outer: float = 0.0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.inner + other.inner, self.outer + other.outer)

    def __mul__(self, times: float) -> "Bytes":
        return Bytes(self.inner * times, self.outer * times)


@dataclass(frozen=True)
class Traffic:
    """Of one layer in one forward and backward pass, per rank."""

    kv_forward: Bytes  # keys and values
    kv_backward: Bytes
    dkv: Bytes  # their gradients
    columns: Bytes  # all-reduces of the gathered columns, forward and backward

    @property
    def total(self) -> Bytes:
        return self.kv_forward + self.kv_backward + self.dkv + self.columns


def kv_bytes(problem: Problem) -> int:
    """Keys and values of one rank, bf16."""
    model = problem.model
    return 2 * 2 * problem.tokens * model.kv_heads * model.head_dim


def dkv_bytes(problem: Problem) -> int:
    """Their gradients, fp32."""
    return 2 * kv_bytes(problem)


def column_bytes(problem: Problem, element: int) -> int:
    """Gathered keys and values of all columns, per query head."""
    model = problem.model
    rows = problem.column_blocks * problem.layout.granularity
    return 2 * problem.batch * model.heads * rows * model.head_dim * element


def collective(problem: Problem, size: float) -> Bytes:
    """A collective of the ring whose rings carry `size` bytes past each rank."""
    return _rings(size, problem.cp, problem.node_ranks)


def _rings(size: float, ranks: int, node_ranks: int) -> Bytes:
    if ranks <= node_ranks:
        return Bytes(inner=size)
    if node_ranks == 1:
        return Bytes(outer=size)
    return Bytes(size, size / node_ranks)


def all_reduce(problem: Problem, size: float) -> Bytes:
    """Of one tensor of `size` bytes over the ring's ranks."""
    return collective(problem, 2 * (problem.cp - 1) / problem.cp * size)


def count_traffic(problem: Problem) -> Traffic:
    """Bytes of one layer and pass."""
    kv = _rotate(problem, kv_bytes(problem), home=False)
    dkv = _rotate(problem, dkv_bytes(problem), home=True)
    # Forward and backward gather the columns; the gradients are fp32.
    forward = all_reduce(problem, column_bytes(problem, 2))
    backward = forward + all_reduce(problem, column_bytes(problem, 4))
    recomputed = problem.checkpointing == "full"  # the whole ring runs again
    return Traffic(
        kv_forward=kv,
        kv_backward=kv * (2 if recomputed else 1),
        dkv=dkv,
        columns=forward * (2 if recomputed else 1) + backward,
    )


def _rotate(problem: Problem, size: int, home: bool) -> Bytes:
    """One round trip of `size` bytes a rank; gradients make the last hop home."""
    W, M, O = problem.cp, problem.node_ranks, problem.nodes  # noqa: E741
    if W == 1:
        return Bytes()
    if problem.rotation == "allgather":
        return collective(problem, (W - 1) * size)
    if problem.rotation == "two_level":
        if problem.inner_rotation == "allgather" or not home:
            inner = O * (M - 1)
        else:
            inner = O * M
        return Bytes(inner * size, (O if home else O - 1) * size)
    hops = (W if home else W - 1) * size
    if O == 1:
        return Bytes(inner=hops)
    return Bytes(hops if M > 1 else 0.0, hops)


def sharding_traffic(problem: Problem) -> Bytes:
    """Parameters and gradients of all layers in one pass, as FSDP2 sends them.

    Each shard's bf16 weights are gathered for the forward and, but for the output's,
    again for the backward; gradients are scattered in fp32. Copies (`replicate`) add an
    all-reduce of the shards, between nodes.
    """
    model, group, copies = problem.model, problem.shard, problem.replicate
    blocks = model.layers * model.block_parameters
    past = (group - 1) / group * (2 * blocks + 2 * model.parameters)
    past += (group - 1) / group * 4 * model.parameters
    reduced = 2 * (copies - 1) / copies * 4 * model.parameters / group
    return _rings(past, group, problem.node_gpus) + Bytes(outer=reduced)

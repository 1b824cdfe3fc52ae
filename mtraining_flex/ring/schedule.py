"""Whose keys are here at each ring step. Pure Python, no processes.

Flat ring: keys travel to the next rank after each step, so at step s rank r holds those
of rank r - s. In the striped layout this is what makes a step balanced: a slash d meets
ranks r and p only if d = r - p (mod W), which is s for every rank.

Two-level ring: W = O M ranks on O nodes of M, rank r = o M + i is local rank i of node
o. In round a the node holds the keys of node o - a, and passes them round an inner ring
of M steps; meanwhile they travel to the same local rank of the next node. At step c of
round a rank (o, i) computes on the keys of (o - a, i - c), so that

    r - p = a M + c        for i >= c
    r - p = (a - 1) M + c  for i < c  (the inner ring has wrapped)

and a step serves two classes of slashes instead of one: which share a step can be seen
in `ring/step_imbalance`. No order of an inner ring does better: a rotation of M ranks
wraps, a rotation of W does not stay in the node.
"""

from collections.abc import Sequence


def ring_sources(cp_rank: int, cp_size: int) -> list[int]:
    """Source rank of each step, own keys first."""
    return [(cp_rank - step) % cp_size for step in range(cp_size)]


def two_level_sources(cp_rank: int, cp_size: int, inner_degree: int) -> list[list[int]]:
    """Source rank of each inner step of each round, own keys first: [O][M].

    Args:
        inner_degree: ranks of an inner ring, M; divides cp_size.
    """
    assert cp_size % inner_degree == 0, (cp_size, inner_degree)
    outer, inner = divmod(cp_rank, inner_degree)
    return [
        [node * inner_degree + local for local in ring_sources(inner, inner_degree)]
        for node in ring_sources(outer, cp_size // inner_degree)
    ]


def sources(
    rotation: str, cp_rank: int, cp_size: int, inner_degree: int = 0
) -> list[int]:
    """Source rank of each step of a rotation, in the order of computing."""
    if rotation == "two_level":
        rounds = two_level_sources(cp_rank, cp_size, inner_degree)
        return [source for each in rounds for source in each]
    return ring_sources(cp_rank, cp_size)


def ranks_per_node(ranks: Sequence[int], local_world_size: int) -> int:
    """How many ranks of a ring share each node.

    Args:
        ranks: global rank of each rank of the ring, in its order.
        local_world_size: processes per node, as torchrun counts them.

    Raises:
        ValueError: the ring does not have the same number on each of its nodes, side
            by side.
    """
    nodes = [rank // local_world_size for rank in ranks]
    here = nodes.count(nodes[0])
    blocks = [nodes[i : i + here] for i in range(0, len(nodes), here)]
    if any(len(b) != here or len(set(b)) != 1 for b in blocks) or len(
        {b[0] for b in blocks}
    ) != len(blocks):
        raise ValueError(
            f"ring.inner_degree (0: ranks per node) needs the same number of the "
            f"ring's {len(ranks)} ranks, side by side, on every node of "
            f"{local_world_size} processes; they are on nodes {nodes}: set "
            "ring.inner_degree"
        )
    return here


def check_inner_degree(inner_degree: int, cp_size: int, how: str = "") -> None:
    """Refuse an inner ring that is no inner ring.

    Args:
        how: where the number comes from, for the message.

    Raises:
        ValueError: inner_degree is 1 or less, cp_size or more, or does not divide it.
    """
    if 1 < inner_degree < cp_size and cp_size % inner_degree == 0:
        return
    raise ValueError(
        f"ring.inner_degree ({inner_degree}{how}) must divide "
        f"parallelism.context_parallel_degree ({cp_size}), be more than 1 and less "
        f"than {cp_size}; for one ring over all ranks set ring.rotation = 'ring'"
    )

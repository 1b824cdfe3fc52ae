"""Whose keys are here at each ring step. Pure Python, no processes.

Flat ring: keys travel to the next rank after each step, so at step s rank r holds those
of rank r - s. In the striped layout this is what makes a step balanced: a slash d meets
ranks r and p only if d = r - p (mod W), which is s for every rank.
"""


def ring_sources(cp_rank: int, cp_size: int) -> list[int]:
    """Source rank of each step, own keys first."""
    return [(cp_rank - step) % cp_size for step in range(cp_size)]

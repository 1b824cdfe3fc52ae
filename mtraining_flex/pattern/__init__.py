"""The pattern of a layer: what it is, how it is found, how good it is."""

from mtraining_flex.pattern.quality import density, recall
from mtraining_flex.pattern.search import find_pattern
from mtraining_flex.pattern.types import VerticalSlash, dense_pattern, pack_pattern

__all__ = [
    "VerticalSlash",
    "dense_pattern",
    "density",
    "find_pattern",
    "pack_pattern",
    "recall",
]

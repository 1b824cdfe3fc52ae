"""Turn scores into a pattern: the second half of the search.

Entries are ranked by one integer key each: forced first, then the higher score, then
the lower index. A key names its entry, so no two are equal, `topk` has no ties to break
and every rank picks the same set. Each rank sends its best NV candidates to all others;
the best of all are among them.

Key bits: 62 forced, 61..31 the bits of the score (ordered like the score, as it is not
negative), 30..0 the index, inverted.
"""

from functools import partial

import torch
from torch import Tensor

from mtraining_flex.compat import fused
from mtraining_flex.pattern.budget import MASS_UNIT, Budget
from mtraining_flex.pattern.types import SENTINEL
from mtraining_flex.ring.comm import Comm

_FORCED = 1 << 62
_INDEX = (1 << 31) - 1


def rank_keys(
    scores: Tensor, index: Tensor, num_forced: int, forced: Tensor | None = None
) -> Tensor:
    """int64 keys of entries with fp32 `scores` `[B, H, n]` and indices `[n]`.

    Indices below `num_forced`, or those that `forced` (bool `[B, n]`) names, rank
    first. NaN scores, of NaN queries or keys, rank
    anywhere; indices stay in range, and the attention itself is NaN then.
    """
    bits = scores.contiguous().view(torch.int32).long()
    keys = (bits << 31) | (_INDEX - index.long())
    first = index < num_forced if forced is None else forced[:, None]
    return torch.where(first, keys | _FORCED, keys)


def best(keys: Tensor, width: int, comm: Comm | None = None) -> Tensor:
    """The `width` largest keys over all ranks, descending: [B, H, width]."""
    keys = keys.topk(min(width, keys.shape[-1]), sorted=True).values
    if comm is not None and comm.size > 1:
        keys = comm.all_gather(keys).movedim(0, -2).flatten(-2)
        keys = keys.topk(width, sorted=True).values
    assert keys.shape[-1] == width, "fewer entries than the static width"
    return keys


def take(
    keys: Tensor, budget: Budget, num_forced: int, forced_count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cut ranked keys at the budget.

    Args:
        forced_count: int64 `[B]`, instead of `num_forced`.

    Returns:
        The indices, int32 `[B, H, width]`, ascending and padded with SENTINEL, and
        their number, int32 `[B, H]`.
    """
    counts = () if forced_count is None else (forced_count,)
    return fused(
        ("cut", num_forced, len(counts)),
        partial(cut, num_forced=num_forced),
        keys,
        budget.threshold,
        budget.cap,
        *counts,
    )


def cut(
    keys: Tensor,
    threshold: Tensor,
    cap: Tensor,
    forced_count: Tensor | None = None,
    *,
    num_forced: int,
) -> tuple[Tensor, Tensor]:
    """`take`, as operations of a graph."""
    bits = (keys >> 31) & _INDEX
    mass = (bits.int().view(torch.float32).double() * MASS_UNIT).round().long()
    reached = mass.cumsum(-1)  # exact: integers
    # All entries before the one that reaches the threshold, and that one.
    count = (reached < threshold[:, None]).sum(-1) + 1  # [B, H]
    if forced_count is None:
        count = count.clamp(min=num_forced)
    else:
        count = torch.maximum(count, forced_count[:, None])
    count = torch.minimum(count.clamp(max=keys.shape[-1]), cap)
    index = (_INDEX - (keys & _INDEX)).int()
    rank = torch.arange(keys.shape[-1], device=keys.device)
    index = torch.where(rank < count[..., None], index, SENTINEL)
    return index.sort(-1).values, count.int()

"""Several documents in one sequence: who is one, and which rows probe for it.

`documents` is int32 [B, S] on every rank: the position at which the document of each
position begins. It names the document, since positions of one document are neighbours,
and it says all that a mask needs: a query sees the keys from `documents[q]` to q.

The probe rows are shared out in P = gcd(R, 8) groups, one after the other to the
document with the most tokens for each group it then has. So documents get rows by their
length, and one that is short beside the others gets none.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mtraining_flex.compat import fused

MAX_GROUPS = 8
_SHARE = 840  # a multiple of 1 to MAX_GROUPS: lengths divide exactly


@dataclass(frozen=True)
class ProbeGroups:
    """The probe rows of each batch entry, in groups of neighbours."""

    pos: Tensor  # int32 [B, P, R / P], not descending in a group
    start: Tensor  # int32 [B, P], where a group's document begins


def num_groups(probe_rows: int) -> int:
    """P, groups of equal size."""
    return math.gcd(probe_rows, MAX_GROUPS)


def check_documents(documents: Tensor, batch: int, seq_len: int) -> None:
    """Refuse documents that do not fit a call. Their values are not looked at.

    Raises:
        ValueError: with both shapes.
    """
    if documents.dtype != torch.int32 or tuple(documents.shape) != (batch, seq_len):
        raise ValueError(
            f"documents must be int32 [B, S] = {(batch, seq_len)} of the whole "
            f"sequence, got {documents.dtype} {tuple(documents.shape)}"
        )


def last_of_document(documents: Tensor) -> Tensor:
    """Position of the last token of each position's document: int32 [B, S]."""
    seq_len = documents.shape[1]
    position = torch.arange(seq_len, dtype=torch.int32, device=documents.device)
    begins = torch.where(documents == position, position, seq_len)[:, 1:]
    following = torch.nn.functional.pad(begins, (0, 1), value=seq_len)
    return following.flip(1).cummin(1).values.flip(1) - 1


def probe_groups(documents: Tensor, probe_rows: int) -> ProbeGroups:
    """Share the probe rows out among the documents.

    Args:
        documents: int32 [B, S].
        probe_rows: R.

    A group has R / P rows. A document's groups lie side by side at its end; none begins
    before the document, and where it has fewer rows, its last one is taken again.
    """
    groups = num_groups(probe_rows)
    call = partial(_probe_groups, groups=groups, size=probe_rows // groups)
    return ProbeGroups(*fused(("probe_groups", groups, probe_rows), call, documents))


def _probe_groups(documents: Tensor, groups: int, size: int) -> tuple[Tensor, Tensor]:
    seq_len = documents.shape[1]
    device = documents.device
    position = torch.arange(seq_len, device=device)
    is_last = last_of_document(documents) == position
    # The P longest, of equals the first: one number each, so that no two are equal.
    length = torch.where(is_last, position - documents + 1, 0)
    longest = (length * seq_len + (seq_len - 1 - position)).topk(
        min(groups, seq_len), sorted=True
    )
    end, length = longest.indices, longest.values // seq_len  # [B, P]
    # Tokens for each group of a document, if it has 1, 2, ... of them; the best P.
    number = torch.arange(1, groups + 1, device=device)
    quotient = length[..., None] * _SHARE // number  # [B, P, P], exact
    order = seq_len - 1 - (end - length + 1)  # of equals the first document
    key = quotient * seq_len + torch.where(length > 0, order, 0)[..., None]
    taken = key.flatten(1).topk(groups, sorted=True).indices  # [B, P]
    which, number = taken // groups, taken % groups + 1
    end, length = end.gather(1, which), length.gather(1, which)
    start = end - length + 1
    begin = torch.maximum(end + 1 - number * size, start)
    rows = begin[..., None] + torch.arange(size, device=device)
    return torch.minimum(rows, end[..., None]).int(), start.int()


def forced_sinks(
    documents: Tensor, groups: ProbeGroups, sink: int
) -> tuple[Tensor, Tensor]:
    """The first tokens of each document that has probe rows.

    Returns:
        bool [B, S], and how many they are, int64 [B].
    """

    def call(documents: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(documents.shape[1], device=documents.device)
        probed = (documents[..., None] == start[:, None]).any(-1)
        forced = probed & (position - documents < sink)
        return forced, forced.sum(1)

    return fused(("forced_sinks", sink), call, documents, groups.start)

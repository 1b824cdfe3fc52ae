"""A ring step on the hand-written kernels, forward and backward.

They read the pattern's lists, continue from a partial result, so that nothing is
merged, and take slashes and columns in one launch. Natural lse in and out.
"""

from typing import Any

import torch
from torch import Tensor

from mtraining_flex.block_mask import ColumnLists, SlashLists, StepMask
from mtraining_flex.ring.step import Finished, Gradients, Part


class TritonStep:
    """A ring step on `kernels_triton.vertical_slash` (see `ring.step.Step`)."""

    fuses = True

    def continues(self, mask: StepMask) -> bool:
        return True

    def executed(self, mask: StepMask) -> Tensor:
        return mask.lists.executed()

    def finish(self, dout: Tensor, out: Tensor, lse: Tensor) -> Finished:
        from kernels_triton.vertical_slash import delta

        return Finished(dout, out, lse, delta(out, dout))

    def forward(
        self,
        q: Tensor,
        part: Part,
        scale: float,
        *,
        columns: Part | None = None,
        running: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        from kernels_triton.vertical_slash import vertical_slash_forward

        return vertical_slash_forward(
            q,
            *_arguments(part, columns),
            scale=scale,
            granularity=part.mask.granularity,
            **_documents(part, columns),
            running=running,
            dtype=dtype,
            check=False,
        )

    def backward(
        self,
        q: Tensor,
        part: Part,
        done: Finished,
        scale: float,
        *,
        columns: Part | None = None,
        running: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Gradients:
        from kernels_triton.vertical_slash import vertical_slash_backward

        assert done.delta is not None
        k, v, slashes, cols = _arguments(part, columns)
        dq, dkv, dcolumns = vertical_slash_backward(
            done.dout,
            q,
            k,
            v,
            done.lse,
            done.delta,
            slashes,
            cols,
            **_documents(part, columns),
            scale=scale,
            granularity=part.mask.granularity,
            running=running,
            dtype=dtype,
            check=False,
        )
        if dkv is None:
            assert dcolumns is not None
            return Gradients(dq, dcolumns)
        return Gradients(dq, dkv, dcolumns)


def _arguments(part: Part, columns: Part | None) -> tuple[Any, ...]:
    """k, v, slashes and columns of a call; None for what it has not."""
    from kernels_triton.lists import Columns, Slashes

    k = v = slashes = cols = None
    for each in (part, columns):
        if each is None:
            continue
        lists = each.mask.lists
        if isinstance(lists, SlashLists):
            k, v = each.k, each.v
            slashes = Slashes(
                lists.offsets,
                lists.q_segments,
                lists.k_segments,
                lists.diagonal,
                lists.windowed,
            )
        else:
            assert isinstance(lists, ColumnLists)
            cols = Columns(
                each.k,
                each.v,
                lists.pos,
                lists.bitmap,
                lists.q_blocks,
                lists.before,
                lists.visible,
                lists.documents,
            )
    return k, v, slashes, cols


def _documents(part: Part, columns: Part | None) -> dict[str, Any]:
    """Documents of a call's queries and keys; a column's are with it."""
    named: dict[str, Any] = {}
    for each in (part, columns):
        if each is None:
            continue
        lists = each.mask.lists
        named["q_doc"] = lists.q_documents
        if isinstance(lists, SlashLists):
            named["k_doc"] = lists.k_documents
    return named

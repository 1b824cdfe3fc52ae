"""Fold the result of a step into the running result.

Two softmaxes over disjoint keys combine by their log-sum-exp:

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The arithmetic is fp32 (fp64 for fp64 inputs) whatever the step computed in, and so is a
running result that is folded again: the error does not grow with the number of steps. A
row that has seen no key has lse -inf and weight 0; two of them give out 0 and lse -inf.
On a GPU each fold is one kernel.
"""

import torch
from torch import Tensor

from mtraining_flex.compat import fused


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays, everything else is accumulated in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(
    out: Tensor,
    lse: Tensor,
    step_out: Tensor,
    step_lse: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine two partial results over disjoint keys.

    Args:
        out: `[B, H, S, D]`, any float dtype.
        lse: `[B, H, S]`, natural logarithm, fp32 or fp64.
        step_out: any float dtype.
        step_lse: natural logarithm, the dtype of lse.
        dtype: of the merged out; None is the dtype of the arithmetic.
    """
    dtype = lse.dtype if dtype is None else dtype

    def call(out: Tensor, lse: Tensor, step_out: Tensor, step_lse: Tensor):
        # By hand: torch.logaddexp has no gradient to keep here, and -inf - -inf is NaN.
        top = torch.maximum(lse, step_lse)
        top = torch.where(top == -torch.inf, 0.0, top)
        old, new = (lse - top).exp(), (step_lse - top).exp()
        total = old + new
        scale = torch.where(total == 0, 0.0, 1 / total)
        merged = _weigh(old * scale, out) + _weigh(new * scale, step_out)
        return merged.to(dtype), top + total.log()

    return fused(("merge", dtype), call, out, lse, step_out, step_lse)


def start(
    step_out: Tensor, step_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A result that is not merged with any other, in `dtype`: 0 in rows without a key.

    What a kernel leaves in such a row is not relied upon, here or in `merge`.
    """

    def call(out: Tensor, lse: Tensor) -> Tensor:
        return _weigh((lse != -torch.inf).to(lse.dtype), out).to(dtype)

    return fused(("start", dtype), call, step_out, step_lse), step_lse


def _weigh(weight: Tensor, x: Tensor) -> Tensor:
    """weight * x, and 0 where the weight is 0, whatever x is; in x's memory order."""
    weight = weight[..., None]
    return (x.to(weight.dtype) * weight).masked_fill(weight == 0, 0.0)

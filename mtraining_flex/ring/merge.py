"""Fold the result of a step into the running result.

Two softmaxes over disjoint keys combine by their log-sum-exp:

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The running result is fp32 (fp64 for fp64 inputs) whatever the step computed in, so that
the error does not grow with the number of steps. A row that has seen no key has lse -inf
and weight 0; two of them give out 0 and lse -inf.
"""

import torch
from torch import Tensor


def merge(
    out: Tensor, lse: Tensor, step_out: Tensor, step_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine two partial results.

    Args:
        out: `[B, H, S, D]`, running, fp32 or fp64.
        lse: `[B, H, S]`, natural logarithm.
        step_out: any float dtype.
        step_lse: natural logarithm, the dtype of lse.
    """
    total = torch.logaddexp(lse, step_lse)
    # -inf - -inf is NaN: a row without a key on either side weighs nothing.
    base = torch.where(total == -torch.inf, 0.0, total)
    old, new = (lse - base).exp()[..., None], (step_lse - base).exp()[..., None]
    return old * out + torch.where(new == 0, 0.0, new * step_out), total


def start(step_out: Tensor, step_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The first step's result as a running result, 0 in rows without a key.

    What a kernel leaves in such a row is not relied upon, here or in `merge`.
    """
    dtype = torch.float64 if step_out.dtype == torch.float64 else torch.float32
    empty = (step_lse == -torch.inf)[..., None]
    return torch.where(empty, 0.0, step_out.to(dtype)), step_lse

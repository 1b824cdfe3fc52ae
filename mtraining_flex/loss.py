"""Cross-entropy without the logits of a sequence: `[S, vocab]` is 40 GB on a rank.

Hidden states are multiplied by the output weight a chunk of tokens at a time. Since a
loss is the last thing that a forward computes, each chunk's gradient is taken at once,
while its logits are there, and nothing is recomputed: what waits for the backward are
the gradients of the hidden states `[S, dim]` and of the weight `[vocab, dim]`, the
latter in fp32, to which all chunks add.

The sum over tokens is what torchtitan's loss gives, too; it is divided by the number of
valid tokens of all ranks afterwards.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchtitan.components.loss import IGNORE_INDEX, build_cross_entropy_loss
from torchtitan.tools.logging import logger

Chunk = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def naive_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The slow twin: all logits at once. Arguments as `chunked_cross_entropy`."""
    logits = F.linear(x, weight).flatten(0, -2)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        wide, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
    )


def loss_of_chunk(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss sum of some tokens, and its gradient by their logits.

    Args:
        logits: `[T, vocab]`.
        labels: `[T]`, -100 where a token does not count.

    Returns:
        fp32 (fp64 if the logits are) scalar, and `[T, vocab]` in the logits' dtype.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = labels != IGNORE_INDEX
    lse = x.logsumexp(-1, keepdim=True)
    at = labels.clamp(min=0)[:, None]
    loss = torch.where(valid, (lse - x.gather(-1, at))[:, 0], 0.0).sum()
    here = torch.arange(x.shape[-1], device=x.device) == at
    gradient = ((x - lse).exp() - here.to(x.dtype)) * valid[:, None]
    return loss, gradient.to(logits.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, size: int, chunk: Chunk
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = x.new_zeros((), dtype=wide)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if needs_x else None
        dw = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        for first in range(0, len(x), size):
            here = slice(first, first + size)
            part, gradient = chunk(x[here] @ weight.mT, labels[here])
            loss += part
            if dx is not None:
                torch.mm(gradient, weight, out=dx[here])
            if dw is not None:
                dw += gradient.mT @ x[here]
            del part, gradient  # before the next chunk's
        ctx.save_for_backward(dx, dw)
        ctx.dtypes = x.dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        results = [
            None if d is None else torch.mul(d, d_loss, out=d.new_empty(0, dtype=dtype))
            for d, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *results, None, None, None


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_size: int,
    chunk: Chunk = loss_of_chunk,
) -> Tensor:
    """Sum over tokens of the cross-entropy of `x @ weight.T` with the labels.

    Args:
        x: hidden states `[..., dim]`.
        weight: of the output `[vocab, dim]`, in x's dtype or under autocast.
        labels: int64 `[...]`, -100 where a token does not count.
        chunk_size: tokens whose logits exist at a time; the last chunk may be shorter.
        chunk: `loss_of_chunk`, perhaps compiled.

    Returns:
        fp32 scalar (fp64 if x is). Differentiable once, by x and the weight.

    Raises:
        ValueError: shapes or a chunk size that do not fit.
    """
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels {tuple(labels.shape)} do not fit hidden states {tuple(x.shape)}"
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size ({chunk_size}) must be at least 1")
    kind = x.device.type
    if torch.is_autocast_enabled(kind):  # once here, not in every product
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
    flat = x.flatten(0, -2).contiguous()
    with torch.autocast(kind, enabled=False):
        return _ChunkedCrossEntropy.apply(
            flat, weight, labels.flatten(), chunk_size, chunk
        )


def build_loss(job_config: Any, **kwargs: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """For torchtitan's train spec: of logits, or what the model has computed itself."""
    size = job_config.loss.chunk_size
    if size == 0:
        return build_cross_entropy_loss(job_config, **kwargs)
    logger.info(f"Cross-entropy from hidden states, {size} tokens at a time")
    return lambda loss, labels: loss


def build_chunk(compile_config: Any) -> Chunk:
    """`loss_of_chunk`, compiled where `[compile]` says that the loss is."""
    if compile_config.enable and "loss" in compile_config.components:
        return torch.compile(
            loss_of_chunk, backend=compile_config.backend, fullgraph=True, dynamic=False
        )
    return loss_of_chunk

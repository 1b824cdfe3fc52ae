"""The search and the ring as custom operators.

To autograd, torch.compile and activation checkpointing each is one opaque operator with
tensors, numbers and names as arguments: a compiled block has no graph break, and a
checkpoint policy can save the results by name. The search returns integers and has no
gradient. The backward of the ring is an operator of its own, since autograd inside a
custom operator fails.
"""

import torch
from torch import Tensor

from mtraining_flex.counters import StepCounter, recorder, timed
from mtraining_flex.layout import Layout, build_layout
from mtraining_flex.pattern.budget import Budget, LayerBudget
from mtraining_flex.pattern.scores import probe_recall
from mtraining_flex.pattern.search import SearchOptions, search
from mtraining_flex.pattern.types import VerticalSlash
from mtraining_flex.ring import drive
from mtraining_flex.ring.backends import resolve_backend
from mtraining_flex.ring.comm import Comm, resolve
from mtraining_flex.ring.merge import compute_dtype
from mtraining_flex.ring.step import get_step
from mtraining_flex.sentinel import BACKWARD, FORWARD, Call, Settings, sentinel


def _layout(q: Tensor, comm: Comm, layout: str, granularity: int) -> Layout:
    return build_layout(layout, q.shape[2] * comm.size, comm.size, granularity)


def _ring(
    q: Tensor,
    comm: str,
    layout: str,
    granularity: int,
    rotation: str,
    inner_degree: int,
    inner: str,
    backend: str,
    scale: float,
    documents: bool,
) -> drive.Ring:
    resolved = timed(resolve(comm))
    chosen, _ = resolve_backend(
        backend, q.device.type, granularity, q.dtype, q.shape[-1], documents
    )
    return drive.Ring(
        _layout(q, resolved, layout, granularity),
        resolved,
        rotation,
        get_step(chosen),
        scale,
        inner_degree,
        inner,
    )


def _settings(ring: drive.Ring, backend: str) -> Settings:
    return Settings(
        ring.layout, ring.rotation, ring.inner_degree, ring.inner, backend, ring.scale
    )


def _own_precision(q: Tensor) -> torch.autocast:
    """The caller's autocast must not make bf16 of what is accumulated in fp32."""
    return torch.autocast(q.device.type, enabled=False)


def _laid_out_like(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides that `empty_like(like)` has, as the fake operators promise.

    The kernels write them so (a model's q is token-major), and nothing is copied.
    """
    if x.stride() == torch.empty_like(like, device="meta").stride():
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


@torch.library.custom_op("mtraining::search_pattern", mutates_args=())
def search_pattern(
    q: Tensor,
    k: Tensor,
    vertical_threshold: Tensor,
    vertical_cap: Tensor,
    slash_threshold: Tensor,
    slash_cap: Tensor,
    layer: Tensor,
    comm: str,
    layout: str,
    granularity: int,
    max_vertical: int,
    max_slash: int,
    sink: int,
    local_window: int,
    probe_rows: int,
    scale: float,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the pattern of one layer; the tensors of a `VerticalSlash`.

    `layer` and the budgets are CPU tensors: as Python numbers they would compile each
    layer anew.
    """
    ring = resolve(comm)
    budget = LayerBudget(
        Budget(vertical_threshold, vertical_cap),
        Budget(slash_threshold, slash_cap),
    ).to(q.device)
    options = SearchOptions(
        max_vertical, max_slash, probe_rows, sink, local_window, scale
    )
    sequence = _layout(q, ring, layout, granularity)
    with _own_precision(q):
        pattern, scores = search(q, k, budget, options, sequence, ring, documents)
        if recorder.active:
            recall = probe_recall(scores, pattern, sequence, ring)
            recorder.add(int(layer), "recall", recall)
    return pattern.tensors()


@search_pattern.register_fake
def _(
    q,
    k,
    vertical_threshold,
    vertical_cap,
    slash_threshold,
    slash_cap,
    layer,
    comm,
    layout,
    granularity,
    max_vertical,
    max_slash,
    *args,
):
    batch, heads = q.shape[:2]

    def integers(*shape: int) -> Tensor:
        return q.new_empty(batch, heads, *shape, dtype=torch.int32)

    return integers(max_slash), integers(), integers(max_vertical), integers()


@torch.library.custom_op("mtraining::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slash: Tensor,
    num_slash: Tensor,
    vertical: Tensor,
    num_vertical: Tensor,
    layer: Tensor,
    comm: str,
    layout: str,
    granularity: int,
    rotation: str,
    inner_degree: int,
    inner: str,
    backend: str,
    scale: float,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Forward of the ring: out `[B, H, S, D]` in q's dtype and natural lse."""
    ring = _ring(
        q, comm, layout, granularity, rotation, inner_degree, inner, backend, scale,
        documents is not None,
    )  # fmt: skip
    pattern = VerticalSlash(slash, num_slash, vertical, num_vertical, documents)
    number, resolved = int(layer), resolve(comm)
    watched = sentinel.watches(FORWARD, number, resolved)
    counter = StepCounter(q, ring.comm.size) if watched or recorder.active else None
    with _own_precision(q):
        recorder.add_pattern(number, pattern, ring.layout)
        out, lse = drive.forward(ring, q, k, v, pattern, counter)
        if counter is not None:
            recorder.add_executed(number, counter, ring.layout)
        if watched:
            assert counter is not None
            call = Call(q, k, v, pattern, resolved, _settings(ring, backend))
            sentinel.check_forward(call, out, lse, counter.blocks)
    return _laid_out_like(out, q), lse.contiguous()


@ring_attention.register_fake
def _(q, k, v, *args):
    lse = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
    return torch.empty_like(q), lse


@torch.library.custom_op("mtraining::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slash: Tensor,
    num_slash: Tensor,
    vertical: Tensor,
    num_vertical: Tensor,
    layer: Tensor,
    comm: str,
    layout: str,
    granularity: int,
    rotation: str,
    inner_degree: int,
    inner: str,
    backend: str,
    scale: float,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of the ring: dq, dk, dv in the dtypes of q, k, v."""
    ring = _ring(
        q, comm, layout, granularity, rotation, inner_degree, inner, backend, scale,
        documents is not None,
    )  # fmt: skip
    pattern = VerticalSlash(slash, num_slash, vertical, num_vertical, documents)
    with _own_precision(q):
        dq, dk, dv = drive.backward(ring, dout, q, k, v, out, lse, pattern)
        if sentinel.watches(BACKWARD, int(layer), resolve(comm)):
            call = Call(q, k, v, pattern, resolve(comm), _settings(ring, backend))
            sentinel.check_backward(call, out, lse, dout, (dq, dk, dv))
    # dk and dv are halves of one tensor, which an operator's results must not be.
    dk, dv = dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)
    return _laid_out_like(dq, q), dk.contiguous(), dv.contiguous()


@ring_attention_backward.register_fake
def _(dout, q, k, v, *args):
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, *pattern_and_layer = inputs[:8]
    out, lse = output
    ctx.mark_non_differentiable(lse)
    *names, documents = inputs[8:]
    ctx.save_for_backward(q, k, v, out, lse, *pattern_and_layer, documents)
    ctx.names = names


def _backward(ctx, dout, dlse):
    *tensors, documents = ctx.saved_tensors
    dq, dk, dv = ring_attention_backward(dout, *tensors, *ctx.names, documents)
    return dq, dk, dv, *[None] * 14


ring_attention.register_autograd(_backward, setup_context=_setup_context)

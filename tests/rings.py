"""A whole ring's out, dq, dk, dv, simulated in one process, and one process's own."""

from typing import Any

import torch
from torch import Tensor

from mtraining_flex.attention import sparse_attention
from mtraining_flex.config import Ring
from mtraining_flex.layout import Layout
from mtraining_flex.pattern.types import VerticalSlash
from mtraining_flex.reference import reference_attention
from mtraining_flex.ring import ops
from mtraining_flex.ring.simulate import run_ranks
from tests.helpers import assert_close

NAMES = ("out", "dq", "dk", "dv")
Inputs = tuple[Tensor, Tensor, Tensor]
Results = tuple[Tensor, Tensor, Tensor, Tensor]  # out, dq, dk, dv


def ring_results(
    qkv: Inputs,
    dout: Tensor,
    pattern: VerticalSlash,
    layout: Layout,
    rotation: str = "ring",
    **settings: Any,
) -> Results:
    """Every rank's part of out, dq, dk, dv, put back in the order of the sequence."""

    def call(comm: Any) -> tuple[Tensor, ...]:
        here = layout.positions(comm.rank)
        q, k, v = (x[:, :, here].detach().requires_grad_() for x in qkv)
        out = sparse_attention(
            q,
            k,
            v,
            pattern,
            granularity=layout.granularity,
            layout=layout,
            mesh=comm,
            rotation=rotation,
            **settings,
        )
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout[:, :, here])

    return _whole(qkv, dout, layout, run_ranks(layout.cp_size, call))


def operator_results(
    qkv: Inputs, dout: Tensor, pattern: VerticalSlash, layout: Layout, ring: Ring
) -> Results:
    """The same by the operators, which refuse no inner ring of one rank, or of all."""
    tail = (*ring.transport, "eager", qkv[0].shape[-1] ** -0.5)

    def call(comm: Any) -> tuple[Tensor, ...]:
        here = layout.positions(comm.rank)
        q, k, v = (x[:, :, here].detach().requires_grad_() for x in qkv)
        names = (comm.name, layout.name, layout.granularity)
        layer = torch.tensor(-1)
        found = (*pattern.tensors(), layer)
        out, _ = ops.ring_attention(q, k, v, *found, *names, *tail, pattern.documents)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout[:, :, here])

    return _whole(qkv, dout, layout, run_ranks(layout.cp_size, call))


def _whole(
    qkv: Inputs, dout: Tensor, layout: Layout, parts: list[tuple[Tensor, ...]]
) -> Results:
    out, dq, dk, dv = (torch.full_like(x, torch.nan) for x in (dout, *qkv))
    for rank, results in enumerate(parts):
        for total, result in zip((out, dq, dk, dv), results, strict=True):
            assert result.dtype == total.dtype
            total[:, :, layout.positions(rank)] = result
    return out, dq, dk, dv


def reference_results(
    qkv: Inputs,
    dout: Tensor,
    pattern: VerticalSlash,
    granularity: int,
    scale: float | None = None,
) -> Results:
    """The same in one process and fp64."""
    q, k, v = (x.detach().double().requires_grad_() for x in qkv)
    out, _ = reference_attention(q, k, v, pattern, granularity, scale)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.double())
    return out.detach(), dq, dk, dv


def assert_equal_results(
    actual: Results, expected: Results, layout: Layout, rtol: float = 1e-9
) -> None:
    """On the whole, and on each rank: a large part must not hide a small one."""
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert_close(a, b, rtol)
        for rank in range(layout.cp_size):
            here = layout.positions(rank)
            if b[:, :, here].any():
                assert_close(a[:, :, here], b[:, :, here], 10 * rtol)
            else:
                assert not a[:, :, here].any(), (name, rank)


def grad_like(q: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(q.shape, generator=generator, dtype=torch.float64).to(q.dtype)

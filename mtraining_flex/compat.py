"""Every private name of torch that this project uses, with the versions it is for.

Tested on torch 2.11 (CUDA 13, H200) and 2.13 (CPU). Three things live here:

* `context_parallel_shard`: torch's own sharding of a batch, with our order. Only tensors
  go through it: it rebuilds a BlockMask from its `mask_mod` and loses the block lists.
* `FlexStep`: a step on FlexAttention's compiled kernels, forward and backward. The public
  function has no backward from a *global* out and lse, so both directions call the
  higher-order operators, traced by `make_fx` and compiled by Inductor, once per shape.
  Not by `torch.compile`: nothing here can recompile, fall back to eager or be guarded.
* `check_lse_unit`: what the kernels call lse. TRITON writes and wants it in base 2, FLASH
  in base e (both versions); a surprise is an error, not a wrong gradient.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._attention import _context_parallel_shard
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _LoadBalancer,
)
from torch.fx.experimental.proxy_tensor import make_fx

from mtraining_flex.block_mask import MASKS, StepMask, Tables, build_block_mask

LN2 = math.log(2.0)
# What the lse of the operators is, in natural units per unit.
LSE_UNIT = {"TRITON": LN2, "FLASH": 1.0}


class _FixedOrder(_LoadBalancer):
    """A load balancer that is a permutation, known beforehand: int64 [1, S]."""

    def __init__(self, order: Tensor):
        self.order = order

    def _generate_indices(self, restore: bool = False) -> Tensor:
        return self.order.argsort(-1) if restore else self.order


def context_parallel_shard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], order: Tensor
) -> tuple[Tensor, ...]:
    """This rank's part of `[B, S]` tensors, permuted by `order` [1, S] before."""
    shards = _context_parallel_shard(
        mesh, tuple(buffers), tuple(1 for _ in buffers), _FixedOrder(order)
    )
    return tuple(shards)


class FlexStep:
    """A ring step on FlexAttention's compiled kernels (see `ring.step.Step`).

    `backend` "flex" takes the Triton templates throughout; "flash" takes FLASH for
    slashes and Triton for the columns, whose lookups FLASH computes more slowly.
    """

    def __init__(self, backend: str):
        assert backend in ("flex", "flash")
        self.slash_kernels = "FLASH" if backend == "flash" else "TRITON"

    def _kernels(self, mask: StepMask) -> str:
        return self.slash_kernels if mask.kind == "slash" else "TRITON"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: StepMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        kernels = self._kernels(mask)
        check_lse_unit(kernels, q.device, q.dtype, q.shape[-1])
        out, lse = _forward(kernels, q, k, v, mask, scale)
        return out, lse * LSE_UNIT[kernels]

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: StepMask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernels = self._kernels(mask)
        lse = lse / LSE_UNIT[kernels]
        return _backward(kernels, dout, q, k, v, out, lse, mask, scale)


def _kernel_options(kernels: str) -> dict[str, Any]:
    # torch 2.11's operators have no defaults for these; 2.13 takes them as well.
    return {
        "BACKEND": kernels,
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": False,
    }


def _identity_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor):
    return score


def _identity_score_grad(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, grad: Tensor
):
    return [grad, None, None, None, None]


def _mask_tuple(mask: StepMask, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The operators' form of a BlockMask; its mask function takes the buffers."""
    return build_block_mask(
        Tables(*tensors), mask.q_len, mask.kv_len, mask.granularity, MASKS[mask.kind]
    ).as_tuple()


def _forward(
    kernels: str, q: Tensor, k: Tensor, v: Tensor, mask: StepMask, scale: float
) -> tuple[Tensor, Tensor]:
    """out, and lse in the kernels' unit."""

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        tables, buffers = rest[:8], rest[8:]
        out, lse, *_ = torch.ops.higher_order.flex_attention(
            q,
            k,
            v,
            _identity_score,
            _mask_tuple(mask, tables),
            scale,
            _kernel_options(kernels),
            (),
            buffers,
        )
        return out, lse

    args = (q, k, v, *mask.tables.tensors(), *mask.buffers)
    out, lse = _compiled(("forward", kernels, mask.kind, scale), call, args)(*args)
    return out, lse


def _backward(
    kernels: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: StepMask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; lse in the kernels' unit."""

    def call(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tables, buffers = rest[:8], rest[8:]
        dq, dk, dv, _ = torch.ops.higher_order.flex_attention_backward(
            q,
            k,
            v,
            out,
            lse,
            dout,
            None,
            _identity_score,
            _identity_score_grad,
            _mask_tuple(mask, tables),
            scale,
            _kernel_options(kernels),
            (),
            buffers,
        )
        return dq, dk, dv

    args = (dout, q, k, v, out, lse, *mask.tables.tensors(), *mask.buffers)
    dq, dk, dv = _compiled(("backward", kernels, mask.kind, scale), call, args)(*args)
    return dq, dk, dv


_CACHE: dict[tuple[Any, ...], Callable[..., Any]] = {}


def _compiled(
    name: tuple[Any, ...], call: Callable[..., Any], args: tuple[Tensor, ...]
) -> Callable[..., Any]:
    """`call` compiled for these shapes, strides and dtypes."""
    key = (*name, *((a.shape, a.stride(), a.dtype, a.device) for a in args))
    fn = _CACHE.get(key)
    if fn is None:
        fn = _CACHE[key] = compile_graph(call, args)
    return fn


def num_compiled() -> int:
    """How many kernels calls have been compiled so far: constant after warm-up."""
    return len(_CACHE)


@torch.no_grad()
def compile_graph(
    call: Callable[..., Any], args: tuple[Tensor, ...]
) -> Callable[..., Any]:
    """Trace a function of tensors with fake tensors and compile it with Inductor."""
    from torch._inductor.compile_fx import compile_fx

    # A dispatch mode of the caller (selective checkpointing) is not part of the graph.
    with torch.utils._python_dispatch._disable_current_modes():
        args = tuple(a.detach() for a in args)
        return compile_fx(trace_graph(call, args), list(args))


def trace_graph(
    call: Callable[..., Any], args: tuple[Tensor, ...]
) -> torch.fx.GraphModule:
    """The graph of a function of tensors, none of which it takes for another.

    A tensor that is passed twice (positions of queries and keys on the diagonal step)
    would be traced as one argument, and the graph be wrong for all later calls.
    """
    return make_fx(call, tracing_mode="fake")(*(a.detach() for a in args))


@lru_cache(maxsize=32)
def check_lse_unit(
    kernels: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    """Measure the unit of lse of a backend on one tile.

    Raises:
        RuntimeError: it is not the unit that the ring expects.
    """
    from mtraining_flex.block_mask import slash_step
    from mtraining_flex.layout import build_layout
    from mtraining_flex.pattern.types import dense_pattern, slash_bitmap

    pattern = dense_pattern(2, device)
    mask = slash_step(
        pattern,
        slash_bitmap(pattern, 2),
        build_layout("striped", 256, 1, 128),
        0,
        0,
        (1, 1),
    )
    with torch.utils._python_dispatch._disable_current_modes():
        generator = torch.Generator(device).manual_seed(0)
        q, k, v = torch.randn(
            3, 1, 1, 256, head_dim, generator=generator, device=device
        ).to(dtype)
        scale = head_dim**-0.5
        _, lse = _forward(kernels, q, k, v, mask, scale)
        logits = scale * q.double() @ k.double().mT
        future = torch.ones(256, 256, dtype=torch.bool, device=device).triu(1)
        expected = logits.masked_fill(future, -torch.inf).logsumexp(-1)
        error = (lse.double() * LSE_UNIT[kernels] - expected).abs().max().item()
    if not error < 0.02:
        raise RuntimeError(
            f"FlexAttention's {kernels} backend on torch {torch.__version__} does not "
            f"give lse in the expected unit ({LSE_UNIT[kernels]:.4f} natural per unit): "
            f"largest error {error:.3g}; results would be wrong"
        )

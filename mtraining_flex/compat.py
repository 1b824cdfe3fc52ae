"""Every private name of torch that this project uses, with the versions it is for.

Tested on torch 2.11 (CUDA 13, H200) and 2.13 (CPU).

* `context_parallel_shard`: torch's own sharding of a batch, with our order. Only
  tensors go through it: it rebuilds a BlockMask from its `mask_mod` and loses the block
  lists.
* `compiled`, `fused`: a function of tensors traced by `make_fx` and compiled by
  Inductor, once for its shapes. Not by `torch.compile`: nothing here can recompile,
  fall back to eager, or be guarded, and a GPU step costs no guard evaluation.
* `all_gather_flat`, `reduce_scatter_flat`: collectives on flat tensors.
* `unflatten`: a mesh of more dimensions over the ranks of one of one dimension.
* `set_timeout`: how long a process group waits, changed after it was made.
* `flex_forward`, `flex_backward`: FlexAttention's higher-order operators. The public
  function has no backward from a *global* out and lse.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._attention import _context_parallel_shard
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _LoadBalancer,
)
from torch.fx.experimental.proxy_tensor import make_fx

# torch 2.13 renamed both and warns at each call of the old names.
all_gather_flat: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter_flat: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def unflatten(
    mesh: DeviceMesh, shape: tuple[int, ...], names: tuple[str, ...]
) -> DeviceMesh:
    """A one-dimensional mesh as one of this shape. Collective over the world."""
    result: DeviceMesh = mesh._unflatten(0, shape, names)
    return result


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let the transfers that this group begins from now on fail after that time."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


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
    shards: Any = _context_parallel_shard(
        mesh, tuple(buffers), tuple(1 for _ in buffers), _FixedOrder(order)
    )
    return tuple(shards)


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


def flex_forward(
    kernels: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: tuple[Any, ...],
    buffers: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out and lse (in the kernels' unit) of FlexAttention's forward operator.

    `block_mask` is a BlockMask's `as_tuple()`; its mask function takes `buffers` behind
    the four indices.
    """
    out, lse, *_ = torch.ops.higher_order.flex_attention(
        q,
        k,
        v,
        _identity_score,
        block_mask,
        scale,
        _kernel_options(kernels),
        (),
        tuple(buffers),
    )
    return out, lse


def flex_backward(
    kernels: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_mask: tuple[Any, ...],
    buffers: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the backward operator; lse in the kernels' unit."""
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
        block_mask,
        scale,
        _kernel_options(kernels),
        (),
        tuple(buffers),
    )
    return dq, dk, dv


_CACHE: dict[tuple[Any, ...], Callable[..., Any]] = {}
_COMPILING = threading.RLock()


def compiled(
    name: tuple[Any, ...], call: Callable[..., Any], args: tuple[Tensor, ...]
) -> Callable[..., Any]:
    """`call` compiled for these shapes, strides and dtypes."""
    key = (*name, *((a.shape, a.stride(), a.dtype, a.device) for a in args))
    fn = _CACHE.get(key)
    if fn is None:
        with _COMPILING:  # simulated ranks are threads, and Inductor is not for two
            fn = _CACHE.get(key)
            if fn is None:
                fn = _CACHE[key] = compile_graph(call, args)
    return fn


def fused(name: tuple[Any, ...], call: Callable[..., Any], *args: Tensor) -> Any:
    """`call(*args)`, in as few kernels as Inductor makes of it where there is a GPU.

    `name` must tell apart all that `call` depends on besides its tensors.
    """
    if not args[0].is_cuda:
        return call(*args)
    return compiled(name, call, args)(*args)


def num_compiled() -> int:
    """How many graphs have been compiled so far: constant after warm-up."""
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
        graph: Any = compile_fx(trace_graph(call, args), list(args))
        return graph


def trace_graph(
    call: Callable[..., Any], args: tuple[Tensor, ...]
) -> torch.fx.GraphModule:
    """The graph of a function of tensors, none of which it takes for another.

    A tensor that is passed twice (positions of queries and keys on the diagonal step)
    would be traced as one argument, and the graph be wrong for all later calls.
    """
    return make_fx(call, tracing_mode="fake")(*(a.detach() for a in args))

"""Sparse attention, as a function and as the module in a model's attention slot.

The five steps, in order: find the pattern (`pattern`), turn it into block masks
(`block_mask`), rotate keys and values around the ring (`ring`), compute each step
(`ring.step`), merge (`ring.merge`). cp = 1 is the same code with one step.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mtraining_flex.config import Ring, resolve_inner_degree
from mtraining_flex.config import SparseAttention as SparseConfig
from mtraining_flex.layout import Layout, build_layout
from mtraining_flex.pattern.budget import layer_budget, list_widths
from mtraining_flex.pattern.documents import check_documents
from mtraining_flex.pattern.search import check_layout
from mtraining_flex.pattern.types import VerticalSlash, dense_pattern
from mtraining_flex.ring import ops
from mtraining_flex.ring.backends import resolve_backend
from mtraining_flex.ring.comm import Comm, GroupComm, comm_for


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: VerticalSlash,
    *,
    granularity: int = 128,
    layout: Layout | None = None,
    mesh: DeviceMesh | Comm | None = None,
    backend: str = "auto",
    scale: float | None = None,
    rotation: str = "ring",
    inner_degree: int = 0,
    inner: str = "ring",
) -> Tensor:
    """Causal attention over the pairs that a pattern keeps. Differentiable in q, k, v.

    Args:
        q: `[B, H, S, D]`; with a mesh, this rank's shard in the layout's order.
        k: `[B, HK, S, D]`, HK divides H; v likewise.
        pattern: of the global sequence, the same on every rank; its documents too.
        granularity: tokens per block.
        layout: order of the shards; None is striped.
        mesh: one-dimensional mesh of the ring; None is a sequence in one piece.
        backend: "auto", "flex", "flash", "triton" or "eager".
        scale: of the logits, default `D ** -0.5`.
        rotation: "ring", "two_level" or "allgather".
        inner_degree: of two_level, ranks of an inner ring; 0 is those of a node.
        inner: of two_level, "ring" or "allgather" in a node.

    Returns:
        `[B, H, S, D]`, in q's dtype. A row that keeps no key gives 0 and gradients 0.

    Raises:
        ValueError: shapes, a layout or a backend that do not fit.
    """
    _check_shapes(q, k, v, pattern)
    settings = Ring(rotation=rotation, inner_degree=inner_degree, inner=inner)
    comm, ring = ring_of(mesh, settings)
    seq_len = q.shape[2] * comm.size
    if layout is None:
        layout = build_layout("striped", seq_len, comm.size, granularity)
    check_layout(layout, seq_len, comm.size, granularity)
    if pattern.documents is not None:
        check_documents(pattern.documents, q.shape[0], seq_len)
    resolve_backend(
        backend,
        q.device.type,
        granularity,
        q.dtype,
        q.shape[-1],
        pattern.documents is not None,
    )
    out, _ = ops.ring_attention(
        q,
        k,
        v,
        *pattern.tensors(),
        torch.tensor(-1),
        comm.name,
        layout.name,
        granularity,
        *ring.transport,
        backend,
        q.shape[-1] ** -0.5 if scale is None else scale,
        pattern.documents,
    )
    return out


def comm_of(mesh: DeviceMesh | Comm | None) -> Comm:
    """The ring of a one-dimensional mesh. Collective at first use.

    Raises:
        ValueError: a mesh of more dimensions.
    """
    if not isinstance(mesh, DeviceMesh):
        return comm_for(mesh)
    if mesh.ndim != 1:
        raise ValueError(f"the ring's mesh must have 1 dimension, got {mesh.ndim}")
    if mesh.size() == 1:
        return comm_for(None)
    comm = comm_for(mesh.get_group())
    if comm.rank != mesh.get_local_rank():
        raise ValueError(
            f"the ring's mesh must list its ranks in ascending order: this one is "
            f"number {mesh.get_local_rank()} of the mesh and {comm.rank} of its group"
        )
    return comm


def ring_of(mesh: DeviceMesh | Comm | None, ring: Ring) -> tuple[Comm, Ring]:
    """A ring, with its levels if it has two, and its settings with nothing left open.

    Collective at first use.

    Raises:
        ValueError: settings that do not fit this mesh.
    """
    ring.validate()
    comm = comm_of(mesh)
    if ring.rotation != "two_level":
        return comm, ring
    if isinstance(comm, GroupComm):
        ranks = torch.distributed.get_process_group_ranks(comm.group)
    else:
        ranks = list(range(comm.size))
    inner_degree = resolve_inner_degree(ring, [ranks])
    ring = dataclasses.replace(ring, inner_degree=inner_degree)
    if isinstance(mesh, DeviceMesh):
        assert isinstance(comm, GroupComm)
        comm.split_mesh(mesh, ring.inner_degree)
    return comm, ring


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, pattern: VerticalSlash) -> None:
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4:
        raise ValueError(
            f"q [B, H, S, D] and k, v [B, HK, S, D] expected, got {tuple(q.shape)}, "
            f"{tuple(k.shape)}, {tuple(v.shape)}"
        )
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} do not match")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"query heads ({q.shape[1]}) must be a multiple of kv heads ({k.shape[1]})"
        )
    for have, want, name in zip(pattern.slash.shape, q.shape[:2], "BH", strict=False):
        if have not in (1, want):
            raise ValueError(f"the pattern's {name} ({have}) must be 1 or {want}")


@dataclass(frozen=True)
class _Plan:
    """What `SparseAttention.forward` needs, fixed before the first step."""

    config: SparseConfig
    ring: Ring
    layouts: tuple[Layout, ...]  # one per sequence length
    comm_name: str
    heads: int | None  # that the budgets are for; None if they fit any number


class SparseAttention(nn.Module):
    """Causal self-attention in which each head finds what it keeps, at every call.

    Takes the place of a model's scaled-dot-product attention. It holds no parameter. A
    `RingContextParallel` (or `configure`) must have told it the layout and the ring.
    """

    def __init__(self, layer_id: int = 0):
        super().__init__()
        # A tensor, not a number, and on the CPU even under a meta device: torch.compile
        # would otherwise compile every layer of a model for itself.
        self.layer = torch.tensor(layer_id, device="cpu")
        self.plan: _Plan | None = None
        self.budget: tuple[Tensor, ...] = ()

    def configure(
        self,
        config: SparseConfig,
        ring: Ring,
        layouts: Sequence[Layout],
        mesh: DeviceMesh | Comm | None,
        heads: int | None = None,
    ) -> None:
        """Fix the pattern policy, the layouts and the ring. Collective over the mesh.

        Args:
            layouts: one for each sequence length that will come.
            heads: query heads; needed if `config.budget_file` is set.

        Raises:
            ValueError: settings that do not fit together.
        """
        config.validate()
        comm, ring = ring_of(mesh, ring)
        for layout in layouts:
            check_layout(layout, layout.seq_len, comm.size, config.granularity)
        if config.budget_file and heads is None:
            raise ValueError("sparse_attention.budget_file needs the number of heads")
        layer = int(self.layer) if config.budget_file else None
        budget = layer_budget(config, heads or 1, layer)
        checked = heads if config.budget_file else None
        self.plan = _Plan(config, ring, tuple(layouts), comm.name, checked)
        self.budget = (
            budget.vertical.threshold,
            budget.vertical.cap,
            budget.slash.threshold,
            budget.slash.cap,
        )

    @property
    def cp_size(self) -> int:
        """Ranks over which the ring spreads a sequence; 1 before `configure`."""
        return 1 if self.plan is None else self.plan.layouts[0].cp_size

    def find(
        self,
        q: Tensor,
        k: Tensor,
        plan: _Plan,
        layout: Layout,
        scale: float,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The tensors of this call's pattern."""
        if plan.config.pattern == "dense":
            return dense_pattern(layout.num_blocks, q.device).tensors()
        return ops.search_pattern(
            q.detach(),
            k.detach(),
            *self.budget,
            self.layer,
            plan.comm_name,
            layout.name,
            layout.granularity,
            *list_widths(plan.config, layout.seq_len),
            plan.config.sink,
            plan.config.local_window,
            plan.config.probe_rows,
            scale,
            documents,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = True,
        enable_gqa: bool = True,
        documents: Tensor | None = None,
        **unsupported: Any,
    ) -> Tensor:
        """`[B, H, S, D]` from q `[B, H, S, D]` and k, v `[B, HK, S, D]`.

        Local shards in the layout's order, or DTensors sharded on dimension 2; returns
        the same kind.

        Args:
            documents: int32 `[B, S]` of the whole sequence, the same on every rank:
                where the document of each position begins. None is one document.

        Raises:
            ValueError: not configured, a length that no layout has, documents that do
                not fit, or an argument that this attention would have to ignore (a
                mask, dropout).
        """
        ignored = [name for name, value in unsupported.items() if _asks(value)]
        if ignored or not is_causal:
            raise ValueError(
                "sparse attention is causal and takes no "
                f"{ignored or 'is_causal=False'}"
            )
        if isinstance(q, DTensor):
            return self._forward_dtensor(q, k, v, scale, documents)
        plan = self.plan
        if plan is None:
            raise ValueError(
                "SparseAttention has no layout yet: apply RingContextParallel, or call "
                "configure()"
            )
        for layout in plan.layouts:
            if q.shape[2] == layout.local_len:
                break
        else:
            raise ValueError(
                f"{q.shape[2]} local tokens fit none of the layouts, which have "
                f"{[x.local_len for x in plan.layouts]} per rank"
            )
        if plan.heads is not None and plan.heads != q.shape[1]:
            raise ValueError(
                f"sparse_attention.budget_file was read for {plan.heads} heads, this "
                f"attention has {q.shape[1]}"
            )
        if documents is not None:
            check_documents(documents, q.shape[0], layout.seq_len)
        if not enable_gqa and q.shape[1] != k.shape[1]:
            raise ValueError(
                f"enable_gqa=False needs as many kv heads ({k.shape[1]}) as query "
                f"heads ({q.shape[1]})"
            )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, _ = ops.ring_attention(
            q,
            k,
            v,
            *self.find(q, k, plan, layout, scale, documents),
            self.layer,
            plan.comm_name,
            layout.name,
            layout.granularity,
            *plan.ring.transport,
            plan.config.backend,
            scale,
            documents,
        )
        return out

    def _forward_dtensor(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        documents: Tensor | None,
    ) -> Tensor:
        local = [_local(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
        assert isinstance(q, DTensor)
        out = self.forward(*local, scale=scale, documents=documents)
        return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)


def _asks(value: Any) -> bool:
    """Whether an argument asks for something (a tensor has no truth value)."""
    return isinstance(value, Tensor) or bool(value)


def _local(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, DTensor) or tuple(x.placements) != (Shard(2),):
        raise ValueError(
            f"{name} must be a DTensor sharded on dimension 2 like q, got "
            f"{x.placements if isinstance(x, DTensor) else type(x)}"
        )
    return x.to_local()

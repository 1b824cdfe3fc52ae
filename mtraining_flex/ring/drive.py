"""The ring: one loop for the forward and one for the backward.

    forward                                  backward
    gather the kept columns                  gather the kept columns
    for each source rank:                    for each source rank:
        post the next keys and values            post the next keys and values
        compute the slashes, merge               compute dq, and dk, dv of the source
    compute the verticals, merge                 add dk, dv to what came along, send on
                                             compute the verticals' dq, dk, dv
                                             owners add those of their columns

Transfers are posted before the compute they hide behind and awaited after it. Every
rank posts the same transfers in the same order, also in a step in which it has nothing
to compute. out and lse accumulate in fp32, and so do dq, dk and dv: the backward of a
step uses the global out and lse, and recomputes nothing.

There is one loop for all rotations. "two_level" has rounds: a node's keys go to the
next node while they go round the ring of this one. "ring" is a single round over all
ranks, and "allgather" one over keys that are all here at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mtraining_flex.block_mask import (
    StepMask,
    pad_columns,
    slash_step,
    vertical_step,
)
from mtraining_flex.compat import fused
from mtraining_flex.counters import StepCounter
from mtraining_flex.layout import Layout
from mtraining_flex.pattern.types import SENTINEL, VerticalSlash, slash_bitmap
from mtraining_flex.ring.comm import Comm, Levels, LocalComm, Transfer
from mtraining_flex.ring.merge import compute_dtype, merge, start
from mtraining_flex.ring.schedule import ring_sources
from mtraining_flex.ring.step import Finished, Gradients, Part, Step


@dataclass(frozen=True)
class Ring:
    """What the loops need besides tensors."""

    layout: Layout
    comm: Comm
    rotation: str
    step: Step
    scale: float
    inner_degree: int = 0  # of two_level
    inner: str = "ring"  # rotation within a node

    @cached_property
    def levels(self) -> Levels:
        """Rounds between nodes, steps within one."""
        if self.rotation == "two_level":
            return self.comm.split(self.inner_degree)
        return Levels(self.comm, LocalComm())

    @property
    def gathers(self) -> bool:
        """Whether a round has all of its keys at once."""
        return "allgather" in (self.rotation, self.inner)


def forward(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: VerticalSlash,
    counter: StepCounter | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse attention of this rank's queries over all ranks' keys.

    Args:
        q: `[B, H, S_local, D]` in the layout's order.
        k: `[B, HK, S_local, D]`; v likewise.
        counter: of the executed blocks, if they are to be counted.

    Returns:
        out `[B, H, S_local, D]` in q's dtype, natural lse `[B, H, S_local]` in fp32
        (fp64 for fp64).
    """
    masks = _Masks(ring, q, pattern)
    columns = masks.columns(_gather_columns(ring, k, v, q.shape[1], pattern))
    steps = _num_steps(ring)
    fused = columns is not None and ring.step.fuses
    result = _Result(ring, q, parts=steps + (columns is not None and not fused))
    for number, source, keys, values in _rotate(ring, k, v):
        if ring.layout.is_causally_empty(ring.comm.rank, source):
            continue
        part = Part(keys, values, masks.slash(source))
        if counter is not None:
            counter.count(number, ring.step.executed(part.mask))
        result.fold(part, columns if fused and result.left == 1 else None)
    if columns is not None:
        if counter is not None:
            counter.count(-1, ring.step.executed(columns.mask))
        if not fused:
            result.fold(columns)
    return result.out, result.lse


def backward(
    ring: Ring,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: VerticalSlash,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq in q's dtype and dk, dv in fp32 (fp64) of `forward`, from its out and lse."""
    masks = _Masks(ring, q, pattern)
    columns = masks.columns(_gather_columns(ring, k, v, q.shape[1], pattern))
    steps = _num_steps(ring)
    # In a ring the last hop of dk and dv hides behind a vertical step of its own.
    fused = columns is not None and ring.step.fuses and ring.comm.size == 1
    done = ring.step.finish(dout, out, lse)
    dq = _Sum(ring, q, done, parts=steps + (columns is not None and not fused))
    home = _Homebound(ring, k)
    grads = None
    for _, source, keys, values in _rotate(ring, k, v):
        dkv = None
        if not ring.layout.is_causally_empty(ring.comm.rank, source):
            part = Part(keys, values, masks.slash(source))
            step = dq.add(part, columns if fused else None)
            dkv, grads = step.dkv, step.dcolumns
        home.add(source, dkv)
    home.depart()
    if columns is not None and not fused:
        grads = dq.add(columns).dkv
    dkv_own = home.arrive()  # the last hop was under way behind the vertical step
    if grads is not None:
        grads = grads.to(compute_dtype(q.dtype))
        _scatter_columns(ring, dkv_own, ring.comm.all_reduce(grads), pattern)
    return dq.total, dkv_own[0], dkv_own[1]


def _num_steps(ring: Ring) -> int:
    """How many slash steps compute something; those of the own keys always do."""
    rank, size = ring.comm.rank, ring.comm.size
    return sum(not ring.layout.is_causally_empty(rank, p) for p in range(size))


class _Result:
    """The running out and lse. fp32 in between, q's dtype with the last part."""

    def __init__(self, ring: Ring, q: Tensor, parts: int):
        self.ring, self.q, self.left = ring, q, parts
        self._running: tuple[Tensor, Tensor] | None = None

    def fold(self, part: Part, columns: Part | None = None) -> None:
        """Attend to a part, and fold the result into what came before."""
        step, q, scale = self.ring.step, self.q, self.ring.scale
        self.left -= 1
        last = self.left == 0
        dtype = q.dtype if last else compute_dtype(q.dtype)
        if step.continues(part.mask):
            self._running = step.forward(
                q, part, scale, columns=columns, running=self._running, dtype=dtype
            )
            return
        out, lse = step.forward(q, part, scale)
        if self._running is not None:
            out, lse = merge(*self._running, out, lse, dtype)
        elif last:
            out, lse = start(out, lse, dtype)
        self._running = out, lse

    @property
    def out(self) -> Tensor:
        assert self._running is not None and self.left == 0
        return self._running[0]

    @property
    def lse(self) -> Tensor:
        assert self._running is not None and self.left == 0
        return self._running[1]


class _Sum:
    """The sum of all parts' dq. fp32 in between, q's dtype with the last part."""

    def __init__(self, ring: Ring, q: Tensor, done: Finished, parts: int):
        self.ring, self.q, self.done, self.left = ring, q, done, parts
        self._total: Tensor | None = None

    def add(self, part: Part, columns: Part | None = None) -> Gradients:
        """Backward of a part; its dq is added, the rest returned."""
        step, q, scale = self.ring.step, self.q, self.ring.scale
        self.left -= 1
        dtype = compute_dtype(q.dtype) if self.left else q.dtype
        if step.continues(part.mask):
            result = step.backward(
                q,
                part,
                self.done,
                scale,
                columns=columns,
                running=self._total,
                dtype=dtype,
            )
            self._total = result.dq
            return result
        result = step.backward(q, part, self.done, scale)
        if self._total is None:
            self._total = result.dq if self.left else result.dq.to(dtype)
            return result

        def call(total: Tensor, part: Tensor) -> Tensor:
            wide = compute_dtype(part.dtype)
            return (total.to(wide) + part.to(wide)).to(dtype)

        self._total = fused(("sum", dtype), call, self._total, result.dq)
        return result

    @property
    def total(self) -> Tensor:
        assert self._total is not None and self.left == 0
        return self._total


class _Masks:
    """The step masks of one call; the bitmap is shared."""

    def __init__(self, ring: Ring, q: Tensor, pattern: VerticalSlash):
        self.ring, self.pattern = ring, pattern
        self.heads = (q.shape[0], q.shape[1])
        self.bitmap = slash_bitmap(pattern, ring.layout.num_blocks)

    def slash(self, source: int) -> StepMask:
        layout, rank = self.ring.layout, self.ring.comm.rank
        return slash_step(self.pattern, self.bitmap, layout, rank, source, self.heads)

    def vertical(self) -> StepMask:
        layout, rank = self.ring.layout, self.ring.comm.rank
        return vertical_step(self.pattern, self.bitmap, layout, rank, self.heads)

    def columns(self, gathered: Tensor | None) -> Part | None:
        """The gathered columns `[2, B, H, J g, D]` as a part."""
        if gathered is None:
            return None
        return Part(gathered[0], gathered[1], self.vertical())


def _rotate(
    ring: Ring, k: Tensor, v: Tensor
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Step number, source rank, and its keys and values `[B, HK, S, D]`."""
    inner, outer = ring.levels
    if ring.comm.size == 1:
        yield 0, 0, k, v
        return
    kv = torch.stack([k, v])  # one transfer for both
    number = 0
    for node in ring_sources(outer.rank, outer.size):
        last = number + inner.size == ring.comm.size
        transfer = None if last else outer.hop("kv", kv)
        for local, keys, values in _rotate_inner(ring, kv):
            yield number, node * inner.size + local, keys, values
            number += 1
        if transfer is not None:
            kv = transfer.wait()


def _rotate_inner(ring: Ring, kv: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Local rank of the inner ring, and its keys and values."""
    inner = ring.levels.inner
    everyone = inner.all_gather(kv) if ring.gathers else None
    for number, local in enumerate(ring_sources(inner.rank, inner.size)):
        if everyone is not None:
            yield local, *everyone[local]
            continue
        last = number == inner.size - 1
        transfer = None if last else inner.hop("kv", kv)
        yield local, *kv
        if transfer is not None:
            kv = transfer.wait()


class _Homebound:
    """dk and dv on their way to the rank that owns the keys.

    In an inner ring the sum travels one step behind the keys: it arrives with what the
    previous ranks have added, takes this rank's part and goes on, and after M hops it
    is back where the keys came in. There it takes what the nodes before have added, and
    goes on to the next node; after O such hops it is home.
    """

    def __init__(self, ring: Ring, like: Tensor):
        self.inner, self.outer = ring.levels
        self.gathers, self.dtype = ring.gathers, compute_dtype(like.dtype)
        self.like, self.count = like, 0
        self.within: Transfer | None = None  # round the inner ring
        self.between: Transfer | None = None  # to the next node

    def add(self, source: int, dkv: Tensor | None) -> None:
        """Add this rank's part for the keys of `source`, and send the sum on."""
        first = self.count % self.inner.size == 0
        if first and self.count > 0:
            # The last hop of the round before was under way behind this step.
            self._leave_node()
        self.count += 1
        if self.gathers:
            if first:
                self.sum = self._zeros(self.inner.size)
            if dkv is not None:
                self.sum[source % self.inner.size].copy_(dkv)
            return
        if first:
            self.sum = self._zeros(1)[0] if dkv is None else dkv.to(self.dtype)
        else:
            assert self.within is not None
            self.sum = self.within.wait()
            if dkv is not None:
                self.sum += dkv
        if self.inner.size > 1:
            self.within = self.inner.hop("dkv", self.sum)

    def depart(self) -> None:
        """Send the last sum to the next node, before what that can hide behind."""
        if self.outer.size > 1:
            self._leave_node()

    def arrive(self) -> Tensor:
        """This rank's own dk and dv, `[2, B, HK, S, D]`."""
        return self._round() if self.between is None else self.between.wait()

    def _zeros(self, ranks: int) -> Tensor:
        return self.like.new_zeros((ranks, 2, *self.like.shape), dtype=self.dtype)

    def _round(self) -> Tensor:
        """What the ranks of this node have added in a round."""
        if self.gathers:
            return self.inner.reduce_scatter(self.sum)
        return self.sum if self.within is None else self.within.wait()

    def _leave_node(self) -> None:
        total = self._round()
        if self.between is not None:
            total += self.between.wait()
        self.between = self.outer.hop("dkv", total)


def _own_columns(
    ring: Ring, pattern: VerticalSlash, kv: Tensor, heads: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Where this rank keeps each column.

    Args:
        kv: keys or values, `[B, HK, S, D]`.
        heads: query heads, H.

    Returns:
        Batch entry, kv head and token of each, int64, together [B, H, J g] (some token
        where not owned); and where this rank does not own it, bool [B, H, J g, 1].
    """
    positions = pad_columns(pattern.vertical, ring.layout.granularity)
    token, owned = ring.layout.local_index(positions, ring.comm.rank)
    batch, kv_heads = kv.shape[:2]
    b = torch.arange(batch, device=kv.device)[:, None, None]
    h = torch.arange(heads, device=kv.device)[:, None] // (heads // kv_heads)
    foreign = ~owned | (positions == SENTINEL)
    return (b, h, token.long().expand(batch, heads, -1)), foreign[..., None]


def _gather_columns(
    ring: Ring, k: Tensor, v: Tensor, heads: int, pattern: VerticalSlash
) -> Tensor | None:
    """Keys and values of all kept columns, per query head: [2, B, H, J g, D].

    Each rank fills in the columns it owns and the sum has them all, exactly. Columns
    behind the last are zero. None if no column can be kept.
    """
    if pattern.vertical.shape[-1] == 0:
        return None
    at, foreign = _own_columns(ring, pattern, k, heads)
    columns = torch.stack([k[at], v[at]])
    # Not a product with 0: NaN in the token that stands in would reach every rank.
    return ring.comm.all_reduce(columns.masked_fill_(foreign, 0.0))


def _scatter_columns(
    ring: Ring, dkv: Tensor, grads: Tensor, pattern: VerticalSlash
) -> None:
    """Add the columns' gradients to the tokens that this rank owns, in place.

    The heads of a group may share a token, those of different groups never do. So the
    i-th heads of all groups are added at once, and one after the other: each sum has
    one order, without a sort.
    """
    (b, h, token), foreign = _own_columns(ring, pattern, dkv[0], grads.shape[2])
    kv_heads, length, dim = dkv.shape[2:]
    row = (b * kv_heads + h) * length + token  # [B, H, J g]
    # Columns of others stand in for some token, and add 0 to it, in whatever order.
    grads = grads.masked_fill(foreign, 0.0)
    row = torch.stack([row, row + dkv[0].numel() // dim])  # dk, then dv
    row, grads = row.unflatten(2, (kv_heads, -1)), grads.unflatten(2, (kv_heads, -1))
    total = dkv.view(-1, dim)
    for i in range(row.shape[3]):
        total.index_add_(0, row[:, :, :, i].flatten(), grads[:, :, :, i].flatten(0, 3))

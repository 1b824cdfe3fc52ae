"""Worker: `GroupComm` and the ring over gloo, on 2, 4 or 8 processes.

Of four ranks the meshes "pairs" and "strided" make rings of two: {0, 1}, {2, 3} and
{0, 2}, {1, 3}. A ring of two has the same peer both ways; a strided one has peers that
are not its group ranks. Of eight ranks they are rings of four: {0, 1, 2, 3}, {4, ...}
and {0, 2, 4, 6}, {1, ...}. A ring of four has two levels of 2 x 2, one of eight of
2 x 4 or 4 x 2.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mtraining_flex import cpu_device
from mtraining_flex.attention import ring_of, sparse_attention
from mtraining_flex.config import INNER_ROTATIONS, Ring, SparseAttention
from mtraining_flex.layout import LAYOUTS, build_layout, shard_batch
from mtraining_flex.pattern.search import find_pattern
from mtraining_flex.pattern.types import VerticalSlash
from mtraining_flex.reference import reference_attention
from mtraining_flex.ring.comm import DIRECTIONS, Comm, GroupComm, comm_for, set_timeouts
from tests.distributed.launch import run_cases
from tests.helpers import assert_close, random_pattern, random_qkv

RINGS = {
    2: ("world",),
    4: ("world", "pairs", "strided"),
    8: ("world", "pairs", "strided"),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
HOPS = 200
TIMEOUT_S = 60
LOST_S = 2
BATCH, HEADS, KV_HEADS, SEQ_LEN, HEAD_DIM, G = 1, 6, 2, 256, 16, 16
CONFIG = SparseAttention(
    granularity=G,
    vertical_p=0.4,
    slash_p=0.4,
    max_vertical=64,
    max_slash=8,
    sink=2,
    local_window=2,
    probe_rows=40,
)


@cache
def _meshes() -> dict[str, DeviceMesh]:
    world = dist.get_world_size()
    meshes = {"world": init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))}
    if world >= 4:
        both = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "cp"))
        other = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("cp", "dp"))
        meshes |= {"pairs": both["cp"], "strided": other["cp"]}
    return meshes


def _rotations(size: int) -> dict[str, Ring]:
    rotations = {"ring": Ring(), "allgather": Ring(rotation="allgather")}
    for degree in range(2, size):
        if size % degree == 0:
            for inner in INNER_ROTATIONS:
                name = f"two_level_{degree}_{inner}"
                rotations[name] = Ring("striped", "two_level", degree, inner)
    return rotations


def _comm(ring: str) -> GroupComm:
    comm = comm_for(_meshes()[ring].get_group())
    assert isinstance(comm, GroupComm)
    return comm


def collectives(ring: str, dtype: torch.dtype) -> None:
    """Each against what it must be; small whole numbers, exact in every dtype."""
    comm = _comm(ring)

    def of(rank: int) -> Tensor:
        # Not contiguous: the transport must not send the memory as it lies.
        return (torch.arange(12).view(3, 4).T + 2 * rank).to(dtype)

    everyone = torch.stack([of(rank) for rank in range(comm.size)])
    assert torch.equal(comm.all_reduce(of(comm.rank)), everyone.sum(0))
    assert torch.equal(comm.all_gather(of(comm.rank)), everyone)
    rows = torch.stack([of(comm.rank) + row for row in range(comm.size)])
    expected = everyone.sum(0) + comm.size * comm.rank
    assert torch.equal(comm.reduce_scatter(rows), expected)
    for direction in DIRECTIONS:
        received = comm.hop(direction, of(comm.rank)).wait()
        assert torch.equal(received, of((comm.rank - 1) % comm.size))
    ranks = dist.get_process_group_ranks(comm.group)
    assert ranks[comm.rank] == dist.get_rank()
    assert comm_for(comm.group) is comm, "a second GroupComm of one group"


def receives_first(ring: str) -> None:
    """gloo says "you may send" behind what it is already sending to the same peer."""
    order: list[Callable[..., Any]] = []
    post = dist.batch_isend_irecv

    def spy(ops: list[dist.P2POp]) -> list[dist.Work]:
        order.extend(each.op for each in ops)
        return post(ops)

    comm = _comm(ring)
    with mock.patch.object(dist, "batch_isend_irecv", spy):
        for direction in DIRECTIONS:
            comm.hop(direction, torch.ones(4)).wait()
    assert order == [dist.irecv, dist.isend] * len(DIRECTIONS)


def levels(ring: str, degree: int) -> None:
    """Each level is a ring of its own, of the right ranks; both hop at once."""
    mesh, comm = _meshes()[ring], _comm(ring)
    with pytest.raises(ValueError, match=rf"no inner rings of {degree}: give its Dev"):
        comm.split(degree)
    settings = Ring(rotation="two_level", inner_degree=degree)
    assert ring_of(mesh, settings) == (comm, settings)
    inner, outer = comm.split(degree)
    assert (outer.rank, inner.rank) == divmod(comm.rank, degree)
    assert (outer.size, inner.size) == (comm.size // degree, degree)
    ring_of(mesh, settings)
    assert comm.split(degree) == (inner, outer), "made again"
    groups = [c.hops[d] for c in (comm, inner, outer) for d in DIRECTIONS]  # type: ignore[attr-defined]
    assert len({id(group) for group in groups}) == 6
    mine = torch.tensor([float(comm.rank)])
    transfers = [c.hop(d, mine) for d in DIRECTIONS for c in (outer, inner)]
    received = [int(t.wait()) for t in transfers]
    node, local = outer.rank, inner.rank
    before = (node - 1) % outer.size * degree + local
    beside = node * degree + (local - 1) % degree
    assert received == [before, beside] * 2


def many_hops(ring: str) -> None:
    """Hops of both directions under way while collectives run (pitfall B45)."""
    comm = _comm(ring)
    kv = torch.full((64,), float(comm.rank))
    dkv = torch.full((32,), float(comm.rank))
    mean = (comm.size - 1) / 2
    for step in range(1, HOPS + 1):
        going = comm.hop("kv", kv)
        # As FSDP's: another group, begun before and awaited after.
        gathered = torch.empty(dist.get_world_size())
        mine = torch.tensor([float(dist.get_rank())])
        prefetch = dist.all_gather_into_tensor(gathered, mine, async_op=True)
        home = comm.hop("dkv", dkv)
        total = comm.all_reduce(torch.tensor([float(comm.rank)]))
        scattered = comm.reduce_scatter(torch.full((comm.size, 1), float(step)))
        kv, dkv = going.wait(), home.wait()
        prefetch.wait()
        source = (comm.rank - step) % comm.size
        assert kv.eq(source).all() and dkv.eq(source).all(), f"hop {step}"
        assert total.item() == mean * comm.size
        assert scattered.item() == step * comm.size
        assert gathered.tolist() == list(range(dist.get_world_size()))


def _qkv() -> tuple[Tensor, ...]:
    return random_qkv(BATCH, HEADS, KV_HEADS, SEQ_LEN, HEAD_DIM, torch.float64, seed=3)


@cache
def _expected(kind: str) -> tuple[VerticalSlash, tuple[Tensor, ...]]:
    """The pattern, and out, dq, dk, dv of a single process."""
    q, k, v = (x.requires_grad_() for x in _qkv())
    if kind == "found":
        pattern = find_pattern(q.detach(), k.detach(), CONFIG)
    else:  # heads of every kind, some of whose rows see no key
        pattern = random_pattern(
            BATCH,
            HEADS,
            SEQ_LEN,
            G,
            max_slash=8,
            max_vertical=64,
            seed=4,
            always_diagonal=False,
        )
    out, _ = reference_attention(q, k, v, pattern, G)
    out.backward(_dout())
    return pattern, (out.detach(), q.grad, k.grad, v.grad)


def _dout() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (BATCH, HEADS, SEQ_LEN, HEAD_DIM)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def equals_one_process(ring: str, layout_name: str, rotation: Ring, kind: str) -> None:
    """Pattern to the bit; out, dq, dk, dv of this rank's tokens to 1e-10."""
    comm: Comm = _comm(ring)
    layout = build_layout(layout_name, SEQ_LEN, comm.size, G)
    mine = layout.positions(comm.rank)
    q, k, v = (x[:, :, mine].clone().requires_grad_() for x in _qkv())
    pattern, expected = _expected(kind)
    if kind == "found":
        found = find_pattern(
            q.detach(), k.detach(), CONFIG, layout=layout, group=comm.group
        )
        for mine_, theirs in zip(found.tensors(), pattern.tensors(), strict=True):
            assert torch.equal(mine_, theirs), "another pattern than one process"
        pattern = found
    out = sparse_attention(
        q,
        k,
        v,
        pattern,
        granularity=G,
        layout=layout,
        mesh=_meshes()[ring],
        rotation=rotation.rotation,
        inner_degree=rotation.inner_degree,
        inner=rotation.inner,
    )
    out.backward(_dout()[:, :, mine])
    for actual, whole in zip((out, q.grad, k.grad, v.grad), expected, strict=True):
        assert_close(actual, whole[:, :, mine], 1e-10)


def shard(ring: str, layout_name: str) -> None:
    """The layout's order through torch's own context-parallel sharding."""
    mesh, comm = _meshes()[ring], _comm(ring)
    layout = build_layout(layout_name, SEQ_LEN, comm.size, G)
    whole = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    (tokens, labels), positions = shard_batch(layout, mesh, whole, whole + 1)
    assert torch.equal(positions[0], layout.positions(comm.rank))
    assert torch.equal(tokens, whole[:, positions[0]])
    assert torch.equal(labels, tokens + 1)


def lost_peer() -> None:
    """`set_timeouts` reaches the hops: a peer that never sends is given up on."""
    comm = comm_for(dist.new_group(list(range(dist.get_world_size()))))
    assert isinstance(comm, GroupComm)
    comm.hop("kv", torch.ones(4)).wait()  # connected, with the first timeout
    dist.barrier()
    set_timeouts(timedelta(seconds=LOST_S))
    if comm.rank == 0:
        for direction in DIRECTIONS:
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match=f"{LOST_S}000ms"):
                comm.hop(direction, torch.ones(4)).wait()
            assert LOST_S / 2 < time.monotonic() - begin < 10 * LOST_S
    else:
        time.sleep(3 * len(DIRECTIONS) * LOST_S)  # alive, and silent
    set_timeouts(timedelta(seconds=TIMEOUT_S))
    dist.barrier()


def cases(world_size: int) -> list[tuple[str, Callable[[], None]]]:
    """Name and call of each case, in order."""
    result: list[tuple[str, Callable[[], None]]] = []
    for ring in RINGS[world_size]:
        size = world_size if ring == "world" else world_size // 2
        for degree in (d for d in range(2, size) if size % d == 0):
            result.append((f"levels-{ring}-{degree}", partial(levels, ring, degree)))
        for dtype in DTYPES:
            call = partial(collectives, ring, DTYPES[dtype])
            result.append((f"collectives-{ring}-{dtype}", call))
        result.append((f"receives_first-{ring}", partial(receives_first, ring)))
        result.append((f"many_hops-{ring}", partial(many_hops, ring)))
        for layout in LAYOUTS:
            result.append((f"shard-{ring}-{layout}", partial(shard, ring, layout)))
            for how, rotation in _rotations(size).items():
                for kind in ("found", "random"):
                    call = partial(equals_one_process, ring, layout, rotation, kind)
                    name = f"attention-{ring}-{layout}-{how}-{kind}"
                    result.append((name, call))
    if world_size == 2:
        result.append(("lost_peer", lost_peer))
    return result


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    run_cases(Path(sys.argv[1]), cases(dist.get_world_size()))
    dist.destroy_process_group()
    cpu_device.leave()


if __name__ == "__main__":
    main()

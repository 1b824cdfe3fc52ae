"""How the ranks of one ring talk: a few collectives, and one hop to the next rank.

`Comm` is what the search and the ring ask for. `LocalComm` is a ring of one rank,
`GroupComm` a process group; `ring.simulate` has one that runs all ranks as threads of a
single process. Custom operators take strings, not groups: `register` gives a `Comm` a
name and `resolve` finds it again.

Hops of different direction (keys and values forward, their gradients home) travel on
process groups of their own, so that none queues behind another. Every rank posts the
same transfers in the same order. Peers are global ranks, as `torch.distributed` wants.

`Comm.split(M)` makes two levels of a ring of O M ranks: inner rings over the M ranks of
each node and outer ones over the O nodes. Each is a `Comm` with hops of its own.
"""

from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mtraining_flex.compat import (
    all_gather_flat,
    reduce_scatter_flat,
    set_timeout,
    unflatten,
)

# Kinds of hop, each on its own process group.
DIRECTIONS = ("kv", "dkv")

_COMMS: dict[str, "Comm"] = {}


class Transfer(Protocol):
    """A hop under way."""

    def wait(self) -> Tensor:
        """The tensor that the previous rank sent."""
        ...


class Comm(Protocol):
    """One rank's end of a ring of `size` ranks."""

    name: str
    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks; may reuse the memory of x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack over ranks: `[W, *x.shape]`."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum `[W, ...]` over ranks and keep row `rank`: `[...]`."""
        ...

    def hop(self, direction: str, x: Tensor) -> Transfer:
        """Send x to the next rank and receive the same shape from the previous one."""
        ...

    def split(self, inner_degree: int) -> "Levels":
        """Rank r as local rank `r % inner_degree` of node `r // inner_degree`."""
        ...


class Levels(NamedTuple):
    """The two levels of a ring."""

    inner: Comm  # the ranks of this node
    outer: Comm  # the ranks of this local rank, one on each node


class LocalComm:
    """A ring of one rank. Nothing moves."""

    name = "local"
    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0]

    def hop(self, direction: str, x: Tensor) -> Transfer:
        raise AssertionError("a ring of one rank has no hop")

    def split(self, inner_degree: int) -> Levels:
        raise AssertionError("a ring of one rank has no levels")


class _GroupTransfer:
    def __init__(
        self,
        works: list[dist.Work],
        sent: Tensor,
        received: Tensor,
        timeout: timedelta | None,
    ):
        self.works = works
        self.timeout = timeout
        self.sent = sent  # kept alive until the transfer is done
        self.received = received

    def wait(self) -> Tensor:
        for work in self.works:
            # A time given here makes NCCL block the host; it watches its own. gloo's
            # transfers know only the one with which their group was made.
            if self.timeout is None or self.received.is_cuda:
                work.wait()
            else:
                work.wait(self.timeout)
        return self.received


class GroupComm:
    """A ring over a process group, in the order of its group ranks.

    Building one is collective over the group: it makes a process group per direction.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.name = f"group:{group.group_name}"
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        self.next = ranks[(self.rank + 1) % self.size]
        self.prev = ranks[(self.rank - 1) % self.size]
        self.hops = {
            direction: dist.new_group(
                ranks, use_local_synchronization=True, group_desc=f"ring_{direction}"
            )
            for direction in DIRECTIONS
        }
        self.timeout: timedelta | None = None  # None: the group's
        self._levels: dict[int, Levels] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self.size * x.numel())
        all_gather_flat(out, x.view(-1), group=self.group)
        return out.view(self.size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(x[0].numel())
        reduce_scatter_flat(out, x.reshape(-1), group=self.group)
        return out.view(x.shape[1:])

    def hop(self, direction: str, x: Tensor) -> Transfer:
        group, x = self.hops[direction], x.contiguous()
        received = torch.empty_like(x)
        # One batch: in a ring of two, next and prev are the same rank, and a send that
        # waits for its receive would never end. The receive first: gloo tells the peer
        # that it may send over the same connection, behind what we already send there.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, self.prev, group),
                dist.P2POp(dist.isend, x, self.next, group),
            ]
        )
        return _GroupTransfer(works, x, received, self.timeout)

    def split(self, inner_degree: int) -> Levels:
        """The levels that `split_mesh` has made.

        Raises:
            ValueError: it has made none of this degree.
        """
        if inner_degree not in self._levels:
            raise ValueError(
                f"this ring of {self.size} ranks has no inner rings of {inner_degree}: "
                "give its DeviceMesh, not its process group"
            )
        return self._levels[inner_degree]

    def split_mesh(self, mesh: DeviceMesh, inner_degree: int) -> None:
        """Make the levels, of a mesh `cp_outer x cp_inner`. Collective over the world.

        Args:
            mesh: of one dimension, whose group this ring is of.
        """
        if inner_degree in self._levels:
            return
        shape = (self.size // inner_degree, inner_degree)
        levels = unflatten(mesh, shape, ("cp_outer", "cp_inner"))
        inner = comm_for(levels.get_group("cp_inner"))
        outer = comm_for(levels.get_group("cp_outer"))
        assert (outer.rank, inner.rank) == divmod(self.rank, inner_degree)
        self._levels[inner_degree] = Levels(inner, outer)


def register(comm: Comm) -> str:
    """Make a `Comm` known to the custom operators; returns its name."""
    _COMMS[comm.name] = comm
    return comm.name


def resolve(name: str) -> Comm:
    """The `Comm` of that name."""
    return _COMMS[name]


def comm_for(group: "ProcessGroup | Comm | None") -> Comm:
    """The `Comm` of a process group; None is a ring of one. Collective at first use."""
    if group is None:
        return _COMMS["local"]
    if not isinstance(group, ProcessGroup):
        register(group)
        return group
    comm = _COMMS.get(f"group:{group.group_name}")
    # A group of an earlier `init_process_group` may have had the same name.
    if not isinstance(comm, GroupComm) or comm.group is not group:
        comm = GroupComm(group)
        register(comm)
    return comm


def set_timeouts(timeout: timedelta) -> None:
    """Let every ring's groups, hops included, give up on a lost peer after that time.

    They are made with torch's default (half an hour with gloo, ten minutes with NCCL),
    which a first step may need. The caller sees to it that no rank is still in one.
    """
    for comm in _COMMS.values():
        if isinstance(comm, GroupComm):
            comm.timeout = timeout
            for group in (comm.group, *comm.hops.values()):
                set_timeout(group, timeout)


register(LocalComm())

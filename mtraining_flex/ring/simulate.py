"""All ranks of a ring in one process, a thread each.

For tests and benchmarks: the real search, ring and operators run, only the transport is
replaced. `run_ranks(4, fn)` calls `fn(comm)` for each rank and returns the results. The
threads take turns where they meet, so a run is as deterministic as a single process.
"""

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from mtraining_flex.ring.comm import Levels, Transfer, register

T = TypeVar("T")
_TIMEOUT = 120.0  # seconds a rank waits for the others before it gives up


class _Meeting:
    """What the ranks of one ring share."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT)
        self.slots: list[Any] = [None] * size
        self.mail: dict[tuple[str, int], list[Tensor]] = {}
        self.posted = threading.Condition()
        self.levels: dict[tuple[int, str, int], _Meeting] = {}

    def level(self, inner_degree: int, name: str, index: int) -> "_Meeting":
        """Of the ranks of one node ("inner"), or of one local rank ("outer")."""
        size = inner_degree if name == "inner" else self.size // inner_degree
        with self.posted:
            key = (inner_degree, name, index)
            return self.levels.setdefault(key, _Meeting(size))

    def abort(self) -> None:
        """Let no rank wait for one that has failed."""
        self.barrier.abort()
        with self.posted:
            levels = list(self.levels.values())
        for meeting in levels:
            meeting.abort()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class _ThreadTransfer:
    def __init__(self, meeting: _Meeting, direction: str, rank: int):
        self.meeting, self.key = meeting, (direction, rank)

    def wait(self) -> Tensor:
        with self.meeting.posted:
            arrived = self.meeting.posted.wait_for(
                lambda: self.meeting.mail.get(self.key), timeout=_TIMEOUT
            )
            if not arrived:
                raise TimeoutError(f"no transfer {self.key[0]} for rank {self.key[1]}")
            return self.meeting.mail[self.key].pop(0)


class ThreadComm:
    """One rank of a simulated ring."""

    def __init__(self, meeting: _Meeting, rank: int, name: str):
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.name = name
        register(self)

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x.clone())).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x.clone()))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        parts = self.meeting.exchange(self.rank, x.clone())
        return torch.stack([part[self.rank] for part in parts]).sum(0)

    def hop(self, direction: str, x: Tensor) -> Transfer:
        meeting, to = self.meeting, (self.rank + 1) % self.size
        with meeting.posted:
            meeting.mail.setdefault((direction, to), []).append(x.clone())
            meeting.posted.notify_all()
        return _ThreadTransfer(meeting, direction, self.rank)

    def split(self, inner_degree: int) -> Levels:
        node, local = divmod(self.rank, inner_degree)
        inner = self.meeting.level(inner_degree, "inner", node)
        outer = self.meeting.level(inner_degree, "outer", local)
        name = f"{self.name}/{inner_degree}"
        return Levels(
            ThreadComm(inner, local, f"{name}/inner"),
            ThreadComm(outer, node, f"{name}/outer"),
        )


def run_ranks(size: int, fn: Callable[[ThreadComm], T]) -> list[T]:
    """Call `fn(comm)` on `size` simulated ranks; their results in rank order.

    Raises:
        Exception: the first rank's error, if any failed.
    """
    meeting, run = _Meeting(size), uuid.uuid4().hex[:8]
    comms = [ThreadComm(meeting, r, f"sim:{run}:{r}/{size}") for r in range(size)]

    def call(comm: ThreadComm) -> T:
        try:
            return fn(comm)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(call, comm) for comm in comms]
        errors = [f.exception() for f in futures]
    # A broken barrier is the echo of another rank's error.
    real = [e for e in errors if e and not isinstance(e, threading.BrokenBarrierError)]
    for error in [*real, *errors]:
        if error is not None:
            raise error
    return [f.result() for f in futures]


class LockedStep:
    """A step of the ring whose calls run one at a time.

    Simulated ranks are threads. Neither Triton's interpreter, whose grid index is
    global, nor the compilers of Triton and FLASH side by side are for more than one.
    """

    _lock = threading.Lock()

    def __init__(self, step: Any):
        self.step = step

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.step, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return value(*args, **kwargs)

        return call

"""Two network namespaces joined by virtual cables: two "nodes" on one machine.

Each node has its own interfaces and addresses and reaches the other only through the
cables (veth pairs), whose rate can be limited (tc's token bucket) and which can be
pulled. The host's own network stays as it is. Needs root and iproute2.

    with two_nodes(cables=1) as nodes:
        nodes.limit(100e6)
        subprocess.run([*nodes.command(1), "python", "..."])

Cable c of node n is the interface `cable<c>` with the address 10.77.c.(n + 1).
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_PREFIX = "mtraining"
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
# What a limited cable may hold back: more than TCP lets be under way, so that it queues
# and never drops.
_QUEUE_BYTES = 256 * 2**20
_BURST_BYTES = 16 * 2**10
# A cable that drops nothing: the sender need not feel its way to the rate, nor start
# anew after a pause. (The kernel may have another default.)
_TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": 0}


class Unavailable(RuntimeError):
    """This machine cannot make the namespaces. The message is one line and says why."""


@dataclass(frozen=True)
class Nodes:
    """Two namespaces that exist."""

    names: tuple[str, str]
    cables: int

    def command(self, node: int) -> list[str]:
        """What stands before a command to run it on a node."""
        return [_program("ip"), "netns", "exec", self.names[node]]

    def address(self, node: int, cable: int = 0) -> str:
        return f"10.77.{cable}.{node + 1}"

    def interface(self, cable: int = 0) -> str:
        return f"cable{cable}"

    def limit(self, bits_per_second: float | None) -> None:
        """Limit every cable in each direction; None takes the limit away.

        Raises:
            Unavailable: the kernel has no token bucket.
        """
        for name in self.names:
            for cable in range(self.cables):
                at = ["qdisc", "replace", "dev", self.interface(cable), "root"]
                if bits_per_second is None:
                    _run("tc", "-n", name, *at, "noqueue")
                    continue
                rate = ["rate", f"{round(bits_per_second)}bit"]
                size = ["burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
                _run("tc", "-n", name, *at, "tbf", *rate, *size)

    def pull(self) -> None:
        """Pull the cables: nothing arrives any more, and no connection is told."""
        self._link("down")

    def plug(self) -> None:
        """Plug them in again."""
        self._link("up")

    def _link(self, state: str) -> None:
        for cable in range(self.cables):
            for name in self.names:
                _run("ip", "-n", name, "link", "set", self.interface(cable), state)

    def processes(self, node: int) -> list[int]:
        """Ids of all processes on a node."""
        return [
            int(pid) for pid in _run("ip", "netns", "pids", self.names[node]).split()
        ]


@contextmanager
def two_nodes(cables: int = 1) -> Iterator[Nodes]:
    """Make the namespaces, and take them away again whatever happens.

    Raises:
        Unavailable: no root, no iproute2, or a kernel that refuses.
    """
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    for program in ("ip", "tc"):
        _program(program)
    _sweep()
    names = (f"{_PREFIX}-{os.getpid()}-0", f"{_PREFIX}-{os.getpid()}-1")
    nodes = Nodes(names, cables)
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            for setting, value in _TCP.items():
                file = f"/proc/sys/net/ipv4/{setting}"
                write = ["sh", "-c", f"echo {value} > {file}"]
                _run("ip", "netns", "exec", name, *write)
        for cable in range(cables):
            here, there = (
                ["name", nodes.interface(cable), "netns", name] for name in names
            )
            _run("ip", "link", "add", *here, "type", "veth", "peer", *there)
            for node, name in enumerate(names):
                at = ["dev", nodes.interface(cable)]
                address = f"{nodes.address(node, cable)}/24"
                _run("ip", "-n", name, "address", "add", address, *at)
                # Single packets: a large one would let what is short wait behind it.
                _run("ip", "-n", name, "link", "set", *at, "gso_max_segs", "1")
                _run("ip", "-n", name, "link", "set", *at, "up")
        yield nodes
    finally:
        _delete(names)


def _sweep() -> None:
    """Delete what an earlier process could not: it was killed."""
    left = []
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        owner = name.split("-")[1] if name.startswith(f"{_PREFIX}-") else ""
        if owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
            left.append(name)
    _delete(left)


def _delete(names: Sequence[str]) -> None:
    """A namespace's cables go with it."""
    for name in names:
        subprocess.run(
            [_program("ip"), "netns", "delete", name], stderr=subprocess.DEVNULL
        )


def _program(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise Unavailable(f"network namespaces need iproute2: no program '{name}'")
    return found


def _run(program: str, *args: str) -> str:
    command = [_program(program), *args]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise Unavailable(f"`{program} {' '.join(args)}` failed: {reason}")
    return done.stdout

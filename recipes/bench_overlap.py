"""Whether a two-level ring hides the link between nodes: four processes, two "nodes".

    python -m recipes.bench_overlap --ratio 2,3,4 --nics shared

Two network namespaces stand for two nodes of two ranks, joined by virtual cables
(`recipes.netns`). The ring attention of this package (`ring.drive`) runs on gloo,
forward and backward, over cables whose rate is limited such that the flat ring's
transfer of one shard takes --ratio times the compute of one step. It needs root and
iproute2, and says so.

First the rotations are checked: all must give the out and gradients of one process.
Then, for each direction, the compute of a step is measured (c): the same loop on all
four processes, with hops that move nothing. The cables are limited, and one hop of the
flat ring is measured (t). Then the whole loops, in turn; each time is that of the
slowest rank, medians of --repeats (twice as many for c and t).

If transfers hide behind compute, with n shards at a time on a cable (--nics shared: 2,
the ranks of a node share one; each: 1), a loop takes

                flat                two-level
    forward     c + 3 max(c, t)     2 c + max(2 c, n t)
    backward    7 t                 max(2 c, n t) + c + max(c, n t) + n t

and if they do not, 4 c and all transfers: 3 t and n t forward, 7 t and 3 n t backward.
Forward, three shards cross a cable one after the other in the flat ring, and n at once
in the two-level one. Backward so do the gradients of four in the flat ring, and twice
those of n in the two-level one, the last time behind nothing (`ring.drive`). Columns,
which are no ring, are left out: the pattern is dense and causal.

"overlap" is the share of what could be hidden that was: 1 if the loop took the time of
the first kind, 0 for the second. Exits with 1 if a two-level ring is not faster than
the flat one, or takes more than 1.2 times what it should.

    --compute slept   the default: a step sleeps for as long as its real compute was
                      measured to take, as the host does while a device computes.
                      Transfers, additions and the loop are real
    --compute real    dense math on one thread per process. Where there are fewer cores
                      than processes, it and gloo's own threads take time from each
                      other, as a GPU and a NIC would not
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mtraining_flex import cpu_device
from mtraining_flex.attention import ring_of, sparse_attention
from mtraining_flex.config import Ring
from mtraining_flex.layout import build_layout
from mtraining_flex.pattern.types import dense_pattern
from mtraining_flex.ring import drive
from mtraining_flex.ring.comm import Comm, Levels
from mtraining_flex.ring.step import EagerStep, Finished, Gradients, Part
from recipes.netns import Nodes, Unavailable, two_nodes

WORLD, INNER = 4, 2
DIRECTIONS = ("forward", "backward")
VARIANTS = {
    "flat": Ring(rotation="ring"),
    "two_level": Ring(rotation="two_level", inner_degree=INNER),
    "gathered": Ring(rotation="two_level", inner_degree=INNER, inner="allgather"),
}
TOLERANCE = 1.2  # of the time that a two-level ring should take
_PORT = 29500
_HOPS = 3  # that are timed together
# A frame of 1500 bytes carries 1448 of a shard, and 14 more on the cable.
_ON_THE_WIRE = 1514 / 1448


# --- what a loop should take ----------------------------------------------------------


def overlapped_ms(
    variant: str, direction: str, compute: float, transfer: float, at_once: int
) -> float:
    """Time of a loop whose transfers hide behind compute where they can.

    Args:
        compute: of one step, ms.
        transfer: of one shard over a cable, ms; at least `compute`.
        at_once: shards of a two-level hop that share a cable.
    """
    c, t = compute, transfer
    if variant == "flat":
        return c + 3 * max(c, t) if direction == "forward" else 7 * t
    between = at_once * t
    if direction == "forward":
        return 2 * c + max(2 * c, between)
    return max(2 * c, between) + c + max(c, between) + between


def summed_ms(
    variant: str, direction: str, compute: float, transfer: float, at_once: int
) -> float:
    """Time of a loop that hides nothing; arguments as above."""
    forward = direction == "forward"
    if variant == "flat":
        return 4 * compute + (3 if forward else 7) * transfer
    return 4 * compute + (1 if forward else 3) * at_once * transfer


@dataclass(frozen=True)
class Row:
    """One line of the table; times in ms."""

    direction: str
    ratio: float  # that was asked for
    at_once: int
    compute: float  # of a step
    transfer: float  # of a shard, as measured on the limited cable
    measured: dict[str, float]  # by variant

    def overlapped(self, variant: str) -> float:
        return overlapped_ms(
            variant, self.direction, self.compute, self.transfer, self.at_once
        )

    def summed(self, variant: str) -> float:
        return summed_ms(
            variant, self.direction, self.compute, self.transfer, self.at_once
        )

    def overlap(self, variant: str) -> float:
        """The hidden share of what can be hidden."""
        best, worst = self.overlapped(variant), self.summed(variant)
        return (worst - self.measured[variant]) / (worst - best)

    def misses(self) -> list[str]:
        """What is not as it should be, in words."""
        where = f"{self.direction} at ratio {self.ratio:g}"
        found = []
        for variant in ("two_level", "gathered"):
            time_ms, best = self.measured[variant], self.overlapped(variant)
            if time_ms >= self.measured["flat"]:
                found.append(
                    f"{where}: {variant} ({time_ms:.0f} ms) is not faster than flat "
                    f"({self.measured['flat']:.0f} ms)"
                )
            if time_ms > TOLERANCE * best:
                found.append(
                    f"{where}: {variant} ({time_ms:.0f} ms) is more than {TOLERANCE} "
                    f"times what it should be ({best:.0f} ms)"
                )
        return found


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    head = (
        "| | ratio | c ms | t ms | flat ms | if hidden | if not | two-level ms | "
        "gathered ms | if hidden | if not | overlap | gathered | flat / two-level |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for row in rows:
        ms = row.measured
        cells = [
            row.direction,
            f"{row.ratio:g}",
            f"{row.compute:.1f}",
            f"{row.transfer:.0f}",
            f"{ms['flat']:.0f}",
            f"{row.overlapped('flat'):.0f}",
            f"{row.summed('flat'):.0f}",
            f"**{ms['two_level']:.0f}**",
            f"{ms['gathered']:.0f}",
            f"{row.overlapped('two_level'):.0f}",
            f"{row.summed('two_level'):.0f}",
            f"{row.overlap('two_level'):.2f}",
            f"{row.overlap('gathered'):.2f}",
            f"{ms['flat'] / ms['two_level']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# --- one rank -------------------------------------------------------------------------


class _Here:
    """A transfer that has arrived: what was sent."""

    def __init__(self, x: Tensor):
        self.x = x

    def wait(self) -> Tensor:
        return self.x


class StillComm:
    """A ring in which nothing moves: its hops and gathers give back what is here."""

    def __init__(self, comm: Comm):
        self.comm = comm
        self.name, self.rank, self.size = comm.name, comm.rank, comm.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.expand(self.size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[self.rank]

    def hop(self, direction: str, x: Tensor) -> _Here:
        return _Here(x)

    def split(self, inner_degree: int) -> Levels:
        return Levels(*(StillComm(level) for level in self.comm.split(inner_degree)))


class SleepingStep(EagerStep):
    """Sleeps instead of computing, and gives zeros."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def forward(
        self, q: Tensor, part: Part, scale: float, **options: Any
    ) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def backward(
        self, q: Tensor, part: Part, done: Finished, scale: float, **options: Any
    ) -> Gradients:
        time.sleep(self.seconds)
        return Gradients(
            torch.zeros_like(q), torch.zeros_like(torch.stack([part.k] * 2))
        )


class Rank:
    """One process: its shard, its rings, and what it is asked to do with them."""

    def __init__(self, args: argparse.Namespace):
        torch.manual_seed(0)
        shapes = [(1, n, args.seq_len, args.head_dim) for n in _head_counts(args)]
        self.whole = [torch.randn(shape) for shape in shapes]  # q, k, v, dout
        self.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
        self.args = args
        self.layout = build_layout("striped", args.seq_len, WORLD, args.granularity)
        self.pattern = dense_pattern(self.layout.num_blocks, torch.device("cpu"))
        comms = [ring_of(self.mesh, ring)[0] for ring in VARIANTS.values()]
        self.comm = comms[0]  # one for all: the levels are made
        self.here = self.layout.positions(self.comm.rank)
        self.q, self.k, self.v, self.dout = (
            x[:, :, self.here].contiguous() for x in self.whole
        )
        self.step: EagerStep = EagerStep()
        self.out, self.lse = self._forward(self._ring("flat", self.comm))

    def _ring(self, variant: str, comm: Comm) -> drive.Ring:
        scale = self.args.head_dim**-0.5
        rotation, inner_degree, inner = VARIANTS[variant].transport
        return drive.Ring(
            self.layout, comm, rotation, self.step, scale, inner_degree, inner
        )

    def _forward(self, ring: drive.Ring) -> tuple[Tensor, Tensor]:
        return drive.forward(ring, self.q, self.k, self.v, self.pattern)

    def _backward(self, ring: drive.Ring) -> tuple[Tensor, Tensor, Tensor]:
        rows = (self.out, self.lse, self.pattern)
        return drive.backward(ring, self.dout, self.q, self.k, self.v, *rows)

    def check(self) -> dict[str, float]:
        """Largest relative error of out, dq, dk, dv, against one process in fp64."""
        leaves = q, k, v = [x.double().requires_grad_() for x in self.whole[:3]]
        granularity = self.args.granularity
        out = sparse_attention(q, k, v, self.pattern, granularity=granularity)
        grads = torch.autograd.grad(out, leaves, self.whole[3].double())
        expected = [x.detach()[:, :, self.here] for x in (out, *grads)]
        errors = {}
        for variant in VARIANTS:
            ring = self._ring(variant, self.comm)
            results = (self._forward(ring)[0], *self._backward(ring))
            errors[variant] = max(
                ((a.double() - b).norm() / b.norm()).item()
                for a, b in zip(results, expected, strict=True)
            )
        return errors

    def loop(self, variant: str, direction: str, still: bool = False) -> float:
        """Milliseconds of a whole loop, from when all ranks are there."""
        ring = self._ring(variant, StillComm(self.comm) if still else self.comm)
        call: Callable[[drive.Ring], Any] = (
            self._forward if direction == "forward" else self._backward
        )
        return _time(lambda: call(ring))

    def sleep(self, ms: float | None) -> None:
        """From now on steps sleep so long; None: they compute."""
        self.step = EagerStep() if ms is None else SleepingStep(ms / 1e3)

    def hop(self) -> float:
        """Milliseconds of one shard's hop in the flat ring, of several in turn."""
        kv = torch.stack([self.k, self.v])

        def call() -> None:
            x = kv
            for _ in range(_HOPS):
                x = self.comm.hop("kv", x).wait()

        return _time(call) / _HOPS


def _head_counts(args: argparse.Namespace) -> tuple[int, int, int, int]:
    return args.heads, args.kv_heads, args.kv_heads, args.heads


def _time(call: Callable[[], Any]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


@torch.no_grad()
def work(args: argparse.Namespace) -> None:
    """A rank's process: one command per line in, one answer per line out."""
    torch.set_num_threads(1)
    number, address = args.worker.split("@")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}",
        rank=int(number),
        world_size=WORLD,
        timeout=timedelta(seconds=300),
    )
    rank = Rank(args)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *given = json.loads(line)
        if name == "check":
            with torch.enable_grad():
                answer: Any = rank.check()
        else:
            answer = getattr(rank, name)(*given)
        print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    cpu_device.leave()


# --- all four -------------------------------------------------------------------------


class Ranks:
    """The four processes, from outside."""

    def __init__(self, nodes: Nodes, argv: Sequence[str]):
        self.processes = [
            subprocess.Popen(
                [*nodes.command(rank // INNER), *_worker(rank, nodes, argv)],
                env=_environment(nodes.interface(rank % INNER % nodes.cables)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(WORLD)
        ]

    def ask(self, *command: Any) -> list[Any]:
        """All ranks do the same; their answers."""
        for process in self.processes:
            assert process.stdin is not None
            print(json.dumps(command), file=process.stdin, flush=True)
        return self.answers()

    def slowest(self, *command: Any) -> float:
        return max(self.ask(*command))

    def answers(self) -> list[Any]:
        """The next answer of each."""
        answers = []
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"rank {rank} has ended: see what it wrote above")
            answers.append(json.loads(line))
        return answers

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(30)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _worker(rank: int, nodes: Nodes, argv: Sequence[str]) -> list[str]:
    at = f"{rank}@{nodes.address(0)}:{_PORT}"
    return [sys.executable, "-m", "recipes.bench_overlap", *argv, "--worker", at]


def _environment(interface: str) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": interface,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses without names are no fault here
    }


@contextmanager
def start(nodes: Nodes, argv: Sequence[str]) -> Iterator[Ranks]:
    """The processes, ready, while they are needed."""
    ranks = Ranks(nodes, argv)
    try:
        ranks.answers()
        yield ranks
        ranks.end()
    finally:
        ranks.kill()


def measure(
    ranks: Ranks, nodes: Nodes, args: argparse.Namespace, direction: str
) -> Iterator[Row]:
    """One row per ratio."""
    at_once = INNER // nodes.cables

    def middle(*command: Any) -> float:
        return median(ranks.slowest(*command) for _ in range(2 * args.repeats))

    ranks.ask("sleep", None)
    still = ("loop", "flat", direction, True)
    ranks.ask(*still)  # warm
    compute = middle(*still) / WORLD
    if args.compute == "slept":
        ranks.ask("sleep", compute)
        compute = middle(*still) / WORLD  # with what is real besides
    shard = 2 * args.kv_heads * args.seq_len // WORLD * args.head_dim * 4  # bytes
    for ratio in args.ratio:
        seconds = ratio * compute / 1e3
        nodes.limit(8 * shard * _ON_THE_WIRE / seconds)
        transfer = middle("hop")
        times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(args.repeats):
            for variant, each in times.items():  # in turn: noise meets all alike
                each.append(ranks.slowest("loop", variant, direction))
        nodes.limit(None)
        measured = {variant: median(each) for variant, each in times.items()}
        yield Row(direction, ratio, at_once, compute, transfer, measured)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments, checked.

    Raises:
        ValueError: a number that cannot be.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratio", default="2,3,4", help="transfer / compute, a list")
    parser.add_argument("--nics", choices=("shared", "each"), default="shared")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--granularity", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compute", choices=("slept", "real"), default="slept")
    parser.add_argument("--json", help="write the rows to this file, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.ratio = [float(ratio) for ratio in args.ratio.split(",")]
    for ratio in args.ratio:
        if not (math.isfinite(ratio) and ratio >= 1):
            raise ValueError(
                f"--ratio ({ratio:g}) must be at least 1: below, the flat ring hides "
                "its transfers, too"
            )
    if args.heads % args.kv_heads:
        raise ValueError(
            f"--heads ({args.heads}) must be a multiple of --kv-heads ({args.kv_heads})"
        )
    if args.repeats < 1:
        raise ValueError(f"--repeats ({args.repeats}) must be at least 1")
    build_layout("striped", args.seq_len, WORLD, args.granularity)
    return args


def describe(args: argparse.Namespace) -> str:
    """What was measured on what."""
    compute = {
        "slept": "steps sleep for the time of their compute",
        "real": "real compute on one thread a process",
    }[args.compute]
    nics = "one NIC a node" if args.nics == "shared" else "one NIC a rank"
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}; "
        f"2 nodes x 2 ranks, {nics}, {compute}; {args.seq_len} tokens, "
        f"{args.heads}/{args.kv_heads} heads, D {args.head_dim}, fp32, dense causal"
    )


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    if args.worker is not None:
        work(args)
    rows = []
    try:
        with (
            two_nodes(cables=1 if args.nics == "shared" else INNER) as nodes,
            start(nodes, argv) as ranks,
        ):
            print(describe(args))
            errors = [max(each.values()) for each in ranks.ask("check")]
            if not max(errors) < 1e-5:
                print(f"the rotations do not agree, nothing is timed: {errors}")
                return 1
            print(f"all rotations agree with one process: error {max(errors):.1e}\n")
            for direction in DIRECTIONS:
                for row in measure(ranks, nodes, args, direction):
                    rows.append(row)
                    print(
                        f"{direction} at ratio {row.ratio:g}: {row.measured}",
                        flush=True,
                    )
    except Unavailable as error:
        print(f"bench_overlap: {error}", file=sys.stderr)
        return 2
    print(f"\n{table(rows)}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"run": describe(args), "rows": [asdict(row) for row in rows]}, file
            )
    misses = [miss for row in rows for miss in row.misses()]
    for miss in misses:
        print(miss)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())

"""Whether the work of a ring is balanced: measured by step, and on real ranks.

    python -m recipes.bench_ring --simulate 4,8,32 --bars
    torchrun --nproc_per_node=4 -m recipes.bench_ring --inner 2

**--simulate W** runs on one device, without processes, the W x W kernel calls of all W
ranks in turn: the step functions, masks and lists of the ring (`ring.step`,
`block_mask`), each rank's queries against each rank's keys and against the gathered
columns. It needs memory for one rank's queries and one rank's keys only, and for the
masks. Of the times of all (rank, step) it takes the imbalances that training logs as
`ring/worker_imbalance` and `ring/step_imbalance`, and of the executed blocks the same.

* A time is that of a step's kernels alone: `Step.forward` or `Step.backward` as
  `ring.drive` calls them, continued from a running result where a backend does that.
  Masks and lists are built before. Merging, adding up dk and dv, and transfers are not
  in it: they are the same for every rank and step, and would hide what is uneven.
* On a GPU the launches are queued before the device reaches them, so that no gap of the
  host is measured: CUDA events around 3 calls, median of --repeats passes over all
  ranks and steps. On a CPU it is the clock around one call.
* The columns are a step of their own, the last, as in the metrics (`triton` takes them
  along in its last slash step when it trains).
* "ring" is also the order of "allgather". --inner M adds "two_level" over nodes of M
  ranks: the same calls in another order.
* --bars [LAYOUT] (striped) exits with 1 if a worker or step imbalance of that layout in
  the flat ring is more than 1.05 in time or 1.02 in blocks.

**Under torchrun** the whole operator runs, forward and backward, on the ranks that
there are (NCCL on GPUs, gloo on CPUs), for each layout and rotation: time of the
slowest rank, the communication that no compute hides (`ring/exposed_comm_ms`), and
tokens per second through one layer. Without --inner, two_level takes the ranks of a
node, if there is more than one node. A rotation whose results differ from the flat
ring's is an error.

    --pattern mixed           heads of different kinds, some of which keep more than
                              others: nearest diagonals, wide bands, far diagonals, the
                              first and many other columns
    --pattern uniform, local  as in recipes.bench_attention
    --pattern recorded:FILE   of a training run (recipes.record_patterns), --layer N
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mtraining_flex import cpu_device
from mtraining_flex.attention import comm_of, sparse_attention
from mtraining_flex.block_mask import StepMask, slash_step, vertical_step
from mtraining_flex.config import BACKENDS
from mtraining_flex.counters import imbalance, recorder
from mtraining_flex.layout import Layout, build_layout
from mtraining_flex.pattern import VerticalSlash, pack_pattern
from mtraining_flex.pattern.types import slash_bitmap
from mtraining_flex.ring.backends import resolve_backend
from mtraining_flex.ring.merge import compute_dtype
from mtraining_flex.ring.schedule import check_inner_degree, sources
from mtraining_flex.ring.step import Finished, Part, get_step
from recipes.bench_attention import (
    Shape,
    check,
    check_arguments,
    kept_share,
    load_pattern,
    relative_error,
    without_columns,
)

BARS = {"time": 1.05, "blocks": 1.02}
DIRECTIONS = ("forward", "backward")

Call = Callable[[], Any]


# --- patterns -------------------------------------------------------------------------

# Kinds of head in turn, and how much of the mean density each keeps, more or less.
MIXED = {"local": 0.5, "bands": 1.5, "far": 1.25, "columns": 0.75}
_SPREAD = 0.25
_SINKS = 16  # first columns, in every head


def mixed_pattern(
    shape: Shape, share: float, verticals: int, seed: int = 0
) -> VerticalSlash:
    """Heads of different kinds and densities, `share` of the causal blocks in the mean.

    Args:
        verticals: of a head of kind "columns"; the others have 10 to 50 % of them.

    Raises:
        ValueError: a share at which the densest head would be more than dense.
    """
    rng = random.Random(seed)
    blocks = shape.seq_len // shape.granularity
    kinds = [list(MIXED)[head % len(MIXED)] for head in range(shape.heads)]
    weights = [MIXED[kind] * rng.uniform(1 - _SPREAD, 1 + _SPREAD) for kind in kinds]
    most = max(weights) * len(weights) / sum(weights)
    if share * most > 1:
        raise ValueError(
            f"--density ({share}) is too much for --pattern mixed: its densest head "
            f"keeps {most:.2f} times the mean, and at most {1 / most:.2f} can be asked"
        )
    slashes, columns = [], []
    for kind, weight in zip(kinds, weights, strict=True):
        target = (
            share * weight * len(weights) / sum(weights) * blocks * (blocks + 1) / 2
        )
        slashes.append(_until(_offsets(kind, blocks, rng), blocks, target))
        count = verticals
        if kind != "columns":
            count = int(verticals * rng.uniform(0.1, 0.5))
        sinks = min(_SINKS, count)
        rest = rng.sample(range(sinks, shape.seq_len), count - sinks)
        columns.append([*range(sinks), *rest])
    return pack_pattern([slashes], [columns], max_vertical=verticals)


def _offsets(kind: str, blocks: int, rng: random.Random) -> list[int]:
    """All block offsets, in the order in which a head of this kind takes them."""
    if kind == "local":
        return list(range(blocks))
    near = list(range(min({"bands": 4, "far": 8, "columns": 16}[kind], blocks)))
    far = list(range(len(near), blocks))
    if kind == "bands":  # of 1/128 of the sequence, side by side, in any order
        width = max(blocks // 128, 1)
        bands = [far[i : i + width] for i in range(0, len(far), width)]
        rng.shuffle(bands)
        far = [offset for band in bands for offset in band]
    else:
        rng.shuffle(far)
    return near + far


def _until(offsets: list[int], blocks: int, target: float) -> list[int]:
    """The first offsets that make up so many blocks; at least one."""
    kept: list[int] = []
    size = 0
    for offset in offsets:
        if kept and size >= target:
            break
        kept.append(offset)
        size += blocks - offset
    return kept


# --- timing ---------------------------------------------------------------------------

_CALLS = 3  # between two events
_QUEUE = 8  # such groups at a time: far fewer launches than a device's queue can hold
_LONGEST_SLEEP = 2**33  # cycles, seconds


class DeviceClock:
    """Times calls whose launches are all queued before the device reaches the first."""

    def __init__(self) -> None:
        self.sleep = 2**22  # cycles that the device sleeps meanwhile

    def times(self, calls: Sequence[Call]) -> list[float]:
        """Milliseconds of each call."""
        result: list[float] = []
        for first in range(0, len(calls), _QUEUE):
            result += self._queue(calls[first : first + _QUEUE])
        return result

    def _queue(self, calls: Sequence[Call]) -> list[float]:
        while True:
            events = [
                torch.cuda.Event(enable_timing=True) for _ in range(1 + len(calls))
            ]
            torch.cuda.synchronize()
            torch.cuda._sleep(self.sleep)
            events[0].record()
            for call, end in zip(calls, events[1:], strict=True):
                for _ in range(_CALLS):
                    call()
                end.record()
            asleep = not events[0].query()
            torch.cuda.synchronize()
            if asleep:
                pairs = zip(events, events[1:], strict=False)
                return [begin.elapsed_time(end) / _CALLS for begin, end in pairs]
            # The host was late, and the device may have waited for it.
            self.sleep *= 2
            if self.sleep > _LONGEST_SLEEP:
                raise RuntimeError("a step waits for the device: it cannot be timed")


class HostClock:
    """Times calls on a CPU."""

    def times(self, calls: Sequence[Call]) -> list[float]:
        """Milliseconds of each call."""
        result = []
        for call in calls:
            begin = time.perf_counter()
            call()
            result.append(1e3 * (time.perf_counter() - begin))
        return result


def median_ms(
    clock: DeviceClock | HostClock, calls: Sequence[Call], repeats: int
) -> list[float]:
    """Median time of each call over passes through all of them, warm."""
    for call in calls:
        call()  # compiles
    passes = [clock.times(calls) for _ in range(repeats)]
    return [median(each) for each in zip(*passes, strict=True)]


# --- one device in the place of all ranks ---------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What each rank does with the keys of each rank and, last, with the columns."""

    layout: Layout
    blocks: Tensor  # int64 [W, W + 1]
    ms: dict[str, Tensor]  # fp64 [W, W + 1] by direction

    def steps(self, work: Tensor, rotation: str, inner_degree: int) -> Tensor:
        """In the order of computing: [W ranks, W + 1 steps]."""
        size = self.layout.cp_size
        order = [
            [*sources(rotation, rank, size, inner_degree), size] for rank in range(size)
        ]
        return work.gather(1, torch.tensor(order))


@dataclass(frozen=True)
class Balance:
    """How even some work is, in one rotation."""

    worker: float
    step: float
    total: float  # of all ranks; ms or blocks
    slowest: float  # sum over steps of the slowest rank; ms or blocks

    @staticmethod
    def of(work: Tensor) -> "Balance":
        work = work.double()
        slowest = work.max(0).values.sum().item()
        return Balance(*imbalance(work), work.sum().item(), slowest)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    cp_size: int
    layout: str
    rotation: str
    inner_degree: int
    blocks: Balance
    ms: dict[str, Balance]  # by direction


class Rank:
    """The tensors of a rank: of any, since their values do not matter for the time."""

    def __init__(
        self,
        shape: Shape,
        pattern: VerticalSlash,
        cp_size: int,
        backend: str,
        device: torch.device,
    ):
        self.shape, self.pattern, self.step = shape, pattern, get_step(backend)
        self.bitmap = slash_bitmap(pattern, shape.seq_len // shape.granularity)
        length = shape.seq_len // cp_size
        self.q, _, _, self.dout = local_tensors(shape, length, device)
        # Keys and values that have come round the ring are head-major.
        self.k, self.v = (
            x.contiguous() for x in local_tensors(shape, length, device, seed=1)[1:3]
        )
        count = pattern.vertical.shape[-1]
        padded = count + -count % shape.granularity
        columns = (1, shape.heads, padded, shape.head_dim)
        self.columns = torch.randn(2, *columns, device=device, dtype=self.q.dtype)
        self.wide = compute_dtype(self.q.dtype)

    def masks(self, layout: Layout, rank: int) -> list[StepMask | None]:
        """Of the keys of each rank and, last, of the columns; None for nothing."""
        heads = (1, self.shape.heads)
        result = [
            None
            if layout.is_causally_empty(rank, source)
            else slash_step(self.pattern, self.bitmap, layout, rank, source, heads)
            for source in range(layout.cp_size)
        ]
        if self.columns.shape[3] == 0:
            return [*result, None]
        return [*result, vertical_step(self.pattern, self.bitmap, layout, rank, heads)]

    def part(self, mask: StepMask) -> Part:
        k, v = (self.k, self.v) if mask.kind == "slash" else self.columns
        return Part(k, v, mask)

    def finish(self, own: StepMask) -> None:
        """Make a result to continue from, of this rank's own keys."""
        out, lse = self.step.forward(self.q, self.part(own), self.shape.scale)
        self.running = (out.to(self.wide), lse)
        self.done: Finished = self.step.finish(self.dout, out.to(self.q.dtype), lse)
        self.dq = torch.zeros_like(self.q, dtype=self.wide)

    def call(self, direction: str, mask: StepMask, first: bool) -> Call:
        """A step as the ring runs it; `first` has nothing to continue from."""
        step, part, scale = self.step, self.part(mask), self.shape.scale
        more: dict[str, Any] = {}
        if step.continues(mask):
            running = self.running if direction == "forward" else self.dq
            more = {"running": None if first else running, "dtype": self.wide}
        if direction == "forward":
            return partial(step.forward, self.q, part, scale, **more)
        return partial(step.backward, self.q, part, self.done, scale, **more)


def local_tensors(
    shape: Shape, length: int, device: torch.device, seed: int = 0
) -> list[Tensor]:
    """q, k, v, dout: `[1, H, S_local, D]` and `[1, HK, S_local, D]`, as in a model.

    bf16 on a GPU and fp32 on a CPU, token-major.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(seed)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    return [
        torch.randn(
            (1, length, n, shape.head_dim),
            generator=generator,
            device=device,
            dtype=dtype,
        ).transpose(1, 2)
        for n in heads
    ]


def measure(
    rank: Rank, layout: Layout, directions: Sequence[str], repeats: int
) -> Measured:
    """Time and count every step of every rank of a ring."""
    size = layout.cp_size
    masks = {
        (r, source): mask
        for r in range(size)
        for source, mask in enumerate(rank.masks(layout, r))
        if mask is not None
    }
    blocks = torch.zeros(size, size + 1, dtype=torch.int64)
    for at, mask in masks.items():
        # Counting builds what the backend reads, tables or lists.
        per_head = rank.step.executed(mask)
        blocks[at] = int(per_head.sum()) * (rank.shape.heads // per_head.numel())
    rank.finish(masks[0, 0])
    clock = DeviceClock() if rank.q.is_cuda else HostClock()
    ms = {}
    for direction in directions:
        calls = [
            rank.call(direction, mask, first=r == source)
            for (r, source), mask in masks.items()
        ]
        table = torch.zeros(size, size + 1, dtype=torch.float64)
        times = median_ms(clock, calls, repeats)
        for at, time_ms in zip(masks, times, strict=True):
            table[at] = time_ms
        ms[direction] = table
    return Measured(layout, blocks, ms)


def rows_of(measured: Measured, inner_degree: int) -> list[Row]:
    """A line for the flat ring, and one for two levels if they are asked for."""
    rotations = [("ring", 0)]
    if inner_degree:
        rotations.append(("two_level", inner_degree))
    rows = []
    for rotation, inner in rotations:

        def balance(work: Tensor, at: tuple[str, int] = (rotation, inner)) -> Balance:
            return Balance.of(measured.steps(work, *at))

        ms = {name: balance(table) for name, table in measured.ms.items()}
        layout = measured.layout
        blocks = balance(measured.blocks)
        rows.append(Row(layout.cp_size, layout.name, rotation, inner, blocks, ms))
    return rows


def missed_bars(rows: Sequence[Row], layout: str) -> list[str]:
    """A line for each bar that a layout misses in the flat ring."""
    lines = []
    for row in rows:
        if row.layout != layout or row.rotation != "ring":
            continue
        kinds = {"blocks": ("blocks", row.blocks)}
        kinds |= {f"{name} time": ("time", each) for name, each in row.ms.items()}
        for what, (bar, balance) in kinds.items():
            for name in ("worker", "step"):
                value = getattr(balance, name)
                if not value <= BARS[bar]:
                    lines.append(
                        f"bar missed: W = {row.cp_size}, {layout}: {name} imbalance "
                        f"{value:.4f} in {what}, at most {BARS[bar]}"
                    )
    return lines


def simulate(args: argparse.Namespace, plan: "Plan") -> int:
    """--simulate: the table, and the exit code."""
    device, shape = plan.device, plan.shape
    if device.type == "cuda":
        errors = check(shape, plan.backend, args.verticals)
        print(f"errors against fp32 at 4096 tokens: {json.dumps(errors)}")
    rows: list[Row] = []
    matrices = []
    for size, inner in plan.rings:
        print(f"\nW = {size}, {shape.seq_len // size} tokens a rank\n")
        print_head(plan.directions)
        rank = Rank(shape, plan.pattern, size, plan.backend, device)
        for name in plan.layouts:
            layout = build_layout(name, shape.seq_len, size, shape.granularity)
            measured = measure(rank, layout, plan.directions, args.repeats)
            for row in rows_of(measured, inner):
                print_row(row)
                rows.append(row)
            tables = {f"{d}_ms": table.tolist() for d, table in measured.ms.items()}
            blocks = measured.blocks.tolist()
            matrices.append(
                {"cp_size": size, "layout": name, "blocks": blocks} | tables
            )
        del rank
    write_json(
        args.json, plan, {"rows": [asdict(row) for row in rows], "by_source": matrices}
    )
    lines = missed_bars(rows, args.bars) if args.bars else []
    for line in lines:
        print(line)
    if args.bars and not lines:
        print(f"\nall bars are met by {args.bars}: {json.dumps(BARS)}")
    return 1 if lines else 0


def print_head(directions: Sequence[str]) -> None:
    columns = ["layout", "rotation", "blocks", "worker", "step"]
    for direction in directions:
        columns += [f"{direction} ms", "worker", "step"]
    print(f"| {' | '.join(columns)} |")
    print("|" + "---|" * len(columns))


def print_row(row: Row) -> None:
    """Blocks of all ranks; ms are those of the whole ring, its slowest rank a step."""
    rotation = row.rotation
    if row.inner_degree:
        rotation += f" {row.cp_size // row.inner_degree}x{row.inner_degree}"
    cells = [row.layout, rotation, f"{row.blocks.total:.0f}"]
    cells += [f"{row.blocks.worker:.4f}", f"{row.blocks.step:.4f}"]
    for each in row.ms.values():
        cells += [f"{each.slowest:.3f}", f"{each.worker:.3f}", f"{each.step:.3f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


# --- real ranks -----------------------------------------------------------------------


@dataclass(frozen=True)
class RingRow:
    """One layout and rotation on real ranks; a rank waits for the slowest."""

    layout: str
    rotation: str
    inner_degree: int
    inner: str
    ms: float  # forward + backward
    exposed_ms: float
    tokens_per_s: float
    worker: float  # in executed blocks
    step: float


class RealRing:
    """This rank's call of the operator, in one layout and rotation."""

    def __init__(self, plan: "Plan", mesh: Any, layout: str, **ring: Any):
        self.plan, self.mesh, self.ring = plan, mesh, ring
        shape, size = plan.shape, mesh.size()
        self.layout = build_layout(layout, shape.seq_len, size, shape.granularity)
        mine = local_tensors(
            shape, self.layout.local_len, plan.device, seed=mesh.get_local_rank()
        )
        self.q, self.k, self.v = (x.requires_grad_() for x in mine[:3])
        self.dout = mine[3]

    def call(self) -> tuple[Tensor, ...]:
        """out, dq, dk, dv."""
        out = sparse_attention(
            self.q,
            self.k,
            self.v,
            self.plan.pattern,
            granularity=self.plan.shape.granularity,
            layout=self.layout,
            mesh=self.mesh,
            backend=self.plan.backend,
            **self.ring,
        )
        return out, *torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)

    def ms(self) -> float:
        """Time of the slowest rank, all starting together."""
        calls = _CALLS if self.plan.device.type == "cuda" else 1
        synchronize(self.plan.device)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            self.call()
        synchronize(self.plan.device)
        mine = 1e3 * (time.perf_counter() - begin) / calls
        return slowest(mine, self.plan.device)

    def counted(self) -> dict[str, float]:
        """The metrics of a call, as training logs them."""
        dist.barrier()
        with recorder.recording(True):
            self.call()
        return recorder.summary(comm_of(self.mesh))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values. Collective."""
    tensor = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def time_ring(
    ring: RealRing, expected: tuple[Tensor, ...] | None, repeats: int
) -> tuple[RingRow, tuple[Tensor, ...]]:
    """Check one layout and rotation, then time it; also its results. Collective.

    Args:
        expected: out, dq, dk, dv of another rotation.

    Raises:
        RuntimeError: the results are not these.
    """
    results = ring.call()
    if expected is not None:
        errors = [
            relative_error(a, b.float()) for a, b in zip(results, expected, strict=True)
        ]
        error = slowest(max(errors), ring.plan.device)
        if not error < 1e-2:
            raise RuntimeError(
                f"{ring.layout.name}, {ring.ring}: out or gradients differ from the "
                f"flat ring's by {error:.3g}: nothing is timed"
            )
    ms = median([ring.ms() for _ in range(repeats)])
    ring.counted()  # counting has kernels of its own to compile
    metrics = [ring.counted() for _ in range(repeats)]
    row = RingRow(
        ring.layout.name,
        ring.ring["rotation"],
        ring.ring.get("inner_degree", 0),
        ring.ring.get("inner", "ring"),
        ms,
        median([each["ring/exposed_comm_ms"] for each in metrics]),
        1e3 * ring.layout.seq_len / ms,
        metrics[0]["ring/worker_imbalance"],
        metrics[0]["ring/step_imbalance"],
    )
    return row, results


def run_real(args: argparse.Namespace, plan: "Plan") -> int:
    """Under torchrun: the table of all layouts and rotations."""
    device = plan.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ((size, inner),) = plan.rings
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("cp",))
    rings: list[dict[str, Any]] = [{"rotation": "ring"}, {"rotation": "allgather"}]
    for within in ("ring", "allgather") if inner else ():
        rings.append({"rotation": "two_level", "inner_degree": inner, "inner": within})
    say(f"\nW = {size}, {plan.shape.seq_len // size} tokens a rank\n")
    say("| layout | rotation | ms | exposed ms | tokens/s | worker | step |")
    say("|---|---|---|---|---|---|---|")
    rows = []
    for layout in plan.layouts:
        expected = None
        for settings in rings:
            ring = RealRing(plan, mesh, layout, **settings)
            row, results = time_ring(ring, expected, args.repeats)
            expected = expected or results
            rows.append(row)
            say(format_ring_row(row, size))
    if dist.get_rank() == 0:
        write_json(args.json, plan, {"rows": [asdict(row) for row in rows]})
    dist.barrier()
    dist.destroy_process_group()
    return 0


def format_ring_row(row: RingRow, cp_size: int) -> str:
    rotation = row.rotation
    if row.inner_degree:
        rotation += f" {cp_size // row.inner_degree}x{row.inner_degree}"
    if row.inner != "ring":
        rotation += f", inner {row.inner}"
    return (
        f"| {row.layout} | {rotation} | {row.ms:.3f} | {row.exposed_ms:.3f} | "
        f"{row.tokens_per_s:.0f} | {row.worker:.4f} | {row.step:.4f} |"
    )


def say(line: str) -> None:
    """Print on the first rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(line, flush=True)


# --- command line ---------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What was asked for, checked."""

    shape: Shape
    pattern: VerticalSlash  # on the device
    backend: str
    device: torch.device
    layouts: list[str]
    rings: list[tuple[int, int]]  # W, and M of two_level or 0
    directions: list[str]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        ValueError: one that argparse refuses.
    """
    parser = _Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulate", default="", metavar="W[,W2..]")
    parser.add_argument(
        "--inner",
        default="0",
        metavar="M[,M2..]",
        help="ranks per node of two_level: one for all W, or one each; 0 is none",
    )
    parser.add_argument("--layouts", default="striped,zigzag,contiguous")
    parser.add_argument("--seq-len", type=int, help="524288, or that of a recording")
    parser.add_argument("--heads", type=int, help="16, likewise")
    parser.add_argument("--kv-heads", type=int, help="2, likewise")
    parser.add_argument("--head-dim", type=int, help="128, likewise")
    parser.add_argument("--granularity", type=int, help="128, likewise")
    parser.add_argument("--pattern", default="mixed", help="see above")
    parser.add_argument("--layer", type=int, default=0, help="of a recording")
    parser.add_argument("--density", type=float, default=0.05, help="of slash blocks")
    parser.add_argument("--verticals", type=int, default=1024, help="of a head at most")
    parser.add_argument("--seed", type=int, default=0, help="of the pattern")
    parser.add_argument(
        "--backend", default="auto", help="auto, " + ", ".join(BACKENDS)
    )
    parser.add_argument("--direction", default="", help="forward,backward")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bars", nargs="?", const="striped", metavar="LAYOUT")
    parser.add_argument("--json", default="", help="also write all numbers here")
    return parser.parse_args(argv)


def make_plan(args: argparse.Namespace, device: torch.device) -> Plan:
    """Check the flags and make the pattern.

    Raises:
        ValueError: what does not fit together, with both numbers.
    """
    if args.repeats < 1:
        raise ValueError(f"--repeats ({args.repeats}) must be at least 1")
    if not args.simulate:
        for flag, value in (("--bars", args.bars), ("--direction", args.direction)):
            if value:
                raise ValueError(f"{flag} ({value}) needs --simulate")
    layouts = args.layouts.split(",")
    rings = list(_rings(args))
    directions = (args.direction or ",".join(DIRECTIONS)).split(",")
    for direction in directions:
        if direction not in DIRECTIONS:
            raise ValueError(
                f"--direction ('{direction}') must be one of {list(DIRECTIONS)}"
            )
    if args.bars and args.bars not in layouts:
        raise ValueError(f"--bars ({args.bars}) must be one of --layouts ({layouts})")
    shape, pattern = make_pattern(args)
    for size, _ in rings:
        for name in layouts:
            build_layout(name, shape.seq_len, size, shape.granularity)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend, _ = resolve_backend(
        args.backend, device.type, shape.granularity, dtype, shape.head_dim
    )
    pattern = pattern.to(device)
    return Plan(shape, pattern, backend, device, layouts, rings, directions)


def make_pattern(args: argparse.Namespace) -> tuple[Shape, VerticalSlash]:
    """The pattern that was asked for, on the CPU, and the shape it is for.

    Raises:
        ValueError: an unknown pattern, or numbers that do not fit together.
    """
    kind, _, file = args.pattern.partition(":")
    if kind not in ("mixed", "uniform", "local", "recorded") or (
        bool(file) != (kind == "recorded")
    ):
        raise ValueError(
            f"--pattern ('{args.pattern}') must be 'mixed', 'uniform', 'local' or "
            "'recorded:FILE'"
        )
    asked = argparse.Namespace(**vars(args), lengths="", recorded=file)
    asked.pattern = kind
    if kind == "recorded":
        return load_pattern(asked, "cpu")
    asked.seq_len = 524288 if args.seq_len is None else args.seq_len
    if kind != "mixed":
        return load_pattern(asked, "cpu")
    shape = Shape(
        asked.seq_len,
        args.heads or 16,
        args.kv_heads or 2,
        args.head_dim or 128,
        args.granularity or 128,
    )
    check_arguments(asked, shape)
    return shape, mixed_pattern(shape, args.density, args.verticals, args.seed)


def _rings(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Each W and its M.

    Raises:
        ValueError: numbers that are none, or no ring.
    """
    if args.simulate:
        sizes = _numbers("--simulate", args.simulate)
    elif "WORLD_SIZE" in os.environ:
        sizes = [int(os.environ["WORLD_SIZE"])]
    else:
        raise ValueError("--simulate W is missing, and torchrun has not started this")
    inner = _numbers("--inner", args.inner)
    if len(inner) not in (1, len(sizes)):
        raise ValueError(
            f"--inner ({args.inner}) must be one number, or one for each of the "
            f"{len(sizes)} of --simulate ({args.simulate})"
        )
    if not args.simulate and inner == [0]:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        inner = [local if local < sizes[0] else 0]
    for size, each in zip(sizes, inner * len(sizes), strict=False):
        if size < 2:
            raise ValueError(f"a ring needs at least 2 ranks, got {size}")
        if each:
            check_inner_degree(each, size)
        yield size, each


def _numbers(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} ('{text}') must be numbers with commas") from None


def describe(plan: Plan, args: argparse.Namespace) -> str:
    """The line above the tables."""
    shape, pattern = plan.shape, plan.pattern
    cuda = plan.device.type == "cuda"
    name = torch.cuda.get_device_name() if cuda else platform.machine() + " CPU"
    kept, slashes = (
        f"{100 * kept_share(each, shape):.2f}%"
        for each in (pattern, without_columns(pattern))
    )
    return (
        f"{name}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{'bf16' if cuda else 'fp32'}, backend {plan.backend}, {shape.heads}/"
        f"{shape.kv_heads} heads, D {shape.head_dim}, {shape.seq_len} tokens, "
        f"granularity {shape.granularity}, pattern {args.pattern}: {kept} of pairs "
        f"kept, {slashes} by slashes, {pattern.num_vertical.double().mean():.0f} "
        f"verticals a head; medians of {args.repeats}"
    )


def write_json(path: str, plan: Plan, results: dict[str, Any]) -> None:
    """All numbers, if a file was asked for."""
    if not path:
        return
    about = {
        "torch": torch.__version__,
        "device": str(plan.device),
        "backend": plan.backend,
        "shape": asdict(plan.shape),
        "kept": kept_share(plan.pattern, plan.shape),
    }
    with open(path, "w") as file:
        json.dump(about | results, file)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    try:
        args = parse(argv)
        kind = cpu_device.available_device_type()
        local = os.environ.get("LOCAL_RANK", "0")
        plan = make_plan(
            args, torch.device(f"cuda:{local}" if kind == "cuda" else kind)
        )
    except ValueError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"bench_ring: {error}", file=sys.stderr)
        return 2
    say(describe(plan, args))
    return simulate(args, plan) if args.simulate else run_real(args, plan)


if __name__ == "__main__":
    code = main()
    if code == 0 and not torch.cuda.is_available():
        cpu_device.leave()
    sys.exit(code)

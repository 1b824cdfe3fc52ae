"""What the attention did, counted on the device.

Operators report here while the recorder is active, which the trainer makes it in steps
that are logged; in all others nothing is computed. `summary` is the one place that
waits for the device.

    sparse/density          kept causal pairs / causal pairs, mean over heads
    sparse/recall           share of the probe rows' attention that is kept
    sparse/block_density    slash blocks really executed / causal blocks
    sparse/vertical_count   verticals per head
    sparse/slash_count      slashes per head
    ring/worker_imbalance   max over ranks of a rank's blocks / mean
    ring/step_imbalance     sum over steps of the slowest rank's blocks / sum of means
    ring/exposed_comm_ms    what a rank waits for transfers and collectives of its ring
                            in all layers, forward and backward; max over ranks

Ring steps are the W hops and, last, the vertical step, all in executed 128 x 128 blocks
(`granularity` squared). A step in which no rank works is no step.

A wait is timed by two events on the stream that has to wait, or by the clock of a CPU:
what no compute has hidden. It includes waiting for a rank that is late.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mtraining_flex.layout import Layout
from mtraining_flex.pattern.quality import density
from mtraining_flex.pattern.types import VerticalSlash
from mtraining_flex.ring.comm import Comm, Levels, Transfer

PATTERN_METRICS = ("density", "recall", "vertical_count", "slash_count")


class Recorder:
    """Sums of one logged step, per layer, on the device."""

    def __init__(self) -> None:
        self.active = False
        self._values: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
        self._causal_blocks = 1.0
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event] | float] = []

    @contextmanager
    def recording(self, active: bool) -> Iterator[None]:
        """Record, or do not, inside the block."""
        before, self.active = self.active, active
        try:
            yield
        finally:
            self.active = before

    def add(self, layer: int, name: str, value: Tensor) -> None:
        if self.active:
            self._values[layer, name].append(value)

    def add_pattern(self, layer: int, pattern: VerticalSlash, layout: Layout) -> None:
        """Counts and density of the pattern that a ring runs."""
        if not self.active:
            return
        kept = density(pattern, layout.seq_len, layout.granularity)
        self.add(layer, "density", kept.double().mean())
        self.add(layer, "vertical_count", pattern.num_vertical.double().mean())
        self.add(layer, "slash_count", pattern.num_slash.double().mean())

    def add_executed(self, layer: int, counter: "StepCounter", layout: Layout) -> None:
        """Blocks executed by this rank, per ring step."""
        if not self.active:
            return
        n = layout.num_blocks
        self._causal_blocks = counter.heads * n * (n + 1) / 2
        self.add(layer, "executed", counter.blocks)

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Time what the device, or the CPU, waits for inside the block."""
        if not self.active:
            yield
        elif device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._waits.append((begin, end))
        else:
            begin_s = time.perf_counter()
            yield
            self._waits.append(1e3 * (time.perf_counter() - begin_s))

    def exposed_ms(self) -> float:
        """All waits of this rank so far. Waits for the device."""
        total = 0.0
        for wait in self._waits:
            if isinstance(wait, float):
                total += wait
                continue
            wait[1].synchronize()
            total += wait[0].elapsed_time(wait[1])
        return total

    def clear(self) -> None:
        self._values.clear()
        self._waits.clear()

    def summary(self, comm: Comm) -> dict[str, float]:
        """Metrics of the recorded step, and forget it. Waits; collective over comm.

        Returns:
            Means over layers by name, and `name/layer_i` of each layer.
        """
        layers = sorted({layer for layer, _ in self._values})
        metrics: dict[str, list[float]] = defaultdict(list)
        exposed: Tensor | None = None
        for layer in layers:
            for name in PATTERN_METRICS:
                values = self._values.get((layer, name))
                if values:
                    mean = torch.stack(values).double().mean().item()
                    metrics[f"sparse/{name}"].append(mean)
            executed = self._values.get((layer, "executed"))
            if executed:
                calls = torch.stack(executed).sum(0)
                per_rank = comm.all_gather(calls).double().cpu()  # [W, W + 1]
                worker, step = imbalance(per_rank)
                metrics["ring/worker_imbalance"].append(worker)
                metrics["ring/step_imbalance"].append(step)
                blocks = per_rank[:, :-1].sum().item() / len(executed)
                share = blocks / self._causal_blocks
                metrics["sparse/block_density"].append(share)
                exposed = calls.new_empty((), dtype=torch.float64)
        if exposed is not None:
            exposed.fill_(self.exposed_ms())
        self.clear()
        result = {name: sum(v) / len(v) for name, v in metrics.items()}
        for name, each in metrics.items():
            by_layer = zip(layers, each, strict=True)
            result |= {f"{name}/layer_{i}": value for i, value in by_layer}
        if exposed is not None:
            result["ring/exposed_comm_ms"] = comm.all_gather(exposed).max().item()
        return result


class StepCounter:
    """Blocks that one rank executes in one forward, per ring step."""

    def __init__(self, q: Tensor, cp_size: int):
        self.heads = q.shape[0] * q.shape[1]
        self.blocks = q.new_zeros(cp_size + 1, dtype=torch.int64)

    def count(self, step: int, per_head: Tensor) -> None:
        """Add a step's blocks, int64 [B, H]; step -1 is the vertical step."""
        # A pattern with one head stands for all.
        self.blocks[step] += per_head.sum() * (self.heads // per_head.numel())


class TimedComm:
    """A `Comm` whose waits are recorded."""

    def __init__(self, comm: Comm):
        self.comm = comm
        self.name, self.rank, self.size = comm.name, comm.rank, comm.size

    def all_reduce(self, x: Tensor) -> Tensor:
        with recorder.waiting(x.device):
            return self.comm.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        with recorder.waiting(x.device):
            return self.comm.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        with recorder.waiting(x.device):
            return self.comm.reduce_scatter(x)

    def hop(self, direction: str, x: Tensor) -> Transfer:
        return _TimedTransfer(self.comm.hop(direction, x), x.device)

    def split(self, inner_degree: int) -> Levels:
        return Levels(*(TimedComm(level) for level in self.comm.split(inner_degree)))


class _TimedTransfer:
    def __init__(self, transfer: Transfer, device: torch.device):
        self.transfer, self.device = transfer, device

    def wait(self) -> Tensor:
        with recorder.waiting(self.device):
            return self.transfer.wait()


def timed(comm: Comm) -> Comm:
    """The same ring, with its waits recorded if anything is."""
    return TimedComm(comm) if recorder.active and comm.size > 1 else comm


def imbalance(work: Tensor) -> tuple[float, float]:
    """Worker and step imbalance of `work` `[ranks, steps]` (spec section 1.2)."""
    mean = work.sum() / work.shape[0]
    if mean == 0:
        return 1.0, 1.0
    return (
        (work.sum(1).max() / mean).item(),
        (work.max(0).values.sum() / mean).item(),
    )


recorder = Recorder()

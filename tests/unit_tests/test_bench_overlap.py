"""What the overlap experiment expects, how it judges, and what it refuses.

What it expects is read off the real loops here: `ring.drive` runs on one rank, with a
clock instead of processes. A step lets the clock go on; transfers share a cable.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtraining_flex.layout import build_layout
from mtraining_flex.pattern.types import dense_pattern
from mtraining_flex.ring import drive
from mtraining_flex.ring.comm import Levels
from mtraining_flex.ring.step import EagerStep
from recipes import bench_overlap, netns
from recipes.bench_overlap import (
    DIRECTIONS,
    INNER,
    TOLERANCE,
    VARIANTS,
    WORLD,
    Row,
    SleepingStep,
    StillComm,
    main,
    overlapped_ms,
    parse,
    summed_ms,
    table,
)

COMPUTE = 3.0
CASES = [
    (variant, direction, ratio, at_once)
    for variant in VARIANTS
    for direction in DIRECTIONS
    for ratio in (1.0, 1.5, 2.0, 3.0, 4.0)
    for at_once in (1, 2)
]


class Clock:
    """Time that passes only where someone computes or waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.left: list[list[float]] = []  # of each transfer under way, on its own

    def sleep(self, duration: float) -> None:
        end = self.now + duration
        while (done := self._next()) is not None and done <= end:
            self._go(done)
        self._go(end)

    def _next(self) -> float | None:
        """When the next transfer ends: those under way share the cable's rate."""
        if not self.left:
            return None
        return self.now + min(left[0] for left in self.left) * len(self.left)

    def _go(self, to: float) -> None:
        share = (to - self.now) / max(len(self.left), 1)
        for left in self.left:
            left[0] -= share
        self.left = [left for left in self.left if left[0] > 1e-9]
        self.now = to

    def wait_for(self, transfer: list[float]) -> None:
        while transfer in self.left:
            done = self._next()
            assert done is not None
            self._go(done)


class ClockedComm(StillComm):
    """A ring whose hops take their time. What arrives was sent when this rank sent."""

    def __init__(self, comm: Any, clock: Clock, transfer: float, at_once: int):
        super().__init__(comm)
        self.clock, self.transfer, self.at_once = clock, transfer, at_once

    def hop(self, direction: str, x: Tensor) -> Any:
        left = [self.transfer]
        self.clock.left.append(left)

        def wait() -> Tensor:
            self.clock.wait_for(left)
            return x

        return SimpleNamespace(wait=wait)

    def split(self, inner_degree: int) -> Levels:
        inner = SimpleNamespace(name="inner", rank=1, size=inner_degree)
        outer = SimpleNamespace(name="outer", rank=0, size=self.size // inner_degree)
        between = self.transfer * self.at_once
        return Levels(StillComm(inner), ClockedComm(outer, self.clock, between, 1))


def loop_ms(variant: str, direction: str, transfer: float, at_once: int) -> float:
    """By the clock, of the real loop with sleeping steps."""
    clock = Clock()
    here = SimpleNamespace(name="ring", rank=1, size=WORLD)
    layout = build_layout("striped", 256, WORLD, 16)
    rotation, inner_degree, inner = VARIANTS[variant].transport
    comm = ClockedComm(here, clock, transfer, at_once)
    step = SleepingStep(COMPUTE)
    ring = drive.Ring(layout, comm, rotation, step, 1.0, inner_degree, inner)
    q = torch.ones(1, 2, layout.local_len, 8)
    pattern = dense_pattern(layout.num_blocks, q.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_overlap.time, "sleep", clock.sleep)
        if direction == "forward":
            drive.forward(ring, q, q, q, pattern)
        else:
            drive.backward(ring, q, q, q, q, q, q[..., 0], pattern)
    return clock.now


@pytest.mark.parametrize("variant, direction, ratio, at_once", CASES)
def test_what_a_loop_should_take(
    variant: str, direction: str, ratio: float, at_once: int
) -> None:
    transfer = ratio * COMPUTE
    given = (variant, direction, COMPUTE, transfer, at_once)
    assert overlapped_ms(*given) == pytest.approx(
        loop_ms(variant, direction, transfer, at_once)
    )
    assert overlapped_ms(*given) < summed_ms(*given)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_two_levels_should_be_faster(direction: str) -> None:
    """At every ratio of the issue, also where the ranks of a node share a cable."""
    for ratio in (2.0, 3.0, 4.0):
        flat = overlapped_ms("flat", direction, 1.0, ratio, 2)
        shared, each = (
            overlapped_ms("two_level", direction, 1.0, ratio, n) for n in (2, 1)
        )
        assert each < shared < flat


def _row(two_level: float, flat: float = 7.0, gathered: float = 4.0) -> Row:
    """With one NIC per rank at ratio 2, a loop should take 7 (flat) and 4."""
    measured = {"flat": flat, "two_level": two_level, "gathered": gathered}
    return Row("forward", 2.0, 1, compute=1.0, transfer=2.0, measured=measured)


def test_overlap_is_what_was_hidden() -> None:
    assert _row(4.0).overlap("two_level") == pytest.approx(1)
    assert _row(6.0).overlap("two_level") == pytest.approx(0)
    assert _row(5.0).overlap("two_level") == pytest.approx(0.5)
    assert _row(4.0, flat=10.0).overlap("flat") == pytest.approx(0)


@pytest.mark.parametrize(
    "row, words",
    (
        (_row(4.0), []),
        (_row(TOLERANCE * 4 - 0.01), []),
        (_row(TOLERANCE * 4 + 0.01), ["two_level (5 ms) is more than 1.2 times"]),
        (_row(4.0, gathered=5.0), ["gathered (5 ms) is more than 1.2 times"]),
        (_row(4.2, flat=4.1), ["two_level (4 ms) is not faster than flat (4 ms)"]),
    ),
)
def test_what_misses_its_bar(row: Row, words: list[str]) -> None:
    misses = row.misses()
    assert len(misses) == len(words)
    for miss, word in zip(misses, words, strict=True):
        assert word in miss and miss.startswith("forward at ratio 2: ")


def test_the_table_has_a_line_for_each_row() -> None:
    lines = table([_row(4.0), _row(5.0)]).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert "**5**" in lines[3]


def test_a_sleeping_step_gives_what_a_step_gives() -> None:
    """Shapes and types: what travels is as large as in earnest."""
    layout = build_layout("striped", 64, WORLD, 16)
    pattern = dense_pattern(layout.num_blocks, torch.device("cpu"))
    comm = StillComm(SimpleNamespace(name="ring", rank=1, size=WORLD))
    q, k = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8)
    results = []
    for step in (EagerStep(), SleepingStep(0)):
        ring = drive.Ring(layout, comm, "ring", step, 1.0)
        out, lse = drive.forward(ring, q, k, k, pattern)
        results.append([out, lse, *drive.backward(ring, q, q, k, k, out, lse, pattern)])
    for real, slept in zip(*results, strict=True):
        assert (real.shape, real.dtype) == (slept.shape, slept.dtype)
        assert real.any()


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--ratio=2,0.5", r"--ratio \(0.5\) must be at least 1"),
        ("--heads=4 --kv-heads=3", r"--heads \(4\) .* --kv-heads \(3\)"),
        ("--repeats=0", r"--repeats \(0\)"),
        ("--seq-len=1000", r"\(1000\)"),
    ),
)
def test_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(flags.split())


@pytest.mark.parametrize("lacks, word", (("root", "root"), ("ip", "iproute2")))
def test_without_root_or_iproute2(
    lacks: str,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000 if lacks == "root" else 0)
    if lacks == "ip":
        monkeypatch.setattr(netns, "_PATH", "")
    assert main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert len(lines) == 1 and word in lines[0]


def test_the_experiment(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Whole, and short: that it runs and agrees, not how fast it is."""
    try:
        with netns.two_nodes():
            pass
    except netns.Unavailable as error:
        pytest.skip(str(error))
    file = tmp_path / "rows.json"
    short = ["--seq-len=1024", "--ratio=4", "--repeats=1", "--nics=each"]
    assert main([*short, f"--json={file}"]) in (0, 1)
    assert "all rotations agree with one process" in capfd.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [row["direction"] for row in rows] == list(DIRECTIONS)
    for row in rows:
        assert row["at_once"] == INNER // 2
        # It is the cable that is slow.
        assert row["transfer"] > 2 * row["compute"] > 0
        assert set(row["measured"]) == set(VARIANTS)

"""bench_ring: what it measures, how it judges, and what it refuses."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mtraining_flex.counters import imbalance
from mtraining_flex.layout import LAYOUTS, build_layout
from mtraining_flex.pattern import density
from mtraining_flex.pattern.types import dense_pattern
from mtraining_flex.ring.schedule import sources
from recipes import bench_ring
from recipes.bench_attention import Shape, without_columns
from recipes.bench_ring import (
    Balance,
    HostClock,
    Measured,
    Rank,
    Row,
    main,
    make_plan,
    median_ms,
    missed_bars,
    mixed_pattern,
    parse,
    rows_of,
)

CPU = torch.device("cpu")
SMALL = (
    "--seq-len=1024 --heads=4 --kv-heads=2 --head-dim=8 --granularity=16 "
    "--verticals=24 --density=0.2 --backend=eager --repeats=1"
).split()


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def by_blocks(
    monkeypatch: pytest.MonkeyPatch, ms: Callable[[Any, bool], float]
) -> list[str]:
    """Let a call take `ms(mask, first)` milliseconds; the calls still run once."""
    directions: list[str] = []
    call = Rank.call

    def told(rank: Rank, direction: str, mask: Any, first: bool) -> Any:
        real = call(rank, direction, mask, first)
        directions.append(direction)

        def timed() -> Any:
            return real()

        blocks = int(rank.step.executed(mask).sum())
        timed.ms = ms(blocks, first)  # type: ignore[attr-defined]
        return timed

    def times(clock: HostClock, calls: Sequence[Any]) -> list[float]:
        return [each.ms for each in calls]

    monkeypatch.setattr(Rank, "call", told)
    monkeypatch.setattr(HostClock, "times", times)
    return directions


# --- patterns -------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_mixed_pattern_keeps_what_is_asked(share: float) -> None:
    shape = Shape(16384, 8, 2, 64, 128)
    pattern = mixed_pattern(shape, share, 100)
    kept = density(without_columns(pattern), shape.seq_len, shape.granularity)[0]
    blocks = shape.seq_len // shape.granularity
    # At most one diagonal too many a head; those of the diagonal are half empty.
    assert share - 1 / blocks < kept.mean() < share + 2 / blocks
    assert kept.max() > 1.5 * kept.min()
    assert pattern.num_vertical.max() == 100
    assert pattern.num_vertical.min() < 60
    assert (pattern.slash[..., 0] == 0).all()
    again = mixed_pattern(shape, share, 100)
    assert torch.equal(again.slash, pattern.slash)
    assert torch.equal(again.vertical, pattern.vertical)
    other = mixed_pattern(shape, share, 100, seed=1)
    assert not torch.equal(other.vertical, pattern.vertical)


# --- what is counted and timed --------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8])
def test_closed_forms_of_dense_attention(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks, as the ring itself counts them, and in a time that follows them."""
    by_blocks(monkeypatch, lambda blocks, first: 0.5 * blocks)
    num_blocks = 4 * size
    shape = Shape(16 * num_blocks, 2, 1, 8, 16)
    rank = Rank(shape, dense_pattern(num_blocks, CPU), size, "eager", CPU)
    closed = {
        "contiguous": ((2 * size - 1) * 4 + 1) / (num_blocks + 1),
        "zigzag": 1.0,
        "striped": 1 + (size - 1) / (num_blocks + 1),
    }
    for name, expected in closed.items():
        layout = build_layout(name, shape.seq_len, size, 16)
        (row,) = rows_of(bench_ring.measure(rank, layout, ["forward"], 1), 0)
        assert row.blocks.total == 2 * num_blocks * (num_blocks + 1) // 2
        assert row.blocks.worker == pytest.approx(expected, rel=1e-9)
        assert row.blocks.step == pytest.approx(expected, rel=1e-9)
        assert row.ms["forward"].worker == pytest.approx(row.blocks.worker)
        assert row.ms["forward"].slowest == pytest.approx(row.blocks.slowest / 4)


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_every_step_is_called_as_the_ring_calls_it(
    layout_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each (rank, source) that has work, and the columns, once for each direction."""
    directions = by_blocks(monkeypatch, lambda blocks, first: 1e6 * first + blocks)
    args = parse([*SMALL, "--simulate=4"])
    plan = make_plan(args, CPU)
    rank = Rank(plan.shape, plan.pattern, 4, "eager", CPU)
    layout = build_layout(layout_name, 1024, 4, 16)
    measured = bench_ring.measure(rank, layout, ["forward", "backward"], 1)
    work = measured.blocks > 0
    assert directions.count("forward") == directions.count("backward")
    ms = measured.ms["forward"]
    assert torch.equal(measured.ms["backward"], ms)
    for r in range(4):
        for source in range(4):
            if layout.is_causally_empty(r, source):
                assert not work[r, source] and ms[r, source] == 0
            # Only a rank's own keys have nothing to continue from.
            assert (ms[r, source] >= 1e6) == (r == source)
    assert work[:, -1].all()  # columns


def test_steps_are_in_the_order_of_the_ring() -> None:
    layout = build_layout("striped", 1024, 4, 16)
    work = torch.arange(20).reshape(4, 5)  # of (rank, source), and the columns
    measured = Measured(layout, work, {})
    for rotation, inner in (("ring", 0), ("two_level", 2)):
        steps = measured.steps(work, rotation, inner)
        for rank in range(4):
            order = [*sources(rotation, rank, 4, inner), 4]
            assert steps[rank].tolist() == [5 * rank + source for source in order]


def test_balance_is_that_of_the_metrics() -> None:
    work = torch.tensor([[4, 0, 1], [2, 2, 3]])
    balance = Balance.of(work)
    assert (balance.worker, balance.step) == imbalance(work.double())
    assert balance.total == 12 and balance.slowest == 4 + 2 + 3


def test_a_median_over_passes_and_a_warm_call() -> None:
    seen: list[int] = []
    passes = iter([[5.0, 1.0], [3.0, 9.0], [4.0, 2.0]])

    class Clock(HostClock):
        def times(self, calls: Sequence[Any]) -> list[float]:
            assert seen == [0, 1]  # each once, before the first pass
            return next(passes)

    calls = [lambda i=i: seen.append(i) for i in (0, 1)]
    assert median_ms(Clock(), calls, 3) == [4.0, 2.0]


def test_the_host_clock_times_each_call() -> None:
    times = HostClock().times([lambda: None, lambda: sum(range(200000))])
    assert len(times) == 2 and min(times) > 0


# --- bars -----------------------------------------------------------------------------


def row(worker: float, step: float, blocks: float, **where: Any) -> Row:
    at = {"cp_size": 32, "layout": "striped", "rotation": "ring", "inner_degree": 0}
    time_ms = Balance(worker, step, 1.0, 1.0)
    return Row(**at | where, blocks=Balance(blocks, 1.0, 1, 1), ms={"forward": time_ms})


def test_bars() -> None:
    assert missed_bars([row(1.05, 1.05, 1.02)], "striped") == []
    (line,) = missed_bars([row(1.04, 1.0501, 1.02)], "striped")
    assert "W = 32, striped: step imbalance 1.0501 in forward time" in line
    assert "at most 1.05" in line
    (line,) = missed_bars([row(1.0, 1.0, 1.0201)], "striped")
    assert "worker imbalance 1.0201 in blocks, at most 1.02" in line
    for where in ({"layout": "zigzag"}, {"rotation": "two_level"}):
        assert missed_bars([row(3.0, 3.0, 3.0, **where)], "striped") == []
    assert len(missed_bars([row(float("nan"), 1.0, 1.0)], "striped")) == 1


@pytest.mark.parametrize("late, code", [(0.0, 0), (5.0, 1)])
def test_a_missed_bar_is_the_exit_code(
    late: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Steps that take equally long, but for some."""
    calls = 0

    def ms(blocks: int, first: bool) -> float:
        nonlocal calls
        calls += 1
        return 1.0 + late * (calls % 7 == 0)

    by_blocks(monkeypatch, ms)
    monkeypatch.setitem(bench_ring.BARS, "blocks", 2.0)
    file = tmp_path / "rows.json"
    flags = [*SMALL, "--simulate=4", "--layouts=striped", "--bars", f"--json={file}"]
    assert main(flags) == code
    said = capsys.readouterr().out
    assert ("all bars are met by striped" in said) == (code == 0)
    assert ("bar missed: W = 4, striped: step imbalance" in said) == (code == 1)
    written = json.loads(file.read_text())
    assert [row["rotation"] for row in written["rows"]] == ["ring"]
    (matrix,) = written["by_source"]
    assert len(matrix["forward_ms"]) == 4 and len(matrix["forward_ms"][0]) == 5


# --- the program ----------------------------------------------------------------------


def test_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    """Really timed, on this CPU; the columns of the table are what they say."""
    assert main([*SMALL, "--simulate=2,4", "--inner=0,2", "--direction=forward"]) == 0
    said = capsys.readouterr().out
    assert "x86_64 CPU" in said or "CPU" in said
    assert "pattern mixed: " in said and "backend eager" in said
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in said.splitlines()
        if line.startswith(("| striped", "| zigzag", "| contiguous"))
    ]
    assert len(rows) == 3 + 6
    rotations = [cells[1] for cells in rows]
    assert rotations == ["ring"] * 3 + ["ring", "two_level 2x2"] * 3
    assert len({cells[2] for cells in rows}) == 1  # blocks do not depend on the ring
    for cells in rows:
        assert len(cells) == 8
        assert all(float(number) >= 1 for number in (*cells[3:5], *cells[6:]))
        assert float(cells[5]) > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--simulate W is missing"),
        ("--bars", r"--bars \(striped\) needs --simulate"),
        ("--simulate=1", "at least 2 ranks, got 1"),
        ("--simulate=4,x", r"--simulate \('4,x'\) must be numbers"),
        ("--simulate=4 --inner=3", "3.*4"),
        ("--simulate=4 --inner=4", "4.*4"),
        ("--simulate=4,8 --inner=2,2,2", "one for each of the 2"),
        ("--simulate=4 --layouts=blocky", "blocky"),
        ("--simulate=4 --bars=zigzag --layouts=striped", r"--bars \(zigzag\)"),
        ("--simulate=4 --direction=sideways", r"--direction \('sideways'\)"),
        ("--simulate=4 --repeats=0", r"--repeats \(0\) must be at least 1"),
        ("--simulate=4 --density=0.9", r"--density \(0.9\) is too much"),
        ("--simulate=4 --pattern=recorded", "'recorded:FILE'"),
        ("--simulate=4 --pattern=local:x.pt", "'recorded:FILE'"),
        ("--simulate=4 --pattern=recorded:none.pt", "none.pt.* do not exist"),
        ("--simulate=32 --seq-len=2048", "2048"),
        ("--simulate=4 --backend=flash", "flash"),
    ],
)
def test_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        args = parse([*flags.split()])
        if "--seq-len" not in flags:
            args.seq_len = 65536
        make_plan(args, CPU)


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--simulate=4", "--inner=3"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bench_ring: ") and len(said.splitlines()) == 1

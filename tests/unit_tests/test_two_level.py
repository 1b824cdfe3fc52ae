"""Two levels give what one ring gives, and one process.

O x M is simulated: O nodes of M ranks. Of 1 x 4 and 4 x 1 one level is a ring of one
rank: they are refused in a run, and here show that each level is right alone.
"""

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from mtraining_flex.attention import sparse_attention
from mtraining_flex.config import INNER_ROTATIONS, Ring
from mtraining_flex.counters import TimedComm, recorder
from mtraining_flex.layout import LAYOUTS, Layout, build_layout
from mtraining_flex.pattern.types import VerticalSlash, pack_pattern
from mtraining_flex.ring import drive, simulate
from mtraining_flex.ring.comm import DIRECTIONS, Comm, Levels, Transfer, comm_for
from mtraining_flex.ring.simulate import ThreadComm, run_ranks
from mtraining_flex.ring.step import EagerStep
from tests.helpers import assert_close, random_pattern, random_qkv
from tests.rings import (
    Inputs,
    assert_equal_results,
    grad_like,
    operator_results,
    reference_results,
    ring_results,
)

pytestmark = pytest.mark.usefixtures("one_thread")
G = 4  # granularity
SHAPES = [(1, 4), (2, 2), (4, 1), (2, 4), (4, 2), (8, 4)]  # O nodes of M ranks
every_layout = pytest.mark.parametrize("name", LAYOUTS)
every_shape = pytest.mark.parametrize(("nodes", "inner"), SHAPES)


def _case(
    name: str, size: int, seed: int, diagonal: bool
) -> tuple[Inputs, Tensor, VerticalSlash, Layout]:
    """Two cycles of the layout; heads of every kind."""
    seq_len = 2 * size * G * (2 if name == "zigzag" else 1)
    layout = build_layout(name, seq_len, size, G)
    pattern = random_pattern(
        1,
        6,
        seq_len,
        G,
        max_slash=min(9, layout.num_blocks),
        max_vertical=min(20, seq_len),
        seed=seed,
        always_diagonal=diagonal,
    )
    qkv = random_qkv(1, 6, 2, seq_len, 8, torch.float64, seed=seed)
    return qkv, grad_like(qkv[0]), pattern, layout


def _two_level(inner: int, rotation: str = "ring") -> Ring:
    return Ring(rotation="two_level", inner_degree=inner, inner=rotation)


@every_layout
@every_shape
def test_flat_two_level_and_allgather_are_one_process(
    nodes: int, inner: int, name: str
) -> None:
    size = nodes * inner
    qkv, dout, pattern, layout = _case(name, size, nodes + inner, size == 8)
    expected = reference_results(qkv, dout, pattern, G)
    flat = ring_results(qkv, dout, pattern, layout)
    assert_equal_results(flat, expected, layout)
    for ring in (
        *(_two_level(inner, rotation) for rotation in INNER_ROTATIONS),
        Ring(rotation="allgather"),
    ):
        actual = operator_results(qkv, dout, pattern, layout, ring)
        assert_equal_results(actual, expected, layout)
        assert_equal_results(actual, flat, layout, 1e-13)


def test_a_level_of_one_rank_is_the_flat_ring_to_the_bit() -> None:
    qkv, dout, pattern, layout = _case("striped", 4, 1, True)
    flat = ring_results(qkv, dout, pattern, layout)
    for inner in (1, 4):
        actual = operator_results(qkv, dout, pattern, layout, _two_level(inner))
        assert all(torch.equal(a, b) for a, b in zip(actual, flat, strict=True))


@pytest.mark.parametrize("rotation", INNER_ROTATIONS)
def test_the_settings_reach_the_function(rotation: str) -> None:
    qkv, dout, pattern, layout = _case("striped", 4, 2, True)
    seen: list[int] = []
    split = ThreadComm.split

    def watched(comm: ThreadComm, inner_degree: int) -> Any:
        seen.append(inner_degree)
        return split(comm, inner_degree)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadComm, "split", watched)
        settings: dict[str, Any] = {"inner_degree": 2, "inner": rotation}
        actual = ring_results(qkv, dout, pattern, layout, "two_level", **settings)
    assert set(seen) == {2}
    assert_equal_results(actual, reference_results(qkv, dout, pattern, G), layout)


@pytest.mark.parametrize("inner", [1, 3, 4, 8])
def test_an_inner_ring_that_is_none_is_refused(inner: int) -> None:
    qkv, _, pattern, layout = _case("striped", 4, 0, True)

    def call(comm: Any) -> None:
        q, k, v = (x[:, :, layout.positions(comm.rank)] for x in qkv)
        settings: dict[str, Any] = {"rotation": "two_level", "inner_degree": inner}
        sparse_attention(q, k, v, pattern, granularity=G, mesh=comm, **settings)

    message = rf"ring.inner_degree \({inner}\) must divide .*degree \(4\)"
    with pytest.raises(ValueError, match=message):
        run_ranks(4, call)


@every_layout
def test_b20_nothing_kept_in_some_rounds(name: str) -> None:
    """Heads that keep the diagonal, one far slash, one column, or nothing."""
    layout = build_layout(name, 128, 8, G)
    pattern = pack_pattern(
        [[[0], [24], [], [], [0, 8], [31]]], [[[], [], [77], [], [], []]]
    )
    qkv = random_qkv(1, 6, 2, 128, 8, torch.float64, seed=4)
    dout = grad_like(qkv[0])
    expected = reference_results(qkv, dout, pattern, G)
    for rotation in INNER_ROTATIONS:
        actual = operator_results(qkv, dout, pattern, layout, _two_level(4, rotation))
        assert_equal_results(actual, expected, layout)


@pytest.mark.parametrize("rotation", INNER_ROTATIONS)
def test_b16_keys_of_another_node_get_their_gradient(rotation: str) -> None:
    """Only the last rank has values, only the first node asks: all of it comes from
    afar."""
    layout = build_layout("striped", 128, 4, G)
    q, k, v = random_qkv(1, 4, 2, 128, 8, torch.float64, seed=9)
    others = torch.cat([layout.positions(r) for r in range(3)])
    v[:, :, others] = 0
    dout = grad_like(q)
    for rank in (2, 3):
        dout[:, :, layout.positions(rank)] = 0
    pattern = random_pattern(1, 4, 128, G, max_slash=20, max_vertical=9, seed=5)
    actual = operator_results((q, k, v), dout, pattern, layout, _two_level(2, rotation))
    expected = reference_results((q, k, v), dout, pattern, G)
    for a, b in zip(actual[2:], expected[2:], strict=True):
        last = layout.positions(3)
        assert b[:, :, last].norm() > 0.1
        assert_close(a[:, :, last], b[:, :, last], 1e-9)


# What travels, and when


class _Watched:
    """A ring that notes its hops; both levels, and what is computed, in one list."""

    def __init__(self, comm: Comm, level: str, events: list[str]):
        self.comm, self.level, self.events = comm, level, events
        self.name, self.rank, self.size = comm.name, comm.rank, comm.size

    def hop(self, direction: str, x: Tensor) -> Transfer:
        name = f"{self.level} {direction}"
        self.events.append(f"post {name}")
        return _WatchedTransfer(self.comm.hop(direction, x), name, self.events)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self.events.append(f"gather {self.level}")
        return self.comm.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.events.append(f"scatter {self.level}")
        return self.comm.reduce_scatter(x)

    def split(self, inner_degree: int) -> Levels:
        inner, outer = self.comm.split(inner_degree)
        return Levels(
            _Watched(inner, "inner", self.events), _Watched(outer, "outer", self.events)
        )


class _WatchedTransfer:
    def __init__(self, transfer: Transfer, name: str, events: list[str]):
        self.transfer, self.name, self.events = transfer, name, events

    def wait(self) -> Tensor:
        self.events.append(f"await {self.name}")
        return self.transfer.wait()


class _WatchedStep(EagerStep):
    def __init__(self, events: list[str]):
        self.events = events

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("compute")
        return super().forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("compute")
        return super().backward(*args, **kwargs)


def _events(nodes: int, inner: int, rotation: str) -> list[tuple[str, str]]:
    """What each rank does in forward and backward, one string each."""
    qkv, dout, pattern, layout = _case("striped", nodes * inner, 0, True)

    def call(comm: ThreadComm) -> tuple[str, str]:
        events: list[str] = []
        watched = _Watched(comm, "flat", events)
        step = _WatchedStep(events)
        ring = drive.Ring(layout, watched, "two_level", step, 0.3, inner, rotation)
        q, k, v, d = (x[:, :, layout.positions(comm.rank)] for x in (*qkv, dout))
        out, lse = drive.forward(ring, q, k, v, pattern)
        forward = "; ".join(events)
        events.clear()
        drive.backward(ring, d, q, k, v, out, lse, pattern)
        return forward, "; ".join(events)

    return run_ranks(nodes * inner, call)


def test_what_is_posted_and_awaited_in_which_order() -> None:
    """2 x 2. The outer hop has a whole round to hide behind; the last one of the
    gradients has the columns. All ranks do the same."""
    every = _events(2, 2, "ring")
    assert len(set(every)) == 1
    forward, backward = every[0]
    assert forward == (
        "post outer kv; post inner kv; compute; await inner kv; compute; "
        "await outer kv; post inner kv; compute; await inner kv; compute; compute"
    )
    assert backward == (
        "post outer kv; post inner kv; compute; post inner dkv; await inner kv; "
        "compute; await inner dkv; post inner dkv; "
        "await outer kv; post inner kv; compute; "
        "await inner dkv; post outer dkv; post inner dkv; await inner kv; "
        "compute; await inner dkv; post inner dkv; "
        "await inner dkv; await outer dkv; post outer dkv; compute; await outer dkv"
    )


def test_what_is_posted_with_an_inner_allgather() -> None:
    every = _events(2, 2, "allgather")
    assert len(set(every)) == 1
    assert every[0] == (
        "post outer kv; gather inner; compute; compute; "
        "await outer kv; gather inner; compute; compute; compute",
        "post outer kv; gather inner; compute; compute; "
        "await outer kv; gather inner; compute; "
        "scatter inner; post outer dkv; compute; "
        "scatter inner; await outer dkv; post outer dkv; compute; await outer dkv",
    )


@pytest.mark.parametrize(("nodes", "inner"), [(2, 4), (4, 2)])
def test_how_often_each_level_hops(nodes: int, inner: int) -> None:
    """Gradients make one hop more in each ring: they come home."""
    forward, backward = _events(nodes, inner, "ring")[0]
    for events in (forward, backward):
        assert events.count("post outer kv") == nodes - 1
        assert events.count("post inner kv") == nodes * (inner - 1)
    assert backward.count("post outer dkv") == nodes
    assert backward.count("post inner dkv") == nodes * inner


# What is measured


def test_exposed_time_is_that_of_the_waits() -> None:
    """A link on which every hop takes 20 ms: known waits, in all layers together."""

    class Slow(ThreadComm):
        def hop(self, direction: str, x: Tensor) -> Transfer:
            return _SlowTransfer(super().hop(direction, x))

    class _SlowTransfer:
        def __init__(self, transfer: Transfer):
            self.transfer = transfer

        def wait(self) -> Tensor:
            time.sleep(0.02)
            return self.transfer.wait()

    qkv, dout, pattern, layout = _case("striped", 2, 0, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "ThreadComm", Slow)
        recorder.clear()
        ring_results(qkv, dout, pattern, layout)
        assert recorder.exposed_ms() == 0.0, "recorded although inactive"
        with recorder.recording(True):
            ring_results(qkv, dout, pattern, layout)
            waited = recorder.exposed_ms()
        recorder.clear()
    # Both ranks report to one recorder: a hop of kv forward and backward each, and two
    # of dkv.
    assert 2 * 4 * 20 <= waited < 2 * 4 * 20 + 2000


def test_a_run_reports_exposed_time() -> None:
    """Of both levels; 0 where there is no ring."""
    qkv, dout, pattern, layout = _case("striped", 4, 0, True)
    recorder.clear()
    with recorder.recording(True):
        operator_results(qkv, dout, pattern, layout, _two_level(2))
        waits = len(recorder._waits)
        summary = recorder.summary(comm_for(None))
    # Each rank: columns forward and backward and their gradients; kv as above twice;
    # dkv.
    assert waits == 4 * (3 + 2 * (1 + 2) + (2 + 4))
    assert summary["ring/exposed_comm_ms"] > 0
    with recorder.recording(True):
        ring_results(qkv, dout, pattern, build_layout("striped", layout.seq_len, 1, G))
        assert recorder.summary(comm_for(None))["ring/exposed_comm_ms"] == 0.0


def test_a_timed_ring_is_a_ring() -> None:
    def call(comm: ThreadComm) -> None:
        timed = TimedComm(comm)
        x = torch.arange(8.0).view(4, 2) + comm.rank
        assert torch.equal(timed.all_reduce(x), comm.all_reduce(x))
        assert torch.equal(timed.all_gather(x), comm.all_gather(x))
        assert torch.equal(timed.reduce_scatter(x), comm.reduce_scatter(x))
        for direction in DIRECTIONS:
            got = timed.hop(direction, x).wait()
            assert torch.equal(got, x - comm.rank + (comm.rank - 1) % 4)
        for mine, theirs in zip(timed.split(2), comm.split(2), strict=True):
            assert (mine.rank, mine.size) == (theirs.rank, theirs.size)

    run_ranks(4, call)

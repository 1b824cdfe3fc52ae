"""Faults are planted in the ring, and one check finds each; clean checks find none.

A step is simulated: the operators and autograd on all ranks of a ring, with the
sentinel watching.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtraining_flex import selftest
from mtraining_flex import sentinel as sentinel_module
from mtraining_flex.block_mask import MASKS
from mtraining_flex.config import Ring
from mtraining_flex.config import SparseAttention as SparseConfig
from mtraining_flex.layout import LAYOUTS, Layout, build_layout, shard_batch
from mtraining_flex.pattern.types import VerticalSlash, pack_pattern
from mtraining_flex.ring import drive, ops
from mtraining_flex.ring import step as step_module
from mtraining_flex.ring.comm import comm_for
from mtraining_flex.ring.simulate import ThreadComm, run_ranks
from mtraining_flex.ring.step import EagerStep, Part
from mtraining_flex.sentinel import Bounds, SentinelError, sentinel
from recipes import replay
from tests.helpers import random_pattern, random_qkv
from tests.rings import grad_like

pytestmark = pytest.mark.usefixtures("one_thread")
Patch = pytest.MonkeyPatch
G, S, D = 4, 64, 8
HEADS = (1, 4, 2)  # B, H, HK
TWO_LEVEL = Ring(rotation="two_level", inner_degree=2)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Every step is watched, in the one layer; what is saved goes here."""
    sentinel.configure(1, tmp_path / "sentinel", 1)
    yield tmp_path / "sentinel"
    sentinel.configure(0, "", 1)


def every_head_of_both() -> VerticalSlash:
    """Slashes and columns in each head; some columns lie in kept slashes."""
    rng = random.Random(0)
    slashes = [[0, *rng.sample(range(1, S // G), 4)] for _ in range(HEADS[1])]
    verticals = [[0, *rng.sample(range(1, S), 11)] for _ in range(HEADS[1])]
    return pack_pattern([slashes], [verticals])


def step(
    number: int,
    *,
    ring: Ring | None = None,
    size: int = 4,
    dtype: torch.dtype = torch.float32,
    pattern: VerticalSlash | None = None,
    heads: tuple[int, int, int] = HEADS,
    calls: int = 1,
    on_rank: Callable[[ThreadComm, dict[str, Tensor]], None] | None = None,
) -> None:
    """Forward and backward of one layer on all ranks, in a step that is watched."""
    ring = ring or Ring()
    layout = build_layout(ring.layout, S, size, G)
    found = every_head_of_both() if pattern is None else pattern
    qkv = random_qkv(*heads, S, D, dtype, seed=number)
    dout = grad_like(qkv[0])

    def run(comm: ThreadComm) -> None:
        here = layout.positions(comm.rank)
        x = {n: t[:, :, here] for n, t in zip("qkv", qkv, strict=True)}
        names = ("slash", "num_slash", "vertical", "num_vertical")
        x |= dict(zip(names, (t.clone() for t in found.tensors()), strict=True))
        if on_rank is not None:
            on_rank(comm, x)
        inputs = [x[name].requires_grad_() for name in "qkv"]
        tail = (comm.name, layout.name, G, *ring.transport, "eager", D**-0.5)
        for _ in range(calls):
            patterns = [x[name] for name in names]
            out, _ = ops.ring_attention(*inputs, *patterns, torch.tensor(0), *tail)
            torch.autograd.grad(out, inputs, dout[:, :, here])

    with sentinel.watching(number):
        run_ranks(size, run)


# ---- faults -------------------------------------------------------------------------


def wrong_source_rank(patch: Patch) -> None:
    patch.setattr(
        drive, "ring_sources", lambda r, n: [(r - s - 1) % n for s in range(n)]
    )


def dropped_last_step(patch: Patch) -> None:
    rotate, count = drive._rotate, drive._num_steps
    patch.setattr(drive, "_rotate", lambda *args: list(rotate(*args))[:-1])
    patch.setattr(drive, "_num_steps", lambda ring: count(ring) - 1)


def last_steps_not_merged(patch: Patch) -> None:
    def first(out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return out, lse

    patch.setattr(drive, "merge", first)


def stale_kv(patch: Patch) -> None:
    """A rank computes on the keys it already had."""
    hop = ThreadComm.hop

    class Stale:
        def __init__(self, x: Tensor, transfer: Any):
            self.x, self.transfer = x, transfer

        def wait(self) -> Tensor:
            self.transfer.wait()
            return self.x

    def stale(comm: ThreadComm, direction: str, x: Tensor) -> Any:
        transfer = hop(comm, direction, x)
        return Stale(x, transfer) if direction == "kv" else transfer

    patch.setattr(ThreadComm, "hop", stale)


def local_lse_in_backward(patch: Patch) -> None:
    """Of a rank's own keys instead of all."""
    backward = drive.backward

    def local(
        ring: drive.Ring, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> Any:
        out, _, pattern = rest
        own = drive._Masks(ring, q, pattern).slash(ring.comm.rank)
        _, lse = ring.step.forward(q, Part(k, v, own), ring.scale)
        return backward(ring, dout, q, k, v, out, lse, pattern)

    patch.setattr(drive, "backward", local)


def wrong_kv_head(patch: Patch) -> None:
    """Each group of query heads reads the keys of the next."""
    forward = EagerStep.forward

    def other(self: EagerStep, q: Tensor, part: Part, *args: Any, **kw: Any) -> Any:
        if part.k.shape[1] < q.shape[1]:
            part = Part(part.k.roll(1, 1), part.v.roll(1, 1), part.mask)
        return forward(self, q, part, *args, **kw)

    patch.setattr(EagerStep, "forward", other)


def group_not_summed(patch: Patch) -> None:
    """dk and dv of the last head of each group alone."""
    backward = EagerStep.backward

    def last(self: EagerStep, q: Tensor, part: Part, done: Any, scale: float) -> Any:
        group = q.shape[1] // part.k.shape[1]
        one = torch.arange(q.shape[1]) % group == group - 1
        dout = done.dout * one[:, None, None]
        result = backward(self, q, part, done, scale)
        part_only = dataclasses.replace(done, dout=dout, out=done.out)
        return dataclasses.replace(
            result, dkv=backward(self, q, part, part_only, scale).dkv
        )

    patch.setattr(EagerStep, "backward", last)


def one_node_missing(patch: Patch) -> None:
    """The second round of a two-level ring is not computed."""
    rotate, count = drive._rotate, drive._num_steps
    patch.setattr(drive, "_rotate", lambda *args: list(rotate(*args))[:2])
    patch.setattr(drive, "_num_steps", lambda ring: count(ring) - 2)


def positions_not_permuted(patch: Patch) -> None:
    """The mask takes the tokens of a shard for neighbours."""

    def natural(layout: Layout, rank: int, device: Any, shift: int) -> Any:
        first = rank * layout.local_len
        pos = torch.arange(first, first + layout.local_len).int()
        return pos, pos // layout.granularity + shift

    patch.setattr("mtraining_flex.block_mask._positions", natural)


def diagonal_not_masked(patch: Patch) -> None:
    """A query sees the keys behind it in its own block."""
    mask = MASKS["slash"]

    def seen(b: Any, h: Any, q: Tensor, kv: Tensor, *buffers: Tensor) -> Tensor:
        q_pos, kv_pos = buffers[:2]
        same = q_pos[q] // G == kv_pos[kv] // G
        return mask(b, h, q, kv, *buffers) | (same & (kv_pos[kv] > q_pos[q]))

    patch.setitem(MASKS, "slash", seen)
    last = step_module._tiles

    def all_keys(q: Tensor, mask: Any) -> Iterator[tuple[slice, int]]:
        return ((rows, mask.kv_len) for rows, _ in last(q, mask))

    patch.setattr(step_module, "_tiles", all_keys)


def mask_dropped(patch: Patch) -> None:
    """Every key before the query is kept."""

    def causal(b: Any, h: Any, q: Tensor, kv: Tensor, *buffers: Tensor) -> Tensor:
        seen = buffers[1][kv] <= buffers[0][q]
        return seen.expand(1, HEADS[1], *seen.shape)

    patch.setitem(MASKS, "slash", causal)


def column_counted_twice(patch: Patch) -> None:
    """Also where a slash has it."""

    def all_columns(b: Any, h: Any, q: Any, kv: Any, *buffers: Tensor) -> Tensor:
        return buffers[1][b, h, kv] <= buffers[0][q]

    patch.setitem(MASKS, "vertical", all_columns)


def dkv_one_hop_short(patch: Patch) -> None:
    def early(home: Any) -> Tensor:
        home._round()
        return home.sum

    patch.setattr(drive._Homebound, "arrive", early)


def columns_not_sent_home(patch: Patch) -> None:
    patch.setattr(drive, "_scatter_columns", lambda *args: None)


def columns_of_this_rank_alone(patch: Patch) -> None:
    """The columns' gradients are not summed over ranks."""
    scatter = drive._scatter_columns
    own: dict[int, Tensor] = {}
    reduce = ThreadComm.all_reduce

    def noted(comm: ThreadComm, x: Tensor) -> Tensor:
        own[comm.rank] = x
        return reduce(comm, x)

    def alone(ring: drive.Ring, dkv: Tensor, grads: Tensor, *rest: Any) -> None:
        scatter(ring, dkv, own[ring.comm.rank].clone(), *rest)

    patch.setattr(ThreadComm, "all_reduce", noted)
    patch.setattr(drive, "_scatter_columns", alone)


def bf16_merge(patch: Patch) -> None:
    merge = drive.merge

    def rounded(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = merge(*args)
        return out.bfloat16().to(out.dtype), lse.bfloat16().to(lse.dtype)

    patch.setattr(drive, "merge", rounded)


def wrong_scale(patch: Patch) -> None:
    forward = drive.forward

    def scaled(ring: drive.Ring, *args: Any) -> Any:
        return forward(dataclasses.replace(ring, scale=1.02 * ring.scale), *args)

    patch.setattr(drive, "forward", scaled)


def wrong_scale_in_backward(patch: Patch) -> None:
    backward = drive.backward

    def scaled(ring: drive.Ring, *args: Any) -> Any:
        return backward(dataclasses.replace(ring, scale=1.02 * ring.scale), *args)

    patch.setattr(drive, "backward", scaled)


def lse_in_base_2(patch: Patch) -> None:
    forward = EagerStep.forward

    def binary(*args: Any, **kw: Any) -> tuple[Tensor, Tensor]:
        out, lse = forward(*args, **kw)
        return out, lse * 1.4426950408889634

    patch.setattr(EagerStep, "forward", binary)


def block_not_listed(patch: Patch) -> None:
    """What a compiled kernel would skip; plain math does not read the tables."""
    executed = EagerStep.executed
    patch.setattr(EagerStep, "executed", lambda self, mask: executed(self, mask) - 1)


def not_a_number(patch: Patch) -> None:
    forward = drive.forward

    def spoiled(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = forward(*args)
        return out.masked_fill(torch.ones_like(out, dtype=torch.bool), torch.nan), lse

    patch.setattr(drive, "forward", spoiled)


def gradient(number: int, change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def fault(patch: Patch) -> None:
        backward = drive.backward

        def changed(*args: Any) -> tuple[Tensor, ...]:
            grads = list(backward(*args))
            grads[number] = change(grads[number])
            return tuple(grads)

        patch.setattr(drive, "backward", changed)

    return fault


FAULTS: dict[str, tuple[Callable[[Patch], None], Ring, set[str]]] = {
    "wrong source rank": (wrong_source_rank, Ring(), {"blocks", "lse"}),
    "dropped last step": (dropped_last_step, Ring(), {"blocks"}),
    "steps not merged": (last_steps_not_merged, Ring(), {"lse"}),
    "stale KV": (stale_kv, Ring(), {"lse", "out"}),
    "stale KV between nodes": (stale_kv, TWO_LEVEL, {"lse", "out"}),
    "local lse in the backward": (local_lse_in_backward, Ring(), {"dq"}),
    "wrong kv head": (wrong_kv_head, Ring(), {"lse", "out"}),
    "a head of the group missing": (group_not_summed, Ring(), {"dk"}),
    "one node missing": (one_node_missing, TWO_LEVEL, {"blocks"}),
    "positions not permuted": (positions_not_permuted, Ring(), {"blocks", "lse"}),
    "diagonal not masked": (diagonal_not_masked, Ring(), {"lse"}),
    "mask dropped": (mask_dropped, Ring(), {"lse"}),
    "column counted twice": (column_counted_twice, Ring(), {"lse"}),
    "dKV one hop short": (dkv_one_hop_short, Ring(), {"dk"}),
    "columns not sent home": (columns_not_sent_home, Ring(), {"dk"}),
    "columns of one rank": (columns_of_this_rank_alone, Ring(), {"dk"}),
    "bf16 merge": (bf16_merge, Ring(), {"lse"}),
    "wrong scale": (wrong_scale, Ring(), {"lse"}),
    "wrong scale in the backward": (wrong_scale_in_backward, Ring(), {"dq"}),
    "lse in base 2": (lse_in_base_2, Ring(), {"lse"}),
    "block not listed": (block_not_listed, Ring(), {"blocks"}),
    "NaN": (not_a_number, Ring(), {"out"}),
    "dq zero": (gradient(0, torch.zeros_like), Ring(), {"dq"}),
    "dk negative": (gradient(1, torch.neg), Ring(), {"dk"}),
    "dv of another kv head": (gradient(2, lambda x: x.roll(1, 1)), Ring(), {"dv"}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_check_finds_a_planted_fault(
    fault: str, number: int, folder: Path, monkeypatch: Patch
) -> None:
    """Whatever head and block the check looks at."""
    plant, ring, quantities = FAULTS[fault]
    step(number, ring=ring)  # right before
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises(SentinelError) as caught:
            step(number, ring=ring)
    message = str(caught.value)
    assert f"step {number}, layer 0, head " in message
    found = {name for name in ALL if f": {name} differs by" in message}
    assert len(found) == 1 and found <= quantities, message
    assert "on ranks [" in message and "the last one is kept" in message
    step(number, ring=ring)  # and right after


ALL = ("pattern", "blocks", "lse", "out", "dq", "dk", "dv")


def test_a_pattern_that_is_not_the_same_on_all_ranks(folder: Path) -> None:
    def change(comm: ThreadComm, x: dict[str, Tensor]) -> None:
        if comm.rank == 2:
            x["vertical"][0, 1, 3] += 1

    with pytest.raises(SentinelError, match=r"pattern differs by 1, .*ranks \[2\]"):
        step(5, on_rank=change)


def test_the_message_says_which_step_of_the_ring(
    folder: Path, monkeypatch: Patch
) -> None:
    dropped_last_step(monkeypatch)
    with pytest.raises(SentinelError, match="executed 0 blocks at step 3, expected"):
        step(3)


# ---- no fault -----------------------------------------------------------------------


def test_a_thousand_clean_checks_raise_nothing(folder: Path) -> None:
    """500 forwards and as many backwards, on as many rings, patterns and dtypes."""
    rng = random.Random(1)
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    rings = [Ring(layout=n, rotation=r) for n in LAYOUTS for r in ("ring", "allgather")]
    rings += [dataclasses.replace(TWO_LEVEL, layout=name) for name in LAYOUTS]
    for number in range(500):
        ring, heads = rng.choice(rings), rng.choice([(1, 4, 2), (2, 3, 1), (1, 2, 2)])
        size = 4 if ring.rotation == "two_level" else rng.choice([1, 2, 2])
        pattern = random_pattern(
            heads[0],
            heads[1],
            S,
            G,
            max_slash=rng.choice([1, 4, 16]),
            max_vertical=rng.choice([0, 5, 30]),
            seed=number,
            always_diagonal=rng.random() < 0.7,
        )
        step(
            number,
            ring=ring,
            size=size,
            dtype=rng.choice(dtypes),
            pattern=pattern,
            heads=heads,
        )


def test_it_looks_at_every_layer_head_and_block() -> None:
    layout = build_layout("striped", S, 4, G)  # 4 local blocks
    q, k = torch.zeros(2, 4, 16, D), torch.zeros(2, 2, 16, D)
    settings = sentinel_module.Settings(layout, "ring", 0, "ring", "eager", 1.0)
    pattern, comm = every_head_of_both(), comm_for(None)
    call = sentinel_module.Call(q, k, k, pattern, comm, settings)
    seen, blocks, batch = set(), set(), set()
    for number in range(12):
        check = sentinel_module.Check(100 * number, number)
        place = check.place(call, 3)
        seen.add((check.layer(3), place.head))
        batch.add(place.batch)
        queries, keys = (
            set((rows // G).tolist()) for rows in (place.queries, place.keys)
        )
        assert 3 in queries and 0 in keys and len(queries) <= 2 and len(keys) <= 2
        assert place.queries.numel() == G * len(queries)
        blocks |= queries & keys | (queries - {3}) | (keys - {0})
    assert seen == {(layer, head) for layer in range(3) for head in range(4)}
    assert blocks == {0, 1, 2, 3}
    assert batch == {0, 1}


def test_only_due_steps_are_checked(folder: Path, monkeypatch: Patch) -> None:
    """The first of the process, and multiples; the first call of each alone."""
    checked: list[str] = []
    judge = sentinel_module.Sentinel._judge

    def noted(self: Any, what: str, call: Any, *rest: Any) -> None:
        checked.append(f"{self._check.step} {what} {call.comm.rank}")
        judge(self, what, call, *rest)

    monkeypatch.setattr(sentinel_module.Sentinel, "_judge", noted)
    sentinel.configure(4, folder, 1)
    for number in range(6, 14):
        step(number, size=1, calls=3)
    steps = (6, 8, 12)
    expected = [f"{n} {what} 0" for n in steps for what in ("forward", "backward")]
    assert checked == expected
    checked.clear()
    sentinel.configure(0, folder, 1)
    step(1, size=1)
    assert not checked


def test_a_step_in_which_nothing_was_checked_is_an_error(folder: Path) -> None:
    with (
        pytest.raises(
            SentinelError,
            match="layer 0 had no backward and no forward|"
            "layer 0 had no forward and no backward",
        ),
        sentinel.watching(1),
    ):
        pass


def test_zeros_would_be_refused() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        bounds = Bounds.of(dtype, torch.device("cpu"))
        assert bounds.out < 0.1 and bounds.grad < 0.1 and bounds.lse < 0.1


# ---- what is left behind ------------------------------------------------------------


def test_a_fault_can_be_replayed(
    folder: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the code it is wrong again, in the transport it is not."""
    for plant, where in ((wrong_scale, "forward"), (dkv_one_hop_short, "backward")):
        with monkeypatch.context() as patch:
            plant(patch)
            with pytest.raises(SentinelError, match=f"{where}_ring_0"):
                step(7)
            left = str(folder / f"step_7_layer_0_{where}_ring_0")
            assert replay.main([left]) == 1
            assert "a fault of the code" in capsys.readouterr().out
        assert replay.main([left]) == 0
        assert "The new result is right" in capsys.readouterr().out
        assert replay.main([left, "--all-heads", "--backend", "eager"]) == 0
    rank_3 = torch.load(folder / "step_7_layer_0_forward_ring_0/rank_3.pt")
    assert rank_3["q"].shape == (1, 4, 16, D) and rank_3["ranks"] == [0, 1, 2, 3]


def test_replay_wants_every_rank(folder: Path, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        wrong_scale(patch)
        with pytest.raises(SentinelError):
            step(7)
    left = folder / "step_7_layer_0_forward_ring_0"
    (left / "rank_2.pt").unlink()
    with pytest.raises(ValueError, match=r"ranks \[0, 1, 3\], and the ring has 4"):
        replay.main([str(left)])
    with pytest.raises(ValueError, match="has no file rank_"):
        replay.main([str(folder)])


def test_a_disk_that_is_full_does_not_hide_the_fault(
    folder: Path, monkeypatch: Patch
) -> None:
    wrong_scale(monkeypatch)
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    with pytest.raises(SentinelError, match=r"lse differs .*could not be saved"):
        step(7)


# ---- batch --------------------------------------------------------------------------


def check_batch(layout: Layout, change: Callable[..., None] | None = None) -> None:
    """What the trainer does with its batch, on all ranks."""
    tokens = torch.randint(0, 50, (2, S + 1), generator=torch.Generator())

    def run(comm: ThreadComm) -> None:
        full = [tokens[:, :-1].clone(), tokens[:, 1:].clone()]
        here = layout.positions(comm.rank)
        local = [x[:, here] for x in full]
        positions = here[None].clone()
        if change is not None:
            change(comm.rank, full, local, positions)
        batch = (full[0], full[1]), (local[0], local[1])
        sentinel.check_batch(layout, comm, *batch, positions)

    with pytest.raises(SentinelError) as caught, sentinel.watching(1):
        run_ranks(layout.cp_size, run)
    if "had no" not in str(caught.value):  # no attention here
        raise caught.value


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_batch_that_is_not_the_layouts(name: str, folder: Path) -> None:
    layout = build_layout(name, S, 4, G)
    check_batch(layout)

    def natural(rank: int, full: Any, local: Any, positions: Tensor) -> None:
        positions.copy_(torch.arange(layout.local_len))

    def other_tokens(rank: int, full: Any, local: Any, positions: Tensor) -> None:
        if rank == 1:
            local[0] = full[0][:, layout.positions(0)]

    def shifted_twice(rank: int, full: Any, local: Any, positions: Tensor) -> None:
        full[1] = full[1].roll(-1, 1)
        local[1] = full[1][:, layout.positions(rank)]

    def unshifted_labels(rank: int, full: Any, local: Any, positions: Tensor) -> None:
        local[1] = local[0]

    def another_batch(rank: int, full: Any, local: Any, positions: Tensor) -> None:
        if rank == 3:
            full[0][0, 5] += 1
            local[0] = full[0][:, layout.positions(rank)]

    for change, quantity, ranks in (
        (natural, "positions", ""),
        (other_tokens, "tokens", r"\[1\]"),
        (shifted_twice, "next tokens", r"\[0, 1, 2, 3\]"),
        (unshifted_labels, "labels", r"\[0, 1, 2, 3\]"),
        (another_batch, "batch", r"\[3\]"),
    ):
        with pytest.raises(SentinelError, match=f"{quantity} differs .*ranks {ranks}"):
            check_batch(layout, change)


def test_the_batch_of_one_rank_is_whole() -> None:
    layout = build_layout("striped", S, 1, G)
    batch = torch.arange(S)[None], torch.arange(1, S + 1)[None]
    local, positions = shard_batch(layout, None, *batch)
    sentinel.configure(1, "", 1)
    with pytest.raises(SentinelError, match="had no"), sentinel.watching(1):
        sentinel.check_batch(
            layout, comm_for(None), batch, (local[0], local[1]), positions
        )
    sentinel.configure(0, "", 1)


# ---- start-up -----------------------------------------------------------------------

SHAPE = selftest.Shape(8, 4, 16, torch.float32, torch.device("cpu"))


def start(ring: Ring, size: int, shape: selftest.Shape = SHAPE, **changes: Any) -> None:
    config = SparseConfig(**({"granularity": 8, "backend": "eager"} | changes))
    run_ranks(size, lambda comm: selftest.check_at_start(config, ring, comm, shape))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rotation", ["ring", "allgather", "two_level"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_start_that_is_right(name: str, rotation: str, dtype: torch.dtype) -> None:
    inner = 2 if rotation == "two_level" else 0
    ring = Ring(layout=name, rotation=rotation, inner_degree=inner)
    start(ring, 4, dataclasses.replace(SHAPE, dtype=dtype))


@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": "dense"},
        {"budget": "top_k", "num_vertical": 1, "num_slash": 1},
        {"budget": "top_k", "num_vertical": 0, "num_slash": 1},
        {"sink": 20, "local_window": 12},
        {"vertical_p": 0.01, "slash_p": 0.01},
        {"probe_rows": 100},
        {"max_vertical": 0},
        {"granularity": 1, "probe_rows": 3},
        {"sink": 1024, "max_vertical": 1024},
    ],
)
def test_a_start_with_other_settings(changes: dict[str, Any]) -> None:
    for size in (1, 2):
        start(Ring(), size, **changes)


@pytest.mark.parametrize(
    "fault",
    [
        "wrong source rank",
        "steps not merged",
        "stale KV",
        "local lse in the backward",
        "wrong kv head",
        "positions not permuted",
        "column counted twice",
        "dKV one hop short",
        "lse in base 2",
        "wrong scale",
    ],
)
def test_a_start_that_is_wrong(fault: str, monkeypatch: Patch) -> None:
    plant, ring, _ = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(SentinelError, match="sentinel.startup: .*Training has not beg"):
        start(ring, 4)


def test_a_search_that_misses_the_far_key(monkeypatch: Patch) -> None:
    """A pattern of near keys alone, as a search of the local shard would find."""
    search = ops.search

    def near(*args: Any) -> Any:
        pattern, scores = search(*args)
        vertical, slash = pattern.vertical.clone(), pattern.slash.clone()
        vertical[..., 0], slash[..., 1:] = 40, 2**30
        one = torch.ones_like(pattern.num_slash)
        return VerticalSlash(slash, one, vertical, one.clone()), scores

    monkeypatch.setattr(ops, "search", near)
    with pytest.raises(SentinelError, match="needle dropped differs"):
        start(Ring(), 4)


def test_the_start_leaves_the_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    start(Ring(), 2)
    assert torch.equal(torch.get_rng_state(), before)

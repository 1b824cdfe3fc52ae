"""The sentinel's recomputation against the reference, which shares no code with it."""

import pytest
import torch

from mtraining_flex import recompute
from mtraining_flex.counters import StepCounter
from mtraining_flex.layout import LAYOUTS, build_layout
from mtraining_flex.pattern.types import pack_pattern
from mtraining_flex.reference import reference_attention
from mtraining_flex.ring import drive
from mtraining_flex.ring.schedule import sources
from mtraining_flex.ring.simulate import ThreadComm, run_ranks
from mtraining_flex.ring.step import EagerStep
from mtraining_flex.ring.triton_step import TritonStep
from tests.helpers import assert_close, random_pattern, random_qkv
from tests.rings import grad_like

G, S, D = 4, 64, 8
every_layout = pytest.mark.parametrize("name", LAYOUTS)


@every_layout
def test_positions_are_the_layouts(name: str) -> None:
    layout = build_layout(name, S, 4, G)
    for rank in range(4):
        assert torch.equal(recompute.positions(layout, rank), layout.positions(rank))


@pytest.mark.parametrize("name", ["striped", "zigzag"])
@pytest.mark.parametrize("diagonal", [True, False])
def test_rows_and_keys_are_the_references(
    name: str, diagonal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens in the order of the ranks; a few rows and keys at a time."""
    monkeypatch.setattr(recompute, "_ROWS", 5)
    monkeypatch.setattr(recompute, "_KEYS", 24)
    layout = build_layout(name, S, 4, G)
    pattern = random_pattern(
        2, 6, S, G, max_slash=7, max_vertical=12, seed=3, always_diagonal=diagonal
    )
    qkv = random_qkv(2, 6, 2, S, D, torch.float64, seed=5)
    dout, scale = grad_like(qkv[0]), 0.6
    q, k, v = (x.requires_grad_() for x in qkv)
    out, lse = reference_attention(q, k, v, pattern, G, scale)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    q, k, v, out, lse = (x.detach() for x in (q, k, v, out, lse))
    pos = torch.cat([recompute.positions(layout, rank) for rank in range(4)])
    rows = torch.tensor([1, 17, 18, 40, 63, 9])
    for b in range(2):
        for hk in range(2):
            kv = recompute.Sequence(k[b, hk, pos], v[b, hk, pos], pos)
            total_dk = total_dv = recompute.Result.zero(k[b, hk, rows])
            for h in range(3 * hk, 3 * hk + 3):
                head = recompute.Head.of(pattern, layout, b, h)
                found, found_lse = recompute.attend(
                    q[b, h, rows], rows, kv, head, scale
                )
                expected = out[b, h, rows]
                torch.testing.assert_close(found_lse, lse[b, h, rows])
                torch.testing.assert_close(found.value, expected)
                found = recompute.attend_backward_rows(
                    q[b, h, rows], rows, dout[b, h, rows], expected, kv, head, scale
                )
                torch.testing.assert_close(found.value, dq[b, h, rows])
                assert found.size2 >= found.value.square().sum()
                delta = (out[b, h] * dout[b, h]).sum(-1)
                more_dk, more_dv = recompute.attend_backward_keys(
                    k[b, hk, rows],
                    v[b, hk, rows],
                    rows,
                    recompute.Sequence(q[b, h, pos], dout[b, h, pos], pos),
                    lse[b, h, pos],
                    delta[pos],
                    head,
                    scale,
                )
                total_dk, total_dv = total_dk + more_dk, total_dv + more_dv
            assert_close(total_dk.value, dk[b, hk, rows], 1e-12)
            assert_close(total_dv.value, dv[b, hk, rows], 1e-12)


def test_entries_outside_the_sequence_are_no_entries() -> None:
    pattern = pack_pattern([[[0, 3]]], [[[5]]], max_slash=4, max_vertical=3)
    pattern.slash[0, 0, 2], pattern.vertical[0, 0, 1] = 99, -1
    pattern.num_slash[0, 0], pattern.num_vertical[0, 0] = 3, 2
    head = recompute.Head.of(pattern, build_layout("striped", 32, 1, G), 0, 0)
    assert head.slash.nonzero().flatten().tolist() == [0, 3]
    assert head.vertical.nonzero().flatten().tolist() == [5]


@every_layout
@pytest.mark.parametrize("step", [EagerStep, TritonStep])
@pytest.mark.parametrize(
    ("rotation", "inner"), [("ring", 0), ("allgather", 0), ("two_level", 2)]
)
def test_expected_blocks_are_those_counted(
    name: str, step: type, rotation: str, inner: int
) -> None:
    """Tables and lists alike, at every step, also with one pattern for all heads."""
    layout = build_layout(name, S, 4, G)
    patterns = [
        random_pattern(1, 6, S, G, max_slash=9, max_vertical=20, seed=seed)
        for seed in range(3)
    ]
    patterns.append(pack_pattern([[[0, 2, 5]]], [[[1, 9, 18]]]))
    patterns.append(pack_pattern([[[0, 2, 5]]], [[[]]]))

    def on_rank(comm: ThreadComm) -> list[tuple[list[int], list[int]]]:
        ring = drive.Ring(layout, comm, rotation, step(), 1.0, inner)
        order = sources(rotation, comm.rank, 4, inner)
        return [_counted(ring, order, pattern) for pattern in patterns]

    for pairs in run_ranks(4, on_rank):
        assert sum(sum(have) for have, _ in pairs) > 0
        for have, want in pairs:
            assert have == want


def _counted(ring: drive.Ring, order: list[int], pattern) -> tuple:
    """What the loop counts, without computing, and the closed form."""
    q = torch.zeros(1, 6, ring.layout.local_len, D)
    k = torch.zeros(1, 2, ring.layout.local_len, D)
    counter = StepCounter(q, 4)
    masks = drive._Masks(ring, q, pattern)
    steps = [(n, source) for n, source, _, _ in drive._rotate(ring, k, k)]
    for number, source in steps:
        if not ring.layout.is_causally_empty(ring.comm.rank, source):
            counter.count(number, ring.step.executed(masks.slash(source)))
    if pattern.vertical.shape[-1]:
        counter.count(-1, ring.step.executed(masks.vertical()))
    expected = recompute.expected_blocks(
        pattern, ring.layout, ring.comm.rank, order, (1, 6)
    )
    return counter.blocks.tolist(), expected.tolist()

"""All ranks of a ring together are one process: out, dq, dk, dv.

Rings are simulated (`ring.simulate`): the real loops, operators and layouts, a thread
for each rank. All is compared with `reference_attention` and its autograd in fp64.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtraining_flex.attention import SparseAttention, sparse_attention
from mtraining_flex.block_mask import slash_step
from mtraining_flex.config import Ring
from mtraining_flex.config import SparseAttention as SparseConfig
from mtraining_flex.counters import StepCounter, imbalance, recorder
from mtraining_flex.layout import LAYOUTS, Layout, build_layout
from mtraining_flex.pattern import find_pattern
from mtraining_flex.pattern.quality import density, executed_blocks
from mtraining_flex.pattern.types import (
    VerticalSlash,
    dense_pattern,
    pack_pattern,
    slash_bitmap,
)
from mtraining_flex.reference import allowed_pairs, reference_attention
from mtraining_flex.ring import ops
from mtraining_flex.ring.comm import comm_for
from mtraining_flex.ring.merge import merge, start
from mtraining_flex.ring.simulate import run_ranks
from tests.helpers import assert_close, fro_error, random_pattern, random_qkv
from tests.rings import (
    NAMES,
    Results,
    assert_equal_results,
    grad_like,
    reference_results,
    ring_results,
)

ROTATIONS = ("ring", "allgather")
G = 4  # granularity

pytestmark = pytest.mark.usefixtures("one_thread")
every_layout = pytest.mark.parametrize("name", LAYOUTS)


# One process

# Each value of each column meets each value of the others at least once or nearly so.
#  W, layout, rotation, (B, H, HK), D, cycles, diagonal
CASES = [
    (1, "striped", "ring", (1, 6, 2), 64, 5, True),
    (1, "contiguous", "allgather", (2, 2, 2), 128, 3, False),
    (1, "zigzag", "ring", (1, 6, 6), 64, 2, False),
    (2, "striped", "allgather", (2, 6, 6), 64, 3, False),
    (2, "contiguous", "ring", (1, 6, 1), 128, 4, True),
    (2, "zigzag", "ring", (2, 4, 2), 64, 2, True),
    (3, "striped", "ring", (2, 6, 3), 128, 2, False),
    (3, "contiguous", "allgather", (1, 6, 6), 64, 3, True),
    (3, "zigzag", "allgather", (1, 6, 2), 128, 1, True),
    (4, "striped", "ring", (1, 6, 6), 64, 4, True),
    (4, "contiguous", "ring", (2, 6, 2), 64, 2, False),
    (4, "zigzag", "allgather", (2, 6, 1), 64, 2, False),
    (4, "striped", "allgather", (1, 6, 1), 128, 1, True),
    (8, "striped", "ring", (1, 6, 2), 64, 2, False),
    (8, "contiguous", "ring", (1, 6, 3), 64, 1, True),
    (8, "zigzag", "ring", (2, 3, 1), 128, 1, True),
    (8, "striped", "allgather", (2, 6, 6), 64, 1, True),
]


@pytest.mark.parametrize(
    ("size", "name", "rotation", "heads", "dim", "cycles", "diagonal"), CASES
)
def test_all_ranks_together_are_one_process(
    size: int,
    name: str,
    rotation: str,
    heads: tuple[int, int, int],
    dim: int,
    cycles: int,
    diagonal: bool,
) -> None:
    """Also in rows without a key, which `diagonal=False` has: 0, exactly."""
    seq_len = cycles * size * G * (2 if name == "zigzag" else 1)
    layout = build_layout(name, seq_len, size, G)
    pattern = random_pattern(
        heads[0],
        heads[1],
        seq_len,
        G,
        max_slash=4,
        max_vertical=9,
        seed=size,
        always_diagonal=diagonal,
    )
    qkv = random_qkv(*heads, seq_len, dim, torch.float64, seed=size)
    dout = grad_like(qkv[0])
    actual = ring_results(qkv, dout, pattern, layout, rotation)
    assert_equal_results(actual, reference_results(qkv, dout, pattern, G), layout)


@every_layout
def test_one_pattern_stands_for_all_heads(name: str) -> None:
    layout = build_layout(name, 32, 2, G)
    qkv = random_qkv(2, 4, 2, 32, 8, torch.float64, seed=1)
    pattern, dout = pack_pattern([[[0, 2, 5]]], [[[1, 9, 18]]]), grad_like(qkv[0])
    actual = ring_results(qkv, dout, pattern, layout)
    assert_equal_results(actual, reference_results(qkv, dout, pattern, G), layout)


def test_scale_reaches_forward_and_backward() -> None:
    layout = build_layout("striped", 32, 2, G)
    qkv = random_qkv(1, 2, 1, 32, 8, torch.float64, seed=2)
    pattern, dout = pack_pattern([[[0, 3]]], [[[4]]]), grad_like(qkv[0])
    actual = ring_results(qkv, dout, pattern, layout, scale=0.9)
    assert_equal_results(actual, reference_results(qkv, dout, pattern, G, 0.9), layout)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_close(actual[0], reference_results(qkv, dout, pattern, G)[0], 1e-2)


def test_tensors_of_other_strides() -> None:
    """A model's q, k, v are token-major, and a gradient may be expanded."""
    layout = build_layout("striped", 32, 2, G)
    qkv = random_qkv(2, 4, 2, 32, 8, torch.float64, seed=3)
    strided = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv)
    pattern = random_pattern(2, 4, 32, G, max_slash=3, max_vertical=5, seed=1)
    dout = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(2, 4, 32, 8)
    actual = ring_results(strided, dout, pattern, layout)
    assert_equal_results(actual, reference_results(qkv, dout, pattern, G), layout)


@every_layout
@pytest.mark.parametrize("size", [1, 4])
def test_a_full_budget_is_dense_attention(name: str, size: int) -> None:
    """By `dense_pattern`, and by a search that may keep everything."""
    layout = build_layout(name, 64, size, G)
    qkv = random_qkv(2, 4, 2, 64, 16, torch.float64, seed=4)
    dout = grad_like(qkv[0])
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = out.detach(), *torch.autograd.grad(out, (q, k, v), dout)
    all_of_it = SparseConfig(
        granularity=G, vertical_p=1.0, slash_p=1.0, max_vertical=64, probe_rows=8
    )
    for pattern in (dense_pattern(16, "cpu"), find_pattern(q, k, all_of_it)):
        actual = ring_results(qkv, dout, pattern, layout)
        assert_equal_results(actual, expected, layout)


@every_layout
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ring_and_allgather_agree(name: str, size: int) -> None:
    layout = build_layout(name, 16 * size, size, 2 * G)
    qkv = random_qkv(1, 4, 2, 16 * size, 16, torch.float64, seed=5)
    dout = grad_like(qkv[0])
    pattern = random_pattern(
        1, 4, 16 * size, 2 * G, max_slash=3, max_vertical=6, seed=0
    )
    ring, gathered = (ring_results(qkv, dout, pattern, layout, x) for x in ROTATIONS)
    assert_equal_results(ring, gathered, layout, 1e-13)
    # The same steps in the same order: only dk and dv are summed in another.
    assert torch.equal(ring[0], gathered[0]) and torch.equal(ring[1], gathered[1])


def test_two_runs_agree_to_the_bit() -> None:
    layout = build_layout("striped", 64, 4, G)
    qkv = random_qkv(1, 4, 2, 64, 16, torch.bfloat16, seed=6)
    dout = grad_like(qkv[0])
    pattern = random_pattern(1, 4, 64, G, max_slash=5, max_vertical=9, seed=0)
    for rotation in ROTATIONS:
        one, two = (
            ring_results(qkv, dout, pattern, layout, rotation) for _ in range(2)
        )
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_gradcheck() -> None:
    pattern = pack_pattern([[[0, 2], [1]]], [[[1], [3]]])  # head 1 has empty rows
    inputs = random_qkv(1, 2, 1, 8, 2, torch.float64, seed=7)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, pattern, granularity=2)

    assert torch.autograd.gradcheck(attend, tuple(x.requires_grad_() for x in inputs))


# Low precision


def _bf16_errors(
    qkv: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    pattern: VerticalSlash,
    granularity: int,
    expected: Results,
) -> list[float]:
    """What plain bf16 PyTorch attention is off, for out, dq, dk, dv."""
    allowed = allowed_pairs(pattern, dout.shape[2], granularity)
    assert allowed.any(-1).all(), "SDPA has no answer in a row without a key"
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv)
    assert q.dtype == torch.bfloat16
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    plain = out, *torch.autograd.grad(out, (q, k, v), dout)
    return [fro_error(a, b) for a, b in zip(plain, expected, strict=True)]


def _assert_within_bf16(
    qkv: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    pattern: VerticalSlash,
    granularity: int,
    actual: Results,
) -> None:
    """At most twice plain bf16's own error, and the same direction."""
    expected = reference_results(qkv, dout, pattern, granularity)
    bounds = _bf16_errors(qkv, dout, pattern, granularity, expected)
    for name, a, b, bound in zip(NAMES, actual, expected, bounds, strict=True):
        assert 1e-4 < bound < 0.05, (name, bound)
        assert a.dtype == torch.bfloat16
        assert_close(a, b, 2 * bound)
        cosine = F.cosine_similarity(a.double().flatten(), b.flatten(), dim=0)
        assert cosine >= 0.9999, (name, cosine)


@every_layout
@pytest.mark.parametrize(("size", "heads"), [(2, (8, 1)), (4, (8, 2)), (8, (8, 1))])
def test_b15_bf16_is_within_twice_of_plain_bf16(
    name: str, size: int, heads: tuple[int, int]
) -> None:
    """head_dim 128, GQA 8:1 and 4:1."""
    seq_len = 256
    layout = build_layout(name, seq_len, size, 2 * G)
    qkv = random_qkv(1, *heads, seq_len, 128, torch.bfloat16, seed=8)
    dout = grad_like(qkv[0])
    pattern = random_pattern(
        1, 8, seq_len, 2 * G, max_slash=9, max_vertical=24, seed=size
    )
    actual = ring_results(qkv, dout, pattern, layout)
    _assert_within_bf16(qkv, dout, pattern, 2 * G, actual)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_b16_keys_of_another_rank_get_their_gradient(rotation: str) -> None:
    """Only rank 1 has values, only rank 0 asks: dK and dV of rank 1 come from afar."""
    layout = build_layout("striped", 64, 2, G)
    here, there = layout.positions(0), layout.positions(1)
    q, k, v = random_qkv(1, 4, 2, 64, 16, torch.float64, seed=9)
    v[:, :, here] = 0
    dout = grad_like(q)
    dout[:, :, there] = 0
    for pattern in (
        dense_pattern(16, "cpu"),
        random_pattern(1, 4, 64, G, max_slash=9, max_vertical=9, seed=5),
    ):
        actual = ring_results((q, k, v), dout, pattern, layout, rotation)
        expected = reference_results((q, k, v), dout, pattern, G)
        for a, b in zip(actual[2:], expected[2:], strict=True):
            assert b[:, :, there].norm() > 0.1
            assert_close(a[:, :, there], b[:, :, there], 1e-9)
            assert_close(a[:, :, here], b[:, :, here], 1e-9)


def test_b17_the_error_does_not_grow_with_the_ring() -> None:
    seq_len, g = 2048, 32
    pattern = random_pattern(1, 2, seq_len, g, max_slash=24, max_vertical=64, seed=0)
    qkv = random_qkv(1, 2, 1, seq_len, 64, torch.bfloat16, seed=10)
    dout = grad_like(qkv[0])
    expected = reference_results(qkv, dout, pattern, g)
    errors = {}
    for size in (1, 2, 4, 8, 16):
        layout = build_layout("striped", seq_len, size, g)
        actual = ring_results(qkv, dout, pattern, layout)
        errors[size] = [fro_error(a, b) for a, b in zip(actual, expected, strict=True)]
    for small, large in zip(errors[2], errors[16], strict=True):
        assert 1e-4 < large < 1.3 * small, errors


def test_b17_bf16_halves_merge_without_growth() -> None:
    """A kernel's out is bf16: rounded once for each part, not once for each merge."""
    q, k, v = random_qkv(1, 2, 2, 512, 64, torch.float64, seed=11)
    logits = q @ k.mT / 8
    expected = logits.softmax(-1) @ v
    errors = {}
    for parts in (2, 4, 8, 16):
        out = lse = None
        pieces = zip(logits.chunk(parts, -1), v.chunk(parts, 2), strict=True)
        for piece, values in pieces:
            step_out = (piece.softmax(-1) @ values).bfloat16()
            step_lse = piece.logsumexp(-1).float()
            if out is None or lse is None:
                out, lse = start(step_out, step_lse, torch.float32)
            else:
                out, lse = merge(out, lse, step_out, step_lse)
        assert out is not None and out.dtype == torch.float32
        errors[parts] = fro_error(out, expected)
    assert 1e-5 < errors[16] < 1.3 * errors[2], errors


def test_b17_thirty_six_layers() -> None:
    """Rings of 2 and 16 drift equally far from fp64 through a stack of attentions."""
    seq_len, layers = 64, 36
    pattern = random_pattern(1, 2, seq_len, G, max_slash=8, max_vertical=16, seed=0)
    x0, *_ = random_qkv(1, 2, 2, seq_len, 32, torch.bfloat16, seed=12)

    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:])

    exact = x0.double()
    for _ in range(layers):
        y = norm(exact)
        exact = exact + reference_attention(y, y, y, pattern, G)[0]
    errors = {}
    for size in (2, 16):
        layout = build_layout("striped", seq_len, size, G)

        def stack(comm: Any, layout: Layout = layout) -> Tensor:
            x = x0[:, :, layout.positions(comm.rank)]
            for _ in range(layers):
                y = norm(x)
                # The steps and merges of a ring, to the bit, with fewer meetings.
                x = x + sparse_attention(
                    y,
                    y,
                    y,
                    pattern,
                    granularity=G,
                    layout=layout,
                    mesh=comm,
                    rotation="allgather",
                )
            return x

        parts = run_ranks(size, stack)
        order = torch.cat([layout.positions(r) for r in range(size)]).argsort()
        errors[size] = fro_error(torch.cat(parts, 2)[:, :, order], exact)
    assert 1e-4 < errors[16] < 1.3 * errors[2], errors


# Merging


@pytest.mark.parametrize("gap", [0.0, 1.0, 80.0, 200.0, -200.0])
@pytest.mark.parametrize("base", [0.0, 500.0, -500.0])
def test_b18_large_logits_merge_without_overflow(gap: float, base: float) -> None:
    out_a, out_b = torch.randn(2, 1, 2, 8, 4)
    lse_a = torch.full((1, 2, 8), base) + torch.randn(1, 2, 8)
    lse_b = lse_a + gap
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    a, b = lse_a.double(), lse_b.double()
    expected_lse = torch.logaddexp(a, b)
    weights = (a - expected_lse).exp()[..., None], (b - expected_lse).exp()[..., None]
    expected = weights[0] * out_a.double() + weights[1] * out_b.double()
    assert out.isfinite().all() and lse.isfinite().all()
    assert out.dtype == lse.dtype == torch.float32
    # At 500 an ulp of lse is 3e-5, and a weight is off by as much.
    assert_close(out, expected, 1e-6 if base == 0 else 1e-4)
    assert_close(lse, expected_lse, 1e-6)


def test_merging_is_commutative_and_associative() -> None:
    parts = [
        (torch.randn(1, 2, 6, 4).double(), torch.randn(1, 2, 6).double() * 5)
        for _ in range(3)
    ]
    a, b, c = parts
    left = merge(*merge(*a, *b), *c)
    right = merge(*a, *merge(*b, *c))
    swapped = merge(*merge(*c, *a), *b)
    for other in (right, swapped):
        assert_close(left[0], other[0], 1e-14)
        assert_close(left[1], other[1], 1e-14)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_b20_a_part_without_keys_is_neutral(garbage: float) -> None:
    """Whatever a kernel leaves in rows whose lse is -inf."""
    out, lse = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6)
    nothing = torch.full_like(out, garbage), torch.full_like(lse, -torch.inf)
    for merged in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert_close(merged[1], lse, 1e-6)
    for both in (merge(*nothing, *nothing), start(*nothing, torch.float32)):
        assert (both[0] == 0).all() and (both[1] == -torch.inf).all()


# Rows without keys


@every_layout
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_b20_rows_without_keys_in_some_steps_and_in_all(
    name: str, rotation: str
) -> None:
    seq_len, size = 64, 4
    layout = build_layout(name, seq_len, size, G)
    slashes = [
        [0],  # striped: nothing in 3 of 4 steps
        [0, 4, 8],  # likewise
        [],  # nothing at all
        [3],  # nothing in the first 3 blocks
        [],  # nothing before its column
        list(range(16)),
    ]
    pattern = pack_pattern([slashes], [[[], [], [], [], [41], []]])
    inputs = random_qkv(1, 6, 2, seq_len, 16, torch.float64, seed=13)
    dout = grad_like(inputs[0])
    expected = reference_results(inputs, dout, pattern, G)
    empty = ~allowed_pairs(pattern, seq_len, G).any(-1)  # [1, 6, S]
    assert empty[0].sum(-1).tolist() == [0, 0, 64, 12, 41, 0]
    actual = ring_results(inputs, dout, pattern, layout, rotation)
    assert_equal_results(actual, expected, layout)
    assert not actual[0][empty].any() and not actual[1][empty].any()

    def forward(comm: Any) -> tuple[Tensor, Tensor]:
        here = layout.positions(comm.rank)
        q, k, v = (x[:, :, here] for x in inputs)
        return ops.ring_attention(
            q,
            k,
            v,
            *pattern.tensors(),
            torch.tensor(-1),
            comm.name,
            name,
            G,
            *Ring(rotation=rotation).transport,
            "eager",
            0.25,
        )

    _, expected_lse = reference_attention(*inputs, pattern, G)
    for rank, (out, lse) in enumerate(run_ranks(size, forward)):
        here = layout.positions(rank)
        assert_close(out, expected[0][:, :, here], 1e-12)
        assert_close(lse, expected_lse[:, :, here], 1e-12)  # and -inf where it is
        assert (lse[empty[:, :, here]] == -torch.inf).all()
        assert (out[empty[:, :, here]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_kept_anywhere(dtype: torch.dtype) -> None:
    layout = build_layout("striped", 32, 2, G)
    qkv = random_qkv(1, 2, 1, 32, 8, dtype, seed=14)
    pattern = pack_pattern([[[], []]], [[[], []]], max_slash=3, max_vertical=5)
    for rotation in ROTATIONS:
        results = ring_results(qkv, grad_like(qkv[0]), pattern, layout, rotation)
        assert all((result == 0).all() for result in results)


@pytest.mark.parametrize("size", [1, 4])
def test_b21_masked_rows_leave_weight_gradients_finite(size: int) -> None:
    """Three projections before a pattern with rows that see nothing."""
    seq_len, dim = 64, 8
    layout = build_layout("striped", seq_len, size, G)
    pattern = pack_pattern([[[3], []]], [[[], [50]]])
    x = torch.randn(1, seq_len, dim, dtype=torch.float64)
    weights = torch.randn(3, dim, 2 * dim, dtype=torch.float64)
    dout = torch.randn(1, 2, seq_len, dim, dtype=torch.float64)

    def grad(attend: Callable[..., Tensor], here: Tensor) -> Tensor:
        w = weights.clone().requires_grad_()
        qkv = x[:, here] @ w[:, None]  # [3, 1, S, 2 dim]
        q, k, v = qkv.unflatten(-1, (2, dim)).transpose(2, 3).unbind(0)
        return torch.autograd.grad(attend(q, k, v), w, dout[:, :, here])[0]

    def ring(comm: Any) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sparse_attention(q, k, v, pattern, granularity=G, mesh=comm)

        return grad(attend, layout.positions(comm.rank))

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference_attention(q, k, v, pattern, G)[0]

    total = torch.stack(run_ranks(size, ring)).sum(0)
    assert total.isfinite().all()
    assert_close(total, grad(reference, torch.arange(seq_len)), 1e-9)


# Causality


@every_layout
@pytest.mark.parametrize("size", [1, 4])
def test_tokens_change_nothing_before_them(name: str, size: int) -> None:
    """With the pattern frozen: to the bit, and no gradient goes to the future."""
    seq_len = 64
    layout = build_layout(name, seq_len, size, G)
    # Some heads without the diagonal block: columns show a causality of their own.
    pattern = random_pattern(
        1,
        6,
        seq_len,
        G,
        max_slash=5,
        max_vertical=30,
        seed=2,
        always_diagonal=False,
    )
    qkv = random_qkv(1, 6, 2, seq_len, 8, torch.float32, seed=15)
    dout = grad_like(qkv[0])
    out, *_ = ring_results(qkv, dout, pattern, layout)
    for i in (0, 3, 7, 8, 37, 38, 55, 62):
        later = (torch.arange(seq_len) > i)[:, None]
        changed = tuple(torch.where(later, torch.randn_like(x), x) for x in qkv)
        past = torch.where(later, 0.0, dout)
        new, *grads = ring_results(changed, past, pattern, layout)
        assert torch.equal(new[:, :, : i + 1], out[:, :, : i + 1])
        assert not torch.equal(new[:, :, i + 1 :], out[:, :, i + 1 :])
        for grad in grads:
            assert not grad[:, :, i + 1 :].any()
            assert grad[:, :, : i + 1].any()


@every_layout
def test_a_nan_stays_where_it_is_seen(name: str) -> None:
    """A key that is NaN, first of its rank's, does not spread with the columns."""
    layout = build_layout(name, 64, 4, G)
    pattern = random_pattern(1, 6, 64, G, max_slash=5, max_vertical=9, seed=2)
    q, k, v = random_qkv(1, 6, 2, 64, 8, torch.float32, seed=15)
    bad = int(layout.positions(1)[0])
    poisoned = k.clone()
    poisoned[:, :, bad] = torch.nan
    dout = grad_like(q)
    out, new = (
        ring_results((q, x, v), dout, pattern, layout)[0] for x in (k, poisoned)
    )
    assert torch.equal(new[:, :, :bad], out[:, :, :bad])
    assert new[:, :, bad].isnan().any()


# What is counted


def _executed_by_rank(
    monkeypatch: pytest.MonkeyPatch, pattern: VerticalSlash, layout: Layout
) -> Tensor:
    """Blocks that a real ring reports per rank and step: int64 [W, W + 1].

    The recorder belongs to the process, and here that is all ranks: each calls its
    layer by its rank.
    """
    counted: dict[int, Tensor] = {}

    def add(layer: int, name: str, value: Tensor) -> None:
        if name == "executed":
            counted[layer] = value

    monkeypatch.setattr(recorder, "add", add)
    q, k, v = random_qkv(1, 6, 2, layout.seq_len, 4, torch.float32, seed=0)

    def call(comm: Any) -> None:
        here = layout.positions(comm.rank)
        ops.ring_attention(
            q[:, :, here],
            k[:, :, here],
            v[:, :, here],
            *pattern.tensors(),
            torch.tensor(comm.rank),
            comm.name,
            layout.name,
            layout.granularity,
            *Ring().transport,
            "eager",
            0.5,
        )

    with recorder.recording(True):
        run_ranks(layout.cp_size, call)
    monkeypatch.undo()
    return torch.stack([counted[rank] for rank in range(layout.cp_size)])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("blocks", [2, 4])
def test_imbalance_of_dense_attention(
    size: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed forms, in executed blocks, where the diagonal block counts as a whole.

    In pairs they are (2 W - 1) / W, 1 and 1 + (W - 1) / NB (spec section 1.4), which
    these approach. Worker and step agree in each layout: one rank is the slowest, or
    as slow as any, in all of the steps.
    """
    num_blocks = size * blocks
    closed = {
        "contiguous": ((2 * size - 1) * blocks + 1) / (num_blocks + 1),
        "zigzag": 1.0,
        "striped": 1 + (size - 1) / (num_blocks + 1),
    }
    for name, expected in closed.items():
        layout = build_layout(name, num_blocks * G, size, G)
        work = _executed_by_rank(monkeypatch, dense_pattern(num_blocks, "cpu"), layout)
        assert work.sum() == 6 * num_blocks * (num_blocks + 1) // 2
        assert (work[:, -1] == 0).all(), "a dense pattern has no vertical step"
        assert imbalance(work.double()) == pytest.approx((expected, expected), rel=1e-9)


@every_layout
@pytest.mark.parametrize("size", [2, 4])
def test_the_ring_executes_the_blocks_of_the_pattern(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = build_layout(name, 64, size, G)
    pattern = random_pattern(1, 6, 64, G, max_slash=4, max_vertical=9, seed=1)
    work = _executed_by_rank(monkeypatch, pattern, layout)
    assert work[:, :-1].sum() == executed_blocks(pattern, 16).sum()
    assert (work[:, -1] > 0).all()
    assert imbalance(work.double())[0] >= 1


def test_imbalance_is_maximum_over_mean() -> None:
    work = torch.tensor([[4.0, 0.0], [2.0, 2.0]])
    worker, step = imbalance(work)
    assert worker == 1.0  # 4 and 4
    assert step == (4 + 2) / 4  # the slowest of each step
    worker, _ = imbalance(torch.tensor([[6.0], [2.0]]))
    assert worker == 6 / 4
    assert imbalance(torch.zeros(3, 2)) == (1.0, 1.0)


def test_a_counter_multiplies_what_one_head_stands_for() -> None:
    layout = build_layout("striped", 32, 1, G)
    pattern = pack_pattern([[[0, 2]]], [[[]]])
    bitmap = slash_bitmap(pattern, 8)
    counter = StepCounter(torch.empty(2, 3, 32, 4), 1)
    counter.count(0, slash_step(pattern, bitmap, layout, 0, 0, (2, 3)).lists.executed())
    assert counter.blocks.tolist() == [2 * 3 * (8 + 6), 0]


@pytest.fixture
def clean_recorder() -> Any:
    recorder.clear()
    yield recorder
    recorder.clear()


def test_b33_one_rank_with_sparsity_on_stays_sparse(clean_recorder: Any) -> None:
    seq_len = 128
    config = SparseConfig(
        granularity=G, budget="top_k", num_vertical=4, num_slash=5, probe_rows=8
    )
    attention = SparseAttention(layer_id=7)
    attention.configure(config, Ring(), [build_layout("striped", seq_len, 1, G)], None)
    q, k, v = random_qkv(2, 4, 2, seq_len, 8, torch.float32, seed=16)
    with recorder.recording(False):
        attention(q, k, v)
    assert recorder.summary(comm_for(None)) == {}, "recorded although inactive"
    with recorder.recording(True):
        attention(q, k, v)
    metrics = recorder.summary(comm_for(None))
    pattern = find_pattern(q, k, config)
    causal = 2 * 4 * 32 * 33 / 2
    executed = executed_blocks(pattern, 32).sum().item()
    assert metrics["sparse/block_density"] == pytest.approx(executed / causal)
    assert 0 < metrics["sparse/block_density"] < 0.4
    kept = density(pattern, seq_len, G).mean().item()
    assert metrics["sparse/density"] == pytest.approx(kept)
    assert 0.05 < metrics["sparse/recall"] < 1
    assert metrics["sparse/vertical_count"] == 4
    assert metrics["sparse/slash_count"] == 5
    assert metrics["ring/worker_imbalance"] == metrics["ring/step_imbalance"] == 1.0
    for name in ("sparse/density", "sparse/block_density", "ring/worker_imbalance"):
        assert metrics[f"{name}/layer_7"] == metrics[name]
    assert recorder.summary(comm_for(None)) == {}, "a summary forgets"


def test_two_calls_of_a_layer_are_averaged(clean_recorder: Any) -> None:
    """Gradient accumulation: a density is of one call, not of their sum."""
    q, k, v = random_qkv(1, 2, 1, 32, 8, torch.float32, seed=17)
    with recorder.recording(True):
        for _ in range(3):
            sparse_attention(q, k, v, dense_pattern(8, "cpu"), granularity=G)
    metrics = recorder.summary(comm_for(None))
    assert metrics["sparse/block_density"] == pytest.approx(1.0)
    assert metrics["sparse/density"] == pytest.approx(1.0)


# The operators


def _operands(dtype: torch.dtype, token_major: bool) -> tuple[Any, ...]:
    q, k, v = random_qkv(2, 4, 2, 16, 8, dtype, seed=18)
    if token_major:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    pattern = random_pattern(2, 4, 16, G, max_slash=3, max_vertical=5, seed=0)
    tail = (torch.tensor(0), "local", "striped", G, *Ring().transport, "eager", 0.25)
    return (*(x.requires_grad_() for x in (q, k, v)), *pattern.tensors(), *tail)


OPCHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_opcheck_of_the_ring(dtype: torch.dtype, token_major: bool) -> None:
    args = _operands(dtype, token_major)
    torch.library.opcheck(ops.ring_attention, args, test_utils=OPCHECKS)
    out, lse = ops.ring_attention(*args)
    assert out.requires_grad and not lse.requires_grad
    saved = [x.detach() for x in (*args[:3], out, lse)]
    backward = (torch.randn_like(saved[3]), *saved, *args[3:])
    torch.library.opcheck(
        ops.ring_attention_backward,
        backward,
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_opcheck_of_the_search(dtype: torch.dtype) -> None:
    q, k, _ = random_qkv(2, 4, 2, 32, 8, dtype, seed=19)
    attention = SparseAttention()
    config = SparseConfig(granularity=G, probe_rows=8, max_vertical=6, max_slash=4)
    attention.configure(config, Ring(), [build_layout("striped", 32, 1, G)], None)
    tail = ("local", "striped", G, 6, 4, 0, 1, 8, 0.25)
    args = (q, k, *attention.budget, torch.tensor(0), *tail)
    torch.library.opcheck(ops.search_pattern, args, test_utils=OPCHECKS)
    found = VerticalSlash(*ops.search_pattern(*args))
    expected = find_pattern(q, k, config, scale=0.25)
    for a, b in zip(found.tensors(), expected.tensors(), strict=True):
        assert torch.equal(a, b)


def test_the_operators_are_one_node_each_in_a_compiled_graph() -> None:
    """`fullgraph`, and the numbers stay: the fake operators promise what comes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = SparseAttention()
            config = SparseConfig(granularity=G, probe_rows=8, max_vertical=6)
            layout = build_layout("striped", 32, 1, G)
            self.attention.configure(config, Ring(), [layout], None)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.transpose(1, 2) for y in (2 * x, x + 1, x * x))
            return self.attention(q, k, v).transpose(1, 2).flatten(2)

    block = Block()
    x = torch.randn(2, 32, 4, 8, requires_grad=True)
    expected = block(x)
    grad = torch.randn_like(expected)
    (expected_dx,) = torch.autograd.grad(expected, x, grad)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    actual = compiled(x)
    (actual_dx,) = torch.autograd.grad(actual, x, grad)
    assert_close(actual, expected, 1e-6)
    assert_close(actual_dx, expected_dx, 1e-6)

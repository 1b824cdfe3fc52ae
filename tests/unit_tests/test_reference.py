"""The oracle itself, against definitions even plainer than its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtraining_flex.pattern.types import (
    SENTINEL,
    VerticalSlash,
    dense_pattern,
    pack_pattern,
)
from mtraining_flex.reference import (
    allowed_pairs,
    reference_attention,
    reference_pattern,
)
from tests.helpers import (
    assert_close,
    kept_entries,
    random_pattern,
    random_qkv,
    small_config,
)


def _planted(seq_len: int, head_dim: int, columns: dict[int, float]) -> Tensor:
    """q and k `[1, 1, S, D]`, in which each query sees `columns` with these logits."""
    q = torch.zeros(1, 1, seq_len, head_dim, dtype=torch.float64)
    k = torch.zeros_like(q)
    q[..., 0] = 1.0
    for column, logit in columns.items():
        k[0, 0, column, 0] = logit
    return torch.stack([q, k])


# allowed_pairs


@pytest.mark.parametrize("granularity", [4, 16])
def test_allowed_pairs_is_the_definition(granularity: int) -> None:
    seq_len = 64
    pattern = random_pattern(
        2, 3, seq_len, granularity, max_slash=5, max_vertical=9, seed=granularity
    )
    actual = allowed_pairs(pattern, seq_len, granularity)
    for b in range(2):
        for h in range(3):
            slash = set(kept_entries(pattern, "slash", b, h))
            vertical = set(kept_entries(pattern, "vertical", b, h))
            expected = [
                [
                    k <= q
                    and (q // granularity - k // granularity in slash)
                    or (k <= q and k in vertical)
                    for k in range(seq_len)
                ]
                for q in range(seq_len)
            ]
            assert actual[b, h].tolist() == expected


def test_entries_behind_the_counts_are_not_read() -> None:
    clean = pack_pattern([[[0]]], [[[3]]], max_slash=4, max_vertical=4)
    dirty = VerticalSlash(
        clean.slash.masked_fill(clean.slash == SENTINEL, 1),
        clean.num_slash,
        clean.vertical.masked_fill(clean.vertical == SENTINEL, 5),
        clean.num_vertical,
    )
    assert torch.equal(allowed_pairs(clean, 16, 4), allowed_pairs(dirty, 16, 4))


# reference_attention


@pytest.mark.parametrize("scale", [None, 0.3])
def test_full_budget_is_causal_sdpa(scale: float | None) -> None:
    inputs = random_qkv(2, 4, 2, 48, 8, torch.float64, seed=1)
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    out, lse = reference_attention(q, k, v, dense_pattern(6, "cpu"), 8, scale)
    q2, k2, v2 = (x.clone().requires_grad_() for x in inputs)
    expected = F.scaled_dot_product_attention(
        q2, k2, v2, is_causal=True, scale=scale, enable_gqa=True
    )
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    expected_grads = torch.autograd.grad(expected, (q2, k2, v2), grad)
    assert out.dtype == lse.dtype == torch.float64
    assert_close(out, expected, 1e-12)
    for actual, wanted in zip(grads, expected_grads, strict=True):
        assert_close(actual, wanted, 1e-12)


def test_lse_is_the_natural_log_of_the_kept_sum() -> None:
    q, k, v = random_qkv(1, 2, 1, 32, 4, torch.float64, seed=2)
    pattern = random_pattern(1, 2, 32, 8, max_slash=3, max_vertical=4, seed=0)
    _, lse = reference_attention(q, k, v, pattern, 8)
    weights = (q @ k.mT / 2).exp() * allowed_pairs(pattern, 32, 8)
    assert_close(lse, weights.sum(-1).log(), 1e-12)


def test_low_precision_is_computed_and_returned_in_fp32() -> None:
    q, k, v = random_qkv(1, 2, 1, 32, 8, torch.bfloat16, seed=3)
    pattern = dense_pattern(4, "cpu")
    out, lse = reference_attention(q, k, v, pattern, 8)
    exact, _ = reference_attention(q.double(), k.double(), v.double(), pattern, 8)
    assert out.dtype == lse.dtype == torch.float32
    assert_close(out, exact, 1e-6)


def test_one_pattern_stands_for_all_heads() -> None:
    q, k, v = random_qkv(2, 4, 2, 32, 4, torch.float64, seed=4)
    one = pack_pattern([[[0, 2]]], [[[1, 9]]])
    each = pack_pattern([[[0, 2]] * 4] * 2, [[[1, 9]] * 4] * 2)
    for a, b in zip(
        reference_attention(q, k, v, one, 8),
        reference_attention(q, k, v, each, 8),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_rows_without_a_key_are_zero_and_send_no_gradient() -> None:
    inputs = random_qkv(1, 3, 1, 32, 4, torch.float64, seed=5)
    q, k, v = (x.requires_grad_() for x in inputs)
    # Head 0 keeps nothing; head 1 nothing before its column; head 2 all.
    pattern = pack_pattern([[[], [], [0, 1, 2, 3]]], [[[], [10], []]])
    out, lse = reference_attention(q, k, v, pattern, 8)
    empty = lse == -torch.inf
    assert empty[0].sum(-1).tolist() == [32, 10, 0]
    assert (out[empty] == 0).all()
    loss = (out * torch.randn_like(out)).sum() + lse[~empty].sum()
    grads = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][empty].any()
    assert grads[0][~empty].abs().sum() > 0
    # Nor do such rows send anything to the keys.
    alone = torch.autograd.grad(out[empty].sum(), (q, k, v))
    assert not any(grad.any() for grad in alone)


def test_gradcheck() -> None:
    q, k, v = random_qkv(1, 2, 1, 8, 2, torch.float64, seed=6)
    pattern = pack_pattern([[[0, 2], [1]]], [[[1], [3]]])  # head 1 has empty rows
    filled = reference_attention(q, k, v, pattern, 2)[1] > -torch.inf

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = reference_attention(q, k, v, pattern, 2)
        return out, lse[filled]

    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(attend, inputs)


def test_tokens_change_nothing_before_them() -> None:
    q, k, v = random_qkv(1, 6, 2, 64, 4, torch.float64, seed=7)
    pattern = random_pattern(1, 6, 64, 8, max_slash=4, max_vertical=8, seed=2)
    out, lse = reference_attention(q, k, v, pattern, 8)
    for i in (0, 7, 8, 37, 62):
        later = (torch.arange(64) > i)[:, None]
        q2, k2, v2 = (torch.where(later, torch.randn_like(x), x) for x in (q, k, v))
        new_out, new_lse = reference_attention(q2, k2, v2, pattern, 8)
        assert torch.equal(new_out[:, :, : i + 1], out[:, :, : i + 1])
        assert torch.equal(new_lse[:, :, : i + 1], lse[:, :, : i + 1])
        assert not torch.equal(new_out[:, :, i + 1 :], out[:, :, i + 1 :])


# reference_pattern


def test_planted_columns_are_found() -> None:
    q, k = _planted(64, 4, {5: 20.0, 23: 19.0, 40: 18.0})
    pattern = reference_pattern(
        q, k, small_config(budget="top_k", num_vertical=3, num_slash=1), scale=1.0
    )
    assert kept_entries(pattern, "vertical") == [5, 23, 40]
    assert kept_entries(pattern, "slash") == [0]


def test_planted_diagonals_are_found() -> None:
    """Each query matches the key 20 tokens before it, and no other."""
    seq_len, distance = 64, 20
    q = torch.zeros(1, 1, seq_len, seq_len, dtype=torch.float64)
    k = torch.eye(seq_len, dtype=torch.float64)[None, None] * 30
    for row in range(distance, seq_len):
        q[0, 0, row, row - distance] = 1.0
    # 20 = 2 * 8 + 4: half of the mass in offset 2, half in offset 3.
    config = small_config(budget="top_k", num_vertical=1, num_slash=3)
    pattern = reference_pattern(q, k, config, scale=1.0)
    assert kept_entries(pattern, "slash") == [0, 2, 3]
    # The mass of the two together is nearly all: p = 0.9 needs both, 0.4 only one, and
    # of equals the nearer.
    for p, expected in ((0.9, [0, 2, 3]), (0.4, [0, 2])):
        pattern = reference_pattern(q, k, small_config(slash_p=p), scale=1.0)
        assert kept_entries(pattern, "slash") == expected


def test_slash_shares_are_the_rows_of_a_diagonal() -> None:
    """The share of an offset is the share of a token diagonal's pairs in it."""
    g, seq_len = 8, 64
    for distance in (0, 3, 8, 13):
        offsets = [row // g - (row - distance) // g for row in range(2 * g, 3 * g)]
        near = offsets.count(distance // g) / g
        assert near == 1 - (distance % g) / g
    # One row that sees one key, at distance 13 = 8 + 5: 3/8 in offset 1, 5/8 in 2.
    q, k = _planted(seq_len, 4, {seq_len - 14: 60.0})
    config = small_config(probe_rows=1, local_window=1, slash_p=0.6)
    assert kept_entries(reference_pattern(q, k, config, scale=1.0), "slash") == [0, 2]
    config = small_config(probe_rows=1, local_window=1, slash_p=0.7)
    assert kept_entries(reference_pattern(q, k, config, scale=1.0), "slash") == [
        0,
        1,
        2,
    ]


def test_mass_beyond_the_last_offset_stays_in_it() -> None:
    q, k = _planted(64, 4, {0: 60.0})  # from the last row: distance 63 = 7 * 8 + 7
    config = small_config(probe_rows=1, slash_p=0.5)  # 1/8 in offset 7 would not do
    assert kept_entries(reference_pattern(q, k, config, scale=1.0), "slash") == [0, 7]
    config = small_config(probe_rows=1, slash_p=0.99, max_slash=8)  # and 7 holds all
    assert kept_entries(reference_pattern(q, k, config, scale=1.0), "slash") == [0, 7]


def test_top_p_includes_the_entry_that_crosses() -> None:
    # One column of mass 0.93 on 64 tokens: e^x / (e^x + 63) at the last row.
    logit = torch.tensor(0.93 / 0.07 * 63, dtype=torch.float64).log().item()
    q, k = _planted(64, 4, {17: logit})
    config = small_config(probe_rows=1, vertical_p=0.9)
    assert kept_entries(reference_pattern(q, k, config, scale=1.0), "vertical") == [17]
    config = small_config(probe_rows=1, vertical_p=0.931)
    # 0.07 / 63 = 0.0011 each: one more entry crosses, and of equals the lowest.
    assert kept_entries(reference_pattern(q, k, config, scale=1.0), "vertical") == [
        0,
        17,
    ]


def test_a_uniform_head_fills_the_cap_from_the_lowest_index() -> None:
    q, k = _planted(64, 4, {})
    pattern = reference_pattern(q, k, small_config(probe_rows=1), scale=1.0)
    assert kept_entries(pattern, "vertical") == list(range(12))


def test_p_one_keeps_all_up_to_the_cap() -> None:
    q, k = _planted(64, 4, {30: 60.0})  # all mass on one column
    config = small_config(vertical_p=1.0, slash_p=1.0, probe_rows=1)
    pattern = reference_pattern(q, k, config, scale=1.0)
    assert kept_entries(pattern, "vertical") == [*range(11), 30]
    assert len(kept_entries(pattern, "slash")) == 6
    config = small_config(vertical_p=1.0, slash_p=1.0, max_vertical=99, max_slash=99)
    pattern = reference_pattern(q, k, config, scale=1.0)
    assert kept_entries(pattern, "vertical") == list(range(64))
    assert kept_entries(pattern, "slash") == list(range(8))
    assert pattern.vertical.shape == (1, 1, 64) and pattern.slash.shape == (1, 1, 8)


@pytest.mark.parametrize("budget", ["top_p", "top_k"])
def test_forced_entries_come_first(budget: str) -> None:
    q, k = _planted(64, 4, {30: 60.0})
    config = small_config(
        budget=budget, sink=3, local_window=2, num_vertical=4, num_slash=2
    )
    pattern = reference_pattern(q, k, config, scale=1.0)
    assert kept_entries(pattern, "vertical") == [0, 1, 2, 30]
    assert kept_entries(pattern, "slash")[:2] == [0, 1]
    if budget == "top_k":
        assert kept_entries(pattern, "slash") == [0, 1]


def test_more_forced_entries_than_the_count_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sink \(3\).*num_vertical \(2\)"):
        small_config(budget="top_k", sink=3, num_vertical=2, num_slash=1)


def test_a_dense_pattern_keeps_every_block() -> None:
    q, k, _ = random_qkv(1, 2, 1, 64, 4, torch.float64, seed=8)
    pattern = reference_pattern(q, k, small_config(pattern="dense"))
    assert allowed_pairs(pattern, 64, 8).sum() == 64 * 65 // 2


def test_each_head_is_searched_with_its_kv_head() -> None:
    q, k, _ = random_qkv(2, 4, 2, 64, 4, torch.float64, seed=9)
    together = reference_pattern(q, k, small_config())
    for b in range(2):
        for h in range(4):
            alone = reference_pattern(
                q[b : b + 1, h : h + 1],
                k[b : b + 1, h // 2 : h // 2 + 1],
                small_config(),
            )
            for name in ("vertical", "slash"):
                assert kept_entries(alone, name) == kept_entries(together, name, b, h)

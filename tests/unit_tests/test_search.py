"""The search finds what the oracle finds, to the bit, on any number of ranks."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtraining_flex.config import SparseAttention
from mtraining_flex.layout import LAYOUTS, build_layout
from mtraining_flex.pattern import find_pattern
from mtraining_flex.pattern.budget import layer_budget, list_widths
from mtraining_flex.pattern.scores import (
    Scores,
    check_probe_kernels,
    probe_recall,
    score_keys,
)
from mtraining_flex.pattern.search import SearchOptions, search
from mtraining_flex.pattern.types import (
    SENTINEL,
    VerticalSlash,
    dense_pattern,
    pack_pattern,
)
from mtraining_flex.reference import allowed_pairs, reference_pattern
from mtraining_flex.ring.comm import comm_for
from mtraining_flex.ring.simulate import run_ranks
from tests.helpers import assert_close, kept_entries, random_qkv, small_config

pytestmark = pytest.mark.usefixtures("one_thread")
every_layout = pytest.mark.parametrize("name", LAYOUTS)


def _assert_same(actual: VerticalSlash, expected: VerticalSlash) -> None:
    names = ("slash", "num_slash", "vertical", "num_vertical")
    pairs = zip(names, actual.tensors(), expected.tensors(), strict=True)
    for name, a, b in pairs:
        assert torch.equal(a, b), (name, a.tolist(), b.tolist())


def _planted(columns: dict[int, float], seq_len: int = 64) -> tuple[Tensor, Tensor]:
    """q and k `[1, 1, S, 4]`, in which each query sees `columns` with these logits."""
    q = torch.zeros(1, 1, seq_len, 4, dtype=torch.float64)
    k = torch.zeros_like(q)
    q[..., 0] = 1.0
    for column, logit in columns.items():
        k[0, 0, column, 0] = logit
    return q, k


def _diagonal(distance: int, seq_len: int = 64) -> tuple[Tensor, Tensor]:
    """Each query matches the key `distance` tokens before it, and no other."""
    q = torch.zeros(1, 1, seq_len, seq_len, dtype=torch.float64)
    k = torch.eye(seq_len, dtype=torch.float64)[None, None] * 30
    rows = torch.arange(distance, seq_len)
    q[0, 0, rows, rows - distance] = 1.0
    return q, k


def _probs(q: Tensor, k: Tensor, probe_rows: int) -> Tensor:
    """Attention of the last rows, the plain way: fp64 [B, H, R, S]."""
    seq_len, repeats = q.shape[2], q.shape[1] // k.shape[1]
    logits = q.double() @ k.double().repeat_interleave(repeats, 1).mT
    future = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
    logits = (logits * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf)
    return logits.softmax(-1)[:, :, -probe_rows:]


# The oracle

ORACLE_CASES: dict[str, dict[str, Any]] = {
    "top_p": {},
    "low p": {"vertical_p": 0.05, "slash_p": 0.3},
    "roomy": {"max_vertical": 40, "max_slash": 8, "vertical_p": 0.6, "slash_p": 0.7},
    "capped": {"max_vertical": 5, "max_slash": 2, "vertical_p": 0.99},
    "caps beyond the sequence": {"max_vertical": 999, "max_slash": 999},
    "p one": {"vertical_p": 1.0, "slash_p": 1.0},
    "no vertical": {"max_vertical": 0},
    "forced": {"sink": 3, "local_window": 2, "vertical_p": 0.3, "slash_p": 0.5},
    "forced fills the caps": {"sink": 12, "local_window": 6},
    "top_k": {"budget": "top_k", "num_vertical": 7, "num_slash": 3},
    "top_k, forced": {
        "budget": "top_k",
        "num_vertical": 7,
        "num_slash": 3,
        "sink": 4,
        "local_window": 2,
    },
    "top_k, no vertical": {"budget": "top_k", "num_vertical": 0, "num_slash": 1},
    "one probe row": {"probe_rows": 1},
    "ragged probe rows": {"probe_rows": 13},
    "all rows": {"probe_rows": 64},
    "granularity 4": {"granularity": 4, "probe_rows": 9},
    "granularity 16": {"granularity": 16, "probe_rows": 16},
    "granularity 1": {"granularity": 1, "max_slash": 30},
    "one block": {"granularity": 64, "max_slash": 3},
    "dense": {"pattern": "dense"},
}


@pytest.mark.parametrize("case", ORACLE_CASES)
@pytest.mark.parametrize("heads", [(2, 4, 2), (1, 3, 1), (1, 2, 2)])
def test_the_oracle_finds_the_same(case: str, heads: tuple[int, int, int]) -> None:
    config = small_config(**ORACLE_CASES[case])
    for seed in range(3):
        q, k, _ = random_qkv(*heads, 64, 8, torch.float64, seed=seed)
        q = q * (1 + 2 * seed)  # from flat to peaked heads
        _assert_same(find_pattern(q, k, config), reference_pattern(q, k, config))


def test_the_oracle_finds_the_same_at_another_scale() -> None:
    q, k, _ = random_qkv(1, 4, 2, 64, 8, torch.float64, seed=1)
    found = find_pattern(q, k, small_config(), scale=1.5)
    _assert_same(found, reference_pattern(q, k, small_config(), scale=1.5))
    other = find_pattern(q, k, small_config()).vertical
    assert not torch.equal(found.vertical, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_oracle_finds_the_same_in_low_precision(dtype: torch.dtype) -> None:
    q, k, _ = random_qkv(2, 4, 2, 64, 16, dtype, seed=2)
    for case in ("roomy", "top_k", "forced"):
        config = small_config(**ORACLE_CASES[case])
        _assert_same(find_pattern(q, k, config), reference_pattern(q, k, config))


def test_an_upcast_changes_nothing() -> None:
    q, k, _ = random_qkv(2, 4, 2, 64, 16, torch.bfloat16, seed=3)
    config = small_config(max_vertical=40, vertical_p=0.7)
    found = find_pattern(q, k, config)
    for dtype in (torch.float32, torch.float64):
        _assert_same(find_pattern(q.to(dtype), k.to(dtype), config), found)


def test_lists_have_static_widths_and_no_gradient() -> None:
    q, k, _ = random_qkv(2, 4, 2, 64, 8, torch.float32, seed=4)
    found = find_pattern(q.requires_grad_(), k.requires_grad_(), small_config(sink=2))
    assert found.slash.shape == (2, 4, 6) and found.vertical.shape == (2, 4, 12)
    assert not any(t.requires_grad for t in found.tensors())
    wide = find_pattern(q, k, small_config(max_slash=99, max_vertical=999))
    assert wide.slash.shape == (2, 4, 8) and wide.vertical.shape == (2, 4, 64)


def test_strides_of_q_and_k_change_nothing() -> None:
    q, k, _ = random_qkv(1, 4, 2, 64, 8, torch.bfloat16, seed=5)
    token_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    _assert_same(
        find_pattern(*token_major, small_config()), find_pattern(q, k, small_config())
    )


def test_rows_before_the_probe_are_not_read() -> None:
    q, k, _ = random_qkv(1, 2, 1, 64, 8, torch.float64, seed=6)
    found = find_pattern(q, k, small_config())
    q[:, :, :-8] = torch.nan
    _assert_same(find_pattern(q, k, small_config()), found)


# What is planted is found


def test_planted_columns_are_found() -> None:
    q, k = _planted({5: 20.0, 23: 19.0, 40: 18.0})
    config = small_config(budget="top_k", num_vertical=3, num_slash=1)
    found = find_pattern(q, k, config, scale=1.0)
    assert kept_entries(found, "vertical") == [5, 23, 40]
    assert kept_entries(found, "slash") == [0]


def test_planted_diagonals_are_found() -> None:
    q, k = _diagonal(20)  # 20 = 2 * 8 + 4: half in offset 2, half in 3
    config = small_config(budget="top_k", num_vertical=1, num_slash=3)
    assert kept_entries(find_pattern(q, k, config, scale=1.0), "slash") == [0, 2, 3]
    for p, expected in ((0.9, [0, 2, 3]), (0.4, [0, 2])):  # of equals the nearer
        found = find_pattern(q, k, small_config(slash_p=p), scale=1.0)
        assert kept_entries(found, "slash") == expected


@pytest.mark.parametrize("distance", range(0, 24))
def test_a_diagonal_of_each_distance_is_found(distance: int) -> None:
    """Both offsets that a diagonal crosses; on a multiple of g there is only one."""
    q, k = _diagonal(distance)
    found = find_pattern(q, k, small_config(slash_p=0.95), scale=1.0)
    crossed = {distance // 8, -(-distance // 8)}
    assert kept_entries(found, "slash") == sorted({0} | crossed)


@pytest.mark.parametrize("p", [0.9, 0.93 - 1e-5])
def test_top_p_keeps_the_entry_that_crosses(p: float) -> None:
    # One column of mass 0.93 on 64 tokens: e^x / (e^x + 63) at the last row.
    logit = math.log(0.93 / 0.07 * 63)
    q, k = _planted({17: logit})
    found = find_pattern(q, k, small_config(probe_rows=1, vertical_p=p), scale=1.0)
    assert kept_entries(found, "vertical") == [17]
    # 0.07 / 63 = 0.0011 each: one more entry crosses, and of equals the lowest.
    found = find_pattern(q, k, small_config(probe_rows=1, vertical_p=0.931), scale=1.0)
    assert kept_entries(found, "vertical") == [0, 17]


def test_a_uniform_head_fills_the_cap_from_the_lowest_index() -> None:
    q, k = _planted({})
    found = find_pattern(q, k, small_config(probe_rows=1), scale=1.0)
    assert kept_entries(found, "vertical") == list(range(12))


def test_top_p_of_a_uniform_head_counts_exactly() -> None:
    """64 keys of 1/64 each: p = 1/4 is 16 of them, a hair more is 17."""
    q, k = _planted({})
    for p, count in ((0.25 - 1e-6, 16), (0.25 + 1e-6, 17)):
        config = small_config(probe_rows=1, vertical_p=p, max_vertical=64)
        found = find_pattern(q, k, config, scale=1.0)
        assert kept_entries(found, "vertical") == list(range(count))


@pytest.mark.parametrize("budget", ["top_p", "top_k"])
def test_forced_entries_come_first(budget: str) -> None:
    q, k = _planted({30: 60.0})
    config = small_config(
        budget=budget, sink=3, local_window=2, num_vertical=4, num_slash=2
    )
    found = find_pattern(q, k, config, scale=1.0)
    assert kept_entries(found, "vertical") == [0, 1, 2, 30]
    assert kept_entries(found, "slash")[:2] == [0, 1]
    if budget == "top_k":
        assert kept_entries(found, "slash") == [0, 1]


def test_forced_entries_are_kept_although_they_hold_nothing() -> None:
    """The mass is reached by offset 7 alone, and the window stays."""
    q, k = _planted({0: 60.0})
    config = small_config(probe_rows=1, slash_p=0.5, local_window=4, sink=5)
    found = find_pattern(q, k, config, scale=1.0)
    assert kept_entries(found, "slash") == [0, 1, 2, 3, 7]
    assert kept_entries(found, "vertical") == [0, 1, 2, 3, 4]


def test_the_diagonal_is_always_kept() -> None:
    q, k = _planted({0: 60.0})
    for changes in ({}, {"budget": "top_k", "num_slash": 1, "num_vertical": 1}):
        found = find_pattern(q, k, small_config(probe_rows=1, **changes), scale=1.0)
        assert kept_entries(found, "slash")[0] == 0


def test_p_one_with_full_caps_keeps_everything() -> None:
    q, k = _planted({30: 60.0})  # all the mass on one column
    config = small_config(vertical_p=1.0, slash_p=1.0, max_vertical=64, max_slash=8)
    found = find_pattern(q, k, config, scale=1.0)
    assert kept_entries(found, "vertical") == list(range(64))
    assert kept_entries(found, "slash") == list(range(8))
    config = small_config(vertical_p=1.0, slash_p=1.0)
    found = find_pattern(q, k, config, scale=1.0)
    assert kept_entries(found, "vertical") == [*range(11), 30]


# Ranks and layouts


def _on_ranks(
    q: Tensor, k: Tensor, config: SparseAttention, name: str, size: int
) -> list[VerticalSlash]:
    layout = build_layout(name, q.shape[2], size, config.granularity)

    def find(comm: Any) -> VerticalSlash:
        here = layout.positions(comm.rank)
        return find_pattern(
            q[:, :, here], k[:, :, here], config, layout=layout, group=comm
        )

    return run_ranks(size, find)


@every_layout
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_pattern_is_the_same_on_any_number_of_ranks(
    name: str, size: int, dtype: torch.dtype
) -> None:
    q, k, _ = random_qkv(1, 4, 2, 128, 16, dtype, seed=size)
    for changes in (
        {"vertical_p": 0.8, "max_vertical": 100, "slash_p": 0.8, "max_slash": 16},
        # On three ranks, and not on whole blocks.
        {"probe_rows": 21, "sink": 2, "local_window": 2},
        {"budget": "top_k", "num_vertical": 9, "num_slash": 4, "probe_rows": 64},
    ):
        config = small_config(**changes)
        expected = find_pattern(q, k, config)
        _assert_same(expected, reference_pattern(q, k, config))
        for found in _on_ranks(q, k, config, name, size):
            _assert_same(found, expected)


@every_layout
@pytest.mark.parametrize("size", [2, 8])
def test_no_bit_of_a_score_depends_on_the_ranks(name: str, size: int) -> None:
    """Not the cut alone: a score that is off by a bit moves a cut some day."""
    q, k, _ = random_qkv(1, 4, 2, 1024, 16, torch.float32, seed=size)
    layout = build_layout(name, 1024, size, 8)
    whole = build_layout("striped", 1024, 1, 8)
    expected = score_keys(q, k, whole, comm_for(None), 21, 0.25)

    def score(comm: Any) -> Scores:
        here = layout.positions(comm.rank)
        return score_keys(q[:, :, here], k[:, :, here], layout, comm, 21, 0.25)

    for rank, scores in enumerate(run_ranks(size, score)):
        here = layout.positions(rank)
        assert torch.equal(scores.vertical, expected.vertical[..., here])
        assert torch.equal(scores.slash, expected.slash)


@every_layout
@pytest.mark.parametrize("size", [3, 4])
def test_ties_are_cut_alike_on_any_number_of_ranks(name: str, size: int) -> None:
    """Keys repeat with a period of 12, so that whole classes of scores are equal."""
    seq_len = 96
    q, k, _ = random_qkv(1, 2, 1, 12, 8, torch.float32, seed=9)
    q, k = q.repeat(1, 1, 8, 1), k.repeat(1, 1, 8, 1)
    config = small_config(granularity=4, probe_rows=1, max_vertical=30, vertical_p=0.5)
    expected = find_pattern(q, k, config)
    _assert_same(expected, reference_pattern(q, k, config))
    # Of a class that is cut, the lower indices stay.
    kept = torch.zeros(seq_len, dtype=torch.bool)
    kept[kept_entries(expected, "vertical")] = True
    classes = kept.view(8, 12)
    assert (classes.long().diff(dim=0) <= 0).all()
    assert (classes.any(0) & ~classes.all(0)).sum() == 1
    for found in _on_ranks(q, k, config, name, size):
        _assert_same(found, expected)


@every_layout
def test_more_columns_than_a_rank_has_tokens(name: str) -> None:
    q, k, _ = random_qkv(1, 2, 1, 128, 8, torch.float32, seed=10)
    config = small_config(max_vertical=100, vertical_p=0.999)  # 16 tokens a rank
    expected = find_pattern(q, k, config)
    assert (expected.num_vertical > 64).all()
    for found in _on_ranks(q, k, config, name, 8):
        _assert_same(found, expected)


# Budgets of single layers and heads

LAYERS: list[dict[str, Any]] = [
    {
        "0": ["vertical_and_slash", 3, 17, 0.0],  # 17 token diagonals: 3 blocks
        "1": ["flex_vertical_and_slash", [0.2, 5], [0.4, 48], 0.0],
        "3": ["vertical_and_slash", 12, 8, 1.0],
    },
    {},
]

TOML = """
[[layers]]
0 = ["vertical_and_slash", 3, 17, 0.0]
1 = ["flex_vertical_and_slash", [0.2, 5], [0.4, 48], 0.0]
3 = ["vertical_and_slash", 12, 8, 1.0]

[[layers]]
"""


def _json(path: Path, layers: Any) -> str:
    file = path / "budget.json"
    file.write_text(json.dumps(layers))
    return str(file)


def _toml(path: Path, layers: Any) -> str:
    file = path / "budget.toml"
    file.write_text(TOML)
    return str(file)


@pytest.mark.parametrize("write", [_json, _toml])
def test_a_budget_file_sets_single_heads(
    write: Callable[[Path, Any], str], tmp_path: Path
) -> None:
    q, k, _ = random_qkv(2, 4, 2, 64, 8, torch.float64, seed=11)
    plain = small_config(vertical_p=0.15)
    config = small_config(vertical_p=0.15, budget_file=write(tmp_path, LAYERS))
    found = find_pattern(q, k, config, layer=0)
    expected = {
        0: small_config(budget="top_k", num_vertical=3, num_slash=3),
        1: small_config(
            vertical_p=0.2, max_vertical=5, slash_p=0.4, max_slash=6
        ),  # 48 token diagonals are 6 blocks
        2: plain,  # not in the file
        3: small_config(budget="top_k", num_vertical=12, num_slash=1),
    }
    for head, same in expected.items():
        alone = reference_pattern(q, k, same)
        for b in range(2):
            for kind in ("vertical", "slash"):
                assert kept_entries(found, kind, b, head) == kept_entries(
                    alone, kind, b, head
                )
    assert found.vertical.shape[-1] == 12 and found.slash.shape[-1] == 6
    # An empty layer has the section's own.
    _assert_same(find_pattern(q, k, config, layer=1), find_pattern(q, k, plain))


@pytest.mark.parametrize("size", [2, 4])
def test_a_budget_file_on_several_ranks(size: int, tmp_path: Path) -> None:
    q, k, _ = random_qkv(1, 4, 2, 64, 8, torch.float32, seed=12)
    config = small_config(budget_file=_json(tmp_path, LAYERS))
    layout = build_layout("striped", 64, size, 8)

    def find(comm: Any) -> VerticalSlash:
        here = layout.positions(comm.rank)
        return find_pattern(q[:, :, here], k[:, :, here], config, group=comm, layer=0)

    expected = find_pattern(q, k, config, layer=0)
    for found in run_ranks(size, find):
        _assert_same(found, expected)


TOP_K = "vertical_and_slash"
TOP_P = "flex_vertical_and_slash"


@pytest.mark.parametrize(
    ("layers", "changes", "parts"),
    [
        ([{}], {}, ["has 1 layers", "layer 1"]),
        ([{}, {"4": [TOP_K, 1, 8, 0.0]}], {}, ["head 4", "layer 1", "4 heads"]),
        ([{}, {"0": [TOP_K, 13, 8, 0.0]}], {}, ["max_vertical (12)", "(13)"]),
        ([{}, {"0": [TOP_K, 1, 49, 0.0]}], {}, ["max_slash (6)", "(7)"]),
        ([{}, {"0": [TOP_P, [0.9, 13], [0.9, 8], 0.0]}], {}, ["max_vertical (12)"]),
        ([{}, {"0": [TOP_P, [0.9, 1], [0.9, 64], 0.0]}], {}, ["max_slash (6)", "(8)"]),
        ([{}, {"0": [TOP_P, [0.0, 1], [0.9, 8], 0.0]}], {}, ["(0.0)", "(0, 1]"]),
        ([{}, {"0": [TOP_P, [0.9, 1], [1.5, 8], 0.0]}], {}, ["(1.5)", "(0, 1]"]),
        ([{}, {"0": [TOP_K, 1, 8, 0.0]}], {"sink": 2}, ["sink (2)", "(1)"]),
        ([{}, {"0": [TOP_K, 1, 8, 0.0]}], {"local_window": 2}, ["local_window (2)"]),
        ([{}, {"0": [TOP_K, 1, 0, 0.0]}], {}, ["local_window (1)", "(0)"]),
        ([{}, {"0": [TOP_K, -1, 8, 0.0]}], {}, ["sink (0)", "(-1)"]),
        ([{}, {"0": ["block_sparse", 1, 8, 0.0]}], {}, ["'block_sparse'"]),
        ({"0": [TOP_K, 1, 8, 0.0]}, {}, ["must hold a list of layers"]),
        ([[1], [2]], {}, ["must hold a list of layers"]),
        ("layers", {}, ["must hold a list of layers"]),
        ([{}, {"-1": [TOP_K, 1, 8, 0.0]}], {}, ["head -1", "0 to 3"]),
        ([{}, {"x": [TOP_K, 1, 8, 0.0]}], {}, ["head x", "0 to 3"]),
        ([{}, {"0": [TOP_K, 1.5, 8, 0.0]}], {}, ["must give a head", "1.5"]),
        ([{}, {"0": [TOP_K]}], {}, ["must give a head"]),
        ([{}, {"0": []}], {}, ["must give a head"]),
        ([{}, {"0": [TOP_K, [0.9, 1], [0.9, 8], 0.0]}], {}, ["must give a head"]),
    ],
)
def test_a_wrong_budget_file_is_refused(
    layers: Any, changes: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    q, k, _ = random_qkv(1, 4, 2, 64, 8, torch.float32, seed=0)
    config = small_config(budget_file=_json(tmp_path, layers), **changes)
    with pytest.raises(ValueError) as error:
        find_pattern(q, k, config, layer=1)
    for part in ("sparse_attention.", *parts):
        assert part in str(error.value)


@pytest.mark.parametrize(("name", "text"), [("a.json", "[{"), ("a.toml", "layers = [")])
def test_a_broken_budget_file_is_refused(name: str, text: str, tmp_path: Path) -> None:
    q, k, _ = random_qkv(1, 4, 2, 64, 8, torch.float32, seed=0)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"budget_file.*{name}'\) cannot be read"):
        find_pattern(q, k, small_config(budget_file=str(tmp_path / name)), layer=0)


@pytest.mark.parametrize("layer", [None, -1])
def test_a_budget_file_needs_a_layer(layer: int | None, tmp_path: Path) -> None:
    q, k, _ = random_qkv(1, 4, 2, 64, 8, torch.float32, seed=0)
    config = small_config(budget_file=_json(tmp_path, [{}]))
    with pytest.raises(ValueError, match="layer"):
        find_pattern(q, k, config, layer=layer)


def test_a_missing_budget_file_is_refused() -> None:
    q, k, _ = random_qkv(1, 4, 2, 64, 8, torch.float32, seed=0)
    with pytest.raises(ValueError, match=r"budget_file \('/no/such.json'\).*not exist"):
        find_pattern(q, k, small_config(budget_file="/no/such.json"), layer=0)


# Recall


def _search(
    q: Tensor, k: Tensor, config: SparseAttention, name: str = "striped", size: int = 1
) -> tuple[VerticalSlash, list[Tensor], Callable[[VerticalSlash], list[Tensor]]]:
    """The pattern, its probe recall on each rank, and the recall of any pattern."""
    seq_len, heads = q.shape[2], q.shape[1]
    layout = build_layout(name, seq_len, size, config.granularity)
    options = SearchOptions(
        *list_widths(config, seq_len),
        config.probe_rows,
        config.sink,
        config.local_window,
        q.shape[-1] ** -0.5,
    )

    def run(comm: Any, other: VerticalSlash | None) -> tuple[VerticalSlash, Tensor]:
        here = layout.positions(comm.rank)
        found, scores = search(
            q[:, :, here],
            k[:, :, here],
            layer_budget(config, heads),
            options,
            layout,
            comm,
        )
        return found, probe_recall(scores, other or found, layout, comm)

    def recalls(other: VerticalSlash) -> list[Tensor]:
        return [recall for _, recall in run_ranks(size, lambda c: run(c, other))]

    results = run_ranks(size, lambda c: run(c, None))
    return results[0][0], [recall for _, recall in results], recalls


def _brute_recall(q: Tensor, k: Tensor, pattern: VerticalSlash, r: int) -> Tensor:
    """fp64 [B, H]."""
    kept = allowed_pairs(pattern, q.shape[2], 8)[:, :, -r:]
    return (_probs(q, k, r) * kept).sum((2, 3)) / r


@every_layout
@pytest.mark.parametrize(("size", "probe_rows"), [(1, 8), (1, 21), (2, 21), (4, 8)])
def test_probe_recall_is_the_kept_share_of_the_mass(
    name: str, size: int, probe_rows: int
) -> None:
    q, k, _ = random_qkv(2, 4, 2, 64, 8, torch.float64, seed=13)
    for changes in ({}, {"max_vertical": 0}, {"sink": 4, "vertical_p": 0.2}):
        config = small_config(probe_rows=probe_rows, **changes)
        found, recalls, of = _search(q, k, config, name, size)
        expected = _brute_recall(q, k, found, probe_rows).mean()
        assert 0.1 < expected < 0.99
        for recall in recalls:
            assert recall.dtype == torch.float64 and recall.ndim == 0
            assert_close(recall, expected, 1e-6)
        # Of patterns that the search did not find, and of all and nothing.
        other = pack_pattern(
            [[[2, 5], [], [1], [7]]] * 2, [[[0, 63], [9], [], [60]]] * 2
        )
        for recall in of(other):
            expected = _brute_recall(q, k, other, probe_rows).mean()
            assert_close(recall, expected, 1e-6)
        for recall in of(dense_pattern(8, "cpu")):
            assert abs(recall.item() - 1) < 1e-6
        assert not any(recall.any() for recall in of(pack_pattern([[[]]], [[[]]])))


@pytest.mark.parametrize("p", [0.3, 0.6, 0.9])
def test_recall_reaches_p_where_no_cap_binds(p: float) -> None:
    q, k, _ = random_qkv(2, 4, 2, 64, 8, torch.float64, seed=14)
    q = q * 2
    # By verticals alone: exactly what their masses say.
    config = small_config(vertical_p=p, slash_p=1e-9, max_vertical=64, max_slash=8)
    found = find_pattern(q, k, config)
    assert (_brute_recall(q, k, found, 8) >= p - 1e-6).all()
    probs = _probs(q, k, 8)
    for b in range(2):
        for h in range(4):
            columns = kept_entries(found, "vertical", b, h)
            mass = probs[b, h].sum(0)[columns] / 8
            assert mass.sum() >= p - 1e-6
            assert mass.sum() - mass.min() < p, "the smallest such set"
    # By slashes alone: a diagonal's mass is shared between two offsets by rows, which
    # is right on average over rows.
    config = small_config(max_vertical=0, slash_p=p, max_slash=8, probe_rows=16)
    found = find_pattern(q, k, config)
    recall = _brute_recall(q, k, found, 16)
    assert abs((recall - p).clamp(max=0).mean()) < 0.05


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probe_rows": 65}, r"probe_rows \(65\).*\(64\)"),
        ({"granularity": 7}, r"seq_len \(64\).*multiple.*7"),
        ({"granularity": 128}, r"seq_len \(64\).*at least.*128"),
        ({"vertical_p": 0.0}, r"vertical_p \(0.0\)"),
        ({"budget": "top_x"}, r"budget \('top_x'\)"),
        ({"sink": 13}, r"sink \(13\).*max_vertical \(12\)"),
    ],
)
def test_a_wrong_configuration_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    q, k, _ = random_qkv(1, 2, 1, 64, 8, torch.float32, seed=0)
    config = SparseAttention(
        **({"granularity": 8, "probe_rows": 8, "max_vertical": 12} | changes)
    )
    with pytest.raises(ValueError, match=message):
        find_pattern(q, k, config)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (("striped", 128, 1, 8), r"layout's seq_len \(128\).*\(64\)"),
        (("striped", 64, 2, 8), r"layout's cp_size \(2\).*\(1\)"),
        (("striped", 64, 1, 4), r"layout's granularity \(4\).*\(8\)"),
    ],
)
def test_a_layout_of_another_call_is_refused(
    layout: tuple[str, int, int, int], message: str
) -> None:
    q, k, _ = random_qkv(1, 2, 1, 64, 8, torch.float32, seed=0)
    with pytest.raises(ValueError, match=message):
        find_pattern(q, k, small_config(), layout=build_layout(*layout))


def test_heads_that_do_not_divide_are_refused() -> None:
    q, _, _ = random_qkv(1, 3, 1, 64, 8, torch.float32, seed=0)
    k, _, _ = random_qkv(1, 2, 1, 64, 8, torch.float32, seed=0)
    with pytest.raises(ValueError, match=r"\(3\).*multiple.*\(2\)"):
        find_pattern(q, k, small_config())


def test_no_group_is_a_sequence_in_one_piece() -> None:
    q, k, _ = random_qkv(1, 2, 1, 64, 8, torch.float32, seed=1)
    _assert_same(
        find_pattern(q, k, small_config(), group=comm_for(None)),
        find_pattern(q, k, small_config()),
    )


def test_nan_queries_keep_indices_in_range() -> None:
    q, k, _ = random_qkv(1, 4, 2, 64, 8, torch.float32, seed=15)
    q[0, 1] = torch.nan
    found = find_pattern(q, k, small_config())
    alone = find_pattern(q.nan_to_num(0.0), k, small_config())
    for entries, bound in ((found.slash, 8), (found.vertical, 64)):
        valid = entries[entries != SENTINEL]
        assert ((valid >= 0) & (valid < bound)).all()
    for head in (0, 2, 3):  # the others do not notice
        assert kept_entries(found, "vertical", 0, head) == kept_entries(
            alone, "vertical", 0, head
        )


def test_what_the_gpu_probe_lacks_is_refused_by_its_setting() -> None:
    bf16 = torch.bfloat16
    check_probe_kernels("cuda", bf16, 128, 64, 128)
    check_probe_kernels("cpu", bf16, 256, 256, 200)  # the naive probe takes all
    check_probe_kernels("cuda", torch.float64, 256, 256, 200)  # and here, too
    for head_dim, granularity, rows, message in (
        (128, 128, 129, r"sparse_attention: probe_rows \(129\) must be at most 128"),
        (128, 256, 64, r"sparse_attention: granularity \(256\) must be 16, 32, 64"),
        (256, 128, 64, r"head_dim \(256\) must be 16 to 128"),
    ):
        with pytest.raises(ValueError, match=message):
            check_probe_kernels("cuda", bf16, head_dim, granularity, rows)

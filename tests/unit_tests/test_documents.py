"""Several documents in one sequence: none sees, or moves, another."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mtraining_flex.config import Ring, SparseAttention
from mtraining_flex.layout import LAYOUTS, Layout, build_layout
from mtraining_flex.pattern import find_pattern
from mtraining_flex.pattern.budget import layer_budget, list_widths
from mtraining_flex.pattern.documents import (
    forced_sinks,
    last_of_document,
    num_groups,
    probe_groups,
)
from mtraining_flex.pattern.scores import probe_recall, score_keys
from mtraining_flex.pattern.search import SearchOptions, search
from mtraining_flex.pattern.types import VerticalSlash, dense_pattern
from mtraining_flex.reference import (
    allowed_pairs,
    probe_positions,
    reference_attention,
    reference_pattern,
)
from mtraining_flex.ring.comm import comm_for
from mtraining_flex.ring.simulate import run_ranks
from tests.helpers import (
    assert_close,
    random_documents,
    random_pattern,
    random_qkv,
    small_config,
)
from tests.rings import (
    assert_equal_results,
    grad_like,
    operator_results,
    reference_results,
    ring_results,
)

pytestmark = pytest.mark.usefixtures("one_thread")
every_layout = pytest.mark.parametrize("name", LAYOUTS)
S = 64


def packed(*lengths: int) -> Tensor:
    """documents [1, S] of documents one behind the other."""
    ends = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    starts = torch.repeat_interleave(ends, torch.tensor(lengths))
    return starts.int()[None]


# ---- who probes ---------------------------------------------------------------------


@pytest.mark.parametrize("probe_rows", [1, 6, 8, 16, 64])
def test_probe_rows_are_those_of_the_oracle(probe_rows: int) -> None:
    for seed in range(12):
        documents = random_documents(4, S, seed)
        groups = probe_groups(documents, probe_rows)
        assert groups.pos.dtype == groups.start.dtype == torch.int32
        for b in range(4):
            expected = probe_positions(documents[b].tolist(), probe_rows)
            assert groups.pos[b].flatten().tolist() == expected
            starts = documents[b][groups.pos[b].long()]
            assert (starts == groups.start[b][:, None]).all(), (
                "a group has one document"
            )


def test_one_document_is_probed_by_its_last_rows() -> None:
    groups = probe_groups(packed(S), 16)
    assert sorted(groups.pos.flatten().tolist()) == list(range(S - 16, S))


def test_rows_are_shared_by_length() -> None:
    # 48 and 16 tokens: six of eight groups and two.
    groups = probe_groups(packed(48, 16), 16)
    assert (groups.start == 0).sum() == 6 and (groups.start == 48).sum() == 2
    # A short document beside long ones is not asked.
    groups = probe_groups(packed(30, 31, 3), 16)
    assert set(groups.start.flatten().tolist()) == {0, 30}


def test_a_document_shorter_than_a_group_repeats_its_last_row() -> None:
    groups = probe_groups(packed(*[1] * 8, *[2] * 28), 64)  # groups of 8 rows
    assert (groups.pos[0, :, -1] == groups.start[0] + 1).all()


def test_the_last_token_of_each_document() -> None:
    for seed in range(4):
        documents = random_documents(3, S, seed)
        last = last_of_document(documents)
        for b in range(3):
            for position in range(S):
                own = documents[b] == documents[b, position]
                assert last[b, position] == own.nonzero().max()


def test_sinks_of_the_documents_that_probe() -> None:
    documents = packed(30, 31, 3)
    forced, count = forced_sinks(documents, probe_groups(documents, 16), 2)
    assert forced[0].nonzero().flatten().tolist() == [0, 1, 30, 31]
    assert count.tolist() == [4]


# ---- the search ---------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "top_p": {},
    "roomy": {"max_vertical": 40, "max_slash": 8, "vertical_p": 0.6, "slash_p": 0.7},
    "forced": {"sink": 1, "local_window": 2, "vertical_p": 0.3, "slash_p": 0.5},
    "top_k": {"budget": "top_k", "num_vertical": 9, "num_slash": 3, "sink": 1},
    "one probe row": {"probe_rows": 1},
    "many probe rows": {"probe_rows": 32},
    "granularity 4": {"granularity": 4, "probe_rows": 9},
    "dense": {"pattern": "dense"},
}


def _same(actual: VerticalSlash, expected: VerticalSlash) -> None:
    for a, b in zip(actual.tensors(), expected.tensors(), strict=True):
        assert torch.equal(a, b), (a.tolist(), b.tolist())
    assert actual.documents is not None and expected.documents is not None
    assert torch.equal(actual.documents, expected.documents)


@pytest.mark.parametrize("case", CASES)
def test_the_oracle_finds_the_same(case: str) -> None:
    config = small_config(**CASES[case])
    for seed in range(4):
        q, k, _ = random_qkv(2, 4, 2, S, 8, torch.float64, seed)
        documents = random_documents(2, S, seed)
        expected = reference_pattern(q, k, config, documents=documents)
        _same(find_pattern(q, k, config, documents=documents), expected)


@every_layout
@pytest.mark.parametrize("size", [2, 4])
def test_the_pattern_is_the_same_on_any_number_of_ranks(name: str, size: int) -> None:
    config = small_config(sink=1)
    layout = build_layout(name, S, size, config.granularity)

    def find(
        comm: Any, q: Tensor, k: Tensor, documents: Tensor, layout: Layout
    ) -> VerticalSlash:
        here = layout.positions(comm.rank)
        shard = q[:, :, here], k[:, :, here]
        return find_pattern(
            *shard, config, layout=layout, group=comm, documents=documents
        )

    for seed in range(3):
        q, k, _ = random_qkv(2, 4, 2, S, 8, torch.bfloat16, seed)
        documents = random_documents(2, S, seed)
        expected = find_pattern(q, k, config, documents=documents)
        call = partial(find, q=q, k=k, documents=documents, layout=layout)
        for found in run_ranks(size, call):
            _same(found, expected)


def test_other_documents_do_not_move_the_scores_of_one() -> None:
    """Of keys: what a probe row sees ends where its document begins."""
    q, k, _ = random_qkv(1, 2, 1, S, 8, torch.float64, 0)
    documents = packed(32, 32)
    layout = build_layout("striped", S, 1, 8)
    groups = probe_groups(documents, 16)

    def scores(k: Tensor) -> Tensor:
        found = score_keys(q, k, layout, comm_for(None), 16, 1.0, groups)
        return found.vertical.sum(2)

    changed = k.clone()
    changed[:, :, :32] += 1.0
    before, after = scores(k), scores(changed)
    assert torch.equal(before[..., 32:], after[..., 32:])
    assert not torch.equal(before[..., :32], after[..., :32])
    # Each row's mass is one, and all of it is within the row's document.
    assert_close(before.sum(-1), torch.full((1, 2), 16.0), 1e-6)
    assert_close(before[..., :32].sum(-1), torch.full((1, 2), 8.0), 1e-6)


@every_layout
@pytest.mark.parametrize("size", [1, 2])
def test_recall_is_the_kept_share_of_the_mass(name: str, size: int) -> None:
    config = small_config(max_vertical=12, max_slash=4)
    q, k, _ = random_qkv(2, 4, 2, S, 8, torch.float64, 3)
    documents = random_documents(2, S, 3)
    layout = build_layout(name, S, size, config.granularity)
    widths = list_widths(config, S)
    options = SearchOptions(*widths, config.probe_rows, 0, 1, 8**-0.5)
    budget = layer_budget(config, 4)

    def call(comm: Any) -> tuple[VerticalSlash, Tensor]:
        here = layout.positions(comm.rank)
        shard = q[:, :, here], k[:, :, here]
        pattern, scores = search(*shard, budget, options, layout, comm, documents)
        return pattern, probe_recall(scores, pattern, layout, comm)

    pattern, held = run_ranks(size, call)[0]
    logits = (q @ k.repeat_interleave(2, 1).mT) * 8**-0.5
    seen = allowed_pairs(dense_pattern(S // 8, "cpu", documents), S, 8)
    probs = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    kept = probs * allowed_pairs(pattern, S, config.granularity)
    rows = [probe_positions(row.tolist(), config.probe_rows) for row in documents]
    share = torch.stack([kept[b, :, rows[b]].sum(-1).mean() for b in range(2)]).mean()
    assert abs(held.item() - share.item()) < 1e-6


# ---- the ring -----------------------------------------------------------------------


def _case(seed: int, batch: int = 2) -> tuple[Any, Tensor, VerticalSlash]:
    qkv = random_qkv(batch, 6, 2, S, 8, torch.float64, seed)
    pattern = random_pattern(
        batch, 6, S, 4, max_slash=9, max_vertical=11, seed=seed, always_diagonal=True
    )
    documents = random_documents(batch, S, seed)
    return qkv, grad_like(qkv[0]), replace(pattern, documents=documents)


@every_layout
@pytest.mark.parametrize("rotation", ["ring", "allgather"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_all_ranks_together_are_the_reference(
    name: str, rotation: str, size: int
) -> None:
    layout = build_layout(name, S, size, 4)
    for seed in range(4):
        qkv, dout, pattern = _case(seed)
        actual = ring_results(qkv, dout, pattern, layout, rotation)
        expected = reference_results(qkv, dout, pattern, 4)
        assert_equal_results(actual, expected, layout)


@every_layout
@pytest.mark.parametrize("inner", ["ring", "allgather"])
def test_two_levels_are_the_reference(name: str, inner: str) -> None:
    layout = build_layout(name, S, 4, 4)
    ring = Ring(layout=name, rotation="two_level", inner_degree=2, inner=inner)
    qkv, dout, pattern = _case(1)
    actual = operator_results(qkv, dout, pattern, layout, ring)
    assert_equal_results(actual, reference_results(qkv, dout, pattern, 4), layout)


@every_layout
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_dense_pattern_of_one_head_stands_for_all(name: str, size: int) -> None:
    layout = build_layout(name, S, size, 4)
    qkv, dout, pattern = _case(3)
    dense = dense_pattern(S // 4, "cpu", pattern.documents)
    actual = ring_results(qkv, dout, dense, layout)
    assert_equal_results(actual, reference_results(qkv, dout, dense, 4), layout)


LENGTHS = (1, 2, 3, 127, 128, 129, 1000, 146)  # 1536 in all


@every_layout
@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed_documents_are_the_documents_alone(name: str, size: int) -> None:
    """With every pair of a document kept: what else a pattern keeps depends on where a
    document lies."""
    total = sum(LENGTHS)
    documents = packed(*LENGTHS)
    qkv = random_qkv(1, 2, 1, total, 16, torch.float32, 5)
    dout = grad_like(qkv[0])
    layout = build_layout(name, total, size, 64)
    dense = dense_pattern(total // 64, "cpu", documents)
    together = ring_results(qkv, dout, dense, layout)
    first = 0
    for length in LENGTHS:
        here = slice(first, first + length)
        q, k, v = (x[:, :, here].detach().double().requires_grad_() for x in qkv)
        out, _ = reference_attention(q, k, v, dense_pattern(length, "cpu"), 1)
        grads = torch.autograd.grad(out, (q, k, v), dout[:, :, here].double())
        for actual, expected in zip(together, (out, *grads), strict=True):
            error = (actual[:, :, here] - expected).abs().max()
            assert error < 1e-5, (length, error)
            assert expected.abs().max() > 0 or length == 1
        first += length


@every_layout
@pytest.mark.parametrize("size", [1, 4])
def test_a_changed_document_leaves_the_others_as_they_are(name: str, size: int) -> None:
    """Bit for bit, with the pattern frozen: the search is shared by all documents."""
    qkv, dout, pattern = _case(2, batch=1)
    documents = packed(21, 2, 25, 16)
    pattern = replace(pattern, documents=documents)
    layout = build_layout(name, S, size, 4)
    other = slice(23, 48)
    changed = tuple(x.clone() for x in qkv)
    for x in changed:
        x[:, :, other] += 1.0
    dout_changed = dout.clone()
    dout_changed[:, :, other] *= -2.0
    before = ring_results(qkv, dout, pattern, layout)
    after = ring_results(changed, dout_changed, pattern, layout)
    rest = torch.ones(S, dtype=torch.bool)
    rest[other] = False
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :, rest], b[:, :, rest])
        assert not torch.equal(a[:, :, other], b[:, :, other])


def test_documents_that_do_not_fit_are_refused() -> None:
    qkv, dout, pattern = _case(0)
    layout = build_layout("striped", S, 1, 4)
    assert pattern.documents is not None
    for wrong in (pattern.documents[:1], pattern.documents[:, :-1]):
        with pytest.raises(ValueError, match=r"documents must be int32 \[B, S\] = "):
            ring_results(qkv, dout, replace(pattern, documents=wrong), layout)
    with pytest.raises(ValueError, match="documents must be int32"):
        replace(pattern, documents=pattern.documents.long())
    config = SparseAttention(granularity=4, probe_rows=16)
    with pytest.raises(ValueError, match="documents must be int32"):
        find_pattern(qkv[0], qkv[1], config, documents=pattern.documents[:1])


def test_groups_divide_the_rows() -> None:
    assert [num_groups(rows) for rows in (1, 6, 9, 16, 64)] == [1, 2, 1, 8, 8]

"""Density, executed blocks and recall against brute force over [S, S]."""

from dataclasses import replace

import pytest
import torch

from mtraining_flex.pattern import quality
from mtraining_flex.pattern.types import (
    VerticalSlash,
    dense_pattern,
    pack_pattern,
)
from mtraining_flex.reference import allowed_pairs
from tests.helpers import (
    HEAD_KINDS,
    assert_close,
    random_documents,
    random_pattern,
    random_qkv,
)

CASES = [(4, 4), (4, 64), (16, 16), (16, 240), (128, 128), (128, 640)]


@pytest.mark.parametrize("always_diagonal", [True, False])
@pytest.mark.parametrize(("granularity", "seq_len"), CASES)
def test_density_counts_the_kept_pairs(
    granularity: int, seq_len: int, always_diagonal: bool
) -> None:
    for seed in range(4):
        pattern = random_pattern(
            2,
            len(HEAD_KINDS),
            seq_len,
            granularity,
            max_slash=1 + 3 * seed,
            max_vertical=7 * seed,
            seed=seed,
            always_diagonal=always_diagonal,
        )
        expected = allowed_pairs(pattern, seq_len, granularity).sum((-2, -1))
        actual = quality.kept_pairs(pattern, seq_len, granularity)
        assert actual.dtype == torch.int64
        assert torch.equal(actual, expected)
        share = quality.density(pattern, seq_len, granularity)
        assert share.dtype == torch.float64
        assert torch.equal(share, expected.double() / (seq_len * (seq_len + 1) / 2))


@pytest.mark.parametrize("always_diagonal", [True, False])
@pytest.mark.parametrize(("granularity", "seq_len"), CASES)
def test_only_pairs_of_one_document_count(
    granularity: int, seq_len: int, always_diagonal: bool
) -> None:
    for seed in range(4):
        pattern = random_pattern(
            2,
            len(HEAD_KINDS),
            seq_len,
            granularity,
            max_slash=1 + 3 * seed,
            max_vertical=7 * seed,
            seed=seed,
            always_diagonal=always_diagonal,
        )
        documents = random_documents(2, seq_len, seed)
        pattern = replace(pattern, documents=documents)
        expected = allowed_pairs(pattern, seq_len, granularity).sum((-2, -1))
        actual = quality.kept_pairs(pattern, seq_len, granularity)
        assert torch.equal(actual, expected)
        every = dense_pattern(seq_len // granularity, "cpu", documents)
        causal = allowed_pairs(every, seq_len, granularity).sum((-2, -1))
        share = quality.density(pattern, seq_len, granularity)
        assert torch.equal(share, expected.double() / causal)


def test_recall_knows_documents() -> None:
    q, k, _ = random_qkv(2, 6, 2, 64, 16, dtype=torch.float64, seed=0)
    documents = random_documents(2, 64, 1)
    dense = dense_pattern(16, "cpu", documents)
    assert_close(quality.recall(q, k, dense, granularity=4), torch.ones(2, 6), 1e-6)
    pattern = replace(
        random_pattern(2, 6, 64, 4, max_slash=4, max_vertical=6, seed=1),
        documents=documents,
    )
    logits = q @ k.repeat_interleave(3, 1).mT / 4
    seen = allowed_pairs(dense, 64, 4)
    probs = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    held = (probs * allowed_pairs(pattern, 64, 4)).sum((-2, -1)) / 64
    assert_close(quality.recall(q, k, pattern, granularity=4), held.float(), 1e-6)


def test_density_of_dense_is_one_also_at_a_million_tokens() -> None:
    seq_len = 1 << 20
    pattern = dense_pattern(seq_len // 128, "cpu")
    assert quality.density(pattern, seq_len, 128).item() == 1.0
    pairs = quality.kept_pairs(pattern, seq_len, 128).item()
    assert pairs == seq_len * (seq_len + 1) // 2


def test_a_vertical_in_a_kept_block_adds_nothing() -> None:
    bare = pack_pattern([[[0, 1, 2, 3]]], [[[]]])
    with_columns = pack_pattern([[[0, 1, 2, 3]]], [[[0, 5, 15]]])
    counts = [quality.kept_pairs(p, 16, 4) for p in (bare, with_columns)]
    assert torch.equal(*counts)


def test_entries_behind_the_counts_are_not_read() -> None:
    clean = pack_pattern([[[0]]], [[[3]]], max_slash=4, max_vertical=4)
    dirty = VerticalSlash(
        clean.slash.clamp(max=1),
        clean.num_slash,
        clean.vertical.clamp(max=5),
        clean.num_vertical,
    )
    q, k, _ = random_qkv(1, 1, 1, 16, 4, torch.float64, seed=0)
    for measure in (
        lambda p: quality.kept_pairs(p, 16, 4),
        lambda p: quality.executed_blocks(p, 4),
        lambda p: quality.recall(q, k, p, granularity=4),
    ):
        assert torch.equal(measure(clean), measure(dirty))


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seq_len \(18\).*granularity \(4\)"):
        quality.density(dense_pattern(4, "cpu"), 18, 4)


@pytest.mark.parametrize("always_diagonal", [True, False])
def test_executed_blocks_are_the_blocks_of_the_slashes(always_diagonal: bool) -> None:
    num_blocks = 12
    pattern = random_pattern(
        1,
        6,
        num_blocks * 4,
        4,
        max_slash=20,
        max_vertical=3,
        seed=1,
        always_diagonal=always_diagonal,
    )
    slashes = VerticalSlash(
        pattern.slash,
        pattern.num_slash,
        pattern.vertical,
        torch.zeros_like(pattern.num_vertical),
    )
    # At granularity 1 a pair is a block.
    expected = allowed_pairs(slashes, num_blocks, 1).sum((-2, -1))
    assert torch.equal(quality.executed_blocks(pattern, num_blocks), expected)


@pytest.mark.parametrize("chunk_logits", [1, 1 << 10, 1 << 24])
@pytest.mark.parametrize("scale", [None, 1.5])
def test_recall_is_the_kept_share_of_the_mass(
    chunk_logits: int, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "_CHUNK_LOGITS", chunk_logits)
    seq_len, g = 60, 4
    q, k, _ = random_qkv(2, 4, 2, seq_len, 8, torch.float64, seed=0)
    for pattern in (
        random_pattern(2, 4, seq_len, g, max_slash=5, max_vertical=6, seed=3),
        pack_pattern([[[0, 3]]], [[[0, 20]]]),
    ):
        logits = q @ k.repeat_interleave(2, 1).mT * (scale or 8**-0.5)
        future = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
        probs = logits.masked_fill(future, -torch.inf).softmax(-1)
        kept = probs * allowed_pairs(pattern, seq_len, g)
        expected = kept.sum((-2, -1)) / seq_len
        actual = quality.recall(q, k, pattern, granularity=g, scale=scale)
        assert actual.dtype == torch.float32
        assert_close(actual, expected, 1e-7)


def test_recall_of_dense_is_one_and_of_nothing_is_zero() -> None:
    q, k, _ = random_qkv(1, 2, 1, 32, 8, torch.bfloat16, seed=0)
    full = quality.recall(q, k, dense_pattern(8, "cpu"), granularity=4)
    assert_close(full, torch.ones(1, 2), 1e-6)
    nothing = pack_pattern([[[]]], [[[]]])
    assert (quality.recall(q, k, nothing, granularity=4) == 0).all()

"""Runs whose loss is computed in chunks equal those with all logits at once."""

from typing import Any

import pytest

from tests.distributed.launch import Launched
from tests.distributed.train_worker import load_run
from tests.helpers import assert_close


def _agree(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["steps"] == expected["steps"]
    for key in ("losses", "max_losses"):
        assert result[key] == pytest.approx(expected[key], rel=1e-6, abs=0), key
    assert result["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert_close(result["gradients"][name], gradient, 1e-5)


@pytest.mark.parametrize(
    ("run", "plain"),
    [
        ("chunked", "sparse"),
        ("chunked_qwen2", "qwen2"),  # tied
        ("chunked_compiled", "uninterrupted"),
    ],
)
def test_on_a_ring(two: Launched, run: str, plain: str) -> None:
    _agree(load_run(two, run), load_run(two, plain))


@pytest.mark.parametrize(
    ("run", "plain"),
    [
        ("chunked_single_label", "single_label_fsdp"),
        ("chunked_accumulated", "single_label_accumulated"),
    ],
)
def test_the_denominator_is_global(four: Launched, run: str, plain: str) -> None:
    """One label of two sequences counts, on one rank of one data-parallel group."""
    _agree(load_run(four, run), load_run(four, plain))


def test_validation(two: Launched) -> None:
    result, expected = (
        load_run(two, name)["validation"]
        for name in ("chunked_validation", "validation")
    )
    assert len(result) == len(expected) > 0
    for (step, ours), (at, theirs) in zip(result, expected, strict=True):
        assert step == at
        name = "validation_metrics/loss"
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6, abs=0)

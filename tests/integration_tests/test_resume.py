"""Deterministic runs repeat to the bit, and so do resumed ones (pitfall B46).

Compiled blocks, selective checkpointing, FSDP2 and the ring over two ranks; the second
run of each pair has processes of its own.
"""

import pytest
import torch

from tests.distributed.launch import Launched
from tests.distributed.train_worker import load_run

KEYS = ("losses", "max_losses", "grad_norms")


@pytest.mark.parametrize("name, first_step", (("repeated", 1), ("resumed", 6)))
def test_bitwise(
    two: Launched, two_again: Launched, name: str, first_step: int
) -> None:
    for rank in (0, 1):
        expected = load_run(two, "uninterrupted", rank)
        result = load_run(two_again, name, rank)
        assert result["steps"] == list(range(first_step, 11))
        for key in KEYS:
            assert result[key] == expected[key][first_step - 1 :], key
        read = zip(result["inputs"], expected["inputs"][first_step - 1 :], strict=True)
        assert all(torch.equal(a, b) for a, b in read), "other tokens"
        assert result["parameters"].keys() == expected["parameters"].keys()
        for parameter, value in expected["parameters"].items():
            assert torch.equal(result["parameters"][parameter], value), parameter


def test_tokens_are_counted_on(two: Launched, two_again: Launched) -> None:
    tokens = load_run(two_again, "resumed")["metrics"][0]["n_tokens_seen"]
    assert tokens == load_run(two, "uninterrupted")["metrics"][5]["n_tokens_seen"]


def test_compiled_is_eager(two: Launched) -> None:
    """The deterministic run is compiled, "sparse" is not."""
    compiled, eager = load_run(two, "uninterrupted"), load_run(two, "sparse")
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=0, abs=1e-4)

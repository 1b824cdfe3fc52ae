"""Training does not depend on how it is spread, and a full budget is dense training."""

import pytest
import torch

from tests.distributed.launch import Launched
from tests.distributed.train_worker import load_run
from tests.helpers import fro_error

STEPS = 10


def _losses(launched: Launched, name: str) -> list[float]:
    result = load_run(launched, name)
    assert result["steps"] == list(range(1, STEPS + 1))
    return result["losses"]


def _equal(losses: list[float], expected: list[float]) -> None:
    assert losses == pytest.approx(expected, rel=0, abs=1e-4)


@pytest.mark.parametrize("pattern", ("dense", "full_k", "full_p"))
def test_full_budget_is_torchtitan(one: Launched, pattern: str) -> None:
    """torchtitan's trainer, model and SDPA, without our model, trainer or metrics."""
    titan = _losses(one, "titan")
    assert titan[-1] < titan[0] - 0.1, "nothing was learned: any two runs are equal"
    _equal(_losses(one, pattern), titan)


def test_a_sparse_run_is_another_run(one: Launched) -> None:
    """The equalities of this file would hold for an attention that is always dense."""
    dense, sparse = _losses(one, "dense"), _losses(one, "sparse")
    assert max(abs(a - b) for a, b in zip(dense, sparse, strict=True)) > 1e-3
    assert load_run(one, "sparse")["metrics"][0]["sparse/density"] < 0.5
    assert load_run(one, "dense")["metrics"][0]["sparse/density"] == 1.0


@pytest.mark.parametrize("name", ("dense", "full_k", "sparse", "qwen2"))
def test_any_number_of_ranks_trains_alike(
    one: Launched, two: Launched, four: Launched, name: str
) -> None:
    expected = _losses(one, name)
    _equal(_losses(two, name), expected)
    _equal(_losses(four, name), expected)


def test_allgather_is_the_ring(two: Launched) -> None:
    _equal(_losses(two, "allgather"), _losses(two, "sparse"))


@pytest.mark.parametrize("name", ("two_level", "two_level_compiled"))
def test_two_levels_are_the_ring(four: Launched, name: str) -> None:
    """2 x 2; also compiled and checkpointed, with an inner all-gather."""
    _equal(_losses(four, name), _losses(four, "sparse"))
    exposed = [m["ring/exposed_comm_ms"] for m in load_run(four, name)["metrics"]]
    assert len(exposed) == STEPS and min(exposed) > 0


@pytest.mark.parametrize("ranks", ("one", "two"))
def test_hand_written_kernels_train_alike(
    request: pytest.FixtureRequest, one: Launched, ranks: str
) -> None:
    """Backend `triton`, interpreted, on one rank and on a ring of two."""
    result = load_run(request.getfixturevalue(ranks), "triton")
    assert result["steps"] == [1, 2, 3]
    # The learning rate of the third step is that of a shorter run.
    _equal(result["losses"][:2], _losses(one, "sparse")[:2])


@pytest.mark.parametrize("world_size", (1, 2, 4))
@pytest.mark.parametrize("name", ("single_label", "single_label_accumulated"))
def test_single_label(
    request: pytest.FixtureRequest, name: str, world_size: int
) -> None:
    """A batch with one valid label on one rank (pitfalls B35, B37)."""
    fixture = {1: "one", 2: "two", 4: "four"}[world_size]
    _same_step(request.getfixturevalue("one"), request.getfixturevalue(fixture), name)


@pytest.mark.parametrize("name", ("single_label_fsdp", "single_label_hsdp"))
def test_single_label_on_one_data_rank(
    one: Launched, four: Launched, name: str
) -> None:
    """The other data-parallel rank has no label at all."""
    _same_step(one, four, name)


def _same_step(one: Launched, launched: Launched, name: str) -> None:
    expected, result = load_run(one, "single_label"), load_run(launched, name)
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    # The one rank with a label has the largest mean loss: that of the label.
    assert result["max_losses"] == pytest.approx(expected["losses"], rel=1e-6)
    gradients = result["gradients"]
    assert gradients.keys() == expected["gradients"].keys()
    for parameter, gradient in expected["gradients"].items():
        assert gradient.norm() > 0
        assert fro_error(gradients[parameter], gradient) < 2e-6, parameter
    everything = [
        torch.cat([x.flatten() for x in g.values()])
        for g in (gradients, expected["gradients"])
    ]
    assert fro_error(*everything) < 1e-6
    norm = everything[1].double().norm().item()
    # In fp32 the CPU's norm of a large tensor is good to four digits.
    assert result["grad_norms"] == pytest.approx([norm], rel=1e-4)

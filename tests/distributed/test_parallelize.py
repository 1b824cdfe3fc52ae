"""Models as training builds them: one process's results, and no work done twice."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import Launched, launch
from tests.distributed.model_worker import (
    MODES,
    ReferenceAttention,
    bare,
    batch,
    job,
    loss_of,
    single_process,
)
from tests.helpers import assert_close

LAYERS = 2
FORWARDS = {"none": 1, "selective": 1, "full": 2}
expected = cache(single_process)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("models")
    return launch("tests.distributed.model_worker", 2, folder)


def _result(launched: Launched, case: str, file: str) -> dict[str, Any]:
    launched.check(case)
    path: Path = launched.folder / f"{file}.pt"
    return torch.load(path, weights_only=False)


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("step", (0, 1))
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_equal_one_process(
    launched: Launched, mode: str, step: int
) -> None:
    result = _result(launched, mode, f"{mode}.step{step}")
    single = expected("mtraining_llama3", step)
    torch.testing.assert_close(result["loss"], single["loss"], rtol=1e-6, atol=0)
    assert result["gradients"].keys() == single["gradients"].keys()
    for name, gradient in single["gradients"].items():
        assert_close(result["gradients"][name], gradient, 1e-5)


@pytest.mark.parametrize("step", (0, 1))
@pytest.mark.parametrize("mode", MODES)
def test_searches_once_and_recomputes_with_the_same_pattern(
    launched: Launched, mode: str, step: int
) -> None:
    result = _result(launched, mode, f"{mode}.step{step}")
    single = expected("mtraining_llama3", step)["patterns"]
    assert len(result["searched"]) == LAYERS
    layers = [layer for layer, _ in result["forward"]]
    assert sorted(layers) == sorted([*range(LAYERS)] * FORWARDS[mode])
    for layer, pattern in result["forward"]:
        assert _same(pattern, result["searched"][layer])
        assert _same(pattern, single[layer][0]), "another pattern than one process"
    assert len(result["backward"]) == LAYERS
    for layer, pattern in enumerate(reversed(result["backward"])):
        assert _same(pattern, result["searched"][layer])


@pytest.mark.parametrize("mode", MODES)
def test_layers_and_steps_share_one_graph(launched: Launched, mode: str) -> None:
    for step in (0, 1):
        result = _result(launched, mode, f"{mode}.step{step}")
        assert result["breaks"] == {}
        assert result["graphs"] == 1, "a graph for each layer or step"


def test_tied_weights_stay_tied_under_fsdp(launched: Launched) -> None:
    result = _result(launched, "tied", "tied")
    single = expected("mtraining_qwen2", 0)
    torch.testing.assert_close(result["loss"], single["loss"], rtol=1e-6, atol=0)
    assert "output.weight" not in single["gradients"], "the tie is gone before"
    assert result["gradients"].keys() == single["gradients"].keys()
    for name, gradient in single["gradients"].items():
        assert_close(result["gradients"][name], gradient, 1e-5)
    assert result["tied"]
    assert torch.equal(*result["after"])


def test_tied_weights_move_as_in_one_process(launched: Launched) -> None:
    """The loss after a step of AdamW: the moved weight is used at both ends."""
    result = _result(launched, "tied", "tied")
    config = job("none", False, 1).sparse_attention
    model = bare("mtraining_qwen2", lambda layer: ReferenceAttention(layer, config))
    losses = []
    for step in range(2):
        tokens, labels = batch(step)
        loss = loss_of(model, tokens, labels) / (labels != -100).sum()
        losses.append(loss.item())
        if step == 0:
            loss.backward()
            torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert result["next_loss"].item() == pytest.approx(losses[1], rel=1e-4)
    assert abs(losses[1] - losses[0]) > 1e-3, "the step changed nothing"


def test_the_worker_ends(launched: Launched) -> None:
    assert launched.returncode == 0, launched.logs()

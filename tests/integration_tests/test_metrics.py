"""What a run logs is there, finite, and true under context parallelism."""

import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed.launch import Launched
from tests.distributed.train_worker import load_run
from tests.integration_tests.conftest import SEQ_LEN

STEPS = 4
LAYERS = 2
# Name and range of each metric of the attention.
ATTENTION = {
    "sparse/density": (0.01, 1.0),
    "sparse/recall": (0.01, 1.0),
    "sparse/block_density": (0.01, 1.0),
    "sparse/vertical_count": (24, 24),
    "sparse/slash_count": (4, 4),
    "ring/worker_imbalance": (1.0, 2.0),
    "ring/step_imbalance": (1.0, 2.0),
}
TITAN = {
    "loss_metrics/global_avg_loss": (1.0, 12.0),
    "loss_metrics/global_max_loss": (1.0, 12.0),
    "grad_norm": (1e-3, 100.0),
    "throughput(tps)": (1.0, 1e7),
    "tflops": (1e-9, 1e3),
    "mfu(%)": (1e-9, 100.0),
    "n_tokens_seen": (1, 1e6),
    "lr": (1e-9, 1.0),
}


@pytest.fixture(scope="module")
def events(two: Launched) -> EventAccumulator:
    two.check("metrics")
    files = list((two.folder / "metrics" / "tb").glob("**/events.out.tfevents.*"))
    assert len(files) == 1, "one rank writes"
    accumulator = EventAccumulator(str(files[0]))
    accumulator.Reload()
    return accumulator


def _names() -> list[str]:
    layers = [f"{name}/layer_{i}" for name in ATTENTION for i in range(LAYERS)]
    return [*TITAN, *ATTENTION, *layers]


@pytest.mark.parametrize("name", _names())
def test_in_tensorboard(events: EventAccumulator, name: str) -> None:
    scalars = events.Scalars(name)
    assert [scalar.step for scalar in scalars] == list(range(1, STEPS + 1))
    low, high = (TITAN | ATTENTION)[name.split("/layer_")[0]]
    for scalar in scalars:
        assert math.isfinite(scalar.value) and low <= scalar.value <= high, scalar


def test_mean_over_layers(two: Launched) -> None:
    for metrics in load_run(two, "metrics")["metrics"]:
        for name in ATTENTION:
            layers = [metrics[f"{name}/layer_{i}"] for i in range(LAYERS)]
            assert metrics[name] == pytest.approx(sum(layers) / LAYERS)
            assert f"{name}/layer_{LAYERS}" not in metrics


@pytest.mark.parametrize(
    "world, run, per_step",
    (
        ("one", "sparse", 1),
        ("two", "metrics", 1),
        ("four", "sparse", 1),
        ("four", "readers", 2),
    ),
)
def test_each_token_is_seen_once(
    request: pytest.FixtureRequest, world: str, run: str, per_step: int
) -> None:
    """`per_step` sequences a step, however many ranks share each."""
    result = load_run(request.getfixturevalue(world), run)
    seen = [metrics["n_tokens_seen"] for metrics in result["metrics"]]
    assert seen == [step * per_step * SEQ_LEN for step in result["steps"]]


def test_largest_loss_is_a_mean_of_one_rank(
    one: Launched, two: Launched, four: Launched
) -> None:
    """Of its own tokens: at least the mean over ranks, and not a share of it."""
    alone = load_run(one, "dense")
    assert alone["max_losses"] == pytest.approx(alone["losses"], rel=1e-6)
    for launched in (two, four):
        result = load_run(launched, "dense")
        for largest, mean in zip(result["max_losses"], result["losses"], strict=True):
            assert mean < largest < 1.1 * mean


def test_pattern_metrics_do_not_depend_on_ranks(
    one: Launched, two: Launched, four: Launched
) -> None:
    """The first step's, before rounding has moved any weight."""
    expected = load_run(one, "sparse")["metrics"][0]
    assert expected["sparse/density"] < 0.5
    assert expected["sparse/recall"] < 0.9
    for launched in (two, four):
        metrics = load_run(launched, "sparse")["metrics"][0]
        for name in ("density", "recall", "block_density"):
            key = f"sparse/{name}"
            assert metrics[key] == pytest.approx(expected[key], rel=1e-3)


def test_dense_metrics(one: Launched, two: Launched, four: Launched) -> None:
    """All is kept; a striped ring of W ranks of n blocks has a known imbalance."""
    for launched in (one, two, four):
        ranks, blocks = launched.world_size, 16
        metrics = load_run(launched, "dense")["metrics"][0]
        assert metrics["sparse/density"] == metrics["sparse/block_density"] == 1.0
        assert metrics["sparse/slash_count"] == blocks
        assert metrics["sparse/vertical_count"] == 0
        # Rank r has the rows r, r + W, ...; row i has i + 1 blocks.
        work = [sum(range(r + 1, blocks + 1, ranks)) for r in range(ranks)]
        expected = max(work) / (sum(work) / ranks)
        assert metrics["ring/worker_imbalance"] == pytest.approx(expected)

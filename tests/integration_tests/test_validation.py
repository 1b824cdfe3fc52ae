"""Validation says the loss of the data, and every rank reads what it should."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.config import ConfigManager

from mtraining_flex.data.loader import build_validation_dataloader
from mtraining_flex.layout import build_layout
from mtraining_flex.models.llama3 import Llama3, llama3_flavors
from tests.distributed.launch import ROOT, Launched
from tests.distributed.train_worker import load_run
from tests.integration_tests.conftest import SEQ_LEN, VALIDATED


@cache
def _batches(corpus: Path, ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Of each data-parallel rank, all batches of one pass."""
    flags = ["--job.custom_config_module=mtraining_flex.config", *VALIDATED]
    flags.append(f"--model.hf_assets_path={ROOT}/mtraining_flex/data/tokenizer")
    flags.append(f"--validation.dataset_path={corpus / 'valid.jsonl'}")
    job = ConfigManager().parse_args(flags)
    tokenizer = build_hf_tokenizer(job)
    return [
        [
            (inputs["input"], labels)
            for inputs, labels in build_validation_dataloader(ranks, r, tokenizer, job)
        ]
        for r in range(ranks)
    ]


@torch.no_grad()
def _expected(corpus: Path, ranks: int) -> float:
    """The mean over tokens of what all ranks can read in step, by SDPA."""
    model = Llama3(replace(llama3_flavors["tiny"], attn_type="sdpa"))
    torch.manual_seed(7)  # the trainer builds on the meta device, which draws nothing
    model.init_weights()
    data = _batches(corpus, ranks)
    steps = min(len(batches) for batches in data)
    total, count = 0.0, 0
    for batches in data:
        for tokens, labels in batches[:steps]:
            total += cross_entropy_loss(model(tokens), labels).item()
            count += int((labels != IGNORE_INDEX).sum())
    return total / count


@pytest.mark.parametrize("world, ranks", (("one", 1), ("two", 1), ("four", 2)))
def test_reports_the_loss_of_the_data(
    request: pytest.FixtureRequest, corpus: Path, world: str, ranks: int
) -> None:
    """After the first and the second step, from the same text; cp 1, 2, 2."""
    result = load_run(request.getfixturevalue(world), "validation")
    assert [step for step, _ in result["validation"]] == [1, 2]
    for _, metrics in result["validation"]:
        loss = metrics["validation_metrics/loss"]
        assert loss == pytest.approx(_expected(corpus, ranks), abs=2e-5)
    assert result["steps"] == [1, 2], "training goes on after a validation"


def test_the_data_is_uneven(corpus: Path) -> None:
    """What the test before relies on (pitfall B38): one rank runs out early."""
    (alone,), (first, second) = _batches(corpus, 1), _batches(corpus, 2)
    assert len(first) > len(second) > 1
    # The last batch is a smaller one, also in the last step of two uneven ranks.
    assert len(alone[-1][0]) == len(second[-1][0]) == 1
    assert len(first[len(second) - 1][0]) == 2


def test_context_peers_read_the_same(four: Launched) -> None:
    """Two data ranks of two context ranks each (pitfall B40)."""
    results = [load_run(four, "readers", rank) for rank in range(4)]
    read: dict[tuple[int, int], Tensor] = {}
    for result in results:
        place = (result["ranks"]["batch"], result["ranks"]["cp"])
        read[place] = torch.cat(result["inputs"])
        assert read[place].shape == (6, SEQ_LEN)
    assert sorted(read) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for data_rank in (0, 1):
        assert torch.equal(read[data_rank, 0], read[data_rank, 1])
    sequences = torch.cat([read[0, 0], read[1, 0]]).tolist()
    assert len({tuple(sequence) for sequence in sequences}) == 12, "a repeat"


def test_context_peers_share_each_sequence(four: Launched) -> None:
    layout = build_layout("striped", SEQ_LEN, 2, 16)
    for rank in range(4):
        result = load_run(four, "readers", rank)
        mine = layout.positions(result["ranks"]["cp"])
        for whole, local in zip(result["inputs"], result["local"], strict=True):
            assert torch.equal(local, whole[:, mine])


@pytest.mark.parametrize("world", ("one", "two", "two_again", "four"))
def test_the_worker_ends(request: pytest.FixtureRequest, world: str) -> None:
    launched: Launched = request.getfixturevalue(world)
    assert launched.returncode == 0, launched.logs()

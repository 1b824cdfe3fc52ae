"""The ring over real processes: transport, pattern, attention and its gradients."""

from functools import partial
from pathlib import Path

import pytest

from tests.distributed.launch import Launched, launch
from tests.distributed.ring_worker import cases

NAMES = [(world, name) for world in (2, 4) for name, _ in cases(world)]
EIGHT = [name for name, _ in cases(8)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Launched]:
    start = partial(launch, "tests.distributed.ring_worker", timeout=120)
    folders: dict[int, Path] = {w: tmp_path_factory.mktemp(f"w{w}") for w in (2, 4)}
    return {world: start(world, folder) for world, folder in folders.items()}


@pytest.mark.parametrize("world_size, case", NAMES)
def test_ring(launched: dict[int, Launched], world_size: int, case: str) -> None:
    launched[world_size].check(case)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("w8")
    return launch("tests.distributed.ring_worker", 8, folder, timeout=400)


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT)
def test_eight_ranks(eight: Launched, case: str) -> None:
    eight.check(case)


@pytest.mark.parametrize("world_size", (2, 4))
def test_the_worker_ends(launched: dict[int, Launched], world_size: int) -> None:
    assert launched[world_size].returncode == 0, launched[world_size].logs()

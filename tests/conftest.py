"""Set up before any test module is imported: the device, the path, the threads."""

import sys
from pathlib import Path

import pytest
import torch

from mtraining_flex import cpu_device

cpu_device.install()  # before any test module imports torchtitan
torch.set_num_threads(2)
sys.path.insert(0, str(Path(__file__).parent.parent))  # for `tests.helpers`


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)

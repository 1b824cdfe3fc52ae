"""Set up before any test module is imported: the device, the path, the threads.

Without a GPU, Triton kernels run in its interpreter. Triton reads the variable when a
kernel is defined, its own library included: it is set here, before anything that a test
module imports has imported triton.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mtraining_flex import cpu_device

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "too late for the interpreter"
    os.environ["TRITON_INTERPRET"] = "1"
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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small tensors, and for simulated ranks, which are threads already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

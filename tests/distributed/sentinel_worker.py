"""Worker: a run whose ring goes wrong at a step, and the same run going on after it.

Called with the folder of a plan (see `train_worker`) of two runs: the first fails, the
second continues from what it has left.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import mtraining_flex  # noqa: F401  before torchtitan

# isort: split
import torch.distributed as dist
from torch import Tensor
from torchtitan.tools.logging import init_logger

from mtraining_flex import cpu_device, train_spec
from mtraining_flex.ring.comm import GroupComm
from mtraining_flex.sentinel import SentinelError, sentinel
from tests.distributed.launch import run_cases
from tests.distributed.train_worker import Run, train

WRONG_STEP = 4


class Stale:
    """A transfer that arrives, and is not used."""

    def __init__(self, transfer: Any, sent: Tensor):
        self.transfer, self.sent = transfer, sent

    def wait(self) -> Tensor:
        self.transfer.wait()
        return self.sent


def failing(folder: Path, run: Run) -> None:
    """Keys do not travel at `WRONG_STEP`; every rank must end with the same message."""
    hop = GroupComm.hop

    def stale(comm: GroupComm, direction: str, x: Tensor) -> Any:
        transfer = hop(comm, direction, x)
        check = sentinel._check
        wrong = check is not None and check.step == WRONG_STEP and direction == "kv"
        return Stale(transfer, x) if wrong else transfer

    with mock.patch.object(GroupComm, "hop", stale):
        try:
            train(folder, run)
        except SentinelError as error:
            message = str(error)
        else:
            raise AssertionError("the run has not noticed")
    (folder / f"message.rank{dist.get_rank()}").write_text(message)


def main() -> None:
    init_logger()
    folder = Path(sys.argv[1])
    first, second = (
        Run(**run) for run in json.loads((folder / "plan.json").read_text())
    )
    train_spec.register()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    cases = [
        (first.name, lambda: failing(folder, first)),
        (second.name, lambda: train(folder, second)),
    ]
    run_cases(folder, cases)
    dist.destroy_process_group()
    cpu_device.leave()


if __name__ == "__main__":
    main()

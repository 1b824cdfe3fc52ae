"""`./run_train.sh` with the debug configuration, as in the README."""

import math
import re
from pathlib import Path

import pytest

from tests.distributed.launch import run

STEPS = 8


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Shorter sequences than its own; all else is the debug run's."""
    folder: Path = tmp_path_factory.mktemp("debug")
    flags = [
        f"--job.dump_folder={folder}",
        f"--training.steps={STEPS}",
        "--training.seq_len=1024",
        "--sparse_attention.max_slash=4",  # of 8 blocks, as 16 are of its own 32
        "--metrics.log_freq=1",
        "--metrics.disable_color_printing",
    ]
    code, output = run(["./run_train.sh", *flags], timeout=240)
    assert code == 0, output[-5000:]
    assert list(folder.glob("tb/**/events.out.tfevents.*"))
    return output


def test_the_loss_falls(output: str) -> None:
    found = re.findall(r"step: +(\d+) +loss: +(\S+)", output)
    assert [int(step) for step, _ in found] == list(range(1, STEPS + 1))
    losses = [float(loss) for _, loss in found]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.1


def test_it_is_the_debug_run(output: str) -> None:
    """Two ranks, compiled blocks, the ring, selective checkpointing, FSDP2."""
    for line in (
        "pattern vertical_slash, layout striped, rotation ring over 2 ranks",
        "Applied selective activation checkpointing",
        "Compiling each TransformerBlock with torch.compile",
        "Applied FSDP2 over 2 ranks",
        "Training completed",
        "Process group destroyed",
    ):
        assert line in output
    assert len(re.findall(r"step: +\d+ +attention +density: 0\.\d+", output)) == STEPS

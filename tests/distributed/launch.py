"""Start workers under torchrun, and read what each of their cases came to.

A spawn costs seconds, a case costs little: a worker runs a list of named cases one
after the other in one process group. Every rank leaves a file for each case, so that a
failure is reported by its own test, with the traceback of the rank that failed.
"""

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parent.parent.parent
TAIL = 3000  # characters of a log that a message shows


def environment(**extra: str) -> dict[str, str]:
    """Of a child: the CPU, one thread, this repository, this interpreter's programs."""
    programs = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", "")]),
        **extra,
    }


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def run(command: list[str], timeout: float, **extra: str) -> tuple[int, str]:
    """Exit code and output of a command; ended with its children after `timeout` s."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # torchrun's workers have sessions of their own, and only it ends them.
        process.terminate()
        try:
            output, _ = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return -signal.SIGTERM, f"{output}\nended after {timeout} s: a hang?"
    return process.returncode, output


@dataclass(frozen=True)
class Launched:
    """What a worker has left behind."""

    folder: Path
    world_size: int
    returncode: int
    output: str

    def check(self, case: str) -> None:
        """Assert that a case ended well on every rank."""
        for rank in range(self.world_size):
            file = _outcome(self.folder, case, rank)
            if not file.exists():
                raise AssertionError(
                    f"case '{case}' did not end on rank {rank} "
                    f"(exit code {self.returncode})\n{self.logs()}"
                )
            outcome = file.read_text()
            assert outcome == "ok", f"case '{case}', rank {rank}:\n{outcome}"

    def logs(self) -> str:
        """The end of what each rank wrote, and of what torchrun did."""
        parts = [
            f"--- rank {file.parent.name}\n{file.read_text()[-TAIL:]}"
            for file in sorted((self.folder / "logs").glob("**/stderr.log"))
        ]
        return "\n".join([*parts, "--- torchrun", self.output[-TAIL:]])


def launch(
    module: str, world_size: int, folder: Path, *args: str, timeout: float = 240.0
) -> Launched:
    """Run `python -m module folder *args` on `world_size` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={world_size}", "--redirects=3"]
    command += [f"--log_dir={folder / 'logs'}", "-m", module, str(folder), *args]
    return Launched(folder, world_size, *run(command, timeout))


def run_cases(folder: Path, cases: Iterable[tuple[str, Callable[[], None]]]) -> None:
    """In a worker: run the cases, note how each ended, stop at the first failure.

    A rank that went on alone would leave the others waiting.
    """
    for name, case in cases:
        outcome = "ok"
        try:
            case()
        except BaseException:
            outcome = traceback.format_exc()
            raise
        finally:
            _outcome(folder, name, dist.get_rank()).write_text(outcome)


def _outcome(folder: Path, case: str, rank: int) -> Path:
    return folder / f"{case}.rank{rank}.outcome"

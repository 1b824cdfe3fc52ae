"""`./run_train.sh`: the debug run of the README, what is refused, and how a run ends.

Two nodes that train are in tests/distributed/test_two_nodes.py.
"""

import math
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, environment, free_port, run

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


# --- more than one node: what is refused, before Python starts ------------------------

TWO = {"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": "node0:29500"}


@pytest.mark.parametrize(
    "given, parts",
    (
        ({"NNODES": "0"}, ["NNODES ('0')"]),
        ({"NNODES": "two"}, ["NNODES ('two')"]),
        ({"NODE_RANK": ""}, ["NNODES (2) needs NODE_RANK, 0 to 1"]),
        ({"NODE_RANK": "2"}, ["NODE_RANK ('2')", "0 to 1", "NNODES (2)"]),
        ({"NODE_RANK": "-1"}, ["NODE_RANK ('-1')", "0 to 1"]),
        ({"NNODES": "", "NODE_RANK": "1"}, ["NODE_RANK ('1')", "NNODES (1)"]),
        ({"RDZV_ENDPOINT": ""}, ["NNODES (2) needs RDZV_ENDPOINT", "node 0"]),
        ({"RDZV_ENDPOINT": "node0"}, ["RDZV_ENDPOINT ('node0')", "host:port"]),
        ({"RDZV_ENDPOINT": ":29500"}, ["RDZV_ENDPOINT (':29500')"]),
        ({"RDZV_ENDPOINT": "node0:65536"}, ["RDZV_ENDPOINT ('node0:65536')"]),
        ({"JOIN_TIMEOUT": "10m"}, ["JOIN_TIMEOUT ('10m')", "seconds"]),
    ),
)
def test_refused(given: dict[str, str], parts: list[str]) -> None:
    begin = time.monotonic()
    code, output = run(["./run_train.sh"], timeout=20, **TWO | given)
    assert code == 2
    lines = output.splitlines()
    assert len(lines) == 1 and lines[0].startswith("run_train.sh: ")
    for part in parts:
        assert part in output
    assert time.monotonic() - begin < 2


# --- more than one node: those that do not meet ---------------------------------------


def _last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "node_rank, parts",
    (
        ("0", ["node 0 of 2", "the other nodes did not come", "JOIN_TIMEOUT (2 s)"]),
        ("1", ["node 1 of 2", "node 0 did not answer", "JOIN_TIMEOUT (2 s)"]),
    ),
)
def test_a_node_that_waits_alone(node_rank: str, parts: list[str]) -> None:
    endpoint = f"localhost:{free_port()}"
    given = TWO | {"NODE_RANK": node_rank, "RDZV_ENDPOINT": endpoint}
    begin = time.monotonic()
    code, output = run(
        ["./run_train.sh"], timeout=60, **given, JOIN_TIMEOUT="2", NGPU="1"
    )
    assert code == 1
    for part in (*parts, endpoint):
        assert part in _last_line(output)
    assert "Traceback" not in output
    assert time.monotonic() - begin < 30


def test_ctrl_c_while_waiting_for_the_others() -> None:
    port = free_port()
    given = TWO | {"RDZV_ENDPOINT": f"localhost:{port}", "JOIN_TIMEOUT": "50"}
    # A child inherits that SIGINT is ignored, as it is in a shell's background jobs.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        launcher = subprocess.Popen(
            ["./run_train.sh"], cwd=ROOT, env=environment(**given, NGPU="1")
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert _within(40, lambda: _listens(port)), "node 0 did not listen"
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=5) == -signal.SIGINT
    finally:
        launcher.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def test_a_port_that_is_in_use() -> None:
    with socket.create_server(("localhost", 0)) as holder:
        given = TWO | {"RDZV_ENDPOINT": f"localhost:{holder.getsockname()[1]}"}
        code, output = run(["./run_train.sh"], timeout=60, **given, NGPU="1")
    assert code == 1
    assert "is in use on this node" in _last_line(output)


# --- how a run ends -------------------------------------------------------------------


def _idle(folder: Path, **extra: str) -> "subprocess.Popen[str]":
    given = {"TRAIN_FILE": "tests.distributed.idle_worker", "IDLE_FOLDER": str(folder)}
    return subprocess.Popen(
        ["./run_train.sh"],
        cwd=ROOT,
        env=environment(NGPU="2", **given, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM, signal.SIGKILL))
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    """SIGKILL, too, which the launcher cannot pass on."""
    launcher = _idle(tmp_path)
    pids: list[int] = []
    try:
        files = [tmp_path / f"{rank}.pid" for rank in (0, 1)]
        there = _within(60, lambda: all(f.exists() and f.read_text() for f in files))
        assert there, "the ranks did not start"
        pids = [int(file.read_text()) for file in files]
        assert all(_alive(pid) for pid in pids)
        os.kill(launcher.pid, number)
        output, _ = launcher.communicate(timeout=20)
        assert _within(5, lambda: not any(_alive(pid) for pid in pids))
    finally:
        launcher.kill()
        for pid in filter(_alive, pids):
            os.kill(pid, signal.SIGKILL)
    if number == signal.SIGKILL:
        assert launcher.returncode == -number
    else:
        assert launcher.returncode == 128 + number
        assert f"the run was stopped by {number.name}" in _last_line(output)


@pytest.mark.parametrize(
    "fails, last",
    (
        ("1:raise", "the run was stopped: rank 1 failed: ValueError: planted"),
        ("1:exit", "rank 1 ended with exit code 3; LOG_RANK=1 shows what it writes"),
        ("0:kill", "rank 0 ended by SIGKILL"),
    ),
)
def test_the_last_line_names_the_rank(tmp_path: Path, fails: str, last: str) -> None:
    launcher = _idle(tmp_path, IDLE_FAILS=fails)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert last in _last_line(output)

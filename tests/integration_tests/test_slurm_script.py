"""`recipes/slurm_train.sh` under a SLURM that is four lines of shell.

The fake `srun` starts its command once for each node, with that node's number; the fake
`scontrol` names the hosts and notes which job it was asked to put back.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, environment, free_port

SRUN = """#!/usr/bin/env bash
echo "$@" >> "$FAKE/srun.log"
while [[ $1 == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  SLURM_NODEID=$node "$@" & pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do
  code=0; wait "$pid" || code=$?
  if [ "$code" -gt "$worst" ]; then worst=$code; fi
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$FAKE/scontrol.log"
if [ "$1 $2" = "show hostnames" ]; then printf '%s\\n' $FAKE_HOSTS; fi
"""
# In place of run_train.sh: leaves what it was given.
TRAIN = """#!/usr/bin/env bash
{
  for name in NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID SRUN_CPUS_PER_TASK; do
    echo "$name=${!name:-}"
  done
  printf '[%s]\\n' "$@"
} > "$FAKE/node$NODE_RANK"
sleep "${FAKE_SLEEP:-0}"
exit "${FAKE_CODE:-0}"
"""
JOB = {
    "SLURM_JOB_ID": "4000123",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07,09]",
    "FAKE_HOSTS": "gpu07 gpu09",
}


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on two nodes, submitted from a folder of its own."""
    programs = tmp_path / "programs"
    programs.mkdir()
    _write(programs / "srun", SRUN)
    _write(programs / "scontrol", SCONTROL)
    submit = tmp_path / "submit"
    submit.mkdir()
    _write(submit / "run_train.sh", TRAIN)
    # SLURM runs a copy.
    shutil.copy(ROOT / "recipes" / "slurm_train.sh", tmp_path / "slurm_script")
    plain = environment(FAKE=str(tmp_path), SLURM_SUBMIT_DIR=str(submit), **JOB)
    return plain | {"PATH": f"{programs}{os.pathsep}{plain['PATH']}"}


def _start(slurm: dict[str, str], *args: str, **extra: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [f"{slurm['FAKE']}/slurm_script", *args],
        cwd="/",
        env=slurm | extra,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _run(slurm: dict[str, str], *args: str, **extra: str) -> tuple[int, str]:
    process = _start(slurm, *args, **extra)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def _requeued(slurm: dict[str, str]) -> bool:
    return "requeue 4000123" in (Path(slurm["FAKE"]) / "scontrol.log").read_text()


def test_what_each_node_is_told(slurm: dict[str, str]) -> None:
    args = ["--training.steps=3", "a b", ""]
    code, output = _run(slurm, *args, SLURM_CPUS_PER_TASK="12")
    assert (code, output) == (0, "")
    for node in (0, 1):
        assert (Path(slurm["FAKE"]) / f"node{node}").read_text().splitlines() == [
            "NNODES=2",
            f"NODE_RANK={node}",
            f"RDZV_ENDPOINT=gpu07:{15000 + 4000123 % 15000}",
            "RDZV_ID=4000123",
            "SRUN_CPUS_PER_TASK=12",
            "[--training.steps=3]",
            "[a b]",
            "[]",
        ]
    flags = (Path(slurm["FAKE"]) / "srun.log").read_text()
    assert flags.startswith("--ntasks=2 --ntasks-per-node=1 ")
    log = (Path(slurm["FAKE"]) / "scontrol.log").read_text()
    assert log == "show hostnames gpu[07,09]\n"


def test_a_port_of_ones_own(slurm: dict[str, str]) -> None:
    assert _run(slurm, RDZV_PORT="29500")[0] == 0
    assert "=gpu07:29500\n" in (Path(slurm["FAKE"]) / "node1").read_text()


@pytest.mark.parametrize(
    "code, restarts, before, again",
    (
        ("1", "0", "", False),
        ("1", "2", "", True),
        ("1", "2", "1", True),
        ("1", "2", "2", False),
        ("137", "1", "", True),
        ("0", "1", "", False),
        ("2", "1", "", False),  # refused
        ("143", "1", "", False),  # scancel
    ),
)
def test_back_into_the_queue(
    slurm: dict[str, str], code: str, restarts: str, before: str, again: bool
) -> None:
    given = {"FAKE_CODE": code, "RESTARTS": restarts, "SLURM_RESTART_COUNT": before}
    result, output = _run(slurm, **given)
    assert result == int(code)
    assert _requeued(slurm) == again
    if again:
        assert f"restart {int(before or 0) + 1} of {restarts}" in output
    elif code == "1":
        assert f"of RESTARTS ({restarts}) restarts are used" in output


@pytest.mark.parametrize("restarts", ("0", "1"))
def test_the_time_limit(slurm: dict[str, str], restarts: str) -> None:
    """SLURM sends SIGUSR1 to the script alone; the training goes on meanwhile."""
    process = _start(slurm, FAKE_SLEEP="1.5", FAKE_CODE="1", RESTARTS=restarts)
    file = Path(slurm["FAKE"]) / "node1"
    end = time.monotonic() + 20
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1, "the code of the training"
    assert _requeued(slurm) == (restarts == "1")
    assert "the time limit is near" in output
    log = (Path(slurm["FAKE"]) / "scontrol.log").read_text()
    assert log.count("requeue") <= 1


@pytest.mark.parametrize(
    "given, message",
    (
        ({"SLURM_JOB_ID": ""}, "no SLURM_JOB_ID: start with sbatch"),
        ({"SLURM_SUBMIT_DIR": "/"}, "no run_train.sh in /: submit from the repository"),
        ({"RESTARTS": "-1"}, "RESTARTS ('-1') must be a number, at least 0"),
    ),
)
def test_refused(slurm: dict[str, str], given: dict[str, str], message: str) -> None:
    assert _run(slurm, **given) == (2, f"slurm_train.sh: {message}\n")


def test_the_real_launchers_meet(slurm: dict[str, str], tmp_path: Path) -> None:
    """run_train.sh itself: four ranks on two "nodes", with nothing to train."""
    code, output = _run(
        slurm,
        SLURM_SUBMIT_DIR=str(ROOT),
        FAKE_HOSTS="localhost gpu09",
        RDZV_PORT=str(free_port()),
        JOIN_TIMEOUT="30",
        NGPU="2",
        TRAIN_FILE="tests.distributed.idle_worker",
        IDLE_FOLDER=str(tmp_path),
        IDLE_SECONDS="0",
    )
    assert code == 0, output
    files = sorted(file.name for file in tmp_path.glob("*.pid"))
    assert files == [f"{rank}.pid" for rank in range(4)]

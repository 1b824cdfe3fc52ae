"""The last line of a run that has failed: which rank, why, and what to do."""

import json
import signal
import time
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from recipes.launch import not_met, rank_failure

# What gloo was seen to say, and NCCL would by its sources.
CLOSED = (
    "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection "
    "closed by peer [10.77.0.2]:33700. This is typically caused by a remote worker "
    "crashing. Check the logs of the remote worker before reporting an error."
)
RESET = (
    "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:537] Read error "
    "[10.77.0.2]:36491: Connection reset by peer. This is typically caused by a remote "
    "worker hanging or bugs in the application."
)
NCCL = (
    "DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or there "
    "was a network error, NCCL version 2.28.9\nncclRemoteError: A call failed possibly "
    "due to a network error or a remote process exiting prematurely."
)
TIMED_OUT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting 10000ms for recv operation to complete"
)
REFUSED = (
    "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/"
    "transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, "
    "remote=[127.0.0.1]:4290$0"
)
OWN = "ValueError: training.seq_len (1000) must be\na multiple of 512"


@pytest.fixture
def failure(tmp_path: Path):
    """A failure as torchrun makes it of a rank's file, or of a process without one."""

    def make(
        message: str | None = None, exitcode: int = 1, rank: int = 0, after: int = 0
    ) -> ProcessFailure:
        file = tmp_path / f"{rank}.json"
        if message is not None:
            extra = {"py_callstack": "...", "timestamp": str(int(time.time()) + after)}
            file.write_text(
                json.dumps({"message": {"message": message, "extraInfo": extra}})
            )
        return ProcessFailure(rank % 2, 4711, exitcode, str(file))

    return make


@pytest.mark.parametrize("message", (CLOSED, RESET, NCCL))
def test_a_lost_node(failure, message: str) -> None:
    line = rank_failure({3: failure(message, rank=3)}, nodes=2)
    assert line.startswith("rank 3 lost its connection to another rank (")
    for part in ("another node probably ended first", "same command", "checkpoint"):
        assert part in line
    assert "\n" not in line and "typically" not in line
    assert "another rank probably" in rank_failure({3: failure(message)}, nodes=1)


@pytest.mark.parametrize(
    "message, parts",
    (
        (TIMED_OUT, ["comm.train_timeout_seconds", "10000ms", "another node hangs"]),
        (REFUSED, ["could not connect", "[127.0.0.1]", "GLOO_SOCKET_IFNAME"]),
        (OWN, ["rank 0 failed: ValueError: training.seq_len (1000) must be a multi"]),
        # A dataset that cannot be read is not a lost rank.
        ("ConnectionError: Read timed out", ["rank 0 failed: ConnectionError"]),
        ("OSError: Connection reset by peer", ["rank 0 failed: OSError"]),
    ),
)
def test_what_a_rank_has_recorded(failure, message: str, parts: list[str]) -> None:
    line = rank_failure({0: failure(message)}, nodes=2)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    "exitcode, parts",
    (
        (-signal.SIGKILL, ["rank 0 ended by SIGKILL", "memory", "checkpoint"]),
        (-signal.SIGSEGV, ["rank 0 ended by SIGSEGV. The same"]),
        (-signal.SIGABRT, ["rank 0 ended by SIGABRT", "NCCL", "another node"]),
        (2, ["rank 0 ended with exit code 2", "LOG_RANK=0"]),
    ),
)
def test_what_a_rank_has_not_recorded(failure, exitcode: int, parts: list[str]) -> None:
    line = rank_failure({0: failure(exitcode=exitcode)}, nodes=2)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    "cause, others",
    (
        # Whoever was first: an error of one's own, then a lost rank.
        ((OWN, 1), [(CLOSED, 1), (TIMED_OUT, 1), (None, -signal.SIGTERM)]),
        ((None, -signal.SIGKILL), [(CLOSED, 1), (None, -signal.SIGTERM)]),
        ((None, 2), [(None, -signal.SIGTERM), (RESET, 1)]),
        ((CLOSED, 1), [(TIMED_OUT, 1), (None, -signal.SIGABRT)]),
        ((TIMED_OUT, 1), [(None, -signal.SIGTERM), (None, -signal.SIGABRT)]),
    ),
)
def test_the_cause_comes_first(failure, cause, others) -> None:
    ranks = [*others, cause]
    # The cause is the last of the list and the latest by its time stamp.
    failures = {
        rank: failure(message, exitcode, rank=rank, after=rank)
        for rank, (message, exitcode) in enumerate(ranks)
    }
    assert rank_failure(failures, nodes=2).startswith(f"rank {len(others)} ")


def test_the_earlier_of_two_alike(failure) -> None:
    failures = {0: failure(CLOSED, rank=0, after=5), 1: failure(RESET, rank=1)}
    assert rank_failure(failures, nodes=2).startswith("rank 1 lost")


def test_a_long_message_is_cut(failure) -> None:
    assert len(rank_failure({0: failure("E: " + "x" * 5000)}, nodes=1)) < 500


@pytest.mark.parametrize(
    "error, parts",
    (
        (
            DistStoreError(
                "Timed out after 5 seconds waiting for clients. 1/2 joined."
            ),
            ["did not come", "node0:29500", "JOIN_TIMEOUT (4 s)", "1/2 joined"],
        ),
        (
            DistNetworkError(
                "The client socket has timed out after 4000ms while trying to connect "
                "to (node0, 29500)."
            ),
            ["node 0 did not answer", "node0:29500", "JOIN_TIMEOUT (4 s)"],
        ),
        (
            DistNetworkError("... code: -98, name: EADDRINUSE, message: in use"),
            ["port", "node0:29500", "in use"],
        ),
        (DistNetworkError("Connection reset by peer"), ["not all come", "reset by"]),
    ),
)
def test_nodes_that_do_not_meet(error: Exception, parts: list[str]) -> None:
    args = Namespace(rdzv_endpoint="node0:29500", nnodes="2", rdzv_conf="timeout=4")
    line = not_met(error, args)
    for part in parts:
        assert part in line
    assert "\n" not in line

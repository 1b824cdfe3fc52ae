"""torchrun, whose last line says in plain words why it ended.

python -m recipes.launch ...          takes what torchrun takes; run_train.sh calls it

torchrun ends with a traceback of its own, and on a lost node names only the process
that noticed. This runs the same launcher and prints one line at the end, about this
node. It exits with 0, with 1 after a failure, or with 128 plus the number of the signal
that ended it.

Ranks that `die_with_agent` end with their launcher also when that is killed. Without it
they would train on, unwatched, and the other nodes would never notice.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_AGENT = "MTRAINING_AGENT_PID"

_LONGEST = 400  # characters of an error that the last line repeats
_RESUME = (
    "The same command, on every node, goes on from the last checkpoint if there is one"
)


class Kind(IntEnum):
    """What a rank's failure is. The smallest of a node's is the cause of the others."""

    OWN = 0  # an error of its own
    UNREACHED = 1  # could not connect to another rank
    LOST = 2  # another rank is gone
    LATE = 3  # another rank does not answer
    ABORTED = 4  # NCCL's watchdog does not say which of the two
    ENDED = 5  # by the launcher, after another


# By these an error of gloo, NCCL or torch's store is known, and what it says.
_TRANSPORTS = ("gloo", "Gloo", "NCCL", "TCPStore", "DistNetworkError", "DistStoreError")
_WORDS = {
    Kind.UNREACHED: ("connectFullMesh", "Connection refused", "No route to host"),
    Kind.LOST: (
        "closed by peer",
        "reset by peer",
        "Broken pipe",
        "remote process exited",
        "failed to recv, got 0 bytes",
    ),
    Kind.LATE: ("Timed out waiting", "timed out", "timeout"),
}


def die_with_agent() -> None:
    """In a rank: let the kernel end this process when its launcher is gone (Linux).

    torchrun gives each rank a session of its own, so that no signal to the launcher's
    reaches it. Nothing is done in a process that `recipes.launch` has not started.
    """
    agent = os.environ.get(_AGENT)
    if agent is None or sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1  # linux/prctl.h
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(agent):
        raise RuntimeError(
            f"the launcher (pid {agent}) was gone before this rank began"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments; returns the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python's own handler does not run while torch waits for the other nodes;
        # torchrun sets another one before it starts a rank.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Not above: a rank imports this module for `die_with_agent` alone.
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = run.parse_args(argv)
    os.environ[_AGENT] = str(os.getpid())
    try:
        run.run(args)
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # torchrun's table of the ranks that failed
        return _stop(args, f": {rank_failure(error.failures, _nodes(args))}")
    except SignalException as error:
        _stop(args, f" by {error.sigval.name}; its ranks have ended")
        return 128 + error.sigval
    except DistError as error:
        return _stop(args, f": {not_met(error, args)}")
    return 0


def _nodes(args: Any) -> int:
    return int(args.nnodes.split(":")[-1])


def _stop(args: Any, why: str) -> int:
    nodes = _nodes(args)
    who = "the run" if nodes == 1 else f"node {args.node_rank} of {nodes}"
    print(f"run_train.sh: {who} was stopped{why}", file=sys.stderr, flush=True)
    return 1


def rank_failure(failures: "Mapping[int, ProcessFailure]", nodes: int) -> str:
    """What has gone wrong on this node, and what to do.

    Args:
        failures: by global rank, of the ranks of this node that have ended with an
            error or a signal.
        nodes: of the run.
    """
    kinds = {rank: _kind(failure) for rank, failure in failures.items()}
    rank = min(failures, key=lambda r: (kinds[r], failures[r].timestamp))
    return f"rank {rank} {_describe(kinds[rank], failures[rank], nodes)}"


def _describe(kind: Kind, failure: "ProcessFailure", nodes: int) -> str:
    """What the rank did, and what follows."""
    said, other = _said(failure), "rank" if nodes == 1 else "node"
    match kind:
        case Kind.UNREACHED:
            return (
                f"could not connect to another rank ({said}). If no other {other} has "
                "ended before, export GLOO_SOCKET_IFNAME (on GPUs also "
                "NCCL_SOCKET_IFNAME) with the interface at which this node is reached"
            )
        case Kind.LOST:
            return (
                f"lost its connection to another rank ({said}): another {other} "
                f"probably ended first, see what it wrote. {_RESUME}"
            )
        case Kind.LATE:
            return (
                "waited for another rank longer than comm.train_timeout_seconds (in "
                f"the first step, comm.init_timeout_seconds) allows ({said}): another "
                f"{other} hangs or cannot be reached any more. {_RESUME}"
            )
        case Kind.ABORTED:
            return (
                "ended by SIGABRT. So ends a rank whose NCCL transfer failed or took "
                f"too long: another {other} probably ended or hung first. {_RESUME}"
            )
    if _recorded(failure):
        return f"failed: {said}"
    if failure.exitcode > 0:
        return (
            f"ended with exit code {failure.exitcode}; "
            f"LOG_RANK={failure.local_rank} shows what it writes"
        )
    killed = failure.exitcode == -signal.SIGKILL
    why = " (as the kernel does when memory runs out)" if killed else ""
    return f"ended by {failure.signal_name()}{why}. {_RESUME}"


def _kind(failure: "ProcessFailure") -> Kind:
    if not _recorded(failure):
        ends = {-signal.SIGABRT: Kind.ABORTED, -signal.SIGTERM: Kind.ENDED}
        return ends.get(failure.exitcode, Kind.OWN)
    said = _said(failure)
    if any(name in said for name in _TRANSPORTS):
        for kind, words in _WORDS.items():
            if any(word in said for word in words):
                return kind
    return Kind.OWN


def _recorded(failure: "ProcessFailure") -> bool:
    """Whether the rank has left its exception (`record` in `recipes.train`)."""
    return isinstance(failure.message, dict)


def _said(failure: "ProcessFailure") -> str:
    """A failure's message in one line, without its traceback and gloo's advice."""
    message: Any = failure.message
    said = message["message"] if _recorded(failure) else message
    return _one_line(said.split(" This is typically caused")[0]).rstrip(".")


def _one_line(message: Any) -> str:
    line = " ".join(str(message).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def not_met(error: Exception, args: Any) -> str:
    """Why the nodes have not come together, and what to change."""
    said = _one_line(error)
    at = f"RDZV_ENDPOINT ({args.rdzv_endpoint})"
    within = f"JOIN_TIMEOUT ({args.rdzv_conf.removeprefix('timeout=')} s)"
    if "EADDRINUSE" in said:
        return (
            f"the port of {at} is in use on this node: end the run that holds it, or "
            "take another port on all nodes"
        )
    if "waiting for clients" in said:
        return (
            f"the other nodes did not come to {at} within {within}: start all "
            f"{_nodes(args)} with the same RDZV_ENDPOINT ({said})"
        )
    if "trying to connect" in said:
        return (
            f"node 0 did not answer at {at} within {within}: it must be running, and "
            f"this must be its host and port as seen from here ({said})"
        )
    return f"the nodes did not all come together at {at} within {within} ({said})"


if __name__ == "__main__":
    sys.exit(main())

"""Two nodes of two processes: they join, train, notice a lost node, and resume.

Two launchers on this machine through run_train.sh, each in a network namespace of its
own where root allows (`recipes.netns`), or else side by side. gloo on the CPU, the tiny
model in fp32, one ring of four over both nodes with `two_level`.

Three runs of the same job: on one node, without interruption; on two nodes, of which
one is killed; and the second again, from its checkpoint. In a fourth the cable between
the nodes is pulled.
"""

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.netns import Nodes, Unavailable, two_nodes
from tests.distributed.launch import ROOT, TAIL, environment, free_port, run
from tests.integration_tests.conftest import SEQ_LEN, SPARSE, write_documents

STEPS = 14
INTERVAL = 3  # steps between checkpoints
KILLED_AFTER = 5  # steps
START_S = 90.0  # from the launch to the first steps
NOTICE_S = 20.0  # from the death of a node to the end of the other
TIMEOUT_S = 6  # comm.train_timeout_seconds
FIGURES = ("loss_metrics/global_avg_loss", "grad_norm")


# --- nodes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where the two nodes are: in two namespaces, or both here."""

    network: Nodes | None

    def command(self, node: int) -> list[str]:
        return [] if self.network is None else self.network.command(node)

    def settings(self, node: int, port: int) -> dict[str, str]:
        """What a user sets on a node."""
        host, interface = "localhost", "lo"
        if self.network is not None:
            host, interface = self.network.address(0), self.network.interface()
        return {
            "NNODES": "2",
            "NODE_RANK": str(node),
            "RDZV_ENDPOINT": f"{host}:{port}",
            "JOIN_TIMEOUT": "60",
            "GLOO_SOCKET_IFNAME": interface,
        }


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with ExitStack() as stack:
        try:
            network = stack.enter_context(two_nodes())
        except Unavailable:
            network = None
        yield Place(network)


@dataclass
class Agent:
    """The launcher of one node, and what it has written so far."""

    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait(self, timeout: float) -> int:
        """Exit code, when all output is read."""
        code = self.process.wait(timeout)
        self.reader.join(10)
        return code

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def printed(self) -> dict[int, tuple[str, str]]:
        """Loss and gradient norm of each step, as logged."""
        rows = re.findall(r"step: +(\d+) +loss: +(\S+) +grad_norm: +(\S+)", self.output)
        return {int(step): (loss, norm) for step, loss, norm in rows}


@dataclass(frozen=True)
class Job:
    """A training run that can be started again: the same flags in the same folder."""

    folder: Path
    corpus: Path

    @property
    def flags(self) -> list[str]:
        return [
            f"--job.dump_folder={self.folder}",
            "--model.flavor=tiny",
            "--training.dataset=local",
            f"--training.dataset_path={self.corpus}",
            f"--training.seq_len={SEQ_LEN}",
            f"--training.steps={STEPS}",
            "--training.mixed_precision_param=float32",
            "--parallelism.context_parallel_degree=4",
            "--ring.rotation=two_level",
            "--activation_checkpoint.mode=none",
            "--compile.no-enable",
            "--sparse_attention.granularity=16",
            *SPARSE,
            "--metrics.log_freq=1",
            "--metrics.disable_color_printing",
            f"--checkpoint.interval={INTERVAL}",
            f"--comm.train_timeout_seconds={TIMEOUT_S}",
            "--debug.deterministic",
        ]

    def start(self, place: Place) -> tuple[Agent, Agent]:
        """On both nodes, with checkpoints. A node's ranks are the inner ring."""
        port = 29500 if place.network is not None else free_port()
        flags = [*self.flags, "--checkpoint.enable"]
        first, second = (
            Agent(
                subprocess.Popen(
                    [*place.command(node), "./run_train.sh", *flags],
                    cwd=ROOT,
                    env=environment(NGPU="2", **place.settings(node, port)),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for node in (0, 1)
        )
        return first, second

    def figures(self) -> dict[int, tuple[float, ...]]:
        """Loss and gradient norm of each step of the last run, to the bit."""
        file = max((self.folder / "tb").glob("**/events.out.*"), key=_modified)
        events = EventAccumulator(str(file))
        events.Reload()
        values = [[x.value for x in events.Scalars(name)] for name in FIGURES]
        steps = [x.step for x in events.Scalars(FIGURES[0])]
        return dict(zip(steps, zip(*values, strict=True), strict=True))


def _modified(file: Path) -> float:
    return file.stat().st_mtime


def _end(agents: tuple[Agent, ...]) -> None:
    """Whatever the state; a launcher that is killed takes its ranks along."""
    for agent in agents:
        agent.process.kill()
        agent.wait(10)


# --- the three runs -------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "train.jsonl"
    return write_documents(file, [200 + 17 * i for i in range(40)])


@pytest.fixture(scope="module")
def one_node(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Four processes of one node, in inner rings of two."""
    job = Job(tmp_path_factory.mktemp("one_node"), corpus)
    command = ["./run_train.sh", *job.flags, "--ring.inner_degree=2"]
    code, output = run(command, timeout=START_S + 30, NGPU="4")
    assert code == 0, output[-TAIL:]
    return job


@dataclass(frozen=True)
class Interrupted:
    """A run of two nodes, of which the second was killed."""

    job: Job
    survivor: Agent
    code: int
    noticed_s: float
    left_over: list[int]  # processes on either node after the end of both launchers


@pytest.fixture(scope="module")
def interrupted(
    place: Place, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Interrupted:
    job = Job(tmp_path_factory.mktemp("two_nodes"), corpus)
    agents = job.start(place)
    try:
        _wait_for_step(agents, KILLED_AFTER)
        agents[1].process.kill()
        begin = time.monotonic()
        code = agents[0].wait(3 * NOTICE_S)
        noticed = time.monotonic() - begin
    finally:
        _end(agents)
    left_over: list[int] = []
    if place.network is not None:
        left_over = [pid for node in (0, 1) for pid in place.network.processes(node)]
    return Interrupted(job, agents[0], code, noticed, left_over)


def _wait_for_step(agents: tuple[Agent, Agent], step: int) -> None:
    end = time.monotonic() + START_S
    while step not in agents[0].printed:
        ended = [agent for agent in agents if agent.process.poll() is not None]
        assert not ended, ended[0].output[-TAIL:]
        assert time.monotonic() < end, agents[0].output[-TAIL:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def resumed(place: Place, interrupted: Interrupted) -> tuple[Job, Agent, Agent]:
    """The same command on both nodes again."""
    agents = interrupted.job.start(place)
    try:
        codes = [agent.wait(START_S + 30) for agent in agents]
    finally:
        _end(agents)
    assert codes == [0, 0], "\n".join(agent.output[-TAIL:] for agent in agents)
    return interrupted.job, *agents


@pytest.fixture(scope="module")
def cut_off(
    place: Place, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[float, list[int], tuple[Agent, Agent]]:
    """Seconds until both had noticed, exit codes, and both nodes of a cut network."""
    if place.network is None:
        pytest.skip("pulling a cable needs network namespaces: root and iproute2")
    agents = Job(tmp_path_factory.mktemp("cut_off"), corpus).start(place)
    try:
        _wait_for_step(agents, 2)
        place.network.pull()
        begin = time.monotonic()
        codes = [agent.wait(TIMEOUT_S + 2 * NOTICE_S) for agent in agents]
        noticed = time.monotonic() - begin
    finally:
        _end(agents)
        place.network.plug()
    return noticed, codes, agents


# --- tests ----------------------------------------------------------------------------


def test_they_join_in_one_ring(interrupted: Interrupted) -> None:
    """Without ring.inner_degree, an inner ring is the ranks of a node."""
    line = "rotation two_level over 2 nodes of ring.inner_degree 2 ranks"
    assert line in interrupted.survivor.output


def test_losses_of_one_node(one_node: Job, interrupted: Interrupted) -> None:
    """As many digits as are printed, until the second node was killed."""
    printed = interrupted.survivor.printed
    assert list(printed) == list(range(1, len(printed) + 1))
    assert KILLED_AFTER <= len(printed) < STEPS
    expected = one_node.figures()
    for step, (loss, norm) in printed.items():
        assert f"{expected[step][0]:8.5f}".strip() == loss
        assert f"{expected[step][1]:7.4f}".strip() == norm


def test_a_killed_node_ends_the_other(interrupted: Interrupted) -> None:
    assert interrupted.code == 1
    assert interrupted.noticed_s < NOTICE_S
    assert interrupted.left_over == []
    last = interrupted.survivor.lines[-1]
    assert re.match(
        r"run_train.sh: node 0 of 2 was stopped: rank [01] lost its connection", last
    )
    assert "another node probably ended first" in last
    assert "The same command, on every node, goes on from the last checkpoint" in last


def test_a_pulled_cable_ends_both(
    cut_off: tuple[float, list[int], tuple[Agent, Agent]],
) -> None:
    """No connection is closed: the timeout of the transfers is all there is."""
    noticed, codes, agents = cut_off
    assert codes == [1, 1]
    assert TIMEOUT_S - 1 < noticed < TIMEOUT_S + NOTICE_S
    last = " ".join(agent.lines[-1] for agent in agents)
    assert "waited for another rank longer than comm.train_timeout_seconds" in last
    assert f"{TIMEOUT_S}000ms" in last
    for node, agent in enumerate(agents):
        assert f"run_train.sh: node {node} of 2 was stopped: rank" in agent.lines[-1]
        assert "The same command, on every node, goes on" in agent.lines[-1]


def test_a_restart_goes_on(one_node: Job, resumed: tuple[Job, Agent, Agent]) -> None:
    """From a checkpoint, with the figures of the run without interruption, exactly."""
    job, first, _ = resumed
    figures, expected = job.figures(), one_node.figures()
    assert list(expected) == list(range(1, STEPS + 1))
    begin = min(figures)
    assert begin > INTERVAL and (begin - 1) % INTERVAL == 0
    assert list(figures) == list(range(begin, STEPS + 1))
    assert figures == {step: expected[step] for step in figures}
    assert f"step-{begin - 1}" in first.output  # which checkpoint, in the log


def test_all_ranks_end_well(resumed: tuple[Job, Agent, Agent]) -> None:
    for agent in resumed[1:]:
        assert "Process group destroyed" in agent.lines[-1]

"""All settings of a run, each with what it would cost.

A setting is a layout and a rotation. One that cannot run is kept with the reason, which
is the message of the function that refuses it in training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mtraining_flex  # noqa: F401  before torchtitan

# isort: split
from mtraining_flex.config import INNER_ROTATIONS
from mtraining_flex.layout import LAYOUTS
from mtraining_flex.pattern import VerticalSlash
from recipes.planning.crossover import Crossover, crossover
from recipes.planning.hardware import Hardware
from recipes.planning.memory import Memory, peak_memory
from recipes.planning.problem import Model, Problem, make_problem
from recipes.planning.timing import StepTime, step_ms
from recipes.planning.traffic import Bytes, count_traffic
from recipes.planning.work import (
    Work,
    check_caps,
    count_all,
    recorded_patterns,
    slash_density,
    synthetic_patterns,
)
from recipes.record_patterns import load

GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """What is to be chosen."""

    layout: str
    rotation: str
    inner: str  # of two_level

    def __str__(self) -> str:
        inner = f", inner {self.inner}" if self.rotation == "two_level" else ""
        return f"{self.layout}, {self.rotation}{inner}"


SETTINGS = tuple(
    Setting(layout, rotation, inner)
    for layout in ("striped", *(name for name in LAYOUTS if name != "striped"))
    for rotation, inner in (
        ("ring", "ring"),
        *(("two_level", inner) for inner in INNER_ROTATIONS),
        ("allgather", "ring"),
    )
)


@dataclass(frozen=True)
class Run:
    """What all settings share."""

    config: Any  # torchtitan's
    model: Model
    hardware: Hardware
    world: int
    node_gpus: int
    backend: str
    degree_from: str  # whence context_parallel_degree
    recording: str  # file of patterns, "" for synthetic ones
    density: float | None
    verticals: int | None

    @property
    def cp(self) -> int:
        degree: int = self.config.parallelism.context_parallel_degree
        return degree


@dataclass(frozen=True)
class Prediction:
    """Of one setting."""

    setting: Setting
    problem: Problem
    imbalance: tuple[float, float]  # worker, step; means over layers
    layer: Bytes  # of the ring, in one pass
    step: Bytes  # of all layers and passes
    time: StepTime
    memory: Memory

    @property
    def tokens_per_s(self) -> float:
        """Of the whole run."""
        p = self.problem
        sequences = p.batch * p.passes * p.replicate * p.shard // p.cp
        return sequences * p.layout.seq_len / self.time.total * 1e3


@dataclass(frozen=True)
class Refusal:
    """A setting that cannot run."""

    setting: Setting
    reason: str


@dataclass(frozen=True)
class Plan:
    """All that is printed."""

    run: Run
    predictions: list[Prediction]
    refusals: list[Refusal]
    patterns: str  # in words
    crossover: Crossover | None

    @property
    def best(self) -> Prediction | None:
        """The fastest that fits."""
        bound = self.run.hardware.memory_gib * GIB
        fitting = [p for p in self.predictions if p.memory.total <= bound]
        # Where launching takes longest, the rest still decides.
        return min(fitting, key=lambda p: (p.time.total, p.time.device), default=None)


def make_plan(run: Run) -> Plan:
    """Reckon all settings.

    Raises:
        ValueError: no setting can run, or the patterns are not of this run.
    """
    problems, refusals = [], []
    for setting in SETTINGS:
        try:
            problems.append((setting, _problem(run, setting)))
        except ValueError as error:
            refusals.append(Refusal(setting, one_line(error)))
    if not problems:
        raise ValueError(
            f"no setting can run; {refusals[0].setting}: {refusals[0].reason}"
        )
    patterns, words = _patterns(run, problems[0][1])
    works: dict[str, list[Work]] = {}
    predictions = []
    for setting, problem in problems:
        if setting.layout not in works:
            heads = problem.batch * run.model.heads
            works[setting.layout] = count_all(patterns, problem.layout, heads)
        predictions.append(_predict(run, setting, problem, works[setting.layout]))
    density, verticals = run.density, run.verticals
    if run.recording:
        density = slash_density(patterns, problems[0][1].layout.num_blocks)
        verticals = round(_mean_verticals(patterns))
    sparse = run.config.sparse_attention
    return Plan(
        run=run,
        predictions=predictions,
        refusals=refusals,
        patterns=words,
        crossover=crossover(problems[0][1], run.hardware, sparse, density, verticals),
    )


def _problem(run: Run, setting: Setting) -> Problem:
    return make_problem(
        run.config,
        run.model,
        run.world,
        run.node_gpus,
        run.backend,
        layout=setting.layout,
        rotation=setting.rotation,
        inner=setting.inner,
        inner_degree=0,  # ranks of a node
    )


def _patterns(run: Run, problem: Problem) -> tuple[list[VerticalSlash], str]:
    """Of each layer, and what they are."""
    sparse, model, layout = run.config.sparse_attention, run.model, problem.layout
    if run.recording:
        patterns = recorded_patterns(load(run.recording), problem)
        words = f"recorded in {run.recording}"
    else:
        patterns = synthetic_patterns(
            sparse,
            model.layers,
            model.heads,
            layout,
            density=run.density,
            verticals=run.verticals,
        )
        words = "synthetic"
        if sparse.pattern != "dense" and None in (run.density, run.verticals):
            words += ", at the caps of [sparse_attention] where no flag says otherwise"
    check_caps(patterns, sparse, layout.seq_len)
    share = slash_density(patterns, layout.num_blocks)
    counts = f"{share:.2%} of the slash blocks, {_mean_verticals(patterns):.0f} columns"
    return patterns, f"{words}: {counts} a head"


def _mean_verticals(patterns: Sequence[VerticalSlash]) -> float:
    means = [float(p.num_vertical.double().mean()) for p in patterns]
    return sum(means) / len(means)


def _predict(
    run: Run, setting: Setting, problem: Problem, works: Sequence[Work]
) -> Prediction:
    balances = [w.imbalance(problem.rotation, problem.node_ranks) for w in works]
    worker, step = (sum(each) / len(works) for each in zip(*balances, strict=True))
    layer = count_traffic(problem).total
    return Prediction(
        setting=setting,
        problem=problem,
        imbalance=(worker, step),
        layer=layer,
        step=layer * (problem.passes * run.model.layers),
        time=step_ms(problem, run.hardware, works),
        memory=peak_memory(problem, run.hardware),
    )


def one_line(error: Exception) -> str:
    """The message of an error, without its line breaks."""
    return " ".join(str(error).split())

"""The TOML sections of this recipe: `[sparse_attention]`, `[ring]`, `[rope]`,
`[loss]`, `[sentinel]`.

torchtitan merges them into its own configuration through `job.custom_config_module`.
Two kinds of mistake are told apart: what a dataclass can see alone is refused by its
`validate`, what needs the whole run (lengths, degrees) by `validate_job`. Both raise
`ValueError` with the setting and the numbers, before any process group exists.
"""

# No `from __future__ import annotations` here: torchtitan reads the field types.
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mtraining_flex.layout import LAYOUTS, Layout, build_layout
from mtraining_flex.models.rope import SCALINGS, RopeScaling
from mtraining_flex.ring.schedule import check_inner_degree, ranks_per_node

PATTERNS = ("vertical_slash", "dense")
BUDGETS = ("top_p", "top_k")
BACKENDS = ("auto", "flex", "flash", "triton", "eager")
ROTATIONS = ("ring", "allgather", "two_level")
INNER_ROTATIONS = ("ring", "allgather")


def _one_of(setting: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise ValueError(f"{setting} ('{value}') must be one of {list(names)}")


def _at_least(setting: str, value: int, bound: int) -> None:
    if value < bound:
        raise ValueError(f"{setting} ({value}) must be at least {bound}")


@dataclass
class SparseAttention:
    """What each head may keep, and what computes it."""

    pattern: str = "vertical_slash"
    """"vertical_slash" finds columns and diagonals at each step; "dense" keeps all."""

    granularity: int = 128
    """Block edge in tokens; FlexAttention's backends compile 128 alone."""

    budget: str = "top_p"
    """"top_p" keeps the smallest set that holds the mass; "top_k" keeps counts."""

    vertical_p: float = 0.9
    """top_p: share of the probe rows' mass that the verticals must hold."""

    slash_p: float = 0.9
    """top_p: share of the probe rows' mass that the slashes must hold."""

    max_vertical: int = 1024
    """Cap on verticals per head, in tokens; a shorter sequence uses less."""

    max_slash: int = 256
    """Cap on slashes per head, in blocks; a shorter sequence uses less."""

    num_vertical: int = 512
    """top_k: verticals per head, in tokens; a shorter sequence uses less."""

    num_slash: int = 64
    """top_k: slashes per head, in blocks; a shorter sequence uses less."""

    sink: int = 0
    """First tokens of the sequence, forced into the verticals."""

    local_window: int = 1
    """Nearest block offsets, forced into the slashes; 1 is the diagonal block alone."""

    probe_rows: int = 64
    """Query rows at the end of the sequence that score the keys."""

    budget_file: str = ""
    """JSON or TOML file with budgets for single layers and heads; "" for none."""

    backend: str = "auto"
    """"auto" by device and shape, or "flex", "flash", "triton", "eager"."""

    def validate(self) -> None:
        """Refuse what this section alone shows to be wrong.

        Raises:
            ValueError: names the setting and the value.
        """
        prefix = "sparse_attention"
        _one_of(f"{prefix}.pattern", self.pattern, PATTERNS)
        _one_of(f"{prefix}.budget", self.budget, BUDGETS)
        _one_of(f"{prefix}.backend", self.backend, BACKENDS)
        _at_least(f"{prefix}.granularity", self.granularity, 1)
        _at_least(f"{prefix}.max_vertical", self.max_vertical, 0)
        _at_least(f"{prefix}.max_slash", self.max_slash, 1)
        _at_least(f"{prefix}.num_vertical", self.num_vertical, 0)
        _at_least(f"{prefix}.num_slash", self.num_slash, 1)
        _at_least(f"{prefix}.sink", self.sink, 0)
        _at_least(f"{prefix}.local_window", self.local_window, 1)
        _at_least(f"{prefix}.probe_rows", self.probe_rows, 1)
        for name in ("vertical_p", "slash_p"):
            p = getattr(self, name)
            if not 0.0 < p <= 1.0:
                raise ValueError(f"{prefix}.{name} ({p}) must be in (0, 1]")
        bounds = [("sink", "max_vertical"), ("local_window", "max_slash")]
        if self.budget == "top_k":
            bounds += [("sink", "num_vertical"), ("local_window", "num_slash")]
            bounds += [("num_vertical", "max_vertical"), ("num_slash", "max_slash")]
        for small, cap in bounds:
            if getattr(self, small) > getattr(self, cap):
                raise ValueError(
                    f"{prefix}.{small} ({getattr(self, small)}) must not exceed "
                    f"{prefix}.{cap} ({getattr(self, cap)})"
                )
        if self.backend in ("flex", "flash") and self.granularity != 128:
            raise ValueError(
                f"{prefix}.granularity ({self.granularity}) must be 128 with backend "
                f"'{self.backend}': FlexAttention compiles only 128 x 128 blocks"
            )
        if self.backend == "triton" and self.granularity not in (16, 32, 64, 128):
            raise ValueError(
                f"{prefix}.granularity ({self.granularity}) must be 16, 32, 64 or 128 "
                "with backend 'triton'"
            )


@dataclass
class Ring:
    """How the sequence is spread over the context-parallel ranks."""

    layout: str = "striped"
    """Which rank owns which block: "striped", "contiguous" or "zigzag"."""

    rotation: str = "ring"
    """How keys and values travel: one "ring", "two_level" rings, or "allgather"."""

    inner_degree: int = 0
    """two_level only: ranks of an inner ring; 0 takes the ranks of a node."""

    inner: str = "ring"
    """two_level only: "ring" round the ranks of a node, or "allgather" among them."""

    def validate(self) -> None:
        """Refuse what this section alone shows to be wrong.

        Raises:
            ValueError: names the setting and the value.
        """
        _one_of("ring.layout", self.layout, LAYOUTS)
        _one_of("ring.rotation", self.rotation, ROTATIONS)
        _one_of("ring.inner", self.inner, INNER_ROTATIONS)
        _at_least("ring.inner_degree", self.inner_degree, 0)
        if self.rotation == "two_level":
            return
        for name, default in (("inner_degree", 0), ("inner", "ring")):
            if getattr(self, name) != default:
                raise ValueError(
                    f"ring.{name} ({getattr(self, name)}) is only for rotation "
                    f"'two_level', got rotation '{self.rotation}'"
                )

    @property
    def transport(self) -> tuple[str, int, str]:
        """What the operators take: rotation, inner_degree, inner."""
        return self.rotation, self.inner_degree, self.inner


@dataclass
class Sentinel:
    """How often a run checks that its attention is right; see `sentinel`."""

    every: int = 100
    """Steps from one check to the next; the first step is one. 0 is off."""

    startup: bool = True
    """Whether a small planted case is run on this ring before the first step."""

    def validate(self) -> None:
        """Refuse what this section alone shows to be wrong.

        Raises:
            ValueError: names the setting and the value.
        """
        _at_least("sentinel.every", self.every, 0)


@dataclass
class Rope:
    """Rotary angles: the model's own, or stretched; see `models.rope.RopeScaling`."""

    scaling: str = "model"
    """"model": the flavor's own; "none", "linear", "llama3", "yarn"."""

    theta: float = 0.0
    """Base of the frequencies; 0 is the flavor's own."""

    factor: float = 1.0
    """Times longer than what the model was trained on."""

    original_length: int = 0
    """Tokens of the context that the model was trained on; llama3 and yarn."""

    low_freq_factor: float = 1.0
    """llama3: turns in the original context up to which a pair is slowed wholly."""

    high_freq_factor: float = 4.0
    """llama3: turns from which on a pair keeps its frequency."""

    beta_fast: float = 32.0
    """yarn: turns from which on a pair keeps its frequency."""

    beta_slow: float = 1.0
    """yarn: turns up to which a pair is slowed wholly."""

    attention_factor: float = 0.0
    """yarn: of cos and sin; 0 is 0.1 ln(factor) + 1."""

    def _scaling(self) -> RopeScaling:
        given = asdict(self)
        del given["theta"]
        return RopeScaling(given.pop("scaling"), **given)

    def validate(self) -> None:
        """Refuse what this section alone shows to be wrong.

        Raises:
            ValueError: names the setting and the value.
        """
        if self.theta and not self.theta > 1:
            raise ValueError(
                f"rope.theta ({self.theta}) must be more than 1, or 0 for the flavor's"
            )
        _one_of("rope.scaling", self.scaling, ("model", *SCALINGS))
        if self.scaling != "model":
            self._scaling().validate()
            return
        for name, value in asdict(self).items():
            if name not in ("scaling", "theta") and value != getattr(Rope, name):
                raise ValueError(
                    f"rope.{name} ({value}) is for a rope.scaling that this section "
                    "sets, got 'model', the flavor's own"
                )

    def apply(self, model_args: Any) -> None:
        """Set the angles of a model's arguments, and how many tokens they reach."""
        if self.theta:
            model_args.rope_theta = self.theta
        if self.scaling == "model" or model_args.rope_scaling == self._scaling():
            return
        model_args.rope_scaling = self._scaling()
        model_args.max_seq_len = self._scaling().stretched(model_args.max_seq_len)


@dataclass
class Loss:
    """How the cross-entropy is computed; see `loss`."""

    chunk_size: int = 0
    """Tokens of a rank whose logits exist at a time; 0 is all of them."""

    def validate(self) -> None:
        """Refuse what this section alone shows to be wrong.

        Raises:
            ValueError: names the setting and the value.
        """
        _at_least("loss.chunk_size", self.chunk_size, 0)


@dataclass
class JobConfig:
    """What `job.custom_config_module = "mtraining_flex.config"` adds to torchtitan."""

    sparse_attention: SparseAttention = field(default_factory=SparseAttention)
    ring: Ring = field(default_factory=Ring)
    rope: Rope = field(default_factory=Rope)
    loss: Loss = field(default_factory=Loss)
    sentinel: Sentinel = field(default_factory=Sentinel)


def resolve_degrees(job_config: Any, world_size: int) -> None:
    """Fill in `context_parallel_degree = -1`: every rank that nothing else uses.

    Raises:
        ValueError: the other degrees do not divide the world size.
    """
    p = job_config.parallelism
    for name in (
        "data_parallel_replicate_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
    ):
        _at_least(f"parallelism.{name}", getattr(p, name), 1)
    if p.context_parallel_degree != -1:
        return
    others = p.data_parallel_replicate_degree * max(p.data_parallel_shard_degree, 1)
    others *= p.tensor_parallel_degree * p.pipeline_parallel_degree
    if world_size % others:
        raise ValueError(
            f"parallelism.context_parallel_degree (-1) cannot be filled in: the world "
            f"size ({world_size}) is not a multiple of the other degrees ({others})"
        )
    p.context_parallel_degree = world_size // others


def resolve_inner_degree(
    ring: Ring, rings: Sequence[Sequence[int]], local_world_size: int | None = None
) -> int:
    """Ranks of an inner ring of two_level: `inner_degree`, or those of a node.

    Args:
        rings: global ranks of each ring.
        local_world_size: processes per node; None takes torchrun's LOCAL_WORLD_SIZE.

    Raises:
        ValueError: no inner ring of that degree, or no way to know the nodes.
    """
    cp_size = len(rings[0])
    if ring.inner_degree > 0:
        check_inner_degree(ring.inner_degree, cp_size)
        return ring.inner_degree
    if local_world_size is None:
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise ValueError(
                "ring.inner_degree (0) is the number of ranks per node, which only "
                "torchrun knows (LOCAL_WORLD_SIZE): start with run_train.sh or "
                f"torchrun, or set ring.inner_degree to a divisor of {cp_size}"
            )
        local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    degrees = [ranks_per_node(ranks, local_world_size) for ranks in rings]
    if len(set(degrees)) > 1:
        raise ValueError(
            f"ring.inner_degree (0: ranks per node) is {min(degrees)} for some rings "
            f"of {cp_size} ranks and {max(degrees)} for others, with "
            f"{local_world_size} processes per node: set ring.inner_degree"
        )
    how = f", the ring's ranks on a node of {local_world_size} processes"
    check_inner_degree(degrees[0], cp_size, how)
    return degrees[0]


def _check_checkpoint(checkpoint: Any) -> None:
    """torchtitan would find these out at the first load or the last save.

    Raises:
        ValueError: Hugging Face's format for more than the model, or quantised.
    """
    for name, needs in (
        ("last_save_in_hf", "last_save_model_only"),
        ("initial_load_in_hf", "initial_load_model_only"),
    ):
        if getattr(checkpoint, name) and not getattr(checkpoint, needs):
            raise ValueError(
                f"checkpoint.{name} (True) is for the model alone and needs "
                f"checkpoint.{needs} (False) to be True"
            )
    if checkpoint.initial_load_in_hf_quantized:
        raise ValueError(
            "checkpoint.initial_load_in_hf_quantized (True) is not supported by this "
            "recipe: load weights that are not quantised"
        )


def validate_job(
    job_config: Any, world_size: int, local_world_size: int | None = None
) -> Layout:
    """Refuse a run that cannot be right, before anything is built.

    Fills in what the configuration leaves to be found: `context_parallel_degree = -1`
    and `inner_degree = 0`.

    Args:
        job_config: torchtitan's configuration with this module's sections.
        world_size: number of processes.
        local_world_size: of them, on one node; None takes torchrun's number.

    Returns:
        The layout of the training sequence.

    Raises:
        ValueError: names the setting and the numbers.
    """
    for section in ("sparse_attention", "ring", "rope", "loss", "sentinel"):
        if not hasattr(job_config, section):
            raise ValueError(
                f"the configuration has no [{section}] section: set "
                'job.custom_config_module = "mtraining_flex.config"'
            )
    sparse, ring = job_config.sparse_attention, job_config.ring
    sparse.validate()
    ring.validate()
    job_config.rope.validate()
    job_config.loss.validate()
    job_config.sentinel.validate()
    resolve_degrees(job_config, world_size)
    _check_checkpoint(job_config.checkpoint)
    p, training = job_config.parallelism, job_config.training
    for name in (
        "pipeline_parallel_degree",
        "tensor_parallel_degree",
        "expert_parallel_degree",
    ):
        if getattr(p, name) != 1:
            raise ValueError(
                f"parallelism.{name} ({getattr(p, name)}) is not supported by this "
                "recipe and must be 1; use context and data parallelism"
            )
    replicate, cp = p.data_parallel_replicate_degree, p.context_parallel_degree
    _at_least("parallelism.context_parallel_degree", cp, 1)
    _at_least("training.local_batch_size", training.local_batch_size, 1)
    shard = p.data_parallel_shard_degree
    if shard == -1:
        shard = max(world_size // (replicate * cp), 1)
    if replicate * shard * cp != world_size:
        raise ValueError(
            f"parallelism: data_parallel_replicate_degree ({replicate}) * "
            f"data_parallel_shard_degree ({shard}) * context_parallel_degree ({cp}) = "
            f"{replicate * shard * cp} must equal the world size ({world_size})"
        )
    if replicate > 1 and shard * cp == 1:
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree ({replicate}) without "
            "sharding (data_parallel_shard_degree * context_parallel_degree = "
            f"{shard * cp}) is plain DDP, which would halve gradients here: use "
            "data_parallel_shard_degree"
        )
    if ring.rotation == "two_level":
        # torchtitan's mesh has the context-parallel ranks side by side.
        starts = range(0, world_size, cp)
        rings = [range(start, start + cp) for start in starts]
        ring.inner_degree = resolve_inner_degree(ring, rings, local_world_size)
    batch = training.local_batch_size * replicate * shard
    if training.global_batch_size > 0 and training.global_batch_size % batch:
        raise ValueError(
            f"training.global_batch_size ({training.global_batch_size}) must be a "
            f"multiple of local_batch_size * data-parallel degree ({batch})"
        )
    layout = job_layout(job_config, training.seq_len, "training.seq_len")
    if job_config.validation.enable:
        job_layout(job_config, job_config.validation.seq_len, "validation.seq_len")
        if job_config.validation.steps < 1 and job_config.validation.steps != -1:
            raise ValueError(
                f"validation.steps ({job_config.validation.steps}) must be at least 1, "
                "or -1 for all of the data"
            )
    return layout


def job_layout(job_config: Any, seq_len: int, setting: str) -> Layout:
    """The layout of one sequence length in this run.

    Raises:
        ValueError: names `setting` and the numbers.
    """
    sparse = job_config.sparse_attention
    try:
        layout = build_layout(
            job_config.ring.layout,
            seq_len,
            job_config.parallelism.context_parallel_degree,
            sparse.granularity,
        )
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None
    if sparse.pattern == "vertical_slash" and sparse.probe_rows > seq_len:
        raise ValueError(
            f"sparse_attention.probe_rows ({sparse.probe_rows}) must not exceed "
            f"{setting} ({seq_len})"
        )
    for name, bound, unit in (
        ("sink", seq_len, "tokens"),
        ("local_window", layout.num_blocks, "blocks"),
    ):
        if getattr(sparse, name) > bound:
            raise ValueError(
                f"sparse_attention.{name} ({getattr(sparse, name)}) must not exceed "
                f"the {unit} of {setting} ({bound})"
            )
    return layout

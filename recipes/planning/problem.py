"""The sizes of a run, from torchtitan's configuration and the model's own code.

The model is built on the meta device, where it takes no memory: its parameters and
matrix products are counted, not typed in again. An impossible run is refused by the
functions that refuse it in training.
"""

import contextlib
import copy
import io
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mtraining_flex  # noqa: F401  before torchtitan

# isort: split
import tomli
import torch
from torch import nn
from torchtitan.protocols.train_spec import get_train_spec

from mtraining_flex.config import validate_job
from mtraining_flex.layout import Layout
from mtraining_flex.models.common import head_dim
from mtraining_flex.parallelize import apply_checkpointing, parallelize
from mtraining_flex.pattern.budget import list_widths
from recipes.record_patterns import short_run_config

# In the order of a block's forward.
LINEARS = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")


@dataclass(frozen=True)
class Linear:
    """A matrix product of a block."""

    name: str
    in_features: int
    out_features: int
    bias: bool

    @property
    def weights(self) -> int:
        return self.in_features * self.out_features


@dataclass(frozen=True)
class Model:
    """What a model is made of."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    hidden: int  # F, width of the feed-forward
    tied: bool  # embedding and output are one weight
    linears: tuple[Linear, ...]  # of a block, in the order of its forward
    block_parameters: int
    parameters: int  # of all, a tied weight once

    @property
    def block_weights(self) -> int:
        """Weights of a block that multiply."""
        return sum(linear.weights for linear in self.linears)

    @property
    def vocab_weights(self) -> int:
        """Weights of the output, and of the embedding."""
        return self.vocab * self.dim


@dataclass(frozen=True)
class Problem:
    """One run on so many ranks; all that the reckoning reads."""

    model: Model
    layout: Layout
    rotation: str  # "ring", "two_level", "allgather"
    inner_rotation: str  # of two_level: "ring", "allgather"
    node_ranks: int  # M, ranks of a ring on one node
    node_gpus: int  # of a node, of whatever ring
    batch: int  # sequences per rank and pass
    passes: int  # forward and backward passes per optimiser step
    shard: int  # ranks that share one copy of the parameters, cp * dp_shard
    replicate: int  # copies
    backend: str  # "flex", "flash", "triton"
    pattern: str  # "vertical_slash" or "dense"
    max_vertical: int  # NV
    max_slash: int  # NS
    checkpointing: str  # "none", "selective", "full"
    compiled: bool  # blocks
    compiled_loss: bool
    loss_chunk: int  # tokens whose logits exist at a time
    state_bytes: int  # of a parameter, a gradient, and each moment
    optimizer: str  # implementation: "fused", "foreach", "for-loop"

    @property
    def cp(self) -> int:
        return self.layout.cp_size

    @property
    def nodes(self) -> int:
        """O, nodes of a ring; the last one may have fewer of its ranks."""
        return -(-self.cp // self.node_ranks)

    @property
    def tokens(self) -> int:
        """Of one rank and pass."""
        return self.batch * self.layout.local_len

    @property
    def fsdp(self) -> bool:
        """Whether FSDP shards and casts; autocast does without it."""
        return self.shard > 1

    @property
    def residual_bytes(self) -> int:
        """Of an element between blocks: under autocast the embedding stays fp32."""
        return 2 if self.fsdp or self.state_bytes == 2 else 4

    @property
    def column_blocks(self) -> int:
        """J, blocks that the gathered columns are padded to."""
        return -(-self.max_vertical // self.layout.granularity)


def saved_linears(problem: Problem) -> tuple[Linear, ...]:
    """Matrix products whose results selective checkpointing saves.

    torchtitan saves every second `mm`, beginning with the first. A product with a bias
    is an `addmm`: neither counted nor saved. That of w2, which no gradient needs, is
    kept by eager mode alone.
    """
    if problem.checkpointing != "selective":
        return ()
    products = [x for x in problem.model.linears if not x.bias]
    return tuple(x for x in products[::2] if x.name != "w2" or not problem.compiled)


def recomputed_linears(problem: Problem) -> tuple[Linear, ...]:
    """Matrix products that run again in the backward."""
    if problem.checkpointing == "none":
        return ()
    kept = saved_linears(problem)
    return tuple(
        x
        for x in problem.model.linears
        if x not in kept and not (x.name == "w2" and problem.compiled)
    )


def read_config(path: str, overrides: Sequence[str]) -> Any:
    """torchtitan's configuration from a TOML file and its own flags.

    Raises:
        ValueError: no such file, one that torchtitan cannot read, or unknown flags.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"--config ('{path}') does not exist")
    try:
        tomli.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"--config {path}: cannot be read: {error}") from None
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a wrong type, which is refused later
            config = short_run_config([f"--job.config_file={path}", *overrides], ".")
    except ImportError as error:
        raise ValueError(f"--config {path}: {error}") from None
    except SystemExit:  # a box of several lines: a title, a rule, and what is wrong
        lines = [line.strip(" │╭╮╰╯─-") for line in said.getvalue().splitlines()]
        raise ValueError(f"torchtitan: {[x for x in lines if x][1]}") from None
    if not hasattr(config, "ring"):
        validate_job(config, 1)  # says which section is missing
    return config


def model_arguments(config: Any, changes: str = "") -> Any:
    """The arguments of the configured flavor, with some fields changed.

    Args:
        changes: "n_layers=8,dim=2048,...", or "" for none.

    Raises:
        ValueError: an unknown model, flavor or field, or a value of another type.
    """
    try:
        spec = get_train_spec(config.model.name)
    except ValueError:
        spec = None
    if spec is None or spec.parallelize_fn is not parallelize:
        raise ValueError(
            f"model.name ('{config.model.name}') is not a model of this recipe: use "
            "'mtraining_llama3' or 'mtraining_qwen2'"
        )
    if config.model.flavor not in spec.model_args:
        raise ValueError(
            f"model.flavor ('{config.model.flavor}') must be one of "
            f"{list(spec.model_args)}"
        )
    arguments: Any = copy.deepcopy(spec.model_args[config.model.flavor])
    fields: dict[str, Any] = {}
    for part in filter(None, changes.split(",")):
        name, _, text = part.partition("=")
        if not hasattr(arguments, name):
            raise ValueError(f"--model-args: {config.model.name} has no field '{name}'")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        before = getattr(arguments, name)
        number = isinstance(before, int | float) and not isinstance(before, bool)
        fits = isinstance(value, int | float if number else type(before))
        if before is not None and (not fits or (number and isinstance(value, bool))):
            raise ValueError(
                f"--model-args: {name} ('{text}') must be of the type of {before!r}"
            )
        fields[name] = value
    return replace(arguments, **fields)


def count_model(config: Any, arguments: Any) -> Model:
    """Build the model without memory and count it.

    Raises:
        ValueError: arguments of which no model can be made.
    """
    heads = arguments.n_heads
    kv_heads = arguments.n_kv_heads or heads
    if arguments.dim % heads or heads % kv_heads:
        raise ValueError(
            f"model: dim ({arguments.dim}) must be a multiple of n_heads ({heads}), "
            f"and that of n_kv_heads ({kv_heads})"
        )
    with torch.device("meta"):
        # mypy: get_train_spec has no type for it
        model: Any = get_train_spec(config.model.name).model_cls(arguments)
    block = next(iter(model.layers.values()))
    modules = {name.split(".")[-1]: m for name, m in block.named_modules()}
    linears = []
    for name in LINEARS:
        module = modules[name]
        assert isinstance(module, nn.Linear), name
        bias = module.bias is not None
        linears.append(Linear(name, module.in_features, module.out_features, bias))
    tied = model.tied
    parameters = sum(p.numel() for p in set(model.parameters()))
    return Model(
        dim=arguments.dim,
        layers=arguments.n_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim(arguments),
        vocab=arguments.vocab_size,
        hidden=linears[-1].in_features,
        tied=tied,
        linears=tuple(linears),
        block_parameters=sum(p.numel() for p in block.parameters()),
        parameters=parameters,
    )


def make_problem(
    config: Any,
    model: Model,
    world_size: int,
    node_ranks: int,
    backend: str,
    **ring: Any,
) -> Problem:
    """The run of a configuration, which is not changed.

    Args:
        world_size: processes of the whole run.
        node_ranks: of them, on one node.
        backend: a name of which rates are known, not "auto".
        ring: settings of `[ring]` to change.

    Raises:
        ValueError: an impossible run, as in training, or one that is not reckoned
            here.
    """
    config = copy.deepcopy(config)
    for name, value in ring.items():
        setattr(config.ring, name, value)
    config.sparse_attention.backend = backend
    layout = validate_job(config, world_size, node_ranks)
    _check_reckoned(config)
    p, cp = config.parallelism, layout.cp_size
    replicate = p.data_parallel_replicate_degree
    shard = world_size // replicate
    inner = config.ring.inner_degree or min(node_ranks, cp)
    data_parallel = replicate * (shard // cp)
    batch = config.training.local_batch_size
    whole = config.training.global_batch_size
    passes = 1 if whole < 0 else whole // (batch * data_parallel)
    sparse = config.sparse_attention
    widths = list_widths(sparse, layout.seq_len)
    if sparse.pattern == "dense":
        widths = (0, layout.num_blocks)
    compiled = config.compile.enable
    return Problem(
        model=model,
        layout=layout,
        rotation=config.ring.rotation,
        inner_rotation=config.ring.inner,
        node_ranks=inner,
        node_gpus=node_ranks,
        batch=batch,
        passes=passes,
        shard=shard,
        replicate=replicate,
        backend=backend,
        pattern=sparse.pattern,
        max_vertical=widths[0],
        max_slash=widths[1],
        checkpointing=config.activation_checkpoint.mode,
        compiled=compiled and "model" in config.compile.components,
        compiled_loss=compiled and "loss" in config.compile.components,
        loss_chunk=config.loss.chunk_size,
        state_bytes=2 if config.training.dtype == "bfloat16" else 4,
        optimizer=config.optimizer.implementation,
    )


def _check_reckoned(config: Any) -> None:
    """Refuse what nothing here has been thought through for.

    Raises:
        ValueError: names the setting.
    """
    ac = config.activation_checkpoint
    if ac.mode not in ("none", "full") and (
        ac.mode != "selective" or ac.selective_ac_option != "op"
    ):
        apply_checkpointing(nn.Module(), config, False)  # says why not
        raise AssertionError("a mode that training allows and this module forgot")
    for section, name, expected in (
        ("training", "mixed_precision_param", "bfloat16"),
        ("training", "enable_cpu_offload", False),
        ("optimizer", "early_step_in_backward", False),
        ("parallelism", "fsdp_reshard_after_forward", "default"),
    ):
        value = getattr(getattr(config, section), name)
        if value != expected:
            raise ValueError(
                f"{section}.{name} ({value!r}) is not reckoned: recipes.plan knows "
                f"{expected!r} only"
            )


@contextlib.contextmanager
def flavor(config: Any, arguments: Any) -> Any:
    """Let the configured flavor have these arguments, inside the block."""
    flavors: Any = get_train_spec(config.model.name).model_args
    before = flavors[config.model.flavor]
    flavors[config.model.flavor] = arguments
    try:
        yield
    finally:
        flavors[config.model.flavor] = before

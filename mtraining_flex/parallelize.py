"""Make a model a parallel one, in this order:

    sparse ring attention -> activation checkpointing -> torch.compile -> FSDP2

`RingContextParallel` is the first of these as a `ParallelStyle`, for the attention
module of any model; `parallelize` is the whole, as torchtitan's train spec wants it.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import (
    _op_sac_save_list,
    apply_compile,
    apply_fsdp,
    disable_fsdp_gradient_division,
)
from torchtitan.tools.logging import logger

from mtraining_flex.attention import SparseAttention
from mtraining_flex.config import Ring, job_layout, validate_job
from mtraining_flex.config import SparseAttention as SparseConfig
from mtraining_flex.cpu_device import available_device_type
from mtraining_flex.layout import Layout
from mtraining_flex.loss import build_chunk
from mtraining_flex.pattern.scores import check_probe_kernels
from mtraining_flex.ring.backends import resolve_backend
from mtraining_flex.ring.schedule import check_inner_degree

_SEARCH = torch.ops.mtraining.search_pattern.default
_RING = torch.ops.mtraining.ring_attention.default


class RingContextParallel(ParallelStyle):
    """Give the sparse ring to an attention module.

    The module is one that is called with q `[B, H, S, D]` and k, v `[B, HK, S, D]`,
    after RoPE with true positions: local shards in the layout's order, or DTensors
    sharded on dimension 2. It returns the same kind. A `SparseAttention` is told its
    layout; any other module has its `forward` replaced, and what it cannot honour
    (masks, dropout) is refused when called. Applied to several modules, it numbers them
    as layers.

        style = RingContextParallel(config, layout)
        parallelize_module(block.attention, cp_mesh, style)

    Args:
        config: the `[sparse_attention]` section.
        layout: of the global sequence, or one for each length that will come.
        ring: the `[ring]` section; its layout name must be the layout's.
        heads: query heads; needed if `config.budget_file` is set.

    Raises:
        ValueError: sections and layout that do not fit together.
    """

    def __init__(
        self,
        config: SparseConfig,
        layout: Layout | Sequence[Layout],
        *,
        ring: Ring | None = None,
        heads: int | None = None,
    ):
        self.config = config
        self.layouts = (layout,) if isinstance(layout, Layout) else tuple(layout)
        self.ring = Ring(layout=self.layouts[0].name) if ring is None else ring
        self.heads = heads
        self._numbers = itertools.count()
        config.validate()
        self.ring.validate()
        for each in self.layouts:
            if each.name != self.ring.layout:
                raise ValueError(
                    f"ring.layout ('{self.ring.layout}') is not the layout's name "
                    f"('{each.name}')"
                )
            if self.ring.inner_degree > 0:
                check_inner_degree(self.ring.inner_degree, each.cp_size)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | None) -> nn.Module:
        attention = module
        number = next(self._numbers)
        if not isinstance(attention, SparseAttention):
            attention = SparseAttention(number)
            module.add_module("sparse_attention", attention)
            module.forward = attention.forward  # type: ignore[method-assign]
        attention.configure(
            self.config, self.ring, self.layouts, device_mesh, self.heads
        )
        return module


def parallelize(
    model: nn.Module, parallel_dims: ParallelDims, job_config: Any
) -> nn.Module:
    """Apply every technique that the configuration asks for.

    Raises:
        ValueError: a configuration that this recipe cannot run.
    """
    apply_sparse_attention(model, parallel_dims, job_config)
    output: Any = model.output
    output.chunk_size = job_config.loss.chunk_size
    output.chunk = build_chunk(job_config.compile)
    compile_model = (
        job_config.compile.enable and "model" in job_config.compile.components
    )
    apply_checkpointing(model, job_config, compile_model)
    if compile_model:
        # A recompile limit would end in eager flex and its dense score matrix. Lengths
        # are few and fixed: a second one is a graph of its own, not a dynamic shape.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._dynamo.config.automatic_dynamic_shapes = False
        apply_compile(model, job_config.compile)
    if parallel_dims.fsdp_enabled:
        apply_data_parallel(model, parallel_dims, job_config)
    return model


def apply_sparse_attention(
    model: Any, parallel_dims: ParallelDims, job_config: Any
) -> None:
    """Tell every layer's attention its policy, its layouts and its ring.

    Raises:
        ValueError: a model whose attention is not sparse attention, a backend that
            cannot run here, or settings that do not fit.
    """
    sparse, ring = job_config.sparse_attention, job_config.ring
    layouts = [validate_job(job_config, parallel_dims.world_size)]
    if job_config.validation.enable:
        setting = "validation.seq_len"
        other = job_layout(job_config, job_config.validation.seq_len, setting)
        layouts += [other] if other not in layouts else []
    mesh = parallel_dims.get_optional_mesh("cp")
    modules = attention_modules(model)
    heads = model.model_args.n_heads
    style = RingContextParallel(sparse, layouts, ring=ring, heads=heads)
    for module in modules:
        if mesh is None:
            style._apply(module, None)
        else:
            parallelize_module(module, mesh, style)
    head_dim = model.layers["0"].attention.head_dim
    dtype = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
    device_type, granularity = available_device_type(), sparse.granularity
    backend, reason = resolve_backend(
        sparse.backend, device_type, granularity, dtype, head_dim
    )
    if sparse.pattern == "vertical_slash":
        check_probe_kernels(
            device_type, dtype, head_dim, granularity, sparse.probe_rows
        )
    logger.info(
        f"Applied sparse attention to {len(modules)} layers: pattern {sparse.pattern}, "
        f"layout {ring.layout}, {describe_rotation(ring, layouts[0].cp_size)}, "
        f"{layouts[0].num_blocks} blocks of {sparse.granularity} tokens"
    )
    logger.info(f"Attention backend '{backend}': {reason}")


def describe_rotation(ring: Ring, cp_size: int) -> str:
    """For the log."""
    if ring.rotation != "two_level":
        return f"rotation {ring.rotation} over {cp_size} ranks"
    return (
        f"rotation two_level over {cp_size // ring.inner_degree} nodes of "
        f"ring.inner_degree {ring.inner_degree} ranks (inner: {ring.inner})"
    )


def attention_modules(model: Any) -> list[SparseAttention]:
    """The inner attention of each layer, in order.

    Raises:
        ValueError: a layer that has another attention.
    """
    modules = []
    for name, block in model.layers.items():
        module = block.attention.inner_attention
        if not isinstance(module, SparseAttention):
            raise ValueError(
                f"layer {name} has {type(module).__name__} where this recipe needs "
                "SparseAttention: use the models mtraining_llama3 or mtraining_qwen2"
            )
        modules.append(module)
    return modules


def apply_checkpointing(model: nn.Module, job_config: Any, compile_model: bool) -> None:
    """Activation checkpointing that never searches again.

    "selective" saves the results of search and ring, and torchtitan's list of
    operators; "full" recomputes everything but the search.

    Raises:
        ValueError: a mode in which the search would be recomputed.
    """
    ac = job_config.activation_checkpoint
    save: set[Any] = {_SEARCH, _RING} | _op_sac_save_list
    match ac.mode:
        case "none":
            return
        case "selective" if ac.selective_ac_option == "op":
            pass
        case "full":
            ac = dataclasses.replace(ac, mode="selective", selective_ac_option="op")
            save = {_SEARCH}
        case _:
            raise ValueError(
                f"activation_checkpoint.mode ('{ac.mode}') with selective_ac_option "
                f"('{ac.selective_ac_option}') would search the pattern again when it "
                "recomputes; use 'none', 'full', or 'selective' with 'op'"
            )
    apply_ac(
        model,
        ac,
        model_compile_enabled=compile_model,
        op_sac_save_list=save,
        base_folder=job_config.job.dump_folder,
    )


def apply_data_parallel(
    model: nn.Module, parallel_dims: ParallelDims, job_config: Any
) -> None:
    """FSDP2 over data and context ranks; gradients are sums, the loss is normalised."""
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    mesh = parallel_dims.get_mesh(names)
    training, parallelism = job_config.training, job_config.parallelism
    if getattr(model.model_args, "enable_weight_tying", False):
        _fsdp_tied(model, mesh, job_config)
    else:
        apply_fsdp(
            model,
            mesh,
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            pp_enabled=False,
            cpu_offload=training.enable_cpu_offload,
            reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        )
    if mesh.device_type == "cpu":
        # gloo knows neither AVG nor pre-scaled sums.
        for module in _fsdp_modules(model):
            module.set_force_sum_reduction_for_comms(True)
    logger.info(f"Applied FSDP2 over {mesh.size()} ranks to the model")


def _fsdp_modules(model: nn.Module) -> Iterable[FSDPModule]:
    return (m for m in model.modules() if isinstance(m, FSDPModule))


def _fsdp_tied(model: Any, mesh: DeviceMesh, job_config: Any) -> None:
    """As torchtitan's `apply_fsdp`, with the tied weight in one group.

    The embedding is used first and last, so its group stays gathered in between unless
    `fsdp_reshard_after_forward` is "always".
    """
    training = job_config.training
    policy = job_config.parallelism.fsdp_reshard_after_forward
    if training.enable_cpu_offload:
        raise ValueError(
            "training.enable_cpu_offload (True) is not supported with tied embeddings"
        )
    mp_policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )
    for block in model.layers.values():
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=mp_policy,
            reshard_after_forward=policy != "never",
        )
    fully_shard(
        [model.tok_embeddings, model.norm, model.output],
        mesh=mesh,
        mp_policy=mp_policy,
        reshard_after_forward=policy == "always",
    )
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    disable_fsdp_gradient_division(model)

"""Initial weights that do not depend on how many ranks share them.

Random functions on a DTensor draw per shard; on the CPU they even give every rank the
same numbers. Here each rank draws the whole of one block from torch's default
generator, which torchtitan seeds alike on all ranks, and keeps its own part. The
weights, and the generator's state afterwards, are a function of the seed alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


@contextmanager
def full_shape_parameters(module: nn.Module) -> Iterator[None]:
    """Let the body see plain tensors of full shape where the parameters are DTensors.

    The body must set the whole of each parameter: they start as NaN. On leaving, each
    rank copies its shard into the DTensor, which is then back in place, the same object
    as before; there is no communication. After an exception nothing has changed.
    Without DTensors this does nothing. Costs the memory of the module in one piece.
    """
    slots: list[tuple[nn.Module, str, Any]] = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    sharded = {id(parameter): parameter for _, _, parameter in slots}  # ties once
    full = {key: _full_shape(parameter) for key, parameter in sharded.items()}
    for owner, name, parameter in slots:
        owner._parameters[name] = full[id(parameter)]
    try:
        yield
        for owner, name, parameter in slots:
            replacement = full[id(parameter)]
            assert owner._parameters[name] is replacement, f"{name} was replaced"
        for key, parameter in sharded.items():
            _keep_shard(parameter, full[key])
    finally:
        for owner, name, parameter in slots:
            owner._parameters[name] = parameter


def _full_shape(parameter: DTensor) -> nn.Parameter:
    local = parameter.to_local()
    full = torch.full(
        parameter.shape, torch.nan, dtype=local.dtype, device=local.device
    )
    return nn.Parameter(full, requires_grad=parameter.requires_grad)


@torch.no_grad()
def _keep_shard(parameter: DTensor, full: nn.Parameter) -> None:
    shard = distribute_tensor(
        full.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    parameter.to_local().copy_(shard.to_local())

"""Worker: whole models through `parallelize` on 2 ranks, against one plain process.

One forward and backward of each mode: FSDP2, the ring, compiled blocks and every kind
of activation checkpointing. The single process has none of these; its attention is the
reference, which shares no code with the ring.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mtraining_flex  # noqa: F401  before torchtitan

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims

from mtraining_flex import cpu_device
from mtraining_flex.attention import SparseAttention
from mtraining_flex.config import SparseAttention as SparseConfig
from mtraining_flex.counters import recorder
from mtraining_flex.layout import build_layout, shard_batch
from mtraining_flex.models.llama3 import llama3_flavors
from mtraining_flex.models.qwen2 import qwen2_flavors
from mtraining_flex.pattern.types import VerticalSlash
from mtraining_flex.reference import reference_attention, reference_pattern
from mtraining_flex.ring import drive, ops
from mtraining_flex.train_spec import TRAIN_SPECS
from tests.distributed.launch import run_cases

MODES = ("none", "selective", "full")
MODELS = {
    "mtraining_llama3": ("tiny", llama3_flavors),
    "mtraining_qwen2": ("tiny_tied", qwen2_flavors),
}
FLAGS = [
    "--job.custom_config_module=mtraining_flex.config",
    "--training.seq_len=256",
    "--training.mixed_precision_param=float32",
    "--sparse_attention.granularity=16",
    "--sparse_attention.budget=top_k",
    "--sparse_attention.num_vertical=24",
    "--sparse_attention.num_slash=4",
    "--sparse_attention.sink=2",
    "--activation_checkpoint.selective_ac_option=op",
]


def job(mode: str, compiled: bool, cp: int) -> Any:
    flags = [*FLAGS, f"--activation_checkpoint.mode={mode}"]
    flags.append(f"--parallelism.context_parallel_degree={cp}")
    return ConfigManager().parse_args(flags + ["--compile.enable"] * compiled)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [2, S]; a few labels do not count."""
    generator = torch.Generator().manual_seed(step)
    line = torch.randint(4096, (2, 257), generator=generator)
    labels = line[:, 1:].clone()
    labels[0, 20:30] = -100
    return line[:, :-1].clone(), labels


@torch.no_grad()
def sharpen(model: nn.Module) -> None:
    """Fresh weights attend to all keys alike; a pattern needs something to find."""
    for block in model.layers.values():
        block.attention.wq.weight.mul_(8)
        block.attention.wk.weight.mul_(8)


def draw(model: nn.Module) -> nn.Module:
    model.to_empty(device="cpu")
    torch.manual_seed(11)
    with torch.no_grad():
        model.init_weights()
    sharpen(model)
    return model.train()


def bare(name: str, attention: Callable[[int], nn.Module]) -> nn.Module:
    """The model of one process, with this inner attention in each layer."""
    flavor, flavors = MODELS[name]
    with torch.device("meta"):
        model = TRAIN_SPECS[name].model_cls(flavors[flavor])
    for layer, block in model.layers.items():
        block.attention.inner_attention = attention(int(layer))
    return draw(model)


class ReferenceAttention(nn.Module):
    """The slow, obvious method as an inner attention; remembers its patterns."""

    def __init__(self, layer: int, config: SparseConfig):
        super().__init__()
        self.layer, self.config = layer, config
        self.patterns: list[VerticalSlash] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, enable_gqa: bool
    ) -> Tensor:
        found = reference_pattern(q.detach(), k.detach(), self.config, scale)
        self.patterns.append(found)
        out, _ = reference_attention(q, k, v, found, self.config.granularity, scale)
        return out


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return cross_entropy_loss(model(tokens, **kwargs), labels)


def plain_name(name: str) -> str:
    """Of a parameter, without the wrappers of compile and checkpointing."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of whole parameters; collective."""
    return {
        plain_name(name): full(parameter.grad).clone()
        for name, parameter in model.named_parameters()
    }


def single_process(name: str, step: int) -> dict[str, Any]:
    """Loss, gradients and patterns of one process with the reference's attention."""
    config = job("none", False, 1).sparse_attention
    model = bare(name, lambda layer: ReferenceAttention(layer, config))
    tokens, labels = batch(step)
    loss = loss_of(model, tokens, labels) / (labels != -100).sum()
    loss.backward()
    patterns = [
        block.attention.inner_attention.patterns for block in model.layers.values()
    ]
    return {
        "loss": loss.detach(),
        "gradients": gradients(model),
        "patterns": [[p.tensors() for p in layer] for layer in patterns],
    }


@dataclass
class Calls:
    """What the search, and the ring forward and backward, were called with."""

    searched: list[VerticalSlash] = field(default_factory=list)
    forward: list[tuple[int, VerticalSlash]] = field(default_factory=list)
    backward: list[VerticalSlash] = field(default_factory=list)

    def counting(self) -> ExitStack:
        """Note each call inside the block; what is called stays the same."""
        search, backward = ops.search, drive.backward

        def noted_search(*args: Any) -> Any:
            found = search(*args)
            self.searched.append(found[0])
            return found

        def noted_pattern(layer: int, pattern: VerticalSlash, *_: Any) -> None:
            self.forward.append((layer, pattern))

        def noted_backward(*args: Any) -> Any:
            self.backward.append(args[-1])
            return backward(*args)

        stack = ExitStack()
        stack.enter_context(mock.patch.object(ops, "search", noted_search))
        stack.enter_context(mock.patch.object(recorder, "add_pattern", noted_pattern))
        stack.enter_context(mock.patch.object(drive, "backward", noted_backward))
        return stack


def parallel(name: str, mode: str, compiled: bool) -> tuple[nn.Module, ParallelDims]:
    """The model as training builds it, over a ring of all ranks."""
    world = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=1,
        cp=world,
        tp=1,
        pp=1,
        ep=1,
        etp=1,
        world_size=world,
    )
    spec, flavor = TRAIN_SPECS[name], MODELS[name][0]
    with torch.device("meta"):
        model = spec.model_cls(spec.model_args[flavor])
    config = job(mode, compiled, world)
    return draw(spec.parallelize_fn(model, dims, config)), dims


def one_step(model: nn.Module, dims: ParallelDims, step: int) -> Tensor:
    """Forward and backward of this rank's share; the whole batch's loss."""
    layout = build_layout("striped", 256, dims.cp, 16)
    mesh = dims.get_mesh("cp")
    (tokens, labels), positions = shard_batch(layout, mesh, *batch(step))
    loss = loss_of(model, tokens, labels, positions=positions)
    loss = loss / (batch(step)[1] != -100).sum()
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss


def mode_case(folder: Path, mode: str) -> None:
    """Two steps of compiled Llama: results, calls of search and ring, graphs."""
    torch._dynamo.reset()
    counters.clear()
    model, dims = parallel("mtraining_llama3", mode, True)
    assert any(isinstance(m, SparseAttention) for m in model.modules())
    for step in range(2):
        model.zero_grad()
        calls = Calls()
        # A second compilation in the second step, or for the second layer, would be one
        # for every layer and length of a real run.
        with (
            calls.counting(),
            torch._dynamo.config.patch(error_on_recompile=step > 0),
        ):
            loss = one_step(model, dims, step)
        if dist.get_rank() == 0:
            result = {
                "loss": loss,
                "searched": [p.tensors() for p in calls.searched],
                "forward": [(i, p.tensors()) for i, p in calls.forward],
                "backward": [p.tensors() for p in calls.backward],
                "graphs": counters["stats"]["unique_graphs"],
                "breaks": dict(counters["graph_break"]),
            }
            result["gradients"] = gradients(model)
            torch.save(result, folder / f"{mode}.step{step}.pt")
        else:
            gradients(model)


def tied_case(folder: Path) -> None:
    """Qwen with tied embeddings: gradients, and the tie after an optimiser's step."""
    model, dims = parallel("mtraining_qwen2", "none", False)
    loss = one_step(model, dims, 0)
    found = gradients(model)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    embedding, output = model.tok_embeddings.weight, model.output.weight
    result = {"loss": loss, "gradients": found, "tied": embedding is output}
    result["after"] = [full(embedding.detach()), full(output.detach())]
    # The tie must hold where it is used: in what the next forward computes.
    result["next_loss"] = one_step(model, dims, 1)
    if dist.get_rank() == 0:
        torch.save(result, folder / "tied.pt")


def cases(folder: Path) -> list[tuple[str, Callable[[], None]]]:
    """Name and call of each case, in order."""
    result = [(mode, partial(mode_case, folder, mode)) for mode in MODES]
    return [*result, ("tied", partial(tied_case, folder))]


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    run_cases(folder, cases(folder))
    dist.destroy_process_group()
    cpu_device.leave()


if __name__ == "__main__":
    main()

"""Worker: training runs through the real trainer, one after the other.

A plan is a list of runs. A run is flags of the command line and, for some, a change to
what the trainer reads. Each rank saves what a run shows or leaves behind, under
`<run>.rank<r>.pt`: what went to the metrics logger, the tokens that were read, the
gradients of the first step and the final parameters.
"""

import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mtraining_flex  # noqa: F401  before torchtitan

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import build_metrics_processor
from torchtitan.config import ConfigManager
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

from mtraining_flex import cpu_device, train_spec
from mtraining_flex.models.llama3 import llama3_flavors
from mtraining_flex.trainer import SparseTrainer
from tests.distributed.launch import Launched, launch, run_cases
from tests.helpers import titan_args

TITAN = "titan_llama3"
"""torchtitan's own Llama 3 and attention, for its own trainer, with our data."""


@dataclass
class Run:
    """One training run."""

    name: str
    flags: list[str] = field(default_factory=list)
    single_label: bool = False
    """Replace the data: a step is two sequences, and one label of the second counts."""


def save_plan(folder: Path, runs: list[Run]) -> None:
    (folder / "plan.json").write_text(json.dumps([asdict(run) for run in runs]))


def launch_plan(
    folder: Path, world_size: int, runs: list[Run], timeout: float = 240.0
) -> Launched:
    """Train a plan in a new process group."""
    save_plan(folder, runs)
    module = "tests.distributed.train_worker"
    return launch(module, world_size, folder, timeout=timeout)


def load_run(launched: Launched, name: str, rank: int = 0) -> dict[str, Any]:
    """What a rank saved of a run; asserts that the run ended well."""
    launched.check(name)
    return torch.load(launched.folder / f"{name}.rank{rank}.pt", weights_only=False)


# ---- in the worker ------------------------------------------------------------------


def register_titan() -> None:
    """torchtitan's Transformer in our tiny size, without a line of our model code."""
    args = titan_args(llama3_flavors["tiny"])
    spec = replace(
        train_spec.TRAIN_SPECS["mtraining_llama3"],
        model_cls=Transformer,
        model_args={"tiny": args},
        parallelize_fn=parallelize_llama,
        state_dict_adapter=None,
        build_metrics_processor_fn=build_metrics_processor,
        build_validator_fn=None,
    )
    register_train_spec(TITAN, spec)


class Capture:
    """A metrics logger that keeps what it is given and passes it on."""

    def __init__(self, logger: Any):
        self.logger = logger
        self.steps: list[tuple[int, dict[str, Any]]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.steps.append((step, dict(metrics)))
        self.logger.log(metrics, step)

    def close(self) -> None:
        self.logger.close()


class SingleLabel:
    """Two sequences a step, the same for any degree; one label of the second counts."""

    def __init__(self, trainer: Trainer):
        dims, training = trainer.parallel_dims, trainer.job_config.training
        mesh = dims.get_optional_mesh("batch")
        self.dp = 1 if mesh is None else mesh.size()
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.batch, self.seq_len = training.local_batch_size, training.seq_len
        self.steps_of_data = trainer.gradient_accumulation_steps
        assert self.dp * self.batch * self.steps_of_data == 2

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for micro in range(self.steps_of_data):
                first = (micro * self.dp + self.rank) * self.batch
                rows = [self._sequence(first + i) for i in range(self.batch)]
                tokens, labels = (torch.stack(x) for x in zip(*rows, strict=True))
                yield {"input": tokens}, labels

    def _sequence(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        line = torch.randint(4096, (self.seq_len + 1,), generator=generator)
        labels = torch.full((self.seq_len,), -100)
        if number == 1:
            at = self.seq_len * 3 // 4 + 5
            labels[at] = line[at + 1]
        return line[:-1], labels


def plain_name(name: str) -> str:
    """Of a parameter, without the wrappers of compile and checkpointing."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def whole(tensor: Tensor) -> Tensor:
    """Of a sharded tensor; collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


class Watch:
    """Hooks on a trainer that only look."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.inputs: list[Tensor] = []
        self.local: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}
        self.capture = Capture(trainer.metrics_processor.logger)
        trainer.metrics_processor.logger = self.capture
        self._process = trainer.post_dataloading_process
        trainer.post_dataloading_process = self._post_dataloading_process
        self._step = trainer.optimizers.step
        trainer.optimizers.step = self._optimizer_step

    def _post_dataloading_process(self, inputs: Any, labels: Tensor) -> Any:
        self.inputs.append(inputs["input"].clone())
        result = self._process(inputs, labels)
        self.local.append(result[0].clone())
        return result

    def _optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if not self.gradients:
            self.gradients = {
                plain_name(name): whole(parameter.grad)
                for name, parameter in self._model().named_parameters()
            }
        self._step(*args, **kwargs)

    def _model(self) -> nn.Module:
        return self.trainer.model_parts[0]

    def result(self) -> dict[str, Any]:
        """Collective."""
        steps = self.capture.steps
        training = [(i, m) for i, m in steps if "grad_norm" in m]
        validation = [(i, m) for i, m in steps if "grad_norm" not in m]
        dims = self.trainer.parallel_dims
        ranks = {}
        for name in ("batch", "cp"):
            mesh = dims.get_optional_mesh(name)
            ranks[name] = 0 if mesh is None else mesh.get_local_rank()
        return {
            "steps": [i for i, _ in training],
            "losses": [m["loss_metrics/global_avg_loss"] for _, m in training],
            "max_losses": [m["loss_metrics/global_max_loss"] for _, m in training],
            "grad_norms": [m["grad_norm"] for _, m in training],
            "metrics": [m for _, m in training],
            "validation": [(i, m) for i, m in validation],
            "inputs": self.inputs,
            "local": self.local,
            "gradients": self.gradients,
            "parameters": {
                plain_name(name): whole(parameter)
                for name, parameter in self._model().named_parameters()
            },
            "ranks": ranks,
            "first_step": training[0][0] if training else None,
        }


def train(folder: Path, run: Run) -> None:
    """One run, as torchtitan's `main` does it, and its results on disk."""
    config = ConfigManager().parse_args(list(run.flags))
    trainer_class = Trainer if config.model.name == TITAN else SparseTrainer
    trainer = trainer_class(config)
    watch = Watch(trainer)
    if run.single_label:
        trainer.dataloader = SingleLabel(trainer)
    try:
        # The first rank sleeps two seconds at the end, which many runs cannot afford.
        with mock.patch("torchtitan.train.time", _sleepless()):
            trainer.train()
    finally:
        trainer.close()
        gc.enable()  # the trainer switches it off
        torch.use_deterministic_algorithms(False)
    torch.save(watch.result(), folder / f"{run.name}.rank{dist.get_rank()}.pt")
    del trainer, watch
    gc.collect()


def _sleepless() -> SimpleNamespace:
    return SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)


def main() -> None:
    init_logger()
    folder = Path(sys.argv[1])
    runs = [Run(**run) for run in json.loads((folder / "plan.json").read_text())]
    train_spec.register()
    register_titan()
    # Built here and not by the first trainer: a case that fails early has a rank, too.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run_cases(folder, [(run.name, partial(train, folder, run)) for run in runs])
    dist.destroy_process_group()
    cpu_device.leave()


if __name__ == "__main__":
    main()

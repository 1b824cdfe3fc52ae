"""Record the patterns that a training run finds, for benchmarks to run on.

    python -m recipes.record_patterns --steps 50 --out patterns.pt \\
        --job.config_file train_configs/debug_model_32k.toml

Speed depends on the pattern: random diagonals and columns, as benchmarks draw them, lie
nowhere near each other, those of a model do. `record` trains in this process, on one
rank and in eager mode, and keeps what each layer's search returned in the last step;
`load` reads it back. All other flags are torchtitan's.
"""

import argparse
import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mtraining_flex  # noqa: F401  before torchtitan

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger, logger

from mtraining_flex import cpu_device, train_spec
from mtraining_flex.models.common import head_dim
from mtraining_flex.parallelize import attention_modules
from mtraining_flex.pattern import VerticalSlash
from mtraining_flex.trainer import SparseTrainer

Patterns = dict[int, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Recorded:
    """The patterns of one step of a training run, by layer, on the CPU."""

    patterns: dict[int, VerticalSlash]  # [B, H, ...] each
    recall: dict[int, float]  # share of the probe rows' attention kept; none if dense
    seq_len: int  # tokens
    granularity: int  # tokens
    heads: int
    kv_heads: int
    head_dim: int
    config: list[str]  # the run's flags
    step: int  # counted from 1


def record(config_args: Sequence[str], steps: int, path: str) -> Recorded:
    """Train for some steps and save the patterns of the last one.

    In this process, which must not have a process group, and without torch.compile.

    Args:
        config_args: torchtitan's flags, `--job.config_file` among them.
        steps: of the optimiser, at least 1.
        path: file to write.

    Raises:
        ValueError: no steps, or a configuration that cannot be run.
    """
    if steps < 1:
        raise ValueError(f"--steps ({steps}) must be at least 1")
    with tempfile.TemporaryDirectory() as folder, one_process():
        config = short_run_config(config_args, folder)
        config.compile.enable = False  # a compiled block does not call `find`
        config.metrics.log_freq = 1  # recall is counted in logged steps only
        config.training.steps = max(config.training.steps, steps)
        trainer = SparseTrainer(config)
        metrics = trainer.metrics_processor.logger = _LastMetrics()
        try:
            data = trainer.batch_generator(trainer.dataloader)
            with watch_patterns(trainer.model_parts[0]) as patterns:
                for _ in range(steps):
                    trainer.step += 1
                    trainer.train_step(data)
        finally:
            trainer.close()
        args = trainer.model_args
        content = {
            "patterns": {
                layer: tuple(t.cpu() for t in pattern)
                for layer, pattern in sorted(patterns.items())
            },
            "recall": metrics.by_layer("sparse/recall"),
            "seq_len": config.training.seq_len,
            "granularity": config.sparse_attention.granularity,
            "heads": args.n_heads,
            "kv_heads": args.n_kv_heads or args.n_heads,
            "head_dim": head_dim(args),
            "config": list(config_args),
            "step": trainer.step,
        }
    torch.save(content, path)
    return load(path)


def load(path: str) -> Recorded:
    """Read what `record` has saved.

    Raises:
        ValueError: there is no such file, or it is another kind of file.
    """
    if not Path(path).is_file():
        raise ValueError(f"recorded patterns ('{path}') do not exist: record them")
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        patterns = {i: VerticalSlash(*t) for i, t in content.pop("patterns").items()}
        return Recorded(patterns=patterns, **content)
    except Exception as error:  # bytes that are no archive can raise anything
        raise ValueError(
            f"'{path}' holds no recorded patterns; record them with "
            f"`python -m recipes.record_patterns` ({error})"
        ) from None


@contextmanager
def watch_patterns(model: nn.Module) -> Iterator[Patterns]:
    """Keep the tensors that each layer's search returned last, as long as this lasts.

    Yields:
        Layer to (slash, num_slash, vertical, num_vertical), on the model's device; it
        fills while the model runs in eager mode.
    """
    found: Patterns = {}
    modules = attention_modules(model)

    def watched(layer: int, find: Any) -> Any:
        def call(*args: Any) -> tuple[Tensor, ...]:
            found[layer] = find(*args)
            return found[layer]

        return call

    for module in modules:
        module.find = watched(int(module.layer), module.find)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for module in modules:
            del module.find  # the class's is back


class _LastMetrics:
    """A metrics logger that keeps the last step's."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.metrics = metrics

    def close(self) -> None:
        pass

    def by_layer(self, name: str) -> dict[int, float]:
        prefix = f"{name}/layer_"
        return {
            int(key.removeprefix(prefix)): value
            for key, value in self.metrics.items()
            if key.startswith(prefix)
        }


def short_run_config(args: Sequence[str], folder: str) -> Any:
    """torchtitan's configuration, without all that only a long run needs.

    No checkpoint, validation, TensorBoard or W&B; what is written goes to `folder`.
    """
    train_spec.register()
    config = ConfigManager().parse_args(list(args))
    config.job.dump_folder = folder
    config.checkpoint.enable = False
    config.validation.enable = False
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    return config


@contextmanager
def one_process() -> Iterator[None]:
    """What torchrun tells a lone process; leaves this one as it was.

    The process group that is built inside is destroyed, and the environment, garbage
    collection and determinism that torchtitan sets are set back.
    """
    assert not dist.is_initialized(), "this process has a process group already"
    environment, collects = dict(os.environ), gc.isenabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # a free port
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(deterministic)
        if collects:
            gc.enable()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", required=True, help="file to write")
    args, config_args = parser.parse_known_args()
    init_logger()
    recorded = record(config_args, args.steps, args.out)
    heads = ", ".join(
        f"layer {layer}: {pattern.num_slash.double().mean():.1f} slashes, "
        f"{pattern.num_vertical.double().mean():.1f} verticals a head"
        for layer, pattern in recorded.patterns.items()
    )
    logger.info(f"Saved the patterns of step {recorded.step} in {args.out}: {heads}")
    if cpu_device.available_device_type() == "cpu":
        cpu_device.leave()


if __name__ == "__main__":
    main()

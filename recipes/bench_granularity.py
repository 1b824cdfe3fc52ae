"""What blocks of 64 buy over blocks of 128: pairs kept at equal recall, and speed.

    python -m recipes.bench_granularity --job.config_file \\
        train_configs/debug_model_32k.toml --train 50

Trains for some steps, takes queries and keys of each layer, and searches patterns for
them at both granularities with several budgets. Finer blocks fit the attention better,
so fewer pairs hold the same share of its mass; but smaller tiles compute slower. Recall
is that of all rows, exactly, and not of the probe rows, by which a pattern is chosen.
Densities are compared at equal recall, between the measured points of a curve. On a GPU
the kernels of backend `triton` are timed on each pattern.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mtraining_flex  # noqa: F401  before torchtitan

# isort: split
import torch
from torch import Tensor

from mtraining_flex import cpu_device
from mtraining_flex.config import SparseAttention
from mtraining_flex.parallelize import attention_modules
from mtraining_flex.pattern import VerticalSlash, density, find_pattern, recall
from mtraining_flex.trainer import SparseTrainer
from recipes.record_patterns import one_process, short_run_config

GRANULARITIES = (128, 64)


@dataclass(frozen=True)
class Point:
    """One budget at one granularity, over all layers and heads."""

    granularity: int
    tokens_by_slash: int  # budget: slashes times granularity
    verticals: int
    density: float
    recall: float
    ms: float | None  # forward + backward of all layers


def train(overrides: Sequence[str], steps: int) -> tuple[Any, list[list[Tensor]]]:
    """The configuration, and q, k, v of each layer in the last of some steps."""
    seen: dict[int, list[Tensor]] = {}

    def watch(layer: int) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...]) -> None:
            seen[layer] = [x.detach().clone() for x in args[:3]]

        return hook

    with tempfile.TemporaryDirectory() as folder, one_process():
        config = short_run_config(overrides, folder)
        config.compile.enable = False  # a compiled block calls no hooks
        config.training.steps = max(config.training.steps, steps)
        trainer = SparseTrainer(config)
        try:
            for module in attention_modules(trainer.model_parts[0]):
                module.register_forward_pre_hook(watch(int(module.layer)))
            data = trainer.batch_generator(trainer.dataloader)
            for _ in range(steps):
                trainer.step += 1
                trainer.train_step(data)
        finally:
            trainer.close()
    return config, [seen[layer] for layer in sorted(seen)]


def measure(
    layers: list[list[Tensor]], granularity: int, blocks: int, verticals: int
) -> Point:
    """Density and recall of one budget, and the time of its patterns."""
    seq_len = layers[0][0].shape[2]
    config = SparseAttention(
        granularity=granularity,
        budget="top_k",
        num_slash=blocks,
        max_slash=blocks,
        num_vertical=verticals,
        max_vertical=verticals,
    )
    kept, held, ms = [], [], 0.0
    on_gpu = layers[0][0].is_cuda
    for q, k, v in layers:
        pattern = find_pattern(q, k, config)
        kept.append(density(pattern, seq_len, granularity).mean().item())
        share = recall(q, k, pattern, granularity=granularity)
        held.append(share.mean().item())
        if on_gpu:
            ms += time_layer(q, k, v, pattern, granularity)
    return Point(
        granularity,
        blocks * granularity,
        verticals,
        sum(kept) / len(kept),
        sum(held) / len(held),
        ms if on_gpu else None,
    )


def time_layer(
    q: Tensor, k: Tensor, v: Tensor, pattern: VerticalSlash, granularity: int
) -> float:
    """Forward and backward of backend `triton` in ms."""
    from recipes.bench_attention import Problem, Shape, lone_ms

    _, heads, seq_len, head_dim = q.shape
    shape = Shape(seq_len, heads, k.shape[1], head_dim, granularity)
    problem = Problem(shape, pattern, "triton", q, k, v, torch.randn_like(q))
    return lone_ms(problem.all_forward, 50) + lone_ms(problem.all_backward, 50)


def at_recall(points: Sequence[Point], target: float, what: str) -> float | None:
    """A number of a curve where it reaches a recall, between measured points."""
    curve = sorted(points, key=lambda point: point.recall)
    for low, high in zip(curve, curve[1:], strict=False):
        if low.recall <= target <= high.recall:
            share = (target - low.recall) / max(high.recall - low.recall, 1e-12)
            a, b = getattr(low, what), getattr(high, what)
            return None if a is None else a + share * (b - a)
    return None


def report(points: Sequence[Point]) -> None:
    """Both curves, and the comparison at the recalls of the coarse one."""
    print("| granularity | tokens by slashes | verticals | density | recall | ms |")
    print("|---|---|---|---|---|---|")
    for p in points:
        ms = "-" if p.ms is None else f"{p.ms:.2f}"
        print(
            f"| {p.granularity} | {p.tokens_by_slash} | {p.verticals} | "
            f"{p.density:.4f} | {p.recall:.4f} | {ms} |"
        )
    coarse, fine = ([p for p in points if p.granularity == g] for g in GRANULARITIES)
    print("\n| recall | density 128 | density 64 | ratio | ms 128 | ms 64 | ratio |")
    print("|---|---|---|---|---|---|---|")
    for p in coarse:
        other = at_recall(fine, p.recall, "density")
        if other is None:
            continue
        fine_ms = at_recall(fine, p.recall, "ms")
        times = "- | - | -"
        if fine_ms is not None and p.ms is not None:
            times = f"{p.ms:.2f} | {fine_ms:.2f} | {fine_ms / p.ms:.3f}"
        print(
            f"| {p.recall:.4f} | {p.density:.4f} | {other:.4f} | "
            f"{other / p.density:.3f} | {times} |"
        )


def main() -> None:
    """Command line; flags that are not known here are torchtitan's."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--train", type=int, default=50, help="steps before")
    parser.add_argument("--verticals", type=int, default=256)
    parser.add_argument(
        "--tokens", default="256,512,1024,2048,4096", help="kept by slashes, per row"
    )
    parser.add_argument("--json", default="", help="also write all numbers here")
    args, overrides = parser.parse_known_args()
    budgets = [int(x) for x in args.tokens.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        seq_len = short_run_config(overrides, folder).training.seq_len
    for tokens in budgets:
        if tokens % max(GRANULARITIES) or not 0 < tokens <= seq_len:
            raise ValueError(
                f"--tokens ({tokens}) must be a multiple of {max(GRANULARITIES)} up to "
                f"training.seq_len ({seq_len})"
            )
    config, layers = train(overrides, args.train)
    points = [
        measure(layers, g, tokens // g, args.verticals)
        for g in GRANULARITIES
        for tokens in budgets
    ]
    print(
        f"{config.model.name} {config.model.flavor}, {seq_len} tokens, after "
        f"{args.train} steps, {len(layers)} layers, {args.verticals} verticals a head"
    )
    report(points)
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(point) for point in points], file, indent=1)
    if cpu_device.available_device_type() == "cpu":
        cpu_device.leave()


if __name__ == "__main__":
    main()

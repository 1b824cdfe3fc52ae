"""What a training run will cost, and which layout and rotation to choose.

    python -m recipes.plan --config train_configs/debug_model.toml --world 32 --inner 8

Nothing is started: no process, no GPU. For each layout and rotation it prints

    worker, step   imbalance in executed blocks, as `ring/worker_imbalance` and
                   `ring/step_imbalance` of the metrics, mean over layers
    bytes          keys, values, their gradients and the gathered columns that a rank
                   sends: of a layer, and of an optimiser step; inner links are those
                   within a node, outer ones between nodes
    time           of a step, and tokens per second of the whole run; "launches" where
                   the CPU needs longer to launch a step than the GPUs to compute it
    memory         of one rank at its peak, by what it is for

then from which length on sparse attention pays, and the fastest setting that fits, as
lines of TOML. A setting that cannot run is listed with the reason. How each number is
reckoned stands in `recipes/planning`, the rates in `recipes/hardware`.

* `parallelism.context_parallel_degree` is the configuration's, as in training (-1: all
  ranks that nothing else uses); --cp N plans another.
* Patterns: --patterns FILE (`recipes.record_patterns`), or synthetic ones. These keep
  the nearest diagonals, the first columns and the rest anywhere: --density of the
  slash blocks, --verticals columns a head, by default the caps of
  `[sparse_attention]`, since nobody knows beforehand what holds a mass.
* --model-args n_layers=36,dim=2048,... changes the flavor's arguments.
* All other flags are torchtitan's, "--training.seq_len=524288".
* --measure trains three configurations on this machine's GPU and holds the predictions
  against them (`recipes.planning.measure`).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import mtraining_flex  # noqa: F401  before torchtitan

# isort: split
from mtraining_flex.config import resolve_degrees
from recipes.planning.compare import Run, make_plan, one_line
from recipes.planning.hardware import BACKENDS, choose_backend, load_hardware
from recipes.planning.problem import count_model, model_arguments, read_config
from recipes.planning.report import as_json, report

NODE_GPUS = 8  # if neither --inner nor the configuration says


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything here does."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and torchtitan's.

    Raises:
        ValueError: flags that are missing or of another type.
    """
    parser = _Parser(
        prog="recipes.plan",
        description=(__doc__ or "").split("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("--config", default="", help="TOML file of the run")
    parser.add_argument("--world", type=int, help="GPUs of the run")
    parser.add_argument(
        "--inner",
        type=int,
        help="GPUs of a node, and ring.inner_degree of two_level; default: "
        f"the configuration's ring.inner_degree, or {NODE_GPUS}",
    )
    parser.add_argument("--cp", type=int, help="context_parallel_degree")
    parser.add_argument("--hardware", default="h200", help="h200, a100 or a TOML file")
    parser.add_argument("--patterns", default="", help="file of recorded patterns")
    parser.add_argument("--density", type=float, help="of slash blocks, (0, 1]")
    parser.add_argument("--verticals", type=int, help="columns of each head")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--seq-len", type=int, help="tokens: training.seq_len")
    parser.add_argument("--model-args", default="", help="NAME=VALUE,...")
    parser.add_argument("--json", default="", help="also write all numbers here")
    parser.add_argument("--measure", action="store_true", help="on this machine's GPU")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="of --measure; default: cuda"
    )
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args(argv)
    if args.measure:
        _refuse_runs(args, overrides)
        args.device = args.device or "cuda"
        return args, overrides
    if args.device is not None:
        raise ValueError(
            f"--device ({args.device}) is for --measure: a plan needs none"
        )
    for name in ("config", "world"):
        if getattr(args, name) in ("", None):
            raise ValueError(f"--{name} is missing")
    if args.seq_len is not None:
        overrides.append(f"--training.seq_len={args.seq_len}")
    return args, overrides


def _refuse_runs(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """--measure has runs of its own.

    Raises:
        ValueError: a flag that would change them.
    """
    known = ("measure", "device", "case", "hardware", "backend", "json")
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(args).items()
        if name not in known and value not in ("", None)
    ]
    if given or overrides:
        raise ValueError(
            f"--measure has runs of its own, got {' '.join([*given, *overrides])}"
        )


def read_run(args: argparse.Namespace, overrides: Sequence[str]) -> Run:
    """Everything but the settings, checked as far as it can be alone.

    Raises:
        ValueError: what cannot be, in one line.
    """
    for name in ("world", "inner", "cp"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} ({value}) must be at least 1")
    if args.patterns and (args.density, args.verticals) != (None, None):
        raise ValueError("--patterns has densities and verticals of its own: give one")
    hardware = load_hardware(args.hardware)
    config = read_config(args.config, overrides)
    config.sparse_attention.validate()
    degree_from = "from the configuration"
    if args.cp is not None:
        config.parallelism.context_parallel_degree = args.cp
        degree_from = "from --cp"
    elif config.parallelism.context_parallel_degree == -1:
        degree_from = "every rank that nothing else uses, from the configuration's -1"
    resolve_degrees(config, args.world)
    model = count_model(config, model_arguments(config, args.model_args))
    backend = choose_backend(
        hardware,
        args.backend or config.sparse_attention.backend,
        config.sparse_attention.granularity,
        model.head_dim,
        config.debug.deterministic,
    )
    return Run(
        config=config,
        model=model,
        hardware=hardware,
        world=args.world,
        node_gpus=args.inner or config.ring.inner_degree or NODE_GPUS,
        backend=backend,
        degree_from=degree_from,
        recording=args.patterns,
        density=args.density,
        verticals=args.verticals,
    )


def measure(args: argparse.Namespace) -> int:
    """`--measure`; returns the exit code.

    Raises:
        ValueError: no such device or table.
    """
    # Not above: a plan needs no trainer.
    from recipes.planning import measure as measuring

    hardware = load_hardware(args.hardware)
    measuring.check_device(args.device)
    backend = args.backend or "auto"
    if args.case:
        measuring.run_child(args.case, hardware, backend)
        return 0
    flags = [f"--hardware={args.hardware}"]
    flags += [f"--backend={args.backend}"] if args.backend else []
    results, wrong = measuring.run_all(
        hardware, args.device, flags, lambda part: print(part, flush=True)
    )
    if args.json:
        content = {"results": [asdict(each) for each in results], "wrong": wrong}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(wrong or ["All predictions hold."]))
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    try:
        args, overrides = parse(argv)
        if args.measure:
            return measure(args)
        plan = make_plan(read_run(args, overrides))
        if args.json:
            Path(args.json).write_text(json.dumps(as_json(plan), indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"recipes.plan: {one_line(error)}", file=sys.stderr)
        return 2
    print(report(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())

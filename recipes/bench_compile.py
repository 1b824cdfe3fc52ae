"""What torch.compile changes in a training step, for each attention, on one device.

    python -m recipes.bench_compile --job.config_file train_configs/debug_model_32k.toml

Rows are (attention, mode). "sdpa" is torch's own dense attention (cuDNN or Flash),
"dense" our ring with every block by the configuration's backend, any other name sparse
attention by that backend with the configuration's budget. "eager" and "compile" are
`compile.enable` off and on, with the configuration's `compile.components`. Each row is
a process of its own with empty compile caches, and trains the same model on the same
text by `SparseTrainer.train_step`.

    step, slowest  median and largest host time of a synchronised step; batches are read
                   before, nothing is logged
    compile        what the warm-up steps took beyond their median time
    graph breaks   of the whole process; blocks are compiled with fullgraph=True
    recompiles     graphs of torch.compile, graphs of `compat.compiled` and variants of
                   Triton kernels that the timed steps have added (FLASH's own compiler
                   has no counter: it would show in "slowest")
    peak           allocator's peak in the timed steps; on the CPU, of the process
    loss           of the last timed step
    kept           share of the causal pairs, in one step after the timed ones

No speed is printed of a row that disagrees with one of its pattern, in that loss or in
the first gradient's norm of any attention parameter (of the whole model it would hardly
move if the backward of attention were wrong). The exit code is 1 then, and if a row has
a graph break, a recompile, or failed. A row that cannot run here holds the `ValueError`
that says why. Each row is reported, and `--json` written, as soon as it has run.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mtraining_flex  # noqa: F401  before torchtitan

# isort: split
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import device_module

from mtraining_flex import cpu_device
from mtraining_flex.compat import num_compiled
from mtraining_flex.config import BACKENDS, validate_job
from mtraining_flex.counters import recorder
from mtraining_flex.models.common import head_dim
from mtraining_flex.parallelize import attention_modules
from mtraining_flex.ring.backends import resolve_backend
from mtraining_flex.ring.comm import comm_for
from mtraining_flex.trainer import SparseTrainer
from recipes.record_patterns import one_process, short_run_config

MODES = ("eager", "compile")
DENSE = ("sdpa", "dense")
TIMEOUT = 600.0  # seconds of one row
Batches = Iterator[tuple[dict[str, Tensor], Tensor]]


@dataclass(frozen=True)
class Numbers:
    """What one process has measured."""

    step_ms: float  # median of the timed steps
    slowest_ms: float
    compile_s: float
    graph_breaks: int
    compiled: dict[str, int]  # graphs and kernels by kind, in the warm-up
    recompiles: dict[str, int]  # by kind, in the timed steps
    peak_bytes: int
    loss: float
    first_grad_norms: dict[str, float]  # of all layers, by attention parameter
    kept: float | None  # None for attention that is not ours


@dataclass(frozen=True)
class Row:
    """One process: its numbers, or why there are none."""

    attention: str
    mode: str
    status: str  # "ok", "refused" (a ValueError), "failed"
    note: str  # what computed the attention, or the error's text
    numbers: Numbers | None = None


# ---- in the process of a row --------------------------------------------------------


class MeasuredTrainer(SparseTrainer):
    """Keeps the loss of a step and norms of the first gradient; logs nothing."""

    def __init__(self, job_config: Any):
        super().__init__(job_config)
        self.metrics_processor.should_log = lambda step: False  # type: ignore[method-assign]
        self.loss = torch.zeros((), device=self.device)
        self.first_grad_norms: dict[str, Tensor] = {}

    def train_step(self, data_iterator: Batches) -> None:
        self.loss = torch.zeros_like(self.loss)
        super().train_step(data_iterator)

    def forward_backward_step(self, **batch: Any) -> Tensor:
        loss = super().forward_backward_step(**batch)
        self.loss += loss.detach()
        if self.step == 1:
            self.first_grad_norms = attention_grad_norms(self.model_parts[0])
        return loss


def attention_grad_norms(model: nn.Module) -> dict[str, Tensor]:
    """Norm of the gradient, before clipping, by attention parameter ("wq.weight").

    Layers are taken together.

    Raises:
        RuntimeError: an attention parameter has no gradient, or there is none.
    """
    gradients = defaultdict(list)
    for name, parameter in model.named_parameters():
        _, found, kind = name.partition(".attention.")
        if not found:
            continue
        if parameter.grad is None:
            raise RuntimeError(f"{name} has no gradient")
        gradients[kind].append(parameter.grad)
    if not gradients:
        raise RuntimeError("the model has no parameter named '*.attention.*'")
    return {
        kind: nn.utils.get_total_norm(tensors) for kind, tensors in gradients.items()
    }


class SDPA(ScaledDotProductAttentionWrapper):
    """torchtitan's dense attention; on a GPU never by the math kernel."""

    if cpu_device.available_device_type() != "cpu":
        sdpa_backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]

    def kernel(self, config: Any, model_args: Any) -> str:
        """Which kernel it takes, by the name of its backward."""
        device = torch.device(cpu_device.available_device_type())
        dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
        kv_heads = model_args.n_kv_heads or model_args.n_heads
        q, k, v = (
            torch.zeros(
                (1, config.training.seq_len, heads, head_dim(model_args)),
                device=device,
                dtype=dtype,
                requires_grad=True,
            ).transpose(1, 2)
            for heads in (model_args.n_heads, kv_heads, kv_heads)
        )
        out = self.forward(q, k, v, enable_gqa=kv_heads < model_args.n_heads)
        assert out.grad_fn is not None
        name = out.grad_fn.name()
        return name.removeprefix("ScaledDotProduct").removesuffix("Backward0")


class TritonCounter:
    """Counts variants of Triton kernels that are compiled at their launch."""

    def __init__(self) -> None:
        self.count = 0
        try:
            from triton import knobs
        except ImportError:  # no Triton, no such kernel
            return
        knobs.runtime.jit_post_compile_hook = self._add

    def _add(self, **kernel: Any) -> None:
        self.count += 1


def row_config(overrides: Sequence[str], folder: str, name: str, mode: str) -> Any:
    """The configuration of one row.

    Raises:
        ValueError: compiling would leave the blocks eager.
    """
    config = short_run_config(overrides, folder)
    # Its checks are not of the step, and torch's attention has nothing to check.
    config.sentinel.every, config.sentinel.startup = 0, False
    if config.debug.seed is None:
        config.debug.seed = 0  # all rows start with the same weights
    config.compile.enable = mode == "compile"
    if mode == "compile" and "model" not in config.compile.components:
        raise ValueError(
            f"compile.components ({config.compile.components}) must include 'model'"
        )
    if name in DENSE:
        config.sparse_attention.pattern = "dense"
    if name == "sdpa":
        config.sparse_attention.backend = "eager"  # replaced before the first step
    elif name != "dense":
        config.sparse_attention.backend = name
    return config


def use_sdpa(trainer: SparseTrainer) -> SDPA:
    """Put torch's attention into the slots of ours. Blocks must not have run yet."""
    model: Any = trainer.model_parts[0]
    attention_modules(model)  # all slots are what they should be
    sdpa = SDPA()
    for block in model.layers.values():
        block.attention.inner_attention = sdpa
    return sdpa


def compiled_graphs(triton: TritonCounter) -> dict[str, int]:
    """All that has been compiled in this process so far, by kind."""
    return {
        "torch.compile": counters["stats"]["unique_graphs"],
        "fused": num_compiled(),
        "triton": triton.count,
    }


def timed_step(trainer: SparseTrainer, data: Batches) -> float:
    """Host time of one optimiser step in ms; its batches are read before."""
    batches = [next(data) for _ in range(trainer.gradient_accumulation_steps)]
    trainer.step += 1
    device_module.synchronize()
    start = time.perf_counter()
    trainer.train_step(iter(batches))
    device_module.synchronize()
    return (time.perf_counter() - start) * 1e3


def peak_bytes() -> int:
    """Since `reset_peak_memory_stats`; on the CPU, of the process so far."""
    if cpu_device.available_device_type() == "cuda":
        return torch.cuda.max_memory_allocated()
    stats: dict[str, int] = device_module.memory_stats()
    return stats["active_bytes.all.peak"]


def kept_pairs(trainer: SparseTrainer, data: Batches) -> float | None:
    """Density in one more forward and backward, which counts."""
    inputs, labels = next(data)
    labels = labels.to(trainer.device)
    with recorder.recording(True):
        trainer.forward_backward_step(
            input_dict={name: x.to(trainer.device) for name, x in inputs.items()},
            labels=labels,
            global_valid_tokens=(labels != IGNORE_INDEX).sum(),
        )
    return recorder.summary(comm_for(None)).get("sparse/density")


def measure(trainer: MeasuredTrainer, warmup: int, steps: int) -> Numbers:
    """Train, and measure the steps behind the warm-up."""
    triton = TritonCounter()
    data = trainer.batch_generator(trainer.dataloader)
    first = [timed_step(trainer, data) for _ in range(warmup)]
    before = compiled_graphs(triton)
    device_module.reset_peak_memory_stats()
    times = [timed_step(trainer, data) for _ in range(steps)]
    after = compiled_graphs(triton)
    peak, loss = peak_bytes(), trainer.loss.item()
    median = statistics.median(times)
    return Numbers(
        step_ms=median,
        slowest_ms=max(times),
        compile_s=max(sum(first) - warmup * median, 0.0) / 1e3,
        graph_breaks=sum(counters["graph_break"].values()),
        compiled=before,
        recompiles={kind: after[kind] - before[kind] for kind in after},
        peak_bytes=peak,
        loss=loss,
        first_grad_norms={
            kind: norm.item() for kind, norm in trainer.first_grad_norms.items()
        },
        kept=kept_pairs(trainer, data),
    )


def run_row(args: argparse.Namespace, overrides: Sequence[str]) -> Row:
    """One row, in this process."""
    name, mode = args.row.split(":")
    with tempfile.TemporaryDirectory() as folder, one_process():
        try:
            config = row_config(overrides, folder, name, mode)
            total = args.warmup + args.steps
            config.training.steps = max(config.training.steps, total)
            trainer = MeasuredTrainer(config)
        except ValueError as error:
            return Row(name, mode, "refused", str(error))
        if name == "sdpa":
            note = use_sdpa(trainer).kernel(config, trainer.model_args)
        else:
            note = backend_of(config)
        numbers = measure(trainer, args.warmup, args.steps)
        trainer.close()
    return Row(name, mode, "ok", note, numbers)


# ---- in the parent ------------------------------------------------------------------


def backend_of(config: Any, backend: str | None = None) -> str:
    """The backend that runs a configuration here.

    Raises:
        ValueError: it cannot run here.
    """
    sparse = config.sparse_attention
    model_args = get_train_spec(config.model.name).model_args[config.model.flavor]
    chosen, _ = resolve_backend(
        sparse.backend if backend is None else backend,
        cpu_device.available_device_type(),
        sparse.granularity,
        TORCH_DTYPE_MAP[config.training.mixed_precision_param],
        head_dim(model_args),  # type: ignore[arg-type]
    )
    return chosen


def runnable(config: Any) -> list[str]:
    """Dense attention and all backends that can run here; never dense math on a GPU."""
    names = list(DENSE)
    for backend in BACKENDS:
        on_gpu = cpu_device.available_device_type() != "cpu"
        if backend == "auto" or (backend == "eager" and on_gpu):
            continue
        try:
            names.append(backend_of(config, backend))
        except ValueError:
            pass
    return names


def start_row(
    name: str, mode: str, args: argparse.Namespace, overrides: Sequence[str]
) -> Row:
    """Run a row in a process of its own, with compile caches of its own."""
    command = [sys.executable, "-m", "recipes.bench_compile", f"--row={name}:{mode}"]
    command += [f"--steps={args.steps}", f"--warmup={args.warmup}", *overrides]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        # Files, not pipes: compile workers may outlive the process that is ended.
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("w") as stdout, err.open("w") as stderr:
            try:
                code = subprocess.run(
                    command,
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    timeout=TIMEOUT,
                ).returncode
            except subprocess.TimeoutExpired:
                return Row(name, mode, "failed", f"no end after {TIMEOUT:.0f} s")
        lines = [x for x in out.read_text().splitlines() if x.startswith("{")]
        if code == 0 and lines:
            return row_from_json(lines[-1])
        log = err.read_text()
        print(log[-5000:], file=sys.stderr)
        last = (log.strip().splitlines() or ["no output"])[-1]
        return Row(name, mode, "failed", f"exit code {code}: {last}")


def row_from_json(line: str) -> Row:
    row = json.loads(line)
    numbers = row["numbers"]
    return Row(**row | {"numbers": Numbers(**numbers) if numbers else None})


def disagreements(rows: Sequence[Row], all_dense: bool, tolerance: float) -> list[str]:
    """Rows that should train alike and do not.

    Each row is compared with the first that computes the same: dense attention, or the
    configuration's pattern (which may be dense, too: `all_dense`).
    """
    first: dict[bool, tuple[Row, Numbers]] = {}
    found = []
    for row in rows:
        if (b := row.numbers) is None:
            continue
        other, a = first.setdefault(all_dense or row.attention in DENSE, (row, b))
        if a.first_grad_norms.keys() != b.first_grad_norms.keys():
            raise RuntimeError(f"{a.first_grad_norms} and {b.first_grad_norms}")
        compared = [("loss of the last step", a.loss, b.loss)] + [
            (f"first gradient's norm of {kind}", norm, b.first_grad_norms[kind])
            for kind, norm in a.first_grad_norms.items()
        ]
        for what, x, y in compared:
            # A NaN is not less, and where nothing is trained nothing agrees.
            if x == 0 or not abs(x - y) <= tolerance * abs(x):
                found.append(
                    f"{what}: {x:.6g} with {other.attention}, {other.mode}; {y:.6g} "
                    f"with {row.attention}, {row.mode} (allowed: {tolerance:g} of it)"
                )
    return found


COLUMNS = (
    "| attention | mode | step ms | slowest ms | compile s | graph breaks | "
    "recompiles | peak MiB | loss | kept | note |"
)


def table_row(row: Row) -> str:
    """A row under `COLUMNS`."""
    cells = ["-"] * 8
    if (n := row.numbers) is not None:
        cells = [
            f"{n.step_ms:.2f}",
            f"{n.slowest_ms:.2f}",
            f"{n.compile_s:.1f}",
            str(n.graph_breaks),
            str(sum(n.recompiles.values())),
            f"{n.peak_bytes / 2**20:.0f}",
            f"{n.loss:.5f}",
            "1" if n.kept is None else f"{n.kept:.4f}",
        ]
    note = row.note.replace("\n", " ").replace("|", "\\|")
    note = note if row.status == "ok" else f"{row.status}: {note}"
    return "| " + " | ".join([row.attention, row.mode, *cells, note]) + " |"


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    return "\n".join([COLUMNS, "|" + "---|" * 11, *map(table_row, rows)])


def problems(rows: Sequence[Row]) -> list[str]:
    """What must not be: graph breaks, recompiles, rows that failed."""
    found = []
    for row in rows:
        name = f"{row.attention}, {row.mode}"
        if row.status == "failed":
            found.append(f"{name}: {row.note}")
        if (n := row.numbers) is not None:
            if n.graph_breaks:
                found.append(f"{name}: {n.graph_breaks} graph breaks")
            if any(n.recompiles.values()):
                found.append(f"{name}: recompiles after warm-up {n.recompiles}")
    return found


def run_all(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """All rows, one after the other, and the report.

    Raises:
        SystemExit: rows disagree, or something happened that must not.
        ValueError: a configuration that no row could run.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = short_run_config(overrides, folder)
    validate_job(config, 1)
    names = args.variants.split(",") if args.variants else runnable(config)
    for name in names:
        if name not in (*DENSE, *BACKENDS):
            raise ValueError(
                f"--variants: '{name}' must be one of {[*DENSE, *BACKENDS]}"
            )
    on_gpu = cpu_device.available_device_type() == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    precision = config.training.mixed_precision_param
    tolerance = 1e-3 if precision == "float32" else 1e-2
    all_dense = config.sparse_attention.pattern == "dense"
    header = (
        f"{device}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{config.model.name} {config.model.flavor}, {config.training.seq_len} tokens, "
        f"{precision}, {args.warmup} + {args.steps} steps, activation checkpointing "
        f"{config.activation_checkpoint.mode}"
    )
    rows: list[Row] = []
    different: list[str] = []
    for number, name in enumerate(names, 1):
        for mode in MODES:
            start = time.perf_counter()
            row = start_row(name, mode, args, overrides)
            rows.append(row)
            if args.json:
                report = {"header": header, "rows": [asdict(row) for row in rows]}
                Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
            known, different = different, disagreements(rows, all_dense, tolerance)
            print(
                f"[{number}/{len(names)}] {time.perf_counter() - start:.0f} s: "
                + ("; ".join(different[len(known) :]) or table_row(row)),
                file=sys.stderr,
                flush=True,
            )
            if row.status == "refused" and mode == MODES[0]:
                break  # before its first step, so in the other mode as well

    if different:
        raise SystemExit("\n".join(["rows disagree, no speed is shown:", *different]))
    print(header)
    print(
        "rows of one pattern: losses and attention's first gradients agree to "
        f"{tolerance:g}, relative"
    )
    print(table(rows))
    if found := problems(rows):
        raise SystemExit("\n".join(found))


def main() -> None:
    """Command line; flags that are not known here are torchtitan's."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--variants",
        default="",
        help=f"of {','.join([*DENSE, *BACKENDS])}; default: what can run here",
    )
    parser.add_argument("--steps", type=int, default=20, help="timed")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--json", default="", help="also write all numbers here")
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    for name in ("steps", "warmup"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} ({getattr(args, name)}) must be at least 1")
    if not args.row:
        return run_all(args, overrides)
    print(json.dumps(asdict(run_row(args, overrides))))
    if cpu_device.available_device_type() == "cpu":
        cpu_device.leave()


if __name__ == "__main__":
    main()

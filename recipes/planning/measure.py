"""Hold the predictions against real steps on one GPU: `recipes.plan --measure`.

Each case trains a model of random weights on random tokens with `SparseTrainer`, its
blocks compiled as in train_configs, and is a process of its own. Compared are

    time     median of the timed steps, against `timing.step_ms`
    memory   allocator's peak in them, against `memory.peak_memory`

The work of `step_ms` is that of the pattern which the run has found: the blocks that it
executed are counted after the timed steps. In one step more the time of all kernels is
added up by kind, to see which rate is wrong where a time is; and a process of its own
times matrix products and copies, for the numbers that a table marks as not measured.

On a CPU there is no time to compare. Its cases are tiny and have attention, which is
dense math there and not reckoned, away from the peak; allocations of a step are added
up from the profiler's events.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mtraining_flex  # noqa: F401  before torchtitan

# isort: split
import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torchtitan.components.loss import IGNORE_INDEX

from mtraining_flex import cpu_device
from mtraining_flex.counters import recorder
from recipes.bench_compile import Batches, MeasuredTrainer, backend_of, timed_step
from recipes.planning.hardware import Hardware, choose_backend
from recipes.planning.memory import peak_memory
from recipes.planning.problem import (
    Problem,
    count_model,
    flavor,
    make_problem,
    model_arguments,
)
from recipes.planning.timing import step_ms
from recipes.planning.work import Work
from recipes.record_patterns import one_process, short_run_config

ROOT = Path(__file__).parents[2]
TIMEOUT = 180.0  # seconds of one case
WARMUP, STEPS = 3, 5
MEMORY_BAR, TIME_BAR = 0.10, 0.20
RATES = "rates"  # the case that times products and copies


@dataclass(frozen=True)
class Case:
    """A run on one device."""

    name: str
    model: str
    arguments: str  # of the model
    flags: tuple[str, ...]  # torchtitan's


def _flags(
    seq_len: int, max_slash: int, max_vertical: int, mode: str
) -> tuple[str, ...]:
    return (
        f"--training.seq_len={seq_len}",
        f"--sparse_attention.max_slash={max_slash}",
        f"--sparse_attention.max_vertical={max_vertical}",
        f"--activation_checkpoint.mode={mode}",
    )


_QWEN = (
    "dim=2048,n_heads=16,n_kv_heads=2,hidden_dim=11008,enable_weight_tying=true,"
    "n_layers={layers},vocab_size={vocab}"
)
_LLAMA = (
    "dim=4096,n_heads=32,n_kv_heads=8,ffn_dim_multiplier=1.3,multiple_of=1024,"
    "n_layers={layers},vocab_size={vocab}"
)
# Their peaks lie in the loss, in a block's backward, and in the loss.
GPU_CASES = (
    Case(
        "qwen 3B wide, 8 layers, 32K",
        "mtraining_qwen2",
        _QWEN.format(layers=8, vocab=151936),
        _flags(32768, 16, 1024, "selective"),
    ),
    Case(
        "qwen 3B wide, 6 layers, 16K words, 128K, full checkpointing",
        "mtraining_qwen2",
        _QWEN.format(layers=6, vocab=16384),
        _flags(131072, 64, 1024, "full"),
    ),
    Case(
        "llama 8B wide, 4 layers, 64K",
        "mtraining_llama3",
        _LLAMA.format(layers=4, vocab=128256),
        _flags(65536, 32, 1024, "selective"),
    ),
)
CPU_CASES = (
    Case(
        "qwen, compiled, peak in a block",
        "mtraining_qwen2",
        "dim=128,n_layers=2,n_heads=1,n_kv_heads=1,hidden_dim=8192,vocab_size=4096",
        _flags(1024, 4, 64, "selective"),
    ),
    Case(
        "llama, eager, peak in the loss",
        "mtraining_llama3",
        "dim=128,n_layers=2,n_heads=1,n_kv_heads=1,vocab_size=32768",
        (*_flags(512, 4, 64, "none"), "--compile.no-enable"),
    ),
    Case(
        "llama, eager, chunked loss, peak in the loss",
        "mtraining_llama3",
        "dim=128,n_layers=2,n_heads=1,n_kv_heads=1,vocab_size=32768",
        (
            *_flags(2048, 4, 64, "none"),
            "--compile.no-enable",
            "--loss.chunk_size=512",
        ),
    ),
)


@dataclass(frozen=True)
class Measured:
    """One case, in numbers."""

    case: str
    backend: str
    predicted_ms: float
    predicted_parts_ms: dict[str, float]
    measured_ms: float
    predicted_bytes: float
    predicted_moment: str
    measured_bytes: int
    blocks: tuple[int, int]  # executed of slashes and columns, mean over layers
    kernels_ms: dict[str, float] = field(default_factory=dict)  # of one step, by kind

    @property
    def time_ratio(self) -> float:
        return self.predicted_ms / self.measured_ms

    @property
    def memory_ratio(self) -> float:
        return self.predicted_bytes / self.measured_bytes


# --- in the process of a case ---------------------------------------------------------


def run_case(case: Case, hardware: Hardware, backend: str) -> Iterator[Measured]:
    """Predict and measure; again with the times of kernels, on a GPU.

    Args:
        backend: "auto" or a name; on a CPU it is always dense math.
    """
    on_gpu = cpu_device.available_device_type() == "cuda"
    flags = [f"--job.config_file={ROOT}/train_configs/debug_model.toml"]
    flags += [f"--model.hf_assets_path={ROOT}/mtraining_flex/data/tokenizer"]
    flags += [f"--model.name={case.model}", *case.flags]
    with tempfile.TemporaryDirectory() as folder, one_process():
        config = short_run_config(flags, folder)
        config.training.steps = WARMUP + STEPS + 2
        config.sparse_attention.backend = backend if on_gpu else "eager"
        arguments = model_arguments(config, case.arguments)
        model = count_model(config, arguments)
        with flavor(config, arguments):
            chosen = backend_of(config) if on_gpu else "triton"  # reckoned, not run
            trainer = MeasuredTrainer(config)
        granularity = config.sparse_attention.granularity
        choose_backend(hardware, chosen, granularity, model.head_dim)
        problem = make_problem(config, model, 1, 1, chosen)
        data = trainer.batch_generator(random_batches(problem))
        measure = _measure_gpu if on_gpu else _measure_cpu
        measured_ms, measured_bytes = measure(trainer, data)
        works = executed_work(trainer, data)
        if not on_gpu:  # libraries of another device
            hardware = replace(hardware, workspace_mib=0.0)
        time, memory = step_ms(problem, hardware, works), peak_memory(problem, hardware)
        result = Measured(
            case=case.name,
            backend=chosen if on_gpu else "dense math",
            predicted_ms=time.total,
            predicted_parts_ms=asdict(time),
            measured_ms=measured_ms,
            predicted_bytes=memory.total,
            predicted_moment=memory.moment,
            measured_bytes=measured_bytes,
            blocks=_mean_blocks(works),
        )
        yield result
        if on_gpu:
            kernels = kernel_times(lambda: timed_step(trainer, data))
            yield replace(result, kernels_ms=kernels)
        trainer.close()


def random_batches(problem: Problem) -> Batches:
    """Tokens of the whole vocabulary, for ever."""
    generator = torch.Generator().manual_seed(0)
    shape = (problem.batch, problem.layout.seq_len + 1)
    while True:
        tokens = torch.randint(problem.model.vocab, shape, generator=generator)
        yield {"input": tokens[:, :-1]}, tokens[:, 1:]


def _measure_gpu(trainer: MeasuredTrainer, data: Batches) -> tuple[float, int]:
    """Median ms of a step, and the allocator's peak."""
    for _ in range(WARMUP):
        timed_step(trainer, data)
    torch.cuda.reset_peak_memory_stats()
    times = [timed_step(trainer, data) for _ in range(STEPS)]
    return statistics.median(times), torch.cuda.max_memory_allocated()


def _measure_cpu(trainer: MeasuredTrainer, data: Batches) -> tuple[float, int]:
    """ms of a step, which nothing is compared with, and the peak of its allocations.

    What a step finds allocated is added: parameters and moments.
    """
    timed_step(trainer, data)
    trainer.optimizers.zero_grad()
    found = [p for part in trainer.model_parts for p in part.parameters()]
    states = [s for each in trainer.optimizers for s in each.state.values()]
    found += [x for state in states for x in state.values()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        ms = timed_step(trainer, data)
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    changes = [e for e in results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    sizes = np.cumsum([event.nbytes() for event in changes])
    return ms, int(sizes.max()) + sum(x.nbytes for x in found)


def executed_work(trainer: MeasuredTrainer, data: Batches) -> list[Work]:
    """Blocks of each layer in one more forward and backward, which counts them."""
    inputs, labels = next(data)
    labels = labels.to(trainer.device)
    with recorder.recording(True), _watch_executed() as executed:
        trainer.forward_backward_step(
            input_dict={name: x.to(trainer.device) for name, x in inputs.items()},
            labels=labels,
            global_valid_tokens=(labels != IGNORE_INDEX).sum(),
        )
    recorder.clear()
    works = []
    for _, blocks in sorted(executed.items()):
        slash, columns = blocks.tolist()  # of one ring step, and of the columns
        works.append(Work(np.array([[slash]]), np.array([columns])))
    return works


@contextmanager
def _watch_executed() -> Iterator[dict[int, Tensor]]:
    """Keep what each layer's forward reports as executed, by layer."""
    found: dict[int, Tensor] = {}
    add = recorder.add

    def watched(layer: int, name: str, value: Tensor) -> None:
        if name == "executed":
            found[layer] = value
        add(layer, name, value)

    recorder.add = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del recorder.add  # the class's is back


def _mean_blocks(works: list[Work]) -> tuple[int, int]:
    slash = sum(int(work.slash.sum()) for work in works)
    columns = sum(int(work.columns.sum()) for work in works)
    return slash // len(works), columns // len(works)


# Kernels by parts of their names, the first kind that fits.
KINDS = {
    "attention": (
        "flash",
        "flex_attention",
        "forward_kernel",
        "dq_kernel",
        "dkdv_kernel",
        "delta_kernel",
        "_merge_kernel",
    ),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "xmma", "splitk"),
    "search": ("_row_stats_kernel", "_scores_kernel", "topk", "sort"),
    "fused": ("triton_",),
    "optimizer": ("multi_tensor", "adam", "lpnorm"),
}


def kernel_kind(name: str) -> str:
    name = name.lower()
    kinds = (kind for kind, parts in KINDS.items() if any(p in name for p in parts))
    return next(kinds, "other")


def kernel_times(step: Callable[[], object]) -> dict[str, float]:
    """ms of all kernels of a step, by kind; on a GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    total: Counter[str] = Counter()
    for event in results.events():
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            total[kernel_kind(event.name())] += event.duration_ns() / 1e6
    return dict(total)


# --- numbers for a table --------------------------------------------------------------


def measure_rates() -> dict[str, float]:
    """What a table marks as not measured, by its names; on a GPU."""
    products = [(32768, 2048, 11008), (32768, 11008, 2048), (32768, 2048, 2560)]
    products += [(2048, 32768, 11008), (65536, 4096, 14336), (4096, 65536, 14336)]
    products += [(32768, 2048, 151936)]
    flop = ms = 0.0
    for m, k, n in products:
        a, b = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((m, k), (k, n))
        )
        ms += _device_ms(lambda a=a, b=b: a @ b)  # type: ignore[misc]
        flop += 2.0 * m * k * n
    x, y = (torch.empty(2**28, device="cuda") for _ in range(2))
    small = torch.zeros(1, device="cuda")
    return {
        "linear_tflops": flop / ms / 1e9,
        "hbm_gb_per_s": 2 * x.nbytes / _device_ms(lambda: y.copy_(x)) / 1e6,
        "kernel_us": 1e3 * _device_ms(lambda: small.add_(1.0), calls=200),
    }


def _device_ms(call: Callable[[], object], calls: int = 10) -> float:
    """Of one call among many, queued before the device reaches the first."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


# --- in the parent --------------------------------------------------------------------


def cases(device: str) -> tuple[Case, ...]:
    return GPU_CASES if device == "cuda" else CPU_CASES


def check_device(device: str) -> None:
    """Refuse to measure what is not here.

    Raises:
        ValueError: there is no CUDA GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--measure needs a CUDA GPU and there is none here: --device cpu runs a "
            "small form, which compares memory alone"
        )


def run_child(name: str, hardware: Hardware, backend: str) -> None:
    """Print the results of one case, a line of JSON each."""
    if name == RATES:
        print(json.dumps(measure_rates()), flush=True)
        return
    (case,) = (case for case in GPU_CASES + CPU_CASES if case.name == name)
    for measured in run_case(case, hardware, backend):
        print(json.dumps(asdict(measured)), flush=True)
    if cpu_device.available_device_type() == "cpu":
        cpu_device.leave()


def start_child(name: str, device: str, flags: list[str]) -> tuple[dict[str, Any], str]:
    """A case in a process of its own: its last results, and what went wrong."""
    command = [sys.executable, "-m", "recipes.plan", "--measure", f"--case={name}"]
    environment = dict(os.environ)
    environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # Files, not pipes: compile workers may outlive the process that is ended.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        wrong = ""
        try:
            code = subprocess.run(
                [*command, f"--device={device}", *flags],
                stdout=out,
                stderr=err,
                env=environment,
                timeout=TIMEOUT,
            ).returncode
        except subprocess.TimeoutExpired:
            wrong = f"no end after {TIMEOUT:.0f} s"
        else:
            err.seek(0)
            last = (err.read().strip().splitlines() or ["no output"])[-1]
            wrong = f"exit code {code}: {last}" if code else ""
        out.seek(0)
        lines = [line for line in out if line.startswith("{")]
    return (json.loads(lines[-1]) if lines else {}), wrong


def run_all(
    hardware: Hardware, device: str, flags: list[str], say: Callable[[str], None]
) -> tuple[list[Measured], list[str]]:
    """All cases, one after the other; results, and what misses its bar or failed.

    Args:
        flags: of this command, for the processes of the cases.
        say: is given each part of the report as soon as it is there.
    """
    results, wrong = [], []
    say(header(hardware, device))
    for case in cases(device):
        numbers, failure = start_child(case.name, device, flags)
        if failure:
            wrong.append(f"{case.name}: {failure}")
        if not numbers:
            continue
        numbers["blocks"] = tuple(numbers["blocks"])
        measured = Measured(**numbers)
        results.append(measured)
        wrong += misses(measured, device)
        say(describe(measured, device))
    if device == "cuda":
        rates, failure = start_child(RATES, device, flags)
        if failure:
            wrong.append(f"{RATES}: {failure}")
        for name, value in rates.items():
            say(f"measured {name} = {value:.4g}, table {getattr(hardware, name):.4g}")
    return results, wrong


def misses(measured: Measured, device: str) -> list[str]:
    """Comparisons that are beyond their bars."""
    compared = [("memory", measured.memory_ratio, MEMORY_BAR)]
    if device == "cuda":
        compared.append(("time", measured.time_ratio, TIME_BAR))
    return [
        f"{measured.case}: predicted {what} is {ratio:.3f} of what was measured "
        f"(allowed: {1 - bar:.2f} to {1 + bar:.2f})"
        for what, ratio, bar in compared
        if not 1 - bar <= ratio <= 1 + bar
    ]


def header(hardware: Hardware, device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    words = f"{name}, torch {torch.__version__}, rates of {hardware.name}"
    if device == "cpu":
        words += "; memory alone is compared, a CPU's time says nothing here"
    return words


def describe(measured: Measured, device: str) -> str:
    """One case in a few lines."""
    gib = 2**30
    lines = [
        f"{measured.case} ({measured.backend}, {measured.blocks[0]} slash and "
        f"{measured.blocks[1]} column blocks a layer)",
        f"  memory, GiB: predicted {measured.predicted_bytes / gib:.3f} (at the "
        f"moment '{measured.predicted_moment}'), measured "
        f"{measured.measured_bytes / gib:.3f}, ratio {measured.memory_ratio:.3f}",
    ]
    if device == "cuda":
        lines.append(
            f"  step, ms: predicted {measured.predicted_ms:.1f}, measured "
            f"{measured.measured_ms:.1f}, ratio {measured.time_ratio:.3f}"
        )
        for what, parts in (
            ("predicted", measured.predicted_parts_ms),
            ("kernels", measured.kernels_ms),
        ):
            words = ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items())
            lines.append(f"    {what}: {words or 'not measured'}")
    return "\n".join(lines)

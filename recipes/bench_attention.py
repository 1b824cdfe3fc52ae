"""What sparse attention costs on one GPU, beside dense attention in the same run.

    python -m recipes.bench_attention --seq-len 131072 --density 0.05 --verticals 1024

Each backend is checked against an fp32 reference first, and no speed is printed of one
that is wrong. Times are medians of CUDA events in ms. TFLOP/s count kept pairs alone
(4 D each forward, 10 D backward). "slash" is the slash step alone, "column" the
vertical step alone, "all" the whole operator: lists or tables, gathering the columns,
both steps, and merging or what replaces it.

What all backends share is timed by itself, twice: *lone* is a call on an idle device,
which is bound by launches; *device* is the time it takes where the host is ahead, as in
a training step.

    --pattern local        the nearest diagonals and the first columns
    --pattern recorded     replays patterns of a training run: record them before with
                           --record FILE --config train_configs/debug_model_32k.toml
    --lengths A,B,...      only time per token, at a fixed number of kept pairs per row,
                           that of --density at --seq-len
"""

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mtraining_flex.config import Ring, SparseAttention
from mtraining_flex.layout import build_layout
from mtraining_flex.pattern import VerticalSlash, density, find_pattern, pack_pattern
from mtraining_flex.pattern.types import dense_pattern
from mtraining_flex.reference import reference_attention
from mtraining_flex.ring import drive, ops
from mtraining_flex.ring.backends import resolve_backend
from mtraining_flex.ring.comm import resolve
from mtraining_flex.ring.merge import merge
from mtraining_flex.ring.step import Finished, Part, Step, get_step


@dataclass(frozen=True)
class Shape:
    """The tensors of a benchmark."""

    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    granularity: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def pairs(self) -> float:
        """Causal pairs of all heads, times D."""
        return self.seq_len * (self.seq_len + 1) / 2 * self.heads * self.head_dim


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    forward: float  # ms
    backward: float
    share: float  # of the causal pairs
    memory: float | None = None  # MiB beyond the inputs, at the peak

    def rate(self, shape: Shape) -> tuple[float, float]:
        """TFLOP/s forward and backward."""
        flop = shape.pairs * self.share / 1e9
        return 4 * flop / self.forward, 10 * flop / self.backward


# --- timing ---------------------------------------------------------------------------


def lone_ms(fn: Callable[[], Any], rep: int = 200) -> float:
    """Median time of a call on an idle device."""
    from triton.testing import do_bench

    return float(do_bench(fn, warmup=50, rep=rep, return_mode="median"))


def device_ms(fn: Callable[[], Any], repeats: int = 15) -> float:
    """Median time of a call whose launches are queued before the device reaches it."""
    fn()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # about 10 ms
        begin.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def peak_mib(fn: Callable[[], Any]) -> float:
    """Most memory in use during a call, beyond what was in use before."""
    fn()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


# --- patterns -------------------------------------------------------------------------


def make_pattern(
    kind: str,
    shape: Shape,
    share: float,
    verticals: int,
    seed: int = 0,
    device: str = "cuda",
) -> VerticalSlash:
    """The diagonal and as many slashes as make up `share` of the causal blocks.

    "uniform": random slashes and columns in each head; "local": the nearest diagonals
    and the first columns.
    """
    blocks = shape.seq_len // shape.granularity
    generator = torch.Generator().manual_seed(seed)
    slashes, columns = [], []
    for _ in range(shape.heads):
        order = torch.arange(1, blocks)
        chosen = torch.arange(verticals)
        if kind == "uniform":
            order = torch.randperm(blocks - 1, generator=generator) + 1
            chosen = torch.randperm(shape.seq_len, generator=generator)[:verticals]
        kept, size, target = [0], blocks, share * blocks * (blocks + 1) / 2
        for offset in order.tolist():
            if size >= target:
                break
            kept.append(offset)
            size += blocks - offset
        slashes.append(kept)
        columns.append(chosen.tolist())
    return pack_pattern([slashes], [columns], max_vertical=verticals).to(device)


def without_columns(pattern: VerticalSlash) -> VerticalSlash:
    none = torch.zeros_like(pattern.num_vertical)
    return VerticalSlash(
        pattern.slash, pattern.num_slash, pattern.vertical[..., :0], none
    )


def kept_share(pattern: VerticalSlash, shape: Shape) -> float:
    """Kept causal pairs / causal pairs, mean over heads."""
    return density(pattern, shape.seq_len, shape.granularity).mean().item()


def tensors(shape: Shape, seed: int = 0) -> list[Tensor]:
    """q, k, v, dout: bf16 `[1, H, S, D]` and `[1, HK, S, D]`, strided as in a model."""
    torch.manual_seed(seed)
    made = []
    for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads):
        x = torch.randn(
            (1, shape.seq_len, heads, shape.head_dim),
            device="cuda",
            dtype=torch.bfloat16,
        )
        made.append(x.transpose(1, 2))
    return made


# --- what is timed --------------------------------------------------------------------


def forward(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, pattern: VerticalSlash, backend: str
) -> tuple[Tensor, Tensor]:
    """The whole operator: out and lse."""
    return ops.ring_attention(
        q, k, v, *pattern.tensors(), torch.tensor(0), *_ring_arguments(shape, backend)
    )


def backward(
    shape: Shape,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: VerticalSlash,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    pattern_and_layer = (*pattern.tensors(), torch.tensor(-1))
    ring = _ring_arguments(shape, backend)
    return ops.ring_attention_backward(
        dout, q, k, v, out, lse, *pattern_and_layer, *ring
    )


def _ring_arguments(shape: Shape, backend: str) -> tuple[Any, ...]:
    names = ("local", "striped", shape.granularity)
    return (*names, *Ring().transport, backend, shape.scale)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected).norm() / expected.norm()).item()


def check(shape: Shape, backend: str, verticals: int) -> dict[str, float]:
    """Errors of out, dq, dk, dv against fp32 at 4096 tokens.

    Raises:
        SystemExit: one is larger than bf16 explains.
    """
    short = Shape(4096, shape.heads, shape.kv_heads, shape.head_dim, shape.granularity)
    q, k, v, dout = tensors(short)
    pattern = make_pattern("uniform", short, 0.2, min(verticals, 300))
    leaves = q32, k32, v32 = [x.float().requires_grad_() for x in (q, k, v)]
    expected_out, _ = reference_attention(q32, k32, v32, pattern, short.granularity)
    expected = torch.autograd.grad(expected_out, leaves, dout.float())
    out, lse = forward(short, q, k, v, pattern, backend)
    grads = backward(short, dout, q, k, v, out, lse, pattern, backend)
    errors = {
        name: relative_error(a, b.detach())
        for name, a, b in zip(
            ("out", "dq", "dk", "dv"),
            (out, *grads),
            (expected_out, *expected),
            strict=True,
        )
    }
    if not max(errors.values()) < 1e-2:
        raise SystemExit(f"backend '{backend}' is wrong, nothing is timed: {errors}")
    return errors


def time_dense_cudnn(shape: Shape) -> Row:
    q, k, v, dout = tensors(shape)
    group = shape.heads // shape.kv_heads
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):

        def call() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True
            )

        out = call()
        back = lone_ms(
            lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), 1000
        )
        with torch.no_grad():
            return Row("dense cuDNN", lone_ms(call, 500), back, 1.0)


def time_dense_flex(shape: Shape) -> Row:
    """FlexAttention's templates on the causal triangle: our flex step, all blocks."""
    q, k, v, dout = tensors(shape)
    pattern = dense_pattern(shape.seq_len // shape.granularity, q.device)
    problem = Problem(shape, pattern, "flex", q, k, v, dout)
    return Row(
        "dense flex",
        lone_ms(problem.slash_forward, 500),
        lone_ms(problem.slash_backward, 1000),
        1.0,
    )


class Problem:
    """One backend on one pattern, cut into the parts that are timed."""

    def __init__(
        self,
        shape: Shape,
        pattern: VerticalSlash,
        backend: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
    ):
        self.shape, self.pattern, self.backend = shape, pattern, backend
        self.q, self.k, self.v, self.dout = q, k, v, dout
        layout = build_layout("striped", shape.seq_len, 1, shape.granularity)
        self.step: Step = get_step(backend)
        self.ring = drive.Ring(layout, resolve("local"), "ring", self.step, shape.scale)
        self.masks = drive._Masks(self.ring, q, pattern)
        self.slash = Part(k, v, self.masks.slash(0))
        self.columns = self.masks.columns(self.gather())
        self.out, self.lse = forward(shape, q, k, v, pattern, backend)
        self.done: Finished = self.step.finish(dout, self.out, self.lse)

    def gather(self) -> Tensor | None:
        return drive._gather_columns(
            self.ring, self.k, self.v, self.shape.heads, self.pattern
        )

    def slash_forward(self) -> Any:
        return self.step.forward(self.q, self.slash, self.shape.scale)

    def slash_backward(self) -> Any:
        return self.step.backward(self.q, self.slash, self.done, self.shape.scale)

    def column_forward(self) -> Any:
        assert self.columns is not None
        return self.step.forward(self.q, self.columns, self.shape.scale)

    def column_backward(self) -> Any:
        assert self.columns is not None
        return self.step.backward(self.q, self.columns, self.done, self.shape.scale)

    def all_forward(self) -> Any:
        return forward(self.shape, self.q, self.k, self.v, self.pattern, self.backend)

    def all_backward(self) -> Any:
        return backward(
            self.shape,
            self.dout,
            self.q,
            self.k,
            self.v,
            self.out,
            self.lse,
            self.pattern,
            self.backend,
        )

    def both(self) -> None:
        self.all_forward()
        self.all_backward()

    def build_masks(self) -> drive._Masks:
        """All that a call makes of the pattern, in the form that this backend reads."""
        masks = drive._Masks(self.ring, self.q, self.pattern)
        parts = [masks.slash(0)]
        if self.columns is not None:
            parts.append(masks.vertical())
        for part in parts:
            _ = part.lists if _reads_lists(self.step, part) else part.tables
        self._kept = parts
        return masks

    def mask_mib(self) -> float:
        """Pattern, bitmap, and tables or lists, in MiB; each memory once."""
        held: list[Tensor] = list(self.pattern.tensors())
        masks = self.build_masks()
        held.append(masks.bitmap)
        for part in self._kept:
            if _reads_lists(self.step, part):
                values = vars(part.lists).values()
                held += [x for x in values if isinstance(x, Tensor)]
            else:
                held += [*part.tables.tensors(), *part.buffers]
        sizes = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held
        }
        return sum(sizes.values()) / 2**20


def _reads_lists(step: Step, mask: Any) -> bool:
    return step.continues(mask)


def time_backend(problem: Problem, name: str) -> list[Row]:
    """slash, column and all of one backend."""
    shape, pattern = problem.shape, problem.pattern
    kept = kept_share(pattern, shape)
    slash = kept_share(without_columns(pattern), shape)
    rows = [
        Row(
            f"{name} slash",
            lone_ms(problem.slash_forward),
            lone_ms(problem.slash_backward),
            slash,
        )
    ]
    if problem.columns is not None:
        rows.append(
            Row(
                f"{name} column",
                lone_ms(problem.column_forward),
                lone_ms(problem.column_backward),
                kept - slash,
            )
        )
    times = lone_ms(problem.all_forward), lone_ms(problem.all_backward)
    rows.append(Row(f"{name} all", *times, kept, peak_mib(problem.both)))
    return rows


def time_shared(problem: Problem, max_vertical: int) -> dict[str, tuple[float, float]]:
    """Search, masks, columns and a merge: (lone, device) in ms."""
    shape = problem.shape
    config = SparseAttention(
        max_vertical=max(max_vertical, 1),
        max_slash=min(256, shape.seq_len // shape.granularity),
        granularity=shape.granularity,
    )
    calls: dict[str, Callable[[], Any]] = {
        "search": lambda: find_pattern(problem.q, problem.k, config),
        f"masks ({problem.backend})": problem.build_masks,
        "one merge of two steps": lambda: merge(
            problem.out, problem.lse, problem.out, problem.lse, problem.out.dtype
        ),
    }
    if problem.columns is not None:
        grads = torch.zeros(
            2, *problem.columns.k.shape, device="cuda", dtype=torch.float32
        )
        dkv = torch.zeros(2, *problem.k.shape, device="cuda", dtype=torch.float32)
        calls["gathering columns"] = problem.gather
        calls["scattering their gradients"] = lambda: drive._scatter_columns(
            problem.ring, dkv, grads, problem.pattern
        )
    return {name: (lone_ms(call), device_ms(call)) for name, call in calls.items()}


# --- output ---------------------------------------------------------------------------


def print_rows(rows: list[Row], shape: Shape) -> None:
    """The table; the first row is dense cuDNN, a "dense flex" row is found by name."""
    dense = rows[0]
    flex = next((row for row in rows if row.name == "dense flex"), None)
    rates = dense.rate(shape)
    print(
        "| what | forward ms | TFLOP/s | of cuDNN's | backward ms | TFLOP/s | "
        "of cuDNN's | x dense cuDNN | x dense flex | peak MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        rate = row.rate(shape)
        total = row.forward + row.backward
        cudnn = (dense.forward + dense.backward) / total
        against = f"{(flex.forward + flex.backward) / total:.2f}" if flex else "-"
        memory = "-" if row.memory is None else f"{row.memory:.0f}"
        print(
            f"| {row.name} | {row.forward:.2f} | {rate[0]:.0f} | "
            f"{rate[0] / rates[0]:.2f} | {row.backward:.2f} | {rate[1]:.0f} | "
            f"{rate[1] / rates[1]:.2f} | {cudnn:.2f} | {against} | {memory} |"
        )


def print_lengths(args: argparse.Namespace, shape: Shape) -> list[dict[str, Any]]:
    """Time per token at several lengths, with the same number of kept pairs per row."""
    kept = args.density * (shape.seq_len + 1) / 2
    print(f"\n{kept:.0f} pairs per row kept by slashes, {args.verticals} verticals")
    print(
        "| tokens | backend | density | forward + backward ms | us per token | "
        "relative | search ms (device) | pattern and masks MiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    first: dict[str, float] = {}
    results = []
    for seq_len in (int(x) for x in args.lengths.split(",")):
        here = Shape(
            seq_len, shape.heads, shape.kv_heads, shape.head_dim, shape.granularity
        )
        share = min(2 * kept / (seq_len + 1), 1.0)
        pattern = make_pattern(args.pattern, here, share, args.verticals)
        inputs = tensors(here)
        config = SparseAttention(
            max_vertical=max(args.verticals, 1),
            granularity=here.granularity,
            max_slash=min(256, seq_len // here.granularity),
        )
        search = device_ms(partial(find_pattern, inputs[0], inputs[1], config))
        for backend in args.backends.split(","):
            problem = Problem(here, pattern, backend, *inputs)
            ms = lone_ms(problem.all_forward) + lone_ms(problem.all_backward)
            per_token = 1e3 * ms / seq_len
            relative = per_token / first.setdefault(backend, per_token)
            result = {
                "tokens": seq_len,
                "backend": backend,
                "density": kept_share(pattern, here),
                "ms": ms,
                "us_per_token": per_token,
                "relative": relative,
                "search_ms": search,
                "mask_mib": problem.mask_mib(),
            }
            results.append(result)
            print(
                f"| {seq_len} | {backend} | {result['density']:.4f} | {ms:.2f} | "
                f"{per_token:.4f} | {relative:.3f} | {search:.3f} | "
                f"{result['mask_mib']:.1f} |",
                flush=True,
            )
            del problem
        del inputs
        torch.cuda.empty_cache()
    return results


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=int, help="131072, or that of --recorded")
    parser.add_argument("--heads", type=int, help="16, or those of --recorded")
    parser.add_argument("--kv-heads", type=int, help="2, or those of --recorded")
    parser.add_argument("--head-dim", type=int, help="128, or that of --recorded")
    parser.add_argument("--granularity", type=int, help="128, or that of --recorded")
    parser.add_argument("--density", type=float, default=0.05, help="of slash blocks")
    parser.add_argument("--verticals", type=int, default=1024)
    parser.add_argument(
        "--pattern", default="uniform", choices=("uniform", "local", "recorded")
    )
    parser.add_argument("--recorded", default="", help="file of --pattern recorded")
    parser.add_argument("--layer", type=int, default=0, help="of --recorded")
    parser.add_argument("--backends", default="flex,flash,triton")
    parser.add_argument("--dense", default="flex", choices=("flex", "none"))
    parser.add_argument("--lengths", default="", help="tokens, separated by commas")
    parser.add_argument("--json", default="", help="also write all numbers here")
    parser.add_argument("--record", default="", help="record patterns to this file")
    parser.add_argument("--config", default="", help="training run of --record")
    parser.add_argument("--steps", type=int, default=20, help="of --record")
    return parser.parse_args(flags)


def check_arguments(args: argparse.Namespace, shape: Shape) -> None:
    """Refuse what no pattern can be made for.

    Raises:
        ValueError: names the flag and both numbers.
    """
    for seq_len in (shape.seq_len, *(int(x) for x in args.lengths.split(",") if x)):
        if seq_len <= 0 or seq_len % shape.granularity:
            raise ValueError(
                f"--seq-len or --lengths ({seq_len}) must be a positive multiple of "
                f"--granularity ({shape.granularity})"
            )
        if not 0 <= args.verticals <= seq_len:
            raise ValueError(
                f"--verticals ({args.verticals}) must be from 0 to the sequence's "
                f"length ({seq_len})"
            )
    if shape.heads % shape.kv_heads:
        raise ValueError(
            f"--heads ({shape.heads}) must be a multiple of --kv-heads "
            f"({shape.kv_heads})"
        )
    if not 0 < args.density <= 1:
        raise ValueError(f"--density ({args.density}) must be in (0, 1]")


def load_pattern(
    args: argparse.Namespace, device: str = "cuda"
) -> tuple[Shape, VerticalSlash]:
    """The pattern that was asked for, and the shape it is for.

    Raises:
        ValueError: arguments that do not fit together, or not the recording.
    """
    if args.pattern != "recorded":
        shape = Shape(
            args.seq_len or 131072,
            args.heads or 16,
            args.kv_heads or 2,
            args.head_dim or 128,
            args.granularity or 128,
        )
        check_arguments(args, shape)
        return shape, make_pattern(
            args.pattern, shape, args.density, args.verticals, device=device
        )
    from recipes.record_patterns import load

    if not args.recorded:
        raise ValueError("--pattern recorded needs --recorded FILE")
    recorded = load(args.recorded)
    for name in ("seq_len", "heads", "kv_heads", "head_dim", "granularity"):
        asked, have = getattr(args, name), getattr(recorded, name)
        if asked not in (None, have):
            raise ValueError(
                f"--{name.replace('_', '-')} ({asked}) is not that of --recorded "
                f"{args.recorded} ({have})"
            )
    if args.layer not in recorded.patterns:
        raise ValueError(
            f"--layer ({args.layer}) is not recorded: {sorted(recorded.patterns)}"
        )
    shape = Shape(
        recorded.seq_len,
        recorded.heads,
        recorded.kv_heads,
        recorded.head_dim,
        recorded.granularity,
    )
    return shape, recorded.patterns[args.layer].to(device)


def main() -> None:
    """Command line."""
    args = parse()
    if args.record:
        from recipes.record_patterns import record

        if not args.config:
            raise ValueError("--record needs --config FILE, the run to record")
        record(["--job.config_file", args.config], args.steps, args.record)
        return
    if not torch.cuda.is_available():
        raise ValueError("recipes.bench_attention needs a CUDA GPU, and there is none")
    shape, pattern = load_pattern(args)
    backends = args.backends.split(",")
    for name in backends:
        resolve_backend(name, "cuda", shape.granularity, torch.bfloat16, shape.head_dim)
    errors = {name: check(shape, name, args.verticals) for name in backends}
    kept = kept_share(pattern, shape)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, bf16, {shape.heads}/{shape.kv_heads} "
        f"heads, D {shape.head_dim}, {shape.seq_len} tokens, granularity "
        f"{shape.granularity}, pattern {args.pattern}: {100 * kept:.2f}% of pairs "
        f"kept, {100 * kept_share(without_columns(pattern), shape):.2f}% by slashes, "
        f"{pattern.vertical.shape[-1]} verticals"
    )
    print(f"errors against fp32 at 4096 tokens: {json.dumps(errors)}", flush=True)
    if args.lengths:
        lengths = print_lengths(args, shape)
        write_json(args.json, {"shape": vars(shape), "lengths": lengths})
        return
    rows = [time_dense_cudnn(shape)]
    if args.dense == "flex" and shape.granularity == 128:
        rows.append(time_dense_flex(shape))
    inputs = tensors(shape)
    shared: dict[str, tuple[float, float]] = {}
    memory: dict[str, float] = {}
    for name in backends:
        problem = Problem(shape, pattern, name, *inputs)
        rows += time_backend(problem, name)
        shared |= time_shared(problem, args.verticals)
        memory[name] = problem.mask_mib()
        del problem
        torch.cuda.empty_cache()
    print_rows(rows, shape)
    best = min(
        (row for row in rows if row.name.endswith(" all")),
        key=lambda row: row.forward + row.backward,
    )
    total = best.forward + best.backward
    print(f"\n| besides | lone ms | device ms | device, of '{best.name}' |")
    print("|---|---|---|---|")
    for name, (lone, device) in shared.items():
        print(f"| {name} | {lone:.3f} | {device:.3f} | {100 * device / total:.2f}% |")
    sizes = ", ".join(f"{name} {mib:.1f} MiB" for name, mib in memory.items())
    print(f"pattern, bitmap, and tables or lists of a layer: {sizes}")
    results: dict[str, Any] = {
        "shape": vars(shape),
        "density": kept,
        "errors": errors,
        "rows": [vars(row) for row in rows],
        "shared": shared,
        "mask_mib": memory,
    }
    write_json(args.json, results)


def write_json(path: str, results: dict[str, Any]) -> None:
    if path:
        with open(path, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

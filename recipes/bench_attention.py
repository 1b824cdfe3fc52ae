"""What sparse attention costs on one GPU, beside dense attention in the same run.

    python -m recipes.bench_attention --seq-len 131072 --density 0.05 --verticals 1024

Checks each backend against an fp32 reference first and prints no speed if it is wrong.
Times are medians of CUDA events in ms; TFLOP/s count kept pairs only (4 D each forward,
10 D backward). "slash" is the slash step alone, "all" the whole operator: masks,
columns, slash step, vertical step and merge.
"""

import argparse
import json
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mtraining_flex.block_mask import slash_step, vertical_step
from mtraining_flex.config import SparseAttention
from mtraining_flex.layout import build_layout
from mtraining_flex.pattern import VerticalSlash, density, find_pattern, pack_pattern
from mtraining_flex.pattern.types import slash_bitmap
from mtraining_flex.reference import reference_attention
from mtraining_flex.ring import drive, ops
from mtraining_flex.ring.comm import resolve
from mtraining_flex.ring.step import get_step

GRANULARITY = 128


def median_ms(fn: Callable[[], Any]) -> float:
    """Median time of a call on the device."""
    from triton.testing import do_bench

    return float(do_bench(fn, warmup=50, rep=300, return_mode="median"))


def uniform_pattern(
    heads: int, seq_len: int, share: float, verticals: int, seed: int = 0
) -> VerticalSlash:
    """The diagonal and a share of random slashes, and random columns, in each head.

    Slashes are drawn until their blocks make up `share` of the causal blocks.
    """
    blocks = seq_len // GRANULARITY
    generator = torch.Generator().manual_seed(seed)
    slashes, columns = [], []
    for _ in range(heads):
        order = (torch.randperm(blocks - 1, generator=generator) + 1).tolist()
        kept, size, target = [0], blocks, share * blocks * (blocks + 1) / 2
        for offset in order:
            if size >= target:
                break
            kept.append(offset)
            size += blocks - offset
        slashes.append(kept)
        chosen = torch.randperm(seq_len, generator=generator)[:verticals]
        columns.append(chosen.tolist())
    return pack_pattern([slashes], [columns], max_vertical=verticals)


def tensors(args: argparse.Namespace, seq_len: int, seed: int = 0) -> list[Tensor]:
    """q, k, v, dout: bf16 `[1, H, S, D]` and `[1, HK, S, D]`, strided as in a model."""
    torch.manual_seed(seed)
    made = []
    for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads):
        shape = (1, seq_len, heads, args.head_dim)
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        made.append(x.transpose(1, 2))
    return made


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected).norm() / expected.norm()).item()


def check(args: argparse.Namespace, backend: str) -> dict[str, float]:
    """Errors of out, dq, dk, dv against fp32 at 4096 tokens.

    Raises:
        SystemExit: one is larger than bf16 explains.
    """
    q, k, v, dout = tensors(args, 4096)
    pattern = uniform_pattern(args.heads, 4096, 0.2, min(args.verticals, 300)).to(
        "cuda"
    )
    leaves = q32, k32, v32 = [x.float().requires_grad_() for x in (q, k, v)]
    expected_out, _ = reference_attention(q32, k32, v32, pattern, GRANULARITY)
    expected = torch.autograd.grad(expected_out, leaves, dout.float())
    out, lse = forward(q, k, v, pattern, backend)
    grads = backward(dout, q, k, v, out, lse, pattern, backend)
    names = ("out", "dq", "dk", "dv")
    errors = {
        name: relative_error(a, b.detach())
        for name, a, b in zip(
            names, (out, *grads), (expected_out, *expected), strict=True
        )
    }
    if not max(errors.values()) < 1e-2:
        raise SystemExit(f"backend '{backend}' is wrong, nothing is timed: {errors}")
    return errors


def forward(
    q: Tensor, k: Tensor, v: Tensor, pattern: VerticalSlash, backend: str
) -> tuple[Tensor, Tensor]:
    return ops.ring_attention(
        q,
        k,
        v,
        *pattern.tensors(),
        torch.tensor(0),
        "local",
        "striped",
        GRANULARITY,
        "ring",
        backend,
        q.shape[-1] ** -0.5,
    )


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: VerticalSlash,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return ops.ring_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        *pattern.tensors(),
        "local",
        "striped",
        GRANULARITY,
        "ring",
        backend,
        q.shape[-1] ** -0.5,
    )


def time_dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[float, float]:
    """Forward and backward of dense causal cuDNN SDPA."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):

        def call() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True
            )

        out = call()
        back = median_ms(
            lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        )
        with torch.no_grad():
            return median_ms(call), back


def time_backend(
    args: argparse.Namespace, pattern: VerticalSlash, backend: str
) -> dict[str, float]:
    """Times in ms of one backend."""
    q, k, v, dout = tensors(args, args.seq_len)
    scale = args.head_dim**-0.5
    layout = build_layout("striped", args.seq_len, 1, GRANULARITY)
    heads = (1, args.heads)
    bitmap = slash_bitmap(pattern, layout.num_blocks)
    step = get_step(backend)
    slash = slash_step(pattern, bitmap, layout, 0, 0, heads)
    out, lse = forward(q, k, v, pattern, backend)
    times = {
        "slash_forward": median_ms(lambda: step.forward(q, k, v, slash, scale)),
        "slash_backward": median_ms(
            lambda: step.backward(dout, q, k, v, out, lse, slash, scale)
        ),
        "all_forward": median_ms(lambda: forward(q, k, v, pattern, backend)),
        "all_backward": median_ms(
            lambda: backward(dout, q, k, v, out, lse, pattern, backend)
        ),
    }
    if pattern.vertical.shape[-1]:
        ring = drive.Ring(layout, resolve("local"), "ring", step, scale)
        columns = drive._gather_columns(ring, k, v, args.heads, pattern)
        assert columns is not None
        keys, values = columns
        mask = vertical_step(pattern, bitmap, layout, 0, heads)
        times["vertical_forward"] = median_ms(
            lambda: step.forward(q, keys, values, mask, scale)
        )
        times["vertical_backward"] = median_ms(
            lambda: step.backward(dout, q, keys, values, out, lse, mask, scale)
        )
    return times


def time_search(args: argparse.Namespace, pattern: VerticalSlash) -> dict[str, float]:
    """Pattern search and mask building, which all backends share."""
    q, k, _, _ = tensors(args, args.seq_len)
    config = SparseAttention(max_vertical=max(args.verticals, 1), max_slash=256)
    layout = build_layout("striped", args.seq_len, 1, GRANULARITY)

    def masks() -> None:
        bitmap = slash_bitmap(pattern, layout.num_blocks)
        slash_step(pattern, bitmap, layout, 0, 0, (1, args.heads))
        if pattern.vertical.shape[-1]:
            vertical_step(pattern, bitmap, layout, 0, (1, args.heads))

    return {
        "search": median_ms(lambda: find_pattern(q, k, config)),
        "masks": median_ms(masks),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--density", type=float, default=0.05, help="of slash blocks")
    parser.add_argument("--verticals", type=int, default=1024)
    parser.add_argument("--backends", default="flex,flash")
    parser.add_argument("--json", default="", help="also write all numbers here")
    args = parser.parse_args()

    backends = args.backends.split(",")
    errors = {name: check(args, name) for name in backends}
    pattern = uniform_pattern(args.heads, args.seq_len, args.density, args.verticals)
    pattern = pattern.to("cuda")
    kept = density(pattern, args.seq_len, GRANULARITY).mean().item()
    slashes_only = VerticalSlash(
        pattern.slash,
        pattern.num_slash,
        pattern.vertical[..., :0],
        torch.zeros_like(pattern.num_vertical),
    )
    kept_slash = density(slashes_only, args.seq_len, GRANULARITY).mean().item()
    pairs = args.seq_len * (args.seq_len + 1) / 2 * args.heads * args.head_dim

    def rate(ms: float, share: float, factor: int) -> float:
        return factor * pairs * share / ms / 1e9

    dense = time_dense(*tensors(args, args.seq_len))
    rows: dict[str, tuple[float, float, float]] = {"dense cuDNN": (*dense, 1.0)}
    results: dict[str, Any] = {"dense": dense, "errors": errors, "density": kept}
    for name in backends:
        times = time_backend(args, pattern, name)
        results[name] = times
        rows[f"{name} slash"] = (
            times["slash_forward"],
            times["slash_backward"],
            kept_slash,
        )
        if args.verticals:
            rows[f"{name} vertical"] = (
                times["vertical_forward"],
                times["vertical_backward"],
                kept - kept_slash,
            )
        rows[f"{name} all"] = (times["all_forward"], times["all_backward"], kept)
    results |= time_search(args, pattern)

    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, bf16, {args.heads}/{args.kv_heads} "
        f"heads, D {args.head_dim}, {args.seq_len} tokens, slash density "
        f"{kept_slash:.4f}, {args.verticals} verticals, kept {kept:.4f}"
    )
    print("errors against fp32 at 4096 tokens: " + json.dumps(errors))
    print("| what | forward ms | TFLOP/s | backward ms | TFLOP/s | times dense |")
    print("|---|---|---|---|---|---|")
    for name, (fwd, bwd, share) in rows.items():
        print(
            f"| {name} | {fwd:.2f} | {rate(fwd, share, 4):.0f} | {bwd:.2f} | "
            f"{rate(bwd, share, 10):.0f} | {sum(dense) / (fwd + bwd):.2f} |"
        )
    best = min(sum(rows[f"{name} all"][:2]) for name in backends)
    extra = results["search"] + results["masks"]
    print(
        f"pattern search {results['search']:.3f} ms, masks {results['masks']:.3f} ms: "
        f"{100 * extra / best:.1f}% of the fastest forward + backward"
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

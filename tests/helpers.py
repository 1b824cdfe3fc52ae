"""What all tests share: patterns with every kind of head, inputs, one comparison."""

import random
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from mtraining_flex.config import SparseAttention
from mtraining_flex.pattern.types import SENTINEL, VerticalSlash, pack_pattern

HEAD_KINDS = (
    "mixed",  # some of both
    "dense",  # every block offset; each vertical lies in a kept block
    "edges",  # verticals at the ends of the sequence and of blocks
    "diagonal",  # the diagonal block alone
    "slashes",  # no vertical
    "full",  # both lists as long as they can be
)


def random_pattern(
    batch: int,
    heads: int,
    seq_len: int,
    granularity: int,
    *,
    max_slash: int,
    max_vertical: int,
    seed: int,
    always_diagonal: bool = True,
) -> VerticalSlash:
    """A pattern whose heads differ in kind: head i is `HEAD_KINDS[(i + seed) % 6]`.

    Lists have the static widths `max_slash` and `max_vertical`, also where these exceed
    the sequence. `always_diagonal=False` drops offset 0 from every second head and from
    those of kind "diagonal", which then keep nothing.
    """
    rng = random.Random(seed)
    slashes: list[list[list[int]]] = []
    verticals: list[list[list[int]]] = []
    for b in range(batch):
        slashes.append([])
        verticals.append([])
        for h in range(heads):
            index = b * heads + h
            kind = HEAD_KINDS[(index + seed) % len(HEAD_KINDS)]
            slash = _slashes(kind, seq_len // granularity, max_slash, rng)
            if not always_diagonal and (kind == "diagonal" or index % 2 == 1):
                slash = [d for d in slash if d != 0]
            slashes[b].append(slash)
            verticals[b].append(
                _verticals(kind, seq_len, granularity, max_vertical, rng)
            )
    return pack_pattern(
        slashes, verticals, max_slash=max_slash, max_vertical=max_vertical
    )


def random_documents(batch: int, seq_len: int, seed: int) -> Tensor:
    """Where the document of each position begins: int32 [B, S].

    Entries differ in kind: one document, a few, many, and those of one token at the
    end, as padding is.
    """
    rng = random.Random(seed)
    rows = []
    for b in range(batch):
        count = (2, 0, seq_len // 3, 4)[(b + seed) % 4]
        begins = {0} | {rng.randrange(seq_len) for _ in range(count)}
        if (b + seed) % 4 == 3:
            begins |= set(range(seq_len - seq_len // 5, seq_len))
        row = []
        for position in range(seq_len):
            row.append(position if position in begins else row[-1])
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int32)


def _slashes(kind: str, num_blocks: int, cap: int, rng: random.Random) -> list[int]:
    cap = min(cap, num_blocks)
    count = {
        "dense": cap,
        "full": cap,
        "diagonal": 1,
        "edges": min(2, cap),
    }.get(kind, rng.randint(1, max(cap // 2, 1)))
    if kind == "dense":
        return list(range(count))
    return [0, *rng.sample(range(1, num_blocks), count - 1)]


def _verticals(
    kind: str, seq_len: int, granularity: int, cap: int, rng: random.Random
) -> list[int]:
    cap = min(cap, seq_len)
    if kind in ("diagonal", "slashes"):
        return []
    if kind == "edges":
        middle = seq_len // granularity // 2 * granularity
        edges = [0, seq_len - 1, granularity - 1, middle, middle - 1, middle + 1]
        edges.append(seq_len - granularity)
        return [c for c in dict.fromkeys(edges) if 0 <= c < seq_len][:cap]
    count = cap if kind == "full" else rng.randint(0, max(cap // 2, 1)) if cap else 0
    return rng.sample(range(seq_len), count)


def small_config(**changes: Any) -> SparseAttention:
    """The `[sparse_attention]` section for a sequence of a few short blocks."""
    settings: dict[str, Any] = {
        "granularity": 8,
        "probe_rows": 8,
        "max_vertical": 12,
        "max_slash": 6,
    }
    config = SparseAttention(**(settings | changes))
    config.validate()
    return config


def kept_entries(
    pattern: VerticalSlash, kind: str, b: int = 0, h: int = 0
) -> list[int]:
    """A head's list, "slash" or "vertical"; behind it there is only padding."""
    count = getattr(pattern, f"num_{kind}")[b, h]
    row = getattr(pattern, kind)[b, h]
    assert (row[:count].diff() > 0).all() and (row[count:] == SENTINEL).all()
    return row[:count].tolist()


def random_qkv(
    batch: int,
    heads: int,
    kv_heads: int,
    seq_len: int,
    head_dim: int,
    dtype: torch.dtype,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """q `[B, H, S, D]`, k and v `[B, HK, S, D]`, drawn in fp64 and rounded.

    v has mean 1: an average over many keys stays O(1), and an error is not lost in a
    result that vanishes.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        shape = (batch, n, seq_len, head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(heads), draw(kv_heads), 1 + draw(kv_heads)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def fro_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error, in fp64, over the finite part of `expected`.

    Infinite entries (the lse of a row with no key) must be equal.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    actual, expected = actual.detach().double(), expected.detach().double()
    actual = actual.to(expected.device)
    assert not expected.isnan().any(), "the expected result has NaN"
    assert not actual.isnan().any(), f"{int(actual.isnan().sum())} NaN"
    finite = expected.isfinite()
    assert torch.equal(actual[~finite], expected[~finite]), "infinite entries differ"
    error = (actual[finite] - expected[finite]).norm() / expected[finite].norm()
    return error.item()


def assert_close(actual: Tensor, expected: Tensor, rtol_fro: float) -> None:
    """`actual` is within a relative Frobenius error of `expected`.

    Also asserts that an all-zero result would be refused by the same tolerance.
    """
    finite = torch.where(expected.isfinite(), expected, 0.0)
    assert finite.norm() > 0, "the expected result is zero: compare with equality"
    assert rtol_fro < 1, f"an all-zero result would pass a tolerance of {rtol_fro}"
    error = fro_error(actual, expected)
    assert error <= rtol_fro, f"relative error {error:.3g} exceeds {rtol_fro:.3g}"


def titan_args(args: Any) -> Any:
    """The same shape of Llama 3 as torchtitan's own model takes it."""
    from torchtitan.models.llama3.model.args import (
        RoPEScalingArgs,
        TransformerModelArgs,
    )

    scaling = args.rope_scaling
    assert scaling.kind == "llama3" and not args.enable_weight_tying
    given = {
        f.name: getattr(args, f.name)
        for f in fields(TransformerModelArgs)
        if hasattr(args, f.name)
    }
    given["rope_scaling_args"] = RoPEScalingArgs(
        scaling.factor,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_length,
    )
    return TransformerModelArgs(**{**given, "attn_type": "sdpa"})

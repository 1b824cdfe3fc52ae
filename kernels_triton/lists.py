"""What the vertical-slash kernels take besides tensors of tokens, and its checks.

Letters as in `vertical_slash`. What a kernel reads is checked here before: shapes and
dtypes always, values on request, since that waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SENTINEL = 2**30
"""Behind the last entry of a list; larger than any position or block."""


@dataclass(frozen=True)
class Slashes:
    """The block diagonals of one ring step, as local offsets (see `vertical_slash`).

    The layout cuts queries into X and keys into Y segments of n blocks each. Between
    blocks a of a query segment and b of a key segment, counted within them, the pair
    of blocks is kept iff a - b is in the list of this pair of segments.
    """

    offsets: Tensor
    """int32 [X Y, B or 1, H or 1, C], pair (x, y) at x Y + y. Strictly ascending, each
    in (-n, n); padded with SENTINEL."""
    q_segments: int = 1
    k_segments: int = 1
    diagonal: bool = True
    """The keys are the queries' own: offset 0 of a pair (x, x) is the diagonal block,
    in which only keys up to the query are seen."""
    windowed: bool = True
    """Offsets can be negative. False saves a count where none is."""


@dataclass(frozen=True)
class Columns:
    """The gathered columns that a rank's queries see, and where they are dropped."""

    k: Tensor
    """[B, H, NC, D], NC a multiple of g; what stands behind the last is not used."""
    v: Tensor
    pos: Tensor
    """int32 [B or 1, H or 1, NC], strictly ascending, padded with SENTINEL."""
    bitmap: Tensor
    """bool [B or 1, H or 1, 2 NB]: whether a slash keeps block offset d, at NB + d."""
    q_blocks: Tensor
    """int32 [N], ascending: the block of the sequence that each query block is."""
    before: Tensor
    """int32 [B or 1, H or 1, N]: columns before each query block (`column_counts`)."""
    visible: Tensor
    """int32 [B or 1, H or 1, N]: columns up to each query block's end."""
    doc: Tensor | None = None
    """int32 like pos: document of each column."""


def column_counts(
    pos: Tensor, q_blocks: Tensor, granularity: int
) -> tuple[Tensor, Tensor]:
    """How many columns lie before each query block, and up to its end.

    Args:
        pos: int32 [B, H, NC] ascending.
        q_blocks: int32 [N].

    Returns:
        Two int32 [B, H, N].
    """
    start = (q_blocks * granularity).expand(*pos.shape[:2], -1).contiguous()
    pos = pos.contiguous()
    return (
        torch.searchsorted(pos, start).int(),
        torch.searchsorted(pos, start + granularity).int(),
    )


def check_vertical_slash(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slashes: Slashes | None,
    columns: Columns | None,
    *,
    granularity: int,
    q_doc: Tensor | None = None,
    k_doc: Tensor | None = None,
    values: bool = True,
) -> None:
    """Check that the arguments of a vertical-slash call fit together.

    Args:
        values: look into the lists too, which waits for the device.

    Raises:
        ValueError: what does not fit, with both numbers.
    """
    g = granularity
    if slashes is None and columns is None:
        raise ValueError("nothing to attend to: neither slashes nor columns are given")
    if q.ndim != 4 or q.shape[2] == 0 or q.shape[2] % g:
        raise ValueError(
            f"q {tuple(q.shape)} must be [B, H, S, D] with S a positive multiple of "
            f"the granularity ({g})"
        )
    B, H, S, D = q.shape
    documents = q_doc is not None
    if documents:
        _check_int("q_doc", q_doc, (B, S))
    if slashes is not None:
        if k is None or v is None or k.ndim != 4 or k.shape != v.shape:
            raise ValueError("slashes need k and v of one shape [B, HK, S, D]")
        if (k.shape[0], k.shape[3]) != (B, D) or k.shape[2] % g or k.shape[2] == 0:
            raise ValueError(
                f"k {tuple(k.shape)} must be [{B}, HK, S, {D}] with S a positive "
                f"multiple of the granularity ({g})"
            )
        if H % k.shape[1]:
            raise ValueError(
                f"query heads ({H}) must be a multiple of kv heads ({k.shape[1]})"
            )
        _check_dtypes(q, k, v)
        if documents != (k_doc is not None):
            raise ValueError("q_doc and k_doc must be given together")
        if k_doc is not None:
            _check_int("k_doc", k_doc, (B, k.shape[2]))
        _check_slashes(slashes, q, k.shape[2] // g, g, values)
    if columns is not None:
        _check_columns(columns, q, g, documents, values)


def _check_dtypes(q: Tensor, *others: Tensor) -> None:
    for x in others:
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"keys and values must be {q.dtype} on {q.device} as q is, got "
                f"{x.dtype} on {x.device}"
            )


def _check_int(name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is None or x.dtype != torch.int32 or tuple(x.shape) != shape:
        got = None if x is None else (x.dtype, tuple(x.shape))
        raise ValueError(f"{name} must be int32 {shape}, got {got}")


def _check_heads(name: str, x: Tensor, q: Tensor, tail: tuple[int, ...]) -> None:
    """[B or 1, H or 1, *tail]."""
    fits = x.ndim == 2 + len(tail) and tuple(x.shape[2:]) == tail
    heads = zip(x.shape[:2], q.shape[:2], strict=True)
    if not fits or any(have not in (1, want) for have, want in heads):
        raise ValueError(
            f"{name} must be [B, H, ...] = {(*q.shape[:2], *tail)} (B and H may be 1), "
            f"got {tuple(x.shape)}"
        )


def _check_slashes(slashes: Slashes, q: Tensor, m: int, g: int, values: bool) -> None:
    t, X, Y = slashes.offsets, slashes.q_segments, slashes.k_segments
    n = q.shape[2] // g // X
    if q.shape[2] // g != n * X or m != n * Y:
        raise ValueError(
            f"{q.shape[2] // g} query blocks in {X} segments and {m} key blocks in {Y} "
            "must make segments of one length"
        )
    if t.ndim != 4 or t.dtype != torch.int32 or t.shape[0] != X * Y or t.shape[3] < 1:
        raise ValueError(
            f"offsets must be int32 [{X * Y}, B, H, C], got {t.dtype} {tuple(t.shape)}"
        )
    _check_heads("offsets", t[0], q, (t.shape[3],))
    if not values:
        return
    real = t < SENTINEL
    _check_ascending("offsets", t, real)
    low = -n + 1 if slashes.windowed else 0
    wrong = real & ((t < low) | (t >= n))
    if wrong.any():
        raise ValueError(
            f"offset {int(t[wrong][0])} is out of range [{low}, {n}) of the segments' "
            "blocks"
        )


def _check_columns(
    columns: Columns, q: Tensor, g: int, documents: bool, values: bool
) -> None:
    B, H, S, D = q.shape
    NC, N = columns.pos.shape[-1], S // g
    if NC == 0 or NC % g:
        raise ValueError(
            f"columns ({NC}) must be padded to a positive multiple of the granularity "
            f"({g})"
        )
    for name, x in (("columns.k", columns.k), ("columns.v", columns.v)):
        if tuple(x.shape) != (B, H, NC, D):
            raise ValueError(f"{name} must be {(B, H, NC, D)}, got {tuple(x.shape)}")
    _check_dtypes(q, columns.k, columns.v)
    NB = columns.bitmap.shape[-1] // 2
    for name, dtype, tail in (
        ("pos", torch.int32, (NC,)),
        ("bitmap", torch.bool, (2 * NB,)),
        ("before", torch.int32, (N,)),
        ("visible", torch.int32, (N,)),
    ):
        x = getattr(columns, name)
        if x.dtype != dtype:
            raise ValueError(f"columns.{name} must be {dtype}, got {x.dtype}")
        _check_heads(f"columns.{name}", x, q, tail)
    _check_int("columns.q_blocks", columns.q_blocks, (N,))
    if columns.before.shape != columns.visible.shape:
        raise ValueError(
            f"columns.before {tuple(columns.before.shape)} and columns.visible "
            f"{tuple(columns.visible.shape)} must have one shape"
        )
    if documents != (columns.doc is not None):
        raise ValueError("q_doc and columns.doc must be given together")
    if columns.doc is not None:
        if columns.doc.shape != columns.pos.shape or columns.doc.dtype != torch.int32:
            raise ValueError(
                f"columns.doc must be int32 {tuple(columns.pos.shape)}, got "
                f"{columns.doc.dtype} {tuple(columns.doc.shape)}"
            )
    if not values:
        return
    real = columns.pos < SENTINEL
    _check_ascending("columns.pos", columns.pos, real)
    for name, x, bound in (
        ("columns.pos", columns.pos[real], NB * g),
        ("columns.q_blocks", columns.q_blocks, NB),
    ):
        wrong = (x < 0) | (x >= bound)
        if wrong.any():
            raise ValueError(f"{name} {int(x[wrong][0])} is out of range [0, {bound})")
    if (columns.q_blocks.diff() <= 0).any():
        raise ValueError("columns.q_blocks must be strictly ascending")
    counts = column_counts(columns.pos, columns.q_blocks, g)
    for name, want in zip(("before", "visible"), counts, strict=True):
        if not (getattr(columns, name) == want).all():
            raise ValueError(f"columns.{name} is not what `column_counts` gives")


def _check_ascending(name: str, x: Tensor, real: Tensor) -> None:
    """Valid entries first, each larger than the one before."""
    if (real.int().diff(dim=-1) > 0).any():
        raise ValueError(f"{name} has an entry behind the padding ({SENTINEL})")
    wrong = (x.diff(dim=-1) <= 0) & real[..., 1:]
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        pair = x[(*at[:-1], slice(at[-1], at[-1] + 2))].tolist()
        raise ValueError(f"{name} must be strictly ascending, got {pair} at {at}")

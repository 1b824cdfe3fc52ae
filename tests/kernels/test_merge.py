"""Merging two partial results: Triton against its twin and against `ring.merge`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton import merge, naive
from mtraining_flex.ring.merge import merge as ring_merge
from tests.helpers import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def parts(
    *shape: int, dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32,) * 2
) -> Parts:
    """out, lse, step_out, step_lse with rows of every kind, where S allows it."""
    gen = torch.Generator().manual_seed(0)
    out, step_out = (torch.randn(shape, generator=gen) for _ in range(2))
    lse, step_lse = (4 * torch.randn(shape[:3], generator=gen) for _ in range(2))
    for i, (a, b) in enumerate(
        [
            (-math.inf, 1.0),
            (2.0, -math.inf),
            (-math.inf, -math.inf),
            (1e30, 5.0),
            (-1e30, -1e30),
            (1e4, 1e4 + 1),
        ]
    ):
        lse[:, :, i : i + 1], step_lse[:, :, i : i + 1] = a, b
    # What a kernel leaves in a row without a key is not looked at.
    out[lse == -math.inf] = math.nan
    step_out[step_lse == -math.inf] = math.inf
    return (
        out.to(DEVICE, dtypes[0]),
        lse.to(DEVICE),
        step_out.to(DEVICE, dtypes[1]),
        step_lse.to(DEVICE),
    )


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory comes as NaN, so that what a kernel does not write is seen."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: make(*args, **kwargs).fill_(math.nan)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 37, 80), (1, 2, 64, 128)])
def test_triton_is_naive(shape: tuple[int, ...], poisoned: None) -> None:
    given = parts(*shape)
    if shape[2] == 1:
        given[1].fill_(0.5)
        given[0].fill_(2.0)
    out, lse = merge.merge(*given)
    want_out, want_lse = naive.merge(*given)
    assert out.dtype == lse.dtype == torch.float32
    assert want_out.dtype == want_lse.dtype == torch.float64
    # Rows one by one: the huge ones would hide the others.
    for rows in (want_lse.abs() > 1e20, want_lse.abs() < 1e20):
        if rows.any():
            assert_close(lse[rows], want_lse[rows], 1e-6)
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    assert_close(out, want_out, 1e-6)


@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("step_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_dtypes(out_dtype: Any, step_dtype: Any, dtype: Any) -> None:
    """The arithmetic is fp32 whatever goes in; only the result is rounded."""
    given = parts(1, 2, 16, 32, dtypes=(out_dtype, step_dtype))
    out, lse = merge.merge(*given, dtype=dtype)
    want_out, _ = naive.merge(*given, dtype=dtype)
    assert (out.dtype, lse.dtype) == (dtype or torch.float32, torch.float32)
    assert_close(out, want_out, EPS[out.dtype])


def test_naive_is_ring_merge() -> None:
    """The twin says what the ring means, in fp64 arithmetic there too."""
    given = [x.double() for x in parts(2, 3, 37, 16)]
    want = ring_merge(*given)
    # The twin takes fp32; nothing is lost in it here.
    got = naive.merge(*(x.float() for x in given))
    assert torch.equal(got[1] == -math.inf, want[1] == -math.inf)
    for a, b in zip(got, want, strict=True):
        a, b = (x.masked_fill(x.abs() > 1e20, 0.0) for x in (a, b))
        assert_close(a, b, 1e-13)


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_triton_is_ring_merge(dtype: Any) -> None:
    given = parts(2, 3, 37, 16, dtypes=(torch.float32, torch.float16))
    out, lse = merge.merge(*given, dtype=dtype)
    want_out, want_lse = ring_merge(*given, dtype)
    assert out.dtype == want_out.dtype and lse.dtype == want_lse.dtype
    assert_close(out, want_out, EPS[out.dtype])
    assert torch.equal(lse.isfinite(), want_lse.isfinite())
    huge = want_lse.abs() > 1e20
    assert torch.equal(lse[huge], want_lse[huge])
    assert_close(lse[~huge], want_lse[~huge], 1e-6)


def test_rows_without_a_key_are_exact() -> None:
    out, lse, step_out, step_lse = parts(1, 2, 8, 16)
    got, got_lse = merge.merge(out, lse, step_out, step_lse)
    assert torch.equal(got[:, :, 0], step_out[:, :, 0])
    assert torch.equal(got[:, :, 1], out[:, :, 1])
    assert torch.equal(got[:, :, 2], torch.zeros_like(got[:, :, 2]))
    assert torch.equal(got[:, :, 3], out[:, :, 3])  # 1e30 beside 5
    kept = torch.tensor([1.0, 2.0, -math.inf, 1e30, -1e30], device=DEVICE)
    assert torch.equal(got_lse[0, 0, :5], kept)


def test_nan_is_not_hidden() -> None:
    """An lse or a counted out that is NaN stays seen."""
    out, lse, step_out, step_lse = parts(1, 1, 16, 16)
    lse[..., 8], step_lse[..., 9], step_lse[..., 10] = math.nan, math.nan, math.nan
    lse[..., 10] = -math.inf
    out[..., 11, 3] = math.nan
    got, got_lse = merge.merge(out, lse, step_out, step_lse)
    assert got_lse[..., 8:11].isnan().all() and got[..., 8:11, :].isnan().all()
    assert got[..., 11, 3].isnan() and int(got[..., 11, :].isnan().sum()) == 1
    assert not got[..., 12:, :].isnan().any() and not got_lse[..., 11:].isnan().any()


def token_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def fused(x: Tensor) -> Tensor:
    """A slice of a wider token-major tensor; of odd strides and alignment."""
    rows = x.transpose(1, 2)
    if x.ndim == 4:
        rows = torch.cat([rows, rows[..., :1]], -1)
        return torch.cat([rows, rows], 2)[:, :, : x.shape[1], 1:].transpose(1, 2)
    return torch.cat([rows, rows], 2)[:, :, : x.shape[1]].transpose(1, 2)


def dim_major(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


VIEWS = [lambda x: x, token_major, fused, dim_major]


@pytest.mark.parametrize("view", VIEWS, ids=["whole", "token", "fused", "dim"])
@pytest.mark.parametrize("step_view", VIEWS, ids=["whole", "token", "fused", "dim"])
def test_strides(view: Any, step_view: Any, poisoned: None) -> None:
    """Strides change no bit; the result is in the memory order of out."""
    given = parts(2, 3, 9, 24)
    views = (view, view, step_view, step_view)
    moved = tuple(f(x) for f, x in zip(views, given, strict=True))
    if view is fused:  # its last dim is a rotation
        given = (moved[0].contiguous(), *given[1:])
    if step_view is fused:
        given = (*given[:2], moved[2].contiguous(), given[3])
    want = merge.merge(*given)
    got = merge.merge(*moved)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert got[0].stride() == torch.empty_like(moved[0]).stride()
    assert got[1].is_contiguous()


def test_zeros_fail() -> None:
    given = parts(1, 2, 16, 32)
    want = naive.merge(*given)[0]
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(torch.zeros_like(want), want, max(EPS.values()))


@pytest.mark.parametrize("twin", [naive, merge], ids=["naive", "triton"])
@pytest.mark.parametrize(
    ("message", "at", "wrong"),
    [
        (r"out must be \[B, H, S, D\]", 0, torch.zeros(2, 16, 32)),
        ("not empty", 0, torch.zeros(1, 2, 0, 32)),
        (r"step_out must be \(1, 2, 16, 32\)", 2, torch.zeros(1, 2, 32, 16)),
        (r"lse must be \(1, 2, 16\)", 1, torch.zeros(1, 2, 16, 1)),
        ("step_lse must be .* of torch.float32", 3, torch.zeros(1, 2, 16).double()),
        (
            "out must be .* got .* of torch.float64",
            0,
            torch.zeros(1, 2, 16, 32).double(),
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors(twin: Any, message: str, at: int, wrong: Tensor) -> None:
    given: list[Tensor] = list(parts(1, 2, 16, 32))
    given[at] = wrong.to(DEVICE)
    with pytest.raises(ValueError, match=message):
        twin.merge(*given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_is_ring_merge(dtype: torch.dtype) -> None:
    """At a model's size, a running fp32 result and a step's in bf16, token-major."""
    given = parts(1, 16, 8192, 128, dtypes=(torch.float32, torch.bfloat16))
    given = (token_major(given[0]), given[1], token_major(given[2]), given[3])
    out, lse = merge.merge(*given, dtype=dtype)
    want_out, want_lse = ring_merge(*given, dtype)
    assert out.stride() == given[0].stride()
    assert_close(out, want_out, EPS[dtype])
    huge = want_lse.abs() > 1e20
    assert torch.equal(lse[huge], want_lse[huge])
    assert_close(lse[~huge], want_lse[~huge], 1e-6)
    again = merge.merge(*given, dtype=dtype)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)

"""The probe: Triton against its naive twin, and the twin against all pairs one by one.

Letters as in kernels_triton.naive; NB is the number of blocks of the whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton import naive, probe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("twin", [naive, probe], ids=["naive", "triton"])


@dataclass(frozen=True)
class Case:
    """One problem; `blocks` is the shard, () for all blocks in a shuffled order."""

    B: int
    H: int
    HK: int
    R: int
    D: int
    g: int
    NB: int
    blocks: tuple[int, ...] = ()

    @property
    def seq_len(self) -> int:
        return self.NB * self.g

    @property
    def args(self) -> dict[str, Any]:
        return {
            "first_q": self.seq_len - self.R,
            "scale": self.D**-0.5,
            "granularity": self.g,
        }


CASES = [
    Case(1, 2, 1, 64, 64, 64, 5),
    Case(2, 4, 2, 100, 32, 64, 5),  # rows in two query blocks, unaligned
    Case(1, 6, 3, 100, 16, 16, 9, (8, 0, 3, 7, 2)),  # seven query blocks
    Case(1, 3, 3, 5, 80, 16, 7, (6, 1, 0)),
    Case(2, 4, 1, 1, 24, 32, 3, (1, 2)),
    Case(1, 4, 2, 64, 96, 128, 3),
    Case(1, 2, 1, 128, 128, 128, 2),
    Case(1, 1, 1, 64, 16, 64, 1),  # one block is the whole sequence
]


@dataclass(frozen=True)
class Problem:
    q: Tensor  # [B, H, R, D]
    k: Tensor  # [B, HK, NB * g, D], the whole sequence in order
    lse: Tensor  # [B, H, R] fp32
    blocks: Tensor  # [N]

    def shard(self, g: int, blocks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys of the given blocks (default: of `blocks`), and the blocks."""
        blocks = self.blocks if blocks is None else blocks
        return self.k.unflatten(2, (-1, g))[:, :, blocks].flatten(2, 3), blocks


def make_problem(case: Case, dtype: torch.dtype, device: str = DEVICE) -> Problem:
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(case.B, case.H, case.R, case.D, generator=gen)
    k = torch.randn(case.B, case.HK, case.seq_len, case.D, generator=gen)
    q, k = (3 * q).to(device, dtype), k.to(device, dtype)
    order = torch.randperm(case.NB, generator=gen)
    blocks = torch.tensor(case.blocks) if case.blocks else order
    lse = dense_logits(case, q, k, torch.arange(case.NB)).logsumexp(-1)
    return Problem(q, k, lse.float(), blocks.to(device))


def dense_logits(case: Case, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
    """All masked logits at once, [B, H, R, S] fp64."""
    k = k.double().repeat_interleave(case.H // case.HK, 1)
    x = case.args["scale"] * torch.einsum("bhrd,bhsd->bhrs", q.double(), k)
    k_pos = (blocks.to(k.device)[:, None] * case.g).add(
        torch.arange(case.g, device=k.device)
    )
    q_pos = case.args["first_q"] + torch.arange(case.R, device=k.device)
    return x.masked_fill(k_pos.flatten() > q_pos[:, None], -math.inf)


def brute_force(case: Case, problem: Problem) -> list[Tensor]:
    """row_max, row_sum, vertical, slash in fp64, pair by pair from the definitions."""
    g, first_q, NB = case.g, case.args["first_q"], case.NB
    k, blocks = problem.shard(g)
    x = dense_logits(case, problem.q, k, blocks)
    by_block = x.unflatten(-1, (-1, g)).transpose(2, 3)  # [B, H, N, R, g]
    row_max = by_block.amax(-1)
    row_sum = (by_block - row_max.clamp(min=-1e300)[..., None]).exp().sum(-1)

    p = (x - problem.lse.double()[..., None]).exp()
    mass = p.flatten(0, 1).cpu().numpy()  # [B * H, R, S]
    RG = (case.seq_len - 1) // g - first_q // g + 1
    span = math.ceil(case.R / g)
    vertical = torch.zeros(len(mass), RG, mass.shape[2], dtype=torch.float64)
    slash = torch.zeros(len(mass), len(blocks), span + 2, dtype=torch.float64)
    v, s = vertical.numpy(), slash.numpy()
    for n, kb in enumerate(blocks.tolist()):
        for r in range(case.R):
            for i in range(g):
                pair = mass[:, r, n * g + i]
                q_pos = first_q + r
                distance = q_pos - (kb * g + i)
                if distance < 0:
                    assert not pair.any()
                    continue
                v[:, q_pos // g - first_q // g, n * g + i] += pair
                share = distance % g / g
                for offset, part in (
                    (distance // g, 1 - share),
                    (distance // g + 1, share),
                ):
                    column = min(offset, NB - 1) - (NB - 1 - kb - span)
                    if part:
                        assert 0 <= column < span + 2
                        s[:, n, column] += pair * part
    heads = (case.B, case.H)
    return [
        row_max,
        row_sum,
        vertical.unflatten(0, heads).to(x.device),
        slash.unflatten(0, heads).to(x.device),
    ]


def run_all(
    twin: ModuleType, case: Case, problem: Problem, blocks: Tensor | None = None
) -> list[Tensor]:
    """row_max, row_sum, vertical, slash of one shard."""
    k, blocks = problem.shard(case.g, blocks)
    stats = twin.probe_row_stats(problem.q, k, blocks, **case.args)
    scores = twin.probe_scores(
        problem.q, k, problem.lse, blocks, seq_len=case.seq_len, **case.args
    )
    return [*stats, *scores]


def assert_close(got: list[Tensor], want: list[Tensor], tol: float) -> None:
    """Largest error at most tol times the largest value; zeros must not pass."""
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        a, b = a.double(), b.double()
        assert torch.equal(a == -math.inf, b == -math.inf)
        a, b = a[b != -math.inf], b[b != -math.inf]
        allowed = tol * b.abs().max()
        assert (a - b).abs().max() <= allowed  # false for NaN
        assert b.abs().max() > allowed


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN, so that what a kernel does not write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(7).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_naive_is_the_definition(case: Case) -> None:
    problem = make_problem(case, torch.float32, "cpu")
    got = run_all(naive, case, problem)
    assert [x.dtype for x in got] == [torch.float64] * 2 + [torch.float32] * 2
    want = brute_force(case, problem)
    assert_close(got[:2], want[:2], 1e-13)
    assert_close(got[2:], want[2:], 1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_is_naive(case: Case, dtype: torch.dtype) -> None:
    problem = make_problem(case, dtype)
    with poisoned():
        got = run_all(probe, case, problem)
    assert all(x.dtype == torch.float32 for x in got)
    assert_close(got, run_all(naive, case, problem), 1e-5)


@BOTH
@pytest.mark.parametrize("case", CASES[:3] + CASES[-1:], ids=str)
def test_mass_is_conserved(twin: ModuleType, case: Case) -> None:
    """Each probe row hands out 1, by keys and by offsets, and none to the impossible.

    Block by block too: what a block's keys get is what its offsets get.
    """
    problem = make_problem(case, torch.float32)
    blocks = torch.arange(case.NB, device=DEVICE)
    _, _, vertical, slash = run_all(twin, case, problem, blocks)
    vertical, slash = vertical.double(), slash.double()
    rows = torch.full((case.B, case.H), float(case.R), device=DEVICE).double()
    torch.testing.assert_close(slash.sum((-1, -2)), rows, rtol=1e-5, atol=0)
    by_block = vertical.sum(2).unflatten(-1, (-1, case.g)).sum(-1)
    torch.testing.assert_close(slash.sum(-1), by_block, rtol=1e-5, atol=1e-9)
    span = math.ceil(case.R / case.g)
    column = torch.arange(span + 2, device=DEVICE)
    offset = case.NB - 1 - blocks[:, None] - span + column
    assert not slash[:, :, (offset < 0) | (offset >= case.NB)].any()


def test_first_block_beyond_the_last_offset() -> None:
    """Offset NB has mass to give, so its folding is really tried."""
    case = CASES[0]
    problem = make_problem(case, torch.float32, "cpu")
    p = dense_logits(case, problem.q, problem.k, torch.arange(case.NB))
    p = (p - problem.lse.double()[..., None]).exp()
    far = torch.arange(case.R)[:, None] > torch.arange(case.g)  # s // g + 1 == NB
    assert (p[..., : case.g] * far).sum() > 0.1
    for twin in (naive, probe) if DEVICE == "cpu" else (naive,):
        slash = run_all(twin, case, problem, torch.tensor([0]))[3]
        assert not slash[..., -1].any()
        total = slash.double().sum((-1, -2))
        # The sum of fp32 results is right to a few of their roundings.
        expected = p[..., : case.g].sum((-1, -2))
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0.0)


@BOTH
def test_rows_without_keys(twin: ModuleType) -> None:
    case = Case(1, 2, 1, 100, 16, 64, 5)  # 36 rows lie before the last block
    problem = make_problem(case, torch.float32)
    last = torch.tensor([4], device=DEVICE)
    row_max, row_sum, vertical, slash = run_all(twin, case, problem, last)
    assert (row_max[..., :36] == -math.inf).all()
    assert (row_sum[..., :36] == 0).all()
    assert row_max[..., 36:].isfinite().all() and (row_sum[..., 36:] >= 1).all()
    assert not vertical[:, :, 0].any() and vertical[:, :, 1].any()
    assert slash.isfinite().all() and slash.any()


@BOTH
def test_rows_with_lse_minus_inf_count_for_nothing(twin: ModuleType) -> None:
    case = CASES[0]
    problem = make_problem(case, torch.float32)
    problem.lse[:, 1] = -math.inf
    _, _, vertical, slash = run_all(twin, case, problem)
    assert not vertical[:, 1].any() and not slash[:, 1].any()
    assert vertical[:, 0].any() and slash[:, 0].any()


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_views_and_index_types(twin: ModuleType, dtype: torch.dtype) -> None:
    """Strides of q, k, lse and blocks, and the index dtype, change no bit."""
    case = Case(2, 4, 2, 20, 16, 32, 3)
    problem = make_problem(case, torch.float32)
    want = run_all(twin, case, problem)
    k, blocks = problem.shard(case.g)
    # As a projection leaves it, [B, S, HK, D] in a wider row; q with dims last-first.
    wide = torch.cat([k.transpose(1, 2), k.transpose(1, 2) + 1], -1)
    k_view = wide[..., : case.D].transpose(1, 2)
    q_view = problem.q.mT.contiguous().mT
    lse_view = problem.lse.mT.contiguous().mT
    block_view = torch.stack([blocks, blocks + 1], 1).to(dtype)[:, 0]
    for view in (k_view, q_view, lse_view, block_view):
        assert not view.is_contiguous()
    stats = twin.probe_row_stats(q_view, k_view, block_view, **case.args)
    scores = twin.probe_scores(
        q_view, k_view, lse_view, block_view, seq_len=case.seq_len, **case.args
    )
    for a, b in zip([*stats, *scores], want, strict=True):
        assert torch.equal(a, b)


def assert_shard_invariant(
    twin: ModuleType, case: Case, problem: Problem, shards: list[Tensor]
) -> None:
    """A block's numbers are the same bits alone, in any shard, in any place."""
    g = case.g
    full = run_all(twin, case, problem, torch.arange(case.NB, device=problem.q.device))
    for blocks in shards:
        blocks = blocks.to(problem.q.device)
        row_max, row_sum, vertical, slash = run_all(twin, case, problem, blocks)
        assert torch.equal(row_max, full[0][:, :, blocks])
        assert torch.equal(row_sum, full[1][:, :, blocks])
        want = full[2].unflatten(-1, (-1, g))[..., blocks, :].flatten(-2)
        assert torch.equal(vertical, want)
        assert torch.equal(slash, full[3][:, :, blocks])


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)], ids=str)
def test_naive_shard_invariant(
    rows: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(1, *heads, rows, 32, 16, 33)
    problem = make_problem(case, torch.float32, "cpu")
    gen = torch.Generator().manual_seed(1)
    shards = [torch.randperm(33, generator=gen)[:n] for n in range(1, 34)]
    assert_shard_invariant(naive, case, problem, shards)
    full = run_all(naive, case, problem)
    for blocks_at_once in (1, 2, 5, 32):
        chunk_bytes = blocks_at_once * case.H * rows * case.g * 8
        monkeypatch.setattr(naive, "_CHUNK_BYTES", chunk_bytes)
        for a, b in zip(run_all(naive, case, problem), full, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 8, 2, 64, 64, 128, 8),
        Case(1, 1, 1, 5, 16, 32, 9),  # a transposed operand shows here
        Case(1, 2, 2, 5, 64, 64, 9),
    ],
    ids=str,
)
def test_naive_thread_invariant(case: Case) -> None:
    """torchrun gives each of many ranks one thread; a lone process takes all."""
    problem = make_problem(case, torch.float32, "cpu")
    threads = torch.get_num_threads()
    want = run_all(naive, case, problem)
    try:
        for n in (1, 2, 3, 8):
            torch.set_num_threads(n)
            for a, b in zip(run_all(naive, case, problem), want, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


def test_triton_shard_invariant() -> None:
    case = Case(1, 4, 2, 20, 16, 16, 9)
    problem = make_problem(case, torch.float32)
    shards = [torch.arange(r, 9, 4) for r in range(4)]
    shards += [torch.tensor([3]), torch.tensor([8, 0, 5])]
    assert_shard_invariant(probe, case, problem, shards)


def test_halving_sum() -> None:
    x = torch.randn(3, 37, 5, dtype=torch.float64)
    for dim in (0, 1, 2, -1, -2):
        torch.testing.assert_close(naive._halving_sum(x, dim), x.sum(dim))


def test_no_gradient_is_carried() -> None:
    case = Case(1, 2, 1, 16, 16, 16, 2)
    problem = make_problem(case, torch.float32)
    problem.q.requires_grad_()
    problem.k.requires_grad_()
    for twin in (naive, probe):
        assert not any(x.requires_grad for x in run_all(twin, case, problem))


BAD = [
    ("must be a multiple of kv heads", {"k": (1, 3, 64, 16)}),
    ("agree in batch", {"k": (1, 1, 64, 32)}),
    ("agree in batch", {"k": (2, 1, 64, 16)}),
    ("are 64", {"k": (1, 1, 80, 16)}),
    (r"\[B, H, R, D\]", {"q": (2, 16, 16)}),
    ("must not be empty", {"q": (1, 0, 16, 16)}),
    ("multiple of the granularity", {"first_q": 50}),
    ("must not be negative", {"first_q": -16}),
    ("must be the last rows", {"first_q": 64}),
    ("lse must be", {"lse": (1, 2, 15)}),
    ("int32 or int64", {"blocks": torch.zeros(4)}),
    ("one floating dtype", {"k_dtype": torch.float16}),
]


@BOTH
@pytest.mark.parametrize(("message", "change"), BAD, ids=[b[0] for b in BAD])
def test_errors(twin: ModuleType, message: str, change: dict[str, Any]) -> None:
    q = torch.zeros(change.get("q", (1, 2, 16, 16)), device=DEVICE)
    k = torch.zeros(change.get("k", (1, 1, 64, 16)), device=DEVICE)
    k = k.to(change.get("k_dtype", torch.float32))
    lse = torch.zeros(change.get("lse", (1, 2, 16)), device=DEVICE)
    blocks = change.get("blocks", torch.arange(4)).to(DEVICE)
    first_q = change.get("first_q", 48)
    with pytest.raises(ValueError, match=message):
        twin.probe_scores(
            q, k, lse, blocks, first_q=first_q, seq_len=64, scale=1.0, granularity=16
        )


@pytest.mark.parametrize(
    ("message", "case", "dtype"),
    [
        ("granularity", Case(1, 1, 1, 8, 16, 8, 2), torch.float32),
        ("probe_rows", Case(1, 1, 1, 129, 16, 64, 4), torch.float32),
        ("head_dim", Case(1, 1, 1, 8, 8, 16, 2), torch.float32),
        ("head_dim", Case(1, 1, 1, 8, 256, 16, 2), torch.float32),
        ("bfloat16, float16 or", Case(1, 1, 1, 8, 16, 16, 2), torch.float64),
        pytest.param(
            "interpreter",
            Case(1, 1, 1, 8, 16, 16, 2),
            torch.bfloat16,
            marks=pytest.mark.skipif(DEVICE == "cuda", reason="no interpreter here"),
        ),
    ],
    ids=str,
)
def test_triton_limits(message: str, case: Case, dtype: torch.dtype) -> None:
    problem = make_problem(case, dtype)
    run_all(naive, case, problem)
    with pytest.raises(ValueError, match=message):
        run_all(probe, case, problem)


NEEDS_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
GPU_CASES = [
    Case(1, H, HK, R, D, 128, 64)
    for H, HK in ((16, 2), (32, 8))
    for D in (64, 128)
    for R in (64, 100)
]


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_bf16(case: Case) -> None:
    problem = make_problem(case, torch.bfloat16)
    with poisoned():
        got = run_all(probe, case, problem)
    assert_close(got, run_all(naive, case, problem), 1e-3)
    again = run_all(probe, case, problem)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("case", GPU_CASES[::3], ids=str)
def test_gpu_shard_invariant(case: Case) -> None:
    problem = make_problem(case, torch.bfloat16)
    gen = torch.Generator().manual_seed(1)
    shards = [torch.arange(r, 64, W) for W in (2, 7, 16) for r in (0, W - 1)]
    shards += [torch.randperm(64, generator=gen)[:n] for n in (1, 2, 17, 33, 64)]
    assert_shard_invariant(probe, case, problem, shards)


@pytest.mark.gpu
@NEEDS_GPU
def test_gpu_long_strides() -> None:
    """Keys that lie more than 2^31 elements from the first."""
    case = Case(1, 2, 2, 64, 64, 128, 4)
    problem = make_problem(case, torch.bfloat16)
    stride = 2**31 + 64
    storage = torch.empty(2 * stride, dtype=torch.bfloat16, device=DEVICE)
    far = storage.as_strided(problem.k.shape, (0, stride, 64, 1))
    far.copy_(problem.k)
    moved = Problem(problem.q, far, problem.lse, problem.blocks)
    blocks = torch.arange(case.NB, device=DEVICE)
    args = {"seq_len": case.seq_len, **case.args}
    got = probe.probe_scores(moved.q, far, moved.lse, blocks, **args)
    want = probe.probe_scores(problem.q, problem.k, problem.lse, blocks, **args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

"""Attention over any block lists: Triton against its twin, the twin against autograd.

Letters as in kernels_triton.block_sparse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton import block_sparse, naive
from kernels_triton.naive import BlockLists
from tests.helpers import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GARBAGE = 2**31 - 1
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}

# What a head computes; head i is the kind i + seed.
KINDS = ("random", "causal", "dense", "empty", "partial", "rows")


@dataclass(frozen=True)
class Case:
    B: int
    H: int
    HK: int
    N: int
    M: int
    D: int
    g: int
    documents: bool = False
    positions: bool = False
    seed: int = 0

    @property
    def args(self) -> dict[str, Any]:
        return {"scale": self.D**-0.5, "granularity": self.g}


CASES = [
    Case(1, 6, 6, 5, 5, 64, 16),  # every kind of head
    Case(2, 4, 2, 3, 5, 80, 16, documents=True),
    Case(2, 2, 1, 5, 3, 96, 16, positions=True, seed=2),
    Case(1, 4, 1, 3, 7, 16, 16, documents=True, positions=True, seed=4),
    Case(1, 2, 2, 7, 1, 24, 16, seed=4),  # one key block
    Case(1, 1, 1, 1, 1, 64, 32, seed=1),  # one block
    Case(2, 4, 4, 3, 3, 64, 32, positions=True, seed=3),
    Case(1, 2, 1, 3, 3, 80, 64, documents=True),
    Case(1, 2, 1, 3, 2, 128, 128, documents=True),
]


@dataclass(frozen=True)
class Problem:
    """Inputs; lse and delta are those of more keys than these."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor  # [B, H, S] fp32
    delta: Tensor
    lists: BlockLists
    rows: dict[str, Tensor]  # positions and documents, as they are given

    def forward(self, twin: Any, case: Case, **changes: Any) -> tuple[Tensor, ...]:
        args = {**case.args, **self.rows, **changes}
        return twin.block_sparse_forward(self.q, self.k, self.v, self.lists, **args)

    def backward(self, twin: Any, case: Case, **changes: Any) -> tuple[Tensor, ...]:
        args = {**case.args, **self.rows, **changes}
        return twin.block_sparse_backward(
            self.dout, self.q, self.k, self.v, self.lse, self.delta, self.lists, **args
        )

    def run(self, twin: Any, case: Case, **changes: Any) -> list[Tensor]:
        """out, lse, dq, dk, dv."""
        forward = self.forward(twin, case, **changes)
        return [*forward, *self.backward(twin, case, **changes)]


NAMES = ("out", "lse", "dq", "dk", "dv")


def random_maps(
    kinds: list[str], n: int, m: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Partial and full blocks of some heads: bool [heads, n, m]; no block is both."""
    partial = torch.zeros(len(kinds), n, m, dtype=torch.bool)
    full = partial.clone()
    below = torch.arange(n)[:, None] - torch.arange(m)
    for h, kind in enumerate(kinds):
        draw = torch.rand(n, m, generator=generator)
        if kind == "random":
            full[h], partial[h] = draw < 0.4, draw > 0.7
        elif kind == "causal":
            full[h], partial[h] = (below > 0) & (draw < 0.5), below == 0
        elif kind == "dense":
            full[h] = True
        elif kind == "partial":
            partial[h] = True
        elif kind == "rows":  # some query blocks without any key block
            full[h] = (draw < 0.7) & (torch.arange(n)[:, None] % 2 == 1)
    return partial, full


def to_table(kept: Tensor, spare: int = 0) -> tuple[Tensor, Tensor]:
    """A map [..., rows, blocks] as counts and ascending lists, garbage behind them."""
    num = kept.sum(-1).int()
    width = int(num.max()) + spare
    idx = torch.full((*num.shape, width), GARBAGE, dtype=torch.int32)
    for *row, block in kept.nonzero().tolist():
        place = int(kept[tuple(row)][:block].sum())
        idx[(*row, place)] = block
    return num, idx


def to_lists(partial: Tensor, full: Tensor) -> BlockLists:
    """Maps [B, H, N, M] as lists whose widths differ, 0 included."""
    return BlockLists(
        *to_table(partial),
        *to_table(full, 1),
        *to_table(partial.mT, 2),
        *to_table(full.mT),
    )


def on(device: str, lists: BlockLists) -> BlockLists:
    return BlockLists(*(getattr(lists, f.name).to(device) for f in fields(lists)))


def make_problem(
    case: Case, dtype: torch.dtype, lists: BlockLists | None = None
) -> Problem:
    gen = torch.Generator().manual_seed(case.seed)
    B, H, S, S_k = case.B, case.H, case.N * case.g, case.M * case.g

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    q, dout = draw(B, H, S, case.D), draw(B, H, S, case.D)
    k, v = draw(B, case.HK, S_k, case.D), 1 + draw(B, case.HK, S_k, case.D)
    if lists is None:
        kinds = [KINDS[(i + case.seed) % len(KINDS)] for i in range(B * H)]
        maps = random_maps(kinds, case.N, case.M, gen)
        lists = to_lists(*(x.unflatten(0, (B, H)) for x in maps))
    rows = {}
    if case.positions:  # any numbers, though in a layout they ascend by block
        rows["q_pos"] = torch.randint(S_k, (S,), generator=gen, dtype=torch.int32)
        rows["k_pos"] = torch.randint(S_k, (S_k,), generator=gen, dtype=torch.int32)
    if case.documents:
        rows["q_doc"] = torch.randint(2, (B, S), generator=gen, dtype=torch.int32)
        rows["k_doc"] = torch.randint(2, (B, S_k), generator=gen, dtype=torch.int32)
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    _, lse = naive.block_sparse_forward(q, k, v, lists, **case.args, **rows)
    other = draw(B, H, S)
    other[..., ::3] = -math.inf  # rows that see no key elsewhere
    lse = torch.logaddexp(lse, other).float()
    delta = torch.where(lse == -math.inf, 0.0, draw(B, H, S).float())
    q, k, v, dout, lse, delta = (x.to(DEVICE) for x in (q, k, v, dout, lse, delta))
    rows = {name: x.to(DEVICE) for name, x in rows.items()}
    return Problem(q, k, v, dout, lse, delta, on(DEVICE, lists), rows)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory comes as NaN, so that what a kernel does not write is seen."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: make(*args, **kwargs).fill_(math.nan)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))


def compare(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    assert len(got) == len(want) == len(NAMES)
    for name, a, b in zip(NAMES, got, want, strict=True):
        # All lse error is absolute, whatever the scale of its values.
        assert_close(a, b, 1e-3 * tolerance**0.5 if name == "lse" else tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_is_naive(case: Case, dtype: torch.dtype, poisoned: None) -> None:
    problem = make_problem(case, dtype)
    got = problem.run(block_sparse, case)
    assert [x.dtype for x in got] == [dtype, torch.float32, dtype] + [torch.float32] * 2
    compare(got, problem.run(naive, case), TOLERANCE[dtype])


def test_cases_hold_what_they_claim() -> None:
    """Rows without a key, here and anywhere; counts of 0 and full; all heads."""
    for case in CASES[:4]:
        problem = make_problem(case, torch.float32)
        _, lse = problem.forward(naive, case)
        assert (lse == -math.inf).any() and lse.isfinite().any()
        assert ((lse == -math.inf) & problem.lse.isfinite()).any()
        assert (problem.lse == -math.inf).any()
    lists = make_problem(CASES[0], torch.float32).lists
    assert (lists.full_kv_num[0, 2] == CASES[0].M).all()
    assert (lists.kv_num[0, 4] == CASES[0].M).all()
    assert not (lists.full_kv_num + lists.kv_num)[0, 3].any()
    assert (lists.kv_idx == GARBAGE).any() and (lists.full_kv_idx == GARBAGE).any()
    assert lists.kv_idx.shape[-1] != lists.full_kv_idx.shape[-1]


def dense_attention(case: Case, problem: Problem) -> list[Tensor]:
    """out, lse, dq, dk, dv by autograd in fp64, with a mask written pair by pair."""
    g, lists = case.g, problem.lists
    mask = torch.zeros(case.B, case.H, case.N * g, case.M * g, dtype=torch.bool)
    q_pos = problem.rows.get("q_pos", torch.arange(case.N * g)).tolist()
    k_pos = problem.rows.get("k_pos", torch.arange(case.M * g)).tolist()
    for b, h, n in torch.cartesian_prod(*map(torch.arange, mask.shape[:2] + (case.N,))):
        for block in lists.full_kv_idx[b, h, n, : lists.full_kv_num[b, h, n]].tolist():
            mask[b, h, n * g : (n + 1) * g, block * g : (block + 1) * g] = True
        for block in lists.kv_idx[b, h, n, : lists.kv_num[b, h, n]].tolist():
            for i in range(int(n) * g, int(n + 1) * g):
                for j in range(block * g, (block + 1) * g):
                    mask[b, h, i, j] = k_pos[j] <= q_pos[i]
    if case.documents:
        q_doc, k_doc = problem.rows["q_doc"], problem.rows["k_doc"]
        mask &= (q_doc[:, :, None] == k_doc[:, None])[:, None]
    leaves = [x.double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    k, v = (x.repeat_interleave(case.H // case.HK, 1) for x in leaves[1:])
    x = case.args["scale"] * leaves[0] @ k.mT
    top = x.detach().masked_fill(~mask, -1e300).amax(-1, keepdim=True)
    p = torch.where(mask, (x - top).clamp(max=0).exp(), 0.0)
    total = p.sum(-1, keepdim=True)
    out = (p @ v) / total.clamp(min=1e-300)
    grads = torch.autograd.grad(out, leaves, problem.dout.double())
    lse = torch.where(total > 0, top + total.log(), -math.inf)[..., 0]
    return [out.detach(), lse.detach(), *grads]


@pytest.mark.skipif(DEVICE == "cuda", reason="written for the CPU")
@pytest.mark.parametrize("case", CASES[:4] + CASES[5:6], ids=str)
def test_naive_is_dense_attention(case: Case) -> None:
    problem = make_problem(case, torch.float64)
    want = dense_attention(case, problem)
    out, lse = problem.forward(naive, case)
    delta = naive.delta(out, problem.dout)
    got = replace(problem, lse=lse, delta=delta).backward(naive, case)
    for a, b in zip((out, lse, *got), want, strict=True):
        assert a.dtype == torch.float64
        assert_close(a, b, 1e-12)


def test_zeros_fail() -> None:
    """The comparison above refuses a result of zeros, for each of the five."""
    problem = make_problem(CASES[0], torch.float32)
    want = problem.run(naive, CASES[0])
    for i, x in enumerate(want):
        got = list(want)
        got[i] = torch.where(x.isfinite(), 0.0, x)
        with pytest.raises(AssertionError, match="relative error"):
            compare(got, want, max(TOLERANCE.values()))


@pytest.mark.parametrize("width", [0, 2])
def test_empty_lists(width: int, poisoned: None) -> None:
    case = Case(1, 2, 1, 3, 3, 64, 16)
    num = torch.zeros(1, 1, 3, dtype=torch.int32)
    idx = torch.full((1, 1, 3, width), GARBAGE, dtype=torch.int32)
    problem = make_problem(case, torch.float32, BlockLists(*(num, idx) * 4))
    out, lse, *grads = problem.run(block_sparse, case)
    assert (lse == -math.inf).all()
    for x in (out, *grads):
        assert torch.equal(x, torch.zeros_like(x))


def test_rows_without_a_key_anywhere() -> None:
    """out 0, lse -inf, gradients 0, though the rows' blocks are listed."""
    case = Case(1, 2, 1, 1, 1, 64, 16)
    one = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    for maps, rows in (
        ((one, ~one), {"q_pos": -1, "k_pos": 0}),
        ((~one, one), {"q_doc": 0, "k_doc": 1}),
    ):
        problem = make_problem(case, torch.float32, to_lists(*maps))
        shape = {"pos": (16,), "doc": (1, 16)}
        given = {
            name: torch.full(shape[name[2:]], x, dtype=torch.int32, device=DEVICE)
            for name, x in rows.items()
        }
        lse = torch.full_like(problem.lse, -math.inf)
        problem = replace(problem, rows=given, lse=lse)
        out, lse, *grads = problem.run(block_sparse, case)
        assert (lse == -math.inf).all()
        assert not any(x.any() or x.isnan().any() for x in (out, *grads))


def test_merged_halves_are_the_whole() -> None:
    """Two steps over disjoint blocks, with the global lse, add up to one."""
    case = CASES[1]
    problem = make_problem(case, torch.float32)
    shape = (case.B, case.H, case.N, case.M)
    partial, full = random_maps(["random"] * 8, case.N, case.M, torch.Generator())
    partial, full = partial.view(shape), full.view(shape)
    even = torch.arange(case.M) % 2 == 0
    maps = [(partial, full), (partial & even, full & even), (partial & ~even,) * 2]
    maps[2] = (partial & ~even, full & ~even)
    whole, *halves = (replace(problem, lists=on(DEVICE, to_lists(*x))) for x in maps)
    out, lse = whole.forward(block_sparse, case)
    parts = [half.forward(block_sparse, case) for half in halves]
    merged, merged_lse = naive.merge(*parts[0], *parts[1])
    assert_close(merged, out, 1e-5)
    assert_close(merged_lse, lse, 1e-6)
    delta = naive.delta(out, problem.dout).float()
    grads = [
        replace(x, lse=lse, delta=delta).backward(block_sparse, case)
        for x in (whole, *halves)
    ]
    for whole_grad, *half_grads in zip(*grads, strict=True):
        assert_close(sum(half_grads), whole_grad, 1e-5)


@pytest.mark.parametrize("lead", [(1, 1), (1, 4), (2, 1)], ids=str)
def test_broadcast_lists(lead: tuple[int, int], poisoned: None) -> None:
    """Lists of one batch or head stand for all: the same bits as written out."""
    case = Case(2, 4, 2, 3, 2, 16, 16)
    kinds = ["random", "causal", "rows", "partial"][: lead[0] * lead[1]]
    maps = random_maps(kinds, case.N, case.M, torch.Generator().manual_seed(0))
    lists = to_lists(*(x.unflatten(0, lead) for x in maps))
    problem = make_problem(case, torch.float32, lists)
    tables = [getattr(problem.lists, f.name) for f in fields(lists)]
    views = [x.expand(2, 4, *x.shape[2:]) for x in tables]
    got = problem.run(block_sparse, case)
    compare(got, problem.run(naive, case), 1e-5)
    written = replace(problem, lists=BlockLists(*views)).run(block_sparse, case)
    assert all(torch.equal(a, b) for a, b in zip(got, written, strict=True))


def token_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def fused(x: Tensor) -> Tensor:
    """A slice of a wider token-major tensor, as of a fused QKV projection."""
    rows = x.transpose(1, 2)
    return torch.cat([rows, rows + 1], 2)[:, :, : x.shape[1]].transpose(1, 2)


def misaligned(x: Tensor) -> Tensor:
    return torch.cat([x[..., :1], x], -1)[..., 1:]


def dim_major(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


@pytest.mark.parametrize("view", [token_major, fused, misaligned, dim_major])
def test_strides(view: Callable[[Tensor], Tensor], poisoned: None) -> None:
    """Strides change no bit; out and dq are in q's memory order."""
    case = Case(2, 4, 2, 2, 3, 80, 16, documents=True)
    problem = make_problem(case, torch.float16)
    want = problem.run(block_sparse, case)
    tensors = {x: view(getattr(problem, x)) for x in ("q", "k", "v", "dout")}
    assert not any(x.is_contiguous() for x in tensors.values())
    rows = {"lse": dim_major(problem.lse), "delta": dim_major(problem.delta)}
    docs = {name: x.T.contiguous().T for name, x in problem.rows.items()}
    got = replace(problem, **tensors, **rows, rows=docs).run(block_sparse, case)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for x in (got[0], got[2]):
        assert x.stride() == torch.empty_like(tensors["q"]).stride()
    assert all(x.is_contiguous() for x in (got[1], *got[3:]))


def test_an_expanded_gradient() -> None:
    """That of `out.sum()` is one number for all elements."""
    case = Case(1, 2, 1, 3, 3, 16, 16)
    problem = make_problem(case, torch.float32)
    dout = torch.ones((), device=DEVICE).expand_as(problem.dout)
    got = replace(problem, dout=dout).backward(block_sparse, case)
    want = replace(problem, dout=dout.contiguous()).backward(block_sparse, case)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_documents_do_not_leak() -> None:
    """Changing one document changes no bit of another."""
    case = Case(1, 2, 1, 3, 3, 16, 16, documents=True)
    problem = make_problem(case, torch.float32)
    first = (problem.rows["k_doc"] == 0)[:, None, :, None]
    k, v = (torch.where(first, x, 9 * x) for x in (problem.k, problem.v))
    got = replace(problem, k=k, v=v).run(block_sparse, case)
    want = problem.run(block_sparse, case)
    mine = (problem.rows["q_doc"] == 0)[:, None].expand(1, 2, -1)
    for i in (0, 1, 2):  # out, lse, dq
        assert torch.equal(got[i][mine], want[i][mine])
        assert not torch.equal(got[i][~mine], want[i][~mine])


def change(name: str, value: int, *at: int) -> Callable[[BlockLists], BlockLists]:
    """Lists with one entry of one table set."""

    def apply(lists: BlockLists) -> BlockLists:
        table = getattr(lists, name).clone()
        table[at] = value
        return replace(lists, **{name: table})

    return apply


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


I32 = {"dtype": torch.int32}
BAD_SHAPES = [
    (r"\[B, HK, S_k, D\]", {"k": ones(2, 48, 64)}),
    (r"\[B, HK, S_k, D\]", {"v": ones(1, 1, 32, 64)}),
    ("agree in batch", {"k": ones(2, 1, 48, 64), "v": ones(2, 1, 48, 64)}),
    ("must not be empty", {"q": ones(1, 0, 48, 64)}),
    (r"\(2\) must be a multiple of kv heads \(3\)", {"kv": ones(1, 3, 48, 64)}),
    (r"\(48\) and keys \(40\) must be multiples", {"kv": ones(1, 1, 40, 64)}),
    (r"q_pos must be \(48,\) of torch.int32", {"q_pos": ones(47, **I32)}),
    (r"k_pos must be \(48,\) of torch.int32", {"k_pos": ones(48)}),
    ("given together", {"q_doc": ones(1, 48, **I32)}),
    (
        r"k_doc must be \(1, 48\)",
        {"q_doc": ones(1, 48, **I32), "k_doc": ones(48, **I32)},
    ),
    ("k must be .* of torch.float32", {"kv": ones(1, 1, 48, 64).half()}),
    (r"dout must be \(1, 2, 48, 64\)", {"dout": ones(1, 2, 64, 48)}),
    (r"lse must be \(1, 2, 48\)", {"lse": ones(1, 2, 47)}),
    (r"delta must be .*float64", {"delta": ones(1, 2, 48, **I32)}),
    (
        r"kv_num must be \(1, 2, 3\)",
        {"kv": ones(1, 1, 32, 64), "q": ones(1, 2, 32, 64)},
    ),
    (r"q_num must be \(1, 2, 2\)", {"kv": ones(1, 1, 32, 64)}),
    (
        r"heads \(1, 2\) must each be 1 or those of q \(1, 3\)",
        {"q": ones(1, 3, 48, 64)},
    ),
]


@pytest.mark.parametrize("twin", [naive, block_sparse], ids=["naive", "triton"])
@pytest.mark.parametrize(
    ("message", "given"), BAD_SHAPES, ids=[b[0] for b in BAD_SHAPES]
)
def test_shapes_are_refused(twin: Any, message: str, given: dict[str, Any]) -> None:
    """Always, also where values are not looked at."""
    case = Case(1, 2, 1, 3, 3, 64, 16)
    problem = make_problem(case, torch.float32)
    given = dict(given)
    if "kv" in given:
        given["k"] = given["v"] = given.pop("kv")
    names = [x for x in given if not x.endswith(("pos", "doc"))]
    problem = replace(problem, **{x: given.pop(x) for x in names})
    if message.startswith("kv_num"):
        message = message.replace("3", "2")
    # Rows of another q would be refused first.
    call = problem.forward if "q" in names else problem.backward
    with pytest.raises(ValueError, match=message):
        call(twin, case, check=False, **given)


# Head 0: query block 1 has key blocks 0 and 2 full, 1 partial; others have none.
BAD_VALUES = [
    (r"^kv_num \(3\) .* columns of kv_idx \(1\)", change("kv_num", 3, 0, 0, 1)),
    (r"^full_kv_num \(-1\)", change("full_kv_num", -1, 0, 0, 1)),
    (r"full_q_num \(9\) .*full_q_idx \(1\)", change("full_q_num", 9, 0, 0, 1)),
    (r"^kv_idx \(3\) must be a key block in \[0, 3\)", change("kv_idx", 3, 0, 0, 1, 0)),
    (r"q_idx \(-1\) must be a query block", change("q_idx", -1, 0, 0, 1, 0)),
    (r"ascending, got \[2, 2\] at \[0, 0, 1", change("full_kv_idx", 2, 0, 0, 1, 0)),
    (
        r"key block 1 of query block 1 .* is in kv_idx and in full_kv_idx",
        change("full_kv_idx", 1, 0, 0, 1, 0),
    ),
    (
        r"query block 1 and key block 1 .* are in kv_idx but not in q_idx",
        change("q_num", 0, 0, 0, 1),
    ),
    (
        r"query block 1 and key block 2 .* are in full_q_idx but not in full_kv_idx",
        change("full_kv_num", 1, 0, 0, 1),
    ),
    (
        r"query block 1 and key block 0 .* are in full_kv_idx but not in full_q_idx",
        change("full_q_idx", 2, 0, 0, 0, 0),
    ),
]


@pytest.mark.parametrize("twin", [naive, block_sparse], ids=["naive", "triton"])
@pytest.mark.parametrize(
    ("message", "spoil"), BAD_VALUES, ids=[b[0] for b in BAD_VALUES]
)
def test_values_are_refused(twin: Any, message: str, spoil: Any) -> None:
    case = Case(1, 2, 1, 3, 3, 64, 16)
    full = torch.zeros(1, 2, 3, 3, dtype=torch.bool)
    partial = full.clone()
    full[0, 0, 1, [0, 2]], partial[0, 0, 1, 1] = True, True
    problem = make_problem(case, torch.float32, to_lists(partial, full))
    problem.forward(naive, case)
    problem = replace(problem, lists=spoil(problem.lists))
    for call in (problem.forward, problem.backward):
        with pytest.raises(ValueError, match=message):
            call(twin, case)


def test_values_are_looked_at_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(1, 2, 1, 3, 3, 16, 16)
    problem = make_problem(case, torch.float32)
    want = problem.run(block_sparse, case)
    monkeypatch.delattr(naive, "block_map")  # the first value check is gone
    monkeypatch.delattr(naive, "_check_list")
    got = problem.run(block_sparse, case, check=False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(NameError):
        problem.forward(block_sparse, case)


@pytest.mark.parametrize(
    ("message", "case", "dtype", "changes"),
    [
        ("granularity", Case(1, 1, 1, 2, 2, 16, 8), torch.float32, {}),
        ("head_dim", Case(1, 1, 1, 2, 2, 8, 16), torch.float32, {}),
        ("head_dim", Case(1, 1, 1, 2, 2, 136, 16), torch.float32, {}),
        ("head_dim", Case(1, 1, 1, 2, 2, 20, 16), torch.float32, {}),
        ("bfloat16, float16 and", Case(1, 1, 1, 2, 2, 16, 16), torch.float64, {}),
        ("scale", Case(1, 1, 1, 2, 2, 16, 16), torch.float32, {"scale": 0.0}),
        pytest.param(
            "interpreter",
            Case(1, 1, 1, 2, 2, 16, 16),
            torch.bfloat16,
            {},
            marks=pytest.mark.skipif(DEVICE == "cuda", reason="no interpreter here"),
        ),
    ],
    ids=str,
)
def test_triton_limits(
    message: str, case: Case, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    problem = make_problem(case, dtype)
    problem.run(naive, case)
    for call in (problem.forward, problem.backward):
        with pytest.raises(ValueError, match=message):
            call(block_sparse, case, **changes)


# --- on a GPU -------------------------------------------------------------------------

GPU_CASES = [Case(1, 16, 2, 64, 64, 128, 128), Case(1, 32, 8, 64, 64, 64, 128)]


def gpu_problem(case: Case) -> Problem:
    """Causal lists of many densities, bf16, tensors as a model has them."""
    gen = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (case.B, case.N * case.g, heads, case.D)
        x = torch.randn(shape, generator=gen, device="cuda")
        return x.to(torch.bfloat16).transpose(1, 2)

    q, dout, k, v = draw(case.H), draw(case.H), draw(case.HK), 1 + draw(case.HK)
    below = torch.arange(case.N)[:, None] - torch.arange(case.M)
    chance = torch.linspace(0, 1, case.H)[:, None, None]
    cpu = torch.Generator().manual_seed(0)
    full = torch.rand(case.H, case.N, case.M, generator=cpu) < chance
    partial = (below == 0).repeat(case.H, 1, 1)
    partial[1] = False  # the first rows of this head see no key
    partial[2, ::3] = False
    lists = on("cuda", to_lists(partial[None], (full & (below > 0))[None]))
    nothing = torch.empty(0)
    return Problem(q, k, v, dout, nothing, nothing, lists, {})


def fp32_reference(case: Case, problem: Problem) -> list[Tensor]:
    """out, dq, dk, dv in fp32, head by head."""
    out, dq = (torch.zeros_like(problem.q, dtype=torch.float32) for _ in range(2))
    dk, dv = (torch.zeros_like(problem.k, dtype=torch.float32) for _ in range(2))
    lists, scale = problem.lists, case.args["scale"]
    pos = torch.arange(case.N * case.g, device="cuda")
    for h in range(case.H):
        maps = []
        for num, idx in (
            (lists.kv_num, lists.kv_idx),
            (lists.full_kv_num, lists.full_kv_idx),
        ):
            one = naive.block_map(num[:, h : h + 1], idx[:, h : h + 1], case.M)[0, 0]
            maps.append(one.repeat_interleave(case.g, 0).repeat_interleave(case.g, 1))
        mask = maps[1] | (maps[0] & (pos <= pos[:, None]))
        hk = h // (case.H // case.HK)
        q, do = problem.q[0, h].float(), problem.dout[0, h].float()
        k, v = problem.k[0, hk].float(), problem.v[0, hk].float()
        p = (scale * q @ k.T).masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)
        out[0, h] = p @ v
        ds = p * (do @ v.T - (do * out[0, h]).sum(-1, keepdim=True)) * scale
        dq[0, h] = ds @ k
        dk[0, hk] += ds.T @ q
        dv[0, hk] += p.T @ do
    return [out, dq, dk, dv]


def bf16_error(problem: Problem) -> list[float]:
    """Errors of torch's own bf16 SDPA in out, dq, dk, dv, on the first 2048 tokens."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [
            x[:, :, :2048].detach().to(dtype).requires_grad_()
            for x in (problem.q, problem.k, problem.v)
        ]
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=True, enable_gqa=True
        )
        grads = torch.autograd.grad(out, leaves, problem.dout[:, :, :2048].to(dtype))
        results.append([x.float() for x in (out.detach(), *grads)])
    return [((b - a).norm() / a.norm()).item() for a, b in zip(*results, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_bf16(case: Case) -> None:
    """At most twice the error of plain bf16 attention; launches repeat bit for bit."""
    assert not torch.backends.cuda.matmul.allow_tf32
    problem = gpu_problem(case)
    out, lse = problem.forward(block_sparse, case)
    delta = naive.delta(out, problem.dout).float()
    problem = replace(problem, lse=lse, delta=delta)
    got = problem.backward(block_sparse, case)
    want = fp32_reference(case, problem)
    bounds = [2 * x for x in bf16_error(problem)]
    for a, b, bound in zip((out, *got), want, bounds, strict=True):
        assert_close(a, b, bound)
    for _ in range(100):
        again = problem.backward(block_sparse, case, check=False)
        assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))
    again = problem.forward(block_sparse, case, check=False)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.gpu
def test_gpu_no_host_synchronisation() -> None:
    case = GPU_CASES[1]
    problem = gpu_problem(case)
    lse = torch.zeros(1, case.H, case.N * case.g, device="cuda")
    problem = replace(problem, lse=lse, delta=lse)
    problem.run(block_sparse, case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run(block_sparse, case, check=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")

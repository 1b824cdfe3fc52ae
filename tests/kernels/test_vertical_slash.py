"""The vertical-slash kernels against their twins, and the twins against the definition.

CPU: interpreted, fp32 and fp16. GPU: against fp32 rows at 8K to 128K tokens, poisoned
outputs, repeated launches, addresses beyond 2^31. Rings, sharded lists and zigzag
windows against the whole are in `test_triton_step.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton import naive, vertical_slash
from kernels_triton.lists import SENTINEL, Columns, Slashes, column_counts
from tests.helpers import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3}
NAMES = ("dq", "dkv", "dcolumns")


@dataclass(frozen=True)
class Case:
    """One problem. Head h of batch b has kind (b H + h) of `offsets`, cyclically."""

    B: int
    H: int
    HK: int
    N: int  # blocks
    D: int
    g: int
    NC: int = 0  # columns, padded
    X: int = 1  # segments
    diagonal: bool = True
    windowed: bool = False
    slashes: bool = True
    documents: bool = False
    lead: tuple[int, int] = (0, 0)  # B and H of the lists, if not those of q

    @property
    def call(self) -> dict[str, Any]:
        return {"scale": self.D**-0.5, "granularity": self.g}


@dataclass(frozen=True)
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    slashes: Slashes | None
    columns: Columns | None
    docs: dict[str, Tensor]

    @property
    def args(self) -> tuple[Any, ...]:
        if self.slashes is None:
            return self.q, None, None
        return self.q, self.k, self.v

    def forward(self, twin: Any, case: Case, **more: Any) -> tuple[Tensor, Tensor]:
        return twin.vertical_slash_forward(
            *self.args, self.slashes, self.columns, **self.docs, **case.call, **more
        )

    def backward(self, twin: Any, case: Case, lse: Tensor, delta: Tensor, **more: Any):
        return twin.vertical_slash_backward(
            self.dout,
            *self.args,
            lse,
            delta,
            self.slashes,
            self.columns,
            **self.docs,
            **case.call,
            **more,
        )

    def run(self, twin: Any, case: Case, **more: Any) -> list[Tensor]:
        """out, lse, dq, dkv, dcolumns; what is not there left out."""
        out, lse = self.forward(twin, case, **more)
        delta = twin.delta(out, self.dout)
        grads = self.backward(twin, case, lse, delta, **more)
        return [out, lse, *(x for x in grads if x is not None)]


def offsets_of(case: Case, index: int, gen: torch.Generator) -> list[int]:
    """Dense, empty, the diagonal alone, without the diagonal, a few, all in turn."""
    n = case.N // case.X
    low = 1 - n if case.windowed else 0
    every = list(range(low, n))
    order = [every[i] for i in torch.randperm(len(every), generator=gen).tolist()]
    kinds: list[list[int]] = [
        every,
        [],
        [0],
        [t for t in order[: n // 2 + 1] if t != 0],
        [0, *order[: n // 2]],
    ]
    return sorted(set(kinds[index % len(kinds)]))


def make(case: Case, dtype: torch.dtype = torch.float32, device: str = DEVICE):
    gen = torch.Generator().manual_seed(0)
    B, H, g, N = case.B, case.H, case.g, case.N
    LB, LH = case.lead if case.lead != (0, 0) else (B, H)
    n = N // case.X
    width = 2 * n - 1 if case.windowed else n
    offsets = torch.full((case.X**2, LB, LH, width), SENTINEL, dtype=torch.int32)
    for pair in range(case.X**2):
        x, y = divmod(pair, case.X)
        for i in range(LB * LH):
            t = offsets_of(case, i + pair, gen)
            if case.diagonal and x == y:  # keys behind the queries are not kept
                t = [each for each in t if each >= 0]
            offsets[pair].view(LB * LH, -1)[i, : len(t)] = torch.tensor(t).int()
    slashes = Slashes(offsets, case.X, case.X, case.diagonal, case.windowed)
    S = N * g
    shapes = [(B, H), (B, case.HK), (B, case.HK), (B, H)]
    q, k, v, dout = (torch.randn(*s, S, case.D, generator=gen) for s in shapes)
    columns = None
    if case.NC:
        pos = torch.full((LB, LH, case.NC), SENTINEL, dtype=torch.int32)
        for i in range(LB * LH):
            count = (0, case.NC, case.NC // 3, 1, case.NC - 1)[(i + 1) % 5]
            chosen = torch.randperm(2 * S, generator=gen)[:count]
            pos.view(LB * LH, -1)[i, :count] = chosen.sort().values.int()
        # Every second block of the sequence is this rank's.
        q_blocks = torch.arange(N, dtype=torch.int32) * 2
        bitmap = torch.rand(LB, LH, 4 * N, generator=gen) < 0.3
        bitmap[..., : 2 * N] = False
        bitmap[:, ::2, 2 * N] = True  # offset 0, in some heads
        col_k, col_v = torch.randn(2, B, H, case.NC, case.D, generator=gen)
        columns = Columns(
            col_k, col_v, pos, bitmap, q_blocks, *column_counts(pos, q_blocks, g)
        )
    docs = {}
    if case.documents:
        # Borders inside blocks, on blocks, and a document of one token.
        borders = torch.tensor([g // 2, g // 2 + 1, 2 * g, 3 * g + 3])
        doc = torch.bucketize(torch.arange(S), borders, right=True).int()
        docs = {"q_doc": doc.expand(B, S), "k_doc": doc.expand(B, S)}
        if columns is not None:
            at = columns.pos.clamp(max=2 * S - 1).long() // 2
            columns = replace(columns, doc=doc[at])
    moved = [x.to(device, dtype) for x in (q, k, v, dout)]
    if columns is not None:
        columns = Columns(
            *(x.to(device, dtype) for x in (columns.k, columns.v)),
            *(
                None if x is None else x.to(device)
                for x in (
                    columns.pos,
                    columns.bitmap,
                    columns.q_blocks,
                    columns.before,
                    columns.visible,
                    columns.doc,
                )
            ),  # type: ignore[arg-type]
        )
    slashes = replace(slashes, offsets=offsets.to(device))
    return Problem(
        *moved,
        slashes if case.slashes else None,
        columns,
        {name: x.to(device).contiguous() for name, x in docs.items()},
    )


CASES = [
    Case(1, 5, 5, 5, 16, 16),
    Case(2, 5, 1, 3, 64, 16, NC=48),  # GQA 5, batches differ
    Case(1, 16, 1, 2, 24, 16, NC=16),  # GQA 16
    Case(1, 6, 3, 5, 80, 32, NC=32, documents=True),
    Case(1, 4, 2, 3, 96, 16, NC=32, slashes=False),
    Case(1, 4, 2, 4, 16, 16, diagonal=False),
    Case(1, 6, 2, 6, 16, 16, NC=16, X=2, windowed=True),
    Case(1, 5, 1, 4, 16, 16, windowed=True, diagonal=False, documents=True),
    Case(2, 4, 2, 3, 16, 16, NC=32, lead=(1, 1)),
    Case(2, 4, 2, 3, 16, 16, NC=32, lead=(2, 1)),
    Case(1, 2, 1, 3, 64, 64, NC=64),
    Case(1, 2, 1, 3, 128, 128, NC=128),
]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory comes as NaN, so that what a kernel does not write is seen."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            return x.fill_(math.nan) if x.is_floating_point() else x

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))


def same(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_is_naive(case: Case, dtype: torch.dtype, poisoned: None) -> None:
    problem = make(case, dtype)
    got, want = (problem.run(twin, case) for twin in (vertical_slash, naive))
    same(got, want, TOLERANCE[dtype])
    # Exactly 0 where nothing is seen: rows without a key, columns behind the last.
    empty = want[1] == -math.inf
    assert not got[0][empty].any() and not got[2][empty].any()
    if problem.columns is not None:
        behind = (problem.columns.pos == SENTINEL).expand(case.B, case.H, -1)
        assert not got[-1][:, behind].any()


def test_cases_hold_rows_without_a_key() -> None:
    for case in (CASES[0], CASES[4]):
        lse = make(case).forward(naive, case)[1]
        assert (lse == -math.inf).any() and lse.isfinite().any()


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3], CASES[6]], ids=str)
def test_naive_is_dense_attention(case: Case) -> None:
    """The twin against autograd of a softmax under a mask made pair by pair."""
    problem = make(case, torch.float64, "cpu")
    B, H, S, _ = problem.q.shape
    group, n = H // case.HK, case.N // case.X
    width = S + case.NC
    mask = torch.zeros(B, H, S, width, dtype=torch.bool)
    slashes, columns = problem.slashes, problem.columns
    assert slashes is not None
    doc = problem.docs.get("q_doc", torch.zeros(B, S, dtype=torch.int32)).tolist()
    for b in range(B):
        for h in range(H):
            lists = [set(t) for t in slashes.offsets[:, b, h].tolist()]
            for r in range(S):
                x, a = divmod(r // case.g, n)
                for j in range(S):
                    y, e = divmod(j // case.g, n)
                    kept = a - e in lists[x * case.X + y]
                    causal = j <= r or (x, a) != (y, e) or not case.diagonal
                    mask[b, h, r, j] = kept and causal and doc[b][r] == doc[b][j]
                if columns is None:
                    continue
                q_block = int(columns.q_blocks[r // case.g])
                for j, p in enumerate(columns.pos[b, h].tolist()):
                    if p > q_block * case.g + r % case.g:
                        continue
                    at = columns.bitmap.shape[-1] // 2 + q_block - p // case.g
                    same_doc = columns.doc is None or columns.doc[b, h, j] == doc[b][r]
                    mask[b, h, r, S + j] = bool(~columns.bitmap[b, h, at]) and same_doc
    leaves = [problem.q, problem.k, problem.v]
    if columns is not None:
        leaves += [columns.k, columns.v]
    leaves = [x.clone().requires_grad_() for x in leaves]
    keys, values = (x.repeat_interleave(group, 1) for x in leaves[1:3])
    if columns is not None:
        keys, values = (
            torch.cat([keys, leaves[3]], 2),
            torch.cat([values, leaves[4]], 2),
        )
    x = (case.D**-0.5 * leaves[0] @ keys.mT).masked_fill(~mask, -math.inf)
    some = mask.any(-1)
    p = torch.where(some[..., None], x, 0.0).softmax(-1) * some[..., None]
    out = p @ values
    grads = torch.autograd.grad(out, leaves, problem.dout)
    got = problem.run(naive, case)
    want = [out.detach(), x.detach().logsumexp(-1), grads[0], torch.stack(grads[1:3])]
    if columns is not None:
        want.append(torch.stack(grads[3:]))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=str)
def test_split_is_fused(case: Case, poisoned: None) -> None:
    """Slashes, then columns on top: the same as in one launch, without a merge."""
    problem = make(case)
    slashes = replace(problem, columns=None)
    columns = replace(problem, slashes=None)
    want = problem.run(naive, case)
    first = slashes.forward(vertical_slash, case, dtype=torch.float32)
    out, lse = columns.forward(vertical_slash, case, running=first)
    delta = vertical_slash.delta(out, problem.dout)
    dq, dkv, none = slashes.backward(vertical_slash, case, lse, delta)
    assert none is None
    dq, none, dcolumns = columns.backward(vertical_slash, case, lse, delta, running=dq)
    assert none is None
    same([out, lse, dq, dkv, dcolumns], want, 2e-6)


def test_running_ignores_rows_without_a_key() -> None:
    """What stands in the out of such a row is not looked at."""
    case = CASES[4]
    problem = make(case)
    running = (torch.full_like(problem.q, math.nan), problem.q[..., 0] * -math.inf)
    running = (running[0], torch.full_like(running[1], -math.inf))
    got = problem.forward(vertical_slash, case, running=running)
    want = problem.forward(vertical_slash, case)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_documents_do_not_leak() -> None:
    """Other keys in one document change no bit of the others' rows."""
    case = CASES[3]
    problem = make(case)
    before = problem.run(vertical_slash, case)[:3]
    foreign = problem.docs["k_doc"][0] == 2
    k, v = problem.k.clone(), problem.v.clone()
    k[:, :, foreign], v[:, :, foreign] = 7.0, -3.0
    assert problem.columns is not None and problem.columns.doc is not None
    columns = replace(
        problem.columns,
        k=torch.where((problem.columns.doc == 2)[..., None], 5.0, problem.columns.k),
    )
    after = replace(problem, k=k, v=v, columns=columns).run(vertical_slash, case)[:3]
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :, ~foreign], b[:, :, ~foreign])
        assert not torch.equal(a[:, :, foreign], b[:, :, foreign])


# --- memory ---------------------------------------------------------------------------


def token_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def fused(x: Tensor) -> Tensor:
    """A view of a tensor that holds other heads, too."""
    rows = x.transpose(1, 2)
    return torch.cat([rows, rows + 1, rows], 2)[:, :, : x.shape[1]].transpose(1, 2)


def misaligned(x: Tensor) -> Tensor:
    """The base is no multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)


def dim_major(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


@pytest.mark.parametrize("view", [token_major, fused, misaligned, dim_major])
def test_strides(view: Callable[[Tensor], Tensor], poisoned: None) -> None:
    """They change no bit, and results keep q's memory order."""
    case = CASES[1]
    problem = make(case)
    want = problem.run(vertical_slash, case)
    assert problem.columns is not None
    columns = replace(
        problem.columns, k=view(problem.columns.k), v=view(problem.columns.v)
    )
    moved = [view(x) for x in (problem.q, problem.k, problem.v, problem.dout)]
    got = Problem(*moved, problem.slashes, columns, {}).run(vertical_slash, case)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    for x in (got[0], got[2]):
        assert x.stride() == torch.empty_like(moved[0]).stride()


def test_strides_of_lists(poisoned: None) -> None:
    """Lists that are views of others change no bit, and neither do documents."""
    case = replace(CASES[3], B=2)
    problem = make(case)
    want = problem.run(vertical_slash, case)
    assert problem.slashes is not None and problem.columns is not None

    def view(x: Tensor) -> Tensor:
        return torch.stack([x, x + 1 if x.dtype != torch.bool else ~x], -1)[..., 0]

    names = ("pos", "bitmap", "q_blocks", "before", "visible", "doc")
    lists = {name: view(getattr(problem.columns, name)) for name in names}
    got = replace(
        problem,
        slashes=replace(problem.slashes, offsets=view(problem.slashes.offsets)),
        columns=replace(problem.columns, **lists),
        docs={name: view(x) for name, x in problem.docs.items()},
    ).run(vertical_slash, case)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_an_expanded_gradient() -> None:
    case = CASES[0]
    problem = make(case)
    one = torch.ones((), device=DEVICE).expand(problem.dout.shape)
    got = replace(problem, dout=one).run(vertical_slash, case)
    want = replace(problem, dout=one.contiguous()).run(vertical_slash, case)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_zeros_fail() -> None:
    case = CASES[1]
    for want in make(case).run(naive, case):
        with pytest.raises(AssertionError, match="relative error|infinite entries"):
            assert_close(torch.zeros_like(want), want, max(TOLERANCE.values()))


# --- refusals -------------------------------------------------------------------------


def entry(name: str, value: Any, *at: Any) -> Callable[[Problem], Problem]:
    """A problem with one entry of a list changed."""

    def apply(problem: Problem) -> Problem:
        owner = "slashes" if name == "offsets" else "columns"
        lists = getattr(problem, owner)
        table = getattr(lists, name).clone()
        table[at] = value
        return replace(problem, **{owner: replace(lists, **{name: table})})

    return apply


BAD_VALUES = [
    (
        r"offsets must be strictly ascending, got \[2, 1\]",
        entry("offsets", 2, 0, 0, 0, 0),
    ),
    (
        r"offsets must be strictly ascending, got \[1, 1\]",
        entry("offsets", 1, 0, 0, 0, 0),
    ),
    (r"offset 5 is out of range \[0, 3\)", entry("offsets", 5, 0, 0, 0, 2)),
    (r"offset -1 is out of range \[0, 3\)", entry("offsets", -1, 0, 0, 0, 0)),
    ("offsets has an entry behind the padding", entry("offsets", 2, 0, 0, 1, 1)),
    ("columns.pos must be strictly ascending", entry("pos", 3, 0, 0, 2)),
    (r"columns.pos 96 is out of range \[0, 96\)", entry("pos", 96, 0, 0, 31)),
    ("columns.before is not what", entry("before", 1, 0, 0, 0)),
    ("columns.visible is not what", entry("visible", 1, 0, 0, 0)),
    (r"columns.q_blocks 6 is out of range \[0, 6\)", entry("q_blocks", 6, 2)),
    ("columns.q_blocks must be strictly ascending", entry("q_blocks", 2, 0)),
]


@pytest.mark.parametrize("twin", [naive, vertical_slash], ids=["naive", "triton"])
@pytest.mark.parametrize(
    ("message", "spoil"), BAD_VALUES, ids=[b[0] for b in BAD_VALUES]
)
def test_values_are_refused(twin: Any, message: str, spoil: Any) -> None:
    case = Case(1, 2, 1, 3, 16, 16, NC=32)
    problem = make(case)
    problem.forward(naive, case)
    problem = spoil(problem)
    with pytest.raises(ValueError, match=message):
        problem.forward(twin, case)
    with pytest.raises(ValueError, match=message):
        problem.backward(twin, case, problem.q[..., 0], problem.q[..., 0])


BAD_SHAPES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("neither slashes nor columns", {"slashes": None, "columns": None}, {}),
    (r"k .* must be \[1, HK, S, 16\]", {"k": torch.ones(1, 1, 40, 16)}, {}),
    (r"\(2\) must be a multiple of kv heads \(3\)", {"kv": (1, 3, 48, 16)}, {}),
    (r"\[B, H, S, D\] with S a positive", {"q": torch.ones(1, 2, 40, 16)}, {}),
    ("segments of one length", {"kv": (1, 1, 64, 16)}, {}),
    ("float32 on cpu as q is", {"k": torch.ones(1, 1, 48, 16).half()}, {}),
    (r"scale \(-1\) must be positive", {}, {"scale": -1}),
    (r"granularity \(48\) must be one of", {}, {"granularity": 48}),
    ("given together", {}, {"q_doc": torch.zeros(1, 48, dtype=torch.int32)}),
    (r"q_doc must be int32 \(1, 48\)", {}, {"q_doc": torch.zeros(1, 47)}),
]


@pytest.mark.skipif(DEVICE == "cuda", reason="written for the CPU")
@pytest.mark.parametrize(
    ("message", "given", "call"), BAD_SHAPES, ids=[b[0] for b in BAD_SHAPES]
)
def test_shapes_are_refused(message: str, given: Any, call: Any) -> None:
    """Always, also where values are not looked at."""
    case = Case(1, 2, 1, 3, 16, 16, NC=0)
    given = dict(given)
    if "kv" in given:
        given["k"] = given["v"] = torch.ones(given.pop("kv"))
    elif "k" in given:
        given["v"] = given["k"]
    problem = replace(make(case), **given)
    with pytest.raises(ValueError, match=message):
        vertical_slash.vertical_slash_forward(
            *problem.args,
            problem.slashes,
            problem.columns,
            **{**case.call, "check": False, **call},
        )


@pytest.mark.parametrize(
    ("message", "dim", "dtype"),
    [
        (r"head_dim \(12\)", 12, torch.float32),
        (r"head_dim \(136\)", 136, torch.float32),
        ("float64", 16, torch.float64),
    ],
)
def test_limits(message: str, dim: int, dtype: torch.dtype) -> None:
    case = Case(1, 2, 1, 2, dim, 16)
    problem = make(case, dtype)
    with pytest.raises(ValueError, match=message):
        problem.forward(vertical_slash, case)


@pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter")
def test_the_interpreter_refuses_bf16() -> None:
    case = CASES[0]
    with pytest.raises(ValueError, match="bfloat16 tiles wrongly"):
        make(case, torch.bfloat16).forward(vertical_slash, case)


@pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter")
def test_an_interpreter_without_loops_is_refused(monkeypatch) -> None:
    case = CASES[0]
    problem = make(case)
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr("numpy.__version__", "2.3.5")
    problem.forward(vertical_slash, case)
    monkeypatch.setattr("numpy.__version__", "2.4.0")
    with pytest.raises(ValueError, match=r"3\.6\.0 cannot loop with numpy 2\.4\.0"):
        problem.forward(vertical_slash, case)


def test_values_are_looked_at_on_request_only() -> None:
    case = Case(1, 2, 1, 3, 16, 16)
    problem = entry("offsets", 1, 0, 0, 0, 0)(make(case))
    problem.forward(vertical_slash, case, check=False)
    with pytest.raises(ValueError, match="ascending"):
        problem.forward(vertical_slash, case)


# --- on a GPU -------------------------------------------------------------------------

gpu = pytest.mark.gpu


def plain_error(problem: Problem, dtype: torch.dtype) -> list[float]:
    """Relative errors of torch's own attention in `dtype`, on the first 2048 tokens."""
    parts = [x[:1, :, :2048] for x in (problem.q, problem.k, problem.v, problem.dout)]
    results = []
    for kind in (torch.float32, dtype):
        leaves = [x.detach().to(kind).requires_grad_() for x in parts[:3]]
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=True, enable_gqa=True
        )
        grads = torch.autograd.grad(out, leaves, parts[3].to(kind))
        both = torch.stack(grads[1:])
        results.append([x.float() for x in (out.detach(), grads[0], both)])
    return [((b - a).norm() / a.norm()).item() for a, b in zip(*results, strict=True)]


def close(actual: Tensor, expected: Tensor, bound: float) -> None:
    assert torch.isfinite(actual).all() and expected.norm() > 0
    error = ((actual.float() - expected).norm() / expected.norm()).item()
    assert error <= bound < 0.5, f"error {error:.2e}, bound {bound:.2e}"


def gpu_problem(
    heads: int, kv_heads: int, tokens: int, dim: int, g: int, dtype: torch.dtype
) -> Problem:
    """A whole sequence: offsets from few to all, columns, token-major tensors."""
    gen = torch.Generator().manual_seed(1)
    N = tokens // g
    offsets = torch.full((1, 1, heads, N), SENTINEL, dtype=torch.int32)
    pos = torch.full((1, heads, 384), SENTINEL, dtype=torch.int32)
    bitmap = torch.zeros(1, heads, 2 * N, dtype=torch.bool)
    for h in range(heads):
        t = [0, *torch.randperm(N, generator=gen)[: 1 + h % 9].tolist()]
        if h == 1:
            t = [0]
        if h == heads - 1 and tokens <= 32768:
            t = list(range(N))
        t = sorted(set(t))
        offsets[0, 0, h, : len(t)] = torch.tensor(t).int()
        bitmap[0, h, N + torch.tensor(t)] = True
        chosen = torch.randperm(tokens, generator=gen)[: (h * 37) % 384]
        pos[0, h, : len(chosen)] = chosen.sort().values.int()

    def draw(n: int) -> Tensor:
        x = torch.randn(1, tokens, n, dim, device="cuda").to(dtype)
        return x.transpose(1, 2)

    q, k, dout = draw(heads), draw(kv_heads), draw(heads)
    v = 1 + draw(kv_heads)
    pos, q_blocks = pos.cuda(), torch.arange(N, dtype=torch.int32, device="cuda")
    head = torch.arange(heads, device="cuda")[:, None] // (heads // kv_heads)
    at = pos[0].clamp(max=tokens - 1).long()
    real = (pos < SENTINEL)[..., None]
    columns = Columns(
        k[:, head, at] * real,
        v[:, head, at] * real,
        pos,
        bitmap.cuda(),
        q_blocks,
        *column_counts(pos, q_blocks, g),
    )
    slashes = Slashes(offsets.cuda(), windowed=False)
    return Problem(q, k, v, dout, slashes, columns, {})


def scattered(problem: Problem, dkv: Tensor, dcolumns: Tensor) -> Tensor:
    """dk and dv of the sequence, with the columns' share."""
    columns = problem.columns
    assert columns is not None
    total = dkv.clone()
    group = problem.q.shape[1] // problem.k.shape[1]
    for h in range(problem.q.shape[1]):
        here = columns.pos[0, h] < SENTINEL
        at = columns.pos[0, h, here].long()
        total[:, 0, h // group].index_add_(1, at, dcolumns[:, 0, h, here])
    return total


def fp32_rows(problem: Problem, case: Case, heads: list[int], rows: Tensor):
    """out and dq of some rows, and the rows' share of dk, dv [2, S, D] per head."""
    slashes, columns = problem.slashes, problem.columns
    assert slashes is not None and columns is not None
    tokens = problem.q.shape[2]
    positions = torch.arange(tokens, device="cuda")
    group = problem.q.shape[1] // problem.k.shape[1]
    for h in heads:
        kept = columns.bitmap[0, h]
        column = torch.zeros(tokens, dtype=torch.bool, device="cuda")
        column[columns.pos[0, h][columns.pos[0, h] < SENTINEL].long()] = True
        offset = rows[:, None] // case.g - positions // case.g
        mask = kept[offset + tokens // case.g] | column
        mask &= positions <= rows[:, None]
        q, do = (x[0, h, rows].float() for x in (problem.q, problem.dout))
        k, v = (x[0, h // group].float() for x in (problem.k, problem.v))
        x = (q @ k.T) * case.D**-0.5
        p = x.masked_fill(~mask, -math.inf).softmax(-1)
        out = p @ v
        ds = p * (do @ v.T - (do * out).sum(-1, keepdim=True)) * case.D**-0.5
        yield h, out, ds @ k, torch.stack([ds.T @ q, p.T @ do])


@gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "g", "dtype"),
    [
        (16, 2, 128, 128, torch.bfloat16),
        (32, 8, 128, 128, torch.float16),
        (16, 16, 64, 128, torch.bfloat16),
        (16, 1, 80, 128, torch.bfloat16),
        (16, 2, 96, 64, torch.bfloat16),
        (32, 8, 128, 64, torch.bfloat16),
        (16, 2, 64, 64, torch.float16),
        (4, 2, 128, 128, torch.float32),
    ],
)
def test_gpu_against_fp32(heads, kv_heads, dim, g, dtype, poisoned) -> None:
    case = Case(1, heads, kv_heads, 8192 // g, dim, g)
    problem = gpu_problem(heads, kv_heads, 8192, dim, g, dtype)
    out, _, dq, dkv, dcolumns = problem.run(vertical_slash, case)
    total = scattered(problem, dkv, dcolumns)
    want = [torch.zeros_like(x, dtype=torch.float32) for x in (out, dq)]
    want.append(torch.zeros_like(total))
    group = heads // kv_heads
    for rows in torch.arange(8192, device="cuda").split(4096):
        for h, o, d, both in fp32_rows(problem, case, list(range(heads)), rows):
            want[0][0, h, rows], want[1][0, h, rows] = o, d
            want[2][:, 0, h // group] += both
    bounds = [2e-5] * 3
    if dtype != torch.float32:
        bounds = [2 * x for x in plain_error(problem, dtype)]
    for a, b, bound in zip((out, dq, total), want, bounds, strict=True):
        close(a, b, bound)


@gpu
@pytest.mark.parametrize("tokens", [32768, 131072])
def test_gpu_long(tokens: int, poisoned: None) -> None:
    """Rows at both ends and in the middle, and dk, dv of the keys only they can see."""
    case = Case(1, 16, 2, tokens // 128, 128, 128)
    problem = gpu_problem(16, 2, tokens, 128, 128, torch.bfloat16)
    out, _, dq, dkv, dcolumns = problem.run(vertical_slash, case)
    bounds = [2 * x for x in plain_error(problem, torch.bfloat16)]
    blocks = [torch.arange(128, device="cuda") + first for first in
              (0, tokens // 2, tokens - 128)]  # fmt: skip
    for rows in blocks:
        for h, o, d, _ in fp32_rows(problem, case, [0, 9, 14], rows):
            close(out[0, h, rows], o, bounds[0])
            close(dq[0, h, rows], d, bounds[1])
    last = blocks[-1]
    total = scattered(problem, dkv, dcolumns)[:, 0, 1, last]
    want = sum(x[-1][:, last] for x in fp32_rows(problem, case, [*range(8, 16)], last))
    close(total, want, bounds[2])


@gpu
def test_gpu_backward_repeats_2000_times() -> None:
    case = Case(1, 8, 2, 32, 64, 128)
    problem = gpu_problem(8, 2, 4096, 64, 128, torch.bfloat16)
    out, lse = problem.forward(vertical_slash, case)
    delta = vertical_slash.delta(out, problem.dout)
    first = problem.backward(vertical_slash, case, lse, delta, check=False)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(2000):
        again = problem.backward(vertical_slash, case, lse, delta, check=False)
        for a, b in zip(first, again, strict=True):
            differing += (a != b).sum()
    assert differing.item() == 0


@gpu
def test_gpu_no_host_synchronisation() -> None:
    case = Case(1, 8, 2, 32, 64, 128)
    problem = gpu_problem(8, 2, 4096, 64, 128, torch.bfloat16)
    problem.run(vertical_slash, case, check=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run(vertical_slash, case, check=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""The probe: Triton against its naive twin, and the twin against all pairs one by one.

Letters as in kernels_triton.naive; NB is the number of blocks of the whole sequence, E
= B * P the entries of q: the groups of probe rows of packed documents, or the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton import naive, probe
from kernels_triton.naive import ProbeRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("twin", [naive, probe], ids=["naive", "triton"])


@dataclass(frozen=True)
class Group:
    """Probe rows of one document: from first_q on, each position `repeat` times."""

    start: int
    first_q: int
    repeat: int = 1


@dataclass(frozen=True)
class Case:
    """One problem; `blocks` is the shard, () for all blocks in a shuffled order.

    With `groups`, P of them for each batch entry, the rows are of packed documents.
    """

    B: int
    H: int
    HK: int
    R: int
    D: int
    g: int
    NB: int
    blocks: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()

    @property
    def seq_len(self) -> int:
        return self.NB * self.g

    @property
    def args(self) -> dict[str, Any]:
        """Of a call, but for `rows`."""
        return {
            "first_q": None if self.groups else self.seq_len - self.R,
            "scale": self.D**-0.5,
            "granularity": self.g,
        }

    @property
    def entries(self) -> int:
        return len(self.groups) or self.B

    @property
    def starts(self) -> list[int]:
        """Where the document of each entry's rows begins, [E]."""
        return [group.start for group in self.groups] or [0] * self.B

    @property
    def positions(self) -> list[list[int]]:
        """Of the rows of each entry, [E, R]."""
        groups = self.groups or (Group(0, self.seq_len - self.R),) * self.B
        return [[a.first_q + r // a.repeat for r in range(self.R)] for a in groups]

    @property
    def row_groups(self) -> int:
        """RG: what the last rows touch, or R rows that begin at a block's end."""
        first = self.g - 1 if self.groups else (self.seq_len - self.R) % self.g
        return (first + self.R - 1) // self.g + 1

    @property
    def columns(self) -> int:
        """C."""
        return 2 + (self.row_groups if self.groups else math.ceil(self.R / self.g))

    def first_offset(self, entry: int, kb: int) -> int:
        """The block offset of slash column 0."""
        top = self.positions[entry][0] // self.g + self.row_groups - 1
        return top - kb - (self.columns - 2)


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
DOC_CASES = [
    # The last rows of a sequence of one document, in two blocks.
    Case(1, 2, 1, 20, 16, 16, 5, groups=(Group(0, 60),)),
    # A document from mid-block on, its rows across an edge; one inside block 0.
    Case(1, 4, 2, 12, 32, 16, 6, groups=(Group(21, 44), Group(0, 4))),
    # Two batch entries; the last document ends the sequence, one is shorter than R.
    Case(
        2,
        4,
        2,
        9,
        24,
        32,
        4,
        groups=(Group(0, 40), Group(50, 119), Group(7, 7, 3), Group(10, 100)),
    ),
    # Rows that repeat, documents of a block and less, in a shard.
    Case(
        1,
        6,
        3,
        10,
        16,
        16,
        7,
        (6, 0, 3, 2),
        groups=(Group(0, 13, 4), Group(16, 27, 3), Group(37, 37, 10), Group(90, 102)),
    ),
    # One row; many query blocks, in the last of which no row is.
    Case(3, 2, 2, 1, 80, 16, 3, groups=(Group(0, 47), Group(5, 15), Group(32, 32))),
    Case(1, 2, 1, 100, 16, 16, 9, groups=(Group(0, 44), Group(3, 32))),
    # Block 0 is the last block too, and top lies beyond it.
    Case(1, 2, 1, 30, 16, 64, 1, groups=(Group(0, 0), Group(30, 34))),
    Case(1, 4, 2, 64, 64, 128, 3, groups=(Group(0, 320), Group(150, 200))),
]


@dataclass(frozen=True)
class Problem:
    q: Tensor  # [E, H, R, D]
    k: Tensor  # [B, HK, NB * g, D], the whole sequence in order
    lse: Tensor  # [E, H, R] fp32
    blocks: Tensor  # [N]
    rows: ProbeRows | None = None

    def shard(self, g: int, blocks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys of the given blocks (default: of `blocks`), and the blocks."""
        blocks = self.blocks if blocks is None else blocks
        return self.k.unflatten(2, (-1, g))[:, :, blocks].flatten(2, 3), blocks


def make_problem(case: Case, dtype: torch.dtype, device: str = DEVICE) -> Problem:
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(case.entries, case.H, case.R, case.D, generator=gen)
    k = torch.randn(case.B, case.HK, case.seq_len, case.D, generator=gen)
    q, k = (3 * q).to(device, dtype), k.to(device, dtype)
    order = torch.randperm(case.NB, generator=gen)
    blocks = torch.tensor(case.blocks) if case.blocks else order
    lse = dense_logits(case, q, k, torch.arange(case.NB)).logsumexp(-1)
    return Problem(q, k, lse.float(), blocks.to(device), make_rows(case, device))


def make_rows(case: Case, device: str = DEVICE) -> ProbeRows | None:
    if not case.groups:
        return None
    pos = torch.tensor(case.positions, dtype=torch.int32, device=device)
    start = torch.tensor(case.starts, dtype=torch.int32, device=device)
    return ProbeRows(pos, start)


def dense_logits(case: Case, q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
    """All masked logits at once, [E, H, R, S] fp64."""
    k = k.double().repeat_interleave(case.H // case.HK, 1)
    k = k.repeat_interleave(case.entries // case.B, 0)
    x = case.args["scale"] * torch.einsum("bhrd,bhsd->bhrs", q.double(), k)
    k_pos = (blocks.to(k.device)[:, None] * case.g).add(
        torch.arange(case.g, device=k.device)
    )
    k_pos = k_pos.flatten()
    for entry, start in enumerate(case.starts):
        for r, q_pos in enumerate(case.positions[entry]):
            x[entry, :, r, (k_pos < start) | (k_pos > q_pos)] = -math.inf
    return x


def brute_force(case: Case, problem: Problem) -> list[Tensor]:
    """row_max, row_sum, vertical, slash in fp64, pair by pair from the definitions."""
    g, NB, C = case.g, case.NB, case.columns
    k, blocks = problem.shard(g)
    x = dense_logits(case, problem.q, k, blocks)
    by_block = x.unflatten(-1, (-1, g)).transpose(2, 3)  # [E, H, N, R, g]
    row_max = by_block.amax(-1)
    row_sum = (by_block - row_max.clamp(min=-1e300)[..., None]).exp().sum(-1)

    p = (x - problem.lse.double()[..., None]).exp()
    mass = p.cpu().numpy()  # [E, H, R, S]
    lead = (case.entries, case.H)
    vertical = torch.zeros(*lead, case.row_groups, mass.shape[3], dtype=torch.float64)
    slash = torch.zeros(*lead, len(blocks), C, dtype=torch.float64)
    v, s = vertical.numpy(), slash.numpy()
    for entry, positions in enumerate(case.positions):
        for n, kb in enumerate(blocks.tolist()):
            first_offset = case.first_offset(entry, kb)
            for r, q_pos in enumerate(positions):
                for i in range(g):
                    pair = mass[entry, :, r, n * g + i]
                    k_pos = kb * g + i
                    if not case.starts[entry] <= k_pos <= q_pos:
                        assert not pair.any()
                        continue
                    v[entry, :, q_pos // g - positions[0] // g, n * g + i] += pair
                    distance = q_pos - k_pos
                    share = distance % g / g
                    for offset, part in (
                        (distance // g, 1 - share),
                        (distance // g + 1, share),
                    ):
                        column = min(offset, NB - 1) - first_offset
                        if part:
                            assert 0 <= column < C
                            s[entry, :, n, column] += pair * part
    return [row_max, row_sum, vertical.to(x.device), slash.to(x.device)]


def run_all(
    twin: ModuleType, case: Case, problem: Problem, blocks: Tensor | None = None
) -> list[Tensor]:
    """row_max, row_sum, vertical, slash of one shard."""
    k, blocks = problem.shard(case.g, blocks)
    args = {"rows": problem.rows, **case.args}
    stats = twin.probe_row_stats(problem.q, k, blocks, **args)
    scores = twin.probe_scores(
        problem.q, k, problem.lse, blocks, seq_len=case.seq_len, **args
    )
    return [*stats, *scores]


def by_offset(case: Case, slash: Tensor, blocks: Tensor) -> Tensor:
    """Slash scores of all columns [E, H, N, C] by block offset, [E, H, NB] fp64.

    Columns of offsets that do not exist must be 0.
    """
    total = slash.new_zeros(*slash.shape[:2], case.NB, dtype=torch.float64)
    for entry in range(case.entries):
        for n, kb in enumerate(blocks.tolist()):
            for c in range(case.columns):
                offset = case.first_offset(entry, kb) + c
                if 0 <= offset < case.NB:
                    total[entry, :, offset] += slash[entry, :, n, c].double()
                else:
                    assert not slash[entry, :, n, c].any()
    return total


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


@pytest.mark.parametrize("case", CASES + DOC_CASES, ids=str)
def test_naive_is_the_definition(case: Case) -> None:
    problem = make_problem(case, torch.float32, "cpu")
    got = run_all(naive, case, problem)
    assert [x.dtype for x in got] == [torch.float64] * 2 + [torch.float32] * 2
    want = brute_force(case, problem)
    assert_close(got[:2], want[:2], 1e-13)
    assert_close(got[2:], want[2:], 1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES + DOC_CASES, ids=str)
def test_triton_is_naive(case: Case, dtype: torch.dtype) -> None:
    problem = make_problem(case, dtype)
    with poisoned():
        got = run_all(probe, case, problem)
    assert all(x.dtype == torch.float32 for x in got)
    assert_close(got, run_all(naive, case, problem), 1e-5)


@BOTH
@pytest.mark.parametrize("case", CASES[:3] + CASES[-1:] + DOC_CASES, ids=str)
def test_mass_is_conserved(twin: ModuleType, case: Case) -> None:
    """Each probe row hands out 1, by keys and by offsets, and none to the impossible.

    Block by block too: what a block's keys get is what its offsets get.
    """
    problem = make_problem(case, torch.float32)
    blocks = torch.arange(case.NB, device=DEVICE)
    _, _, vertical, slash = run_all(twin, case, problem, blocks)
    vertical, slash = vertical.double(), slash.double()
    rows = torch.full((case.entries, case.H), float(case.R), device=DEVICE).double()
    torch.testing.assert_close(
        by_offset(case, slash, blocks).sum(-1), rows, rtol=1e-5, atol=0
    )
    by_block = vertical.sum(2).unflatten(-1, (-1, case.g)).sum(-1)
    torch.testing.assert_close(slash.sum(-1), by_block, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("case", [CASES[0], DOC_CASES[0], DOC_CASES[6]], ids=str)
def test_first_block_beyond_the_last_offset(case: Case) -> None:
    """Offset NB has mass to give, so its folding is really tried."""
    problem = make_problem(case, torch.float32, "cpu")
    p = dense_logits(case, problem.q, problem.k, torch.arange(case.NB))
    p = (p - problem.lse.double()[..., None]).exp()
    distance = torch.tensor(case.positions)[..., None] - torch.arange(case.g)
    far = distance > (case.NB - 1) * case.g  # s // g + 1 == NB
    assert (p[..., : case.g] * far[:, None]).sum() > 0.1
    for twin in (naive, probe) if DEVICE == "cpu" else (naive,):
        slash = run_all(twin, case, problem, torch.tensor([0]))[3]
        total = by_offset(case, slash, torch.tensor([0])).sum(-1)
        # The sum of fp32 results is right to a few of their roundings.
        expected = p[..., : case.g].sum((-1, -2))
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0.0)


@BOTH
@pytest.mark.parametrize(
    "case", [CASES[0], CASES[1], Case(2, 2, 2, 20, 16, 16, 5)], ids=str
)
def test_a_group_of_the_last_rows_is_the_last_rows(
    twin: ModuleType, case: Case
) -> None:
    group = Group(0, case.seq_len - case.R)
    as_group = replace(case, groups=(group,) * case.B)
    blocks = torch.arange(case.NB, device=DEVICE)
    results = []
    for variant in (case, as_group):
        problem = make_problem(variant, torch.float32)
        row_max, row_sum, vertical, slash = run_all(twin, variant, problem, blocks)
        mass = [vertical.double().sum(2), by_offset(variant, slash, blocks)]
        results.append([row_max, row_sum, *mass])
    assert_close(results[1], results[0], 1e-6)


@BOTH
def test_a_row_counts_as_often_as_it_stands_there(twin: ModuleType) -> None:
    once = Case(1, 2, 1, 1, 16, 16, 4, groups=(Group(20, 45),))
    often = replace(once, R=6, groups=(Group(20, 45, 6),))
    blocks = torch.arange(once.NB, device=DEVICE)
    problem = make_problem(once, torch.float32)
    repeated = replace(
        problem,
        q=problem.q.repeat_interleave(6, 2),
        lse=problem.lse.repeat_interleave(6, 2),
        rows=make_rows(often),
    )
    row_max, row_sum, vertical, slash = run_all(twin, once, problem, blocks)
    want = [
        row_max.expand(-1, -1, -1, 6),
        row_sum.expand(-1, -1, -1, 6),
        6 * vertical.sum(2),
        6 * by_offset(once, slash, blocks),
    ]
    row_max, row_sum, vertical, slash = run_all(twin, often, repeated, blocks)
    got = [row_max, row_sum, vertical.sum(2), by_offset(often, slash, blocks)]
    assert_close(got, want, 1e-6)


@BOTH
@pytest.mark.parametrize("case", DOC_CASES[1:5], ids=str)
def test_documents_do_not_leak(twin: ModuleType, case: Case) -> None:
    """Keys that no row of any group sees may be anything."""
    problem = make_problem(case, torch.float32)
    P = case.entries // case.B
    unseen = torch.ones(case.B, case.seq_len, dtype=torch.bool)
    for entry, positions in enumerate(case.positions):
        unseen[entry // P, case.starts[entry] : positions[-1] + 1] = False
    assert unseen.any()
    spoilt = replace(problem, k=problem.k.clone())
    spoilt.k.transpose(1, 2)[unseen.to(DEVICE)] = math.nan
    for a, b in zip(
        run_all(twin, case, spoilt), run_all(twin, case, problem), strict=True
    ):
        assert torch.equal(a, b)


@BOTH
def test_groups_do_not_meet(twin: ModuleType) -> None:
    """A group's numbers are the same bits beside others and alone."""
    case = DOC_CASES[2]
    problem = make_problem(case, torch.float32)
    together = run_all(twin, case, problem)
    for entry, group in enumerate(case.groups):
        one = slice(entry, entry + 1)
        alone = replace(case, B=1, groups=(group,))
        part = Problem(
            problem.q[one],
            problem.k[entry // 2 : entry // 2 + 1],
            problem.lse[one],
            problem.blocks,
            make_rows(alone),
        )
        for a, b in zip(run_all(twin, alone, part), together, strict=True):
            assert torch.equal(a, b[one])


@BOTH
def test_blocks_outside_the_document(twin: ModuleType) -> None:
    """-inf and 0 on both sides of it, in every column and row group."""
    case = Case(1, 4, 2, 10, 16, 16, 6, groups=(Group(37, 50), Group(16, 22)))
    blocks = torch.arange(case.NB, device=DEVICE)
    problem = make_problem(case, torch.float32)
    with poisoned():
        row_max, row_sum, vertical, slash = run_all(twin, case, problem, blocks)
    vertical = vertical.unflatten(-1, (-1, case.g)).transpose(2, 3)
    for entry, inside in enumerate(([2, 3], [1])):
        for kb in range(case.NB):
            at = (entry, slice(None), kb)
            seen = kb in inside
            assert (row_max[at] == -math.inf).all().item() != seen
            for result in (row_sum, vertical, slash):
                assert result[at].any().item() == seen
    assert not vertical[0, :, 2, :, :5].any()  # before position 37
    assert not vertical[0, :, 3, 1].any()  # rows 50 .. 59 lie in one block of two


@pytest.mark.skipif(DEVICE == "cuda", reason="counts in the interpreter")
def test_triton_loads_no_keys_outside_the_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(1, 4, 2, 10, 16, 16, 6, groups=(Group(37, 50), Group(16, 22)))
    problem = make_problem(case, torch.float32)
    loads = 0
    load_tile = probe._load_tile

    def count(*args: Any) -> Any:
        nonlocal loads
        loads += 1
        return load_tile(*args)

    monkeypatch.setattr(probe, "_load_tile", count)
    run_all(probe, case, problem)
    blocks = 2 + 1  # positions 37 .. 59 and 16 .. 31
    tiles = case.HK + case.H  # the keys of each kv head, the rows of each head
    assert loads == 2 * blocks * tiles  # in each of the two kernels


@BOTH
def test_a_group_that_sees_nothing(twin: ModuleType) -> None:
    case = Case(1, 2, 1, 4, 16, 16, 3, groups=(Group(30, 20), Group(8, 40)))
    problem = make_problem(case, torch.float32)
    assert (problem.lse[0] == -math.inf).all()
    row_max, row_sum, vertical, slash = run_all(twin, case, problem)
    assert (row_max[0] == -math.inf).all()
    for result in (row_sum, vertical, slash):
        assert not result[0].any() and result[1].any()


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


@BOTH
def test_views_of_rows(twin: ModuleType) -> None:
    case = DOC_CASES[1]
    problem = make_problem(case, torch.float32)
    assert problem.rows is not None
    view = ProbeRows(
        problem.rows.pos.mT.contiguous().mT,
        torch.stack([problem.rows.start, problem.rows.start + 1], 1)[:, 0],
    )
    assert not view.pos.is_contiguous() and not view.start.is_contiguous()
    got = run_all(twin, case, replace(problem, rows=view))
    for a, b in zip(got, run_all(twin, case, problem), strict=True):
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


def test_naive_rows_shard_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(DOC_CASES[3], blocks=())
    problem = make_problem(case, torch.float32, "cpu")
    gen = torch.Generator().manual_seed(1)
    shards = [torch.randperm(case.NB, generator=gen)[:n] for n in range(1, case.NB + 1)]
    assert_shard_invariant(naive, case, problem, shards)
    monkeypatch.setattr(naive, "_CHUNK_BYTES", 1)  # a block at a time
    assert_shard_invariant(naive, case, problem, shards[-1:])


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


@pytest.mark.parametrize(
    "groups",
    [(), (Group(0, 124), Group(75, 120)), (Group(21, 40, 2), Group(0, 9))],
    ids=str,
)
def test_triton_shard_invariant(groups: tuple[Group, ...]) -> None:
    case = Case(1, 4, 2, 20, 16, 16, 9, groups=groups)
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


BAD_ROWS = [
    (r"first_q \(48\) and rows \(\(4, 16\)\)", {"first_q": 48}),
    (r"first_q \(None\) and rows \(None\)", {"rows": None}),
    (r"q \(4\) .* of k \(3\)", {"k": (3, 1, 64, 16)}),
    ("agree in batch", {"k": (2, 1, 64, 32)}),
    ("must not be empty", {"k": (0, 1, 64, 16)}),
    (r"\(4, 16\) .* \(4, 15\)", {"pos": (4, 15)}),
    (r"\(4,\), got \(4, 16\) and \(2,\)", {"start": (2,)}),
    ("int32, got torch.int64", {"dtype": torch.int64}),
    (r"seq_len \(72\) .* granularity \(16\)", {"seq_len": 72}),
    ("lse must be", {"lse": (2, 2, 16)}),
]


@BOTH
@pytest.mark.parametrize(
    ("message", "change"), BAD_ROWS, ids=[str(b[1]) for b in BAD_ROWS]
)
def test_errors_of_rows(twin: ModuleType, message: str, change: dict[str, Any]) -> None:
    q = torch.zeros(4, 2, 16, 16, device=DEVICE)
    k = torch.zeros(change.get("k", (2, 1, 64, 16)), device=DEVICE)
    lse = torch.zeros(change.get("lse", (4, 2, 16)), device=DEVICE)
    dtype = change.get("dtype", torch.int32)
    rows = ProbeRows(
        torch.zeros(change.get("pos", (4, 16)), dtype=dtype, device=DEVICE),
        torch.zeros(change.get("start", (4,)), dtype=torch.int32, device=DEVICE),
    )
    args = {
        "first_q": change.get("first_q"),
        "rows": change.get("rows", rows),
        "seq_len": change.get("seq_len", 64),
    }
    blocks = torch.arange(4, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        twin.probe_scores(q, k, lse, blocks, scale=1.0, granularity=16, **args)


def test_rows_must_be_where_q_is() -> None:
    q = torch.zeros(1, 1, 4, 16)
    k = torch.zeros(1, 1, 16, 16)
    where = torch.device("meta")
    pos = torch.zeros(1, 4, dtype=torch.int32, device=where)
    rows = ProbeRows(pos, torch.zeros(1, dtype=torch.int32))
    for twin in (naive, probe):
        with pytest.raises(ValueError, match="on meta and .* cpu, q on cpu"):
            twin.probe_row_stats(
                q, k, torch.arange(1), rows=rows, scale=1.0, granularity=16
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
# Of 8192 tokens: a document that ends the sequence, one of a block, one in the middle
# whose rows cross an edge, one from the first token on.
GPU_GROUPS = (Group(5000, 8092), Group(4864, 4892), Group(1000, 4700), Group(0, 800, 3))
GPU_DOC_CASES = [
    Case(1, H, HK, R, D, 128, 64, groups=GPU_GROUPS)
    for H, HK in ((16, 2), (32, 8))
    for D in (64, 128)
    for R in (64, 100)
]
GPU_DOC_CASES.append(Case(2, 8, 8, 64, 128, 128, 64, groups=GPU_GROUPS))


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("case", GPU_CASES + GPU_DOC_CASES, ids=str)
def test_gpu_bf16(case: Case) -> None:
    problem = make_problem(case, torch.bfloat16)
    with poisoned():
        got = run_all(probe, case, problem)
    assert_close(got, run_all(naive, case, problem), 1e-3)
    again = run_all(probe, case, problem)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("case", GPU_CASES[::3] + GPU_DOC_CASES[::3], ids=str)
def test_gpu_shard_invariant(case: Case) -> None:
    problem = make_problem(case, torch.bfloat16)
    gen = torch.Generator().manual_seed(1)
    shards = [torch.arange(r, 64, W) for W in (2, 7, 16) for r in (0, W - 1)]
    shards += [torch.randperm(64, generator=gen)[:n] for n in (1, 2, 17, 33, 64)]
    assert_shard_invariant(probe, case, problem, shards)


@pytest.mark.gpu
@NEEDS_GPU
def test_gpu_rows_do_not_wait_for_the_device() -> None:
    case = GPU_DOC_CASES[0]
    problem = make_problem(case, torch.bfloat16)
    k, blocks = problem.shard(case.g)
    args = {"rows": problem.rows, **case.args}

    def call() -> None:
        probe.probe_row_stats(problem.q, k, blocks, **args)
        probe.probe_scores(
            problem.q, k, problem.lse, blocks, seq_len=case.seq_len, **args
        )

    call()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


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

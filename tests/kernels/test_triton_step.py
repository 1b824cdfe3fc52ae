"""Backend `triton` in the ring, interpreted: lists, steps, and all ranks together.

The lists that the kernels walk are held equal to the tables of FlexAttention, and the
ring's out, dq, dk, dv to the reference in fp64. `flash` composes slash steps of another
kind with our column kernels; the same composition is tested with eager slashes.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtraining_flex.attention import sparse_attention
from mtraining_flex.block_mask import (
    ColumnLists,
    SlashLists,
    StepMask,
    slash_step,
    vertical_step,
)
from mtraining_flex.counters import recorder
from mtraining_flex.layout import LAYOUTS, build_layout
from mtraining_flex.pattern.types import SENTINEL, pack_pattern, slash_bitmap
from mtraining_flex.reference import reference_attention
from mtraining_flex.ring import ops
from mtraining_flex.ring.simulate import LockedStep, run_ranks
from mtraining_flex.ring.step import EagerStep, Finished, Gradients, Part
from mtraining_flex.ring.triton_step import TritonStep
from tests.helpers import (
    assert_close,
    random_documents,
    random_pattern,
    random_qkv,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="interprets on the CPU"),
]
G, D = 16, 16


class EagerSlashes(EagerStep):
    """Slashes by one backend, columns by ours on top, as `flash` has it."""

    def __init__(self) -> None:
        self.columns = TritonStep()

    def continues(self, mask: StepMask) -> bool:
        return mask.kind == "vertical"

    def executed(self, mask: StepMask) -> Tensor:
        return (mask.lists if self.continues(mask) else mask.tables).executed()

    def finish(self, dout: Tensor, out: Tensor, lse: Tensor) -> Finished:
        return self.columns.finish(dout, out, lse)

    def forward(self, q: Tensor, part: Part, scale: float, **more: Any) -> Any:
        if self.continues(part.mask):
            return self.columns.forward(q, part, scale, **more)
        return super().forward(q, part, scale, **more)

    def backward(
        self, q: Tensor, part: Part, done: Finished, scale: float, **more: Any
    ) -> Gradients:
        if self.continues(part.mask):
            return self.columns.backward(q, part, done, scale, **more)
        return super().backward(q, part, done, scale, **more)


STEPS = {"triton": TritonStep, "composed": EagerSlashes}


def ring(monkeypatch, step, qkv, dout, pattern, layout, rotation):
    """out, dq, dk, dv of all ranks, in the sequence's order."""
    monkeypatch.setattr(ops, "get_step", lambda _: LockedStep(STEPS[step]()))

    def call(comm: Any) -> tuple[Tensor, ...]:
        here = layout.positions(comm.rank)
        q, k, v = (x[:, :, here].detach().requires_grad_() for x in qkv)
        out = sparse_attention(
            q,
            k,
            v,
            pattern,
            granularity=G,
            layout=layout,
            mesh=comm,
            rotation=rotation,
            backend="triton",
        )
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout[:, :, here])

    whole = [torch.full_like(x, torch.nan) for x in (dout, *qkv)]
    for rank, parts in enumerate(run_ranks(layout.cp_size, call)):
        for total, part in zip(whole, parts, strict=True):
            total[:, :, layout.positions(rank)] = part
    return whole


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("size", "name", "rotation", "batch", "heads", "kv_heads", "diagonal"),
    [
        (1, "striped", "ring", 2, 4, 2, True),
        (1, "zigzag", "ring", 1, 6, 6, False),
        (2, "striped", "ring", 1, 6, 1, True),
        (2, "contiguous", "allgather", 1, 6, 3, False),
        (3, "striped", "allgather", 1, 3, 3, False),
        (2, "zigzag", "ring", 1, 6, 2, True),
        (4, "contiguous", "ring", 1, 2, 1, True),
    ],
)
def test_all_ranks_are_the_reference(
    monkeypatch, step, size, name, rotation, batch, heads, kv_heads, diagonal
):
    cycle = G * size * (2 if name == "zigzag" else 1)
    layout = build_layout(name, 3 * cycle if size < 4 else 2 * cycle, size, G)
    pattern = random_pattern(
        batch,
        heads,
        layout.seq_len,
        G,
        max_slash=4,
        max_vertical=20,
        seed=size + heads,
        always_diagonal=diagonal,
    )
    qkv = random_qkv(batch, heads, kv_heads, layout.seq_len, D, torch.float32, seed=3)
    dout = torch.randn(qkv[0].shape)
    got = ring(monkeypatch, step, qkv, dout, pattern, layout, rotation)
    leaves = [x.double().requires_grad_() for x in qkv]
    out, _ = reference_attention(*leaves, pattern, G)
    want = (out.detach(), *torch.autograd.grad(out, leaves, dout.double()))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 2e-6)


@pytest.mark.parametrize(
    ("size", "name", "rotation", "shared"),
    [
        (1, "striped", "ring", False),
        (1, "zigzag", "ring", True),
        (2, "striped", "ring", False),
        (2, "contiguous", "allgather", False),
        (2, "zigzag", "ring", False),
        (4, "striped", "ring", True),
    ],
)
def test_documents_are_the_reference(monkeypatch, size, name, rotation, shared):
    cycle = G * size * (2 if name == "zigzag" else 1)
    layout = build_layout(name, 3 * cycle if size < 4 else 2 * cycle, size, G)
    pattern = random_pattern(
        1 if shared else 2, 4, layout.seq_len, G, max_slash=4, max_vertical=20, seed=1
    )
    documents = random_documents(2, layout.seq_len, size)
    pattern = replace(pattern, documents=documents)
    qkv = random_qkv(2, 4, 2, layout.seq_len, D, torch.float32, seed=3)
    dout = torch.randn(qkv[0].shape)
    got = ring(monkeypatch, "triton", qkv, dout, pattern, layout, rotation)
    leaves = [x.double().requires_grad_() for x in qkv]
    out, _ = reference_attention(*leaves, pattern, G)
    want = (out.detach(), *torch.autograd.grad(out, leaves, dout.double()))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 2e-6)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_lists_are_the_tables(name: str, size: int) -> None:
    """The windows of a list, row by row, are the rows of the tables."""
    layout = build_layout(name, 16 * G * (3 if size == 1 else 1), size, G)
    pattern = random_pattern(
        2, 6, layout.seq_len, G, max_slash=6, max_vertical=40, seed=1
    )
    bitmap = slash_bitmap(pattern, layout.num_blocks)
    for q_rank in range(size):
        for kv_rank in range(size):
            mask = slash_step(pattern, bitmap, layout, q_rank, kv_rank, (2, 6))
            lists = mask.lists
            assert isinstance(lists, SlashLists)
            assert torch.equal(lists.executed(), mask.tables.executed())
            assert torch.equal(_blocks_of_lists(lists), _blocks_of_tables(mask))
        columns = vertical_step(pattern, bitmap, layout, q_rank, (2, 6))
        assert isinstance(columns.lists, ColumnLists)
        assert torch.equal(columns.lists.executed(), columns.tables.executed())
        q_pos = layout.positions(q_rank).view(-1, G)
        real = columns.lists.pos < SENTINEL
        for count, bound in (
            (columns.lists.before, q_pos[:, 0]),
            (columns.lists.visible, q_pos[:, -1] + 1),
        ):
            seen = columns.lists.pos[:, :, None] < bound[:, None]
            assert torch.equal(count, (seen & real[:, :, None]).sum(-1).int())


def _blocks_of_lists(lists: SlashLists) -> Tensor:
    """Which pairs of local blocks a step keeps: bool [B, H, N, M]."""
    n = lists.n
    row = torch.arange(n * lists.q_segments)[:, None]
    key = torch.arange(n * lists.k_segments)
    pair = row // n * lists.k_segments + key // n
    kept = torch.zeros(*lists.offsets.shape[1:3], len(row), len(key), dtype=torch.bool)
    for t in lists.offsets.unbind(-1):
        kept |= t.movedim(0, -1)[..., pair] == row % n - key % n
    return kept


def _blocks_of_tables(mask: StepMask) -> Tensor:
    t = mask.tables
    blocks = mask.kv_len // mask.granularity
    kept = torch.zeros(*t.full_kv_num.shape, blocks, dtype=torch.bool)
    for num, idx in ((t.kv_num, t.kv_idx), (t.full_kv_num, t.full_kv_idx)):
        valid = torch.arange(idx.shape[-1]) < num[..., None]
        for place in valid.expand(idx.shape).nonzero().tolist():
            kept[(*place[:3], int(idx[tuple(place)]))] = True
    return kept


def test_kernels_build_no_tables(monkeypatch) -> None:
    """Nothing with a row per query block and a column per slash exists."""

    def no_tables(self: StepMask) -> Any:
        raise AssertionError("tables were built")

    monkeypatch.setattr(StepMask, "_tables_and_buffers", property(no_tables))
    pattern = pack_pattern([[[0, 2], [0, 1]]], [[[3, 40], [7]]])
    q, k, v = random_qkv(1, 2, 1, 64, D, torch.float32, seed=0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with recorder.recording(True):
        out = sparse_attention(*leaves, pattern, granularity=G, backend="triton")
    recorder.clear()
    torch.autograd.grad(out.sum(), leaves)


def test_column_gradients_of_a_group_repeat() -> None:
    """Heads of a group share tokens; each sum has one order."""
    pattern = pack_pattern([[[0]] * 4], [[[1, 2, 3, 20]] * 4])
    q, k, v = random_qkv(1, 4, 1, 64, D, torch.float32, seed=0)
    results = []
    for _ in range(3):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = sparse_attention(*leaves, pattern, granularity=G, backend="triton")
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)

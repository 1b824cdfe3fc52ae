"""Attention over slashes and verticals, walking the pattern itself.

One call computes one ring step: the queries of this rank against the keys of one rank
along the kept *slashes*, the gathered *columns*, or both in one launch, with one online
softmax. The only description of the slashes is the ascending list of a head's local
block offsets, at most NS numbers: no index tensor over rows exists.

    query block a   attends to   key blocks    a - t  for each t that stays inside
    key block b     is seen by   query blocks  b + t  for each t that stays inside

Both are windows of the same ascending list, found by counting. The block with t = 0 of
a rank's own keys is the diagonal: there, and there alone, causality is looked at.

Columns are keys and values gathered per query head, ascending by position. A query
block sees a prefix of them. A column is dropped where a slash keeps its block, which is
one lookup per column in a bitmap (all rows of a block have the same offset to it), not
one per pair.

The backward takes the *global* lse and delta = sum(out dout), so it recomputes nothing
of other steps. dq is made by query blocks, dk and dv by key blocks, the columns' dk and
dv by column tiles: every number is summed by one program in one order. There are no
atomics, and results repeat bit for bit. The query heads that share a kv head are served
by one program.

*Fused or split.* With both slashes and columns, a call is one launch. Given `running`,
it continues from a partial result (out and lse, or dq), so a slash call and a column
call need no merge between them. Both are measured in `recipes/results`.

The twins in `naive.py` say what is computed and are the oracles.

Letters: B batch, H query heads, HK kv heads, G = H / HK, S queries, N = S / g query
blocks, n blocks of a segment of the layout, X and Y segments of queries and keys, C
length of an offset list, NC gathered columns, NB blocks of the whole sequence, D head
dim, DP D padded to a power of two, g granularity, BM and BN rows and keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from kernels_triton.common import (
    LOG2E,
    Tile,
    addressable,
    check_device,
    check_supported,
    descriptor,
    launch_options,
    tile_of,
    written,
)
from kernels_triton.lists import Columns, Slashes, check_vertical_slash
from kernels_triton.vertical_slash_kernels import (
    column_dkdv_kernel,
    delta_kernel,
    dkdv_kernel,
    dq_kernel,
    forward_kernel,
)

# Programs of the columns' backward: sixteen for each of 132 processors.
_COLUMN_PROGRAMS = 2112


@dataclass(frozen=True)
class _Problem:
    """The arguments that all kernels of a call share."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    slashes: Slashes | None
    columns: Columns | None
    granularity: int
    q_doc: Tensor | None
    k_doc: Tensor | None
    scale: float

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        slashes: Slashes | None,
        columns: Columns | None,
        *,
        granularity: int,
        q_doc: Tensor | None,
        k_doc: Tensor | None,
        scale: float,
        check: bool,
    ) -> _Problem:
        """Checked, and with tensors that descriptors can describe."""
        check_vertical_slash(
            q, k, v, slashes, columns, granularity=granularity, q_doc=q_doc,
            k_doc=k_doc, values=check,
        )  # fmt: skip
        check_supported(granularity, q.shape[3], q.dtype)
        check_device(q)
        if not scale > 0:
            raise ValueError(f"scale ({scale}) must be positive")
        q = addressable(q)
        if slashes is not None and k is not None and v is not None:
            k, v = addressable(k), addressable(v)
            slashes = replace(slashes, offsets=slashes.offsets.contiguous())
        else:
            k = v = None
        if columns is not None:
            tokens = {"k": addressable(columns.k), "v": addressable(columns.v)}
            # The kernels step through lists one by one, by the strides of one of them.
            lists = {
                name: getattr(columns, name).contiguous()
                for name in ("pos", "bitmap", "q_blocks", "before", "visible", "doc")
                if getattr(columns, name) is not None
            }
            columns = replace(columns, **tokens, **lists)
        q_doc, k_doc = (x if x is None else x.contiguous() for x in (q_doc, k_doc))
        return _Problem(q, k, v, slashes, columns, granularity, q_doc, k_doc, scale)

    def tile(self, kernel: str) -> Tile:
        return tile_of(kernel, self.q.dtype, self.granularity)

    def rows_grid(self, tile: Tile) -> tuple[int, int]:
        return self.q.shape[2] // tile.rows, self.q.shape[0] * self.q.shape[1]

    def keys(self, tile: Tile) -> tuple[Any, ...]:
        """Descriptors of k, v; any two for none."""
        if self.k is None or self.v is None:
            return descriptor(self.q, tile.keys), descriptor(self.q, tile.keys)
        return descriptor(self.k, tile.keys), descriptor(self.v, tile.keys)

    def column_keys(self, tile: Tile) -> tuple[Any, ...]:
        if self.columns is None:
            return descriptor(self.q, tile.keys), descriptor(self.q, tile.keys)
        return tuple(descriptor(x, tile.keys) for x in (self.columns.k, self.columns.v))

    def offsets(self) -> Tensor:
        if self.slashes is not None:
            return self.slashes.offsets
        assert self.columns is not None
        return self.columns.pos[None]  # not read

    def column_lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """pos, bitmap, q_blocks, before, visible; the same strides for the last two."""
        columns = self.columns
        if columns is None:
            assert self.slashes is not None
            t = self.slashes.offsets[0]
            return t, t, t, t, t  # not read
        return (
            columns.pos,
            columns.bitmap.view(torch.uint8),
            columns.q_blocks,
            columns.before,
            columns.visible,
        )

    def documents(self) -> tuple[Tensor, Tensor, Tensor]:
        none = self.offsets()  # not read
        doc = None if self.columns is None else self.columns.doc
        q_doc, k_doc, doc = (
            none if x is None else x for x in (self.q_doc, self.k_doc, doc)
        )
        return q_doc, k_doc, doc

    def offset_strides(self) -> tuple[int, int, int]:
        t = self.offsets()
        return t.stride(0), _stride(t, 1), _stride(t, 2)

    def column_strides(self) -> tuple[int, ...]:
        pos, bitmap, _, before, _ = self.column_lists()
        return tuple(_stride(x, d) for x in (pos, bitmap, before) for d in (0, 1))

    def sizes(self) -> tuple[int, int, int]:
        """S, S_k, n."""
        segments = 1 if self.slashes is None else self.slashes.q_segments
        S = self.q.shape[2]
        S_k = S if self.k is None else self.k.shape[2]
        return S, S_k, S // self.granularity // segments

    def num_blocks(self) -> int:
        return 0 if self.columns is None else self.columns.bitmap.shape[-1] // 2

    def shape_options(self, tile: Tile) -> dict[str, Any]:
        options = launch_options(tile, self.q, self.granularity)
        return {"DOCS": self.q_doc is not None, **options}

    def slash_options(self) -> dict[str, Any]:
        slashes = self.slashes
        width = 1 if slashes is None else slashes.offsets.shape[-1]
        return {
            "G": 1 if self.k is None else self.q.shape[1] // self.k.shape[1],
            "C": width,
            "CP": triton.next_power_of_2(width),
            "Y": 1 if slashes is None else slashes.k_segments,
            "DIAGONAL": slashes is not None and slashes.diagonal,
            "WINDOWED": slashes is not None and slashes.windowed,
        }


def _stride(x: Tensor, dim: int) -> int:
    """0 for a dimension of one element, which stands for all."""
    return 0 if x.shape[dim] == 1 else x.stride(dim)


def vertical_slash_forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slashes: Slashes | None,
    columns: Columns | None,
    *,
    scale: float,
    granularity: int,
    q_doc: Tensor | None = None,
    k_doc: Tensor | None = None,
    running: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of a shard's queries along slashes and columns, in one launch.

    Arguments and errors as in `naive.vertical_slash_forward`. q is bf16, fp16 or fp32
    with D a multiple of 8 from 16 to 128, g 16, 32, 64 or 128.

    Returns:
        out: [B, H, S, D] in `dtype` (default q's), in q's memory order.
        lse: [B, H, S] fp32, natural.
    """
    problem = _Problem.of(
        q, k, v, slashes, columns, granularity=granularity, q_doc=q_doc, k_doc=k_doc,
        scale=scale, check=check,
    )  # fmt: skip
    tile = problem.tile("forward")
    out = torch.empty_like(q, dtype=dtype or q.dtype)
    target = addressable(out)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    run_out, run_lse = target, lse  # not read
    if running is not None:
        run_out, run_lse = addressable(running[0]), running[1].float().contiguous()
    with torch.cuda.device_of(q):
        forward_kernel[problem.rows_grid(tile)](
            descriptor(problem.q, tile.rows),
            *problem.keys(tile),
            *problem.column_keys(tile),
            descriptor(target, tile.rows),
            lse,
            problem.offsets(),
            *problem.column_lists(),
            descriptor(run_out, tile.rows),
            run_lse,
            *problem.documents(),
            *problem.offset_strides(),
            *problem.column_strides(),
            scale * LOG2E,
            *problem.sizes(),
            problem.num_blocks(),
            SLASHES=slashes is not None,
            COLUMNS=columns is not None,
            RUNNING=running is not None,
            **problem.slash_options(),
            **problem.shape_options(tile),
        )
    return written(out, target), lse


def vertical_slash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    slashes: Slashes | None,
    columns: Columns | None,
    *,
    scale: float,
    granularity: int,
    q_doc: Tensor | None = None,
    k_doc: Tensor | None = None,
    running: Tensor | None = None,
    dtype: torch.dtype | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of these keys and of the queries through them.

    Arguments, results and errors as in `naive.vertical_slash_backward`; dq in `dtype`
    (default q's) and q's memory order, dkv and dcolumns fp32 and contiguous.
    """
    problem = _Problem.of(
        q, k, v, slashes, columns, granularity=granularity, q_doc=q_doc, k_doc=k_doc,
        scale=scale, check=check,
    )  # fmt: skip
    rows = (addressable(dout), lse.float().contiguous(), delta.float().contiguous())
    dq = torch.empty_like(q, dtype=dtype or q.dtype)
    with torch.cuda.device_of(q):
        dq = _dq(problem, rows, dq, running)
        dkv = _dkdv(problem, rows)
        dcolumns = _dcolumns(problem, rows)
    return dq, dkv, dcolumns


_Rows = tuple[Tensor, Tensor, Tensor]  # dout, lse, delta


def _dq(problem: _Problem, rows: _Rows, dq: Tensor, running: Tensor | None) -> Tensor:
    tile = problem.tile("dq")
    target = addressable(dq)
    before = target if running is None else addressable(running)
    dq_kernel[problem.rows_grid(tile)](
        descriptor(problem.q, tile.rows),
        *problem.keys(tile),
        *problem.column_keys(tile),
        descriptor(rows[0], tile.rows),
        *rows[1:],
        descriptor(target, tile.rows),
        problem.offsets(),
        *problem.column_lists(),
        descriptor(before, tile.rows),
        *problem.documents(),
        *problem.offset_strides(),
        *problem.column_strides(),
        problem.scale * LOG2E,
        problem.scale,
        *problem.sizes(),
        problem.num_blocks(),
        SLASHES=problem.slashes is not None,
        COLUMNS=problem.columns is not None,
        RUNNING=running is not None,
        **problem.slash_options(),
        **problem.shape_options(tile),
    )
    return written(dq, target)


def _dkdv(problem: _Problem, rows: _Rows) -> Tensor | None:
    """[2, B, HK, S_k, D] fp32, if there are slashes."""
    slashes, k = problem.slashes, problem.k
    if slashes is None or k is None:
        return None
    tile = problem.tile("dkdv")
    dkv = torch.empty(2, *k.shape, dtype=torch.float32, device=k.device)
    grid = k.shape[2] // tile.keys, k.shape[0] * k.shape[1]
    dkdv_kernel[grid](
        descriptor(problem.q, tile.rows),
        *problem.keys(tile),
        descriptor(rows[0], tile.rows),
        *rows[1:],
        descriptor(dkv[0], tile.keys),
        descriptor(dkv[1], tile.keys),
        problem.offsets(),
        *problem.documents()[:2],
        *problem.offset_strides(),
        problem.scale * LOG2E,
        problem.scale,
        *problem.sizes(),
        X=slashes.q_segments,
        **problem.slash_options(),
        **problem.shape_options(tile),
    )
    return dkv


def _dcolumns(problem: _Problem, rows: _Rows) -> Tensor | None:
    """[2, B, H, NC, D] fp32, if there are columns."""
    columns = problem.columns
    if columns is None:
        return None
    tile = problem.tile("columns")
    B, H, NC, D = columns.k.shape
    tiles, N = NC // tile.keys, problem.q.shape[2] // problem.granularity
    # A head has few tiles of columns, and each is seen by nearly all queries. Cut into
    # parts there are enough programs for the device; parts are added up in one order.
    parts = max(1, min(_COLUMN_PROGRAMS // (B * H * tiles), N, 32))
    shape = (2, parts * B, H, NC, D)
    partial = torch.empty(shape, dtype=torch.float32, device=columns.k.device)
    column_dkdv_kernel[(tiles * parts, B * H)](
        descriptor(problem.q, tile.rows),
        *problem.column_keys(tile),
        descriptor(rows[0], tile.rows),
        *rows[1:],
        descriptor(partial[0], tile.keys),
        descriptor(partial[1], tile.keys),
        *problem.column_lists()[:3],
        problem.documents()[0],
        problem.documents()[2],
        *problem.column_strides()[:4],
        problem.scale * LOG2E,
        problem.scale,
        problem.sizes()[0],
        problem.num_blocks(),
        B=B,
        NP=triton.next_power_of_2(N),
        PARTS=parts,
        **problem.shape_options(tile),
    )
    return partial.unflatten(1, (parts, B)).sum(1) if parts > 1 else partial


def delta(out: Tensor, dout: Tensor) -> Tensor:
    """Sum of out * dout over the head dim: [B, H, S] fp32.

    As `naive.delta`; each tensor is read once. S a multiple of 16, D at most 128.

    Raises:
        ValueError: shapes that differ or do not fit.
    """
    check_device(out)
    B, H, S, D = out.shape
    if out.shape != dout.shape or S % 16:
        raise ValueError(
            f"out {tuple(out.shape)} and dout {tuple(dout.shape)} must be one "
            "[B, H, S, D] with S a multiple of 16"
        )
    total = torch.empty(B, H, S, dtype=torch.float32, device=out.device)
    rows = next(rows for rows in (64, 32, 16) if S % rows == 0)
    with torch.cuda.device_of(out):
        delta_kernel[(S // rows, B * H)](
            descriptor(addressable(out), rows),
            descriptor(addressable(dout), rows),
            total,
            S,
            H=H,
            DP=triton.next_power_of_2(D),
            BM=rows,
        )
    return total

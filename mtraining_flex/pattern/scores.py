"""Score all keys by a few probe rows: the first half of the pattern search.

The last `probe_rows` queries of the sequence attend to every key, exactly, with a
softmax over the whole sequence and all ranks:

    A = softmax(scale * Q_probe K^T)            [B, H, R, S], never held whole
    vertical[k] = sum of A over probe rows
    slash[d]    = sum of A over pairs, a pair at token distance s giving the share
                  1 - (s % g) / g to block offset s // g and the rest to s // g + 1

What travels between ranks: the probe rows' q (one all-reduce of zero-filled rows), the
rows' maxima and sums (one all-gather, one all-reduce of integers), and the blocks'
shares of the slash histogram (one all-reduce in which each entry has a single owner). A
key block's numbers come from one fixed tile and what crosses blocks is added exactly:
the number of ranks and the layout do not move a bit.

Letters: R probe rows, RG query blocks they touch, N local blocks, NB global blocks.
"""

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from mtraining_flex.compat import fused
from mtraining_flex.layout import Layout, positions_on
from mtraining_flex.pattern.budget import MASS_UNIT
from mtraining_flex.pattern.documents import ProbeGroups
from mtraining_flex.pattern.types import VerticalSlash, slash_bitmap
from mtraining_flex.ring.comm import Comm


@dataclass(frozen=True)
class Scores:
    """What the probe rows found, in units of one row's whole attention."""

    vertical: Tensor  # fp32 [B, H, RG, S_local], per query block of the probe rows
    slash: Tensor  # fp32 [B, H, NB], the same on every rank
    probe_rows: int
    row_blocks: Tensor  # int64 [1 or B, RG], the query blocks of `vertical`


def score_keys(
    q: Tensor,
    k: Tensor,
    layout: Layout,
    comm: Comm,
    probe_rows: int,
    scale: float,
    groups: ProbeGroups | None = None,
) -> Scores:
    """Score this rank's keys and all block offsets.

    Args:
        q: `[B, H, S_local, D]`, this rank's queries in the layout's order.
        k: `[B, HK, S_local, D]`.
        layout: of the global sequence.
        comm: this rank's end of the ring.
        probe_rows: R, the last rows of the global sequence.
        scale: of the logits.
        groups: with several documents, the rows that probe instead of the last.
    """
    if groups is not None:
        return _score_documents(q, k, layout, comm, groups, scale)
    kernels = _kernels(q)
    first_q = layout.seq_len - probe_rows
    blocks = _blocks(layout, comm.rank, q.device)
    probe = _gather_probe(q, layout, comm, probe_rows)
    row_max, row_sum = kernels.probe_row_stats(
        probe,
        k,
        blocks,
        first_q=first_q,
        scale=scale,
        granularity=layout.granularity,
    )  # [B, H, N, R]
    vertical, parts = kernels.probe_scores(
        probe,
        k,
        _global_lse(row_max, row_sum, comm),
        blocks,
        first_q=first_q,
        seq_len=layout.seq_len,
        scale=scale,
        granularity=layout.granularity,
    )  # [B, H, RG, S_local], [B, H, N, C]
    if comm.size > 1:
        histogram = parts.new_zeros(*parts.shape[:2], layout.num_blocks, parts.shape[3])
        histogram[:, :, blocks] = parts
        parts = comm.all_reduce(histogram)  # each entry has one owner: exact
    row_blocks = _last_blocks(layout.num_blocks, vertical.shape[2], q.device)
    return Scores(vertical, fused(("fold",), _fold, parts), probe_rows, row_blocks)


@lru_cache(maxsize=64)
def _last_blocks(num_blocks: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(num_blocks - count, num_blocks, device=device)[None]


def _score_documents(
    q: Tensor,
    k: Tensor,
    layout: Layout,
    comm: Comm,
    groups: ProbeGroups,
    scale: float,
) -> Scores:
    """`score_keys` for rows of several documents. Groups are batch entries of their own
    to the kernels, and the keys of an entry are read by its P groups."""
    kernels, g = _kernels(q), layout.granularity
    batch, count, size = groups.pos.shape
    blocks = _blocks(layout, comm.rank, q.device)
    rows = kernels.ProbeRows(groups.pos.flatten(0, 1), groups.start.flatten())
    probe = _gather_rows(q, layout, comm, groups.pos.flatten(1))  # [B, H, R, D]
    probe = probe.unflatten(2, (count, size)).transpose(1, 2).flatten(0, 1).contiguous()
    row_max, row_sum = kernels.probe_row_stats(
        probe, k, blocks, rows=rows, scale=scale, granularity=g
    )  # [B P, H, N, R / P]
    vertical, parts = kernels.probe_scores(
        probe,
        k,
        _global_lse(row_max, row_sum, comm),
        blocks,
        rows=rows,
        seq_len=layout.seq_len,
        scale=scale,
        granularity=g,
    )  # [B P, H, RG, S_local], [B P, H, N, C]
    if comm.size > 1:
        histogram = parts.new_zeros(*parts.shape[:2], layout.num_blocks, parts.shape[3])
        histogram[:, :, blocks] = parts
        parts = comm.all_reduce(histogram)  # each entry has one owner: exact
    touched = vertical.shape[2]  # RG, blocks that a group can touch
    first_block = groups.pos[..., 0].long() // g  # [B, P]
    row_blocks = first_block[..., None] + torch.arange(touched, device=q.device)

    def fold(parts: Tensor, first_block: Tensor) -> Tensor:
        return _fold_groups(parts.unflatten(0, (batch, count)), first_block, touched)

    slash = fused(("fold_groups", batch, count, touched), fold, parts, first_block)
    by_group = vertical.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)
    return Scores(by_group, slash, count * size, row_blocks.flatten(1))


def _gather_rows(q: Tensor, layout: Layout, comm: Comm, pos: Tensor) -> Tensor:
    """The rows at positions `[B, R]`, of all ranks: [B, H, R, D]."""
    index, owned = layout.local_index(pos, comm.rank)
    entry = torch.arange(q.shape[0], device=q.device)[:, None]
    rows = q.transpose(1, 2)[entry, index.long()].transpose(1, 2)
    # Not a product with 0: NaN in the row that stands in would reach every rank.
    rows = rows.masked_fill(~owned[:, None, :, None], 0.0)
    return comm.all_reduce(rows)  # each row has one owner: exact in any dtype


def _fold_groups(parts: Tensor, first_block: Tensor, touched: int) -> Tensor:
    """Blocks' shares `[B, P, H, NB, C]` to offsets `[B, H, NB]`.

    Column c of block kb stands for offset top - kb - RG + c, with top the last block
    that a group can touch.
    """
    num_blocks, columns = parts.shape[3:]
    offset = torch.arange(num_blocks, device=parts.device)
    total = parts.new_zeros(parts.shape[0], *parts.shape[2:4], dtype=torch.float64)
    for c in range(columns):
        top = first_block + touched - 1
        block = (top - touched + c)[..., None] - offset  # [B, P, NB]
        inside = ((block >= 0) & (block < num_blocks))[:, :, None]
        at = block.clamp(0, num_blocks - 1)[:, :, None].expand(parts.shape[:4])
        found = parts[..., c].gather(3, at).double()
        total += torch.where(inside, found, 0.0).sum(1)
    return total.float()


def check_probe_kernels(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    granularity: int,
    probe_rows: int,
) -> None:
    """Refuse before the first step what the probe's kernels would refuse in it.

    Raises:
        ValueError: names the setting and both numbers.
    """
    if not _has_kernels(device_type, dtype):
        return
    from kernels_triton import probe

    try:
        probe.check_supported(probe_rows, granularity, head_dim, dtype)
    except ValueError as error:
        raise ValueError(f"sparse_attention: {error}") from None


def _has_kernels(device_type: str, dtype: torch.dtype) -> bool:
    return device_type == "cuda" and dtype != torch.float64


def _kernels(q: Tensor) -> ModuleType:
    """The Triton probe on a GPU, its twin in fp64 elsewhere."""
    if _has_kernels(q.device.type, q.dtype):
        from kernels_triton import probe

        return probe
    from kernels_triton import naive

    return naive


@lru_cache(maxsize=64)
def _blocks(layout: Layout, cp_rank: int, device: torch.device) -> Tensor:
    return layout.blocks(cp_rank).to(device)


@lru_cache(maxsize=64)
def _probe_index(
    layout: Layout, cp_rank: int, probe_rows: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Local rows that are probe rows, and their slots among them."""
    positions = layout.positions(cp_rank)
    rows = torch.nonzero(positions >= layout.seq_len - probe_rows).flatten()
    slots = positions[rows] - (layout.seq_len - probe_rows)
    return rows.to(device), slots.to(device)


def _gather_probe(q: Tensor, layout: Layout, comm: Comm, probe_rows: int) -> Tensor:
    """The probe rows of all ranks: [B, H, R, D]."""
    if comm.size == 1:
        return q[:, :, -probe_rows:].contiguous()
    rows, slots = _probe_index(layout, comm.rank, probe_rows, q.device)
    probe = q.new_zeros(*q.shape[:2], probe_rows, q.shape[3])
    probe[:, :, slots] = q[:, :, rows]
    return comm.all_reduce(probe)  # each row has one owner: exact in any dtype


def _global_lse(row_max: Tensor, row_sum: Tensor, comm: Comm) -> Tensor:
    """Normaliser of each probe row over all blocks and ranks: fp32 [B, H, R].

    Sums are of integers, so that no order of blocks or ranks shows in the result. A
    block's sum is at most g in units of its own maximum: 2^40 units leave room for 2^23
    tokens and resolve far below fp32.
    """

    def highest(row_max: Tensor) -> Tensor:
        return row_max.double().amax(2)

    def share(row_max: Tensor, row_sum: Tensor, top: Tensor) -> Tensor:
        weight = (row_max.double() - top[:, :, None]).exp()
        return (row_sum.double() * weight * MASS_UNIT).round().long().sum(2)

    def lse(total: Tensor, top: Tensor) -> Tensor:
        return (top + (total.double() / MASS_UNIT).log()).float()

    if comm.size == 1:

        def alone(row_max: Tensor, row_sum: Tensor) -> Tensor:
            top = highest(row_max)
            return lse(share(row_max, row_sum, top), top)

        return fused(("row_lse_alone",), alone, row_max, row_sum)
    local = fused(("row_top",), highest, row_max)
    top = comm.all_gather(local).amax(0)  # [B, H, R], finite: each row sees itself
    total = comm.all_reduce(fused(("row_share",), share, row_max, row_sum, top))
    return fused(("row_lse",), lse, total, top)


def _fold(parts: Tensor) -> Tensor:
    """Blocks' shares `[B, H, NB, C]` to offsets `[B, H, NB]`.

    Column c of block kb stands for offset NB - 1 - kb - (C - 2) + c.
    """
    num_blocks, columns = parts.shape[2:]
    reversed_parts = parts.double().flip(2)  # row j is block NB - 1 - j
    total = reversed_parts.new_zeros(*parts.shape[:3])
    for c in range(columns):
        shift = c - (columns - 2)  # offset d = j + shift
        low, high = max(shift, 0), num_blocks + min(shift, 0)
        total[:, :, low:high] += reversed_parts[:, :, low - shift : high - shift, c]
    return total.float()


def probe_recall(
    scores: Scores, pattern: VerticalSlash, layout: Layout, comm: Comm
) -> Tensor:
    """Share of the probe rows' attention on kept pairs, mean over heads: fp64, 0-dim.

    Exact over the union: a column counts where no slash keeps its block. Collective.
    """
    mass = scores.vertical.double()  # [B, H, RG, S_local]
    key_block = _blocks(layout, comm.rank, mass.device)  # [N]
    bitmap = slash_bitmap(pattern, layout.num_blocks)
    offset = layout.num_blocks + scores.row_blocks[..., None] - key_block
    # Rows that are not there, of a group at the end, have no mass.
    offset = offset.clamp(max=bitmap.shape[-1] - 1)[:, None]  # [1 or B, 1, RG, N]
    offset = offset.expand(*bitmap.shape[:2], -1, -1)
    kept_block = bitmap.gather(-1, offset.flatten(2)).view(offset.shape)
    position = positions_on(layout, comm.rank, mass.device)
    position = position.expand(*pattern.vertical.shape[:2], -1).contiguous()
    if pattern.vertical.shape[-1]:
        place = torch.searchsorted(pattern.vertical, position)
        place = place.clamp(max=pattern.vertical.shape[-1] - 1)
        is_vertical = pattern.vertical.gather(-1, place) == position
    else:
        is_vertical = torch.zeros_like(position, dtype=torch.bool)
    kept = kept_block.repeat_interleave(layout.granularity, 3) | is_vertical[:, :, None]
    total = (mass * kept).sum((2, 3)).mean() / scores.probe_rows
    return comm.all_reduce(total)

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
from mtraining_flex.pattern.types import VerticalSlash, slash_bitmap
from mtraining_flex.ring.comm import Comm


@dataclass(frozen=True)
class Scores:
    """What the probe rows found, in units of one row's whole attention."""

    vertical: Tensor  # fp32 [B, H, RG, S_local], per query block of the probe rows
    slash: Tensor  # fp32 [B, H, NB], the same on every rank
    probe_rows: int


def score_keys(
    q: Tensor, k: Tensor, layout: Layout, comm: Comm, probe_rows: int, scale: float
) -> Scores:
    """Score this rank's keys and all block offsets.

    Args:
        q: `[B, H, S_local, D]`, this rank's queries in the layout's order.
        k: `[B, HK, S_local, D]`.
        layout: of the global sequence.
        comm: this rank's end of the ring.
        probe_rows: R, the last rows of the global sequence.
        scale: of the logits.
    """
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
    return Scores(vertical, fused(("fold",), _fold, parts), probe_rows)


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
    groups = mass.shape[2]
    key_block = _blocks(layout, comm.rank, mass.device)  # [N]
    query_block = layout.num_blocks - groups + torch.arange(groups, device=mass.device)
    bitmap = slash_bitmap(pattern, layout.num_blocks)
    offset = layout.num_blocks + query_block[:, None] - key_block  # [RG, N]
    kept_block = bitmap[:, :, offset]  # [B, H, RG, N]
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

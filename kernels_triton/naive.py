"""Slow twins: plain torch versions of the Triton kernels, with the same signatures.

They are the oracles of the kernel tests, and what runs where there is no GPU.

Letters: B batch, H query heads, HK kv heads, G = H / HK, D head dim, g granularity
(block edge in tokens), N local key blocks, S = N * g local keys, NB blocks of the
whole sequence, R probe rows.

The probe
---------
The search for a pattern begins by scoring every key with a few probe rows, the last R
rows of the sequence. The keys of one shard are scored in two calls: `probe_row_stats`
gives the softmax statistics of each key block, which are merged over all blocks and
ranks into one `lse` per row; `probe_scores` then turns the logits into probabilities
and adds them up by key (vertical scores) and by block offset (slash scores).

A block must get the same bits in whatever shard it sits, or the number of ranks would
move a cut. Three things are done for that:

- Each (key block, kv head) has a matrix product of its own, of one fixed shape, whose
  right operand is contiguous. A batched product picks its code by the size of the
  batch, and a transposed right operand by the number of threads: both were seen to
  change the last bit.
- Sums are taken by halving (`_halving_sum`): additions of whole tensors, whose order
  follows from the length alone, not from threads or vector width.
- All else is elementwise, in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# fp64 logits held at a time, with a handful of temporaries of the same size. A piece
# that stays in the cache is twice as fast as one of 64 MiB.
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class ProbeGeometry:
    """The numbers that fix a probe call's tiles; all of them checked.

    Built by `check_probe`. Positions are global.
    """

    batch: int
    heads: int
    kv_heads: int
    rows: int
    """Probe rows R, at positions first_q .. first_q + R - 1."""
    head_dim: int
    blocks: int
    """Local key blocks N."""
    granularity: int
    first_q: int

    @property
    def group(self) -> int:
        """Query heads for each kv head, G."""
        return self.heads // self.kv_heads

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole sequence, NB."""
        return (self.first_q + self.rows) // self.granularity

    @property
    def row_groups(self) -> int:
        """Query blocks that the probe rows touch, RG."""
        return self.num_blocks - self.first_q // self.granularity

    @property
    def diagonal_column(self) -> int:
        """The slash column ceil(R / g), for block offset NB - 1 - kb."""
        return -(-self.rows // self.granularity)

    @property
    def slash_columns(self) -> int:
        """C. Column c of block kb is offset NB - 1 - kb - ceil(R / g) + c."""
        return self.diagonal_column + 2


def check_probe(
    q: Tensor,
    k: Tensor,
    blocks: Tensor,
    *,
    first_q: int,
    granularity: int,
    lse: Tensor | None = None,
    seq_len: int | None = None,
) -> ProbeGeometry:
    """Check a probe call's arguments and give its geometry.

    The values in `blocks` are not looked at: that would wait for the device.

    Raises:
        ValueError: a shape, dtype, device or position does not fit, with both numbers.
    """
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(
            f"q and k must be [B, H, R, D] and [B, HK, S, D], got {tuple(q.shape)} "
            f"and {tuple(k.shape)}"
        )
    B, H, R, D = q.shape
    HK, S = k.shape[1], k.shape[2]
    g = granularity
    if k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and head "
            "dim"
        )
    if min(B, H, R, D, HK, S) < 1:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must not be empty")
    if H % HK:
        raise ValueError(f"query heads ({H}) must be a multiple of kv heads ({HK})")
    if g < 1:
        raise ValueError(f"granularity ({g}) must be positive")
    if blocks.ndim != 1 or blocks.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"blocks must be [N] of int32 or int64, got {tuple(blocks.shape)} of "
            f"{blocks.dtype}"
        )
    if S != blocks.shape[0] * g:
        raise ValueError(
            f"k has {S} keys, but {blocks.shape[0]} blocks of granularity {g} are "
            f"{blocks.shape[0] * g}"
        )
    if not q.is_floating_point() or q.dtype != k.dtype:
        raise ValueError(
            f"q and k must have one floating dtype, got {q.dtype} and {k.dtype}"
        )
    if not q.device == k.device == blocks.device:
        raise ValueError(
            f"q, k and blocks must be on one device, got {q.device}, {k.device} and "
            f"{blocks.device}"
        )
    if first_q < 0 or (first_q + R) % g:
        raise ValueError(
            f"first_q ({first_q}) must not be negative, and first_q + rows "
            f"({first_q} + {R} = {first_q + R}) must be a multiple of the granularity "
            f"({g})"
        )
    if seq_len is not None and seq_len != first_q + R:
        raise ValueError(
            f"the probe rows must be the last rows: first_q + rows ({first_q} + {R} = "
            f"{first_q + R}) must be seq_len ({seq_len})"
        )
    if lse is not None:
        if tuple(lse.shape) != (B, H, R):
            raise ValueError(
                f"lse must be [B, H, R] = {(B, H, R)}, got {tuple(lse.shape)}"
            )
        if lse.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"lse must be float32 or float64, got {lse.dtype}")
        if lse.device != q.device:
            raise ValueError(f"lse is on {lse.device}, q on {q.device}")
    return ProbeGeometry(B, H, HK, R, D, blocks.shape[0], g, first_q)


@torch.no_grad()
def probe_row_stats(
    q: Tensor,
    k: Tensor,
    blocks: Tensor,
    *,
    first_q: int,
    scale: float,
    granularity: int,
) -> tuple[Tensor, Tensor]:
    """Softmax statistics of each probe row in each local key block.

    Args:
        q: the probe rows, [B, H, R, D], at positions first_q .. first_q + R - 1, which
            are the last of the sequence.
        k: the keys of this shard, [B, HK, S, D], any strides.
        blocks: global block index of each local block, [N] int32 or int64, any order,
            each in [0, NB).
        first_q: position of the first probe row.
        scale: factor of the logits.
        granularity: block edge g in tokens; first_q + R must be a multiple of it.

    Returns:
        row_max: [B, H, N, R] fp64, largest scaled logit among the block's keys that
            the row sees; -inf if it sees none.
        row_sum: [B, H, N, R] fp64, sum of exp(logit - row_max); 0 if it sees none.

    Raises:
        ValueError: the arguments do not fit together.
    """
    geo = check_probe(q, k, blocks, first_q=first_q, granularity=granularity)
    row_max, row_sum = [], []
    for _, x in _logit_chunks(q, k, blocks, geo, scale):
        top = x.amax(-1)  # [n, B, H, R]
        # A row without keys would give -inf - -inf.
        shift = torch.where(top == -torch.inf, 0.0, top)
        row_max.append(top)
        row_sum.append(_halving_sum(x.sub_(shift[..., None]).exp_(), -1))
    # [N, B, H, R] -> [B, H, N, R]
    return (
        torch.cat(row_max).permute(1, 2, 0, 3).contiguous(),
        torch.cat(row_sum).permute(1, 2, 0, 3).contiguous(),
    )


@torch.no_grad()
def probe_scores(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    blocks: Tensor,
    *,
    first_q: int,
    seq_len: int,
    scale: float,
    granularity: int,
) -> tuple[Tensor, Tensor]:
    """Attention mass of the probe rows by key and by block offset.

    With P = exp(logit - lse), 0 where the row does not see the key. A pair at token
    distance s = q_pos - k_pos gives the share 1 - (s % g) / g of its P to block offset
    s // g and the rest to the next one, as the rows of its diagonal do.

    Args:
        q, k, blocks, first_q, scale, granularity: as in `probe_row_stats`.
        lse: [B, H, R] fp32 or fp64, natural log of the sum of exp(logit) over the keys
            of all shards; -inf makes a row count for nothing.
        seq_len: tokens of the whole sequence, first_q + R.

    Returns:
        vertical: [B, H, RG, S] fp32, for each local key the sum of P over the probe
            rows in query block first_q // g + j.
        slash: [B, H, N, C] fp32, C = ceil(R / g) + 2. Column c of the local block
            with global index kb is block offset NB - 1 - kb - ceil(R / g) + c. Offset
            NB, which only block 0 can reach and no pair of blocks has, is counted as
            NB - 1, so that slash.sum() is the sum of all P. Columns of offsets outside
            [0, NB) are 0.

    Raises:
        ValueError: the arguments do not fit together.
    """
    geo = check_probe(
        q,
        k,
        blocks,
        first_q=first_q,
        granularity=granularity,
        lse=lse,
        seq_len=seq_len,
    )
    lse = lse.double()
    lse = torch.where(lse == -torch.inf, torch.inf, lse)[..., None]  # [B, H, R, 1]
    group_start = -(first_q % geo.granularity)  # row where query block 0 begins
    weights = _slash_weights(geo, q.device)
    vertical, slash = [], []
    for chunk_blocks, x in _logit_chunks(q, k, blocks, geo, scale):
        p = x.sub_(lse).exp_()  # [n, B, H, R, g]
        by_key = []
        for j in range(geo.row_groups):
            lo = max(0, group_start + j * geo.granularity)
            hi = min(geo.rows, group_start + (j + 1) * geo.granularity)
            by_key.append(_halving_sum(p[..., lo:hi, :], -2))
        vertical.append(torch.stack(by_key, -2))  # [n, B, H, RG, g]

        by_offset = torch.stack(
            [_halving_sum((p * w).flatten(-2), -1) for w in weights], -1
        )  # [n, B, H, C]
        first = (chunk_blocks == 0)[:, None, None]
        beyond = torch.where(first, by_offset[..., -1], 0.0)  # offset NB
        by_offset[..., -1] -= beyond
        by_offset[..., -2] += beyond
        slash.append(by_offset)
    # [N, B, H, RG, g] -> [B, H, RG, N, g] -> [B, H, RG, S]
    return (
        torch.cat(vertical).permute(1, 2, 3, 0, 4).flatten(-2).float(),
        torch.cat(slash).permute(1, 2, 0, 3).float().contiguous(),
    )


def _slash_weights(geo: ProbeGeometry, device: torch.device) -> Tensor:
    """Share of each (row, key of a block) in each slash column, [C, R, g] fp64.

    It is the same for every block: moving a key by g moves the offset by 1, and the
    columns of its block with it.
    """
    g = geo.granularity
    q_pos = geo.first_q + torch.arange(geo.rows, device=device)
    last_block_pos = (geo.num_blocks - 1) * g + torch.arange(g, device=device)
    s = q_pos[:, None] - last_block_pos  # [R, g], negative above the diagonal
    offset = s.div(g, rounding_mode="floor") + geo.diagonal_column
    share = s.remainder(g).double() / g
    column = torch.arange(geo.slash_columns, device=device)[:, None, None]
    return torch.where(column == offset, 1 - share, 0.0) + torch.where(
        column == offset + 1, share, 0.0
    )


def _logit_chunks(
    q: Tensor, k: Tensor, blocks: Tensor, geo: ProbeGeometry, scale: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (blocks [n], scaled and masked logits [n, B, H, R, g] fp64) piece by piece.

    The logits are the caller's to overwrite.
    """
    B, H, HK, R, D = geo.batch, geo.heads, geo.kv_heads, geo.rows, geo.head_dim
    g, G = geo.granularity, geo.group
    q_rows = q.double().reshape(B, HK, G * R, D)
    q_pos = geo.first_q + torch.arange(R, device=q.device)
    key_idx = torch.arange(g, device=q.device)
    step = max(1, _CHUNK_BYTES // (B * H * R * g * 8))
    for start in range(0, geo.blocks, step):
        chunk_blocks = blocks[start : start + step].long()
        n = chunk_blocks.shape[0]
        keys = k[:, :, start * g : (start + n) * g].double()
        # [B, HK, n * g, D] -> [n, B, HK, D, g]
        keys = keys.unflatten(2, (n, g)).permute(2, 0, 1, 4, 3).contiguous()
        x = q_rows.new_empty(n, B, HK, G * R, g)
        for a in range(n):
            for b in range(B):
                for h in range(HK):
                    torch.mm(q_rows[b, h], keys[a, b, h], out=x[a, b, h])
        x = x.mul_(scale).view(n, B, H, R, g)
        k_pos = chunk_blocks[:, None, None] * g + key_idx  # [n, 1, g]
        unseen = k_pos > q_pos[:, None]  # [n, R, g]
        yield chunk_blocks, x.masked_fill_(unseen[:, None, None], -torch.inf)


def _halving_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim` by adding one half to the other until one element is left.

    Unlike torch.sum, its order of additions depends on the length alone.
    """
    while (n := x.shape[dim]) > 1:
        half = n // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        if n % 2:
            folded.narrow(dim, 0, 1).add_(x.narrow(dim, n - 1, 1))
        x = folded
    return x.squeeze(dim)

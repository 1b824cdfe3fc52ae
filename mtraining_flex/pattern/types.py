"""What a head keeps: a few block diagonals (slashes) and a few key columns (verticals).

`VerticalSlash` is the compact pattern of all heads of one layer. It is found once per
layer and step (`pattern.scores`, `pattern.select`), read by every ring step of the
forward and backward (`block_mask`), and is all that is saved between the two.

Letters: B batch, H query heads, NS/NV static caps, g granularity, S global tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtraining_flex.compat import fused

# Padding behind the valid entries: larger than any position or block offset, and small
# enough that adding a sequence length to it stays inside int32.
SENTINEL = 2**30


@dataclass(frozen=True)
class VerticalSlash:
    """The sparse pattern of one layer; every index is global.

    A causal pair of one document is kept iff `q_pos // g - k_pos // g` is a slash or
    `k_pos` a vertical. B and H may be 1, which stands for every batch entry or head.
    """

    slash: Tensor  # int32 [B, H, NS] block offsets, ascending, padded with SENTINEL
    num_slash: Tensor  # int32 [B, H]
    vertical: Tensor  # int32 [B, H, NV] key positions, ascending, padded with SENTINEL
    num_vertical: Tensor  # int32 [B, H]
    documents: Tensor | None = None
    """int32 [B, S]: where the document of each position begins, the same for all heads.
    None is one document."""

    def __post_init__(self) -> None:
        for name in ("slash", "num_slash", "vertical", "num_vertical"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32:
                raise ValueError(f"{name} must be int32, got {tensor.dtype}")
        heads = self.slash.shape[:2]
        if not (heads == self.num_slash.shape == self.num_vertical.shape) or (
            heads != self.vertical.shape[:2]
        ):
            raise ValueError(
                "slash, num_slash, vertical and num_vertical must agree on [B, H]: "
                f"{tuple(self.slash.shape)}, {tuple(self.num_slash.shape)}, "
                f"{tuple(self.vertical.shape)}, {tuple(self.num_vertical.shape)}"
            )
        documents = self.documents
        if documents is not None and (
            documents.ndim != 2 or documents.dtype != torch.int32
        ):
            raise ValueError(
                f"documents must be int32 [B, S], got {documents.dtype} "
                f"{tuple(documents.shape)}"
            )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the search finds."""
        return self.slash, self.num_slash, self.vertical, self.num_vertical

    def to(self, device: torch.device | str) -> "VerticalSlash":
        documents = None if self.documents is None else self.documents.to(device)
        slash, num_slash, vertical, num_vertical = (
            t.to(device) for t in self.tensors()
        )
        return VerticalSlash(slash, num_slash, vertical, num_vertical, documents)


def pack_pattern(
    slashes: list[list[list[int]]],
    verticals: list[list[list[int]]],
    *,
    max_slash: int | None = None,
    max_vertical: int | None = None,
    documents: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> VerticalSlash:
    """Build a `VerticalSlash` from Python lists `[batch][head] -> entries`.

    Entries are sorted and made unique. The caps default to the longest list; there is
    always room for one slash.

    Raises:
        ValueError: a list is longer than its cap.
    """
    slash, num_slash = _pack(slashes, max_slash, "max_slash", least=1)
    vertical, num_vertical = _pack(verticals, max_vertical, "max_vertical", least=0)
    pattern = VerticalSlash(slash, num_slash, vertical, num_vertical, documents)
    return pattern.to(device)


def _pack(
    entries: list[list[list[int]]], cap: int | None, name: str, least: int
) -> tuple[Tensor, Tensor]:
    unique = [[sorted(set(head)) for head in batch] for batch in entries]
    longest = max((len(head) for batch in unique for head in batch), default=0)
    cap = max(longest, least) if cap is None else cap
    if longest > cap:
        raise ValueError(f"{name} ({cap}) is smaller than a head's list ({longest})")
    rows = [[head + [SENTINEL] * (cap - len(head)) for head in b] for b in unique]
    counts = [[len(head) for head in batch] for batch in unique]
    shape = (len(unique), len(unique[0]), cap)
    return (
        torch.tensor(rows, dtype=torch.int32).reshape(shape),
        torch.tensor(counts, dtype=torch.int32),
    )


def dense_pattern(
    num_blocks: int, device: torch.device | str, documents: Tensor | None = None
) -> VerticalSlash:
    """Every block offset and no vertical: causal dense attention, [1, 1] heads."""
    slash = torch.arange(num_blocks, dtype=torch.int32, device=device)
    count = torch.full((1, 1), num_blocks, dtype=torch.int32, device=device)
    empty = torch.empty(1, 1, 0, dtype=torch.int32, device=device)
    found = slash.view(1, 1, -1), count, empty, torch.zeros_like(count)
    return VerticalSlash(*found, documents=documents)


def slash_bitmap(pattern: VerticalSlash, num_blocks: int) -> Tensor:
    """Which block offsets a head keeps: bool [B, H, 2 NB], offset d at index NB + d.

    The first half stands for the future, offsets -NB to -1, and is False: a lookup
    needs no clamp.
    """

    def call(slash: Tensor) -> Tensor:
        offsets = torch.arange(num_blocks, dtype=torch.int32, device=slash.device)
        offsets = offsets.expand(*slash.shape[:2], num_blocks).contiguous()
        place = torch.searchsorted(slash, offsets).clamp(max=slash.shape[-1] - 1)
        kept = slash.gather(-1, place) == offsets  # [B, H, NB]
        return torch.cat([torch.zeros_like(kept), kept], -1)

    return fused(("slash_bitmap", num_blocks), call, pattern.slash.contiguous())

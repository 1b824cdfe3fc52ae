"""How good and how cheap a pattern is: density, executed blocks, recall.

The counts are closed forms over the pattern's two lists. With S = NB g tokens, slash d
keeps `(NB - d) g^2` pairs, or `NB g (g + 1) / 2` on the diagonal. Vertical c, in block
cb, adds only what no slash keeps:

    in its own block       g - c % g       queries, unless 0 is a slash
    in a later block qb    g               queries, unless qb - cb is a slash

and the later blocks without a slash are `NB - 1 - cb` less the slashes in
[1, NB - 1 - cb], which one `searchsorted` counts. All of it stays on the device, in
int64, with no host synchronisation and no [NB, NB] map.

With several documents, a pair counts if it is within one (`_kept_in_documents`).

Recall looks at every logit and is O(S^2): for tests, reports and short runs. (The
search gives the recall of its probe rows for free.)

Letters: B batch, H query heads, HK kv heads, G = H / HK, S tokens, NB blocks, g
granularity, NS/NV caps, C query rows of a chunk.
"""

import torch
from torch import Tensor

from mtraining_flex.pattern.documents import last_of_document
from mtraining_flex.pattern.types import SENTINEL, VerticalSlash

_CHUNK_LOGITS = 1 << 24  # logits held at a time by `recall`, over all heads


def density(pattern: VerticalSlash, seq_len: int, granularity: int) -> Tensor:
    """Kept causal pairs / causal pairs, those of one document: fp64 `[B, H]`.

    Raises:
        ValueError: `seq_len` is not a multiple of `granularity`.
    """
    kept = kept_pairs(pattern, seq_len, granularity)
    if pattern.documents is None:
        return kept.double() / (seq_len * (seq_len + 1) // 2)
    position = torch.arange(seq_len, device=kept.device)
    causal = (position - pattern.documents + 1).sum(1, keepdim=True)  # [B, 1]
    return kept.double() / causal


def kept_pairs(pattern: VerticalSlash, seq_len: int, granularity: int) -> Tensor:
    """Causal pairs in the union of slashes and verticals: int64 `[B, H]`, exact.

    With documents only pairs within one count.

    Raises:
        ValueError: `seq_len` is not a multiple of `granularity`.
    """
    if seq_len % granularity:
        raise ValueError(
            f"seq_len ({seq_len}) must be a multiple of granularity ({granularity})"
        )
    if pattern.documents is not None:
        return _kept_in_documents(pattern, pattern.documents, granularity)
    g, num_blocks = granularity, seq_len // granularity
    slash, vertical = _entries(pattern)
    pairs = torch.where(
        slash == 0, num_blocks * (g * (g + 1) // 2), (num_blocks - slash) * g * g
    )
    by_slash = torch.where(slash < num_blocks, pairs, 0).sum(-1)  # [B, H]

    has_diagonal = (slash == 0).any(-1, keepdim=True)  # [B, H, 1]
    last_offset = num_blocks - 1 - vertical // g  # [B, H, NV], negative if padding
    kept_offsets = torch.searchsorted(slash, last_offset.contiguous(), right=True)
    later = g * (last_offset - (kept_offsets - has_diagonal.long()))
    own = torch.where(has_diagonal, 0, g - vertical % g)
    by_vertical = torch.where(vertical < seq_len, own + later, 0).sum(-1)
    return by_slash + by_vertical


def _kept_in_documents(
    pattern: VerticalSlash, documents: Tensor, granularity: int
) -> Tensor:
    """`kept_pairs` where a query sees no key before `documents` of it, [B, S].

    Of a query in block qb, whose document begins in block sb: all g keys of each kept
    block in between, what the document has of block sb, and its own block up to the
    query. Of a vertical: likewise the queries up to the end of its document, where no
    slash keeps the block.
    """
    g, (batch, seq_len) = granularity, documents.shape
    num_blocks = seq_len // g
    slash, vertical = _entries(pattern)
    slash, vertical = (
        x.expand(batch, *x.shape[1:]).contiguous() for x in (slash, vertical)
    )
    heads = slash.shape[1]
    kept = _bitmap(slash, num_blocks).long()  # [B, H, NB]
    below = torch.nn.functional.pad(kept.cumsum(-1), (1, 0))  # kept offsets < d, at d

    def at(table: Tensor, offset: Tensor) -> Tensor:
        """table [B, H, n] at offsets [B, n'] or [B, H, n'], 0 for negative ones."""
        offset = offset[:, None].expand(-1, heads, -1) if offset.ndim == 2 else offset
        return table.gather(-1, offset.clamp(min=0)) * (offset >= 0)

    position = torch.arange(seq_len, device=documents.device)
    first = documents.long()
    span = position // g - first // g  # [B, S], qb - sb
    own = position - torch.maximum(first, position // g * g) + 1
    total = at(kept, span * 0) * own[:, None]
    total += at(kept, torch.where(span > 0, span, -1)) * (g - first % g)[:, None]
    between = at(below, span) - at(below, (span > 0).long())  # offsets 1 to span - 1
    by_slash = (total + g * between).sum(-1)

    real = vertical < seq_len
    column = torch.where(real, vertical, 0)
    last = last_of_document(documents).long()[:, None].expand(-1, heads, -1)
    end = last.gather(-1, column)  # [B, H, NV], last query of its document
    span = end // g - column // g
    own = (1 - at(kept, span * 0)) * (
        torch.minimum(end, (column // g + 1) * g - 1) - column + 1
    )
    at_end = torch.where(span > 0, 1 - at(kept, span), 0) * (end % g + 1)
    some = (span - 1).clamp(min=0)  # blocks in between
    kept_between = at(below, some + 1) - at(below, torch.ones_like(span))
    later = g * (some - kept_between)
    return by_slash + torch.where(real, own + at_end + later, 0).sum(-1)


def executed_blocks(pattern: VerticalSlash, num_blocks: int) -> Tensor:
    """Blocks that the slashes keep, over the whole sequence: int64 `[B, H]`."""
    slash, _ = _entries(pattern)
    return (num_blocks - slash).clamp(min=0).sum(-1)


@torch.no_grad()
def recall(
    q: Tensor,
    k: Tensor,
    pattern: VerticalSlash,
    *,
    granularity: int,
    scale: float | None = None,
) -> Tensor:
    """Share of the causal attention mass of all rows on kept pairs: fp32 `[B, H]`.

    fp64 inputs are computed in fp64, all others in fp32. At most `_CHUNK_LOGITS` logits
    (or one row of each head, if that is more) are held at a time.

    Args:
        q: `[B, H, S, D]`.
        k: `[B, HK, S, D]`.
        pattern: of B and H, either of which may be 1.
        granularity: tokens per block.
        scale: of the logits; None is `D ** -0.5`.
    """
    batch, heads, seq_len, head_dim = q.shape
    kv_heads = k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = head_dim**-0.5 if scale is None else scale
    slash, vertical = _entries(pattern)
    in_slash = _bitmap(slash, -(-seq_len // granularity))  # [B, H, NB]
    in_vertical = _bitmap(vertical, seq_len)  # [B, H, S]
    position = torch.arange(seq_len, device=q.device)
    block = position // granularity
    keys = k.to(dtype).mT  # [B, HK, D, S]
    held = torch.zeros(batch, heads, dtype=torch.float64, device=q.device)
    rows = max(_CHUNK_LOGITS // (batch * heads * seq_len), 1)
    for start in range(0, seq_len, rows):
        end = min(start + rows, seq_len)  # no row of the chunk sees a key behind it
        unseen = position[:end] > position[start:end, None]  # [C, end]
        if pattern.documents is not None:
            before = position[:end] < pattern.documents[:, start:end, None]
            unseen = (unseen | before)[:, None]  # [B, 1, C, end]
        grouped = q[:, :, start:end].to(dtype).reshape(batch, kv_heads, -1, head_dim)
        logits = (grouped @ keys[..., :end]) * scale  # [B, HK, G C, end]
        logits = logits.view(batch, heads, end - start, end)
        probs = logits.masked_fill_(unseen, -torch.inf).softmax(-1)
        offset = (block[start:end, None] - block[:end]).clamp(min=0)
        kept = in_slash[:, :, offset] | in_vertical[:, :, None, :end]
        held += (probs * kept).sum(-1).double().sum(-1)
    return (held / seq_len).float()


def _entries(pattern: VerticalSlash) -> tuple[Tensor, Tensor]:
    """Slashes and verticals in int64, SENTINEL behind the counts."""
    return (
        _cut(pattern.slash, pattern.num_slash),
        _cut(pattern.vertical, pattern.num_vertical),
    )


def _cut(entries: Tensor, count: Tensor) -> Tensor:
    place = torch.arange(entries.shape[-1], device=entries.device)
    return torch.where(place < count[..., None], entries, SENTINEL).long()


def _bitmap(entries: Tensor, size: int) -> Tensor:
    """Which of 0 .. size - 1 a head keeps: bool `[B, H, size]`."""
    bitmap = torch.zeros(
        *entries.shape[:2], size + 1, dtype=torch.bool, device=entries.device
    )
    # The last place takes the padding, and is dropped.
    return bitmap.scatter_(-1, entries.clamp(max=size), True)[..., :size]

"""The oracle of the whole method: slow, obvious, one process.

It finds a pattern (`reference_pattern`), says which pairs that pattern keeps
(`allowed_pairs`) and attends to exactly those (`reference_attention`). Every fast path
from the probe to the gradients is tested against this module, so it shares no code with
them: it holds full [S, S] maps, loops over entries in Python and leaves the backward to
autograd.

Letters: B batch, H query heads, HK kv heads, S tokens, D head dim, g granularity, NB
blocks of g tokens, R probe rows, NS/NV caps on slashes and verticals.
"""

import math
from collections import Counter
from fractions import Fraction

import torch
from torch import Tensor

from mtraining_flex.config import SparseAttention
from mtraining_flex.pattern.types import VerticalSlash, dense_pattern, pack_pattern


def allowed_pairs(pattern: VerticalSlash, seq_len: int, granularity: int) -> Tensor:
    """Which (query, key) pairs a pattern keeps: bool `[B, H, S, S]`.

    A pair is kept iff `k <= q`, both are of one document, and (`q // g - k // g` is a
    slash or `k` a vertical). B and H are the pattern's, which may be 1; B is that of
    the documents, if there are any. Entries behind the counts are not read.
    """
    slash, num_slash, vertical, num_vertical = (t.cpu() for t in pattern.tensors())
    batch, heads = num_slash.shape
    positions = torch.arange(seq_len)
    blocks = positions // granularity
    offset = blocks[:, None] - blocks  # [S, S]
    kept = torch.zeros(batch, heads, seq_len, seq_len, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for d in slash[b, h, : num_slash[b, h]].tolist():
                kept[b, h] |= offset == d
            for c in vertical[b, h, : num_vertical[b, h]].tolist():
                kept[b, h, :, c] = True
    kept &= positions <= positions[:, None]
    if pattern.documents is not None:
        start = pattern.documents.cpu()
        kept = kept & (start[:, :, None] == start[:, None])[:, None]
    return kept.to(pattern.slash.device)


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: VerticalSlash,
    granularity: int,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the kept pairs, differentiable by autograd.

    fp64 inputs are computed in fp64, all others in fp32. The results stay in that
    dtype: an oracle does not round to bf16.

    Args:
        q: `[B, H, S, D]`.
        k: `[B, HK, S, D]`; query head h reads kv head `h // (H / HK)`.
        v: `[B, HK, S, D]`.
        pattern: of B and H, either of which may be 1.
        granularity: tokens per block.
        scale: of the logits; None is `D ** -0.5`.

    Returns:
        out `[B, H, S, D]`, and lse `[B, H, S]` in natural log. A row with no key has
        out 0, lse -inf, and sends no gradient.
    """
    q, k, v = _expand_heads(q, k, v)
    logits = (q @ k.mT) * _scale(q, scale)  # [B, H, S, S]
    allowed = allowed_pairs(pattern, q.shape[2], granularity)
    logits = logits.masked_fill(~allowed, -torch.inf)
    # A row of -inf alone has no softmax: replace it before, and its results after.
    has_key = allowed.any(-1)  # [B, H, S]
    logits = torch.where(has_key[..., None], logits, 0.0)
    probs = torch.where(has_key[..., None], logits.softmax(-1), 0.0)
    lse = torch.where(has_key, logits.logsumexp(-1), -torch.inf)
    return probs @ v, lse


def reference_pattern(
    q: Tensor,
    k: Tensor,
    config: SparseAttention,
    scale: float | None = None,
    documents: Tensor | None = None,
) -> VerticalSlash:
    """The pattern search, for all heads of one layer.

    The probe rows attend to every key in fp64: the last R queries or, with documents,
    some of the last of each long one (`probe_positions`). A key scores the mass it
    gets; a block offset scores the mass of the pairs in it, where a pair at token
    distance s counts for `1 - (s % g) / g` in offset `s // g` and for the rest in the
    next one.
    Entries are taken by rank (`_rank`) as far as the budget goes (`_prefix`).

    Args:
        q: `[B, H, S, D]`, S a multiple of `config.granularity`.
        k: `[B, HK, S, D]`.
        config: the section; `budget_file` is not read.
        scale: of the logits; None is `D ** -0.5`.
        documents: int32 `[B, S]`, where the document of each position begins.

    Returns:
        Lists of static width `min(max_slash, NB)` and `min(max_vertical, S)`.
    """
    seq_len, g = q.shape[2], config.granularity
    assert seq_len % g == 0, (seq_len, g)
    if config.pattern == "dense":
        return dense_pattern(seq_len // g, q.device, documents)
    if documents is None:
        rows = [list(range(seq_len - config.probe_rows, seq_len))] * q.shape[0]
        start = torch.zeros(q.shape[0], seq_len, dtype=torch.int64)
    else:
        start = documents.long().cpu()
        rows = [probe_positions(each.tolist(), config.probe_rows) for each in start]
    sinks = [_sinks(start[b].tolist(), rows[b], config.sink) for b in range(len(rows))]
    probs = _probe_probs(q, k, rows, start, scale)  # [B, H, R, S]
    top_k = config.budget == "top_k"
    cap_vertical = min(config.max_vertical, seq_len)
    cap_slash = min(config.max_slash, seq_len // g)
    verticals = _select(
        probs.sum(2),
        forced=sinks,
        limit=config.num_vertical if top_k else None,
        mass=config.vertical_p * config.probe_rows if config.vertical_p < 1 else None,
        cap=cap_vertical,
    )
    slashes = _select(
        _offset_scores(probs, rows, g),
        forced=[set(range(config.local_window))] * len(rows),
        limit=config.num_slash if top_k else None,
        mass=config.slash_p * config.probe_rows if config.slash_p < 1 else None,
        cap=cap_slash,
    )
    return pack_pattern(
        slashes,
        verticals,
        max_slash=cap_slash,
        max_vertical=cap_vertical,
        documents=documents,
        device=q.device,
    )


def probe_positions(start: list[int], probe_rows: int) -> list[int]:
    """Probe rows of a sequence of several documents, from the start of each position's.

    The R rows are P = gcd(R, 8) groups. One after the other goes to the document with
    the most tokens for each group it then has; of equals, the first. A document's
    groups lie side by side at its end, the last group last, and none begins before the
    document; where it has fewer rows than a group, its last one is taken again.
    """
    groups = math.gcd(probe_rows, 8)
    size = probe_rows // groups
    length = Counter(start)
    given: Counter[int] = Counter()
    chosen = []
    for _ in range(groups):
        best = max(length, key=lambda d: (Fraction(length[d], given[d] + 1), -d))
        given[best] += 1
        chosen.append((best, given[best]))
    rows = []
    for first, number in chosen:
        end = first + length[first]
        begin = max(end - number * size, first)
        rows += [min(begin + i, end - 1) for i in range(size)]
    return rows


def _sinks(start: list[int], rows: list[int], sink: int) -> set[int]:
    """The first tokens of each document that has probe rows."""
    return {
        first + i
        for first in {start[r] for r in rows}
        for i in range(sink)
        if first + i < len(start) and start[first + i] == first
    }


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _expand_heads(q: Tensor, *kv: Tensor) -> list[Tensor]:
    """In the dtype of the computation, with one kv head for each query head."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads, kv_heads = q.shape[1], kv[0].shape[1]
    assert heads % kv_heads == 0, (heads, kv_heads)
    repeats = heads // kv_heads
    return [q.to(dtype), *(x.to(dtype).repeat_interleave(repeats, 1) for x in kv)]


def _probe_probs(
    q: Tensor, k: Tensor, rows: list[list[int]], start: Tensor, scale: float | None
) -> Tensor:
    """Attention of some rows to every key of their documents: fp64 `[B, H, R, S]`."""
    seq_len = q.shape[2]
    assert len(rows[0]) <= seq_len, (len(rows[0]), seq_len)
    q = torch.stack([q[b, :, rows[b]] for b in range(len(rows))])
    q, k = _expand_heads(q.double(), k.double())
    k_pos = torch.arange(seq_len)
    q_pos = torch.tensor(rows)  # [B, R]
    first = start.gather(1, q_pos)
    unseen = (k_pos > q_pos[..., None]) | (k_pos < first[..., None])  # [B, R, S]
    logits = (q @ k.mT) * _scale(q, scale)
    return logits.masked_fill(unseen[:, None].to(q.device), -torch.inf).softmax(-1)


def _offset_scores(probs: Tensor, rows: list[list[int]], granularity: int) -> Tensor:
    """Mass of each block offset: fp64 `[B, H, NB]`."""
    num_blocks = probs.shape[3] // granularity
    scores = probs.new_zeros(*probs.shape[:2], num_blocks)
    q_pos = torch.tensor(rows, device=probs.device)  # [B, R]
    for distance in range(probs.shape[3]):
        # The pairs (q_pos, q_pos - distance) of the probe rows that have such a key.
        key = (q_pos - distance)[:, None, :, None].expand(*probs.shape[:3], 1)
        pairs = probs.gather(-1, key.clamp(min=0)).masked_fill(key < 0, 0.0)
        diagonal = pairs.sum((2, 3))  # [B, H]
        share = (distance % granularity) / granularity
        near = distance // granularity
        scores[:, :, near] += (1 - share) * diagonal
        scores[:, :, min(near + 1, num_blocks - 1)] += share * diagonal
    return scores


def _select(
    scores: Tensor,
    *,
    forced: list[set[int]],
    limit: int | None,
    mass: float | None,
    cap: int,
) -> list[list[list[int]]]:
    """Entries of each batch entry and head, from fp64 scores `[B, H, n]`.

    Args:
        forced: indices that are taken first, of each batch entry.
    """
    rounded = scores.float().tolist()
    return [
        [
            _prefix(row, _rank(row, first), len(first), limit, mass, cap)
            for row in head_rows
        ]
        for head_rows, first in zip(rounded, forced, strict=True)
    ]


def _rank(scores: list[float], forced: set[int]) -> list[int]:
    """Forced entries first, then the higher score, then the lower index."""
    return sorted(range(len(scores)), key=lambda i: (i not in forced, -scores[i], i))


def _prefix(
    scores: list[float],
    ranked: list[int],
    forced: int,
    limit: int | None,
    mass: float | None,
    cap: int,
) -> list[int]:
    """The best entries that the budget allows.

    Args:
        limit: number to keep (top_k); None for top_p.
        mass: top_p: what the entries must hold together; None for all there is.
        cap: number never exceeded.
    """
    if limit is not None:
        return ranked[: min(limit, cap)]
    if mass is None:
        return ranked[:cap]
    held, count = 0.0, 0
    for entry in ranked:
        if held >= mass and count >= forced:
            break
        held += scores[entry]
        count += 1
    return ranked[: min(count, cap)]

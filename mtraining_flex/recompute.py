"""Attention of a few rows and a few keys, dense and in fp64, for the sentinel.

What it says follows from the definition of a pattern and of a layout alone. It shares
no code with what it judges: not the masks, not the ring, not the kernels. Unlike
`reference`, it takes one head and a slice of it, and holds no [S, S] map: at most
`_ROWS` x S logits, and `_KEYS` keys in fp64.

Letters: R rows, T keys of the slice, S tokens, D head dim, g granularity, NB blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mtraining_flex.layout import Layout
from mtraining_flex.pattern.types import VerticalSlash

_ROWS = 16  # logits of this many rows at a time
_KEYS = 2**16  # keys in fp64 at a time
_WIDE = torch.float64


def positions(
    layout: Layout, cp_rank: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Global position of each local token, by the layout's definition: int64 [S / W].

    Raises:
        ValueError: a layout that this module does not know.
    """
    ranks, count = layout.cp_size, layout.seq_len // layout.granularity
    n = count // ranks
    match layout.name:
        case "striped":
            blocks = [cp_rank + i * ranks for i in range(n)]
        case "contiguous":
            blocks = [cp_rank * n + i for i in range(n)]
        case "zigzag":
            half, mirrored = n // 2, 2 * ranks - 1 - cp_rank
            blocks = [cp_rank * half + i for i in range(half)]
            blocks += [mirrored * half + i for i in range(half)]
        case other:
            raise ValueError(f"no definition of the layout '{other}'")
    g = layout.granularity
    first = torch.tensor(blocks, device=device) * g
    return (first[:, None] + torch.arange(g, device=device)).flatten()


@dataclass(frozen=True)
class Head:
    """What one head keeps, as two maps."""

    slash: Tensor  # bool [NB], by block offset
    vertical: Tensor  # bool [S], by position
    granularity: int
    documents: Tensor | None = None  # int32 [S], where the document begins

    @classmethod
    def of(
        cls, pattern: VerticalSlash, layout: Layout, batch: int, head: int
    ) -> "Head":
        heads = pattern.slash.shape[:2]
        b, h = min(batch, heads[0] - 1), min(head, heads[1] - 1)  # one stands for all
        return cls(
            _marked(pattern.slash[b, h], pattern.num_slash[b, h], layout.num_blocks),
            _marked(pattern.vertical[b, h], pattern.num_vertical[b, h], layout.seq_len),
            layout.granularity,
            None if pattern.documents is None else pattern.documents[batch],
        )

    def keeps(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Which pairs: bool [R, T] of positions [R] and [T]."""
        causal = k_pos <= q_pos[:, None]
        if self.documents is not None:
            causal &= self.documents[q_pos][:, None] == self.documents[k_pos]
        offset = q_pos[:, None] // self.granularity - k_pos // self.granularity
        in_slash = self.slash[offset.clamp(min=0)]
        return causal & (in_slash | self.vertical[k_pos])


def _marked(entries: Tensor, count: Tensor, size: int) -> Tensor:
    """The first `count` entries as a map of `size`; what lies outside is ignored."""
    valid = torch.arange(entries.numel(), device=entries.device) < count
    valid &= (entries >= 0) & (entries < size)
    marked = torch.zeros(size + 1, dtype=torch.bool, device=entries.device)
    marked[torch.where(valid, entries, size).long()] = True
    marked[size] = False
    return marked[:size]


@dataclass(frozen=True)
class Sequence:
    """Two tensors of one head over the whole sequence, in the order of the ranks."""

    first: Tensor  # [S, D]
    second: Tensor  # [S, D]
    pos: Tensor  # int64 [S]


@dataclass(frozen=True)
class Result:
    """A recomputed tensor, and the square of the size its rounding is measured by.

    A sum of terms t may be far smaller than they: its rounding error is that of
    `sqrt(sum t^2)`, if their signs are random. So `size2` is |value|^2 + sum t^2.
    """

    value: Tensor
    size2: Tensor

    @classmethod
    def zero(cls, like: Tensor) -> "Result":
        return cls(torch.zeros_like(like.double()), like.new_zeros((), dtype=_WIDE))

    def __add__(self, other: "Result") -> "Result":
        return Result(self.value + other.value, self.size2 + other.size2)


def attend(
    q: Tensor, q_pos: Tensor, kv: Sequence, head: Head, scale: float
) -> tuple[Result, Tensor]:
    """out [R, D] and natural lse [R] of rows q [R, D]."""
    norms = _squares(kv.second)
    outs, lses, size2 = [], [], q.new_zeros((), dtype=_WIDE)
    for rows in _slices(q.shape[0], _ROWS):
        probs, lse = _probs(q[rows], q_pos[rows], kv, head, scale)
        outs.append(_product(probs, kv.second))
        lses.append(lse)
        size2 += (probs.square() @ norms).sum()
    out = torch.cat(outs)
    return Result(out, size2 + out.square().sum()), torch.cat(lses)


def attend_backward_rows(
    q: Tensor,
    q_pos: Tensor,
    dout: Tensor,
    out: Tensor,
    kv: Sequence,
    head: Head,
    scale: float,
) -> Result:
    """dq [R, D]; out [R, D] is the forward's, rounded as the backward found it."""
    norms = _squares(kv.first)
    grads, size2 = [], q.new_zeros((), dtype=_WIDE)
    for rows in _slices(q.shape[0], _ROWS):
        probs, _ = _probs(q[rows], q_pos[rows], kv, head, scale)
        delta = (dout[rows].double() * out[rows].double()).sum(-1, keepdim=True)
        dprobs = _scores(dout[rows].double(), kv.second)
        grads.append(_product(probs * (dprobs - delta), kv.first) * scale)
        terms = probs.square() * (dprobs.square() + delta.square())
        size2 += (terms @ norms).sum() * scale**2
    grad = torch.cat(grads)
    return Result(grad, size2 + grad.square().sum())


def attend_backward_keys(
    k: Tensor,
    v: Tensor,
    k_pos: Tensor,
    rows: Sequence,
    lse: Tensor,
    delta: Tensor,
    head: Head,
    scale: float,
) -> tuple[Result, Result]:
    """What one query head adds to dk and dv [T, D] of keys k and values v [T, D].

    Args:
        rows: q and dout of all queries.
        lse: of all queries, [S] in the order of `rows`.
        delta: sum of out * dout of each query, [S].
    """
    k, v = k.double(), v.double()
    lse = torch.where(lse == -torch.inf, torch.inf, lse.double())  # such a row is 0
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dk2, dv2 = (k.new_zeros(()) for _ in range(2))
    for some in _slices(rows.pos.numel(), _KEYS):
        q, dout = rows.first[some].double(), rows.second[some].double()
        for keys in _slices(k.shape[0], _ROWS):
            kept = head.keeps(rows.pos[some], k_pos[keys]).mT  # [T, S]
            logits = (k[keys] @ q.mT) * scale
            probs = (logits - lse[some]).exp().masked_fill(~kept, 0.0)
            dprobs = v[keys] @ dout.mT
            here = delta[some].double()
            dv[keys] += probs @ dout
            dk[keys] += (probs * (dprobs - here)) @ q * scale
            terms = probs.square() * (dprobs.square() + here.square())
            dk2 += (terms @ q.square().sum(-1)).sum() * scale**2
            dv2 += (probs.square() @ dout.square().sum(-1)).sum()
    return Result(dk, dk2 + dk.square().sum()), Result(dv, dv2 + dv.square().sum())


def expected_blocks(
    pattern: VerticalSlash,
    layout: Layout,
    cp_rank: int,
    sources: list[int],
    heads: tuple[int, int],
) -> Tensor:
    """Blocks that a rank must execute at each step: int64 [W + 1].

    A slash d asks query block a for key block a - d, at the step in which its owner's
    keys are here, unless that block ends before the document of a's first query. The
    last number is the vertical step: query block a walks the columns
    before its end, in blocks of g.

    Args:
        sources: rank whose keys are here at each step.
        heads: (B, H) of the call; a pattern of one head or entry stands for all.
    """
    g, device = layout.granularity, pattern.slash.device
    owner = torch.empty(layout.num_blocks, dtype=torch.int64, device=device)
    for rank in range(layout.cp_size):
        owner[positions(layout, rank, device)[::g] // g] = rank
    rows = positions(layout, cp_rank, device)[::g] // g  # [N]
    by_source = torch.zeros(layout.cp_size + 1, dtype=torch.int64, device=device)
    columns = torch.zeros((), dtype=torch.int64, device=device)
    documents, shared = pattern.documents, pattern.slash.shape[0] == 1
    batch = pattern.slash.shape[0] if documents is None else documents.shape[0]
    for b in range(batch):
        for h in range(pattern.slash.shape[1]):
            head = Head.of(pattern, layout, b, h)
            offsets = pattern.slash[0 if shared else b, h].long()
            place = torch.arange(offsets.numel(), device=device)
            keys = rows - offsets[:, None]  # [NS, N]
            num_slash = pattern.num_slash[0 if shared else b, h]
            real = (place < num_slash)[:, None] & (keys >= 0)
            if head.documents is not None:
                end = (keys.clamp(min=0) + 1) * g - 1
                real &= head.documents[end] >= head.documents[rows * g]
            source = torch.where(real, owner[keys.clamp(min=0)], layout.cp_size)
            by_source += torch.bincount(source.flatten(), minlength=layout.cp_size + 1)
            before = head.vertical.long().cumsum(0)[(rows + 1) * g - 1]
            columns += ((before + g - 1) // g).sum()
    result = torch.cat([by_source[torch.tensor(sources, device=device)], columns[None]])
    return result * (heads[0] * heads[1] // (batch * pattern.slash.shape[1]))


def _probs(
    q: Tensor, q_pos: Tensor, kv: Sequence, head: Head, scale: float
) -> tuple[Tensor, Tensor]:
    """Probabilities [R, S] and lse [R] of a few rows."""
    logits = _scores(q.double(), kv.first) * scale
    logits.masked_fill_(~head.keeps(q_pos, kv.pos), -torch.inf)
    lse = logits.logsumexp(-1)
    # A row without a key: every probability is exp(-inf).
    top = torch.where(lse == -torch.inf, 0.0, lse)
    return (logits - top[:, None]).exp(), lse


def _scores(rows: Tensor, keys: Tensor) -> Tensor:
    """rows [R, D] times keys [S, D]: fp64 [R, S]."""
    return torch.cat([rows @ part.double().mT for part in keys.split(_KEYS)], -1)


def _product(weights: Tensor, values: Tensor) -> Tensor:
    """weights [R, S] times values [S, D]: fp64 [R, D]."""
    total = weights.new_zeros(weights.shape[0], values.shape[-1])
    for some in _slices(values.shape[0], _KEYS):
        total += weights[:, some] @ values[some].double()
    return total


def _squares(x: Tensor) -> Tensor:
    """Squared length of each row: fp64 [S]."""
    return torch.cat([part.double().square().sum(-1) for part in x.split(_KEYS)])


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(i, min(i + step, size)) for i in range(0, size, step))

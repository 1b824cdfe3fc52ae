"""Draw why the work is balanced: the README's figure, an SVG.

    python -m recipes.plot_patterns --output recipes/results/patterns.svg

Three parts: what a head keeps; which rank owns which block of it under each layout; how
long a ring takes, from the blocks that each rank executes at each step. The blocks are
counted on the masks that the ring runs (`block_mask`), in its order (`ring.schedule`),
and summed up as the metrics are (`counters.imbalance`). The same arguments give the
same bytes. Colours follow the reader's light or dark theme.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mtraining_flex.block_mask import StepMask, slash_step, vertical_step
from mtraining_flex.counters import imbalance
from mtraining_flex.layout import Layout, build_layout
from mtraining_flex.pattern import VerticalSlash, pack_pattern
from mtraining_flex.pattern.types import slash_bitmap
from mtraining_flex.ring.schedule import sources
from mtraining_flex.ring.step import EagerStep

RANKS = 4
LAYOUTS = {
    "striped": "every fourth block",
    "zigzag": "two pieces each",
    "contiguous": "one piece each",
}
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")  # one a rank
ON_COLOURS = ("#ffffff", "#1f2328", "#ffffff", "#1f2328")  # text on them
STYLE = """
.card{fill:#fff;stroke:#d1d9e0}.text{fill:#1f2328}.note{fill:#59636e}
.kept{fill:#6e7781}.box{fill:#f6f8fa}.wait{fill:#dfe4ea}.rule{stroke:#818b98}
.ideal{stroke:#1f2328;stroke-dasharray:3 3}
@media (prefers-color-scheme:dark){
.card{fill:#0d1117;stroke:#3d444d}.text{fill:#f0f6fc}.note{fill:#9198a1}
.kept{fill:#9198a1}.box{fill:#151b23}.wait{fill:#2a313c}.rule{stroke:#656c76}
.ideal{stroke:#f0f6fc}}
"""

OWNERS_NOTE = (
    "A rank computes the blocks of its own queries (left edge) and needs the keys of "
    "all ranks (top edge)."
)
RING_NOTES = (
    "At step s, rank r has the keys of rank r - s. A bar is a rank's work in a step, "
    "in blocks; grey is waiting",
    "for the slowest rank. Dashed: the end, if the same work were spread evenly.",
)

# Pixels.
WIDTH, MARGIN = 900, 20
CELL = 3  # of a block
STRIP = 5  # owners along an edge
LABELS = 26  # left of the first matrix
ROW, BAR = 15, 13  # of a rank's line, and the bar in it
LEFT = 124  # where bars begin
TIME = 530  # of the longest ring
RIGHT = LEFT + TIME + 56, LEFT + TIME + 174  # middles of the two imbalances


@dataclass(frozen=True)
class Scene:
    """One head on a ring, small enough to be seen."""

    slashes: tuple[int, ...] = (0, 1, 2, 16, 17, 18, 19, 36, 37, 52)  # block offsets
    verticals: tuple[int, ...] = (0, 1, 2, 3, 1100, 3500)  # token positions
    blocks: int = 64
    granularity: int = 128

    @cached_property
    def pattern(self) -> VerticalSlash:
        return pack_pattern([[list(self.slashes)]], [[list(self.verticals)]])

    def layout(self, name: str) -> Layout:
        g = self.granularity
        return build_layout(name, self.blocks * g, RANKS, g)

    def kept(self) -> Tensor:
        """Blocks of the matrix that a slash keeps: bool [NB queries, NB keys]."""
        bitmap = slash_bitmap(self.pattern, self.blocks)[0, 0]
        block = torch.arange(self.blocks)
        return bitmap[self.blocks + block[:, None] - block]

    def owners(self, layout: Layout) -> list[int]:
        """Rank of each global block."""
        owner = torch.empty(self.blocks, dtype=torch.int64)
        for rank in range(RANKS):
            owner[layout.blocks(rank)] = rank
        return owner.tolist()

    def work(self, layout: Layout) -> Tensor:
        """Executed blocks of each rank in each step, columns last: int64 [W, W + 1]."""
        W, pattern = layout.cp_size, self.pattern
        bitmap = slash_bitmap(pattern, layout.num_blocks)
        work = torch.zeros(W, W + 1, dtype=torch.int64)
        for rank in range(W):
            for step, source in enumerate(sources("ring", rank, W)):
                if not layout.is_causally_empty(rank, source):
                    mask = slash_step(pattern, bitmap, layout, rank, source, (1, 1))
                    work[rank, step] = _executed(mask)
            columns = vertical_step(pattern, bitmap, layout, rank, (1, 1))
            work[rank, -1] = _executed(columns)
        return work


def _executed(mask: StepMask) -> Tensor:
    return EagerStep().executed(mask).sum()


def draw(scene: Scene) -> str:
    """The figure."""
    matrices, below = _matrices(scene)
    timelines, height = _timelines(scene, below + 40)
    return "\n".join([_open(height), *matrices, *timelines, "</svg>"]) + "\n"


def _matrices(scene: Scene) -> tuple[list[str], int]:
    """Parts 1 and 2 of the figure, and where they end."""
    top, side = 64, scene.blocks * CELL
    first = MARGIN + LABELS
    step = (WIDTH - MARGIN - side - first) / len(LAYOUTS)
    x = [round(first + i * step) for i in range(1 + len(LAYOUTS))]
    parts = [
        *_heading(MARGIN, 28, 1, "What one head keeps"),
        *_pattern(x[0], top, scene),
        *_heading(x[1] - STRIP - 1, 28, 2, "Who owns which block"),
        *_ranks(WIDTH - MARGIN - 66 * RANKS, 28),
    ]
    for at, (name, how) in zip(x[1:], LAYOUTS.items(), strict=True):
        parts += _owned(at, top, scene, name, how)
    below = top + side + 17
    size = f"{scene.blocks} x {scene.blocks} blocks of {scene.granularity} tokens"
    parts.append(_text(x[0], below, size, "note small"))
    parts.append(_text(x[1], below, OWNERS_NOTE, "note small"))
    return parts, below


def _timelines(scene: Scene, y: float) -> tuple[list[str], float]:
    """Part 3 of the figure from `y` on, and where it ends."""
    parts = _heading(MARGIN, y, 3, "How long the ring takes")
    for line, note in enumerate(RING_NOTES):
        parts.append(_text(MARGIN, y + 19 + 15 * line, note, "note small"))
    parts += _columns(y + 19)
    work = {name: scene.work(scene.layout(name)) for name in LAYOUTS}
    scale = TIME / max(int(each.max(0).values.sum()) for each in work.values())
    y += 64
    for name, each in work.items():
        parts += _timeline(y, name, each, scale)
        y += RANKS * ROW + 12
        if name == "striped":
            parts += _reasons(y, scene, each, scale)
            y += 14
        y += 18
    return parts, y - 4


def _open(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui,-apple-system,'
        'Segoe UI,Helvetica,Arial,sans-serif" font-size="12" role="img">\n'
        "<title>A pattern, its owners under three layouts, and the work per rank and "
        f"step</title>\n<style>{STYLE}"
        ".head,.number{font-size:15px;font-weight:600}.strong{font-weight:600}"
        ".small{font-size:10.5px}.mid{text-anchor:middle}.end{text-anchor:end}"
        "</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" '
        f'height="{height - 1}" rx="8"/>'
    )


def _text(x: float, y: float, text: str, kind: str = "", fill: str = "") -> str:
    """`kind`: classes of STYLE; `fill`: a colour instead of the theme's."""
    themed = not fill and "note" not in kind.split()
    classes = " ".join(["text"] * themed + kind.split())
    look = f' class="{classes}"' * bool(classes) + f' fill="{fill}"' * bool(fill)
    return f'<text{look} x="{x:g}" y="{y:g}">{text}</text>'


def _rect(
    x: float, y: float, width: float, height: float, kind: str = "", fill: str = ""
) -> str:
    look = f'fill="{fill}"' if fill else f'class="{kind}"'
    return f'<rect {look} x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def _heading(x: float, y: float, number: int, text: str) -> list[str]:
    return [_text(x, y, str(number), "head"), _text(x + 18, y, text, "head")]


def _ranks(x: float, y: float) -> list[str]:
    """The colours of the ranks."""
    parts = []
    for rank in range(RANKS):
        at = x + 66 * rank
        parts.append(_rect(at, y - 10, 12, 12, fill=COLOURS[rank]))
        parts.append(_text(at + 17, y, f"rank {rank}"))
    return parts


# --- 1 and 2: matrices of blocks ------------------------------------------------------


def _pattern(x: float, y: float, scene: Scene) -> list[str]:
    """Queries downward, keys to the right; above the diagonal is the future."""
    side = scene.blocks * CELL
    right = x + side - 6
    column = max(scene.verticals) * CELL / scene.granularity
    parts = [
        _text(x, y - 7, "keys", "note small"),
        f'<text class="note small" transform="translate({MARGIN + 4:g} {y + 100:g}) '
        'rotate(-90)">queries</text>',
        _rect(x, y, side, side, "box"),
        f'<path class="kept" d="{_kept_path(x, y, scene, range(scene.blocks))}"/>',
        _text(right, y + 18, "diagonals of blocks", "end small"),
        _text(right, y + 31, "(slashes)", "end small"),
        _line("rule", x + 63, y + 21, x + 35, y + 28),
        _text(right, y + 62, "single keys", "end small"),
        _text(right, y + 75, "(verticals)", "end small"),
        _line("rule", x + 118, y + 68, x + column + 2, y + 92),
    ]
    for first, _ in _runs(scene.slashes):
        label = y + first * CELL + 7
        parts.append(_text(x - 4, label, str(first), "end note small"))
    return parts


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def _owned(x: float, y: float, scene: Scene, name: str, how: str) -> list[str]:
    """The same pattern, each block in the colour of the rank that computes it."""
    side, layout = scene.blocks * CELL, scene.layout(name)
    owner = scene.owners(layout)
    parts = [
        _text(x, y - STRIP - 7, f'<tspan class="strong">{name}</tspan>: {how}'),
        _rect(x, y, side, side, "box"),
    ]
    for rank in range(RANKS):
        mine = [block for block in range(scene.blocks) if owner[block] == rank]
        path = _kept_path(x, y, scene, mine) + _strips(x, y, mine)
        parts.append(f'<path fill="{COLOURS[rank]}" d="{path}"/>')
    return parts


def _kept_path(x: float, y: float, scene: Scene, rows: Sequence[int]) -> str:
    """Kept blocks, and verticals as lines, of some query blocks."""
    kept, parts = scene.kept().tolist(), []
    for row in rows:
        for first, last in _runs([i for i, keep in enumerate(kept[row]) if keep]):
            width = (last + 1 - first) * CELL
            parts.append(_box(x + first * CELL, y + row * CELL, width, CELL))
    per_token = CELL / scene.granularity
    at = {round(v * per_token): v // scene.granularity for v in scene.verticals}
    for line, block in at.items():
        for first, last in _runs([row for row in rows if row >= block]):
            height = (last + 1 - first) * CELL
            parts.append(_box(x + line, y + first * CELL, 1, height))
    return "".join(parts)


def _strips(x: float, y: float, blocks: Sequence[int]) -> str:
    """Owners along the edges: of queries on the left, of keys on the top."""
    parts = []
    for first, last in _runs(blocks):
        at, length = first * CELL, (last + 1 - first) * CELL
        parts.append(_box(x - STRIP - 1, y + at, STRIP, length))
        parts.append(_box(x + at, y - STRIP - 1, length, STRIP))
    return "".join(parts)


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:g} {y:g}h{width:g}v{height:g}h-{width:g}z"


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    first = None
    for i, number in enumerate(numbers):
        first = number if first is None else first
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            yield first, number
            first = None


# --- 3: the ring in time --------------------------------------------------------------


def _columns(y: float) -> list[str]:
    """What the two numbers at the right are."""
    names = (
        ("worker imbalance", "busiest rank / mean"),
        ("step imbalance", "duration / mean"),
    )
    parts = []
    for x, (name, meaning) in zip(RIGHT, names, strict=True):
        parts.append(_text(x, y, name, "mid strong"))
        parts.append(_text(x, y + 15, meaning, "mid note small"))
    return parts


def _timeline(y: float, name: str, work: Tensor, scale: float) -> list[str]:
    """A bar per rank and step, as long as its blocks; what it then waits is grey."""
    parts = [
        _text(MARGIN, y + 2 * ROW + 3, name, "strong"),
        _text(LEFT - 6, y - 4, "rank", "end note small"),
    ]
    for rank in range(RANKS):
        parts.append(_text(LEFT - 6, y + rank * ROW + 11, str(rank), "end note small"))
    x = float(LEFT)
    for number, column in enumerate(work.T.tolist()):
        label = "columns" if number == RANKS else f"step {number}"
        width = max(column) * scale
        parts.append(_text(round(x + width / 2, 1), y - 4, label, "mid note small"))
        for rank, blocks in enumerate(column):
            parts += _bar(x, y + rank * ROW, blocks, max(column), scale, rank)
        x += width
    ideal = round(LEFT + work.sum().item() / RANKS * scale, 1)
    parts.append(_line("ideal", ideal, y - 2, ideal, y + ROW * RANKS + 2))
    for at, degree in zip(RIGHT, imbalance(work.double()), strict=True):
        parts.append(_text(at, y + 2 * ROW + 5, f"{degree:.2f}", "mid number"))
    return parts


def _bar(
    x: float, y: float, blocks: int, longest: int, scale: float, rank: int
) -> list[str]:
    gap = 1.5
    x = round(x, 1)
    parts = [_rect(x, y, round(longest * scale - gap, 1), BAR, "wait")]
    if blocks:
        width = round(blocks * scale - gap, 1)
        at = round(x + width / 2, 1)
        parts.append(_rect(x, y, width, BAR, fill=COLOURS[rank]))
        parts.append(_text(at, y + 10, str(blocks), "mid small", ON_COLOURS[rank]))
    return parts


def _reasons(y: float, scene: Scene, work: Tensor, scale: float) -> list[str]:
    """Under each striped step, the diagonals that all ranks compute in it."""
    x, parts = float(LEFT), [_text(LEFT - 6, y, "diagonals", "end small")]
    widths = (work.max(0).values * scale).tolist()
    for step, width in enumerate(widths[:-1]):
        here = ", ".join(str(d) for d in scene.slashes if d % RANKS == step)
        parts.append(_text(round(x + width / 2, 1), y, here, "mid small"))
        x += width
    reason = f"a diagonal d joins ranks r and p only if d = r - p (mod {RANKS})"
    parts.append(_text(round(x + widths[-1] + 12, 1), y, reason, "note small"))
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", default="recipes/results/patterns.svg")
    args = parser.parse_args(argv)
    with open(args.output, "w") as file:
        file.write(draw(Scene()))


if __name__ == "__main__":
    main()

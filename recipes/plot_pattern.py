"""Draw what one head keeps and which rank computes it: the README's figure, an SVG.

python -m recipes.plot_pattern --output recipes/results/pattern.svg
"""

import argparse

from mtraining_flex.layout import build_layout
from mtraining_flex.pattern import pack_pattern
from mtraining_flex.reference import allowed_pairs

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")  # one a rank
CELL = 7  # pixels per token


def draw(slashes: list[int], verticals: list[int], blocks: int, ranks: int) -> str:
    """An SVG of the kept pairs of one head, one small square each."""
    g = 4  # tokens per block, to be seen
    seq_len = blocks * g
    pattern = pack_pattern([[slashes]], [[verticals]])
    kept = allowed_pairs(pattern, seq_len, g)[0, 0]
    layout = build_layout("striped", seq_len, ranks, g)
    owner = {int(p): r for r in range(ranks) for p in layout.positions(r)}
    size = seq_len * CELL
    margin, legend = 24, 130
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size + margin + legend}" '
        f'height="{size + 2 * margin}" font-family="sans-serif" font-size="12">',
        f'<rect x="{margin}" y="{margin}" width="{size}" height="{size}" fill="#fff" '
        'stroke="#999"/>',
        f'<text x="{margin}" y="16">keys</text>',
        f'<text x="14" y="{margin + 40}" transform="rotate(-90 14 {margin + 40})">'
        "queries</text>",
    ]
    for row, column in kept.nonzero().tolist():
        x, y = margin + column * CELL, margin + row * CELL
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" '
            f'fill="{COLOURS[owner[row]]}"/>'
        )
    for block in range(1, blocks):
        at = margin + block * g * CELL
        for line in (
            f'x1="{at}" y1="{margin}" x2="{at}" y2="{margin + size}"',
            f'x1="{margin}" y1="{at}" x2="{margin + size}" y2="{at}"',
        ):
            parts.append(f'<line {line} stroke="#ddd" stroke-width="1"/>')
    for rank in range(ranks):
        y = margin + 20 + 22 * rank
        x = margin + size + 14
        parts.append(
            f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLOURS[rank]}"/>'
            f'<text x="{x + 22}" y="{y + 12}">rank {rank}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", default="recipes/results/pattern.svg")
    args = parser.parse_args()
    with open(args.output, "w") as file:
        file.write(draw([0, 3, 8], [1, 2, 22, 39], blocks=16, ranks=4))


if __name__ == "__main__":
    main()

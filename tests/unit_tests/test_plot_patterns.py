"""The README's figure: committed as drawn, and its numbers are those of a ring."""

import re
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import Tensor

from mtraining_flex.counters import imbalance, recorder
from mtraining_flex.ring import ops
from mtraining_flex.ring.simulate import ThreadComm, run_ranks
from recipes.plot_patterns import BAR, CELL, COLOURS, LAYOUTS, RANKS, Scene, main
from tests.distributed.launch import ROOT
from tests.helpers import random_qkv

FIGURE = ROOT / "recipes" / "results" / "patterns.svg"
BOX = re.compile(r"M[\d.]+ [\d.]+h(\d+)v(\d+)h")


@pytest.fixture(scope="module")
def counted() -> dict[str, Tensor]:
    """Blocks that a run of the figure's ring counts: int64 [W, W + 1] by layout."""
    return {name: run_counted(Scene(), name) for name in LAYOUTS}


def run_counted(scene: Scene, layout: str) -> Tensor:
    q, k, v = random_qkv(1, 1, 1, scene.layout(layout).seq_len, 2, torch.float32, 0)

    def run(comm: ThreadComm) -> None:
        mine = scene.layout(layout).positions(comm.rank)
        ops.ring_attention(
            *(x[:, :, mine] for x in (q, k, v)),
            *scene.pattern.tensors(),
            torch.tensor(comm.rank),  # "layer": what a rank counts is kept by itself
            comm.name,
            layout,
            scene.granularity,
            "ring",
            0,
            "ring",
            "eager",
            1.0,
        )

    with recorder.recording(True):
        run_ranks(RANKS, run)
    blocks = [recorder._values[rank, "executed"][0] for rank in range(RANKS)]
    recorder.clear()
    return torch.stack(blocks)


def texts(kind: str) -> list[str]:
    """Text of a kind, in order."""
    return [x.text or "" for x in elements("text") if x.get("class") == kind]


def elements(tag: str) -> list[ET.Element]:
    return list(ET.parse(FIGURE).iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def test_the_committed_figure_is_what_is_drawn(tmp_path) -> None:
    main(["--output", str(tmp_path / "again.svg")])
    assert (tmp_path / "again.svg").read_bytes() == FIGURE.read_bytes()
    assert len(FIGURE.read_bytes()) < 60_000
    assert "recipes/results/patterns.svg" in (ROOT / "README.md").read_text()


@pytest.mark.usefixtures("one_thread")
def test_bars_are_the_blocks_that_a_ring_counts(counted: dict[str, Tensor]) -> None:
    """In each layout, step by step and rank by rank; none where nothing is done."""
    expected = [int(x) for name in LAYOUTS for x in counted[name].T.flatten() if x]
    assert [int(x) for x in texts("mid small")] == expected
    bars = [
        float(x.get("width", 0))
        for x in elements("rect")
        if x.get("fill") in COLOURS and x.get("height") == str(BAR)
    ]
    # Each is as long as its number says, less the gap before the next.
    scale = (bars[0] + 1.5) / expected[0]
    assert bars == pytest.approx([x * scale - 1.5 for x in expected], abs=0.3)


@pytest.mark.usefixtures("one_thread")
def test_imbalances_are_those_of_the_metrics(counted: dict[str, Tensor]) -> None:
    expected = [
        f"{number:.2f}"
        for name in LAYOUTS
        for number in imbalance(counted[name].double())
    ]
    assert texts("text mid number") == expected
    # What the figure is there to show.
    worker, step = (
        {name: float(x) for name, x in zip(LAYOUTS, expected[i::2], strict=True)}
        for i in (0, 1)
    )
    assert worker["striped"] <= 1.02 and step["striped"] <= 1.02
    assert step["zigzag"] > worker["zigzag"] > 1.05
    assert worker["contiguous"] > 1.3


@pytest.mark.usefixtures("one_thread")
def test_coloured_blocks_are_the_ones_that_a_rank_computes(
    counted: dict[str, Tensor],
) -> None:
    """Slash blocks in a rank's colour: as many as it executes in all steps."""
    paths = [x for x in elements("path") if x.get("fill") in COLOURS]
    drawn = [
        sum(int(w) for w, h in BOX.findall(x.get("d") or "") if is_row(w, h)) // CELL
        for x in paths
    ]
    expected = torch.cat([counted[name][:, :-1].sum(1) for name in LAYOUTS])
    assert drawn == expected.tolist()


def is_row(width: str, height: str) -> bool:
    """Whether a box is blocks of the matrix, and neither a line nor on its edge."""
    return int(height) == CELL and int(width) % CELL == 0


def test_a_striped_step_names_its_diagonals() -> None:
    """Those that join a rank with the keys that are there, whatever the rank."""
    scene = Scene()
    layout = scene.layout("striped")
    owner = torch.tensor(scene.owners(layout))
    rows, columns = scene.kept().nonzero().T
    step = (owner[rows] - owner[columns]) % RANKS
    labels = texts("text mid small")
    for number, label in enumerate(labels):
        here = (rows - columns)[step == number].unique().tolist()
        assert label == ", ".join(map(str, here))
    assert len(labels) == RANKS

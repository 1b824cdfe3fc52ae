"""Compare again what a sentinel has left: was it the code, or that one time?

    python -m recipes.replay outputs/run/sentinel/step_200_layer_3_forward_ring_0

reads the files of all ranks, runs the same ring once more (all ranks in this process,
on the GPU if there is one and the run had one) and prints, per rank, how far the saved
and the new results are from the dense ones. A new result that is wrong as well shows a
fault in the code, which can now be debugged alone; one that is right points at the
transport, the memory or the machine.

    --backend B    another backend than the run's ("eager" is plain math)
    --all-heads    compare all heads and rows, not only the saved place

Exit code 1 if a new result is wrong, else 0.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mtraining_flex  # noqa: F401  before torchtitan, which takes its device at import

# isort: split
import torch
from torch import Tensor

from mtraining_flex.counters import StepCounter
from mtraining_flex.layout import build_layout
from mtraining_flex.pattern.types import VerticalSlash
from mtraining_flex.ring import drive
from mtraining_flex.ring.backends import resolve_backend
from mtraining_flex.ring.comm import Comm
from mtraining_flex.ring.simulate import LockedStep, run_ranks
from mtraining_flex.ring.step import Step, get_step
from mtraining_flex.sentinel import (
    BACKWARD,
    Call,
    Finding,
    Place,
    Settings,
    examine_backward,
    examine_forward,
)

GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Saved:
    """A mismatch, as all ranks have left it."""

    about: str  # the sentinel's message
    what: str  # "forward" or "backward"
    place: Place  # on the CPU
    settings: Settings
    device: str  # of the run
    ranks: list[dict[str, Any]]  # tensors by name, of each rank


def load(folder: str | Path) -> Saved:
    """Read the files of all ranks.

    Raises:
        ValueError: no file, or not one of every rank.
    """
    files = sorted(Path(folder).glob("rank_*.pt"))
    if not files:
        raise ValueError(f"'{folder}' has no file rank_*.pt: name a sentinel's folder")
    ranks = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    ranks.sort(key=lambda content: content["rank"])
    have, want = [content["rank"] for content in ranks], len(ranks[0]["ranks"])
    if have != list(range(want)):
        raise ValueError(
            f"'{folder}' has the files of ranks {have}, and the ring has {want}: copy "
            "those of the other nodes here"
        )
    first = ranks[0]
    settings = dict(first["settings"])
    shape = settings.pop("layout")
    layout = build_layout(
        *(shape[n] for n in ("name", "seq_len", "cp_size")), shape["granularity"]
    )
    return Saved(
        first["about"],
        first["what"],
        Place(*(first[name] for name in Place._fields)),
        Settings(layout, **settings),
        first["device"],
        ranks,
    )


@dataclass(frozen=True)
class Row:
    """One quantity on one rank."""

    rank: int
    saved: Finding
    again: Finding


def replay(saved: Saved, device: torch.device, all_heads: bool = False) -> list[Row]:
    """Run the ring again, and compare both results with the dense ones."""
    settings = saved.settings
    q = saved.ranks[0]["q"]
    backend, reason = resolve_backend(
        settings.backend,
        device.type,
        settings.layout.granularity,
        q.dtype,
        q.shape[-1],
    )
    print(f"backend {backend}: {reason}")
    step: Any = LockedStep(get_step(backend))

    def on_rank(comm: Comm) -> list[Row]:
        content = {
            name: x.to(device) if isinstance(x, Tensor) else x
            for name, x in saved.ranks[comm.rank].items()
        }
        tensors = [x.to(device) for x in content["pattern"]]
        if content["documents"] is not None:
            tensors.append(content["documents"])
        pattern = VerticalSlash(*tensors)
        q, k, v = (content[name] for name in ("q", "k", "v"))
        call = Call(q, k, v, pattern, comm, settings)
        before = {n: x for n, x in content.items() if isinstance(x, Tensor)}
        after = _run(saved.what, call, step, before)
        rows: list[Row] = []
        for place in _places(saved, q, all_heads):
            pairs = zip(
                _examine(saved.what, call, before, place),
                _examine(saved.what, call, after, place),
                strict=True,
            )
            rows += [Row(comm.rank, *pair) for pair in pairs]
        return _worst(rows)

    return [row for rows in run_ranks(settings.layout.cp_size, on_rank) for row in rows]


def _run(
    what: str, call: Call, step: Step, saved: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The ring's results; a backward starts from the saved forward."""
    s = call.settings
    ring = drive.Ring(
        s.layout, call.comm, s.rotation, step, s.scale, s.inner_degree, s.inner
    )
    inputs = (call.q, call.k, call.v)
    if what == BACKWARD:
        rest = (saved["out"], saved["lse"], call.pattern)
        grads = drive.backward(ring, saved["dout"], *inputs, *rest)
        return saved | dict(zip(GRADIENTS, grads, strict=True))
    counter = StepCounter(call.q, call.comm.size)
    out, lse = drive.forward(ring, *inputs, call.pattern, counter)
    return {"out": out, "lse": lse, "executed": counter.blocks}


def _examine(
    what: str, call: Call, found: dict[str, Tensor], place: Place
) -> list[Finding]:
    if what == BACKWARD:
        dq, dk, dv = (found[name] for name in GRADIENTS)
        rest = (found["out"], found["lse"], found["dout"], (dq, dk, dv), place)
        return examine_backward(call, *rest)
    return examine_forward(call, found["out"], found["lse"], found["executed"], place)


def _places(saved: Saved, q: Tensor, all_heads: bool) -> Iterable[Place]:
    if not all_heads:
        b, h, queries, keys = saved.place
        return [Place(b, h, queries.to(q.device), keys.to(q.device))]
    return [
        Place.all_of(b, h, saved.settings.layout, q.device)
        for b in range(q.shape[0])
        for h in range(q.shape[1])
    ]


def _worst(rows: list[Row]) -> list[Row]:
    """One row per quantity: its largest errors over all places."""
    result: dict[str, Row] = {}
    for row in rows:
        name = row.saved.quantity
        best = result.setdefault(name, row)
        result[name] = replace(
            best,
            saved=max(best.saved, row.saved, key=_size),
            again=max(best.again, row.again, key=_size),
        )
    return list(result.values())


def _size(finding: Finding) -> float:
    return torch.inf if finding.error != finding.error else finding.error


def table(rows: Sequence[Row]) -> str:
    lines = ["rank  quantity      saved      again      bound"]
    for row in rows:
        marks = ["!" if f.is_wrong else " " for f in (row.saved, row.again)]
        lines.append(
            f"{row.rank:4}  {row.saved.quantity:8}  {row.saved.error:9.2e}{marks[0]} "
            f"{row.again.error:9.2e}{marks[1]} {row.saved.bound:9.2e}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code.

    Raises:
        ValueError: a folder that is not a sentinel's, or not all of it.
    """
    parser = argparse.ArgumentParser(description="Compare again what a sentinel left.")
    parser.add_argument("folder", help="step_*_layer_*_* of <dump_folder>/sentinel")
    parser.add_argument("--backend", default="", help="default: the run's")
    parser.add_argument("--all-heads", action="store_true")
    args = parser.parse_args(argv)
    saved = load(args.folder)
    if args.backend:
        saved = replace(saved, settings=replace(saved.settings, backend=args.backend))
    on_gpu = saved.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available() and not args.backend:
        raise ValueError(
            f"the run was on '{saved.device}' with backend "
            f"'{saved.settings.backend}', and this machine has no GPU: replay it "
            "there, or name a --backend ('eager' runs here)"
        )
    device = torch.device("cuda" if on_gpu and torch.cuda.is_available() else "cpu")
    print(saved.about)
    rows = replay(saved, device, args.all_heads)
    print(table(rows))
    wrong = any(row.again.is_wrong for row in rows)
    print(
        "The new result is wrong as well: a fault of the code."
        if wrong
        else "The new result is right: look at the transport, the memory, the machine."
    )
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())

"""A run that notices when its attention is wrong.

In a check step one layer, one head and, on every rank, a block of queries and a block
of keys are computed again: keys and values are gathered, and `recompute` attends to
them densely in fp64, from the pattern's definition. Layer, head and block change from
check to check; the rank's last queries and first keys, which see the most steps of the
ring, are always there. What differs beyond rounding stops the run on all ranks, in
the operator, so before the optimiser and before anything is saved as a checkpoint.

    forward    pattern   the same on all ranks, bit for bit
               blocks    executed at each ring step, against the closed form
               lse, out  of the queries
    backward   dq        of the queries
               dk, dv    of the keys, from all queries of their heads
    batch      tokens, labels and positions of each rank, against the layout

`sentinel` is of this process, like `counters.recorder`: the trainer says which step it
is, the operators ask whether they are to be checked. Collective over the ring; waits
for the device, in check steps alone.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools.logging import logger

from mtraining_flex import recompute
from mtraining_flex.layout import Layout
from mtraining_flex.pattern.types import VerticalSlash
from mtraining_flex.ring.comm import Comm
from mtraining_flex.ring.schedule import sources

FORWARD, BACKWARD, BATCH = "forward", "backward", "batch"
_GOLDEN = 0.6180339887498949  # multiples of it, mod 1, fill the unit interval evenly


class SentinelError(RuntimeError):
    """The attention of a run is not what its pattern says."""


@dataclass(frozen=True)
class Settings:
    """How a ring was run; with the tensors, what is needed to run it again."""

    layout: Layout
    rotation: str
    inner_degree: int
    inner: str
    backend: str
    scale: float


@dataclass(frozen=True)
class Call:
    """The inputs of one call of the ring on one rank."""

    q: Tensor  # [B, H, S, D], local
    k: Tensor  # [B, HK, S, D]
    v: Tensor
    pattern: VerticalSlash
    comm: Comm
    settings: Settings

    @property
    def layout(self) -> Layout:
        return self.settings.layout

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.q.shape[1] // self.k.shape[1]

    def positions(self, rank: int) -> Tensor:
        return recompute.positions(self.layout, rank, self.q.device)

    def gather(self, first: Tensor, second: Tensor) -> recompute.Sequence:
        """Two tensors [S_local, D] of one head, of all ranks. Collective."""
        everyone = self.comm.all_gather(torch.stack([first, second]))
        pos = torch.cat([self.positions(rank) for rank in range(self.comm.size)])
        return recompute.Sequence(
            everyone[:, 0].flatten(0, 1), everyone[:, 1].flatten(0, 1), pos
        )


class Place(NamedTuple):
    """What is computed again: queries of one head, and keys of its kv head."""

    batch: int
    head: int
    queries: Tensor  # local tokens, int64 [R]
    keys: Tensor  # local tokens, int64 [T]

    @classmethod
    def of(
        cls,
        batch: int,
        head: int,
        queries: Sequence[int],
        keys: Sequence[int],
        layout: Layout,
        device: torch.device,
    ) -> "Place":
        """From numbers of local blocks, without those that are named twice."""
        g = layout.granularity
        within = torch.arange(g, device=device)
        rows = [
            torch.tensor(sorted(set(blocks)), device=device)[:, None] * g + within
            for blocks in (queries, keys)
        ]
        return cls(batch, head, rows[0].flatten(), rows[1].flatten())

    @classmethod
    def all_of(
        cls, batch: int, head: int, layout: Layout, device: torch.device
    ) -> "Place":
        """Every row of a rank."""
        rows = torch.arange(layout.local_len, device=device)
        return cls(batch, head, rows, rows)


class Finding(NamedTuple):
    """How far a quantity is from what it should be."""

    quantity: str
    error: float
    bound: float

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.bound  # NaN is

    def __str__(self) -> str:
        return f"{self.quantity} {self.error:.2g} (bound {self.bound:.2g})"


@dataclass(frozen=True)
class Bounds:
    """How far rounding may take a result from the exact one.

    out and gradients are measured against the size of their terms (see
    `recompute.Result`), lse against 1 + |lse|.
    """

    out: float
    lse: float

    @property
    def grad(self) -> float:
        return 3 * self.out  # products of two rounded factors, twice

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device) -> "Bounds":
        if dtype == torch.float64:
            return cls(1e-9, 1e-9)
        if dtype != torch.float32:
            return cls(1e-2, 1e-3)  # 8 bits: what half of them are off by, and more
        if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
            return cls(5e-3, 5e-3)  # TF32 has 11 bits
        return cls(1e-4, 1e-5)


def examine_forward(
    call: Call, out: Tensor, lse: Tensor, executed: Tensor | None, place: Place
) -> list[Finding]:
    """Compare a forward of the ring with its definition. Collective over the ring.

    Args:
        out, lse: its results, of all rows.
        executed: blocks at each of its W steps and at the vertical step, int64 [W + 1];
            None if they were not counted.
        place: what to compute again, the same batch entry and head on all ranks.
    """
    b, h, rows, _ = place
    bounds, rank = Bounds.of(call.q.dtype, call.q.device), call.comm.rank
    kv = call.gather(*(x[b, h // call.group] for x in (call.k, call.v)))
    head = recompute.Head.of(call.pattern, call.layout, b, h)
    exact, exact_lse = recompute.attend(
        call.q[b, h, rows], call.positions(rank)[rows], kv, head, call.settings.scale
    )
    findings = [Finding("pattern", _unlike_rank_0(call), 0.0)]
    if executed is not None:
        findings.append(Finding("blocks", _blocks_error(call, executed), 0.0))
    return [
        *findings,
        Finding("lse", _lse_error(lse[b, h, rows], exact_lse), bounds.lse),
        Finding("out", _error(out[b, h, rows], exact), bounds.out),
    ]


def examine_backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    place: Place,
) -> list[Finding]:
    """Compare dq, dk, dv of a backward with their definition. Collective."""
    b, h, rows, keys = place
    dq, dk, dv = grads
    bound, hk = Bounds.of(call.q.dtype, call.q.device).grad, h // call.group
    pos, scale = call.positions(call.comm.rank), call.settings.scale
    kv = call.gather(call.k[b, hk], call.v[b, hk])
    head = recompute.Head.of(call.pattern, call.layout, b, h)
    exact_dq = recompute.attend_backward_rows(
        call.q[b, h, rows],
        pos[rows],
        dout[b, h, rows],
        out[b, h, rows],
        kv,
        head,
        scale,
    )
    exact_dk = exact_dv = recompute.Result.zero(call.k[b, hk, keys])
    for i in range(hk * call.group, (hk + 1) * call.group):
        delta = (out[b, i].double() * dout[b, i].double()).sum(-1)
        numbers = call.comm.all_gather(torch.stack([lse[b, i].double(), delta]))
        more_dk, more_dv = recompute.attend_backward_keys(
            call.k[b, hk, keys],
            call.v[b, hk, keys],
            pos[keys],
            call.gather(call.q[b, i], dout[b, i]),
            numbers[:, 0].flatten(),
            numbers[:, 1].flatten(),
            recompute.Head.of(call.pattern, call.layout, b, i),
            scale,
        )
        exact_dk, exact_dv = exact_dk + more_dk, exact_dv + more_dv
    return [
        Finding("dq", _error(dq[b, h, rows], exact_dq), bound),
        Finding("dk", _error(dk[b, hk, keys], exact_dk), bound),
        Finding("dv", _error(dv[b, hk, keys], exact_dv), bound),
    ]


def _error(actual: Tensor, exact: recompute.Result) -> float:
    """Norm of the difference, relative to the size of the terms."""
    difference = (actual.double() - exact.value).square().sum()
    if exact.size2 == 0:
        return 0.0 if difference == 0 else torch.inf
    return (difference / exact.size2).sqrt().item()


def _lse_error(actual: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to 1 + |lse|; rows without a key must be -inf."""
    empty = exact == -torch.inf
    if not torch.equal(actual == -torch.inf, empty):
        return torch.inf
    difference = (actual.double() - exact).abs() / (1 + exact.abs())
    return difference.masked_fill(empty, 0.0).max().item()


def _unlike_rank_0(call: Call) -> float:
    """How many of the numbers of this rank's pattern are not those of rank 0."""
    tensors = [x.flatten() for x in call.pattern.tensors()]
    if call.pattern.documents is not None:
        tensors.append(call.pattern.documents.flatten())
    numbers = torch.cat(tensors)
    everyone = call.comm.all_gather(numbers)
    return float((everyone[call.comm.rank] != everyone[0]).sum())


def expected_blocks(call: Call) -> Tensor:
    """Blocks that this rank must execute, by ring step: int64 [W + 1]."""
    settings, comm = call.settings, call.comm
    order = sources(settings.rotation, comm.rank, comm.size, settings.inner_degree)
    heads = call.q.shape[:2]
    return recompute.expected_blocks(
        call.pattern, call.layout, comm.rank, order, (heads[0], heads[1])
    )


def _blocks_error(call: Call, executed: Tensor) -> float:
    """Largest difference of a step's blocks."""
    return float((executed - expected_blocks(call)).abs().max())


class Check(NamedTuple):
    """What a step looks at."""

    step: int
    number: int  # of the check

    def layer(self, num_layers: int) -> int:
        return self.number % num_layers

    def place(self, call: Call, num_layers: int) -> Place:
        """Batch entry, head and block: all of them in time."""
        n, blocks = self.number, call.layout.local_blocks
        block = int(blocks * (n * _GOLDEN % 1.0))
        return Place.of(
            n % call.q.shape[0],
            (n % num_layers + n // num_layers) % call.q.shape[1],
            (block, blocks - 1),
            (block, 0),
            call.layout,
            call.q.device,
        )


class Sentinel:
    """Which step is checked, what was checked, and the end of a run that is wrong."""

    def __init__(self) -> None:
        self.configure(0, "", 1)

    def configure(self, every: int, folder: str | Path, num_layers: int) -> None:
        """Check every so many steps, and the first of this process; 0 is never.

        Args:
            folder: where to leave what is needed to reproduce a mismatch.
        """
        self.every, self.folder, self.num_layers = every, Path(folder), num_layers
        self._is_first = True
        self._check: Check | None = None
        self._done: set[tuple[str, str]] = set()

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Check the step inside the block, if it is one to check.

        Raises:
            SentinelError: what should have been checked was never computed.
        """
        if self.every == 0 or (step % self.every and not self._is_first):
            yield
            return
        self._is_first = False
        self._check, self._done = Check(step, step // self.every), set()
        try:
            yield
        finally:
            check, self._check = self._check, None
        missing = {FORWARD, BACKWARD} - {what for what, _ in self._done}
        if missing:
            raise SentinelError(
                f"sentinel: step {step} was to be checked, but layer "
                f"{check.layer(self.num_layers)} had no {' and no '.join(missing)} pass"
            )

    def watches(self, what: str, layer: int, comm: Comm) -> bool:
        """Whether this call is to be checked: the first of its kind in the step."""
        check = self._check
        if check is None or (what, comm.name) in self._done:
            return False
        if what != BATCH and layer != check.layer(self.num_layers):
            return False
        self._done.add((what, comm.name))
        return True

    def check_forward(
        self, call: Call, out: Tensor, lse: Tensor, executed: Tensor
    ) -> None:
        """Raise `SentinelError` on all ranks if a forward is wrong on one."""
        place, begin_s = self._place(call), _now(call.q.device)
        findings = examine_forward(call, out, lse, executed, place)
        tensors = {"out": out, "lse": lse, "executed": executed}
        self._judge(FORWARD, call, place, findings, tensors, begin_s)

    def check_backward(
        self,
        call: Call,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Raise `SentinelError` on all ranks if a backward is wrong on one."""
        place, begin_s = self._place(call), _now(call.q.device)
        findings = examine_backward(call, out, lse, dout, grads, place)
        tensors = {"out": out, "lse": lse, "dout": dout}
        tensors |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        self._judge(BACKWARD, call, place, findings, tensors, begin_s)

    def _place(self, call: Call) -> Place:
        assert self._check is not None
        return self._check.place(call, self.num_layers)

    def _judge(
        self,
        what: str,
        call: Call,
        place: Place,
        findings: list[Finding],
        tensors: dict[str, Tensor],
        begin_s: float,
    ) -> None:
        check = self._check
        assert check is not None
        everyone = share(findings, call.comm, call.q.device)
        spent_ms = 1e3 * (_now(call.q.device) - begin_s)
        layer = check.layer(self.num_layers)
        where = f"layer {layer}, head {place.head}"
        if first_wrong(everyone) is None:
            if call.comm.rank == 0:
                logger.info(
                    f"sentinel: step {check.step}, {where}, {what}: "
                    f"{summary(everyone)}; {spent_ms:.0f} ms"
                )
            return
        text = (
            f"sentinel: step {check.step}, {where} (kv head "
            f"{place.head // call.group}, batch entry {place.batch}), {what}: "
            f"{complaint(everyone, call.comm, call.q.device)}"
        )
        if what == FORWARD:
            text += _steps_that_differ(call, tensors["executed"])
        folder = self.folder / f"step_{check.step}_layer_{layer}_{what}"
        saved: dict[str, object] = {"about": text, "what": what, **tensors}
        saved |= {"batch": place.batch, "head": place.head}
        saved |= {"queries": place.queries, "keys": place.keys}
        text += self._save(folder, call, saved)
        raise SentinelError(text)

    def _save(self, folder: Path, call: Call, saved: dict[str, object]) -> str:
        """Write this rank's file; then wait until every rank has written its own."""
        ranks = global_ranks(call.comm, call.q.device)
        folder = folder.with_name(f"{folder.name}_ring_{min(ranks)}")
        settings = asdict(call.settings)
        inputs = {"q": call.q, "k": call.k, "v": call.v}
        pattern = call.pattern.tensors()
        content = saved | inputs | {"pattern": pattern, "settings": settings}
        content["documents"] = call.pattern.documents
        content |= {"rank": call.comm.rank, "ranks": ranks}
        content |= {"torch": str(torch.__version__), "device": str(call.q.device)}
        file = folder / f"rank_{call.comm.rank}.pt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(_on_cpu(content), file)
            end = f" Saved: {file}; see `python -m recipes.replay {folder}`."
        except (OSError, RuntimeError) as error:
            end = f" It could not be saved to {file}: {error}."
        # The first process to fail has all others killed.
        call.comm.all_gather(torch.zeros(1, device=call.q.device))
        return f"{end} No checkpoint has this step; the last one is kept."

    def check_batch(
        self,
        layout: Layout,
        comm: Comm,
        full: tuple[Tensor, Tensor],
        local: tuple[Tensor, Tensor],
        positions: Tensor,
    ) -> None:
        """Raise `SentinelError` on all ranks if one has not its share of the batch.

        Args:
            full: tokens and labels of the whole sequence, int64 [B, S].
            local: this rank's, [B, S_local].
            positions: that the model is told, [1 or B, S_local].
        """
        if not self.watches(BATCH, -1, comm):
            return
        check, device = self._check, positions.device
        assert check is not None
        here = recompute.positions(layout, comm.rank, device)
        tokens, labels = full
        everyone = comm.all_gather(torch.stack(full))
        valid = labels[:, :-1] != IGNORE_INDEX
        wrong = {
            "batch": everyone[comm.rank] != everyone[0],
            "positions": positions != here,
            "tokens": local[0] != tokens[:, here],
            "labels": local[1] != labels[:, here],
            "next tokens": (labels[:, :-1] != tokens[:, 1:]) & valid,
        }
        findings = [Finding(name, float(x.sum()), 0.0) for name, x in wrong.items()]
        shared = share(findings, comm, device)
        if first_wrong(shared) is not None:
            raise SentinelError(
                f"sentinel: step {check.step}, the batch in layout '{layout.name}': "
                f"{complaint(shared, comm, device)} (entries that differ). No "
                "checkpoint has this step; the last one is kept."
            )


Shared = list[list[Finding]]  # [ranks][quantities]


def share(findings: list[Finding], comm: Comm, device: torch.device) -> Shared:
    """Every rank's findings, in the same order. Collective."""
    errors = torch.tensor(
        [f.error for f in findings], dtype=torch.float64, device=device
    )
    return [
        [f._replace(error=e) for f, e in zip(findings, row, strict=True)]
        for row in comm.all_gather(errors).tolist()
    ]


def first_wrong(everyone: Shared) -> int | None:
    """Number of the first quantity that is wrong on some rank."""
    for number, each in enumerate(zip(*everyone, strict=True)):
        if any(finding.is_wrong for finding in each):
            return number
    return None


def summary(everyone: Shared) -> str:
    """The largest error of each quantity."""
    return ", ".join(str(_worst(each)) for each in zip(*everyone, strict=True))


def _worst(each: Sequence[Finding]) -> Finding:
    return max(each, key=lambda f: torch.inf if f.error != f.error else f.error)


def complaint(everyone: Shared, comm: Comm, device: torch.device) -> str:
    """What differs first, on which ranks, and by how much. Collective."""
    number = first_wrong(everyone)
    assert number is not None
    each = [findings[number] for findings in everyone]
    wrong = [rank for rank, finding in enumerate(each) if finding.is_wrong]
    worst = _worst(each)
    ranks = global_ranks(comm, device)
    return (
        f"{worst.quantity} differs by {worst.error:.3g}, more than {worst.bound:.3g}, "
        f"on ranks {wrong} of the ring of {comm.size} (processes "
        f"{[ranks[rank] for rank in wrong]}). All errors: {summary(everyone)}."
    )


def global_ranks(comm: Comm, device: torch.device) -> list[int]:
    """Process of each rank of the ring. Collective."""
    own = dist.get_rank() if dist.is_initialized() and comm.size > 1 else comm.rank
    return comm.all_gather(torch.tensor([own], device=device)).flatten().tolist()


def _steps_that_differ(call: Call, executed: Tensor) -> str:
    """Where a rank executed other blocks than it must, "" if nowhere. Collective."""
    numbers = torch.stack([executed, expected_blocks(call)])
    lines = [
        f" Rank {rank} executed {have} blocks at "
        f"{'the vertical step' if step == call.comm.size else f'step {step}'}, "
        f"expected {want}."
        for rank, (row, wanted) in enumerate(call.comm.all_gather(numbers).tolist())
        for step, (have, want) in enumerate(zip(row, wanted, strict=True))
        if have != want
    ]
    return "".join(lines[:4]) + (" ..." if len(lines) > 4 else "")


def _on_cpu(content: object) -> object:
    match content:
        case Tensor():
            return content.detach().cpu().clone()  # of a view, not of all it views
        case dict():
            return {key: _on_cpu(value) for key, value in content.items()}
        case tuple():
            return tuple(_on_cpu(value) for value in content)
    return content


def _now(device: torch.device) -> float:
    """Seconds, when the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


sentinel = Sentinel()

"""Before the first step: a few hundred tokens on the run's own ring and backend.

Three cases whose answers are known, for every head and all rows of each rank:

    needle    a key near the start of the sequence holds all attention of the last rows
              of every rank. The search must keep it, and without it the output of every
              rank must change: so queries see keys of other ranks, at true positions.
    lse       with q = 0 each kept key weighs the same: lse is the log of their number,
              in natural units, counted once.
    gradients out, dq, dk, dv of random tensors and a random pattern against
              `recompute`.
"""

import dataclasses
import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.tools.logging import logger

from mtraining_flex import recompute
from mtraining_flex.attention import SparseAttention, ring_of
from mtraining_flex.config import Ring
from mtraining_flex.config import SparseAttention as SparseConfig
from mtraining_flex.layout import build_layout
from mtraining_flex.pattern.budget import list_widths
from mtraining_flex.pattern.types import VerticalSlash, dense_pattern, pack_pattern
from mtraining_flex.ring import ops
from mtraining_flex.ring.comm import Comm
from mtraining_flex.sentinel import (
    Bounds,
    Call,
    Finding,
    Place,
    SentinelError,
    Settings,
    complaint,
    examine_backward,
    examine_forward,
    first_wrong,
    share,
    summary,
)

NEEDLE = 3  # position of the far key, if a block has as many tokens
_LOGIT = 30.0  # of the rows that look for it; those of other keys are 1 or 2
_MIN_BLOCKS = 8


@dataclass(frozen=True)
class Shape:
    """Of the model whose attention it is."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def check_at_start(
    config: SparseConfig, ring: Ring, mesh: DeviceMesh | Comm | None, shape: Shape
) -> None:
    """Run the three cases; log what they came to. Collective over the ring.

    Args:
        config: the `[sparse_attention]` section; a budget file's budgets are left out.
        ring: the `[ring]` section.
        mesh: of the ring, as the model's attention has it.

    Raises:
        SentinelError: on all ranks, if a result is wrong on one.
    """
    begin_s = time.perf_counter()
    test = _SelfTest(config, ring, mesh, shape)
    findings = [*test.needle(), *test.lse(), *test.gradients()]
    everyone = share(findings, test.comm, shape.device)
    if first_wrong(everyone) is not None:
        text = complaint(everyone, test.comm, shape.device)
        raise SentinelError(
            f"sentinel.startup: {test.seq_len} planted tokens in layout "
            f"'{ring.layout}', rotation '{ring.rotation}', backend '{config.backend}', "
            f"{shape.dtype}: {text} Training has not begun."
        )
    if test.comm.rank == 0:
        logger.info(
            f"sentinel: start-up check of {test.seq_len} tokens on {test.comm.size} "
            f"ranks: {summary(everyone)}; {time.perf_counter() - begin_s:.1f} s"
        )


class _SelfTest:
    """The planted cases on one ring."""

    def __init__(
        self,
        config: SparseConfig,
        ring: Ring,
        mesh: DeviceMesh | Comm | None,
        shape: Shape,
    ):
        self.comm, self.ring = ring_of(mesh, ring)
        self.shape = _small(shape)
        self.seq_len = _length(config, self.comm.size)
        g = config.granularity
        self.layout = build_layout(ring.layout, self.seq_len, self.comm.size, g)
        self.config = dataclasses.replace(
            config,
            budget_file="",
            sink=min(config.sink, self.seq_len),
            local_window=min(config.local_window, self.layout.num_blocks),
        )
        self.attention = SparseAttention()
        self.attention.configure(self.config, self.ring, [self.layout], mesh)
        self.here = recompute.positions(self.layout, self.comm.rank)
        self.scale = shape.head_dim**-0.5
        self.generator = torch.Generator().manual_seed(0)

    # ---- cases ----------------------------------------------------------------------

    def needle(self) -> list[Finding]:
        """A far key that the last rows of every rank look for."""
        probe_rows = self.config.probe_rows
        at = min(NEEDLE, self.layout.granularity - 1)
        q, k, v = (self.draw(n) for n in self.heads)
        direction = torch.nn.functional.normalize(self.draw(self.heads[1])[:, :, 0], 2)
        direction *= (_LOGIT / self.scale) ** 0.5
        k[:, :, at], v[:, :, at] = direction, 3.0
        look = self.last_blocks()
        if self.config.pattern != "dense":  # a search looks at the last rows
            look[self.seq_len - probe_rows :] = True
        q[:, :, look] = direction.repeat_interleave(self.group, 1)[:, :, None]
        local = [self.local(x) for x in (q, k, v)]
        pattern = self.search(*local)
        call, out, lse = self.run(pattern, *local)
        findings = self.examine("needle ", call, out, lse)
        if not self._has_column(at):
            return findings
        k[:, :, at], v[:, :, at] = 0.0, 0.0
        _, without, _ = self.run(pattern, local[0], self.local(k), self.local(v))
        return [
            *findings,
            Finding("needle dropped", float(self._dropped(pattern, at)), 0.0),
            Finding("needle unseen", _unchanged(out[:, :, -1], without[:, :, -1]), 0.5),
        ]

    def lse(self) -> list[Finding]:
        """q = 0: log of the number of kept keys."""
        q, k, v = (self.draw(n) for n in self.heads)
        pattern = self.random_pattern()
        local = [self.local(x) for x in (q.zero_(), k, v)]
        _, _, lse = self.run(pattern, *local)
        every = torch.arange(self.seq_len, device=lse.device)
        rows = self.here.to(lse.device)
        worst = 0.0
        for h in range(self.heads[0]):
            head = recompute.Head.of(pattern, self.layout, 0, h)
            count = head.keeps(rows, every).sum(-1).double().log()
            error = (lse[0, h].double() - count).abs() / (1 + count.abs())
            worst = max(worst, error.max().item())
        return [Finding("lse of q = 0", worst, self.bounds.lse)]

    def gradients(self) -> list[Finding]:
        """Random tensors through the operators and autograd."""
        local = [self.local(self.draw(n)).requires_grad_() for n in self.heads]
        dout = self.local(self.draw(self.heads[0]))
        call, out, lse = self.run(self.random_pattern(), *local)
        dq, dk, dv = torch.autograd.grad(out, local, dout)
        q, k, v = (x.detach() for x in local)
        call = dataclasses.replace(call, q=q, k=k, v=v)
        out = out.detach()
        findings = self.examine("", call, out, lse)
        each = [
            examine_backward(call, out, lse, dout, (dq, dk, dv), place)
            for place in self.places()
        ]
        return [*findings, *_worst(each)]

    # ---- parts ----------------------------------------------------------------------

    @property
    def heads(self) -> tuple[int, int, int]:
        """Of q, k and v."""
        return self.shape.heads, self.shape.kv_heads, self.shape.kv_heads

    @property
    def group(self) -> int:
        return self.shape.heads // self.shape.kv_heads

    @property
    def bounds(self) -> Bounds:
        return Bounds.of(self.shape.dtype, self.shape.device)

    def draw(self, heads: int) -> Tensor:
        """The same on every rank: [1, heads, S, D] on the CPU."""
        shape = (1, heads, self.seq_len, self.shape.head_dim)
        return torch.randn(shape, generator=self.generator)

    def local(self, x: Tensor) -> Tensor:
        return x[:, :, self.here].to(self.shape.device, self.shape.dtype)

    def last_blocks(self) -> Tensor:
        """Which tokens are in the last local block of a rank: bool [S]."""
        g, last = self.layout.granularity, torch.zeros(self.seq_len, dtype=torch.bool)
        for rank in range(self.comm.size):
            last[recompute.positions(self.layout, rank)[-g:]] = True
        return last

    def search(self, q: Tensor, k: Tensor, v: Tensor) -> VerticalSlash:
        plan = self.attention.plan
        assert plan is not None
        return VerticalSlash(*self.attention.find(q, k, plan, self.layout, self.scale))

    def random_pattern(self) -> VerticalSlash:
        """With lists as long as a search's; the diagonal is kept."""
        if self.config.pattern == "dense":
            return dense_pattern(self.layout.num_blocks, self.shape.device)
        rng = random.Random(0)
        columns, offsets = list_widths(self.config, self.seq_len)
        slashes, verticals = [], []
        for _ in range(self.heads[0]):
            more = rng.randrange(offsets)
            others = range(1, self.layout.num_blocks)
            slashes.append([0, *rng.sample(others, more)])
            verticals.append(rng.sample(range(self.seq_len), rng.randint(0, columns)))
        return pack_pattern(
            [slashes],
            [verticals],
            max_slash=offsets,
            max_vertical=columns,
            device=self.shape.device,
        )

    def run(
        self, pattern: VerticalSlash, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Call, Tensor, Tensor]:
        """out and lse of the operator, differentiable."""
        layout, ring, backend = self.layout, self.ring, self.config.backend
        out, lse = ops.ring_attention(
            q,
            k,
            v,
            *pattern.tensors(),
            torch.tensor(-1),
            self.comm.name,
            layout.name,
            layout.granularity,
            *ring.transport,
            backend,
            self.scale,
        )
        settings = Settings(layout, *ring.transport, backend, self.scale)
        return Call(q, k, v, pattern, self.comm, settings), out, lse

    def examine(
        self, prefix: str, call: Call, out: Tensor, lse: Tensor
    ) -> list[Finding]:
        """The worst of all heads."""
        each = [examine_forward(call, out, lse, None, place) for place in self.places()]
        return [f._replace(quantity=prefix + f.quantity) for f in _worst(each)]

    def places(self) -> list[Place]:
        """All rows of all heads."""
        return [
            Place.all_of(0, h, self.layout, self.shape.device)
            for h in range(self.heads[0])
        ]

    def _has_column(self, at: int) -> bool:
        """Whether a search can keep this key as a column."""
        config = self.config
        if config.pattern == "dense":
            return True
        cap = config.num_vertical if config.budget == "top_k" else config.max_vertical
        return cap > config.sink or at < config.sink

    def _dropped(self, pattern: VerticalSlash, at: int) -> int:
        """Heads that do not keep the needle for this rank's last row."""
        row = self.here[-1:].to(self.shape.device)
        key = torch.tensor([at], device=self.shape.device)
        heads = [
            recompute.Head.of(pattern, self.layout, 0, h) for h in range(self.heads[0])
        ]
        return sum(not bool(head.keeps(row, key)) for head in heads)


def _small(shape: Shape) -> Shape:
    """At most two kv heads, with as many query heads each."""
    kv_heads = min(shape.kv_heads, 2)
    heads = shape.heads // shape.kv_heads * kv_heads
    return dataclasses.replace(shape, heads=heads, kv_heads=kv_heads)


def _length(config: SparseConfig, cp_size: int) -> int:
    """Two blocks per rank and eight in all, or more, if the probe rows need them."""
    cycle = 2 * cp_size * config.granularity
    wanted = max(_MIN_BLOCKS * config.granularity, config.probe_rows)
    return -(-wanted // cycle) * cycle


def _worst(each: list[list[Finding]]) -> list[Finding]:
    """The largest error of each quantity over heads."""
    return [
        max(same, key=lambda f: torch.inf if f.error != f.error else f.error)
        for same in zip(*each, strict=True)
    ]


def _unchanged(out: Tensor, other: Tensor) -> float:
    """1 where nothing changed, 0 where all did; of the head that changed least."""
    difference = (out.double() - other.double()).norm(dim=-1)
    change = difference / out.double().norm(dim=-1).clamp(min=1e-9)
    return 1.0 - min(change.min().item(), 1.0)

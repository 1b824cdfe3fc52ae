"""A ring step on FlexAttention's compiled kernels, forward and backward.

Both directions call the higher-order operators (`compat`), since only they take the
global out and lse. What the kernels call lse differs: Triton templates write and want
it in base 2, FLASH in base e (torch 2.11 and 2.13). `check_lse_unit` measures it on one
tile before a backend is used; a surprise is an error, not a wrong gradient.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mtraining_flex.block_mask import (
    StepMask,
    Tables,
    build_block_mask,
    slash_step,
)
from mtraining_flex.compat import compiled, flex_backward, flex_forward
from mtraining_flex.layout import build_layout
from mtraining_flex.pattern.types import dense_pattern, slash_bitmap
from mtraining_flex.ring.step import Finished, Gradients, Part
from mtraining_flex.ring.triton_step import TritonStep

# Natural units of one unit of a backend's lse.
LSE_UNIT = {"TRITON": math.log(2.0), "FLASH": 1.0}


class FlexStep:
    """A ring step on FlexAttention's compiled kernels (see `ring.step.Step`).

    `backend` "flex" takes the Triton templates throughout; "flash" takes FLASH for
    slashes and our kernels for columns, which look a column up once and not once per
    pair, and go on from the slashes' result.
    """

    fuses = False

    def __init__(self, backend: str):
        assert backend in ("flex", "flash")
        self.kernels = "FLASH" if backend == "flash" else "TRITON"
        self.columns = TritonStep() if backend == "flash" else None

    def _by_lists(self, mask: StepMask) -> bool:
        return self.columns is not None and mask.kind == "vertical"

    def continues(self, mask: StepMask) -> bool:
        return self._by_lists(mask)

    def executed(self, mask: StepMask) -> Tensor:
        return (mask.lists if self._by_lists(mask) else mask.tables).executed()

    def finish(self, dout: Tensor, out: Tensor, lse: Tensor) -> Finished:
        if self.columns is None:
            return Finished(dout, out, lse, None)
        return self.columns.finish(dout, out, lse)

    def forward(
        self,
        q: Tensor,
        part: Part,
        scale: float,
        *,
        columns: Part | None = None,
        running: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert columns is None
        if self.columns is not None and self._by_lists(part.mask):
            return self.columns.forward(q, part, scale, running=running, dtype=dtype)
        assert running is None and dtype is None
        check_lse_unit(self.kernels, q.device, q.dtype, q.shape[-1])
        q, k, v = _addressable(self.kernels, q, part.k, part.v)
        out, lse = _forward(self.kernels, q, k, v, part.mask, scale)
        return out, lse * LSE_UNIT[self.kernels]

    def backward(
        self,
        q: Tensor,
        part: Part,
        done: Finished,
        scale: float,
        *,
        columns: Part | None = None,
        running: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Gradients:
        assert columns is None
        if self.columns is not None and self._by_lists(part.mask):
            return self.columns.backward(
                q, part, done, scale, running=running, dtype=dtype
            )
        assert running is None and dtype is None
        lse = done.lse / LSE_UNIT[self.kernels]
        dout, q, k, v, out = _addressable(
            self.kernels, done.dout, q, part.k, part.v, done.out
        )
        dq, dk, dv = _backward(self.kernels, dout, q, k, v, out, lse, part.mask, scale)
        return Gradients(dq, torch.stack([dk, dv]))


def _addressable(kernels: str, *tensors: Tensor) -> list[Tensor]:
    """Tensors that the kernels can address; a head-major copy of those they cannot.

    The Triton templates (torch 2.11 and 2.13) multiply row numbers and strides in
    int32, and read elsewhere where that wraps: K as a view of fused QKV at 512K tokens,
    for one. FLASH computes in int64. Both want rows in one piece, which the expanded
    gradient of `out.sum()` has not.
    """
    return [
        x
        if x.stride(-1) == 1 and (kernels == "FLASH" or _last_offset(x) < 2**31)
        else x.contiguous()
        for x in tensors
    ]


def _last_offset(x: Tensor) -> int:
    """Offset of the last element; for 2^31 elements and more, of a head's last.

    Then the templates count batches and heads in int64, but still not the rows.
    """
    dims = range(4) if x.numel() < 2**31 else (2, 3)
    return sum((x.shape[d] - 1) * x.stride(d) for d in dims)


def _mask_tuple(mask: StepMask, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The operators' form of a BlockMask; its mask function takes the buffers."""
    return build_block_mask(
        Tables(*tensors),
        mask.q_len,
        mask.kv_len,
        mask.granularity,
        mask.kernel_mask[0],
    ).as_tuple()


def _forward(
    kernels: str, q: Tensor, k: Tensor, v: Tensor, mask: StepMask, scale: float
) -> tuple[Tensor, Tensor]:
    """out, and lse in the kernels' unit."""

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        block_mask = _mask_tuple(mask, rest[:8])
        return flex_forward(kernels, q, k, v, block_mask, rest[8:], scale)

    args = (q, k, v, *mask.tables.tensors(), *mask.kernel_mask[1])
    return compiled(("forward", kernels, mask.name, scale), call, args)(*args)


def _backward(
    kernels: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: StepMask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; lse in the kernels' unit."""

    def call(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        block_mask = _mask_tuple(mask, rest[:8])
        return flex_backward(
            kernels, dout, q, k, v, out, lse, block_mask, rest[8:], scale
        )

    args = (dout, q, k, v, out, lse, *mask.tables.tensors(), *mask.kernel_mask[1])
    return compiled(("backward", kernels, mask.name, scale), call, args)(*args)


@lru_cache(maxsize=32)
def check_lse_unit(
    kernels: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    """Measure the unit of lse of a backend on one tile.

    Raises:
        RuntimeError: it is not the unit that the ring expects.
    """
    pattern = dense_pattern(2, device)
    mask = slash_step(
        pattern,
        slash_bitmap(pattern, 2),
        build_layout("striped", 256, 1, 128),
        0,
        0,
        (1, 1),
    )
    with torch.utils._python_dispatch._disable_current_modes():
        generator = torch.Generator(device).manual_seed(0)
        q, k, v = torch.randn(
            3, 1, 1, 256, head_dim, generator=generator, device=device
        ).to(dtype)
        scale = head_dim**-0.5
        _, lse = _forward(kernels, q, k, v, mask, scale)
        logits = scale * q.double() @ k.double().mT
        future = torch.ones(256, 256, dtype=torch.bool, device=device).triu(1)
        expected = logits.masked_fill(future, -torch.inf).logsumexp(-1)
        error = (lse.double() * LSE_UNIT[kernels] - expected).abs().max().item()
    if not error < 0.02:
        raise RuntimeError(
            f"FlexAttention's {kernels} backend on torch {torch.__version__} does not "
            f"give lse in the expected unit ({LSE_UNIT[kernels]:.4f} natural per "
            f"unit): largest error {error:.3g}; results would be wrong"
        )

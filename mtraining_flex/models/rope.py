"""Rotary embeddings of true positions, exact up to 2^20.

A rank of a ring holds tokens from all over the sequence, so angles follow from explicit
positions. They are computed once per forward, in fp64, for the local tokens only: fp32
angles near 2^20 are off by up to 0.06. The table is no buffer, so that no `.to(bf16)`
can round it: bf16 cannot tell most positions above 256 from their neighbours.

    table   cos and sin, fp32 [1 or B, S, D // 2, 2]
    D       head dim; pair i turns by position / theta ** (2 i / D)
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SCALINGS = ("none", "linear", "llama3", "yarn")


@dataclass
class RopeScaling:
    """How a model's angles are stretched to contexts that it was not trained on.

    With f = factor and turns_i = how often pair i turns within `original_length`:

        none     as they are
        linear   every pair turns f times slower
        llama3   pairs of `high_freq_factor` turns or more stay, those of
                 `low_freq_factor` or fewer are slowed by f, linear in the turns between
        yarn     pairs of `beta_fast` turns or more stay, those of `beta_slow` or fewer
                 are slowed by f, linear in the number of the pair between; cos and sin
                 are multiplied by `attention_factor` (arXiv 2309.00071)
    """

    kind: str = "none"
    factor: float = 1.0
    original_length: int = 0
    """Tokens of the context that the model was trained on; llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    """yarn: 0 is 0.1 ln(factor) + 1."""

    def validate(self, section: str = "rope") -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: names the setting, in `section`, and the numbers.
        """
        if self.kind not in SCALINGS:
            raise ValueError(
                f"{section}.scaling ({self.kind!r}) must be one of {list(SCALINGS)}"
            )
        for name, kinds in _USED_BY.items():
            value, default = getattr(self, name), getattr(_DEFAULTS, name)
            if self.kind not in kinds and value != default:
                raise ValueError(
                    f"{section}.{name} ({value}) is for scaling {' and '.join(kinds)}, "
                    f"got scaling {self.kind!r}"
                )
        if self.kind == "none":
            return
        if not 1 < self.factor < math.inf:
            raise ValueError(
                f"{section}.factor ({self.factor}) must be more than 1 with scaling "
                f"{self.kind!r}"
            )
        if self.kind == "linear":
            return
        if self.original_length < 1:
            raise ValueError(
                f"{section}.original_length ({self.original_length}) must be at least "
                f"1 with scaling {self.kind!r}: the tokens of the context that the "
                "model was trained on"
            )
        low, high = (
            ("low_freq_factor", "high_freq_factor")
            if self.kind == "llama3"
            else ("beta_slow", "beta_fast")
        )
        if not 0 < getattr(self, low) < getattr(self, high):
            raise ValueError(
                f"{section}.{low} ({getattr(self, low)}) must be more than 0 and less "
                f"than {section}.{high} ({getattr(self, high)})"
            )
        if self.attention_factor < 0:
            raise ValueError(
                f"{section}.attention_factor ({self.attention_factor}) must be at "
                "least 0; 0 is 0.1 ln(factor) + 1"
            )

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1

    def stretched(self, length: int) -> int:
        """Tokens that a model of so many reaches with this scaling."""
        if self.kind == "none":
            return length
        return round((self.original_length or length) * self.factor)


_DEFAULTS = RopeScaling()
_USED_BY = {
    "factor": ("linear", "llama3", "yarn"),
    "original_length": ("llama3", "yarn"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "attention_factor": ("yarn",),
}


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling, device: torch.device
) -> Tensor:
    """Radians per position of each pair: fp64 `[D // 2]`."""
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    frequencies = theta ** (-2 / head_dim * pairs)
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor
        case "llama3":
            keep = _kept_by_turns(frequencies, scaling)
        case "yarn":
            keep = _kept_by_number(pairs, head_dim, theta, scaling)
        case _:
            return frequencies
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _kept_by_turns(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """llama3: 1 where a pair keeps its frequency, 0 where it is slowed down."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_length * frequencies / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _kept_by_number(
    pairs: Tensor, head_dim: int, theta: float, scaling: RopeScaling
) -> Tensor:
    """yarn: likewise. The edges are whole pairs, rounded outwards, as is usual.

    They follow from the *original* length. Hugging Face's transformers 4.48.0 took the
    stretched one: 36 and 53 for Qwen2.5 at 16 times 32768, where these give 23 and 40.
    """

    def pair_with(turns: float) -> float:
        length = scaling.original_length / (2 * math.pi * turns)
        return head_dim / 2 * math.log(length) / math.log(theta)

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with(scaling.beta_slow)), head_dim - 1)
    return 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)


def rotary_table(
    positions: Tensor,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
) -> Tensor:
    """cos and sin of every token's angles: fp32 `[1 or B, S, D // 2, 2]`.

    Args:
        positions: global positions, int32 or int64 `[1 or B, S]`.
        scaling: None is plain RoPE.

    Raises:
        ValueError: positions that are not integers, or not of two dimensions.
    """
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions must be int32 or int64, got {positions.dtype}")
    if positions.ndim != 2:
        raise ValueError(f"positions must be [1 or B, S], got {tuple(positions.shape)}")
    scaling = scaling or _DEFAULTS
    frequencies = inverse_frequencies(head_dim, theta, scaling, positions.device)
    angles = positions.double()[..., None] * frequencies  # [1 or B, S, D // 2]
    turned = torch.stack((angles.cos(), angles.sin()), dim=-1)
    if scaling.magnitude != 1:
        turned = turned * scaling.magnitude
    return turned.float()


def shield(table: Tensor) -> Tensor:
    """The table's bits as int32, in the same shape.

    FSDP2's mixed precision casts every floating-point argument of a block to bf16. It
    leaves integers alone, and the view back costs nothing.
    """
    return table.view(torch.int32)


def unshield(bits: Tensor) -> Tensor:
    """The fp32 table behind `shield`."""
    return bits.view(torch.float32)


def apply_rotary(
    q: Tensor, k: Tensor, table: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, in fp32 (fp64 stays fp64); results in their dtypes.

    Args:
        q: `[B, S, H, D]`.
        k: `[B, S, HK, D]`.
        table: from `rotary_table`.
        interleaved: pair i is components (2 i, 2 i + 1), as in torchtitan's Llama 3;
            otherwise (i, i + D / 2), as in Qwen and in Hugging Face's models.
    """
    assert table.dtype == torch.float32, f"the table was cast to {table.dtype}"
    cos, sin = table[:, :, None].unbind(-1)  # [1 or B, S, 1, D // 2]
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    sizes, axis = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b = wide.unflatten(-1, sizes).unbind(axis)  # [B, S, H, D // 2] each
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=axis)
    return rotated.flatten(-2).to(x.dtype)

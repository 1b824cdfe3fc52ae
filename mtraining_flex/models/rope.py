"""Rotary embeddings of true positions, exact up to 2^20.

A rank of a ring holds tokens from all over the sequence, so angles follow from explicit
positions. They are computed once per forward, in fp64, for the local tokens only: fp32
angles near 2^20 are off by up to 0.06. The table is no buffer, so that no `.to(bf16)`
can round it: bf16 cannot tell most positions above 256 from their neighbours.

    table   cos and sin, fp32 [1 or B, S, D // 2, 2]
    D       head dim; pair i turns by position / theta ** (2 i / D)
"""

import math

import torch
from torch import Tensor
from torchtitan.models.llama3.model.args import RoPEScalingArgs


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RoPEScalingArgs | None, device: torch.device
) -> Tensor:
    """Radians per position of each pair: fp64 `[D // 2]`."""
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    frequencies = theta ** (-2 / head_dim * pairs)
    if scaling is None:
        return frequencies
    return _scale_by_wavelength(frequencies, scaling)


def _scale_by_wavelength(frequencies: Tensor, scaling: RoPEScalingArgs) -> Tensor:
    """Llama 3.1's scaling: slow pairs turn `scaling_factor` times slower.

    A pair that turns `high_freq_factor` times or more within the original context keeps
    its frequency; one with `low_freq_factor` turns or fewer is slowed by the whole
    factor; in between, the blend is linear in the number of turns.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.scaling_factor)


def rotary_table(
    positions: Tensor,
    head_dim: int,
    theta: float,
    scaling: RoPEScalingArgs | None = None,
) -> Tensor:
    """cos and sin of every token's angles: fp32 `[1 or B, S, D // 2, 2]`.

    Args:
        positions: global positions, int32 or int64 `[1 or B, S]`.
        scaling: as in Llama 3.1; None is plain RoPE.

    Raises:
        ValueError: positions that are not integers, or not of two dimensions.
    """
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions must be int32 or int64, got {positions.dtype}")
    if positions.ndim != 2:
        raise ValueError(f"positions must be [1 or B, S], got {tuple(positions.shape)}")
    frequencies = inverse_frequencies(head_dim, theta, scaling, positions.device)
    angles = positions.double()[..., None] * frequencies  # [1 or B, S, D // 2]
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


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

"""How much each head may keep: thresholds and caps, as tensors on the device.

Both kinds of budget are one rule. Entries are taken in rank order until their mass
reaches `threshold`, and never more than `cap`; `top_k` is a threshold that no mass
reaches with the count as cap. Mass is counted in integers (units of 2^-40 of a probe
row), so that sums are exact and the same on every rank, in any order.
"""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli
import torch
from torch import Tensor

from mtraining_flex.config import SparseAttention

MASS_UNIT = 2**40  # integer units of one probe row's whole attention
_NEVER = 2**62  # a mass that is never reached


@dataclass(frozen=True)
class Budget:
    """The budget of one kind of entry, for all heads of a layer."""

    threshold: Tensor  # int64 [H], mass in units of MASS_UNIT
    cap: Tensor  # int64 [H], entries

    def to(self, device: torch.device) -> "Budget":
        """On a device; CPU numbers are copied there once and kept."""
        return Budget(_constant(self.threshold, device), _constant(self.cap, device))


@dataclass(frozen=True)
class LayerBudget:
    """Budgets of one layer."""

    vertical: Budget  # in tokens
    slash: Budget  # in blocks

    def to(self, device: torch.device) -> "LayerBudget":
        return LayerBudget(self.vertical.to(device), self.slash.to(device))


def _constant(numbers: Tensor, device: torch.device) -> Tensor:
    if numbers.device == device:
        return numbers
    return _copy(tuple(numbers.tolist()), device)


@lru_cache(maxsize=4096)
def _copy(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


def list_widths(config: SparseAttention, seq_len: int) -> tuple[int, int]:
    """Static sizes NV and NS of the lists: the caps, or all there is if less."""
    return (
        min(config.max_vertical, seq_len),
        min(config.max_slash, seq_len // config.granularity),
    )


def layer_budget(
    config: SparseAttention, heads: int, layer: int | None = None
) -> LayerBudget:
    """The budgets of one layer's heads.

    Args:
        config: the `[sparse_attention]` section.
        heads: query heads, H.
        layer: index into `budget_file`; needed if there is one.

    Raises:
        ValueError: the file lacks the layer, or asks for more than the caps.
    """
    vertical = [(config.vertical_p, config.max_vertical)] * heads
    slash = [(config.slash_p, config.max_slash)] * heads
    if config.budget == "top_k":
        vertical = [(1.0, config.num_vertical)] * heads
        slash = [(1.0, config.num_slash)] * heads
    if config.budget_file:
        if layer is None:
            raise _file_error(config.budget_file, "needs the number of the layer")
        for head, entry in _file_layer(config.budget_file, layer, heads).items():
            vertical[head], slash[head] = _parse_entry(entry, config)
    return LayerBudget(
        _budget(vertical, config.probe_rows), _budget(slash, config.probe_rows)
    )


def _budget(limits: list[tuple[float, int]], probe_rows: int) -> Budget:
    # p = 1 keeps everything up to the cap: rounding must not decide what "all" is.
    thresholds = [
        _NEVER if p >= 1.0 else math.ceil(p * probe_rows * MASS_UNIT) for p, _ in limits
    ]
    caps = [cap for _, cap in limits]
    return Budget(
        torch.tensor(thresholds, device="cpu"), torch.tensor(caps, device="cpu")
    )


def read_budget_file(path: str) -> list[dict[str, Any]]:
    """The layers of a pattern file: a list, or a TOML table with the list `layers`.

    Each layer maps a head to `["vertical_and_slash", v, s, score]` (counts) or
    `["flex_vertical_and_slash", [p_v, cap_v], [p_s, cap_s], score]` (mass and caps),
    the published format. Its slashes are token diagonals; `s` of them count as `ceil(s
    / granularity)` blocks here.

    Raises:
        ValueError: the file cannot be read as such.
    """
    file = Path(path)
    if not file.is_file():
        raise _file_error(path, "does not exist")
    try:
        parse = tomli.loads if file.suffix == ".toml" else json.loads
        content = parse(file.read_text())
    except ValueError as error:  # both parsers' errors are
        raise _file_error(path, f"cannot be read: {error}") from None
    layers = content.get("layers") if isinstance(content, dict) else content
    if not isinstance(layers, list) or not all(isinstance(x, dict) for x in layers):
        raise _file_error(
            path, "must hold a list of layers, each a table from head to budget"
        )
    return layers


def _file_error(path: str, what: str) -> ValueError:
    return ValueError(f"sparse_attention.budget_file ('{path}') {what}")


def _file_layer(path: str, layer: int, heads: int) -> dict[int, Any]:
    """Entries of one layer by head."""
    layers = read_budget_file(path)
    if not 0 <= layer < len(layers):
        raise _file_error(
            path, f"has {len(layers)} layers, the model asks for layer {layer}"
        )
    names = [str(head) for head in range(heads)]
    for head in layers[layer]:
        if head not in names:
            raise _file_error(
                path,
                f"names head {head} in layer {layer}, the model has heads 0 to "
                f"{heads - 1} ({heads} heads)",
            )
    return {int(head): entry for head, entry in layers[layer].items()}


def _parse_entry(
    entry: Any, config: SparseAttention
) -> tuple[tuple[float, int], tuple[float, int]]:
    """(share, cap) of verticals in tokens and of slashes in blocks."""
    match entry:
        case ["vertical_and_slash", int() as v, int() as s, *_]:
            vertical, slash = (1.0, v), (1.0, s)
        case [
            "flex_vertical_and_slash",
            [int() | float() as p_v, int() as v],
            [int() | float() as p_s, int() as s],
            *_,
        ]:
            vertical, slash = (float(p_v), v), (float(p_s), s)
        case _:
            raise _file_error(
                config.budget_file,
                'must give a head ["vertical_and_slash", v, s, score] or '
                '["flex_vertical_and_slash", [p_v, cap_v], [p_s, cap_s], score], '
                f"not {entry}",
            )
    blocks = math.ceil(slash[1] / config.granularity)
    for name, asked, cap in (
        ("max_vertical", vertical[1], config.max_vertical),
        ("max_slash", blocks, config.max_slash),
    ):
        if asked > cap:
            raise ValueError(
                f"sparse_attention.{name} ({cap}) is below what "
                f"sparse_attention.budget_file asks for ({asked})"
            )
    for name, asked in (("sink", vertical[1]), ("local_window", blocks)):
        if asked < getattr(config, name):
            raise ValueError(
                f"sparse_attention.{name} ({getattr(config, name)}) is more than "
                f"sparse_attention.budget_file allows a head ({asked})"
            )
    for p in (vertical[0], slash[0]):
        if not 0.0 < p <= 1.0:
            raise _file_error(config.budget_file, f"share ({p}) must be in (0, 1]")
    return vertical, (slash[0], blocks)

"""Rates of a machine, read from a table in `recipes/hardware` or from the user's own.

The tables say beside each number where it comes from. Rates of attention count the
blocks that are *executed* (granularity squared pairs, 4 D FLOP a pair forward and 10 D
backward), half-empty ones as whole ones: that is what `work` counts.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import tomli
import torch

FOLDER = Path(__file__).parent.parent / "hardware"
BACKENDS = ("flash", "triton", "flex")  # in the order in which "auto" prefers them
FLASH_HEAD_DIMS = (64, 96, 128)

T = TypeVar("T")


@dataclass(frozen=True)
class Rate:
    """TFLOP/s in each direction."""

    forward_tflops: float
    backward_tflops: float


@dataclass(frozen=True)
class Backend:
    """What a backend makes of the two kinds of step."""

    slash: Rate
    column: Rate
    host_forward_ms: float  # of the CPU, per call of the operator on one rank
    host_backward_ms: float


@dataclass(frozen=True)
class Link:
    """What one GPU sends to the next one, in one direction."""

    gb_per_s: float
    latency_us: float

    def ms(self, size: float, messages: float = 1.0) -> float:
        """Time of `size` bytes in so many messages, one after the other."""
        return size / self.gb_per_s / 1e6 + messages * self.latency_us / 1e3


@dataclass(frozen=True)
class Hardware:
    """A machine: a GPU, its neighbours, and the network."""

    name: str
    memory_gib: float  # of one GPU
    workspace_mib: float  # that libraries keep in torch's allocator
    linear_tflops: float  # bf16 matrix products of a model's sizes
    hbm_gb_per_s: float  # of kernels that only move data
    kernel_us: float  # smallest kernel, queued
    dense: Rate  # dense causal attention, kept pairs
    search_fixed_ms: float
    search_ns_per_head_token: float  # of local tokens
    gather_columns_ms: float
    scatter_columns_ms: float
    host_search_ms: float
    host_ring_step_ms: float  # of the CPU, per further step of a ring and direction
    host_layer_ms: float  # of the CPU, the rest of a compiled layer, both directions
    host_eager_layer_ms: float  # the same of a layer that is not compiled
    inner: Link  # within a node
    outer: Link  # between nodes
    backends: dict[str, Backend]

    def hbm_ms(self, size: float) -> float:
        """Time to move so many bytes to and from memory."""
        return size / self.hbm_gb_per_s / 1e6

    def linear_ms(self, flop: float) -> float:
        return flop / self.linear_tflops / 1e9


def choose_backend(
    hardware: Hardware,
    asked: str,
    granularity: int,
    head_dim: int,
    deterministic: bool = False,
) -> str:
    """The backend that a run takes; "auto" prefers as the ring does.

    Args:
        deterministic: `debug.deterministic`.

    Raises:
        ValueError: the table has no rates of it, or it cannot run such a model.
    """
    obstacles = {
        name: _obstacle(hardware, name, granularity, head_dim) for name in BACKENDS
    }
    if deterministic:
        obstacles["flash"] = "debug.deterministic is set, and it does not repeat"
    if asked == "auto":
        able = [name for name in BACKENDS if not obstacles[name]]
        if not able:
            raise ValueError(f"sparse_attention.backend ('auto'): {obstacles}")
        return able[0]
    # "eager" is dense math, which nobody would plan for.
    obstacle = obstacles.get(asked, f"it is not one of {list(BACKENDS)}")
    if obstacle:
        raise ValueError(
            f"sparse_attention.backend ('{asked}') cannot be reckoned: {obstacle}; "
            "set --backend"
        )
    return asked


def _obstacle(hardware: Hardware, name: str, granularity: int, head_dim: int) -> str:
    """As `mtraining_flex.ring.backends` would say it on the machine itself."""
    from kernels_triton.common import check_supported  # imports triton

    if name not in hardware.backends:
        return f"the table of {hardware.name} has {sorted(hardware.backends)} alone"
    if name != "triton" and granularity != 128:
        return f"sparse_attention.granularity ({granularity}) must be 128"
    if name == "flash" and head_dim not in FLASH_HEAD_DIMS:
        return f"head_dim ({head_dim}) must be one of {list(FLASH_HEAD_DIMS)}"
    try:
        if name != "flex":
            check_supported(granularity, head_dim, torch.bfloat16)
    except ValueError as error:
        return str(error)
    return ""


def load_hardware(name: str) -> Hardware:
    """A table by name ("h200", "a100") or by the path of a TOML file.

    Raises:
        ValueError: there is none, or a number is missing, unknown or not positive.
    """
    own = FOLDER / f"{name}.toml"
    file = own if own.is_file() else Path(name)
    if not file.is_file():
        known = sorted(path.stem for path in FOLDER.glob("*.toml"))
        raise ValueError(
            f"--hardware ('{name}') is neither a file nor one of {known}"
        ) from None
    try:
        table = tomli.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"--hardware {file}: cannot be read: {error}") from None
    where = f"--hardware {file}"
    backends = table.pop("backends", {})
    if not isinstance(backends, dict) or not backends:
        raise ValueError(f"{where}: needs at least one table [backends.NAME]")
    for key in backends:
        if key not in BACKENDS:
            raise ValueError(f"{where}: backends.{key} must be one of {BACKENDS}")
    made = {key: _build(Backend, backends[key], where, key) for key in backends}
    return _build(Hardware, table, where, "", backends=made)


def _build(cls: type[T], table: Any, where: str, prefix: str, **given: Any) -> T:
    """A dataclass from a TOML table of the same keys."""
    if not isinstance(table, dict):
        raise ValueError(f"{where}: {prefix} must be a table, got {table!r}")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    label = f"{prefix}." if prefix else ""
    for key in table:
        if key not in known or key in given:
            raise ValueError(f"{where}: unknown key {label}{key}")
    values = dict(given)
    for key, field in known.items():
        if key in given:
            continue
        if key not in table:
            raise ValueError(f"{where}: {label}{key} is missing")
        value: Any = table[key]
        nested: Any = field.type
        if nested in (Rate, Link):
            value = _build(nested, value, where, f"{label}{key}")
        elif nested is str:
            value = str(value)
        elif not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{where}: {label}{key} ({value!r}) must be a number")
        elif value < 0 or (value == 0 and not key.endswith(("_ms", "_us", "_mib"))):
            raise ValueError(f"{where}: {label}{key} ({value}) must be positive")
        values[key] = value
    return cls(**values)

"""Which backend computes the steps here, and why.

An explicit backend that cannot run is an error; only "auto" chooses, and the choice is
logged once by `parallelize`. Nothing falls back.
"""

import importlib.util
from functools import lru_cache

import torch

from mtraining_flex.config import BACKENDS


def resolve_backend(
    backend: str,
    device_type: str,
    granularity: int,
    dtype: torch.dtype,
    head_dim: int,
    documents: bool = False,
) -> tuple[str, str]:
    """The backend that will run, and why.

    Args:
        documents: whether sequences have several documents, or padding.

    Raises:
        ValueError: an explicit backend that this machine or this call cannot run.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _resolve(
        backend, device_type, granularity, dtype, head_dim, documents, deterministic
    )


# Backends that "auto" tries on a GPU, fastest first, and why this order: forward +
# backward of one H200 at 131072 tokens, 16/2 heads, D 128, bf16, 5% slashes and 1024
# columns (recipes/results/h200_kernels.md). "flash" is before "triton" at 32/8 heads
# and from 64K to 512K tokens, too.
MEASURED = {
    "flash": "35 ms at 131072 tokens on an H200, against 37 triton and 52 flex",
    "triton": "37 ms at 131072 tokens on an H200, against 52 flex",
    "flex": "52 ms at 131072 tokens on an H200",
}


@lru_cache(maxsize=64)
def _resolve(
    backend: str,
    device_type: str,
    granularity: int,
    dtype: torch.dtype,
    head_dim: int,
    documents: bool,
    deterministic: bool,
) -> tuple[str, str]:
    if backend not in BACKENDS:
        raise ValueError(
            f"sparse_attention.backend ('{backend}') must be one of {list(BACKENDS)}"
        )
    obstacles = {
        name: _obstacle(
            name, device_type, granularity, dtype, head_dim, documents, deterministic
        )
        for name in ("flash", "flex", "triton", "eager")
    }
    if backend != "auto":
        if obstacles[backend]:
            raise ValueError(
                f"sparse_attention.backend ('{backend}') cannot run here: "
                f"{obstacles[backend]}"
            )
        return backend, "asked for"
    if device_type == "cpu":
        return "eager", "the CPU has no compiled backward"
    passed: list[str] = []
    for name, facts in MEASURED.items():
        if not obstacles[name]:
            return name, "; ".join([f"fastest that runs here ({facts})", *passed])
        passed.append(f"not {name}: {obstacles[name]}")
    # Never dense math on a GPU unasked.
    raise ValueError(
        f"sparse_attention.backend ('auto') finds nothing to run: {'; '.join(passed)}; "
        "set 'eager' to run dense math"
    )


def _has_flash() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:  # the parent package is missing
        return False


def _obstacle(
    name: str,
    device_type: str,
    granularity: int,
    dtype: torch.dtype,
    head_dim: int,
    documents: bool,
    deterministic: bool,
) -> str:
    """Why a backend cannot run; "" if it can."""
    if name == "eager":
        return ""
    if name == "triton":
        return _triton_obstacle(device_type, granularity, dtype, head_dim)
    if device_type != "cuda":
        return f"it needs a CUDA device, got '{device_type}'"
    if granularity != 128:
        return f"sparse_attention.granularity ({granularity}) must be 128"
    if dtype == torch.float64:
        return "it computes no float64"
    if name == "flash":
        if documents:
            return "its blocks are whole or causal, and those of documents are neither"
        if deterministic:
            return "its gradients do not repeat bitwise, and debug.deterministic is set"
        if not _has_flash():
            return "the package flash-attn-4 is not installed (extra 'flash')"
        if torch.cuda.get_device_capability()[0] != 9:
            return f"device capability {torch.cuda.get_device_capability()} is not 9.x"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it computes bfloat16 and float16, got {dtype}"
        if head_dim not in (64, 96, 128):
            return f"head_dim ({head_dim}) must be 64, 96 or 128"
        # Columns go through our kernels.
        return _triton_obstacle(device_type, granularity, dtype, head_dim)
    return ""


def _triton_obstacle(
    device_type: str, granularity: int, dtype: torch.dtype, head_dim: int
) -> str:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    from kernels_triton import common

    try:
        common.check_supported(granularity, head_dim, dtype)
        common.check_device_type(device_type, dtype)
    except ValueError as error:
        return str(error)
    return ""

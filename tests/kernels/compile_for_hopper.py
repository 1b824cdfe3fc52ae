"""Compile the kernels for an H200 on a machine without one; nothing is launched.

    python -m tests.kernels.compile_for_hopper

Triton's interpreter runs kernels as Python and accepts what the compiler refuses, such
as a name that holds a vector and later a number. So the wrappers run here on CPU
tensors, and each launch ends where its cubin is there. Prints its kernels as JSON.
"""

import json
import time
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels_triton import block_sparse, merge, probe, vertical_slash
from tests.kernels import sanitize
from tests.kernels.test_vertical_slash import Case, make

CASES = [
    Case(1, 4, 2, 2, 128, 128, NC=128),
    Case(1, 4, 2, 2, 128, 128, NC=128, documents=True),
    Case(1, 4, 2, 4, 128, 128, NC=128, X=2, windowed=True),
    Case(1, 4, 2, 2, 80, 64, NC=64, documents=True),
]


class Hopper:
    """A driver with a device to compile for and none to launch on."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def only_compile(built: dict[str, set[str]]) -> None:
    """From here on a launch compiles, and notes its kernel and code size."""
    run = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.asm["cubin"]
        built.setdefault(self.__name__, set()).add(kernel.hash)

    JITFunction.run = compile_it
    driver.set_active(Hopper())
    for module in (block_sparse, merge, probe, vertical_slash):
        module.check_device = lambda x: None


def vertical_slashes() -> None:
    for case in CASES:
        problem = make(case, torch.bfloat16)
        problem.run(vertical_slash, case, check=False)
        if case.documents or case.X > 1:
            continue
        for part in (replace(problem, columns=None), replace(problem, slashes=None)):
            out, lse = part.forward(vertical_slash, case, check=False)
            running = (out.float(), lse)
            part.forward(vertical_slash, case, running=running, check=False)
            part.backward(vertical_slash, case, lse, lse, running=out, check=False)
    case = CASES[1]
    make(case, torch.float32).run(vertical_slash, case, check=False)


def main() -> None:
    built: dict[str, set[str]] = {}
    only_compile(built)
    start = time.perf_counter()
    vertical_slashes()
    sanitize.others(128)
    counts = {name: len(variants) for name, variants in sorted(built.items())}
    print(json.dumps(counts))
    print(f"{sum(counts.values())} variants in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

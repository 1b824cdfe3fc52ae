"""Every kernel compiles for an H200, also on a machine without one."""

import json
import os
import subprocess
import sys

import pytest
import torch

KERNELS = {
    "_dkdv_kernel",
    "_dq_kernel",
    "_forward_kernel",
    "_merge_kernel",
    "_row_stats_kernel",
    "_scores_kernel",
    "column_dkdv_kernel",
    "delta_kernel",
    "dkdv_kernel",
    "dq_kernel",
    "forward_kernel",
}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="they are run here")
def test_all_kernels_compile(tmp_path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    built = json.loads(run.stdout.splitlines()[0])
    assert set(built) == KERNELS, built
    assert sum(built.values()) >= 30, built

"""How a process of a CPU run ends."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, os, sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from mtraining_flex import cpu_device

rank = int(os.fork() == 0)
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
for step in range(2):
    for _ in range(2):
        DTensor.from_local(torch.ones(64), mesh, [Shard(0)]).full_tensor()
    if rank == 0 or step == 1:
        continue
    # What a busy machine does by chance: gloo's threads run last, after `wait()`.
    core = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, core)
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            if "runloop" in file.read():
                os.sched_setaffinity(int(task), core)
                os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
dist.destroy_process_group()
if rank == 0:
    status = os.waitstatus_to_exitcode(os.wait()[1])
    atexit.register(print, "handler", status)
    print("done", end=" ")
cpu_device.leave()
"""


def test_a_process_with_gloo_ends_well(tmp_path: Path) -> None:
    """Exit code 0 on both ranks, exit handlers run, and no output is lost."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done handler 0\n", done.stderr

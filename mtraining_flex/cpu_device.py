"""Let torchtitan be imported and run where there is no accelerator.

torchtitan 0.2.2 takes its device type and module once, at import, and knows no CPU.
`install()` must therefore run before torchtitan is first imported: importing this
package does it. On a machine with a GPU it changes nothing.
"""

import atexit
import logging
import os
import sys
from types import ModuleType
from typing import Any, NoReturn

import torch


class _CpuProperties:
    """The one device property that torchtitan reads."""

    def __init__(self) -> None:
        self.total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_module() -> ModuleType:
    """A module with what torchtitan asks of `torch.cuda`, for the CPU."""
    module = ModuleType("mtraining_flex.cpu")
    module.__dict__.update(
        {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[0] != "_"}
    )
    module.__dict__.update(
        set_device=lambda device: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda device=None: "CPU",
        get_device_properties=lambda device=None: _CpuProperties(),
        memory_stats=lambda device=None: _process_memory(),
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
        synchronize=lambda device=None: None,
    )
    return module


def _process_memory() -> dict[str, int]:
    """Peak memory of this process, under the keys of the CUDA allocator."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    return {
        "active_bytes.all.peak": peak,
        "reserved_bytes.all.peak": peak,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def available_device_type() -> str:
    """The accelerator that is here, or "cpu", also with a CUDA build of torch."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def install() -> None:
    """Name the CPU as the device if there is no accelerator. Safe to call twice.

    If torchtitan was imported before, it has taken another device and it is too late:
    `check` says so before a run starts.
    """
    if torch.accelerator.is_available() or "torchtitan.tools.utils" in sys.modules:
        return
    module = _cpu_module()
    utils: Any = torch._utils
    get_device_module = utils._get_device_module
    # Two attributes of torch, not of torchtitan: no file is edited, and each keeps its
    # meaning for every other device.
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda device_type: (
        module if device_type == "cpu" else get_device_module(device_type)
    )


def check() -> None:
    """Make sure that torchtitan runs on the device that exists.

    Raises:
        RuntimeError: torchtitan was imported before this package.
    """
    from torchtitan.tools.utils import device_type

    expected = available_device_type()
    if device_type != expected:
        raise RuntimeError(
            f"torchtitan was imported before mtraining_flex and took device type "
            f"'{device_type}', but this machine has '{expected}': import "
            "mtraining_flex first"
        )


def leave() -> NoReturn:
    """End a process that has used gloo, after its work: exit handlers, flush, exit 0.

    gloo's threads let go of a collective's tensors after `wait()` has returned, and
    nothing joins them. One that is late needs the interpreter while Python finalizes,
    and the process ends with SIGABRT ("terminate called without an active exception"):
    a run that has saved everything would be reported as failed.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)

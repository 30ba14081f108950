"""The machine: what numbers are measured on, its memory, and its clock."""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HOPPER = {"bf16": 989.4, "fp16": 989.4, "TF32": 494.7, "fp32": 66.9, "fp64": 66.9}
PEAK_TFLOPS = {  # of dense products, as published
    "AMD Instinct MI300X": {
        "bf16": 1307.4, "fp16": 1307.4, "TF32": 653.7, "fp32": 163.4, "fp64": 163.4
    },
    "NVIDIA H100 80GB HBM3": HOPPER,
    "NVIDIA H200": HOPPER,
}  # fmt: skip


def environment(device: torch.device) -> dict:
    """Return what numbers are measured on, as results of the scripts have it."""
    import torch

    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = text.partition("model name\t: ")[2].partition("\n")[0] or platform.machine()
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else name,
        "cpu_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "triton": getattr(sys.modules.get("triton"), "__version__", None),
    }


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error is, or covers, one of memory: the end of a capture raises its own."""
    signs = ("MemoryError", "out of memory", "allocate memory", "ALLOC_FAILED")
    covers = error is not None and is_out_of_memory(error.__context__)
    return covers or any(sign in repr(error) for sign in signs)


def free_memory() -> None:
    """Let go of what the runs before held on the device, graphs of torch.compile included."""
    import torch

    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        # some lie in the memory of graphs that are gone, which they would keep
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def memory_mb(device: str) -> float:
    """Return the memory of the device, that of the machine for a CPU."""
    if device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e6
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 1e6


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return how long this takes, by the device's clock where there is one."""
    import torch

    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3

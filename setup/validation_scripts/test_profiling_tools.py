#!/usr/bin/env python3
"""Check the profilers: PyTorch's own on every track, ROCm's on the rocm track.

Example: python setup/validation_scripts/test_profiling_tools.py --track rocm
"""

import os
import shutil
import sys
from functools import partial

import checks
from checks import Problem, Table

# A tool, its package, what needs it, and whether every release of ROCm has it.
TOOLS = (
    ("rocprofv3", "rocprofiler-sdk", "run_rocprofv3.sh: kernels, traces, counters", True),
    ("rocprof-sys-run", "rocprofiler-systems", "run_rocprof_sys.sh: timeline", True),
    ("rocprof-compute", "rocprofiler-compute", "run_rocprof_compute.sh: roofline", True),
    ("rocpd", "rocprofiler-sdk", "the databases of rocprofv3 (ROCm 7 and newer)", False),
)


def profile_matmul(track: str) -> str:
    """PyTorch's profiler sees the operators of a matrix product, and on a GPU its kernels."""
    checks.describe_torch(track)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler writes between our lines
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    gpu = track != "cpu"
    value = torch.ones(64, 64, device="cuda" if gpu else "cpu")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as profiler:
        value @ value
        if gpu:
            torch.cuda.synchronize()
    events = profiler.events()
    kernels = sum(event.device_type == DeviceType.CUDA for event in events)
    found = f"sees {len(events)} events, {kernels} GPU kernels"
    if not (kernels if gpu else events):
        raise Problem(found)
    return found


def find_profiler(name: str, package: str) -> str:
    """A tool on PATH that answers --help."""
    if not shutil.which(name):
        if tool := checks.find_tool(name):
            raise Problem(f"{tool} is not on PATH", f'export PATH="{checks.ROCM}/bin:$PATH"')
        raise Problem("missing")
    try:
        checks.output_of([name, "--help"])
    except Problem as problem:
        # what rocprof-compute needs of Python
        packages = checks.ROCM / "libexec" / package / "requirements.txt"
        mend = f"python3 -m pip install -r {packages}" if packages.is_file() else f"{name} --help"
        raise Problem(str(problem), mend) from None
    return shutil.which(name)


def fill(table: Table, track: str) -> None:
    """All rows."""
    mend = "end other profilers that use this GPU; python -m torch.utils.collect_env"
    table.row("torch.profiler", partial(profile_matmul, track), "kernel counts", mend)
    if track != "rocm":
        return
    for name, package, purpose, needed in TOOLS:
        find = partial(find_profiler, name, package)
        table.row(name, find, purpose, checks.PACKAGE.format(package), needed)


if __name__ == "__main__":
    sys.exit(checks.validate("Profiling tools", fill, __doc__))

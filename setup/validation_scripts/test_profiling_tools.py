#!/usr/bin/env python3
"""Check the profilers: PyTorch's own on every track, ROCm's on the rocm track.

Examples:
  python setup/validation_scripts/test_profiling_tools.py
  python setup/validation_scripts/test_profiling_tools.py --track rocm
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import sys

import checks
from checks import Answers, Check, check

ROCTX = "librocprofiler-sdk-roctx.so"
# A tool, its package, what needs it, and whether every release of ROCm has it.
TOOLS = (
    ("rocprofv3", "rocprofiler-sdk", "run_rocprofv3.sh: kernels, traces, counters", True),
    ("rocprof-sys-run", "rocprofiler-systems", "run_rocprof_sys.sh: timeline", True),
    ("rocprof-compute", "rocprofiler-compute", "run_rocprof_compute.sh: roofline", True),
    ("rocpd", "rocprofiler-sdk", "the databases of rocprofv3 (ROCm 7 and newer)", False),
)


def profile_matmul(gpu: bool) -> tuple[int, int]:
    """Numbers of events and of device kernels that the profiler sees in a matrix product."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    value = torch.ones(64, 64, device="cuda" if gpu else "cpu")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as profiler:
        value @ value
        if gpu:
            torch.cuda.synchronize()
    events = profiler.events()
    kernels = sum(event.device_type == DeviceType.CUDA for event in events)
    return len(events), kernels


def load_roctx() -> str:
    """Load the library as --enable-rocm-profiling does, after PyTorch, which may bring it."""
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    ctypes.CDLL(ROCTX).roctxProfilerPause  # noqa: B018 - it may not be there
    return "loads"


def probe(track: str) -> None:
    """In a child process: PyTorch's profiler, and the marker library where it is needed."""
    checks.probe_torch()
    if track == "rocm":
        checks.answer(ROCTX, load_roctx)
    checks.answer("profile", lambda: profile_matmul(track != "cpu"))


def check_torch_profiler(answers: Answers, track: str) -> Check:
    """PyTorch's profiler sees operators, and on a GPU its kernels."""
    seen, problem = answers["profile"]
    mend = "end other profilers that use this GPU; python -m torch.utils.collect_env"
    if torch := checks.torch_problem(answers, track):
        problem = f"torch: {torch}"
        mend = checks.torch_command(torch, track)
    found = f"sees {seen[0]} events, {seen[1]} GPU kernels" if seen else ""
    if not problem and not seen[track != "cpu"]:
        problem = found
    return check("torch.profiler", found, "kernel counts", problem, mend)


def check_tool(name: str, package: str, purpose: str, needed: bool) -> Check:
    """A tool is on PATH and answers --help."""
    if not shutil.which(name):
        if tool := checks.find_tool(name):
            mend = f'export PATH="{checks.ROCM}/bin:$PATH"'
            return check(name, "", purpose, f"{tool} is not on PATH", mend, needed)
        mend = checks.package_command(package)
        return check(name, "", purpose, "missing", mend, needed)
    _, failure = checks.run_program([name, "--help"])
    # what rocprof-compute needs of Python
    packages = checks.ROCM / "libexec" / package / "requirements.txt"
    mend = f"python3 -m pip install -r {packages}" if packages.is_file() else f"{name} --help"
    return check(name, shutil.which(name), purpose, failure, mend, needed)


def gather(track: str) -> list[Check]:
    """All rows."""
    answers = checks.in_child(probe, track)
    rows = [check_torch_profiler(answers, track)]
    if track != "rocm":
        return [*rows, check("ROCm's profilers", f"not needed on the {track} track", "AMD GPUs")]
    rows += [check_tool(*tool) for tool in TOOLS]
    library = checks.ROCM / "lib" / ROCTX
    path = f'export LD_LIBRARY_PATH="{library.parent}:$LD_LIBRARY_PATH"'
    mend = path if library.exists() else checks.package_command("rocprofiler-sdk-roctx")
    found, problem = answers[ROCTX]
    return [*rows, check(ROCTX, found, "--enable-rocm-profiling", problem, mend)]


def main(argv: list[str] | None = None) -> int:
    return checks.validate("Profiling tools", gather, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())

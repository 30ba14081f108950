#!/usr/bin/env python3
"""Check the profilers: PyTorch's own on every track, ROCm's on the rocm track.

Examples:
  python setup/validation_scripts/test_profiling_tools.py
  python setup/validation_scripts/test_profiling_tools.py --track rocm
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import sys

import checks
from checks import Check, check

ROCTX = "librocprofiler-sdk-roctx.so"
# What a tool is called (older name second), its package, and what needs it.
SYS, COMPUTE = "rocprofiler-systems", "rocprofiler-compute"
ROCM_TOOLS = (
    (("rocprofv3",), "rocprofiler-sdk", "run_rocprofv3.sh: kernels, traces, counters"),
    (("rocprof-sys-run", "omnitrace-run"), SYS, "run_rocprof_sys.sh: timeline of host and GPU"),
    (("rocprof-compute",), COMPUTE, "run_rocprof_compute.sh: roofline, metrics of a kernel"),
    (("rocpd",), "rocprofiler-sdk", "reading the databases that rocprofv3 of ROCm 7 writes"),
)
ROCTX_PURPOSE = "--enable-rocm-profiling"
# rocprof-compute has counters and metrics for these only: MI100, MI200, MI300 and MI350.
DATA_CENTRE_GPU = re.compile(r"gfx908|gfx90a|gfx94.|gfx95.")


def profile_matmul(gpu: bool) -> dict:
    """Numbers of events and of device kernels that the profiler sees in a matrix product."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    device = "cuda" if gpu else "cpu"
    value = torch.ones(64, 64, device=device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as profiler:
        value @ value
        if gpu:
            torch.cuda.synchronize()
    events = profiler.events()
    kernels = sum(event.device_type == DeviceType.CUDA for event in events)
    return {"events": len(events), "kernels": kernels}


def load_roctx() -> str:
    """Load the library as --enable-rocm-profiling does, after PyTorch, which may bring it."""
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    ctypes.CDLL(ROCTX).roctxProfilerPause  # noqa: B018 - it may not be there
    return "loads"


def probe(track: str) -> None:
    """In a child process: PyTorch's profiler, and the marker library where it is needed."""
    checks.answer_with("torch", checks.describe_torch)
    if track == "rocm":
        checks.answer_with("roctx", load_roctx)
    checks.answer_with("profile", lambda: profile_matmul(track != "cpu"))


def check_torch_profiler(answers: dict, track: str) -> Check:
    """PyTorch's profiler sees operators, and on a GPU its kernels."""
    what, purpose = "torch.profiler", "--enable-pytorch-profiler, kernel counts"
    if problem := checks.torch_problem(answers, track):
        return check(
            what, False, f"torch: {problem}", purpose, checks.torch_command(problem, track)
        )
    if error := checks.problem_of(answers, "profile"):
        return check(what, False, error, purpose, "python -m torch.utils.collect_env")
    result = answers["profile"]
    wanted = "events" if track == "cpu" else "kernels"
    found = f"sees {result['events']} events, {result['kernels']} GPU kernels"
    mend = "end other profilers that use this GPU, then try again"
    return check(what, result[wanted] > 0, found, purpose, mend)


def check_tool(names: tuple[str, ...], package: str, purpose: str, required: bool = True) -> Check:
    """A tool is on PATH under one of its names and answers --help."""
    name = next((name for name in names if shutil.which(name)), None)
    if not name:
        installed = next((tool for name in names if (tool := checks.find_tool(name))), None)
        found = f"{installed} is not on PATH" if installed else "missing"
        known = next((name for name in names if checks.find_tool(name)), names[0])
        return check(names[0], False, found, purpose, checks.tool_command(known, package), required)
    _, failure = checks.run_program([shutil.which(name), "--help"])
    # what rocprof-compute needs of Python
    packages = checks.rocm_path() / "libexec" / package / "requirements.txt"
    mend = f"python3 -m pip install -r {packages}" if packages.is_file() else f"{name} --help"
    found = failure or shutil.which(name)
    return check(names[0], not failure, found, purpose, mend, required)


def check_rocm_tools(answers: dict) -> list[Check]:
    """The rows of ROCm's profilers."""
    version = checks.rocm_version()
    tool = checks.find_tool("rocminfo")
    gpus = checks.gpu_architectures(checks.run_program([tool])[0]) if tool else []
    rows = []
    for names, package, purpose in ROCM_TOOLS:
        required = True
        if names[0] == "rocprof-compute" and gpus and not any(map(DATA_CENTRE_GPU.fullmatch, gpus)):
            reason = f"not for {gpus[0]}: needs a data-centre GPU (gfx908, gfx90a, gfx94x, gfx95x)"
            rows.append(checks.unchecked(names[0], reason, purpose))
            continue
        if names[0] == "rocpd":
            required = version is not None and version >= (7,)
            if version and not required:
                rows.append(checks.unchecked(names[0], "comes with ROCm 7", purpose))
                continue
        rows.append(check_tool(names, package, purpose, required))
    library = checks.rocm_path() / "lib" / ROCTX
    path = f'export LD_LIBRARY_PATH="{library.parent}:$LD_LIBRARY_PATH"'
    mend = path if library.exists() else checks.package_command("rocprofiler-sdk-roctx")
    rows.append(checks.answer_check(answers, "roctx", ROCTX, ROCTX_PURPOSE, mend))
    return rows


def gather(track: str) -> list[Check]:
    """All rows."""
    answers = checks.in_child(probe, track)
    rows = [check_torch_profiler(answers, track)]
    if track == "rocm":
        rows += check_rocm_tools(answers)
    else:
        rows += [checks.unneeded(names[0], purpose, track) for names, _, purpose in ROCM_TOOLS]
        rows.append(checks.unneeded(ROCTX, ROCTX_PURPOSE, track))
    return rows


main = checks.validation("Profiling tools", gather, __doc__)

if __name__ == "__main__":
    sys.exit(main())

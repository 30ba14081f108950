#!/usr/bin/env python3
"""Check that the version scripts can run here: Python, PyTorch, Triton, a GPU, memory and disk
space.

Examples:
  python setup/validation_scripts/test_environment.py
  python setup/validation_scripts/test_environment.py --track rocm
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

import checks
from checks import Check, check

from lab.script import import_file

GB = 1e9
MIN_MEMORY, MIN_DISK = 4 * GB, 1 * GB  # below these there is a remark, not a failure
PACKAGES = {
    "numpy": "everything",
    "gemmi": "--structure (real proteins)",
    "matplotlib": "plots (docs/START.md, analysis tools)",
    "deepspeed": "run_deepspeed_flops.py (works without)",
}


def version_scripts() -> list[Path]:
    """The version scripts that are there."""
    return sorted(checks.ROOT.glob("tiny_*_v*.py"))


def train_step(device: str) -> str:
    """A matrix product and its gradient on the device, compared with what they must be."""
    import torch

    value = torch.ones(64, 64, device=device, requires_grad=True)
    (value @ value).sum().backward()
    if not torch.equal(value.grad.cpu(), torch.full((64, 64), 128.0)):
        raise ArithmeticError("the gradient is wrong")
    return f"right on {device}"


def list_gpus() -> list[str]:
    """Name and memory of each visible GPU."""
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_properties(index).name
        found.append(f"{name}, {free / GB:.0f} of {total / GB:.0f} GB free")
    return found


def module_version(name: str) -> str:
    """Import the module and return its version."""
    return str(getattr(importlib.import_module(name), "__version__", "version unknown"))


def help_of(script: Path) -> int:
    """Length of what `script --help` prints; anything but status 0 is an error."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            import_file(script).main(["--help"])
        except SystemExit as end:
            if end.code:
                raise
    if not text.getvalue():
        raise RuntimeError("--help prints nothing")
    return len(text.getvalue())


def probe(device: str, scripts: list[str]) -> None:
    """In a child process: everything that imports PyTorch. What was found before a crash is
    kept."""
    checks.answer_with("torch", checks.describe_torch)
    checks.answer_with("step", lambda: train_step(device))
    checks.answer_with("gpus", list_gpus)
    checks.answer_with("triton", lambda: module_version("triton"))
    for script in scripts:
        checks.answer_with(script, lambda script=script: help_of(Path(script)))


def host_memory() -> float | None:
    """Bytes of memory that are available, None if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return float(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return None


def problem_of(answers: dict, name: str) -> str:
    """Why a part of the probe failed, '' if it did not."""
    value = answers.get(name, {"error": answers.get("failure", "not reached"), "missing": None})
    if not isinstance(value, dict) or "error" not in value:
        return ""
    return "missing" if value["missing"] == name else value["error"]


def check_gpus(answers: dict, track: str) -> Check:
    """The row of the GPUs that PyTorch sees."""
    gpus, purpose = answers.get("gpus", []), f"the {track} track"
    if isinstance(gpus, list) and gpus:
        return check("GPU", True, f"{len(gpus)}: {gpus[0]}", purpose)
    rocm = track == "rocm"
    variables = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if rocm else ()
    if hidden := checks.hiding_variable((*variables, "CUDA_VISIBLE_DEVICES")):
        found = f"hidden by {hidden}={os.environ[hidden]!r}"
        return check("GPU", False, found, purpose, f"unset {hidden}")
    script = checks.here(Path(__file__).with_name("test_rocm_installation.py"))
    found = problem_of(answers, "gpus") or "PyTorch sees none"
    return check("GPU", False, found, purpose, f"python {script}" if rocm else "nvidia-smi")


def check_scripts(answers: dict, track: str, triton: bool) -> list[Check]:
    """One row for the scripts that answer --help, one for each that does not."""
    rows, good = [], 0
    for script in version_scripts():
        if isinstance(answers.get(str(script)), int):
            good += 1
            continue
        needs_triton = not triton and script.stem.endswith(("v3", "v4"))
        mend = (
            "python -m pip install triton"
            if needs_triton
            else f"python {checks.here(script)} --help"
        )
        required = track != "cpu" or not needs_triton
        problem = problem_of(answers, str(script))
        rows.append(check(script.name, False, problem, "this version", mend, required))
    if good or not rows:
        found = f"{good} answer --help" if good else f"none in {checks.ROOT}"
        rows.insert(0, check("version scripts", good > 0, found, "the exercises", "git status"))
    return rows


def check_torch(track: str) -> list[Check]:
    """The rows of everything that imports PyTorch."""
    gpu = track != "cpu"
    answers = checks.in_child(probe, "cuda" if gpu else "cpu", list(map(str, version_scripts())))
    rows = [checks.torch_check(answers, track)]
    works = rows[0].state == "ok"
    if works and gpu:
        rows.append(check_gpus(answers, track))
    elif not gpu:
        rows.append(checks.unneeded("GPU", "the nvidia and rocm tracks", track))
    purposes = {
        "step": ("training step", "everything"),
        "triton": ("triton", "V3 and V4 on a GPU, torch.compile there"),
    }
    if not works:
        waiting = [("GPU", f"the {track} track")] if gpu else []
        waiting += [*purposes.values(), ("version scripts", "everything")]
        return rows + [
            checks.unchecked(what, "needs torch", needed_for) for what, needed_for in waiting
        ]
    mends = {
        "step": checks.torch_command("broken", track),
        "triton": "python -m pip install triton",
    }
    for name, (what, needed_for) in purposes.items():
        error, required = problem_of(answers, name), gpu or name != "triton"
        if name == "step" and gpu and not answers.get("gpus"):
            rows.append(checks.unchecked(what, "needs a GPU", needed_for))
            continue
        found = error or answers[name]
        rows.append(check(what, not error, found, needed_for, mends[name], required))
    return rows + check_scripts(answers, track, triton=not problem_of(answers, "triton"))


def gather(track: str) -> list[Check]:
    """All rows."""
    found, enough = f"{platform.python_version()} ({sys.executable})", sys.version_info >= (3, 10)
    rows = [check("Python >= 3.10", enough, found, "everything", checks.setup_command(track))]
    rows += check_torch(track)
    for name, purpose in PACKAGES.items():
        rows.append(checks.package_check(name, purpose, required=purpose == "everything"))
    memory, mend = host_memory(), "add --batch-size 1 to each run"
    enough = memory is None or memory >= MIN_MEMORY
    found = "unknown" if memory is None else f"{memory / GB:.1f} GB available"
    rows.append(check("host memory", enough, found, "the default sizes", mend, required=False))
    disk, mend = shutil.disk_usage(".").free, "add --profile-dir ELSEWHERE"
    found = f"{disk / GB:.1f} GB free here"
    rows.append(check("disk space", disk >= MIN_DISK, found, "traces", mend, required=False))
    try:
        tempfile.TemporaryFile(dir=".").close()
        error = ""
    except OSError as problem:
        error = f"cannot write: {problem.strerror}"
    found = error or f"can write in {Path.cwd()}"
    rows.append(check("current directory", not error, found, "results", "cd ~"))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return checks.run_checks("Environment", gather, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())

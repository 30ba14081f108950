#!/usr/bin/env python3
"""Check that the version scripts can run here: Python, PyTorch, Triton, a GPU, other packages.

Examples:
  python setup/validation_scripts/test_environment.py
  python setup/validation_scripts/test_environment.py --track rocm
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from pathlib import Path

import checks
from checks import Answers, Check, check

PIP = "python -m pip install"
# Modules beside PyTorch: what needs them, the command that installs them.
PACKAGES = {
    "numpy": ("everything", f"{PIP} numpy"),
    "fusion_lab": ("exercises, analysis tools", f"{PIP} -e {checks.here(checks.ROOT)} --no-deps"),
    "matplotlib": ("plots (docs/START.md, analysis tools)", f"{PIP} matplotlib"),
    "gemmi": ("--structure (real proteins)", f"{PIP} gemmi"),
    "deepspeed": ("run_deepspeed_flops.py (works without)", f"{PIP} deepspeed"),
}


def train_step(device: str) -> str:
    """A matrix product and its gradient on the device, compared with what they must be."""
    import torch

    value = torch.ones(64, 64, device=device, requires_grad=True)
    (value @ value).sum().backward()
    if not torch.equal(value.grad.cpu(), torch.full((64, 64), 128.0)):
        raise ArithmeticError("the gradient is wrong")
    return f"right on {device}"


def list_gpus() -> list[str]:
    """The name of each visible GPU, and its memory."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus]


def triton_version() -> str:
    import triton

    return triton.__version__


def probe(device: str) -> None:
    """In a child process: everything that imports PyTorch. What it finds before a crash is kept."""
    checks.probe_torch()
    checks.answer("step", lambda: train_step(device))
    checks.answer("GPU", list_gpus)
    checks.answer("triton", triton_version)


def check_gpus(answers: Answers, track: str) -> Check:
    """The row of the GPUs that PyTorch sees."""
    gpus, problem = answers["GPU"]
    if gpus:
        return check("GPU", f"{len(gpus)}: {gpus[0]}", f"the {track} track")
    problem = problem or "PyTorch sees none"
    script = checks.here(Path(__file__).with_name("test_rocm_installation.py"))
    mend = f"python {script}" if track == "rocm" else "nvidia-smi"
    if variables := [name for name in os.environ if name.endswith("_VISIBLE_DEVICES")]:
        values = ", ".join(f"{name}={os.environ[name]!r}" for name in variables)
        problem = f"{problem}, perhaps hidden by {values}"
        mend = f"unset {' '.join(variables)}"
    return check("GPU", "", f"the {track} track", problem, mend)


def check_torch(track: str) -> list[Check]:
    """The rows of everything that imports PyTorch, the first alone where it cannot be used."""
    gpu = track != "cpu"
    answers = checks.in_child(probe, "cuda" if gpu else "cpu")
    rows = [checks.torch_check(answers, track)]
    if rows[0].state != "ok":
        return rows
    if gpu:
        rows.append(check_gpus(answers, track))
    if not gpu or rows[-1].state == "ok":
        step, problem = answers["step"]
        mend = checks.torch_command("broken", track)
        rows.append(check("training step", step, "everything", problem, mend))
    triton, problem = answers["triton"]
    purpose = "V3 and V4 on a GPU, torch.compile there"
    return [*rows, check("triton", triton, purpose, problem, f"{PIP} triton", gpu)]


def gather(track: str) -> list[Check]:
    """All rows."""
    old = "older than 3.10" if sys.version_info < (3, 10) else ""
    found = f"{platform.python_version()} ({sys.executable})"
    rows = [check("Python", found, "everything", old, checks.torch_command("broken", track))]
    rows += check_torch(track)
    for name, (purpose, mend) in PACKAGES.items():
        missing = "" if importlib.util.find_spec(name) else "missing"
        rows.append(check(name, "installed", purpose, missing, mend, purpose == "everything"))
    return rows


def main(argv: list[str] | None = None) -> int:
    return checks.validate("Environment", gather, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())

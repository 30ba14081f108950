#!/usr/bin/env python3
"""Check that the version scripts can run here: Python, PyTorch, Triton, a GPU, other packages, and
whether results can be written.

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
import sys
import tempfile
from pathlib import Path

import checks
from checks import Check, check

from fusion_lab.script import import_file

PACKAGES = {
    "numpy": "everything",
    "gemmi": "--structure (real proteins)",
    "matplotlib": "plots (docs/START.md, analysis tools)",
    "deepspeed": "run_deepspeed_flops.py (works without)",
}
INSTALL_TRITON = "python -m pip install triton"


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
    """The name of each visible GPU, and its memory."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus]


def module_version(name: str) -> str:
    """Import the module and return its version."""
    return str(getattr(importlib.import_module(name), "__version__", "version unknown"))


def triton_version() -> str:
    """Triton's version, with a note if that release was not tried."""
    version = module_version("triton")
    return version + checks.not_tried("triton", version)


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
    checks.answer_with("triton", triton_version)
    for script in scripts:
        checks.answer_with(script, lambda script=script: help_of(Path(script)))


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
    found = checks.problem_of(answers, "gpus") or "PyTorch sees none"
    return check("GPU", False, found, purpose, f"python {script}" if rocm else "nvidia-smi")


def check_scripts(answers: dict, required: bool) -> list[Check]:
    """One row for the scripts that answer --help, one for each that does not.

    Those that need Triton are `required` or not, where it is not there.
    """
    scripts, rows = version_scripts(), []
    failed = [script for script in scripts if not isinstance(answers.get(str(script)), int)]
    if good := len(scripts) - len(failed):
        found = f"{good} answer --help"
        rows.append(check("version scripts", True, found, "the exercises"))
    elif not scripts:
        found = f"none in {checks.ROOT}"
        rows.append(check("version scripts", False, found, "the exercises", "git status"))
    for script in failed:
        without = script.stem.endswith(("v3", "v4")) and checks.problem_of(answers, "triton")
        mend = INSTALL_TRITON if without else f"python {checks.here(script)} --help"
        problem = checks.problem_of(answers, str(script))
        needed = required or not without
        rows.append(check(script.name, False, problem, "this version", mend, needed))
    return rows


def check_torch(track: str) -> list[Check]:
    """The rows of everything that imports PyTorch."""
    gpu = track != "cpu"
    answers = checks.in_child(probe, "cuda" if gpu else "cpu", list(map(str, version_scripts())))
    rows = [checks.torch_check(answers, track)]
    if rows[0].state != "ok":
        names = ("GPU", "training step", "triton", "version scripts")
        return rows + [checks.unchecked(name, "needs torch", "everything") for name in names]
    nobody = checks.unneeded("GPU", "the nvidia and rocm tracks", track)
    rows.append(check_gpus(answers, track) if gpu else nobody)
    if gpu and not answers.get("gpus"):
        rows.append(checks.unchecked("training step", "needs a GPU", "everything"))
    else:
        mend = checks.torch_command("broken", track)
        rows.append(checks.answer_check(answers, "step", "training step", "everything", mend))
    purpose = "V3 and V4 on a GPU, torch.compile there"
    rows.append(checks.answer_check(answers, "triton", "triton", purpose, INSTALL_TRITON, gpu))
    return rows + check_scripts(answers, required=gpu)


def gather(track: str) -> list[Check]:
    """All rows."""
    found, enough = f"{platform.python_version()} ({sys.executable})", sys.version_info >= (3, 10)
    rows = [check("Python >= 3.10", enough, found, "everything", checks.setup_command(track))]
    rows += check_torch(track)
    for name, purpose in PACKAGES.items():
        rows.append(checks.package_check(name, purpose, required=purpose == "everything"))
    try:
        tempfile.TemporaryFile(dir=".").close()
        error = ""
    except OSError as problem:
        error = f"cannot write: {problem.strerror}"
    found = error or f"can write in {Path.cwd()}"
    rows.append(check("current directory", not error, found, "results", "cd ~"))
    return rows


main = checks.validation("Environment", gather, __doc__)

if __name__ == "__main__":
    sys.exit(main())

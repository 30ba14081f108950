#!/usr/bin/env python3
"""Check that the version scripts can run here: PyTorch, Triton, a GPU, other packages.

Example: python setup/validation_scripts/test_environment.py --track rocm
"""

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path

import checks
from checks import Problem, Table

PIP = "python -m pip install"
# Modules beside PyTorch: what needs them, the command that installs them.
PACKAGES = {
    "numpy": ("everything", f"{PIP} numpy"),
    "fusion_lab": ("exercises, analysis tools", f"{PIP} -e {checks.ROOT} --no-deps"),
    "matplotlib": ("plots (docs/START.md, analysis tools)", f"{PIP} matplotlib"),
    "gemmi": ("--structure (real proteins)", f"{PIP} gemmi"),
    "deepspeed": ("run_deepspeed_flops.py (works without)", f"{PIP} deepspeed"),
}


def list_gpus() -> str:
    """How many GPUs are visible, and the first one's name and memory."""
    import torch

    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        return f"{torch.cuda.device_count()}: {gpu.name}, {gpu.total_memory / 1e9:.0f} GB"
    variables = [name for name in os.environ if name.endswith("_VISIBLE_DEVICES")]
    if variables:
        values = ", ".join(f"{name}={os.environ[name]!r}" for name in variables)
        mend = f"unset {' '.join(variables)}"
        raise Problem(f"PyTorch sees none, perhaps hidden by {values}", mend)
    raise Problem("PyTorch sees none")


def train_step(device: str) -> str:
    """A matrix product and its gradient on the device, compared with what they must be."""
    import torch

    value = torch.ones(64, 64, device=device, requires_grad=True)
    (value @ value).sum().backward()
    if not torch.equal(value.grad.cpu(), torch.full((64, 64), 128.0)):
        raise Problem("the gradient is wrong")
    return f"right on {device}"


def triton_version() -> str:
    import triton

    return triton.__version__


def find_module(name: str) -> str:
    if not importlib.util.find_spec(name):
        raise Problem("missing")
    return "installed"


def fill(table: Table, track: str) -> None:
    """All rows."""
    gpu = track != "cpu"
    if table.row("torch", partial(checks.describe_torch, track), "everything", ""):
        script = Path(__file__).with_name("test_rocm_installation.py")
        mend = f"python {script}" if track == "rocm" else "nvidia-smi"
        if not gpu or table.row("GPU", list_gpus, f"the {track} track", mend):
            step = partial(train_step, "cuda" if gpu else "cpu")
            table.row("training step", step, "everything", "python -m torch.utils.collect_env")
        purpose = "V3 and V4 on a GPU, torch.compile there"
        table.row("triton", triton_version, purpose, f"{PIP} triton", needed=gpu)
    for name, (purpose, mend) in PACKAGES.items():
        needed = purpose == "everything"
        table.row(name, partial(find_module, name), purpose, mend, needed)


if __name__ == "__main__":
    sys.exit(checks.validate("Environment", fill, __doc__))

#!/usr/bin/env python3
"""Check ROCm: the driver, access to the GPUs, the command-line tools, and whether PyTorch was built
for it.

Examples:
  python setup/validation_scripts/test_rocm_installation.py
  python setup/validation_scripts/test_rocm_installation.py --track rocm
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import checks
from checks import Check, check

DRI = Path("/dev/dri")
GROUPS = "sudo usermod -a -G render,video $USER   (then log in again)"
NO_DRIVER = (
    "sudo modprobe amdgpu   (in a container: start it with --device=/dev/kfd --device=/dev/dri)"
)
VISIBLE_DEVICES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def count_gpus() -> int:
    """The number of GPUs that PyTorch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def probe() -> None:
    """In a child process: PyTorch's build and what it sees."""
    checks.answer_with("torch", checks.describe_torch)
    checks.answer_with("gpus", count_gpus)


def open_problem(path: Path) -> str:
    """Why the device file cannot be opened for reading and writing, '' if it can.

    It is opened rather than looked at: a batch system can forget the permission bits and still deny
    a GPU.
    """
    try:
        os.close(os.open(path, os.O_RDWR))
        return ""
    except OSError as error:
        return error.strerror


def check_device_files() -> list[Check]:
    """The compute driver's device file and the render nodes of the GPUs."""
    driver, purpose = str(checks.KFD), "every GPU program"
    if not checks.KFD.exists():
        return [check(driver, False, "missing: the driver is not loaded", purpose, NO_DRIVER)]
    problem = open_problem(checks.KFD)
    first = check(driver, not problem, problem or "can be opened", purpose, GROUPS)
    nodes = sorted(DRI.glob("renderD*"))
    usable = sum(not open_problem(node) for node in nodes)
    found, mend = f"{usable} of {len(nodes)} can be opened", GROUPS if nodes else NO_DRIVER
    return [first, check(f"{DRI}/renderD*", usable > 0, found, "GPU memory", mend)]


def check_smi() -> Check:
    """rocm-smi or amd-smi, the first that works."""
    what, purpose, failures = "amd-smi or rocm-smi", "watching the GPU", []
    for command in (["amd-smi", "list"], ["rocm-smi"]):
        if tool := checks.find_tool(command[0]):
            output = checks.run_program([tool, *command[1:]])
            if not output.failure:
                return check(what, True, tool, purpose)
            failures.append(f"{command[0]}: {output.failure}")
    mend = checks.package_command("amd-smi-lib")
    return check(what, False, "; ".join(failures) or "missing", purpose, mend)


def check_rocminfo() -> tuple[Check, int]:
    """rocminfo, and the number of GPUs it lists."""
    tool = checks.find_tool("rocminfo")
    if not tool:
        mend = checks.package_command("rocminfo")
        return check("rocminfo", False, "missing", "naming the GPU", mend), 0
    output = checks.run_program([tool])
    names = checks.gpu_architectures(output.text)
    found = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    found = output.failure or found or "lists no GPU"
    good = bool(names) and not output.failure
    return check("rocminfo", good, found, "naming the GPU", tool), len(names)


def gather(track: str) -> list[Check]:
    """All rows."""
    if track != "rocm":
        return [checks.unneeded("ROCm", "the rocm track", track)]
    version = checks.rocm_version()
    found = f"no {checks.rocm_path()}/.info/version"
    if version:
        found = f"{'.'.join(map(str, version))} in {checks.rocm_path()}"
    purpose = "choosing PyTorch's index"
    rows = [
        check("ROCm", True, found, purpose) if version else checks.unchecked("ROCm", found, purpose)
    ]
    rows += check_device_files()
    row, gpus = check_rocminfo()
    rows += [row, check_smi()]

    hidden = checks.hiding_variable(VISIBLE_DEVICES, gpus)
    there = (name for name in VISIBLE_DEVICES if name in os.environ)
    given = ", ".join(f"{name}={os.environ[name]!r}" for name in there)
    found = f"{hidden}={os.environ[hidden]!r} hides every GPU" if hidden else given or "not set"
    rows.append(check("*_VISIBLE_DEVICES", not hidden, found, "choosing GPUs", f"unset {hidden}"))

    answers = checks.in_child(probe)
    rows.append(checks.torch_check(answers, track))
    if rows[-1].state == "ok":
        seen = answers.get("gpus", answers.get("failure"))
        good = isinstance(seen, int) and seen > 0
        found = f"{seen} GPUs" if isinstance(seen, int) else seen
        found = seen["error"] if isinstance(seen, dict) else found
        mend = "put right what is missing above; if nothing is, python -m torch.utils.collect_env"
        rows.append(check("torch sees", good, found, "the rocm track", mend))
    tool, mend = checks.find_tool("hipcc"), checks.tool_command("hipcc", "hipcc")
    found, purpose = tool or "missing", "HIP code of your own"
    rows.append(check("hipcc", tool is not None, found, purpose, mend, required=False))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return checks.run_checks("ROCm", gather, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())

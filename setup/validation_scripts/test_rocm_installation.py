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
            _, failure = checks.run_program([tool, *command[1:]])
            if not failure:
                return check(what, True, tool, purpose)
            failures.append(f"{command[0]}: {failure}")
    mend = checks.package_command("amd-smi-lib")
    return check(what, False, "; ".join(failures) or "missing", purpose, mend)


def check_rocminfo() -> tuple[Check, int]:
    """rocminfo, and the number of GPUs it lists."""
    tool = checks.find_tool("rocminfo")
    if not tool:
        mend = checks.package_command("rocminfo")
        return check("rocminfo", False, "missing", "naming the GPU", mend), 0
    text, failure = checks.run_program([tool])
    names = checks.gpu_architectures(text)
    found = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    found = failure or found or "lists no GPU"
    good = bool(names) and not failure
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

    answers = checks.in_child(checks.probe_torch)
    return [*rows, checks.torch_check(answers, track)]


main = checks.validation("ROCm", gather, __doc__)

if __name__ == "__main__":
    sys.exit(main())

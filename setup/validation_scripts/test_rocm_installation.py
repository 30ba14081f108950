#!/usr/bin/env python3
"""Check ROCm: the driver, access to the GPUs, the command-line tools, and whether PyTorch was built
for it.

Examples:
  python setup/validation_scripts/test_rocm_installation.py
  python setup/validation_scripts/test_rocm_installation.py --track rocm
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import checks
from checks import Check, check

DRI = Path("/dev/dri")
GROUPS = "sudo usermod -a -G render,video $USER   (then log in again)"
NO_DRIVER = (
    "sudo modprobe amdgpu   (in a container: start it with --device=/dev/kfd --device=/dev/dri)"
)


def open_problem(path: Path) -> str:
    """Why the device file cannot be opened for reading and writing, or ''.

    It is opened rather than looked at: a batch system can deny a GPU whatever its permission bits.
    """
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        return error.strerror
    return ""


def check_device_files() -> list[Check]:
    """The compute driver's device file and the render nodes of the GPUs."""
    driver = str(checks.KFD)
    purpose = "every GPU program"
    if not checks.KFD.exists():
        return [check(driver, "", purpose, "missing: the driver is not loaded", NO_DRIVER)]
    first = check(driver, "can be opened", purpose, open_problem(checks.KFD), GROUPS)
    nodes = sorted(DRI.glob("renderD*"))
    usable = sum(not open_problem(node) for node in nodes)
    found = f"{usable} of {len(nodes)} can be opened"
    mend = GROUPS if nodes else NO_DRIVER
    return [first, check(f"{DRI}/renderD*", found, "GPU memory", "" if usable else found, mend)]


def check_rocminfo() -> Check:
    """The GPUs that rocminfo lists."""
    purpose = "naming the GPU"
    tool = checks.find_tool("rocminfo")
    if not tool:
        return check("rocminfo", "", purpose, "missing", checks.package_command("rocminfo"))
    text, problem = checks.run_program([tool])
    names = re.findall(r"^\s*Name:\s*(gfx[0-9a-f]+)\s*$", text, re.MULTILINE)
    found = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    return check("rocminfo", found, purpose, problem or ("" if names else "lists no GPU"), tool)


def gather(track: str) -> list[Check]:
    """All rows."""
    if track != "rocm":
        return [check("ROCm", f"not needed on the {track} track", "AMD GPUs")]
    file = checks.ROCM / ".info/version"
    found = f"{file.read_text().strip()} in {checks.ROCM}" if file.is_file() else f"no {file}"
    rows = [check("ROCm", found, "choosing PyTorch's index")]
    rows += [*check_device_files(), check_rocminfo()]
    smi = checks.find_tool("amd-smi") or checks.find_tool("rocm-smi")
    mend = checks.package_command("amd-smi-lib")
    problem = "" if smi else "missing"
    rows.append(check("amd-smi", smi, "watching the GPU", problem, mend, needed=False))
    return [*rows, checks.torch_check(checks.in_child(checks.probe_torch), track)]


def main(argv: list[str] | None = None) -> int:
    return checks.validate("ROCm", gather, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())

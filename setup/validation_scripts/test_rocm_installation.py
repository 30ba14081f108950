#!/usr/bin/env python3
"""Check ROCm: the driver, access to the GPUs, the tools, and whether PyTorch was built for it.

Example: python setup/validation_scripts/test_rocm_installation.py
"""

import os
import re
import sys
from functools import partial
from pathlib import Path

import checks
from checks import Problem, Table

DRI = Path("/dev/dri")
GROUPS = "sudo usermod -a -G render,video $USER   (then log in again)"
NO_DRIVER = (
    "sudo modprobe amdgpu   (in a container: start it with --device=/dev/kfd --device=/dev/dri)"
)


def rocm_version() -> str:
    file = checks.ROCM / ".info/version"
    if not file.is_file():
        raise Problem(f"no {file}")
    return f"{file.read_text().strip()} in {checks.ROCM}"


def open_device(pattern: str) -> str:
    """Open a device file for reading and writing: a batch system can deny a GPU whatever the
    permission bits say."""
    paths = sorted(Path("/").glob(pattern.lstrip("/")))
    if not paths:
        raise Problem("missing: the driver is not loaded", NO_DRIVER)
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDWR))
        except OSError as error:
            problem = error.strerror
        else:
            return f"{path} can be opened"
    raise Problem(problem)


def list_gpus() -> str:
    """The GPUs that rocminfo lists."""
    tool = checks.find_tool("rocminfo")
    if not tool:
        raise Problem("missing", checks.PACKAGE.format("rocminfo"))
    names = re.findall(r"^\s*Name:\s*(gfx[0-9a-f]+)\s*$", checks.output_of([tool]), re.MULTILINE)
    if not names:
        raise Problem("lists no GPU")
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))


def fill(table: Table, track: str) -> None:
    """All rows."""
    if track != "rocm":
        print(f"ROCm is not needed on the {track} track.")
        return
    mend = "export ROCM_PATH=... (where ROCm is)"
    table.row("ROCm", rocm_version, "choosing PyTorch's index", mend, needed=False)
    table.row(str(checks.KFD), partial(open_device, str(checks.KFD)), "every GPU program", GROUPS)
    nodes = f"{DRI}/renderD*"
    table.row(nodes, partial(open_device, nodes), "GPU memory", GROUPS)
    table.row("rocminfo", list_gpus, "naming the GPU", "rocminfo")
    table.row("torch", partial(checks.describe_torch, track), "everything", "")


if __name__ == "__main__":
    sys.exit(checks.validate("ROCm", fill, __doc__))

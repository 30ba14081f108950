#!/usr/bin/env python3
"""Kernels as NVIDIA's Nsight Compute (ncu) saw them on an H200, from the recording in
results/h200/counters.json: caches were emptied before each kernel.

WHAT is an operation of V1 and V3, before or after its fusion, or a script. --kernel prints the
kernels alone whose names have this in them.

Examples:
  python exercises/nvidia/read_profile.py --list
  python exercises/nvidia/read_profile.py "residual and RMS norm" after
  python exercises/nvidia/read_profile.py tiny_llama_v4 --kernel attention
"""

from __future__ import annotations

import argparse
import sys

from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.files import ROOT, read_json
from fusion_lab.profile.ncu import COLUMNS, moved
from fusion_lab.show import render

RECORDING = ROOT / "results/h200/counters.json"


def name_of(row: dict) -> str:
    """Return what a row is called here: of the usual size and type a script has its bare name."""
    if row["what"] == "operation":
        return f"{row['operation']} {row['side']}"
    size = row["shape"].partition(", ")[2]
    names = [row["script"]]
    if size not in ("small", "default"):
        names.append(size)
    if row["precision"] != "bf16":
        names.append(row["precision"])
    return ", ".join(names)


def show(args: argparse.Namespace) -> int:
    rows = [row for row in read_json(RECORDING)["rows"] if row["caches"] == "emptied"]
    rows = {name_of(row): row for row in rows}
    if args.list:
        print("\n".join(rows))
        return 0
    name = " ".join(args.what)
    if name not in rows:
        raise ToolError(f"{name or 'nothing'} is not in the recording; there are {', '.join(rows)}")
    kernels = [kernel for kernel in rows[name]["kernels"] if args.kernel in kernel["name"]]
    print(render(COLUMNS, kernels[: args.top]))
    counted = sum(map(moved, kernels))
    us = sum(kernel["us"] for kernel in kernels)
    print(f"\nDRAM read and written to L2: {counted:.1f} MB in {us:.1f} us")
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("what", nargs="*", metavar="WHAT")
    parser.add_argument("--kernel", default="", metavar="WORD", help="a part of a kernel's name")
    parser.add_count("--top", 10, "kernels to print")
    parser.add_flag("--list", "what is in the recording")
    return parser


main = program(build_parser, show)

if __name__ == "__main__":
    sys.exit(main())

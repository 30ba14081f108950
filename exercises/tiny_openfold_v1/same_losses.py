#!/usr/bin/env python3
"""Whether two runs have the same losses, bit by bit, or by how much they differ.

Example:
  python exercises/tiny_openfold_v1/same_losses.py runs/first runs/again
"""

import argparse
import json
import sys
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, documented_parser, program


def losses(folder: Path) -> list[float]:
    """Of all steps of the run that the folder has."""
    files = [*folder.glob("*_summary.json")]
    if len(files) != 1:
        raise ToolError(f"{folder}: it has {len(files)} files *_summary.json, not one")
    run = json.loads(files[0].read_text())
    if run["status"] != "ok":
        raise ToolError(f"{folder}: its run ended early")
    return run["loss"]["curve"]


def compare(args: argparse.Namespace) -> int:
    one = losses(args.one)
    other = losses(args.other)
    if len(one) != len(other):
        raise ToolError(f"one run has {len(one)} losses, the other {len(other)}")
    if one == other:
        result = "the same bits"
    else:
        largest = max(abs(a - b) / a for a, b in zip(one, other, strict=True))
        result = f"losses differ by {largest:.0e}"
    print(f"{args.one.name} and {args.other.name}: {result}")
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("one", type=Path, metavar="FOLDER")
    parser.add_argument("other", type=Path, metavar="FOLDER")
    return parser


main = program(build_parser, compare)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""How well the time of streaming kernels follows from their bytes, in traces that others recorded.

Each kernel is predicted from the other operators and sizes of its trace with the same access to
memory, or, "by other models", from the traces of other models on that GPU. Access: straight through
memory, strided, or sums along something. Errors are medians over kernels.

The traces behind results/mi300x_traces/ are in a repository of AMD's, see the file:
  git clone https://github.com/AMD-AGI/TraceLens
  python dev/bench/others_traces.py results/mi300x_traces/streaming.json \\
      TraceLens/tests/traces/mi300/*.json.gz TraceLens/tests/traces/h100/*.json.gz
  python dev/bench/others_traces.py results/mi300x_traces/streaming.json --table
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, documented_parser, note, program
from fusion_lab.files import read_json, write_text
from fusion_lab.fusions.trace import replayed
from fusion_lab.profile.laws import FEW, LARGE, Streaming, law_of
from fusion_lab.show import Column, render

SOURCE = {
    "repository": "https://github.com/AMD-AGI/TraceLens",
    "commit": "171dd74721ca1ec45709e5805b68ae1f65e27811",
    "folders": ["tests/traces/mi300", "tests/traces/h100"],
    "licence": "MIT, Advanced Micro Devices, Inc.",
    "remark": "recorded by others, for tests; they do not stand for what a device reaches",
}
PROG = Path(__file__).name
ACCESS = ("straight", "strided", "sums")


def few(kernels: Iterable[Streaming]) -> bool:
    return len({kernel[:3] for kernel in kernels}) < FEW


def predictions(kernels: list[Streaming], others: list[Streaming] | None = None) -> list[tuple]:
    """Kernels, each with what it would take by the law of the others in its trace, or by that of
    other traces; those of an access with few kinds have none."""
    found = []
    for access in ACCESS:
        own = [kernel for kernel in kernels if kernel.access == access]
        known = own if others is None else [k for k in others if k.access == access]
        if not few(known):
            least, rate, left_out = law_of(known)
            for kernel in own:
                us = least + kernel.bytes / rate / 1e3
                found.append((kernel, us if others is not None else left_out[kernel[:3]]))
    return found


def percent(predicted: Iterable[tuple]) -> float | None:
    """The median error."""
    errors = [100 * abs(us / kernel.us - 1) for kernel, us in predicted]
    return statistics.median(errors) if errors else None


def row_of(device: str, model: str, within: list[tuple], across: list[tuple]) -> dict:
    """The errors of a model, or of all models on a device."""
    large = [pair for pair in within if pair[0].bytes >= LARGE]
    return {
        "device": device,
        "model": model,
        "kernels": len(within),
        "large": len(large),
        "error_percent": percent(within),
        "large_error_percent": percent(large),
        "across_error_percent": percent(across),
    }


def study(paths: Iterable[Path]) -> dict:
    """Errors of each trace, and of all traces of a device."""
    streaming: dict[str, dict[str, list[Streaming]]] = defaultdict(dict)
    for path in paths:
        if path.read_bytes().startswith(b"version https://git-lfs"):
            note(f"{path}: left out, it only says where Git LFS has the trace")
            continue
        print(path, file=sys.stderr)
        _, kernels, device = replayed(path)
        streaming[device.removesuffix(" VF")][path.name.partition("__")[0]] = kernels
    rows = []
    for device, models in streaming.items():
        all_within, all_across = [], []
        for model, kernels in models.items():
            others = [k for name, found in models.items() if name != model for k in found]
            within, across = predictions(kernels), predictions(kernels, others)
            rows.append(row_of(device, model.removesuffix(".json.gz"), within, across))
            all_within += within
            all_across += across
        rows.append(row_of(device, "all", all_within, all_across))
    return {"schema_version": 1, "source": SOURCE, "rows": rows}


def table(rows: list[dict]) -> str:
    columns = [
        Column("GPU", "device"),
        Column("model", "model", text=True),
        Column("kernels", "kernels"),
        Column("median error", "error_percent", ".0f", " %"),
        Column("from 4 MB", "large_error_percent", ".0f", " %"),
        Column("by other models", "across_error_percent", ".0f", " %"),
    ]
    return render(columns, rows)


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("traces", type=Path, nargs="*", metavar="TRACE.json.gz")
    parser.add_flag("--table", "print the table of a result")
    return parser


def main_study(args: argparse.Namespace) -> int:
    """Write or print; returns the exit status."""
    if bool(args.traces) == args.table:
        raise ToolError("name traces, or --table: one of the two")
    if args.traces:
        write_text(args.result, json.dumps(study(args.traces), indent=1) + "\n")
    print(table(read_json(args.result)["rows"]))
    return 0


main = program(build_parser, main_study)

if __name__ == "__main__":
    sys.exit(main())

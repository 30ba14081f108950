#!/usr/bin/env python3
"""Count what the kernels of a step really move, with NVIDIA's Nsight Compute, beside the bytes that
fusion_lab/profile/traffic.py predicts.

One eager step of a version, each kernel by itself: bytes that device memory (DRAM) gives and takes,
bytes between the SMs and the L2 cache, time, the share of the matrix units, of instructions issued
and of warps, registers. With caches emptied before each kernel, and as the kernels before left
them. And operations before and after their fusion (dev/bench/counted_sides.py).

Examples:
  python dev/bench/counters.py results/DIR/counters.json
  python dev/bench/counters.py results/DIR/counters.json --only small
  python dev/bench/counters.py --table results/DIR/counters.json
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dev.bench.sizes import SHAPES
from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.files import ROOT, read_json
from fusion_lab.profile.kernels import short_name
from fusion_lab.profile.ncu import by_kernel, moved, ncu_command, read_ncu
from fusion_lab.show import Column, render
from fusion_lab.study import Part, chosen, measure_study

GROUPS = {  # sides that one process launches
    "operations": ("operations",),
    "small": tuple(f"tiny_llama, small, bf16, V{n}" for n in (1, 2, 3, 4)),
    "fp32": tuple(f"tiny_llama, small, fp32, V{n}" for n in (4, 1)),
    "default": tuple(f"tiny_openfold, default, bf16, V{n}" for n in (4, 3, 2)),
    "default, V1": ("tiny_openfold, default, bf16, V1",),  # V1 by itself: it takes longest
    "medium": ("tiny_llama, medium, bf16, V4",),
    "medium, V1": ("tiny_llama, medium, bf16, V1",),
    "crop": tuple(f"tiny_openfold, crop, bf16, V{n}" for n in (4, 3)),
    "crop, V1": ("tiny_openfold, crop, bf16, V1",),
}
CACHES = {"emptied": True, "as they come": False}
MARK = "spin_kernel"  # before each side
SUMS = ("dram_read_mb", "dram_written_mb", "l2_read_mb", "l2_written_mb", "us")


def counted(sides: tuple[str, ...], empty_caches: bool) -> list[dict]:
    """Return a row for each side of a group: its kernels, sums of them, and what is predicted."""
    with tempfile.TemporaryDirectory() as folder:
        output, predicted = Path(folder) / "ncu.csv", Path(folder) / "predicted.json"
        application = [str(ROOT / "dev/bench/counted_sides.py"), str(predicted), *sides]
        command = ncu_command(output, [sys.executable, *application], empty_caches)
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise ToolError("ncu is not on PATH (NVIDIA Nsight Compute)", status=4) from error
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise ToolError(f"ncu ended with status {done.returncode}: {lines[-1:]}", status=1)
        launches = split_at_marks(read_ncu(output))
        rows = json.loads(predicted.read_text())
    return [with_counters(row, group) for row, group in zip(rows, launches, strict=True)]


def split_at_marks(launches: list[dict]) -> list[list[dict]]:
    """Return the launches of each side; a mark stands before the first of each."""
    groups: list[list[dict]] = []
    for launch in launches:
        if MARK in launch["name"]:
            groups.append([])
        else:
            groups[-1].append(launch)
    return groups


def with_counters(row: dict, launches: list[dict]) -> dict:
    """Return the row of a side with its kernels and their sums, in MB and microseconds."""
    by_operator = row.pop("by_operator")
    kernels = by_kernel(launches)
    sums = {key: sum(kernel[key] for kernel in kernels) for key in SUMS}
    for kernel in kernels:
        own = by_operator.get(kernel["name"])  # of PyTorch's kernels no operator has the name
        kernel["predicted_mb"] = own and own / 1e6
        kernel["name"] = short_name(kernel["name"])
    row["predicted_mb"] = row.pop("predicted") / 1e6
    return row | {"launches": len(launches), **sums, "kernels": kernels}


def parts() -> Iterator[Part]:
    """Yield the parts of the study."""
    for group, sides in GROUPS.items():
        for caches, emptied in CACHES.items():
            if emptied or group in ("small", "default"):
                names = {"group": group, "caches": caches}
                yield names, functools.partial(counted, sides, emptied)


def off(row: dict) -> float:
    """Return how far more was counted than predicted, in percent."""
    return 100 * (moved(row) / row["predicted_mb"] - 1)


def size_of(row: dict) -> str:
    return row["shape"].partition(", ")[2]


def order_of(row: dict) -> tuple:
    """Sort steps by what they are of, then by version."""
    shapes = [*SHAPES].index(row["shape"])
    return row["caches"] != "emptied", row["precision"] != "bf16", shapes, row["script"]


def table_of_steps(rows: list[dict]) -> str:
    """Return GB of each step, predicted and counted."""

    def gb(key: str) -> Callable[[dict], float]:
        return lambda row: row[key] / 1e3

    columns = [
        Column("step", lambda row: f"{row['script']}, {size_of(row)}, {row['precision']}"),
        Column("caches", "caches", text=True),
        Column("kernels", "launches"),
        Column("GB predicted", gb("predicted_mb"), ".2f"),
        Column("counted", lambda row: moved(row) / 1e3, ".2f"),
        Column("DRAM read", gb("dram_read_mb"), ".2f"),
        Column("DRAM written", gb("dram_written_mb"), ".2f"),
        Column("SMs read", gb("l2_read_mb"), ".2f"),
        Column("SMs wrote", gb("l2_written_mb"), ".2f"),
    ]
    steps = [row for row in rows if row["what"] == "step"]
    return render(columns, sorted(steps, key=order_of))


def table_of_operations(rows: list[dict]) -> str:
    """Return MB of each operation before and after its fusion, predicted and counted."""
    pairs: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["what"] == "operation":
            pairs.setdefault(row["operation"], {})[row["side"]] = row

    def of(side: str, value: Callable[[dict], float]) -> Callable[[tuple], float | None]:
        return lambda pair: value(pair[1][side]) if side in pair[1] else None

    columns = [Column("operation", lambda pair: pair[0])]
    for side in ("before", "after"):
        columns += [
            Column(f"kernels {side}", of(side, lambda row: row["launches"])),
            Column("MB predicted", of(side, lambda row: row["predicted_mb"]), ".1f"),
            Column("counted", of(side, moved), ".1f"),
        ]
    return render(columns, [*pairs.items()])


def table_of_kernels(rows: list[dict]) -> str:
    """Return the kernels of V3 and V4 by how far their bytes are from the predicted ones."""
    found = [
        {"step": f"{row['script']}, {size_of(row)}", **kernel, "off": off(kernel)}
        for row in rows
        if row["what"] == "step" and row["caches"] == "emptied" and row["script"][-1] in "34"
        for kernel in row["kernels"]
        if kernel["predicted_mb"]
    ]
    columns = [
        Column("kernel", "name"),
        Column("of", "step", text=True),
        Column("MB predicted", "predicted_mb", ".1f"),
        Column("counted", moved, ".1f"),
        Column("off", "off", "+.0f", " %"),
    ]
    far = sorted((k for k in found if abs(k["off"]) > 10), key=lambda kernel: -abs(kernel["off"]))
    nearer = f"The other {len(found) - len(far)} of {len(found)} are nearer."
    return f"{render(columns, far)}\n\n{nearer}"


def run(args: argparse.Namespace) -> int:
    if args.table:
        rows = read_json(args.table)["rows"]
        tables = (table_of_operations, table_of_steps, table_of_kernels)
        print("\n\n".join(table(rows) for table in tables))
        return 0
    if args.output is None:
        raise ToolError("name a FILE.json for the study, or --table one")
    wanted = chosen(list(parts()), args.only)
    print(table_of_steps(measure_study(args.output, wanted)))
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("output", type=Path, nargs="?", metavar="FILE.json", help="the study")
    only = "these groups, or caches"
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=only)
    parser.add_path("--table", "FILE.json", "measure nothing, print the tables of this study")
    return parser


main = program(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())

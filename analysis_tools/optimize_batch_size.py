#!/usr/bin/env python3
"""The best batch size under a memory limit, measured: for throughput, latency or memory per sample.

The batch size doubles from 1 until a run is out of memory or takes more than the wanted part of the
device's memory; then the search halves the gap, down to an eighth of the size. Each size is
measured alone, as a graph where there is a GPU. On a CPU the memory is that of the machine and
peaks are of tensors; a size that by its number of samples would not fit is not tried.

A finished search answers for all three targets. The same command goes on after an interruption; a
search with other settings needs another --output.

Examples:
  python analysis_tools/optimize_batch_size.py --seq-len 128 --optimization-target throughput
  python analysis_tools/optimize_batch_size.py --script tiny_openfold_v3.py --output v3.json
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, positive, program
from fusion_lab.host import memory_mb
from fusion_lab.records import read_study
from fusion_lab.script import (
    DEFAULT_SCRIPT,
    add_script,
    load_script,
    parser_around,
    script_arguments,
)
from fusion_lab.show import Column, cell, range_of_speeds, render
from fusion_lab.study import SEARCH, check_failed, heading, measure_study, search
from fusion_lab.turns import graph_of, speed, words_of

TARGETS = {  # most samples per second, shortest step, fewest MB per sample: the smaller the better
    "throughput": lambda row: -row["samples_per_sec"],
    "latency": lambda row: row["batch_ms"],
    "memory": lambda row: row["peak_mb"] / row["batch_size"],
}
GROWTH = 1.03  # more samples per second than by this factor is growth


def build_parser() -> Parser:
    parser = parser_around(__file__, __doc__, DEFAULT_SCRIPT)
    add_script(parser, DEFAULT_SCRIPT)
    add, default = parser.add_argument, "(default: %(default)s)"
    part = {"type": positive(1), "default": 0.8, "metavar": "X"}
    add("--target-memory-usage", **part, help=f"part of memory {default}")
    add("--optimization-target", choices=TARGETS, default="throughput", help=default)
    parser.add_count("--max-batch-size", 65536, "end there")
    parser.add_count("--rounds", 5, "turns of each size")
    parser.add_path("--output", "FILE.json", "the search (default: batch_size_<script>.json here)")
    return parser


def beside_memory(row: dict, mb: float) -> dict:
    """A row with its rates, and its peak as a part of the memory or None."""
    part = None if "status" in row else row["peak_mb"] / mb
    return {**row, "samples_per_sec": speed(row), "part": part}


def table(rows: Sequence[dict], target: float) -> str:

    def memory(row: dict) -> str:
        return cell(row["part"], ".1%", ", above the limit" * ((row["part"] or 0) > target))

    columns = [
        Column("batch size", lambda row: str(row["batch_size"])),
        Column("samples/sec", "samples_per_sec", ".1f").or_ended(),
        Column("in turns", range_of_speeds),
        Column("ms per step", "batch_ms", ".2f"),
        Column("peak MB", lambda row: row["part"] and row["peak_mb"], ".1f"),
        Column("of memory", memory),
    ]
    return render(columns, rows)


def answer(rows: Sequence[dict], objective: str) -> str:
    """The best of the sizes that fit, and from where on throughput does not grow."""
    best = min(rows, key=TARGETS[objective])
    highest = max(row["samples_per_sec"] for row in rows)
    enough = next(row for row in rows if row["samples_per_sec"] * GROWTH >= highest)
    return (
        f"Best for {objective}: batch size {best['batch_size']}, "
        f"{best['samples_per_sec']:.1f} samples/sec, {best['batch_ms']:.2f} ms per step, "
        f"{best['peak_mb']:.1f} MB ({best['part']:.1%} of memory).\n"
        f"Batch size {enough['batch_size']} is the smallest within 3 % of the highest throughput: "
        f"{enough['samples_per_sec']:.1f} of {highest:.1f} samples/sec."
    )


def optimize(args: argparse.Namespace, argv: Sequence[str]) -> int:
    if "--batch-size" in words_of(argv):
        raise ToolError("--batch-size is what is looked for: --max-batch-size limits it")
    module, target = load_script(args.script), args.target_memory_usage
    options, parsed = script_arguments(module, graph_of(argv), None)
    total = memory_mb(parsed.device)
    path = args.output or Path(f"batch_size_{module.SCRIPT}.json")
    host = total if parsed.device == "cpu" else None
    limits = {"limit_mb": target * total, "most": args.max_batch_size, "host_mb": host}
    parts = search(path, module.SCRIPT, options, args.rounds, **limits)
    settings = {"script": module.SCRIPT, "argv": list(argv), "rounds": args.rounds, **limits}
    measure_study(path, parts, keep=True, **settings)
    content = read_study(path, *SEARCH)
    rows = [beside_memory(row, total) for row in content["rows"]]
    rows.sort(key=lambda row: row["batch_size"])
    print(f"{heading(content, module.SCRIPT)}\n\n{table(rows, target)}\n", flush=True)
    check_failed(rows)
    if not (fitting := [row for row in rows if row["part"] and row["part"] <= target]):
        raise ToolError(f"even batch size 1 takes more than {target:.0%} of memory", status=3)
    print(answer(fitting, args.optimization_target))
    return 0


main = program(build_parser, optimize, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

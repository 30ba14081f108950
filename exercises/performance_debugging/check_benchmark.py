#!/usr/bin/env python3
"""Does a benchmark measure what it says? Six probes say what is wrong, or that nothing was found.

Each FILE is a benchmark like those in benchmarks/ (default: all of them), which is run as its
author runs it, and whose operation is called with our own clocks. probes.py judges; it is for you
to write, and --solution takes ours. The exit status is 1 if a benchmark is flagged or a probe not
written.

A FILE.json is a study in results/: no rate in it may be above that of the copy in the same run, and
no step shorter than the kernels in it.

Examples:
  python exercises/performance_debugging/check_benchmark.py
  python exercises/performance_debugging/check_benchmark.py --solution results/h100/puzzles.json
"""

from __future__ import annotations

import _root

import importlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from exercises.performance_debugging.benchmarks import examine
from workshop.cli import ToolError, documented_parser, run_tool
from workshop.files import read_json

PROG = Path(__file__).name
HERE = Path(__file__).resolve().parent
NOISE = 1.1  # two medians of the same rate


def look(path: Path, probes: ModuleType | None) -> list[str]:
    """Print what a benchmark says; a line for each probe that flags it, or is not written."""
    claim = examine.in_a_process(examine.as_its_author, path)
    print(f"{path.stem}: {claim.line}", flush=True)
    if not probes:
        return []
    calls, values = examine.in_a_process(examine.under_our_clocks, path)
    lines = []
    for probe in probes.PROBES:
        try:
            wrong = probe(claim, calls, values)
        except NotImplementedError:
            wrong = "not written yet"
        if wrong:
            lines.append(f"{probe.__name__}: {wrong}")
    return lines


def look_at_study(path: Path) -> list[str]:
    """A line for each thing in a study that cannot be."""
    study = read_json(path)
    print(f"{path.stem}:")
    return [*impossible(study)]


def impossible(study: dict) -> Iterator[str]:
    """Rates above that of a large copy, steps shorter than their kernels."""
    copy = study.get("copy")
    for row in study.get("rows", ()):
        copy = row if row.get("what") == "copy" else copy
        if copy and row.get("bytes"):
            us = row["us"] if isinstance(row["us"], float) else statistics.median(row["us"])
            rate, limit = row["bytes"] / us / 1e3, copy["bytes"] / copy["us"] / 1e3
            if rate > NOISE * limit:
                name = row.get("what") or row.get("puzzle")
                yield f"rate: {name} has {rate:.0f} GB/s where a large copy has {limit:.0f}"
    for stage in study.get("stages", ()):
        kernels, step = stage["kernel_ms"], stage["result"]["timing"]["batch_ms"]
        if kernels and kernels > NOISE * step:
            yield f"step: {stage['stage']} takes {step:.2f} ms, its kernels {kernels:.2f} ms"


def check(files: Sequence[Path], probes: ModuleType | None) -> int:
    """Print what is wrong with each file; 1 if anything is."""
    flagged = failed = 0
    for path in files:
        try:
            wrong = look_at_study(path) if path.suffix == ".json" else look(path, probes)
        except ToolError as error:
            print(f"{PROG}: error: {error}", file=sys.stderr)
            failed += 1
            continue
        flagged += bool(wrong)
        if probes:
            print("\n".join(f"    {line}" for line in wrong or ["nothing found"]), flush=True)
    if probes:
        print(f"{flagged} of {len(files)} flagged")
    return int(flagged + failed > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_flag("--solution", "our probes in place of yours")
    parser.add_flag("--claims", "only what the benchmarks say")
    args = parser.parse_args(argv)
    folder = "exercises.performance_debugging"
    name = f"{folder}.{'solutions.' * args.solution}probes"
    probes = None if args.claims else importlib.import_module(name)
    files = args.files or sorted((HERE / "benchmarks").glob("benchmark_*.py"))
    return run_tool(PROG, lambda: check(files, probes))


if __name__ == "__main__":
    sys.exit(main())

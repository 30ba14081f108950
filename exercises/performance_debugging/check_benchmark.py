#!/usr/bin/env python3
"""Does a benchmark measure what it says? Six probes say what is wrong, or that nothing was found.

Each FILE.py is a benchmark like those in benchmarks/ (default: all of them). It is run as its
author runs it, and its operation is called under our clocks. probes.py judges; it is for you to
write, and --solution takes ours. The exit status is 1 if something is flagged, or a probe not
written.

A FILE.json is what --output wrote, to be judged again without running anything; or a study in
results/: no rate in it may be above that of the copy in the same run, and no step shorter than the
kernels in it.

Examples:
  python exercises/performance_debugging/check_benchmark.py
  python exercises/performance_debugging/check_benchmark.py --solution results/h100/puzzles.json
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from exercises.explain import explained
from exercises.performance_debugging.benchmarks import examine
from fusion_lab.cli import ToolError, documented_parser, run_tool, say
from fusion_lab.files import read_json, write_text

PROG = Path(__file__).name
HERE = Path(__file__).resolve().parent
MISSING = "not written yet"
NOISE = 1.1  # two medians of the same rate


def judge(evidence: examine.Evidence, probes: ModuleType) -> list[str]:
    """A line for each probe that flags a benchmark, or is not written."""
    lines = []
    for probe in probes.PROBES:
        try:
            wrong = probe(evidence.claim, evidence.calls, evidence.values)
        except NotImplementedError:
            wrong = MISSING
        except Exception as error:  # in what the reader wrote
            wrong = explained(error, {probes.__file__})
        if wrong and not isinstance(wrong, str):
            wrong = f"it returns {wrong!r}; return what is wrong as one line, or nothing"
        if wrong:
            lines.append(f"{probe.__name__}: {wrong}")
    return lines


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


def gather(paths: Sequence[Path], claims: bool) -> Iterator[examine.Evidence | Path | ToolError]:
    """What the probes look at, of each benchmark in turn; the path of a study; what went wrong."""
    for path in paths:
        if path.suffix != ".json":
            try:
                yield examine.gather(path, claims)
            except ToolError as error:  # such as no C++ compiler; the others can be run
                yield error
        elif rows := read_json(path).get("benchmarks"):
            yield from map(examine.Evidence.of, rows)
        else:
            yield path


def check(paths: Sequence[Path], probes: ModuleType | None, output: Path | None = None) -> int:
    """Print what each benchmark says and what is wrong with it; 1 if anything is."""
    flagged, missing, failed, count, gathered = 0, 0, 0, 0, []
    for one in gather(paths, claims=not probes):
        count += 1
        if isinstance(one, ToolError):
            say(f"error: {one}")
            failed = one.status
            continue
        study = isinstance(one, Path)
        print(f"{one.stem}:" if study else f"{one.name}: {one.claim.line}", flush=True)
        if not study:
            gathered.append(one.row())
        if probes:
            wrong = [*impossible(read_json(one))] if study else judge(one, probes)
            missing = sum(line.endswith(f": {MISSING}") for line in wrong)
            flagged += len(wrong) > missing
            print("\n".join(f"    {line}" for line in wrong or ["nothing found"]), flush=True)
    if probes:
        rest = f"; {missing} of {len(probes.PROBES)} probes are {MISSING}" if missing else ""
        print(f"{flagged} of {count} flagged{rest}")
    if output:
        write_text(output, json.dumps({"benchmarks": gathered}, indent=1) + "\n")
    return failed or int(flagged + missing > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_flag("--solution", "our probes in place of yours")
    parser.add_flag("--claims", "only what the benchmarks say")
    parser.add_path("--output", "FILE.json", "keep what the probes look at")
    args = parser.parse_args(argv)
    if args.claims and args.output:
        parser.error("--claims looks at nothing that --output could keep")
    folder = "exercises.performance_debugging"
    name = f"{folder}.{'solutions.' * args.solution}probes"
    probes = None if args.claims else importlib.import_module(name)
    files = args.files or sorted((HERE / "benchmarks").glob("benchmark_*.py"))
    return run_tool(PROG, lambda: check(files, probes, args.output))


if __name__ == "__main__":
    sys.exit(main())

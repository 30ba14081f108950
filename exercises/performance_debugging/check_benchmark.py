#!/usr/bin/env python3
"""Does a benchmark measure what it says? Six probes say what is wrong, or that nothing was found.

Each FILE.py is a benchmark like those in benchmarks/ (default: all of them). It is run as its
author runs it, and its operation is called under our clocks. probes.py judges; it is for you to
write, and --solution takes ours. The exit status is 1 if something is flagged, or a probe not
written.

A FILE.json is what --output wrote, to be judged again without running anything.

Examples:
  python exercises/performance_debugging/check_benchmark.py
  python exercises/performance_debugging/check_benchmark.py --solution \\
      results/h100/sheets/performance_debugging/benchmarks.json
"""

from __future__ import annotations

import importlib
import json
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


def gather(paths: Sequence[Path], claims: bool) -> Iterator[examine.Evidence | ToolError]:
    """What the probes look at, of each benchmark in turn; or what went wrong."""
    for path in paths:
        if path.suffix == ".json":
            rows = read_json(path).get("benchmarks")
            if not rows:
                raise ToolError(f"{path}: it has no benchmarks")
            yield from map(examine.Evidence.of, rows)
            continue
        try:
            yield examine.gather(path, claims)
        except ToolError as error:  # such as no C++ compiler; the others can be run
            yield error


def check(paths: Sequence[Path], probes: ModuleType | None, output: Path | None = None) -> int:
    """Print what each benchmark says and what is wrong with it; 1 if anything is."""
    flagged, missing, failed, count, gathered = 0, 0, 0, 0, []
    for one in gather(paths, claims=not probes):
        count += 1
        if isinstance(one, ToolError):
            say(f"error: {one}")
            failed = one.status
            continue
        print(f"{one.name}: {one.claim.line}", flush=True)
        gathered.append(one.row())
        if probes:
            wrong = judge(one, probes)
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

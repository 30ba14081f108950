#!/usr/bin/env python3
"""One report in Markdown of what two folders hold, without and with fusion.

A folder is what run_all_profilers.sh wrote, or the results of a script, of run_pytorch_profiler.py,
run_rocprofv3.sh, run_deepspeed_flops.py or roofline_analysis.py. The report has a section for each
of these that both folders have, and for pictures that one of them has:

  Runs         the result files, as compare_runs.py shows them
  Kernels      before and after by the PyTorch profiler, and by rocprofv3, as
               analyze_kernel_reduction.py shows them
  FLOPs        FLOP, bytes and intensity of each kind of module
  Rooflines    pictures, and the tables of roofline_analysis.py

What is not there is named in one line at the end, with the reason where run_all_profilers.sh noted
one. Runs of different models are refused; different sizes, precision or devices are named at the
top. Without --output the report goes to stdout. --output-dir writes fusion_report.md into a folder.
Status 1 if one of the runs failed.

Examples:
  ./run_all_profilers.sh --script tiny_llama_v1.py && ./run_all_profilers.sh \\
      --script tiny_llama_v2.py
  python analysis_tools/report_generator.py --output ./fusion_comparison_report.md
  python analysis_tools/report_generator.py --baseline ./v1_analysis --fused ./v2_analysis \\
      --output-dir ./analysis
"""

from __future__ import annotations

import _root

import argparse
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lab.cli import Parser, ToolError, documented_parser, program
from lab.comparison import beside, runs_table
from lab.files import write_text
from lab.profile import reduction, roofline
from lab.records import ForwardFlops, Rooflines, Steps, read
from lab.results import (
    Run,
    check_family,
    differences,
    load_run,
    only_file,
    precision,
    report_failed,
    unsteady,
)
from lab.show import Column, render

PROG = Path(__file__).name
NAME = "fusion_report.md"
LABELS = ("baseline", "fused")


class Side:
    """One of the two folders, and what is in it; what is not there is None."""

    def __init__(self, label: str, directory: Path):
        if not directory.is_dir():
            script = directory.name.removeprefix("profiles_")
            ours = (
                f"./run_all_profilers.sh --script {script}.py" if script.startswith("tiny_") else ""
            )
            way_out = f"{ours or 'run_all_profilers.sh'} makes it"
            if there := ", ".join(sorted(map(str, directory.parent.glob("profiles_*/")))):
                way_out += f"; here is {there}"
            raise ToolError(f"--{label} {directory}: no such directory; {way_out}")
        self.label, self.directory = label, directory
        summary = directory / "summary.json"
        steps = read(Steps, summary)["steps"] if summary.is_file() else []
        # What a step that was skipped or failed has in its folder is of an earlier run.
        self.reasons = {step["name"]: step["reason"] for step in steps if step["status"] != "ok"}

    def place(self, pattern: str, folder: str, step: str | None = None) -> Path | None:
        """Where such files are: here, or in the folder of this step of run_all_profilers.sh."""
        places = [self.directory, *([] if step in self.reasons else [self.directory / folder])]
        return next((place for place in places if any(place.glob(pattern))), None)

    def run(self) -> Run | None:
        """The result file, also that of a run that failed."""
        place = self.place("*_summary.json", "pytorch")
        return load_run(place, self.label) if place else None

    def profile(self) -> reduction.Profile | None:
        """Kernels by the PyTorch profiler."""
        place = self.place("*_kernels.csv", "pytorch", "pytorch_profiler")
        return reduction.load_pytorch(place) if place else None

    def statistics(self) -> reduction.Profile | None:
        """Kernels by rocprofv3."""
        place = None if "rocprofv3" in self.reasons else reduction.rocprofv3_folder(self.directory)
        return reduction.load_rocprofv3(place) if place else None

    def flops(self) -> dict | None:
        """What run_deepspeed_flops.py counted."""
        place = self.place("*_flops.json", "flops", "flops")
        if place is None:
            return None
        return read(ForwardFlops, only_file(place, "*_flops.json", "no <script>_flops.json"))

    def rooflines(self, base: Path) -> list[str]:
        """The tables of roofline_analysis.py, and pictures as links from the folder `base`."""
        lines = []
        for path in self.files("roofline_analysis.json"):
            rows, name = read(Rooflines, path)["rows"], "script"
            if "kernel" in rows[0]:  # it came from rocprof-compute
                rows, name = rows[: roofline.TOP], "kernel"
            lines += ["", f"{self.label}: `{path}`", "", roofline.table(rows, name)]
        for path in self.files("*roofline*.png") + self.files("*Roof*.pdf"):
            sign = "" if path.suffix == ".pdf" else "!"
            lines += ["", f"{sign}[{self.label}: {path.name}](<{os.path.relpath(path, base)}>)"]
        return lines

    def files(self, pattern: str) -> list[Path]:
        """All below the folder, without what the wrappers set aside."""
        aside = (".failed", ".previous")
        found = sorted(self.directory.rglob(pattern))
        return [path for path in found if not any(part.endswith(aside) for part in path.parts)]


def run_lines(runs: Sequence[Run]) -> list[str]:
    """The table of compare_runs.py, and what to know about it."""
    notes = [f"- note: {note}" for note in unsteady((run.name, run) for run in runs)]
    for run in runs:
        if run.status != "ok":
            notes.append(f"- note: {run.name} did not finish: {run.result.get('error')}")
    table = runs_table(runs, [beside(run, runs[0]) for run in runs])
    alone = "Each run was measured by itself."
    in_turns = "`--compare-fusion` of a script measures both sides in turns."
    return [table, "", *([*notes, ""] if notes else []), f"{alone} {in_turns}"]


def kernel_lines(sides: Sequence[reduction.Profile], top: int) -> list[str]:
    """The report of analyze_kernel_reduction.py as a section."""
    text = reduction.compare(sides, top)[2].partition("\n")[2].strip()
    return [re.sub(r"^##", "###", text, flags=re.MULTILINE)]


def flops_lines(sides: Sequence[dict]) -> list[str]:
    """FLOP and bytes of a forward pass, module by module."""
    modules = [{row["module"]: row for row in side["modules"]} for side in sides]

    def value(of_side: dict[str, dict], key: str, unit: float, name: str) -> float | None:
        found = of_side.get(name, {}).get(key)
        return None if found is None else found / unit

    columns = [Column("module", str)]
    for what, key, unit, form in (
        ("GFLOP", "flop", 1e9, ".4f"),
        ("MB", "bytes", 1e6, ".2f"),
        ("FLOP/byte", "flop_per_byte", 1, ".2f"),
    ):
        for label, side in zip(LABELS, modules, strict=True):
            columns.append(Column(f"{label} {what}", partial(value, side, key, unit), form))
    totals = (sum(row["flop"] for row in side.values()) / 1e9 for side in modules)
    total = " and ".join(f"{flop:.4f}" for flop in totals)
    by = " and ".join(dict.fromkeys(str(side.get("flops_counted_by")) for side in sides))
    table = render(columns, [*(modules[0] | modules[1])])
    return [table, "", f"A forward pass: {total} GFLOP, counted by {by}."]


def describe(side: Side, result: dict | None) -> str:
    """One line at the top of the report."""
    line = f"- {side.label}: `{side.directory}`"
    if result is None:
        return line
    on = ", ".join(name for name, on in result.get("fusions", {}).items() if on).replace("_", "-")
    device = result["environment"].get("device_name")
    return f"{line}: {result['script']} on {device}, {precision(result)}, fused: {on or 'nothing'}"


def generate(args: argparse.Namespace) -> int:
    """Write or print the report; returns the exit status."""
    output = args.output or (args.output_dir / NAME if args.output_dir else None)
    base = output.parent if output else Path()
    sides = [Side(label, getattr(args, label)) for label in LABELS]
    runs, profiles, statistics, flops = (
        [load(side) for side in sides]
        for load in (Side.run, Side.profile, Side.statistics, Side.flops)
    )
    named = []  # of each kind of result, what it was measured with on the sides that have it
    of_run, of_profile = (lambda run: run.result), (lambda profile: profile.settings)
    kinds = (runs, of_run), (profiles, of_profile), (statistics, of_profile), (flops, dict)
    for kind, of in kinds:
        both = ((side.label, each and of(each)) for side, each in zip(sides, kind, strict=True))
        named.append([(label, settings) for label, settings in both if settings])
    check_family([pair for pairs in named for pair in pairs])
    known = next((pairs for pairs in named if len(pairs) == 2), [])

    text = ["# Without and with fusion", ""]
    text += [describe(side, dict(known).get(side.label)) for side in sides]
    text += [f"- note: {note}" for note in differences(known)]
    missing = []
    by_name = partial(kernel_lines, top=args.top)
    for title, step, found, lines in (
        ("Runs", "pytorch_profiler", runs, run_lines),
        ("Kernels by the PyTorch profiler", "pytorch_profiler", profiles, by_name),
        ("Kernels by rocprofv3", "rocprofv3", statistics, by_name),
        ("FLOPs of modules", "flops", flops, flops_lines),
    ):
        if all(found):
            text += ["", f"## {title}", "", *lines(found)]
        else:
            lacking = [side for side, content in zip(sides, found, strict=True) if not content]
            why = {side.reasons.get(step) or "nothing there": None for side in lacking}
            labels = ", ".join(side.label for side in lacking)
            missing.append(f"{title} ({labels}: {'; '.join(why)})")
    rooflines = [line for side in sides for line in side.rooflines(base)]
    if rooflines:
        text += ["", "## Rooflines", *rooflines]
    else:
        missing.append("Rooflines (nothing there)")
    if len(missing) == 5:
        nothing = f"nothing that both have: {'; '.join(missing)}"
        raise ToolError(f"{args.baseline}, {args.fused}: {nothing}")
    text += ["", f"Not in this report: {'; '.join(missing)}."] if missing else []
    if output:
        write_text(output, "\n".join(text) + "\n")
        print(f"Written: {output}")
    else:
        print("\n".join(text))
    return report_failed(PROG, [run for run in runs if run])


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    for label, script in zip(LABELS, ("tiny_llama_v1", "tiny_llama_v2"), strict=True):
        default = Path(f"profiles_{script}")  # where run_all_profilers.sh leaves it
        there = {"type": Path, "default": default, "metavar": "DIR"}
        parser.add_argument(f"--{label}", **there, help="(default: ./%(default)s)")
    where = parser.add_mutually_exclusive_group()
    file = {"type": Path, "metavar": "FILE.md", "help": "write the report there"}
    where.add_argument("--output", **file)
    folder = {"type": Path, "metavar": "DIR", "help": f"write {NAME} into this folder"}
    where.add_argument("--output-dir", **folder)
    parser.add_count("--top", 10, "kernels per table")
    return parser


main = program(build_parser, generate)

if __name__ == "__main__":
    sys.exit(main())

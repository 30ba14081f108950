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
  python analysis_tools/report_generator.py --output ./fusion_comparison_report.md
  python analysis_tools/report_generator.py --baseline ./v1_analysis --fused ./v2_analysis \\
      --output-dir ./analysis
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lab.cli import Parser, ToolError, documented_parser, program
from lab.files import write_text
from lab.profile import reduction, roofline
from lab.records import (
    ForwardFlops,
    Rooflines,
    Run,
    Steps,
    beside,
    check_family,
    differences,
    load_run,
    only_file,
    precision,
    read,
    report_failed,
    runs_table,
    unsteady,
)
from lab.show import Column, render

PROG = Path(__file__).name
NAME = "fusion_report.md"
DEFAULTS = {"baseline": "profiles_tiny_llama_v1", "fused": "profiles_tiny_llama_v2"}
TOP = 10  # kernels per table


def in_folder(pattern: str, name: str) -> Callable[[Path], Path | None]:
    """Where such files are: in a folder, or in the one of this name in it."""
    return lambda top: next(
        (place for place in (top, top / name) if any(place.glob(pattern))), None
    )


def load_flops(place: Path) -> dict:
    """What run_deepspeed_flops.py counted."""
    return read(ForwardFlops, only_file(place, "*_flops.json", "no <script>_flops.json"))


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


def kernel_lines(sides: Sequence[reduction.Profile]) -> list[str]:
    """The report of analyze_kernel_reduction.py as a section."""
    text = reduction.compare(sides, TOP)[2].partition("\n")[2].strip()
    return [re.sub(r"^##", "###", text, flags=re.MULTILINE)]


def flops_lines(sides: Sequence[dict]) -> list[str]:
    """FLOP and bytes of a forward pass, module by module."""
    modules = [{row["module"]: row for row in side["modules"]} for side in sides]

    def value(of_side: dict[str, dict], key: str, unit: float, name: str) -> float | None:
        found = of_side.get(name, {}).get(key)
        return None if found is None else found / unit

    columns = [Column("module", str)]
    kinds = ("GFLOP", "flop", 1e9, ".4f"), ("MB", "bytes", 1e6, ".2f")
    for what, key, unit, form in (*kinds, ("FLOP/byte", "flop_per_byte", 1, ".2f")):
        for label, side in zip(DEFAULTS, modules, strict=True):
            columns.append(Column(f"{label} {what}", partial(value, side, key, unit), form))
    totals = (sum(row["flop"] for row in side.values()) / 1e9 for side in modules)
    total = " and ".join(f"{flop:.4f}" for flop in totals)
    by = " and ".join(dict.fromkeys(str(side.get("flops_counted_by")) for side in sides))
    table = render(columns, [*(modules[0] | modules[1])])
    return [table, "", f"A forward pass: {total} GFLOP, counted by {by}."]


def roofline_lines(label: str, directory: Path, base: Path) -> list[str]:
    """The tables of roofline_analysis.py, and pictures as links from the folder `base`."""

    def files(pattern: str) -> list[Path]:
        found = sorted(directory.rglob(pattern))  # but for what the wrappers set aside
        return [p for p in found if not any(s.endswith((".failed", ".previous")) for s in p.parts)]

    lines = []
    for path in files("roofline_analysis.json"):
        rows, name = read(Rooflines, path)["rows"], "script"
        if "kernel" in rows[0]:  # it came from rocprof-compute
            rows, name = rows[: roofline.TOP], "kernel"
        lines += ["", f"{label}: `{path}`", "", roofline.table(rows, name)]
    for path in files("*roofline*.png") + files("*Roof*.pdf"):
        sign = "" if path.suffix == ".pdf" else "!"
        lines += ["", f"{sign}[{label}: {path.name}](<{os.path.relpath(path, base)}>)"]
    return lines


BY_PYTORCH = in_folder("*_kernels.csv", "pytorch"), reduction.load_pytorch, kernel_lines
BY_ROCPROFV3 = reduction.rocprofv3_folder, reduction.load_rocprofv3, kernel_lines
SECTIONS = (  # the step of run_all_profilers.sh, where its files are, how they are read and shown
    ("Runs", "pytorch_profiler", in_folder("*_summary.json", "pytorch"), load_run, run_lines),
    ("Kernels by the PyTorch profiler", "pytorch_profiler", *BY_PYTORCH),
    ("Kernels by rocprofv3", "rocprofv3", *BY_ROCPROFV3),
    ("FLOPs of modules", "flops", in_folder("*_flops.json", "flops"), load_flops, flops_lines),
)


def reasons_of(label: str, directory: Path) -> dict[str, str]:
    """Why steps of run_all_profilers.sh left nothing in a folder; what is there is of an earlier
    run then."""
    if not directory.is_dir():
        script = directory.name.removeprefix("profiles_")
        ours = f"./run_all_profilers.sh --script {script}.py" * script.startswith("tiny_")
        way_out = f"{ours or 'run_all_profilers.sh'} makes it"
        if there := ", ".join(sorted(map(str, directory.parent.glob("profiles_*/")))):
            way_out += f"; here is {there}"
        raise ToolError(f"--{label} {directory}: no such directory; {way_out}")
    summary = directory / "summary.json"
    steps = read(Steps, summary)["steps"] if summary.is_file() else []
    return {step["name"]: step["reason"] for step in steps if step["status"] != "ok"}


def settings_of(content: Run | reduction.Profile | dict) -> dict | None:
    """What it was measured with; None where the tool does not say."""
    if isinstance(content, Run):
        return content.result
    return content if isinstance(content, dict) else content.settings


def describe(label: str, directory: Path, result: dict | None) -> str:
    """One line at the top of the report."""
    line = f"- {label}: `{directory}`"
    if result is None:
        return line
    on = ", ".join(name for name, on in result.get("fusions", {}).items() if on).replace("_", "-")
    device = result["environment"].get("device_name")
    return f"{line}: {result['script']} on {device}, {precision(result)}, fused: {on or 'nothing'}"


def generate(args: argparse.Namespace) -> int:
    """Write or print the report; returns the exit status."""
    output = args.output or (args.output_dir / NAME if args.output_dir else None)
    folders = {label: getattr(args, label) for label in DEFAULTS}
    reasons = {label: reasons_of(label, folder) for label, folder in folders.items()}
    sections, missing, every, known, runs = [], [], [], {}, {}
    for title, step, find, load, lines in SECTIONS:
        of_run = load is load_run  # one that failed is in the report, too
        there = (label for label in folders if of_run or step not in reasons[label])
        found = {label: load(place) for label in there if (place := find(folders[label]))}
        if of_run:
            runs = found = {label: replace(run, name=label) for label, run in found.items()}
        settings = {label: settings_of(content) for label, content in found.items()}
        every += [(label, each) for label, each in settings.items() if each]
        if len(found) == len(folders):
            sections += ["", f"## {title}", "", *lines([*found.values()])]
            known = known or (settings if all(settings.values()) else {})
        else:
            lacking = [label for label in folders if label not in found]
            why = dict.fromkeys(reasons[label].get(step) or "nothing there" for label in lacking)
            missing.append(f"{title} ({', '.join(lacking)}: {'; '.join(why)})")
    check_family(every)
    base = output.parent if output else Path()
    if rooflines := [line for side in folders.items() for line in roofline_lines(*side, base)]:
        sections += ["", "## Rooflines", *rooflines]
    else:
        missing.append("Rooflines (nothing there)")
    if not sections:
        nothing = f"nothing that both have: {'; '.join(missing)}"
        raise ToolError(f"{args.baseline}, {args.fused}: {nothing}")
    text = ["# Without and with fusion", ""]
    text += [describe(*side, known.get(side[0])) for side in folders.items()]
    text += [f"- note: {note}" for note in differences(known.items())] + sections
    text += ["", f"Not in this report: {'; '.join(missing)}."] if missing else []
    if output:
        write_text(output, "\n".join(text) + "\n")
        print(f"Written: {output}")
    else:
        print("\n".join(text))
    return report_failed(PROG, runs.values())


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    for label, folder in DEFAULTS.items():  # where run_all_profilers.sh leaves it
        parser.add_path(f"--{label}", "DIR", default=Path(folder))
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, metavar="FILE.md", help="write the report there")
    into = f"write {NAME} into this folder"
    where.add_argument("--output-dir", type=Path, metavar="DIR", help=into)
    return parser


main = program(build_parser, generate)

if __name__ == "__main__":
    sys.exit(main())

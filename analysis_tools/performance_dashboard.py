#!/usr/bin/env python3
"""One HTML file with tables of all results in some folders; it needs no network and no server.

Each model, device and precision unfolds by itself, so no table mixes them. What took turns, in a
study or by --compare-fusion, has a table with time, memory, kernels, and ratios turn by turn; runs
of their own are shown beside each other without ratios. Nothing is measured here.

A PATH is a file, or a folder, searched with all below it: studies of the tools here and of
dev/bench/versions.py; results of the scripts (*_summary.json, also several in one file). Status 1
if one of the runs failed; the page then has all others.

Examples:
  python analysis_tools/performance_dashboard.py
  python analysis_tools/performance_dashboard.py results/ --output dashboard.html
  python analysis_tools/performance_dashboard.py profiles_tiny_llama_v2 versions.json
"""

import argparse
import sys
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.files import ROOT
from fusion_lab.profile import report
from fusion_lab.runs import baseline_in_turns, beside, csv_rows, report_failed
from fusion_lab.show import write_csv


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    paths = {"nargs": "*", "type": Path, "default": [ROOT / "results"], "metavar": "PATH"}
    places = "files and folders (default: results/ of the repository)"
    parser.add_argument("paths", **paths, help=places)
    parser.add_path("--output", "FILE.html", default=Path("dashboard.html"))
    parser.add_path("--csv", "FILE.csv", "also write all runs there")
    return parser


def build(args: argparse.Namespace) -> int:
    if args.output.suffix != ".html":
        raise ToolError(f"--output {args.output}: must end in .html")
    panels, runs = report.panels_of(args.paths)
    if not panels:
        raise ToolError(f"{', '.join(map(str, args.paths))}: no results in there")
    report.write(panels, args.output, as_page=True)
    if args.csv:
        rows = [beside(run, baseline_in_turns(run, runs) or run) for run in runs]
        write_csv(args.csv, csv_rows(rows, runs))
    return report_failed(runs)


main = program(build_parser, build)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""One HTML file with charts of all results in some folders; it needs no network and no server.

  Versions      time and kernels of a step of each version, and its speed-up in the same turns
  Memory        peak memory of a step, by size

Model, device and precision are chosen at the top, for all charts, so no chart mixes them; a chart
with several studies has a drop-down of its own. Ratios are from within one study. Runs of their own
are shown as measured, those of the same settings as their median and range. Nothing is measured
here: a chart without data names the command that makes it.

A PATH is a file, or a folder, searched with all below it: studies of the tools here and of
bench/versions.py; results of the scripts (*_summary.json, also several in one file). Status 1 if
one of the runs failed; the page then has all others.

Examples:
  python analysis_tools/performance_dashboard.py
  python analysis_tools/performance_dashboard.py results/ --output dashboard.html
  python analysis_tools/performance_dashboard.py profiles_tiny_llama_v2 versions.json
"""

import argparse
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import _path

from lab.cli import Parser, ToolError, documented_parser, note, program, say
from lab.dashboard import Panel, found_panels, only, read
from lab.files import ROOT, below, write_text

CHARTS = ("versions", "memory")
PRECISIONS = ("bf16", "fp16", "TF32", "fp32", "medium fp32")  # in the order of the drop-down


def files_in(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Each file once, with its name below the folder it was found in."""
    seen = set()
    for top in paths:
        if not top.exists():
            raise ToolError(f"{top}: no such file or directory")
        for path in below(top, "*.json") if top.is_dir() else [top]:
            name = path.relative_to(top).as_posix() if top.is_dir() else path.name
            slowed_down = re.search(r"(^|/)rocprof.*_summary\.json$", name)  # by a profiler
            if not slowed_down and path.resolve() not in seen:
                seen.add(path.resolve())
                yield path, name


def page_of(panels: Sequence[Panel]) -> str:
    """The page as HTML. It begins with the choice of which there are most panels."""
    columns = zip(*(panel.choice for panel in panels), strict=True)
    values = [sorted(set(column)) for column in columns]
    values[2].sort(key=lambda precision: (*PRECISIONS, precision).index(precision))
    there = Counter(panel.choice for panel in panels)
    start = max(itertools.product(*values), key=there.__getitem__)
    names = ("model", "device", "precision")
    page = {
        "filters": [[*each] for each in zip(names, values, start, strict=True)],
        "panels": [vars(panel) for panel in sorted(panels, key=Panel.order)],
    }
    data = json.dumps(page, allow_nan=False).replace("<", "\\u003c")
    return Path(__file__).with_suffix(".html").read_text().replace("/*HERE*/", data)


def build(args: argparse.Namespace) -> int:
    if args.output.suffix != ".html":
        raise ToolError(f"--output {args.output}: must end in .html")
    found = {path: read(path, name) for path, name in files_in(args.paths)}
    left_out = [path for path, panels in found.items() if not panels]
    if named := [path for path in left_out if path in args.paths]:
        raise ToolError(f"{named[0]}: no chart shows what is in this file")
    everything = [*itertools.chain(*found.values())]
    failed = only(str, everything)
    panels = [*only(Panel, everything), *found_panels(only(dict, everything))]
    if not panels and not failed:
        places = ", ".join(map(str, args.paths))
        raise ToolError(f"{places}: no results in there that a chart shows")
    if panels:
        write_text(args.output, page_of(panels))
        there = Counter(panel.chart for panel in panels)
        print(f"Written: {args.output} ({', '.join(f'{name} {there[name]}' for name in CHARTS)})")
    if left_out:
        files = f"{len(left_out)} of the files, first {left_out[0]}"
        note(f"no chart shows what is in {files}")
    for line in failed:
        say(line)
    return 1 if failed else 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    paths = {"nargs": "*", "type": Path, "default": [ROOT / "results"], "metavar": "PATH"}
    places = "files and folders (default: results/ of the repository)"
    parser.add_argument("paths", **paths, help=places)
    parser.add_path("--output", "FILE.html", default=Path("dashboard.html"))
    return parser


main = program(build_parser, build)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Peak memory, throughput or speed-up against sequence length, or any other size, of several runs.

NAME=PATH starts a line; the paths after it, until the next NAME=, belong to it too. A path before
any NAME= is a line of its own. A path is a file or folder with runs, as compare_runs.py takes it,
or a quoted pattern of such. --x takes any number among the settings of a run, such as batch_size,
num_layers or processes; several runs of a line at one place are repeats, and the median is drawn.
`speedup` is over the baseline that took turns with a run: that of --compare-fusion, in its folder
`baseline`, or the first side of a study. Bars are the range of the turns, or of the repeats.

Examples:
  python analysis_tools/plot_runs.py memory scores='scores_*' flash='flash_*' --output memory.png
  python analysis_tools/plot_runs.py memory v2='sweep/*' --x batch_size
  python analysis_tools/plot_runs.py speedup fused='length_*' --output speedup.png
"""

import argparse
import sys

from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.files import write_text
from fusion_lab.plot import QUANTITIES, columns_of, draw_lines, points_of, values_of
from fusion_lab.runs import load_runs, report_failed
from fusion_lab.show import render


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    add = parser.add_argument
    add("what", choices=QUANTITIES)
    add("runs", nargs="+", metavar="NAME=PATH", help="a line and its runs, more PATHs may follow")
    add("--x", default="seq_len", metavar="SETTING", help="what runs differ in (default: seq_len)")
    parser.add_path("--output", "FILE.png", "also draw a picture (or .svg, .pdf)")
    parser.add_path("--csv", "FILE.csv", "also write the table there")
    return parser


def plot(args: argparse.Namespace) -> int:
    output, runs, what = args.output, load_runs(args.runs, True), QUANTITIES[args.what]
    if output and output.suffix not in (".png", ".svg", ".pdf"):
        raise ToolError(f"--output {output}: must end in .png, .svg, .pdf")
    # a baseline has no speed-up of its own
    shown = [run for run in runs if args.what != "speedup" or not run.is_first]
    if not shown:
        raise ToolError("each of these is a baseline, and none has a speed-up over another")
    points = points_of(shown, args.x)
    values = values_of(points, what, runs)
    label = "sequence length" if args.x == "seq_len" else args.x.replace("_", " ")
    columns = columns_of(points, values, label, what)
    places = sorted(set().union(*points.values()))
    print(render(columns, places), flush=True)
    if args.csv:
        write_text(args.csv, render(columns, places, "csv"))
    if output:
        draw_lines(output, {"": (points, values)}, label, what)
        print(f"\nWritten: {output}")
    return report_failed(runs)


main = program(build_parser, plot)

if __name__ == "__main__":
    sys.exit(main())

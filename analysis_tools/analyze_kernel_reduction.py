#!/usr/bin/env python3
"""Which kernels fusion removed, which ones it brought, and what that saved: two profiles compared
by kernel name.

A profile is a directory that run_pytorch_profiler.py wrote (<script>_kernels.csv,
<script>_profile.json), one of run_rocprofv3.sh (rocprofv3_results_*, with stats.csv), or one of
run_all_profilers.sh: from it the PyTorch profiler's is taken, else rocprofv3's. The trace of a
script with --enable-pytorch-profiler is one, too. Of a plain run, FILE.json/ROW of a study or
repeats the count is compared that the script made itself, without names and times; of folders with
runs of both models, each by itself. Profiles of different models are refused; different sizes,
precision or devices are named at the top. Launches are counted, per training step wherever the
number of steps is known. Copies and memsets that the PyTorch profiler saw are no kernels; their
time counts. On a CPU there are no kernels. There the reduction is that of the operator calls that
the scripts themselves counted; the tables have all that the profiler saw: views, operators that
only call others, nodes of the autograd graph, inner steps of a matrix product.

The tables go to stdout as Markdown. With --output they are also written to kernel_reduction.md in
that directory, beside kernel_reduction.csv with every kernel under its full name.

Examples:
  python analysis_tools/analyze_kernel_reduction.py --baseline ./v1_analysis --fused ./v2_analysis
  python analysis_tools/analyze_kernel_reduction.py --baseline rocprofv3_results_baseline \\
      --fused rocprofv3_results_fused --output ./kernel_analysis
  python analysis_tools/analyze_kernel_reduction.py --baseline profiles_tiny_llama_v1 \\
      --fused profiles_tiny_llama_v2
"""

import argparse
import sys

from fusion_lab.cli import Parser, documented_parser, note, program
from fusion_lab.files import write_text
from fusion_lab.profile.reduction import NUMBERS, compare, found_in, pairs
from fusion_lab.show import write_csv


def as_row(kernel: dict) -> dict:
    """A row of the CSV file."""
    numbers = {key.replace(" ", "_"): kernel[key] for key in NUMBERS}
    names = {key: kernel[key] for key in ("name", "category")}
    return {**names, "found_in": found_in(kernel), **numbers}


def analyse(args: argparse.Namespace) -> int:
    kernels = []
    tables = []
    for sides in pairs(args.baseline, args.fused):
        of_pair, notes, table = compare(sides, args.top)
        note(*notes)
        kernels += of_pair
        tables.append(table.rstrip())
    text = "\n\n".join(tables) + "\n"
    print(text, end="")
    if args.output:
        names = ["kernel_reduction.md"]
        write_text(args.output / names[0], text)
        if kernels:
            names.insert(0, "kernel_reduction.csv")
            write_csv(args.output / names[0], list(map(as_row, kernels)))
        print(f"\nWritten: {args.output}/{', '.join(names)}")
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_path("--baseline", "DIR", "profile without fusion", required=True)
    parser.add_path("--fused", "DIR", "profile with fusion", required=True)
    parser.add_path("--output", "DIR", "also write CSV and Markdown there")
    parser.add_count("--top", 10, "kernels per table; 0: only totals and categories", least=0)
    return parser


main = program(build_parser, analyse)

if __name__ == "__main__":
    sys.exit(main())

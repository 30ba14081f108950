#!/usr/bin/env python3
"""One report of what two folders hold, without and with fusion, in Markdown or, with --html, as a
page.

A folder is what run_all_profilers.sh wrote, or the results of a script, of run_pytorch_profiler.py,
run_rocprofv3.sh or run_deepspeed_flops.py. The report has a section for each of these that both
folders have:

  Runs         the result files, as compare_runs.py shows them; of a tree of several models, sizes
               or repeats a table for each model and size that both have
  Kernels      by the PyTorch profiler and by rocprofv3, as analyze_kernel_reduction.py has them
  FLOPs        FLOP, bytes and intensity of each kind of module

What is not there is named at the end, with the reason where run_all_profilers.sh noted one. A path
of runs may be a file, too, or FILE.json/ROW of a study. Two runs of different models are refused;
different sizes, precision or devices are named at the top. Without --output the report goes to
stdout. Status 1 if one of the runs failed.

Examples:
  python analysis_tools/report_generator.py --output ./fusion_comparison_report.md
  python analysis_tools/report_generator.py --baseline ./v1_analysis --fused ./v2_analysis \\
      --output-dir ./analysis
"""

import argparse
import sys
from pathlib import Path

from fusion_lab.cli import Parser, documented_parser, program
from fusion_lab.profile import report
from fusion_lab.runs import report_failed

FOLDERS = {"baseline": "profiles_tiny_llama_v1", "fused": "profiles_tiny_llama_v2"}


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    for label, folder in FOLDERS.items():  # where run_all_profilers.sh leaves it
        parser.add_path(f"--{label}", "DIR", default=Path(folder))
    parser.add_path("--output", "FILE", "write the report there")
    parser.add_path("--output-dir", "DIR", "write fusion_report.md, or .html, there")
    parser.add_flag("--html", "as a page")
    return parser


def generate(args: argparse.Namespace) -> int:
    panels, runs = report.panels_of_both({label: getattr(args, label) for label in FOLDERS})
    name = f"fusion_report.{'html' if args.html else 'md'}"
    output = args.output or (args.output_dir / name if args.output_dir else None)
    report.write(panels, output, args.html)
    return report_failed(runs)


main = program(build_parser, generate)

if __name__ == "__main__":
    sys.exit(main())

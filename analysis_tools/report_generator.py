#!/usr/bin/env python3
"""One report in Markdown of what two folders hold, without and with fusion.

A folder is what run_all_profilers.sh wrote, or the results of a script, of run_pytorch_profiler.py,
run_rocprofv3.sh or run_deepspeed_flops.py. The report has a section for each of these that both
folders have:

  Runs         the result files, as compare_runs.py shows them
  Kernels      by the PyTorch profiler and by rocprofv3, as analyze_kernel_reduction.py has them
  FLOPs        FLOP, bytes and intensity of each kind of module

What is not there is named at the end, with the reason where run_all_profilers.sh noted one. Runs of
different models are refused; different sizes, precision or devices are named at the top. Without
--output the report goes to stdout. Status 1 if one of the runs failed.

Examples:
  python analysis_tools/report_generator.py --output ./fusion_comparison_report.md
  python analysis_tools/report_generator.py --baseline ./v1_analysis --fused ./v2_analysis \\
      --output-dir ./analysis
"""

import argparse
import sys
from pathlib import Path

from fusion_lab import runs as records
from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.files import write_text
from fusion_lab.profile import reduction, roofline

NAME = "fusion_report.md"
DEFAULTS = {"baseline": "profiles_tiny_llama_v1", "fused": "profiles_tiny_llama_v2"}
TOP = 10  # kernels per table


def kernel_lines(sides: dict[str, reduction.Profile]) -> str:
    """The report of analyze_kernel_reduction.py as a section."""
    text = reduction.compare([*sides.values()], TOP)[2]
    return text.partition("\n")[2].strip().replace("\n##", "\n###")


# The step of run_all_profilers.sh, its files, and what reads and shows them.
RUNS = None, "pytorch/*_summary.json", records.load_run, records.runs_section
BY_PYTORCH = "pytorch_profiler", "pytorch/*_kernels.csv", reduction.load_pytorch, kernel_lines
BY_ROCPROFV3 = "rocprofv3", "rocprofv3_results_*/stats.csv", reduction.load_rocprofv3, kernel_lines
MODULES = "flops", "flops/*_flops.json", roofline.load_modules, roofline.modules_table
SECTIONS = {
    "Runs": RUNS,
    "Kernels by the PyTorch profiler": BY_PYTORCH,
    "Kernels by rocprofv3": BY_ROCPROFV3,
    "FLOPs of modules": MODULES,
}


def generate(args: argparse.Namespace) -> int:
    output = args.output or (args.output_dir / NAME if args.output_dir else None)
    folders = {label: getattr(args, label) for label in DEFAULTS}
    sections, missing, every, known, runs = [], [], [], {}, {}
    for title, (step, files, load, show) in SECTIONS.items():
        places = {label: records.collected(top, files, step) for label, top in folders.items()}
        why = {label: place for label, place in places.items() if isinstance(place, str)}
        found = {label: load(place) for label, place in places.items() if label not in why}
        runs = found if title == "Runs" else runs
        settings = {label: content.settings for label, content in found.items()}
        every += [(label, each) for label, each in settings.items() if each]
        if why:
            missing.append(f"{title} ({', '.join(why)}: {'; '.join(dict.fromkeys(why.values()))})")
        else:
            sections += ["", f"## {title}", "", show(found)]
            known = known or (settings if all(settings.values()) else {})
    records.check_family(every)
    if not sections:
        both = f"{args.baseline}, {args.fused}"
        raise ToolError(f"{both}: nothing that both have: {'; '.join(missing)}")
    text = ["# Without and with fusion", ""]
    for label, folder in folders.items():
        on = f": {records.described(known[label], fused=True)}" if known else ""
        text.append(f"- {label}: `{folder}`{on}")
    text += [f"- note: {note}" for note in records.differences(known.items())] + sections
    text += ["", f"Not in this report: {'; '.join(missing)}."] if missing else []
    if output:
        write_text(output, "\n".join(text) + "\n")
        print(f"Written: {output}")
    else:
        print("\n".join(text))
    return records.report_failed(records.renamed(runs))


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    for label, folder in DEFAULTS.items():  # where run_all_profilers.sh leaves it
        parser.add_path(f"--{label}", "DIR", default=Path(folder))
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, metavar="FILE.md", help="write the report there")
    where.add_argument("--output-dir", type=Path, metavar="DIR", help=f"write {NAME} there")
    return parser


main = program(build_parser, generate)

if __name__ == "__main__":
    sys.exit(main())

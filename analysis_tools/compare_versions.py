#!/usr/bin/env python3
"""All versions of a model side by side: speed, memory, kernels, launches and loss.

They take turns in this process, on a GPU as whole-step graphs unless the arguments say
--disable-cuda-graph; the loss is that of a short run of each. The rows go to DIR/versions.json; the
same command goes on there after an interruption, with more sizes it measures those alone, and one
with other versions or rounds is refused. Without a GPU these are V1 and V2, at small sizes if none
is given: the kernels of V3 and V4 run in Triton's interpreter there, which says nothing about their
speed; --versions takes any. With --v1 DIR and so on nothing is measured: results are read from
there (<script>_summary.json, also in pytorch_profiles_vN below, or a study), each of a run of its
own, whose ratios a busy host can change. Of several sizes those are taken that both have, of
repeats the median.

A version that went out of memory is a row; if one failed, the exit status is 1.

Examples:
  python analysis_tools/compare_versions.py --generate-report
  python analysis_tools/compare_versions.py --v1 profiles/v1 --v2 profiles/v2
  python analysis_tools/compare_versions.py --family llama --versions v1 v2 v3 v4 --rounds 3 \\
      --hidden-dim 64 --num-layers 2 --seq-len 32 --batch-size 2
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fusion_lab import sweep
from fusion_lab.cli import Parser, ToolError, note, program
from fusion_lab.runs import versions_in
from fusion_lab.script import load_script
from fusion_lab.turns import on_gpu

VERSIONS = ("v1", "v2", "v3", "v4")


def build_parser() -> Parser:
    parser = sweep.sweep_parser(__file__, __doc__, "tiny_llama_v2.py", rounds=5)
    add = parser.add_argument
    add("--family", choices=("llama", "openfold"), help="of which the arguments are (both)")
    add("--versions", nargs="+", choices=VERSIONS, help="(all; without a GPU v1 v2)")
    for version in VERSIONS:
        parser.add_path(f"--{version}", "DIR", f"read the result of {version.upper()} from there")
    parser.add_flag("--generate-report", "also write the tables to version_comparison.md")
    parser.add_path("--output-dir", "DIR", default=Path("version_comparison"))
    return parser


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    models = [f"tiny_{args.family}"] if args.family else ["tiny_llama", "tiny_openfold"]
    folders = {version: getattr(args, version) for version in VERSIONS if getattr(args, version)}
    if folders and (argv or args.versions):
        raise ToolError(f"--{next(iter(folders))} reads results: no arguments of scripts beside it")
    path = args.table or args.output or args.output_dir / "versions.json"
    report = args.output_dir / "version_comparison.md" if args.generate_report else None
    if folders:
        alone = "Read from results. Runs by themselves were not measured in turns."
        return sweep.show_runs(args, versions_in(folders, models), alone, report)
    if not args.table:
        wanted = args.versions or (VERSIONS if on_gpu(argv) else VERSIONS[:2])
        if not args.versions and len(wanted) < len(VERSIONS):
            note("no GPU: V1 and V2 only, others would run in Triton's interpreter (--versions)")
        wanted = sorted(wanted)
        teams = [[load_script(f"{model}_{v}.py").SCRIPT for v in wanted] for model in models]
        points = sweep.sweep_points(args, argv, teams)
        sweep.measure_points(args, argv, points, path, sweep.LOSS_STEPS, versions=wanted)
    return sweep.show(args, path, report)


main = program(build_parser, run, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

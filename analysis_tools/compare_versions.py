#!/usr/bin/env python3
"""All versions of a model side by side: speed, memory, kernels, launches and loss.

They take turns in this process, on a GPU as whole-step graphs unless the arguments say
--disable-cuda-graph; the loss is that of a short run of each. The rows go to DIR/versions.json; the
same command goes on there after an interruption, one with other arguments is refused. Without a GPU
these are V1 and V2: the kernels of V3 and V4 run in Triton's interpreter there, which says nothing
about their speed; --versions takes any, with small sizes. With --v1 DIR and so on nothing is
measured: results are read from there (<script>_summary.json, also in pytorch_profiles_vN below),
each of a run of its own, whose ratios a busy host can change.

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

from fusion_lab import records, study
from fusion_lab.cli import Parser, ToolError, note, program
from fusion_lab.files import write_text
from fusion_lab.script import parser_around
from fusion_lab.show import render

VERSIONS = ("v1", "v2", "v3", "v4")
LOSS_STEPS = ["--warmup-steps", "2", "--num-steps", "8"]


def build_parser() -> Parser:
    parser = parser_around(__file__, __doc__, "tiny_llama_v2.py", "all scripts")
    add, model = parser.add_argument, "which arguments of one model need (default: both)"
    add("--family", choices=("llama", "openfold"), help=model)
    taken = "to measure (default: all; without a GPU v1 v2)"
    add("--versions", nargs="+", choices=VERSIONS, help=taken)
    parser.add_count("--rounds", 5, "turns of each version")
    for version in VERSIONS:
        parser.add_path(f"--{version}", "DIR", f"read the result of {version.upper()} from there")
    parser.add_flag("--generate-report", "also write the tables to version_comparison.md")
    parser.add_path("--output-dir", "DIR", default=Path("version_comparison"))
    return parser


def measured(args: argparse.Namespace, models: Sequence[str], argv: Sequence[str]) -> dict:
    import torch

    wanted = args.versions or (VERSIONS if torch.cuda.is_available() else VERSIONS[:2])
    if not args.versions and len(wanted) < len(VERSIONS):
        left_out = "V3 and V4 would run in Triton's interpreter (see --versions)"
        note(f"no GPU: V1 and V2 only, {left_out}; at the default sizes it takes long")
    parts = []
    for model in models:
        sides = {v.upper(): (f"{model}_{v}", [*argv]) for v in VERSIONS if v in wanted}
        parts.append(study.versions_part({"model": model}, sides, args.rounds, more=LOSS_STEPS))
    path = args.output_dir / "versions.json"
    settings = {"rounds": args.rounds, "versions": sorted(wanted), "argv": [*argv]}
    study.measure_study(path, parts, keep=True, **settings)
    return records.read_study(path, ("model", "side", "script", "argv"))


def read(given: dict[str, Path], models: Sequence[str]) -> list[dict]:
    """The results of these versions, of the models that have more than one; notes on stderr."""
    rows, wanted = [], []
    for model in models:
        runs = records.runs_of(given, model)
        wanted += [f"{model}_{version}_summary.json in {top}" for version, top in given.items()]
        if len(runs) >= min(2, len(given)):
            named = [(run.result["script"], run.result) for run in runs]
            note(*records.differences(named))
            rows += [{"side": run.name, **run.row(alone=True)} for run in runs]
    if not rows:
        raise ToolError(f"there is no {' or '.join(wanted)}")
    return rows


def compare(args: argparse.Namespace, argv: Sequence[str]) -> int:
    models = [f"tiny_{args.family}"] if args.family else ["tiny_llama", "tiny_openfold"]
    given = {version: path for version in VERSIONS if (path := getattr(args, version))}
    if given and (argv or args.versions):
        beside = "no --versions and no arguments of scripts beside it"
        raise ToolError(f"--{next(iter(given))} reads results: {beside}")
    if given:
        rows = read(given, models)
        lines = ["Read from results of single runs, which were not measured in turns."]
    else:
        rows = (content := measured(args, models, argv))["rows"]
        lines = [study.heading(content, " and ".join(models))]
    for model in models:
        if same := [row for row in rows if row["model"] == model]:
            columns = study.versions_columns(model, same)
            lines.append(render(columns, study.beside_first(same)))
    text = "\n\n".join(lines)
    print(text, flush=True)
    if args.generate_report:
        report = args.output_dir / "version_comparison.md"
        write_text(report, f"# Versions compared\n\n{text}\n")
        print(f"\nWritten: {report}")
    study.check_failed(rows)
    return 0


main = program(build_parser, compare, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

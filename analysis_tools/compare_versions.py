#!/usr/bin/env python3
"""All versions of a model side by side: speed, memory, kernels, launches and loss.

They are measured in this process in short alternating turns, on a GPU as whole-step graphs unless
the arguments say --disable-cuda-graph; the loss is that of a short run of each. The rows go to
DIR/versions.json; after an interruption the same command goes on there, one with other arguments is
refused. Without a GPU these are V1 and V2: the kernels of V3 and V4 run in Triton's interpreter
there, which says nothing about their speed. --versions takes any, with small sizes. With --v1 DIR
and so on nothing is measured: results are read from there (<script>_summary.json, also in
pytorch_profiles_vN below), each of a run of its own, whose ratios a busy host can change.

--generate-report writes DIR/version_comparison.md with the tables and a picture. A version that
went out of memory is a row; if one failed, the exit status is 1.

Examples:
  python analysis_tools/compare_versions.py --generate-report
  python analysis_tools/compare_versions.py --v1 profiles/v1 --v2 profiles/v2
  python analysis_tools/compare_versions.py --family llama --versions v1 v2 v3 v4 --rounds 3 \\
      --hidden-dim 64 --num-layers 2 --seq-len 32 --batch-size 2
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import itertools
from collections.abc import Sequence

from lab import study
from lab.cli import Parser, ToolError, print_notes, program
from lab.files import write_text
from lab.records import differences, load_run
from lab.script import parser_around
from lab.show import Column, drawing, rate, render, save_figure

PROG = Path(__file__).name
MODELS = ("tiny_llama", "tiny_openfold")
VERSIONS = ("v1", "v2", "v3", "v4")
LOSS_STEPS = ["--warmup-steps", "2", "--num-steps", "8"]
PANELS = {"batch_ms": "ms per step", "per_step": "kernels per step", "peak_mb": "peak MB"}
Found = dict[str, list[dict]]  # of each model, a row of each version


def build_parser() -> Parser:
    """The command line."""
    parser = parser_around(PROG, __doc__, "tiny_llama_v2.py", "all scripts")
    add, model = parser.add_argument, "which arguments of one model need (default: both)"
    add("--family", choices=("llama", "openfold"), help=model)
    taken = "to measure (default: all; without a GPU v1 v2)"
    add("--versions", nargs="+", choices=VERSIONS, help=taken)
    parser.add_count("--rounds", 5, "turns of each version")
    for version in VERSIONS:
        parser.add_path(f"--{version}", "DIR", f"read the result of {version.upper()} from there")
    parser.add_flag("--generate-report", "write a report and a picture")
    parser.add_path("--output-dir", "DIR", default=Path("version_comparison"))
    return parser


def measured(
    args: argparse.Namespace, models: Sequence[str], argv: Sequence[str]
) -> tuple[Found, str]:
    """The versions of these models, measured as far as they are not yet, and how."""
    import torch

    wanted = args.versions or (VERSIONS if torch.cuda.is_available() else VERSIONS[:2])
    if not args.versions and len(wanted) < len(VERSIONS):
        left_out = "V3 and V4 would run in Triton's interpreter (see --versions)"
        print_notes(PROG, f"no GPU: V1 and V2 only, {left_out}; at the default sizes it takes long")
    parts = []
    for model in models:
        sides = {v.upper(): (f"{model}_{v}", [*argv]) for v in VERSIONS if v in wanted}
        parts.append(study.versions_part({"model": model}, sides, args.rounds, more=LOSS_STEPS))
    path = args.output_dir / "versions.json"
    settings = {"rounds": args.rounds, "versions": sorted(wanted), "argv": [*argv]}
    study.measure_study(path, parts, keep=True, **settings)
    content = study.read_study(path, ("model", "side", "script", "argv"))
    found = {model: [row for row in content["rows"] if row["model"] == model] for model in models}
    return found, study.heading(content, " and ".join(models))


def read(given: dict[str, Path], models: Sequence[str]) -> tuple[Found, str]:
    """The results of these versions that are there, and how they came about; notes on stderr."""
    found: Found = {}
    for model in models:
        runs = []
        for version, path in given.items():
            name = f"{model}_{version}_summary.json"
            files = path / name, path / f"pytorch_profiles_{version}" / name
            runs += [load_run(file, version.upper()) for file in files if file.is_file()][:1]
        if len(runs) >= min(2, len(given)):
            print_notes(PROG, *differences((run.result["script"], run.result) for run in runs))
            found[model] = [{"side": run.name, **run.row()} for run in runs]
    if not found:
        wanted = (f"{m}_{v}_summary.json in {place}" for m in models for v, place in given.items())
        raise ToolError(f"there is no {' or '.join(wanted)}")
    for row in itertools.chain(*found.values()):
        row.pop("turns_ms", None)  # in which nothing else took a turn
    return found, "Read from results of single runs, which were not measured in turns."


def table(model: str, rows: Sequence[dict]) -> str:
    """A row for each version; speed-ups are over the first, turn by turn where they took turns."""
    columns = [
        Column(model, "side"),
        Column("samples/sec", lambda row: rate(row.get("samples_per_sec"))).or_ended(),
        Column("ms per step", "batch_ms", ".2f"),
        Column(f"over {rows[0]['side']}", "over_first", ".2f", "x"),
        Column("in turns", "over_first_in_turns"),
        Column("peak MB", "peak_mb", ".1f"),
        Column(f"{study.unit_of(rows)} per step", "per_step", ".10g"),
        Column("host launches", "host_launches", ".10g"),
        Column("final loss", "final_loss", ".4f"),
    ]
    return render(columns, rows)


def draw(path: Path, found: Found) -> None:
    """Time, kernels and memory of each version."""
    size = {"figsize": (11, 1 + 2 * len(found)), "squeeze": False, "layout": "constrained"}
    figure, lines = drawing().subplots(len(found), len(PANELS), **size)
    for line, (model, rows) in zip(lines, found.items(), strict=True):
        for panel, (key, title) in zip(line, PANELS.items(), strict=True):
            bars = panel.barh([row["side"] for row in rows], [row.get(key) or 0 for row in rows])
            panel.bar_label(bars, fmt="%.4g", padding=2)
            panel.set_title(f"{model}: {title.replace('kernels', study.unit_of(rows))}")
            panel.invert_yaxis()
            panel.margins(x=0.2)  # room for the numbers
    save_figure(figure, path, dpi=120)


def compare(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print the tables, write the report; returns the exit status."""
    models = [f"tiny_{args.family}"] if args.family else MODELS
    given = {version: path for version in VERSIONS if (path := getattr(args, version))}
    if given and (argv or args.versions):
        beside = "no --versions and no arguments of scripts beside it"
        raise ToolError(f"--{next(iter(given))} reads results: {beside}")
    if args.generate_report:
        drawing()  # if it is missing, that is said now
    found, how = read(given, models) if given else measured(args, models, argv)
    text = "\n\n".join([how, *(table(m, study.beside_first(rows)) for m, rows in found.items())])
    print(text, flush=True)
    if args.generate_report:
        report, picture = (args.output_dir / n for n in ("version_comparison.md", "versions.png"))
        draw(picture, found)
        write_text(report, f"# Versions compared\n\n{text}\n\n![versions]({picture.name})\n")
        print(f"\nWritten: {report}, {picture}")
    study.check_failed(itertools.chain(*found.values()))
    return 0


main = program(build_parser, compare, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

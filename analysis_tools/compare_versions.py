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
  python analysis_tools/compare_versions.py --generate-report --output-dir bf16 --family llama \\
      --seq-len 128 --use-amp
  python analysis_tools/compare_versions.py --v1 profiles/v1 --v2 profiles/v2
  python analysis_tools/compare_versions.py --family llama --versions v1 v2 v3 v4 --rounds 3 \\
      --hidden-dim 64 \\
      --num-layers 2 --seq-len 32 --batch-size 2
"""

from __future__ import annotations

import _root

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lab import records
from lab.cli import Parser, ToolError, documented_parser, print_notes, program
from lab.files import ROOT, write_text
from lab.results import Run, differences, load_run
from lab.script import load_script, script_arguments
from lab.show import Column, drawing, rate, render, save_figure
from lab.study import as_rows, by_side, measure_study, unit_of
from lab.turns import graph_of, in_turns, ratios, short_run, speedup, spread

PROG = Path(__file__).name
MODELS = ("tiny_llama", "tiny_openfold")
VERSIONS = ("v1", "v2", "v3", "v4")
ON_A_CPU = ("v1", "v2")
LOSS_STEPS = ["--warmup-steps", "2", "--num-steps", "8"]
PANELS = {  # key of a row: title and form of its values
    "batch_ms": ("time per step", "{:.4g} ms"),
    "per_step": ("{} per step", "{:.0f}"),
    "peak_mb": ("peak memory", "{:.0f} MB"),
}
Found = dict[str, dict[str, dict]]  # model, version, what was measured


def build_parser() -> Parser:
    """The command line."""
    usage = "%(prog)s [arguments] [arguments of all scripts]"
    note = "Every other argument goes to all scripts; those of one model need --family.\n\n"
    parser = documented_parser(PROG, __doc__, usage, note)
    add = parser.add_argument
    add("--family", choices=("llama", "openfold"), help="(default: both)")
    taken = "to measure (default: all; without a GPU v1 v2)"
    add("--versions", nargs="+", choices=VERSIONS, help=taken)
    parser.add_count("--rounds", 5, "turns of each version")
    for version in VERSIONS:
        parser.add_path(f"--{version}", "DIR", f"read the result of {version.upper()} from there")
    parser.add_flag("--generate-report", "write a report and a picture")
    parser.add_path("--output-dir", "DIR", default=Path("version_comparison"))
    return parser


def measure(model: str, versions: Sequence[str], argv: Sequence[str], rounds: int) -> list[dict]:
    """A row for each version of a model, measured in turns."""
    sides = {version.upper(): (f"{model}_{version}", graph_of(argv)) for version in versions}
    rows = in_turns(sides, rounds)
    for version, (script, options) in sides.items():
        if "turns_ms" in rows[version]:
            result = short_run(script, [*LOSS_STEPS, *options])
            speed = 1e3 * result["training"]["batch_size"] / rows[version]["batch_ms"]
            loss = result["loss"]
            rows[version] |= {"samples_per_sec": speed, "final_loss": loss.get("final")}
            rows[version] |= {"loss_steps": len(loss["curve"])}
    return as_rows(rows)


def measured(
    args: argparse.Namespace, models: Sequence[str], argv: Sequence[str]
) -> tuple[Found, str]:
    """The versions of these models, measured as far as they are not yet, and how."""
    import torch

    gpu = torch.cuda.is_available()
    if not gpu and not args.versions:
        left_out = "V3 and V4 would run in Triton's interpreter (see --versions)"
        wait = "at the default sizes this takes minutes"
        print_notes(PROG, f"no GPU: V1 and V2 only, {left_out}; {wait}")
    wanted = [v for v in VERSIONS if v in (args.versions or (VERSIONS if gpu else ON_A_CPU))]
    there = {model: [v for v in wanted if (ROOT / f"{model}_{v}.py").is_file()] for model in models}
    for model, versions in there.items():
        if not versions:
            raise ToolError(f"{model} has no {' and no '.join(wanted)}")
        for version in versions:  # what does not fit is said before anything is measured
            script_arguments(load_script(f"{model}_{version}.py"), argv, None)
    path = args.output_dir / "versions.json"
    if path.exists():
        print_notes(PROG, f"what is in {path} is not measured again")
    work = partial(measure, argv=argv, rounds=args.rounds)
    parts = [({"model": m}, partial(work, m, versions)) for m, versions in there.items()]
    settings = {"rounds": args.rounds, "versions": wanted, "argv": [*argv]}
    by_model = by_side(measure_study(path, parts, keep=True, **settings), "model")
    found = {model: by_model[(model,)] for model in there}
    environment = records.read(records.Study, path)["environment"]
    graphs = any("graph" in row["mode"] for versions in found.values() for row in versions.values())
    software = f"PyTorch {environment['torch']}, Triton {environment['triton']}"
    asked = f"arguments: {' '.join(argv) or 'none'}"
    turns = f"{args.rounds} short alternating turns"
    how = f"{turns}, {'whole steps as graphs' if graphs else 'eager steps'}"
    return found, f"{environment['device_name']}, {software}; {asked}. Measured in {how}."


def results_of(version: str, path: Path, models: Sequence[str]) -> dict[str, Run]:
    """The results of a version that a file or directory has, by model."""
    if not path.is_dir():
        run = load_run(path)
        if run.result["script"] not in [f"{model}_{version}" for model in models]:
            raise ToolError(f"--{version} {path}: a run of {run.result['script']}")
        return {run.result["script"].rpartition("_")[0]: run}
    found = {}
    for model in models:
        for folder in (path / f"pytorch_profiles_{version}", path):  # the last one wins
            if (file := folder / f"{model}_{version}_summary.json").is_file():
                found[model] = load_run(file)
    if not found:
        names = " or ".join(f"{model}_{version}_summary.json" for model in models)
        below = f"pytorch_profiles_{version}"
        raise ToolError(f"--{version} {path}: no {names} in it, or in its {below}")
    return found


def read(given: dict[str, Path], models: Sequence[str]) -> tuple[Found, str]:
    """The results of these versions that are there, and how they came about; notes on stderr."""
    runs: dict[str, dict[str, Run]] = {model: {} for model in models}
    for version, path in given.items():
        for model, run in results_of(version, path, models).items():
            runs[model][version] = run
    enough = min(2, len(given))
    runs = {model: by_version for model, by_version in runs.items() if len(by_version) >= enough}
    if not runs:
        places = ", ".join(map(str, given.values()))
        raise ToolError(f"no model has results of two versions in {places}")
    for by_version in runs.values():
        named = ((run.result["script"], run.result) for run in by_version.values())
        print_notes(PROG, *differences(named))
    every = [run for by_version in runs.values() for run in by_version.values()]
    devices = sorted({str(run.result["environment"].get("device_name")) for run in every})
    found = {m: {v.upper(): run.row() for v, run in several.items()} for m, several in runs.items()}
    how = "Read from results of single runs, which were not measured in turns."
    return found, f"{', '.join(devices)}. {how}"


def table(model: str, rows: dict[str, dict], turns: bool) -> str:
    """A row for each version; speed-ups are over the first, turn by turn where they took turns."""
    base, first = next(iter(rows.items()))
    steps = {row["loss_steps"] for row in rows.values() if "loss_steps" in row}
    loss = f"loss after {steps.pop()} steps" if len(steps) == 1 else "final loss"
    unit = unit_of(rows.values())

    def over_first(row: dict) -> float | None:
        if not (first.get("batch_ms") and row.get("batch_ms")):
            return None
        return speedup(first, row) if turns else first["batch_ms"] / row["batch_ms"]

    def between(row: dict) -> str | None:
        return None if row is first or over_first(row) is None else spread(ratios(first, row))

    columns = [
        Column(model, lambda row: next(version for version, each in rows.items() if each is row)),
        Column("samples/sec", lambda row: rate(row.get("samples_per_sec"))).or_ended(),
        Column("ms per step", "batch_ms", ".2f"),
        Column(f"over {base}", over_first, ".2f", "x"),
        *[Column("in turns", between)] * turns,
        Column("peak MB", "peak_mb", ".1f"),
        Column(f"{unit} per step", "per_step", ".10g"),
        Column("host launches", "host_launches", ".10g"),
        Column(loss, "final_loss", ".4f"),
    ]
    return render(columns, [*rows.values()])


def draw(path: Path, found: Found) -> None:
    """Time, kernels and memory of each version, as a part of the first one's of the model."""
    pyplot = drawing()
    size = {"figsize": (11, 3.6), "sharey": True, "layout": "constrained"}
    figure, panels = pyplot.subplots(1, len(PANELS), **size)
    unit = unit_of(row for rows in found.values() for row in rows.values())
    upright = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": "x-small"}
    versions = [v.upper() for v in VERSIONS if any(v.upper() in rows for rows in found.values())]
    width, labels, highest = 0.8 / len(versions), {}, 1.0
    for panel, (key, (title, form)) in zip(panels, PANELS.items(), strict=True):
        for place, rows in enumerate(found.values()):
            base = next(iter(rows.values())).get(key)
            for version, row in rows.items() if base else ():
                if row.get(key) is None:
                    continue
                number, part = versions.index(version), row[key] / base
                at, highest = place + (number - (len(versions) - 1) / 2) * width, max(highest, part)
                labels[version] = panel.bar(at, part, width, color=f"C{number}")
                panel.text(at, part + 0.01, form.format(row[key]), **upright)
        panel.set_title(title.format(unit))
        panel.set_xticks(range(len(found)), list(found))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("of the first version")
    panels[0].set_ylim(0, highest + 0.35)  # with room for the numbers
    figure.legend(labels.values(), labels.keys(), loc="outside right upper", frameon=False)
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
    tables = [table(model, rows, turns=not given) for model, rows in found.items()]
    print(f"{how}\n", *tables, sep="\n", flush=True)
    if args.generate_report:
        report = args.output_dir / "version_comparison.md"
        draw(args.output_dir / "versions.png", found)
        picture = "![time, kernels and memory of each version, as parts of the first](versions.png)"
        parts = ["# Versions compared", how, *tables, picture]
        write_text(report, "\n\n".join(parts) + "\n")
        print(f"\nWritten: {report}, {args.output_dir / 'versions.png'}")
    every = [row for rows in found.values() for row in rows.values()]
    failed = [row for row in every if row.get("status") == "failed"]
    for row in failed:
        print(f"{PROG}: {row['script']} failed: {row['error']}", file=sys.stderr)
    return 1 if failed else 0


main = program(build_parser, compare, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Result files of several runs side by side, as a Markdown table.

A PATH is a result file (<script>_summary.json), the directory of a run (its --profile-dir), or FILE.json/NAME for a run
in a file of several; NAME=PATH names the row.
Speed-up and memory change are over --baseline, the first run unless it says otherwise. Where the numbers of processes
differ, the scaling efficiency is the speed-up over the ratio of these numbers. Notes on stderr, above the table, name
what differs: sizes, steps, precision, torch.compile, graphs, the device; and below it runs that were disturbed, whose
mean step is much longer than the median. Runs of different models are refused. A run that went out of memory is a row
of its own; one that failed is too, and then the exit status is 1.

--csv has a row for each run with all that is known of it, whatever its outcome: sizes, each fusion as 0 or 1,
precision, device, times, memory, kernels, launches and loss. A loop in the shell and this command are a sweep. --save
keeps the runs in one file, complete and under the names of their rows, for this tool and others to read. A file that is
read is not written on.

Examples:
  python analysis_tools/compare_runs.py exercises/results/v1 exercises/results/v2
  python analysis_tools/compare_runs.py baseline=./unfused flash=./flash all=./fused --csv table.csv
  python analysis_tools/compare_runs.py ./flash ./qkv --baseline ./unfused
  python analysis_tools/compare_runs.py ./one_gpu ./four_gpus
  python analysis_tools/compare_runs.py sweep/* --csv sweep.csv --save sweep.json
  python analysis_tools/compare_runs.py sweep.json/batch_1 sweep.json/batch_4
"""

from __future__ import annotations

import _root

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from workshop.cli import documented_parser, print_notes, run_tool
from workshop.files import write_csv, write_text
from workshop.results import Run, by_name, check_family, differences, load_runs, precision, report_failed, unsteady
from workshop.show import NOT_FINISHED, cell, markdown_table

PROG = Path(__file__).name
MEASURED = {
    "samples_per_sec": ("timing", "samples_per_sec"),
    "batch_ms": ("timing", "batch_ms"),
    **{f"{phase}_ms": ("timing", f"{phase}_ms") for phase in ("forward", "backward", "optimizer", "graph")},
    "compilation_ms": ("timing", "compilation_overhead_ms"),
    "peak_mb": ("memory", "peak_mb"),
    "kernels_per_step": ("kernels", "per_step"),
    "host_launches": ("kernels", "host_launches"),
    "final_loss": ("loss", "final"),
    "processes": ("training", "processes"),
}
SETTINGS = ("batch_size", "num_steps", "warmup_steps", "learning_rate", "seed", "deterministic")  # of training


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]PATH", help="result file or directory of a run")
    parser.add_argument("--baseline", metavar="[NAME=]PATH", help="what the others are compared with (default: first)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write all that is known, unrounded")
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="also keep the runs in one file")
    return parser


def compared(run: Run, baseline: Run) -> dict:
    """The numbers of one row, None where there is none; those of a run that did not finish are left out."""
    row: dict = {"configuration": run.name, "script": run.result.get("script"), "status": run.status}
    for key, place in MEASURED.items():
        row[key] = run.number(*place)

    def ratio(key: str) -> float | None:
        base = baseline.number(*MEASURED[key])
        return row[key] / base if row[key] is not None and base else None

    memory = ratio("peak_mb")
    row["speedup"] = ratio("samples_per_sec")
    row["processes"] = row["processes"] or 1  # files of an earlier harness do not say
    alone = baseline.number("training", "processes") or 1
    row["scaling_efficiency_percent"] = row["speedup"] and 100 * row["speedup"] * alone / row["processes"]
    row["memory_change_percent"] = None if memory is None else 100 * (memory - 1)
    return {**row, "path": str(run.path)}


def csv_rows(rows: Sequence[dict], runs: Sequence[Run]) -> list[dict]:
    """The rows with what each run was asked to do; all have the same columns, a fusion that a version lacks is off."""
    sizes = dict.fromkeys(key for run in runs for key in run.result["config"])
    fusions = dict.fromkeys(key for run in runs for key in run.result.get("fusions", ()))
    wide = []
    for row, run in zip(rows, runs, strict=True):
        result, training = run.result, run.result["training"]
        first = {key: row[key] for key in ("configuration", "script", "status")}
        asked = {key: result["config"].get(key) for key in sizes} | {key: training.get(key) for key in SETTINGS}
        asked |= {key: int(bool(result.get("fusions", {}).get(key))) for key in fusions}
        asked["precision"] = precision(result)
        asked["torch_compile"] = (training.get("torch_compile_mode") or "") if training.get("torch_compile") else ""
        asked["cuda_graph"] = int(bool(training.get("cuda_graph")))
        asked |= {key: result["environment"].get(key) for key in ("device", "device_name", "torch")}
        wide.append({**first, **asked, **row, "error": result.get("error")})
    return wide


def unit(runs: Sequence[Run]) -> str:
    """What was counted: kernels, or operator calls on a CPU."""
    units = sorted({run.result["kernels"]["unit"] for run in runs if run.result["kernels"].get("unit")})
    return " or ".join(units) or "kernels"


def table(rows: Sequence[dict], counted: str) -> str:
    """The rows in Markdown."""
    scaled = len({row["processes"] for row in rows if row["speedup"]}) > 1
    phases = [p for p in ("forward", "backward", "optimizer") if any(row[f"{p}_ms"] is not None for row in rows)]
    phases += ["graph"] if any(row["graph_ms"] is not None for row in rows) else []
    compiled = any(row["compilation_ms"] is not None for row in rows)
    lines = []
    for row in rows:
        outcome = NOT_FINISHED.get(row["status"])
        lines.append(
            [
                row["configuration"],
                outcome or cell(row["samples_per_sec"], ".1f" if (row["samples_per_sec"] or 0) >= 10 else ".2f"),
                cell(row["speedup"], ".2f", "x"),
                *([cell(row["scaling_efficiency_percent"], ".1f", " %")] if scaled else []),
                cell(row["batch_ms"], ".2f"),
                *(cell(row[f"{phase}_ms"], ".2f") for phase in phases),
                *([cell(row["compilation_ms"], ".0f")] if compiled else []),
                cell(row["peak_mb"]),
                cell(row["memory_change_percent"], "+.1f", " %"),
                cell(row["kernels_per_step"], ".10g"),
                cell(row["final_loss"], ".4f"),
            ]
        )
    header = ["configuration", "samples/sec", "speed-up", *(["scaling efficiency"] if scaled else []), "ms per step"]
    header += [f"{phase} ms" for phase in phases] + (["compilation ms"] if compiled else [])
    return markdown_table([*header, "peak MB", "memory change", f"{counted} per step", "final loss"], lines)


def compare(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    runs = load_runs(args.runs)
    baseline = runs[0]
    if args.baseline:
        chosen = load_runs([args.baseline])[0]
        baseline = next((run for run in runs if run.path.resolve() == chosen.path.resolve()), None)
        if baseline is None:  # it gets a row, too
            runs = load_runs([args.baseline, *args.runs])
            baseline = runs[0]
    named = [(run.name, run.result) for run in runs]
    check_family(named)
    rows = [compared(run, baseline) for run in runs]
    print_notes(PROG, *differences(named))
    print(table(rows, unit(runs)), flush=True)
    if args.csv:
        write_csv(args.csv, csv_rows(rows, runs))
    if args.save:
        content = {"runs": by_name((run.name, run.result) for run in runs)}
        write_text(args.save, json.dumps(content, indent=1) + "\n")
    print_notes(PROG, *unsteady((run.name, run) for run in runs))
    if baseline.status != "ok":
        print_notes(PROG, f"the baseline {baseline.name} did not finish, so there are no ratios")
    return report_failed(PROG, runs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = build_parser().parse_args(argv)
    return run_tool(PROG, lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())

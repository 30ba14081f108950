#!/usr/bin/env python3
"""Versions of a model over batch sizes and sequence lengths: speed, peak memory, and the loss they train to.

In each cell of the grid all models take turns, as graphs where there is a GPU: samples per second are the median of
the turns, a speed-up is over the first model in the same turn. For accuracy each trains --num-steps steps (an argument
of the scripts) from the same seed, and the difference of the last loss is relative to that of the first model.

--peers adds V1 under torch.compile and, for llama, Hugging Face's Llama, the same under torch.compile and with Liger's
kernels (but its loss), where they are installed. A run that is out of memory or fails is a row. The same command goes
on after an interruption, and prints the table of a finished study again; a study with other settings needs another
--output.

Examples:
  python analysis_tools/benchmark_suite.py --models v1,v2 --batch-sizes 4,8,16,32 --seq-lengths 128,256,512
  python analysis_tools/benchmark_suite.py --models v1,v2,v3,v4 --metrics throughput,memory --use-amp --peers
  python analysis_tools/benchmark_suite.py --family openfold --seq-lengths 64,128 --num-steps 20 --csv grid.csv
  python analysis_tools/benchmark_suite.py --table benchmark_llama.json
"""

from __future__ import annotations

import _root

import argparse
import contextlib
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from workshop.cli import ToolError, at_least, documented_parser, print_notes, run_tool
from workshop.files import ROOT, write_csv
from workshop.script import load_script, script_arguments
from workshop.show import NOT_FINISHED, cell, markdown_table
from workshop.study import as_rows, check_failed, heading, measure_study, read_study
from workshop.turns import graph_of, in_turns, named, parse_quiet, ratios, short_run, spread

PROG = Path(__file__).name
METRICS = ("throughput", "memory", "accuracy")
PACKAGES = {"hugging_face": "transformers", "hugging_face_compiled": "transformers", "liger": "liger_kernel"}
Sides = dict[str, tuple[str, list[str]]]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    usage = "%(prog)s [arguments] [arguments of the scripts]"
    note = "Every other argument goes to the scripts: python tiny_llama_v2.py --help lists them.\n\n"
    parser = documented_parser(PROG, __doc__, usage, note)
    add = parser.add_argument

    def several(kind: Callable[[str], object]) -> Callable[[str], list]:
        return lambda text: list(dict.fromkeys(kind(part) for part in text.split(",")))

    sizes = {"type": several(at_least(1)), "metavar": "N,N"}
    add("--models", type=several(str), default=["v1", "v2"], metavar="V,V", help="(default: v1,v2)")
    add("--family", choices=("llama", "openfold"), default="llama", help="(default: %(default)s)")
    add("--batch-sizes", **sizes, default=[4, 8], help="(default: 4,8)")
    add("--seq-lengths", **sizes, default=[128, 256], help="(default: 128,256)")
    add("--metrics", type=several(str), default=list(METRICS), metavar="M,M", help=f"(default: {','.join(METRICS)})")
    add("--peers", action="store_true", help="other implementations, too")
    add("--rounds", type=at_least(1), default=10, metavar="N", help="turns of each model (default: 10)")
    add("--output", type=Path, metavar="FILE.json", help="the study (default: benchmark_<family>.json here)")
    add("--csv", type=Path, metavar="FILE", help="also write the table, unrounded")
    add("--table", type=Path, metavar="FILE.json", help="measure nothing, print the table of this study")
    return parser


def scripts_of(args: argparse.Namespace) -> dict[str, tuple[str, list[str]]]:
    """Each side's script and what it adds to the arguments."""
    there = sorted(path.stem.rpartition("_")[2] for path in ROOT.glob(f"tiny_{args.family}_v*.py"))
    if unknown := [model for model in args.models if model not in there]:
        raise ToolError(f"--models {unknown[0]}: {args.family} has {', '.join(there)}")
    sides = {model: (f"tiny_{args.family}_{model}", []) for model in args.models}
    if args.peers:
        sides["v1 compiled"] = (f"tiny_{args.family}_v1", ["--enable-torch-compile"])
        for name, package in PACKAGES.items() if args.family == "llama" else ():
            if all(importlib.util.find_spec(needed) for needed in ("transformers", package)):
                from workshop.baselines import peer_script

                sides[name.replace("_", " ")] = (peer_script(name), [])
            else:
                print_notes(PROG, f"{name.replace('_', ' ')} is left out: it needs {package}")
    return sides


def measure(args: argparse.Namespace, argv: Sequence[str]) -> Path:
    """Measure what is not measured yet; returns where the study is."""
    if unknown := [metric for metric in args.metrics if metric not in METRICS]:
        raise ToolError(f"--metrics {unknown[0]}: there are {', '.join(METRICS)}")
    path = args.output or Path(f"benchmark_{args.family}.json")
    scripts, parts = scripts_of(args), []
    for batch, length in itertools.product(args.batch_sizes, args.seq_lengths):
        sizes = ["--batch-size", str(batch), "--seq-len", str(length)]
        sides = {name: (script, graph_of([*argv, *sizes, *more])) for name, (script, more) in scripts.items()}
        for script, options in sides.values():  # they say what does not fit before anything is measured
            module = sys.modules[script] if script in sys.modules else load_script(f"{script}.py")
            script_arguments(module, options, None)
        names = {"batch_size": batch, "seq_len": length}
        parts.append((names, partial(one_cell, sides, args.metrics, args.rounds)))
    settings = {"models": list(scripts), "metrics": args.metrics, "rounds": args.rounds}
    with contextlib.redirect_stdout(sys.stderr):  # the lines of the runs
        measure_study(path, parts, keep=True, family=args.family, argv=list(argv), **settings)
    return path


def one_cell(sides: Sides, metrics: Collection[str], rounds: int) -> list[dict]:
    """A row for each model."""
    if {"throughput", "memory"} & {*metrics}:
        rows = in_turns(sides, rounds)
    else:
        modules = {name: importlib.import_module(script) for name, (script, _) in sides.items()}
        parsed = {name: parse_quiet(modules[name], argv) for name, (_, argv) in sides.items()}
        rows = {name: named(script, argv, parsed[name]) for name, (script, argv) in sides.items()}
    for name, (script, argv) in sides.items():
        if "accuracy" in metrics and "error" not in rows[name]:
            try:
                result = short_run(script, argv)
                rows[name]["final_loss"] = result["loss"].get("final")
                if result["status"] == "oom":
                    rows[name] |= {"status": "oom", "error": result["error"]}
            except Exception as error:  # a row, as in turns
                rows[name] |= {"status": "failed", "error": str(error).partition("\n")[0]}
    return as_rows(rows)


def compared(row: dict, first: dict) -> dict:
    """The numbers of a row, also beside those of the first model in its cell; None where there is none."""
    turns, over = row.get("turns_ms"), []
    if turns and "turns_ms" in first and row is not first:
        over = ratios(first, row)
    speeds = [1e3 * row["batch_size"] / ms for ms in turns or ()]

    def ratio(key: str) -> float | None:
        return row[key] / first[key] if row is not first and row.get(key) and first.get(key) else None

    loss = ratio("final_loss")
    return {
        **{"batch_size": row["batch_size"], "seq_len": row["seq_len"], "model": row["side"], "script": row["script"]},
        "status": row.get("status", "ok"),
        "samples_per_sec": statistics.median(speeds) if speeds else None,
        "samples_per_sec_min": min(speeds, default=None),
        "samples_per_sec_max": max(speeds, default=None),
        "batch_ms": row.get("batch_ms"),
        "speedup": statistics.median(over) if over else None,
        "speedup_in_turns": spread(over) if over else None,
        "peak_mb": row.get("peak_mb"),
        "peak_over_first": ratio("peak_mb"),
        "final_loss": row.get("final_loss"),
        "loss_difference": None if loss is None else loss - 1,
        "error": row.get("error"),
    }


def table(rows: Sequence[dict], metrics: Collection[str]) -> str:
    """The rows in Markdown, with the columns of these metrics."""
    first, lines = rows[0]["model"], []
    for row in rows:
        low, high = row["samples_per_sec_min"], row["samples_per_sec_max"]
        lines.append([str(row["batch_size"]), str(row["seq_len"]), row["model"]])
        if "throughput" in metrics:
            lines[-1] += [cell(row["samples_per_sec"]), f"{low:.1f} to {high:.1f}" if low else "-"]
            lines[-1] += [
                cell(row["batch_ms"], ".2f"),
                cell(row["speedup"], ".2f", "x"),
                row["speedup_in_turns"] or "-",
            ]
        if "memory" in metrics:
            lines[-1] += [cell(row["peak_mb"]), cell(row["peak_over_first"], ".2f", "x")]
        if "accuracy" in metrics:
            lines[-1] += [cell(row["final_loss"], ".4f"), cell(row["loss_difference"], "+.1e")]
        if row["status"] != "ok":
            lines[-1][3] = NOT_FINISHED[row["status"]]
    header = ["batch size", "length", "model"]
    if "throughput" in metrics:
        header += ["samples/sec", "in turns", "ms per step", f"speed-up over {first}", "ratio in turns"]
    header += ["peak MB", f"of {first}"] if "memory" in metrics else []
    header += ["final loss", f"beside {first}"] if "accuracy" in metrics else []
    return markdown_table(header, lines, text_columns=3)


def benchmark(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure or read, and print; returns the exit status."""
    if args.table and argv:
        raise ToolError(f"--table measures nothing, so it takes no arguments of a script: {' '.join(argv)}")
    path = args.table or measure(args, argv)
    content = read_study(path, ("batch_size", "seq_len", "side", "script", "argv"), measured=())
    rows = []
    for _, group in itertools.groupby(content["rows"], key=lambda row: (row["batch_size"], row["seq_len"])):
        first, *others = group
        rows += [compared(row, first) for row in (first, *others)]
    print(heading(content, f"tiny_{content['family']}"), end="\n\n")
    print(table(rows, content["metrics"]), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    check_failed(content["rows"])
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args, rest = build_parser().parse_known_args(argv)
    return run_tool(PROG, lambda: benchmark(args, rest))


if __name__ == "__main__":
    sys.exit(main())

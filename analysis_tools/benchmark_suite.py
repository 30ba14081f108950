#!/usr/bin/env python3
"""Versions of a model over batch sizes and sequence lengths: speed, peak memory, and the loss they
train to.

In each cell of the grid all models take turns, as graphs where there is a GPU: samples per second
are the median of the turns, a speed-up is over the first model in the same turn. For accuracy each
trains --num-steps steps (an argument of the scripts) from the same seed, and the difference of the
last loss is relative to that of the first model.

--peers adds V1 under torch.compile and, for llama, Hugging Face's Llama, the same under
torch.compile and with Liger's kernels (but its loss), where they are installed. A run that is out
of memory or fails is a row. The same command goes on after an interruption, and prints the table of
a finished study again; a study with other settings needs another --output.

Examples:
  python analysis_tools/benchmark_suite.py --models v1,v2 --batch-sizes 4,8,16,32 \\
      --seq-lengths 128,256,512
  python analysis_tools/benchmark_suite.py --models v1,v2,v3,v4 --metrics throughput,memory \\
      --use-amp --peers
  python analysis_tools/benchmark_suite.py --family openfold --seq-lengths 64,128 \\
      --num-steps 20 --csv grid.csv
  python analysis_tools/benchmark_suite.py --table benchmark_llama.json
"""

from __future__ import annotations

import _root

import argparse
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Collection, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path

from lab.cli import Parser, ToolError, at_least, print_notes, program, several
from lab.files import ROOT
from lab.script import load_script, parser_around, script_arguments
from lab.show import Column, range_of_speeds, render, write_csv
from lab.study import (
    as_rows,
    check_failed,
    heading,
    measure_study,
    read_study,
    study_asked_for,
)
from lab.turns import graph_of, in_turns, named, parse_quiet, ratios, short_run, speeds, spread

PROG = Path(__file__).name
METRICS = ("throughput", "memory", "accuracy")
PACKAGES = dict.fromkeys(("hugging_face", "hugging_face_compiled"), "transformers")
PACKAGES["liger"] = "liger_kernel"
Sides = dict[str, tuple[str, list[str]]]


def build_parser() -> Parser:
    """The command line."""
    parser = parser_around(PROG, __doc__, "tiny_llama_v2.py", "the scripts")
    add = parser.add_argument
    sizes = {"type": several(at_least(1)), "metavar": "N,N"}
    metrics = {"type": several(), "default": list(METRICS), "metavar": "M,M"}
    families = ("llama", "openfold")
    add("--models", type=several(), default=["v1", "v2"], metavar="V,V", help="(default: v1,v2)")
    add("--family", choices=families, default="llama", help="(default: %(default)s)")
    add("--batch-sizes", **sizes, default=[4, 8], help="(default: 4,8)")
    add("--seq-lengths", **sizes, default=[128, 256], help="(default: 128,256)")
    add("--metrics", **metrics, help=f"(default: {','.join(METRICS)})")
    parser.add_flag("--peers", "other implementations, too")
    parser.add_count("--rounds", 10, "turns of each model")
    parser.add_path("--output", "FILE.json", "the study (default: benchmark_<family>.json here)")
    parser.add_path("--csv", "FILE", "also write the table, unrounded")
    parser.add_path("--table", "FILE.json", "measure nothing, print the table of this study")
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
                from lab.baselines import peer_script

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
        asked = [*argv, *sizes]
        sides = {name: (s, graph_of([*asked, *more])) for name, (s, more) in scripts.items()}
        for script, options in sides.values():  # what does not fit is said before all else
            module = sys.modules[script] if script in sys.modules else load_script(f"{script}.py")
            script_arguments(module, options, None)
        names = {"batch_size": batch, "seq_len": length}
        parts.append((names, partial(one_cell, sides, args.metrics, args.rounds)))
    settings = {"models": list(scripts), "metrics": args.metrics, "rounds": args.rounds}
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


def beside_first(row: dict, first: dict) -> dict:
    """The numbers of a row, also beside those of the first model in its cell; or None."""
    turns = row.get("turns_ms") or ()
    over = ratios(first, row) if turns and "turns_ms" in first and row is not first else []

    def ratio(key: str) -> float | None:
        known = row is not first and row.get(key) and first.get(key)
        return row[key] / first[key] if known else None

    loss = ratio("final_loss")
    return {
        **{key: row[key] for key in ("batch_size", "seq_len")},
        **{"model": row["side"], "script": row["script"], "status": row.get("status", "ok")},
        **speeds(row),
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
    first = rows[0]["model"]
    columns = [
        Column("batch size", lambda row: str(row["batch_size"])),
        Column("length", lambda row: str(row["seq_len"]), text=True),
        Column("model", "model", text=True),
    ]
    of_metric = {
        "throughput": [
            Column("samples/sec", "samples_per_sec", ".1f"),
            Column("in turns", range_of_speeds),
            Column("ms per step", "batch_ms", ".2f"),
            Column(f"speed-up over {first}", "speedup", ".2f", "x"),
            Column("ratio in turns", "speedup_in_turns"),
        ],
        "memory": [
            Column("peak MB", "peak_mb", ".1f"),
            Column(f"of {first}", "peak_over_first", ".2f", "x"),
        ],
        "accuracy": [
            Column("final loss", "final_loss", ".4f"),
            Column(f"beside {first}", "loss_difference", "+.1e"),
        ],
    }
    measured = [column for metric in METRICS if metric in metrics for column in of_metric[metric]]
    return render([*columns, *(column.or_ended() for column in measured[:1]), *measured[1:]], rows)


def benchmark(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure or read, and print; returns the exit status."""
    path = study_asked_for(args.table, argv) or measure(args, argv)
    content = read_study(path, ("batch_size", "seq_len", "side", "script", "argv"), measured=())
    rows = []
    for _, group in itertools.groupby(content["rows"], itemgetter("batch_size", "seq_len")):
        first, *others = group
        rows += [beside_first(row, first) for row in (first, *others)]
    print(heading(content, f"tiny_{content['family']}"), end="\n\n")
    print(table(rows, content["metrics"]), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    check_failed(content["rows"])
    return 0


main = program(build_parser, benchmark, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Versions of a model over batch sizes and sequence lengths: speed, peak memory, and the loss they
train to.

In each cell of the grid all models take turns, as graphs where there is a GPU: samples per second
are those of the median turn, a speed-up is over the first model in the same turn. For accuracy each
trains --num-steps steps (an argument of the scripts) from the same seed, and the difference of the
last loss is relative to that of the first model.

A run that is out of memory or fails is a row. The same command goes on after an interruption, and
prints the table of a finished study again; a study with other settings needs another --output.

Examples:
  python analysis_tools/benchmark_suite.py --models v1,v2 --batch-sizes 4,8,16,32 \\
      --seq-lengths 128,256,512
  python analysis_tools/benchmark_suite.py --family openfold --seq-lengths 64,128
  python analysis_tools/benchmark_suite.py --table benchmark_llama.json
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from fusion_lab import records, study
from fusion_lab.cli import Parser, ToolError, at_least, program, several
from fusion_lab.files import ROOT
from fusion_lab.script import parser_around
from fusion_lab.show import Column, range_of_speeds, render
from fusion_lab.study import beside_first, versions_part

METRICS = ("throughput", "memory", "accuracy")


def build_parser() -> Parser:
    parser = parser_around(__file__, __doc__, "tiny_llama_v2.py", "the scripts")
    add, sizes = parser.add_argument, {"type": several(at_least(1)), "metavar": "N,N"}
    metrics = {"type": several(among=METRICS), "default": METRICS, "metavar": "M,M"}
    families = {"choices": ("llama", "openfold"), "default": "llama", "help": "(default: llama)"}
    add("--models", type=several(), default=["v1", "v2"], metavar="V,V", help="(default: v1,v2)")
    add("--family", **families)
    add("--batch-sizes", **sizes, default=[4, 8], help="(default: 4,8)")
    add("--seq-lengths", **sizes, default=[128, 256], help="(default: 128,256)")
    add("--metrics", **metrics, help=f"(default: {','.join(METRICS)})")
    study.add_study(parser, 10, "model", "benchmark_<family>.json")
    return parser


def scripts_of(args: argparse.Namespace) -> dict[str, str]:
    there = sorted(path.stem.rpartition("_")[2] for path in ROOT.glob(f"tiny_{args.family}_v*.py"))
    if unknown := [model for model in args.models if model not in there]:
        raise ToolError(f"--models {unknown[0]}: {args.family} has {', '.join(there)}")
    return {model: f"tiny_{args.family}_{model}" for model in args.models}


def measure(args: argparse.Namespace, argv: Sequence[str]) -> Path:
    """Measure what is not measured yet; returns where the study is."""
    path = args.output or Path(f"benchmark_{args.family}.json")
    scripts, parts = scripts_of(args), []
    for batch, length in itertools.product(args.batch_sizes, args.seq_lengths):
        asked = [*argv, "--batch-size", str(batch), "--seq-len", str(length)]
        sides = {model: (script, asked) for model, script in scripts.items()}
        names, losses = {"batch_size": batch, "seq_len": length}, "accuracy" in args.metrics
        parts.append(versions_part(names, sides, args.rounds, losses=losses))
    settings = {"models": [*scripts], "metrics": [*args.metrics], "rounds": args.rounds}
    study.measure_study(path, parts, keep=True, family=args.family, argv=[*argv], **settings)
    return path


def table(rows: Sequence[dict], metrics: Sequence[str]) -> str:
    first = rows[0]["side"]
    of_metrics = [
        ("throughput", Column("samples/sec", "samples_per_sec", ".1f")),
        ("throughput", Column("in turns", range_of_speeds)),
        ("throughput", Column("ms per step", "batch_ms", ".2f")),
        ("throughput", Column(f"speed-up over {first}", "over_first", ".2f", "x")),
        ("throughput", Column("ratio in turns", "over_first_in_turns")),
        ("memory", Column("peak MB", "peak_mb", ".1f")),
        ("memory", Column(f"of {first}", "memory_of_first", ".2f", "x")),
        ("accuracy", Column("final loss", "final_loss", ".4f")),
        ("accuracy", Column(f"beside {first}", "loss_beside_first", "+.1e")),
    ]
    one, *others = (column for metric, column in of_metrics if metric in metrics)
    columns = [
        Column("batch size", lambda row: str(row["batch_size"])),
        Column("length", lambda row: str(row["seq_len"]), text=True),
        Column("model", "side", text=True),
        one.or_ended(),
        *others,
    ]
    return render(columns, rows)


def benchmark(args: argparse.Namespace, argv: Sequence[str]) -> int:
    path = study.study_asked_for(args.table, argv) or measure(args, argv)
    keys = ("batch_size", "seq_len", "side", "script", "argv")
    content = records.read_study(path, keys)
    cells = study.by_side(content["rows"], "batch_size", "seq_len").values()
    rows = [row for sides in cells for row in beside_first(sides.values())]
    print(study.heading(content, f"tiny_{content['family']}"), end="\n\n")
    print(table(rows, content["metrics"]), flush=True)
    study.check_failed(rows)
    return 0


main = program(build_parser, benchmark, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

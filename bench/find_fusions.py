#!/usr/bin/env python3
"""Hold what find_fusions.py predicts against steps that inductor has compiled: our own models and
others that nobody tuned.

Each row is a model: its step now and fused as predicted, and as measured, both as graphs in
alternating turns; of our own V1 also V3's measured step. Rows are kept as they are measured, and
the same command goes on after an interruption.

Examples:
  python bench/find_fusions.py results/DIR/find_fusions.json
  python bench/find_fusions.py tiny.json --small             sizes for a laptop, counted only
  python bench/find_fusions.py results/DIR/find_fusions.json --table
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from lab.cli import Parser, ToolError, documented_parser, needed, program

with needed():
    import torch

from bench.models_for_find_fusions import MODELS
from bench.sizes import SHAPES
from lab.fusions import step as steps
from lab.fusions.groups import Finding
from lab.fusions.rates import Rates, measure_rates
from lab.show import Column, render
from lab.study import measure_study, read_rows
from lab.turns import free_memory

PROG = Path(__file__).name
GPU = torch.cuda.is_available()
ROUNDS = 5
BEST = 8  # chains in a row
SMALL = {  # of our own, for a laptop
    "tiny_llama": "--hidden-dim 64 --num-layers 2 --num-heads 4 --seq-len 32 --batch-size 2",
    "tiny_openfold": "--num-blocks 1 --seq-len 10 --num-seqs 3 --batch-size 2",
}


def subjects(small: bool) -> dict[tuple[str, str], tuple[Callable, Callable | None]]:
    """What makes the step of each model and precision, and that of V3 if there is one."""
    device = torch.device("cuda" if GPU else "cpu")
    found: dict[tuple[str, str], tuple[Callable, Callable | None]] = {}
    for name, shape in SHAPES.items():
        argv = [*(SMALL[shape.model].split() if small else shape.argv), "--use-amp"]
        versions = (partial(steps.from_script, f"{shape.model}_v{n}.py", argv) for n in (1, 3))
        found[name, "bf16"] = tuple(versions)

    def build(name: str, use_amp: bool) -> steps.Step:
        torch.manual_seed(42)
        torch.set_float32_matmul_precision("highest")
        return steps.from_model(name, *MODELS[name](small), use_amp, device)

    for name in MODELS:
        found[name, "bf16"] = partial(build, name, True), None
    found["message passing", "fp32"] = partial(build, "message passing", False), None
    return found


def row(build: Callable, newer: Callable | None, rates: Rates | None) -> dict:
    """Predictions and measurements of a step; without rates what it moves and launches."""
    if rates is None:
        return summary(Finding(steps.count(build)[1], None))
    step = build()
    found = summary(Finding(steps.measure(step, rates), rates))
    sides = {"now": step.take, "compiled": step.compiled()}
    if newer:
        sides["V3"] = newer().take
    try:
        turns = steps.in_graphs(sides, ROUNDS)
    except ToolError as error:  # a model that cannot be a graph is a row, too
        free_memory()
        return {**found, "status": "failed", "error": str(error)}
    return {**found, "rates": asdict(rates), "sides_ms": turns}


def summary(found: Finding) -> dict:
    """The whole step by level of fusion, and its best chains."""
    us, moved, launched = ({k: v[i] for k, v in found.levels.items()} for i in range(3))
    result = {"moved": moved, "launched": launched, "chains": found.rows()[:BEST]}
    if found.rates:
        result["predicted_ms"] = {level: value / 1e3 for level, value in us.items()}
    return result


def measure(args: argparse.Namespace) -> int:
    """Measure what is missing, and print the table."""
    if not args.table:
        rates = measure_rates(torch.bfloat16) if GPU else None
        parts = [
            ({"shape": name, "precision": precision}, partial(row, *build, rates))
            for (name, precision), build in subjects(args.small).items()
            if not args.only or name in args.only
        ]
        sizes = "small" if args.small else "full"
        measure_study(args.output, parts, keep=True, rounds=ROUNDS, sizes=sizes)
    rows = read_rows(args.output, ("shape", "precision", "moved"))
    print(table(rows))
    return 0


def predicted(row: dict, level: str) -> float | None:
    """Milliseconds of the whole step."""
    return row.get("predicted_ms", {}).get(level)


def measured(row: dict, side: str) -> float | None:
    """Milliseconds of the whole step, the median of its turns."""
    turns = row.get("sides_ms", {}).get(side)
    return turns and statistics.median(turns)


def gains(row: dict) -> tuple[float, float] | None:
    """The speed-up of chains as predicted, and that of the compiled step."""
    if "sides_ms" not in row:
        return None
    compiled = measured(row, "now") / measured(row, "compiled")
    return predicted(row, "now") / predicted(row, "chains"), compiled


def off(row: dict) -> float | None:
    """How far the predicted speed-up is from that of the compiled step, in percent."""
    found = gains(row)
    return found and 100 * (found[0] / found[1] - 1)


def table(rows: list[dict]) -> str:
    """A line for each model, and what the predictions are off by."""

    def with_v3(row: dict) -> float | None:
        return predicted(row, "attention") if measured(row, "V3") else None

    columns = [
        Column("model", lambda row: f"{row['shape']}, {row['precision']}"),
        Column("now, predicted", lambda row: predicted(row, "now"), ".2f", " ms"),
        Column("measured", lambda row: measured(row, "now"), ".2f", " ms"),
        Column("fused, predicted", lambda row: predicted(row, "chains"), ".2f", " ms"),
        Column("compiled", lambda row: measured(row, "compiled"), ".2f", " ms"),
        Column("speed-up, predicted", lambda row: gains(row) and gains(row)[0], ".2f", "x"),
        Column("compiled ", lambda row: gains(row) and gains(row)[1], ".2f", "x"),
        Column("off", off, "+.0f", " %"),
        Column("(c), predicted", with_v3, ".2f", " ms"),
        Column("V3", lambda row: measured(row, "V3"), ".2f", " ms"),
    ]
    lines = [render(columns, rows)]
    if errors := [abs(off(row)) for row in rows if off(row) is not None]:
        run = [row for row in rows if gains(row)]
        now = max(abs(predicted(row, "now") / measured(row, "now") - 1) for row in run)
        middle, worst = statistics.median(errors), max(errors)
        gain = f"speed-up off by {middle:.1f} % (median), {worst:.1f} % (worst)"
        lines.append(f"Predicted {gain}; the step now by {100 * now:.1f} % at most.")
    return "\n\n".join(lines)


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("output", type=Path, metavar="FILE.json")
    parser.add_flag("--small", "tiny sizes")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="of these names alone")
    parser.add_flag("--table", "measure nothing, print the table")
    return parser


main = program(build_parser, measure)

if __name__ == "__main__":
    sys.exit(main())

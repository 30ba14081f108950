#!/usr/bin/env python3
"""Hold what find_fusions.py predicts against steps that inductor has compiled: our own models and
others that nobody tuned.

Each row is a model: its step now and fused as predicted, and as measured, both as graphs in
alternating turns; of our own V1 also a step with the levels of fusion that V3 has, beside V3's.
Rows are kept as they are measured, and the same command goes on after an interruption.

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
import tempfile
import time
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
from lab.fusions.record import Recorder
from lab.records import NUMBER, TURNS, WHOLE, Row
from lab.show import Column, render
from lab.study import measure_study, read_rows
from lab.turns import compare_in_turns, free_memory

GPU = torch.cuda.is_available()
ROUNDS = 11
BEST = 8  # chains in a row
# Both versions join products and have attention as a kernel. Norms and gates are kernels of their
# own in TinyLlama; TinyOpenFold's products take many along.
IN_V3 = {
    "tiny_llama": ("now", "chains", "attention", "joined"),
    "tiny_openfold": ("now", "chains", "products", "attention", "joined"),
}
SMALL = {  # of our own, for a laptop
    "tiny_llama": "--hidden-dim 64 --num-layers 2 --num-heads 4 --seq-len 32 --batch-size 2",
    "tiny_openfold": "--num-blocks 1 --seq-len 10 --num-seqs 3 --batch-size 2",
}


Predicted = Row | {  # a model's step by level of fusion, and as measured by side
    "moved": {"*": WHOLE},  # bytes
    "launched?": {"*": WHOLE},
    "predicted_ms?": {"*": NUMBER},
    "sides_ms?": {"*": TURNS},
}


def subjects(small: bool) -> dict[tuple[str, str], tuple[Callable, Callable | None, tuple]]:
    """What makes the step of each model and precision, and of ours that of V3 and its levels."""
    device = torch.device("cuda" if GPU else "cpu")
    found: dict[tuple[str, str], tuple[Callable, Callable | None, tuple]] = {}
    for name, shape in SHAPES.items():
        argv = [*(SMALL[shape.model].split() if small else shape.argv), "--use-amp"]
        versions = (partial(steps.from_script, f"{shape.model}_v{n}.py", argv) for n in (1, 3))
        found[name, "bf16"] = *versions, IN_V3[shape.model]

    def build(name: str, use_amp: bool) -> steps.Step:
        torch.manual_seed(42)
        torch.set_float32_matmul_precision("highest")
        return steps.from_model(name, *MODELS[name](small), use_amp, device)

    for name in MODELS:
        found[name, "bf16"] = partial(build, name, True), None, ()
    found["message passing", "fp32"] = partial(build, "message passing", False), None, ()
    return found


def row(
    build: Callable, newer: Callable | None, in_v3: tuple, rates: Rates | None, spent: float
) -> dict:
    """Predictions and measurements of a step; without rates what it moves and launches. `spent` are
    the seconds in which the rates were measured, a part of the tool's own."""
    if rates is None:
        return summary(steps.count(build)[1], None, in_v3)
    step = build()
    profiled = profiled_seconds(step)
    start = time.perf_counter()
    found = summary(steps.measure(step, rates), rates, in_v3)
    seconds = spent + time.perf_counter() - start
    cost = {"seconds": seconds, "profiled_step_seconds": profiled}
    found |= {"rates": asdict(rates), "cost": cost}
    sides = {"now": step.take, "compiled": step.compiled()}
    if newer:
        sides["V3"] = newer().take
    try:
        turns = compare_in_turns(sides, ROUNDS)
    except ToolError as error:  # a model that cannot be a graph is a row, too
        return {**found, "status": "failed", "error": str(error)}
    finally:
        free_memory()
    return {**found, "sides_ms": turns.ms}


def profiled_seconds(step: steps.Step) -> float:
    """A step in the profiler with its trace written, as one would look at it otherwise."""
    step.take()
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.profiler.profile() as profile:
        step.take()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
    return time.perf_counter() - start


def summary(recorded: Recorder, rates: Rates | None, in_v3: tuple) -> dict:
    """The whole step by level of fusion, as V3 fuses it, and its best chains."""
    found = Finding(recorded, rates)
    levels = dict(found.levels)
    if in_v3:
        levels["V3"] = Finding(recorded, rates, in_v3).levels[in_v3[-1]]
    result = {
        "moved": {level: sums["bytes"] for level, sums in levels.items()},
        "launched": {level: sums["kernels"] for level, sums in levels.items()},
        "chains": found.rows()[:BEST],
    }
    if rates:
        result["predicted_ms"] = {level: sums["us"] / 1e3 for level, sums in levels.items()}
    return result


def measure(args: argparse.Namespace) -> int:
    """Measure what is missing, and print the table."""
    if not args.table:
        start = time.perf_counter()
        rates = measure_rates(torch.bfloat16) if GPU else None
        spent = time.perf_counter() - start
        parts = [
            ({"shape": name, "precision": precision}, partial(row, *build, rates, spent))
            for (name, precision), build in subjects(args.small).items()
            if not args.only or name in args.only
        ]
        sizes = "small" if args.small else "full"
        measure_study(args.output, parts, keep=True, rounds=ROUNDS, sizes=sizes)
    rows = read_rows(args.output, ("shape", "precision"), kind=Predicted)
    print(table(rows))
    return 0


def judged(row: dict) -> dict:
    """A row of the table: milliseconds of a step, predicted and measured, speed-ups, by how many
    percent the predictions are off, and the tool's seconds."""
    found = {f"{level}, predicted": ms for level, ms in row.get("predicted_ms", {}).items()}
    found |= {side: statistics.median(ms) for side, ms in row.get("sides_ms", {}).items()}
    found |= row.get("cost", {})
    if "compiled" in found:
        found["predicted"] = found["now, predicted"] / found["chains, predicted"]
        found["speedup"] = found["now"] / found["compiled"]
        found["off"] = 100 * (found["predicted"] / found["speedup"] - 1)
    if "V3" in found:
        found["V3 off"] = 100 * (found["V3, predicted"] / found["V3"] - 1)
    return {"model": f"{row['shape']}, {row['precision']}", **found}


def table(rows: list[dict]) -> str:
    """A line for each model, and what the predictions are off by."""
    rows = [judged(row) for row in rows]
    columns = [
        Column("model", "model"),
        Column("now, predicted", "now, predicted", ".2f", " ms"),
        Column("measured", "now", ".2f", " ms"),
        Column("fused, predicted", "chains, predicted", ".2f", " ms"),
        Column("compiled", "compiled", ".2f", " ms"),
        Column("speed-up, predicted", "predicted", ".2f", "x"),
        Column("compiled ", "speedup", ".2f", "x"),
        Column("off", "off", "+.0f", " %"),
        Column("like V3, predicted", "V3, predicted", ".2f", " ms"),
        Column("V3", "V3", ".2f", " ms"),
        Column("V3 off", "V3 off", "+.0f", " %"),
        Column("the tool", "seconds", ".1f", " s"),
        Column("profiled step", "profiled_step_seconds", ".1f", " s"),
    ]
    lines = [render(columns, rows)]
    if run := [row for row in rows if "off" in row]:
        now = max(abs(row["now, predicted"] / row["now"] - 1) for row in run)
        errors = [abs(row["off"]) for row in run]
        gain = f"{statistics.median(errors):.1f} % (median), {max(errors):.1f} % (worst)"
        lines.append(
            f"Predicted speed-up off by {gain}; the step now by {100 * now:.1f} % at most."
        )
    if costs := [row for row in rows if "seconds" in row]:
        beyond = max(cost["seconds"] - 5 * cost["profiled_step_seconds"] for cost in costs)
        lines.append(
            "The tool takes as long as five profiled steps, their traces written, and "
            f"{max(0, beyond):.1f} s at most."
        )
    return "\n\n".join(lines)


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("output", type=Path, metavar="FILE.json")
    parser.add_flag("--small", "tiny sizes")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="of these names alone")
    parser.add_flag("--table", "measure nothing, print the table")
    return parser


main = program(build_parser, measure)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Power, clock and energy of version scripts, per step and per sample, in long alternating turns.

The GPU's own readings are taken every 50 ms while a script trains, by torch.cuda.power_draw and clock_rate, which need
nvidia-ml-py on NVIDIA's GPUs and amdsmi on AMD's. The power is an average over a second on some GPUs: so a turn is
long, and its first part does not count. On a GPU steps are graphs, so that the host does not count. Nothing is shown
where power cannot be read. A GPU at its power limit lowers its clock: two versions there differ in time as in energy.

Every other argument goes to the scripts: sizes, precision and fusions.

Examples:
  python analysis_tools/measure_energy.py --scripts tiny_llama_v1.py tiny_llama_v4.py --use-amp --seq-len 128
  python analysis_tools/measure_energy.py --scripts tiny_openfold_v1.py tiny_openfold_v3.py --output energy.json
"""

from __future__ import annotations

import _root

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from workshop.cli import Parser, ToolError, documented_parser, program
from workshop.script import load_script
from workshop.show import Column, render
from workshop.study import measure_study
from workshop.turns import TURN_MS, alternating, begin, free_memory, graph_of, named, parse_quiet

PROG = Path(__file__).name
PERIOD = 0.05  # seconds between two readings
SETTLE = 2.0  # seconds until a reading is one of this turn alone


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(
        PROG, __doc__, "%(prog)s --scripts FILE... [arguments of the scripts]"
    )
    scripts = {"nargs": "+", "required": True, "metavar": "FILE", "help": "version scripts"}
    parser.add_argument("--scripts", **scripts)
    parser.add_count("--seconds", 8, "of a turn", least=3)
    parser.add_count("--rounds", 3, "turns of each")
    parser.add_path("--output", "FILE.json", default=Path("energy.json"))
    return parser


def reading() -> tuple[float, float]:
    """What the GPU draws now in watts, and its clock in MHz; ToolError where these cannot be read."""
    import torch

    if not torch.cuda.is_available():
        raise ToolError("power can be read on a GPU alone, and there is none here", status=4)
    try:
        return torch.cuda.power_draw() / 1e3, torch.cuda.clock_rate()
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise ToolError(
            f"power cannot be read here: {error} (nvidia-ml-py or amdsmi is needed)", status=4
        ) from error


def means(samples: Sequence[tuple[float, float, float]], start: float) -> tuple[float, float]:
    """The means of (seconds, watts, MHz) readings from SETTLE seconds after the start on: watts and MHz."""
    settled = [values for moment, *values in samples if moment >= start + SETTLE]
    if not settled:
        raise ToolError(
            "no reading came after the first seconds of a turn: raise --seconds", status=1
        )
    power, clock = map(statistics.fmean, zip(*settled, strict=True))
    return power, clock


def take_with_readings(run, steps: int) -> tuple[float, float, float]:
    """Take so many steps of a run; returns mean power in watts, mean clock in MHz and milliseconds per step."""
    samples: list[tuple[float, float, float]] = []
    done = threading.Event()

    def read() -> None:
        while not done.wait(PERIOD):
            samples.append((time.monotonic(), *reading()))

    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        try:
            turn = run.take(steps)
        finally:
            done.set()
        reader.result()  # raises what a reading did
    return *means(samples, start), turn.step_ms


def energy(modules: Sequence, argv: list[str], seconds: int, rounds: int) -> list[dict]:
    """A row for each script: power, clock, time and energy of a step, energy of a sample, medians over the turns."""
    runs, steps = {}, {}
    for module in modules:
        run, short, _ = begin(module, parse_quiet(module, argv), 1)
        runs[module.SCRIPT], steps[module.SCRIPT] = run, round(short * 1e3 * seconds / TURN_MS)
        run.plan(rounds * steps[module.SCRIPT], "step")
    readings: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    for _, name in alternating(runs, rounds):
        readings[name].append(take_with_readings(runs[name], steps[name]))
    rows = []
    for name, run in runs.items():
        powers, clocks, times = zip(*readings[name], strict=True)
        joules = [power * ms / 1e3 for power, ms in zip(powers, times, strict=True)]
        turns = {"watts": powers, "mhz": clocks, "ms": times, "joules": joules}
        watts, mhz, ms, joule = map(statistics.median, turns.values())
        row = (
            {"side": name}
            | named(name, argv, run.args)
            | {f"turns_{unit}": values for unit, values in turns.items()}
        )
        row |= {"watts": watts, "mhz": mhz, "batch_ms": ms, "joules_per_step": joule}
        rows.append(row | {"mj_per_sample": 1e3 * joule / run.args.batch_size})
    runs.clear()
    free_memory()
    return rows


def table(rows: Sequence[dict]) -> str:
    """The rows in Markdown, energy also as a part of the first one's."""

    def of_first(row: dict) -> float:
        both = zip(row["turns_joules"], rows[0]["turns_joules"], strict=True)
        return statistics.median(own / first for own, first in both)

    columns = [
        Column("script", "script"),
        Column("W", "watts", ".0f"),
        Column("MHz", "mhz", ".0f"),
        Column("ms per step", "batch_ms", ".2f"),
        Column("J per step", "joules_per_step", ".3g"),
        Column("mJ per sample", "mj_per_sample", ".1f"),
        Column("energy, of the first", of_first, ".2f"),
    ]
    return render(columns, rows)


def measure(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Measure and print the table; returns the exit status."""
    modules = [load_script(name) for name in args.scripts]
    reading()  # before anything takes long
    argv = graph_of(rest)
    part = {"argv": argv}, partial(energy, modules, argv, args.seconds, args.rounds)
    scripts = [module.SCRIPT for module in modules]
    print(
        table(
            measure_study(
                args.output, [part], scripts=scripts, seconds=args.seconds, rounds=args.rounds
            )
        )
    )
    return 0


main = program(build_parser, measure, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

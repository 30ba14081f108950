#!/usr/bin/env python3
"""Power, clock and energy of version scripts, per step and per sample, in long alternating turns.

The GPU's own readings are taken every 50 ms while a script trains, by torch.cuda.power_draw and
clock_rate, which need nvidia-ml-py on NVIDIA's GPUs and amdsmi on AMD's. The power is an average
over a second on some GPUs: so a turn is long, and its first part does not count. On a GPU steps are
graphs, so that the host does not count. Nothing is shown where power cannot be read. A GPU at its
power limit lowers its clock: two versions there differ in time as in energy.

Every other argument goes to the scripts: sizes, precision and fusions.

Examples:
  python analysis_tools/measure_energy.py --scripts tiny_llama_v1.py tiny_llama_v4.py --use-amp \\
      --seq-len 128
  python analysis_tools/measure_energy.py --scripts tiny_openfold_v1.py tiny_openfold_v3.py \\
      --output energy.json
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import _path

from lab import provenance
from lab.cli import Parser, documented_parser, program
from lab.script import load_script
from lab.show import Column, render
from lab.study import measure_study
from lab.turns import TURN_MS, alternating, begin, free_memory, graph_of, named, parse_quiet


def build_parser() -> Parser:
    usage = "%(prog)s --scripts FILE... [arguments of the scripts]"
    parser = documented_parser(__file__, __doc__, usage)
    scripts = {"nargs": "+", "required": True, "metavar": "FILE", "help": "version scripts"}
    parser.add_argument("--scripts", **scripts)
    parser.add_count("--seconds", 8, "of a turn", least=3)
    parser.add_count("--rounds", 3, "turns of each")
    parser.add_path("--output", "FILE.json", default=Path("energy.json"))
    return parser


def energy(modules: Sequence, argv: list[str], seconds: int, rounds: int) -> list[dict]:
    """A row for each script, medians of its turns: power, clock, time, energy of a step."""
    runs, steps = {}, {}
    for module in modules:
        run, short, _ = begin(module, parse_quiet(module, argv))
        runs[module.SCRIPT], steps[module.SCRIPT] = run, round(short * 1e3 * seconds / TURN_MS)
    readings: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    for _, name in alternating(runs, rounds):
        readings[name].append(provenance.take_with_readings(runs[name], steps[name]))
    rows = []
    for name, run in runs.items():
        powers, clocks, times = zip(*readings[name], strict=True)
        joules = [watts * ms / 1e3 for watts, ms in zip(powers, times, strict=True)]
        turns = {"watts": powers, "mhz": clocks, "ms": times, "joules": joules}
        watts, mhz, ms, joule = map(statistics.median, turns.values())
        row = {"side": name} | named(name, argv, run.args)
        row |= {f"turns_{unit}": values for unit, values in turns.items()}
        row |= {"watts": watts, "mhz": mhz, "batch_ms": ms, "joules_per_step": joule}
        rows.append(row | {"mj_per_sample": 1e3 * joule / run.args.batch_size})
    runs.clear()
    free_memory()
    return rows


def table(rows: Sequence[dict]) -> str:

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
    modules = [load_script(name) for name in args.scripts]
    provenance.reading()  # before anything takes long
    argv = graph_of(rest)
    part = {"argv": argv}, partial(energy, modules, argv, args.seconds, args.rounds)
    scripts = [module.SCRIPT for module in modules]
    settings = {"scripts": scripts, "seconds": args.seconds, "rounds": args.rounds}
    print(table(measure_study(args.output, [part], **settings)))
    return 0


main = program(build_parser, measure, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

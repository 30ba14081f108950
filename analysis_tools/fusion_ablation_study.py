#!/usr/bin/env python3
"""What each fusion of a version gains: alone, after all others, and on the whole; and whether the gains are additive.

By default none, each alone, all but each, and all are measured; with --all-combinations every set. The fusions that
vary are those which the version adds to the one before, or --fusions. Sets take turns in groups of at most eight, as
graphs where there is a GPU; each group has its own run without these fusions, and every speed-up is over that one in
the same turn. How long a turn is follows from the speed: about 0.3 s, and at least two steps.

The main effect of a fusion is the median over all pairs of sets that differ in it alone. Two fusions interact if they
gain something else together than the product of their gains. All of that is computed on log times, turn by turn. A run
that is out of memory or fails is a row. The same command goes on after an interruption, and prints the tables of a
finished study again; a study with other settings needs another --output.

Examples:
  python analysis_tools/fusion_ablation_study.py --all-combinations
  python analysis_tools/fusion_ablation_study.py --all-combinations --script tiny_openfold_v2.py --use-amp
  python analysis_tools/fusion_ablation_study.py --script tiny_llama_v3.py --fusions triton-swiglu,triton-rotary
  python analysis_tools/fusion_ablation_study.py --seeds 42,43,44 --seq-len 128 --output small.json --csv small.csv
  python analysis_tools/fusion_ablation_study.py --table small.json
"""

from __future__ import annotations

import _root

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from workshop.ablation import GROUP, ablation, effects_tables, fusion_sets, new_fusions, sets_table
from workshop.cli import ToolError, at_least, documented_parser, print_notes, run_tool
from workshop.files import write_csv
from workshop.script import add_script, load_script, script_arguments
from workshop.study import check_failed, heading, measure_study, read_study
from workshop.turns import graph_of, precision_of

PROG = Path(__file__).name
SCRIPT = "tiny_llama_v2.py"
KEYS = ("script", "argv", "precision", "seed", "group", "side", "on", "speedup")  # of a row, whatever its outcome
MEASURED = ("batch_ms", "speedup", "peak_mb", "unit", "per_step", "host_launches")  # of one that finished


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    usage = "%(prog)s [arguments] [arguments of the script]"
    note = f"Every other argument goes to the script: python {SCRIPT} --help lists them.\n\n"
    parser = documented_parser(PROG, __doc__, usage, note)
    add = parser.add_argument
    add_script(parser, SCRIPT)
    add("--all-combinations", action="store_true", help="every set of the fusions")
    add("--fusions", type=lambda text: text.split(","), metavar="A,B", help="that vary (default: what is new)")
    add("--rounds", type=at_least(1), default=10, metavar="N", help="turns of each set (default: 10)")
    seeds = {"type": lambda text: [at_least(0)(seed) for seed in text.split(",")], "metavar": "N,N"}
    add("--seeds", **seeds, help="measure all of it with each, built anew (default: the script's)")
    add(
        "--group-size", type=at_least(2), default=GROUP, metavar="N", help=f"sets in memory together (default: {GROUP})"
    )
    add("--output", type=Path, metavar="FILE.json", help="the study (default: ablation_<script>.json here)")
    add("--csv", type=Path, metavar="FILE", help="also write a row for each set, group and seed, unrounded")
    add("--table", type=Path, metavar="FILE.json", help="measure nothing, print the tables of this study")
    return parser


def measure(args: argparse.Namespace, argv: Sequence[str]) -> Path:
    """Measure what is not measured yet; returns where the study is."""
    module = load_script(args.script)
    known = [flag for flag, *_ in module.FUSIONS]
    fusions = list(dict.fromkeys(args.fusions or new_fusions(module)))
    if not fusions:
        raise ToolError(f"{args.script} adds no fusions")
    if unknown := [fusion for fusion in fusions if fusion not in known]:
        raise ToolError(f"--fusions {unknown[0]}: {args.script} has {', '.join(known) or 'none'}")
    options = graph_of(argv)
    for choice in ("enable", "disable"):  # the script says what does not fit before anything is measured
        _, parsed = script_arguments(module, [*options, *(f"--{choice}-{fusion}" for fusion in fusions)], None)
    path = args.output or Path(f"ablation_{module.SCRIPT}.json")
    precision = precision_of(vars(parsed))
    sets, seeds = fusion_sets(fusions, args.all_combinations), args.seeds or [parsed.seed]
    parts = ablation(module.SCRIPT, {precision: options}, fusions, sets, args.rounds, seeds, args.group_size)
    settings = {"fusions": fusions, "sets": len(sets), "rounds": args.rounds, "seeds": seeds, "group": args.group_size}
    with contextlib.redirect_stdout(sys.stderr):  # the lines of the runs
        measure_study(path, parts, keep=True, script=module.SCRIPT, argv=list(argv), **settings)
    return path


def csv_row(row: dict, fusions: Sequence[str]) -> dict:
    """A row for a spreadsheet, each fusion 0 or 1."""
    names = {key: row[key] for key in ("script", "precision", "seed", "group")} | {"fusions": row["side"]}
    outcome = {"status": row.get("status", "ok"), "error": row.get("error"), "argv": " ".join(row["argv"])}
    return names | {f: int(f in row["on"]) for f in fusions} | {key: row.get(key) for key in MEASURED} | outcome


def study(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure or read, and print; returns the exit status."""
    if args.table and argv:
        raise ToolError(f"--table measures nothing, so it takes no arguments of a script: {' '.join(argv)}")
    path = args.table or measure(args, argv)
    content = read_study(path, KEYS)
    rows, script = content["rows"], content["rows"][0]["script"]
    lines = [heading(content, script), sets_table(script, rows, wide=True), *effects_tables(rows)]
    print("\n\n".join(lines), flush=True)
    if args.csv:
        write_csv(args.csv, [csv_row(row, max((row["on"] for row in rows), key=len)) for row in rows])
    if any(row.get("status") == "oom" for row in rows):
        print_notes(PROG, "out of memory beside the other sets of a group: a smaller --group-size takes less")
    check_failed(rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args, rest = build_parser().parse_known_args(argv)
    return run_tool(PROG, lambda: study(args, rest))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""What each fusion of a version gains: alone, after all others, and on the whole; and whether the
gains are additive.

None, each alone, all but each, and all are measured; with --all-combinations every set. The fusions
that vary are those which the version adds to the one before, or --fusions. Sets take turns in
groups of at most eight, as graphs where there is a GPU. Each group has runs of its own without
these fusions and with all of them, and every ratio is over one of these in the same turn; "all
again" is a control, built and captured a second time. How long a turn is follows from the speed:
about 0.3 s, and at least two steps.

The main effect of a fusion is the median over all pairs of sets that differ in it alone. Two
fusions interact if they gain something else together than the product of their gains. All of that
is computed on log times, turn by turn. A run that is out of memory or fails is a row. The same
command goes on after an interruption, and prints the tables of a finished study again; a study with
other settings needs another --output.

Examples:
  python analysis_tools/fusion_ablation_study.py --all-combinations
  python analysis_tools/fusion_ablation_study.py --all-combinations \\
      --script tiny_openfold_v2.py --use-amp
  python analysis_tools/fusion_ablation_study.py --script tiny_llama_v3.py \\
      --fusions triton-swiglu,triton-rotary
  python analysis_tools/fusion_ablation_study.py --seq-len 128 --output small.json
  python analysis_tools/fusion_ablation_study.py --table small.json
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fusion_lab import records, study
from fusion_lab.cli import Parser, ToolError, note, program, several
from fusion_lab.script import (
    DEFAULT_SCRIPT,
    add_script,
    load_script,
    parser_around,
    precision_of,
    script_arguments,
)
from fusion_lab.turns import graph_of

KEYS = ("script", "argv", "batch_size", "precision", "side")  # of any row


def build_parser() -> Parser:
    parser = parser_around(__file__, __doc__, DEFAULT_SCRIPT)
    add_script(parser, DEFAULT_SCRIPT)
    parser.add_flag("--all-combinations", "every set of the fusions")
    fusions = {"type": several(), "metavar": "A,B", "help": "that vary (default: what is new)"}
    parser.add_argument("--fusions", **fusions)
    parser.add_count(
        "--group-size", study.GROUP, "sets in memory together", least=study.SMALLEST_GROUP
    )
    study.add_study(parser, 10, "set", "ablation_<script>.json")
    return parser


def measure(args: argparse.Namespace, argv: Sequence[str]) -> Path:
    """Measure what is not measured yet; returns where the study is."""
    module = load_script(args.script)
    known = [flag for flag, *_ in module.FUSIONS]
    fusions = args.fusions or study.new_fusions(module)
    if not fusions:
        raise ToolError(f"{args.script} adds no fusions")
    if unknown := [fusion for fusion in fusions if fusion not in known]:
        raise ToolError(f"--fusions {unknown[0]}: {args.script} has {', '.join(known) or 'none'}")
    options = graph_of(argv)
    for choice in ("enable", "disable"):  # what does not fit is said before anything is measured
        flags = [f"--{choice}-{fusion}" for fusion in fusions]
        _, parsed = script_arguments(module, [*options, *flags], None)
    path = args.output or Path(f"ablation_{module.SCRIPT}.json")
    sets = study.fusion_sets(fusions, args.all_combinations)
    settings = {"fusions": fusions, "sets": len(sets), "rounds": args.rounds}
    settings |= {"group": args.group_size, "script": module.SCRIPT, "argv": list(argv)}
    arguments, more = {precision_of(vars(parsed)): options}, (parsed.seed, args.group_size)
    parts = study.ablation(module.SCRIPT, arguments, fusions, sets, args.rounds, *more)
    study.measure_study(path, parts, keep=True, **settings)
    return path


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    path = study.study_asked_for(args.table, argv) or measure(args, argv)
    content = records.read_study(path, KEYS, study.TIMES, kind=study.Ablated)
    rows, script = content["rows"], content["rows"][0]["script"]
    tables = [study.heading(content, script)]
    for shape, same in study.by_shape(rows).items():
        tables += [study.sets_table(shape or script, same, wide=True), *study.effects_tables(same)]
    print("\n\n".join(tables), flush=True)
    if any(row.get("status") == "oom" for row in rows):
        beside = "out of memory beside the other sets of a group"
        note(f"{beside}: a smaller --group-size takes less")
    study.check_failed(rows)
    return 0


main = program(build_parser, run, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

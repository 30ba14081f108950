#!/usr/bin/env python3
"""Which fusions matter, at each size: what each gains alone, after all others, and on the whole.

None, each alone, all but each, and all are measured; with --all-combinations every set. The fusions
that vary are those which the version adds to the one before, or --fusions. At each size, in each
precision and under each compiler the sets take turns in groups of at most --group-size, as graphs
where there is a GPU. Each group has runs of its own without these fusions and with all of them, and
every ratio is over one of these in the same turn; "all again" is a control, built and captured a
second time. How long a turn is follows from the speed: about 0.3 s, and at least two steps. On a
CPU without sizes small ones are taken, and said.

A run that is out of memory or fails is a row. The same command goes on after an interruption, and
tries again what failed; with more sizes it measures those alone. Other fusions or rounds need
another --output.

Examples:
  python analysis_tools/fusion_ablation_study.py --all-combinations
  python analysis_tools/fusion_ablation_study.py --seq-lengths 64,128 --batch-sizes 2,4 --csv a.csv
  python analysis_tools/fusion_ablation_study.py --script tiny_llama_v2.py,tiny_openfold_v2.py \\
      --precisions fp32,bf16 --plot ablation.png
  python analysis_tools/fusion_ablation_study.py --script tiny_llama_v3.py \\
      --fusions triton-swiglu,triton-rotary
  python analysis_tools/fusion_ablation_study.py --table ablation_tiny_llama_v2.json
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from fusion_lab import study, sweep
from fusion_lab.cli import Parser, ToolError, program, several
from fusion_lab.script import load_script

SCRIPT = "tiny_llama_v2.py"


def build_parser() -> Parser:
    parser = sweep.sweep_parser(__file__, __doc__, SCRIPT, rounds=10)
    add = parser.add_argument
    add("--script", type=several(), default=[SCRIPT], metavar="FILE,FILE", help=f"({SCRIPT})")
    parser.add_flag("--all-combinations", "every set of the fusions")
    add("--fusions", type=several(), metavar="A,B", help="that vary (default: what is new)")
    size = "sets in memory together"
    parser.add_count("--group-size", sweep.GROUP, size, least=sweep.SMALLEST_GROUP)
    return parser


def sets_of(args: argparse.Namespace, module: ModuleType) -> tuple[list[str], list[sweep.Set]]:
    known = [flag for flag, *_ in module.FUSIONS]
    fusions = args.fusions or sweep.new_fusions(module)
    if not fusions:
        raise ToolError(f"{module.SCRIPT}.py adds no fusions")
    if unknown := [fusion for fusion in fusions if fusion not in known]:
        raise ToolError(f"--fusions {unknown[0]}: {module.SCRIPT}.py has {', '.join(known)}")
    return fusions, sweep.fusion_sets(fusions, args.all_combinations)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    path = study.study_asked_for(args.table, argv)
    if not path:
        scripts = [load_script(name).SCRIPT for name in args.script]
        points = sweep.sweep_points(args, argv, [[s] for s in scripts], partial(sets_of, args))
        path = args.output or Path(f"ablation_{'_'.join(scripts)}.json")
        settings = {"fusions": args.fusions, "every": args.all_combinations}
        sweep.measure_points(args, argv, points, path, group=args.group_size, **settings)
    return sweep.show(args, path)


main = program(build_parser, run, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

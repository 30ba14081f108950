#!/usr/bin/env python3
"""Versions of a model over batch sizes and sequence lengths: speed, peak memory, and the loss they
train to.

At each size all models take turns, as graphs where there is a GPU: samples per second are those of
the median turn, a speed-up is over the first model in the same turn. For accuracy each trains
--num-steps steps (an argument of the scripts) from the same seed, and the difference of the last
loss is relative to that of the first model. On a CPU without sizes small ones are taken, and said.

A run that is out of memory or fails is a row. The same command goes on after an interruption, and
tries again what failed; with more sizes it measures those alone. Other models, metrics or rounds
need another --output.

Examples:
  python analysis_tools/benchmark_suite.py --models v1,v2 --batch-sizes 4,8,16,32 \\
      --seq-lengths 128,256,512
  python analysis_tools/benchmark_suite.py --family openfold --seq-lengths 64,128 --plot suite.png
  python analysis_tools/benchmark_suite.py --compilers none,default --csv compiled.csv
  python analysis_tools/benchmark_suite.py --table benchmark_llama.json
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fusion_lab import study, sweep
from fusion_lab.cli import Parser, ToolError, program, several
from fusion_lab.files import ROOT
from fusion_lab.script import load_script

METRICS = ("throughput", "memory", "accuracy")
GRID = {True: ([128, 256], [4, 8]), False: ([32, 64], [1, 2])}  # lengths and batch sizes


def build_parser() -> Parser:
    parser = sweep.sweep_parser(__file__, __doc__, "tiny_llama_v2.py", rounds=10)
    add = parser.add_argument
    add("--models", type=several(), default=["v1", "v2"], metavar="V,V", help="(default: v1,v2)")
    add("--family", choices=("llama", "openfold"), default="llama", help="(default: llama)")
    loss = "without accuracy nothing is trained (default: all)"
    add("--metrics", type=several(among=METRICS), default=METRICS, metavar="M,M", help=loss)
    return parser


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    path = study.study_asked_for(args.table, argv)
    if not path:
        there = [path.stem[-2:] for path in sorted(ROOT.glob(f"tiny_{args.family}_v?.py"))]
        if unknown := [model for model in args.models if model not in there]:
            raise ToolError(f"--models {unknown[0]}: {args.family} has {', '.join(there)}")
        team = [load_script(f"tiny_{args.family}_{model}.py").SCRIPT for model in args.models]
        points = sweep.sweep_points(args, argv, [team], grid=GRID)
        path = args.output or Path(f"benchmark_{args.family}.json")
        settings = {"models": args.models, "metrics": args.metrics, "family": args.family}
        loss = [] if "accuracy" in args.metrics else None
        sweep.measure_points(args, argv, points, path, loss, **settings)
    return sweep.show(args, path)


main = program(build_parser, run, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

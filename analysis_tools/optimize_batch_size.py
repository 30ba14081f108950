#!/usr/bin/env python3
"""The best batch size under a memory limit, measured: for throughput, latency or memory per sample.

Batch sizes 1, 2, 3, 4, 6, 8, 12 and so on, or --batch-sizes, are measured until a run is out of
memory or takes more than the wanted part of the device's memory; each alone, as a graph where there
is a GPU, and anew at each of --seq-lengths. On a CPU the memory is that of the machine and peaks
are of tensors; a size that by its number of samples would not fit is not tried, and without sizes
small ones are taken, up to 32 samples.

A finished search answers for all three targets. The same command goes on after an interruption;
other arguments need another --output.

Examples:
  python analysis_tools/optimize_batch_size.py --seq-len 128 --optimization-target throughput
  python analysis_tools/optimize_batch_size.py --seq-lengths 64,128 --csv sizes.csv
  python analysis_tools/optimize_batch_size.py --script tiny_openfold_v3.py --output v3.json
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fusion_lab import study, sweep
from fusion_lab.batch_size import TARGETS, growing, report, sizes_up_to
from fusion_lab.cli import Parser, ToolError, positive, program
from fusion_lab.host import memory_mb
from fusion_lab.script import load_script
from fusion_lab.turns import on_gpu, words_of

SCRIPT = "tiny_llama_v2.py"


def build_parser() -> Parser:
    parser = sweep.sweep_parser(__file__, __doc__, SCRIPT, rounds=5)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--script", type=str, default=SCRIPT, metavar="FILE", help=default)
    part = {"type": positive(1), "default": 0.8, "metavar": "X"}
    add("--target-memory-usage", **part, help=f"part of memory {default}")
    add("--optimization-target", choices=TARGETS, default="throughput", help=default)
    parser.add_count("--max-batch-size", 0, "end there (0: 65536, or 32 at small sizes)", least=0)
    return parser


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    if "--batch-size" in words_of(argv):
        raise ToolError("--batch-size is what is looked for: --max-batch-size limits it")
    path = study.study_asked_for(args.table, argv)
    memory = memory_mb("cuda" if on_gpu(argv) else "cpu")
    if not path:
        module, rows = load_script(args.script), []
        small = sweep.small_sizes(args, argv, module)
        if args.batch_sizes == [None]:
            args.batch_sizes = sizes_up_to(args.max_batch_size or (32 if small else 65536))
        points = sweep.sweep_points(args, [*small, *argv], [[module.SCRIPT]])
        limits = {"limit_mb": args.target_memory_usage * memory}
        limits["host_mb"] = None if on_gpu(argv) else memory
        parts = growing(rows, points, args.rounds, **limits)
        path = args.output or Path(f"batch_size_{module.SCRIPT}.json")
        settings = {"script": module.SCRIPT, "argv": [*argv], "rounds": args.rounds}
        study.measure_study(path, parts, rows=rows, **settings)
    return report(args, path, memory)


main = program(build_parser, run, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

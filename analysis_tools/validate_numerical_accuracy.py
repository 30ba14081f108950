#!/usr/bin/env python3
"""Does one version compute what another one computes? Across scripts, as --verify-accuracy is
within one.

Both scripts get the same arguments, the weights of the baseline and its batches. Compared are
outputs, loss and the gradient of every parameter, first at the initial weights, then at those that
the baseline has after --steps training steps; and the losses of these steps, which each script
takes with its own optimizer and, where its arguments ask for one, as a graph. Names are those of
state_dict(), where nothing is fused.

An error is the norm of the difference from float64 over the norm of the value, each gradient by
itself. Its limit is three times the error of the baseline with everything unfused in the same
precision, the largest of nine roundings where one does not explain an error, or --tolerance where
that is more; --tolerance is also the limit of the two loss curves' relative difference. Unless
given it is 1e-3 for losses and outputs, and for gradients, as an argument of a ReLU may round to
the other side of zero, 3e-3, or 0.05 below float32. The error of a parameter without a gradient,
and of what is not a number, is inf. Exit status 1 where something is off.

Examples:
  python analysis_tools/validate_numerical_accuracy.py --baseline tiny_llama_v1.py \\
      --optimized tiny_llama_v2.py
  python analysis_tools/validate_numerical_accuracy.py --baseline tiny_llama_v1.py \\
      --optimized tiny_llama_v4.py \\
      --tolerance 1e-3 --hidden-dim 64 --num-layers 2 --seq-len 32 --batch-size 2
  python analysis_tools/validate_numerical_accuracy.py --baseline tiny_openfold_v1.py \\
      --optimized tiny_openfold_v2.py --steps 10 --use-amp --tolerance 0.01
"""

import argparse
import sys
from collections.abc import Sequence

from fusion_lab.cli import (
    Parser,
    ToolError,
    documented_parser,
    positive,
    program,
    sign_of_life,
)
from fusion_lab.files import write_text
from fusion_lab.script import load_script, script_arguments
from fusion_lab.show import Column, render

COLUMNS = [
    Column("what", "what"),
    Column("worst", "worst", text=True),
    Column("relative difference", "error", ".2e"),
    Column("limit", "limit", ".2e"),
    Column("verdict", lambda row: "pass" if row["passed"] else "FAIL"),
]


def build_parser() -> Parser:
    usage = "%(prog)s --baseline FILE --optimized FILE [arguments] [arguments of both scripts]"
    note = "Every other argument goes to both scripts.\n\n"
    parser = documented_parser(__file__, __doc__, usage, note)
    parser.add_path("--baseline", "FILE", "version script whose values are expected", required=True)
    parser.add_path("--optimized", "FILE", "version script that is checked", required=True)
    limit = "limit, looser or tighter (default: 1e-3, for gradients 3e-3, below float32 0.05)"
    parser.add_argument("--tolerance", type=positive(), metavar="X", help=limit)
    parser.add_count("--steps", 20, "of the loss curve")
    parser.add_path("--csv", "FILE.csv", "also write the table there")
    return parser


def validate(args: argparse.Namespace, argv: Sequence[str]) -> int:
    scripts = [load_script(str(path)) for path in (args.baseline, args.optimized)]
    from fusion_lab.accuracy import Side, compare_scripts

    sides = [Side(script, script_arguments(script, argv, None)[1]) for script in scripts]
    names = [path.name for path in (args.baseline, args.optimized)]
    if odd := sorted(dict(sides[0].shapes() ^ sides[1].shapes())):
        both = f"{' and '.join(names)} are different models"
        raise ToolError(f"{both}: not both have {odd[0]}, of the same shape")
    try:
        with sign_of_life("both scripts"):
            rows = compare_scripts(*sides, args.tolerance, args.steps)
    except (RuntimeError, MemoryError) as error:
        status, message = scripts[0].explain(error, sides[0].args)
        raise ToolError(message, status) from error
    print(render(COLUMNS, rows))
    if args.csv:
        write_text(args.csv, render(COLUMNS, rows, "csv"))
    passed = all(row["passed"] for row in rows)
    print(f"\n{names[1]} against {names[0]}: {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


main = program(build_parser, validate, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

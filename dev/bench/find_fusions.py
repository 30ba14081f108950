#!/usr/bin/env python3
"""How far off find-fusions is from steps that torch.compile has made: tables of a study.

Each row is a step: its time now and with its chains fused as predicted, and as measured, both as
graphs in alternating turns. Half of the models, chosen by a checksum of their names before anything
was measured, tell the one constant that is fitted, how long a kernel among others takes to begin
and end. Errors are reported for the other half, for each model with the constant that all others
tell, and, where a file has them, for problems of KernelBench, which nobody here chose.

A step that is compiled to another program, with another attention, or not at all, tells no error of
a speed-up. Commit 464eadd6 has the program that measured the rows; `find-fusions --check` measures
one step.

Examples:
  python dev/bench/find_fusions.py results/h100/find_fusions.json
  python dev/bench/find_fusions.py results/h100/find_fusions.json --table errors
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import NotRequired

from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.fusions.rates import AMONG_OTHERS
from fusion_lab.records import Number, Row, Turns, read_rows
from fusion_lab.show import Column, render

VALUES = [1 + n / 4 for n in range(9)]  # of the constant
PARTS = ("fitted", "held out", "KernelBench")
MISS = 20  # percent, from which on a reason is wanted


class Predicted(Row):
    part: str  # fitted, held out, KernelBench, or later than the rules of the tool
    predicted_ms: NotRequired[dict[str, Number]]  # by level of fusion
    compiled_ms: NotRequired[dict[str, Number]]  # predicted, by the value of the constant
    sides_ms: NotRequired[dict[str, Turns]]
    remarks: NotRequired[list[str]]
    traced: NotRequired[str]  # why it cannot be a graph: its sides are kernels in traces
    other: NotRequired[list[str]]  # kernels that tell that another program was compiled, or none


def judged(row: dict) -> dict:
    """A row of the table: milliseconds predicted and measured, speed-ups, errors in percent."""
    columns = {f"{level}, predicted": ms for level, ms in row.get("predicted_ms", {}).items()}
    columns |= {side: statistics.median(ms) for side, ms in row.get("sides_ms", {}).items()}
    if "now" in columns:
        columns["now off"] = 100 * (columns["now, predicted"] / columns["now"] - 1)
    if "now" in columns and "compiled" in columns:
        columns["speedup"] = columns["now"] / columns["compiled"]
        # by the value of the constant
        columns["offs"] = {
            float(value): 100 * (columns["now, predicted"] / ms / columns["speedup"] - 1)
            for value, ms in row["compiled_ms"].items()
        }
        columns["off"] = columns["offs"][AMONG_OTHERS]
        columns["predicted"] = columns["speedup"] * (1 + columns["off"] / 100)
    if "V3" in columns:
        columns["V3 off"] = 100 * (columns["V3, predicted"] / columns["V3"] - 1)
    reasons = [*row.get("remarks", ())]
    if row.get("other"):
        reasons.append("compiled, it is another program, or none was")
    name = f"{row['shape']}, {row['precision']}"
    columns |= {"model": name, "shape": row["shape"], "part": row["part"]}
    columns["how"] = "traces" if row.get("traced") else "graphs"
    return {"why": reasons, "another": bool(row.get("other")), **columns}


def fitted(rows: Sequence[dict]) -> float:
    """The value of the constant with the least median error."""
    return min(VALUES, key=lambda v: statistics.median(abs(row["offs"][v]) for row in rows))


def errors(rows: Sequence[dict]) -> str:
    """How far off steps and speed-ups are, by part."""
    run = [row for row in rows if "offs" in row and not row["another"]]
    of = {part: [row for row in run if row["part"] == part] for part in PARTS}
    if not (of["fitted"] and of["held out"]):
        raise ToolError("no rows that are fitted, or none held out: there are no errors by part")
    parts = [part for part in PARTS if of[part]]
    own = of["fitted"] + of["held out"]
    value = fitted(of["fitted"])
    alone = []
    for row in own:  # in each of its precisions
        others = [each for each in own if each["shape"] != row["shape"]]
        alone.append(row["offs"][fitted(others)])
    now = {
        part: [row for row in rows if row["part"] == part and "now off" in row] for part in PARTS
    }
    lines = [spread(part, now[part], [row["offs"][value] for row in of[part]]) for part in parts]
    lines.insert(2, spread("each left out in turn", now["fitted"] + now["held out"], alone))
    columns = [
        Column("steps", "steps"),
        Column("", "number"),
        Column("now: median", "now 50", ".1f", " %"),
        Column("nine of ten within", "now 90", ".1f", " %"),
        Column("speed-up: median", "off 50", ".1f", " %"),
        Column("nine of ten within ", "off 90", ".0f", " %"),
        Column(f"within {MISS} %", "close"),
    ]
    # what the tool has, from an earlier study of 13 steps
    kept = {part: statistics.median(abs(row["off"]) for row in of[part]) for part in parts}
    medians = ", ".join(f"{part} {error:.1f} %" for part, error in kept.items())
    text = (
        f"The fitted half tells {value:g} for the time of a kernel among others. The tool has "
        f"{AMONG_OTHERS:g}; with that, in the median: {medians}. Of the speed-ups of "
        f"{sum(row['another'] for row in rows)} steps there is no error: compiled they are another "
        "program, or none was."
    )
    return f"{render(columns, lines)}\n\n{text}"


def spread(name: str, rows: Sequence[dict], offs: Sequence[float]) -> dict:
    """Median and ninth tenth of the errors of these rows' steps, and of their speed-ups."""
    line: dict[str, object] = {"steps": name, "number": len(rows)}
    for key, errors in (("now", [row["now off"] for row in rows]), ("off", offs)):
        sizes = sorted(map(abs, errors))
        line[f"{key} 50"] = statistics.median(sizes)
        line[f"{key} 90"] = sizes[math.ceil(0.9 * len(sizes)) - 1]
    close = sum(abs(off) <= MISS for off in offs)
    return {**line, "close": f"{close} of {len(offs)}"}


def table(rows: Sequence[dict]) -> str:
    """A line for each model, and what the tool says of those that it misses."""
    columns = [
        Column("model", "model"),
        Column("part", "part", text=True),
        Column("sides", "how", text=True),
        Column("now, predicted", "now, predicted", ".2f", " ms"),
        Column("measured", "now", ".2f", " ms"),
        Column("compiled", "compiled", ".2f", " ms"),
        Column("speed-up, predicted", "predicted", ".2f", "x"),
        Column("speed-up, compiled", "speedup", ".2f", "x"),
        Column("off", "off", "+.0f", " %"),
        Column("like V3, predicted", "V3, predicted", ".2f", " ms"),
        Column("V3", "V3", ".2f", " ms"),
        Column("V3 off", "V3 off", "+.0f", " %"),
    ]
    missed = [row for row in rows if abs(row.get("off", 0)) > MISS]
    reasons = [f"{row['model']}: {'; '.join(row['why']) or 'nothing'}" for row in missed]
    says = [f"What the tool says where it is more than {MISS} % off:"] if missed else []
    return "\n".join([render(columns, rows), "", *says, *(f"- {each}" for each in reasons)])


def show(args: argparse.Namespace) -> int:
    """Print a table of the study."""
    rows = [judged(row) for row in read_rows(args.study, ("shape", "precision"), kind=Predicted)]
    if not rows:
        raise ToolError(f"{args.study}: no such study")
    print(errors(rows) if args.table == "errors" else table(rows))
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("study", type=Path, metavar="FILE.json")
    help = "of each step, or of how far off they are (default: models)"
    parser.add_argument("--table", choices=("models", "errors"), default="models", help=help)
    return parser


main = program(build_parser, show)

if __name__ == "__main__":
    sys.exit(main())

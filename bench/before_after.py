#!/usr/bin/env python3
"""Whole training steps of V3 and V4 before a change and after it: time, memory, first losses.

Three sides take short alternating turns, as graphs where there is a GPU: a script as it was, the
same once more (`again`), and as it is. Those of a trunk of 48 blocks run one after the other. A
step may take 2 % longer than before, or three times the standard deviation of `again` over
`before`, whichever is more, and 3 % more memory. Exit status 1: a measured one takes more.

Examples:
  python bench/before_after.py v1.0 --output results/DIR/before_after.json    since this revision
  python bench/before_after.py FOLDER --only V4 "tiny_openfold, crop"         old scripts; a part
  python bench/before_after.py --table results/DIR/before_after.json
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path

import _path

from bench.sizes import CROP, GPT_2, ODD, PRECISIONS, SHAPES, TRUNK, in_sizes, script_of, sized
from lab.cli import Parser, ToolError, documented_parser, program
from lab.provenance import output_of
from lab.records import NUMBER, Row, read_study
from lab.script import import_file, interpret_without_gpu
from lab.show import Column, render, side_columns
from lab.study import TIMES, Part, add_study, as_rows, by_side, chosen, measure_study
from lab.turns import all_measured, ratios

KEYS = ("version", "shape", "precision")
SIDES = ("before", "after", "again")
BEYOND = "beyond what is allowed"
TIME, MEMORY = 1.02, 1.03  # times as much as before that a step may take
ALONE = "tiny_openfold, trunk"  # three of them do not fit into memory
SIZES = {
    **SHAPES,
    "tiny_llama, GPT-2 small": sized("llama", GPT_2),
    "tiny_openfold, untuned": sized("openfold", ODD),
    "tiny_openfold, 128 x 255": sized("openfold", CROP.replace("256 --msa", "255 --msa")),
    "tiny_openfold, 101 x 211": sized("openfold", f"{ODD} --num-seqs 101 --seq-len 211"),
    ALONE: sized("openfold", TRUNK),
}
MORE = {  # precisions beside bf16
    "tiny_llama, small": ("fp32", "TF32"),
    "tiny_openfold, default": ("fp32", "TF32"),
    "tiny_openfold, crop": ("fp32",),
}


Changed = Row | {"first_losses": [NUMBER]}


def import_earlier(before: str, script: str, folder: Path) -> str:
    """Import a script of a revision or a folder; returns its name here, which is another one, as
    operators have the name of their file: it is copied to `folder`."""
    path, copy = Path(before) / f"{script}.py", folder / f"before_{script}.py"
    try:
        if Path(before).is_dir():
            copy.write_bytes(path.read_bytes())
        else:
            copy.write_text(output_of("git", "show", f"{before}:{path.name}"))
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise ToolError(f"{before}: it has no {path.name} ({reason})") from error
    import_file(copy)
    return copy.stem


def parts(before: str, folder: Path, rounds: int) -> list[Part]:
    """What names the sides of a case, and what measures them; the newest version first."""
    found, earlier = [], {}
    for version, (names, model, argv) in product(("V4", "V3"), in_sizes(PRECISIONS, shapes=SIZES)):
        if names["precision"] not in ("bf16", *MORE.get(names["shape"], ())):
            continue
        script = script_of(model, version)
        if script not in earlier:
            earlier[script] = import_earlier(before, script, folder)
        scripts = dict(zip(SIDES, (earlier[script], script, earlier[script]), strict=True))
        sides = {side: (name, argv) for side, name in scripts.items()}
        names = {"version": version, **names, "model": model, "script": script}
        found.append((names, partial(measured, sides, rounds, names["shape"] == ALONE)))
    return found


def measured(sides: dict[str, tuple[str, list[str]]], rounds: int, alone: bool) -> list[dict]:
    """A row for each side; all of them have to finish."""
    rows = {}
    for group in [{name: side} for name, side in sides.items()] if alone else [sides]:
        rows |= all_measured(group, rounds, counted=False, finishing=first_losses)
    return as_rows(rows)


def first_losses(trainer) -> dict:
    return {"first_losses": trainer.losses[:5]}


def judged(sides: Mapping[str, dict]) -> dict:
    """What the sides of a case show, as columns of the table name it."""
    before, after, again = (sides[side] for side in SIDES)
    both = zip(before["turns_ms"], again["turns_ms"], strict=True)
    times = ratios(after, {"turns_ms": [*map(statistics.fmean, both)]})
    allowed = max(TIME, 1 + 3 * statistics.pstdev(ratios(again, before)))
    memory = after["peak_mb"] / before["peak_mb"]
    losses = zip(after["first_losses"], before["first_losses"], strict=True)
    beyond = ["time"] * (statistics.median(times) > allowed) + ["memory"] * (memory > MEMORY)
    return {
        "after / before": f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})",
        "allowed": f"{allowed:.3f}",
        "before, MB": f"{before['peak_mb']:.0f}",
        "after / before, MB": f"{memory:.3f}",
        "losses differ by": f"{max(abs(new / old - 1) for new, old in losses):.0e}",
        BEYOND: ", ".join(beyond) or "nothing",
    }


def table(cases: Mapping[tuple, dict]) -> str:
    lines = [{"name": ", ".join(case), **line} for case, line in cases.items()]
    columns = [Column("whole steps", "name"), *side_columns("{}, ms", SIDES, "batch_ms", ".3f")]
    columns += [Column(key, key) for key in lines[0] if key not in ("name", *SIDES)]
    return render(columns, lines)


def compare(args: argparse.Namespace) -> int:
    if bool(args.before) == bool(args.table):
        raise ToolError("a revision or a folder to measure, or --table FILE.json")
    path = args.table or args.output or Path("before_after.json")
    if not args.table:
        interpret_without_gpu()
        with tempfile.TemporaryDirectory() as folder:
            asked = chosen(parts(args.before, Path(folder), args.rounds), args.only)
            before = Path(args.before).name
            if not Path(args.before).is_dir():
                before = output_of("git", "rev-parse", "--short", args.before).strip()
            measure_study(path, asked, keep=True, rounds=args.rounds, before=before)
    rows = read_study(path, (*KEYS, "side"), TIMES, kind=Changed)["rows"]
    cases = {case: sides | judged(sides) for case, sides in by_side(rows, *KEYS).items()}
    print(table(cases))
    return int(not args.table and any(line[BEYOND] != "nothing" for line in cases.values()))


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    add = parser.add_argument
    add("before", nargs="?", metavar="REVISION|FOLDER", help="where the scripts before are")
    add("--only", nargs="+", default=[], metavar="NAME", help="versions, sizes and precisions")
    add_study(parser, 11, "side", "before_after.json")
    return parser


main = program(build_parser, compare)

if __name__ == "__main__":
    sys.exit(main())

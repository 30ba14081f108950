#!/usr/bin/env python3
"""Check all puzzles, a line each; on a GPU, with --scoreboard, one table of all that are solved.

Examples:
  python exercises/puzzles/all_puzzles.py                 which of them have you solved?
  python exercises/puzzles/all_puzzles.py --scoreboard    how fast are they?
"""

from __future__ import annotations

import sys
from pathlib import Path

from exercises.puzzles import checker
from fusion_lab.cli import run_tool

PROG = Path(__file__).name
FILES = sorted(Path(__file__).parent.glob("puzzle_*.py"))


def main(argv: list[str] | None = None) -> int:
    parser = checker.parser_for(PROG, __doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, default=FILES, metavar="FILE.py", help="not all of them"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="keep what was measured")
    args = parser.parse_args(argv)

    def body() -> int:
        from exercises.puzzles import scoreboard

        puzzles, solved = [], 0
        for file in args.files:
            try:
                puzzle = checker.load(file).PUZZLE
            except Exception as error:  # in what the reader wrote
                print(f"{file.stem}: {checker.explained(error, {str(file)})}")
                continue
            if args.solution:
                checker.use_kernels_of(puzzle, checker.solution_of(puzzle))
            puzzles.append(puzzle)
            if not args.scoreboard:
                right, text, _ = checker.verdict(puzzle)
                solved += right
                print(f"{file.stem}: {text}", flush=True)
        if args.scoreboard:
            status = scoreboard.measured(puzzles, args.output)
            return status if len(puzzles) == len(args.files) else status or 1
        print(f"{solved} of {len(args.files)} solved")
        return 0 if solved == len(args.files) else 1

    return run_tool(PROG, body)


if __name__ == "__main__":
    sys.exit(main())

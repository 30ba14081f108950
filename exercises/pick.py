#!/usr/bin/env python3
"""Rows and columns of the Markdown tables on the standard input, by words in them.

The first column stays. Without words a table keeps all its rows, without --columns all columns; a
table of which nothing is left is not printed.

Examples:
  python dev/bench/versions.py table results/h100 --tables headline |
      python exercises/pick.py "tiny_llama, small" --columns "graph V1" "graph V2"
"""

import argparse
import sys

from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.show import cells_of


def tables(text: str) -> list[list[list[str]]]:
    """Of each table its rows, the first with the headings; the line below those is left out."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("|"):
            if not inside:
                found.append([])
            if not set(line) <= set("|- :"):
                found[-1].append(cells_of(line))
        inside = line.startswith("|")
    return found


def is_asked(name: str, heading: list[str], columns: list[str]) -> bool:
    """A heading as it is asked for, or, where the table has no such, one that ends so: `speed-up`
    is also `fp32 speed-up`."""
    ends = [asked for asked in columns if asked not in heading]
    return name in columns or any(name.endswith(f" {asked}") for asked in ends)


def pick(table: list[list[str]], words: list[str], columns: list[str]) -> list[list[str]]:
    """The part of a table that was asked for; empty if it has no such row or column."""
    heading, *rows = table
    kept = list(range(len(heading)))
    if columns:
        kept = [0] + [n for n, name in enumerate(heading) if n and is_asked(name, heading, columns)]
    rows = [row for row in rows if not words or any(word in row[0] for word in words)]
    if not rows or (columns and len(kept) == 1):
        return []
    return [[row[n] for n in kept] for row in [heading, *rows]]


def show(table: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        first, *rest = zip(row, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]))


def run(args: argparse.Namespace) -> int:
    found = [table for table in tables(sys.stdin.read()) if args.table in table[0][0]]
    parts = [part for table in found if (part := pick(table, args.words, args.columns))]
    if not parts:
        raise ToolError("no table has such a row and column")
    for part in parts:
        show(part)
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("words", nargs="*", metavar="WORDS", help="of the first cell of a row")
    parser.add_argument("--columns", nargs="+", default=[], metavar="HEADING")
    parser.add_argument("--table", default="", metavar="WORDS", help="of its first heading")
    return parser


main = program(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())

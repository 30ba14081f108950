#!/usr/bin/env python3
"""Write the tables of Markdown files that a command prints, or check that they are what it prints
now.

Tables stand between two comments, of which the first names the command; it runs in the root of the
repository:

  <!-- table: python dev/bench/versions.py table results/h100 -->
  <!-- end of table -->

A page can take a part of what its command prints:

  COMMAND, only "TITLE" ...       the tables whose header begins so, in this order
  COMMAND, columns "LABEL" ...    the first column and these, in this order
  COMMAND, rows "TEXT" ...        the rows whose first cell begins so

Examples:
  python dev/tables.py README.md           run the commands, put what they print in between
  python dev/tables.py --check README.md   exit 1 and name tables that differ or fail
"""

import argparse
import functools
import re
import shlex
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, documented_parser, program, say
from fusion_lab.files import ROOT, write_text
from fusion_lab.show import Column, cells_of, render

TABLE = re.compile(
    r"^(<!-- tables?: (.+?) -->\n)(.*?)^(<!-- end of tables? -->)$", re.MULTILINE | re.DOTALL
)
PART = re.compile(r', (only|columns|rows)((?: "[^"]+")+)')
COMMENT = re.compile(r"<!-- (?:end of )?tables?\b")


@functools.cache
def output_of(command: str) -> str:
    """What a command prints; `python` is this interpreter."""
    try:
        words = shlex.split(command)
        if not words:
            raise ToolError("the comment names no command")
        words[0] = sys.executable if words[0] in ("python", "python3") else words[0]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    except (OSError, ValueError) as error:
        raise ToolError(f"{command}: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing on stderr"]
        raise ToolError(f"status {done.returncode} of its command: {said[-1]}")
    if not done.stdout.strip():
        raise ToolError("its command prints nothing")
    return done.stdout.strip() + "\n"


def printed_by(command: str) -> str:
    """What a command prints, or the part of it that is named."""
    parts = {kind: re.findall('"(.+?)"', names) for kind, names in PART.findall(command)}
    printed = output_of(PART.sub("", command))
    if titles := parts.get("only"):
        printed = "\n".join(table_of(printed, title) for title in titles)
    if "columns" in parts or "rows" in parts:
        printed = parts_of(printed, parts.get("columns"), parts.get("rows"))
    return printed


def parts_of(printed: str, columns: list[str] | None, rows: list[str] | None) -> str:
    """The tables with some of their columns and rows; each that is named must be in one of them."""
    tables, unused = [], {*(columns or ()), *(rows or ())}
    for table in printed.strip().split("\n\n"):
        if not table.startswith("|"):  # a line of text above a table
            continue
        header, rule, *lines = map(cells_of, table.splitlines())
        named = header if columns is None else [header[0], *(c for c in columns if c in header)]
        kept = [line for line in lines if rows is None or line[0].startswith(tuple(rows))]
        unused -= {*named}
        unused -= {text for text in rows or () if any(row[0].startswith(text) for row in kept)}
        places = [header.index(label) for label in named]
        shown = [Column(header[i], itemgetter(i), text=not rule[i].endswith(":")) for i in places]
        tables.append(render(shown, kept) + "\n")
    if unused:
        raise ToolError(f"its command prints no {', '.join(map(repr, sorted(unused)))}")
    return "\n".join(tables)


def table_of(printed: str, title: str) -> str:
    """The one table whose header begins with this title, however its columns are padded."""
    tables = printed.strip().split("\n\n")
    headers = [" ".join(table.partition("\n")[0].split()) for table in tables]
    pairs = zip(tables, headers, strict=True)
    found = [table for table, header in pairs if header.startswith(f"| {title}")]
    if len(found) != 1:
        wanted = f"not one table that begins with {title!r}"
        raise ToolError(f"its command prints {len(found)} tables, {wanted}")
    return found[0] + "\n"


def update(path: Path, check: bool) -> list[str]:
    """Write the tables of a file, all or none; returns what is wrong, a line each."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return [f"{path}: {getattr(error, 'strerror', None) or error}"]
    tables = list(TABLE.finditer(text))
    if len(COMMENT.findall(text)) != 2 * len(tables):
        alone = "lacks the other one, or is not a line of its own"
        return [f"{path}: a comment that begins or ends a table {alone}"]
    wrong, parts, end = [], [], 0
    for table in tables:
        try:
            printed = printed_by(table[2])
            if check and printed != table[3]:
                way_out = f"python dev/tables.py {path} writes it"
                raise ToolError(f"its command prints another table; {way_out}")
        except ToolError as error:
            wrong.append(f"{path}:{text.count(chr(10), 0, table.start()) + 1}: {error}")
            continue
        parts += [text[end : table.start(3)], printed]
        end = table.end(3)
    if not wrong and not check:
        write_text(path, "".join([*parts, text[end:]]))
    return wrong


def update_all(args: argparse.Namespace) -> int:
    wrong = [line for path in args.files for line in update(path, args.check)]
    for line in wrong:
        say(line)
    return int(bool(wrong))


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.md")
    parser.add_flag("--check", "write nothing")
    return parser


main = program(build_parser, update_all)

if __name__ == "__main__":
    sys.exit(main())

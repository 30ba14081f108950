#!/usr/bin/env python3
"""Show who has done which sheet, and who predicted what, from pages of answers.

`run_sheet.py SHEET --ask` leaves a page in my_answers/. Each folder is one person's my_answers, or
has a folder for each person. The first table has the tasks that each person has done; then there
is one for each sheet, with the predictions to each blank, how many had each, and what was measured.

Examples:
  python exercises/progress_board.py                     my own: my_answers/
  python exercises/progress_board.py class/              class/anna/, class/bela/, ...
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.show import Column, render

HEADER = re.compile(r"# My answers: (\S+)\n")
TASK = re.compile(r"^### (.+)\n", re.MULTILINE)
BLANK = re.compile(r"^\| (\[\d+\]) \| (.*?) \| (.*?) ?\|$", re.MULTILINE)


@dataclass
class Page:
    """One person's answers to a sheet: of each task its blanks, each with what was predicted and
    measured."""

    person: str
    sheet: str
    tasks: dict[str, list[tuple[str, str, str]]]


def pages_of(folder: Path) -> Iterator[Page]:
    """The pages of a person, or of each person that has a folder there."""
    if not folder.is_dir():
        raise ToolError(f"{folder}: no such folder; run_sheet.py SHEET --ask writes my_answers/")
    for path in sorted([*folder.glob("*.md"), *folder.glob("*/*.md")]):
        text = path.read_text(encoding="utf-8", errors="replace")
        header = HEADER.match(text)
        if header:
            _, *parts = TASK.split(text)
            tasks = zip(parts[::2], map(BLANK.findall, parts[1::2]), strict=True)
            yield Page(path.resolve().parent.name, header[1], dict(tasks))


def counts(answers: Counter[str]) -> str:
    """Answers, the most frequent first, each with how many gave it if several did."""
    kept = [(text, count) for text, count in answers.most_common() if text]
    return "; ".join(f"{text} ({count}x)" if count > 1 else text for text, count in kept)


def progress(pages: list[Page]) -> str:
    """A row for each sheet, a column for each person: tasks done."""
    people = sorted({page.person for page in pages})
    sheets = sorted({page.sheet for page in pages})
    done = {(page.sheet, page.person): len(page.tasks) for page in pages}
    columns = [Column("tasks done", str)]
    columns += [
        Column(person, lambda sheet, person=person: done.get((sheet, person), 0))
        for person in people
    ]
    return render(columns, sheets)


def predictions(pages: list[Page]) -> str:
    """A row for each blank of one sheet."""
    rows: dict[tuple[str, str], dict] = {}
    for page in pages:
        for task, blanks in page.tasks.items():
            for blank, predicted, measured in blanks:
                new = {"task": task, "blank": blank, "predicted": Counter(), "measured": Counter()}
                row = rows.setdefault((task, blank), new)
                row["predicted"][predicted] += 1
                row["measured"][measured] += 1
    columns = [
        Column("task", "task"),
        Column("blank", "blank", text=True),
        Column("predicted", lambda row: counts(row["predicted"]), text=True),
        Column("measured", lambda row: counts(row["measured"]), text=True),
    ]
    return render(columns, list(rows.values()))


def board(args: argparse.Namespace) -> int:
    pages = [page for folder in args.folders for page in pages_of(folder)]
    if not pages:
        raise ToolError(f"no answers in {', '.join(map(str, args.folders))}")
    print(progress(pages))
    for sheet in sorted({page.sheet for page in pages}):
        print(f"\n{sheet}:\n")
        print(predictions([page for page in pages if page.sheet == sheet]))
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    default = [Path("my_answers")]
    parser.add_argument("folders", nargs="*", type=Path, default=default, metavar="FOLDER")
    return parser


main = program(build_parser, board)

if __name__ == "__main__":
    sys.exit(main())

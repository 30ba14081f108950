#!/usr/bin/env python3
"""Print the agendas of docs/agenda.json as Markdown, or rehearse what is on them.

An item is `MINUTES what`, a session, or a sheet, whose minutes are those of its own **Core** line.
Measured are the commands alone, each time for the first time on a machine; reading, thinking and
talking are planned. A rehearsal runs the demonstrations of docs/INSTRUCTOR.md and the sheets with
tools/run_sheet.py and adds their seconds to a result file.

Examples:
  python tools/agenda.py table sessions "half a day"
  python tools/agenda.py rehearse results/my_gpu/rehearsal.json
  python tools/agenda.py rehearse rehearsal.json docs/INSTRUCTOR.md
"""

from __future__ import annotations

import _root

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workshop.cli import Parser, ToolError, documented_parser, needed, program
from workshop.files import ROOT, read_json, write_text
from workshop.show import Column, render

PROG = Path(__file__).name
PLAN = ROOT / "docs/agenda.json"
GUIDE = "docs/INSTRUCTOR.md"
DAY = "day 2"
CORE = re.compile(r"^\*\*Core\*\*: (\d+) minutes", re.MULTILINE)
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Item:
    """A line of an agenda."""

    what: str
    minutes: int
    path: str = ""  # of its sheet


def core_minutes(path: str) -> int:
    """The minutes of a sheet's core path; ToolError where it has none."""
    found = CORE.search((ROOT / path).read_text(encoding="utf-8"))
    if not found:
        raise ToolError(f"{path}: no line '**Core**: N minutes'")
    return int(found[1])


def item_of(line: str) -> Item:
    """What a line of the plan means."""
    if line.startswith("exercises/"):
        title = TITLE.search((ROOT / line).read_text(encoding="utf-8"))[1]
        return Item(f"sheet: [{title}](../{line})", core_minutes(line), line)
    if line.startswith("Session "):
        return Item(line, sum(item.minutes for item in session(line)))
    minutes, _, what = line.partition(" ")
    return Item(what, int(minutes))


@cache
def plan() -> dict:
    """docs/agenda.json."""
    return read_json(PLAN)


def session(name: str) -> list[Item]:
    """The items of a session."""
    return [item_of(line) for line in plan()["sessions"][name]]


def sheets() -> list[str]:
    """Every sheet on an agenda, once."""
    lines = [line for part in plan().values() for agenda in part.values() for line in agenda]
    return sorted({line for line in lines if line.startswith("exercises/")})


def measured(device: str, item: Item) -> float | None:
    """Minutes that the commands of an item took, by a device's rehearsal; None without one."""
    path = ROOT / f"results/{device}/rehearsal.json"
    seconds = read_json(path)["seconds"] if path.exists() else {}
    key = item.path or item.what
    if item.what.startswith("demonstration"):
        key = next(n for n, lines in plan()["sessions"].items() if item in map(item_of, lines))
    elif key in plan()["sessions"]:
        parts = [measured(device, part) for part in session(key)]
        return sum(part or 0 for part in parts)
    return seconds[key] / 60 if key in seconds else None


MEASURED = (
    Column("commands, H100", lambda row: row["h100"], ".1f"),
    Column("commands, two cores", lambda row: row["cpu"], ".1f"),
)


def row_of(at: int, item: Item) -> dict:
    """An item for a table, beginning at this minute."""
    took = {device: measured(device, item) for device in ("h100", "cpu")}
    return {"at": at, "what": item.what, "minutes": item.minutes, **took}


def sessions_table() -> str:
    """The four sessions, item by item, in minutes."""
    rows = []
    for name in plan()["sessions"]:
        at = 0
        for item in session(name):
            first = {"session": name.removeprefix("Session ") if at == 0 else ""}
            rows.append(first | row_of(at, item))
            at += item.minutes
        rows.append({"session": "", "at": at, "what": "end", "minutes": "", "h100": "", "cpu": ""})
    columns = (
        Column("session", "session"),
        Column("at", "at", "d"),
        Column("what", "what", text=True),
    )
    return render([*columns, Column("planned", "minutes", "d"), *MEASURED], rows)


def agenda_table(name: str) -> str:
    """A day from nine o'clock, in minutes."""
    rows, at = [], 9 * 60
    for item in map(item_of, plan()["agendas"][name]):
        if item.what == DAY:
            at = 9 * 60
        row = row_of(at, item) if item.minutes else dict.fromkeys(("minutes", "h100", "cpu"), "")
        rows.append(row | {"what": item.what, "at": f"{at // 60}:{at % 60:02}"})
        at += item.minutes
    end = {"at": f"{at // 60}:{at % 60:02}", "what": "end", "minutes": "", "h100": "", "cpu": ""}
    columns = Column(name, "at"), Column("what", "what", text=True)
    return render([*columns, Column("planned", "minutes", "d"), *MEASURED], [*rows, end])


def tables(names: Sequence[str]) -> Iterator[str]:
    """The tables of these names."""
    for name in names:
        if name != "sessions" and name not in plan()["agendas"]:
            raise ToolError(f"there is no agenda {name}, only: {', '.join(plan()['agendas'])}")
        yield sessions_table() if name == "sessions" else agenda_table(name)


def device_name() -> str:
    """Of the GPU that PyTorch sees, or of the processor."""
    with needed():
        import torch
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def rehearse(args: argparse.Namespace) -> int:
    """Run the guide and sheets and add their seconds to the file; 1 if a command fails."""
    study = read_json(args.file) if args.file.exists() else {}
    before = {"device": device_name(), "cores": len(os.sched_getaffinity(0))}
    if study and {key: study.get(key) for key in before} != before:
        raise ToolError(f"{args.file} is of {study.get('device')}, this is {before['device']}")
    seconds, failed = dict(study.get("seconds", {})), 0
    for name in args.sheets or [GUIDE, *sheets()]:
        logs = (args.log or Path(tempfile.mkdtemp())) / name.replace("/", "_").removesuffix(".md")
        command = [sys.executable, ROOT / "tools/run_sheet.py", ROOT / name, "--log", logs]
        failed += subprocess.run(list(map(str, command))).returncode != 0
        took = read_json(logs / "summary.json")["seconds"]
        seconds |= took if name == GUIDE else {name: sum(took.values())}
        result = json.dumps({**before, "seconds": seconds}, indent=1)
        write_text(args.file, result + "\n", replace=True)
    return int(failed > 0)


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    does = parser.add_subparsers(required=True)
    table = does.add_parser("table", help="print tables: sessions, or an agenda")
    table.add_argument("names", nargs="+", metavar="NAME")
    table.set_defaults(body=lambda args: print("\n\n".join(tables(args.names))) or 0)
    run = does.add_parser("rehearse", help="run the demonstrations and sheets, and time them")
    run.add_argument("file", type=Path, metavar="FILE.json")
    run.add_argument("sheets", nargs="*", metavar="SHEET.md", help="(default: all)")
    words = "keep what the commands print there"
    run.add_argument("--log", type=Path, metavar="DIR", help=words)
    run.set_defaults(body=rehearse)
    return parser


main = program(build_parser, lambda args: args.body(args))


if __name__ == "__main__":
    sys.exit(main())

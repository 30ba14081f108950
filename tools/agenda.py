#!/usr/bin/env python3
"""Print the agendas of docs/agenda.json as Markdown, or rehearse what is on them.

An item is `MINUTES what`, a session, or a sheet, whose minutes are those of its own **Core** line.
Measured are the commands alone, each time for the first time on a machine; reading, thinking and
talking are planned. A rehearsal runs the demonstrations of docs/INSTRUCTOR.md and the sheets with
tools/run_sheet.py and adds their seconds to a result file.

Examples:
  python tools/agenda.py table sessions
  python tools/agenda.py rehearse results/DIR/rehearsal.json
  python tools/agenda.py rehearse rehearsal.json docs/INSTRUCTOR.md
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import json
import os
import platform
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby

from lab.cli import Parser, ToolError, documented_parser, needed, program
from lab.files import ROOT, read_json, write_text
from lab.show import Column, render

GUIDE = "docs/INSTRUCTOR.md"
NEXT_DAY = "0 next day"
CORE = re.compile(r"^\*\*Core\*\*: (\d+) minutes", re.MULTILINE)
TITLE = re.compile(r"^# (?:Exercises: )?(.+)$", re.MULTILINE)
EXERCISE = re.compile(r"^## Exercise \d+[^:]*: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Item:
    what: str
    minutes: int
    path: str = ""  # of its sheet


def core_minutes(path: str) -> int:
    """The minutes of a sheet's core path; ToolError where it has none."""
    found = CORE.search((ROOT / path).read_text(encoding="utf-8"))
    if not found:
        raise ToolError(f"{path}: no line '**Core**: N minutes'")
    return int(found[1])


def title_of(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return ", ".join(found[1] for found in (TITLE.search(text), EXERCISE.search(text)) if found)


def item_of(line: str) -> Item:
    """What a line of the plan means."""
    if line.startswith("exercises/"):
        return Item(f"[{title_of(line)}](../{line})", core_minutes(line), line)
    if line.startswith("Session "):
        return Item(line, sum(item.minutes for item in session(line)))
    minutes, _, what = line.partition(" ")
    return Item(what, int(minutes))


plan = cache(partial(read_json, ROOT / "docs/agenda.json"))


def session(name: str) -> list[Item]:
    return [item_of(line) for line in plan()["sessions"][name]]


def sheets() -> list[str]:
    """Every sheet on an agenda, once."""
    lines = [line for part in plan().values() for agenda in part.values() for line in agenda]
    return sorted({line for line in lines if line.startswith("exercises/")})


def measured(device: str, item: Item, session: str = "") -> float | None:
    """Minutes that the commands of an item took, by a device's rehearsal; None without commands."""
    path = ROOT / f"results/{device}/rehearsal.json"
    seconds = read_json(path)["seconds"] if path.exists() else {}
    key = session if item.what.startswith("demonstration") else item.path
    return seconds[key] / 60 if key in seconds else None


def sessions_table() -> str:
    """The four sessions: minutes of each item, in brackets of its commands on two cores."""
    rows = []
    for name in plan()["sessions"]:
        parts = []
        for item in session(name):
            took = measured("cpu", item, name)
            parts.append(f"{item.minutes} {item.what}" + (f" ({took:.1f})" if took else ""))
        rows.append({"name": name.removeprefix("Session "), "what": "<br>".join(parts)})
    columns = Column("session", "name"), Column("minutes, what", "what", text=True)
    return render(columns, rows)


def agendas_table() -> str:
    """The agendas, each day from nine o'clock."""
    rows = []
    for name, lines in plan()["agendas"].items():
        days = [list(day) for last, day in groupby(lines, NEXT_DAY.__eq__) if not last]
        for number, day in enumerate(days, 1):
            at, parts = 9 * 60, []
            for item in map(item_of, day):
                words = title_of(item.path) if item.path else item.what.partition(":")[0]
                parts.append(f"{at // 60}:{at % 60:02} {words}")
                at += item.minutes
            label = f"{name}, day {number}" if len(days) > 1 else name
            rows.append(
                {"name": label, "what": "<br>".join(parts), "end": f"{at // 60}:{at % 60:02}"}
            )
    columns = Column("agenda", "name"), Column("what", "what", text=True), Column("end", "end")
    return render(columns, rows)


TABLES = {"sessions": sessions_table, "agendas": agendas_table}


def rehearse(args: argparse.Namespace) -> int:
    """Run guide and sheets, add the seconds of those without a failure; 1 if a command failed."""
    with needed():
        import torch
    gpu = torch.cuda.is_available()
    here = {"device": torch.cuda.get_device_name() if gpu else platform.machine()}
    here["cores"] = len(os.sched_getaffinity(0))
    study = read_json(args.file) if args.file.exists() else {**here, "seconds": {}}
    if {key: study.get(key) for key in here} != here:
        raise ToolError(f"{args.file} is of {study.get('device')}, this is {here['device']}")
    failed = 0
    for name in args.sheets or [GUIDE, *sheets()]:
        logs = Path(tempfile.mkdtemp())
        command = [sys.executable, ROOT / "tools/run_sheet.py", ROOT / name, "--log", logs]
        if subprocess.run(command).returncode:
            failed = 1
            continue
        took = read_json(logs / "summary.json")["seconds"]
        study["seconds"] |= took if name == GUIDE else {name: sum(took.values())}
        write_text(args.file, json.dumps(study, indent=1) + "\n", replace=True)
    return failed


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    does = parser.add_subparsers(required=True)
    table = does.add_parser("table", help="print a table")
    table.add_argument("name", choices=TABLES)
    table.set_defaults(body=lambda args: print(TABLES[args.name]()) or 0)
    run = does.add_parser("rehearse", help="run the demonstrations and sheets, and time them")
    run.add_argument("file", type=Path, metavar="FILE.json")
    run.add_argument("sheets", nargs="*", metavar="SHEET.md", help="(default: all)")
    run.set_defaults(body=rehearse)
    return parser


main = program(build_parser, lambda args: args.body(args))


if __name__ == "__main__":
    sys.exit(main())

"""Studies: rows that are measured one after the other, kept in a file from the first on."""

import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fusion_lab.cli import ToolError, sign_of_life
from fusion_lab.files import read_json, write_text
from fusion_lab.host import environment
from fusion_lab.provenance import watched
from fusion_lab.records import checked_study
from fusion_lab.script import interpret_without_gpu
from fusion_lab.turns import on_gpu

# what names a row, and what measures the rest of it, or of several
Part = tuple[dict, Callable[[], dict | list[dict]]]


def check_failed(rows: Iterable[dict]) -> None:
    """ToolError if one of these runs failed; out of memory is a result."""
    if failed := [row for row in rows if row.get("status") == "failed"]:
        command = " ".join([failed[0]["script"], *failed[0].get("argv", ())])
        first = f"first {command}: {failed[0]['error']}"
        raise ToolError(f"{len(failed)} of the runs failed, {first}", status=1)


def is_of(names: Mapping, row: Mapping) -> bool:
    return all(row.get(key) == value for key, value in names.items())


def in_words(names: Mapping) -> str:
    return ", ".join(
        value if isinstance(value, str) else f"{key} {value}" for key, value in names.items()
    )


def about(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {math.ceil(seconds)} s"


class Pace:
    """Says on stderr what is measured next, and how long the rest takes: parts by what they are
    expected to cost, all the same without `cost`, times what those before them took of it."""

    def __init__(self, parts: Iterable[Part], rows: Sequence[dict], cost: Callable | None):
        self.cost = cost or (lambda names: 1.0)
        # what comes next may follow from the rows
        todo = [names for names, _ in parts] if isinstance(parts, Sequence) else []
        todo = [names for names in todo if not any(is_of(names, row) for row in rows)]
        self.left = sum(map(self.cost, todo))
        self.of = len(todo)
        self.number = 0
        self.spent = 0.0
        self.expected = 0.0
        if cost and todo:
            points = f"{self.of} point{'s' if self.of > 1 else ''}"
            print(f"{about(self.left)} for {points} to measure", file=sys.stderr)

    @contextlib.contextmanager
    def measured(self, names: Mapping) -> object:
        self.number += 1
        place = f"{self.number}{f' of {self.of}' if self.of else ''}"
        line = f"{place}: {in_words(names)}"
        if self.of and self.spent:
            line += f"; {about(self.left * self.spent / self.expected)} left"
        print(line, file=sys.stderr)
        began = time.monotonic()
        with sign_of_life(place):
            yield
        self.spent += time.monotonic() - began
        if self.of:
            expected = self.cost(names)
            self.expected += expected
            self.left -= expected


def measure_study(
    path: Path,
    parts: Iterable[Part],
    rows: list[dict] | None = None,
    cost: Callable[[dict], float] | None = None,
    **settings: object,
) -> list[dict]:
    """Measure what is not measured yet, and write the rows with what they were measured on; of
    several processes, one.

    The file has each row as soon as it is measured, and is not `complete` before the last one. The
    same command goes on after an interruption, and tries again what failed; with other settings, or
    on another device, it is refused. On a GPU each session leaves its `provenance`: see `watched`.

    Args:
        rows: the list that the rows are put into; parts that are made one by one can look at it.
        cost: about how many seconds the part of these names takes.
    """
    import torch

    if path.suffix != ".json":
        raise ToolError(f"{path}: the name of a study must end in .json")
    interpret_without_gpu()
    device = torch.device("cuda" if on_gpu(settings.get("argv", ())) else "cpu")
    is_first = os.environ.get("RANK", "0") == "0"
    content = {"environment": environment(device)}
    content |= json.loads(json.dumps(settings))  # as they are read back
    rows = [] if rows is None else rows
    sessions = []
    if path.exists():
        earlier = checked_study(read_json(path), path)
        rows[:] = earlier.pop("rows")
        sessions = earlier.pop("provenance", [])
        earlier.pop("complete", None)
        if earlier != content:
            reason = "begun with other settings or on another device"
            raise ToolError(f"{path}: {reason}; name another file, or delete it")

    def write(complete: bool = False) -> None:
        if is_first:
            whole = {**content, "complete": complete, "provenance": sessions, "rows": rows}
            write_text(path, json.dumps(whole, indent=1) + "\n")

    again = [row for row in rows if row.get("status") == "failed"]
    if isinstance(parts, Sequence):  # with the sides that took turns with it
        again = [names for names, _ in parts if any(is_of(names, row) for row in again)]
    rows[:] = [row for row in rows if not any(is_of(names, row) for names in again)]
    with watched() if device.type == "cuda" else contextlib.nullcontext() as session:
        sessions += [session] if session else []
        write()  # a place where nothing can be written shows before anything is measured
        with sign_of_life("estimating the time"):
            pace = Pace(parts, rows, cost if is_first else None)
        for names, measure in parts:
            if any(is_of(names, row) for row in rows):
                continue
            # the lines of the runs
            with contextlib.redirect_stdout(sys.stderr), pace.measured(names):
                found = measure()
            rows += [names | row | names for row in (found if isinstance(found, list) else [found])]
            write()
    write(complete=True)
    return rows


def chosen(parts: Sequence[Part], words: Sequence[str]) -> list[Part]:
    """The parts whose names have one of the words wherever a word can stand; ToolError for a word
    that stands nowhere."""
    places = {
        value: key for names, _ in parts for key, value in names.items() if isinstance(value, str)
    }
    if unknown := [word for word in words if word not in places]:
        there = ", ".join(map(repr, places))
        raise ToolError(f"no part of this suite is of {unknown[0]!r}; there are {there}")
    keys = {places[word] for word in words}
    return [part for part in parts if all(part[0][key] in words for key in keys)]


def by_side(rows: Iterable[dict], *keys: str) -> dict[tuple, dict[str, dict]]:
    """Rows that took turns, under the names of their sides, for each of the values that they share
    of these keys."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), {})[row["side"]] = row
    return groups


def launch_of(row: Mapping) -> str:
    """The mode of a row, eager or graph, of what took turns with it: a side that is called compiled
    stands beside others."""
    mode = row.get("mode", "")
    if "compiled" in row.get("side", ""):
        mode = mode.replace("compiled", "").strip() or "eager"
    return mode


def as_rows(sides: Mapping[str, dict]) -> list[dict]:
    """What was measured of each side as rows that have its name."""
    return [{"side": name, **row} for name, row in sides.items()]


def study_asked_for(table: Path | None, argv: Sequence[str]) -> Path | None:
    """The study that --table names; ToolError if arguments of a script are beside it."""
    if table and argv:
        reason = "--table measures nothing, so it takes no arguments of a script"
        raise ToolError(f"{reason}: {' '.join(argv)}")
    return table


def heading(study: Mapping, script: str) -> str:
    """What was measured, on what and how, in a line above the tables of a study."""
    environment = study["environment"]
    command = " ".join([script, *study.get("argv", [])])
    where = f"{environment.get('device_name')}, PyTorch {environment.get('torch')}"
    unfinished = "" if study.get("complete", True) else ", not finished: the same command goes on"
    return f"{command} on {where}, {study.get('rounds')} turns{unfinished}"


def median(ratios: Sequence[float]) -> float | None:
    """None where nothing was measured."""
    return statistics.median(ratios) if ratios else None

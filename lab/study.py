"""Studies: rows that are measured one after the other, kept from the first on, and read again."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path

from lab.cli import Parser, ToolError
from lab.files import write_text
from lab.provenance import provenance, watched
from lab.records import Study, read
from lab.script import interpret_without_gpu
from lab.turns import on_gpu

# what names a row, and what measures the rest of it, or of several
Part = tuple[dict, Callable[[], dict | list[dict]]]


def check_failed(rows: Iterable[dict]) -> None:
    """ToolError if one of these runs failed; out of memory is a result."""
    if failed := [row for row in rows if row.get("status") == "failed"]:
        command = " ".join([failed[0]["script"], *failed[0].get("argv", ())])
        first = f"first {command}: {failed[0]['error']}"
        raise ToolError(f"{len(failed)} of the runs failed, {first}", status=1)


def measure_study(
    path: Path, parts: Iterable[Part], keep: bool = False, renew: bool = False, **settings: object
) -> list[dict]:
    """Measure what is not measured yet, and write the rows with what they were measured on; of
    several processes, one.

    Rows are in NAME.partial.json until the last one is there, so that an earlier result is replaced
    by a whole one. The same command goes on from there after an interruption; with other settings,
    or on another device, it is refused. To `keep` an earlier result is to treat it in the same way:
    what it has is not measured again. To `renew` is to keep its rows, but those of these parts. On
    a GPU each session leaves its `provenance`: commit, driver, clocks and power limit as read, and
    how long the GPU throttled meanwhile.
    """
    import torch

    if path.suffix != ".json":
        raise ToolError(f"{path}: the name of a study must end in .json")
    interpret_without_gpu()
    first = importlib.import_module("tiny_llama_v1")
    device = torch.device("cuda" if on_gpu(settings.get("argv", ())) else "cpu")
    content = {"environment": first.environment(device)}
    content |= json.loads(json.dumps(settings))  # as they are read back
    unfinished, rows, sessions = path.with_suffix(".partial.json"), [], []
    for file in (path, unfinished) if keep or renew else (unfinished,):
        if file.exists():
            earlier = read(Study, file)
            rows, sessions = earlier.pop("rows"), earlier.pop("provenance", [])
            if renew and file == path:
                rows = [
                    r for r in rows if not any(names.items() <= r.items() for names, _ in parts)
                ]
            if earlier != content:
                way_out = "name another file, or delete it" if keep else "delete it first"
                reason = "begun with other settings or on another device"
                raise ToolError(f"{file}: {reason}; {way_out}")

    def write(file: Path) -> None:
        if first.RANK == 0:
            whole = {**content, **({"provenance": sessions} if sessions else {}), "rows": rows}
            write_text(file, json.dumps(whole, indent=1) + "\n", replace=True)

    gpu = device.type == "cuda"
    sessions += [provenance()] if gpu else []
    write(unfinished)  # a place where nothing can be written shows before anything is measured
    seconds = []
    with watched() if gpu else contextlib.nullcontext({}) as meanwhile:
        for number, (names, measure) in enumerate(parts):
            if any(all(row.get(key) == value for key, value in names.items()) for row in rows):
                continue
            if first.RANK == 0:
                # what comes next may follow from the rows
                whole = len(parts) if isinstance(parts, Sized) else None
                line = f"{number + 1}{f' of {whole}' if whole else ''}: {in_words(names)}"
                if whole and seconds:
                    left = math.ceil(statistics.fmean(seconds) * (whole - number))
                    line += f"; about {left} s left"
                print(line, file=sys.stderr)
            started = time.monotonic()
            with contextlib.redirect_stdout(sys.stderr):  # the lines of the runs
                found = measure()
            seconds.append(time.monotonic() - started)
            rows += [names | row | names for row in (found if isinstance(found, list) else [found])]
            write(unfinished)
    if gpu:
        sessions[-1] |= meanwhile
    write(path)
    if first.RANK == 0:
        unfinished.unlink(missing_ok=True)
    return rows


def in_words(names: Mapping[str, object]) -> str:
    """What names a row, for a line of progress."""
    words = (
        f"{key} {' '.join(value) if isinstance(value, list) else value}"
        for key, value in names.items()
    )
    return ", ".join(words)


def read_rows(path: Path, keys: Iterable[str] = (), measured: Iterable[str] = ()) -> list[dict]:
    """The rows of a study; none if it is not there.

    ToolError names what is wrong with a row: without one of the keys, or neither a status and an
    error nor all that is to be `measured`.
    """
    if not path.exists():
        return []
    rows = read(Study, path)["rows"]
    for number, content in enumerate(rows):
        found = ("error",) if "status" in content else measured
        missing = [key for key in keys if key not in content]
        missing += [key for key in found if content.get(key) is None]
        if missing:
            reason = "another study, or of an older version"
            raise ToolError(f"{path}: rows[{number}] has no {missing[0]}: {reason}")
    return rows


def by_side(rows: Iterable[dict], *keys: str) -> dict[tuple, dict[str, dict]]:
    """Rows that took turns, under the names of their sides, for each of the values that they share
    of these keys."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), {})[row["side"]] = row
    return groups


def unit_of(rows: Iterable[dict]) -> str:
    """What is counted per step: kernels, or operator calls on a CPU."""
    return next((row["unit"] for row in rows if row.get("unit")), "kernels")


def as_rows(sides: Mapping[str, dict]) -> list[dict]:
    """What was measured of each side as rows that have its name."""
    return [{"side": name, **row} for name, row in sides.items()]


def read_study(
    path: Path, keys: Iterable[str], measured: Iterable[str] = ("batch_ms", "turns_ms")
) -> dict:
    """A study, finished or not, with at least one row; its rows are checked as by `read_rows`."""
    study = read(Study, path)
    if not read_rows(path, keys, measured):
        raise ToolError(f"{path}: a study without a row")
    return study


def study_asked_for(table: Path | None, argv: Sequence[str]) -> Path | None:
    """The study that --table names; ToolError if arguments of a script are beside it."""
    if table and argv:
        reason = "--table measures nothing, so it takes no arguments of a script"
        raise ToolError(f"{reason}: {' '.join(argv)}")
    return table


def add_study(parser: Parser, rounds: int, sides: str, default: str) -> None:
    """Add the options of a program that measures a study, or prints the tables of one."""
    parser.add_count("--rounds", rounds, f"turns of each {sides}")
    parser.add_path("--output", "FILE.json", f"the study (default: {default} here)")
    parser.add_path("--table", "FILE.json", "measure nothing, print the tables of this study")


def heading(study: dict, script: str) -> str:
    """What was measured, on what and how, in a line above the tables of a study."""
    environment, given = study["environment"], " ".join([script, *study.get("argv", [])])
    where = f"{environment.get('device_name')}, PyTorch {environment.get('torch')}"
    return f"{given} on {where}, {study.get('rounds')} turns"

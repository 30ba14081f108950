"""When each kernel ran, as other tools' files say: their tables, numbers and times are read and
checked here, once for all readers.

A kernel ends after it starts, lies within its trace, and does not run over the next one of its
stream. Profilers write files where that is not so: an end that was never recorded, one that
belongs to a later kernel, timestamps that a spreadsheet has rounded. Kernels without a valid time
are left out, those that end too late are shortened, and a note on stderr counts both. Where only
the hardware queue of a kernel is known, on which the kernels of several streams run side by side,
none is shortened for the next one.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import sqlite3
import zlib
from collections.abc import Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from fusion_lab.cli import ToolError, note

NAME, START, END = "Kernel_Name", "Start_Timestamp", "End_Timestamp"
# What tells streams apart, where a tool writes it; with none of these all kernels are in one. The
# first row are columns of CSV files, the second of rocpd's view `kernels`, see VIEWS.
STREAM = (
    *("Guid", "Process_Id", "Agent_Id", "GPU_ID", "Stream_Id"),
    *("guid", "pid", "stream_id"),
)
EXECUTED = "executed, not measured"  # the agent of what fusion_lab/amd counted: it has no times
QUEUES, STREAMS = {"Queue_Id", "queue_id"}, {"Stream_Id", "stream_id"}
# Columns of rocpd's views, of which version 4.1 calls the agent otherwise.
VIEWS = {
    "name": NAME,
    "kernel_name": NAME,
    "start": START,
    "end": END,
    "dispatch_id": "Dispatch_ID",
    "agent_id": "GPU_ID",
    "agent_abs_index": "GPU_ID",
    "agent_absolute_index": "GPU_ID",
    "counter_name": "Counter_Name",
    "value": "Counter_Value",
}
COUNTER, VALUE = "Counter_Name", "Counter_Value"
HOUR_NS = 3600 * 10**9  # no kernel takes longer; where a start is 0, it seems to


class Dispatch(NamedTuple):
    """A launch of a kernel: its time in nanoseconds, None where the file has none."""

    name: str
    start: int | None
    end: int | None
    stream: Hashable  # None if only its queue is known
    row: Row  # of the file


# --- times


def valid_ends(
    spans: Sequence[tuple[float | None, float | None, Hashable]],
    last: float = math.inf,
    longest: float = HOUR_NS,
    slack: float = 0.0,
) -> list[float | None]:
    """The end of each (start, end, stream), at most `last` and the next start of its stream, if
    that is known; None if not valid."""
    ends: list[float | None] = [None] * len(spans)
    following: dict[Hashable, tuple[float, float]] = {}  # the earliest start so far, and the next
    known = [i for i, (start, end, _) in enumerate(spans) if None not in (start, end)]
    for index in sorted(known, key=lambda i: spans[i][:2], reverse=True):
        start, end, stream = spans[index]
        if not start <= end or start >= last:
            continue
        earliest, after = following.get(stream, (math.inf, math.inf))
        after = after if start == earliest else earliest
        if stream is not None and end > after + slack:
            end = after
        if (end := min(end, last)) - start <= longest:
            ends[index], following[stream] = end, (start, after)
    return ends


def say_changes(source: object, total: int, left_out: int, shortened: int) -> None:
    """Say on stderr of how many kernels the times were not taken as a file has them."""
    changes = []
    if left_out:
        changes.append(f"without a valid start and end, left out: {left_out} of {total} kernels")
    if shortened:
        late = "the next one of their stream or the end of the trace"
        changes.append(f"running over {late}, shortened: {shortened} of {total} kernels")
    if changes:
        note(f"{source}: {'; '.join(changes)}")


def checked(dispatches: Sequence[Dispatch], source: object) -> list[Dispatch]:
    """Those with a valid time, in their order; a ToolError if there are some, but none is valid."""
    spans = [(d.start, d.end, d.stream) for d in dispatches]
    ends = valid_ends(spans)
    both = [(d, end) for d, end in zip(dispatches, ends, strict=True) if end not in (None, d.start)]
    if dispatches and not both:
        raise ToolError(f"{source}: none of its kernels has a valid start and end")
    shortened = sum(end != dispatch.end for dispatch, end in both)
    say_changes(source, len(dispatches), len(dispatches) - len(both), shortened)
    return [dispatch._replace(end=end) for dispatch, end in both]


# --- numbers and tables


@dataclass(frozen=True)
class Row:
    """The cells of a row by the names of their columns, and what error messages call it."""

    place: str
    cells: dict[str, str]

    def number(self, column: str) -> float:
        """The number in this cell; ToolError if there is none."""
        text = self.cells[column]
        if not math.isfinite(value := self.real(text)):
            raise ToolError(f"{self.place}: {column}: {text!r} is no number")
        return value

    def real(self, text: str) -> float:
        """The text as a number, NaN if it is empty; ToolError if it is none."""
        try:
            return float(text or "nan")
        except ValueError as error:
            raise ToolError(f"{self.place}: {text!r} is no number") from error

    def times(self) -> tuple[int | None, int | None]:
        """The timestamps in two cells, exactly, None where one was never written; ToolError if they
        are rounded so that their difference says nothing."""
        written = [self.cells[column] for column in (START, END)]
        exact = [Decimal(text) if math.isfinite(self.real(text)) else None for text in written]
        start, end = (None if value is None else round(value) for value in exact)
        step = 10 ** max((v.as_tuple().exponent for v in exact if v is not None), default=0)
        if step > 1 and None not in exact and abs(end - start) < 100 * step:
            times = " and ".join(written)
            raise ToolError(f"{self.place}: the times {times} are rounded to {step:g} ns")
        return start, end

    def dispatch(self) -> Dispatch:
        """The dispatch that this row of a table is of."""
        stream = tuple(self.cells[name] for name in STREAM if name in self.cells)
        if QUEUES & self.cells.keys() and not STREAMS & self.cells.keys():
            stream = None
        return Dispatch(self.cells[NAME], *self.times(), stream, self)


def unzipped(path: Path) -> bytes:
    """What is in a file, also where it was compressed."""
    content = path.read_bytes()
    try:
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ToolError(f"{path}: the file is cut off or damaged ({error})") from error


def read_table(path: Path, *needed: str) -> tuple[list[str], list[Row]]:
    """The header of a CSV file, which has the needed columns in whatever order, and the rows;
    ToolError says what is wrong with the file."""
    text = unzipped(path).decode("utf-8-sig", "replace")
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), skipinitialspace=True))
    except csv.Error as error:
        raise ToolError(f"{path}: not a CSV file ({error})") from error
    lines = [[cell.strip() for cell in line] for line in lines if any(map(str.strip, line))]
    if not lines:
        raise ToolError(f"{path}: the file is empty")
    header = lines[0]
    if missing := [name for name in needed if name not in header]:
        raise ToolError(f"{path}: the header lacks {', '.join(missing)}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(header):
            there = f"{len(line)} of {len(header)} columns"
            raise ToolError(f"{path}: row {number} has {there}, is the file cut off?")
        rows.append(Row(f"{path}: row {number}", dict(zip(header, line, strict=True))))
    return header, rows


# --- the files of ROCm's profilers


def read_kernel_trace(path: Path) -> list[Dispatch]:
    """The dispatches of rocprofv3's `*_kernel_trace.csv`, checked."""
    return checked([row.dispatch() for row in read_table(path, NAME, START, END)[1]], path)


def read_database(path: Path) -> list[Dispatch]:
    """The dispatches of a rocpd database (SQLite, rocprofv3 of ROCm 7), checked."""
    return checked([row.dispatch() for row in read_view(path, "kernels")], path)


def read_view(path: Path, view: str) -> list[Row]:
    """The rows of a view of a rocpd database, with our names for some columns."""
    try:
        address = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as database:
            cursor = database.execute(f"SELECT * FROM {view}")
            header = [VIEWS.get(column[0], column[0]) for column in cursor.description]
            lines = cursor.fetchall()
    except sqlite3.Error as error:
        raise ToolError(f"{path}: {error}") from error
    if missing := {NAME, START, END} - {*header}:
        raise ToolError(f"{path}: its view {view} lacks {', '.join(sorted(missing))}")
    rows = []
    for number, line in enumerate(lines, start=1):
        texts = ["" if value is None else str(value) for value in line]
        rows.append(Row(f"{path}: {view} {number}", dict(zip(header, texts, strict=True))))
    return rows


def read_counters(paths: Sequence[Path]) -> tuple[list[str], list[Dispatch]]:
    """The columns that dispatches of a profile of rocprof-compute have, and these, checked.

    A file has a row for each dispatch, or one for each counter of a dispatch (ROCm 7). Of the rows
    of a dispatch, in one file or in one for each pass, one is made here: its first time counts.
    """
    tables = [counters_of(path) for path in paths]
    rows = [row for table in tables for row in table]
    if not rows:
        raise ToolError(f"{paths[0]}: it has no dispatches")
    if len(paths) > 1 or COUNTER in rows[0].cells:
        by_dispatch: dict[tuple, Row] = {}
        for row in rows:
            cells = row.cells
            key = cells.get("Process"), cells.get("GPU_ID"), cells["Dispatch_ID"]
            first = by_dispatch.setdefault(key, row).cells
            if first[NAME] != cells[NAME]:
                other = f"dispatch {key[-1]} is {first[NAME]} in another pass"
                raise ToolError(f"{row.place}: it is {cells[NAME]}, but {other}")
            counted = {cells[COUNTER]: cells[VALUE]} if COUNTER in cells else cells
            first |= {name: text for name, text in counted.items() if name not in first}
        rows = list(by_dispatch.values())
    header = sorted(set().union(*(row.cells for row in rows)))
    dispatches = [row.dispatch() for row in rows]
    if all(row.cells.get("Agent_Id") == EXECUTED for row in rows):
        return header, dispatches
    return header, checked(dispatches, paths[0])


def counters_of(path: Path) -> list[Row]:
    """The rows of a file of rocprof-compute with the counters of dispatches.

    Newest releases leave a database for each process of a pass, and the counters of its kernels
    beside it; `Process` is its place among those of the pass.
    """
    if path.suffix != ".db":
        return read_table(path, "Dispatch_ID", NAME, START, END)[1]
    pid = path.stem.partition("_")[0]
    names = (f"{pid}_native_counter_collection.csv{end}" for end in (".gz", ""))
    places = [folder / name for name in names for folder in (path.parent, path.parent.parent)]
    processes = sorted(path.parent.glob("*.db"), key=lambda file: (len(file.name), file.name))
    process = str(processes.index(path))
    if not (beside := [place for place in places if place.exists()]):
        rows = read_view(path, "counters_collection")
        return [Row(row.place, {**row.cells, "Process": process}) for row in rows]
    kernels = {row.cells["Dispatch_ID"]: row for row in read_view(path, "kernels")}
    rows = []
    for row in read_table(beside[0], "dispatch_id", "counter_name", "counter_value")[1]:
        if (number := row.cells["dispatch_id"]) not in kernels:
            raise ToolError(f"{row.place}: {path.name} has no dispatch {number}")
        counter = {COUNTER: row.cells["counter_name"], VALUE: row.cells["counter_value"]}
        rows.append(Row(row.place, {**kernels[number].cells, **counter, "Process": process}))
    return rows

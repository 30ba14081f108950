#!/usr/bin/env python3
"""Read the files that the ROCm profilers write; the run_rocprof*.sh wrappers call it.

Usage:
  files.py statistics DIR OUT.csv    merge *_kernel_stats.csv, or databases, of all processes in DIR
  files.py convert FILE.db OUT.csv   kernel statistics of a ROCm 7 database, by rocpd or from SQLite
  files.py show DIR                  top kernels of DIR/stats.csv
  files.py dispatches DIR OUT.csv    kernels and their times from rocprof-compute's pmc_perf.csv
  files.py counters DIR PATTERN      print the counter files below DIR, after a look at each row
  files.py require DIR PATTERN       print the files below DIR that match; none is an error

A file that is missing, cut off or of another format is one line on stderr and status 1.
"""

from __future__ import annotations

import _root

import csv
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from workshop.cli import ToolError
from workshop.profile.kernels import (
    KernelStatistics,
    category,
    merge_statistics,
    read_statistics,
    short_name,
    statistics_of,
    write_statistics,
)
from workshop.show import Column, render, write_csv


def read_columns(path: Path, *names: str) -> list[list[str]]:
    """The named columns of a CSV file, row by row.

    Columns are found by name because their order differs by release.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = [row for row in csv.reader(file) if row]
    if not rows:
        raise ToolError(f"{path}: the file is empty")
    if missing := [name for name in names if name not in rows[0]]:
        raise ToolError(f"{path}: the header lacks {', '.join(missing)}")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(rows[0]):
            there = f"{len(row)} of {len(rows[0])} columns"
            raise ToolError(f"{path}: row {number} has {there}, is the file cut off?")
    columns = [rows[0].index(name) for name in names]
    return [[row[column] for column in columns] for row in rows[1:]]


def matching(directory: Path, pattern: str, writer: str) -> list[Path]:
    """Files below a directory; a ToolError if there are none or one is empty."""
    paths = sorted(path for path in directory.rglob(pattern) if path.is_file())
    if not paths:
        missing = f"{writer} wrote no {pattern.lstrip('*_')} into {directory}"
        raise ToolError(f"{missing}: did anything run on an AMD GPU?")
    if empty := [path for path in paths if not path.stat().st_size]:
        raise ToolError(f"{empty[0]}: the file is empty")
    return paths


def statistics(directory: Path, out: Path) -> None:
    """Merge what rocprofv3 wrote for each process."""
    if databases := sorted(directory.rglob("*_results.db")):
        rows = [row for path in databases for row in read_database(path)]
        write_statistics(out, of_dispatches(rows, directory))
        return
    paths = matching(directory, "*_kernel_stats.csv", "rocprofv3")
    files = [rows for rows in map(read_statistics, paths) if rows]
    merged = merge_statistics([row for rows in files for row in rows])
    write_statistics(out, files[0] if len(files) == 1 else merged)


def of_dispatches(rows: list[list[str]], source: Path) -> list[KernelStatistics]:
    """Statistics from (name, start, end) of every dispatch, in nanoseconds."""
    durations: dict[str, list[int]] = defaultdict(list)
    for name, start, end in rows:
        durations[name].append(int(end) - int(start))
    if not durations:
        raise ToolError(f"{source}: it has no kernel dispatches")
    return statistics_of(durations)


def read_database(database: Path) -> list[list[str]]:
    """(name, start, end) of every dispatch in a rocpd database (SQLite, the format of ROCm 7)."""
    if shutil.which("rocpd"):
        with tempfile.TemporaryDirectory() as folder:
            command = ["rocpd", "convert", "-i", str(database)]
            command += ["-f", "csv", "-d", folder, "-o", "converted"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise ToolError(f"rocpd convert {database}: status {done.returncode}: {reason}")
            try:
                trace = matching(Path(folder), "*kernel_trace.csv", "rocpd")[0]
                return read_columns(trace, "Kernel_Name", "Start_Timestamp", "End_Timestamp")
            except ToolError as error:
                reason = str(error).replace(f"{folder}/", "")
                raise ToolError(f"rocpd convert {database}: {reason}") from error
    with sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True) as connection:
        return connection.execute('SELECT name, "start", "end" FROM kernels').fetchall()


def convert(database: Path, out: Path) -> None:
    """Kernel statistics of one database."""
    write_statistics(out, of_dispatches(read_database(database), database))


def show(directory: Path, *, count: int = 10) -> None:
    """Print the top kernels."""
    rows = read_statistics(directory / "stats.csv")
    columns = [
        Column("share", lambda row: f"{row.percentage:.1f}%".rjust(7)),
        Column("calls", "calls"),
        Column("total ms", lambda row: row.total_ns / 1e6, ".3f"),
        Column("mean us", lambda row: row.average_ns / 1e3, ".1f"),
        Column("kernel", lambda row: short_name(row.name, 70), text=True),
    ]
    print(render(columns, rows[:count], "text"))
    print(f"Distinct kernels: {len(rows)}\nDispatches: {sum(row.calls for row in rows)}")
    print(f"All kernels: {directory / 'stats.csv'}")


def dispatches(directory: Path, out: Path) -> None:
    """The dispatches that rocprof-compute profiled.

    The category makes `grep -i gemm` find rocBLAS's Cijk_ kernels.
    """
    path = matching(directory, "pmc_perf.csv", "rocprof-compute")[0]
    rows = read_columns(path, "Dispatch_ID", "Kernel_Name", "Start_Timestamp", "End_Timestamp")
    if not rows:
        raise ToolError(f"{path}: it has no dispatches")
    lines = []
    for dispatch, name, start, end in rows:
        line = {"Dispatch_ID": dispatch, "Category": category(name)}
        lines.append({**line, "TimeNs": int(end) - int(start), "Kernel_Name": name})
    write_csv(out, lines)


def require(directory: Path, pattern: Path) -> None:
    """Print the files that were asked for."""
    for path in matching(directory, str(pattern), "the profiler"):
        print(path)


def counters(directory: Path, pattern: Path) -> None:
    """Print the counter files, none of which may be cut off."""
    for path in matching(directory, str(pattern), "rocprofv3"):
        if not read_columns(path, "Dispatch_Id", "Kernel_Name", "Counter_Name", "Counter_Value"):
            raise ToolError(f"{path}: it has no dispatches")
        print(path)


def main(argv: list[str]) -> int:
    commands = {f.__name__: f for f in (statistics, convert, show, dispatches, counters, require)}
    if not argv or argv[0] not in commands or len(argv) != (2 if argv[0] == "show" else 3):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        commands[argv[0]](*map(Path, argv[1:]))
    except (ToolError, ValueError, OSError, sqlite3.Error, csv.Error) as error:
        where = f"{argv[1]}: " if isinstance(error, sqlite3.Error) else ""
        print(f"{where}{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

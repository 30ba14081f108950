#!/usr/bin/env python3
"""Read the files that the ROCm profilers write; the run_rocprof*.sh wrappers call it.

Usage:
  files.py statistics DIR OUT.csv    kernels of all processes in DIR, from traces or databases
  files.py statistics FILE.db OUT.csv  the same of a database of rocpd (ROCm 7 and newer)
  files.py show DIR                  top kernels of DIR/stats.csv
  files.py dispatches DIR OUT.csv    kernels and their times of a profile of rocprof-compute
  files.py newest DIR                print the folder of the newest profile of rocprof-compute
  files.py require DIR PATTERN       print the files below DIR that match, tables after a look at
                                     each row; none is an error
  files.py libraries TOOL            a note where TOOL and PyTorch bring two rocprofiler-sdk

A file that is missing, cut off or of another format is one line on stderr and status 1.
"""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from fusion_lab.cli import ToolError
from fusion_lab.profile.dispatches import (
    read_counters,
    read_database,
    read_kernel_trace,
    read_table,
)
from fusion_lab.profile.kernels import (
    category,
    read_statistics,
    short_name,
    statistics_of_dispatches,
    write_statistics,
)
from fusion_lab.show import Column, render, write_csv

# What releases of rocprof-compute leave in the folder of a profile, the newest first: databases of
# each process and pass (with the counters beside), or of each pass; a table of each pass; all in
# one table, which its analysis makes of these.
COUNTERS = (
    "out/*/*/*.db",
    "pmc_perf*.db",
    "results_pmc_perf_*.csv.gz",
    "results_pmc_perf_*.csv",
    "pmc_perf.csv.gz",
    "pmc_perf.csv",
    "pmc_perf_*.csv",
)


def matching(directory: Path, pattern: str) -> list[Path]:
    """Files below a directory; a ToolError if there are none or one is empty."""
    paths = sorted(path for path in directory.rglob(pattern) if path.is_file())
    if not paths:
        missing = f"the profiler wrote no {pattern.lstrip('*_')} into {directory}"
        raise ToolError(f"{missing}: did anything run on an AMD GPU?")
    refuse_empty(paths)
    return paths


def refuse_empty(paths: Iterable[Path]) -> None:
    if empty := [path for path in paths if not path.stat().st_size]:
        raise ToolError(f"{empty[0]}: the file is empty")


def statistics(source: Path, out: Path) -> None:
    """Of all processes below a folder, or of one database."""
    if databases := [source] if source.is_file() else sorted(source.rglob("*_results.db")):
        dispatches = [each for path in databases for each in read_database(path)]
    else:
        traces = matching(source, "*_kernel_trace.csv")
        dispatches = [each for path in traces for each in read_kernel_trace(path)]
    if not dispatches:
        raise ToolError(f"{source}: it has no kernel dispatches")
    write_statistics(out, statistics_of_dispatches(dispatches))


def show(directory: Path) -> None:
    rows = read_statistics(directory / "stats.csv")
    columns = [
        Column("share", lambda row: f"{row.percentage:.1f}%".rjust(7)),
        Column("calls", "calls"),
        Column("total ms", lambda row: row.total_ns / 1e6, ".3f"),
        Column("mean us", lambda row: row.average_ns / 1e3, ".1f"),
        Column("kernel", lambda row: short_name(row.name, 70), text=True),
    ]
    print(render(columns, rows[:10], "text"))
    print(f"Distinct kernels: {len(rows)}\nDispatches: {sum(row.calls for row in rows)}")
    print(f"All kernels: {directory / 'stats.csv'}")


def dispatches(directory: Path, out: Path) -> None:
    """What rocprof-compute profiled; with categories, so that `grep gemm` finds Cijk_ kernels."""
    lines = []
    for dispatch in read_counters(next(iter(profiles(directory).values())))[1]:
        line = {"Dispatch_ID": dispatch.row.cells["Dispatch_ID"]}
        line["Category"] = category(dispatch.name).lower()
        line["TimeNs"] = dispatch.end - dispatch.start
        lines.append({**line, "Kernel_Name": dispatch.name})
    write_csv(out, lines)


def profiles(directory: Path) -> dict[Path, list[Path]]:
    """The folders below one in which rocprof-compute has left a profile, each with the files of its
    counters: those that its newest release has written, should there be others beside."""
    found: dict[Path, tuple[str, list[Path]]] = {}
    for pattern in COUNTERS:
        for path in sorted(directory.rglob(pattern)):
            folder = next((p.parent for p in path.parents if p.name == "out"), path.parent)
            kept, files = found.setdefault(folder, (pattern, []))
            if kept == pattern:
                files.append(path)
    paths = {folder: files for folder, (_, files) in found.items()}
    if not paths:
        missing = f"rocprof-compute wrote no {', '.join(COUNTERS[::-1])} into {directory}"
        raise ToolError(f"{missing}: did anything run on an AMD GPU?")
    refuse_empty(path for files in paths.values() for path in files)
    return paths


def newest(directory: Path) -> None:
    """Print the folder of the profile that was written last, but for those of failed runs."""

    def written(item: tuple[Path, list[Path]]) -> float:
        return max(path.stat().st_mtime for path in item[1])

    found = profiles(directory).items()
    good = [item for item in found if not any(p.suffix == ".failed" for p in item[0].parents)]
    if good:
        print(max(good, key=written)[0])


def require(directory: Path, pattern: Path) -> None:
    for path in matching(directory, str(pattern)):
        if path.suffix == ".csv" and not read_table(path)[1]:
            raise ToolError(f"{path}: it has no dispatches")
        print(path)


def libraries(tool: Path) -> None:
    """A note on stderr where a profiler would bring a second rocprofiler-sdk into the process of
    PyTorch, which hangs or crashes (ROCm/TheRock 6695, ROCm/rocm-aic 149, hello-gpu 20).

    TheRock's wheels have it in a package of ROCm, with profilers of their own; those of pytorch.org
    in torch/lib.
    """
    mends = {
        "_rocm_sdk_core": "export PATH={}/bin:$PATH",
        "torch": "take PyTorch and ROCm of one release, as in AMD's containers rocm/pytorch",
    }
    pattern = "lib*/librocprofiler-sdk.so*"
    system = [path for folder in tool.resolve().parents for path in sorted(folder.glob(pattern))]
    for package, mend in mends.items():
        found = importlib.util.find_spec(package)
        places = found.submodule_search_locations if found else []
        bundled = [path for place in places for path in sorted(Path(place).glob(pattern))]
        if bundled and system and not bundled[0].samefile(system[0]):
            both = f"{bundled[0]} and {system[0]}"
            mend = mend.format(bundled[0].parents[1])
            print(f"note: {both} in one process hang or crash: {mend}", file=sys.stderr)
        if bundled:
            return


def main(argv: list[str]) -> int:
    alone = {f.__name__: f for f in (show, newest, libraries)}
    pairs = {f.__name__: f for f in (statistics, dispatches, require)}
    commands = alone | pairs
    if not argv or argv[0] not in commands or len(argv) != (2 if argv[0] in alone else 3):
        print(__doc__, file=sys.stderr)
        return 2
    sys.stdout.reconfigure(errors="surrogateescape")  # the wrappers want a path as it is
    try:
        commands[argv[0]](*map(Path, argv[1:]))
    except (ToolError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

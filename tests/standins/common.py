"""What the stand-ins for ROCm's profilers share.

The real tools need an AMD GPU. The stand-ins take the same options, refuse all others, run the
application and write files of the same formats, whose content is made up and the same in every run.
Names and formats follow rocprofiler-sdk 1.0 (ROCm 7). Options are those that wrappers, sheets and
pages use.

Environment variables for tests:
STANDIN_LOG=FILE     append a line of JSON per call: tool, argv, application
STANDIN_ROCM=6       rocprofv3 of ROCm 6: no --selected-regions, --pmc and databases; csv by
                     default, without Stream_Id, Agent_Id is a number
STANDIN_GPU=gfx1100  another GPU than gfx942; also several (gfx1036,gfx942)
STANDIN_PROCESSES=2  rocprofv3 writes files for so many processes
STANDIN_FAIL=MODE    status, killed: the tool dies so; nothing: it writes no files; truncated,
                     truncated-line: they are cut off in a line or after one; noformat: they are of
                     another format
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TOOL = Path(sys.argv[0]).name
ROCM = int(os.environ.get("STANDIN_ROCM", "7"))
FAIL = os.environ.get("STANDIN_FAIL", "")
STATS_HEADER = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage")
STATS_HEADER += ("MinNs", "MaxNs", "StdDev")
TRACE_HEADER = "Kind Agent_Id Queue_Id Stream_Id Kernel_Name Start_Timestamp End_Timestamp"
DISPATCH = ("Dispatch_Id", "Kernel_Name", "Start_Timestamp", "End_Timestamp")
# Name, dispatches, ns of one. Names as the profilers print them: commas, templates and quotes.
KERNELS = (
    ("Cijk_Ailk_Bljk_SB_MT64x64x16_MI16x16x4x1_SN_1LDSB0_WG16_16_1", 24, 41000),
    ("void at::native::vectorized_elementwise_kernel<4, at::CUDAFunctor_add<float> >", 18, 6000),
)
FUSED = (("attn_fwd.kd", 6, 30000),)
UNFUSED = (
    ("void (anonymous namespace)::softmax_warp_forward<float, 8, false>(float*, int)", 18, 9000),
    ('void masked_fill_kernel("float")::{lambda(float, bool)#1}>(int, float)', 36, 7000),
)


class Parser(argparse.ArgumentParser):
    """As in the real tools an unknown option ends with status 2 before anything runs."""

    def __init__(self, prog: str = TOOL, **arguments):
        super().__init__(prog=prog, allow_abbrev=False, **arguments)

    def take(self, options: str, **arguments) -> None:
        """Add options that differ in nothing but their names.

        Short and long name with / between.
        """
        for names in options.split():
            self.add_argument(*names.split("/"), **arguments)


def parse(parser: Parser) -> argparse.Namespace:
    """The options and, as `application`, the command behind the first `--` (empty if there is
    none)."""
    argv = sys.argv[1:]
    place = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:place])
    args.application = argv[place + 1 :]
    if path := os.environ.get("STANDIN_LOG"):
        call = {"tool": TOOL, "argv": argv, "application": args.application}
        with open(path, "a") as log:
            log.write(json.dumps(call) + "\n")
    return args


def run_application(application: list[str]) -> tuple[int, int]:
    """Run it; returns its exit status and process id.

    Ctrl-C reaches the application, which decides.
    """
    signal.signal(signal.SIGINT, lambda *_: None)
    process = subprocess.Popen(application)
    status = process.wait()
    return (status if status >= 0 else 128 - status), process.pid


def writes() -> bool:
    """Whether the tool writes its files; it dies here if STANDIN_FAIL says so."""
    if FAIL == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAIL == "status":
        sys.exit(f"[{TOOL}] fatal error: the profiler could not be configured")
    return FAIL != "nothing"


def dispatches(application: list[str]) -> list[dict]:
    """The kernels that the application is said to have launched: fewer unless it gets
    --disable-all-fusion."""
    rows, clock = [], 7_000_000_000_000  # ns since boot, as in the real traces
    kinds = KERNELS + (UNFUSED if "--disable-all-fusion" in application else FUSED)
    for name, count, duration in kinds:
        for turn in range(count):
            start, clock = clock, clock + duration + 97 * (turn % 7)
            values = (len(rows) + 1, name, start, clock)
            rows.append(dict(zip(DISPATCH, values, strict=True)))
    return rows


def write_csv(path: Path | str, header: Iterable[str], rows: Iterable[dict]) -> None:
    """Text is quoted and numbers are not, as rocprofv3 writes it.

    A column that a row lacks is 0.
    """
    text = io.StringIO()
    options = {"quoting": csv.QUOTE_NONNUMERIC, "lineterminator": "\n"}
    writer = csv.DictWriter(text, header, restval=0, extrasaction="ignore", **options)
    writer.writeheader()
    writer.writerows(rows)
    lines = text.getvalue().splitlines(keepends=True)
    if FAIL == "truncated":
        lines[-1] = lines[-1][: len(lines[-1]) // 2]
    elif FAIL == "truncated-line":
        lines = lines[: 1 + len(lines) // 2]
    elif FAIL == "noformat":
        lines[0] = '"KernelName","Count","Share"\n'
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(lines))


def statistics_of(records: Iterable[dict]) -> list[dict]:
    """Rows below STATS_HEADER, the longest total first."""
    durations: dict[str, list[int]] = {}
    for r in records:
        durations.setdefault(r["Kernel_Name"], []).append(
            int(r["End_Timestamp"]) - int(r["Start_Timestamp"])
        )
    total = sum(map(sum, durations.values()))
    rows = []
    for name, ns in sorted(durations.items(), key=lambda item: -sum(item[1])):
        share, deviation = round(100 * sum(ns) / total, 2), round(statistics.stdev(ns), 6)
        mean = round(sum(ns) / len(ns), 6)
        values = (name, len(ns), sum(ns), mean, share, min(ns), max(ns), deviation)
        rows.append(dict(zip(STATS_HEADER, values, strict=True)))
    return rows


def write_kernel_trace(prefix: object, records: list[dict]) -> None:
    """PREFIX_kernel_trace.csv."""
    header = [name for name in TRACE_HEADER.split() if ROCM >= 7 or name != "Stream_Id"]
    more = {"Kind": "KERNEL_DISPATCH", "Agent_Id": "Agent 4" if ROCM >= 7 else 4}
    write_csv(f"{prefix}_kernel_trace.csv", header, [r | more for r in records])


def write_database(prefix: str, records: list[dict]) -> None:
    """PREFIX_results.db: rocpd's tables have the session's UUID in their names.

    Readers use views without it.
    """
    path = Path(f"{prefix}_results.db")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    columns = "id INTEGER PRIMARY KEY, name TEXT, start BIGINT, end BIGINT"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(f"CREATE TABLE rocpd_kernel_dispatch_5a1d7b32 ({columns})")
        database.execute("CREATE VIEW kernels AS SELECT * FROM rocpd_kernel_dispatch_5a1d7b32")
        database.executemany(
            "INSERT INTO rocpd_kernel_dispatch_5a1d7b32 VALUES (?, ?, ?, ?)",
            map(tuple, map(dict.values, records)),
        )


def read_database(path: str) -> list[dict]:
    """What write_database wrote; anything else ends with status 1."""
    query = "SELECT id, name, start, end FROM kernels ORDER BY id"
    try:
        with contextlib.closing(
            sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True)
        ) as database:
            return [dict(zip(DISPATCH, row, strict=True)) for row in database.execute(query)]
    except sqlite3.Error as error:
        sys.exit(f"[{TOOL}] {path}: {error}")

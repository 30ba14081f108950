"""What the stand-ins for ROCm's profilers share.

The real tools need an AMD GPU. The stand-ins take the same options, run the application and write files of the same
formats, so that the wrappers can be tested without one. Their content is made up and the same in every run. Names and
formats follow rocprofiler-sdk 1.0 (ROCm 7).

Environment variables for tests:
STANDIN_LOG=FILE         append a line of JSON per call: tool, argv, application
STANDIN_ROCM=6           rocprofv3 of ROCm 6: csv by default, without Stream_Id, Agent_Id is a number
STANDIN_GPU=gfx1100      another GPU than gfx942; of several (gfx1036,gfx942) the last is the one profiled
STANDIN_PROCESSES=2      rocprofv3 writes files for so many processes
STANDIN_FAIL=[TOOL:]MODE one of FAILURES; with TOOL only this tool fails
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
from typing import NamedTuple

FAILURES = ("", "status", "killed", "nothing", "truncated", "truncated-line", "noformat", "noplots")
TOOL = Path(sys.argv[0]).name
ROCM = int(os.environ.get("STANDIN_ROCM", "7"))
GPUS = os.environ.get("STANDIN_GPU", "gfx942").split(",")
STATS_HEADER = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev")
TRACE_HEADER = (
    *("Kind", "Agent_Id", "Queue_Id", "Stream_Id", "Thread_Id", "Dispatch_Id", "Kernel_Id", "Kernel_Name"),
    *("Correlation_Id", "Start_Timestamp", "End_Timestamp", "LDS_Block_Size", "Scratch_Size", "VGPR_Count"),
    *("Accum_VGPR_Count", "SGPR_Count", "Workgroup_Size_X", "Workgroup_Size_Y", "Workgroup_Size_Z"),
    *("Grid_Size_X", "Grid_Size_Y", "Grid_Size_Z"),
)
WORKGROUP, GRID = 256, 65536  # work-items, of every dispatch


class Parser(argparse.ArgumentParser):
    """As in the real tools an unknown option ends with status 2 before anything runs."""

    def __init__(self, prog: str = TOOL, **arguments):
        super().__init__(prog=prog, allow_abbrev=False, **arguments)

    def switches(self, *flags: str) -> None:
        """Add options without a value; short and long name with / between."""
        for names in flags:
            self.add_argument(*names.split("/"), action="store_true")


class Dispatch(NamedTuple):
    """One kernel launch; times in ns."""

    id: int
    kernel: int
    name: str
    start: int
    end: int


# Name, dispatches, ns of one. Names as the profilers print them: commas, spaces, templates and quotes.
AT = "void at::native::"
KERNELS = (
    ("Cijk_Ailk_Bljk_SB_MT64x64x16_MI16x16x4x1_SN_1LDSB0_AFC1_AG0_GRVWA4_GRVWB4_WG16_16_1", 24, 41000),
    ("Cijk_Alik_Bljk_SB_MT128x64x16_MI32x32x2x1_SN_1LDSB1_AFC1_AG0_GRVWA4_GRVWB4_WG32_8_1", 12, 57000),
    (AT + "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3> >(int)", 18, 6000),
    (AT + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float> > >(int)", 9, 8000),
    ("__amd_rocclr_fillBufferAligned.kd", 4, 2000),
)
FUSED = (("attn_fwd.kd", 6, 30000),)
UNFUSED = (
    ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false>(float*, int)", 18, 9000),
    (AT + '(anonymous namespace)::masked_fill_kernel("float")::{lambda(float, bool)#1}>(int, float)', 18, 7000),
    ("Cijk_Ailk_Bjlk_SB_MT32x32x16_MI16x16x4x1_SN_1LDSB0_AFC1_AG0_GRVWA4_GRVWB4_WG16_16_1", 36, 21000),
)


def dispatches(application: list[str]) -> list[Dispatch]:
    """The kernels that the application is said to have launched: fewer unless it gets --disable-all-fusion."""
    kinds = KERNELS + (UNFUSED if "--disable-all-fusion" in application else FUSED)
    result, clock = [], 7_000_000_000_000  # ns since boot, as in the real traces
    for turn in range(max(count for _, count, _ in kinds)):
        for kernel, (name, count, duration) in enumerate(kinds, start=1):
            if turn < count:
                end = clock + duration + 97 * (turn % 7)
                result.append(Dispatch(len(result) + 1, kernel, name, clock, end))
                clock = end + 1_500
    return result


def parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """The tool's options and, as `application`, the command behind the first `--` (None if there is no `--`)."""
    place = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:place])
    args.application = argv[place + 1 :] if place < len(argv) else None
    return args


def log_call(argv: list[str], application: list[str] | None) -> None:
    """Append this call to the file that STANDIN_LOG names."""
    if path := os.environ.get("STANDIN_LOG"):
        with open(path, "a") as log:
            log.write(json.dumps({"tool": TOOL, "argv": argv, "application": application}) + "\n")


def failure() -> str:
    """What STANDIN_FAIL asks of this tool, '' for nothing."""
    tool, _, mode = os.environ.get("STANDIN_FAIL", "").rpartition(":")
    if mode not in FAILURES:
        sys.exit(f"STANDIN_FAIL: {mode} is none of {FAILURES}")
    return mode if tool in ("", TOOL) else ""


def fail_if_asked() -> bool:
    """Die as STANDIN_FAIL says; True if nothing is to be written."""
    if failure() == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if failure() == "status":
        sys.exit(f"[{TOOL}] fatal error: HSA_STATUS_ERROR_OUT_OF_RESOURCES: the profiler could not be configured")
    return failure() == "nothing"


def run_application(application: list[str]) -> tuple[int, int]:
    """Run it; returns its exit status and process id.

    One that is ended by a signal ends the tool in the same way: the real tools become the application. Ctrl-C reaches
    the application, which decides.
    """
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        process = subprocess.Popen(application)
    except OSError as error:
        print(f"[{TOOL}] {application[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
    status = process.wait()
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status, process.pid


def write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable]) -> None:
    """Text is quoted and numbers are not, as rocprofv3 writes it; damaged if STANDIN_FAIL says so."""
    buffer = io.StringIO()
    csv.writer(buffer, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n").writerows([header, *rows])
    lines = buffer.getvalue().splitlines(keepends=True)
    if failure() == "truncated":
        lines[-1] = lines[-1][: len(lines[-1]) // 2]
    elif failure() == "truncated-line":
        lines = lines[: 1 + len(lines) // 2]
    elif failure() == "noformat":
        lines[0] = '"KernelName","Count","Share"\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def statistics_rows(records: Iterable[tuple[str, int]]) -> list[tuple]:
    """Rows below STATS_HEADER from pairs of name and ns, the longest first."""
    durations: dict[str, list[int]] = {}
    for name, duration in records:
        durations.setdefault(name, []).append(duration)
    total = sum(map(sum, durations.values()))
    return [
        (
            *(name, len(ns), sum(ns), round(sum(ns) / len(ns), 6), round(100 * sum(ns) / total, 2), min(ns), max(ns)),
            round(statistics.stdev(ns), 6) if len(ns) > 1 else 0,
        )
        for name, ns in sorted(durations.items(), key=lambda item: -sum(item[1]))
    ]


def kernel_statistics(records: Iterable[Dispatch]) -> list[tuple]:
    return statistics_rows((r.name, r.end - r.start) for r in records)


def write_kernel_trace(prefix: str, records: list[Dispatch], pid: int) -> None:
    """PREFIX_kernel_trace.csv."""
    rows = [
        [
            *("KERNEL_DISPATCH", "Agent 4", 1, 0, pid, r.id, r.kernel, r.name, r.id, r.start, r.end),
            *(0, 0, 32, 0, 48, WORKGROUP, 1, 1, GRID, 1, 1),
        ]
        for r in records
    ]
    header = list(TRACE_HEADER)
    if ROCM < 7:
        for line in (header, *rows):
            del line[3]
            line[1] = 4 if line[1] == "Agent 4" else line[1]
    write_csv(Path(prefix + "_kernel_trace.csv"), header, rows)


# rocpd's tables carry the session's UUID as suffix; views without it are what readers use.
SCHEMA = """
CREATE TABLE `rocpd_info_kernel_symbol{uuid}` (id INTEGER PRIMARY KEY, display_name TEXT);
CREATE TABLE `rocpd_kernel_dispatch{uuid}` (id INTEGER PRIMARY KEY, pid INTEGER, kernel_id INTEGER, dispatch_id INTEGER,
    start BIGINT, end BIGINT);
CREATE VIEW `kernels` AS SELECT K.id, S.display_name AS name, K.pid, K.dispatch_id, K.kernel_id, K.start, K.end,
    (K.end - K.start) AS duration
    FROM `rocpd_kernel_dispatch{uuid}` K JOIN `rocpd_info_kernel_symbol{uuid}` S ON S.id = K.kernel_id;
CREATE VIEW `top_kernels` AS SELECT name, COUNT(*) AS total_calls, SUM(duration) / 1000.0 AS total_duration,
    AVG(duration) / 1000.0 AS average, SUM(duration) * 100.0 / (SELECT SUM(duration) FROM `kernels`) AS percentage
    FROM `kernels` GROUP BY name ORDER BY total_duration DESC;
"""


def write_database(prefix: str, records: list[Dispatch], pid: int) -> None:
    """PREFIX_results.db with what readers use of ROCm 7's tables and views of kernels."""
    path = Path(prefix + "_results.db")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    uuid = f"_{pid:08x}_5a1d_7b32_9c04_6f1e2d3c4b5a"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA.replace("{uuid}", uuid))
        names = {r.kernel: r.name for r in records}
        database.executemany(f"INSERT INTO `rocpd_info_kernel_symbol{uuid}` VALUES (?,?)", names.items())
        rows = [(r.id, pid, r.kernel, r.id, r.start, r.end) for r in records]
        database.executemany(f"INSERT INTO `rocpd_kernel_dispatch{uuid}` VALUES (?,?,?,?,?,?)", rows)
        if failure() == "noformat":
            database.execute("DROP VIEW `kernels`")
    if failure() == "truncated":
        path.write_bytes(path.read_bytes()[:5000])


def query_database(path: str, query: str) -> tuple[list[str], list[tuple]]:
    """Column names and rows; anything that is no database, or not this query's, ends with status 1."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{Path(path).resolve()}?mode=ro", uri=True)) as database:
            cursor = database.execute(query)
            return [column[0] for column in cursor.description], cursor.fetchall()
    except sqlite3.Error as error:
        sys.exit(f"[{TOOL}] {path}: {error}")

"""What the stand-ins for ROCm's profilers share.

The real tools need an AMD GPU. The stand-ins take the same options, run the application and write files of the same
formats, so that the wrappers can be tested without one. Their content is made up and the same in every run. Names and
formats follow rocprofiler-sdk 1.0 (ROCm 7).

Environment variables for tests:
STANDIN_LOG=FILE         append a line of JSON per call: tool, argv, application, environment
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
from typing import NamedTuple, NoReturn

FAILURES = ("status", "killed", "nothing", "truncated", "truncated-line", "noformat", "noplots")
TOOL = Path(sys.argv[0]).name
START = 7_000_000_000_000  # ns since boot, as in the real traces
STATS_HEADER = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev")


class Parser(argparse.ArgumentParser):
    """As in the real tools an unknown option ends with status 2 before anything runs."""

    def __init__(self, prog: str = TOOL, **arguments):
        super().__init__(prog=prog, allow_abbrev=False, **arguments)


class Dispatch(NamedTuple):
    """One kernel launch; times in ns, sizes in work-items."""

    id: int
    kernel: int
    name: str
    start: int
    end: int
    grid: int
    workgroup: int

    @property
    def duration(self) -> int:
        return self.end - self.start


# Name, dispatches, ns of one, work-items. Names as the profilers print them: commas, spaces, templates and, in those of
# lambdas, quotes.
KERNELS = (
    ("Cijk_Ailk_Bljk_SB_MT64x64x16_MI16x16x4x1_SN_1LDSB0_AFC1_AG0_GRVWA4_GRVWB4_WG16_16_1", 24, 41_000, 65536),
    ("Cijk_Alik_Bljk_SB_MT128x64x16_MI32x32x2x1_SN_1LDSB1_AFC1_AG0_GRVWA4_GRVWB4_WG32_8_1", 12, 57_000, 131072),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
        "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)",
        18,
        6_000,
        16384,
    ),
    (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, "
        "float>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::MeanOps<float, float, float, "
        "float>, unsigned int, float, 4, 4>)",
        9,
        8_000,
        32768,
    ),
    ("__amd_rocclr_fillBufferAligned.kd", 4, 2_000, 512),
)
FUSED = (("attn_fwd.kd", 6, 30_000, 65536),)
UNFUSED = (
    (
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*, float const*, "
        "int, int, int, bool const*, int, bool)",
        18,
        9_000,
        65536,
    ),
    (
        "void at::native::elementwise_kernel_manual_unroll<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
        '(anonymous namespace)::masked_fill_kernel("float")::{lambda(float, bool)#1}> >(int, float)',
        18,
        7_000,
        65536,
    ),
    ("Cijk_Ailk_Bjlk_SB_MT32x32x16_MI16x16x4x1_SN_1LDSB0_AFC1_AG0_GRVWA4_GRVWB4_WG16_16_1", 36, 21_000, 32768),
)


def dispatches(application: list[str]) -> list[Dispatch]:
    """The kernels that the application is said to have launched: fewer unless it gets --disable-all-fusion."""
    kinds = KERNELS + (UNFUSED if "--disable-all-fusion" in application else FUSED)
    left = {kernel: count for kernel, (_, count, _, _) in enumerate(kinds, start=1)}
    result, clock = [], START
    while any(left.values()):
        for kernel, (name, _, duration, grid) in enumerate(kinds, start=1):
            if left[kernel]:
                left[kernel] -= 1
                end = clock + duration + 97 * (left[kernel] % 7)
                result.append(Dispatch(len(result) + 1, kernel, name, clock, end, grid, 256))
                clock = end + 1_500
    return result


def short_name(name: str) -> str:
    """What --truncate-kernels leaves of a kernel name."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    for bracket in "<(":
        name = name.partition(bracket)[0]
    return name.rpartition("::")[2].removesuffix(".kd")


def split_application(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """The tool's options, and the application behind the first `--` (None if there is no `--`)."""
    if "--" not in argv:
        return argv, None
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def failure() -> str | None:
    """What STANDIN_FAIL asks of this tool."""
    tool, _, mode = os.environ.get("STANDIN_FAIL", "").rpartition(":")
    if mode and mode not in FAILURES:
        sys.exit(f"STANDIN_FAIL: {mode} is none of {', '.join(FAILURES)}")
    return mode if mode and tool in ("", TOOL) else None


def fail_if_asked() -> bool:
    """Die as STANDIN_FAIL says; True if nothing is to be written."""
    mode = failure()
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "status":
        sys.exit(f"[{TOOL}] fatal error: HSA_STATUS_ERROR_OUT_OF_RESOURCES: the profiler could not be configured")
    return mode == "nothing"


def log_call(argv: list[str], application: list[str] | None) -> None:
    """Append this call to the file that STANDIN_LOG names."""
    if path := os.environ.get("STANDIN_LOG"):
        wanted = ("ROCPROF", "HIP_", "ROCR_", "CUDA_VISIBLE", "OMNITRACE")
        environment = {name: value for name, value in os.environ.items() if name.startswith(wanted)}
        call = {"tool": TOOL, "argv": argv, "application": application, "environment": environment}
        with open(path, "a") as log:
            log.write(json.dumps(call) + "\n")


def end_by_signal(number: int) -> NoReturn:
    """End as the application ended; the real tools become the application, so they share its end."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(128 + number)


def run_application(application: list[str], environment: dict[str, str] | None = None) -> tuple[int, int]:
    """Run it with additional environment variables; returns its exit status and process id.

    One that is ended by a signal ends the tool in the same way. Ctrl-C reaches the application, which decides.
    """
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        process = subprocess.Popen(application, env={**os.environ, **(environment or {})})
    except OSError as error:
        print(f"[{TOOL}] {application[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
    status = process.wait()
    if status < 0:
        end_by_signal(-status)
    return status, process.pid


def cut(text: str) -> str:
    """Damage a csv file as STANDIN_FAIL says."""
    mode, lines = failure(), text.splitlines(keepends=True)
    if mode == "truncated":
        return text[: len(text) - len(lines[-1]) // 2]
    if mode == "truncated-line":
        return "".join(lines[: 1 + len(lines) // 2])
    if mode == "noformat":
        return '"KernelName","Count","Share"\n' + "".join(lines[1:])
    return text


def write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable]) -> None:
    """Text is quoted and numbers are not, as rocprofv3 writes it."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(cut(text.getvalue()))


class Number(float):
    """A float in the csv files with rocprofv3's digits."""

    def __repr__(self) -> str:
        return f"{self:.6f}"

    __str__ = __repr__


class Percentage(float):
    """Two digits behind the point, or an exponent below 1."""

    def __repr__(self) -> str:
        return f"{self:.2f}" if self >= 1 else f"{self:.2e}"

    __str__ = __repr__


def statistics_rows(records: Iterable[tuple[str, int]]) -> list[tuple]:
    """Rows of a *_stats.csv from pairs of name and ns, the longest first."""
    durations: dict[str, list[int]] = {}
    for name, duration in records:
        durations.setdefault(name, []).append(duration)
    total = sum(map(sum, durations.values()))
    return [
        (
            *(name, len(ns), sum(ns), Number(sum(ns) / len(ns)), Percentage(100 * sum(ns) / total), min(ns), max(ns)),
            Number(statistics.stdev(ns) if len(ns) > 1 else 0),
        )
        for name, ns in sorted(durations.items(), key=lambda item: -sum(item[1]))
    ]


def agent(rocm: int) -> str | int:
    """The GPU in a csv file."""
    return "Agent 4" if rocm >= 7 else 4


def write_kernel_trace(prefix: str, records: list[Dispatch], pid: int, rocm: int = 7) -> None:
    """PREFIX_kernel_trace.csv."""
    header = ["Kind", "Agent_Id", "Queue_Id", "Stream_Id", "Thread_Id", "Dispatch_Id", "Kernel_Id", "Kernel_Name"]
    header += ["Correlation_Id", "Start_Timestamp", "End_Timestamp", "LDS_Block_Size", "Scratch_Size", "VGPR_Count"]
    header += ["Accum_VGPR_Count", "SGPR_Count", "Workgroup_Size_X", "Workgroup_Size_Y", "Workgroup_Size_Z"]
    header += ["Grid_Size_X", "Grid_Size_Y", "Grid_Size_Z"]
    rows = [
        [
            *("KERNEL_DISPATCH", agent(rocm), 1, 0, pid, r.id, r.kernel, r.name, r.id, r.start, r.end),
            *(0, 0, 32, 0, 48, r.workgroup, 1, 1, r.grid, 1, 1),
        ]
        for r in records
    ]
    if rocm < 7:
        place = header.index("Stream_Id")
        for line in (header, *rows):
            del line[place]
    write_csv(Path(prefix + "_kernel_trace.csv"), header, rows)


def write_agents(prefix: str) -> None:
    """PREFIX_agent_info.csv (of its many columns the first ones)."""
    header = ("Node_Id", "Logical_Node_Id", "Agent_Type", "Cpu_Cores_Count", "Simd_Count", "Name", "Product_Name")
    rows = [
        (0, 0, "CPU", 24, 0, "AMD Instinct MI300A Accelerator", "AMD Instinct MI300A Accelerator"),
        (4, 4, "GPU", 0, 912, gpu(), "AMD Instinct MI300A"),
    ]
    write_csv(Path(prefix + "_agent_info.csv"), header, rows)


def write_markers(prefix: str, pid: int) -> list[tuple[str, int]]:
    """PREFIX_marker_api_trace.csv; returns names and ns."""
    header = ("Domain", "Function", "Process_Id", "Thread_Id", "Correlation_Id", "Start_Timestamp", "End_Timestamp")
    spans = [(name, START + 1_000_000 * i, 900_000) for i, name in enumerate(("data", "forward", "backward"))]
    rows = [("MARKER_CORE_RANGE_API", name, pid, pid, 1, start, start + ns) for name, start, ns in spans]
    write_csv(Path(prefix + "_marker_api_trace.csv"), header, rows)
    return [(name, ns) for name, _, ns in spans]


def write_kernel_stats(prefix: str, records: list[Dispatch], markers: list[tuple[str, int]]) -> None:
    """PREFIX_kernel_stats.csv and PREFIX_domain_stats.csv."""
    write_csv(Path(prefix + "_kernel_stats.csv"), STATS_HEADER, statistics_rows((r.name, r.duration) for r in records))
    domains = [("KERNEL_DISPATCH", r.duration) for r in records] + [("MARKER_API", ns) for _, ns in markers]
    write_csv(Path(prefix + "_domain_stats.csv"), STATS_HEADER, statistics_rows(domains))


def gpu() -> str:
    """The gfx name of the GPU that the tools profile."""
    return gpus()[-1]


def gpus() -> list[str]:
    """The gfx names of all GPUs that this machine is said to have."""
    return os.environ.get("STANDIN_GPU", "gfx942").split(",")


# rocpd's tables carry the session's UUID as suffix; views without it are what readers use.
SCHEMA = """
CREATE TABLE `rocpd_metadata{uuid}` (id INTEGER PRIMARY KEY, tag TEXT NOT NULL, value TEXT NOT NULL);
CREATE TABLE `rocpd_string{uuid}` (id INTEGER PRIMARY KEY, guid TEXT, string TEXT NOT NULL);
CREATE TABLE `rocpd_info_process{uuid}` (id INTEGER PRIMARY KEY, guid TEXT, nid INTEGER, pid INTEGER, command TEXT);
CREATE TABLE `rocpd_info_agent{uuid}` (id INTEGER PRIMARY KEY, guid TEXT, nid INTEGER, pid INTEGER, type TEXT,
    absolute_index INTEGER, name TEXT, product_name TEXT);
CREATE TABLE `rocpd_info_kernel_symbol{uuid}` (id INTEGER PRIMARY KEY, guid TEXT, nid INTEGER, pid INTEGER,
    code_object_id INTEGER, kernel_name TEXT, display_name TEXT, arch_vgpr_count INTEGER, accum_vgpr_count INTEGER,
    sgpr_count INTEGER);
CREATE TABLE `rocpd_event{uuid}` (id INTEGER PRIMARY KEY, guid TEXT, category_id INTEGER, correlation_id INTEGER);
CREATE TABLE `rocpd_kernel_dispatch{uuid}` (id INTEGER PRIMARY KEY, guid TEXT, nid INTEGER, pid INTEGER, tid INTEGER,
    agent_id INTEGER, kernel_id INTEGER, dispatch_id INTEGER, queue_id INTEGER, stream_id INTEGER, start BIGINT,
    end BIGINT, private_segment_size INTEGER, group_segment_size INTEGER, workgroup_size_x INTEGER,
    workgroup_size_y INTEGER, workgroup_size_z INTEGER, grid_size_x INTEGER, grid_size_y INTEGER, grid_size_z INTEGER,
    region_name_id INTEGER, event_id INTEGER, extdata TEXT);
CREATE VIEW `rocpd_metadata` AS SELECT * FROM `rocpd_metadata{uuid}`;
CREATE VIEW `rocpd_string` AS SELECT * FROM `rocpd_string{uuid}`;
CREATE VIEW `rocpd_info_process` AS SELECT * FROM `rocpd_info_process{uuid}`;
CREATE VIEW `rocpd_info_agent` AS SELECT * FROM `rocpd_info_agent{uuid}`;
CREATE VIEW `rocpd_info_kernel_symbol` AS SELECT * FROM `rocpd_info_kernel_symbol{uuid}`;
CREATE VIEW `rocpd_event` AS SELECT * FROM `rocpd_event{uuid}`;
CREATE VIEW `rocpd_kernel_dispatch` AS SELECT * FROM `rocpd_kernel_dispatch{uuid}`;
CREATE VIEW `kernels` AS SELECT K.id, K.guid, K.tid,
    (SELECT string FROM `rocpd_string` C JOIN `rocpd_event` E ON C.id = E.category_id WHERE E.id = K.event_id)
        AS category,
    R.string AS region, S.display_name AS name, K.nid, P.pid, A.absolute_index AS agent_abs_index, K.queue_id,
    K.stream_id, K.dispatch_id, K.kernel_id, K.start, K.end, (K.end - K.start) AS duration,
    K.grid_size_x AS grid_x, K.workgroup_size_x AS workgroup_x
    FROM `rocpd_kernel_dispatch` K JOIN `rocpd_info_kernel_symbol` S ON S.id = K.kernel_id AND S.guid = K.guid
    JOIN `rocpd_info_process` P ON P.id = K.pid JOIN `rocpd_info_agent` A ON A.id = K.agent_id
    JOIN `rocpd_string` R ON R.id = K.region_name_id;
CREATE VIEW `top_kernels` AS SELECT name, COUNT(*) AS total_calls, SUM(duration) / 1000.0 AS total_duration,
    AVG(duration) / 1000.0 AS average, SUM(duration) * 100.0 / (SELECT SUM(duration) FROM `kernels`) AS percentage
    FROM `kernels` GROUP BY name ORDER BY total_duration DESC;
"""


def write_database(prefix: str, records: list[Dispatch], pid: int, application: list[str]) -> None:
    """PREFIX_results.db with the tables and views of ROCm 7 that hold kernels."""
    path = Path(prefix + "_results.db")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    guid = f"{pid:08x}-5a1d-7b32-9c04-6f1e2d3c4b5a"
    uuid = "_" + guid.replace("-", "_")
    kernels = {r.kernel: r.name for r in records}
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA.replace("{uuid}", uuid))

        def insert(table: str, rows: list[tuple]) -> None:
            marks = ",".join("?" * len(rows[0]))
            database.executemany(f"INSERT INTO `{table}{uuid}` VALUES ({marks})", rows)

        insert("rocpd_metadata", [(1, "schema_version", "3"), (2, "uuid", uuid), (3, "guid", guid)])
        insert("rocpd_string", [(1, guid, ""), (2, guid, "KERNEL_DISPATCH")])
        insert("rocpd_info_process", [(pid, guid, 1, pid, " ".join(application))])
        insert("rocpd_info_agent", [(4, guid, 1, pid, "GPU", 4, gpu(), "AMD Instinct MI300A")])
        symbols = [(k, guid, 1, pid, 1, name, name, 32, 0, 48) for k, name in kernels.items()]
        insert("rocpd_info_kernel_symbol", symbols)
        insert("rocpd_event", [(r.id, guid, 2, r.id) for r in records])
        rows = [
            (
                *(r.id, guid, 1, pid, pid, 4, r.kernel, r.id, 1, 0, r.start, r.end, 0, 0),
                *(r.workgroup, 1, 1, r.grid, 1, 1, 1, r.id, "{}"),
            )
            for r in records
        ]
        insert("rocpd_kernel_dispatch", rows)
    if failure() in ("truncated", "truncated-line"):
        path.write_bytes(path.read_bytes()[:5000])
    elif failure() == "noformat":
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute("DROP VIEW `kernels`")
            database.execute("DROP VIEW `rocpd_kernel_dispatch`")
            database.execute(f"DROP TABLE `rocpd_kernel_dispatch{uuid}`")


def read_database(path: str) -> tuple[list[Dispatch], int]:
    """The kernels of a database and the process id; anything else ends with status 1."""
    query = "SELECT dispatch_id, kernel_id, name, start, end, grid_x, workgroup_x, pid FROM kernels ORDER BY id"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{Path(path).resolve()}?mode=ro", uri=True)) as database:
            rows = database.execute(query).fetchall()
    except sqlite3.Error as error:
        sys.exit(f"[{TOOL}] {path}: {error}")
    return [Dispatch(*row[:-1]) for row in rows], rows[0][-1] if rows else 0

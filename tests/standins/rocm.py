#!/usr/bin/env python3
"""Stand-ins for ROCm's profilers, which need an AMD GPU: a link to this file is the tool of its
name, and `rocm.py DIR` makes the links of all.

They take the options that wrappers, sheets and pages use, refuse all others, run the application
and write files of the real formats, with made-up content that is the same in every run. Names and
formats follow rocprofiler-sdk 1.0 (ROCm 7).

Environment variables for tests:
STANDIN_LOG=FILE     append a line of JSON per call: tool, argv, application
STANDIN_ROCM=6       rocprofv3 of ROCm 6: no --selected-regions, --pmc and databases; csv by default
STANDIN_ROCM=new     rocprof-compute of later releases: --output-directory in place of --path, no
                     plots, and a compressed table for each pass
STANDIN_PROCESSES=2  rocprofv3 writes files for so many processes
STANDIN_GPU=NAMES    rocminfo lists these GPUs
STANDIN_FAIL=MODE    status, killed: the tool dies so; nothing: it writes no files; truncated: they
                     are cut off; noformat: they are of another format; noplots: rocprof-compute
                     draws nothing
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

TOOL = Path(sys.argv[0]).name
NEW = os.environ.get("STANDIN_ROCM") != "6"
PASSES = os.environ.get("STANDIN_ROCM") == "new"
FAIL = os.environ.get("STANDIN_FAIL", "")
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
STATISTICS = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage")
STATISTICS += ("MinNs", "MaxNs", "StdDev")
TRACE = ("Kind", "Agent_Id", "Queue_Id", "Kernel_Name", "Start_Timestamp", "End_Timestamp")
# of a tool or one of its commands: `=` takes a value, `=+` several, `=*` any number, of these
OPTIONS = {
    "rocprofv3": "--kernel-trace --runtime-trace --sys-trace --marker-trace --stats -d= -o="
    " --truncate-kernels --output-format=+csv,pftrace"
    + ",rocpd --selected-regions --pmc=+SQ_WAVES,SQ_INSTS_VALU,GRBM_GUI_ACTIVE"
    * NEW,
    "rocprof-sys-run": "-T/--trace -P/--profile -S/--sample=*cputime,realtime -o/--output=+",
    "rocprof-compute profile": "-n/--name= --no-roof --roof-only --device= "
    + ("--output-directory=" if PASSES else "-p/--path= --kernel-names"),
    "rocprof-compute analyze": "-p/--path= --list-stats -d/--dispatch=+",
    "rocpd convert": "-i/--input=+ -f/--output-format=+csv,pftrace -d/--output-path="
    " -o/--output-file=",
    "rocpd summary": "-i/--input=+ --region-categories=+",
}
Rows = list[dict]


def parse(tool: str, argv: list[str]) -> argparse.Namespace:
    """The options, None if not given, the command and, as `application`, what is behind the first
    `--`. As in the real tools an unknown option ends with status 2 before anything runs."""
    place = argv.index("--") if "--" in argv else len(argv)
    own, application = argv[:place], argv[place + 1 :]
    command = tool if tool in OPTIONS else " ".join((tool, *own[:1]))
    parser = argparse.ArgumentParser(prog=command, allow_abbrev=False)
    if command not in OPTIONS:
        parser.error("no such command")
    for option in OPTIONS[command].split():
        names, value, spec = option.partition("=")
        if not value:
            parser.add_argument(*names.split("/"), action="store_true")
        else:
            choices = spec[1:].split(",") if spec[1:] else None
            parser.add_argument(*names.split("/"), nargs=spec[:1] or None, choices=choices)
    args = parser.parse_args(own if command == tool else own[1:])
    if bool(application) != (command.partition(" ")[2] in ("", "profile")):
        parser.error("an application is needed after ' -- ', or none can be given")
    args.command, args.application = command, application
    if path := os.environ.get("STANDIN_LOG"):
        with open(path, "a") as log:
            call = {"tool": TOOL, "argv": argv, "application": application}
            log.write(json.dumps(call) + "\n")
    return args


def run_application(application: list[str]) -> tuple[int, int]:
    """Run it; returns its exit status and process id. Ctrl-C reaches it, and it decides."""
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


def write(path: Path | str, text: str) -> None:
    """Into a folder that may not be there yet."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def dispatches(application: list[str]) -> Rows:
    """What the application is said to have launched; more with --disable-all-fusion."""
    rows, clock = [], 7_000_000_000_000  # ns since boot, as in the real traces
    for name, count, ns in KERNELS + (UNFUSED if "--disable-all-fusion" in application else FUSED):
        for _ in range(count):
            times = {"Start_Timestamp": clock, "End_Timestamp": clock + ns}
            rows.append({"Dispatch_Id": len(rows) + 1, "Kernel_Name": name, **times})
            clock += ns + 100
    return rows


def write_csv(path: Path | str, header: Iterable[str], rows: Iterable[dict]) -> None:
    """Text is quoted and numbers are not, as rocprofv3 does it; what a row lacks is 0."""
    text = io.StringIO()
    options = {"quoting": csv.QUOTE_NONNUMERIC, "lineterminator": "\n"}
    writer = csv.DictWriter(text, header, restval=0, extrasaction="ignore", **options)
    writer.writeheader()
    writer.writerows(rows)
    lines = text.getvalue().splitlines(keepends=True)
    if FAIL == "truncated":
        lines[-1] = lines[-1][: len(lines[-1]) // 2]
    elif FAIL == "noformat":
        lines[0] = '"KernelName","Count","Share"\n'
    write(path, "".join(lines))


def statistics_of(records: Rows) -> Rows:
    """A row for each kernel, all of whose dispatches take equally long; longest total first."""
    times: dict[str, list[int]] = {}
    for r in records:
        ns = int(r["End_Timestamp"]) - int(r["Start_Timestamp"])
        times.setdefault(r["Kernel_Name"], []).append(ns)
    total = sum(map(sum, times.values()))
    rows = [
        (n, len(t), sum(t), t[0], 100 * sum(t) / total, t[0], t[0], 0) for n, t in times.items()
    ]
    rows.sort(key=lambda row: -row[2])
    return [dict(zip(STATISTICS, row, strict=True)) for row in rows]


def write_kernel_trace(prefix: object, records: Rows) -> None:
    more = {"Kind": "KERNEL_DISPATCH", "Agent_Id": "Agent 4"}
    write_csv(f"{prefix}_kernel_trace.csv", TRACE, [r | more for r in records])


def write_database(path: str, records: Rows) -> None:
    """rocpd's tables have the session's UUID in their names; readers use views without it."""
    write(path, "")
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        columns = "id INTEGER PRIMARY KEY, name TEXT, start BIGINT, end BIGINT"
        database.execute(f"CREATE TABLE rocpd_kernel_dispatch_5a1d7b32 ({columns})")
        database.execute("CREATE VIEW kernels AS SELECT * FROM rocpd_kernel_dispatch_5a1d7b32")
        insert = "INSERT INTO rocpd_kernel_dispatch_5a1d7b32 VALUES (?, ?, ?, ?)"
        database.executemany(insert, [tuple(record.values()) for record in records])


def read_database(path: str) -> Rows:
    """What write_database wrote; anything else ends with status 1."""
    query = "SELECT name Kernel_Name, start Start_Timestamp, end End_Timestamp FROM kernels"
    place = f"{Path(path).resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(place, uri=True)) as database:
            database.row_factory = sqlite3.Row
            return list(map(dict, database.execute(query)))
    except sqlite3.Error as error:
        sys.exit(f"[{TOOL}] {path}: {error}")


def rocprofv3(args: argparse.Namespace) -> int:
    """Kernel traces, statistics, counters."""
    status, pid = run_application(args.application)
    records = dispatches(args.application)
    traced = args.kernel_trace or args.runtime_trace or args.sys_trace or args.marker_trace
    formats = args.output_format or ["rocpd" if NEW else "csv"]
    for process in range(pid, pid + int(os.environ.get("STANDIN_PROCESSES", "1")) * writes()):
        prefix = f"{args.d or '.'}/{args.o or 'host/%pid%'}".replace("%pid%", str(process))
        if "rocpd" in formats:
            write_database(f"{prefix}_results.db", records)
        if "csv" in formats and traced:
            write_kernel_trace(prefix, records)
            if args.stats:
                write_csv(f"{prefix}_kernel_stats.csv", STATISTICS, statistics_of(records))
        if "csv" in formats and NEW and args.pmc:
            rows = [
                {**r, "Counter_Name": c, "Counter_Value": 1024.0} for r in records for c in args.pmc
            ]
            write_csv(f"{prefix}_counter_collection.csv", rows[0], rows)
        if "pftrace" in formats:
            write(f"{prefix}_results.pftrace", "" if FAIL else "perfetto")
    return status


def rocprof_sys(args: argparse.Namespace) -> int:
    """A Perfetto trace and call-stack profiles, in a folder named after the time."""
    status, pid = run_application(args.application)
    if writes():
        place, prefix = [*(args.output or ["rocprof-sys-output"]), ""][:2]
        place += "/2026-01-31_12.00"
        if args.trace:
            write(f"{place}/{prefix}perfetto-trace-{pid}.proto", "" if FAIL else "perfetto")
        names = {"wall_clock": args.profile, "sampling_wall_clock": args.sample is not None}
        for name in (name for name, wanted in names.items() if wanted):
            write(f"{place}/{prefix}{name}-{pid}.txt", "| LABEL  | COUNT  | SUM (sec) |\n")
    return status


def rocprof_compute(args: argparse.Namespace) -> int:
    """Counters of every dispatch, roofline plots, and their analysis."""
    if args.command.endswith("profile"):
        if not args.name or re.search(r"[./,-]", args.name):
            sys.exit("-n NAME: '.', ',', '-' and '/' are not permitted in a workload name")
        default = f"workloads/{args.name}"
        place = Path((args.output_directory if PASSES else args.path) or default)
        place = place if PASSES and args.output_directory else place / "MI300A_A1"
        place.mkdir(parents=True, exist_ok=True)
        for _ in range(2):  # one run for each set of counters
            if status := run_application(args.application)[0]:
                return status
        if writes():
            header = ("Dispatch_ID", "GPU_ID", "Kernel_Name", "Start_Timestamp", "End_Timestamp")
            records = enumerate(dispatches(args.application))
            rows = [{**record, "Dispatch_ID": number} for number, record in records]
            if PASSES:
                write_passes(place, header, rows)
                return 0
            write_csv(place / "pmc_perf.csv", (*header, "SQ_INSTS_VALU"), rows)
            plots = ["empirRoof_gpu-0_FP32", *["kernelName_legend"] * args.kernel_names]
            for name in plots if args.roof_only and FAIL != "noplots" else ():
                write(place / f"{name}.pdf", "%PDF-1.4\n%%EOF\n")
        return 0
    name = "results_pmc_perf_0.csv.gz" if PASSES else "pmc_perf.csv"
    with (gzip.open if PASSES else open)(Path(args.path) / name, "rt", newline="") as lines:
        rows = {row["Dispatch_ID"]: row for row in csv.DictReader(lines)}
    if unknown := set(args.dispatch or ()) - set(rows):
        sys.exit(f"ERROR dispatch id {unknown.pop()} is not in this profile of {len(rows)}")
    print("0. Top Stats\n0.1 Top Kernels")
    for row in statistics_of(list(rows.values())):
        print(f"| {row['Name']} | {row['Calls']} | {row['TotalDurationNs']} |")
    print("0.2 Dispatch List")
    for number in args.dispatch or rows:
        print(f"| {number} | {rows[number]['Kernel_Name']} |")
    if not args.list_stats:
        print("2. System Speed-of-Light")
    return 0


def write_passes(place: Path, header: tuple, rows: Rows) -> None:
    """A table for each pass, with a row for each counter of a dispatch."""
    for number, counter in enumerate(("SQ_INSTS_VALU", "SQ_WAVES")):
        path = place / f"results_pmc_perf_{number}.csv"
        counted = [{**row, "Counter_Name": counter, "Counter_Value": 0} for row in rows]
        write_csv(path, (*header, "Counter_Name", "Counter_Value"), counted)
        (place / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def rocpd(args: argparse.Namespace) -> int:
    """Converts and summarises the databases of rocprofv3."""
    records = [record for name in args.input for record in read_database(name)]
    if not writes():
        return 0
    if args.command == "rocpd summary":
        print("KERNEL_DISPATCH SUMMARY")
        rows = [row.values() for row in statistics_of(records)]
        csv.writer(sys.stdout).writerows([STATISTICS, *rows])
    elif "csv" in args.output_format:
        folder, file = args.output_path or "rocpd-output-data", args.output_file or "out"
        write_kernel_trace(f"{folder}/{file}", records)
    return 0


def rocminfo() -> None:
    """The agents of the machine."""
    print("HSA Agents\n  Name:                    AMD EPYC 9654 96-Core Processor")
    for name in os.environ.get("STANDIN_GPU", "gfx942").split(","):
        print(f"  Name:                    {name}\n      Name:  amdgcn-amd-amdhsa--{name}:xnack-")


def rocm_smi() -> None:
    """The start of its table for one GPU."""
    print("===== ROCm System Management Interface =====")
    print("Device  Node  IDs              Temp    Power   SCLK    MCLK    VRAM%  GPU%")
    print("0       4     0x74a0,   28851  38.0°C  112.0W  100Mhz  900Mhz  0%     0%")


PROFILERS: dict[str, Callable[[argparse.Namespace], int]] = {
    "rocprofv3": rocprofv3,
    "rocprof-sys-run": rocprof_sys,
    "rocprof-compute": rocprof_compute,
    "rocpd": rocpd,
}
OTHER_NAMES = {  # of a tool and its first arguments
    "omnitrace-run": ("rocprof-sys-run",),
    "rocpd2csv": ("rocpd", "convert", "-f", "csv"),
}
PRINTED = {"rocminfo": rocminfo, "rocm-smi": rocm_smi}

if __name__ == "__main__":
    if TOOL in PRINTED:
        PRINTED[TOOL]()
    elif TOOL in PROFILERS or TOOL in OTHER_NAMES:
        tool, *first = OTHER_NAMES.get(TOOL, (TOOL,))
        sys.exit(PROFILERS[tool](parse(tool, [*first, *sys.argv[1:]])))
    else:
        for name in (*PROFILERS, *OTHER_NAMES, *PRINTED):
            (Path(sys.argv[1]) / name).symlink_to(Path(__file__).resolve())

#!/usr/bin/env python3
"""Stand-ins for ROCm's profilers, which need an AMD GPU: a link to this file is the tool of its
name, and `rocm.py DIR` makes the links of all.

They take the documented options that wrappers, sheets and pages use, refuse all others, run the
application and write files of the real formats, with made-up content that is always the same.

Environment variables for tests:
STANDIN_LOG=FILE     append a line of JSON per call: tool, argv, application
STANDIN_ROCM=6       rocprofv3 without --selected-regions, --pmc, --hip-graph-trace and databases
STANDIN_ROCM=10      rocprof-compute 3.10: no --path and no plots, a database of each process and
                     pass and no tables, dispatches from 1; it knows more GPUs
STANDIN_PROCESSES=2  rocprofv3 writes files for so many processes
STANDIN_GPU=NAMES    rocminfo lists these GPUs
STANDIN_FAIL=MODE    nothing: the tool writes no files; truncated: they are cut off
"""

import argparse
import csv
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

TOOL = Path(sys.argv[0]).name
ROCM = int(os.environ.get("STANDIN_ROCM", "7"))
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
GPUS = "gfx908,gfx90a,gfx942,gfx950" + ",gfx1150,gfx1151,gfx1152,gfx1153,gfx1250" * (ROCM >= 10)
# of a tool or one of its commands: `=` takes a value, `=+` several, `=*` any number, of these
OPTIONS = {
    "rocprofv3": "--kernel-trace --runtime-trace --sys-trace --marker-trace --stats -d= -o="
    " --output-format=+csv,pftrace,rocpd"
    + " --selected-regions --hip-graph-trace --pmc=+SQ_WAVES,SQ_INSTS_VALU,GRBM_GUI_ACTIVE"
    * (ROCM >= 7),
    "rocprof-sys-run": "-T/--trace -P/--profile -S/--sample=*cputime,realtime -o/--output=",
    "rocprof-compute profile": "-n/--name= --roof-only "
    + ("-d/--output-directory=" if ROCM >= 10 else "-p/--path= --kernel-names"),
    "rocprof-compute analyze": f"-p/--path= -d/--dispatch=+ --list-metrics=?{GPUS}",
}


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, None if not given, the command and, as `application`, what is behind the first
    `--`. As in the real tools an unknown option ends with status 2 before anything runs."""
    place = argv.index("--") if "--" in argv else len(argv)
    own = argv[:place]
    command = TOOL
    if TOOL not in OPTIONS:
        command = " ".join((TOOL, *own[:1]))
        own = own[1:]
    parser = argparse.ArgumentParser(prog=command, allow_abbrev=False)
    if command not in OPTIONS:
        parser.error("no such command")
    for option in OPTIONS[command].split():
        names, value, spec = option.partition("=")
        kind = {"action": "store_true"}
        if value:
            kind = {"nargs": spec[:1] or None, "choices": spec[1:].split(",") if spec[1:] else None}
        parser.add_argument(*names.split("/"), **kind)
    args = parser.parse_args(own)
    args.command = command
    args.application = argv[place + 1 :]
    if bool(args.application) != (command.partition(" ")[2] in ("", "profile")):
        parser.error("an application is needed after ' -- ', or none can be given")
    if path := os.environ.get("STANDIN_LOG"):
        with open(path, "a") as log:
            call = {"tool": TOOL, "argv": argv, "application": args.application}
            log.write(json.dumps(call) + "\n")
    return args


def run_application(application: list[str]) -> int:
    """Run it, end if it fails -> its process id. Ctrl-C reaches it, and it decides."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(application)
    if status := process.wait():
        sys.exit(status if status > 0 else 128 - status)
    return process.pid


def dispatches(application: list[str], first: int = 1) -> list[dict]:
    """What the application is said to have launched; more with --disable-all-fusion."""
    rows = []
    clock = 7_000_000_000_000  # ns since boot, as in the real traces
    for name, count, ns in KERNELS + (UNFUSED if "--disable-all-fusion" in application else FUSED):
        for _ in range(count):
            times = {"Start_Timestamp": clock, "End_Timestamp": clock + ns}
            rows.append({"Dispatch_Id": len(rows) + first, "Kernel_Name": name, **times})
            clock += ns + 100
    return rows


def write(path: Path | str, text: str) -> None:
    """Into a folder that may not be there yet; nothing, or a part, if the tool is to fail."""
    if FAIL != "nothing":
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        text = text[: -len(text) // 3] if FAIL == "truncated" else text
        Path(path).write_text(text)


def write_csv(path: Path | str, rows: list[dict]) -> None:
    """Text is quoted and numbers are not, as rocprofv3 does it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(path, text.getvalue())


def statistics_of(records: list[dict]) -> list[dict]:
    """A row for each kernel, all of whose dispatches take equally long."""
    times: dict[str, list[int]] = {}
    for record in records:
        ns = int(record["End_Timestamp"]) - int(record["Start_Timestamp"])
        times.setdefault(record["Kernel_Name"], []).append(ns)
    total = sum(map(sum, times.values()))
    rows = [
        (n, len(t), sum(t), t[0], 100 * sum(t) / total, t[0], t[0], 0) for n, t in times.items()
    ]
    return [dict(zip(STATISTICS, row, strict=True)) for row in rows]


def write_database(path: Path, records: list[dict], counter: str = "") -> None:
    """rocpd's tables have the session's UUID in their names; readers use views without it."""
    write(path, "")
    if FAIL == "nothing":
        return
    with sqlite3.connect(path) as database:
        columns = "dispatch_id INTEGER, name TEXT, start BIGINT, end BIGINT"
        database.execute(f"CREATE TABLE rocpd_kernel_dispatch_5a1d7b32 ({columns})")
        database.execute("CREATE VIEW kernels AS SELECT * FROM rocpd_kernel_dispatch_5a1d7b32")
        insert = "INSERT INTO rocpd_kernel_dispatch_5a1d7b32 VALUES (?, ?, ?, ?)"
        database.executemany(insert, [tuple(record.values()) for record in records])
        counted = f"dispatch_id, name kernel_name, start, end, '{counter}' counter_name, 0 value"
        database.execute(f"CREATE VIEW counters_collection AS SELECT {counted} FROM kernels")
    if FAIL == "truncated":
        os.truncate(path, path.stat().st_size // 3)


def rocprofv3(args: argparse.Namespace) -> None:
    """Kernel traces, statistics, counters."""
    pid = run_application(args.application)
    records = dispatches(args.application)
    formats = args.output_format or ["rocpd" if ROCM >= 7 else "csv"]
    for process in range(pid, pid + int(os.environ.get("STANDIN_PROCESSES", "1"))):
        prefix = f"{args.d or '.'}/{args.o or 'host/%pid%'}".replace("%pid%", str(process))
        if "rocpd" in formats:
            write_database(Path(f"{prefix}_results.db"), records)
        if "csv" in formats and (args.kernel_trace or args.marker_trace):
            write_csv(f"{prefix}_kernel_trace.csv", records)
            if args.stats:
                write_csv(f"{prefix}_kernel_stats.csv", statistics_of(records))
        if "csv" in formats and ROCM >= 7 and args.pmc:
            counted = [{"Counter_Name": name, "Counter_Value": 1024.0} for name in args.pmc]
            rows = [{**record, **counter} for record in records for counter in counted]
            write_csv(f"{prefix}_counter_collection.csv", rows)
        if "pftrace" in formats:
            write(f"{prefix}_results.pftrace", "perfetto")


def rocprof_sys(args: argparse.Namespace) -> None:
    """A Perfetto trace and call-stack profiles, in a folder named after the time."""
    pid = run_application(args.application)
    place = f"{args.output or 'rocprof-sys-output'}/2026-01-31_12.00/"
    if args.trace:
        write(f"{place}perfetto-trace-{pid}.proto", "perfetto")
    names = {"wall_clock": args.profile, "sampling_wall_clock": args.sample is not None}
    for name in (name for name, wanted in names.items() if wanted):
        write(f"{place}{name}-{pid}.txt", "| LABEL  | COUNT  | SUM (sec) |\n")


def rocprof_compute_profile(args: argparse.Namespace) -> None:
    """Counters of every dispatch, and roofline plots."""
    place = Path(args.output_directory if ROCM >= 10 else f"{args.path}/MI300A_A1")
    records = dispatches(args.application, first=int(ROCM >= 10))
    for number, counter in enumerate(("SQ_INSTS_VALU", "SQ_WAVES")):  # a run for each set
        pid = run_application(args.application)
        if ROCM >= 10:
            folder = place / f"out/pmc_perf_{number}/host"
            write_database(folder / f"{pid}_results.db", records, counter)
    if ROCM >= 10:
        return
    renamed = {"Dispatch_Id": "Dispatch_ID"}
    rows = [{renamed.get(name, name): v for name, v in record.items()} for record in records]
    write_csv(place / "pmc_perf.csv", [{**row, "SQ_INSTS_VALU": 0} for row in rows])
    plots = ["empirRoof_gpu-0_FP32", *["kernelName_legend"] * args.kernel_names]
    for name in plots if args.roof_only else ():
        write(place / f"{name}.pdf", "%PDF-1.4\n%%EOF\n")


def rocprof_compute_analyze(args: argparse.Namespace) -> None:
    """The dispatches of a profile, or the report on some."""
    if ROCM >= 10:  # it refuses tables
        with sqlite3.connect(next(Path(args.path).glob("out/*/*/*.db"))) as database:
            names = {str(n): name for n, name, *_ in database.execute("SELECT * FROM kernels")}
    else:
        with open(Path(args.path) / "pmc_perf.csv", newline="") as lines:
            names = {row["Dispatch_ID"]: row["Kernel_Name"] for row in csv.DictReader(lines)}
    if unknown := set(args.dispatch or ()) - set(names):
        sys.exit(f"ERROR dispatch id {unknown.pop()} is not in this profile of {len(names)}")
    print("0. Top Stats\n0.2 Dispatch List")
    for number in args.dispatch or names:
        print(f"| {number} | {names[number]} |")
    print("2. System Speed-of-Light")


def rocminfo() -> None:
    """The agents of the machine."""
    print("HSA Agents\n  Name:                    AMD EPYC 9654 96-Core Processor")
    for name in os.environ.get("STANDIN_GPU", "gfx942").split(","):
        print(f"  Name:                    {name}\n      Name:  amdgcn-amd-amdhsa--{name}:xnack-")


PROFILERS = {
    "rocprofv3": rocprofv3,
    "rocprof-sys-run": rocprof_sys,
    "rocprof-compute profile": rocprof_compute_profile,
    "rocprof-compute analyze": rocprof_compute_analyze,
}
PRINTED = {
    "rocminfo": rocminfo,
    "rocm-smi": lambda: print("Device  Temp    Power\n0  38.0C  112.0W"),
}

if __name__ == "__main__":
    names = {name.partition(" ")[0] for name in PROFILERS} | {*PRINTED}
    if TOOL in PRINTED:
        PRINTED[TOOL]()
    elif TOOL in names:
        arguments = parse(sys.argv[1:])
        PROFILERS[arguments.command](arguments)
    else:
        for name in names:
            (Path(sys.argv[1]) / name).symlink_to(Path(__file__).resolve())

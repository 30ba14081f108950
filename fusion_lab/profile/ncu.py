"""What NVIDIA's Nsight Compute (ncu) counts of each kernel: the options that ask for it, and what
it writes.

Examples:
  python -m fusion_lab.profile.ncu show ncu.csv --stats stats.csv
  python -m fusion_lab.profile.ncu command ncu.csv --caches none
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.profile.kernels import short_name, statistics_of, write_statistics
from fusion_lab.show import Column, render

TOP = 12  # kernels in the table
SECTOR = 32  # bytes, the unit in which the L2 cache moves data
# What stands for what in ncu. `srcunit_tex` are the requests of the SMs: without it a write that
# crosses from one half of an H100's or H200's L2 to the other counts twice.
METRICS = {
    "ns": "gpu__time_duration.sum",
    "dram_read": "dram__bytes_read.sum",  # bytes
    "dram_written": "dram__bytes_write.sum",
    "l2_read": "lts__t_sectors_srcunit_tex_op_read.sum",  # sectors
    "l2_written": "lts__t_sectors_srcunit_tex_op_write.sum",
    # cycles in which the matrix units work, in which an instruction begins; warps that an SM holds
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue_percent": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",  # of a thread
}


def ncu_command(output: Path, application: Sequence[str], empty_caches: bool) -> list[str]:
    """Return a command that counts the kernels between cudaProfilerStart and Stop of a program."""
    return [
        *("ncu", "--csv", "--page", "raw", "--print-units", "base"),
        *("--profile-from-start", "off", "--target-processes", "application-only"),
        *("--cache-control", "all" if empty_caches else "none", "--clock-control", "none"),
        *("--metrics", ",".join(METRICS.values()), "--log-file", str(output)),
        *application,
    ]


def number(text: str) -> float:
    """Return a number as ncu writes it: with commas between thousands, empty where it has none."""
    return float(text.replace(",", "") or 0)


def read_ncu(path: Path) -> list[dict]:
    """Return the launches in a file of `ncu --csv --page raw`: name and METRICS, all traffic in
    bytes; ToolError where it is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ToolError(f"{path}: {error}") from error
    rows = list(csv.DictReader(line for line in lines if not line.startswith("==")))
    if any("ERR_NVGPUCTRPERM" in line for line in lines):
        raise ToolError(f"{path}: ncu may not read the counters (ERR_NVGPUCTRPERM)", status=4)
    if not rows or "Kernel Name" not in rows[0]:
        raise ToolError(f"{path}: no kernel was counted")
    missing = [metric for metric in METRICS.values() if metric not in rows[0]]
    if missing:
        raise ToolError(f"{path}: it has no column {missing[0]}")
    launches = []
    for row in rows[1:]:  # the first one has the units
        values = {key: number(row[metric]) for key, metric in METRICS.items()}
        values["l2_read"] *= SECTOR
        values["l2_written"] *= SECTOR
        launches.append({"name": row["Kernel Name"], **values})
    return launches


def by_kernel(launches: Iterable[dict]) -> list[dict]:
    """Return a row for each name, those that take longest first: sums of times and bytes, means of
    the shares by time, the most registers."""
    groups: dict[str, list[dict]] = {}
    for launch in launches:
        groups.setdefault(launch["name"], []).append(launch)
    rows = []
    for name, group in groups.items():
        ns = sum(launch["ns"] for launch in group)
        row = {"name": name, "calls": len(group), "us": ns / 1e3}
        for key in ("dram_read", "dram_written", "l2_read", "l2_written"):
            row[f"{key}_mb"] = sum(launch[key] for launch in group) / 1e6
        for key in ("tensor_percent", "issue_percent", "occupancy_percent"):
            row[key] = sum(launch[key] * launch["ns"] for launch in group) / max(1, ns)
        row["registers"] = max(launch["registers"] for launch in group)
        rows.append(row)
    return sorted(rows, key=lambda row: -row["us"])


def moved(row: dict) -> float:
    """Return MB that DRAM gave and that went to L2: what traffic.py predicts of a kernel that finds
    nothing in a cache."""
    return row["dram_read_mb"] + row["l2_written_mb"]


COLUMNS = (
    Column("kernel", lambda row: short_name(row["name"], 40)),
    Column("calls", "calls"),
    Column("us", "us", ".1f"),
    Column("DRAM read MB", "dram_read_mb", ".2f"),
    Column("written", "dram_written_mb", ".2f"),
    Column("SMs read MB", "l2_read_mb", ".2f"),
    Column("wrote", "l2_written_mb", ".2f"),
    Column("matrix units", "tensor_percent", ".0f", " %"),
    Column("issue", "issue_percent", ".0f", " %"),
    Column("warps", "occupancy_percent", ".0f", " %"),
    Column("registers", "registers", ".0f"),
)


def run(args: argparse.Namespace) -> int:
    """Print the command, a word a line; or the kernels of a file, and write their statistics."""
    if args.what == "command":
        print("\n".join(ncu_command(args.file, (), args.caches == "all")))
        return 0
    launches = read_ncu(args.file)
    rows = by_kernel(launches)
    print(render(COLUMNS, rows[:TOP]))
    sums = [sum(row[key] for row in rows) / 1e3 for key in ("dram_read_mb", "dram_written_mb")]
    ms = sum(row["us"] for row in rows) / 1e3
    traffic = f"DRAM read {sums[0]:.3f} GB, written {sums[1]:.3f} GB"
    print(f"\n{len(launches)} launches, {ms:.3f} ms of kernels; {traffic}")
    if args.stats:
        durations: dict[str, list[int]] = {}
        for launch in launches:
            durations.setdefault(launch["name"], []).append(round(launch["ns"]))
        write_statistics(args.stats, statistics_of(durations))
    return 0


def build_parser() -> Parser:
    parser = documented_parser("ncu", __doc__)
    parser.add_argument("what", choices=("show", "command"))
    parser.add_argument("file", type=Path, metavar="FILE.csv", help="of ncu --csv --page raw")
    parser.add_argument("--caches", choices=("all", "none"), default="all", help="emptied or not")
    parser.add_path("--stats", "FILE.csv", "also write the kernels in rocprofv3's form")
    return parser


main = program(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())

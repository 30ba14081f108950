"""What rocprof-compute counted on an AMD GPU: FLOP, bytes of HBM and time of each kernel."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from workshop.cli import ToolError
from workshop.profile.ceilings import Ceilings
from workshop.profile.kernels import category
from workshop.profile.roofline import make_row
from workshop.rocm.files import matching, read_columns

# What AMD's counters count, as rocprof-compute adds them up for its roofline: an instruction of the
# vector units works on 64 lanes, a unit of MFMA_MOPS is 512 operations. Beside them the column of
# roofline.csv with that unit's ceiling.
FLOP_COUNTERS = {
    f"SQ_INSTS_VALU_{operation}_F{bits}": (64 * flop, f"FP{bits}Flops")
    for bits in (16, 32, 64)
    for operation, flop in {"ADD": 1, "MUL": 1, "TRANS": 1, "FMA": 2}.items()
} | {
    f"SQ_INSTS_VALU_MFMA_MOPS_{kind}": (512, f"MFMA{kind}Flops")
    for kind in ("F16", "BF16", "F32", "F64")
}
# Bytes of HBM by the size of requests: all are of 64 (reads) or 32 bytes (writes) but for those
# counted apart.
WRITES = {"WRREQ_sum": 32, "WRREQ_64B_sum": 32}
READS = {"RDREQ_sum": 64, "RDREQ_32B_sum": -32}
BYTE_COUNTERS = {
    "MI350": {f"TCC_EA0_{n}": b for n, b in {"RDREQ_128B_sum": 64, **READS, **WRITES}.items()},
    "MI300": {"TCC_BUBBLE_sum": 64, **{f"TCC_EA0_{n}": b for n, b in {**READS, **WRITES}.items()}},
    "MI200": {f"TCC_EA_{n}": b for n, b in {**READS, **WRITES}.items()},
}


def read_rocprof_compute(directory: Path) -> tuple[str, Ceilings, list[dict]]:
    """Which GPU's counters are in the folder, the ceilings measured there, and a row per kernel,
    the longest first.

    ToolError says what is wrong with a file.
    """
    files = matching(directory, "pmc_perf.csv", "rocprof-compute")
    if len(files) > 1:
        several = ", ".join(str(file.parent) for file in files)
        raise ToolError(f"{directory}: several profiles ({several}), name one")
    with files[0].open(encoding="utf-8", errors="replace") as file:
        header = file.readline()
    known = BYTE_COUNTERS.items()
    found = [gpu for gpu, columns in known if all(column in header for column in columns)]
    gpu = found[0] if found else "MI300"
    counters = [*FLOP_COUNTERS, *BYTE_COUNTERS[gpu]]
    columns = ("Kernel_Name", "Start_Timestamp", "End_Timestamp", *counters)
    flop, moved, ns, calls, by_unit = (Counter() for _ in range(5))
    for name, *cells in read_columns(files[0], *columns):
        start, end, *values = (number(cell, files[0]) for cell in cells)
        counted = dict(zip(counters, values, strict=True))
        calls[name] += 1
        ns[name] += end - start
        sizes = BYTE_COUNTERS[gpu].items()
        moved[name] += round(sum(counted[column] * size for column, size in sizes))
        for column, (each, unit) in FLOP_COUNTERS.items():
            flop[name] += round(counted[column] * each)
            by_unit[unit] += counted[column] * each
    if not calls:
        raise ToolError(f"{files[0]}: it has no dispatches")
    unit, path = max(by_unit, key=by_unit.get), files[0].with_name("roofline.csv")
    best = [number(cell, path) for cell in (read_columns(path, "HBMBw", unit) or [()])[0]]
    if not best or not min(best) > 0:
        raise ToolError(f"{path}: it has no ceilings")
    ceilings = Ceilings(unit, 0, best[1] / 1e3, 0, best[0])  # the file has GB/s and GFLOP/s
    rows = []
    for name, spent in ns.most_common():
        names = {"kernel": name, "group": category(name).lower(), "calls": calls[name]}
        rows.append(make_row(names, flop, name, moved[name], spent / 1e6, ceilings))
    return gpu, ceilings, rows


def number(text: str, path: Path) -> float:
    """A finite number of a file; ToolError if it is none."""
    try:
        if math.isfinite(value := float(text)):
            return value
    except ValueError:
        pass
    raise ToolError(f"{path}: {text!r} is no number")

"""What rocprof-compute counted on an AMD GPU: FLOP, bytes of HBM and time of each kernel."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fusion_lab.cli import ToolError
from fusion_lab.profile.ceilings import Ceilings
from fusion_lab.profile.dispatches import Dispatch, read_counters, read_table
from fusion_lab.profile.kernels import category
from fusion_lab.profile.roofline import make_row
from fusion_lab.rocm.files import profiles

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


def read_rocprof_compute(directory: Path) -> tuple[str, Ceilings | None, list[dict]]:
    """Which GPU's counters are in the folder, the ceilings measured there, and a row per kernel,
    the longest first; ToolError says what is wrong with a file. What was executed and not measured
    has neither times nor ceilings, and what moves most is first."""
    (folder, files), *others = profiles(directory).items()
    if others:
        several = ", ".join(map(str, profiles(directory)))
        raise ToolError(f"{directory}: several profiles ({several}), name one")
    header, dispatches = read_counters(files)
    likely = "MI200" if any(name.startswith("TCC_EA_") for name in header) else "MI300"
    gpu = next((gpu for gpu, names in BYTE_COUNTERS.items() if {*names} <= {*header}), likely)
    refuse_incomplete(dispatches, (*FLOP_COUNTERS, *BYTE_COUNTERS[gpu]))
    flop, moved, ns, calls, by_unit = (Counter() for _ in range(5))
    for dispatch in dispatches:
        name, counted = dispatch.name, dispatch.row.number
        calls[name] += 1
        if dispatch.start is not None:
            ns[name] += dispatch.end - dispatch.start
        moved[name] += round(sum(counted(n) * size for n, size in BYTE_COUNTERS[gpu].items()))
        for column, (each, unit) in FLOP_COUNTERS.items():
            flop[name] += round(counted(column) * each)
            by_unit[unit] += counted(column) * each
    unit = max(by_unit, key=by_unit.get) if any(by_unit.values()) else None
    ceilings = read_ceilings(folder / "roofline.csv", unit) if ns else None
    rows = []
    for name, _ in (ns or moved).most_common():
        names = {"kernel": name, "group": category(name).lower(), "calls": calls[name]}
        ms = ns[name] / 1e6 if ns else None
        rows.append(make_row(names, flop, name, moved[name], ms, ceilings))
    return gpu, ceilings, rows


def refuse_incomplete(dispatches: Sequence[Dispatch], needed: Sequence[str]) -> None:
    """ToolError where a dispatch lacks counters, which then were not asked for, or went to others
    by --iteration-multiplexing."""
    for dispatch in dispatches:
        cells = dispatch.row.cells
        gap = [name for name in needed if cells.get(name, "").lower() in ("", "nan")]
        if gap:
            mend = "profile all of them, without --iteration-multiplexing"
            raise ToolError(f"{dispatch.row.place}: it lacks the counters {', '.join(gap)}: {mend}")


def read_ceilings(path: Path, unit: str | None) -> Ceilings:
    """The measured ceilings of HBM and of this unit, None where nothing computes. Releases that
    measure no FP16 of the vector units have FP32's for it, or none."""
    if not path.exists():
        raise ToolError(f"{path}: there are no ceilings, profile without --no-roof")
    header, rows = read_table(path, "HBMBw")
    if unit == "FP16Flops" and unit not in header:
        unit = "FP32Flops"
    wanted = ["HBMBw", *([unit] if unit in header else [])]
    best = [rows[0].number(name) for name in wanted] if rows else []
    if not best or not min(best) > 0:
        raise ToolError(f"{path}: it has no ceilings")
    tflops = best[1] / 1e3 if len(best) > 1 else None  # the file has GB/s and GFLOP/s
    return Ceilings(unit or "no FLOP", 0, tflops, 0, best[0])

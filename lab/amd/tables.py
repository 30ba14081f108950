"""What launches counted, in the forms of rocprofv3 and rocprof-compute, for all that reads such
files. The agent is "executed, not measured", and the cells of times are empty."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lab.amd.counters import Counts
from lab.amd.launch import Kernel
from lab.profile.dispatches import EXECUTED
from lab.show import write_csv


def dispatch(kernel: Kernel, counts: Counts) -> dict:
    """A launch as both tools describe it, and its counters."""
    start = kernel.program.descriptor
    described = {
        "Grid_Size": 64 * counts.waves,
        "Kernel_Name": kernel.program.name,
        "Workgroup_Size": 64 * kernel.waves,
        "LDS_Block_Size": kernel.lds,
        "Scratch_Size": start["private_segment_fixed_size"],
        "VGPR_Count": start["accum_offset"],
        "SGPR_Count": start["next_free_sgpr"],
        "Start_Timestamp": None,
        "End_Timestamp": None,
    }
    return described | counts.hardware()


def write_counters(folder: Path, target: str, dispatches: Sequence[dict]) -> None:
    """Write rocprofv3's counter_collection.csv, a row for each counter of a dispatch, and
    rocprof-compute's pmc_perf.csv, a row for each dispatch."""
    rocprofv3, rocprof_compute = [], []
    for number, row in enumerate(dispatches, 1):
        counters = {name: row[name] for name in row if name.startswith(("SQ_", "TCP_", "TCC_"))}
        described = {name: row[name] for name in row if name not in counters}
        first = {"Correlation_Id": number, "Dispatch_Id": number, "Agent_Id": EXECUTED}
        rocprofv3 += [
            first | described | {"Counter_Name": name, "Counter_Value": value}
            for name, value in counters.items()
        ]
        rocprof_compute.append({"Dispatch_ID": number, "GPU_ID": 0, "Agent_Id": EXECUTED} | row)
    write_csv(folder / "executed_counter_collection.csv", rocprofv3)
    write_csv(folder / f"workloads/executed/{target}/pmc_perf.csv", rocprof_compute)

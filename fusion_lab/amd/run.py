"""Execute the machine code of a program's Triton kernels for an MI300X (gfx942), on a CPU, and
compare what comes out.

The program runs in Triton's interpreter. Every launch is compiled for the GPU, and its assembly is
executed on the same tensors. Of a version script it is one training step, with the blocks that the
script chooses for AMD. Prints a table, and how many launches

  agree         each tensor is what the interpreter computed, by the rule of amd/agreement.py
  disagree      one is not, or there is an access outside of a tensor, a race in LDS, a barrier that
                not all waves reach, a loop without end
  not executed  the compiler refuses it, or its code has an instruction that is not known here

and whether the program failed itself. The exit status is 0 if all agree.

What the program prints is passed on to stderr. An error is a root mean square, as a share of a
tensor's values, or of their change where it is updated in place. Of a program's launches that
differ in the tensors' values only the first is executed, of a step all.

--counters writes what hardware would have counted in the forms of rocprofv3 and rocprof-compute:
executed, not measured. There are no times among it.

Examples:
  amd-run run my_kernels.py
  amd-run run my_training.py --rows 30 --counters counted
  amd-run run tiny_llama_v4.py --use-amp --num-layers 1 --seq-len 64 --batch-size 1
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fusion_lab.amd.agreement import difference
from fusion_lab.amd.assembly import Unknown
from fusion_lab.amd.compile import compiled_launch
from fusion_lab.amd.counters import Counts
from fusion_lab.amd.launch import TARGET, Kernel, run_grid
from fusion_lab.amd.memory import Fault
from fusion_lab.amd.record import Recorded, is_version, recorded
from fusion_lab.cli import Parser, documented_parser, note, program, say, sign_of_life
from fusion_lab.profile import dispatches
from fusion_lab.show import Column, render, write_csv

AGREE, DISAGREE, NOT_EXECUTED, FAILED = "agree", "disagree", "not executed", "program failed"


@dataclass
class Outcome:
    """Of a launch, with its largest error; or that the program failed."""

    kernel: str = ""
    error: float = 0.0
    outcome: str = AGREE
    remark: str = ""  # why it is another
    dispatch: dict = field(default_factory=dict)  # with its counters


def outcome_of(launch: Recorded, watch: bool = False) -> Outcome:
    """Compile and execute a recorded launch, and compare all storages."""
    storages = [storage.clone() for storage in launch.before]
    name = launch.kernel
    try:
        kernel = Kernel(compiled_launch(launch, TARGET))
        counts = run_grid(kernel, launch.grid, launch.with_tensors(storages), watch)
    except Fault as fault:
        return Outcome(name, outcome=DISAGREE, remark=str(fault))
    except Unknown as error:
        return Outcome(name, outcome=NOT_EXECUTED, remark=str(error))
    except Exception as error:  # of many kinds, down to a failed pass of the compiler
        reason = (str(error) or repr(error)).splitlines()[-1]
        return Outcome(name, outcome=NOT_EXECUTED, remark=f"{name}: {reason}")
    error, wrong = difference(launch, storages, counts.read, kernel.multiplies_in_xf32)
    done = Outcome(name, error, dispatch=dispatch(kernel, counts) if watch else {})
    if wrong:
        done.outcome, done.remark = DISAGREE, f"{name}: {wrong}"
    return done


def outcomes_of(file: Path, argv: Sequence[str], watch: bool = False) -> list[Outcome]:
    """Record a program's launches and execute them; of a program's that differ in values only the
    first, of a training step's all."""
    torch.set_num_threads(1)
    found, seen, repeats = [], set(), is_version(file)
    with recorded(file, argv) as (done, launches):
        for launch in launches:
            if repeats or launch.key() not in seen:
                seen.add(launch.key())
                found.append(outcome_of(launch, watch))
    say(*(f"{file.name} prints: {line}" for line in (done.stdout + done.stderr).splitlines()))
    if done.returncode:
        remark = f"it ended with status {done.returncode}"
        found.append(Outcome(outcome=FAILED, remark=remark))
    elif not found:
        found.append(Outcome(outcome=FAILED, remark="it launches no kernel"))
    lines = (f"{x.outcome}: {x.remark}" for x in found if x.outcome != AGREE)
    say(*(f"{file.name}: {line}" for line in dict.fromkeys(lines)))
    return found


def summary(found: Sequence[Outcome]) -> str:
    """How many launches agree, disagree or were not executed, and how many programs failed."""
    number = Counter(launch.outcome for launch in found)
    of_each = ", ".join(f"{number[name]} {name}" for name in (AGREE, DISAGREE, NOT_EXECUTED))
    failed = f"; {number[FAILED]} programs failed" if number[FAILED] else ""
    return f"{len(found) - number[FAILED]} launches: {of_each}{failed}"


# --- counters


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


def write_counters(folder: Path, rows: Sequence[dict]) -> None:
    """Write rocprofv3's counter_collection.csv, a row for each counter of a dispatch, and
    rocprof-compute's pmc_perf.csv, a row for each dispatch."""
    agent = {"Agent_Id": dispatches.EXECUTED}
    rocprofv3, rocprof_compute = [], []
    for number, row in enumerate(rows, 1):
        rocprof_compute.append({"Dispatch_ID": number, "GPU_ID": 0} | agent | row)
        counters = {name: row[name] for name in row if name.startswith(("SQ_", "TCP_", "TCC_"))}
        described = {name: row[name] for name in row if name not in counters}
        first = {"Correlation_Id": number, "Dispatch_Id": number} | agent | described
        for name, value in counters.items():
            rocprofv3.append(first | {"Counter_Name": name, "Counter_Value": value})
    write_csv(folder / "executed_counter_collection.csv", rocprofv3)
    write_csv(folder / f"workloads/executed/{TARGET}/pmc_perf.csv", rocprof_compute)


# --- the command


def table(found: Sequence[Outcome]) -> str:
    """A row for each kernel."""
    groups: dict[str, list[Outcome]] = {}
    for launch in found:
        if launch.outcome != FAILED:
            groups.setdefault(launch.kernel, []).append(launch)
    columns = [
        Column("kernel", lambda rows: rows[0].kernel),
        Column("launches", len, "d"),
        Column("agree", lambda rows: sum(row.outcome == AGREE for row in rows), "d"),
        Column("largest error", lambda rows: max(row.error for row in rows), ".1e"),
    ]
    return render(columns, list(groups.values()))


def run(args: argparse.Namespace, argv: list[str]) -> int:
    note(f"{args.file.name} runs in Triton's interpreter first, which is slow: give small sizes")
    with sign_of_life(args.file.name):
        found = outcomes_of(args.file, argv, bool(args.counters))
    print(table(found))
    if rows := [launch.dispatch for launch in found if launch.dispatch]:
        write_counters(args.counters, rows)
    compared = "the compiler's code with Triton's interpreter: a kernel whose idea is wrong agrees"
    print(f"\n{summary(found)} (compared: {compared})")
    return int(any(launch.outcome != AGREE for launch in found))


def build_parser() -> Parser:
    parser = documented_parser("amd-run run", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE.py")
    parser.add_path("--counters", "DIR", "write counters there")
    return parser


main = program(build_parser, run, of_scripts=True)

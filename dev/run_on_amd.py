#!/usr/bin/env python3
"""Execute the machine code of Triton kernels for AMD's GPUs, on a CPU, and compare what comes out.

A training step of each script, and each program of the exercises that has kernels, runs in Triton's
interpreter. Every launch is compiled for the GPU, as the script would launch it there, and its
assembly is executed on the same tensors (fusion_lab/amd). Prints a table, and how many launches

  agree         each tensor is what the interpreter computed, by the rule of amd/agreement.py
  disagree      one is not, or there is an access outside of a tensor, a race in LDS, a barrier that
                not all waves reach, a register that nobody wrote, a loop without end
  not executed  the compiler refuses it, or its code has an instruction that is not known here

and how many programs failed themselves. The exit status is 0 if all agree.

What a program prints is passed on to stderr. An error is a root mean square, as a share of a
tensor's values, or of their change where it is updated in place.

--counters writes what hardware would have counted in the forms of rocprofv3 and rocprof-compute:
executed, not measured. There are no times among it.

Examples:
  python dev/run_on_amd.py                       everything: an hour and more
  python dev/run_on_amd.py --quick               each kernel and precision: 4 minutes, two cores
  python dev/run_on_amd.py tiny_openfold_v4.py --dtype float32 --size odd --target gfx942
  python dev/run_on_amd.py my_kernels.py         what any program launches
  python dev/run_on_amd.py --write               and into results/amd/executed.json, case by case:
                                                   those that are not in it, or have changed since
  python dev/run_on_amd.py --summary             what this file says
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton: kernels are to be compiled
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # without it Triton 3.9 prints a warning

import torch

from fusion_lab.amd import checksums
from fusion_lab.cli import Parser, ToolError, documented_parser, note, program, say
from fusion_lab.files import ROOT, read_json, write_text
from fusion_lab.profile.dispatches import EXECUTED
from fusion_lab.script import load_script
from fusion_lab.show import Column, render, write_csv

RESULT = ROOT / "results/amd/executed.json"
SCRIPTS = sorted((path.name for path in ROOT.glob("tiny_*_v[34].py")), reverse=True)
PRECISIONS = {
    "float32": "",
    "bfloat16": "--use-amp",
    "float16": "--use-amp --amp-dtype float16",
}
# One layer or block launches all that several do. In "odd" little is a power of two or divisible by
# 16; "default" and "wide" have the widths, blocks and warps of compile_for_amd.py, with few rows,
# "full" all rows, whose number is a constant of two kernels. Their launches take long, so each
# machine code is executed once.
SIZES = {
    "tiny_llama": {
        "small": "--hidden-dim 64 --num-heads 4 --seq-len 32 --batch-size 2 --vocab-size 100",
        "odd": "--hidden-dim 80 --num-heads 5 --num-kv-heads 1 --intermediate-dim 101"
        " --vocab-size 103 --seq-len 27 --batch-size 3",
        "default": "--seq-len 64 --batch-size 1",
        "wide": "--hidden-dim 2048 --num-heads 16 --vocab-size 32000 --seq-len 528 --batch-size 1",
        "full": "",
    },
    "tiny_openfold": {
        "small": "--seq-len 10 --num-seqs 3 --batch-size 2 --msa-dim 32 --pair-dim 32"
        " --num-heads-msa 2 --num-heads-pair 2",
        "odd": "--msa-dim 96 --pair-dim 32 --num-seqs 7 --seq-len 27 --batch-size 1",
        "default": "--seq-len 40 --num-seqs 5 --batch-size 1",
        "wide": "--msa-dim 256 --num-heads-msa 8 --num-seqs 5 --seq-len 40 --batch-size 1",
    },
}
LARGE = ("default", "wide", "full")
IN_REGISTERS = ("float32", "bfloat16")  # what compile_for_amd.py --write is of
FLAGS = "flags"  # each fusion off in turn, at small sizes
SIZE_NAMES = [*SIZES["tiny_llama"], FLAGS]
PROGRAMS = (  # of the exercises, with the arguments that make them small
    "exercises/start/first_kernel.py",
    "exercises/tiny_llama_v3/add_relu.py --n 1000 --block 128",
    "exercises/tiny_llama_v3/rms_norm.py --rows 30 --dim 480",
    "exercises/tiny_openfold_v3/attention_bias_atomics.py --length 20 --rows 5 --group 3",
    f"exercises/tiny_llama_v4/one_launch.py {SIZES['tiny_llama']['small']}",
    "exercises/puzzles/all_puzzles.py --solution",
    "exercises/build_a_fusion/swiglu_backward.py --solution",
    "exercises/amd/kernels.py",
)
MIX = ("VALU", "VMEM", "LDS", "MFMA", "SALU", "SMEM", "BRANCH")
AGREE, DISAGREE, NOT_EXECUTED, FAILED = "agree", "disagree", "not executed", "program failed"


@dataclass(frozen=True)
class Case:
    """A program that launches kernels: a step of a script, or another with its command line."""

    script: str
    arguments: str = ""
    precision: str = ""
    size: str = ""

    @property
    def path(self) -> Path:
        return ROOT / self.script if (ROOT / self.script).is_file() else Path(self.script).resolve()

    def __str__(self) -> str:
        return " ".join(filter(None, (self.script, self.precision, self.size)))


@dataclass
class Executed:
    """A launch on a target, with its largest error; or that a program failed."""

    case: Case
    target: str
    kernel: str = ""  # its file and name
    source: str = ""  # checksums of its source and its machine code
    code: str = ""
    error: float = 0.0
    outcome: str = AGREE
    remark: str = ""  # why it is another
    dispatch: dict = field(default_factory=dict)  # with its counters


# --- the interpreter's side, in a process of its own


def record_step() -> None:
    """Record what a training step launches: folder, script and its arguments are on the command
    line."""
    os.environ["TRITON_INTERPRET"] = "1"
    from fusion_lab.amd.record import recording, saver

    folder, script, *argv = sys.argv[1:]
    module, cpu = load_script(script), torch.device("cpu")
    args = module.parse_args([*argv, "--device", "cpu"])
    # blocks and warps are those that the script chooses for AMD
    module.BACKEND, module.INTERPRETED = "hip", False
    module.wrap_triton = lambda kernel: kernel  # its own way in the interpreter is in float32
    module.shared_memory = lambda: 2**31
    module.use_settings(args)
    batch = module.make_batches(args, cpu, args.seed).next_batch()
    model = module.build_model(args, cpu)
    optimizer = module.build_optimizer(args, model)
    with recording(saver(Path(folder))):
        with torch.autocast("cpu", getattr(torch, args.amp_dtype), enabled=args.use_amp):
            loss = model(**batch)
        loss.backward()
        if args.use_amp and args.amp_dtype == "float16":  # as a gradient scaler does
            optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
        optimizer.step()


# --- the machine code's side, in workers


def execute_launch(
    case: Case, launch, target: str, watch: bool, codes: set[str]
) -> Executed | None:
    """Compile and execute a recorded launch, and compare all storages; None if its machine code is
    among those of a large case that have been executed."""
    from fusion_lab.amd.agreement import difference
    from fusion_lab.amd.assembly import Unknown
    from fusion_lab.amd.launch import Fault, Kernel, compiled_launch, run_grid

    file = Path(launch.file)
    source = checksums.of_kernels(file).get(launch.kernel, "")
    name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    done = Executed(case, target, f"{name}:{launch.kernel}", source)
    storages = [storage.clone() for storage in launch.before]
    try:
        compiled = compiled_launch(launch, target)
        done.code = checksums.of_code(compiled.asm["amdgcn"])
        if case.size in LARGE and done.code in codes:
            return None
        codes.add(done.code)
        kernel = Kernel(compiled)
        counts = run_grid(kernel, launch.grid, launch.with_tensors(storages), watch=watch)
    except Fault as fault:
        done.outcome, done.remark = DISAGREE, str(fault)
        return done
    except Unknown as error:
        done.outcome, done.remark = NOT_EXECUTED, str(error)
        return done
    except Exception as error:  # of many kinds, down to a failed pass of the compiler
        reason = (str(error) or repr(error)).splitlines()[-1]
        done.outcome, done.remark = NOT_EXECUTED, f"{launch.kernel}: {reason}"
        return done
    done.error, wrong = difference(launch, storages, counts.read, kernel.multiplies_in_xf32)
    if wrong:
        done.outcome, done.remark = DISAGREE, f"{launch.kernel}: {wrong}"
    if watch:
        done.dispatch = dispatch(kernel, counts)
    return done


def execute_case(
    case: Case, targets: list[str], watch: bool
) -> tuple[Case, list[Executed], list[str], float]:
    """Record a program's launches and execute each on each target; equal ones of a program that
    repeats them (same kernel, sizes and constants) once. Returns what it has printed, too."""
    from fusion_lab.amd.record import interpreted, launches_in

    torch.set_num_threads(1)
    began, found, seen, types = time.perf_counter(), [], set(), set()
    codes: dict[str, set[str]] = {target: set() for target in targets}
    with tempfile.TemporaryDirectory() as folder:
        is_step = bool(case.precision)
        what = (
            "from dev.run_on_amd import record_step; record_step()"
            if is_step
            else "from fusion_lab.amd.record import main; main()"
        )
        done = interpreted(["-c", what, folder, str(case.path), *case.arguments.split()])
        for launch in launches_in(Path(folder)):
            key = launch.key()
            types |= {getattr(value, "dtype", None) for value in launch.arguments.values()}
            if key in seen and not is_step:
                continue
            seen.add(key)
            done_now = [execute_launch(case, launch, t, watch, codes[t]) for t in targets]
            found += filter(None, done_now)
    failed, printed = "", []
    if done.returncode or not is_step:
        printed = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    if done.returncode:
        failed = f"it ended with status {done.returncode}"
    elif not found:
        failed = "it launches no kernel"
    elif is_step and getattr(torch, case.precision) not in types:
        failed = f"no kernel got a tensor in {case.precision}"
    if failed:
        found.append(Executed(case, targets[0], outcome=FAILED, remark=failed))
    return case, found, printed, time.perf_counter() - began


# --- counters


def dispatch(kernel, counts) -> dict:
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


def instruction_mix(dispatches: Sequence[dict]) -> str:
    """A table in the form of rocprof-compute's 10.1: the mean, least and most of the dispatches."""

    def per_wave(name: str) -> dict[str, object]:
        counts = [row[f"SQ_INSTS_{name}"] / row["SQ_WAVES"] for row in dispatches]
        return {"Metric": name, "Avg": sum(counts) / len(counts), "Min": min(counts),
                "Max": max(counts)}  # fmt: skip

    # there a matrix instruction is none of the vector unit
    dispatches = [
        r | {"SQ_INSTS_VALU": r["SQ_INSTS_VALU"] - r["SQ_INSTS_MFMA"]} for r in dispatches
    ]
    columns = [Column("Metric", "Metric"), *(Column(n, n, ".2f") for n in ("Avg", "Min", "Max"))]
    return render(columns, [per_wave(name) for name in MIX])


# --- what is executed, and what is said of it


def cases_of(scripts: Iterable[str], precisions: list[str], sizes: list[str]) -> Iterator[Case]:
    """Steps of version scripts at these sizes and precisions; other programs as they are."""
    for name in scripts:
        model = Path(name).name.rpartition("_v")[0]
        if model not in SIZES:
            script, _, arguments = name.partition(" ")
            yield Case(script, arguments)
            continue
        one = "--num-layers 1" if model == "tiny_llama" else "--num-blocks 1"
        for precision in precisions:
            always = f"{one} {PRECISIONS[precision]}"
            for size in (size for size in SIZES[model] if size in sizes):
                if size not in LARGE or precision in IN_REGISTERS:
                    yield Case(name, f"{always} {SIZES[model][size]}", precision, size)
            for flag, *_ in load_script(name).FUSIONS if FLAGS in sizes else ():
                arguments = f"{always} {SIZES[model]['small']} --disable-{flag}"
                yield Case(name, arguments, precision, f"no {flag}")


def execute_all(cases: dict[Case, list[str]], args: argparse.Namespace) -> Iterator[list[Executed]]:
    """Each case on its targets in a worker; what each prints goes to stderr, and one line for each
    and for each launch that does not agree."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(args.jobs, context) as pool:
        watch = bool(args.counters)
        jobs = [pool.submit(execute_case, c, targets, watch) for c, targets in cases.items()]
        for job in as_completed(jobs):
            try:
                case, launches, printed, seconds = job.result()
            except BrokenProcessPool as error:
                reason = "a worker ended, as where memory is short or the compiler crashes"
                raise ToolError(f"{reason}: fewer programs at once show where", 1) from error
            say(*(f"{case} prints: {line}" for line in printed))
            worst = max(launch.error for launch in launches)
            note(f"{case}: {outcomes(launches)}, largest error {worst:.1e}, {seconds:.0f} s")
            others = [launch for launch in launches if launch.outcome != AGREE]
            lines = (f"{case}, {x.target}: {x.outcome}: {x.remark}" for x in others)
            say(*dict.fromkeys(lines))
            yield launches


def outcomes(found: list[Executed]) -> str:
    number = Counter(launch.outcome for launch in found)
    launches = len(found) - number[FAILED]
    of_each = ", ".join(f"{number[name]} {name}" for name in (AGREE, DISAGREE, NOT_EXECUTED))
    failed = f"; {number[FAILED]} programs failed" if number[FAILED] else ""
    return f"{launches} launches: {of_each}{failed}"


def version(case: Case) -> dict[str, str]:
    """What a result depends on beside the kernels."""
    import triton  # not before record_step

    program = checksums.short(checksums.of_program(case.path) + case.arguments)
    return {"program": program, "triton": triton.__version__}


def rows_of(launches: list[Executed]) -> list[dict]:
    """What the result file has of a case: a row for each target."""
    rows = []
    for target in dict.fromkeys(launch.target for launch in launches):
        of_target = [launch for launch in launches if launch.target == target]
        worst, case = max(of_target, key=lambda launch: launch.error), launches[0].case
        rows.append(
            {
                "script": case.script,
                "target": target,
                "precision": case.precision,
                "size": case.size,
                **version(case),
                "kernels": dict(sorted({(x.kernel, x.source) for x in of_target if x.kernel})),
                "codes": sorted({launch.code for launch in of_target if launch.code}),
                "launches": sum(launch.outcome != FAILED for launch in of_target),
                "agree": sum(launch.outcome == AGREE for launch in of_target),
                "error": worst.error,
                "kernel": worst.kernel,
            }
        )
    return rows


SCHEMA, KEYS = 3, ("script", "target", "precision", "size")


def saved(path: Path = RESULT) -> dict[tuple, dict]:
    """The rows of a result file, by their keys."""
    if path == RESULT and not path.exists():
        return {}
    content = read_json(path)
    if content.get("schema_version") != SCHEMA:
        raise ToolError(f"{path}: not written by this program, or by an earlier version of it")
    return {tuple(row[key] for key in KEYS): row for row in content["rows"]}


def save(rows: list[dict]) -> None:
    """Put rows into the result file, in place of those of the same cases and targets."""
    kept = saved() | {tuple(row[key] for key in KEYS): row for row in rows}
    lines = ",\n".join(json.dumps(kept[key]) for key in sorted(kept))
    content = f'{{"schema_version": {SCHEMA}, "rows": [\n{lines}\n]}}\n'
    write_text(RESULT, content, replace=True)


def stale(row: dict) -> bool:
    """Whether a kernel of a saved row has changed since, or is gone."""
    found = ((name.partition(":"), checksum) for name, checksum in row["kernels"].items())
    return any(
        checksums.of_kernels(ROOT / file).get(kernel) != checksum
        for (file, _, kernel), checksum in found
    )


def not_saved(cases: list[Case], targets: list[str]) -> dict[Case, list[str]]:
    """The cases that the result file does not have as they are now, with the targets of each."""
    rows, missing = saved(), {}
    for case in cases:
        now = version(case)
        for target in targets:
            row = rows.get((case.script, target, case.precision, case.size))
            if not row or any(row[key] != now[key] for key in now) or stale(row):
                missing.setdefault(case, []).append(target)
    return missing


def table(rows: Iterable[dict]) -> str:
    """All sizes of a program, target and precision in a row. What is stale does not agree."""
    groups: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=lambda row: (row["script"], row["target"], row["precision"])):
        groups.setdefault((row["script"], row["target"], row["precision"]), []).append(row)

    def worst(rows: list[dict]) -> dict:
        return max(rows, key=lambda row: row["error"])

    columns = [
        Column("program", lambda rows: rows[0]["script"].removeprefix("exercises/")),
        Column("GPU", lambda rows: rows[0]["target"], text=True),
        Column("precision", lambda rows: rows[0]["precision"] or None, text=True),
        Column("sizes", len, "d"),
        Column("kernels", lambda rows: len({k for row in rows for k in row["kernels"]}), "d"),
        Column("codes", lambda rows: len({c for row in rows for c in row["codes"]}), "d"),
        Column("launches", lambda rows: sum(row["launches"] for row in rows), "d"),
        Column("agree", lambda rows: sum(row["agree"] for row in rows if not stale(row)), "d"),
        Column("stale", lambda rows: sum(row["launches"] for row in rows if stale(row)), "d"),
        Column("largest error", lambda rows: worst(rows)["error"], ".1e"),
        Column("in", lambda rows: worst(rows)["kernel"].rpartition(":")[2], text=True),
    ]
    return render(columns, list(groups.values()))


def run(args: argparse.Namespace) -> int:
    if args.summary:
        print(table(saved(args.summary).values()))
        return 0
    if args.quick:
        args.size = ["small", "odd"]
    scripts = args.scripts or [*SCRIPTS, *PROGRAMS]
    cases = list(cases_of(scripts, args.dtype, args.size))
    if not cases:
        raise ToolError(f"large sizes are executed in {' and '.join(IN_REGISTERS)} only")
    wanted = dict.fromkeys(cases, args.target)
    if args.write and not args.counters:
        wanted = not_saved(cases, args.target)
    note(f"{len(wanted)} of {len(cases)} programs and steps for {', '.join(args.target)}")
    found: list[Executed] = []
    rows: list[dict] = []
    for launches in execute_all(wanted, args):
        found += launches
        rows += (new := rows_of(launches))
        if args.write and all(launch.outcome == AGREE for launch in launches):
            save(new)
    if rows:
        print(table(rows))
    if args.counters:
        for target in args.target:
            of_target = [x.dispatch for x in found if x.dispatch and x.target == target]
            folder = args.counters if len(args.target) == 1 else args.counters / target
            if of_target:
                write_counters(folder, target, of_target)
                print(f"\n{target}, instructions per wave of a launch, executed, not measured:")
                print(f"\n{instruction_mix(of_target)}")
    compared = "the compiler's code with Triton's interpreter: a kernel whose idea is wrong agrees"
    print(f"\n{outcomes(found)} (compared: {compared})")
    return int(any(launch.outcome != AGREE for launch in found))


def build_parser() -> Parser:
    from fusion_lab.amd.launch import TARGETS

    parser = documented_parser(__file__, __doc__)

    def add(flag: str, default: list[str], choices: Iterable[str], remark: str) -> None:
        text = f"of {', '.join(choices)} (default: {remark})"
        parser.add_argument(
            flag, nargs="+", choices=list(choices), default=default, metavar="NAME", help=text
        )

    text = "(default: all from V3 on, and the programs of the exercises)"
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT.py", help=text)
    add("--target", ["gfx942"], TARGETS, "gfx942")
    add("--dtype", list(PRECISIONS), PRECISIONS, "all")
    add("--size", SIZE_NAMES, SIZE_NAMES, "all")
    parser.add_flag("--quick", "small and odd sizes only")
    parser.add_count("--jobs", 2, "processes")
    parser.add_path("--counters", "DIR", "write counters there")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help=f"put what agrees into {RESULT.name}")
    text = "print what such a file says (default: the one in results/)"
    what.add_argument("--summary", nargs="?", type=Path, const=RESULT, metavar="FILE", help=text)
    return parser


main = program(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Renew results/amd: which kernels of V3, V4 and the exercises compile for AMD's GPUs, and which
were executed there.

  registers  compiles each kernel at the default and wide sizes: registers.csv, a row for each
             configuration, with what it takes of a compute unit
  executed   executes each launch of a training step, and of the exercises' programs, for an MI300X,
             and compares it with Triton's interpreter: executed.json, a row for each program

A row has the commit of which it is; of a changed tree the name ends with -dirty. Rows are written
when all of a script is compiled without spills, and when all launches of a program agree.

Examples:
  python dev/amd_results.py registers --write                  minutes
  python dev/amd_results.py executed --write                   an hour and more
  python dev/amd_results.py executed --quick                   small sizes: 4 minutes, two cores
  python dev/amd_results.py executed tiny_openfold_v4.py --dtype float32 --size odd
  python dev/amd_results.py executed --summary                 what the file says
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton: kernels are to be compiled
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # without it Triton 3.9 prints a warning

import triton

from fusion_lab.amd import run as executing
from fusion_lab.amd.compile import (
    FIELDS,
    TARGETS,
    Launch,
    compile_all,
    launches_of_step,
    problem,
)
from fusion_lab.cli import Parser, ToolError, documented_parser, note, program, say
from fusion_lab.files import ROOT, read_json, write_text
from fusion_lab.provenance import output_of
from fusion_lab.script import load_script
from fusion_lab.show import Column, render, write_csv

REGISTERS, EXECUTED = ROOT / "results/amd/registers.csv", ROOT / "results/amd/executed.json"
SCRIPTS = sorted((path.name for path in ROOT.glob("tiny_*_v[34].py")), reverse=True)
COMPILED_FOR, EXECUTED_FOR = ("gfx90a", "gfx942", "gfx950"), "gfx942"
PRECISIONS = {
    "float32": "",
    "bfloat16": "--use-amp",
    "float16": "--use-amp --amp-dtype float16",
}
# One layer or block launches all that several do. "wide" is wider than the defaults. In "odd"
# little is a power of two or divisible by 16.
ONE = {"tiny_llama": "--num-layers 1", "tiny_openfold": "--num-blocks 1"}
COMPILED = {
    "tiny_llama": {
        "default": "",
        "wide": "--hidden-dim 2048 --num-heads 16 --vocab-size 32000 --seq-len 512",
    },
    "tiny_openfold": {
        "default": "",
        "wide": "--msa-dim 256 --num-heads-msa 8 --num-seqs 128 --seq-len 256 --batch-size 1",
    },
}
# with few rows, as each takes long here; of large sizes what differs in values is executed once
EXECUTED_SIZES = {
    "tiny_llama": {
        "small": "--hidden-dim 64 --num-heads 4 --seq-len 32 --batch-size 2 --vocab-size 100",
        "odd": "--hidden-dim 80 --num-heads 5 --num-kv-heads 1 --intermediate-dim 101"
        " --vocab-size 103 --seq-len 27 --batch-size 3",
        "default": "--seq-len 64 --batch-size 1",
        "wide": "--hidden-dim 2048 --num-heads 16 --vocab-size 32000 --seq-len 528 --batch-size 1",
    },
    "tiny_openfold": {
        "small": "--seq-len 10 --num-seqs 3 --batch-size 2 --msa-dim 32 --pair-dim 32"
        " --num-heads-msa 2 --num-heads-pair 2",
        "odd": "--msa-dim 96 --pair-dim 32 --num-seqs 7 --seq-len 27 --batch-size 1",
        "default": "--seq-len 40 --num-seqs 5 --batch-size 1",
        "wide": "--msa-dim 256 --num-heads-msa 8 --num-seqs 5 --seq-len 40 --batch-size 1",
    },
}
QUICK, LARGE, SIZE_NAMES = ("small", "odd"), ("default", "wide"), [*EXECUTED_SIZES["tiny_llama"]]
PROGRAMS = (  # of the exercises, with the arguments that make them small
    "exercises/start/first_kernel.py",
    "exercises/tiny_llama_v3/add_relu.py --n 1000 --block 128",
    "exercises/tiny_llama_v3/rms_norm.py --rows 30 --dim 480",
    "exercises/puzzles/all_puzzles.py --solution",
    "exercises/build_a_fusion/swiglu_backward.py --solution",
    "exercises/amd/kernels.py",
)


def model_of(script: str) -> str:
    """tiny_llama of tiny_llama_v3.py."""
    return Path(script).name.rpartition("_v")[0]


def commit() -> str:
    """Of this tree, without regard to its results."""
    changes = output_of("git", "status", "--porcelain", "--", ":!results").strip()
    return output_of("git", "rev-parse", "--short=8", "HEAD").strip() + "-dirty" * bool(changes)


# --- registers


def compiled_rows(script: str, target: str, precisions: Sequence[str]) -> list[dict]:
    """A row for each kernel and configuration of a script; `error` says what is wrong with it."""
    module, model = load_script(script), model_of(script)
    launches: dict[tuple, Launch] = {}
    seen_in: dict[tuple, list[str]] = {}
    backend = TARGETS[target][0].backend
    for size, precision in itertools.product(COMPILED[model].values(), precisions):
        argv = f"{ONE[model]} {size} {PRECISIONS[precision]}".split()
        for launch in launches_of_step(module, argv, backend):
            launches.setdefault(launch.key(), launch)
            names = seen_in.setdefault(launch.key(), [])
            names += [precision] * (precision not in names)
    rows, now = [], commit()
    for launch, needs in zip(
        launches.values(), compile_all([*launches.values()], target), strict=True
    ):
        row = {"script": Path(script).stem, "target": target, "kernel": launch.name}
        row |= {"precisions": ", ".join(seen_in[launch.key()]), "constants": str(launch)}
        row |= dict.fromkeys(FIELDS) if isinstance(needs, str) else asdict(needs)
        wrong = problem(target, needs)
        what = f"{row['script']}: {launch.name} in {row['precisions']} ({launch}): {target}"
        rows.append(row | {"commit": now, "error": f"{what} {wrong}" if wrong else ""})
    return sorted(rows, key=itemgetter("kernel"))


def saved_registers(path: Path) -> list[dict]:
    """The rows of such a file, numbers as numbers."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    try:
        # waves of a SIMD can be a half
        return [
            row | {name: float(row[name]) if name == "waves" else int(row[name]) for name in FIELDS}
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ToolError(f"{path}: {error!r}") from error


def table_of_registers(rows: Sequence[dict]) -> str:
    """A row for each script and GPU: what its kernels need at most."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        both = row["vgprs"] + row["agprs"]
        groups.setdefault((row["script"], row["target"]), []).append(row | {"registers": both})

    def most(name: str, shown: Callable[[dict], str]) -> Callable[[list[dict]], str]:
        def cell(rows: list[dict]) -> str:
            row = max(rows, key=itemgetter(name))
            return f"{shown(row)} ({row['kernel']})"

        return cell

    lds = most("lds", lambda row: f"{row['lds'] / 1024:.3g} of {TARGETS[row['target']][1]}")
    registers = most("registers", lambda row: f"{row['registers']:g} of 512")
    columns = [
        Column("script", lambda rows: rows[0]["script"]),
        Column("GPU", lambda rows: rows[0]["target"], text=True),
        Column("kernels", lambda rows: len({row["kernel"] for row in rows})),
        Column("rows", len),
        Column("spills", lambda rows: sum(row["spills"] + row["sgpr_spills"] for row in rows), "g"),
        Column("LDS at most, KiB", lds, text=True),
        Column("VGPRs and AGPRs at most", registers, text=True),
        Column("fewest waves", lambda rows: min(row["waves"] for row in rows), "g"),
    ]
    return render(columns, list(groups.values()))


def compile_scripts(args: argparse.Namespace) -> int:
    """Compile all, and print the table or put the rows into the file, script by script."""
    if unknown := [name for name in args.scripts if model_of(name) not in ONE]:
        raise ToolError(f"{unknown[0]}: give a version of {' or '.join(ONE)}")
    status = 0
    for script, target in itertools.product(args.scripts or SCRIPTS, COMPILED_FOR):
        rows = compiled_rows(script, target, [x for x in args.dtype if x != "float16"])
        wrong = [row.pop("error") for row in rows]
        say(*filter(None, wrong))
        if any(wrong):
            status = 1
        elif args.write:
            done = (Path(script).stem, target)
            others = saved_registers(REGISTERS) if REGISTERS.exists() else []
            kept = [row for row in others if (row["script"], row["target"]) != done]
            kept = sorted([*kept, *rows], key=itemgetter("script", "target"))
            write_csv(REGISTERS, kept)
        print(f"{table_of_registers(rows)}\n")
    return status


# --- executed


@dataclass(frozen=True)
class Case:
    """A program that launches kernels: a step of a script, or another with its command line."""

    script: str
    arguments: str
    precision: str = ""
    size: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.script, self.precision, self.size)))


def cases_of(args: argparse.Namespace) -> Iterator[Case]:
    """Steps of version scripts at these sizes and precisions; other programs as they are."""
    sizes = QUICK if args.quick else args.size
    for name in args.scripts or [*SCRIPTS, *PROGRAMS]:
        model = model_of(name)
        if model not in ONE:
            script, _, arguments = name.partition(" ")
            yield Case(script, arguments)
            continue
        for precision, size in itertools.product(args.dtype, sizes):
            arguments = f"{ONE[model]} {PRECISIONS[precision]} {EXECUTED_SIZES[model][size]}"
            yield Case(name, arguments, precision, size)


def execute(case: Case) -> list[executing.Outcome]:
    """Runs in a worker."""
    once = not case.precision or case.size in LARGE
    return executing.outcomes_of(
        ROOT / case.script, case.arguments.split(), EXECUTED_FOR, once=once
    )


def row_of(case: Case, found: Sequence[executing.Outcome]) -> dict:
    """What the file has of a case."""
    launches = [launch for launch in found if launch.outcome != executing.FAILED]
    worst = max(found, key=lambda launch: launch.error)
    return {
        "script": case.script,
        "target": EXECUTED_FOR,
        "precision": case.precision,
        "size": case.size,
        "commit": commit(),
        "triton": triton.__version__,
        "kernels": sorted({launch.kernel for launch in launches}),
        "launches": len(launches),
        "agree": sum(launch.outcome == executing.AGREE for launch in launches),
        "error": worst.error,
        "kernel": worst.kernel,
    }


def saved_executed(path: Path) -> list[dict]:
    content = read_json(path)
    if content.get("schema_version") != 4:
        raise ToolError(f"{path}: not written by this program, or by an earlier version of it")
    return content["rows"]


def save_executed(row: dict) -> None:
    """Put a row into the file, in place of that of the same case."""
    key = itemgetter("script", "target", "precision", "size")
    rows = saved_executed(EXECUTED) if EXECUTED.exists() else []
    rows = sorted([*(old for old in rows if key(old) != key(row)), row], key=key)
    lines = ",\n".join(map(json.dumps, rows))
    write_text(EXECUTED, f'{{"schema_version": 4, "rows": [\n{lines}\n]}}\n')


def table_of_executed(rows: Sequence[dict]) -> str:
    """All sizes of a program and precision in a row."""
    groups: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=itemgetter("script", "precision")):
        groups.setdefault((row["script"], row["precision"]), []).append(row)

    def worst(rows: list[dict]) -> dict:
        return max(rows, key=itemgetter("error"))

    def total(name: str) -> Column:
        return Column(name, lambda rows: sum(row[name] for row in rows), "d")

    columns = [
        Column("program", lambda rows: rows[0]["script"].removeprefix("exercises/")),
        Column("precision", lambda rows: rows[0]["precision"] or None, text=True),
        Column("sizes", lambda rows: ", ".join(r["size"] for r in rows) or None, text=True),
        Column("kernels", lambda rows: len({k for row in rows for k in row["kernels"]}), "d"),
        total("launches"),
        total("agree"),
        Column("largest error", lambda rows: worst(rows)["error"], ".1e"),
        Column("in", lambda rows: worst(rows)["kernel"], text=True),
        Column("commit", lambda rows: ", ".join({r["commit"]: 0 for r in rows}), text=True),
    ]
    return render(columns, list(groups.values()))


def execute_programs(args: argparse.Namespace) -> int:
    """Execute all cases in workers, and print the table or put rows into the file."""
    rows, found = [], []
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(args.jobs, context) as pool:
        jobs = {pool.submit(execute, case): case for case in cases_of(args)}
        for job in as_completed(jobs):
            try:
                launches = job.result()
            except BrokenProcessPool as error:
                raise ToolError("a worker ended: is memory short?", 1) from error
            found += launches
            rows.append(row_of(jobs[job], launches))
            note(f"{jobs[job]}: {executing.summary(launches)}")
            if args.write and rows[-1]["agree"] == len(launches):
                save_executed(rows[-1])
    print(f"{table_of_executed(rows)}\n\n{executing.summary(found)}")
    return int(any(launch.outcome != executing.AGREE for launch in found))


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("what", choices=("registers", "executed"))
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT.py", help="(default: all)")

    def add(flag: str, choices: Sequence[str]) -> None:
        help = f"of {', '.join(choices)} (default: all)"
        parser.add_argument(
            flag, nargs="+", choices=choices, default=choices, metavar="NAME", help=help
        )

    add("--dtype", [*PRECISIONS])
    add("--size", SIZE_NAMES)
    parser.add_flag("--quick", "small and odd sizes only")
    parser.add_count("--jobs", 2, "processes")
    parser.add_flag("--write", "put what is right into the file")
    help = "print what such a file says (default: the one in results/)"
    parser.add_argument("--summary", nargs="?", type=Path, const=Path(), metavar="FILE", help=help)
    return parser


def run(args: argparse.Namespace) -> int:
    compiles = args.what == "registers"
    if args.summary is None:
        return compile_scripts(args) if compiles else execute_programs(args)
    default = REGISTERS if compiles else EXECUTED
    path = default if args.summary == Path() else args.summary
    rows = saved_registers(path) if compiles else saved_executed(path)
    print(table_of_registers(rows) if compiles else table_of_executed(rows))
    return 0


main = program(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())

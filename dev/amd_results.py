#!/usr/bin/env python3
"""Renew results/amd: which kernels of V3, V4 and the exercises compile for AMD's GPUs, and which
were executed there.

  registers  compiles each kernel at the default and wide sizes: registers.csv, a row for each
             configuration, with what it takes of a compute unit
  executed   executes each launch of a training step at two small sizes, and of the exercises'
             programs, for an MI300X, and compares it with Triton's interpreter: executed.json, a
             row for each program

A row has the commit of which it is; of a changed tree the name ends with -dirty. Rows are written
when all of a script is compiled without spills, and when all launches of a program agree.

Examples:
  python dev/amd_results.py registers --write                     minutes
  python dev/amd_results.py executed --write                      4 minutes, two cores
  python dev/amd_results.py executed --summary                    what the file says
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton: kernels are to be compiled
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # without it Triton 3.9 prints a warning

import triton

from fusion_lab.amd import run as executing
from fusion_lab.amd.compile import TARGETS, Launch, compile_all, launches_of_step, problem
from fusion_lab.amd.launch import TARGET
from fusion_lab.cli import Parser, ToolError, documented_parser, note, program, say
from fusion_lab.files import ROOT, read_json, write_text
from fusion_lab.provenance import output_of
from fusion_lab.script import load_script, model_and_version
from fusion_lab.show import Column, render, write_csv

REGISTERS, EXECUTED = ROOT / "results/amd/registers.csv", ROOT / "results/amd/executed.json"
SCRIPTS = sorted((path.name for path in ROOT.glob("tiny_*_v[34].py")), reverse=True)
COMPILED_FOR = ("gfx90a", "gfx942", "gfx950")
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
EXECUTED_SIZES = {
    "tiny_llama": {
        "small": "--hidden-dim 64 --num-heads 4 --seq-len 32 --batch-size 2 --vocab-size 100",
        "odd": "--hidden-dim 80 --num-heads 5 --num-kv-heads 1 --intermediate-dim 101"
        " --vocab-size 103 --seq-len 27 --batch-size 3",
    },
    "tiny_openfold": {
        "small": "--seq-len 10 --num-seqs 3 --batch-size 2 --msa-dim 32 --pair-dim 32"
        " --num-heads-msa 2 --num-heads-pair 2",
        "odd": "--msa-dim 96 --pair-dim 32 --num-seqs 7 --seq-len 27 --batch-size 1",
    },
}
PROGRAMS = (  # of the exercises, with the arguments that make them small
    "exercises/start/first_kernel.py",
    "exercises/tiny_llama_v3/add_relu.py --n 1000 --block 128",
    "exercises/tiny_llama_v3/rms_norm.py --rows 30 --dim 480",
    "exercises/puzzles/all_puzzles.py --solution",
    "exercises/build_a_fusion/swiglu_backward.py --solution",
    "exercises/amd/kernels.py",
)


def commit() -> str:
    """Of this tree, without regard to its results."""
    changes = output_of("git", "status", "--porcelain", "--", ":!results").strip()
    return output_of("git", "rev-parse", "--short=8", "HEAD").strip() + "-dirty" * bool(changes)


# --- registers


def compiled_rows(script: str, target: str) -> tuple[list[dict], list[str]]:
    """A row for each kernel and configuration of a script, and what is wrong with any."""
    module, (model, _) = load_script(script), model_and_version(Path(script).stem)
    backend = TARGETS[target][0].backend
    launches: dict[tuple, Launch] = {}
    seen_in: dict[tuple, dict[str, None]] = {}
    for size, precision in itertools.product(COMPILED[model].values(), ("float32", "bfloat16")):
        argv = f"{ONE[model]} {size} {PRECISIONS[precision]}".split()
        for launch in launches_of_step(module, argv, backend):
            launches.setdefault(launch.key(), launch)
            seen_in.setdefault(launch.key(), {})[precision] = None
    rows, wrong, now = [], [], commit()
    compiled = compile_all([*launches.values()], target)
    for (key, launch), needs in zip(launches.items(), compiled, strict=True):
        if remark := problem(target, needs):
            wrong.append(f"{script}: {launch.name} ({launch}): {target} {remark}")
            continue
        row = {"script": Path(script).stem, "target": target, "kernel": launch.name}
        row |= {"precisions": ", ".join(seen_in[key]), "constants": str(launch)}
        rows.append(row | asdict(needs) | {"commit": now})
    return sorted(rows, key=itemgetter("kernel")), wrong


def compile_scripts(args: argparse.Namespace) -> int:
    """Compile all, and put the rows into the file, script by script."""
    if unknown := {*args.scripts} - {*SCRIPTS}:
        raise ToolError(f"{unknown.pop()}: give one of {', '.join(SCRIPTS)}")
    status = 0
    for script, target in itertools.product(args.scripts or SCRIPTS, COMPILED_FOR):
        rows, wrong = compiled_rows(script, target)
        print(f"{script}, {target}: {len(rows)} of {len(rows) + len(wrong)} configurations fit")
        say(*wrong)
        if wrong:
            status = 1
        elif args.write:
            with REGISTERS.open(newline="", encoding="utf-8") as file:
                saved = [*csv.DictReader(file)]
            done = (Path(script).stem, target)
            kept = [row for row in saved if (row["script"], row["target"]) != done]
            write_csv(REGISTERS, sorted([*kept, *rows], key=itemgetter("script", "target")))
    return status


# --- executed


class Case(NamedTuple):
    """A program that launches kernels: a step of a script, or another with its command line."""

    script: str
    arguments: str
    precision: str = ""
    size: str = ""


def cases_of(programs: Sequence[str]) -> Iterator[Case]:
    """Steps of version scripts at these sizes and precisions; other programs as they are."""
    for name in programs:
        script, _, arguments = name.partition(" ")
        if script not in SCRIPTS:
            yield Case(script, arguments)
            continue
        model, _ = model_and_version(Path(script).stem)
        for precision, size in itertools.product(PRECISIONS, EXECUTED_SIZES[model]):
            arguments = f"{ONE[model]} {PRECISIONS[precision]} {EXECUTED_SIZES[model][size]}"
            yield Case(script, arguments, precision, size)


def row_of(case: Case, found: Sequence[executing.Outcome]) -> dict:
    """What the file has of a case."""
    launches = [launch for launch in found if launch.outcome != executing.FAILED]
    worst = max(found, key=lambda launch: launch.error)
    return {
        "script": case.script,
        "target": TARGET,
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


def saved_rows() -> list[dict]:
    """The rows of the file."""
    content = read_json(EXECUTED)
    if content.get("schema_version") != 4:
        raise ToolError(f"{EXECUTED}: not written by this program, or by an earlier version of it")
    return content["rows"]


def save(row: dict) -> None:
    """Put a row into the file, in place of that of the same case."""
    key = itemgetter("script", "target", "precision", "size")
    rows = sorted([*(old for old in saved_rows() if key(old) != key(row)), row], key=key)
    lines = ",\n".join(map(json.dumps, rows))
    write_text(EXECUTED, f'{{"schema_version": 4, "rows": [\n{lines}\n]}}\n')


def table_of(rows: Sequence[dict]) -> str:
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
        jobs = {}
        for case in cases_of(args.scripts or [*SCRIPTS, *PROGRAMS]):
            command = ROOT / case.script, case.arguments.split()
            jobs[pool.submit(executing.outcomes_of, *command)] = case
        for job in as_completed(jobs):
            try:
                launches = job.result()
            except BrokenProcessPool as error:
                raise ToolError("a worker ended: is memory short?", 1) from error
            case = jobs[job]
            found += launches
            rows.append(row_of(case, launches))
            note(f"{case.script} {case.precision} {case.size}: {executing.summary(launches)}")
            if args.write and rows[-1]["agree"] == len(launches):
                save(rows[-1])
    print(f"{table_of(rows)}\n\n{executing.summary(found)}")
    return int(any(launch.outcome != executing.AGREE for launch in found))


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("what", choices=("registers", "executed"))
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT.py", help="(default: all)")
    parser.add_count("--jobs", 2, "processes")
    parser.add_flag("--write", "put what is right into the file")
    parser.add_flag("--summary", "execute nothing: print what results/amd/executed.json says")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.what == "registers":
        return compile_scripts(args)
    if args.summary:
        print(table_of(saved_rows()))
        return 0
    return execute_programs(args)


main = program(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())

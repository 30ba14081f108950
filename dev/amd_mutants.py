#!/usr/bin/env python3
"""What "agree" is worth: change one instruction of a kernel's machine code at a time, and count how
many of these mutants are noticed.

The launches of a training step of TinyLlama V4 (small sizes) are recorded in Triton's interpreter,
and compiled for an MI300X. Of each kernel's machine code some instructions that are executed are
dropped, or compute something else. Each mutant is executed on the launch's tensors and compared as
dev/run_on_amd.py does; those that change no bit of a tensor are counted apart. In float32 each
barrier of these kernels is dropped, too, one at a time.

For comparison the same mutants are held to one limit for a launch: that of its narrowest type, of
each tensor's largest value.

Examples:
  python dev/amd_mutants.py --write        15 minutes; into results/amd/mutants.json
  python dev/amd_mutants.py --each 2 --dtype bfloat16
  python dev/amd_mutants.py --summary
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton: kernels are to be compiled
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # without it Triton 3.9 prints a warning

import torch

from dev.run_on_amd import PRECISIONS, cases_of
from fusion_lab.amd import checksums
from fusion_lab.cli import Parser, ToolError, documented_parser, note, program
from fusion_lab.files import ROOT, read_json, write_text
from fusion_lab.show import Column, render

RESULT = ROOT / "results/amd/mutants.json"
SCRIPT, SIZE, TARGET = "tiny_llama_v4.py", "small", "gfx942"
BARRIERS = "float32"  # they are much the same in others
MOST = 20_000  # instructions: no launch here executes as many, and mutants loop without end
OTHERS = {"_add_": "_sub_", "_sub_": "_add_", "_mul_": "_add_", "_max_": "_min_", "_min_": "_max_",
          "_lt_": "_le_", "_gt_": "_ge_", "_eq_": "_ne_", "_fma_": "_mul_", "_and_": "_or_",
          "_or_": "_and_", "lshlrev": "lshrrev", "row_shr:": "row_shl:"}  # fmt: skip
CHANGED = re.compile(r"\t(v_|ds_|buffer_|global_|s_(?!nop|waitcnt|branch|endpgm|barrier|load))")
ONE_LIMIT = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@dataclass
class Outcome:
    changed: bool  # any bit of a tensor, or it stopped
    noticed: bool
    by_one_limit: bool


class Subject:
    """A launch and its machine code."""

    def __init__(self, launch):
        from fusion_lab.amd.launch import compiled_launch

        self.launch, self.compiled = launch, compiled_launch(launch, TARGET)
        self.lines = self.compiled.asm["amdgcn"].splitlines()
        self.storages, self.counts = self.execute(self.lines)

    def execute(self, lines: list[str]):
        from fusion_lab.amd.launch import Kernel, run_grid

        storages = [storage.clone() for storage in self.launch.before]
        kernel = Kernel(self.compiled, "\n".join(lines))
        counts = run_grid(kernel, self.launch.grid, self.launch.with_tensors(storages))
        return storages, counts

    def executed(self) -> list[int]:
        """The numbers of lines with an instruction that the launch executes."""
        inside = range(len(self.lines))
        places = [i for i in inside if re.match(r"\t[a-z]\w+", self.lines[i])]
        times = self.counts.executed.tolist()
        return [i for i, n in zip(places, times, strict=False) if n]

    def outcome(self, place: int, line: str) -> Outcome | None:
        """Of the code with another line there; None if it cannot be executed."""
        from fusion_lab.amd.agreement import difference
        from fusion_lab.amd.assembly import Unknown
        from fusion_lab.amd.memory import Fault

        try:
            storages, counts = self.execute([*self.lines[:place], line, *self.lines[place + 1 :]])
        except Unknown:
            return None
        except Fault as fault:
            return Outcome(True, True, "which nobody has written" not in str(fault))
        changed = any(not torch.equal(*pair) for pair in zip(storages, self.storages, strict=True))
        _, wrong = difference(self.launch, storages, counts.read, xf32=False)
        return Outcome(changed, bool(wrong), self.beyond_one_limit(storages))

    def beyond_one_limit(self, storages: list[torch.Tensor]) -> bool:
        views = [view for view in self.launch.arguments.values() if hasattr(view, "storage")]
        limit = max(ONE_LIMIT.get(view.dtype, 0.0) for view in views)
        for view in views:
            found, expected = (view.of(x).double() for x in (storages, self.launch.after))
            same = (found == expected) | (found.isnan() & expected.isnan())
            off = torch.where(same, 0, (found - expected).abs()).max()
            largest = expected[expected.isfinite()].abs().max()
            if not off <= limit * largest:
                return True
        return False


def subjects(precision: str) -> Iterator[Subject]:
    """The first launch of each machine code."""
    from fusion_lab.amd.record import interpreted, launches_in

    seen = set()
    (case,) = cases_of([SCRIPT], [precision], [SIZE])
    with tempfile.TemporaryDirectory() as folder:
        code = "from dev.run_on_amd import record_step; record_step()"
        done = interpreted(["-c", code, folder, str(case.path), *case.arguments.split()])
        if done.returncode:
            raise ToolError(f"{case}: {done.stderr.strip().splitlines()[-1]}", status=1)
        for launch in launches_in(Path(folder)):
            subject = Subject(launch)
            name = checksums.of_code(subject.compiled.asm["amdgcn"])
            if name not in seen:
                seen.add(name)
                yield subject


def mutants(subject: Subject, chance: random.Random) -> Iterator[Outcome]:
    """Of those that can be executed, one after the other."""
    places = [place for place in subject.executed() if CHANGED.match(subject.lines[place])]
    chance.shuffle(places)
    for place in places:
        line = subject.lines[place]
        others = [line.replace(a, b, 1) for a, b in OTHERS.items() if a in line]
        outcome = subject.outcome(place, chance.choice([*others, "\ts_nop 0"]))
        if outcome:
            yield outcome


def measured(precision: str, each: int) -> dict:
    """The row of a precision."""
    found, barriers, chance = [], [], random.Random(0)
    for subject in subjects(precision):
        found += itertools.islice(mutants(subject, chance), each)
        if precision == BARRIERS:
            places = [place for place, line in enumerate(subject.lines) if "\ts_barrier" in line]
            barriers += [subject.outcome(place, "\ts_nop 0") for place in places]
        note(
            f"{precision}, {subject.launch.kernel}: {len(found)} mutants, {len(barriers)} barriers"
        )
    changed = [outcome for outcome in found if outcome.changed]
    return {
        "precision": precision,
        "mutants": len(found),
        "changed": len(changed),
        "noticed": sum(outcome.noticed for outcome in changed),
        "by_one_limit": sum(outcome.by_one_limit for outcome in changed),
        "barriers": len(barriers) or None,
        "barriers_noticed": sum(outcome.noticed for outcome in barriers) or None,
    }


def run(args: argparse.Namespace) -> int:
    import triton

    from fusion_lab.amd import waves

    waves.MOST = MOST
    rows = [] if args.summary else [measured(precision, args.each) for precision in args.dtype]
    if args.summary or (args.write and RESULT.exists()):
        own = {row["precision"] for row in rows}
        rows += [row for row in read_json(RESULT)["rows"] if row["precision"] not in own]
    if args.write:
        about = {"schema_version": 1, "script": SCRIPT, "size": SIZE, "target": TARGET,
                 "triton": triton.__version__}  # fmt: skip
        write_text(RESULT, json.dumps({**about, "rows": rows}, indent=1) + "\n", replace=True)
    titles = {"mutants": "mutants", "changed": "change a bit", "noticed": "noticed",
              "by_one_limit": "by one limit", "barriers": "barriers dropped",
              "barriers_noticed": "noticed "}  # fmt: skip
    columns = [Column("precision", "precision", text=True)]
    print(render([*columns, *(Column(title, key, "d") for key, title in titles.items())], rows))
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    text = f"of {', '.join(PRECISIONS)} (default: all)"
    kinds = {"nargs": "+", "choices": list(PRECISIONS), "default": list(PRECISIONS)}
    parser.add_argument("--dtype", metavar="NAME", help=text, **kinds)
    parser.add_count("--each", 6, "mutants of each machine code")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    what.add_argument("--summary", action="store_true", help="print what that file says")
    return parser


main = program(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())

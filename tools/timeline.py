#!/usr/bin/env python3
"""What the host launches and what the GPU runs in two layers of a forward pass, out of traces of
the PyTorch profiler.

Each DIR is the --profile-dir of a run of TinyLlama with --enable-pytorch-profiler on a GPU.
Of its second step it keeps the layers 2 and 3: start and duration, in microseconds since the first
launch. A run whose step is one graph has no layers in its trace; there the run before it must be
the same script without a graph, whose kernels say where the layers begin and end.
`tools/draw_figures.py launch_timeline` draws the result.

Examples:
  python tiny_llama_v1.py --use-amp --seq-len 128 --num-steps 5 --enable-pytorch-profiler \\
      --profile-dir traces/v1
  python tools/timeline.py results/DIR/timeline.json traces/v1 traces/v1_graph traces/v3 \\
      traces/v3_graph
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import json
from collections.abc import Sequence

from lab.cli import Parser, ToolError, documented_parser, program
from lab.files import read_json, write_text
from lab.profile.kernels import category, complete, load_trace, ranges_of, short_name
from lab.script import mode_of, model_and_version

PROG = Path(__file__).name
FIRST, LAST = "layers.2", "layers.3"
STEP = 1  # of the three in a trace; the first one may still load kernels
KINDS = {
    "GEMM": "GEMM",
    "attention": "attention",
    "normalisation": "norm",
    "element-wise": "element-wise",
}


class Trace:
    """The launches and the kernels of a trace, in the order of time."""

    def __init__(self, folder: Path):
        found = sorted(folder.glob("*_trace.json.gz"))
        if len(found) != 1:
            raise ToolError(f"{folder}: {len(found)} traces (*_trace.json.gz) where one is wanted")
        self.path, self.events = found[0], load_trace(found[0])
        self.script = self.path.name.removesuffix("_trace.json.gz")
        self.summary = read_json(folder / f"{self.script}_summary.json")
        calls = complete(self.events, "cuda_runtime", "cuda_driver")
        self.launches = sorted(
            (call for call in calls if "Launch" in call["name"]), key=lambda call: call["ts"]
        )
        self.kernels = sorted(complete(self.events, "kernel"), key=lambda kernel: kernel["ts"])
        if not self.kernels:
            raise ToolError(f"{self.path}: no kernels in it; the run must be on a GPU")
        self.launched = {call["args"]["correlation"]: call["ts"] for call in self.launches}

    def steps(self, name: str) -> list[tuple[float, float]]:
        """Begin and end of the ranges of this name, which a step has one of."""
        return [(r.start, r.end) for r in ranges_of(self.events, [name])]

    def step(self) -> tuple[float, float]:
        """Begin and end of the chosen step."""
        marks = self.steps("data")
        if len(marks) <= STEP + 1:
            raise ToolError(f"{self.path}: fewer than {STEP + 2} steps in it")
        return marks[STEP][0], marks[STEP + 1][0]

    def of_step(self) -> list[dict]:
        """The kernels that the chosen step launched."""
        begin, end = self.step()
        return [
            k
            for k in self.kernels
            if begin <= self.launched.get(k["args"].get("correlation"), -1) < end
        ]


def place(kernels: Sequence[dict], kernel: dict) -> tuple[str, int]:
    """A kernel's name, and how many of the same name go before it."""
    return kernel["name"], sum(
        k["name"] == kernel["name"] for k in kernels[: kernels.index(kernel)]
    )


def eager(trace: Trace) -> tuple[list[dict], list[dict], list[tuple[str, int]]]:
    """Launches and kernels of the two layers, and the places of the first kernel and of the one
    behind the last."""
    begins, ends = trace.steps(FIRST), trace.steps(LAST)
    if len(begins) <= STEP or len(ends) <= STEP:
        raise ToolError(f"{trace.path}: the trace has no {FIRST} and {LAST} in step {STEP + 1}")
    begin, end = begins[STEP][0], ends[STEP][1]
    inside = [k for k in trace.of_step() if begin <= trace.launched[k["args"]["correlation"]] < end]
    step = trace.of_step()
    behind = step[step.index(inside[-1]) + 1]
    launches = [call for call in trace.launches if begin <= call["ts"] < end]
    return launches, inside, [place(step, inside[0]), place(step, behind)]


def in_graph(trace: Trace, places: list[tuple[str, int]]) -> list[dict]:
    """The kernels from one place to another in a step that is one graph."""
    step = trace.of_step()
    found = []
    for name, before in places:
        same = [index for index, kernel in enumerate(step) if kernel["name"] == name]
        if len(same) <= before:
            raise ToolError(
                f"{trace.path}: {name} runs {len(same)} times in the graph, {before + 1} are wanted"
            )
        found.append(same[before])
    return step[found[0] : found[1]]


def row_of(trace: Trace, launches: list[dict], kernels: list[dict]) -> dict:
    """A row of the study.

    A kernel that a norm's module launched counts as norm, whatever it is called.
    """
    zero = launches[0]["ts"] if launches else kernels[0]["ts"]
    norms = [
        r
        for name in (FIRST, LAST)
        for part in ("input", "post_attention")
        for r in trace.steps(f"{name}.{part}_layernorm")
    ]

    def kind(kernel: dict) -> str:
        launch = trace.launched[kernel["args"]["correlation"]]
        if any(begin <= launch < end for begin, end in norms):
            return "norm"
        return KINDS.get(category(kernel["name"]), "other")

    def times(event: dict) -> list[float]:
        return [round(event["ts"] - zero, 2), round(event["dur"], 2)]

    return {
        "version": model_and_version(trace.script)[1],
        "mode": mode_of(trace.summary["training"]),
        "script": trace.script,
        "launches": [["launch", *times(call)] for call in launches],
        "kernels": [
            [kind(kernel), *times(kernel), short_name(kernel["name"], 40)] for kernel in kernels
        ],
    }


def study(folders: Sequence[Path]) -> dict:
    """The rows of all runs, in their order."""
    rows, places, before = [], [], ""
    for folder in folders:
        trace = Trace(folder)
        if trace.summary["training"]["cuda_graph"]:
            if before != trace.script:
                needed = f"the run before it must be {trace.script} without a graph"
                raise ToolError(f"{folder}: {needed}")
            row, kinds = row_of(trace, [], in_graph(trace, places)), rows[-1]["kernels"]
            if len(kinds) == len(row["kernels"]):  # a graph has no modules: its kinds are those of
                row["kernels"] = [  # the same kernels without it
                    [kind, *rest]
                    for (kind, *_), (_, *rest) in zip(kinds, row["kernels"], strict=True)
                ]
            rows.append(row)
        else:
            launches, kernels, places = eager(trace)
            rows.append(row_of(trace, launches, kernels))
        before = trace.script
    same = {key: trace.summary[key] for key in ("environment", "config", "training")}
    return {**same, "layers": [FIRST, LAST], "traces": rows}


def write_study(args: argparse.Namespace) -> int:
    """Write the result, a line for each run, and say what is in it; returns the exit status."""
    found = study(args.runs)
    rows = found.pop("traces")
    lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    head = json.dumps(found, indent=1)[:-2]
    write_text(args.output, f'{head},\n "traces": [\n  {lines}\n ]\n}}\n')
    for row in rows:
        end = max(start + duration for _, start, duration, _ in row["kernels"])
        busy = sum(duration for _, _, duration, _ in row["kernels"])
        launches, kernels = (len(row[name]) for name in ("launches", "kernels"))
        count = f"{launches:4} launches {kernels:4} kernels"
        name = f"{row['version']}, {row['mode']}"
        print(f"{name:12} {count}, {busy:7.1f} us of {end:7.1f} us busy")
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("output", type=Path, metavar="FILE.json")
    order = "in the order of the figure, top to bottom"
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help=order)
    return parser


main = program(build_parser, write_study)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""One step out of a trace of the PyTorch profiler, for a folder of traces that everyone may open.

DIR is the --profile-dir of a run with --enable-pytorch-profiler on a GPU. Its second step is kept:
what the host did in it, and the kernels that it launched, whenever they ran. Times begin at 0;
shapes, the machine's name and its paths go. Figures are drawn from such files, by `two_layers`.

Example:
  python tiny_llama_v1.py --use-amp --seq-len 128 --num-steps 5 --enable-pytorch-profiler \\
      --profile-dir traces/v1
  python tools/traces.py traces/v1 results/DIR/traces/tiny_llama_v1_eager.json.gz
"""

import argparse
import gzip
import json
import sys
from itertools import compress
from pathlib import Path

import _path

from lab.cli import Parser, ToolError, documented_parser, program
from lab.files import write_file
from lab.profile.kernels import ON_GPU, category, complete, load_trace, ranges_of

STEP = 1  # of the three in a trace; the first one may still load kernels
HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
ARROWS = {"ac2g", "fwdbwd"}  # from a launch to its kernel, from an operator to its gradient
KEPT = {"correlation", "stream", "grid", "block", "registers per thread", "shared memory"}
KINDS = {"normalisation": "norm", "GEMM": "GEMM", "attention": "attention"}
KINDS["element-wise"] = "element-wise"  # in figures; all else is "other"


def launches_of(events: list[dict]) -> dict[int, dict]:
    """The host's calls that launch something, by the number that their kernels have, too."""
    calls = complete(events, "cuda_runtime", "cuda_driver")
    return {call["args"]["correlation"]: call for call in calls if "Launch" in call["name"]}


def one_step(path: Path) -> list[dict]:
    """The events of the second step, and the names of all threads."""
    events = load_trace(path)
    marks, launches = ranges_of(events, ["data"]), launches_of(events)  # a step begins with data
    if len(marks) <= STEP + 1:
        raise ToolError(f"{path}: fewer than {STEP + 2} steps in it")
    begin, end = marks[STEP].start, marks[STEP + 1].start

    def belongs(event: dict) -> bool:
        launch = launches.get(event["args"].get("correlation")) if event["cat"] in ON_GPU else None
        return begin <= (launch or event)["ts"] < end

    chosen = [event for event in complete(events, *HOST, *ON_GPU) if belongs(event)]
    if not complete(chosen, "kernel"):
        raise ToolError(f"{path}: no kernels in its step {STEP + 1}; the run must be on a GPU")
    places = {(event["pid"], event["tid"], event["ts"]) for event in chosen}
    arrows = [
        event
        for event in events
        if event.get("cat") in ARROWS and (event["pid"], event["tid"], event["ts"]) in places
    ]
    starts, ends = ({(e["cat"], e["id"]) for e in arrows if e["ph"] == ph} for ph in "sf")
    chosen += [event for event in arrows if (event["cat"], event["id"]) in starts & ends]
    names = [{**event, "ts": 0} for event in events if event.get("ph") == "M"]

    def kept(event: dict) -> dict:
        arguments = {k: v for k, v in event.get("args", {}).items() if k in KEPT}
        return {**event, "ts": round(event["ts"] - begin, 3), "args": arguments}

    return [*names, *map(kept, chosen)]


Event = tuple[str, float, float, str]  # kind, start and duration in microseconds, name


def two_layers(path: Path, eager: Path | None = None) -> tuple[list[Event], list[Event]]:
    """Launches and kernels of the forward pass of layers 2 and 3 in a trace of one step.

    What a norm's module launched is a norm, whatever it is called. A graph has no modules: there
    the kernels are the first that follow each other as in `eager`, the same step without a graph,
    and there are no launches.
    """
    events = load_trace(path)
    launches, calls = launches_of(events), []
    kernels = sorted(complete(events, "kernel"), key=lambda kernel: kernel["ts"])
    categories = [category(kernel["name"]) for kernel in kernels]
    if eager:
        same = two_layers(eager)[1]
        kinds, wanted = [kind for kind, *_ in same], [category(name) for *_, name in same]
        places = range(len(kernels) - len(wanted) + 1)
        first = next((i for i in places if categories[i : i + len(wanted)] == wanted), None)
        if first is None:
            raise ToolError(f"{path}: no kernels in it that follow each other as in {eager}")
        kernels = kernels[first : first + len(wanted)]
    else:
        layers = ranges_of(events, ["layers.2", "layers.3"])
        calls = [launches[kernel["args"]["correlation"]] for kernel in kernels]
        inside = [layers[0].start <= call["ts"] < layers[-1].end for call in calls]
        kernels, calls, kinds = (
            [*compress(each, inside)]
            for each in (kernels, calls, [KINDS.get(name, "other") for name in categories])
        )
        names = [f"layers.{i}.{of}_layernorm" for i in (2, 3) for of in ("input", "post_attention")]
        for norm in ranges_of(events, names):
            kinds = [
                "norm" if norm.start <= call["ts"] < norm.end else kind
                for call, kind in zip(calls, kinds, strict=True)
            ]
    zero = (calls or kernels)[0]["ts"]

    def rows(kinds: list[str], events: list[dict]) -> list[Event]:
        return [
            (k, e["ts"] - zero, e["dur"], e["name"]) for k, e in zip(kinds, events, strict=True)
        ]

    return rows(["launch"] * len(calls), calls), rows(kinds, kernels)


def write_step(args: argparse.Namespace) -> int:
    found = sorted(args.run.glob("*_trace.json.gz"))
    if len(found) != 1:
        raise ToolError(f"{args.run}: {len(found)} traces (*_trace.json.gz) where one is wanted")
    events = one_step(found[0])
    content = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
    packed = gzip.compress(content.encode(), mtime=0)
    write_file(args.output, lambda path: path.write_bytes(packed))
    kernels = len(complete(events, "kernel"))
    print(f"{args.output}: {kernels} kernels, {len(packed) / 1e3:.0f} KB")
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("run", type=Path, metavar="DIR")
    parser.add_argument("output", type=Path, metavar="FILE.json.gz")
    return parser


main = program(build_parser, write_step)

if __name__ == "__main__":
    sys.exit(main())

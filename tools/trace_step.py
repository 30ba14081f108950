#!/usr/bin/env python3
"""One step out of a trace of the PyTorch profiler, for a folder of traces that everyone may open.

DIR is the --profile-dir of a run with --enable-pytorch-profiler on a GPU. Its second step is kept:
what the host did in it, and the kernels that it launched, whenever they ran. Times begin at 0;
shapes, the machine's name and its paths go.

Example:
  python tiny_llama_v1.py --use-amp --seq-len 128 --num-steps 5 --enable-pytorch-profiler \\
      --profile-dir traces/v1
  python tools/trace_step.py traces/v1 tiny_llama_v1_eager.json.gz
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import gzip
import json

from lab.cli import Parser, documented_parser, program
from lab.files import write_file
from lab.profile.kernels import ON_GPU, complete
from tools.timeline import Trace

PROG = Path(__file__).name
HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
ARROWS = {"ac2g", "fwdbwd"}  # from a launch to its kernel, from an operator to its gradient
KEPT = {"correlation", "stream", "grid", "block", "registers per thread", "shared memory"}


def one_step(trace: Trace) -> list[dict]:
    """The events of the chosen step, and the names of all threads."""
    begin, end = trace.step()

    def belongs(event: dict) -> bool:
        if event["cat"] in ON_GPU:
            launch = trace.launched.get(event["args"].get("correlation"), event["ts"])
            return begin <= launch < end
        return begin <= event["ts"] < end

    chosen = [event for event in complete(trace.events, *HOST, *ON_GPU) if belongs(event)]
    places = {(event["pid"], event["tid"], event["ts"]) for event in chosen}
    arrows = [
        event
        for event in trace.events
        if event.get("cat") in ARROWS and (event["pid"], event["tid"], event["ts"]) in places
    ]
    starts, ends = ({(e["cat"], e["id"]) for e in arrows if e["ph"] == ph} for ph in "sf")
    chosen += [event for event in arrows if (event["cat"], event["id"]) in starts & ends]
    names = [event for event in trace.events if event.get("ph") == "M"]

    def kept(event: dict) -> dict:
        arguments = {k: v for k, v in event.get("args", {}).items() if k in KEPT}
        return {**event, "ts": round(event["ts"] - begin, 3), "args": arguments}

    return [*({**event, "ts": 0} for event in names), *map(kept, chosen)]


def write_step(args: argparse.Namespace) -> int:
    """Write the step, and say what is in it; returns the exit status."""
    events = one_step(Trace(args.run))
    content = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
    packed = gzip.compress(content.encode(), mtime=0)
    write_file(args.output, lambda path: path.write_bytes(packed))
    kernels = sum(event.get("cat") == "kernel" for event in events)
    print(f"{args.output}: {kernels} kernels, {len(packed) / 1e3:.0f} KB")
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("run", type=Path, metavar="DIR")
    parser.add_argument("output", type=Path, metavar="FILE.json.gz")
    return parser


main = program(build_parser, write_step)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Whether a GPU works or waits: how long no kernel ran, one, or several, in traces of a step.

Examples:
  python exercises/tiny_llama_v2/busy.py results/h100/traces/tiny_llama_v4_graph.json.gz
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

from fusion_lab.cli import ToolError, documented_parser, run_tool
from fusion_lab.profile.kernels import complete, load_trace, short_name

PROG = Path(__file__).name
SEVERAL = 2


def running(kernels: list[dict]) -> Counter:
    """Microseconds in which 0, 1 or SEVERAL kernels ran, from the first begin to the last end."""
    changes = [(k["ts"], 1) for k in kernels] + [(k["ts"] + k["dur"], -1) for k in kernels]
    count = 0
    us = Counter()
    for (now, change), (later, _) in pairwise(sorted(changes)):
        count += change
        us[min(count, SEVERAL)] += later - now
    return us


def longest_gap(kernels: list[dict]) -> tuple[float, str]:
    """The longest time without a kernel, in microseconds, and the kernel that ends it."""
    longest = (0.0, "")
    end = kernels[0]["ts"]
    for k in kernels:
        longest = max(longest, (k["ts"] - end, k["name"]))
        end = max(end, k["ts"] + k["dur"])
    return longest


def describe(trace: Path) -> None:
    kernels = sorted(complete(load_trace(trace), "kernel"), key=lambda k: k["ts"])
    if not kernels:
        raise ToolError(f"{trace}: it has no kernels")
    times = Counter()
    for k in kernels:
        times[short_name(k["name"])] += k["dur"]
    us = running(kernels)
    gap, name = longest_gap(kernels)
    step = us.total()
    added_up = times.total()
    print(f"{trace.name}: {len(kernels)} kernels", end=", ")
    print(f"added up {added_up:.0f} us, {added_up / step:.0%} of the step")
    print(f"{step:5.0f} us  the step: {us[0] / step:.0%} without a kernel", end=", ")
    print(f"{us[1] / step:.0%} with one, {us[SEVERAL] / step:.0%} with several")
    print(f"{gap:5.0f} us  the longest time without one, before {short_name(name)}")
    for name, time in times.most_common(3):
        print(f"{time:5.0f} us  {name}")


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("trace", nargs="+", type=Path, help="of the PyTorch profiler")
    args = parser.parse_args(argv)

    def body() -> int:
        for trace in args.trace:
            describe(trace)
        return 0

    return run_tool(PROG, body)


if __name__ == "__main__":
    sys.exit(main())

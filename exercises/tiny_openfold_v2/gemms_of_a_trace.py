#!/usr/bin/env python3
"""List the matrix products (GEMMs) of a profiled step: shape, rate, and how full they make the GPU.

Reads a trace of `--enable-pytorch-profiler`, which knows the shapes. FLOP/byte counts each input
and the result once; right of the ridge (GEMM ceiling over copy ceiling) arithmetic is the limit.
Blocks per SM and occupancy are estimates of PyTorch's profiler from the launch: a kernel with less
than one block per multiprocessor leaves some of them idle. On a CPU there are none.

Examples:
  python exercises/tiny_openfold_v2/gemms_of_a_trace.py TRACE.json.gz
  python exercises/tiny_openfold_v2/gemms_of_a_trace.py TRACE.json.gz --top 20
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.profile.kernels import complete, has_gpu, load_trace
from fusion_lab.show import Column, render

PROG = Path(__file__).name
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}  # first matrix
BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8}
OCCUPANCY, BLOCKS = "est. achieved occupancy %", "blocks per SM"  # as the profiler names them


class Shape(NamedTuple):
    """Of `count` products [m, k] x [k, n] of numbers with `size` bytes."""

    count: int
    m: int
    k: int
    n: int
    size: int

    @property
    def flop(self) -> int:
        return 2 * self.count * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        return self.size * self.count * (self.m * self.k + self.k * self.n + self.m * self.n)

    def __str__(self) -> str:
        return f"{f'{self.count} of ' * (self.count > 1)}{self.m} x {self.k} x {self.n}"


def shape_of(call: dict) -> Shape:
    """The shape of a call of an operator of PRODUCTS; ToolError if the trace has no shapes."""
    first, arguments = PRODUCTS[call["name"]], call.get("args", {})
    try:
        (*batch, m, k), (*_, n) = arguments["Input Dims"][first : first + 2]
        size = BYTES[arguments["Input type"][first]]
        if not all(isinstance(length, int) for length in (*batch, m, k, n)):
            raise ValueError("a length that is no number")
    except (LookupError, TypeError, ValueError) as error:
        raise ToolError("the trace has no shapes: record it with --enable-pytorch-profiler") from (
            error
        )
    return Shape(math.prod(batch), m, k, n, size)


def products(events: Sequence[dict]) -> Iterable[tuple[Shape, float, dict]]:
    """Shape, microseconds, and what the profiler says of the longest kernel of each product."""
    kernels, gpu = defaultdict(list), has_gpu(events)
    for kernel in complete(events, "kernel"):
        kernels[kernel["args"].get("External id")].append(kernel)
    for call in complete(events, "cpu_op"):
        if call["name"] in PRODUCTS:
            own = kernels[call["args"].get("External id")] if gpu else [call]
            if own:
                longest = max(own, key=lambda event: event["dur"])
                yield shape_of(call), sum(event["dur"] for event in own), longest["args"]


def rows_of(events: Sequence[dict]) -> list[dict]:
    """A row for each shape, that with the most time first."""
    found: dict[Shape, list[tuple[float, dict]]] = defaultdict(list)
    for shape, us, arguments in products(events):
        found[shape].append((us, arguments))
    if not found:
        raise ToolError("the trace has no matrix products")
    steps = sum(event["name"] == "forward" for event in complete(events, "user_annotation")) or 1
    rows = []
    for shape, calls in found.items():
        us = statistics.median(us for us, _ in calls)
        rows.append(
            {
                "shape": str(shape),
                "calls": len(calls) / steps,
                "ms": sum(us for us, _ in calls) / steps / 1e3,
                "us": us,
                "intensity": shape.flop / shape.bytes,
                "tflops": shape.flop / us / 1e6,
                "gb_per_s": shape.bytes / us / 1e3,
                "blocks": middle(arguments.get(BLOCKS) for _, arguments in calls),
                "occupancy": middle(arguments.get(OCCUPANCY) for _, arguments in calls),
            }
        )
    return sorted(rows, key=lambda row: -row["ms"])


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what is known, None where nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE.json.gz")
    parser.add_count("--top", 12, "shapes with the most time")
    return parser


def show(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    try:
        rows = rows_of(load_trace(args.trace))
    except ToolError as error:
        name = f"{args.trace}: "
        raise ToolError(f"{name}{str(error).removeprefix(name)}") from error
    columns = [
        Column("m x k x n", "shape"),
        Column("calls", "calls", ".0f"),
        Column("ms per step", "ms", ".3f"),
        Column("us each", "us", ".1f"),
        Column("FLOP/byte", "intensity", ".1f"),
        Column("TFLOP/s", "tflops", ".2f"),
        Column("GB/s", "gb_per_s", ".0f"),
        Column("blocks per SM", "blocks", ".2f"),
        Column("occupancy, %", "occupancy", ".0f"),
    ]
    print(render(columns, rows[: args.top]))
    total = sum(row["ms"] for row in rows)
    print(f"\n{sum(row['calls'] for row in rows):.0f} products take {total:.2f} ms per step")
    return 0


main = program(build_parser, show)

if __name__ == "__main__":
    sys.exit(main())

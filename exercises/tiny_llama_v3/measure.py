#!/usr/bin/env python3
"""What the programs of V3's exercises share: the time of a call, a table beside a copy's rate, and
a file of both.

Times are medians of ten replays of a CUDA graph with 20 ms of calls, by
triton.testing.do_bench_cudagraph, so the host does not count. "of a copy" is the rate over that of
a large copy in the same run.

Examples:
  python exercises/tiny_llama_v3/measure.py FILE.json   the table of each file that --output wrote
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

import tiny_llama_v3 as v3  # before Triton: without a GPU it asks for the interpreter
from fusion_lab.cli import ToolError, documented_parser, note, run_tool
from fusion_lab.files import read_json, write_text
from fusion_lab.profile.traffic import Traffic
from fusion_lab.show import Column, render

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def bytes_of(function: Callable[[], object]) -> int:
    """Bytes that PyTorch's operators in a call read and write, each its arguments and its result
    once."""
    with Traffic(nn.Identity(), {}, v3.NO_WORK) as traffic:
        function()
    return sum(traffic.bytes_of.values())


def timed(what: str, function: Callable[[], object], moved: int | None = None, **more: str) -> dict:
    """A row of a table: microseconds of a call, the bytes that it moves, and more columns."""
    from triton.testing import do_bench_cudagraph

    us = 1e3 * do_bench_cudagraph(function, return_mode="median")
    return {"what": what, "us": us, "bytes": moved, **({"more": more} if more else {})}


def timed_copy(count: int = 2**26) -> dict:
    """The row of a copy of so many float32 numbers."""
    source = torch.ones(count, device=DEVICE)
    target = torch.empty_like(source)
    return timed("copy", lambda: target.copy_(source), 2 * source.nbytes)


def table(rows: list[dict]) -> str:
    """Rows of `timed` as Markdown, the copy's among them."""
    copy = next(row["bytes"] / row["us"] for row in rows if row["what"] == "copy")
    more = list(dict.fromkeys(key for row in rows for key in row.get("more", ())))

    def moved(of_bytes: Callable[[float, float], float]) -> Callable[[dict], object]:
        return lambda row: of_bytes(row["bytes"], row["us"]) if row["bytes"] else ""

    columns = [
        Column("what", "what"),
        Column("us", "us", ".1f"),
        Column("MB", moved(lambda count, us: count / 1e6), ".0f"),
        Column("GB/s", moved(lambda count, us: count / us / 1e3), ".0f"),
        Column("of a copy", moved(lambda count, us: 100 * count / us / copy), ".0f", " %"),
        *(Column(key, lambda row, key=key: row.get("more", {}).get(key, "")) for key in more),
    ]
    return render(columns, rows)


def power_of_two(high: int) -> Callable[[str], int]:
    """argparse type: 1, 2, 4, ..., `high`."""

    def power(text: str) -> int:
        if not text.isdecimal() or int(text).bit_count() != 1 or int(text) > high:
            raise argparse.ArgumentTypeError(f"must be a power of two up to {high}, not {text!r}")
        return int(text)

    return power


def add_output(parser: argparse.ArgumentParser) -> None:
    """The argument for `run`."""
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="keep what was measured")


def run(
    prog: str, check: Callable[[], str], measured: Callable[[], Iterable[dict]], output: Path | None
) -> int:
    """Check and say so, then measure, print the table and keep it in a file; returns the exit
    status.

    Without a GPU it says that nothing is timed.
    """

    def body() -> int:
        if output and not GPU:
            raise ToolError("--output needs a GPU: nothing is timed without one", status=4)
        print(check())
        if not GPU:
            note("no GPU: nothing is timed")
            return 0
        rows = [timed_copy(), *measured()]
        print(table(rows))
        if output:
            write_text(
                output,
                json.dumps({"environment": v3.environment(DEVICE), "rows": rows}, indent=1) + "\n",
            )
        return 0

    try:
        return run_tool(prog, body)
    except torch.OutOfMemoryError:
        print(f"{prog}: error: out of memory: lower the sizes", file=sys.stderr)
        return 3


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(Path(__file__).name, __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)

    def body() -> int:
        for file in args.files:
            rows = read_json(file).get("rows")
            if not rows or rows[0].get("what") != "copy":
                raise ToolError(f"{file}: no file of these programs")
            print(table(rows))
        return 0

    return run_tool(parser.prog, body)


if __name__ == "__main__":
    sys.exit(main())

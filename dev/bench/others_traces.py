#!/usr/bin/env python3
"""Rates of a GPU that is not at hand, from traces that others recorded, and how far off they are:
tables of results/mi300x.

Each trace is predicted from those of other models: the time of all its kernels whose bytes and
FLOPs are known. What no rate is for (compiled kernels, collectives, copies from the host) is left
out on both sides, and said. A product is missed that is more than twice or less than half.

The traces are in a repository of AMD's, which the files name. Commit ed80cbff has the program that
fitted the laws to them. versions.json has what find-fusions predicts of V1 to V4 with the rates of
both GPUs.

Examples:
  python dev/bench/others_traces.py results/mi300x/find_fusions.json
  python dev/bench/others_traces.py results/mi300x/versions.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fusion_lab.cli import Parser, documented_parser, program
from fusion_lab.files import read_json
from fusion_lab.show import Column, render


def versions_table(rows: list[dict]) -> str:
    def within(row: dict) -> str:
        return " to ".join(f"{us / 1e3:.1f}" for us in row["range_us"])

    def ms(key: str):
        return lambda row: row[key] and row[key] / 1e3

    columns = [
        Column("bf16", "shape", text=True),
        Column("version", "version", text=True),
        Column("MI300X, ms", ms("us"), ".2f"),
        Column("range", within, text=True),
        Column("all chains fused", ms("fused_us"), ".2f"),
        Column("H100 likewise", ms("h100_us"), ".2f"),
        Column("measured there", ms("h100_measured_us"), ".2f"),
    ]
    return render(columns, rows)


def table(rows: list[dict]) -> str:
    def known(row: dict) -> float:
        return 100 * row["own_us"] / row["busy_us"]

    def missed(row: dict) -> str:
        return ", ".join(f"{name} ({share:.0f} %)" for name, share in row["missed"].items()) or "-"

    columns = [
        Column("model", "model", text=True),
        Column("calls", "calls"),
        Column("known", known, ".0f", " %"),
        Column("these took", lambda row: row["own_us"] / 1e3, ".3f", " ms"),
        Column("predicted", lambda row: row["predicted_us"] / 1e3, ".3f", " ms"),
        Column("off", "off_percent", "+.0f", " %"),
        Column("median of a form", lambda row: row["errors_percent"]["all"], ".0f", " %"),
        Column("products missed", missed, text=True),
    ]
    return render(columns, rows)


def show(args: argparse.Namespace) -> int:
    """Print the table of a result."""
    rows = read_json(args.result)["rows"]
    print(versions_table(rows) if "version" in rows[0] else table(rows))
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    return parser


main = program(build_parser, show)

if __name__ == "__main__":
    sys.exit(main())

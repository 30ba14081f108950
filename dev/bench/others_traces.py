#!/usr/bin/env python3
"""Rates of a GPU that is not at hand, from traces that others recorded, and how far off they are.

Each trace is predicted from those of other models: the time of all its kernels whose bytes and
FLOPs are known. What no rate is for (compiled kernels, collectives, copies from the host) is left
out on both sides, and said. A product is missed that is more than twice or less than half.

The traces behind results/mi300x/ are in a repository of AMD's, see the file:
  git clone https://github.com/AMD-AGI/TraceLens
  python dev/bench/others_traces.py results/mi300x/find_fusions.json \\
      TraceLens/tests/traces/mi300/*.json.gz ...
  python dev/bench/others_traces.py results/mi300x/check_h100.json \\
      TraceLens/tests/traces/h100/*.json.gz
  python dev/bench/others_traces.py results/mi300x/find_fusions.json --table
versions.json beside them has what find-fusions predicts of V1 to V4 with the rates of both.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from fusion_lab.cli import Parser, ToolError, documented_parser, note, program
from fusion_lab.files import read_json, write_text
from fusion_lab.fusions.rates import (
    AMONG_OTHERS,
    FITTED_TYPE,
    FittedRates,
    Law,
    kind_of,
    terms_of,
    us_of,
)
from fusion_lab.fusions.record import Operator
from fusion_lab.fusions.trace import replayed
from fusion_lab.host import PEAK_TFLOPS
from fusion_lab.show import Column, render

SOURCE = {
    "repository": "https://github.com/AMD-AGI/TraceLens",
    "commit": "171dd74721ca1ec45709e5805b68ae1f65e27811",
    "licence": "MIT, Advanced Micro Devices, Inc.",
    "remark": "recorded by others, for tests; they do not stand for what a device reaches",
}
PROG = Path(__file__).name
NO_MODEL = "normalization_layer_test"  # but norms alone, of few long rows
STEPS = (4.0, 2.0, 1.3, 1.1, 1.03)  # by which coefficients are made larger or smaller
SHARED = {"product": ("straight", (0,)), "sums": ("straight", (1,)),
          "convolution": ("product", (1, 2))}  # fmt: skip
Terms = tuple[float, ...]  # what the coefficients of a law multiply


# --- laws


def fit(terms: Tensor, us: Tensor, us_per_tflop: float, known: dict[int, float]) -> Law:
    """Coefficients with which the logarithms of all times are least off. Some are known, and no
    product is faster than the peak of the device. Of several starts, in each of which another term
    has most of the time, the best."""
    used = [bool(each) for each in (terms > 0).any(0)]
    alone = (us[:, None] / terms.clamp_min(1e-12)).quantile(0.25, 0)
    free = [i for i, there in enumerate(used) if there and i not in known]

    def off(coefficients: list[float]) -> float:
        if used[2] and coefficients[2] < us_per_tflop:
            return math.inf
        return float((terms @ terms.new_tensor(coefficients) / us).log().abs().sum())

    def improved(coefficients: list[float]) -> list[float]:
        best = coefficients
        least = off(coefficients)
        for step in STEPS:
            before = math.inf
            while least < before:
                before = least
                for place, factor in product(free, (step, 1 / step)):
                    other = [c * factor if i == place else c for i, c in enumerate(best)]
                    if (now := off(other)) < least - 1e-9:
                        best = other
                        least = now
        return best

    candidates = []
    for most in free:
        start = [float(c) * (1.0 if i == most else 0.1) * used[i] for i, c in enumerate(alone)]
        if used[2]:
            start[2] = max(start[2], us_per_tflop)
        for place, coefficient in known.items():
            start[place] = coefficient
        candidates.append(improved(start))
    return min(candidates, key=off)


def laws_of(kernels: dict[str, list[tuple[Terms, float]]], peak_tflops: float) -> dict[str, Law]:
    """The law of each kind, from terms and microseconds of its kernels. A product begins and ends
    as a kernel that goes straight through memory does; large sums are read as fast; a convolution
    is a product, and what it takes beside."""
    laws: dict[str, Law] = {}
    for kind in sorted(kernels, key=lambda kind: (kind != "straight", kind != "product")):
        terms = torch.tensor([each for each, _ in kernels[kind]], dtype=torch.float64)
        us = torch.tensor([each for _, each in kernels[kind]], dtype=torch.float64)
        other, places = SHARED.get(kind, ("", ()))
        known = {place: laws[other][place] for place in places}
        laws[kind] = fit(terms, us, 1e6 / peak_tflops, known)
    return laws


# --- traces


@dataclass
class Calls:
    """Calls of one operator on one form, each of which is one kernel or more."""

    name: str
    parts: list[tuple[str, Terms]]  # kind and terms of each kernel
    us: list[float] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.parts[0][0]

    def predicted(self, laws: dict[str, Law]) -> float:
        """Microseconds of one call."""
        return sum(us_of(laws, *part) for part in self.parts)


@dataclass
class Trace:
    """What a trace tells of a model: calls that can be predicted, and the time of the others."""

    model: str
    device: str
    calls: list[Calls]
    other_us: float

    @property
    def us(self) -> float:
        return sum(sum(calls.us) for calls in self.calls)

    @property
    def family(self) -> str:
        """Models that share parts are left out together: those of xDiT have the same text
        encoders."""
        return "xdit" if self.model.startswith("xdit") else self.model


def trace_of(path: Path) -> Trace:
    """The calls of a trace, those of one form together."""
    recorded, _, device = replayed(path)
    operators: dict[int, list[Operator]] = defaultdict(list)
    for operator in recorded.operators:
        operators[operator.call].append(operator)
    calls: dict[tuple, Calls] = {}
    other_us = 0.0
    for passes in operators.values():
        first = passes[0]
        us = sum(each.us for each in passes)
        moving = [each for each in passes if each.moved]
        untimed = first.dtype and first.dtype != FITTED_TYPE
        if first.kind not in ("stream", "matrix") or first.lacks or untimed or not moving:
            other_us += us
        elif us:
            parts = [(kind_of(each), terms_of(each)) for each in moving]
            forms = " ".join("x".join(map(str, shape)) for _, shape, _ in first.operands)
            name = f"{first.name} {forms}".strip()
            calls.setdefault((name, *parts), Calls(name, parts)).us.append(us)
    model = path.name.partition("__")[0].removesuffix(".json.gz")
    return Trace(model, device.removesuffix(" VF"), [*calls.values()], other_us)


def laws_from(traces: list[Trace]) -> dict[str, Law]:
    """The laws that the kernels of these traces follow, each form of a call once."""
    kernels: dict[str, list] = defaultdict(list)
    for calls in (calls for trace in traces for calls in trace.calls):
        kinds = {kind for kind, _ in calls.parts}
        if len(kinds) == 1:  # of others nobody knows which part took how long
            together = zip(*(terms for _, terms in calls.parts), strict=True)
            kernels[kinds.pop()].append((tuple(map(sum, together)), statistics.median(calls.us)))
    return laws_of(kernels, PEAK_TFLOPS[traces[0].device][FITTED_TYPE])


def row_of(trace: Trace, others: list[Trace]) -> dict:
    """A trace predicted from others."""
    laws = laws_from(others)
    known = [calls for calls in trace.calls if all(kind in laws for kind, _ in calls.parts)]
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    errors: list[float] = []
    missed: dict[str, float] = defaultdict(float)
    for calls in known:
        us = calls.predicted(laws)
        own = sum(calls.us)
        predicted = us * len(calls.us)
        kinds[calls.kind][0] += own
        kinds[calls.kind][1] += predicted
        errors.append(100 * abs(us / statistics.median(calls.us) - 1))
        if calls.kind == "product" and not 0.5 <= predicted / own <= 2:
            missed[calls.name] += own
    own, predicted = map(sum, zip(*kinds.values(), strict=True))
    return {
        "model": trace.model,
        "calls": sum(len(calls.us) for calls in known),
        "busy_us": trace.us + trace.other_us,
        "own_us": own,
        "predicted_us": predicted,
        "off_percent": 100 * (predicted / own - 1),
        "errors_percent": {"all": statistics.median(errors)},
        "kinds_us": dict(kinds),
        "missed": {name: 100 * us / own for name, us in missed.items() if us > own / 100},
    }


def study(paths: Iterable[Path]) -> dict:
    """The laws of all traces, and each predicted from the others."""
    traces = []
    for path in paths:
        if path.read_bytes().startswith(b"version https://git-lfs"):
            note(f"{path}: left out, it only says where Git LFS has the trace")
            continue
        print(path, file=sys.stderr)
        traces.append(trace_of(path))
    devices = sorted({trace.device for trace in traces})
    if len(devices) != 1 or devices[0] not in PEAK_TFLOPS:
        known = ", ".join(PEAK_TFLOPS)
        raise ToolError(f"traces of one GPU of {known}, not of {', '.join(devices)}")
    rows = [row_of(own, [t for t in traces if t.family != own.family]) for own in traces]
    laws = laws_from(traces)
    least, per_gb, *_ = laws["straight"]
    peaks = PEAK_TFLOPS[devices[0]]
    fastest = 1e6 / laws["product"][2]
    rates = FittedRates(
        devices[0],
        1e6 / per_gb,
        least / AMONG_OTHERS,
        0.0,
        {name: fastest * peak / peaks[FITTED_TYPE] for name, peak in peaks.items()},
        laws,
        {r["model"]: r["predicted_us"] / r["own_us"] for r in rows if r["model"] != NO_MODEL},
    )
    return {"schema_version": 1, "source": SOURCE, "rates": asdict(rates), "rows": rows}


# --- tables


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


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("traces", type=Path, nargs="*", metavar="TRACE.json.gz")
    parser.add_flag("--table", "print the table of a result")
    return parser


def main_study(args: argparse.Namespace) -> int:
    """Write or print; returns the exit status."""
    if bool(args.traces) + args.table != 1:
        raise ToolError("name traces, or --table: one of the two")
    if args.traces:
        write_text(args.result, json.dumps(study(args.traces), indent=1) + "\n")
    rows = read_json(args.result)["rows"]
    print(versions_table(rows) if "version" in rows[0] else table(rows))
    return 0


main = program(build_parser, main_study)

if __name__ == "__main__":
    sys.exit(main())

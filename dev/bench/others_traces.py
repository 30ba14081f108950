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
  python dev/bench/others_traces.py results/mi300x/versions.json --versions    (behind both)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

from dev.bench.sizes import ALL_VERSIONS, PRECISIONS, SHAPES, script_of
from fusion_lab.cli import Parser, ToolError, documented_parser, note, program
from fusion_lab.files import ROOT, read_json, write_text
from fusion_lab.fusions.fitted import (
    TIMED,
    FittedRates,
    is_narrow,
    kind_of,
    laws_of,
    read_rates,
    terms_of,
    us_of,
)
from fusion_lab.fusions.groups import Finding
from fusion_lab.fusions.rates import CONSTANTS
from fusion_lab.fusions.record import Operator
from fusion_lab.fusions.step import count, from_script
from fusion_lab.fusions.trace import replayed
from fusion_lab.script import interpret_without_gpu
from fusion_lab.show import Column, render

SOURCE = {
    "repository": "https://github.com/AMD-AGI/TraceLens",
    "commit": "171dd74721ca1ec45709e5805b68ae1f65e27811",
    "files": [  # below the folder of its tests that has the traces
        "h100/*.json.gz",
        "mi300/*.json.gz",
        "inference/xdit_sd_3.5/profile_trace_rank_0.json.gz",
        "inference/xdit_flux.1/capture_traces/capture_trace_rank_0.json.gz",
        "inference/sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz",
        "torch_compile_triton/trace.json.gz",
        "perf_model/normalization/normalization_layer_test.json.gz",
    ],
    "licence": "MIT, Advanced Micro Devices, Inc.",
    "remark": "recorded by others, for tests; they do not stand for what a device reaches",
}
H100 = ROOT / "results" / "h100"
PROG = Path(__file__).name
PEAKS = {  # TFLOP/s of dense products, as published: a type that no trace has is so much slower
    "AMD Instinct MI300X": {
        "bf16": 1307.4, "fp16": 1307.4, "TF32": 653.7, "fp32": 163.4, "fp64": 163.4
    },
    "NVIDIA H100 80GB HBM3": {
        "bf16": 989.4, "fp16": 989.4, "TF32": 494.7, "fp32": 66.9, "fp64": 66.9
    },
}  # fmt: skip
RATES = "find_fusions.json"
CHECK = "check_h100.json"  # the same from traces of an H100, where V1 to V4 were measured
NO_MODEL = "normalization_layer_test"  # but norms alone, of few long rows
Terms = tuple[str, tuple[float, ...]]  # the kind of a kernel, and what its law multiplies


@dataclass
class Calls:
    """Calls of one operator on one form, each of which is one kernel or more."""

    name: str
    parts: list[Terms]
    narrow: bool
    us: list[float] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.parts[0][0]

    def predicted(self, laws: dict[str, list[float]]) -> float:
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


def trace_of(path: Path) -> Trace:
    """The calls of a trace, those of one form together."""
    recorded, _, device = replayed(path)
    operators: dict[int, list[Operator]] = defaultdict(list)
    for operator in recorded.operators:
        operators[operator.call].append(operator)
    calls: dict[tuple, Calls] = {}
    other_us = 0.0
    for passes in operators.values():
        first, us = passes[0], sum(each.us for each in passes)
        moving = [each for each in passes if each.moved]
        untimed = first.dtype and first.dtype != TIMED
        if first.kind not in ("stream", "matrix") or first.lacks or untimed or not moving:
            other_us += us
        elif us:
            parts = [(kind_of(each), terms_of(each)) for each in moving]
            forms = " ".join("x".join(map(str, shape)) for _, shape, _ in first.operands)
            name = f"{first.name} {forms}".strip()
            known = calls.setdefault((name, *parts), Calls(name, parts, is_narrow(first)))
            known.us.append(us)
    model = path.name.partition("__")[0].removesuffix(".json.gz")
    return Trace(model, device.removesuffix(" VF"), [*calls.values()], other_us)


def laws_from(traces: list[Trace]) -> dict[str, list[float]]:
    """The laws that the kernels of these traces follow, each form of a call once."""
    kernels: dict[str, list] = defaultdict(list)
    for calls in (calls for trace in traces for calls in trace.calls):
        kinds = {kind for kind, _ in calls.parts}
        if len(kinds) == 1:  # of others nobody knows which part took how long
            together = zip(*(terms for _, terms in calls.parts), strict=True)
            kernels[kinds.pop()].append((tuple(map(sum, together)), statistics.median(calls.us)))
    return laws_of(kernels, PEAKS[traces[0].device][TIMED])


def row_of(trace: Trace, others: list[Trace]) -> dict:
    """A trace predicted from others."""
    laws = laws_from(others)
    known = [calls for calls in trace.calls if all(kind in laws for kind, _ in calls.parts)]
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    errors: dict[str, list[float]] = defaultdict(list)
    missed: dict[str, float] = defaultdict(float)
    for calls in known:
        us = calls.predicted(laws)
        own, predicted = sum(calls.us), us * len(calls.us)
        kinds[calls.kind][0] += own
        kinds[calls.kind][1] += predicted
        error = 100 * abs(us / statistics.median(calls.us) - 1)
        errors["all"].append(error)
        if calls.kind == "product":
            errors["narrow products" if calls.narrow else "other products"].append(error)
            if not 0.5 <= predicted / own <= 2:
                missed[calls.name] += own
    own, predicted = map(sum, zip(*kinds.values(), strict=True))
    return {
        "model": trace.model,
        "calls": sum(len(calls.us) for calls in known),
        "busy_us": trace.us + trace.other_us,
        "own_us": own,
        "predicted_us": predicted,
        "off_percent": 100 * (predicted / own - 1),
        "errors_percent": dict(errors),
        "kinds_us": dict(kinds),
        "missed": {name: 100 * us / own for name, us in missed.items() if us > own / 100},
    }


def family_of(model: str) -> str:
    """Traces whose models share parts are left out together: those of xDiT have the same text
    encoders."""
    return "xdit" if model.startswith("xdit") else model


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
    if len(devices) != 1 or devices[0] not in PEAKS:
        raise ToolError(f"traces of one GPU of {', '.join(PEAKS)}, not of {', '.join(devices)}")
    rows = []
    for trace in traces:
        own = family_of(trace.model)
        rows.append(row_of(trace, [t for t in traces if family_of(t.model) != own]))
    laws = laws_from(traces)
    least, per_gb, *_ = laws["straight"]
    peaks = PEAKS[devices[0]]
    tflops = {name: 1e6 / laws["product"][2] * peak / peaks[TIMED] for name, peak in peaks.items()}
    shares = {row["model"]: row["predicted_us"] / row["own_us"] for row in rows}
    shares.pop(NO_MODEL, None)
    errors = {
        kind: statistics.median(e for row in rows for e in row["errors_percent"].get(kind, ()))
        for kind in ("narrow products", "other products")
    }
    for row in rows:
        each = row["errors_percent"].items()
        row["errors_percent"] = {kind: statistics.median(percent) for kind, percent in each}
    rates = FittedRates(
        devices[0], 1e6 / per_gb, least / CONSTANTS.among_others, 0.0, tflops, laws, shares, errors
    )
    return {"schema_version": 1, "source": SOURCE, "rates": asdict(rates), "rows": rows}


def versions(folder: Path) -> dict:
    """What find-fusions predicts of V1 to V4 for the GPU of a folder and for the H100, beside what
    was measured there. Kernels of V4 are launched unseen: it is as fast as on the H100 in
    proportion to V3. The rates of the folder get the check beside their errors."""
    interpret_without_gpu()
    here, there = read_rates(folder), read_rates(folder / CHECK)
    measured = {
        (row["shape"], row["version"]): 1e3 * row["batch_ms"]
        for row in read_json(H100 / "overview.json")["rows"]
        if (row["precision"], row["mode"]) == ("bf16", "graph")
    }
    rows: list[dict] = []
    for (shape, (model, sizes)), version in product(SHAPES.items(), ALL_VERSIONS):
        script, argv = script_of(model, version), [*sizes, *PRECISIONS["bf16"]]
        print(script, *argv, file=sys.stderr)
        _, recorded = count(partial(from_script, f"{script}.py", argv))
        levels = Finding(recorded, here, ("now", "chains")).levels
        other = Finding(recorded, there, ("now",)).levels
        row = {
            "model": model,
            "shape": shape,
            "version": version,
            "us": levels["now"]["us"],
            "fused_us": levels["chains"]["us"],
            "h100_us": other["now"]["us"],
            "h100_measured_us": measured[shape, version],
            "unseen": len(recorded.unwritten),
        }
        if version == "V4":
            row |= {"seen_us": row["us"], "fused_us": None, "h100_us": None}
            row["us"] = measured[shape, version] * rows[-1]["us"] / rows[-1]["h100_us"]
        rows.append(row)
    checked = {
        f"{row['shape']}, {row['version']}": row["h100_us"] / row["h100_measured_us"]
        for row in rows
        if row["h100_us"]
    }
    for row in rows:
        own = (share for step, share in checked.items() if step.startswith(row["model"]))
        shares = [*here.left_out.values(), *own]
        row["range_us"] = row["us"] / max(shares), row["us"] / min(shares)
    content = read_json(folder / RATES)
    content["rates"]["checked"] = checked
    write_text(folder / RATES, json.dumps(content, indent=1) + "\n")
    remark = "predicted from others' traces, never measured"
    return {"schema_version": 1, "gpu": here.device_name, "remark": remark, "rows": rows}


def versions_table(rows: list[dict]) -> str:
    def within(row: dict) -> str:
        return " to ".join(f"{us / 1e3:.1f}" for us in row["range_us"])

    def way(row: dict) -> str:
        also = " and an H100" if row["fused_us"] is None else ""
        return f"predicted from others' traces{also}"

    def ms(key: str):
        return lambda row: row[key] and row[key] / 1e3

    columns = [
        Column("bf16", "shape", text=True),
        Column("version", "version", text=True),
        Column("MI300X, ms", ms("us"), ".2f"),
        Column("range", within, text=True),
        Column("all chains fused", ms("fused_us"), ".2f"),
        Column("from", way, text=True),
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
    parser.add_flag("--versions", "predict V1 to V4 with the rates in the folder of the result")
    parser.add_flag("--table", "print the table of a result")
    return parser


def main_study(args: argparse.Namespace) -> int:
    """Write or print; returns the exit status."""
    if bool(args.traces) + args.table + args.versions != 1:
        raise ToolError("name traces, --versions, or --table: one of these")
    if not args.table:
        result = versions(args.result.parent) if args.versions else study(args.traces)
        write_text(args.result, json.dumps(result, indent=1) + "\n")
    rows = read_json(args.result)["rows"]
    print(versions_table(rows) if "version" in rows[0] else table(rows))
    return 0


main = program(build_parser, main_study)

if __name__ == "__main__":
    sys.exit(main())

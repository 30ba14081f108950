#!/usr/bin/env python3
"""Which operators of a training step could be one kernel, where in the code they are, and what that
would save: of a version script or of a model of your own.

Every operator of a step is recorded with the memory that it reads and writes, and the profiler
times its kernels. Streaming operators, which do little but read and write, are joined to those that
make what they read. A chain is then predicted to take as long as a copy that moves the bytes which
must still cross memory; what stays in the chip costs nothing. Copies, a matrix product and the
least time of a kernel are measured in the same run. Matrix products, and operators that nobody
here understands, keep their time; the latter are named.

The lines are those of the code outside of PyTorch that called the operators. Those of a backward
pass are the lines of the forward pass that they belong to.

--model FILE.py:FUNCTION takes a function without arguments. It returns (model, batch), and
model(**batch) is the loss, a scalar or with a .loss; the step is forward, backward and AdamW. Or
it returns a function without arguments that takes one training step, on the device of its choice.

Without a GPU nothing is computed. Operators, bytes and FLOPs are exact; there are times only with
--rates DIR, a folder of results such as results/h100, and they are estimates for that GPU.

Examples:
  python analysis_tools/find_fusions.py tiny_llama_v1.py --use-amp --seq-len 128
  python analysis_tools/find_fusions.py tiny_llama_v1.py --use-amp --check
  python analysis_tools/find_fusions.py --model my_model.py:build --use-amp --json found.json
  python analysis_tools/find_fusions.py --model my_model.py:build --rates results/h100 \\
      --plot found.png
"""

from __future__ import annotations

import _root

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lab.cli import Parser, ToolError, print_notes, program
from lab.files import write_text
from lab.script import interpret_without_gpu, parser_around
from lab.show import Column, drawing, render, save_figure

if TYPE_CHECKING:
    from lab.fusions.predict import Finding
    from lab.fusions.step import Step

PROG = Path(__file__).name
ROUNDS = 7  # turns of --check


def build_parser() -> Parser:
    """The command line."""
    parser = parser_around(PROG, __doc__, "tiny_llama_v1.py")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="a version script")
    model = "a function that returns a model and a batch, or a step"
    parser.add_argument("--model", metavar="FILE.py:FUNCTION", help=model)
    parser.add_count("--top", 12, "chains to print")
    parser.add_flag(
        "--check", "compile the same with inductor, and measure both as graphs in turns"
    )
    parser.add_path("--rates", "DIR", "without a GPU: times with the rates in this folder")
    parser.add_path("--json", "FILE.json", "also write all that was found")
    parser.add_path("--plot", "FILE.png", "also draw a bar for each chain, now and fused")
    return parser


def model_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """What --model takes beside, as the version scripts do."""
    parser = Parser(prog=PROG, allow_abbrev=False)
    parser.add_argument("--use-amp", action="store_true")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    precision = ("highest", "high", "medium")
    parser.add_argument("--matmul-precision", choices=precision, default="highest")
    return parser.parse_args(argv)


def examine(args: argparse.Namespace, argv: Sequence[str]) -> dict:
    """Record and predict, and check if asked for: all that the report and --json have."""
    import torch

    from lab.fusions import predict
    from lab.fusions import step as steps
    from lab.fusions.rates import measure_rates, read_rates

    if bool(args.script) == bool(args.model):
        raise ToolError("name a version script, or --model FILE.py:FUNCTION: one of both")
    gpu = torch.cuda.is_available() and not {"cpu", "--device=cpu"} & set(argv)
    if args.check and not gpu:
        raise ToolError("--check compares times and needs a GPU", status=4)
    if args.rates and gpu:
        raise ToolError("--rates is for where there is no GPU: here they are measured")
    device = torch.device("cuda" if gpu else "cpu")
    rates = read_rates(args.rates) if args.rates else None
    if args.model:
        options = model_arguments(argv)
        torch.set_float32_matmul_precision(options.matmul_precision)
        precision = "bf16" if options.use_amp else "fp32"

        def build() -> Step:
            return steps.from_function(args.model, options, device)
    else:
        precision = "bf16" if "--use-amp" in argv else "fp32"

        def build() -> Step:
            return steps.from_script(args.script, argv)

    if gpu:
        step = build()
        rates = measure_rates(torch.bfloat16 if precision == "bf16" else torch.float32)
        recorded = steps.measure(step, rates)
    else:
        step, recorded = steps.count(build)
    result = content(step.name, predict.find(recorded, rates), measured=gpu)
    result["precision"] = precision
    if args.check:
        result["check"] = steps.compared(step, ROUNDS)
    return result


def content(name: str, found: Finding, measured: bool) -> dict:
    """What was found, as --json writes it: microseconds, bytes, and nulls for times not known."""
    from lab.fusions import predict

    total = found.levels["now"]
    return {
        "schema_version": 1,
        "name": name,
        "measured": measured,
        "rates": found.rates and asdict(found.rates),
        "flop": sum(operator.flop for operator in found.recorded.operators),
        "operators": len(found.recorded.operators),
        "untouched_us": None if total.us is None else found.kept_us,
        "levels": {key: asdict(value) for key, value in found.levels.items()},
        "chains": predict.chains(found),
        "not_understood": predict.not_understood(found),
        "notes": found.recorded.notes,
    }


def chains_table(result: dict, top: int) -> str:
    """The chains that save the most."""
    step = result["levels"]["now"]["us"]

    def ms(key: str):
        return lambda row: None if row[key] is None else row[key] / 1e3

    def saved(row: dict) -> float | None:
        return None if step is None else 100 * (row["us_now"] - row["us_fused"]) / step

    columns = [
        Column("saves", saved, ".1f", " %"),
        Column("ms now", ms("us_now"), ".3f"),
        Column("fused", ms("us_fused"), ".3f"),
        Column("MB now", lambda row: row["bytes_now"] / 1e6, ".1f"),
        Column("fused", lambda row: row["bytes_fused"] / 1e6, ".1f"),
        Column("places", "places", "d"),
        Column("kernels", "launches_now", "d"),
        Column("pass", "phase", text=True),
        Column("lines", "lines", text=True),
        Column("chain", "chain", text=True),
    ]
    times = step is not None
    return render(columns if times else columns[3:], result["chains"][:top], "text")


def levels_table(result: dict) -> str:
    """The whole step, now and with each step of fusion."""
    from lab.fusions.predict import LEVELS

    now = result["levels"]["now"]
    rows = [
        {"what": ({"now": "the step now"} | LEVELS)[k], **v} for k, v in result["levels"].items()
    ]
    columns = [
        Column("", "what"),
        Column("ms", lambda row: row["us"] and row["us"] / 1e3, ".3f"),
        Column("speed-up", lambda row: row["us"] and now["us"] / row["us"], ".2f", "x"),
        Column("GB", lambda row: row["bytes"] / 1e9, ".3f"),
        Column("kernels", "launches", "d"),
    ]
    return render(
        [c for c in columns if now["us"] or c.label not in ("ms", "speed-up")], rows, "text"
    )


def report(result: dict, top: int) -> str:
    """What a person reads."""
    rates, count = result["rates"], len(result["chains"])
    where = f"measured on {rates['device_name']}" if result["measured"] else "counted, not run"
    if rates and not result["measured"]:
        where += f"; times are estimates with the rates of {rates['device_name']}"
    head = f"{result['name']}, {result['precision']}: {result['operators']} operators,"
    lines = [f"{head} {result['flop'] / 1e9:.1f} GFLOP in matrix products; {where}", ""]
    lines += [chains_table(result, top) if count else "no chain to fuse"]
    lines += [f"... and {count - top} more (--top {count})"] * (count > top)
    lines += ["", levels_table(result)]
    if result["untouched_us"] is not None:
        rest = f"{result['untouched_us'] / 1e3:.3f} ms"
        lines += [f"No chain touches {rest}: matrix products, the optimizer, what is named below."]
    if rates:
        gb, least = rates["copy_bytes"][-1] / rates["copy_us"][-1] / 1e3, min(rates["copy_us"])
        rate = f"{gb:.0f} GB/s in a large copy, {least:.2f} us for the least kernel"
        lines += [f"Rates: {rate}, {rates['gemm_tflops']:.0f} TFLOP/s in a large product"]
    for row in result["not_understood"]:
        time = "" if row["us"] is None else f", {row['us'] / 1e3:.3f} ms"
        lines += [
            f"Not understood, left as it is: {row['operator']} ({row['calls']}x{time}) {row['lines']}"
        ]
    lines += [f"Not understood: {note}" for note in result["notes"]]
    return "\n".join(lines + check_lines(result))


def check_lines(result: dict) -> list[str]:
    """The prediction beside what was measured."""
    if not (check := result.get("check")):
        return []
    now, then = (result["levels"][key]["us"] / 1e3 for key in ("now", "chains"))
    columns = [Column("", "what"), Column("predicted", "a", ".3f"), Column("measured", "b", ".3f")]
    columns += [Column("off", lambda row: 100 * (row["a"] / row["b"] - 1), "+.1f", " %")]
    rows = [
        {"what": "ms now, as a graph", "a": now, "b": check["now_ms"]},
        {"what": "ms fused (a), compiled by inductor", "a": then, "b": check["compiled_ms"]},
        {"what": "speed-up", "a": now / then, "b": check["speedup"]},
    ]
    return ["", render(columns, rows, "text")]


def draw(path: Path, result: dict, top: int) -> None:
    """A bar for each chain, now and fused: time, or bytes where there is none."""
    key, scale, unit = ("us", 1e3, "ms") if result["rates"] else ("bytes", 1e6, "MB")
    rows = result["chains"][:top][::-1]
    figure, axes = drawing().subplots(figsize=(11, 1.5 + 0.5 * len(rows)), layout="constrained")
    for shift, when, colour in ((0.2, "now", "#9aa5b1"), (-0.2, "fused", "#1f77b4")):
        values = [row[f"{key}_{when}"] / scale for row in rows]
        axes.barh([i + shift for i in range(len(rows))], values, 0.38, label=when, color=colour)
    labels = [f"{row['chain'][:60]}\n{row['phase']}, {row['lines'][:60]}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize="small")
    axes.set_xlabel(f"{unit} of a step")
    axes.set_title(f"{result['name']}: chains, now and as one kernel each")
    axes.legend()
    save_figure(figure, path)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Examine, print, write; returns the exit status."""
    if args.plot:
        drawing()  # before anything is measured
    interpret_without_gpu()
    result = examine(args, argv)
    print(report(result, args.top))
    if args.json:
        write_text(args.json, json.dumps(result, indent=1) + "\n")
    if args.plot:
        draw(args.plot, result, args.top)
    if not result["measured"]:
        print_notes(PROG, "there is no GPU, or it was not wanted: kernels are operators here")
    return 0


main = program(build_parser, run, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

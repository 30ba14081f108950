"""Which operators of a training step could be one kernel, where in the code they are, and what that
would save: of a version script, or of a model of your own.

Every operator of a step is recorded with the memory that it reads and writes, and the profiler
times its kernels. Streaming operators, which do little but read and write, are joined to those that
make what they read. A chain is then predicted to take as long as a copy of the bytes that must
still cross memory; rates are measured in the same run. Matrix products keep their time, as do
operators that are not understood, which are named. Lines are those outside of PyTorch that call the
operators, in a backward pass those of its forward pass.

--model FILE.py:FUNCTION names a function without arguments, in a file that is imported as `python
FILE.py` would run it; the file's own arguments stand behind --. It returns (model, batch), and
model(**batch) is the loss, a scalar or with a .loss: the step is forward, backward and AdamW. Or it
returns a function without arguments that takes one training step, on the device of its choice. It
takes --use-amp as the version scripts do. What torch.compile has made, and kernels of your own, are
measured as they are, named, and never fused.

--check takes both sides in turns as graphs. Where one cannot be a graph, as it waits for the
device, they are compared by the time in which any of their kernels runs, from traces.

Without a GPU nothing is computed, unless the step asks for values: which operator does is said, and
two steps are taken on the CPU. Operators, bytes and FLOPs are those of a CPU's operators, each
counted as a kernel; a GPU can have other ones for attention, norms and dropout. Autocast and
optimizers choose as on a GPU, and a DataLoader loads here, without workers. Times need --rates DIR,
such as results/h100, and are estimates for that GPU. Those of results/mi300x come from traces that
others recorded, and are printed with their error.

--trace FILE[.gz] predicts from a trace of torch.profiler.profile(record_shapes=True), of NVIDIA or
AMD: times are its own.

Examples:
  find-fusions tiny_llama_v1.py --use-amp --seq-len 128
  find-fusions tiny_llama_v1.py --use-amp --check
  find-fusions --model my_model.py:build --use-amp --json found.json
  find-fusions --model train.py:build --rates results/h100 -- --lr 1e-3
  find-fusions --trace trace.json.gz
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from fusion_lab.cli import Parser, ToolError, documented_parser, program, sign_of_life
from fusion_lab.files import write_text
from fusion_lab.profile.kernels import category
from fusion_lab.script import interpret_without_gpu
from fusion_lab.show import Column, render

if TYPE_CHECKING:  # where PyTorch is missing, --help works
    from fusion_lab.fusions.rates import Rates
    from fusion_lab.fusions.record import Recorded
    from fusion_lab.fusions.step import Step

PROG = "find-fusions"


def build_parser() -> Parser:
    """The command line."""
    usage = "%(prog)s SCRIPT|--model FILE.py:FUNCTION [arguments] [its own: of a FILE.py behind --]"
    parser = documented_parser(PROG, __doc__, usage)
    model = "a function that returns a model and a batch, or a step"
    parser.add_argument("--model", metavar="FILE.py:FUNCTION", help=model)
    parser.add_path("--trace", "FILE", "a trace of torch.profiler with shapes, of any GPU")
    parser.add_count("--top", 12, "chains to print")
    parser.add_flag(
        "--check", "compile the same with inductor, and measure both in turns: graphs, or traces"
    )
    parser.add_path("--rates", "DIR", "without a GPU: times with the rates in this folder")
    parser.add_path("--json", "FILE.json", "also write all that was found")
    return parser


def script_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The version script among arguments, and the others, which are its own."""
    script = next((word for word in argv if word.endswith(".py") and word[0] != "-"), "")
    rest = [*argv]
    if script:
        rest.remove(script)
    return script, rest


def of_trace(args: argparse.Namespace, argv: Sequence[str]) -> dict:
    """What a trace tells of a step."""
    from fusion_lab.fusions.trace import from_trace

    if argv or args.model or args.check or args.rates:
        raise ToolError("--trace FILE takes --top and --json alone: the step is in it")
    return described(*from_trace(args.trace))


def of_script(args: argparse.Namespace, argv: Sequence[str]) -> dict:
    """What a step of a version script does."""
    from fusion_lab.fusions import step as steps

    script, rest = script_of(argv)
    if not script:
        raise ToolError("name a version script, or --model FILE.py:FUNCTION: one of the two")
    on_gpu = steps.script_device(script, rest) == "cuda"
    return of_step(args, partial(steps.from_script, script, rest), on_gpu)


def of_model(args: argparse.Namespace, argv: Sequence[str]) -> dict:
    """What a step of somebody's own model does. Arguments behind `--` are its file's."""
    import torch

    from fusion_lab.fusions import step as steps

    end = [*argv, "--"].index("--")
    if script_of(argv[:end])[0]:
        raise ToolError("name a version script, or --model FILE.py:FUNCTION: one of the two")
    if unknown := [word for word in argv[:end] if word != "--use-amp"]:
        raise ToolError(f"{unknown[0]}: --model takes --use-amp, and its file's own behind --")
    on_gpu = torch.cuda.is_available()
    with steps.users_function(args.model, argv[end + 1 :]) as function:
        build = partial(steps.from_function, args.model, function, "--use-amp" in argv[:end])
        return of_step(args, build, on_gpu)


def of_step(args: argparse.Namespace, build: Callable[[], Step], on_gpu: bool) -> dict:
    """What a step does that is taken here, or looked at where there is no GPU."""
    from fusion_lab.fusions import step as steps
    from fusion_lab.fusions.groups import Finding
    from fusion_lab.fusions.rates import measure_rates, read_rates

    if not on_gpu:
        if args.check:
            raise ToolError("--check compares times, and needs a GPU", status=4)
        rates = read_rates(args.rates) if args.rates else None
        step, recorded = steps.count(build)
        return described(step.name, recorded, rates)
    if args.rates:
        raise ToolError("--rates is for where no GPU runs the step")
    step = build()
    recorded = steps.measure(step)
    rates = measure_rates()
    result = described(step.name, recorded, rates)
    if args.check:
        check = result["check"] = steps.compared(step, recorded.launched)
        as_measured = Finding(recorded, rates.in_trace() if "traced" in check else rates)
        check["predicted_us"] = {
            "now": as_measured.levels["now"]["us"],
            "compiled": as_measured.compiled_us(),
        }
    return result


def described(name: str, recorded: Recorded, rates: Rates | None) -> dict:
    """What the report and --json have of a step."""
    from fusion_lab.fusions.groups import Finding

    finding = Finding(recorded, rates)
    flop = recorded.flop()
    return {
        "schema_version": 2,
        "name": name,
        "precision": ", ".join(dtype for dtype, _ in flop.most_common()) or "no products counted",
        "run": recorded.run,
        "call": recorded.call,
        "measured": recorded.run == "measured",
        "rates": rates and asdict(rates),
        "without_rate": sorted(finding.without),
        "operators": len({operator.call for operator in recorded.operators}),
        "flop": sum(flop.values()),
        "flop_by_type": dict(flop),
        "levels": finding.levels,
        "untouched_us": finding.untouched_us(),
        "otherwise_us": finding.otherwise_us(),
        "chains": finding.rows(),
        "not_understood": finding.unknown(),
        "unwritten": recorded.unwritten,
        "remarks": finding.remarks(),
    }


RUN = {
    "fake": "nothing was run",
    "real": "two steps were really taken on this CPU",
    "measured": "measured",
}


def part(key: str, unit: float) -> Callable[[dict], float | None]:
    """What a column has of a row: a number in another unit."""
    return lambda row: None if row[key] is None else row[key] / unit


def report(result: dict, top: int) -> str:
    """What a person reads."""
    rows = result["chains"]
    lines = head(result)
    if rows:
        lines += ["", chains_table(result, top)]
        lines += [f"and {len(rows) - top} more (--top {len(rows)})"] * (len(rows) > top)
    lines += ["", levels_table(result), *totals(result), *not_understood(result)]
    lines += [f"Note: {remark}" for remark in result["remarks"]]
    return "\n".join(lines + (checked(result["check"]) if "check" in result else []))


def head(result: dict) -> list[str]:
    """Of which step these are the numbers, and where they come from."""
    where = RUN[result["run"]]
    if result["measured"]:
        where = f"measured on {result['rates']['device_name']}"
    elif result["levels"]["now"]["us"] is not None:
        where += f", times are estimates with the rates of {result['rates']['device_name']}"
    where = f"call {result['call']} of the step, {where}" if result["call"] else where
    counted = f"{result['operators']} operators, {result['flop'] / 1e9:.4g} GFLOP in products"
    lacking = [row["operator"] for row in result["not_understood"] if "FLOP" in row["lacks"]]
    counted += f" without {', '.join(lacking)}" if lacking else ""
    lines = [f"{result['name']}, {result['precision']}: {counted}; {where}"]
    if not result["measured"]:
        lines += [
            "These are a CPU's operators: attention, norms and dropout can be others on a GPU."
            " Autocast and optimizers choose as there."
        ]
    if without := result["without_rate"]:
        lines += [f"No times of the step: there is no rate for products in {', '.join(without)}."]
    return lines


def chains_table(result: dict, top: int) -> str:
    """A line for each chain: with times where there are some."""
    now = result["levels"]["now"]["us"]

    def saved(row: dict) -> float:
        return 100 * (row["us_now"] - row["us_fused"]) / now

    columns = [
        Column("MB now", part("bytes_now", 1e6), ".1f"),
        Column("fused", part("bytes_fused", 1e6), ".1f"),
        Column("places", "places"),
        Column("kernels", "kernels_now"),
        Column("fused", "kernels_fused"),
        Column("pass", "pass", text=True),
        Column("lines", "lines", text=True),
        Column("chain", "chain", text=True),
    ]
    if result["rates"]:
        columns.insert(0, Column("ms now", part("us_now", 1e3), ".3f"))
        columns.insert(1, Column("fused", part("us_fused", 1e3), ".3f"))
    if now is not None:
        columns.insert(0, Column("saves", saved, ".1f", " %"))
    return render(columns, result["chains"][:top], "text")


def levels_table(result: dict) -> str:
    """The whole step by level of fusion."""
    from fusion_lab.fusions.groups import LEVELS

    levels = result["levels"]
    now = levels["now"]["us"]
    columns = [
        Column("", "what"),
        Column("GB", part("bytes", 1e9), ".3f"),
        Column("kernels", "kernels"),
    ]
    if now is not None:
        columns.insert(1, Column("ms", part("us", 1e3), ".3f"))
        speedup = Column("speed-up", lambda row: row["us"] and now / row["us"], ".2f", "x")
        columns.insert(2, speedup)
    return render(columns, [{"what": LEVELS[name], **levels[name]} for name in levels], "text")


def totals(result: dict) -> list[str]:
    """What no chain has, what a compiler does beside fusing, and the rates."""
    if result["levels"]["now"]["us"] is None:
        return []
    lines = [f"No chain touches {result['untouched_us'] / 1e3:.3f} ms of it."]
    if less := result["otherwise_us"]:
        what = "convolutions turn no pictures and add no bias, and odd rows are padded"
        lines += [f"Compiled, {what}: {less / 1e3:.3f} ms less."]
    rates = result["rates"]
    if "laws" in rates:
        return [*lines, from_others(result["levels"], rates)]
    copy = f"A large copy reaches {rates['gb_per_s']:.0f} GB/s"
    return [*lines, f"{copy}, the least kernel takes {rates['least_us']:.2f} us."]


def from_others(levels: dict, rates: dict) -> str:
    """The busy time of a GPU that was not at hand, with how far off such predictions were."""
    off = [100 * (share - 1) for share in rates["left_out"].values()]
    near = sum(abs(percent) <= 15 for percent in off)
    now = levels["now"]["us"] / 1e3
    fused = levels["chains"]["us"] / 1e3
    line = (
        f"GPU busy for {now:.3f} ms now, {fused:.3f} ms fused (a): predicted from others' traces,"
        f" not measured. {len(off)} models, each predicted from the others, were off by"
        f" {min(off):+.0f} to {max(off):+.0f} %, {near} of them by at most 15 %"
    )
    if steps := [100 * (share - 1) for share in rates["checked"].values()]:
        line += (
            f"; {len(steps)} training steps of an H100 by {min(steps):+.0f} to {max(steps):+.0f} %"
        )
    return f"{line}. No trace has fused kernels, an optimizer or attention's backward pass."


def not_understood(result: dict) -> list[str]:
    """Operators and kernels of which something is not known."""
    lines = []
    for row in result["not_understood"]:
        spent = "" if row["us"] is None else f", {row['us'] / 1e3:.3f} ms"
        missing = f"; missing in the totals: {row['lacks']}" if row["lacks"] else ""
        lines += [
            f"Not understood: {row['operator']} ({row['calls']}x{spent}) at {row['lines']}{missing}"
        ]
    if unwritten := result["unwritten"]:
        what = "operators read what no operator wrote: kernels that PyTorch does not see; the first"
        lines += [f"Not understood: {len(unwritten)} {what} is {unwritten[0]}"]
    return lines


def checked(check: dict) -> list[str]:
    """What the step and the same compiled took, beside the prediction; what is another program than
    was profiled is no verdict on it."""
    if "error" in check:
        return ["", f"not compared: {check['error']}"]
    how = "as graphs in turns, and compiled by inductor"
    if "traced" in check:
        how = "in turns, not as graphs: the time in which any of its kernels runs, from traces, and"
        how += f" compiled by inductor; {check['traced']}"
    lines = ["", f"{how}:"]
    now_ms = check["predicted_us"]["now"] / 1e3
    fused_ms = check["predicted_us"]["compiled"] / 1e3
    for what, key, predicted in (
        ("ms now", "now_ms", now_ms),
        ("ms fused", "compiled_ms", fused_ms),
        ("speed-up", "speedup", now_ms / fused_ms),
    ):
        off = f"{100 * (predicted / check[key] - 1):+.1f} %"
        if check["other"]["now"] or (key != "now_ms" and check["other"]["compiled"]):
            off = "another program"
        elif check["unchanged"] and key != "now_ms":
            off = "nothing is compiled"
        lines += [f"{what}: predicted {predicted:.3f}, measured {check[key]:.3f} ({off})"]
    if names := [*check["other"]["now"], *check["other"]["compiled"]]:
        kinds = " and ".join(dict.fromkeys(map(category, names)))
        lines += [
            f"another program: it runs other kernels for {kinds} than were profiled, so this is no"
            " verdict on the prediction. --json has some of their names."
        ]
    return lines


def find(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Examine, print, write; returns the exit status."""
    interpret_without_gpu()
    with sign_of_life("find-fusions"):
        examine = of_trace if args.trace else of_model if args.model else of_script
        result = examine(args, argv)
    if args.json:
        write_text(args.json, json.dumps(result, indent=1) + "\n")
    print(report(result, args.top))
    return 0


main = program(build_parser, find, of_scripts=True)

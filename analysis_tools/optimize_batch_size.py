#!/usr/bin/env python3
"""The best batch size under a memory limit, measured: for throughput, latency or memory per sample.

The batch size doubles from 1 until a run is out of memory or takes more than the wanted part of the
device's memory; then the search halves the gap between what fits and what does not, down to an
eighth of the size. Each size is measured alone, as a graph where there is a GPU. On a CPU the
memory is that of the machine, peak memory is that of tensors in a step, and a size that would not
fit by its number of samples is not tried.

--optimization-target throughput is the most samples per second, latency the shortest step, memory
the fewest MB per sample. The table of a search and its numbers are the same for all three: the same
command goes on after an interruption, and answers from a finished search; a search with other
settings needs another --output.

Examples:
  python analysis_tools/optimize_batch_size.py --target-memory-usage 0.8 --seq-len 128 \\
      --optimization-target throughput
  python analysis_tools/optimize_batch_size.py --script tiny_openfold_v3.py --use-amp \\
      --output openfold.png
  python analysis_tools/optimize_batch_size.py --max-batch-size 16 --seq-len 64 --num-layers 2
"""

from __future__ import annotations

import _root

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from lab.cli import Parser, ToolError, print_notes, program
from lab.script import add_script, load_script, parser_around, script_arguments
from lab.show import Column, cell, drawing, range_of_speeds, render, save_figure, write_csv
from lab.study import Part, check_failed, heading, measure_study, read_rows, read_study
from lab.turns import graph_of, in_turns, speeds

PROG = Path(__file__).name
SCRIPT = "tiny_llama_v2.py"
TARGETS = {  # of a row, the smaller the better
    "throughput": lambda row: -row["samples_per_sec"],
    "latency": lambda row: row["batch_ms"],
    "memory": lambda row: row["peak_mb"] / row["batch_size"],
}
ROWS = {"keys": ("batch_size", "script", "argv"), "measured": ("batch_ms", "turns_ms", "peak_mb")}
GROWTH = 1.03  # more samples per second than by this factor is growth


def part_of_memory(text: str) -> float:
    """argparse type: above 0, up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and not above 1, not {text!r}")
    return value


def build_parser() -> Parser:
    """The command line."""
    parser = parser_around(PROG, __doc__, SCRIPT)
    add = parser.add_argument
    add_script(parser, SCRIPT)
    part = {"type": part_of_memory, "default": 0.8, "metavar": "X"}
    add("--target-memory-usage", **part, help="part of memory (default: 0.8)")
    targets = {"choices": TARGETS, "default": "throughput"}
    add("--optimization-target", **targets, help="(default: %(default)s)")
    parser.add_count("--max-batch-size", 65536, "end there")
    parser.add_count("--rounds", 5, "turns of each size")
    picture = "picture (.png, .svg, .pdf), with its numbers in FILE.json beside it"
    parser.add_path("--output", "FILE", picture)
    parser.add_path("--csv", "FILE", "also write the table, unrounded")
    return parser


def memory_mb(device: str) -> float:
    """Memory of the device, that of the machine for a CPU."""
    if device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e6
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 1e6


def next_size(
    rows: Sequence[dict], limit_mb: float, most: int, host_mb: float | None = None
) -> int | None:
    """The batch size to measure after these rows, up to `most` and `limit_mb`; None at the end.

    On a host with `host_mb` a size that would take more than that by its number of samples counts
    as too large.
    """
    if any(row.get("status") == "failed" for row in rows):
        return None
    fitting = [row for row in rows if "status" not in row and row["peak_mb"] <= limit_mb]
    good, peak = max(((row["batch_size"], row["peak_mb"]) for row in fitting), default=(0, 0.0))
    bad = min((row["batch_size"] for row in rows if row not in fitting), default=None)
    while good < most:
        step = 1 << max(0, good.bit_length() - 4)  # a power of two, about an eighth
        size = min(max(1, 2 * good), most) if bad is None else (good + bad) // 2 // step * step
        if not good < size < (bad or size + 1):
            return None
        if host_mb is None or not good or peak * size / good <= host_mb:
            return size
        bad = size
    return None


def search(path: Path, script: str, argv: Sequence[str], rounds: int, **limits) -> Iterator[Part]:
    """Parts of the study; which comes next follows from the rows that are there."""
    unfinished = path.with_suffix(".partial.json")
    while size := next_size(read_rows(path, **ROWS) or read_rows(unfinished, **ROWS), **limits):
        side = (script, [*argv, "--batch-size", str(size)])
        yield {"batch_size": size}, partial(measured_alone, side, rounds)


def measured_alone(side: tuple[str, list[str]], rounds: int) -> dict:
    """The row of a batch size; ToolError where peak memory cannot be told."""
    row = in_turns({"": side}, rounds)[""]
    if "status" not in row and row["peak_mb"] is None:
        reason = "graphs of torch.compile share their memory, so no peak is known"
        raise ToolError(f"{reason}: use another mode")
    return row


def numbers(row: dict, total_mb: float, target: float) -> dict:
    """What the table says of a row."""
    finished = bool(row.get("turns_ms"))
    part = row["peak_mb"] / total_mb if finished else None
    return {
        "batch_size": row["batch_size"],
        "status": row.get("status", "ok"),
        **speeds(row),
        "samples_per_sec": 1e3 * row["batch_size"] / row["batch_ms"] if finished else None,
        "batch_ms": row.get("batch_ms"),
        "peak_mb": row["peak_mb"] if finished else None,
        "part_of_memory": part,
        "fits": part is not None and part <= target,
        "error": row.get("error"),
    }


def table(rows: Sequence[dict]) -> str:
    """The rows in Markdown."""

    def memory(row: dict) -> str:
        above = "" if row["fits"] else ", above the limit"
        return cell(row["part_of_memory"], ".1%", above)

    columns = [
        Column("batch size", lambda row: str(row["batch_size"])),
        Column("samples/sec", "samples_per_sec", ".1f").or_ended(),
        Column("in turns", range_of_speeds),
        Column("ms per step", "batch_ms", ".2f"),
        Column("peak MB", "peak_mb", ".1f"),
        Column("of memory", memory),
    ]
    return render(columns, rows)


def answer(rows: Sequence[dict], objective: str) -> list[str]:
    """The best of the sizes that fit, and from where on throughput does not grow."""
    best = min(rows, key=TARGETS[objective])
    fastest = max(row["samples_per_sec"] for row in rows)
    enough = next(row for row in rows if row["samples_per_sec"] * GROWTH >= fastest)
    size, part = best["batch_size"], f"{best['part_of_memory']:.1%} of memory"
    speed = f"{best['samples_per_sec']:.1f} samples/sec, {best['batch_ms']:.2f} ms per step"
    within = f"Batch size {enough['batch_size']} is the smallest within 3 %"
    return [
        f"Best for {objective}: batch size {size}, {speed}, {best['peak_mb']:.1f} MB ({part}).",
        f"{within} of the highest throughput: "
        f"{enough['samples_per_sec']:.1f} of {fastest:.1f} samples/sec.",
    ]


def draw(path: Path, rows: Sequence[dict], target: float) -> None:
    """Throughput with its range and the part of memory, by batch size."""
    pyplot = drawing()
    done = {key: [row[key] for row in rows if row["status"] == "ok"] for key in rows[0]}
    size = {"figsize": (7, 6), "sharex": True, "layout": "constrained"}
    figure, (speed, memory) = pyplot.subplots(2, 1, **size)
    sizes, between = done["batch_size"], (done["samples_per_sec_min"], done["samples_per_sec_max"])
    speed.plot(sizes, done["samples_per_sec"], "o-")
    speed.fill_between(sizes, *between, alpha=0.3)
    memory.plot(sizes, [100 * part for part in done["part_of_memory"]], "o-")
    memory.axhline(100 * target, color="C3", linestyle="--", label="limit")
    gone = [row["batch_size"] for row in rows if row["status"] == "oom"]
    if gone:  # at the top, in parts of the axes' height
        style = {"transform": memory.get_xaxis_transform(), "label": "out of memory"}
        memory.plot(gone, [0.97] * len(gone), "x", **style)
    memory.set(xlabel="batch size", ylabel="peak memory, % of the device's", xscale="log")
    memory.set_xticks(sizes + gone, map(str, sizes + gone))
    memory.tick_params(axis="x", labelrotation=60)
    memory.minorticks_off()
    memory.legend()
    speed.set_ylabel("samples/sec, with the range of turns")
    for axes in (speed, memory):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def optimize(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Search, print and draw; returns the exit status."""
    if args.output and args.output.suffix not in (".png", ".svg", ".pdf"):
        raise ToolError(f"--output {args.output}: must end in .png, .svg or .pdf")
    if any(word.partition("=")[0] == "--batch-size" for word in argv):
        raise ToolError("--batch-size is what is looked for: --max-batch-size limits it")
    module, target = load_script(args.script), args.target_memory_usage
    options, parsed = script_arguments(module, graph_of(argv), None)
    total, host = memory_mb(parsed.device), parsed.device == "cpu"
    if host:
        machine = f"memory is that of the machine, {total / 1e3:.1f} GB"
        print_notes(PROG, f"no GPU in use: {machine}, and peaks are of tensors")
    path = (args.output or Path(f"batch_size_{module.SCRIPT}")).with_suffix(".json")
    limits = {"limit_mb": target * total, "most": args.max_batch_size}
    limits["host_mb"] = total if host else None
    parts = search(path, module.SCRIPT, options, args.rounds, **limits)
    settings = {"script": module.SCRIPT, "argv": list(argv), "rounds": args.rounds, **limits}
    measure_study(path, parts, keep=True, **settings)
    content = read_study(path, **ROWS)
    measured = sorted(content["rows"], key=lambda row: row["batch_size"])
    rows = [numbers(row, total, target) for row in measured]
    fitting = [row for row in rows if row["fits"]]
    print(f"{heading(content, module.SCRIPT)}\n\n{table(rows)}\n", flush=True)
    check_failed(content["rows"])
    if not fitting:
        limit = f"{target:.0%} of {total / 1e3:.1f} GB"
        raise ToolError(f"even batch size 1 takes more than {limit}", status=3)
    print("\n".join(answer(fitting, args.optimization_target)), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    if args.output:
        draw(args.output, rows, target)
        print(f"\nWritten: {args.output}, {path}")
    return 0


main = program(build_parser, optimize, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

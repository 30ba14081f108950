#!/usr/bin/env python3
"""Loss, speed, memory and gradients of all stages in one Markdown table; stage 5 is the final
version.

SOURCE is the folder that run_all_stages.sh has filled (default: results/ beside this file), or a
file that --output wrote. In a folder each stage also gets its kernels as <stage>_profile.csv, from
rocprofv3 or from the PyTorch profiler: the columns of rocprofv3's *_kernel_stats.csv, with
semicolons for the commas in names, so that `sort -t','` works.

Kernel ms per step is the sum over the kernels of a profiled step; on a CPU there are none. A dash
stands for what a run did not measure. The stages ran one after the other: small differences of
their times are no comparison.

Examples:
  python exercises/performance_debugging/compare_stages.py
  python exercises/performance_debugging/compare_stages.py \\
      --output results/h100/performance_debugging.json
  python exercises/performance_debugging/compare_stages.py results/h100/performance_debugging.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fusion_lab.cli import ToolError, documented_parser, note, run_tool
from fusion_lab.files import write_text
from fusion_lab.profile.kernels import (
    WITH_WARM_UP,
    KernelStatistics,
    load_trace,
    read_statistics,
    write_statistics,
)
from fusion_lab.profile.tables import analyse
from fusion_lab.records import Gradients, Stages, read
from fusion_lab.runs import Run, differences, load_run, report_failed
from fusion_lab.show import NOT_FINISHED, Column, render

PROG = Path(__file__).name
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Stage:
    """A run, with what its result file does not have."""

    run: Run
    gradient_percent: float | None  # of the parameters, those that have a gradient
    kernel_ms: float | None  # per step


def read_profile(folder: Path, result: dict) -> tuple[list[KernelStatistics], float | None] | None:
    """Kernels of a stage and their time per step in milliseconds; on a CPU operators and None. None
    without a profile.

    ToolError says what is wrong with the profiler's file.
    """
    training = result["training"]
    if (path := folder / "rocprofv3" / "stats.csv").exists():
        rows = read_statistics(path)
        whole = (path.parent / WITH_WARM_UP).exists()
        return rows, None if whole else sum(row.total_ns for row in rows) / 1e6 / training[
            "num_steps"
        ]
    if not (path := folder / f"{result['script']}_trace.json.gz").exists():
        return None
    profile = analyse(load_trace(path), ("data", "graph" if training["cuda_graph"] else "forward"))
    milliseconds = sum(row.total_ns for row in profile.statistics) / 1e6 / profile.steps
    return profile.statistics, milliseconds if profile.unit == "kernels" else None


def read_folder(directory: Path) -> list[Stage]:
    """The stages below this directory in order, each in a folder of its own.

    Writes their kernels beside it.
    """
    stages = []
    for path in sorted(directory.glob("*/*_summary.json")):
        folder, run = path.parent, load_run(path)
        gradients = folder / f"{run.result['script']}_gradients.json"
        try:
            profile = read_profile(folder, run.result)
        except ToolError as error:
            raise ToolError(f"{folder}: {error}", status=1) from error
        if profile:
            rows = [replace(row, name=row.name.replace(",", ";")) for row in profile[0]]
            write_statistics(directory / f"{folder.name}_profile.csv", rows)
        percent = read(Gradients, gradients)["percent"] if gradients.exists() else None
        stages.append(Stage(run, percent, profile and profile[1]))
    return stages


def read_study(path: Path) -> list[Stage]:
    """The stages in a file that --output wrote."""
    stages = []
    for entry in read(Stages, path)["stages"]:
        run = Run(entry["stage"], path, entry["result"])
        stages.append(Stage(run, entry["gradient_percent"], entry["kernel_ms"]))
    return stages


def study(stages: Sequence[Stage]) -> dict:
    """What --output writes: the result files, and what they do not have."""
    own = (
        {"stage": s.run.name, "gradient_percent": s.gradient_percent, "kernel_ms": s.kernel_ms}
        for s in stages
    )
    rows = [{**entry, "result": stage.run.result} for entry, stage in zip(own, stages, strict=True)]
    return {"environment": stages[0].run.result["environment"], "stages": rows}


def table(stages: Sequence[Stage]) -> str:
    """A row for each stage."""
    unit = next(
        (s.run.result["kernels"]["unit"] for s in stages if "unit" in s.run.result["kernels"]),
        "kernels",
    )

    def number(group: str, key: str) -> Callable[[Stage], float | None]:
        return lambda stage: stage.run.number(group, key)

    def final_loss(stage: Stage) -> object:
        return NOT_FINISHED.get(stage.run.status) or stage.run.number("loss", "final")

    columns = [
        Column("stage", lambda stage: stage.run.name),
        Column("script", lambda stage: stage.run.result["script"], text=True),
        Column("first loss", number("loss", "initial"), ".4f"),
        Column("final loss", final_loss, ".4f"),
        Column("samples/sec", number("timing", "samples_per_sec"), ".1f"),
        Column("ms per step", number("timing", "batch_ms"), ".2f"),
        Column("kernel ms per step", "kernel_ms", ".2f"),
        Column("TFLOP/s", number("flops", "achieved_tflops"), ".3g"),
        Column("peak MB", number("memory", "peak_mb"), ".2f"),
        Column(f"{unit} per step", number("kernels", "per_step"), ".10g"),
        Column("parameters with gradient", "gradient_percent", ".1f", " %"),
    ]
    return render(columns, stages)


def compare(source: Path, output: Path | None) -> int:
    """Print the table, and write the study if asked to.

    Returns the exit status, 1 if a stage failed.
    """
    if not source.exists():
        raise ToolError(f"{source}: no such file or directory; run_all_stages.sh makes it")
    stages = read_folder(source) if source.is_dir() else read_study(source)
    if not stages:
        raise ToolError(f"{source}: it has no results of stages")
    note(*differences((stage.run.name, stage.run.result) for stage in stages))
    print(table(stages), flush=True)
    if output:
        write_text(output, json.dumps(study(stages), indent=1) + "\n")
    return report_failed([stage.run for stage in stages])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument(
        "source", nargs="?", type=Path, default=RESULTS, metavar="SOURCE", help="folder or file"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write all of it as JSON")
    args = parser.parse_args(argv)
    return run_tool(PROG, lambda: compare(args.source, args.output))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Where a training step spends its time: a version script under the PyTorch profiler, and tables
from its trace.

The script trains and measures as always, in a process of its own; then three more steps run under
the profiler. From their trace come the time of the GPU's kernels by what they do (GEMM, attention,
element-wise, ...), by phase of the step and by name, and the operators that launched them. On a CPU
there are no kernels; there all tables are of operators and the time spent in themselves. A kernel
belongs to the phase in which the host launched it; with --enable-cuda-graph a step has two, its
data and the graph.

Written to --profile-dir beside the script's own files:
  <script>_kernels.csv    in the format of rocprofv3's *_kernel_stats.csv, over all profiled
                          steps
  <script>_operators.csv  operators by self time on the host, on a GPU also the time of their
                          kernels
  <script>_profile.json   categories and phases, and what they were measured on
  <script>_report.md      with --generate-report

Examples:
  python run_pytorch_profiler.py --batch-size 8 --profile-dir ./fusion_analysis --generate-report
  python run_pytorch_profiler.py --script tiny_llama_v2.py --seq-len 128 --use-amp
  python run_pytorch_profiler.py --disable-all-fusion --profile-dir ./unfused
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from types import ModuleType

from fusion_lab.cli import Parser, ToolError, program
from fusion_lab.files import read_json, write_text
from fusion_lab.profile.kernels import (
    GRAPH_PHASES,
    NO_KERNELS,
    PHASES,
    category,
    has_gpu,
    load_trace,
    short_name,
    write_statistics,
)
from fusion_lab.profile.tables import Profile, Share, analyse
from fusion_lab.script import load_script, script_arguments, tool_parser
from fusion_lab.show import Column, render, write_csv

PROG = Path(__file__).name
TOP = 10


def share_table(profile: Profile, title: str, parts: dict[str, Share]) -> str:
    """Categories or phases as a Markdown table with a total."""
    total = Share(*(sum(numbers) for numbers in zip(*map(astuple, parts.values()), strict=True)))
    columns = [
        Column(title, lambda row: row[0]),
        Column(f"{profile.unit} per step", lambda row: row[1].kernels_per_step, ".10g"),
        Column("copies per step", lambda row: row[1].copies_per_step, ".10g"),
        Column("ms per step", lambda row: row[1].ms_per_step, ".3f"),
        Column("share", lambda row: row[1].percent, ".1f", " %"),
    ]
    if profile.unit == "operators":
        columns.pop(2)  # a CPU has none
    return render(columns, [*parts.items(), ("all", total)])


def kernel_table(profile: Profile) -> str:
    """The first kernels (on a CPU, operators), the longest total first."""
    columns = [
        Column(profile.unit.removesuffix("s"), lambda row: f"`{short_name(row.name)}`"),
        Column("category", lambda row: category(row.name), text=True),
        Column("calls per step", lambda row: row.calls / profile.steps, ".10g"),
        Column("ms per step", lambda row: row.total_ns / profile.steps / 1e6, ".3f"),
        Column("mean, us", lambda row: row.average_ns / 1e3, ".1f"),
        Column("share", "percentage", ".1f", " %"),
    ]
    return render(columns, profile.statistics[:TOP])


def operator_table(profile: Profile) -> str:
    """The first operators by self time on the host, and the time of their kernels."""
    columns = [
        Column("operator", lambda row: f"`{short_name(row.name)}`"),
        Column("category", "category", text=True),
        Column("calls per step", lambda row: row.calls / profile.steps, ".10g"),
        Column("self ms per step", lambda row: row.self_ns / profile.steps / 1e6, ".3f"),
        Column("device ms per step", lambda row: row.device_ns / profile.steps / 1e6, ".3f"),
    ]
    return render(columns, profile.operators[:TOP])


def as_json(profile: Profile, summary: dict) -> dict:
    """The profile with what it was measured on, for `<script>_profile.json`."""
    same = ("script", "config", "fusions", "training", "environment", "kernels")
    longest = profile.statistics[:TOP]
    return {
        "schema_version": 1,
        **{key: summary[key] for key in same},
        "unit": profile.unit,
        "steps": profile.steps,
        f"{profile.unit}_per_step": sum(part.kernels_per_step for part in profile.phases.values()),
        "copies_per_step": sum(part.copies_per_step for part in profile.phases.values()),
        "ms_per_step": sum(part.ms_per_step for part in profile.phases.values()),
        "categories": {name: asdict(part) for name, part in profile.categories.items()},
        "phases": {name: asdict(part) for name, part in profile.phases.items()},
        "top": [{"category": category(row.name), **asdict(row)} for row in longest],
    }


def report(
    module: ModuleType, profile: Profile, summary: dict, files: Iterable[Path], trace: Path
) -> str:
    """The Markdown report of --generate-report, which ends with the files of this run."""
    environment, training = summary["environment"], summary["training"]
    modes = {name: training[name] for name in ("torch_compile", "cuda_graph")}
    on = [name for name, value in {**summary["fusions"], **modes}.items() if value]
    software = [name for name in ("torch", "triton", "hip", "cuda") if environment[name]]
    float32 = f"float32 ({training['matmul_precision']})"
    settings = {
        "device": environment["device_name"],
        "software": ", ".join(f"{name} {environment[name]}" for name in software),
        "model": ", ".join(f"{name} {value}" for name, value in summary["config"].items()),
        "batch size": training["batch_size"],
        "precision": training["amp_dtype"] if training["use_amp"] else float32,
        "fused": ", ".join(on) or "nothing",
    }
    on_host = "Self time of operators, measured on the host,"
    clock = "Device time" if profile.unit == "kernels" else on_host
    slower = "The profiler makes launches and short operators slower."
    lines = [
        f"# Profile of {module.SCRIPT}",
        *("", "## Settings", "", *(f"- {name}: {value}" for name, value in settings.items())),
        *("", "## Timing", "", "Measured without the profiler, before the profiled steps.", ""),
        *("```", module.report(summary), "```"),
        *("", f"## {profile.unit.capitalize()} by category", ""),
        f"{clock} in {profile.steps} profiled steps. {slower}",
        *("", share_table(profile, "category", profile.categories)),
        *("", "## Phases", "", share_table(profile, "phase", profile.phases)),
        *("", f"## Top {TOP} {profile.unit}", "", kernel_table(profile)),
    ]
    if profile.unit == "kernels":  # on a CPU this would be the same table again
        lines += ["", f"## Top {TOP} operators", "", operator_table(profile)]
    lines += ["", "## Files", "", *(f"- `{name}`" for name in sorted({p.name for p in files})), ""]
    where = "https://ui.perfetto.dev (drag it there; it stays on this machine)"
    lines.append(f"Open `{trace.name}` in {where}.")
    return "\n".join(lines) + "\n"


def files_of(directory: Path, script: str) -> dict[Path, tuple[int, int]]:
    """The files of a script in a directory, with what tells whether one was written anew."""
    found = {path: path.stat() for path in directory.glob(f"{script}_*")}
    return {path: (stat.st_mtime_ns, stat.st_ino) for path, stat in found.items()}


def run_script(command: Sequence[str]) -> int:
    """Run the script and wait for it; returns its exit status.

    What to do about a signal is for it to decide.
    """
    process = subprocess.Popen(command)
    answers = {signal.SIGINT: lambda *unused: None}
    answers |= dict.fromkeys((signal.SIGTERM, signal.SIGHUP), lambda *unused: process.terminate())
    # Ctrl-C reaches it, too
    before = {number: signal.signal(number, answer) for number, answer in answers.items()}
    try:
        status = process.wait()
    finally:
        for number, answer in before.items():
            signal.signal(number, answer)
    return status if status >= 0 else 128 - status


def profile_script(own: argparse.Namespace, rest: list[str]) -> int:
    """Run the script, then make the tables from its trace; returns the exit status."""
    module = load_script(own.script)
    rest, args = script_arguments(module, rest, own.profile_dir)
    flags = ["--enable-pytorch-profiler", "--enable-memory-profiling"]
    directory, name = args.profile_dir, module.SCRIPT
    before = files_of(directory, name)
    status = run_script([sys.executable, module.__file__, *rest, *flags])
    if status:
        return status

    def written() -> list[Path]:
        now = files_of(directory, name)
        return [path for path, stamp in now.items() if before.get(path) != stamp]

    trace, result = directory / f"{name}_trace.json.gz", directory / f"{name}_summary.json"
    if missing := {result, trace} - {*written()}:
        raise ToolError(f"{min(missing)}: the script did not write this file", status=1)
    print("reading the trace, and making tables of it", flush=True)
    summary, events = read_json(result), load_trace(trace)
    if summary["environment"]["device"] == "cuda" and not has_gpu(events):
        raise ToolError(NO_KERNELS, status=1)
    profile = analyse(events, GRAPH_PHASES if args.cuda_graph else PHASES)

    content = json.dumps(as_json(profile, summary), indent=1)
    write_statistics(directory / f"{name}_kernels.csv", profile.statistics)
    write_csv(directory / f"{name}_operators.csv", [asdict(row) for row in profile.operators])
    write_text(directory / f"{name}_profile.json", content + "\n")
    on_host = "self time of operators (on a CPU there are no kernels)"
    clock = "device time" if profile.unit == "kernels" else on_host
    print(f"\n{name}, {profile.steps} profiled steps, {clock}:\n")
    print(share_table(profile, "category", profile.categories) + "\n")
    print(share_table(profile, "phase", profile.phases) + "\n")
    print(f"Tables: {directory}/{name}_{{kernels,operators}}.csv, {name}_profile.json")
    print(f"Trace for ui.perfetto.dev: {trace}")
    if own.generate_report:
        path = directory / f"{name}_report.md"
        write_text(path, report(module, profile, summary, [*written(), path], trace))
        print(f"Report: {path}")
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = tool_parser(PROG, __doc__)
    parser.add_flag("--generate-report", "also write <script>_report.md")
    return parser


main = program(build_parser, profile_script, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Peak memory or speed-up against sequence length, or any other size, from the result files of
several runs.

NAME=PATH starts a line; the paths after it, until the next NAME=, belong to it too. A path is a
result file, the directory of a run (its --profile-dir), or a quoted pattern of such. --x takes any
number among the settings of a run, such as batch_size, num_layers or processes. `speedup` is over
the baseline that --compare-fusion measured in turns with a run, and left in its folder.

Examples:
  python analysis_tools/plot_runs.py memory scores='scores_*' flash='flash_*' --output memory.png
  python analysis_tools/plot_runs.py memory v2='sweep/*' --x batch_size
  python analysis_tools/plot_runs.py speedup fused='length_*' --output speedup.png
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fusion_lab import runs as records
from fusion_lab.cli import Parser, ToolError, documented_parser, note, program
from fusion_lab.show import Column, drawing, ended, render, save_figure
from fusion_lab.turns import speedup

Points = dict[str, dict[float, records.Run]]  # of each line, the run at a place on the x-axis


def gain(run: records.Run) -> float | None:
    """How many times as fast as its baseline; None if it did not finish."""
    if run.status != "ok":
        return None
    folder = run.path.parent / "baseline"
    before = records.load_run(folder) if folder.is_dir() else run
    if not records.baseline_in_turns(run, [before]):
        raise ToolError(f"{run.path}: no baseline took turns with it (--compare-fusion does that)")
    return speedup(before.result["timing"], run.result["timing"])


class Quantity(NamedTuple):
    """What is plotted: its value of a run, and how it is written."""

    of: Callable[[records.Run], float | None]
    column: str
    form: tuple[str, ...]
    axis: str


QUANTITIES = {
    "memory": Quantity(lambda run: run.peak_mb, "{}, MB", (".1f",), "peak memory, MB"),
    "speedup": Quantity(gain, "{}", (".2f", "x"), "speed-up over its baseline"),
}


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    add = parser.add_argument
    add("what", choices=QUANTITIES)
    add("runs", nargs="+", metavar="NAME=PATH", help="a line and its runs, more PATHs may follow")
    add("--x", default="seq_len", metavar="SETTING", help="what runs differ in (default: seq_len)")
    parser.add_path("--output", "FILE.png", "also draw a picture (or .svg, .pdf)")
    return parser


def points_of(runs: Sequence[records.Run], x: str) -> Points:
    """Each run at its place; not those that ended before they had a model."""
    points, named, lost = {}, [], []
    for run in runs:
        if not run.result["config"] and run.status != "ok":
            lost.append(f"left out, it ended before it had a model: {run.path}")
            continue
        place = {**run.result["training"], **run.result["config"]}.get(x)
        if isinstance(place, bool) or not isinstance(place, (int, float)):
            raise ToolError(f"{run.path}: {x} is no number in this result")
        if other := points.setdefault(run.name, {}).get(place):
            raise ToolError(f"{run.name} is {other.path} and {run.path}, two runs with {x} {place}")
        points[run.name][place] = run
        named.append((f"{run.name} at {place}", run.result))
    if not points:
        raise ToolError("none of these runs got as far as its first step")
    note(*records.differences(named, ignore=(x,)), *lost)
    return points


def table(points: Points, label: str, what: Quantity) -> str:
    """Places down, names across: the quantity of each, then that of the others over the first."""
    first, *others = points
    values = {(n, place): what.of(run) for n, runs in points.items() for place, run in runs.items()}

    def value(name: str, place: float) -> object:
        run = points[name].get(place)
        return run and (ended(run.result) or values[name, place])

    def over_first(name: str, place: float) -> float | None:
        both = [values.get((line, place)) for line in (name, first)]
        return both[0] / both[1] if all(both) else None

    columns = [Column(label, str)]
    columns += [Column(what.column.format(n), partial(value, n), *what.form) for n in points]
    columns += [Column(f"{n} / {first}", partial(over_first, n), ".2f") for n in others]
    return render(columns, sorted(set().union(*points.values())))


def apart(places: set[float]) -> list[float]:
    """Those whose labels have room beside one another, the lowest first."""
    kept: list[float] = []
    for place in sorted(places):
        if not kept or place - kept[-1] >= 0.04 * (max(places) - min(places)):
            kept.append(place)
    return kept


def draw(path: Path, points: Points, label: str, what: Quantity) -> None:
    """The picture; out-of-memory runs are crosses at its top."""
    figure, axes = drawing().subplots(figsize=(8, 5), layout="constrained")
    for number, (name, mine) in enumerate(points.items()):
        found = {place: value for place, run in sorted(mine.items()) if (value := what.of(run))}
        (line,) = axes.plot([*found], [*found.values()], "osD^v"[number % 5] + "-", label=name)
        if gone := [place for place, run in mine.items() if run.status == "oom"]:
            # in parts of the axes' height, so that crosses do not hide each other
            style = {"color": line.get_color(), "transform": axes.get_xaxis_transform()}
            heights = [0.98 - 0.04 * number] * len(gone)
            axes.plot(gone, heights, "x", **style, label=f"{name}: out of memory")
    axes.set_xticks(apart(set().union(*points.values())))  # linear growth is a straight line
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # room for the crosses
    runs = (run for mine in points.values() for run in mine.values())
    titles = dict.fromkeys(records.described(run.result) for run in runs)
    axes.set_title("\n".join(titles), fontsize="medium")
    axes.set(xlabel=label, ylabel=what.axis)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def plot(args: argparse.Namespace) -> int:
    output, runs, what = args.output, records.load_runs(args.runs, True), QUANTITIES[args.what]
    if output and output.suffix not in (".png", ".svg", ".pdf"):
        raise ToolError(f"--output {output}: must end in .png, .svg, .pdf")
    points = points_of(runs, args.x)
    label = "sequence length" if args.x == "seq_len" else args.x.replace("_", " ")
    print(table(points, label, what), flush=True)
    if output:
        draw(output, points, label, what)
        print(f"\nWritten: {output}")
    return records.report_failed(runs)


main = program(build_parser, plot)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Peak memory against sequence length, or any other size, from the result files of several runs.

NAME=PATH starts a line; the paths after it, until the next NAME=, belong to it too. A path is a
result file, the directory of a run (its --profile-dir), or a quoted pattern, of whose matches the
directories and .json files are taken. --x takes any number among the settings of a run, such as
batch_size, num_layers or processes. Runs that went out of memory are marked. The numbers are
printed as a Markdown table and, with --output, written as CSV beside the picture.

Examples:
  python analysis_tools/plot_runs.py memory scores='results/scores_*' flash='results/flash_*' \\
      --output memory.png
  python analysis_tools/plot_runs.py memory v2='sweep/*' --x batch_size
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import glob
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch

from lab import records
from lab.cli import Parser, ToolError, documented_parser, print_notes, program
from lab.show import Column, cell, drawing, ended, render, save_figure, write_csv

PROG = Path(__file__).name
PICTURES = (".png", ".svg", ".pdf")


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    add = parser.add_argument
    add("what", choices=("memory",))
    add("runs", nargs="+", metavar="NAME=PATH", help="a line and its runs; more PATHs may follow")
    add("--x", default="seq_len", metavar="SETTING", help="what runs differ in (default: seq_len)")
    parser.add_path("--output", "FILE.png", "also draw a picture (or .svg, .pdf)")
    return parser


def expand(path: str) -> list[Path]:
    """The path itself, or what a pattern matches."""
    if Path(path).exists() or not glob.has_magic(path):
        return [Path(path)]
    if inside := records.file_of_runs(Path(path)):
        runs, pattern = inside
        file = Path(path.removesuffix(pattern))
        if found := [file / name for name in sorted(runs) if fnmatch(name, pattern)]:
            return found
        raise ToolError(f"{path}: the pattern matches none of {', '.join(runs)}")
    found = [Path(match) for match in sorted(glob.glob(path))]
    found = [match for match in found if match.is_dir() or match.suffix == ".json"]
    if not found:
        raise ToolError(f"{path}: the pattern matches no directory and no result file")
    return found


def load(arguments: Iterable[str]) -> list[records.Run]:
    """The runs of each line."""
    runs, name = [], None
    for argument in arguments:
        given, path = records.split_name(argument)
        name = given or name
        if name is None:
            raise ToolError(f"{argument!r} is not NAME=PATH")
        runs += [records.load_run(place, name) for place in expand(path)]
    return runs


def points_of(runs: Sequence[records.Run], x: str) -> list[dict]:
    """A point for each run; one that ended before it had a model has none."""
    first, bases, points, named, lost = runs[0].name, {}, {}, [], []
    for run in runs:
        result, peak = run.result, run.number("memory", "peak_mb")
        place = {**result["training"], **result["config"]}.get(x)
        if not result["config"] and run.status != "ok":
            lost.append(f"left out, it ended ({run.status}) before it had a model: {run.path}")
            continue
        if isinstance(place, bool) or not isinstance(place, (int, float)):
            raise ToolError(f"{run.path}: {x} is no number in this result")
        if other := points.get((run.name, place)):
            both = f"{other['path']} and {run.path}"
            raise ToolError(f"{run.name} has two runs with {x} {place}: {both}")
        on = f"{result['script']} on {result['environment'].get('device_name')}"
        point = {"name": run.name, x: place, "status": run.status, "path": run.path}
        point |= {"on": f"{on}, {records.precision(result)}", "peak_mb": peak}
        points[run.name, place] = point
        bases |= {place: peak} if run.name == first else {}
        named.append((f"{run.name} at {place}", result))
    if not points:
        raise ToolError("none of these runs got as far as its first step")
    records.check_family(named)
    print_notes(PROG, *records.differences(named, ignore=(x,)), *lost)
    for (_, place), point in points.items():
        base, peak = bases.get(place), point["peak_mb"]
        point["over_first"] = peak / base if peak and base else None
    return [*points.values()]


def table(points: Sequence[dict], x: str) -> str:
    """Places down, names across: the MB of each, then what they are beside the first name."""
    at = {(point["name"], point[x]): point for point in points}
    first, *others = dict.fromkeys(point["name"] for point in points)

    def peak(name: str) -> Column:
        def of(place: float) -> object:
            point = at.get((name, place), {})
            return ended(point) or point.get("peak_mb")

        return Column(f"{name}, MB", of, ".1f")

    def over_first(name: str) -> Column:
        def of(place: float) -> str:
            return cell(at.get((name, place), {}).get("over_first"), ".2f")

        return Column(f"{name} / {first}", of)

    columns = [Column(title(x), str), *map(peak, (first, *others)), *map(over_first, others)]
    return render(columns, sorted({place for _, place in at}))


def title(x: str) -> str:
    """Of the x-axis."""
    return "sequence length" if x == "seq_len" else x.replace("_", " ")


def draw(path: Path, points: Sequence[dict], x: str) -> None:
    """The picture; out-of-memory runs are crosses at its top."""
    figure, axes = drawing().subplots(figsize=(8, 5), layout="constrained")
    for number, name in enumerate(dict.fromkeys(point["name"] for point in points)):
        mine = sorted((p for p in points if p["name"] == name), key=lambda point: point[x])
        there = [point for point in mine if point["peak_mb"] is not None]
        ends = [point[x] for point in there], [point["peak_mb"] for point in there]
        (line,) = axes.plot(*ends, "osD^v"[number % 5] + "-", label=name)
        gone = [point[x] for point in mine if point["status"] == "oom"]
        if gone:  # in parts of the axes' height, so that crosses do not hide each other
            heights, where = [0.98 - 0.04 * number] * len(gone), axes.get_xaxis_transform()
            style = {"color": line.get_color(), "transform": where}
            axes.plot(gone, heights, "x", **style, label=f"{name}: out of memory")
    axes.set_xticks(sorted({point[x] for point in points}))  # linear growth is a straight line
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # room for the crosses
    axes.set_title("; ".join(dict.fromkeys(point["on"] for point in points)), fontsize="medium")
    axes.set(xlabel=title(x), ylabel="peak memory, MB")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def plot(args: argparse.Namespace) -> int:
    """Print the table, write CSV and picture; returns the exit status."""
    output, x = args.output, args.x
    if output and output.suffix not in PICTURES:
        raise ToolError(f"--output {output}: must end in {', '.join(PICTURES)}")
    runs = load(args.runs)
    points = points_of(runs, x)
    status = records.report_failed(PROG, runs)
    print(table(points, x), flush=True)
    if output:
        write_csv(output.with_suffix(".csv"), points)
        draw(output, points, x)
        print(f"\nWritten: {output}, {output.with_suffix('.csv')}")
    return status


main = program(build_parser, plot)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Memory against sequence length, or any other size, from the result files of several runs; memory
or speed-up from studies of fusions.

  memory    peak memory, a line per NAME, or per set of fusions
  speedup   of each set of fusions over none of them in the same turns, with their range

NAME=PATH starts a line; the paths after it, until the next NAME=, belong to it too. A path is a
result file, the directory of a run (its --profile-dir), or a quoted pattern, of whose matches the
directories and .json files are taken. Without NAME=, paths are studies of fusion_ablation_study.py.
--x takes any number among the settings of a run, such as batch_size, num_layers or processes. Runs
that went out of memory are marked. The numbers are printed as a Markdown table and, with --output,
written as CSV beside the picture.

Examples:
  python analysis_tools/plot_runs.py memory scores='results/scores_*' flash='results/flash_*' \\
      --output memory.png
  python analysis_tools/plot_runs.py memory v2='sweep/*' --x batch_size
  python analysis_tools/plot_runs.py speedup length_*.json --output fusions.png
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import glob
import statistics
from collections.abc import Sequence
from fnmatch import fnmatch

from lab.cli import Parser, ToolError, documented_parser, print_notes, program
from lab.files import read_json
from lab.records import (
    check_family,
    differences,
    file_of_runs,
    load_run,
    precision,
    report_failed,
    split_name,
)
from lab.show import Column, cell, drawing, ended, render, save_figure, write_csv
from lab.study import CONTROL, by_side, read_study
from lab.turns import ratios

PROG = Path(__file__).name
PICTURES = (".png", ".svg", ".pdf")


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    add = parser.add_argument
    add("what", choices=("memory", "speedup"))
    lines = "a line and its runs, more PATHs may follow; or PATHs of studies alone"
    add("runs", nargs="+", metavar="NAME=PATH", help=lines)
    setting = "what runs differ in (default: seq_len)"
    add("--x", default="seq_len", metavar="SETTING", help=setting)
    parser.add_path("--output", "FILE.png", "also draw a picture (or .svg, .pdf)")
    return parser


def expand(path: str) -> list[Path]:
    """The path itself, or what a pattern matches."""
    if Path(path).exists() or not glob.has_magic(path):
        return [Path(path)]
    if inside := file_of_runs(Path(path)):
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


def points_of_runs(arguments: Sequence[str], x: str) -> tuple[list[dict], int]:
    """A point for each run, and the exit status; one that ended before it had a model has none."""
    runs, name, points = [], None, []
    for argument in arguments:
        given, path = split_name(argument)
        name = given or name
        if name is None:
            raise ToolError(f"{argument!r} is not NAME=PATH")
        runs += [load_run(place, name) for place in expand(path)]
    named, lost = [], []
    for run in runs:
        result = run.result
        place = {**result["training"], **result["config"]}.get(x)
        if not result["config"] and run.status != "ok":
            lost.append(f"left out, it ended ({run.status}) before it had a model: {run.path}")
            continue
        if isinstance(place, bool) or not isinstance(place, (int, float)):
            raise ToolError(f"{run.path}: {x} is no number in this result")
        device = result["environment"].get("device_name")
        on = f"{result['script']} on {device}, {precision(result)}"
        point = {"name": run.name, x: place, "status": run.status, "turns": (), "on": on}
        points.append({**point, "peak_mb": run.number("memory", "peak_mb"), "path": run.path})
        named.append((f"{run.name} at {place}", result))
    if not points:
        raise ToolError("none of these runs got as far as its first step")
    check_family(named)
    print_notes(PROG, *differences(named, ignore=(x,)), *lost)
    return points, report_failed(PROG, runs)


def points_of_studies(paths: Sequence[Path], x: str) -> list[dict]:
    """A point for each set of fusions and size, with its speed-ups over `none` of its groups."""
    points: dict[tuple, dict] = {}
    for path in paths:
        study = read_study(path, ("script", "precision", "seed", "group", x))
        groups = by_side(study["rows"], x, "precision", "seed", "group")
        for (place, word, *_), sides in groups.items():
            if "none" not in sides:
                raise ToolError(f"{path}: no ablation, a group of its rows has no `none`")
            for name, row in sides.items():
                if name == CONTROL:
                    continue
                on = f"{row['script']} on {study['environment']['device_name']}, {word}"
                point = {"name": name, x: place, "status": row.get("status", "ok"), "turns": []}
                peak = None if "status" in row else row["peak_mb"]
                point |= {"samples_per_sec": None, "peak_mb": peak, "path": path, "on": on}
                point = points.setdefault((name, place, path, word), point)
                if "status" not in row | sides["none"]:
                    point["turns"] += ratios(sides["none"], row)
                    point["samples_per_sec"] = 1e3 * row["batch_size"] / row["batch_ms"]
    return [*points.values()]


def by_place(points: Sequence[dict], x: str, what: str) -> dict[float, dict[str, dict]]:
    """The points of each place by name, with their ratio over the first name."""
    first, places = points[0]["name"], sorted({point[x] for point in points})
    found: dict[float, dict[str, dict]] = {place: {} for place in places}
    for point in points:
        other = found[point[x]].setdefault(point["name"], point)
        if other is not point and (other["path"], other["on"]) != (point["path"], point["on"]):
            both = f"{other['path']} and {point['path']}"
            raise ToolError(f"{point['name']} has two runs with {x} {point[x]}: {both}")
    for named in found.values():
        base = named.get(first, {}).get("peak_mb")
        for point in named.values():
            peak, turns = point["peak_mb"], point["turns"] if what == "speedup" else ()
            over = statistics.median(turns) if turns else None
            point["over_first"] = peak / base if what == "memory" and peak and base else over
            point["lowest"], point["highest"] = min(turns, default=None), max(turns, default=None)
    return found


def table(places: dict[float, dict[str, dict]], names: Sequence[str], x: str, what: str) -> str:
    """Places down, names across: the value of each, then what it is beside the first name."""
    first, *others = names
    key, unit = ("peak_mb", "MB") if what == "memory" else ("samples_per_sec", "samples/sec")

    def value(name: str) -> Column:
        def of(place: float) -> object:
            point = places[place].get(name, {})
            return ended(point) or point.get(key)

        return Column(f"{name}, {unit}", of, ".1f")

    def over_first(name: str) -> Column:
        def of(place: float) -> str:
            point = places[place].get(name, {})
            text = cell(point.get("over_first"), ".2f")
            low, high = point.get("lowest"), point.get("highest")
            return f"{text} ({low:.2f} to {high:.2f})" if low else text

        return Column(f"{name} / {first}", of)

    shown = [first] if what == "speedup" else names  # the others follow from their ratios
    return render([Column(title(x), str), *map(value, shown), *map(over_first, others)], [*places])


def title(x: str) -> str:
    """Of the x-axis."""
    return "sequence length" if x == "seq_len" else x.replace("_", " ")


def draw(path: Path, points: Sequence[dict], names: Sequence[str], x: str, what: str) -> None:
    """The picture; out-of-memory runs are crosses at its top."""
    figure, axes = drawing().subplots(figsize=(8, 5), layout="constrained")
    key = "over_first" if what == "speedup" else "peak_mb"
    for number, name in enumerate(names):
        mine = sorted((p for p in points if p["name"] == name), key=lambda point: point[x])
        there = [point for point in mine if point[key] is not None]
        places, heights = [point[x] for point in there], [point[key] for point in there]
        (line,) = axes.plot(places, heights, "osD^v"[number % 5] + "-", label=name)
        if what == "speedup":
            ends = [[point[end] for point in there] for end in ("lowest", "highest")]
            axes.vlines(places, *ends, color=line.get_color())
        gone = [point[x] for point in mine if point["status"] == "oom"]
        if gone:  # in parts of the axes' height, so that crosses do not hide each other
            heights, where = [0.98 - 0.04 * number] * len(gone), axes.get_xaxis_transform()
            style = {"color": line.get_color(), "transform": where}
            axes.plot(gone, heights, "x", **style, label=f"{name}: out of memory")
    axes.set_xticks(sorted({point[x] for point in points}))  # linear growth is a straight line
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # room for the crosses
    axes.set_title("; ".join(dict.fromkeys(point["on"] for point in points)), fontsize="medium")
    label = "peak memory, MB" if what == "memory" else f"times as fast as {names[0]}"
    axes.set(xlabel=title(x), ylabel=label)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def plot(args: argparse.Namespace) -> int:
    """Print the table, write CSV and picture; returns the exit status."""
    output, x, what = args.output, args.x, args.what
    if output and output.suffix not in PICTURES:
        raise ToolError(f"--output {output}: must end in {', '.join(PICTURES)}")
    paths, status = [Path(path) for path in args.runs], 0
    if all(p.is_file() and p.suffix == ".json" and "rows" in read_json(p) for p in paths):
        points = points_of_studies(paths, x)
    elif what == "memory":
        points, status = points_of_runs(args.runs, x)
    else:
        raise ToolError("speedup is that of studies, whose sides took turns; see compare_runs.py")
    names = [*dict.fromkeys(point["name"] for point in points)]
    places = by_place(points, x, what)
    print(table(places, names, x, what), flush=True)
    if output:
        rows = [{key: value for key, value in p.items() if key != "turns"} for p in points]
        write_csv(output.with_suffix(".csv"), rows)
        draw(output, points, names, x, what)
        print(f"\nWritten: {output}, {output.with_suffix('.csv')}")
    return status


main = program(build_parser, plot)

if __name__ == "__main__":
    sys.exit(main())

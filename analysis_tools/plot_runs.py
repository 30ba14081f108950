#!/usr/bin/env python3
"""Memory against sequence length, or any other size, from the result files of several runs;
speed-up from studies of fusions.

  memory    peak memory, a line per NAME
  speedup   of each set of fusions over none of them in the same turns, with their range

NAME=PATH starts a line; the paths after it, until the next NAME=, belong to it too. A path is a
result file, the directory of a run (its --profile-dir), or a quoted pattern, of whose matches the
directories and .json files are taken. Of `speedup` the paths are studies of
fusion_ablation_study.py. --x takes any number among the settings of a run, such as batch_size,
num_layers or processes. Runs that went out of memory are marked. The numbers are printed as a
Markdown table and, with --output, written as CSV beside the picture.

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
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch

from lab import records, study
from lab.cli import Parser, ToolError, documented_parser, print_notes, program
from lab.files import read_json
from lab.show import Column, cell, drawing, ended, render, save_figure, write_csv
from lab.turns import ratios

PROG = Path(__file__).name
PICTURES = (".png", ".svg", ".pdf")


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    add = parser.add_argument
    add("what", choices=("memory", "speedup"))
    lines = "a line and its runs, more PATHs may follow; of speedup studies"
    add("runs", nargs="+", metavar="NAME=PATH", help=lines)
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


def points_of_studies(paths: Iterable[str], x: str) -> list[dict]:
    """A point for each set of fusions and size, with its speed-ups over `none` of its groups."""
    points: dict[tuple, dict] = {}
    for path in map(Path, paths):
        if not path.is_file() or "rows" not in read_json(path):
            reason = "speedup is that of studies, whose sides took turns; see compare_runs.py"
            raise ToolError(f"{path}: {reason}")
        content = study.read_study(path, ("script", "precision", "batch_size", "side", x))
        groups = study.by_side(content["rows"], x, "precision", "seed", "group")
        for (place, precision, *_), sides in groups.items():
            if "none" not in sides:
                raise ToolError(f"{path}: no ablation, a group of its rows has no `none`")
            for name, row in sides.items():
                if name == study.CONTROL:
                    continue
                on = f"{row['script']} on {content['environment']['device_name']}, {precision}"
                point = {"name": name, x: place, "status": row.get("status", "ok"), "path": path}
                point |= {"on": on, "samples_per_sec": None, "turns": []}
                point = points.setdefault((name, place), point)
                if (point["path"], point["on"]) != (path, on):
                    both = f"{point['path']} and {path}"
                    raise ToolError(f"{name} has two runs with {x} {place}: {both}")
                if "status" not in row | sides["none"]:
                    point["turns"] += ratios(sides["none"], row)
                    point["samples_per_sec"] = 1e3 * row["batch_size"] / row["batch_ms"]
    for point in points.values():
        turns = point.pop("turns")
        point["over_first"] = statistics.median(turns) if turns else None
        point |= {"lowest": min(turns, default=None), "highest": max(turns, default=None)}
    return sorted(points.values(), key=lambda point: point["name"] != "none")


def table(points: Sequence[dict], x: str) -> str:
    """Places down, names across: MB of each or the speed of the first name, then what they are
    beside the first name."""
    at = {(point["name"], point[x]): point for point in points}
    first, *others = dict.fromkeys(point["name"] for point in points)
    speeds = "samples_per_sec" in points[0]  # the others follow from their ratios
    key, unit = ("samples_per_sec", "samples/sec") if speeds else ("peak_mb", "MB")

    def value(name: str) -> Column:
        def of(place: float) -> object:
            point = at.get((name, place), {})
            return ended(point) or point.get(key)

        return Column(f"{name}, {unit}", of, ".1f")

    def over_first(name: str) -> Column:
        def of(place: float) -> str:
            point = at.get((name, place), {})
            text, low = cell(point.get("over_first"), ".2f"), point.get("lowest")
            return f"{text} ({low:.2f} to {point['highest']:.2f})" if low else text

        return Column(f"{name} / {first}", of)

    shown = [first] if speeds else [first, *others]
    columns = [Column(title(x), str), *map(value, shown), *map(over_first, others)]
    return render(columns, sorted({place for _, place in at}))


def title(x: str) -> str:
    """Of the x-axis."""
    return "sequence length" if x == "seq_len" else x.replace("_", " ")


def draw(path: Path, points: Sequence[dict], x: str, what: str) -> None:
    """The picture; out-of-memory runs are crosses at its top."""
    figure, axes = drawing().subplots(figsize=(8, 5), layout="constrained")
    key = "over_first" if what == "speedup" else "peak_mb"
    for number, name in enumerate(dict.fromkeys(point["name"] for point in points)):
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
    label = "times as fast as none" if what == "speedup" else "peak memory, MB"
    axes.set(xlabel=title(x), ylabel=label)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def plot(args: argparse.Namespace) -> int:
    """Print the table, write CSV and picture; returns the exit status."""
    output, x = args.output, args.x
    if output and output.suffix not in PICTURES:
        raise ToolError(f"--output {output}: must end in {', '.join(PICTURES)}")
    if args.what == "speedup":
        points, status = points_of_studies(args.runs, x), 0
    else:
        runs = load(args.runs)
        points, status = points_of(runs, x), records.report_failed(PROG, runs)
    print(table(points, x), flush=True)
    if output:
        write_csv(output.with_suffix(".csv"), points)
        draw(output, points, x, args.what)
        print(f"\nWritten: {output}, {output.with_suffix('.csv')}")
    return status


main = program(build_parser, plot)

if __name__ == "__main__":
    sys.exit(main())

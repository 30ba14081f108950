#!/usr/bin/env python3
"""Memory or speed-up against sequence length, or any other size, from the result files of several
runs.

  memory    peak memory, one line per NAME
  speedup   samples per second of each NAME over those of the first NAME

NAME=PATH starts a line; the paths after it, until the next NAME=, belong to it too. A path is a
result file, the directory of a run (its --profile-dir), or a quoted pattern, of whose matches the
directories and .json files are taken. --x takes any number among the settings of a run, such as
batch_size, num_layers or processes. Runs that went out of memory are marked. Where --compare-fusion
ran both sides in turns (DIR/baseline and DIR), a speed-up is the median of the turns, with their
range. That of runs one after the other has no range, so no line joins it to the next. Without
NAME=, paths are studies of fusion_ablation_study.py, and each set of fusions is a line. The numbers
are printed as a Markdown table and, with --output, written as CSV beside the picture.

Examples:
  python analysis_tools/plot_runs.py memory scores='results/scores_*' flash='results/flash_*' \\
      --output memory.png
  python analysis_tools/plot_runs.py speedup off=results/off_64 results/off_128 \\
      on='results/on_*' --output speed.png
  python analysis_tools/plot_runs.py memory v2='sweep/*' --x batch_size
  python analysis_tools/plot_runs.py speedup length_*.json --output fusions.png
"""

from __future__ import annotations

import _root

import argparse
import glob
import statistics
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from lab.ablation import CONTROL
from lab.cli import Parser, ToolError, documented_parser, print_notes, program
from lab.files import read_json
from lab.results import (
    Run,
    check_family,
    differences,
    file_of_runs,
    load_run,
    precision,
    report_failed,
    split_name,
    unsteady,
)
from lab.show import Column, cell, drawing, render, save_figure, write_csv
from lab.study import by_side, read_study
from lab.turns import ratios

PROG = Path(__file__).name
MEASURED = {"memory": ("memory", "peak_mb"), "speedup": ("timing", "samples_per_sec")}
UNITS = {"memory": "MB", "speedup": "samples/sec"}
PICTURES = (".png", ".svg", ".pdf")
Series = dict[str, dict[float, Run]]  # name, place on the x-axis


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    add = parser.add_argument
    add("what", choices=tuple(MEASURED))
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


def load_series(arguments: Sequence[str], x: str) -> tuple[Series, list[Run]]:
    """The runs of each name by their place x; and runs that ended before it was known."""
    paths: dict[str, list[Path]] = {}
    name = None
    for argument in arguments:
        given, path = split_name(argument)
        name = given or name
        if name is None:
            raise ToolError(f"{argument!r} is not NAME=PATH")
        paths.setdefault(name, []).extend(expand(path))
    series: Series = {}
    nowhere = []
    for name, places in paths.items():
        series[name] = {}
        for run in [load_run(place, name) for place in places]:
            place = {**run.result["training"], **run.result["config"]}.get(x)
            if not run.result["config"] and run.status != "ok":
                nowhere.append(run)
                continue
            if isinstance(place, bool) or not isinstance(place, (int, float)):
                raise ToolError(f"{run.path}: {x} is no number in this result")
            other = series[name].setdefault(place, run)
            if other.path.resolve() != run.path.resolve():
                both = f"{other.path} and {run.path}"
                raise ToolError(f"{name} has two runs with {x} {place}: {both}")
    return series, nowhere


def is_study(argument: str) -> bool:
    """Whether this is the file of a study, without a name."""
    path = Path(argument)
    return path.is_file() and path.suffix == ".json" and "rows" in read_json(path)


def series_of_studies(paths: Sequence[Path], x: str) -> Series:
    """The sets of fusions in studies as runs, each with its speed-ups over `none` of its group."""
    series: Series = {}
    for path in paths:
        study = read_study(path, ("script", "precision", "seed", "group", x))
        groups = by_side(study["rows"], x, "precision", "seed", "group")
        for (place, word, *_), sides in groups.items():
            if "none" not in sides:
                raise ToolError(f"{path}: no ablation, a group of its rows has no `none`")
            sides.pop(CONTROL, None)
            for name, row in sides.items():
                other = series.setdefault(name, {}).get(place)
                if other and (other.path, precision(other.result)) != (path, word):
                    both = f"{other.path}, {precision(other.result)}, and {path}, {word}"
                    raise ToolError(f"{name} has two runs with {x} {place}: {both}")
                turns = other.result["timing"]["over_none"] if other else []
                timing = {"over_none": turns}
                if "status" not in row | sides["none"]:
                    turns += ratios(sides["none"], row)
                    timing["samples_per_sec"] = 1e3 * row["batch_size"] / row["batch_ms"]
                result = {
                    "script": row["script"],
                    "status": row.get("status", "ok"),
                    "error": row.get("error"),
                    "environment": study["environment"],
                    "config": {x: place},
                    # the study's word for the precision stands where a run has its type
                    "training": {"use_amp": True, "amp_dtype": word},
                    "timing": timing,
                    "memory": {"peak_mb": row["peak_mb"]},
                }
                series[name][place] = Run(name, path, result)
    return series


def in_turns(base: Run | None, run: Run) -> list[float]:
    """Speed-ups of the turns of --compare-fusion, if the runs are its two sides, or of a study."""
    if turns := run.result["timing"].get("over_none"):
        return turns
    places = run.path / "baseline", run.path.parent / "baseline" / run.path.name
    if base is None or base.path not in places:
        return []
    both = [side.result["timing"] for side in (base, run)]
    return ratios(*both) if all(side.get("turns_ms") for side in both) else []


def values_of(what: str, x: str, series: Series) -> list[dict]:
    """One row per name and place: the value, ratio over the first name, range; or None."""
    first = next(iter(series))

    def measured(run: Run | None) -> float | None:
        return run.number(*MEASURED[what]) if run else None

    rows = []
    for name, runs in series.items():
        for place, run in sorted(runs.items()):
            value, base = measured(run), measured(series[first].get(place))
            ratio = value / base if value is not None and base else None
            turns = in_turns(series[first].get(place), run) if what == "speedup" and ratio else []
            row = {"name": name, x: place, "status": run.status, MEASURED[what][1]: value}
            row[f"ratio_over_{first}"] = statistics.median(turns) if turns else ratio
            row["lowest_of_turns"] = min(turns, default=None)
            row["highest_of_turns"] = max(turns, default=None)
            rows.append(row | {"path": str(run.path)})
    return rows


def title(x: str) -> str:
    """Of the x-axis."""
    return "sequence length" if x == "seq_len" else x.replace("_", " ")


def table(what: str, x: str, series: Series, rows: Sequence[dict]) -> str:
    """Places down, names across: the value of each, then its ratio over the first name."""
    first, *others = series
    at: dict[float, dict[str, dict]] = {place: {} for place in sorted({row[x] for row in rows})}
    for row in rows:
        at[row[x]][row["name"]] = row

    def value(name: str) -> Column:
        of_run = Column("", MEASURED[what][1]).or_ended().of
        label = f"{name}, {UNITS[what]}"
        return Column(label, lambda place: of_run(at[place].get(name, {})), ".1f")

    def over_first(name: str) -> Column:
        def ratio(place: float) -> str:
            row = at[place].get(name, {})
            text = cell(row.get(f"ratio_over_{first}"), ".2f")
            low, high = row.get("lowest_of_turns"), row.get("highest_of_turns")
            return f"{text} ({low:.2f} to {high:.2f})" if low else text

        return Column(f"{name} / {first}", ratio)

    shown = [first] if what == "speedup" else series  # the others follow from their ratios
    return render([Column(title(x), str), *map(value, shown), *map(over_first, others)], [*at])


def measured_on(series: Series) -> str:
    """Scripts, devices and precisions of all runs, for the title."""
    results = [run.result for runs in series.values() for run in runs.values()]

    def every(value: Callable[[dict], str]) -> str:
        return ", ".join(dict.fromkeys(map(value, results)))

    device = every(lambda result: str(result["environment"].get("device_name")))
    return f"{every(lambda result: result['script'])} on {device}, {every(precision)}"


def draw(path: Path, what: str, x: str, series: Series, rows: Sequence[dict]) -> None:
    """The picture; out-of-memory runs are crosses at its top."""
    pyplot = drawing()
    key = f"ratio_over_{next(iter(series))}" if what == "speedup" else MEASURED[what][1]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, name in enumerate(series):
        mine = [row for row in rows if row["name"] == name]
        points = [row for row in mine if row[key] is not None]
        places, heights = [row[x] for row in points], [row[key] for row in points]
        ranges = [(row["lowest_of_turns"], row["highest_of_turns"]) for row in points]
        known = what == "memory" or name == next(iter(series)) or all(low for low, _ in ranges)
        label = name if known else f"{name}, single runs"
        (line,) = axes.plot(places, heights, "osD^v"[number % 5] + "-" * known, label=label)
        for place, (low, high) in zip(places, ranges, strict=True):
            if low:
                axes.plot([place, place], [low, high], "_-", color=line.get_color(), markersize=10)
        gone = [row[x] for row in mine if row["status"] == "oom"]
        if gone:  # in parts of the axes' height, so that crosses do not hide each other
            heights, where = [0.98 - 0.04 * number] * len(gone), axes.get_xaxis_transform()
            style = {"color": line.get_color(), "transform": where}
            axes.plot(gone, heights, "x", **style, label=f"{name}: out of memory")
    axes.set_xticks(sorted({row[x] for row in rows}))  # linear growth is a straight line
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # room for the crosses
    axes.set_title(measured_on(series), fontsize="medium")
    axes.set_xlabel(title(x))
    first = next(iter(series))
    axes.set_ylabel("peak memory, MB" if what == "memory" else f"samples/sec over {first}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    save_figure(figure, path)


def plot(args: argparse.Namespace) -> int:
    """Print the table, write CSV and picture; returns the exit status."""
    if args.output and args.output.suffix not in PICTURES:
        raise ToolError(f"--output {args.output}: must end in {', '.join(PICTURES)}")
    if any(map(is_study, args.runs)):
        series, nowhere = series_of_studies([Path(path) for path in args.runs], args.x), []
    else:
        series, nowhere = load_series(args.runs, args.x)
    runs = [run for by_place in series.values() for run in by_place.values()]
    if not runs:
        raise ToolError("none of these runs got as far as its first step")
    named = [(f"{n} at {place}", run) for n, at in series.items() for place, run in at.items()]
    results = [(name, run.result) for name, run in named]
    check_family(results)
    rows = values_of(args.what, args.x, series)
    print_notes(PROG, *differences(results, ignore=(args.x,)))
    print(table(args.what, args.x, series, rows), flush=True)
    if args.what == "speedup":
        print_notes(PROG, *unsteady(named))
    for run in nowhere:
        print_notes(PROG, f"left out, it ended ({run.status}) before it had a model: {run.path}")
    if args.output:
        write_csv(args.output.with_suffix(".csv"), rows)
        draw(args.output, args.what, args.x, series, rows)
        print(f"\nWritten: {args.output}, {args.output.with_suffix('.csv')}")
    return report_failed(PROG, [*runs, *nowhere])


main = program(build_parser, plot)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Memory or speed-up against sequence length, from the result files of several runs.

  memory    peak memory, one line per NAME
  speedup   samples per second of each NAME over those of the first NAME

NAME=PATH starts a line; the paths after it, until the next NAME=, belong to it too. A path is a result file, the
directory of a run (its --profile-dir), or a quoted pattern, of whose matches the directories and .json files are taken.
Runs that went out of memory are marked. The numbers are printed as a Markdown table and, with --output, written as CSV
beside the picture.

Examples:
  python analysis_tools/plot_runs.py memory scores='results/scores_*' flash='results/flash_*' --output memory.png
  python analysis_tools/plot_runs.py speedup off=results/off_64 results/off_128 on='results/on_*' --output speed.png
"""

from __future__ import annotations

import argparse
import glob
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from analysis_tools.results import (  # noqa: E402
    NOT_FINISHED,
    Run,
    cell,
    differences,
    load_run,
    report_failed,
    split_name,
    unsteady,
)
from tools.version_script import (  # noqa: E402
    ToolError,
    documented_parser,
    markdown_table,
    print_notes,
    run_tool,
    write_csv,
    write_file,
)

PROG = Path(__file__).name
MEASURED = {"memory": ("memory", "peak_mb"), "speedup": ("timing", "samples_per_sec")}
PICTURES = (".png", ".svg", ".pdf")
Series = dict[str, dict[int, Run]]  # name, sequence length


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("what", choices=tuple(MEASURED))
    parser.add_argument("runs", nargs="+", metavar="NAME=PATH", help="a line and its runs; more PATHs may follow")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="also draw a picture (or .svg, .pdf)")
    return parser


def expand(path: str) -> list[Path]:
    """The path itself, or what a pattern matches."""
    if Path(path).exists() or not glob.has_magic(path):
        return [Path(path)]
    found = [Path(match) for match in sorted(glob.glob(path))]
    found = [match for match in found if match.is_dir() or match.suffix == ".json"]
    if not found:
        raise ToolError(f"{path}: the pattern matches no directory and no result file")
    return found


def load_series(arguments: Sequence[str]) -> tuple[Series, list[Run]]:
    """The runs of each name by sequence length, in the order of the names; and runs that ended before it was known."""
    paths: dict[str, list[Path]] = {}
    name = None
    for argument in arguments:
        given, path = split_name(argument)
        name = given or name
        if name is None:
            raise ToolError(f"{argument!r} is not NAME=PATH")
        paths.setdefault(name, []).extend(expand(path))
    series: Series = {}
    without_length = []
    for name, places in paths.items():
        series[name] = {}
        for run in [load_run(place, name) for place in places]:
            length = run.result["config"].get("seq_len")
            if not run.result["config"] and run.status != "ok":
                without_length.append(run)
                continue
            if not isinstance(length, int):
                raise ToolError(f"{run.path}: the result has no sequence length")
            other = series[name].setdefault(length, run)
            if other.path.resolve() != run.path.resolve():
                raise ToolError(f"{name} has two runs of sequence length {length}: {other.path} and {run.path}")
    return series, without_length


def values_of(what: str, series: Series) -> list[dict]:
    """One row per name and length: status, the measured value, its ratio over the first name; None where missing."""
    first = next(iter(series))

    def measured(run: Run | None) -> float | None:
        return run.number(*MEASURED[what]) if run else None

    rows = []
    for name, runs in series.items():
        for length, run in sorted(runs.items()):
            value, base = measured(run), measured(series[first].get(length))
            rows.append(
                {
                    "name": name,
                    "seq_len": length,
                    "status": run.status,
                    MEASURED[what][1]: value,
                    f"ratio_over_{first}": value / base if value is not None and base else None,
                    "path": str(run.path),
                }
            )
    return rows


def table(what: str, series: Series, rows: Sequence[dict]) -> str:
    """Lengths down, names across: the value of each, then its ratio over the first name."""
    first, *others = series
    key, ratio = MEASURED[what][1], f"ratio_over_{first}"
    unit = "MB" if what == "memory" else "samples/sec"
    by_place = {(row["name"], row["seq_len"]): row for row in rows}

    def value(name: str, length: int) -> str:
        row = by_place.get((name, length))
        outcome = NOT_FINISHED.get(row["status"]) if row else None
        return outcome or cell(row and row[key])

    def over_first(name: str, length: int) -> str:
        row = by_place.get((name, length))
        return cell(row and row[ratio], ".2f")

    lines = [
        [str(length), *(value(name, length) for name in series), *(over_first(name, length) for name in others)]
        for length in sorted({row["seq_len"] for row in rows})
    ]
    header = ["sequence length", *(f"{name}, {unit}" for name in series), *(f"{name} / {first}" for name in others)]
    return markdown_table(header, lines)


def draw(path: Path, what: str, series: Series, rows: Sequence[dict]) -> None:
    """The picture; out-of-memory runs are crosses at its top."""
    try:
        import matplotlib
    except ImportError as error:
        raise ToolError(f"the picture needs matplotlib (pip install matplotlib): {error}", status=4) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    key = f"ratio_over_{next(iter(series))}" if what == "speedup" else MEASURED[what][1]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, name in enumerate(series):
        mine = [row for row in rows if row["name"] == name]
        points = [row for row in mine if row[key] is not None]
        places, heights = [row["seq_len"] for row in points], [row[key] for row in points]
        (line,) = axes.plot(places, heights, "osD^v"[number % 5] + "-", label=name)
        gone = [row["seq_len"] for row in mine if row["status"] == "oom"]
        if gone:
            # In parts of the axes' height; crosses of several lines at one length must not hide each other.
            heights, where = [0.98 - 0.04 * number] * len(gone), axes.get_xaxis_transform()
            axes.plot(gone, heights, "x", color=line.get_color(), transform=where, label=f"{name}: out of memory")
    lengths = sorted({row["seq_len"] for row in rows})
    axes.set_xticks(lengths)  # a linear axis: linear growth is a straight line
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # room for the crosses
    axes.set_xlabel("sequence length")
    axes.set_ylabel("peak memory, MB" if what == "memory" else f"samples/sec over {next(iter(series))}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    try:
        write_file(path, lambda temporary: figure.savefig(temporary, dpi=150))
    finally:
        pyplot.close(figure)


def plot(args: argparse.Namespace) -> int:
    """Print the table, write CSV and picture; returns the exit status."""
    if args.output and args.output.suffix not in PICTURES:
        raise ToolError(f"--output {args.output}: must end in {', '.join(PICTURES)}")
    series, without_length = load_series(args.runs)
    runs = [run for by_length in series.values() for run in by_length.values()]
    if not runs:
        raise ToolError("none of these runs got as far as its first step")
    rows = values_of(args.what, series)
    print(table(args.what, series, rows))
    named = [(f"{run.name} at {run.result['config']['seq_len']}", run) for run in runs]
    print_notes(PROG, *differences(((name, run.result) for name, run in named), ignore=("seq_len",)))
    if args.what == "speedup":
        print_notes(PROG, *unsteady(named))
    print_notes(PROG, *(f"left out, it ended ({r.status}) before it had a model: {r.path}" for r in without_length))
    if args.output:
        write_csv(args.output.with_suffix(".csv"), rows)
        draw(args.output, args.what, series, rows)
        print(f"\nWritten: {args.output}, {args.output.with_suffix('.csv')}")
    return report_failed(PROG, [*runs, *without_length])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = build_parser().parse_args(argv)
    return run_tool(PROG, lambda: plot(args))


if __name__ == "__main__":
    sys.exit(main())

"""The best batch size that fits: it doubles, and then the gap is halved."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from fusion_lab.cli import ToolError
from fusion_lab.records import read_study
from fusion_lab.runs import Run, of_study
from fusion_lab.show import Column, cell, range_of_speeds
from fusion_lab.study import Part, heading, is_of
from fusion_lab.sweep import Point, show_runs, silence
from fusion_lab.turns import in_turns, speed

TARGETS = {  # most samples per second, shortest step, fewest MB per sample: the smaller the better
    "throughput": lambda row: -speed(row),
    "latency": lambda row: row["batch_ms"],
    "memory": lambda row: row["peak_mb"] / row["batch_size"],
}
GROWTH = 1.03  # more samples per second than by this factor is growth


def next_size(
    rows: Sequence[dict], limit_mb: float, most: int, host_mb: float | None = None
) -> int | None:
    """The batch size to measure after these rows, up to `most` and `limit_mb`; None at the end.
    What would by its samples take more than `host_mb` counts as too large."""
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


def search(
    rows: Sequence[dict],
    points: Iterable[Point],
    rounds: int,
    sizes: Sequence[int | None],
    **limits: float | None,
) -> Iterator[Part]:
    """Parts of a study for each side of each point: these sizes, or else what follows from the rows
    that are there."""
    for names, sides in points:
        for name, side in sides.items():
            cell = {key: names[key] for key in names if key != "batch_size"} | {"side": name}
            asked = iter(filter(None, sizes))

            def following(cell: dict = cell, asked: Iterator[int] = asked) -> int | None:
                if any(sizes):
                    return next(asked, None)
                return next_size([row for row in rows if is_of(cell, row)], **limits)

            while size := following():
                argv = [*side.argv, "--batch-size", str(size)]
                measure = partial(measured_alone, side.script, argv, rounds)
                yield {**cell, "batch_size": size}, measure


def measured_alone(script: str, argv: list[str], rounds: int) -> dict:
    """The row of a batch size; ToolError where peak memory cannot be told."""
    with silence():
        row = in_turns({"": (script, argv)}, rounds)[""]
    if "status" not in row and row["peak_mb"] is None:
        reason = "graphs of torch.compile share their memory, so no peak is known"
        raise ToolError(f"{reason}: use another mode")
    return row


def answer(rows: Sequence[dict], objective: str, memory_mb: float) -> str:
    """The best of the sizes that fit, and from where on throughput does not grow."""
    best = min(rows, key=TARGETS[objective])
    highest = max(map(speed, rows))
    enough = next(row for row in rows if speed(row) * GROWTH >= highest)
    return (
        f"Best for {objective}: batch size {best['batch_size']}, "
        f"{speed(best):.1f} samples/sec, {best['batch_ms']:.2f} ms per step, "
        f"{best['peak_mb']:.1f} MB ({best['peak_mb'] / memory_mb:.1%} of memory).\n"
        f"Batch size {enough['batch_size']} is the smallest within 3 % of the highest throughput: "
        f"{speed(enough):.1f} of {highest:.1f} samples/sec."
    )


def report(args: argparse.Namespace, path: Path, memory_mb: float) -> int:
    """Print the table of a search and its answers; returns the exit status."""
    content = read_study(path, ("batch_size", "script", "argv"))
    target = args.target_memory_usage

    def part(run: Run) -> str | None:
        share = run.peak_mb and run.peak_mb / memory_mb
        return share and cell(share, ".1%", ", above the limit" * (share > target))

    content["rows"].sort(key=lambda row: (row.get("seq_len", 0), row["batch_size"]))
    runs = of_study(path, content)
    speeds = Column("samples/sec in turns", lambda run: range_of_speeds(run.asked))
    title = heading(content, content["rows"][0]["script"])
    status = show_runs(args, runs, title, more=[speeds, Column("of memory", part)])
    cells: dict[tuple, list[dict]] = {}
    for run in runs:
        place = tuple(run.asked.get(key) for key in ("side", "seq_len", "precision"))
        fitting = cells.setdefault(place, [])
        if run.peak_mb and run.peak_mb <= target * memory_mb:
            fitting.append(run.asked)
    for (_, length, _), fitting in cells.items():
        if not fitting:
            message = f"even batch size 1 takes more than {target:.0%} of memory"
            raise ToolError(message, status=3)
        where = f"Length {length}. " if len(cells) > 1 else ""
        print(f"\n{where}{answer(fitting, args.optimization_target, memory_mb)}")
    return status

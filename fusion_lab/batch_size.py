"""The best batch size that fits: one after the other is measured, until one is too large."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from fusion_lab.cli import ToolError
from fusion_lab.records import read_study
from fusion_lab.runs import Run, of_study
from fusion_lab.show import Column, cell
from fusion_lab.study import Part, heading, is_of
from fusion_lab.sweep import Point, Side, measured, show_runs
from fusion_lab.turns import speed

TARGETS = {  # most samples per second, shortest step, fewest MB per sample: the smaller the better
    "throughput": lambda row: -speed(row),
    "latency": lambda row: row["batch_ms"],
    "memory": lambda row: row["peak_mb"] / row["batch_size"],
}
GROWTH = 1.03  # more samples per second than by this factor is growth


def sizes_up_to(most: int) -> list[int]:
    """Powers of two, and what lies halfway between them: no more than a third of memory is left."""
    sizes = {1, most} | {part << n for n in range(most.bit_length()) for part in (2, 3)}
    return sorted(size for size in sizes if size <= most)


def is_too_large(
    size: int, rows: Sequence[dict], limit_mb: float, host_mb: float | None = None
) -> bool:
    """Did a smaller batch not finish, or take more than the limit? Would this one by its samples
    take more than the machine has?"""
    smaller = [row for row in rows if row["batch_size"] < size]
    peaks = [row["peak_mb"] * size / row["batch_size"] for row in smaller if "status" not in row]
    return (
        len(peaks) < len(smaller)
        or any(row["peak_mb"] > limit_mb for row in smaller)
        or bool(host_mb and peaks and min(peaks) > host_mb)
    )


def growing(
    rows: Sequence[dict], points: Iterable[Point], rounds: int, **limits: float | None
) -> Iterator[Part]:
    """Parts of a study, batch size by batch size, without those that are too large by the rows that
    are there."""
    for names, sides in points:
        for name, side in sides.items():
            names = {**names, "side": name}
            cell = {key: value for key, value in names.items() if key != "batch_size"}
            before = [row for row in rows if is_of(cell, row)]
            if not is_too_large(names["batch_size"], before, **limits):
                yield names, partial(with_peak, name, side, rounds)


def with_peak(name: str, side: Side, rounds: int) -> dict:
    """The row of a side; ToolError where peak memory cannot be told."""
    (row,) = measured({name: side}, rounds)
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
    title = heading(content, content["rows"][0]["script"])
    status = show_runs(args, runs, title, more=[Column("of memory", part)])
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

"""Quantities of runs against a size that they differ in, with the ranges of turns and repeats."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fusion_lab.cli import ToolError, note
from fusion_lab.runs import Run, baseline_in_turns, described, differences, find_runs
from fusion_lab.show import Column, drawing, ended, save_figure
from fusion_lab.turns import ratios

Points = dict[str, dict[float, list[Run]]]  # of each line, the runs at a place


def gains(run: Run, every: Sequence[Run]) -> list[float]:
    """How many times as fast as its baseline, turn by turn; none if it did not finish."""
    if not run.measured:
        return []
    folder = run.path.parent / "baseline"
    others = find_runs(folder) if folder.is_dir() else every
    before = baseline_in_turns(run, others)
    if not before:
        raise ToolError(f"{run.path}: no baseline took turns with it (--compare-fusion does that)")
    return ratios(before.result["timing"], run.result["timing"])


def speeds(run: Run, every: Sequence[Run]) -> list[float]:
    """Samples per second in each turn or repeat, else of the run."""
    if run.repeats or run.number("timing", "turns_ms"):
        times = run.repeats or run.number("timing", "turns_ms")
        return [1e3 * run.result["training"]["batch_size"] / ms for ms in times]
    return list(filter(None, [run.number("timing", "samples_per_sec")]))


def peaks(run: Run, every: Sequence[Run]) -> list[float]:
    return [run.peak_mb] if run.peak_mb else []


class Quantity(NamedTuple):
    """What is plotted: its values of a run among all runs, and how it is written."""

    of: Callable[[Run, Sequence[Run]], list[float]]
    column: str
    form: tuple[str, ...]
    axis: str


QUANTITIES = {
    "throughput": Quantity(speeds, "{}, samples/sec", (".1f",), "samples per second"),
    "memory": Quantity(peaks, "{}, MB", (".1f",), "peak memory, MB"),
    "speedup": Quantity(gains, "{}", (".2f", "x"), "speed-up over its baseline"),
}


def points_of(runs: Sequence[Run], x: str) -> Points:
    """The runs at each place; not those that ended before they had a model, which knows x."""
    points, named, lost = {}, [], []
    for run in runs:
        place = {**run.result["training"], **run.result["config"]}.get(x)
        if isinstance(place, bool) or not isinstance(place, (int, float)):
            if not run.result["config"] and not run.measured:
                lost.append(f"left out, it ended before it had a model: {run.path}")
                continue
            raise ToolError(f"{run.path}: {x} is no number in this result")
        points.setdefault(run.name, {}).setdefault(place, []).append(run)
        named.append((f"{run.name} at {place}", run.result))
    if not points:
        raise ToolError("none of these runs got as far as its first step")
    note(*differences(named, ignore=(x, "arguments")), *lost)
    return points


def values_of(
    points: Points, what: Quantity, every: Sequence[Run]
) -> dict[tuple[str, float], list[float]]:
    """All values of each line at each place."""
    return {
        (name, place): [value for run in runs for value in what.of(run, every)]
        for name, line in points.items()
        for place, runs in line.items()
    }


def columns_of(points: Points, values: dict, label: str, what: Quantity) -> list[Column]:
    """Places down, names across: the quantity of each, then that of the others over the first."""
    first, *others = points

    def value(name: str, place: float) -> object:
        ends = [ended(run.result) for run in points[name].get(place, ()) if not run.measured]
        found = values.get((name, place))
        return statistics.median(found) if found else next(iter(ends), None)

    def over_first(name: str, place: float) -> float | None:
        both = [values.get((line, place)) for line in (name, first)]
        return statistics.median(both[0]) / statistics.median(both[1]) if all(both) else None

    columns = [Column(label, str)]
    columns += [Column(what.column.format(n), partial(value, n), *what.form) for n in points]
    return columns + [Column(f"{n} / {first}", partial(over_first, n), ".2f") for n in others]


def apart(places: Sequence[float]) -> list[float]:
    """Those whose labels have room beside one another, the lowest first."""
    kept: list[float] = []
    for place in sorted(places):
        if not kept or place - kept[-1] >= 0.04 * (max(places) - min(places)):
            kept.append(place)
    return kept


def draw_lines(
    path: Path, parts: Mapping[str, tuple[Points, dict]], label: str, what: Quantity
) -> None:
    """The picture, with the ranges, beside each other where there are several parts."""
    size = (8 * len(parts), 5)
    figure, axes = drawing().subplots(1, len(parts), squeeze=False, figsize=size)
    figure.set_layout_engine("constrained")
    for place, (title, (points, values)) in zip(axes[0], parts.items(), strict=True):
        draw_part(place, points, values)
        runs = (run for mine in points.values() for same in mine.values() for run in same)
        titles = [*dict.fromkeys(described(run.result) for run in runs)]
        more = [f"and {len(titles) - 2} more"] if len(titles) > 3 else []
        titles = [*filter(None, [title]), *(titles[:2] if more else titles), *more]
        place.set_title("\n".join(titles), fontsize="medium")
        place.set(xlabel=label, ylabel=what.axis)
        place.grid(alpha=0.3)
        place.legend(fontsize="small")
    save_figure(figure, path)


def draw_part(axes: object, points: Points, values: dict) -> None:
    """A line for each name; out-of-memory runs are crosses at its top. Lines with ranges stand
    beside each other."""
    places = sorted(set().union(*points.values()))
    width = (places[-1] - places[0]) or 1.0
    for number, (name, mine) in enumerate(points.items()):
        found = {place: values[name, place] for place in sorted(mine) if values[name, place]}
        middle = [statistics.median(each) for each in found.values()]
        below = [m - min(each) for m, each in zip(middle, found.values(), strict=True)]
        above = [max(each) - m for m, each in zip(middle, found.values(), strict=True)]
        ranged = any(len(each) > 1 for each in values.values())
        shift = 0.012 * width * (number - (len(points) - 1) / 2) * ranged
        at = [place + shift for place in found]
        (line,) = axes.plot(at, middle, "osD^v"[number % 5] + "-", label=name)
        bars = {"fmt": "none", "ecolor": line.get_color(), "capsize": 2}
        axes.errorbar(at, middle, [below, above], **bars)
        gone = [place for place, runs in mine.items() for run in runs if run.status == "oom"]
        if gone:
            # in parts of the axes' height, so that crosses do not hide each other
            style = {"color": line.get_color(), "transform": axes.get_xaxis_transform()}
            heights = [0.98 - 0.04 * number] * len(gone)
            axes.plot(gone, heights, "x", **style, label=f"{name}: out of memory")
    axes.set_xticks(apart(places))  # linear growth is a straight line
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # room for the crosses

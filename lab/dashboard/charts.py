"""Charts as HTML: tables with bars in them, and the roofline."""

from __future__ import annotations

import io
import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from html import escape

from lab.profile.ceilings import Ceilings
from lab.profile.kernels import CATEGORIES
from lab.show import drawing, ended
from lab.study import unit_of
from lab.turns import ratios, spread

VERSIONS = {"V1": "#8a8f94", "V2": "#56b4e9", "V3": "#0072b2", "V4": "#d55e00"}
# The colours of Okabe and Ito, which colour-blind people can tell apart, and greys.
KINDS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442"]
KINDS += ["#333333", "#8c8c8c", "#cfcfcf"]
COLOURS = dict(zip(CATEGORIES, KINDS, strict=True))
MEASURES = {"batch_ms": "ms per step", "per_step": "{} per step", "peak_mb": "peak MB"}
Cells = Mapping[str, Mapping[str, dict]]  # of each sizes and mode, a row of each version


def numbers_in(text: str) -> list[int]:
    """The numbers in words about sizes, to sort by."""
    return [int(digits) for digits in re.findall(r"\d+", text)]


def bar(share: float, colour: str) -> str:
    """A bar as a part of its place."""
    return f'<i style="width:{100 * share:.1f}%;background:{colour}"></i>'


def table(header: Sequence[str], lines: Sequence[str]) -> str:
    """Lines of HTML below a header, whose first column holds names."""
    titles = "".join(f"<th>{title}</th>" for title in header)
    return f"<table><tr><th></th>{titles}</tr>{''.join(lines)}</table>"


def draw_bars(cells: Cells, measures: Sequence[str], one_scale: bool = False) -> str:
    """Numbers with a bar each, as a part of the longest of its group or of all."""
    every = [row for sides in cells.values() for row in sides.values()]
    unit = unit_of(every)
    lines = []
    for cell, sides in cells.items():
        lines.append(f'<tr><th class="group" colspan="3">{escape(cell)}</th></tr>')
        names = sorted(sides, key=lambda name: (name[:1] != "V", numbers_in(name), name))
        for name in names:
            row, colour = sides[name], VERSIONS.get(name[:2], KINDS[-1])
            asked = escape(" ".join(row.get("argv", ())))
            lines.append(f'<tr title="{asked}"><th>{escape(name)}</th>')
            for key in measures:
                value = row.get(key) if "error" not in row else None
                others = every if one_scale else sides.values()
                number, length = ended(row) or "-", ""
                if value:
                    number = f"{value:,.2f}" if key == "batch_ms" else f"{value:,.0f}"
                    length = bar(value / max(other.get(key) or 0 for other in others), colour)
                if value and key == "batch_ms":
                    number += f" <small>{beside(row, sides[names[0]])}</small>"
                lines.append(f"<td>{number}{length}</td>")
    return table([MEASURES[key].format(unit) for key in measures], lines)


def beside(row: dict, first: dict) -> str:
    """How many times as fast as the first version of a group.

    Or the range of runs by themselves.
    """
    if alike := row.get("alike"):
        return f"{len(alike)} runs: {min(alike):.2f} to {max(alike):.2f}" if len(alike) > 1 else ""
    if row is first or not first.get("batch_ms"):
        return ""
    if not (row.get("turns_ms") and first.get("turns_ms")):
        return f"{first['batch_ms'] / row['batch_ms']:.2f}x"
    turns = ratios(first, row)
    return f"{statistics.median(turns):.2f}x ({spread(turns)})"


def draw_ablation(rows: Sequence[dict]) -> str:
    """A point for each set of fusions: its speed-up over none, and the range of the turns."""
    none = {(row.get("seed"), row.get("group")): row for row in rows if not row["on"]}
    turns = {row["side"]: [] for row in rows if row["on"]}
    for row in rows:
        base = none.get((row.get("seed"), row.get("group")), {})
        if row["side"] in turns and "turns_ms" in row and "turns_ms" in base:
            turns[row["side"]] += ratios(base, row)
    every = [1, 1.01, *itertools.chain(*turns.values())]
    low, high = min(every), max(every)
    lines = []
    for name, gains in turns.items():
        ends = filter(None, (ended(row) for row in rows if row["side"] == name))
        axis, text = "", next(ends, "nothing to compare with")
        if gains:
            marks = 1, min(gains), max(gains), statistics.median(gains)
            line, start, end, point = (3 + 92 * (mark - low) / (high - low) for mark in marks)
            axis = f'<b style="left:{line:.1f}%"></b><u style="left:{point:.1f}%"></u>'
            axis += f'<s style="left:{start:.1f}%;width:{end - start:.1f}%"></s>'
            text = f"{marks[-1]:.2f}x <small>{spread(gains)}</small>"
        lines.append(f'<tr><th>{escape(name)}</th><td class="axis">{axis}</td><td>{text}</td></tr>')
    return table(["", "as fast as with none"], lines)


def draw_kernels(cells: Cells, unit: str) -> str:
    """A bar of its categories for each profile, with their numbers below it."""
    longest = max(row["batch_ms"] for bars in cells.values() for row in bars.values())
    html = []
    for cell, bars in cells.items():
        html.append(f"<h3>{escape(cell)}</h3>")
        for name, row in bars.items():
            parts = {kind: ms for kind, ms in row["categories"].items() if ms > 0}
            stack = "".join(bar(ms / longest, COLOURS[kind]) for kind, ms in parts.items())
            numbers = (f"<span>{bar(1, COLOURS[k])}{k} {ms:.2f}</span>" for k, ms in parts.items())
            total = f"{row['batch_ms']:.2f} ms of {unit} <small>{beside(row, row)}</small>"
            html.append(f'<p><b>{escape(name)}</b> {total}</p><div class="stack">{stack}</div>')
            html.append(f'<p class="legend">{" ".join(numbers)}</p>')
    return "".join(html)


def draw_roofline(points: Mapping[str, Mapping], measured: Mapping) -> str:
    """TFLOP/s over FLOP per byte: both ceilings, and each point with `flop`, `bytes` and `ms`."""
    from lab.profile import roofline

    pyplot, text = drawing(), io.StringIO()
    ceilings = Ceilings(**{"gemm_size": 0, "copy_bytes": 0, **measured})
    rows = {
        name: roofline.rates(row["flop"], row["bytes"], row["ms"], ceilings)
        for name, row in points.items()
        if all(row.get(key) for key in ("flop", "bytes", "ms"))
    }
    with pyplot.rc_context({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "roofline"}):
        figure, axes = pyplot.subplots(figsize=(4.8, 3.6), layout="constrained")
        roofline.draw_roofline(axes, rows, ceilings)
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        figure.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]

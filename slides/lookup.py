"""What slides name and do not type: figures and tables from the results, code from the scripts."""

import ast
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from bench.tables import printed_by
from workshop.cli import ToolError
from workshop.files import ROOT, read_json
from workshop.study import by_side, read_rows
from workshop.turns import ratios

# source, row and column, or file, keys and format
FIGURE = re.compile(r"\{([^{}:]+): ([^{}:]+): ([^{}:]+)\}")
BENCHMARK = "python bench/versions.py table results/h100 --tables"
KERNELS = "python bench/operations.py table results/h100"


@cache
def tables(source: str) -> list[list[list[str]]]:
    """The tables of a source as cells, the header first."""
    if source in MADE_HERE:
        return [MADE_HERE[source][1](ROOT / MADE_HERE[source][0])]
    blocks = re.findall(r"(?:^\|.*\n)+", printed_by(origin(source)), flags=re.MULTILINE)
    return [as_cells(block) for block in blocks]


def origin(source: str) -> str:
    """The result file of a source, or the command that prints it."""
    if source in MADE_HERE or source.endswith(".json"):
        return MADE_HERE.get(source, [source])[0]
    return KERNELS if source == "kernels" else f"{BENCHMARK} {source}"


def as_cells(table: str) -> list[list[str]]:
    """Header and rows of a Markdown table."""
    header, _, *rows = table.splitlines()
    return [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in (header, *rows)]


def turns(path: Path) -> list[list[str]]:
    """How far the ratio of V1 to V2 differs from turn to turn, eager and as a graph."""
    lines: dict[str, list[str]] = {}
    for (shape, precision, mode), sides in by_side(
        read_rows(path), "shape", "precision", "mode"
    ).items():
        if mode in ("eager", "graph"):
            found, name = ratios(sides["V1"], sides["V2"]), f"{shape}, {precision}"
            lines.setdefault(name, [name]).append(f"{min(found):.2f}x to {max(found):.2f}x")
    return [["V1 over V2", "eager", "graph"], *lines.values()]


def roofline(path: Path) -> list[list[str]]:
    """What modules reach, and what their FLOP per byte would allow."""
    keys = "flop_per_byte", "roof_tflops", "achieved_tflops"
    found = [module for module in read_json(path)["modules"] if module["achieved_tflops"]]
    lines = [
        [module["module"].replace("blocks.*.", ""), *(f"{module[key]:.1f}" for key in keys)]
        for module in found
    ]
    return [["module", "FLOP per byte", "roof, TFLOP/s", "reached, TFLOP/s"], *lines]


MADE_HERE = {
    "turns": ("results/h100/headline.json", turns),
    "roofline": ("results/h100/flops_tiny_openfold_v2.json", roofline),
}


def select(source: str, rows: Sequence[str], columns: Sequence[str]) -> list[list[str]]:
    """Cells of the first table of the source that has these rows (all of them, if none is named)
    and columns."""

    def place(names: Sequence[str], wanted: str) -> int | None:
        found = [i for i, name in enumerate(names) if name.startswith(wanted)]
        return names.index(wanted) if wanted in names else found[0] if len(found) == 1 else None

    for header, *lines in tables(source):
        across = [place(header, name) for name in columns]
        down = [place([line[0] for line in lines], name) for name in rows] or [*range(len(lines))]
        if None not in across + down:
            return [[lines[i][j] for j in across] for i in down]
    raise ToolError(
        f"{source}: no table there has the rows {'; '.join(rows)} "
        f"and the columns {'; '.join(columns)}"
    )


def figure(source: str, row: str, column: str) -> str:
    """A cell of a table, or a value in a result file."""
    if not source.endswith(".json"):
        if (found := select(source, [row], [column])[0][0]) == "-":
            raise ToolError(f"{source}: {row} has no {column}")
        return found
    value = read_json(ROOT / source)
    try:
        for key in row.split("."):
            value = value[int(key) if isinstance(value, list) else key]
        return format(value, column)
    except (LookupError, TypeError, ValueError) as error:
        raise ToolError(f"{source}: no {row} to write as {column} ({error!r})") from error


def cut(place: str, width: int) -> list[str]:
    """Lines of `FILE FUNCTION`, or those from FIRST to LAST of `FILE FUNCTION: FIRST ...

    LAST`; folded to a width.
    """
    name, _, part = place.partition(": ")
    file, _, function = name.partition(" ")
    source = (ROOT / file).read_text(encoding="utf-8")
    node = ast.parse(source)
    for step in function.split("."):
        node = next(
            (inner for inner in getattr(node, "body", ()) if getattr(inner, "name", "") == step),
            None,
        )
        if node is None:
            raise ToolError(f"{file}: no function {function}")
    said = (
        range(node.body[0].lineno, node.body[0].end_lineno + 1) if ast.get_docstring(node) else ()
    )
    lines = source.splitlines()
    lines = [lines[i - 1] for i in range(node.lineno, node.end_lineno + 1) if i not in said]
    if part:
        first, _, last = part.partition(" ... ")
        begin = next((i for i, line in enumerate(lines) if first in line), len(lines))
        end = next(
            (i for i, line in enumerate(lines) if i >= begin and (last or first) in line), None
        )
        if end is None:
            raise ToolError(f"{file}: no lines {part!r} in {function}")
        lines = lines[begin : end + 1]
    lines = textwrap.dedent("\n".join(filter(str.strip, lines))).splitlines()
    folded = (
        textwrap.wrap(s, width, subsequent_indent=" " * (len(s) - len(s.lstrip()) + 8))
        for s in lines
    )
    return [line for part in folded for line in part]

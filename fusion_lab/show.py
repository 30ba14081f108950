"""How results are shown: tables, numbers in them, pictures.

A table is a list of columns and a list of rows, and `render` writes it: as Markdown, as text for a
terminal, or as CSV.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from fusion_lab.cli import ToolError, one_line
from fusion_lab.files import printable, write_file, write_text

NOT_FINISHED = {  # what tables say of a side with this status
    "oom": "out of memory",
    "failed": "failed",
    "missing": "not installed",
}


@dataclass(frozen=True)
class Column:
    """A column of a table: its label, the key, attribute or function of a row that gives its value,
    and the form and unit of numbers; text stays as it is, and None is a dash."""

    label: str
    value: str | Callable[[Any], object]
    form: str = ""
    unit: str = ""
    text: bool = False  # aligned to the left, as the first column always is

    def of(self, row: Any) -> object:
        if callable(self.value):
            return self.value(row)
        return row.get(self.value) if isinstance(row, Mapping) else getattr(row, self.value)

    def or_ended(self) -> Column:
        """The same, but of a row without a value it says how the row ended."""

        def value(row: Any) -> object:
            found = self.of(row)
            return ended(row) if found is None else found

        return replace(self, value=value)


def side_columns(
    label: str,
    sides: Iterable[str],
    value: str | Callable[[Any], object],
    form: str = "",
    ends: bool = False,
) -> list[Column]:
    """A column for each side, of rows that are sides by name; `label` has {} for it. Without the
    side a cell is empty; with `ends` it says how one ended that has no value."""
    of = Column("", value).of

    def value_of(name: str, row: Mapping) -> object:
        if name not in row:
            return ""
        found = of(row[name])
        return ended(row[name]) if found is None and ends else found

    return [Column(label.format(name), partial(value_of, name), form) for name in sides]


def render(columns: Sequence[Column], rows: Sequence, style: str = "markdown") -> str:
    """A table as "markdown" or "text", aligned, or as "csv", where numbers are not rounded; nothing
    where Markdown would have no rows.

    A cell of a CSV file that a spreadsheet would take for a formula begins with a '.
    """
    if style == "csv":
        file = io.StringIO()
        lines = [[column.label for column in columns]]
        lines += [[column.of(row) for column in columns] for row in rows]
        csv.writer(file, lineterminator="\n").writerows(map(harmless, line) for line in lines)
        return file.getvalue()
    if not rows and style == "markdown":
        return ""
    lines = [[column.label for column in columns]]
    lines += [[cell(c.of(row), c.form, c.unit) for c in columns] for row in rows]
    between = " | " if style == "markdown" else "  "
    escape = {"|": "\\|"} if style == "markdown" else {}
    lines = [[one_line(text).translate(str.maketrans(escape)) for text in line] for line in lines]
    least = 3 if style == "markdown" else 0
    widths = [max(least, *map(len, texts)) for texts in zip(*lines, strict=True)]
    left = [place == 0 or column.text for place, column in enumerate(columns)]
    padded = [
        between.join(
            text.ljust(width) if at_left else text.rjust(width)
            for text, width, at_left in zip(line, widths, left, strict=True)
        )
        for line in lines
    ]
    if style == "text":
        return "\n".join(map(str.rstrip, padded))
    ends = ("-" if at_left else ":" for at_left in left)
    rule = ("-" * (width - 1) + end for width, end in zip(widths, ends, strict=True))
    padded.insert(1, between.join(rule))
    return "\n".join(f"| {line} |" for line in padded)


def cells_of(line: str) -> list[str]:
    """The cells of a line of a Markdown table."""
    cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
    return [cell.strip().replace("\\|", "|") for cell in cells]


def harmless(value: object) -> object:
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula else value


def write_csv(path: Path, rows: Sequence[Mapping]) -> None:
    """Write rows with the same keys, which become the header; None is an empty cell."""
    write_text(path, render([Column(key, key) for key in rows[0]], rows, "csv"))


def cell(value: object, form: str = ".1f", unit: str = "") -> str:
    """A number for a table with its unit, or text; a dash where there is none."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, form) + unit


def ended(row: Mapping) -> str | None:
    """How a row ended that did not finish, in the words of tables."""
    return NOT_FINISHED.get(row.get("status"))


def rate(value: float | None) -> str:
    """Samples per second, where small numbers need another digit."""
    return cell(value, ".1f" if (value or 0) >= 10 else ".2f")


def drawing() -> ModuleType:
    """matplotlib.pyplot, which writes files and opens no window; ToolError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        message = f"the picture needs matplotlib (pip install matplotlib): {error}"
        raise ToolError(message, status=4) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of `drawing()` as the ending of the path says, and close it. Names in it are
    no mathematics, and may have bytes that no font has."""
    for text in figure.findobj(lambda artist: hasattr(artist, "set_text")):
        text.set_text(printable(text.get_text()).replace("$", r"\$"))
    try:
        write_file(path, lambda temporary: figure.savefig(temporary, dpi=150))
    finally:
        drawing().close(figure)

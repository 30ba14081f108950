"""How results are shown: tables, numbers in them, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from workshop.cli import ToolError, one_line

NOT_FINISHED = {"oom": "out of memory", "failed": "failed"}  # what tables say of a run with this status


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table, its columns aligned in the source too; those after the first `text_columns` hold numbers."""
    header, *rows = ([one_line(cell).replace("|", "\\|") for cell in line] for line in (header, *rows))
    widths = [max(3, *(len(line[i]) for line in (header, *rows))) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i < text_columns else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def cell(value: float | None, form: str = ".1f", unit: str = "") -> str:
    """A number for a table with its unit, a dash where there is none."""
    return "-" if value is None else format(value, form) + unit


def drawing() -> ModuleType:
    """matplotlib.pyplot, which writes files and opens no window; ToolError if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ToolError(f"the picture needs matplotlib (pip install matplotlib): {error}", status=4) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot

"""What slides name and do not type: figures and tables from the results, code from the scripts."""

import ast
import re
import textwrap
from collections.abc import Sequence
from functools import cache

from dev.tables import printed_by
from fusion_lab.cli import ToolError
from fusion_lab.files import ROOT, read_json
from fusion_lab.show import cells_of

# source, row and column, or file, keys and format
FIGURE = re.compile(r"\{([^{}:]+): ([^{}:]+): ([^{}:]+)\}")
BENCHMARK = "python dev/bench/versions.py table results/h100 --tables"
KERNELS = "python dev/bench/operations.py table results/h100"


@cache
def tables(source: str) -> list[list[list[str]]]:
    """The tables of a source as cells, the header first."""
    blocks = re.findall(r"(?:^\|.*\n)+", printed_by(origin(source)), flags=re.MULTILINE)
    return [as_cells(block) for block in blocks]


def origin(source: str) -> str:
    """The result file of a source, or the command that prints it."""
    if source.endswith((".json", ".svg")):
        return source
    return KERNELS if source == "kernels" else f"{BENCHMARK} {source}"


def as_cells(table: str) -> list[list[str]]:
    """Header and rows of a Markdown table."""
    header, _, *rows = table.splitlines()
    return [cells_of(line) for line in (header, *rows)]


def select(source: str, rows: Sequence[str], columns: Sequence[str]) -> list[list[str]]:
    """Cells of the first table of the source that has these rows (all of them, if none is named)
    and columns, as it is or with rows as columns."""

    def place(names: Sequence[str], wanted: str) -> int | None:
        found = [i for i, name in enumerate(names) if name.startswith(wanted)]
        return names.index(wanted) if wanted in names else found[0] if len(found) == 1 else None

    turned = [[*map(list, zip(*table, strict=True))] for table in tables(source)]
    for header, *lines in (*tables(source), *turned):
        across = [place(header, name) for name in columns]
        down = [place([line[0] for line in lines], name) for name in rows] or [*range(len(lines))]
        if None not in across + down:
            return [[lines[i][j] for j in across] for i in down]
    wanted = f"the rows {'; '.join(rows)} and the columns {'; '.join(columns)}"
    raise ToolError(f"{source}: no table there has {wanted}")


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


def cut(place: str) -> list[str]:
    """The lines of `FILE FUNCTION`, without its docstring, comments and, where its first line is
    long, types."""
    file, _, function = place.partition(" ")
    source = (ROOT / file).read_text(encoding="utf-8")
    node, lines = ast.parse(source), source.splitlines()
    for step in function.split("."):
        named = (each for each in getattr(node, "body", ()) if getattr(each, "name", "") == step)
        if (node := next(named, None)) is None:
            raise ToolError(f"{file}: no function {function}")
    begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    body = node.body[1:] if ast.get_docstring(node) else node.body
    first = lines[node.lineno - 1 : node.body[0].lineno - 1]
    if len(first) > 1 or len(first[0]) > 77:
        names = ", ".join(each.arg for each in node.args.args)
        first = [f"{' ' * node.col_offset}def {node.name}({names}):"]
    shown = lines[begin - 1 : node.lineno - 1] + first + lines[body[0].lineno - 1 : node.end_lineno]
    shown = (re.sub(r"\s*#.*", "", line) for line in shown)
    return textwrap.dedent("\n".join(filter(None, shown))).splitlines()

#!/usr/bin/env python3
"""Build the slide decks: NAME.pptx beside each NAME.md.

A deck is a `# title` with a line below it, and slides: `## title`, bullets, Markdown tables,
`Notes:` with what to say and, from `Show:` on, what to run meanwhile. What could go stale is named,
not typed:

  {llama: small, bf16: V4, ms}                   a cell of a table: its source, row and column
  {results/cpu/counts.json: rows.0.per_step: d}  a value in a result file: keys, and a format
  ```table SOURCE     rows and columns of a table; `bars` and `columns` draw the same as a chart
  rows: small, bf16; medium, bf16
  columns: tiny_llama = size; V1, ms = V1; V4, ms = V4
  ```                 a name may be cut short where clear, and is replaced by what follows `=`
  ```code             functions without their docstring, or some lines of them
  tiny_llama_v1.py SwiGLU.forward
  tiny_llama_v1.py Attention.forward: q = self ... v = self
  ```
  ```sh               commands, as they stand

A source is a table that bench/versions.py prints from results/h100, `kernels`, or one of MADE_HERE
in lookup.py.

Examples:
  python slides/build.py                    all decks
  python slides/build.py --output DIR       the same into another folder
"""

import _root

import re
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from slides.lookup import FIGURE, as_cells, cut, figure, origin, select
from workshop.cli import ToolError, documented_parser, run_tool
from workshop.files import write_file

PROG = Path(__file__).name
try:
    from pptx import Presentation
    from pptx.chart.data import CategoryChartData
    from pptx.dml.color import RGBColor
    from pptx.enum.chart import XL_CHART_TYPE, XL_LEGEND_POSITION
    from pptx.enum.text import MSO_ANCHOR, PP_ALIGN
    from pptx.oxml.ns import qn
    from pptx.util import Inches, Pt
except ImportError as missing:
    print(
        f"{PROG}: error: it needs python-pptx (pip install python-pptx): {missing}", file=sys.stderr
    )
    raise SystemExit(4) from missing

# inches; from TOP to BOTTOM is the body
WIDTH, HEIGHT, MARGIN, TOP, BOTTOM, GAP = 13.333, 7.5, 0.6, 1.5, 7.0, 0.25
INNER = WIDTH - 2 * MARGIN
TITLE, TEXT, SMALL = 32, 26, 18  # points; nothing is smaller
CODE_WIDTH = int((INNER - 0.3) * 72 / (0.6 * SMALL))  # characters in a line
COLORS = ("222222", "B01E23", "F2F2F2", "FFFFFF", "C8C8C8", "969696", "5A5A5A")
INK, ACCENT, PALE, WHITE, *GREYS = map(RGBColor.from_string, COLORS)
FONT, CODE_FONT = "Arial", "Courier New"
MARKED = re.compile(r"(`[^`]+`|\*\*[^*]+\*\*)")
# its height in inches, None for what is left; draws it at a top, this high
Block = tuple[float | None, Callable]


def put(
    frame,
    lines: Sequence[str],
    size=TEXT,
    color=INK,
    font=FONT,
    bold=False,
    align=PP_ALIGN.LEFT,
    dot="",
) -> None:
    """Write paragraphs into a text frame;

    `code` and **bold** look so, and each begins with the dot if there is one.
    """
    frame.word_wrap = True
    for number, line in enumerate(lines):
        paragraph = frame.paragraphs[0] if number == 0 else frame.add_paragraph()
        paragraph.alignment, paragraph.space_after = align, Pt(10 if size == TEXT else 0)
        if dot:
            properties = paragraph._p.get_or_add_pPr()
            properties.attrib.update({"marL": str(Inches(0.35)), "indent": str(-Inches(0.35))})
            properties.append(properties.makeelement(qn("a:buChar"), {"char": dot}))
        for piece in MARKED.split(line) if font == FONT else [line]:
            run, marked = paragraph.add_run(), piece[:1] if MARKED.fullmatch(piece) else ""
            run.text, run.font.name = (
                piece.strip("`*") if marked else piece,
                CODE_FONT if marked == "`" else font,
            )
            run.font.size, run.font.color.rgb, run.font.bold = (
                Pt(size),
                color,
                bold or marked == "*",
            )


def text_box(shapes, top: float, height: float, lines: Sequence[str], fill=None, **style) -> None:
    """A text over the whole width; inches."""
    box = shapes.add_textbox(*map(Inches, (MARGIN, top, INNER, height)))
    frame, (side, over) = box.text_frame, (Inches(0.15), Inches(0.08)) if fill else (0, 0)
    frame.margin_left, frame.margin_right, frame.margin_top, frame.margin_bottom = (
        side,
        0,
        over,
        over,
    )
    if fill:
        box.fill.solid()
        box.fill.fore_color.rgb = fill
    put(frame, lines, **style)


def text_width(text: str, size: int, bold: bool = False) -> float:
    """Inches that a line of text takes, a little more than less."""
    code, rest = "".join(re.findall("`([^`]+)`", text)), re.sub("`[^`]+`", "", text)
    wide, digits = (len(re.findall(letters, rest)) for letters in ("[A-Z]", "[0-9]"))
    return (
        (0.61 * len(code) + (0.55 if bold else 0.5) * len(rest) + 0.2 * wide + 0.07 * digits)
        * size
        / 72
    )


def bullets(text: str) -> Block:
    """A list, or a paragraph where no line begins with a dash."""
    items = [
        " ".join(item.split())
        for item in re.split(r"^- ", text, flags=re.MULTILINE)
        if item.strip()
    ]
    rows, dot = (
        sum(1 + int(text_width(item, TEXT) / INNER) for item in items),
        "•" if text[0] == "-" else "",
    )
    return rows * 0.44 + len(items) * 0.14, lambda shapes, top, height: text_box(
        shapes, top, height, items, dot=dot
    )


def grid(cells: list[list[str]]) -> Block:
    """A table, as large as its width allows; columns of numbers are on the right."""
    columns = [*zip(*cells, strict=True)]
    for size in (24, 21, SMALL):
        least = [
            max(text_width(text, size, bold=i == 0) for i, text in enumerate(column)) + 0.25
            for column in columns
        ]
        if sum(least) < INNER:
            break
    else:
        raise ToolError(f"a table is too wide by {sum(least) - INNER:.1f} inches")
    widths = [width + min((INNER - sum(least)) / len(least), 0.6) for width in least]
    numbers = [
        j and all(re.fullmatch(r"(-?[\d.]+( ?[x%])?)?", t) for t in column[1:])
        for j, column in enumerate(columns)
    ]

    def draw(shapes, top: float, height: float) -> None:
        area = (MARGIN, top, sum(widths), height)
        table = shapes.add_table(len(cells), len(widths), *map(Inches, area)).table
        for (i, line), (j, width) in product(enumerate(cells), enumerate(widths)):
            table.columns[j].width, cell = Inches(width), table.cell(i, j)
            cell.vertical_anchor, align = (
                MSO_ANCHOR.MIDDLE,
                PP_ALIGN.RIGHT if numbers[j] else PP_ALIGN.LEFT,
            )
            cell.fill.solid()
            cell.fill.fore_color.rgb = (ACCENT if i == 0 else WHITE) if i % 2 == 0 else PALE
            put(
                cell.text_frame, [line[j]], size, WHITE if i == 0 else INK, bold=i == 0, align=align
            )

    return (1.2 * size / 72 + 0.16) * len(cells), draw


def chart(cells: list[list[str]], kind: str) -> Block:
    """Bars for each row, one for each column, with their values.

    The last column has the accent colour.
    """
    values = [[re.match(r"([\d.]+)(.*)", text) for text in line[1:]] for line in cells[1:]]
    number, unit = values[0][0].groups()
    form = re.sub(r"^0+", "0", re.sub(r"\d", "0", number)) + (unit and f'"{unit}"')
    data = CategoryChartData(number_format=form)
    data.categories = [line[0] for line in cells[1:]]
    for name, *column in zip(cells[0][1:], *values, strict=True):
        data.add_series(name, [found and float(found[1]) for found in column])

    def draw(shapes, top: float, height: float) -> None:
        shape = XL_CHART_TYPE.BAR_CLUSTERED if kind == "bars" else XL_CHART_TYPE.COLUMN_CLUSTERED
        drawn = shapes.add_chart(shape, *map(Inches, (MARGIN, top, INNER, height)), data).chart
        drawn.has_title, drawn.has_legend, plot = False, True, drawn.plots[0]
        drawn.font.name, drawn.font.size, drawn.font.color.rgb = FONT, Pt(SMALL), INK
        drawn.legend.position, drawn.legend.include_in_layout = XL_LEGEND_POSITION.TOP, False
        drawn.category_axis.reverse_order = kind == "bars"
        drawn.value_axis.visible = drawn.value_axis.has_major_gridlines = False
        drawn.value_axis.minimum_scale = 0
        plot.gap_width, plot.overlap, plot.has_data_labels = 50, -5, True
        plot.data_labels.number_format, plot.data_labels.number_format_is_linked = form, False
        for series, color in zip(plot.series, [*GREYS, ACCENT][-len(plot.series) :], strict=True):
            series.format.fill.solid()
            series.format.fill.fore_color.rgb = color

    return None, draw


def code(pieces: Sequence[tuple[str, list[str]]]) -> Block:
    """Pieces of code one below the other, each below its place."""

    def draw(shapes, top: float, height: float) -> None:
        for place, lines in pieces:
            if place:
                text_box(shapes, top, 0.36, [place], size=SMALL, color=ACCENT, bold=True)
                top += 0.38
            text_box(
                shapes, top, 0.285 * len(lines) + 0.16, lines, PALE, size=SMALL, font=CODE_FONT
            )
            top += 0.285 * len(lines) + 0.3

    return sum(
        0.285 * len(lines) + (0.68 if place else 0.3) for place, lines in pieces
    ) - 0.14, draw


def block(paragraph: str, look_up: Callable[..., str], used: dict) -> Block:
    """What a paragraph of a slide becomes; adds the sources of its figures to those used."""
    if not paragraph.startswith("```"):
        text = look_up(paragraph)
        return grid(as_cells(text)) if text.startswith("|") else bullets(text)
    first, *lines, _ = paragraph.splitlines()
    kind, _, source = first.strip("`").partition(" ")
    if kind == "sh":
        return code([("", lines)])
    if kind == "code":
        return code(
            [(line.partition(": ")[0].replace(" ", ", "), cut(line, CODE_WIDTH)) for line in lines]
        )
    used[source] = None
    if kind not in ("table", "bars", "columns"):
        raise ToolError(f"no block is called {kind!r}")
    wanted = {
        key: [name.split(" = ") for name in names.split("; ")]
        for key, _, names in (s.partition(": ") for s in lines)
    }
    rows, columns = wanted.get("rows", []), wanted["columns"]
    cells = select(source, [name[0] for name in rows], [name[0] for name in columns])
    for line, name in zip(cells, rows, strict=False):
        line[0] = name[-1]
    cells.insert(0, [name[-1] for name in columns])
    return grid(cells) if kind == "table" else chart(cells, kind)


def add_slide(deck, text: str, number: int) -> None:
    """Put a slide into the deck; ToolError if there is too much on it."""
    used: dict[str, None] = {}  # sources, in their order

    def look_up(text: str) -> str:
        used.update(dict.fromkeys(match[1] for match in FIGURE.finditer(text)))
        return FIGURE.sub(lambda match: figure(*match.groups()), text)

    # only a title is on it
    shapes, cover = (page := deck.slides.add_slide(deck.slide_layouts[5])).shapes, number == 1
    title, _, rest = text.partition("\n")
    body, _, notes = rest.partition("\nNotes:")
    title, size, top = look_up(title), 44 if cover else TITLE, 3.6 if cover else TOP
    blocks = [
        block(paragraph.strip("\n"), look_up, used)
        for paragraph in re.split(r"\n\s*\n", body)
        if paragraph.strip()
    ]
    room = BOTTOM - top - GAP * (len(blocks) - 1) - sum(height or 0 for height, _ in blocks)
    free = sum(height is None for height, _ in blocks)
    if room < 2.5 * free or text_width(title, size, bold=True) > INNER:
        raise ToolError(
            f"{title}: it takes {max(2.5 * free - room, 0):.1f} inches too many, "
            "or its title is too long"
        )
    box = shapes.title
    box.left, box.top, box.width, box.height = map(Inches, (MARGIN, top - 1.15, INNER, 0.9))
    box.text_frame.margin_left, box.text_frame.vertical_anchor = 0, MSO_ANCHOR.BOTTOM
    put(box.text_frame, [title], size, ACCENT, bold=True)
    for height, draw in blocks:
        draw(shapes, top, height or room / free)
        top += (height or room / free) + GAP
    if not cover:
        text_box(
            shapes,
            BOTTOM + 0.05,
            0.35,
            [str(number)],
            size=SMALL,
            color=GREYS[1],
            align=PP_ALIGN.RIGHT,
        )
    said = [
        " ".join(look_up(paragraph).split())
        for paragraph in re.split(r"\n(?=Show:)|\n\s*\n", notes)
    ]
    said += [f"Figures: {origin(name)}" for name in used]
    page.notes_slide.notes_text_frame.text = "\n".join(filter(None, said))


def build(path: Path):
    """The presentation that a deck's Markdown and today's results make."""
    deck = Presentation()
    deck.slide_width, deck.slide_height = Inches(WIDTH), Inches(HEIGHT)
    _, *slides = re.split(r"^##? ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for number, text in enumerate(slides, 1):
        try:
            add_slide(deck, text, number)
        except ToolError as error:
            raise ToolError(f"{path.name}, slide {number}: {error}", error.status) from error
    about = deck.core_properties
    about.title, about.author, about.last_modified_by = slides[0].partition("\n")[0], "", ""
    return deck


def build_all(sources: Path, output: Path) -> int:
    """Build every deck; returns the exit status."""
    for path in sorted(sources.glob("*.md")):
        deck = build(path)
        write_file(output / f"{path.stem}.pptx", deck.save)
        print(f"{path.stem}.pptx: {len(deck.slides)} slides")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser, here = documented_parser(PROG, __doc__), Path(__file__).parent
    parser.add_argument(
        "--output", type=Path, default=here, metavar="DIR", help="(default: beside the Markdown)"
    )
    args = parser.parse_args(argv)
    return run_tool(PROG, lambda: build_all(here, args.output))


if __name__ == "__main__":
    sys.exit(main())

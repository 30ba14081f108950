#!/usr/bin/env python3
"""Build the slide decks: NAME.pptx beside each NAME.md.

A deck is a `# title` with a line below it, and slides: `## a sentence`, blocks, and notes. A line
`[V2]` names the versions that the strip at the bottom shows, from this slide on. Notes are
paragraphs that begin with `Say:`, `Ask:` or `Expect:` (the wrong answer).
Blocks are paragraphs, lists, Markdown tables, and what is named, not typed, so that it cannot go
stale:

  {llama: small, bf16: V4, ms}                   a cell of a table: its source, row and column
  {results/cpu/counts.json: rows.0.per_step: d}  a value in a result file: keys, and a format
  ![rows](../docs/figures/triton_grid.svg)       a view of a figure; `slide`, if none is named
  ```columns SOURCE   a chart of rows and columns of a table
  rows: small, bf16; medium, bf16
  columns: tiny_llama = size; V1, ms = V1; V4, ms = V4
  ```                 a name may be cut short where clear, and is replaced by what follows `=`
  ```code             a function of at most nine lines, without its docstring and comments
  tiny_llama_v1.py Trainer.capture
  ```
  ```sh               commands, as they stand

A source is a table that dev/bench/versions.py prints from results/h100, or `kernels`. The same
sources give the same bytes.

Example:
  python slides/build.py
"""

import datetime
import io
import keyword
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

from pptx import Presentation
from pptx.chart.data import CategoryChartData
from pptx.dml.color import RGBColor
from pptx.enum.chart import XL_CHART_TYPE, XL_LEGEND_POSITION
from pptx.enum.text import MSO_ANCHOR, PP_ALIGN
from pptx.oxml.ns import qn
from pptx.util import Inches, Pt

from dev import sheet
from fusion_lab.cli import ToolError, documented_parser, program
from fusion_lab.files import ROOT, write_file
from slides.lookup import FIGURE, as_cells, cut, figure, origin, select

PROG, HERE = Path(__file__).name, Path(__file__).parent

# inches; from TOP to BOTTOM is the body, below it the strip
WIDTH, HEIGHT, MARGIN, TOP, BOTTOM, GAP = 13.333, 7.5, 0.6, 1.15, 6.88, 0.2
INNER = WIDTH - 2 * MARGIN
STRIP = 7.06  # a legend at the foot of a picture stays apart from it
TITLE, TEXT, SMALL = 30, 22, 18  # points; nothing is smaller
CODE_LINES = 9
FONT, CODE_FONT = "Arial", "Courier New"
EPOCH = datetime.datetime(2000, 1, 1)  # of every deck, so that its bytes do not depend on the day


def color(name: str) -> RGBColor:
    """#rrggbb as python-pptx has it."""
    return RGBColor.from_string(name[1:].upper())


INK, GREY, PALE, WHITE, BLUE = (
    color(getattr(sheet, name)) for name in ("INK", "GREY", "PALE", "WHITE", "BLUE")
)
SERIES = {version: color(name) for version, name in sheet.VERSION.items()}
OTHERS = color(sheet.ORANGE), color(sheet.GREEN)  # of what is no version
SVG = "http://www.w3.org/2000/svg"
STORY = {"V1": "baseline", "V2": "PyTorch's fusions", "V3": "Triton kernels", "V4": "what is left"}
MARKED = re.compile(r"(`[^`]+`|\*\*[^*]+\*\*)")
PICTURE = re.compile(r"!\[(?P<view>\w*)\]\(\.\./docs/figures/(?P<name>\w+)\.svg\)")
NOTE = re.compile(r"^(?=(?:Say|Ask|Expect): )", re.MULTILINE)
CODE = re.compile(r"(?P<text>\"[^\"]*\"|'[^']*')|(?P<word>@?[A-Za-z_][\w.]*)|.")
# its height in inches, None for what is left; draws it at a top, this high
Block = tuple[float | None, Callable]


def put(
    frame, lines: Sequence[str], size=TEXT, ink=INK, bold=False, align=PP_ALIGN.LEFT, dot=""
) -> None:
    """Write paragraphs into a text frame;

    `code` and **bold** look so, and each begins with the dot if there is one.
    """
    frame.word_wrap = True
    for number, line in enumerate(lines):
        paragraph = frame.paragraphs[0] if number == 0 else frame.add_paragraph()
        paragraph.alignment, paragraph.space_after = align, Pt(8 if size == TEXT else 0)
        if dot:
            properties = paragraph._p.get_or_add_pPr()
            properties.attrib.update({"marL": str(Inches(0.35)), "indent": str(-Inches(0.35))})
            properties.append(properties.makeelement(qn("a:buChar"), {"char": dot}))
        for piece in filter(None, MARKED.split(line)):
            mark = piece[:1] if MARKED.fullmatch(piece) else ""
            words = piece.strip("`*") if mark else piece
            font = CODE_FONT if mark == "`" else FONT
            style(paragraph, words, size, ink, font, bold or mark == "*")


def style(paragraph, words: str, size: float, ink: RGBColor, font: str, bold: bool) -> None:
    """Add words that look the same to a paragraph."""
    run = paragraph.add_run()
    run.text, run.font.name, run.font.size = words, font, Pt(size)
    run.font.color.rgb, run.font.bold = ink, bold


def text_box(shapes, top: float, height: float, left: float = MARGIN, width: float = INNER):
    """The frame of a text, without margins; inches."""
    frame = shapes.add_textbox(*map(Inches, (left, top, width, height))).text_frame
    frame.margin_left = frame.margin_right = frame.margin_top = frame.margin_bottom = 0
    return frame


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Inches that a line of text takes, a little more than less."""
    code, rest = "".join(re.findall("`([^`]+)`", text)), re.sub("`[^`]+`", "", text)
    wide, digits = (len(re.findall(letters, rest)) for letters in ("[A-Z]", "[0-9]"))
    ems = 0.61 * len(code) + (0.53 if bold else 0.49) * len(rest) + 0.2 * wide + 0.07 * digits
    return ems * size / 72


def bullets(text: str) -> Block:
    """A list, or a paragraph where no line begins with a dash."""
    items = [" ".join(item.split()) for item in re.split(r"^- ", text, flags=re.MULTILINE)]
    items, dot = [item for item in items if item], "•" if text[0] == "-" else ""
    rows = sum(1 + int(text_width(item, TEXT) / (INNER - 0.35)) for item in items)

    def draw(shapes, top: float, height: float) -> None:
        put(text_box(shapes, top, height), items, dot=dot)

    return rows * 0.37 + len(items) * 0.11, draw


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
    widths = [width + (INNER - sum(least)) / len(least) for width in least]
    numbers = [
        j and all(re.fullmatch(r"(-?[\d.]+( ?[x%])?)?", t) for t in column[1:])
        for j, column in enumerate(columns)
    ]

    def draw(shapes, top: float, height: float) -> None:
        area = (MARGIN, top, sum(widths), height)
        table = shapes.add_table(len(cells), len(widths), *map(Inches, area)).table
        for (i, line), (j, width) in product(enumerate(cells), enumerate(widths)):
            table.columns[j].width, cell = Inches(width), table.cell(i, j)
            align = PP_ALIGN.RIGHT if numbers[j] else PP_ALIGN.LEFT
            cell.vertical_anchor = MSO_ANCHOR.MIDDLE
            cell.fill.solid()
            cell.fill.fore_color.rgb = BLUE if i == 0 else WHITE if i % 2 else PALE
            put(cell.text_frame, [line[j]], size, INK if i else WHITE, bold=i == 0, align=align)

    return (1.2 * size / 72 + 0.26) * len(cells), draw


def chart(cells: list[list[str]]) -> Block:
    """Columns for each row, one for each of the table's, with their values in three digits."""
    for label, *_ in cells[1:]:
        if text_width(label, SMALL) > INNER / len(cells[1:]):
            raise ToolError(f"{label}: it is too long below its columns")
    values = [[re.match(r"([\d.]+)(.*)", text) for text in line[1:]] for line in cells[1:]]
    number, unit = values[0][0].groups()
    form = re.sub(r"^0+", "0", re.sub(r"\d", "0", number)) + (unit and f'"{unit}"')
    form = "[>=100]0;[>=10]0.0;0.00" if form == "0.00" else form
    data = CategoryChartData(number_format=form)
    data.categories = [line[0] for line in cells[1:]]
    for name, *column in zip(cells[0][1:], *values, strict=True):
        data.add_series(name, [found and float(found[1]) for found in column])

    def draw(shapes, top: float, height: float) -> None:
        place = map(Inches, (MARGIN, top, INNER, height))
        drawn = shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, *place, data).chart
        plot = drawn.plots[0]
        drawn.has_title, drawn.has_legend = False, len(plot.series) > 1
        drawn.font.name, drawn.font.size, drawn.font.color.rgb = FONT, Pt(SMALL), INK
        if drawn.has_legend:
            drawn.legend.position, drawn.legend.include_in_layout = XL_LEGEND_POSITION.TOP, False
        drawn.category_axis.format.line.color.rgb = GREY
        drawn.value_axis.visible = drawn.value_axis.has_major_gridlines = False
        drawn.value_axis.minimum_scale = 0
        plot.gap_width, plot.overlap, plot.has_data_labels = 50, -5, True
        plot.data_labels.number_format, plot.data_labels.number_format_is_linked = form, False
        for i, series in enumerate(plot.series):
            series.format.fill.solid()
            series.format.fill.fore_color.rgb = SERIES.get(series.name[:2]) or OTHERS[i]

    return None, draw


@cache
def picture(name: str, view: str) -> tuple[bytes, float, float, str]:
    """A view of a figure: PNG, width and height in inches where its smallest text has 18 points,
    and its words."""
    import resvg_py
    from matplotlib import get_data_path
    from PIL import Image

    path = ROOT / f"docs/figures/{name}.svg"
    if not path.exists():
        raise ToolError(f"no figure is called {name}")
    ElementTree.register_namespace("", SVG)
    svg = ElementTree.parse(path).getroot()
    views = {each.get("id"): each.get("viewBox") for each in svg.iter(f"{{{SVG}}}view")}
    if view not in views:
        raise ToolError(f"{name} has no view {view}, only: {', '.join(views)}")
    _, _, width, height = views[view].split()
    svg.attrib |= {"viewBox": views[view], "width": width, "height": height}
    fonts = {"skip_system_fonts": True, "font_dirs": [f"{get_data_path()}/fonts/ttf"]}
    text = ElementTree.tostring(svg, encoding="unicode")
    png = resvg_py.svg_to_bytes(svg_string=text, zoom=2, **fonts)
    with Image.open(io.BytesIO(png)) as whole, io.BytesIO() as small:
        whole.convert("RGB").quantize(64).save(small, "PNG", optimize=True)
        png = small.getvalue()
    words = " ".join(text.text for text in svg.iter(f"{{{SVG}}}text"))
    return png, float(width) / 72, float(height) / 72, words


def drawing(name: str, view: str) -> Block:
    """A figure, as large as there is room; its text may not fall below 18 points."""
    png, width, height, said = picture(name, view)

    def draw(shapes, top: float, room: float) -> None:
        scale = min(INNER / width, room / height)
        if scale < 0.995:
            raise ToolError(f"{name}: its text would have {SMALL * scale:.1f} points")
        left, down = (WIDTH - scale * width) / 2, (room - scale * height) / 2
        place = map(Inches, (left, top + down, scale * width, scale * height))
        shape = shapes.add_picture(io.BytesIO(png), *place)
        properties = shape._element.nvPicPr.cNvPr
        properties.set("name", f"{name} {view}")
        properties.set("descr", said)

    return None, draw


def code(lines: Sequence[str], place: str = "") -> Block:
    """Lines of code, below where they are from."""
    widest = max(map(len, lines))
    sizes = (24, 22, 20, SMALL) if len(lines) < 5 else (SMALL,)
    size = next((s for s in sizes if (widest + 1) * 0.6 * s / 72 < INNER - 0.3), 0)
    if not size or len(lines) > CODE_LINES:
        raise ToolError(f"a piece of code has more than {CODE_LINES} lines, or one of {widest}")
    above, tall = 0.38 if place else 0, 1.18 * size / 72 * len(lines) + 0.2

    def draw(shapes, top: float, height: float) -> None:
        if place:
            put(text_box(shapes, top, 0.34), [place], size=SMALL, ink=GREY)
        frame = text_box(shapes, top + above, tall)
        frame.word_wrap = True
        frame.margin_left, frame.margin_top = Inches(0.15), Inches(0.1)
        frame._parent.fill.solid()
        frame._parent.fill.fore_color.rgb = PALE
        for number, line in enumerate(lines):
            highlight(frame.add_paragraph() if number else frame.paragraphs[0], line, size)

    return above + tall, draw


def highlight(paragraph, line: str, size: float) -> None:
    """A line of Python in colours."""
    red, green = color(sheet.RED), color("#00664a")
    for match in CODE.finditer(line):
        word = match["word"] or ""
        ink, bold = INK, False
        if keyword.iskeyword(word) or word.startswith("@"):
            ink, bold = BLUE, True
        elif match["text"]:
            ink = green
        elif word.startswith(("tl.", "torch.", "F.")):
            ink = red
        style(paragraph, match[0], size, ink, CODE_FONT, bold)


def block(paragraph: str, look_up: Callable[..., str], used: dict) -> Block:
    """What a paragraph of a slide becomes; adds the sources of its figures to those used."""
    if found := PICTURE.fullmatch(paragraph):
        used[f"docs/figures/{found['name']}.svg"] = None
        return drawing(found["name"], found["view"] or "slide")
    if not paragraph.startswith("```"):
        text = look_up(paragraph)
        return grid(as_cells(text)) if text.startswith("|") else bullets(text)
    first, *lines, _ = paragraph.splitlines()
    kind, _, source = first.strip("`").partition(" ")
    if kind == "sh":
        return code(lines)
    if kind == "code":
        return code(cut(lines[0]), lines[0].replace(" ", ", "))
    used[source] = None
    if kind != "columns":
        raise ToolError(f"no block is called {kind!r}")
    parts = (line.partition(": ") for line in lines)
    wanted = {key: [name.split(" = ") for name in names.split("; ")] for key, _, names in parts}
    rows, columns = wanted.get("rows", []), wanted["columns"]
    cells = select(source, [name[0] for name in rows], [name[0] for name in columns])
    for line, name in zip(cells, rows, strict=False):
        line[0] = name[-1]
    cells.insert(0, [name[-1] for name in columns])
    return chart(cells)


def strip(shapes, stage: Sequence[str], number: int) -> None:
    """The story from V1 to V4 at the bottom; what this slide is about is filled."""
    left = MARGIN
    for (name, words), fill in zip(STORY.items(), SERIES.values(), strict=True):
        here = name in stage
        text = f"{name} {words}" if here else name
        width = text_width(text, SMALL, bold=True) + 0.2
        frame = text_box(shapes, STRIP, 0.34, left, width)
        frame._parent.fill.solid()
        frame._parent.fill.fore_color.rgb = fill if here else PALE
        frame.word_wrap = False
        put(frame, [text], SMALL, INK if name == "V2" or not here else WHITE, True, PP_ALIGN.CENTER)
        left += width + 0.15
    frame = text_box(shapes, STRIP, 0.34, WIDTH - MARGIN - 1, 1)
    put(frame, [str(number)], SMALL, GREY, align=PP_ALIGN.RIGHT)


def add_slide(deck, text: str, number: int, stage: list[str]) -> list[str]:
    """Put a slide into the deck, ToolError if there is too much on it; returns the versions of its
    strip."""
    used: dict[str, None] = {}  # sources, in their order

    def look_up(text: str) -> str:
        used.update(dict.fromkeys(match[1] for match in FIGURE.finditer(text)))
        return FIGURE.sub(lambda match: figure(*match.groups()), text)

    # only a title is on it
    shapes, cover = (page := deck.slides.add_slide(deck.slide_layouts[5])).shapes, number == 1
    title, _, rest = text.partition("\n")
    if found := re.match(r"\n*\[([V\d ]*)\]\n", rest):
        stage, rest = found[1].split(), rest[found.end() :]
    body, *notes = NOTE.split(rest)
    title, size, top = look_up(title), 40 if cover else TITLE, TOP + 0.3 * cover
    if text_width(title, size, bold=True) > INNER:
        raise ToolError(f"{title}: it is too long for one line")
    paragraphs = [paragraph.strip("\n") for paragraph in re.split(r"\n\s*\n", body)]
    blocks = [block(paragraph, look_up, used) for paragraph in paragraphs if paragraph.strip()]
    room = BOTTOM - top - GAP * (len(blocks) - 1) - sum(height or 0 for height, _ in blocks)
    free = sum(height is None for height, _ in blocks)
    if room < 2.2 * free:
        raise ToolError(f"{title}: it takes {2.2 * free - room:.1f} inches too many")
    box = shapes.title
    box.left, box.top, box.width, box.height = map(Inches, (MARGIN, top - 0.9, INNER, 0.75))
    frame = box.text_frame
    frame.margin_left = frame.margin_right = frame.margin_top = frame.margin_bottom = 0
    frame.vertical_anchor = MSO_ANCHOR.MIDDLE
    put(frame, [title], size, bold=True)
    between = GAP if free else GAP + min(room / (len(blocks) + 1), 0.8)
    top += 0 if free else between - GAP
    for height, draw in blocks:
        draw(shapes, top, height or room / free)
        top += (height or room / free) + between
    strip(shapes, stage, number)
    said = [" ".join(look_up(note).split()) for note in notes]
    said += [f"Figures: {origin(name)}" for name in used]
    page.notes_slide.notes_text_frame.text = "\n".join(said)
    return stage


def build(path: Path):
    """The presentation that a deck's Markdown and today's results make."""
    deck, stage = Presentation(), []
    deck.slide_width, deck.slide_height = Inches(WIDTH), Inches(HEIGHT)
    _, *slides = re.split(r"^##? ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for number, text in enumerate(slides, 1):
        try:
            stage = add_slide(deck, text, number, stage)
        except ToolError as error:
            raise ToolError(f"{path.name}, slide {number}: {error}", error.status) from error
    about = deck.core_properties
    about.title, about.author, about.last_modified_by = slides[0].partition("\n")[0], "", ""
    about.created = about.modified = EPOCH
    return deck


def timeless(packed: bytes) -> bytes:
    """The same archive without the time it was made, nor that of the workbooks in it."""
    with zipfile.ZipFile(io.BytesIO(packed)) as old, io.BytesIO() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                content = old.read(name)
                if name.endswith(".xlsx"):
                    content = timeless(content)
                elif name == "docProps/core.xml":
                    then = EPOCH.isoformat().encode() + b"Z"
                    content = re.sub(rb"\d{4}-\d\d-\d\dT[\d:]{8}Z", then, content)
                entry = zipfile.ZipInfo(name, (*EPOCH.timetuple()[:6],))
                entry.compress_type = zipfile.ZIP_DEFLATED
                new.writestr(entry, content)
        return file.getvalue()


def as_bytes(deck) -> bytes:
    """The file of a presentation, the same bytes each time."""
    with io.BytesIO() as file:
        deck.save(file)
        return timeless(file.getvalue())


def build_all(folder: Path) -> int:
    """Build every deck of a folder; returns the exit status."""
    for path in sorted(folder.glob("*.md")):
        deck = build(path)
        packed = as_bytes(deck)
        write_file(path.with_suffix(".pptx"), lambda file, packed=packed: file.write_bytes(packed))
        print(f"{path.stem}.pptx: {len(deck.slides)} slides")
    return 0


main = program(lambda: documented_parser(PROG, __doc__), lambda args: build_all(HERE))


if __name__ == "__main__":
    sys.exit(main())

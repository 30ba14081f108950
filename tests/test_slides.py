"""The slide decks: built from their Markdown and the results as they are now, and readable from
the back row."""

import ast
import io
import math
import re
import shlex
import zipfile
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT, load
from pptx import Presentation
from pptx.util import Inches

from lab.cli import run_tool
from slides import build
from slides.lookup import cut
from tools import agenda

DECKS = sorted((ROOT / "slides").glob("*.md"))


@pytest.fixture(scope="module", params=DECKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


@cache
def fresh(path: Path) -> bytes:
    """A deck as built now."""
    return build.as_bytes(build.build(path))


def said(packed: bytes) -> dict[str, bytes]:
    """The parts that hold words and places; a picture's words are with its place."""
    parts = re.compile(r"ppt/(slides|notesSlides|charts)/[^/]+\.xml")
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return {name: archive.read(name) for name in archive.namelist() if parts.fullmatch(name)}


def test_the_committed_deck_is_what_its_markdown_and_the_results_give(path):
    assert said(path.with_suffix(".pptx").read_bytes()) == said(fresh(path)), (
        "python slides/build.py"
    )


def test_a_deck_does_not_depend_on_the_day(path):
    def dates(packed: bytes) -> set:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            found = {entry.date_time for entry in archive.infolist()}
            about = archive.read("docProps/core.xml").decode()
            found |= {(int(year), 1, 1, 0, 0, 0) for year in re.findall(r">(\d{4})-\d\d-", about)}
            books = [name for name in archive.namelist() if name.endswith(".xlsx")]
            return found.union(*(dates(archive.read(book)) for book in books))

    assert dates(fresh(path)) == {(build.EPOCH.year, 1, 1, 0, 0, 0)}
    assert build.as_bytes(build.build(path)) == fresh(path)


def slides_of(path: Path) -> list:
    return [*Presentation(io.BytesIO(fresh(path))).slides]


def runs_of(frame) -> list:
    return [run for paragraph in frame.paragraphs for run in paragraph.runs]


def test_nothing_is_below_18_points(path):
    for slide in slides_of(path):
        frames = [shape.text_frame for shape in slide.shapes if shape.has_text_frame]
        for table in (shape.table for shape in slide.shapes if shape.has_table):
            frames += [cell.text_frame for cell in table.iter_cells()]
        sizes = [run.font.size.pt for frame in frames for run in runs_of(frame)]
        sizes += [shape.chart.font.size.pt for shape in slide.shapes if shape.has_chart]
        for shape in slide.shapes:
            if (
                shape.shape_type == 13
            ):  # a picture, whose smallest text has 18 points at 800 / 72 in
                sizes.append(18 * shape.width.inches / (800 / 72))
        assert min(sizes) >= 17.9, slide.shapes.title.text


def test_text_fits_its_box_and_boxes_fit_the_slide(path):
    for slide in slides_of(path):
        for shape in slide.shapes:
            assert shape.left >= 0 <= shape.top, slide.shapes.title.text
            assert shape.left + shape.width <= Inches(build.WIDTH)
            assert shape.top + shape.height <= Inches(build.HEIGHT)
            if not shape.has_text_frame:
                continue
            tall = 0.0
            for paragraph in shape.text_frame.paragraphs:
                size = max((run.font.size.pt for run in paragraph.runs), default=0)
                code = all(run.font.name == build.CODE_FONT for run in paragraph.runs)
                words = "".join(run.text for run in paragraph.runs)
                wide = 0.6 * len(words) * size / 72 if code else build.text_width(words, size)
                rows = math.ceil(wide / shape.width.inches) if size else 0
                assert rows <= 1 or not code, words  # code is never folded
                tall += rows * 1.15 * size / 72
            assert tall <= shape.height.inches + 0.02, shape.text_frame.text


def test_figures_carry_the_deck(path):
    """At least half the slides have a figure or chart, none an empty lower half; one table of five
    rows, nine lines of code at most."""
    slides, figures, tables = slides_of(path), 0, []
    for slide in slides:
        body = [s for s in slide.shapes if s.top.inches < 6.9 and s != slide.shapes.title]
        assert max(s.top + s.height for s in body) > Inches(5), slide.shapes.title.text
        figures += any(shape.has_chart or shape.shape_type == 13 for shape in slide.shapes)
        tables += [len(shape.table.rows) for shape in slide.shapes if shape.has_table]
        for frame in (shape.text_frame for shape in body if shape.has_text_frame):
            code = all(run.font.name == build.CODE_FONT for run in runs_of(frame))
            assert len(frame.paragraphs) <= 9 or not code
    assert figures >= len(slides) / 2
    assert len(tables) <= 1
    assert max(tables, default=0) <= 6  # with its header


def test_code_on_a_slide_is_a_whole_function():
    """So it runs where its file does."""
    places = [line for p in DECKS for line in re.findall(r"```code\n(.+)\n```", p.read_text())]
    assert len(places) > 3
    for place in places:
        (function,) = ast.parse("\n".join(cut(place))).body
        assert place.endswith(function.name)


def test_notes_say_ask_and_expect_and_the_story_is_on_each_slide(path):
    for slide in slides_of(path):
        notes = slide.notes_slide.notes_text_frame.text
        for kind in ("Say: ", "Ask: ", "Expect: "):
            assert kind in notes, slide.shapes.title.text
        words = {shape.text_frame.text[:2] for shape in slide.shapes if shape.has_text_frame}
        assert {"V1", "V2", "V3", "V4"} <= words


def test_commands_on_slides_and_in_notes_are_accepted(path):
    """Those of the version scripts by their parsers; of the others the program is there."""
    text = path.read_text()
    shown = re.findall(r"^Show: `(.*)`$", text, re.MULTILINE) + re.findall(
        r"```sh\n(.*?)```", text, re.DOTALL
    )
    for words in (
        shlex.split(line) for block in shown for line in block.replace("\\\n", " ").splitlines()
    ):
        program = words[words[0] in ("python", "bash")]
        assert words[0] in ("source", "diff") or (ROOT / program).is_file()
        if program.startswith("tiny_") and "--help" not in words:
            load(Path(program).stem).build_parser().parse_args(words[2:])


def test_the_sessions_on_a_slide_are_those_of_the_agenda():
    minutes = [
        sum(item.minutes for item in agenda.session(name)) for name in agenda.plan()["sessions"]
    ]
    assert minutes == [45, 60, 60, 45]
    shown = next(
        shape._element.nvPicPr.cNvPr.get("descr")
        for slide in slides_of(ROOT / "slides/workshop_overview.md")
        for shape in slide.shapes
        if shape.name == "sessions slide"
    )
    for name in agenda.plan()["sessions"]:
        title = name.removeprefix("Session ")
        spent = [item.minutes for item in agenda.session(name)]
        assert " ".join([title, *map(str, [*spent, sum(spent)])]) in shown


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "```code\ntiny_llama_v1.py SwiGLU.backward\n```",
            "tiny_llama_v1.py: no function SwiGLU.backward",
        ),
        ("```code\ntiny_llama_v1.py Trainer.compute\n```", "more than 9 lines"),
        ("- {llama: small, bf16: V9, ms}", "llama: no table there"),
        ("- {headline: tiny_llama, small, fp32: eager V1, MB}", "small, fp32 has no eager V1, MB"),
        (
            f"```columns share\nrows: GEMM = {'x' * 120}\ncolumns: share = x; tiny_llama_v1\n```",
            "too long below its columns",
        ),
        ("- {results/h100/none.json: rounds: d}", "none.json: No such file"),
        ("- {results/h100/fastest.json: turns: d}", "fastest.json: no turns"),
        ("![](../docs/figures/none.svg)", "no figure is called none"),
        ("![](../docs/figures/versions.svg)", "versions has no view slide"),
        ("![](../docs/figures/trunk.svg)\n\n- a\n- b\n- c", "its text would have"),
        ("\n".join(["- too long"] * 20), "inches too many"),
    ],
)
def test_what_is_not_there_is_one_clear_line(tmp_path, capsys, body, said):
    (tmp_path / "deck.md").write_text(f"# Deck\n\n## Slide\n\n{body}\n\nSay: nothing\n")
    assert run_tool(build.PROG, lambda: build.build_all(tmp_path)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("build.py: error: deck.md, slide 2: ")
    assert said in lines[0]
    assert not [*tmp_path.glob("*.pptx")]

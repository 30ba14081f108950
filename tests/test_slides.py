"""The slide decks: built from their Markdown and the results as they are now, and readable from
the back row."""

import io
import re
import zipfile
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT
from pptx import Presentation
from pptx.util import Inches

from exercises import run_sheet
from fusion_lab.cli import run_tool
from slides import build

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


def test_a_slide_is_read_from_the_back_row(path):
    """Nothing is below 18 points, boxes fit the slide (texts their boxes: build.py sees to it), and
    half the slides have a figure or chart; the story is on each, and notes say what to say."""
    slides, figures = [*Presentation(io.BytesIO(fresh(path))).slides], 0
    for slide in slides:
        title, frames, sizes = slide.shapes.title.text, [], []
        for shape in slide.shapes:
            assert shape.left >= 0 <= shape.top, title
            assert shape.left + shape.width <= Inches(build.WIDTH)
            assert shape.top + shape.height <= Inches(build.HEIGHT)
            picture = shape.shape_type == 13  # its smallest text has 18 points at 800 / 72 inches
            figures += shape.has_chart or picture
            if shape.has_text_frame:
                frames.append(shape.text_frame)
            elif shape.has_table:
                frames += [cell.text_frame for cell in shape.table.iter_cells()]
            elif shape.has_chart:
                sizes.append(shape.chart.font.size.pt)
            elif picture:
                sizes.append(18 * shape.width.inches / (800 / 72))
        runs = [run for frame in frames for part in frame.paragraphs for run in part.runs]
        assert min([*sizes, *(run.font.size.pt for run in runs)]) >= 17.9, title
        assert {"V1", "V2", "V3", "V4"} <= {frame.text[:2] for frame in frames}, title
        notes = slide.notes_slide.notes_text_frame.text
        assert not [kind for kind in ("Say: ", "Ask: ", "Expect: ") if kind not in notes], title
    assert figures >= len(slides) / 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("```code\ntiny_llama_v1.py SwiGLU.back\n```", "tiny_llama_v1.py: no function SwiGLU.back"),
        ("```code\ntiny_llama_v1.py Trainer.compute\n```", "more than 9 lines"),
        ("- {llama: small, bf16: V9, ms}", "llama: no table there"),
        ("- {results/h100/none.json: rounds: d}", "none.json: No such file"),
        ("![](../docs/figures/none.svg)", "no figure is called none"),
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


def test_each_demonstration_has_a_recording_of_the_same_commands():
    sessions = [
        block
        for block in run_sheet.parse_sheet((ROOT / "docs/INSTRUCTOR.md").read_text())
        if "Session" in block.exercise
    ]
    assert len({block.exercise for block in sessions}) == 4
    for block in sessions:
        version = re.search(r"Session (\d)", block.exercise)[1]
        device = "h100" if run_sheet.NEEDS_GPU in block.marks else "cpu"
        recorded = (ROOT / f"results/{device}/demonstrations/v{version}.txt").read_text()
        assert f"$ {block.text}" in recorded
        assert all(phrase in recorded for phrase in block.phrases)

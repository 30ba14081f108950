"""The slide decks: built from their Markdown and the results as they are now, and readable from
the back row."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, load
from pptx import Presentation

from slides import build
from workshop.cli import run_tool

DECKS = sorted((ROOT / "slides").glob("*.md"))


def texts(deck) -> list[list]:
    """Per slide what its shapes, tables, charts and notes say."""
    slides = []
    for slide in deck.slides:
        said = [shape.text_frame.text for shape in slide.shapes if shape.has_text_frame]
        for table in (shape.table for shape in slide.shapes if shape.has_table):
            said += [[cell.text for cell in row.cells] for row in table.rows]
        for plot in (shape.chart.plots[0] for shape in slide.shapes if shape.has_chart):
            said += [[*plot.categories], *([series.name, *series.values] for series in plot.series)]
        slides.append([*said, slide.notes_slide.notes_text_frame.text])
    return slides


@pytest.fixture(scope="module", params=DECKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


def test_the_committed_deck_says_what_its_markdown_and_the_results_give(path):
    assert texts(Presentation(path.with_suffix(".pptx"))) == texts(build.build(path)), (
        "python slides/build.py"
    )


def test_no_text_is_below_18_points_and_every_slide_has_notes(path):
    for slide in Presentation(path.with_suffix(".pptx")).slides:
        frames = [shape.text_frame for shape in slide.shapes if shape.has_text_frame]
        frames += [
            c.text_frame
            for shape in slide.shapes
            if shape.has_table
            for c in shape.table.iter_cells()
        ]
        sizes = [
            run.font.size
            for frame in frames
            for paragraph in frame.paragraphs
            for run in paragraph.runs
        ]
        sizes += [shape.chart.font.size for shape in slide.shapes if shape.has_chart]
        assert min(size.pt for size in sizes) >= 18
        assert slide.notes_slide.notes_text_frame.text


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


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "```code\ntiny_llama_v1.py SwiGLU.backward\n```",
            "tiny_llama_v1.py: no function SwiGLU.backward",
        ),
        (
            "```code\ntiny_llama_v1.py SwiGLU.forward: gate ... relu\n```",
            "no lines 'gate ... relu'",
        ),
        ("- {llama: small, bf16: V9, ms}", "llama: no table there"),
        ("- {headline: tiny_llama, small, fp32: eager V1, MB}", "small, fp32 has no eager V1, MB"),
        ("- {results/h100/none.json: rounds: d}", "none.json: No such file"),
        ("- {results/h100/fastest.json: turns: d}", "fastest.json: no turns"),
        ("\n".join(["- too long"] * 20), "inches too many"),
    ],
)
def test_what_is_not_there_is_one_clear_line(tmp_path, capsys, body, said):
    (tmp_path / "deck.md").write_text(f"# Deck\n\n## Slide\n\n{body}\n\nNotes: none\n")
    assert run_tool(build.PROG, lambda: build.build_all(tmp_path, tmp_path)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("build.py: error: deck.md, slide 2: ")
    assert said in lines[0]
    assert not [*tmp_path.glob("*.pptx")]

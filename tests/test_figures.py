"""The figures: what they show of results is in the results, and their text is large."""

import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from conftest import ROOT
from PIL import ImageFont

from dev import draw_figures as figures
from dev import sheet

SVG = "{http://www.w3.org/2000/svg}"
COMMITTED = sorted((ROOT / "docs/figures").glob("*.svg"))
FONTS = Path(matplotlib.get_data_path()) / "fonts/ttf"


def box_of(text: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text, in DejaVu Sans."""
    x, y, size = (float(text.get(key, sheet.BODY)) for key in ("x", "y", "font-size"))
    name = "DejaVuSans-Bold.ttf" if text.get("font-weight") == "bold" else "DejaVuSans.ttf"
    width = ImageFont.truetype(FONTS / name, 100).getlength(text.text) * size / 100
    left = x - width * {"middle": 0.5, "end": 1}.get(text.get("text-anchor"), 0)
    return left, y - 0.75 * size, left + width, y + 0.2 * size


@pytest.mark.parametrize("name", figures.FIGURE)
def test_drawn_again_a_figure_is_the_committed_one(name):
    committed = (ROOT / f"docs/figures/{name}.svg").read_text()
    assert str(figures.FIGURE[name]()) == committed, f"python dev/draw_figures.py {name}"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_text_is_large_inside_the_picture_beside_other_text_and_whole_in_each_cut(path):
    svg = ElementTree.parse(path).getroot()
    assert (svg.get("width"), svg.get("font-size")) == (str(sheet.WIDTH), str(sheet.BODY))
    texts = [text for text in svg.iter(f"{SVG}text") if not text.get("transform")]
    assert min(int(text.get("font-size", sheet.BODY)) for text in texts) >= sheet.SMALL
    views = [view.get("viewBox").split() for view in svg.iter(f"{SVG}view")]
    edges = [edge for _, y, _, high in views for edge in (float(y), float(y) + float(high))]
    boxes = [box_of(text) for text in texts]
    for i, (text, (left, top, right, bottom)) in enumerate(zip(texts, boxes, strict=True)):
        assert left >= 0 <= top, text.text
        assert right <= sheet.WIDTH, text.text
        assert bottom <= int(svg.get("height")), text.text
        assert not any(top < edge < bottom for edge in edges), text.text
        for other, (x0, y0, x1, y1) in zip(texts[:i], boxes, strict=False):
            apart = x1 <= left or right <= x0 or y1 <= top or bottom <= y0
            assert apart, (text.text, other.text)


def test_every_picture_is_on_a_page_or_a_slide():
    pages = [p for p in ROOT.rglob("*.md") if ".venv" not in p.parts]
    text = "\n".join(page.read_text() for page in pages)
    assert {path.name for path in COMMITTED} == set(re.findall(r"figures/(\w+\.svg)", text))

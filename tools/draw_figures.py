#!/usr/bin/env python3
"""Draws the figures of docs/figures: SVG for pages and, on request, PNG of the parts
that slides show.

Whatever number a figure shows is read from a file in results/, but for the sizes of memories, which
are the vendors'. A figure whose file is not there is left out, and named.

Examples:
  python tools/draw_figures.py                               all figures into docs/figures
  python tools/draw_figures.py add_relu attention --png      two of them, as PNG for slides too
  python tools/draw_figures.py --output /tmp/figures         elsewhere, to look at
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import io
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import matplotlib
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle
from matplotlib.transforms import Affine2D, Bbox
from PIL import Image

from lab.cli import Parser, ToolError, documented_parser, print_notes, program
from lab.files import ROOT
from lab.study import by_side
from lab.turns import ratios
from tools import agenda

PROG = Path(__file__).name
FIGURES = ROOT / "docs/figures"
H100 = ROOT / "results/h100"
TWO_H100 = ROOT / "results/h100x2"
CPU = ROOT / "results/cpu"

STYLE = {  # of the files
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "figures",  # the same file each time
    "font.family": "sans-serif",
    # Verdana, where the first is missing, is as wide
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "path.simplify": False,
}
WIDTH = 800  # of every figure; a unit is a pixel of the page, and a point of a font
HEADLINE = 56  # the height of its part of a figure
TITLE, BODY, SMALL = 26, 20, 18  # nothing is smaller, so half a page's width is enough

# Okabe and Ito's colours, which differ for colour-blind readers, too.
INK, GREY, FAINT, PALE, WHITE = "#1a1a1a", "#5f6368", "#a8adb2", "#ececec", "#ffffff"
BLUE, SKY, GREEN, ORANGE = "#0072b2", "#56b4e9", "#009e73", "#e69f00"
RED, PURPLE, PINK, BROWN = "#d55e00", "#aa4499", "#cc79a7", "#9a6a00"
VERSION = {"V1": "#8a8f94", "V2": SKY, "V3": BLUE, "V4": RED}


def tint(color: str, share: float = 0.25) -> str:
    """This share of the colour, the rest white."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (part - 255) * share):02x}" for part in parts)


def read(path: Path) -> dict:
    """A result file."""
    return json.loads(path.read_text())


def rows_of(study: str, **wanted: str) -> list[dict]:
    """The rows of a study on the H100 that have these values."""
    rows = read(H100 / f"{study}.json")["rows"]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def row_of(study: str, **wanted: str) -> dict:
    """The first of them."""
    return rows_of(study, **wanted)[0]


class Sheet:
    """A figure `WIDTH` wide with a headline; x goes right, y goes down, both in pixels."""

    def __init__(self, title: str, height: int):
        self.height = height
        self.cuts = {"": (HEADLINE, height)}  # for slides: name, from and to in pixels
        self.figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor=WHITE)
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")
        self.label(20, 30, title, size=TITLE, weight="bold")

    def cut(self, top: float, bottom: float, name: str = "") -> None:
        """Have this part of the figure for a slide, whose title takes the headline's place."""
        self.cuts[name] = top, bottom

    def note(self, y: float, words: str, x: float = 400, ha: str = "center") -> None:
        """Small words in grey."""
        self.text(x, y, words, SMALL, GREY, ha=ha)

    def text(
        self, x: float, y: float, words: str, size: int = BODY, color: str = INK, **more
    ) -> None:
        """Words around a point; `ha` and `va` say which side of them is there."""
        options = {"ha": "center", "linespacing": 1.3, **more}
        if "va" not in options:  # neighbours stand on one line, whatever their letters
            options["va"], y = ("center", y) if "\n" in words else ("baseline", y + 0.36 * size)
        self.axes.text(x, y, words, fontsize=size, color=color, **options)

    def label(
        self, x: float, y: float, words: str, size: int = BODY, color: str = INK, **more
    ) -> None:
        """Words that begin at a point."""
        self.text(x, y, words, size, color, ha="left", **more)

    def legend(
        self, y: float, places: Iterable[float], colors: dict[str, str], edge: str | None = None
    ) -> None:
        """A line of squares in these colours, each with its name; `places` are their left sides."""
        for x, (name, color) in zip(places, colors.items(), strict=True):
            self.box(x, y, 20, 20, color, edge=edge)
            self.label(x + 28, y + 10, name, SMALL)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = PALE,
        words: str = "",
        edge: str | None = INK,
        color: str = INK,
        size: int = BODY,
        weight: str = "normal",
        **more,
    ) -> None:
        """A rectangle from its upper left corner, with words in its middle."""
        options = {"facecolor": fill, "edgecolor": edge or "none", "linewidth": 1.5 if edge else 0}
        self.axes.add_patch(Rectangle((x, y), width, height, **{**options, **more}))
        if words:
            self.text(x + width / 2, y + height / 2, words, size, color, weight=weight)

    def arrow(self, *places: float, color: str = INK, width: float = 3) -> None:
        """From one point to another: x, y, x, y."""
        head = f"-|>,head_length={2.5 + 1.6 * width},head_width={1.5 + 1.0 * width}"
        options = {"arrowstyle": head, "mutation_scale": 1, "shrinkA": 0, "shrinkB": 0}
        style = {"color": color, "linewidth": width, "joinstyle": "miter"}
        self.axes.add_patch(FancyArrowPatch(places[:2], places[2:], **style, **options))

    def line(self, *places: float, color: str = GREY, width: float = 1.5, **more) -> None:
        """A straight line between two points: x, y, x, y."""
        options = {"solid_capstyle": "butt", "zorder": 1, **more}  # under what is drawn later
        self.axes.plot(places[::2], places[1::2], color=color, linewidth=width, **options)

    def png(self, name: str = "") -> bytes:
        """A cut of it, two pixels for each of the figure."""
        top, bottom = self.cuts[name]
        inches = Bbox([[0, 1 - bottom / self.height], [1, 1 - top / self.height]])
        inches = inches.transformed(Affine2D().scale(WIDTH / 72, self.height / 72))
        with matplotlib.rc_context(STYLE), io.BytesIO() as file:
            options = {"bbox_inches": inches, "metadata": {"Software": None}}
            self.figure.savefig(file, dpi=144, **options)
            with Image.open(file) as picture, io.BytesIO() as small:
                picture.convert("RGB").quantize(64).save(small, "PNG", optimize=True)
                return small.getvalue()

    def save(self, folder: Path, name: str, png: bool) -> list[Path]:
        """Write it as SVG, and its cuts as PNG; returns the paths."""
        paths = [folder / f"{name}.svg"]
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(paths[0], metadata={"Date": None, "Creator": None})
        for cut in self.cuts if png else ():
            paths.append(folder / f"{name}{cut and '_'}{cut}.png")
            paths[-1].write_bytes(self.png(cut))
        return paths


def where_numbers_live() -> Sheet:
    """Registers, shared memory, caches, HBM: sizes and rates of the two GPUs.

    Sources: NVIDIA H100 Tensor Core GPU Architecture (SXM5); ROCm's "AMD GPU specifications" and
    AMD's CDNA 3 white paper (MI300X).
    """
    copies = rows_of("build_a_fusion", what="forward", rows=512)[0]  # 25 MB stay in the cache
    rate = copies["bytes"] / float(np.median(copies["us"]["copy"])) / 1e6
    sheet = Sheet("Where numbers live", 510)
    levels = (
        ("registers", "256 KB each", "512 KB each", GREEN),
        ("shared memory, LDS", "228 KB each", "64 KB each", GREEN),
        ("L2 cache", f"50 MB, {rate:.1f} TB/s", "8 × 4 MB", SKY),
        ("Infinity Cache", "–", "256 MB, 17 TB/s", SKY),
        ("HBM", "80 GB, 3.35 TB/s", "192 GB, 5.3 TB/s", BLUE),
    )
    gpus = (465, "H100", "132 multiprocessors"), (685, "MI300X", "304 compute units")
    for x, name, units in gpus:
        sheet.text(x, 76, name, weight="bold")
        sheet.note(102, units, x)
    for index, (name, h100, mi300x, color) in enumerate(levels):
        y, half = 122 + 54 * index + (24 if index > 1 else 0), 108 + 11 * index
        sheet.box(185 - half, y, 2 * half, 46, tint(color, 0.35), name, edge=color)
        sheet.text(465, y + 23, h100)
        sheet.text(685, y + 23, mi300x)
    sheet.line(20, 238, 780, 238, color=INK, linestyle=(0, (4, 3)))
    sheet.label(20, 432, "Above the line a number is lost when its kernel ends.")
    sheet.label(20, 460, "What the next kernel needs goes through what is below.")
    sheet.note(492, "H100's L2 cache: a copy of 25 MB, measured; the rest: vendors", 20, "left")
    sheet.cut(60, 410)
    return sheet


def add_relu() -> Sheet:
    """relu(x + y) as two kernels and as one: what goes through memory, and how long it took."""
    rows = {row["what"]: row for row in rows_of("exercises_v3/add_relu")}
    one, two = rows["add_relu_kernel"], rows["PyTorch, x + y and relu"]
    size = one["bytes"] / 3  # of a vector
    sheet = Sheet("relu(x + y): the same numbers, fewer trips", 450)
    memory = 268
    for x, width in ((20, 425), (505, 275)):
        sheet.box(x, memory, width, 46, tint(BLUE, 0.35), "HBM", edge=BLUE, weight="bold")

    def kernel(x: float, width: float, name: str, reads: str, writes: str) -> None:
        sheet.box(x, 116, width, 56, tint(GREEN, 0.35), name, edge=GREEN)
        for i, vector in enumerate(reads + writes):
            place = x + width * (i + 1) / (len(reads + writes) + 1)
            ends, color = ((memory, 176), BLUE) if i < len(reads) else ((176, memory), RED)
            sheet.arrow(place, ends[0], place, ends[1], color=color, width=5)
            sheet.label(place + 9, 226, vector)

    sheet.text(232, 90, "two kernels", weight="bold")
    kernel(40, 190, "add", "xy", "t")
    kernel(255, 170, "relu", "t", "z")
    sheet.text(642, 90, "one kernel", weight="bold")
    kernel(547, 190, "add, relu", "xy", "z")
    for x, row in ((232, two), (642, one)):
        count = round(row["bytes"] / size)
        sheet.text(x, 344, f"{count} × 4 = {4 * count} bytes a number")
        sheet.text(x, 384, f"{row['us']:.0f} µs", size=TITLE, weight="bold")
    predicted, measured = (two[key] / one[key] for key in ("bytes", "us"))
    ratios = f"predicted {predicted:.2f}x, measured {measured:.2f}x"
    sheet.note(430, f"{ratios}  (H100, {size / 4e6:.0f} million numbers)")
    sheet.cut(70, 408)
    return sheet


def merged_gemms() -> Sheet:
    """q, k, v as one GEMM, gate and up as one: x is read once, the arithmetic stays."""
    sheet = Sheet("Merging GEMMs: x is read once", 560)
    for x, name in ((200, "apart"), (600, "merged")):
        sheet.text(x, 84, name, weight="bold")
    sheet.line(400, 76, 400, 470, color=PALE, width=3)

    def group(top: float, *parts: tuple[str, float]) -> None:
        height = sum(size for _, size in parts)
        middle = top + height / 2
        for left, apart in ((20, True), (420, False)):
            sheet.box(left, middle - 38, 60, 76, tint(BLUE, 0.3), "x", edge=BLUE, weight="bold")
            y = top
            for name, size in parts:
                gap, half = 8 if apart else 0, y + size / 2
                weight, result = tint(ORANGE, 0.45), tint(GREEN, 0.35)
                place = y + gap / 2
                sheet.box(left + 160, place, 95, size - gap, weight, f"W {name}", edge=ORANGE)
                sheet.box(left + 305, place, 50, size - gap, result, name, edge=GREEN)
                if apart:
                    start = middle + (half - middle) * 0.3
                    sheet.arrow(left + 64, start, left + 156, half, color=BLUE, width=4)
                    sheet.arrow(left + 259, half, left + 301, half, color=GREY)
                y += size
            if not apart:
                sheet.arrow(left + 64, middle, left + 156, middle, color=BLUE, width=7)
                sheet.arrow(left + 259, middle, left + 301, middle, color=GREY)
                sheet.box(left + 160, top, 95, height, "none", edge=INK, linewidth=3)

    group(112, ("q", 74), ("k", 46), ("v", 46))
    group(310, ("gate", 78), ("up", 78))
    sheet.label(20, 503, "saved:", weight="bold", color=BLUE)
    sheet.label(160, 503, "reading x again, a launch for each GEMM but one")
    sheet.label(20, 535, "not saved:", weight="bold", color=RED)
    sheet.label(160, 535, "arithmetic, weights, results")
    sheet.cut(70, 290, "qkv")
    sheet.cut(300, 560, "gate_up")
    return sheet


def attention() -> Sheet:
    """Flash attention: tiles of the scores on the chip, an online softmax, and what is kept."""
    peaks = {row["side"]: row["peak_mb"] / 1e3 for row in rows_of("memory", seq_len=2048)}
    sheet = Sheet("Attention without the matrix", 500)
    left, top, tile, count = 104, 140, 54, 5
    size = tile * count
    sheet.box(left, 86, size, 42, tint(BLUE, 0.3), edge=BLUE)
    sheet.box(46, top, 46, size, tint(BLUE, 0.3), edge=BLUE)
    sheet.box(left, top, size, size, WHITE, edge=GREY, linestyle=(0, (4, 3)))
    for i in range(1, count):
        sheet.line(left, top + i * tile, left + size, top + i * tile, color=PALE)
        sheet.line(left + i * tile, top, left + i * tile, top + size, color=PALE)
    y = top + 2 * tile
    sheet.box(46, y, 46, tile, BLUE, "q", edge=BLUE, color=WHITE, weight="bold")
    for i, fill in enumerate((tint(ORANGE, 0.25), tint(ORANGE, 0.25), ORANGE)):
        sheet.box(left + i * tile, y, tile, tile, fill, edge=ORANGE)
    sheet.box(left + 2 * tile, 86, tile, 42, BLUE, "k, v", edge=BLUE, color=WHITE, weight="bold")
    ends = left + 3 * tile + 8, y + tile / 2, left + 5 * tile - 4, y + tile / 2
    sheet.arrow(*ends, color=ORANGE, width=5)
    sheet.text(left + size / 2, top + size + 22, "S × S scores: never in memory", color=GREY)

    x = 416
    sheet.label(x, 106, "for each tile, on the chip", weight="bold", color=BROWN)
    steps = "scores = q · k", "new maximum? rescale the sums", "add exp(scores) and its v"
    for i, words in enumerate(steps):
        sheet.label(x, 142 + 34 * i, f"{i + 1}.  {words}")
    sheet.label(x, 270, "kept for the backward pass", weight="bold", color=BLUE)
    sheet.label(x, 306, "q, k, v and the result")
    sheet.label(x, 340, "one number per row of scores")
    sheet.label(x, 374, "the scores: computed again")
    gb = f"{peaks['scores']:.1f} GB → {peaks['flash']:.1f} GB"
    sheet.note(474, f"TinyLlama, 2048 tokens, peak memory on an H100: {gb}")
    sheet.cut(82, 446)
    return sheet


def triton_grid() -> Sheet:
    """Programs, blocks and masks, for vectors and for the rows of a matrix."""
    sheet = Sheet("A grid of programs", 500)
    colors = (SKY, ORANGE, GREEN, PINK, GREY)
    sheet.label(20, 84, "relu(x + y): 10 numbers, BLOCK = 4", weight="bold")

    def cell(x: float, y: float, width: float, height: float, of: int | None, words="") -> None:
        """A number of a program, or one that is masked."""
        if of is None:
            masked = {"hatch": "//", "linestyle": (0, (3, 2))}
            sheet.box(x, y, width, height, WHITE, edge=FAINT, **masked)
        else:
            sheet.box(x, y, width, height, tint(colors[of], 0.5), words)

    for i in range(12):
        x = 20 + 56 * i + 12 * (i // 4)
        cell(x, 132, 56, 56, i // 4 if i < 10 else None, str(i))
    for i in range(3):
        sheet.note(114, f"program {i}", 132 + 236 * i)
    sheet.arrow(662, 238, 662, 196, color=RED, width=4)
    sheet.text(780, 254, "mask = at < 10: do not touch", ha="right", color=RED)
    sheet.label(20, 254, "at = program × 4 + 0, 1, 2, 3")

    sheet.label(20, 308, "norm: a row each, 6 columns, BLOCK = 8", weight="bold")
    for r in range(4):
        y = 332 + 38 * r
        sheet.note(y + 17, f"program {r}", 112)
        for c in range(8):
            cell(180 + 48 * c, y, 48, 34, r if c < 6 else None)
    sheet.label(576, 372, "load the row once,\nadd up its squares,\nscale, store")
    sheet.label(576, 452, "masked: 0 in the sum", color=RED, size=SMALL)
    sheet.cut(100, 270, "vectors")
    sheet.cut(324, 488, "rows")
    return sheet


# V1's kernels: what each reads and writes
NORM = (("x²", "rw"), ("mean", "r"), ("× 1/√", "rw"), ("× w", "rw"))


def residual_norm() -> Sheet:
    """The residual addition and the norm: five kernels in V1, one in V3."""
    rows = {row["what"]: row for row in rows_of("exercises_v3/rms_norm")}
    formula, kernel = rows["the formula, as in V1"], rows["V3"]
    sheet = Sheet("Residual + norm: the sum stays in registers", 472)
    memory = 284
    for x, width in ((20, 450), (510, 270)):
        sheet.box(x, memory, width, 46, tint(BLUE, 0.35), "HBM", edge=BLUE, weight="bold")

    def arrow(x: float, kind: str, name: str = "") -> None:
        ends = (memory, 194) if kind == "r" else (194, memory)
        color = BLUE if kind == "r" else RED
        sheet.arrow(x, ends[0], x, ends[1], color=color, width=4)
        sheet.label(x + 8, 240, name)

    sheet.text(245, 84, "V1", weight="bold")
    sheet.box(30, 110, 150, 80, tint(GREEN, 0.35), "add", edge=GREEN)
    for x, kind, name in ((48, "r", "x"), (94, "r", "a"), (140, "w", "x'")):
        arrow(x, kind, name)
    for i, (name, kinds) in enumerate(NORM):
        x = 200 + 66 * i
        sheet.box(x, 110, 60, 80, tint(GREEN, 0.35), edge=GREEN)
        sheet.text(x + 30, 150, name, SMALL)
        for j, kind in enumerate(kinds):
            arrow(x + 30 + 28 * (j - (len(kinds) - 1) / 2), kind)
    sheet.text(645, 84, "V3", weight="bold")
    sheet.box(530, 110, 230, 80, tint(GREEN, 0.35), "add + norm", edge=GREEN)
    for x, kind, name in ((553, "r", "x"), (608, "r", "a"), (663, "w", "x'"), (718, "w", "n")):
        arrow(x, kind, name)
    passes = 3 + sum(len(kinds) for _, kinds in NORM)
    sheet.text(245, 358, f"{passes} trips to memory")
    sheet.text(645, 358, "4 trips")
    for x, row, trips in ((245, formula, passes - 3), (645, kernel, 2)):
        words = f"norm alone, {trips} trips: {row['us']:.0f} µs"
        sheet.text(x, 398, words, BODY, weight="bold")
    mb = kernel["bytes"] / 2e6
    sheet.note(446, f"an arrow is a tensor read or written; H100, {mb:.0f} MB each")
    sheet.cut(66, 420)
    return sheet


def evoformer_inputs() -> Sheet:
    """What an MSA, a pair representation and a triangle are."""
    sheet = Sheet("What the Evoformer works on", 460)
    sheet.text(140, 84, "MSA", weight="bold")
    family = ("MKVLAE", "MRVLSE", "MKILAD", "MKVMAE")
    fills = {
        "M": SKY,
        "K": ORANGE,
        "R": PINK,
        "V": GREEN,
        "I": "#f0e442",
        "L": BLUE,
        "A": GREY,
        "E": RED,
    }
    for r, sequence in enumerate(family):
        for c, letter in enumerate(sequence):
            fill = tint(fills.get(letter, PURPLE), 0.4)
            sheet.box(26 + 38 * c, 112 + 38 * r, 38, 38, fill, letter, edge=WHITE)
    sheet.text(140, 322, "one protein in four\nspecies, aligned:\na row each", SMALL, va="top")
    sheet.text(400, 84, "pair", weight="bold")
    n, cell, left, top = 6, 32, 304, 112
    chosen = {(1, 4): RED, (1, 2): BLUE, (4, 2): ORANGE}
    for r, c in itertools.product(range(n), range(n)):
        fill = chosen.get((r, c), tint(GREY, 0.12))
        sheet.box(left + cell * c, top + cell * r, cell, cell, fill, edge=WHITE)
    for (r, c), name in (((1, 4), "ij"), ((1, 2), "ik"), ((4, 2), "jk")):
        middle = left + cell * (c + 0.5), top + cell * (r + 0.5)
        sheet.text(*middle, name, SMALL, WHITE, weight="bold")
    words = "for every two residues\ni and j: a vector on\nhow they relate"
    sheet.text(400, 322, words, SMALL, va="top")
    sheet.text(660, 84, "triangle", weight="bold")
    corners = {"i": (560, 270), "j": (760, 270), "k": (660, 130)}
    for a, b, color in (("i", "j", RED), ("i", "k", BLUE), ("j", "k", ORANGE)):
        sheet.line(*corners[a], *corners[b], color=color, width=6)
    for name, (x, y) in corners.items():
        style = {"facecolor": WHITE, "edgecolor": INK, "linewidth": 2, "zorder": 5}
        sheet.axes.add_patch(Circle((x, y), 20, **style))
        sheet.text(x, y, name, weight="bold", zorder=6)
    words = "ij is updated from\nik and jk, for all k:\nwork grows as N³"
    sheet.text(660, 322, words, SMALL, va="top")
    words = "What mutates together often touches: the MSA feeds the pair."
    sheet.text(400, 430, words, weight="bold")
    sheet.cut(66, 405)
    return sheet


PARTS = (  # of the Evoformer block, in order: name, what it works on, fused in V2, fused in V3
    ("row attention", "MSA", "one GEMM, SDPA", "attention + bias + gate"),
    ("column attention", "MSA", "one GEMM, SDPA", "attention + gate"),
    ("transition", "MSA", "", "bias + ReLU"),
    ("outer product mean", "MSA → pair", "", "product without copies"),
    ("triangle ×, outgoing", "pair", "one GEMM", "norms + GEMMs + gates"),
    ("triangle ×, incoming", "pair", "one GEMM", "norms + GEMMs + gates"),
    ("triangle attention, start", "pair", "one GEMM, SDPA", "attention + bias + gate"),
    ("triangle attention, end", "pair", "one GEMM, SDPA", "attention + bias + gate"),
    ("transition", "pair", "", "bias + ReLU"),
)


def evoformer_block() -> Sheet:
    """The nine parts of a block in order, and what V2 and V3 fuse in each."""
    sheet = Sheet("The Evoformer block: nine parts, in order", 500)
    fills = {"MSA": ORANGE, "MSA → pair": PURPLE, "pair": SKY}
    pale = {place: tint(color, 0.45) for place, color in fills.items()}
    sheet.legend(70, (20, 105, 260), pale)
    for x, name in ((428, "V2"), (649, "V3")):
        sheet.text(x, 80, name, weight="bold")
    for i, (name, place, v2, v3) in enumerate(PARTS):
        y = 104 + 39 * i
        sheet.box(20, y, 306, 34, pale[place], edge=None)
        sheet.label(32, y + 17, f"{i + 1}  {name}", SMALL)
        for x, width, words, color in ((340, 176, v2, GREEN), (528, 252, v3, BLUE)):
            fill = tint(color, 0.3) if words else tint(GREY, 0.06)
            sheet.box(x, y, width, 34, fill, words, edge=None, size=SMALL)
    sheet.note(478, "V3 also makes every layer norm one kernel")
    sheet.cut(66, 453)
    return sheet


def order_of_sums() -> Sheet:
    """The same three float32 numbers in two orders: each addition rounds."""
    sheet = Sheet("The same numbers, two orders, two sums", 330)
    orders = ((20, ("100000000", "1", "-100000000")), (420, ("100000000", "-100000000", "1")))
    for left, (first, second, third) in orders:
        partial = np.float32(first) + np.float32(second)
        total = partial + np.float32(third)
        sheet.box(left, 70, 165, 46, tint(BLUE, 0.3), first, edge=BLUE)
        sheet.box(left + 195, 70, 165, 46, tint(BLUE, 0.3), second, edge=BLUE)
        for x in (left + 82, left + 277):
            sheet.arrow(x, 120, left + 108 + (x - left - 108) * 0.3, 150)
        sheet.box(left + 25, 154, 165, 46, tint(ORANGE, 0.3), f"{partial:.0f}", edge=ORANGE)
        sheet.label(left + 202, 177, f"then {third}")
        sheet.arrow(left + 108, 204, left + 108, 234)
        sheet.box(left + 25, 238, 165, 46, tint(GREEN, 0.3), f"{total:.0f}", edge=GREEN)
    sheet.line(400, 62, 400, 290, color=PALE, width=3)
    sheet.note(312, "float32 has 24 bits: 100000001 does not fit, so the 1 is rounded away")
    return sheet


def bias_gradient() -> Sheet:
    """Where programs of different rows add up the gradient of one bias."""
    sheet = Sheet("Many rows, one gradient: where to add up?", 420)
    ways = (
        (20, "kept", "a place for each row,\nthen one more kernel", 6),
        (290, "atomic", "one place; who comes\nfirst changes the bits", 1),
        (560, "V3", "sums in registers, then\na place for each group", 2),
    )
    for left, name, words, places in ways:
        sheet.text(left + 110, 76, name, weight="bold")
        for row in range(6):
            y = 105 + 38 * row
            sheet.box(left, y, 80, 30, tint(BLUE, 0.3), f"row {row + 1}", edge=BLUE)
            place = 105 + 228 * (row * places // 6 + 0.5) / places - 4
            color = RED if places == 1 else INK
            sheet.arrow(left + 83, y + 15, left + 137, place, color=color, width=2)
        for number in range(places):
            size = 228 / places - 8
            words_of = "" if places == 6 else "sum"
            y = 105 + 228 * number / places
            sheet.box(left + 140, y, 80, size, tint(ORANGE, 0.35), words_of, edge=ORANGE)
        sheet.text(left + 110, 368, words)
    return sheet


def two_streams() -> Sheet:
    """V4's backward pass: gradients of activations as a chain, weights and updates beside."""
    study = "ablation_tiny_llama_v4"
    without = row_of(study, shape="tiny_llama, small", side="all but overlap")
    same = row_of(study, shape=without["shape"], side="all", group=without["group"])
    sheet = Sheet("V4's backward pass: only the chain must wait", 470)
    layers = (8, 7, 6, 5)
    chain, rest, height = 72, 58, 52

    def box(x: float, y: float, kind: str, layer: int) -> None:
        color, width = {"dx": (BLUE, chain), "dW": (ORANGE, rest), "upd": (PURPLE, rest)}[kind]
        sheet.box(x, y, width, height, tint(color, 0.45), f"{kind}{layer}", edge=color, size=SMALL)

    sheet.label(20, 92, "one stream", weight="bold")
    x = 20
    for layer in layers:
        for kind, width in (("dx", chain), ("dW", rest)):
            box(x, 112, kind, layer)
            x += width
    for layer in layers:
        box(x, 112, "upd", layer)
        x += rest
    end = x
    sheet.label(20, 208, "two streams", weight="bold")
    x = 20
    for layer in layers:
        box(x, 228, "dx", layer)
        x += chain
    x = 20 + chain
    for i, layer in enumerate(layers):
        start = max(x, 20 + chain * (i + 1))
        sheet.arrow(20 + chain * (i + 1) - 10, 280, start + 14, 306, color=GREY, width=2)
        for kind in ("dW", "upd"):
            box(start, 308, kind, layer)
            start += rest
        x = start
    sheet.line(x, 228, x, 372, color=INK, linestyle=(0, (4, 3)))
    sheet.line(end, 112, end, 372, color=INK, linestyle=(0, (4, 3)))
    sheet.arrow(end - 4, 340, x + 6, 340, color=GREEN, width=4)
    sheet.label(20, 402, "dx: activations", color=BLUE, weight="bold")
    sheet.label(250, 402, "dW: weights", color=BROWN, weight="bold")
    sheet.label(440, 402, "upd: AdamW", color=PURPLE, weight="bold")
    times = f"{without['batch_ms']:.2f} → {same['batch_ms']:.2f} ms"
    words = f"lengths are a sketch; measured: {times} a step (small TinyLlama V4, bf16)"
    sheet.note(442, words, 20, "left")
    sheet.cut(76, 420)
    return sheet


def plot(sheet: Sheet, x: float, y: float, width: float, height: float, **settings) -> Axes:
    """Axes inside the figure, whose plotting area has this corner and size in pixels."""
    place = (x / WIDTH, 1 - (y + height) / sheet.height, width / WIDTH, height / sheet.height)
    axes = sheet.figure.add_axes(place)
    axes.set(**settings)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL, length=5, colors=INK)
    axes.tick_params(which="minor", length=0)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(fontsize=SMALL, color=INK)
    return axes


Point = tuple[float, float]  # under a roofline: FLOP per byte, TFLOP/s


def under_the_roof(run: dict, arrows: dict[str, tuple]) -> Sheet:
    """The roofline of a run, with a path for each name: places by version, colour, its name's."""
    sheet = Sheet("The roofline that moves", 500)
    ceilings = run["ceilings"]
    device = run["environment"]["device_name"].partition("GB")[0].rpartition(" ")[0]
    tflops, rate = ceilings["gemm_tflops"], ceilings["copy_gb_per_s"] / 1e3
    points = [point for places, *_ in arrows.values() for point in places]
    left, right = min(x for x, _ in points) / 2.3, 3.8 * tflops / rate
    bottom, top = min(y for _, y in points) / 1.75, 1.4 * tflops
    axes = plot(sheet, 96, 84, 660, 298, xscale="log", yscale="log")
    axes.set(xlim=(left, right), ylim=(bottom, top), xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.plot([left, tflops / rate, right], [left * rate, tflops, tflops], color=INK, linewidth=3)
    axes.text(0.95 * right, tflops * 1.1, "arithmetic", fontsize=SMALL, ha="right", color=INK)
    start, end = axes.transData.transform([(left, left * rate), (tflops / rate, tflops)])
    angle = math.degrees(math.atan2(end[1] - start[1], end[0] - start[0]))
    along = {"rotation": angle, "rotation_mode": "anchor", "ha": "center", "va": "bottom"}
    seen = max(left, bottom / rate)  # where the line comes in
    middle = (seen * tflops / rate) ** 0.5 * 0.85
    axes.text(middle, middle * rate * 1.05, "memory", fontsize=SMALL, color=INK, **along)
    for name, (places, color, offset) in arrows.items():
        head = {"arrowstyle": "-|>,head_length=0.7,head_width=0.35", "shrinkA": 7, "shrinkB": 7}
        for before, after in itertools.pairwise(places):
            axes.annotate("", after, before, arrowprops={"color": color, "linewidth": 2.5, **head})
        style = {"markeredgecolor": color, "markeredgewidth": 3, "linestyle": "none"}
        for i, (x, y) in enumerate(places):
            size, fill = (14, color if i else WHITE) if i in (0, len(places) - 1) else (7, color)
            axes.plot(x, y, "o", markersize=size, markerfacecolor=fill, **style)
        label = {"fontsize": SMALL, "color": color, "va": "center", "weight": "bold"}
        axes.annotate(name, places[-1], xytext=offset, textcoords="offset points", **label)
    for axis, low, high in ((axes.xaxis, left, right), (axes.yaxis, bottom, top)):
        digits = (1, 2, 5) if high < 150 * low else (1,)
        marks = [digit * 10.0**power for power in range(-4, 5) for digit in digits]
        ticks(axis, [mark for mark in marks if low < mark < high])
    between = "· V2 and V3, " if len(next(iter(arrows.values()))[0]) > 2 else ""
    sheet.note(476, f"○ V1, {between}● V4: fewer bytes; {ceilings['precision']}, {device}")
    sheet.cut(75, 437)
    return sheet


def roofline() -> Sheet:
    """Where norms, attention and MLP stand under the roof, from V1 to V4.

    Of a forward pass; a norm and its residual are 5 FLOPs a number.
    """
    folder = H100 / "roofline/bf16"
    files = [folder / f"tiny_llama_v{version}_flops.json" for version in (1, 2, 3, 4)]
    runs = [read(file) for file in files if file.exists()]
    v1 = runs[0]
    config, batch = v1["config"], v1["training"]["batch_size"]
    numbers = batch * config["seq_len"] * config["hidden_dim"] * (2 * config["num_layers"] + 1)

    def total(run: dict, key: str, parts: tuple[str, ...]) -> float:
        return sum(module[key] for module in run["modules"] if module["module"].endswith(parts))

    def place(run: dict, parts: tuple[str, ...], flop: float) -> Point:
        return flop / total(run, "bytes", parts), flop / total(run, "ms", parts) / 1e9

    arrows = {}
    for name, parts, color, side in (
        ("norm, residual", ("norm", "layers.* (rest)"), GREEN, (14, -18)),
        ("attention", ("self_attn",), RED, (4, -26)),
        ("MLP", ("mlp",), BLUE, (-64, 12)),
    ):
        flop = total(v1, "flop", parts) or 5 * numbers
        arrows[name] = ([place(run, parts, flop) for run in runs], color, side)
    return under_the_roof(v1, arrows)


def ticks(axis, values: Sequence[float]) -> None:
    """Plain numbers on a logarithmic axis."""
    axis.set_major_locator(matplotlib.ticker.FixedLocator(values))
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


SHAPES = {  # the sizes of the studies: names in results, and here
    "tiny_llama, small": "TinyLlama, small",
    "tiny_llama, medium": "TinyLlama, medium",
    "tiny_openfold, default": "TinyOpenFold, default",
    "tiny_openfold, crop": "TinyOpenFold, real crop",
}


def of_versions(title: str, groups: dict[str, dict[str, float]], note: str) -> Sheet:
    """Bars of V1 to V4 for each shape, two shapes beside each other."""
    bars = [len(values) for values in groups.values()]
    heights = [66 + 48 * max(bars[i : i + 2]) for i in range(0, len(bars), 2)]
    sheet = Sheet(title, 106 + sum(heights))
    for i, (shape, values) in enumerate(groups.items()):
        left, top = 20 + 395 * (i % 2), 76 + sum(heights[: i // 2])
        sheet.label(left, top + 14, SHAPES[shape], weight="bold")
        for j, (version, value) in enumerate(values.items()):
            y, width = top + 36 + 48 * j, 240 * value / values["V1"]
            sheet.label(left, y + 20, version)
            sheet.box(left + 42, y, width, 41, VERSION[version], edge=None)
            number = f"{value:.{max(0, 2 - int(math.log10(value)))}f}"
            sheet.label(left + 52 + width, y + 20, number)
        first = 76 + sum(heights[: i // 2])
        name = shape.partition(", ")[0] if len(heights) > 1 else ""
        sheet.cut(first, first + heights[i // 2] - 16, name)
    sheet.note(sheet.height - 24, note, 20, "left")
    return sheet


def from_overview(key: str) -> dict[str, dict[str, float]]:
    """A number of V1 to V4, bf16, the whole step as one graph, by shape."""
    found: dict[str, dict[str, float]] = {}
    for row in rows_of("overview", precision="bf16"):
        found.setdefault(row["shape"], {})[row["side"]] = row[key]
    return found


def versions() -> Sheet:
    """Milliseconds of a step of every version, bf16, the whole step as one graph."""
    note = "one NVIDIA H100, medians of five turns"
    title = "One training step, bf16, as one graph: milliseconds"
    return of_versions(title, from_overview("batch_ms"), note)


def kernels() -> Sheet:
    """Kernels of a step of every version, counted, bf16."""
    counts = from_overview("per_step")
    shown = {shape: counts[shape] for shape in ("tiny_llama, small", "tiny_openfold, default")}
    note = "counted in one profiled step, bf16: forward, backward, optimizer"
    return of_versions("Kernels in one training step", shown, note)


def traffic() -> Sheet:
    """GB that the operators of a step read and write, by version, bf16."""
    shown = {}
    for shape in ("tiny_llama, medium", "tiny_openfold, default"):
        rows = rows_of("traffic", shape=shape, precision="bf16")
        shown[shape] = {row["side"]: row["gb"] for row in rows}
    note = "bf16; every operator reads its tensors and writes its results, once each"
    return of_versions("GB read and written in one training step", shown, note)


def energy() -> Sheet:
    """Joules for a sample, by version, bf16."""
    shown: dict[str, dict[str, float]] = {}
    for row in rows_of("energy")[:8]:
        shape = "tiny_llama, small" if row["seq_len"] == 128 else "tiny_llama, medium"
        shown.setdefault(shape, {})[row["version"]] = row["mj_per_sample"]
    note = "one NVIDIA H100, bf16, as one graph; medium runs at the power limit"
    return of_versions("Energy for a sample: millijoules", shown, note)


def attention_memory() -> Sheet:
    """Peak memory against length, with the scores in memory and without, as in START.md."""
    study = read(CPU / "attention_memory.json")
    lengths = [row["length"] for row in study["rows"]]
    sheet = Sheet("Memory of attention: quadratic and linear", 470)
    axes = plot(sheet, 96, 84, 520, 290, xlabel="tokens", ylabel="MB")
    for name, words, color, marker, rise in (
        ("scores", "scores\nin memory", RED, "o", 0),
        ("fused", "fused", BLUE, "s", 34),
    ):
        mb = [row[name] / 1e6 for row in study["rows"]]
        style = {"linewidth": 4, "markersize": 10, "clip_on": False}
        axes.plot(lengths, mb, color=color, marker=marker, **style)
        number = f"{mb[-1]:.0f}" if mb[-1] > 100 else f"{mb[-1]:.1f}"
        label = {"fontsize": SMALL, "color": color, "va": "center"}
        label |= {"weight": "bold", "linespacing": 1.3}
        axes.text(lengths[-1] + 60, mb[-1] + rise, f"{words}\n{number} MB", **label)
    axes.set(xticks=lengths, xlim=(0, lengths[-1]), ylim=(0, None))
    heads = f"{study['config']['heads']} heads of {study['config']['head_dim']}"
    sheet.note(446, f"forward and backward, {heads}, float32, on a CPU", 20, "left")
    sheet.cut(58, 422)
    return sheet


PURPOSES = (  # of memory_by_purpose.json: key, words, colour
    ("weights", "weights", GREY),
    ("moments", "AdamW's moments", PURPLE),
    ("weight_copies", "weights in bf16", PINK),
    ("attention", "attention", RED),
    ("triangle", "triangles, outer product", ORANGE),
    ("mlp", "MLP, transitions", BLUE),
    ("other", "norms, residuals", SKY),
    ("rest", "logits, the rest", "#c4c8cc"),
)


LIBRARIES = {  # study: what it is, and the names of its sides in the figure
    "attention": (
        "Attention with pair bias, 256 residues",
        {
            "triton": "V3, with gate",
            "FlexAttention, own layout": "FlexAttention, no gate",
            "cuEquivariance, own layout": "cuEquivariance, no gate",
            "torch.compile": "torch.compile",
            "SDPA": "PyTorch's SDPA",
        },
    ),
    "triangle": (
        "Triangle multiplication, 256 residues",
        {
            "triton": "V3",
            "cuEquivariance, bf16 parameters": "cuEquivariance, bf16",
            "cuEquivariance": "cuEquivariance, float32",
            "torch.compile": "torch.compile",
            "V2": "PyTorch, as in V2",
        },
    ),
}


def libraries() -> Sheet:
    """Microseconds of two operations in V3 and in libraries, the fastest first."""
    groups = []
    for study, (title, names) in LIBRARIES.items():
        rows = rows_of(study, shape="N=256", precision="bf16")
        rows = [row for row in rows if row["side"] in names and row.get("us")]
        times = {names[row["side"]]: row["us"] for row in rows}
        groups.append((study, title, sorted(times.items(), key=lambda item: item[1])))
    height = 116 + sum(66 + 40 * len(times) for _, _, times in groups)
    sheet = Sheet("Our kernels beside libraries: microseconds", height)
    top = 76
    for study, title, times in groups:
        sheet.cut(top - 4, top + 36 + 40 * len(times), study)
        sheet.label(20, top + 14, title, weight="bold")
        longest = times[-1][1]
        for i, (name, us) in enumerate(times):
            y, width = top + 36 + 40 * i, 410 * us / longest
            ours = name.startswith("V3")
            sheet.label(20, y + 16, name, weight="bold" if ours else "normal")
            sheet.box(300, y, width, 33, VERSION["V3"] if ours else FAINT, edge=None)
            sheet.label(310 + width, y + 16, f"{us:.0f}")
        top += 66 + 40 * len(times)
    first = "forward and backward, bf16, one NVIDIA H100; cuEquivariance has"
    second = "parameters in bf16 or in float32, as most training code has them"
    sheet.note(height - 58, first, 20, "left")
    sheet.note(height - 28, second, 20, "left")
    return sheet


def memory_of_a_step() -> Sheet:
    """Stacked bars: what memory holds when the forward pass ends, by what it is for."""
    rows = rows_of("memory_by_purpose")
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    bars = 44 * len(rows) + 46 * len(shapes)
    sheet = Sheet("Memory at the end of the forward pass", 70 + bars + 34 * 3 + 20)
    y = 66
    for shape in shapes:
        below = y
        same = [row for row in rows if row["shape"] == shape]
        highest = max(sum(row["parts"].values()) for row in same)
        name = shape.replace("tiny_openfold", "TinyOpenFold").replace("tiny_llama", "TinyLlama")
        sheet.label(20, y + 18, f"{name}, bf16", weight="bold")
        y += 40
        for row in same:
            sheet.label(20, y + 17, row["version"])
            x = 62.0
            for key, _, color in PURPOSES:
                width = 600 * row["parts"][key] / highest
                sheet.box(x, y, width, 36, color, edge=WHITE, linewidth=1)
                x += width
            sheet.label(x + 10, y + 17, f"{sum(row['parts'].values()) / 1e9:.2f} GB")
            y += 44
        y += 6
    for i, (_, words, color) in enumerate(PURPOSES):
        sheet.legend(y + 14 + 34 * (i // 3), [20 + (0, 220, 525)[i % 3]], {words: color})
    sheet.cut(below, sheet.height, "tiny_openfold")  # the last shape
    return sheet


def predictions() -> Sheet:
    """Bars: how much faster a step is with its chains fused, as predicted and as compiled."""
    rows = [row for row in rows_of("find_fusions") if "sides_ms" in row]
    sheet = Sheet("Chains fused: predicted and compiled", 150 + 62 * len(rows))
    pairs = []
    for row in rows:
        ms = {side: statistics.median(turns) for side, turns in row["sides_ms"].items()}
        guess = row["predicted_ms"]["now"] / row["predicted_ms"]["chains"]
        pairs.append((guess, ms["now"] / ms["compiled"]))
    scale = 380 / max(map(max, pairs))
    for i, (row, pair) in enumerate(zip(rows, pairs, strict=True)):
        y = 72 + 62 * i
        own = (
            row["shape"].replace("tiny_openfold", "TinyOpenFold").replace("tiny_llama", "TinyLlama")
        )
        sheet.label(20, y + 25, own + (", fp32" if row["precision"] == "fp32" else ""), SMALL)
        for top, value, color in ((y, pair[0], SKY), (y + 26, pair[1], BLUE)):
            sheet.box(320, top, scale * value, 22, color, edge=None)
            sheet.label(328 + scale * value, top + 11, f"{value:.2f}x", SMALL)
    legend = {"predicted by find_fusions.py": SKY, "compiled by inductor": BLUE}
    sheet.legend(sheet.height - 72, (20, 320), legend)
    sheet.label(20, sheet.height - 24, "whole steps as graphs, bf16, one NVIDIA H100", SMALL, GREY)
    return sheet


KERNEL = {"GEMM": BLUE, "attention": RED, "norm": GREEN, "element-wise": ORANGE, "other": PURPLE}


def launch_timeline() -> Sheet:
    """Two layers of V1 and V3, forward: step by step who waits, as graphs what is saved."""
    study = read(H100 / "timeline.json")
    rows = [row for row in study["traces"] if row["version"] in ("V1", "V3")]
    eager, graphs = ([row for row in rows if (row["mode"] == "graph") == g] for g in (False, True))
    middle = 116 + 78 * len(eager) + 34
    below = middle + 50 + 52 * len(graphs)
    sheet = Sheet("Two layers: the host launches, the GPU runs", below + 148)
    left, right = 130, 776

    def lane(name: str, top: float, height: float, end: float, events: list, color="") -> None:
        sheet.note(top + height / 2, name, left - 8, "right")
        sheet.box(left, top, right - left, height, tint(GREY, 0.08), edge=None)
        scale = (right - left) / end
        for kind, start, duration, *_ in events:
            fill = color or KERNEL[kind]
            sheet.box(
                left + start * scale, top, max(duration * scale, 0.8), height, fill, edge=None
            )

    def axis(y: float, end: float) -> None:
        for mark in range(0, int(end) + 1, nice_step(end)):
            sheet.note(y, f"{mark} µs" if mark else "0", left + mark * (right - left) / end)

    def longest(rows: list[dict]) -> float:
        return max(start + us for row in rows for _, start, us, *_ in row["kernels"])

    sheet.label(20, 78, "Step by step: the GPU waits for the host", weight="bold")
    for i, row in enumerate(eager):
        y, end = 102 + 78 * i, longest(eager)
        sheet.label(20, y + 14, row["version"], weight="bold")
        lane("host", y, 22, end, row["launches"], GREY)
        lane("GPU", y + 26, 34, end, row["kernels"])
    axis(middle - 40, longest(eager))
    sheet.label(
        20, middle + 6, "One launch for the whole step: the GPU does not wait", weight="bold"
    )
    for i, row in enumerate(graphs):
        y = middle + 30 + 52 * i
        sheet.label(20, y + 18, row["version"], weight="bold")
        lane("GPU", y, 36, longest(graphs), row["kernels"])
    axis(below, longest(graphs))
    sheet.legend(below + 36, (20, 140, 290, 400, 580), KERNEL)
    name = study["environment"]["device_name"].split("GB")[0]
    words = f"small TinyLlama, bf16, in a trace of {name} GB; the profiler"
    sheet.note(below + 94, words, 20, "left")
    sheet.note(below + 122, "slows every launch", 20, "left")
    sheet.cut(62, middle - 20, "eager")
    sheet.cut(middle - 14, below + 62, "graphs")
    return sheet


def nice_step(longest: float) -> int:
    """A round distance that gives an axis of this length up to six marks."""
    steps = (20, 50, 100, 200, 500, 1000, 2000, 5000, 10**6)
    return next(step for step in steps if longest / step <= 6)


def trunk() -> Sheet:
    """Time against peak memory of 48 blocks, with and without checkpoints."""
    rows = rows_of("trunk", shape="128 x 256")
    plain, checkpointed = (by_side(rows, "checkpointed")[c,] for c in (False, True))
    times = [row["batch_ms"] for row in rows if "batch_ms" in row]
    sheet = Sheet("48 blocks: what recomputation is for", 540)
    axes = plot(sheet, 86, 84, 620, 300, xlabel="ms per training step", ylabel="peak memory, GB")
    axes.set(xlim=(0, 1.15 * max(times)), ylim=(0, 110))
    axes.axhline(80, color=RED, linewidth=2, linestyle=(0, (4, 3)))
    label = {"fontsize": SMALL, "weight": "bold"}
    for side, kept in plain.items():
        again, name = checkpointed[side], side.replace(" ", "\n")
        if "batch_ms" not in again:
            continue
        color = VERSION.get(side.partition(" ")[0], PURPLE)
        x, y = again["batch_ms"], again["peak_mb"] / 1e3
        end, line, marker = (x, 92), ":", "^"  # out of memory
        if "batch_ms" in kept:
            end, line, marker = (kept["batch_ms"], kept["peak_mb"] / 1e3), "-", "o"
        axes.plot([x, end[0]], [y, end[1]], color=color, linewidth=3, linestyle=line)
        axes.plot(x, y, color=color, marker="o", markersize=13, fillstyle="none", markeredgewidth=3)
        axes.plot(*end, color=color, marker=marker, markersize=13)
        if "batch_ms" in kept:
            left = end[0] - 0.025 * max(times)
            middle = end[1] - (6 if name != side else 0)  # two lines stay below the dashed one
            axes.text(left, middle, name, color=color, ha="right", va="center", **label)
        else:
            axes.text(x, end[1] + 5, name, color=color, ha="center", va="bottom", **label)
    words = "triangle: out of memory, which is 80 GB (dashed); bf16, one H100"
    sheet.label(20, 474, "filled: activations kept; open: --checkpoint-blocks", SMALL, GREY)
    sheet.label(20, 508, words, SMALL, GREY)
    sheet.cut(72, 436)
    return sheet


def two_gpus() -> Sheet:
    """Milliseconds of a step on one GPU, and what a second one with a batch of its own adds."""
    rows = sorted(read(TWO_H100 / "scaling.json")["rows"], key=lambda row: -row["batch_size"])
    one, two = (  # of one GPU the smaller batch
        by_side([row for row in rows if row["processes"] == n], "name", "precision") for n in (1, 2)
    )
    sheet = Sheet("The same batch on each of two GPUs: ms per step", 296)
    models = {"tiny_llama": "TinyLlama, small", "tiny_openfold": "TinyOpenFold, default"}
    sides = {"V3": "V3, DDP", "V4": "V4"}
    for left, (model, words) in zip((20, 415), models.items(), strict=True):
        sheet.label(left, 90, words, weight="bold")
        alone, both = one[model, "bf16"], two[model, "bf16"]
        scale = 190 / max(both[side]["batch_ms"] for side in sides)
        for y, side in zip((112, 160), sides, strict=True):
            before, ms = alone[side]["batch_ms"], both[side]["batch_ms"]
            sheet.label(left, y + 20, sides[side])
            sheet.box(left + 100, y, scale * min(before, ms), 41, BLUE, edge=None)
            sheet.box(
                left + 100 + scale * before, y, scale * max(0, ms - before), 41, RED, edge=None
            )
            sheet.label(left + 108 + scale * ms, y + 20, f"{ms:.2f}")
    sheet.legend(226, (20, 170), {"on one GPU": BLUE, "added by the second": RED})
    sheet.note(270, "two NVIDIA H100, bf16, as one graph", 20, "left")
    sheet.cut(64, 252)
    return sheet


def launch() -> Sheet:
    """What a launch is: the host puts kernels into a queue, the GPU runs them in order."""
    trace = next(row for row in read(H100 / "timeline.json")["traces"] if row["launches"])
    count = len(trace["kernels"])
    end = max(start + us for _, start, us, *_ in trace["kernels"])
    every, busy = end / count, sum(us for _, _, us, *_ in trace["kernels"]) / count
    sheet = Sheet("What a launch is", 450)
    for x, width, name, fill in ((20, 190, "host", GREY), (500, 280, "GPU", BLUE)):
        sheet.box(x, 112, width, 190, tint(fill, 0.12), edge=fill)
        sheet.text(x + width / 2, 90, name, weight="bold")
    sheet.text(115, 170, "Python,\nPyTorch,\ndriver")
    sheet.text(115, 262, "one at a time", SMALL, GREY)
    sheet.text(355, 150, "queue")
    for i, (name, kind) in enumerate((("add", "other"), ("GEMM", "GEMM"), ("norm", "norm"))):
        color = KERNEL[kind]
        sheet.box(234 + 84 * i, 170, 76, 50, tint(color, 0.4), name, edge=color, size=SMALL)
    sheet.arrow(212, 250, 300, 250, color=GREY)
    sheet.label(310, 250, "launch", color=GREY)
    sheet.arrow(400, 250, 496, 250, color=GREY)
    for i in range(20):
        row, column = divmod(i, 10)
        fill = GREEN if i < 14 else tint(GREY, 0.1)
        sheet.box(516 + 25 * column, 132 + 25 * row, 21, 21, fill, edge=None)
    sheet.text(640, 226, "a kernel: programs\non the multiprocessors", SMALL)
    sheet.text(640, 280, "many at a time", SMALL, GREY)
    sheet.text(115, 340, f"{every:.0f} µs", TITLE, weight="bold")
    sheet.text(115, 376, "from launch to launch", SMALL)
    sheet.text(640, 340, f"{busy:.1f} µs", TITLE, weight="bold")
    sheet.text(640, 376, "in a kernel, on average", SMALL)
    sheet.note(424, f"{count} kernels of two layers, TinyLlama V1, in a trace of an H100")
    sheet.cut(70, 400)
    return sheet


def layer_kernels() -> Sheet:
    """The kernels of one layer's forward pass, a square each, in V1, V2 and V3."""
    traces = [row for row in read(H100 / "timeline.json")["traces"] if row["launches"]]
    sheet = Sheet("One layer, forward: a square is a kernel", 400)
    for i, trace in enumerate(traces):
        kinds = [kind for kind, *_ in trace["kernels"][: len(trace["kernels"]) // 2]]
        y = 84 + 82 * i
        sheet.label(20, y + 30, trace["version"], weight="bold")
        for j, kind in enumerate(kinds):
            row, column = divmod(j, 31)
            sheet.box(70 + 20 * column, y + 31 * row, 17, 28, KERNEL[kind], edge=None)
        sheet.text(784, y + 30, f"{len(kinds)}", TITLE, ha="right", weight="bold")
    sheet.legend(334, (70, 190, 340, 450, 630), KERNEL)
    words = "TinyLlama, bf16, in a trace of an H100; other: casts, copies, rotary"
    sheet.note(378, words, 70, "left")
    sheet.cut(70, 362)
    return sheet


def run_parts() -> Sheet:
    """The three parts of a run, and where the host waits for the device."""
    sheet = Sheet("The three parts of a run", 360)
    parts = (
        (20, 190, "warm-up", GREY, "loads, compiles,\ntrains; not timed"),
        (218, 380, "measured steps", BLUE, "speed = samples / time\nbetween the two waits"),
        (606, 174, "extra steps", PURPLE, "count kernels\nand FLOPs"),
    )
    for x, width, name, color, words in parts:
        sheet.box(x, 130, width, 74, tint(color, 0.35), name, edge=color, weight="bold")
        sheet.text(x + width / 2, 248, words, SMALL, va="top")
    for i in range(1, 8):
        sheet.line(218 + 47.5 * i, 130, 218 + 47.5 * i, 144, color=BLUE, width=2)
    for x in (214, 602):
        sheet.arrow(x, 92, x, 128, color=RED, width=4)
        sheet.text(x, 78, "host waits", SMALL, RED)
    sheet.arrow(20, 224, 780, 224, color=GREY, width=2)
    sheet.note(338, "nothing waits inside: phases are read from events afterwards")
    sheet.cut(62, 318)
    return sheet


def taking_turns() -> Sheet:
    """Two runs one after the other, and in turns, on a host that is busy for a while."""
    sheet = Sheet("Take turns", 380)
    sheet.box(522, 76, 252, 226, tint(RED, 0.15), edge=None)
    sheet.text(648, 92, "the host is busy", SMALL, RED)
    rows = (("one after the other", "AAAABBBB"), ("in turns", "ABBAABBA"))
    for i, (name, order) in enumerate(rows):
        y, x = 146 + 86 * i, 20.0
        sheet.label(20, y - 18, name, SMALL)
        for side in order:
            slow = x >= 520
            width, color = (124 if slow else 84), {"A": GREY, "B": BLUE}[side]
            sheet.box(x, y, width - 4, 48, tint(color, 0.45), side, edge=color, weight="bold")
            x += width
    sheet.label(20, 330, "Above, B seems slower. Below, both sides lose the same,", SMALL)
    sheet.label(20, 356, "and the ratio of each pair can be compared with the next one.", SMALL)
    sheet.cut(72, 312)
    return sheet


def turn_ratios() -> Sheet:
    """V1 over V2 in each turn: eager, and as one graph."""
    rows = by_side(rows_of("headline"), "shape", "precision", "mode")
    shapes = [shape for shape in SHAPES if shape != "tiny_llama, medium"]
    sheet = Sheet("The same ratio in five turns: V1 over V2", 450)
    axes = plot(sheet, 250, 84, 520, 250, xlabel="time of V1 / time of V2, bf16")
    for i, shape in enumerate(shapes):
        for mode, color, offset in (("eager", ORANGE, 0.16), ("graph", BLUE, -0.16)):
            sides = rows[shape, "bf16", mode]
            found = ratios(sides["V1"], sides["V2"])
            style = {"color": color, "markersize": 13, "alpha": 0.75, "clip_on": False}
            axes.plot(found, [len(shapes) - i + offset] * len(found), "o", **style)
    axes.axvline(1, color=GREY, linewidth=2, linestyle=(0, (4, 3)))
    names = [SHAPES[shape] for shape in reversed(shapes)]
    axes.set(yticks=range(1, len(shapes) + 1), ylim=(0.5, len(shapes) + 0.5))
    axes.set_yticklabels(names)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for x, name, color in ((20, "eager", ORANGE), (130, "one graph", BLUE)):
        sheet.axes.add_patch(Circle((x + 10, 418), 9, facecolor=color))
        sheet.label(x + 28, 418, name)
    sheet.note(418, "one H100 on a shared host", 780, "right")
    sheet.cut(78, 436)
    return sheet


TOOLS = (  # what one looks at, the question, the program, colour
    ("run", "how fast? how many kernels?", "the report", GREY),
    ("operators", "which kernels take the time?", "PyTorch's profiler", GREEN),
    ("modules", "arithmetic or memory?", "FLOPs count, roofline", GREEN),
    ("time line", "where are the gaps?", "rocprofv3", ORANGE),
    ("host", "what does the host do?", "rocprof-sys", ORANGE),
    ("one kernel", "why is it slow?", "rocprof-compute", RED),
)


def profilers() -> Sheet:
    """The tools from overview to detail, each with its question."""
    sheet = Sheet("From overview to detail", 430)
    for i, (what, question, tool, color) in enumerate(TOOLS):
        y, inset = 70 + 54 * i, 9 * i
        width, fill = 200 - 2 * inset, tint(color, 0.35)
        sheet.box(20 + inset, y, width, 46, fill, what, edge=color, size=SMALL)
        sheet.label(240, y + 23, question)
        sheet.text(784, y + 23, tool, ha="right", weight="bold")
    sheet.note(412, "green: on any device; orange and red: on an AMD GPU")
    sheet.cut(62, 392)
    return sheet


def losses() -> Sheet:
    """Loss curves of V1 and V4 in both precisions, one over the other."""
    runs = read(H100 / "losses.json")["runs"]
    sheet = Sheet("V1 and V4 learn the same", 450)
    axes = plot(sheet, 80, 76, 500, 300, xlabel="training step", ylabel="loss")
    names = (
        ("v1", "fp32", GREY, 9),
        ("v4", "fp32", RED, 4),
        ("v1", "bf16", SKY, 3),
        ("v4", "bf16", INK, 1.5),
    )
    for i, (version, precision, color, width) in enumerate(names):
        curve = runs[f"{version}_{precision}"]["loss"]["curve"]
        axes.plot(range(1, len(curve) + 1), curve, color=color, linewidth=width)
        y = 134 + 66 * i
        sheet.line(604, y, 640, y, color=color, width=width)
        sheet.label(650, y, f"{version.upper()} {precision}", SMALL)
        sheet.label(650, y + 27, f"{curve[-1]:.4f}", SMALL, GREY)
    sheet.label(604, 96, "loss at the end", SMALL)
    axes.set(xlim=(0, len(curve)), ylim=(0, None))
    sheet.note(436, "TinyLlama, small; data: a Markov chain", 20, "left")
    sheet.cut(68, 424)
    return sheet


def too_fast() -> Sheet:
    """What two faulty programs say of a step, and how long its kernels really took."""
    stages = {row["stage"]: row for row in read(H100 / "performance_debugging.json")["stages"]}
    sheet = Sheet("Too fast to be true", 400)
    few = f"{stages['stage6']['gradient_percent']:.1f} % of gradients"
    rows = (
        ("stage5", "honest", "all gradients"),
        ("stage3", "no wait at the end", "all gradients"),
        ("stage6", "most of it left out", few),
    )
    longest = max(stages[name]["kernel_ms"] for name, *_ in rows)
    for i, (name, words, remark) in enumerate(rows):
        y, row = 76 + 96 * i, stages[name]
        sheet.label(20, y + 22, words, weight="bold")
        sheet.label(20, y + 52, remark, SMALL, GREY)
        kinds = (row["result"]["timing"]["batch_ms"], BLUE), (row["kernel_ms"], GREY)
        for j, (ms, color) in enumerate(kinds):
            width = 360 * ms / longest
            sheet.box(260, y + 36 * j, max(width, 2), 32, color, edge=None)
            sheet.label(270 + width, y + 16 + 36 * j, f"{ms:.2f} ms", SMALL)
    kinds = {"what the program says": BLUE, "what its kernels took": GREY}
    sheet.legend(364, (20, 290), kinds)
    sheet.cut(66, 392)
    return sheet


def tile_owner() -> Sheet:
    """A gradient that many rows share: atomic additions, or one program for each tile."""
    sheet = Sheet("A shared gradient: who adds?", 450)
    for left, name, color in ((20, "atomic additions", RED), (420, "a program owns a tile", GREEN)):
        sheet.text(left + 170, 84, name, weight="bold")
        sheet.box(left + 250, 150, 90, 160, tint(color, 0.3), "tile", edge=color)
    for i, row in enumerate((3, 1, 4, 2)):
        y = 112 + 60 * i
        sheet.box(20, y, 110, 44, tint(BLUE, 0.3), f"row {row}", edge=BLUE)
        sheet.arrow(132, y + 22, 266, 180 + 33 * i, color=RED, width=3)
        sheet.box(420, y, 110, 44, tint(BLUE, 0.3), f"row {i + 1}", edge=BLUE)
        if i:
            sheet.arrow(475, y - 15, 475, y - 1, color=GREEN, width=3)
    sheet.arrow(532, 314, 666, 250, color=GREEN, width=5)
    sheet.label(20, 378, "as they come: another order,\nanother rounding, in each run", SMALL)
    sheet.label(420, 378, "one after the other: the same\nbits each time, one store", SMALL)
    sheet.line(390, 84, 390, 410, color=PALE, width=3)
    sheet.cut(66, 416)
    return sheet


def strategy() -> Sheet:
    """What to do first: the question, what answers it, and what it brought, measured."""
    small = {"shape": "tiny_llama, small", "precision": "bf16"}

    def ms(study: str, side: str, **more: str) -> float:
        return row_of(study, side=side, **small, **more)["batch_ms"]

    def gb(checkpointed: bool) -> float:
        row = row_of("trunk", shape="128 x 256", side="V4", checkpointed=checkpointed)
        return row["peak_mb"] / 1e3

    eager, graph = (ms("headline", "V1", mode=mode) for mode in ("eager", "graph"))
    compiled, v3, v4 = (ms("fastest", side) for side in ("V1 compiled", "V3", "V4"))
    kept = f"{gb(False):.0f} → {gb(True):.1f} GB"
    rows = (
        ("The host is the limit?", "one graph", f"{eager:.1f} → {graph:.2f} ms", GREY),
        ("Small operators?", "torch.compile", f"{graph:.2f} → {compiled:.2f} ms", SKY),
        ("It cannot fuse them?", "V3's kernels", f"{compiled:.2f} → {v3:.2f} ms", BLUE),
        ("Shapes stay the same?", "V4", f"{v3:.2f} → {v4:.2f} ms", RED),
        ("Memory ends first?", "checkpoints", kept, PURPLE),
    )
    sheet = Sheet("In this order, and only as far as it pays", 440)
    for i, (question, answer, gain, color) in enumerate(rows):
        y = 72 + 62 * i
        sheet.label(20, y + 26, question)
        sheet.arrow(290, y + 26, 330, y + 26, color=GREY)
        sheet.box(336, y, 196, 52, tint(color, 0.4), answer, edge=color, weight="bold")
        sheet.text(780, y + 26, gain, ha="right", weight="bold")
        if i < 3:
            sheet.arrow(434, y + 52, 434, y + 61, color=GREY, width=2)
    sheet.note(412, "H100, bf16: small TinyLlama; the last line: 48 blocks of TinyOpenFold V4")
    sheet.cut(62, 386)
    return sheet


def sessions() -> Sheet:
    """The four sessions of the workshop: a bar of minutes each, from docs/agenda.json."""
    colors = {"set-up": SKY, "slides": GREY, "demonstration": ORANGE, "sheet": BLUE, "talk": GREEN}
    kinds = {kind: tint(color, 0.5) for kind, color in colors.items()}
    names = [*agenda.plan()["sessions"]]
    sheet = Sheet("Four sessions: minutes", 120 + 78 * len(names))
    for i, name in enumerate(names):
        items, y, x = agenda.session(name), 70 + 78 * i, 20.0
        sheet.label(20, y + 10, name.removeprefix("Session "), weight="bold")
        for item in items:
            kind = next((kind for kind in kinds if item.what.startswith(kind)), "talk")
            kind = "sheet" if item.path else kind
            width = 11.5 * item.minutes
            sheet.box(x, y + 26, width - 3, 38, kinds[kind], str(item.minutes))
            x += width
        total = sum(item.minutes for item in items)
        sheet.label(x + 12, y + 45, str(total), TITLE, weight="bold")
    sheet.legend(sheet.height - 36, (20, 160, 285, 500, 630), kinds, edge=INK)
    sheet.cut(64, sheet.height - 4)
    return sheet


FIGURES_BY_NAME: dict[str, Callable[[], Sheet]] = {
    figure.__name__: figure
    for figure in (
        launch_timeline,
        where_numbers_live,
        add_relu,
        merged_gemms,
        attention,
        attention_memory,
        libraries,
        triton_grid,
        residual_norm,
        evoformer_inputs,
        evoformer_block,
        order_of_sums,
        bias_gradient,
        two_streams,
        roofline,
        versions,
        memory_of_a_step,
        predictions,
        trunk,
        two_gpus,
        kernels,
        traffic,
        energy,
        launch,
        layer_kernels,
        run_parts,
        taking_turns,
        turn_ratios,
        profilers,
        losses,
        too_fast,
        tile_owner,
        strategy,
        sessions,
    )
}


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    names = f"of: {', '.join(FIGURES_BY_NAME)} (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    there = {"type": Path, "default": FIGURES, "metavar": "DIR"}
    parser.add_argument("--output", **there, help="(default: docs/figures)")
    parser.add_flag("--png", "PNG of what slides show beside each SVG")
    return parser


def draw(args: argparse.Namespace) -> int:
    """Draw and write what is asked for; returns the exit status."""
    if unknown := set(args.names) - set(FIGURES_BY_NAME):
        raise ToolError(f"no such figure: {', '.join(sorted(unknown))}")
    sheets = {}
    for name in args.names or FIGURES_BY_NAME:
        try:
            sheets[name] = FIGURES_BY_NAME[name]()
        except FileNotFoundError as error:
            if args.names:
                raise
            print_notes(PROG, f"{name} is left out: there is no {error.filename}")
    args.output.mkdir(parents=True, exist_ok=True)
    for name, sheet in sheets.items():
        for path in sheet.save(args.output, name, args.png):
            print(path)
    return 0


main = program(build_parser, draw)


if __name__ == "__main__":
    sys.exit(main())

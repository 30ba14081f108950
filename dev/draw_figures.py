#!/usr/bin/env python3
"""Draws what docs/figures shows of results.

Whatever number a figure shows is read from a file in results/, but for sizes of memories and peaks
of a GPU, which are the vendors'. A figure is drawn whole, or is a drawing in which the texts with
an id are filled in. All other drawings are edited by hand.

Examples:
  python dev/draw_figures.py                        all figures that show results
  python dev/draw_figures.py launch_timeline        one of them
"""

import argparse
import itertools
import math
import re
import statistics
import sys
from collections.abc import Callable

from dev.house import PROGRAMS, ROOMS, arrows
from dev.sheet import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    SMALL,
    TITLE,
    VERSION,
    Plot,
    Sheet,
)
from dev.traces import two_layers
from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.files import ROOT, read_json, write_text
from fusion_lab.host import PEAK_TFLOPS
from fusion_lab.profile.ncu import moved
from fusion_lab.study import by_side

FIGURES = ROOT / "docs/figures"
H100 = ROOT / "results/h100"
H200 = ROOT / "results/h200"
COUNTERS = H200 / "counters.json"
FIGURE: dict[str, Callable[[], Sheet | str]] = {}  # by name

SHAPES = {  # the sizes of the studies: names in results, and here
    "tiny_llama, small": "TinyLlama, small",
    "tiny_llama, medium": "TinyLlama, medium",
    "tiny_openfold, default": "TinyOpenFold, default",
    "tiny_openfold, crop": "TinyOpenFold, real crop",
}


def figure(draw: Callable[[], Sheet | str]) -> Callable[[], Sheet | str]:
    FIGURE[draw.__name__] = draw
    return draw


def rows_of(study: str, **wanted: object) -> list[dict]:
    """The rows of a study on the H100 that have these values."""
    rows = read_json(H100 / f"{study}.json")["rows"]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def filled(name: str, **texts: str) -> str:
    """A drawing with these texts in place of those that have such an id."""
    svg = (FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    for key, words in texts.items():
        before, found, rest = svg.partition(f'<text id="{key}" ')
        if not found:
            raise ToolError(f"{name}.svg has no text with the id {key}")
        svg = before + found + re.sub(r">[^<]*", f">{words}", rest, count=1)
    return svg


# --- drawings with a few measured numbers


@figure
def launch() -> str:
    """What a launch and a kernel take in a step of V1, without a profiler."""
    find = {"study": "headline", "shape": "tiny_llama, small", "precision": "bf16", "side": "V1"}
    eager = rows_of(**find, mode="eager")[0]
    graph = rows_of(**find, mode="graph")[0]
    every = f"{1e3 * eager['batch_ms'] / eager['host_launches']:.0f} µs"
    busy = f"{1e3 * graph['batch_ms'] / graph['per_step']:.1f} µs"
    times = f"{eager['batch_ms']:.1f} ms eager, {graph['batch_ms']:.2f} as a graph"
    return filled("launch", every=every, busy=busy, note=f"a step of TinyLlama V1, bf16: {times}")


@figure
def two_streams() -> str:
    find = {"study": "ablation_tiny_llama_v4", "shape": "tiny_llama, small"}
    without = rows_of(**find, side="all but overlap")[0]
    same = rows_of(**find, side="all", group=without["group"])[0]
    times = f"{without['batch_ms']:.2f} → {same['batch_ms']:.2f} ms a step"
    note = f"lengths are a sketch; measured: {times} (small TinyLlama V4, bf16)"
    return filled("two_streams", note=note)


@figure
def strategy() -> str:
    """What each answer brought."""
    small = {"shape": "tiny_llama, small", "precision": "bf16"}
    trunk = {"study": "trunk", "shape": "128 x 256", "side": "V4"}
    kept, again = (rows_of(**trunk, checkpointed=c)[0]["peak_mb"] / 1e3 for c in (False, True))
    places = (
        ("headline", "V1", "eager"),
        ("overview", "V1", "graph"),
        ("fastest", "V1 compiled", ""),
    )
    places += ("overview", "V3", "graph"), ("overview", "V4", "graph")
    ms = [rows_of(s, side=side, **small, **({"mode": m} if m else {}))[0] for s, side, m in places]
    ms = [f"{row['batch_ms']:.3g}" for row in ms]
    gains = {f"gain{i}": f"{a} → {b} ms" for i, (a, b) in enumerate(itertools.pairwise(ms))}
    return filled("strategy", **gains, memory=f"{kept:.0f} → {again:.1f} GB")


# --- bars


def three_digits(value: float) -> str:
    """As many digits behind the point as three in all leave."""
    return f"{value:.{max(0, 2 - int(math.log10(value)))}f}"


def of_versions(title: str, note: str, groups: dict[str, dict[str, float]]) -> Sheet:
    """Bars of V1 to V4 for each shape, two shapes beside each other."""
    high, lines = 66 + 48 * max(map(len, groups.values())), len(groups) // 2
    sheet = Sheet(title, 106 + high * lines)
    for i, (shape, values) in enumerate(groups.items()):
        left, top = 20 + 395 * (i % 2), 76 + high * (i // 2)
        sheet.text(left, top + 14, SHAPES[shape], bold=True)
        for y, (version, value) in zip(itertools.count(top + 36, 48), values.items()):
            sheet.text(left, y + 20, version)
            width = 240 * value / values["V1"]
            sheet.bar(left + 42, y, width, VERSION[version], three_digits(value))
        if not i % 2:
            sheet.cut(top, top + high - 16, shape.partition(",")[0] if lines > 1 else "slide")
    sheet.note(sheet.height - 24, note)
    return sheet


def by_version(key: str, study: str, *shapes: str, **wanted: str) -> dict[str, dict[str, float]]:
    """A number of V1 to V4 by shape."""
    found: dict[str, dict[str, float]] = {shape: {} for shape in shapes}
    for row in rows_of(study, **wanted):
        if row["shape"] in found:
            found[row["shape"]][row["side"]] = row[key]
    return found


@figure
def versions() -> Sheet:
    """Milliseconds of a step of every version, bf16, the whole step as one graph."""
    title = "One training step, bf16, as one graph: milliseconds"
    groups = by_version("batch_ms", "overview", *SHAPES, precision="bf16")
    return of_versions(title, "one NVIDIA H100, medians of five turns", groups)


@figure
def kernels() -> Sheet:
    shapes = "tiny_llama, small", "tiny_openfold, default"
    groups = by_version("per_step", "overview", *shapes, precision="bf16")
    note = "counted in one profiled step, bf16: forward, backward, optimizer"
    return of_versions("Kernels in one training step", note, groups)


@figure
def counted() -> Sheet:
    """Bytes of operations before and after their fusion: predicted, and counted by an H200."""
    shown = ("residual and RMS norm", "SwiGLU", "SwiGLU, backward", "cross-entropy", "layer norm")
    sheet = Sheet("Bytes: predicted, and counted by the GPU", 84 + 92 * len(shown) + 84)
    rows = [row for row in read_json(COUNTERS)["rows"] if row["what"] == "operation"]
    by_name = {(row["operation"], row["side"]): row for row in rows}
    scale = 430 / max(moved(by_name[name, "before"]) for name in shown)
    for number, name in enumerate(shown):
        top = 70 + 92 * number
        sheet.text(20, top + 40, name.replace(" and ", "\nand ").replace(", ", ",\n"), SMALL)
        for y, side, color in ((top, "before", GREY), (top + 42, "after", BLUE)):
            row = by_name[name, side]
            width = scale * moved(row)
            sheet.bar(190, y, width, color, f"{moved(row):.0f} MB", height=36)
            predicted = 190 + scale * row["predicted_mb"]
            sheet.line(predicted, y - 3, predicted, y + 39, color=ORANGE, width=4)
    below = 84 + 92 * len(shown)
    colors = {"PyTorch's operators": GREY, "one kernel": BLUE, "predicted": ORANGE}
    sheet.legend(below, (20, 270, 430), colors)
    sheet.note(below + 54, "read from DRAM, caches emptied, and written to L2; one H200, ncu")
    sheet.cut(56, 340)  # the first three
    return sheet


@figure
def libraries() -> Sheet:
    """Ours, and the fastest that each library has for 256 residues."""
    titles = {"attention": "Attention with pair bias", "triangle": "Triangle multiplication"}
    words = {"own layout": "no gate", "bf16 parameters": "bf16", "V2": "PyTorch, as in V2"}
    sheet = Sheet("Our kernels beside libraries: microseconds", 764)
    top = 84
    for study, title in titles.items():
        rows = read_json(H200 / f"{study}.json")["rows"]
        us = {row["side"]: row.get("us") for row in rows if row["shape"] == "N=256"}
        fastest = {}
        for side in sorted(filter(us.get, us), key=us.get):
            fastest.setdefault(side.partition(",")[0], side)
        sheet.text(20, top, f"{title}, 256 residues", bold=True)
        for library, side in fastest.items():
            top += 40
            for key, name in words.items():
                side = side.replace(key, name)
            sheet.text(20, top, side, bold=library in VERSION)
            time = us[fastest[library]]
            width = 400 * time / max(us[side] for side in fastest.values())
            color = VERSION.get(library, GREY)
            sheet.bar(320, top - 16, width, color, f"{time:.0f}", height=33)
        top += 50
    sheet.note(top, "forward and backward, bf16, one NVIDIA H200")
    return sheet


@figure
def roofline() -> Sheet:
    """A step of each version under a roof, over the bytes that an H200 counted."""
    small = "tiny_llama, small"
    flop = rows_of("step", shape=small)[0]["flop"]
    peak = round(PEAK_TFLOPS["NVIDIA H200"]["bf16"])
    bandwidth = 4.8  # TB/s
    sheet = Sheet("The roofline: the same step, with fewer bytes", 500)
    plot = Plot(sheet, (110, 92, 620, 282), (20, 700), (20, 1300), log=True)
    marks = (20, 50, 100, 200, 500, 1000)
    plot.axes("FLOP per byte", marks[:-1], "TFLOP/s", marks)
    ridge = peak / bandwidth
    plot.line((20, 20 * bandwidth), (ridge, peak), (700, peak), color=INK, width=3)
    x, y = plot.at(64, 64 * bandwidth)
    sheet.text(x - 12, y - 12, f"memory, {bandwidth} TB/s", SMALL, at="end")
    x, y = plot.at(700, peak)
    sheet.text(x, y - 18, f"arithmetic, {peak} TFLOP/s", SMALL, at="end")
    for row in read_json(COUNTERS)["rows"]:
        if row["what"] != "step" or (row["shape"], row["precision"]) != (small, "bf16"):
            continue
        version = row["script"][-2:].upper()
        emptied = row["caches"] == "emptied"
        x, y = plot.at(flop / moved(row) / 1e6, flop / row["us"] / 1e6)
        sheet.dot(x, y, VERSION[version], hollow=not emptied)
        if emptied:
            y += -24 if version in ("V2", "V4") else 24
            sheet.text(x, y, version, SMALL, VERSION[version], at="middle", bold=True)
    sheet.note(454, "filled: caches emptied before each kernel; open: as they come (V1 and V4)")
    sheet.note(482, "small TinyLlama, bf16; bytes and times counted by ncu on one H200")
    sheet.cut(72, 432)
    return sheet


@figure
def predictions() -> Sheet:
    """The speed-up of each step by torch.compile: predicted, against measured."""
    sheet = Sheet("Speed-up by torch.compile: predicted, measured", 560)
    low, high, marks = 0.45, 10.5, (0.5, 1, 2, 3, 5, 10)
    plot = Plot(sheet, (110, 84, 440, 370), (low, high), (low, high), log=True)
    plot.axes("times as fast, measured", marks, "times as fast, predicted", marks)
    plot.line((low, low), (high, high), color=GREY, width=2)
    parts = {"another": GREY, "KernelBench": SKY, "fitted": BLUE, "held out": ORANGE}
    rows = [
        {**row, "part": "another"} if row.get("other") else row for row in rows_of("find_fusions")
    ]
    for row in sorted(rows, key=lambda row: [*parts].index(row["part"])):
        ms = {side: statistics.median(turns) for side, turns in row["sides_ms"].items()}
        measured = ms["now"] / ms["compiled"]
        predicted = row["predicted_ms"]["now"] / row["compiled_ms"]["1.75"]
        x, y = plot.at(measured, predicted)
        sheet.dot(x, y, parts[row["part"]], 6)
        named = row["part"] in ("fitted", "held out")
        if named and not 1 / 1.5 < predicted / measured < 1.5:
            away = (-8, -22) if predicted > measured else (14, 2)
            sheet.text(x + away[0], y + away[1], row["shape"], SMALL)
    words = {"fitted": "fitted half", "held out": "held out", "KernelBench": "KernelBench"}
    words |= {"another": "another program"}
    for y, (part, text) in zip((104, 136, 168, 200), words.items(), strict=True):
        sheet.dot(600, y, parts[part], 7)
        sheet.text(616, y, text, SMALL)
    sheet.note(540, "on the line: as predicted; whole steps as graphs, one H100")
    return sheet


# --- time lines

KERNEL = {"GEMM": BLUE, "attention": RED, "norm": GREEN, "element-wise": ORANGE, "other": PURPLE}


TRACE = "tiny_llama_{}_{}.json.gz"  # version and mode


def layers_of(version: str, mode: str = "eager") -> tuple[list, list]:
    folder, eager = H100 / "traces", TRACE.format(version, "eager")
    return two_layers(
        folder / TRACE.format(version, mode), folder / eager if mode != "eager" else None
    )


def lanes(sheet: Sheet, top: float, distance: float, traces: dict[str, tuple[list, list]]) -> None:
    """Launches, if there are any, and kernels of each version, with an axis for all."""
    left, right = 130, 776
    end = max(start + us for _, kernels in traces.values() for _, start, us, _ in kernels)
    scale = (right - left) / end
    for y, (version, (launches, kernels)) in zip(itertools.count(top, distance), traces.items()):
        sheet.text(20, y + 14, version.upper(), bold=True)
        rows = [("host", y, 22, launches)] if launches else []
        rows += [("GPU", y + 26 * len(rows), 36, kernels)]
        for name, lane, height, events in rows:
            sheet.note(lane + height / 2, name, left - 8, "end")
            sheet.box(left, lane, right - left, height, "#f3f3f3")
            for kind, start, us, _ in events:
                place = left + start * scale, lane, max(us * scale, 0.8), height
                sheet.box(*place, KERNEL.get(kind, GREY))
    step = next(s for s in (20, 50, 100, 200, 500, 1000, 2000, 5000, 10**6) if end / s <= 6)
    for mark in range(0, int(end) + 1, step):
        words = f"{mark} µs" if mark else "0"
        sheet.note(top + distance * len(traces) + 14, words, left + mark * scale, "middle")


@figure
def launch_timeline() -> Sheet:
    """Two layers of V1 and V3, forward: one by one who waits, as graphs what is saved."""
    eager = {version: layers_of(version) for version in ("v1", "v3")}
    there = [v for v in eager if (H100 / "traces" / TRACE.format(v, "graph")).exists()]
    middle = 150 + 78 * len(eager)
    below = middle + 50 + 52 * len(there)
    sheet = Sheet("Two layers: the host launches, the GPU runs", below + 120)
    sheet.text(20, 78, "One launch after the other: the GPU waits for the host", bold=True)
    lanes(sheet, 102, 78, eager)
    words = "One launch for the whole step: the GPU does not wait"
    sheet.text(20, middle + 6, words, bold=True)
    lanes(sheet, middle + 30, 52, {version: layers_of(version, "graph") for version in there})
    sheet.legend(below + 36, (20, 140, 290, 400, 580), KERNEL)
    words = "TinyLlama, bf16, one H100; the trace slows every launch; mind the two scales"
    sheet.note(below + 94, words)
    sheet.cut(62, middle - 20, "eager")
    sheet.cut(middle - 14, below + 62, "graphs")
    return sheet


@figure
def layer_kernels() -> Sheet:
    """The kernels of one layer's forward pass, a square each, in V1, V2 and V3."""
    sheet = Sheet("One layer, forward: a square is a kernel", 400)
    for y, version in ((84, "v1"), (166, "v2"), (248, "v3")):
        kernels = layers_of(version)[1]
        count = len(kernels) // 2
        middle = y + 15.5 * math.ceil(count / 31)
        sheet.text(20, middle, version.upper(), bold=True)
        for j, (kind, *_) in enumerate(kernels[:count]):
            sheet.box(70 + 20 * (j % 31), y + 31 * (j // 31), 17, 28, KERNEL[kind])
        sheet.text(784, middle, f"{count}", TITLE, at="end", bold=True)
    sheet.legend(334, (70, 190, 340, 450, 630), KERNEL)
    sheet.note(378, "TinyLlama, bf16, in a trace of an H100; other: casts, copies, rotary", 70)
    sheet.cut(70, 362)
    return sheet


@figure
def house() -> Sheet:
    """The rooms of the repository, and what each imports."""
    sheet = Sheet("Imports go one way: down", 92 + 42 * len(ROOMS) + 44)
    needed = arrows()
    rooms = ROOMS[::-1]
    middle = {room: 92 + 42 * number for number, room in enumerate(rooms)}
    words = {room: f"{room}/" for room in PROGRAMS} | {"scripts": "tiny_*.py"}
    top, bottom = middle["amd"] - 19, middle["ground"] + 19
    sheet.box(14, top, 316, bottom - top, "#d5ecf9")
    sheet.text(26, top + 18, "fusion_lab", SMALL, BLUE, bold=True)
    for room, y in middle.items():
        sheet.text(316, y, words.get(room, room), at="end")
        sheet.line(20, y + 21, 780, y + 21, color=PALE)
    sources = [room for room in rooms if needed[room]]
    colors = itertools.cycle((BLUE, RED, GREEN, PURPLE, GREY))
    for number, (room, color) in enumerate(zip(sources, colors, strict=False)):
        x = 362 + 36 * (len(sources) - number - 1)
        sheet.dot(x, middle[room], color, 6)
        sheet.line(x, middle[room], x, max(middle[other] for other in needed[room]), color=color)
        for other in sorted(needed[room], key=ROOMS.index):
            sheet.dot(x, middle[other], color, 5, hollow=True)
    sheet.note(
        sheet.height - 22,
        "full dot: this room imports those with a ring on its line; blue: fusion_lab",
    )
    return sheet


# --- axes


@figure
def trunk() -> Sheet:
    """Time against peak memory of 48 blocks, with and without checkpoints."""
    rows = rows_of("trunk", shape="128 x 256")
    plain, checkpointed = (by_side(rows, "checkpointed")[c,] for c in (False, True))
    sheet = Sheet("48 blocks: what recomputation is for", 540)
    plot = Plot(sheet, (86, 84, 660, 300), (0, 1700), (0, 110))
    plot.axes("ms per training step", range(0, 1601, 200), "peak memory, GB", range(0, 101, 20))
    plot.line((0, 80), (1700, 80), color=RED, width=2, dash="6 4")
    for side, kept in plain.items():
        if "batch_ms" not in (again := checkpointed[side]):
            continue
        color, name = VERSION.get(side.partition(" ")[0], PURPLE), side.replace(" ", "\n")
        x, fits = again["batch_ms"], "batch_ms" in kept
        start = x, again["peak_mb"] / 1e3
        end = (kept["batch_ms"], kept["peak_mb"] / 1e3) if fits else (x, 92)  # out of memory
        plot.line(start, end, color=color, width=3, dash="" if fits else "3 4")
        sheet.dot(*plot.at(*start), color, 6, hollow=True)
        right, down = plot.at(*end)
        if fits:
            sheet.dot(right, down, color)
            below = 20 if name != side else 0  # two lines stay below the dashed one
            sheet.text(right - 16, down + below, name, SMALL, color, at="end", bold=True)
        else:
            above = 12 * (2 + name.count("\n"))
            sheet.text(right, down - above, name, SMALL, color, at="middle", bold=True)
    sheet.note(474, "filled: activations kept; open: --checkpoint-blocks")
    sheet.note(508, "dotted: out of memory, which is 80 GB (dashed); bf16, one H100")
    sheet.cut(72, 436)
    return sheet


@figure
def lengths() -> Sheet:
    """Time per residue pair over the residues of a protein."""
    sheet = Sheet("A protein of any length", 470)
    plot = Plot(sheet, (86, 84, 560, 260), (158, 194), (75, 480), log=True)
    plot.axes("residues", range(160, 193, 8), "ns per residue pair", (100, 200, 300, 400))
    for side in ("V2", "V2 compiled", "V3", "V4"):
        points = []
        for row in rows_of("lengths", side=side, precision="bf16"):
            if row["shape"].startswith("37 x"):  # not the trunk
                pairs = row["batch_size"] * row["seq_len"] ** 2
                points.append((row["seq_len"], 1e6 * row["batch_ms"] / pairs))
        color = PURPLE if "compiled" in side else VERSION[side]
        for first, second in itertools.pairwise(points):
            plot.line(first, second, color=color, width=2)
        for point in points:
            sheet.dot(*plot.at(*point), color, 5, hollow=point[0] % 8 > 0)
        right, down = plot.at(*points[-1])
        sheet.text(right + 12, down, side, SMALL, color, bold=True)
    sheet.note(422, "open: no multiple of 8. 2 blocks, 37 sequences, batch 2, bf16, one H100")
    sheet.cut(72, 396)
    return sheet


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    names = f"of: {', '.join(FIGURE)} (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    return parser


def draw(args: argparse.Namespace) -> int:
    if unknown := set(args.names) - set(FIGURE):
        raise ToolError(f"no such figure: {', '.join(sorted(unknown))}")
    for name in args.names or FIGURE:
        write_text(FIGURES / f"{name}.svg", str(FIGURE[name]()))
        print(f"docs/figures/{name}.svg")
    return 0


main = program(build_parser, draw)


if __name__ == "__main__":
    sys.exit(main())

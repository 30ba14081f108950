#!/usr/bin/env python3
"""Draws what docs/figures shows of results.

Whatever number a figure shows is read from a file in results/, but for the sizes of memories, which
are the vendors'. A figure is drawn whole, or is a drawing in which the texts with an id are filled
in. All other drawings are edited by hand.

Examples:
  python tools/draw_figures.py                        all figures that show results
  python tools/draw_figures.py launch_timeline        one of them
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import itertools
import math
import re
import statistics
from collections.abc import Callable

from lab.cli import Parser, ToolError, documented_parser, program
from lab.files import ROOT, read_json, write_text
from lab.study import by_side
from lab.turns import ratios
from tools import agenda
from tools.sheet import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    SKY,
    SMALL,
    TITLE,
    VERSION,
    Plot,
    Sheet,
    tint,
)
from tools.traces import two_layers

FIGURES = ROOT / "docs/figures"
H100 = ROOT / "results/h100"
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
def where_numbers_live() -> str:
    """Sources: NVIDIA H100 Tensor Core GPU Architecture (SXM5); ROCm's "AMD GPU specifications" and
    AMD's CDNA 3 white paper (MI300X).
    """
    copies = rows_of("build_a_fusion", what="forward", rows=512)[0]  # 25 MB stay in the cache
    rate = copies["bytes"] / statistics.median(copies["us"]["copy"]) / 1e6
    return filled("where_numbers_live", l2=f"50 MB, {rate:.1f} TB/s")


@figure
def add_relu() -> str:
    """Two kernels and one."""
    rows = {row["what"]: row for row in rows_of("exercises_v3/add_relu")}
    one, two = rows["add_relu_kernel"], rows["PyTorch, x + y and relu"]
    said = [
        f"{what} {two[k] / one[k]:.2f}x" for what, k in (("predicted", "bytes"), ("measured", "us"))
    ]
    note = f"{', '.join(said)} (H100, {one['bytes'] / 12e6:.0f} million numbers)"
    return filled("add_relu", two=f"{two['us']:.0f} µs", one=f"{one['us']:.0f} µs", note=note)


@figure
def attention() -> str:
    """With the scores in memory and without."""
    gb = {row["side"]: f"{row['peak_mb'] / 1e3:.1f} GB" for row in rows_of("memory", seq_len=2048)}
    words = "TinyLlama, 2048 tokens, peak memory on an H100"
    return filled("attention", note=f"{words}: {gb['scores']} → {gb['flash']}")


@figure
def residual_norm() -> str:
    """Trips to memory, of as many tensors as were counted."""
    rows = {row["what"]: row for row in rows_of("exercises_v3/rms_norm")}
    tensor = rows["V3"]["bytes"] / 2

    def alone(row: dict) -> str:
        return f"norm alone, {row['bytes'] / tensor:.0f} trips: {row['us']:.0f} µs"

    note = f"an arrow is a tensor of {tensor / 1e6:.0f} MB; x' = x + a, n = norm(x'); one H100"
    v1, v3 = alone(rows["the formula, as in V1"]), alone(rows["V3"])
    return filled("residual_norm", v1=v1, v3=v3, note=note)


@figure
def two_streams() -> str:
    find = {"study": "ablation_tiny_llama_v4", "shape": "tiny_llama, small"}
    without = rows_of(**find, side="all but overlap")[0]
    same = rows_of(**find, side="all", group=without["group"])[0]
    times = f"{without['batch_ms']:.2f} → {same['batch_ms']:.2f} ms a step"
    note = f"lengths are a sketch; measured: {times} (small TinyLlama V4, bf16)"
    return filled("two_streams", note=note)


@figure
def launch() -> str:
    """From launch to launch, and in a kernel."""
    kernels = layers_of("v1")[1]
    every = max(start + us for _, start, us, _ in kernels) / len(kernels)
    busy = sum(us for _, _, us, _ in kernels) / len(kernels)
    note = "two layers of TinyLlama V1 on an H100; the trace slows every launch"
    return filled("launch", every=f"{every:.0f} µs", busy=f"{busy:.1f} µs", note=note)


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
            part = (240 * value / values["V1"], VERSION[version])
            sheet.bar(left + 42, y, [part], three_digits(value))
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
def traffic() -> Sheet:
    """GB that the operators of a step read and write."""
    shapes = "tiny_llama, medium", "tiny_openfold, default"
    groups = by_version("gb", "traffic", *shapes, precision="bf16")
    note = "bf16; every operator reads its tensors and writes its results, once each"
    return of_versions("GB read and written in one training step", note, groups)


@figure
def energy() -> Sheet:
    """Joules for a sample."""
    rows, groups = rows_of("energy"), {}
    for shape, part in (("tiny_llama, small", rows[:4]), ("tiny_llama, medium", rows[4:8])):
        groups[shape] = {row["version"]: row["mj_per_sample"] for row in part}
    note = "one NVIDIA H100, bf16, as one graph; medium runs at the power limit"
    return of_versions("Energy for a sample: millijoules", note, groups)


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


@figure
def libraries() -> Sheet:
    """Microseconds of two operations in V3 and in libraries, the fastest first."""
    groups = {}
    for study, (title, names) in LIBRARIES.items():
        rows = rows_of(study, shape="N=256", precision="bf16")
        times = {row["side"]: row["us"] for row in rows if row.get("us")}
        groups[study] = title, sorted((times[side], names[side]) for side in names if side in times)
    height = 116 + sum(66 + 40 * len(times) for _, times in groups.values())
    sheet, top = Sheet("Our kernels beside libraries: microseconds", height), 76
    for study, (title, times) in groups.items():
        sheet.cut(top - 4, top + 36 + 40 * len(times), study)
        sheet.text(20, top + 14, title, bold=True)
        for y, (us, name) in zip(itertools.count(top + 36, 40), times):
            ours = name.startswith("V3")
            sheet.text(20, y + 16, name, bold=ours)
            part = 410 * us / times[-1][0], BLUE if ours else FAINT
            sheet.bar(300, y, [part], f"{us:.0f}", 33)
        top += 66 + 40 * len(times)
    sheet.note(height - 58, "forward and backward, bf16, one NVIDIA H100; cuEquivariance has")
    sheet.note(height - 28, "parameters in bf16 or in float32, as most training code has them")
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


@figure
def memory_of_a_step() -> Sheet:
    """What memory holds when the forward pass ends, by what it is for."""
    rows = rows_of("memory_by_purpose")
    shapes = {row["shape"]: [r for r in rows if r["shape"] == row["shape"]] for row in rows}
    sheet = Sheet("Memory at the end of the forward pass", 192 + 44 * len(rows) + 46 * len(shapes))
    y = 66
    for shape, same in shapes.items():
        sheet.cut(y, sheet.height, shape.partition(",")[0])  # of the last one, with the legend
        sheet.text(20, y + 18, f"{SHAPES[shape]}, bf16", bold=True)
        highest, y = max(sum(row["parts"].values()) for row in same), y + 40
        for row in same:
            sheet.text(20, y + 17, row["version"])
            parts = [(600 * row["parts"][key] / highest, color) for key, _, color in PURPOSES]
            sheet.bar(62, y, parts, f"{sum(row['parts'].values()) / 1e9:.2f} GB", 36)
            y += 44
        y += 6
    for i, (_, words, color) in enumerate(PURPOSES):
        sheet.legend(y + 14 + 34 * (i // 3), [20 + (0, 220, 525)[i % 3]], {words: color})
    return sheet


@figure
def predictions() -> Sheet:
    """The speed-up of each step by torch.compile: predicted, against measured."""
    sheet = Sheet("Speed-up by torch.compile: predicted, measured", 560)
    low, high, marks = 0.45, 10.5, (0.5, 1, 2, 3, 5, 10)
    plot = Plot(sheet, (110, 84, 440, 370), (low, high), (low, high), log=True)
    plot.axes("times as fast, measured", marks, "times as fast, predicted", marks)
    plot.line((low, low), (high, high), color=GREY, width=2)
    parts = {"KernelBench": SKY, "fitted": BLUE, "held out": ORANGE}
    rows = sorted(rows_of("find_fusions"), key=lambda row: [*parts].index(row["part"]))
    for row in rows:
        ms = {side: statistics.median(turns) for side, turns in row["sides_ms"].items()}
        measured = ms["now"] / ms["compiled"]
        predicted = row["predicted_ms"]["now"] / row["compiled_ms"]["1.75"]
        x, y = plot.at(measured, predicted)
        sheet.dot(x, y, parts[row["part"]], 6)
        if row["part"] != "KernelBench" and not 1 / 1.5 < predicted / measured < 1.5:
            away = (-8, -22) if predicted > measured else (14, 2)
            sheet.text(x + away[0], y + away[1], row["shape"], SMALL)
    words = {"fitted": "fitted half", "held out": "held out", "KernelBench": "KernelBench"}
    for y, (part, text) in zip((104, 136, 168), words.items(), strict=True):
        sheet.dot(600, y, parts[part], 7)
        sheet.text(616, y, text, SMALL)
    sheet.note(540, "on the line: as predicted; whole steps as graphs, one H100")
    return sheet


@figure
def two_gpus() -> Sheet:
    """Milliseconds of a step on one GPU, and what a second one with a batch of its own adds."""
    rows = read_json(ROOT / "results/h100x2/scaling.json")["rows"]
    rows.sort(key=lambda row: -row["batch_size"])  # of one GPU the smaller batch
    one, two = (
        by_side([row for row in rows if row["processes"] == n], "name", "precision") for n in (1, 2)
    )
    sheet = Sheet("The same batch on each of two GPUs: ms per step", 296)
    models = {"tiny_llama": "TinyLlama, small", "tiny_openfold": "TinyOpenFold, default"}
    for left, (model, words) in zip((20, 415), models.items(), strict=True):
        sheet.text(left, 90, words, bold=True)
        alone, both = one[model, "bf16"], two[model, "bf16"]
        scale = 190 / max(both[side]["batch_ms"] for side in ("V3", "V4"))
        for y, side in ((112, "V3"), (160, "V4")):
            before, ms = alone[side]["batch_ms"], both[side]["batch_ms"]
            sheet.text(left, y + 20, "V3, DDP" if side == "V3" else "V4")
            parts = (scale * min(before, ms), FAINT), (scale * max(0, ms - before), ORANGE)
            sheet.bar(left + 100, y, parts, f"{ms:.2f}")
    sheet.legend(226, (20, 170), {"on one GPU": FAINT, "added by the second": ORANGE})
    sheet.note(270, "two NVIDIA H100, bf16, as one graph")
    return sheet


@figure
def too_fast() -> Sheet:
    """What two faulty programs say of a step, and how long its kernels really took."""
    study = read_json(H100 / "performance_debugging.json")
    stages = {row["stage"]: row for row in study["stages"]}
    sheet = Sheet("Too fast to be true", 400)
    few = f"{stages['stage6']['gradient_percent']:.1f} % of gradients"
    for y, name, words, remark in (
        (76, "stage5", "honest", "all gradients"),
        (172, "stage3", "no wait at the end", "all gradients"),
        (268, "stage6", "most of it left out", few),
    ):
        sheet.text(20, y + 22, words, bold=True)
        sheet.note(y + 52, remark)
        said, took = stages[name]["result"]["timing"]["batch_ms"], stages[name]["kernel_ms"]
        for top, ms, color in ((y, said, BLUE), (y + 36, took, GREY)):
            sheet.bar(260, top, [(210 * ms, color)], f"{ms:.2f} ms", 32)
    sheet.legend(364, (20, 290), {"what the program says": BLUE, "what its kernels took": GREY})
    sheet.cut(66, 392)
    return sheet


@figure
def sessions() -> Sheet:
    """The four sessions of the workshop: a bar of minutes each, from docs/agenda.json."""
    colors = {"set-up": SKY, "slides": GREY, "demonstration": ORANGE, "sheet": BLUE, "talk": GREEN}
    kinds = {kind: tint(color, 0.5) for kind, color in colors.items()}
    names = [*agenda.plan()["sessions"]]
    sheet = Sheet("Four sessions: minutes", 120 + 78 * len(names))
    for y, name in zip(itertools.count(70, 78), names):
        sheet.text(20, y + 10, name.removeprefix("Session "), bold=True)
        x, total = 20.0, 0
        for item in agenda.session(name):
            kind = next((kind for kind in kinds if item.what.startswith(kind)), "talk")
            color, width = kinds["sheet" if item.path else kind], 11.5 * item.minutes
            sheet.box(x, y + 26, width - 3, 38, color, str(item.minutes), edge=INK)
            x, total = x + width, total + item.minutes
        sheet.text(x + 12, y + 45, str(total), TITLE, bold=True)
    sheet.legend(sheet.height - 36, (20, 160, 285, 500, 630), kinds, edge=INK)
    sheet.cut(64, sheet.height - 4)
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
            sheet.box(left, lane, right - left, height, tint(GREY, 0.08))
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


# --- axes


def under_the_roof(plot: Plot, ceilings: dict, marks: tuple[list, list]) -> None:
    """Axes with the fastest GEMM and the fastest copy that were measured."""
    (left, right), tflops, rate = plot.xs, ceilings["gemm_tflops"], ceilings["copy_gb_per_s"] / 1e3
    corner = min(right, tflops / rate)
    plot.axes("FLOP per byte", marks[0], "TFLOP/s", marks[1])
    roof = [(left, left * rate), (corner, corner * rate), (right, min(right * rate, tflops))]
    plot.line(*roof, color=INK, width=3)


@figure
def roofline() -> Sheet:
    """Norms, attention and MLP of a forward pass, V1 to V4; a norm has 5 FLOPs a number."""
    runs = [
        read_json(H100 / f"roofline/bf16/tiny_llama_v{version}_flops.json")
        for version in (1, 2, 3, 4)
    ]
    v1 = runs[0]
    config, batch, ceilings = v1["config"], v1["training"]["batch_size"], v1["ceilings"]
    numbers = batch * config["seq_len"] * config["hidden_dim"] * (2 * config["num_layers"] + 1)
    sheet = Sheet("The roofline that moves", 500)
    norms = Plot(sheet, (82, 84, 200, 298), (0.08, 1), (0.1, 3.2), log=True)
    under_the_roof(norms, ceilings, ([0.1, 0.2, 0.5, 1], [0.1, 0.2, 0.5, 1, 2]))
    rest = Plot(sheet, (380, 84, 400, 298), (12, 600), (16, 1200), log=True)
    under_the_roof(rest, ceilings, ([20, 50, 100, 200, 500], [20, 50, 100, 200, 500, 1000]))
    sheet.text(*norms.at(0.3, 1.9), "memory", SMALL, at="end")
    sheet.text(780, rest.at(20, ceilings["gemm_tflops"])[1] - 16, "arithmetic", SMALL, at="end")

    def total(run: dict, key: str, parts: tuple[str, ...]) -> float:
        return sum(module[key] for module in run["modules"] if module["module"].endswith(parts))

    for plot, words, parts, color, (right, down) in (
        (norms, "norm,\nresidual", ("norm", "layers.* (rest)"), GREEN, (-40, 110)),
        (rest, "attention", ("self_attn",), RED, (14, 14)),
        (rest, "MLP", ("mlp",), BLUE, (14, 4)),
    ):
        flop = total(v1, "flop", parts) or 5 * numbers
        path = [
            plot.at(flop / total(run, "bytes", parts), flop / total(run, "ms", parts) / 1e9)
            for run in runs
        ]
        for before, after in itertools.pairwise(path):
            if math.dist(before, after) > 45:  # a shorter arrow is all head
                sheet.arrow(*before, *after, color=color, width=2.5, gap=9)
        for i, place in enumerate(path):
            sheet.dot(*place, color, 7 if i in (0, len(path) - 1) else 4, hollow=i == 0)
        x, y = path[-1]
        sheet.text(x + right, y + down, words, SMALL, color, bold=True)
    sheet.note(476, "○ V1, small dots V2 and V3, ● V4; small TinyLlama, bf16, one H100")
    sheet.cut(75, 437)
    return sheet


@figure
def attention_memory() -> Sheet:
    """Peak memory against length, with the scores in memory and without, as in START.md."""
    study = read_json(ROOT / "results/cpu/attention_memory.json")
    lengths = [row["length"] for row in study["rows"]]
    sheet = Sheet("Memory of attention: quadratic and linear", 470)
    plot = Plot(sheet, (96, 84, 520, 290), (0, lengths[-1]), (0, 420))
    plot.axes("tokens", lengths, "MB", range(0, 401, 100))
    sides = ("scores", "scores\nin memory", RED, 0), ("fused", "fused", BLUE, -34)
    for name, words, color, rise in sides:
        points = [(row["length"], row[name] / 1e6) for row in study["rows"]]
        plot.line(*points, color=color, width=4)
        for point in points:
            sheet.dot(*plot.at(*point), color, 5)
        x, y = plot.at(*points[-1])
        words = f"{words}\n{three_digits(points[-1][1])} MB"
        sheet.text(x + 16, y + rise, words, SMALL, color, bold=True)
    heads = f"{study['config']['heads']} heads of {study['config']['head_dim']}"
    sheet.note(446, f"forward and backward, {heads}, float32, on a CPU")
    return sheet


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
            sheet.arrow(right, down + 12, right, down - 4, color=color)
            above = 12 * (2 + name.count("\n"))
            sheet.text(right, down - above, name, SMALL, color, at="middle", bold=True)
    sheet.note(474, "filled: activations kept; open: --checkpoint-blocks")
    sheet.note(508, "arrow: out of memory, which is 80 GB (dashed); bf16, one H100")
    sheet.cut(72, 436)
    return sheet


@figure
def turn_ratios() -> Sheet:
    """V1 over V2 in each turn: eager, and as one graph."""
    rows = by_side(rows_of("headline"), "shape", "precision", "mode")
    sheet = Sheet("The same ratio in five turns: V1 over V2", 450)
    plot = Plot(sheet, (250, 84, 520, 250), (0.95, 1.7), (0, 3))
    plot.axes("time of V1 / time of V2, bf16", [1 + i / 10 for i in range(8)])
    plot.line((1, 0), (1, 3), width=2, dash="6 4")
    for y, shape in zip(
        (2.5, 1.5, 0.5), [s for s in SHAPES if s != "tiny_llama, medium"], strict=True
    ):
        x, down = plot.at(0.95, y)
        sheet.text(x - 10, down, SHAPES[shape], SMALL, at="end")
        for mode, color, rise in (("eager", ORANGE, 0.16), ("graph", BLUE, -0.16)):
            sides = rows[shape, "bf16", mode]
            for ratio in ratios(sides["V1"], sides["V2"]):
                sheet.dot(*plot.at(ratio, y + rise), tint(color, 0.75), 6.5)
    for x, name, color in ((20, "eager", ORANGE), (130, "one graph", BLUE)):
        sheet.dot(x + 10, 418, color, 9)
        sheet.text(x + 28, 418, name)
    sheet.note(418, "one H100 on a shared host", 780, "end")
    sheet.cut(78, 436)
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
        write_text(FIGURES / f"{name}.svg", str(FIGURE[name]()), replace=True)
        print(f"docs/figures/{name}.svg")
    return 0


main = program(build_parser, draw)


if __name__ == "__main__":
    sys.exit(main())

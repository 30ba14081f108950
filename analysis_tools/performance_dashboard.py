#!/usr/bin/env python3
"""One HTML file with interactive charts of all results in some folders; it needs no network and no server.

  Versions      time, kernels and memory of each version, as parts of the first one's in the same turns
  Ablation      what each set of fusions gains over none of them, with the range of the turns
  Memory        peak memory against the sequence length or the batch size
  Kernel time   milliseconds of a step by what its kernels do
  Roofline      FLOP rates beside what the device reaches

Model, device and precision are chosen at the top, for all charts, so no chart mixes them; a chart with several studies
or sizes has a drop-down of its own. Ratios are from within one study; runs of their own are shown as measured. A chart
without data names the command that makes it. Nothing is measured here.

A PATH is a file, or a folder, searched with all below it: studies of compare_versions.py, fusion_ablation_study.py,
benchmark_suite.py, optimize_batch_size.py, roofline_analysis.py and bench/versions.py; results of the scripts
(*_summary.json, also several in one file); profiles of run_pytorch_profiler.py and *_flops.json, also where
run_all_profilers.sh collected them. Status 1 if one of the runs failed; the page then has all others.

Examples:
  python analysis_tools/performance_dashboard.py
  python analysis_tools/performance_dashboard.py results/ --output dashboard.html
  python analysis_tools/performance_dashboard.py profiles_tiny_llama_v2 ablation_tiny_llama_v2.json --output mine.html
"""

from __future__ import annotations

import _root

import argparse
import itertools
import json
import re
import statistics
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop import records
from workshop.ablation import set_name
from workshop.cli import ToolError, documented_parser, print_notes, run_tool
from workshop.files import ROOT, read_json, write_text
from workshop.profile.kernels import CATEGORIES
from workshop.records import ForwardFlops, Profile, Rooflines, checked
from workshop.results import Run, load_run, runs_in
from workshop.show import NOT_FINISHED
from workshop.turns import precision_of, ratios, spread

PROG = Path(__file__).name
CHARTS = {  # title, how to read it, what makes its data
    "versions": ("Versions", "Lower is better; point at a bar for what was measured.",
                 "analysis_tools/compare_versions.py --family {family}{flags}"),
    "ablation": ("Ablation of fusions", "Right of the line: faster than with none. Whiskers: the range of the turns.",
                 "analysis_tools/fusion_ablation_study.py --script {model}_v2.py{flags}"),
    "memory": ("Memory scaling", "High-water mark of training steps.",
               "analysis_tools/benchmark_suite.py --family {family} --metrics memory{flags}"),
    "kernels": ("Kernel time by category", "Each bar is a profile of its own.",
                "run_pytorch_profiler.py --script {model}_v2.py{flags}"),
    "roofline": ("Roofline", "The lines: what a large copy and a large GEMM reach on this device.",
                 "analysis_tools/roofline_analysis.py --script {model}_v2.py{flags}"),
}  # fmt: skip
FLAGS = {"fp32": "", "TF32": " --matmul-precision high", "bf16": " --use-amp", "fp16": " --use-amp --amp-dtype float16"}
# The colours of Okabe and Ito, which colour-blind people can tell apart, and greys.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#333333", "#8C8C8C", "#CFCFCF")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "cross", "star", "pentagon", "hexagon")
MEASURES = {"batch_ms": ("ms per step", ".2f"), "per_step": ("{} per step", ".0f"), "peak_mb": ("peak MB", ".0f")}
ATTENTION = {"scores": "V2, scores in memory", "flash": "V2, flash attention"}  # of bench/versions.py memory
SIZES = ("batch_size", "seq_len", "num_blocks", "num_layers", "hidden_dim", "num_seqs")  # that are always named
NOT_OURS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, argparse.ArgumentError)
Choice = tuple[str, str, str]  # model, device, precision
Figure = tuple[list[dict], dict]  # traces and layout as plotly has them


@dataclass(frozen=True)
class Panel:
    """A chart of one study or size, and what it was measured for."""

    chart: str
    choice: Choice
    study: str
    note: str
    figure: Figure

    def order(self) -> int:
        """Studies of more versions come first."""
        return -len({trace["name"] for trace in self.figure[0] if re.fullmatch(r"V\d", trace["name"])})


@dataclass(frozen=True)
class Found:
    """A run, with its row, or a profile, with milliseconds per step of each category, that was measured by itself."""

    name: str
    result: dict
    categories: dict[str, float] | None = None
    row: dict | None = None


# --- in words


def mode_of(training: Mapping) -> str:
    """How steps are launched."""
    words = ["compiled"] * bool(training.get("torch_compile")) + ["graph"] * bool(training.get("cuda_graph"))
    return " ".join(words) or "eager"


def in_words(sizes: str) -> str:
    """'--seq-len 128 --num-layers 2' as 'length 128, layers 2', 'batch_size 4' as 'batch 4'."""
    text = re.sub(r"(?<=[a-z])[-_](?=[a-z])", " ", re.sub(r"(^|\s+)--", ", ", sizes)).removeprefix(", ")
    for long, short in (("num ", ""), ("seq len", "length"), ("batch size", "batch")):
        text = text.replace(long, short)
    return text


def understood(argv: Sequence[str]) -> tuple[dict, str]:
    """What arguments of a script say of precision and mode, and the others in words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, name in (("use", "amp"), ("enable", "torch-compile"), ("enable", "cuda-graph")):
        parser.add_argument(f"--{flag}-{name}", dest=name.replace("-", "_"), action="store_true")
    for flag in ("amp-dtype", "matmul-precision", "torch-compile-mode", "device", "seed", "num-steps"):
        parser.add_argument(f"--{flag}")
    known, others = parser.parse_known_args([str(word) for word in argv])
    return {**vars(known), "use_amp": known.amp}, in_words(" ".join(others)) or "default sizes"


def model_of(*texts: str | None) -> str:
    """The first model named by a script, a shape or a file."""
    found = next((found for text in texts if text and (found := re.search(r"tiny_[a-z]+", text))), None)
    if not found:
        raise ValueError("it names no model")
    return found[0]


def device_of(content: Mapping) -> str:
    """The device of a study or result, and how many where there are several."""
    name, count = content["environment"]["device_name"], content.get("training", content).get("processes", 1)
    return f"{count} x {name}" if count > 1 else str(name)


def choice_of(result: Mapping) -> Choice:
    """What the result of a script was measured for."""
    return model_of(result["script"]), device_of(result), precision_of(result["training"])


def capital(name: str) -> str:
    """'v1 compiled' as 'V1 compiled'."""
    return name[:1].upper() + name[1:]


def sizes_of(result: Mapping, *others: str) -> str:
    """Of a run or a profile: the usual ones, and these."""
    sizes = {"batch_size": result["training"]["batch_size"], **result["config"]}
    return ", ".join(in_words(f"{key} {sizes[key]}") for key in dict.fromkeys((*SIZES, *others)) if key in sizes)


def run_name(result: Mapping) -> str:
    """Version, what is fused, and the mode unless steps are launched kernel by kernel."""
    fusions = {name.replace("_", "-"): on for name, on in (result.get("fusions") or {}).items()}
    fused = f", fused: {set_name(tuple(f for f, on in fusions.items() if on), [*fusions])}" if fusions else ""
    mode = mode_of(result["training"]).replace("eager", "")
    return capital(result["script"].rpartition("_")[2]) + fused + (f", {mode}" if mode else "")


# --- charts


def draw_versions(cells: Mapping[str, Mapping[str, dict]], absolute: bool = False) -> Figure:
    """{cell: {side: row}} as bars of time, kernels and memory: as measured, or as parts of the first side's."""
    sides = sorted({side for rows in cells.values() for side in rows}, key=lambda side: (side[:1] != "V", side))
    unit = next((row["unit"] for rows in cells.values() for row in rows.values() if row.get("unit")), "kernels")
    crowded = len(cells) > 6
    data, layout = [], {"barmode": "group", "height": 460 + 140 * crowded, "annotations": [], "legend": {"y": 1.14}}
    layout["grid"] = {"rows": 1, "columns": len(MEASURES), "pattern": "independent"}
    for axis, (key, (title, form)) in zip(("", "2", "3"), MEASURES.items(), strict=True):
        highest = 0.0
        for side, colour in zip(sides, itertools.cycle(COLOURS)):
            bars: dict[str, list] = {"x": [], "y": [], "text": [], "hovertext": []}
            for cell, rows in cells.items():
                row, base = rows.get(side), rows.get(sides[0], {})
                if row is None:
                    continue
                value = row[key] if row.get(key) is not None and "error" not in row else None
                height = value if absolute else value / base[key] if value and base.get(key) else None
                hover = [f"<b>{side}</b>", cell, "" if value is None else f"{value:{form}} {title.format(unit)}"]
                if key == "batch_ms" and height and not absolute and row is not base:
                    turns = ratios(base, row) if base.get("turns_ms") and row.get("turns_ms") else []
                    height = 1 / statistics.median(turns) if turns else height
                    hover += [f"{1 / height:.2f}x as fast as {sides[0]}", f"in turns {spread(turns)}" if turns else ""]
                hover += textwrap.wrap(" ".join(row.get("argv", ())), 70)
                shown = "" if value is None or len(sides) > 4 else f"{value:{form}}"  # of many bars as one points at it
                text = NOT_FINISHED.get(row.get("status")) or shown
                highest = max(highest, height or 0)
                label = cell if crowded else "<br>".join(textwrap.wrap(cell, 18, break_long_words=False))
                for name, item in zip(bars, (label, height or 0, text, "<br>".join(filter(None, hover))), strict=True):
                    bars[name].append(item)
            data.append({
                **bars, "type": "bar", "name": side, "legendgroup": side, "showlegend": not axis, "hoverinfo": "text",
                "marker": {"color": colour}, "textposition": "outside", "textangle": -90, "constraintext": "none",
                "cliponaxis": False, "xaxis": f"x{axis}", "yaxis": f"y{axis}",
            })  # fmt: skip
        layout[f"xaxis{axis}"] = {"type": "category"}
        layout[f"yaxis{axis}"] = {"range": [0, 1.35 * highest or 1]}
        place = {"xref": f"x{axis} domain", "yref": f"y{axis} domain", "x": 0.5, "y": 1.02, "yanchor": "bottom"}
        layout["annotations"].append({**place, "text": f"<b>{title.format(unit)}</b>", "showarrow": False})
    if not absolute:
        layout["yaxis"]["title"] = {"text": f"as a part of {sides[0]}'s"}
    return data, layout


def draw_ablation(rows: Sequence[dict]) -> Figure:
    """A point for each set of fusions: its speed-up over none in the same group, with the range of the turns."""
    none = {(row.get("seed"), row.get("group")): row for row in rows if row["fusions"] == "none"}
    sets, points = defaultdict(list), defaultdict(list)
    for row in rows:
        if row["fusions"] != "none":
            sets[row["fusions"]].append(row)
    for name, same in sets.items():
        pairs = [(none.get((row.get("seed"), row.get("group")), {}), row) for row in same]
        turns = [r for base, row in pairs if "turns_ms" in base and "turns_ms" in row for r in ratios(base, row)]
        gains = [row["speedup"] for row in same if row.get("speedup") is not None]
        gain = statistics.median(gains) if gains else 1.0
        ended = next((NOT_FINISHED[row["status"]] for row in same if "status" in row), "nothing to compare with")
        text = f"{gain:.2f}x" if gains else ended
        hover = [f"<b>{name}</b>: {text}", *([f"in turns {spread(turns)}"] if turns else [])]
        hover += [f"{row['batch_ms']:.2f} ms per step" for row in same if row.get("batch_ms")]
        ends = {"array": max([*turns, gain]) - gain, "arrayminus": gain - min([*turns, gain])}
        for key, item in {"x": gain, "y": name, "text": text, "hovertext": "<br>".join(hover), **ends}.items():
            points[key].append(item)
    trace = {
        **points, "type": "scatter", "mode": "markers+text", "name": "sets", "textposition": "top center",
        "marker": {"size": 10, "color": COLOURS[0]}, "hoverinfo": "text", "cliponaxis": False, "showlegend": False,
        "error_x": {"type": "data", "symmetric": False, **{key: points.pop(key) for key in ("array", "arrayminus")}},
    }  # fmt: skip
    line = {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "#555"}}
    order = {"range": [len(sets) - 0.5, -0.9], "categoryorder": "array", "categoryarray": [*sets]}
    layout = {"height": max(440, 110 + 34 * len(sets)), "shapes": [line], "yaxis": {"type": "category", **order}}
    return [trace], layout | {"xaxis": {"title": {"text": "times as fast as with none"}}}


def draw_memory(lines: Mapping[str, Mapping[float, dict]], title: str) -> Figure:
    """Peak MB of each line against a size: {name: {size: {"peak_mb", "status"}}}."""
    data, ticks = [], []
    for at in sorted({at for line in lines.values() for at in line}):
        if not ticks or at > 1.5 * ticks[-1]:  # closer ones would be written over each other
            ticks.append(at)
    for index, (name, line) in enumerate(lines.items()):
        there = sorted(at for at, point in line.items() if point.get("peak_mb") is not None)
        look = {"color": COLOURS[index % 8], "dash": ("solid", "dash", "dot")[index // 8 % 3]}
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": name, "line": look, "x": there,
            "y": [line[at]["peak_mb"] for at in there], "hovertemplate": "%{y:,.0f} MB",
            "marker": {"size": 9, "symbol": SYMBOLS[index % len(SYMBOLS)]},
        })  # fmt: skip
    axis = {"type": "log", "tickvals": ticks, "ticktext": [f"{at:g}" for at in ticks], "title": {"text": title}}
    layout = {"height": 440, "hovermode": "x unified", "xaxis": axis}
    return data, layout | {"yaxis": {"title": {"text": "peak memory, MB"}, "rangemode": "tozero", "tickformat": ","}}


def draw_kernels(bars: Mapping[str, Mapping[str, float]], unit: str) -> Figure:
    """Milliseconds per step by category, a bar for each profile."""
    data = []
    for kind, colour in zip(CATEGORIES, COLOURS, strict=True):
        values = {name: parts[kind] for name, parts in bars.items() if parts.get(kind)}
        hover = [f"{kind}: {ms:.3g} ms, {ms / sum(bars[name].values()):.1%}" for name, ms in values.items()]
        data.append({
            "type": "bar", "orientation": "h", "name": kind, "x": [*values.values()], "y": [*values],
            "width": min(0.6, 0.15 * len(bars)), "hovertext": hover, "hoverinfo": "text",
            "marker": {"color": colour, "line": {"color": "white", "width": 1}},
        })  # fmt: skip
    order = {"range": [len(bars) - 0.5, -0.5], "categoryorder": "array", "categoryarray": [*bars]}
    layout = {"barmode": "stack", "height": max(520, 200 + 60 * len(bars)), "yaxis": {"type": "category", **order}}
    return [t for t in data if t["x"]], layout | {"xaxis": {"title": {"text": f"ms of {unit} per step"}}}


def draw_roofline(points: Mapping[str, Mapping], ceilings: Mapping) -> Figure:
    """TFLOP/s over FLOP per byte: both ceilings, and each point that has `flop`, `bytes` and `ms`."""
    top, bandwidth = ceilings["gemm_tflops"], ceilings["copy_gb_per_s"]
    points = {name: row for name, row in points.items() if all(row.get(key) for key in ("flop", "bytes", "ms"))}
    places = {name: row["flop"] / row["bytes"] for name, row in points.items()}
    ridge, data = 1e3 * top / bandwidth, []
    low, high = min([ridge, *places.values()]) / 6, max([ridge, *places.values()]) * 5
    copy, gemm = f"copy {bandwidth:,.0f} GB/s", f"GEMM {top:.3g} TFLOP/s ({ceilings['precision']})"
    for name, dash, ends in ((copy, "solid", [low, ridge]), (gemm, "dash", [ridge, high])):
        heights = [min(top, bandwidth * x / 1e3) for x in ends]
        line = {"color": "#333", "dash": dash}
        data.append({"type": "scatter", "mode": "lines", "name": name, "x": ends, "y": heights, "line": line})
    for index, (name, x) in enumerate(places.items()):
        ms = points[name]["ms"]
        y = points[name]["flop"] / ms / 1e9
        rates = f"{y:.3g} TFLOP/s, {y / min(top, bandwidth * x / 1e3):.0%} of the line"
        look = {"size": 12, "color": COLOURS[index % 9], "symbol": SYMBOLS[index % len(SYMBOLS)]}
        data.append({
            "type": "scatter", "mode": "markers", "name": name, "x": [x], "y": [y], "marker": look, "hoverinfo": "text",
            "hovertext": f"<b>{name}</b><br>{rates}<br>{x:.3g} FLOP per byte<br>{ms:.3g} ms",
        })  # fmt: skip
    axes = {"xaxis": "FLOP per byte moved", "yaxis": "TFLOP/s"}
    form = {"type": "log", "tickvals": [digit * 10.0**power for power in range(-6, 6) for digit in (1, 2, 5)]}
    form["ticktext"] = [f"{value:,g}" for value in form["tickvals"]]
    return data, {"height": 520, **{axis: {**form, "title": {"text": title}} for axis, title in axes.items()}}


# --- from files to charts


@dataclass(frozen=True)
class Study:
    """Rows that were measured in one process on one device, from a file."""

    name: str
    path: Path
    content: dict

    def choice(self, row: Mapping, argv: Sequence[str], script: str | None) -> tuple[Choice, str, str]:
        """What a row was measured for, its sizes, its mode."""
        training, sizes = understood(argv)
        attention = "tiny_llama" if ATTENTION.keys() <= row.keys() else None
        texts = (script, row.get("shape"), f"tiny_{self.content.get('family', '')}", attention, self.path.stem)
        choice = model_of(*texts), device_of(self.content), str(row.get("precision") or precision_of(training))
        return choice, row.get("shape", "").partition(", ")[2] or sizes, mode_of(training)

    def panels(self) -> Iterator[Panel]:
        """Its charts; none if it is about something else."""
        first = self.content["rows"][0]
        kinds = {("fusions", "speedup"): self.ablations, ("kernels", "ceilings"): self.steps}
        return next((of for keys, of in kinds.items() if first.keys() >= {*keys}), self.comparisons)()

    def ablations(self) -> Iterator[Panel]:
        """Speed-ups of sets of fusions, a chart for each precision."""
        groups, rows = defaultdict(list), self.content["rows"]
        names = {"all-fusion", *(row["fusions"].removeprefix("only ") for row in rows)}
        for row in rows:
            argv = [word for word in row["argv"] if re.sub("^--(en|dis)able-", "", word) not in names]
            groups[self.choice(row, argv, row.get("script"))].append(row)
        for (choice, sizes, mode), same in groups.items():
            yield Panel("ablation", choice, self.name, f"{capital(sizes)}, {mode}.", draw_ablation(same))

    def steps(self) -> Iterator[Panel]:
        """Kernels of the newest version, and its step in the roofline (bench/operations.py step)."""
        for row in self.content["rows"]:
            (choice, sizes, _), parts = self.choice(row, row.get("argv", ()), row.get("script")), Counter()
            for kernel in row["kernels"]:
                parts[kernel["category"]] += kernel["us"] / 1e3
            study, name = f"{self.name}: {sizes}", "newest version"
            yield Panel("kernels", choice, study, f"{capital(sizes)}.", draw_kernels({name: parts}, "kernels"))
            figure = draw_roofline({f"{name}, whole step": row}, row["ceilings"])
            yield Panel("roofline", choice, study, f"{capital(sizes)}.", figure)

    def comparisons(self) -> Iterator[Panel]:
        """Versions side by side, and their memory over sizes."""
        cells, points = defaultdict(lambda: defaultdict(dict)), defaultdict(list)
        for row in self.content["rows"]:
            sides = {k: v for k, v in row.items() if isinstance(v, dict) and {"batch_ms", "error"} & v.keys()}
            if not sides and {"script", "batch_size"} <= row.keys():  # a row for each side
                sides = {row.get("model") or row["script"].rpartition("_")[2]: row}
            place = {key: row.get(key, self.content.get(key)) for key in ("batch_size", "seq_len")}
            first = next(iter(sides.values()), {})
            if not sides or ("script" not in first and not any(place.values())):
                continue  # about something else
            argv = first.get("argv", self.content.get("argv", ()))
            choice, sizes, mode = self.choice(row, argv, first.get("script"))
            if {"model", *place} <= row.keys():  # the name says what is compiled, and the place what differs
                sizes = ", ".join(in_words(f"{key} {value}") for key, value in place.items())
                mode = mode.removeprefix("compiled ")
            for side, of in sides.items():
                if "script" in of and {"batch_ms", "error"} & of.keys():
                    cells[choice][f"{sizes}, {mode}"][capital(side)] = of
                points[choice].append({**of, **place, "series": ATTENTION.get(side, capital(side))})
        for choice, by_cell in cells.items():
            if any(len(sides) > 1 for sides in by_cell.values()):
                note = f"{self.content['rounds']} turns." if "rounds" in self.content else ""
                yield Panel("versions", choice, self.name, note, draw_versions(by_cell))
        for choice, found in points.items():
            sizes = understood(self.content["argv"])[1] if "argv" in self.content else ""
            yield from memory_panels(found, choice, self.name, sizes)


def memory_panels(points: Sequence[dict], choice: Choice, study: str, sizes: str) -> Iterator[Panel]:
    """Lines of `peak_mb` of each `series` by `seq_len` and by `batch_size`, where one of them has several."""
    names = {"seq_len": "sequence length", "batch_size": "batch size"}
    for x, other in itertools.permutations(names):
        lines: dict[tuple, dict[float, dict]] = defaultdict(dict)
        for point in points:
            if point.get(x) is not None and (point.get("peak_mb") is not None or point.get("status") == "oom"):
                lines[point["series"], point.get(other)].setdefault(point[x], point)
        lines = {key: line for key, line in lines.items() if len(line) > 1}
        if not lines:
            continue
        fixed = {value for _, value in lines}
        named = {s if len(fixed) == 1 else f"{s}, {names[other]} {value}": line for (s, value), line in lines.items()}
        gone = [f"{n} at {at:g}" for n, line in named.items() for at, p in line.items() if p.get("status") == "oom"]
        notes = [sizes, f"{names[other]} {fixed.pop()}" if len(fixed) == 1 and None not in fixed else ""]
        notes += [f"out of memory: {'; '.join(gone)}"] if gone else []
        note = "".join(f"{capital(text)}. " for text in notes if text).strip()
        yield Panel("memory", choice, f"{study}, by {names[x]}", note, draw_memory(named, names[x]))


def found_panels(found: Sequence[Found]) -> Iterator[Panel]:
    """Runs and profiles that were measured by themselves: those of one size beside each other; memory over sizes."""
    values, groups, points = defaultdict(set), defaultdict(dict), defaultdict(list)
    for each in found:
        for key, value in each.result["config"].items():
            values[choice_of(each.result), key].add(value)
    for each in found:
        result, name, choice = each.result, each.name, choice_of(each.result)
        sizes = sizes_of(result, *(key for key in result["config"] if len(values[choice, key]) > 1))
        if each.categories is not None:
            group, name = groups[choice, sizes, result["unit"]], f"{run_name(result)}<br><sub>{name}</sub>"
            group[name if name not in group else f"{name} ({len(group)})"] = each.categories
            continue
        group, name = groups[choice, sizes, None], f"{name}, {mode_of(result['training'])}".removesuffix(", eager")
        side = capital(result["script"].rpartition("_")[2])
        group[name if name not in group else f"{name} ({len(group)})"] = {side: each.row}
        place = {"batch_size": result["training"]["batch_size"], "seq_len": result["config"]["seq_len"]}
        others = ", ".join(part for part in sizes.split(", ") if not part.startswith(("batch ", "length ")))
        points[choice, others].append({**each.row, **place, "series": run_name(result)})
    for (choice, sizes, unit), group in groups.items():
        if unit:
            yield Panel("kernels", choice, f"profiles: {sizes}", "", draw_kernels(group, unit))
        else:
            note = "Each run was measured by itself: no ratios."
            yield Panel("versions", choice, f"single runs: {sizes}", note, draw_versions(group, absolute=True))
    for (choice, others), several in points.items():
        yield from memory_panels(several, choice, f"single runs: {others}", "")


def read_scripts_file(path: Path, name: str, content: dict) -> Iterator[Panel | Found]:
    """A file with a schema version: a run, a profile, FLOPs of modules, or roofline_analysis.py's."""
    if "rows" in content:
        checked(Rooflines, content, path)
        groups = defaultdict(list)
        for run in content.get("runs", ()):  # a profile of rocprof-compute tells no model and device
            groups[choice_of(run)].append(run)
        for choice, runs in groups.items():
            labels = {run["script"]: f"{run_name(run).partition(',')[0]} " * (len(runs) > 1) for run in runs}
            points = {f"{labels[r['script']]}{r['group']}": r for r in content["rows"] if r["script"] in labels}
            note = f"A training step of {' and of '.join(map(run_name, runs))}; {sizes_of(runs[0])}."
            yield Panel("roofline", choice, name, note, draw_roofline(points, runs[0]["ceilings"]))
    elif "modules" in content:
        checked(ForwardFlops, content, path)
        if content.get("ceilings"):  # without --generate-roofline there are none
            points = {row["module"]: row for row in content["modules"]}
            note = f"A forward pass of {run_name(content)} by module; {sizes_of(content)}."
            yield Panel("roofline", choice_of(content), name, note, draw_roofline(points, content["ceilings"]))
    elif "categories" in content:
        checked(Profile, content, path)
        times = {kind: row["ms_per_step"] for kind, row in content["categories"].items()}
        yield Found(name.removesuffix(f"/{content['script']}_profile.json"), content, times)
    else:
        where = Path(name).parent.as_posix()
        yield from found_in(load_run(path, where if where != "." else path.stem.removesuffix("_summary")))


def found_in(run: Run) -> Iterator[Found | str]:
    """A run, or a line on one that failed; nothing of one that ended before it had a model."""
    if run.status == "failed":
        yield f"{run.name} failed: {run.result['error']} ({run.path})"
    elif run.result["config"]:
        yield Found(run.name, run.result, row=run.row())


def only(kind: type, found: Sequence) -> list:
    """Those of one type."""
    return [each for each in found if isinstance(each, kind)]


def read(path: Path, name: str) -> list[Panel | Found | str]:
    """What is in a file, and a line for each side of a study that failed; empty if no chart shows it."""
    content = read_json(path)
    try:
        if "schema_version" in content:
            found = [*read_scripts_file(path, name, content)]
        elif isinstance(content.get("runs"), dict):
            runs = (Run(key, path, result) for key, result in runs_in(path, content).items())
            found = [each for run in runs for each in found_in(run)]
        elif isinstance(content.get("rows"), list) and isinstance(content.get("environment"), dict):
            if not checked(records.Study, content, path)["rows"]:
                raise ToolError(f"{path}: a study without a row")
            sides = [side for row in content["rows"] for side in (row, *row.values()) if isinstance(side, dict)]
            failed = [side for side in sides if side.get("status") == "failed" and "script" in side]  # not a library
            found = [f"{side['script']} failed: {side.get('error')} ({path})" for side in failed]
            found += Study(name, path, content).panels()
        else:
            return []
        panels = [*only(Panel, found), *found_panels(only(Found, found))]
        json.dumps([panel.figure for panel in panels], allow_nan=False)  # what is wrong shows while its file is known
    except NOT_OURS as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ToolError(f"{path}: not as our tools write it, or by an older version: {reason}") from error
    return found


def files_in(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Each file once, with its name below the folder it was found in."""
    seen = set()
    for top in paths:
        if not top.exists():
            raise ToolError(f"{top}: no such file or directory")
        found = sorted(top.rglob("*.json")) if top.is_dir() else [top]
        for path in found:
            inside = path.relative_to(top).parts if top.is_dir() else ()
            aside = any(part.startswith(".") or part.endswith((".failed", ".previous")) for part in inside)
            profiled = path.name.endswith("_summary.json") and any(part.startswith("rocprof") for part in inside)
            if not aside and not profiled and path.resolve() not in seen:  # a profiler makes a run slower
                seen.add(path.resolve())
                yield path, "/".join(inside) or path.name


def page_of(panels: Sequence[Panel], library: str) -> str:
    """The page as HTML, with plotly.js in it. It begins with the choice for which most charts have data."""
    names, columns = ("model", "device", "precision"), zip(*(panel.choice for panel in panels), strict=True)
    rank = {precision: str(index) for index, precision in enumerate(FLAGS)}
    values = [sorted(set(column), key=lambda value: rank.get(value, value)) for column in columns]
    charts_of = defaultdict(set)
    for panel in panels:
        charts_of[panel.choice].add(panel.chart)
    start = max(itertools.product(*values), key=lambda choice: len(charts_of[choice]))
    filters = [{"name": n, "values": v, "start": s} for n, v, s in zip(names, values, start, strict=True)]
    charts = []
    for chart, (title, hint, command) in CHARTS.items():
        own = [vars(panel) for panel in sorted(panels, key=Panel.order) if panel.chart == chart]
        charts.append({"id": chart, "title": title, "hint": hint, "command": command, "panels": own})
    data = json.dumps({"filters": filters, "flags": FLAGS, "charts": charts}, allow_nan=False).replace("<", "\\u003c")
    before, between, after = Path(__file__).with_suffix(".html").read_text().split("/*HERE*/")
    return "".join([before, library, between, data, after])


def build(args: argparse.Namespace) -> int:
    """Read all files and write the page; returns the exit status."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ToolError(f"the page needs plotly (pip install plotly): {error}", status=4) from error
    if args.output.suffix != ".html":
        raise ToolError(f"--output {args.output}: must end in .html")
    everything, left_out = [], []
    for path, name in files_in(args.paths):
        found = read(path, name)
        everything += found
        left_out += [path] if not found else []
        if not found and path in args.paths:
            raise ToolError(f"{path}: no chart shows what is in this file")
    failed = only(str, everything)
    panels = [*only(Panel, everything), *found_panels(only(Found, everything))]
    if not panels and not failed:
        raise ToolError(f"{', '.join(map(str, args.paths))}: no results in there that a chart shows")
    if panels:
        write_text(args.output, page_of(panels, get_plotlyjs()))
        there = Counter(panel.chart for panel in panels)
        print(f"Written: {args.output} ({', '.join(f'{chart} {there[chart]}' for chart in CHARTS)})")
    if left_out:
        print_notes(PROG, f"no chart shows what is in {len(left_out)} of the files, first {left_out[0]}")
    for line in failed:
        print(f"{PROG}: {line}", file=sys.stderr)
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = documented_parser(PROG, __doc__)
    paths = {"nargs": "*", "type": Path, "default": [ROOT / "results"], "metavar": "PATH"}
    parser.add_argument("paths", **paths, help="files and folders (default: results/ of the repository)")
    output = {"type": Path, "default": Path("dashboard.html"), "metavar": "FILE.html"}
    parser.add_argument("--output", **output, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    return run_tool(PROG, lambda: build(args))


if __name__ == "__main__":
    sys.exit(main())

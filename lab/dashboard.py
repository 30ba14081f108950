"""The dashboard: what result files have for it, as panels: each a chart for a model, device and
precision, in HTML."""

import io
import itertools
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from lab import records
from lab.cli import ToolError
from lab.files import read_json
from lab.profile.ceilings import Ceilings
from lab.profile.kernels import CATEGORIES
from lab.records import Run, baseline_in_turns, checked, fused_in, load_run, runs_in
from lab.script import mode_of, model_and_version, precision_of
from lab.show import drawing, ended
from lab.study import Ablated, set_name, unit_of
from lab.turns import ratios, spread

OFF = "all off"  # the side of --compare-fusion that comes first
VERSIONS = {"V1": "#8a8f94", "V2": "#56b4e9", "V3": "#0072b2", "V4": "#d55e00"}
# The colours of Okabe and Ito, which colour-blind people can tell apart, and greys.
KINDS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442"]
KINDS += ["#333333", "#8c8c8c", "#cfcfcf"]
COLOURS = dict(zip(CATEGORIES, KINDS, strict=True))
MEASURES = {"batch_ms": "ms per step", "per_step": "{} per step", "peak_mb": "peak MB"}
Cells = Mapping[str, Mapping[str, dict]]  # of each sizes and mode, a row of each version


def numbers_in(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def bar(share: float, colour: str) -> str:
    """A bar as a part of its place."""
    return f'<i style="width:{100 * share:.1f}%;background:{colour}"></i>'


def table(header: Sequence[str], lines: Sequence[str]) -> str:
    """Lines of HTML below a header, whose first column holds names."""
    titles = "".join(f"<th>{title}</th>" for title in header)
    return f"<table><tr><th></th>{titles}</tr>{''.join(lines)}</table>"


def draw_bars(cells: Cells, measures: Sequence[str], one_scale: bool = False) -> str:
    """Numbers with a bar each, as a part of the longest of its group or of all."""
    every = [row for sides in cells.values() for row in sides.values()]
    unit = unit_of(every)
    lines = []
    for cell, sides in cells.items():
        lines.append(f'<tr><th class="group" colspan="3">{escape(cell)}</th></tr>')
        names = sorted(
            sides, key=lambda name: (name != OFF, name[:1] != "V", numbers_in(name), name)
        )
        for name in names:
            row, colour = sides[name], VERSIONS.get(name[:2], KINDS[-1])
            asked = escape(" ".join(row.get("argv", ())))
            lines.append(f'<tr title="{asked}"><th>{escape(name)}</th>')
            for key in measures:
                value = row.get(key) if "error" not in row else None
                others = every if one_scale else sides.values()
                number, length = ended(row) or "-", ""
                if value:
                    number = f"{value:,.2f}" if key == "batch_ms" else f"{value:,.0f}"
                    length = bar(value / max(other.get(key) or 0 for other in others), colour)
                if value and key == "batch_ms":
                    number += f" <small>{beside(row, sides[names[0]])}</small>"
                lines.append(f"<td>{number}{length}</td>")
    return table([MEASURES[key].format(unit) for key in measures], lines)


def beside(row: dict, first: dict) -> str:
    """How many times as fast as the first version of a group; or the range of runs by
    themselves."""
    if alike := row.get("alike"):
        return f"{len(alike)} runs: {min(alike):.2f} to {max(alike):.2f}" if len(alike) > 1 else ""
    if row is first or not first.get("batch_ms"):
        return ""
    if turns := ratios(first, row):
        return f"{statistics.median(turns):.2f}x ({spread(turns)})"
    return f"{first['batch_ms'] / row['batch_ms']:.2f}x"


def draw_ablation(rows: Sequence[dict]) -> str:
    """A point for each set of fusions: its speed-up over none, and the range of the turns."""
    none = {(row.get("seed"), row.get("group")): row for row in rows if not row["on"]}
    turns = {row["side"]: [] for row in rows if row["on"]}
    for row in rows:
        if row["side"] in turns:
            turns[row["side"]] += ratios(none.get((row.get("seed"), row.get("group")), {}), row)
    every = [1, 1.01, *itertools.chain(*turns.values())]
    low, high = min(every), max(every)
    lines = []
    for name, gains in turns.items():
        ends = filter(None, (ended(row) for row in rows if row["side"] == name))
        axis, text = "", next(ends, "nothing to compare with")
        if gains:
            marks = 1, min(gains), max(gains), statistics.median(gains)
            line, start, end, point = (3 + 92 * (mark - low) / (high - low) for mark in marks)
            axis = f'<b style="left:{line:.1f}%"></b><u style="left:{point:.1f}%"></u>'
            axis += f'<s style="left:{start:.1f}%;width:{end - start:.1f}%"></s>'
            text = f"{marks[-1]:.2f}x <small>{spread(gains)}</small>"
        lines.append(f'<tr><th>{escape(name)}</th><td class="axis">{axis}</td><td>{text}</td></tr>')
    return table(["", "as fast as with none"], lines)


def draw_kernels(cells: Cells, unit: str) -> str:
    """A bar of its categories for each profile, with their numbers below it."""
    longest = max(row["batch_ms"] for bars in cells.values() for row in bars.values())
    html = []
    for cell, bars in cells.items():
        html.append(f"<h3>{escape(cell)}</h3>")
        for name, row in bars.items():
            parts = {kind: ms for kind, ms in row["categories"].items() if ms > 0}
            stack = "".join(bar(ms / longest, COLOURS[kind]) for kind, ms in parts.items())
            numbers = (f"<span>{bar(1, COLOURS[k])}{k} {ms:.2f}</span>" for k, ms in parts.items())
            total = f"{row['batch_ms']:.2f} ms of {unit} <small>{beside(row, row)}</small>"
            html.append(f'<p><b>{escape(name)}</b> {total}</p><div class="stack">{stack}</div>')
            html.append(f'<p class="legend">{" ".join(numbers)}</p>')
    return "".join(html)


def draw_roofline(points: Mapping[str, Mapping], measured: Mapping) -> str:
    """TFLOP/s over FLOP per byte: both ceilings, and each point with `flop`, `bytes` and `ms`."""
    from lab.profile import roofline

    pyplot, text = drawing(), io.StringIO()
    ceilings = Ceilings(**{"gemm_size": 0, "copy_bytes": 0, **measured})
    rows = {
        name: roofline.rates(row["flop"], row["bytes"], row["ms"], ceilings)
        for name, row in points.items()
        if all(row.get(key) for key in ("flop", "bytes", "ms"))
    }
    with pyplot.rc_context({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "roofline"}):
        figure, axes = pyplot.subplots(figsize=(4.8, 3.6), layout="constrained")
        roofline.draw_roofline(axes, rows, ceilings)
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        figure.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


# --- panels

SPEED = ("batch_ms", "per_step")
ROWS = {"on": Ablated, "ceilings": records.WholeStep}  # of a study with such a field
ATTENTION = {"scores": "V2, scores in memory", "flash": "V2, flash attention"}  # of memory.json
SIZES = ("batch_size", "seq_len", "num_blocks", "num_layers", "hidden_dim", "num_seqs")
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
Choice = tuple[str, str, str]  # model, device, precision
# what was measured by itself: name and result, with a run's row, or a profile's ms per category
Found = dict


@dataclass(frozen=True)
class Panel:
    """A chart of one study, as HTML, and what it was measured for."""

    chart: str
    choice: Choice
    study: str
    note: str
    html: str

    def order(self) -> tuple[bool, int]:
        """Studies with turns enough to tell come first, and of these those of more versions."""
        return "too few turns" in self.html, -len(set(re.findall(r">V\d<", self.html)))


# --- in words


def in_words(sizes: str) -> str:
    """'seq-len 128, num_layers 2' as 'length 128, layers 2'."""
    text = re.sub(r"(?<=[a-z])[-_](?=[a-z])", " ", sizes)
    for long, short in (("num ", ""), ("seq len", "length"), ("batch size", "batch")):
        text = text.replace(long, short)
    return text.strip()


def device_of(content: Mapping) -> str:
    """The device of a study or result, and how many where there are several."""
    name = content["environment"]["device_name"]
    count = content.get("training", content).get("processes", 1)
    return f"{count} x {name}" if count > 1 else str(name)


def choice_of(result: Mapping) -> Choice:
    model, _ = model_and_version(result["script"])
    return model, device_of(result), precision_of(result["training"])


def capital(name: str) -> str:
    """'v1 compiled' as 'V1 compiled'."""
    return (name[:1].upper() + name[1:]).replace("Hugging face", "Hugging Face")


def sizes_of(result: Mapping, others: Sequence[str] = ()) -> str:
    """Of a run or a profile: the usual ones, and these."""
    sizes = {"batch_size": result["training"]["batch_size"], **result["config"]}
    names = dict.fromkeys((*SIZES, *others))
    return ", ".join(in_words(f"{key} {sizes[key]}") for key in names if key in sizes)


def run_name(result: Mapping) -> str:
    """Version, what is fused, and the mode unless steps are launched kernel by kernel."""
    fusions = [name.replace("_", "-") for name in result.get("fusions") or ()]
    model, version = model_and_version(result["script"])
    name, mode = version or model, mode_of(result["training"])
    if fusions:
        name += f", fused: {set_name(tuple(fused_in(result)), fusions)}"
    return name if mode == "eager" else f"{name}, {mode}"


@dataclass(frozen=True)
class Study:
    """Rows that were measured in one process on one device, from a file."""

    name: str
    content: dict

    def choice(self, row: Mapping) -> Choice:
        """What a row was measured for."""
        return row["model"], device_of(self.content), row.get("precision", "fp32")

    def sizes(self, row: Mapping) -> str:
        """The sizes of a row in words, or their name."""
        if shape := row.get("shape"):
            return shape.removeprefix(f"{row['model']}, ")
        sizes = {key: row.get(key, self.content.get(key)) for key in ("batch_size", "seq_len")}
        return ", ".join(in_words(f"{key} {value}") for key, value in sizes.items() if value)

    def panels(self) -> Iterator[Panel]:
        first = self.content["rows"][0]
        if "on" in first:
            return self.ablations()
        return self.steps() if "ceilings" in first else self.comparisons()

    def ablations(self) -> Iterator[Panel]:
        """Speed-ups of sets of fusions, a chart for each precision."""
        groups = defaultdict(list)
        for row in self.content["rows"]:
            groups[self.choice(row), self.sizes(row), row["mode"]].append(row)
        for (choice, sizes, mode), same in groups.items():
            note = f"{capital(sizes)}, {mode}."
            yield Panel("ablation", choice, self.name, note, draw_ablation(same))

    def steps(self) -> Iterator[Panel]:
        """Kernels of a whole step, and its place under the roofline (bench/operations.py step)."""
        for row in self.content["rows"]:
            choice, sizes = self.choice(row), self.sizes(row)
            name, parts = f"{row['version']}, whole step", Counter()
            for kernel in row["kernels"]:
                parts[kernel["category"]] += kernel["us"] / 1e3
            study, ms = f"{self.name}: {sizes}", row["batch_ms"]
            profile = {"batch_ms": parts.total(), "categories": parts}
            note = f"The step takes {ms:.2f} ms; kernels that run at the same time are added up."
            html = draw_kernels({sizes: {name: profile}}, "kernels")
            yield Panel("kernels", choice, study, note, html)
            html = draw_roofline({name: {**row, "ms": ms}}, row["ceilings"])
            yield Panel("roofline", choice, study, "", html)

    def comparisons(self) -> Iterator[Panel]:
        """Versions side by side, and their memory over sizes."""
        cells, memory = (defaultdict(lambda: defaultdict(dict)) for _ in range(2))
        for row in self.content["rows"]:
            ours = "model" in row and {"batch_ms", "error"} & row.keys()
            if not ours or not (sizes := self.sizes(row)):
                continue  # about something else
            side = row.get("side") or row.get("version") or row["script"]
            mode = row.get("mode", "eager")
            if "compiled" in side:  # the name says it
                mode = mode.removeprefix("compiled ")
            if "script" in row:
                cells[self.choice(row)][f"{sizes}, {mode}"][capital(side)] = row
            memory[self.choice(row)][f"{sizes}, {mode}"][ATTENTION.get(side, capital(side))] = row
        note = f"{self.content['rounds']} turns." if "rounds" in self.content else ""
        for choice, groups in cells.items():
            if any(len(sides) > 1 for sides in groups.values()):
                yield Panel("versions", choice, self.name, note, draw_bars(groups, SPEED))
        for choice, groups in memory.items():
            yield from memory_panel(groups, choice, self.name)


def memory_panel(cells: Cells, choice: Choice, study: str) -> Iterator[Panel]:
    """Peak memory by size, where it was measured; sizes of a single version are one group."""
    cells = {cell: cells[cell] for cell in sorted(cells, key=numbers_in)}
    names = {name for sides in cells.values() for name in sides}
    if len(names) == 1:
        cells = {name: {cell: sides[name] for cell, sides in cells.items()} for name in names}
    if any(row.get("peak_mb") for sides in cells.values() for row in sides.values()):
        yield Panel("memory", choice, study, "", draw_bars(cells, ["peak_mb"], one_scale=True))


def pairs_in(found: Sequence[Found]) -> Iterator[tuple[Found, Found]]:
    """What --compare-fusion measured in turns: each run with its own baseline."""
    runs = [each for each in found if "run" in each]
    for each in runs:
        if before := baseline_in_turns(each["run"], [other["run"] for other in runs]):
            yield each, next(other for other in runs if other["run"] is before)


def found_panels(found: Sequence[Found]) -> Iterator[Panel]:
    """Panels of runs and profiles: two that were measured in turns beside each other; otherwise
    those of the same settings are one bar."""
    pairs = [*pairs_in(found)]
    for one, before in pairs:
        choice, sides = choice_of(one["result"]), {OFF: before, run_name(one["result"]): one}
        cells = {f"{sizes_of(one['result'])} ({one['run'].path.parent.name})": sides}
        note = "Both sides in turns, by --compare-fusion."
        yield Panel("versions", choice, "pairs", note, draw_bars(cells, SPEED))
        yield from memory_panel(cells, choice, "pairs")
    paired = [each for pair in pairs for each in pair]
    found = [each for each in found if not any(each is other for other in paired)]
    values, alike = defaultdict(set), defaultdict(list)
    for each in found:
        for key, value in each["result"]["config"].items():
            values[choice_of(each["result"]), key].add(value)
    for each in found:
        result, choice = each["result"], choice_of(each["result"])
        differing = [key for key in result["config"] if len(values[choice, key]) > 1]
        unit = result["unit"] if "categories" in each else None
        alike[choice, unit, sizes_of(result, differing), run_name(result)].append(each)
    charts = defaultdict(lambda: defaultdict(dict))
    by_sizes = sorted(alike.items(), key=lambda item: numbers_in(item[0][2]))
    for (choice, unit, sizes, name), several in by_sizes:
        several.sort(key=lambda each: each.get("batch_ms") or math.inf)
        times = [each["batch_ms"] for each in several if each.get("batch_ms")]
        middle = several[(len(several) - 1) // 2]
        row = {**middle, "argv": [each["name"] for each in several], "alike": times}
        charts[choice, unit][sizes][name] = row
    for (choice, unit), cells in charts.items():
        if unit:
            yield Panel("kernels", choice, "profiles", "", draw_kernels(cells, unit))
        else:
            note = "Each run was measured by itself: no ratios."
            yield Panel("versions", choice, "single runs", note, draw_bars(cells, SPEED))
            yield from memory_panel(cells, choice, "single runs")


def read_scripts_file(path: Path, name: str, content: dict) -> Iterator[Panel | Found | str]:
    """A file with a schema version: a run, a profile, FLOPs of modules, rooflines."""
    if "rows" in content:
        checked(records.Rooflines, content, path)
        groups = defaultdict(list)
        for run in content.get("runs", ()):  # rocprof-compute tells no model and device
            groups[choice_of(run)].append(run)
        for choice, runs in groups.items():
            versions = {run["script"]: model_and_version(run["script"])[1] for run in runs}
            rows = [row for row in content["rows"] if row["script"] in versions]
            before = {name: f"{version} " * (len(runs) > 1) for name, version in versions.items()}
            points = {before[row["script"]] + row["group"]: row for row in rows}
            names = " and of ".join(map(run_name, runs))
            note = f"A training step of {names}; {sizes_of(runs[0])}."
            yield Panel("roofline", choice, name, note, draw_roofline(points, runs[0]["ceilings"]))
    elif "modules" in content:
        checked(records.ForwardFlops, content, path)
        if content.get("ceilings"):  # without --generate-roofline there are none
            points = {row["module"].rpartition("*.")[2]: row for row in content["modules"]}
            note = f"A forward pass of {run_name(content)} by module; {sizes_of(content)}."
            html = draw_roofline(points, content["ceilings"])
            yield Panel("roofline", choice_of(content), name, note, html)
    elif "categories" in content:
        checked(records.Profile, content, path)
        parts = {kind: row["ms_per_step"] for kind, row in content["categories"].items()}
        profile = {"batch_ms": sum(parts.values()), "categories": parts}
        yield {"name": name, "result": content, **profile}
    else:
        yield from found_in(load_run(path))


def found_in(run: Run) -> Iterator[Found | str]:
    """A run, or a line on one that failed; nothing of one that ended before it had a model."""
    if run.status == "failed":
        yield f"{run.name} failed: {run.result['error']} ({run.path})"
    elif run.result["config"]:
        yield {"name": run.name, "result": run.result, "run": run, **run.row()}


def only(kind: type, found: Sequence) -> list:
    return [each for each in found if isinstance(each, kind)]


def read(path: Path, name: str) -> list[Panel | Found | str]:
    """What is in a file, and a line for each side that failed; nothing if no chart shows it."""
    content = read_json(path)
    try:
        if "chains" in content:  # find_fusions.py: no run of a version
            return []
        if "schema_version" in content:
            found = [*read_scripts_file(path, name, content)]
        elif isinstance(content.get("runs"), dict):
            found = [each for run in runs_in(path, content).values() for each in found_in(run)]
        elif isinstance(content.get("rows"), list) and isinstance(content.get("environment"), dict):
            if not (rows := content["rows"]):
                raise ToolError(f"{path}: a study without a row")
            if not (isinstance(rows[0], dict) and "model" in rows[0]):
                return []  # of operations, or of an exercise
            checked(records.Study, content, path)
            if kind := next((ROWS[key] for key in ROWS if key in rows[0]), None):
                records.check_rows(path, rows, kind=kind)
            found = [
                f"{row['script']} failed: {row.get('error')} ({path})"
                for row in rows  # that a library fails is a result
                if "script" in row and row.get("status") == "failed"
            ]
            found += Study(name, content).panels()
        else:
            return []
        [*found_panels(only(dict, found))]  # what is wrong shows while its file is known
    except DAMAGED as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        what = "not as our tools write it, or by an older version"
        raise ToolError(f"{path}: {what}: {reason}") from error
    return found

"""What result files have for the dashboard: panels, each a chart for a model, device and
precision."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab import records
from lab.ablation import set_name
from lab.cli import ToolError
from lab.dashboard.charts import (
    Cells,
    draw_ablation,
    draw_bars,
    draw_kernels,
    draw_roofline,
    numbers_in,
)
from lab.files import read_json
from lab.records import checked
from lab.results import Run, load_run, runs_in
from lab.script import mode_of, model_and_version, precision_of

SPEED = ("batch_ms", "per_step")
ATTENTION = {"scores": "V2, scores in memory", "flash": "V2, flash attention"}  # of memory.json
SIZES = ("batch_size", "seq_len", "num_blocks", "num_layers", "hidden_dim", "num_seqs")
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
Choice = tuple[str, str, str]  # model, device, precision


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


@dataclass(frozen=True)
class Found:
    """A run as a row, or a profile as ms per step of each category, that was measured by itself."""

    name: str
    result: dict
    row: dict


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
    """What the result of a script was measured for."""
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
    fusions = {name.replace("_", "-"): on for name, on in (result.get("fusions") or {}).items()}
    model, version = model_and_version(result["script"])
    name, mode = version or model, mode_of(result["training"])
    if fusions:
        name += f", fused: {set_name(tuple(f for f, on in fusions.items() if on), [*fusions])}"
    return name if mode == "eager" else f"{name}, {mode}"


@dataclass(frozen=True)
class Study:
    """Rows that were measured in one process on one device, from a file."""

    name: str
    path: Path
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
        """Its charts; none if it is about something else."""
        first = self.content["rows"][0]
        if first.keys() >= {"on", "speedup"}:
            return self.ablations()
        return self.steps() if first.keys() >= {"kernels", "ceilings"} else self.comparisons()

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
            study, step = f"{self.name}: {sizes}", f"The step takes {row['batch_ms']:.2f} ms"
            profile = {"batch_ms": parts.total(), "categories": parts}
            html = draw_kernels({sizes: {name: profile}}, "kernels")
            note = f"{step}; kernels that run at the same time are added up."
            yield Panel("kernels", choice, study, note, html)
            html = draw_roofline({name: {**row, "ms": row["batch_ms"]}}, row["ceilings"])
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
                html = draw_bars(groups, SPEED)
                yield Panel("versions", choice, self.name, note, html)
        for choice, groups in memory.items():
            yield from memory_panel(groups, choice, self.name, "")


def memory_panel(cells: Cells, choice: Choice, study: str, note: str) -> Iterator[Panel]:
    """Peak memory by size, where it was measured; sizes of a single version are one group."""
    cells = {cell: cells[cell] for cell in sorted(cells, key=numbers_in)}
    names = {name for sides in cells.values() for name in sides}
    if len(names) == 1:
        cells = {name: {cell: sides[name] for cell, sides in cells.items()} for name in names}
    if any(row.get("peak_mb") for sides in cells.values() for row in sides.values()):
        yield Panel("memory", choice, study, note, draw_bars(cells, ["peak_mb"], one_scale=True))


def found_panels(found: Sequence[Found]) -> Iterator[Panel]:
    """Runs and profiles that were measured by themselves.

    Those of the same settings are one bar.
    """
    values, alike = defaultdict(set), defaultdict(list)
    for each in found:
        for key, value in each.result["config"].items():
            values[choice_of(each.result), key].add(value)
    for each in found:
        result, choice = each.result, choice_of(each.result)
        differing = [key for key in result["config"] if len(values[choice, key]) > 1]
        unit = result["unit"] if "categories" in each.row else None
        alike[choice, unit, sizes_of(result, differing), run_name(result)].append(each)
    charts = defaultdict(lambda: defaultdict(dict))
    by_sizes = sorted(alike.items(), key=lambda item: numbers_in(item[0][2]))
    for (choice, unit, sizes, name), several in by_sizes:
        several.sort(key=lambda each: each.row.get("batch_ms") or math.inf)
        times = [each.row["batch_ms"] for each in several if each.row.get("batch_ms")]
        middle = several[(len(several) - 1) // 2].row
        row = {**middle, "argv": [each.name for each in several], "alike": times}
        charts[choice, unit][sizes][name] = row
    for (choice, unit), cells in charts.items():
        if unit:
            yield Panel("kernels", choice, "profiles", "", draw_kernels(cells, unit))
        else:
            note = "Each run was measured by itself: no ratios."
            yield Panel("versions", choice, "single runs", note, draw_bars(cells, SPEED))
            yield from memory_panel(cells, choice, "single runs", "")


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
        yield Found(name, content, {"batch_ms": sum(parts.values()), "categories": parts})
    else:
        yield from found_in(load_run(path))


def found_in(run: Run) -> Iterator[Found | str]:
    """A run, or a line on one that failed; nothing of one that ended before it had a model."""
    if run.status == "failed":
        yield f"{run.name} failed: {run.result['error']} ({run.path})"
    elif run.result["config"]:
        yield Found(run.name, run.result, run.row())


def only(kind: type, found: Sequence) -> list:
    """Those of one type."""
    return [each for each in found if isinstance(each, kind)]


def of_exercise(rows: Sequence) -> bool:
    """Are these times of exercises/puzzles or build_a_fusion? They compare no versions of a model,
    and `us` has all turns, where a study has their median."""
    first = rows[0] if rows else None
    ours = isinstance(first, dict) and "model" not in first
    return ours and isinstance(first.get("us"), (list, dict))


def read(path: Path, name: str) -> list[Panel | Found | str]:
    """What is in a file, and a line for each side of a study that failed.

    Empty if no chart shows it.
    """
    content = read_json(path)
    try:
        if "chains" in content:  # find_fusions.py: no run of a version
            return []
        if "schema_version" in content:
            found = [*read_scripts_file(path, name, content)]
        elif isinstance(content.get("runs"), dict):
            runs = (Run(key, path, result) for key, result in runs_in(path, content).items())
            found = [each for run in runs for each in found_in(run)]
        elif isinstance(content.get("rows"), list) and isinstance(content.get("environment"), dict):
            if of_exercise(content["rows"]):
                return []
            if not checked(records.Study, content, path)["rows"]:
                raise ToolError(f"{path}: a study without a row")
            rows = content["rows"]
            ours = [row for row in rows if "script" in row]  # that a library fails is a result
            failed = [row for row in ours if row.get("status") == "failed"]
            found = [f"{row['script']} failed: {row.get('error')} ({path})" for row in failed]
            found += Study(name, path, content).panels()
        else:
            return []
        [*found_panels(only(Found, found))]  # what is wrong shows while its file is known
    except DAMAGED as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        what = "not as our tools write it, or by an older version"
        raise ToolError(f"{path}: {what}: {reason}") from error
    return found

"""Reports of what lies in files and folders, as Markdown, or as one HTML page that needs no network
and no server."""

import html
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fusion_lab.cli import ToolError
from fusion_lab.files import below, write_text
from fusion_lab.profile import reduction, roofline
from fusion_lab.runs import (
    SIZES,
    Run,
    baseline_of,
    beside,
    check_family,
    collected,
    described,
    differences,
    file_of_runs,
    find_runs,
    matched,
    runs_section,
    runs_table,
    settings,
    to_compare,
)
from fusion_lab.script import model_and_version, precision_of
from fusion_lab.show import cells_of

TOP = 10  # kernels per table
HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Kernel fusion: what was measured</title>
<style>
  body { margin: 16px; color: #1f2328; font: 15px/1.4 system-ui, sans-serif; }
  summary { font-weight: bold; margin: 8px 0; cursor: pointer; }
  h2 { font-size: 16px; margin: 14px 0 6px; }
  section { overflow-x: auto; }
  table { border-collapse: collapse; font-size: 14px; }
  th, td { padding: 3px 14px 3px 0; text-align: right; }
  th { color: #57606a; font-weight: normal; }
  th:first-child, td:first-child { text-align: left; }
</style>
<h1>Kernel fusion: what was measured</h1>"""
Choice = tuple[str, str, str]  # model, device, precision


@dataclass(frozen=True)
class Panel:
    """A part of a report: its text as Markdown, and what it was measured for."""

    title: str
    text: str
    choice: Choice


def choice_of(result: Mapping) -> Choice:
    name = result["environment"]["device_name"]
    count = result["training"].get("processes") or 1
    device = f"{count} x {name}" if count > 1 else str(name)
    return model_and_version(result["script"])[0], device, precision_of(result["training"])


# --- all results of some places


def panels_of(places: Sequence[Path]) -> tuple[list[Panel], list[Run]]:
    """A table for each team that took turns, and one of all single runs of a model, device and
    precision, which have no ratios; and all runs. What is named twice is there once."""
    runs = {}
    for place in places:
        top = place if place.is_dir() else place.parent
        for run in find_runs(place, everything=True):
            file = run.path.relative_to(top) if run.path.is_relative_to(top) else run.path
            runs.setdefault((run.path.resolve(), run.name), (run, file.as_posix()))
    teams = defaultdict(list)
    for run, file in runs.values():
        teams[choice_of(run.result), run.team].append((run, file))
    panels, alone = [], defaultdict(list)
    for (choice, _), same in teams.items():
        if len(same) == 1:
            alone[choice] += same
            continue
        mine = [replace(run, name=run.side or run.name) for run, _ in same]
        title = f"{same[0][1]}: {mine[0].team.partition(': ')[2]}"
        if not any(run.side for run in mine):
            labels = {True: "all off", False: "as chosen"}
            mine = sorted((replace(r, name=labels[r.is_first]) for r in mine), key=lambda r: r.name)
            title = f"{same[-1][1]}: in turns, by --compare-fusion"
        rows = [beside(run, baseline_of(run, mine)) for run in mine]
        panels.append(Panel(title, runs_table(mine, rows), choice))
    for choice, same in alone.items():
        mine = [run for run, _ in same]
        rows = [beside(run, run) | {"speedup": None} for run in mine]
        title = "single runs, which have no ratios"
        panels.append(Panel(title, runs_table(mine, rows), choice))
    return panels, [run for run, _ in runs.values()]


# --- two folders, without and with fusion


def kernel_lines(sides: dict[str, reduction.Profile]) -> str:
    """The report of analyze_kernel_reduction.py as a section."""
    text = reduction.compare([*sides.values()], TOP)[2]
    return text.partition("\n")[2].strip().replace("\n##", "\n###")


@dataclass(frozen=True)
class Runs:
    """The runs of one side, repeats as their median."""

    runs: Sequence[Run]

    @property
    def settings(self) -> dict | None:
        """Those of the run, if there is one alone."""
        return self.runs[0].settings if len(self.runs) == 1 else None


def load_sides(place: Path) -> Runs:
    return Runs(to_compare(find_runs(place)))


def pairs_section(sides: Mapping[str, Runs]) -> str:
    """A table for each model and size that both sides have."""
    cells = matched({label: side.runs for label, side in sides.items()})
    if not cells:
        raise ToolError("the two sides have no model and size in common")
    if len(cells) == 1:
        return runs_section(cells[0])
    return "\n\n".join(f"### {size_of(*cell.values())}\n\n{runs_section(cell)}" for cell in cells)


def size_of(run: Run, *others: Run) -> str:
    known = settings(run.result)
    sizes = [f"{key} {known[key]}" for key in (*SIZES, "precision") if key in known]
    return ", ".join([model_and_version(run.result["script"])[0], *sizes])


# the step of run_all_profilers.sh, its files, and what reads and shows them
SECTIONS = {
    "Runs": (None, ("pytorch/*_summary.json",), load_sides, pairs_section),
    "Kernels by the PyTorch profiler": (
        "pytorch_profiler",
        ("pytorch/*_kernels.csv", "pytorch/*_trace.json.gz"),
        reduction.load_pytorch,
        kernel_lines,
    ),
    "Kernels by rocprofv3": (
        "rocprofv3",
        ("rocprofv3_results_*/stats.csv",),
        reduction.load_rocprofv3,
        kernel_lines,
    ),
    "FLOPs of modules": (
        "flops",
        ("flops/*_flops.json",),
        roofline.load_modules,
        roofline.modules_table,
    ),
}


def place_in(top: Path, patterns: Sequence[str], step: str | None) -> Path | str:
    """Where files of the first of these patterns are that are there, as `collected` finds them; for
    runs also a tree of them. Or why there are none."""
    of_runs = patterns == SECTIONS["Runs"][1]
    if top.is_file() or file_of_runs(top):
        return top if of_runs else "nothing there"
    places = [collected(top, pattern, step) for pattern in patterns]
    found = next((place for place in places if isinstance(place, Path)), places[0])
    slowed_down = (top / "stats.csv").exists()  # a folder of run_rocprofv3.sh
    if of_runs and isinstance(found, str) and not slowed_down:
        return top if any(below(top, "*_summary.json")) else found
    return found


def panels_of_both(folders: Mapping[str, Path]) -> tuple[list[Panel], list[Run]]:
    """A part for each section that both folders have; what they lack is named at the end, with the
    reason where run_all_profilers.sh noted one."""
    panels, missing, every, known, runs = [], [], [], {}, {}
    for title, (step, files, load, show) in SECTIONS.items():
        places = {label: place_in(top, files, step) for label, top in folders.items()}
        why = {label: place for label, place in places.items() if isinstance(place, str)}
        found = {label: load(place) for label, place in places.items() if label not in why}
        runs = found if title == "Runs" else runs
        of_sides = {label: content.settings for label, content in found.items()}
        every += [(label, each) for label, each in of_sides.items() if each]
        if why:
            missing.append(f"{title} ({', '.join(why)}: {'; '.join(dict.fromkeys(why.values()))})")
        else:
            known = known or (of_sides if all(of_sides.values()) else {})
            panels.append((title, show(found)))
    check_family(every)
    if not panels:
        both = ", ".join(map(str, folders.values()))
        raise ToolError(f"{both}: nothing that both have: {'; '.join(missing)}")
    head = []
    for label, folder in folders.items():
        on = f": {described(known[label], fused=True)}" if known else ""
        head.append(f"- {label}: `{folder}`{on}")
    head += [f"- note: {note}" for note in differences(known.items())]
    panels = [("Without and with fusion", "\n".join(head)), *panels]
    if missing:
        panels.append(("", f"Not in this report: {'; '.join(missing)}."))
    choice = choice_of(known["fused"]) if known else ("", "", "")
    every_run = [replace(r, name=label) for label, side in runs.items() for r in side.runs]
    return [Panel(title, text, choice) for title, text in panels], every_run


# --- how it is written


def markdown(panels: Sequence[Panel]) -> str:
    """The first part has the title of the whole."""
    titles = [f"{'##' if n else '#'} {panel.title}\n\n" for n, panel in enumerate(panels)]
    texts = [f"{t if p.title else ''}{p.text}" for t, p in zip(titles, panels, strict=True)]
    return "\n\n".join(texts) + "\n"


def as_html(text: str) -> str:
    """Tables, headings, lists and paragraphs of Markdown as HTML."""
    parts = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.split("\n")
        if lines[0].startswith("|"):
            cells = [[html.escape(cell) for cell in cells_of(line)] for line in lines]
            heads = "".join(f"<th>{cell}</th>" for cell in cells[0])
            body = ("".join(f"<td>{cell}</td>" for cell in row) for row in cells[2:])
            parts.append(f"<table><tr>{'</tr><tr>'.join([heads, *body])}</tr></table>")
        elif lines[0].startswith("#"):
            parts.append(f"<h3>{html.escape(lines[0].lstrip('# '))}</h3>")
        elif lines[0].startswith("- "):
            items = "".join(f"<li>{html.escape(line.removeprefix('- '))}</li>" for line in lines)
            parts.append(f"<ul>{items}</ul>")
        else:
            parts.append(f"<p>{html.escape(block)}</p>")
    return "".join(parts)


def page(panels: Sequence[Panel]) -> str:
    """An HTML page that folds what was measured for each model, device and precision, so no table
    mixes them. Open is the first, of which there is most."""
    chosen: dict[Choice, list[Panel]] = defaultdict(list)
    for panel in panels:
        chosen[panel.choice].append(panel)
    parts = []
    for choice, same in sorted(chosen.items(), key=lambda item: (-len(item[1]), item[0])):
        summary = html.escape(", ".join(filter(None, choice)) or "several")
        parts.append(f"<details{'' if parts else ' open'}>\n<summary>{summary}</summary>")
        for panel in same:
            title = html.escape(panel.title)
            parts.append(f"<section><h2>{title}</h2>{as_html(panel.text)}</section>")
        parts.append("</details>")
    return "\n".join([HEAD, *parts, "</html>", ""])


def write(panels: Sequence[Panel], output: Path | None, as_page: bool) -> None:
    """Write the report there, or print it."""
    text = page(panels) if as_page else markdown(panels)
    if output is None:
        print(text, end="")
        return
    write_text(output, text)
    print(f"Written: {output} ({len(panels)} parts)")

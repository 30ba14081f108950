#!/usr/bin/env python3
"""One HTML file with tables of all results in some folders; it needs no network and no server.

Model, device and precision are chosen at the top, so no table mixes them. A study of versions has
a table for each size, with time, memory, kernels, and ratios turn by turn; runs of their own are
shown beside each other without ratios. Nothing is measured here.

A PATH is a file, or a folder, searched with all below it: studies of the tools here and of
dev/bench/versions.py; results of the scripts (*_summary.json, also several in one file). Status 1
if one of the runs failed; the page then has all others.

Examples:
  python analysis_tools/performance_dashboard.py
  python analysis_tools/performance_dashboard.py results/ --output dashboard.html
  python analysis_tools/performance_dashboard.py profiles_tiny_llama_v2 versions.json
"""

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, documented_parser, note, program, say
from fusion_lab.files import ROOT, below, read_json, write_text
from fusion_lab.records import checked_study
from fusion_lab.runs import Run, baseline_in_turns, fused_in, load_run, runs_in
from fusion_lab.script import mode_of, model_and_version, precision_of
from fusion_lab.show import render
from fusion_lab.study import beside_first, versions_columns

OTHER_FILES = {"rows", "modules", "categories", "chains"}  # fields of files of other programs
Choice = tuple[str, str, str]  # model, device, precision


@dataclass(frozen=True)
class Panel:
    """A table, as HTML, and what it was measured for."""

    choice: Choice
    title: str
    html: str


def files_in(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Each file once, with its name below the folder it was found in."""
    seen = set()
    for top in paths:
        if not top.exists():
            raise ToolError(f"{top}: no such file or directory")
        for path in below(top, "*.json") if top.is_dir() else [top]:
            name = path.relative_to(top).as_posix() if top.is_dir() else path.name
            slowed_down = re.search(r"(^|/)rocprof.*_summary\.json$", name)  # by a profiler
            if not slowed_down and path.resolve() not in seen:
                seen.add(path.resolve())
                yield path, name


def device_of(content: Mapping) -> str:
    """The device of a study or result, and how many where there are several."""
    name = content["environment"]["device_name"]
    count = content.get("training", content).get("processes", 1)
    return f"{count} x {name}" if count > 1 else str(name)


def study_panels(name: str, study: Mapping) -> Iterator[Panel]:
    """A table for each size and mode of a study's versions."""
    groups = defaultdict(list)
    for row in study["rows"]:
        if {"batch_ms", "error"} & row.keys() and {"model", "script"} <= row.keys():
            sizes = [f"{key} {row[key]}" for key in ("batch_size", "seq_len") if key in row]
            size = row.get("shape") or ", ".join(sizes)
            choice = row["model"], device_of(study), row.get("precision", "fp32")
            row = {"side": row.get("version") or row["script"], **row}
            turns = f", group {row['group']}" if "group" in row else ""  # that were taken together
            groups[choice, f"{size}, {row.get('mode', 'eager')}{turns}"].append(row)
    for (choice, sizes), rows in groups.items():
        columns = versions_columns("version", rows)
        yield Panel(choice, f"{name}: {sizes}", render(columns, beside_first(rows), "html"))


def pair_panels(runs: Sequence[tuple[str, Run]]) -> Iterator[tuple[Panel, Run, Run]]:
    """A table for each run that --compare-fusion measured in turns with its baseline, and both."""
    for name, run in runs:
        if before := baseline_in_turns(run, [other for _, other in runs]):
            batch = {"batch_size": run.result["training"]["batch_size"]}
            sides = {"all off": before, "as chosen": run}
            rows = [{"side": side, **batch, **each.row()} for side, each in sides.items()]
            model, _ = model_and_version(run.result["script"])
            choice = model, device_of(run.result), precision_of(run.result["training"])
            table = render(versions_columns("side", rows), beside_first(rows), "html")
            yield Panel(choice, f"{name}: in turns, by --compare-fusion", table), before, run


def run_panels(runs: Sequence[tuple[str, Run]]) -> Iterator[Panel]:
    """A table of single runs for each model, device and precision."""
    groups = defaultdict(list)
    for name, run in runs:
        result, training = run.result, run.result["training"]
        model, _ = model_and_version(result["script"])
        sizes = {"batch_size": training.get("batch_size"), **result["config"]}
        said = ", ".join(f"{key} {value}" for key, value in sizes.items())
        fused = ", ".join(fused_in(result)) or "nothing"
        side = f"{name}: {result['script']}, {mode_of(training)}, fused: {fused}; {said}"
        choice = model, device_of(result), precision_of(training)
        groups[choice].append({**run.row(alone=True), "side": side})
    for choice, rows in groups.items():
        alone = [row for each in rows for row in beside_first([each])]
        table = render(versions_columns("run", rows, ratios=False), alone, "html")
        yield Panel(choice, "single runs, which have no ratios", table)


def page_of(panels: Sequence[Panel]) -> str:
    """The page as HTML. It begins with the choice of which there are most tables."""
    (start, _), *_ = Counter(panel.choice for panel in panels).most_common()
    columns = zip(*(panel.choice for panel in panels), strict=True)
    names = ("model", "device", "precision")
    values = map(sorted, map(set, columns))
    page = {
        "filters": [[*each] for each in zip(names, values, start, strict=True)],
        "panels": [vars(panel) for panel in panels],
    }
    data = json.dumps(page, allow_nan=False).replace("<", "\\u003c")
    return Path(__file__).with_suffix(".html").read_text().replace("/*HERE*/", data)


def build(args: argparse.Namespace) -> int:
    if args.output.suffix != ".html":
        raise ToolError(f"--output {args.output}: must end in .html")
    panels, runs, left_out, failed = [], [], [], []
    for path, name in files_in(args.paths):
        content = read_json(path)
        found = []
        if "schema_version" in content and not OTHER_FILES & content.keys():
            found = [(name, load_run(path))]
        elif isinstance(content.get("runs"), dict):
            found = [*runs_in(path, content).items()]
        elif isinstance(content.get("rows"), list) and isinstance(content.get("environment"), dict):
            if not (rows := content["rows"]):
                raise ToolError(f"{path}: a study without a row")
            if isinstance(rows[0], dict) and "model" in rows[0]:  # else of operations
                found = [*study_panels(name, checked_study(content, path))]
                failed += [
                    f"{row['script']} failed: {row.get('error')} ({path})"
                    for row in rows  # that a library fails is a result
                    if "script" in row and row.get("status") == "failed"
                ]
        if not found:
            if path in args.paths:
                raise ToolError(f"{path}: no table shows what is in this file")
            left_out.append(path)
        panels += [each for each in found if isinstance(each, Panel)]
        runs += [each for each in found if not isinstance(each, Panel)]
    for _, run in runs:
        if run.status == "failed":
            failed.append(f"{run.name} failed: {run.result.get('error')} ({run.path})")
    runs = [(name, run) for name, run in runs if run.result["config"]]
    pairs = [*pair_panels(runs)]
    paired = [run for _, *both in pairs for run in both]
    panels += [panel for panel, *_ in pairs]
    panels += run_panels([(name, run) for name, run in runs if run not in paired])
    if not panels and not failed:
        places = ", ".join(map(str, args.paths))
        raise ToolError(f"{places}: no results in there that a table shows")
    if panels:
        write_text(args.output, page_of(panels))
        print(f"Written: {args.output} ({len(panels)} tables)")
    if left_out:
        note(f"no table shows what is in {len(left_out)} of the files, first {left_out[0]}")
    for line in failed:
        say(line)
    return 1 if failed else 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    paths = {"nargs": "*", "type": Path, "default": [ROOT / "results"], "metavar": "PATH"}
    places = "files and folders (default: results/ of the repository)"
    parser.add_argument("paths", **paths, help=places)
    parser.add_path("--output", "FILE.html", default=Path("dashboard.html"))
    return parser


main = program(build_parser, build)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Has anything become slower? One result against an earlier one: exit status 1 if so, or if it is
not fast enough.

A result is a run (<script>_summary.json, or the directory of one), a file of several runs
(compare_runs.py --save), or a study of runs in turns (compare_versions.py, bench/versions.py). Of
several, those of the same name are compared, one by one. Other devices, models, sizes or another
precision are refused; notes name what else differs.

A time has the range of its turns, or, in a run of one turn, that of its steps up to the 95th
percentile. Only where the two ranges do not overlap there is a verdict. Otherwise no difference was
seen, and that is no regression. With --min-speedup the median decides, and the range of the
speed-up stands beside it. A run that did not finish where the baseline did is a regression, too.
Memory, kernels and final loss are shown and decide nothing.

Examples:
  python analysis_tools/regression_tester.py --baseline-results old/tiny_llama_v2_summary.json \\
      --current-results new
  python analysis_tools/regression_tester.py --baseline-results profiles/v1 \\
      --current-results profiles/v2 \\
      --min-speedup 1.3
  python analysis_tools/regression_tester.py --baseline-results old/versions.json \\
      --current-results new/versions.json
"""

from __future__ import annotations

import _root

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from lab.cli import Parser, ToolError, documented_parser, print_notes, program
from lab.files import read_json
from lab.records import Study, checked
from lab.results import Run, load_run, runs_in, settings
from lab.show import Column, cell, ended, render

PROG = Path(__file__).name
# What may differ and is only named; all other settings have to be the same.
NOTED = ("num_steps", "warmup_steps", "learning_rate", "seed")
NOTED += ("torch_compile", "cuda_graph", "torch")
SIZES = ("batch_size", "seq_len")  # what names a row, with
NAMES = ("precision", "mode", "seed", "group", "side")
COLUMNS = [Column(name, name, text=True) for name in ("run", "what", "verdict")]
COLUMNS += [Column(name, name) for name in ("baseline", "current", "change")]
FEW = 5  # turns, below which their ranges part by chance


@dataclass(frozen=True)
class Entry:
    """A run or a row of a study: what was measured, and what the other side has to share."""

    path: Path
    row: dict
    settings: dict

    def times(self) -> tuple[float, float, float, int]:
        """Milliseconds per step: median, shortest and longest; and in how many turns."""
        found = self.row.get("turns_ms") or []
        turns = len(found)
        if turns < 2:
            times = map(self.row.get, ("batch_median_ms", "batch_ms", "batch_p95_ms"))
            found = [ms for ms in times if ms]
        if not found:
            raise ToolError(f"{self.path}: it has no times of a step")
        return statistics.median(found) if turns > 1 else found[0], min(found), max(found), turns


def entry_of(run: Run) -> Entry:
    """Of a run."""
    row = run.row()
    first = {"model": row["model"], "device_name": run.result["environment"].get("device_name")}
    return Entry(run.path, row, first | settings(run.result))


def entries_of_study(path: Path, content: dict) -> dict[str, Entry]:
    """The rows of a study that were measured in turns, by their names."""
    environment, found = content["environment"], {}
    same = {key: environment.get(key) for key in ("device_name", "torch")}
    if environment.get("device") == "cpu":
        same["cpu_threads"] = environment.get("cpu_threads")
    for row in content["rows"]:
        if {"turns_ms", "status"} & row.keys() and {"script", "model"} <= row.keys():
            sizes = next(((key,) for key in ("shape", "name") if key in row), SIZES)
            names = {key: row[key] for key in (*sizes, *NAMES) if key in row}
            names = names or {"script": row["script"]}
            name = ", ".join(v if isinstance(v, str) else f"{k} {v}" for k, v in names.items())
            if name in found:
                raise ToolError(f"{path}: two rows are named {name}")
            flags = ("--enable-", "--disable-")
            argv = [word for word in row.get("argv", ()) if not word.startswith(flags)]
            asked = {"model": row["model"], "arguments": " ".join(argv) or "none"}
            found[name] = Entry(path, row, same | asked)
    if not found:
        raise ToolError(f"{path}: no row of this study was measured in turns")
    return found


def load(path: Path) -> dict[str, Entry]:
    """What a file or directory holds, by name."""
    content = read_json(path) if path.is_file() else {}
    if isinstance(content.get("rows"), list):
        return entries_of_study(path, checked(Study, content, path))
    if isinstance(content.get("runs"), dict):
        runs = runs_in(path, content).items()
        return {name: entry_of(Run(name, path, result)) for name, result in runs}
    run = load_run(path)
    return {run.name: entry_of(run)}


def pair(before: dict[str, Entry], after: dict[str, Entry]) -> dict[str, tuple[Entry, Entry]]:
    """What is compared; ToolError if nothing has the same name, or what does cannot be."""
    (old, *_), ((name, new), *_) = before.values(), after.items()
    single = len(before) == len(after) == 1
    if single and "arguments" not in old.settings:  # two runs, whatever they are called
        pairs = {name: (old, new)}
    else:
        pairs = {name: (old, after[name]) for name, old in before.items() if name in after}
        if not pairs:
            raise ToolError("nothing has the same name in both files")
        if alone := sorted(before.keys() ^ after.keys()):
            left_out = f"in one of the files only and left out, first {alone[0]}"
            print_notes(PROG, f"{len(alone)} are {left_out}")
    notes: dict[str, None] = {}
    for name, (old, new) in pairs.items():
        if ("arguments" in old.settings) != ("arguments" in new.settings):
            raise ToolError(f"{name} cannot be compared: one is a run, the other a row of a study")
        for key, first in old.settings.items():
            second = new.settings.get(key, first)  # another version, or a failed run, may lack it
            if first != second and key not in NOTED:
                raise ToolError(f"{name} cannot be compared, {key} differs: {first} and {second}")
            if first != second:
                notes[f"{key} differs: {first} and {second}"] = None
    print_notes(PROG, *notes)
    return pairs


def time_line(old: Entry, new: Entry, least: float | None) -> tuple[dict[str, str], bool]:
    """The cells of the line on time, with ranges; and whether the verdict is good."""
    ends = {"baseline": ended(old.row), "current": ended(new.row)}
    if any(ends.values()):
        medians = {"baseline": old, "current": new}
        cells = {name: ends[name] or f"{entry.times()[0]:.2f}" for name, entry in medians.items()}
        verdict = "no baseline" if ends["baseline"] else "did not finish"
        return {"verdict": verdict, **cells}, bool(ends["baseline"])
    (before, fast, slow, _), (after, low, high, _) = old.times(), new.times()
    verdict = "slower" if low > slow else "faster" if high < fast else "no difference seen"
    good = verdict != "slower" if least is None else before / after >= least
    if least is not None:
        verdict += f", {'' if good else 'not '}{least:g}x as fast"
    return {
        "verdict": verdict,
        "baseline": f"{before:.2f} ({fast:.2f} to {slow:.2f})",
        "current": f"{after:.2f} ({low:.2f} to {high:.2f})",
        "change": f"{before / after:.2f}x ({fast / high:.2f}x to {slow / low:.2f}x)",
    }, good


def lines_of(name: str, old: Entry, new: Entry, least: float | None) -> tuple[list[dict], bool]:
    """The lines of a comparison, and whether it is good."""
    cells, good = time_line(old, new, least)
    lines = [{"run": name, "what": "ms per step", **cells}]
    counted = new.row.get("unit") or old.row.get("unit") or "kernels"
    for key, what, form in (
        ("peak_mb", "peak MB", ".1f"),
        ("per_step", f"{counted} per step", ".10g"),
        ("final_loss", "final loss", ".4f"),
    ):
        before, after = old.row.get(key), new.row.get(key)
        if before is not None and after is not None:
            cells = {"verdict": "", "baseline": cell(before, form), "current": cell(after, form)}
            change = 100 * (after / before - 1) if before else None
            lines.append({"run": name, "what": what, **cells, "change": cell(change, "+.2f", " %")})
    return lines, good


def test(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    least = args.min_speedup
    if least is not None and not 0 < least < math.inf:
        raise ToolError(f"--min-speedup must be above 0, not {least}")
    pairs = pair(load(args.baseline_results), load(args.current_results))
    if all("status" in old.row for old, _ in pairs.values()):
        (old, _), *_ = pairs.values()
        raise ToolError(f"{old.path}: the baseline did not finish ({old.row.get('error')})")
    found = {name: lines_of(name, *entries, least) for name, entries in pairs.items()}
    lines = [line for lines, _ in found.values() for line in lines]
    print(render(COLUMNS, lines))
    finished = [entry for both in pairs.values() for entry in both if "status" not in entry.row]
    if any(entry.times()[3] < FEW for entry in finished):
        chance = "ranges can part by chance, as the speed of a host changes"
        print_notes(PROG, f"fewer than {FEW} turns, or one: {chance}")
    bad = [name for name, (_, good) in found.items() if not good]
    wanted = "A regression" if least is None else f"Not {least:g}x as fast"
    print(f"\n{wanted}: {len(bad)} of {len(found)}{f', first {bad[0]}' if bad else ''}")
    return 1 if bad else 0


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    parser.add_path("--baseline-results", "PATH", "the earlier result", required=True)
    parser.add_path("--current-results", "PATH", "the result that is tested", required=True)
    least = "times as fast as the baseline that all have to be"
    parser.add_argument("--min-speedup", type=float, metavar="X", help=least)
    return parser


main = program(build_parser, test)

if __name__ == "__main__":
    sys.exit(main())

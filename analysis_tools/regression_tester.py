#!/usr/bin/env python3
"""Has anything become slower? One result against an earlier one: exit status 1 if so.

A result is a file or a folder with runs: <script>_summary.json, a file of several runs
(compare_runs.py --save), a study of runs in turns (compare_versions.py, fusion_ablation_study.py,
dev/bench/versions.py), or a tree of these. Of several, those of the same name are compared, and
where no name is in both, those of the same script, fusions and settings, repeats as their median.
Other devices, models, sizes or another precision are refused; notes name what else differs.

A time has the range of its turns, or, in a run of one turn, that of its steps up to the 95th
percentile; where two ranges overlap there is no verdict. With --min-speedup the median decides. A
run that did not finish where the baseline did is a regression, too.

Examples:
  python analysis_tools/regression_tester.py --baseline-results profiles/v1 \\
      --current-results profiles/v2 --min-speedup 1.3
"""

import argparse
import sys
from operator import itemgetter

from fusion_lab.cli import Parser, ToolError, documented_parser, note, positive, program
from fusion_lab.files import write_text
from fusion_lab.runs import Run, find_runs, matched, settings
from fusion_lab.script import model_and_version
from fusion_lab.show import Column, cell, ended, render

NOTED = ("num_steps", "warmup_steps", "learning_rate", "seed")  # what may differ
NOTED += ("torch_compile", "cuda_graph", "torch")
LABELS = ("run", "what", "verdict", "baseline", "current", "change")
COLUMNS = [Column(label, itemgetter(n), text=n < 3) for n, label in enumerate(LABELS)]


def same_in(run: Run) -> dict:
    """What a comparison wants to be the same, and what it only names."""
    model = model_and_version(run.result["script"])[0]
    device = run.result["environment"]["device_name"]
    return {"model": model, "device_name": device} | settings(run.result)


def pair(old: list[Run], new: list[Run]) -> dict[str, tuple[Run, Run]]:
    """What is compared, by name: of the same name, else as `matched` has it; ToolError if there is
    nothing, or if a setting differs on which times depend."""
    before, after = ({run.name: run for run in runs} for runs in (old, new))
    pairs = {name: (run, after[name]) for name, run in before.items() if name in after}
    if pairs and (alone := sorted(before.keys() ^ after.keys())):
        note(f"{len(alone)} are in one file only and left out, first {alone[0]}")
    if not pairs:
        sides = {"the baseline": old, "what is now": new}
        cells = matched(sides, exact=True) or matched(sides)
        pairs = {second.name: (first, second) for first, second in map(dict.values, cells)}
    if not pairs:
        raise ToolError("the two have no run of the same name, nor any with the same settings")
    notes: dict[str, None] = {}
    for name, both in pairs.items():
        known, other = (same_in(run) for run in both)
        for key, first in known.items():
            second = other.get(key, first)  # another version, or a failed run, may lack it
            if first != second and key not in NOTED:
                raise ToolError(f"{name} cannot be compared, {key} differs: {first} and {second}")
            if first != second:
                notes[f"{key} differs: {first} and {second}"] = None
    note(*notes)
    return pairs


def compare_times(old: Run, new: Run, least: float | None) -> tuple[list[str | None], bool]:
    """The verdict, both times with their ranges and the change; and whether the verdict is good."""
    ends = [None if run.measured else ended(run.result) for run in (old, new)]
    if any(ends):
        cells = [end or f"{run.times()[0]:.2f}" for end, run in zip(ends, (old, new), strict=True)]
        return ["no baseline" if ends[0] else "did not finish", *cells, None], bool(ends[0])
    (before, fast, slow), (after, low, high) = times = old.times(), new.times()
    verdict = "slower" if low > slow else "faster" if high < fast else "no difference seen"
    good = verdict != "slower" if least is None else before / after >= least
    if least is not None:
        verdict += f", {'' if good else 'not '}{least:g}x as fast"
    change = f"{before / after:.2f}x ({fast / high:.2f}x to {slow / low:.2f}x)"
    return [verdict, *("{:.2f} ({:.2f} to {:.2f})".format(*t) for t in times), change], good


def lines_of(name: str, old: Run, new: Run, least: float | None) -> tuple[list[list], bool]:
    """The lines of a comparison, as `LABELS` says, and whether it is good."""
    cells, good = compare_times(old, new, least)
    lines = [[name, "ms per step", *cells]]
    unit = old.result["kernels"].get("unit") or "kernels"
    for group, key, what, form in (
        ("memory", "peak_mb", "peak MB", ".1f"),
        ("kernels", "per_step", f"{unit} per step", ".10g"),
        ("loss", "final", "final loss", ".4f"),
    ):
        before, after = (run.number(group, key) for run in (old, new))
        if before is not None and after is not None:
            change = cell(100 * (after / before - 1) if before else None, "+.2f", " %")
            lines.append([name, what, "", cell(before, form), cell(after, form), change])
    return lines, good


def test(args: argparse.Namespace) -> int:
    pairs = pair(*map(find_runs, (args.baseline_results, args.current_results)))
    first, *others = (old for old, _ in pairs.values())
    if not any(old.measured for old in (first, *others)):
        raise ToolError(f"{first.path}: the baseline did not finish ({first.result.get('error')})")
    least = args.min_speedup
    found = {name: lines_of(name, *both, least) for name, both in pairs.items()}
    rows = [line for lines, _ in found.values() for line in lines]
    print(render(COLUMNS, rows))
    if args.csv:
        write_text(args.csv, render(COLUMNS, rows, "csv"))
    every = [run for both in pairs.values() for run in both if run.measured]
    if any(len(run.number("timing", "turns_ms") or ()) < 5 for run in every):
        note("fewer than 5 turns, or one: ranges can part by chance")
    bad = [name for name, (_, good) in found.items() if not good]
    wanted = "A regression" if least is None else f"Not {least:g}x as fast"
    print(f"\n{wanted}: {len(bad)} of {len(found)}{f', first {bad[0]}' if bad else ''}")
    return 1 if bad else 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_path("--baseline-results", "PATH", "the earlier result", required=True)
    parser.add_path("--current-results", "PATH", "the result that is tested", required=True)
    parser.add_argument("--min-speedup", type=positive(), metavar="X", help="that all have to have")
    parser.add_path("--csv", "FILE.csv", "also write the table there")
    return parser


main = program(build_parser, test)

if __name__ == "__main__":
    sys.exit(main())

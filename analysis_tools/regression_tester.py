#!/usr/bin/env python3
"""Has anything become slower? One result against an earlier one: exit status 1 if so.

A result is a run (<script>_summary.json, or the directory of one), a file of several runs
(compare_runs.py --save), or a study of runs in turns (compare_versions.py,
dev/bench/versions.py). Of several, those of the same name are compared. Other devices, models,
sizes or another precision are refused; notes name what else differs.

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
from fusion_lab.runs import Entry, load_entries
from fusion_lab.show import Column, cell, ended, render

NOTED = ("num_steps", "warmup_steps", "learning_rate", "seed")  # what may differ
NOTED += ("torch_compile", "cuda_graph", "torch")
LABELS = ("run", "what", "verdict", "baseline", "current", "change")
COLUMNS = [Column(label, itemgetter(n), text=n < 3) for n, label in enumerate(LABELS)]


def pair(before: dict[str, Entry], after: dict[str, Entry]) -> dict[str, tuple[Entry, Entry]]:
    """What is compared; ToolError if nothing has the same name, or what does cannot be."""
    pairs = {name: (old, after[name]) for name, old in before.items() if name in after}
    both = (*before.values(), *after.values())
    if len(before) == len(after) == 1 and all(entry.settings["kind"] == "run" for entry in both):
        pairs = dict.fromkeys(after, both)  # whatever they are called
    elif not pairs:
        raise ToolError("nothing has the same name in both files")
    elif alone := sorted(before.keys() ^ after.keys()):
        note(f"{len(alone)} are in one file only and left out, first {alone[0]}")
    notes: dict[str, None] = {}
    for name, (old, new) in pairs.items():
        for key, first in old.settings.items():
            second = new.settings.get(key, first)  # another version, or a failed run, may lack it
            if first != second and key not in NOTED:
                raise ToolError(f"{name} cannot be compared, {key} differs: {first} and {second}")
            if first != second:
                notes[f"{key} differs: {first} and {second}"] = None
    note(*notes)
    return pairs


def compare_times(old: Entry, new: Entry, least: float | None) -> tuple[list[str | None], bool]:
    """The verdict, both times with their ranges and the change; and whether the verdict is good."""
    if ended(old.row) or ended(new.row):
        cells = [ended(side.row) or f"{side.times()[0]:.2f}" for side in (old, new)]
        verdict = "no baseline" if ended(old.row) else "did not finish"
        return [verdict, *cells, None], verdict == "no baseline"
    (before, fast, slow), (after, low, high) = times = old.times(), new.times()
    verdict = "slower" if low > slow else "faster" if high < fast else "no difference seen"
    good = verdict != "slower" if least is None else before / after >= least
    if least is not None:
        verdict += f", {'' if good else 'not '}{least:g}x as fast"
    change = f"{before / after:.2f}x ({fast / high:.2f}x to {slow / low:.2f}x)"
    return [verdict, *("{:.2f} ({:.2f} to {:.2f})".format(*t) for t in times), change], good


def lines_of(name: str, old: Entry, new: Entry, least: float | None) -> tuple[list[list], bool]:
    """The lines of a comparison, as `LABELS` says, and whether it is good."""
    cells, good = compare_times(old, new, least)
    lines = [[name, "ms per step", *cells]]
    counted = new.row.get("unit") or old.row.get("unit") or "kernels"
    forms = ("peak_mb", "peak MB", ".1f"), ("per_step", f"{counted} per step", ".10g")
    for key, what, form in (*forms, ("final_loss", "final loss", ".4f")):
        before, after = old.row.get(key), new.row.get(key)
        if before is not None and after is not None:
            change = cell(100 * (after / before - 1) if before else None, "+.2f", " %")
            lines.append([name, what, "", cell(before, form), cell(after, form), change])
    return lines, good


def test(args: argparse.Namespace) -> int:
    pairs = pair(*map(load_entries, (args.baseline_results, args.current_results)))
    first, *others = (old for old, _ in pairs.values())
    if all("status" in old.row for old in (first, *others)):
        raise ToolError(f"{first.path}: the baseline did not finish ({first.row.get('error')})")
    least = args.min_speedup
    found = {name: lines_of(name, *entries, least) for name, entries in pairs.items()}
    print(render(COLUMNS, [line for lines, _ in found.values() for line in lines]))
    every = (entry.row for both in pairs.values() for entry in both)
    if any("status" not in row and len(row.get("turns_ms") or ()) < 5 for row in every):
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
    return parser


main = program(build_parser, test)

if __name__ == "__main__":
    sys.exit(main())

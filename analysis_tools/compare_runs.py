#!/usr/bin/env python3
"""Runs side by side, as a Markdown table for each model.

A PATH is a file or a folder with runs, or a pattern: a result (<script>_summary.json), the
directory of a run (its --profile-dir), a study of versions or fusions, a file of several runs or
FILE.json/NAME for one of them, what run_all_profilers.sh left, or a tree of these. A folder without
a run is named and passed over. An earlier run of a folder (<script>_summary.1.json) is taken where
it is the PATH. NAME=PATH names the row; several runs of one NAME are repeats, of which the median
is shown, with the range.

Speed-up and memory change are over --baseline, else over the first run, which is said, or over a
run's own baseline where both took turns (--compare-fusion, whose folder alone shows both sides;
studies): then the speed-up is that of their turns, with its range. With --by seq_len, or another
setting, each value has a table and a baseline of its own. Where the numbers of processes differ,
the scaling efficiency is the speed-up over the ratio of these numbers. Notes on stderr, above the
table, name what differs: sizes, steps, precision, torch.compile, graphs, the device; and below it
runs that were disturbed, whose mean step is much longer than the median. A run that went out of
memory is a row of its own; one that failed is too, and then the exit status is 1.

--csv has a row for each run with all that is known of it, whatever its outcome: sizes, each fusion
as 0 or 1, precision, device, times, memory, kernels, launches and loss. A loop in the shell and
this command are a sweep. --save keeps the runs in one file, complete and under the names of their
rows, for this tool and others to read.

Examples:
  python analysis_tools/compare_runs.py exercises/results/v1 exercises/results/v2
  python analysis_tools/compare_runs.py baseline=./unfused flash=./flash all=./fused --csv table.csv
  python analysis_tools/compare_runs.py ./one_gpu ./four_gpus
  python analysis_tools/compare_runs.py sweep --by seq_len --csv sweep.csv --save sweep.json
  python analysis_tools/compare_runs.py before='before_*' after='after_*'
  python analysis_tools/compare_runs.py sweep.json/batch_1 sweep.json/batch_4
"""

import argparse
import json
import sys
from collections.abc import Sequence

from fusion_lab import runs as records
from fusion_lab.cli import Parser, ToolError, documented_parser, note, program
from fusion_lab.files import write_text
from fusion_lab.script import model_and_version
from fusion_lab.show import write_csv


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    help = "result file or directory of a run"
    parser.add_argument("runs", nargs="+", metavar="[NAME=]PATH", help=help)
    base = "what others are compared with (default: the first)"
    parser.add_argument("--baseline", metavar="PATH", help=base)
    by = "a setting, such as seq_len: a table for each of its values"
    parser.add_argument("--by", metavar="SETTING", help=by)
    parser.add_flag("--no-times", "only memory, kernels and loss: they need no turns")
    parser.add_path("--csv", "FILE", "also write all that is known, unrounded")
    parser.add_path("--save", "FILE.json", "also keep the runs in one file")
    return parser


def grouped(
    runs: Sequence[records.Run], by: str | None
) -> dict[tuple[str, object], list[records.Run]]:
    """Runs by model, and by the value of a setting."""
    groups: dict[tuple[str, object], list[records.Run]] = {}
    for run in runs:
        asked = {**run.result["training"], **run.result["config"]}
        if by and asked and by not in asked:
            raise ToolError(f"{run.path}: {by} is no setting of this run")
        model = model_and_version(run.result["script"])[0]
        groups.setdefault((model, asked.get(by)), []).append(run)
    return groups


def beside_baselines(runs: Sequence[records.Run], first: records.Run) -> list[dict]:
    """A row for each run of a group beside its own baseline, or the first."""
    others = [first, *(run for run in runs if run is not first)]
    if not first.measured:
        note(f"the baseline {first.name} did not finish, so there are no ratios")
    return [records.beside(run, records.baseline_of(run, others)) for run in runs]


def compare(args: argparse.Namespace) -> int:
    paths = [*([args.baseline] if args.baseline else []), *args.runs]
    runs = records.load_runs(paths)
    if len(runs) == 1:
        runs = records.with_baseline(*runs)
    wanted = records.load_runs([args.baseline]) if args.baseline else []
    groups = grouped(runs, args.by)
    rows = []
    for (model, value), same in groups.items():
        ignore = [args.by] if args.by else []
        note(*records.differences(((run.name, run.result) for run in same), ignore))
        named = (run for run in same if any(run.path == w.path for w in wanted))
        first = next(named, same[0])
        if len(same) > 2 and not wanted:
            note(f"speed-ups are over {first.name}, but where runs took turns (see --baseline)")
        if len(groups) > 1:
            print(f"\n{model}{f', {args.by} {value}' if args.by else ''}:\n")
        found = beside_baselines(same, first)
        print(records.runs_table(same, found, not args.no_times), flush=True)
        rows += zip(found, same, strict=True)
    if args.csv:
        write_csv(args.csv, records.csv_rows(*zip(*rows, strict=True)))
    if args.save:
        named = records.by_name((run.name, run.result) for run in runs)
        write_text(args.save, json.dumps({"runs": named}, indent=1) + "\n")
    note(*records.unsteady(runs))
    return records.report_failed(runs)


main = program(build_parser, compare)

if __name__ == "__main__":
    sys.exit(main())

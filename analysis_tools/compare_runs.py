#!/usr/bin/env python3
"""Result files of several runs side by side, as a Markdown table.

A PATH is a result file (<script>_summary.json), the directory of a run (its --profile-dir), or
FILE.json/NAME for a run in a file of several, or a pattern; NAME=PATH names the row. Speed-up and
memory change are over the first run, or over a run's own baseline where --compare-fusion measured
both and both are given: then the speed-up is that of their turns, with its range. Where the numbers
of processes differ, the scaling efficiency is the speed-up over the ratio of these numbers. Notes
on stderr, above the table, name what differs: sizes, steps, precision, torch.compile, graphs, the
device; and below it runs that were disturbed, whose mean step is much longer than the median. Runs
of different models are refused. A run that went out of memory is a row of its own; one that failed
is too, and then the exit status is 1.

--csv has a row for each run with all that is known of it, whatever its outcome: sizes, each fusion
as 0 or 1, precision, device, times, memory, kernels, launches and loss. A loop in the shell and
this command are a sweep. --save keeps the runs in one file, complete and under the names of their
rows, for this tool and others to read.

Examples:
  python analysis_tools/compare_runs.py exercises/results/v1 exercises/results/v2
  python analysis_tools/compare_runs.py baseline=./unfused flash=./flash all=./fused --csv table.csv
  python analysis_tools/compare_runs.py ./one_gpu ./four_gpus
  python analysis_tools/compare_runs.py sweep/* --csv sweep.csv --save sweep.json
  python analysis_tools/compare_runs.py sweep.json/batch_1 sweep.json/batch_4
"""

import argparse
import json
import sys
from collections.abc import Sequence

from fusion_lab import runs as records
from fusion_lab.cli import Parser, documented_parser, note, program
from fusion_lab.files import write_text
from fusion_lab.script import precision_of
from fusion_lab.show import write_csv

ASKED = ("batch_size", "num_steps", "warmup_steps", "learning_rate", "seed", "deterministic")


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    help = "result file or directory of a run"
    parser.add_argument("runs", nargs="+", metavar="[NAME=]PATH", help=help)
    parser.add_flag("--no-times", "only memory, kernels and loss: they need no turns")
    parser.add_path("--csv", "FILE", "also write all that is known, unrounded")
    parser.add_path("--save", "FILE.json", "also keep the runs in one file")
    return parser


def csv_rows(rows: Sequence[dict], runs: Sequence[records.Run]) -> list[dict]:
    """The rows with what each run was asked to do; a fusion that a version lacks is off."""
    sizes = dict.fromkeys(key for run in runs for key in run.result["config"])
    fusions = dict.fromkeys(key for run in runs for key in run.result.get("fusions", ()))
    wide = []
    for row, run in zip(rows, runs, strict=True):
        result, training = run.result, run.result["training"]
        first = {key: row[key] for key in ("configuration", "script", "status")}
        asked = {key: result["config"].get(key) for key in sizes}
        asked |= {key: training.get(key) for key in ASKED}
        asked |= {key: int(bool(result.get("fusions", {}).get(key))) for key in fusions}
        asked["precision"] = precision_of(training)
        compiled = training.get("torch_compile")
        asked["torch_compile"] = (training.get("torch_compile_mode") or "") if compiled else ""
        asked["cuda_graph"] = int(bool(training.get("cuda_graph")))
        asked |= {key: result["environment"].get(key) for key in ("device", "device_name", "torch")}
        wide.append({**first, **asked, **row, "error": result.get("error")})
    return wide


def compare(args: argparse.Namespace) -> int:
    runs = records.load_runs(args.runs)
    named = [(run.name, run.result) for run in runs]
    note(*records.differences(named))
    rows = [records.beside(run, records.baseline_of(run, runs)) for run in runs]
    print(records.runs_table(runs, rows, not args.no_times), flush=True)
    if args.csv:
        write_csv(args.csv, csv_rows(rows, runs))
    if args.save:
        write_text(args.save, json.dumps({"runs": records.by_name(named)}, indent=1) + "\n")
    note(*records.unsteady(runs))
    if runs[0].status != "ok":
        note(f"the baseline {runs[0].name} did not finish, so there are no ratios")
    return records.report_failed(runs)


main = program(build_parser, compare)

if __name__ == "__main__":
    sys.exit(main())

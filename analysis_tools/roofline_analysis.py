#!/usr/bin/env python3
"""FLOPs, bytes and time of a whole training step by what its operators do, against what the device
reaches.

Groups are GEMM, attention, normalisation, element-wise, copies, reductions, optimizer and the rest:

  FLOP   of matrix products, nothing else, counted on the model with everything off: fusion and our
         own Triton kernels compute the same ones
  bytes  every operator reads its tensors from memory and writes its results there, once each, with
         the fusions as chosen; a group may move more than a copy does where caches hold its data
  time   of the kernels in three profiled steps, launched one by one, also those of V4, so that the
         operator of each is known; on a CPU the self time of operators
  roof   a large GEMM in the run's precision and a large copy, measured on the same device

--from-rocprof-compute reads what run_rocprof_compute.sh collected on an AMD GPU in place of that:
each kernel by its counters (pmc_perf.csv), and the ceilings that were measured (roofline.csv). No
AMD GPU was at hand: this was tried on files of MI200 in rocprof-compute's own tests.

Written to --output: roofline_analysis.csv and .json with all numbers, roofline_analysis.png.

Examples:
  python analysis_tools/roofline_analysis.py --script tiny_llama_v2.py --batch-size 8 --seq-len 128
  python analysis_tools/roofline_analysis.py --script tiny_llama_v4.py --use-amp --output ./v4
  python analysis_tools/roofline_analysis.py --from-rocprof-compute rocprof_compute_results \\
      --output ./roofline
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, note, program, sign_of_life
from fusion_lab.files import write_text
from fusion_lab.profile import roofline
from fusion_lab.profile.ceilings import Ceilings
from fusion_lab.profile.kernels import short_name
from fusion_lab.rocm.counters import read_rocprof_compute
from fusion_lab.script import (
    DEFAULT_SCRIPT,
    add_script,
    load_script,
    parser_around,
    script_arguments,
)
from fusion_lab.show import cell, drawing, write_csv

NAME = "roofline_analysis"


def analyse_script(script: str, argv: Sequence[str], output: Path) -> tuple:
    """Measure a script; returns the numbers, a title, points and ceilings."""
    module = load_script(script)
    _, args = script_arguments(module, argv, str(output))
    output.mkdir(parents=True, exist_ok=True)  # if it cannot be made, that is said now
    with sign_of_life("measuring"):
        result, rows = roofline.measure_groups(module, args)
    title = f"{module.SCRIPT}: a training step on {result['environment']['device_name']}"
    print(f"{title}, batch size {args.batch_size}\n\n{roofline.table(rows, 'script')}\n")
    print(
        "FLOP: matrix products, counted on the unfused model; fused kernels compute the same ones."
    )
    flop, moved, ms = (sum(row[key] for row in rows) for key in ("flop", "bytes", "ms"))
    print(f"All groups: {flop / 1e9:.3f} GFLOP, {moved / 1e6:.2f} MB, {ms:.3f} ms")
    print(ceilings := Ceilings(**result["ceilings"]))
    if getattr(module, "INTERPRETED", False):
        note("Triton kernels ran in an interpreter: the times say nothing about them")
    content = {"schema_version": 1, "runs": [result], "rows": rows}
    return content, title, {row["group"]: row for row in rows}, ceilings


def analyse_rocprof_compute(directory: Path) -> tuple:
    """The same from a profile of rocprof-compute."""
    gpu, ceilings, rows = read_rocprof_compute(directory)
    first = rows[: roofline.TOP]
    counted = f"FLOP and HBM bytes by the counters of {gpu}"
    print(f"{roofline.table(first, 'kernel')}\n\nAll kernels: {len(rows)}; {counted}.")
    content = {"schema_version": 1, "source": str(directory), "rows": rows}
    if not ceilings:
        print("Executed, not measured: no times, and bytes as if each line were moved once.")
        return content, "", {}, None
    gemm = f"{cell(ceilings.gemm_tflops, '.3f', ' TFLOP/s')} ({ceilings.precision})"
    print(f"Ceilings of roofline.csv: {gemm}, {ceilings.copy_gb_per_s:.1f} GB/s (HBM)")
    points = {f"{i} {short_name(row['kernel'], 40)}": row for i, row in enumerate(first, 1)}
    content["ceilings"] = asdict(ceilings)
    title = f"kernels of {directory} by rocprof-compute's counters"
    return content, title, points, ceilings


def analyse(args: argparse.Namespace, argv: Sequence[str]) -> int:
    drawing()  # before anything is measured
    if args.from_rocprof_compute and argv:
        raise ToolError(f"--from-rocprof-compute runs no script: {argv[0]} has no meaning here")
    if args.from_rocprof_compute:
        content, *drawn = analyse_rocprof_compute(args.from_rocprof_compute)
    else:
        content, *drawn = analyse_script(args.script, argv, args.output)
    files = [args.output / f"{NAME}.{end}" for end in ("csv", "json", "png")]
    write_csv(files[0], content["rows"])
    write_text(files[1], json.dumps(content, indent=1) + "\n")
    if drawn[-1]:
        roofline.draw(files[2], *drawn)
    else:
        files.pop()  # without times there are no points
    print(f"Written: {', '.join(map(str, files))}")
    return 0


def build_parser() -> Parser:
    parser = parser_around(__file__, __doc__, DEFAULT_SCRIPT)
    what = parser.add_mutually_exclusive_group()
    add_script(what, DEFAULT_SCRIPT)
    read = "read a profile, run nothing"
    what.add_argument("--from-rocprof-compute", type=Path, metavar="DIR", help=read)
    parser.add_path("--output", "DIR", default=Path(NAME))
    return parser


main = program(build_parser, analyse, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

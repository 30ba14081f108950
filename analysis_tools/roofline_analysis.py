#!/usr/bin/env python3
"""FLOPs, bytes and time of a whole training step by what its operators do, against what the device
reaches.

Groups are GEMM, attention, normalisation, element-wise, copies, reductions, optimizer and what is
none of these. What a row has, and where it comes from:

  FLOP   of matrix products, nothing else, on the model with everything off. Fusion computes the
         same products, so the total does not depend on it, and our own Triton kernels, into which
         no counter sees, have what their unfused parts have. Attention has the products of its
         fused kernels; unfused ones are GEMMs. What a kernel computes twice, as attention's
         backward pass does, counts once.
  bytes  every operator reads its tensors from memory and writes its results there, once each, with
         the fusions as chosen. A group may move more than a copy does where caches hold its data.
  time   of the kernels in three profiled steps; on a CPU the self time of operators. Steps are
         launched kernel by kernel, also those of V4, so that the operator of each is known.
  roof   a large GEMM in the run's precision and a large copy, measured on the same device.

--from-rocprof-compute reads what run_rocprof_compute.sh collected on an AMD GPU in place of that:
FLOP, bytes of HBM and time of each kernel by its counters (pmc_perf.csv), and the ceilings that
rocprof-compute measured (roofline.csv). No AMD GPU was at hand: this was tried on files of MI200 in
rocprof-compute's own tests.

Written to --output: roofline_analysis.csv and .json with all numbers, roofline_analysis.png.

Examples:
  python analysis_tools/roofline_analysis.py --script tiny_llama_v2.py --batch-size 8 --seq-len 128
  python analysis_tools/roofline_analysis.py --scripts tiny_llama_v1.py tiny_llama_v4.py \\
      --use-amp --output ./roofline
  python analysis_tools/roofline_analysis.py --from-rocprof-compute rocprof_compute_results \\
      --output ./roofline
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from lab.cli import Parser, ToolError, print_notes, program
from lab.files import write_text
from lab.profile import roofline
from lab.profile.ceilings import Ceilings
from lab.profile.kernels import short_name
from lab.rocm.counters import read_rocprof_compute
from lab.script import DEFAULT_SCRIPT, add_script, load_script, parser_around, script_arguments
from lab.show import cell, drawing, write_csv

PROG = Path(__file__).name
NAME = "roofline_analysis"


def write(output: Path, content: dict, title: str, points: dict, ceilings: Ceilings) -> None:
    """All three files."""
    roofline.draw(output / f"{NAME}.png", title, points, ceilings, bandwidths=True)
    write_csv(output / f"{NAME}.csv", content["rows"])
    write_text(output / f"{NAME}.json", json.dumps(content, indent=1) + "\n")
    print(f"Written: {', '.join(str(output / f'{NAME}.{end}') for end in ('csv', 'json', 'png'))}")


def analyse_scripts(scripts: Sequence[str], argv: Sequence[str], output: Path) -> None:
    """Measure one script after the other."""
    output.mkdir(parents=True, exist_ok=True)
    results, rows, ceilings = [], {}, None
    for name in scripts:
        module = load_script(name)
        _, args = script_arguments(module, argv, str(output))
        if args.torch_compile:
            reason = "there are no operators any more to count bytes of"
            raise ToolError(f"--enable-torch-compile does not fit here: {reason}")
        args.cuda_graph = False
        print(f"{PROG}: {module.SCRIPT}: counting and measuring", file=sys.stderr)
        result, rows[module.SCRIPT] = roofline.measure_groups(module, args, ceilings)
        ceilings = Ceilings(**result["ceilings"])  # same arguments, same precision
        results.append(result)
    every, first = [row for found in rows.values() for row in found], results[0]
    title = f"{', '.join(rows)}: a training step on {first['environment']['device_name']}"
    print(f"{title}, batch size {first['training']['batch_size']}\n")
    print(f"{roofline.table(every, 'script')}\n")
    counted = "matrix products, counted on the unfused model"
    print(f"FLOP: {counted}; fused kernels, also our own, compute the same ones.")
    for name, found in rows.items():
        flop, moved, ms = (sum(row[key] for row in found) for key in ("flop", "bytes", "ms"))
        print(f"{name}: {flop / 1e9:.3f} GFLOP, {moved / 1e6:.2f} MB, {ms:.3f} ms in all groups")
    print(ceilings)
    if any(getattr(sys.modules[name], "INTERPRETED", False) for name in rows):
        why = "the times say nothing about them"
        print_notes(PROG, f"Triton kernels ran in an interpreter here: {why}")
    points = {f"{row['script']} " * (len(rows) > 1) + row["group"]: row for row in every}
    content = {"schema_version": 1, "runs": results, "rows": every}
    write(output, content, title, points, ceilings)


def analyse_rocprof_compute(directory: Path, output: Path) -> None:
    """Turn a profile of rocprof-compute into the same files."""
    if not directory.is_dir():
        raise ToolError(f"{directory}: no such directory")
    gpu, ceilings, rows = read_rocprof_compute(directory)
    first = rows[: roofline.TOP]
    counted = f"FLOP and HBM bytes by the counters of {gpu}"
    print(f"{roofline.table(first, 'kernel')}\n\nAll kernels: {len(rows)}; {counted}.")
    gemm = f"{cell(ceilings.gemm_tflops, '.3f', ' TFLOP/s')} ({ceilings.precision})"
    print(f"Ceilings of roofline.csv: {gemm}, {ceilings.copy_gb_per_s:.1f} GB/s (HBM)")
    points = {f"{i} {short_name(row['kernel'], 40)}": row for i, row in enumerate(first, 1)}
    title = f"kernels of {directory} by rocprof-compute's counters"
    content = {"schema_version": 1, "source": str(directory), "ceilings": asdict(ceilings)}
    write(output, content | {"rows": rows}, title, points, ceilings)


def analyse(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure scripts or read a profile; returns the exit status."""
    drawing()  # before anything is measured
    if not args.from_rocprof_compute:
        analyse_scripts(args.scripts or [args.script], argv, args.output)
    elif argv:
        raise ToolError(f"--from-rocprof-compute runs no script: {argv[0]} has no meaning here")
    else:
        analyse_rocprof_compute(args.from_rocprof_compute, args.output)
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = parser_around(PROG, __doc__, DEFAULT_SCRIPT, "the scripts")
    what = parser.add_mutually_exclusive_group()
    add_script(what, DEFAULT_SCRIPT)
    several = "several, in one table and picture"
    what.add_argument("--scripts", nargs="+", metavar="FILE", help=several)
    profile = {"type": Path, "metavar": "DIR", "help": "read a profile, run nothing"}
    what.add_argument("--from-rocprof-compute", **profile)
    parser.add_path("--output", "DIR", default=Path(NAME))
    return parser


main = program(build_parser, analyse, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

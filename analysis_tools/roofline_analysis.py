#!/usr/bin/env python3
"""FLOPs, bytes and time of a whole training step by what its operators do, against what the device reaches.

Groups are GEMM, attention, normalisation, element-wise, copies, reductions, optimizer and what is none of these. What
a row has, and where it comes from:

  FLOP   of matrix products, nothing else, on the model with everything off. Fusion computes the same products, so the
         total does not depend on it, and our own Triton kernels, into which no counter sees, have what their unfused
         parts have. Attention has the products of its fused kernels; unfused ones are GEMMs. What a kernel computes
         twice, as attention's backward pass does, counts once.
  bytes  every operator reads its tensors from memory and writes its results there, once each, with the fusions as
         chosen. A group may move more than a copy does where caches hold its data.
  time   of the kernels in three profiled steps; on a CPU the self time of operators. Steps are launched kernel by
         kernel, also those of V4, so that the operator of each is known.
  roof   a large GEMM in the run's precision and a large copy, measured on the same device.

--from-rocprof-compute reads what run_rocprof_compute.sh collected on an AMD GPU in place of that: FLOP, bytes of HBM
and time of each kernel by its counters (pmc_perf.csv), and the ceilings that rocprof-compute measured (roofline.csv).
No AMD GPU was at hand: this was tested on files in the documented format.

Written to --output: roofline_analysis.csv and .json with all numbers, roofline_analysis.png.

Examples:
  python analysis_tools/roofline_analysis.py --script tiny_llama_v2.py --batch-size 8 --seq-len 128
  python analysis_tools/roofline_analysis.py --scripts tiny_llama_v1.py tiny_llama_v4.py --use-amp --output ./roofline
  python analysis_tools/roofline_analysis.py --from-rocprof-compute rocprof_compute_results --output ./roofline
"""

from __future__ import annotations

import _root

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from workshop.cli import ToolError, documented_parser, print_notes, run_tool
from workshop.files import write_csv, write_text
from workshop.profile.ceilings import Ceilings, measure_ceilings
from workshop.profile.kernels import CATEGORIES, category, short_name
from workshop.profile.roofline import draw, group_bytes, group_flops, group_times, rates
from workshop.rocm.files import matching, read_columns
from workshop.script import DEFAULT_SCRIPT, add_script, load_script, script_arguments
from workshop.show import cell, drawing, markdown_table
from workshop.turns import free_memory

PROG = Path(__file__).name
NAME = "roofline_analysis"
TOP = 12  # kernels in the table and the picture of a ROCm profile

# What AMD's counters count, as rocprof-compute adds them up for its roofline: an instruction of the vector units works
# on 64 lanes, a unit of MFMA_MOPS is 512 operations. Beside them the column of roofline.csv with that unit's ceiling.
FLOP_COUNTERS = {
    **{f"SQ_INSTS_VALU_{operation}_{kind}": (64 * flop, f"FP{kind[1:]}Flops")
       for kind in ("F16", "F32", "F64") for operation, flop in {"ADD": 1, "MUL": 1, "TRANS": 1, "FMA": 2}.items()},
    **{f"SQ_INSTS_VALU_MFMA_MOPS_{kind}": (512, f"MFMA{kind}Flops") for kind in ("F16", "BF16", "F32", "F64")},
}  # fmt: skip
# Bytes of HBM by the size of requests: all are of 64 (reads) or 32 bytes (writes) but for those counted apart.
WRITES = {"WRREQ_sum": 32, "WRREQ_64B_sum": 32}
READS = {"RDREQ_sum": 64, "RDREQ_32B_sum": -32}
BYTE_COUNTERS = {
    "MI350": {f"TCC_EA0_{n}": b for n, b in {"RDREQ_128B_sum": 64, **READS, **WRITES}.items()},
    "MI300": {"TCC_BUBBLE_sum": 64, **{f"TCC_EA0_{n}": b for n, b in {**READS, **WRITES}.items()}},
    "MI200": {f"TCC_EA_{n}": b for n, b in {**READS, **WRITES}.items()},
}


def measure_script(name: str, argv: Sequence[str], output: Path, ceilings: Ceilings | None) -> tuple[dict, list[dict]]:
    """What a script was measured on and with, and its rows; the ceilings are measured unless they are known."""
    module = load_script(name)
    _, args = script_arguments(module, argv, str(output))
    if args.torch_compile:
        raise ToolError("--enable-torch-compile does not fit here: there are no operators any more to count bytes of")
    args.cuda_graph = False
    device = module.prepare(args)
    print(f"{PROG}: {module.SCRIPT}: counting and measuring", file=sys.stderr)
    try:
        flop = group_flops(module, args, device)
        free_memory()
        trainer = module.Trainer(args, device)
        spent = group_times(trainer)
        moved = group_bytes(trainer, module.NO_WORK)
        ceilings = ceilings or measure_ceilings(args, device)
    except (RuntimeError, MemoryError) as error:
        if not module.is_out_of_memory(error):
            raise
        raise ToolError(f"{module.SCRIPT}: out of memory: lower --batch-size or --seq-len", status=3) from error
    groups = [group for group in CATEGORIES if flop[group] or moved[group] or spent[group]]
    rows = [
        make_row({"script": module.SCRIPT, "group": group.lower()}, flop, group, moved[group], spent[group], ceilings)
        for group in groups
    ]
    result = {
        "script": module.SCRIPT,
        "config": asdict(trainer.model.config),
        "fusions": {attribute: getattr(args, attribute) for _, attribute, _ in module.FUSIONS},
        "training": {key: getattr(args, key) for key in ("batch_size", "use_amp", "amp_dtype", "matmul_precision")},
        "environment": module.environment(device),
        "ceilings": asdict(ceilings),
    }
    del trainer
    free_memory()
    return result, rows


def make_row(names: dict, flop: Counter, key: str, moved: int, ms: float, ceilings: Ceilings) -> dict:
    """A row of the CSV: its names, FLOP with its share of all, bytes, time and rates."""
    share = 100 * flop[key] / flop.total() if flop.total() else 0.0
    gb_per_s = moved / ms / 1e6 if moved and ms else None
    return {
        **names,
        **{"flop": flop[key], "share_percent": share, **rates(flop[key], moved, ms, ceilings), "gb_per_s": gb_per_s},
        "percent_of_copy": 100 * gb_per_s / ceilings.copy_gb_per_s if gb_per_s else None,
    }


def read_rocprof_compute(directory: Path) -> tuple[str, Ceilings, list[dict]]:
    """Which GPU's counters are in the folder, the ceilings measured there, and a row per kernel, the longest first.

    ValueError says what is wrong with a file.
    """
    files = matching(directory, "pmc_perf.csv", "rocprof-compute")
    if len(files) > 1:
        raise ValueError(f"{directory}: several profiles ({', '.join(str(file.parent) for file in files)}), name one")
    with files[0].open(encoding="utf-8", errors="replace") as file:
        header = file.readline()
    gpu = next((gpu for gpu, columns in BYTE_COUNTERS.items() if all(c in header for c in columns)), "MI300")
    counters = [*FLOP_COUNTERS, *BYTE_COUNTERS[gpu]]
    flop, moved, ns, calls, by_unit = (Counter() for _ in range(5))
    for name, *cells in read_columns(files[0], "Kernel_Name", "Start_Timestamp", "End_Timestamp", *counters):
        start, end, *values = (number(cell, files[0]) for cell in cells)
        counted = dict(zip(counters, values, strict=True))
        calls[name] += 1
        ns[name] += end - start
        moved[name] += round(sum(counted[column] * size for column, size in BYTE_COUNTERS[gpu].items()))
        for column, (each, unit) in FLOP_COUNTERS.items():
            flop[name] += round(counted[column] * each)
            by_unit[unit] += counted[column] * each
    if not calls:
        raise ValueError(f"{files[0]}: it has no dispatches")
    unit, path = max(by_unit, key=by_unit.get), files[0].with_name("roofline.csv")
    best = [number(cell, path) for cell in (read_columns(path, "HBMBw", unit) or [()])[0]]
    if not best or not min(best) > 0:
        raise ValueError(f"{path}: it has no ceilings")
    ceilings = Ceilings(unit, 0, best[1] / 1e3, 0, best[0])  # the file has GB/s and GFLOP/s
    names = {name: {"kernel": name, "group": category(name).lower(), "calls": calls[name]} for name in calls}
    rows = [make_row(names[name], flop, name, moved[name], t / 1e6, ceilings) for name, t in ns.most_common()]
    return gpu, ceilings, rows


def number(text: str, path: Path) -> float:
    """A finite number of a file; ValueError if it is none."""
    try:
        if math.isfinite(value := float(text)):
            return value
    except ValueError:
        pass
    raise ValueError(f"{path}: {text!r} is no number")


def table(rows: Sequence[dict], name: str) -> str:
    """The rows in Markdown; `name` is the column that names them beside their group."""
    lines = [
        [
            f"`{short_name(row[name], 45)}`" if name == "kernel" else row[name],
            row["group"],
            cell(row["flop"] / 1e9, ".4f"),
            cell(row["share_percent"], ".1f", " %"),
            cell(row["bytes"] / 1e6, ".2f"),
            cell(row["flop_per_byte"] or None, ".2f"),
            cell(row["ms"], ".3f"),
            cell(row["achieved_tflops"], ".4g"),
            cell(row["percent_of_roof"], ".1f", " %"),
            cell(row["gb_per_s"], ".4g"),
            cell(row["percent_of_copy"], ".1f", " %"),
        ]
        for row in rows
    ]
    header = [name, "group", "GFLOP", "share", "MB moved", "FLOP/byte", "ms", "TFLOP/s", "of roof", "GB/s", "of copy"]
    return markdown_table(header, lines, text_columns=2)


def write(output: Path, title: str, result: dict, rows: Sequence[dict], labelled: dict[str, dict], c: Ceilings) -> None:
    """All three files."""
    draw(output / f"{NAME}.png", title, labelled, c, bandwidths=True)
    write_csv(output / f"{NAME}.csv", rows)
    write_text(output / f"{NAME}.json", json.dumps({"schema_version": 1, **result, "rows": rows}, indent=1) + "\n")
    print(f"Written: {', '.join(str(output / f'{NAME}.{ending}') for ending in ('csv', 'json', 'png'))}")


def analyse_scripts(scripts: Sequence[str], argv: Sequence[str], output: Path) -> int:
    """Measure one script after the other; returns the exit status."""
    output.mkdir(parents=True, exist_ok=True)
    results, rows, ceilings = [], [], None
    for name in scripts:
        result, found = measure_script(name, argv, output, ceilings)
        ceilings = ceilings or Ceilings(**result["ceilings"])  # the same arguments have the same precision
        results.append(result)
        rows += found
    device = results[0]["environment"]
    several = len(results) > 1
    title = f"{', '.join(r['script'] for r in results)}: a training step on {device['device_name']}"
    print(f"{title}, batch size {results[0]['training']['batch_size']}\n\n{table(rows, 'script')}\n")
    print("FLOP: matrix products, counted on the unfused model; fused kernels, also our own, compute the same ones.")
    for result in results:
        mine = [row for row in rows if row["script"] == result["script"]]
        flop, ms = sum(row["flop"] for row in mine), sum(row["ms"] for row in mine)
        moved = sum(row["bytes"] for row in mine)
        print(f"{result['script']}: {flop / 1e9:.3f} GFLOP, {moved / 1e6:.2f} MB, {ms:.3f} ms in all groups")
    print(f"GEMM ceiling: {ceilings.gemm_tflops:.3f} TFLOP/s ({ceilings.precision}, size {ceilings.gemm_size})")
    print(f"Copy ceiling: {ceilings.copy_gb_per_s:.1f} GB/s (read and written)")
    if device["device"] == "cpu" and any(result["script"][-1] in "34" for result in results):
        print_notes(PROG, "Triton kernels ran in an interpreter here: the times say nothing about them")
    labels = {f"{row['script']} {row['group']}" if several else row["group"]: row for row in rows}
    write(output, title, {"runs": results}, rows, labels, ceilings)
    return 0


def analyse_rocprof_compute(directory: Path, output: Path) -> int:
    """Turn a profile of rocprof-compute into the same files; returns the exit status."""
    if not directory.is_dir():
        raise ToolError(f"{directory}: no such directory")
    try:
        gpu, ceilings, rows = read_rocprof_compute(directory)
    except ValueError as error:
        raise ToolError(str(error)) from error
    print(f"{table(rows[:TOP], 'kernel')}\n\nAll kernels: {len(rows)}; FLOP and HBM bytes by the counters of {gpu}.")
    print(f"Ceilings of roofline.csv: {ceilings.gemm_tflops:.3f} TFLOP/s ({ceilings.precision}), "
          f"{ceilings.copy_gb_per_s:.1f} GB/s (HBM)")  # fmt: skip
    labels = {f"{i} {short_name(row['kernel'], 40)}": row for i, row in enumerate(rows[:TOP], 1)}
    title = f"kernels of {directory} by rocprof-compute's counters"
    write(output, title, {"source": str(directory), "ceilings": asdict(ceilings)}, rows, labels, ceilings)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    note = f"Every other argument goes to the scripts: python {DEFAULT_SCRIPT} --help lists them.\n\n"
    parser = documented_parser(PROG, __doc__, "%(prog)s [arguments] [arguments of the scripts]", note)
    what = parser.add_mutually_exclusive_group()
    add_script(what, DEFAULT_SCRIPT)
    what.add_argument("--scripts", nargs="+", metavar="FILE", help="several, in one table and picture")
    what.add_argument("--from-rocprof-compute", type=Path, metavar="DIR", help="read a profile, run nothing")
    parser.add_argument("--output", type=Path, default=Path(NAME), metavar="DIR", help="(default: ./%(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    own, rest = build_parser().parse_known_args(argv)

    def analyse() -> int:
        drawing()  # before anything is measured
        if own.from_rocprof_compute:
            if rest:
                raise ToolError(f"--from-rocprof-compute runs no script: {rest[0]} has no meaning here")
            return analyse_rocprof_compute(own.from_rocprof_compute, own.output)
        return analyse_scripts(own.scripts or [own.script], rest, own.output)

    return run_tool(PROG, analyse)


if __name__ == "__main__":
    sys.exit(main())

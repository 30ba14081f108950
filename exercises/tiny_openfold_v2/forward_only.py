#!/usr/bin/env python3
"""Time a prediction: the forward pass alone, without gradients, of each version at several sizes.

The versions take turns, on a GPU as graphs. V1 is the model with nothing fused. Memory is what a
pass takes at its peak beyond weights and input.

Examples:
  python exercises/tiny_openfold_v2/forward_only.py --sizes 16x4,32x8 --num-blocks 2
  python exercises/tiny_openfold_v2/forward_only.py --versions V1,V2,V3,V4 --use-amp \\
      --num-blocks 48 --msa-dim 256 --num-heads-msa 8 --output forward.json
  python exercises/tiny_openfold_v2/forward_only.py --table forward.json
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

# otherwise the profiler writes lines of its own on stderr
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
from torch import Tensor

from fusion_lab.cli import Parser, program, several
from fusion_lab.graph_turns import DEVICE, steps_in_turns
from fusion_lab.records import read_study
from fusion_lab.script import load_script, parser_around, precision_of
from fusion_lab.show import Column, render, side_columns
from fusion_lab.study import (
    Part,
    as_rows,
    by_side,
    heading,
    measure_study,
    study_asked_for,
)
from fusion_lab.turns import graph_of, named, parse_quiet, ratios, spread

PROG = Path(__file__).name
SCRIPTS = {f"V{n}": f"tiny_openfold_v{n}.py" for n in (1, 2, 3, 4)}


def residues_and_sequences(text: str) -> tuple[int, int]:
    """argparse type: 256x128 is a protein of 256 residues with 128 sequences."""
    residues, _, sequences = text.partition("x")
    if not (residues.isdecimal() and sequences.isdecimal() and int(residues) * int(sequences)):
        raise argparse.ArgumentTypeError(f"must be like 256x128, residues x sequences: {text!r}")
    return int(residues), int(sequences)


def version(text: str) -> str:
    """argparse type: V1 to V4."""
    if text not in SCRIPTS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(SCRIPTS)}, not {text!r}")
    return text


def build_parser() -> Parser:
    """The command line."""
    parser = parser_around(PROG, __doc__, SCRIPTS["V2"], "the scripts")
    sizes = "RESIDUESxSEQUENCES of each protein (default: 16x4,32x8)"
    default = {"default": [(16, 4), (32, 8)], "help": sizes, "metavar": "NxS,..."}
    parser.add_argument("--sizes", type=several(residues_and_sequences), **default)
    versions = {"default": ["V1", "V2"], "help": "(default: V1,V2)", "metavar": "V1,V2,..."}
    parser.add_argument("--versions", type=several(version), **versions)
    parser.add_count("--rounds", 5, "turns of each version")
    parser.add_path("--output", "FILE.json", "keep the study", default=Path("forward_only.json"))
    parser.add_path("--table", "FILE.json", "measure nothing, print the table of this study")
    return parser


def prediction(name: str, argv: Sequence[str]) -> tuple[dict, Callable[[], tuple[Tensor, ...]]]:
    """What names the row of a version with these arguments, and its forward pass."""
    module = load_script(SCRIPTS[name])
    args = parse_quiet(module, graph_of(argv))
    model = module.build_model(args, DEVICE)
    tokens = module.make_batches(args, torch.device("cpu"), args.seed).next_batch()["tokens"]
    tokens = tokens.to(DEVICE)
    dtype = getattr(torch, args.amp_dtype)

    @torch.no_grad()
    def forward() -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE.type, dtype, enabled=args.use_amp):
            return tuple(model(tokens).values())

    return named(module.SCRIPT, [*argv], args), forward


def peak_mb_on_a_cpu(forward: Callable[[], object]) -> float:
    """MB that a pass takes at its peak, from the profiler's memory events."""
    one_pass = SimpleNamespace(step=forward, gpu=False)
    events = load_script(SCRIPTS["V1"]).trace_of_a_step(one_pass, profile_memory=True)
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    return max(accumulate(change for _, change in changes)) / 1e6


def in_turns(versions: Sequence[str], argv: Sequence[str], rounds: int) -> list[dict]:
    """A row for each version."""
    rows = {}
    steps = {}
    for name in versions:
        rows[name], steps[name] = prediction(name, argv)
    for name, found in steps_in_turns(steps, rounds).items():
        rows[name] |= {key: value for key, value in found.items() if key != "held_mb"}
        if DEVICE.type == "cpu" and "error" not in found:
            rows[name]["extra_mb"] = peak_mb_on_a_cpu(steps[name])
    return as_rows(rows)


def measure(args: argparse.Namespace, argv: Sequence[str]) -> Path:
    """Measure all sizes; returns where the study is."""
    parsed = load_script(SCRIPTS["V2"]).parse_args([*argv])
    parts: list[Part] = []
    for residues, sequences in args.sizes:
        sizes = [*argv, "--seq-len", str(residues), "--num-seqs", str(sequences)]
        names = {"shape": f"{residues} residues, {sequences} sequences"}
        names["precision"] = precision_of(vars(parsed))
        parts.append((names, partial(in_turns, args.versions, sizes, args.rounds)))
    measure_study(args.output, parts, argv=[*argv], rounds=args.rounds)
    return args.output


def study(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure or read, and print; returns the exit status."""
    path = study_asked_for(args.table, argv) or measure(args, argv)
    content = read_study(path, ("shape", "side"), ("us", "turns_us"))
    names = list(dict.fromkeys(row["side"] for row in content["rows"]))
    found = [
        {"shape": shape, **sides} for (shape,), sides in by_side(content["rows"], "shape").items()
    ]
    columns = [
        Column("a prediction", "shape"),
        *side_columns("{}, ms", names, lambda row: row.get("us") and row["us"] / 1e3, ".1f", True),
        *side_columns("{}, MB", names, "extra_mb", ".0f"),
    ]
    print(heading(content, PROG), render(columns, found), sep="\n\n")
    first, *others = names
    print(f"\nTimes as fast as {first}, turn by turn:")
    for row in found:
        turns = {name: ratios(row.get(first, {}), row.get(name, {})) for name in others}
        said = [f"{name} {spread(times)}" for name, times in turns.items() if times]
        print(f"{row['shape']}: {'; '.join(said) or '-'}")
    return 0


main = program(build_parser, study, of_scripts=True)

if __name__ == "__main__":
    sys.exit(main())

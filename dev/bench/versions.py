#!/usr/bin/env python3
"""Take the measurements behind the figures of README and docs, and print the tables from them.

Both sides of a ratio are measured in this process in short alternating turns, where there is a GPU
as whole-step graphs unless a row says otherwise. A suite writes one file; the same
command goes on there, and what is measured is not measured again.

Examples:
  python dev/bench/versions.py overview DIR  V1 to V4 in bf16, as graphs
  python dev/bench/versions.py headline DIR  V1 to V3: sizes, precisions, eager, graph and compiled
  python dev/bench/versions.py fastest DIR  TinyLlama's V4, V3, and all compiled, as graphs
  python dev/bench/versions.py fastest_openfold DIR  the same of TinyOpenFold
  python dev/bench/versions.py trunk DIR  48 Evoformer blocks, with and without --checkpoint-blocks
  python dev/bench/versions.py ablation_tiny_llama_v3 DIR  what V3 adds: each alone, all but each
  python dev/bench/versions.py lengths DIR  proteins of lengths that are no multiple of 8, too
  python dev/bench/versions.py scaling DIR  the part on one GPU; then, in the same file, that on N:
  torchrun --nproc-per-node N dev/bench/versions.py scaling DIR
  python dev/bench/versions.py headline DIR --only "tiny_llama, small" bf16    a part of a suite
  python dev/bench/versions.py table DIR  the tables, from what lies in DIR
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

from dev.bench.several_gpus import join_processes, scaling
from dev.bench.sizes import (
    ALL_VERSIONS,
    COMPILE,
    MODES,
    ODD,
    PRECISIONS,
    SHAPES,
    TRUNK,
    VERSIONS,
    Shape,
    in_sizes,
    script_of,
    sized,
)
from dev.bench.version_tables import ABLATIONS, FASTEST, OF_ABLATIONS, TABLES, table
from fusion_lab.cli import Parser, documented_parser, program
from fusion_lab.study import Part, check_failed, chosen, measure_study
from fusion_lab.sweep import Side, fusion_sets, fusion_teams, measured, new_fusions
from fusion_lab.turns import graph_of, in_turns

TRUNKS = {  # sequences and residues of AlphaFold 2's training, and of its fine-tuning
    "128 x 256": sized("openfold", TRUNK),
    "512 x 384": sized("openfold", f"{TRUNK} --num-seqs 512 --seq-len 384"),
}
ABLATED = {  # sizes of the ablation of V4, and of those before
    **SHAPES,
    "tiny_openfold, medium": sized("openfold", ODD),
    "tiny_openfold, 8 blocks": sized("openfold", TRUNK.replace("blocks 48", "blocks 8")),
}
DEFAULTS = {"tiny_openfold": sized("openfold"), "tiny_llama": sized("llama", "--seq-len 128")}
LENGTHS = (160, 165, 168, 171, 173, 176, 179, 184, 187, 192)  # of the suite of this name
GROUP = 8  # sets of fusions in memory together
# Suites: parts of studies, which return rows


def grid(
    shapes: Mapping[str, Shape],
    precisions: Iterable[str],
    sides: Sequence[str],
    rounds: int,
    modes: Iterable[str] = ("",),
) -> Iterator[Part]:
    """These sides in turns, in each size, precision and mode; without modes as graphs on a GPU."""
    for (shape, (model, sizes)), precision, mode in product(shapes.items(), precisions, modes):
        asked = [*sizes, *PRECISIONS[precision], *MODES.get(mode, ())]
        asked = asked if mode else graph_of(asked)
        names = {"shape": shape, "precision": precision, **({"mode": mode} if mode else {})}
        pairs = {}
        for side in sides:
            version, _, compiled = side.partition(" ")
            pairs[side] = Side(script_of(model, version), [*asked, *(COMPILE if compiled else ())])
        yield names, partial(measured, pairs, rounds)


def overview(args: argparse.Namespace) -> Iterator[Part]:
    return grid(SHAPES, ["bf16"], ALL_VERSIONS, args.rounds)


def headline(args: argparse.Namespace) -> Iterator[Part]:
    return grid(SHAPES, PRECISIONS, VERSIONS, args.rounds, MODES)


def fastest(model: str, args: argparse.Namespace) -> Iterator[Part]:
    shapes = {name: shape for name, shape in SHAPES.items() if shape.model == model}
    compiled = [f"{version} compiled" for version in reversed(VERSIONS)]
    return grid(shapes, PRECISIONS, ["V4", "V3", "V1", *compiled], args.rounds)


def lengths(args: argparse.Namespace) -> Iterator[Part]:
    """TinyOpenFold's versions over lengths in bf16, V2 compiled at one that is odd and the next
    multiple of 8, where also the other precisions are."""
    shapes = {f"37 x {n}": sized("openfold", f"{ODD} --seq-len {n}") for n in LENGTHS}
    both = {name: shapes.pop(name) for name in ("37 x 173", "37 x 176")}
    sides = ["V4", "V3", "V2"]
    yield from grid(shapes, ["bf16"], sides, args.rounds)
    yield from grid(both, ["bf16"], [*sides, "V2 compiled"], args.rounds)
    yield from grid(both, ["fp32", "TF32"], sides, args.rounds)


def trunk(args: argparse.Namespace) -> Iterator[Part]:
    """48 blocks in bf16, each side alone, with and without checkpoints: versions, and V2 compiled,
    of which one block is compiled and serves all, as 48 would take too long."""
    kinds = [*reversed(ALL_VERSIONS), "V2 compiled"]
    checkpoints = [], ["--checkpoint-blocks"]
    for (names, model, argv), kind, more in product(in_sizes(shapes=TRUNKS), kinds, checkpoints):
        version, _, compiled = kind.partition(" ")
        side = script_of(model, version), [*argv, "--warmup-steps", "2", *more]
        names = {**names, "side": kind, "checkpointed": bool(more)}
        yield names, partial(trunk_of, kind, bool(compiled), side, args.rounds)


def trunk_of(name: str, compiled: bool, side: tuple[str, list[str]], rounds: int) -> dict:
    """Turns of a side alone, with each of its blocks compiled or as they are."""
    import torch._dynamo

    module = importlib.import_module(side[0])
    build = module.build_model

    def build_compiled(*args: object) -> object:
        model = build(*args)
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block)
        return model

    # or compiled blocks beyond the limit would run eagerly, and be called compiled
    limit = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
    with limit, mock.patch.object(module, "build_model", build_compiled if compiled else build):
        return in_turns({name: side}, rounds)[name]


def single_fusions(script: str, args: argparse.Namespace) -> Iterator[Part]:
    """What a version adds, left out one by one and, before V4, alone; V4 in bf16 at several
    sizes."""
    model, _, version = script.rpartition("_")
    newest = version == "v4"
    fusions = new_fusions(importlib.import_module(script))
    sets = [on for on in fusion_sets(fusions) if len(on) != 1 or not newest]
    precisions = ["bf16"] if newest else ["fp32", "bf16"]
    shapes = ABLATED if newest else {model: DEFAULTS[model]}
    for names, _, argv in in_sizes(precisions, model, shapes):
        for group, sides in fusion_teams(Side(script, argv), fusions, sets, GROUP):
            yield names | group, partial(measured, sides, args.rounds, counted=not newest)


# The command line

SUITES: dict[str, Callable[[argparse.Namespace], Iterable[Part]]] = {
    "overview": overview,
    "headline": headline,
    **{file: partial(fastest, model) for model, file in FASTEST.items()},
    "trunk": trunk,
    **{f"ablation_{script}": partial(single_fusions, script) for script in ABLATIONS},
    "lengths": lengths,
    "scaling": scaling,
}


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    add = parser.add_argument
    add("suite", choices=(*SUITES, "table"), metavar="SUITE", help=f"{', '.join(SUITES)} or table")
    add("directory", type=Path)
    parser.add_count("--rounds", 5, "of all that take turns")
    only = "parts of these sizes, precisions, modes and sides, as rows name them"
    add("--only", nargs="+", default=[], metavar="NAME", help=only)
    gpus = "for whose batch scaling also measures one GPU, for strong scaling (default: 2)"
    add("--gpus", nargs="*", type=int, default=[2], metavar="N", help=gpus)
    add("--tables", nargs="+", choices=TABLES | OF_ABLATIONS, default=list(TABLES), help="of table")
    return parser


def run_suite(args: argparse.Namespace) -> int:
    if args.suite == "table":
        print(table(args.directory, args.tables))
        return 0
    args.directory.mkdir(parents=True, exist_ok=True)
    name = args.suite
    if name == "scaling":
        args.processes = join_processes()
    parts = chosen(list(SUITES[args.suite](args)), args.only)
    path = args.directory / f"{name}.json"
    rows = measure_study(path, parts, rounds=args.rounds)
    check_failed(rows)
    return 0


main = program(build_parser, run_suite)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Take the measurements behind the figures of README and docs, and print the tables from them.

Both sides of a ratio are measured in this process in short alternating turns, where there is a GPU
as whole-step graphs unless a row says otherwise. A suite writes one file, which replaces an earlier
one when its last row is measured; until then the rows are in NAME.partial.json.

Examples:
  python bench/versions.py overview DIR   V1 to V4 in bf16, as graphs
  python bench/versions.py headline DIR   V1 to V3: sizes, precisions, eager, graph and compiled
  python bench/versions.py fastest DIR    TinyLlama's V4, V3, and all compiled, as graphs
  python bench/versions.py fastest_openfold DIR    the same of TinyOpenFold
  python bench/versions.py untuned DIR    the same at sizes of GPT-2 small and TinyLlama 1.1B
  python bench/versions.py trunk DIR      48 Evoformer blocks, with and without --checkpoint-blocks
  python bench/versions.py inference DIR  a transformer layer of V4 in one launch, and in other ways
  python bench/versions.py ablation_tiny_llama_v3 DIR    what V3 adds: each alone, and all but each
  python bench/versions.py padding DIR    batches that are padded, and such of proteins of one size
  python bench/versions.py memory DIR     peak memory of TinyLlama against the sequence length
  python bench/versions.py memory_by_purpose DIR    what memory holds when the forward pass ends
  python bench/versions.py counts DIR     kernels (on a CPU operator calls) by batch size
  python bench/versions.py scaling DIR    the part on one GPU; then, in the same file, that on N:
  torchrun --nproc-per-node N bench/versions.py scaling DIR
  python bench/versions.py headline DIR --only "tiny_llama, small" bf16    a part of a suite
  python bench/versions.py table DIR      the tables, from what lies in DIR
"""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import _path

from bench.several_gpus import join_processes, scaling
from bench.sizes import (
    ALL_VERSIONS,
    COMPILE,
    GPT_2,
    MODES,
    ODD,
    PRECISIONS,
    SHAPES,
    TRUNK,
    VERSIONS,
    in_sizes,
    script_of,
    sized,
)
from bench.version_tables import ABLATIONS, FASTEST, OF_ABLATIONS, PADDED, TABLES, table
from lab.cli import Parser, ToolError, documented_parser, program
from lab.records import Run
from lab.study import (
    Part,
    Sides,
    ablation,
    as_rows,
    check_failed,
    chosen,
    fusion_sets,
    measure_study,
    new_fusions,
)
from lab.turns import all_measured, graph_of, in_turns, make_trainer, named, short_run

TINY_LLAMA = "--hidden-dim 2048 --num-layers 22 --num-heads 32 --num-kv-heads 4"  # TinyLlama 1.1B's
TINY_LLAMA += " --intermediate-dim 5632 --seq-len 2048 --batch-size 2 --vocab-size 32000"
UNTUNED = {  # sizes that no block was chosen for
    "tiny_llama, GPT-2 small": sized("llama", GPT_2),
    "tiny_llama, 1.1B": sized("llama", TINY_LLAMA),
}
TRUNKS = {  # sequences and residues of AlphaFold 2's training, and of its fine-tuning
    "128 x 256": sized("openfold", TRUNK),
    "512 x 384": sized("openfold", f"{TRUNK} --num-seqs 512 --seq-len 384"),
}
MODELS = {"tiny_openfold": [], "tiny_llama": ["--seq-len", "128"]}  # of the ablation of V2 and V3
ABLATED = {  # of that of V4
    **SHAPES,
    "tiny_openfold, medium": sized("openfold", ODD),
    "tiny_openfold, 8 blocks": sized("openfold", TRUNK.replace("blocks 48", "blocks 8")),
}
LENGTHS = (128, 256, 512, 1024, 2048)  # of the suite `memory`
MEMORY_BATCH = 4
# Suites: parts of studies, which return rows


def overview(args: argparse.Namespace) -> Iterator[Part]:
    """All versions as graphs in every size, in bf16."""
    for names, model, argv in in_sizes():
        yield names, partial(all_sides, beside_compiled(model, argv, ALL_VERSIONS), args.rounds)


def headline(args: argparse.Namespace) -> Iterator[Part]:
    """V1 to V3 in every size, precision and mode."""
    for shape, precision, mode in product(SHAPES, PRECISIONS, MODES):
        model, sizes = SHAPES[shape]
        sides = beside_compiled(model, [*sizes, *PRECISIONS[precision], *MODES[mode]], VERSIONS)
        names = {"shape": shape, "precision": precision, "mode": mode}
        yield names, partial(all_sides, sides, args.rounds)


def fastest(model: str, args: argparse.Namespace) -> Iterator[Part]:
    """V4, V3 and V1, and V1 to V3 compiled, all as whole-step graphs."""
    for names, _, argv in in_sizes(PRECISIONS, model):
        sides = beside_compiled(model, argv, ("V4", "V3", "V1"), ("V3", "V2", "V1"))
        yield names, partial(all_sides, sides, args.rounds)


def beside_compiled(
    model: str, argv: list[str], versions: Iterable[str], compiled: Iterable[str] = ()
) -> Sides:
    """Sides: versions as they are, then others under torch.compile."""
    sides = {version: (script_of(model, version), argv) for version in versions}
    for version in compiled:
        sides[f"{version} compiled"] = (script_of(model, version), [*argv, *COMPILE])
    return sides


def all_sides(sides: Sides, rounds: int, **more: Callable) -> list[dict]:
    """A row for each side; all of them have to finish."""
    return as_rows(all_measured(sides, rounds, **more))


def padding(args: argparse.Namespace) -> Iterator[Part]:
    """TinyOpenFold's versions as graphs in bf16, with proteins of one size, and padded."""
    for names, model, argv in in_sizes(model="tiny_openfold"):
        sides = {
            name: (script_of(model, version), argv)
            for version in reversed(ALL_VERSIONS)
            for name in (version, f"{version}{PADDED}")
        }
        yield names, partial(all_sides, sides, args.rounds, building=with_its_proteins)


@contextlib.contextmanager
def with_its_proteins(side: str) -> Iterator[None]:
    """If a side is padded, every second synthetic protein has three quarters of the sequences and
    residues inside; so each batch has masks."""
    module = importlib.import_module(script_of("tiny_openfold", side[:2]))
    whole = module.synthetic_proteins

    def some_shorter(*sizes: int) -> list:
        proteins = whole(*sizes)
        for number, protein in enumerate(proteins[::2]):
            depth, length = (3 * size // 4 for size in protein.tokens.shape)
            known = {name: getattr(protein, name)[:length] for name in ("coords", "observed")}
            proteins[2 * number] = replace(protein, tokens=protein.tokens[:depth, :length], **known)
        return proteins

    made_by = some_shorter if side.endswith(PADDED) else whole
    with mock.patch.object(module, "synthetic_proteins", made_by):
        yield


def untuned(args: argparse.Namespace) -> Iterator[Part]:
    """V4 to V1, V3 and V2 compiled, in bf16 at other sizes: one by one, as two may not fit."""
    for names, model, argv in in_sizes(shapes=UNTUNED):
        sides = beside_compiled(model, argv, reversed(ALL_VERSIONS), ("V3", "V2"))
        for name, side in sides.items():
            yield names | {"side": name}, partial(one_side, name, side, args.rounds)


def one_side(name: str, side: tuple[str, list[str]], rounds: int) -> dict:
    return in_turns({name: side}, rounds)[name]


def trunk(args: argparse.Namespace) -> Iterator[Part]:
    """48 blocks in bf16, each side alone, with and without checkpoints: versions, OpenFold's
    blocks, and compiled ones, of which one block is compiled and serves all, as 48 would take too
    long."""
    import torch

    from bench.peers import openfold_block

    config = importlib.import_module("tiny_openfold_v1").ModelConfig(msa_dim=256, num_heads_msa=8)
    theirs = partial(openfold_block, config=config, clone=args.openfold)
    kinds = {version: (version, None) for version in reversed(ALL_VERSIONS)}
    kinds["OpenFold"] = "V1", theirs
    kinds["V2 compiled"] = "V2", torch.compile
    kinds["OpenFold compiled"] = "V1", lambda block: torch.compile(theirs(block))
    checkpoints = [], ["--checkpoint-blocks"]
    for (names, model, argv), kind, more in product(in_sizes(shapes=TRUNKS), kinds, checkpoints):
        version, change = kinds[kind]
        side = script_of(model, version), [*argv, "--warmup-steps", "2", *more]
        names = {**names, "side": kind, "checkpointed": bool(more)}
        yield names, partial(with_blocks, change, kind, side, args.rounds)


def with_blocks(
    change: Callable | None, name: str, side: tuple[str, list[str]], rounds: int
) -> dict:
    """Turns of a side alone, with what `change` makes of each of its blocks."""
    import torch._dynamo

    module = importlib.import_module(side[0])
    build = module.build_model

    def build_changed(*args: object) -> object:
        model = build(*args)
        for number, block in enumerate(model.blocks):
            model.blocks[number] = change(block)
        return model

    # or compiled blocks beyond the limit would run eagerly, and be called compiled
    limit = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
    with limit, mock.patch.object(module, "build_model", build_changed if change else build):
        return one_side(name, side, rounds)


def single_fusions(script: str, args: argparse.Namespace) -> list[Part]:
    """What a version adds, left out one by one and, before V4, alone; V4 in bf16 at several
    sizes."""
    model, _, version = script.rpartition("_")
    fusions = new_fusions(importlib.import_module(script))
    if version != "v4":
        arguments = {
            precision: graph_of([*MODELS[model], *PRECISIONS[precision]])
            for precision in ("fp32", "bf16")
        }
        return ablation(script, arguments, fusions, fusion_sets(fusions), args.rounds)
    sets, parts = [on for on in fusion_sets(fusions) if len(on) != 1], []
    for names, _, argv in in_sizes(model=model, shapes=ABLATED):
        of_size = ablation(script, {"bf16": argv}, fusions, sets, args.rounds, counted=False)
        parts += [(names | of_group, measure) for of_group, measure in of_size]
    return parts


def memory(args: argparse.Namespace) -> Iterator[Part]:
    """Peak memory of TinyLlama V2 with flash attention off and on, the other fusions on."""
    for length in LENGTHS:
        yield {"seq_len": length}, partial(memory_of_attention, length)


def memory_of_attention(length: int) -> list[dict]:
    """The row of a short run with materialised scores, and of one without."""
    argv = ["--batch-size", str(MEMORY_BATCH), "--seq-len", str(length), "--num-steps", "3"]
    argv += ["--warmup-steps", "2"]
    flags = {"scores": ["--disable-flash-attention"], "flash": []}
    runs = {name: short_run("tiny_llama_v2", [*argv, *more]) for name, more in flags.items()}
    return as_rows({name: Run(name, Path(), run).row() for name, run in runs.items()})


def counts(args: argparse.Namespace) -> Iterator[Part]:
    """Kernels of a step by batch size, on a CPU operator calls, of two layers or blocks."""
    layers = {"tiny_llama": "--num-layers", "tiny_openfold": "--num-blocks"}
    for model, version, batch in product(layers, ("V1", "V2"), (1, 2, 4)):
        sizes, script = f"{layers[model]} 2 --seq-len 32", script_of(model, version)
        argv = [*sizes.split(), "--batch-size", str(batch)]
        names = {"shape": sizes, "script": script, "argv": argv}
        yield names, partial(kernels_of_a_step, script, argv)


def kernels_of_a_step(script: str, argv: list[str]) -> dict:
    module = importlib.import_module(script)
    trainer = make_trainer(module, argv)
    counted = module.count_kernels(trainer)
    found = {"unit": counted["unit"], "per_step": counted["per_step"]}
    return named(script, argv, trainer.args) | found


# The command line

SUITES: dict[str, Callable[[argparse.Namespace], Iterable[Part]]] = {
    "overview": overview,
    "headline": headline,
    **{file: partial(fastest, model) for model, file in FASTEST.items()},
    "untuned": untuned,
    "trunk": trunk,
    **{f"ablation_{script}": partial(single_fusions, script) for script in ABLATIONS},
    "padding": padding,
    "memory": memory,
    "counts": counts,
    "scaling": scaling,
}
SETTINGS = {"memory": {"batch_size": MEMORY_BATCH}, "counts": {}}  # of those that take no turns
KEPT = ("overview", "trunk", "scaling")  # whose earlier rows stay, and are not measured again


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
    parser.add_path("--openfold", "CLONE", "of OpenFold, for trunk", default=Path("no clone"))
    add("--tables", nargs="+", choices=TABLES | OF_ABLATIONS, default=list(TABLES), help="of table")
    return parser


def run_suite(args: argparse.Namespace) -> int:
    if args.suite == "table":
        print(table(args.directory, args.tables))
        return 0
    args.directory.mkdir(parents=True, exist_ok=True)
    name, settings = args.suite, SETTINGS.get(args.suite, {"rounds": args.rounds})
    if name == "scaling":
        args.processes = join_processes()
    parts = chosen(list(SUITES[args.suite](args)), args.only)
    path = args.directory / f"{name}.json"
    try:
        rows = measure_study(path, parts, keep=name in KEPT, **settings)
    except (RuntimeError, MemoryError) as error:  # of a part that has no rows without memory
        if not importlib.import_module("tiny_llama_v1").is_out_of_memory(error):
            raise
        raise ToolError("out of memory: --only names smaller parts", status=3) from error
    if name.startswith("ablation"):
        check_failed(rows)
    return 0


main = program(build_parser, run_suite)

if __name__ == "__main__":
    sys.exit(main())

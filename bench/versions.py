#!/usr/bin/env python3
"""Take the measurements behind the figures of README and docs, and print the tables from them.

Both sides of a ratio are measured in this process in short alternating turns, where there is a GPU
as whole-step graphs unless a row says otherwise. A suite writes one file, which replaces an earlier
one when its last row is measured; until then the rows are in NAME.partial.json.

Examples:
  python bench/versions.py overview DIR   V1 to V4, bf16 (or other --precisions), as graphs
  python bench/versions.py headline DIR   all versions: sizes, precisions, eager, graph and compiled
  python bench/versions.py fastest DIR    V4, V3, and all versions compiled, as graphs
  python bench/versions.py untuned DIR    the same at sizes of GPT-2 small and TinyLlama 1.1B
  python bench/versions.py trunk DIR      48 Evoformer blocks, with and without --checkpoint-blocks
  python bench/versions.py inference DIR  a transformer layer of V4 in one launch, and in other ways
  python bench/versions.py ablation DIR   what a version adds: each alone, and all but each
  python bench/versions.py ablation DIR --versions V4    all but each, at several sizes
  python bench/versions.py padding DIR    batches that are padded, and such of proteins of one size
  python bench/versions.py memory DIR     peak memory of TinyLlama against the sequence length
  python bench/versions.py counts DIR     kernels (on a CPU operator calls) by batch size
  python bench/versions.py overhead DIR   the measured loop against a loop of bare training steps
  python bench/versions.py scaling DIR    the part on one GPU; then, in the same file, that on N:
  torchrun --nproc-per-node N bench/versions.py scaling DIR
  torchrun --nproc-per-node N bench/versions.py ddp DIR    where the time goes that scaling loses
  python bench/versions.py table DIR      the tables, from what lies in DIR
"""

import _root

import argparse
import contextlib
import importlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lab import records
from lab.ablation import (
    ablation,
    by_shape,
    costs_table,
    fusion_sets,
    new_fusions,
    sets_table,
)
from lab.cli import Parser, ToolError, documented_parser, program
from lab.files import read_json
from lab.profile.kernels import CATEGORIES
from lab.results import Run
from lab.show import Column, ended, render, side_columns
from lab.study import Part, as_rows, by_side, check_failed, measure_study, read_rows
from lab.turns import (
    GRAPH,
    all_measured,
    alternating,
    failure,
    free_memory,
    graph_of,
    in_turns,
    make_trainer,
    named,
    parse_quiet,
    short_run,
    speedup,
)

PROG = Path(__file__).name


class Shape(NamedTuple):
    """Sizes of a model."""

    model: str
    argv: list[str]


def shape(model: str, argv: str = "") -> Shape:
    """The sizes that this command line gives a model."""
    return Shape(f"tiny_{model}", argv.split())


WIDE = "--hidden-dim 1024 --num-layers 12 --seq-len 512"
MEDIUM = "--hidden-dim 1024 --num-layers 12 --num-heads 16 --seq-len 512 --batch-size 16"
GPT_2 = "--hidden-dim 768 --num-layers 12 --num-heads 12 --num-kv-heads 12"  # GPT-2 small's sizes
GPT_2 += " --seq-len 1024 --batch-size 8 --vocab-size 50304"
TINY_LLAMA = "--hidden-dim 2048 --num-layers 22 --num-heads 32 --num-kv-heads 4"  # TinyLlama 1.1B's
TINY_LLAMA += " --intermediate-dim 5632 --seq-len 2048 --batch-size 2 --vocab-size 32000"
CROP = "--batch-size 1 --num-blocks 1 --num-seqs 128 --seq-len 256 --msa-dim 256 --num-heads-msa 8"
SHAPES = {  # of the headline table
    "tiny_llama, small": shape("llama", "--seq-len 128"),
    "tiny_llama, medium": shape("llama", MEDIUM),
    "tiny_openfold, default": shape("openfold"),
    "tiny_openfold, crop": shape("openfold", CROP),
}
UNTUNED = {  # sizes that no block was chosen for
    "tiny_llama, GPT-2 small": shape("llama", GPT_2),
    "tiny_llama, 1.1B": shape("llama", TINY_LLAMA),
}
CHECKPOINTED = "--checkpoint-blocks"
TRUNK = CROP.replace("--num-blocks 1", "--num-blocks 48")
TRUNKS = {  # sequences and residues of AlphaFold 2's training, and of its fine-tuning
    "128 x 256": shape("openfold", TRUNK),
    "512 x 384": shape("openfold", f"{TRUNK} --num-seqs 512 --seq-len 384"),
}
MODELS = {"tiny_openfold": [], "tiny_llama": ["--seq-len", "128"]}  # the sizes of the ablation
ODD = "--num-blocks 2 --batch-size 2 --num-seqs 37 --seq-len 173 --msa-dim 128"
ABLATED = {  # sizes of the ablation of V4
    **SHAPES,
    "tiny_openfold, medium": shape("openfold", ODD),
    "tiny_openfold, 8 blocks": shape("openfold", TRUNK.replace("blocks 48", "blocks 8")),
}
VERSIONS = ("V1", "V2", "V3")
ALL_VERSIONS = (*VERSIONS, "V4")
FASTEST = {"tiny_llama": "fastest.json", "tiny_openfold": "fastest_openfold.json"}
PRECISIONS = {"fp32": [], "TF32": ["--matmul-precision", "high"], "bf16": ["--use-amp"]}
COMPILE = ["--enable-torch-compile"]
MODES = {  # the best mode of torch.compile is that with graphs of its own
    "eager": [],
    "graph": [GRAPH],
    "compiled": [*COMPILE, "--torch-compile-mode", "reduce-overhead"],
    "compiled graph": [*COMPILE, GRAPH],
}


class Scaled(NamedTuple):
    """Sizes of `scaling`: of the model, samples per GPU, and steps in a turn."""

    shape: Shape
    per_gpu: int
    steps: int


SCALING = {
    "tiny_llama": Scaled(shape("llama", "--seq-len 128"), 8, 100),
    "tiny_llama medium": Scaled(shape("llama", MEDIUM.replace(" --batch-size 16", "")), 16, 10),
    "tiny_llama wide": Scaled(shape("llama", WIDE), 16, 10),
    "tiny_openfold": Scaled(shape("openfold"), 4, 50),
    "tiny_openfold long": Scaled(shape("openfold", "--seq-len 128"), 8, 10),
    "tiny_openfold crop": Scaled(shape("openfold", CROP.replace("--batch-size 1 ", "")), 1, 30),
    "tiny_openfold trunk": Scaled(shape("openfold", TRUNK.replace("--batch-size 1 ", "")), 1, 2),
}
EAGER_SCALING = dict.fromkeys(
    ("tiny_llama", "tiny_llama wide", "tiny_openfold", "tiny_openfold long"), VERSIONS[:2]
)
GRAPH_SCALING = {
    "tiny_llama": ALL_VERSIONS,
    "tiny_llama medium": ("V3", "V4"),
    "tiny_openfold": ALL_VERSIONS,
    "tiny_openfold crop": ALL_VERSIONS,
    "tiny_openfold trunk": ("V3", "V4"),
}
PADDED = ", padded"  # at the end of a side's name
FINISHED = ("batch_ms", "turns_ms", "per_step")  # what a side has that finished
LENGTHS = (128, 256, 512, 1024, 2048)
INFERENCE = ((1, 16), (1, 128), (4, 128), (16, 128))  # samples, length


def script_of(model: str, version: str) -> str:
    """The script of a version: tiny_llama_v1."""
    return f"{model}_{version.lower()}"


# Suites: parts of studies, which return rows


def overview(args: argparse.Namespace) -> Iterator[Part]:
    """All versions as graphs in every size, in bf16 if no other precision is asked for."""
    for shape, precision in itertools.product(args.shapes, args.precisions or ["bf16"]):
        model, sizes = SHAPES[shape]
        argv = [*sizes, *PRECISIONS[precision], GRAPH]
        sides = {version: (script_of(model, version), argv) for version in ALL_VERSIONS}
        names = {"shape": shape, "precision": precision}
        yield names, partial(all_sides, sides, args.rounds)


def padding(args: argparse.Namespace) -> Iterator[Part]:
    """TinyOpenFold's versions as graphs in bf16, with proteins of one size, and padded."""
    for shape, (model, sizes) in SHAPES.items():
        if model == "tiny_openfold":
            argv = graph_of([*sizes, *PRECISIONS["bf16"]])
            sides = {
                name: (script_of(model, version), argv)
                for version in reversed(ALL_VERSIONS)
                for name in (version, f"{version}{PADDED}")
            }
            names = {"shape": shape, "precision": "bf16"}
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

    module.synthetic_proteins = some_shorter if side.endswith(PADDED) else whole
    try:
        yield
    finally:
        module.synthetic_proteins = whole


def headline(args: argparse.Namespace) -> Iterator[Part]:
    """V1 to V3 in every size, precision and mode."""
    precisions = args.precisions or PRECISIONS
    for shape, precision, mode in itertools.product(args.shapes, precisions, args.modes):
        model, sizes = SHAPES[shape]
        argv = [*sizes, *PRECISIONS[precision], *MODES[mode]]
        sides = {version: (script_of(model, version), argv) for version in VERSIONS}
        names = {"shape": shape, "precision": precision, "mode": mode}
        yield names, partial(all_sides, sides, args.rounds)


def fastest(model: str, args: argparse.Namespace) -> Iterator[Part]:
    """V4, V3 and V1, and V1 to V3 compiled, all as whole-step graphs."""
    shapes = [name for name in args.shapes if SHAPES[name].model == model]
    for shape, precision in itertools.product(shapes, args.precisions or PRECISIONS):
        argv = [*SHAPES[shape].argv, *PRECISIONS[precision], GRAPH]
        sides = beside_compiled(model, argv, ("V4", "V3", "V1"), ("V3", "V2", "V1"))
        sides = {name: sides[name] for name in wanted(args.sides, sides)}
        names = {"shape": shape, "precision": precision}
        yield names, partial(all_sides, sides, args.rounds)


def wanted(names: list[str] | None, sides: Mapping[str, object]) -> list[str]:
    """The sides that --sides names, all of them without it; ToolError for one that is not there."""
    if unknown := set(names or ()) - set(sides):
        raise ToolError(f"there is no side {min(unknown)}; there are {', '.join(sides)}")
    return names or list(sides)


def beside_compiled(
    model: str, argv: list[str], versions: Iterable[str], compiled: Iterable[str]
) -> dict[str, tuple[str, list[str]]]:
    """Sides: versions as they are, then others under torch.compile."""
    sides = {version: (script_of(model, version), argv) for version in versions}
    for version in compiled:
        sides[f"{version} compiled"] = (script_of(model, version), [*argv, *COMPILE])
    return sides


def all_sides(
    sides: Mapping[str, tuple[str, list[str]]], rounds: int, **more: Callable
) -> list[dict]:
    """A row for each side; all of them have to finish."""
    return as_rows(all_measured(sides, rounds, **more))


def untuned(args: argparse.Namespace) -> Iterator[Part]:
    """V4 to V1, V3 and V2 compiled, in bf16 at other sizes: one by one, as two may not fit."""
    for shape, (model, sizes) in UNTUNED.items():
        argv = graph_of([*sizes, *PRECISIONS["bf16"]])
        sides = beside_compiled(model, argv, reversed(ALL_VERSIONS), ("V3", "V2"))
        for name, side in sides.items():
            names = {"shape": shape, "precision": "bf16", "side": name}
            yield names, partial(one_side, name, side, args.rounds)


def one_side(name: str, side: tuple[str, list[str]], rounds: int) -> dict:
    """Turns of a side alone."""
    return in_turns({name: side}, rounds)[name]


def trunk(args: argparse.Namespace) -> Iterator[Part]:
    """48 blocks in bf16, each side alone, with and without checkpoints.

    Sides are versions, OpenFold's own blocks, and compiled ones. What is compiled is one block,
    which serves all: compiling 48 at once takes too long.
    """
    import torch

    from lab.baselines import openfold_block

    config = importlib.import_module("tiny_openfold_v1").ModelConfig(msa_dim=256, num_heads_msa=8)
    theirs = partial(openfold_block, config=config, clone=args.openfold)
    kinds = {version: (version, None) for version in reversed(ALL_VERSIONS)}
    kinds["OpenFold"] = "V1", theirs
    kinds["V2 compiled"] = "V2", torch.compile
    kinds["OpenFold compiled"] = "V1", lambda block: torch.compile(theirs(block))
    chosen = wanted(args.sides, kinds)
    for shape, kind, more in itertools.product(args.trunks, chosen, ([], [CHECKPOINTED])):
        version, change = kinds[kind]
        model, sizes = TRUNKS[shape]
        argv = graph_of([*sizes, *PRECISIONS["bf16"], "--warmup-steps", "2", *more])
        names = {"shape": shape, "precision": "bf16", "side": kind, "checkpointed": bool(more)}
        script = script_of(model, version)
        yield names, partial(with_blocks, change, kind, (script, argv), args.rounds)


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

    module.build_model = build_changed if change else build
    # or compiled blocks beyond the limit would run eagerly, and be called compiled
    limit = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
    try:
        with limit:
            return one_side(name, side, rounds)
    finally:
        module.build_model = build


def inference(args: argparse.Namespace) -> Iterator[Part]:
    """What TinyLlama V4's --mode benchmark finds in bfloat16, by batch size and length."""
    for batch, length in INFERENCE:
        yield {"batch_size": batch, "seq_len": length}, partial(one_layer, batch, length)


def one_layer(batch: int, length: int) -> list[dict]:
    """A row with time and error for each way of TinyLlama V4's --mode benchmark.

    ToolError if its ways disagree.
    """
    v4 = importlib.import_module("tiny_llama_v4")
    with tempfile.TemporaryDirectory() as folder:
        argv = f"--batch-size {batch} --seq-len {length} --use-amp --mode benchmark".split()
        if v4.main([*argv, "--profile-dir", folder]):
            raise ToolError(f"{v4.SCRIPT} {' '.join(argv)}: the ways disagree", status=1)
        found = read_json(Path(folder) / f"{v4.SCRIPT}_benchmark.json")
    same = {"model": "tiny_llama", "version": "V4", "precision": "bf16"}
    return [
        {"side": side, **same, **times, "error_of_output": found["errors"][side]}
        for side, times in found["times"].items()
    ]


def single_fusions(model: str, version: str, args: argparse.Namespace) -> list[Part]:
    """What a version adds: all but each, none, all, and all again; of V2 and V3 also each alone.

    V4 in bf16 at several sizes, V2 and V3 at one in fp32, too.
    """
    script = script_of(model, version)
    fusions = new_fusions(importlib.import_module(script))
    if version != "V4":
        precisions = args.precisions or ("fp32", "bf16")
        arguments = {name: graph_of([*MODELS[model], *PRECISIONS[name]]) for name in precisions}
        return ablation(script, arguments, fusions, fusion_sets(fusions), args.rounds)
    sets, parts = [on for on in fusion_sets(fusions) if len(on) != 1], []
    for shape, (of_shape, sizes) in ABLATED.items():
        if of_shape == model:
            precisions = args.precisions or ["bf16"]
            arguments = {name: graph_of([*sizes, *PRECISIONS[name]]) for name in precisions}
            of_size = ablation(script, arguments, fusions, sets, args.rounds, counted=False)
            parts += [({"shape": shape} | names, measure) for names, measure in of_size]
    return parts


def memory(args: argparse.Namespace) -> Iterator[Part]:
    """Peak memory of TinyLlama V2 with flash attention off and on, the other fusions on."""
    for length in LENGTHS:
        yield {"seq_len": length}, partial(memory_of_attention, args.batch_size, length)


def memory_of_attention(batch: int, length: int) -> list[dict]:
    """The row of a short run with materialised scores, and of one without."""
    argv = ["--batch-size", str(batch), "--seq-len", str(length), "--num-steps", "3"]
    argv += ["--warmup-steps", "2"]
    flags = {"scores": ["--disable-flash-attention"], "flash": []}
    runs = {name: short_run("tiny_llama_v2", [*argv, *more]) for name, more in flags.items()}
    return as_rows({name: Run(name, Path(), run).row() for name, run in runs.items()})


def counts(args: argparse.Namespace) -> Iterator[Part]:
    """Kernels of a step at batch sizes 1, 2 and 4.

    On a CPU operator calls, of two layers or blocks.
    """
    layers = {"tiny_llama": "--num-layers", "tiny_openfold": "--num-blocks"}
    for model, version, batch in itertools.product(layers, ("V1", "V2"), (1, 2, 4)):
        sizes, script = f"{layers[model]} 2 --seq-len 32", script_of(model, version)
        argv = [*sizes.split(), "--batch-size", str(batch)]
        names = {"shape": sizes, "script": script, "argv": argv}
        yield names, partial(kernels_of_a_step, script, argv)


def kernels_of_a_step(script: str, argv: list[str]) -> dict:
    """What is counted, and how many."""
    module = importlib.import_module(script)
    trainer = make_trainer(module, argv)
    counted = module.count_kernels(trainer)
    found = {"unit": counted["unit"], "per_step": counted["per_step"]}
    return named(script, argv, trainer.args) | found


def overhead(args: argparse.Namespace) -> Iterator[Part]:
    """Time per step of the harness's measured loop over that of a loop that only takes steps."""
    llama = [*MODELS["tiny_llama"], "--use-amp"]
    for script, argv in (("tiny_openfold_v2", []), ("tiny_llama_v2", llama)):
        for mode, options in (("eager", argv), ("graph", graph_of(argv))):
            names = {"script": script, "argv": options, "mode": mode}
            yield names, partial(measured_and_bare, script, options, args.rounds)


def measured_and_bare(script: str, argv: list[str], rounds: int) -> dict:
    """Milliseconds per step of both loops, in turns so short that a host keeps its speed through a
    pair of them."""
    module = importlib.import_module(script)
    run = module.Run(module.parse_args([*argv, "--log-interval", "1000000"]))
    run.start()
    steps, turns, measured_ms, bare, mark = 5, 10 * rounds, [], [], run.trainer.mark
    run.plan(turns * steps, "step")
    for _, side in alternating(("bare", "measured"), turns):
        if side == "measured":
            measured_ms.append(run.take(steps).step_ms)
        else:
            run.trainer.mark = lambda: None
            bare.append(statistics.fmean(step_times(run.trainer, steps)))
            run.trainer.mark = mark
    row = named(script, argv, run.args) | {"measured_ms": measured_ms, "bare_ms": bare}
    row["ratio"] = statistics.median(m / b for m, b in zip(measured_ms, bare, strict=True))
    del run
    free_memory()
    return row


def join_processes(suite: str) -> int:
    """Meet the other processes that torchrun started; returns how many there are.

    Each has one thread, as torchrun wants it; so has a process alone, which is compared with them.
    """
    import torch

    first = importlib.import_module("tiny_llama_v1")
    torch.set_num_threads(1)
    if first.WORLD_SIZE > 1:
        argv = ["--batch-size", str(first.WORLD_SIZE)]
        if suite == "scaling":  # what follows may be graphs
            argv = graph_of(argv)
        first.join_processes(first.parse_args(argv))
    elif suite == "ddp":
        command = "torchrun --nproc-per-node N bench/versions.py ddp DIR"
        raise ToolError(f"ddp needs several processes: {command}")
    return first.WORLD_SIZE


def scaling(args: argparse.Namespace) -> Iterator[Part]:
    """Steps on one GPU, of its own batch and of that of --gpus; or on the GPUs of torchrun.

    Versions as graphs, and V1 and V2 eager. The batch on N GPUs is N times that of one: over the
    same batch per GPU it is weak scaling, over the same batch on one GPU strong scaling.
    """
    batches = (1, *args.gpus) if args.processes == 1 else (args.processes,)
    for mode, versions in (("eager", EAGER_SCALING), ("graph", GRAPH_SCALING)):
        chosen = [name for name in versions if name in args.names]
        precisions = args.precisions or ["bf16"] if mode in args.modes else ()
        for name, precision in itertools.product(chosen, precisions):
            (model, sizes), per_gpu, steps = SCALING[name]
            for side, times in itertools.product(versions[name], batches):
                argv = [*sizes, *PRECISIONS[precision], *MODES[mode]]
                argv += ["--batch-size", str(per_gpu * times)]
                part = {"name": name, "precision": precision, "mode": mode, "side": side}
                part |= {"processes": args.processes, "batch_size": per_gpu * times}
                yield part, partial(turns_alone, script_of(model, side), argv, steps, args.rounds)


def turns_alone(script: str, argv: list[str], steps: int, rounds: int) -> dict:
    """A row of turns of so many steps, which all processes take; or of memory that ran out."""
    module = importlib.import_module(script)
    args = parse_quiet(module, argv)
    row = named(script, argv, args)
    try:
        run = module.Run(args)
        run.start()
        run.plan(rounds * steps, "step")
        turns = [run.take(steps).step_ms for _ in range(rounds)]
        ms = statistics.median(turns)
        row |= {"batch_ms": ms, "turns_ms": turns, "peak_mb": run.peak / 1e6}
        row["samples_per_sec"] = 1e3 * args.batch_size / ms
    except (RuntimeError, MemoryError) as error:
        if not module.is_out_of_memory(error) or module.WORLD_SIZE > 1:
            raise  # the other processes would wait
        row |= failure(error)
    run = None  # and its memory
    free_memory()
    return row


def ddp(args: argparse.Namespace) -> Iterator[Part]:
    """The same steps on one GPU while the others idle, on all without DDP, and with it; in turn.

    Of the steps on all GPUs without DDP, `slowest` is the mean over the steps of the longest one
    among the processes: what a step would take if nothing but waiting for each other were added.
    Milliseconds per step of rank 0, the median of the rounds. Only shapes and precisions that scale
    below 0.95 or are limited by the host.
    """
    import torch

    # NCCL's barrier would keep core and GPU busy
    idle = torch.distributed.new_group(backend="gloo")
    for name, precision in itertools.product(EAGER_SCALING, ("fp32", "bf16")):
        (model, sizes), per_gpu, _ = SCALING[name]
        if precision == "fp32" and name != model:
            continue
        argv = [*sizes, *PRECISIONS[precision], "--batch-size", str(per_gpu * args.processes)]
        for version in EAGER_SCALING[name]:
            names = {"name": name, "precision": precision, "argv": argv, "version": version}
            work = partial(with_and_without_ddp, script_of(model, version), argv)
            yield names, partial(work, args.processes, args.rounds, idle)


def with_and_without_ddp(script: str, argv: list[str], processes: int, rounds: int, idle) -> dict:
    """Milliseconds per step, where the processes wait for each other in the group `idle`."""
    import torch

    module = importlib.import_module(script)
    trainer = make_trainer(module, argv)
    forward = {"alone": trainer.model, "together": trainer.model, "ddp": trainer.forward}
    times: dict[str, list[float]] = {kind: [] for kind in (*forward, "slowest")}
    for turn, kind in alternating(forward, rounds + 1):
        trainer.forward = forward[kind]
        torch.distributed.barrier(idle)
        steps = step_times(trainer, 12) if kind != "alone" or module.RANK == 0 else []
        everyone: list = [None] * processes
        torch.distributed.all_gather_object(everyone, steps, idle)
        if turn:  # the first warms up
            times[kind].append(statistics.fmean(everyone[0]))
        if turn and kind == "together":
            times["slowest"].append(statistics.fmean(map(max, zip(*everyone, strict=True))))
    found = {f"{kind}_ms": statistics.median(values) for kind, values in times.items()}
    row = named(script, argv, trainer.args) | found
    del trainer, forward
    free_memory()
    return row


def step_times(trainer, steps: int) -> list[float]:
    """Milliseconds of each training step on the host's clock; the last one waits for the device."""
    trainer.synchronize()
    moments = [time.perf_counter()]
    for _ in range(steps):
        trainer.step()
        moments.append(time.perf_counter())
    trainer.synchronize()
    moments[-1] = time.perf_counter()
    return [1e3 * (after - before) for before, after in itertools.pairwise(moments)]


# Tables, from what lies in a folder


def lines_of(measured: Mapping[tuple, dict[str, dict]], words: str = "{}, {}") -> list[dict]:
    """Sides by the places where they were measured as rows, each with its place as its name."""
    return [{"name": words.format(*place), **sides} for place, sides in measured.items()]


def share_table(directory: Path) -> str:
    """What the kernels of a step do, a row for each profile of run_pytorch_profiler.py."""
    files = sorted(directory.glob("profile_tiny_*.json"))
    profiles = [records.read(records.Profile, path) for path in files]
    columns = [Column("share of kernel time", "script"), Column("ms", "ms_per_step", ".2f")]
    for name in CATEGORIES:
        if any(name in profile["categories"] for profile in profiles):
            share = partial(share_of, name)
            columns.append(Column(name, share, ".1f", " %"))
    return render(columns, profiles) if profiles else ""


def share_of(category: str, profile: Mapping) -> float | None:
    """Per cent of a profile's kernel time, None if it has no such kernel."""
    return profile["categories"].get(category, {}).get("percent")


def scaling_tables(directory: Path) -> list[str]:
    """Weak scaling, eager and as graphs, then strong scaling."""
    keys = ("name", "precision", "mode", "side", "processes", "batch_size")
    rows = read_rows(directory / "scaling.json", keys, ["batch_ms"])
    return [
        scaling_table([row for row in rows if row["mode"] == mode], mode, weak)
        for weak, mode in itertools.product((True, False), ("eager", "graph"))
    ]


def scaling_table(rows: Sequence[dict], mode: str, weak: bool) -> str:
    """The rows of one mode, as the time on one GPU over that on several.

    Weak: with the same batch per GPU, at best 1. Strong: with the same batch, at best the number of
    GPUs. A column for each version and number of GPUs.
    """
    ms = {
        (row["name"], row["precision"], row["side"], row["processes"], row["batch_size"]): row
        for row in rows
        if "batch_ms" in row
    }
    found: dict[tuple, float] = {}  # number of GPUs, version and place: ratio
    for (*place, version, gpus, batch), row in ms.items():
        one = ms.get((*place, version, 1, batch // gpus if weak else batch))
        if gpus > 1 and one:
            found[gpus, version, tuple(place)] = one["batch_ms"] / row["batch_ms"]
    label = "same batch per GPU" if weak else "one batch on all GPUs"
    label += ", step as a graph" if mode == "graph" else ""
    columns = [Column(label, lambda place: described(*place))]
    for n, version in sorted({(n, version) for n, version, _ in found}):
        ratio = partial(lambda at, place: found.get((*at, place)), (n, version))
        columns.append(Column(f"{n} GPUs, {version}", ratio, ".2f", "" if weak else "x"))
    lines = list(dict.fromkeys(place for *_, place in found))
    return render(columns, lines) if lines else ""


def described(name: str, precision: str) -> str:
    """A row of `scaling` in words."""
    return f"{name}, {SCALING[name].per_gpu} per GPU, {precision}"


def ddp_table(directory: Path) -> str:
    """What a step on several GPUs consists of."""
    rows = read_rows(directory / "ddp_4.json")

    def name(row: dict) -> str:
        return f"{described(row['name'], row['precision'])}, {row['version']}"

    columns = [
        Column("ms per step", name),
        Column("one GPU, others idle", "alone_ms", ".1f"),
        Column("all, without DDP", "together_ms", ".1f"),
        Column("slowest of them", "slowest_ms", ".1f"),
        Column("all, with DDP", "ddp_ms", ".1f"),
    ]
    return render(columns, rows) if rows else ""


def versions_of(path: Path, *keys: str) -> dict[tuple, dict[str, dict]]:
    """The sides of a study of versions, all of which finished, by shape, precision and keys."""
    names = ("shape", "precision", *keys)
    rows = read_rows(path, (*names, "side", *FINISHED), FINISHED)
    return by_side(rows, *names)


def headline_tables(path: Path) -> list[str]:
    """Milliseconds per step of each size, precision and mode, the ratio as graphs.

    Kernels, memory.
    """
    lines: dict[str, dict] = {}  # with the sides by mode and version
    for (shape, precision, mode), sides in versions_of(path, "mode").items():
        name = f"{shape}, {precision}"
        line = lines.setdefault(name, {"name": name})
        line |= {f"{mode} {version}": side for version, side in sides.items()}
    measured = {name for line in lines.values() for name in line}

    def columns(modes: Iterable[str], key: str, form: str = "", label: str = "{}") -> list[Column]:
        names = (f"{mode} {version}" for mode, version in itertools.product(modes, VERSIONS))
        return side_columns(label, [name for name in names if name in measured], key, form)

    def over(before: str, after: str) -> Column:
        def gain(line: dict) -> object:
            sides = [line.get(f"graph {version}") for version in (before, after)]
            return speedup(*sides) if all(sides) else ""

        return Column(f"{after} over {before}, graph", gain, ".2f", "x")

    times = columns(MODES, "batch_ms", ".2f")
    pairs = itertools.pairwise(VERSIONS)
    times += [over(before, after) for before, after in pairs if f"graph {after}" in measured]
    # A graph replays what its mode launches.
    kernels = columns(("eager", "compiled"), "per_step")
    kernels = kernels or columns(("graph", "compiled graph"), "per_step")
    peaks = columns(("eager", "graph", "compiled graph"), "peak_mb", ".0f", "{}, MB")
    rows = [*lines.values()]
    return [
        render([Column(title, "name"), *those], rows)
        for title, those in (
            ("ms per step", times),
            ("kernels per step, then peak memory in MB", kernels + peaks),
        )
        if rows
    ]


def as_graphs(directory: Path) -> dict[tuple, dict[str, dict]]:
    """The versions as graphs by shape and precision: each row is of one study.

    That is the one of all versions, or, where it has no such row, the one of V1 to V3.
    """
    older = versions_of(directory / "headline_v3.json", "mode")
    rows = {tuple(place): sides for (*place, mode), sides in older.items() if mode == "graph"}
    return rows | versions_of(directory / "overview.json")


def model_table(directory: Path, model: str) -> str:
    """Of a model, as graphs: ms of each version, its kernels and memory."""
    rows = [
        {"name": f"{shape.removeprefix(f'{model}, ')}, {precision}", **sides}
        for (shape, precision), sides in as_graphs(directory).items()
        if sides["V1"]["model"] == model
    ]

    def over(before: str, after: str, row: Mapping[str, dict]) -> float | None:
        return speedup(row[before], row[after]) if after in row else None

    def each(key: str, row: Mapping[str, dict]) -> str:
        return " / ".join(f"{row[name][key]:.0f}" for name in ("V1", "V3", "V4") if name in row)

    columns = [
        Column(model, "name"),
        *side_columns("{}, ms", ALL_VERSIONS, "batch_ms", ".2f"),
        Column("V3 over V1", partial(over, "V1", "V3"), ".2f", "x"),
        Column("V4 over V3", partial(over, "V3", "V4"), ".2f", "x"),
        Column("kernels, V1 / V3 / V4", partial(each, "per_step")),
        Column("peak MB, V1 / V3 / V4", partial(each, "peak_mb")),
    ]
    return render(columns, rows) if rows else ""


def overview_table(directory: Path) -> str:
    """Milliseconds and peak GB of a step of each version, in bf16 as a graph."""

    def cost(side: Mapping) -> str:
        ms, mb = side.get("batch_ms"), side.get("peak_mb")
        return f"{ms:#.3g} ms<br>{mb / 1e3:.{2 if mb < 1e3 else 1}f} GB" if ms else ""

    rows = [
        {"name": shape, **sides}
        for (shape, precision), sides in as_graphs(directory).items()
        if precision == "bf16"
    ]
    columns = [Column("bf16, as graphs", "name"), *side_columns("{}", ALL_VERSIONS, cost)]
    return render(columns, rows) if rows else ""


def best_compiled(sides: Mapping[str, dict]) -> str | None:
    """The fastest of the compiled sides of `fastest`, None where none was measured."""
    names = (name for name in sides if name != "name")
    compiled = [name for name in names if sides[name]["mode"].startswith("compiled")]
    return min(compiled, key=lambda name: sides[name]["batch_ms"], default=None)


def over_best_compiled(sides: Mapping[str, dict]) -> float | None:
    """How many times as fast V4 is, None where one of the two was not measured."""
    best = best_compiled(sides)
    return speedup(sides[best], sides["V4"]) if best and "V4" in sides else None


def best_over_v4(sides: Mapping[str, dict]) -> str | None:
    """The same, with the name of the compiled side."""
    ratio = over_best_compiled(sides)
    return f"{ratio:.2f}x ({best_compiled(sides)})" if ratio else None


def fastest_table(directory: Path, model: str) -> str:
    """Milliseconds per step of V4 and the others, the best compiled one's over V4's, memory."""
    measured = versions_of(directory / FASTEST[model])
    sides = measured.values()
    names = list(dict.fromkeys(name for sides in measured.values() for name in sides))
    columns = [
        Column(f"{model} as graphs", "name"),
        *side_columns("{}, ms", names, "batch_ms", ".2f"),
        *([Column("best compiled / V4", best_over_v4)] if any(map(best_compiled, sides)) else []),
        *side_columns("{}, MB", names, "peak_mb", ".0f"),
    ]
    return render(columns, lines_of(measured)) if measured else ""


def untuned_table(directory: Path) -> str:
    """Milliseconds per step and peak memory of each side, and its time over V4's."""
    keys = ("shape", "precision", "side")
    measured = by_side(read_rows(directory / "untuned.json", keys), "shape", "precision")
    names = list(dict.fromkeys(name for sides in measured.values() for name in sides))

    def over_v4(name: str, sides: Mapping[str, dict]) -> float | None:
        ms, v4 = (sides.get(side, {}).get("batch_ms") for side in (name, "V4"))
        return ms / v4 if ms and v4 else None

    columns = [
        Column("as graphs, one after the other", "name"),
        *side_columns("{}, ms", names, "batch_ms", ".2f", ends=True),
        *(Column(f"{name} / V4", partial(over_v4, name), ".2f", "x") for name in names[1:]),
        *side_columns("{}, MB", names, "peak_mb", ".0f"),
    ]
    return render(columns, lines_of(measured)) if measured else ""


def trunk_table(directory: Path) -> str:
    """Milliseconds per step and peak memory of each side, without and with checkpoints."""
    rows = read_rows(directory / "trunk.json", ("shape", "side", "checkpointed"))
    lines: dict[str, dict] = {}
    for row in rows:
        name = f"{row['shape']}, {row['side']}"
        line = lines.setdefault(name, {"name": name})
        line["checkpointed" if row["checkpointed"] else "plain"] = row
    columns = [Column("48 blocks, bf16", "name")]
    for label, key in (("ms", "batch_ms"), ("MB", "peak_mb")):
        columns += side_columns(label, ["plain"], key, ".0f", ends=True)
        columns += side_columns(f"{label}, {{}}", ["checkpointed"], key, ".0f", ends=True)
    return render(columns, [*lines.values()]) if lines else ""


def inference_table(directory: Path) -> str:
    """Microseconds of a layer in each way, and how many kernels these are."""
    keys = ("batch_size", "seq_len", "side", "us", "kernels")
    measured = by_side(read_rows(directory / "inference.json", keys), "batch_size", "seq_len")
    if not measured:
        return ""
    kernels = {name: side["kernels"] for sides in measured.values() for name, side in sides.items()}
    columns = [Column("one layer, bf16", "name")]
    for name, count in kernels.items():
        columns += side_columns(f"{{}}, us ({count} kernels)", [name], "us", ".1f")
    return render(columns, lines_of(measured, "batch size {}, length {}"))


def ablation_tables(directory: Path, script: str) -> list[str]:
    """What is gained by each set of a version's fusions, and what each costs if it is left out."""
    rows = read_rows(directory / f"ablation_{script}.json", ("precision", "side"))
    tables = [
        sets_table(", ".join(filter(None, (script, shape.partition(", ")[2]))), same)
        for shape, same in by_shape(rows).items()
    ]
    return [*tables, costs_table(script, rows)] if rows else []


def padding_table(directory: Path) -> str:
    """Milliseconds per step of each version, and how much longer it takes with masks."""

    def longer(version: str, sides: Mapping[str, dict]) -> float:
        return 100 * speedup(sides[f"{version}{PADDED}"], sides[version]) - 100

    measured = versions_of(directory / "padding.json")
    names = [name for name in ALL_VERSIONS if any(name in sides for sides in measured.values())]
    columns = [
        Column("as graphs", "name"),
        *side_columns("{}, ms", names, "batch_ms", ".2f"),
        *(Column(f"{name} padded", partial(longer, name), "+.1f", " %") for name in names),
    ]
    return render(columns, lines_of(measured)) if measured else ""


def counts_table(directory: Path) -> str:
    """Kernels per step at each batch size."""
    keys = ("script", "shape", "batch_size", "unit", "per_step")
    rows = read_rows(directory / "counts.json", keys)
    if not rows:
        return ""
    lines: dict[str, dict] = {}
    for row in rows:
        name = f"{row['script']} {row['shape']}"
        lines.setdefault(name, {"name": name})[row["batch_size"]] = row["per_step"]
    columns = [Column(f"{rows[0]['unit']} per step", "name")]
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        columns.append(Column(f"batch size {size}", size))
    return render(columns, [*lines.values()])


def memory_table(directory: Path) -> str:
    """Peak memory of TinyLlama V2 at each length."""
    rows = read_rows(directory / "memory.json", ("seq_len", "side", "peak_mb"))
    names = {"scores": "materialised scores, MB", "flash": "flash attention, MB"}
    lines = {side: {"name": name} for side, name in names.items()}
    for row in rows:
        lines[row["side"]][row["seq_len"]] = ended(row) or row["peak_mb"]
    lengths = dict.fromkeys(row["seq_len"] for row in rows)
    columns = [Column("sequence length", "name"), *(Column(str(n), n, ".0f") for n in lengths)]
    return render(columns, [*lines.values()]) if rows else ""


ABLATIONS = [script_of(model, version) for version in ALL_VERSIONS[1:] for model in FASTEST]
TABLES: dict[str, Callable[[Path], list[str]]] = {
    "headline": lambda where: headline_tables(where / "headline.json"),  # V1 and V2, all modes
    "versions": lambda where: headline_tables(where / "headline_v3.json"),  # V1 to V3, as graphs
    "ablation": lambda where: [t for script in ABLATIONS for t in ablation_tables(where, script)],
    "padding": lambda where: [padding_table(where)],
    "overview": lambda where: [overview_table(where)],
    "llama": lambda where: [model_table(where, "tiny_llama")],
    "openfold": lambda where: [model_table(where, "tiny_openfold")],
    "inference": lambda where: [inference_table(where)],
    "fastest": lambda where: [fastest_table(where, model) for model in FASTEST],
    "untuned": lambda where: [untuned_table(where)],
    "trunk": lambda where: [trunk_table(where)],
    "share": lambda where: [share_table(where)],
    "memory": lambda where: [memory_table(where)],
    "counts": lambda where: [counts_table(where)],
    "scaling": scaling_tables,
    "ddp": lambda where: [ddp_table(where)],
}
SINGLE = {  # one of those that come together
    f"ablation_{script}": partial(ablation_tables, script=script) for script in ABLATIONS
}


def table(directory: Path, names: Iterable[str] = TABLES) -> str:
    """Tables of one device as Markdown: those of them whose result files lie in the directory."""
    tables = []
    for name in names:
        try:
            tables += (TABLES | SINGLE)[name](directory)
        except (LookupError, TypeError, ValueError) as error:
            what = f"rows of the table {name} do not belong together ({error!r})"
            raise ToolError(f"{directory}: {what}") from error
    if not any(tables):
        raise ToolError(f"{directory}: no result files of these measurements")
    return "\n\n".join(filter(None, tables))


SUITES = {  # parts, and what else the file says
    "overview": (overview, ("rounds",)),
    "padding": (padding, ("rounds",)),
    "trunk": (trunk, ("rounds",)),
    "headline": (headline, ("rounds",)),
    "untuned": (untuned, ("rounds",)),
    "inference": (inference, ()),
    "memory": (memory, ("batch_size",)),
    "counts": (counts, ()),
    "overhead": (overhead, ("rounds",)),
    "scaling": (scaling, ("rounds",)),
    "ddp": (ddp, ("processes",)),
}


KEPT = ("overview", "trunk", "scaling")  # whose earlier rows stay, and are not measured again


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    add = parser.add_argument

    def add_some(name: str, known: Iterable[str], help: str, **more: object) -> None:
        add(name, nargs="+", choices=known, default=list(known), help=help, **more)

    add("suite", choices=("ablation", "fastest", *SUITES, "table"))
    add("directory", type=Path)
    parser.add_count("--rounds", 5, "of all but memory")
    add_some("--models", MODELS, "of ablation and fastest")
    versions = {"choices": ALL_VERSIONS[1:], "default": list(VERSIONS[1:])}
    add("--versions", nargs="+", type=str.upper, **versions, help="of ablation")
    add_some("--shapes", SHAPES, "of overview, headline and fastest")
    precisions = "likewise, and of ablation and scaling (default: all, or those of the suite)"
    add("--precisions", nargs="+", choices=PRECISIONS, help=precisions)
    add_some("--modes", MODES, "of headline and scaling")
    add_some("--names", SCALING, "sizes of scaling")
    gpus = "for whose batch scaling also measures one GPU, for strong scaling (default: 2)"
    add("--gpus", nargs="*", type=int, default=[2], metavar="N", help=gpus)
    add_some("--trunks", TRUNKS, "sizes of trunk")
    sides = "of fastest and trunk: V4, 'V2 compiled', OpenFold, ... (default: all)"
    add("--sides", nargs="+", metavar="SIDE", help=sides)
    parser.add_flag("--renew", "measure those rows of an earlier file again that this one would")
    parser.add_path("--openfold", "CLONE", "of OpenFold, for trunk", default=Path("no clone"))
    add("--tables", nargs="+", choices=TABLES | SINGLE, default=list(TABLES), help="of table")
    parser.set_defaults(batch_size=4)
    return parser


def run_suite(args: argparse.Namespace) -> int:
    """Measure, or print the tables; returns the exit status."""
    if args.suite == "table":
        print(table(args.directory, args.tables))
        return 0
    args.directory.mkdir(parents=True, exist_ok=True)
    parts, said = SUITES.get(args.suite, (None, ("rounds",)))
    files = {f"{args.suite}.json": parts}
    if args.suite == "ablation":
        chosen = itertools.product(args.models, args.versions)
        scripts = {script_of(*names): partial(single_fusions, *names) for names in chosen}
        files = {f"ablation_{script}.json": parts for script, parts in scripts.items()}
    elif args.suite == "fastest":
        files = {FASTEST[model]: partial(fastest, model) for model in args.models}
    elif args.suite in ("scaling", "ddp"):
        args.processes = join_processes(args.suite)
        if args.suite == "ddp":
            files = {f"ddp_{args.processes}.json": parts}
    settings = {key: getattr(args, key) for key in said}
    for name, parts in files.items():
        more = {"keep": args.suite in KEPT, "renew": args.renew}
        rows = measure_study(args.directory / name, list(parts(args)), **more, **settings)
        if args.suite == "ablation":
            check_failed(rows)
    return 0


main = program(build_parser, run_suite)

if __name__ == "__main__":
    sys.exit(main())

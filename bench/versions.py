#!/usr/bin/env python3
"""Take the measurements behind the figures of README and docs, and print the tables from them.

Both sides of a ratio are measured in this process in short alternating turns, where there is a GPU
as whole-step graphs unless a row says otherwise. A suite writes one file, which replaces an earlier
one when its last row is measured; until then the rows are in NAME.partial.json.

Examples:
  python bench/versions.py headline DIR   all versions: sizes, precisions, eager, graph and compiled
  python bench/versions.py fastest DIR    V4, V3, and all versions compiled, as graphs
  python bench/versions.py untuned DIR    the same at sizes of GPT-2 small and TinyLlama 1.1B
  python bench/versions.py trunk DIR      48 Evoformer blocks, with and without --checkpoint-blocks
  python bench/versions.py inference DIR  a transformer layer of V4 in one launch, and in other ways
  python bench/versions.py ablation DIR   what a version adds: each alone, and all but each
  python bench/versions.py memory DIR     peak memory of TinyLlama against the sequence length
  python bench/versions.py counts DIR     kernels (on a CPU operator calls) by batch size
  python bench/versions.py overhead DIR   the measured loop against a loop of bare training steps
  python bench/versions.py scaling DIR    the same batch per GPU on one GPU; for N of them:
  torchrun --nproc-per-node N bench/versions.py scaling DIR
  torchrun --nproc-per-node N bench/versions.py ddp DIR    where the time goes that scaling loses
  python bench/versions.py table DIR      the tables, from what lies in DIR
"""

import _root

import argparse
import importlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from workshop import records
from workshop.ablation import ablation, fusion_sets, new_fusions, sets_table
from workshop.cli import Parser, ToolError, documented_parser, program
from workshop.files import read_json
from workshop.profile.kernels import CATEGORIES
from workshop.results import Run
from workshop.show import Column, cell, ended, render, side_columns
from workshop.study import Part, as_rows, by_side, check_failed, measure_study, read_rows
from workshop.turns import (
    GRAPH,
    all_measured,
    alternating,
    free_memory,
    graph_of,
    in_turns,
    make_trainer,
    named,
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
VERSIONS = ("V1", "V2", "V3")
ALL_VERSIONS = (*VERSIONS, "V4")  # V4 is in studies of its own
FASTEST = {"tiny_llama": "fastest.json", "tiny_openfold": "fastest_openfold.json"}
PRECISIONS = {"fp32": [], "TF32": ["--matmul-precision", "high"], "bf16": ["--use-amp"]}
COMPILE = ["--enable-torch-compile"]
MODES = {  # the best mode of torch.compile is that with graphs of its own
    "eager": [],
    "graph": [GRAPH],
    "compiled": [*COMPILE, "--torch-compile-mode", "reduce-overhead"],
    "compiled graph": [*COMPILE, GRAPH],
}
SCALING = {  # sizes and samples per GPU
    "tiny_llama": (shape("llama", "--seq-len 128"), 8),
    "tiny_llama wide": (shape("llama", "--hidden-dim 1024 --num-layers 12 --seq-len 512"), 16),
    "tiny_openfold": (shape("openfold"), 4),
    "tiny_openfold long": (shape("openfold", "--seq-len 128"), 8),
    "tiny_openfold crop": (shape("openfold", CROP.replace("--batch-size 1 ", "")), 1),
    "tiny_openfold trunk": (shape("openfold", TRUNK.replace("--batch-size 1 ", "")), 1),
}
EAGER_SCALING = ["tiny_llama", "tiny_llama wide", "tiny_openfold", "tiny_openfold long"]
GRAPH_SCALING = ["tiny_llama", "tiny_openfold", "tiny_openfold crop", "tiny_openfold trunk"]
ALONE = "V4 without overlap"
FINISHED = ("batch_ms", "turns_ms", "per_step")  # what a side has that finished
LENGTHS = (128, 256, 512, 1024, 2048)
INFERENCE = ((1, 16), (1, 128), (4, 128), (16, 128))  # samples, length


def script_of(model: str, version: str) -> str:
    """The script of a version: tiny_llama_v1."""
    return f"{model}_{version.lower()}"


# Suites: parts of studies, which return rows


def headline(args: argparse.Namespace) -> Iterator[Part]:
    """All versions in every size, precision and mode."""
    for shape, precision, mode in itertools.product(args.shapes, args.precisions, args.modes):
        model, sizes = SHAPES[shape]
        argv = [*sizes, *PRECISIONS[precision], *MODES[mode]]
        sides = {version: (script_of(model, version), argv) for version in VERSIONS}
        names = {"shape": shape, "precision": precision, "mode": mode}
        yield names, partial(all_sides, sides, args.rounds)


def fastest(model: str, args: argparse.Namespace) -> Iterator[Part]:
    """V4, V3 and V1, and V1 to V3 compiled, all as whole-step graphs."""
    shapes = [name for name in args.shapes if SHAPES[name].model == model]
    for shape, precision in itertools.product(shapes, args.precisions):
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


def all_sides(sides: Mapping[str, tuple[str, list[str]]], rounds: int) -> list[dict]:
    """A row for each side; all of them have to finish."""
    return as_rows(all_measured(sides, rounds))


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

    from workshop.baselines import openfold_block

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
    """What a version adds: each alone, all but each, none and all; the speed-up is over none."""
    script = script_of(model, version)
    fusions = new_fusions(importlib.import_module(script))
    sizes = MODELS[model]
    arguments = {name: graph_of([*sizes, *PRECISIONS[name]]) for name in ("fp32", "bf16")}
    return ablation(script, arguments, fusions, fusion_sets(fusions), args.rounds)


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
    """Meet the other processes that torchrun started; returns how many there are."""
    first = importlib.import_module("tiny_llama_v1")
    if first.WORLD_SIZE > 1:
        argv = ["--batch-size", str(first.WORLD_SIZE)]
        if suite == "scaling":  # what follows may be graphs
            argv = graph_of(argv)
        first.join_processes(first.parse_args(argv))
    elif suite == "ddp":
        command = "torchrun --nproc-per-node N bench/versions.py ddp DIR"
        raise ToolError(f"ddp needs several processes: {command}")
    return first.WORLD_SIZE


def scaling_shapes(processes: int, names: Iterable[str]) -> Iterator[tuple[dict, str]]:
    """What names a row of `scaling`, with the arguments; and the model."""
    for name in names:
        sizes, per_gpu = SCALING[name]
        for precision in ("fp32", "bf16"):
            batch = ["--batch-size", str(per_gpu * processes)]
            argv = [*sizes.argv, *PRECISIONS[precision], *batch]
            yield {"name": name, "precision": precision, "argv": argv}, sizes.model


def scaling(args: argparse.Namespace) -> Iterator[Part]:
    """The same batch per GPU, on the GPUs that torchrun gave processes to.

    All versions as graphs, of the trunk those that fit, and on one GPU V4 without overlap; eager V1
    and V2.
    """
    for mode, shapes in (("eager", EAGER_SCALING), ("graph", GRAPH_SCALING)):
        for names, model in scaling_shapes(args.processes, shapes if mode in args.modes else ()):
            if names["precision"] not in args.precisions:
                continue
            sides, steps = ALL_VERSIONS, "60"
            if mode == "eager":
                sides, steps = ("V1", "V2"), "12"
            elif names["name"] == "tiny_openfold trunk":
                sides, steps = ("V3", "V4"), "10"
            elif args.processes == 1:
                sides = (*ALL_VERSIONS, ALONE)
            for side in sides:
                argv = [*names["argv"], *MODES[mode], "--num-steps", steps]
                argv += ["--disable-overlap"] * (side == ALONE)
                part = names | {"mode": mode, "side": side, "argv": argv}
                script = script_of(model, side[:2])
                yield part, partial(fastest_run, script, side, argv, args.rounds)


def fastest_run(script: str, side: str, argv: list[str], rounds: int) -> dict:
    """A row of the fastest of several runs."""
    rows = []
    for _ in range(rounds):
        result = short_run(script, argv)
        if result["status"] != "ok":
            raise ToolError(f"{script} {' '.join(argv)}: {result['error']}", status=3)
        rows.append(Run(side, Path(), result).row() | {"argv": argv})
        if GRAPH not in argv:
            rows[-1]["backward_ms"] = result["timing"]["backward_ms"]
    return min(rows, key=lambda row: row["batch_ms"])


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
    for names, model in scaling_shapes(args.processes, EAGER_SCALING):
        if names["precision"] == "fp32" and names["name"] != model:
            continue
        for version in ("V1", "V2"):
            work = partial(with_and_without_ddp, script_of(model, version), names["argv"])
            yield names | {"version": version}, partial(work, args.processes, args.rounds, idle)


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
    """What the kernels of a step do, from the profiles of run_pytorch_profiler.py."""
    files = sorted(directory.glob("profile_tiny_*.json"))
    profiles = [records.read(records.Profile, path) for path in files]
    if not profiles:
        return ""
    lines = []
    for name in CATEGORIES:
        shares = [profile["categories"].get(name, {}).get("percent") for profile in profiles]
        if any(share is not None for share in shares):
            lines.append([name, *(cell(share or 0.0, ".1f", " %") for share in shares)])
    lines.append(["kernel time, ms", *(f"{profile['ms_per_step']:.2f}" for profile in profiles)])
    header = ["share of kernel time", *(profile["script"] for profile in profiles)]
    return render([Column(name, itemgetter(i)) for i, name in enumerate(header)], lines)


def scaling_tables(directory: Path) -> list[str]:
    """Weak scaling: samples per second and GPU over those of one GPU, eager and as graphs."""
    keys = ("name", "precision", "mode", "side")
    files = {n: directory / f"scaling_{n}.json" for n in (1, 2, 4)}
    rows = {n: read_rows(path, keys, ["samples_per_sec"]) for n, path in files.items()}
    return [scaling_table(rows, mode) for mode in ("eager", "graph")]


def scaling_table(rows: Mapping[int, list[dict]], mode: str) -> str:
    """The rows of one mode by numbers of GPUs: a column for a version that both sides have."""
    on = {
        n: by_side([row for row in some if row["mode"] == mode], "name", "precision")
        for n, some in rows.items()
    }

    found: dict[tuple, float] = {}  # number of GPUs, version and place: efficiency
    for n, version, place in itertools.product(sorted({*on} - {1}), ALL_VERSIONS, on[1]):
        several, one = (on[count].get(place, {}).get(version) for count in (n, 1))
        if several and one:
            ratio = several["samples_per_sec"] / one["samples_per_sec"]
            found[n, version, place] = ratio / n
    label = "same batch per GPU" + (", step as a graph" if mode == "graph" else "")
    columns = [Column(label, lambda place: described(*place))]
    for n, version in dict.fromkeys((n, version) for n, version, _ in found):
        label = f"{n} GPUs, {version}"
        columns.append(Column(label, lambda place, at=(n, version): found.get((*at, place)), ".2f"))
    measured = {place for _, _, place in found}
    lines = [place for place in on[1] if place in measured]
    return render(columns, lines) if lines else ""


def described(name: str, precision: str) -> str:
    """A row of `scaling` in words."""
    sizes, per_gpu = SCALING[name]
    words = " ".join(sizes.argv) or "default sizes"
    return f"{sizes.model}, {words}, {per_gpu} per GPU, {precision}"


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


def model_table(directory: Path, model: str) -> str:
    """Of a model, as graphs: ms of each version, kernels and memory of the first and the last.

    V4's columns are from a run of its own, and its ratios from that run alone.
    """
    fastest, rows = versions_of(directory / FASTEST[model]), []
    measured = versions_of(directory / "headline_v3.json", "mode")
    for (shape, precision, mode), sides in measured.items():
        if mode == "graph" and sides["V1"]["model"] == model:
            name = f"{shape.removeprefix(f'{model}, ')}, {precision}"
            rows.append({"name": name, "with V4": fastest.get((shape, precision)), **sides})

    def both(key: str, form: str = "") -> Callable[[dict], str]:
        return lambda row: " / ".join(cell(row[version][key], form) for version in ("V1", "V3"))

    def of_v4(value: Callable[[dict], object]) -> Callable[[dict], object]:
        return lambda row: value(row["with V4"]) if row["with V4"] else ""

    columns = [
        Column(model, "name"),
        *side_columns("{}, ms", VERSIONS, "batch_ms", ".2f"),
        Column("V3 over V1", lambda row: speedup(row["V1"], row["V3"]), ".2f", "x"),
        Column("kernels, V1 / V3", both("per_step")),
        Column("peak MB, V1 / V3", both("peak_mb", ".0f")),
    ]
    if any(row["with V4"] for row in rows):
        over_v3 = of_v4(lambda sides: speedup(sides["V3"], sides["V4"]))
        columns += [
            Column("V4, ms", of_v4(lambda sides: sides["V4"]["batch_ms"]), ".2f"),
            Column("V4 over V3", over_v3, ".2f", "x"),
        ]
        if any(best_compiled(row["with V4"] or {}) for row in rows):
            columns.append(Column("V4 over compiled", of_v4(over_best_compiled), ".2f", "x"))
        columns.append(Column("its kernels", of_v4(lambda sides: sides["V4"]["per_step"])))
    return render(columns, rows) if rows else ""


def overview_table(directory: Path) -> str:
    """Milliseconds and peak GB of a step of each version, in bf16 as a graph."""
    measured = versions_of(directory / "headline_v3.json", "mode")
    rows = []
    for (shape, precision, mode), sides in measured.items():
        if (precision, mode) == ("bf16", "graph"):
            last = versions_of(directory / FASTEST[sides["V1"]["model"]]).get((shape, precision))
            rows.append({"name": shape, **sides, "V4": last["V4"] if last else {}})

    def cost(side: Mapping) -> str:
        ms, mb = side.get("batch_ms"), side.get("peak_mb")
        return f"{ms:#.3g} ms<br>{mb / 1e3:.{2 if mb < 1e3 else 1}f} GB" if ms else ""

    columns = [Column("bf16, as graphs", "name"), *side_columns("{}", ALL_VERSIONS, cost)]
    return render(columns, rows) if rows else ""


def best_compiled(sides: Mapping[str, dict]) -> str | None:
    """The fastest of the compiled sides of `fastest`, None where none was measured."""
    names = (name for name in sides if name != "name")
    compiled = [name for name in names if sides[name]["mode"].startswith("compiled")]
    return min(compiled, key=lambda name: sides[name]["batch_ms"], default=None)


def over_best_compiled(sides: Mapping[str, dict]) -> float | None:
    """How many times as fast V4 is."""
    best = best_compiled(sides)
    return speedup(sides[best], sides["V4"]) if best else None


def best_over_v4(sides: Mapping[str, dict]) -> str | None:
    """The same, with the name of the compiled side."""
    best = best_compiled(sides)
    return f"{over_best_compiled(sides):.2f}x ({best})" if best else None


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


def ablation_table(directory: Path, script: str) -> str:
    """What each fusion of a version gains alone, and what all of them gain without it."""
    rows = read_rows(directory / f"ablation_{script}.json", ("precision", "side"))
    return sets_table(script, rows) if rows else ""


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


ABLATED = [script_of(model, version) for version in ALL_VERSIONS[1:] for model in FASTEST]
TABLES: dict[str, Callable[[Path], list[str]]] = {
    "headline": lambda where: headline_tables(where / "headline.json"),  # V1 and V2, all modes
    "versions": lambda where: headline_tables(where / "headline_v3.json"),  # V1 to V3, as graphs
    "ablation": lambda where: [ablation_table(where, script) for script in ABLATED],
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
    f"ablation_{script}": lambda where, script=script: [ablation_table(where, script)]
    for script in ABLATED
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
    "trunk": (trunk, ("rounds",)),
    "headline": (headline, ("rounds",)),
    "untuned": (untuned, ("rounds",)),
    "inference": (inference, ()),
    "memory": (memory, ("batch_size",)),
    "counts": (counts, ()),
    "overhead": (overhead, ("rounds",)),
    "scaling": (scaling, ("processes",)),
    "ddp": (ddp, ("processes",)),
}


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
    add_some("--shapes", SHAPES, "of headline and fastest")
    add_some("--precisions", PRECISIONS, "likewise, and of scaling")
    add_some("--modes", MODES, "of headline and scaling")
    add_some("--trunks", TRUNKS, "sizes of trunk")
    sides = "of fastest and trunk: V4, 'V2 compiled', OpenFold, ... (default: all)"
    add("--sides", nargs="+", metavar="SIDE", help=sides)
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
    elif "processes" in said:
        args.processes = join_processes(args.suite)
        files = {f"{args.suite}_{args.processes}.json": parts}
    settings = {key: getattr(args, key) for key in said}
    for name, parts in files.items():
        keep = args.suite == "trunk"
        rows = measure_study(args.directory / name, parts(args), keep=keep, **settings)
        if args.suite == "ablation":
            check_failed(rows)
    return 0


main = program(build_parser, run_suite)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Take the measurements behind the figures of README and docs, and print the tables from them.

Both sides of a ratio are measured in this process in short alternating turns, where there is a GPU as whole-step graphs
unless a row says otherwise. A suite writes one file, which replaces an earlier one when its last row is measured; until
then the rows are in NAME.partial.json.

Examples:
  python bench/versions.py headline results/DIR   all versions: sizes, precisions, eager, graph and compiled
  python bench/versions.py fastest results/DIR    V4 against all versions compiled, and V3, as graphs
  python bench/versions.py untuned results/DIR    the same at GPT-2 small's and TinyLlama 1.1B's sizes, in bf16
  python bench/versions.py trunk results/DIR      48 Evoformer blocks, with and without --checkpoint-blocks
  python bench/versions.py inference results/DIR  a transformer layer of V4 in one launch, and in other ways
  python bench/versions.py ablation results/DIR   what a version adds: each alone, and all but each, against none
  python bench/versions.py memory results/DIR     peak memory of TinyLlama against the sequence length
  python bench/versions.py counts results/DIR     kernels (on a CPU operator calls) at batch sizes 1, 2 and 4
  python bench/versions.py overhead results/DIR   the measured loop against a loop of bare training steps
  python bench/versions.py scaling results/DIR    the same batch per GPU on one GPU; for N of them, with torchrun:
  torchrun --nproc-per-node N bench/versions.py scaling results/DIR
  torchrun --nproc-per-node N bench/versions.py ddp results/DIR    where the time goes that scaling loses
  python bench/versions.py table results/DIR      the tables, from what lies in DIR
"""

import _root

import argparse
import importlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from workshop import records
from workshop.ablation import ablation, fusion_sets, new_fusions, sets_table
from workshop.cli import ToolError, at_least, documented_parser, run_tool
from workshop.files import read_json
from workshop.profile.kernels import CATEGORIES
from workshop.results import Run
from workshop.show import NOT_FINISHED, cell, markdown_table
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
    ratios,
    short_run,
    speedup,
)

PROG = Path(__file__).name
MEDIUM = "--hidden-dim 1024 --num-layers 12 --num-heads 16 --seq-len 512 --batch-size 16"
GPT_2 = "--hidden-dim 768 --num-layers 12 --num-heads 12 --num-kv-heads 12"  # GPT-2 small's sizes
GPT_2 += " --seq-len 1024 --batch-size 8 --vocab-size 50304"
TINY_LLAMA = "--hidden-dim 2048 --num-layers 22 --num-heads 32 --num-kv-heads 4"  # TinyLlama 1.1B's
TINY_LLAMA += " --intermediate-dim 5632 --seq-len 2048 --batch-size 2 --vocab-size 32000"
CROP = "--batch-size 1 --num-blocks 1 --num-seqs 128 --seq-len 256 --msa-dim 256 --num-heads-msa 8"
SHAPES = {  # of the headline table
    "tiny_llama, small": ["--seq-len", "128"],
    "tiny_llama, medium": MEDIUM.split(),
    "tiny_openfold, default": [],
    "tiny_openfold, crop": CROP.split(),
}
UNTUNED = {  # sizes that no block was chosen for
    "tiny_llama, GPT-2 small": GPT_2.split(),
    "tiny_llama, 1.1B": TINY_LLAMA.split(),
}
CHECKPOINTED = "--checkpoint-blocks"
TRUNK = CROP.replace("--num-blocks 1", "--num-blocks 48")
TRUNKS = {  # sequences and residues of AlphaFold 2's training, and of its fine-tuning
    "128 x 256": TRUNK.split(),
    "512 x 384": [*TRUNK.split(), "--num-seqs", "512", "--seq-len", "384"],
}
MODELS = {"tiny_openfold": [], "tiny_llama": ["--seq-len", "128"]}  # the sizes of the ablation
VERSIONS = ("v1", "v2", "v3")
NEWEST = "v4"  # in studies of its own
VERSIONS_OF = dict.fromkeys(("tiny_llama", "tiny_openfold"), (*VERSIONS, NEWEST))
FASTEST = {"tiny_llama": "fastest.json", "tiny_openfold": "fastest_openfold.json"}
PRECISIONS = {"fp32": [], "TF32": ["--matmul-precision", "high"], "bf16": ["--use-amp"]}
COMPILE = ["--enable-torch-compile"]
MODES = {  # the best mode of torch.compile is that with graphs of its own
    "eager": [],
    "graph": [GRAPH],
    "compiled": [*COMPILE, "--torch-compile-mode", "reduce-overhead"],
    "compiled graph": [*COMPILE, GRAPH],
}
SCALING = {  # arguments and samples per GPU
    "tiny_llama": (["--seq-len", "128"], 8),
    "tiny_llama wide": (["--hidden-dim", "1024", "--num-layers", "12", "--seq-len", "512"], 16),
    "tiny_openfold": ([], 4),
    "tiny_openfold long": (["--seq-len", "128"], 8),
}
FINISHED = ("batch_ms", "turns_ms", "per_step")  # what a side has that finished
LENGTHS = (128, 256, 512, 1024, 2048)
INFERENCE = ((1, 16), (1, 128), (4, 128), (16, 128))  # samples, length


def headline(rounds: int, shapes: Sequence[str], precisions: Sequence[str], modes: Sequence[str]) -> Iterator[Part]:
    """All versions in every size, precision and mode."""
    for shape, precision, mode in itertools.product(shapes, precisions, modes):
        argv = [*SHAPES[shape], *PRECISIONS[precision], *MODES[mode]]
        sides = {v.upper(): (f"{shape.partition(',')[0]}_{v}", argv) for v in VERSIONS}
        yield {"shape": shape, "precision": precision, "mode": mode}, partial(all_sides, sides, rounds)


def fastest(model: str, rounds: int, shapes: Sequence[str], precisions: Sequence[str]) -> Iterator[Part]:
    """V4, V3, and V1 to V3 compiled, all as whole-step graphs."""
    for shape, precision in itertools.product([name for name in shapes if name.startswith(model)], precisions):
        argv = [*SHAPES[shape], *PRECISIONS[precision], GRAPH]
        sides = {v.upper(): (f"{model}_{v}", argv) for v in (NEWEST, VERSIONS[-1])}
        sides |= {f"{v.upper()} compiled": (f"{model}_{v}", [*argv, *COMPILE]) for v in reversed(VERSIONS)}
        yield {"shape": shape, "precision": precision}, partial(all_sides, sides, rounds)


def all_sides(sides: Mapping[str, tuple[str, list[str]]], rounds: int) -> list[dict]:
    """A row for each side; all of them have to finish."""
    return as_rows(all_measured(sides, rounds))


def untuned(rounds: int) -> Iterator[Part]:
    """TinyLlama V4 to V1, V3 and V2 compiled, in bf16 at other sizes: one after the other, as two may not fit."""
    for shape, sizes in UNTUNED.items():
        argv = graph_of([*sizes, *PRECISIONS["bf16"]])
        sides = {v.upper(): (f"tiny_llama_{v}", argv) for v in (NEWEST, *reversed(VERSIONS))}
        sides |= {f"{v.upper()} compiled": (f"tiny_llama_{v}", [*argv, *COMPILE]) for v in ("v3", "v2")}
        for name, side in sides.items():
            yield {"shape": shape, "precision": "bf16", "side": name}, partial(one_side, name, side, rounds)


def one_side(name: str, side: tuple[str, list[str]], rounds: int) -> dict:
    """Turns of a side alone."""
    return in_turns({name: side}, rounds)[name]


def trunk(rounds: int, shapes: Iterable[str], wanted: Sequence[str] | None, clone: Path) -> Iterator[Part]:
    """48 blocks in bf16, each side alone: versions, OpenFold's own blocks, compiled ones; with and without checkpoints.

    What is compiled is one block, which serves all: compiling 48 at once takes too long.
    """
    import torch

    from workshop.baselines import openfold_block

    config = importlib.import_module("tiny_openfold_v1").ModelConfig(msa_dim=256, num_heads_msa=8)
    theirs = partial(openfold_block, config=config, clone=clone)
    kinds = {version.upper(): (version, None) for version in reversed(VERSIONS_OF["tiny_openfold"])}
    kinds["OpenFold"] = "v1", theirs
    kinds["V2 compiled"] = "v2", torch.compile
    kinds["OpenFold compiled"] = "v1", lambda block: torch.compile(theirs(block))
    if unknown := set(wanted or ()) - set(kinds):
        raise ToolError(f"trunk has no side {min(unknown)}; it has {', '.join(kinds)}")
    for shape, kind, more in itertools.product(shapes, wanted or kinds, ([], [CHECKPOINTED])):
        version, change = kinds[kind]
        side = f"{kind}, checkpointed" if more else kind
        argv = graph_of([*TRUNKS[shape], *PRECISIONS["bf16"], "--warmup-steps", "2", *more])
        names = {"shape": shape, "precision": "bf16", "side": side}
        yield names, partial(with_blocks, change, side, (f"tiny_openfold_{version}", argv), rounds)


def with_blocks(change: Callable | None, name: str, side: tuple[str, list[str]], rounds: int) -> dict:
    """Turns of a side alone, with what `change` makes of each of its blocks."""
    module = importlib.import_module(side[0])
    build = module.build_model

    def build_changed(*args: object) -> object:
        model = build(*args)
        for number, block in enumerate(model.blocks):
            model.blocks[number] = change(block)
        return model

    module.build_model = build_changed if change else build
    try:
        return one_side(name, side, rounds)
    finally:
        module.build_model = build


def inference() -> Iterator[Part]:
    """What TinyLlama V4's --mode benchmark finds in bfloat16, by batch size and length."""
    for batch, length in INFERENCE:
        yield {"batch_size": batch, "seq_len": length}, partial(one_layer, batch, length)


def one_layer(batch: int, length: int) -> list[dict]:
    """A row with time and error for each way of TinyLlama V4's --mode benchmark; ToolError if its ways disagree."""
    v4 = importlib.import_module("tiny_llama_v4")
    with tempfile.TemporaryDirectory() as folder:
        argv = ["--batch-size", str(batch), "--seq-len", str(length), "--use-amp", "--mode", "benchmark"]
        if v4.main([*argv, "--profile-dir", folder]):
            raise ToolError(f"{v4.SCRIPT} {' '.join(argv)}: the ways disagree", status=1)
        found = read_json(Path(folder) / f"{v4.SCRIPT}_benchmark.json")
    same = {"model": "tiny_llama", "version": "V4", "precision": "bf16"}
    return [
        {"side": side, **same, **times, "error_of_output": found["errors"][side]}
        for side, times in found["times"].items()
    ]


def single_fusions(model: str, version: str, rounds: int) -> list[Part]:
    """What a version adds to the one before: each alone, all but each, none and all; the speed-up is over none."""
    script = f"{model}_{version}"
    fusions = new_fusions(importlib.import_module(script))
    arguments = {name: graph_of([*MODELS[model], *PRECISIONS[name]]) for name in ("fp32", "bf16")}
    return ablation(script, arguments, fusions, fusion_sets(fusions), rounds)


def memory() -> Iterator[Part]:
    """Peak memory of TinyLlama V2 with flash attention off and on, the other fusions on, batch size 4."""
    for length in LENGTHS:
        yield {"seq_len": length}, partial(memory_of_attention, length)


def memory_of_attention(length: int) -> list[dict]:
    """The row of a short run with materialised scores, and of one without."""
    argv = ["--batch-size", "4", "--seq-len", str(length), "--num-steps", "3", "--warmup-steps", "2"]
    flags = {"scores": ["--disable-flash-attention"], "flash": []}
    runs = {name: Run(name, Path(), short_run("tiny_llama_v2", [*argv, *more])) for name, more in flags.items()}
    return as_rows({name: run.row() for name, run in runs.items()})


def counts() -> Iterator[Part]:
    """Kernels of a training step at batch sizes 1, 2 and 4; on a CPU operator calls, of two layers or blocks."""
    layers = {"tiny_llama": "--num-layers", "tiny_openfold": "--num-blocks"}
    for model, version, batch in itertools.product(layers, ("v1", "v2"), (1, 2, 4)):
        argv = [layers[model], "2", "--seq-len", "32", "--batch-size", str(batch)]
        yield {"script": f"{model}_{version}", "argv": argv}, partial(kernels_of_a_step, f"{model}_{version}", argv)


def kernels_of_a_step(script: str, argv: list[str]) -> dict:
    """What is counted, and how many."""
    module = importlib.import_module(script)
    trainer = make_trainer(module, argv)
    counted = module.count_kernels(trainer)
    found = {"unit": counted["unit"], "per_step": counted["per_step"]}
    return named(script, argv, trainer.args) | found


def overhead(rounds: int) -> Iterator[Part]:
    """Time per step of the harness's measured loop over that of a loop that only takes training steps."""
    for script, argv in (("tiny_openfold_v2", []), ("tiny_llama_v2", [*MODELS["tiny_llama"], "--use-amp"])):
        for mode, options in (("eager", argv), ("graph", graph_of(argv))):
            names = {"script": script, "argv": options, "mode": mode}
            yield names, partial(measured_and_bare, script, options, rounds)


def measured_and_bare(script: str, argv: list[str], rounds: int) -> dict:
    """Milliseconds per step of both loops, in turns so short that a host keeps its speed through a pair of them."""
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
        first.join_processes(first.parse_args(["--batch-size", str(first.WORLD_SIZE)]))
    elif suite == "ddp":
        raise ToolError("ddp needs several processes: torchrun --nproc-per-node N bench/versions.py ddp results/DIR")
    return first.WORLD_SIZE


def scaling(processes: int, rounds: int) -> Iterator[Part]:
    """V1 and V2 with the same batch per GPU, on the GPUs that torchrun gave processes to; the best round."""
    for name, precision, argv in scaling_shapes(processes):
        names = {"name": name, "precision": precision, "argv": argv}
        yield names, partial(best_rounds, name.split()[0], argv, rounds)


def best_rounds(model: str, argv: list[str], rounds: int) -> list[dict]:
    """Rows of V1 and V2, each from its fastest run."""
    best: dict[str, dict] = {}
    for version in ("v1", "v2") * rounds:
        result = short_run(f"{model}_{version}", [*argv, "--num-steps", "12"])
        if result["status"] != "ok":
            raise ToolError(f"{model}_{version} {' '.join(argv)}: {result['error']}", status=3)
        row = Run(version, Path(), result).row() | {"backward_ms": result["timing"]["backward_ms"]}
        best[version.upper()] = min(best.get(version.upper(), row), row, key=lambda row: row["batch_ms"])
    return as_rows(best)


def scaling_shapes(processes: int) -> Iterator[tuple[str, str, list[str]]]:
    """Name, precision and arguments of each row of `scaling`."""
    for name, (sizes, per_gpu) in SCALING.items():
        for precision in ("fp32", "bf16"):
            yield name, precision, [*sizes, *PRECISIONS[precision], "--batch-size", str(per_gpu * processes)]


def ddp(processes: int, rounds: int) -> Iterator[Part]:
    """The same training steps on one GPU while the others idle, on all of them without DDP, and with it; in turn.

    Of the steps on all GPUs without DDP, `slowest` is the mean over the steps of the longest one among the processes:
    what a step would take if nothing but waiting for each other were added. Milliseconds per step of rank 0, the
    median of the rounds. Only shapes and precisions that scale below 0.95 or are limited by the host.
    """
    import torch

    idle = torch.distributed.new_group(backend="gloo")  # NCCL's barrier would keep a core and the GPU busy
    for name, precision, argv in scaling_shapes(processes):
        if precision == "fp32" and len(name.split()) > 1:
            continue
        for version in ("v1", "v2"):
            names = {"name": name, "precision": precision, "version": version.upper(), "argv": argv}
            yield names, partial(with_and_without_ddp, f"{name.split()[0]}_{version}", argv, processes, rounds, idle)


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


def share_table(directory: Path) -> str:
    """What the kernels of a step do, from the profiles of run_pytorch_profiler.py that lie in the directory."""
    profiles = [records.read(records.Profile, path) for path in sorted(directory.glob("profile_tiny_*.json"))]
    if not profiles:
        return ""
    lines = []
    for name in CATEGORIES:
        if any(name in profile["categories"] for profile in profiles):
            shares = (profile["categories"].get(name, {"percent": 0.0})["percent"] for profile in profiles)
            lines.append([name, *(f"{share:.1f} %" for share in shares)])
    lines.append(["kernel time, ms", *(f"{profile['ms_per_step']:.2f}" for profile in profiles)])
    return markdown_table(["share of kernel time", *(profile["script"] for profile in profiles)], lines)


def scaling_table(directory: Path) -> str:
    """Weak scaling: samples per second and GPU over those of one GPU."""
    keys = ("name", "precision", "side")
    runs = [read_rows(directory / f"scaling_{n}.json", keys, ["samples_per_sec"]) for n in (1, 2, 4)]
    if not all(runs):
        return ""
    lines = []
    one, *more = (by_side(rows, "name", "precision") for rows in runs)
    for place, sides in one.items():
        ratios = (
            of[place][version]["samples_per_sec"] / sides[version]["samples_per_sec"] / n
            for n, of in zip((2, 4), more, strict=True)
            for version in ("V1", "V2")
        )
        lines.append([described(*place), *(f"{ratio:.2f}" for ratio in ratios)])
    header = [f"{n} GPUs, {version}" for n in (2, 4) for version in ("V1", "V2")]
    return markdown_table(["same batch per GPU", *header], lines)


def described(name: str, precision: str) -> str:
    """A row of `scaling` in words."""
    sizes, per_gpu = SCALING[name]
    return f"{name.split()[0]}, {' '.join(sizes) or 'default sizes'}, {per_gpu} per GPU, {precision}"


def ddp_table(directory: Path) -> str:
    """What a step on several GPUs consists of."""
    rows = read_rows(directory / "ddp_4.json")
    if not rows:
        return ""
    lines = [
        [
            f"{described(row['name'], row['precision'])}, {row['version']}",
            *(f"{row[kind]:.1f}" for kind in ("alone_ms", "together_ms", "slowest_ms", "ddp_ms")),
        ]
        for row in rows
    ]
    header = ["ms per step", "one GPU, others idle", "all, without DDP", "slowest of them", "all, with DDP"]
    return markdown_table(header, lines)


def versions_of(path: Path, *keys: str) -> dict[tuple, dict[str, dict]]:
    """The sides of a study of versions, all of which have to have finished, by shape, precision and these keys."""
    names = ("shape", "precision", *keys)
    rows = read_rows(path, (*names, "side", *FINISHED), FINISHED)
    return by_side(rows, *names)


def headline_tables(path: Path) -> list[str]:
    """Milliseconds per step of each size, precision and mode, the ratio as graphs, then kernels and memory."""
    lines: dict[str, dict[str, dict]] = {}
    for (shape, precision, mode), sides in versions_of(path, "mode").items():
        lines.setdefault(f"{shape}, {precision}", {})[mode] = sides
    if not lines:
        return []

    def columns(modes: Iterable[str], value: Callable[[dict], str]) -> dict[str, list[str]]:
        """The columns of all versions in these modes, as far as they were measured."""
        return {
            f"{mode} {version}": [
                value(line[mode][version]) if version in line.get(mode, ()) else "" for line in lines.values()
            ]
            for mode, version in itertools.product(modes, map(str.upper, VERSIONS))
            if any(version in line.get(mode, ()) for line in lines.values())
        }

    def as_table(title: str, columns: dict[str, list[str]]) -> str:
        return markdown_table([title, *columns], [*zip(lines, *columns.values(), strict=True)])

    times = columns(MODES, lambda side: f"{side['batch_ms']:.2f}")
    for before, after in itertools.pairwise(map(str.upper, VERSIONS)):
        if f"graph {after}" in times:
            sides = [line.get("graph", {}) for line in lines.values()]
            both = [ratios(side[before], side[after]) if after in side else [] for side in sides]
            times[f"{after} over {before}, graph"] = [f"{statistics.median(r):.2f}x" if r else "" for r in both]
    counts = {}
    for modes in (("eager", "compiled"), ("graph", "compiled graph")):  # a graph replays what its mode launches
        counts = counts or columns(modes, lambda side: str(side["per_step"]))
    peaks = columns(("eager", "graph", "compiled graph"), lambda side: cell(side["peak_mb"], ".0f"))
    return [
        as_table("ms per step", times),
        as_table(
            "kernels per step, then peak memory in MB", counts | {f"{name}, MB": mb for name, mb in peaks.items()}
        ),
    ]


def model_table(directory: Path, model: str) -> str:
    """Of a model, as graphs: milliseconds per step of each version, kernels and memory of the first and the last.

    V4's columns are from a run of its own, and its ratios from that run alone.
    """
    lines, header = [], [model, *(f"{version.upper()}, ms" for version in VERSIONS), "V3 over V1"]
    header += ["kernels, V1 / V3", "peak MB, V1 / V3"]
    fastest = versions_of(directory / FASTEST[model])
    for (shape, precision, mode), sides in versions_of(directory / "headline_v3.json", "mode").items():
        first, last = sides["V1"], sides[VERSIONS[-1].upper()]
        if mode != "graph" or first["model"] != model:
            continue
        lines.append([f"{shape.partition(', ')[2]}, {precision}"])
        lines[-1] += [*(f"{side['batch_ms']:.2f}" for side in sides.values()), f"{speedup(first, last):.2f}x"]
        lines[-1] += [f"{first['per_step']} / {last['per_step']}"]
        lines[-1] += [f"{first['peak_mb']:.0f} / {last['peak_mb']:.0f}"]
        if there := fastest.get((shape, precision)):
            over = (speedup(there[name], there["V4"]) for name in ("V3", best_compiled(there)))
            lines[-1] += [f"{there['V4']['batch_ms']:.2f}", *(f"{ratio:.2f}x" for ratio in over)]
            lines[-1] += [str(there["V4"]["per_step"])]
        elif fastest:
            lines[-1] += 4 * [""]
    if fastest:
        header += ["V4, ms", "V4 over V3", "V4 over compiled", "its kernels"]
    return markdown_table(header, lines) if lines else ""


def best_compiled(sides: Mapping[str, dict]) -> str:
    """The fastest of the compiled sides of `fastest`."""
    return min((name for name in sides if name.endswith("compiled")), key=lambda name: sides[name]["batch_ms"])


def fastest_table(directory: Path, model: str) -> str:
    """Milliseconds per step of V4 and the others, the best compiled one's over V4's, peak memory."""
    lines, sides = [], []
    for place, sides in versions_of(directory / FASTEST[model]).items():
        best = best_compiled(sides)
        lines.append([", ".join(place), *(f"{side['batch_ms']:.2f}" for side in sides.values())])
        lines[-1] += [f"{speedup(sides[best], sides['V4']):.2f}x ({best})"]
        lines[-1] += [cell(side["peak_mb"], ".0f") for side in sides.values()]
    header = ["as graphs", *(f"{name}, ms" for name in sides), "best compiled / V4"]
    return markdown_table([*header, *(f"{name}, MB" for name in sides)], lines) if lines else ""


def untuned_table(directory: Path) -> str:
    """Milliseconds per step and peak memory of each side, and its time over V4's."""
    keys = ("shape", "precision", "side")
    measured = by_side(read_rows(directory / "untuned.json", keys), "shape", "precision")
    names = list(dict.fromkeys(name for sides in measured.values() for name in sides))
    lines = []
    for shape, sides in measured.items():
        here = [sides.get(name, {}) for name in names]
        lines.append(
            [", ".join(shape), *(NOT_FINISHED.get(s.get("status")) or cell(s.get("batch_ms"), ".2f") for s in here)]
        )
        both = ((side.get("batch_ms"), sides.get("V4", {}).get("batch_ms")) for side in here[1:])
        lines[-1] += [f"{ms / v4:.2f}x" if ms and v4 else "-" for ms, v4 in both]
        lines[-1] += [cell(side.get("peak_mb"), ".0f") for side in here]
    header = ["as graphs, one after the other", *(f"{name}, ms" for name in names)]
    header += [f"{name} / V4" for name in names[1:]]
    return markdown_table([*header, *(f"{name}, MB" for name in names)], lines) if lines else ""


def trunk_table(directory: Path) -> str:
    """Milliseconds per step and peak memory of each side, with the activations of all blocks and of one at a time."""
    rows = read_rows(directory / "trunk.json", ("shape", "side"))
    lines = []
    for (shape,), sides in by_side(rows, "shape").items():
        for kind in sides:
            if kind.endswith("checkpointed"):
                continue
            both = [sides.get(name, {}) for name in (kind, f"{kind}, checkpointed")]
            lines.append([f"{shape}, {kind}"])
            for key, digits in (("batch_ms", ".0f"), ("peak_mb", ".0f")):
                lines[-1] += [NOT_FINISHED.get(side.get("status")) or cell(side.get(key), digits) for side in both]
    header = ["48 blocks, bf16", "ms", "ms, checkpointed", "MB", "MB, checkpointed"]
    return markdown_table(header, lines) if lines else ""


def inference_table(directory: Path) -> str:
    """Microseconds of a layer in each way, and how many kernels these are."""
    lines, header = [], []
    rows = read_rows(directory / "inference.json", ("batch_size", "seq_len", "side", "us", "kernels"))
    for (batch, length), sides in by_side(rows, "batch_size", "seq_len").items():
        header = ["one layer, bf16", *(f"{name}, us ({side['kernels']} kernels)" for name, side in sides.items())]
        lines.append([f"batch size {batch}, length {length}", *(f"{side['us']:.1f}" for side in sides.values())])
    return markdown_table(header, lines) if lines else ""


def ablation_table(directory: Path, script: str) -> str:
    """What each fusion of a version gains alone, and what all of them gain without it."""
    rows = read_rows(directory / f"ablation_{script}.json", ("precision", "side"))
    return sets_table(script, rows) if rows else ""


def counts_table(directory: Path) -> str:
    """Kernels per step at each batch size."""
    rows = read_rows(directory / "counts.json", ("script", "argv", "unit", "per_step"))
    lines: dict[str, list[str]] = {}
    for row in rows:
        lines.setdefault(row["script"], [f"{row['script']} {' '.join(row['argv'][:4])}"]).append(str(row["per_step"]))
    sizes = dict.fromkeys(f"batch size {row['argv'][-1]}" for row in rows)
    return markdown_table([f"{rows[0]['unit']} per step", *sizes], [*lines.values()]) if rows else ""


def memory_table(directory: Path) -> str:
    """Peak memory of TinyLlama V2 at each length."""
    rows = read_rows(directory / "memory.json", ("seq_len", "side", "peak_mb"))
    lengths, lines = by_side(rows, "seq_len"), []
    for name, label in (("scores", "materialised scores, MB"), ("flash", "flash attention, MB")):
        runs = (sides[name] for sides in lengths.values())
        lines.append([label, *(NOT_FINISHED.get(run.get("status")) or cell(run["peak_mb"], ".0f") for run in runs)])
    return markdown_table(["sequence length", *(str(length) for (length,) in lengths)], lines) if rows else ""


ABLATED = [f"{model}_{version}" for version in VERSIONS[1:] for model in MODELS]
TABLES: dict[str, Callable[[Path], list[str]]] = {
    "headline": lambda directory: headline_tables(directory / "headline.json"),  # V1 and V2, all modes
    "versions": lambda directory: headline_tables(directory / "headline_v3.json"),  # V1 to V3, as graphs
    "ablation": lambda directory: [ablation_table(directory, script) for script in ABLATED],
    "llama": lambda directory: [model_table(directory, "tiny_llama")],
    "openfold": lambda directory: [model_table(directory, "tiny_openfold")],
    "inference": lambda directory: [inference_table(directory)],
    "fastest": lambda directory: [
        *(fastest_table(directory, model) for model in FASTEST),
        *(ablation_table(directory, f"{model}_{NEWEST}") for model in FASTEST),
    ],
    "untuned": lambda directory: [untuned_table(directory)],
    "trunk": lambda directory: [trunk_table(directory)],
    "share": lambda directory: [share_table(directory)],
    "memory": lambda directory: [memory_table(directory)],
    "counts": lambda directory: [counts_table(directory)],
    "scaling": lambda directory: [scaling_table(directory)],
    "ddp": lambda directory: [ddp_table(directory)],
}
SINGLE = {  # one of those that come together
    f"ablation_{script}": lambda directory, script=script: [ablation_table(directory, script)] for script in ABLATED
}


def table(directory: Path, names: Iterable[str] = TABLES) -> str:
    """Tables of one device as Markdown: those of them whose result files lie in the directory."""
    tables = []
    for name in names:
        try:
            tables += (TABLES | SINGLE)[name](directory)
        except (LookupError, TypeError, ValueError) as error:
            raise ToolError(f"{directory}: rows of the table {name} do not belong together ({error!r})") from error
    if not any(tables):
        raise ToolError(f"{directory}: no result files of these measurements")
    return "\n\n".join(filter(None, tables))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    suites = (
        "headline",
        "fastest",
        "untuned",
        "trunk",
        "inference",
        "ablation",
        "memory",
        "counts",
        "overhead",
        "scaling",
        "ddp",
        "table",
    )
    add = parser.add_argument
    add("suite", choices=suites)
    add("directory", type=Path)
    add("--rounds", type=at_least(1), default=5, metavar="N", help="of all but memory (default: 5)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="of ablation and fastest")
    add("--versions", nargs="+", choices=(*VERSIONS[1:], NEWEST), default=list(VERSIONS[1:]), help="of ablation")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="of headline and fastest")
    add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="likewise")
    add("--trunks", nargs="+", choices=TRUNKS, default=list(TRUNKS), help="sizes of trunk")
    add("--sides", nargs="+", metavar="SIDE", help="of trunk: V1, V2, OpenFold, 'V2 compiled', ... (default: all)")
    add("--openfold", type=Path, default=Path("no clone"), metavar="CLONE", help="of OpenFold, for trunk")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="likewise")
    add("--tables", nargs="+", choices=TABLES | SINGLE, default=list(TABLES), help="of table")
    return parser


def run_suite(args: argparse.Namespace) -> int:
    """Measure, or print the tables; returns the exit status."""
    if args.suite == "table":
        print(table(args.directory, args.tables))
        return 0
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.suite == "headline":
        rows = headline(args.rounds, args.shapes, args.precisions, args.modes)
        measure_study(args.directory / "headline.json", rows, rounds=args.rounds)
    elif args.suite == "fastest":
        for model in args.models:
            rows = fastest(model, args.rounds, args.shapes, args.precisions)
            measure_study(args.directory / FASTEST[model], rows, rounds=args.rounds)
    elif args.suite == "untuned":
        measure_study(args.directory / "untuned.json", untuned(args.rounds), rounds=args.rounds)
    elif args.suite == "trunk":
        rows = trunk(args.rounds, args.trunks, args.sides, args.openfold)
        measure_study(args.directory / "trunk.json", rows, keep=True, rounds=args.rounds)
    elif args.suite == "inference":
        measure_study(args.directory / "inference.json", inference())
    elif args.suite == "ablation":
        for model, version in itertools.product(args.models, args.versions):
            path = args.directory / f"ablation_{model}_{version}.json"
            check_failed(measure_study(path, single_fusions(model, version, args.rounds), rounds=args.rounds))
    elif args.suite == "memory":
        measure_study(args.directory / "memory.json", memory(), batch_size=4)
    elif args.suite == "counts":
        measure_study(args.directory / "counts.json", counts())
    elif args.suite == "overhead":
        measure_study(args.directory / "overhead.json", overhead(args.rounds), rounds=args.rounds)
    else:
        processes = join_processes(args.suite)
        rows = {"scaling": scaling, "ddp": ddp}[args.suite](processes, args.rounds)
        measure_study(args.directory / f"{args.suite}_{processes}.json", rows, processes=processes)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = build_parser().parse_args(argv)
    return run_tool(PROG, lambda: run_suite(args))


if __name__ == "__main__":
    sys.exit(main())

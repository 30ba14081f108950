"""What several processes measure together, a GPU each: the suites scaling and ddp of
bench/versions.py, and their tables.
"""

import argparse
import importlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.sizes import (
    ALL_VERSIONS,
    CROP,
    MEDIUM,
    MODES,
    PRECISIONS,
    TRUNK,
    VERSIONS,
    Shape,
    script_of,
    sized,
)
from lab.cli import ToolError
from lab.records import COUNT, POSITIVE, TEXT, Row
from lab.show import Column, render
from lab.study import Part, read_rows
from lab.turns import alternating, failure, free_memory, graph_of, make_trainer, named, parse_quiet

Scaling = Row | {
    "name": TEXT,  # of a size in SCALING
    "processes": COUNT,  # that shared the batch, on a GPU each
    "backward_ms?": POSITIVE,
}
Apart = Row | {  # what a step on several GPUs consists of
    **dict.fromkeys(("name", "version", "precision"), TEXT),
    **dict.fromkeys(("alone_ms", "together_ms", "slowest_ms", "ddp_ms"), POSITIVE),
}


class Scaled(NamedTuple):
    """Sizes of `scaling`: of the model, samples per GPU, and steps in a turn."""

    shape: Shape
    per_gpu: int
    steps: int


WIDE = "--hidden-dim 1024 --num-layers 12 --seq-len 512"
SCALING = {
    "tiny_llama": Scaled(sized("llama", "--seq-len 128"), 8, 100),
    "tiny_llama medium": Scaled(sized("llama", MEDIUM.replace(" --batch-size 16", "")), 16, 10),
    "tiny_llama wide": Scaled(sized("llama", WIDE), 16, 10),
    "tiny_openfold": Scaled(sized("openfold"), 4, 50),
    "tiny_openfold long": Scaled(sized("openfold", "--seq-len 128"), 8, 10),
    "tiny_openfold crop": Scaled(sized("openfold", CROP.replace("--batch-size 1 ", "")), 1, 30),
    "tiny_openfold trunk": Scaled(sized("openfold", TRUNK.replace("--batch-size 1 ", "")), 1, 2),
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


def join_processes(suite: str) -> int:
    """Meet the other processes that torchrun started; returns how many there are. Each has one
    thread, as torchrun wants it, so also one alone, which is compared with them."""
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

    Versions as graphs in bf16, and V1 and V2 eager. The batch on N GPUs is N times that of one:
    over the same batch per GPU it is weak scaling, over the same batch on one GPU strong scaling.
    """
    batches = (1, *args.gpus) if args.processes == 1 else (args.processes,)
    for mode, versions, precisions in (
        ("eager", EAGER_SCALING, ("bf16", "fp32")),
        ("graph", GRAPH_SCALING, ("bf16",)),
    ):
        for name, precision in itertools.product(versions, precisions):
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


# Tables


def scaling_tables(directory: Path) -> str:
    """Weak scaling, eager and as graphs, then strong scaling."""
    keys = ("precision", "mode", "side", "batch_size")
    rows = read_rows(directory / "scaling.json", keys, ["batch_ms"], kind=Scaling)
    tables = (
        scaling_table([row for row in rows if row["mode"] == mode], mode, weak)
        for weak, mode in itertools.product((True, False), ("eager", "graph"))
    )
    return "\n\n".join(filter(None, tables))


def scaling_table(rows: Sequence[dict], mode: str, weak: bool) -> str:
    """Time on one GPU over that on several, a column for each version and number of GPUs. Weak:
    with the same batch per GPU, at best 1; strong: with the same batch, at best the number of
    GPUs."""
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
    return render(columns, list(dict.fromkeys(place for *_, place in found)))


def described(name: str, precision: str) -> str:
    return f"{name}, {SCALING[name].per_gpu} per GPU, {precision}"


def ddp_table(directory: Path) -> str:
    rows = read_rows(directory / "ddp_4.json", kind=Apart)

    def name(row: dict) -> str:
        return f"{described(row['name'], row['precision'])}, {row['version']}"

    columns = [
        Column("ms per step", name),
        Column("one GPU, others idle", "alone_ms", ".1f"),
        Column("all, without DDP", "together_ms", ".1f"),
        Column("slowest of them", "slowest_ms", ".1f"),
        Column("all, with DDP", "ddp_ms", ".1f"),
    ]
    return render(columns, rows)

"""What several processes measure together, a GPU each: the suite scaling of dev/bench/versions.py,
and its tables."""

import argparse
import importlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from dev.bench.sizes import (
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
from fusion_lab.host import free_memory, is_out_of_memory
from fusion_lab.records import Count, Row, read_rows
from fusion_lab.show import Column, render
from fusion_lab.study import Part
from fusion_lab.turns import failure, graph_of, named, parse_quiet


class ScalingRow(Row):
    name: str  # of a size in SCALING
    processes: Count  # that shared the batch, on a GPU each


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


def join_processes() -> int:
    """Meet the other processes that torchrun started; returns how many there are. Each has one
    thread, as torchrun wants it, so also one alone, which is compared with them."""
    import torch

    first = importlib.import_module("tiny_llama_v1")
    torch.set_num_threads(1)
    if first.WORLD_SIZE > 1:
        argv = graph_of(["--batch-size", str(first.WORLD_SIZE)])  # what follows may be graphs
        first.join_processes(first.parse_args(argv))
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
        trainer = module.Trainer(args)
        trainer.start()
        turns = [trainer.take(steps) for _ in range(rounds)]
        ms = statistics.median(turns)
        row |= {"batch_ms": ms, "turns_ms": turns, "peak_mb": trainer.peak / 1e6}
        row["samples_per_sec"] = 1e3 * args.batch_size / ms
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or module.WORLD_SIZE > 1:
            raise  # the other processes would wait
        row |= failure(error)
    trainer = None  # and its memory
    free_memory()
    return row


# Tables


def scaling_tables(directory: Path) -> str:
    """Weak scaling, eager and as graphs, then strong scaling."""
    keys = ("precision", "mode", "side", "batch_size")
    rows = read_rows(directory / "scaling.json", keys, ["batch_ms"], kind=ScalingRow)
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

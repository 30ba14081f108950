"""The whole training step, for dev/bench/operations.py: where its time goes, and the bytes that it
moves."""

import argparse
import importlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from dev.bench.sizes import ALL_VERSIONS, SHAPES, Shape, script_of
from dev.bench.sizes import PRECISIONS as ARGUMENTS
from fusion_lab.cli import ToolError
from fusion_lab.host import free_memory
from fusion_lab.profile.ceilings import measure_ceilings
from fusion_lab.profile.kernels import kernels_of, short_name
from fusion_lab.profile.roofline import group_bytes
from fusion_lab.profile.steps import profiled_steps
from fusion_lab.study import Part, as_rows
from fusion_lab.turns import graph_of, in_turns, make_trainer, named

PROFILED = 3  # steps


def of_models(args: argparse.Namespace) -> Iterator[tuple[str, tuple[str, Shape]]]:
    """Precisions, and sizes of whole models with their names: all if none is named."""
    chosen = {name: SHAPES[name] for name in args.shapes or SHAPES}
    return itertools.product(args.precisions, chosen.items())


def whole_step(args: argparse.Namespace) -> Iterator[Part]:
    """Rows of the study: the newest version's step, as a graph where there is a GPU, its kernels,
    and a reference."""
    for precision, (name, shape) in of_models(args):
        script = script_of(shape.model, ALL_VERSIONS[-1])
        argv = graph_of([*shape.argv, *ARGUMENTS[precision]])
        names = {"shape": name, "precision": precision, "script": script}
        yield names, partial(kernels_and_reference, script, argv, args.rounds)


def kernels_and_reference(script: str, argv: list[str], rounds: int) -> dict:
    """Time of a step, its kernels, and a reference.

    The reference has two parts: the FLOP of the unfused model, as the scripts count them, at the
    rate of a large GEMM, and the bytes that its operators read and write, once each, at the rate of
    a large copy. It is no bound: every fusion lowers these bytes, and caches can be faster than a
    copy.
    """
    module, launched, ceilings = importlib.import_module(script), [], []

    def parts_of_a_step(trainer) -> dict:
        launched.extend(kernels_of(profiled_steps(trainer, PROFILED)[1]))
        ceilings.append(measure_ceilings(trainer.args, trainer.device))
        moved = group_bytes(trainer, module.NO_WORK).total()
        flop = module.count_flops(trainer.args, trainer.batches.next_batch())
        return {"flop": flop, "bytes": moved}

    sides, more = {"": (script, argv)}, {"counted": False, "finishing": parts_of_a_step}
    row = in_turns(sides, rounds, **more)[""]
    if "error" in row:
        raise ToolError(f"{script}: {row['error']}", status=1)
    ceiling = ceilings[0]
    times = defaultdict(list)
    for kernel in launched:
        times[short_name(kernel.name), kernel.category].append(kernel.duration_ns / 1e3)
    kernels = [
        {"name": name, "category": category, "calls": len(us) / PROFILED, "us": sum(us) / PROFILED}
        for (name, category), us in times.items()
    ]
    row["gemm_ms"] = row["flop"] / ceiling.gemm_tflops / 1e9
    row["copy_ms"] = row["bytes"] / ceiling.copy_gb_per_s / 1e6
    row["over_reference"] = row["batch_ms"] / (row["gemm_ms"] + row["copy_ms"])
    row["kernels"] = sorted(kernels, key=lambda kernel: -kernel["us"])
    return row | {"ceilings": asdict(ceiling)}


def traffic(args: argparse.Namespace) -> Iterator[Part]:
    for precision, (name, shape) in of_models(args):
        argv = [*shape.argv, *ARGUMENTS[precision]]
        yield {"shape": name, "precision": precision}, partial(gigabytes, shape.model, argv)


def gigabytes(model: str, argv: list[str]) -> list[dict]:
    """A row with the GB per step of each version."""
    moved = {}
    for version in ALL_VERSIONS:
        script = script_of(model, version)
        module = importlib.import_module(script)
        trainer = make_trainer(module, argv)
        trainer.step()  # the first one does more
        gb = group_bytes(trainer, module.NO_WORK).total() / 1e9
        moved[version] = named(script, argv, trainer.args) | {"gb": gb}
        del trainer
        free_memory()
    return as_rows(moved)


# in bf16 if nothing else is asked for
STEPS = {"step": whole_step, "traffic": traffic}

"""The whole training step, for bench/operations.py: where its time goes, the bytes that it
moves, and how long it is beside that of Hugging Face's Llama.
"""

import argparse
import importlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from bench.graph_turns import DEVICE, GPU, PRECISIONS, matmul_precision, steps_in_turns
from bench.peers import Step, absent, hugging_face, with_liger
from bench.sizes import ALL_VERSIONS, MEDIUM, SHAPES, Shape, script_of
from bench.sizes import PRECISIONS as ARGUMENTS
from lab.profile.ceilings import measure_ceilings
from lab.profile.kernels import kernels_of, short_name
from lab.profile.roofline import group_bytes
from lab.profile.steps import profiled_steps
from lab.study import Part, as_rows
from lab.turns import all_measured, free_memory, graph_of, make_trainer, named

LLAMAS = {name: argv for name, (model, argv) in SHAPES.items() if model == "tiny_llama"}
LLAMAS["tiny_llama, medium, vocabulary 32000"] = [*MEDIUM.split(), "--vocab-size", "32000"]
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
    row, ceiling = all_measured(sides, rounds, **more)[""], ceilings[0]
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


# Beside Hugging Face's Llama


def training_step(
    forward: Callable, model: torch.nn.Module, batch: dict[str, Tensor], dtype: torch.dtype
) -> Step:
    """Forward under autocast, backward and optimizer, always on the same batch -> the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=GPU)

    def step() -> Sequence[Tensor]:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            out = forward(**batch)
        loss = out if isinstance(out, Tensor) else out.loss  # transformers gives more than the loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return (loss.detach(),)

    return step


def one_step(trainer, batch: dict[str, Tensor]) -> Sequence[Tensor]:
    return (trainer.compute(batch),)


def llama(args: argparse.Namespace) -> Iterator[Part]:
    """Rows of the study: whole steps of V2 to V4, of Hugging Face's Llama, and that with Liger."""
    for precision, (name, sizes) in itertools.product(args.precisions, LLAMAS.items()):
        if not args.shapes or name in args.shapes:
            names = {"shape": name, "precision": precision}
            yield names, partial(llamas_in_turns, sizes, precision, args.rounds)


def llamas_in_turns(sizes: list[str], precision: str, rounds: int) -> list[dict]:
    """A row for each side; Liger's loss asks the device for a number, so that side is eager."""
    dtype, products = PRECISIONS[precision]
    sides = {}
    with matmul_precision(products):
        for version in ("V4", "V3", "V2"):
            module = importlib.import_module(script_of("tiny_llama", version))
            if version == "V4":  # which has an optimizer of its own
                argv = [*sizes, *ARGUMENTS[precision], "--disable-cuda-graph"]
                trainer = make_trainer(module, argv)
                sides["V4"] = partial(one_step, trainer, trainer.next_batch())
                continue
            args = module.parse_args(sizes)
            ours = module.build_model(args, DEVICE)
            batch = module.make_batches(args, DEVICE, args.seed).next_batch()
            sides[version] = training_step(ours, ours, batch, dtype)
        for side, made_fast in libraries_llamas().items():
            try:
                model = hugging_face(ours)
                sides[side] = training_step(made_fast(model), model, batch, dtype)
                sides[side].eager = side == EAGER
            except ImportError as error:
                sides[side] = partial(absent, error)
        return as_rows(steps_in_turns(sides, rounds))


EAGER = "Liger, eager"


def libraries_llamas() -> dict[str, Callable]:
    """What is made of Hugging Face's Llama."""
    return {
        "Hugging Face": lambda model: model,
        "Hugging Face compiled": torch.compile,
        EAGER: with_liger,
        "Liger but its loss": partial(with_liger, fused_linear_cross_entropy=False),
    }


# in bf16 if nothing else is asked for
STEPS = {"step": whole_step, "llama": llama, "traffic": traffic}

#!/usr/bin/env python3
"""What device memory holds at the end of the forward pass of a training step, by what it is for,
version by version.

That is near the peak: all that the backward pass needs is there. Tensors kept for it are seen by
the hooks of torch.autograd, each counted once, where the module is that kept it first; "rest" is
what the allocator holds beside all that is named, such as logits, low-precision copies of weights
that a version keeps, and workspaces. Steps are eager and in bf16. On a CPU, which has no such
allocator, there is neither rest nor peak.

Examples:
  python bench/memory_by_purpose.py results/DIR/memory_by_purpose.json
  python bench/memory_by_purpose.py /tmp/memory.json --only "tiny_llama, small"
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository

import argparse
import gc
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from bench.sizes import SHAPES
from lab.cli import Parser, ToolError, documented_parser, program
from lab.script import load_script
from lab.show import Column, render
from lab.study import Part, measure_study
from lab.turns import free_memory, make_trainer

PROG = Path(__file__).name
GPU = torch.cuda.is_available()
PURPOSES = ("weights", "moments", "weight_copies", "attention", "mlp", "triangle", "other", "rest")
MODULES = (  # of what is kept: the first pattern that the name of the module has
    ("other", "norm"),
    ("attention", r"self_attn|msa_att|tri_att"),
    ("mlp", r"mlp|transition"),
    ("triangle", r"tri_mul|outer_product"),
    ("other", ""),
)


def storage(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's memory is, and how many bytes of it there are."""
    memory = tensor.untyped_storage()
    return memory.data_ptr(), memory.nbytes()


def purpose(module: str) -> str:
    """What a tensor is for that the module of this name keeps."""
    return next(kind for kind, pattern in MODULES if re.search(pattern, module))


class Kept:
    """Inside, the forward pass of a model: bytes kept for the backward pass by purpose, without
    `known` memory."""

    def __init__(self, model: nn.Module, known: dict[int, int]):
        self.seen, self.bytes, self.inside = dict(known), Counter(), [""]
        self.weights = defaultdict(list)
        for parameter in model.parameters():
            weight = parameter.detach()
            for view in (weight, weight.t()) if weight.dim() == 2 else (weight,):
                self.weights[view.shape].append(view)
        self.hooks = []
        for name, module in model.named_modules():
            self.hooks.append(
                module.register_forward_pre_hook(lambda *_, name=name: self.inside.append(name))
            )
            self.hooks.append(module.register_forward_hook(self.leave))
        self.saved = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor)

    def leave(self, *_: object) -> None:
        self.inside.pop()

    def keep(self, tensor: Tensor) -> Tensor:
        where, size = storage(tensor)
        if where not in self.seen:
            self.seen[where] = size
            of_its_shape = self.weights.get(tensor.shape, ())
            copy = any(torch.equal(tensor, weight.to(tensor.dtype)) for weight in of_its_shape)
            self.bytes["weight_copies" if copy else purpose(self.inside[-1])] += size
        return tensor

    def __enter__(self) -> Kept:
        self.saved.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.saved.__exit__(*error)
        for hook in self.hooks:
            hook.remove()


def measure(module: ModuleType, argv: list[str]) -> dict:
    """A row: bytes by purpose after the forward pass, and on a GPU the peak of the step."""
    trainer = make_trainer(module, argv)
    for _ in range(2):
        trainer.step()
    trainer.synchronize()
    gc.collect()
    state = [t for entry in trainer.optimizer.state.values() for t in entry.values()]
    weights = dict(map(storage, [*trainer.model.parameters(), *trainer.model.buffers()]))
    moments = {where: size for where, size in map(storage, state) if where not in weights}
    batch = trainer.next_batch()
    inputs = dict(map(storage, batch.values()))
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    with Kept(trainer.model, {**weights, **moments, **inputs}) as kept, trainer.autocast():
        loss = trainer.forward(**batch)
    named = {"weights": sum(weights.values()), "moments": sum(moments.values()), **kept.bytes}
    held = torch.cuda.memory_allocated() - sum(inputs.values()) if GPU else sum(named.values())
    loss.backward()
    trainer.optimizer.step()
    trainer.synchronize()
    named["rest"] = held - sum(named.values())
    peak = torch.cuda.max_memory_allocated() if GPU else None
    del trainer, kept, loss, state
    free_memory()
    return {
        "script": module.SCRIPT,
        "argv": argv,
        "parts": {name: named.get(name, 0) for name in PURPOSES},
        "peak_bytes": peak,
    }


STUDY = {
    "tiny_llama, small": ("tiny_llama", (1, 2, 3, 4)),
    "tiny_llama, medium": ("tiny_llama", (1, 2, 3, 4)),
    "tiny_openfold, crop": ("tiny_openfold", (1, 2, 3, 4)),
}


def table(rows: list[dict]) -> str:
    """The rows in Markdown, in MB."""

    def peak(row: dict) -> float | None:
        return row["peak_bytes"] and row["peak_bytes"] / 1e6

    columns = [
        Column("MB", lambda row: f"{row['shape']}, {row['version']}"),
        *(Column(name, lambda row, n=name: row["parts"][n] / 1e6, ".0f") for name in PURPOSES),
        Column("sum", lambda row: sum(row["parts"].values()) / 1e6, ".0f"),
        Column("peak of the step", peak, ".0f"),
    ]
    return render(columns, rows)


def study(shapes: Sequence[str]) -> Iterator[Part]:
    """Rows of the study: each version at each of these shapes."""
    for shape in shapes:
        model, versions = STUDY[shape]
        for version in versions:
            module = load_script(f"{model}_v{version}.py")
            argv = [*SHAPES[shape].argv, "--use-amp"]
            yield {"shape": shape, "version": f"V{version}"}, partial(measure, module, argv)


def measure_all(args: argparse.Namespace) -> int:
    """Measure, write and print; returns the exit status."""
    try:
        rows = measure_study(args.output, study(args.only or list(STUDY)[1:]))
    except torch.OutOfMemoryError as error:
        raise ToolError("out of memory: choose a smaller shape with --only", status=3) from error
    print(table(rows))
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("output", type=Path, metavar="FILE.json")
    shapes = "shapes (default: the last two)"
    parser.add_argument("--only", choices=tuple(STUDY), action="append", help=shapes)
    return parser


main = program(build_parser, measure_all)

if __name__ == "__main__":
    sys.exit(main())

"""What device memory holds at the end of the forward pass of a training step, by what it is for,
version by version: the suite `memory_by_purpose` of bench/versions.py, drawn by
tools/draw_figures.py.

That is near the peak: all that the backward pass needs is there. Tensors kept for it are seen by
the hooks of torch.autograd, each counted once, where the module is that kept it first; "rest" is
what the allocator holds beside all that is named, such as logits, low-precision copies of weights
that a version keeps, and workspaces. Steps are eager and in bf16. On a CPU, which has no such
allocator, there is neither rest nor peak.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from bench.sizes import ALL_VERSIONS, SHAPES, script_of
from lab.script import load_script
from lab.study import Part
from lab.turns import free_memory, make_trainer

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


def study(args: argparse.Namespace) -> Iterator[Part]:
    for shape, version in itertools.product(
        ("tiny_llama, medium", "tiny_openfold, crop"), ALL_VERSIONS
    ):
        module = load_script(f"{script_of(SHAPES[shape].model, version)}.py")
        argv = [*SHAPES[shape].argv, "--use-amp"]
        yield {"shape": shape, "version": version}, partial(measure, module, argv)

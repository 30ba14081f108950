#!/usr/bin/env python3
"""Launch what a profiler is to count, all in one process: it takes longest to start.

Each side runs twice, and once more where the profiler looks, behind a kernel that does nothing
(spin_kernel). Sides are steps of version scripts, without a graph; or operations before their
fusion, PyTorch's operators as V1 calls them, and after it, the kernel of V3. Writes what
fusion_lab/profile/traffic.py predicts of each side, in their order. dev/bench/counters.py reads
both.

Example:
  ncu --profile-from-start off python dev/bench/counted_sides.py predicted.json operations \\
      "tiny_llama, small, bf16, V4"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny_llama_v3
import tiny_openfold_v3
from dev.bench.sizes import PRECISIONS, SHAPES, script_of
from exercises.start.add_relu import one_kernel, two_kernels
from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.files import write_text
from fusion_lab.host import free_memory
from fusion_lab.profile.traffic import Traffic, bytes_of_a_step
from fusion_lab.script import script_named
from fusion_lab.turns import make_trainer

ROWS = 16384  # of each tensor: 32 to 134 MB, so that most of them lie beyond the caches
Side = Callable[[], object]


def backward(forward: Callable[..., Tensor], *inputs: Tensor) -> Side:
    """Return the backward pass alone of a function of these tensors."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    result = forward(*leaves)
    grad = torch.randn_like(result)
    return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """V1's RMSNorm, whose result goes into a product in bfloat16."""
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (x * rstd * weight).to(torch.bfloat16)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of tensors that lie side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def pairs(device: torch.device) -> Iterator[tuple[str, Side, Side, object]]:
    """Yield name, side before, side after, and the script whose kernels these are or None."""
    bf16 = torch.bfloat16
    llama, openfold = tiny_llama_v3, tiny_openfold_v3
    make = torch.randn
    x, y, t, z = make(4, ROWS * 1024, device=device)
    before, after = (lambda: two_kernels(x, y, t, z)), (lambda: one_kernel(x, y, z))
    after.bytes = {"one_kernel": 3 * x.nbytes}  # compiled code is run otherwise where ops are seen
    yield "add_relu", before, after, None
    rows = make(ROWS, 1024, device=device)
    update = make(ROWS, 1024, device=device, dtype=bf16)
    weight = torch.ones(1024, device=device)
    yield (
        "residual and RMS norm",
        lambda: rms_norm(rows + update, weight),
        lambda: llama.rms_norm_forward(rows, update, weight, 1e-5, bf16),
        llama,
    )
    grad, residual, rstd = update.clone(), rows.clone(), make(ROWS, device=device)
    yield (
        "RMS norm, backward",
        backward(rms_norm, rows, weight),
        lambda: llama.rms_norm_backward(grad, rows, residual, weight, rstd),
        llama,
    )
    wide = make(ROWS, 4096, device=device, dtype=bf16)
    half = make(ROWS, 2048, device=device, dtype=bf16)
    yield "SwiGLU", lambda: swiglu(wide), lambda: llama.swiglu_forward(wide), llama
    yield (
        "SwiGLU, backward",
        backward(swiglu, wide),
        lambda: llama.swiglu_backward(half, wide),
        llama,
    )
    logits = make(ROWS, 2000, device=device, dtype=bf16)
    targets = torch.zeros(ROWS, dtype=torch.int64, device=device)
    sums = make(ROWS, device=device)
    yield (
        "cross-entropy",
        lambda: F.cross_entropy(logits.float(), targets, reduction="none"),
        lambda: llama.cross_entropy_forward(logits, targets, 2000),
        llama,
    )
    yield (
        "cross-entropy, backward",
        backward(lambda scores: F.cross_entropy(scores.float(), targets, reduction="none"), logits),
        lambda: llama.cross_entropy_backward(sums, logits, targets, sums, 2000),
        llama,
    )
    pair, scale = make(8 * ROWS, 128, device=device), torch.ones(128, device=device)
    yield (
        "layer norm",
        lambda: F.layer_norm(pair, (128,), scale, scale).to(bf16),
        lambda: openfold.layer_norm_forward(pair, scale, scale, None, 1e-5, bf16, False),
        openfold,
    )
    projected, bias = make(ROWS, 1024, device=device, dtype=bf16), torch.ones(1024, device=device)
    yield (
        "bias and ReLU",
        lambda: F.relu(projected + bias.to(bf16)),
        lambda: openfold.bias_relu_forward(projected, bias),
        openfold,
    )


@contextlib.contextmanager
def seen_by_a_profiler() -> Iterator[None]:
    """Have a profiler look at what is launched inside, behind the mark."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def operations() -> Iterator[dict]:
    """Launch each operation before and after its fusion; yield what is predicted of it."""
    for name, before, after, script in pairs(torch.device("cuda")):
        for side, work in (("before", before), ("after", after)):
            for _ in range(2):
                work()  # compiles, and fills what is kept
            by_operator = getattr(work, "bytes", None)
            if by_operator is None:
                traffic = Traffic(nn.Module(), {}, tiny_llama_v3.NO_WORK)
                traffic.script = script
                with traffic:
                    work()
                by_operator = traffic.by_operator
            with seen_by_a_profiler():
                work()
            yield {"what": "operation", "operation": name, "side": side} | counts(by_operator)


def step(name: str) -> dict:
    """Launch a step; `name` is its size, precision and version. Return what is predicted of it."""
    shape, precision, version = name.rsplit(", ", 2)
    model, sizes = SHAPES[shape]
    # one block has all kernels of a model, and V1 has 700 in each
    less = ["--num-blocks", "1"] if shape == "tiny_openfold, default" else []
    argv = [*sizes, *less, *PRECISIONS[precision]]
    script = script_of(model, version)
    module = script_named(script)
    trainer = make_trainer(module, [*argv, "--disable-cuda-graph"])
    for _ in range(2):
        trainer.step()
    by_operator = bytes_of_a_step(trainer, module.NO_WORK)
    with seen_by_a_profiler():
        trainer.step()
    del trainer
    free_memory()
    names = {"script": script, "shape": shape, "precision": precision, "argv": argv}
    return {"what": "step", **names} | counts(by_operator)


def counts(by_operator: Mapping[str, int]) -> dict:
    """Return predicted bytes, in all and of each operator or kernel."""
    return {"predicted": sum(by_operator.values()), "by_operator": dict(by_operator)}


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise ToolError("a profiler counts on a GPU", status=4)
    sides: list[dict] = []
    for name in args.sides:
        sides += operations() if name == "operations" else [step(name)]
        write_text(args.output, json.dumps(sides, indent=1) + "\n")
        print(name, file=sys.stderr, flush=True)
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("output", type=Path, metavar="FILE.json")
    parser.add_argument("sides", nargs="+", metavar="SIDE")
    return parser


main = program(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Time the kernels of V3 and V4, forward and backward, beside what PyTorch and other libraries do
for the same operation.

All sides of a row are captured as CUDA graphs and replayed in short alternating turns, so that
neither the host nor a change of its speed counts. A study writes one file. A side that is not
installed, fails, or runs out of memory says so there. dev/bench/peers.py says what each library
is given. Two studies are of the whole training step: where its time goes, and the bytes that it
moves.

Examples:
  python dev/bench/operations.py attention DIR  attention with pair bias: ours, libraries, layouts
  python dev/bench/operations.py triangle DIR  triangle multiplication: V4 to V1, libraries
  python dev/bench/operations.py step DIR    the newest step by kernel, and beside a reference
  python dev/bench/operations.py traffic DIR  bytes that a step of each version reads and writes
  python dev/bench/operations.py table DIR   the tables, from what lies in DIR
"""

import argparse
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dev.bench.operation_tables import table
from dev.bench.peers import (
    attention_peers,
    cuequivariance_attention,
    library_attention,
    openfold3_attention,
    plain_attention,
    triangle_peers,
    turbopairformer_attention,
    versions,
)
from dev.bench.sizes import SHAPES
from dev.bench.whole_steps import STEPS
from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.graph_turns import (
    DEVICE,
    PRECISIONS,
    Step,
    gradient_step,
    matmul_precision,
    steps_in_turns,
)
from fusion_lab.study import Part, as_rows, measure_study

# of triangle multiplication: samples, length
TRIANGLE = {f"N={n}": (1, n) for n in (128, 255, 256, 384, 512, 768, 1024)}
TRIANGLE["N=64, batch 4"] = (4, 64)
# samples, rows, length, heads, head dimension
ATTENTION = {name: (samples, n, n, 4, 32) for name, (samples, n) in TRIANGLE.items()}
ATTENTION["MSA rows, N=256"] = (1, 128, 256, 8, 32)
OURS = {"V3": "tiny_openfold_v3", "V4": "tiny_openfold_v4"}  # side and script
LARGE = {"N=512", "N=768", "N=1024"}  # in bf16 only


# Studies of one operation: each builds its sides for a shape and a type of the tensors. The
# libraries' sides, and what each of them is given, are in dev/bench/peers.py.


def parts_of(study: str, args: argparse.Namespace) -> Iterator[Part]:
    """Rows of a study. Large shapes are measured in bf16 only, unless they are named."""
    shapes, sides_of = STUDIES[study]
    for precision, name in itertools.product(args.precisions, shapes):
        asked = name in args.shapes if args.shapes else precision == "bf16" or name not in LARGE
        if asked:
            names = {"shape": name, "precision": precision}
            yield names, partial(measure_shape, sides_of, shapes[name], precision, args.rounds)


def measure_shape(sides_of: Callable, sizes: tuple, precision: str, rounds: int) -> list[dict]:
    dtype, products = PRECISIONS[precision]
    with matmul_precision(products):
        return as_rows(steps_in_turns(sides_of(sizes, dtype), rounds))


def attention(sizes: tuple, dtype: torch.dtype) -> dict[str, Step]:
    """Attention with pair bias and gate on the packed result of the projection; libraries also in
    their own layout, where they do less: neither the gate nor what changes the layout."""
    samples, rows, length, heads, dim = sizes
    packed = torch.randn(samples, rows, length, heads, 4, dim, device=DEVICE, dtype=dtype)
    gate_bias = torch.randn(heads * dim, device=DEVICE)
    bias = torch.randn(samples, heads, length, length, device=DEVICE, dtype=dtype)
    inputs = [packed, gate_bias, bias]
    operations = {
        name: importlib.import_module(script).GatedAttentionFunction.apply
        for name, script in OURS.items()
    }
    operations["SDPA"] = library_attention
    operations["torch.compile"] = torch.compile(plain_attention)
    operations["cuEquivariance"] = cuequivariance_attention
    operations["TurboPairFormer"] = turbopairformer_attention
    operations["openfold3"] = openfold3_attention
    sides = {side: gradient_step(operation, inputs) for side, operation in operations.items()}
    q, k, v, _ = (t.contiguous() for t in packed.transpose(2, 3).unbind(4))
    for side, (operation, own) in attention_peers(q, k, v, bias).items():
        sides[f"{side}, own layout"] = gradient_step(operation, own)
    return sides


def with_weights(module: torch.nn.Module) -> torch.nn.Module:
    """The module on the device, with the same weights in every version: some begin with what lies
    in memory."""
    generator = torch.Generator().manual_seed(42)
    state = module.state_dict()  # canonical names
    for name in sorted(state):
        if "norm" not in name:
            drawn = torch.randn(state[name].shape, generator=generator)
            state[name] = drawn / drawn.shape[-1] ** 0.5
    module.load_state_dict(state)
    return module.to(DEVICE)


def triangle(sizes: tuple, dtype: torch.dtype) -> dict[str, Step]:
    """Triangle multiplication: the whole module of each version, norms and gates included,
    dimension 128, and the residual that V3's kernel adds."""
    samples, length = sizes
    pair = torch.randn(samples, length, length, 128, device=DEVICE, dtype=dtype)

    def module_of(script: str) -> torch.nn.Module:
        module = importlib.import_module(script)
        build = module.TriangleMultiplicationOutgoing
        return with_weights(build(module.ModelConfig(), module.Fusions()))

    sides = {}
    for name, script in OURS.items():
        ours = module_of(script)
        sides[name] = module_step(ours, ours, [pair], dtype)
    v2 = module_of("tiny_openfold_v2")
    sides["V2"] = module_step(with_residual(v2), v2, [pair], dtype)
    v1 = module_of("tiny_openfold_v1")
    compiled = torch.compile(with_residual(v1))
    sides["torch.compile"] = module_step(compiled, v1, [pair], dtype)
    for name, theirs in triangle_peers(v1.state_dict(), dtype).items():
        sides[name] = module_step(with_residual(theirs), theirs, [pair])
        sides[name].unchecked = True
    return sides


def with_residual(update: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """pair + update, as V3's module computes it."""
    return lambda pair: pair + update(pair)


def module_step(
    forward: Callable,
    model: torch.nn.Module,
    inputs: list[Tensor],
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Forward and backward with the gradients of parameters, too; autocast unless float32."""

    def operation(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        low = dtype != torch.float32
        with torch.autocast(DEVICE.type, dtype, enabled=low, cache_enabled=False):
            return forward(*inputs)

    return gradient_step(operation, inputs, list(model.parameters()))


STUDIES = {  # shapes and sides
    "attention": (ATTENTION, attention),
    "triangle": (TRIANGLE, triangle),
}


def check_ours(sides: Mapping[str, dict]) -> None:
    """ToolError if one of our kernels failed; of others, or for lack of memory, that is a
    result."""
    for name, side in sides.items():
        if name in OURS and side.get("status") == "failed":
            raise ToolError(f"{name}: {side['error']}", status=1)


# The command line


def run_study(args: argparse.Namespace) -> int:
    if args.what == "table":
        print(table(args.directory))
        return 0
    args.directory.mkdir(parents=True, exist_ok=True)
    args.shapes = args.shapes or ()
    known = STUDIES.get(args.what, (SHAPES,))[0]
    if unknown := [name for name in args.shapes if name not in known]:
        there = ", ".join(map(repr, known))
        raise ToolError(f"{args.what} has no shape {unknown[0]!r}; it has {there}")
    args.precisions = args.precisions or (["bf16"] if args.what in STEPS else list(PRECISIONS))
    measured = STEPS[args.what](args) if args.what in STEPS else parts_of(args.what, args)
    path = args.directory / f"{args.what}.json"
    libraries = {"libraries": versions()} if args.what in STUDIES else {}
    found = measure_study(path, list(measured), rounds=args.rounds, **libraries)
    for row in found if args.what in STUDIES else ():
        check_ours({row["side"]: row})
    return 0


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    add = parser.add_argument
    add("what", choices=(*STUDIES, *STEPS, "table"))
    add("directory", type=Path)
    parser.add_count("--rounds", 15, "turns of each side")
    precisions = "(default: all; bf16 for step)"
    add("--precisions", nargs="+", choices=PRECISIONS, help=precisions)
    shapes = "(default: all)"
    add("--shapes", nargs="+", metavar="SHAPE", help=shapes)
    return parser


main = program(build_parser, run_study)

if __name__ == "__main__":
    sys.exit(main())

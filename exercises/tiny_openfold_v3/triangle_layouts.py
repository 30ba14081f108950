#!/usr/bin/env python3
"""Triangle multiplication, forward: which layout its product takes, what it costs to get there, and
what fusion saves.

Channels last is [N, N, C], as the pair representation is; channels first is [C, N, N], a matrix for
each channel.

Examples:
  python exercises/tiny_openfold_v3/triangle_layouts.py --length 20
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from fusion_lab.cli import at_least, documented_parser
from fusion_lab.show import Column, render

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton looks at it when it is imported
from torch import Tensor

import tiny_openfold_v1 as v1
import tiny_openfold_v2 as v2
import tiny_openfold_v3 as v3
from exercises.tiny_llama_v3 import measure
from fusion_lab.accuracy import check_close

PROG = Path(__file__).name
DTYPE = torch.bfloat16 if measure.GPU else torch.float32
Ways = dict[str, tuple[Callable[[], Tensor], int]]


def projections(x: Tensor, weight: Tensor) -> Ways:
    """One GEMM of x [P, C] and weight [4 C, C], its result [4 C, P] in memory or as a view."""
    ways = {
        "projection, channels last": lambda: (x @ weight.T).T,
        "projection, channels last, then copied": lambda: (x @ weight.T).T.contiguous(),
        "projection, channels first": lambda: weight @ x.T,
    }
    return {name: (function, measure.bytes_of(function)) for name, function in ways.items()}


def products(a: Tensor, b: Tensor, module: type) -> Ways:
    """The sum over k of a and b [1, N, N, C], and of matrices that have channels first: [C, N,
    N], as a result, too."""
    name = "incoming" if "Incoming" in module.__name__ else "outgoing"
    first = [t[0].permute(2, 0, 1).contiguous() for t in (a, b)]
    ways = {
        f"{name} product, channels last": lambda: torch.einsum(module.equation, a, b)[0].permute(
            2, 0, 1
        ),
        f"{name} product, channels first": lambda: module.multiply(*first),
    }
    return {name: (function, measure.bytes_of(function)) for name, function in ways.items()}


def modules(pair: Tensor) -> Ways:
    """The whole update by each version, without a residual.

    V3's operator works in three steps, counted by hand; its residual is taken off again.
    """
    ways, state = {}, {}
    for name, script in {"V1": v1, "V2": v2, "V3": v3}.items():
        model = script.TriangleMultiplicationOutgoing(
            script.ModelConfig(pair_dim=pair.shape[-1]), script.Fusions()
        )
        state = state or {
            key: torch.randn_like(value) / 10 for key, value in model.state_dict().items()
        }
        model.load_state_dict(state)
        model.to(measure.DEVICE)
        function = partial(autocast, model, pair, residual=name == "V3")
        # x, a, b; a, b, p; x, p, update
        moved = 9 * pair.nbytes if name == "V3" else measure.bytes_of(function)
        ways[f"whole update, {name}"] = function, moved
    return ways


def autocast(model: torch.nn.Module, pair: Tensor, residual: bool) -> Tensor:
    with (
        torch.no_grad(),
        torch.autocast(pair.device.type, torch.bfloat16, enabled=measure.GPU, cache_enabled=False),
    ):
        return model(pair) - pair if residual else model(pair)


def groups(length: int, dim: int) -> list[Ways]:
    """Ways that give the same, in groups."""
    torch.manual_seed(0)
    pair = torch.randn(1, length, length, dim, device=measure.DEVICE, dtype=DTYPE)
    a, b = torch.randn(2, 1, length, length, dim, device=measure.DEVICE, dtype=DTYPE)
    weight = torch.randn(4 * dim, dim, device=measure.DEVICE, dtype=DTYPE)
    return [
        projections(pair.flatten(0, 2), weight),
        products(a, b, v2.TriangleMultiplicationOutgoing),
        products(a, b, v2.TriangleMultiplicationIncoming),
        modules(pair),
    ]


def check(found: list[Ways]) -> str:
    """Bytes that the operators of each way read and write, as a table; ToolError if two of a group
    differ.

    A copy that an operator makes for itself is not among them.
    """
    lines = []
    for ways in found:
        (reference, _), *_ = ways.values()
        expected = reference()
        for name, (function, moved) in ways.items():
            check_close(function(), expected, name, 5e-2 if measure.GPU else 1e-5)
            lines.append({"name": name, "mb": moved / 1e6})
    return render([Column("read and written", "name"), Column("MB", "mb", ".2f")], lines)


def launches(function: Callable[[], Tensor]) -> int:
    """How many kernels a call launches, copies among them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def measured(found: list[Ways]) -> Iterator[dict]:
    """Rows of the table."""
    for ways in found:
        for name, (function, moved) in ways.items():
            yield measure.timed(name, function, moved, kernels=str(launches(function)))


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(PROG, __doc__)
    length, dim = (256, 128) if measure.GPU else (64, 16)
    parser.add_argument(
        "--length", type=at_least(1), default=length, metavar="N", help="(default: %(default)s)"
    )
    measure.add_output(parser)
    args = parser.parse_args(argv)
    found: list[Ways] = []

    def checked() -> str:
        found.extend(groups(args.length, dim))
        return check(found)

    return measure.run(PROG, checked, lambda: measured(found), args.output)


if __name__ == "__main__":
    sys.exit(main())

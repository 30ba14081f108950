#!/usr/bin/env python3
"""A first kernel, relu(x + y) of vectors: check it, and time it beside PyTorch's two kernels.

Examples:
  python exercises/tiny_llama_v3/add_relu.py --n 1000 --block 128
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from fusion_lab.cli import ToolError, at_least, documented_parser

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton looks at it when it is imported
import triton
import triton.language as tl
from torch import Tensor

from exercises.tiny_llama_v3 import measure

PROG = Path(__file__).name


@triton.jit
def add_relu_kernel(X, Y, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # the elements of this program
    inside = at < n  # of the last program some are beyond the end
    x = tl.load(X + at, mask=inside)
    y = tl.load(Y + at, mask=inside)
    tl.store(OUT + at, tl.maximum(x + y, 0.0), mask=inside)


def add_relu(x: Tensor, y: Tensor, out: Tensor, block: int) -> Tensor:
    """relu(x + y) of float32 vectors [n] into `out`."""
    add_relu_kernel[(triton.cdiv(len(x), block),)](x, y, out, len(x), BLOCK=block)
    return out


def guarded(n: int, block: int, number: float) -> tuple[Tensor, Tensor]:
    """A vector [n], and what lies behind it in memory: this number, [block]."""
    buffer = torch.full((n + block,), number, device=measure.DEVICE)
    buffer[:n].normal_()
    return buffer.split([n, block])


def check(n: int, block: int) -> str:
    """What a good kernel says of itself; ToolError if it is not right."""
    (x, _), (y, _), (out, behind) = (guarded(n, block, number) for number in (1.0, 1.0, -1.0))
    add_relu(x, y, out, block)
    if not torch.equal(out, torch.relu(x + y)):
        raise ToolError(
            f"{int((out != torch.relu(x + y)).sum())} of {n} elements are wrong", status=1
        )
    if touched := int((behind != -1.0).sum()):
        raise ToolError(f"{touched} elements behind the end were written", status=1)
    programs = triton.cdiv(n, block)
    return f"{n} elements, {programs} programs of {block}, {programs * block - n} masked off: right"


def measured(n: int, block: int) -> Iterator[dict]:
    """Rows of the table."""
    x, y, out = torch.randn(3, n, device=measure.DEVICE)
    yield measure.timed("add_relu_kernel", lambda: add_relu(x, y, out, block), 3 * x.nbytes)
    yield measure.timed("PyTorch, x + y and relu", lambda: torch.relu(x + y), 5 * x.nbytes)


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(PROG, __doc__)
    elements = 2**27 if measure.GPU else 10000
    help_of_n = "elements (default: %(default)s)"
    parser.add_argument("--n", type=at_least(1), default=elements, help=help_of_n)
    block = measure.power_of_two(2**20)
    help_of_block = "of a program (default: %(default)s)"
    parser.add_argument("--block", type=block, default=1024, metavar="N", help=help_of_block)
    measure.add_output(parser)
    args = parser.parse_args(argv)

    sizes = args.n, args.block
    return measure.run(PROG, lambda: check(*sizes), lambda: measured(*sizes), args.output)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""RMSNorm with one program per row: check it, and time it beside V3's kernel, the library and the
plain formula.

Examples:
  python exercises/tiny_llama_v3/rms_norm.py --rows 1000 --dim 480
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from fusion_lab.cli import at_least, documented_parser

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton looks at it when it is imported
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import tiny_llama_v3 as v3
from exercises.tiny_llama_v3 import measure
from fusion_lab.accuracy import check_close

PROG = Path(__file__).name
EPS = 1e-5


@triton.jit
def rms_norm_kernel(X, WEIGHT, OUT, eps: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # a tensor may have more than 2^31 elements
    channel = tl.arange(0, BLOCK_C)
    inside = channel < C
    x = tl.load(X + row * C + channel, mask=inside, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 0) / C + eps)
    weight = tl.load(WEIGHT + channel, mask=inside)
    tl.store(OUT + row * C + channel, x * rstd * weight, mask=inside)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, C] / rms(x) * weight [C]."""
    rows, dim = x.shape
    out = torch.empty_like(x)
    width = triton.next_power_of_2(dim)
    rms_norm_kernel[(rows,)](x, weight, out, EPS, C=dim, BLOCK_C=width)
    return out


def inputs(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """x and weight, in float32."""
    torch.manual_seed(0)
    weight = torch.rand(dim, device=measure.DEVICE) + 0.5
    return torch.randn(rows, dim, device=measure.DEVICE), weight


def check(rows: int, dim: int) -> str:
    """What a good kernel says of itself; ToolError if it is not right."""
    x, weight = inputs(rows, dim)
    expected = F.rms_norm(x.double(), (dim,), weight.double(), EPS)
    errors = [
        check_close(rms_norm(x, weight), expected, f"the norm of {dim} channels"),
        check_close(F.rms_norm(x, (dim,), weight, EPS), expected, "the library's norm"),
    ]
    ours, library = (f"{error:.1e}" for error in errors)
    return f"{rows} rows of {dim} channels: right; largest error {ours}, the library's {library}"


def measured(rows: int, dim: int) -> Iterator[dict]:
    """Rows of the table. Of PyTorch's operators the bytes are counted."""
    x, weight = inputs(rows, dim)
    formula = v3.RMSNorm(dim, EPS, v3.Fusions(triton_rms_norm=False)).to(measure.DEVICE)  # V1's
    with torch.no_grad():
        yield measure.timed("rms_norm_kernel", lambda: rms_norm(x, weight), 2 * x.nbytes)
        yield measure.timed(
            "V3", lambda: v3.rms_norm_forward(x, None, weight, EPS, x.dtype), 2 * x.nbytes
        )
        for what, function in (
            ("F.rms_norm", lambda: F.rms_norm(x, (dim,), weight, EPS)),
            ("the formula, as in V1", lambda: formula(x)),
        ):
            yield measure.timed(what, function, measure.bytes_of(function))


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(PROG, __doc__)
    default = "(default: %(default)s)"
    rows = 65536 if measure.GPU else 40
    parser.add_argument("--rows", type=at_least(1), default=rows, metavar="N", help=default)
    dim = 1024 if measure.GPU else 96
    parser.add_argument("--dim", type=at_least(1), default=dim, metavar="C", help=default)
    measure.add_output(parser)
    args = parser.parse_args(argv)

    sizes = args.rows, args.dim
    return measure.run(PROG, lambda: check(*sizes), lambda: measured(*sizes), args.output)


if __name__ == "__main__":
    sys.exit(main())

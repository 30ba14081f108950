#!/usr/bin/env python3
"""Puzzle 6: the backward pass of RMSNorm.

With norm = x * rstd of puzzle 5, and `grad` the gradient of its output:

    g[r, c]         = grad[r, c] * weight[c]
    grad_x[r, c]    = rstd[r] * (g[r, c] - norm[r, c] * mean over j of (g[r, j] * norm[r, j]))
    grad_weight[c]  = sum over r of grad[r, c] * norm[r, c]

The last line is a sum over rows, which belong to many programs. If all added to one vector, they
would have to wait for each other. So each program has ROWS rows, goes over them in a *loop*,
keeps its own *partial sum* in a block, and writes it once, to a row of its own:

    x [rows, C]                 program 0: rows 0 to 15
                                program 1: rows 16 to 31
                                program 2: rows 32 to ...            grid = (3,)
    parts [programs, C]         program 0 | program 1 | program 2    one row each

    tl.zeros((BLOCK,), tl.float32)      the block that a sum begins with
    for i in range(ROWS):               as in Python
    a & b                               both: an element needs a row and a column

`parts.sum(0)` is the gradient of the weight; that is one small kernel more, and PyTorch has it.
rstd is cheaper to compute again than to read.

Run: python exercises/puzzles/puzzle_06_rms_norm_backward.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-5
ROWS = 16  # of a program


@triton.jit
def rms_norm_backward_kernel(
    X, WEIGHT, GRAD, GRAD_X, PARTS, rows, C, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # your code
    pass


def rms_norm_backward(
    x: Tensor, weight: Tensor, grad: Tensor, grad_x: Tensor, parts: Tensor
) -> None:
    """x, grad, grad_x [rows, C], weight [C], parts [programs, C]."""
    rows, C = x.shape
    grid = (triton.cdiv(rows, ROWS),)
    block = triton.next_power_of_2(C)
    rms_norm_backward_kernel[grid](x, weight, grad, grad_x, parts, rows, C, EPS, ROWS, block)


# --- what the checker needs: no need to read on


def inputs(dtype: torch.dtype, scale: float, rows: int, C: int) -> dict[str, Tensor]:
    x, grad = scale * normal(dtype, rows, C), normal(dtype, rows, C)
    return {"x": x, "weight": normal(dtype, C), "grad": grad}


def reference(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Tensor]:
    rstd = (x.square().mean(1, keepdim=True) + EPS).rsqrt()
    norm, g = x * rstd, grad * weight
    grad_x = rstd * (g - norm * (g * norm).mean(1, keepdim=True))
    of_weight = F.pad(grad * norm, (0, 0, 0, -len(x) % ROWS))
    return {"grad_x": grad_x, "parts": of_weight.view(-1, ROWS, x.shape[1]).sum(1)}


def pytorch(x: Tensor, weight: Tensor, grad: Tensor):
    """The operator that autograd calls."""
    _, rstd = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, EPS)
    backward, wanted = torch.ops.aten._fused_rms_norm_backward, [True, True]
    return lambda: backward(grad, x, weight.shape, rstd, weight, wanted)


PUZZLE = Puzzle(
    launch=rms_norm_backward,
    inputs=inputs,
    reference=reference,
    even={"rows": 32, "C": 16},
    odd=({"rows": 21, "C": 13},),
    scales=(10.0, 1e-3),
    blocks={},
    large={"rows": 2**16, "C": 1024},
    pytorch=pytorch,
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

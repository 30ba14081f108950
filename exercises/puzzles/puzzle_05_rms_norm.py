#!/usr/bin/env python3
"""Puzzle 5: RMSNorm, in float32 and in float16.

    out[r, c] = x[r, c] * rstd[r] * weight[c],    rstd[r] = 1 / sqrt(mean over c of x[r, c]^2 + eps)

    x [3, 5]             0 1 2 3 4 | 5 6 7 8 9 | 10 11 12 13 14
    owner                program 0 | program 1 |   program 2          grid = (3,)
    weight [5]           all programs read all of it

Half of a model's bytes are saved by a *dtype* of 16 bits. But float16 ends at 65504: the square
of 300 is inf. And each result is rounded to three digits. So kernels read and write 16 bits, and
compute in 32:

    tl.load(...).to(tl.float32)     rounds nothing
    tl.store(...)                   rounds to the dtype of the tensor by itself

The mean is over C channels, not over BLOCK of them.

Run: python exercises/puzzles/puzzle_05_rms_norm.py
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


@triton.jit
def rms_norm_kernel(X, WEIGHT, OUT, C, eps, BLOCK: tl.constexpr):
    # your code; tl.sqrt(B) is the square root
    pass


def rms_norm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """x, out [rows, C], weight [C]."""
    rows, C = x.shape
    rms_norm_kernel[(rows,)](x, weight, out, C, EPS, BLOCK=triton.next_power_of_2(C))


# --- what the checker needs: no need to read on


def inputs(dtype: torch.dtype, scale: float, rows: int, C: int) -> dict[str, Tensor]:
    return {"x": scale * normal(dtype, rows, C), "weight": normal(dtype, C)}


PUZZLE = Puzzle(
    launch=rms_norm,
    inputs=inputs,
    reference=lambda x, weight: {"out": F.rms_norm(x, weight.shape, weight, EPS)},
    even={"rows": 4, "C": 16},
    odd=({"rows": 3, "C": 13},),
    scales=(10.0, 1e-3, 300.0),
    blocks={},
    large={"rows": 2**16, "C": 1024},
    dtypes=(torch.float32, torch.float16),
    pytorch=lambda x, weight: lambda: F.rms_norm(x, weight.shape, weight, EPS),
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

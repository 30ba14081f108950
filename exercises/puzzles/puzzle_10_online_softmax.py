#!/usr/bin/env python3
"""Puzzle 10: softmax of rows that are longer than a block. The result is that of puzzle 4.

    x [2, 21]   row 0   block 0: 0 to 7 | block 1: 8 to 15 | block 2: 16 to 20      program 0
                row 1   block 0         | block 1          | block 2                program 1

Maximum first, then the sum, then the result: that reads the row three times. The *online softmax*
needs two. It keeps the maximum m and the sum s of what it has seen. With a block b of the row:

    new = max(m, max over b)
    s   = s * exp(m - new) + sum over b of exp(b - new)
    m   = new

s was a sum of exp(x - m). If the maximum grows, exp(m - new) turns it into a sum of
exp(x - new): this factor *rescales* what has been added up. Begin with m = -inf and s = 0.

A second loop reads the row again and writes exp(x - m) / s. Puzzle 11 does without it.

Run: python exercises/puzzles/puzzle_10_online_softmax.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def online_softmax_kernel(X, OUT, C, BLOCK: tl.constexpr):
    # your code; tl.maximum(m, tl.max(B, 0)) is the new maximum
    pass


def online_softmax(x: Tensor, out: Tensor, BLOCK: int = 4096) -> None:
    """x, out [rows, C]."""
    rows, C = x.shape
    online_softmax_kernel[(rows,)](x, out, C, BLOCK=BLOCK, num_warps=8)


# --- what the checker needs: no need to read on


def inputs(dtype: torch.dtype, scale: float, rows: int, C: int) -> dict[str, Tensor]:
    """Large ones have rows about -300 as well as 300: exp of all is 0, or inf, where no maximum is
    subtracted. The first row falls, and the last one rises."""
    about, slope = torch.linspace(-6, 6, rows)[:, None], torch.linspace(1, -1, rows)[:, None]
    x = normal(dtype, rows, C) + about + slope * torch.linspace(2, -2, C)
    return {"x": scale * x}


PUZZLE = Puzzle(
    launch=online_softmax,
    inputs=inputs,
    reference=lambda x: {"out": x.softmax(1)},
    even={"rows": 2, "C": 32},
    odd=({"rows": 2, "C": 21}, {"rows": 1, "C": 5}),
    scales=(1.0, 50.0),
    blocks={"BLOCK": 8},
    large={"rows": 2**11, "C": 2**15},
    pytorch=lambda x: lambda: x.softmax(1),
    loads=2,
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

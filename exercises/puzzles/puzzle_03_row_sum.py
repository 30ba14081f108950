#!/usr/bin/env python3
"""Puzzle 3: the sum of each row. out[r] = sum over c of x[r, c]

In memory a matrix is one long vector, row after row. Element [r, c] of a matrix with C columns
stands r * C + c places after the first. C is the *stride* of the rows.

    x [3, 5] in memory   0 1 2 3 4 | 5 6 7 8 9 | 10 11 12 13 14
    owner                program 0 | program 1 |   program 2          grid = (3,)

One program has one row, and its block is the whole row: BLOCK is the next power of two, here 8.
A *reduction* makes one number of a block:

    tl.sum(B, 0)                           the sum along axis 0
    tl.load(ADDRESSES, mask=M, other=0.0)  where M is false the number is 0.0

A sum takes all numbers of a block, also those that the mask leaves out. So they need a value that
changes nothing: that is `other`.

Run: python exercises/puzzles/puzzle_03_row_sum.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def row_sum_kernel(X, OUT, C, BLOCK: tl.constexpr):
    # your code
    pass


def row_sum(x: Tensor, out: Tensor) -> None:
    """x [rows, C], out [rows]."""
    rows, C = x.shape
    row_sum_kernel[(rows,)](x, out, C, BLOCK=triton.next_power_of_2(C))


# --- what the checker needs: no need to read on

PUZZLE = Puzzle(
    launch=row_sum,
    inputs=lambda dtype, scale, rows, C: {"x": normal(dtype, rows, C)},
    reference=lambda x: {"out": x.sum(1)},
    even={"rows": 4, "C": 16},
    odd=({"rows": 3, "C": 13}, {"rows": 1, "C": 33}),
    blocks={},
    large={"rows": 2**15, "C": 4096},
    pytorch=lambda x: lambda: x.sum(1),
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

#!/usr/bin/env python3
"""Puzzle 2: add vectors of any length. out[i] = x[i] + y[i]

With 13 elements and blocks of 8, the second program has three addresses too many:

    element   0  1  2  3  4  5  6  7 | 8  9 10 11 12  -  -  -
    owner           program 0        |        program 1            BLOCK = 8, grid = (2,)
    mask      1  1  1  1  1  1  1  1 | 1  1  1  1  1  0  0  0

What stands behind the end belongs to another tensor. Nothing stops a kernel from reading it, or
from writing it. A *mask* does: a block of true and false, one for each address.

    at < n                          such a block, from a block of numbers
    tl.load(ADDRESSES, mask=M)      where M is false nothing is read, and the number is undefined
    tl.store(ADDRESSES, B, mask=M)  where M is false nothing is written

Run: python exercises/puzzles/puzzle_02_mask.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mask_kernel(X, Y, OUT, n, BLOCK: tl.constexpr):
    # your code: puzzle 1 with a mask
    pass


def add(x: Tensor, y: Tensor, out: Tensor, BLOCK: int = 1024) -> None:
    """x, y, out [n]."""
    grid = (triton.cdiv(len(x), BLOCK),)  # divided, and rounded up
    mask_kernel[grid](x, y, out, len(x), BLOCK=BLOCK)


# --- what the checker needs: no need to read on

PUZZLE = Puzzle(
    launch=add,
    inputs=lambda dtype, scale, n: {"x": normal(dtype, n), "y": normal(dtype, n)},
    reference=lambda x, y: {"out": x + y},
    even={"n": 16},
    odd=({"n": 13}, {"n": 1}),
    blocks={"BLOCK": 8},
    large={"n": 2**26 - 1},
    pytorch=lambda x, y: lambda: x + y,
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

#!/usr/bin/env python3
"""Puzzle 1: add two vectors. out[i] = x[i] + y[i]

A *kernel* is a function for the GPU. It is started many times at once, and each start is a
*program*. All programs run the same code on different numbers; `tl.program_id(0)` says which
program this one is: 0, 1, 2, ... The *grid* is how many there are. They run in any order.

A program works on a *block*, which is many numbers at once: here BLOCK of them.

    element   0  1  2  3  4  5  6  7 | 8  9 10 11 12 13 14 15
    owner           program 0        |        program 1            BLOCK = 8, grid = (2,)

The kernel gets no tensors but *pointers*: X is the address of x[0]. You compute with them:

    X + 5                   the address of x[5]
    tl.arange(0, BLOCK)     the block 0, 1, ..., BLOCK - 1
    X + tl.arange(0, BLOCK) a block of addresses
    tl.load(ADDRESSES)      the block of numbers that stand there
    tl.store(ADDRESSES, B)  writes the block B there

`BLOCK: tl.constexpr` is a number that is known when the kernel is compiled. The size of a block
must be such a number, and a power of two. Here x has a multiple of BLOCK elements.

Run: python exercises/puzzles/puzzle_01_add.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_kernel(X, Y, OUT, BLOCK: tl.constexpr):
    # your code, in place of `pass`: which elements are mine? load, add, store
    pass


def add(x: Tensor, y: Tensor, out: Tensor, BLOCK: int = 1024) -> None:
    """x, y, out [n], n a multiple of BLOCK."""
    grid = (len(x) // BLOCK,)
    add_kernel[grid](x, y, out, BLOCK=BLOCK)


# --- what the checker needs: no need to read on

PUZZLE = Puzzle(
    launch=add,
    inputs=lambda dtype, scale, n: {"x": normal(dtype, n), "y": normal(dtype, n)},
    reference=lambda x, y: {"out": x + y},
    even={"n": 16},
    odd=(),
    blocks={"BLOCK": 8},
    large={"n": 2**26},
    pytorch=lambda x, y: lambda: x + y,
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

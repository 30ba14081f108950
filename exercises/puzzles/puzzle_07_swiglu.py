#!/usr/bin/env python3
"""Puzzle 7: SwiGLU. out[r, c] = silu(gate[r, c]) * up[r, c],    silu(a) = a * sigmoid(a)

A GEMM has left gate and up side by side in x [rows, 2 * C]: the row of x is twice as long as the
row of out.

    x    gate gate gate gate gate | up up up up up
    x    gate gate gate gate gate | up up up up up        out [rows, C]

This time a program has a *tile*: a block with two axes, some rows and some columns.

    columns      0 to 7        8 to 12
    rows 0 to 3  program (0, 0)   program (0, 1)
    rows 4, 5    program (1, 0)   program (1, 1)      BLOCK_R = 4, BLOCK_C = 8, grid = (2, 2)

    tl.program_id(1)                    the second number of the program
    row[:, None]                        a block of one column
    column[None, :]                     a block of one row
    row[:, None] * C + column[None, :]  *broadcasting*, as in PyTorch: a tile of places

Run: python exercises/puzzles/puzzle_07_swiglu.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def swiglu_kernel(X, OUT, rows, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    # your code; tl.sigmoid(B) is there
    pass


def swiglu(x: Tensor, out: Tensor, BLOCK_R: int = 4, BLOCK_C: int = 512) -> None:
    """x [rows, 2 * C], out [rows, C]."""
    rows, C = out.shape
    grid = (triton.cdiv(rows, BLOCK_R), triton.cdiv(C, BLOCK_C))
    swiglu_kernel[grid](x, out, rows, C, BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C)


# --- what the checker needs: no need to read on


def reference(x: Tensor) -> dict[str, Tensor]:
    gate, up = x.chunk(2, 1)
    return {"out": F.silu(gate) * up}


PUZZLE = Puzzle(
    launch=swiglu,
    inputs=lambda dtype, scale, rows, C: {"x": scale * normal(dtype, rows, 2 * C)},
    reference=reference,
    even={"rows": 8, "C": 24},
    odd=({"rows": 6, "C": 13}, {"rows": 1, "C": 3}),
    scales=(1.0, 100.0),
    blocks={"BLOCK_R": 4, "BLOCK_C": 8},
    large={"rows": 2**14, "C": 4096},
    pytorch=lambda x: lambda: reference(x),
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

#!/usr/bin/env python3
"""Puzzle 8: a matrix product, tile by tile. c[m, n] = sum over k of a[m, k] * b[k, n]

A program owns a tile of c. It goes along k, and for each step loads a tile of a and a tile of b:

                       b   k 0   | . X |
                           k 32  | . X |
    a                  c
    rows 0 to 15   . .           | . . |
    rows 16 to 31  X X           | . P |      P is program (1, 1), X what it reads

    tl.dot(A, B, SUM)   SUM + A @ B, on the GPU's units for matrices (*tensor cores*)

a, b and c are float16, SUM is a tile of float32: begin with tl.zeros((BLOCK_M, BLOCK_N),
tl.float32). A sum in float16 would lose a digit at each step.

A product does 2 M N K operations on M K + K N + M N numbers, so its speed is counted in TFLOP/s.
Here M, N and K are multiples of the blocks, and no mask is needed.

Run: python exercises/puzzles/puzzle_08_matmul.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def matmul_kernel(
    A, B, C, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # your code; range(0, K, BLOCK_K) goes in steps of a block
    pass


def matmul(a: Tensor, b: Tensor, c: Tensor, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64) -> None:
    """a [M, K], b [K, N], c [M, N]."""
    (M, K), N = a.shape, b.shape[1]
    grid = (M // BLOCK_M, N // BLOCK_N)
    matmul_kernel[grid](a, b, c, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, num_warps=8)


# --- what the checker needs: no need to read on

PUZZLE = Puzzle(
    launch=matmul,
    inputs=lambda dtype, scale, M, N, K: {"a": normal(dtype, M, K), "b": normal(dtype, K, N)},
    reference=lambda a, b: {"c": a @ b},
    even={"M": 32, "N": 48, "K": 64},
    odd=(),
    blocks={"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32},
    large={"M": 4096, "N": 4096, "K": 4096},
    dtypes=(torch.float16,),
    tolerance=5e-5,  # what tensor cores add up
    flops=lambda M, N, K: 2 * M * N * K,
    pytorch=lambda a, b: lambda: a @ b,
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

#!/usr/bin/env python3
"""Puzzle 9: a linear layer. c[m, n] = relu(sum over k of a[m, k] * b[k, n] + bias[n])

What is done to a tile between the last tl.dot and the tl.store is the *epilogue*. The tile is
still in the registers, so bias and ReLU cost no reading and no writing of c. PyTorch's ReLU
reads c once more and writes it once more.

    columns         0 to 15         16 to 31        32 to 36
    rows 0 to 15    program (0, 0)  program (0, 1)  program (0, 2)
    rows 16 to 20   program (1, 0)  program (1, 1)  program (1, 2)      each reads its part of bias

All sizes are allowed, so three masks are needed: for the tile of a, of b and of c. Along k, what
a mask leaves out must add nothing to the product.

    tl.maximum(A, B)    the larger one, element by element

Run: python exercises/puzzles/puzzle_09_matmul_bias_relu.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def linear_relu_kernel(
    A, B, BIAS, C, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # your code: puzzle 8 with masks and an epilogue
    pass


def linear_relu(
    a: Tensor, b: Tensor, bias: Tensor, c: Tensor, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64
) -> None:
    """a [M, K], b [K, N], bias [N], c [M, N]."""
    (M, K), N = a.shape, b.shape[1]
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
    linear_relu_kernel[grid](a, b, bias, c, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, num_warps=8)


# --- what the checker needs: no need to read on


def inputs(dtype: torch.dtype, scale: float, M: int, N: int, K: int) -> dict[str, Tensor]:
    return {"a": normal(dtype, M, K), "b": normal(dtype, K, N), "bias": normal(dtype, N)}


PUZZLE = Puzzle(
    launch=linear_relu,
    inputs=inputs,
    reference=lambda a, b, bias: {"c": torch.relu(a @ b + bias)},
    even={"M": 16, "N": 32, "K": 64},
    odd=({"M": 21, "N": 37, "K": 51},),
    blocks={"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32},
    large={"M": 4096, "N": 4096, "K": 4096},
    dtypes=(torch.float16,),
    tolerance=5e-5,  # what tensor cores add up
    flops=lambda M, N, K: 2 * M * N * K,
    pytorch=lambda a, b, bias: lambda: torch.relu(torch.addmm(bias, a, b)),
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

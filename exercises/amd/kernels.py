#!/usr/bin/env python3
"""Four kernels to be seen as an AMD GPU gets them: relu(x + y), the sum of each row, a matrix
product and a transposition. Run by itself, each is compared with PyTorch, in Triton's interpreter.

Example:
  python -m fusion_lab.amd step exercises/amd/kernels.py add_relu_kernel
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import triton
import triton.language as tl


@triton.jit
def add_relu_kernel(X, Y, OUT, n, BLOCK: tl.constexpr):
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = mine < n
    x = tl.load(X + mine, mask=inside)
    y = tl.load(Y + mine, mask=inside)
    tl.store(OUT + mine, tl.maximum(x + y, 0.0), mask=inside)


@triton.jit
def row_sum_kernel(X, OUT, C, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(X + row * C + column, mask=column < C, other=0.0)
    tl.store(OUT + row, tl.sum(x, 0))


@triton.jit
def product_kernel(A, B, OUT, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(A + row * N + column)
    b = tl.load(B + row * N + column)
    tl.store(OUT + row * N + column, tl.dot(a, b, input_precision="ieee"))


@triton.jit
def transpose_kernel(X, OUT, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(X + row * N + column)
    tl.store(OUT + row * N + column, tl.trans(x))


def agree(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise AssertionError where a kernel differs from PyTorch."""
    torch.testing.assert_close(found, expected)
    print(f"{name}: right")


if __name__ == "__main__":
    x, y, out = torch.randn(3, 100)
    add_relu_kernel[(2,)](x, y, out, 100, BLOCK=64, num_warps=1)
    agree("add_relu_kernel", out, (x + y).relu())
    rows, sums = torch.arange(400.0).view(4, 100), torch.empty(4)
    row_sum_kernel[(4,)](rows, sums, 100, BLOCK=128, num_warps=2)
    agree("row_sum_kernel", sums, rows.sum(1))
    numbered = 100.0 * torch.arange(16)[:, None] + torch.arange(16)  # 305 is row 3, column 5
    identity, out = torch.eye(16), torch.empty(16, 16)
    product_kernel[(1,)](numbered, identity, out, N=16, num_warps=1)
    agree("product_kernel", out, numbered)
    x, out = torch.randn(2, 64, 64)
    transpose_kernel[(1,)](x, out, N=64, num_warps=4)
    agree("transpose_kernel", out, x.T)

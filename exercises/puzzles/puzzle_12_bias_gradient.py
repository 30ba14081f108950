#!/usr/bin/env python3
"""Puzzle 12: the gradient of the pair bias of puzzle 11, without atomic additions.

`grad` is the gradient of out, and delta[r, i] = sum over d of grad[r, i, d] * out[r, i, d]:

    P[r, i, j]      = exp(S[r, i, j] - log_sum_exp[r, i]),    S as in puzzle 11
    dP[r, i, j]     = sum over d of grad[r, i, d] * v[r, j, d]
    dS[r, i, j]     = P[r, i, j] * (dP[r, i, j] - delta[r, i])
    grad_bias[i, j] = sum over r of dS[r, i, j]

The forward program owned queries of one row r. If the backward program did so, too, all rows
would add to the same grad_bias: with *atomic additions*, which wait for each other, in an order
that changes from run to run, and so would the last bits. Turn it round: let a program *own the
result*. It owns a tile of grad_bias, and goes over all rows r in a loop:

                        keys  0 to 15   |   16 to 20
    queries 0 to 15     program (0, 0)  |  program (0, 1)       each: for r in range(rows)
    queries 16 to 20    program (1, 0)  |  program (1, 1)

Nobody else writes there, so the sum stays in registers and is stored once. P is computed again
from q, k and log_sum_exp, because that is cheaper than to keep it.

Run: python exercises/puzzles/puzzle_12_bias_gradient.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def bias_gradient_kernel(
    Q, K, V, BIAS, GRAD, LOG_SUM_EXP, DELTA, GRAD_BIAS, rows, n, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # your code
    pass


def bias_gradient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, grad: Tensor, log_sum_exp: Tensor,
    delta: Tensor, grad_bias: Tensor, BLOCK_M: int = 64, BLOCK_N: int = 64,
) -> None:  # fmt: skip
    """q, k, v, grad [rows, n, D], bias, grad_bias [n, n], log_sum_exp, delta [rows, n]."""
    rows, n, D = q.shape
    grid = (triton.cdiv(n, BLOCK_M), triton.cdiv(n, BLOCK_N))
    bias_gradient_kernel[grid](
        q, k, v, bias, grad, log_sum_exp, delta, grad_bias, rows, n, D**-0.5,
        D=D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip


# --- what the checker needs: no need to read on


def inputs(dtype: torch.dtype, scale: float, rows: int, n: int, D: int) -> dict[str, Tensor]:
    q, k, v, grad = (normal(dtype, rows, n, D) for _ in range(4))
    bias = normal(dtype, n, n)
    scores = q.double() @ k.double().mT * D**-0.5 + bias.double()
    out = scores.softmax(-1) @ v.double()
    delta, log_sum_exp = (grad.double() * out).sum(-1).float(), scores.logsumexp(-1).float()
    return {
        "q": q, "k": k, "v": v, "bias": bias, "grad": grad,
        "log_sum_exp": log_sum_exp, "delta": delta,
    }  # fmt: skip


def score_gradients(q, k, v, bias, grad, log_sum_exp, delta) -> Tensor:
    """dS [rows, n, n]."""
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return (scores - log_sum_exp[..., None]).exp() * (grad @ v.mT - delta[..., None])


PUZZLE = Puzzle(
    launch=bias_gradient,
    inputs=inputs,
    reference=lambda *tensors: {"grad_bias": score_gradients(*tensors).sum(0)},
    even={"rows": 2, "n": 32, "D": 16},
    odd=({"rows": 3, "n": 21, "D": 16},),
    blocks={"BLOCK_M": 16, "BLOCK_N": 16},
    large={"rows": 64, "n": 1024, "D": 64},
    dtypes=(torch.float16,),
    float32=("grad_bias",),
    tolerance=5e-5,  # what tensor cores add up
    flops=lambda rows, n, D: 4 * rows * n * n * D,
    pytorch=lambda *tensors: lambda: score_gradients(*tensors).sum(0),
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

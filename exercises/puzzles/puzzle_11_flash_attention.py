#!/usr/bin/env python3
"""Puzzle 11: flash attention, forward, with a pair bias as in TinyOpenFold's row attention.

    S[r, i, j]   = scale * (sum over d of q[r, i, d] * k[r, j, d]) + bias[i, j]
    P[r, i, j]   = softmax of S over j
    out[r, i, d] = sum over j of P[r, i, j] * v[r, j, d]
    log_sum_exp[r, i] = log(sum over j of exp(S[r, i, j])),    which puzzle 12 needs

A program owns BLOCK_M queries of one row r, and goes over the keys in blocks of BLOCK_N:

                       keys  0 to 15 | 16 to 20
    queries 0 to 15              S   |    S         program (0, r)
    queries 16 to 20             S   |    S         program (1, r)

S and P never reach the memory: this is the whole point of *flash attention*. It is the online
softmax of puzzle 10 with tiles: a maximum m and a sum s for each query. The output is a sum, too,
so it is rescaled as s is, and divided by s at the end. With rescale = exp(m - new):

    s   = s * rescale + sum over j of exp(S - new)
    out = out * rescale + exp(S - new) @ V

    tl.trans(K)             K transposed
    tl.where(M, A, B)       A where M is true, else B; keys that do not exist need S = -inf
    P.to(tl.float16)        tl.dot wants both sides in the same dtype

Run: python exercises/puzzles/puzzle_11_flash_attention.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def flash_attention_kernel(
    Q, K, V, BIAS, OUT, LOG_SUM_EXP, n, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # your code; row r of q, k, v and out begins at r * n * D
    pass


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, log_sum_exp: Tensor,
    BLOCK_M: int = 128, BLOCK_N: int = 64,
) -> None:  # fmt: skip
    """q, k, v, out [rows, n, D], bias [n, n], log_sum_exp [rows, n]; D a power of two from 16."""
    rows, n, D = q.shape
    grid = (triton.cdiv(n, BLOCK_M), rows)
    flash_attention_kernel[grid](
        q, k, v, bias, out, log_sum_exp, n, D**-0.5, D=D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N
    )


# --- what the checker needs: no need to read on


def inputs(dtype: torch.dtype, scale: float, rows: int, n: int, D: int) -> dict[str, Tensor]:
    """Where they are large, scores of a query are about -300 or 300, and v adds up to more than
    float16 has."""
    q, k, v = (normal(dtype, rows, n, D) for _ in range(3))
    bias = normal(dtype, n, n)
    if scale > 1:
        bias = bias + scale * torch.linspace(-3, 3, n).to(dtype)[:, None]
        v = 30 * scale * (v + 10)
    return {"q": q, "k": k, "v": v, "bias": bias}


def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> dict[str, Tensor]:
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return {"out": scores.softmax(-1) @ v, "log_sum_exp": scores.logsumexp(-1)}


def pytorch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor):
    heads = [tensor[None] for tensor in (q, k, v)]
    return lambda: F.scaled_dot_product_attention(*heads, attn_mask=bias[None, None])


PUZZLE = Puzzle(
    launch=flash_attention,
    inputs=inputs,
    reference=reference,
    even={"rows": 1, "n": 32, "D": 16},
    odd=({"rows": 2, "n": 21, "D": 16},),
    scales=(1.0, 100.0),
    blocks={"BLOCK_M": 16, "BLOCK_N": 16},
    large={"rows": 64, "n": 1024, "D": 64},
    dtypes=(torch.float16,),
    float32=("log_sum_exp",),
    flops=lambda rows, n, D: 4 * rows * n * n * D,
    tolerance=1e-3,  # P is rounded to float16
    pytorch=pytorch,
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

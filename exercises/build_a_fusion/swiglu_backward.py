#!/usr/bin/env python3
"""The backward pass of SwiGLU, in one kernel.

x [rows, 2 * C] holds gate and up side by side, `grad` [rows, C] is the gradient of out. With
s = sigmoid(gate), of which the derivative is s * (1 - s):

    out       = gate * s * up
    grad_gate = grad * up * (s + gate * s * (1 - s))
    grad_up   = grad * gate * s

    x, grad_x    gate gate gate | up up up      two places in a row of 2 * C, as in puzzle 7
    grad         grad grad grad                 one place in a row of C

s is not kept by the forward pass. It is computed again from gate, which is read in any case.

Run: python exercises/build_a_fusion/swiglu_backward.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.func import vjp


@triton.jit
def swiglu_backward_kernel(
    X, GRAD, GRAD_X, rows, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # your code: the places are those of puzzle 7
    pass


def swiglu_backward(
    x: Tensor, grad: Tensor, grad_x: Tensor, BLOCK_R: int = 4, BLOCK_C: int = 512
) -> None:
    """x, grad_x [rows, 2 * C], grad [rows, C]."""
    rows, C = grad.shape
    grid = (triton.cdiv(rows, BLOCK_R), triton.cdiv(C, BLOCK_C))
    swiglu_backward_kernel[grid](x, grad, grad_x, rows, C, BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C)


# --- what the checker needs: no need to read on


def inputs(dtype: torch.dtype, scale: float, rows: int, C: int) -> dict[str, Tensor]:
    return {"x": scale * normal(dtype, rows, 2 * C), "grad": normal(dtype, rows, C)}


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, 1)
    return F.silu(gate) * up


def pytorch(x: Tensor, grad: Tensor):
    """The operators that autograd calls, with silu(gate) kept."""
    gate, up = x.chunk(2, 1)
    silu = F.silu(gate)

    def backward():
        return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * silu), 1)

    return backward


PUZZLE = Puzzle(
    launch=swiglu_backward,
    inputs=inputs,
    reference=lambda x, grad: {"grad_x": vjp(swiglu, x)[1](grad)[0]},
    even={"rows": 8, "C": 24},
    odd=({"rows": 6, "C": 13}, {"rows": 1, "C": 3}),
    scales=(1.0, 100.0),
    blocks={"BLOCK_R": 4, "BLOCK_C": 8},
    large={"rows": 2**14, "C": 4096},
    pytorch=pytorch,
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

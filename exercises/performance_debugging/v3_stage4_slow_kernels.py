#!/usr/bin/env python3
"""TinyLlama V3, stage 4: a kernel of our own more, and the right loss, but at what speed?

Takes the arguments of tiny_llama_v3.py. What differs from it is below.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

import tiny_llama_v3 as v3

# from there, because without a GPU it chooses Triton's interpreter first
from tiny_llama_v3 import tl, triton

v3.SCRIPT, v3.__file__ = Path(__file__).stem, __file__  # its results bear this name


@triton.jit
def naive_matmul_kernel(X, WEIGHT, OUT, columns, D, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row, column = program // columns, program % columns  # one program, one element of the result
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * D + channel, mask=channel < D, other=0.0).to(tl.float32)
        total += x * tl.load(WEIGHT + column * D + channel, mask=channel < D, other=0.0).to(
            tl.float32
        )
    tl.store(OUT + program, tl.sum(total, 0))


@v3.operator
def naive_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D], weight [N, D] -> x @ weight.T [T, N]."""
    out = x.new_empty(len(x), len(weight))
    columns, dim = weight.shape
    v3.wrap_triton(naive_matmul_kernel)[(out.numel(),)](
        X=x, WEIGHT=weight, OUT=out, columns=columns, D=dim, BLOCK=128, num_warps=1
    )
    return out


class NaiveLinear(torch.autograd.Function):
    """x [T, D], weight [N, D] -> x @ weight.T [T, N].

    Its backward pass leaves the products to PyTorch.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return naive_matmul(x.contiguous(), weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class SwiGLU(v3.SwiGLU):
    """Gated MLP whose gate and up projection are our own kernel as well."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        if not (self.fusions.triton_swiglu and self.fusions.swiglu_fusion):
            return super().forward(x)
        gate_up = NaiveLinear.apply(x.flatten(0, 1), self.gate_up_proj.weight.to(x.dtype))
        return self.down_proj(v3.SwiGLUActivation.apply(gate_up.view(*x.shape[:2], -1)))


v3.SwiGLU = SwiGLU

if __name__ == "__main__":
    sys.exit(v3.main())

"""Residual, scale and dropout in one pass: out = x + scale * dropout(update), and its backward
pass. To be completed.

No mask is kept: forward and backward draw the same random numbers, from a seed and the position of
an element. x is [..., C] in float32, update [..., C] of any type, scale [C], seed an int64 tensor
[1], p the share that is dropped. What is kept is divided by 1 - p.
"""

# ruff: noqa: F841 (the tasks use these names)
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton looks at it when it is imported
import triton
import triton.language as tl
from torch import Tensor

from tiny_llama_v3 import sum_parts

TILE = 2048  # elements in a block of rows
PROGRAMS = 528  # that share the rows in the backward pass


@triton.jit
def kept_factor(SEED, row, p: tl.constexpr, BLOCK_C: tl.constexpr):
    """[rows, BLOCK_C]: 1 / (1 - p) where an element is kept, 0 where it is dropped.

    It knows nothing of the tile.
    """
    # Task 1. tl.rand(seed, numbers) gives a number from 0 to 1 for each of the numbers, int32 of
    # any shape. Give each element a number of its own, the same in every kernel: from `row` and
    # tl.arange(0, BLOCK_C), not from the program.


@triton.jit
def residual_dropout_forward_kernel(
    X, UPDATE, SCALE, SEED, OUT, rows, p: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (channel < C)[None, :]
    at = row[:, None] * C + channel[None, :]
    # Task 2. Load scale [BLOCK_C], x and update [ROWS, BLOCK_C], the update .to(tl.float32); store
    # the result.


@triton.jit
def residual_dropout_backward_kernel(
    GRAD, UPDATE, SCALE, SEED, GRAD_UPDATE, GRAD_SCALE, rows, p: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """GRAD_SCALE [PROGRAMS, C] are the sums over the rows of each program."""
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK_C)
    for start in range(program * ROWS, rows, PROGRAMS * ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (channel < C)[None, :]
        at = row[:, None] * C + channel[None, :]
        # Task 3. Store the gradient of the update. Task 4. Add to the gradient of scale, [ROWS,
        # BLOCK_C] in float32; begin it with tl.zeros before the loop.
    # Task 4. Sum it over ROWS, and store it in this program's row of GRAD_SCALE.


def options(x: Tensor, p: float) -> tuple[int, int, dict]:
    """Number of rows, of blocks of rows, and what a kernel is compiled for."""
    dim, width = x.shape[-1], max(4, triton.next_power_of_2(x.shape[-1]))
    rows, tile_rows = x.numel() // dim, max(1, TILE // width)
    sizes = {"p": p, "C": dim, "BLOCK_C": width, "ROWS": tile_rows, "num_warps": 4}
    return rows, triton.cdiv(rows, tile_rows), sizes


class ResidualDropout(torch.autograd.Function):
    """x + scale * dropout(update), [..., C]."""

    @staticmethod
    def forward(ctx, x: Tensor, update: Tensor, scale: Tensor, seed: Tensor, p: float) -> Tensor:
        raise NotImplementedError("Tasks 1 and 2; when they are done, take `raise` out of forward")
        x, update = x.contiguous(), update.contiguous()
        rows, programs, sizes = options(x, p)
        out = torch.empty_like(x)
        residual_dropout_forward_kernel[(programs,)](x, update, scale, seed, out, rows, **sizes)
        ctx.save_for_backward(update, scale, seed)
        ctx.p = p
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise NotImplementedError("Tasks 3 and 4; when they are done, take `raise` out of backward")
        update, scale, seed = ctx.saved_tensors
        grad = grad.contiguous()
        rows, programs, sizes = options(grad, ctx.p)
        programs = min(programs, PROGRAMS)
        grad_update = torch.empty_like(update)
        parts = torch.empty(programs, len(scale), device=grad.device)
        residual_dropout_backward_kernel[(programs,)](
            grad, update, scale, seed, grad_update, parts, rows, PROGRAMS=programs, **sizes
        )
        return grad, grad_update, sum_parts(parts, scale.dtype), None, None


def residual_dropout(x: Tensor, update: Tensor, scale: Tensor, seed: Tensor, p: float) -> Tensor:
    """x + scale * dropout(update, p), [..., C] in float32."""
    return ResidualDropout.apply(x, update, scale, seed, p)

"""Residual, scale and dropout in one pass: out = x + scale * dropout(update), and its backward
pass.

No mask is kept: forward and backward draw the same random numbers, from a seed and the position of
an element. x is [..., C] in float32, update [..., C] of any type, scale [C], seed an int64 tensor
[1], p the share that is dropped. What is kept is divided by 1 - p.
"""

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
FOUR = False  # four random numbers from each counter, exercise 3


@triton.jit
def kept_factor(SEED, row, p: tl.constexpr, BLOCK_C: tl.constexpr, FOUR: tl.constexpr):
    """[rows, BLOCK_C]: 1 / (1 - p) where an element is kept, 0 where it is dropped.

    It knows nothing of the tile.
    """
    seed = tl.load(SEED)
    if FOUR:  # the generator makes four numbers in any case
        counter = row.to(tl.int32)[:, None] * (BLOCK_C // 4) + tl.arange(0, BLOCK_C // 4)[None, :]
        a, b, c, d = tl.rand4x(seed, counter)
        random = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    else:
        random = tl.rand(seed, row.to(tl.int32)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :])
    return tl.where(random >= p, 1 / (1 - p), 0.0)


@triton.jit
def residual_dropout_forward_kernel(
    X, UPDATE, SCALE, SEED, OUT, rows, p: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, FOUR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (channel < C)[None, :]
    at = row[:, None] * C + channel[None, :]
    scale = tl.load(SCALE + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    x = tl.load(X + at, mask=inside, other=0.0)
    update = tl.load(UPDATE + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + at, x + scale * update * kept_factor(SEED, row, p, BLOCK_C, FOUR), mask=inside)


@triton.jit
def residual_dropout_backward_kernel(
    GRAD, UPDATE, SCALE, SEED, GRAD_UPDATE, GRAD_SCALE, rows, p: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, FOUR: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """GRAD_SCALE [PROGRAMS, C] are the sums over the rows of each program."""
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK_C)
    scale = tl.load(SCALE + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    grad_scale = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in range(program * ROWS, rows, PROGRAMS * ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (channel < C)[None, :]
        at = row[:, None] * C + channel[None, :]
        grad = tl.load(GRAD + at, mask=inside, other=0.0) * kept_factor(SEED, row, p, BLOCK_C, FOUR)
        grad_scale += grad * tl.load(UPDATE + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(GRAD_UPDATE + at, grad * scale, mask=inside)
    tl.store(GRAD_SCALE + program * C + channel, tl.sum(grad_scale, 0), mask=channel < C)


def options(x: Tensor, p: float) -> tuple[int, int, dict]:
    """Number of rows, of blocks of rows, and what a kernel is compiled for."""
    dim, width = x.shape[-1], max(4, triton.next_power_of_2(x.shape[-1]))
    rows, tile_rows = x.numel() // dim, max(1, TILE // width)
    sizes = {"p": p, "C": dim, "BLOCK_C": width, "ROWS": tile_rows, "FOUR": FOUR, "num_warps": 4}
    return rows, triton.cdiv(rows, tile_rows), sizes


class ResidualDropout(torch.autograd.Function):
    """x + scale * dropout(update), [..., C]."""

    @staticmethod
    def forward(ctx, x: Tensor, update: Tensor, scale: Tensor, seed: Tensor, p: float) -> Tensor:
        x, update = x.contiguous(), update.contiguous()
        rows, programs, sizes = options(x, p)
        out = torch.empty_like(x)
        residual_dropout_forward_kernel[(programs,)](x, update, scale, seed, out, rows, **sizes)
        ctx.save_for_backward(update, scale, seed)
        ctx.p = p
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
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

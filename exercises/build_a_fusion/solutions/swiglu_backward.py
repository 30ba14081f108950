"""One solution of step 4."""

import triton
import triton.language as tl


@triton.jit
def swiglu_backward_kernel(
    X, GRAD, GRAD_X, rows, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (column < C)[None, :]
    at = row[:, None] * (2 * C) + column[None, :]
    gate = tl.load(X + at, mask=inside)
    up = tl.load(X + at + C, mask=inside)
    grad = tl.load(GRAD + row[:, None] * C + column[None, :], mask=inside)
    s = tl.sigmoid(gate)
    tl.store(GRAD_X + at, grad * up * (s + gate * s * (1 - s)), mask=inside)
    tl.store(GRAD_X + at + C, grad * gate * s, mask=inside)

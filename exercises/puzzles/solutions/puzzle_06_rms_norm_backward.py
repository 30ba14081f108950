"""One solution of puzzle 6."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_backward_kernel(
    X, WEIGHT, GRAD, GRAD_X, PARTS, rows, C, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    weight = tl.load(WEIGHT + column, mask=column < C, other=0.0)
    part = tl.zeros((BLOCK,), tl.float32)
    for i in range(ROWS):
        row = program * ROWS + i
        # Rows that do not exist are zeros, and add nothing to the sum.
        inside = (column < C) & (row < rows)
        x = tl.load(X + row * C + column, mask=inside, other=0.0)
        grad = tl.load(GRAD + row * C + column, mask=inside, other=0.0)
        rstd = 1 / tl.sqrt(tl.sum(x * x, 0) / C + eps)
        norm = x * rstd
        g = grad * weight
        grad_x = rstd * (g - norm * (tl.sum(g * norm, 0) / C))
        tl.store(GRAD_X + row * C + column, grad_x, mask=inside)
        part += grad * norm
    tl.store(PARTS + program * C + column, part, mask=column < C)

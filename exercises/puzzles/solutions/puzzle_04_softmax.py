"""One solution of puzzle 4."""

import triton
import triton.language as tl


@triton.jit
def softmax_kernel(X, OUT, C, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < C
    # -inf is never the maximum, and exp(-inf) adds 0 to the sum.
    x = tl.load(X + row * C + column, mask=inside, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(OUT + row * C + column, e / tl.sum(e, 0), mask=inside)

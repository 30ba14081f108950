"""One solution of puzzle 2."""

import triton
import triton.language as tl


@triton.jit
def mask_kernel(X, Y, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(X + at, mask=inside)
    y = tl.load(Y + at, mask=inside)
    # x + y is undefined where the mask is false; it does no harm, because it is not stored.
    tl.store(OUT + at, x + y, mask=inside)

"""One solution of puzzle 9."""

import triton
import triton.language as tl


@triton.jit
def linear_relu_kernel(
    A, B, BIAS, C, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        # Beyond the end of k both tiles are 0, so that the product is, too.
        in_a = (m < M)[:, None] & (k < K)[None, :]
        in_b = (k < K)[:, None] & (n < N)[None, :]
        a = tl.load(A + m[:, None] * K + k[None, :], mask=in_a, other=0.0)
        b = tl.load(B + k[:, None] * N + n[None, :], mask=in_b, other=0.0)
        total = tl.dot(a, b, total)
    # The epilogue: total has not been in memory yet.
    bias = tl.load(BIAS + n, mask=n < N, other=0.0)
    total = tl.maximum(total + bias[None, :], 0.0)
    in_c = (m < M)[:, None] & (n < N)[None, :]
    tl.store(C + m[:, None] * N + n[None, :], total, mask=in_c)

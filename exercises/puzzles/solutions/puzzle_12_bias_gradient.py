"""One solution of puzzle 12."""

import triton
import triton.language as tl


@triton.jit
def bias_gradient_kernel(
    Q, K, V, BIAS, GRAD, LOG_SUM_EXP, DELTA, GRAD_BIAS, rows, n, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    key = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, D)
    in_query, in_key = query < n, key < n
    tile = query[:, None] * n + key[None, :]
    in_tile = in_query[:, None] & in_key[None, :]
    bias = tl.load(BIAS + tile, mask=in_tile, other=0.0)  # the same for all rows

    grad_bias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for row in range(rows):
        query_at = row * n * D + query[:, None] * D + channel[None, :]
        key_at = row * n * D + key[:, None] * D + channel[None, :]
        q = tl.load(Q + query_at, mask=in_query[:, None], other=0.0)
        grad = tl.load(GRAD + query_at, mask=in_query[:, None], other=0.0)
        k = tl.load(K + key_at, mask=in_key[:, None], other=0.0)
        v = tl.load(V + key_at, mask=in_key[:, None], other=0.0)
        log_sum_exp = tl.load(LOG_SUM_EXP + row * n + query, mask=in_query, other=0.0)
        delta = tl.load(DELTA + row * n + query, mask=in_query, other=0.0)

        scores = tl.dot(q, tl.trans(k)) * scale + bias
        p = tl.exp(scores - log_sum_exp[:, None])
        grad_p = tl.dot(grad, tl.trans(v))
        grad_bias += p * (grad_p - delta[:, None])  # this program alone adds here
    tl.store(GRAD_BIAS + tile, grad_bias, mask=in_tile)

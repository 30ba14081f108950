"""One solution of puzzle 11."""

import triton
import triton.language as tl


@triton.jit
def flash_attention_kernel(
    Q, K, V, BIAS, OUT, LOG_SUM_EXP, n, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1)
    channel = tl.arange(0, D)
    q_at = row * n * D + query[:, None] * D + channel[None, :]
    q = tl.load(Q + q_at, mask=(query < n)[:, None], other=0.0)

    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)  # for each query
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, D), tl.float32)
    for start in range(0, n, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        kv_at = row * n * D + key[:, None] * D + channel[None, :]
        k = tl.load(K + kv_at, mask=(key < n)[:, None], other=0.0)
        v = tl.load(V + kv_at, mask=(key < n)[:, None], other=0.0)
        inside = (query < n)[:, None] & (key < n)[None, :]
        bias = tl.load(BIAS + query[:, None] * n + key[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale + bias
        scores = tl.where((key < n)[None, :], scores, -float("inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp(row_max - new_max)
        p = tl.exp(scores - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(p, 1)
        out = tl.dot(p.to(tl.float16), v, out * rescale[:, None])
        row_max = new_max

    tl.store(OUT + q_at, out / row_sum[:, None], mask=(query < n)[:, None])
    # exp(S - row_max) adds up to row_sum, so exp(S) adds up to exp(row_max) * row_sum.
    tl.store(LOG_SUM_EXP + row * n + query, row_max + tl.log(row_sum), mask=query < n)

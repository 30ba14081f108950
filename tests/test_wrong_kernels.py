"""Kernels as learners write them: each wrong one is refused with a hint that names its fault, and
one that is right and does more than it must is accepted with a line.

Each is a solution with some words replaced.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import ROOT, captured, mistakes, replaced, with_mistakes

from exercises.your_own_model import check

pytestmark = pytest.mark.usefixtures("same_numbers")

# name | puzzle, 0 is build_a_fusion's | what is said | right -> wrong | ...
# What begins with blanks goes on with the line before.
WRONG = r"""
minus | 1 | this is x - y | tl.load(X + at) + -> tl.load(X + at) -
x twice | 1 | no program loads y | tl.load(Y + at) -> tl.load(X + at)
no pid | 1 | program 1 and program 0 both wrote out[0]: a program begins at | tl.program_id(0) *
    BLOCK + ->
hard 8 | 1 | number in place of a size or of a block? | tl.program_id(0) * BLOCK + tl.arange(0,
    BLOCK) -> tl.program_id(0) * 8 + tl.arange(0, 8)
in place | 1 | writes to an input | OUT + at, -> X + at,
acc out | 1 | which nobody has written | tl.store(OUT + at, -> tl.store(OUT + at, tl.load(OUT + at)
    +
half block | 1 | no program has this address: is the block whole, is the grid large enough? |
    arange(0, BLOCK) -> arange(0, BLOCK // 2)
half prec | 1 | as large as those of 16 bits | tl.load(X + at) + tl.load(Y + at) -> (tl.load(X +
    at).to(tl.float16) + tl.load(Y + at))
no mask x | 2 | give it one, as mask=at < n | X + at, mask=inside -> X + at
no mask y | 2 | give it one, as mask=at < n | Y + at, mask=inside -> Y + at
no mask store | 2 | give it one, as mask=at < n | x + y, mask=inside -> x + y
<= | 2 | the mask is true there: `<` in place of `<=`? | at < n -> at <= n
n-1 | 2 | a store has this address, and its mask is false there | at < n -> at < n - 1
mask in block | 2 | are mask and stride those of this tensor? | inside = at < n -> inside =
    tl.arange(0, BLOCK) < n
last block lost | 2 | a store has this address, and its mask is false there | inside = at < n ->
    inside = at < n // BLOCK * BLOCK
hard 8 | 2 | number in place of a size or of a block? | tl.program_id(0) * BLOCK + tl.arange(0,
    BLOCK) -> tl.program_id(0) * 8 + tl.arange(0, 8)
minus | 2 | this is x - y | x + y -> x - y
mean | 3 | a factor, a sign or a mean? | tl.sum(x, 0)) -> tl.sum(x, 0) / C)
max | 3 | this is the maximum: tl.sum adds up | tl.sum(x, 0)) -> tl.max(x, 0))
stride BLOCK | 3 | are mask and stride those of this tensor, with 13 elements in a row? | row * C ->
    row * BLOCK
no row | 3 | the first row is right and no other: does row r begin at r times its | row * C + ->
no other | 3 | loads without `other` | , other=0.0 ->
other 1 | 3 | does what the mask leaves out take part, is BLOCK in place of a size? | other=0.0 ->
    other=1.0
no mask | 3 | give it one, as mask=at < n | , mask=column < C, other=0.0 ->
C - 1 | 3 | no program loads x | column < C -> column < C - 1
store 0 | 3 | race | OUT + row, -> OUT,
half | 3 | as large as those of 16 bits | tl.sum(x, 0)) -> tl.sum(x.to(tl.float16), 0))
acc | 3 | which nobody has written | tl.sum(x, 0)) -> tl.sum(x, 0) + tl.load(OUT + row))
no max | 4 | what becomes inf on the way, or 0, so that nothing is left? | x - tl.max(x, 0) -> x
other 0 | 4 | does what the mask leaves out take part, is BLOCK in place of a size? | -float("inf")
    -> 0.0
no other | 4 | loads without `other` | , other=-float("inf") ->
no sum | 4 | exp is not divided by its sum | e / tl.sum(e, 0) -> e
sum x | 4 | this divides by the sum of x, not of exp(x - m) | tl.sum(e, 0) -> tl.sum(x, 0)
log | 4 | this is the logarithm of softmax | e / tl.sum(e, 0) -> x - tl.max(x, 0) - tl.log(tl.sum(e,
    0))
exp2 | 4 | exp2 is a power of 2: take tl.exp | tl.exp( -> tl.exp2(
stride BLOCK | 4 | are mask and stride those of this tensor, with 13 elements in a row? | row * C ->
    row * BLOCK
no mask store | 4 | give it one, as mask=at < n | tl.sum(e, 0), mask=inside -> tl.sum(e, 0)
max of C | 4 | this divides by C, not by the sum | / tl.sum(e, 0) -> / C
half sum | 4 | as large as those of 16 bits | tl.sum(e, 0) -> tl.sum(e.to(tl.float16), 0)
no row | 4 | the first row is right and no other: does row r begin at r times its | X + row * C -> X
no eps | 5 | eps is missing | / C + eps -> / C
eps outside | 5 | eps is outside of the root | 1 / tl.sqrt(tl.sum(x * x, 0) / C + eps) -> 1 /
    (tl.sqrt(tl.sum(x * x, 0) / C) + eps)
eps in sum | 5 | eps is added to the sum: add it to the mean | tl.sum(x * x, 0) / C + eps ->
    (tl.sum(x * x, 0) + eps) / C
minus eps | 5 | eps is subtracted | / C + eps -> / C - eps
no root | 5 | the root is missing | 1 / tl.sqrt( -> 1 / (
sqrt for rsqrt | 5 | this multiplies by the root: 1 / tl.sqrt(...) | 1 / tl.sqrt( -> tl.sqrt(
no mean | 5 | the sum is not divided by C | / C + eps -> + eps
BLOCK | 5 | does what the mask leaves out take part, is BLOCK in place of a size? | / C + eps -> /
    BLOCK + eps
no weight | 5 | the factor weight is missing | x * rstd * weight -> x * rstd
no rstd | 5 | x is not multiplied by rstd | x * rstd * weight -> x * weight
no float32 | 5 | right in float32 and wrong in float16 | x = tl.load(X + row * C + column,
    mask=inside, other=0.0).to(tl.float32) -> x = tl.load(X + row * C + column, mask=inside,
    other=0.0)
norm rounded | 5 | right in float32 and wrong in float16 | x * rstd * weight -> (x *
    rstd).to(X.dtype.element_ty) * weight
layer norm | 5 | the mean is subtracted, as in a layer norm |
    rstd = -> x = x - tl.sum(x, 0) / C\n    rstd =
no mask weight | 5 | give it one, as mask=at < n | WEIGHT + column, mask=inside, other=0.0 -> WEIGHT
    + column
hard 16 | 5 | does what the mask leaves out take part, is BLOCK in place of a size? | / C + eps -> /
    16 + eps
eps behind | 5 | eps is added to 1 / root | 1 / tl.sqrt(tl.sum(x * x, 0) / C + eps) -> 1 /
    tl.sqrt(tl.sum(x * x, 0) / C) + eps
no eps | 6 | eps is missing | / C + eps -> / C
eps outside | 6 | eps is outside of the root | 1 / tl.sqrt(tl.sum(x * x, 0) / C + eps) -> 1 /
    (tl.sqrt(tl.sum(x * x, 0) / C) + eps)
no weight | 6 | g is grad * weight: weight is missing | g = grad * weight -> g = grad
weight in parts | 6 | parts is a sum of grad * norm: without weight | part += grad * norm -> part +=
    g * norm
x in parts | 6 | parts is a sum of grad * norm, not of grad * x | part += grad * norm -> part +=
    grad * x
no mean | 6 | the sum of g * norm is not divided by C | tl.sum(g * norm, 0) / C -> tl.sum(g * norm,
    0)
no second term | 6 | norm * mean(g * norm) is missing | g - norm * (tl.sum(g * norm, 0) / C) -> g
no rstd | 6 | the factor rstd is missing | grad_x = rstd * -> grad_x = 1.0 *
part = | 6 | this is the last row alone: += adds up | part += -> part =
race | 6 | race | PARTS + program * C -> PARTS
race load | 6 | race | tl.store(PARTS + program * C + column, part, mask=column < C) ->
    tl.store(PARTS + column, part + tl.load(PARTS + column, mask=column < C), mask=column < C)
no row mask | 6 | are mask and stride those of this tensor, with 13 elements in a row? | (column <
    C) & (row < rows) -> column < C
half part | 6 | `part` begins in 16 bits, and loses a digit at each step: add up in |
    tl.zeros((BLOCK,), tl.float32) -> tl.zeros((BLOCK,), tl.float16)
grad for g | 6 | the mean is of g * norm, not of grad * norm | g - norm * (tl.sum(g * norm, 0) / C)
    -> g - norm * (tl.sum(grad * norm, 0) / C)
swap gate up | 7 | gate and up are exchanged | gate * tl.sigmoid(gate) * up -> up * tl.sigmoid(up) *
    gate
no gate | 7 | silu(a) is a * sigmoid(a): a is missing | gate * tl.sigmoid(gate) * up ->
    tl.sigmoid(gate) * up
no up | 7 | the factor up is missing | gate * tl.sigmoid(gate) * up -> gate * tl.sigmoid(gate)
up missing C | 7 | no program loads x | X + at + C -> X + at
stride C | 7 | the first row is right and no other: does row r begin at r times its | row[:, None] *
    (2 * C) -> row[:, None] * C
no mask up | 7 | give it one, as mask=at < n | X + at + C, mask=inside -> X + at + C
no mask store | 7 | give it one, as mask=at < n | swiglu, mask=inside -> swiglu
axes swapped | 7 | no program has this address | tl.program_id(0) * BLOCK_R -> tl.program_id(1) *
    BLOCK_R | tl.program_id(1) * BLOCK_C -> tl.program_id(0) * BLOCK_C
exp overflow | 7 | what becomes inf on the way, or 0, so that nothing is left? | tl.sigmoid(gate) ->
    (tl.exp(gate) / (1 + tl.exp(gate)))
exp sign | 7 | sigmoid(a) is 1 / (1 + exp(-a)): the sign | tl.sigmoid(gate) -> (1 / (1 +
    tl.exp(gate)))
half | 7 | sigmoid take float32 | gate = tl.load(X + at, mask=inside) -> gate = tl.load(X + at,
    mask=inside).to(tl.float16)
hard | 7 | number in place of a size or of a block? | tl.program_id(0) * BLOCK_R + tl.arange(0,
    BLOCK_R) -> tl.program_id(0) * 4 + tl.arange(0, 4)
mask column | 7 | are mask and stride those of this tensor, with 13 elements in a row? | (row <
    rows)[:, None] & (column < C)[None, :] -> (row < 1000)[:, None] & (column < C)[None, :]
a stride N | 8 | the first row is right and no other: does row r begin at r times its | m[:, None] *
    K -> m[:, None] * N
b stride K | 8 | give it one, as mask=at < n | k[:, None] * N -> k[:, None] * K
no acc | 8 | right if all is one block: what of a block is lost or wrong when the next | total =
    tl.dot(a, b, total) -> total = tl.dot(a, b)
half acc | 8 | as large as those of 16 bits | total = tl.dot(a, b, total) -> total = tl.dot(a, b,
    total).to(tl.float16)
half zeros | 8 | `total` begins in 16 bits, and loses a digit at each step: add up in | N),
    tl.float32 -> N), tl.float16
K step | 8 | no program loads a | range(0, K, BLOCK_K) -> range(0, K, 2 * BLOCK_K)
K lost | 8 | no program loads a | range(0, K, BLOCK_K) -> range(0, K - BLOCK_K, BLOCK_K)
K hard | 8 | number in place of a size or of a block? | range(0, K, BLOCK_K) -> range(0, 64,
    BLOCK_K)
trans b | 8 | the second axis of the first tile must be the first of the second one | tl.dot(a, b,
    total) -> tl.dot(a, tl.trans(b), total)
store in loop | 8 | right if all is one block: what of a block is lost or wrong when the next |
    total = tl.dot(a, b, total) -> total = tl.dot(a, b)\n        tl.store(C + m[:, None] * N +
    n[None, :], total)
hard 16 | 8 | number in place of a size or of a block? | tl.program_id(0) * BLOCK_M + tl.arange(0,
    BLOCK_M) -> tl.program_id(0) * 16 + tl.arange(0, 16)
no relu | 9 | ReLU is missing | tl.maximum(total + bias[None, :], 0.0) -> total + bias[None, :]
no bias | 9 | bias is not added | + bias[None, :] ->
relu before | 9 | bias is added behind ReLU: before it | tl.maximum(total + bias[None, :], 0.0) ->
    tl.maximum(total, 0.0) + bias[None, :]
bias rows | 9 | bias has an element for each column: bias[None, :] | bias[None, :] -> bias[:, None]
bias in loop2 | 9 | bias is added at each step along k: once, behind the loop | total = tl.dot(a, b,
    total) -> total = tl.dot(a, b, total) + tl.load(BIAS + n, mask=n < N, other=0.0)[None, :] |
    total + bias[None, :] -> total
relu in loop | 9 | ReLU is behind the sum alone, once | total = tl.dot(a, b, total) -> total =
    tl.maximum(tl.dot(a, b, total), 0.0)
no mask k in a | 9 | are mask and stride those of this tensor, with 51 elements in a row? | (m <
    M)[:, None] & (k < K)[None, :] -> (m < M)[:, None] & (k < 1000)[None, :]
no other b | 9 | loads without `other` | mask=in_b, other=0.0 -> mask=in_b
no mask c | 9 | give it one, as mask=at < n | , total, mask=in_c -> , total
K lost | 9 | does what the mask leaves out take part, is BLOCK in place of a size? | range(0, K,
    BLOCK_K) -> range(0, K // BLOCK_K * BLOCK_K, BLOCK_K)
half | 9 | as large as those of 16 bits | total = tl.dot(a, b, total) -> total = tl.dot(a, b,
    total).to(tl.float16).to(tl.float32)
no mask bias | 9 | give it one, as mask=at < n | BIAS + n, mask=n < N, other=0.0 -> BIAS + n
no rescale | 10 | factor | row_sum * tl.exp(row_max - new_max) -> row_sum
rescale turned | 10 | all of these are NaN: is there inf - inf, inf / inf or 0 / 0? | tl.exp(row_max
    - new_max) -> tl.exp(new_max - row_max)
max zero | 10 | what becomes inf on the way, or 0, so that nothing is left? | row_max =
    -float("inf") -> row_max = 0.0
max late | 10 | all of these are infinite: is it exp, 1 / 0, or -inf that a loop never | row_max =
    new_max\n -> \n
only block max | 10 | what becomes inf on the way, or 0, so that nothing is left? |
    tl.maximum(row_max, tl.max(x, 0)) -> tl.max(x, 0)
other 0 | 10 | does what the mask leaves out take part, is BLOCK in place of a size? |
    other=-float("inf") -> other=0.0
no divide | 10 | exp is not divided by its sum | / row_sum ->
second loop max | 10 | right if all is one block: what of a block is lost or wrong when the next |
    tl.exp(x - row_max) / row_sum -> tl.exp(x - tl.max(x, 0)) / row_sum
last block | 10 | no program has this address: is the block whole, is the grid large enough? |
    range(0, C, BLOCK) -> range(0, C // BLOCK * BLOCK, BLOCK)
stride BLOCK | 10 | race | row * C -> row * BLOCK
no mask store | 10 | give it one, as mask=at < n | / row_sum, mask=inside -> / row_sum
half | 10 | as large as those of 16 bits | tl.sum(tl.exp(x - new_max), 0) -> tl.sum(tl.exp(x -
    new_max).to(tl.float16), 0)
no scale | 11 | scale is missing | tl.dot(q, tl.trans(k)) * scale -> tl.dot(q, tl.trans(k))
scale bias | 11 | bias is not scaled: add it behind scale | tl.dot(q, tl.trans(k)) * scale + bias ->
    (tl.dot(q, tl.trans(k)) + bias) * scale
no bias | 11 | bias is missing | * scale + bias -> * scale
bias T | 11 | bias is transposed: bias[i, j] has query i | query[:, None] * n + key[None, :] ->
    query[:, None] + key[None, :] * n
no max | 11 | what becomes inf on the way, or 0, so that nothing is left? | new_max =
    tl.maximum(row_max, tl.max(scores, 1)) -> new_max = tl.zeros((BLOCK_M,), tl.float32) | row_max =
    tl.full((BLOCK_M,), -float("inf"), tl.float32) -> row_max = tl.zeros((BLOCK_M,), tl.float32)
max zero | 11 | what becomes inf on the way, or 0, so that nothing is left? | row_max =
    tl.full((BLOCK_M,), -float("inf"), tl.float32) -> row_max = tl.zeros((BLOCK_M,), tl.float32)
no rescale sum | 11 | right if all is one block: what of a block is lost or wrong when the next |
    row_sum * rescale -> row_sum
no rescale out | 11 | right if all is one block: what of a block is lost or wrong when the next |
    out * rescale[:, None] -> out
no where | 11 | does what the mask leaves out take part, is BLOCK in place of a size? |
    tl.where((key < n)[None, :], scores, -float("inf")) -> scores
no divide | 11 | out is not divided by s | out / row_sum[:, None] -> out
lse no max | 11 | log_sum_exp is m + log(s): m is missing | row_max + tl.log(row_sum) ->
    tl.log(row_sum)
lse no log | 11 | log_sum_exp is m + log(s): log is missing | row_max + tl.log(row_sum) -> row_max +
    row_sum
half out | 11 | `out` begins in 16 bits, and loses a digit at each step: add up in float32 | out =
    tl.zeros((BLOCK_M, D), tl.float32) -> out = tl.zeros((BLOCK_M, D), tl.float16)
half out2 | 11 | what becomes inf on the way, or 0, so that nothing is left? | out =
    tl.dot(p.to(tl.float16), v, out * rescale[:, None]) -> out = tl.dot(p.to(tl.float16), v, out *
    rescale[:, None]).to(tl.float16).to(tl.float32)
half sum | 11 | as large as those of 16 bits | row_sum = row_sum * rescale + tl.sum(p, 1) -> row_sum
    = (row_sum * rescale + tl.sum(p, 1)).to(tl.float16).to(tl.float32)
no mask kv | 11 | give it one, as mask=at < n | tl.load(K + kv_at, mask=(key < n)[:, None],
    other=0.0) -> tl.load(K + kv_at)
last block | 11 | does what the mask leaves out take part, is BLOCK in place of a size? | range(0,
    n, BLOCK_N) -> range(0, n // BLOCK_N * BLOCK_N, BLOCK_N)
D hard | 11 | number in place of a size or of a block? | row * n * D + query[:, None] * D -> row * n
    * 16 + query[:, None] * 16
no scale | 12 | scale is missing | tl.dot(q, tl.trans(k)) * scale -> tl.dot(q, tl.trans(k))
scale bias | 12 | bias is not scaled: add it behind scale | tl.dot(q, tl.trans(k)) * scale + bias ->
    (tl.dot(q, tl.trans(k)) + bias) * scale
no lse | 12 | log_sum_exp is not subtracted | scores - log_sum_exp[:, None] -> scores
no delta | 12 | delta is not subtracted | grad_p - delta[:, None] -> grad_p
plus delta | 12 | delta is subtracted, not added | grad_p - delta -> grad_p + delta
delta key | 12 | delta is that of the query: delta[:, None] | delta[:, None] -> delta[None, :]
no p | 12 | the factor P is missing | += p * ( -> += (
= | 12 | this is the last row alone: += adds up | grad_bias += -> grad_bias =
no row | 12 | no program loads k | key_at = row * n * D + -> key_at =
rows - 1 | 12 | no program loads q | range(rows) -> range(rows - 1)
rows hard | 12 | does what the mask leaves out take part, is BLOCK in place of a size? | range(rows)
    -> range(2)
half p | 12 | as large as those of 16 bits | p = tl.exp(scores - log_sum_exp[:, None]) -> p =
    tl.exp(scores - log_sum_exp[:, None]).to(tl.float16)
half zeros | 12 | `grad_bias` begins in 16 bits, and loses a digit at each step: add up in |
    tl.zeros((BLOCK_M, BLOCK_N), tl.float32) -> tl.zeros((BLOCK_M, BLOCK_N), tl.float16)
mask | 12 | give it one, as mask=at < n | grad_bias, mask=in_tile -> grad_bias
atomic | 12 | atomic operation | tl.store( -> tl.atomic_add(
swapped pid | 12 | number in place of a size or of a block? | tl.program_id(0) * BLOCK_M ->
    tl.program_id(1) * BLOCK_M | tl.program_id(1) * BLOCK_N -> tl.program_id(0) * BLOCK_N
swapped | 0 | the gradients of gate and up are exchanged | GRAD_X + at, grad * up -> GRAD_X + at +
    C, grad * up | GRAD_X + at + C, grad * gate -> GRAD_X + at, grad * gate
swap gate up | 0 | gate and up are exchanged | gate = tl.load(X + at, -> up = tl.load(X + at, | up =
    tl.load(X + at + C -> gate = tl.load(X + at + C
no s' | 0 | grad_gate: gate * s * (1 - s) is missing | (s + gate * s * (1 - s)) -> s
no s in gate | 0 | grad_gate: s + ... is missing | (s + gate * s * (1 - s)) -> (gate * s * (1 - s))
1 + s | 0 | grad_gate: it is 1 - s, not 1 + s | (1 - s) -> (1 + s)
no up | 0 | grad_gate: up is missing | grad * up * -> grad *
no grad up | 0 | grad_up: grad is missing | grad * gate * s -> gate * s
no s up | 0 | grad_up: s is missing | grad * gate * s -> grad * gate
x stride | 0 | race | row[:, None] * (2 * C) -> row[:, None] * C
mask one load | 0 | give it one, as mask=at < n | X + at + C, mask=inside) -> X + at + C)
mask store | 0 | give it one, as mask=at < n | grad * gate * s, mask=inside -> grad * gate * s
one store | 0 | no program has this address: is the block whole, is the grid large enough? |
    tl.store(GRAD_X + at + C, grad * gate * s, mask=inside)\n -> \n
half | 0 | as large as those of 16 bits | s = tl.sigmoid(gate) -> s =
    tl.sigmoid(gate).to(tl.float16)
in place | 0 | writes to an input | tl.store(GRAD_X + at, -> tl.store(X + at,
exp | 0 | what becomes inf on the way, or 0, so that nothing is left? | tl.sigmoid(gate) ->
    tl.exp(gate) / (1 + tl.exp(gate))
"""
RIGHT = r"""
stores twice | 1 | store once: line 12 stores out[0] again |
    tl.store(OUT + at, -> tl.store(OUT + at, 0.0 * at)\n    tl.store(OUT + at,
through memory | 2 | load once: line 15 loads what it has stored, out |
    tl.store(OUT + at, x + y, mask=inside) -> tl.store(OUT + at, x, mask=inside)\n    tl.store(OUT
    + at, y + tl.load(OUT + at, mask=inside), mask=inside)
all of it in each program | 2 | Not practised: blocks: line |
    at = tl.program_id(0) * BLOCK -> for i in range(n):\n        tl.store(OUT + i, tl.load(X + i)
    + tl.load(Y + i))\n    at = tl.program_id(0) * BLOCK
row twice | 4 | load once: line 15 loads x[0, 0] again |
    e = tl.exp(x - tl.max(x, 0)) -> m = tl.max(x, 0)\n    x = tl.load(X + row * C + column,
    mask=inside, other=-float("inf"))\n    e = tl.exp(x - m)
float64 | 5 | float32, which is enough | .to(tl.float32) -> .to(tl.float64)
weight in the loop | 6 | load once: line 23 loads weight[0] again |
    g = grad * weight -> weight = tl.load(WEIGHT + column, mask=column < C,
    other=0.0)\n        g = grad * weight
parts in the loop | 6 | store once: line 27 stores parts[0, 0] again |
    part += grad * norm -> part += grad * norm\n        tl.store(PARTS + program * C + column,
    part, mask=column < C)
gate twice | 7 | load once: line 15 loads x[0, 0] again |
    tl.sigmoid(gate) -> tl.sigmoid(tl.load(X + at, mask=inside))
no dot | 8 | the units for matrices, which tl.dot uses | tl.dot(a, b, total) -> total +
    tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
bias in the loop | 9 | load once: line 22 loads bias[0] again |
    total = tl.dot(a, b, total) -> total = tl.dot(a, b, total)\n        bias = tl.load(BIAS + n,
    mask=n < N, other=0.0)
three loads | 10 | load once: line 22 loads x[0, 0] 3 times |
    x = tl.load(X + row * C + column, mask=inside) -> x = tl.load(X + row * C + column,
    mask=inside)\n        x = tl.load(X + row * C + column, mask=inside)
q in the loop | 11 | load once: line 28 loads q[0, 0, 0] again | scores = tl.dot(q ->
    q = tl.load(Q + q_at, mask=(query < n)[:, None], other=0.0)\n        scores = tl.dot(q
bias in the loop | 12 | load once: line 31 loads bias[0, 0] again | scores = tl.dot(q ->
    bias = tl.load(BIAS + tile, mask=in_tile, other=0.0)\n        scores = tl.dot(q
gate twice | 0 | load once: line 18 loads x[0, 0] again |
    s = tl.sigmoid(gate) -> s = tl.sigmoid(tl.load(X + at, mask=inside))
"""
OWN = r"""
no eps | 0 | eps is missing | / C + eps) -> / C)
eps outside | 0 | eps is outside of the root |
    1 / tl.sqrt(tl.sum(centred * centred, 0) / C + eps) ->
    1 / (tl.sqrt(tl.sum(centred * centred, 0) / C) + eps)
masked lanes | 0 | lanes beyond the row take part in the variance |
    tl.where(inside, x - tl.sum(x, 0) / C, 0.0) -> x - tl.sum(x, 0) / C
mean of squares | 0 | subtract the mean before you square | tl.sum(centred * centred, 0) / C ->
    (tl.sum(x * x, 0) / C - tl.sum(x, 0) / C * tl.sum(x, 0) / C)
no update | 0 | update is not added | other=0.0) + update -> other=0.0)
outputs | 0 | are the two exchanged? | return total, out -> return out, total
rounded twice | 0 | is rounded more than once |
    centred * rstd * weight -> (centred * rstd).to(OUT.dtype.element_ty) * weight
no grad_sum | 0 | grad_sum is not added |
    grad_x += tl.load(GRAD_SUM + at, mask=inside) -> grad_x += 0.0
no second mean | 0 | n * mean(g * n) is not subtracted |
    - tl.sum(g, 0) / C - normed * tl.sum(g * normed, 0) / C -> - tl.sum(g, 0) / C
no weight | 0 | g is grad_out * weight: weight is missing | g = grad * weight -> g = grad
swapped | 0 | are the two exchanged? | *parts.sum(0) -> *parts.sum(0).flip(0)
weight without n | 0 | n is missing: a sum of grad_out * n |
    grad_weight += grad * normed -> grad_weight += grad
not added | 0 | does a program's second row add up? | grad_weight += -> grad_weight =
race | 0 | this is a race | PARTS + tl.program_id(0) * 2 * C -> PARTS
added without zeros | 0 | did nobody write them |
    part = PARTS + tl.program_id(0) * 2 * C + column -> part = PARTS + column |
    tl.store(part -> tl.atomic_add(part
last row | 0 | did nobody write them | rows, tl.num -> rows - 1, tl.num
no mask | 0 | beyond the end of a tensor | GRAD_OUT + at, mask=inside, other=0.0 -> GRAD_OUT + at
no other | 0 | loads without `other` | GRAD_OUT + at, mask=inside, other=0.0 ->
    GRAD_OUT + at, mask=inside
block | 0 | is there a number in place of C or BLOCK? | BLOCK=triton.next_power_of_2(C) -> BLOCK=64
in place | 0 | writes to a gradient that it is given |
    grad_x, grad_update = torch.empty_like(grad_sum) -> grad_x, grad_update = grad_sum
sum in 16 bits | 0 | begins in 16 bits |
    grad_weight = tl.zeros((BLOCK,), tl.float32) -> grad_weight = tl.zeros((BLOCK,), tl.float16)
"""
OWN_RIGHT = r"""
row twice | 0 | one pass: forward, kernels load and store 5.0 times | weight = tl.load(WEIGHT +
    column, mask=inside)\n    bias -> x = tl.load(X + at, mask=inside, other=0.0) +
    update\n    weight = tl.load(WEIGHT + column, mask=inside)\n    bias
atomic additions | 0 | sums of each program's own: line |
    part = PARTS + tl.program_id(0) * 2 * C + column -> part = PARTS + column |
    tl.store(part -> tl.atomic_add(part | weight.new_empty(min -> weight.new_zeros(min
"""
PUZZLES = pytest.mark.parametrize("number", [*range(1, 13), 0], ids=lambda n: f"puzzle {n}")
SOLUTION = ROOT / "exercises/your_own_model/solution.py"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")


def verdicts(checker, table: str, number: int, folder: Path, solved: bool) -> dict[str, str]:
    """What is said of the kernels of a puzzle where it is not what should be said, by name."""
    other = {}
    for name, mistake in mistakes(table).items():
        if mistake.puzzle == number:
            puzzle = with_mistakes(checker, number, mistake.changes, folder / f"{len(name)}.py")
            found, text, _ = checker.verdict(puzzle)
            if found != solved or mistake.sentence not in text or "\n" in text:
                other[name] = text
    return other


@PUZZLES
def test_a_wrong_kernel_is_refused_and_its_fault_is_named(checker, number, tmp_path):
    assert sum(mistake.puzzle == number for mistake in mistakes(WRONG).values()) >= 8
    assert verdicts(checker, WRONG, number, tmp_path, solved=False) == {}


@PUZZLES
def test_a_right_kernel_that_does_more_than_it_must_is_accepted_with_a_line(
    checker, number, tmp_path
):
    assert verdicts(checker, RIGHT, number, tmp_path, solved=True) == {}


@without_gpu
@pytest.mark.parametrize(("table", "status"), [(OWN, 1), (OWN_RIGHT, 0)], ids=["wrong", "right"])
def test_kernels_for_ones_own_model(table, status, tmp_path):
    other = {}
    for name, mistake in mistakes(table).items():
        mine = tmp_path / "mine.py"
        mine.write_text(replaced(SOLUTION.read_text(), mistake.changes))
        found, out, err = captured(check.main, [str(mine)])
        if found != status or mistake.sentence not in out + err:
            other[name] = out + err
    assert other == {}

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
no mask x | 2 | give it one, as mask=at < n | X + at, mask=inside -> X + at
<= | 2 | the mask is true there: `<` in place of `<=`? | at < n -> at <= n
n-1 | 2 | a store has this address, and its mask is false there | at < n -> at < n - 1
mask in block | 2 | are mask and stride those of this tensor? | inside = at < n -> inside =
    tl.arange(0, BLOCK) < n
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
no max | 4 | what becomes inf on the way, or 0, so that nothing is left? | x - tl.max(x, 0) -> x
other 0 | 4 | does what the mask leaves out take part, is BLOCK in place of a size? | -float("inf")
    -> 0.0
no other | 4 | loads without `other` | , other=-float("inf") ->
no sum | 4 | exp is not divided by its sum | e / tl.sum(e, 0) -> e
sum x | 4 | this divides by the sum of x, not of exp(x - m) | tl.sum(e, 0) -> tl.sum(x, 0)
log | 4 | this is the logarithm of softmax | e / tl.sum(e, 0) -> x - tl.max(x, 0) - tl.log(tl.sum(e,
    0))
no eps | 5 | eps is missing | / C + eps -> / C
eps outside | 5 | eps is outside of the root | 1 / tl.sqrt(tl.sum(x * x, 0) / C + eps) -> 1 /
    (tl.sqrt(tl.sum(x * x, 0) / C) + eps)
eps in sum | 5 | eps is added to the sum: add it to the mean | tl.sum(x * x, 0) / C + eps ->
    (tl.sum(x * x, 0) + eps) / C
no root | 5 | the root is missing | 1 / tl.sqrt( -> 1 / (
sqrt for rsqrt | 5 | this multiplies by the root: 1 / tl.sqrt(...) | 1 / tl.sqrt( -> tl.sqrt(
no mean | 5 | the sum is not divided by C | / C + eps -> + eps
race | 6 | race | PARTS + program * C -> PARTS
no row mask | 6 | are mask and stride those of this tensor, with 13 elements in a row? | (column <
    C) & (row < rows) -> column < C
half part | 6 | `part` begins in 16 bits, and loses a digit at each step: add up in |
    tl.zeros((BLOCK,), tl.float32) -> tl.zeros((BLOCK,), tl.float16)
swap gate up | 7 | gate and up are exchanged | gate * tl.sigmoid(gate) * up -> up * tl.sigmoid(up) *
    gate
no gate | 7 | silu(a) is a * sigmoid(a): a is missing | gate * tl.sigmoid(gate) * up ->
    tl.sigmoid(gate) * up
no up | 7 | the factor up is missing | gate * tl.sigmoid(gate) * up -> gate * tl.sigmoid(gate)
up missing C | 7 | no program loads x | X + at + C -> X + at
stride C | 7 | the first row is right and no other: does row r begin at r times its | row[:, None] *
    (2 * C) -> row[:, None] * C
no mask up | 7 | give it one, as mask=at < n | X + at + C, mask=inside -> X + at + C
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
no mask k in a | 9 | are mask and stride those of this tensor, with 51 elements in a row? | (m <
    M)[:, None] & (k < K)[None, :] -> (m < M)[:, None] & (k < 1000)[None, :]
no other b | 9 | loads without `other` | mask=in_b, other=0.0 -> mask=in_b
no mask c | 9 | give it one, as mask=at < n | , total, mask=in_c -> , total
K lost | 9 | does what the mask leaves out take part, is BLOCK in place of a size? | range(0, K,
    BLOCK_K) -> range(0, K // BLOCK_K * BLOCK_K, BLOCK_K)
half | 9 | as large as those of 16 bits | total = tl.dot(a, b, total) -> total = tl.dot(a, b,
    total).to(tl.float16).to(tl.float32)
no rescale | 10 | factor | row_sum * tl.exp(row_max - new_max) -> row_sum
rescale turned | 10 | all of these are NaN: is there inf - inf, inf / inf or 0 / 0? | tl.exp(row_max
    - new_max) -> tl.exp(new_max - row_max)
max zero | 10 | what becomes inf on the way, or 0, so that nothing is left? | row_max =
    -float("inf") -> row_max = 0.0
max late | 10 | all of these are infinite: is it exp, 1 / 0, or -inf that a loop never | row_max =
    new_max\n -> \n
other 0 | 10 | does what the mask leaves out take part, is BLOCK in place of a size? |
    other=-float("inf") -> other=0.0
no divide | 10 | exp is not divided by its sum | / row_sum ->
no max | 11 | what becomes inf on the way, or 0, so that nothing is left? | new_max =
    tl.maximum(row_max, tl.max(scores, 1)) -> new_max = tl.zeros((BLOCK_M,), tl.float32) | row_max =
    tl.full((BLOCK_M,), -float("inf"), tl.float32) -> row_max = tl.zeros((BLOCK_M,), tl.float32)
no rescale sum | 11 | right if all is one block: what of a block is lost or wrong when the next |
    row_sum * rescale -> row_sum
no where | 11 | does what the mask leaves out take part, is BLOCK in place of a size? |
    tl.where((key < n)[None, :], scores, -float("inf")) -> scores
half out | 11 | `out` begins in 16 bits, and loses a digit at each step: add up in float32 | out =
    tl.zeros((BLOCK_M, D), tl.float32) -> out = tl.zeros((BLOCK_M, D), tl.float16)
half sum | 11 | as large as those of 16 bits | row_sum = row_sum * rescale + tl.sum(p, 1) -> row_sum
    = (row_sum * rescale + tl.sum(p, 1)).to(tl.float16).to(tl.float32)
no mask kv | 11 | give it one, as mask=at < n | tl.load(K + kv_at, mask=(key < n)[:, None],
    other=0.0) -> tl.load(K + kv_at)
no row | 12 | no program loads k | key_at = row * n * D + -> key_at =
rows - 1 | 12 | no program loads q | range(rows) -> range(rows - 1)
rows hard | 12 | does what the mask leaves out take part, is BLOCK in place of a size? | range(rows)
    -> range(2)
half p | 12 | as large as those of 16 bits | p = tl.exp(scores - log_sum_exp[:, None]) -> p =
    tl.exp(scores - log_sum_exp[:, None]).to(tl.float16)
half zeros | 12 | `grad_bias` begins in 16 bits, and loses a digit at each step: add up in |
    tl.zeros((BLOCK_M, BLOCK_N), tl.float32) -> tl.zeros((BLOCK_M, BLOCK_N), tl.float16)
mask | 12 | give it one, as mask=at < n | grad_bias, mask=in_tile -> grad_bias
x stride | 0 | race | row[:, None] * (2 * C) -> row[:, None] * C
mask one load | 0 | give it one, as mask=at < n | X + at + C, mask=inside) -> X + at + C)
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
no eps | 0 | is eps where the formula has it? | / C + eps) -> / C)
masked lanes | 0 | do lanes beyond the row take part |
    tl.where(inside, x - tl.sum(x, 0) / C, 0.0) -> x - tl.sum(x, 0) / C
rounded twice | 0 | is rounded more than once |
    centred * rstd * weight -> (centred * rstd).to(OUT.dtype.element_ty) * weight
swapped | 0 | are the two exchanged? | *parts.sum(0) -> *parts.sum(0).flip(0)
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

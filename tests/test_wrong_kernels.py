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

# name | puzzle, 0 is build_a_fusion's | what is said | right -> wrong | ...
# What begins with blanks goes on with the line before.
WRONG = r"""
"""
RIGHT = r"""
stores twice | 1 | store once: line 12 stores out[0] again |
    tl.store(OUT + at, -> tl.store(OUT + at, 0.0 * at)\n    tl.store(OUT + at,
through memory | 2 | load once: line 15 loads what it has stored, out |
    tl.store(OUT + at, x + y, mask=inside) -> tl.store(OUT + at, x, mask=inside)\n    tl.store(OUT
    + at, y + tl.load(OUT + at, mask=inside), mask=inside)
all of it in each program | 2 | Not practised: blocks: line 11 |
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

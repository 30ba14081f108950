#!/usr/bin/env python3
"""Puzzle 4: softmax of each row. out[r, c] = exp(x[r, c]) / sum over j of exp(x[r, j])

    x [3, 5]             0 1 2 3 4 | 5 6 7 8 9 | 10 11 12 13 14
    owner                program 0 | program 1 |   program 2          grid = (3,)

exp(89) is larger than any float32, so the formula as it stands gives inf / inf. Subtract the
largest number of the row first: the result is the same, and no exp is larger than 1. This is a
*stable* softmax:

    out[r, c] = exp(x[r, c] - m[r]) / sum over j of exp(x[r, j] - m[r]); m[r] = max over j x[r, j]

    tl.max(B, 0), tl.exp(B)     as tl.sum, and element by element

PyTorch's formula of five operators reads the matrix five times and writes it three times. Here the
row stays in the program: it is read and written once. That is what *fusion* means.

Which `other` changes neither a maximum nor a sum of exp?

Run: python exercises/puzzles/puzzle_04_softmax.py
"""

import sys

from exercises.puzzles.checker import Puzzle, main, normal

# isort: split

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def softmax_kernel(X, OUT, C, BLOCK: tl.constexpr):
    # your code
    pass


def softmax(x: Tensor, out: Tensor) -> None:
    """x, out [rows, C]."""
    rows, C = x.shape
    softmax_kernel[(rows,)](x, out, C, BLOCK=triton.next_power_of_2(C))


# --- what the checker needs: no need to read on


def inputs(dtype: torch.dtype, scale: float, rows: int, C: int) -> dict[str, Tensor]:
    """Large ones have rows about -300 as well as 300: exp of all is 0, or inf, where no maximum is
    subtracted."""
    return {"x": scale * (normal(dtype, rows, C) + torch.linspace(-6, 6, rows)[:, None])}


PUZZLE = Puzzle(
    launch=softmax,
    inputs=inputs,
    reference=lambda x: {"out": x.softmax(1)},
    even={"rows": 4, "C": 16},
    odd=({"rows": 3, "C": 13}, {"rows": 1, "C": 33}),
    scales=(1.0, 50.0),
    blocks={},
    large={"rows": 2**14, "C": 4096},
    pytorch=lambda x: lambda: x.softmax(1),
)

if __name__ == "__main__":
    sys.exit(main(PUZZLE))

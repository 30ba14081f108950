"""Formulas that readers write in place of those of the core's puzzles, so that the checker can say
which it is. Only a result that is wrong is compared with them, in float64.

Each function takes a puzzle's inputs, and returns what is said: the output as that mistake has it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5


def of_add(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {
        "this is x - y": x - y,
        "this is x * y": x * y,
    }


def of_row_sum(x: Tensor) -> dict[str, Tensor]:
    return {
        "this is the maximum: tl.sum adds up": x.amax(1),
        "this adds up absolute values": x.abs().sum(1),
        "this adds up squares": x.square().sum(1),
    }


def of_softmax(x: Tensor) -> dict[str, Tensor]:
    below = x - x.amax(1, keepdim=True)
    power = 2**below
    return {
        "exp is not divided by its sum": below.exp(),
        "this divides by the sum of x, not of exp(x - m)": below.exp() / x.sum(1, keepdim=True),
        "this divides by C, not by the sum": below.exp() / x.shape[1],
        "this is the logarithm of softmax": x.log_softmax(1),
        "exp2 is a power of 2: take tl.exp": power / power.sum(1, keepdim=True),
    }


def of_rms_norm(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    C = x.shape[1]
    square = x.square().mean(1, keepdim=True)
    mean = x.mean(1, keepdim=True)
    root = (square + EPS).sqrt()
    return {
        "eps is missing": x / square.sqrt() * weight,
        "eps is outside of the root": x / (square.sqrt() + EPS) * weight,
        "eps is added to 1 / root": x * (1 / square.sqrt() + EPS) * weight,
        "eps is added to the sum: add it to the mean": x / (square + EPS / C).sqrt() * weight,
        "the factor weight is missing": x / root,
        "the root is missing": x / root**2 * weight,
        "this multiplies by the root: 1 / tl.sqrt(...)": x * root * weight,
        "x is not multiplied by rstd": x * weight,
        "the sum is not divided by C": x / (C * square + EPS).sqrt() * weight,
        "the mean is squared: first square, then add up": x / (mean**2 + EPS).sqrt() * weight,
    }


def of_swiglu(x: Tensor) -> dict[str, Tensor]:
    gate, up = x.chunk(2, 1)
    return {
        "gate and up are exchanged": gate * F.silu(up),
        "silu(a) is a * sigmoid(a): a is missing": gate.sigmoid() * up,
        "sigmoid is missing": gate * up,
        "the factor up is missing": F.silu(gate),
        "the sigmoid is that of gate, not of up": gate * up.sigmoid() * up,
    }


FORMULAS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "puzzle_01_add": of_add,
    "puzzle_02_mask": of_add,
    "puzzle_03_row_sum": of_row_sum,
    "puzzle_04_softmax": of_softmax,
    "puzzle_05_rms_norm": of_rms_norm,
    "puzzle_07_swiglu": of_swiglu,
    "puzzle_10_online_softmax": of_softmax,
}


def formulas_of(file: str, inputs: list[Tensor]) -> dict[str, Tensor]:
    """What is said of a puzzle's output, by this file's name."""
    return FORMULAS[file](*inputs) if file in FORMULAS else {}

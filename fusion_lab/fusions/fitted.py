"""Rates of a device that is not at hand, fitted to the kernels of traces that others recorded.

Each kind of kernel has a law: microseconds that it takes at least, and more for each GB, for each
TFLOP, and for what else its kind waits for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusion_lab.fusions.rates import CONSTANTS, Constants, Rates
from fusion_lab.fusions.record import Operator

SHORT = 1024  # elements of a row that PyTorch's softmax keeps in registers
LOAD = 16  # bytes; where longer rows begin elsewhere, its softmax reads them three times
TILE = 256  # rows and columns of a block of a product
UNITS = 304  # blocks that an MI300X computes at once
PRODUCTS = {"convolution": "convolution", "scaled_dot": "attention"}  # others are plain ones
SHORT_SUM, FEW_ROWS = 64, 16  # below these a product is narrow
STEPS = (4.0, 2.0, 1.3, 1.1, 1.03)


def kind_of(operator: Operator) -> str:
    """The law that an operator follows."""
    name = operator.name
    if operator.dtype:
        return next((kind for part, kind in PRODUCTS.items() if part in name), "product")
    if operator.access == "sums":
        return next((kind for kind in ("norm", "softmax") if kind in name), "sums")
    whole = operator.kind == "unknown" or name.startswith(("_foreach", "_fused"))
    return "straight" if whole else operator.access


def is_narrow(operator: Operator) -> bool:
    """Is it a product of short sums, or with little more than a vector?"""
    if not operator.operands or kind_of(operator) != "product":
        return False
    (_, a, _), (_, b, _) = operator.operands
    return a[-1] <= SHORT_SUM or min(a[-2:-1] + b[-1:]) < FEW_ROWS


def waves_of(operator: Operator) -> int:
    """How often the blocks of a product fill the device."""
    if not operator.operands:
        return 1
    (_, a, _), (_, b, _) = operator.operands
    batch = a[0] if len(a) == 3 else 1
    rows = a[-2] if len(a) > 1 else 1
    columns = b[-1] if len(b) > 1 else 1
    return math.ceil(batch * math.ceil(rows / TILE) * math.ceil(columns / TILE) / UNITS)


def terms_of(operator: Operator) -> tuple[float, float, float, float]:
    """What the coefficients of a law multiply: kernels at least, GB, TFLOP, and what else a kind
    waits for. That is the MB of a row in a norm, as a block has it; the GB that a softmax reads
    again; thousands of keys, which attention takes one behind the other; waves of a product."""
    kind, waits = kind_of(operator), 0.0
    if kind == "product":
        waits = waves_of(operator)
    elif kind == "attention":
        waits = operator.operands[1][1][-2] / 1e3
    elif operator.sums and kind in ("norm", "softmax"):
        numel, length, _ = operator.sums
        row = operator.moved * length / max(1, numel)
        if kind == "norm":
            waits = row / 1e6
        elif length > SHORT and row / 2 % LOAD:  # which is read and written
            waits = operator.moved / 1e9
    kernels = 2.0 if operator.name == "convolution_backward" else 1.0
    return kernels, operator.moved / 1e9, operator.flop / 1e12, waits


def fit(terms: Tensor, us: Tensor, least_us: float | None = None) -> list[float]:
    """Coefficients with which the logarithms of all times are least off, each of them made larger
    or smaller by ever smaller steps. The first one can be known."""
    used = (terms > 0).any(0)
    best = ((us[:, None] / terms.clamp_min(1e-12)).quantile(0.25, 0) * used / used.sum()).tolist()
    free = range(len(best)) if least_us is None else range(1, len(best))
    if least_us is not None:
        best[0] = least_us

    def off(coefficients: list[float]) -> float:
        return float((terms @ terms.new_tensor(coefficients) / us).log().abs().sum())

    least = off(best)
    for step in STEPS:
        before = math.inf
        while least < before:
            before = least
            for place, factor in ((i, f) for i in free for f in (step, 1 / step)):
                other = [c * factor if i == place else c for i, c in enumerate(best)]
                if (found := off(other)) < least - 1e-9:
                    best, least = other, found
    return best


def laws_of(kernels: Mapping[str, list[tuple[tuple[float, ...], float]]]) -> dict[str, list[float]]:
    """The law of each kind, from terms and microseconds of its kernels. A product begins and ends
    as a kernel that goes straight through memory does."""
    laws: dict[str, list[float]] = {}
    for kind in sorted(kernels, key="straight".__ne__):  # that one first
        terms = torch.tensor([each for each, _ in kernels[kind]], dtype=torch.float64)
        us = torch.tensor([each for _, each in kernels[kind]], dtype=torch.float64)
        laws[kind] = fit(terms, us, laws["straight"][0] if kind == "product" else None)
    return laws


def us_of(laws: Mapping[str, list[float]], kind: str, terms: tuple[float, ...]) -> float:
    """What a kernel takes by the law of its kind."""
    return sum(c * term for c, term in zip(laws[kind], terms, strict=True))


@dataclass
class FittedRates(Rates):
    """Rates that are laws, and how far off they were for traces from which they did not come."""

    laws: dict[str, list[float]] = field(default_factory=dict)
    left_out: dict[str, float] = field(default_factory=dict)  # predicted of own time, by model
    errors: dict[str, float] = field(default_factory=dict)  # percent, medians of products

    def us(
        self, moved: float, flop: float = 0.0, dtype: str = "", constants: Constants = CONSTANTS
    ) -> float:
        """The time of a kernel that would be, in one wave."""
        if not flop:
            return us_of(self.laws, "straight", (1.0, moved / 1e9, 0.0, 0.0))
        if dtype not in self.tflops:
            return math.nan
        return us_of(self.laws, "product", (1.0, moved / 1e9, flop / 1e12, 1.0))

    def of(self, operator: Operator, constants: Constants = CONSTANTS) -> float:
        """The time of an operator that is."""
        if operator.flop and operator.dtype not in self.tflops:
            return math.nan
        kind = kind_of(operator)
        return us_of(self.laws, kind, terms_of(operator))

    def remarks(self, operators: Iterable[Operator]) -> list[str]:
        """What the laws do worse."""
        narrow = [operator for operator in operators if is_narrow(operator)]
        if not narrow:
            return []
        off = (f"{self.errors[kind]:.0f} %" for kind in ("narrow products", "other products"))
        return [
            f"{len(narrow)} products have sums of at most {SHORT_SUM}, or a side below {FEW_ROWS},"
            f" {sum(o.us for o in narrow) / 1e3:.3f} ms: half of such were off by more than"
            f" {next(off)}, half of the others by more than {next(off)}"
        ]

"""Rates of a device that is not at hand, fitted to the kernels of traces that others recorded.

Each kind of kernel has a law: microseconds that it takes at least, and more for each GB, for each
TFLOP, and for what else its kind waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from fusion_lab.cli import ToolError
from fusion_lab.files import read_json
from fusion_lab.fusions.rates import CONSTANTS, Constants, Rates
from fusion_lab.fusions.record import Operator

KINDS = ("straight", "strided", "sums", "norm", "softmax", "product", "convolution", "attention")
SHORT = 1024  # elements of a row that PyTorch's softmax keeps in registers
LOAD = 16  # bytes; where longer rows begin elsewhere, its softmax reads them three times
TILE = 256  # rows and columns of a block of a product
UNITS = 304  # blocks that an MI300X computes at once; elsewhere a wave takes longer
PRODUCTS = {"convolution": "convolution", "scaled_dot": "attention"}  # others are plain ones
SHORT_SUM, FEW_ROWS = 64, 16  # below these a product is narrow
SHARED = {"product": ("straight", (0,)), "sums": ("straight", (1,)),
          "convolution": ("product", (1, 2))}  # fmt: skip
TIMED = "bf16"  # the type of products of which there are traces
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
    blocks = batch * math.ceil(a[-2] / TILE) * math.ceil(b[-1] / TILE)
    return math.ceil(blocks / UNITS)


def terms_of(operator: Operator) -> tuple[float, float, float, float]:
    """What the coefficients of a law multiply: kernels at least, GB, TFLOP, and what else a kind
    waits for. That is the MB of a row in a norm, as a block has it; the GB that a softmax reads
    again; thousands of keys, which attention takes one behind the other; waves of a product."""
    kind, waits = kind_of(operator), 0.0
    if kind == "product":
        waits = waves_of(operator)
    elif kind == "attention" and operator.operands:
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


def fit(terms: Tensor, us: Tensor, us_per_tflop: float, known: Mapping[int, float]) -> list[float]:
    """Coefficients with which the logarithms of all times are least off. Some are known, and no
    product is faster than the peak of the device. Of several starts, in each of which another term
    has most of the time, the best."""
    used = [bool(each) for each in (terms > 0).any(0)]
    alone = (us[:, None] / terms.clamp_min(1e-12)).quantile(0.25, 0)
    free = [i for i, there in enumerate(used) if there and i not in known]

    def off(coefficients: list[float]) -> float:
        if used[2] and coefficients[2] < us_per_tflop:
            return math.inf
        return float((terms @ terms.new_tensor(coefficients) / us).log().abs().sum())

    found = []
    for most in free:
        start = [float(c) * (1.0 if i == most else 0.1) * used[i] for i, c in enumerate(alone)]
        if used[2]:
            start[2] = max(start[2], us_per_tflop)
        for place, coefficient in known.items():
            start[place] = coefficient
        found.append(improved(start, off, free))
    return min(found, key=off)


def improved(
    coefficients: list[float], off: Callable[[list[float]], float], free: Sequence[int]
) -> list[float]:
    """Coefficients that are less off, each made larger or smaller by ever smaller steps."""
    best, least = coefficients, off(coefficients)
    for step in STEPS:
        before = math.inf
        while least < before:
            before = least
            for place, factor in product(free, (step, 1 / step)):
                other = [c * factor if i == place else c for i, c in enumerate(best)]
                if (now := off(other)) < least - 1e-9:
                    best, least = other, now
    return best


def laws_of(
    kernels: Mapping[str, list[tuple[tuple[float, ...], float]]], peak_tflops: float
) -> dict[str, list[float]]:
    """The law of each kind, from terms and microseconds of its kernels. A product begins and ends
    as a kernel that goes straight through memory does; large sums are read as fast; a convolution
    is a product, and what it takes beside."""
    laws: dict[str, list[float]] = {}
    for kind in sorted(kernels, key=lambda kind: (kind != "straight", kind != "product")):
        terms = torch.tensor([each for each, _ in kernels[kind]], dtype=torch.float64)
        us = torch.tensor([each for _, each in kernels[kind]], dtype=torch.float64)
        other, places = SHARED.get(kind, ("", ()))
        known = {place: laws[other][place] for place in places}
        laws[kind] = fit(terms, us, 1e6 / peak_tflops, known)
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
    checked: dict[str, float] = field(default_factory=dict)  # predicted of measured time, by step

    def us(
        self, moved: float, flop: float = 0.0, dtype: str = "", constants: Constants = CONSTANTS
    ) -> float:
        """The time of a kernel that would be, in one wave."""
        kind = "product" if flop else "straight"
        waves = 1.0 if flop else 0.0
        return us_of(self.laws, kind, (1.0, moved / 1e9, self.tflop(flop, dtype), waves))

    def of(self, operator: Operator, constants: Constants = CONSTANTS) -> float:
        """The time of an operator that is."""
        kernels, gb, _, waits = terms_of(operator)
        tflop = self.tflop(operator.flop, operator.dtype)
        return us_of(self.laws, kind_of(operator), (kernels, gb, tflop, waits))

    def tflop(self, flop: float, dtype: str) -> float:
        """As many TFLOP of the type that traces have as take the same time."""
        if not flop:
            return 0.0
        return flop / 1e12 * self.tflops[TIMED] / self.tflops.get(dtype, math.nan)

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


def read_rates(folder: Path) -> Rates:
    """The rates in the find_fusions.json of a folder of results; ToolError if there are none."""
    path = folder / "find_fusions.json" if folder.is_dir() else folder
    if not path.exists():
        raise ToolError(f"{path}: no such file; a run on a GPU writes one by --json")
    content = read_json(path)
    try:
        found = dict(content.get("rates") or content["rows"][0]["rates"])
        rates = (FittedRates if "laws" in found else Rates)(**found)
        positive = rates.gb_per_s, rates.least_us, *rates.tflops.values()
        if not all(0 < rate < math.inf for rate in positive) or not 0 <= rates.gap_us < math.inf:
            raise ValueError("no rates")
        if isinstance(rates, FittedRates):
            numbers = [number for kind in KINDS for number in rates.laws[kind]]
            numbers += rates.left_out.values()
            whole = len(numbers) == 4 * len(KINDS) + len(rates.left_out) and rates.left_out
            if not whole or not all(0 <= number < math.inf for number in numbers):
                raise ValueError("no laws")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ToolError(f"{path}: it has no rates as a run on a GPU writes them") from error
    return rates

"""What a device reaches: rates measured in the same run, and those of a device that is not at hand,
fitted to the kernels of traces that others recorded.

Each kind of kernel in such traces has a law: microseconds that it takes at least, and more for each
GB, for each TFLOP, and for what else its kind waits for; they stand in results/mi300x.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from fusion_lab.cli import ToolError
from fusion_lab.files import read_json
from fusion_lab.fusions.record import Operator
from fusion_lab.records import Positive
from fusion_lab.turns import compare_in_turns

# A kernel among others begins and ends in so many times the time of the least one, which repeats
# itself: from compiled steps, see dev/bench/find_fusions.py.
AMONG_OTHERS = 1.75
KINDS = ("straight", "strided", "sums", "norm", "softmax", "product", "convolution", "attention")
SHORT = 1024  # elements of a row that PyTorch's softmax keeps in registers
LOAD = 16  # bytes; where longer rows begin elsewhere, its softmax reads them three times
TILE = 256  # rows and columns of a block of a product
UNITS = 304  # blocks that an MI300X computes at once; elsewhere a wave takes longer
FITTED_TYPE = "bf16"  # the type of products of which there are traces
PRODUCTS = {  # type, size, and precision of float32
    "bf16": ("bfloat16", 8192, "highest"),
    "fp16": ("float16", 8192, "highest"),
    "TF32": ("float32", 8192, "high"),
    "fp32": ("float32", 4096, "highest"),
    "fp64": ("float64", 4096, "highest"),
}

NotNegative = Annotated[float, Meta(ge=0)]
Law = tuple[NotNegative, NotNegative, NotNegative, NotNegative]


@dataclass
class Rates:
    """Rates of a device: GB/s, microseconds of a kernel, and TFLOP/s by type."""

    device_name: str
    gb_per_s: Positive  # of a copy of 1 GiB, read and written
    least_us: Positive  # of the smallest copy, in a graph
    gap_us: NotNegative  # what a kernel takes in a graph beyond what the profiler says
    tflops: dict[str, Positive] = field(default_factory=dict)  # of a large product

    def in_trace(self) -> Rates:
        """The same where a kernel takes what the profiler says of it, and nothing beyond."""
        return replace(self, least_us=self.least_us - self.gap_us, gap_us=0.0)

    def us(self, moved: float, flop: float = 0.0, dtype: str = "") -> float:
        """The time of a kernel that moves so many bytes, or computes a product; nan for products of
        a type that has no rate."""
        memory_us = AMONG_OTHERS * self.least_us + moved / self.gb_per_s / 1e3
        if not flop:
            return memory_us
        product_us = flop / self.tflops.get(dtype, math.nan) / 1e6
        return product_us if math.isnan(product_us) else max(memory_us, product_us)

    def of(self, operator: Operator) -> float:
        """The time of an operator."""
        return self.us(operator.moved, operator.flop, operator.dtype)


NO_RATES = Rates("", math.inf, 0.0, 0.0)  # nothing takes time


def measure_rates() -> Rates:
    """The rates of this GPU; some seconds."""

    def product(dtype: str, size: int, precision: str) -> Callable[[], None]:
        a, b = torch.randn(2, size, size, device="cuda").to(getattr(torch, dtype))

        def multiply() -> None:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            torch.mm(a, b)
            torch.set_float32_matmul_precision(before)

        return multiply

    def fastest(sides: dict[str, Callable]) -> dict[str, float]:
        return {side: min(us) for side, us in compare_in_turns(sides, turns=5).us.items()}

    source = torch.ones(2**27, device="cuda")
    target = torch.empty_like(source)
    # negated, as the driver does a copy_ in a way of its own
    small = partial(torch.neg, source[:1024], out=target[:1024])
    us = fastest({"copy": partial(torch.neg, source, out=target), "least": small})
    us |= fastest({name: product(*how) for name, how in PRODUCTS.items()})  # hot, so apart
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(20):
            small()
        torch.cuda.synchronize()
    shown = [event.device_time_total for event in profile.events() if event.device_time_total]
    gap = max(0.0, us["least"] - statistics.median(shown)) if shown else 0.0
    tflops = {name: 2 * size**3 / us[name] / 1e6 for name, (_, size, _) in PRODUCTS.items()}
    gb_per_s = source.nbytes * 2 / us["copy"] / 1e3
    return Rates(torch.cuda.get_device_name(), gb_per_s, us["least"], gap, tflops)


# --- of a device that is not at hand


def kind_of(operator: Operator) -> str:
    """The law that an operator follows."""
    name = operator.name
    if operator.dtype:
        kinds = {"convolution": "convolution", "scaled_dot": "attention"}
        return next((kind for part, kind in kinds.items() if part in name), "product")
    if operator.access == "sums":
        return next((kind for kind in ("norm", "softmax") if kind in name), "sums")
    whole = operator.kind == "unknown" or name.startswith(("_foreach", "_fused"))
    return "straight" if whole else operator.access


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
    kind = kind_of(operator)
    waits = 0.0
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


def us_of(laws: Mapping[str, Law], kind: str, terms: tuple[float, ...]) -> float:
    """What a kernel takes by the law of its kind."""
    return sum(c * term for c, term in zip(laws[kind], terms, strict=True))


@dataclass
class FittedRates(Rates):
    """Rates that are laws, and how far off they were for traces from which they did not come."""

    laws: dict[str, Law] = field(default_factory=dict)
    left_out: dict[str, Positive] = field(default_factory=dict)  # predicted of own time, by model
    checked: dict[str, Positive] = field(default_factory=dict)  # predicted of measured, by step

    def us(self, moved: float, flop: float = 0.0, dtype: str = "") -> float:
        """The time of a kernel that would be, in one wave."""
        kind = "product" if flop else "straight"
        waves = 1.0 if flop else 0.0
        return us_of(self.laws, kind, (1.0, moved / 1e9, self.tflop(flop, dtype), waves))

    def of(self, operator: Operator) -> float:
        """The time of an operator that is."""
        kernels, gb, _, waits = terms_of(operator)
        tflop = self.tflop(operator.flop, operator.dtype)
        return us_of(self.laws, kind_of(operator), (kernels, gb, tflop, waits))

    def tflop(self, flop: float, dtype: str) -> float:
        """As many TFLOP of the type that traces have as take the same time."""
        if not flop:
            return 0.0
        return flop / 1e12 * self.tflops[FITTED_TYPE] / self.tflops.get(dtype, math.nan)


def read_rates(folder: Path) -> Rates:
    """The rates in the find_fusions.json of a folder of results; ToolError if there are none."""
    path = folder / "find_fusions.json" if folder.is_dir() else folder
    if not path.exists():
        raise ToolError(f"{path}: no such file; a run on a GPU writes one by --json")
    content = read_json(path)
    try:
        fields = content.get("rates") or content["rows"][0]["rates"]
        rates = msgspec.convert(fields, FittedRates if "laws" in fields else Rates)
    except (KeyError, IndexError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise ToolError(f"{path}: no rates as a run on a GPU writes them ({error})") from error
    if isinstance(rates, FittedRates) and not (rates.laws.keys() >= {*KINDS} and rates.left_out):
        raise ToolError(f"{path}: no rates: a law, or what they were held against, is missing")
    return rates

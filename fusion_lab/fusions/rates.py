"""What a device reaches, measured in the same run: copies, products of each type, and how long a
kernel takes that does next to nothing; and the constants of all predictions."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusion_lab.fusions.record import Operator


@dataclass(frozen=True)
class Constants:
    """All that predictions take from elsewhere than the step and its device."""

    # A kernel among others begins and ends in so many times the time of the least one, which
    # repeats itself: from compiled steps, see dev/bench/find_fusions.py.
    among_others: float = 1.75
    # A block holds a row of so many elements in its registers: 1,024 threads, four each. Sums over
    # longer rows are complete when their kernel has ended.
    longest_row: int = 4096
    # Along columns a block adds up so many, as its threads lie along the rows.
    longest_column: int = 64
    most: int = 64  # operators that inductor makes one kernel: its max_fusion_size
    moves: int = 2  # times that an element goes elsewhere before it must lie in memory
    attention: float = 0.5  # of the rate of a large product, which FlashAttention reaches


CONSTANTS = Constants()


@dataclass
class Rates:
    """Rates of a device: GB/s, microseconds of a kernel, and TFLOP/s by type."""

    device_name: str
    gb_per_s: float  # of a copy of 1 GiB, read and written
    least_us: float  # of the smallest copy, in a graph
    gap_us: float  # what a kernel takes in a graph beyond what the profiler says
    tflops: dict[str, float] = field(default_factory=dict)  # of a large product

    def in_trace(self) -> Rates:
        """The same where a kernel takes what the profiler says of it, and nothing beyond."""
        return replace(self, least_us=self.least_us - self.gap_us, gap_us=0.0)

    def us(
        self, moved: float, flop: float = 0.0, dtype: str = "", constants: Constants = CONSTANTS
    ) -> float:
        """The time of a kernel that moves so many bytes, or computes a product; nan for products of
        a type that has no rate."""
        least = constants.among_others * self.least_us
        rate = self.tflops.get(dtype, math.nan) if flop else math.inf
        products = flop / rate / 1e6
        return (
            products if math.isnan(products) else max(least + moved / self.gb_per_s / 1e3, products)
        )

    def of(self, operator: Operator, constants: Constants = CONSTANTS) -> float:
        """The time of an operator."""
        return self.us(operator.moved, operator.flop, operator.dtype, constants)

    def remarks(self, operators: Iterable[Operator]) -> list[str]:
        """What is to be said of these times."""
        return []


PRODUCTS = {  # type, size, and precision of float32
    "bf16": ("bfloat16", 8192, "highest"),
    "fp16": ("float16", 8192, "highest"),
    "TF32": ("float32", 8192, "high"),
    "fp32": ("float32", 4096, "highest"),
    "fp64": ("float64", 4096, "highest"),
}
NO_RATES = Rates("", math.inf, 0.0, 0.0)  # nothing takes time


def measure_rates() -> Rates:
    """The rates of this GPU; some seconds."""
    import torch

    from fusion_lab.turns import compare_in_turns

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
    sides = {"copy": partial(torch.neg, source, out=target), "least": small}
    us = fastest(sides)
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

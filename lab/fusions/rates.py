"""What a device reaches, measured in the same run: copies from small to large, a matrix product,
and the time between two kernels."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lab.cli import ToolError
from lab.files import read_json

if TYPE_CHECKING:
    import torch

COUNTS = [2**n for n in range(10, 29, 2)]  # numbers that a copy reads, 4 bytes each


@dataclass
class Rates:
    """Times in microseconds of copies that move so many bytes, read and written."""

    device_name: str
    copy_bytes: list[int]
    copy_us: list[float]
    gemm_tflops: float
    attention_tflops: list[float]  # forward, backward
    gap_us: float  # what a kernel takes in a graph beyond what the profiler says

    @property
    def least_us(self) -> float:
        """The time of a kernel that does next to nothing."""
        return min(self.copy_us)

    @property
    def gb_per_s(self) -> float:
        """The rate of the largest copy."""
        return self.copy_bytes[-1] / self.copy_us[-1] / 1e3

    def us(self, moved: float, launch: bool = True) -> float:
        """The time to move bytes: that of a copy of as many, in a kernel of its own or at the rate
        alone."""
        if not launch:
            return moved / self.gb_per_s / 1e3
        sizes, times = self.copy_bytes, self.copy_us
        if moved <= sizes[0]:
            return times[0]
        at = min(bisect_left(sizes, moved), len(sizes) - 1)
        low, high = (sizes[at - 1], times[at - 1]), (sizes[at], times[at])
        if moved > sizes[-1]:
            return high[1] * moved / high[0]
        part = (moved - low[0]) / (high[0] - low[0])
        return low[1] + part * (high[1] - low[1])


def read_rates(folder: Path) -> Rates:
    """The rates in the find_fusions.json of a folder of results; ToolError if there are none."""
    path = folder / "find_fusions.json" if folder.is_dir() else folder
    if not path.exists():
        raise ToolError(f"{path}: no such file; rates are in what a run on a GPU writes by --json")
    content = read_json(path)
    found, rows = content.get("rates"), content.get("rows")
    if found is None and isinstance(rows, list) and rows and isinstance(rows[0], dict):
        found = rows[0].get("rates")
    try:
        rates = Rates(**found)
        numbers = [*rates.copy_bytes, *rates.copy_us, rates.gemm_tflops]
        numbers += rates.attention_tflops
        good = len(rates.copy_bytes) == len(rates.copy_us) > 1 and rates.gap_us >= 0
        if not good or not all(0 < n < math.inf for n in numbers):
            raise ValueError
        if sorted(rates.copy_bytes) != rates.copy_bytes:
            raise ValueError
    except (TypeError, ValueError) as error:
        raise ToolError(f"{path}: it has no rates as a run on a GPU writes them") from error
    return rates


def graph_us(work: Callable[[], object], repeats: int) -> float:
    """Microseconds of one call in a graph of several, the shortest of some replays."""
    import torch

    from lab.profile.ceilings import best_seconds

    device = torch.device("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            work()
    return 1e6 * best_seconds(graph.replay, device, 10, 0.2) / repeats


def measure_rates(dtype: torch.dtype) -> Rates:
    """The rates of this GPU; about two seconds."""
    import torch

    source = torch.ones(COUNTS[-1], device="cuda")
    target = torch.empty_like(source)
    # no copy_, which the driver does in a way of its own
    times = [
        graph_us(lambda n=n: torch.neg(source[:n], out=target[:n]), max(5, min(200, 2**27 // n)))
        for n in COUNTS
    ]
    small = source[: COUNTS[0]]
    alone = graph_us(lambda: small.mul_(1), 200)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(20):
            small.mul_(1)
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_time_total and "emset" not in e.name]
    shown = sorted(e.device_time_total for e in kernels)[len(kernels) // 2] if kernels else alone
    a, b = torch.randn(2, 8192, 8192, device="cuda").to(dtype)
    gemm = graph_us(lambda: torch.mm(a, b), 2)
    name = torch.cuda.get_device_name()
    q = torch.randn(4, 16, 2048, 64, device="cuda").to(dtype).requires_grad_()
    products = 4 * 4 * 16 * 2048**2 * 64  # FLOP of both
    with torch.no_grad():
        attend = torch.nn.functional.scaled_dot_product_attention
        forward = graph_us(lambda: attend(q, q, q), 4)
    both = graph_us(lambda: attend(q, q, q).sum().backward(), 4)
    attention = [products / forward / 1e6, 2.5 * products / (both - forward) / 1e6]
    moved = [8 * n for n in COUNTS]
    return Rates(name, moved, times, 2 * 8192**3 / gemm / 1e6, attention, max(0.0, alone - shown))

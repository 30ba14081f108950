"""What a device reaches, measured in the same run: copies, products, and how long a kernel takes
that does next to nothing."""

from __future__ import annotations

import math
import statistics
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lab.cli import ToolError
from lab.files import read_json

if TYPE_CHECKING:  # where it is missing, --help of the programs works
    import torch

# A kernel among others begins and ends in so many times the time of the least one, which repeats
# itself: of the compiled steps in results/h100/find_fusions.json
AMONG_OTHERS = 1.75


@dataclass
class Rates:
    """Rates of a device: GB/s, TFLOP/s, and microseconds of a kernel."""

    device_name: str
    gb_per_s: float  # of a copy of 1 GiB, read and written
    least_us: float  # of the smallest copy, in a graph
    gap_us: float  # what a kernel takes in a graph beyond what the profiler says
    gemm_tflops: float  # of a large product

    def us(self, moved: float, flop: float = 0.0) -> float:
        """The time of a kernel that moves so many bytes, or computes a product."""
        least = AMONG_OTHERS * self.least_us
        return max(least + moved / self.gb_per_s / 1e3, flop / self.gemm_tflops / 1e6)


NO_RATES = Rates("", math.inf, 0.0, 0.0, math.inf)  # nothing takes time


def read_rates(folder: Path) -> Rates:
    """The rates in the find_fusions.json of a folder of results; ToolError if there are none."""
    path = folder / "find_fusions.json" if folder.is_dir() else folder
    if not path.exists():
        raise ToolError(f"{path}: no such file; a run on a GPU writes one by --json")
    content = read_json(path)
    try:
        found = content.get("rates") or content["rows"][0]["rates"]
        rates = Rates(**{rate.name: found[rate.name] for rate in fields(Rates)})
        name, copy, least, gap, gemm = astuple(rates)
        positive = all(0 < rate < math.inf for rate in (copy, least, gemm))
        if not (isinstance(name, str) and positive and 0 <= gap < math.inf):
            raise ValueError("no rates")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ToolError(f"{path}: it has no rates as a run on a GPU writes them") from error
    return rates


def measure_rates(dtype: torch.dtype) -> Rates:
    """The rates of this GPU; some seconds."""
    import torch

    from lab.turns import compare_in_turns

    source = torch.ones(2**27, device="cuda")
    target = torch.empty_like(source)
    # negated, as the driver does a copy_ in a way of its own
    small = partial(torch.neg, source[:1024], out=target[:1024])
    a, b = torch.randn(2, 8192, 8192, device="cuda").to(dtype)
    turns = compare_in_turns(
        {
            "copy": partial(torch.neg, source, out=target),
            "least": small,
            "product": lambda: torch.mm(a, b),
        },
        turns=5,
    )
    us = {side: min(times) for side, times in turns.us.items()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(20):
            small()
        torch.cuda.synchronize()
    shown = [event.device_time_total for event in profile.events() if event.device_time_total]
    gap = max(0.0, us["least"] - statistics.median(shown)) if shown else 0.0
    gb_per_s, gemm = source.nbytes * 2 / us["copy"] / 1e3, 2 * 8192**3 / us["product"] / 1e6
    return Rates(torch.cuda.get_device_name(), gb_per_s, us["least"], gap, gemm)

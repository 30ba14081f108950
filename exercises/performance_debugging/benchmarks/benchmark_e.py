"""LayerNorm, benchmark e: one kernel made by torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor

from exercises.performance_debugging.benchmarks.common import (
    Benchmark,
    Measured,
    Operation,
    report,
    timed,
)


@torch.compile
def operation(x: Tensor) -> Tensor:
    """LayerNorm of x [rows, channels]."""
    centred = x - x.mean(1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-5)


def measure(operation: Operation, x: Tensor) -> Measured:
    """Warm up, then the first call and a later one."""
    operation(x)  # compiles for seconds, and what is called the first call comes after it
    return timed(operation, x)


BENCHMARK = Benchmark(operation, measure)

if __name__ == "__main__":
    report(BENCHMARK, __file__)

"""LayerNorm, benchmark c: the loop is compiled too, so that Python does not count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from exercises.performance_debugging.benchmarks.common import (
    CALLS,
    Benchmark,
    Measured,
    Operation,
    report,
    seconds_of,
)


def operation(x: Tensor) -> Tensor:
    """LayerNorm of x [rows, channels]."""
    return F.layer_norm(x, x.shape[1:])


@torch.compile
def loop(x: Tensor) -> Tensor:
    for _ in range(CALLS):
        operation(x)  # nobody reads the result, so the compiler leaves the call out
    return x


def measure(_: Operation, x: Tensor) -> Measured:
    """The first loop and the second one, per call."""
    first, later = (seconds_of(lambda: loop(x)) for _ in range(2))
    return Measured(first, later / CALLS)


BENCHMARK = Benchmark(operation, measure)

if __name__ == "__main__":
    report(BENCHMARK, __file__)

"""LayerNorm, benchmark g: beside other work, by the device's own clock."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from exercises.performance_debugging.benchmarks.common import (
    CALLS,
    Benchmark,
    Measured,
    Operation,
    on_gpu,
    report,
    seconds_of,
    timed,
)


@functools.cache
def side_stream() -> torch.cuda.Stream | None:
    """The stream beside that of the events; None on a CPU, which has one queue only."""
    return torch.cuda.Stream() if on_gpu() else None


def operation(x: Tensor) -> Tensor:
    """LayerNorm of x [rows, channels]."""
    with torch.cuda.stream(side_stream()):
        return F.layer_norm(x, x.shape[1:])


def measure(operation: Operation, x: Tensor) -> Measured:
    """The first call, and the time between two events around many."""
    if not on_gpu():
        return timed(operation, x)
    first = seconds_of(lambda: operation(x))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        operation(x)
    end.record()
    end.synchronize()  # of the events' stream; the work is on the other one
    return Measured(first, begin.elapsed_time(end) / 1e3 / CALLS)


BENCHMARK = Benchmark(operation, measure)

if __name__ == "__main__":
    report(BENCHMARK, __file__)

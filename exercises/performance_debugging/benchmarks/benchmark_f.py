"""LayerNorm, benchmark f: the first call apart, then many on a large tensor."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor

from exercises.performance_debugging.benchmarks.common import Benchmark, report, timed


@functools.cache  # a tensor is known by its identity, so every call but the first is a look-up
def operation(x: Tensor) -> Tensor:
    """LayerNorm of x [rows, channels]."""
    return F.layer_norm(x, x.shape[1:])


BENCHMARK = Benchmark(operation, timed)

if __name__ == "__main__":
    report(BENCHMARK, __file__)

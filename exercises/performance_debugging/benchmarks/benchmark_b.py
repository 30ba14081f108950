"""LayerNorm, benchmark b: the first call apart, then many on a large tensor."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from exercises.performance_debugging.benchmarks.common import Benchmark, report, timed


def operation(x: Tensor) -> Tensor:
    """LayerNorm of x [rows, channels]."""
    return F.layer_norm(x, x.shape[1:])


BENCHMARK = Benchmark(operation, timed)  # nothing to hide

if __name__ == "__main__":
    report(BENCHMARK, __file__)

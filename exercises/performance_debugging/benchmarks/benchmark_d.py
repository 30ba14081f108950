"""LayerNorm, benchmark d: the first call apart, then many on a large tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from exercises.performance_debugging.benchmarks.common import Benchmark, report, timed


def operation(x: Tensor) -> Tensor:
    """LayerNorm of x [rows, channels]."""
    return F.layer_norm(x, x.shape[1:])


# "in float32" says its line, which counts four bytes for each number
BENCHMARK = Benchmark(operation, timed, dtype=torch.bfloat16)

if __name__ == "__main__":
    report(BENCHMARK, __file__)

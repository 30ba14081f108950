"""What the benchmarks here share: what one is, its input, an honest clock, and the line it prints.

The input is x [rows, 1024]; LayerNorm over the last dimension must read and write it once. A CPU
works with one thread, so that other programs matter less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

CHANNELS, CALLS, TURNS = 1024, 20, 3
Operation = Callable[[Tensor], Tensor]


class Measured(NamedTuple):
    """What a benchmark says of its operation, in seconds."""

    first: float  # the first call, with all that happens only once
    seconds: float  # a call after it


@dataclass(frozen=True)
class Benchmark:
    """LayerNorm of x [rows, 1024] in float32, as its author wants it to be seen."""

    operation: Operation
    measure: Callable[[Operation, Tensor], Measured]
    rows: tuple[int, int] = (7168, 65536)  # on a CPU, on a GPU
    dtype: torch.dtype = torch.float32  # of x

    def make_input(self) -> Tensor:
        """Random numbers, on a GPU if there is one."""
        if not on_gpu():
            torch.set_num_threads(1)
        device = "cuda" if on_gpu() else "cpu"
        return torch.randn(self.rows[on_gpu()], CHANNELS, device=device).to(self.dtype)

    def rate(self, seconds: float) -> float:
        """GB/s of reading x and writing the result, in float32."""
        return 2 * 4 * self.rows[on_gpu()] * CHANNELS / seconds / 1e9


def on_gpu() -> bool:
    return torch.cuda.is_available()


def synchronize() -> None:
    """Wait until the device has done all that it was asked for, on all streams."""
    if on_gpu():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Time of some work, the device idle before and after."""
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begin


def repeated(operation: Operation, x: Tensor) -> Callable[[], None]:
    """CALLS calls; on a GPU they are one graph, so that the host does not count."""

    def loop() -> None:
        for _ in range(CALLS):
            operation(x)

    if not on_gpu():
        return loop
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop()
    return graph.replay


def timed(operation: Operation, x: Tensor) -> Measured:
    """The first call, and the median of a later one."""
    first = seconds_of(lambda: operation(x))
    work = repeated(operation, x)
    work()
    return Measured(first, statistics.median(seconds_of(work) for _ in range(TURNS)) / CALLS)


def described(benchmark: Benchmark, claim: Measured) -> str:
    """What the benchmark says, in a line."""
    return (
        f"LayerNorm of {benchmark.rows[on_gpu()]} x {CHANNELS} in float32: "
        f"{1e6 * claim.seconds:.1f} us, {benchmark.rate(claim.seconds):.1f} GB/s, "
        f"first call {1e3 * claim.first:.1f} ms"
    )


def report(benchmark: Benchmark, file: str) -> None:
    """Measure as the benchmark does, and print it."""
    claim = benchmark.measure(benchmark.operation, benchmark.make_input())
    print(f"{Path(file).stem}: {described(benchmark, claim)}")

"""What a device reaches at best, measured: the rate of a large GEMM and of a large copy."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion_lab.host import seconds

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Ceilings:
    """What this device reached in the precision of the run."""

    precision: str
    gemm_size: int
    gemm_tflops: float | None  # None where it was not measured, or nothing computes
    copy_bytes: int
    copy_gb_per_s: float  # read and written

    def __str__(self) -> str:
        """Both ceilings, as reports have them: a line for each."""
        gemm = f"{self.gemm_tflops:.3f} TFLOP/s ({self.precision}, size {self.gemm_size})"
        copy = f"{self.copy_gb_per_s:.1f} GB/s (read and written)"
        return f"GEMM ceiling: {gemm}\nCopy ceiling: {copy}"

    @property
    def ridge(self) -> float:
        """FLOP per byte at which both ceilings meet, infinite where there is one only."""
        return 1e3 * (self.gemm_tflops or math.inf) / self.copy_gb_per_s

    def roof(self, flop_per_byte: float) -> float:
        """TFLOP/s that can be reached at this intensity: the lower of GEMM throughput and bandwidth
        x intensity."""
        return min(self.gemm_tflops or math.inf, self.copy_gb_per_s * flop_per_byte / 1e3)


def best_seconds(
    work: Callable[[], object], device: torch.device, repetitions: int, budget: float
) -> float:
    """The shortest of several runs after a warm-up; no more when `budget` seconds are over."""
    work()
    best, end = float("inf"), time.perf_counter() + budget
    for _ in range(repetitions):
        best = min(best, seconds(work, device))
        if time.perf_counter() > end:
            break
    return best


def measure_ceilings(args: argparse.Namespace, device: torch.device) -> Ceilings:
    """GEMM throughput in the precision of the run and copy bandwidth; about a second."""
    import torch

    gpu = device.type == "cuda"
    dtype = getattr(torch, args.amp_dtype) if args.use_amp else torch.float32
    fastest, fastest_size = 0.0, 0
    for size in (2048, 4096, 8192) if gpu else (256, 512, 1024):
        a, b = torch.randn(2, size, size, device=device).to(dtype)
        out = torch.empty_like(a)
        best = best_seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, 10, 0.2)
        if (tflops := 2 * size**3 / best / 1e12) > fastest:
            fastest, fastest_size = tflops, size
        if not gpu and best > 0.05:
            break  # the next would take eight times as long
    source = torch.ones((2**30 if gpu else 2**26) // 4, device=device)
    target = torch.empty_like(source)
    gb_per_s = 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device, 20, 0.3) / 1e9
    precision = args.amp_dtype if args.use_amp else f"float32, {args.matmul_precision}"
    return Ceilings(precision, fastest_size, fastest, source.nbytes, gb_per_s)

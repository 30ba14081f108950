#!/usr/bin/env python3
"""TinyLlama V3, stage 3: the same kernels as ever, and a report that should make you doubt.

Takes the arguments of tiny_llama_v3.py. What differs from it is below.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import tiny_llama_v3 as v3

v3.SCRIPT, v3.__file__ = Path(__file__).stem, __file__  # its results bear this name


class HostTime(float):
    """A reading of the host's clock in seconds, in the place of an event in the GPU's stream."""

    def elapsed_time(self, later: HostTime) -> float:
        """Milliseconds, as of two events."""
        return 1e3 * (later - self)

    def synchronize(self) -> None:
        """The host is where its clock is."""


class Trainer(v3.Trainer):
    """Reads the clock at the end of a phase, whether the GPU has come that far or not, and takes
    the time from the first mark to the last for that of the steps."""

    def mark(self, phase: str) -> None:
        self.marks.append((phase, HostTime(time.perf_counter())))

    def take(self, steps: int, measured: bool = True) -> float:
        ms = super().take(steps, measured)
        if measured:
            (_, first), *_, (_, last) = self.marks
            ms = self.turns_ms[-1] = first.elapsed_time(last) / steps
        return ms


v3.Trainer = Trainer

if __name__ == "__main__":
    sys.exit(v3.main())

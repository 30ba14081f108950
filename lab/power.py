"""What a GPU draws while a run takes steps: readings of its power and clock."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lab.cli import ToolError

PERIOD = 0.05  # seconds between two readings
SETTLE = 2.0  # seconds until a reading is one of this turn alone


def reading() -> tuple[float, float]:
    """What the GPU draws now in watts, and its clock in MHz.

    ToolError where these cannot be read.
    """
    import torch

    if not torch.cuda.is_available():
        raise ToolError("power can be read on a GPU alone, and there is none here", status=4)
    try:
        return torch.cuda.power_draw() / 1e3, torch.cuda.clock_rate()
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        needed = "nvidia-ml-py or amdsmi is needed"
        raise ToolError(f"power cannot be read here: {error} ({needed})", status=4) from error


def means(samples: Sequence[tuple[float, float, float]], start: float) -> tuple[float, float]:
    """The means of (seconds, watts, MHz) readings from SETTLE seconds on: watts and MHz."""
    settled = [values for moment, *values in samples if moment >= start + SETTLE]
    if not settled:
        what = "no reading came after the first seconds of a turn"
        raise ToolError(f"{what}: raise --seconds", status=1)
    power, clock = map(statistics.fmean, zip(*settled, strict=True))
    return power, clock


def take_with_readings(run, steps: int) -> tuple[float, float, float]:
    """Take so many steps of a run.

    Returns mean power in watts, mean clock in MHz and milliseconds per step.
    """
    samples: list[tuple[float, float, float]] = []
    done = threading.Event()

    def read() -> None:
        while not done.wait(PERIOD):
            samples.append((time.monotonic(), *reading()))

    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        try:
            turn = run.take(steps)
        finally:
            done.set()
        reader.result()  # raises what a reading did
    return *means(samples, start), turn.step_ms

"""The search for the largest batch size that fits: it doubles, and then halves the gap."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from lab.cli import ToolError
from lab.study import Part, read_rows
from lab.turns import in_turns

ROWS = {"keys": ("batch_size", "script", "argv"), "measured": ("batch_ms", "turns_ms", "peak_mb")}


def memory_mb(device: str) -> float:
    """Memory of the device, that of the machine for a CPU."""
    if device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e6
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 1e6


def next_size(
    rows: Sequence[dict], limit_mb: float, most: int, host_mb: float | None = None
) -> int | None:
    """The batch size to measure after these rows, up to `most` and `limit_mb`; None at the end.

    On a host with `host_mb` a size that would take more than that by its number of samples counts
    as too large.
    """
    if any(row.get("status") == "failed" for row in rows):
        return None
    fitting = [row for row in rows if "status" not in row and row["peak_mb"] <= limit_mb]
    good, peak = max(((row["batch_size"], row["peak_mb"]) for row in fitting), default=(0, 0.0))
    bad = min((row["batch_size"] for row in rows if row not in fitting), default=None)
    while good < most:
        step = 1 << max(0, good.bit_length() - 4)  # a power of two, about an eighth
        size = min(max(1, 2 * good), most) if bad is None else (good + bad) // 2 // step * step
        if not good < size < (bad or size + 1):
            return None
        if host_mb is None or not good or peak * size / good <= host_mb:
            return size
        bad = size
    return None


def search(path: Path, script: str, argv: Sequence[str], rounds: int, **limits) -> Iterator[Part]:
    """Parts of the study; which comes next follows from the rows that are there."""
    unfinished = path.with_suffix(".partial.json")
    while size := next_size(read_rows(path, **ROWS) or read_rows(unfinished, **ROWS), **limits):
        side = (script, [*argv, "--batch-size", str(size)])
        yield {"batch_size": size}, partial(measured_alone, side, rounds)


def measured_alone(side: tuple[str, list[str]], rounds: int) -> dict:
    """The row of a batch size; ToolError where peak memory cannot be told."""
    row = in_turns({"": side}, rounds)[""]
    if "status" not in row and row["peak_mb"] is None:
        reason = "graphs of torch.compile share their memory, so no peak is known"
        raise ToolError(f"{reason}: use another mode")
    return row

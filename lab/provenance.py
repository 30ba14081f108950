"""What a result was measured with: commit, driver, clocks, power limit, and whether the GPU
throttled meanwhile; and what a GPU draws while a run takes steps.

Each figure is {"value", "unit", "source"}, or {"value": None, "reason"} where it cannot be read.
Of these nothing raises because a tool is missing.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

from lab.cli import ToolError
from lab.files import ROOT

SMI = {  # figures of `nvidia-smi -q -x`, and where newer and older drivers have them
    "sm_clock": ("clocks/sm_clock",),
    "memory_clock": ("clocks/mem_clock",),
    "power_limit": ("gpu_power_readings/current_power_limit", "power_readings/power_limit"),
    "temperature": ("temperature/gpu_temp",),
}


def figure(read: Callable[[], tuple[object, str | None]], source: str) -> dict:
    """Value and unit that a function reads, or why it cannot."""
    try:
        value, unit = read()
    except Exception as error:  # of whatever library or tool
        return unknown(error, source)
    return {"value": value, "unit": unit, "source": source}


def unknown(error: Exception, source: str) -> dict:
    """No figure, and why."""
    reason = str(error).strip().partition("\n")[0]
    return {"value": None, "reason": f"{source}: {type(error).__name__}: {reason}"}


def output_of(*command: str) -> str:
    """What a command prints; an error if it is missing, fails, or takes a minute."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip() or f"status {done.returncode}")
    return done.stdout


def commit() -> dict[str, dict]:
    """The commit of this checkout and whether files differ from it.

    SOURCE_COMMIT where a copy has no history.
    """
    if given := os.environ.get("SOURCE_COMMIT"):
        reason = "SOURCE_COMMIT names a commit, not the state of its files"
        dirty = {"value": None, "reason": reason}
        return {"commit": figure(lambda: (given, None), "SOURCE_COMMIT"), "dirty": dirty}

    def head() -> tuple[str, None]:
        return output_of("git", "rev-parse", "HEAD").strip(), None

    def changed() -> tuple[bool, None]:
        return bool(output_of("git", "status", "--porcelain").strip()), None

    return {"commit": figure(head, "git"), "dirty": figure(changed, "git status")}


def this_gpu() -> str:
    """The GPU that PyTorch uses, as nvidia-smi wants it named."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def smi() -> tuple[str, ElementTree.Element]:
    """Driver and readings of the GPU."""
    log = ElementTree.fromstring(output_of("nvidia-smi", "-q", "-x", "-i", this_gpu()))
    return log.findtext("driver_version"), log.find("gpu")


def quantity(text: str | None) -> tuple[float, str]:
    """'1980 MHz' -> 1980.0, 'MHz'."""
    value, unit = (text or "nothing here").split()
    return float(value), unit


def readings() -> dict[str, dict]:
    """Driver, clocks, power limit and temperature.

    On AMD's GPUs what PyTorch reads through amdsmi.
    """
    import torch

    try:
        driver, gpu = smi()
    except Exception as error:
        missing = unknown(error, "nvidia-smi")
        clock = figure(lambda: (torch.cuda.clock_rate(), "MHz"), "torch.cuda.clock_rate")
        warmth = figure(lambda: (torch.cuda.temperature(), "C"), "torch.cuda.temperature")
        return dict.fromkeys(("driver", *SMI), missing) | {"sm_clock": clock, "temperature": warmth}
    found = {"driver": figure(lambda: (driver, None), "nvidia-smi")}
    for name, places in SMI.items():
        text = next(filter(None, map(gpu.findtext, places)), None)
        found[name] = figure(lambda text=text: quantity(text), "nvidia-smi")
    return found


def provenance() -> dict[str, dict]:
    """Commit, and what the GPU says of itself now."""
    return commit() | readings()


def throttled_us() -> dict[str, float]:
    """Microseconds that the GPU has been slowed down for each reason, since its driver started."""
    counters = next(part for part in smi()[1].iter() if part.tag.endswith("_reasons_counters"))
    return {part.tag.removeprefix(f"{counters.tag}_"): quantity(part.text)[0] for part in counters}


def joules() -> float:
    """Energy that the GPU has taken since the driver was loaded."""
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(this_gpu())
    return pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3


@contextlib.contextmanager
def watched() -> Iterator[dict[str, dict]]:
    """A dictionary that has, after the block, how long the GPU throttled in it and why, power and
    temperature."""
    found: dict[str, dict] = {}
    before = figure(lambda: (throttled_us(), "us"), "nvidia-smi")
    energy = figure(lambda: (joules(), "J"), "NVML")
    start = time.monotonic()
    try:
        yield found
    finally:
        seconds = time.monotonic() - start

        def lost() -> tuple[dict[str, float], str]:
            now = throttled_us()
            return {name: us - before["value"][name] for name, us in now.items()}, "us"

        found["seconds"] = figure(lambda: (seconds, "s"), "time.monotonic")
        found["throttled"] = figure(lost, "nvidia-smi") if before["value"] is not None else before
        mean = figure(lambda: ((joules() - energy["value"]) / seconds, "W"), "NVML")
        found["mean_power"] = mean if energy["value"] is not None else energy
        found["temperature"] = readings()["temperature"]


# --- power, while a run takes steps

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

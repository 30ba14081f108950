"""What a result was measured with: commit, driver, clocks, power limit, and whether the GPU
throttled meanwhile.

Readings are texts as the tools say them, with their units. Of what cannot be read there is the
reason; nothing raises because a tool is missing.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from xml.etree import ElementTree

from fusion_lab.files import ROOT

SMI = {  # readings of `nvidia-smi -q -x`, and where newer and older drivers have them
    "driver": ("driver_version",),
    "sm_clock": ("gpu/clocks/sm_clock",),
    "memory_clock": ("gpu/clocks/mem_clock",),
    "power_limit": (
        "gpu/gpu_power_readings/current_power_limit",
        "gpu/power_readings/power_limit",
    ),
    "temperature": ("gpu/temperature/gpu_temp",),
}


def read_or_reason(read: Callable[[], object]) -> object:
    """What a function reads, or why it cannot, in a line."""
    try:
        return read()
    except Exception as error:  # of whatever library or tool
        return f"not read: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def output_of(*command: str) -> str:
    """What a command prints; an error if it is missing, fails, or takes a minute."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip() or f"status {done.returncode}")
    return done.stdout


def commit() -> dict[str, object]:
    """The commit of this checkout and whether files differ from it. SOURCE_COMMIT where a copy has
    no history."""
    if given := os.environ.get("SOURCE_COMMIT"):
        return {"commit": given, "dirty": "not read: SOURCE_COMMIT names no state of files"}
    return {
        "commit": read_or_reason(lambda: output_of("git", "rev-parse", "HEAD").strip()),
        "dirty": read_or_reason(lambda: bool(output_of("git", "status", "--porcelain"))),
    }


def this_gpu() -> str:
    """The GPU that PyTorch uses, as nvidia-smi wants it named."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def smi() -> tuple[dict[str, str | None], dict[str, int]]:
    """Readings of the GPU, and for how many microseconds it was slowed down for each reason since
    its driver started."""
    log = ElementTree.fromstring(output_of("nvidia-smi", "-q", "-x", "-i", this_gpu()))
    found = {name: next(filter(None, map(log.findtext, at)), None) for name, at in SMI.items()}
    counters = next((part for part in log.iter() if part.tag.endswith("_reasons_counters")), ())
    name = counters.tag if len(counters) else ""
    return found, {c.tag.removeprefix(f"{name}_"): int(c.text.split()[0]) for c in counters}


def readings() -> tuple[dict[str, object], dict[str, int]]:
    """The same; on AMD's GPUs what PyTorch reads through amdsmi."""
    import torch

    if isinstance(found := read_or_reason(smi), tuple):
        return found
    clock = read_or_reason(lambda: f"{torch.cuda.clock_rate()} MHz")
    warmth = read_or_reason(lambda: f"{torch.cuda.temperature()} C")
    return {"driver": found, "sm_clock": clock, "temperature": warmth}, {}


@contextlib.contextmanager
def watched() -> Iterator[dict[str, object]]:
    """Commit, and what the GPU says of itself now; after the block also how long the GPU throttled
    in it and why, and its temperature then."""
    read, before = readings()
    found, start = commit() | read, time.monotonic()
    try:
        yield found
    finally:
        read, after = readings()
        found["seconds"] = time.monotonic() - start
        found["temperature_after"] = read["temperature"]
        found["throttled_us"] = {name: us - before.get(name, 0) for name, us in after.items()}

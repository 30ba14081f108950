"""What the probes look at: a benchmark run as its author runs it, and the same operation under our
own clocks.

Each of the two is a process of its own, so that nothing is warm in it.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from exercises.performance_debugging.benchmarks.common import (
    CALLS,
    Benchmark,
    Measured,
    described,
    on_gpu,
    seconds_of,
    synchronize,
)
from fusion_lab.cli import ToolError, say
from fusion_lab.script import import_file

TRIES = 9
PATIENCE = 5.0  # seconds from one sign of life to the next
EMPTY = (2**28, 2**30)  # bytes to be written until the cache has nothing else, on a CPU, on a GPU


@dataclass(frozen=True)
class Claim:
    """What a benchmark said, and what it left behind. Seconds."""

    line: str  # as it prints it
    measured: Measured
    unfinished: float  # what the device still had to do when the benchmark had read its clock
    calls: int = CALLS  # that it timed


@dataclass(frozen=True)
class Calls:
    """The same operation under our clocks. Seconds."""

    first: float  # the first call in a fresh process
    cold: float  # a call that finds nothing of x in the cache
    warm: float  # a call after that


@dataclass(frozen=True)
class Values:
    """Errors over the largest right value, in float64."""

    error: float
    error_after_change: float  # of a second call, for which x has got new values in place


@dataclass(frozen=True)
class Evidence:
    """All that the probes look at; with the claim alone, the rest is None."""

    name: str
    claim: Claim
    calls: Calls | None
    values: Values | None

    def row(self) -> dict:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def of(cls, row: dict) -> Evidence:
        """The evidence of such a row."""
        claim = {**row["claim"], "measured": Measured(*row["claim"]["measured"])}
        calls, values = Calls(**row["calls"]), Values(**row["values"])
        return cls(row["name"], Claim(**claim), calls, values)


def load(path: Path) -> Benchmark:
    """The benchmark in a file."""
    if path.suffix != ".py" or not path.is_file():
        raise ToolError(f"{path}: no such benchmark")
    module = import_file(path)
    if not isinstance(getattr(module, "BENCHMARK", None), Benchmark):
        raise ToolError(f"{path}: it has no BENCHMARK")
    return module.BENCHMARK


def right(x: Tensor) -> Tensor:
    """LayerNorm of x [rows, channels] in float64, by the formula."""
    x = x.double()
    centred = x - x.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()


def as_its_author(path: Path) -> Claim:
    """Run the benchmark, and see how long the device works on."""
    benchmark = load(path)
    x = benchmark.make_input()
    measured = benchmark.measure(benchmark.operation, x)
    begin = time.perf_counter()
    synchronize()
    unfinished = time.perf_counter() - begin
    return Claim(described(benchmark, measured), measured, unfinished)


def error_of(operation: Callable[[Tensor], Tensor], x: Tensor) -> float:
    found, expected = operation(x).double(), right(x)
    synchronize()
    return ((found - expected).abs().max() / expected.abs().max()).item()


def under_our_clocks(path: Path) -> tuple[Calls, Values]:
    """Call the operation: once, with other values, and with an empty and a filled cache."""
    benchmark = load(path)
    x, operation = benchmark.make_input(), benchmark.operation
    first = seconds_of(lambda: operation(x))
    error = error_of(operation, x)
    x.normal_()
    values = Values(error, error_of(operation, x))
    other = torch.empty(EMPTY[on_gpu()], dtype=torch.int8, device=x.device)
    cold, warm = math.inf, math.inf
    for _ in range(TRIES):
        other.fill_(1)
        cold = min(cold, one_call(operation, x))
        other.fill_(1)
        operation(x)
        warm = min(warm, one_call(operation, x))
    return Calls(first, cold, warm), values


def one_call(operation: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Seconds of a call; on a GPU by events in its queue, which the host fills ahead of it."""
    if not on_gpu():
        return seconds_of(lambda: operation(x))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    operation(x)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def in_a_process(function: Callable[[Path], object], path: Path) -> object:
    """What the function returns in a process of its own; ToolError with what it raises."""

    def work() -> None:
        try:
            sender.send(function(path))
        except Exception as error:
            line = f"{type(error).__name__}: {error}".partition("\n")[0]
            sender.send(ToolError(f"{path.name}: {line}", status=1))

    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work)  # PyTorch is imported
    process.start()
    sender.close()
    begin = time.perf_counter()
    try:
        while not receiver.poll(PATIENCE):
            say(f"{path.stem}: still running, {time.perf_counter() - begin:.0f} s")
        result = receiver.recv()
    except EOFError:
        result = ToolError(f"{path.name}: its process died", status=1)
    process.join()
    if isinstance(result, ToolError):
        raise result
    return result


def gather(path: Path, claim_only: bool) -> Evidence:
    """Run a benchmark in two processes."""
    claim = in_a_process(as_its_author, path)
    calls, values = (None, None) if claim_only else in_a_process(under_our_clocks, path)
    return Evidence(path.stem, claim, calls, values)

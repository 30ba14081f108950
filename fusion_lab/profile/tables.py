"""What a trace of some steps shows: kernels by what they do, by phase of the step, by operator."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion_lab.cli import ToolError
from fusion_lab.profile.kernels import (
    CATEGORIES,
    Kernel,
    KernelStatistics,
    category,
    has_gpu,
    kernels_of,
    operators_of,
    range_of_each,
    ranges_of,
    statistics_of,
)


@dataclass(frozen=True)
class Share:
    """The part of the profiled steps that one category or phase makes up, per step."""

    kernels_per_step: float  # on a CPU, calls of operators
    copies_per_step: float  # memcpys and memsets of a GPU
    ms_per_step: float
    percent: float


@dataclass(frozen=True)
class Operator:
    """All calls of one operator in the profiled steps."""

    name: str
    category: str
    calls: int
    self_ns: int  # on the host, without the operators that it called
    device_ns: int  # of the kernels that it launched itself


@dataclass(frozen=True)
class Profile:
    """What the tables are made from."""

    unit: str  # "kernels", or "operators" on a CPU
    steps: int
    statistics: list[KernelStatistics]
    categories: dict[str, Share]
    phases: dict[str, Share]
    operators: list[Operator]


def shares(kernels: Sequence[Kernel], keys: Iterable[str], steps: int) -> dict[str, Share]:
    """Share of each key, in the order in which the keys first appear."""
    groups: dict[str, list[Kernel]] = defaultdict(list)
    for key, kernel in zip(keys, kernels, strict=True):
        groups[key].append(kernel)
    total = sum(kernel.duration_ns for kernel in kernels)
    result = {}
    for key, members in groups.items():
        copies = sum(kernel.is_copy for kernel in members)
        time = sum(kernel.duration_ns for kernel in members)
        counts = (len(members) - copies) / steps, copies / steps
        result[key] = Share(*counts, time / steps / 1e6, 100 * time / total)
    return result


def operator_table(events: Sequence[dict], kernels: Sequence[Kernel]) -> list[Operator]:
    """Operators, the longest self time on the host first."""
    device_ns: Counter = Counter()
    if has_gpu(events):
        for kernel in kernels:
            if kernel.operator is not None:
                device_ns[kernel.operator] += kernel.duration_ns
    calls, self_ns, on_device = Counter(), Counter(), Counter()
    for call in operators_of(events):
        calls[call.name] += 1
        self_ns[call.name] += call.duration_ns
        on_device[call.name] += device_ns.pop(call.operator, 0)  # an id counts once
    rows = [
        Operator(name, category(name), calls[name], self_ns[name], on_device[name])
        for name in calls
    ]
    return sorted(rows, key=lambda row: (-row.self_ns, row.name))


def analyse(events: list[dict], phases: Sequence[str]) -> Profile:
    """The tables of a trace whose steps have ranges named `phases`; ToolError if it has none."""
    ranges = ranges_of(events, phases)
    steps = sum(marked.name == phases[1] for marked in ranges)
    if not steps:
        raise ToolError(f"the trace has no ranges named {phases[1]}", status=1)
    kernels = kernels_of(events)
    if not sum(kernel.duration_ns for kernel in kernels):
        raise ToolError("the trace has nothing that took time", status=1)
    durations: dict[str, list[int]] = defaultdict(list)
    for kernel in kernels:
        durations[kernel.name].append(kernel.duration_ns)
    by_category = shares(kernels, [kernel.category for kernel in kernels], steps)
    names = [name or "outside" for name in range_of_each(kernels, ranges)]
    by_phase = shares(kernels, names, steps)
    return Profile(
        "kernels" if has_gpu(events) else "operators",
        steps,
        statistics_of(durations),
        {name: by_category[name] for name in CATEGORIES if name in by_category},
        {name: by_phase[name] for name in (*phases, "outside") if name in by_phase},
        operator_table(events, kernels),
    )

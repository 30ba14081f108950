"""Calls inside of calls in a trace of the PyTorch profiler, and the kernels of each."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fusion_lab.profile.kernels import CALLS, ON_GPU, category, complete


@dataclass(eq=False)
class Span:
    """A call, a frame of Python or a marked region, and the kernels that it launched itself."""

    event: dict
    outer: Span | None
    inner: list[Span] = field(default_factory=list)
    own: list[dict] = field(default_factory=list)

    def is_over(self, moment: float) -> bool:
        return self.event["ts"] + self.event["dur"] <= moment

    def kernels(self) -> list[dict]:
        return self.own + [kernel for span in self.inner for kernel in span.kernels()]


def spans_of(events: Sequence[dict]) -> list[Span]:
    """The outermost spans of all threads in the order of time, and the kernels in each. Kernels
    that were launched before the trace began are in none."""
    threads: dict[tuple, list[Span]] = defaultdict(list)
    found = complete(events, "cpu_op", "python_function", "user_annotation")
    for event in sorted(found, key=lambda e: (e["ts"], -e["dur"], e["args"].get("Ev Idx", 0))):
        own = threads[event["pid"], event["tid"]]
        outer = own[-1] if own else None
        while outer and outer.is_over(event["ts"]):
            outer = outer.outer
        own.append(Span(event, outer))
        if outer:
            outer.inner.append(own[-1])
    starts = {thread: [span.event["ts"] for span in own] for thread, own in threads.items()}
    launches = {call["args"].get("correlation"): call for call in complete(events, *CALLS)}
    for kernel in complete(events, *ON_GPU):
        launch = launches.get(kernel["args"].get("correlation"), {"pid": None, "tid": None})
        thread = launch["pid"], launch["tid"]
        place = bisect_right(starts[thread], launch["ts"]) if thread in starts else 0
        span = threads[thread][place - 1] if place else None
        while span and span.is_over(launch["ts"]):
            span = span.outer
        if span:
            span.own.append(kernel)
    tops = (span for own in threads.values() for span in own if not span.outer)
    return sorted(tops, key=lambda span: span.event["ts"])


def alone(kernels: Iterable[dict]) -> Counter:
    """By id the microseconds that each kernel adds to those in which the GPU is busy: what runs
    beside others counts once, for the one that began first, and of a collective what nothing
    hides."""
    edges = []
    for kernel in (kernel for kernel in kernels if kernel["dur"] > 0):
        key = is_collective(kernel), kernel["ts"], id(kernel)
        edges += [(kernel["ts"], 1, key), (kernel["ts"] + kernel["dur"], -1, key)]
    running, spent, last = set(), Counter(), 0.0
    for moment, change, key in sorted(edges):
        if running:
            spent[min(running)[-1]] += moment - last
        (running.add if change > 0 else running.discard)(key)
        last = moment
    return spent


def is_collective(event: dict) -> bool:
    return category(event["name"]) == "communication"

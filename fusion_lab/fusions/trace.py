"""A step predicted from a trace of the PyTorch profiler with shapes, of any GPU.

Each operator is called again on tensors of its shapes, strides and types that have no values, under
the recorder that looks at steps: the same rules say what it does. Times are those of the trace.

A trace does not tell which memory an operator reads. It is taken to read the last result of such a
form that nobody has read yet, else the one that was read last; in a backward pass those of the
operator with its sequence number. What no operator of the trace has made is new each time.
"""

from __future__ import annotations

import ast
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fusion_lab.cli import ToolError
from fusion_lab.fusions.rates import AMONG_OTHERS, Rates
from fusion_lab.fusions.record import RANDOM, Operator, Recorded, Recorder, is_composite
from fusion_lab.profile.kernels import CALLS, NO_KERNELS, ON_GPU, complete, read_trace
from fusion_lab.profile.laws import LARGE, Streaming, law_of
from fusion_lab.profile.spans import Span, alone, spans_of
from fusion_lab.profile.traffic import OVERWRITING

TOLD = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
NUMBERS = {"double": 1.0, "long int": 1, "bool": True}  # a tensor without dimensions that is one
# a frame of Python, but of PyTorch, Triton or what they have written
LINE = re.compile(r"(?!(?:.*/)?(?:torch|triton|torchinductor_\w+)/|<)(.+\.py)\((\d+)\): ")


@cache
def dtype_of(name: str) -> torch.dtype | None:
    """The type that a trace calls so: `c10::BFloat16`, `long int`."""
    plain = name.removeprefix("c10::").removesuffix(" int").lower()
    plain = {"signed char": "int8", "unsigned char": "uint8"}.get(plain, plain)
    dtype = getattr(torch, plain, None)
    return dtype if isinstance(dtype, torch.dtype) else None


@cache
def overload_of(name: str, types: tuple[str, ...]) -> torch._ops.OpOverload | None:
    """The ATen operator of this name that takes arguments of these types."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)

    def takes(argument: torch.Argument, type_name: str) -> bool:
        kind = str(argument.type)
        if type_name == "TensorList" or dtype_of(type_name):
            return "Tensor" in kind and ("List" in kind) == (type_name == "TensorList")
        return "Tensor" not in kind or (type_name == "" and "Optional" in kind)

    for function in (getattr(packet, each) for each in (packet.overloads() if packet else ())):
        wanted = function._schema.arguments
        if len(wanted) == len(types) and all(map(takes, wanted, types)):
            return function
    return None


class Replay(Recorder):
    """Records the operators of a trace, called again without values."""

    def __init__(self, us: dict[int, float], window: tuple[float, float]):
        super().__init__()
        self.us = us
        self.window = window
        self.phase = "forward"
        self.line = "?"
        self.sequence = None
        # results by form and id: those that nobody has read yet, and others; the last comes last
        self.unread = defaultdict(dict)
        self.read = defaultdict(dict)
        self.saved: dict[int | None, list[Tensor]] = defaultdict(list)  # by sequence number
        self.lines: dict[int, str] = {}
        self.streaming: list[Streaming] = []

    def place(self) -> tuple[str, str]:
        return self.phase, self.line

    def visit(self, span: Span) -> None:
        """Call again what is inside of a span."""
        name = span.event["name"]
        arguments = span.event["args"]
        before = self.phase, self.line, self.sequence
        if span.is_over(self.window[0]) or span.event["ts"] >= self.window[1]:
            return
        if frame := LINE.match(name):
            self.line = f"{frame[1]}:{frame[2]}"
        elif name.startswith("Optimizer.step"):
            self.phase = "optimizer"
        elif name.startswith("autograd::engine::evaluate_function"):
            self.phase = "backward"
            self.sequence = arguments.get("Sequence number")
            self.line = self.lines.get(self.sequence, "?")
        if name.startswith(("aten::empty", "aten::new_empty")):
            return
        types = tuple(arguments.get("Input type", ())) if name.startswith("aten::") else ()
        function = overload_of(name, types) if types else None
        lacks = "bytes and FLOPs"
        if function is None or is_composite(function) or (lacks := self.repeat(span, function)):
            for inner in span.inner:
                self.visit(inner)
            if span.own:
                if span.event["cat"] != "cpu_op":  # a call of Triton, or of a graph
                    many = f"{len(span.own)} kernels at once, the first "
                    name = many * (len(span.own) > 1) + span.own[0]["name"]
                unknown = Operator(name, self.calls, *self.place(), [], [])
                unknown.barrier = True
                unknown.lacks = lacks
                self.calls += 1
                self.launched([unknown], span.own)
        self.phase, self.line, self.sequence = before

    def launched(self, operators: list[Operator], kernels: Sequence[dict]) -> None:
        """Keep operators of one call, with the time of its kernels."""
        for operator in operators:
            operator.us = 0.0
            operator.kernels = 0
        operators[0].us = sum(self.us[id(kernel)] for kernel in kernels)
        operators[0].kernels = len(kernels)
        self.operators += operators

    def repeat(self, span: Span, function: torch._ops.OpOverload) -> str:
        """Call an operator again; what is not known of it where that cannot be done."""
        start = len(self.operators)
        taken = []
        kernels = span.kernels()
        try:
            arguments = self.arguments(function, span.event["args"], taken)
            named = {a.name: v for a, v in arguments if a.kwarg_only}
            result = function(*(v for a, v in arguments if not a.kwarg_only), **named)
        except Exception as error:  # each operator refuses in a way of its own
            del self.operators[start:]
            return f"bytes and FLOPs ({str(error).partition(chr(10))[0]:.80})"
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for tensor in outputs:
            found = self.read[form_of(tensor)].pop(id(tensor), None)
            if found is not None or not any(tensor is other for other in taken):
                self.unread[form_of(tensor)][id(tensor)] = tensor
        number = span.event["args"].get("Sequence number")
        if self.phase == "forward" and number is not None:
            self.saved[number] += taken + outputs
            self.lines.setdefault(number, self.line)
        found = self.operators[start:]
        del self.operators[start:]  # a view, or on the CPU, without kernels
        if not kernels or not found:
            return "bytes and FLOPs" if kernels else ""
        if re.search("HtoD|DtoH", kernels[0]["name"]):
            for operator in found:
                operator.kind = "library"
        elif len(kernels) == 1 and found[0].kind == "stream":
            first = found[0]
            us = kernels[0]["dur"]
            self.streaming.append(Streaming(first.access, first.name, first.moved, us))
        self.launched(found, kernels)
        return ""

    def arguments(self, function, described: dict, taken: list[Tensor]) -> list[tuple]:
        """The arguments of a call, each with its description; those that it reads are in `taken`
        then. ValueError if one is not told."""
        values = []
        wanted = function._schema.arguments
        fills = function.__name__.startswith((*OVERWRITING, *RANDOM))
        columns = (described.get(name) or [None] * len(wanted) for name in TOLD)
        for argument, shape, kind, strides, text in zip(wanted, *columns, strict=True):
            if argument.name == "device":
                value = torch.device("meta")
            elif values and shape == [] and kind in NUMBERS:
                value = NUMBERS[kind]  # of Python, as no kernel reads it
            elif dtype := dtype_of(kind):
                filled = argument.is_write and (fills or argument.kwarg_only)
                value = (self.new if filled else self.take)(shape, strides, dtype, taken)
            elif kind == "TensorList" and shape:
                each = zip(shape, strides or [None] * len(shape), strict=True)
                value = [self.take(*form, self.dtype_like(*form), taken) for form in each]
            elif text and kind != "TensorList":
                value = float(text) if text in ("inf", "-inf", "nan") else ast.literal_eval(text)
            elif argument.has_default_value() or str(argument.type).startswith("Optional"):
                value = argument.default_value
            else:
                raise ValueError(f"{argument.name} is not in the trace")
            values.append((argument, value))
        return values

    def new(self, shape, strides, dtype: torch.dtype, _: Sequence[Tensor] = ()) -> Tensor:
        """A tensor that no operator has made."""
        make, form = (torch.empty_strided, (shape, strides)) if strides else (torch.empty, (shape,))
        tensor = make(*form, dtype=dtype, device="meta")
        self.blank.discard(self.number(tensor))
        return tensor

    def dtype_like(self, shape: list, strides: list | None) -> torch.dtype:
        """The type of the newest result of this form: of a list a trace tells none."""
        wanted = form_of(self.new(shape, strides, torch.float32))[:2]
        groups = [*self.unread.items(), *self.read.items()]
        alike = [t for form, tensors in groups if form[:2] == wanted for t in tensors.values()]
        return max(alike, key=self.number).dtype if alike else torch.float32

    def take(self, shape, strides, dtype: torch.dtype, taken: list[Tensor]) -> Tensor:
        """A tensor of this form that lies elsewhere than those of the same call."""
        new = self.new(shape, strides, dtype)
        form = form_of(new)
        others = {self.spot(tensor) for tensor in taken}
        saved = [tensor for tensor in self.saved[self.sequence] if form_of(tensor) == form]
        unread = self.unread[form]
        read = self.read[form]
        order = [unread.values(), saved, read.values()]
        if self.phase == "backward" and taken:  # the first one is a gradient
            order[:2] = saved, unread.values()
        known = (tensor for tensors in order for tensor in reversed(tensors))
        best = next((tensor for tensor in known if self.spot(tensor) not in others), new)
        if unread.pop(id(best), read.pop(id(best), None)) is not None:
            read[id(best)] = best
        taken.append(best)
        return best

    def spot(self, tensor: Tensor) -> tuple[int, int]:
        return self.number(tensor), tensor.storage_offset()


def form_of(tensor: Tensor) -> tuple[tuple, tuple, torch.dtype]:
    return (*tensor.shape,), tensor.stride(), tensor.dtype


def last_step(events: Sequence[dict]) -> tuple[float, float]:
    """When the last whole step began and ended, of those that the profiler has marked: one at the
    end can be empty."""
    marks = [e for e in complete(events, "user_annotation") if "ProfilerStep" in e["name"]]
    steps = [(mark["ts"], mark["ts"] + mark["dur"]) for mark in marks]
    calls = [call["ts"] for call in complete(events, *CALLS)]
    count = {step: sum(step[0] <= ts < step[1] for ts in calls) for step in steps}
    whole = [step for step in steps if 2 * count[step] >= max(count.values())]
    return max(whole, default=(-math.inf, math.inf))


def replayed(path: Path) -> tuple[Recorded, list[Streaming], str]:
    """The last step of a trace, its streaming kernels, and the GPU; ToolError if it has none."""
    content = read_trace(path)
    events = content["traceEvents"]
    kernels = complete(events, *ON_GPU)
    if not kernels:
        raise ToolError(f"{path}: {NO_KERNELS}", status=1)
    replay = Replay(alone(kernels), last_step(events))
    with torch.no_grad(), replay:
        for span in spans_of(events):
            replay.visit(span)
    read = {use.key for operator in replay.operators for use in operator.reads}
    replay.recorded.run = "measured"
    replay.recorded.alive = {u.key for o in replay.operators for u in o.writes} - read
    names = {each.get("name") for each in content.get("deviceProperties", ())} - {None}
    return replay.recorded, replay.streaming, ", ".join(sorted(names)) or "a GPU"


def from_trace(path: Path) -> tuple[str, Recorded, Rates]:
    """What a trace tells of a step: a name, what it did, and the rates that its kernels reach."""
    recorded, streaming, device = replayed(path)
    straight = [kernel for kernel in streaming if kernel.access == "straight"]
    try:
        least, rate, others = law_of(straight)
    except ToolError as error:
        raise ToolError(f"{path}: {error}") from error
    tflops: dict[str, float] = {}
    for o in recorded.operators:
        if o.flop and o.us:
            tflops[o.dtype] = max(tflops.get(o.dtype, 0.0), o.flop / o.us / 1e6)
    errors = [abs(others[kernel[:3]] / kernel.us - 1) for kernel in straight]
    off = f"median error {100 * statistics.median(errors):.0f} %"
    recorded.remarks += [
        "a trace does not tell which memory is read: each reads the last results of its forms",
        f"a kernel takes {least:.2f} us and its bytes {rate:.0f} GB/s, from {len(errors)} that go"
        f" straight through memory: each predicted from the others, {off}",
    ]
    if max(kernel.bytes for kernel in straight) < LARGE:
        recorded.remarks += [f"the rate is a guess: none of them moves {LARGE / 1e6:.0f} MB"]
    rates = Rates(device, rate, least / AMONG_OTHERS, 0.0, tflops)
    return path.name, recorded, rates

"""A step predicted from a trace of the PyTorch profiler with shapes, of any GPU.

Each operator of the trace is called again on tensors of its shapes, strides and types that have no
values, under the recorder that looks at steps: what it reads and writes, and what it can be joined
to, follow from the same rules. Its time is that of its kernels in the trace; that of fused kernels
follows from how long the trace's own streaming kernels take for their bytes.

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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lab.cli import ToolError
from lab.fusions.rates import CONSTANTS, Rates
from lab.fusions.record import RANDOM, Operator, Recorded, Recorder, is_composite
from lab.profile.kernels import NO_KERNELS, ON_GPU, complete, read_trace
from lab.profile.spans import Span, alone, spans_of
from lab.profile.traffic import OVERWRITING

TOLD = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
NUMBERS = {"double": 1.0, "long int": 1, "bool": True}  # a tensor without dimensions that is one
LINE = re.compile(r"(?!torch/|<)(.+\.py)\((\d+)\): ")  # a frame of Python, not of PyTorch
LEAST = torch.arange(0.25, 12, 0.25, dtype=torch.float64)  # microseconds
RATE = torch.logspace(1, 4.3, 100, dtype=torch.float64)  # GB/s
LARGE = 2**22  # bytes from which a kernel tells a rate
FEW = 3  # kinds of kernels that tell none


class Streaming(NamedTuple):
    """A kernel that does little but read and write."""

    access: str  # straight, strided, sums
    operator: str
    bytes: int
    us: float


def dtype_of(name: str) -> torch.dtype | None:
    """The type that a trace calls so: `c10::BFloat16`, `long int`."""
    plain = name.removeprefix("c10::").removesuffix(" int").lower()
    plain = {"signed char": "int8", "unsigned char": "uint8"}.get(plain, plain)
    found = getattr(torch, plain, None)
    return found if isinstance(found, torch.dtype) else None


def overload_of(name: str, types: Sequence[str]) -> torch._ops.OpOverload | None:
    """The ATen operator of this name that takes arguments of these types."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)

    def takes(argument: torch.Argument, given: str) -> bool:
        kind = str(argument.type)
        if given == "TensorList" or dtype_of(given):
            return "Tensor" in kind and ("List" in kind) == (given == "TensorList")
        return "Tensor" not in kind or (given == "" and "Optional" in kind)

    for function in (getattr(packet, each) for each in (packet.overloads() if packet else ())):
        wanted = function._schema.arguments
        if len(wanted) == len(types) and all(map(takes, wanted, types)):
            return function
    return None


class Replay(Recorder):
    """Records the operators of a trace, called again without values."""

    def __init__(self, us: dict[int, float], window: tuple[float, float]):
        super().__init__()
        self.us, self.window = us, window
        self.phase, self.line, self.sequence = "forward", "?", None
        self.known: dict[tuple, list[Tensor]] = defaultdict(list)  # by form, used last comes last
        self.unread: set[int] = set()
        self.saved: dict[int | None, list[Tensor]] = defaultdict(list)  # by sequence number
        self.lines: dict[int, str] = {}
        self.streaming: list[Streaming] = []

    def place(self) -> tuple[str, str]:
        return self.phase, self.line

    def visit(self, span: Span) -> None:
        """Call again what is inside of a span."""
        name, told = span.event["name"], span.event["args"]
        before = self.phase, self.line, self.sequence
        if span.is_over(self.window[0]) or span.event["ts"] >= self.window[1]:
            return
        if frame := LINE.match(name):
            self.line = f"{frame[1]}:{frame[2]}"
        elif name.startswith("Optimizer.step"):
            self.phase = "optimizer"
        elif name.startswith("autograd::engine::evaluate_function"):
            self.phase, self.sequence = "backward", told.get("Sequence number")
            self.line = self.lines.get(self.sequence, "?")
        types = told.get("Input type") if name.startswith("aten::") else None
        function, lacks = overload_of(name, types) if types else None, "bytes and FLOPs"
        if function is None or is_composite(function) or (lacks := self.repeat(span, function)):
            for inner in span.inner:
                self.visit(inner)
            if span.own:
                name = name if span.event["cat"] == "cpu_op" else span.own[0]["name"]
                unknown = Operator(name, self.calls, *self.place(), [], [])
                unknown.barrier, unknown.lacks = True, lacks
                self.calls += 1
                self.launched([unknown], span.own)
        self.phase, self.line, self.sequence = before

    def launched(self, found: list[Operator], kernels: Sequence[dict]) -> None:
        """Keep operators of one call, with the time of its kernels."""
        for operator in found:
            operator.us, operator.kernels = 0.0, 0
        found[0].us = sum(self.us[id(kernel)] for kernel in kernels)
        found[0].kernels = len(kernels)
        self.operators += found

    def repeat(self, span: Span, function: torch._ops.OpOverload) -> str:
        """Call an operator again; what is not known of it where that cannot be done."""
        start, taken, kernels = len(self.operators), [], span.kernels()
        try:
            given = self.arguments(function, span.event["args"], taken)
            named = {a.name: v for a, v in given if a.kwarg_only}
            result = function(*(v for a, v in given if not a.kwarg_only), **named)
        except Exception as error:  # each operator refuses in a way of its own
            del self.operators[start:]
            return f"bytes and FLOPs ({str(error).partition(chr(10))[0]:.80})"
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for tensor in made:
            same = self.known[(*tensor.shape,), tensor.stride(), tensor.dtype]
            if not among(taken, tensor):
                same.append(tensor)
            self.unread |= {id(tensor)} if among(same, tensor) else set()
        number = span.event["args"].get("Sequence number")
        if self.phase == "forward" and number is not None:
            self.saved[number] += taken + made
            self.lines.setdefault(number, self.line)
        found = self.operators[start:]
        del self.operators[start:]  # a view, or on the CPU, without kernels
        if not kernels or not found:
            return "bytes and FLOPs" if kernels else ""
        if re.search("HtoD|DtoH", kernels[0]["name"]):
            for operator in found:
                operator.kind = "library"
        elif len(kernels) == 1 and found[0].kind == "stream":
            access = "sums" if any(o.sums for o in found) else access_of(taken + made)
            us = kernels[0]["dur"]
            self.streaming.append(Streaming(access, found[0].name, found[0].moved, us))
        self.launched(found, kernels)
        return ""

    def arguments(self, function, told: dict, taken: list[Tensor]) -> list[tuple]:
        """The arguments of a call, each with its description; ValueError if one is not told."""
        given, wanted = [], function._schema.arguments
        fills = function._schema.name.removeprefix("aten::").startswith((*OVERWRITING, *RANDOM))
        columns = (told.get(name) or [None] * len(wanted) for name in TOLD)
        for argument, shape, kind, strides, text in zip(wanted, *columns, strict=True):
            if argument.name == "device":
                value = torch.device("meta")
            elif given and shape == [] and kind in NUMBERS:
                value = NUMBERS[kind]  # of Python, as no kernel reads it
            elif dtype := dtype_of(kind):
                blind = argument.is_write and (fills or argument.kwarg_only)
                value = self.take(shape, strides, dtype, taken, blind)
            elif kind == "TensorList" and shape:
                each = zip(shape, strides or [None] * len(shape), strict=True)
                value = [self.take(*form, None, taken) for form in each]
            elif text and kind != "TensorList":
                value = float(text) if text in ("inf", "-inf", "nan") else ast.literal_eval(text)
            elif argument.has_default_value() or "Optional" in str(argument.type):
                value = argument.default_value
            else:
                raise ValueError(f"{argument.name} is not in the trace")
            given.append((argument, value))
        return given

    def take(self, shape, strides, dtype, taken: list[Tensor], blind: bool = False) -> Tensor:
        """A tensor of this form, but none of `taken`, and one that nothing has written only if that
        is done `blind`; of a list a trace tells no type."""
        shape = tuple(shape)
        strides = torch.empty(shape, device="meta").stride() if strides is None else tuple(strides)
        if dtype is None:
            alike = [t for key, ts in self.known.items() if key[:2] == (shape, strides) for t in ts]
            dtype = max(alike, key=self.number).dtype if alike else torch.float32
        same = self.known[shape, strides, dtype]
        places = {(self.number(t), t.storage_offset()) for t in taken}
        found = [t for t in same if (self.number(t), t.storage_offset()) not in places]
        blank = [t for t in found if self.number(t) in self.blank]
        found = (blind and blank) or [t for t in found if not among(blank, t)]
        unread = [t for t in found if id(t) in self.unread]
        saved = [t for t in self.saved[self.sequence] if among(found, t)]
        of_forward = self.phase == "backward" and taken  # the first one is a gradient
        best = ((saved or unread) if of_forward else (unread or saved)) or found
        if best:
            same.append(same.pop(next(i for i, t in enumerate(same) if t is best[-1])))
        else:
            best = [torch.empty_strided(shape, strides, dtype=dtype, device="meta")]
            self.blank.discard(self.number(best[-1]))
        self.unread.discard(id(best[-1]))
        taken.append(best[-1])
        return best[-1]


def among(tensors: Iterable[Tensor], tensor: Tensor) -> bool:
    return any(tensor is other for other in tensors)


def access_of(tensors: Iterable[Tensor]) -> str:
    """Do they all lie in memory densely and in one order?"""
    forms = {((*tensor.shape,), tensor.stride()) for tensor in tensors if tensor.numel() > 1}
    for shape, strides in forms:
        steps = ((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if len(forms) > 1 or math.prod(shape) != 1 + sum(steps):
            return "strided"
    return "straight"


def law_of(kernels: Sequence[Streaming]) -> tuple[float, float, dict[tuple, float]]:
    """Microseconds of a kernel that moves nothing, and GB/s, with which the logarithms of all times
    are least off, each operator and size once; and how long these would take if both came from the
    others."""
    times: dict[tuple, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel[:3]].append(kernel.us)
    if len(times) < FEW:
        raise ToolError("too few streaming kernels with shapes: was it record_shapes=True?")
    moved = torch.tensor([kind[2] for kind in times], dtype=torch.float64)
    us = torch.tensor([statistics.median(each) for each in times.values()], dtype=torch.float64)
    law = (LEAST[:, None, None] + moved / RATE[:, None] / 1e3).flatten(0, 1)
    off = (law / us).log().abs()
    least, rate = divmod(int(off.sum(-1).argmin()), len(RATE))
    best = (off.sum(-1)[:, None] - off).argmin(0)
    others = law.gather(0, best[None])[0].tolist()
    return float(LEAST[least]), float(RATE[rate]), dict(zip(times, others, strict=True))


def processes_of(path: Path) -> list[tuple[Recorded, list[Streaming], str]]:
    """The last step of each process in a trace, its streaming kernels, and the GPU; ToolError for
    none of a GPU."""
    content = read_trace(path)
    names = {each.get("name") for each in content.get("deviceProperties", ())} - {None}
    found = []
    for rank in sorted({event.get("rank", 0) for event in content["traceEvents"]}):
        own = [event for event in content["traceEvents"] if event.get("rank", 0) == rank]
        kernels = complete(own, *ON_GPU)
        if not kernels:
            raise ToolError(f"{path}: {NO_KERNELS}", status=1)
        marks = complete(own, "user_annotation")
        steps = [(e["ts"], e["ts"] + e["dur"]) for e in marks if "ProfilerStep" in e["name"]]
        replay = Replay(alone(kernels), max(steps, default=(-math.inf, math.inf)))
        with torch.no_grad(), replay:
            for span in spans_of(own):
                replay.visit(span)
        read = {use.key for operator in replay.operators for use in operator.reads}
        replay.recorded.run = "measured"
        replay.recorded.alive = {u.key for o in replay.operators for u in o.writes} - read
        found.append((replay.recorded, replay.streaming, ", ".join(sorted(names)) or "a GPU"))
    return found


def from_trace(path: Path) -> tuple[str, Recorded, Rates, list[str]]:
    """What a trace tells of a step, of the process whose GPU was busy longest: a name, what it did,
    the rates that its kernels reach, and what there is to say."""
    processes = processes_of(path)
    busy = [sum(o.us for o in recorded.operators) / 1e3 for recorded, *_ in processes]
    recorded, streaming, device = processes[busy.index(max(busy))]
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
    remarks = [
        "a trace does not tell which memory is read: each reads the last results of its forms",
        f"a kernel takes {least:.2f} us and its bytes {rate:.0f} GB/s, from {len(errors)} that go"
        f" straight through memory: each predicted from the others, {off}",
    ]
    if max(kernel.bytes for kernel in straight) < LARGE:
        remarks += [f"the rate is a guess: none of them moves {LARGE / 1e6:.0f} MB"]
    if len(busy) > 1:
        each = ", ".join(f"{ms:.3f}" for ms in busy)
        remarks += [
            f"{len(busy)} processes: their GPUs were busy for {each} ms; this is the longest"
        ]
    rates = Rates(device, rate, least / CONSTANTS.among_others, 0.0, tflops)
    return path.name, recorded, rates, remarks

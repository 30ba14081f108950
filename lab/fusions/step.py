"""A training step to look at: from a version script or from a function of the user's. It is
recorded, timed and compiled here."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from lab.cli import ToolError
from lab.fusions.rates import Rates
from lab.fusions.record import Operator, Recorder
from lab.profile.kernels import kernels_of, load_trace, range_of_each, ranges_of
from lab.script import import_file, load_script, script_arguments
from lab.turns import TURN_MS, alternating, free_memory

REPEATS = 3  # profiled steps
NEEDED = (
    "it must return (model, batch) so that model(**batch) is the loss, a scalar or with a .loss;"
    " or a function without arguments that takes a training step"
)


@dataclass
class Step:
    """A training step on inputs that stay, its weights, and how to get it compiled."""

    name: str
    device: torch.device
    take: Callable[[], object]
    weights: list[Tensor] = field(default_factory=list)
    compiled: Callable[[], Callable[[], object]] | None = None


@dataclass
class Recorded:
    """What was recorded of a step; times are None where nothing was measured."""

    operators: list[Operator]
    sizes: list[int]  # bytes of the storages
    alive: set[tuple[int, int]]  # what is there when the step is over
    weights: set[int]  # storages of weights
    notes: list[str]


class TrainingStep:
    """Forward, backward, AdamW of a model."""

    def __init__(self, model: nn.Module, batch: dict, autocast: Callable, compiled: bool = False):
        self.model, self.batch, self.autocast = model, batch, autocast
        gpu = next(iter(model.parameters())).is_cuda
        self.forward = torch.compile(model) if compiled else model
        weights = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, 1e-5, fused=True, capturable=gpu)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with self.autocast():
            loss = self.forward(**self.batch)
            loss = getattr(loss, "loss", loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"a tensor {[*loss.shape]}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ToolError(f"model(**batch) is {shape}: {NEEDED}")
        loss.backward()
        self.optimizer.step()


def from_script(name: str, argv: Sequence[str]) -> Step:
    """The step of a version script with these arguments of its own."""
    module = load_script(name)
    _, args = script_arguments(module, argv, tempfile.gettempdir())
    if args.torch_compile or args.cuda_graph:
        raise ToolError("operators are looked at one by one: give no compiling and no graph here")
    args.cuda_graph = args.device == "cuda"  # an optimizer that a graph can have
    device = module.prepare(args)
    with unset_fake_temporarily():
        batch = module.make_batches(args, torch.device("cpu"), args.seed).next_batch()
    batch = {key: placed(value, device) for key, value in batch.items()}

    def build(compiled: bool) -> tuple[Callable, list[Tensor]]:
        chosen = argparse.Namespace(**{**vars(args), "torch_compile": compiled})
        trainer = module.Trainer(chosen, device)
        return partial(trainer.compute, batch), [*trainer.model.parameters()]

    return Step(module.SCRIPT, device, *build(False), lambda: build(True)[0])


def placed(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, or without its values where tensors are fake."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode and not isinstance(value, FakeTensor):
        return mode.from_tensor(value)
    return value.to(device) if device.type == "cuda" else value


def from_function(place: str, args: argparse.Namespace, device: torch.device) -> Step:
    """The step of what a function of a file returns, FILE.py:function."""
    file, _, name = place.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise ToolError(f"--model {place}: it must be FILE.py:function, of a file that is there")
    make = getattr(import_file(Path(file).resolve(), f"model_{Path(file).stem}"), name, None)
    if not callable(make):
        raise ToolError(f"--model {place}: {file} has no function {name!r}; {NEEDED}")
    made = make()
    title = f"{Path(file).stem}:{name}"
    if callable(made) and not isinstance(made, nn.Module):
        return Step(title, device, made, [], lambda: torch.compile(made))
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ToolError(f"--model {place} returned {type(made).__name__}: {NEEDED}")
    model, batch = made
    if not isinstance(batch, dict):
        raise ToolError(f"--model {place}: the batch is a {type(batch).__name__}: {NEEDED}")
    return from_model(title, model, batch, args, device)


def from_model(
    title: str, model: nn.Module, batch: dict, args: argparse.Namespace, device: torch.device
) -> Step:
    """The step of a model on a batch, both moved to the device."""
    if device.type == "cuda":
        model.to(device)
    batch = tree_map_only(Tensor, partial(placed, device=device), batch)
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=args.use_amp)
    weights = [p for p in model.parameters() if p.requires_grad]
    if not weights:
        raise ToolError(f"{title}: the model has no weight to train")
    train = partial(TrainingStep, model, batch, autocast)
    return Step(title, device, train(), weights, partial(train, compiled=True))


# --- recorded


def record(step: Step, recorder: Recorder) -> Recorded:
    """One step, of which nothing stays but this."""
    weights = {recorder.number(weight.untyped_storage()) for weight in step.weights}
    with recorder:
        step.take()
    notes = sorted(recorder.notes)
    return Recorded(recorder.operators, recorder.sizes, recorder.alive(), weights, notes)


def count(build: Callable[[], Step]) -> tuple[Step, Recorded]:
    """Operators, bytes and FLOPs of a step of fake tensors: nothing is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        step = build()
        step.take()  # the first one makes the optimizer's state
        return step, record(step, Recorder())


def measure(step: Step, rates: Rates) -> Recorded:
    """The operators of a step with the times of their kernels, medians of some steps."""
    for _ in range(REPEATS):
        step.take()
    times: list[list[float]] = []
    before: list[str] = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        recorder = Recorder(timed=True)
        activities = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
            found = record(step, recorder)
            torch.cuda.synchronize()
        attribute(found, recorder.parts, profile, rates)
        names = [operator.name for operator in found.operators]
        if names != before:
            times = []
        before = names
        times.append([operator.us for operator in found.operators])
    for operator, us in zip(found.operators, zip(*times, strict=True), strict=True):
        operator.us = statistics.median(us)
    return found


def attribute(found: Recorded, parts: Sequence[range], profile, rates: Rates) -> None:
    """Give each operator the time of the kernels that it launched; kernels that no operator
    launched become operators that nobody understands."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = load_trace(path)
    ranges = ranges_of(events, {f"#{i}" for i in range(len(parts))})
    kernels = kernels_of(events)
    if not kernels or not any(kernel.launch_us for kernel in kernels):
        raise ToolError(
            "the profiler saw no kernels on the GPU: may this user profile it?", status=1
        )
    spent: dict[int, float] = defaultdict(float)
    launched: dict[int, int] = defaultdict(int)
    starts = {r.name: r.start for r in ranges}
    unseen: list[tuple[int, Operator]] = []
    for name, kernel in zip(range_of_each(kernels, ranges), kernels, strict=True):
        us = kernel.duration_ns / 1e3 + rates.gap_us
        if name is not None:
            spent[int(name[1:])] += us
            launched[int(name[1:])] += 1
            continue
        at = sum(start <= (kernel.launch_us or 0) for start in starts.values())
        place = parts[at].start if at < len(parts) else len(found.operators)
        lines = found.operators[max(0, place - 1)]
        own = Operator(f"kernel {kernel.name[:40]}", "unknown", lines.phase, "?", [], [], 0, us=us)
        own.barrier = True
        unseen.append((place, own))
    for number, part in enumerate(parts):
        members = [found.operators[i] for i in part]
        moved = [1 + sum(use.bytes for use in (*o.reads, *o.writes)) for o in members]
        for operator, share in zip(members, moved, strict=True):
            operator.us = spent[number] * share / sum(moved)
            operator.kernels = launched[number] if operator is members[0] else 0
    for place, own in sorted(unseen, key=lambda entry: -entry[0]):
        found.operators.insert(place, own)


# --- compiled


def check(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of steps as graphs, for each of several alternating turns."""
    graphs = {name: captured(take) for name, take in sides.items()}
    steps = {name: max(2, round(TURN_MS / timed(graph, 3))) for name, graph in graphs.items()}
    turns: dict[str, list[float]] = {name: [] for name in graphs}
    for _, name in alternating(graphs, rounds):
        turns[name].append(timed(graphs[name], steps[name]))
    return turns


def compared(step: Step, rounds: int) -> dict:
    """A step beside the same compiled: medians of the turns and of their ratios."""
    turns = check({"now": step.take, "compiled": step.compiled()}, rounds)
    free_memory()
    ratios = [a / b for a, b in zip(turns["now"], turns["compiled"], strict=True)]
    result = {f"{name}_ms": statistics.median(ms) for name, ms in turns.items()}
    return result | {"speedup": statistics.median(ratios), "turns_ms": turns}


def captured(take: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A step as a graph; ToolError where it cannot be one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                take()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            take()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ToolError(f"--check: the step cannot be a CUDA graph: {reason}", status=1) from error
    return graph


def timed(graph: torch.cuda.CUDAGraph, steps: int) -> float:
    """Milliseconds of a replay, on the device's clock."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(steps):
        graph.replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / steps

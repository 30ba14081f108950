"""A training step to look at, of a version script or of a model: counted, timed, and compiled."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_map_only

from fusion_lab.cli import ToolError, note
from fusion_lab.fusions.fakes import NeedsRun, as_on_gpu, fake_mode, faked, where, without_values
from fusion_lab.fusions.groups import gone
from fusion_lab.fusions.record import Operator, Recorded, Recorder
from fusion_lab.host import free_memory
from fusion_lab.profile.kernels import (
    NO_KERNELS,
    ON_GPU,
    Kernel,
    category,
    complete,
    kernels_of,
    load_trace,
    range_of_each,
    ranges_of,
)
from fusion_lab.profile.spans import alone
from fusion_lab.script import import_file, load_script, script_arguments
from fusion_lab.turns import Turns, alternating, captured, compare_in_turns, warm_up

REPEATS = 3  # profiled steps
TRACED_TURNS = 5  # each is a call
OTHER = 0.05  # of a step's time in kernels of which the other side has none: another program
NEEDED = (
    "it must return (model, batch) so that model(**batch) is the loss, a scalar or with a .loss;"
    " or a function without arguments that takes a training step"
)


@dataclass
class Step:
    """A training step on inputs that stay, and what makes the same compiled."""

    name: str
    take: Callable[[], object]
    compiled: Callable[[], Callable[[], object]] | None = None
    calls: int = 0

    def call(self) -> object:
        """Take the step once more."""
        self.calls += 1
        return self.take()


def script_device(name: str, argv: Sequence[str]) -> str:
    """The --device of a version script with these arguments."""
    return script_arguments(load_script(name), argv, tempfile.gettempdir())[1].device


def placed(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, or without its values where tensors are fake."""
    return without_values(value) if fake_mode() else value.to(device)


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

    def build(compiled: bool) -> Callable[[], object]:
        chosen = argparse.Namespace(**{**vars(args), "torch_compile": compiled})
        trainer = module.Trainer(chosen).build()
        return partial(trainer.compute, batch)

    return Step(module.SCRIPT, build(False), partial(build, True))


@contextmanager
def users_function(place: str, argv: Sequence[str]) -> Iterator[Callable[[], object]]:
    """The function that FILE.py:FUNCTION names, while its file is the main module as under
    `python FILE.py argv`: its folder stands on the path in place of ours, and what was pickled in a
    run of the file finds its classes."""
    file, _, name = place.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise ToolError(f"--model {place}: it must be FILE.py:function, of a file that is there")
    path = Path(file).resolve()
    argv_before = sys.argv
    path_before = sys.path[:]
    main_before = sys.modules["__main__"]
    sys.argv = [file, *argv]
    sys.path[0] = str(path.parent)
    try:
        with of_the_user(f"--model {file}"), as_on_gpu():
            function = getattr(import_file(path, path.stem, "__main__"), name, None)
        if not callable(function):
            raise ToolError(f"--model {place}: {file} has no function {name!r}; {NEEDED}")
        yield function
    finally:
        sys.argv = argv_before
        sys.path[:] = path_before
        sys.modules["__main__"] = main_before
        sys.modules.pop(path.stem, None)


def from_function(place: str, function: Callable[[], object], use_amp: bool) -> Step:
    """The step of what a function returns, which `place` names."""
    with of_the_user(f"--model {place}"):
        try:
            result = function()
        except Exception:
            if not fake_mode():
                raise
            with unset_fake_temporarily():  # it may ask for values, which are taken away behind it
                result = function()
    if callable(result) and not isinstance(result, nn.Module):
        return Step(place, result, lambda: torch.compile(result))
    pair = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(pair[0], nn.Module) or not isinstance(pair[1], Mapping):
        types = ", ".join(type(part).__name__ for part in pair)
        raise ToolError(f"--model {place} returned {types}: {NEEDED}")
    return from_model(place, *pair, use_amp)


def from_model(title: str, model: nn.Module, batch: Mapping, use_amp: bool) -> Step:
    """The step of a model on a batch, both on the GPU if there is one: forward, backward, AdamW."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    model.to(device)
    if fake_mode():
        fakes: dict[int, Tensor] = {}  # weights can be shared
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = fakes.setdefault(id(tensor), without_values(tensor))
    batch = tree_map_only(Tensor, partial(placed, device=device), dict(batch))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        raise ToolError(f"{title}: the model has no weight to train")

    def train(compiled: bool) -> Callable[[], Tensor]:
        forward = torch.compile(model) if compiled else model
        optimizer = torch.optim.AdamW(weights, 1e-5, fused=True, capturable=on_gpu)

        def take() -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=use_amp):
                output = forward(**batch)
            loss = getattr(output, "loss", output)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                shape = [*loss.shape] if isinstance(loss, Tensor) else type(loss).__name__
                raise ToolError(f"{title}: the loss is of shape or type {shape}: {NEEDED}")
            loss.backward()
            optimizer.step()
            return loss.detach()

        return take

    return Step(title, train(False), partial(train, True))


# --- counted and timed


@contextmanager
def of_the_user(name: str) -> Iterator[None]:
    """Errors of the user's own code are one line, with the place where they came from; so is that
    it ends the program."""
    try:
        yield
    except (ToolError, KeyboardInterrupt):
        raise
    except SystemExit as end:
        what = f"ended the program with status {end.code or 0}{where(end)}"
        raise ToolError(f"{name} {what}; its own arguments stand behind --", status=1) from end
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ToolError(f"{name} failed{where(error)}: {what}", status=1) from error


def record(step: Step, timed: bool = False) -> Recorded:
    """One step, of which no tensor stays. Optimizers that took no step in it are in the remarks."""
    recorder = Recorder(timed)
    recorded = recorder.recorded
    with recorder, of_the_user(step.name):
        loss = step.call()  # which is there when the step is over
    del loss
    recorded.call = step.calls
    if idle := idle_optimizers(recorder):
        recorded.remarks += [
            f"{', '.join(idle)} takes no step in the recorded call {step.calls}: a function that"
            " takes all calls from one step of the optimizer to the next is the whole step"
        ]
    return recorded


def idle_optimizers(recorder: Recorder) -> list[str]:
    """The optimizers of weights that a recorded step has used, but for those that took a step."""

    def used(optimizer: Optimizer) -> bool:
        groups = getattr(optimizer, "param_groups", ())  # of one that is being made there are none
        weights = (weight for group in groups for weight in group["params"])
        return any(recorder.knows(weight) for weight in weights)

    optimizers = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    idle = (each for each in optimizers if id(each) not in recorder.stepped)
    return sorted(type(each).__name__ for each in idle if used(each))


def counted(build: Callable[[], Step]) -> tuple[Step, Recorded]:
    """A step, and what it does: the second one, as the first makes the optimizer's state."""
    step = build()
    with of_the_user(step.name):
        step.call()
    return step, record(step)


@as_on_gpu()
def count(build: Callable[[], Step]) -> tuple[Step, Recorded]:
    """Operators, bytes and FLOPs of a step of fake tensors, with which nothing is computed. A step
    that these cannot take is really taken on the CPU, which is said before."""
    try:
        with faked():
            return counted(build)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, ToolError) else error
        if cause is None or isinstance(cause, SystemExit):
            raise
        reason = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
        reason = str(cause) if isinstance(cause, NeedsRun) else reason
        note(f"{reason}{where(cause)}: the step is really taken on this CPU, twice")
    gc.collect()  # what the attempt before has left, such as workers of a DataLoader
    step, recorded = counted(build)
    recorded.run = "real"
    return step, recorded


def measure(step: Step) -> Recorded:
    """The operators of a step with the times of their kernels, medians of some steps."""
    with of_the_user(step.name):
        for _ in range(REPEATS):
            step.call()
    times: dict[tuple, list[list[float]]] = {}  # of steps that were the same
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        recorded, events = profiled(lambda: record(step, timed=True))
        attribute(recorded, events)
        same = tuple(operator.name for operator in recorded.operators)
        times.setdefault(same, []).append([operator.us for operator in recorded.operators])
    for operator, us in zip(recorded.operators, zip(*times[same], strict=True), strict=True):
        operator.us = statistics.median(us)
    recorded.run = "measured"
    return recorded


def profiled(work: Callable[[], object]) -> tuple[object, list[dict]]:
    """What this returns, and the events of its trace."""
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        result = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return result, load_trace(path)


def side_by_side(streams: Sequence[Sequence[float]]) -> float:
    """Which part of the time of kernels an operator takes that has them on several streams, as the
    layers of cuDNN's recurrent ones: a host that launches them late lets none run beside another.

    Graham's bound of 1966: streams that are about as long share all there is, and for the rest of
    the longest one nothing is left to run beside it.
    """
    busy = sorted(map(sum, streams))
    total = sum(busy)
    longest = busy[-1]
    alike = sum(us > longest / 2 for us in busy)
    return (total / alike + longest * (1 - 1 / alike)) / total if total else 1.0


def kernel_us(events: Sequence[dict]) -> list[tuple[Kernel, float]]:
    """The kernels in a trace, with the microseconds that each adds to those in which any runs;
    without a GPU the operators, with their times."""
    kernels = kernels_of(events)
    on_gpu = complete(events, *ON_GPU)
    union = alone(on_gpu)
    own = [union[id(event)] for event in on_gpu] or [k.duration_ns / 1e3 for k in kernels]
    return [*zip(kernels, own, strict=True)]


def attribute(recorded: Recorded, events: list[dict]) -> None:
    """Give each operator the time of the kernels that its call launched; kernels that no operator
    launched become operators that are not understood."""
    first = {operator.call: operator for operator in reversed(recorded.operators)}
    for operator in recorded.operators:
        operator.us = 0.0
        operator.kernels = 0
        operator.queued = 0
    ranges = ranges_of(events, {f"#{call}" for call in range(1 + max(first, default=0))})
    pairs = kernel_us(events)
    if not any(kernel.launch_us for kernel, _ in pairs):
        raise ToolError(NO_KERNELS, status=1)
    pairs.sort(key=lambda pair: pair[0].launch_us or 0)
    named = range_of_each([kernel for kernel, _ in pairs], ranges)
    streams: dict[int, dict[object, list[float]]] = defaultdict(lambda: defaultdict(list))
    call = -1
    for name, (kernel, us) in zip(named, pairs, strict=True):
        call = int(name[1:]) if name else call
        recorded.launched[kernel.name] = recorded.launched.get(kernel.name, 0.0) + us
        if name is None or call not in first:  # it comes behind the one before
            own = Operator(f"kernel {kernel.name[:40]}", call, "forward", "?", [], [], barrier=True)
            own.us = us
            own.lacks = "bytes and FLOPs"
            recorded.operators.append(own)
        else:
            streams[call][kernel.stream].append(us)
            if part := gone(first[call], kernel.name):
                setattr(first[call], part, getattr(first[call], part) + us)
    for call, queues in streams.items():
        part = side_by_side([*queues.values()])
        number = sum(map(len, queues.values()))
        first[call].us = part * sum(map(sum, queues.values()))
        first[call].kernels = number
        first[call].queued = round(part * number)
    recorded.operators.sort(key=lambda operator: operator.call)


# --- compiled


def compared(step: Step, launched: Mapping[str, float]) -> dict:
    """A step beside the same compiled: medians of the turns and of their ratios, and kernels of
    another program than the one that was profiled, whose kernels took so many microseconds; or
    whether it is `unchanged` by compiling. Both are graphs; where one cannot be captured they are
    `traced`, for that reason. What cannot be compared at all is an `error`."""
    # A graph is how this measures, and no part of the step: Hugging Face's models ask for one, and
    # would make masks in it that they do not make in training.
    no_graph = mock.patch("torch.cuda.is_current_stream_capturing", return_value=False)
    reason = ""
    try:
        with no_graph:
            sides = {}
            for name, make in (("now", lambda: step.take), ("compiled", step.compiled)):
                with of_the_user(f"{step.name}, {name}"):
                    sides[name] = make()
                    sides[name]()
                    sides[name]()  # whose gradients may be other memory
            with of_the_user(step.name):
                try:
                    turns, kernels = graphs_in_turns(sides)
                except (ToolError, torch.OutOfMemoryError) as error:
                    reason = " ".join(f"{error}{where(error.__cause__ or error)}".split())
                if reason:
                    free_memory()
                    turns, kernels = traced_in_turns(sides)
    except (ToolError, torch.OutOfMemoryError) as error:
        return {"error": " ".join(str(error).split())} | ({"traced": reason} if reason else {})
    result = {f"{name}_ms": statistics.median(ms) for name, ms in turns.ms.items()}
    result["speedup"] = statistics.median(turns.ratios("compiled"))
    result["other"] = {name: others(name, kernels[name], launched) for name in sides}
    result["unchanged"] = kernels["compiled"].keys() <= launched.keys()
    result["turns_ms"] = turns.ms
    return result | ({"traced": reason} if reason else {})


Sides = Mapping[str, Callable[[], object]]
Measured = tuple[Turns, dict[str, Counter]]  # and microseconds of the kernels of each by name


def graphs_in_turns(sides: Sides) -> Measured:
    """The turns of these steps as graphs."""
    for name, take in sides.items():
        compare_in_turns({name: take}, turns=1)
    turns = compare_in_turns(sides)
    kernels = {}
    for name, take in sides.items():
        warm_up(take)
        replay = captured(take, 1)
        replay()
        kernels[name] = by_name(profiled(replay)[1])
    return turns, kernels


def traced_in_turns(sides: Sides) -> Measured:
    """The turns of these steps without graphs: a turn is a call in a trace, and takes as long as
    any of its kernels runs. What the host does between them does not count."""
    ms = {name: [] for name in sides}
    kernels = {}
    for turn, name in alternating(sides, TRACED_TURNS + 1):
        kernels[name] = by_name(profiled(sides[name])[1])
        if turn:  # the first one warms up
            ms[name].append(kernels[name].total() / 1e3)
    return Turns(ms), kernels


def by_name(events: Sequence[dict]) -> Counter:
    """Microseconds of the kernels in a trace by name."""
    us_of: Counter = Counter()
    for kernel, us in kernel_us(events):
        us_of[kernel.name] += us
    return us_of


def others(side: str, kernels: Mapping[str, float], launched: Mapping[str, float]) -> list[str]:
    """Kernels that tell that a graph is another program than what was profiled; compiled, these are
    those of attention, but for a softmax that is fused."""
    names = []
    for mine, other in ((kernels, launched), (launched, kernels)):
        only = {name: us for name, us in mine.items() if name not in other}
        if side == "compiled":
            kept = (n for n in only if category(n) == "attention" and "softmax" not in n.lower())
            only = {name: only[name] for name in kept}
        if sum(only.values()) > OTHER * sum(mine.values()):
            names += sorted(only, key=only.get, reverse=True)[:3]
    return names

"""A training step to look at, of a version script or of a model: counted, timed, and compiled."""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from lab.cli import ToolError, note
from lab.fusions.rates import Rates
from lab.fusions.record import Operator, Recorder, whose
from lab.profile.kernels import NO_KERNELS, kernels_of, load_trace, range_of_each, ranges_of
from lab.script import import_file, load_script, script_arguments
from lab.turns import compare_in_turns

REPEATS = 3  # profiled steps
NEEDED = (
    "it must return (model, batch) so that model(**batch) is the loss, a scalar or with a .loss;"
    " or a function without arguments that takes a training step"
)


@dataclass
class Step:
    """A training step on inputs that stay, its weights, and what makes the same compiled."""

    name: str
    take: Callable[[], object]
    weights: list[Tensor] = field(default_factory=list)
    compiled: Callable[[], Callable[[], object]] | None = None


def fake_mode() -> FakeTensorMode | None:
    """The one that makes tensors fake here."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def placed(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, or without its values where tensors are fake."""
    mode = fake_mode()
    real = mode and not isinstance(value, FakeTensor)
    return mode.from_tensor(value) if real else value.to(device)


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

    def build(compiled: bool) -> tuple[Callable[[], object], list[Tensor]]:
        chosen = argparse.Namespace(**{**vars(args), "torch_compile": compiled})
        trainer = module.Trainer(chosen, device)
        return partial(trainer.compute, batch), [*trainer.model.parameters()]

    return Step(module.SCRIPT, *build(False), lambda: build(True)[0])


def function_of(place: str) -> Callable[[], object]:
    """The function of a file, FILE.py:function."""
    file, _, name = place.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise ToolError(f"--model {place}: it must be FILE.py:function, of a file that is there")
    with of_the_user(f"--model {file}"):
        make = getattr(import_file(Path(file).resolve()), name, None)
    if not callable(make):
        raise ToolError(f"--model {place}: {file} has no function {name!r}; {NEEDED}")
    return make


def from_function(
    place: str, make: Callable[[], object], use_amp: bool, device: torch.device
) -> Step:
    """The step of what a function returns, which `place` names."""
    title = Path(place).name.replace(".py:", ":")
    with of_the_user(f"--model {place}"):
        try:
            made = make()
        except Exception:
            with unset_fake_temporarily():  # it may ask for values; from_model takes them away
                made = make()
            if not isinstance(made, tuple):
                raise
    if callable(made) and not isinstance(made, nn.Module):
        return Step(title, made, [], lambda: torch.compile(made))
    pair = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(pair[0], nn.Module) or not isinstance(pair[1], dict):
        found = ", ".join(type(part).__name__ for part in pair)
        raise ToolError(f"--model {place} returned {found}: {NEEDED}")
    return from_model(title, *pair, use_amp, device)


def from_model(
    title: str, model: nn.Module, batch: dict, use_amp: bool, device: torch.device
) -> Step:
    """The step of a model on a batch, both moved to the device: forward, backward, AdamW."""
    if fake_mode():
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                held |= {k: placed(x, device) for k, x in held.items() if x is not None}
    else:
        model.to(device)
    batch = tree_map_only(Tensor, partial(placed, device=device), batch)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        raise ToolError(f"{title}: the model has no weight to train")

    def train(compiled: bool) -> Callable[[], None]:
        forward = torch.compile(model) if compiled else model
        gpu = device.type == "cuda"
        optimizer = torch.optim.AdamW(weights, 1e-5, fused=True, capturable=gpu)

        def take() -> None:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=use_amp):
                loss = forward(**batch)
            loss = getattr(loss, "loss", loss)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                shape = [*loss.shape] if isinstance(loss, Tensor) else type(loss).__name__
                raise ToolError(f"{title}: the loss is of shape or type {shape}: {NEEDED}")
            loss.backward()
            optimizer.step()

        return take

    return Step(title, train(False), weights, partial(train, True))


# --- counted and timed


@contextmanager
def of_the_user(name: str, compiled: bool = False) -> Iterator[None]:
    """Errors of the user's own code are one line, with the place where they came from."""
    try:
        yield
    except (ToolError, KeyboardInterrupt):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = [f"{whose(f.filename)}:{f.lineno}" for f in frames]
        at = [place for place in at if not place.startswith((":", "optimizer:"))]
        where = f" at {at[-1]}" if at else ""
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not compiled and any("/torch/_dynamo/" in f.filename for f in frames):
            what = f"what torch.compile makes, as FlexAttention does, is not understood ({what})"
        raise ToolError(f"{name} failed{where}: {what}", status=1) from error


def record(step: Step, timed: bool = False) -> Recorder:
    """One step, of which no tensor stays."""
    recorder = Recorder(timed)
    recorder.weights = {recorder.number(weight) for weight in step.weights}
    with recorder, of_the_user(step.name):
        step.take()
    return recorder


def count(build: Callable[[], Step]) -> tuple[Step, Recorder]:
    """Operators, bytes and FLOPs of a step of fake tensors: nothing is computed. A step that these
    cannot take is really taken, on the CPU."""

    def counted() -> tuple[Step, Recorder]:
        step = build()
        with of_the_user(step.name):
            step.take()  # the first one makes the optimizer's state
        return step, record(step)

    logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)  # the error is raised
    # V4's optimizer compares places in memory, and a fake tensor has none.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), without_launches():
            return counted()
    except Exception as error:
        if isinstance(error, ToolError) and error.__cause__ is None:
            raise
    found = counted()
    note("fake tensors cannot take this step, so two real ones were taken on this CPU")
    return found


def without_launches() -> AbstractContextManager:
    """Kernels of Triton are not launched: fake tensors have nothing that they could read."""
    try:
        from triton.runtime import KernelInterface
    except ImportError:
        return nullcontext()
    return mock.patch.object(KernelInterface, "__getitem__", lambda *_: lambda *args, **named: None)


def measure(step: Step, rates: Rates) -> Recorder:
    """The operators of a step with the times of their kernels, medians of some steps."""
    with of_the_user(step.name):
        for _ in range(REPEATS):
            step.take()
    times: dict[tuple, list[list[float]]] = {}  # of steps that were the same
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
            found = record(step, timed=True)
            torch.cuda.synchronize()
        attribute(found, profile, rates)
        same = tuple(operator.name for operator in found.operators)
        times.setdefault(same, []).append([operator.us for operator in found.operators])
    for operator, us in zip(found.operators, zip(*times[same], strict=True), strict=True):
        operator.us = statistics.median(us)
    return found


def attribute(found: Recorder, profile: torch.profiler.profile, rates: Rates) -> None:
    """Give each operator the time of the kernels that its call launched; kernels that no operator
    launched become operators that are not understood."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = load_trace(path)
    first = {operator.call: operator for operator in reversed(found.operators)}
    for operator in found.operators:
        operator.us, operator.kernels = 0.0, 0
    ranges = ranges_of(events, {f"#{call}" for call in range(1 + max(first, default=0))})
    kernels = sorted(kernels_of(events), key=lambda kernel: kernel.launch_us or 0)
    if not any(kernel.launch_us for kernel in kernels):
        raise ToolError(NO_KERNELS, status=1)
    call = -1
    for name, kernel in zip(range_of_each(kernels, ranges), kernels, strict=True):
        call = int(name[1:]) if name else call
        if name is None or call not in first:  # it comes behind the one before
            own = Operator(f"kernel {kernel.name[:40]}", call, "forward", "?", [], [], barrier=True)
            own.us = kernel.duration_ns / 1e3 + rates.gap_us
            found.operators.append(own)
        else:
            first[call].us += kernel.duration_ns / 1e3 + rates.gap_us
            first[call].kernels += 1
    found.operators.sort(key=lambda operator: operator.call)


# --- compiled


def compared(step: Step) -> dict:
    """A step beside the same compiled: medians of the turns and of their ratios."""
    with of_the_user(f"{step.name}, compiled", compiled=True):
        sides = {"now": step.take, "compiled": step.compiled()}
        turns = compare_in_turns(sides)
    result = {f"{name}_ms": statistics.median(ms) for name, ms in turns.ms.items()}
    return result | {"speedup": statistics.median(turns.ratios("compiled")), "turns_ms": turns.ms}

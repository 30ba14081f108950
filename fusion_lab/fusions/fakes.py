"""Steps of fake tensors, with which nothing is computed; and those that need values, which are
really taken on the CPU."""

from __future__ import annotations

import logging
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from fusion_lab.fusions.record import KERNELS, Recorded, patched, whose


class NeedsRun(Exception):
    """A step cannot go on without values."""


def fake_mode() -> FakeTensorMode | None:
    """The one that makes tensors fake here."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def without_values(value: Tensor) -> Tensor:
    """The tensor as fakes are here, itself where there are none."""
    mode = fake_mode()
    return mode.from_tensor(value) if mode and not isinstance(value, FakeTensor) else value


def where(error: BaseException) -> str:
    """The innermost line of the user's code in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    at = [f"{whose(f.filename)}:{f.lineno}" for f in frames]
    at = [place for place in at if not place.startswith((":", "optimizer:"))]
    return f" at {at[-1]}" if at else ""


class Between(TorchDispatchMode):
    """Between a step and fake tensors: knows which operator failed. With `made_up` it answers what
    asks for values: a number with 1, a question with no, after 1,000 with yes, and what there
    is of something with all of it."""

    def __init__(self, made_up: bool):
        super().__init__()
        self.made_up, self.answers, self.failed = made_up, 0, (None, None, (), {})

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "overloadpacket", function).__name__
        try:
            answer = self.answer(name, *args) if self.made_up else None
            return function(*args, **kwargs) if answer is None else answer
        except Exception as error:
            self.failed = error, function, args, kwargs
            raise

    def answer(self, name: str, x: Tensor | None = None, *more: object) -> object:
        """What is made up for an operator that asks for values; None for others."""
        if name == "_local_scalar_dense":
            self.answers += 1
            if self.answers > 2000:
                raise RuntimeError("a loop that does not end with values that are made up")
            asked = x.dtype == torch.bool
            return self.answers > 1000 if asked else 1.0 if x.is_floating_point() else 1
        if name == "equal":
            return True
        if name == "nonzero":
            return x.new_empty((x.numel(), x.dim()), dtype=torch.long)
        if name == "masked_select":
            return x.new_empty((x.numel(),))
        masks = [*enumerate(more[0])] if name == "index" else []
        for place, mask in masks:
            if mask is not None and mask.dtype == torch.bool:
                return x.new_empty((*x.shape[:place], mask.numel(), *x.shape[place + mask.dim() :]))
        return None

    def refuses(self, error: BaseException) -> str:
        """The operator that raised this, if it takes real tensors of the same shapes."""
        raised, function, args, kwargs = self.failed
        if raised is not error:
            return ""

        def real(x: FakeTensor) -> Tensor:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_()

        try:
            with unset_fake_temporarily():
                function(*tree_map_only(FakeTensor, real, args), **kwargs)
        except Exception:
            return ""
        return str(function)


# --- what ordinary training files do, and fake tensors do not


def moved(old: Callable, module: nn.Module, convert: Callable, *rest: object) -> nn.Module:
    """`.to(...)` of a module: what it leaves as it is stays the tensor that an optimizer has."""

    def kept(tensor: Tensor) -> Tensor:
        new = convert(tensor)
        same = (new.device, new.dtype) == (tensor.device, tensor.dtype)
        return tensor if same and not isinstance(tensor, FakeTensor) else new

    return old(module, kept, *rest)


def become(tensor: Tensor, new: Tensor) -> None:
    """A fake weight has the form of another one from now on."""
    tensor.data = new


def copied(old: Callable, tensor: Tensor, memo: dict) -> Tensor:
    """A deep copy, which looks into the memory of a tensor that has one."""
    with unset_fake_temporarily():
        return old(tensor, memo)


def loaded(old: Callable, loader: DataLoader) -> Iterator[object]:
    """The batches of a loader, without their values. They are loaded here, as workers could not
    send what was made without values, and they are no part of the step."""
    here = mock.patch.multiple(loader, num_workers=0, timeout=0)
    with _disable_current_modes(), here:
        batches = old(loader)
    while True:
        with _disable_current_modes():
            batch = next(batches, loaded)
        if batch is loaded:
            return
        yield tree_map_only(Tensor, without_values, batch)


ORDINARY = (
    (("torch.nn.modules.module", "Module", "_apply"), moved),
    (("torch", "Tensor", "__deepcopy__"), copied),
    (("torch.utils.data.dataloader", "DataLoader", "__iter__"), loaded),
)


@contextmanager
def faked(made_up: bool = False) -> Iterator[Between]:
    """Tensors without values: nothing is computed, and no kernel launched. What torch.compile would
    make is refused; with values that are made up it runs as it was written."""
    from torch._dynamo import eval_frame

    def refuse(callback: object) -> object:
        if callable(callback):  # else nothing is compiled here
            raise NeedsRun("what torch.compile makes")
        return callback

    logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)  # the error is raised
    # V4's optimizer compares places in memory, and a fake tensor has none.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    compiled = mock.patch.object(eval_frame, "_callback_from_stance", refuse)
    compiled = torch.compiler.set_stance("force_eager") if made_up else compiled
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(compiled)
        stack.enter_context(patched(KERNELS, lambda *_: lambda *args, **named: None))
        stack.enter_context(mock.patch("torch.utils.swap_tensors", become))
        for method, make in ORDINARY:
            stack.enter_context(patched(method, make))
        yield stack.enter_context(Between(made_up))


def needs_values(error: BaseException, between: Between) -> str:
    """What of a step needs values, operator and line, if that is why it failed."""
    line, operator = where(error), getattr(error, "func", None)
    if isinstance(error, NeedsRun):
        return f"{error} needs to be run{line}"
    if operator is not None:
        return f"{operator}{line} needs values"
    if operator := between.refuses(error):
        return f"{operator}{line} does not take fake tensors"
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    text = str(error).partition("\n")[0]
    of_torch = not whose(innermost) and between.failed[0] is not error
    of_torch |= bool(re.search("FakeTensor|tensor subclass|data pointer", str(error)))
    return f"fake tensors cannot take it{line} ({text})" if of_torch else ""


def estimate(counted: Callable[[], Recorded]) -> str:
    """How long two real steps take on this CPU, of which this counts one."""
    try:
        with faked(made_up=True):
            recorded = counted()
    except Exception:
        return "how long that takes cannot be told before"
    a, large = torch.ones(512, 512), torch.ones(2**23)

    def seconds(work: Callable[[], object]) -> float:
        work()
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    flop = sum(recorded.flop().values())
    products = flop / (2 * 512**3) * seconds(lambda: a @ a)
    copies = sum(o.moved for o in recorded.operators) / (8 * 2**23) * seconds(large.clone)
    return f"about {max(1, 2 * (products + copies)):.0f} s"

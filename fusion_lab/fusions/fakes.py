"""Steps without a GPU: tensors are fake, so nothing is computed, and what PyTorch chooses by the
device is chosen as a GPU has it."""

from __future__ import annotations

import importlib
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from fusion_lab.fusions.record import KERNELS, patched, whose


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
    at = [f"{whose(f.filename)}:{f.lineno}" for f in frames if whose(f.filename)]
    return f" at {at[-1]}" if at else ""


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
def faked() -> Iterator[None]:
    """Tensors without values: nothing is computed, and no kernel launched. What torch.compile would
    make is refused."""
    from torch._dynamo import eval_frame

    def refuse(callback: object) -> object:
        if callable(callback):  # else nothing is compiled here
            raise NeedsRun("what torch.compile makes needs to be run")
        return callback

    logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)  # the error is raised
    # V4's optimizer compares places in memory, and a fake tensor has none.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.object(eval_frame, "_callback_from_stance", refuse))
        stack.enter_context(patched(KERNELS, lambda *_: lambda *args, **named: None))
        stack.enter_context(mock.patch("torch.utils.swap_tensors", become))
        for method, make in ORDINARY:
            stack.enter_context(patched(method, make))
        yield


# --- as on a GPU: types of autocast, and optimizers that take all weights at once

AUTOCAST = ("torch.amp.autocast_mode", "autocast", "__init__")
FOREACH = ("torch.optim.optimizer", "torch.utils._foreach_utils")  # each asks lists of its own
DEVICES = ("cpu", "cuda")


def autocast(old: Callable, context: object, device_type: str, dtype=None, *rest, **named) -> None:
    """Autocast for a GPU casts the CPU's operators, to the same type."""
    if device_type == "cuda":
        device_type = "cpu"
        dtype = dtype or torch.get_autocast_dtype("cuda")
    old(context, device_type, dtype, *rest, **named)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """While it lasts, a step on the CPU of a machine without a GPU makes a GPU's choices."""
    if torch.cuda.is_available():
        yield
        return
    optimizer, utils = map(importlib.import_module, FOREACH)
    foreach = {"_foreach_supported_types": [torch.Tensor, nn.Parameter, FakeTensor]}
    devices = {"_get_foreach_kernels_supported_devices": lambda: [*DEVICES]}
    with (
        patched(AUTOCAST, autocast),
        mock.patch.multiple(optimizer, **foreach, **devices),
        mock.patch.multiple(utils, **foreach),
    ):
        yield

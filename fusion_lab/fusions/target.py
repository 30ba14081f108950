"""What PyTorch chooses by the device, chosen as a GPU has it where there is none: the types of
autocast, and optimizers and clipping that take all weights at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fusion_lab.fusions.record import patched

AUTOCAST = ("torch.amp.autocast_mode", "autocast", "__init__")
FOREACH = ("torch.optim.optimizer", "torch.utils._foreach_utils")  # each asks lists of its own
DEVICES = ("cpu", "cuda")


def autocast(old: Callable, context: object, device_type: str, dtype=None, *rest, **named) -> None:
    """Autocast for a GPU casts the CPU's operators, to the same type."""
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
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

"""How long streaming kernels take for their bytes, from those that were timed."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusion_lab.cli import ToolError

LEAST = torch.arange(0.25, 12, 0.25, dtype=torch.float64)  # microseconds
RATE = torch.logspace(1, 4.3, 100, dtype=torch.float64)  # GB/s
SMALL = 8  # tensors of so many times fewer elements than the largest
LARGE = 2**22  # bytes from which a kernel tells a rate
FEW = 3  # kinds of kernels that tell none


class Streaming(NamedTuple):
    """A kernel that does little but read and write."""

    access: str  # straight, strided, sums
    operator: str
    bytes: int
    us: float


def access_of(tensors: Iterable[Tensor]) -> str:
    """Do they all lie in memory densely and in one order? Small ones beside large ones lie in
    caches."""
    tensors = [*tensors]
    large = max((tensor.numel() for tensor in tensors), default=0) // SMALL
    forms = {((*tensor.shape,), tensor.stride()) for tensor in tensors if tensor.numel() > large}
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

"""Products in the form that torch.compile gives them: convolutions of pictures with channels last,
the bias added by the kernel behind, and matrices padded until their rows fit vector loads.

How much faster a product is then no rule tells, so `step.measure` times each form once. When a
form is changed is what PyTorch's compiler decides, in torch/_inductor/graph.py and
fx_passes/pad_mm.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.utils._pytree import tree_map

from lab.fusions.rates import Rates
from lab.fusions.record import Operator

VECTOR = {"bf16": 8, "fp16": 8, "TF32": 4, "fp32": 4}  # elements of 16 bytes
BOUND = 0.5  # from this part of the balance of FLOPs and bytes on, products are padded
FEW = 300  # operators to a convolution from which layouts are left as they are


def shapes(operator: Operator) -> list[list[int]]:
    return [x["shape"] for x in operator.form if isinstance(x, dict)]


def is_ragged(operator: Operator) -> bool:
    """Has a product of matrices a side that does not fit into vectors?"""
    sides = {side for shape in shapes(operator)[-2:] for side in shape[-2:]}
    fits = VECTOR.get(operator.dtype, 1)
    return "mm" in operator.name and any(side % fits for side in sides if side > 1)


def is_picture(operator: Operator) -> bool:
    """Is it a convolution over two dimensions?"""
    return "conv" in operator.name and len(shapes(operator)[0]) == 4


def changed(form: list, dtype: str) -> Callable[[], object]:
    """The product in the form that a compiler may give it, on random numbers."""
    name, *args = form
    fits = VECTOR.get(dtype, 1)

    def made(x: object) -> object:
        if not isinstance(x, dict):
            return x
        shape, dtype = x["shape"], getattr(torch, x["dtype"])
        if "conv" in name:
            layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            return torch.randn(shape, dtype=dtype, device="cuda").contiguous(memory_format=layout)
        sides = [math.ceil(side / fits) * fits for side in shape[-2:]]
        turned = len(shape) > 1 and x["strides"][-1] != 1
        sides = [*shape[:-2], *(sides[::-1] if turned else sides)]
        tensor = torch.randn(sides, dtype=dtype, device="cuda")
        return tensor.mT if turned else tensor

    args = tree_map(made, args, is_leaf=lambda x: isinstance(x, dict))
    if name == "convolution":
        args[2] = None
    return partial(getattr(torch.ops.aten, name), *args)


def to_change(operators: Sequence[Operator], rates: Rates) -> list[Operator]:
    """The products that a compiler gives another form, of those that were timed in it."""
    convolutions = [o for o in operators if o.name == "convolution" and is_picture(o)]
    weights = [shapes(o)[1] for o in convolutions]
    grouped = any(o.form[-1] > 1 and w[1] > 1 for o, w in zip(convolutions, weights, strict=True))
    training = any(o.phase == "backward" for o in operators)
    shrinks = any(2 * w[0] <= w[1] and w[2] > 1 for w in weights)
    small = all(w[0] <= 64 and w[1] <= 64 for w in weights)
    steady = grouped or (training and (shrinks or small)) or len(operators) >= FEW * len(weights)
    found = [o for o in operators if o.otherwise is not None]
    return [o for o in found if (not steady if is_picture(o) else padded(o, rates))]


def padded(operator: Operator, rates: Rates) -> bool:
    """Is a product bound by its FLOPs, so that a compiler tries to pad it?"""
    (*_, rows, inner), (*_, columns) = shapes(operator)[-2:]
    intensity = rows * inner * columns / (rows * inner + inner * columns + rows * columns)
    balance = 1e3 * rates.tflops.get(operator.dtype, math.inf) / rates.gb_per_s
    return intensity > BOUND * balance and operator.otherwise < operator.us

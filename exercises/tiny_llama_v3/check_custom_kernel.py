#!/usr/bin/env python3
"""Check a module that has the kernel of exercise 2, forward and backward, and time it beside
PyTorch.

Output and gradients are compared with float64. Which elements are dropped is read from the kernel
itself, with x = 0, update = 1 and scale = 1; this mask must look random and depend on nothing but
the seed and the place of an element.

Examples:
  python exercises/tiny_llama_v3/check_custom_kernel.py \\
      exercises/tiny_llama_v3/custom_kernel_solution.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from exercises.explain import explaining, kernels_of
from exercises.tiny_llama_v3 import measure
from fusion_lab.accuracy import check_close, check_gradients
from fusion_lab.cli import ToolError, documented_parser
from fusion_lab.script import import_file

PROG = Path(__file__).name
CASES = (  # shape, type of the update, share that is dropped
    ((100, 96), torch.float32, 0.1),
    ((3, 5, 64), torch.bfloat16, 0.5),
    ((1, 1000), torch.float32, 0.0),
)


def load(path: Path) -> ModuleType:
    """The module; ToolError if it is none, or has no residual_dropout."""
    if path.suffix != ".py" or not path.is_file():
        raise ToolError(f"{path}: no such module")
    with explaining(path):
        module = import_file(path)
    if missing := [
        name for name in ("residual_dropout", "TILE", "PROGRAMS") if not hasattr(module, name)
    ]:
        raise ToolError(f"{path}: it has no {missing[0]}")
    return module


def seed(number: int) -> Tensor:
    return torch.tensor([number], device=measure.DEVICE)


def kept(module: ModuleType, shape: tuple[int, ...], p: float, number: int = 1) -> Tensor:
    """Which elements are kept with this seed, as 1 and 0."""
    ones = torch.ones(shape, device=measure.DEVICE)
    factor = module.residual_dropout(
        torch.zeros_like(ones), ones, ones[(0,) * (ones.dim() - 1)], seed(number), p
    )
    if not isinstance(factor, Tensor):
        raise ToolError("residual_dropout returns no tensor: does forward end in `return out`?", 1)
    mask = (factor > 0).float()
    check_close(
        factor,
        mask / (1 - p),
        "the output with update = scale = 1, which must be 0 or 1 / (1 - p),",
    )
    return mask


def check_mask(module: ModuleType) -> None:
    """ToolError if the mask is not random, or depends on what it should not."""
    shape = (100, 96)
    p = 0.25
    mask = kept(module, shape, p)
    deviation = (mask.mean().item() - (1 - p)) / (p * (1 - p) / mask.numel()) ** 0.5
    own = "give each element one of its own, row * BLOCK_C + channel"
    faults = {
        f"rows or columns have equal random numbers; {own}": any(
            len(lines.unique(dim=0)) < len(lines) for lines in (mask, mask.T)
        ),
        f"[0, 1] and [1, 0] have equal random numbers; {own}": torch.equal(
            mask[1:, :-1], mask[:-1, 1:]
        ),
        f"{100 * mask.mean():.1f} % are kept, not {100 * (1 - p):.0f} %; "
        "an element is dropped where its random number is below p": abs(deviation) > 5,
        "the same seed drops other elements the second time": not torch.equal(
            mask, kept(module, shape, p)
        ),
        "another seed drops the same elements; tl.load(SEED) is the seed": torch.equal(
            mask, kept(module, shape, p, 2)
        ),
    }
    with mock.patch.object(module, "TILE", 256):
        faults[
            "with another TILE other elements are dropped; number them by row and channel, not by "
            "their place in a block"
        ] = not torch.equal(mask, kept(module, shape, p))
    for fault, there in faults.items():
        if there:
            raise ToolError(f"the mask is wrong: {fault}", status=1)


class Case(NamedTuple):
    """The kernel with a seed, the same with PyTorch's operators and the kernel's own mask, both as
    functions of x, update and scale."""

    reference: Callable[..., Tensor]
    mine: Callable[..., Tensor]
    inputs: dict[str, Tensor]
    where: str

    @classmethod
    def of(cls, module: ModuleType, shape: tuple[int, ...], dtype: torch.dtype, p: float) -> Case:
        generator = torch.Generator().manual_seed(0)
        x, update, scale = (
            torch.randn(size, generator=generator).to(measure.DEVICE)
            for size in (shape, shape, shape[-1:])
        )
        factor = kept(module, shape, p).double() / (1 - p)
        return cls(
            lambda x, update, scale: x + scale * update * factor,
            lambda x, update, scale: module.residual_dropout(x, update, scale, seed(1), p),
            {"x": x, "update": update.to(dtype), "scale": scale},
            f" of {list(shape)}, {str(dtype).removeprefix('torch.')}, p = {p},",
        )

    def check_output(self) -> None:
        """ToolError if the output is not what float64 gives."""
        expected = self.reference(*(tensor.double() for tensor in self.inputs.values()))
        check_close(self.mine(*self.inputs.values()), expected, f"the output{self.where}")

    def check_gradients(self) -> None:
        """ToolError if a gradient is not what float64 gives."""
        check_gradients(self.reference, self.mine, self.inputs, where=self.where)


def check(module: ModuleType) -> str:
    """Say what is right; ToolError names the first thing that is wrong.

    NotImplementedError if a part is still to be written.
    """
    check_mask(module)
    cases = [Case.of(module, *case) for case in CASES]
    for case in cases:
        case.check_output()
    print("mask and output: right")
    for case in cases:
        case.check_gradients()
    # so that a program has several blocks of rows
    with mock.patch.multiple(module, TILE=256, PROGRAMS=3):
        Case.of(module, *CASES[0]).check_gradients()
    return "gradients of x, update and scale: right"


def checked(module: ModuleType) -> str:
    """The same, where an error in the module is one line as well."""
    with explaining(Path(module.__file__), *kernels_of(module)):
        return check(module)


def extra_bytes(function, inputs: list[Tensor]) -> int:
    """Bytes kept for the backward pass, the inputs apart."""
    known = {tensor.data_ptr() for tensor in inputs}
    extra = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            extra[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return sum(extra.values())


def measured(module: ModuleType) -> Iterator[dict]:
    """Rows of the table, the update in bfloat16. Of PyTorch's operators the bytes are counted."""
    p = 0.1
    x, grad = torch.randn(2, 65536, 1024, device=measure.DEVICE)
    update = torch.randn_like(x).bfloat16()
    scale = torch.rand(1024, device=measure.DEVICE)
    inputs = [tensor.requires_grad_() for tensor in (x, update, scale)]
    number = seed(1)
    sides = {
        Path(module.__file__).name: lambda x, update, scale: module.residual_dropout(
            x, update, scale, number, p
        ),
        "PyTorch": lambda x, update, scale: x + scale * F.dropout(update, p),
    }
    # forward, and with the backward pass
    least = 2 * x.nbytes + update.nbytes, 3 * x.nbytes + 3 * update.nbytes
    for name, function in sides.items():
        steps = {
            "forward": lambda function=function: function(*inputs),
            "forward and backward": lambda function=function: torch.autograd.grad(
                function(*inputs), inputs, grad
            ),
        }
        kept_mb = f"{extra_bytes(function, inputs) / 1e6:.0f}"
        for (what, step), moved in zip(steps.items(), least, strict=True):
            moved = measure.bytes_of(step) if name == "PyTorch" else moved
            yield measure.timed(f"{name}, {what}", step, moved, **{"kept, MB": kept_mb})


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("module", type=Path, metavar="MODULE.py")
    measure.add_output(parser)
    args = parser.parse_args(argv)
    try:
        return measure.run(
            PROG,
            lambda: checked(load(args.module)),
            lambda: measured(load(args.module)),
            args.output,
        )
    except NotImplementedError as error:
        print(f"next: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())

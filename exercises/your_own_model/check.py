#!/usr/bin/env python3
"""Check `add_norm` of a file against float64, alone and in the vision transformer; then time both.

Alone it is given sizes that fit no block, both types, small numbers, large means, and tensors with
strides; in the model every weight's gradient is compared. On a GPU it then takes turns with the
operators of vit.py: alone, forward and backward, and as a training step in bf16.

Examples:
  python exercises/your_own_model/check.py exercises/your_own_model/solution.py
  python exercises/your_own_model/check.py --output your_own_model.json     with a GPU
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.func import functional_call

from exercises.explain import explaining, kernels_of
from exercises.memory import Memory
from exercises.tiny_llama_v3 import measure
from exercises.your_own_model import vit
from fusion_lab.accuracy import LIMITS, check_gradients
from fusion_lab.cli import ToolError, documented_parser, note, run_tool
from fusion_lab.files import write_text
from fusion_lab.script import import_file
from fusion_lab.turns import Turns, compare_in_turns

PROG = Path(__file__).name
MINE = Path(__file__).with_name("my_fusion.py")
LARGE = (128, 196, 384)  # of the small model
IN_MODEL = 1e-4  # errors of float32 through all layers
PARTS = ("add_norm, forward and backward", "a training step")


class Case(NamedTuple):
    """What add_norm is tried with, of which the rows have a mean."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32  # of the update
    scale: float = 1.0  # of x and update; in small ones eps counts
    mean: float = 1.0  # where it is large, a square has no digit left for the deviation
    step: str = ""  # where to look if the cases before are right

    def inputs(self) -> dict[str, Tensor]:
        """Arguments of add_norm."""
        generator = torch.Generator().manual_seed(0)
        x, update, weight, bias = (
            torch.randn(size, generator=generator).to(measure.DEVICE)
            for size in (self.shape, self.shape, self.shape[-1:], self.shape[-1:])
        )
        x, update = self.scale * (x + self.mean), self.scale * update.to(self.dtype)
        return {"x": x, "update": update, "weight": weight, "bias": bias}

    def __str__(self) -> str:
        words = [f" of {list(self.shape)}", str(self.dtype).removeprefix("torch.")]
        if self.scale != 1:
            words.append(f"deviation {self.scale:g}")
        if self.mean != 1:
            words.append(f"mean {self.mean:g}")
        return f"{', '.join(words)},"


CASES = (
    Case((4, 16)),
    Case((5, 13), step="do lanes beyond the row take part, does a program's second row add up?"),
    Case((2, 3, 48), torch.bfloat16, step="is it the type, or one more axis?"),
    Case((3, 16), scale=1e-3, step="is eps where the formula has it?"),
    Case((3, 16), mean=100.0, step="subtract the mean before you square"),
    Case((2, 1100), step="is there a number in place of C or BLOCK?"),
)
STEP = Case(LARGE, torch.bfloat16)  # in the small model
COUNTED = Case((7, 48))  # no tensor of another kind is as large as x
NEEDED = {"forward": 4, "backward": 5}  # tensors of the size of x that are loaded or stored


def transposed(function: Callable) -> Callable:
    """The same for [T, B, C], given as views."""

    def of_views(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        found = function(x.transpose(0, 1), update.transpose(0, 1), weight, bias)
        return tuple(value.transpose(0, 1) for value in found)

    return of_views


def check_alone(add_norm: Callable) -> None:
    """ToolError if an output or a gradient is not what float64 gives."""
    for case in (*CASES, *[STEP] * measure.GPU):
        given = case.inputs()
        try:
            check_gradients(vit.add_norm, add_norm, given, where=str(case))
        except ToolError as error:
            if case.step:
                step = f"right with {list(CASES[0].shape)}: {case.step}"
                raise ToolError(f"{error}; {step}", status=1) from error
            raise
        check_type(add_norm, given, str(case))
    views = transposed(vit.add_norm), transposed(add_norm)
    where = " of tensors with strides (is there a .contiguous()?)"
    check_gradients(*views, Case((3, 5, 16)).inputs(), where=where)


def check_type(add_norm: Callable, given: dict[str, Tensor], where: str) -> None:
    """ToolError if the norm has another type than the update, or was rounded to it twice."""
    exact = vit.add_norm(*(tensor.double() for tensor in given.values()))[1]
    found, dtype = add_norm(*given.values())[1], given["update"].dtype
    if found.dtype != dtype:
        types = f"{found.dtype}, and should be {dtype} for the next GEMM"
        raise ToolError(f"output 1{where} is {types}", status=1)
    # the interpreter does not round to bfloat16, but leaves digits out
    once = 1.02 * torch.finfo(dtype).eps * exact.abs() + LIMITS[torch.float32] * exact.abs().max()
    if ((found.double() - exact).abs() > once).any():
        text = "is rounded more than once: compute in float32, and round where you store"
        raise ToolError(f"output 1{where} {text}", status=1)


def not_practised(add_norm: Callable, memory: Memory) -> str:
    """What a right add_norm does without, or nothing. Its kernels' loads and stores are counted
    where Triton interprets them; ToolError if there are none."""
    given = [x.requires_grad_() for x in COUNTED.inputs().values()]
    size = given[0].nbytes
    memory.moved.clear()
    outputs = add_norm(*given)
    counts = {"forward": memory.moved[size] / size}
    torch.autograd.grad(outputs, given, [torch.ones_like(x) for x in outputs])
    counts["backward"] = memory.moved[size] / size - counts["forward"]
    for what, moved in counts.items():
        if not moved and not measure.GPU:
            raise ToolError(f"right, but the {what} pass launches no kernel", status=1)
        if moved > NEEDED[what]:
            return (
                f"one pass: {what}, kernels load and store {moved:.1f} times the size of x, and "
                f"{NEEDED[what]} are enough"
            )
    if memory.atomic:
        return (
            f"sums of each program's own: {memory.atomic} has atomic additions, in an order that "
            "changes from run to run"
        )
    return ""


def check_in_model(add_norm: Callable) -> int:
    """ToolError if a gradient of the tiny model is not what float64 gives; how many there are."""
    model, batch = vit.tiny()
    model.to(measure.DEVICE)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    images, labels = (tensor.to(measure.DEVICE) for tensor in batch.values())

    def loss(images: Tensor, *given: Tensor) -> Tensor:
        return functional_call(model, dict(zip(weights, given, strict=True)), (images, labels))

    def with_mine(*given: Tensor) -> Tensor:
        with mock.patch.object(vit, "add_norm", add_norm):
            return loss(*given)

    with torch.backends.cudnn.flags(allow_tf32=False):
        check_gradients(loss, with_mine, {"images": images, **weights}, IN_MODEL, " in the model")
    return len(weights)


def training_step(add_norm: Callable) -> Callable[[], None]:
    """Forward, backward and AdamW of the small model, in bf16."""
    model, batch = vit.small()
    model.to(measure.DEVICE)
    batch = {name: tensor.to(measure.DEVICE) for name, tensor in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True, capturable=True)

    def step() -> None:
        optimizer.zero_grad()
        with (
            torch.autocast(measure.DEVICE.type, torch.bfloat16),
            mock.patch.object(vit, "add_norm", add_norm),
        ):
            loss = model(**batch)
        loss.backward()
        optimizer.step()

    return step


def alone_step(add_norm: Callable) -> Callable[[], object]:
    """Forward and backward of one add_norm of the small model."""
    given = [x.requires_grad_() for x in STEP.inputs().values()]
    grads = [torch.randn_like(x).detach() for x in given[:2]]
    return lambda: torch.autograd.grad(add_norm(*given), given, grads)


def measured(add_norm: Callable) -> dict[str, Turns]:
    """Both ways in turns, alone and in the model."""
    sides = {"before": vit.add_norm, "after": add_norm}
    return {
        part: compare_in_turns({name: step(function) for name, function in sides.items()})
        for part, step in zip(PARTS, (alone_step, training_step), strict=True)
    }


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(PROG, __doc__)
    add = parser.add_argument
    add(
        "file",
        nargs="?",
        type=Path,
        default=MINE,
        metavar="FILE.py",
        help="(default: my_fusion.py)",
    )
    add("--output", type=Path, metavar="FILE.json", help="keep what was measured")
    args = parser.parse_args(argv)

    def body() -> int:
        if args.output and not measure.GPU:
            raise ToolError("--output needs a GPU: nothing is timed without one", status=4)
        if args.file.suffix != ".py" or not args.file.is_file():
            raise ToolError(f"{args.file}: no such module")
        try:
            with explaining(args.file):
                module = import_file(args.file)
            if not hasattr(module, "add_norm"):
                raise ToolError(f"{args.file}: it has no add_norm")
            with explaining(args.file, *kernels_of(module)) as memory:
                check_alone(module.add_norm)
                missed = not_practised(module.add_norm, memory)
                end = f". Not practised: {missed}" if missed else ""
                print(f"{args.file.name}, alone: outputs and gradients are right{end}")
                count = check_in_model(module.add_norm)
                print(f"{args.file.name}, in the model: the gradients of {count} weights are right")
        except NotImplementedError as error:
            print(f"{args.file.name}, next: {error}")
            return 1
        if not measure.GPU:
            note("no GPU: nothing is timed")
            return 0
        turns = measured(module.add_norm)
        for part, found in turns.items():
            print(f"\n{part}\n{found}")
        if args.output:
            environment = measure.v3.environment(measure.DEVICE)
            ms = {part: found.ms for part, found in turns.items()}
            text = json.dumps({"environment": environment, "ms": ms}, indent=1)
            write_text(args.output, text + "\n")
        return 0

    return run_tool(PROG, body)


if __name__ == "__main__":
    sys.exit(main())

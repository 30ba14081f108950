"""Is a result right? It is compared with the same in float64: element by element, or by norms.

In a notebook, for a kernel of one's own:

    from lab.accuracy import check_gradients

    print(check_gradients(plain, mine, {"x": torch.randn(5, 13), "bias": torch.randn(13)}))
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.cli import ToolError
from lab.explain import pattern

# the largest error that passes, over the largest right value; of other types SHORT
LIMITS = {torch.float64: 1e-11, torch.float32: 1e-5}
SHORT = 1e-2
ZERO = 1e-9  # a gradient below this share of the largest is zero but for float64's own rounding


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from what float64 gives."""

    what: str
    error: float  # the largest, over the largest right value; inf where a number is NaN
    limit: float
    place: str = ""  # of the largest error
    fault: str = ""  # what is there, and what the wrong elements have in common

    @property
    def right(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        verdict = "right" if self.right else "wrong"
        where = f", at {self.place}" if self.error else ""
        fault = "" if self.right else self.fault
        return (
            f"{self.what} is {verdict}: off by {self.error:.1g} of its largest value{where}{fault}"
        )


@dataclass(frozen=True, repr=False)
class Report:
    """What was compared: printed, a line for each tensor."""

    differences: tuple[Difference, ...]

    def __repr__(self) -> str:
        return "\n".join(map(str, self.differences))


def difference(
    found: Tensor, right: Tensor, what: str, limit: float | None = None, least: float = 0.0
) -> Difference:
    """How far `found` is from `right`, of the same shape; ToolError where it has another one.

    Errors are measured against the largest right value, or `least` if that is larger. The limit is
    that of the type of `found`, unless one is given.
    """
    if found.shape != right.shape:
        shapes = f"{list(found.shape)}, and should have {list(right.shape)}"
        raise ToolError(f"{what} is wrong: it has the shape {shapes}", status=1)
    limit = LIMITS.get(found.dtype, SHORT) if limit is None else limit
    if not right.numel():
        return Difference(what, 0.0, limit)
    found, right = found.detach().double(), right.detach().double()
    scale = max(right.abs().max().item(), least, 1e-300)
    error = ((found - right).abs() / scale).nan_to_num(math.inf)
    error[found == right] = 0.0  # infinities, too
    worst = error.argmax()
    place = [int(index) for index in torch.unravel_index(worst, right.shape)]
    wrong = error > limit
    fault = f" it is {found.flatten()[worst]:.6g} and should be {right.flatten()[worst]:.6g}"
    fault += f"; {int(wrong.sum())} of {right.numel()} elements are wrong"
    if found[wrong].isnan().any() and not right.isnan().any():
        fault += "; some are NaN: did nobody write them, or is there 0 / 0?"
    elif wrong.any() and (said := pattern(found, right, wrong)):
        fault += f"; {said}"
    return Difference(what, error.max().item(), limit, str(place), fault)


def check_close(found: Tensor, right: Tensor, what: str, limit: float | None = None) -> float:
    """Return the largest error over the largest right value; raise ToolError above the limit."""
    return checked(difference(found, right, what, limit)).differences[0].error


def checked(*differences: Difference) -> Report:
    """The report; ToolError with all that is wrong in it."""
    if wrong := [str(one) for one in differences if not one.right]:
        raise ToolError("; ".join(wrong), status=1)
    return Report(differences)


def relative_error(
    error: Tensor, exact: Tensor, rounding: Tensor | None = None, dim: int | None = None
) -> tuple[float, str]:
    """The largest error over the norm of what is exact, of the lines of a matrix along `dim` or of
    the whole tensor, and which line has it.

    No norm counts for less than ten times the root mean square of the same of `rounding`. What is
    not a number is larger than any, but a number, as JSON wants it.
    """

    def norms(value: Tensor) -> Tensor:
        return value.norm().reshape(1) if dim is None else value.norm(dim=dim)

    floor = 0.0 if rounding is None else 10 * norms(rounding).square().mean().sqrt().item()
    errors = norms(error) / norms(exact).clamp(min=max(floor, 1e-300))
    errors = errors.nan_to_num(nan=sys.float_info.max)
    place = int(errors.argmax())
    return float(errors[place]), {None: "", 0: f"[:, {place}]", 1: f"[{place}]"}[dim]


@contextlib.contextmanager
def memory_of_nan() -> Iterator[None]:
    """Inside, torch.empty() is filled with NaN.

    Otherwise a kernel that writes nothing can be taken for right, when it is given the memory of an
    earlier, right result.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what is not deterministic
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def outputs_of(function: Callable, inputs: Mapping[str, object], what: str) -> tuple[Tensor, ...]:
    """What it returns, always a tuple; ToolError if that is no tensor."""
    found = function(*inputs.values())
    found = found if isinstance(found, tuple) else (found,)
    if wrong := [type(value).__name__ for value in found if not isinstance(value, Tensor)]:
        raise ToolError(f"{what} returns {wrong[0]}, and should return a tensor", status=1)
    return found


def gradients_of(
    outputs: Sequence[Tensor], inputs: Mapping[str, object], grads: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    """The gradient of each floating-point input, None where none comes back."""
    leaves = {name: value for name, value in inputs.items() if is_float(value)}
    found = torch.autograd.grad(outputs, [*leaves.values()], grads, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def check_gradients(
    reference: Callable,
    mine: Callable,
    inputs: Mapping[str, object] | Sequence[object],
    limit: float | None = None,
    where: str = "",
) -> Report:
    """Compare outputs and gradients of `mine` with those of `reference` in float64.

    Both are called with the inputs in their order, and return a tensor or a tuple of them. Every
    floating-point tensor among the inputs, of any shape, strides, type and device, gets a gradient;
    `reference` is given it in float64, what else there is as it is. The gradients of the outputs
    are random, the same ones every time. Memory that `mine` allocates and does not write is NaN. A
    gradient that is zero in theory has no right digits: it is measured against the largest of all.

    Args:
        limit: the largest error that passes, over the largest right value of its tensor (default:
            by the tensor's type, 1e-5 in float32, 1e-2 in 16 bits).
        where: words for messages, such as " of [5, 13], bfloat16,".

    Returns:
        A report: printed, a line for each tensor with the place of its largest error.

    Raises:
        ToolError: one line with all tensors that are wrong, or with what keeps them from being
            compared: another shape, no gradient, an input that `mine` writes to.
    """
    named = (
        inputs if isinstance(inputs, Mapping) else {f"input {n}": x for n, x in enumerate(inputs)}
    )
    given, exact = (
        {n: change(x).requires_grad_() if is_float(x) else x for n, x in named.items()}
        for change in (Tensor.detach, lambda x: x.detach().to(torch.float64, copy=True))
    )
    expected = outputs_of(reference, exact, "the reference")
    if wrong := [x.dtype for x in expected if x.is_floating_point() and x.dtype != torch.float64]:
        raise ToolError(f"the reference is given float64, and returns {wrong[0]}", status=1)
    if not any(x.requires_grad for x in expected):
        raise ToolError("no output of the reference has a gradient", status=1)
    drawn = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    with memory_of_nan():
        found = outputs_of(mine, given, f"the operation{where}")
        if len(found) != len(expected):
            counts = f"{len(found)}, and should be {len(expected)}"
            raise ToolError(f"the outputs of the operation{where} are {counts}", status=1)
        names = ["the output"] if len(found) == 1 else [f"output {n}" for n in range(len(found))]
        results = checked(
            *(
                difference(*pair, f"{name}{where}", limit)
                for name, *pair in zip(names, found, expected, strict=True)
            )
        ).differences
        pairs = [pair for pair in zip(found, expected, strict=True) if pair[1].requires_grad]
        if not all(value.requires_grad for value, _ in pairs):
            hint = "no autograd.Function has made it, or its forward was called without apply()"
            raise ToolError(f"the operation{where} has an output without a gradient: {hint}", 1)
        found, expected = zip(*pairs, strict=True)
        grads = [torch.randn(x.shape, **drawn).to(x.device, x.dtype) for x in found]
        found_grads = gradients_of(found, given, grads)
    right_grads = gradients_of(expected, exact, [grad.double() for grad in grads])
    sizes = {n: x.abs().max().item() for n, x in right_grads.items() if x is not None and x.numel()}
    largest = max(sizes.values(), default=0.0)
    for name, right in right_grads.items():
        what = f"the gradient of {name}{where}"
        if not torch.equal(given[name].double(), exact[name]):
            raise ToolError(f"the operation{where} writes to its input {name}", status=1)
        if right is None:
            continue
        if found_grads[name] is None:
            raise ToolError(f"{what} is missing: backward returns None for it", status=1)
        least = largest if sizes.get(name, 0.0) < ZERO * largest else 0.0
        results += (difference(found_grads[name], right, what, limit, least),)
    return checked(*results)

"""Whether what was executed is what Triton's interpreter has computed: the rule, tensor by tensor.

Both round the same numbers, but add them up in another order. What they differ by is measured as a
root mean square, of a tensor and of each of its rows, and its limit is of the tensor's own type: a
share of its values, and of the steps between neighbouring numbers. A tensor that a kernel has read
and changed is held to the size of its change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_lab.amd.record import Recorded, View

# of the values, in float64 and in others: what another order of a sum makes, with room
FLOAT64, RELATIVE = 1e-12, 2e-5
XF32 = 2.0**-10  # where a product keeps 10 bits of its factors, as its kernel asks
# of the steps: a sum in float32 ends at a neighbour, but of numbers that are rounded to fewer bits
# only those that lie between two; of few elements these may be as many as this
STEPS, FEW_STEPS, FEW = 1.0, 1 / 8, 4
ROW = 8  # times as much in a row, whose size is at least this part of the tensor's
LEAST_ROW = 1 / 128
# A kernel of 16 bits rounds numbers on its way, and one that lies between two may be rounded the
# other way: one row of so many may be off by two steps of that type
ROWS_OF_ONE, ROUNDED = 128, 2


def size(x: Tensor) -> Tensor:
    """The root mean square of each row [rows, elements]."""
    return x.square().mean(1).sqrt()


def steps(x: Tensor, dtype: torch.dtype) -> Tensor:
    """How far the next number of the type is from each."""
    kind = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp_min(kind.tiny))
    return torch.ldexp(torch.full_like(x, kind.eps), exponent - 1)


def error_of(
    found: Tensor,
    expected: Tensor,
    before: Tensor | None = None,
    between: float = 0.0,
    relative: float = RELATIVE,
) -> tuple[float, str]:
    """The error of a tensor, as a share of its values or, with what was there before, of their
    change; and what is wrong, if it is above the limit. `between` is a step of the 16-bit type that
    the kernel rounds to on its way, as a share;
    `relative` is what the limit allows of the values."""
    dtype = expected.dtype
    if not dtype.is_floating_point:
        wrong = int((found != expected).sum())
        return (float("inf"), f"{wrong} elements differ") if wrong else (0.0, "")
    if not expected.numel():
        return 0.0, ""
    found, expected = found.double(), expected.double()
    numbers = expected.isfinite()
    same = (found == expected) | (found.isnan() & expected.isnan())
    if not (same | numbers & found.isfinite()).all():
        return float("inf"), "NaN or infinity where the interpreter has none, or the reverse"
    width = expected.shape[-1] if expected.dim() > 1 else expected.numel()
    numbers, found, expected = (x.reshape(-1, width) for x in (numbers, found, expected))
    value = torch.where(numbers, expected, 0)
    off = torch.where(numbers, found - expected, 0)
    rows, what = size(value), "its values"
    whole = rows.square().mean().sqrt()
    if before is not None:
        before = before.double().reshape(-1, width)
        change = torch.where(numbers & before.isfinite(), expected - before, value)
        changed = size(change)
        if 0 < changed.square().mean().sqrt() < whole:
            rows, what = torch.minimum(rows, changed), "their change"
            whole = changed.square().mean().sqrt()
    relative = FLOAT64 if dtype == torch.float64 else relative
    few = max(FEW_STEPS, (FEW / value.numel()) ** 0.5)
    share = STEPS if torch.finfo(dtype).bits >= 32 else few
    step = size(steps(value, dtype))
    errors = size(off)
    error = errors.square().mean().sqrt()
    limit = relative * whole + share * step.square().mean().sqrt()
    least = rows.clamp_min(whole * LEAST_ROW)
    of_rows = ROW * (relative * least + share * step)
    in_all = float(error / whole.clamp_min(torch.finfo(torch.float64).tiny))
    worst = (errors / of_rows).topk(len(errors) // ROWS_OF_ONE).indices
    errors[worst[errors[worst] <= ROUNDED * between * least[worst]]] = 0
    if errors.square().mean().sqrt() > limit:
        return in_all, f"off by {in_all:.1e} of {what}"
    if (errors > of_rows).any():
        row = int((errors / of_rows).argmax())
        return in_all, f"row {row} is off by {float(errors[row] / rows[row]):.1e} of {what}"
    return in_all, ""


def difference(
    launch: Recorded, storages: list[Tensor], read: set[str], xf32: bool
) -> tuple[float, str]:
    """The largest error of a launch, and what is wrong with its tensors on these storages, if
    anything is; `read` are the arguments whose tensors the kernel has read."""
    views = {name: view for name, view in launch.arguments.items() if isinstance(view, View)}
    in_place = {views[name].storage for name in read}
    types = {view.dtype for view in views.values()} & {torch.bfloat16, torch.float16}
    between = max((torch.finfo(dtype).eps for dtype in types), default=0.0)
    largest, wrong = 0.0, ""
    for name, view in views.items():
        found, expected, before = (view.of(x) for x in (storages, launch.after, launch.before))
        before = before if view.storage in in_place else None
        error, remark = error_of(found, expected, before, between, XF32 if xf32 else RELATIVE)
        largest = max(largest, error)
        if remark and not wrong:
            wrong = f"{name}: {remark}"
    # what lies between and behind the views, too
    for number, (found, expected) in enumerate(zip(storages, launch.after, strict=True)):
        seen = torch.zeros(len(found), dtype=torch.bool)
        for view in (view for view in views.values() if view.storage == number):
            view.of_bytes(seen).fill_(True)
        if not torch.equal(found[~seen], expected[~seen]):
            wrong = "writes outside of its tensors"
    return largest, wrong

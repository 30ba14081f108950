"""Is a result right? It is compared with the same in float64: a single kernel element by element,
a whole model by the norms of its outputs and gradients.

In a notebook, for a kernel of one's own:

    from fusion_lab.accuracy import check_gradients

    print(check_gradients(plain, mine, {"x": torch.randn(5, 13), "bias": torch.randn(13)}))
"""

import argparse
import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusion_lab.cli import ToolError
from fusion_lab.host import free_memory

GRADIENT = "gradient of "  # stands before a parameter's name
# the largest error that passes, over the largest right value; of other types SHORT
LIMITS = {torch.float64: 1e-11, torch.float32: 1e-5}
SHORT = 1e-2
ROUNDING = 5e-3  # errors below this share of the largest value may be rounding to 16 bits
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
    """How far `found` is from `right`; ToolError where it has another shape. Errors are measured
    against the largest right value, or `least` if that is larger; the limit is that of the type of
    `found`, unless one is given."""
    if found.shape != right.shape:
        shapes = f"{list(found.shape)}, and should have {list(right.shape)}"
        raise ToolError(f"{what} is wrong: it has the shape {shapes}", status=1)
    limit = LIMITS.get(found.dtype, SHORT) if limit is None else limit
    if not right.numel():
        return Difference(what, 0.0, limit)
    found_in_float32 = found.dtype == torch.float32
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
    elif found_in_float32 and limit < error.max() < ROUNDING:
        fault += "; the errors are as large as those of 16 bits: is it rounded on the way?"
    return Difference(what, error.max().item(), limit, str(place), fault)


def pattern(found: Tensor, right: Tensor, wrong: Tensor) -> str:
    """What wrong elements have in common and where to look, or nothing; `wrong` is a mask of
    them."""
    if found[wrong].isnan().all():
        return "all of these are NaN: is there inf - inf, inf / inf or 0 / 0?"
    if found[wrong].isinf().all():
        return "all of these are infinite: is it exp, 1 / 0, or -inf that a loop never changes?"
    if not found.any():
        return "all is 0: does the result reach the store?"
    factors = (found / right)[wrong & (right != 0)]
    if len(factors) > 1 and equal(factors):
        return f"each is {factors[0]:.4g} times what it should be: a factor, a sign or a mean?"
    rows = wrong.reshape(len(wrong), -1).any(1) if wrong.dim() else wrong.reshape(1)
    if len(rows) > 1 and not rows[0] and rows[1:].all():
        return "the first row is right and no other: does row r begin at r times its length?"
    if right.dim() == 2 and torch.allclose(
        found, right.T.reshape(right.shape), 1e-3, equal_nan=True
    ):
        return "rows and columns are exchanged"
    return common_part(found, right) if right.dim() > 1 else ""


def equal(values: Tensor) -> bool:
    """Are they all the same number, but for rounding?"""
    return bool(values.isfinite().all() and values.max() - values.min() < 3e-3 * values[0].abs())


def common_part(found: Tensor, right: Tensor) -> str:
    """What the elements of each row, or of each column, are off by; or nothing."""
    found, right = (x.reshape(-1, x.shape[-1]) for x in (found, right))
    half = right.shape[1] // 2
    if half and torch.allclose(found, right.roll(half, 1), 1e-3, 0) and 2 * half == right.shape[1]:
        return "the first and the second half of each row are exchanged"
    for what, axis in (("row", 0), ("column", 1)):
        for how, off in (("factor", found / right), ("summand", found - right)):
            lines = off.unbind(axis)
            if len(lines[0]) > 2 and all(map(equal, lines)):
                return f"each {what} has a {how} of its own: is one forgotten, or there twice?"
    return ""


def check_close(found: Tensor, right: Tensor, what: str) -> float:
    """Return the largest error over the largest right value; raise ToolError above its type's
    limit."""
    return checked(difference(found, right, what)).differences[0].error


def compare(
    pairs: Mapping[str, tuple[Tensor, Tensor, float]], limit: float | None
) -> tuple[Difference, ...]:
    """How far each tensor is from what is right, where errors count at least so much; and is a
    wrong one what another one should be?"""
    compared = []
    for what, (found, right, least) in pairs.items():
        one = difference(found, right, what, limit, least)
        others = [] if one.right or not found.any() else pairs.items()
        for other, (_, expected, least) in others:
            same_shape = found.shape == expected.shape
            if same_shape and difference(found, expected, other, limit, least).right:
                text = f"it is what {other.rstrip(',')} should be: are the two exchanged?"
                one = replace(one, fault=f"{one.fault}; {text}")
        compared.append(one)
    return tuple(compared)


def checked(*differences: Difference) -> Report:
    if wrong := [str(one) for one in differences if not one.right]:
        raise ToolError("; ".join(wrong), status=1)
    return Report(differences)


@contextlib.contextmanager
def memory_of_nan() -> Iterator[None]:
    """Inside, torch.empty() is filled with NaN: or a kernel that writes nothing could be taken for
    right, when it is given the memory of an earlier, right result."""
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
        triples = zip(names, found, expected, strict=True)
        outputs = {f"{name}{where}": (mine, right, 0.0) for name, mine, right in triples}
        results = checked(*compare(outputs, limit)).differences
        pairs = [pair for pair in zip(found, expected, strict=True) if pair[1].requires_grad]
        if not all(value.requires_grad for value, _ in pairs):
            hint = "no autograd.Function has made it, or its forward was called without apply()"
            raise ToolError(f"the operation{where} has an output without a gradient: {hint}", 1)
        found, expected = zip(*pairs, strict=True)
        grads = [torch.randn(x.shape, **drawn).to(x.device, x.dtype) for x in found]
        kept = [grad.clone() for grad in grads]
        found_grads = gradients_of(found, given, grads)
    if not all(map(torch.equal, grads, kept)):
        raise ToolError(f"the backward pass{where} writes to a gradient that it is given", status=1)
    right_grads = gradients_of(expected, exact, [grad.double() for grad in grads])
    sizes = {n: x.abs().max().item() for n, x in right_grads.items() if x is not None and x.numel()}
    largest = max(sizes.values(), default=0.0)
    gradients = {}
    for name, right in right_grads.items():
        what = f"the gradient of {name}{where}"
        if not torch.equal(given[name].double(), exact[name]):
            raise ToolError(f"the operation{where} writes to its input {name}", status=1)
        if right is None:
            continue
        if found_grads[name] is None:
            raise ToolError(f"{what} is missing: backward returns None for it", status=1)
        least = largest if sizes.get(name, 0.0) < ZERO * largest else 0.0
        gradients[what] = found_grads[name], right, least
    return checked(*results, *compare(gradients, limit))


# --- whole models; `script` is the module of a version


class InFloat64(TorchFunctionMode):
    """Inside, what asks for float32 gets float64, so that a model in float64 stays in it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            return args[0].double()

        def wide(value):
            return torch.float64 if value is torch.float32 else value

        kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(wide, args), **kwargs)


def values_of(
    script: ModuleType, trainer, exact: bool = False, seed: int = 0
) -> dict[str, Tensor]:  # fmt: skip
    """Return outputs, loss and gradients by canonical name; a missing gradient is NaN.

    `exact`: in float64. With a `seed` the weights are off by up to a quarter of their last digit,
    so that everything is rounded differently. Afterwards the trainer is of no use.
    """
    args, batch, model, forward = trainer.args, trainer.next_batch(), trainer.model, trainer.forward
    context = trainer.autocast
    if seed:  # the last digit of a number near 1, as a matrix product takes it
        digit = 2.0 ** (-23 if args.matmul_precision == "highest" else -10)
        if args.use_amp:
            digit = torch.finfo(getattr(torch, args.amp_dtype)).eps
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.data *= (1 + digit / 2 * noise).to(parameter.device)
    if exact:
        model = forward = script.build_model(args, trainer.device).double()
        model.load_state_dict(trainer.model.state_dict())
        batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
        context = InFloat64
    with torch.no_grad(), context():
        outputs = forward(**{n: t for n, t in batch.items() if n not in model.TARGETS})
    values = dict(outputs) if isinstance(outputs, dict) else {"outputs": outputs}
    with context():  # anew: PyTorch 2.6 would reuse the weights that it cast without gradients
        values["loss"] = forward(**batch)
    scale = 1024  # a power of two: away from the smallest numbers of float16
    (scale * values["loss"]).backward()
    if trainer.average and not exact:
        trainer.average()
    for parameter in model.parameters():  # state_dict then splits gradients of fused weights
        grad = torch.full_like(parameter, math.nan) if parameter.grad is None else parameter.grad
        if exact and script.WORLD_SIZE > 1:  # as DDP or the optimizer does
            dist.all_reduce(grad)
            grad /= script.WORLD_SIZE
        parameter.data = grad.double() / scale
    values |= {f"{GRADIENT}{name}": grad for name, grad in model.state_dict().items()}
    return {name: value.detach().double() for name, value in values.items()}


def judge(
    exact: dict, unfused: list[dict], fused: dict, least: float
) -> dict[str, tuple[float, float]]:
    """Return each value's relative error and its limit: three times the largest error of the
    unfused runs, or `least` (at most 1e-3 for what is no gradient) if that is more; 0 where one of
    these is NaN."""
    norms = {name: float(value.norm()) for name, value in exact.items()}
    total = math.hypot(*(norm for name, norm in norms.items() if name.startswith(GRADIENT)))
    judged = {}
    for name, norm in norms.items():
        scale = scale_of(norm, total, least)
        sizes = [float((side[name] - exact[name]).norm()) for side in (fused, *unfused)]
        error, *errors = (size / scale if math.isfinite(size) else math.inf for size in sizes)
        floor = least if name.startswith(GRADIENT) else min(least, 1e-3)
        judged[name] = error, max(floor, 3 * max(errors)) if max(errors) < math.inf else 0.0
    return judged


def scale_of(norm: float, total: float, least: float) -> float:
    """What errors of a value are measured against: its norm, or 1e-5 of that of all gradients.

    A gradient of zero in theory, as that of a bias which softmax takes out, is the noise of sums in
    another order: it counts for 1e-3 of all, or for `least` / 10.
    """
    if norm > 1e-12 * total or not math.isfinite(total):
        return max(norm, 1e-5 * total)
    return max(1e-3, least / 10) * total


def worst_of(judged: Mapping[str, tuple[float, float]]) -> str:
    """The name of the error most beyond its limit, or nearest to it; a NaN is beyond any."""

    def beyond(name: str) -> float:
        error, limit = judged[name]
        return math.inf if math.isnan(error) else error / max(limit, 1e-300)

    return max(judged, key=beyond)


def least_limit(args: argparse.Namespace) -> float:
    """Return the error below which nothing is judged: a ReLU's argument may round beyond zero.

    In float32 that is rare: gradients of 1,056 positions were 1.9e-3 off for one seed of three,
    and 1e-6 for the others. In TF32 gradients of a model of 60 positions were 4 % off, and 5.5 %
    with 3 samples of 5 residues: below 100 residues or tokens one of them weighs more.
    """
    if args.use_amp or args.matmul_precision != "highest":
        return max(0.05, 0.5 / math.sqrt(args.batch_size * args.seq_len))
    return 3e-3


def judged_values(
    script: ModuleType,
    args: argparse.Namespace,
    make_trainer: Callable | None = None,
    fused: dict | None = None,
    least: float | None = None,
) -> dict[str, tuple[float, float]]:
    """Judge `fused`, what these arguments give unless they are another script's, by float64. In a
    small model a few roundings decide on the unfused one's error: where one run of it does not
    explain an error, eight more may."""
    make_trainer = make_trainer or (lambda args: script.Trainer(args).build())
    off = script.all_off(args)
    in_float64 = script.all_off(off, use_amp=False, matmul_precision="highest")
    exact = values_of(script, make_trainer(in_float64), exact=True)
    fused, unfused = fused or values_of(script, make_trainer(args)), []
    for seeds in range(1), range(1, 9):
        unfused += [values_of(script, make_trainer(off), seed=seed) for seed in seeds]
        judged = judge(exact, unfused, fused, least or least_limit(args))
        doubt = torch.tensor(int(any(e > limit for e, limit in judged.values())))
        if script.WORLD_SIZE > 1:  # together, or nobody averages gradients
            dist.all_reduce(doubt := doubt.to(args.device))
        if not doubt:
            break
    return judged


# --- two scripts

EAGER_STEPS = 2  # before a step is captured as a graph
CURVE = 1e-3  # relative difference of losses


@dataclass(frozen=True)
class Side:
    """A script with its arguments."""

    script: ModuleType
    args: argparse.Namespace

    def shapes(self) -> Set[tuple[str, tuple[int, ...]]]:
        """Of its weights, by canonical name."""
        state = self.script.build_model(self.args, torch.device("meta")).state_dict()
        return {name: tuple(value.shape) for name, value in state.items()}.items()

    def trainer(self, weights: Mapping[str, Tensor], batches: object):
        """A new Trainer with these weights, for batches from this source."""
        free_memory()
        trainer = self.script.Trainer(self.args).build()
        trainer.model.load_state_dict(weights)
        trainer.batches = batches
        return trainer

    def batches(self) -> object:
        return self.script.make_batches(self.args, torch.device("cpu"), self.args.seed)


def row_of(what: str, judged: Mapping[str, tuple[float, float]]) -> dict:
    """The worst of these relative errors with its limit, by its place; or all that are no number.
    A NaN fails."""
    error, limit = judged[worst := worst_of(judged)]
    if not math.isfinite(error):
        worst = ", ".join(name for name, (error, _) in judged.items() if not math.isfinite(error))
    return {"what": what, "worst": worst, "error": error, "limit": limit, "passed": error <= limit}


def compare_values(
    first: Side, second: Side, weights: Mapping, when: str, tolerance: float | None
) -> list[dict]:
    """Rows for outputs, loss and gradients at these weights, judged as by --verify-accuracy."""

    def make_trainer(args: argparse.Namespace):
        return replace(first, args=args).trainer(weights, first.batches())

    print(f"comparing outputs and gradients {when} with float64", file=sys.stderr)
    found = values_of(second.script, second.trainer(weights, first.batches()))
    judged = judged_values(first.script, first.args, make_trainer, found, tolerance)
    free_memory()
    gradients = {name: judged.pop(name) for name in list(judged) if name.startswith(GRADIENT)}
    loss = {"loss": judged.pop("loss")}
    what = {"outputs": judged, "loss": loss, f"{len(gradients)} gradients": gradients}
    return [row_of(f"{kind} {when}", some) for kind, some in what.items()]


def compare_scripts(first: Side, second: Side, tolerance: float | None, steps: int) -> list[dict]:
    """Does the second script compute what the first one does, with its weights and batches? Rows
    for outputs, loss and gradients at first and after so many steps, and for the losses of
    these."""
    weights = first.script.build_model(first.args, first.script.prepare(first.args)).state_dict()
    rows, curves, trained = compare_values(first, second, weights, "at first", tolerance), [], {}
    if any(not math.isfinite(row["error"]) for row in rows):
        return rows  # an optimizer may refuse to go on
    for side in (first, second):
        trainer, losses = side.trainer(weights, first.batches()), []
        print(f"{side.script.SCRIPT}: {steps} training steps", file=sys.stderr)
        for step in range(steps):
            if trainer.args.cuda_graph and step == EAGER_STEPS:
                trainer.capture()
            losses.append(float(trainer.step()))
        curves.append(losses)
        state = trainer.model.state_dict().items()
        trained = trained or {name: value.clone() for name, value in state}
        del trainer, state
        free_memory()
    rows += compare_values(first, second, trained, f"after {steps} steps", tolerance)
    pairs = enumerate(zip(*curves, strict=True), start=1)
    errors = {n: abs(loss - expected) / abs(expected) for n, (expected, loss) in pairs}
    curve = {f"step {n}": (error, tolerance or CURVE) for n, error in errors.items()}
    return [*rows, row_of(f"losses of {steps} steps", curve)]

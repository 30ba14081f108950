"""Formulas that readers write in place of those of add_norm, so that the checker can say which it
is. Only a result that is wrong is compared with them, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace as Values

import torch
from torch import Tensor

from exercises.your_own_model import vit
from fusion_lab.accuracy import difference


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def sums(x: Tensor) -> Tensor:
    """Over rows."""
    return x.flatten(0, -2).sum(0)


def norm_backward(v: Values, rstd: Tensor) -> Tensor:
    """The gradient of x with this rstd."""
    n = v.centred * rstd
    return v.grad_sum + rstd * (v.g - mean(v.g) - n * mean(v.g * n))


def values_of(given: Mapping[str, Tensor], grad_sum: Tensor, grad_out: Tensor) -> Values:
    """What the formulas are made of, in float64."""
    x, update, weight, bias = (tensor.detach().double() for tensor in given.values())
    v = Values(x=x, update=update, weight=weight, bias=bias)
    v.grad_sum, v.grad_out = grad_sum.double(), grad_out.double()
    v.s, v.C = x + update, x.shape[-1]
    v.lanes = 1 << (v.C - 1).bit_length()
    v.centred = v.s - mean(v.s)
    v.var = mean(v.centred**2)
    v.rstd = (v.var + vit.EPS).rsqrt()
    v.n, v.g = v.centred * v.rstd, v.grad_out * weight
    return v


def norm(v: Values, rstd: Tensor) -> Tensor:
    return v.centred * rstd * v.weight + v.bias


def of_a_mean_of_block(v: Values) -> Tensor:
    centred = v.s - mean(v.s) * v.C / v.lanes
    return centred * (mean(centred**2) + vit.EPS).rsqrt() * v.weight + v.bias


OF_X: dict[str, Callable[[Values], Tensor]] = {
    "eps is missing": lambda v: norm_backward(v, v.var.rsqrt()),
    "eps is outside of the root": lambda v: norm_backward(v, 1 / (v.var.sqrt() + vit.EPS)),
    "grad_sum is not added": lambda v: norm_backward(v, v.rstd) - v.grad_sum,
    "this is grad_sum alone": lambda v: v.grad_sum,
    "mean(g) is not subtracted": lambda v: norm_backward(v, v.rstd) + v.rstd * mean(v.g),
    "n * mean(g * n) is not subtracted": lambda v: v.grad_sum + v.rstd * (v.g - mean(v.g)),
    "n * mean(g * n) is added: subtract it": lambda v: (
        v.grad_sum + v.rstd * (v.g - mean(v.g) + v.n * mean(v.g * v.n))
    ),
    "the sum of g is not divided by C": lambda v: (
        norm_backward(v, v.rstd) + (1 - v.C) * v.rstd * mean(v.g)
    ),
    "the sum of g * n is not divided by C": lambda v: (
        v.grad_sum + v.rstd * (v.g - mean(v.g) - v.C * v.n * mean(v.g * v.n))
    ),
    "the factor rstd is missing": lambda v: v.grad_sum + v.g - mean(v.g) - v.n * mean(v.g * v.n),
    "g is grad_out * weight: weight is missing": lambda v: (
        v.grad_sum + v.rstd * (v.grad_out - mean(v.grad_out) - v.n * mean(v.grad_out * v.n))
    ),
    "x - mean is in place of n": lambda v: (
        v.grad_sum + v.rstd * (v.g - mean(v.g) - v.centred * mean(v.g * v.centred))
    ),
}
MISTAKES: dict[str, dict[str, Callable[[Values], Tensor]]] = {
    "output 0": {
        "update is not added": lambda v: v.x,
        "update is added twice": lambda v: v.s + v.update,
    },
    "output 1": {
        "eps is missing": lambda v: norm(v, v.var.rsqrt()),
        "eps is outside of the root": lambda v: norm(v, 1 / (v.var.sqrt() + vit.EPS)),
        "eps is divided by C": lambda v: norm(v, (v.var + vit.EPS / v.C).rsqrt()),
        "the root is missing": lambda v: norm(v, v.rstd**2),
        "this multiplies by the root": lambda v: norm(v, 1 / v.rstd),
        "the mean is not subtracted": lambda v: (
            v.s * (mean(v.s**2) + vit.EPS).rsqrt() * v.weight + v.bias
        ),
        "the mean is not subtracted before squaring": lambda v: norm(
            v, (mean(v.s**2) + vit.EPS).rsqrt()
        ),
        "the variance is divided by C - 1: by C": lambda v: norm(
            v, (v.var * v.C / (v.C - 1) + vit.EPS).rsqrt()
        ),
        "the variance is divided by BLOCK: by C": lambda v: norm(
            v, (v.var * v.C / v.lanes + vit.EPS).rsqrt()
        ),
        "lanes beyond the row take part in the variance: x - mean is not 0 there": lambda v: norm(
            v, (v.var + mean(v.s) ** 2 * (v.lanes / v.C - 1) + vit.EPS).rsqrt()
        ),
        "the mean is divided by BLOCK: by C": of_a_mean_of_block,
        "weight and bias are added before they are multiplied": lambda v: v.n * (v.weight + v.bias),
        "weight is missing": lambda v: v.n + v.bias,
        "bias is missing": lambda v: v.n * v.weight,
        "bias is multiplied by weight: add it last": lambda v: (v.n + v.bias) * v.weight,
        "bias is in place of weight": lambda v: v.n * v.bias + v.bias,
        "weight is in place of bias": lambda v: v.n * v.weight + v.weight,
        "this is the norm of x: that of the sum": lambda v: torch.nn.functional.layer_norm(
            v.x, v.weight.shape, v.weight, v.bias, vit.EPS
        ),
    },
    "the gradient of x": OF_X,
    "the gradient of update": OF_X,
    "the gradient of weight": {
        "n is missing: a sum of grad_out * n": lambda v: sums(v.grad_out),
        "the sum is of grad_out * n, without weight": lambda v: sums(v.g * v.n),
        "the norm is in place of n": lambda v: sums(v.grad_out * v.s),
        "rstd is missing in n": lambda v: sums(v.grad_out * v.centred),
        "this is the last row alone": lambda v: (v.grad_out * v.n).flatten(0, -2)[-1],
    },
    "the gradient of bias": {
        "weight is not in it: a sum of grad_out": lambda v: sums(v.g),
        "n is not in it: a sum of grad_out": lambda v: sums(v.grad_out * v.n),
        "this is the last row alone": lambda v: v.grad_out.flatten(0, -2)[-1],
    },
}


def mistake_in(what: str, found: Tensor | None, right: Tensor, v: Values) -> str:
    """Which mistake makes this of it, or nothing."""
    if found is None or found.shape != right.shape or difference(found, right, what).right:
        return ""
    formulas = MISTAKES[what].items()
    return next((text for text, f in formulas if difference(found, f(v), what).right), "")


def named(add_norm: Callable, given: Mapping[str, Tensor]) -> str:
    """The mistake of an add_norm of which outputs or gradients are wrong; or nothing."""
    mine = [x.detach().clone().requires_grad_() for x in given.values()]
    exact = [x.detach().double().requires_grad_() for x in given.values()]
    outputs, expected = add_norm(*mine), vit.add_norm(*exact)
    if not isinstance(outputs, tuple) or [x.shape for x in outputs] != [x.shape for x in expected]:
        return ""
    grads = [torch.randn_like(x).detach() for x in outputs]
    v = values_of(given, *grads)
    for number, pair in enumerate(zip(outputs, expected, strict=True)):
        if text := mistake_in(f"output {number}", *pair, v):
            return text
    if not all(difference(*pair, "").right for pair in zip(outputs, expected, strict=True)):
        return ""  # so there was no backward pass yet
    copies = [grad.clone() for grad in grads]
    found = torch.autograd.grad(outputs, mine, copies, allow_unused=True)
    right = torch.autograd.grad(expected, exact, [grad.double() for grad in grads])
    for name, *pair in zip(given, found, right, strict=True):
        if text := mistake_in(f"the gradient of {name}", *pair, v):
            return text
    return ""

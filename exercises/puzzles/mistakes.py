"""Formulas that readers write in place of those at the head of a puzzle, so that the checker can
say which it is. Only a result that is wrong is compared with them, in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Values

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
Formulas = dict[str, dict[str, Callable[[Values], Tensor]]]  # output: what is said: it, of values


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def of_softmax(x: Tensor) -> Values:
    e = (x - x.amax(1, keepdim=True)).exp()
    power = 2 ** (x - x.amax(1, keepdim=True))
    return Values(x=x, e=e, C=x.shape[1], power=power)


def of_rms_norm(x: Tensor, weight: Tensor, grad: Tensor | None = None) -> Values:
    square, C = mean(x * x), x.shape[1]
    rstd = (square + EPS).rsqrt()
    values = Values(x=x, weight=weight, square=square, C=C, rstd=rstd, norm=x * rstd)
    values.block = 1 << (C - 1).bit_length()
    if grad is not None:
        values.grad, values.g = grad, grad * weight
        values.second = values.norm * mean(values.g * values.norm)
    return values


def norm_backward(v: Values, rstd: Tensor) -> Tensor:
    """grad_x of puzzle 6 with this rstd."""
    return rstd * (v.g - v.x * rstd * mean(v.g * v.x * rstd))


def of_programs(x: Tensor) -> Tensor:
    """The rows of each program of puzzle 6, [programs, 16, C]."""
    return F.pad(x, (0, 0, 0, -len(x) % 16)).view(-1, 16, x.shape[1])


def parts(x: Tensor) -> Tensor:
    """Their sums."""
    return of_programs(x).sum(1)


def of_swiglu(x: Tensor, grad: Tensor | None = None) -> Values:
    gate, up = x.chunk(2, 1)
    s = gate.sigmoid()
    values = Values(gate=gate, up=up, s=s, silu=gate * s, slope=s + gate * s * (1 - s))
    if grad is not None:
        values.grad, values.of_gate, values.of_up = grad, grad * up * values.slope, grad * gate * s
    return values


def both(of_gate: Tensor, of_up: Tensor) -> Tensor:
    return torch.cat((of_gate, of_up), 1)


def of_linear(a: Tensor, b: Tensor, bias: Tensor) -> Values:
    M, N = len(a), len(bias)
    of_rows = F.pad(bias, (0, max(0, M - N)))[:M, None]
    return Values(product=a @ b, bias=bias, of_rows=of_rows, steps=-(-len(b) // 32))


def of_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *others: Tensor) -> Values:
    product, scale = q @ k.mT, q.shape[-1] ** -0.5
    scores = product * scale + bias
    values = Values(product=product, scale=scale, scores=scores, bias=bias, v=v)
    values.m = scores.amax(-1)
    values.s = (scores - values.m[..., None]).exp().sum(-1)
    if others:
        grad, values.log_sum_exp, delta = others
        values.grad_p, values.delta = grad @ v.mT, delta[..., None]
        values.p = (scores - values.log_sum_exp[..., None]).exp()
    return values


def attention(v: Values, scores: Tensor) -> Tensor:
    return scores.softmax(-1) @ v.v


def bias_gradient(v: Values, scores: Tensor) -> Tensor:
    p = (scores - v.log_sum_exp[..., None]).exp()
    return (p * (v.grad_p - v.delta)).sum(0)


ADD: Formulas = {
    "out": {
        "this is x - y": lambda v: v.x - v.y,
        "this is x * y": lambda v: v.x * v.y,
    }
}
SOFTMAX: Formulas = {
    "out": {
        "exp is not divided by its sum": lambda v: v.e,
        "this divides by the sum of x, not of exp(x - m)": lambda v: v.e / v.x.sum(1, keepdim=True),
        "this divides by C, not by the sum": lambda v: v.e / v.C,
        "this is the logarithm of softmax": lambda v: v.x.log_softmax(1),
        "exp2 is a power of 2: take tl.exp": lambda v: v.power / v.power.sum(1, keepdim=True),
    }
}
FORMULAS: dict[str, tuple[Callable[..., Values], Formulas]] = {
    "puzzle_01_add": (lambda x, y: Values(x=x, y=y), ADD),
    "puzzle_02_mask": (lambda x, y: Values(x=x, y=y), ADD),
    "puzzle_03_row_sum": (
        lambda x: Values(x=x),
        {
            "out": {
                "this is the maximum: tl.sum adds up": lambda v: v.x.amax(1),
                "this adds up absolute values": lambda v: v.x.abs().sum(1),
                "this adds up squares": lambda v: v.x.square().sum(1),
            }
        },
    ),
    "puzzle_04_softmax": (of_softmax, SOFTMAX),
    "puzzle_10_online_softmax": (of_softmax, SOFTMAX),
    "puzzle_05_rms_norm": (
        of_rms_norm,
        {
            "out": {
                "eps is missing": lambda v: v.x / v.square.sqrt() * v.weight,
                "eps is outside of the root": lambda v: v.x / (v.square.sqrt() + EPS) * v.weight,
                "eps is added to 1 / root": lambda v: v.x * (1 / v.square.sqrt() + EPS) * v.weight,
                "eps is added to the sum: add it to the mean": lambda v: (
                    v.x / (v.square + EPS / v.C).sqrt() * v.weight
                ),
                "eps is added in each lane: add it to the mean": lambda v: (
                    v.x / (v.square + EPS * v.block / v.C).sqrt() * v.weight
                ),
                "eps is subtracted": lambda v: v.x / (v.square - EPS).sqrt() * v.weight,
                "the factor weight is missing": lambda v: v.norm,
                "the root is missing": lambda v: v.norm * v.rstd * v.weight,
                "this multiplies by the root: 1 / tl.sqrt(...)": lambda v: v.x / v.rstd * v.weight,
                "x is not multiplied by rstd": lambda v: v.x * v.weight,
                "this is 1 + weight in place of weight": lambda v: v.norm * (1 + v.weight),
                "the sum is not divided by C": lambda v: (
                    v.x / (v.C * v.square + EPS).sqrt() * v.weight
                ),
                "the mean is that of |x|: square x": lambda v: (
                    v.x / (mean(v.x.abs()) + EPS).sqrt() * v.weight
                ),
                "the mean is squared: first square, then add up": lambda v: (
                    v.x / (mean(v.x) ** 2 + EPS).sqrt() * v.weight
                ),
                "this is the largest square, not the mean": lambda v: (
                    v.x / (v.x.square().amax(1, keepdim=True) + EPS).sqrt() * v.weight
                ),
                "the mean is subtracted, as in a layer norm": lambda v: F.layer_norm(
                    v.x, v.weight.shape, v.weight, eps=EPS
                ),
            }
        },
    ),
    "puzzle_06_rms_norm_backward": (
        of_rms_norm,
        {
            "grad_x": {
                "eps is missing": lambda v: norm_backward(v, 1 / v.square.sqrt()),
                "eps is outside of the root": lambda v: norm_backward(
                    v, 1 / (v.square.sqrt() + EPS)
                ),
                "g is grad * weight: weight is missing": lambda v: (
                    v.rstd * (v.grad - v.norm * mean(v.grad * v.norm))
                ),
                "norm * mean(g * norm) is missing": lambda v: v.rstd * v.g,
                "norm * mean(g * norm) is subtracted from g": lambda v: v.rstd * (v.g + v.second),
                "the sum of g * norm is not divided by C": lambda v: (
                    v.rstd * (v.g - v.C * v.second)
                ),
                "the factor rstd is missing": lambda v: v.g - v.second,
                "the factor rstd is there twice": lambda v: v.rstd**2 * (v.g - v.second),
                "x is in place of norm": lambda v: v.rstd * (v.g - v.x * mean(v.g * v.x)),
                "the mean is of g * norm, not of grad * norm": lambda v: (
                    v.rstd * (v.g - v.norm * mean(v.grad * v.norm))
                ),
                "grad * norm belongs to parts": lambda v: v.grad * v.norm,
            },
            "parts": {
                "parts is a sum of grad * norm: without weight": lambda v: parts(v.g * v.norm),
                "parts is a sum of grad * norm: norm is missing": lambda v: parts(v.grad),
                "parts is a sum of grad * norm: grad is missing": lambda v: parts(v.norm),
                "parts is a sum of grad * norm, not of grad * x": lambda v: parts(v.grad * v.x),
                "this is the last row alone: += adds up": lambda v: of_programs(v.grad * v.norm)[
                    :, -1
                ],
            },
        },
    ),
    "puzzle_07_swiglu": (
        of_swiglu,
        {
            "out": {
                "gate and up are exchanged": lambda v: v.gate * F.silu(v.up),
                "silu(a) is a * sigmoid(a): a is missing": lambda v: v.s * v.up,
                "sigmoid is missing": lambda v: v.gate * v.up,
                "the factor up is missing": lambda v: v.silu,
                "the sigmoid is that of gate, not of up": lambda v: v.gate * v.up.sigmoid() * v.up,
                "this is ReLU: silu(a) is a * sigmoid(a)": lambda v: v.gate.relu() * v.up,
                "sigmoid(a) is 1 / (1 + exp(-a)): the sign": lambda v: v.gate * (1 - v.s) * v.up,
            }
        },
    ),
    "puzzle_09_matmul_bias_relu": (
        of_linear,
        {
            "c": {
                "ReLU is missing": lambda v: v.product + v.bias,
                "bias is not added": lambda v: v.product.relu(),
                "bias is added behind ReLU: before it": lambda v: v.product.relu() + v.bias,
                "bias is subtracted": lambda v: (v.product - v.bias).relu(),
                "ReLU is behind the sum alone, once": lambda v: (v.product.relu() + v.bias).relu(),
                "bias has an element for each column: bias[None, :]": lambda v: (
                    v.product + v.of_rows
                ).relu(),
                "this is the smaller one, tl.minimum": lambda v: (v.product + v.bias).clamp(max=0),
                "bias is added at each step along k: once, behind the loop": lambda v: (
                    v.product + v.steps * v.bias
                ).relu(),
                "bias is added behind the loop and at each step along k": lambda v: (
                    v.product + (1 + v.steps) * v.bias
                ).relu(),
            }
        },
    ),
    "puzzle_11_flash_attention": (
        of_attention,
        {
            "out": {
                "scale is missing": lambda v: attention(v, v.product + v.bias),
                "scale is there twice": lambda v: attention(v, v.product * v.scale**2 + v.bias),
                "this divides by scale: multiply": lambda v: attention(
                    v, v.product / v.scale + v.bias
                ),
                "bias is not scaled: add it behind scale": lambda v: attention(
                    v, (v.product + v.bias) * v.scale
                ),
                "bias is missing": lambda v: attention(v, v.product * v.scale),
                "bias is subtracted": lambda v: attention(v, v.scores - 2 * v.bias),
                "bias is transposed: bias[i, j] has query i": lambda v: attention(
                    v, v.product * v.scale + v.bias.T
                ),
                "each query has all keys, also those behind its own": lambda v: attention(
                    v, v.scores + torch.full_like(v.bias, -torch.inf).triu(1)
                ),
                "exp2 is a power of 2: take tl.exp": lambda v: (
                    (2 ** (v.scores - v.m[..., None]))
                    @ v.v
                    / (2 ** (v.scores - v.m[..., None])).sum(-1, keepdim=True)
                ),
                "out is not divided by s": lambda v: attention(v, v.scores) * v.s[..., None],
                "out is divided by s twice": lambda v: attention(v, v.scores) / v.s[..., None],
            },
            "log_sum_exp": {
                "log_sum_exp is m + log(s): m is missing": lambda v: v.s.log(),
                "log_sum_exp is m + log(s): log(s) is missing": lambda v: v.m,
                "log_sum_exp is m + log(s): log is missing": lambda v: v.m + v.s,
                "log_sum_exp is m + log(s), not m - log(s)": lambda v: v.m - v.s.log(),
                "log_sum_exp is m + log(s), not m * log(s)": lambda v: v.m * v.s.log(),
                "log2 has the base 2: take tl.log": lambda v: v.m + v.s.log2(),
            },
        },
    ),
    "puzzle_12_bias_gradient": (
        of_attention,
        {
            "grad_bias": {
                "scale is missing": lambda v: bias_gradient(v, v.product + v.bias),
                "bias is missing": lambda v: bias_gradient(v, v.product * v.scale),
                "bias is not scaled: add it behind scale": lambda v: bias_gradient(
                    v, (v.product + v.bias) * v.scale
                ),
                "log_sum_exp is not subtracted": lambda v: (
                    v.scores.exp() * (v.grad_p - v.delta)
                ).sum(0),
                "exp(S) is divided by log_sum_exp: subtract it inside of exp": lambda v: (
                    v.scores.exp() / v.log_sum_exp[..., None] * (v.grad_p - v.delta)
                ).sum(0),
                "delta is not subtracted": lambda v: (v.p * v.grad_p).sum(0),
                "delta is subtracted, not added": lambda v: (v.p * (v.grad_p + v.delta)).sum(0),
                "delta is that of the query: delta[:, None]": lambda v: (
                    v.p * (v.grad_p - v.delta.mT)
                ).sum(0),
                "log_sum_exp is that of the query: log_sum_exp[:, None]": lambda v: (
                    (v.scores - v.log_sum_exp[:, None]).exp() * (v.grad_p - v.delta)
                ).sum(0),
                "this is dP transposed: grad @ trans(v)": lambda v: (
                    v.p * (v.grad_p.mT - v.delta)
                ).sum(0),
                "bias and grad_bias are transposed: query * n + key": lambda v: (
                    bias_gradient(v, v.product * v.scale + v.bias.T).T
                ),
                "the factor P is missing": lambda v: (v.grad_p - v.delta).sum(0),
                "this is the last row alone: += adds up": lambda v: (v.p * (v.grad_p - v.delta))[
                    -1
                ],
                "exp2 is a power of 2: take tl.exp": lambda v: (
                    2 ** (v.scores - v.log_sum_exp[..., None]) * (v.grad_p - v.delta)
                ).sum(0),
            }
        },
    ),
    "swiglu_backward": (
        of_swiglu,
        {
            "grad_x": {
                "the gradients of gate and up are exchanged": lambda v: both(v.of_up, v.of_gate),
                "gate and up are exchanged": lambda v: both(
                    v.grad * v.gate * F.silu(v.up) * (1 / v.up + 1 - v.up.sigmoid()),
                    v.grad * F.silu(v.up),
                ),
                "grad_gate: gate * s * (1 - s) is missing": lambda v: both(
                    v.grad * v.up * v.s, v.of_up
                ),
                "grad_gate: s + ... is missing": lambda v: both(
                    v.grad * v.up * (v.slope - v.s), v.of_up
                ),
                "grad_gate: gate is missing in gate * s * (1 - s)": lambda v: both(
                    v.grad * v.up * (v.s + v.s * (1 - v.s)), v.of_up
                ),
                "grad_gate: it is 1 - s, not 1 + s": lambda v: both(
                    v.grad * v.up * (v.s + v.silu * (1 + v.s)), v.of_up
                ),
                "grad_gate: gate * s * (1 - s) is added, not subtracted": lambda v: both(
                    v.grad * v.up * (2 * v.s - v.slope), v.of_up
                ),
                "grad_gate: up is missing": lambda v: both(v.grad * v.slope, v.of_up),
                "grad_gate: grad is missing": lambda v: both(v.up * v.slope, v.of_up),
                "the sigmoid is that of gate, not of up": lambda v: both(
                    v.grad * v.up * v.up.sigmoid() * (1 + v.gate * (1 - v.up.sigmoid())),
                    v.grad * v.gate * v.up.sigmoid(),
                ),
                "grad_up: grad is missing": lambda v: both(v.of_gate, v.silu),
                "grad_up: s is missing": lambda v: both(v.of_gate, v.grad * v.gate),
                "grad_up: gate is missing": lambda v: both(v.of_gate, v.grad * v.s),
                "grad_up: up is in place of gate": lambda v: both(v.of_gate, v.grad * v.up * v.s),
            }
        },
    ),
}


def formulas_of(file: str, output: str, inputs: list[Tensor]) -> dict[str, Tensor]:
    """What is said: the output as a mistake has it, from the puzzle's inputs in float64."""
    values_of, formulas = FORMULAS.get(file, (Values, {}))
    values = values_of(*inputs) if output in formulas else None
    return {text: formula(values) for text, formula in formulas.get(output, {}).items()}

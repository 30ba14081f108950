"""lab/accuracy.py: what is right passes in every type, and each fault is named with its place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.accuracy import check_gradients
from lab.cli import ToolError


def plain(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    shifted = x + bias
    return shifted, F.gelu(shifted)


class Mine(torch.autograd.Function):
    """The same, with a formula for its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        found = plain(x, bias)
        ctx.save_for_backward(found[0])
        return found

    @staticmethod
    def backward(ctx, grad: Tensor, grad_gelu: Tensor) -> tuple[Tensor, Tensor]:
        grad_x = grad + torch.ops.aten.gelu_backward(grad_gelu, *ctx.saved_tensors)
        return grad_x, grad_x.sum(0)


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in SHAPES.items()}


SHAPES = {"x": (6, 13), "bias": (13,)}
ALL = ["output 0", "output 1", "the gradient of x", "the gradient of bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_each_tensor_of_a_right_operation_has_a_line_with_the_place_of_its_worst(dtype):
    lines = str(check_gradients(plain, Mine.apply, inputs(dtype))).splitlines()
    assert [line.partition(" is right: off by ")[0] for line in lines] == ALL
    assert dtype == torch.float64 or ", at [" in lines[2]


def changed(monkeypatch: pytest.MonkeyPatch, number: int, change) -> None:
    """The backward pass returns its gradients with this one changed."""
    backward = Mine.backward

    def wrong(ctx, *grads: Tensor) -> tuple[Tensor, ...]:
        found = [*backward(ctx, *grads)]
        found[number] = change(found[number])
        return tuple(found)

    monkeypatch.setattr(Mine, "backward", staticmethod(wrong))


def one_is_wrong(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[2, 5] = 9.0
    return grad


@pytest.mark.parametrize(
    ("number", "change", "said"),
    [
        (0, one_is_wrong, r"x is wrong: off by .* at \[2, 5\] it is 9 and .* 1 of 78 elements are"),
        (1, lambda grad: grad / 6, "each is 0.1667 times what it should be"),
        (1, torch.zeros_like, "gradient of bias is wrong.*all is 0: does"),
        (1, lambda grad: None, "gradient of bias is missing: backward returns None for it"),
        (0, torch.empty_like, "some are NaN: did nobody write them"),
    ],
)
def test_a_wrong_gradient_is_named_with_its_place(number, change, said, monkeypatch):
    changed(monkeypatch, number, change)
    with pytest.raises(ToolError, match=said) as error:
        check_gradients(plain, Mine.apply, inputs())
    assert error.value.status == 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_error_of_16_bits_is_wrong_in_float32(monkeypatch):
    changed(monkeypatch, 1, lambda grad: grad.bfloat16().to(grad.dtype))
    check_gradients(plain, Mine.apply, inputs(torch.bfloat16))
    check_gradients(plain, Mine.apply, inputs(), limit=1e-2)
    with pytest.raises(ToolError, match="gradient of bias is wrong"):
        check_gradients(plain, Mine.apply, inputs())


def test_a_gradient_that_is_zero_in_theory_has_no_digits():
    """A bias before a softmax does nothing."""
    function = lambda x, bias: (x + bias).softmax(-1)  # noqa: E731
    given = {"x": torch.randn(4, 7), "bias": torch.randn(4, 1)}
    *_, of_bias = check_gradients(function, function, given).differences
    assert of_bias.error > 0


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (lambda x, bias: (x, F.silu(x + bias)), "output 0, bfloat16, is wrong"),
        (lambda x, bias: Mine.apply(x, bias)[0], "are 1, and should be 2"),
        (lambda x, bias: (x, None), "returns NoneType, and should return a tensor"),
        (lambda x, bias: (x + bias, F.gelu(x[0])), r"the shape \[13\], and should have \[6, 13"),
        (lambda x, bias: plain(x.detach(), bias.detach()), "has an output without a gradient"),
        (lambda x, bias: (*Mine.apply(x, bias), x.data.mul_(2))[:2], "writes to its input x"),
    ],
)
def test_an_operation_that_does_something_else_is_told_so(mine, said):
    with pytest.raises(ToolError, match=said):
        check_gradients(plain, mine, inputs(torch.bfloat16), where=", bfloat16,")


def test_a_reference_that_leaves_float64_is_none():
    with pytest.raises(ToolError, match=r"given float64, and returns torch\.float32"):
        check_gradients(lambda x: F.gelu(x.float()), F.gelu, [torch.randn(3)])


def test_integers_and_strided_tensors_are_inputs_too():
    """Wherever tensors are made that name no device."""
    given = [torch.randn(3, 5).T, torch.tensor([4, 0])]
    with torch.device("meta"):
        report = check_gradients(torch.Tensor.__getitem__, torch.Tensor.__getitem__, given)
    assert [line.what for line in report.differences] == ["the output", "the gradient of input 0"]

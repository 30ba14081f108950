"""accuracy.py: check_gradients names each fault with its place; --verify-accuracy passes what
rounding explains, and no wrong gradient, however small a part of all it is."""

import pytest
import torch
import torch.nn.functional as F
from conftest import MODELS, SCRIPT, build, faults_that_pass, load, parse, words
from torch import Tensor

from fusion_lab import accuracy
from fusion_lab.accuracy import check_gradients
from fusion_lab.cli import ToolError


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


# --verify-accuracy

OF_V2 = [f"tiny_{model}_v2" for model in MODELS]
both_precisions = pytest.mark.parametrize("argv", [[], ["--use-amp"]], ids=["float32", "bfloat16"])


@both_precisions
@pytest.mark.parametrize("script", OF_V2)
def test_no_wrong_gradient_passes(script: str, argv: list[str]):
    """Of every parameter, set to zero, negated, or larger by 0.3; test_gpu.py asks the same of all
    versions, at real sizes."""
    passed, judged = faults_that_pass(load(script), parse(script, *argv))
    assert passed == []
    # softmax takes layer_norm_z.bias out: in theory its gradient is zero
    assert judged == len(build(script).state_dict()) - ("openfold" in script)


FEW = "--seq-len 4 --batch-size 1 --msa-dim 64 --pair-dim 128 --num-heads-msa 4"


@pytest.mark.parametrize(
    "argv",
    [
        "--num-seqs 1",  # queries and keys of columns have a gradient of zero in theory
        f"{FEW} --num-seqs 2 --use-amp --amp-dtype float16 --num-blocks 2 --seed 758",
    ],
)
def test_in_a_small_model_rounding_is_not_blamed_and_a_zero_is_noticed(argv: str):
    """A few numbers: how much rounding changes a gradient is chance."""
    module = load("tiny_openfold_v2")
    args = parse("tiny_openfold_v2", *words(argv))
    assert all(error <= limit for error, limit in accuracy.judged_values(module, args).values())
    assert faults_that_pass(module, args, (0.0, -1.0))[0] == []


@both_precisions
def test_verify_accuracy_names_a_gradient_that_is_zero(argv: list[str], run, monkeypatch):
    module, name = load("tiny_openfold_v2"), "blocks.0.tri_mul_in.linear_a_g.bias"
    values_of = accuracy.values_of

    def broken(script, trainer, exact: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
        values = values_of(script, trainer, exact, seed)
        if any(getattr(trainer.args, attribute) for _, attribute, _ in module.FUSIONS):
            values[f"gradient of {name}"].zero_()
        return values

    monkeypatch.setattr(accuracy, "values_of", broken)
    result = run("tiny_openfold_v2", "--verify-accuracy", *argv)
    assert result.status == 1
    failed = [line for line in result.stdout.splitlines() if line.startswith("gradient of")]
    assert len(failed) == 1, "the others are right"
    assert failed[0].startswith(f"gradient of {name} (")


@pytest.mark.parametrize("error", ["output", "gradient", "nan"])
def test_verify_accuracy_fails_when_an_operation_is_wrong(error: str, run, monkeypatch):
    attention = torch.nn.functional.scaled_dot_product_attention

    def wrong(*args: torch.Tensor, **options: object) -> torch.Tensor:
        out = attention(*args, **options)
        if error == "gradient":  # the same value, nine tenths of the gradient
            return out.detach() + 0.9 * (out - out.detach())
        return out * (1.01 if error == "output" else torch.nan)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
    result = run(SCRIPT, "--verify-accuracy")
    assert (result.status, "Accuracy check: FAIL" in result.stdout) == (1, True)
    assert run(SCRIPT, "--verify-accuracy", "--disable-flash-attention").status == 0


@pytest.mark.parametrize(("size", "right"), [(4e-5, True), (1e-3, False)])
def test_a_gradient_that_is_zero_in_theory_may_be_noise(size: float, right: bool):
    """In bfloat16; as parts of all gradients. The unfused model's noise is 3e-6."""
    exact = {"gradient of a": torch.ones(1), "gradient of zero": torch.zeros(1)}
    unfused, found = (exact | {"gradient of zero": torch.tensor([s])} for s in (3e-6, size))
    error, limit = accuracy.judge(exact, [unfused], found, 0.05)["gradient of zero"]
    assert (error <= limit) == right

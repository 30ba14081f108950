"""What TinyOpenFold V4 adds to V3 gives what float64, PyTorch's own optimizer and V3 give.

Sizes, limits and helpers are those of the tests of V3, whose kernels V4 keeps.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, gradients, load, random_state, relative_difference
from test_triton_openfold import DEVICE, LIMITS, both_types, check_close, random
from torch import Tensor, nn

V3, V4 = "tiny_openfold_v3", "tiny_openfold_v4"
v4 = load(V4)
OF_V4 = ("direct-gradients", "fused-optimizer", "packed-weights", "transition-fusion", "overlap")


def kernels(script: str) -> dict[str, str]:
    """Find the source of every function under @triton.jit."""
    parts = (ROOT / f"{script}.py").read_text().split("\n\n\n")
    jitted = [part for part in parts if part.startswith("@triton.jit")]
    return {re.search(r"^def (\w+)", part, re.MULTILINE)[1]: part for part in jitted}


def test_kernels_of_v3_stay_to_the_byte():
    before, after = kernels(V3), kernels(V4)
    assert len(before) >= 20
    assert before.items() < after.items()


# The whole transition


def transition(residual: bool, x: Tensor, *parameters: Tensor) -> Tensor:
    """Compute algorithm 15 of the AlphaFold 2 supplement, and with `residual` add x."""
    norm_weight, norm_bias, weight_1, bias_1, weight_2, bias_2 = parameters
    y = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, 1e-5)
    update = F.linear(F.relu(F.linear(y, weight_1, bias_1)), weight_2, bias_2)
    return x + update if residual else update


def transition_inputs(rows: int, dim: int) -> list[Tensor]:
    """Draw x and the parameters of a transition.

    The first bias keeps the hidden layer away from 0, where rounding would switch a ReLU.
    """
    norm = [random(dim, scale=0.2, shift=1.0), random(dim, scale=0.2)]
    bias = random(4 * dim).detach().sign().mul(4).requires_grad_()
    first = [random(4 * dim, dim, scale=0.25 * dim**-0.5), bias]
    second = [random(dim, 4 * dim, scale=dim**-0.5), random(dim)]
    return [random(rows, dim, scale=3.0, shift=2.0), *norm, *first, *second]


@both_types
@pytest.mark.parametrize("residual", [False, True], ids=["update", "residual"])
@pytest.mark.parametrize(("rows", "dim"), [(1, 16), (65, 32), (130, 16)])
def test_whole_transition(rows: int, dim: int, residual: bool, dtype: torch.dtype):
    """In bfloat16 x and the parameters stay float32, as under autocast."""

    def whole(x: Tensor, *parameters: Tensor) -> Tensor:
        casts = tuple(parameters[i].detach().to(dtype) for i in (2, 4))
        settings = (residual, 1e-5, casts, v4.SideStreams())
        return v4.TransitionFunction.apply(x, *settings, *parameters)

    def reference(x: Tensor, *parameters: Tensor) -> Tensor:
        return transition(residual, x, *parameters)

    check_close(whole, reference, *transition_inputs(rows, dim), limit=LIMITS[dtype])


def test_whole_transition_keeps_what_is_not_a_number():
    x, *parameters = transition_inputs(3, 16)
    casts, x = (parameters[2], parameters[4]), x.detach()
    x[1, 5] = torch.nan
    out = v4.TransitionFunction.apply(x, True, 1e-5, casts, v4.SideStreams(), *parameters)
    assert out.isnan().any(1).tolist() == [False, True, False]


# Optimizer and gradients


def build(script: str, *argv: str) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
    """Build a model with random weights, its optimizer and a batch."""
    version = load(script)
    args = version.parse_args([*TINY["openfold"], "--device", DEVICE.type, *argv])
    model = version.build_model(args, DEVICE)
    optimizer = version.build_optimizer(args, model)
    model.load_state_dict(random_state(model.state_dict()))
    return model, optimizer, version.make_batches(args, DEVICE, 1).next_batch()


@functools.cache
def loss_and_gradients(script: str, *argv: str) -> dict[str, Tensor]:
    """Compute the loss and every parameter's gradient by its canonical name."""
    model, _, batch = build(script, *argv)
    loss = model(**batch)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize(
    "argv",
    [
        "",
        *(f"--disable-{flag}" for flag in OF_V4[1:4]),  # the others need --use-amp, or a graph
        *(f"--disable-all-fusion --enable-{flag}" for flag in OF_V4[:4]),
        "--disable-triton-layer-norm --disable-triton-triangle --disable-triton-outer-product",
    ],
)
def test_every_step_alone_and_all_but_it_give_the_gradients_of_v3(argv: str):
    expected = loss_and_gradients(V3)
    found = loss_and_gradients(V4, *argv.split())
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(float(value.norm()) for value in expected.values())
    for name, value in found.items():
        assert relative_difference(value, expected[name], floor=floor) < 1e-4, name


def test_fused_optimizer_takes_the_steps_of_pytorchs():
    """It casts weights as they become, and no gradient of a weight of a GEMM is copied."""
    model, ours, batch = build(V4, "--use-amp")
    other, theirs, _ = build(V4, "--use-amp", "--disable-fused-optimizer")
    buffer = model.side.buffer
    for _ in range(3):
        model(**batch).backward()
        for parameter, copied in zip(other.parameters(), model.parameters(), strict=True):
            parameter.grad = copied.grad.clone()
        for name, parameter in model.named_parameters():
            if "linear_1.weight" in name or "qkvg.weight" in name:
                part = buffer.part(parameter, buffer.begins[parameter] + parameter.numel())
                assert parameter.grad.data_ptr() == part.data_ptr(), name
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(model.side.casts[found], found.bfloat16()), name


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["", "--use-amp"], ids=["float32", "bfloat16"])
def test_overlap_changes_no_bit_of_a_graph(precision: str, tmp_path):
    losses = []
    for flag in ("--enable-overlap", "--disable-overlap"):
        argv = [*TINY["openfold"], *precision.split(), flag, "--num-steps", "5"]
        args = v4.parse_args([*argv, "--profile-dir", str(tmp_path)])
        losses.append(v4.train(args)["loss"]["curve"])
    assert losses[0] == losses[1]

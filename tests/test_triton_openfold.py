"""TinyOpenFold's Triton kernels, forward and backward, against the same operations in float64.

On a machine without a GPU they run in Triton's interpreter, whose time goes by programs: hence the
small sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import triton
from conftest import (
    COMPILER,
    TINY,
    gradients,
    load,
    parse,
    random_state,
    relative_difference,
    words,
)
from torch import Tensor

from lab.accuracy import check_gradients

v3 = load("tiny_openfold_v3")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
both_types = pytest.mark.parametrize("dtype", list(LIMITS), ids=str)


def random(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    shift: float = 0.0,
) -> Tensor:
    """Draw random numbers that need a gradient, from the generator that each test seeds."""
    return (scale * torch.randn(shape) + shift).to(DEVICE, dtype).requires_grad_()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def check_close(
    operation: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    *inputs: Tensor | None,
    limit: float,
) -> None:
    """Assert that result and every gradient agree with those of `reference` in float64."""
    check_gradients(reference, operation, inputs, limit=limit)


# Layer norm


@both_types
@pytest.mark.parametrize("shape", [(1, 7), (7, 1, 33), (63, 65)])
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype):
    """Input in float32, as under autocast; the output in the type of the next GEMM."""
    check_close(
        lambda x, w, b: v3.LayerNormFunction.apply(x, w, b, None, 1e-5, dtype),
        lambda x, w, b: F.layer_norm(x, shape[-1:], w, b, 1e-5),
        *(random(*shape, scale=3, shift=5), random(shape[-1]), random(shape[-1])),
        limit=LIMITS[dtype],
    )


def test_layer_norm_of_a_transposed_input():
    check_close(
        lambda x, w, b: v3.LayerNormFunction.apply(
            x.transpose(0, 1), w, b, None, 1e-5, torch.float32
        ),
        lambda x, w, b: F.layer_norm(x.transpose(0, 1), (33,), w, b, 1e-5),
        *(random(5, 7, 33), random(33), random(33)),
        limit=1e-5,
    )


@both_types
@pytest.mark.parametrize("ending", [False, True], ids=["starting", "ending"])
@pytest.mark.parametrize(("samples", "length", "dim", "heads"), [(2, 7, 24, 3), (1, 5, 130, 8)])
def test_layer_norm_with_pair_bias(
    samples: int, length: int, dim: int, heads: int, ending: bool, dtype: torch.dtype
):
    """The bias used alone, and both results."""
    pair = random(samples, length, length, dim, scale=3)
    inputs = pair, random(dim), random(dim), random(heads, dim)

    def reference(x: Tensor, w: Tensor, b: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
        normed = F.layer_norm(x, (dim,), w, b, 1e-5)
        pair_bias = F.linear(normed, projection).permute(0, 3, 1, 2)
        return normed, pair_bias.mT if ending else pair_bias

    def kernel(x: Tensor, w: Tensor, b: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
        return v3.LayerNormFunction.apply(x, w, b, projection, 1e-5, dtype, ending)

    for used in (slice(1, 2), slice(0, 2)):
        check_close(
            lambda *i, used=used: torch.cat([t.flatten() for t in kernel(*i)[used]]),
            lambda *i, used=used: torch.cat([t.flatten() for t in reference(*i)[used]]),
            *inputs,
            limit=LIMITS[dtype],
        )


# Sums over rows


@pytest.mark.parametrize(("parts", "width"), [(1, 5), (3, 130), (600, 7), (1030, 33)])
def test_sum_of_parts(parts: int, width: int):
    x = random(parts, width).detach()
    assert relative_difference(v3.sum_parts(x), x.double().sum(0)) < 1e-6
    assert v3.sum_parts(x, torch.bfloat16).dtype == torch.bfloat16


@both_types
@pytest.mark.parametrize("shape", [(1, 7), (3, 5, 33), (129, 64)])
def test_gradient_of_a_bias(shape: tuple[int, ...], dtype: torch.dtype):
    y, bias = random(*shape, dtype=dtype), random(shape[-1])
    grad = torch.randn_like(y)
    grad_y, grad_bias = torch.autograd.grad(v3.BiasGradient.apply(y, bias), (y, bias), grad)
    assert torch.equal(grad_y, grad)
    assert grad_bias.dtype == torch.float32
    assert relative_difference(grad_bias, grad.double().flatten(0, -2).sum(0)) < 1e-6


# Attention


def attention(qkvg: Tensor, gate_bias: Tensor, bias: Tensor | None) -> Tensor:
    """Attend along the third dimension of qkvg [B, R, N, H, 4, D], with scores in memory."""
    q, k, v, gate = qkvg.transpose(2, 3).unbind(4)  # [B, R, H, N, D]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias[:, None]
    out = (scores.softmax(-1) @ v).transpose(2, 3)
    gate = torch.sigmoid(gate.transpose(2, 3) + gate_bias.view(q.shape[2], -1))
    return (gate * out).flatten(3)


@both_types
@pytest.mark.parametrize(
    ("samples", "rows", "length", "heads", "dim", "biased"),
    [
        (1, 1, 1, 1, 8, True),
        (2, 3, 7, 2, 24, True),
        (1, 1, 64, 2, 16, False),
        (2, 2, 65, 2, 24, True),
        (1, 1, 128, 1, 32, True),
    ],
)
def test_attention(
    samples: int, rows: int, length: int, heads: int, dim: int, biased: bool, dtype: torch.dtype
):
    """Up to 64 positions one kernel makes all gradients, beyond that there are three."""
    check_close(
        v3.GatedAttentionFunction.apply,
        attention,
        random(samples, rows, length, heads, 4, dim, dtype=dtype),
        random(heads * dim),
        random(samples, heads, length, length, dtype=dtype) if biased else None,
        limit=LIMITS[dtype],
    )


@pytest.mark.parametrize("length", [17, 66])
def test_attention_of_columns_reads_them_where_they_lie(length: int):
    def columns(qkvg: Tensor, *others: Tensor) -> Tensor:
        return attention(qkvg.transpose(1, 2), *others).transpose(1, 2)

    check_close(
        lambda *inputs: v3.GatedAttentionFunction.apply(*inputs, True),
        columns,
        *(random(2, length, 3, 1, 4, 8), random(8), random(2, 1, length, length)),
        limit=1e-5,
    )


def test_attention_of_views_with_gaps():
    check_close(
        lambda qkvg, gate_bias, bias: v3.GatedAttentionFunction.apply(
            qkvg[..., :8],
            gate_bias,
            bias.permute(0, 3, 1, 2),
        ),
        lambda qkvg, gate_bias, bias: attention(qkvg[..., :8], gate_bias, bias.permute(0, 3, 1, 2)),
        *(random(1, 2, 9, 2, 4, 11), random(16), random(1, 9, 9, 2)),
        limit=1e-5,
    )


@pytest.mark.parametrize("length", [20, 70])
def test_attention_with_scores_of_several_hundred(length: int):
    """exp() of them overflows float32, so their maximum must be taken off first."""
    inputs = (
        random(1, 2, length, 1, 4, 16, scale=12),
        random(16),
        random(1, 1, length, length, scale=300),
    )
    q, k, _, _ = (part.detach().abs().max() for part in inputs[0].unbind(-2))
    assert q * k + inputs[2].detach().abs().max() > 700
    # of which rounding the scores is 1e-4
    check_close(v3.GatedAttentionFunction.apply, attention, *inputs, limit=1e-3)


@pytest.mark.parametrize(("tiles", "rows"), [(64, 256), (144, 384), (576, 768), (1, 3), (1000, 1)])
def test_groups_of_rows_fill_the_last_wave(tiles: int, rows: int):
    """No number of groups is done sooner, but for what adding up their sums takes."""

    def rows_in_turn(group: int) -> int:
        return math.ceil(tiles * math.ceil(rows / group) / 396) * group

    group = v3.rows_per_program(396, tiles, rows)
    assert 1 <= group <= rows
    best = min(rows_in_turn(other) for other in range(1, rows + 1))
    assert rows_in_turn(group) <= 1.15 * best + 2


# Triangle multiplication


def triangle(incoming: bool, x: Tensor, *parameters: Tensor) -> Tensor:
    """Compute algorithms 11 and 12 of the AlphaFold 2 supplement.

    The weights and biases of a_p, b_p, a_g, b_g, g and z are stacked.
    """
    norm_in, norm_out, (weight, bias) = parameters[:2], parameters[2:4], parameters[4:]
    dim = x.shape[-1:]
    normed = F.layer_norm(x, dim, *norm_in)
    a_p, b_p, a_g, b_g, g = F.linear(normed, weight[: -dim[0]], bias[: -dim[0]]).chunk(5, -1)
    a, b = a_p * a_g.sigmoid(), b_p * b_g.sigmoid()
    product = torch.einsum("bkic,bkjc->bijc" if incoming else "bikc,bjkc->bijc", a, b)
    return g.sigmoid() * F.linear(
        F.layer_norm(product, dim, *norm_out),
        weight[-dim[0] :],
        bias[-dim[0] :],
    )


def triangle_inputs(samples: int, length: int, dim: int) -> list[Tensor]:
    norms = [random(dim, scale=0.2, shift=float(i % 2 == 0)) for i in range(4)]
    return [
        random(samples, length, length, dim),
        *norms,
        random(6 * dim, dim, scale=dim**-0.5),
        random(6 * dim),
    ]


@pytest.mark.parametrize("residual", [False, True], ids=["update", "residual"])
@pytest.mark.parametrize("incoming", [False, True], ids=["outgoing", "incoming"])
@pytest.mark.parametrize(
    ("samples", "length", "dim", "dtype"),
    [
        (1, 1, 16, torch.float32),
        (2, 7, 32, torch.float32),
        (2, 9, 32, torch.bfloat16),
    ],
)
def test_triangle_multiplication(
    samples: int, length: int, dim: int, dtype: torch.dtype, incoming: bool, residual: bool
):
    check_close(
        lambda x, *parameters: v3.TriangleMultiplicationFunction.apply(
            x,
            None,
            incoming,
            residual,
            1e-5,
            dtype,
            *parameters,
        ),
        lambda x, *parameters: triangle(incoming, x, *parameters) + (x if residual else 0),
        *triangle_inputs(samples, length, dim),
        # Six roundings follow each other.
        limit=LIMITS[dtype] * (3 if dtype == torch.bfloat16 else 1),
    )


def test_wide_offsets_change_nothing(monkeypatch: pytest.MonkeyPatch):
    """Those of 64 bits, which tensors of 2^31 elements need, on small ones."""
    inputs = triangle_inputs(1, 7, 16)

    def run() -> tuple[Tensor, ...]:
        options = (None, False, True, 1e-5, torch.float32)
        return results(
            lambda x, *p: v3.TriangleMultiplicationFunction.apply(x, *options, *p),
            inputs,
        )

    expected, options, kernels = run(), v3.triangle_options, []

    def wide(kernel: str, *inputs: Tensor) -> tuple[int, dict]:
        kernels.append(kernel)
        programs, chosen = options(kernel, *inputs)
        return programs, {**chosen, "WIDE": True}

    monkeypatch.setattr(v3, "triangle_options", wide)
    for found, narrow in zip(run(), expected, strict=True):
        assert relative_difference(found, narrow) < 1e-6
    assert len(kernels) == 4


# Outer product mean


@both_types
@pytest.mark.parametrize(
    ("samples", "depth", "length", "dim"),
    [(1, 1, 1, 8), (2, 7, 5, 8), (1, 33, 3, 32)],
)
def test_outer_product_mean(samples: int, depth: int, length: int, dim: int, dtype: torch.dtype):
    def reference(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        outer = torch.einsum("bsic,bsjd->bijcd", a, b).flatten(3)
        return F.linear(outer, weight, bias) / (depth + 1e-3)

    check_close(
        lambda *inputs: v3.OuterProductMeanFunction.apply(*inputs, 1 / (depth + 1e-3)),
        reference,
        *(
            random(samples, depth, length, dim, dtype=dtype),
            random(samples, depth, length, dim, dtype=dtype),
        ),
        *(random(24, dim * dim, scale=1 / dim), random(24)),
        limit=LIMITS[dtype],
    )


# Transition


@both_types
@pytest.mark.parametrize("shape", [(1, 7), (3, 5, 33)])
def test_bias_relu(shape: tuple[int, ...], dtype: torch.dtype):
    inputs = random(*shape, dtype=dtype), random(shape[-1])
    check_close(v3.BiasReLU.apply, lambda x, b: F.relu(x + b), *inputs, limit=LIMITS[dtype])


def test_bias_relu_keeps_what_is_not_a_number():
    x, bias = torch.full((1, 4), math.nan, device=DEVICE), torch.zeros(4, device=DEVICE)
    assert v3.BiasReLU.apply(x, bias).isnan().all()


# Gradients by row and column, of parts in bfloat16 beside V1's


def part_gradients(
    version: ModuleType, name: str, state: dict[str, Tensor], x: Tensor, dtype: torch.dtype
):
    """Compute the gradients of a part's input, [positions, C], and of its parameters.

    They are computed in float64 or under autocast.
    """
    config = version.ModelConfig(pair_dim=x.shape[-1], num_heads_pair=2)
    part = getattr(version, name)(config, version.Fusions()).to(DEVICE)
    part.load_state_dict(state)
    part, x = (part.double(), x.double()) if dtype == torch.float64 else (part, x)
    x = x.clone().requires_grad_()
    with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float64):
        out = part(x)
    out.backward(torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(out))
    return {"x": x.grad.flatten(0, -2), **gradients(part)}


def worst_line(error: Tensor, exact: Tensor, rounding: Tensor, dim: int) -> float:
    """Find the largest error of a line along `dim` over its norm.

    Or over ten times V1's mean error in a line, if that is more: below that V1 has not one digit
    right itself.
    """
    floor = 10 * rounding.norm(dim=dim).square().mean().sqrt()
    return float((error.norm(dim=dim) / exact.norm(dim=dim).maximum(floor)).max())


@pytest.mark.parametrize(
    ("part", "length", "case"),
    [
        ("TriangleMultiplicationOutgoing", 13, "plain"),
        ("TriangleMultiplicationOutgoing", 13, "cancelled outlier"),
        ("TriangleAttentionStartingNode", 13, "plain"),
        ("TriangleAttentionStartingNode", 13, "large outlier"),
        # three kernels, with the block size below
        ("TriangleAttentionStartingNode", 19, "large outlier"),
        ("TriangleAttentionStartingNode", 19, "large logits"),
    ],
)
def test_no_row_or_column_of_a_gradient_is_less_exact_than_in_v1(
    part: str, length: int, case: str, monkeypatch: pytest.MonkeyPatch
):
    """An outlier channel stands above the others at all positions, as they do in trained models."""
    monkeypatch.setitem(v3.OVERRIDES, "attention_backward_short", {"BLOCK_N": 16})
    v1 = load("tiny_openfold_v1")
    x = torch.randn(1, length, length, 32)
    x[..., 5] += {"outlier": 10.0, "cancelled outlier": 10.0, "large outlier": 100.0}.get(case, 0.0)
    config = v1.ModelConfig(pair_dim=32, num_heads_pair=2)
    state = random_state(getattr(v1, part)(config, v1.Fusions()).state_dict())
    for name in state:
        if case == "cancelled outlier" and name in ("layer_norm.bias", "layer_norm_in.bias"):
            weight = state[name.replace("bias", "weight")]
            state[name][5] = -weight[5] * F.layer_norm(x, x.shape[-1:])[..., 5].mean()
        if case == "large logits" and name in ("linear_q.weight", "linear_k.weight"):
            state[name] *= 5
    exact = part_gradients(v1, part, state, x.to(DEVICE), torch.float64)
    x = x.to(DEVICE)
    sides = [part_gradients(version, part, state, x, torch.bfloat16) for version in (v1, v3)]
    # The interpreter does not round a gradient before the kernel has used it, as a GPU does.
    if v3.INTERPRETED and length > 16:
        del exact["linear_k.weight"], exact["linear.weight"]
    for name, expected in exact.items():
        errors = (side[name].double() - expected for side in sides)
        rounding, error = (e.reshape(len(expected), -1) for e in errors)
        expected = expected.reshape(error.shape)
        for dim, line in enumerate(("column", "row")[: exact[name].dim()]):
            before, after = (worst_line(e, expected, rounding, dim) for e in (rounding, error))
            message = f"a {line} of the gradient of {name}: {after:.2g}, V1 {before:.2g}"
            assert after <= 3 * before, message


# Weights


def test_weights_of_a_block_are_cast_once():
    """With AMP all that GEMMs take as it is, gradients included; without it nothing."""
    args = v3.parse_args([*TINY["openfold"], "--device", DEVICE.type])
    block = v3.build_model(args, DEVICE).blocks[0]
    assert block.cast_weights() == {}
    with torch.autocast(DEVICE.type, torch.bfloat16):
        weights = block.cast_weights()
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    for name in ("msa_att_row.linear_qkvg.weight", "tri_att_end.linear_o.bias"):
        weight = block.get_parameter(name)
        assert torch.equal(weights[name], weight.bfloat16())
        (grad,) = torch.autograd.grad(weights[name].sum(), weight, retain_graph=True)
        assert torch.equal(grad, torch.ones_like(weight))


def test_frozen_parameters_get_no_gradient_and_change_no_other():
    """Every second parameter of the model frozen, with weights cast as with AMP."""
    small = words("--seq-len 5 --num-seqs 2 --batch-size 1")
    args = v3.parse_args([*TINY["openfold"], *small, "--device", DEVICE.type])
    batch, found = v3.make_batches(args, DEVICE, 1).next_batch(), []
    for every in (1, 2):
        model = v3.build_model(args, DEVICE)
        model.load_state_dict(random_state(model.state_dict()))
        for i, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(i % every == 0)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(**batch)
        loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for i, (name, grad) in enumerate(found[1].items()):
        assert grad is None if i % 2 else torch.equal(grad, found[0][name]), name


def test_a_protein_longer_than_the_model_was_made_for():
    """There is no table that it could be too long for: the same as in V1."""
    values = []
    for version in (load("tiny_openfold_v1"), v3):
        args = version.parse_args([*TINY["openfold"], "--device", DEVICE.type])
        model = version.build_model(args, DEVICE)
        model.load_state_dict(random_state(model.state_dict()))
        # Relative positions are clipped at 32.
        tokens = torch.arange(35).reshape(1, 1, 35) % version.NUM_TOKENS
        values.append(model(tokens.to(DEVICE))["distogram"])
    assert relative_difference(values[1], values[0]) < 1e-4


# All of them


OPERATIONS = {
    "layer norm": (
        lambda x, w, b: v3.LayerNormFunction.apply(x, w, b, None, 1e-5, torch.float32),
        [(9, 12), (12,), (12,)],
    ),
    "pair bias": (
        lambda *inputs: v3.LayerNormFunction.apply(*inputs, 1e-5, torch.float32, True)[1],
        [(1, 5, 5, 12), (12,), (12,), (3, 12)],
    ),
    "bias": (v3.BiasGradient.apply, [(9, 12), (12,)]),
    "short attention": (v3.GatedAttentionFunction.apply, [(1, 3, 5, 1, 4, 8), (8,), (1, 1, 5, 5)]),
    "long attention": (
        v3.GatedAttentionFunction.apply,
        [(1, 2, 66, 1, 4, 8), (8,), (1, 1, 66, 66)],
    ),
    "triangle": (
        lambda x, *p: v3.TriangleMultiplicationFunction.apply(
            x,
            None,
            False,
            True,
            1e-5,
            torch.float32,
            *p,
        ),
        [(1, 5, 5, 16), *4 * [(16,)], (96, 16), (96,)],
    ),
    "outer product": (
        lambda *i: v3.OuterProductMeanFunction.apply(*i, 0.5),
        [(1, 3, 4, 8), (1, 3, 4, 8), (6, 64), (6,)],
    ),
    "transition": (v3.BiasReLU.apply, [(9, 12), (12,)]),
}
every_operation = pytest.mark.parametrize("name", OPERATIONS)


def results(operation: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    out = operation(*inputs)
    return out, *torch.autograd.grad(out.square().sum(), inputs)


@every_operation
def test_the_same_input_gives_the_same_bits(name: str):
    operation, shapes = OPERATIONS[name]
    inputs = [random(*shape) for shape in shapes]
    first = results(operation, inputs)
    for _ in range(20 if DEVICE.type == "cuda" else 1):
        again = results(operation, inputs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@every_operation
def test_no_rows_are_one_clear_error(name: str):
    operation, shapes = OPERATIONS[name]
    whole = [random(*shape) for shape in shapes]
    samples = len(whole[0])
    batched = [random(0, *t.shape[1:]) if len(t) == samples else t for t in whole]
    with pytest.raises(ValueError, match="needs at least one row"):
        results(operation, batched)


@every_operation
def test_an_input_of_another_size_is_refused_before_a_kernel_reads_beyond_it(name: str):
    """Every tensor but the first, one smaller in its last dimension."""
    operation, shapes = OPERATIONS[name]
    inputs = [random(*shape) for shape in shapes]
    for i, tensor in enumerate(inputs[1:], start=1):
        with pytest.raises((ValueError, RuntimeError), match=r"not \[|shape|size"):
            operation(*inputs[:i], tensor[..., :-1], *inputs[i + 1 :])


@every_operation
def test_what_is_frozen_costs_no_kernel_and_changes_no_other_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """Let each input alone need a gradient.

    Its bits are the same, and it takes at most as many launches as all do.
    """
    operation, shapes = OPERATIONS[name]
    inputs, wrap, launched = [random(*shape) for shape in shapes], v3.wrap_triton, []
    noting = lambda kernel: launched.append(kernel.__name__) or wrap(kernel)  # noqa: E731
    monkeypatch.setattr(v3, "wrap_triton", noting)
    expected = results(operation, inputs)[1:]
    for_all = len(launched)
    counts = []
    for i, alone in enumerate(expected):
        launched.clear()
        one = [t.detach().requires_grad_(i == j) for j, t in enumerate(inputs)]
        (found,) = torch.autograd.grad(operation(*one).square().sum(), one[i : i + 1])
        assert torch.equal(found, alone)
        counts.append(len(launched))
    assert max(counts) <= for_all
    assert min(counts) < for_all


@every_operation
def test_torch_compile_finds_no_reason_to_break_its_graph(name: str):
    operation, shapes = OPERATIONS[name]
    inputs = [random(*shape) for shape in shapes]
    torch.compiler.reset()  # or sizes that differ from those of the test before become symbols
    compiled = torch.compile(operation, fullgraph=True, backend=COMPILER)
    expected, found = results(operation, inputs), results(compiled, inputs)
    for a, b in zip(found, expected, strict=True):
        assert relative_difference(a, b) < 1e-5


def test_every_line_of_block_sizes_is_complete():
    """What a backend or precision gets is read off one line, and no line has a name too many."""
    for line, settings in v3.BLOCKS.items():
        kernel = line.partition(" ")[0]
        assert v3.block_sizes(settings).keys() == v3.block_sizes(v3.BLOCKS[kernel]).keys(), line


H100, MI300 = 227 * 1024, 64 * 1024  # bytes of shared memory
DEFAULT = "--msa-dim 64 --num-heads-msa 4 --pair-dim 128 --num-heads-pair 4"
ALL_OF_V4 = "attention triangle outer-product transition loss"
WIDTHS_AND_WHAT_IS_LEFT = [  # by V3, and by V4
    ("", H100, "", ""),
    ("--matmul-precision high", H100, "", ""),
    ("--use-amp", MI300, "", ""),
    ("--msa-dim 256 --num-heads-msa 8", H100, "", "loss"),
    ("--msa-dim 256 --num-heads-msa 8 --use-amp", H100, "", ""),
    ("--msa-dim 512 --num-heads-msa 8 --use-amp", H100, "", "loss"),
    ("--pair-dim 256 --num-heads-pair 8 --use-amp", H100, "", ""),
    ("--pair-dim 256 --num-heads-pair 8", H100, "triangle", "triangle outer-product loss"),
    ("--pair-dim 96", H100, "triangle", ALL_OF_V4),
    ("--pair-dim 8 --num-heads-pair 1", H100, "triangle", ALL_OF_V4),
    (
        "--pair-dim 512 --num-heads-pair 8 --use-amp",
        *(H100, "triangle", "triangle outer-product embedding loss"),
    ),
    ("--msa-dim 1024 --num-heads-msa 16", H100, "", "embedding loss"),
    ("--msa-dim 130 --num-heads-msa 2", *(H100, "attention", ALL_OF_V4.replace("triangle ", ""))),
    ("--msa-dim 128 --num-heads-msa 2", 163 * 1024, *2 * ["attention triangle"]),
]


@pytest.mark.parametrize("script", ["tiny_openfold_v3", "tiny_openfold_v4"])
@pytest.mark.parametrize(("argv", "bytes_there", "left", "left_by_v4"), WIDTHS_AND_WHAT_IS_LEFT)
def test_what_has_no_kernel_for_a_width_is_left_to_pytorch(
    script: str, argv: str, bytes_there: int, left: str, left_by_v4: str, capsys, monkeypatch
):
    """And one line for each says why. All that has a kernel keeps it."""
    module = load(script)
    monkeypatch.setattr(module, "shared_memory", lambda: bytes_there)
    monkeypatch.setattr(module, "BACKEND", "hip" if bytes_there == MI300 else "cuda")
    args = parse(script, *words(DEFAULT), *words(argv))
    off = [flag for flag, name, _ in module.FUSIONS if not getattr(args, name)]
    expected = left_by_v4 if script.endswith("v4") else left
    assert [re.sub("^triton-|-fusion$", "", flag) for flag in off] == expected.split()
    notes = [line for line in capsys.readouterr().err.splitlines() if " is off, " in line]
    assert len(notes) == len(off)
    assert all(flag in note for flag, note in zip(off, notes, strict=True))


@pytest.mark.parametrize("script", ["tiny_openfold_v3", "tiny_openfold_v4"])
@pytest.mark.parametrize("argv", ["--use-amp", "--checkpoint-blocks"])
def test_every_width_trains(script: str, argv: str, run):
    """More than 64 channels per head, and a pair-dim that is no power of two."""
    widths = "--pair-dim 72 --num-heads-pair 1 --msa-dim 24 --num-heads-msa 2 --seq-len 5"
    argv = [*words(argv), *words(widths), "--batch-size", "1", "--device", DEVICE.type]
    result = run(script, *argv, "--verify-accuracy")
    assert result.status == 0, result.stdout


def test_too_large_blocks_are_one_line(run, monkeypatch: pytest.MonkeyPatch):
    error = triton.runtime.errors.OutOfResources(300000, 232448, "shared memory")

    def launch(*_: object) -> None:
        raise error

    monkeypatch.setattr(v3.LayerNormFunction, "apply", launch)
    for mode in ([], ["--verify-accuracy"]):
        result = run("tiny_openfold_v3", *mode, "--device", DEVICE.type)
        assert result.status == 1
        assert result.stderr.endswith(f": error: {error}\n")
        assert "Traceback" not in result.stderr

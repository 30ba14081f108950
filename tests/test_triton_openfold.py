"""What TinyOpenFold's kernels do at their edges: inputs that do not fit, outliers, NaN, frozen
weights, wide transitions, widths without a kernel.

A whole step is compared with float64 in test_triton_steps.py, each flag in test_fusions.py; V4's
optimizer is tested in test_triton_llama_v4.py.
"""

import math
import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import triton
from conftest import (
    DEVICE,
    LIMITS,
    SMALLEST,
    both_types,
    check_close,
    gradients,
    load,
    parse,
    randn,
    random_state,
    relative_difference,
    words,
)
from test_triton_llama_v4 import scale_data, transpose_memory
from torch import Tensor, nn
from torch.func import functional_call

from fusion_lab.accuracy import InFloat64, check_gradients

V4 = "tiny_openfold_v4"
v3, v4 = load("tiny_openfold_v3"), load(V4)


@pytest.mark.parametrize(("parts", "width"), [(3, 130), (1030, 33)])
def test_sum_of_parts(parts: int, width: int):
    x = randn(parts, width)
    assert relative_difference(v3.sum_parts(x), x.double().sum(0)) < 1e-6
    assert v3.sum_parts(x, torch.bfloat16).dtype == torch.bfloat16


def test_relu_keeps_what_is_not_a_number():
    x, bias = torch.full((1, 4), math.nan, device=DEVICE), torch.zeros(4, device=DEVICE)
    assert v3.BiasReLU.apply(x, bias).isnan().all()


# Operations alone

OPERATIONS = {  # and the shapes of their inputs
    "layer norm": (
        lambda *inputs: v3.LayerNormFunction.apply(*inputs, None, 1e-5, torch.float32),
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
        lambda x, *p: v3.TriangleMultiplicationFunction.apply(x, None, False, 1e-5, *p),
        [(1, 5, 5, 16), *4 * [(16,)], (96, 16), (96,)],
    ),
    "outer product": (
        lambda a, b, *p: v3.OuterProductMeanFunction.apply(a, b, None, *p),
        [(1, 3, 4, 8), (1, 3, 4, 8), (6, 64), (6,)],
    ),
    "transition": (v3.BiasReLU.apply, [(9, 12), (12,)]),
}
every_operation = pytest.mark.parametrize("name", OPERATIONS)


def results(operation: Callable, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """What it returns, and the gradients of what needs one."""
    out = operation(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    return out, *torch.autograd.grad(out.square().sum(), leaves)


def case(name: str) -> tuple[Callable, list[Tensor]]:
    operation, shapes = OPERATIONS[name]
    return operation, [randn(*shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("script", ["tiny_openfold_v3", "tiny_openfold_v4"])
@pytest.mark.parametrize("name", ["msa", "pair", "sequences", "residues", "no samples"])
def test_what_does_not_fit_a_block_is_refused_before_a_kernel_reads_beyond_it(
    script: str, name: str
):
    module = load(script)
    config = module.ModelConfig(msa_dim=16, pair_dim=16, num_heads_msa=1, num_heads_pair=1)
    block = module.EvoformerBlock(config, module.Fusions()).to(DEVICE)
    inputs = {"msa": randn(2, 3, 5, 16), "pair": randn(2, 5, 5, 16)}
    inputs |= {"sequences": randn(2, 3) < 9, "residues": randn(2, 5) < 9}
    wrong = {key: value[:0] for key, value in inputs.items()}
    if name in inputs:
        wrong = inputs | {name: inputs[name][..., :-1]}
    with pytest.raises(ValueError, match=r"must be .* not"):
        block(**wrong)


@pytest.mark.parametrize(
    ("script", "pair_dim", "library"),
    [
        ("tiny_openfold_v3", 16, False),
        ("tiny_openfold_v3", 256, False),
        ("tiny_openfold_v4", 16, False),
        ("tiny_openfold_v4", 16, True),
    ],
)
def test_any_residue_and_any_sequence_can_be_padding(
    script: str, pair_dim: int, library: bool, monkeypatch
):
    """Those in the middle, too, at an odd length: outputs and gradients are V1's in float64.

    Also where products of matrices are left to the library: in V3 those for the triangle's
    weights, of wide rows.
    """
    if library:
        monkeypatch.setattr(v4, "multiplies", lambda *_: False)
    sequences, residues = randn(2, 4) < 9, randn(2, 5) < 9
    sequences[0, 1] = sequences[1, 0] = sequences[1, 2] = False  # two proteins, two depths
    residues[0, 2] = residues[0, 4] = residues[1, 1] = False
    msa, pair = randn(2, 4, 5, 16), randn(2, 5, 5, pair_dim)
    weights, sides = (randn(*msa.shape), randn(*pair.shape)), []
    for module, dtype in ((load("tiny_openfold_v1"), torch.float64), (load(script), torch.float32)):
        widths = {"msa_dim": 16, "pair_dim": pair_dim}
        config = module.ModelConfig(
            **widths, num_heads_msa=1, num_heads_pair=max(1, pair_dim // 128)
        )
        block = module.EvoformerBlock(config, module.Fusions()).to(DEVICE)
        block.load_state_dict(random_state(block.state_dict()))
        block = block.to(dtype)
        inputs = [x.to(dtype).requires_grad_() for x in (msa, pair)]
        outputs = block(*inputs, sequences, residues)
        sum((out * w).sum() for out, w in zip(outputs, weights, strict=True)).backward()
        values = dict(enumerate([*outputs, *(x.grad for x in inputs)]))
        sides.append(values | gradients(block))
    expected, found = sides
    total = sum(float(value.detach().square().sum()) for value in expected.values()) ** 0.5
    for name, value in expected.items():
        assert relative_difference(found[name], value, 1e-3 * total) < 2e-5, name


@every_operation
def test_what_is_frozen_costs_no_kernel_and_changes_no_other_gradient(name: str, monkeypatch):
    """Let each input alone need a gradient: its bits are the same."""
    (operation, inputs), wrap, launched = case(name), v3.wrap_triton, []
    noting = lambda kernel: launched.append(kernel.__name__) or wrap(kernel)  # noqa: E731
    monkeypatch.setattr(v3, "wrap_triton", noting)
    expected = results(operation, inputs)[-len(inputs) :]
    for_all, counts = len(launched), []
    for i, alone in enumerate(expected):
        launched.clear()
        one = [x.detach().requires_grad_(i == j) for j, x in enumerate(inputs)]
        assert torch.equal(results(operation, one)[-1], alone)
        counts.append(len(launched))
    assert min(counts) < for_all >= max(counts)


@pytest.mark.parametrize("version", [v3, v4])
def test_wide_offsets_change_nothing(version: ModuleType, monkeypatch):
    """Those of 64 bits, which tensors of 2^31 elements need, on small ones."""
    _, inputs = case("triangle")
    multiply = version.TriangleMultiplicationFunction.apply
    operation = lambda x, *parameters: multiply(x, None, False, 1e-5, *parameters)  # noqa: E731
    expected, options, kernels = results(operation, inputs), version.triangle_options, []

    def wide(kernel: str, *inputs: Tensor) -> tuple[int, dict]:
        kernels.append(kernel)
        programs, chosen = options(kernel, *inputs)
        return programs, {**chosen, "WIDE": True}

    monkeypatch.setattr(version, "triangle_options", wide)
    for found, narrow in zip(results(operation, inputs), expected, strict=True):
        assert relative_difference(found, narrow) < 1e-6
    assert len(kernels) == 5


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
        if version is not v3 and "Multiplication" in name:  # V3's kernel adds the residual
            out = x + out
    out.backward(torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(out))
    return {"x": x.grad.flatten(0, -2), **gradients(part)}


@pytest.mark.parametrize(
    ("part", "length", "case"),
    [
        ("TriangleMultiplicationOutgoing", 13, "large outlier"),
        ("TriangleAttentionStartingNode", 13, "large outlier"),
        # three kernels, with the block size below
        ("TriangleAttentionStartingNode", 19, "large outlier"),
        ("TriangleAttentionStartingNode", 19, "large logits"),
        ("TriangleAttentionStartingNode", 19, "logits of several hundred"),
    ],
)
def test_no_row_or_column_of_a_gradient_is_less_exact_than_in_v1(
    part: str, length: int, case: str, monkeypatch
):
    """An outlier channel stands above the others at all positions, as they do in trained models."""
    monkeypatch.setitem(v3.OVERRIDES, "attention_backward_short", {"BLOCK_N": 16})
    v1, x = load("tiny_openfold_v1"), torch.randn(1, length, length, 32)
    x[..., 5] += 100.0 if case == "large outlier" else 0.0
    config = v1.ModelConfig(pair_dim=32, num_heads_pair=2)
    state = random_state(getattr(v1, part)(config, v1.Fusions()).state_dict())
    if "logits" in case:  # exp() of several hundred overflows float32
        state["linear_q.weight"] *= 5 if case == "large logits" else 15
        state["linear_k.weight"] *= 5 if case == "large logits" else 15
    x = x.to(DEVICE)
    exact = part_gradients(v1, part, state, x, torch.float64)
    sides = [part_gradients(version, part, state, x, torch.bfloat16) for version in (v1, v3)]
    # The interpreter does not round a gradient before the kernel has used it, as a GPU does.
    if v3.INTERPRETED and length > 16:
        del exact["linear_k.weight"], exact["linear.weight"]
    for name, expected in exact.items():
        expected = expected.reshape(len(expected), -1)
        rounding, error = (side[name].double().view_as(expected) - expected for side in sides)
        for dim in range(exact[name].dim())[:2]:
            least = 10 * rounding.norm(dim=dim).square().mean().sqrt().clamp(min=1e-300)
            sizes = expected.norm(dim=dim).clamp(min=least)
            before, after = ((e.norm(dim=dim) / sizes).max() for e in (rounding, error))
            assert after <= 3 * before, f"{name}, dim {dim}: {after:.2g}, V1 {before:.2g}"


def attention(qkvg: Tensor, gate_bias: Tensor, bias: Tensor) -> Tensor:
    """By PyTorch."""
    q, k, v, gate = qkvg.transpose(2, 3).unbind(4)  # [B, R, H, N, D]
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias[:, None]
    gate = torch.sigmoid(gate + gate_bias.view(-1, 1, q.shape[-1]))
    return (gate * (scores.softmax(-1) @ v)).transpose(2, 3).flatten(3)


@pytest.mark.parametrize("module", [v3, v4])
@pytest.mark.parametrize("score", [150.0, -150.0, -1e4, -math.inf, math.inf, math.nan])
def test_a_row_whose_scores_exp_cannot_hold(score: float, module: ModuleType, monkeypatch):
    """One row, of which all are so, or one is; what is not a number, is so in this row alone."""
    monkeypatch.setitem(module.OVERRIDES, "attention_backward_short", {"BLOCK_N": 16})
    qkvg, gate_bias, bias = randn(1, 2, 19, 1, 4, 8), randn(8), randn(1, 1, 19, 19)
    bias[..., 7, : 3 if score > 0 else None] += score
    ours = module.GatedAttentionFunction.apply
    if abs(score) < math.inf:
        check_gradients(attention, ours, (qkvg, gate_bias, bias), limit=1e-3)  # 1e4 is rounded so
    else:
        wrong = ours(qkvg, gate_bias, bias).isnan()
        assert wrong.any(-1).sum() == wrong[:, :, 7].all(-1).sum() == 2


@pytest.mark.parametrize(
    ("length", "dtype", "sizes", "limited"),
    [
        (64, torch.bfloat16, {}, True),
        (64, torch.bfloat16, {"BLOCK_N": 32}, False),
        (63, torch.bfloat16, {}, False),
        (64, torch.float32, {}, False),
    ],
)
def test_a_limit_on_registers_is_for_the_sizes_that_it_was_measured_with(
    length: int, dtype: torch.dtype, sizes: dict[str, int], limited: bool, monkeypatch
):
    """Other lengths, types and block sizes spill with it, or would be measured with a spill."""
    monkeypatch.setattr(v4, "BACKEND", "cuda")
    if sizes:
        monkeypatch.setitem(v4.OVERRIDES, "attention_forward", sizes)
    qkvg = torch.empty(1, 1, length, 1, 4, 32, dtype=dtype)
    options = v4.attention_options("attention_forward", qkvg, False)
    assert ("maxnreg" in options) == limited
    assert v4.REGISTERS.keys() <= v4.BLOCKS.keys()


@pytest.mark.gpu
def test_attention_in_a_graph_gives_the_same_bits(monkeypatch):
    """There the bias's gradient runs beside other kernels, and only there."""
    forks = []
    join = v4.join
    monkeypatch.setattr(v4, "join", lambda side: (forks.append(side is not None), join(side)))
    shapes = [(2, 70, 72, 4, 4, 32), (128,), (2, 4, 72, 72)]
    inputs = [randn(*shape).bfloat16().requires_grad_() for shape in shapes]
    # what keeps the graph of autograd would tie the capture to the stream of this pass
    alone = [x.detach() for x in results(v4.GatedAttentionFunction.apply, inputs)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(v4.GatedAttentionFunction.apply, inputs)
    for _ in range(20):
        graph.replay()
        assert all(map(torch.equal, captured, alone))
    assert forks == [False, False, True, True]


# Transitions and losses of V4

NAMES = ("layer_norm.weight", "layer_norm.bias", "linear_1.weight", "linear_1.bias")
NAMES += ("linear_2.weight", "linear_2.bias")
narrow_and_wide = pytest.mark.parametrize("dim", [16, 256])  # rows of one kernel, and of more


def transition_inputs(rows: int, dim: int) -> list[Tensor]:
    """x, and the parameters of a transition.

    The first bias keeps the hidden layer away from 0, where rounding would switch a ReLU.
    """
    x, norm = randn(rows, dim, scale=3, shift=2), [randn(dim, scale=0.2, shift=1), randn(dim)]
    first = [randn(4 * dim, dim, scale=0.2 * dim**-0.5), randn(4 * dim).sign().mul(4)]
    return [x, *norm, *first, randn(dim, 4 * dim, scale=dim**-0.5), randn(dim)]


def transition(x: Tensor, *parameters: Tensor) -> Tensor:
    """By V4's module."""
    module = v4.Transition(x.shape[-1], 4, v4.Fusions())
    return functional_call(module, dict(zip(NAMES, parameters, strict=True)), x)


@both_types
@narrow_and_wide
def test_transition(dim: int, dtype: torch.dtype):
    """x + algorithm 15 of the supplement; x and the parameters are float32 in both types."""

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            return transition(x, *parameters)

    def reference(x: Tensor, *parameters: Tensor) -> Tensor:
        y = F.layer_norm(x, (dim,), *parameters[:2], 1e-5)
        return x + F.linear(F.relu(F.linear(y, *parameters[2:4])), *parameters[4:])

    check_close(ours, reference, *transition_inputs(70, dim), limit=LIMITS[dtype])


@narrow_and_wide
def test_transition_keeps_what_is_not_a_number(dim: int):
    """Also where it comes up in the hidden layer: a ReLU may not turn it into 0."""
    x, *parameters = transition_inputs(3, dim)
    x[1, 5] = torch.nan
    assert transition(x, *parameters).isnan().any(1).tolist() == [False, True, False]
    parameters[2][7] = torch.nan
    assert transition(x, *parameters).isnan().all()


@both_types
def test_loss(dtype: torch.dtype):
    """Of a protein where nothing counts, too; distances are those of edges and beyond the last."""
    tokens, masked = torch.randint(23, (2, 3, 9)).to(DEVICE), randn(2, 3, 9) < -0.3
    masked[1] = False
    coords = randn(2, 9, 3, scale=5)
    coords[0] = 0
    coords[0, :, 0] = 2.3125 * torch.arange(9)
    coords[0, 8, 0] = 40.0
    observed = torch.tensor([[True, False] + 7 * [True], 9 * [True]], device=DEVICE)
    bins, known = v4.DistogramHead.targets(coords, observed)
    assert bins[0, 0].tolist() == [0, 0, 8, 15, 23, 30, 37, 45, 63]

    def ours(of_pairs: Tensor, of_msa: Tensor) -> Tensor:
        distogram = v4.HeadLoss.apply(of_pairs, bins, known, True, 0.3)
        return distogram + v4.HeadLoss.apply(of_msa, tokens, masked, False, 2.0)

    def reference(of_pairs: Tensor, of_msa: Tensor) -> Tensor:
        with InFloat64():
            distogram = v4.head_loss(of_pairs + of_pairs.transpose(1, 2), bins, known)
            return 0.3 * distogram + 2.0 * v4.head_loss(of_msa, tokens, masked)

    logits = randn(2, 9, 9, 64, dtype=dtype), randn(2, 3, 9, 23, dtype=dtype)
    check_close(ours, reference, *logits, limit=LIMITS[dtype])


# The model


def build(script: str, *argv: str) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
    """A model with random weights, its optimizer and a batch."""
    version = load(script)
    args = version.parse_args(
        [*SMALLEST["openfold"], "--batch-size", "2", "--device", DEVICE.type, *argv]
    )
    model = version.build_model(args, DEVICE)
    optimizer = version.build_optimizer(args, model)
    model.load_state_dict(random_state(model.state_dict()))
    return model, optimizer, version.make_batches(args, DEVICE, 1).next_batch()


def test_second_derivatives_are_refused_for_every_parameter_alone():
    """Whichever kernel's backward pass would have to be differentiated."""
    model, _, batch = build("tiny_openfold_v4")
    loss = model(**batch)
    for name, parameter in model.named_parameters():
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(loss, parameter, create_graph=True, retain_graph=True)
            pytest.fail(name)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
@torch.no_grad()
def test_a_mask_of_any_type_gives_the_loss_of_a_boolean_one_in_v1(version: int):
    """0 is no, all else is yes."""
    (v1, _, batch), (model, _, _) = map(build, ("tiny_openfold_v1", f"tiny_openfold_v{version}"))
    batch["sequences"] = torch.tensor([[True, False], [True, True]], device=DEVICE)
    batch["residues"] = batch["observed"].clone()
    batch["residues"][0, 2] = batch["observed"][0, 2] = False
    expected = v1(**batch).item()
    batch["masked"] = 255 * batch["masked"].byte()
    batch["observed"] = batch["observed"].float()
    batch["sequences"] = 255 * batch["sequences"].byte()
    batch["residues"] = 2 * batch["residues"].long()
    batch["tokens"] = batch["tokens"].int()
    assert model(**batch).item() == pytest.approx(expected, rel=1e-4)


def test_weights_that_are_written_and_moved_are_those_of_the_next_pass():
    """By every kernel; test_triton_llama_v4.py has what people do between two steps."""
    losses = []
    for script in ("tiny_openfold_v1", V4):
        model, optimizer, batch = build(script, "--use-amp")
        for act in (scale_data, transpose_memory):
            act(model, optimizer)
        with torch.autocast(DEVICE.type, torch.bfloat16), torch.no_grad():
            losses.append(model(**batch).item())
    assert losses[1] == pytest.approx(losses[0], rel=3e-2)


# The command line

H100, MI300 = 227 * 1024, 64 * 1024  # bytes of shared memory
DEFAULT = "--msa-dim 64 --num-heads-msa 4 --pair-dim 128 --num-heads-pair 4"
ALL_OF_V4 = "attention triangle outer-product transition"
WIDTHS_AND_WHAT_IS_LEFT = [  # by V3, and by V4
    ("", H100, "", ""),
    ("--matmul-precision high", H100, "", ""),
    ("--use-amp", MI300, "", ""),
    ("--msa-dim 256 --num-heads-msa 8", H100, "", ""),
    ("--msa-dim 256 --num-heads-msa 8 --use-amp", H100, "", ""),
    ("--msa-dim 512 --num-heads-msa 8 --use-amp", H100, "", ""),
    ("--pair-dim 256 --num-heads-pair 8 --use-amp", H100, "", ""),
    ("--pair-dim 256 --num-heads-pair 8", H100, "triangle", "triangle outer-product"),
    ("--pair-dim 96", H100, "triangle", ALL_OF_V4),
    ("--pair-dim 8 --num-heads-pair 1", H100, "triangle", ALL_OF_V4),
    ("--pair-dim 512 --num-heads-pair 8 --use-amp", H100, "triangle", "triangle outer-product"),
    ("--msa-dim 1024 --num-heads-msa 16", H100, "", ""),
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
    args = parse(script, *words(DEFAULT), *words(argv), "--device", DEVICE.type)
    off = [flag for flag, name, _ in module.FUSIONS if not getattr(args, name)]
    expected = left_by_v4 if script.endswith("v4") else left
    assert [re.sub("^triton-|-fusion$", "", flag) for flag in off] == expected.split()
    notes = [line for line in capsys.readouterr().err.splitlines() if " is off, " in line]
    assert len(notes) == len(off)
    assert all(flag in note for flag, note in zip(off, notes, strict=True))


@pytest.mark.parametrize("script", ["tiny_openfold_v3", "tiny_openfold_v4"])
def test_every_width_trains(script: str, run):
    """More than 64 channels per head, and a pair-dim that is no power of two."""
    argv = words("--pair-dim 72 --num-heads-pair 1 --msa-dim 24 --num-heads-msa 2 --seq-len 5")
    argv += words("--batch-size 1 --use-amp --checkpoint-blocks --verify-accuracy")
    result = run(script, *argv, "--device", DEVICE.type)
    assert result.status == 0, result.stdout


def test_too_large_blocks_are_one_line(run, monkeypatch):
    error = triton.runtime.errors.OutOfResources(300000, 232448, "shared memory")

    def launch(*_: object) -> None:
        raise error

    monkeypatch.setattr(v3.LayerNormFunction, "apply", launch)
    for mode in ([], ["--verify-accuracy"]):
        result = run("tiny_openfold_v3", *mode, "--device", DEVICE.type)
        assert result.status == 1
        assert result.stderr.endswith(f": error: {error}\n")
        assert "Traceback" not in result.stderr

"""What TinyOpenFold V4 adds to V3 gives what float64, PyTorch's own optimizer and V3 give.

Sizes, limits and helpers are those of the tests of V3, whose kernels V4 keeps.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, gradients, load, random_state, relative_difference, words
from test_triton_openfold import (
    DEVICE,
    LIMITS,
    both_types,
    check_close,
    random,
    triangle,
    triangle_inputs,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.modes import InFloat64

V3, V4 = "tiny_openfold_v3", "tiny_openfold_v4"
v4 = load(V4)
SMALL = words(
    "--num-blocks 1 --seq-len 5 --num-seqs 2 --batch-size 2 --msa-dim 16 --pair-dim 16"
    " --num-heads-msa 1 --num-heads-pair 1"
)


def kernels(script: str) -> dict[str, str]:
    """Find the source of every function under @triton.jit."""
    parts = (ROOT / f"{script}.py").read_text().split("\n\n\n")
    jitted = [part for part in parts if part.startswith("@triton.jit")]
    return {re.search(r"^def (\w+)", part, re.MULTILINE)[1]: part for part in jitted}


REPLACED = ("layer_norm", "bias_relu", "outer_product_backward")  # V4 has other kernels for them


def test_kernels_of_v3_stay_to_the_byte():
    """Those of what V4 replaces are gone, all others are V3's."""
    before, after = kernels(V3), kernels(V4)
    stay = {name: part for name, part in before.items() if not name.startswith(REPLACED)}
    assert len(stay) >= 25
    assert stay.items() < after.items()
    assert {name for name in before if name not in after} == before.keys() - stay.keys()


# The whole transition


def transition(x: Tensor, *parameters: Tensor) -> Tensor:
    """Compute x + algorithm 15 of the AlphaFold 2 supplement."""
    norm_weight, norm_bias, weight_1, bias_1, weight_2, bias_2 = parameters
    y = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, 1e-5)
    return x + F.linear(F.relu(F.linear(y, weight_1, bias_1)), weight_2, bias_2)


def in_precision(operation: Callable, dtype: torch.dtype) -> Callable:
    """Run an operation under autocast, if `dtype` is narrower than float32."""

    def run(*inputs: Tensor | None) -> Tensor:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            return operation(*inputs)

    return run


def transition_inputs(rows: int, dim: int) -> list[Tensor]:
    """Draw x and the parameters of a transition.

    The first bias keeps the hidden layer away from 0, where rounding would switch a ReLU.
    """
    norm = [random(dim, scale=0.2, shift=1.0), random(dim, scale=0.2)]
    bias = random(4 * dim).detach().sign().mul(4).requires_grad_()
    first = [random(4 * dim, dim, scale=0.25 * dim**-0.5), bias]
    second = [random(dim, 4 * dim, scale=dim**-0.5), random(dim)]
    return [random(rows, dim, scale=3.0, shift=2.0), *norm, *first, *second]


TRANSITIONS = {"whole": v4.TransitionFunction, "wide": v4.WideTransitionFunction}
both_transitions = pytest.mark.parametrize("function", TRANSITIONS.values(), ids=TRANSITIONS)


@both_types
@both_transitions
@pytest.mark.parametrize(("rows", "dim"), [(1, 16), (130, 32)])
def test_transition(function: type, rows: int, dim: int, dtype: torch.dtype):
    """In bfloat16 x and the parameters stay float32, as under autocast."""

    def fused(x: Tensor, *parameters: Tensor) -> Tensor:
        return function.apply(x, 1e-5, *parameters)

    inputs = transition_inputs(rows, dim)
    check_close(in_precision(fused, dtype), transition, *inputs, limit=LIMITS[dtype])


@both_transitions
def test_transition_keeps_what_is_not_a_number(function: type):
    """Also where it comes up in the hidden layer: a ReLU may not turn it into 0."""
    x, *parameters = transition_inputs(3, 16)
    x = x.detach()
    x[1, 5] = torch.nan
    out = function.apply(x, 1e-5, *parameters)
    assert out.isnan().any(1).tolist() == [False, True, False]
    parameters[2].detach()[7] = torch.nan
    assert function.apply(x, 1e-5, *parameters).isnan().all()


# The product of short triangles


@both_types
@pytest.mark.parametrize("incoming", [False, True], ids=["outgoing", "incoming"])
@pytest.mark.parametrize("length", [5, 64])
def test_product_of_short_triangles(length: int, incoming: bool, dtype: torch.dtype):
    """Only the product differs: 65 residues would be the library's."""

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        return v4.TriangleMultiplicationFunction.apply(x, None, incoming, 1e-5, *parameters)

    def reference(x: Tensor, *parameters: Tensor) -> Tensor:
        return x + triangle(incoming, x, *parameters)

    limit = LIMITS[dtype] * (3 if dtype == torch.bfloat16 else 1)
    inputs = triangle_inputs(2, length, 16)
    check_close(in_precision(ours, dtype), reference, *inputs, limit=limit)


# A norm before and a residual after a projection


def joined(*tensors: Tensor | None) -> Tensor:
    """Put all elements of several results into one tensor."""
    return torch.cat(
        [tensor.flatten().to(torch.float64) for tensor in tensors if tensor is not None]
    )


@both_types
@pytest.mark.parametrize(
    ("dim", "width", "parts", "heads", "ending"),
    [(16, 64, 1, 3, True), (32, 32, 2, 0, False), (16, 0, 1, 2, False), (256, 32, 2, 1, False)],
    ids=["pair-bias", "two-parts", "pair-bias-alone", "wide-rows"],
)
def test_norm_and_projection(
    dim: int, width: int, parts: int, heads: int, ending: bool, dtype: torch.dtype
):
    """What is handed on has gradients of its own."""
    projection = [random(width, dim, scale=dim**-0.5), random(width)] if width else [None, None]
    head = random(heads, dim, scale=dim**-0.5) if heads else None
    inputs = [
        random(2, 5, 5, dim, scale=3.0, shift=2.0),
        random(dim, shift=1.0),
        random(dim),
        *projection,
        head,
    ]

    def ours(x: Tensor, *parameters: Tensor | None) -> Tensor:
        settings = v4.NormSettings(1e-5, dtype, parts, ending)
        return joined(*v4.NormProjection.apply(x, settings, *parameters))

    def reference(
        x: Tensor, norm_weight: Tensor, norm_bias: Tensor, *rest: Tensor | None
    ) -> Tensor:
        weight, bias, head = rest
        y = F.layer_norm(x, (dim,), norm_weight, norm_bias, 1e-5)
        out = None
        if width:
            out = torch.stack(F.linear(y, weight, bias).chunk(parts, -1))
        pair_bias = None
        if heads:
            pair_bias = (y @ head.T).permute(0, 3, *((2, 1) if ending else (1, 2)))
        return joined(x, out, pair_bias)

    check_close(ours, reference, *inputs, limit=LIMITS[dtype])


@both_types
def test_projection_with_residual(dtype: torch.dtype):
    inputs = [random(2, 65, 16, dtype=dtype), random(2, 65, 32), random(32, 16), random(32)]

    check_close(
        v4.ProjectionWithResidual.apply,
        lambda x, r, w, b: r + F.linear(x, w, b),
        *inputs,
        limit=LIMITS[dtype],
    )


@both_types
@pytest.mark.parametrize("biased", [True, False])
def test_outer_product_with_residual(biased: bool, dtype: torch.dtype):
    factor, dim = 1 / 7, 8
    inputs = [random(2, 2, 7, 5, dim, dtype=dtype), random(2, 5, 5, 16)]
    inputs += [random(16, dim * dim, scale=1 / dim), random(16) if biased else None]

    def ours(ab: Tensor, pair: Tensor, *parameters: Tensor | None) -> Tensor:
        return v4.OuterProductWithResidual.apply(ab, pair, factor, *parameters)

    def reference(ab: Tensor, pair: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outer = torch.einsum("bsic,bsjd->bijcd", *ab).flatten(3)
        return pair + factor * F.linear(outer, weight, bias)

    check_close(ours, reference, *inputs, limit=LIMITS[dtype])


# Embedding and losses


@both_types
@pytest.mark.parametrize("reach", [0, 2], ids=["msa", "pair"])
def test_embedding(reach: int, dtype: torch.dtype):
    """Against one-hot vectors; the channels are no power of two."""
    tokens = torch.randint(23, (2, 3, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    widths = [23, 23, *([2 * reach + 1] if reach else [])]
    parameters = [t for width in widths for t in (random(20, width), random(20))]

    def hot(indices: Tensor, width: int) -> Tensor:
        return F.one_hot(indices, width).double()

    def reference(*p: Tensor) -> Tensor:
        query, place = hot(tokens[:, 0], 23), torch.arange(9, device=DEVICE)
        if not reach:
            return F.linear(query, *p[:2])[:, None] + F.linear(hot(tokens, 23), *p[2:])
        offset = (place[:, None] - place).clamp(-reach, reach) + reach
        pair = F.linear(query, *p[:2])[:, :, None] + F.linear(query, *p[2:4])[:, None]
        return pair + F.linear(hot(offset, widths[2]), *p[4:])

    check_close(
        lambda *p: v4.EmbeddingFunction.apply(tokens, reach, dtype, *p),
        reference,
        *parameters,
        limit=LIMITS[dtype],
    )


@both_types
def test_loss(dtype: torch.dtype):
    """Of a protein where nothing counts, too; distances are those of edges and beyond the last."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(23, (2, 3, 9), generator=generator).to(DEVICE)
    masked = (torch.rand(2, 3, 9, generator=generator) < 0.4).to(DEVICE)
    masked[1] = False
    coords = (5 * torch.randn(2, 9, 3, generator=generator)).to(DEVICE)
    coords[0, :, 1:] = 0
    coords[0, :, 0] = 2.3125 * torch.arange(9)
    coords[0, 8, 0] = 40.0
    observed = torch.tensor([[True, False] + 7 * [True], 9 * [True]], device=DEVICE)
    inputs = [random(2, 3, 9, 16, dtype=dtype), random(2, 9, 9, 32, dtype=dtype)]
    inputs += [random(64, 32, scale=0.2), random(64), random(23, 16, scale=0.2), random(23)]

    def ours(msa: Tensor, pair: Tensor, *parameters: Tensor) -> Tensor:
        targets = tokens, masked, coords, observed
        return v4.LossFunction.apply(msa, pair, targets, *parameters)

    def reference(msa: Tensor, pair: Tensor, *parameters: Tensor) -> Tensor:
        logits = F.linear(pair, *parameters[:2])
        counted = observed[:, :, None] & observed[:, None]
        with InFloat64():
            distogram = v4.DistogramHead.loss(logits + logits.transpose(1, 2), coords, observed)
            of_msa = v4.MaskedMSAHead.loss(F.linear(msa, *parameters[2:]), tokens, masked)
        assert counted.any()
        return 0.3 * distogram + 2.0 * of_msa

    check_close(ours, reference, *inputs, limit=LIMITS[dtype])


# Optimizer and gradients


def build(script: str, *argv: str) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
    """Build a model with random weights, its optimizer and a batch."""
    version = load(script)
    args = version.parse_args([*SMALL, "--device", DEVICE.type, *argv])
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
        "--disable-fused-optimizer --disable-loss-fusion --disable-triton-attention",
        "--disable-all-fusion --enable-transition-fusion --enable-embedding-fusion",
        "--disable-all-fusion --enable-triton-outer-product --enable-fused-optimizer",
    ],
)
def test_gradients_are_those_of_v3(argv: str):
    """All on, and fallbacks: each operation by itself is compared with float64 above."""
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
    for _ in range(2):
        model(**batch).backward()
        for parameter, copied in zip(other.parameters(), model.parameters(), strict=True):
            parameter.grad = copied.grad.clone()
        for name, parameter in model.named_parameters():
            if "linear_1.weight" in name or "qkvg.weight" in name:
                part = parameter.slot.buffer.part(parameter)
                assert parameter.grad.data_ptr() == part.data_ptr(), name
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(found.slot.cast, found.bfloat16()), name


def optimizers(dtype: torch.dtype) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Make parameters of odd sizes and our optimizer over them."""
    parameters = [nn.Parameter(random(*shape).detach()) for shape in [(33, 7), (5,), (64, 33)]]
    return parameters, v4.FusedAdamW([parameters], 1e-2, dtype)


def take_step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take a step with the gradients of this seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(DEVICE)
    optimizer.step()
    optimizer.zero_grad()


def test_optimizer_resumes_exactly():
    first, optimizer = optimizers(torch.bfloat16)
    take_step(first, optimizer, 0)
    second, resumed = optimizers(torch.bfloat16)
    for to, parameter in zip(second, first, strict=True):
        to.data.copy_(parameter.data)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameters, each in ((first, optimizer), (second, resumed)):
        take_step(parameters, each, 1)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.slot.cast, b.slot.cast)


def test_an_infinite_gradient_of_float16_changes_nothing():
    parameters, optimizer = optimizers(torch.float16)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=512.0)
    before = [parameter.detach().clone() for parameter in parameters]
    for infinite in (True, False):
        for parameter in parameters:
            parameter.grad = scaler.scale(torch.ones_like(parameter))
        parameters[2].grad[3, 2] = torch.inf if infinite else 1.0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(a, b) for a, b in zip(parameters, before, strict=True)]
        assert all(same) if infinite else not any(same)
    assert scaler.get_scale() == 256


class Stream:
    """Stand in for a stream, or an event of one: at a wait what its work reads must be there."""

    def __init__(self, **unused):
        self.reads: list[StorageWeakRef] = []

    def record_event(self) -> Stream:
        event = Stream()
        event.reads, self.reads = self.reads, []
        return event

    def wait_event(self, event: Stream) -> None:
        assert not any(storage.expired() for storage in event.reads)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream)


class Reads(TorchDispatchMode):
    """Note in a stream which memory the operations inside read that was there before."""

    def __init__(self, stream: Stream | None):
        super().__init__()
        self.stream, self.made = stream or Stream(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        reads, made = (
            {StorageWeakRef(t.untyped_storage()) for t in tree_leaves(tree) if type(t) is Tensor}
            for tree in ((args, kwargs), results)
        )
        self.made |= made - reads
        self.stream.reads += reads - self.made
        return results


@pytest.mark.parametrize("msa_dim", [64, 256])  # projections by kernels, and by the library
def test_nothing_is_freed_that_work_on_a_side_stream_reads(msa_dim: int, monkeypatch):
    """A graph would give its memory to what comes next in the chain, and replay both at once."""
    sizes = f"--msa-dim {msa_dim} --num-heads-msa {msa_dim // 64} --pair-dim 64"
    model, optimizer, batch = build(V4, *sizes.split(), "--use-amp")
    chain = Stream()
    for name, value in {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: True,
        "current_stream": lambda: chain,
        "Stream": Stream,
        "stream": Reads,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    model(**batch).backward()
    optimizer.step()
    heads = [*model.distogram.parameters(), *model.masked_msa.parameters()]
    assert len(model.side.addresses) == len([*model.blocks.parameters(), *heads])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["", "--use-amp"], ids=["float32", "bfloat16"])
def test_overlap_changes_no_bit_of_a_graph(precision: str, tmp_path):
    losses = []
    for flag in ("--enable-overlap", "--disable-overlap"):
        argv = [*TINY["openfold"], *precision.split(), flag, "--num-steps", "5"]
        args = v4.parse_args([*argv, "--profile-dir", str(tmp_path)])
        losses.append(v4.train(args)["loss"]["curve"])
    assert losses[0] == losses[1]

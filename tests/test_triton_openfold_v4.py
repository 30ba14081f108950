"""What a step of TinyOpenFold V4 does not show: wide transitions, NaN and the edges of the losses.

The step is compared with float64 in test_triton_steps.py; the optimizer is tested in TinyLlama.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, LIMITS, TINY, both_types, check_close, load, randn, random_state, words
from test_triton_llama_v4 import scale_data, transpose_memory, vector_and_back
from torch import Tensor, nn

from fusion_lab.accuracy import InFloat64

V4 = "tiny_openfold_v4"
v4 = load(V4)
SMALL = words(
    "--num-blocks 1 --seq-len 5 --num-seqs 2 --batch-size 2 --msa-dim 16 --pair-dim 16"
    " --num-heads-msa 1 --num-heads-pair 1"
)


# Transitions


def transition_inputs(rows: int, dim: int) -> list[Tensor]:
    """x, and the parameters of a transition.

    The first bias keeps the hidden layer away from 0, where rounding would switch a ReLU.
    """
    x, norm = randn(rows, dim, scale=3, shift=2), [randn(dim, scale=0.2, shift=1), randn(dim)]
    first = [randn(4 * dim, dim, scale=0.2 * dim**-0.5), randn(4 * dim).sign().mul(4)]
    return [x, *norm, *first, randn(dim, 4 * dim, scale=dim**-0.5), randn(dim)]


def wide_transition(x: Tensor, eps: float, *parameters: Tensor) -> Tensor:
    """As a Transition of wide rows computes it."""
    settings = eps, v4.gemm_dtype(x), False, None, True
    x, hidden, _ = v4.NormProjection.apply(x, settings, *parameters[:4], None)
    return x + v4.Projection.apply(hidden, None, *parameters[4:])


TRANSITIONS = {"whole": v4.TransitionFunction.apply, "wide": wide_transition}
both_transitions = pytest.mark.parametrize("function", TRANSITIONS.values(), ids=TRANSITIONS)


@both_types
@both_transitions
def test_transition(function: Callable, dtype: torch.dtype):
    """x + algorithm 15 of the supplement; x and the parameters are float32 in both types."""

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            return function(x, 1e-5, *parameters)

    def reference(x: Tensor, *parameters: Tensor) -> Tensor:
        y = F.layer_norm(x, (32,), *parameters[:2], 1e-5)
        return x + F.linear(F.relu(F.linear(y, *parameters[2:4])), *parameters[4:])

    check_close(ours, reference, *transition_inputs(130, 32), limit=LIMITS[dtype])


@both_transitions
def test_transition_keeps_what_is_not_a_number(function: Callable):
    """Also where it comes up in the hidden layer: a ReLU may not turn it into 0."""
    x, *parameters = transition_inputs(3, 16)
    x[1, 5] = torch.nan
    out = function(x, 1e-5, *parameters)
    assert out.isnan().any(1).tolist() == [False, True, False]
    parameters[2][7] = torch.nan
    assert function(x, 1e-5, *parameters).isnan().all()


# Losses


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
    inputs = [randn(2, 3, 9, 16, dtype=dtype), randn(2, 9, 9, 32, dtype=dtype)]
    inputs += [randn(64, 32, scale=0.2), randn(64), randn(23, 16, scale=0.2), randn(23)]

    bins, known = v4.DistogramHead.targets(coords, observed)
    assert bins[0, 0].tolist() == [0, 0, 8, 15, 23, 30, 37, 45, 63]

    def ours(msa: Tensor, pair: Tensor, *parameters: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            distogram = v4.Projection.apply(pair, None, *parameters[:2])
            of_msa = v4.Projection.apply(msa, None, *parameters[2:])
        distogram = v4.HeadLoss.apply(distogram, bins, known, True, 0.3)
        return distogram + v4.HeadLoss.apply(of_msa, tokens, masked, False, 2.0)

    def reference(msa: Tensor, pair: Tensor, *parameters: Tensor) -> Tensor:
        logits = F.linear(pair, *parameters[:2])
        with InFloat64():
            distogram = v4.head_loss(logits + logits.transpose(1, 2), bins, known)
            of_msa = v4.head_loss(F.linear(msa, *parameters[2:]), tokens, masked)
        return 0.3 * distogram + 2.0 * of_msa

    check_close(ours, reference, *inputs, limit=LIMITS[dtype])


# The model


def build(script: str, *argv: str) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
    """A model with random weights, its optimizer and a batch."""
    version = load(script)
    args = version.parse_args([*SMALL, "--device", DEVICE.type, *argv])
    model = version.build_model(args, DEVICE)
    optimizer = version.build_optimizer(args, model)
    model.load_state_dict(random_state(model.state_dict()))
    return model, optimizer, version.make_batches(args, DEVICE, 1).next_batch()


MASKS = {  # how people write one: 0 is no, all else is yes
    "float": lambda mask: mask.float(),
    "0 and 2": lambda mask: 2 * mask.long(),
    "0 and 255": lambda mask: 255 * mask.byte(),
}
FEW = "--disable-all-fusion --enable-loss-fusion --enable-embedding-fusion --enable-fused-optimizer"


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_mask_of_any_type_gives_the_loss_of_a_boolean_one(version: int, kind: str):
    script = f"tiny_openfold_v{version}"
    flags = {1: "", 2: "", 3: "--disable-all-fusion", 4: FEW}[version]
    model, _, batch = build(script, *flags.split())
    batch["sequences"] = torch.tensor([[True, False], [True, True]], device=DEVICE)
    batch["residues"] = batch["observed"].clone()
    names = "masked", "observed", "sequences", "residues"
    other = batch | {name: MASKS[kind](batch[name]) for name in names}
    other["tokens"] = batch["tokens"].int()
    assert torch.equal(model(**other), model(**batch))


def test_a_model_trains_on_as_v1_does_when_its_weights_are_moved_and_written():
    """In mixed precision, where casts could be old; TinyLlama has more of what people do."""
    losses = []
    for script, flags in (("tiny_openfold_v1", ""), (V4, FEW)):
        model, optimizer, batch = build(script, *flags.split(), "--use-amp")
        if script != V4:  # PyTorch's fused one would take moments to lie as weights do
            optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
        losses.append([])
        for act in (
            scale_data,
            vector_and_back,
            transpose_memory,
            lambda model, optimizer: model.double().float(),
        ):
            act(model, optimizer)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_weights_that_are_written_through_data_are_those_of_the_next_pass():
    """By every kernel, wherever the weights lie."""
    losses = []
    for script in ("tiny_openfold_v1", V4):
        model, optimizer, batch = build(script, "--use-amp")
        for act in (scale_data, transpose_memory):
            act(model, optimizer)
        with torch.autocast(DEVICE.type, torch.bfloat16), torch.no_grad():
            losses.append(model(**batch).item())
    assert losses[1] == pytest.approx(losses[0], rel=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["", "--use-amp"], ids=["float32", "bfloat16"])
def test_overlap_changes_no_bit_of_a_graph(precision: str, tmp_path):
    losses = []
    for flag in ("--enable-overlap", "--disable-overlap"):
        argv = [*TINY["openfold"], *precision.split(), flag, "--num-steps", "5"]
        args = v4.parse_args([*argv, "--profile-dir", str(tmp_path)])
        losses.append(v4.train(args)["loss"]["curve"])
    assert losses[0] == losses[1]

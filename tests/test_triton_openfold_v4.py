"""What a step of TinyOpenFold V4 does not show: wide transitions, NaN and the edges of the losses.

The step is compared with float64 in test_triton_steps.py; the optimizer is tested in TinyLlama.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, LIMITS, TINY, both_types, check_close, load, randn, random_state, words
from test_triton_llama_v4 import scale_data, transpose_memory
from torch import Tensor, nn
from torch.func import functional_call

from fusion_lab.accuracy import InFloat64

V4 = "tiny_openfold_v4"
v4 = load(V4)
SMALL = words(
    "--num-blocks 1 --seq-len 5 --num-seqs 2 --batch-size 2 --msa-dim 16 --pair-dim 16"
    " --num-heads-msa 1 --num-heads-pair 1"
)


# Transitions


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
    args = version.parse_args([*SMALL, "--device", DEVICE.type, *argv])
    model = version.build_model(args, DEVICE)
    optimizer = version.build_optimizer(args, model)
    model.load_state_dict(random_state(model.state_dict()))
    return model, optimizer, version.make_batches(args, DEVICE, 1).next_batch()


MASKS = (  # how people write one: 0 is no, all else is yes
    lambda mask: mask,
    lambda mask: mask.float(),
    lambda mask: 2 * mask.long(),
    lambda mask: 255 * mask.byte(),
)
FEW = "--disable-all-fusion --enable-loss-fusion --enable-embedding-fusion --enable-fused-optimizer"


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_mask_of_any_type_gives_the_loss_of_a_boolean_one_in_v1(version: int):
    script = f"tiny_openfold_v{version}"
    flags = {1: "", 2: "", 3: "--disable-all-fusion", 4: FEW}[version]
    (v1, _, batch), (model, _, _) = build("tiny_openfold_v1"), build(script, *flags.split())
    batch["sequences"] = torch.tensor([[True, False], [True, True]], device=DEVICE)
    batch["residues"] = batch["observed"].clone()
    batch["residues"][0, 2] = batch["observed"][0, 2] = False
    expected = v1(**batch).item()
    for as_written in MASKS:
        names = "masked", "observed", "sequences", "residues"
        other = batch | {name: as_written(batch[name]) for name in names}
        other["tokens"] = batch["tokens"].int()
        assert model(**other).item() == pytest.approx(expected, rel=1e-5)


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


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["", "--use-amp"], ids=["float32", "bfloat16"])
def test_overlap_changes_no_bit_of_a_graph(precision: str, tmp_path):
    losses = []
    for flag in ("--enable-overlap", "--disable-overlap"):
        argv = [*TINY["openfold"], *precision.split(), flag, "--num-steps", "5"]
        args = v4.parse_args([*argv, "--profile-dir", str(tmp_path)])
        losses.append(v4.train(args)["loss"]["curve"])
    assert losses[0] == losses[1]

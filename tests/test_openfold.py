"""TinyOpenFold is AlphaFold 2's Evoformer: block, losses and names against the equations of its
supplement. Later versions are compared with V1 in test_fusions.py."""

import math

import evoformer_reference as reference
import pytest
import torch
from conftest import (
    SMALLEST,
    assert_same_gradients,
    batches,
    build,
    gradients,
    random_state,
    relative_difference,
    run_main,
    words,
)
from torch import Tensor, nn
from torch.func import functional_call

from fusion_lab.accuracy import InFloat64, check_gradients

V1 = "tiny_openfold_v1"
# No two of these are equal, so that swapped axes show.
SIZES = words("--msa-dim 12 --num-heads-msa 3 --pair-dim 16 --num-heads-pair 4")
SIZES += words("--num-seqs 5 --seq-len 7 --batch-size 2")
B, S, N, C_M, C_Z, HEADS_MSA, HEADS_PAIR = 2, 5, 7, 12, 16, 3, 4


def with_random_weights(script: str, *argv: str) -> nn.Module:
    """The model with weights that make every part matter."""
    model = build(script, *SIZES, *argv)
    model.load_state_dict(random_state(model.state_dict()))
    return model


def test_block_equals_its_equations_forward_and_backward():
    """In float64: every operation, and every gradient. The reference has OpenFold's names, and says
    which layers have a bias."""
    block = with_random_weights(V1).blocks[0].double()
    assert type(block).__name__ == "EvoformerBlock"
    parameters = block.state_dict()
    inputs = {"msa": torch.randn(B, S, N, C_M).double(), "pair": torch.randn(B, N, N, C_Z).double()}

    def ours(msa: Tensor, pair: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        return functional_call(block, dict(zip(parameters, values, strict=True)), (msa, pair))

    def equations(msa: Tensor, pair: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(parameters, values, strict=True))
        return reference.evoformer_block(named, msa, pair, HEADS_MSA, HEADS_PAIR)

    check_gradients(equations, ours, inputs | parameters, 1e-9)


# Heads and losses


def reference_losses(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[float, float]:
    """(distogram, masked MSA) of the model's outputs, in float64."""
    valid = batch["observed"][:, :, None] & batch["observed"][:, None, :]
    distogram = reference.distogram_loss(outputs["distogram"].double(), batch["coords"], valid)
    logits = outputs["masked_msa"].double()
    masked = reference.masked_msa_loss(logits, batch["true_tokens"], batch["masked"])
    return float(distogram), float(masked)


@pytest.mark.parametrize("silent", ["none", "distogram", "masked_msa"])
def test_loss_is_the_weighted_sum_of_distogram_and_masked_msa(silent: str):
    """Of positions that are observed and masked alone; some distances are just below or above the
    edge of a bin, or beyond the last. A silent head has weights of zero, so it guesses evenly: its
    loss is the logarithm of its classes."""
    model, batch = with_random_weights(V1), batches(V1, *SIZES).next_batch()
    batch["observed"] = torch.ones(B, N, dtype=torch.bool)
    batch["coords"][0] = 0
    batch["coords"][0, :, 0] = torch.tensor([0.0, 0.002, 5.0, 2.313, 9.0, 21.688, 300.0])
    batch["observed"][0, 2] = batch["observed"][0, 4] = batch["observed"][1, 5] = False
    zero = {n: 0 * v for n, v in model.state_dict().items() if n.startswith(silent + ".")}
    model.load_state_dict(model.state_dict() | zero)
    with torch.no_grad():
        outputs, loss = model(batch["tokens"]), model(**batch)
    assert outputs["masked_msa"].shape == (B, S, N, 23)
    assert outputs["distogram"].shape == (B, N, N, 64)
    assert torch.equal(outputs["distogram"], outputs["distogram"].transpose(1, 2))
    distogram, masked = reference_losses(outputs, batch)
    assert min(distogram, masked) > 0.5
    if silent != "none":
        found, classes = (distogram, 64) if silent == "distogram" else (masked, 23)
        assert found == pytest.approx(math.log(classes))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(0.3 * distogram + 2.0 * masked, rel=1e-5)


# Input


def test_relative_positions_are_clipped_at_32():
    """With one amino acid everywhere, the first pair representation depends on the clipped
    offset i - j alone."""
    model = with_random_weights(V1, "--seq-len", "80")
    with torch.no_grad():
        _, pair = model.input_embedder(torch.zeros(1, 2, 80, dtype=torch.long))
    weight = model.state_dict()["input_embedder.linear_relpos.weight"]
    assert weight.shape == (C_Z, 65)
    offsets = (torch.arange(80)[:, None] - torch.arange(80)).clamp(-32, 32) + 32
    difference = pair[0] - weight.T[offsets]
    assert torch.allclose(difference, difference[0, 0].expand_as(difference), atol=1e-5)


def test_loss_on_synthetic_proteins_falls(tmp_path):
    argv = words("--num-steps 50 --warmup-steps 0 --learning-rate 2e-3 --under-profiler")
    curve = run_main(V1, tmp_path, *argv, "--batch-size", "4").summary["loss"]["curve"]
    assert sum(curve[-5:]) / 5 < 0.8 * curve[0]


# Padding


def padded(batch: dict[str, Tensor], depth: int, length: int) -> dict[str, Tensor]:
    """The same samples, this much larger: random behind their ends, which may change nothing."""
    generator = torch.Generator().manual_seed(5)
    size, larger = batch["tokens"].shape, (len(batch["tokens"]), depth, length)
    sequences, residues = torch.arange(depth) < size[1], torch.arange(length) < size[2]
    shapes = {"tokens": larger, "true_tokens": larger, "masked": larger}
    shapes |= {"coords": (size[0], length, 3), "observed": (size[0], length)}
    found = {}
    for name, value in batch.items():
        found[name] = torch.randint(0, 20, shapes[name], generator=generator).to(value.dtype)
        found[name][tuple(slice(0, n) for n in value.shape)] = value
    found["masked"] &= sequences[:, None] & residues
    found["observed"] &= residues
    there = {"sequences": sequences, "residues": residues}
    return found | {name: mask.expand(size[0], -1) for name, mask in there.items()}


@pytest.mark.parametrize("version", [1, 2])
def test_padding_changes_neither_loss_nor_outputs_nor_gradients(version: int):
    """In float64. Of V3 and V4 test_triton_openfold.py compares padded blocks with V1's."""
    script = f"tiny_openfold_v{version}"
    batch = batches(script, *SIZES).next_batch()
    sides, (_, depth, length) = [], batch["tokens"].shape
    for inputs in (batch, padded(batch, depth + 1, length + 3)):
        model = with_random_weights(script).double()
        inputs = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
        with InFloat64():
            loss = model(**inputs)
            with torch.no_grad():
                outputs = model(**{n: x for n, x in inputs.items() if n not in model.TARGETS})
        loss.backward()
        sides.append((outputs, loss, gradients(model)))
    (expected, loss, wanted), (found, again, same) = sides
    assert relative_difference(again, loss) < 1e-9
    of_msa, of_pairs = found["masked_msa"], found["distogram"]
    assert relative_difference(of_msa[:, :depth, :length], expected["masked_msa"]) < 1e-9
    assert relative_difference(of_pairs[:, :length, :length], expected["distogram"]) < 1e-9
    assert_same_gradients(same, wanted, 1e-9)


# Activation checkpointing

TWO_BLOCKS = [*SMALLEST["openfold"], "--num-blocks", "2"]


# V4's kernels with this flag: test_triton_openfold.py
@pytest.mark.parametrize(
    ("version", "argv"), [(1, []), (2, ["--use-amp"]), (4, ["--use-amp", "--disable-all-fusion"])]
)
def test_checkpointed_blocks_run_again_one_by_one_and_change_no_bit(version: int, argv: list[str]):
    script, results = f"tiny_openfold_v{version}", []
    for more in ([], ["--checkpoint-blocks"]):
        model, order = build(script, *TWO_BLOCKS, *argv, *more), []
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda *_, n=number, order=order: order.append(n))
        with torch.autocast("cpu", torch.bfloat16, enabled="--use-amp" in argv):
            loss = model(**batches(script, *TWO_BLOCKS).next_batch())
        loss.backward()
        results.append((order, {"loss": loss.detach(), **gradients(model)}))
    (once, expected), (twice, found) = results
    assert (once, twice) == ([0, 1], [0, 1, 1, 0])
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []

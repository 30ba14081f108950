"""TinyOpenFold is AlphaFold 2's Evoformer: every operation, loss and name against the equations
of its supplement."""

from __future__ import annotations

import contextlib
import math

import evoformer_reference as reference
import pytest
import torch
from conftest import (
    ALL_SETTINGS,
    TRITON,
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

from lab.modes import InFloat64

# No two of these are equal, so that swapped axes show.
SIZES = words("--msa-dim 12 --num-heads-msa 3 --pair-dim 16 --num-heads-pair 4")
SIZES += words("--num-seqs 5 --seq-len 7 --batch-size 2")
B, S, N, C_M, C_Z, HEADS_MSA, HEADS_PAIR = 2, 5, 7, 12, 16, 3, 4

# Operation: which representations it takes, and the reference on (parameters, *inputs).
OPERATIONS = {
    "msa_att_row": (("msa", "pair"), lambda p, *x: reference.msa_att_row(p, *x, heads=HEADS_MSA)),
    "msa_att_col": (("msa",), lambda p, *x: reference.msa_att_col(p, *x, heads=HEADS_MSA)),
    "msa_transition": (("msa",), reference.msa_transition),
    "outer_product_mean": (("msa",), reference.outer_product_mean),
    "tri_mul_out": (("pair",), reference.tri_mul_out),
    "tri_mul_in": (("pair",), reference.tri_mul_in),
    "tri_att_start": (("pair",), lambda p, *x: reference.tri_att_start(p, *x, heads=HEADS_PAIR)),
    "tri_att_end": (("pair",), lambda p, *x: reference.tri_att_end(p, *x, heads=HEADS_PAIR)),
    "pair_transition": (("pair",), reference.pair_transition),
}

# Each has a weight and a bias, or with a dot the weight alone.
ATTENTION = words("linear_q. linear_k. linear_v. linear_g linear_o")
TRIANGLE_ATTENTION = [*ATTENTION, *words("layer_norm linear.")]
TRIANGLE_MULTIPLICATION = words("layer_norm_in layer_norm_out linear_a_p linear_a_g linear_b_p")
TRIANGLE_MULTIPLICATION += words("linear_b_g linear_g linear_z")
TRANSITION = words("layer_norm linear_1 linear_2")
BLOCK = {
    "msa_att_row": [*ATTENTION, *words("layer_norm_m layer_norm_z linear_z.")],
    "msa_att_col": [*ATTENTION, "layer_norm_m"],
    "msa_transition": TRANSITION,
    "outer_product_mean": [*TRANSITION, "linear_out"],
    "tri_mul_out": TRIANGLE_MULTIPLICATION,
    "tri_mul_in": TRIANGLE_MULTIPLICATION,
    "tri_att_start": TRIANGLE_ATTENTION,
    "tri_att_end": TRIANGLE_ATTENTION,
    "pair_transition": TRANSITION,
}
BLOCK_NAMES = {
    f"{module}.{layer.rstrip('.')}.{kind}"
    for module, layers in BLOCK.items()
    for layer in layers
    for kind in (("weight",) if layer.endswith(".") else ("weight", "bias"))
}

VERSIONS = [
    pytest.param("tiny_openfold_v1", [], id="v1"),
    *(p for p in ALL_SETTINGS if "openfold_v2" in p.id or p.id == "openfold_v3-all-on"),
]
every_version = pytest.mark.parametrize(("script", "argv"), VERSIONS)
# Triton's kernels run in Python: each operation of V3 is tested here, and all of its model
# against V1 in test_fusions.py.
every_quick_version = pytest.mark.parametrize(("script", "argv"), VERSIONS[:-1])
TYPES = {
    f"tiny_openfold_v{version}": torch.float64 if version < 3 else torch.float32
    for version in (1, 2, 3, 4)
}
LIMITS = {torch.float64: 1e-11, torch.float32: 1e-6}
both_versions = pytest.mark.parametrize("script", ["tiny_openfold_v1", "tiny_openfold_v2"])


def double_block(script: str, argv: list[str]) -> nn.Module:
    """The first block in float64 (V3's in float32), with weights that make every part matter."""
    block = build(script, *SIZES, *argv).blocks[0].to(TYPES[script])
    block.load_state_dict(random_state(block.state_dict()))
    return block


def representations(*names: str) -> list[Tensor]:
    """Random msa [B, S, N, c_m] and pair [B, N, N, c_z] in float64, as leaves."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"msa": (B, S, N, C_M), "pair": (B, N, N, C_Z)}
    double = {"generator": generator, "dtype": torch.float64}
    values = {name: torch.randn(shape, **double) for name, shape in shapes.items()}
    return [values[name].requires_grad_() for name in names]


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters under canonical names, as leaves of their own."""
    state = module.state_dict().items()
    return {name: value.detach().double().clone().requires_grad_() for name, value in state}


def backward_of_random_sum(*outputs: Tensor) -> None:
    """Differentiate a sum of the outputs in which each element has a weight of its own."""
    double = {"generator": torch.Generator().manual_seed(4), "dtype": torch.float64}
    sum((x * torch.randn(x.shape, **double)).sum() for x in outputs).backward()


@every_version
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_equals_its_equations_forward_and_backward(
    operation: str, script: str, argv: list[str]
):
    module = getattr(double_block(script, argv), operation)
    names, expected_operation = OPERATIONS[operation]
    inputs, expected_inputs = representations(*names), representations(*names)
    parameters = parameters_of(module)

    expected = expected_operation(parameters, *expected_inputs)
    found = module(*(x.to(TYPES[script]) for x in inputs))
    assert expected.std() > 0.01, "the comparison would be weak"
    assert relative_difference(found, expected) < LIMITS[TYPES[script]]

    backward_of_random_sum(expected)
    backward_of_random_sum(found)
    for name, value, wanted in zip(names, inputs, expected_inputs, strict=True):
        assert relative_difference(value.grad, wanted.grad) < 10 * LIMITS[TYPES[script]], name
    expected = {name: parameter.grad for name, parameter in parameters.items()}
    assert_same_gradients(gradients(module), expected, 100 * LIMITS[TYPES[script]])


@every_quick_version
def test_block_equals_its_equations_forward_and_backward(script: str, argv: list[str]):
    block = double_block(script, argv)
    inputs, expected_inputs = representations("msa", "pair"), representations("msa", "pair")
    parameters = parameters_of(block)

    expected = reference.evoformer_block(parameters, *expected_inputs, HEADS_MSA, HEADS_PAIR)
    found = block(*(x.to(TYPES[script]) for x in inputs))
    assert [x.shape for x in found] == [(B, S, N, C_M), (B, N, N, C_Z)]
    for value, wanted in zip(found, expected, strict=True):
        assert relative_difference(value, wanted) < LIMITS[TYPES[script]]

    backward_of_random_sum(*expected)
    backward_of_random_sum(*found)
    for value, wanted in zip(inputs, expected_inputs, strict=True):
        assert relative_difference(value.grad, wanted.grad) < 10 * LIMITS[TYPES[script]]
    expected = {name: parameter.grad for name, parameter in parameters.items()}
    assert_same_gradients(gradients(block), expected, 100 * LIMITS[TYPES[script]])


@every_version
def test_block_has_the_parameter_names_of_openfold(script: str, argv: list[str]):
    block = build(script, *SIZES, *argv).blocks[0]
    assert type(block).__name__ == "EvoformerBlock"
    assert set(block.state_dict()) == BLOCK_NAMES


def test_outer_product_mean_divides_what_linear_out_makes_of_the_sum():
    """The same sequence ten times: ten times the product, one bias, and all of it over 10.001 in
    place of 1.001."""
    module = double_block("tiny_openfold_v1", []).outer_product_mean
    msa = representations("msa")[0][:, :1]
    once, often = (module(msa.expand(B, count, N, C_M)) * (count + 1e-3) for count in (1, 10))
    bias = module.linear_out.bias
    assert relative_difference(often - bias, 10 * (once - bias)) < 1e-12


# Heads and losses


def batch_with_gaps(script: str, *argv: str) -> dict[str, Tensor]:
    """A batch in which some residues are not observed."""
    batch = batches(script, *SIZES, *argv).next_batch()
    batch["observed"] = batch["observed"].clone()
    batch["observed"][0, 2] = batch["observed"][0, 4] = batch["observed"][1, 5] = False
    return batch


def with_random_weights(script: str, *argv: str) -> nn.Module:
    model = build(script, *SIZES, *argv)
    model.load_state_dict(random_state(model.state_dict()))
    return model


def reference_losses(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[float, float]:
    """(distogram, masked MSA) of the model's outputs, in float64."""
    valid = batch["observed"][:, :, None] & batch["observed"][:, None, :]
    distogram = reference.distogram_loss(outputs["distogram"].double(), batch["coords"], valid)
    logits = outputs["masked_msa"].double()
    masked = reference.masked_msa_loss(logits, batch["true_tokens"], batch["masked"])
    return float(distogram), float(masked)


@every_quick_version
def test_loss_is_the_weighted_sum_of_distogram_and_masked_msa(script: str, argv: list[str]):
    model, batch = with_random_weights(script, *argv), batch_with_gaps(script, *argv)
    with torch.no_grad():
        outputs, loss = model(batch["tokens"]), model(**batch)
    assert outputs["masked_msa"].shape == (B, S, N, 23)
    assert outputs["distogram"].shape == (B, N, N, 64)
    distogram, masked = reference_losses(outputs, batch)
    assert distogram > 0.5
    assert masked > 0.5
    assert loss.shape == ()
    assert loss.item() == pytest.approx(0.3 * distogram + 2.0 * masked, rel=1e-5)


@both_versions
@pytest.mark.parametrize("silent", ["distogram", "masked_msa"])
def test_each_loss_alone(script: str, silent: str):
    """A head whose weights are zero guesses evenly, so its loss is the logarithm of its classes."""
    model, batch = with_random_weights(script), batch_with_gaps(script)
    zero = {n: 0 * v for n, v in model.state_dict().items() if n.startswith(silent + ".")}
    model.load_state_dict(model.state_dict() | zero)
    with torch.no_grad():
        distogram, masked = reference_losses(model(batch["tokens"]), batch)
        loss = model(**batch).item()
    found, classes = (distogram, 64) if silent == "distogram" else (masked, 23)
    assert found == pytest.approx(math.log(classes))
    assert loss == pytest.approx(0.3 * distogram + 2.0 * masked, rel=1e-5)


@both_versions
def test_distances_fall_into_64_equal_bins_from_2_to_22_angstrom(script: str):
    """Two residues at one distance, just inside each bin's two ends, beyond the last one and at
    nearly zero."""
    model = build(script, *SIZES, "--seq-len", "2")
    model.load_state_dict(random_state(model.state_dict()))
    width = 20 / 64
    ends = [(2 + width * k + sign * 0.002, k) for k in range(64) for sign in (1, -1)]
    cases = {distance: k if distance > 2 + width * k else max(0, k - 1) for distance, k in ends}
    cases |= {0.1: 0, 21.9: 63, 22.5: 63, 300.0: 63}

    batch = batches(script, *SIZES, "--seq-len", "2").next_batch()
    one = {name: value[:1] for name, value in batch.items()}
    with torch.no_grad():
        outputs = model(one["tokens"])
        logp = outputs["distogram"].double().log_softmax(-1)[0]
        logits = outputs["masked_msa"].double()
        masked = reference.masked_msa_loss(logits, one["true_tokens"], one["masked"])
        for distance, wanted in cases.items():
            one["coords"] = torch.tensor([[[1.0, 2.0, 3.0], [1.0, 2.0 + distance, 3.0]]])
            bins = torch.tensor([[0, wanted], [wanted, 0]])
            expected = -logp.gather(-1, bins[..., None]).mean()
            loss = float(0.3 * expected + 2 * masked)
            assert model(**one).item() == pytest.approx(loss, rel=1e-5), distance
            assert torch.equal(reference.distogram_targets(one["coords"])[0], bins), distance


@both_versions
def test_residues_that_are_not_observed_do_not_count(script: str):
    model, batch = with_random_weights(script), batch_with_gaps(script)
    moved = batch["coords"].clone()
    moved[~batch["observed"]] += 7.0
    with torch.no_grad():
        loss = model(**batch).item()
        assert model(**{**batch, "coords": moved}).item() == loss
        moved[batch["observed"]] *= 1.5
        assert model(**{**batch, "coords": moved}).item() != loss, "those that are observed must"


@both_versions
def test_only_masked_positions_count_in_the_msa_loss(script: str):
    model, batch = with_random_weights(script), batch_with_gaps(script)
    other = (batch["true_tokens"] + 1) % 20
    with torch.no_grad():
        loss = model(**batch).item()
        outside = torch.where(batch["masked"], batch["true_tokens"], other)
        assert model(**{**batch, "true_tokens": outside}).item() == loss
        inside = torch.where(batch["masked"], other, batch["true_tokens"])
        assert model(**{**batch, "true_tokens": inside}).item() != loss


@every_quick_version
def test_distogram_is_symmetric(script: str, argv: list[str]):
    model = with_random_weights(script, *argv)
    with torch.no_grad():
        logits = model(batches(script, *SIZES).next_batch()["tokens"])["distogram"]
    assert logits.std() > 0.1
    assert torch.equal(logits, logits.transpose(1, 2))


# Input


@both_versions
def test_relative_positions_are_clipped_at_32(script: str):
    """With one amino acid everywhere, the first pair representation depends on the clipped
    offset i - j alone."""
    model = with_random_weights(script, "--seq-len", "80")
    with torch.no_grad():
        _, pair = model.input_embedder(torch.zeros(1, 2, 80, dtype=torch.long))
    pair = pair[0]
    offsets = torch.arange(80)[:, None] - torch.arange(80)
    distinct = []
    for offset in range(-32, 33):
        same = pair[offsets.clamp(-32, 32) == offset]
        assert torch.allclose(same, same[:1].expand_as(same), atol=1e-5), offset
        distinct.append(same[0])
    distances = torch.cdist(torch.stack(distinct), torch.stack(distinct)) + torch.eye(65)
    assert distances.min() > 1e-2, "the 65 offsets must be told apart"
    weight = model.state_dict()["input_embedder.linear_relpos.weight"]
    assert weight.shape == (C_Z, 65)
    assert torch.allclose(pair[5, 2] - pair[0, 40], weight[:, 3 + 32] - weight[:, 0], atol=1e-5)


@both_versions
def test_order_of_the_homologs_does_not_matter(script: str):
    """The alignment is a set below its first row: other orders permute the MSA output and leave
    the pairs alone."""
    model, tokens = with_random_weights(script), batches(script, *SIZES).next_batch()["tokens"]
    order = [0, 3, 1, 4, 2]
    with torch.no_grad():
        first, second = model(tokens), model(tokens[:, order])
    assert relative_difference(second["masked_msa"], first["masked_msa"][:, order]) < 1e-4
    assert relative_difference(second["distogram"], first["distogram"]) < 1e-4


@both_versions
def test_loss_on_synthetic_proteins_falls(script: str, tmp_path):
    argv = words("--num-steps 50 --warmup-steps 0 --learning-rate 2e-3 --under-profiler")
    curve = run_main(script, tmp_path, *argv, "--batch-size", "4").summary["loss"]["curve"]
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


V4 = pytest.param("tiny_openfold_v4", words("--msa-dim 16 --num-heads-msa 2"), id="openfold_v4")


@pytest.mark.parametrize(("script", "argv"), [*VERSIONS, V4])
def test_padding_changes_neither_loss_nor_outputs_nor_gradients(script: str, argv: list[str]):
    quick = ["--batch-size", "1"] if script[-1] in "34" else []
    batch = batches(script, *SIZES, *quick).next_batch()
    sides = []
    for inputs in (batch, padded(batch, S + 2, N + 3)):
        model = with_random_weights(script, *argv, *quick).to(TYPES[script])
        inputs = {n: x.to(TYPES[script]) if x.is_floating_point() else x for n, x in inputs.items()}
        double = TYPES[script] == torch.float64
        with InFloat64() if double else contextlib.nullcontext():
            loss = model(**inputs)
            with torch.no_grad():
                outputs = model(**{n: x for n, x in inputs.items() if n not in model.TARGETS})
        loss.backward()
        sides.append((outputs, loss, gradients(model)))
    (expected, loss, wanted), (found, again, same) = sides
    limit = 100 * LIMITS[TYPES[script]]
    assert relative_difference(again, loss) < limit
    assert relative_difference(found["masked_msa"][:, :S, :N], expected["masked_msa"]) < limit
    assert relative_difference(found["distogram"][:, :N, :N], expected["distogram"]) < limit
    assert_same_gradients(same, wanted, limit)


# Activation checkpointing

ONE_BY_ONE = [
    pytest.param(
        script,
        argv,
        id=f"{script[-2:]}{''.join(argv)}",
        marks=[pytest.mark.slow] if script in TRITON and not argv else [],
    )
    for script in TYPES
    for argv in ([], ["--use-amp"])
]
TWO_BLOCKS = words("--num-blocks 2 --num-seqs 2 --seq-len 5 --batch-size 1")


def trained(
    model: nn.Module, batch: dict[str, Tensor], amp: bool
) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """Loss and gradients of a training step, and which blocks ran in it."""
    order = []
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: order.append(number))
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = model(**batch)
    loss.backward()
    return loss.detach(), gradients(model), order


@pytest.mark.parametrize(("script", "argv"), ONE_BY_ONE)
def test_checkpointed_blocks_run_again_one_by_one_and_change_no_bit(script: str, argv: list[str]):
    batch = batches(script, *TWO_BLOCKS).next_batch()
    sides = (build(script, *TWO_BLOCKS, *argv, *more) for more in ([], ["--checkpoint-blocks"]))
    results = [trained(model, batch, bool(argv)) for model in sides]
    (loss, expected, once), (again, found, twice) = results
    assert (once, twice) == ([0, 1], [0, 1, 1, 0])
    assert torch.equal(again, loss)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_a_report_says_that_blocks_are_checkpointed_and_counts_the_model_without_it(run):
    steps = ["--num-steps", "1", "--warmup-steps", "0"]
    plain, checkpointed = (
        run("tiny_openfold_v2", *steps, *more) for more in ([], ["--checkpoint-blocks"])
    )
    assert "checkpoint_blocks" not in plain.stdout
    assert ", checkpoint_blocks True;" in checkpointed.stdout.splitlines()[0]
    configs = plain.summary["config"], checkpointed.summary["config"]
    assert [config["checkpoint_blocks"] for config in configs] == [False, True]
    assert checkpointed.summary["flops"]["per_step"] == plain.summary["flops"]["per_step"]
    assert checkpointed.summary["kernels"]["per_step"] > plain.summary["kernels"]["per_step"]

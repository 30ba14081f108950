"""--verify-accuracy passes what rounding explains, and no wrong gradient, however small a part
of all it is."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import MODELS, SCRIPT, TRITON, build, faults_that_pass, load, parse, words

from lab import accuracy

OF_V2 = [f"tiny_{model}_v2" for model in MODELS]
both_precisions = pytest.mark.parametrize("argv", [[], ["--use-amp"]], ids=["float32", "bfloat16"])


@both_precisions
@pytest.mark.parametrize("script", [*OF_V2, *TRITON])
def test_no_wrong_gradient_passes(script: str, argv: list[str]):
    """Of every parameter, set to zero, negated, or larger by 0.3: on a GPU test_gpu.py asks the
    same of real sizes."""
    passed, judged = faults_that_pass(load(script), parse(script, *argv))
    assert passed == []
    # softmax takes layer_norm_z.bias out: in theory its gradient is zero
    assert judged == len(build(script).state_dict()) - ("openfold" in script)


FEW = "--seq-len 4 --batch-size 1 --msa-dim 64 --pair-dim 128 --num-heads-msa 4"


@pytest.mark.parametrize(
    "argv",
    [
        "--num-seqs 1",  # queries and keys of columns have a gradient of zero in theory
        f"{FEW} --num-seqs 1 --use-amp --num-blocks 2 --seed 892",
        f"{FEW} --num-seqs 2 --use-amp --amp-dtype float16 --num-blocks 2 --seed 758",
    ],
)
def test_in_a_small_model_rounding_is_not_blamed_and_a_zero_is_noticed(argv: str):
    """A few numbers: how much rounding changes a gradient is chance."""
    module = load("tiny_openfold_v2")
    args = parse("tiny_openfold_v2", *words(argv))
    assert all(error <= limit for error, limit in accuracy.judged_values(module, args).values())
    assert faults_that_pass(module, args, (0.0, -1.0))[0] == []


@pytest.mark.parametrize("argv", [[], ["--disable-all-fusion"]], ids=["all-on", "all-off"])
def test_verify_accuracy_in_bfloat16_does_not_blame_rounding(argv: list[str], run):
    """At real widths small gradients are mostly rounding.

    With everything off there is nothing else to blame.
    """
    widths = words("--batch-size 1 --seq-len 64 --num-seqs 16 --msa-dim 64 --pair-dim 128")
    result = run("tiny_openfold_v2", "--verify-accuracy", "--use-amp", *widths, *argv)
    assert (result.status, result.stdout[-21:]) == (0, "Accuracy check: PASS\n"), result.stdout
    errors = re.findall(r"relative error \S+, limit", result.stdout)
    assert len(errors) == 4, "two outputs, loss and the worst gradient"


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


def test_a_missing_gradient_is_wrong_also_where_it_is_zero_in_theory(run, monkeypatch):
    module, name = load("tiny_openfold_v2"), "blocks.0.msa_att_row.layer_norm_z.bias"
    build_model = module.build_model

    def broken(args, device):
        model = build_model(args, device)
        model.get_parameter(name).requires_grad_(not args.flash_attention)
        return model

    monkeypatch.setattr(module, "build_model", broken)
    result = run("tiny_openfold_v2", "--verify-accuracy")
    assert (result.status, f"gradient of {name} (" in result.stdout) == (1, True)


@pytest.mark.parametrize("error", ["output", "gradient", "no gradient", "nan"])
def test_verify_accuracy_fails_when_an_operation_is_wrong(error: str, run, monkeypatch):
    attention = torch.nn.functional.scaled_dot_product_attention

    def wrong(*args: torch.Tensor, **options: object) -> torch.Tensor:
        if error == "no gradient":
            return attention(*(x.detach() for x in args), **options)
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

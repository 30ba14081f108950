"""Fusions change how a model is computed and nothing else; their flags mean what the help says."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import (
    ALL_SETTINGS,
    CPU,
    MODELS,
    QUICK,
    SCRIPTS,
    TINY,
    assert_one_error,
    assert_same_gradients,
    batches,
    build,
    gradients,
    load,
    model_of,
    parse,
    random_state,
    relative_difference,
    run_main,
)

every_setting = pytest.mark.parametrize(("script", "argv"), ALL_SETTINGS)
every_script = pytest.mark.parametrize("script", SCRIPTS)
FLAGS = [
    pytest.param(f"tiny_{model}_v2", flag, attribute, id=f"{model}-{flag}")
    for model in MODELS
    for flag, attribute, _ in load(f"tiny_{model}_v2").FUSIONS
]
every_flag = pytest.mark.parametrize(("script", "flag", "attribute"), FLAGS)
TWENTY_STEPS = ["--num-steps", "20", "--warmup-steps", "0", "--under-profiler", "--learning-rate", "1e-3"]


def baseline(script: str) -> str:
    """The V1 script of the same model."""
    return f"tiny_{model_of(script)}_v1"


def fusions_of(script: str, *argv: str) -> dict[str, bool]:
    """Which fusions these arguments switch on."""
    args = load(script).parse_args([*TINY[model_of(script)], *argv])
    return {flag: getattr(args, attribute) for flag, attribute, _ in load(script).FUSIONS}


def all_of(script: str, state: bool, **changes: bool) -> dict[str, bool]:
    return {flag: state for flag, _, _ in load(script).FUSIONS} | {n.replace("_", "-"): v for n, v in changes.items()}


@functools.cache
def curve(script: str, *argv: str) -> list[float]:
    """The loss curve that train() returns."""
    with tempfile.TemporaryDirectory() as directory:
        result = load(script).train(parse(script, *argv, "--profile-dir", directory))
    assert result["status"] == "ok"
    return result["loss"]["curve"]


# The model


@every_setting
def test_initial_weights_are_those_of_v1(script: str, argv: list[str]):
    expected, found = build(baseline(script)).state_dict(), build(script, *argv).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    other = build(script, *argv, "--seed", "7").state_dict()
    assert any(not torch.equal(other[name], value) for name, value in expected.items()), "the seed must matter"


@every_setting
def test_outputs_loss_and_gradients_are_those_of_v1(script: str, argv: list[str]):
    first, second = build(baseline(script)), build(script, *argv)
    weights = random_state(first.state_dict())
    first.load_state_dict(weights)
    second.load_state_dict(weights)
    batch = batches(script).next_batch()
    inputs = {name: value for name, value in batch.items() if name in ("input_ids", "tokens")}
    with torch.no_grad():
        expected, found = first(**inputs), second(**inputs)
    if model_of(script) == "llama":
        expected, found = {"logits": expected}, {"logits": found}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.std() > 0.1, "the comparison would be weak"
        assert relative_difference(found[name], value) < 1e-4, name

    expected, found = first(**batch), second(**batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    found.backward()
    assert_same_gradients(gradients(second), gradients(first), 1e-4)


@every_setting
def test_weights_load_both_ways(script: str, argv: list[str]):
    weights = random_state(build(baseline(script)).state_dict())
    fused, separate = build(script, *argv), build(baseline(script))
    fused.load_state_dict(weights, strict=True)
    saved = fused.state_dict()
    separate.load_state_dict(saved, strict=True)
    for name, value in weights.items():
        assert torch.equal(saved[name], value), name
        assert torch.equal(separate.state_dict()[name], value), name


@every_setting
def test_saved_file_loads_into_v1(script: str, argv: list[str], tmp_path: Path):
    model = build(script, *argv, "--seed", "7")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = build(baseline(script))
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    batch = batches(script).next_batch()
    with torch.no_grad():
        assert other(**batch).item() == pytest.approx(model(**batch).item(), rel=1e-5)


@every_setting
def test_a_missing_weight_is_reported(script: str, argv: list[str]):
    names = {
        "llama": ("embed_tokens.weight", "layers.1.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight"),
        "openfold": ("blocks.0.msa_att_row.linear_k.weight", "blocks.0.tri_mul_in.linear_b_g.bias"),
    }
    for name in names[model_of(script)]:
        weights = build(baseline(script)).state_dict()
        del weights[name]
        with pytest.raises(RuntimeError, match="Missing key") as error:
            build(script, *argv).load_state_dict(weights)
        assert name.rsplit(".", 2)[0] in str(error.value), "the message must name the module"


@every_setting
def test_an_unknown_weight_is_reported(script: str, argv: list[str]):
    weights = build(baseline(script)).state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*surplus\.weight"):
        build(script, *argv).load_state_dict({**weights, "surplus.weight": torch.zeros(1)})


def assert_every_gradient(script: str, argv: list[str]) -> None:
    model = build(script, *argv)
    model.load_state_dict(random_state(model.state_dict()))
    model(**batches(script).next_batch()).backward()
    for name, gradient in gradients(model).items():  # which asserts that there is one
        assert gradient.isfinite().all(), name
        if "msa_att_row.layer_norm_z.bias" not in name:  # zero: a softmax does not notice a shift of its arguments
            assert gradient.abs().max() > 0, name


@every_setting
def test_every_parameter_gets_a_gradient(script: str, argv: list[str]):
    assert_every_gradient(script, argv)


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_openfold_v1"])
def test_every_parameter_of_v1_gets_a_gradient(script: str):
    assert_every_gradient(script, [])


@every_setting
def test_every_single_part_of_a_fused_weight_gets_a_gradient_from_the_initial_weights(script: str, argv: list[str]):
    model = build(script, *argv)
    model(**batches(script).next_batch()).backward()
    zero = [name for name, gradient in gradients(model).items() if not gradient.abs().max() > 0]
    assert [name for name in zero if "layer_norm_z.bias" not in name] == []


@every_setting
def test_loss_curve_is_that_of_v1(script: str, argv: list[str]):
    expected, found = curve(baseline(script), *TWENTY_STEPS), curve(script, *TWENTY_STEPS, *argv)
    assert len(found) == 20
    assert expected[-1] < expected[0], "it must be training"
    assert found == pytest.approx(expected, rel=1e-3)


@every_script
def test_a_run_repeats_itself(script: str):
    first = curve(script, *TWENTY_STEPS)
    again = curve.__wrapped__(script, *TWENTY_STEPS)
    assert again == pytest.approx(first, rel=1e-6)
    assert curve(script, *TWENTY_STEPS, "--seed", "7") != pytest.approx(first, rel=1e-3)


# Flags


@pytest.mark.parametrize("script", ["tiny_llama_v2", "tiny_openfold_v2"])
def test_fusions_are_on_and_torch_compile_is_off_by_default(script: str):
    assert fusions_of(script) == all_of(script, True)
    assert parse(script).torch_compile is False


@pytest.mark.parametrize("script", ["tiny_llama_v2", "tiny_openfold_v2"])
def test_presets_set_every_fusion(script: str):
    assert fusions_of(script, "--enable-all-fusion") == all_of(script, True)
    assert fusions_of(script, "--disable-all-fusion") == all_of(script, False)


@every_flag
def test_single_flags_win_over_presets_in_any_order(script: str, flag: str, attribute: str):
    for preset, single, others in (("disable", "enable", False), ("enable", "disable", True)):
        expected = all_of(script, others) | {flag: not others}
        for order in itertools.permutations((f"--{preset}-all-fusion", f"--{single}-{flag}")):
            assert fusions_of(script, *order) == expected
    assert fusions_of(script, f"--disable-{flag}") == all_of(script, True) | {flag: False}
    assert fusions_of(script, f"--enable-{flag}") == all_of(script, True)
    assert fusions_of(script, f"--disable-{flag}", f"--disable-{flag}") == all_of(script, True) | {flag: False}


@every_flag
def test_a_fusion_and_its_opposite_are_refused(script: str, flag: str, attribute: str, run):
    for order in itertools.permutations((f"--enable-{flag}", f"--disable-{flag}")):
        assert_one_error(run(script, *order), 2, f"--enable-{flag}", f"--disable-{flag}")


@pytest.mark.parametrize("script", ["tiny_llama_v2", "tiny_openfold_v2"])
def test_both_presets_are_refused(script: str, run):
    result = run(script, "--enable-all-fusion", "--disable-all-fusion")
    assert_one_error(result, 2, "--enable-all-fusion", "--disable-all-fusion")


@every_flag
def test_result_says_which_fusions_ran(script: str, flag: str, attribute: str, run):
    result = run(script, "--disable-all-fusion", f"--enable-{flag}", "--under-profiler", "--num-steps", "1")
    assert result.status == 0
    assert result.summary["fusions"] == {a: a == attribute for _, a, _ in load(script).FUSIONS}
    first_line = result.stdout.splitlines()[0]
    assert [f for f, _, _ in load(script).FUSIONS if f in first_line] == [flag]


@every_script
def test_torch_compile_and_its_opposite_are_refused(script: str, run):
    result = run(script, "--enable-torch-compile", "--disable-torch-compile")
    assert_one_error(result, 2, "--enable-torch-compile", "--disable-torch-compile")


@pytest.mark.parametrize("script", ["tiny_llama_v2", "tiny_openfold_v2"])
def test_presets_do_not_touch_torch_compile(script: str):
    assert parse(script, "--enable-all-fusion").torch_compile is False
    for order in itertools.permutations(("--enable-torch-compile", "--disable-all-fusion")):
        assert parse(script, *order).torch_compile is True
        assert fusions_of(script, *order) == all_of(script, False)
    assert parse(script, "--disable-torch-compile").torch_compile is False


@every_script
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_torch_compile_modes(script: str, mode: str, run):
    args = parse(script, "--enable-torch-compile", "--torch-compile-mode", mode)
    assert (args.torch_compile, args.torch_compile_mode) == (True, mode)
    assert_one_error(run(script, "--torch-compile-mode", mode), 2, "--torch-compile-mode", "--enable-torch-compile")


@every_script
def test_amp_dtype_without_use_amp_is_refused(script: str, run):
    assert parse(script, "--use-amp").amp_dtype == "bfloat16"
    assert parse(script, "--use-amp", "--amp-dtype", "float16").amp_dtype == "float16"
    assert_one_error(run(script, "--amp-dtype", "bfloat16"), 2, "--amp-dtype", "--use-amp")


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_openfold_v1"])
def test_v1_has_nothing_to_enable(script: str, run):
    assert load(script).FUSIONS == ()
    assert run(script, "--disable-all-fusion", "--under-profiler", *QUICK).status == 0
    assert_one_error(run(script, "--enable-all-fusion"), 2, "--enable-all-fusion")
    assert_one_error(run(script, "--compare-fusion"), 2, "--compare-fusion")
    assert_one_error(run(script, "--enable-flash-attention"), 2, "--enable-flash-attention")


# Mixed precision and torch.compile


@every_script
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_loss_falls_in_mixed_precision(script: str, dtype: str, tmp_path: Path):
    argv = ["--num-steps", "60", "--warmup-steps", "0", "--learning-rate", "3e-3", "--under-profiler"]
    result = run_main(script, tmp_path, *argv, "--use-amp", "--amp-dtype", dtype, "--batch-size", "4")
    assert result.status == 0, result.stderr
    assert result.summary["training"]["use_amp"] is True
    assert result.summary["training"]["amp_dtype"] == dtype
    losses = result.summary["loss"]["curve"]
    assert sum(losses[-5:]) / 5 < 0.9 * losses[0]


@every_setting
def test_mixed_precision_changes_the_loss_little(script: str, argv: list[str]):
    exact = curve(script, *TWENTY_STEPS, *argv)
    mixed = curve(script, *TWENTY_STEPS, *argv, "--use-amp")
    assert mixed == pytest.approx(exact, rel=0.05)
    assert mixed != exact, "bfloat16 must be used"


def test_use_amp_computes_in_the_chosen_type():
    """The logits of a model under autocast are of that type; the weights stay float32."""
    args = parse("tiny_llama_v2", "--use-amp")
    model = load("tiny_llama_v2").build_model(args, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(batches("tiny_llama_v2").next_batch()["input_ids"]).dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_compiling_uses_the_ptxas_of_pytorch_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Inductor's workers do; a process with another one compiles every candidate of max-autotune again."""
    script, model = load("tiny_llama_v2"), torch.nn.Linear(1, 1)
    script.compile_model(model, "default")  # imports what looks at torch.__file__
    ptxas = tmp_path / "torch" / "bin" / "ptxas"
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", "chosen")  # whatever it was, it is restored
    monkeypatch.delenv("TRITON_PTXAS_PATH")

    script.compile_model(model, "default")
    assert "TRITON_PTXAS_PATH" not in os.environ, "there is none to use"
    ptxas.parent.mkdir(parents=True)
    ptxas.touch()
    script.compile_model(model, "default")
    assert os.environ["TRITON_PTXAS_PATH"] == str(ptxas)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "chosen")
    script.compile_model(model, "default")
    assert os.environ["TRITON_PTXAS_PATH"] == "chosen"


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="torch.compile needs a C++ compiler")
def test_torch_compile_follows_the_same_loss_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    sizes = ["--num-layers", "1", "--hidden-dim", "32", "--num-heads", "2", "--seq-len", "16"]
    argv = [*sizes, "--num-steps", "10", "--warmup-steps", "2", "--learning-rate", "1e-3"]
    eager = run_main("tiny_llama_v2", tmp_path / "eager", *argv, "--under-profiler")
    compiled = run_main("tiny_llama_v2", tmp_path / "compiled", *argv, "--enable-torch-compile", "--under-profiler")
    torch._dynamo.reset()
    assert compiled.status == 0, compiled.stderr
    assert compiled.summary["training"]["torch_compile"] is True
    assert compiled.summary["loss"]["curve"] == pytest.approx(eager.summary["loss"]["curve"], rel=1e-3)
    overhead = compiled.summary["timing"]["compilation_overhead_ms"]
    assert f"Compilation overhead: {overhead:.1f} ms" in compiled.stdout
    assert "Compilation overhead: " not in eager.stdout
    assert "compilation_overhead_ms" not in eager.summary["timing"]

"""Fusions change how a model is computed and nothing else; their flags mean what the help says."""

import collections
import functools
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import (
    ALL_SETTINGS,
    MODELS,
    SCRIPT,
    SCRIPTS,
    SMALLEST,
    TRITON,
    assert_one_error,
    assert_same_gradients,
    batches,
    build,
    gradients,
    load,
    model_of,
    needs_compiler,
    parse,
    random_state,
    relative_difference,
    run_main,
    words,
)

every_setting = pytest.mark.parametrize(("script", "argv"), ALL_SETTINGS)
MIXTURES = [  # fusions that do without others
    pytest.param(
        f"tiny_{script}", [f"--disable-{flag}" for flag in words(off)], id=f"{script} {off}"
    )
    for script, off in (
        ("llama_v3", "qkv-fusion swiglu-fusion flash-attention"),
        ("llama_v3", "qkv-fusion triton-rotary"),
        ("llama_v3", "triton-attention"),
        ("llama_v4", "triton-attention"),
        ("openfold_v4", "fused-optimizer loss-fusion triton-attention"),
    )
]
# test_triton_steps.py has a step of V3 and V4 with all on
NO_STEP = [p for p in ALL_SETTINGS if p.values[0] not in TRITON or not p.id.endswith("all-on")]
OF_V2 = [f"tiny_{model}_v2" for model in MODELS]
both_models = pytest.mark.parametrize("script", OF_V2)
TWENTY_STEPS = words(
    "--num-steps 20 --warmup-steps 0 --under-profiler --learning-rate 1e-3 --batch-size 1"
)


def baseline(script: str) -> str:
    return f"{script[:-1]}1"


@functools.cache
def curve(script: str, *argv: str) -> list[float]:
    """The loss curve that train() returns."""
    with tempfile.TemporaryDirectory() as directory:
        result = load(script).train(parse(script, *argv, "--profile-dir", directory))
    assert result["status"] == "ok"
    return result["loss"]["curve"]


# The model


@pytest.mark.parametrize(("script", "argv"), [*NO_STEP, *MIXTURES])
def test_outputs_loss_and_every_gradient_are_those_of_v1(script: str, argv: list[str]):
    short = SMALLEST[model_of(script)] if script in TRITON else []
    first, second = build(baseline(script), *short), build(script, *short, *argv)
    weights = random_state(first.state_dict())
    first.load_state_dict(weights)
    second.load_state_dict(weights)
    batch = batches(script, *short).next_batch()
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
def test_weights_are_those_of_v1_and_load_both_ways(script: str, argv: list[str], tmp_path: Path):
    """The initial ones of a seed, and others from a file."""
    separate, fused = build(baseline(script)), build(script, *argv)
    expected, found = separate.state_dict(), fused.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    other = build(script, *argv, "--seed", "7").state_dict()
    same = [torch.equal(other[name], value) for name, value in expected.items()]
    assert not all(same), "the seed must matter"
    weights = random_state(expected)
    fused.load_state_dict(weights, strict=True)
    torch.save(fused.state_dict(), tmp_path / "weights.pt")
    separate.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)
    for name, value in weights.items():
        assert torch.equal(separate.state_dict()[name], value), name


NAMES = {  # of weights that fused ones are split into
    "llama": ("layers.1.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight"),
    "openfold": ("blocks.0.msa_att_row.linear_k.weight", "blocks.0.tri_mul_in.linear_b_g.bias"),
}


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script[-1] in "23"])
def test_a_missing_and_an_unknown_weight_are_reported(script: str):
    model = build(script)
    for name in NAMES[model_of(script)]:
        weights = build(baseline(script)).state_dict()
        with pytest.raises(RuntimeError, match=r"Unexpected key.*surplus\.weight"):
            model.load_state_dict({**weights, "surplus.weight": torch.zeros(1)})
        del weights[name]
        with pytest.raises(RuntimeError, match="Missing key") as error:
            model.load_state_dict(weights)
        assert name.rsplit(".", 2)[0] in str(error.value), "the message must name the module"


@pytest.mark.parametrize("script", [*OF_V2, "tiny_llama_v4"])
def test_loss_curve_is_that_of_v1(script: str):
    """V4's optimizer is of its own; Triton's kernels run in Python here."""
    short = [*SMALLEST["llama"], *words("--num-steps 4 --learning-rate 1e-2")]
    steps = [*TWENTY_STEPS, *(short if script in TRITON else [])]
    expected, found = curve(baseline(script), *steps), curve(script, *steps)
    assert len(found) == (4 if script in TRITON else 20)
    assert expected[-1] < expected[0], "it must be training"
    assert found == pytest.approx(expected, rel=1e-3)


@both_models
def test_mixed_precision_changes_the_loss_little(script: str):
    exact, mixed = curve(script, *TWENTY_STEPS), curve(script, *TWENTY_STEPS, "--use-amp")
    assert mixed == pytest.approx(exact, rel=0.05)
    assert mixed != exact, "bfloat16 must be used"


@both_models
def test_a_run_repeats_itself(script: str):
    first = curve(script, *TWENTY_STEPS)
    again = curve.__wrapped__(script, *TWENTY_STEPS)
    assert again == pytest.approx(first, rel=1e-6)
    argv = [*TWENTY_STEPS, "--deterministic"]
    assert curve(script, *argv) == curve.__wrapped__(script, *argv)
    assert torch.are_deterministic_algorithms_enabled()
    assert curve(script, *TWENTY_STEPS, "--seed", "7") != pytest.approx(first, rel=1e-3)
    module = load(script)
    drawn = [module.Trainer(parse(script, "--seed", n)).build().next_batch() for n in "67"]
    assert not all(torch.equal(*pair) for pair in zip(*(b.values() for b in drawn), strict=True))


# Flags

FLAGS = [flag for flag, _, _ in load(SCRIPT).FUSIONS]


def fusions_of(*argv: str) -> dict[str, bool]:
    """Which fusions these arguments switch on."""
    args = parse(SCRIPT, *argv)
    return {flag: getattr(args, attribute) for flag, attribute, _ in load(SCRIPT).FUSIONS}


def all_but(*flags: str, rest: bool = True) -> dict[str, bool]:
    return {flag: (flag not in flags) == rest for flag in FLAGS}


def test_presets_set_every_fusion_and_nothing_else_and_single_flags_win_in_any_order():
    assert fusions_of() == fusions_of("--enable-all-fusion") == all_but()
    assert parse(SCRIPT, "--enable-all-fusion").torch_compile is False
    for order in itertools.permutations(("--enable-torch-compile", "--disable-all-fusion")):
        assert parse(SCRIPT, *order).torch_compile is True
        assert fusions_of(*order) == all_but(rest=False)
    for flag in FLAGS:
        for order in itertools.permutations(("--disable-all-fusion", f"--enable-{flag}")):
            assert fusions_of(*order) == all_but(flag, rest=False)
        for order in itertools.permutations(("--enable-all-fusion", f"--disable-{flag}")):
            assert fusions_of(*order) == all_but(flag)
        assert fusions_of(f"--disable-{flag}") == all_but(flag)


@pytest.mark.parametrize("flag", [FLAGS[0], "all-fusion", "torch-compile", "cuda-graph"])
def test_a_flag_and_its_opposite_are_refused(flag: str, run):
    for order in itertools.permutations((f"--enable-{flag}", f"--disable-{flag}")):
        assert_one_error(run(SCRIPT, *order), 2, *order)


OFF = "--disable-all-fusion"


@pytest.mark.parametrize(
    ("script", "argv", "name", "why"),
    [
        ("tiny_llama_v3", "--disable-flash-attention", "flash_attention", "triton-attention"),
        ("tiny_llama_v4", f"{OFF} --enable-overlap", "overlap", "fused-optimizer"),
        ("tiny_openfold_v3", f"{OFF} --enable-cast-fusion", "cast_fusion", "--use-amp"),
    ],
)
def test_a_flag_without_effect_is_said_and_not_reported_as_in_effect(
    script: str, argv: str, name: str, why: str, run
):
    short = words("--num-steps 1 --warmup-steps 0 --under-profiler")
    result = run(script, *words(argv), *short, *SMALLEST[model_of(script)])
    assert result.status == 0
    notes = [line for line in result.stderr.splitlines() if "has no effect: " in line]
    assert len(notes) == 1, "of the flags that were given, not of those that are on by default"
    assert argv.split()[-1] in notes[0]
    assert why in notes[0].partition("has no effect: ")[2]
    assert why in result.summary["without_effect"][name]
    assert name.replace("_", "-") not in result.stdout.splitlines()[0].partition(";")[2]


@pytest.mark.parametrize("script", TRITON)
def test_no_effect_is_said_where_a_step_dispatches_the_same_operators(script: str, monkeypatch):
    """And only there, of V2's fusions; one of a kernel may change its arguments alone."""
    module = load(script)
    # what the kernels compute does not matter
    idle = collections.defaultdict(lambda: lambda *tensors, **sizes: None)
    monkeypatch.setattr(module, "wrap_triton", lambda kernel: idle)

    def operators_and_weights(*argv: str) -> tuple[int, int]:
        args = parse(script, *SMALLEST[model_of(script)], *argv)
        trainer = module.Trainer(args).build()
        trainer.step()
        with module.OperatorCounter() as counter:
            trainer.compute(trainer.next_batch())
        return counter.calls, len(list(trainer.model.parameters()))

    of_v2 = {flag for flag, _, _ in load(f"tiny_{model_of(script)}_v2").FUSIONS}
    for preset, change in (([], "disable"), ([OFF], "enable")):
        before, said = operators_and_weights(*preset), parse(script, *preset).without_effect
        for flag, name, _ in module.FUSIONS:
            if flag in of_v2 or name in said:
                same = operators_and_weights(*preset, f"--{change}-{flag}") == before
                assert same == (name in said), f"does --{change}-{flag} change anything?"


# Mixed precision and torch.compile


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler])]
)
def test_torch_compile_follows_the_same_loss_curve(backend: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    compile_with, calls = torch.compile, []

    def compile_counted(model: torch.nn.Module, mode: str | None):
        compiled = compile_with(model, backend=backend)
        return lambda **batch: calls.append(mode) or compiled(**batch)

    monkeypatch.setattr(torch, "compile", compile_counted)
    sizes = ["--num-layers", "1", "--hidden-dim", "32", "--num-heads", "2", "--seq-len", "16"]
    argv = [*sizes, "--num-steps", "10", "--warmup-steps", "2", "--learning-rate", "1e-3"]
    eager = run_main(SCRIPT, tmp_path / "eager", *argv, "--under-profiler")
    assert calls == []
    mode = ["--torch-compile-mode", "max-autotune-no-cudagraphs"]
    compiled = run_main(SCRIPT, tmp_path / "compiled", *argv, "--enable-torch-compile", *mode)
    torch.compiler.reset()
    assert compiled.status == 0, compiled.stderr
    assert calls[:12] == 12 * [mode[1]], "what is compiled is what trains"
    expected = eager.summary["loss"]["curve"]
    assert compiled.summary["loss"]["curve"] == pytest.approx(expected, rel=1e-3)
    overhead = compiled.summary["timing"]["compilation_overhead_ms"]
    assert f"Compilation overhead: {overhead:.1f} ms" in compiled.stdout
    assert "compiling in the first step\n" in compiled.progress, "what takes long is announced"
    assert "Compilation overhead" not in eager.stdout and "ompil" not in eager.progress
    assert "Kernel" not in compiled.stdout, "on a CPU the compiled loops are no operators"

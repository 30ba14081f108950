"""The report's lines, the result file, the modes and the files that profiling leaves."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import (
    MODELS,
    QUICK,
    ROOT,
    SCRIPTS,
    TINY,
    Run,
    assert_one_error,
    build,
    load,
    model_of,
    parse,
    run_main,
    strict_json,
    words,
)

every_script = pytest.mark.parametrize("script", SCRIPTS)
V2 = tuple(script for script in SCRIPTS if script.endswith("v2"))
every_v2 = pytest.mark.parametrize("script", V2)
STEPS, WARMUP = 6, 2
NUMBER = r"(-?\d+(?:\.\d+)?)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One run of each script that nothing else is asked of."""
    steps = ["--num-steps", str(STEPS), "--warmup-steps", str(WARMUP), "--log-interval", "2"]
    return {script: run_main(script, tmp_path_factory.mktemp(script), *steps) for script in SCRIPTS}


def numbers(text: str, pattern: str) -> list[float]:
    """The numbers in the one line of the text that matches the whole pattern."""
    found = [match for line in text.splitlines() if (match := re.fullmatch(pattern, line))]
    assert len(found) == 1, f"{pattern!r} matches {len(found)} lines of\n{text}"
    return [float(group) for group in found[0].groups()]


# Lines that other people search for


@every_script
def test_speed_and_times(script: str, runs: dict[str, Run]):
    status, text, _, summary = runs[script]
    timing = summary["timing"]
    assert status == 0
    assert numbers(text, rf"Average training speed: {NUMBER} samples/sec") == [
        pytest.approx(timing["samples_per_sec"], abs=0.051)
    ]
    assert numbers(text, rf"Average batch time: {NUMBER} ms \(median {NUMBER}, p95 {NUMBER}\)") == [
        pytest.approx(timing[f"batch_{name}ms"], abs=0.051) for name in ("", "median_", "p95_")
    ]
    for phase in ("forward", "backward", "optimizer"):
        assert numbers(text, rf"Average {phase} time: {NUMBER} ms") == [pytest.approx(timing[f"{phase}_ms"], abs=0.051)]
    assert numbers(text, rf"Warmup step time: {NUMBER} ms \(first step, includes compilation\)") == [
        pytest.approx(timing["warmup_first_step_ms"], abs=0.051)
    ]


@every_script
def test_loss_memory_kernels_and_flops(script: str, runs: dict[str, Run]):
    _, text, _, summary = runs[script]
    assert numbers(text, rf"Final loss: {NUMBER}(?: .*)?") == [pytest.approx(summary["loss"]["final"], abs=6e-5)]
    assert numbers(text, rf"Peak memory usage: {NUMBER} MB") == [pytest.approx(summary["memory"]["peak_mb"], abs=0.051)]
    kernels, flops = summary["kernels"], summary["flops"]
    assert numbers(text, r"Kernels per step: (\d+) \(all fusions off: (\d+)\).*operator calls.*") == [
        kernels["per_step"],
        kernels["all_off"],
    ]
    assert numbers(text, rf"Kernel reduction: {NUMBER} %") == [pytest.approx(kernels["reduction_percent"], abs=0.051)]
    assert re.search(r"^FLOPs per step: .*\d.* TFLOP/s$", text, re.MULTILINE)
    assert flops["achieved_tflops"] == pytest.approx(flops["per_step"] / summary["timing"]["batch_ms"] / 1e9)


@every_script
def test_progress_shows_the_loss_of_warmup_and_measured_steps(script: str, runs: dict[str, Run]):
    _, text, _, summary = runs[script]
    shown = re.findall(rf"^(warm-up step|step) (\d+)/(\d+) +loss {NUMBER}$", text, re.MULTILINE)
    expected = [("warm-up step", 2, WARMUP), ("step", 2, STEPS), ("step", 4, STEPS), ("step", 6, STEPS)]
    assert [(kind, int(step), int(of)) for kind, step, of, _ in shown] == expected
    losses = [summary["loss"]["curve"][i] for i in (1, 3, 5, 7)]
    assert [float(loss) for *_, loss in shown] == pytest.approx(losses, abs=6e-5)


@every_script
def test_numbers_agree_with_each_other(script: str, runs: dict[str, Run]):
    summary = runs[script].summary
    timing, loss, kernels = summary["timing"], summary["loss"], summary["kernels"]
    assert timing["steps"] == STEPS
    assert timing["samples_per_sec"] == pytest.approx(2 * STEPS / timing["wall_s"])
    assert timing["batch_ms"] * STEPS == pytest.approx(1e3 * timing["wall_s"])
    assert timing["batch_median_ms"] <= timing["batch_p95_ms"]
    phases = [timing[f"{phase}_ms"] for phase in ("data", "forward", "backward", "optimizer")]
    assert min(phases) > 0
    assert sum(phases) <= timing["batch_ms"] * 1.001, "phases are parts of the whole loop"
    assert loss["warmup_steps"] == WARMUP
    assert len(loss["curve"]) == WARMUP + STEPS
    assert (loss["initial"], loss["final"]) == (loss["curve"][0], loss["curve"][-1])
    assert kernels["reduction_percent"] == pytest.approx(100 * (1 - kernels["per_step"] / kernels["all_off"]))


@pytest.mark.parametrize("model", MODELS)
def test_fusions_need_fewer_operator_calls(model: str, runs: dict[str, Run]):
    v1, v2 = (runs[f"tiny_{model}_v{version}"].summary["kernels"] for version in (1, 2))
    assert v1["unit"] == v2["unit"] == "operator calls"
    assert v1["per_step"] == v1["all_off"]
    assert v1["reduction_percent"] == 0
    assert v2["per_step"] < 0.9 * v2["all_off"]
    assert v2["all_off"] == pytest.approx(v1["per_step"], rel=0.02), "V2 with everything off is V1"


@every_v2
def test_all_off_is_its_own_baseline(script: str, run):
    summary = run(script, "--disable-all-fusion", *QUICK).summary
    assert summary["kernels"]["per_step"] == summary["kernels"]["all_off"]
    assert summary["kernels"]["reduction_percent"] == 0


@every_script
def test_more_layers_need_more_operator_calls(script: str, runs: dict[str, Run], run):
    flag, layers = ("--num-layers", 2) if model_of(script) == "llama" else ("--num-blocks", 1)
    calls = [runs[script].summary["kernels"]["per_step"]]
    calls += [run(script, *QUICK, flag, str(layers + i)).summary["kernels"]["per_step"] for i in (1, 2)]
    assert calls[2] - calls[1] == pytest.approx(calls[1] - calls[0], rel=0.05)
    assert calls[1] > calls[0] * 1.2


def llama_flops(batch: int, seq: int, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int) -> int:
    """Forward and backward of every matrix product: 2 m n k each, and twice that for the gradients of its factors."""
    tokens, head = batch * seq, hidden // heads
    projections = 2 * tokens * hidden * (2 * hidden + 2 * kv_heads * head)  # q and o; k and v
    attention = 2 * (2 * batch * heads * seq * seq * head)  # scores, and their product with the values
    return 3 * (layers * (projections + attention + 3 * 2 * tokens * hidden * mlp) + 2 * tokens * hidden * vocab)


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_llama_v2"])
def test_flops_of_llama_are_those_of_its_matrix_products(script: str, runs: dict[str, Run], run):
    assert runs[script].summary["flops"]["per_step"] == llama_flops(2, 32, 64, 2, 4, 2, 256, 100)
    other = words("--batch-size 3 --seq-len 20 --hidden-dim 48 --num-layers 1 --num-heads 6 --num-kv-heads 3")
    summary = run(script, *QUICK, *other, "--intermediate-dim", "80", "--vocab-size", "50").summary
    assert summary["flops"]["per_step"] == llama_flops(3, 20, 48, 1, 6, 3, 80, 50)


def openfold_flops(batch: int, seqs: int, length: int, msa: int, pair: int, heads: int, outer: int, blocks: int) -> int:
    """The same for the Evoformer; both attentions have `heads`. The input features need no gradient."""
    positions, pairs = batch * seqs * length, batch * length * length

    def attention(rows: int, other: int, dim: int) -> int:
        return 2 * rows * dim * 5 * dim + 2 * (2 * rows * other * dim)  # q, k, v, g, o; scores and values

    block = attention(positions, length, msa) + 2 * pairs * pair * heads  # rows, with the pair bias
    block += attention(positions, seqs, msa)  # columns
    block += 2 * positions * msa * 8 * msa  # MSA transition
    block += 2 * (2 * positions * msa * outer)  # outer product mean: both factors, the product, the projection
    block += 2 * pairs * seqs * outer * outer + 2 * pairs * outer * outer * pair
    block += 2 * (2 * pairs * 6 * pair * pair + 2 * pairs * length * pair)  # triangle multiplications
    block += 2 * (attention(pairs, length, pair) + 2 * pairs * pair * heads)  # triangle attentions
    block += 2 * pairs * pair * 8 * pair  # pair transition
    heads_out = 2 * pairs * pair * 64 + 2 * positions * msa * 23
    query = batch * length
    embedder = 2 * 23 * (2 * query * pair + query * msa + positions * msa) + 2 * length * length * 65 * pair
    return 3 * (blocks * block + heads_out) + 2 * embedder  # only the weights of the embedder need gradients


@pytest.mark.parametrize("script", ["tiny_openfold_v1", "tiny_openfold_v2"])
def test_flops_of_openfold_are_those_of_its_matrix_products(script: str, runs: dict[str, Run]):
    outer = build(script).config.outer_product_dim
    expected = openfold_flops(2, 4, 16, 32, 32, 4, outer, 1)
    assert runs[script].summary["flops"]["per_step"] == expected


@every_script
def test_peak_memory_covers_weights_and_grows_with_the_sequence(script: str, runs: dict[str, Run], run):
    peak = 1e6 * runs[script].summary["memory"]["peak_mb"]
    parameters = sum(p.nbytes for p in build(script).parameters())
    assert peak > 3 * parameters, "AdamW keeps two more values for each weight"
    length = 2 * int(TINY[model_of(script)][TINY[model_of(script)].index("--seq-len") + 1])
    longer = 1e6 * run(script, *QUICK, "--seq-len", str(length)).summary["memory"]["peak_mb"]
    assert longer > 1.2 * peak


def test_peak_memory_of_one_big_weight_is_known(run):
    """Where one weight dwarfs all else: itself, two AdamW moments, gradients of its two uses and maybe their sum."""
    sizes = words("--vocab-size 200000 --hidden-dim 32 --num-layers 1 --num-heads 1 --seq-len 2 --batch-size 1")
    peak = run("tiny_llama_v1", *QUICK, *sizes).summary["memory"]["peak_mb"]
    weight = 200_000 * 32 * 4 / 1e6
    assert 4 * weight < peak < 6.1 * weight


@every_script
def test_number_of_parameters(script: str, runs: dict[str, Run]):
    expected = sum(p.numel() for p in build(script).parameters())
    assert runs[script].summary["parameters"] == expected
    assert f"{expected:,} parameters" in runs[script].stdout


# The result file

SCHEMA = {
    "schema_version": int,
    "script": str,
    "status": str,
    "exit_status": int,
    "error": type(None),
    "config": dict,
    "fusions": dict,
    "training": dict,
    "environment": dict,
    "timing": dict,
    "memory": dict,
    "kernels": dict,
    "flops": dict,
    "loss": dict,
    "parameters": int,
}
OPTIONAL_TEXT = (str, type(None))
GROUPS = {
    "training": {
        "batch_size": int,
        "num_steps": int,
        "warmup_steps": int,
        "learning_rate": float,
        "seed": int,
        "deterministic": bool,
        "use_amp": bool,
        "amp_dtype": OPTIONAL_TEXT,
        "matmul_precision": str,
        "torch_compile": bool,
        "torch_compile_mode": OPTIONAL_TEXT,
    },
    "environment": {
        "device": str,
        "device_name": str,
        "torch": str,
        "triton": OPTIONAL_TEXT,
        "hip": OPTIONAL_TEXT,
        "cuda": OPTIONAL_TEXT,
        "python": str,
    },
    "timing": {
        "warmup_first_step_ms": float,
        "steps": int,
        "wall_s": float,
        "samples_per_sec": float,
        "batch_ms": float,
        "batch_median_ms": float,
        "batch_p95_ms": float,
        "data_ms": float,
        "forward_ms": float,
        "backward_ms": float,
        "optimizer_ms": float,
    },
    "memory": {"peak_mb": float},
    "kernels": {"unit": str, "per_step": int, "all_off": int, "reduction_percent": float},
    "flops": {"per_step": int, "achieved_tflops": float},
    "loss": {"warmup_steps": int, "curve": list, "initial": float, "final": float},
}


@every_script
def test_result_file_has_the_schema(script: str, runs: dict[str, Run]):
    summary = runs[script].summary
    for name, kind in SCHEMA.items():
        assert isinstance(summary[name], kind), name
    for group, fields in GROUPS.items():
        for name, kind in fields.items():
            assert isinstance(summary[group][name], kind), f"{group}.{name}"
    assert summary["schema_version"] == 1
    assert (summary["script"], summary["status"], summary["exit_status"]) == (script, "ok", 0)
    assert summary["config"] == asdict(build(script).config)
    assert summary["fusions"] == {attribute: True for _, attribute, _ in load(script).FUSIONS}
    assert summary["training"]["batch_size"] == 2
    assert summary["training"]["num_steps"] == STEPS
    assert summary["training"]["seed"] == 42
    assert summary["environment"]["device"] == "cpu"
    assert summary["environment"]["torch"] == torch.__version__
    assert all(isinstance(value, float) for value in summary["loss"]["curve"])


@every_script
def test_run_leaves_only_its_result(script: str, runs: dict[str, Run]):
    assert [path.name for path in runs[script].directory.iterdir()] == [f"{script}_summary.json"]


@every_script
def test_train_returns_what_it_writes(script: str, tmp_path: Path):
    result = load(script).train(parse(script, *QUICK, "--under-profiler", "--profile-dir", str(tmp_path)))
    assert strict_json((tmp_path / f"{script}_summary.json").read_text()) == json.loads(json.dumps(result))


@every_script
def test_second_run_in_the_same_directory_replaces_the_result(script: str, run):
    assert run(script, *QUICK, "--under-profiler").summary["training"]["num_steps"] == 3
    result = run(script, *QUICK, "--under-profiler", "--num-steps", "4")
    assert result.status == 0
    assert result.summary["training"]["num_steps"] == 4
    assert len(result.summary["loss"]["curve"]) == 5


@every_script
def test_under_profiler_runs_nothing_but_training_steps(script: str, run, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a profiler was started")

    monkeypatch.setattr(torch.profiler, "profile", refuse)
    status, text, _, summary = run(script, *QUICK, "--under-profiler")
    assert status == 0
    assert summary["kernels"] == {}
    assert summary["flops"] == {}
    assert "Average training speed: " in text
    assert "Final loss: " in text
    for absent in ("Kernel", "FLOPs", "Host launches"):
        assert absent not in text


@every_script
def test_without_warmup_nothing_is_said_about_it(script: str, run):
    status, text, _, summary = run(script, "--num-steps", "2", "--warmup-steps", "0", "--under-profiler")
    assert status == 0
    assert "armup" not in text
    assert "warm-up" not in text
    assert "warmup_first_step_ms" not in summary["timing"]
    assert len(summary["loss"]["curve"]) == 2


# Modes


def table_of(text: str, *names: str) -> dict[str, list[float]]:
    """The rows of the one table whose header has these names."""
    lines = text.splitlines()
    headers = [i for i, line in enumerate(lines) if re.fullmatch(r" *" + " +".join(names) + " +ratio", line)]
    assert len(headers) == 1, text
    rows = {}
    for line in lines[headers[0] + 1 :]:
        label, *cells = re.split(r"\s{2,}", line.strip())
        rows[label] = [float(cell) for cell in cells]
    return rows


@every_v2
def test_compare_fusion_prints_one_table_of_both_runs(script: str, run, tmp_path: Path):
    status, text, _, fused = run(script, "--compare-fusion", *QUICK)
    assert status == 0
    baseline = strict_json((tmp_path / "profiles" / "baseline" / f"{script}_summary.json").read_text())
    assert set(baseline["fusions"].values()) == {False}
    assert set(fused["fusions"].values()) == {True}
    rows = table_of(text, "all off", "as chosen")
    for label, group, key in (
        ("samples/sec", "timing", "samples_per_sec"),
        ("peak memory, MB", "memory", "peak_mb"),
        ("operator calls per step", "kernels", "per_step"),
        ("final loss", "loss", "final"),
    ):
        first, second, ratio = rows[label]
        assert first == pytest.approx(baseline[group][key], abs=0.051), label
        assert second == pytest.approx(fused[group][key], abs=0.051), label
        assert ratio == pytest.approx(fused[group][key] / baseline[group][key], abs=6e-4), label
    assert baseline["kernels"]["per_step"] == fused["kernels"]["all_off"]
    assert fused["loss"]["curve"] == pytest.approx(baseline["loss"]["curve"], rel=1e-3)


@every_v2
def test_compare_fusion_of_one_fusion(script: str, run):
    result = run(script, "--compare-fusion", "--disable-all-fusion", "--enable-flash-attention", *QUICK)
    assert result.status == 0
    on = [name for name, state in result.summary["fusions"].items() if state]
    assert on == ["flash_attention"]


def result_of(run_: Run, script: str) -> str:
    return str(run_.directory / f"{script}_summary.json")


@pytest.mark.parametrize("model", MODELS)
def test_compare_with_v1(model: str, runs: dict[str, Run], run):
    path = result_of(runs[f"tiny_{model}_v1"], f"tiny_{model}_v1")
    steps = ["--num-steps", str(STEPS), "--warmup-steps", str(WARMUP)]
    status, text, errors, summary = run(f"tiny_{model}_v2", "--compare-with-v1", path, *steps)
    assert status == 0
    assert errors == "", "nothing differs"
    v1 = runs[f"tiny_{model}_v1"].summary
    first, second, ratio = table_of(text, "V1", "V2")["operator calls per step"]
    assert (first, second) == (v1["kernels"]["per_step"], summary["kernels"]["per_step"])
    assert ratio == pytest.approx(second / first, abs=6e-4)


@pytest.mark.parametrize("model", MODELS)
def test_compare_with_v1_says_what_differs(model: str, runs: dict[str, Run], run):
    path = result_of(runs[f"tiny_{model}_v1"], f"tiny_{model}_v1")
    result = run(f"tiny_{model}_v2", "--compare-with-v1", path, *QUICK, "--batch-size", "1", "--under-profiler")
    assert result.status == 0
    assert re.search(r"batch_size.*2.*1", result.stderr)
    assert "num_steps" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "kind", ["other-model", "v2", "text", "other-json", "list", "not-finished", "missing", "empty"]
)
def test_compare_with_v1_refuses_other_files(kind: str, model: str, runs: dict[str, Run], run, tmp_path: Path):
    other = {"llama": "openfold", "openfold": "llama"}[model]
    path = tmp_path / "result.json"
    if kind == "other-model":
        shutil.copy(result_of(runs[f"tiny_{other}_v1"], f"tiny_{other}_v1"), path)
    elif kind == "v2":
        shutil.copy(result_of(runs[f"tiny_{model}_v2"], f"tiny_{model}_v2"), path)
    elif kind == "not-finished":
        path.write_text(json.dumps({**runs[f"tiny_{model}_v1"].summary, "status": "failed"}))
    elif kind != "missing":
        path.write_text({"text": "Final loss: 2.1\n", "other-json": '{"a": 1}', "list": "[1, 2]", "empty": ""}[kind])
    result = run(f"tiny_{model}_v2", "--compare-with-v1", str(path), *QUICK)
    assert_one_error(result, 2, "--compare-with-v1", str(path))
    assert result.summary is None, "nothing must have run"


@every_script
@pytest.mark.parametrize("amp", [[], ["--use-amp"]], ids=["float32", "bfloat16"])
def test_verify_accuracy_passes(script: str, amp: list[str], run):
    result = run(script, "--verify-accuracy", *amp)
    assert result.status == 0, result.stdout
    assert "Accuracy check: PASS" in result.stdout
    errors = [float(e) for e in re.findall(r"relative error (\S+), limit", result.stdout)]
    assert len(errors) >= 3, "outputs, loss and gradients"


@pytest.mark.parametrize("argv", [[], ["--disable-all-fusion"]], ids=["all-on", "all-off"])
def test_verify_accuracy_in_bfloat16_does_not_blame_rounding(argv: list[str], tmp_path: Path):
    """At the default sizes. With everything off there is nothing to fail but the arithmetic of the baseline itself."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        status = load("tiny_openfold_v2").main(
            ["--verify-accuracy", "--use-amp", "--device", "cpu", "--profile-dir", str(tmp_path), *argv]
        )
    assert status == 0, text.getvalue()


@every_v2
def test_verify_accuracy_passes_for_each_fusion(script: str, run):
    for flag, _, _ in load(script).FUSIONS:
        assert run(script, "--verify-accuracy", "--disable-all-fusion", f"--enable-{flag}").status == 0


FUSED_WEIGHTS = {
    "tiny_llama_v2": ("layers.0.self_attn.k_proj.weight", "layers.1.mlp.gate_proj.weight"),
    "tiny_openfold_v2": (
        "blocks.0.msa_att_row.linear_k.weight",
        "blocks.0.tri_att_end.linear_v.weight",
        "blocks.0.tri_mul_out.linear_b_g.weight",
    ),
}


def break_fused_weights(module: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on the model with fusions has another weight than the one without."""
    build_model = module.build_model

    def broken(args, device):
        model = build_model(args, device)
        if any(getattr(args, attribute) for _, attribute, _ in module.FUSIONS):
            state = model.state_dict()
            model.load_state_dict({**state, name: state[name].flip(0)})
        return model

    monkeypatch.setattr(module, "build_model", broken)


@pytest.mark.parametrize(
    ("script", "name"), [(script, name) for script, names in FUSED_WEIGHTS.items() for name in names]
)
def test_verify_accuracy_fails_when_a_fused_weight_is_wrong(script: str, name: str, run, monkeypatch):
    break_fused_weights(load(script), monkeypatch, name)
    result = run(script, "--verify-accuracy")
    assert result.status == 1
    assert "Accuracy check: FAIL" in result.stdout


@every_v2
@pytest.mark.parametrize("error", ["output", "gradient", "nan"])
def test_verify_accuracy_fails_when_an_operation_is_wrong(script: str, error: str, run, monkeypatch):
    attention = torch.nn.functional.scaled_dot_product_attention

    def wrong(q: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        if error == "gradient":
            q = q.detach() + 0.9 * (q - q.detach())  # the same value, nine tenths of the gradient
            out = attention(q, *args, **options)
            return out.detach() + 0.9 * (out - out.detach())
        return attention(q, *args, **options) * (1.01 if error == "output" else torch.nan)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
    result = run(script, "--verify-accuracy")
    assert result.status == 1
    assert "Accuracy check: FAIL" in result.stdout
    assert run(script, "--verify-accuracy", "--disable-flash-attention").status == 0


@every_script
def test_validate_setup_shows_what_is_there_and_passes(script: str, run):
    status, text, _, summary = run(script, "--validate-setup")
    assert status == 0
    assert torch.__version__ in text
    assert "cpu" in text
    for tool in ("rocprofv3", "rocprof-sys", "rocprof-compute"):
        assert tool in text
    assert text.splitlines()[-1] == "Setup check: PASS"
    assert len(summary["loss"]["curve"]) == 3


def test_validate_setup_fails_when_a_step_fails(run, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", broken)
    result = run("tiny_llama_v2", "--validate-setup")
    assert result.status != 0
    assert "Setup check: FAIL" in result.stdout


# Files of profiling


@every_script
def test_pytorch_profiler_writes_tables_and_a_trace(script: str, run):
    result = run(script, *QUICK, "--enable-pytorch-profiler")
    assert result.status == 0, result.stderr
    tables = list(result.directory.glob("*.txt"))
    assert tables
    for path in tables:
        assert "aten::" in path.read_text()
    assert any(line.startswith("Self CPU total:") for path in tables for line in path.read_text().splitlines())
    traces = list(result.directory.glob("*.json.gz"))
    assert len(traces) == 1
    with gzip.open(traces[0], "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    board = [path for path in (result.directory / "tensorboard").rglob("*") if path.is_file()]
    assert len(board) == 1
    assert board[0].name.endswith(".pt.trace.json.gz"), "the name TensorBoard's plugin looks for"


@every_script
def test_memory_timeline_reaches_the_peak(script: str, run):
    result = run(script, *QUICK, "--enable-memory-profiling")
    assert result.status == 0, result.stderr
    (path,) = result.directory.glob("*.csv")
    with path.open() as file:
        header, *rows = csv.reader(file)
    assert header == ["time_us", "bytes"]
    times, used = [float(row[0]) for row in rows], [float(row[1]) for row in rows]
    assert times == sorted(times)
    assert times[0] == 0
    assert len(rows) > 100
    assert max(used) / 1e6 == pytest.approx(result.summary["memory"]["peak_mb"], rel=1e-3)
    assert min(used) > 0


@every_script
def test_all_profiling_skips_what_does_not_work_here_and_says_so(script: str, run):
    result = run(script, *QUICK, "--enable-all-profiling")
    assert result.status == 0, result.stderr
    assert "--enable-rocm-profiling: no GPU" in result.stderr
    assert list(result.directory.glob("*.txt"))
    assert list(result.directory.glob("*.csv"))


# Help and import


@every_script
def test_help_has_groups_defaults_and_examples(script: str, run):
    status, text, errors, _ = run(script, "--help")
    assert (status, errors) == (0, "")
    for group in ("model:", "data:", "fusions:", "training:", "profiling:", "modes:", "examples:"):
        assert re.search(rf"^{group}", text, re.MULTILINE), group
    spaces = re.sub(r"\s+", " ", text)
    for flag, default in (
        ("--num-steps", "50"),
        ("--warmup-steps", "5"),
        ("--learning-rate", "0.0003"),
        ("--seed", "42"),
    ):
        assert re.search(rf"{flag} [^-]*\(default: {default}\)", spaces), flag
    assert f"pytorch_profiles_v{script[-1]}" in spaces
    for flag, _, _ in load(script).FUSIONS:
        assert f"--enable-{flag}" in text
        assert f"--disable-{flag}" in text
    assert "=====" not in text


@every_script
def test_examples_of_the_help_can_be_given(script: str, run):
    epilog = run(script, "--help").stdout.partition("\nexamples:\n")[2]
    commands = re.findall(rf"python {script}\.py(.*)", epilog)
    assert len(commands) >= 3
    for command in commands:
        load(script).parse_args(re.split(r"\s{2,}", command.rstrip())[0].split())


def test_defaults_are_those_of_the_workshop():
    llama, openfold = (load(f"tiny_{model}_v1").parse_args([]) for model in MODELS)
    expected = {"vocab_size": 1000, "hidden_dim": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4}
    expected |= {"intermediate_dim": 2048, "seq_len": 256, "batch_size": 8, "num_steps": 50, "learning_rate": 3e-4}
    assert {name: getattr(llama, name) for name in expected} == expected
    expected = {"msa_dim": 64, "pair_dim": 128, "num_blocks": 4, "num_heads_msa": 4, "num_heads_pair": 4}
    expected |= {"num_seqs": 16, "seq_len": 64, "batch_size": 4, "num_steps": 50, "learning_rate": 3e-4}
    assert {name: getattr(openfold, name) for name in expected} == expected


IMPORT_ALL = """
import importlib, os, random, sys
import numpy, torch
sys.path.insert(0, sys.argv[1])
settings = lambda: (
    torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision(),
    torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), dict(os.environ), os.getcwd(),
    bytes(torch.get_rng_state().numpy()), random.getstate(), str(numpy.random.get_state()),
    torch.cuda.is_initialized(), "gemmi" in sys.modules, "deepspeed" in sys.modules, "matplotlib" in sys.modules,
)
before = settings()
for name in sys.argv[2:]:
    importlib.import_module(name)
assert settings() == before
"""


def test_importing_the_scripts_has_no_side_effects(tmp_path: Path):
    command = [sys.executable, "-B", "-c", IMPORT_ALL, str(ROOT), *SCRIPTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_script_is_a_program_with_an_exit_status(tmp_path: Path):
    """One file, copied somewhere else, is enough; results go below the current directory."""
    script = tmp_path / "tiny_llama_v2.py"
    shutil.copy(ROOT / script.name, script)
    argv = [*TINY["llama"], *QUICK, "--device", "cpu", "--under-profiler"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-B", script.name]
    good = subprocess.run([*command, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (good.returncode, good.stderr) == (0, "")
    assert "Final loss: " in good.stdout
    assert (tmp_path / "pytorch_profiles_v2" / "tiny_llama_v2_summary.json").is_file()
    bad = subprocess.run([*command, "--batch-size", "0"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert bad.returncode == 2
    assert len(bad.stderr.splitlines()) == 1

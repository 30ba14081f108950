"""What only a GPU can show: its own kernels compute the same, and there are fewer of them with fusions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import (
    ALL_SETTINGS,
    QUICK,
    assert_same_gradients,
    gradients,
    load,
    model_of,
    parse,
    random_state,
    relative_difference,
    run_main,
)

pytestmark = pytest.mark.gpu
every_setting = pytest.mark.parametrize(("script", "argv"), ALL_SETTINGS)
every_v2 = pytest.mark.parametrize("script", ["tiny_llama_v2", "tiny_openfold_v2"])


def outputs_loss_gradients(script: str, argv: list[str], amp: bool) -> tuple:
    """Of the same random weights and the same batch for all settings, on the GPU."""
    device = torch.device("cuda")
    args = parse(script, "--device", "cuda", *argv)
    model = load(script).build_model(args, device)
    model.load_state_dict(random_state(model.state_dict()))
    batch = load(script).make_batches(args, device, args.seed).next_batch()
    inputs = {name: value for name, value in batch.items() if name in ("input_ids", "tokens")}
    with torch.autocast("cuda", torch.bfloat16, enabled=amp):
        with torch.no_grad():
            outputs = model(**inputs)
        loss = model(**batch)
    loss.backward()
    return outputs if isinstance(outputs, dict) else {"logits": outputs}, loss.item(), gradients(model)


@every_setting
def test_fused_equals_v1_in_float32(script: str, argv: list[str]):
    expected = outputs_loss_gradients(f"tiny_{model_of(script)}_v1", [], amp=False)
    found = outputs_loss_gradients(script, argv, amp=False)
    for name, value in expected[0].items():
        assert relative_difference(found[0][name], value) < 1e-4, name
    assert found[1] == pytest.approx(expected[1], rel=1e-4)
    assert_same_gradients(found[2], expected[2], 1e-3)


@every_setting
def test_fused_is_as_near_to_float32_as_v1_in_bfloat16(script: str, argv: list[str]):
    """bfloat16 has 8 bits: what counts is that fusing does not lose more of them than V1 loses."""
    baseline = f"tiny_{model_of(script)}_v1"
    exact = outputs_loss_gradients(baseline, [], amp=False)
    expected, found = outputs_loss_gradients(baseline, [], amp=True), outputs_loss_gradients(script, argv, amp=True)
    for name, value in exact[0].items():
        before, after = (relative_difference(result[0][name], value) for result in (expected, found))
        assert before > 0, "bfloat16 must be used"
        assert after < 2 * before + 0.01, name
    assert found[1] == pytest.approx(exact[1], rel=0.05)
    norm = sum(float(g.square().sum()) for g in exact[2].values()) ** 0.5
    before, after = (
        sum(float((r[2][n] - g).square().sum()) for n, g in exact[2].items()) ** 0.5 / norm for r in (expected, found)
    )
    assert after < 2 * before + 0.01


@every_v2
def test_kernels_are_counted_and_fewer_with_fusions(script: str, tmp_path: Path):
    result = run_main(script, tmp_path, *QUICK, "--device", "cuda")
    assert result.status == 0, result.stderr
    kernels = result.summary["kernels"]
    assert kernels["unit"] == "kernels"
    assert 0 < kernels["per_step"] < kernels["all_off"]
    assert kernels["host_launches"] > 0
    assert f"Kernels per step: {kernels['per_step']} (all fusions off: {kernels['all_off']})" in result.stdout
    assert "Host launches per step: " in result.stdout
    assert result.summary["environment"]["device"] == "cuda"


@every_v2
def test_peak_memory_is_the_allocators(script: str, tmp_path: Path):
    result = run_main(script, tmp_path, *QUICK, "--device", "cuda")
    assert 4 * 4 * result.summary["parameters"] <= 1e6 * result.summary["memory"]["peak_mb"]
    assert 1e6 * result.summary["memory"]["peak_mb"] <= torch.cuda.max_memory_reserved()


@every_v2
def test_verify_accuracy_passes_on_a_gpu(script: str, tmp_path: Path):
    result = run_main(script, tmp_path, "--verify-accuracy", "--device", "cuda")
    assert result.status == 0, result.stdout


@every_v2
def test_cpu_and_gpu_follow_the_same_loss_curve(script: str, tmp_path: Path):
    argv = ["--num-steps", "20", "--warmup-steps", "0", "--under-profiler"]
    curves = [
        run_main(script, tmp_path / device, *argv, "--device", device).summary["loss"]["curve"]
        for device in ("cpu", "cuda")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)

"""The committed result files: complete runs that name their device and learn."""

import json

import pytest
from conftest import ROOT

RESULTS = sorted(path for pattern in ("*/tiny_*", "*/busy_host/tiny_*") for path in (ROOT / "results").glob(pattern))
EXERCISES = sorted((ROOT / "results").glob("*/exercises/**/tiny_*_summary.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_runs_finished_and_name_their_device(path):
    result = json.loads(path.read_text())
    assert result["status"] == "ok"
    assert result["environment"]["device_name"]
    assert len(result["loss"]["curve"]) == result["training"]["warmup_steps"] + result["training"]["num_steps"]
    assert result["loss"]["final"] < 0.7 * result["loss"]["initial"]


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: "/".join(path.parts[-4:-1]))
def test_the_runs_behind_the_answers_finished_on_the_device_they_lie_under(path):
    result = json.loads(path.read_text())
    assert result["status"] == "ok"
    device = path.relative_to(ROOT / "results").parts[0]  # h100, h200x2, cpu
    if device == "cpu":
        assert result["environment"]["device"] == "cpu"
    else:
        assert device.partition("x")[0].upper() in result["environment"]["device_name"]
    assert result["loss"]["final"] < result["loss"]["initial"]


def test_both_versions_reach_the_same_loss_in_float32():
    for model in ("tiny_llama", "tiny_openfold"):
        finals = [
            json.loads((ROOT / f"results/h100/{model}_{version}_fp32_1.json").read_text())["loss"]["final"]
            for version in ("v1", "v2")
        ]
        assert finals[1] == pytest.approx(finals[0], rel=2e-3)

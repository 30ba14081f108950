"""The committed result files: complete runs that name their device and learn."""

import json

import pytest
from conftest import ROOT

RESULTS = sorted((ROOT / "results").glob("*/tiny_*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_runs_finished_and_name_their_device(path):
    result = json.loads(path.read_text())
    assert result["status"] == "ok"
    assert result["environment"]["device_name"]
    assert len(result["loss"]["curve"]) == result["training"]["warmup_steps"] + result["training"]["num_steps"]
    assert result["loss"]["final"] < 0.7 * result["loss"]["initial"]


def test_both_versions_reach_the_same_loss_in_float32():
    for model in ("tiny_llama", "tiny_openfold"):
        finals = [
            json.loads((ROOT / f"results/h100/{model}_{version}_fp32_1.json").read_text())["loss"]["final"]
            for version in ("v1", "v2")
        ]
        assert finals[1] == pytest.approx(finals[0], rel=2e-3)

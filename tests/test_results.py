"""The figures in the README are those of the committed result files."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

RESULTS = sorted((ROOT / "results").glob("*/tiny_*.json"))


def test_readme_tables_are_what_the_tool_prints_from_the_result_files():
    command = [sys.executable, "tools/benchmark.py", "table", "results/h100"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    readme = (ROOT / "README.md").read_text()
    begin = readme.index("\n", readme.index("<!-- tables:")) + 1
    assert readme[begin : readme.index("<!-- end of tables -->")].strip() == printed


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

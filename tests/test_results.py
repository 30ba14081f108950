"""The committed result files: complete runs that name their device and learn."""

import itertools
import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
from tools.benchmark import MODES, PRECISIONS, SHAPES

RUNS = sorted((ROOT / "results").glob("*/tiny_*.json"))
EXERCISES = sorted((ROOT / "results").glob("*/exercises/**/tiny_*_summary.json"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
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


def test_the_headline_table_is_whole_and_of_one_run():
    study = json.loads((ROOT / "results/h100/headline.json").read_text())
    assert "H100" in study["environment"]["device_name"]
    rows = {(row["shape"], row["precision"], row["mode"]): row for row in study["rows"]}
    assert sorted(rows) == sorted(itertools.product(SHAPES, PRECISIONS, MODES))
    for (shape, precision, mode), row in rows.items():
        for version in ("v1", "v2"):
            argv = [*SHAPES[shape], *PRECISIONS[precision], *MODES[mode]]
            assert (row[version]["argv"], len(row[version]["turns_ms"])) == (argv, study["rounds"])
        assert row["v2"]["per_step"] < row["v1"]["per_step"]

"""The committed result files: complete runs that name their device and learn."""

import itertools
import json
import re

import pytest
import torch
from conftest import ROOT, load
from torch.utils.flop_counter import FlopCounterMode

from bench.versions import MODES, PRECISIONS, SHAPES
from workshop.study import by_side

RUNS = sorted((ROOT / "results").glob("*/tiny_*.json"))
EXERCISES = [
    pytest.param(path.parent.name, result, id=f"{path.parent.name}/{name}")
    for path in sorted((ROOT / "results").glob("*/exercises.json"))
    for name, result in json.loads(path.read_text())["runs"].items()
]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_committed_runs_finished_and_name_their_device(path):
    result = json.loads(path.read_text())
    assert result["status"] == "ok"
    assert result["environment"]["device_name"]
    assert (
        len(result["loss"]["curve"])
        == result["training"]["warmup_steps"] + result["training"]["num_steps"]
    )
    assert result["loss"]["final"] < 0.7 * result["loss"]["initial"]


@pytest.mark.parametrize(("device", "result"), EXERCISES)
def test_the_runs_behind_the_answers_finished_on_the_device_they_lie_under(device, result):
    assert result["status"] == "ok"
    if device == "cpu":
        assert result["environment"]["device"] == "cpu"
    else:
        assert device.partition("x")[0].upper() in result["environment"]["device_name"]
    assert result["loss"]["final"] < result["loss"]["initial"]


def test_the_headline_table_is_whole_and_of_one_run():
    study = json.loads((ROOT / "results/h100/headline.json").read_text())
    assert "H100" in study["environment"]["device_name"]
    rows = by_side(study["rows"], "shape", "precision", "mode")
    assert sorted(rows) == sorted(itertools.product(SHAPES, PRECISIONS, MODES))
    for (shape, precision, mode), row in rows.items():
        for version in ("V1", "V2"):
            argv = [*SHAPES[shape].argv, *PRECISIONS[precision], *MODES[mode]]
            assert (row[version]["argv"], len(row[version]["turns_ms"])) == (argv, study["rounds"])
        assert row["V2"]["per_step"] < row["V1"]["per_step"]


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_openfold_v1"])
def test_the_totals_in_architecture_are_counted(script):
    """Parameters, and GFLOP forward and of the whole step, at the default sizes on the meta
    device."""
    module, meta = load(script), torch.device("meta")
    args = module.parse_args(["--device", "cpu"])
    model = module.build_model(args, meta)
    batch = {
        name: value.to(meta)
        for name, value in module.make_batches(args, torch.device("cpu"), 1).next_batch().items()
    }
    with FlopCounterMode(display=False) as counter:
        loss = model(**batch)
        forward = counter.get_total_flops()
        loss.backward()
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    assert f"**{sum(parameter.numel() for parameter in model.parameters()):,}**" in text
    totals = re.compile(
        rf"\*\*{forward / 1e9:.3f}\*\* \| \*\*{counter.get_total_flops() / 1e9:.3f}\*\*"
    )
    assert totals.search(text)

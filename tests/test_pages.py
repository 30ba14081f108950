"""Pages for readers: START.md shows what its programs measure, sentences have the numbers of the
results, the tables of claims and of names name what exists. And the results themselves."""

import json
import re

import pytest
import torch
from conftest import ROOT, captured, load, needs_compiler
from torch.utils.flop_counter import FlopCounterMode

from exercises.start import add_relu, attention_memory
from exercises.tiny_openfold_v2 import forward_only
from fusion_lab.turns import ratios

H100 = ROOT / "results/h100"
PAGE = (ROOT / "docs/START.md").read_text()


def test_fused_attention_is_the_same_and_its_memory_grows_with_the_length_alone():
    q, k, v = torch.randn(3, attention_memory.HEADS, 40, attention_memory.HEAD_DIM)
    torch.testing.assert_close(
        attention_memory.fused(q, k, v), attention_memory.with_scores(q, k, v)
    )
    scores, fused = (
        [attention_memory.peak_bytes(way, length) for length in (512, 1024)]
        for way in (attention_memory.with_scores, attention_memory.fused)
    )
    # float32 scores, their softmax, a gradient
    assert scores[1] > 3 * attention_memory.HEADS * 1024**2 * 4
    assert scores[1] > 3.5 * scores[0]
    assert fused[1] < 3 * fused[0]


def test_the_page_shows_what_its_commands_printed_and_the_table_that_the_figure_draws():
    run = json.loads((ROOT / "results/cpu/start.json").read_text())
    assert sum(run["seconds"].values()) < 180
    for lines in run["printed"].values():
        assert not [line for line in lines if line not in PAGE and not line.startswith("drawn:")]
    for row in json.loads((ROOT / "results/cpu/attention_memory.json").read_text())["rows"]:
        mb = [f"{row[way] / 1e6:.1f} |" for way in ("scores", "fused")]
        assert any(
            line.startswith(f"| {row['length']} ") and all(n in line for n in mb)
            for line in PAGE.splitlines()
        )


def test_the_page_shows_the_kernel_that_its_command_runs():
    code = (ROOT / "exercises/start/first_kernel.py").read_text().partition("@triton.jit")[2]
    assert code in PAGE


@needs_compiler
def test_add_relu_predicts_by_bytes_then_measures(monkeypatch):
    status, printed, errors = captured(add_relu.main, ["--n", "1000000", "--turns", "3"])
    assert status == 0, errors  # torch.compile may warn there
    assert "predicted by bytes: 1.67x" in printed
    assert "made 1 kernel, the results are equal" in printed
    assert "measured in 3 turns" in printed


def test_memory_of_a_prediction_is_the_peak_of_what_it_takes():
    def forward():
        first = torch.ones(1000, 1000)
        second = first + 1
        del first
        return second + 1

    assert forward_only.peak_mb_on_a_cpu(forward) == pytest.approx(8, rel=0.01)


def test_sheets_say_what_was_recorded_of_predictions_on_a_cpu():
    study = json.loads((ROOT / "results/cpu/forward_openfold.json").read_text())
    sides = {(row["seq_len"], row["side"]): row for row in study["rows"]}
    sheet = (ROOT / "exercises/tiny_openfold_v2/exercise_1_fusion_impact.md").read_text()
    times = ratios(sides[192, "V1"], sides[192, "V2"])
    assert f"{min(times):.1f} to {max(times):.1f} times as fast" in sheet
    for side in ("V1", "V2"):
        short, middle, long = (sides[length, side]["extra_mb"] for length in (48, 96, 192))
        assert f"{side} by {middle / short:.1f} and {long / middle:.1f}" in sheet


def test_every_result_file_behind_a_claim_is_there():
    text = (ROOT / "docs/CLAIMS.md").read_text()
    files = set(re.findall(r"`([\w/.*]+\.(?:json|csv))`", text))
    assert len(files) > 10
    assert not [name for name in files if not [*(ROOT / "results/h100").glob(name)]]


# The committed result files: complete runs that name their device and learn

RUNS = sorted((ROOT / "results").glob("*/tiny_*.json"))


def test_committed_runs_finished_where_they_lie_and_learn():
    runs = {path: json.loads(path.read_text()) for path in RUNS}
    for path in (ROOT / "results").glob("*/exercises.json"):
        runs |= {path / name: run for name, run in json.loads(path.read_text())["runs"].items()}
    assert len(runs) > 30
    for path, result in runs.items():
        loss, training, here = (result[name] for name in ("loss", "training", "environment"))
        device = path.relative_to(ROOT / "results").parts[0]
        assert result["status"] == "ok", path
        assert len(loss["curve"]) == training["warmup_steps"] + training["num_steps"], path
        assert loss["final"] < (0.7 if path in RUNS else 1.0) * loss["initial"], path
        named = here["device"] if device == "cpu" else here["device_name"].lower()
        assert device.partition("x")[0] in named, path


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_openfold_v1"])
def test_the_totals_in_architecture_are_counted(script):
    """Parameters, and GFLOP forward and of the whole step, at the default sizes on the meta
    device."""
    module, meta = load(script), torch.device("meta")
    args = module.parse_args(["--device", "cpu"])
    model = module.build_model(args, meta)
    batch = module.make_batches(args, torch.device("cpu"), 1).next_batch()
    batch = {name: value.to(meta) for name, value in batch.items()}
    with FlopCounterMode(display=False) as counter:
        loss = model(**batch)
        forward = counter.get_total_flops()
        loss.backward()
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    assert f"**{sum(parameter.numel() for parameter in model.parameters()):,}**" in text
    whole = counter.get_total_flops() / 1e9
    assert f"**{forward / 1e9:.3f}** | **{whole:.3f}**" in text

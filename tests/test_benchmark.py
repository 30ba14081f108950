"""tools/benchmark.py: what its measurements write, and the tables from it."""

import json
import re
import sys

import pytest
import torch
from conftest import ROOT, random_state, relative_difference

sys.path.insert(0, str(ROOT))
from tools import benchmark
from tools import benchmark_kernels as kernels

SMALL = ["--hidden-dim", "32", "--num-layers", "2", "--seq-len", "16", "--batch-size", "2"]
FUSIONS = ("qkv-fusion", "flash-attention", "swiglu-fusion")


def on_a_host_that_slows_down(monkeypatch) -> None:
    """Steps take 10 ms, each fusion saves one; with every turn of a side they take half as long again."""
    script = benchmark.importlib.import_module("tiny_llama_v2")

    def take(run, steps: int) -> None:
        on = sum(getattr(run.args, fusion.replace("-", "_")) for fusion in FUSIONS)
        run.turns.append((10 - on) * (1 + len(run.turns) / 2))

    monkeypatch.setattr(script.Run, "take", take)


def test_ablation_measures_each_fusion_alone_and_all_but_each(tmp_path, monkeypatch):
    on_a_host_that_slows_down(monkeypatch)
    sets = ["none", *(f"{kind} {f}" for kind in ("only", "all but") for f in FUSIONS), "all"]
    monkeypatch.setattr(benchmark, "MODELS", {"tiny_llama": SMALL})
    argv = ["--rounds", "3", "--models", "tiny_llama", "--versions", "v2"]
    assert benchmark.main(["ablation", str(tmp_path), *argv]) == 0

    written = json.loads((tmp_path / "ablation_tiny_llama_v2.json").read_text())
    rows = {(row["precision"], row["fusions"]): row for row in written["rows"]}
    assert sorted(rows) == sorted((precision, name) for precision in ("fp32", "bf16") for name in sets)
    assert written["environment"]["device_name"]

    for precision in ("fp32", "bf16"):
        calls = {name: rows[precision, name]["per_step"] for name in sets}
        for fusion in FUSIONS:
            assert calls["all"] < calls[f"all but {fusion}"] < calls["none"]
            assert calls["all"] < calls[f"only {fusion}"] < calls["none"]
        for name, saved in (("none", 0), ("only swiglu-fusion", 1), ("all but swiglu-fusion", 2), ("all", 3)):
            assert rows[precision, name]["speedup"] == pytest.approx(10 / (10 - saved))
            assert rows[precision, name]["batch_ms"] == pytest.approx(1.5 * (10 - saved)), "the turn in the middle"

    lines = benchmark.table(tmp_path).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == sets
    assert {line.count("|") for line in lines} == {8}


def test_headline_compares_all_versions_turn_by_turn(tmp_path, monkeypatch):
    order = []
    for version in benchmark.VERSIONS:
        script = benchmark.importlib.import_module(f"tiny_llama_{version}")

        def take(run, steps: int, version: str = version) -> None:
            if run.label == "step" and run.goal > 3:
                order.append(version)
            run.turns.append({"v1": 30.0, "v2": 20.0, "v3": 10.0}[version] * (1 + len(run.turns)))

        monkeypatch.setattr(script.Run, "take", take)
    monkeypatch.setattr(benchmark, "SHAPES", {"tiny_llama, small": SMALL})
    argv = ["--rounds", "3", "--shapes", "tiny_llama, small", "--precisions", "fp32", "--modes", "eager"]
    assert benchmark.main(["headline", str(tmp_path), *argv]) == 0
    assert order == [*benchmark.VERSIONS, *reversed(benchmark.VERSIONS), *benchmark.VERSIONS]
    (row,) = json.loads((tmp_path / "headline.json").read_text())["rows"]
    assert [row[version]["batch_ms"] for version in benchmark.VERSIONS] == [60.0, 40.0, 20.0]
    assert benchmark.ratios(row["v1"], row["v2"]) == [1.5, 1.5, 1.5]
    times, kernels = benchmark.table(tmp_path).split("\n\n")
    assert [cell.strip() for cell in times.splitlines()[2].split("|")[1:-1]] == [
        "tiny_llama, small, fp32", "60.00", "40.00", "20.00"
    ]  # fmt: skip
    assert str(row["v2"]["per_step"]) in kernels


def fake_results(monkeypatch, results: list[dict]) -> None:
    """Every version script ends with the next of these results in place of training."""
    monkeypatch.setattr(benchmark, "MODELS", {"tiny_llama": []})
    monkeypatch.setattr(benchmark, "LENGTHS", (16, 32))
    for script in ("tiny_llama_v1", "tiny_llama_v2"):
        monkeypatch.setattr(benchmark.importlib.import_module(script), "train", lambda args: results.pop(0))


def result(status: str = "ok", exit_status: int = 0, batch_ms: float = 10.0, peak_mb: float | None = 100.0) -> dict:
    timing, memory = {"batch_ms": batch_ms}, {"peak_mb": peak_mb}
    error = None if status == "ok" else "why it ended"
    return {"status": status, "exit_status": exit_status, "timing": timing, "memory": memory, "error": error}


def call(capsys, *argv) -> tuple[int, str, str]:
    status = benchmark.main([str(word) for word in argv])
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    ("ending", "status", "line"),
    [(("failed", 130), 130, "benchmark.py: interrupted"), (("failed", 1), 1, "why it ended")],
    ids=["Ctrl-C", "failure"],
)
def test_a_run_that_fails_ends_the_suite_and_keeps_the_earlier_file(
    tmp_path, monkeypatch, capsys, ending, status, line
):
    earlier = tmp_path / "memory.json"
    earlier.write_text("earlier")
    fake_results(monkeypatch, [*(result() for _ in range(3)), result(*ending)])
    ended, _, err = call(capsys, "memory", tmp_path)
    assert ended == status
    assert len(err.splitlines()) == 1
    assert line in err
    assert earlier.read_text() == "earlier"
    assert len(json.loads((tmp_path / "memory.partial.json").read_text())["rows"]) == 1


def test_out_of_memory_is_a_cell_and_its_steps_are_no_measurement(tmp_path, monkeypatch, capsys):
    fast = result("oom", 3, batch_ms=0.1)  # a few quick steps, then no memory
    fake_results(monkeypatch, [result(), result(peak_mb=90.0), fast, result(peak_mb=None)])
    assert call(capsys, "memory", tmp_path)[0] == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in benchmark.table(tmp_path).splitlines()]
    assert rows[2][1:] == ["100", "out of memory"]
    assert rows[3][1:] == ["90", "-"]


@pytest.mark.parametrize(
    ("argv", "content", "line"),
    [
        (["table", "missing"], None, "missing: no result files"),
        (["table", "."], '{"rows": [', "memory.json: not JSON"),
        (["table", "."], '{"rows": [{"seq_len": 1}]}', "none of these measurements"),
        (["ddp", "."], None, "torchrun --nproc-per-node N"),
        (["grid", ".", "--rounds", "0"], None, "1 or more"),
        (["fastest", "."], None, "invalid choice"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, argv, content, line):
    monkeypatch.chdir(tmp_path)
    if content:
        (tmp_path / "memory.json").write_text(content)
    try:
        status = benchmark.main(argv)
    except SystemExit as exit:
        status = exit.code
    err = capsys.readouterr().err
    assert (status, len(err.splitlines())) == (2, 1)
    assert line in err
    assert not (tmp_path / "missing").exists()


# tools/benchmark_kernels.py


@pytest.fixture
def tiny_studies(monkeypatch):
    """Sizes for a CPU; V1's side is not compiled."""
    monkeypatch.setattr(kernels, "ATTENTION", {"N=4": (2, 2, 4, 1, 8)})
    monkeypatch.setattr(kernels, "TRIANGLE", {"N=3": (1, 3)})
    monkeypatch.setattr(kernels, "CAUSAL", {"S=6": (1, 6, 2, 1, 8)})
    monkeypatch.setattr(kernels.torch, "compile", lambda function: function)


@pytest.mark.parametrize("study", kernels.STUDIES)
def test_all_sides_of_a_study_compute_the_same(study: str, tiny_studies, monkeypatch):
    """The result and the gradient of the first input; what follows in a module depends on what it merges."""
    found = {}

    def in_turns(sides: dict, rounds: int) -> dict:
        found.update({name: step()[:2] for name, step in sides.items()})
        return {}

    monkeypatch.setattr(kernels, "in_turns", in_turns)
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)  # the same gradient of the result on all sides
    for version in ("v1", "v2", "v3"):  # and the same weights
        module = benchmark.importlib.import_module(f"tiny_openfold_{version}")
        monkeypatch.setattr(module, "TriangleMultiplicationOutgoing", with_random_weights(module))
    list(kernels.STUDIES[study](1, ["fp32"]))
    assert len(found) == 3
    ours = found.pop("triton")
    for name, theirs in found.items():
        for a, b in zip(ours, theirs, strict=True):
            assert relative_difference(a, b) < 1e-5, name


def with_random_weights(module):
    """A version's triangle multiplication with weights that are the same in each version."""
    original = module.TriangleMultiplicationOutgoing

    def build(*arguments):
        layer = original(*arguments)
        layer.load_state_dict(random_state(layer.state_dict()))
        return layer

    return build


def test_a_study_writes_its_turns_and_other_block_sizes_apart(tiny_studies, tmp_path, capsys):
    argv = ["attention", str(tmp_path), "--precisions", "fp32", "--rounds", "2"]
    assert kernels.main(argv) == 0
    (row,) = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert (row["shape"], row["precision"]) == ("N=4", "fp32")
    for side in ("triton", "SDPA", "torch.compile"):
        assert len(row[side]["turns_us"]) == 2
        assert row[side]["us"] == pytest.approx(sum(row[side]["turns_us"]) / 2)
    assert kernels.main([*argv, "--try", "attention_forward:BLOCK_M=16 attention_forward:num_warps=2"]) == 0
    rows = json.loads((tmp_path / "attention_blocks.json").read_text())["rows"]
    assert [row["blocks"] for row in rows] == [
        "as they are",
        "attention_forward:BLOCK_M=16 attention_forward:num_warps=2",
    ]
    assert json.loads((tmp_path / "attention.json").read_text())["rows"] == [row], "and nothing else"
    capsys.readouterr()
    assert kernels.main(["table", str(tmp_path)]) == 0
    assert re.search(r"\| N=4, fp32 +\| +\d+ \|", capsys.readouterr().out)

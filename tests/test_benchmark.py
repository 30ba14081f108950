"""tools/benchmark.py: what its measurements write, and the tables from it."""

import itertools
import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
from tools import benchmark

SMALL = ["--hidden-dim", "32", "--num-layers", "2", "--seq-len", "16", "--batch-size", "2"]
FUSIONS = ("qkv-fusion", "flash-attention", "swiglu-fusion")


def test_ablation_measures_each_fusion_alone_and_all_but_each(tmp_path, monkeypatch):
    taken = itertools.count()
    sets = ["none", *(f"{kind} {f}" for kind in ("only", "all but") for f in FUSIONS), "all"]

    def steps_on_a_host_that_slows_down(trainer, steps: int) -> list[float]:
        """10 ms, each fusion saves one; the second turn takes half as long again, the third twice, and so on."""
        on = sum(getattr(trainer.args, fusion.replace("-", "_")) for fusion in FUSIONS)
        return [(10 - on) * (1 + next(taken) // len(sets) / 2)] * steps

    monkeypatch.setattr(benchmark, "step_times", steps_on_a_host_that_slows_down)
    monkeypatch.setattr(benchmark, "MODELS", {"tiny_llama": SMALL})
    assert benchmark.main(["ablation", str(tmp_path), "--rounds", "1", "--models", "tiny_llama"]) == 0

    written = json.loads((tmp_path / "ablation_tiny_llama.json").read_text())
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

    lines = benchmark.table(tmp_path).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == sets
    assert {line.count("|") for line in lines} == {8}


def fake_results(monkeypatch, results: list[dict]) -> None:
    """Every version script ends with the next of these results in place of training."""
    monkeypatch.setattr(benchmark, "MODELS", {"tiny_llama": []})
    monkeypatch.setattr(benchmark, "GRID", {"tiny_llama": [(1, 16)]})
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
    earlier = tmp_path / "grid_tiny_llama.json"
    earlier.write_text("earlier")
    fake_results(monkeypatch, [*(result() for _ in range(3)), result(*ending)])
    ended, _, err = call(capsys, "grid", tmp_path, "--rounds", 1, "--models", "tiny_llama")
    assert ended == status
    assert len(err.splitlines()) == 1
    assert line in err
    assert earlier.read_text() == "earlier"
    assert len(json.loads((tmp_path / "grid_tiny_llama.partial.json").read_text())["rows"]) == 1


def test_out_of_memory_is_a_cell_and_its_steps_are_no_measurement(tmp_path, monkeypatch, capsys):
    fast = result("oom", 3, batch_ms=0.1)  # a few quick steps, then no memory
    fake_results(monkeypatch, [result(), result(peak_mb=90.0), fast, result(peak_mb=None)])
    assert call(capsys, "memory", tmp_path)[0] == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in benchmark.table(tmp_path).splitlines()]
    assert rows[2][1:] == ["100", "out of memory"]
    assert rows[3][1:] == ["90", "-"]

    rounds = [fast, result(batch_ms=8.0), result(batch_ms=12.0), result(batch_ms=9.0)]
    fake_results(monkeypatch, [*rounds, *(result() for _ in range(4))])
    assert call(capsys, "grid", tmp_path, "--rounds", 2, "--models", "tiny_llama")[0] == 0
    row = json.loads((tmp_path / "grid_tiny_llama.json").read_text())["rows"][0]
    assert (row["v1"]["batch_ms"], row["v2"]["batch_ms"]) == (12.0, 8.0)
    assert {path.name for path in tmp_path.iterdir()} == {"memory.json", "grid_tiny_llama.json"}


def test_a_cpu_has_operator_calls_and_no_launches(tmp_path):
    kept = ROOT / "results/cpu/exercises/llama_v2/v2/tiny_llama_v2_summary.json"
    (tmp_path / "tiny_llama_v2_fp32_1.json").write_text(kept.read_text())
    header, _, row = benchmark.table(tmp_path).splitlines()
    cells = dict(zip(*([cell.strip() for cell in line.split("|")[1:-1]] for line in (header, row)), strict=True))
    assert cells["operator calls"] == str(json.loads(kept.read_text())["kernels"]["per_step"])
    assert cells["host launches"] == "-"


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

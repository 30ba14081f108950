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
    benchmark.ablation(tmp_path, rounds=1, models=["tiny_llama"])

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

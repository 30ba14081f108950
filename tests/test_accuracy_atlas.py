"""bench/accuracy_atlas.py: its table is of what was computed, and shows what a version computes
wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import TINY, build, captured, load, strict_json

from bench import accuracy_atlas

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter"
)


def measured(path: Path, *argv: str) -> tuple[list[dict], str]:
    """Rows of the result, and the table."""
    status, table, errors = captured(
        accuracy_atlas.main, ["--device", "cpu", "--output", str(path), *argv]
    )
    assert status == 0, errors
    again = captured(accuracy_atlas.main, ["--table", str(path)])
    assert again[:2] == (0, table)
    return strict_json(path.read_text())["rows"], table


def test_a_whole_model(tmp_path: Path):
    sizes = "--sizes=" + " ".join([*TINY["llama"], "--num-layers 1 --seq-len 8"])
    argv = ["--subjects", "tiny_llama", "--precisions", "fp32", "--runs", "2", sizes]
    rows, table = measured(tmp_path / "a.json", *argv)
    assert [row["case"] for row in rows] == ["plain", "outlier", "large logits"]
    names = set(build("tiny_llama_v1", "--num-layers", "1").state_dict())
    for row in rows:
        for side in ("V1", "V2", "V3", "V4"):
            found = row["sides"][side]
            assert set(found["lines"]) == set(found["parameters"]) == names
            assert 0 < found["outputs"] < 1e-5
            assert 0 < max(found["parameters"].values()) < 1e-2
            assert found["equal_bits"] is (True if row["case"] == "plain" else None)
    assert "| equal bits in 2 runs, fp32 " in table


def test_a_fault_in_one_column_is_shown_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So small that the norm of the whole gradient would not tell."""
    v3 = load("tiny_openfold_v3")
    right_gradients = v3.triangle_weight_gradients

    def faulty(*arguments) -> None:
        right_gradients(*arguments)
        arguments[-2][:, 7] *= 0.5

    monkeypatch.setattr(accuracy_atlas, "LENGTHS", {"plain": 5})
    argv = ["--subjects", "triangle multiplication", "--precisions", "bf16", "--runs", "2"]
    ((right,), _) = measured(tmp_path / "right.json", *argv)
    monkeypatch.setattr(v3, "triangle_weight_gradients", faulty)
    ((wrong,), table) = measured(tmp_path / "wrong.json", *argv)
    right, wrong = right["sides"], wrong["sides"]
    assert right["V3"]["lines"]["linear_z.weight"][0] < 0.1
    error, where = wrong["V3"]["lines"]["linear_z.weight"]
    assert error == pytest.approx(0.5, abs=0.05)
    assert where == "[:, 7]"
    assert wrong["V3"]["parameters"]["linear_z.weight"] < 0.1
    assert wrong["V1"] == right["V1"]
    assert "V3: linear_" in table
    assert "[:, 7]" in table

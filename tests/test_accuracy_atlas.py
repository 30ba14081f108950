"""The suite `accuracy` of bench/versions.py: its table is of what was computed, and shows what a
version computes wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import TINY, build, captured, load, strict_json

from bench import accuracy_atlas, versions

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter"
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = " ".join([*TINY["llama"], "--num-layers 1 --seq-len 8"])
    monkeypatch.setitem(accuracy_atlas.SIZES, "tiny_llama", sizes)
    monkeypatch.setitem(accuracy_atlas.LENGTHS, "plain", 5)
    monkeypatch.setattr(accuracy_atlas, "RUNS", 2)
    monkeypatch.setattr(accuracy_atlas, "ALL_VERSIONS", ("V1", "V3"))


def measured(folder: Path, *only: str) -> tuple[list[dict], str]:
    """Rows of these parts of the suite, and the table."""
    status, _, errors = captured(versions.main, ["accuracy", str(folder), "--only", *only])
    assert status == 0, errors
    status, table, _ = captured(versions.main, ["table", str(folder), "--tables", "accuracy"])
    assert status == 0
    return strict_json((folder / "accuracy.json").read_text())["rows"], table


def test_a_whole_model(tmp_path: Path):
    rows, table = measured(tmp_path, "tiny_llama", "bf16", "plain", "large logits")
    assert [row["case"] for row in rows] == ["plain", "large logits"]
    names = set(build("tiny_llama_v1", "--num-layers", "1").state_dict())
    for row in rows:
        for side in ("V1", "V3"):
            found = row["sides"][side]
            assert set(found["lines"]) == set(found["parameters"]) == names
            assert 0 < found["outputs"] < 0.1
            assert 0 < max(found["parameters"].values()) < 0.2
            assert found["equal_bits"] is (True if row["case"] == "plain" else None)
    assert "| equal bits in 100 runs, bf16 " in table


def test_a_fault_in_one_column_is_shown_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So small that the norm of the whole gradient would not tell."""
    v3 = load("tiny_openfold_v3")
    right_gradients = v3.triangle_weight_gradients

    def faulty(*arguments) -> None:
        right_gradients(*arguments)
        arguments[-2][:, 7] *= 0.5

    argv = ["triangle multiplication", "bf16", "plain"]
    ((right,), _) = measured(tmp_path / "right", *argv)
    monkeypatch.setattr(v3, "triangle_weight_gradients", faulty)
    ((wrong,), table) = measured(tmp_path / "wrong", *argv)
    right, wrong = right["sides"], wrong["sides"]
    assert right["V3"]["lines"]["linear_z.weight"][0] < 0.1
    error, where = wrong["V3"]["lines"]["linear_z.weight"]
    assert error == pytest.approx(0.5, abs=0.05)
    assert where == "[:, 7]"
    assert wrong["V3"]["parameters"]["linear_z.weight"] < 0.1
    assert wrong["V1"] == right["V1"]
    assert "V3: linear_" in table
    assert "[:, 7]" in table

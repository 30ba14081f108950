"""The exercise with a model of one's own: its solution is right, what is missing and each fault a
line."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from conftest import ROOT, captured

from exercises.your_own_model import check, vit
from fusion_lab.turns import Turns

SOLUTION = ROOT / "exercises/your_own_model/solution.py"
INSIDE = "tl.where(inside, x - tl.sum(x, 0) / C, 0.0)"
GRAD_SUM = "tl.load(GRAD_SUM + at, mask=inside)"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")


@without_gpu
def test_the_solution_is_right_alone_and_in_the_model():
    status, out, err = captured(check.main, [str(SOLUTION)])
    assert status == 0, err
    assert out.splitlines() == [
        "solution.py, alone: outputs and gradients are right",
        "solution.py, in the model: the gradients of 31 weights are right",
    ]
    assert "nothing is timed" in err
    assert vit.add_norm.__module__ == vit.__name__, "the model is as it was"


def test_what_is_still_to_be_written_is_said_in_one_line(tmp_path: Path):
    mine = tmp_path / "my_fusion.py"
    mine.write_text("def add_norm(*given):\n    raise NotImplementedError('write add_norm')\n")
    assert captured(check.main, [str(mine)]) == (1, "my_fusion.py, next: write add_norm\n", "")


@without_gpu
def test_operators_of_pytorch_are_no_kernel(tmp_path: Path):
    mine = tmp_path / "my_fusion.py"
    mine.write_text("from exercises.your_own_model.vit import add_norm\n")
    status, _, err = captured(check.main, [str(mine)])
    assert (status, "the forward pass launches no kernel" in err) == (1, True)


@without_gpu
@pytest.mark.parametrize(
    ("line", "fault", "said"),
    [
        (INSIDE, "x - tl.sum(x, 0) / C", "output 1 of [5, 13]"),
        (" + bias, mask", ", mask", "output 1 of [4, 16]"),
        (f"grad_x += {GRAD_SUM}", "", "the gradient of x of [4, 16]"),
        ("grad_bias += grad", "grad_bias = grad", "the gradient of bias of [5, 13]"),
        ("x.contiguous(), update.contiguous()", "x, update", "tensors with strides"),
        ("*parts.sum(0)", "*parts.sum(0).flip(0)", "the gradient of weight of [4, 16]"),
        ("SUM + at, x, mask=inside", "SUM + at, x", "a race: another program stores there, too"),
        ("BIAS + column, mask=inside", "BIAS + column", "beyond the end of a tensor"),
        ("torch.empty_like(update)", "torch.empty_like(x)", "should be torch.bfloat16"),
        ("[(x.numel() // C,)]", "[x.numel() // C]", "the grid is a tuple"),
        ("x = tl.load(X", "x = torch.load(X", "PyTorch, numpy and math do not work on blocks"),
    ],
)
def test_a_fault_is_named(line: str, fault: str, said: str, tmp_path: Path):
    text = SOLUTION.read_text()
    assert line in text
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace(line, fault))
    status, _, err = captured(check.main, [str(wrong)])
    assert (status, len(err.splitlines())) == (1, 1), err
    assert said in err


def test_the_sheet_has_what_the_tool_predicted_and_the_turns_measured():
    """On an H100: the chains of add_norm's two lines, and the step before and after."""
    sheet = (ROOT / "exercises/your_own_model/README.md").read_text()
    found, measured = (
        json.loads((ROOT / f"results/h100/your_own_model{part}.json").read_text())
        for part in ("_found", "")
    )
    chains = [row for row in found["chains"] if "vit.py:20,21" in row["lines"]]
    now = found["levels"]["now"]["us"]
    then = now - sum(row["us_now"] - row["us_fused"] for row in chains)
    step = Turns(measured["ms"][check.PARTS[1]])
    before, after = (statistics.median(ms) for ms in step.ms.values())
    ratio = statistics.median(step.ratios("after"))
    for what, *numbers in (
        ("predicted by the tool", now / 1e3, then / 1e3, now / then),
        ("measured in turns", before, after, ratio),
    ):
        assert "| {} | {:.1f} ms | {:.1f} ms | {:.2f}x |".format(what, *numbers) in sheet

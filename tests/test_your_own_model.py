"""The exercise with a model of one's own: its solution is right, what is missing and each fault a
line."""

import json
import statistics
from pathlib import Path

import pytest
import torch
from conftest import ROOT, captured, replaced

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
        ("/ C + eps)", "/ C)", "is eps where the formula has it?"),
        ("BLOCK=triton.next_power_of_2(C)", "BLOCK=64", "is there a number in place of C or BLOCK"),
        (
            "centred * rstd * weight",
            "(centred * rstd).to(OUT.dtype.element_ty) * weight",
            "is rounded more than once",
        ),
        (" + bias, mask", ", mask", "output 1 of [4, 16]"),
        (f"grad_x += {GRAD_SUM}", "", "the gradient of x of [4, 16]"),
        ("grad_bias += grad", "grad_bias = grad", "does a program's second row add up?"),
        ("x.contiguous(), update.contiguous()", "x, update", "tensors with strides"),
        ("*parts.sum(0)", "*parts.sum(0).flip(0)", "are the two exchanged?"),
        ("SUM + at, x, mask=inside", "SUM + at, x", "a race: another program stores there, too"),
        ("BIAS + column, mask=inside", "BIAS + column", "beyond the end of a tensor"),
        ("GRAD_OUT + at, mask=inside, other=0.0", "GRAD_OUT + at, mask=inside", "without `other`"),
        ("rows, tl.num", "rows - 1, tl.num", "did nobody write them"),
        ("torch.empty_like(grad_sum),", "grad_sum,", "writes to a gradient that it is given"),
        (
            "weight = tl.zeros((BLOCK,), tl.float32)",
            "weight = tl.zeros((BLOCK,), tl.float16)",
            "begins in 16 bits",
        ),
        ("torch.empty_like(update)", "torch.empty_like(x)", "should be torch.bfloat16"),
        ("[(x.numel() // C,)]", "[x.numel() // C]", "the grid is a tuple"),
        ("x = tl.load(X", "x = torch.load(X", "PyTorch, numpy and math do not work on blocks"),
    ],
)
def test_a_fault_is_named(line: str, fault: str, said: str, tmp_path: Path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(replaced(SOLUTION.read_text(), [(line, fault)]))
    status, _, err = captured(check.main, [str(wrong)])
    assert (status, len(err.splitlines())) == (1, 1), err
    assert said in err


@without_gpu
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([("    bias =", "    x = tl.load(X + at, mask=inside) + update\n    bias =")],
         "one pass: forward, kernels load and store 5.0 times"),
        ([("tl.program_id(0) * 2 * C + column", "column"), ("tl.store(part", "tl.atomic_add(part"),
          ("weight.new_empty(min", "weight.new_zeros(min")], "sums of each program's own: line"),
    ],
)  # fmt: skip
def test_a_right_one_that_does_more_than_it_must_gets_a_line(changes, said, tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text(replaced(SOLUTION.read_text(), changes))
    status, out, err = captured(check.main, [str(mine)])
    assert (status, said in out) == (0, True), out + err


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

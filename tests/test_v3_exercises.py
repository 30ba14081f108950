"""The programs of V3's exercises: what they check is right, a fault is named, nothing is timed
without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, load

from exercises.tiny_llama_v3 import add_relu, check_custom_kernel, measure, rms_norm
from exercises.tiny_openfold_v3 import attention_bias_atomics, triangle_layouts

LLAMA = ROOT / "exercises/tiny_llama_v3"
SOLUTION = LLAMA / "custom_kernel_solution.py"
NOT_TIMED = "no GPU: nothing is timed"
without_gpu = pytest.mark.skipif(measure.GPU, reason="sizes and notes of a CPU")


def check_module(path: Path, capsys: pytest.CaptureFixture) -> tuple[int, str, str]:
    """Status, stdout and stderr of the check of exercise 2."""
    status = check_custom_kernel.main([str(path), "--rows", "64"])
    return status, *capsys.readouterr()


@without_gpu
@pytest.mark.parametrize(
    ("program", "argv", "printed"),
    [
        (add_relu, "--n 300 --block 128", "300 elements, 3 programs of 128, 84 masked off: right"),
        (rms_norm, "--rows 5 --dim 97", "5 rows of 97 channels: right"),
        (attention_bias_atomics, "--length 16 --rows 3 --group 2", "V3: right"),
        (triangle_layouts, "--length 6", "whole update, V3"),
    ],
    ids=lambda value: getattr(value, "PROG", None),
)
def test_a_program_says_what_is_right_and_times_nothing(program, argv, printed, capsys):
    assert program.main(argv.split()) == 0
    out, err = capsys.readouterr()
    assert printed in out
    assert NOT_TIMED in err
    assert program.main([*argv.split(), "--output", "times.json"]) == 4
    assert "--output needs a GPU" in capsys.readouterr().err


def test_the_solution_passes_also_with_four_numbers_of_a_counter(tmp_path, capsys):
    four = tmp_path / "four.py"
    four.write_text(SOLUTION.read_text().replace("FOUR = False", "FOUR = True"))
    for path in (SOLUTION, four):
        status, out, _ = check_module(path, capsys)
        right = ["mask and output: right", "gradients of x, update and scale: right"]
        assert (status, out.splitlines()[:2]) == (0, right)


def test_what_is_still_to_be_written_is_no_error(tmp_path, capsys):
    status, out, err = check_module(LLAMA / "custom_kernel_skeleton.py", capsys)
    next_tasks = "next: Tasks 1 and 2; when they are done, take `raise` out of forward\n"
    assert (status, out, err) == (1, next_tasks, "")
    half, begin = tmp_path / "half.py", "        update, scale, seed = ctx.saved_tensors\n"
    missing = "        raise NotImplementedError('Tasks 3 and 4')\n"
    half.write_text(SOLUTION.read_text().replace(begin, missing))
    status, out, err = check_module(half, capsys)
    assert (status, out, err) == (1, "mask and output: right\nnext: Tasks 3 and 4\n", "")


@without_gpu
def test_all_ways_to_sum_the_bias_gradient_agree_with_v3s_backward_pass():
    script = load("tiny_openfold_v3")
    case = attention_bias_atomics.Case(1, 5, 20, 2, 16, group=2)
    gate_bias = torch.zeros(32, device=measure.DEVICE)
    out, lse = script.attention_forward(case.qkvg, gate_bias, case.bias, False)
    # A gradient that is the same before the gate as the one of the case.
    grad_out = case.grad_attention / case.qkvg[..., 3, :].flatten(3).sigmoid()
    inputs = grad_out, case.qkvg, gate_bias, case.bias, out, lse
    expected = script.attention_backward(*inputs, False, True, True)[2]
    for name, (function, _) in case.ways().items():
        torch.testing.assert_close(function(), expected.float(), rtol=1e-4, atol=1e-4, msg=name)


def test_a_block_size_that_a_kernel_does_not_have_is_one_line():
    command = [sys.executable, LLAMA / "tune.py", "rms_norm_forward", "TILES", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "rms_norm_forward has no 'TILES'; it has TILE" in done.stderr

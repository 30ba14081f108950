"""Programs of exercises, as far as the sheets, which run them, do not show it: what is not
finished, measured without a GPU or asked for wrongly, and the products of a made-up trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, captured, table_of

from exercises.tiny_llama_v3 import add_relu, check_custom_kernel, measure, rms_norm
from exercises.tiny_openfold_v2 import forward_only, gemms_of_a_trace
from exercises.tiny_openfold_v3 import attention_bias_atomics, triangle_layouts

LLAMA = ROOT / "exercises/tiny_llama_v3"


@pytest.mark.skipif(measure.GPU, reason="sizes and notes of a CPU")
@pytest.mark.parametrize(
    ("program", "argv"),
    [
        (add_relu, "--n 300 --block 128"),
        (rms_norm, "--rows 5 --dim 97"),
        (attention_bias_atomics, "--length 16 --rows 3 --group 2"),
        (triangle_layouts, "--length 6"),
    ],
    ids=lambda value: getattr(value, "PROG", None),
)
def test_without_a_gpu_nothing_is_timed(program, argv: str):
    status, out, err = captured(program.main, argv.split())
    assert (status, "no GPU: nothing is timed" in err) == (0, True)
    assert out
    status, _, err = captured(program.main, [*argv.split(), "--output", "times.json"])
    assert (status, "--output needs a GPU" in err) == (4, True)


def test_what_is_still_to_be_written_is_no_error(tmp_path: Path):
    half, begin = tmp_path / "half.py", "        update, scale, seed = ctx.saved_tensors\n"
    missing = "        raise NotImplementedError('Tasks 3 and 4')\n"
    half.write_text((LLAMA / "custom_kernel_solution.py").read_text().replace(begin, missing))
    found = captured(check_custom_kernel.main, [str(half), "--rows", "64"])
    assert found == (1, "mask and output: right\nnext: Tasks 3 and 4\n", "")


def test_a_block_size_that_a_kernel_does_not_have_is_one_line():
    command = [sys.executable, LLAMA / "tune.py", "rms_norm_forward", "TILES", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "rms_norm_forward has no 'TILES'; it has TILE" in done.stderr


def trace(path: Path, on_gpu: bool) -> Path:
    """Two steps, each with a product of every operator, of 10 us on the host."""
    matrices = [[6, 2], [2, 4]]
    calls = {
        "aten::mm": matrices,
        "aten::addmm": [[4], *matrices],
        "aten::bmm": [[3, 6, 2], [3, 2, 4]],
    }
    events, number = [], 0
    for step in range(2):
        mark = {"ph": "X", "pid": 1, "tid": 1, "ts": 100 * step, "dur": 90}
        events.append({**mark, "cat": "user_annotation", "name": "forward"})
        for name, shapes in calls.items():
            number += 1
            arguments = {"Input Dims": shapes, "Input type": ["float"] * 3, "External id": number}
            events.append({**mark, "cat": "cpu_op", "name": name, "dur": 10, "args": arguments})
            full = {"External id": number, "blocks per SM": 0.5, "est. achieved occupancy %": 25}
            for us in (4, 1) if on_gpu else ():
                events.append({**mark, "cat": "kernel", "name": "gemm", "dur": us, "args": full})
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.mark.parametrize(("on_gpu", "us", "full"), [(True, 5, "0.50"), (False, 10, "-")])
def test_products_of_a_trace_have_their_shapes_and_the_time_of_their_kernels(
    on_gpu, us, full, tmp_path
):
    path = trace(tmp_path / "trace.json", on_gpu)
    status, out, err = captured(gemms_of_a_trace.main, [str(path)])
    assert (status, err) == (0, "")
    rows = {row["m x k x n"]: row for row in table_of(out)}
    assert [*rows] == ["6 x 2 x 4", "3 of 6 x 2 x 4"]
    flop, moved = 2 * 6 * 2 * 4, 4 * (6 * 2 + 2 * 4 + 6 * 4)
    row = rows["6 x 2 x 4"]
    assert (row["calls"], float(row["us each"])) == ("2", us)
    assert row["FLOP/byte"] == f"{flop / moved:.1f}"
    assert row["blocks per SM"] == full
    assert f"3 products take {3 * us / 1e3:.2f} ms per step" in out


def test_a_forward_pass_of_each_version_predicts_the_same_and_keeps_nothing():
    sizes = [*TINY["openfold"], "--device", "cpu"]
    found = [forward_only.prediction(version, sizes)[1]() for version in ("V1", "V2")]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert not other.requires_grad

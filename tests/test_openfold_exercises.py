"""The programs of TinyOpenFold V2's exercises: matrix products of a trace, forward passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import TINY, captured, table_of

from exercises.tiny_openfold_v2 import forward_only, gemms_of_a_trace

SIZES = [*TINY["openfold"], "--device", "cpu"]


def trace(path: Path, on_gpu: bool, **more: object) -> Path:
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
            shapes = {"Input Dims": shapes, "Input type": ["float"] * 3, **more}
            arguments = {"External id": number, **shapes}
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
    status, out, err = captured(
        gemms_of_a_trace.main, [str(trace(tmp_path / "trace.json", on_gpu))]
    )
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
    found = [forward_only.prediction(version, SIZES)[1]() for version in ("V1", "V2")]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert not other.requires_grad

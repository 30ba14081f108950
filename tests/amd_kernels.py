"""Kernels of the sheet, compiled for an MI300X and executed as they are and with a fault in their
assembly. A program of its own, as Triton compiles in it; prints JSON for test_amd_kernels.py."""

import json
import os
import re

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
import triton.language as tl

from exercises.amd.kernels import add_relu_kernel, product_kernel, row_sum_kernel
from fusion_lab.amd.agreement import error_of
from fusion_lab.amd.compile import TARGETS, compile_for
from fusion_lab.amd.launch import TARGET, Kernel, run_grid
from fusion_lab.amd.memory import Fault


@triton.jit
def vcopy(A, C, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(C + at, tl.load(A + at, mask=at < n), mask=at < n)


def vcopy_case() -> tuple:
    """A 16th of the vcopy that rocprofiler-compute's tests have counters of: a float64 a lane."""
    a, c = torch.randn(2, 65536, dtype=torch.float64)
    return vcopy, (256,), {"A": a, "C": c, "n": len(a), "BLOCK": 256}, c, a


def add_relu_case() -> tuple:
    x, y, out = (torch.randn(1000) for _ in range(3))
    arguments = {"X": x, "Y": y, "OUT": out, "n": 1000, "BLOCK": 256}
    return add_relu_kernel, (4,), arguments, out, torch.relu(x + y)


def row_sum_case() -> tuple:
    x, out = torch.randn(8, 512), torch.zeros(8)
    arguments = {"X": x, "OUT": out, "C": 512, "BLOCK": 512}
    return row_sum_kernel, (8,), arguments, out, x.double().sum(1)


def product_case(dtype: torch.dtype = torch.float32) -> tuple:
    a, b, c = (8 * torch.randn(3, 64, 64)).to(dtype)
    return product_kernel, (1,), {"A": a, "B": b, "OUT": c, "N": 64}, c, a.double() @ b.double()


@triton.jit
def shrink(W, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(W + at, 0.9999 * tl.load(W + at, mask=at < n), mask=at < n)


def shrink_case() -> tuple:
    """Weights that are changed a little, in place."""
    weights = torch.randn(4096)
    expected = 0.9999 * weights
    return shrink, (16,), {"W": weights, "n": 4096, "BLOCK": 256}, weights, expected


def dropped(pattern: str):
    """Without the first instruction that matches."""
    return lambda text: re.sub(rf"\n\t{pattern}[^\n]*", "", text, count=1)


def replaced(pattern: str, by: str):
    def edit(text: str) -> str:
        changed = re.sub(pattern, by, text)
        assert changed != text, f"{pattern} does not occur"
        return changed

    return edit


FAULTS = {
    "a barrier dropped": (row_sum_case, dropped("s_barrier")),
    "a store to LDS dropped": (row_sum_case, dropped("ds_write")),
    "a wrong mask": (add_relu_case, replaced(r"v_cmp_gt_i32_e32 vcc, s(\d+), v",
                                             r"v_cmp_le_i32_e32 vcc, s\1, v")),
    "no mask": (add_relu_case, replaced(r"v_cndmask_b32_e32 (v\d+), v\d+, (v\d+), vcc",
                                        r"v_mov_b32_e32 \1, \2")),
    "a lane's neighbour wrong": (row_sum_case, replaced("row_shr:8", "row_shr:4")),
    "weights in place": (shrink_case, lambda text: text),
    "the store of the weights dropped": (shrink_case, dropped("buffer_store")),
    "an unknown instruction": (add_relu_case, replaced("v_max_f32_e32", "v_best_f32_e32")),
}  # fmt: skip


def outcome(case: tuple, edit=None) -> dict:
    """The error of a launch, or what stopped it, and counts."""
    kernel, grid, arguments, out, expected = case
    compiled = compile_for(TARGETS[TARGET][0], kernel, arguments)
    before = out.clone()
    try:
        text = edit(compiled.asm["amdgcn"]) if edit else None
        counts = run_grid(Kernel(compiled, text), grid, arguments, watch=True)
    except Exception as error:
        kind = "Fault" if isinstance(error, Fault) else type(error).__name__
        return {"stopped": f"{kind}: {error}"}
    error = (out - expected).abs().max() / expected.abs().max()
    _, wrong = error_of(out, expected.to(out.dtype), before if "W" in counts.read else None)
    noted = {name: counts.total(name) for name in ("bytes read", "bytes written")}
    return {
        "error": float(error),
        "wrong": wrong,
        "flop": counts.flop(),
        **noted,
        **counts.hardware(),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    results = {name: outcome(case(), edit=edit) for name, (case, edit) in FAULTS.items()}
    results |= {
        "add_relu": outcome(add_relu_case()),
        "row_sum": outcome(row_sum_case()),
        "product float32": outcome(product_case()),
        "product bfloat16": outcome(product_case(torch.bfloat16)),
        "product float16": outcome(product_case(torch.float16)),
        "vcopy": outcome(vcopy_case()),
    }
    print(json.dumps(results))

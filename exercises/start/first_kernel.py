"""A whole program around one kernel: relu(x + y), beside PyTorch's two kernels.

Run: python exercises/start/first_kernel.py
"""

import os

import torch

# without a GPU Triton's interpreter runs the kernel; Triton asks for it when it is imported
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

import triton
import triton.language as tl


@triton.jit
def add_relu_kernel(X, Y, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # the numbers of this program
    inside = at < n  # the last program reaches beyond the end
    x = tl.load(X + at, mask=inside)
    y = tl.load(Y + at, mask=inside)
    tl.store(OUT + at, tl.maximum(x + y, 0.0), mask=inside)


def add_relu(x, y):
    out = torch.empty_like(x)
    programs = triton.cdiv(len(x), 1024)
    add_relu_kernel[(programs,)](x, y, out, len(x), BLOCK=1024)  # the launch
    return out


x, y = torch.randn(2, 10_000, device="cuda" if torch.cuda.is_available() else "cpu")
print("equal to PyTorch's:", torch.equal(add_relu(x, y), torch.relu(x + y)))

#!/usr/bin/env python3
"""relu(x + y) as two kernels and as one, on this machine: predicted by bytes, then measured.

Two: PyTorch's add and its ReLU, with the sum in memory between them. One: what torch.compile makes
of both, which on a CPU needs a C++ compiler. Both write into memory that is there already, and take
turns.

Examples:
  python exercises/start/add_relu.py
  python exercises/start/add_relu.py --n 1000000     in a cache: does the prediction still hold?
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fusion_lab.cli import ToolError, at_least, documented_parser, run_tool, sign_of_life
from fusion_lab.turns import spread

PROG = Path(__file__).name
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def two_kernels(x: Tensor, y: Tensor, t: Tensor, z: Tensor) -> None:
    """z = relu(x + y) by way of t."""
    torch.add(x, y, out=t)
    torch.clamp_min(t, 0.0, out=z)


@torch.compile
def one_kernel(x: Tensor, y: Tensor, z: Tensor) -> None:
    """z = relu(x + y)."""
    z.copy_(torch.relu(x + y))


def milliseconds(work: Callable[[], None], calls: int) -> float:
    """What a call takes, the device idle before the first and after the last."""
    wait = torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    wait()
    return 1e3 * (time.perf_counter() - begin) / calls


def measure(n: int, turns: int) -> int:
    """Print bytes, prediction and measurement for vectors of n numbers."""
    x, y = torch.randn(2, n, device=DEVICE)
    t, z, fused = torch.empty(3, n, device=DEVICE)
    print(f"two kernels: read x, y, write t; read t, write z   {5 * x.nbytes / 1e6:6.0f} MB")
    print(f"one kernel:  read x, y, write z                    {3 * x.nbytes / 1e6:6.0f} MB")
    print(f"predicted by bytes: {5 / 3:.2f}x", flush=True)
    from torch._inductor import metrics

    print("compiling the one kernel", file=sys.stderr, flush=True)
    two_kernels(x, y, t, z)
    before = metrics.generated_kernel_count
    try:
        with sign_of_life("compiling"):
            one_kernel(x, y, fused)
    except RuntimeError as error:
        raise ToolError(
            f"torch.compile does not work here ({str(error).splitlines()[0]})", status=4
        ) from error
    if not torch.equal(z, fused):
        raise ToolError("the two results differ", status=1)
    print(
        f"torch.compile made {metrics.generated_kernel_count - before} kernel, the results are "
        "equal"
    )
    calls = max(1, 2**26 // n)
    pairs = [
        (
            milliseconds(lambda: two_kernels(x, y, t, z), calls),
            milliseconds(lambda: one_kernel(x, y, fused), calls),
        )
        for _ in range(turns)
    ]
    two, one = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = [slow / fast for slow, fast in pairs]
    print(
        f"measured in {turns} turns: {two:.2f} ms and {one:.2f} ms, "
        f"{statistics.median(ratios):.2f}x ({spread(ratios)})"
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(PROG, __doc__)
    parser.add_argument(
        "--n", type=at_least(1), default=2**24, help="numbers in a vector (default: %(default)s)"
    )
    parser.add_argument(
        "--turns", type=at_least(1), default=11, metavar="N", help="(default: %(default)s)"
    )
    args = parser.parse_args(argv)
    return run_tool(PROG, lambda: measure(args.n, args.turns))


if __name__ == "__main__":
    sys.exit(main())

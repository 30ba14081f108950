#!/usr/bin/env python3
"""The bias gradient of triangle attention, added up in four ways: checked, repeated for equal bits,
and timed.

kept, then added up   every row writes its gradients [N, N], another kernel adds them
                      up: what SDPA leaves to do
atomic, row by row    every row adds its gradients to one [N, N] in memory, atomically
atomic, by group      a program adds up a group of rows in registers, and then adds that atomically
V3                    the same, but each group writes its sums to a place of its own, and
                      another kernel adds these up

Examples:
  python exercises/tiny_openfold_v3/attention_bias_atomics.py --length 70 --rows 9 --group 3
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fusion_lab.cli import at_least, documented_parser

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton looks at it when it is imported
import triton
import triton.language as tl
from torch import Tensor

import tiny_openfold_v3 as v3
from exercises.tiny_llama_v3 import measure
from fusion_lab.accuracy import check_close
from tiny_openfold_v3 import (
    head_of_row,
    length_of,
    load_bias,
    load_rows,
    score_gradients,
    scores,
    split_program,
)

PROG = Path(__file__).name
REPEATS = 5  # runs whose bits are compared


@triton.jit
def atomic_bias_kernel(
    QKVG, BIAS, LOG_SUM_EXP, GRAD_ATTENTION, DELTA, GRAD_BIAS, R, H, N, B, group,
    scale: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS of `group` rows to a tile of the bias's gradient, as V3 does, but atomically."""
    N = length_of(N, ALIGNED)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(N, BLOCK_M) * tiles_n
    tile, head, g, b = split_program(tl.program_id(0), tiles, H, tl.cdiv(R, group))
    query = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    key = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    bias = load_bias(BIAS, b * H + head, query, key, N, EVEN)
    grad_bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first_row = (g * group).to(tl.int32)
    last_row = tl.minimum(g * group + group, R).to(tl.int32)
    for row in range(first_row, last_row):
        r = tl.cast(row, tl.int64)
        first, step = head_of_row(b, r, head, R, H, N, COLUMNS)
        at, x_n = QKVG + first * 4 * D, step * 4 * D
        q = load_rows(at, query, x_n, D, BLOCK_D, N, EVEN)
        k = load_rows(at + D, key, x_n, D, BLOCK_D, N, EVEN)
        v = load_rows(at + 2 * D, key, x_n, D, BLOCK_D, N, EVEN)
        grad = load_rows(GRAD_ATTENTION + first * D, query, step * D, D, BLOCK_D, N, EVEN)
        at_row = ((b * R + r) * H + head) * N
        log_sum_exp = tl.load(LOG_SUM_EXP + at_row + query, mask=query < N, other=0.0)
        delta = tl.load(DELTA + at_row + query, mask=query < N, other=0.0)
        s = scores(q, k, bias, key, N, scale, EVEN, PRECISION)  # S = scale * Q K^T + B
        _, grad_s = score_gradients(s, log_sum_exp[:, None], delta[:, None], grad, v, PRECISION)
        grad_bias += grad_s  # dB += dS
    at = (b * H + head) * N * N + query.to(tl.int64)[:, None] * N + key[None, :]
    inside = (query < N)[:, None] & (key < N)[None, :]
    tl.atomic_add(GRAD_BIAS + at, grad_bias, mask=inside, sem="relaxed")


class Case:
    """Inputs of the bias gradient: rows of N positions with H heads of D channels, as in
    triangle attention."""

    def __init__(
        self, samples: int, rows: int, length: int, heads: int, dim: int, group: int | None
    ):
        torch.manual_seed(0)
        # the interpreter rounds bfloat16 in another way
        dtype = torch.bfloat16 if measure.GPU else torch.float32
        device = measure.DEVICE
        self.qkvg = torch.randn(samples, rows, length, heads, 4, dim, device=device, dtype=dtype)
        self.bias = torch.randn(samples, heads, length, length, device=device, dtype=dtype)
        grad_out = torch.randn(samples, rows, length, heads * dim, device=device, dtype=dtype)
        gate_bias = torch.zeros(heads * dim, device=device)
        out, self.log_sum_exp = v3.attention_forward(self.qkvg, gate_bias, self.bias, False)
        gate = self.qkvg[..., 3, :].flatten(3).float().sigmoid()
        self.grad_attention = (grad_out * gate).to(dtype)  # before the gate
        self.delta = (
            (grad_out.float() * out.float())
            .unflatten(3, (heads, dim))
            .sum(-1)
            .transpose(2, 3)
            .contiguous()
        )
        self.options = v3.attention_options("attention_backward_bias", self.qkvg, False)
        tiles = (
            math.prod(triton.cdiv(length, self.options[name]) for name in ("BLOCK_M", "BLOCK_N"))
            * heads
            * samples
        )
        self.group = min(rows, group or v3.rows_per_program(self.options["PROGRAMS"], tiles, rows))
        self.tiles = tiles
        del self.options["PROGRAMS"]

    def launch(self, kernel: Callable, target: Tensor, group: int) -> None:
        """Run a kernel in which a program adds up `group` rows."""
        rows = self.qkvg.shape[1]
        inputs = self.qkvg, self.bias, self.log_sum_exp, self.grad_attention, self.delta
        launch = v3.wrap_triton(kernel)[(self.tiles * triton.cdiv(rows, group),)]
        launch(*inputs, target, B=len(self.qkvg), group=group, **self.options)

    def parts(self, group: int) -> Tensor:
        """The gradient [B, H, N, N] by V3's kernel, each group with a place of its own."""
        parts = self.log_sum_exp.new_empty(triton.cdiv(self.qkvg.shape[1], group), *self.bias.shape)
        self.launch(v3.attention_backward_bias_kernel, parts, group)
        return v3.sum_parts(parts)

    def atomic(self, group: int) -> Tensor:
        """The gradient [B, H, N, N], each group added to the same place."""
        total = self.log_sum_exp.new_zeros(self.bias.shape)
        self.launch(atomic_bias_kernel, total, group)
        return total

    def ways(self) -> dict[str, tuple[Callable[[], Tensor], int]]:
        """What to compare: a function, and how many times it writes, or adds to, each number of
        the gradient."""
        rows, groups = self.qkvg.shape[1], triton.cdiv(self.qkvg.shape[1], self.group)
        return {
            "kept, then added up": (lambda: self.parts(1), rows),
            "atomic, row by row": (lambda: self.atomic(1), rows),
            "atomic, by group": (lambda: self.atomic(self.group), groups),
            "V3": (lambda: self.parts(self.group), groups),
        }

    def expected(self) -> Tensor:
        """The gradient in float64, row by row."""
        total = torch.zeros_like(self.bias, dtype=torch.float64)
        for r in range(self.qkvg.shape[1]):
            q, k, v, _ = self.qkvg[:, r].double().permute(3, 0, 2, 1, 4)  # [B, H, N, D] each
            grad = self.grad_attention[:, r].double().unflatten(2, (v.shape[1], -1)).transpose(1, 2)
            p = (q @ k.mT / math.sqrt(q.shape[-1]) + self.bias.double()).softmax(-1)
            total += p * (grad @ v.mT - self.delta[:, r, :, :, None])
        return total


def check(case: Case) -> str:
    """What is right, and what gives equal bits; ToolError if a way is not right."""
    (_, rows, length, *_), expected = case.qkvg.shape, case.expected()
    lines = [f"{length} positions, {rows} rows in groups of {case.group}"]
    for name, (function, _) in case.ways().items():
        found = [function() for _ in range(REPEATS)]
        error = check_close(found[0], expected, name, 1e-4)
        different = max(int((found[0] != other).sum()) for other in found[1:])
        said = (
            f"up to {different} of {expected.numel()} numbers differ" if different else "equal bits"
        )
        lines.append(f"{name}: right (largest error {error:.0e}); {REPEATS} runs: {said}")
    return "\n".join(lines)


def measured(case: Case) -> Iterator[dict]:
    """Rows of the table; clearing and adding up included."""
    for name, (function, count) in case.ways().items():
        memory = (1 if "atomic" in name else count) * case.bias.numel() * 4 / 1e6
        columns = {"written, times": str(count), "gradient, MB": f"{memory:.0f}"}
        yield measure.timed(f"N={case.qkvg.shape[2]}, {name}", function, **columns)


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(PROG, __doc__)
    add, (length, rows, group) = (
        parser.add_argument,
        (256, None, None) if measure.GPU else (24, 6, 3),
    )
    add(
        "--length",
        nargs="+",
        type=at_least(1),
        default=[length],
        metavar="N",
        help=f"positions (default: {length})",
    )
    add(
        "--rows",
        type=at_least(1),
        default=rows,
        metavar="R",
        help=f"that share a bias (default: {rows or 'N'})",
    )
    add(
        "--group",
        type=at_least(1),
        default=group,
        metavar="G",
        help=f"of rows (default: {group or 'as V3 has it'})",
    )
    measure.add_output(parser)
    args = parser.parse_args(argv)
    heads, cases = 4 if measure.GPU else 2, []

    def checked() -> str:
        cases.extend(
            Case(1, args.rows or length, length, heads, 32, args.group) for length in args.length
        )
        return "\n".join(map(check, cases))

    return measure.run(PROG, checked, lambda: itertools.chain(*map(measured, cases)), args.output)


if __name__ == "__main__":
    sys.exit(main())

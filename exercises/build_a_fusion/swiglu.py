#!/usr/bin/env python3
"""SwiGLU in three ways: PyTorch's operators, torch.compile, and the two kernels that you wrote.
Each step checks one.

  operators   count the bytes that each operator reads and writes, forward and backward
  kernels     put the two kernels into an autograd.Function, and check it

Examples:
  python exercises/build_a_fusion/swiglu.py operators
  python exercises/build_a_fusion/swiglu.py kernels --solution
  python exercises/build_a_fusion/swiglu.py --scoreboard --output times.json
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from exercises.explain import explained
from exercises.puzzles import checker, scoreboard
from exercises.tiny_llama_v3 import measure
from fusion_lab.accuracy import check_gradients
from fusion_lab.cli import ToolError, run_tool, sign_of_life
from fusion_lab.files import write_text
from fusion_lab.profile.traffic import Traffic
from fusion_lab.show import Column, render
from fusion_lab.turns import compare_in_turns

PROG = Path(__file__).name
HERE = Path(__file__).resolve().parent
FORWARD = HERE.parent / "puzzles/puzzle_07_swiglu.py"
BACKWARD = HERE / "swiglu_backward.py"
FILES = (FORWARD, BACKWARD)
C = 4096
ROWS = [2 * 4**k for k in range(8)]  # that are timed
# tensors of the size of out that must be read or written
LEAST = {"forward": 3, "forward and backward": 8}


def operators(x: Tensor) -> Tensor:
    """SwiGLU of x [rows, 2 * C] as four operators."""
    gate, up = x.chunk(2, 1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return silu * up


@functools.cache
def puzzle(file: Path) -> checker.Puzzle:
    """That of one of the files; ToolError if it cannot be taken."""
    try:
        return checker.load(file).PUZZLE
    except Exception as error:  # in what the reader wrote
        text = explained(error, {str(file)})
        raise ToolError(f"{file.name}: {text}", status=1) from error


class Kernels(torch.autograd.Function):
    """SwiGLU by the two kernels; x is all that is kept."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(len(x), x.shape[1] // 2)
        puzzle(FORWARD).launch(x, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        puzzle(BACKWARD).launch(x, grad.contiguous(), grad_x)
        return grad_x


def steps(
    function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor
) -> dict[str, Callable[[], object]]:
    """What is counted and timed of a way to compute SwiGLU."""
    return {
        "forward": lambda: function(x),
        "forward and backward": lambda: torch.autograd.grad(function(x), x, grad),
    }


def tensors(rows: int, columns: int = C) -> tuple[Tensor, Tensor]:
    """x [rows, 2 * columns] and the gradient of out."""
    torch.manual_seed(0)
    x = torch.randn(rows, 2 * columns, device=measure.DEVICE, requires_grad=True)
    return x, torch.randn(rows, columns, device=measure.DEVICE)


def check_right(what: str, function: Callable[[Tensor], Tensor], rows: int, columns: int) -> None:
    """ToolError if output or gradient is not what float64 gives."""
    x, _ = tensors(rows, columns)
    check_gradients(operators, function, {"x": x}, where=f" of {what}")


def step_operators() -> None:
    """Print who reads and writes how much, in units of a tensor of the size of out."""
    x, grad = tensors(256)
    for what, step in steps(operators, x, grad).items():
        with Traffic(nn.Identity(), {}, measure.v3.NO_WORK) as traffic:
            step()
        print(f"{what}:")
        for name, moved in traffic.by_operator.items():
            print(
                f"  {name.removeprefix('aten::'):20} {moved / grad.nbytes:5.1f} x the size of out"
            )
        total = sum(traffic.by_operator.values()) / grad.nbytes
        print(
            f"  all {total:.0f}, needed {LEAST[what]}: predicted {total / LEAST[what]:.2f}x from "
            "fusion"
        )


def check_puzzles() -> None:
    """ToolError if one of the kernels is not solved; measured() says it of compiled ones."""
    for file in FILES:
        if not checker.SCOREBOARD:
            solved, text, _ = checker.verdict(puzzle(file))
            if not solved:
                raise ToolError(f"{file.name}: {text}", status=1)


def step_kernels() -> None:
    """Check the kernels alone, then as an autograd.Function."""
    with sign_of_life("your kernels"):
        check_puzzles()
        for rows, columns in ((8, 16), (5, 13)):
            check_right("your kernels", Kernels.apply, rows, columns)
    print("your kernels: output and gradient are right")


STEPS = {"operators": step_operators, "kernels": step_kernels}


def measured() -> list[dict]:
    """Microseconds, turn by turn, of all ways and of a copy that moves as many bytes as SwiGLU
    must."""
    ways = {
        "operators": operators,
        "torch.compile": torch.compile(operators, dynamic=True),
        "kernels": Kernels.apply,
    }
    for one in map(puzzle, FILES):
        try:
            scoreboard.check_on_device(one, measure.DEVICE)
        except checker.Fault as fault:
            raise ToolError(f"{one.file.name}: {fault}", status=1) from fault
    for name, function in ways.items():
        check_right(name, function, 6, 100)
    rows = []
    for count in ROWS:
        x, grad = tensors(count)
        for what, least in LEAST.items():
            source = torch.ones(least * grad.numel() // 2, device=measure.DEVICE)
            target = torch.empty_like(source)
            sides = {"copy": lambda source=source, target=target: target.copy_(source)}
            sides |= {name: steps(function, x, grad)[what] for name, function in ways.items()}
            rows.append(
                {
                    "what": what,
                    "rows": count,
                    "bytes": least * grad.nbytes,
                    "us": compare_in_turns(sides, turns=5, ms=5).us,
                }
            )
    return rows


def table(rows: list[dict]) -> str:
    """GB/s of each side as Markdown: the bytes that SwiGLU must move over the median of the
    turns."""

    def rate(row: dict, name: str) -> float:
        return row["bytes"] / statistics.median(row["us"][name]) / 1e3

    columns = [Column("GB/s", "what"), Column("MB", lambda row: row["bytes"] / 1e6, ".1f")]
    for name in rows[0]["us"]:
        columns.append(Column(name, lambda row, name=name: rate(row, name), ".0f"))
    return render(columns, rows)


def main(argv: list[str] | None = None) -> int:
    parser = checker.parser_for(PROG, __doc__)
    add = parser.add_argument
    add("step", nargs="?", choices=STEPS, help="which step to check")
    add("--output", type=Path, metavar="FILE.json", help="keep what --scoreboard measured")
    args = parser.parse_args(argv)
    if not args.step and not args.scoreboard:
        parser.error("name a step, or --scoreboard")

    def body() -> int:
        if args.solution:
            for one in map(puzzle, FILES):
                checker.use_kernels_of(one, checker.solution_of(one))
        if args.step:
            STEPS[args.step]()
        if args.scoreboard:
            if not measure.GPU:
                raise ToolError("the scoreboard needs a GPU", status=4)
            rows = measured()
            print(table(rows))
            if args.output:
                result = {"environment": measure.v3.environment(measure.DEVICE), "rows": rows}
                write_text(args.output, json.dumps(result, indent=1) + "\n")
        return 0

    return run_tool(PROG, body)


if __name__ == "__main__":
    sys.exit(main())

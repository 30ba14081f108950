#!/usr/bin/env python3
"""What other block sizes or warps do to one of TinyLlama V3's kernels: registers, occupancy, and
time on a GPU.

Registers are those of a training step at the default sizes with --use-amp, compiled for the GPU at
hand or --target; of several configurations the one with the most. Times are of kernels that only
move bytes, on tensors of 65536 rows, which are those of dev/bench/operations.py and longer than
those of the step.

Examples:
  python exercises/tiny_llama_v3/tune.py rms_norm_forward TILE 1024 4096 16384
  python exercises/tiny_llama_v3/tune.py rms_norm_backward num_warps 1 4 16 --target gfx942
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton: kernels are to be compiled

import torch
import triton

import tiny_llama_v3 as v3
from exercises.tiny_llama_v3 import measure
from exercises.tiny_llama_v3.row_operators import row_operators
from fusion_lab.amd.compile import TARGETS, compile_all, launches_of_step
from fusion_lab.cli import ToolError, documented_parser, note, run_tool
from fusion_lab.show import Column, render

PROG = Path(__file__).name


def target_here() -> str:
    """The GPU at hand by its name in TARGETS; MI300 without one."""
    if not measure.GPU:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability()
    name = (
        torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
        if torch.version.hip
        else ""
    )
    name = name or f"sm_{major}{minor}"
    if name not in TARGETS:
        raise ToolError(f"no table for {name}: give one of {', '.join(TARGETS)} with --target")
    return name


def needs(kernel: str, name: str, value: int, target: str) -> dict[str, str]:
    """Columns: what the kernel takes of a compute unit of this target."""
    backend = TARGETS[target][0].backend
    with mock.patch.multiple(v3, BACKEND=backend, INTERPRETED=False, wrap_triton=None):
        argv = f"--num-layers 1 --use-amp --blocks {kernel}:{name}={value}".split()
        launches = launches_of_step(v3, argv, backend)
        launches = [launch for launch in launches if launch.kernel.__name__ == f"{kernel}_kernel"]
        found = compile_all(launches, target)
    if failed := [text for text in found if isinstance(text, str)]:
        return {"registers": failed[0], "LDS": "", "spills": "", "waves per SIMD": ""}
    most = max(found, key=lambda need: need.vgprs + need.agprs)
    return {
        "registers": str(most.vgprs + most.agprs),
        "LDS": str(most.lds),
        "spills": str(most.spills),
        "waves per SIMD": f"{most.waves:g}",
    }


def measured(kernel: str, name: str, values: dict[int, dict[str, str]]) -> Iterator[dict]:
    """Rows of the table, with the columns of `needs`."""
    operators = (
        (operator, inputs)
        for script, operator, inputs in row_operators(65536)
        if script == v3.__name__
    )
    inputs = next((inputs for operator, inputs in operators if operator == kernel), None)
    if inputs is None:
        raise ToolError(
            f"{kernel} does not only move bytes: give --target here, and time it with "
            "dev/bench/operations.py"
        )
    function = getattr(v3, kernel)
    for value, columns in values.items():
        v3.use_settings(argparse.Namespace(blocks=f"{kernel}:{name}={value}"))
        try:
            results = function(*inputs)
            results = (results,) if isinstance(results, torch.Tensor) else results
            moved = sum(t.nbytes for t in (*inputs, *results) if isinstance(t, torch.Tensor))
            yield measure.timed(f"{name}={value}", lambda: function(*inputs), moved, **columns)
        except triton.runtime.errors.OutOfResources as error:
            note(f"{name}={value}: {error}")


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(PROG, __doc__)
    add = parser.add_argument
    add("kernel", help="as for --blocks of tiny_llama_v3.py")
    add("name", help="block size, num_warps or num_stages")
    add("values", nargs="+", type=measure.power_of_two(2**20), metavar="N")
    add("--target", choices=TARGETS, help="compile for this GPU, and time nothing")
    measure.add_output(parser)
    args = parser.parse_args(argv)
    values: dict[int, dict[str, str]] = {}

    def check() -> str:
        target = args.target or target_here()
        try:
            v3.read_blocks(f"{args.kernel}:{args.name}={max(args.values)}")
        except argparse.ArgumentTypeError as error:
            raise ToolError(str(error)) from error
        values.update(
            {value: needs(args.kernel, args.name, value, target) for value in args.values}
        )
        columns = [Column(f"{args.kernel} on {target}", lambda value: f"{args.name}={value}")]
        for what in next(iter(values.values())):
            columns.append(Column(what, lambda value, what=what: values[value][what]))
        return render(columns, [*values])

    if args.target:
        return run_tool(PROG, lambda: print(check()) or 0)
    return measure.run(PROG, check, lambda: measured(args.kernel, args.name, values), args.output)


if __name__ == "__main__":
    sys.exit(main())

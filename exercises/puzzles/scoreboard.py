"""Puzzles on a GPU, timed beside PyTorch.

Nobody can look at loads there: kernels are checked between guard zones of NaN.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch

from exercises.puzzles.areas import Area
from exercises.puzzles.checker import (
    Fault,
    Puzzle,
    areas_of,
    check_written,
    described,
    difference,
    drawn_sizes,
    expected_of,
    explained,
    fresh_inputs,
    launch,
)
from exercises.tiny_llama_v3 import measure
from fusion_lab.cli import ToolError
from fusion_lab.files import write_text
from fusion_lab.show import Column, render
from fusion_lab.turns import compare_in_turns, spread


def check_between_guards(
    puzzle: Puzzle, sizes: dict[str, int], blocks: dict[str, int], device: torch.device
) -> list[Area]:
    """Areas after a launch, in the last of the dtypes; a Fault if results or guard zones show the
    kernel to be wrong."""
    dtype = puzzle.dtypes[-1]
    areas = areas_of(puzzle, fresh_inputs(puzzle, dtype, sizes, device), dtype, device)
    launch(puzzle, areas, blocks)
    where = described(sizes)
    for area in areas:
        if area.changed_outside():
            raise Fault("writes out of bounds", f"beside {area.title()} ({where})")
        if area.changed_input():
            raise Fault("writes to an input", f"{area.title()} ({where})")
    check_written({area: area.untouched() for area in areas if area.output})
    if wrong := difference(puzzle, areas, expected_of(puzzle, areas)):
        kind = "wrong on this device"
        if " is nan and " in wrong.text:
            kind = "reads out of bounds, or computes NaN"
        raise Fault(kind, f"{wrong.text} ({where})", wrong.step)
    return areas


def check_on_device(puzzle: Puzzle, device: torch.device) -> list[Area]:
    """Areas of a launch at the large sizes; a Fault for a kernel that is not right."""
    for sizes in (puzzle.sizes[-1], drawn_sizes(puzzle)):
        check_between_guards(puzzle, sizes, puzzle.blocks, device)
    return check_between_guards(puzzle, puzzle.large, {}, device)


def score(puzzle: Puzzle) -> dict:
    """Check on the GPU, then time beside PyTorch: microseconds of both, turn by turn."""
    areas = check_on_device(puzzle, measure.DEVICE)
    dtype = puzzle.dtypes[-1]
    tensors = [area.tensor for area in areas]
    inputs = [area.tensor for area in areas if not area.output]
    sides = {"us": lambda: puzzle.launch(*tensors), "pytorch_us": puzzle.pytorch(*inputs)}
    times = compare_in_turns(sides, turns=5, ms=5)
    row = {"puzzle": puzzle.file.stem, "sizes": described(puzzle.large, dtype), **times.us}
    if puzzle.flops:
        return row | {"flops": puzzle.flops(**puzzle.large)}
    return row | {"bytes": sum(tensor.nbytes for tensor in tensors)}


def table(result: dict) -> str:
    """What was measured, as a table.

    Bytes are those of inputs and outputs, each once, on both sides.
    """
    rows, copy = [], result["copy"]
    for row in result["rows"]:
        us, pytorch = (statistics.median(row[side]) for side in ("us", "pytorch_us"))
        if "flops" in row:
            work, unit = row["flops"] / 1e6, "TFLOP/s"
        else:
            work, unit = row["bytes"] / 1e3, "GB/s"
        ratios = [other / own for own, other in zip(row["us"], row["pytorch_us"], strict=True)]
        kernel, library = (f"{work / time:.0f} {unit}" for time in (us, pytorch))
        speedup = f"{statistics.median(ratios):.2f}x ({spread(ratios)})"
        times = {"us": us, "pytorch_us": pytorch, "rate": kernel, "pytorch_rate": library}
        rows.append({"puzzle": row["puzzle"], "sizes": row["sizes"], **times, "gain": speedup})
    columns = [
        Column("puzzle", "puzzle"),
        Column("sizes", "sizes", text=True),
        Column("kernel, us", "us", ".1f"),
        Column("PyTorch, us", "pytorch_us", ".1f"),
        Column("kernel", "rate"),
        Column("PyTorch", "pytorch_rate"),
        Column("times as fast", "gain"),
    ]
    rate = copy["bytes"] / copy["us"] / 1e3
    return f"{render(columns, rows)}\n\nA large copy in the same run: {rate:.0f} GB/s."


def measured(puzzles: list[Puzzle], output: Path | None) -> int:
    """Print the scoreboard of some puzzles, and keep it; 1 if one is not solved."""
    if not measure.GPU:
        raise ToolError("the scoreboard needs a GPU", status=4)
    copy, rows = measure.timed_copy(), []
    for puzzle in puzzles:
        try:
            rows.append(score(puzzle))
        except Fault as fault:
            print(f"{puzzle.file.stem}: {fault}", flush=True)
        except Exception as error:  # of PyTorch's side, or out of memory
            print(f"{puzzle.file.stem}: not timed: {explained(error, set())}", flush=True)
    result = {"environment": measure.v3.environment(measure.DEVICE), "copy": copy, "rows": rows}
    if rows:
        print(table(result))
    if output:
        write_text(output, json.dumps(result, indent=1) + "\n")
    return 0 if len(rows) == len(puzzles) else 1

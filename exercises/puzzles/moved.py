"""What a solved kernel moved, counted load by load in the interpreter, beside what it has to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exercises.puzzles.areas import Area
from fusion_lab.files import ROOT, read_json

if TYPE_CHECKING:
    from exercises.puzzles.checker import Puzzle

MI300X = 5.3e12  # bytes per second, AMD's figure: nothing was measured on one
MORE = 1.05  # times as much as it has to, from which a tensor is named


def h100_copy() -> float:
    """Return bytes per second of a large copy on an H100, as it was measured."""
    copy = read_json(ROOT / "results/h100/puzzles.json")["copy"]
    return 1e6 * copy["bytes"] / copy["us"]


def loaded(area: Area) -> int:
    """Return how many elements of a tensor were loaded, each as often as it was."""
    return int(sum(reads.sum() for reads in area.reads.values()))


def line(areas: list[Area]) -> str:
    """Say how often the bytes of the largest tensor crossed, and how often they had to."""
    unit = max(areas, key=lambda area: area.tensor.nbytes)

    def times(elements: dict[Area, int]) -> float:
        moved = sum(count * area.tensor.itemsize for area, count in elements.items())
        return moved / unit.tensor.nbytes

    inputs = [area for area in areas if not area.output]
    outputs = [area for area in areas if area.output]
    read, needed = (
        times({area: loaded(area) for area in areas}),
        times({area: area.size for area in inputs}),
    )
    wrote, must = (
        times({area: area.stored for area in outputs}),
        times({area: area.size for area in outputs}),
    )
    text = f"moved: read {read:.2f} and wrote {wrote:.2f} times {unit.name}, "
    text += f"needed {needed:.2f} and {must:.2f}"
    if read <= MORE * needed and wrote <= MORE * must:
        return f"{text}: no byte more than once"
    again = max(areas, key=lambda area: area.tensor.itemsize * (loaded(area) - area.size))
    by_one = max((int(reads.max()) for reads in again.reads.values()), default=0)
    if by_one > 1:
        return f"{text}: a program loads {again.name} {by_one} times"
    return f"{text}: {len(again.reads)} programs load {again.name}"


def bound(puzzle: Puzzle) -> str:
    """Say what the large sizes take at least, by the bytes that have to move; "" where arithmetic
    takes longer."""
    if puzzle.flops:
        return ""
    with torch.device("meta"):
        inputs = puzzle.inputs(puzzle.dtypes[-1], puzzle.scales[0], **puzzle.large)
        outputs = puzzle.reference(*(tensor.double() for tensor in inputs.values()))
    size = sum(tensor.nbytes for tensor in inputs.values())
    for name, tensor in outputs.items():
        dtype = torch.float32 if name in puzzle.float32 else puzzle.dtypes[-1]
        size += tensor.numel() * dtype.itemsize
    sizes = ", ".join(f"{name} {number}" for name, number in puzzle.large.items())
    h100, mi300x = 1e6 * size / h100_copy(), 1e6 * size / MI300X
    return (
        f"with {sizes}: {size / 1e6:.0f} MB, so at least {h100:.0f} us at the rate of a copy on an "
        f"H100, {mi300x:.0f} us at the {MI300X / 1e12:g} TB/s of an MI300X (AMD's figure)"
    )

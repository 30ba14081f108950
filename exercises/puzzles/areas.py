"""Tensors between guard zones, which know what programs touched them, and how that is drawn."""

from __future__ import annotations

import itertools
import string

import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")
GUARD = 4096  # elements before and behind a tensor
NOBODY, SEVERAL = -1, -2  # in place of the number of a program
SIGNS = string.digits + string.ascii_letters


class Area:
    """A tensor in the middle of a buffer of NaN, and which programs touched its elements."""

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        values: Tensor | None,
        device: torch.device,
    ):
        self.name, self.shape, self.size, self.output = name, shape, shape.numel(), values is None
        self.buffer = torch.full((self.size + 2 * GUARD,), torch.nan, dtype=dtype, device=device)
        self.tensor = self.buffer[GUARD : GUARD + self.size].view(shape)
        self.bits = self.buffer.view(torch.int16 if self.buffer.itemsize == 2 else torch.int32)
        if values is None:
            self.bits += 1  # still NaN, but not what a read beside an input finds
            self.before = self.bits.clone()
        else:
            self.tensor.copy_(values)
            self.before = self.bits.clone()
        self.first = self.tensor.data_ptr()
        self.last = self.first + self.tensor.nbytes - 1
        self.written_by = np.full(
            self.size if device == CPU else 0, NOBODY
        )  # nobody looks at a GPU's stores
        self.reads: dict[int, np.ndarray] = {}  # program: how often it read each element
        self.stored = 0  # elements, each as often as it was
        self.behind: dict[int, int] = {}  # place in the buffer: program that went there
        self.left_out: set[int] = set()  # places where the mask of a store was false
        self.twice: tuple[str, int, int] | None = None  # programs that wrote one place, and it

    def places(self, addresses: np.ndarray) -> np.ndarray:
        """Which element each address is; below 0 or from `size` on it is none."""
        return (addresses.astype(np.int64) - self.first) // self.tensor.itemsize

    def named(self, place: int) -> str:
        """out[3, 4]; outside the tensor out + 13, as the kernel computes it."""
        if 0 <= place < self.size:
            return f"{self.name}[{', '.join(map(str, np.unravel_index(place, self.shape)))}]"
        return f"{self.name} {'-' if place < 0 else '+'} {abs(place)}"

    def title(self) -> str:
        return f"{self.name} [{' x '.join(map(str, self.shape))}]"

    def touched(self) -> bool:
        """Did any program read or write it, or go beside it?"""
        return bool(self.reads or self.behind or (self.written_by != NOBODY).any())

    def why_never_written(self, place: int) -> str:
        """What the other stores tell of an element that no program wrote."""
        if place in self.left_out:
            return "a store has this address, and its mask is false there"
        if self.twice:
            program, other, shared = self.twice
            return (
                f"{program} and program {other} both wrote {self.named(shared)}: a program begins "
                "at tl.program_id(axis) * BLOCK"
            )
        return "no program has this address: is the block whole, is the grid large enough?"

    def why_never_read(self) -> str:
        """Which elements of an input no program has loaded, or nothing."""
        missing = np.flatnonzero(sum(self.reads.values(), np.zeros(self.size, int)) == 0)
        if self.output or not missing.size:
            return ""
        if missing.size == self.size:
            return f"no program loads {self.name}: is another tensor in its place?"
        return (
            f"no program loads {self.named(missing[0])}, and {missing.size} of {self.size} "
            "elements in all: is a row or a block left out?"
        )

    def changed_outside(self) -> bool:
        """Was anything written to the guard zones?"""
        changed = self.bits != self.before
        return bool(changed[:GUARD].any() or changed[GUARD + self.size :].any())

    def changed_input(self) -> bool:
        """Was anything written to it, though it is only to be read?"""
        return not self.output and not self.bits.equal(self.before)

    def untouched(self) -> np.ndarray:
        """Places that are as they were."""
        return (
            (self.bits == self.before)[GUARD : GUARD + self.size].nonzero().flatten().cpu().numpy()
        )


def sign(number: int) -> str:
    """How a program is drawn."""
    return {NOBODY: ".", SEVERAL: "*"}.get(number) or SIGNS[number % len(SIGNS)]


def owners(area: Area) -> tuple[str, np.ndarray]:
    """What is drawn of a tensor, and for each element a program: who wrote it, or who read it.

    Where programs share what they read, it is the elements that one of them read.
    """
    if area.output:
        return "written by program", area.written_by
    programs = sorted(area.reads)
    readers = sum((reads > 0 for reads in area.reads.values()), np.zeros(area.size, int))
    if readers.max(initial=0) > 1:
        return f"read by several programs, here program {sign(programs[0])}'s part", np.where(
            area.reads[programs[0]] > 0, programs[0], NOBODY
        )
    numbers = np.full(area.size, NOBODY)
    for program in programs:
        numbers[area.reads[program] > 0] = program
    return "read by program", numbers


def drawn(area: Area, lines: int = 12, columns: int = 64) -> str:
    """Which program touched each element of a tensor, as text."""
    title, numbers = owners(area)
    grid = numbers.reshape(-1, area.shape[-1])
    rows = ["".join(map(sign, row[:columns])) + "..." * (len(row) > columns) for row in grid]
    alike = [(row, len(list(group))) for row, group in itertools.groupby(rows)]
    text = [f"    {row}" + (f"  {count} rows" if count > 1 else "") for row, count in alike[:lines]]
    if len(alike) > lines:
        text.append("    ...")
    if area.behind:
        beyond = "".join(sign(number) for _, number in sorted(area.behind.items()))
        text.append(f"    outside: {beyond[:columns]}")
    return "\n".join([f"{area.title()}: {title}", *text])

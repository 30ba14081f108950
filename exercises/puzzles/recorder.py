"""Looks over the interpreter's shoulder: at each load and store of a kernel, before it happens.

Which program, which line, which elements of which tensor? What lies outside is not done but noted,
a lane that a mask leaves out is NaN where tl.load has no `other`, and a second program that writes
another value is a race.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from exercises.explain import strictly_interpreted
from exercises.puzzles.areas import GUARD, NOBODY, SEVERAL, Area

A_LOOP = 3  # so many loads of single elements by a program in one line
KINDS = (
    "writes out of bounds",
    "reads out of bounds",
    "writes to an input",
    "atomic operation",
    "race",
    "reads an output",
)


@dataclass
class Recorder:
    """Looks at every load and store of a launch. `faults` are kind -> the first of that kind."""

    areas: list[Area]
    files: set[str]  # of the kernel
    poison: float = torch.nan  # what a lane is that a mask leaves out, where tl.load has no `other`
    faults: dict[str, str] = field(default_factory=dict)
    loads: int = 1  # of an element by a program that does no more than it must
    left_out: str = ""  # the first line where it was needed
    wasted: str = ""  # the first thing that is right, and done more often than it must be
    singles: Counter = field(default_factory=Counter)  # (line, program): loads of one element
    unmasked: bool = False

    def line(self) -> str:
        """The line of the kernel that runs."""
        frame = sys._getframe()
        while frame and frame.f_code.co_filename not in self.files:
            frame = frame.f_back
        return f"line {frame.f_lineno}" if frame else "the launch"

    def program(self) -> tuple[int, str]:
        """Number and name of the program that runs."""
        (x, y, z), (_, ny, nz) = self.builder.grid_idx, self.builder.grid_dim
        name = ", ".join(map(str, (x, y, z)[: 3 if nz > 1 else 2 if ny > 1 else 1]))
        return (x * ny + y) * nz + z, f"program ({name})" if "," in name else f"program {name}"

    def area(self, addresses: np.ndarray) -> Area:
        """The tensor that the first of these addresses belongs to, or is nearest to."""
        address = int(addresses.flat[0])
        return min(self.areas, key=lambda area: max(area.first - address, address - area.last, 0))

    def fault(self, kind: str, text: str) -> None:
        self.faults.setdefault(kind, text)

    def waste(self, missed: str, text: str) -> None:
        self.wasted = self.wasted or f"{missed}: {self.line()} {text}"

    def touch(
        self, what: str, addresses: np.ndarray, mask: np.ndarray
    ) -> tuple[Area, np.ndarray, np.ndarray]:
        """The tensor, the element of each lane, and which lanes may go on."""
        area = self.area(addresses[mask] if mask.any() else addresses)
        places = area.places(addresses)
        inside = (places >= 0) & (places < area.size)
        if (outside := mask & ~inside).any():
            number, name = self.program()
            place = int(places[outside][0])
            area.behind |= {int(place): number for place in places[outside]}
            why = f"the {what} has no mask; give it one, as mask=at < n"
            if not self.unmasked:
                why = "the mask is true there; are mask and stride those of this tensor"
                row = f", with {area.shape[-1]} elements in a row" if len(area.shape) > 1 else ""
                why += f"{row}?"
                if places[outside].tolist() == [area.size]:  # one too many
                    why = "the mask is true there: `<` in place of `<=`?"
            if what == "store" and area.size == math.prod(self.builder.grid_dim):
                why = f"each program has one element of {area.name}, as a row has one sum: its "
                why += "address is OUT + row, without a column"
            text = f"{name} goes to {area.named(place)}, but {area.title()} has {area.size} "
            text += f"elements: {why}"
            kind = "writes out of bounds" if what == "store" else "reads out of bounds"
            self.fault(kind, f"{self.line()}: {text}")
        return area, places, mask & inside

    def load(self, original, pointer, mask, other, *rest):
        wanted = mask.data.astype(bool)
        area, places, allowed = self.touch("load", pointer.data, wanted)
        number, name = self.program()
        touched = places[allowed]
        if wanted.size == 1:
            self.singles[self.line(), number] += 1
        reads = area.reads.setdefault(number, np.zeros(area.size, int))
        reads[touched] += 1  # once, where several lanes have the same address
        if (again := touched[reads[touched] > self.loads]).size:
            times = f"{self.loads + 1} times" if self.loads > 1 else "again"
            self.waste("load once", f"loads {area.named(again[0])} {times}: keep it in a variable")
        others = area.written_by[touched]
        if area.output and (empty := touched[others == NOBODY]).size:
            text = f"{self.line()}: {name} loads {area.named(empty[0])}, which nobody has written"
            self.fault("reads an output", text)
        elif area.output:
            self.waste("load once", f"loads what it has stored, {area.name}: keep it in a variable")
        if (foreign := touched[(others != NOBODY) & (others != number)]).size:
            self.fault(
                "race",
                f"{self.line()}: {name} reads {area.named(foreign[0])}, "
                "which another program writes",
            )
        result = original(pointer, type(mask)(allowed, mask.dtype), other, *rest)
        if np.issubdtype(result.data.dtype, np.floating):
            result.data[wanted & ~allowed] = np.nan
            if other is None and not wanted.all():
                self.left_out = self.left_out or self.line()
                result.data[~wanted] = self.poison
        return result

    def store(self, original, pointer, value, mask, *rest):
        wanted = mask.data.astype(bool)
        area, places, allowed = self.touch("store", pointer.data, wanted)
        number, name = self.program()
        touched = places[allowed]
        area.stored += touched.size
        area.left_out |= {*places[~wanted].tolist()}
        if not area.output:
            self.fault("writes to an input", f"{self.line()}: {area.name} is only to be read")
        bits = area.bits[GUARD : GUARD + area.size].numpy()
        old, others = bits[touched], area.written_by[touched]
        result = original(pointer, value, type(mask)(allowed, mask.dtype), *rest)
        foreign = (others != NOBODY) & (others != number)
        if (again := touched[others == number]).size:
            self.waste("store once", f"stores {area.named(again[0])} again: the last one is enough")
        if foreign.any():
            place = touched[foreign][0]
            self.waste("own elements", f"stores {area.named(place)}, as another program does")
            area.twice = area.twice or (name, int(others[foreign][0]), int(touched[foreign][0]))
        race = foreign & (bits[touched] != old)
        if race.any():
            place, other = touched[race][0], others[race][0]
            text = f"{name} writes {area.named(place)}, and so did program number {other}, "
            text += "with another value"
            self.fault("race", f"{self.line()}: {text}")
        for reader, seen in area.reads.items():
            if reader != number and (foreign := touched[seen[touched] > 0]).size:
                self.fault(
                    "race",
                    f"{self.line()}: {name} writes {area.named(foreign[0])}, "
                    "which another program reads",
                )
        area.written_by[touched] = np.where(race, SEVERAL, number)
        return result

    def atomic(self, original, *arguments):
        text = f"{self.line()}: the tensor that it changes is not 0 at first, "
        text += "and the order changes from run to run"
        self.fault("atomic operation", text)
        return arguments[2]  # the value, of all kinds

    def loop(self) -> str:
        """A line in which a program loads one element after the other, or nothing."""
        return next((line for (line, _), n in self.singles.items() if n >= A_LOOP), "")

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Put this recorder between the kernel and the interpreter."""
        from triton.runtime.interpreter import interpreter_builder

        self.builder = interpreter_builder

        def without_mask(original, *arguments):
            self.unmasked = True
            try:
                return original(*arguments)
            finally:
                self.unmasked = False

        wrappers = {
            "create_load": without_mask,
            "create_store": without_mask,
            "create_masked_load": self.load,
            "create_masked_store": self.store,
            "create_atomic_rmw": self.atomic,
            "create_atomic_cas": self.atomic,
        }

        def wrapped(wrapper: Callable, original: Callable) -> Callable:
            return lambda *arguments: wrapper(original, *arguments)

        for name, wrapper in wrappers.items():
            setattr(interpreter_builder, name, wrapped(wrapper, getattr(interpreter_builder, name)))
        try:
            with strictly_interpreted():
                yield
        finally:
            for name in wrappers:
                delattr(interpreter_builder, name)  # the method of the class is there again

"""Check a puzzle's kernel: run it in Triton's interpreter, name the first thing that is wrong, draw
who touched what.

The interpreter runs one program after the other, in Python. recorder.py looks at each load and
store, at sizes that fill their blocks and others, and with inputs of several scales. The results
are compared with float64, and wrong ones with the formulas of mistakes.py. With
--scoreboard the kernel is compiled for the GPU instead; see scoreboard.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exercises.explain import explained, visible_mistake
from exercises.puzzles import moved
from exercises.puzzles.areas import CPU, NOBODY, Area, drawn
from exercises.puzzles.mistakes import formulas_of
from exercises.puzzles.recorder import KINDS, Recorder
from fusion_lab.accuracy import ROUNDING, pattern
from fusion_lab.cli import documented_parser, run_tool
from fusion_lab.script import import_file

SCOREBOARD = "--scoreboard" in sys.argv
if not SCOREBOARD or not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks at it when it is imported

OTHER_SIZES = "at other sizes and blocks only, "
NEXT = {  # kind of a fault: the next step
    "mask": "other=0.0 adds nothing to a sum, and -inf is never a maximum",
    "race": "each element belongs to one program: its number must be part of the address",
    "atomic operation": "let each program write to a place of its own",
    "reads an output": "nothing is in it at first: add up in a block, and store it once",
    "wrong at odd sizes": "does what the mask leaves out take part, is BLOCK in place of a size?",
    OTHER_SIZES: "is there a number in place of a size or of a block?",
    "wrong where inputs are small": "a constant counts there: is eps where the formula has it?",
    "wrong where inputs are large": "what becomes inf on the way, or 0, so that nothing is left?",
    "dtype, right in float32": "convert directly behind the load, .to(tl.float32), and round once",
    "dtype, the errors": "add up in float32, and round where it is stored",
    "wrong:": "compare the code with the formula at the head of the file",
}
WHOLE = {  # name in a kernel: what was not practised
    "softmax": "the maximum, exp and the sum, which tl.softmax has in it",
    "float64": "float32, which is enough: a GPU has far fewer units for float64",
}


@dataclass(frozen=True)
class Puzzle:
    """What the file of a puzzle says of its kernel.

    Sizes are keyword arguments of `inputs`, blocks of `launch`, which has large ones by itself.
    """

    launch: Callable[..., None]  # (*inputs, *outputs, **blocks)
    inputs: Callable[..., dict[str, Tensor]]  # (dtype, scale, **sizes)
    # (*inputs), all in float64; their names are those of the outputs
    reference: Callable[..., dict[str, Tensor]]
    even: dict[str, int]  # sizes that fill their blocks
    odd: tuple[dict[str, int], ...]  # sizes that do not
    blocks: dict[str, int]  # small ones, for the picture
    large: dict[str, int]  # sizes for the scoreboard
    pytorch: Callable[..., Callable[[], object]]  # (*inputs) -> what the scoreboard compares with
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # the scoreboard takes the last
    float32: tuple[str, ...] = ()  # outputs that are float32 for all dtypes
    flops: Callable[..., int] | None = None  # (**sizes); None: the bytes are counted
    tolerance: float = 1e-5  # of the largest value, rounding the result to its dtype apart
    scales: tuple[float, ...] = (1.0,)  # of inputs; in small ones eps counts, large ones overflow
    loads: int = 1  # of an element by a program that does no more than it must

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        return self.even, *self.odd

    @property
    def file(self) -> Path:
        return Path(self.launch.__code__.co_filename)


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers, mean 0 and deviation 1."""
    return torch.randn(shape).to(dtype)


class Fault(Exception):
    """What is wrong with a kernel: kind and text are one line;

    `areas` are of the run that showed it.
    """

    def __init__(self, kind: str, text: str, next_step: str = ""):
        self.kind, self.text = kind, text
        line = f"{kind}: {text}"
        step = next_step or next((step for kind, step in NEXT.items() if line.startswith(kind)), "")
        super().__init__(f"{line}; {step}" if step else line)
        self.areas: list[Area] = []


def fresh_inputs(
    puzzle: Puzzle,
    dtype: torch.dtype,
    sizes: dict[str, int],
    device: torch.device,
    scale: float | None = None,
) -> dict[str, Tensor]:
    """Random inputs that no call has seen before; of the puzzle's first scale, or this one."""
    torch.seed()
    with device:
        return puzzle.inputs(dtype, scale or puzzle.scales[0], **sizes)


def areas_of(
    puzzle: Puzzle, inputs: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> list[Area]:
    """Areas of inputs and outputs in the order of the launch."""
    shapes = puzzle.reference(*(tensor.double().to("meta") for tensor in inputs.values()))
    areas = [Area(name, x.shape, x.dtype, x, device) for name, x in inputs.items()]
    for name, x in shapes.items():
        own = torch.float32 if name in puzzle.float32 else dtype
        areas.append(Area(name, x.shape, own, None, device))
    return areas


def expected_of(puzzle: Puzzle, areas: list[Area]) -> dict[str, Tensor]:
    """The right outputs in float64, made after the launch: no kernel finds them in memory."""
    return puzzle.reference(*(area.tensor.double() for area in areas if not area.output))


# --- one run, and what all of them say


def kernels(puzzle: Puzzle) -> list[Callable]:
    """The puzzle's kernels as the functions that the reader wrote."""
    found = [value for name, value in puzzle.launch.__globals__.items() if name.endswith("_kernel")]
    return [getattr(kernel, "fn", kernel) for kernel in found]


def functions(puzzle: Puzzle) -> list[Callable]:
    """The kernels and all functions with @triton.jit beside them, which they may call."""
    found = kernels(puzzle)
    for kernel in kernels(puzzle):
        beside = (getattr(value, "fn", None) for value in kernel.__globals__.values())
        found += [one for one in beside if one and one.__globals__ is kernel.__globals__]
    return found


def kernel_files(puzzle: Puzzle) -> set[str]:
    """The files in which they stand."""
    return {str(puzzle.file), *(kernel.__code__.co_filename for kernel in kernels(puzzle))}


def launch(puzzle: Puzzle, areas: list[Area], blocks: dict[str, int]) -> None:
    """Run the kernel; a Fault for what it raises, or a compiler would."""
    for kernel in functions(puzzle):
        if text := visible_mistake(kernel):
            raise Fault("error", text)
    try:
        puzzle.launch(*(area.tensor for area in areas), **blocks)
        if SCOREBOARD:
            torch.cuda.synchronize()
    except Exception as error:
        raise Fault("error", explained(error, kernel_files(puzzle))) from error


def interpret(
    puzzle: Puzzle, areas: list[Area], blocks: dict[str, int], poison: float = torch.nan
) -> Recorder:
    """Run the kernel in the interpreter.

    A Fault names what a look at its loads and stores shows.
    """
    recorder = Recorder(areas, kernel_files(puzzle), poison, loads=puzzle.loads)
    with recorder.recording():
        launch(puzzle, areas, blocks)
    for kind in KINDS:
        if kind in recorder.faults:
            raise Fault(kind, recorder.faults[kind])
    check_written({area: (area.written_by == NOBODY).nonzero()[0] for area in areas if area.output})
    return recorder


def check_written(untouched: dict[Area, np.ndarray]) -> None:
    """Fault where there are elements of outputs that no program wrote."""
    if all(len(places) == area.size for area, places in untouched.items()):
        names = " and ".join(area.name for area in untouched)
        raise Fault(
            "not solved yet", f"nothing is written to {names}; `# your code` is the place for it"
        )
    for area, places in untouched.items():
        if len(places):
            text = f"{area.named(places[0])}, {len(places)} of {area.size} elements in all"
            raise Fault("never written", text, area.why_never_written(int(places[0])))


class Wrong(NamedTuple):
    """What is wrong with an output."""

    error: float  # the largest, over the largest value
    text: str  # the first wrong element
    formula: str  # what it is instead, or nothing
    step: str  # that, or where else to look


def tolerances(puzzle: Puzzle, area: Area, right: Tensor) -> Tensor:
    """The largest error of each element that passes."""
    # of outputs in float32 nothing is rounded to 16 bits on the way
    share = min(puzzle.tolerance, 5e-5) if area.name in puzzle.float32 else puzzle.tolerance
    rounding = 0.51 * torch.finfo(area.tensor.dtype).eps * right.abs()
    # where sigmoid is 0 in float32, and 1e-40 in float64, nothing is wrong
    return share * right.abs().max().clamp(min=1e-20) + rounding


def named(puzzle: Puzzle, areas: list[Area], area: Area) -> str:
    """Which other formula this output is, or nothing."""
    inputs = [one.tensor.double() for one in areas if not one.output]
    found = area.tensor.double()
    for text, other in formulas_of(puzzle.file.stem, inputs).items():
        error = (found - other).abs().nan_to_num(torch.inf)
        error[(found == other) | (found.isnan() & other.isnan())] = 0.0
        if (error <= tolerances(puzzle, area, other.nan_to_num())).all():
            return text
    return ""


def never_read(areas: list[Area]) -> str:
    """Which element of an input no program loads, or nothing; nobody looks at a GPU's loads."""
    looked_at = any(area.reads for area in areas)
    return next(filter(None, (area.why_never_read() for area in areas)), "") if looked_at else ""


def difference(puzzle: Puzzle, areas: list[Area], expected: dict[str, Tensor]) -> Wrong | None:
    """What is wrong with the first output that is; None where all is right."""
    for area in areas:
        if area.output:
            found, right = area.tensor.double(), expected[area.name]
            scale, error = right.abs().max().item(), (found - right).abs()
            wrong = ~(error <= tolerances(puzzle, area, right))
            if wrong.any():
                place = int(wrong.flatten().nonzero()[0])
                values = (
                    f"is {found.flatten()[place]:.6g} and should be {right.flatten()[place]:.6g}"
                )
                text = f"{area.named(place)} {values}; {int(wrong.sum())} of {area.size} elements"
                largest = (error.max() / scale).nan_to_num(torch.inf).item()
                common = pattern(found, right, wrong)
                formula = named(puzzle, areas, area)
                step = formula or common or never_read(areas)
                return Wrong(largest, f"{text} are wrong", formula, step)
    return None


class Run(NamedTuple):
    """What a kernel is tried with."""

    dtype: torch.dtype
    sizes: dict[str, int]
    scale: float  # of the inputs
    blocks: dict[str, int]

    def __str__(self) -> str:
        words = [f"inputs x {self.scale:g}"] if self.scale != 1 else []
        return ", ".join([described({**self.sizes, **self.blocks}, self.dtype), *words])


def check_masks(puzzle: Puzzle, areas: list[Area], run: Run, line: str) -> None:
    """Fault if the result depends on what a load without `other` returns where its mask is
    false."""
    inputs = {area.name: area.tensor for area in areas if not area.output}
    again = areas_of(puzzle, inputs, run.dtype, CPU)
    interpret(puzzle, again, run.blocks, poison=0.0)
    if not all(one.bits.equal(other.bits) for one, other in zip(areas, again, strict=True)):
        raise Fault(
            "mask", f"{line} loads without `other`, and what the mask leaves out reaches the result"
        )


def described(sizes: dict[str, int], dtype: torch.dtype | None = None) -> str:
    """n = 13, and the dtype."""
    words = [f"{name} = {size}" for name, size in sizes.items()]
    return ", ".join([*words, str(dtype).removeprefix("torch.")] if dtype else words)


def not_practised(puzzle: Puzzle, recorder: Recorder) -> str:
    """What a right kernel does without, or nothing."""
    if line := recorder.loop():
        return f"blocks: {line} loads one element after the other, tl.arange all of a row at once"
    used = {name for kernel in functions(puzzle) for name in kernel.__code__.co_names}
    if missed := next((what for name, what in WHOLE.items() if name in used), ""):
        return missed
    if puzzle.flops and "dot" not in used:
        return "the units for matrices, which tl.dot uses"
    return recorder.wasted


def runs_of(puzzle: Puzzle) -> list[Run]:
    """All sizes with inputs of all scales; then sizes that nobody knows before, where every second
    block is twice as large, and where the others are."""
    names = [*puzzle.blocks]
    larger = [
        {name: size * (2 if name in names[first::2] else 1) for name, size in puzzle.blocks.items()}
        for first in range(2 if names else 1)
    ]
    runs = []
    for dtype in puzzle.dtypes:
        for sizes, scale in itertools.product(puzzle.sizes, puzzle.scales):
            runs.append(Run(dtype, sizes, scale, puzzle.blocks))
        for blocks in larger:
            runs.append(Run(dtype, drawn_sizes(puzzle), random.choice(puzzle.scales), blocks))
    return runs


def try_run(puzzle: Puzzle, run: Run) -> tuple[list[Area], Recorder, Wrong | None]:
    """The areas after a run, what was seen, and what is wrong; a Fault has the areas, too."""
    inputs = fresh_inputs(puzzle, run.dtype, run.sizes, CPU, run.scale)
    areas = areas_of(puzzle, inputs, run.dtype, CPU)
    try:
        recorder = interpret(puzzle, areas, run.blocks)
        found = difference(puzzle, areas, expected_of(puzzle, areas))
        if found and recorder.left_out:
            check_masks(puzzle, areas, run, recorder.left_out)
    except Fault as fault:
        fault.areas = areas
        raise
    return areas, recorder, found


def check(puzzle: Puzzle) -> tuple[list[Area], str]:
    """Try all runs; returns the areas of a small one and what was not practised. A Fault names what
    is wrong."""
    wrong, right, missed = [], [], ""
    for run in runs_of(puzzle):
        try:
            areas, recorder, found = try_run(puzzle, run)
        except Fault as fault:
            if wrong or any(run.sizes is sizes for sizes in puzzle.sizes):
                raise
            other = Fault(f"{OTHER_SIZES}{fault.kind}", f"{fault.text} ({run})")
            other.areas = fault.areas
            raise other from fault
        (wrong if found else right).append((run, areas, found))
        missed = missed or not_practised(puzzle, recorder)
        if not right:
            break  # wrong with the plainest inputs: no other run says more
    if wrong:
        run, areas, found = wrong[0]
        kind = kind_of(puzzle, [(run, found) for run, _, found in wrong])
        step = found.step if kind == "wrong" else found.formula
        if kind == "wrong" and not step:
            step = step_of_one_block(puzzle, run)
        fault = Fault(kind, f"{found.text} ({run})", step)
        fault.areas = areas
        raise fault
    # of the first odd sizes, if there are any
    shown = next((areas for run, areas, _ in right if run.sizes in puzzle.odd), right[0][1])
    return shown, missed


def step_of_one_block(puzzle: Puzzle, run: Run) -> str:
    """Where to look, from a run in which no size is larger than a block; or nothing."""
    if not puzzle.blocks:
        return ""
    smallest = min(puzzle.blocks.values())
    sizes = {
        name: min(size, puzzle.blocks.get(f"BLOCK_{name}", smallest))
        for name, size in puzzle.even.items()
    }
    try:
        *_, found = try_run(puzzle, run._replace(sizes=sizes))
    except Fault:
        return ""
    if found:
        return found.step
    return "right if all is one block: what of a block is lost or wrong when the next one comes?"


def drawn_sizes(puzzle: Puzzle) -> dict[str, int]:
    """Sizes that nobody knows before; those that must fill their blocks are twice as large."""
    may_be_odd = {name for odd in puzzle.odd for name in odd if odd[name] != puzzle.even[name]}
    return {
        name: random.randint(size // 2 + 1, 2 * size) if name in may_be_odd else 2 * size
        for name, size in puzzle.even.items()
    }


def kind_of(puzzle: Puzzle, wrong: list[tuple[Run, Wrong]]) -> str:
    """What the runs with wrong values have in common."""
    runs, usual = [run for run, _ in wrong], puzzle.scales[0]
    if torch.float32 in puzzle.dtypes and all(run.dtype != torch.float32 for run in runs):
        return "dtype, right in float32 and wrong in float16"
    if all(run.sizes is not puzzle.even for run in runs):
        if any(run.sizes in puzzle.odd for run in runs):
            return f"wrong at odd sizes only, right with {described(puzzle.even)}"
        return f"{OTHER_SIZES}wrong"
    if all(run.scale < usual for run in runs):
        return "wrong where inputs are small"
    if all(run.scale > usual for run in runs):
        return "wrong where inputs are large"
    if all(found.error < ROUNDING and not found.formula for _, found in wrong):
        return "dtype, the errors are as large as those of 16 bits"
    return "wrong"


# --- the programs


def load(path: Path) -> ModuleType:
    """The file of a puzzle as a module."""
    return import_file(path, f"{path.parent.name}_{path.stem}")


def use_kernels_of(puzzle: Puzzle, path: Path) -> None:
    """Put the kernels of another file in place of those in the puzzle's."""
    module = import_file(path, f"{path.parent.name}_{path.stem}")
    kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    puzzle.launch.__globals__.update(kernels)


def solution_of(puzzle: Puzzle) -> Path:
    return puzzle.file.parent / "solutions" / puzzle.file.name


def verdict(puzzle: Puzzle) -> tuple[bool, str, list[Area]]:
    """Is it solved, what the reader is told, and what to draw."""
    try:
        areas, missed = check(puzzle)
    except Fault as fault:
        return False, str(fault), fault.areas
    dtypes = " and ".join(str(dtype).removeprefix("torch.") for dtype in puzzle.dtypes)
    text = f"solved ({'; '.join(map(described, puzzle.sizes))}; {dtypes})"
    return True, text + (f". Not practised: {missed}" if missed else ""), areas


def parser_for(prog: str, documentation: str) -> argparse.ArgumentParser:
    """The arguments of all puzzles."""
    parser = documented_parser(prog, documentation)
    add = parser.add_argument
    add("--solution", action="store_true", help="take the kernel from solutions/")
    add(
        "--scoreboard",
        action="store_true",
        help="compile it for the GPU and time it beside PyTorch",
    )
    return parser


def main(puzzle: Puzzle, argv: list[str] | None = None) -> int:
    """Check this puzzle and draw it; returns 0 if it is solved, 1 if not."""
    file = puzzle.file
    documentation = (
        f"Check the kernel of {file.name}.\n\nExamples:\n  python exercises/puzzles/{file.name}"
    )
    args = parser_for(file.name, documentation).parse_args(argv)

    def body() -> int:
        if args.solution:
            use_kernels_of(puzzle, solution_of(puzzle))
        if args.scoreboard:
            from exercises.puzzles import scoreboard

            return scoreboard.measured([puzzle], None)
        solved, text, areas = verdict(puzzle)
        if any(area.touched() for area in areas):
            print("\n".join(map(drawn, areas)))
        print(f"{file.stem}: {text}")
        if solved:
            print("\n".join(filter(None, (moved.line(areas), moved.bound(puzzle)))))
        return 0 if solved else 1

    return run_tool(file.name, body)

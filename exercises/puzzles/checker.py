"""Check a puzzle's kernel: run it in Triton's interpreter, name the first thing that is wrong, draw
who touched what.

The interpreter runs one program after the other, in Python. Here each of its loads and stores is
looked at before it happens: which program, which line, which elements of which tensor. What lies
outside is not done but reported, a lane that a mask leaves out is NaN, and a second program that
writes another value into an element is a race. The results are compared with float64.

With --scoreboard the kernel is compiled for the GPU. Nobody can look at its loads there, so the
tensors lie between guard zones of NaN; then it is timed beside PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import statistics
import string
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from workshop.cli import ToolError, documented_parser, needed, run_tool
from workshop.files import write_text
from workshop.show import Column, render
from workshop.turns import spread

with needed():
    import numpy as np
    import torch
    from torch import Tensor

SCOREBOARD = "--scoreboard" in sys.argv
# compiled: a step of build_a_fusion
if not (SCOREBOARD or "compiled" in sys.argv) or not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks at it when it is imported

CPU = torch.device("cpu")
GUARD = 4096  # elements before and behind a tensor
NOBODY, SEVERAL = -1, -2  # in place of the number of a program
SIGNS = string.digits + string.ascii_letters
ROUNDING = 5e-3  # errors below this share of the largest value are rounding to 16 bits
KINDS = (
    "writes out of bounds",
    "reads out of bounds",
    "writes to an input",
    "atomic operation",
    "race",
)


@dataclass(frozen=True)
class Puzzle:
    """What the file of a puzzle says of its kernel.

    Sizes are keyword arguments of `inputs`, blocks of `launch`, which has large ones by itself.
    """

    launch: Callable[..., None]  # (*inputs, *outputs, **blocks)
    inputs: Callable[..., dict[str, Tensor]]  # (dtype, **sizes)
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

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.areas: list[Area] = []


# --- tensors between guard zones


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
        if values is not None:
            self.tensor.copy_(values)
        bits = torch.int16 if self.buffer.itemsize == 2 else torch.int32
        self.bits = self.buffer.view(bits)
        self.before = self.bits.clone()
        self.first = self.tensor.data_ptr()
        self.last = self.first + self.tensor.nbytes - 1
        # nobody looks at a GPU's stores
        self.written_by = np.full(self.size if device == CPU else 0, NOBODY)
        self.reads: dict[int, np.ndarray] = {}  # program: which elements it read
        self.behind: dict[int, int] = {}  # place in the buffer: program that went there

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

    def changed_outside(self) -> bool:
        """Was anything written to the guard zones?"""
        changed = self.bits != self.before
        return bool(changed[:GUARD].any() or changed[GUARD + self.size :].any())

    def untouched(self) -> np.ndarray:
        """Places that are as they were."""
        return (
            (self.bits == self.before)[GUARD : GUARD + self.size].nonzero().flatten().cpu().numpy()
        )


def prepare(
    puzzle: Puzzle, dtype: torch.dtype, sizes: dict[str, int], device: torch.device
) -> tuple[list[Area], dict[str, Tensor]]:
    """Areas of inputs and outputs in the order of the launch, and the outputs that they should
    have, in float64."""
    torch.manual_seed(0)
    with device:
        inputs = puzzle.inputs(dtype, **sizes)
    expected = puzzle.reference(*(tensor.double() for tensor in inputs.values()))
    areas = [
        Area(name, tensor.shape, tensor.dtype, tensor, device) for name, tensor in inputs.items()
    ]
    for name, tensor in expected.items():
        areas.append(
            Area(
                name, tensor.shape, torch.float32 if name in puzzle.float32 else dtype, None, device
            )
        )
    return areas, expected


# --- looking over the interpreter's shoulder


@dataclass
class Recorder:
    """Looks at every load and store of a launch. `faults` are kind -> the first of that kind."""

    areas: list[Area]
    files: set[str]  # of the kernel
    poison: float = torch.nan  # what a lane is that a mask leaves out, where tl.load has no `other`
    faults: dict[str, str] = field(default_factory=dict)
    left_out: str = ""  # the first line where it was needed
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
            why = f"the {what} has no mask" if self.unmasked else "the mask is true there"
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
        area.reads.setdefault(number, np.zeros(area.size, bool))[touched] = True
        others = area.written_by[touched]
        if (foreign := touched[(others != NOBODY) & (others != number)]).size:
            self.fault(
                "race",
                f"{self.line()}: {name} reads {area.named(foreign[0])}, which another program "
                "writes",
            )
        result = original(pointer, type(mask)(allowed, mask.dtype), other, *rest)
        if np.issubdtype(result.data.dtype, np.floating):
            result.data[wanted & ~allowed] = np.nan
            if other is None and not wanted.all():
                self.left_out = self.left_out or self.line()
                result.data[~wanted] = self.poison
        return result

    def store(self, original, pointer, value, mask, *rest):
        area, places, allowed = self.touch("store", pointer.data, mask.data.astype(bool))
        number, name = self.program()
        touched = places[allowed]
        if not area.output:
            self.fault("writes to an input", f"{self.line()}: {area.name} is only to be read")
        bits = area.bits[GUARD : GUARD + area.size].numpy()
        old, others = bits[touched], area.written_by[touched]
        result = original(pointer, value, type(mask)(allowed, mask.dtype), *rest)
        race = (others != NOBODY) & (others != number) & (bits[touched] != old)
        if race.any():
            place, other = touched[race][0], others[race][0]
            text = f"{name} writes {area.named(place)}, and so did program number {other}, "
            text += "with another value"
            self.fault("race", f"{self.line()}: {text}")
        for reader, seen in area.reads.items():
            if reader != number and (foreign := touched[seen[touched]]).size:
                self.fault(
                    "race",
                    f"{self.line()}: {name} writes {area.named(foreign[0])}, which another program "
                    "reads",
                )
        area.written_by[touched] = np.where(race, SEVERAL, number)
        return result

    def atomic(self, original, *arguments):
        text = f"{self.line()}: the tensor that it changes is not 0 at first, "
        text += "and the order changes from run to run"
        self.fault("atomic operation", text)
        return arguments[2]  # the value, of all kinds

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
            with np.errstate(all="ignore"):
                yield
        finally:
            for name in wrappers:
                delattr(interpreter_builder, name)  # the method of the class is there again


# --- one run, and what all of them say


def kernel_files(puzzle: Puzzle) -> set[str]:
    """The files in which the puzzle's kernels stand."""
    kernels = [
        value for name, value in puzzle.launch.__globals__.items() if name.endswith("_kernel")
    ]
    return {str(puzzle.file), *(kernel.fn.__code__.co_filename for kernel in kernels)}


def place_of(error: BaseException, files: set[str]) -> str:
    """Where in these files it happened: 'line 12: ', or nothing."""
    lines = []
    while error:
        lines += [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename in files
        ]
        error = error.__cause__
    return f"line {lines[-1]}: " if lines else ""


def explained(error: Exception, files: set[str]) -> str:
    """An error in what the reader wrote, as one line."""
    if hasattr(error, "node") and hasattr(error, "src"):  # of Triton's compiler
        code = (error.src or "").splitlines()[error.node.lineno - 1 : error.node.lineno]
        return f"`{''.join(code).strip()}` does not compile: {str(error).splitlines()[-1]}"
    where = place_of(error, files)
    while error.__cause__:
        error = error.__cause__
    return f"{where}{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def launch(puzzle: Puzzle, areas: list[Area], blocks: dict[str, int]) -> None:
    """Run the kernel; a Fault for what it raises."""
    try:
        puzzle.launch(*(area.tensor for area in areas), **blocks)
        if SCOREBOARD:
            torch.cuda.synchronize()
    except Exception as error:
        raise Fault("error", explained(error, kernel_files(puzzle))) from error


def interpret(puzzle: Puzzle, areas: list[Area], poison: float = torch.nan) -> Recorder:
    """Run the kernel in the interpreter.

    A Fault names what a look at its loads and stores shows.
    """
    recorder = Recorder(areas, kernel_files(puzzle), poison)
    with recorder.recording():
        launch(puzzle, areas, puzzle.blocks)
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
            raise Fault(
                "never written",
                f"{area.named(places[0])}, {len(places)} of {area.size} elements in all",
            )


def difference(puzzle: Puzzle, areas: list[Area], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error over the largest value, and the first wrong element.

    0 and nothing where all is right.
    """
    for area in areas:
        if area.output:
            found, right = area.tensor.double(), expected[area.name]
            scale, error = right.abs().max().item(), (found - right).abs()
            rounding = 0.51 * torch.finfo(area.tensor.dtype).eps * right.abs()
            wrong = ~(error <= puzzle.tolerance * scale + rounding)
            if wrong.any():
                place = int(wrong.flatten().nonzero()[0])
                values = (
                    f"is {found.flatten()[place]:.6g} and should be {right.flatten()[place]:.6g}"
                )
                count = f"{int(wrong.sum())} of {area.size} elements are wrong"
                return (error.max() / scale).nan_to_num(
                    torch.inf
                ).item(), f"{area.named(place)} {values}; {count}"
    return 0.0, ""


def check_masks(
    puzzle: Puzzle, areas: list[Area], dtype: torch.dtype, sizes: dict[str, int], line: str
) -> None:
    """Fault if the result depends on what a load without `other` returns where its mask is
    false."""
    again, _ = prepare(puzzle, dtype, sizes, CPU)
    interpret(puzzle, again, poison=0.0)
    if not all(a.tensor.equal(b.tensor) for a, b in zip(areas, again, strict=True)):
        raise Fault(
            "mask", f"{line} loads without `other`, and what the mask leaves out reaches the result"
        )


def described(sizes: dict[str, int], dtype: torch.dtype | None = None) -> str:
    """n = 13, and the dtype."""
    words = [f"{name} = {size}" for name, size in sizes.items()]
    return ", ".join([*words, str(dtype).removeprefix("torch.")] if dtype else words)


def check(puzzle: Puzzle) -> list[Area]:
    """Run all sizes and dtypes; returns the areas of a small run, Fault names what is wrong."""
    wrong, right = [], []
    for dtype, sizes in itertools.product(puzzle.dtypes, puzzle.sizes):
        areas, expected = prepare(puzzle, dtype, sizes, CPU)
        try:
            recorder = interpret(puzzle, areas)
            error, text = difference(puzzle, areas, expected)
            if text and recorder.left_out:
                check_masks(puzzle, areas, dtype, sizes, recorder.left_out)
        except Fault as fault:
            fault.areas = areas
            raise
        if text:
            wrong.append((dtype, sizes, error, text, areas))
        else:
            right.append(areas)
    if wrong:
        dtype, sizes, _, text, areas = wrong[0]
        fault = Fault(kind_of(puzzle, wrong), f"{text} ({described(sizes, dtype)})")
        fault.areas = areas
        raise fault
    return right[:2][-1]  # the first odd sizes, if there are any


def kind_of(puzzle: Puzzle, wrong: list[tuple]) -> str:
    """What the runs with wrong values have in common."""
    dtypes = {dtype for dtype, *_ in wrong}
    if torch.float32 in puzzle.dtypes and torch.float32 not in dtypes:
        return "dtype, right in float32 and wrong in float16"
    if all(sizes is not puzzle.even for _, sizes, *_ in wrong):
        return f"wrong at odd sizes only, right with {described(puzzle.even)}"
    if all(error < ROUNDING for _, _, error, *_ in wrong):
        return "dtype, the errors are as large as those of 16 bits"
    return "wrong"


def check_on_gpu(puzzle: Puzzle, sizes: dict[str, int], blocks: dict[str, int]) -> None:
    """Fault if the compiled kernel is wrong, in the last of the dtypes."""
    areas, expected = prepare(puzzle, puzzle.dtypes[-1], sizes, torch.device("cuda"))
    launch(puzzle, areas, blocks)
    for area in areas:
        if area.changed_outside():
            raise Fault("writes out of bounds", f"beside {area.title()} ({described(sizes)})")
    check_written({area: area.untouched() for area in areas if area.output})
    _, text = difference(puzzle, areas, expected)
    if text:
        raise Fault("wrong on the GPU", f"{text} ({described(sizes)})")


# --- the picture


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
    if sum(area.reads.values(), np.zeros(area.size, int)).max(initial=0) > 1:
        return f"read by several programs, by program {sign(programs[0])}", np.where(
            area.reads[programs[0]], programs[0], NOBODY
        )
    numbers = np.full(area.size, NOBODY)
    for program in programs:
        numbers[area.reads[program]] = program
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


# --- the scoreboard


def score(puzzle: Puzzle) -> dict:
    """Check on the GPU, then time beside PyTorch: microseconds of both, turn by turn."""
    from exercises.tiny_llama_v3 import measure

    check_on_gpu(puzzle, puzzle.sizes[-1], puzzle.blocks)
    check_on_gpu(puzzle, puzzle.large, {})
    dtype = puzzle.dtypes[-1]
    areas, _ = prepare(puzzle, dtype, puzzle.large, torch.device("cuda"))
    tensors = [area.tensor for area in areas]
    inputs = [area.tensor for area in areas if not area.output]
    times = measure.in_turns(
        {"us": lambda: puzzle.launch(*tensors), "pytorch_us": puzzle.pytorch(*inputs)}
    )
    row = {"puzzle": puzzle.file.stem, "sizes": described(puzzle.large, dtype), **times}
    if puzzle.flops:
        return row | {"flops": puzzle.flops(**puzzle.large)}
    return row | {"bytes": sum(tensor.nbytes for tensor in tensors)}


def scoreboard(result: dict) -> str:
    """What was measured, as a table.

    Bytes are those of inputs and outputs, each once, on both sides.
    """
    rows, copy = [], result["copy"]
    for row in result["rows"]:
        us, pytorch = (statistics.median(row[side]) for side in ("us", "pytorch_us"))
        work, unit = (
            (row["flops"] / 1e6, "TFLOP/s") if "flops" in row else (row["bytes"] / 1e3, "GB/s")
        )
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
    from exercises.tiny_llama_v3 import measure

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
        print(scoreboard(result))
    if output:
        write_text(output, json.dumps(result, indent=1) + "\n")
    return 0 if len(rows) == len(puzzles) else 1


# --- the programs


def load(path: Path) -> ModuleType:
    """A file as a module."""
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks for the source there
    spec.loader.exec_module(module)
    return module


def use_kernels_of(puzzle: Puzzle, path: Path) -> None:
    """Put the kernels of another file in place of those in the puzzle's."""
    kernels = {name: value for name, value in vars(load(path)).items() if name.endswith("_kernel")}
    puzzle.launch.__globals__.update(kernels)


def solution_of(puzzle: Puzzle) -> Path:
    return puzzle.file.parent / "solutions" / puzzle.file.name


def verdict(puzzle: Puzzle) -> tuple[bool, str, list[Area]]:
    """Is it solved, what the reader is told, and what to draw."""
    try:
        areas = check(puzzle)
    except Fault as fault:
        return False, str(fault), fault.areas
    dtypes = " and ".join(str(dtype).removeprefix("torch.") for dtype in puzzle.dtypes)
    return True, f"solved ({'; '.join(map(described, puzzle.sizes))}; {dtypes})", areas


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
            return measured([puzzle], None)
        solved, text, areas = verdict(puzzle)
        if any(area.touched() for area in areas):
            print("\n".join(map(drawn, areas)))
        print(f"{file.stem}: {text}")
        return 0 if solved else 1

    return run_tool(file.name, body)

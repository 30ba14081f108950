"""Show a Triton kernel as AMD's GPUs get it: instruction by instruction, what a wave's registers
hold before and after, and which of its 64 lanes are at work. No GPU is needed.

The program runs in Triton's interpreter; the first launch of the kernel there is compiled for the
GPU, and one of its workgroups executed. --assembly executes changed machine code in its place,
which --save writes; what is wrong with it (a race in LDS, an access outside of a tensor, a barrier
that not all waves reach) is one line, and the status 1.

Examples:
  amd-run step my_kernels.py add_relu
  amd-run step my_kernels.py row_sum --lines 12-14 --lanes 0,15,16,63
  amd-run step my_kernels.py row_sum --listing
  amd-run step my_kernels.py product --counts
  amd-run step my_kernels.py row_sum --save row_sum.s
  amd-run step my_kernels.py row_sum --assembly row_sum.s
"""

from __future__ import annotations

import argparse
import linecache
from pathlib import Path

import numpy as np

from fusion_lab.amd.assembly import ACCUMULATORS, Instruction, Unknown
from fusion_lab.amd.compile import compiled_launch
from fusion_lab.amd.execute import ROWS
from fusion_lab.amd.launch import TARGET, Kernel, Loaded, explained, run_grid
from fusion_lab.amd.memory import Fault
from fusion_lab.amd.record import Recorded, launches_of
from fusion_lab.amd.waves import EXEC, UNSET, VCC, Waves, unpacked
from fusion_lab.cli import Parser, ToolError, documented_parser, program, several, sign_of_life
from fusion_lab.files import write_text
from fusion_lab.show import Column, render

MOVES = {  # what the table does not have, by how its names begin
    "buffer_load": "D = S1's tensor at byte S0, beyond its size 0",
    "buffer_store": "S1's tensor at byte S0 = D, beyond its size nothing",
    "global_load": "D = memory at S0",
    "global_store": "memory at D = S0",
    "s_load": "D = memory at S0 + S1",
    "ds_read": "D = LDS at byte S0",
    "ds_write": "LDS at byte D = S0",
    "v_mfma": "D = S0 times S1 + S2, matrices of the wave",
    "s_barrier": "wait for the workgroup's other waves",
    "s_waitcnt": "wait for what is on its way from memory or LDS",
}


def dots(mask: np.ndarray) -> str:
    """A mask [64] as four rows of 16: # for a lane that is at work."""
    text = "".join("#" if on else "." for on in mask)
    return " ".join(text[i : i + 16] for i in range(0, 64, 16))


def number(word: int) -> str:
    """A register: an integer or, where it looks like one, a float32."""
    if word == UNSET:
        return "unset"
    value = float(np.uint32(word).view(np.float32))
    if word < 1 << 20 or word >= (1 << 32) - (1 << 12):
        return str(int(np.uint32(word).view(np.int32)))
    return f"{value:.6g}" if 1e-9 < abs(value) < 1e9 else f"{word:#x}"


def contents(waves: Waves, instruction: Instruction, wave: int, lanes: list[int]) -> dict[str, str]:
    """What the registers that an instruction names hold, by their names: vector registers in these
    lanes, masks as dots. exec is shown apart."""
    found, row = {}, ROWS.get(instruction.mnemonic)
    is_mask = row is not None and "mask" in {*row.results.values(), *row.sources.values()}
    for op in instruction.operands:
        if op.kind == "v":
            for index in range(op.index, op.index + op.count):
                name = f"v{index}" if index < ACCUMULATORS else f"a{index - ACCUMULATORS}"
                words = waves.vectors[index, wave, lanes]
                found[name] = "  ".join(number(int(word)) for word in words)
        elif op.kind == "s" and op.index != EXEC:
            if op.count == 2 and (is_mask or op.index == VCC):
                words = waves.scalars[wave, op.index : op.index + 2]
                mask = unpacked(words[None])[0]
                found[op.text] = "unset" if (words == UNSET).all() else dots(mask)
                continue
            for index in range(op.index, op.index + op.count):
                name = op.text if op.count == 1 else f"s{index}"
                found[name] = number(int(waves.scalars[wave, index]))
    return found


def source_of(launch: Recorded, line: str) -> str:
    """The text of a line of the kernel's file, such as add.py:12; nothing of another's."""
    file, _, place = line.rpartition(":")
    if file != Path(launch.file).name:
        return ""
    return linecache.getline(launch.file, int(place)).strip()


class Printer:
    """Prints instructions, below their lines of the source, and what they change."""

    def __init__(self, args: argparse.Namespace, launch: Recorded, kernel: Kernel):
        self.args, self.launch, self.kernel = args, launch, kernel
        self.line, self.exec = "", None

    def shown(self, instruction: Instruction) -> bool:
        place = instruction.line.rpartition(":")[2]
        low, high = self.args.lines
        return not high or (place.isdigit() and low <= int(place) <= high)

    def name(self, place: int) -> None:
        """Print an instruction, below its line of the source where another begins."""
        instruction = self.kernel.program.code[place]
        if instruction.line != self.line:
            self.line = instruction.line
            print(f"\n{self.line}  {source_of(self.launch, self.line)}")
        print(f"  {place:4}  {instruction.text:44} {meaning(instruction)}".rstrip())

    def listing(self) -> None:
        """All instructions, without executing them."""
        for place, instruction in enumerate(self.kernel.program.code):
            if self.shown(instruction):
                self.name(place)

    def run(self) -> None:
        """Execute a workgroup, and print what one of its waves does."""
        args, kernel = self.args, self.kernel
        loaded = Loaded(kernel, self.launch.grid, self.launch.with_tensors(self.launch.before))
        sizes = (*self.launch.grid, 1, 1)[:3]
        if args.workgroup >= np.prod(sizes) or args.wave >= kernel.waves:
            raise ToolError(f"there are {np.prod(sizes)} workgroups of {kernel.waves} waves")
        group = np.array([np.unravel_index(args.workgroup, sizes, order="F")])
        waves = loaded.start(group)
        try:
            while waves.running:
                place, here = waves.pc, bool(waves.here[args.wave, 0])
                instruction = kernel.program.code[place]
                before = contents(waves, instruction, args.wave, args.lanes)
                with np.errstate(all="ignore"):
                    waves.step()
                if here and self.shown(instruction):
                    self.name(place)
                    self.changes(waves, instruction, before)
        except Fault as fault:
            raise ToolError(str(explained(fault, waves, group)), status=1) from fault

    def changes(self, waves: Waves, instruction: Instruction, before: dict[str, str]) -> None:
        """What an instruction has changed in the wave."""
        after = contents(waves, instruction, self.args.wave, self.args.lanes)
        for name, text in after.items():
            if text != before[name]:
                print(f"        {name:7} {before[name]}\n{'':12}->  {text}")
        mask = waves.exec[self.args.wave]
        if self.exec is None or (mask != self.exec).any():
            print(f"        exec    {dots(mask)}")
            self.exec = mask.copy()


def meaning(instruction: Instruction) -> str:
    """What the manual's table says of an instruction."""
    name = instruction.mnemonic
    row = ROWS.get(name) or ROWS.get(name.replace("_pk", "", 1))
    return row.meaning if row else next((MOVES[m] for m in MOVES if name.startswith(m)), "")


def counts_of(launch: Recorded, kernel: Kernel) -> None:
    """Print what the whole launch executes, and for each line of the source what it moves."""
    counts = run_grid(kernel, launch.grid, launch.with_tensors(launch.before), watch=True)
    kinds = [{"kind": kind, "number": number} for kind, number in counts.by_kind().items()]
    print(render([Column("instructions of all waves", "kind"), Column("", "number", "d")], kinds))
    print(f"\nwaves: {counts.waves}, floating-point operations: {counts.flop()}")
    bound = f"{counts.memory_us():.3g} us"
    print(f"An MI300X's memory takes at least {bound} (a bound, no prediction)\n")
    noted = sorted({name for note in counts.noted.values() for name in note})
    lines = sorted({kernel.program.code[number].line for number in counts.noted})
    rows = [{"line": line} | {name: counts.by_line(name)[line] for name in noted} for line in lines]
    rows.append({"line": "all"} | {name: counts.total(name) for name in noted})
    print(render([Column("line", "line"), *(Column(name, name, "d") for name in noted)], rows))


def lines(text: str) -> tuple[int, int]:
    """argparse type: a line of the source, or a range such as 12-14."""
    first, _, last = text.partition("-")
    if not (first.isdigit() and (last or first).isdigit()):
        raise argparse.ArgumentTypeError(f"must be lines such as 12-14, not {text!r}")
    return int(first), int(last or first)


def lane(text: str) -> int:
    if not text.isdigit() or int(text) > 63:
        raise argparse.ArgumentTypeError(f"must be a lane from 0 to 63, not {text!r}")
    return int(text)


def build_parser() -> Parser:
    parser = documented_parser("amd-run step", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE.py")
    parser.add_argument("kernel", nargs="?", metavar="KERNEL", help="(default: the first launched)")
    parser.add_count("--workgroup", 0, "which is executed", least=0)
    parser.add_count("--wave", 0, "of it, which is shown", least=0)
    text = "whose values are shown (default: 0,1,16,63)"
    parser.add_argument("--lanes", type=several(lane), default=[0, 1, 16, 63], help=text)
    text = "show only what these lines of the source became (default: all)"
    parser.add_argument("--lines", type=lines, default=(0, 0), metavar="FIRST-LAST", help=text)
    what = parser.add_mutually_exclusive_group()
    text = "the instructions and what they mean, executing nothing"
    what.add_argument("--listing", action="store_true", help=text)
    text = "count instructions, bytes, cache lines and bank conflicts of the whole launch"
    what.add_argument("--counts", action="store_true", help=text)
    parser.add_path("--save", "FILE.s", "write the assembly")
    parser.add_path("--assembly", "FILE.s", "execute this in place of what the compiler made")
    return parser


def run(args: argparse.Namespace, argv: list[str]) -> int:
    with sign_of_life(args.file.name):
        found = [x for x in launches_of(args.file, argv) if args.kernel in (None, x.kernel)]
    if not found:
        raise ToolError(f"{args.file} launches no kernel of the name {args.kernel}")
    launch = found[0]
    try:
        compiled = compiled_launch(launch, TARGET)
        if args.save:
            write_text(args.save, compiled.asm["amdgcn"])
        kernel = Kernel(compiled, args.assembly.read_text() if args.assembly else None)
        show(args, launch, kernel)
    except Unknown as error:
        raise ToolError(f"not executed: {error}") from error
    return 0


def show(args: argparse.Namespace, launch: Recorded, kernel: Kernel) -> None:
    """Print what the arguments ask for."""
    sizes = " x ".join(map(str, launch.grid))
    print(f"{launch.kernel} for {TARGET}: {sizes} workgroups of {kernel.waves} waves, "
          f"{len(kernel.program.code)} instructions, {kernel.lds} bytes of LDS")  # fmt: skip
    if args.counts:
        with sign_of_life("counting"):
            counts_of(launch, kernel)
    elif args.listing:
        Printer(args, launch, kernel).listing()
    else:
        print(f"workgroup {args.workgroup}, wave {args.wave}, "
              f"lanes {', '.join(map(str, args.lanes))}")  # fmt: skip
        Printer(args, launch, kernel).run()


main = program(build_parser, run, of_scripts=True)

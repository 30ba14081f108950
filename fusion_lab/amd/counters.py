"""What an MI300X would have counted of a launch: instructions by kind, floating-point operations,
bytes and cache lines, bank conflicts of LDS. Executed, not measured: times are not among it."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np

from fusion_lab.amd.assembly import Instruction, Program
from fusion_lab.amd.waves import Waves
from fusion_lab.rocm.counters import FLOP_COUNTERS

LANES = np.arange(64)
BANKS = 32  # of LDS, 4 bytes wide
# the lanes that LDS serves together, by the bytes of each: as many as 32 banks can, in their order
# but for reads of 16 bytes ("Avoiding LDS Bank Conflicts on AMD GPUs", AMD's ROCm blogs)
TOGETHER = {1: 32, 2: 32, 4: 32, 8: 16, 12: 8, 16: 8}
READS_OF_16 = np.concatenate(
    [half + np.r_[a : a + 4, b : b + 4] for half in (0, 32)
     for a, b in ((0, 20), (4, 16), (8, 28), (12, 24))]
)  # fmt: skip
LINE = {"read": 128, "written": 64}  # bytes of a cache line
# AMD's data sheet and CDNA 3 white paper: how many bytes may lie nearer than L2, its Infinity Cache
# and memory, and the bytes per second of each
LEVELS = ((0, 34.4e12), (32 << 20, 17.2e12), (288 << 20, 5.3e12))
FLOAT = re.compile(
    r"v_(?:pk_)?(?:(add|sub|subrev|mul|fma|fmac|fmamk|fmaak)"
    r"|(rcp|rsq|sqrt|exp|log|sin|cos)(?:_iflag)?)_f(16|32|64)$"
)
KINDS = ("MFMA", "SALU", "SMEM", "VMEM", "LDS", "branch")  # that have a counter of their own
OPERATION = {"add": "ADD", "sub": "ADD", "subrev": "ADD", "mul": "MUL"}
MFMA = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_(x?f32|b?f16)$")
VALU = "SQ_INSTS_VALU_"  # floating-point operations of what is counted by these names
FLOP = {name: flop for name, (flop, _) in FLOP_COUNTERS.items()} | {f"{VALU}MFMA_MOPS_XF32": 512}


def operations(instruction: Instruction) -> dict[str, int]:
    """What an instruction adds to the counters of floating-point operations; a packed one does
    two."""
    if found := MFMA.match(instruction.mnemonic):
        *sizes, kind = found.groups()
        kind = kind.upper()
        flop = 2 * math.prod(map(int, sizes))
        return {f"{VALU}MFMA_{kind}": 1, f"{VALU}MFMA_MOPS_{kind}": flop // 512}
    if found := FLOAT.match(instruction.mnemonic):
        name = "TRANS" if found[2] else OPERATION.get(found[1], "FMA")
        return {f"{VALU}{name}_F{found[3]}": 1 + instruction.mnemonic.startswith("v_pk_")}
    return {}


def memory_us(moved: float) -> float:
    """Microseconds that an MI300X's memory takes at least to move so many different bytes: a bound,
    no prediction. What was there before may be in caches."""
    return 1e6 * max((moved - nearer) / rate for nearer, rate in LEVELS)


def lines_of(address: np.ndarray, active: np.ndarray, size: int, line: int) -> int:
    """How many lines of `line` bytes each wave's lanes touch, added up over the waves."""
    ends = np.concatenate([address, address + np.uint64(size - 1)], axis=1) // np.uint64(line)
    numbers = np.where(np.concatenate([active, active], axis=1), ends.astype(np.int64), -1)
    numbers.sort(axis=1)
    new = np.diff(numbers, axis=1, prepend=-1) != 0
    return int((new & (numbers >= 0)).sum())


def conflict_cycles(address: np.ndarray, active: np.ndarray, size: int, write: bool) -> int:
    """Cycles beyond one that LDS takes for lanes that it could serve together: as many as the most
    words that they want of one bank. The same word is one."""
    order = READS_OF_16 if size == 16 and not write else LANES
    together, words = TOGETHER[size], max(1, size // 4)
    shape = (len(address), 64 // together, together)
    first = (address // 4)[:, order].reshape(shape)
    on = np.repeat(active[:, order].reshape(shape), words, axis=2)
    word = (first[..., None] + np.arange(words)).reshape(*shape[:2], -1)
    word = np.sort(np.where(on, word, -1), axis=2)
    new = (np.diff(word, axis=2, prepend=-1) != 0) & (word >= 0)
    wanted = np.zeros((*shape[:2], BANKS), np.int64)
    groups = np.indices(word.shape)
    np.add.at(wanted, (groups[0][new], groups[1][new], word[new] % BANKS), 1)
    return int(np.maximum(wanted.max(2) - 1, 0).sum())


class Counts:
    """Of a launch: how many waves executed each instruction and, if it is the `watch` of waves,
    what its accesses of memory were. Instructions are numbered as in the program; its prologue,
    which a GPU leaves out, is not counted."""

    def __init__(self, program: Program):
        self.program = program
        self.waves = 0
        self.executed = np.zeros(len(program.code), np.int64)
        self.noted: dict[int, Counter] = {}
        self.read: set[str] = set()  # arguments whose tensors it has read
        # lines, by number
        self.touched: dict[str, list[np.ndarray]] = {"read": [], "written": []}

    def add(self, waves: Waves) -> None:
        """Count what these waves have executed to their end."""
        self.waves += waves.count
        self.executed += waves.executed
        self.executed[: self.program.prologue] = 0

    def tensor(
        self, waves: Waves, address: np.ndarray, active: np.ndarray, size: int, write: bool
    ) -> None:
        """Note an access of memory, at the instruction that waves execute."""
        note, verb = self.noted.setdefault(waves.pc - 1, Counter()), "written" if write else "read"
        line = LINE[verb]
        note[f"bytes {verb}"] += size * int(active.sum())
        note[f"lines of {line} {verb}"] += lines_of(address, active, size, line)
        for end in (0, size - 1):
            lines = (address[active] + np.uint64(end)) // np.uint64(line)
            self.touched[verb].append(np.unique(lines))

    def lds(
        self, waves: Waves, address: np.ndarray, size: int, offsets: list[int], write: bool
    ) -> None:
        """The same of an access of LDS."""
        note = self.noted.setdefault(waves.pc - 1, Counter())
        for offset in offsets:
            note["LDS bytes"] += size * int(waves.lanes.sum())
            cycles = conflict_cycles(address + offset, waves.lanes, size, write)
            note["LDS conflict cycles"] += cycles

    def by_kind(self) -> Counter:
        """Instructions of all waves by kind: VALU, MFMA, SALU, LDS, VMEM, SMEM, branch, other."""
        found = Counter()
        for instruction, times in zip(self.program.code, self.executed, strict=True):
            found[instruction.kind] += int(times)
        return found

    def total(self, name: str) -> int:
        """What was noted under this name, such as "bytes read" or "LDS conflict cycles"."""
        return sum(note[name] for note in self.noted.values())

    def by_line(self, name: str) -> Counter:
        """The same by line of the kernel's source."""
        found = Counter()
        for number, note in self.noted.items():
            found[self.program.code[number].line] += note[name]
        return found

    def different(self, verb: str) -> int:
        """How many different lines the launch has read or written."""
        touched = self.touched[verb]
        return len(np.unique(np.concatenate(touched))) if touched else 0

    def hardware(self) -> dict[str, int]:
        """By the names of AMD's counters. An instruction of the vector unit counts as 64 lanes,
        whether they are at work or not; MFMA_MOPS are units of 512 operations."""
        kinds = self.by_kind()
        products = [name.replace("MOPS_", "") for name in FLOP if "MOPS_" in name]
        names = [*FLOP, *products, "SQ_INSTS_VMEM_RD", "SQ_INSTS_VMEM_WR"]
        found = Counter(dict.fromkeys(names, 0))
        for instruction, times in zip(self.program.code, self.executed.tolist(), strict=True):
            for name, each in operations(instruction).items():
                found[name] += each * times
            if instruction.kind == "VMEM":
                stores = "_store" in instruction.mnemonic or "_atomic" in instruction.mnemonic
                found[f"SQ_INSTS_VMEM_{'WR' if stores else 'RD'}"] += times
        read, written = self.different("read"), self.different("written")
        return {
            "SQ_WAVES": self.waves,
            "SQ_INSTS": sum(kinds.values()),
            "SQ_INSTS_VALU": kinds["VALU"] + kinds["MFMA"],
            **{f"SQ_INSTS_{kind.upper()}": kinds[kind] for kind in KINDS},
            **found,
            "SQ_LDS_BANK_CONFLICT": self.total("LDS conflict cycles"),
            "TCP_TCC_READ_REQ_sum": self.total("lines of 128 read"),
            "TCP_TCC_WRITE_REQ_sum": self.total("lines of 64 written"),
            # requests to memory at least: each line once, as if caches lost none
            "TCC_EA0_RDREQ_sum": read,
            "TCC_EA0_RDREQ_32B_sum": 0,
            "TCC_EA0_WRREQ_sum": written,
            "TCC_EA0_WRREQ_64B_sum": written,
            "TCC_BUBBLE_sum": read,  # reads of 128 bytes
        }

    def memory_us(self) -> float:
        """What an MI300X's memory takes at least."""
        return memory_us(sum(LINE[verb] * self.different(verb) for verb in LINE))

    def flop(self) -> int:
        """Floating-point operations, those of lanes that are not at work included."""
        counted = self.hardware()
        return sum(each * counted[name] for name, each in FLOP.items())

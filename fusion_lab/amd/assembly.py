"""Reads the text that LLVM writes for AMD's GPUs: instructions, labels, source lines, and what the
kernel's descriptor says of its start."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

ACCUMULATORS = 256  # a0 is stored behind v255
NAMED = {  # scalar registers with a name: number of the first, and how many
    "vcc": (106, 2),
    "vcc_lo": (106, 1),
    "vcc_hi": (107, 1),
    "m0": (124, 1),
    "exec": (126, 2),
    "exec_lo": (126, 1),
    "exec_hi": (127, 1),
}
REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])$")
SPLIT = re.compile(r",(?![^\[(]*[\])])")  # commas, but not those in brackets


class Unknown(Exception):
    """Something in the assembly that is not known here: it cannot be executed."""


@dataclass(frozen=True)
class Operand:
    """A register, several in a row, or a constant."""

    text: str
    kind: str  # v: vector (accumulators too), s: scalar, number, or other
    index: int = 0  # the first register
    count: int = 1
    negative: bool = False
    absolute: bool = False

    def bits(self, kind: str, size: int) -> int:
        """A constant as an operand of this kind (f, u, i) and size in bits.

        An integer is what it is, of any kind, but an f64 has the 32 bits of a literal on top.
        """
        if re.match(r"-?(\d+\.|\d+e|inf|nan)", self.text):
            floats = {16: np.float16, 32: np.float32, 64: np.float64}[max(size, 16)]
            return int(floats(float(self.text)).view(f"u{floats().itemsize}"))
        value = int(self.text, 0)
        if kind == "f" and size == 64 and not -16 <= value <= 64:
            value <<= 32
        return value & ((1 << size) - 1)


@dataclass
class Instruction:
    mnemonic: str  # without the encoding: v_add_f32
    encoding: str  # e32, e64, dpp, sdwa or nothing
    operands: list[Operand]
    modifiers: dict[str, str]
    line: str  # of the source: file.py:12
    text: str  # of the assembly
    run: Callable = field(default=None, repr=False)  # filled in by execute.py
    kind: str = ""  # VALU, MFMA, SALU, LDS, VMEM, SMEM, branch or other

    def numbers(self, name: str, default: list[int]) -> list[int]:
        """A modifier with a number or a list, such as op_sel:[0,1]."""
        if name not in self.modifiers:
            return default
        text = self.modifiers[name].strip("[]")
        return [int(part) for part in text.split(",")] if text else []


@dataclass
class Program:
    name: str
    code: list[Instruction]
    labels: dict[str, int]
    descriptor: dict[str, int]  # .amdhsa_... of the kernel
    arguments: list[dict[str, str]]  # offset, size, value_kind of each

    def where(self, place: int) -> str:
        """An instruction with its line of the source."""
        return f"{self.name}, {self.code[place].line}: {self.code[place].text}"

    @property
    def prologue(self) -> int:
        """How many instructions load what a GPU has loaded already, so that it begins behind
        them."""
        if not self.descriptor.get("user_sgpr_kernarg_preload_length"):
            return 0
        return 1 + next(i for i, each in enumerate(self.code) if each.mnemonic == "s_branch")


def operand(text: str) -> Operand:
    """An operand by its text, such as -|v3|, s[2:3], vcc, 0x20 or off."""
    inner, signs = text, {}
    if found := re.fullmatch(r"-([vsa|].*)|neg\((.*)\)", inner):
        inner, signs["negative"] = found[1] or found[2], True
    if found := re.fullmatch(r"\|(.*)\|", inner):
        inner, signs["absolute"] = found[1], True
    if inner in NAMED:
        index, count = NAMED[inner]
        return Operand(text, "s", index, count, **signs)
    if found := REGISTER.match(inner):
        first = int(found[2] or found[3])
        count = int(found[4] or first) - first + 1
        index = first + ACCUMULATORS * (found[1] == "a")
        return Operand(text, "s" if found[1] == "s" else "v", index, count, **signs)
    if re.match(r"-?(\d|inf|nan)", inner):
        return Operand(inner, "number", **signs)
    return Operand(text, "other")


def instruction(text: str, line: str) -> Instruction:
    """One line of assembly; modifiers stand behind the last operand, or alone."""
    mnemonic, _, rest = text.partition(" ")
    found = re.fullmatch(r"(\w+?)_(e32|e64|dpp|sdwa)", mnemonic)
    name, encoding = (found[1], found[2]) if found else (mnemonic, "")
    operands, modifiers = [], {}
    for part in SPLIT.split(rest) if rest else []:
        first, *words = part.split()
        # "vmcnt(0) lgkmcnt(0)" are operands, too
        operands.append(operand(first))
        for word in words:
            key, _, value = word.partition(":")
            modifiers[key] = value
    return Instruction(name, encoding, operands, modifiers, line, text)


def parse(text: str) -> Program:
    """The kernel in a file of assembly, up to its end."""
    code, labels, own, line = [], {}, "", "?"
    for raw in text.splitlines():
        words, _, comment = raw.replace("\t", " ").strip().partition(";")
        words = words.strip()
        if found := re.match(r"([.\w$]+):$", words):
            labels[found[1]] = len(code)
        elif words.startswith(".loc "):
            # where it is, then from where that was called: the kernel's own file is wanted
            places = [p for p in re.findall(r"([\w.]+):(\d+):\d+", comment) if p[1] != "0"]
            own = own or (places[0][0] if places else "")
            place = next((p for p in places if p[0] == own), places[0] if places else None)
            line = ":".join(place) if place else line
        elif re.match(r"[a-z]", words):
            code.append(instruction(words, line))
        elif words.startswith(".amdhsa_kernel"):
            break
    name = re.search(r"\.amdhsa_kernel (\S+)", text)[1]
    descriptor = {key: int(n) for key, n in re.findall(r"\.amdhsa_(\w+) (-?\d+)\b", text)}
    described = text.partition("amdhsa.kernels:")[2]
    starts = re.split(r"\n      - ", described.partition(".args:")[2].partition("\n    .")[0])
    arguments = [dict(re.findall(r"\.(\w+): +(\S+)", part)) for part in starts[1:]]
    return Program(name, code, labels, descriptor, arguments)

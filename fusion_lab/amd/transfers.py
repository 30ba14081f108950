"""Instructions that move data between registers and tensors (buffer_, global_, s_load_) or LDS
(ds_)."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from fusion_lab.amd.assembly import Instruction, Unknown
from fusion_lab.amd.operands import long_word, word
from fusion_lab.amd.waves import Waves

Run = Callable[[Waves], None]
Address = Callable[[Waves], tuple[np.ndarray, np.ndarray]]  # of each lane, and those at work
# how much of memory moves: bytes of an element, how many, and whether with a sign
FORMS = {
    **{f"dword{'' if n == 1 else f'x{n}'}": (4, n, False) for n in (1, 2, 3, 4, 8, 16)},
    **{f"b{32 * n}": (4, n, False) for n in (1, 2, 3, 4)},
    **dict.fromkeys(("byte", "ubyte", "b8", "u8"), (1, 1, False)),
    **dict.fromkeys(("short", "ushort", "b16", "u16"), (2, 1, False)),
    "sbyte": (1, 1, True),
    "sshort": (2, 1, True),
}
ACCESS = re.compile(r"(buffer|global|ds|s)_(load|store|read|write)(2?)(st64)?_(\w+?)(_d16_hi)?$")
ATOMIC = re.compile(r"(?:buffer|global)_atomic_(\w+)$")
# the first row are modifiers that say where, the others concern caches only
KNOWN_MODIFIERS = {"offset", "offset0", "offset1", "offen", "off",
                   "glc", "slc", "nt", "sc0", "sc1", "gds"}  # fmt: skip


def constant(instruction: Instruction, name: str = "offset") -> int:
    return int(instruction.modifiers.get(name, "0"), 0)


def addresses(instruction: Instruction, place: int) -> Address:
    """Where an access of tensors goes.

    A buffer is four scalar registers: base, stride, how many bytes it has, flags; beyond them
    nothing is done and 0 is read, which is how Triton masks lanes. That of global memory goes to an
    address in two vector registers, the operand `place`, or in scalar ones with an offset in that.
    """
    first = np.uint64(constant(instruction) & (1 << 64) - 1)
    if instruction.mnemonic.startswith("buffer"):
        offset, buffer, start = instruction.operands[-3:]
        base, size, more = long_word(buffer), word(buffer, 2), word(start)
        lane = word(offset) if "offen" in instruction.modifiers else lambda waves: np.uint32(0)

        def of_buffer(waves: Waves) -> tuple[np.ndarray, np.ndarray]:
            inside = first + more(waves) + lane(waves)
            active = waves.lanes & (inside < size(waves))
            return np.broadcast_to((base(waves) & 0xFFFFFFFFFFFF) + inside, active.shape), active

        return of_buffer
    op, last = instruction.operands[place], instruction.operands[-1]
    base = long_word(last) if last.kind == "s" else lambda waves: np.uint64(0)
    lane = word(op) if last.kind == "s" else long_word(op)

    def address(waves: Waves) -> tuple[np.ndarray, np.ndarray]:
        places = lane(waves).astype(np.uint64) + first + base(waves)
        return np.broadcast_to(places, waves.lanes.shape), waves.lanes

    return address


def tensor_access(instruction: Instruction, form: tuple, writes: bool) -> Run:
    """Between a tensor and registers."""
    size, count, signed = form
    is_buffer = instruction.mnemonic.startswith("buffer")
    address = addresses(instruction, 0 if writes else 1)
    registers = instruction.operands[0 if is_buffer or not writes else 1]
    shift = 16 if instruction.mnemonic.endswith("_hi") else 0
    values = [word(registers, i) for i in range(count)] if writes else []

    def run(waves: Waves) -> None:
        where, active = address(waves)
        if waves.watch:
            waves.watch.tensor(waves, where, active, size * count, writes)
        if writes:
            words = [value(waves) >> shift for value in values]
            waves.memory.store(where, active, size, words)
            return
        for i, words in enumerate(waves.memory.load(where, active, size, count)):
            if signed:
                words = words.astype(f"i{size}").astype(np.int32).view(np.uint32)
            waves.put(registers.index + i, words)

    return run


def load_scalar(instruction: Instruction, form: tuple) -> Run:
    target, base, offset = instruction.operands
    size, count, _ = form
    first, more = long_word(base), word(offset)

    def run(waves: Waves) -> None:
        address = first(waves) + more(waves) + np.uint64(constant(instruction))
        words = waves.memory.load(address, waves.here, size, count)
        waves.put_scalar(target.index, np.concatenate(list(words), axis=1))

    return run


def lds_access(instruction: Instruction, form: tuple, writes: bool, unit: int) -> Run:
    """ds_read_ and ds_write_ of one place, ds_read2_ and ds_write2_ of two, whose offsets count
    units of so many bytes."""
    size, count, _ = form
    operands = instruction.operands
    at = word(operands[0 if writes else 1])
    shift = 16 if instruction.mnemonic.endswith("_hi") else 0
    offsets = [constant(instruction)]
    if unit:
        offsets = [unit * constant(instruction, name) for name in ("offset0", "offset1")]
    values = [[word(op, i) for i in range(count)] for op in operands[1:]] if writes else []

    def run(waves: Waves) -> None:
        address = np.broadcast_to(at(waves), waves.lanes.shape).astype(np.int64)
        if waves.watch:
            waves.watch.lds(waves, address, size * count, offsets, writes)
        if not writes:
            loads = [waves.lds.load(address + n, waves.lanes, size, count) for n in offsets]
            for i, words in enumerate(np.concatenate(loads)):
                waves.put(operands[0].index + i, words)
        for offset, parts in zip(offsets, values, strict=False):
            words = [value(waves) >> shift for value in parts]
            waves.lds.store(address + offset, waves.lanes, size, words)

    return run


# --- atomic operations

CHANGES = {  # new value in memory, from the old one and the operand
    "add": (np.uint32, np.add),
    "sub": (np.uint32, np.subtract),
    "and": (np.uint32, np.bitwise_and),
    "or": (np.uint32, np.bitwise_or),
    "xor": (np.uint32, np.bitwise_xor),
    "umin": (np.uint32, np.minimum),
    "umax": (np.uint32, np.maximum),
    "smin": (np.int32, np.minimum),
    "smax": (np.int32, np.maximum),
    "swap": (np.uint32, lambda old, new: new),
    "cmpswap": (np.uint32, lambda old, new, expected: new if old == expected else old),
    "add_f32": (np.float32, np.add),
}


def atomic(instruction: Instruction, name: str) -> Run:
    if name not in CHANGES:
        raise Unknown("unknown atomic operation")
    kind, change = CHANGES[name]
    returns = "sc0" in instruction.modifiers
    address = addresses(instruction, int(returns))
    op = instruction.operands[0 if instruction.mnemonic.startswith("buffer") else 1 + returns]
    values = [word(op, place) for place in range(2 if name == "cmpswap" else 1)]

    def run(waves: Waves) -> None:
        where, active = address(waves)
        operands = [np.broadcast_to(value(waves), where.shape).view(kind) for value in values]
        if waves.watch:
            waves.watch.tensor(waves, where, active, 4, True)
        before = waves.memory.atomic(where, active, kind, change, operands)
        if returns:
            waves.put(instruction.operands[0].index, before.view(np.uint32))

    return run


def build(instruction: Instruction) -> tuple[str, Run] | None:
    """Kind and function of an instruction that moves data; None if it is not one."""
    name = instruction.mnemonic
    atomics, found = ATOMIC.match(name), ACCESS.match(name)
    if not atomics and (not found or found[5] not in FORMS):
        return None
    if unknown := instruction.modifiers.keys() - KNOWN_MODIFIERS:
        raise Unknown(f"modifier {unknown.pop()}")
    if atomics:
        return "VMEM", atomic(instruction, atomics[1])
    form, writes = FORMS[found[5]], found[2] in ("store", "write")
    if found[6] and not writes:
        return None
    if found[1] == "s":
        return "SMEM", load_scalar(instruction, form)
    if found[1] == "ds":
        unit = form[0] * form[1] * (64 if found[4] else 1) if found[3] else 0
        return "LDS", lds_access(instruction, form, writes, unit)
    return "VMEM", tensor_access(instruction, form, writes)

"""Instructions that move data between registers and tensors (buffer_, global_, s_load_) or LDS
(ds_)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from fusion_lab.amd.assembly import Instruction, Unknown
from fusion_lab.amd.operands import long_word, word
from fusion_lab.amd.waves import Waves

Run = Callable[[Waves], None]
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


def addresses(waves: Waves, instruction: Instruction, place: int) -> tuple[np.ndarray, np.ndarray]:
    """Where an access of tensors goes, of each lane, and the lanes at work.

    A buffer is four scalar registers: base, stride, how many bytes it has, flags; beyond them
    nothing is done and 0 is read, which is how Triton masks lanes. That of global memory goes to an
    address in two vector registers, the operand `place`, or in scalar ones with an offset in that.
    """
    inside, active = np.uint64(constant(instruction) & (1 << 64) - 1), waves.lanes
    op, last = instruction.operands[place], instruction.operands[-1]
    if instruction.mnemonic.startswith("buffer"):
        offset, buffer, _ = instruction.operands[-3:]
        inside = inside + word(waves, last)
        if "offen" in instruction.modifiers:
            inside = inside + word(waves, offset)
        active = active & (inside < word(waves, buffer, 2))
        address = (long_word(waves, buffer) & 0xFFFFFFFFFFFF) + inside
    elif last.kind == "s":
        address = long_word(waves, last) + word(waves, op) + inside
    else:
        address = long_word(waves, op) + inside
    return np.broadcast_to(address, active.shape), active


def tensor_access(instruction: Instruction, form: tuple, writes: bool, waves: Waves) -> None:
    """Between a tensor and registers."""
    size, count, signed = form
    is_buffer = instruction.mnemonic.startswith("buffer")
    registers = instruction.operands[0 if is_buffer or not writes else 1]
    where, active = addresses(waves, instruction, 0 if writes else 1)
    if waves.watch:
        waves.watch.tensor(waves, where, active, size * count, writes)
    if writes:
        shift = 16 if instruction.mnemonic.endswith("_hi") else 0
        words = [word(waves, registers, i) >> shift for i in range(count)]
        waves.memory.store(where, active, size, words)
        return
    for i, words in enumerate(waves.memory.load(where, active, size, count)):
        if signed:
            words = words.astype(f"i{size}").astype(np.int32).view(np.uint32)
        waves.put(registers.index + i, words)


def load_scalar(instruction: Instruction, form: tuple, waves: Waves) -> None:
    target, base, offset = instruction.operands
    size, count, _ = form
    address = long_word(waves, base) + word(waves, offset) + np.uint64(constant(instruction))
    words = waves.memory.load(address, waves.here, size, count)
    waves.put_scalar(target.index, np.concatenate(list(words), axis=1))


def lds_access(
    instruction: Instruction, form: tuple, writes: bool, unit: int, waves: Waves
) -> None:
    """ds_read_ and ds_write_ of one place, ds_read2_ and ds_write2_ of two, whose offsets count
    units of so many bytes."""
    size, count, _ = form
    operands, lanes = instruction.operands, waves.lanes
    offsets = [constant(instruction)]
    if unit:
        offsets = [unit * constant(instruction, name) for name in ("offset0", "offset1")]
    at = word(waves, operands[0 if writes else 1])
    address = np.broadcast_to(at, lanes.shape).astype(np.int64)
    if waves.watch:
        waves.watch.lds(waves, address, size * count, offsets, writes)
    if writes:
        shift = 16 if instruction.mnemonic.endswith("_hi") else 0
        for offset, op in zip(offsets, operands[1:], strict=True):
            words = [word(waves, op, i) >> shift for i in range(count)]
            waves.lds.store(address + offset, lanes, size, words)
        return
    loads = [waves.lds.load(address + offset, lanes, size, count) for offset in offsets]
    for i, words in enumerate(np.concatenate(loads)):
        waves.put(operands[0].index + i, words)


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


def atomic(instruction: Instruction, name: str, waves: Waves) -> None:
    kind, change = CHANGES[name]
    returns = "sc0" in instruction.modifiers
    op = instruction.operands[0 if instruction.mnemonic.startswith("buffer") else 1 + returns]
    where, active = addresses(waves, instruction, int(returns))
    words = [word(waves, op, place) for place in range(2 if name == "cmpswap" else 1)]
    operands = [np.broadcast_to(each, where.shape).view(kind) for each in words]
    if waves.watch:
        waves.watch.tensor(waves, where, active, 4, True)
    before = waves.memory.atomic(where, active, kind, change, operands)
    if returns:
        waves.put(instruction.operands[0].index, before.view(np.uint32))


def build(instruction: Instruction) -> tuple[str, Run] | None:
    """Kind and function of an instruction that moves data; None if it is not one."""
    name = instruction.mnemonic
    atomics, found = ATOMIC.match(name), ACCESS.match(name)
    known = atomics[1] in CHANGES if atomics else found and found[5] in FORMS
    if not known:
        return None
    if unknown := instruction.modifiers.keys() - KNOWN_MODIFIERS:
        raise Unknown(f"modifier {unknown.pop()}")
    if atomics:
        return "VMEM", partial(atomic, instruction, atomics[1])
    form, writes = FORMS[found[5]], found[2] in ("store", "write")
    if found[6] and not writes:
        return None
    if found[1] == "s":
        return "SMEM", partial(load_scalar, instruction, form)
    if found[1] == "ds":
        unit = form[0] * form[1] * (64 if found[4] else 1) if found[3] else 0
        return "LDS", partial(lds_access, instruction, form, writes, unit)
    return "VMEM", partial(tensor_access, instruction, form, writes)

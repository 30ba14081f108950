"""Instructions that move data: between registers and tensors (buffer_, global_, flat_, s_load_),
LDS (ds_) and the registers of other lanes."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from lab.amd.assembly import Instruction, Operand, Unknown
from lab.amd.waves import Waves

Run = Callable[[Waves], None]
LANES, M0 = np.arange(64), 124
# how an element is in memory: bytes, how many, and whether with a sign
FORMS = {
    **{f"dword{'' if n == 1 else f'x{n}'}": (4, n, False) for n in (1, 2, 3, 4, 8, 16)},
    **{f"b{32 * n}": (4, n, False) for n in (1, 2, 3, 4)},
    **dict.fromkeys(("byte", "ubyte", "b8", "u8"), (1, 1, False)),
    **dict.fromkeys(("short", "ushort", "b16", "u16"), (2, 1, False)),
    **dict.fromkeys(("sbyte", "i8"), (1, 1, True)),
    **dict.fromkeys(("sshort", "i16"), (2, 1, True)),
}
ACCESS = re.compile(r"(buffer|global|flat|ds|s)_(load|store|read|write)_(\w+?)(_d16)?(_hi)?$")
TWO = re.compile(r"ds_(read|write)2(st64)?_b(32|64)$")
ATOMIC = re.compile(r"(buffer|global|flat)_atomic_(\w+)$")
IGNORED = {"offen", "off", "glc", "slc", "nt", "sc0", "sc1", "gds"}


def word(waves: Waves, op: Operand, place: int = 0) -> np.ndarray:
    """A register of an operand, or a constant."""
    if op.kind == "v":
        return waves.vectors[op.index + place]
    if op.kind == "s":
        return waves.scalars[:, op.index + place : op.index + place + 1]
    return np.array([[op.bits("u", 32)]], np.uint32)


def long(waves: Waves, op: Operand) -> np.ndarray:
    """An address in two registers."""
    return word(waves, op) | word(waves, op, 1).astype(np.uint64) << 32


def of_buffer(instruction: Instruction) -> Callable:
    """Addresses [waves, 64] and the active lanes of a buffer access. The buffer is four scalar
    registers: base, stride, how many bytes it has, flags; beyond them nothing is done and 0 is
    read, which is how Triton masks lanes."""
    offset, buffer, start = instruction.operands[-3:]
    constant = int(instruction.modifiers.get("offset", "0"), 0)

    def address(waves: Waves) -> tuple[np.ndarray, np.ndarray]:
        base = long(waves, buffer) & 0xFFFFFFFFFFFF
        inside = np.full((1, 1), constant, np.uint64)
        if "offen" in instruction.modifiers:
            inside = inside + word(waves, offset)
        inside = inside + word(waves, start)
        active = waves.lanes & (inside < word(waves, buffer, 2))
        return np.broadcast_to(base + inside, active.shape), active

    return address


def of_address(instruction: Instruction, op: Operand, base: Operand | None) -> Callable:
    """The same of a global access: an address in two vector registers, or an offset in one to an
    address in scalar registers."""
    constant = int(instruction.modifiers.get("offset", "0"), 0)

    def address(waves: Waves) -> tuple[np.ndarray, np.ndarray]:
        if base is None:
            found = long(waves, op)
        else:
            found = long(waves, base) + word(waves, op).astype(np.uint64)
        found = found + np.uint64(constant & (2**64 - 1))
        return np.broadcast_to(found, waves.lanes.shape), waves.lanes

    return address


def addresses(instruction: Instruction, where: int) -> Callable:
    """Where a buffer or global access goes; `where` is the operand with the address."""
    operands = instruction.operands
    if instruction.mnemonic.startswith("buffer"):
        return of_buffer(instruction)
    last = operands[-1] if operands[-1].kind == "s" and len(operands) > 2 else None
    return of_address(instruction, operands[where], last)


def load_tensor(instruction: Instruction, form: tuple, put: Callable) -> Run:
    size, count, _ = form
    address = addresses(instruction, 1)
    number_of = instruction.operands[0].index

    def run(waves: Waves) -> None:
        where, active = address(waves)
        if waves.watch:
            waves.watch.tensor(where, active, size * count, False)
        values = waves.memory.load(where, active, size, count)
        put(waves, number_of, values)

    return run


def load_to_lds(instruction: Instruction, form: tuple) -> Run:
    """gfx950: from a tensor to LDS, the lanes one behind the other from the place in m0 on."""
    size, count, _ = form
    address = addresses(instruction, 0)
    constant = int(instruction.modifiers.get("offset", "0"), 0)

    def run(waves: Waves) -> None:
        where, active = address(waves)
        if waves.watch:
            waves.watch.tensor(where, active, size * count, False)
        values = waves.memory.load(where, active, size, count)
        place = waves.scalars[:, M0 : M0 + 1].astype(np.int64) + constant + LANES * size * count
        waves.lds.store(place, waves.lanes, size, list(values))

    return run


def store_tensor(instruction: Instruction, form: tuple, shift: int) -> Run:
    size, count, _ = form
    is_buffer = instruction.mnemonic.startswith("buffer")
    value = instruction.operands[0 if is_buffer else 1]
    address = addresses(instruction, 0)

    def run(waves: Waves) -> None:
        where, active = address(waves)
        if waves.watch:
            waves.watch.tensor(where, active, size * count, True)
        values = [word(waves, value, i) >> shift for i in range(count)]
        waves.memory.store(where, active, size, values)

    return run


def putter(form: tuple, half: bool, high: bool) -> Callable:
    """How loaded values go into registers: with a sign, or into one half that leaves the other as
    it is."""
    size, _, signed = form
    kind = np.dtype(f"i{size}")

    def put(waves: Waves, index: int, values: np.ndarray) -> None:
        if signed:
            values = values.astype(kind).astype(np.int32).view(np.uint32)
        for i, words in enumerate(values):
            if half:
                waves.put_half(index + i, int(high), words.astype(np.uint16))
            else:
                waves.put(index + i, words)

    return put


def load_scalar(instruction: Instruction, form: tuple) -> Run:
    target, base, offset = instruction.operands
    constant = int(instruction.modifiers.get("offset", "0"), 0)
    size, count, _ = form

    def run(waves: Waves) -> None:
        address = long(waves, base) + word(waves, offset) + np.uint64(constant)
        if waves.watch:
            waves.watch.scalar(size * count)
        words = waves.memory.load(address, waves.here, size, count)
        waves.put_scalar(target.index, np.concatenate(list(words), axis=1))

    return run


# --- LDS


def of_lds(instruction: Instruction, form: tuple, write: bool, put: Callable, shift: int) -> Run:
    """ds_read_ and ds_write_ of one place, ds_read2_ and ds_write2_ of two."""
    size, count, _ = form
    where, values = (0, instruction.operands[1:]) if write else (1, instruction.operands[:1])
    at, modifiers = instruction.operands[where], instruction.modifiers
    if TWO.match(instruction.mnemonic):
        unit = size * count * (64 if "st64" in instruction.mnemonic else 1)
        offsets = [unit * int(modifiers.get(name, "0"), 0) for name in ("offset0", "offset1")]
    else:
        offsets = [int(modifiers.get("offset", "0"), 0)]

    def run(waves: Waves) -> None:
        address = np.broadcast_to(word(waves, at), waves.lanes.shape).astype(np.int64)
        if waves.watch:
            waves.watch.lds(address, size * count, offsets, write)
        if write:
            for offset, value in zip(offsets, values, strict=True):
                words = [word(waves, value, i) >> shift for i in range(count)]
                waves.lds.store(address + offset, waves.lanes, size, words)
            return
        found = [waves.lds.load(address + offset, waves.lanes, size, count) for offset in offsets]
        put(waves, values[0].index, np.concatenate(found))

    return run


def transposed(waves: Waves, index: int, values: np.ndarray) -> None:
    """ds_read_b64_tr_b16 (gfx950): 16 lanes read four rows of 16 halves, and each lane gets one of
    the columns."""
    halves = np.stack([values[i // 2] >> 16 * (i % 2) & 0xFFFF for i in range(4)])
    column = LANES % 16
    row = [LANES - column + 4 * k + column // 4 for k in range(4)]
    found = [halves[column % 4, :, lane].T for lane in row]
    for i in range(2):
        waves.put(index + i, found[2 * i] | found[2 * i + 1] << 16)


def permute(instruction: Instruction) -> Run:
    """ds_bpermute_b32: each lane gets the value of the lane whose number times 4 it has; of a lane
    that is off it is 0."""
    target, source, value = instruction.operands
    offset = int(instruction.modifiers.get("offset", "0"), 0)

    def run(waves: Waves) -> None:
        lane = (word(waves, source) + np.uint32(offset) >> 2 & 63).astype(np.int64)
        lane = np.broadcast_to(lane, waves.lanes.shape)
        sent = np.where(waves.exec, word(waves, value), 0).astype(np.uint32)
        waves.put(target.index, np.take_along_axis(sent, lane, 1))

    return run


# --- atomic operations

CHANGES = {  # new value in memory, from the old one and the operand
    "add": ("u4", np.add),
    "sub": ("u4", np.subtract),
    "and": ("u4", np.bitwise_and),
    "or": ("u4", np.bitwise_or),
    "xor": ("u4", np.bitwise_xor),
    "umin": ("u4", np.minimum),
    "umax": ("u4", np.maximum),
    "smin": ("i4", np.minimum),
    "smax": ("i4", np.maximum),
    "swap": ("u4", lambda old, new: new),
    "cmpswap": ("u4", lambda old, new, expected: new if old == expected else old),
    "add_x2": ("u8", np.add),
    "add_f32": ("f4", np.add),
    "add_f64": ("f8", np.add),
    "pk_add_f16": ("2f2", np.add),
}


def atomic(instruction: Instruction, name: str) -> Run:
    if name not in CHANGES:
        raise Unknown("unknown atomic operation")
    dtype, change = CHANGES[name]
    kind = np.dtype(dtype)
    returns = "sc0" in instruction.modifiers or "glc" in instruction.modifiers
    is_buffer = instruction.mnemonic.startswith("buffer")
    place = 0 if is_buffer else 1 + returns  # of the operand with the value
    value = instruction.operands[place]
    address = addresses(instruction, int(returns))
    count = 2 if name == "cmpswap" else 1

    def run(waves: Waves) -> None:
        where, active = address(waves)
        if waves.watch:
            waves.watch.tensor(where, active, kind.itemsize, True)
        if kind.itemsize == 8:
            operands = [long(waves, value).view(kind)]
        else:
            words = [np.ascontiguousarray(word(waves, value, i)) for i in range(count)]
            operands = [words_as(each, kind) for each in words]
        before = waves.memory.atomic(where, active, kind, change, operands)
        if returns:
            waves.put(instruction.operands[0].index, before.view(np.uint32))

    return run


def words_as(words: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Words [waves, 64] as another type, of two halves if it has these."""
    return words.view(kind.base).reshape(*words.shape, *kind.shape)


def build(instruction: Instruction) -> tuple[str, Run] | None:
    """Kind and function of an instruction that moves data; None if it is not one."""
    name = instruction.mnemonic
    known = IGNORED | {"offset", "offset0", "offset1", "lds"}
    if name.startswith(("buffer_", "global_", "flat_", "ds_", "s_load", "s_store")):
        if unknown := instruction.modifiers.keys() - known:
            raise Unknown(f"modifier {unknown.pop()}")
    if name == "ds_bpermute_b32":
        return "LDS", permute(instruction)
    if name == "ds_read_b64_tr_b16":
        return "LDS", of_lds(instruction, FORMS["b64"], False, transposed, 0)
    if found := ATOMIC.match(name):
        return "VMEM", atomic(instruction, found[2])
    if found := TWO.match(name):
        form = 4, int(found[3]) // 32, False
        return "LDS", of_lds(instruction, form, found[1] == "write", putter(form, False, False), 0)
    found = ACCESS.match(name)
    if not found or found[3] not in FORMS:
        return None
    form, high = FORMS[found[3]], bool(found[5])
    writes, shift = found[2] in ("store", "write"), 16 * high
    put = putter(form, bool(found[4]), high)
    if found[1] == "s":
        return "SMEM", load_scalar(instruction, form)
    if found[1] == "ds":
        return "LDS", of_lds(instruction, form, writes, put, shift)
    if writes:
        return "VMEM", store_tensor(instruction, form, shift)
    if "lds" in instruction.modifiers:
        return "VMEM", load_to_lds(instruction, form)
    return "VMEM", load_tensor(instruction, form, put)

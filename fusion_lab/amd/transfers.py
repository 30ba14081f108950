"""Instructions that move data: between registers and tensors (buffer_, global_, flat_, s_load_),
LDS (ds_) and the registers of other lanes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from fusion_lab.amd.assembly import Instruction, Operand, Unknown
from fusion_lab.amd.manual import bf16, to_bf16
from fusion_lab.amd.waves import Waves, word

Run = Callable[[Waves], None]
Address = Callable[[Waves], tuple[np.ndarray, np.ndarray]]  # of each lane, and those at work
LANES, M0 = np.arange(64), 124
# how much of memory moves: bytes of an element, how many, and whether with a sign
FORMS = {
    **{f"dword{'' if n == 1 else f'x{n}'}": (4, n, False) for n in (1, 2, 3, 4, 8, 16)},
    **{f"b{32 * n}": (4, n, False) for n in (1, 2, 3, 4)},
    **dict.fromkeys(("byte", "ubyte", "b8", "u8"), (1, 1, False)),
    **dict.fromkeys(("short", "ushort", "b16", "u16"), (2, 1, False)),
    **dict.fromkeys(("sbyte", "i8"), (1, 1, True)),
    **dict.fromkeys(("sshort", "i16"), (2, 1, True)),
}
ACCESS = re.compile(r"(buffer|global|flat|scratch|ds|s)_(load|store|read|write)(2?)(st64)?_"
                    r"(\w+?)(_d16)?(_hi)?$")  # fmt: skip
ATOMIC = re.compile(r"(buffer|global|flat)_atomic_(\w+)$")
# the first row are modifiers that say where, the others concern caches only
KNOWN_MODIFIERS = {"offset", "offset0", "offset1", "offen", "lds", "off",
                   "glc", "slc", "nt", "sc0", "sc1", "gds"}  # fmt: skip


def constant(instruction: Instruction, name: str = "offset") -> int:
    return int(instruction.modifiers.get(name, "0"), 0)


def long(op: Operand, place: int = 0) -> Callable[[Waves], np.ndarray]:
    """64 bits in two registers."""
    low, high = word(op, place), word(op, place + 1)
    return lambda waves: low(waves) | high(waves).astype(np.uint64) << 32


def of_buffer(instruction: Instruction) -> Address:
    """A buffer is four scalar registers: base, stride, how many bytes it has, flags; beyond them
    nothing is done and 0 is read, which is how Triton masks lanes."""
    offset, buffer, start = instruction.operands[-3:]
    base, size, more = long(buffer), word(buffer, 2), word(start)
    lane = word(offset) if "offen" in instruction.modifiers else None
    first = np.uint64(constant(instruction))

    def address(waves: Waves) -> tuple[np.ndarray, np.ndarray]:
        inside = first + more(waves)
        if lane:
            inside = inside + lane(waves)
        active = waves.lanes & (inside < size(waves))
        found = (base(waves) & 0xFFFFFFFFFFFF) + inside
        return np.broadcast_to(found, active.shape), active

    return address


def of_scratch(instruction: Instruction, operands: Sequence[Operand]) -> Address:
    """A lane's own memory, to which registers are spilled."""
    offsets = [word(op) for op in operands if op.text != "off"]

    def address(waves: Waves) -> tuple[np.ndarray, np.ndarray]:
        inside = sum((offset(waves) for offset in offsets), np.uint32(constant(instruction)))
        return waves.scratch + inside, waves.lanes

    return address


def addresses(instruction: Instruction, place: int) -> Address:
    """Where an access goes. That of global memory is to an address in two vector registers, the
    operand `place`, or in scalar ones with an offset in that."""
    if instruction.mnemonic.startswith("buffer"):
        return of_buffer(instruction)
    op, last = instruction.operands[place], instruction.operands[-1]
    if instruction.mnemonic.startswith("scratch"):
        return of_scratch(instruction, [op, last])
    base = long(last) if last.kind == "s" else None
    lane = word(op) if base else long(op)
    first = np.uint64(constant(instruction) & (1 << 64) - 1)

    def address(waves: Waves) -> tuple[np.ndarray, np.ndarray]:
        found = lane(waves).astype(np.uint64) + first
        if base:
            found = found + base(waves)
        return np.broadcast_to(found, waves.lanes.shape), waves.lanes

    return address


def tensor_access(instruction: Instruction, form: tuple, writes: bool, put: Callable) -> Run:
    """Between a tensor and registers or, on gfx950, from a tensor to LDS."""
    size, count, _ = form
    is_buffer, to_lds = instruction.mnemonic.startswith("buffer"), "lds" in instruction.modifiers
    address = addresses(instruction, 0 if writes else 1)
    registers = instruction.operands[0 if is_buffer or not writes else 1]
    shift = 16 if instruction.mnemonic.endswith("_hi") else 0
    values = [word(registers, i) for i in range(count)] if writes else []

    def run(waves: Waves) -> None:
        where, active = address(waves)
        words = [value(waves) >> shift for value in values]
        waves.must_be_written()
        if waves.watch:
            waves.watch.tensor(where, active, size * count, writes)
        if writes:
            waves.memory.store(where, active, size, words)
            return
        found = waves.memory.load(where, active, size, count)
        if to_lds:  # lanes one behind the other, from the place in m0 on
            first = waves.scalars[:, M0 : M0 + 1].astype(np.int64) + constant(instruction)
            waves.lds.store(first + LANES * size * count, waves.lanes, size, list(found))
        else:
            put(waves, registers.index, found)

    return run


def putter(instruction: Instruction, form: tuple) -> Callable:
    """How loaded values go into registers: with a sign, or _d16 ones into half of them."""
    size, _, signed = form
    field = None
    if "_d16" in instruction.mnemonic:
        field = 16 if instruction.mnemonic.endswith("_hi") else 0, 16, True

    def put(waves: Waves, index: int, values: Sequence[np.ndarray]) -> None:
        for i, words in enumerate(values):
            if signed:
                words = words.astype(f"i{size}").astype(np.int32).view(np.uint32)
            waves.put(index + i, words, field=field)

    return put


def load_scalar(instruction: Instruction, form: tuple) -> Run:
    target, base, offset = instruction.operands
    size, count, _ = form
    first, more = long(base), word(offset)

    def run(waves: Waves) -> None:
        address = first(waves) + more(waves) + np.uint64(constant(instruction))
        if waves.watch:
            waves.watch.scalar(size * count)
        words = waves.memory.load(address, waves.here, size, count)
        waves.put_scalar(target.index, np.concatenate(list(words), axis=1))

    return run


def lds_access(
    instruction: Instruction, form: tuple, writes: bool, unit: int, put: Callable
) -> Run:
    """ds_read_ and ds_write_ of one place, ds_read2_ and ds_write2_ of two, whose offsets count
    units of so many bytes."""
    size, count, _ = form
    operands = instruction.operands
    at, shift = word(operands[0 if writes else 1]), 16 * instruction.mnemonic.endswith("_hi")
    offsets = [constant(instruction)]
    if unit:
        offsets = [unit * constant(instruction, name) for name in ("offset0", "offset1")]
    values = [[word(op, i) for i in range(count)] for op in operands[1:]] if writes else []

    def run(waves: Waves) -> None:
        address = np.broadcast_to(at(waves), waves.lanes.shape).astype(np.int64)
        read = [[value(waves) >> shift for value in parts] for parts in values]
        waves.must_be_written()
        if waves.watch:
            waves.watch.lds(address, size * count, offsets, writes)
        if not writes:
            loads = [waves.lds.load(address + n, waves.lanes, size, count) for n in offsets]
            put(waves, operands[0].index, np.concatenate(loads))
        for offset, words in zip(offsets, read, strict=False):
            waves.lds.store(address + offset, waves.lanes, size, words)

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


# --- atomic operations

CHANGES = {  # new value in memory, from the old one and the operand; _x2 is of 64 bits
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
    "add_f32": ("f4", np.add),
    "add_f64": ("f8", np.add),
    "pk_add_f16": ("2f2", np.add),
    "pk_add_bf16": ("2u2", lambda old, more: to_bf16(bf16(old) + bf16(more))),
}


def atomic(instruction: Instruction, name: str) -> Run:
    single = name.removesuffix("_x2")
    if single not in CHANGES:
        raise Unknown("unknown atomic operation")
    dtype, change = CHANGES[single]
    if name != single:
        dtype = dtype.replace("4", "8")
    kind, modifiers = np.dtype(dtype), instruction.modifiers
    returns = "sc0" in modifiers or "glc" in modifiers
    address = addresses(instruction, int(returns))
    op = instruction.operands[0 if instruction.mnemonic.startswith("buffer") else 1 + returns]
    size = kind.itemsize // 4
    places = range(0, size * (2 if single == "cmpswap" else 1), size)
    values = [(long if size == 2 else word)(op, place) for place in places]

    def run(waves: Waves) -> None:
        where, active = address(waves)
        operands = [halves(value(waves), kind) for value in values]
        waves.must_be_written()
        if waves.watch:
            waves.watch.tensor(where, active, kind.itemsize, True)
        before = waves.memory.atomic(where, active, kind, change, operands)
        if returns:
            words = before.view(np.uint32).reshape(*where.shape, size)
            for i in range(size):
                waves.put(instruction.operands[0].index + i, words[..., i])

    return run


def halves(words: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Words [waves, 64] as another type, of two halves if it has these."""
    return np.ascontiguousarray(words).view(kind.base).reshape(*words.shape, *kind.shape)


def build(instruction: Instruction) -> tuple[str, Run] | None:
    """Kind and function of an instruction that moves data; None if it is not one."""
    name = instruction.mnemonic
    if name == "ds_read_b64_tr_b16":
        return "LDS", lds_access(instruction, FORMS["b64"], False, 0, transposed)
    atomics, found = ATOMIC.match(name), ACCESS.match(name)
    if not atomics and (not found or found[5] not in FORMS):
        return None
    if unknown := instruction.modifiers.keys() - KNOWN_MODIFIERS:
        raise Unknown(f"modifier {unknown.pop()}")
    if atomics:
        return "VMEM", atomic(instruction, atomics[2])
    form, writes = FORMS[found[5]], found[2] in ("store", "write")
    if found[1] == "s":
        return "SMEM", load_scalar(instruction, form)
    put = putter(instruction, form)
    if found[1] == "ds":
        unit = form[0] * form[1] * (64 if found[4] else 1) if found[3] else 0
        return "LDS", lds_access(instruction, form, writes, unit, put)
    return "VMEM", tensor_access(instruction, form, writes, put)

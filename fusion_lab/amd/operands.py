"""Operands of instructions, looked up once: functions that read and write the waves' registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fusion_lab.amd.assembly import Instruction, Operand, Unknown
from fusion_lab.amd.waves import Waves

Read = Callable[[Waves], np.ndarray]
Write = Callable[[Waves, np.ndarray], None]
LANES = np.arange(64)
PARTS = {  # of a register, by SDWA's names: the lowest bit, and how many
    "DWORD": (0, 32),
    **{f"WORD_{i}": (16 * i, 16) for i in range(2)},
    **{f"BYTE_{i}": (8 * i, 8) for i in range(4)},
}


def dtype_of(kind: str) -> np.dtype:
    """Of f32, u16 and so on."""
    return np.dtype(f"{kind[0]}{int(kind[1:]) // 8}")


def word(op: Operand, place: int = 0) -> Read:
    """A register of an operand, or a constant, in 32 bits."""
    index = op.index + place
    if op.kind in "vs" and place >= op.count:
        raise Unknown(f"register {place} of {op.text}")
    if op.kind == "v":
        return lambda waves: waves.vectors[index]
    if op.kind == "s":
        return lambda waves: waves.scalars[:, index : index + 1]
    if op.kind != "number":
        raise Unknown(f"operand {op.text}")
    value = np.array([[op.bits("u", 32)]], np.uint32)
    return lambda waves: value


def long_word(op: Operand, place: int = 0) -> Read:
    """64 bits in two registers."""
    low, high = word(op, place), word(op, place + 1)
    return lambda waves: low(waves) | high(waves).astype(np.uint64) << 32


def reader(op: Operand, kind: str, place: int = 0, part: str = "DWORD") -> Read:
    """An operand as an array of this type, with its sign modifiers. `place` is which register of
    several, or which half of them for 16 bits; `part` is SDWA's."""
    if kind == "mask":
        constant = np.full((1, 1), op.text == "-1")
        return lambda waves: waves.mask(op.index) if op.kind == "s" else constant
    if kind.endswith("24"):
        full = reader(op, f"{kind[0]}32", place, part)
        return lambda waves: full(waves) << 8 >> 8
    dtype = dtype_of(kind)
    if op.kind == "number":
        if place and dtype.itemsize == 2 and "." in op.text:
            raise Unknown(f"the upper half of {op.text}")
        half = 16 * (place % 2) if dtype.itemsize == 2 else 0
        bits = op.bits(kind[0], 8 * dtype.itemsize + half) >> half
        value = np.array([[bits]], f"u{dtype.itemsize}").view(dtype)
        return signed(lambda waves: value, op, dtype)
    if dtype.itemsize == 8:
        both = long_word(op, place)
        return signed(lambda waves: both(waves).view(dtype), op, dtype)
    shift, bits = PARTS[part]
    if dtype.itemsize == 2:
        shift += 16 * (place % 2)
        place //= 2
    full = word(op, place)
    mask = np.uint32((1 << bits) - 1)
    unsigned = f"u{dtype.itemsize}"
    if shift or bits < 32 or dtype.itemsize < 4:
        shifted = lambda waves: (full(waves) >> shift & mask).astype(unsigned)  # noqa: E731
        return signed(lambda waves: shifted(waves).view(dtype), op, dtype)
    return signed(lambda waves: full(waves).view(dtype), op, dtype)


def signed(read: Read, op: Operand, dtype: np.dtype) -> Read:
    """With abs and neg, which are of the highest bit, whatever the type."""
    if not (op.negative or op.absolute):
        return read
    unsigned = np.dtype(f"u{dtype.itemsize}")
    sign = unsigned.type(1 << 8 * dtype.itemsize - 1)
    kept = ~sign if op.absolute else ~unsigned.type(0)
    changed = sign if op.negative else unsigned.type(0)
    return lambda waves: (read(waves).view(unsigned) & kept ^ changed).view(dtype)


def words_of(value: np.ndarray, kind: str) -> list[np.ndarray]:
    """A result as the 32-bit words of the registers that take it."""
    value = np.asarray(value).astype(dtype_of(kind), copy=False)
    bits = value.view(f"u{value.itemsize}")
    if value.itemsize < 8:
        return [bits.astype(np.uint32, copy=False)]
    return [bits.astype(np.uint32), (bits >> 32).astype(np.uint32)]


def writer(instruction: Instruction, op: Operand, kind: str, written: Read | None) -> Write:
    """A function that writes a result; `written` are the lanes that DPP writes."""
    if kind == "mask":
        return lambda waves, value: waves.put_mask(op.index, value)
    if op.kind == "s":
        join = lambda value: np.concatenate(words_of(value, kind), axis=1)  # noqa: E731
        return lambda waves, value: waves.put_scalar(op.index, join(value))
    # half of a register, whose other half stays as it is
    half = {"v_fma_mixlo_f16": 0, "v_fma_mixhi_f16": 16}.get(instruction.mnemonic)

    def write(waves: Waves, value: np.ndarray) -> None:
        for i, words in enumerate(words_of(value, kind)):
            if half is not None:
                words = words << half | waves.vectors[op.index] & np.uint32(0xFFFF0000 >> half)
            waves.put(op.index + i, words, written and written(waves))

    return write


# --- DPP: operands from other lanes


ROW, LANE = LANES // 16 * 16, LANES % 16
DPP: dict[str, Callable] = {  # for each lane the one whose value it gets, -1 where there is none
    "quad_perm": lambda *four: LANES // 4 * 4 + np.array(four)[LANES % 4],
    "row_shl": lambda n: np.where(LANE + n < 16, LANES + n, -1),
    "row_shr": lambda n: np.where(n <= LANE, LANES - n, -1),
    "row_ror": lambda n: ROW + (LANE - n) % 16,
    "row_mirror": lambda: LANES ^ 15,
    "row_half_mirror": lambda: LANES ^ 7,
    # the last lane of a row to all of the next, of the first two rows to both others
    "row_bcast": lambda n: ROW - 1 if n == 15 else np.where(LANES >= 32, n, -1),
}


def across_lanes(instruction: Instruction, read: Read) -> tuple[Read, Read]:
    """The first source as DPP gives it, and the lanes that may be written: not those that the masks
    switch off nor, without bound_ctrl, those whose source is none or a lane that is off."""
    modifiers = instruction.modifiers
    name = next((name for name in DPP if name in modifiers), None)
    if not name:
        raise Unknown(f"DPP {modifiers}")
    source = DPP[name](*instruction.numbers(name, []))
    there = source >= 0
    source = np.maximum(source, 0)
    row_mask = int(modifiers.get("row_mask", "0xf"), 0)
    bank_mask = int(modifiers.get("bank_mask", "0xf"), 0)
    allowed = (row_mask >> LANES // 16 & 1 == 1) & (bank_mask >> LANE // 4 & 1 == 1)

    def moved(waves: Waves) -> np.ndarray:
        values = np.broadcast_to(read(waves), waves.exec.shape)[:, source]
        return np.where(there & waves.exec[:, source], values, values.dtype.type(0))

    def written(waves: Waves) -> np.ndarray:
        if "bound_ctrl" in modifiers:
            return allowed
        return allowed & there & waves.exec[:, source]

    return moved, written

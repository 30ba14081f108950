"""Operands of instructions: read from the waves' registers as arrays of a type, and written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fusion_lab.amd.assembly import Instruction, Operand, Unknown
from fusion_lab.amd.waves import Waves

LANES = np.arange(64)
PARTS = {  # of a register, by SDWA's names: the lowest bit, and how many
    "DWORD": (0, 32),
    **{f"WORD_{i}": (16 * i, 16) for i in range(2)},
    **{f"BYTE_{i}": (8 * i, 8) for i in range(4)},
}


def dtype_of(kind: str) -> np.dtype:
    """Of f32, u16 and so on."""
    return np.dtype(f"{kind[0]}{int(kind[1:]) // 8}")


def word(waves: Waves, op: Operand, place: int = 0) -> np.ndarray:
    """A register of an operand, or a constant, in 32 bits."""
    if op.kind == "number":
        return np.array([[op.bits("u", 32)]], np.uint32)
    if place >= op.count or op.kind not in "vs":
        raise Unknown(f"register {place} of {op.text}")
    index = op.index + place
    return waves.vectors[index] if op.kind == "v" else waves.scalars[:, index : index + 1]


def long_word(waves: Waves, op: Operand, place: int = 0) -> np.ndarray:
    """64 bits in two registers."""
    return word(waves, op, place) | word(waves, op, place + 1).astype(np.uint64) << 32


def read(waves: Waves, op: Operand, kind: str, place: int = 0, part: str = "DWORD") -> np.ndarray:
    """An operand as an array of this type, with its sign modifiers, which are of the highest bit.
    `place` is which register of several, or which half of them for 16 bits; `part` is SDWA's."""
    if kind == "mask":
        return waves.mask(op.index) if op.kind == "s" else np.full((1, 1), op.text == "-1")
    if kind.endswith("24"):
        return read(waves, op, f"{kind[0]}32", place, part) << 8 >> 8
    dtype = dtype_of(kind)
    unsigned = np.dtype(f"u{dtype.itemsize}").type
    if op.kind == "number":
        half = 16 * (place % 2) if dtype.itemsize == 2 else 0
        if half and "." in op.text:
            raise Unknown(f"the upper half of {op.text}")
        bits = np.array([[op.bits(kind[0], 8 * dtype.itemsize + half) >> half]], unsigned)
    elif dtype.itemsize == 8:
        bits = long_word(waves, op, place)
    else:
        shift, width = PARTS[part]
        if dtype.itemsize == 2:
            shift += 16 * (place % 2)
            place //= 2
        bits = word(waves, op, place)
        if shift or width < 32 or dtype.itemsize < 4:
            bits = (bits >> shift & np.uint32((1 << width) - 1)).astype(unsigned)
    sign = unsigned(1 << 8 * dtype.itemsize - 1)
    if op.absolute:
        bits = bits & ~sign
    if op.negative:
        bits = bits ^ sign
    return bits.view(dtype)


def words_of(value: np.ndarray, kind: str) -> list[np.ndarray]:
    """A result as the 32-bit words of the registers that take it."""
    value = np.asarray(value).astype(dtype_of(kind), copy=False)
    bits = value.view(f"u{value.itemsize}")
    if value.itemsize < 8:
        return [bits.astype(np.uint32, copy=False)]
    return [bits.astype(np.uint32), (bits >> 32).astype(np.uint32)]


def write(
    waves: Waves, op: Operand, kind: str, value: np.ndarray, lanes: np.ndarray | None = None
) -> None:
    """Write a result, of a vector register only these lanes of those that are at work."""
    if kind == "mask":
        waves.put_mask(op.index, value)
    elif op.kind == "s":
        waves.put_scalar(op.index, np.concatenate(words_of(value, kind), axis=1))
    else:
        for i, words in enumerate(words_of(value, kind)):
            waves.put(op.index + i, words, lanes)


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


def across_lanes(
    waves: Waves, instruction: Instruction, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A source as DPP gives it, and the lanes that may be written: not those that the masks switch
    off nor, without bound_ctrl, those whose source is none or a lane that is off."""
    modifiers = instruction.modifiers
    name = next((name for name in DPP if name in modifiers), None)
    if not name:
        raise Unknown(f"DPP {modifiers}")
    source = DPP[name](*instruction.numbers(name, []))
    there = (source >= 0) & waves.exec[:, source]
    row_mask = int(modifiers.get("row_mask", "0xf"), 0)
    bank_mask = int(modifiers.get("bank_mask", "0xf"), 0)
    lanes = (row_mask >> LANES // 16 & 1 == 1) & (bank_mask >> LANE // 4 & 1 == 1)
    if "bound_ctrl" not in modifiers:
        lanes = lanes & there
    moved = np.broadcast_to(values, there.shape)[:, source]
    return np.where(there, moved, values.dtype.type(0)), lanes

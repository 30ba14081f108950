"""The table of instructions, manual.txt, as functions, and the functions that its lines call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

TABLE = Path(__file__).with_name("manual.txt")
ALTERNATIVES = re.compile(r"\{(.+?)\}")


# --- functions of the table


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def long(x: np.ndarray) -> np.ndarray:
    return x.astype(f"{x.dtype.kind}8")


def field(x: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    """`width` bits from `offset` on, with the sign of the type; none are 0."""
    bits = 8 * x.dtype.itemsize
    unused = np.maximum(bits - width.astype(np.int64), 0)
    kept = x >> offset.astype(x.dtype)
    shift = np.minimum(unused, bits - 1).astype(x.dtype)
    return np.where(width == 0, 0, kept << shift >> shift).astype(x.dtype)


def reversed_bits(x: np.ndarray) -> np.ndarray:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        x = (x >> shift & mask) | (x & mask) << shift
    return x >> 16 | x << 16


def leading_zeros(x: np.ndarray) -> np.ndarray:
    """Above the highest bit that is 1; of 0 it is -1."""
    return np.where(x == 0, -1, 32 - np.frexp(wide(x))[1]).astype(np.int32).view(np.uint32)


def chosen_bytes(high: np.ndarray, low: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """Byte i is that of the eight whose number is byte i of the choice; 8 to 11 are 255 where byte
    1, 3, 5 or 7 has its highest bit, 12 is 0, above 12 255."""
    both, result = high.astype(np.uint64) << 32 | low, 0
    for place in range(0, 32, 8):
        number = choice >> place & 255
        byte = both >> (8 * (number & 7)).astype(np.uint64) & 255
        if (number > 7).any():
            sign = both >> (16 * (number & 3) + 15).astype(np.uint64) & 1
            more = np.where(number > 12, 255, np.where(number == 12, 0, 255 * sign))
            byte = np.where(number > 7, more, byte)
        result |= byte.astype(np.uint32) << place
    return result


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c, rounded once: float64 has the product of two float32 in full, and that of two
    float64 is one with its rounding error beside it (Dekker's)."""
    kind = a.dtype
    a, b, c = wide(a), wide(b), wide(c)
    product = a * b
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    if kind != np.float64:
        # an inexact sum gets an odd last bit: then it is no tie where it is rounded again
        bits = total.view(np.int64)
        even = ((lost < 0) | (lost > 0)) & (bits & 1 == 0)
        step = np.where((lost > 0) == (total > 0), 1, -1)
        return (bits + np.where(even, step, 0)).view(np.float64).astype(kind)
    a_high, b_high = (x * 134217729.0 - (x * 134217729.0 - x) for x in (a, b))
    low = (a - a_high) * (b - b_high)
    error = low - (product - a_high * b_high - (a - a_high) * b_high - a_high * (b - b_high))
    exact = total + (lost + error)
    return np.where(np.isfinite(exact), exact, total)


def flushed(x: np.ndarray) -> np.ndarray:
    """Denormal numbers are 0, with their sign."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def most(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger one: a number before NaN, 0 before -0."""
    if a.dtype.kind != "f":
        return np.maximum(a, b)
    return np.where((a == 0) & (b == 0), a + b, np.fmax(a, b))


def least(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return -most(-a, -b) if a.dtype.kind == "f" else np.minimum(a, b)


def low(register: np.ndarray, half: np.ndarray) -> np.ndarray:
    return register & np.uint32(0xFFFF0000) | half.view(np.uint16)


def high(register: np.ndarray, half: np.ndarray) -> np.ndarray:
    return register & np.uint32(0xFFFF) | half.view(np.uint16).astype(np.uint32) << 16


def of_lane(values: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """For each lane, or for the wave, the value of another."""
    return np.take_along_axis(values, (lane & 63).astype(np.int64), 1)


def whole(x: np.ndarray, kind: type) -> np.ndarray:
    """Without its fraction, the nearest that the type has; NaN is 0."""
    limits = np.iinfo(kind)
    return np.clip(np.nan_to_num(np.trunc(wide(x)), nan=0), limits.min, limits.max).astype(kind)


def exponent(x: np.ndarray) -> np.ndarray:
    """As it is stored."""
    return (x.view(np.int32) >> 23 & 255).astype(np.int32)


def div_scale(x: np.ndarray, below: np.ndarray, above: np.ndarray) -> tuple:
    """The first of three steps of above / below: x is one of the two, times a power of 2 where the
    quotient or 1 / below would be denormal; and whether div_fmas has to scale its result."""
    up, down, normal = f32(2.0**64), f32(2.0**-64), np.finfo(f32).tiny
    far = exponent(above) - exponent(below) >= 96
    small = np.abs(below) < normal
    small_inverse = np.abs(1 / below) < normal
    small_quotient = np.abs(above / below) < normal
    cases = [
        (far, np.where(x == below, up, 1)),
        (small, up),
        # the manual says up, which overflows: no quotient would be right
        (small_inverse & small_quotient, np.where(x == below, down, 1)),
        (small_inverse, down),
        (small_quotient, np.where(x == above, up, 1)),
        (exponent(above) <= 23, up),
    ]
    scale = np.select(*zip(*cases, strict=True), 1)
    never = (above == 0) | (below == 0)
    return np.where(never, np.nan, x * scale), (far | small_quotient & ~small) & ~never


def div_fmas(a: np.ndarray, b: np.ndarray, c: np.ndarray, flag: np.ndarray) -> np.ndarray:
    """The second: a b + c, and back by the power of 2 that div_scale took; which of the two it was
    shows in the quotient's size."""
    c = np.ascontiguousarray(np.broadcast_to(c, np.broadcast_shapes(a.shape, b.shape, c.shape)))
    back = np.where(exponent(c) > 127, 2.0**64, 2.0**-64).astype(np.float32)
    exact = fma(a, b, c)
    return np.where(flag, exact * back, exact)


def div_fixup(quotient: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
    """The third: where the operands are no ordinary numbers the quotient is what IEEE 754 says, and
    its sign is theirs."""
    plain = np.isfinite(below) & np.isfinite(above) & (below != 0) & (above != 0)
    signed = np.copysign(quotient, np.copysign(above, below) * np.copysign(1, above))
    return np.where(plain, np.where(np.isnan(quotient), quotient, signed), above / below)


def of_class(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Whether x is of a class whose bit is set in the mask: NaN (0, 1), -inf (2), negative normal
    (3), negative denormal (4), -0 (5), 0 (6), denormal (7), normal (8), inf (9)."""
    size = np.select([x == 0, np.abs(x) < np.finfo(x.dtype).tiny, np.isfinite(x)], [0, 1, 2], 3)
    number = np.where(np.signbit(x), 5 - size, 6 + size)
    bits = np.where(np.isnan(x), 3, np.int64(1) << number)
    return bits & mask != 0


u32, i32, f32, f16 = np.uint32, np.int32, np.float32, np.float16
popcount = np.bitwise_count
TURN = 2 * np.pi
BELOW = np.array([[(1 << lane) - 1 for lane in range(64)]], np.uint64)
LANES_BELOW, LANES_BELOW_HIGH = BELOW.astype(u32), (BELOW >> 32).astype(u32)


class Row(NamedTuple):
    """An instruction of the table."""

    meaning: str
    sources: dict[str, str]  # S0, S1, S2 and D where it is read, each with its type
    results: dict[str, str]  # D and M with their types, SCC and EXEC
    reads: tuple[str, ...]  # of SCC, EXEC, VCC, ON and OFFSET
    function: Callable  # (sources, reads) -> results


def row(name: str, meaning: str) -> Row:
    """Make a function of the right column: its statements are Python already, but for types."""
    kind, bits = re.search(r"([a-z]+)(\d+)$", name).groups()
    kind = kind.replace("b", "u")  # bits are unsigned numbers
    meaning = re.sub(r"\.T\b", f".{kind}{bits}", meaning)
    meaning = re.sub(r"\bL\b", str(int(bits) - 1), meaning)
    results, sources, reads, body = {}, {}, {}, []
    for statement in meaning.split("; "):
        targets, _, expression = statement.partition(" = ")
        sources |= dict(re.findall(r"\b(S\d|D)\.(\w+)", expression))
        reads |= dict.fromkeys(re.findall(r"\b(?:SCC|EXEC|VCC|ON|OFFSET)\b", expression))
        results |= dict(re.findall(r"\b(D|M|SCC|EXEC)\b\.?(\w*)", targets))
        body.append(re.sub(r"\b(S\d|D|M)\.\w+", r"\1", statement))
    lines = [f"def {name}({', '.join([*sources, *reads])}):", *body]
    lines.append(f"return {', '.join(results)},")
    space: dict[str, Callable] = {}
    exec("\n    ".join(lines), vars(np) | globals(), space)
    return Row(meaning, sources, results, tuple(reads), space[name])


def rows() -> dict[str, Row]:
    """The table, by name."""
    found = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        names, _, meaning = line.partition(" ")
        if not names or names == "#":
            continue
        first, *types = names.split("/")
        stem = first.rpartition("_")[0]
        for pattern in (first, *(f"{stem}_{kind}" for kind in types)):
            choices = ALTERNATIVES.search(pattern)
            for number in range(len(choices[1].split(",")) if choices else 1):
                text = f"{pattern} {meaning.strip()}"
                chosen = ALTERNATIVES.sub(lambda part, n=number: part[1].split(",")[n], text)
                name, _, rule = chosen.partition(" ")
                found[name] = row(name, rule)
    return found

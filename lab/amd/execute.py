"""Makes of each instruction a function of the waves: operands are looked up here, once, so that
executing is reading arrays, the function of the manual's row, and writing arrays."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from lab.amd import manual, transfers
from lab.amd.assembly import Instruction, Operand, Program, Unknown
from lab.amd.waves import EXEC, VCC, Waves

Read = Callable[[Waves], np.ndarray]
Run = Callable[[Waves], None]
LANES = np.arange(64)
DTYPES = {kind: np.dtype(f"{kind[0]}{int(kind[1:]) // 8}") for kind in
          ("u8", "i8", "u16", "i16", "f16", "u32", "i32", "f32", "u64", "i64", "f64")}  # fmt: skip
# 16 bits of results that leave the other half of the register as it is; others make it 0
KEEP_HALF = ("v_fma_f16", "v_mad_u16", "v_div_fixup_f16", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
KNOWN_MODIFIERS = {
    "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp", "mul", "div", "dst_sel", "dst_unused",
    "src0_sel", "src1_sel", "row_mask", "bank_mask", "bound_ctrl", "quad_perm", "row_shl",
    "row_shr", "row_ror", "row_bcast", "row_newbcast", "row_mirror", "row_half_mirror",
}  # fmt: skip


# --- reading operands


def reader(op: Operand, kind: str, place: int = 0) -> Read:
    """A function that gives an operand as an array of this type, with its sign modifiers. `place`
    is the half of a register for 16 bits, else which register of several."""
    if kind == "mask":
        return mask_reader(op)
    if kind in ("u24", "i24"):
        full = reader(op, f"{kind[0]}32", place)
        return lambda waves: full(waves) << 8 >> 8
    dtype = DTYPES[kind]
    read = unsigned_reader(op, kind, dtype, place)
    if op.absolute:
        plain = read
        read = lambda waves: np.abs(plain(waves))  # noqa: E731
    if not op.negative:
        return read
    if kind[0] == "f":
        return lambda waves: np.negative(read(waves))
    sign = dtype.type(1 << 8 * dtype.itemsize - 1)  # negative numbers of a move: of floats
    return lambda waves: read(waves) ^ sign


def unsigned_reader(op: Operand, kind: str, dtype: np.dtype, place: int) -> Read:
    size = dtype.itemsize
    if op.kind == "number":
        bits = op.bits(kind[0], 8 * size)
        if place and size == 2:
            bits = op.bits(kind[0], 32) >> 16
        value = np.array([[bits]], f"u{size}").view(dtype)
        return lambda waves: value
    if op.kind not in "vs":
        raise Unknown(f"operand {op.text}")
    first = op.index if size == 2 else op.index + place
    if size != 2 and place >= op.count:
        raise Unknown(f"register {place} of {op.text}")
    if op.kind == "s":
        if size == 2:
            return lambda waves: waves.scalars[:, first : first + 1].view(dtype)[:, place::2]
        return lambda waves: waves.scalars[:, first : first + size // 4].view(dtype)
    if size == 2:
        return lambda waves: getattr(waves, kind)[first][:, place::2]
    if size == 4:
        return lambda waves: getattr(waves, kind)[first]

    def pair(waves: Waves) -> np.ndarray:
        low, high = waves.vectors[first], waves.vectors[first + 1]
        return (low | high.astype(np.uint64) << 32).view(dtype)

    return pair


def mask_reader(op: Operand) -> Read:
    if op.kind == "number":
        value = np.full((1, 1), int(op.text, 0) != 0)
        return lambda waves: value
    return lambda waves: waves.mask(op.index)


def mixed_reader(op: Operand, half: int, is_half: int) -> Read:
    """An operand of v_fma_mix: a float32, or a float16 in half a register."""
    read = reader(op, "f16" if is_half else "f32", half if is_half else 0)
    return lambda waves: read(waves).astype(np.float32)


def part_reader(op: Operand, kind: str, which: str) -> Read:
    """An operand of SDWA: DWORD, WORD_1, BYTE_3 and so on of a register."""
    unit, _, number = which.partition("_")
    if unit == "DWORD" and not op.extended:
        return reader(op, kind)
    size = {"BYTE": 1, "WORD": 2, "DWORD": 4}[unit]
    letter = "f" if kind == "f16" else "i" if op.extended else "u"
    dtype, step, place = np.dtype(f"{letter}{size}"), 4 // size, int(number or 0)

    def part(waves: Waves) -> np.ndarray:
        words = waves.vectors[op.index] if op.kind == "v" else waves.scalars[:, [op.index]]
        value = words.view(dtype)[:, place::step].astype(DTYPES[kind])
        value = np.abs(value) if op.absolute else value
        return np.negative(value) if op.negative else value

    return part


# --- DPP: operands from other lanes


def lanes_of(instruction: Instruction) -> tuple[np.ndarray, np.ndarray]:
    """For each lane the one whose value it gets, and whether there is one."""
    modifiers, row, lane = instruction.modifiers, LANES // 16 * 16, LANES % 16
    name = next((name for name in modifiers if re.match("row_(?!mask)|quad", name)), None)
    value = modifiers.get(name, "")
    if name == "quad_perm":
        source = LANES // 4 * 4 + np.array(instruction.numbers(name, []))[LANES % 4]
    elif name == "row_shl":
        source = np.where(lane + int(value) < 16, LANES + int(value), -1)
    elif name == "row_shr":
        source = np.where(lane >= int(value), LANES - int(value), -1)
    elif name == "row_ror":
        source = row + (lane - int(value)) % 16
    elif name in ("row_mirror", "row_half_mirror"):
        source = LANES ^ (15 if name == "row_mirror" else 7)
    elif name == "row_newbcast":
        source = row + int(value)
    elif name == "row_bcast" and value == "15":  # the last lane of a row to all of the next
        source = row - 1
    elif name == "row_bcast" and value == "31":
        source = np.where(LANES >= 32, 31, -1)
    else:
        raise Unknown(f"DPP {modifiers}")
    return source, source >= 0


def across_lanes(instruction: Instruction, read: Read) -> tuple[Read, Read]:
    """The first source as DPP gives it, and the lanes that may be written: not those that the masks
    switch off nor, without bound_ctrl, those whose source is none or a lane that is off."""
    source, there = lanes_of(instruction)
    row_mask, bank_mask = (
        int(instruction.modifiers.get(name, "0xf"), 0) for name in ("row_mask", "bank_mask")
    )
    allowed = (row_mask >> LANES // 16 & 1 == 1) & (bank_mask >> LANES % 16 // 4 & 1 == 1)
    bound_ctrl, source = "bound_ctrl" in instruction.modifiers, np.maximum(source, 0)

    def moved(waves: Waves) -> np.ndarray:
        values = np.broadcast_to(read(waves), waves.exec.shape)[:, source]
        return np.where(there & waves.exec[:, source], values, values.dtype.type(0))

    def written(waves: Waves) -> np.ndarray:
        return allowed if bound_ctrl else allowed & there & waves.exec[:, source]

    return moved, written


# --- writing results


def words_of(value: np.ndarray, kind: str) -> list[np.ndarray]:
    """A result as the 32-bit words of the registers that take it."""
    value = np.asarray(value).astype(DTYPES[kind], copy=False)
    if value.itemsize == 2:
        return [value.view(np.uint16).astype(np.uint32)]
    if value.itemsize == 4:
        return [value.view(np.uint32)]
    value = value.view(np.uint64)
    return [value.astype(np.uint32), (value >> 32).astype(np.uint32)]


def vector_writer(op: Operand, kind: str, written: Read | None, change: Callable) -> Callable:
    def write(waves: Waves, value: np.ndarray) -> None:
        allowed = written and written(waves)
        for i, words in enumerate(words_of(change(value), kind)):
            waves.put(op.index + i, words, allowed)

    return write


def writer(instruction: Instruction, op: Operand, kind: str, written: Read | None) -> Callable:
    """A function (waves, value) that writes a result, with clamp and the like."""
    modifiers = instruction.modifiers
    if kind == "mask":
        shape = lambda waves, value: np.broadcast_to(value, waves.exec.shape)  # noqa: E731
        return lambda waves, value: waves.put_mask(op.index, shape(waves, value).astype(bool))
    if op.kind == "s":
        join = lambda value, kind: np.concatenate(words_of(value, kind), axis=1)  # noqa: E731
        return lambda waves, value: waves.put_scalar(op.index, join(value, kind))
    change = result_change(modifiers, kind)
    high = instruction.mnemonic == "v_fma_mixhi_f16" or instruction.numbers("op_sel", [0])[3:] == [
        1
    ]
    if DTYPES[kind].itemsize == 2 and (high or instruction.mnemonic in KEEP_HALF):
        half, dtype = int(high), DTYPES[kind]

        def write_half(waves: Waves, value: np.ndarray) -> None:
            waves.put_half(op.index, half, change(value).astype(dtype).view(np.uint16))

        return write_half
    if "dst_sel" in modifiers and modifiers["dst_sel"] != "DWORD":
        return part_writer(instruction, op, kind)
    return vector_writer(op, kind, written, change)


def result_change(modifiers: dict[str, str], kind: str) -> Callable:
    """What clamp, mul:2 and the like do to a result."""
    if not {"clamp", "mul", "div"} & modifiers.keys():
        return lambda value: value
    if kind[0] != "f":
        raise Unknown("clamp of integers")
    factor = float(modifiers.get("mul", 1)) / float(modifiers.get("div", 1))
    if "clamp" not in modifiers:
        return lambda value: value * value.dtype.type(factor)
    # NaN becomes 0
    return lambda value: np.fmin(np.fmax(value * value.dtype.type(factor), 0), 1)


def part_writer(instruction: Instruction, op: Operand, kind: str) -> Callable:
    """A result of SDWA into a byte or a word of a register, 0 in the others or as they were."""
    unit, _, number = instruction.modifiers["dst_sel"].partition("_")
    bits = 8 if unit == "BYTE" else 16
    shift, mask = bits * int(number), (1 << bits) - 1
    unused = instruction.modifiers.get("dst_unused", "UNUSED_PAD")
    if unused == "UNUSED_SEXT":
        raise Unknown(unused)

    def write(waves: Waves, value: np.ndarray) -> None:
        words = (words_of(value, kind)[0] & mask) << shift
        if unused == "UNUSED_PRESERVE":
            words = words | waves.vectors[op.index] & ~np.uint32(mask << shift)
        waves.put(op.index, words)

    return write


# --- instructions of the manual's tables


def of_table(instruction: Instruction, row: manual.Row) -> Run:
    operands, modifiers = list(instruction.operands), instruction.modifiers
    if unknown := modifiers.keys() - KNOWN_MODIFIERS:
        raise Unknown(f"modifier {unknown.pop()}")
    targets = {name: operands.pop(0) for name in "DM" if name in row.results}
    if len(operands) != len([name for name in row.sources if name != "D"]):
        raise Unknown(f"{len(operands)} sources")
    op_sel, op_sel_hi = (instruction.numbers(name, [0] * 4) for name in ("op_sel", "op_sel_hi"))
    readers, written = [], None
    for name, kind in row.sources.items():
        if name == "D":
            readers.append(reader(targets["D"], kind))
            continue
        number = int(name[1])
        op = operands[number]
        if kind == "mix":
            read = mixed_reader(op, op_sel[number], op_sel_hi[number])
        elif f"src{number}_sel" in modifiers:
            read = part_reader(op, kind, modifiers[f"src{number}_sel"])
        else:
            read = reader(op, kind, op_sel[number] if kind.endswith("16") else 0)
        if number == 0 and instruction.encoding == "dpp":
            read, written = across_lanes(instruction, read)
        readers.append(read)
    readers += [STATE[name] for name in row.reads]
    writers = [
        WRITE[name] if name in WRITE else writer(instruction, targets[name], kind, written)
        for name, kind in row.results.items()
    ]
    function = row.function

    def run(waves: Waves) -> None:
        results = function(*[read(waves) for read in readers])
        for write, result in zip(writers, results, strict=True):
            write(waves, result)

    return run


STATE: dict[str, Read] = {
    "SCC": lambda waves: waves.scc,
    "VCC": lambda waves: waves.mask(VCC),
    "EXEC": lambda waves: waves.scalars[:, EXEC : EXEC + 2].view(np.uint64),
}
WRITE = {
    "SCC": Waves.put_scc,
    "EXEC": lambda waves, value: waves.put_scalar(EXEC, value.view(np.uint32)),
}


def in_pairs(instruction: Instruction, row: manual.Row) -> Run:
    """v_pk_...: the row's function twice. op_sel and op_sel_hi choose which half of each source
    makes the low and the high result."""
    target, *operands = instruction.operands
    kind = row.results["D"]
    choices = [
        instruction.numbers("op_sel", [0] * 3),
        instruction.numbers("op_sel_hi", [1] * 3),
    ]
    signs = [instruction.numbers(name, [0] * 3) for name in ("neg_lo", "neg_hi")]
    change = result_change(instruction.modifiers, kind)

    def half_of(number: int, result: int) -> Read:
        op, place = operands[number], choices[result][number]
        if op.kind == "number" and kind.endswith("32"):
            place = 0  # a constant is both halves
        if op.kind == "number" and place and re.search(r"\d\.", op.text):
            raise Unknown(f"the upper half of {op.text}")
        read = reader(op, kind, place)
        return (lambda waves: np.negative(read(waves))) if signs[result][number] else read

    readers = [[half_of(number, result) for number in range(len(operands))] for result in (0, 1)]
    if "D" in row.sources:  # v_pk_fmac
        for result in (0, 1):
            readers[result].append(reader(target, kind, result))

    def run(waves: Waves) -> None:
        results = [row.function(*[read(waves) for read in half])[0] for half in readers]
        words = [words_of(change(result), kind)[0] for result in results]
        if kind.endswith("16"):
            words = [words[0] | words[1] << 16]
        for i, word in enumerate(words):
            waves.put(target.index + i, word)

    return run


# --- instructions that are not in the tables


def pk_mov(instruction: Instruction) -> Run:
    """v_pk_mov_b32: one register of each source's two."""
    target, *operands = instruction.operands
    places = instruction.numbers("op_sel", [0, 0])
    readers = [
        reader(op, "u32", place if op.count > 1 else 0)
        for op, place in zip(operands, places, strict=True)
    ]

    def run(waves: Waves) -> None:
        for i, words in enumerate([np.copy(read(waves)) for read in readers]):
            waves.put(target.index + i, words)

    return run


def readlane(instruction: Instruction) -> Run:
    """v_readlane_b32, v_readfirstlane_b32: a lane's value, whether it is at work or not."""
    target, source, *lane = instruction.operands
    which = reader(lane[0], "u32") if lane else lambda waves: waves.exec.argmax(1)[:, None]
    read = reader(source, "u32")

    def run(waves: Waves) -> None:
        number = np.broadcast_to(which(waves) & 63, (waves.count, 1)).astype(np.int64)
        values = np.broadcast_to(read(waves), waves.exec.shape)
        waves.put_scalar(target.index, np.take_along_axis(values, number, 1))

    return run


def writelane(instruction: Instruction) -> Run:
    target, value, lane = instruction.operands
    read, which = reader(value, "u32"), reader(lane, "u32")

    def run(waves: Waves) -> None:
        here = waves.here & (which(waves) % 64 == LANES)
        np.copyto(waves.vectors[target.index], read(waves), where=here)

    return run


def swap(instruction: Instruction) -> Run:
    first, second = instruction.operands

    def run(waves: Waves) -> None:
        before = waves.vectors[first.index].copy()
        waves.put(first.index, waves.vectors[second.index].copy())
        waves.put(second.index, before)

    return run


def swap_rows(instruction: Instruction) -> Run:
    """v_permlane32_swap_b32, v_permlane16_swap_b32: the odd rows of 32 or 16 lanes of the first
    register and the even ones of the second change places."""
    first, second = (op.index for op in instruction.operands)
    rows = 32 if "32_swap" in instruction.mnemonic else 16
    even = LANES // rows % 2 == 0

    def run(waves: Waves) -> None:
        a, b = waves.vectors[first].copy(), waves.vectors[second].copy()
        waves.put(first, np.where(even, a, np.roll(b, rows, 1)))
        waves.put(second, np.where(even, np.roll(a, -rows, 1), b))

    return run


def bitop3(instruction: Instruction) -> Run:
    """v_bitop3_b32, _b16: any function of three bits, as a table of eight."""
    target, *operands = instruction.operands
    kind = "u32" if instruction.mnemonic.endswith("32") else "u16"
    table = int(instruction.modifiers["bitop3"], 0)
    readers = [reader(op, kind) for op in operands]

    def run(waves: Waves) -> None:
        bits = [read(waves) for read in readers]
        result = np.zeros((1, 1), DTYPES[kind])
        for case in range(8):
            if table >> case & 1:
                a, b, c = (x if case & 4 >> i else ~x for i, x in enumerate(bits))
                result = result | a & b & c
        waves.put(target.index, words_of(result, kind)[0])

    return run


MFMA = re.compile(r"v_mfma_f32_(\d+)x\1x(\d+)_?(f32|f16|bf16|xf32)(_1k)?$")


def mfma(instruction: Instruction, rows: int, depth: int, kind: str) -> Run:
    """D = A B + C for a tile of rows x rows, by a wave, whether lanes are at work or not.

    Lane l has row (of A; of B column) l % rows, and of it as many neighbours of the K dimension as
    its registers hold, from l // rows times their number on. Register r of the result is row
    4 (64 / rows) (r // 4) + 4 (l // rows) + r % 4 of column l % rows.
    """
    target, *factors, added = instruction.operands
    if unknown := instruction.modifiers:
        raise Unknown(f"modifier {next(iter(unknown))}")
    each = rows * depth // 64
    column, group = LANES % rows, LANES // rows
    registers = rows * rows // 64
    row_of = [4 * (64 // rows) * (r // 4) + 4 * group + r % 4 for r in range(registers)]
    start = [reader(added, "f32", r if added.kind == "v" else 0) for r in range(registers)]

    stored = {"bf16": "u16", "f16": "f16"}.get(kind, "f32")
    widen = manual.bf16 if kind == "bf16" else np.float32
    halves = 2 if kind.endswith("f16") else 1  # values in a register

    def tile(waves: Waves, op: Operand) -> np.ndarray:
        values = np.empty((waves.count, rows, depth), np.float32)
        for i in range(each):
            register = getattr(waves, stored)[op.index + i // halves]
            values[:, column, each * group + i] = widen(register[:, i % halves :: halves])
        return values

    def run(waves: Waves) -> None:
        a, b = (tile(waves, op) for op in factors)
        product = a @ b.transpose(0, 2, 1)
        results = [
            read(waves) + product[:, row, column] for read, row in zip(start, row_of, strict=True)
        ]
        for r, result in enumerate(results):
            words = result.view(np.uint32)
            np.copyto(waves.vectors[target.index + r], words, where=waves.here)

    return run


def branch(test: Callable[[Waves], np.ndarray]) -> Callable[[Instruction, Program], Run]:
    def build(instruction: Instruction, program: Program) -> Run:
        target = program.labels[instruction.operands[0].text]
        return lambda waves: waves.branch(test(waves), target)

    return build


def any_lane(mask: np.ndarray) -> np.ndarray:
    return mask.any(1, keepdims=True)


BRANCHES = {
    "s_branch": branch(lambda waves: waves.here),
    "s_cbranch_scc0": branch(lambda waves: ~waves.scc),
    "s_cbranch_scc1": branch(lambda waves: waves.scc),
    "s_cbranch_vccz": branch(lambda waves: ~any_lane(waves.mask(VCC))),
    "s_cbranch_vccnz": branch(lambda waves: any_lane(waves.mask(VCC))),
    "s_cbranch_execz": branch(lambda waves: ~any_lane(waves.exec)),
    "s_cbranch_execnz": branch(lambda waves: any_lane(waves.exec)),
}
OTHERS: dict[str, Callable[[Instruction], Run]] = {
    "v_pk_mov_b32": pk_mov,
    "v_readlane_b32": readlane,
    "v_readfirstlane_b32": readlane,
    "v_writelane_b32": writelane,
    "v_swap_b32": swap,
    "v_permlane16_swap_b32": swap_rows,
    "v_permlane32_swap_b32": swap_rows,
    "v_bitop3_b32": bitop3,
    "v_bitop3_b16": bitop3,
    "s_barrier": lambda instruction: Waves.barrier,
    "s_endpgm": lambda instruction: Waves.end,
}
# what takes time only, and what makes caches agree, which there are none of here
NOTHING = ("s_waitcnt", "s_nop", "s_sleep", "s_setprio", "s_sched_barrier", "buffer_inv",
           "buffer_wbl2", "buffer_wbinvl1", "buffer_wbinvl1_vol", "s_dcache_inv", "s_icache_inv",
           "v_nop", "s_inst_prefetch")  # fmt: skip


def build(instruction: Instruction, program: Program) -> tuple[str, Run]:
    """Kind and function of an instruction; Unknown if there is none."""
    name = instruction.mnemonic
    if name in NOTHING:
        return "other", lambda waves: None
    if name in BRANCHES:
        return "branch", BRANCHES[name](instruction, program)
    if found := MFMA.match(name):
        return "MFMA", mfma(instruction, int(found[1]), int(found[2]), found[3])
    kind = "VALU" if name.startswith("v_") else "SALU"
    if name in OTHERS:
        return "other" if name == "s_barrier" else kind, OTHERS[name](instruction)
    if row := ROWS.get(name):
        return kind, of_table(instruction, row)
    if name.startswith("v_pk_") and (row := ROWS.get(name.replace("_pk", "", 1))):
        return kind, in_pairs(instruction, row)
    if access := transfers.build(instruction):
        return access
    raise Unknown("unknown instruction")


def prepare(program: Program) -> int:
    """Give each instruction its function; returns how many vector registers there are."""
    registers = 1
    for instruction in program.code:
        try:
            instruction.kind, instruction.run = build(instruction, program)
        except Unknown as error:
            where = f"{program.name}, {instruction.line}"
            raise Unknown(f"{where}: {instruction.text}: {error}") from error
        for op in instruction.operands:
            if op.kind == "v":
                registers = max(registers, op.index + op.count)
    return registers


ROWS = manual.rows()

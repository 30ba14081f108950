"""Makes of each instruction a function of the waves: operands are looked up here, once, so that
executing is reading arrays, the function of the manual's row, and writing arrays."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from fusion_lab.amd import manual, transfers
from fusion_lab.amd.assembly import Instruction, Operand, Program, Unknown
from fusion_lab.amd.waves import EXEC, VCC, Waves, word

Read = Callable[[Waves], np.ndarray]
Run = Callable[[Waves], None]
LANES = np.arange(64)
KNOWN_MODIFIERS = {"clamp", "op_sel", "op_sel_hi", "dst_sel", "dst_unused", "src0_sel", "src1_sel",
                   "row_mask", "bank_mask", "bound_ctrl"}  # fmt: skip


def dtype_of(kind: str) -> np.dtype:
    """Of f32, u16 and so on."""
    return np.dtype(f"{kind[0]}{int(kind[1:]) // 8}")


# --- reading operands


def reader(op: Operand, kind: str, place: int = 0, part: str = "DWORD") -> Read:
    """A function that gives an operand as an array of this type, with its sign modifiers. `place`
    is which register of several, or which half of them for 16 bits; `part` is SDWA's."""
    if kind == "mask":
        value = op.text == "-1"
        return lambda waves: waves.mask(op.index) if op.kind == "s" else np.full((1, 1), value)
    if kind.endswith("24"):
        full = reader(op, f"{kind[0]}32", place, part)
        return lambda waves: full(waves) << 8 >> 8
    dtype = dtype_of(kind)
    half = place % 2 if dtype.itemsize == 2 else 0
    if op.kind == "number":
        bits = op.bits(kind[0], 32 if half else 8 * dtype.itemsize) >> 16 * half
        value = np.array([[bits]], f"u{dtype.itemsize}").view(dtype)
        read = lambda waves: value  # noqa: E731
    elif dtype.itemsize == 2:
        low = selected(word(op, place // 2), part)
        read = lambda waves: (low(waves) >> 16 * half).astype(np.uint16).view(dtype)  # noqa: E731
    elif dtype.itemsize == 4:
        low = selected(word(op, place), part)
        read = lambda waves: low(waves).view(dtype)  # noqa: E731
    else:
        low, high = word(op, place), word(op, place + 1, high=True)
        read = lambda waves: (low(waves) | high(waves).astype(np.uint64) << 32).view(dtype)  # noqa: E731
    return signed(read, op, dtype)


def signed(read: Read, op: Operand, dtype: np.dtype) -> Read:
    """With abs and neg, which are of the highest bit, whatever the type."""
    if not (op.negative or op.absolute):
        return read
    unsigned = np.dtype(f"u{dtype.itemsize}")
    sign = unsigned.type(1 << 8 * dtype.itemsize - 1)
    kept = ~sign if op.absolute else ~unsigned.type(0)
    changed = sign if op.negative else unsigned.type(0)
    return lambda waves: (read(waves).view(unsigned) & kept ^ changed).view(dtype)


def selected(read: Read, part: str) -> Read:
    """A part of a register for SDWA: DWORD, WORD_1, BYTE_3 ..."""
    if part == "DWORD":
        return read
    bits = 8 if part.startswith("BYTE") else 16
    shift = bits * int(part[-1])
    return lambda waves: read(waves) >> shift & (1 << bits) - 1


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
    row_mask, bank_mask = (int(modifiers.get(n, "0xf"), 0) for n in ("row_mask", "bank_mask"))
    allowed = (row_mask >> LANES // 16 & 1 == 1) & (bank_mask >> LANES % 16 // 4 & 1 == 1)
    bound_ctrl, source = "bound_ctrl" in modifiers, np.maximum(source, 0)

    def moved(waves: Waves) -> np.ndarray:
        own = waves.undefined[0]
        values = np.broadcast_to(read(waves), waves.exec.shape)[:, source]
        waves.undefined[0] = own  # not of this lane
        return np.where(there & waves.exec[:, source], values, values.dtype.type(0))

    def written(waves: Waves) -> np.ndarray:
        return allowed if bound_ctrl else allowed & there & waves.exec[:, source]

    return moved, written


# --- writing results


def words_of(value: np.ndarray, kind: str) -> list[np.ndarray]:
    """A result as the 32-bit words of the registers that take it."""
    value = np.asarray(value).astype(dtype_of(kind), copy=False)
    bits = value.view(f"u{value.itemsize}")
    if value.itemsize < 8:
        return [bits.astype(np.uint32, copy=False)]
    return [bits.astype(np.uint32), (bits >> 32).astype(np.uint32)]


def writer(instruction: Instruction, op: Operand, kind: str, written: Read | None) -> Callable:
    """A function (waves, value) that writes a result; `written` are the lanes that DPP writes."""
    if kind == "mask":
        compares = instruction.mnemonic.startswith("v_cmp")

        def write_mask(waves: Waves, value: np.ndarray) -> None:
            if compares:
                waves.must_be_written()
            waves.put_mask(op.index, value)

        return write_mask
    if op.kind == "s":
        join = lambda value: np.concatenate(words_of(value, kind), axis=1)  # noqa: E731
        return lambda waves, value: waves.put_scalar(op.index, join(value))
    # half of a register, whose other half stays as it is
    half = {"v_fma_mixlo_f16": 0, "v_fma_mixhi_f16": 16}.get(instruction.mnemonic)

    def write(waves: Waves, value: np.ndarray) -> None:
        for i, words in enumerate(words_of(value, kind)):
            if i:
                waves.take_high()
            if half is not None:
                words = words << half | waves.vectors[op.index] & np.uint32(0xFFFF0000 >> half)
            waves.put(op.index + i, words, written and written(waves))

    return write


# --- instructions of the manual's tables


def clamped(instruction: Instruction, function: Callable) -> Callable:
    """With the modifier clamp, by which a sum of unsigned numbers ends at the largest or at 0."""
    if "clamp" not in instruction.modifiers:
        return function
    if not re.match(r"v_(add|sub|subrev)_u32", instruction.mnemonic):
        raise Unknown("modifier clamp")

    def within(*sources: np.ndarray) -> tuple:
        exact = function(*(source.astype(np.int64) for source in sources))[0]
        return (np.clip(exact, 0, 0xFFFFFFFF).astype(np.uint32),)

    return within


def all_sources(waves: Waves, readers: list[Read]) -> list[np.ndarray]:
    return [read(waves) for read in readers]


def selected_sources(waves: Waves, readers: list[Read]) -> list[np.ndarray]:
    """Of v_cndmask, which depends in each lane on one of its two sources."""
    sources, undefined = [], []
    for read in readers:
        waves.undefined[0] = None
        sources.append(read(waves))
        undefined.append(False if waves.undefined[0] is None else waves.undefined[0])
    chosen = np.where(sources[2], undefined[1], undefined[0])
    waves.undefined[0] = np.broadcast_to(chosen, waves.exec.shape) if chosen.any() else None
    return sources


def of_table(instruction: Instruction, row: manual.Row) -> Run:
    operands, modifiers = list(instruction.operands), instruction.modifiers
    offset = np.uint32(int(modifiers.get("offset", "0"), 0))  # of ds_bpermute_b32
    known = KNOWN_MODIFIERS | DPP.keys() | ({"offset"} if "OFFSET" in row.reads else set())
    if unknown := modifiers.keys() - known:
        raise Unknown(f"modifier {unknown.pop()}")
    if modifiers.get("dst_sel", "DWORD") != "DWORD":
        raise Unknown("modifier dst_sel")
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
        if kind == "mix":
            kind = "f16" if op_sel_hi[number] else "f32"
        half = op_sel[number] if kind.endswith("16") else 0
        read = reader(operands[number], kind, half, modifiers.get(f"src{number}_sel", "DWORD"))
        if number == 0 and instruction.encoding == "dpp":
            read, written = across_lanes(instruction, read)
        readers.append(read)
    states = STATE | {"OFFSET": lambda waves: offset}
    readers += [states[name] for name in row.reads]
    writers = [
        WRITE[name] if name in WRITE else writer(instruction, targets[name], kind, written)
        for name, kind in row.results.items()
    ]
    function = clamped(instruction, row.function)
    sources_of = selected_sources if instruction.mnemonic == "v_cndmask_b32" else all_sources
    # of these it is not known which lane or which bits are used
    mixes = instruction.mnemonic in ("ds_bpermute_b32", "v_bfi_b32", "v_perm_b32")

    def run(waves: Waves) -> None:
        sources = sources_of(waves, readers)
        if mixes:
            waves.undefined[0] = None
        results = function(*sources)
        for write, result in zip(writers, results, strict=True):
            write(waves, result)

    return run


STATE: dict[str, Read] = {
    "SCC": lambda waves: waves.scc,
    "VCC": lambda waves: waves.mask(VCC),
    "EXEC": lambda waves: waves.scalars[:, EXEC : EXEC + 2].view(np.uint64),
    "ON": lambda waves: waves.exec,
}
WRITE = {
    "SCC": Waves.put_scc,
    "EXEC": lambda waves, value: waves.put_scalar(EXEC, value.view(np.uint32)),
}


def in_pairs(instruction: Instruction, row: manual.Row) -> Run:
    """v_pk_...: the row's function twice. op_sel and op_sel_hi choose which half of each source
    makes the low and the high result."""
    target, *operands = instruction.operands
    if len(operands) != len([name for name in row.sources if name != "D"]):
        raise Unknown(f"{len(operands)} sources")
    kind = row.results["D"]
    choices = [
        instruction.numbers("op_sel", [0] * 3),
        instruction.numbers("op_sel_hi", [1] * 3),
    ]
    signs = [instruction.numbers(name, [0] * 3) for name in ("neg_lo", "neg_hi")]
    known = {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"}
    if unknown := instruction.modifiers.keys() - known:
        raise Unknown(f"modifier {unknown.pop()}")

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
        results, undefined = [], []
        for half in readers:
            waves.undefined[0] = None
            results.append(row.function(*[read(waves) for read in half])[0])
            undefined.append(waves.undefined[0])
        words = [words_of(result, kind)[0] for result in results]
        if kind.endswith("16"):
            words = [words[0] | words[1] << 16]
        for i, each in enumerate(words):
            waves.undefined[0] = undefined[i]
            waves.put(target.index + i, each)

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


def move_scalars(instruction: Instruction) -> Run:
    """s_mov_b64. What nobody has written may be moved, as LLVM does with half of a number, and the
    copy counts as unwritten, too; lanes may not be switched by it."""
    target, source = instruction.operands
    if source.kind != "s" or target.index == EXEC:
        return of_table(instruction, ROWS["s_mov_b64"])

    def run(waves: Waves) -> None:
        unwritten = [waves.unwritten_scalars.get(source.index + place) for place in (0, 1)]
        waves.put_scalar(target.index, waves.scalars[:, source.index : source.index + 2].copy())
        for place, of_waves in enumerate(unwritten):
            if of_waves is not None and (of_waves & waves.here).any():
                kept = waves.unwritten_scalars.get(target.index + place, False)
                waves.unwritten_scalars[target.index + place] = kept | of_waves & waves.here

    return run


MFMA = re.compile(r"v_mfma_f32_(\d+)x\1x(\d+)_?(x?f32|f16|bf16)(_1k)?$")
STORED = {"f32": "f32", "xf32": "u32", "f16": "f16", "bf16": "u16"}
WIDEN = {
    "f32": lambda values: values,
    "xf32": lambda words: (words & 0xFFFFE000).view(np.float32),  # 10 bits of the fraction
    "f16": np.float32,
    "bf16": manual.bf16,
}
LEAST = {"f16": 2.0**-14, "bf16": 2.0**-126}  # normal numbers


def no_denormals(values: np.ndarray, least: float = 2.0**-126) -> np.ndarray:
    """As gfx90a takes what it multiplies in 16 bits, and what it adds to."""
    return np.where(np.abs(values) < least, values.dtype.type(0), values)


def mfma(instruction: Instruction, target: str, found: re.Match) -> Run:
    """D = A B + C for a tile of rows x rows, by a wave, whether lanes are at work or not.

    Lane l has row (of A; of B column) l % rows, and of it as many neighbours of the K dimension as
    its registers hold, from l // rows times their number on. Register r of the result is row
    4 (64 / rows) (r // 4) + 4 (l // rows) + r % 4 of column l % rows.
    """
    if unknown := instruction.modifiers:
        raise Unknown(f"modifier {next(iter(unknown))}")
    rows, depth, kind = int(found[1]), int(found[2]), found[3]
    flushes = target == "gfx90a" and kind in LEAST
    into, *operands, added = instruction.operands
    each = rows * depth // 64
    column, group = LANES % rows, LANES // rows
    registers = range(rows * rows // 64)
    row_of = [4 * (64 // rows) * (r // 4) + 4 * group + r % 4 for r in registers]
    start = [reader(added, "f32", r if added.kind == "v" else 0) for r in registers]
    factors = [[reader(op, STORED[kind], i) for i in range(each)] for op in operands]
    precise = np.float64 if kind == "bf16" else np.float32

    def tile(waves: Waves, reads: list[Read]) -> np.ndarray:
        values = np.empty((waves.count, rows, depth), precise)
        for i, read in enumerate(reads):
            numbers = WIDEN[kind](read(waves))
            if flushes:
                numbers = no_denormals(numbers, LEAST[kind])
            values[:, column, each * group + i] = numbers
        return values

    def run(waves: Waves) -> None:
        a, b = (tile(waves, reads) for reads in factors)
        product = (a @ b.transpose(0, 2, 1)).astype(np.float32)
        results = []
        for r in registers:
            before = start[r](waves)
            if flushes:
                before = no_denormals(before)
            result = before + product[:, row_of[r], column]
            results.append(no_denormals(result) if flushes else result)
        for r, result in enumerate(results):
            waves.put_lanes(into.index + r, words_of(result, "f32")[0], waves.here)

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
    "s_mov_b64": move_scalars,
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
        return "MFMA", mfma(instruction, program.target, found)
    kind = {"v_": "VALU", "s_": "SALU", "ds": "LDS"}.get(name[:2], "VMEM")
    if name in OTHERS:
        return "other" if name in ("s_barrier", "s_endpgm") else kind, OTHERS[name](instruction)
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

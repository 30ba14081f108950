"""Makes of each instruction a function of the waves: reading arrays, the function of the manual's
row, and writing arrays."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fusion_lab.amd import manual, transfers
from fusion_lab.amd.assembly import Instruction, Operand, Program, Unknown
from fusion_lab.amd.operands import DPP, LANES, across_lanes, read, words_of, write
from fusion_lab.amd.waves import EXEC, VCC, Waves

Run = Callable[[Waves], None]
KNOWN_MODIFIERS = {"clamp", "op_sel", "op_sel_hi", "dst_sel", "dst_unused", "src0_sel", "src1_sel",
                   "row_mask", "bank_mask", "bound_ctrl", *DPP}  # fmt: skip
STATE: dict[str, Callable[[Waves], np.ndarray]] = {
    "SCC": lambda waves: waves.scc,
    "VCC": lambda waves: waves.mask(VCC),
    "EXEC": lambda waves: waves.scalars[:, EXEC : EXEC + 2].view(np.uint64),
    "ON": lambda waves: waves.exec,
}


def refuse(unknown: set[str]) -> None:
    """Say which modifier is not known here, if one is not."""
    if unknown:
        raise Unknown(f"modifier {unknown.pop()}")


# --- instructions of the manual's table


def of_table(instruction: Instruction, row: manual.Row) -> Run:
    """An instruction that has a row."""
    operands, modifiers = list(instruction.operands), instruction.modifiers
    offset = np.uint32(int(modifiers.get("offset", "0"), 0))  # of ds_bpermute_b32
    refuse(modifiers.keys() - KNOWN_MODIFIERS - ({"offset"} if "OFFSET" in row.reads else set()))
    if modifiers.get("dst_sel", "DWORD") != "DWORD":
        raise Unknown("modifier dst_sel")
    targets = {name: operands.pop(0) for name in "DM" if name in row.results}
    if len(operands) != len(row.sources.keys() - {"D"}):
        raise Unknown(f"{len(operands)} sources")
    op_sel, op_sel_hi = (instruction.numbers(name, [0] * 4) for name in ("op_sel", "op_sel_hi"))
    sources = []
    for name, kind in row.sources.items():
        if name == "D":
            sources.append((targets["D"], kind))
            continue
        number = int(name[1])
        op, place = operands[number], op_sel[number]
        if kind == "mix":
            kind = "f16" if op_sel_hi[number] else "f32"
        if kind == "half":  # one register of two
            kind, place = "u32", place if op.count > 1 else 0
        elif not kind.endswith("16"):
            place = 0
        sources.append((op, kind, place, modifiers.get(f"src{number}_sel", "DWORD")))

    def run(waves: Waves) -> None:
        values, lanes = [read(waves, *source) for source in sources], None
        if instruction.encoding == "dpp":
            values[0], lanes = across_lanes(waves, instruction, values[0])
        for name in row.reads:
            values.append(offset if name == "OFFSET" else STATE[name](waves))
        results = row.function(*values)
        for (name, kind), result in zip(row.results.items(), results, strict=True):
            if name == "SCC":
                waves.put_scc(result)
            elif name == "EXEC":
                waves.put_scalar(EXEC, result.view(np.uint32))
            else:
                write(waves, targets[name], kind, result, lanes)

    return run


def in_pairs(instruction: Instruction, row: manual.Row) -> Run:
    """v_pk_...: the row's function twice. op_sel and op_sel_hi choose which half of each source
    makes the low and the high result."""
    target, *operands = instruction.operands
    if "D" in row.sources:  # v_pk_fmac
        operands.append(target)
    if len(operands) != len(row.sources):
        raise Unknown(f"{len(operands)} sources")
    refuse(instruction.modifiers.keys() - {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"})
    kind = row.results["D"]
    halves = []
    for choice, sign, default in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
        places = dict(enumerate(instruction.numbers(choice, [])))
        signs = dict(enumerate(instruction.numbers(sign, [])))
        sources = []
        for number, op in enumerate(operands):
            constant = op.kind == "number" and kind.endswith("32")  # it is both halves
            place = 0 if constant else places.get(number, default)
            sources.append((replace(op, negative=bool(signs.get(number))), kind, place))
        halves.append(sources)

    def run(waves: Waves) -> None:
        results = [row.function(*[read(waves, *source) for source in half])[0] for half in halves]
        words = [words_of(result, kind)[0] for result in results]
        if kind.endswith("16"):
            words = [words[0] | words[1] << 16]
        for i, each in enumerate(words):
            waves.put(target.index + i, each)

    return run


# --- instructions that are not in the table


MFMA = re.compile(r"v_mfma_f32_(\d+)x\1x(\d+)_(x?f32|f16|bf16)$")
STORED = {"f32": "f32", "xf32": "u32", "f16": "f16", "bf16": "u16"}
WIDEN = {
    "f32": lambda values: values,
    "xf32": lambda words: (words & 0xFFFFE000).view(np.float32),  # 10 bits of the fraction
    "f16": np.float32,
    "bf16": lambda words: (words.astype(np.uint32) << 16).view(np.float32),
}


def mfma(instruction: Instruction, found: re.Match) -> Run:
    """D = A B + C for a tile of rows x rows, by a wave, whether lanes are at work or not.

    Lane l has row (of A; of B column) l % rows, and of it as many neighbours of the K dimension as
    its registers hold, from l // rows times their number on. Register r of the result is row
    4 (64 / rows) (r // 4) + 4 (l // rows) + r % 4 of column l % rows.
    """
    refuse({*instruction.modifiers})
    rows, depth, kind = int(found[1]), int(found[2]), found[3]
    into, *operands, added = instruction.operands
    each = rows * depth // 64
    column, group = LANES % rows, LANES // rows
    registers = range(rows * rows // 64)
    row_of = [4 * (64 // rows) * (r // 4) + 4 * group + r % 4 for r in registers]
    precise = np.float64 if kind == "bf16" else np.float32

    def tile(waves: Waves, op: Operand) -> np.ndarray:
        values = np.empty((waves.count, rows, depth), precise)
        for i in range(each):
            values[:, column, each * group + i] = WIDEN[kind](read(waves, op, STORED[kind], i))
        return values

    def run(waves: Waves) -> None:
        a, b = (tile(waves, op) for op in operands)
        product = (a @ b.transpose(0, 2, 1)).astype(np.float32)
        before = [read(waves, added, "f32", r if added.kind == "v" else 0) for r in registers]
        results = [before[r] + product[:, row_of[r], column] for r in registers]
        for r, result in enumerate(results):
            words = words_of(result, "f32")[0]
            np.copyto(waves.vectors[into.index + r], words, where=waves.here)

    return run


def any_lane(mask: np.ndarray) -> np.ndarray:
    return mask.any(1, keepdims=True)


BRANCHES: dict[str, Callable[[Waves], np.ndarray]] = {  # which waves go on at the label
    "s_branch": lambda waves: waves.here,
    "s_cbranch_scc0": lambda waves: ~waves.scc,
    "s_cbranch_scc1": lambda waves: waves.scc,
    "s_cbranch_vccz": lambda waves: ~any_lane(waves.mask(VCC)),
    "s_cbranch_vccnz": lambda waves: any_lane(waves.mask(VCC)),
    "s_cbranch_execz": lambda waves: ~any_lane(waves.exec),
    "s_cbranch_execnz": lambda waves: any_lane(waves.exec),
}
# what takes time only, and what makes caches agree, which there are none of here
NOTHING = ("s_waitcnt", "s_nop", "s_sleep", "s_setprio", "s_sched_barrier", "buffer_inv",
           "buffer_wbl2", "s_dcache_inv", "s_icache_inv", "v_nop", "s_inst_prefetch")  # fmt: skip


def build(instruction: Instruction, program: Program) -> tuple[str, Run]:
    """Kind and function of an instruction; Unknown if there is none."""
    name = instruction.mnemonic
    if "clamp" in instruction.modifiers:
        name = "_clamp_".join(name.rsplit("_", 1))
    if name in NOTHING:
        return "other", lambda waves: None
    if name == "s_barrier":
        return "other", Waves.barrier
    if name == "s_endpgm":
        return "other", Waves.end
    if name in BRANCHES:
        taken, target = BRANCHES[name], program.labels[instruction.operands[0].text]
        return "branch", lambda waves: waves.branch(taken(waves), target)
    if found := MFMA.match(name):
        return "MFMA", mfma(instruction, found)
    kind = {"v_": "VALU", "s_": "SALU", "ds": "LDS"}.get(name[:2], "VMEM")
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
    for place, instruction in enumerate(program.code):
        try:
            instruction.kind, instruction.run = build(instruction, program)
        except Unknown as error:
            raise Unknown(f"{program.where(place)}: {error}") from error
        for op in instruction.operands:
            if op.kind == "v":
                registers = max(registers, op.index + op.count)
    return registers


ROWS = manual.rows()

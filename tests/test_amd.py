"""Instructions of fusion_lab/amd, one by one, against values worked out by hand from AMD's manual,
and what a workgroup does wrong. What Triton compiles is in test_amd_kernels.py."""

import json

import numpy as np
import pytest
import torch
from conftest import ROOT

from fusion_lab.amd import agreement, execute
from fusion_lab.amd.assembly import Program, Unknown, instruction
from fusion_lab.amd.counters import conflict_cycles, memory_us
from fusion_lab.amd.memory import Fault, Memory
from fusion_lab.amd.waves import Waves

LANES = np.arange(64)


def program(*lines: str) -> Program:
    """A program of these instructions; `name:` is a label."""
    code, labels = [], {}
    for line in (*lines, "s_endpgm"):
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        else:
            code.append(instruction(line, f"test.py:{len(code) + 1}"))
    return Program("test", code, labels, {}, [])


def run(
    *lines: str, waves: int = 1, groups: int = 1, lds: int = 1024, tensor: int = 0, **registers
) -> Waves:
    """Execute instructions on waves whose registers (v1=..., s2=...) hold these values, floats as
    float32; s[4:7] may be the buffer of a tensor of so many bytes."""
    written = program(*lines)
    execute.prepare(written)
    state = Waves(written, 300, groups, waves, lds)
    state.memory = Memory()
    if tensor:
        address = state.memory.add("X", np.arange(tensor, dtype=np.uint8))
        state.put_scalar(4, np.array([[address & 0xFFFFFFFF, address >> 32, tensor, 0]], np.uint32))
    for name, value in registers.items():
        value = np.asarray(value)
        words = value.astype(np.float32).view(np.uint32) if value.dtype.kind == "f" else value
        words = words.astype(np.int64).astype(np.uint32)
        if name[0] == "v":
            state.put(int(name[1:]), words)
        else:
            state.put_scalar(int(name[1:]), words.reshape(-1, 1))
    state.run()
    return state


def vector(state: Waves, number: int, kind: type = np.uint32) -> np.ndarray:
    return state.vectors[number, 0].view(kind)


def lane0(state: Waves, number: int, kind: type = np.uint32):
    return vector(state, number, kind)[0].item()


@pytest.mark.parametrize(
    ("line", "sources", "expected"),
    [
        ("v_mul_u32_u24_e32 v0, v1, v2", (0xFF000003, 5), 15),
        ("v_lshlrev_b32_e32 v0, v1, v2", (33, 5), 10),
        ("v_bfe_i32 v0, v1, 4, 4", (0x000000F0, 0), 0xFFFFFFFF),
        ("v_bfrev_b32_e32 v0, v1", (1, 0), 0x80000000),
        ("v_perm_b32 v0, v1, v2, 0x07060100", (0xAABBCCDD, 0x11223344), 0xAABB3344),
        ("v_and_b32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 "
         "src1_sel:BYTE_3", (0x00FF0000, 0x0F000000), 0x0F),
        ("v_cvt_u32_f32_e32 v0, v1", (0xC0000000, 0), 0),  # -2.0
        ("v_pk_add_f16 v0, v1, v2", (0x3C003C00, 0x40003C00), 0x42004000),
        ("v_pk_add_f16 v0, v1, v2 op_sel:[0,1] op_sel_hi:[1,0]", (0x3C003C00, 0x40003C00),
         0x40004200),
        ("v_fma_mix_f32 v0, v1, v2, 1.0 op_sel:[1,0,0] op_sel_hi:[1,0,0]",
         (0x40000000, 0x40400000), 0x40E00000),  # 2.0 in the upper half, 3.0, 1.0
        ("v_max3_f32 v0, v1, v2, 0", (0xBF800000, 0x7FC00000), 0),  # -1, NaN
        ("v_max_f32_e32 v0, v1, v2", (0, 0x80000000), 0),
        ("v_min_f32_e32 v0, v1, v2", (0, 0x80000000), 0x80000000),
        ("v_perm_b32 v0, v1, v2, 0x0b0a0908", (0x80000000, 0x80007FFF), 0xFF00FF00),
        ("v_fma_f32 v0, v1, v1, v2", (0x3F800800, 0x17800000), 0x3F801001),  # rounded once
        ("v_pk_fma_f32 v[0:1], v[4:5], v[4:5], v[6:7]", (0, 0), 0x3F801001),
        ("v_rcp_f32_e32 v0, v1", (0x80400000, 0), 0xFF800000),  # denormal numbers are 0
        ("v_exp_f32_e32 v0, v1", (0xC3000000, 0), 0),  # 2**-128
        ("v_fma_mixhi_f16 v0, v1, v2, 0", (0x3F800000, 0x40000000), 0x4000AD00),  # the upper half
        ("v_sub_u32_e64 v0, v1, v2 clamp", (1, 2), 0),
        ("s_lshl4_add_u32 s0, -1, 16\nv_mov_b32_e32 v0, s0", (0, 0), 0),
        ("v_div_fixup_f32 v0, v1, v2, 2.0", (0x7FC00000, 0x40000000), 0x7FC00000),
        ("v_div_fixup_f32 v0, v1, v2, 2.0", (0x3F800000, 0x80000000), 0xFF800000),
        ("v_mul_f32_e64 v0, -v1, |v2|", (0x40000000, 0xC0400000), 0xC0C00000),
    ],
)  # fmt: skip
def test_one_instruction(line: str, sources: tuple[int, int], expected: int):
    state = run(*line.split("\n"), v1=sources[0], v2=sources[1],
                v4=0x3F800800, v5=0, v6=0x17800000, v7=0)  # fmt: skip
    assert hex(lane0(state, 0)) == hex(expected)


@pytest.mark.parametrize(
    ("modifiers", "source"),
    [
        ("quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", LANES ^ 1),
        ("row_shl:1 row_mask:0xf bank_mask:0xf", np.where(LANES % 16 == 15, -1, LANES + 1)),
        ("row_shr:8 row_mask:0xf bank_mask:0xf", np.where(LANES % 16 < 8, -1, LANES - 8)),
        ("row_ror:4 row_mask:0xf bank_mask:0xf", LANES // 16 * 16 + (LANES % 16 - 4) % 16),
        ("row_half_mirror row_mask:0xf bank_mask:0xf", LANES // 8 * 8 + 7 - LANES % 8),
        ("row_bcast:15 row_mask:0xa bank_mask:0xf",
         np.where(LANES // 16 % 2 == 1, LANES // 16 * 16 - 1, -1)),
        ("row_bcast:31 row_mask:0xc bank_mask:0xf", np.where(LANES >= 32, 31, -1)),
    ],
)  # fmt: skip
def test_dpp_takes_another_lane_and_leaves_what_has_none(modifiers: str, source: np.ndarray):
    """In place, too: all lanes are read before any is written."""
    state = run(f"v_mov_b32_dpp v1, v1 {modifiers}", v1=100 + LANES)
    assert (vector(state, 1) == np.where(source < 0, 100 + LANES, 100 + source)).all()
    zeros = run(f"v_mov_b32_dpp v1, v1 {modifiers} bound_ctrl:1", v1=100 + LANES)
    if "row_sh" in modifiers:
        assert (vector(zeros, 1) == np.where(source < 0, 0, 100 + source)).all()


@pytest.mark.parametrize("name", ["32x32x2_f32", "16x16x4_f32", "32x32x8_bf16", "16x16x16_f16"])
def test_mfma_has_the_layout_of_amds_calculator(name: str):
    """A and B hold one 1 each: where D is 1 tells rows, columns and k of lanes and registers."""
    shape, _, kind = name.partition("_")
    rows, _, depth = map(int, shape.split("x"))
    each, bits = rows * depth // 64, 32 if kind == "f32" else 16
    registers = each * bits // 32
    one = {"f32": 0x3F800000, "bf16": 0x3F80, "f16": 0x3C00}[kind]
    last = rows * rows // 64 - 1
    line = f"v_mfma_f32_{name} v[20:{20 + last}], v[0:{registers - 1}], v[10:{9 + registers}], 0"
    if registers == 1:
        line = f"v_mfma_f32_{name} v[20:{20 + last}], v0, v10, 0"
    # row 5, column 9, the last k: in the last group of lanes, and its last element
    a_lane, b_lane = (64 // rows - 1) * rows + 5, (64 // rows - 1) * rows + 9
    high = 16 if bits == 16 else 0
    values = {f"v{i}": 0 for i in range(20)}
    values[f"v{registers - 1}"] = np.where(a_lane == LANES, one << high, 0)
    values[f"v{9 + registers}"] = np.where(b_lane == LANES, one << high, 0)
    state = run(line, **values)
    found = np.argwhere(state.vectors[20 : 21 + last, 0] != 0)
    # column 9 is in lanes 9, 9 + rows, ...; row 5 is in the second group of four rows
    register, group = 5 % 4, 5 // 4 % (64 // rows)
    assert found.tolist() == [[register, group * rows + 9]]


def test_packed_float32_takes_halves_of_registers_and_signs():
    state = run(
        "v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] op_sel:[0,1,0] op_sel_hi:[1,0,1] "
        "neg_hi:[1,0,0]",
        v2=2.0, v3=3.0, v4=5.0, v5=7.0, v6=11.0, v7=13.0,
    )  # fmt: skip
    assert lane0(state, 0, np.float32) == 2 * 7 + 11
    assert lane0(state, 1, np.float32) == -3 * 5 + 13


def test_lanes_that_are_off_keep_their_registers_and_waves_go_their_own_ways():
    """A loop that each wave leaves after as many rounds as its number says."""
    state = run(
        "v_cmp_gt_u32_e32 vcc, 8, v1",
        "s_and_saveexec_b64 s[4:5], vcc",
        "v_mov_b32_e32 v2, 1",
        "v_cmp_ne_u32_e64 s[8:9], v2, 7",
        "s_mov_b64 exec, s[4:5]",
        "s_mov_b32 s6, 0",
        "again:",
        "s_add_i32 s6, s6, 1",
        "s_cmp_lt_i32 s6, s7",
        "s_cbranch_scc1 again",
        "v_mov_b32_e32 v3, s6",
        waves=4, v1=LANES, v2=0, s7=np.arange(1, 5),
    )  # fmt: skip
    assert (vector(state, 2) == (LANES < 8)).all()
    assert state.vectors[3, :, 0].tolist() == [1, 2, 3, 4]
    assert state.executed[7] == 1 + 2 + 3 + 4
    assert state.scalars[:, 8:10].tolist() == [[0xFF, 0]] * 4  # no bit of a lane that is off


def test_a_loop_without_end_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusion_lab.amd.waves.MOST", 100)
    for body in ((), ("s_barrier",)):
        with pytest.raises(Fault, match="does not end after 100 instructions"):
            run("again:", *body, "s_branch again", waves=2)


def test_carry_and_64_bits():
    state = run(
        "v_add_co_u32_e32 v3, vcc, v1, v2",
        "v_addc_co_u32_e32 v4, vcc, 0, v2, vcc",
        "v_mad_u64_u32 v[5:6], s[4:5], v1, v1, 1",
        "v_lshlrev_b64 v[7:8], 4, v[1:2]",
        "v_ashrrev_i64 v[9:10], 33, v[1:2]",
        v1=0xFFFFFFFF, v2=0x80000001,
    )  # fmt: skip
    found = [lane0(state, register) for register in range(3, 11)]
    square = 0xFFFFFFFF**2 + 1
    assert found[:4] == [0x80000000, 0x80000002, square & 0xFFFFFFFF, square >> 32]
    assert found[4:] == [0xFFFFFFF0, 0x0000001F, 0xC0000000, 0xFFFFFFFF]


@pytest.mark.parametrize("top, bottom", [(1.0, 3.0), (2.0**-140, 3.0), (3e38, 2.9e38), (5.0, 0.0),
                                         (1.0, 2.0**127), (2.0**-130, 2.0**-120),
                                         (2.0**-20, 2.0**110)])  # fmt: skip
def test_a_division_of_five_instructions_is_rounded_right(top: float, bottom: float):
    """As LLVM makes it, with numbers that need scaling among them."""
    state = run(
        "v_div_scale_f32 v3, s[0:1], v2, v2, v1", "v_rcp_f32_e32 v4, v3",
        "v_div_scale_f32 v5, vcc, v1, v2, v1", "v_fma_f32 v6, -v3, v4, 1.0",
        "v_fmac_f32_e32 v4, v6, v4", "v_mul_f32_e32 v6, v5, v4", "v_fma_f32 v7, -v3, v6, v5",
        "v_fmac_f32_e32 v6, v7, v4", "v_fma_f32 v3, -v3, v6, v5",
        "v_div_fmas_f32 v3, v3, v4, v6", "v_div_fixup_f32 v0, v3, v2, v1",
        v1=top, v2=bottom,
    )  # fmt: skip
    with np.errstate(all="ignore"):
        assert lane0(state, 0, np.float32) == np.float32(top) / np.float32(bottom)


# --- memory

WRITE, READ = "ds_write_b32 v1, v2", "ds_read_b32 v3, v4"
BARRIER = "s_barrier"
OTHER = 4 * ((np.arange(128) + 64) % 128).reshape(2, 64)  # of the other of two waves
MINE = 4 * np.arange(128).reshape(2, 64)


@pytest.mark.parametrize(
    ("lines", "registers", "words"),
    [
        ([WRITE, BARRIER, READ], {"v1": MINE, "v2": 7, "v4": OTHER}, None),
        ([WRITE, READ], {"v1": MINE, "v2": 7, "v4": OTHER}, "race: reads what another wave"),
        ([WRITE, BARRIER, READ, "ds_write_b32 v4, v5"], {"v1": MINE, "v2": 7, "v4": OTHER, "v5": 8},
         None),
        ([WRITE, BARRIER, READ, "ds_write_b32 v1, v5"], {"v1": MINE, "v2": 7, "v4": OTHER, "v5": 8},
         "race: writes what another wave has read"),
        # a sum over waves: each writes its own, reads all, and writes again
        ([WRITE, BARRIER, READ, "ds_read_b32 v3, v1", "ds_write_b32 v1, v5"],
         {"v1": MINE, "v2": 7, "v4": OTHER, "v5": 8}, "race: writes what another wave has read"),
        # both write the same, and one of them something else
        ([WRITE, "s_cmp_eq_u32 s7, 1", "s_cbranch_scc1 end", "ds_write_b32 v1, v5", "end:"],
         {"v1": 0, "v2": 7, "v5": 8}, "race: writes what another wave has written"),
        ([WRITE], {"v1": 0, "v2": MINE}, "race: writes what another wave has written"),
        ([WRITE], {"v1": 0, "v2": 7}, None),
        ([WRITE], {"v1": 0, "v2": np.where(LANES == 63, 7, LANES)}, None),  # the last lane wins
        ([READ], {"v4": 0}, "reads LDS that nobody has written"),
        ([WRITE], {"v1": 1024, "v2": 0}, "writes 4 bytes from byte 1024 of 1024 in LDS"),
        ([WRITE], {"v1": 2, "v2": 0}, "misaligned"),
        (["s_cbranch_scc1 end", BARRIER, "end:"], {}, "waits at a barrier"),
    ],
)  # fmt: skip
def test_what_waves_do_wrong_in_lds_is_found(lines: list[str], registers: dict, words: str | None):
    branches = ["s_cmp_eq_u32 s7, 1"] if lines[-1] == "end:" else []
    call = {"waves": 2, "s7": np.arange(2)} | registers
    if words is None:
        run(*branches, *lines, **call)
        return
    with pytest.raises(Fault, match=words) as fault:
        run(*branches, *lines, **call)
    assert fault.value.lanes.any()


def test_lds_of_workgroups_is_apart_and_two_elements_move_at_once():
    state = run(
        "ds_write2st64_b32 v1, v2, v3 offset0:1 offset1:3",
        "ds_read2_b32 v[4:5], v1 offset0:64 offset1:192",
        "ds_write_b16_d16_hi v1, v3",
        "ds_read_u16 v6, v1",
        groups=2, v1=4 * LANES, v2=np.array([[1], [2]]), v3=np.array([[0x50003], [0x60004]]),
    )  # fmt: skip
    assert state.vectors[4, :, 0].tolist() == [1, 2]
    assert state.vectors[6, :, 0].tolist() == [5, 6]
    assert state.vectors[5, :, 63].tolist() == [0x50003, 0x60004]


def test_bank_conflicts_by_the_lanes_that_lds_serves_together():
    on = np.ones((1, 64), bool)
    in_a_row, one_word = 4 * LANES[None], np.zeros((1, 64), int)
    assert conflict_cycles(in_a_row, on, 4, False) == conflict_cycles(one_word, on, 4, False) == 0
    assert conflict_cycles(2 * in_a_row, on, 4, False) == 2  # two lanes a bank, twice 32 lanes
    assert conflict_cycles(32 * in_a_row, on, 4, False) == 2 * 31
    assert conflict_cycles(2 * in_a_row, on, 8, False) == 0
    assert conflict_cycles(4 * in_a_row, on, 16, False) == 0
    assert conflict_cycles(32 * in_a_row, on & (LANES < 4), 4, False) == 3


@pytest.mark.parametrize(
    ("kind", "a", "expected"),
    [
        # 1 + 2**-11 + 2**-20 keeps 10 bits of its fraction
        ("16x16x8_xf32", 0x3F801008, 0x3F800000),
        ("16x16x4_f32", 0x3F801008, 0x3F801008),
        ("16x16x16_f16", 0x0200, 0x38000000),  # a denormal number
        ("16x16x16_bf16", 0x0040, 0x00400000),
    ],
)
def test_a_product_has_the_digits_of_its_type(kind: str, a: int, expected: int):
    """Lane 0 has the only elements that are not 0, and B's is 1."""
    one = {"f16": 0x3C00, "bf16": 0x3F80}.get(kind.rpartition("_")[2], 0x3F800000)
    values = {f"v{i}": 0 for i in range(8)}
    values["v0"], values["v2"] = np.where(LANES == 0, a, 0), np.where(LANES == 0, one, 0)
    first, second = ("v0", "v2") if kind == "16x16x4_f32" else ("v[0:1]", "v[2:3]")
    state = run(f"v_mfma_f32_{kind} v[4:7], {first}, {second}, v[4:7]", **values)
    assert hex(lane0(state, 4)) == hex(expected)


def test_no_kernel_of_an_mi300x_is_faster_than_its_memory():
    """Operators of AMD's traces, and what MGPUSim's authors measured on an MI300A; by the rate of
    memory alone, without what caches may hold, one would be."""
    rows = json.loads((ROOT / "results/amd/mi300x_kernels.json").read_text())["rows"]
    assert 0.7 < max(memory_us(row["bytes"]) / row["us"] for row in rows) < 1
    assert max(row["bytes"] / 5.3e6 / row["us"] for row in rows) > 1


def test_a_buffer_ends_where_it_says_and_a_tensor_where_it_ends():
    state = run(
        "buffer_load_dword v2, v1, s[4:7], 0 offen",
        "buffer_store_byte v3, v1, s[4:7], 0 offen offset:1",
        tensor=256, v1=np.array([0, 4, 256] + [0x80000000] * 61), v3=255,
    )  # fmt: skip
    assert vector(state, 2).tolist() == [0x03020100, 0x07060504] + [0] * 62
    content = state.memory.parts[0].bytes
    assert np.flatnonzero(content != np.arange(256)).tolist() == [1, 5]
    with pytest.raises(Fault, match="writes 4 bytes from byte 256 of X, which has 256") as fault:
        run("global_store_dword v1, v3, s[4:5]", tensor=256, v1=4 * LANES + 4, v3=0)
    assert np.flatnonzero(fault.value.lanes).tolist() == [63]
    with pytest.raises(Fault, match="where nothing is"):
        run("global_load_dword v2, v[0:1], off", tensor=256, v0=0, v1=0)


def test_lanes_read_lanes_that_are_at_work():
    state = run("s_mov_b64 exec, 0xf", "ds_bpermute_b32 v2, v1, v3",
                "ds_bpermute_b32 v4, v1, v3 offset:4", "v_readfirstlane_b32 s3, v3",
                v1=4 * (LANES + 2), v2=0, v3=100 + LANES, v4=0)  # fmt: skip
    assert vector(state, 2)[:5].tolist() == [102, 103, 0, 0, 0]
    assert vector(state, 4)[:5].tolist() == [103, 0, 0, 0, 0]
    assert state.scalars[0, 3] == 100


@pytest.mark.parametrize(
    ("name", "operands", "expected"),
    [
        ("add", (5,), 0x03020105),
        ("swap", (5,), 5),
        ("smax", (0x80000000,), 0x03020100),
        ("umax", (0x80000000,), 0x80000000),
        ("cmpswap", (5, 0x03020100), 5),
        ("cmpswap", (5, 0), 0x03020100),
    ],
)
def test_atomic_operations_return_what_was_there(name, operands, expected):
    values = {f"v{4 + i}": value for i, value in enumerate(operands)}
    data = "v4" if len(operands) == 1 else "v[4:5]"
    line = f"global_atomic_{name} v2, v1, {data}, s[4:5] sc0"
    state = run("s_mov_b64 exec, 3", line, tensor=256, v1=0, **values)
    word = state.memory.parts[0].bytes[:4].view(np.uint32).item()
    assert word == expected + (5 if name == "add" else 0)  # one lane after the other
    assert lane0(state, 2) == 0x03020100


@pytest.mark.parametrize("line", ["v_no_such_b32 v0, v1", "v_add_f32_e64 v0, v1, v2 strange:1"])
def test_what_is_not_known_ends_with_its_name_and_line(line: str):
    with pytest.raises(Unknown, match=rf"test, test\.py:1: {line[:8]}"):
        execute.prepare(program(line))


# --- what agrees

VALUES = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
VALUES[5] *= 2e-2  # a row of small numbers, such as a token's that hardly counts
NOISE = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
CHANGE = 3e-4 * NOISE.sign()  # AdamW's first step


def with_row(number: int, value: float | torch.Tensor) -> torch.Tensor:
    changed = VALUES.clone()
    changed[number] = value
    return changed


def with_last(value: float) -> torch.Tensor:
    return torch.tensor([300.0] * 15 + [value])


def truncated(x: torch.Tensor) -> torch.Tensor:
    """To bfloat16, towards zero."""
    return (x.view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16()


@pytest.mark.parametrize(
    ("found", "expected", "before", "agrees"),
    [
        (VALUES * (1 + 3e-7 * NOISE), VALUES, None, True),  # another order of a sum
        (VALUES * (1 + 1e-4 * NOISE), VALUES, None, False),
        (with_row(9, VALUES[9].roll(1)), VALUES, None, False),
        (with_row(9, torch.nan), VALUES, None, False),
        (with_row(9, torch.nan), with_row(9, torch.nan), None, True),
        ((VALUES * (1 + 1e-6 * NOISE)).bfloat16(), VALUES.bfloat16(), None, True),
        (truncated(VALUES), VALUES.bfloat16(), None, False),
        # one of sixteen rounded the other way
        (with_last(256.0).bfloat16(), with_last(258.0).bfloat16(), None, True),
        (torch.empty(0, 4), torch.empty(0, 4), None, True),
        ((VALUES * (1 + 1e-3)).bfloat16(), VALUES.bfloat16(), None, False),
        # updated in place: the store deleted, right, and half of the step
        (VALUES, VALUES + CHANGE, VALUES, False),
        (VALUES + CHANGE * (1 + 1e-5 * NOISE), VALUES + CHANGE, VALUES, True),
        (VALUES + CHANGE / 2, VALUES + CHANGE, VALUES, False),
        # what was there before and is not read counts for nothing
        (VALUES * (1 + 3e-7 * NOISE), VALUES, VALUES * (1 + 1e-6), False),
        (VALUES.long() + 1, VALUES.long(), None, False),
        (VALUES.double() * (1 + 1e-9), VALUES.double(), None, False),
    ],
)  # fmt: skip
def test_a_tensor_agrees_by_its_own_type_and_scale(found, expected, before, agrees: bool):
    _, wrong = agreement.error_of(found, expected, before)
    assert (not wrong) == agrees, wrong


def test_a_number_between_that_is_rounded_the_other_way_shows_in_one_row_of_many():
    """As in the gradient of a bias in 16 bits: of 1024 rows one was off by 2.5e-4."""
    expected = torch.randn(1024, 16, generator=torch.Generator().manual_seed(2))
    found, far = expected.clone(), expected.clone()
    found[201] *= 1 + 2.5e-4
    far[201] *= 1.1
    of_bfloat16 = torch.finfo(torch.bfloat16).eps
    assert not agreement.error_of(found, expected, between=of_bfloat16)[1]
    assert "row 201" in agreement.error_of(found, expected)[1]
    assert "off by" in agreement.error_of(far, expected, between=of_bfloat16)[1]
    assert agreement.error_of(found[200:204], expected[200:204], between=of_bfloat16)[1]

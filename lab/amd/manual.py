"""What the instructions of the vector and the scalar unit do, in the notation of AMD's manual
("AMD Instinct MI300 Instruction Set Architecture"): a line each, read by execute.py.

S0, S1, S2 are the sources and D is the destination, each with its type; `T` is the type at the end
of the name, and names with a slash differ in it only. A mask has a bit for each lane: D.mask of a
comparison, M.mask for what v_add_co and others return beside D. SCC, EXEC and VCC are those of the
wave. What is on the right of `=` is Python on arrays [waves, lanes], or [waves, 1] for scalars.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

VECTOR = """
v_mov_b32/b64          D.T = S0.T
v_accvgpr_read_b32     D.u32 = S0.u32
v_accvgpr_write_b32    D.u32 = S0.u32
v_accvgpr_mov_b32      D.u32 = S0.u32
v_not_b32              D.u32 = ~S0.u32
v_and_b32              D.u32 = S0.u32 & S1.u32
v_or_b32               D.u32 = S0.u32 | S1.u32
v_xor_b32              D.u32 = S0.u32 ^ S1.u32
v_xnor_b32             D.u32 = ~(S0.u32 ^ S1.u32)
v_or3_b32              D.u32 = S0.u32 | S1.u32 | S2.u32
v_and_or_b32           D.u32 = S0.u32 & S1.u32 | S2.u32
v_bfi_b32              D.u32 = S0.u32 & S1.u32 | ~S0.u32 & S2.u32
v_bfe_u32              D.u32 = field(S0.u32, S1.u32 & 31, S2.u32 & 31)
v_bfe_i32              D.i32 = field(S0.i32, S1.i32 & 31, S2.i32 & 31)
v_bfm_b32              D.u32 = ones(S0.u32 & 31) << (S1.u32 & 31)
v_bfrev_b32            D.u32 = reversed_bits(S0.u32)
v_perm_b32             D.u32 = chosen_bytes(S0.u32, S1.u32, S2.u32)
v_alignbit_b32         D.u32 = (u64(S0.u32) << 32 | S1.u32) >> (S2.u32 & 31)
v_alignbyte_b32        D.u32 = (u64(S0.u32) << 32 | S1.u32) >> 8 * (S2.u32 & 3)
v_bcnt_u32_b32         D.u32 = popcount(S0.u32) + S1.u32
v_mbcnt_lo_u32_b32     D.u32 = popcount(S0.u32 & LANES_BELOW) + S1.u32
v_mbcnt_hi_u32_b32     D.u32 = popcount(S0.u32 & LANES_BELOW_HIGH) + S1.u32
v_ffbh_u32             D.u32 = leading_zeros(S0.u32)
v_ffbl_b32             D.u32 = leading_zeros(reversed_bits(S0.u32))
v_cndmask_b32          D.u32 = where(S2.mask, S1.u32, S0.u32)
v_lshlrev_b32          D.u32 = S1.u32 << (S0.u32 & 31)
v_lshrrev_b32          D.u32 = S1.u32 >> (S0.u32 & 31)
v_ashrrev_i32          D.i32 = S1.i32 >> (S0.i32 & 31)
v_lshlrev_b64          D.u64 = S1.u64 << (S0.u32 & 63)
v_lshrrev_b64          D.u64 = S1.u64 >> (S0.u32 & 63)
v_ashrrev_i64          D.i64 = S1.i64 >> (S0.i32 & 63)
v_lshlrev_b16          D.u16 = S1.u16 << (S0.u16 & 15)
v_lshrrev_b16          D.u16 = S1.u16 >> (S0.u16 & 15)
v_ashrrev_i16          D.i16 = S1.i16 >> (S0.i16 & 15)
v_add_u32/u16          D.T = S0.T + S1.T
v_sub_u32/u16          D.T = S0.T - S1.T
v_subrev_u32/u16       D.T = S1.T - S0.T
v_mul_lo_u32/u16       D.T = S0.T * S1.T
v_mul_hi_u32           D.u32 = u64(S0.u32) * S1.u32 >> 32
v_mul_hi_i32           D.i32 = i64(S0.i32) * S1.i32 >> 32
v_mul_u32_u24          D.u32 = S0.u24 * S1.u24
v_mul_i32_i24          D.i32 = S0.i24 * S1.i24
v_mad_u32_u24          D.u32 = S0.u24 * S1.u24 + S2.u32
v_mad_i32_i24          D.i32 = S0.i24 * S1.i24 + S2.i32
v_mad_u16              D.u16 = S0.u16 * S1.u16 + S2.u16
v_mad_legacy_u16       D.u16 = S0.u16 * S1.u16 + S2.u16
v_mad_u64_u32          D.u64 = u64(S0.u32) * S1.u32 + S2.u64; M.mask = D < S2.u64
v_add3_u32             D.u32 = S0.u32 + S1.u32 + S2.u32
v_xad_u32              D.u32 = (S0.u32 ^ S1.u32) + S2.u32
v_lshl_add_u32         D.u32 = (S0.u32 << (S1.u32 & 31)) + S2.u32
v_add_lshl_u32         D.u32 = (S0.u32 + S1.u32) << (S2.u32 & 31)
v_lshl_or_b32          D.u32 = S0.u32 << (S1.u32 & 31) | S2.u32
v_lshl_add_u64         D.u64 = (S0.u64 << (S1.u32 & 7)) + S2.u64
v_add_co_u32           D.u32 = S0.u32 + S1.u32; M.mask = D < S0.u32
v_addc_co_u32          M.mask = u64(S0.u32) + S1.u32 + S2.mask >> 32; D.u32 = S0.u32 + S1.u32 + S2.mask
v_sub_co_u32           D.u32 = S0.u32 - S1.u32; M.mask = S1.u32 > S0.u32
v_subrev_co_u32        D.u32 = S1.u32 - S0.u32; M.mask = S0.u32 > S1.u32
v_subb_co_u32          D.u32 = S0.u32 - S1.u32 - S2.mask; M.mask = u64(S1.u32) + S2.mask > S0.u32
v_subbrev_co_u32       D.u32 = S1.u32 - S0.u32 - S2.mask; M.mask = u64(S0.u32) + S2.mask > S1.u32
v_min_u32/i32/u16/i16/f32/f16/f64   D.T = least(S0.T, S1.T)
v_max_u32/i32/u16/i16/f32/f16/f64   D.T = most(S0.T, S1.T)
v_min3_u32/i32/f32/f16              D.T = least(least(S0.T, S1.T), S2.T)
v_max3_u32/i32/f32/f16              D.T = most(most(S0.T, S1.T), S2.T)
v_med3_u32/i32/f32/f16              D.T = median(S0.T, S1.T, S2.T)
v_maximum3_f32                      D.T = maximum(maximum(S0.T, S1.T), S2.T)
v_minimum3_f32                      D.T = minimum(minimum(S0.T, S1.T), S2.T)
v_add_f32/f16/f64      D.T = S0.T + S1.T
v_sub_f32/f16/f64      D.T = S0.T - S1.T
v_subrev_f32/f16       D.T = S1.T - S0.T
v_mul_f32/f16/f64      D.T = S0.T * S1.T
v_mac_f32/f16          D.T = S0.T * S1.T + D.T
v_mad_f32/f16          D.T = S0.T * S1.T + S2.T
v_fma_f32/f16/f64      D.T = fma(S0.T, S1.T, S2.T)
v_fmac_f32/f16/f64     D.T = fma(S0.T, S1.T, D.T)
v_fmamk_f32            D.f32 = fma(S0.f32, S1.f32, S2.f32)
v_fmaak_f32            D.f32 = fma(S0.f32, S1.f32, S2.f32)
v_fma_mix_f32          D.f32 = fma(S0.mix, S1.mix, S2.mix)
v_fma_mixlo_f16        D.f16 = f16(fma(S0.mix, S1.mix, S2.mix))
v_fma_mixhi_f16        D.f16 = f16(fma(S0.mix, S1.mix, S2.mix))
v_rcp_f32/f16/f64      D.T = 1 / S0.T
v_rcp_iflag_f32        D.f32 = 1 / S0.f32
v_rsq_f32/f16/f64      D.T = 1 / sqrt(wide(S0.T))
v_sqrt_f32/f16/f64     D.T = sqrt(S0.T)
v_exp_f32/f16          D.T = exp2(S0.T)
v_log_f32/f16          D.T = log2(S0.T)
v_sin_f32              D.f32 = sin(TURN * wide(S0.f32))
v_cos_f32              D.f32 = cos(TURN * wide(S0.f32))
v_trunc_f32/f16/f64    D.T = trunc(S0.T)
v_floor_f32/f16/f64    D.T = floor(S0.T)
v_ceil_f32/f16/f64     D.T = ceil(S0.T)
v_rndne_f32/f16/f64    D.T = rint(S0.T)
v_fract_f32/f16/f64    D.T = S0.T - floor(S0.T)
v_ldexp_f32            D.f32 = ldexp(S0.f32, S1.i32)
v_ldexp_f64            D.f64 = ldexp(S0.f64, S1.i32)
v_ldexp_f16            D.f16 = ldexp(S0.f16, S1.i16)
v_frexp_mant_f32/f64   D.T = frexp(S0.T)[0]
v_frexp_exp_i32_f32    D.i32 = frexp(S0.f32)[1]
v_frexp_exp_i32_f64    D.i32 = frexp(S0.f64)[1]
v_div_scale_f32        D.f32, M.mask = div_scale(S0.f32, S1.f32, S2.f32)
v_div_scale_f64        D.f64, M.mask = div_scale(S0.f64, S1.f64, S2.f64)
v_div_fmas_f32/f64     D.T = div_fmas(S0.T, S1.T, S2.T, VCC)
v_div_fixup_f32/f16/f64   D.T = div_fixup(S0.T, S1.T, S2.T)
v_cvt_f32_u32          D.f32 = f32(S0.u32)
v_cvt_f32_i32          D.f32 = f32(S0.i32)
v_cvt_f32_f16          D.f32 = f32(S0.f16)
v_cvt_f32_bf16         D.f32 = bf16(S0.u16)
v_cvt_f32_f64          D.f32 = f32(S0.f64)
v_cvt_f64_f32          D.f64 = f64(S0.f32)
v_cvt_f64_i32          D.f64 = f64(S0.i32)
v_cvt_f64_u32          D.f64 = f64(S0.u32)
v_cvt_f16_f32          D.f16 = f16(S0.f32)
v_cvt_f16_u16          D.f16 = f16(S0.u16)
v_cvt_f16_i16          D.f16 = f16(S0.i16)
v_cvt_f32_ubyte0       D.f32 = f32(S0.u32 & 255)
v_cvt_f32_ubyte1       D.f32 = f32(S0.u32 >> 8 & 255)
v_cvt_f32_ubyte2       D.f32 = f32(S0.u32 >> 16 & 255)
v_cvt_f32_ubyte3       D.f32 = f32(S0.u32 >> 24)
v_cvt_u32_f32          D.u32 = whole(S0.f32, u32)
v_cvt_i32_f32          D.i32 = whole(S0.f32, i32)
v_cvt_u32_f64          D.u32 = whole(S0.f64, u32)
v_cvt_i32_f64          D.i32 = whole(S0.f64, i32)
v_cvt_u16_f16          D.u16 = whole(S0.f16, u16)
v_cvt_i16_f16          D.i16 = whole(S0.f16, i16)
v_cvt_pk_bf16_f32      D.u32 = to_bf16(S0.f32) | to_bf16(S1.f32) << 16
v_cvt_pk_f16_f32       D.u32 = to_f16(S0.f32) | to_f16(S1.f32) << 16
v_cvt_pkrtz_f16_f32    D.u32 = toward_zero(S0.f32) | toward_zero(S1.f32) << 16
v_pack_b32_f16         D.u32 = u32(S0.u16) | u32(S1.u16) << 16
v_cmp_lt_u32/i32/u16/i16/u64/i64/f32/f16/f64   D.mask = S0.T < S1.T
v_cmp_le_u32/i32/u16/i16/u64/i64/f32/f16/f64   D.mask = S0.T <= S1.T
v_cmp_gt_u32/i32/u16/i16/u64/i64/f32/f16/f64   D.mask = S0.T > S1.T
v_cmp_ge_u32/i32/u16/i16/u64/i64/f32/f16/f64   D.mask = S0.T >= S1.T
v_cmp_eq_u32/i32/u16/i16/u64/i64/f32/f16/f64   D.mask = S0.T == S1.T
v_cmp_ne_u32/i32/u16/i16/u64/i64               D.mask = S0.T != S1.T
v_cmp_lg_f32/f16/f64      D.mask = (S0.T < S1.T) | (S0.T > S1.T)
v_cmp_neq_f32/f16/f64     D.mask = S0.T != S1.T
v_cmp_nlt_f32/f16/f64     D.mask = ~(S0.T < S1.T)
v_cmp_nle_f32/f16/f64     D.mask = ~(S0.T <= S1.T)
v_cmp_ngt_f32/f16/f64     D.mask = ~(S0.T > S1.T)
v_cmp_nge_f32/f16/f64     D.mask = ~(S0.T >= S1.T)
v_cmp_nlg_f32/f16/f64     D.mask = ~((S0.T < S1.T) | (S0.T > S1.T))
v_cmp_o_f32/f16/f64       D.mask = (S0.T == S0.T) & (S1.T == S1.T)
v_cmp_u_f32/f16/f64       D.mask = (S0.T != S0.T) | (S1.T != S1.T)
v_cmp_class_f32/f16/f64   D.mask = of_class(S0.T, S1.u32)
"""
SCALAR = """
s_mov_b32/b64          D.T = S0.T
s_movk_i32             D.i32 = S0.i16
s_cmov_b32             D.u32 = where(SCC, S0.u32, D.u32)
s_cselect_b32/b64      D.T = where(SCC, S0.T, S1.T)
s_not_b32/b64          D.T = ~S0.T; SCC = D != 0
s_and_b32/b64          D.T = S0.T & S1.T; SCC = D != 0
s_or_b32/b64           D.T = S0.T | S1.T; SCC = D != 0
s_xor_b32/b64          D.T = S0.T ^ S1.T; SCC = D != 0
s_andn2_b32/b64        D.T = S0.T & ~S1.T; SCC = D != 0
s_orn2_b32/b64         D.T = S0.T | ~S1.T; SCC = D != 0
s_nand_b32/b64         D.T = ~(S0.T & S1.T); SCC = D != 0
s_nor_b32/b64          D.T = ~(S0.T | S1.T); SCC = D != 0
s_xnor_b32/b64         D.T = ~(S0.T ^ S1.T); SCC = D != 0
s_and_saveexec_b64     D.u64 = copy(EXEC); EXEC = S0.u64 & EXEC; SCC = EXEC != 0
s_or_saveexec_b64      D.u64 = copy(EXEC); EXEC = S0.u64 | EXEC; SCC = EXEC != 0
s_xor_saveexec_b64     D.u64 = copy(EXEC); EXEC = S0.u64 ^ EXEC; SCC = EXEC != 0
s_andn2_saveexec_b64   D.u64 = copy(EXEC); EXEC = S0.u64 & ~EXEC; SCC = EXEC != 0
s_lshl_b32             D.u32 = S0.u32 << (S1.u32 & 31); SCC = D != 0
s_lshl_b64             D.u64 = S0.u64 << (S1.u32 & 63); SCC = D != 0
s_lshr_b32             D.u32 = S0.u32 >> (S1.u32 & 31); SCC = D != 0
s_lshr_b64             D.u64 = S0.u64 >> (S1.u32 & 63); SCC = D != 0
s_ashr_i32             D.i32 = S0.i32 >> (S1.i32 & 31); SCC = D != 0
s_ashr_i64             D.i64 = S0.i64 >> (S1.i32 & 63); SCC = D != 0
s_bfe_u32              D.u32 = field(S0.u32, S1.u32 & 31, S1.u32 >> 16 & 127); SCC = D != 0
s_bfe_i32              D.i32 = field(S0.i32, S1.i32 & 31, S1.i32 >> 16 & 127); SCC = D != 0
s_bfe_u64              D.u64 = field(S0.u64, S1.u32 & 63, S1.u32 >> 16 & 127); SCC = D != 0
s_bfe_i64              D.i64 = field(S0.i64, S1.i32 & 63, S1.i32 >> 16 & 127); SCC = D != 0
s_bfm_b32              D.u32 = ones(S0.u32 & 31) << (S1.u32 & 31)
s_brev_b32             D.u32 = reversed_bits(S0.u32)
s_bcnt1_i32_b32        D.i32 = popcount(S0.u32); SCC = D != 0
s_bcnt1_i32_b64        D.i32 = popcount(S0.u64); SCC = D != 0
s_ff1_i32_b32          D.u32 = leading_zeros(reversed_bits(S0.u32))
s_flbit_i32_b32        D.u32 = leading_zeros(S0.u32)
s_bitset0_b32          D.u32 = D.u32 & ~(u32(1) << (S0.u32 & 31))
s_bitset1_b32          D.u32 = D.u32 | u32(1) << (S0.u32 & 31)
s_bitcmp0_b32          SCC = S0.u32 >> (S1.u32 & 31) & 1 == 0
s_bitcmp1_b32          SCC = S0.u32 >> (S1.u32 & 31) & 1 == 1
s_sext_i32_i8          D.i32 = i32(S0.u32 << 24) >> 24
s_sext_i32_i16         D.i32 = i32(S0.u32 << 16) >> 16
s_pack_ll_b32_b16      D.u32 = S0.u32 & 65535 | S1.u32 << 16
s_pack_lh_b32_b16      D.u32 = S0.u32 & 65535 | S1.u32 >> 16 << 16
s_pack_hh_b32_b16      D.u32 = S0.u32 >> 16 | S1.u32 >> 16 << 16
s_add_u32              D.u32 = S0.u32 + S1.u32; SCC = D < S0.u32
s_addc_u32             D.u32 = S0.u32 + S1.u32 + SCC; SCC = u64(S0.u32) + S1.u32 + SCC >> 32 != 0
s_sub_u32              D.u32 = S0.u32 - S1.u32; SCC = S1.u32 > S0.u32
s_subb_u32             D.u32 = S0.u32 - S1.u32 - SCC; SCC = u64(S1.u32) + SCC > S0.u32
s_add_i32              D.i32 = S0.i32 + S1.i32; SCC = (S0.i32 ^ D) & (S1.i32 ^ D) < 0
s_sub_i32              D.i32 = S0.i32 - S1.i32; SCC = (S0.i32 ^ S1.i32) & (S0.i32 ^ D) < 0
s_addk_i32             OLD = D.i32; D.i32 = OLD + S0.i16; SCC = (OLD ^ D) & (S0.i16 ^ D) < 0
s_mulk_i32             D.i32 = D.i32 * S0.i16
s_mul_i32              D.i32 = S0.i32 * S1.i32
s_mul_hi_u32           D.u32 = u64(S0.u32) * S1.u32 >> 32
s_mul_hi_i32           D.i32 = i64(S0.i32) * S1.i32 >> 32
s_lshl1_add_u32        D.u32 = (S0.u32 << 1) + S1.u32; SCC = (u64(S0.u32) << 1) + S1.u32 >> 32 != 0
s_lshl2_add_u32        D.u32 = (S0.u32 << 2) + S1.u32; SCC = (u64(S0.u32) << 2) + S1.u32 >> 32 != 0
s_lshl3_add_u32        D.u32 = (S0.u32 << 3) + S1.u32; SCC = (u64(S0.u32) << 3) + S1.u32 >> 32 != 0
s_lshl4_add_u32        D.u32 = (S0.u32 << 4) + S1.u32; SCC = (u64(S0.u32) << 4) + S1.u32 >> 32 != 0
s_abs_i32              D.i32 = abs(S0.i32); SCC = D != 0
s_min_i32/u32          D.T = least(S0.T, S1.T); SCC = S0.T < S1.T
s_max_i32/u32          D.T = most(S0.T, S1.T); SCC = S0.T > S1.T
s_cmp_lt_i32/u32       SCC = S0.T < S1.T
s_cmp_le_i32/u32       SCC = S0.T <= S1.T
s_cmp_gt_i32/u32       SCC = S0.T > S1.T
s_cmp_ge_i32/u32       SCC = S0.T >= S1.T
s_cmp_eq_i32/u32/u64   SCC = S0.T == S1.T
s_cmp_lg_i32/u32/u64   SCC = S0.T != S1.T
s_cmpk_lt_i32          SCC = S0.i32 < S1.i16
s_cmpk_le_i32          SCC = S0.i32 <= S1.i16
s_cmpk_gt_i32          SCC = S0.i32 > S1.i16
s_cmpk_ge_i32          SCC = S0.i32 >= S1.i16
s_cmpk_eq_i32          SCC = S0.i32 == S1.i16
s_cmpk_lg_i32          SCC = S0.i32 != S1.i16
s_cmpk_lt_u32          SCC = S0.u32 < S1.u16
s_cmpk_le_u32          SCC = S0.u32 <= S1.u16
s_cmpk_gt_u32          SCC = S0.u32 > S1.u16
s_cmpk_ge_u32          SCC = S0.u32 >= S1.u16
s_cmpk_eq_u32          SCC = S0.u32 == S1.u16
s_cmpk_lg_u32          SCC = S0.u32 != S1.u16
"""
# the types at the end of names, of bits as unsigned ones
TYPES = {"b16": "u16", "b32": "u32", "b64": "u64"}
LANES = np.arange(64)


# --- functions of the table


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def ones(count: np.ndarray) -> np.ndarray:
    return (np.uint32(1) << count) - np.uint32(1)


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
    """Byte i is that of the eight whose number is byte i of the choice; 12 is 0, above 12 255."""
    both, result = high.astype(np.uint64) << 32 | low, 0
    for place in range(0, 32, 8):
        number = choice >> place & 255
        byte = both >> (8 * (number & 7)).astype(np.uint64) & 255
        if (number > 7).any():
            if ((number > 7) & (number < 12)).any():
                raise NotImplementedError("v_perm_b32 with a sign")
            byte = np.where(number > 12, 255, np.where(number == 12, 0, byte))
        result |= byte.astype(np.uint32) << place
    return result


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c, rounded once: float64 has the product of two float32 in full, and that of two
    float64 is one with its rounding error beside it (Dekker's)."""
    if a.dtype != np.float64:
        return (a.astype(np.float64) * b + c).astype(a.dtype)
    parts = [(x, x * 134217729.0 - (x * 134217729.0 - x)) for x in (a, b)]
    (a, a_high), (b, b_high) = parts
    product = a * b
    low = (a - a_high) * (b - b_high)
    error = low - (product - a_high * b_high - (a - a_high) * b_high - a_high * (b - b_high))
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    exact = total + (lost + error)
    return np.where(np.isfinite(exact), exact, total)


def median(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))


def whole(x: np.ndarray, kind: type) -> np.ndarray:
    """Without its fraction, the nearest that the type has; NaN is 0."""
    limits = np.iinfo(kind)
    return np.clip(np.nan_to_num(np.trunc(wide(x)), nan=0), limits.min, limits.max).astype(kind)


def bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """To the nearest, of two as near to the even one; NaN stays one."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return np.where(np.isnan(x), bits >> 16 | 64, rounded >> 16)


def to_f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def toward_zero(x: np.ndarray) -> np.ndarray:
    """The bits of float16; what is too large for it is its largest number."""
    near = x.astype(np.float16)
    far = (np.abs(near.astype(np.float32)) > np.abs(x)) & np.isfinite(x)
    return (near.view(np.uint16) - far).astype(np.uint32)


def exponent(x: np.ndarray) -> np.ndarray:
    """As it is stored."""
    bits, width = (23, 255) if x.dtype == np.float32 else (52, 2047)
    return (x.view(f"i{x.itemsize}") >> bits & width).astype(np.int32)


def div_scale(x: np.ndarray, below: np.ndarray, above: np.ndarray) -> tuple:
    """The first of three steps of above / below: x is one of the two, times a power of 2 where the
    quotient or 1 / below would be denormal; and whether div_fmas has to scale its result."""
    x, below, above = np.broadcast_arrays(x, below, above)
    bits, limit, tiny = (64, 96, 23) if x.dtype == np.float32 else (128, 768, 53)
    up, down = x.dtype.type(2.0**bits), x.dtype.type(2.0**-bits)
    normal = np.finfo(x.dtype).tiny
    far = exponent(above) - exponent(below) >= limit
    small_inverse, small_quotient = np.abs(1 / below) < normal, np.abs(above / below) < normal
    cases = [
        (far, np.where(x == below, x * up, x)),
        (np.abs(below) < normal, x * up),
        (small_inverse & small_quotient, np.where(x == below, x * up, x)),
        (small_inverse, x * down),
        (small_quotient, np.where(x == above, x * up, x)),
        (exponent(above) <= tiny, x * up),
    ]
    scaled = np.select(*zip(*cases, strict=True), x)
    never = (above == 0) | (below == 0)
    flag = far | small_quotient & ~(np.abs(below) < normal)
    return np.where(never, np.nan, scaled).astype(x.dtype), flag & ~never


def div_fmas(a: np.ndarray, b: np.ndarray, c: np.ndarray, flag: np.ndarray) -> np.ndarray:
    """The second: a b + c, and back by the power of 2 that div_scale took; which of the two it was
    shows in the quotient's size."""
    bits, middle = (64, 127) if a.dtype == np.float32 else (128, 1023)
    c = np.ascontiguousarray(np.broadcast_to(c, np.broadcast_shapes(a.shape, b.shape, c.shape)))
    back = np.where(exponent(c) > middle, 2.0**bits, 2.0**-bits).astype(a.dtype)
    exact = fma(a, b, c)
    return np.where(flag, exact * back, exact)


def div_fixup(quotient: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
    """The third: where the operands are no ordinary numbers the quotient is what IEEE 754 says."""
    plain = np.isfinite(below) & np.isfinite(above) & (below != 0) & (above != 0)
    return np.where(plain & ~np.isnan(quotient), quotient, above / below)


def of_class(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Whether x is of a class whose bit is set in the mask: NaN (0, 1), -inf (2), negative normal
    (3), negative denormal (4), -0 (5), 0 (6), denormal (7), normal (8), inf (9)."""
    size = np.select([x == 0, np.abs(x) < np.finfo(x.dtype).tiny, np.isfinite(x)], [0, 1, 2], 3)
    number = np.where(np.signbit(x), 5 - size, 6 + size)
    bits = np.where(np.isnan(x), 3, np.int64(1) << number)
    return bits & mask != 0


BELOW = [(1 << lane) - 1 for lane in range(64)]
FUNCTIONS = {
    **{kind.__name__.replace("uint", "u").replace("int", "i").replace("float", "f"): kind
       for kind in (np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64,
                    np.float16, np.float32, np.float64)},
    **{f.__name__: f for f in (
        np.where, np.sqrt, np.exp2, np.log2, np.sin, np.cos, np.trunc, np.floor, np.ceil, np.rint,
        np.ldexp, np.frexp, np.abs, np.copy, np.maximum, np.minimum,
        wide, ones, field, reversed_bits, leading_zeros, chosen_bytes, fma, median, whole, bf16,
        to_bf16, to_f16, toward_zero, div_scale, div_fmas, div_fixup, of_class)},
    "abs": np.abs,
    "least": np.fmin,  # a number before NaN
    "most": np.fmax,
    "popcount": np.bitwise_count,
    "TURN": 2 * np.pi,
    "LANES_BELOW": np.array([[below & 0xFFFFFFFF for below in BELOW]], np.uint32),
    "LANES_BELOW_HIGH": np.array([[below >> 32 for below in BELOW]], np.uint32),
}  # fmt: skip


class Row(NamedTuple):
    """An instruction of the tables."""

    meaning: str
    sources: dict[str, str]  # S0, S1, S2 and D where it is read, each with its type
    results: dict[str, str]  # D and M with their types, SCC and EXEC
    reads: tuple[str, ...]  # of SCC, EXEC and VCC
    function: Callable  # (sources, reads) -> results


def row(name: str, meaning: str) -> Row:
    """Make a Python function of the right column: its statements are that already, but for types."""
    last = re.search(r"[a-z]+\d+$", name)[0]
    meaning = re.sub(r"\.T\b", f".{TYPES.get(last, last)}", meaning)
    left, right, reads, body = {}, {}, {}, []
    for statement in meaning.split("; "):
        targets, _, expression = statement.partition(" = ")
        right |= dict(re.findall(r"\b(S\d|D)\.(\w+)", expression))
        reads |= dict.fromkeys(re.findall(r"\b(?:SCC|EXEC|VCC)\b", expression))
        left |= {t.partition(".")[0]: t.partition(".")[2] for t in targets.split(", ")}
        body.append(re.sub(r"\b(S\d|D|M)\.\w+", r"\1", statement))
    left.pop("OLD", None)
    lines = [f"def {name}({', '.join([*right, *reads])}):", *body, f"return {', '.join(left)},"]
    space = dict(FUNCTIONS)
    exec("\n    ".join(lines), space)
    return Row(meaning, right, left, tuple(reads), space[name])


def rows() -> dict[str, Row]:
    """Both tables, by name."""
    found = {}
    for line in [*VECTOR.strip().splitlines(), *SCALAR.strip().splitlines()]:
        names, _, meaning = line.partition(" ")
        first, *others = names.split("/")
        stem = first.rpartition("_")[0]
        for name in [first, *(f"{stem}_{other}" for other in others)]:
            found[name] = row(name, meaning.strip())
    return found

#!/usr/bin/env python3
"""TinyOpenFold V3: kernels of our own, written in Triton (Python for GPUs), each with a flag.

Read V1 and V2 first: model, weights and loss stay the same. A kernel of ours does several
operations at once: what passes between them stays on the chip. A GEMM is a matrix product.

triton-layer-norm     a norm in one pass, which also makes the pair bias where one is needed
triton-attention      attention with pair bias and gate in one pass: no scores are stored
triton-triangle       a triangle multiplication: one kernel before its batched GEMM, one after it
triton-outer-product  outer products as the next GEMM reads them; backward computes them again
triton-transition     bias and ReLU of a transition (a two-layer perceptron) in one pass
triton-bias-gradient  gradients of the other biases: sums over all rows, split among many programs
cast-fusion           with AMP (16-bit GEMMs), PyTorch casts most weights of a block in one launch

Begin with layer_norm_forward_kernel, then read attention_forward_kernel. Each operation has a
section: kernels, functions that launch (start) them, an autograd Function, a module. If a flag is
off, PyTorch computes what V1 does; V2's fusions are now part of triton-attention and
triton-triangle. Without a GPU, Triton's interpreter runs the kernels, correctly but slowly.

Examples:
  python tiny_openfold_v3.py --compare-fusion                            all off, all on
  python tiny_openfold_v3.py --use-amp --disable-triton-attention        PyTorch's attention instead
  python tiny_openfold_v3.py --blocks attention_forward:BLOCK_M=128,num_warps=8   other block sizes
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, get_type_hints

try:
    import numpy as np
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton looks at it when it is imported
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set
    import torch.nn.functional as F
    import triton
    import triton.language as tl
    from torch import Tensor, nn
    from torch.func import functional_call
    from torch.library import triton_op
    from torch.utils.checkpoint import checkpoint
    from torch.utils.flop_counter import FlopCounterMode
except ImportError as error:
    print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
    sys.exit(4)


# --- configuration
@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, and the letters for them in shapes; B: batch, C: channels, D: C / H."""

    msa_dim: int = 64  # c_m
    pair_dim: int = 128  # c_z
    num_blocks: int = 4
    num_heads_msa: int = 4  # H
    num_heads_pair: int = 4  # H
    num_seqs: int = 16  # S, sequences (proteins) in an alignment
    seq_len: int = 64  # N, residues in a sequence
    outer_product_dim: int = 32
    transition_factor: int = 4
    checkpoint_blocks: bool = False  # keep only a block's input; backward recomputes the rest
    blocks: str = "default"  # block sizes that --blocks replaces


@dataclass(frozen=True)
class Fusions:
    """Which fusions are on. Each field is a flag; the text beside `bool` is its help."""

    triton_layer_norm: Annotated[bool, "layer norms that write the type of the next GEMM"] = True
    triton_attention: Annotated[bool, "attention with pair bias and gate as one kernel"] = True
    triton_triangle: Annotated[bool, "a kernel before and one after a triangle product"] = True
    triton_outer_product: Annotated[bool, "outer products as the projection reads them"] = True
    triton_transition: Annotated[bool, "bias and ReLU of the transitions as one kernel"] = True
    triton_bias_gradient: Annotated[bool, "gradients of the other projections' biases"] = True
    cast_fusion: Annotated[bool, "with AMP most weights of a block cast in one launch"] = True


# --- kernels
# A launch runs many copies of a kernel (programs), each on its own numbers. No two add to the same
# place, as their order would change the last bits: each writes the sum over its rows, and one more
# launch adds these up. Names in capitals are pointers, or sizes known when compiled; grad_x is the
# dx of formulas. What a kernel calls stands below it, or in the section "what all kernels share".
# --- blocks
# Copied from dev/parts/blocks.py by dev/sync_parts.py: edit it there.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the kernels run on the CPU, in Python
BACKEND = "interpreter" if INTERPRETED else "hip" if torch.version.hip else "cuda"
NAMESPACE = re.sub(r"\W|^(?=\d)", "_", Path(__file__).stem, flags=re.ASCII)  # of our operators
Sizes = dict[str, int]  # as {"TILE": 4096, "num_warps": 8}
BLOCKS: dict[str, dict[str, Sizes]] = {}  # of each kernel, in each case of block_sizes
OVERRIDES: dict[str, Sizes] = {}  # what --blocks replaces, for this run


def block_sizes(
    sizes: Sizes, *, hip_float32: Sizes | None = None, hip: Sizes | None = None,
    tf32: Sizes | None = None, float32: Sizes | None = None,
) -> Callable[[Callable], Callable]:  # fmt: skip
    """Set the block sizes of the kernel below, and its num_warps and num_stages.

    `sizes` suit 16-bit tensors on NVIDIA's GPUs. Of the other cases, the first that applies (hip:
    AMD) says what differs. TILE: elements of a block of rows (ROWS x BLOCK_C). PROGRAMS: how many
    programs share the blocks, more if one would get over 16. num_warps: groups of 32 or 64 threads
    that run a program (4 if not set). num_stages: rounds of a loop that load at the same time.
    """
    cases = {"hip_float32": hip_float32, "hip": hip, "tf32": tf32, "float32": float32, "any": sizes}

    def register(kernel: Callable) -> Callable:
        name = kernel.__name__.removesuffix("_kernel")
        BLOCKS[name] = {case: sizes for case, sizes in cases.items() if sizes is not None}
        return kernel

    return register


# --- end of blocks
# --- operators
# Copied from dev/parts/operators.py by dev/sync_parts.py: edit it there.
def operator(function: Callable) -> Callable:
    """Register a function that launches kernels with PyTorch, so that torch.compile sees them."""
    name = f"{NAMESPACE}::{function.__name__}"
    if not INTERPRETED:
        return triton_op(name, function, mutates_args=())
    opaque = torch.library.custom_op(name, function, mutates_args=())
    opaque.register_fake(function)  # for shapes, as torch.compile sees nothing inside
    return opaque


# --- end of operators
# --- layer norm: y = weight * (x - mean) / sqrt(variance + eps) + bias over the channels
# Where an attention needs a pair bias, the same kernel projects y to it.
@block_sizes({"TILE": 1024, "num_warps": 1})
@triton.jit
def layer_norm_forward_kernel(
    X, WEIGHT, BIAS, HEADS, OUT, PAIR_BIAS, rows, N,
    eps: tl.constexpr, H: tl.constexpr, ENDING: tl.constexpr, ALIGNED: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Normalise rows: y = x_hat * weight + bias.

    X and OUT are [rows, C]. If H > 0, the rows are pairs, and HEADS [H, C] projects y to the bias
    of an attention: PAIR_BIAS_h = sum_c y_c HEADS_hc in [B, H, N, N]. ENDING transposes it. A
    program owns ROWS rows: `at` is where their elements are, `inside` which of them exist. ALIGNED
    helps the compiler (length_of).
    """
    program = tl.program_id(0).to(tl.int64)
    row, at, inside = tile_of_rows(program * ROWS, rows, C, BLOCK_C, ROWS, True)
    channel = tl.arange(0, BLOCK_C)  # BLOCK_C: C rounded up to a power of two, as arange needs
    x, _ = normalise(load_tile(X, at, inside), inside, eps, C)  # x_hat
    weight = tl.load(WEIGHT + channel, mask=channel < C, other=0.0)
    bias = tl.load(BIAS + channel, mask=channel < C, other=0.0)
    y = x * weight[None, :] + bias[None, :]
    tl.store(OUT + at, y, mask=inside)
    for head in tl.static_range(H):
        projection = tl.load(HEADS + head * C + channel, mask=channel < C, other=0.0)
        pair_bias = tl.sum(y * projection[None, :], 1)
        to = PAIR_BIAS + pair_bias_offset(row, head, N, H, ENDING, ALIGNED)
        tl.store(to, pair_bias, mask=row < rows)


@block_sizes({"TILE": 1024, "PROGRAMS": 1056, "num_warps": 1})
@triton.jit
def layer_norm_backward_kernel(
    GRAD, GRAD_PAIR_BIAS, X, WEIGHT, BIAS, HEADS, GRAD_X, SUMS, rows, N,
    eps: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, ENDING: tl.constexpr,
    ALIGNED: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of X, WEIGHT, BIAS and HEADS; x_hat and rstd are made again from X.

    dy = GRAD + sum_h dPAIR_BIAS_h HEADS_h, g = dy * weight,
    dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)). Sums over the rows are
    dweight = sum dy * x_hat, dbias = sum dy, dHEADS_h = sum dPAIR_BIAS_h y.
    A program owns every PROGRAMS-th block of ROWS rows. It writes its sums dweight, dbias and
    dHEADS to SUMS [PROGRAMS, 2 + H, C].
    """
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK_C)
    weight = tl.load(WEIGHT + channel, mask=channel < C, other=0.0)
    bias = tl.load(BIAS + channel, mask=channel < C, other=0.0)
    # The rows of these two are summed once, at the end: in each round it would cost more.
    grad_weight = tl.zeros([ROWS, BLOCK_C], tl.float32)
    grad_bias = tl.zeros([ROWS, BLOCK_C], tl.float32)
    grad_heads = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for start in range(program * ROWS, rows, PROGRAMS * ROWS):
        row, at, inside = tile_of_rows(start, rows, C, BLOCK_C, ROWS, True)
        x, rstd = normalise(load_tile(X, at, inside), inside, eps, C)  # x_hat
        grad = tl.zeros([ROWS, BLOCK_C], tl.float32)  # dy
        if GRAD is not None:
            grad += load_tile(GRAD, at, inside)
        for head in tl.static_range(H):
            projection = tl.load(HEADS + head * C + channel, mask=channel < C, other=0.0)
            at_pair = GRAD_PAIR_BIAS + pair_bias_offset(row, head, N, H, ENDING, ALIGNED)
            grad_pair_bias = tl.load(at_pair, mask=row < rows, other=0.0).to(tl.float32)[:, None]
            grad += grad_pair_bias * projection[None, :]
            grad_head = tl.sum(grad_pair_bias * (x * weight[None, :] + bias[None, :]), 0)
            is_head = (tl.arange(0, BLOCK_H) == head)[:, None]  # a block in registers has no [head]
            grad_heads += tl.where(is_head, grad_head[None, :], 0.0)
        grad_weight += grad * x
        grad_bias += grad
        grad = norm_backward(grad * weight[None, :], x, rstd, C)
        tl.store(GRAD_X + at, grad, mask=inside)
    SUMS += program * (2 + H) * C + channel
    tl.store(SUMS, tl.sum(grad_weight, 0), mask=channel < C)
    tl.store(SUMS + C, tl.sum(grad_bias, 0), mask=channel < C)
    if H > 0:
        head = tl.arange(0, BLOCK_H)[:, None]
        at_head = SUMS[None, :] + (2 + head) * C
        tl.store(at_head, grad_heads, mask=(head < H) & (channel < C)[None, :])


@operator
def layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, heads: Tensor | None, eps: float, dtype: torch.dtype,
    ending: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normalise x [..., C] over C: the norm in `dtype`, and a pair bias.

    The latter is [B, H, N, N], made from x [B, N, N, C] by heads [H, C]; empty without heads.
    """
    rows, programs, options = row_launch("layer_norm_forward", x)
    options |= norm_options(x, heads, eps, ending)
    out = torch.empty_like(x, dtype=dtype)
    count, length = options["H"], options["N"]
    pair_bias = out.new_empty(len(x) if count else 0, count, length, length)
    launch = wrap_triton(layer_norm_forward_kernel)[(programs,)]
    launch(x, weight, bias, heads, out, pair_bias, rows=rows, **options)
    return out, pair_bias


@operator
def layer_norm_backward(
    grad: Tensor | None, grad_pair_bias: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor,
    heads: Tensor | None, eps: float, ending: bool, parameters: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of x, and of weight, bias and heads as [2 + H, C].

    The latter is empty without `parameters`.
    """
    rows, programs, options = row_launch("layer_norm_backward", x)
    options |= norm_options(x, None if grad_pair_bias is None else heads, eps, ending)
    options["BLOCK_H"] = triton.next_power_of_2(max(options["H"], 1))
    grad_x = torch.empty_like(x)
    sums = x.new_empty(programs, 2 + options["H"], x.shape[-1], dtype=torch.float32)
    launch = wrap_triton(layer_norm_backward_kernel)[(programs,)]
    launch(grad, grad_pair_bias, x, weight, bias, heads, grad_x, sums, rows=rows, **options)
    return grad_x, sum_parts(sums) if parameters else x.new_empty(0)


def norm_options(x: Tensor, heads: Tensor | None, eps: float, ending: bool) -> dict:
    """Return what the kernels of a norm are told of x, and of the heads that project it."""
    count, length = (0, 1) if heads is None else (len(heads), x.shape[1])
    return {"N": length, "H": count, "eps": eps, "ENDING": ending, "ALIGNED": length % 16 == 8}


class LayerNormFunction(torch.autograd.Function):
    """Normalise x [..., C] over C, in `dtype`.

    With heads [H, C] x is [B, N, N, C], and the norm comes with its projection to them,
    [B, H, N, N]: the bias of an attention, with `ending` that of the transposed pairs.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor, heads: Tensor | None, eps: float,
        dtype: torch.dtype, ending: bool = False,
    ):  # fmt: skip
        ctx.set_materialize_grads(False)  # nobody may have used the norm, or the bias
        x = x.contiguous()
        ctx.save_for_backward(x, weight, bias, heads)
        ctx.eps, ctx.ending = eps, ending
        out, pair_bias = layer_norm_forward(x, weight, bias, heads, eps, dtype, ending)
        return out if heads is None else (out, pair_bias)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        grad, grad_pair_bias = (None if g is None else g.contiguous() for g in (*grads, None)[:2])
        parameters = any(ctx.needs_input_grad[1:])
        settings = ctx.eps, ctx.ending, parameters
        grad_x, sums = layer_norm_backward(grad, grad_pair_bias, *ctx.saved_tensors, *settings)
        if not parameters:
            return grad_x, *6 * [None]
        grad_heads = None if grad_pair_bias is None else sums[2:]
        return grad_x, sums[0], sums[1], grad_heads, *3 * [None]


class LayerNorm(nn.LayerNorm):
    """Normalise over the channels; the kernel writes the type that the next GEMM takes."""

    def __init__(self, dim: int, fusions: Fusions):
        super().__init__(dim)
        self.triton = fusions.triton_layer_norm

    def forward(
        self, x: Tensor, heads: nn.Linear | None = None, ending: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x [..., C] over C.

        With heads x is [B, N, N, C], and the result comes with the attention bias [B, H, N, N] that
        they make of it, with `ending` that of the transposed pairs.
        """
        if self.triton:
            parameters = self.weight, self.bias, None if heads is None else heads.weight
            return LayerNormFunction.apply(x, *parameters, self.eps, gemm_dtype(x), ending)
        x = super().forward(x)
        if heads is None:
            return x
        bias = heads(x)
        return x, bias.permute(0, 3, 2, 1) if ending else bias.permute(0, 3, 1, 2)


# --- projection: y = x W^T + bias
# Adding the bias costs nothing, the GEMM does it; its gradient is the sum over all rows.
@block_sizes({"TILE": 1024, "PROGRAMS": 528, "num_warps": 1})
@triton.jit
def column_sums_kernel(
    X, FACTORS, SUMS, rows, rows_of_factor,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Add up rows: sums_pc = sum of x_rc over the rows r of program p, times FACTORS.

    X is [rows, C], SUMS [PROGRAMS, C]. A program owns every PROGRAMS-th block of ROWS rows.
    """
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK_C)
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in range(program * ROWS, rows, PROGRAMS * ROWS):
        row, at, inside = tile_of_rows(start, rows, C, BLOCK_C, ROWS, True)
        x = load_tile(X, at, inside)
        if FACTORS is not None:
            factor = tl.load(FACTORS + row // rows_of_factor, mask=row < rows, other=0.0)
            x *= factor[:, None]
        total += x
    tl.store(SUMS + program * C + channel, tl.sum(total, 0), mask=channel < C)


@operator
def column_sums(x: Tensor, dtype: torch.dtype, factors: Tensor | None = None) -> Tensor:
    """Return the sums of the columns of x [..., C] in `dtype` [C], each row times its factor."""
    rows, programs, options = row_launch("column_sums", x)
    rows_of_factor = rows if factors is None else rows // len(factors)
    sums = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    launch = wrap_triton(column_sums_kernel)[(programs,)]
    launch(x, factors, sums, rows, rows_of_factor, **options)
    return sum_parts(sums, dtype)


class BiasGradient(torch.autograd.Function):
    """Hand y [..., C] on, and the bias [C] that the GEMM has added to it its gradient."""

    @staticmethod
    def forward(ctx, y: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        if not ctx.needs_input_grad[1]:
            return grad, None
        return grad, column_sums(grad.contiguous(), ctx.dtype)


class Linear(nn.Linear):
    """Project with a bias, whose gradient a kernel sums."""

    def __init__(self, dim_in: int, dim_out: int, fusions: Fusions):
        super().__init__(dim_in, dim_out)
        self.triton = fusions.triton_bias_gradient

    def forward(self, x: Tensor) -> Tensor:
        """Project x [..., dim_in] -> [..., dim_out]."""
        if self.triton:
            return BiasGradient.apply(F.linear(x, self.weight, self.bias.detach()), self.bias)
        return super().forward(x)


# --- attention: update = linear_o(sigmoid(gate) * softmax(q k^T / sqrt(D) + bias) v)
# Attention of every row of a batch of rows, with a pair bias B that they share, and a gate:
#
#   S = scale * Q K^T + B,   P = softmax(S),   O = P V,   out = sigmoid(gate + gate_bias) * O
#
# QKVG [B, R, N, H, 4, D] is what the projection's GEMM wrote. With COLUMNS memory is [B, N, R, ...]
# there, in the output and in both gradients: columns and ending nodes are read where they lie. The
# output is kept after the gate: with g = sigmoid(gate + gate_bias) it gives
# dgate = dout * out * (1 - g), and what the softmax's gradient needs, delta = rowsum(dO * O), as
# rowsum(dout * out), but for the rounding of out. In the backward pass
#
#   dV = P^T dO,   dP = dO V^T,   dS = P * (dP - delta),   dQ = dS K,   dK = dS^T Q,   dB = sum_r dS
#
# The log-sum-exp of a row is kept to the base 2. R, H and N are sizes.
@block_sizes(
    {"BLOCK_M": 64, "BLOCK_N": 32},
    hip={"num_stages": 1},
    float32={"BLOCK_M": 128},
)
@triton.jit
def attention_forward_kernel(
    QKVG, GATE_BIAS, BIAS, OUT, LOG_SUM_EXP, R, H, N,
    scale: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out = sigmoid(gate + gate_bias) * softmax(scale * Q K^T + B) V without storing S.

    QKVG is [B, R, N, H, 4, D], GATE_BIAS [H x D], BIAS [B, H, N, N] or None, OUT [B, R, N, H x D],
    LOG_SUM_EXP [B, R, H, N] that of each row of S. A program owns BLOCK_M queries of a head of a
    row, and goes over their keys BLOCK_N at a time.
    """
    N = length_of(N, ALIGNED)
    tile, head, r, b = split_program(tl.program_id(0), tl.cdiv(N, BLOCK_M), H, R)
    first, step = head_of_row(b, r, head, R, H, N, COLUMNS)
    QKVG += first * 4 * D
    x_n = step * 4 * D
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_rows(QKVG, query, x_n, D, BLOCK_D, N, EVEN)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M, 8], tl.float32)  # in eight parts
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, N, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k = load_rows(QKVG + D, key, x_n, D, BLOCK_D, N, EVEN)
        v = load_rows(QKVG + 2 * D, key, x_n, D, BLOCK_D, N, EVEN)
        bias = load_bias(BIAS, b * H + head, query, key, N, EVEN)
        s = scores(q, k, bias, key, N, scale, EVEN, PRECISION)  # S = scale * Q K^T + B
        # Online softmax: what was added up so far belongs to the maximum so far.
        new_row_max = tl.maximum(row_max, tl.max(s, 1) * LOG2E)  # to the base 2
        p = tl.exp2(s * LOG2E - new_row_max[:, None])
        rescale = tl.exp2(row_max - new_row_max)
        row_sum = row_sum * rescale[:, None] + sum_eighths(p)
        # O += P V
        out = tl.dot(p.to(v.dtype), v, out * rescale[:, None], input_precision=PRECISION)
        row_max = new_row_max
    row_sum = tl.sum(row_sum, 1)
    gate = load_gate(QKVG, GATE_BIAS + head * D, query, x_n, D, BLOCK_D, N, EVEN)
    out = out / row_sum[:, None] * gate
    store_rows(OUT + first * D, out, query, step * D, D, BLOCK_D, N, EVEN)
    at_row = ((b * R + r) * H + head) * N
    tl.store(LOG_SUM_EXP + at_row + query, row_max + tl.log2(row_sum), mask=query < N)


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_N": 32},
    float32={"BLOCK_N": 64},
    tf32={"BLOCK_N": 64, "num_stages": 2},
    hip={"num_stages": 1},
)
@triton.jit
def attention_backward_query_kernel(
    GRAD_OUT, QKVG, GATE_BIAS, BIAS, OUT, LOG_SUM_EXP,
    GRAD_QKVG, GRAD_ATTENTION, DELTA, GRAD_GATE_BIAS, R, H, N,
    scale: tl.constexpr, COLUMNS: tl.constexpr, ROUNDED: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ and dgate, and what the other two kernels need: dO and delta.

    dgate = dout * out * (1 - g), dO = dout * g, delta = rowsum(dout * out),
    dS = P * (dO V^T - delta), dQ = dS K. GRAD_ATTENTION holds dO in the layout of OUT, DELTA lies
    as LOG_SUM_EXP does; GRAD_GATE_BIAS [B, R, tiles, H x D] is the sum of dgate over the queries of
    a tile. A program owns BLOCK_M queries of a head of a row.

    Delta makes the gradients of a row's scores add up to 0, without which what all keys have in
    common would enter the query's gradient. From a ROUNDED output it does so only roughly: what the
    sum is then, rowsum(dS), is taken off at the end, times P K, the mean of the keys.
    """
    N = length_of(N, ALIGNED)
    tile, head, r, b = split_program(tl.program_id(0), tl.cdiv(N, BLOCK_M), H, R)
    r = R - 1 - r  # from the last row on: the first ones are then in L2 for the key kernel
    first, step = head_of_row(b, r, head, R, H, N, COLUMNS)
    at_x, x_n = first * 4 * D, step * 4 * D
    at_out, out_n = first * D, step * D
    at_row = ((b * R + r) * H + head) * N
    QKVG += at_x
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    grad_out = load_rows(GRAD_OUT + at_out, query, out_n, D, BLOCK_D, N, EVEN)
    gate = load_gate(QKVG, GATE_BIAS + head * D, query, x_n, D, BLOCK_D, N, EVEN)
    product = grad_out.to(tl.float32)
    product *= load_rows(OUT + at_out, query, out_n, D, BLOCK_D, N, EVEN).to(tl.float32)
    delta = tl.sum(product, 1)
    grad_gate = product * (1 - gate)
    store_rows(GRAD_QKVG + at_x + 3 * D, grad_gate, query, x_n, D, BLOCK_D, N, EVEN)
    column = tl.arange(0, BLOCK_D)
    at = (((b * R + r) * tl.cdiv(N, BLOCK_M) + tile) * H + head) * D + column
    tl.store(GRAD_GATE_BIAS + at, tl.sum(grad_gate, 0), mask=column < D)
    q = load_rows(QKVG, query, x_n, D, BLOCK_D, N, EVEN)
    grad = (grad_out.to(tl.float32) * gate).to(q.dtype)
    store_rows(GRAD_ATTENTION + at_out, grad, query, out_n, D, BLOCK_D, N, EVEN)
    log_sum_exp = tl.load(LOG_SUM_EXP + at_row + query, mask=(query < N) | EVEN, other=0.0)
    grad_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    rest = tl.zeros([BLOCK_M, 8], tl.float32)
    mean_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, N, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k = load_rows(QKVG + D, key, x_n, D, BLOCK_D, N, EVEN)
        v = load_rows(QKVG + 2 * D, key, x_n, D, BLOCK_D, N, EVEN)
        bias = load_bias(BIAS, b * H + head, query, key, N, EVEN)
        s = scores(q, k, bias, key, N, scale, EVEN, PRECISION)  # S = scale * Q K^T + B
        p, grad_s = score_gradients(s, log_sum_exp[:, None], delta[:, None], grad, v, PRECISION)
        grad_q = tl.dot(grad_s.to(k.dtype), k, grad_q, input_precision=PRECISION)  # dQ += dS K
        if ROUNDED:
            rest += sum_eighths(grad_s)
            mean_k = tl.dot(p.to(k.dtype), k, mean_k, input_precision=PRECISION)  # P K
    rest = tl.sum(rest, 1)
    grad_q -= rest[:, None] * mean_k
    tl.store(DELTA + at_row + query, delta + rest, mask=query < N)
    store_rows(GRAD_QKVG + at_x, grad_q * scale, query, x_n, D, BLOCK_D, N, EVEN)


@block_sizes(
    {"BLOCK_M": 32, "BLOCK_N": 64},
    float32={"BLOCK_M": 64},
    tf32={"BLOCK_N": 128, "num_warps": 8},
    hip={"BLOCK_N": 32, "num_stages": 1},
)
@triton.jit
def attention_backward_key_kernel(
    QKVG, BIAS_T, LOG_SUM_EXP, GRAD_ATTENTION, DELTA, GRAD_QKVG, R, H, N,
    scale: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK = dS^T Q and dV = P^T dO.

    S, P and dS are transposed here, [keys, queries], as both products take them, and so is
    BIAS_T [B, H, N, N]. A program owns BLOCK_N keys of a head of a row, and goes over the queries
    BLOCK_M at a time.
    """
    N = length_of(N, ALIGNED)
    tile, head, r, b = split_program(tl.program_id(0), tl.cdiv(N, BLOCK_N), H, R)
    first, step = head_of_row(b, r, head, R, H, N, COLUMNS)
    at_x, x_n, out_n = first * 4 * D, step * 4 * D, step * D
    at_row = ((b * R + r) * H + head) * N
    QKVG += at_x
    GRAD_ATTENTION += first * D
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = load_rows(QKVG + D, key, x_n, D, BLOCK_D, N, EVEN)
    v = load_rows(QKVG + 2 * D, key, x_n, D, BLOCK_D, N, EVEN)
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, N, BLOCK_M):
        query = start + tl.arange(0, BLOCK_M)
        q = load_rows(QKVG, query, x_n, D, BLOCK_D, N, EVEN)
        grad = load_rows(GRAD_ATTENTION, query, out_n, D, BLOCK_D, N, EVEN)
        log_sum_exp = tl.load(LOG_SUM_EXP + at_row + query, mask=(query < N) | EVEN, other=0.0)
        delta = tl.load(DELTA + at_row + query, mask=(query < N) | EVEN, other=0.0)
        bias = load_bias(BIAS_T, b * H + head, key, query, N, EVEN)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale + bias  # S^T
        p, grad_s = score_gradients(s, log_sum_exp[None, :], delta[None, :], v, grad, PRECISION)
        grad_v = tl.dot(p.to(grad.dtype), grad, grad_v, input_precision=PRECISION)  # dV += P^T dO
        grad_k = tl.dot(grad_s.to(q.dtype), q, grad_k, input_precision=PRECISION)  # dK += dS^T Q
    store_rows(GRAD_QKVG + at_x + D, grad_k * scale, key, x_n, D, BLOCK_D, N, EVEN)
    store_rows(GRAD_QKVG + at_x + 2 * D, grad_v, key, x_n, D, BLOCK_D, N, EVEN)


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_N": 64, "PROGRAMS": 396},
    hip={"PROGRAMS": 432, "num_stages": 1},
)
@triton.jit
def attention_backward_bias_kernel(
    QKVG, BIAS, LOG_SUM_EXP, GRAD_ATTENTION, DELTA, GRAD_BIAS, R, H, N, B, group,
    scale: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the bias, dB = sum of dS over the rows that share it.

    GRAD_BIAS is [groups, B, H, N, N]. A program owns a tile [BLOCK_M, BLOCK_N] of it and adds up
    `group` of the rows, so nothing is added atomically.
    """
    N = length_of(N, ALIGNED)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(N, BLOCK_M) * tiles_n
    tile, head, g, b = split_program(tl.program_id(0), tiles, H, tl.cdiv(R, group))
    query = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    key = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    bias = load_bias(BIAS, b * H + head, query, key, N, EVEN)
    grad_bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first_row = (g * group).to(tl.int32)
    last_row = tl.minimum(g * group + group, R).to(tl.int32)
    for row in range(first_row, last_row):
        r = tl.cast(row, tl.int64)
        first, step = head_of_row(b, r, head, R, H, N, COLUMNS)
        at, x_n = QKVG + first * 4 * D, step * 4 * D
        q = load_rows(at, query, x_n, D, BLOCK_D, N, EVEN)
        k = load_rows(at + D, key, x_n, D, BLOCK_D, N, EVEN)
        v = load_rows(at + 2 * D, key, x_n, D, BLOCK_D, N, EVEN)
        grad = load_rows(GRAD_ATTENTION + first * D, query, step * D, D, BLOCK_D, N, EVEN)
        at_row = ((b * R + r) * H + head) * N
        log_sum_exp = tl.load(LOG_SUM_EXP + at_row + query, mask=(query < N) | EVEN, other=0.0)
        delta = tl.load(DELTA + at_row + query, mask=(query < N) | EVEN, other=0.0)
        s = scores(q, k, bias, key, N, scale, EVEN, PRECISION)  # S = scale * Q K^T + B
        _, grad_s = score_gradients(s, log_sum_exp[:, None], delta[:, None], grad, v, PRECISION)
        grad_bias += grad_s  # dB += dS
    at = ((g * B + b) * H + head) * N * N + query.to(tl.int64)[:, None] * N + key[None, :]
    tl.store(GRAD_BIAS + at, grad_bias, mask=(query < N)[:, None] & (key < N)[None, :])


@block_sizes(
    {"BLOCK_N": 64, "PROGRAMS": 256},
    float32={"num_stages": 2},
    hip={"BLOCK_N": 16, "num_stages": 1},
)
@triton.jit
def attention_backward_short_kernel(
    GRAD_OUT, QKVG, GATE_BIAS, BIAS, OUT, GRAD_QKVG, GRAD_GATE_BIAS, GRAD_BIAS,
    R, H, N, B, group, scale: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of an attention whose rows are at most BLOCK_N long.

    A row's S is a single tile then, so no sum is left to another kernel: dgate, dV = P^T dO,
    dS = P * (dP - rowsum(P * dP)), dQ = dS K, dK = dS^T Q. A program owns `group` rows of a head,
    and the sums of dgate and of dS over them: of GRAD_GATE_BIAS [B, groups, H x D] and of
    GRAD_BIAS [groups, B, H, N, N].
    """
    N = length_of(N, ALIGNED)
    _, head, g, b = split_program(tl.program_id(0), 1, H, tl.cdiv(R, group))
    n = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    bias = load_bias(BIAS, b * H + head, n, n, N, EVEN)
    grad_bias = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    grad_gate_bias = tl.zeros([BLOCK_D], tl.float32)
    first_row = (g * group).to(tl.int32)
    last_row = tl.minimum(g * group + group, R).to(tl.int32)
    for row in range(first_row, last_row):
        first, step = head_of_row(b, tl.cast(row, tl.int64), head, R, H, N, COLUMNS)
        at_x, x_n = first * 4 * D, step * 4 * D
        at_out, out_n = first * D, step * D
        q = load_rows(QKVG + at_x, n, x_n, D, BLOCK_D, N, EVEN)
        k = load_rows(QKVG + at_x + D, n, x_n, D, BLOCK_D, N, EVEN)
        v = load_rows(QKVG + at_x + 2 * D, n, x_n, D, BLOCK_D, N, EVEN)
        gate = load_gate(QKVG + at_x, GATE_BIAS + head * D, n, x_n, D, BLOCK_D, N, EVEN)
        grad_out = load_rows(GRAD_OUT + at_out, n, out_n, D, BLOCK_D, N, EVEN)
        out = load_rows(OUT + at_out, n, out_n, D, BLOCK_D, N, EVEN)
        product = grad_out.to(tl.float32) * out.to(tl.float32)
        grad_gate = product * (1 - gate)
        grad_gate_bias += tl.sum(grad_gate, 0)
        store_rows(GRAD_QKVG + at_x + 3 * D, grad_gate, n, x_n, D, BLOCK_D, N, EVEN)
        grad = (grad_out.to(tl.float32) * gate).to(q.dtype)
        s = scores(q, k, bias, n, N, scale, EVEN, PRECISION)  # S = scale * Q K^T + B
        # A whole row is here: its own sum is more exact than a log-sum-exp that was rounded.
        p = tl.exp2(s * LOG2E - (tl.max(s, 1) * LOG2E)[:, None])
        p /= tl.sum(p, 1)[:, None]  # P
        grad_v = tl.dot(tl.trans(p.to(grad.dtype)), grad, input_precision=PRECISION)  # dV = P^T dO
        store_rows(GRAD_QKVG + at_x + 2 * D, grad_v, n, x_n, D, BLOCK_D, N, EVEN)
        grad_p = tl.dot(grad, tl.trans(v), input_precision=PRECISION)  # dP = dO V^T
        grad_s = p * (grad_p - tl.sum(p * grad_p, 1)[:, None])  # dS
        grad_bias += grad_s  # dB += dS
        grad_s = (grad_s * scale).to(q.dtype)
        grad_q = tl.dot(grad_s, k, input_precision=PRECISION)  # dQ = dS K
        store_rows(GRAD_QKVG + at_x, grad_q, n, x_n, D, BLOCK_D, N, EVEN)
        grad_k = tl.dot(tl.trans(grad_s), q, input_precision=PRECISION)  # dK = dS^T Q
        store_rows(GRAD_QKVG + at_x + D, grad_k, n, x_n, D, BLOCK_D, N, EVEN)
    tl.store(GRAD_GATE_BIAS + tl.program_id(0) * D + column, grad_gate_bias, mask=column < D)
    if GRAD_BIAS is not None:
        at_grad = ((g * B + b) * H + head) * N * N + n[:, None] * N + n[None, :]
        tl.store(GRAD_BIAS + at_grad, grad_bias, mask=(n < N)[:, None] & (n < N)[None, :])


@triton.jit
def split_program(program, tiles, H, R):
    """Split the number of a program into tile, head, row and sample.

    Programs that share a tile of the bias run close to each other.
    """
    rest = program // tiles
    return program % tiles, rest % H, (rest // H % R).to(tl.int64), (rest // H // R).to(tl.int64)


@triton.jit
def head_of_row(b, r, head, R, H, N, COLUMNS: tl.constexpr):
    """Find this head of a row's first position, and how many heads lie between two positions."""
    if COLUMNS:
        return (b * N * R + r) * H + head, tl.cast(R, tl.int64) * H  # a row is spread over all
    else:
        return (b * R + r) * N * H + head, H


@triton.jit
def load_rows(X, row, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, N, EVEN: tl.constexpr):
    """Load rows of a matrix [N, D] that lie `stride` apart, zeros beyond its ends."""
    column = tl.arange(0, BLOCK_D)
    at = row[:, None] * stride + column[None, :]
    inside = (row < N)[:, None] & (column < D)[None, :] | EVEN
    return tl.load(X + at, mask=inside, other=0.0)


@triton.jit
def store_rows(X, x, row, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, N, EVEN: tl.constexpr):
    """Store rows of a matrix [N, D] that lie `stride` apart, in its type, none beyond its ends."""
    column = tl.arange(0, BLOCK_D)
    at = row[:, None] * stride + column[None, :]
    inside = (row < N)[:, None] & (column < D)[None, :] | EVEN
    tl.store(X + at, x, mask=inside)


@triton.jit
def load_bias(BIAS, head, row, column, N, EVEN: tl.constexpr):
    """Load a tile of the pair bias [N, N] of a head in float32; 0 without a bias."""
    bias = 0.0
    if BIAS is not None:
        at = BIAS + head * N * N + row.to(tl.int64)[:, None] * N + column[None, :]
        inside = (row < N)[:, None] & (column < N)[None, :] | EVEN
        bias = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return bias


@triton.jit
def scores(q, k, bias, key, N, scale, EVEN: tl.constexpr, PRECISION: tl.constexpr):
    """Compute S = scale * Q K^T + B, [queries, keys]; -inf beyond the last key."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias
    return score if EVEN else tl.where((key < N)[None, :], score, float("-inf"))


@triton.jit
def score_gradients(s, log_sum_exp, delta, grad, v, PRECISION: tl.constexpr):
    """Compute P = exp(S - log_sum_exp) and dS = P * (dP - delta) with dP = dO V^T -> P, dS.

    With V and dO exchanged all are transposed.
    """
    p = tl.exp2(s * LOG2E - log_sum_exp)
    grad_p = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    return p, p * (grad_p - delta)


@triton.jit
def sum_eighths(x):
    """Add up columns 0, 8, 16, ... of x [rows, columns], then 1, 9, 17, ... -> [rows, 8].

    These lie in one thread after a product on tensor cores. So threads exchange sums once, after a
    loop over columns, and not in each round.
    """
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 1)


@triton.jit
def load_gate(
    QKVG, GATE_BIAS, row, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, N, EVEN: tl.constexpr
):  # fmt: skip
    """Load sigmoid(gate + gate_bias) [queries, D] of one head."""
    column = tl.arange(0, BLOCK_D)
    bias = tl.load(GATE_BIAS + column, mask=column < D, other=0.0).to(tl.float32)
    gate = load_rows(QKVG + 3 * D, row, stride, D, BLOCK_D, N, EVEN).to(tl.float32)
    return sigmoid(gate + bias[None, :])


def attention_sizes(qkvg: Tensor, columns: bool) -> tuple[int, int, int, int, int]:
    """Return samples, rows, positions of a row, heads and channels of a head."""
    samples, rows, length, heads, _, dim = qkvg.shape
    return samples, *((length, rows) if columns else (rows, length)), heads, dim


def attention_options(kernel: str, qkvg: Tensor, columns: bool) -> dict[str, int | float | str]:
    """Return what an attention kernel is told; no block is longer than the rows."""
    _, rows, length, heads, dim = attention_sizes(qkvg, columns)
    chosen = blocks(kernel, qkvg.dtype)
    longest = max(16, triton.next_power_of_2(length))
    sizes = {name: min(size, longest) for name, size in chosen.items() if "BLOCK" in name}
    chosen |= {**sizes, "D": dim, "BLOCK_D": max(16, triton.next_power_of_2(dim))}
    even_rows = all(length % size == 0 for size in sizes.values())
    chosen["EVEN"] = dim == chosen["BLOCK_D"] and even_rows
    chosen["ALIGNED"] = length % 16 == 8
    tile = math.prod(sizes.values()) if len(sizes) == 2 else longest**2
    chosen["num_warps"] = max(1, min(chosen["num_warps"], tile // 512))
    chosen |= {"R": rows, "H": heads, "N": length, "scale": 1 / math.sqrt(dim), "COLUMNS": columns}
    return {**chosen, "PRECISION": dot_precision(qkvg.dtype)}


@cache  # a launch asks for it each time
def rows_per_program(programs: int, tiles: int, rows: int) -> int:
    """Return how many rows that share a tile go to one program, if `programs` run at a time.

    More groups of rows may fill the last wave of programs better, but each has sums that are
    written, read and added up: for a tile this takes about as long as four rows.
    """

    def cost(groups: int) -> float:
        waves = triton.cdiv(tiles * groups, programs)
        return waves * triton.cdiv(rows, groups) + 4 * tiles * groups / programs

    return triton.cdiv(rows, min(range(1, min(rows, programs) + 1), key=cost))


@operator
def attention_forward(
    qkvg: Tensor, gate_bias: Tensor, bias: Tensor | None, columns: bool
) -> tuple[Tensor, Tensor]:
    """Compute gated attention: the output [B, R, N, H x D], and log-sum-exp [B, R, H, N].

    qkvg is [B, R, N, H, 4, D], gate_bias [H x D], bias [B, H, N, N]; with `columns` qkvg and the
    output are [B, N, R, ...].
    """
    samples, rows, length, heads, dim = attention_sizes(qkvg, columns)
    out = qkvg.new_empty(*qkvg.shape[:3], heads * dim)
    log_sum_exp = qkvg.new_empty(samples, rows, heads, length, dtype=torch.float32)
    options = attention_options("attention_forward", qkvg, columns)
    programs = triton.cdiv(length, options["BLOCK_M"]) * heads * rows * samples
    launch = wrap_triton(attention_forward_kernel)[(programs,)]
    launch(qkvg, gate_bias, bias, out, log_sum_exp, **options)
    return out, log_sum_exp


@operator
def attention_backward(
    grad_out: Tensor, qkvg: Tensor, gate_bias: Tensor, bias: Tensor | None, out: Tensor,
    log_sum_exp: Tensor, columns: bool, needs_gate_bias: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of qkvg (in its layout), gate_bias and bias.

    The last two are empty unless `needs_gate_bias` and `needs_bias` ask for them.
    """
    samples, rows, length, heads, dim = attention_sizes(qkvg, columns)
    heads_of_all = heads * samples
    grad_qkvg = torch.empty_like(qkvg)
    grad_bias = None

    def new_sums(*shape: int) -> Tensor:
        return qkvg.new_empty(shape, dtype=torch.float32)

    short = attention_options("attention_backward_short", qkvg, columns)
    if short["BLOCK_N"] >= length:
        group = rows_per_program(short.pop("PROGRAMS"), heads_of_all, rows)
        parts = triton.cdiv(rows, group)
        if needs_bias:
            grad_bias = new_sums(parts, *bias.shape)
        grad_gate_bias = new_sums(samples * parts, heads * dim)
        inputs = grad_out, qkvg, gate_bias, bias, out
        launch = wrap_triton(attention_backward_short_kernel)[(parts * heads_of_all,)]
        launch(*inputs, grad_qkvg, grad_gate_bias, grad_bias, B=samples, group=group, **short)
    else:
        grad, delta = torch.empty_like(out), torch.empty_like(log_sum_exp)
        options = attention_options("attention_backward_query", qkvg, columns)
        options["ROUNDED"] = qkvg.dtype != torch.float32 or options["PRECISION"] == "tf32"
        tiles = triton.cdiv(length, options["BLOCK_M"])
        grad_gate_bias = new_sums(samples * rows * tiles, heads * dim)
        inputs = grad_out, qkvg, gate_bias, bias, out, log_sum_exp
        launch = wrap_triton(attention_backward_query_kernel)[(tiles * rows * heads_of_all,)]
        launch(*inputs, grad_qkvg, grad, delta, grad_gate_bias, **options)
        options = attention_options("attention_backward_key", qkvg, columns)
        tiles = triton.cdiv(length, options["BLOCK_N"])
        bias_t = None if bias is None else bias.mT.contiguous()
        launch = wrap_triton(attention_backward_key_kernel)[(tiles * rows * heads_of_all,)]
        launch(qkvg, bias_t, log_sum_exp, grad, delta, grad_qkvg, **options)
        if needs_bias:
            options = attention_options("attention_backward_bias", qkvg, columns)
            tiles = math.prod(triton.cdiv(length, options[size]) for size in ("BLOCK_M", "BLOCK_N"))
            group = rows_per_program(options.pop("PROGRAMS"), tiles * heads_of_all, rows)
            parts = triton.cdiv(rows, group)
            options |= {"B": samples, "group": group}
            launch = wrap_triton(attention_backward_bias_kernel)[(tiles * parts * heads_of_all,)]
            grad_bias = new_sums(parts, *bias.shape)
            launch(qkvg, bias, log_sum_exp, grad, delta, grad_bias, **options)
    grad_bias = sum_parts(grad_bias, dtype=bias.dtype) if needs_bias else qkvg.new_empty(0)
    grad_gate_bias = sum_parts(grad_gate_bias) if needs_gate_bias else qkvg.new_empty(0)
    return grad_qkvg, grad_gate_bias, grad_bias


class GatedAttentionFunction(torch.autograd.Function):
    """Compute sigmoid(gate + gate_bias) * softmax(q k^T / sqrt(D) + bias) v.

    qkvg [B, R, N, H, 4, D] holds q, k, v and gate; the result is [B, R, N, H x D]. The bias
    [B, H, N, N] is the same for all rows R; it may be None. With `columns` qkvg and the result are
    [B, N, R, ...].
    """

    @staticmethod
    def forward(
        ctx, qkvg: Tensor, gate_bias: Tensor, bias: Tensor | None, columns: bool = False
    ) -> Tensor:
        ctx.columns = columns
        qkvg = qkvg.contiguous()
        gate_bias = gate_bias.contiguous()
        bias = None if bias is None else bias.contiguous()
        out, log_sum_exp = attention_forward(qkvg, gate_bias, bias, columns)
        ctx.save_for_backward(qkvg, gate_bias, bias, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        needed = ctx.needs_input_grad[1:3]
        inputs = grad_out.contiguous(), *ctx.saved_tensors, ctx.columns
        grad_qkvg, *grads = attention_backward(*inputs, *needed)
        grads = (g if asked else None for g, asked in zip(grads, needed, strict=True))
        return grad_qkvg, *grads, None


class GatedAttention(nn.Module):
    """Attend along one axis in several heads, with a sigmoid gate: the base of four attentions."""

    def __init__(self, dim: int, heads: int, fusions: Fusions):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.fused = fusions.triton_attention
        if self.fused:
            parts = ("linear_q", "linear_k", "linear_v", "linear_g")  # names in a state_dict
            self.linear_qkvg = QKVGLinear(dim)
            keep_separate_names(self, "linear_qkvg", parts, biased=("linear_g",), heads=heads)
        else:
            self.linear_q = nn.Linear(dim, dim, bias=False)
            self.linear_k = nn.Linear(dim, dim, bias=False)
            self.linear_v = nn.Linear(dim, dim, bias=False)
            self.linear_g = nn.Linear(dim, dim)
        self.linear_o = Linear(dim, dim, fusions)

    def attend(
        self, x: Tensor, bias: Tensor | None = None, present: Tensor | None = None,
        columns: bool = False,
    ) -> Tensor:  # fmt: skip
        """Let the N vectors in each of the R rows of x [B, R, N, C] attend to each other.

        bias [B, H, N, N] and present [B, N] are the same for all rows. Where present is False there
        is padding, and nothing attends to it. With `columns` the R vectors in each of the N columns
        attend to each other: bias is [B, H, R, R], present [B, R].
        """
        if present is not None:
            bias = x.new_zeros(1) if bias is None else bias
            # -1e4 fits float16 and gives a weight of 0; -inf gives NaN if all keys are padding
            bias = bias.masked_fill(~present[:, None, None], -1e4)
        if self.fused:
            qkvg = F.linear(x, self.linear_qkvg.weight).unflatten(-1, (self.heads, 4, -1))
            if bias is not None:
                bias = bias.expand(-1, self.heads, x.shape[1 if columns else 2], -1)
            out = GatedAttentionFunction.apply(qkvg, self.linear_qkvg.bias, bias, columns)
            return self.linear_o(out)
        if columns:
            return self.attend(x.transpose(1, 2), bias).transpose(1, 2)
        linears = (self.linear_q, self.linear_k, self.linear_v, self.linear_g)
        q, k, v, gate = (linear(x) for linear in linears)
        # B and R become one dimension, as torch.compile (PyTorch 2.11) fails if there are both.
        heads = (self.heads, self.head_dim)
        q, k, v = (t.flatten(0, 1).unflatten(-1, heads).transpose(1, 2) for t in (q, k, v))
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-2, -1)  # [B x R, H, N, N]
        if bias is not None:
            scores = (scores.unflatten(0, x.shape[:2]) + bias[:, None]).flatten(0, 1)
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return self.linear_o(torch.sigmoid(gate) * out)


class QKVGLinear(nn.Module):
    """Query, key, value and gate projection as one GEMM; only the gate has a bias."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4 * dim, dim))
        self.bias = nn.Parameter(torch.empty(dim))


class MSARowAttentionWithPairBias(GatedAttention):
    """Let residues attend to each other, biased by their pair (AF2 SI, algorithm 7)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__(config.msa_dim, config.num_heads_msa, fusions)
        self.layer_norm_m = LayerNorm(config.msa_dim, fusions)
        self.layer_norm_z = LayerNorm(config.pair_dim, fusions)
        self.linear_z = nn.Linear(config.pair_dim, config.num_heads_msa, bias=False)

    def forward(self, msa: Tensor, pair: Tensor, residues: Tensor | None = None) -> Tensor:
        """Compute the update of msa [B, S, N, c_m] by pair [B, N, N, c_z] and residues [B, N]."""
        _, bias = self.layer_norm_z(pair, self.linear_z)
        return self.attend(self.layer_norm_m(msa), bias, residues)


class MSAColumnAttention(GatedAttention):
    """Let sequences attend to each other at one residue (AF2 SI, algorithm 8)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__(config.msa_dim, config.num_heads_msa, fusions)
        self.layer_norm_m = LayerNorm(config.msa_dim, fusions)

    def forward(self, msa: Tensor, sequences: Tensor | None = None) -> Tensor:
        """Compute the update of msa [B, S, N, c_m]; sequences [B, S] are False for padding."""
        return self.attend(self.layer_norm_m(msa), present=sequences, columns=True)


class TriangleAttentionStartingNode(GatedAttention):
    """Let edges ij and ik attend to each other, biased by edge jk (AF2 SI, algorithm 13)."""

    ending = False

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__(config.pair_dim, config.num_heads_pair, fusions)
        self.layer_norm = LayerNorm(config.pair_dim, fusions)
        self.linear = nn.Linear(config.pair_dim, config.num_heads_pair, bias=False)

    def forward(self, pair: Tensor, residues: Tensor | None = None) -> Tensor:
        """Compute the update of pair [B, N, N, c_z]; residues [B, N] are False for padding."""
        normed, bias = self.layer_norm(pair, self.linear, self.ending)
        return self.attend(normed, bias, residues, self.ending)


class TriangleAttentionEndingNode(TriangleAttentionStartingNode):
    """Let edges ij and kj attend to each other, biased by edge ki (AF2 SI, algorithm 14)."""

    ending = True


# --- triangle multiplication: update = sigmoid(g) * linear_z(norm(sum_k a_ik * b_jk))
# Triangle multiplication of x [B, N, N, C]:
#
#   y = LayerNorm(x),   a = sigmoid(y W_ag) * (y W_ap),   b = sigmoid(y W_bg) * (y W_bp)
#   X_ij = sum_k a_ik * b_jk (outgoing) or sum_k a_ki * b_kj (incoming), for each channel
#   out = sigmoid(y W_g) * (LayerNorm(X) W_z)
#
# Positions are one dimension m = (b, i, j) of length M; "channel first" is [C, M], which torch.bmm
# takes as C x B matrices [N, N]. Norm, projections and gates are one kernel on each side of the
# product, and the statistics of both norms are kept. C must be a power of two.
# Which C rows of the packed WEIGHT [6 C, C] and BIAS [6 C] a projection has.
A_P, B_P, A_G, B_G, G, Z = (tl.constexpr(part) for part in range(6))


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_C": 64, "num_stages": 1},
    tf32={"BLOCK_M": 128, "num_warps": 8},
    hip_float32={"num_warps": 8},
)
@triton.jit
def triangle_project_kernel(
    X, NORM_WEIGHT, NORM_BIAS, WEIGHT, BIAS, STATISTICS, PRESENT, AB, M,
    eps: tl.constexpr, C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a = sigmoid(y W_ag) * (y W_ap), and b likewise, from y = LayerNorm(x).

    X is [M, C]; AB [2 C, M] are a and b, channel first; STATISTICS [2, M] mean and rstd of the
    norm. Where PRESENT [M] is False a is 0, and nowhere if it is None. A program owns BLOCK_M
    positions, and goes over the channels of a and b BLOCK_C at a time.
    """
    position, at, inside = tile_of_rows(tl.program_id(0) * BLOCK_M, M, C, C, BLOCK_M, WIDE)
    channel = tl.arange(0, C)
    x = normalise_and_keep(load_tile(X, at, inside), position, STATISTICS, M, eps, C)
    y = tl.trans(scale_and_shift(x, NORM_WEIGHT, NORM_BIAS, C).to(WEIGHT.dtype.element_ty))
    if PRESENT is not None:  # in float32, as a mask of many rows takes AMD's scalar registers
        present = tl.load(PRESENT + position, mask=position < M, other=0).to(tl.float32)[None, :]
    for first in tl.range(A_P * C, A_G * C, BLOCK_C, loop_unroll_factor=1):  # a_p, then b_p
        row = first + tl.arange(0, BLOCK_C)
        weight = WEIGHT + row[:, None] * C + channel[None, :]
        gate = tl.dot(tl.load(weight + A_G * C * C), y, input_precision=PRECISION)  # W_ag y^T
        gate = gate + tl.load(BIAS + A_G * C + row)[:, None]
        value = tl.dot(tl.load(weight), y, input_precision=PRECISION)  # W_ap y^T
        value = value + tl.load(BIAS + row)[:, None]
        value *= sigmoid(gate)
        if PRESENT is not None:
            value *= tl.where(first < B_P * C, present, 1.0)
        at_ab = index(row, WIDE)[:, None] * M + position[None, :]
        tl.store(AB + at_ab, value, mask=(position < M)[None, :])


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_C": 64, "num_stages": 1},
    hip={"num_warps": 8},
    hip_float32={"BLOCK_C": 32},
)
@triton.jit
def triangle_output_kernel(
    X, NORM_WEIGHT, NORM_BIAS, OUT_WEIGHT, OUT_BIAS, WEIGHT, BIAS, STATISTICS, OUT_STATISTICS,
    PRODUCT, OUT, M, eps: tl.constexpr, C: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out = x + sigmoid(y W_g) * (LayerNorm(X) W_z); y = LayerNorm(x).

    X and OUT are [M, C], PRODUCT [C, M] is channel first. STATISTICS [2, M] are mean and rstd of
    the norm of x, OUT_STATISTICS those of the norm of X. A program owns BLOCK_M positions, and goes
    over their channels BLOCK_C at a time.
    """
    position, at, inside = tile_of_rows(tl.program_id(0) * BLOCK_M, M, C, C, BLOCK_M, WIDE)
    channel = tl.arange(0, C)
    dtype = WEIGHT.dtype.element_ty
    x, _ = normalise_again(load_tile(X, at, inside), position, STATISTICS, M)
    y = scale_and_shift(x, NORM_WEIGHT, NORM_BIAS, C).to(dtype)
    product = load_tile(PRODUCT, index(channel, WIDE)[None, :] * M + position[:, None], inside)
    product = normalise_and_keep(product, position, OUT_STATISTICS, M, eps, C)
    normed = scale_and_shift(product, OUT_WEIGHT, OUT_BIAS, C).to(dtype)
    for first in tl.range(0, C, BLOCK_C, loop_unroll_factor=1):
        row = first + tl.arange(0, BLOCK_C)
        weight = WEIGHT + (row + G * C)[None, :] * C + channel[:, None]
        gate = project(y, tl.load(weight), BIAS + G * C, row, PRECISION)  # y W_g
        weight_z = tl.load(weight + C * C)
        out = project(normed, weight_z, BIAS + Z * C, row, PRECISION)  # LayerNorm(X) W_z
        out *= sigmoid(gate)
        at_out = position[:, None] * C + row[None, :]
        out += load_tile(X, at_out, inside)
        tl.store(OUT + at_out, out, mask=inside)


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_C": 64, "num_stages": 1},
    float32={"BLOCK_M": 32},
    tf32={"BLOCK_C": 32},
    hip={"num_warps": 8},
    hip_float32={"BLOCK_C": 32},
)
@triton.jit
def triangle_output_backward_kernel(
    X, NORM_WEIGHT, NORM_BIAS, OUT_WEIGHT, OUT_BIAS, WEIGHT, BIAS, STATISTICS, OUT_STATISTICS,
    WEIGHT_T, NORMED, GRAD_GZ, GRAD_OUT, GRAD_NORM, PRODUCT, GRAD_PRODUCT, M, C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients after the product, which X = PRODUCT [C, M] is.

    With g = sigmoid(y W_g) and z = LayerNorm(X) W_z:  dz = dout * g,  dg = dout * z * g * (1 - g),
    dLayerNorm(X) = dz W_z^T,  dX through the norm. Written are dX (GRAD_PRODUCT [C, M]); for the
    weights' gradients y and LayerNorm(X) (NORMED [2, M, C]) and dg and dz (GRAD_GZ [2, M, C]); sums
    over the program's positions for the norm's parameters (GRAD_NORM [programs, 2, C]). A program
    owns BLOCK_M positions. WEIGHT_T: see transpose.
    """
    position, at, inside = tile_of_rows(tl.program_id(0) * BLOCK_M, M, C, C, BLOCK_M, WIDE)
    channel = tl.arange(0, C)
    m = position[:, None]
    at_product = index(channel, WIDE)[None, :] * M + m
    dtype = WEIGHT.dtype.element_ty
    x, _ = normalise_again(load_tile(X, at, inside), position, STATISTICS, M)
    y = scale_and_shift(x, NORM_WEIGHT, NORM_BIAS, C).to(dtype)
    tl.store(NORMED + at, y, mask=inside)
    product = load_tile(PRODUCT, at_product, inside)
    product, _ = normalise_again(product, position, OUT_STATISTICS, M)
    normed = scale_and_shift(product, OUT_WEIGHT, OUT_BIAS, C).to(dtype)
    second = index(M, WIDE) * C  # where the second [M, C] begins
    tl.store(NORMED + second + at, normed, mask=inside)
    grad_normed = tl.zeros([BLOCK_M, C], tl.float32)
    for first in tl.range(0, C, BLOCK_C, loop_unroll_factor=1):
        row = first + tl.arange(0, BLOCK_C)
        weight = WEIGHT + (row + G * C)[None, :] * C + channel[:, None]
        gate = project(y, tl.load(weight), BIAS + G * C, row, PRECISION)  # y W_g
        gate = sigmoid(gate)
        weight_z = tl.load(weight + C * C)
        z = project(normed, weight_z, BIAS + Z * C, row, PRECISION)  # LayerNorm(X) W_z
        at_row = m * C + row[None, :]
        grad_z = load_tile(GRAD_OUT, at_row, inside) * gate
        grad_g = grad_z * (1 - gate) * z
        tl.store(GRAD_GZ + at_row, grad_g, mask=inside)
        tl.store(GRAD_GZ + second + at_row, grad_z, mask=inside)
        weight_z = transpose(weight_z, WEIGHT_T, row + Z * C, C)
        # dLayerNorm(X) += dz W_z^T
        grad_normed = tl.dot(grad_z.to(dtype), weight_z, grad_normed, input_precision=PRECISION)
    # Loaded and normalised once more: that is cheaper than keeping it in registers over the loop.
    product = load_tile(PRODUCT, at_product, inside)
    product, rstd = normalise_again(product, position, OUT_STATISTICS, M)
    store_norm_gradients(GRAD_NORM, grad_normed, product, C)
    grad = grad_normed * tl.load(OUT_WEIGHT + channel)[None, :]
    grad = norm_backward(grad, product, rstd, C)
    tl.store(GRAD_PRODUCT + at_product, grad, mask=inside)


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_C": 64, "num_stages": 2},
    float32={"BLOCK_M": 128, "BLOCK_C": 32, "num_warps": 8, "num_stages": 1},
    tf32={"BLOCK_M": 128, "num_warps": 8, "num_stages": 1},
    hip={"BLOCK_C": 16, "num_warps": 8, "num_stages": 1},
)
@triton.jit
def triangle_project_backward_kernel(
    X, NORM_WEIGHT, WEIGHT, BIAS, STATISTICS, WEIGHT_T, NORMED, GRAD_G, GRAD_OUT, PRESENT,
    GRAD_AB, GRAD_LINEAR, GRAD_X, GRAD_NORM, M, C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients before the product, from those of a and b (GRAD_AB [2 C, M]).

    With s = sigmoid(y W_ag) and p = y W_ap:  dp = da * s,  ds = da * p * s * (1 - s), for b
    likewise;  dy = dg W_g^T + sum of dp W_p^T and ds W_s^T,  dx through the norm, plus GRAD_OUT.
    Read are y (NORMED [M, C]) and dg (GRAD_G [M, C]); written are dx (GRAD_X [M, C]), dp and ds
    (GRAD_LINEAR [M, 4 C], if that is not None) and sums over the program's positions for the norm's
    parameters (GRAD_NORM [programs, 2, C]). A program owns BLOCK_M positions.
    """
    position, at, inside = tile_of_rows(tl.program_id(0) * BLOCK_M, M, C, C, BLOCK_M, WIDE)
    channel = tl.arange(0, C)
    m = position[:, None]
    dtype = WEIGHT.dtype.element_ty
    y = tl.load(NORMED + at, mask=inside, other=0.0)
    grad_y = tl.zeros([BLOCK_M, C], tl.float32)
    if PRESENT is not None:
        present = tl.load(PRESENT + m, mask=inside, other=0).to(tl.float32)
    for first in tl.range(A_P * C, A_G * C, BLOCK_C, loop_unroll_factor=1):  # a_p, then b_p
        row = first + tl.arange(0, BLOCK_C)
        weight = WEIGHT + row[None, :] * C + channel[:, None]
        weight_p = tl.load(weight)
        weight_s = tl.load(weight + A_G * C * C)
        gate = project(y, weight_s, BIAS + A_G * C, row, PRECISION)  # y W_ag
        value = project(y, weight_p, BIAS, row, PRECISION)  # y W_ap
        gate = sigmoid(gate)
        grad_p = load_tile(GRAD_AB, index(row, WIDE)[None, :] * M + m, inside) * gate
        if PRESENT is not None:
            grad_p *= tl.where(first < B_P * C, present, 1.0)
        grad_s = (grad_p * (1 - gate) * value).to(dtype)
        grad_p = grad_p.to(dtype)
        if GRAD_LINEAR is not None:
            at_p = GRAD_LINEAR + m * (4 * C) + row[None, :]
            tl.store(at_p, grad_p, mask=inside)
            tl.store(at_p + A_G * C, grad_s, mask=inside)
        weight_p = transpose(weight_p, WEIGHT_T, row, C)
        grad_y = tl.dot(grad_p, weight_p, grad_y, input_precision=PRECISION)  # dy += dp W_ap^T
        weight_s = transpose(weight_s, WEIGHT_T, row + A_G * C, C)
        grad_y = tl.dot(grad_s, weight_s, grad_y, input_precision=PRECISION)  # dy += ds W_ag^T
    # After the loop, as the loop needs the shared memory.
    grad_g = tl.load(GRAD_G + at, mask=inside, other=0.0)
    weight_g = tl.load(WEIGHT + (channel + G * C)[None, :] * C + channel[:, None])
    weight_g = transpose(weight_g, WEIGHT_T, channel + G * C, C)
    grad_y = tl.dot(grad_g, weight_g, grad_y, input_precision=PRECISION)  # dy += dg W_g^T
    x, rstd = normalise_again(load_tile(X, at, inside), position, STATISTICS, M)
    store_norm_gradients(GRAD_NORM, grad_y, x, C)
    grad_x = norm_backward(grad_y * tl.load(NORM_WEIGHT + channel)[None, :], x, rstd, C)
    grad_x += load_tile(GRAD_OUT, at, inside)
    tl.store(GRAD_X + at, grad_x, mask=inside)


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_C": 64, "PROGRAMS": 32, "num_stages": 3},
    hip={"BLOCK_M": 32, "BLOCK_C": 32, "num_stages": 1},
)
@triton.jit
def triangle_weight_gradients_kernel(
    NORMED, GRAD_GZ, GRAD_AB, PRESENT, WEIGHT, BIAS, PARTS, M, C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the packed weight and bias, in parts to be added up.

    dp and ds are made again from y and GRAD_AB [2 C, M], so they are never in memory. NORMED and
    GRAD_GZ [2, M, C] are y and LayerNorm(X), dg and dz. PARTS [programs, 6 C (C + 1)] are sums over
    the program's positions. A program owns BLOCK_C channels of a and b, of g or of z, and of all
    tiles of BLOCK_M positions one in num_programs(0).
    """
    first = tl.program_id(1) * BLOCK_C
    row = first + tl.arange(0, BLOCK_C)
    channel = tl.arange(0, C)
    dtype = WEIGHT.dtype.element_ty
    PARTS += tl.program_id(0) * 6 * C * (C + 1)
    grad_weight = tl.zeros([BLOCK_C, C], tl.float32)
    grad_bias = tl.zeros([BLOCK_C], tl.float32)
    if first < A_G * C:  # of a, then b
        weight = WEIGHT + row[:, None] * C + channel[None, :]
        weight_p = tl.load(weight)
        weight_s = tl.load(weight + A_G * C * C)
        bias_p = tl.load(BIAS + row)[:, None]
        bias_s = tl.load(BIAS + A_G * C + row)[:, None]
        grad_weight_p = tl.zeros([BLOCK_C, C], tl.float32)
        grad_bias_p = tl.zeros([BLOCK_C], tl.float32)
        for start in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M):
            position, at, inside = tile_of_rows(start, M, C, C, BLOCK_M, WIDE)
            y = tl.load(NORMED + at, mask=inside, other=0.0)
            y_t = tl.trans(y)
            gate = sigmoid(tl.dot(weight_s, y_t, input_precision=PRECISION) + bias_s)
            value = tl.dot(weight_p, y_t, input_precision=PRECISION) + bias_p
            at_ab = index(row, WIDE)[:, None] * M + position[None, :]
            grad_p = load_tile(GRAD_AB, at_ab, (position < M)[None, :]) * gate
            if PRESENT is not None:
                of_a = position < tl.where(first < B_P * C, M, 0)
                grad_p *= tl.load(PRESENT + position, mask=of_a, other=1).to(tl.float32)[None, :]
            grad_s = grad_p * (1 - gate) * value
            grad_bias_p += tl.sum(grad_p, 1)
            grad_bias += tl.sum(grad_s, 1)
            # dW_ap += dp^T y and dW_ag += ds^T y
            grad_weight_p = tl.dot(grad_p.to(dtype), y, grad_weight_p, input_precision=PRECISION)
            grad_weight = tl.dot(grad_s.to(dtype), y, grad_weight, input_precision=PRECISION)
        tl.store(PARTS + row[:, None] * C + channel[None, :], grad_weight_p)
        tl.store(PARTS + 6 * C * C + row, grad_bias_p)
    else:  # of g, then z
        second = tl.where(first < 3 * C, 0, index(M, WIDE) * C)
        for start in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M):
            position, at, inside = tile_of_rows(start, M, C, C, BLOCK_M, WIDE)
            y = tl.load(NORMED + second + at, mask=inside, other=0.0)
            at_grad = position[None, :] * C + (row % C)[:, None]
            grad = tl.load(GRAD_GZ + second + at_grad, mask=(position < M)[None, :], other=0.0)
            grad_bias += tl.sum(grad.to(tl.float32), 1)
            grad_weight = tl.dot(grad, y, grad_weight, input_precision=PRECISION)
    row += A_G * C  # of the gates of a or b, of g or of z
    tl.store(PARTS + row[:, None] * C + channel[None, :], grad_weight)
    tl.store(PARTS + 6 * C * C + row, grad_bias)


@triton.jit
def project(x, weight, BIAS, column, PRECISION: tl.constexpr):
    """Compute x W^T + b [rows, columns]; `weight` is W^T [C, columns]."""
    return tl.dot(x, weight, input_precision=PRECISION) + tl.load(BIAS + column)[None, :]


@triton.jit
def normalise_and_keep(x, position, STATISTICS, M, eps, C: tl.constexpr):
    """Compute x_hat = (x - mean(x)) * rstd [positions, C], and store mean and rstd for later.

    STATISTICS is [2, M].
    """
    mean = tl.sum(x, 1) / C
    x = x - mean[:, None]
    rstd = 1 / tl.sqrt(tl.sum(x * x, 1) / C + eps)
    tl.store(STATISTICS + position, mean, mask=position < M)
    tl.store(STATISTICS + M + position, rstd, mask=position < M)
    return x * rstd[:, None]


@triton.jit
def normalise_again(x, position, STATISTICS, M):
    """Compute x_hat = (x - mean(x)) * rstd [positions, C], and rstd, from what was stored."""
    inside = position < M
    mean = tl.load(STATISTICS + position, mask=inside, other=0.0)
    rstd = tl.load(STATISTICS + M + position, mask=inside, other=0.0)
    return (x - mean[:, None]) * rstd[:, None], rstd


@triton.jit
def transpose(weight, WEIGHT_T, row, C: tl.constexpr):
    """Transpose W^T [C, rows], a tile of the packed weight, for a product with a gradient.

    In float32 it is loaded from WEIGHT_T [C, 6 C], which is the packed weight transposed, as tensor
    cores of an H100 read TF32 in one direction only.
    """
    if WEIGHT_T is not None:
        return tl.load(WEIGHT_T + tl.arange(0, C)[None, :] * (6 * C) + row[:, None])
    return tl.trans(weight)


@triton.jit
def store_norm_gradients(GRAD_NORM, grad, x, C: tl.constexpr):
    """Store dweight = sum dy * x_hat and dbias = sum dy of a norm over this program's rows."""
    at = GRAD_NORM + tl.program_id(0) * 2 * C + tl.arange(0, C)
    tl.store(at, tl.sum(grad * x, 0))
    tl.store(at + C, tl.sum(grad, 0))


@operator
def triangle_forward(
    x: Tensor, present: Tensor | None, in_weight: Tensor, in_bias: Tensor, out_weight: Tensor,
    out_bias: Tensor, weight: Tensor, bias: Tensor, incoming: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Multiply triangles: x [B, N, N, C] + update, a and b [2 C, M], their product [C, M].

    Then mean and rstd of the norm before the product [2, M], and of that after it. present
    [B, N, N] is False for padding, where a becomes 0.
    """
    positions, dim = x.numel() // x.shape[-1], x.shape[-1]
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    ab = weight.new_empty(2 * dim, positions)
    # two tensors, as torch.compile mistakes the size of what a kernel writes into a part of one
    in_statistics = x.new_empty(2, positions, dtype=torch.float32)
    out_statistics = torch.empty_like(in_statistics)
    programs, options = triangle_options("triangle_project", x, weight)
    launch = wrap_triton(triangle_project_kernel)[(programs,)]
    launch(x, in_weight, in_bias, weight, bias, in_statistics, present, ab, eps=eps, **options)
    a, b = (half.view(dim * len(x), *x.shape[1:3]) for half in ab.chunk(2))
    product = torch.bmm(a.mT, b) if incoming else torch.bmm(a, b.mT)
    product = product.view(dim, positions)
    programs, options = triangle_options("triangle_output", x, weight)
    launch = wrap_triton(triangle_output_kernel)[(programs,)]
    inputs = x, in_weight, in_bias, out_weight, out_bias, weight, bias
    statistics = in_statistics, out_statistics
    launch(*inputs, *statistics, product, out, eps=eps, **options)
    return out, ab, product, *statistics


@operator
def triangle_backward(
    grad_out: Tensor, x: Tensor, present: Tensor | None, in_weight: Tensor, in_bias: Tensor,
    out_weight: Tensor, out_bias: Tensor, weight: Tensor, bias: Tensor, ab: Tensor, product: Tensor,
    in_statistics: Tensor, out_statistics: Tensor, incoming: bool, parameters: bool,
) -> list[Tensor]:  # fmt: skip
    """Compute the gradient of x and, if `parameters` asks for them, those of the parameters.

    These are of the norm before the product and of that after it [2, C], weight and bias, then of
    the packed weight and bias [6 C (C + 1)] in one piece.
    """
    positions, dim = x.numel() // x.shape[-1], x.shape[-1]
    normed = weight.new_empty(2, positions, dim)
    grad_gz = torch.empty_like(normed)
    weight_t = weight.t().contiguous() if weight.dtype == torch.float32 else None

    programs, options = triangle_options("triangle_output_backward", x, weight)
    sums_out = x.new_empty(programs, 2, dim, dtype=torch.float32)
    grad_product = torch.empty_like(product)
    launch = wrap_triton(triangle_output_backward_kernel)[(programs,)]
    inputs = x, in_weight, in_bias, out_weight, out_bias, weight, bias
    inputs = *inputs, in_statistics, out_statistics, weight_t, normed, grad_gz, grad_out
    launch(*inputs, sums_out, product, grad_product, **options)

    grad_ab = torch.empty_like(ab)
    matrices = (dim * len(x), *x.shape[1:3])
    a, b, grad_a, grad_b = (half.view(matrices) for both in (ab, grad_ab) for half in both.chunk(2))
    grad_product = grad_product.view(matrices)
    if incoming:  # X = a^T b
        torch.bmm(b, grad_product.mT, out=grad_a)
        torch.bmm(a, grad_product, out=grad_b)
    else:  # X = a b^T
        torch.bmm(grad_product, b, out=grad_a)
        torch.bmm(grad_product.mT, a, out=grad_b)

    programs, options = triangle_options("triangle_project_backward", x, weight)
    sums_in = x.new_empty(programs, 2, dim, dtype=torch.float32)
    grad_x = torch.empty_like(x)
    # dp and ds: triangle_weight_gradients makes them again, or the library reads them
    again = dim <= 128 and (INTERPRETED or weight.dtype != torch.float32)
    grad_linear = None if again else weight.new_empty(positions, 4 * dim)
    launch = wrap_triton(triangle_project_backward_kernel)[(programs,)]
    inputs = x, in_weight, weight, bias, in_statistics, weight_t, normed[0], grad_gz[0], grad_out
    launch(*inputs, present, grad_ab, grad_linear, grad_x, sums_in, **options)
    if not parameters:
        return [grad_x]
    made_of = normed, grad_gz, grad_ab, grad_linear, present, weight, bias
    return [grad_x, sum_parts(sums_in), sum_parts(sums_out), triangle_weight_gradients(*made_of)]


def triangle_options(kernel: str, x: Tensor, weight: Tensor) -> tuple[int, dict[str, int | str]]:
    """Return how many programs a kernel of the triangle multiplication has, and its settings."""
    options = row_options(kernel, x, weight.dtype, x.shape[-1])
    # Where channels are few more warps leave too little for each: one kernel spills on an MI300.
    most = max(4, options["BLOCK_M"] * options["C"] // 512)
    options["num_warps"] = min(options["num_warps"], most)
    return triton.cdiv(options["M"], options["BLOCK_M"]), options


def triangle_weight_gradients(
    normed: Tensor, grad_gz: Tensor, grad_ab: Tensor, grad_linear: Tensor | None,
    present: Tensor | None, weight: Tensor, bias: Tensor,
) -> Tensor:  # fmt: skip
    """Compute the gradients of the packed weight [6 C, C] and bias [6 C], in one piece.

    `normed` are y and the normed product [2, M, C], grad_gz the gradients of g and z [2, M, C],
    grad_ab those of a and b [2 C, M], grad_linear those of their projections [M, 4 C]. Where that
    is None a kernel makes it again, else the library multiplies.
    """
    dim = normed.shape[-1]
    if grad_linear is None:
        tiles, options = triangle_options("triangle_weight_gradients", normed[0], weight)
        # more parts would take longer to add up
        programs = min(triton.cdiv(tiles, 8), options.pop("PROGRAMS"))
        parts = normed.new_empty(programs, 6 * dim * (dim + 1), dtype=torch.float32)
        grid = programs, 4 * dim // options["BLOCK_C"]
        launch = wrap_triton(triangle_weight_gradients_kernel)[grid]
        launch(normed, grad_gz, grad_ab, present, weight, bias, parts, **options)
        return sum_parts(parts)
    pairs = (grad_linear, normed[0]), (grad_gz[0], normed[0]), (grad_gz[1], normed[1])
    weights = [(grad.t() @ rows).flatten() for grad, rows in pairs]
    biases = [column_sums(grad, torch.float32) for grad, _ in pairs]
    return torch.cat(weights + biases)


class TriangleMultiplicationFunction(torch.autograd.Function):
    """Multiply the triangles of x [B, N, N, C] -> x + update.

    present [B, N, N] is False for padding, where a becomes 0. The parameters: weight and bias of
    the norm before the product and of that after it, then the weights of a_p, b_p, a_g, b_g, g and
    z in one piece, and their biases.

    Kept for later: x, a, b and their product, and mean and rstd of both norms.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, present: Tensor | None, incoming: bool, eps: float, *parameters: Tensor
    ) -> Tensor:
        *norms, weight, bias = parameters
        inputs = x.contiguous(), present, *norms, weight.to(gemm_dtype(x)), bias
        out, *saved = triangle_forward(*inputs, incoming, eps)
        ctx.save_for_backward(*inputs, *saved)
        ctx.incoming = incoming
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        inputs = grad_out.contiguous(), *ctx.saved_tensors, ctx.incoming
        grad_x, *grads = triangle_backward(*inputs, any(ctx.needs_input_grad[4:]))
        if not grads:
            return grad_x, *9 * [None]
        norm_in, norm_out, linears = grads
        dim = norm_in.shape[1]
        weight, bias = linears.tensor_split([6 * dim * dim])
        return grad_x, None, None, None, *norm_in, *norm_out, weight.view(-1, dim), bias


class TriangleMultiplication(nn.Module):
    """Update each edge from the two others of its triangles; `equation` multiplies these."""

    equation: str
    incoming: bool

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        dim = config.pair_dim
        self.fused = fusions.triton_triangle
        self.layer_norm_in = LayerNorm(dim, fusions)
        parts = ("linear_a_p", "linear_b_p", "linear_a_g", "linear_b_g", "linear_g", "linear_z")
        if self.fused:
            self.linears = nn.Linear(dim, 6 * dim)
            keep_separate_names(self, "linears", parts, biased=parts)
        else:
            for part in parts:
                setattr(self, part, nn.Linear(dim, dim))
        self.layer_norm_out = LayerNorm(dim, fusions)

    def forward(self, pair: Tensor, residues: Tensor | None = None) -> Tensor:
        """Update pair [B, N, N, c_z]; residues [B, N] are False for padding."""
        present = None if residues is None else residues[:, :, None] & residues[:, None]
        if self.fused:
            norms = *self.layer_norm_in.parameters(), *self.layer_norm_out.parameters()
            settings = self.incoming, self.layer_norm_in.eps
            parameters = *norms, *self.linears.parameters()
            return TriangleMultiplicationFunction.apply(pair, present, *settings, *parameters)
        x = self.layer_norm_in(pair)
        a = torch.sigmoid(self.linear_a_g(x)) * self.linear_a_p(x)
        b = torch.sigmoid(self.linear_b_g(x)) * self.linear_b_p(x)
        if residues is not None:
            a = a * present[..., None]
        product = self.layer_norm_out(torch.einsum(self.equation, a, b))
        return pair + torch.sigmoid(self.linear_g(x)) * self.linear_z(product)


class TriangleMultiplicationOutgoing(TriangleMultiplication):
    """Update edge ij from the edges ik and jk (AF2 SI, algorithm 11)."""

    equation = "bikc,bjkc->bijc"
    incoming = False


class TriangleMultiplicationIncoming(TriangleMultiplication):
    """Update edge ij from the edges ki and kj (AF2 SI, algorithm 12)."""

    equation = "bkic,bkjc->bijc"
    incoming = True


# --- outer product mean: update_ij = linear_out(sum_s a_si (x) b_sj) / number of sequences
# Outer product mean: out_ij = factor * sum_s a_si (x) b_sj. Of matrices [S, N x H] the products of
# all channels are one GEMM, but its result [N, H, N, H] is not what the projection takes: a
# kernel writes it as [N, N, H, H]. The backward pass makes it again. FACTORS [samples] are
# 1 / (number of sequences + 1e-3).
@block_sizes(
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_S": 32},
    float32={"num_warps": 8, "num_stages": 2},
    hip={"num_warps": 8, "num_stages": 2},
)
@triton.jit
def outer_product_forward_kernel(
    A, B, FACTORS, OUT, S, N, H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute OUT_ijcd = factor * sum_s A_sic * B_sjd for each sample, with its factor.

    A and B are [samples, S, N, H], OUT is [samples, N, N, H x H]. A program owns BLOCK_M of the
    N x H pairs (i, c) and BLOCK_N of (j, d), and goes over the sequences BLOCK_S at a time.
    """
    width = N * H
    left = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # (i, c)
    right = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # (j, d)
    sample = tl.program_id(2).to(tl.int64)
    factor = tl.load(FACTORS + tl.program_id(2))
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        row = ((sample * S + s) * width)[:, None]
        inside_a = (s < S)[:, None] & (left < width)[None, :]
        a = tl.load(A + row + left[None, :], mask=inside_a, other=0.0)
        inside_b = (s < S)[:, None] & (right < width)[None, :]
        b = tl.load(B + row + right[None, :], mask=inside_b, other=0.0)
        product = tl.dot(tl.trans(a), b, product, input_precision=PRECISION)  # A^T B
    pair = (sample * N + left // H)[:, None] * N + (right // H)[None, :]
    at = pair * (H * H) + (left % H * H)[:, None] + (right % H)[None, :]
    inside = (left < width)[:, None] & (right < width)[None, :]
    tl.store(OUT + at, product * factor, mask=inside)


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_S": 64},
    float32={"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_S": 128},
    hip={"BLOCK_N": 64, "num_stages": 3},
    hip_float32={"BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
)
@triton.jit
def outer_product_backward_kernel(
    GRAD, OTHER, FACTORS, GRAD_ONE, S, N, OF_A: tl.constexpr, H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one of a and b from the other: dA_sic = factor * sum_jd G_ijcd B_sjd.

    GRAD is [samples, N, N, H x H], OTHER and GRAD_ONE are [samples, S, N, H], that of a with OF_A.
    A program owns BLOCK_S sequences and BLOCK_M of the N x H pairs (i, c), and goes over (j, d)
    BLOCK_N at a time.
    """
    width = N * H
    one = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    sample = tl.program_id(2).to(tl.int64)
    factor = tl.load(FACTORS + tl.program_id(2))
    GRAD += sample * width * width
    row = ((sample * S + s) * width)[:, None]
    grad_one = tl.zeros([BLOCK_S, BLOCK_M], tl.float32)
    for start in range(0, width, BLOCK_N):
        k = start + tl.arange(0, BLOCK_N)
        if OF_A:
            left, right = one[:, None], k[None, :]
        else:
            left, right = k[None, :], one[:, None]
        pair = (left // H).to(tl.int64) * N + right // H
        at = GRAD + pair * (H * H) + left % H * H + right % H
        grad = tl.load(at, mask=(one < width)[:, None] & (k < width)[None, :], other=0.0)
        inside = (s < S)[:, None] & (k < width)[None, :]
        other = tl.load(OTHER + row + k[None, :], mask=inside, other=0.0)
        # dA += B G^T
        grad_one = tl.dot(other, tl.trans(grad), grad_one, input_precision=PRECISION)
    inside = (s < S)[:, None] & (one < width)[None, :]
    tl.store(GRAD_ONE + row + one[None, :], grad_one * factor, mask=inside)


def outer_product_options(kernel: str, a: Tensor) -> dict[str, int | str]:
    """Return what a kernel of the outer product is told."""
    _, depth, length, dim = a.shape
    chosen = blocks(kernel, a.dtype)
    chosen["BLOCK_S"] = min(chosen["BLOCK_S"], max(16, triton.next_power_of_2(depth)))
    return {**chosen, "S": depth, "N": length, "H": dim, "PRECISION": dot_precision(a.dtype)}


@operator
def outer_product_forward(a: Tensor, b: Tensor, factors: Tensor) -> Tensor:
    """Multiply a and b [B, S, N, H] -> factor * sum over S of outer products [B, N, N, H x H]."""
    samples, _, length, dim = a.shape
    options = outer_product_options("outer_product_forward", a)
    out = a.new_empty(samples, length, length, dim * dim)
    left, right = (triton.cdiv(length * dim, options[size]) for size in ("BLOCK_M", "BLOCK_N"))
    launch = wrap_triton(outer_product_forward_kernel)[(left, right, samples)]
    launch(a, b, factors, out, **options)
    return out


@operator
def outer_product_backward(
    grad: Tensor, a: Tensor, b: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a and b from that of the result, grad [B, N, N, H x H]."""
    samples, depth, length, dim = a.shape
    grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
    options = outer_product_options("outer_product_backward", a)
    tiles = triton.cdiv(length * dim, options["BLOCK_M"])
    grid = (tiles, triton.cdiv(depth, options["BLOCK_S"]), samples)
    launch = wrap_triton(outer_product_backward_kernel)[grid]
    launch(grad, b, factors, grad_a, OF_A=True, **options)
    launch(grad, a, factors, grad_b, OF_A=False, **options)
    return grad_a, grad_b


class OuterProductMeanFunction(torch.autograd.Function):
    """Compute factor * (sum over S of a (x) b, as [B, N, N, H x H], times W^T, plus bias).

    a and b are [B, S, N, H], the result is [B, N, N, C]. sequences [B, S] are False for padding,
    whose a and b become 0; factor is 1 / (number of others + 1e-3).
    """

    @staticmethod
    def forward(
        ctx, a: Tensor, b: Tensor, sequences: Tensor | None, weight: Tensor, bias: Tensor
    ) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        low = weight.to(a.dtype)
        if sequences is None:
            factors = a.new_full(a.shape[:1], 1 / (a.shape[1] + 1e-3), dtype=torch.float32)
        else:
            a, b = a * sequences[..., None, None], b * sequences[..., None, None]
            factors = sequences.sum(1, dtype=torch.float32).add_(1e-3).reciprocal_()
        ctx.save_for_backward(a, b, low, factors)
        ctx.parameter_dtype = weight.dtype
        outer = outer_product_forward(a, b, factors)
        if sequences is None:
            return F.linear(outer, low, (factors[0] * bias).to(a.dtype))
        return F.linear(outer, low).add_(factors[:, None, None, None] * bias)

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        a, b, weight, factors = ctx.saved_tensors
        grad_a = grad_b = grad_weight = grad_bias = None
        if ctx.needs_input_grad[3]:
            outer = outer_product_forward(a, b, factors).flatten(0, 2)
            grad_weight = (grad_out.flatten(0, 2).mT @ outer).to(ctx.parameter_dtype)
        if ctx.needs_input_grad[4]:
            grad_bias = column_sums(grad_out.contiguous(), ctx.parameter_dtype, factors)
        if any(ctx.needs_input_grad[:2]):
            grad_a, grad_b = outer_product_backward(grad_out @ weight, a, b, factors)
        return grad_a, grad_b, None, grad_weight, grad_bias


class OuterProductMean(nn.Module):
    """Update the pair representation from pairs of MSA columns (AF2 SI, algorithm 10)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        hidden = config.outer_product_dim
        self.fused = fusions.triton_outer_product
        self.layer_norm = LayerNorm(config.msa_dim, fusions)
        self.linear_1 = Linear(config.msa_dim, hidden, fusions)
        self.linear_2 = Linear(config.msa_dim, hidden, fusions)
        self.linear_out = Linear(hidden * hidden, config.pair_dim, fusions)

    def forward(self, msa: Tensor, sequences: Tensor | None = None) -> Tensor:
        """Compute the update of pair [B, N, N, c_z] from msa [B, S, N, c_m], sequences [B, S]."""
        depth = msa.shape[1]
        msa = self.layer_norm(msa)
        a, b = self.linear_1(msa), self.linear_2(msa)
        if self.fused:
            out = self.linear_out
            return OuterProductMeanFunction.apply(a, b, sequences, out.weight, out.bias)
        if sequences is not None:
            a = a * sequences[:, :, None, None]
            dtype = torch.promote_types(msa.dtype, torch.float32)
            depth = sequences.sum(1, dtype=dtype)[:, None, None, None]
        outer = torch.einsum("bsic,bsjd->bijcd", a, b).flatten(3)
        # The bias is divided, too, as AlphaFold's code does.
        return self.linear_out(outer) / (depth + 1e-3)


# --- transition: update = linear_2(relu(linear_1(norm(x))))
# Bias and ReLU between the two projections of a transition.
@block_sizes({"TILE": 4096})
@triton.jit
def bias_relu_forward_kernel(
    X, BIAS, OUT, rows, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Compute out = max(x + bias, 0), which keeps what is not a number.

    X and OUT are [rows, C]. A program owns ROWS rows.
    """
    program = tl.program_id(0).to(tl.int64)
    _, at, inside = tile_of_rows(program * ROWS, rows, C, BLOCK_C, ROWS, True)
    channel = tl.arange(0, BLOCK_C)
    bias = tl.load(BIAS + channel, mask=channel < C, other=0.0).to(tl.float32)
    x = load_tile(X, at, inside) + bias[None, :]
    tl.store(OUT + at, tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), mask=inside)


@block_sizes({"TILE": 4096, "PROGRAMS": 528})
@triton.jit
def bias_relu_backward_kernel(
    GRAD, OUT, GRAD_X, GRAD_BIAS, rows,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute dx = dout where out > 0, else 0, and dbias = sum of dx.

    GRAD, OUT and GRAD_X are [rows, C]. A program owns every PROGRAMS-th block of ROWS rows, and of
    GRAD_BIAS [PROGRAMS, C] the sum over them.
    """
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK_C)
    grad_bias = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in range(program * ROWS, rows, PROGRAMS * ROWS):
        _, at, inside = tile_of_rows(start, rows, C, BLOCK_C, ROWS, True)
        grad = tl.load(GRAD + at, mask=inside, other=0.0)
        grad = tl.where(tl.load(OUT + at, mask=inside, other=0.0) > 0, grad, 0.0)
        grad_bias += grad.to(tl.float32)
        tl.store(GRAD_X + at, grad, mask=inside)
    tl.store(GRAD_BIAS + program * C + channel, tl.sum(grad_bias, 0), mask=channel < C)


@operator
def bias_relu_forward(x: Tensor, bias: Tensor) -> Tensor:
    """Compute relu(x + bias) for x [..., C]."""
    rows, programs, options = row_launch("bias_relu_forward", x)
    out = torch.empty_like(x)
    wrap_triton(bias_relu_forward_kernel)[(programs,)](x, bias, out, rows=rows, **options)
    return out


@operator
def bias_relu_backward(
    grad: Tensor, out: Tensor, dtype: torch.dtype, needs_bias: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and of the bias; the latter in `dtype`, empty if not asked for."""
    rows, programs, options = row_launch("bias_relu_backward", out)
    grad_x = torch.empty_like(out)
    sums = out.new_empty(programs, out.shape[-1], dtype=torch.float32)
    launch = wrap_triton(bias_relu_backward_kernel)[(programs,)]
    launch(grad, out, grad_x, sums, rows=rows, **options)
    return grad_x, sum_parts(sums, dtype) if needs_bias else out.new_empty(0)


class BiasReLU(torch.autograd.Function):
    """Compute relu(x + bias) for x [..., C].

    The backward pass masks the gradient and sums it for the bias in one go.
    """

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor) -> Tensor:
        out = bias_relu_forward(x.contiguous(), bias)
        ctx.save_for_backward(out)
        ctx.dtype = bias.dtype
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        needs_bias = ctx.needs_input_grad[1]
        inputs = grad.contiguous(), *ctx.saved_tensors, ctx.dtype
        grad_x, grad_bias = bias_relu_backward(*inputs, needs_bias)
        return grad_x, grad_bias if needs_bias else None


class Transition(nn.Module):
    """Two-layer perceptron on each position."""

    def __init__(self, dim: int, factor: int, fusions: Fusions):
        super().__init__()
        self.fused = fusions.triton_transition
        self.layer_norm = LayerNorm(dim, fusions)
        self.linear_1 = Linear(dim, factor * dim, fusions)
        self.linear_2 = Linear(factor * dim, dim, fusions)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the update of x [..., C]."""
        x = self.layer_norm(x)
        if self.fused:
            hidden = F.linear(x, self.linear_1.weight)
            return self.linear_2(BiasReLU.apply(hidden, self.linear_1.bias))
        return self.linear_2(F.relu(self.linear_1(x)))


class MSATransition(Transition):
    """AF2 SI, algorithm 9."""


class PairTransition(Transition):
    """AF2 SI, algorithm 15."""


# --- input embedding: projections of one-hot tokens and of relative positions
AMINO_ACIDS = "ARNDCQEGHILKMFPSTWYV"
UNKNOWN, GAP, MASK = 20, 21, 22
NUM_TOKENS = 23  # the 20 amino acids, unknown, gap, masked
MAX_OFFSET = 32  # relative positions are clipped at +-32 residues


def one_hot(tokens: Tensor, classes: int) -> Tensor:
    """Turn tokens [...] into float32 [..., classes], 1 at the token and 0 elsewhere."""
    return (tokens[..., None] == torch.arange(classes, device=tokens.device)).float()


class InputEmbedder(nn.Module):
    """Embed an alignment as MSA and pair representation (AF2 SI, algorithms 3 to 5)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.linear_tf_z_i = Linear(NUM_TOKENS, config.pair_dim, fusions)
        self.linear_tf_z_j = Linear(NUM_TOKENS, config.pair_dim, fusions)
        self.linear_tf_m = Linear(NUM_TOKENS, config.msa_dim, fusions)
        self.linear_msa_m = Linear(NUM_TOKENS, config.msa_dim, fusions)
        self.linear_relpos = Linear(2 * MAX_OFFSET + 1, config.pair_dim, fusions)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embed tokens [B, S, N] -> msa [B, S, N, c_m], pair [B, N, N, c_z]."""
        position = torch.arange(tokens.shape[-1], device=tokens.device)
        offset = (position[:, None] - position).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
        alignment = one_hot(tokens, NUM_TOKENS)
        query = alignment[:, 0]
        pair = self.linear_tf_z_i(query)[:, :, None] + self.linear_tf_z_j(query)[:, None]
        pair = pair + self.linear_relpos(one_hot(offset, 2 * MAX_OFFSET + 1))
        return self.linear_msa_m(alignment) + self.linear_tf_m(query)[:, None], pair


# --- heads and their losses
NUM_BINS, FIRST_EDGE, LAST_EDGE = 64, 2.0, 22.0  # distogram, in Angstrom
BIN_WIDTH = (LAST_EDGE - FIRST_EDGE) / NUM_BINS


def head_loss(logits: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
    """Average cross-entropies over what counts of each protein, then over the batch -> scalar.

    logits are [B, S, N, bins], targets and counted [B, S, N].
    """
    logits = logits.flatten(0, 2).float()
    error = F.cross_entropy(logits, targets.flatten(), reduction="none").view(counted.shape)
    error, counted = (error * counted).flatten(1), counted.flatten(1)
    return (error.sum(1) / counted.sum(1).clamp(min=1)).mean()


class DistogramHead(nn.Module):
    """Predict distances between residues as logits over bins (AF2 SI, section 1.9.8)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.linear = Linear(config.pair_dim, NUM_BINS, fusions)

    def forward(self, pair: Tensor) -> Tensor:
        """Predict logits [B, N, N, 64], symmetric in the residues, from pair [B, N, N, c_z]."""
        logits = self.linear(pair)
        return logits + logits.transpose(1, 2)

    @staticmethod
    def targets(coords: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Find the bin of each distance, and whether it is known -> [B, N, N] both.

        coords are [B, N, 3], in Angstrom; observed is [B, N].
        """
        distance = (coords[:, :, None] - coords[:, None]).norm(dim=-1)
        first, last = FIRST_EDGE + BIN_WIDTH, LAST_EDGE - BIN_WIDTH
        edges = torch.linspace(first, last, NUM_BINS - 1, device=coords.device)
        return torch.bucketize(distance, edges), observed[:, :, None] & observed[:, None]


class MaskedMSAHead(nn.Module):
    """Predict the tokens at the masked positions of the alignment (AF2 SI, section 1.9.9)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.linear = Linear(config.msa_dim, NUM_TOKENS, fusions)

    def forward(self, msa: Tensor) -> Tensor:
        """Predict logits [B, S, N, 23] from msa [B, S, N, c_m]."""
        return self.linear(msa)


# --- what all kernels share
@triton.jit
def index(i, WIDE: tl.constexpr):
    """Widen what elements are counted with to 64 bits, where a tensor has 2^31 or more of them.

    Elsewhere 64 bits would take registers for nothing.
    """
    return tl.cast(i, tl.int64) if WIDE else i


@triton.jit
def tile_of_rows(
    first, rows, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Find ROWS rows of a matrix [rows, C], where their elements are, and which of them exist."""
    row = index(first, WIDE) + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None]
    if BLOCK_C > C:
        inside &= (channel < C)[None, :]
    return row, row[:, None] * C + channel[None, :], inside


@triton.jit
def load_tile(X, at, inside):
    """Load a tile in float32, zeros where it is not inside."""
    return tl.load(X + at, mask=inside, other=0.0).to(tl.float32)


LOG2E = tl.constexpr(math.log2(math.e))  # exp2 is what the hardware computes


@triton.jit
def sigmoid(x):
    """Compute 1 / (1 + exp(-x)) in float32.

    1 / a is the square of 1 / sqrt(a), an instruction; a division is six of them.
    """
    root = tl.rsqrt(1 + tl.exp2(-x * LOG2E))
    return root * root


@triton.jit
def normalise(x, inside, eps, C: tl.constexpr):
    """Compute x_hat = (x - mean(x)) * rstd and rstd = 1 / sqrt(var(x) + eps) for rows [rows, C].

    Where not `inside` x_hat is 0.
    """
    x = tl.where(inside, x - tl.sum(x, 1)[:, None] / C, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 1) / C + eps)
    return x * rstd[:, None], rstd


@triton.jit
def norm_backward(grad, x, rstd, C: tl.constexpr):
    """Compute dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) from g = dx_hat and x_hat."""
    mean_grad = tl.sum(grad, 1)[:, None] / C
    return (grad - mean_grad - x * (tl.sum(grad * x, 1)[:, None] / C)) * rstd[:, None]


@triton.jit
def scale_and_shift(x, WEIGHT, BIAS, C: tl.constexpr):
    """Compute x_hat * weight + bias."""
    channel = tl.arange(0, C)
    return x * tl.load(WEIGHT + channel)[None, :] + tl.load(BIAS + channel)[None, :]


@triton.jit
def pair_bias_offset(row, head, N, H: tl.constexpr, ENDING: tl.constexpr, ALIGNED: tl.constexpr):
    """Find the place in a bias [B, H, N, N] of what pair `row` = (b, i, j) gives.

    It is bias[b, head, i, j], and with ENDING bias[b, head, j, i].
    """
    N = length_of(N, ALIGNED)
    b, pair = row // (N * N), row % (N * N)
    if ENDING:
        pair = pair % N * N + pair // N
    return (b * H + head) * N * N + pair


@triton.jit
def length_of(N, ALIGNED: tl.constexpr):
    """Return N; if ALIGNED, a multiple of 8 that is none of 16, the compiler knows it now.

    It then takes 16 bytes at a time. A multiple of 16 it sees itself.
    """
    return N // 8 * 8 if ALIGNED else N


@block_sizes({"TILE": 4096, "ROWS": 512, "num_warps": 8})
@triton.jit
def sum_parts_kernel(PARTS, OUT, parts, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the rows of a matrix: out_j = sum_i parts_ij.

    PARTS is [parts, width] in float32, OUT [width] in any type. A program owns BLOCK columns.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        inside = (row < parts)[:, None] & (column < width)[None, :]
        total += tl.load(PARTS + at, mask=inside, other=0.0)
    tl.store(OUT + column, tl.sum(total, 0), mask=column < width)


def sum_parts(parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Add up the sums of all programs, float32 [parts, ...] -> [...] in `dtype`.

    torch.sum is slower at many short parts.
    """
    chosen = blocks("sum_parts")
    out = torch.empty_like(parts[0], dtype=dtype)
    rows = min(chosen.pop("ROWS"), triton.next_power_of_2(len(parts)))
    block = max(8, chosen.pop("TILE") // rows)
    if block >= rows:  # more warps would share a column, and exchange its sums
        chosen["num_warps"] //= 2
    launch = wrap_triton(sum_parts_kernel)[(triton.cdiv(out.numel(), block),)]
    launch(parts, out, parts=len(parts), width=out.numel(), ROWS=rows, BLOCK=block, **chosen)
    return out


def row_options(
    kernel: str, x: Tensor, dtype: torch.dtype, width: int
) -> dict[str, int | bool | str]:
    """Return how a kernel is launched that holds whole rows of x [..., C]: sizes and block sizes.

    It multiplies matrices of this type, and goes over `width` columns in blocks.
    """
    options = blocks(kernel, dtype)
    for size in {"BLOCK_C", "BLOCK_K", "BLOCK_N"} & options.keys():
        options[size] = min(options[size], width)
    dim = x.shape[-1]
    options |= {"M": x.numel() // dim, "C": dim, "PRECISION": dot_precision(dtype)}
    options["WIDE"] = 5 * x.numel() >= 2**31  # results are up to five times as wide as x
    return options


def wrap_triton(kernel: Callable) -> Callable:
    """Return what launches a kernel by `[grid](TENSOR, ..., NAME=value, ...)`."""
    # By PyTorch's function a compiler sees what is launched.
    return Interpreted(kernel) if INTERPRETED else torch.library.wrap_triton(kernel)


def gemm_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product takes x here."""
    kind = x.device.type
    cast = not x.is_meta and torch.is_autocast_enabled(kind)  # on "meta" FLOPs are counted
    return torch.get_autocast_dtype(kind) if cast else x.dtype


# --- model
class EvoformerBlock(nn.Module):
    """One block of the Evoformer stack, without dropout (AF2 SI, algorithm 6)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.dims = config.msa_dim, config.pair_dim
        self.msa_att_row = MSARowAttentionWithPairBias(config, fusions)
        self.msa_att_col = MSAColumnAttention(config, fusions)
        self.msa_transition = MSATransition(config.msa_dim, config.transition_factor, fusions)
        self.outer_product_mean = OuterProductMean(config, fusions)
        self.tri_mul_out = TriangleMultiplicationOutgoing(config, fusions)
        self.tri_mul_in = TriangleMultiplicationIncoming(config, fusions)
        self.tri_att_start = TriangleAttentionStartingNode(config, fusions)
        self.tri_att_end = TriangleAttentionEndingNode(config, fusions)
        self.pair_transition = PairTransition(config.pair_dim, config.transition_factor, fusions)
        self.cast_fusion = fusions.cast_fusion

    def with_cast_weights(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Do as `forward`, after one cast of the weights and biases that GEMMs take as they are.

        Autocast does the same at every use of each, and so for its gradient. torch.compile fuses
        its casts.
        """
        dtype = gemm_dtype(self.msa_transition.linear_1.weight)
        if not self.cast_fusion or torch.compiler.is_compiling() or dtype == torch.float32:
            return self(*inputs)
        weights = {}
        for name, module in self.named_modules():
            if isinstance(module, (Linear, QKVGLinear)):
                weights[f"{name}.weight"] = module.weight
            # The bias of QKVGLinear is the gate's, which the attention adds.
            if isinstance(module, Linear):
                weights[f"{name}.bias"] = module.bias
        casts = CastFunction.apply(dtype, *weights.values())
        return functional_call(self, dict(zip(weights, casts, strict=True)), inputs)

    def forward(
        self,
        msa: Tensor,
        pair: Tensor,
        sequences: Tensor | None = None,
        residues: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Update msa [B, S, N, c_m] and pair [B, N, N, c_z].

        sequences [B, S] and residues [B, N] are False for padding, which changes nothing elsewhere.
        The triangle multiplications add their update: a kernel that has the pair at hand does so.
        What does not fit is refused here, as a kernel goes by the sizes of one input.
        """
        (samples, depth, length, _), (msa_dim, pair_dim) = msa.shape, self.dims
        check_shape("msa", msa, samples, depth, length, msa_dim)
        check_shape("pair", pair, samples, length, length, pair_dim)
        check_shape("sequences", sequences, samples, depth)
        check_shape("residues", residues, samples, length)
        masks = (m if m is None else m.bool().contiguous() for m in (sequences, residues))
        sequences, residues = masks
        msa = msa + self.msa_att_row(msa, pair, residues)
        msa = msa + self.msa_att_col(msa, sequences)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer_product_mean(msa, sequences)
        pair = self.tri_mul_out(pair, residues)
        pair = self.tri_mul_in(pair, residues)
        pair = pair + self.tri_att_start(pair, residues)
        pair = pair + self.tri_att_end(pair, residues)
        pair = pair + self.pair_transition(pair)
        return msa, pair


def check_shape(name: str, tensor: Tensor | None, *shape: int) -> None:
    """Raise ValueError for another shape, or an empty one."""
    if tensor is not None and (tensor.shape != shape or not tensor.numel()):
        raise ValueError(f"{name} must be {[*shape]} and not empty, not {[*tensor.shape]}")


class CastFunction(torch.autograd.Function):
    """Cast tensors to `dtype`, all of them with one launch, and so their gradients."""

    @staticmethod
    def forward(ctx, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        results = cast_all(tensors, dtype)
        frozen = [not needed for needed in ctx.needs_input_grad[1:]]
        ctx.mark_non_differentiable(*itertools.compress(results, frozen))
        return results

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, *cast_all(grads, ctx.dtype)


def cast_all(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Cast the tensors with one launch."""
    results = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(results, tensors)
    return tuple(results)


class TinyOpenFold(nn.Module):
    """Chain input embedding, Evoformer stack, distogram and masked-MSA heads."""

    TARGETS = ("true_tokens", "masked", "coords", "observed")

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.config, self.fusions = config, fusions
        self.input_embedder = InputEmbedder(config, fusions)
        blocks = (EvoformerBlock(config, fusions) for _ in range(config.num_blocks))
        self.blocks = nn.ModuleList(blocks)
        self.distogram = DistogramHead(config, fusions)
        self.masked_msa = MaskedMSAHead(config, fusions)

    def forward(
        self,
        tokens: Tensor,
        true_tokens: Tensor | None = None,
        masked: Tensor | None = None,
        coords: Tensor | None = None,
        observed: Tensor | None = None,
        sequences: Tensor | None = None,
        residues: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Predict {"masked_msa": [B, S, N, 23], "distogram": [B, N, N, 64]} from tokens [B, S, N].

        Where tokens are padded, sequences [B, S] and residues [B, N] are False.
        With the targets return the loss, 0.3 x distogram + 2.0 x masked MSA (AF2 SI, section 1.9).
        """
        samples, _, length = tokens.shape
        # A row of pairs then begins at a multiple of 16 bytes, which kernels and GEMMs load at a
        # time: 173 residues took longer than 176.
        kernels = self.fusions.triton_attention or self.fusions.triton_triangle
        padding = (0, -length % 8) if kernels else (0, 0)
        if any(padding):
            if residues is None:
                residues = tokens.new_ones(samples, length, dtype=torch.bool)
            tokens, residues = F.pad(tokens, padding, value=GAP), F.pad(residues, padding)
        msa, pair = self.input_embedder(tokens)
        for block in self.blocks:
            inputs = (msa, pair, sequences, residues)
            if self.config.checkpoint_blocks:  # without random numbers: a block draws none
                options = {"use_reentrant": False, "preserve_rng_state": False}
                msa, pair = checkpoint(block.with_cast_weights, *inputs, **options)
            else:
                msa, pair = block.with_cast_weights(*inputs)
        if true_tokens is None:
            masked_msa, distogram = self.masked_msa(msa), self.distogram(pair)
            distogram = distogram[:, :length, :length]
            return {"masked_msa": masked_msa[:, :, :length], "distogram": distogram}
        masked, observed = masked.bool(), observed.bool()  # 0 and 255, for example
        if any(padding):  # where nothing counts
            true_tokens, masked = F.pad(true_tokens, padding), F.pad(masked, padding)
            coords, observed = F.pad(coords, (0, 0, *padding)), F.pad(observed, padding)
        bins, known = self.distogram.targets(coords, observed)
        distogram = head_loss(self.distogram(pair), bins, known)
        return 0.3 * distogram + 2.0 * head_loss(self.masked_msa(msa), true_tokens, masked)


def keep_separate_names(
    parent: nn.Module, fused: str, parts: tuple[str, ...], biased: tuple[str, ...], heads: int = 1
) -> None:
    """Have state_dict list the rows of `parent.<fused>` under the names of its parts.

    They are loaded from these, too. The parts are equally wide. Their rows run head by head and,
    within a head, part by part; `biased` are the parts that have a bias.
    """

    owners = {"weight": parts, "bias": biased}

    def split(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: dict) -> None:
        for kind, names in owners.items():
            rows = state.pop(f"{prefix}{fused}.{kind}").unflatten(0, (heads, len(names), -1))
            for i, name in enumerate(names):
                state[f"{prefix}{name}.{kind}"] = rows[:, i].flatten(0, 1)

    def merge(module: nn.Module, state: dict[str, Tensor], prefix: str, *unused) -> None:
        for kind, names in owners.items():
            separate = [f"{prefix}{name}.{kind}" for name in names]
            # Otherwise load_state_dict reports what is missing.
            if all(name in state for name in separate):
                rows = [state.pop(name).unflatten(0, (heads, -1)) for name in separate]
                state[f"{prefix}{fused}.{kind}"] = torch.stack(rows, dim=1).flatten(0, 2)

    parent.register_state_dict_post_hook(split)
    parent.register_load_state_dict_pre_hook(merge)


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build the model: a seed gives the same weights in every version and fusion setting."""
    fusions = Fusions(**{name: getattr(args, name) for name in Fusions.__dataclass_fields__})
    with device:
        model = TinyOpenFold(config_of(args), fusions)
    if device.type != "meta":  # where tensors have shapes alone, to count FLOPs
        generator = torch.Generator().manual_seed(args.seed)
        # Canonical names, so the order of the draws does not depend on what is fused.
        state = model.state_dict()
        for name in sorted(state):
            if name.endswith("bias"):
                state[name] = torch.zeros(state[name].shape)
            elif "layer_norm" not in name:
                head = name.startswith(("distogram", "masked_msa"))  # near-uniform predictions
                std = state[name].shape[1] ** -0.5 * (0.1 if head else 1)
                state[name] = torch.empty(state[name].shape).normal_(std=std, generator=generator)
        model.load_state_dict(state)
    return model


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW over all parameters: a few launches of PyTorch's own kernel."""
    rate = args.learning_rate
    if args.device == "cuda":  # a tensor, so that a captured step follows a scheduler
        rate = torch.tensor(rate, device=next(model.parameters()).device)
    return torch.optim.AdamW(model.parameters(), rate, fused=True, capturable=args.cuda_graph)


# --- arguments of the model
VERSION = 3
FUSIONS = tuple(  # flag, attribute, help
    (name.replace("_", "-"), name, hint.__metadata__[0])
    for name, hint in get_type_hints(Fusions, include_extras=True).items()
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only this model has."""
    sizes, add = ModelConfig(), parser.add_argument_group("model").add_argument
    for flag, low, default, letter, text in (
        ("msa-dim", 1, sizes.msa_dim, "C", "channels of the MSA representation"),
        ("pair-dim", 1, sizes.pair_dim, "C", "channels of the pair representation"),
        ("num-blocks", 1, sizes.num_blocks, "L", "Evoformer blocks"),
        ("num-heads-msa", 1, sizes.num_heads_msa, "H", "heads of MSA attention"),
        ("num-heads-pair", 1, sizes.num_heads_pair, "H", "heads of pair attention"),
        ("num-seqs", 1, sizes.num_seqs, "S", "sequences per alignment"),
        ("seq-len", 2, sizes.seq_len, "N", "residues per sample"),
        ("batch-size", 1, 4, "B", "samples per step"),
    ):
        text += " (default: %(default)s)"
        add(f"--{flag}", type=at_least(low), default=default, metavar=letter, help=text)
    add("--checkpoint-blocks", action="store_true", help="keep a block's input, compute it again")
    add = parser.add_argument_group("data").add_argument
    text = "real alignments, query first (with --structure), or prepared .npz; or folders of them"
    add("--msa", type=Path, action="append", metavar="FILE.a3m", help=text)
    add("--structure", type=Path, action="append", metavar="FILE", help="the PDB or mmCIF of each")
    add = parser.add_argument_group("kernels").add_argument
    text = "other block sizes or warps, powers of two; a wrong name lists all; can be repeated"
    form = "KERNEL:NAME=NUMBER,..."
    add("--blocks", type=read_blocks, action="append", metavar=form, help=text)


def without_effect(args: argparse.Namespace) -> dict[str, str]:
    """Return the fusions without effect under these arguments, on or off, and why."""
    if not args.use_amp:
        return {"cast_fusion": "without --use-amp nothing is cast"}
    if args.torch_compile:
        return {"cast_fusion": "torch.compile fuses its casts"}
    return {}


def missing_kernels(args: argparse.Namespace) -> dict[str, str]:
    """Return the fusions that have no kernel for these widths on this GPU, and why.

    Wider rows need more shared memory. `needed` bounds what python -m fusion_lab.amd compile finds
    for an H100 (sm_90) and an MI300 (gfx942).
    """
    missing = {}
    dim = args.pair_dim
    hip = BACKEND == "hip"
    most = shared_memory()
    wide = f"{{}} needs {{}} KiB of shared memory, this GPU has {most // 1024}"
    dtype = getattr(torch, args.amp_dtype or "bfloat16") if args.use_amp else torch.float32
    channels = max(args.msa_dim // args.num_heads_msa, dim // args.num_heads_pair)
    needed = 0 if hip else triton.next_power_of_2(channels) * (1024 + 516 * dtype.itemsize)
    if channels > 64:
        missing["triton_attention"] = f"its kernels take up to 64 channels per head, not {channels}"
    elif needed > most:
        missing["triton_attention"] = wide.format(f"a head of {channels} channels", needed // 1024)
    needed = (max(dim, 128) if hip else 384) * dim * dtype.itemsize
    if dim < 16 or dim.bit_count() != 1:
        missing["triton_triangle"] = f"--pair-dim {dim} is no power of two from 16"
    elif needed > most:
        missing["triton_triangle"] = wide.format(f"--pair-dim {dim}", needed // 1024)
    return missing


def shared_memory() -> int:
    """Return the bytes of shared memory, AMD's LDS, that a program can have on this GPU."""
    if INTERPRETED or not torch.cuda.device_count():
        return 2**31
    utils = triton.runtime.driver.active.utils  # which Triton asks at a launch
    return utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"]


@cache
def note_interpreter() -> None:
    """Say it once, however many runs a study has."""
    text = "the kernels run on the CPU in Triton's interpreter, right but slow: use small sizes"
    say("note", text)


def check_model_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse sizes and inputs that do not fit together; lower what a real protein has less of."""
    for name in ("msa", "pair"):
        dim, heads = getattr(args, f"{name}_dim"), getattr(args, f"num_heads_{name}")
        if dim % heads:
            parser.error(f"--{name}-dim {dim} must be divisible by --num-heads-{name} {heads}")
    if args.structure and not args.msa:
        parser.error("--structure FILE needs its alignment: --msa FILE.a3m")
    if args.msa:
        proteins = read_proteins(args)
        for note in filter(None, (protein.note for protein in proteins)):
            say("note", note)
        sizes = zip(*(protein.tokens.shape for protein in proteins), strict=True)
        for name, most in zip(("num_seqs", "seq_len"), map(max, sizes), strict=True):
            if (size := getattr(args, name)) > most:
                flag = f"--{name.replace('_', '-')}"
                say("note", f"{flag} {size} lowered to {most}: no protein of --msa has more")
                setattr(args, name, most)
    leave_to_pytorch(args, missing_kernels(args))
    args.blocks = " ".join(args.blocks or ()) or ModelConfig.blocks
    if any(getattr(args, name) for _, name, _ in FUSIONS if name.startswith("triton")):
        if INTERPRETED:
            note_interpreter()
        elif args.device == "cpu" or not torch.cuda.is_available():
            way_out = "set TRITON_INTERPRET=1, or --disable-all-fusion"
            fail(f"on a CPU the kernels need Triton's interpreter: {way_out}", status=4)


# --- data
# Copied from dev/parts/data_openfold.py by dev/sync_parts.py: edit it there.


@dataclass(frozen=True)
class Protein:
    """An alignment with the query in its first row, and the query's structure."""

    tokens: np.ndarray  # [depth, length], uint8
    coords: np.ndarray  # [length, 3], Angstrom: C-beta, or C-alpha of glycine
    observed: np.ndarray  # [length], bool: does the structure have this residue?
    note: str = ""  # what of the files did not match


class ProteinBatches:
    """Crop proteins at random, from host memory, and mask 15 % of the alignment.

    A batch has tokens, true_tokens and masked [B, S, N], coords [B, N, 3] and observed [B, N]. If
    any protein is smaller than a crop, it is padded, and batches have sequences [B, S] and residues
    [B, N], which are False for padding.
    """

    def __init__(
        self, proteins: list[Protein], args: argparse.Namespace, device: torch.device, seed: int
    ):  # fmt: skip
        self.proteins, self.batch_size, self.device = proteins, args.batch_size, device
        self.num_seqs, self.seq_len = crop = args.num_seqs, args.seq_len
        self.padded = any((np.array(p.tokens.shape) < crop).any() for p in proteins)
        self.rng = np.random.default_rng(seed)
        observed = np.concatenate([protein.observed for protein in proteins])
        residues = {"residues": len(observed), "observed": int(observed.sum())}
        self.source = residues if args.msa else {}

    def next_batch(self) -> dict[str, Tensor]:
        chosen = self.rng.integers(len(self.proteins), size=self.batch_size)
        crops = [self._crop(self.proteins[i]) for i in chosen]
        stacked = (torch.from_numpy(np.stack(part)) for part in zip(*crops, strict=True))
        true_tokens, coords, observed, sequences, residues = stacked
        masked = torch.from_numpy(self.rng.random(true_tokens.shape, dtype=np.float32) < 0.15)
        masked &= sequences[:, :, None] & residues[:, None]
        masked[:, 0, 0] = True  # so that there is always something to predict
        batch = {"tokens": torch.where(masked, MASK, true_tokens), "true_tokens": true_tokens}
        batch |= {"masked": masked, "coords": coords, "observed": observed}
        if self.padded:
            batch |= {"sequences": sequences, "residues": residues}
        return {name: value.to(self.device) for name, value in batch.items()}

    def _crop(self, protein: Protein) -> tuple[np.ndarray, ...]:
        depth, length = protein.tokens.shape
        others = 1 + self.rng.permutation(depth - 1)[: self.num_seqs - 1]
        start = self.rng.integers(max(0, length - self.seq_len) + 1)
        window = slice(start, start + self.seq_len)
        tokens = protein.tokens[np.concatenate(([0], others)), window].astype(np.int64)
        depth, length = tokens.shape
        right = (0, self.seq_len - length)
        return (
            np.pad(tokens, ((0, self.num_seqs - depth), right), constant_values=GAP),
            np.pad(protein.coords[window], (right, (0, 0))),
            np.pad(protein.observed[window], right),
            np.arange(self.num_seqs) < depth,
            np.arange(self.seq_len) < length,
        )


# Synthetic proteins: what kind of local structure a residue is in, helix, strand or loop, decides
# its geometry and its possible amino acids. Of each: virtual bond angle and torsion between
# successive residues in degrees, each with its spread.
GEOMETRY = ((91, 4, 52, 6), (123, 8, -170, 15), (110, 20, 0, 180))
KINDS = ("ALEMQK", "VIYFWT", "GPNDSR")
RESIDUES = [[AMINO_ACIDS.index(letter) for letter in kind] for kind in KINDS]
STEP_LENGTH = 3.8  # Angstrom between the C-alpha atoms of successive residues


def synthetic_chains(kinds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Place residues of these kinds [P, N], each after the last three -> coordinates [P, N, 3]."""
    geometry = np.deg2rad(np.array(GEOMETRY)[kinds]).transpose(2, 0, 1)
    mean, spread = geometry[::2], geometry[1::2]
    angle, torsion = mean + spread * rng.uniform(-1, 1, mean.shape)
    coords = np.zeros((*kinds.shape, 3))
    # The last two steps, of unit length.
    before, last = np.array([[0.0, 1, 0], [1, 0, 0]])[:, None].repeat(len(kinds), 1)
    for i in range(1, kinds.shape[1]):
        normal = np.cross(before, last)
        normal /= np.linalg.norm(normal, axis=-1, keepdims=True)
        bend, turn = angle[:, i, None], torsion[:, i, None]
        sideways = np.cos(turn) * np.cross(normal, last) + np.sin(turn) * normal
        before, last = last, -np.cos(bend) * last + np.sin(bend) * sideways
        coords[:, i] = coords[:, i - 1] + STEP_LENGTH * last
    return coords


def contact_partners(coords: np.ndarray) -> np.ndarray:
    """Find for each residue [N] its nearest one, if that is mutual and < 8 Angstrom, or itself."""
    index = np.arange(len(coords))
    distance = np.linalg.norm(coords[:, None] - coords, axis=-1)
    distance[np.abs(index[:, None] - index) < 3] = np.inf  # neighbours in the chain
    nearest = distance.argmin(1)
    return np.where((nearest[nearest] == index) & (distance.min(1) < 8), nearest, index)


def synthetic_proteins(count: int, depth: int, length: int, seed: int) -> list[Protein]:
    """Make proteins with helices, strands and loops; residues that touch mutate together."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(3, size=(count, length))
    stays = rng.random((count, length)) < 0.9  # a stretch has 15 residues on average
    for i in range(1, length):
        kinds[:, i] = np.where(stays[:, i], kinds[:, i - 1], kinds[:, i])
    proteins = []
    for kind, coords in zip(kinds, synthetic_chains(kinds, rng), strict=True):
        shape, choices = (depth, length), len(RESIDUES[0])
        mutation = rng.integers(1, choices, shape) * (rng.random(shape) < 0.3)
        mutation[0] = 0  # a residue that stays what it is
        partner = np.minimum(np.arange(length), contact_partners(coords))
        mutation = mutation[:, partner]  # partners share theirs
        tokens = np.array(RESIDUES)[kind, (rng.integers(choices, size=length) + mutation) % choices]
        tokens[1:][rng.random((depth - 1, length)) < 0.03] = GAP
        observed = np.ones(length, dtype=bool)
        proteins.append(Protein(tokens.astype(np.uint8), coords.astype(np.float32), observed))
    return proteins


def prepared_protein(path: Path) -> Protein:
    """Read a protein that examples/proteins.py has prepared."""
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, coords, observed = (file[name] for name in ("tokens", "coords", "observed"))
            depth, length = tokens.shape
    except Exception as error:  # damage has many names
        hint = "an alignment needs --structure with it"
        fail(f"--msa {path}: not a .npz that examples/proteins.py prepared ({error}); {hint}")
    whole = tokens.dtype.kind in "iu" and depth and length > 1
    if not whole or tokens.min() < 0 or tokens.max() > GAP or GAP in tokens[0]:
        must = f"whole numbers [depth, length], 0 to {GAP}, and below in the query"
        fail(f"--msa {path}: tokens must be {must}")
    if observed.dtype != bool or observed.shape != (length,) or not observed.any():
        fail(f"--msa {path}: observed must be bool [{length}], not all False")
    if coords.shape != (length, 3) or not np.isfinite(coords[observed]).all():
        fail(f"--msa {path}: coords must be floats [{length}, 3], finite where observed")
    missing = length - int(observed.sum())
    note = f"{path}: {missing} of {length} residues have no coordinates" if missing else ""
    coords = np.where(observed[:, None], coords, 0).astype(np.float32)
    return Protein(tokens.astype(np.uint8), coords, observed, note)


def read_proteins(args: argparse.Namespace) -> list[Protein]:
    """Read the proteins of --msa and --structure, or prepared ones of --msa alone."""
    if not args.structure:
        return [prepared_protein(p) for msa in args.msa for p in sorted(msa.glob("*.npz")) or [msa]]
    try:
        from examples import proteins as reader

        found = reader.read_proteins(args.msa, args.structure)
    except ImportError as error:
        gemmi = "the package gemmi: pip install gemmi"
        needed = gemmi if error.name == "gemmi" else "examples/proteins.py beside this script"
        fail(f"--structure needs {needed}", 4)
    except reader.InputError as error:
        fail(str(error))
    return [Protein(**arrays, note=note) for arrays, note in found]


def make_batches(args: argparse.Namespace, device: torch.device, seed: int) -> ProteinBatches:
    """Make the source of training batches: proteins of --msa, or 64 synthetic ones."""
    if args.msa:
        proteins = read_proteins(args)
    else:
        proteins = synthetic_proteins(64, args.num_seqs, args.seq_len, seed)
    return ProteinBatches(proteins, args, device, seed)


# --- end of data


# --- launch
# Copied from dev/parts/launch.py by dev/sync_parts.py: edit it there.
def read_blocks(text: str) -> str:
    """Check "kernel:NAME=number,..." of --blocks, and return it (an argparse type)."""
    wrong = argparse.ArgumentTypeError
    kernel, _, settings = text.partition(":")
    if kernel not in BLOCKS:
        raise wrong(f"no kernel {kernel!r}; there are {', '.join(BLOCKS)}")
    names = {"num_warps": 4, "num_stages": 3, **BLOCKS[kernel]["any"]}
    for name, _, value in (pair.partition("=") for pair in settings.split(",")):
        if name not in names:
            raise wrong(f"{kernel} has no {name!r}; it has {', '.join(names)}")
        low = 16 if name.startswith("BLOCK") else 1
        if not value.isdecimal() or int(value).bit_count() != 1 or int(value) < low:
            raise wrong(f"{kernel}: {name}={value} is not a power of two from {low}")
    return text


def use_settings(args: argparse.Namespace) -> None:
    """Apply this run's process-wide settings: the block sizes of --blocks, of each the last one."""
    OVERRIDES.clear()
    for part in args.blocks.split():
        kernel, _, settings = part.partition(":")
        for name, value in re.findall(r"(\w+)=(\d+)", settings):
            OVERRIDES.setdefault(kernel, {})[name] = int(value)


def blocks(kernel: str, dtype: torch.dtype | None = None) -> Sizes:
    """Return block sizes and warps of a kernel that multiplies matrices of this type."""
    holds = {BACKEND, dot_precision(dtype), str(dtype).removeprefix("torch."), "any"}
    cases = BLOCKS[kernel]  # in the order of block_sizes: the first applies whose words all hold
    special = next(sizes for case, sizes in cases.items() if holds.issuperset(case.split("_")))
    chosen = {"num_warps": 4, **cases["any"], **special}
    if INTERPRETED and "TILE" in chosen:
        chosen["TILE"] = 1 << 16  # its time goes by programs, not by elements
    return chosen | OVERRIDES.get(kernel, {})


def dot_precision(dtype: torch.dtype) -> str:
    """Return how Triton multiplies float32 matrices; TF32 exists on NVIDIA's GPUs only."""
    if BACKEND != "cuda" or dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@cache
class Interpreted:
    """Launches a kernel in Triton's interpreter, as an operator that counters and profilers see."""

    def __init__(self, kernel: Callable):
        self.kernel = kernel
        name = f"{NAMESPACE}::{kernel.__name__}"
        schema = "(int[] grid, Dict(str, Any) named) -> ()"
        self.launch = torch.library.custom_op(name, self.interpret, mutates_args=(), schema=schema)
        self.launch.register_fake(lambda grid, named: None)  # torch.compile asks for shapes

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        """Return what launches the kernel on this grid by `(TENSOR, ..., NAME=value, ...)`."""
        names = self.kernel.arg_names
        return lambda *args, **more: self.launch(grid, dict(zip(names, args, strict=False), **more))

    def interpret(self, grid: list[int], named: dict) -> None:
        # float32 copies, as the interpreter silently multiplies bfloat16 as integers
        narrow = [v for v in named.values() if getattr(v, "dtype", None) == torch.bfloat16]
        wide = {id(t): torch.empty_strided(t.shape, t.stride()).copy_(t) for t in narrow}
        self.kernel[tuple(grid)](**{name: wide.get(id(v), v) for name, v in named.items()})
        for tensor in narrow:
            tensor.data.copy_(wide[id(tensor)])  # unseen by autograd, which inputs belong to


def row_launch(kernel: str, x: Tensor, whole: bool = True) -> tuple[int, int, Sizes]:
    """Return how many rows x [..., C] has, how many programs share them, and their block sizes."""
    dim = x.shape[-1]
    rows = x.numel() // dim
    chosen = blocks(kernel)
    tile = chosen.pop("TILE")
    width = triton.next_power_of_2(dim)
    if width > tile and whole:  # the row is one block with more warps
        chosen["num_warps"] = min(16, chosen["num_warps"] * (width // tile))
    elif width > tile:  # the row is several blocks
        width = tile
    tile_rows = max(1, tile // width)
    programs = triton.cdiv(rows, tile_rows)
    if "PROGRAMS" in chosen:
        most = max(chosen["PROGRAMS"], triton.cdiv(programs, 16))
        programs = chosen["PROGRAMS"] = min(programs, most)
    return rows, programs, {"C": dim, "BLOCK_C": width, "ROWS": tile_rows, **chosen}


def leave_to_pytorch(args: argparse.Namespace, reasons: dict[str, str]) -> None:
    """Turn off the fusions that these reasons are about, each with one line."""
    for flag, name, _ in FUSIONS:
        if name in reasons and getattr(args, name):
            setattr(args, name, False)
            say("note", f"{flag} is off, PyTorch's own operations run: {reasons[name]}")


# --- end of launch


# --- core
# Copied from dev/parts/core.py by dev/sync_parts.py: edit it there.
# Read `measure` first, the loop; then Trainer.compute, the step; `main` is at the end.
SCRIPT = Path(__file__).stem
RANK = int(os.getenv("RANK", "0"))  # of this process among those that torchrun started
WORLD_SIZE = int(os.getenv("WORLD_SIZE", "1"))
PROFILES = ("enable_pytorch_profiler", "enable_memory_profiling", "enable_rocm_profiling")
UNFINISHED = (1, "it did not finish")  # exit status and error of a run until its end


def measure(*sides: Trainer) -> list[dict]:
    """Train these (two in alternating turns); leave a record of each, however it ends."""
    args = sides[-1].args
    turns = 1 if len(sides) == 1 else min(10, args.num_steps)
    region = contextlib.nullcontext()
    end = UNFINISHED
    try:
        if any(getattr(args, name) for name in PROFILES):
            from fusion_lab.profile.steps import profiled_region  # before time is spent on training

            region = profiled_region(sys.modules[__name__], sides)
        for side in sides:
            side.write(end)  # for a run that is killed
        for side in sides:
            side.start()
        with region:
            for turn, steps in enumerate(np.array_split(range(args.num_steps), turns)):
                for side in sides if turn % 2 == 0 else reversed(sides):
                    side.take(len(steps))
        if not args.under_profiler:
            for side in sides:
                side.count(sides[0].groups["kernels"].get("per_step"))  # of two, the first: all off
        end = (0, None)
    except (Exception, KeyboardInterrupt) as error:
        end = explain(error, args)
    finally:
        for side in sides:
            side.write(end)
    return [side.summary() for side in sides]


class StaleGraph(RuntimeError):
    """A parameter is no longer where a captured graph changes it."""


class Trainer:
    """Model, optimizer, data and their training step; and what was measured of it."""

    def __init__(self, args: argparse.Namespace, title: str = ""):
        self.args = args
        self.title = title  # before lines of progress
        self.gpu = args.device == "cuda"
        self.losses: list[float] = []
        self.turns_ms: list[float] = []  # mean time of a step in each turn
        self.phases: dict[str, list[float]] = {}  # milliseconds of each phase in each step
        self.peak = 0  # bytes
        self.end = UNFINISHED
        # parts of the result, as far as they are known
        self.groups = {name: {} for name in ("data", "timing", "kernels", "flops")}
        self.groups["config"] = asdict(config_of(args))

    def build(self) -> Trainer:
        """Build model, optimizer and data; return self."""
        args = self.args
        self.device = prepare(args)
        dtype = getattr(torch, args.amp_dtype)
        self.autocast = lambda: torch.autocast(args.device, dtype, enabled=args.use_amp)
        scaled = args.use_amp and dtype == torch.float16
        self.scaler = torch.amp.GradScaler(args.device, 4096, enabled=scaled)  # 65536 may overflow
        self.batches = make_batches(args, torch.device("cpu"), args.seed)
        self.inputs: dict[str, Tensor] = {}  # where each batch is copied to
        self.model = build_model(args, self.device)
        self.forward = self.model
        self.addresses = lambda: [parameter.data_ptr() for parameter in self.model.parameters()]
        self.optimizer = build_optimizer(args, self.model)
        self.average = getattr(self.optimizer, "average_gradients", None)  # in place of DDP
        self.stream = torch.cuda.Stream(priority=-1) if args.cuda_graph else None
        self.graph = None
        self.marks: list[tuple] = []  # phases of a turn, and the moments of their ends
        if args.torch_compile:
            self.forward = torch.compile(self.model, mode=args.torch_compile_mode)
        if WORLD_SIZE > 1 and not self.average:
            options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
            with torch.cuda.stream(self.stream):  # autograd will add gradients up on it
                self.forward = nn.parallel.DistributedDataParallel(self.forward, **options)
        return self

    def compute(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute what a graph captures: forward pass, backward pass, optimizer."""
        if self.args.torch_compile:
            torch.compiler.cudagraph_mark_step_begin()
        with self.autocast():
            loss = self.forward(**batch)
        self.mark("forward")
        self.scaler.scale(loss).backward()
        self.mark("backward")
        if self.average:  # before the scaler looks for inf
            self.average()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss.detach()
        if WORLD_SIZE > 1:
            loss = loss / WORLD_SIZE
            dist.all_reduce(loss)
        self.mark("optimizer")
        return loss

    def step(self) -> Tensor:
        """Take a step; return the loss of the global batch."""
        batch = self.next_batch()
        self.mark("data")
        if not self.graph:
            return self.compute(batch)
        if self.addresses() != self.captured_addresses:
            raise StaleGraph("a parameter moved in memory: the captured graph writes the old place")
        self.graph.replay()
        self.mark("graph")
        return self.loss

    def next_batch(self) -> dict[str, Tensor]:
        """Return this process's share of the next batch, in the device tensors of the last."""
        share = self.args.batch_size // WORLD_SIZE
        for name, value in self.batches.next_batch().items():
            own = value[RANK * share :][:share]
            if name not in self.inputs:
                self.inputs[name] = torch.empty_like(own, device=self.device)
            # from pinned memory, so that the host does not wait
            self.inputs[name].copy_(own.pin_memory() if self.gpu else own, non_blocking=True)
        return self.inputs

    def capture(self) -> None:
        """Capture the step as a graph that `step` replays; a step must have run before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.loss = self.compute(self.inputs)
        self.captured_addresses = self.addresses()
        self.graph = graph

    def mark(self, phase: str) -> None:
        """Note the moment at which a phase ends, without a wait; on a CPU in seconds."""
        now = torch.cuda.Event(enable_timing=True) if self.gpu else time.perf_counter()
        if self.gpu:
            now.record()
        self.marks.append((phase, now))

    def start(self) -> None:
        """Build, say what runs, warm up, and see how much memory a step needs."""
        args = self.args
        before = torch.cuda.memory_allocated() if self.gpu else 0
        if self.gpu:
            torch._C._cuda_clearCublasWorkspaces()  # of another run
        self.build()
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.groups |= {"parameters": parameters, "data": self.batches.source}
        print(headline(args, self.groups["config"], parameters), flush=True)
        progress(f"{self.title}{'compiling in' if args.torch_compile else 'taking'} the first step")
        warmup_ms = []
        for step in range(1, args.warmup_steps + 1):
            if self.gpu and step == 2:
                torch.cuda.reset_peak_memory_stats()  # the first step needs more than the others
            if args.cuda_graph and step == args.warmup_steps:
                torch.cuda.reset_peak_memory_stats()  # a capture allocates, and no replay does
                self.capture()
            warmup_ms.append(self.take(1, measured=False))
        if warmup_ms:
            timing = {"warmup_first_step_ms": warmup_ms[0], "warmup_ms": sum(warmup_ms)}
            self.groups["timing"] = timing
        if self.gpu:
            peak = torch.tensor(torch.cuda.max_memory_allocated() - before, device=self.device)
            if WORLD_SIZE > 1:
                dist.all_reduce(peak, dist.ReduceOp.MAX)
            self.peak = int(peak)
        gc.collect()  # compiling leaves cycles that keep tensors

    def take(self, steps: int, measured: bool = True) -> float:
        """Take some steps, a turn; return milliseconds of a step. Ctrl-C keeps what is done."""
        prepare(self.args)  # another side may have had a turn
        synchronize = torch.cuda.synchronize if self.gpu else lambda: None
        losses = torch.empty(steps, pin_memory=self.gpu)  # on the host, which does not wait
        done = 0
        synchronize()
        began = time.perf_counter()
        self.marks = []
        self.mark("start")
        try:
            for step in range(steps):
                first_mark = len(self.marks)
                losses[step].copy_(self.step(), non_blocking=True)
                done = step + 1
                if measured and step:  # show the step before, while a GPU takes this one
                    self.show(losses, step, began, self.marks[first_mark][1])
        finally:
            synchronize()
            ms = 1e3 * (time.perf_counter() - began) / max(1, done)
            values = losses[:done].tolist()
            self.losses += filter(math.isfinite, values)
            if measured and done:
                self.show(losses, done, began, self.marks[-1][1])
                self.turns_ms.append(ms)
                for (_, start), (phase, end) in zip(self.marks, self.marks[1:], strict=False):
                    phase_ms = start.elapsed_time(end) if self.gpu else 1e3 * (end - start)
                    self.phases.setdefault(phase, []).append(phase_ms)
        if not all(map(math.isfinite, values)):
            raise FloatingPointError("the loss is no number any more; lower --learning-rate")
        return ms

    def show(self, losses: Tensor, done: int, began: float, end: object) -> None:
        """Show the loss after so many steps of a turn, if a line is due; wait for their end."""
        args = self.args
        step = len(self.phases.get("data", ())) + done  # with those of earlier turns
        if step % args.log_interval:
            return
        if self.gpu:
            end.synchronize()
        seconds = (time.perf_counter() - began) / done
        left = (args.num_steps - step) * seconds
        pace = f"{args.batch_size / seconds:.1f} samples/s  {left:.0f} s left"
        progress(f"{self.title}step {step}/{args.num_steps}  loss {losses[done - 1]:.4f}  {pace}")

    def count(self, all_off_kernels: int | None) -> None:
        """Count in extra steps; the number of kernels with all fusions off may be known."""
        args = self.args
        prepare(args)
        progress(f"{self.title}counting kernels, memory and floating-point operations")
        kernels = self.groups["kernels"]
        if self.gpu or not args.torch_compile:  # loops compiled for a CPU cannot be counted
            kernels |= count_kernels(self)
        if not self.gpu:
            self.peak = max(used for _, used in memory_of_a_step(self))
        self.groups["flops"]["per_step"] = count_flops(args, self.batches.next_batch())
        self.graph = None  # frees its memory
        fused = args.torch_compile or any(getattr(args, name) for _, name, _ in FUSIONS)
        if not (kernels and fused):
            return
        if not all_off_kernels:
            progress(f"{self.title}counting kernels with all off")
            torch.compiler.reset()  # lets go of its graphs
            gc.collect()
            with contextlib.suppress(torch.OutOfMemoryError):
                all_off_kernels = count_kernels(Trainer(all_off(args)).build())["per_step"]
        kernels["all_off"] = all_off_kernels
        if all_off_kernels:
            kernels["reduction_percent"] = 100 * (1 - kernels["per_step"] / all_off_kernels)

    def summary(self) -> dict:
        """Return what is known of the run, as its JSON file has it."""
        args = self.args
        timing = self.groups["timing"]
        flops = self.groups["flops"]
        loss = {"warmup_steps": args.warmup_steps, "curve": self.losses}
        if self.losses:
            loss |= {"initial": self.losses[0], "final": self.losses[-1]}
        if self.turns_ms:
            ms = np.median(self.turns_ms)  # most runs have a single turn
            steps = zip(*self.phases.values(), strict=False)  # Ctrl-C may cut the last one short
            steps_ms = [sum(step) for step in steps]
            timing |= {"steps": len(steps_ms), "batch_ms": ms, "turns_ms": self.turns_ms}
            timing |= {f"{phase}_ms": np.mean(times) for phase, times in self.phases.items()}
            timing["samples_per_sec"] = 1e3 * args.batch_size / ms
            timing["batch_median_ms"] = np.median(steps_ms)
            timing["batch_p95_ms"] = np.quantile(steps_ms, 0.95, method="higher")
            if args.torch_compile and args.warmup_steps:
                timing["compilation_overhead_ms"] = timing["warmup_ms"] - args.warmup_steps * ms
            if flops:
                flops["gflop"] = flops["per_step"] / 1e9
                flops["achieved_tflops"] = flops["gflop"] / ms
        status, error = self.end
        training = {n: v for n, v in vars(args).items() if isinstance(v, float | int | str | None)}
        return {
            "schema_version": 1,
            "script": SCRIPT,
            "status": {0: "ok", 3: "oom"}.get(status, "failed"),
            "exit_status": status,
            "error": error,
            "fusions": {name: getattr(args, name) for _, name, _ in FUSIONS},
            "without_effect": args.without_effect,
            "training": training | {"processes": WORLD_SIZE},
            "environment": environment(torch.device(args.device)),
            "memory": {"peak_mb": self.peak / 1e6} if self.peak else {},
            "loss": loss,
            **self.groups,
        }

    def write(self, end: tuple[int, str | None]) -> None:
        """Write <profile-dir>/<script>_summary.json, whole or not at all."""
        self.end = end
        if RANK:
            return
        path = self.args.profile_dir / f"{SCRIPT}_summary.json"
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(json.dumps(self.summary(), indent=1, default=str) + "\n")
            if path.exists() and '"samples_per_sec"' in path.read_text():  # another run's
                number = 1
                while (kept := path.with_suffix(f".{number}.json")).exists():
                    number += 1
                path.rename(kept)
                say("note", f"{path} was there; it is {kept.name} now")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)  # where the disk is full


NO_WORK = ("_unsafe_view", "empty", "new_empty", "_record_function")  # like views, move no data


class OperatorCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the operators inside that move data."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.calls += not (function.is_view or name.startswith(NO_WORK))
        return function(*args, **(kwargs or {}))


def trace_of_a_step(trainer: Trainer, **options: bool) -> list[dict]:
    """Return the events of one more step, as PyTorch's profiler writes them."""
    trainer.step()  # the first one of a new Trainer does more
    gc.collect()  # what is freed in the step was allocated in it
    with torch.profiler.profile(acc_events=True, **options) as profile:
        trainer.step()
        if trainer.gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        return json.loads(Path(folder, "trace.json").read_bytes())["traceEvents"]


def count_kernels(trainer: Trainer) -> dict:
    """Count the kernels of a step, on a CPU its operators; {} where none are seen."""
    if not trainer.gpu:  # of two samples: of a single one some copies are views
        batch = {n: torch.cat((t, t))[:2] for n, t in trainer.next_batch().items()}
        trainer.compute(batch)  # the first one of a new Trainer does more
        with OperatorCounter() as counter:
            trainer.compute(batch)
        return {"unit": "operator calls", "per_step": counter.calls}
    events = trace_of_a_step(trainer)
    kernels = sum(event.get("cat") == "kernel" for event in events)
    calls = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = sum("Launch" in name for name in calls)
    if not kernels:  # a profiler without permission sees none
        return {}
    return {"unit": "kernels", "per_step": kernels, "host_launches": launches}


def memory_of_a_step(trainer: Trainer) -> list[tuple[float, float]]:
    """Return the course of the device's tensor memory in a step: microseconds and bytes."""
    tensors = [*trainer.model.parameters(), *trainer.model.buffers(), *trainer.inputs.values()]
    tensors += [t for state in trainer.optimizer.state.values() for t in state.values()]
    used = sum(tensor.nbytes for tensor in tensors)  # between two steps
    events = [e for e in trace_of_a_step(trainer, profile_memory=True) if e["name"] == "[memory]"]
    events = [e for e in events if e["args"]["Device Type"] == int(trainer.gpu)]
    events.sort(key=lambda event: event["ts"])
    course = []
    for event in events:
        used += event["args"]["Bytes"]
        course.append((event["ts"] - events[0]["ts"], used))
    return course


def count_flops(args: argparse.Namespace, batch: dict[str, Tensor]) -> int:
    """Count the floating-point operations of a step of the unfused model."""
    model = build_model(all_off(args, checkpoint_blocks=False), torch.device("meta"))
    with FlopCounterMode(display=False) as counter:
        model(**{name: value.to("meta") for name, value in batch.items()}).backward()
    return counter.get_total_flops()


LINES = """\
Average training speed: {timing[samples_per_sec]:.1f} samples/sec
Average batch time: {timing[batch_ms]:.1f} ms (median {timing[batch_median_ms]:.1f}, \
p95 {timing[batch_p95_ms]:.1f})
Average forward time: {timing[forward_ms]:.1f} ms
Average backward time: {timing[backward_ms]:.1f} ms
Average optimizer time: {timing[optimizer_ms]:.1f} ms
Average graph time: {timing[graph_ms]:.1f} ms (its phases cannot be told apart)
Warmup step time: {timing[warmup_first_step_ms]:.1f} ms (first step, includes any compilation)
Compilation overhead: {timing[compilation_overhead_ms]:.1f} ms
Final loss: {loss[final]:.4f} (first step {loss[initial]:.4f})
Peak memory usage: {memory[peak_mb]:.1f} MB
Kernels per step: {kernels[per_step]}{off}{operators}
Kernel reduction: {kernels[reduction_percent]:.1f} %
Host launches per step: {kernels[host_launches]}
FLOPs per step: {flops[gflop]:.4g} GFLOP, achieved {flops[achieved_tflops]:.3g} TFLOP/s
"""  # of the report, from values of the result


def report(result: dict) -> str:
    """Return the lines whose values were measured."""
    kernels = result["kernels"]
    remarks = {"off": "", "operators": ""}
    if "all_off" in kernels:
        remarks["off"] = f" (all fusions off: {kernels['all_off'] or 'out of memory'})"
    if kernels.get("unit") == "operator calls":
        remarks["operators"] = "; operator calls, counted on a CPU"
    lines = []
    for line in LINES.splitlines():
        with contextlib.suppress(KeyError):
            lines.append(line.format(**result, **remarks))
    return "\n".join(lines)


def comparison(before: dict, after: dict) -> str:
    """Return a table of both sides, and what the ratios of their turns show."""
    lines = [f"\n{'':24}{'all off':>12}{'as chosen':>12}{'ratio':>9}"]
    for label, group, key, digits in (
        ("batch time, ms", "timing", "batch_ms", 2),
        ("peak memory, MB", "memory", "peak_mb", 1),
        (f"{after['kernels'].get('unit')} per step", "kernels", "per_step", 0),
        ("final loss", "loss", "final", 4),
    ):
        if key in before[group] and key in after[group]:
            off = before[group][key]
            on = after[group][key]
            ratio = f"{off / on:8.2f}x" if key != "final" else ""
            lines.append(f"{label:24}{off:12.{digits}f}{on:12.{digits}f}{ratio}")
    turns = zip(before["timing"]["turns_ms"], after["timing"]["turns_ms"], strict=True)
    ratios = [off / on for off, on in turns]
    low, high, median = np.round([min(ratios), max(ratios), np.median(ratios)], 2)
    verdict = "all turns agree" if high <= 1.25 * low else "all turns agree on which is faster"
    if low <= 1 <= high:
        verdict = "no difference seen"
    far = low > 0 and max(low, 1 / high) > (high / low) ** 3
    if len(ratios) < (3 if far else 5):
        verdict = "too few turns to tell"
    spread = f"from {low:.2f}x to {high:.2f}x ({verdict})"
    lines.append(f"Batch time ratio in {len(ratios)} turns: {median:.2f}x, {spread}")
    return "\n".join(lines)


def environment(device: torch.device) -> dict:
    """Return what the numbers are measured on."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = text.partition("model name\t: ")[2].partition("\n")[0] or os.uname().machine
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else name,
        "cpu_threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "triton": getattr(sys.modules.get("triton"), "__version__", None),
    }


def headline(args: argparse.Namespace, config: dict, parameters: int) -> str:
    """Name script, device, sizes, precision and fusions in one line."""
    device = environment(torch.device(args.device))["device_name"]
    device += f" x {WORLD_SIZE}" if WORLD_SIZE > 1 else ""
    sizes = {"batch_size": args.batch_size, **config}.items()
    sizes = ", ".join(f"{name} {size}" for name, size in sizes if type(size) is int)
    float32 = f"float32 (matmul precision {args.matmul_precision})"
    precision = args.amp_dtype if args.use_amp else float32
    names = [*(name for _, name, _ in FUSIONS), "torch_compile", "cuda_graph"]
    on = [name for name in names if getattr(args, name) and name not in args.without_effect]
    fused = ", ".join(on or ["nothing fused"]).replace("_", "-")
    return f"{SCRIPT} on {device}: {parameters:,} parameters, {sizes}; {precision}; {fused}"


LATEST = {"text": "", "moment": 0.0}  # what `progress` said, and when


def progress(text: str = "", since: str = "") -> None:
    """Say what happens, and since when if it takes long; a terminal has it in one line."""
    if not since:
        LATEST.update(text=text, moment=time.monotonic())
    terminal = sys.stderr.isatty()
    if not RANK and (text or terminal):
        print(text + since, end="\033[K\r" if terminal else "\n", file=sys.stderr, flush=True)


def repeat_progress(end: threading.Event) -> None:
    """Say every five seconds what takes so long, in a thread of its own until the end."""
    while not end.wait(5):
        seconds = time.monotonic() - LATEST["moment"]
        if LATEST["text"] and seconds > 4:
            progress(LATEST["text"], f" (for {seconds:.0f} s)")


def say(kind: str, message: str) -> None:
    """Print an "error", or a "note" once for all processes, on stderr."""
    if kind == "error" or not (RANK or "TINY_LAUNCHED" in os.environ):
        print(f"{SCRIPT}.py: {kind}: {message}", file=sys.stderr)


def fail(message: str, status: int = 2) -> None:
    """End the program with one line about what the user can put right."""
    say("error", message)
    raise SystemExit(status)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether it is, or covers, one: the end of a capture raises an error of its own."""
    signs = ("MemoryError", "out of memory", "allocate memory", "ALLOC_FAILED")
    covers = error is not None and is_out_of_memory(error.__context__)
    return covers or any(sign in repr(error) for sign in signs)


def explain(error: BaseException, args: argparse.Namespace) -> tuple[int, str]:
    """Return exit status and line for what a user can mend; raise any other error."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if is_out_of_memory(error):
        return 3, f"out of memory: lower --batch-size or --seq-len ({line})"
    if isinstance(error, OSError):
        return 2, f"cannot write {error.filename or 'output or --profile-dir'}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and error.name.partition(".")[0] == "fusion_lab":
        name = next(name for name in ("verify_accuracy", *PROFILES) if getattr(args, name))
        flag = f"--{name.replace('_', '-')}"
        return 4, f"{flag} needs the folder fusion_lab of this repository beside this script"
    if isinstance(error, ImportError):
        return 4, line
    library = type(error).__module__.startswith(("torch.", "triton"))
    if library or isinstance(error, (FloatingPointError, StaleGraph)):
        return 1, line
    raise error


def at_least(low: int) -> Callable[[str], int]:
    """Make an argparse type: a whole number from `low`."""

    def number(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) < 2**31):
            raise argparse.ArgumentTypeError(f"must be {low} to {2**31 - 1}, not {text}")
        return int(text)

    return number


OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile
COMPILE_MODES = ("default", *OWN_GRAPHS, "max-autotune-no-cudagraphs")
ARGUMENTS = {  # of every version: flag; type, choices, or bool for a switch; default; help
    "training": (
        ("num-steps", at_least(1), 50, "measured steps"),
        ("warmup-steps", at_least(0), None, "before those (default: 5, on several GPUs 12)"),
        ("learning-rate", float, 3e-4, "of AdamW"),
        ("use-amp", bool, None, "automatic mixed precision"),
        ("amp-dtype", ("bfloat16", "float16"), None, "(default: bfloat16)"),
        ("matmul-precision", ("highest", "high", "medium"), "highest", "of float32"),
        ("torch-compile-mode", COMPILE_MODES, None, "compile longer to run faster"),
        ("device", ("auto", "cpu", "cuda"), "auto", "cuda for AMD's GPUs, too"),
        ("num-gpus", at_least(1), None, "share the batch (default: 1, or *_VISIBLE_DEVICES)"),
        ("seed", at_least(0), 42, "of weights and data"),
        ("deterministic", bool, None, "the same bits in every run"),
        ("log-interval", at_least(1), 10, "steps between lines"),
    ),
    "profiling": (
        ("enable-pytorch-profiler", bool, None, "operator tables, trace of 3 steps"),
        ("enable-memory-profiling", bool, None, "memory timeline of one step"),
        ("enable-rocm-profiling", bool, None, "names of phases for a profiler"),
        ("under-profiler", bool, None, "launch nothing but the training steps"),
        ("profile-dir", Path, Path(f"pytorch_profiles_v{VERSION}"), "for results"),
    ),
    "modes": (
        ("compare-fusion", bool, None, "all fusions off and as chosen, in turns"),
        ("verify-accuracy", bool, None, "compare outputs and gradients with all off"),
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """Build the command line: the arguments of the model, and those of every version."""
    description, _, examples = (__doc__ or "").partition("\nExamples:\n")
    parser = argparse.ArgumentParser(f"{SCRIPT}.py", argparse.SUPPRESS, description)
    parser.epilog = "examples:\n" + examples
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    add_model_arguments(parser)
    group = parser.add_argument_group("fusions", "Single flags win over all-fusion.")
    for flag, attribute, text in (
        ("all-fusion", "all_fusion", "all (the default) but torch-compile and cuda-graph"),
        *FUSIONS,
        ("torch-compile", "torch_compile", "torch.compile of the model"),
        ("cuda-graph", "cuda_graph", "the step as one graph (the default of V4)"),
    ):
        add = group.add_mutually_exclusive_group().add_argument
        add(f"--enable-{flag}", dest=attribute, action="store_const", const=True, help=text)
        add(f"--disable-{flag}", dest=attribute, action="store_const", const=False)
    for title, rows in ARGUMENTS.items():
        add = parser.add_argument_group(title).add_argument
        for flag, kind, default, text in rows:
            text += "" if default is None else " (default: %(default)s)"
            takes = "choices" if isinstance(kind, tuple) else "type"
            options = {takes: kind, "default": default}
            if kind is bool:
                options = {"action": "store_true"}
            add(f"--{flag}", help=text, **options)
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check; what cannot work is one line on stderr and SystemExit (2 or 4)."""
    parser = build_parser()
    args = parser.parse_args(argv)
    flags = {name: getattr(args, name) for _, name, _ in FUSIONS}
    for name, on in flags.items():  # a flag of its own wins over all-fusion
        setattr(args, name, args.all_fusion is not False if on is None else on)
    check_model_arguments(args, parser)
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    needed = args.device == "cuda" or args.cuda_graph or (args.num_gpus and args.device != "cpu")
    launched = "RANK" in os.environ
    if args.num_gpus is None:
        listed = any(os.getenv(f"{kind}_VISIBLE_DEVICES") for kind in ("ROCR", "HIP", "CUDA"))
        args.num_gpus = WORLD_SIZE if launched else max(1, gpus if listed else 1)
    if needed and gpus < (1 if launched else args.num_gpus):
        fail(f"{args.num_gpus} GPUs wanted, PyTorch finds {gpus}", 4)
    args.device = "cuda" if gpus else "cpu"
    mode = args.torch_compile_mode
    if args.warmup_steps is None:
        args.warmup_steps = 12 if args.num_gpus > 1 else 5
    if args.cuda_graph is None:
        args.cuda_graph = VERSION > 3 and gpus > 0 and args.warmup_steps > 1
    graph = args.cuda_graph
    least = 12 if args.num_gpus > 1 else 2  # DDP needs 11 before a capture
    for wrong, message in (
        (RANK >= WORLD_SIZE, f"RANK {RANK} is not below WORLD_SIZE {WORLD_SIZE}"),
        (launched and args.num_gpus != WORLD_SIZE, f"--num-gpus is not WORLD_SIZE {WORLD_SIZE}"),
        (args.batch_size % args.num_gpus, f"--batch-size must divide by {args.num_gpus} GPUs"),
        (not FUSIONS and (args.all_fusion or args.compare_fusion), "V1 has nothing to compare"),
        (args.compare_fusion and args.verify_accuracy, "--verify-accuracy is a run of its own"),
        (mode and not args.torch_compile, "--torch-compile-mode needs --enable-torch-compile"),
        (args.amp_dtype and not args.use_amp, "--amp-dtype needs --use-amp"),
        (not 0 < args.learning_rate < math.inf, "--learning-rate must be above 0"),
        (graph and mode in OWN_GRAPHS, f"--enable-cuda-graph: mode {mode} makes its own graphs"),
        (graph and args.warmup_steps < least, f"a graph needs --warmup-steps {least} or more"),
    ):
        if wrong:
            fail(message)
    args.amp_dtype = args.amp_dtype or "bfloat16"
    args.torch_compile = bool(args.torch_compile)
    if {"NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE"} & {*os.environ}:
        say("note", "nsys or ncu started this run: --under-profiler is on")
        args.under_profiler = True
    chosen = [f"--enable-{flag}" for flag, name, _ in FUSIONS if flags[name]]
    if chosen and args.all_fusion is not False:
        say("note", f"{chosen[0]} changes nothing: all are on without --disable-all-fusion")
    args.without_effect = without_effect(args)
    for flag, name, _ in FUSIONS:
        if flags[name] is not None and name in args.without_effect:
            switch = "enable" if flags[name] else "disable"
            say("note", f"--{switch}-{flag} has no effect: {args.without_effect[name]}")
    return args


def config_of(args: argparse.Namespace) -> ModelConfig:
    """Return the sizes that these arguments ask for."""
    sizes = {name: getattr(args, name) for name in ModelConfig.__dataclass_fields__ if name in args}
    return ModelConfig(**sizes)


def all_off(args: argparse.Namespace, **changes) -> argparse.Namespace:
    """Return these arguments with all fusions and the compiler off, and changes."""
    off = dict.fromkeys((name for _, name, _ in FUSIONS), False)
    off |= {"torch_compile": False, "torch_compile_mode": None, "without_effect": {}}
    return argparse.Namespace(**{**vars(args), **off, **changes})


def prepare(args: argparse.Namespace) -> torch.device:
    """Apply this run's process-wide settings; return the device."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler writes on stderr
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.deterministic)
    torch.set_float32_matmul_precision(args.matmul_precision)
    use_settings(args)
    return torch.empty(0, device=args.device).device


def join_processes(args: argparse.Namespace) -> None:
    """Meet the other processes that torchrun started; only the first prints from now on."""
    if args.device == "cuda":
        torch.cuda.set_device(int(os.getenv("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if args.cuda_graph:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # as PyTorch asks
    warnings.filterwarnings("ignore", ".*(broadcast_buffers|AccumulateGrad node's stream)")
    try:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        fail(f"{WORLD_SIZE} processes cannot meet: {str(error).splitlines()[0]}")
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def train(args: argparse.Namespace) -> dict:
    """Train, measure and count; the result is in its JSON file, too."""
    return measure(Trainer(args))[0]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parse_args(argv)
    if args.num_gpus > 1 and "RANK" not in os.environ:
        os.environ["TINY_LAUNCHED"] = "1"  # notes have been printed
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(args.num_gpus), __file__]
        os.execv(sys.executable, torchrun + (sys.argv[1:] if argv is None else argv))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # from a scheduler: as Ctrl-C
    end = threading.Event()
    threading.Thread(target=repeat_progress, args=[end], daemon=True).start()
    sides = [Trainer(args, "as chosen: " if args.compare_fusion else "")]
    if args.compare_fusion:
        off = all_off(args, profile_dir=args.profile_dir / "baseline")
        sides.insert(0, Trainer(off, "all off: "))
    try:
        if WORLD_SIZE > 1:
            join_processes(args)
        if args.verify_accuracy:
            from fusion_lab.modes import verify_accuracy

            return verify_accuracy(sys.modules[__name__], args)
        measure(*sides)
        status, message = sides[-1].end
    except (Exception, KeyboardInterrupt) as error:
        status, message = explain(error, args)
    finally:  # also of a run whose result found no room on the disk
        end.set()
        progress()
        results = [side.summary() for side in sides]
        whole = all(result["timing"].get("steps") == args.num_steps for result in results)
        text = comparison(*results) if sides[1:] and whole else report(results[-1])
        if text:
            print(text)
    if message:
        say("error", message)
    if WORLD_SIZE > 1:
        sys.stdout.flush()
        os._exit(status)  # a tidy end could wait for a process that is gone
    return status


# --- end of core


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""TinyOpenFold V4: V3's kernels also do the small work that was left between them.

Read V1 to V3 first: model, weights and loss stay the same. In V3, most norms, residuals (x +
update) and sums of gradients are passes of their own over memory. Here a neighbouring kernel does
them on its way. In 16 bits this kernel is often a GEMM (matrix product).

triton-attention      V3's kernels; GEMMs around them do norm and residual (in 16 bits, small sizes)
triton-triangle       V3's kernels, and one for products of small matrices
triton-outer-product  norm and residual as above; a new kernel for the gradients of its factors
transition-fusion     for narrow rows, one forward kernel never stores the hidden layer; for wide
                      rows, the first GEMM adds bias and ReLU
embedding-fusion      one GEMM embeds tokens for the MSA, and one for the pairs
loss-fusion           each loss (distances, masked residues) is one kernel and two small sums
fused-optimizer       AdamW is one kernel
overlap               a stream (kernel queue) runs parameter gradients beside the backward pass

Begin with project_residual_kernel: it multiplies x by a weight, and adds bias and residual on the
way. Then read norm_project_kernel, and the drawing in SideStreams.

By default, a step on a GPU is one CUDA graph: recorded once, then started as a whole. `overlap`
needs the graph and fused-optimizer. torch.compile does not see what V4 launches; to compile, use
V3. Where a flag is off, or a size fits no kernel, PyTorch computes what V1 does.

Examples:
  python tiny_openfold_v4.py --use-amp --compare-fusion              all off, all on
  python tiny_openfold_v4.py --use-amp --disable-overlap             one kernel after the other
  python tiny_openfold_v4.py --use-amp --disable-transition-fusion   transitions by PyTorch
"""

from __future__ import annotations

import argparse
import collections
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, NamedTuple, get_type_hints

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

    triton_attention: Annotated[bool, "attention with pair bias and gate as one kernel"] = True
    triton_triangle: Annotated[bool, "a kernel before and one after a triangle product"] = True
    triton_outer_product: Annotated[bool, "outer products as the projection reads them"] = True
    fused_optimizer: Annotated[bool, "AdamW as one kernel"] = True
    transition_fusion: Annotated[bool, "a transition of narrow rows as one kernel"] = True
    embedding_fusion: Annotated[bool, "one product embeds tokens for each representation"] = True
    loss_fusion: Annotated[bool, "the loss of a head as one kernel, and its gradient"] = True
    overlap: Annotated[bool, "in a graph, gradients of parameters on a stream of their own"] = True


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


# --- projection: out = residual + x W^T + b
# One kernel projects and adds: the update x W^T + b is never in memory. In the backward pass the
# gradient of the bias is a sum over all rows.
@block_sizes(
    {"BLOCK_M": 64, "BLOCK_K": 64},
    hip={"BLOCK_K": 32, "num_stages": 1},
)
@triton.jit
def project_residual_kernel(
    X, WEIGHT, BIAS, FACTORS, RESIDUAL, OUT, M, rows_of_factor,
    C: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out = residual + x W^T + b.

    X is [M, K], WEIGHT [C, K], RESIDUAL and OUT [M, C]. FACTORS [samples] (or None) multiply b,
    each in the rows of its sample. A program owns BLOCK_M rows: `at` is where the elements of the
    residual are, `inside` which of them exist. It goes over the K columns of x, BLOCK_K at a time.
    WIDE is for large tensors (index).
    """
    position, at, inside = tile_of_rows(tl.program_id(0) * BLOCK_M, M, C, C, BLOCK_M, WIDE)
    channel = tl.arange(0, C)
    out = tl.zeros([BLOCK_M, C], tl.float32)
    for first in tl.range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(X + position[:, None] * K + k[None, :], mask=inside, other=0.0)
        weight = tl.load(WEIGHT + channel[None, :] * K + k[:, None])
        out = tl.dot(x, weight, out, input_precision=PRECISION)  # out += x W^T
    bias = tl.load(BIAS + channel)[None, :]
    if FACTORS is not None:
        factor = tl.load(FACTORS + position // rows_of_factor, mask=position < M, other=0.0)
        bias *= factor[:, None]
    out += bias + load_tile(RESIDUAL, at, inside)
    tl.store(OUT + at, out, mask=inside)


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


def project_residual(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, factors: Tensor | None = None
) -> Tensor:
    """Compute residual + x W^T + b [samples, ..., C], with factors [samples] times b."""
    dim, width = weight.shape
    if not multiplies(x.dtype, dim, 256):
        if factors is None:
            return residual + F.linear(x, weight, bias.to(x.dtype))
        return residual + F.linear(x, weight).add_(factors[:, None, None, None] * bias)
    options = projection_options("project_residual", residual, x.dtype, width)
    out = torch.empty_like(residual)
    launch = wrap_triton(project_residual_kernel)[(triton.cdiv(options["M"], options["BLOCK_M"]),)]
    options["rows_of_factor"] = options["M"] // (1 if factors is None else len(factors))
    launch(x, weight, bias, factors, residual, out, K=width, **options)
    return out


def projection_options(
    kernel: str, x: Tensor, dtype: torch.dtype, width: int
) -> dict[str, int | bool | str]:
    """Return row_options of a kernel that projects rows of x to `width` columns in `dtype`.

    The width is 0 if there is nothing to multiply.
    """
    dim = x.shape[-1]
    options = row_options(kernel, x, dtype, width or dim)
    # two tiles of whole rows fit into shared memory
    rows = min(options["BLOCK_M"], max(16, 2**16 // (dim * dtype.itemsize)))
    while rows > 32 and options["M"] < 128 * rows:  # to occupy the device
        rows //= 2
    options["BLOCK_M"] = rows
    if width:  # whole rows are in registers
        options["num_warps"] = max(options["num_warps"], rows * dim // 2048)
    else:  # many small programs keep the memory busy
        warps = dim // (128 if "backward" in kernel else 64)
        options |= {"BLOCK_M": 16, "num_warps": max(2, warps)}
    return options


def multiplies(dtype: torch.dtype, dim: int, most: int = 128) -> bool:
    """Return whether these kernels multiply rows of this type and width; else the library does.

    The library is faster at wide rows. In TF32 Triton's products are less exact: with all of these
    the outputs exceeded their limit.
    """
    return (INTERPRETED or dtype != torch.float32) and dim <= most


def linear_gradients_out(
    grad: Tensor, x: Tensor, out: Tensor, factors: Tensor | None = None
) -> None:
    """Write the gradients of a weight [N, K] and its bias [N] into `out`, one after the other.

    grad is [..., N], x [..., K]. If `out` has N x K elements only, there is no bias. If given, the
    bias was added times factors [samples].
    """
    grad = grad.flatten(0, -2)
    x = x.flatten(0, -2)
    weight, bias = out.tensor_split([grad.shape[1] * x.shape[1]])
    matmul_out(grad, x, weight.view(grad.shape[1], x.shape[1]), direct=True)
    if len(bias):
        column_sums(grad, bias, factors)


def column_sums(x: Tensor, out: Tensor, factors: Tensor | None = None) -> None:
    """Write the sums of the columns of x [rows, C] into `out` [C], each row times its factor."""
    rows, programs, options = row_launch("column_sums", x)
    rows_of_factor = rows if factors is None else rows // len(factors)
    sums = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    launch = wrap_triton(column_sums_kernel)[(programs,)]
    launch(x, factors, sums, rows, rows_of_factor, **options)
    sum_parts(sums, out)


def without_second_derivative(backward: Callable) -> staticmethod:
    """Make a Function's backward pass fail where it would have to be differentiated itself."""

    def checked(ctx, *grads: Tensor | None):
        if torch.is_grad_enabled():  # PyTorch's once_differentiable lets constant gradients pass
            raise RuntimeError("create_graph: V4's kernels have no second derivatives; V1 has")
        return backward(ctx, *grads)

    return staticmethod(checked)


class Projection(torch.autograd.Function):
    """Compute x W^T + b [..., C] from x [..., K], plus a residual [..., C] if there is one."""

    @staticmethod
    def forward(ctx, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
        cast = cast_of(weight, gemm_dtype(x))
        x = x.contiguous()
        ctx.save_for_backward(x, cast)
        ctx.parameters = weight, bias
        if residual is None:
            return F.linear(x, cast, cast_of(bias, cast.dtype))
        return project_residual(x, cast, cast_of(bias, bias.dtype), residual.contiguous())

    @without_second_derivative
    def backward(ctx, grad: Tensor):
        x, cast = ctx.saved_tensors
        residual = grad if ctx.needs_input_grad[1] else None
        grad = grad.contiguous().to(x.dtype)
        compute = partial(linear_gradients_out, grad, x)
        return grad @ cast, residual, *parameter_gradients(ctx, (ctx.parameters,), compute, grad, x)


# --- norm and projection: out = y W^T + b with y = norm(x), and the pair bias of an attention
# Norm and projection are one kernel, so y is never in memory; the backward pass makes it again, and
# adds all gradients of x in one kernel. The norm of a pair also makes a pair bias, by the weight
# HEADS [H, C]. C must be a power of two.
@block_sizes(
    {"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 2},
    float32={"num_warps": 8},
    hip={"BLOCK_N": 32, "num_stages": 1},
)
@triton.jit
def norm_project_kernel(
    X, NORM_WEIGHT, NORM_BIAS, WEIGHT, BIAS, HEADS, PRESENT, OUT, PAIR_BIAS, M, N,
    eps: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    H: tl.constexpr, BLOCK_H: tl.constexpr, ENDING: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y = LayerNorm(x), then a pair bias for H heads, and out = y W^T + b or y itself.

    X is [M, C], WEIGHT [WIDTH, C], BIAS [WIDTH] or None, OUT [M, WIDTH]. Without a pair bias H is
    0. Without a projection WIDTH is 0: out is y then, or None if only the pair bias is wanted. A
    program owns BLOCK_M rows, and goes over the columns of out BLOCK_N at a time.
    """
    position, at, inside = tile_of_rows(tl.program_id(0) * BLOCK_M, M, C, C, BLOCK_M, WIDE)
    channel = tl.arange(0, C)
    dtype = PAIR_BIAS.dtype.element_ty if OUT is None else OUT.dtype.element_ty
    y = load_norm(X, at, inside, NORM_WEIGHT, NORM_BIAS, dtype, eps, C)
    if H > 0:
        heads = load_heads(HEADS, H, BLOCK_H, C).to(dtype)
        pair_bias = tl.dot(y, tl.trans(heads), input_precision=PRECISION)  # y HEADS^T
        store_pair_bias(PAIR_BIAS, pair_bias, position, PRESENT, M, N, H, BLOCK_H, ENDING, ALIGNED)
    if WIDTH > 0:
        for first in tl.range(0, WIDTH, BLOCK_N):
            column = first + tl.arange(0, BLOCK_N)
            weight = tl.load(WEIGHT + column[None, :] * C + channel[:, None])
            out = tl.dot(y, weight, input_precision=PRECISION)  # y W^T
            if BIAS is not None:
                out += tl.load(BIAS + column)[None, :]
            tl.store(OUT + position[:, None] * WIDTH + column[None, :], out, mask=inside)
    elif OUT is not None:
        tl.store(OUT + at, y, mask=inside)


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_K": 128, "num_stages": 2},
    float32={"BLOCK_M": 16},
    hip={"BLOCK_M": 32, "BLOCK_K": 32, "num_stages": 1},
)
@triton.jit
def norm_project_backward_kernel(
    X, NORM_WEIGHT, NORM_BIAS, WEIGHT, HEADS, GRAD, GRAD_PAIR_BIAS, RESIDUAL, GRAD_X, SUMS,
    M, N, eps: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    H: tl.constexpr, BLOCK_H: tl.constexpr, ENDING: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx from GRAD = dout and dPAIR_BIAS, plus RESIDUAL, what x has from elsewhere.

    dy = dout W + sum_h dPAIR_BIAS_h HEADS_h, then through the norm. GRAD is [M, WIDTH]; if WIDTH is
    0 it is dout W [M, C] or None. X, RESIDUAL (or None) and GRAD_X are [M, C]. SUMS
    [programs, 2 + H, C] are those over the program's rows for the norm's weight, its bias and
    HEADS. A program owns BLOCK_M rows.
    """
    position, at, inside = tile_of_rows(tl.program_id(0) * BLOCK_M, M, C, C, BLOCK_M, WIDE)
    channel = tl.arange(0, C)
    grad_y = tl.zeros([BLOCK_M, C], tl.float32)
    if WIDTH > 0:
        for first in tl.range(0, WIDTH, BLOCK_K):
            column = first + tl.arange(0, BLOCK_K)
            at_grad = GRAD + position[:, None] * WIDTH + column[None, :]
            grad = tl.load(at_grad, mask=inside, other=0.0)
            weight = tl.load(WEIGHT + column[:, None] * C + channel[None, :])
            grad_y = tl.dot(grad, weight, grad_y, input_precision=PRECISION)  # dy += dout W
    elif GRAD is not None:
        grad_y += load_tile(GRAD, at, inside)
    x, rstd = normalise(load_tile(X, at, inside), True, eps, C)
    SUMS += tl.program_id(0) * (2 + H) * C + channel
    if H > 0:
        head = tl.arange(0, BLOCK_H)
        pair = pair_bias_offset(position[:, None], head[None, :], N, H, ENDING, ALIGNED)
        bias = tl.load(GRAD_PAIR_BIAS + pair, mask=inside & (head < H)[None, :], other=0.0)
        heads = load_heads(HEADS, H, BLOCK_H, C).to(bias.dtype)
        grad_y = tl.dot(bias, heads, grad_y, input_precision=PRECISION)  # dy += dPAIR_BIAS HEADS
        y = scale_and_shift(x, NORM_WEIGHT, NORM_BIAS, C).to(bias.dtype)
        grad_heads = tl.dot(tl.trans(bias), y, input_precision=PRECISION)  # dPAIR_BIAS^T y
        to = SUMS[None, :] + (2 + head)[:, None] * C
        tl.store(to, grad_heads, mask=(head < H)[:, None])
    tl.store(SUMS, tl.sum(grad_y * x, 0))
    tl.store(SUMS + C, tl.sum(grad_y, 0))
    grad_x = norm_backward(grad_y * tl.load(NORM_WEIGHT + channel)[None, :], x, rstd, C)
    if RESIDUAL is not None:
        grad_x += load_tile(RESIDUAL, at, inside)
    tl.store(GRAD_X + at, grad_x, mask=inside)


@triton.jit
def load_norm(X, at, inside, WEIGHT, BIAS, dtype, eps, C: tl.constexpr):
    """Load rows of x and return y = LayerNorm(x) [rows, C] in this type."""
    x, _ = normalise(load_tile(X, at, inside), True, eps, C)
    return scale_and_shift(x, WEIGHT, BIAS, C).to(dtype)


@triton.jit
def load_heads(HEADS, H: tl.constexpr, BLOCK_H: tl.constexpr, C: tl.constexpr):
    """Load the projections [BLOCK_H, C] of H heads, zeros beyond the last."""
    head = tl.arange(0, BLOCK_H)
    at = HEADS + head[:, None] * C + tl.arange(0, C)[None, :]
    return tl.load(at, mask=(head < H)[:, None], other=0.0)


@triton.jit
def store_pair_bias(
    PAIR_BIAS, pair_bias, position, PRESENT, M, N, H: tl.constexpr, BLOCK_H: tl.constexpr,
    ENDING: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store the bias that pairs give an attention, [positions, heads], in PAIR_BIAS [B, H, N, N].

    It is -1e4 for keys that are padding by PRESENT [B, N], if that is not None.
    """
    head = tl.arange(0, BLOCK_H)[None, :]
    if PRESENT is not None:  # a weight of 0, and no NaN where all keys are padding
        key = position // N if ENDING else position // (N * N) * N + position % N
        present = tl.load(PRESENT + key, mask=position < M, other=0) != 0
        pair_bias = tl.where(present[:, None], pair_bias, -1e4)
    to = PAIR_BIAS + pair_bias_offset(position[:, None], head, N, H, ENDING, ALIGNED)
    tl.store(to, pair_bias, mask=(position < M)[:, None] & (head < H))


class Norm(NamedTuple):
    """A norm, a projection of its result and one to a pair bias, and how kernels compute them."""

    norm_weight: Tensor  # [C]
    norm_bias: Tensor  # [C]
    weight: Tensor | None  # [WIDTH, C]
    bias: Tensor | None  # [WIDTH]
    heads: Tensor | None  # [H, C]
    eps: float
    dtype: torch.dtype  # of the results
    ending: bool = False  # the pair bias is that of the transposed pairs
    present: Tensor | None = None  # [B, N], False for residues that are padding
    relu: bool = False  # of the projection, by the library


def norm_project(
    x: Tensor, norm: Norm, normed: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Project LayerNorm(x), x [..., C] -> y W^T + b and a pair bias [B, H, N, N].

    The former is [..., WIDTH]; without a weight it is y if `normed`, else None. Without heads the
    latter is None.
    """
    out = pair_bias = None
    options = norm_options("norm_project", x, norm)
    if options["WIDTH"] or normed:
        out = x.new_empty(*x.shape[:-1], options["WIDTH"] or x.shape[-1], dtype=norm.dtype)
    if options["H"]:
        shape = len(x), options["H"], options["N"], options["N"]
        pair_bias = x.new_empty(shape, dtype=norm.dtype)
    launch = wrap_triton(norm_project_kernel)[(triton.cdiv(options["M"], options["BLOCK_M"]),)]
    launch(x, *norm[:5], norm.present, out, pair_bias, **options)
    return out, pair_bias


def norm_options(kernel: str, x: Tensor, norm: Norm) -> dict[str, int | float | bool | str]:
    """Return what both kernels of a norm and the projections after it are told."""
    width = 0 if norm.weight is None else len(norm.weight)
    count = 0 if norm.heads is None else len(norm.heads)
    length = x.shape[1] if count else 1
    # A pair bias alone is a product, too, with heads in place of columns.
    options = projection_options(kernel, x, norm.dtype, width or (16 if count else 0))
    if not width and options["PRECISION"] == "tf32":  # a pair bias is as exact as V3's
        options["PRECISION"] = "tf32x3"
    options |= {"WIDTH": width, "H": count, "BLOCK_H": max(16, triton.next_power_of_2(count))}
    options |= {"N": length, "ALIGNED": length % 16 == 8, "ENDING": norm.ending}
    return options | {"eps": norm.eps}


class NormProjection(torch.autograd.Function):
    """Compute y W^T + b with y = LayerNorm(x), and from y a pair bias; return x [..., C], too.

    Who adds an update to x takes the returned one. So the gradient of the sum arrives here with
    those of the projections, and one kernel adds it to theirs. The parameters are the first five
    of Norm, the settings the others. Kept for later: x alone; in float32, where the library
    multiplies, y as well; what went through a ReLU.
    """

    @staticmethod
    def forward(ctx, x: Tensor, settings: tuple, *parameters: Tensor | None):
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        ctx.parameters = parameters
        _, dtype, _, _, relu = settings
        *linear, heads = parameters
        heads = None if heads is None else cast_of(heads, heads.dtype)
        norm = Norm(*with_casts(linear, dtype), heads, *settings)
        rows = x.contiguous()
        # Many rows keep the library's GEMM busy, too: it and a norm are faster than one kernel.
        few = multiplies(dtype, x.shape[-1]) and x.numel() <= 2**21 and not relu
        if few or norm.weight is None:
            ctx.save_for_backward(rows, None, None, *norm[:5])
            return x.view_as(x), *norm_project(rows, norm)
        y, pair_bias = norm_project(rows, norm._replace(weight=None), normed=True)
        bias = None if norm.bias is None else cast_of(parameters[3], dtype)
        if relu:  # the library's product ends with it
            out = torch._addmm_activation(bias, y.flatten(0, -2), norm.weight.t())
            out = out.view(*y.shape[:-1], -1)
        else:
            out = F.linear(y, norm.weight, bias)
        normed = y if dtype == torch.float32 else None
        ctx.save_for_backward(rows, normed, out if relu else None, *norm[:5])
        return x.view_as(x), out, pair_bias

    @without_second_derivative
    def backward(ctx, residual: Tensor | None, grad: Tensor | None, grad_pair_bias: Tensor | None):
        x, normed, activated, *saved = ctx.saved_tensors  # with checkpoints they are read once
        norm = Norm(*saved, *ctx.settings)
        grads = (None if g is None else g.contiguous() for g in (grad, grad_pair_bias, residual))
        grad, grad_pair_bias, residual = grads
        if activated is not None:
            grad = torch.ops.aten.threshold_backward(grad, activated, 0)
        *of_norm, weight, bias, heads = ctx.parameters
        groups = [of_norm if grad_pair_bias is None else [*of_norm, heads]]
        read = [x] if normed is None else [x, normed]
        if grad is None:
            norm = norm._replace(weight=None)
        else:
            groups.append([weight] if bias is None else [weight, bias])
            grad_rows = grad.flatten(0, -2)
            read.append(grad_rows)
            if norm.relu or not multiplies(norm.dtype, x.shape[-1]):
                grad = grad_rows @ norm.weight
                norm = norm._replace(weight=None)
        if grad_pair_bias is None:
            norm = norm._replace(heads=None)
        options = norm_options("norm_project_backward", x, norm)
        programs = triton.cdiv(options["M"], options["BLOCK_M"])
        grad_x = torch.empty_like(x)
        sums = x.new_empty(programs, 2 + options["H"], x.shape[-1], dtype=torch.float32)
        launch = wrap_triton(norm_project_backward_kernel)[(programs,)]
        inputs = x, norm.norm_weight, norm.norm_bias, norm.weight, norm.heads
        launch(*inputs, grad, grad_pair_bias, residual, grad_x, sums, **options)

        def compute(grad_norm: Tensor, *grad_linears: Tensor) -> None:
            sum_parts(sums, grad_norm)
            for grad_linear in grad_linears:  # none or one
                y = normed
                if y is None:
                    alone = norm._replace(weight=None, heads=None)
                    y, _ = norm_project(x, alone, normed=True)
                linear_gradients_out(grad_rows, y, grad_linear)

        return grad_x, None, *parameter_gradients(ctx, groups, compute, sums, *read)


def normed_projection(
    norm: nn.LayerNorm, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
    heads: nn.Linear | None = None, ending: bool = False, present: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return x, its projection after the norm, and a pair bias: use this x, see NormProjection."""
    parameters = norm.weight, norm.bias, weight, bias, None if heads is None else heads.weight
    settings = norm.eps, gemm_dtype(x), ending, present, relu
    return NormProjection.apply(x, settings, *parameters)


# How many registers a thread may have at most: with fewer an SM runs more programs at a time. Block
# sizes belong to it.
REGISTERS = {
    "attention_forward": {"maxnreg": 104, "BLOCK_N": 64},
    "attention_backward_query": {"maxnreg": 120},
    "attention_backward_key": {"maxnreg": 96},
    "triangle_output": {"maxnreg": 128},
}


def register_limit(kernel: str, dtype: torch.dtype, few: bool) -> Sizes:
    """Return the limit of a kernel of 16-bit tensors on NVIDIA's GPUs, if it needs `few`."""
    limited = few and BACKEND == "cuda" and dtype != torch.float32 and kernel not in OVERRIDES
    return REGISTERS.get(kernel, {}) if limited else {}


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
    # otherwise addresses, or sums, need more registers
    few = dim <= 32 and length % 8 == 0
    chosen = blocks(kernel, qkvg.dtype) | register_limit(kernel, qkvg.dtype, few)
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


def attention_backward(
    grad_out: Tensor, qkvg: Tensor, gate_bias: Tensor, bias: Tensor | None, out: Tensor,
    log_sum_exp: Tensor, columns: bool, needs_bias: bool, overlaps: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute the gradients of qkvg (in its layout), gate_bias and bias.

    That of gate_bias is in parts, to be added up; that of bias None unless it `needs_bias`. If it
    `overlaps`, what has to do with the bias runs beside the gradients of queries and keys.
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
        if needs_bias:
            grad_bias = sum_parts(grad_bias, dtype=bias.dtype)
    else:
        grad, delta = torch.empty_like(out), torch.empty_like(log_sum_exp)
        side = fork(overlaps)
        with torch.cuda.stream(side):
            bias_t = None if bias is None else bias.mT.contiguous()
        options = attention_options("attention_backward_query", qkvg, columns)
        options["ROUNDED"] = qkvg.dtype != torch.float32 or options["PRECISION"] == "tf32"
        tiles = triton.cdiv(length, options["BLOCK_M"])
        grad_gate_bias = new_sums(samples * rows * tiles, heads * dim)
        inputs = grad_out, qkvg, gate_bias, bias, out, log_sum_exp
        launch = wrap_triton(attention_backward_query_kernel)[(tiles * rows * heads_of_all,)]
        launch(*inputs, grad_qkvg, grad, delta, grad_gate_bias, **options)
        join(side)
        side = fork(overlaps)
        if needs_bias:
            options = attention_options("attention_backward_bias", qkvg, columns)
            tiles = math.prod(triton.cdiv(length, options[size]) for size in ("BLOCK_M", "BLOCK_N"))
            group = rows_per_program(options.pop("PROGRAMS"), tiles * heads_of_all, rows)
            parts = triton.cdiv(rows, group)
            options |= {"B": samples, "group": group}
            launch = wrap_triton(attention_backward_bias_kernel)[(tiles * parts * heads_of_all,)]
            with torch.cuda.stream(side):
                grad_bias = new_sums(parts, *bias.shape)
                launch(qkvg, bias, log_sum_exp, grad, delta, grad_bias, **options)
                grad_bias = sum_parts(grad_bias, dtype=bias.dtype)
        options = attention_options("attention_backward_key", qkvg, columns)
        tiles = triton.cdiv(length, options["BLOCK_N"])
        launch = wrap_triton(attention_backward_key_kernel)[(tiles * rows * heads_of_all,)]
        launch(qkvg, bias_t, log_sum_exp, grad, delta, grad_qkvg, **options)
        join(side)
    return grad_qkvg, grad_gate_bias, grad_bias


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of a GPU for what runs beside other kernels of an attention."""
    return torch.cuda.Stream(device)


def fork(overlaps: bool) -> torch.cuda.Stream | None:
    """Return a stream that goes on from here, if it `overlaps` and a graph is captured."""
    if not (overlaps and capturing()):
        return None
    side = side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    return side


def join(side: torch.cuda.Stream | None) -> None:
    """Let what follows wait for what this stream was given."""
    if side:
        torch.cuda.current_stream().wait_stream(side)


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
        ctx.parameters = (gate_bias,)
        qkvg = qkvg.contiguous()
        gate_bias = gate_bias.contiguous()
        bias = None if bias is None else bias.contiguous()
        out, log_sum_exp = attention_forward(qkvg, gate_bias, bias, columns)
        ctx.save_for_backward(qkvg, gate_bias, bias, out, log_sum_exp)
        return out

    @without_second_derivative
    def backward(ctx, grad_out: Tensor):
        inputs = grad_out.contiguous(), *ctx.saved_tensors, ctx.columns, ctx.needs_input_grad[2]
        side = getattr(ctx.parameters[0], "side", None)  # of a training step
        grad_qkvg, parts, grad_bias = attention_backward(*inputs, side is None or side.active)
        grads = parameter_gradients(ctx, (ctx.parameters,), partial(sum_parts, parts), parts)
        return grad_qkvg, *grads, grad_bias, None


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
        self.linear_o = nn.Linear(dim, dim)

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
        if columns:
            return self.attend(x.transpose(1, 2), bias).transpose(1, 2)
        linears = (self.linear_q, self.linear_k, self.linear_v, self.linear_g)
        q, k, v, gate = (linear(x) for linear in linears)
        heads = (self.heads, self.head_dim)
        q, k, v = (t.flatten(0, 1).unflatten(-1, heads).transpose(1, 2) for t in (q, k, v))
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-2, -1)  # [B x R, H, N, N]
        if bias is not None:
            scores = (scores.unflatten(0, x.shape[:2]) + bias[:, None]).flatten(0, 1)
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return self.linear_o(torch.sigmoid(gate) * out)

    def attend_fused(
        self, norm: nn.LayerNorm, x: Tensor, present: Tensor | None = None,
        bias: Tensor | None = None, heads: nn.Linear | None = None, columns: bool = False,
    ) -> Tensor:  # fmt: skip
        """Compute x + the attention of norm(x), norm and residual in the projections' kernels.

        With `heads`, the projection to a pair bias, the bias comes from the same norm. A bias that
        is given knows which keys are present.
        """
        linear = self.linear_qkvg
        options = {"ending": columns, "present": None if heads is None else present}
        x, qkvg, own_bias = normed_projection(norm, x, linear.weight, heads=heads, **options)
        if heads is not None:
            bias = own_bias
        elif present is not None:
            every = present[:, None, None].expand(-1, self.heads, present.shape[1], -1)
            bias = torch.where(every, 0.0, -1e4)
        qkvg = qkvg.unflatten(-1, (self.heads, 4, -1))
        out = GatedAttentionFunction.apply(qkvg, linear.bias, bias, columns)
        return Projection.apply(out, x, *self.linear_o.parameters())


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
        self.layer_norm_m = nn.LayerNorm(config.msa_dim)
        self.layer_norm_z = nn.LayerNorm(config.pair_dim)
        self.linear_z = nn.Linear(config.pair_dim, config.num_heads_msa, bias=False)

    def forward(
        self, msa: Tensor, pair: Tensor, residues: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Update msa [B, S, N, c_m] from it, pair [B, N, N, c_z], residues [B, N]; return both."""
        if self.fused:
            norm = self.layer_norm_z
            pair, _, bias = normed_projection(norm, pair, heads=self.linear_z, present=residues)
            return self.attend_fused(self.layer_norm_m, msa, bias=bias), pair
        bias = self.linear_z(self.layer_norm_z(pair)).permute(0, 3, 1, 2)
        return msa + self.attend(self.layer_norm_m(msa), bias, residues), pair


class MSAColumnAttention(GatedAttention):
    """Let sequences attend to each other at one residue (AF2 SI, algorithm 8)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__(config.msa_dim, config.num_heads_msa, fusions)
        self.layer_norm_m = nn.LayerNorm(config.msa_dim)

    def forward(self, msa: Tensor, sequences: Tensor | None = None) -> Tensor:
        """Update msa [B, S, N, c_m]; sequences [B, S] are False for padding."""
        if self.fused:
            return self.attend_fused(self.layer_norm_m, msa, sequences, columns=True)
        return msa + self.attend(self.layer_norm_m(msa), present=sequences, columns=True)


class TriangleAttentionStartingNode(GatedAttention):
    """Let edges ij and ik attend to each other, biased by edge jk (AF2 SI, algorithm 13)."""

    ending = False

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__(config.pair_dim, config.num_heads_pair, fusions)
        self.layer_norm = nn.LayerNorm(config.pair_dim)
        self.linear = nn.Linear(config.pair_dim, config.num_heads_pair, bias=False)

    def forward(self, pair: Tensor, residues: Tensor | None = None) -> Tensor:
        """Update pair [B, N, N, c_z]; residues [B, N] are False for padding."""
        if self.fused:
            options = {"heads": self.linear, "columns": self.ending}
            return self.attend_fused(self.layer_norm, pair, residues, **options)
        normed = self.layer_norm(pair)
        bias = self.linear(normed).permute(0, 3, *((2, 1) if self.ending else (1, 2)))
        return pair + self.attend(normed, bias, residues, self.ending)


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


@triton.jit
def load_matrix(X, N, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load this program's matrix of X [matrices, N, N], or its transpose, in one tile."""
    i = tl.arange(0, BLOCK_N)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    X += tl.program_id(0).to(tl.int64) * N * N
    at = j * N + i if TRANSPOSED else i * N + j
    return tl.load(X + at, mask=(i < N) & (j < N), other=0.0)


@triton.jit
def store_matrix(X, x, N, BLOCK_N: tl.constexpr):
    """Store this program's matrix of X [matrices, N, N]."""
    i = tl.arange(0, BLOCK_N)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    at = X + tl.program_id(0).to(tl.int64) * N * N + i * N + j
    tl.store(at, x.to(X.dtype.element_ty), mask=(i < N) & (j < N))


@block_sizes({"BLOCK_N": 64})
@triton.jit
def triangle_product_kernel(
    A, B, PRODUCT, N, INCOMING: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Compute X = a b^T, or a^T b if INCOMING, of matrices that fit one tile.

    A, B and PRODUCT are [matrices, N, N]. A program owns a matrix.
    """
    a = load_matrix(A, N, INCOMING, BLOCK_N)
    b = load_matrix(B, N, not INCOMING, BLOCK_N)
    store_matrix(PRODUCT, tl.dot(a, b, input_precision=PRECISION), N, BLOCK_N)


@block_sizes({"BLOCK_N": 64})
@triton.jit
def triangle_product_backward_kernel(
    A, B, GRAD, GRAD_A, GRAD_B, N,
    INCOMING: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute da = dX b and db = dX^T a, or da = b dX^T and db = a dX if INCOMING.

    All are [matrices, N, N]. A program owns a matrix.
    """
    a = load_matrix(A, N, False, BLOCK_N)
    b = load_matrix(B, N, False, BLOCK_N)
    grad = load_matrix(GRAD, N, False, BLOCK_N)
    if INCOMING:
        grad_a = tl.dot(b, tl.trans(grad), input_precision=PRECISION)
        grad_b = tl.dot(a, grad, input_precision=PRECISION)
    else:
        grad_a = tl.dot(grad, b, input_precision=PRECISION)
        grad_b = tl.dot(tl.trans(grad), a, input_precision=PRECISION)
    store_matrix(GRAD_A, grad_a, N, BLOCK_N)
    store_matrix(GRAD_B, grad_b, N, BLOCK_N)


def multiply_triangles(kernel: Callable, *tensors: Tensor, incoming: bool) -> bool:
    """Launch a kernel of the product of matrices [matrices, N, N] if a matrix fits one tile.

    Return whether it did. Larger ones keep the library's GEMMs busy, which are faster then.
    """
    matrices, length, _ = tensors[0].shape
    dtype = tensors[0].dtype
    chosen = blocks(kernel.__name__.removesuffix("_kernel"), dtype)
    fits = length <= chosen["BLOCK_N"]
    if fits:
        chosen |= {"N": length, "INCOMING": incoming, "PRECISION": dot_precision(dtype)}
        wrap_triton(kernel)[(matrices,)](*tensors, **chosen)
    return fits


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
    in_statistics = x.new_empty(2, positions, dtype=torch.float32)
    out_statistics = torch.empty_like(in_statistics)
    programs, options = triangle_options("triangle_project", x, weight)
    launch = wrap_triton(triangle_project_kernel)[(programs,)]
    launch(x, in_weight, in_bias, weight, bias, in_statistics, present, ab, eps=eps, **options)
    a, b = (half.view(dim * len(x), *x.shape[1:3]) for half in ab.chunk(2))
    product = torch.empty_like(a)
    if not multiply_triangles(triangle_product_kernel, a, b, product, incoming=incoming):
        torch.bmm(*((a.mT, b) if incoming else (a, b.mT)), out=product)
    product = product.view(dim, positions)
    programs, options = triangle_options("triangle_output", x, weight)
    launch = wrap_triton(triangle_output_kernel)[(programs,)]
    inputs = x, in_weight, in_bias, out_weight, out_bias, weight, bias
    statistics = in_statistics, out_statistics
    launch(*inputs, *statistics, product, out, eps=eps, **options)
    return out, ab, product, *statistics


def triangle_backward(
    grad_out: Tensor, x: Tensor, present: Tensor | None, in_weight: Tensor, in_bias: Tensor,
    out_weight: Tensor, out_bias: Tensor, weight: Tensor, bias: Tensor, ab: Tensor, product: Tensor,
    in_statistics: Tensor, out_statistics: Tensor, incoming: bool,
) -> tuple[Tensor, tuple[Tensor | None, ...], Tensor, Tensor]:  # fmt: skip
    """Compute the gradient of x, and what triangle_weight_gradients takes.

    Then the gradients of weight and bias of both norms in parts [programs, 2, C], to be added up.
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
    grads = grad_product, grad_a, grad_b
    if multiply_triangles(triangle_product_backward_kernel, a, b, *grads, incoming=incoming):
        pass
    elif incoming:  # X = a^T b
        torch.bmm(b, grad_product.mT, out=grad_a)
        torch.bmm(a, grad_product, out=grad_b)
    else:  # X = a b^T
        torch.bmm(grad_product, b, out=grad_a)
        torch.bmm(grad_product.mT, a, out=grad_b)

    programs, options = triangle_options("triangle_project_backward", x, weight)
    sums_in = x.new_empty(programs, 2, dim, dtype=torch.float32)
    grad_x = torch.empty_like(x)
    # dp and ds: triangle_weight_gradients makes them again, or the library reads them
    again = multiplies(weight.dtype, dim)
    grad_linear = None if again else weight.new_empty(positions, 4 * dim)
    launch = wrap_triton(triangle_project_backward_kernel)[(programs,)]
    inputs = x, in_weight, weight, bias, in_statistics, weight_t, normed[0], grad_gz[0], grad_out
    launch(*inputs, present, grad_ab, grad_linear, grad_x, sums_in, **options)
    made_of = normed, grad_gz, grad_ab, grad_linear, present, weight, bias
    return grad_x, made_of, sums_in, sums_out


def triangle_options(kernel: str, x: Tensor, weight: Tensor) -> tuple[int, dict[str, int | str]]:
    """Return how many programs a kernel of the triangle multiplication has, and its settings."""
    options = row_options(kernel, x, weight.dtype, x.shape[-1])
    options |= register_limit(kernel, weight.dtype, x.shape[-1] <= 128)
    # Where channels are few more warps leave too little for each: one kernel spills on an MI300.
    most = max(4, options["BLOCK_M"] * options["C"] // 512)
    options["num_warps"] = min(options["num_warps"], most)
    return triton.cdiv(options["M"], options["BLOCK_M"]), options


def triangle_weight_gradients(
    normed: Tensor, grad_gz: Tensor, grad_ab: Tensor, grad_linear: Tensor | None,
    present: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Write the gradients of the packed weight [6 C, C] and bias [6 C] into `out`.

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
        sum_parts(parts, out)
        return
    weight, bias = out.tensor_split([6 * dim * dim])
    weight = weight.view(6 * dim, dim)
    first = 0
    for grad, rows in ((grad_linear, normed[0]), (grad_gz[0], normed[0]), (grad_gz[1], normed[1])):
        last = first + grad.shape[1]
        matmul_out(grad, rows, weight[first:last], direct=True)
        column_sums(grad, bias[first:last])
        first = last


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
        inputs = x.contiguous(), present, *with_casts(parameters, gemm_dtype(x))
        out, *saved = triangle_forward(*inputs, incoming, eps)
        ctx.save_for_backward(*inputs, *saved)
        ctx.incoming = incoming
        ctx.parameters = parameters
        return out

    @without_second_derivative
    def backward(ctx, grad_out: Tensor):
        inputs = grad_out.contiguous(), *ctx.saved_tensors, ctx.incoming
        grad_x, linears, norm_in, norm_out = triangle_backward(*inputs)

        def compute(grad_norm_in: Tensor, grad_norm_out: Tensor, grad_linears: Tensor) -> None:
            triangle_weight_gradients(*linears, grad_linears)
            sum_parts(norm_in, grad_norm_in)
            sum_parts(norm_out, grad_norm_out)

        groups = ctx.parameters[:2], ctx.parameters[2:4], ctx.parameters[4:]
        used = [tensor for tensor in linears if tensor is not None]
        grads = parameter_gradients(ctx, groups, compute, *used, norm_in, norm_out)
        return grad_x, None, None, None, *grads


class TriangleMultiplication(nn.Module):
    """Update each edge from the two others of its triangles; `equation` multiplies these."""

    equation: str
    incoming: bool

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        dim = config.pair_dim
        self.fused = fusions.triton_triangle
        self.layer_norm_in = nn.LayerNorm(dim)
        parts = ("linear_a_p", "linear_b_p", "linear_a_g", "linear_b_g", "linear_g", "linear_z")
        if self.fused:
            self.linears = nn.Linear(dim, 6 * dim)
            keep_separate_names(self, "linears", parts, biased=parts)
        else:
            for part in parts:
                setattr(self, part, nn.Linear(dim, dim))
        self.layer_norm_out = nn.LayerNorm(dim)

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
# The product's gradient is written as [N, H, N, H]: so those of a and b are two GEMMs.
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
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8},
    float32={"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4},
    hip={"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1},
)
@triton.jit
def outer_product_gradient_kernel(
    GRAD, WEIGHT_T, FACTORS, GRAD_WIDE, N, C: tl.constexpr, H: tl.constexpr,
    TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the product of a and b, factor * sum_z G_ijz W_zcd, from that of out.

    GRAD is [samples, N, N, C], W [C, H x H] (WEIGHT_T: see transpose), GRAD_WIDE
    [samples, N, H, N, H]: as a matrix [N x H, N x H] it multiplies a and b. A program owns BLOCK_M
    residues j of a residue i, and goes over the pairs (c, d) BLOCK_N at a time.
    """
    row = tl.program_id(2).to(tl.int64) * N + tl.program_id(0)  # of sample and i
    j = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, C)
    inside = (j < N)[:, None]
    grad = tl.load(GRAD + (row * N + j)[:, None] * C + channel[None, :], mask=inside, other=0.0)
    factor = tl.load(FACTORS + tl.program_id(2))
    for first in tl.range(0, H * H, BLOCK_N):
        cd = first + tl.arange(0, BLOCK_N)
        if TRANSPOSED:  # see transpose
            weight = tl.load(WEIGHT_T + cd[None, :] * C + channel[:, None])
        else:
            weight = tl.load(WEIGHT_T + channel[:, None] * (H * H) + cd[None, :])
        wide = tl.dot(grad, weight, input_precision=PRECISION) * factor  # G W
        at = GRAD_WIDE + (row * H + cd // H)[None, :] * (N * H) + j[:, None] * H + (cd % H)[None, :]
        tl.store(at, wide.to(GRAD_WIDE.dtype.element_ty), mask=inside)


def outer_product_options(kernel: str, a: Tensor) -> dict[str, int | str]:
    """Return what a kernel of the outer product is told."""
    _, depth, length, dim = a.shape
    chosen = blocks(kernel, a.dtype)
    chosen["BLOCK_S"] = min(chosen["BLOCK_S"], max(16, triton.next_power_of_2(depth)))
    return {**chosen, "S": depth, "N": length, "H": dim, "PRECISION": dot_precision(a.dtype)}


def outer_product_forward(a: Tensor, b: Tensor, factors: Tensor) -> Tensor:
    """Multiply a and b [B, S, N, H] -> factor * sum over S of outer products [B, N, N, H x H]."""
    samples, _, length, dim = a.shape
    options = outer_product_options("outer_product_forward", a)
    out = a.new_empty(samples, length, length, dim * dim)
    left, right = (triton.cdiv(length * dim, options[size]) for size in ("BLOCK_M", "BLOCK_N"))
    launch = wrap_triton(outer_product_forward_kernel)[(left, right, samples)]
    launch(a, b, factors, out, **options)
    return out


class OuterProductMeanFunction(torch.autograd.Function):
    """Compute pair + factor * (sum over S of a (x) b, as [B, N, N, H x H], times W^T, plus bias).

    ab is [2, B, S, N, H], pair [B, N, N, C]. sequences [B, S] are False for padding, whose a and b
    become 0; factor is 1 / (number of others + 1e-3).
    """

    @staticmethod
    def forward(
        ctx, ab: Tensor, pair: Tensor, sequences: Tensor | None, weight: Tensor, bias: Tensor
    ) -> Tensor:
        ab, pair = ab.contiguous(), pair.contiguous()
        ctx.parameters = weight, bias
        cast, bias = with_casts(ctx.parameters, ab.dtype)
        if sequences is None:
            factors = ab.new_full(ab.shape[1:2], 1 / (ab.shape[2] + 1e-3), dtype=torch.float32)
        else:
            ab = ab * sequences[..., None, None]
            factors = sequences.sum(1, dtype=torch.float32).add_(1e-3).reciprocal_()
        ctx.save_for_backward(ab, cast, factors)
        return project_residual(outer_product_forward(*ab, factors), cast, bias, pair, factors)

    @without_second_derivative
    def backward(ctx, grad: Tensor):
        ab, cast, factors = ctx.saved_tensors
        residual = grad
        grad = grad.contiguous().to(ab.dtype)

        def compute(out: Tensor) -> None:
            linear_gradients_out(grad, outer_product_forward(*ab, factors), out, factors)

        _, samples, _, length, dim = ab.shape
        chosen = blocks("outer_product_gradient", ab.dtype)
        chosen["BLOCK_M"] = min(chosen["BLOCK_M"], max(16, triton.next_power_of_2(length)))
        transposed = ab.dtype == torch.float32
        weight_t = cast.t().contiguous() if transposed else cast
        grad_ab = torch.empty_like(ab)
        wide = ab.new_empty(samples, length * dim, length * dim)
        grid = (length, triton.cdiv(length, chosen["BLOCK_M"]), samples)
        launch = wrap_triton(outer_product_gradient_kernel)[grid]
        sizes = length, len(cast), dim, transposed
        precision = dot_precision(ab.dtype)
        launch(grad, weight_t, factors, wide, *sizes, PRECISION=precision, **chosen)
        (a, b), (grad_a, grad_b) = ab.flatten(3), grad_ab.flatten(3)
        torch.bmm(b, wide.mT, out=grad_a)
        torch.bmm(a, wide, out=grad_b)
        grads = parameter_gradients(ctx, (ctx.parameters,), compute, grad, ab, factors)
        return grad_ab, residual, None, *grads


class OuterProductMean(nn.Module):
    """Update the pair representation from pairs of MSA columns (AF2 SI, algorithm 10)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        hidden = config.outer_product_dim
        self.fused = fusions.triton_outer_product
        self.layer_norm = nn.LayerNorm(config.msa_dim)
        if self.fused:
            parts = ("linear_1", "linear_2")
            self.linears = nn.Linear(config.msa_dim, 2 * hidden)
            keep_separate_names(self, "linears", parts, biased=parts)
        else:
            self.linear_1 = nn.Linear(config.msa_dim, hidden)
            self.linear_2 = nn.Linear(config.msa_dim, hidden)
        self.linear_out = nn.Linear(hidden * hidden, config.pair_dim)

    def forward(
        self, msa: Tensor, pair: Tensor, sequences: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Update pair [B, N, N, c_z] from msa [B, S, N, c_m], sequences [B, S]; return both."""
        if self.fused:
            msa, ab, _ = normed_projection(self.layer_norm, msa, *self.linears.parameters())
            inputs = ab.unflatten(-1, (2, -1)).movedim(-2, 0), pair, sequences
            return msa, OuterProductMeanFunction.apply(*inputs, *self.linear_out.parameters())
        depth = msa.shape[1]
        normed = self.layer_norm(msa)
        a, b = self.linear_1(normed), self.linear_2(normed)
        if sequences is not None:
            a = a * sequences[:, :, None, None]
            dtype = torch.promote_types(msa.dtype, torch.float32)
            depth = sequences.sum(1, dtype=dtype)[:, None, None, None]
        outer = torch.einsum("bsic,bsjd->bijcd", a, b).flatten(3)
        # The bias is divided, too, as AlphaFold's code does.
        return msa, pair + self.linear_out(outer) / (depth + 1e-3)


# --- transition: update = linear_2(relu(linear_1(norm(x))))
# A whole transition as one kernel, x + W2 relu(W1 y + b1) + b2 with y = LayerNorm(x). The hidden
# layer h = W1 y + b1, four times as wide as x, is never in memory: the backward pass makes it
# again, in two kernels, because the gradient of x is a sum over hidden channels and those of the
# weights are sums over rows. C must be a power of two.
@block_sizes(
    {"BLOCK_M": 64, "BLOCK_N": 64},
    float32={"BLOCK_N": 32, "num_warps": 8, "num_stages": 1},
    hip={"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1},
)
@triton.jit
def transition_forward_kernel(
    X, NORM_WEIGHT, NORM_BIAS, WEIGHT_1, BIAS_1, WEIGHT_2, BIAS_2, OUT, M,
    eps: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out = x + relu(y W1^T + b1) W2^T + b2; y = LayerNorm(x).

    X and OUT are [M, C], WEIGHT_1 is [HIDDEN, C], WEIGHT_2 [C, HIDDEN]. A program owns BLOCK_M
    rows, and goes over the hidden channels BLOCK_N at a time.
    """
    _, at, inside = tile_of_rows(tl.program_id(0) * BLOCK_M, M, C, C, BLOCK_M, WIDE)
    channel = tl.arange(0, C)
    dtype = WEIGHT_1.dtype.element_ty
    y = load_norm(X, at, inside, NORM_WEIGHT, NORM_BIAS, dtype, eps, C)
    out = tl.zeros([BLOCK_M, C], tl.float32)
    for first in tl.range(0, HIDDEN, BLOCK_N):
        hidden = first + tl.arange(0, BLOCK_N)
        weight = tl.load(WEIGHT_1 + hidden[None, :] * C + channel[:, None])
        h = tl.dot(y, weight, input_precision=PRECISION) + tl.load(BIAS_1 + hidden)[None, :]
        h = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)  # relu(y W1^T + b1)
        weight = tl.load(WEIGHT_2 + channel[None, :] * HIDDEN + hidden[:, None])
        out = tl.dot(h, weight, out, input_precision=PRECISION)  # out += h W2^T
    out += tl.load(BIAS_2 + channel)[None, :]
    # Loaded once more: that is cheaper than keeping it in registers over the loop.
    out += load_tile(X, at, inside)
    tl.store(OUT + at, out, mask=inside)


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2},
    float32={"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1},
    hip={"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1},
    hip_float32={"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 8, "num_stages": 1},
)
@triton.jit
def transition_backward_input_kernel(
    X, NORM_WEIGHT, NORM_BIAS, WEIGHT_1, BIAS_1, WEIGHT_2, GRAD_OUT, GRAD_X, SUMS, M,
    eps: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx from dout: dh = dout W2 where h > 0, dy = dh W1, then through the norm, plus dout.

    GRAD_OUT, X and GRAD_X are [M, C]; SUMS [programs, 3, C] are those over the program's rows for
    b2 and for the norm's weight and bias. A program owns BLOCK_M rows.
    """
    _, at, inside = tile_of_rows(tl.program_id(0) * BLOCK_M, M, C, C, BLOCK_M, WIDE)
    channel = tl.arange(0, C)
    dtype = WEIGHT_1.dtype.element_ty
    y = load_norm(X, at, inside, NORM_WEIGHT, NORM_BIAS, dtype, eps, C)
    grad_out = tl.load(GRAD_OUT + at, mask=inside, other=0.0).to(dtype)
    grad_y = tl.zeros([BLOCK_M, C], tl.float32)
    for first in tl.range(0, HIDDEN, BLOCK_N):
        hidden = first + tl.arange(0, BLOCK_N)
        weight_1 = tl.load(WEIGHT_1 + hidden[:, None] * C + channel[None, :])
        h = tl.dot(y, tl.trans(weight_1), input_precision=PRECISION)
        h = h + tl.load(BIAS_1 + hidden)[None, :]
        weight_2 = tl.load(WEIGHT_2 + channel[:, None] * HIDDEN + hidden[None, :])
        grad_h = tl.dot(grad_out, weight_2, input_precision=PRECISION)  # dout W2
        grad_h = tl.where(h > 0, grad_h, 0.0).to(dtype)
        grad_y = tl.dot(grad_h, weight_1, grad_y, input_precision=PRECISION)  # dy += dh W1
    x, rstd = normalise(load_tile(X, at, inside), True, eps, C)
    grad_out = load_tile(GRAD_OUT, at, inside)
    tl.store(SUMS + tl.program_id(0) * 3 * C + channel, tl.sum(grad_out, 0))
    store_norm_gradients(SUMS + (tl.program_id(0) + 1) * C, grad_y, x, C)
    grad_x = norm_backward(grad_y * tl.load(NORM_WEIGHT + channel)[None, :], x, rstd, C) + grad_out
    tl.store(GRAD_X + at, grad_x, mask=inside)


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_N": 128, "PROGRAMS": 132, "num_warps": 8},
    float32={"BLOCK_M": 32, "BLOCK_N": 32, "PROGRAMS": 528},
    hip={"BLOCK_M": 32, "BLOCK_N": 32, "PROGRAMS": 528, "num_warps": 4},
    hip_float32={"BLOCK_M": 32, "BLOCK_N": 16, "PROGRAMS": 528},
)
@triton.jit
def transition_backward_weights_kernel(
    X, NORM_WEIGHT, NORM_BIAS, WEIGHT_1, BIAS_1, WEIGHT_2, GRAD_OUT, SUMS, M,
    eps: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PROGRAMS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dW1 = dh^T y, db1 = sum dh and dW2 = dout^T relu(h), with dh = dout W2 where h > 0.

    SUMS [PROGRAMS, HIDDEN x C + HIDDEN + C x HIDDEN] are dW1, db1 and dW2. A program owns BLOCK_N
    hidden channels of one of these rows, the sums over every PROGRAMS-th block of BLOCK_M rows.
    """
    hidden = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, C)
    dtype = WEIGHT_1.dtype.element_ty
    # [BLOCK_N, C] both, and [BLOCK_N, BLOCK_M] what they make: so products of these, which take
    # rows of hidden channels, read them from registers.
    weight_1 = tl.load(WEIGHT_1 + hidden[:, None] * C + channel[None, :])
    weight_2 = tl.load(WEIGHT_2 + channel[None, :] * HIDDEN + hidden[:, None])
    bias = tl.load(BIAS_1 + hidden)[:, None]
    grad_weight_1 = tl.zeros([BLOCK_N, C], tl.float32)
    grad_bias_1 = tl.zeros([BLOCK_N], tl.float32)
    grad_weight_2 = tl.zeros([BLOCK_N, C], tl.float32)
    for start in range(tl.program_id(1) * BLOCK_M, M, PROGRAMS * BLOCK_M):
        _, at, inside = tile_of_rows(start, M, C, C, BLOCK_M, WIDE)
        y = load_norm(X, at, inside, NORM_WEIGHT, NORM_BIAS, dtype, eps, C)
        grad_out = tl.load(GRAD_OUT + at, mask=inside, other=0.0).to(dtype)
        h = tl.dot(weight_1, tl.trans(y), input_precision=PRECISION) + bias
        grad_h = tl.dot(weight_2, tl.trans(grad_out), input_precision=PRECISION)  # (dout W2)^T
        grad_h = tl.where(h > 0, grad_h, 0.0)
        grad_bias_1 += tl.sum(grad_h, 1)
        # dW1 += dh^T y
        grad_weight_1 = tl.dot(grad_h.to(dtype), y, grad_weight_1, input_precision=PRECISION)
        h = tl.maximum(h, 0.0).to(dtype)
        # dW2^T += relu(h)^T dout
        grad_weight_2 = tl.dot(h, grad_out, grad_weight_2, input_precision=PRECISION)
    SUMS += tl.program_id(1) * (2 * HIDDEN * C + HIDDEN)
    tl.store(SUMS + hidden[:, None] * C + channel[None, :], grad_weight_1)
    SUMS += HIDDEN * C
    tl.store(SUMS + hidden, grad_bias_1)
    SUMS += HIDDEN
    tl.store(SUMS + channel[None, :] * HIDDEN + hidden[:, None], grad_weight_2)


class TransitionFunction(torch.autograd.Function):
    """Compute x + transition(x), x [..., C].

    The parameters are weight and bias of the norm, of the first and of the second projection. Kept
    for later: x alone.
    """

    @staticmethod
    def forward(ctx, x: Tensor, eps: float, *parameters: Tensor) -> Tensor:
        dtype = gemm_dtype(x)
        x = x.contiguous()
        *inputs, last_bias = x, *with_casts(parameters, dtype)
        ctx.save_for_backward(*inputs)
        ctx.parameters = parameters
        ctx.sizes = {"HIDDEN": len(parameters[2]), "eps": eps}
        out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, dtype))
        options = row_options("transition_forward", x, dtype, len(parameters[2]))
        programs = triton.cdiv(options["M"], options["BLOCK_M"])
        launch = wrap_triton(transition_forward_kernel)[(programs,)]
        launch(*inputs, last_bias, out, **ctx.sizes, **options)
        return out

    @without_second_derivative
    def backward(ctx, grad_out: Tensor):
        inputs = ctx.saved_tensors
        x, _, _, weight_1, *_ = inputs
        grad_out = grad_out.contiguous()
        grad_x = torch.empty_like(x)
        hidden = len(weight_1)
        options = row_options("transition_backward_input", x, weight_1.dtype, hidden)
        programs = triton.cdiv(options["M"], options["BLOCK_M"])
        sums = x.new_empty(programs, 3, x.shape[-1], dtype=torch.float32)
        launch = wrap_triton(transition_backward_input_kernel)[(programs,)]
        launch(*inputs, grad_out, grad_x, sums, **ctx.sizes, **options)

        def compute(grad_linears: Tensor, grad_bias_and_norm: Tensor) -> None:
            options = row_options("transition_backward_weights", x, weight_1.dtype, hidden)
            slices = triton.cdiv(hidden, options["BLOCK_N"])
            most = triton.cdiv(options["M"], options["BLOCK_M"])
            programs = min(triton.cdiv(options.pop("PROGRAMS"), slices), most)
            parts = x.new_empty(programs, len(grad_linears), dtype=torch.float32)
            launch = wrap_triton(transition_backward_weights_kernel)[(slices, programs)]
            launch(*inputs, grad_out, parts, PROGRAMS=programs, **ctx.sizes, **options)
            sum_parts(parts, grad_linears)
            sum_parts(sums, grad_bias_and_norm)

        groups = ctx.parameters[2:5], (ctx.parameters[5], *ctx.parameters[:2])
        return grad_x, None, *parameter_gradients(ctx, groups, compute, grad_out, sums, *inputs)


class Transition(nn.Module):
    """Two-layer perceptron on each position."""

    def __init__(self, dim: int, factor: int, fusions: Fusions):
        super().__init__()
        self.fused = fusions.transition_fusion
        self.linear_1 = nn.Linear(dim, factor * dim)
        self.linear_2 = nn.Linear(factor * dim, dim)
        self.layer_norm = nn.LayerNorm(dim)  # one launch adds its gradients and the last bias's up

    def forward(self, x: Tensor) -> Tensor:
        """Update x [..., C]."""
        if not self.fused:
            return x + self.linear_2(F.relu(self.linear_1(self.layer_norm(x))))
        first = self.linear_1.parameters()
        second = self.linear_2.parameters()
        if x.shape[-1] <= 256 // gemm_dtype(x).itemsize:  # a row fits into the registers whole
            parameters = *self.layer_norm.parameters(), *first, *second
            return TransitionFunction.apply(x, self.layer_norm.eps, *parameters)
        x, hidden, _ = normed_projection(self.layer_norm, x, *first, relu=True)
        return x + Projection.apply(hidden, None, *second)


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
        self.linear_tf_z_i = nn.Linear(NUM_TOKENS, config.pair_dim)
        self.linear_tf_z_j = nn.Linear(NUM_TOKENS, config.pair_dim)
        self.linear_tf_m = nn.Linear(NUM_TOKENS, config.msa_dim)
        self.linear_msa_m = nn.Linear(NUM_TOKENS, config.msa_dim)
        self.linear_relpos = nn.Linear(2 * MAX_OFFSET + 1, config.pair_dim)
        self.fused = fusions.embedding_fusion

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embed tokens [B, S, N] -> msa [B, S, N, c_m], pair [B, N, N, c_z]."""
        position = torch.arange(tokens.shape[-1], device=tokens.device)
        offset = (position[:, None] - position).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
        if self.fused:
            query = tokens[:, 0]
            pair = (
                (self.linear_tf_z_i, query[:, :, None]),
                (self.linear_tf_z_j, query[:, None]),
                (self.linear_relpos, offset),
            )
            msa = (self.linear_tf_m, query[:, None]), (self.linear_msa_m, tokens)
            return embed(msa), embed(pair)
        alignment = one_hot(tokens, NUM_TOKENS)
        query = alignment[:, 0]
        pair = self.linear_tf_z_i(query)[:, :, None] + self.linear_tf_z_j(query)[:, None]
        pair = pair + self.linear_relpos(one_hot(offset, 2 * MAX_OFFSET + 1))
        return self.linear_msa_m(alignment) + self.linear_tf_m(query)[:, None], pair


class EmbeddingFunction(torch.autograd.Function):
    """Add up projections of one-hot vectors -> [..., C].

    ones [..., columns] are the vectors side by side and, in the next column, a one for the biases,
    padded with zeros. The parameters are weight and bias of each projection in turn. One product
    replaces a product, and a sum, for each of them.
    """

    @staticmethod
    def forward(ctx, ones: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(ones)
        ctx.parameters = parameters
        bias = torch.stack(parameters[1::2], 1).sum(1, keepdim=True)
        weight = torch.cat([*parameters[::2], bias], 1).to(ones.dtype)
        return F.linear(ones, F.pad(weight, (0, ones.shape[-1] - weight.shape[1])))

    @without_second_derivative
    def backward(ctx, grad: Tensor):
        (ones,) = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        widths = [weight.shape[1] for weight in ctx.parameters[::2]]

        def compute(*outs: Tensor) -> None:
            columns = torch.empty(grad.shape[1], ones.shape[-1], device=grad.device)
            matmul_out(grad, ones.flatten(0, -2), columns, direct=True)
            *parts, rest = columns.split([*widths, columns.shape[1] - sum(widths)], 1)
            for part, weight, bias in zip(parts, outs[::2], outs[1::2], strict=True):
                weight.view_as(part).copy_(part)
                bias.copy_(rest[:, 0])

        groups = [[parameter] for parameter in ctx.parameters]
        return None, *parameter_gradients(ctx, groups, compute, grad, ones)


def embed(parts: Sequence[tuple[nn.Linear, Tensor]]) -> Tensor:
    """Embed by several projections, given where the vector of each has its one [...]."""
    linears, places = zip(*parts, strict=True)
    parameters = [parameter for linear in linears for parameter in linear.parameters()]
    ends = [*itertools.accumulate(linear.in_features for linear in linears)]
    places = [place.long() + first for place, first in zip(places, (0, *ends), strict=False)]
    places = torch.broadcast_tensors(*places, torch.full_like(places[0], ends[-1]))
    width = triton.cdiv(ends[-1] + 1, 8) * 8  # a GEMM reads 16 bytes at a time
    kind = {"device": places[0].device, "dtype": gemm_dtype(parameters[0])}
    ones = torch.zeros(*places[0].shape, width, **kind)
    return EmbeddingFunction.apply(ones.scatter_(-1, torch.stack(places, -1), 1.0), *parameters)


# --- heads and their losses
# The loss of a head: cross-entropies of its logits, where a position counts. The distogram's logits
# are the sum of those of a pair and of its mirror image. The backward pass reads them again.
NUM_BINS, FIRST_EDGE, LAST_EDGE = 64, 2.0, 22.0  # distogram, in Angstrom
BIN_WIDTH = (LAST_EDGE - FIRST_EDGE) / NUM_BINS


@block_sizes({"BLOCK_M": 64})
@triton.jit
def head_loss_kernel(
    LOGITS, TARGETS, COUNTED, COUNTS, LOSSES, N, ROWS, factor: tl.constexpr,
    PAIRS: tl.constexpr, BINS: tl.constexpr, BLOCK_BINS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add up factor / max(count, 1) * cross-entropy over the rows that count: LOSSES [B, tiles].

    LOGITS is [B, rows, BINS], TARGETS and COUNTED are [B, rows], COUNTS [B] the number of rows that
    count. A program owns BLOCK_M rows of a sample.
    """
    tile = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    logits, is_target, counted = load_head(
        LOGITS, TARGETS, COUNTED, b, row, N, ROWS, PAIRS, BINS, BLOCK_BINS
    )  # fmt: skip
    highest = tl.max(logits, 1)
    error = tl.log(tl.sum(tl.exp(logits - highest[:, None]), 1)) + highest
    error -= tl.sum(tl.where(is_target, logits, 0.0), 1)
    loss = tl.sum(tl.where(counted, error, 0.0), 0)
    loss *= factor / tl.maximum(tl.load(COUNTS + b), 1)
    tl.store(LOSSES + b * tl.num_programs(0) + tile, loss)


@block_sizes({"BLOCK_M": 64})
@triton.jit
def head_loss_backward_kernel(
    LOGITS, TARGETS, COUNTED, COUNTS, GRAD, GRAD_LOGITS, N, ROWS, factor: tl.constexpr,
    PAIRS: tl.constexpr, BINS: tl.constexpr, BLOCK_BINS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute dlogits = factor / max(count, 1) * dloss * (softmax(logits) - onehot).

    It is 0 in rows that do not count. GRAD [] is dloss, GRAD_LOGITS is [B, rows, BINS]. With PAIRS
    it is twice as much: the logits of a pair are those of its mirror image, too. A program owns
    BLOCK_M rows of a sample.
    """
    b = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    logits, is_target, counted = load_head(
        LOGITS, TARGETS, COUNTED, b, row, N, ROWS, PAIRS, BINS, BLOCK_BINS
    )  # fmt: skip
    grad = tl.exp(logits - tl.max(logits, 1)[:, None])
    grad /= tl.sum(grad, 1)[:, None]
    grad -= is_target.to(tl.float32)
    grad *= tl.load(GRAD).to(tl.float32) * (factor / tl.maximum(tl.load(COUNTS + b), 1))
    if PAIRS:
        grad *= 2
    grad = tl.where(counted[:, None], grad, 0.0)
    label = tl.arange(0, BLOCK_BINS)
    at = GRAD_LOGITS + (b * ROWS + row)[:, None] * BINS + label[None, :]
    tl.store(at, grad, mask=(row < ROWS)[:, None] & (label < BINS)[None, :])


@triton.jit
def load_head(
    LOGITS, TARGETS, COUNTED, b, row, N, ROWS, PAIRS: tl.constexpr, BINS: tl.constexpr,
    BLOCK_BINS: tl.constexpr,
):  # fmt: skip
    """Load rows of sample b: logits [rows, BINS], is it the target, does a row count.

    Logits are [B, ROWS, BINS] in memory, with PAIRS plus those of the mirrored pairs. Beyond BINS
    they are -inf.
    """
    label = tl.arange(0, BLOCK_BINS)
    inside = (row < ROWS)[:, None] & (label < BINS)[None, :]
    LOGITS += b * ROWS * BINS
    logits = load_tile(LOGITS, row.to(tl.int64)[:, None] * BINS + label[None, :], inside)
    if PAIRS:
        mirrored = (row % N * N + row // N).to(tl.int64)[:, None]
        logits += load_tile(LOGITS, mirrored * BINS + label[None, :], inside)
    logits = tl.where((label < BINS)[None, :], logits, float("-inf"))
    target = tl.load(TARGETS + b * ROWS + row, mask=row < ROWS, other=0)
    counted = tl.load(COUNTED + b * ROWS + row, mask=row < ROWS, other=0) != 0
    return logits, label[None, :] == target[:, None], counted


class HeadLoss(torch.autograd.Function):
    """Compute `weight` times the head_loss below.

    With `pairs` S is N, and the logits are those of a pair plus those of its mirror image.
    """

    @staticmethod
    def forward(
        ctx, logits: Tensor, targets: Tensor, counted: Tensor, pairs: bool, weight: float
    ) -> Tensor:
        logits, targets, counted = (t.contiguous() for t in (logits, targets, counted))
        samples, depth, length, bins = logits.shape
        counts = counted.flatten(1).sum(1)
        options = {"N": length, "ROWS": depth * length, "PAIRS": pairs, "BINS": bins}
        options |= {"BLOCK_BINS": triton.next_power_of_2(bins), "factor": weight / samples}
        options |= blocks("head_loss")
        grid = triton.cdiv(depth * length, options["BLOCK_M"]), samples
        losses = logits.new_empty(math.prod(grid), 1, dtype=torch.float32)
        launch = wrap_triton(head_loss_kernel)[grid]
        launch(logits, targets, counted, counts, losses, **options)
        ctx.save_for_backward(logits, targets, counted, counts)
        ctx.grid, ctx.options = grid, options
        return sum_parts(losses)[0]

    @without_second_derivative
    def backward(ctx, grad: Tensor):
        grad_logits = torch.empty_like(ctx.saved_tensors[0])
        launch = wrap_triton(head_loss_backward_kernel)[ctx.grid]
        launch(*ctx.saved_tensors, grad, grad_logits, **ctx.options)
        return grad_logits, None, None, None, None


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

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear = nn.Linear(config.pair_dim, NUM_BINS)

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

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear = nn.Linear(config.msa_dim, NUM_TOKENS)

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


def sum_parts(
    parts: Tensor, out: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Add up the sums of all programs, float32 [parts, ...]: into `out`, or [...] in `dtype`.

    torch.sum is slower at many short parts.
    """
    chosen = blocks("sum_parts")
    out = torch.empty_like(parts[0], dtype=dtype) if out is None else out
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
    return Interpreted(kernel) if INTERPRETED else kernel


def gemm_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product takes x here."""
    kind = x.device.type
    cast = not x.is_meta and torch.is_autocast_enabled(kind)  # on "meta" FLOPs are counted
    return torch.get_autocast_dtype(kind) if cast else x.dtype


def with_casts(parameters: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """Return the parameters as kernels take them: weights of projections in this type."""
    return [p if p is None else cast_of(p, dtype if p.ndim == 2 else p.dtype) for p in parameters]


def parameter_gradients(
    ctx, groups: Sequence[Sequence[Tensor]], compute: Callable[..., None], *inputs: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ctx.parameters, in their order; None for those in no group.

    `compute` writes them from these inputs, maybe on a side stream: see gradients_of. So a backward
    pass itself launches only what the gradient of its input needs. What one launch writes side by
    side is a group.
    """
    grads = {}
    parameters = [parameter for group in groups for parameter in group]
    if any(parameter.requires_grad for parameter in parameters):
        written = gradients_of(groups, compute, *inputs)
        grads = dict(zip(parameters, written, strict=True))
    return tuple(grads.get(parameter) for parameter in ctx.parameters)


def fused_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of those parts of a module that kernels compute."""
    parts = [part for part in module.modules() if getattr(part, "fused", False)]
    return [parameter for part in parts for parameter in part.parameters()]


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

    def forward(
        self,
        msa: Tensor,
        pair: Tensor,
        sequences: Tensor | None = None,
        residues: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Update msa [B, S, N, c_m] and pair [B, N, N, c_z].

        sequences [B, S] and residues [B, N] are False for padding, which changes nothing elsewhere.
        Each part adds its update: a kernel that has the representation at hand does so. What does
        not fit is refused here, as a kernel goes by the sizes of one input.
        """
        (samples, depth, length, _), (msa_dim, pair_dim) = msa.shape, self.dims
        check_shape("msa", msa, samples, depth, length, msa_dim)
        check_shape("pair", pair, samples, length, length, pair_dim)
        check_shape("sequences", sequences, samples, depth)
        check_shape("residues", residues, samples, length)
        masks = (m if m is None else m.bool().contiguous() for m in (sequences, residues))
        sequences, residues = masks
        with cast_weights(fused_parameters(self), gemm_dtype(msa)):
            msa, pair = self.msa_att_row(msa, pair, residues)
            msa = self.msa_att_col(msa, sequences)
            msa = self.msa_transition(msa)
            msa, pair = self.outer_product_mean(msa, pair, sequences)
            pair = self.tri_mul_out(pair, residues)
            pair = self.tri_mul_in(pair, residues)
            pair = self.tri_att_start(pair, residues)
            pair = self.tri_att_end(pair, residues)
            pair = self.pair_transition(pair)
        return msa, pair


def check_shape(name: str, tensor: Tensor | None, *shape: int) -> None:
    """Raise ValueError for another shape, or an empty one."""
    if tensor is not None and (tensor.shape != shape or not tensor.numel()):
        raise ValueError(f"{name} must be {[*shape]} and not empty, not {[*tensor.shape]}")


class TinyOpenFold(nn.Module):
    """Chain input embedding, Evoformer stack, distogram and masked-MSA heads."""

    TARGETS = ("true_tokens", "masked", "coords", "observed")

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.config, self.fusions, self.side = config, fusions, SideStreams()
        self.input_embedder = InputEmbedder(config, fusions)
        blocks = (EvoformerBlock(config, fusions) for _ in range(config.num_blocks))
        self.blocks = nn.ModuleList(blocks)
        self.distogram = DistogramHead(config)
        self.masked_msa = MaskedMSAHead(config)

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
        overlap = self.fusions.overlap and self.fusions.fused_optimizer and torch.is_grad_enabled()
        trains = all(parameter.requires_grad for parameter in self.input_embedder.parameters())
        self.side.begin_step(overlap and trains)  # before any product of the library
        samples, depth, length = tokens.shape
        # A row of pairs then begins at a multiple of 16 bytes, which kernels and GEMMs load at a
        # time: 173 residues took longer than 176.
        kernels = self.fusions.triton_attention or self.fusions.triton_triangle
        padding = (0, -length % 8) if kernels else (0, 0)
        if any(padding):
            if residues is None:
                residues = tokens.new_ones(samples, length, dtype=torch.bool)
            tokens, residues = F.pad(tokens, padding, value=GAP), F.pad(residues, padding)
        msa, pair = self.input_embedder(tokens)
        if self.side.active:  # the embedding's gradients, the last ones, are on the main stream
            msa.register_hook(self.side.join)
            pair.register_hook(self.side.join)
        fused_loss = self.fusions.loss_fusion and true_tokens is not None
        weights = fused_parameters(self.blocks)
        of_heads = [*self.distogram.parameters(), *self.masked_msa.parameters()]
        weights += of_heads if fused_loss else []
        with cast_weights(weights, gemm_dtype(msa), self.side):
            for block in self.blocks:
                inputs = (msa, pair, sequences, residues)
                if self.config.checkpoint_blocks:  # without random numbers: a block draws none
                    options = {"use_reentrant": False, "preserve_rng_state": False}
                    msa, pair = checkpoint(block, *inputs, **options)
                else:
                    msa, pair = block(*inputs)
            if fused_loss:
                distogram = Projection.apply(pair, None, *of_heads[:2])
                masked_msa = Projection.apply(msa, None, *of_heads[2:])
        if true_tokens is None:
            masked_msa, distogram = self.masked_msa(msa), self.distogram(pair)
            distogram = distogram[:, :length, :length]
            return {"masked_msa": masked_msa[:, :, :length], "distogram": distogram}
        check_shape("true_tokens", true_tokens, samples, depth, length)
        check_shape("masked", masked, samples, depth, length)
        check_shape("coords", coords, samples, length, 3)
        check_shape("observed", observed, samples, length)
        masked, observed = masked.bool(), observed.bool()  # 0 and 255, for example
        if any(padding):  # where nothing counts
            true_tokens, masked = F.pad(true_tokens, padding), F.pad(masked, padding)
            coords, observed = F.pad(coords, (0, 0, *padding)), F.pad(observed, padding)
        bins, known = self.distogram.targets(coords, observed)
        if fused_loss:
            self.side.return_workspaces()  # the backward pass, in another thread, has its own
            distogram = HeadLoss.apply(distogram, bins, known, True, 0.3)
            return distogram + HeadLoss.apply(masked_msa, true_tokens, masked, False, 2.0)
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
    """Build AdamW over all parameters: a launch for each block, or a few of PyTorch's own."""
    if args.fused_optimizer:
        parts = model.input_embedder, *model.blocks, model.distogram, model.masked_msa
        groups = [list(part.parameters()) for part in parts]
        return FusedAdamW(groups, args.learning_rate, model.side)
    rate = args.learning_rate
    if args.device == "cuda":  # a tensor, so that a captured step follows a scheduler
        rate = torch.tensor(rate, device=next(model.parameters()).device)
    return torch.optim.AdamW(model.parameters(), rate, fused=True, capturable=args.cuda_graph)


# --- arguments of the model
VERSION = 4
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
    if not args.cuda_graph:
        return {"overlap": "it needs a graph, and this run has none"}
    if not args.fused_optimizer:
        return {"overlap": "it needs fused-optimizer, which knows where gradients are written"}
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
    held = 512 // dtype.itemsize  # channels of a row that a program holds whole
    for name, rows, widest in (
        ("triton_attention", "msa pair", 1024),
        ("triton_outer_product", "msa", 1024),
        ("triton_outer_product", "pair", held),
        ("transition_fusion", "msa pair", 1024),
    ):
        for row in rows.split():
            width = getattr(args, f"{row}_dim")
            if not 16 <= width <= widest or width.bit_count() != 1:
                missing[name] = f"--{row}-dim {width} is no power of two from 16 to {widest}"
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
    if args.torch_compile:
        why = "a compiler does not see what V4 launches"
        parser.error(f"--enable-torch-compile: {why}; tiny_openfold_v3.py can be compiled")
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
    if any(getattr(args, name) for _, name, _ in FUSIONS if name != "overlap"):
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


# --- streams
# Copied from dev/parts/streams.py by dev/sync_parts.py: edit it there.
# A forward pass casts its weights together, and gradients are written where AdamW reads them. In a
# step that is captured as a graph, casts, weight gradients and updates overlap the rest.
CASTS: ContextVar[dict[Tensor, Tensor]] = ContextVar("CASTS")  # of parameters, in a forward pass


def side_by_side(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Allocate tensors of these shapes as one piece, each from a multiple of 64 elements on."""
    sizes = [triton.cdiv(t.numel(), 64) * 64 for t in tensors]
    gaps = any(t.numel() % 64 for t in tensors)
    make = torch.zeros if gaps and INTERPRETED else torch.empty  # which warns of large numbers
    piece = make(sum(sizes), device=tensors[0].device, dtype=dtype)
    parts = zip(piece.split(sizes), tensors, strict=True)
    return [part[: t.numel()].view(t.shape) for part, t in parts]


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that lie as side_by_side allocates them as one [elements]; None for others.

    It has the gaps between them, too, in which is anything.
    """
    first = tensors[0]
    last = tensors[-1]
    size = 0
    for t in tensors:
        place = first.data_ptr() + size * first.element_size()
        if t.data_ptr() != place or t.dtype != first.dtype or not t.is_contiguous():
            return None
        size += triton.cdiv(t.numel(), 64) * 64
    one = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return first.detach().as_strided((size - -last.numel() % 64,), (1,)) if one else None


def cast_of(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in this type: the cast of cast_weights, else one of its own."""
    cast = CASTS.get({}).get(parameter)
    usable = cast is not None and cast.dtype == dtype
    return cast if usable else parameter.detach().to(dtype).contiguous()


@contextlib.contextmanager
def cast_weights(
    weights: Iterable[Tensor], dtype: torch.dtype, side: SideStreams | None = None
) -> Iterator[None]:
    """Cast weights for the operations inside, in one launch if they lie side by side.

    Each forward pass has casts of its own, which its backward pass keeps: so weights may change in
    any way between two passes. Give no `side` where it may be a backward pass that needs them
    again: on the side stream they could get memory that the main stream still reads.
    """
    known = CASTS.get({})
    weights = [w for w in weights if w.dtype != dtype and w not in known]
    casts = []
    if weights:
        side = side or SideStreams()
        with torch.no_grad(), side.beside(side.gradients):
            casts = side_by_side(weights, dtype)
            one = as_one(weights)
            if one is None:
                torch._foreach_copy_(casts, weights)
            else:
                as_one(casts).copy_(one)
    token = CASTS.set(known | dict(zip(weights, casts, strict=True)))
    try:
        yield
    finally:
        CASTS.reset(token)


def capturing() -> bool:
    """Tell whether a graph is captured now."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class SideStreams:
    """Overlap casts, weight gradients and updates with the main stream of a training step.

    For a step that is captured as a graph: that stores what depends on what, not the order of
    launches, so work on a side stream runs as soon as there is room for it. One step; time goes
    down, and a stream waits where an arrow ends:

        main (forward, backward)        gradients                 updates
        begin_step -------------------> casts of a layer
        forward pass of the layer <---- done
        grad of layer L's input
        weight no longer needed ------> run: its gradient ------> AdamW
        DEPTH pieces of work later,
        or BYTES of inputs <----------- done: its inputs may be freed
        grad of the embedding <-------- join: all of them
        end of optimizer.step <---------------------------------- all of them
    """

    DEPTH = 4
    BYTES = 2 * 10**8

    def __init__(self):
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.groups: dict[Tensor, list[Tensor]] = {}  # the optimizer's, of each parameter
        self.begin_step(False)

    def __reduce__(self) -> tuple:
        return SideStreams, ()  # a copy of a model or parameter has no optimizer

    def begin_step(self, overlap: bool) -> None:
        """Start a step at its forward pass; `overlap` has an effect while a graph is captured."""
        self.active = overlap and capturing()
        self.joined = not self.active
        self.gradients = self.updates = None  # the main stream
        # cleared here, as a failed capture does not end its step
        self.pending = collections.deque()  # of events, and what the work before them reads
        self.written: dict[Tensor, tuple] = {}  # event, address and version of a gradient
        self.places: dict[Tensor, Tensor | None] = {}  # for gradients; None once it is taken
        self.return_workspaces()
        if self.active:
            self.main = torch.cuda.current_stream()
            self.streams = self.streams or (torch.cuda.Stream(), torch.cuda.Stream())
            self.gradients, self.updates = self.streams
            for stream in self.streams:  # a graph may only wait for streams that belong to it
                stream.wait_stream(self.main)

    def return_workspaces(self) -> None:
        """Give memory back that GEMMs keep for each stream and thread; two streams need more."""
        if self.active:
            torch._C._cuda_clearCublasWorkspaces()

    @contextlib.contextmanager
    def beside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Launch what is inside on this stream; what follows waits for it."""
        with torch.cuda.stream(stream):
            yield
        if stream:
            torch.cuda.current_stream().wait_stream(stream)

    def run(self, work: Callable, grads: dict[Tensor, Tensor], inputs: Sequence[Tensor]) -> None:
        """Run work that writes gradients of parameters; until then its inputs are not freed."""
        current = torch.cuda.current_stream()
        self.gradients.wait_stream(current)
        with torch.cuda.stream(self.gradients):
            work()
        done = self.gradients.record_event()
        self.written |= {p: (done, grad.data_ptr(), grad._version) for p, grad in grads.items()}
        self.pending.append((done, sum(tensor.nbytes for tensor in inputs), inputs))
        while len(self.pending) > self.DEPTH or sum(n for _, n, _ in self.pending) > self.BYTES:
            current.wait_event(self.pending[0][0])
            self.pending.popleft()

    def place(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Return where AdamW reads these gradients [elements]; None where a copy is needed."""
        for group in (self.groups[p] for p in parameters if p not in self.places):
            self.places |= zip(group, side_by_side(group, torch.float32), strict=True)
        places = [self.places[p] for p in parameters]
        if any(place is None for place in places):
            return None
        self.places |= dict.fromkeys(parameters)
        one = as_one(places)
        whole = one is not None and len(one) == sum(p.numel() for p in parameters)
        return one.data if whole else None  # .data: views would share one version counter

    def changed(self, parameter: Tensor) -> bool:
        """Tell whether its gradient is not, or no longer, what the side stream writes."""
        now = parameter.grad.data_ptr(), parameter.grad._version
        return now != self.written.get(parameter, (None,))[1:]

    def wait_for(self, parameters: Sequence[Tensor]) -> None:
        """Let the current stream wait for these gradients; else for all of the main stream."""
        if self.active:
            waits = {*parameters}
            events = [event for p, (event, *_) in self.written.items() if p in waits]
            if not events or any(map(self.changed, parameters)):
                events = [self.main.record_event()]
            torch.cuda.current_stream().wait_event(events[-1])  # of one stream: after the others

    def join(self, *unused) -> None:
        """Let the main stream wait for all gradients; later work of this step runs on it.

        Raises RuntimeError if autograd changed a gradient while a side stream computed it.
        """
        if not self.joined:
            self.joined = True
            torch.cuda.current_stream().wait_stream(self.gradients)
            self.pending.clear()
            if any(p.grad is not None and self.changed(p) for p in self.written):
                wrong = "a weight got more than one gradient in a backward pass"
                raise RuntimeError(f"overlap: {wrong}: use --disable-overlap")


def gradients_of(
    groups: Sequence[Sequence[Tensor]], compute: Callable[..., None], *inputs: Tensor,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of groups of parameters, which `compute` makes of these inputs.

    `compute` gets a tensor [elements] for each group, and writes the gradients of the group's
    parameters into it, one after the other. Call this last: in a graph a parameter may be updated
    as soon as its gradient is there. Nothing overlaps where autograd or a hook reads a gradient.
    """
    parameters = [p for group in groups for p in group]
    side = getattr(parameters[0], "side", None)
    overlaps = side is not None and not side.joined
    placed = side is not None and dtype == torch.float32
    for p in parameters:
        if p.is_leaf and p.grad is not None:  # autograd adds the second gradient, in float32
            p.grad = p.grad.to(p.dtype)
            overlaps = placed = False
        overlaps &= not (p._backward_hooks or p._post_accumulate_grad_hooks)
    outs = []
    grads = {}
    for group in groups:
        sizes = [p.numel() for p in group]
        out = side.place(group) if placed else None
        outs.append(parameters[0].new_empty(sum(sizes), dtype=dtype) if out is None else out)
        parts = zip(group, outs[-1].split(sizes), strict=True)
        grads |= {p: part.view_as(p) for p, part in parts}
    if overlaps:
        side.run(partial(compute, *outs), grads, inputs)
    else:
        compute(*outs)
    return list(grads.values())


WIDE_RESULTS = "dtype_out" in torch.ops.aten.mm.overloads()  # from PyTorch 2.8 on


def matmul_out(grad: Tensor, x: Tensor, out: Tensor, direct: bool) -> None:
    """Write grad^T x [N, K] of grad [T, N] and x [T, K] into out; `direct`: without a cast."""
    if out.dtype == x.dtype:
        torch.mm(grad.t(), x, out=out)
    elif direct and WIDE_RESULTS and x.is_cuda:
        torch.mm(grad.t(), x, out_dtype=out.dtype, out=out)
    else:
        out.copy_(grad.t() @ x)


# --- end of streams


# --- optimizer
# Copied from dev/parts/optimizer.py by dev/sync_parts.py: edit it there.
# AdamW is a kernel, which reads weights and gradients where they lie.


@block_sizes({"BLOCK": 1024, "PROGRAMS": 1024})
@triton.jit
def adamw_kernel(
    WEIGHTS, GRADS, AVERAGES, SQUARES, POWER1, POWER2, LR, SCALE, FOUND_INF, size,
    share1, share2, eps, decay, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Update weights w from their gradients g.

        m += (1 - beta1) * (g - m);  v += (1 - beta2) * (g^2 - v);  c = 1 - beta^steps
        w = w * (1 - lr * decay) - lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)

    WEIGHTS, GRADS, AVERAGES (m), SQUARES (v) [size]; share is 1 - beta, POWER [] beta^steps, LR []
    the learning rate. SCALE [] and FOUND_INF [] are a gradient scaler's, or None: gradients are
    divided by SCALE, and nothing is updated if FOUND_INF. A program owns every PROGRAMS-th block of
    BLOCK elements.
    """
    if FOUND_INF is not None:
        size = tl.where(tl.load(FOUND_INF) > 0, 0, size)
    lr = tl.load(LR).to(tl.float32)
    root_of_correction = tl.sqrt(1 - tl.load(POWER2)).to(tl.float32)
    rate = lr / (1 - tl.load(POWER1)).to(tl.float32)
    for start in range(tl.program_id(0) * BLOCK, size, PROGRAMS * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        inside = at < size
        grad = tl.load(GRADS + at, mask=inside, other=0.0).to(tl.float32)
        if SCALE is not None:
            grad /= tl.load(SCALE)
        average = tl.load(AVERAGES + at, mask=inside, other=0.0)
        average += share1 * (grad - average)
        square = tl.load(SQUARES + at, mask=inside, other=0.0)
        square += share2 * (grad * grad - square)
        weight = tl.load(WEIGHTS + at, mask=inside, other=0.0) * (1 - lr * decay)
        weight -= rate * average / (tl.sqrt(square) / root_of_correction + eps)
        tl.store(AVERAGES + at, average, mask=inside)
        tl.store(SQUARES + at, square, mask=inside)
        tl.store(WEIGHTS + at, weight, mask=inside)


class Options(dict):
    """The optimizer's options: a learning rate that is assigned goes to where a graph reads it."""

    def __setitem__(self, name: str, value: object) -> None:
        super().__setitem__(name, self["lr"].fill_(value) if name == "lr" else value)

    def update(self, *others: dict, **more: object) -> None:
        for name, value in dict(*others, **more).items():
            self[name] = value


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019): one launch for each of `groups`, which lie side by side.

    Parameters that have been given other memory are updated there, one by one. `side`: the model's
    streams. On several GPUs it replaces DistributedDataParallel: call average_gradients before
    every step.
    """

    _step_supports_amp_scaling = True  # the kernel divides by GradScaler's scale and skips a step
    averaged = False  # over several GPUs

    def __init__(
        self, groups: Iterable[list[nn.Parameter]], lr: float, side: SideStreams | None = None
    ):  # fmt: skip
        self.groups, self.side = list(groups), side or SideStreams()
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        super().__init__([p for group in self.groups for p in group], defaults)
        self.parameters = self.param_groups[0]["params"]
        self.steps = self.parameters[0].new_zeros(len(self.parameters), dtype=torch.float64)
        rate = self.steps.new_tensor(lr)
        self.param_groups = [Options(self.param_groups[0], lr=rate)]
        self.counts = dict.fromkeys(self.parameters, 0)  # the same on the host, skipped ones too
        pieces = (side_by_side(self.parameters, torch.float32) for _ in range(3))
        for p, *own in zip(self.parameters, *pieces, self.steps, strict=True):
            weight, average, square, step = own
            p.data, p.side = weight.copy_(p.detach()), self.side
            self.state[p] = {"step": step, "exp_avg": average.zero_(), "exp_avg_sq": square.zero_()}
        for group in self.groups:
            self.side.groups |= dict.fromkeys(group, group)
        if dist.is_initialized():  # one seed gives equal weights on equal machines only
            dist.broadcast(as_one(self.parameters), 0)

    def __getstate__(self) -> dict:
        raise TypeError("FusedAdamW: copy or save its state_dict, not the optimizer")

    def add_param_group(self, param_group: dict) -> None:
        if self.param_groups:
            raise ValueError("FusedAdamW: build a new one for more parameters")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict) -> None:
        """Copy options and state to where the kernel reads them; ValueError if they do not fit."""
        loaded, own = state_dict["state"], self.state_dict()["state"]
        shapes = [{i: v["exp_avg"].shape for i, v in state.items()} for state in (loaded, own)]
        if shapes[0] != shapes[1]:
            wrong = "the state is of other parameters, or in another order"
            raise ValueError(f"{wrong}, such as that of PyTorch's AdamW")
        options = {**state_dict["param_groups"][0], "params": self.parameters}
        self.param_groups[0].update(options)
        for i, p in enumerate(self.parameters):
            self.counts[p] = int(loaded[i]["step"])
            for name, value in self.state[p].items():
                value.copy_(loaded[i][name])

    def collect(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return gradients that lie side by side: copies if they do not."""
        grads = [p.grad for p in parameters]
        if as_one(grads) is not None:
            return grads
        copies = side_by_side(grads, torch.float32)
        torch._foreach_copy_(copies, grads)
        return copies

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over all processes; a single process returns at once.

        Call it before a gradient scaler reads them, so that all skip the same steps. Raises
        RuntimeError if a parameter that needs a gradient has none, for which others would wait.
        """
        if not dist.is_initialized():
            return
        self.side.join()
        if any(p.grad is None and p.requires_grad for p in self.parameters):
            raise RuntimeError("FusedAdamW: on several GPUs each parameter needs a gradient")
        averages = {}
        with self.side.beside(self.side.updates):
            for group in reversed(self.groups):
                if present := [p for p in group if p.grad is not None]:
                    self.side.wait_for(present)
                    parts = self.collect(present)
                    dist.all_reduce(one := as_one(parts))
                    one /= dist.get_world_size()
                    averages |= zip(present, parts, strict=True)
        for p, average in averages.items():  # what reads the gradients has been waited for
            p.grad = average
        self.averaged = True

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient; in a graph with overlap as soon as it can."""
        if dist.is_initialized() and not self.averaged:
            raise RuntimeError("FusedAdamW: on several GPUs, call average_gradients before step")
        self.averaged = False
        self.side.join()
        present = [p for p in self.parameters if p.grad is not None]
        if not present:
            return
        for p in present:
            self.counts[p] += 1
            if (p.dtype, p.device) != (torch.float32, self.steps.device):
                raise TypeError(f"FusedAdamW: a parameter is {p.dtype} on {p.device} by now")
        skipped = getattr(self, "found_inf", None)
        with self.side.beside(self.side.updates):
            one = 1
            if skipped is not None:
                self.side.wait_for([])
                one = 1 - skipped
            whole = len(present) == len(self.parameters)
            for steps in [self.steps] if whole else [self.state[p]["step"] for p in present]:
                steps += one
            powers = [beta**self.steps for beta in self.param_groups[0]["betas"]]
            for group in reversed(self.groups):
                if present := [p for p in group if p.grad is not None]:
                    self.side.wait_for(present)
                    self.update(present, powers)

    def update(self, group: list[nn.Parameter], powers: list[Tensor]) -> None:
        """Update parameters by one launch if they lie side by side, else each where it lies."""
        weights = as_one(group) if len({self.counts[p] for p in group}) == 1 else None
        if weights is None and len(group) > 1:
            for p in group:
                self.update([p], powers)
            return
        memory = group[0].contiguous() if weights is None else weights
        states = [self.state[p] for p in group]
        moments = [as_one([state[name] for state in states]) for name in ("exp_avg", "exp_avg_sq")]
        powers = [power[states[0]["step"].storage_offset()] for power in powers]
        tensors = memory, as_one(self.collect(group)), *moments, *powers
        options, chosen, size = self.param_groups[0], blocks("adamw"), moments[0].numel()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        tensors += options["lr"], scale, found_inf
        shares = (1 - beta for beta in options["betas"])
        most = triton.next_power_of_2(triton.cdiv(size, chosen["BLOCK"]))
        programs = chosen["PROGRAMS"] = min(chosen["PROGRAMS"], most)
        launch = wrap_triton(adamw_kernel)[(programs,)]
        launch(*tensors, size, *shares, options["eps"], options["weight_decay"], **chosen)
        if weights is None:
            group[0].copy_(memory)
        torch.autograd.graph.increment_version(group)  # no kernel does


# --- end of optimizer


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

#!/usr/bin/env python3
"""TinyLlama V4: V3's kernels are fast; what still costs time lies between them.

Read V1 to V3 first: model, weights and loss stay the same. V3's kernels stay (triton-attention
includes triton-rotary). V4 saves casts (changes of type) and memory, and overlaps kernels.

direct-gradients   AdamW reads weight gradients as a GEMM (matrix product) wrote them: no cast
fused-optimizer    AdamW is one kernel
norm-from-output   for backward a norm saves x / rms(x) in the type of the GEMMs, not x in float32
overlap            streams (kernel queues) run weight gradients and updates beside the backward pass

Begin with Projection.backward: `compute` writes a weight's gradient to `out`, where FusedAdamW
reads it. Then read the drawing in SideStreams.

By default, a step on a GPU is one CUDA graph: recorded once, then started as a whole. In the graph,
kernels of different streams overlap where none needs the other. `overlap` needs the graph and
fused-optimizer. torch.compile does not see what V4 launches; to compile, use V3. Where a triton
flag is off, or a size fits no kernel, PyTorch runs.

Examples:
  python tiny_llama_v4.py --use-amp --compare-fusion                   all off against all on
  python tiny_llama_v4.py --use-amp --disable-overlap                  one kernel after the other
  python tiny_llama_v4.py --use-amp --verify-accuracy                  compare with all off
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
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
    from torch.utils.flop_counter import FlopCounterMode
except ImportError as error:
    print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
    sys.exit(4)


# --- configuration
@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, and the letters for them in shapes; B is the batch size."""

    vocab_size: int = 1000  # V
    hidden_dim: int = 512  # D
    num_layers: int = 8
    num_heads: int = 8  # H, of queries
    num_kv_heads: int = 4  # K, of keys and values
    intermediate_dim: int = 2048
    seq_len: int = 256  # S
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    blocks: str = "default"  # block sizes that --blocks replaces


@dataclass(frozen=True)
class Fusions:
    """Which fusions are on. Each field is a flag; the text beside `bool` is its help."""

    triton_rms_norm: Annotated[bool, "residual addition and norm as one kernel"] = True
    triton_attention: Annotated[bool, "rotary embedding and flash attention of packed heads"] = True
    triton_swiglu: Annotated[bool, "silu(gate) * up as one kernel"] = True
    triton_cross_entropy: Annotated[bool, "loss without a float32 copy of the logits"] = True
    direct_gradients: Annotated[bool, "weight gradients reach the optimizer without a cast"] = True
    fused_optimizer: Annotated[bool, "AdamW as one kernel"] = True
    norm_from_output: Annotated[bool, "a norm keeps its normalised input as GEMMs take it"] = True
    overlap: Annotated[bool, "in a graph, weight gradients and updates overlap the rest"] = True


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


def without_second_derivative(backward: Callable) -> staticmethod:
    """Make a Function's backward pass raise an error where autograd would differentiate it."""

    def checked(ctx, *grads: Tensor | None):
        if torch.is_grad_enabled():  # once_differentiable does not raise if grads are constants
            raise RuntimeError("create_graph: V4's kernels have no second derivatives; V1 has")
        return backward(ctx, *grads)

    return staticmethod(checked)


# --- rms norm: y = x / sqrt(mean(x^2) + eps) * weight
@block_sizes({"TILE": 2048, "num_warps": 2})
@triton.jit
def rms_norm_forward_kernel(
    X, UPDATE, WEIGHT, NORMED, SUMMED, XHAT, RSTD, rows, eps: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add an update to the residual stream x, and normalise the sum.

        x = x + update;  rstd = 1 / sqrt(mean(x^2) + eps);  xhat = x * rstd;  normed = xhat * weight

    X, UPDATE, NORMED, SUMMED, XHAT (or None) [rows, C], WEIGHT [C], RSTD [rows]. If UPDATE is
    None, SUMMED is not written. A program owns ROWS whole rows; its number is tl.program_id(0).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # those of this program
    channel = tl.arange(0, BLOCK_C)  # BLOCK_C: C rounded up to a power of two, as arange needs
    inside = (row < rows)[:, None] & (channel < C)[None, :]  # which elements exist
    at = row[:, None] * C + channel[None, :]  # where they are: offsets from a tensor's start
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    if UPDATE is not None:
        x += tl.load(UPDATE + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(SUMMED + at, x, mask=inside)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 1) / C + eps)
    weight = tl.load(WEIGHT + channel, mask=channel < C, other=0.0).to(tl.float32)
    x *= rstd[:, None]
    if XHAT is not None:
        tl.store(XHAT + at, x, mask=inside)
    tl.store(NORMED + at, x * weight[None, :], mask=inside)
    tl.store(RSTD + row, rstd, mask=row < rows)


@block_sizes({"TILE": 1024, "PROGRAMS": 1056, "num_warps": 2})
@triton.jit
def rms_norm_backward_kernel(
    GRAD_NORMED, GRAD_SUMMED, SAVED, WEIGHT, RSTD, GRAD_X, GRAD_UPDATE, GRAD_WEIGHT, rows,
    NORMALISED: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of x, of the update and of the weight.

        xhat = x * rstd;  g = dnormed * weight;  dweight = sum over rows of dnormed * xhat
        dx = rstd * (g - xhat * mean(g * xhat)) + dsummed;  dupdate = dx

    GRAD_NORMED, GRAD_SUMMED, SAVED, GRAD_X, GRAD_UPDATE [rows, C], WEIGHT [C], RSTD [rows],
    GRAD_WEIGHT [PROGRAMS, C]. SAVED is x or, if NORMALISED, xhat. Without an update GRAD_UPDATE is
    None. A program owns every PROGRAMS-th block of ROWS whole rows. Its sum of dweight is a row of
    GRAD_WEIGHT.
    """
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK_C)
    weight = tl.load(WEIGHT + channel, mask=channel < C, other=1.0).to(tl.float32)
    grad_weight = tl.zeros([ROWS, BLOCK_C], tl.float32)  # its rows are summed once, at the end
    for start in range(program * ROWS, rows, PROGRAMS * ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (channel < C)[None, :]
        at = row[:, None] * C + channel[None, :]
        rstd = tl.load(RSTD + row, mask=row < rows, other=0.0)[:, None]
        xhat = tl.load(SAVED + at, mask=inside, other=0.0).to(tl.float32)
        if not NORMALISED:
            xhat *= rstd
        grad = tl.load(GRAD_NORMED + at, mask=inside, other=0.0).to(tl.float32)  # dnormed
        grad_weight += grad * xhat
        grad *= weight[None, :]  # g
        grad = (grad - xhat * (tl.sum(grad * xhat, 1) / C)[:, None]) * rstd  # dx - dsummed
        grad += tl.load(GRAD_SUMMED + at, mask=inside, other=0.0).to(tl.float32)
        if GRAD_UPDATE is not None:
            tl.store(GRAD_UPDATE + at, grad, mask=inside)
        tl.store(GRAD_X + at, grad, mask=inside)
    tl.store(GRAD_WEIGHT + program * C + channel, tl.sum(grad_weight, 0), mask=channel < C)


class AddRMSNorm(torch.autograd.Function):
    """Compute norm(x + update) * weight in `dtype` and x + update [..., D]; update: None for none.

    Kept for the backward pass: the sum or, with `keep_normalised` where
    `dtype` takes less memory, the sum divided by its root mean square.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype,
        keep_normalised: bool,
    ):  # fmt: skip
        x = x.contiguous()
        update = None if update is None else update.contiguous()
        rows, programs, options = row_launch("rms_norm_forward", x)
        normed = torch.empty_like(x, dtype=dtype)
        rstd = x.new_empty(rows, dtype=torch.float32)
        summed = x if update is None else torch.empty_like(x)
        ctx.normalised = keep_normalised and dtype.itemsize < x.dtype.itemsize
        xhat = torch.empty_like(normed) if ctx.normalised else None
        scale = weight.contiguous()
        launch = wrap_triton(rms_norm_forward_kernel)[(programs,)]
        launch(x, update, scale, normed, summed, xhat, rstd, rows=rows, eps=eps, **options)
        ctx.save_for_backward(xhat if ctx.normalised else summed, scale, rstd)
        ctx.weight = weight
        ctx.update = update is not None
        return normed, summed

    @without_second_derivative
    def backward(ctx, grad_normed: Tensor, grad_summed: Tensor):
        saved, weight, rstd = ctx.saved_tensors
        grad_normed = grad_normed.contiguous()
        grad_summed = grad_summed.contiguous()
        rows, programs, options = row_launch("rms_norm_backward", saved)
        grad_x = torch.empty_like(grad_summed)
        grad_update = torch.empty_like(grad_normed) if ctx.update else None
        parts = weight.new_empty(programs, len(weight), dtype=torch.float32)
        tensors = grad_normed, grad_summed, saved, weight, rstd, grad_x, grad_update, parts
        options |= {"rows": rows, "NORMALISED": ctx.normalised}
        wrap_triton(rms_norm_backward_kernel)[(programs,)](*tensors, **options)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            (grad_weight,) = gradients_of(((ctx.weight,),), partial(sum_parts, parts), parts)
        return grad_x, grad_update, grad_weight, None, None, None


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension of x [..., D], computed in float32."""

    def __init__(self, dim: int, eps: float, fusions: Fusions):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.fusions = fusions

    def forward(self, x: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return x + update [..., D] normalised, in the type of the next GEMM, and the sum."""
        if self.fusions.triton_rms_norm:
            settings = self.eps, gemm_dtype(x), self.fusions.norm_from_output
            return AddRMSNorm.apply(x, update, self.weight, *settings)
        x = x if update is None else x + update
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype), x


# --- projection: y = x W^T; dW = dy^T x, written where AdamW reads it
class Projection(torch.autograd.Function):
    """Compute x weight^T [..., N] of x [..., K] in the type of the GEMMs and a weight [N, K].

    Columns of zeros make N a multiple of `multiple`.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, direct: bool, multiple: int):
        cast = cast_of(weight, x.dtype)
        if missing := -len(cast) % multiple:
            cast = torch.cat((cast, cast.new_zeros(missing, cast.shape[1])))
        ctx.save_for_backward(x, cast)
        ctx.weight = weight
        ctx.direct = direct
        ctx.whole = max(multiple, len(weight) // multiple * multiple)
        return F.linear(x, cast)

    @without_second_derivative
    def backward(ctx, grad: Tensor):
        x, cast = ctx.saved_tensors
        grad_x = grad @ cast if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            rows = grad.flatten(0, -2), x.flatten(0, -2)
            narrow = ctx.weight.is_leaf and getattr(ctx.weight, "grad_dtype", x.dtype) is None
            dtype = x.dtype if narrow else torch.float32

            def compute(out: Tensor) -> None:
                # dW = dy^T x; odd numbers of rows are slow, so the last few are a GEMM of their own
                parts = rows[0].split(ctx.whole, 1), out.view_as(ctx.weight).split(ctx.whole)
                for grads, part in zip(*parts, strict=True):
                    matmul_out(grads[:, : len(part)], rows[1], part, ctx.direct)

            (grad_weight,) = gradients_of(((ctx.weight,),), compute, *rows, dtype=dtype)
        return grad_x, grad_weight, None, None


def linear(x: Tensor, weight: Tensor, fusions: Fusions, multiple: int = 1) -> Tensor:
    """Compute x weight^T by Projection if one of its two fusions is on, else by PyTorch."""
    if not (fusions.direct_gradients or fusions.fused_optimizer):
        return F.linear(x, weight)
    return Projection.apply(x.to(gemm_dtype(x)), weight, fusions.direct_gradients, multiple)


class Linear(nn.Linear):
    """A projection without bias, [..., inputs] -> [..., outputs]."""

    def __init__(self, inputs: int, outputs: int, fusions: Fusions):
        super().__init__(inputs, outputs, bias=False)
        self.fusions = fusions

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.fusions)


# --- rotary embedding: y1 = x1 cos(t) - x2 sin(t), y2 = x2 cos(t) + x1 sin(t)
@block_sizes({"TILE": 2048})
@triton.jit
def rotary_kernel(
    QKV, COS, SIN, ROTATED, rows, seq, HEADS: tl.constexpr, VALUES: tl.constexpr,
    SIGN: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate query and key heads by the angle t of their position, or by -t (SIGN -1, backward).

    x1 and x2 are the halves of a head. QKV, ROTATED [rows, C]: a row is one of the HEADS heads of a
    token, of which the last VALUES are copied. COS, SIN [seq or more, C], by position. A program
    owns ROWS whole rows.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK_C // 2)
    inside = (row < rows)[:, None] & (channel < C // 2)[None, :]
    rotates = inside & (row % HEADS < HEADS - VALUES)[:, None]  # a value head's angle is 0
    position = (row // HEADS).to(tl.int32) % seq
    angle = position[:, None] * C + channel[None, :]
    cos = tl.load(COS + angle, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(SIN + angle, mask=rotates, other=0.0).to(tl.float32) * SIGN
    at = row[:, None] * C + channel[None, :]
    first = tl.load(QKV + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(QKV + at + C // 2, mask=inside, other=0.0).to(tl.float32)
    tl.store(ROTATED + at, first * cos - second * sin, mask=inside)
    tl.store(ROTATED + at + C // 2, second * cos + first * sin, mask=inside)


def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, values: int, sign: int) -> Tensor:
    """Rotate qkv [B, S, heads, head_dim] by `sign` times its angle, but for the last `values`."""
    rows, programs, options = row_launch("rotary", qkv)
    rotated = torch.empty_like(qkv)
    sizes = {"rows": rows, "seq": qkv.shape[1], "HEADS": qkv.shape[2], "VALUES": values}
    wrap_triton(rotary_kernel)[(programs,)](qkv, cos, sin, rotated, **sizes, SIGN=sign, **options)
    return rotated


class RotaryEmbedding(nn.Module):
    """Rotates channels i and i + head_dim / 2 of x [B, S, heads, head_dim] by their position."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        half = config.hidden_dim // config.num_heads // 2
        frequency = config.rope_theta ** (-torch.arange(half) / half)
        positions = triton.cdiv(config.seq_len, 8) * 8  # as many as the model makes of them
        angle = torch.outer(torch.arange(positions), frequency)  # t, for half of a head
        angle = angle.repeat(1, 2)[:, None]  # [S, 1, head_dim], the same for all heads
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


# --- attention: update = o_proj(softmax(q k^T / sqrt(head_dim)) v), causal
# QKV [B, S, H + 2 K, D] has the H query heads of a token, its K key heads, its K value heads. A key
# head serves a group of H / K query heads.
LOG2E = tl.constexpr(math.log2(math.e))  # scores are in base 2: the hardware computes exp2


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_N": 64},
    # three TF32 products need more registers, hence smaller blocks
    float32={"BLOCK_N": 32, "num_stages": 2},
    hip={"num_stages": 1},
    hip_float32={"BLOCK_N": 32, "num_stages": 1},
)
@triton.jit
def attention_forward_kernel(
    QKV, OUT, LOG_SUM_EXP, seq, scale: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute O = softmax(scale * Q K^T) V below the diagonal, and the logarithm of each row's sum.

    The softmax is online: row_max and row_sum are those of the keys so far, and what was summed up
    with an earlier maximum is multiplied by exp2(row_max - new_row_max).

    QKV as above, OUT [B, S, H, D], LOG_SUM_EXP [B, H, S] to the base 2. A program owns BLOCK_M
    queries of one head, and goes through their keys by BLOCK_N.
    """
    TOKEN: tl.constexpr = (H + 2 * K) * D  # elements of a token in QKV
    VALUE: tl.constexpr = K * D  # from a key head to its value head
    batch, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # most keys first
    query, key = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_D)
    token = batch * seq + query
    inside = (query < seq)[:, None] & (channel < D)[None, :]
    QUERIES = QKV + (token * TOKEN + head * D)[:, None] + channel[None, :]
    q = tl.load(QUERIES, mask=inside, other=0.0)
    KEYS = QKV + batch * seq * TOKEN + (H + head // (H // K)) * D
    key_at = key[:, None] * TOKEN + channel[None, :]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    diagonal = first // BLOCK_N * BLOCK_N
    for MASKED in tl.static_range(2):  # first the keys that every query of this block sees
        begin = diagonal if MASKED else 0
        end = tl.minimum(first + BLOCK_M, seq) if MASKED else diagonal
        for start in range(begin, end, BLOCK_N):
            at = KEYS + tl.cast(start, tl.int64) * TOKEN + key_at
            loaded = (start + key < seq)[:, None] & (channel < D)[None, :]
            k = tl.load(at, mask=loaded, other=0.0)
            v = tl.load(at + VALUE, mask=loaded, other=0.0)
            # S = Q K^T
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            if MASKED:
                seen = query[:, None] >= (start + key)[None, :]
                scores = tl.where(seen, scores, float("-inf"))
            # online softmax; the maximum is finite from the first block on: all queries see key 0
            new_row_max = tl.maximum(row_max, tl.max(scores, 1))
            p = tl.exp2(scores - new_row_max[:, None])
            rescale = tl.exp2(row_max - new_row_max)
            row_sum = row_sum * rescale + tl.sum(p, 1)
            # O += P V
            out = tl.dot(p.to(v.dtype), v, out * rescale[:, None], input_precision=PRECISION)
            row_max = new_row_max
    at = OUT + ((token * H + head) * D)[:, None] + channel[None, :]
    tl.store(at, out / row_sum[:, None], mask=inside)
    at = LOG_SUM_EXP + (batch * H + head) * seq + query
    tl.store(at, row_max + tl.log2(row_sum), mask=query < seq)


@triton.jit
def store_unrotated(
    GRAD, COS, SIN, grad, token_at, position, seq, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Rotate the gradient [ROWS, D] of a rotated head back, and store it.

        dx1 = dy1 cos(t) + dy2 sin(t);  dx2 = dy2 cos(t) - dy1 sin(t)

    token_at [ROWS]: offsets of the head in GRAD. position [ROWS]: of its tokens, below seq.
    """
    first, second = tl.split(tl.permute(tl.reshape(grad, (ROWS, 2, D // 2)), (0, 2, 1)))
    channel, inside = tl.arange(0, D // 2), (position < seq)[:, None]
    angle = position[:, None] * D + channel[None, :]
    cos = tl.load(COS + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(SIN + angle, mask=inside, other=0.0).to(tl.float32)
    at = token_at[:, None] + channel[None, :]
    tl.store(GRAD + at, first * cos + second * sin, mask=inside)
    tl.store(GRAD + at + D // 2, second * cos - first * sin, mask=inside)


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2},
    float32={"BLOCK_N": 32},
    hip={"BLOCK_N": 32, "num_stages": 1},
)
@triton.jit
def attention_backward_queries_kernel(
    QKV, OUT, LOG_SUM_EXP, GRAD, COS, SIN, DELTA, GRAD_QKV, seq, scale: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries, and delta, which that of the keys needs, too.

        P = exp(S - log_sum_exp);  dP = dO V^T;  delta = rowsum(dO * O)
        dS = P * (dP - delta);  dQ = scale * dS K

    QKV, OUT and LOG_SUM_EXP as in the forward kernel, GRAD (dO) as OUT, DELTA as LOG_SUM_EXP,
    GRAD_QKV as QKV, rotated back by COS and SIN. A program owns BLOCK_M queries of one head, and
    goes through their keys by BLOCK_N.
    """
    TOKEN: tl.constexpr = (H + 2 * K) * D  # elements of a token in QKV
    VALUE: tl.constexpr = K * D  # from a key head to its value head
    batch, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # most keys first
    query, key = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_D)
    token = batch * seq + query
    inside = (query < seq)[:, None] & (channel < D)[None, :]
    query_at = (token * TOKEN + head * D)[:, None] + channel[None, :]
    out_at = ((token * H + head) * D)[:, None] + channel[None, :]
    q = tl.load(QKV + query_at, mask=inside, other=0.0)
    grad = tl.load(GRAD + out_at, mask=inside, other=0.0)
    out = tl.load(OUT + out_at, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(DELTA + (batch * H + head) * seq + query, delta, mask=query < seq)
    LOG_SUM_EXP += (batch * H + head) * seq  # to this head's
    log_sum_exp = tl.load(LOG_SUM_EXP + query, mask=query < seq, other=0.0)
    KEYS = QKV + batch * seq * TOKEN + (H + head // (H // K)) * D
    key_at = key[:, None] * TOKEN + channel[None, :]
    grad_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    diagonal = first // BLOCK_N * BLOCK_N
    for MASKED in tl.static_range(2):  # first the keys that every query of this block sees
        begin = diagonal if MASKED else 0
        end = tl.minimum(first + BLOCK_M, seq) if MASKED else diagonal
        for start in range(begin, end, BLOCK_N):
            at = KEYS + tl.cast(start, tl.int64) * TOKEN + key_at
            loaded = (start + key < seq)[:, None] & (channel < D)[None, :]
            k = tl.load(at, mask=loaded, other=0.0)
            v = tl.load(at + VALUE, mask=loaded, other=0.0)
            # S = Q K^T
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            scores = scores - log_sum_exp[:, None]
            if MASKED:
                seen = query[:, None] >= (start + key)[None, :]
                scores = tl.where(seen, scores, float("-inf"))
            # dP = dO V^T
            grad_p = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
            # dS = P * (dP - delta)
            grad_scores = tl.exp2(scores) * (grad_p - delta[:, None])
            # dQ += dS K
            grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision=PRECISION)
    token_at = token * TOKEN + head * D
    store_unrotated(GRAD_QKV, COS, SIN, grad_q * scale, token_at, query, seq, D, BLOCK_M)


@block_sizes(
    {"BLOCK_M": 64, "BLOCK_N": 64},
    float32={"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1},
    hip={"BLOCK_M": 16, "num_stages": 1},
)
@triton.jit
def attention_backward_keys_kernel(
    QKV, LOG_SUM_EXP, GRAD, COS, SIN, DELTA, GRAD_QKV, seq, scale: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values; a key head has the sum over its query heads.

        P = exp(S - log_sum_exp);  dV = P^T dO;  dP = dO V^T
        dS = P * (dP - delta);  dK = scale * dS^T Q

    P, dP and dS are computed transposed, [keys, queries], so that no product has to transpose them.
    Tensors are those of the kernel of the queries, which has written DELTA. A program owns BLOCK_N
    keys of one key head, and goes through the queries that see them by BLOCK_M.
    """
    TOKEN: tl.constexpr = (H + 2 * K) * D  # elements of a token in QKV
    VALUE: tl.constexpr = K * D  # from a key head to its value head
    batch, kv_head = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    first = tl.program_id(1) * BLOCK_N
    query, key = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_D)
    inside = (key < seq)[:, None] & (channel < D)[None, :]
    key_at = ((batch * seq + key) * TOKEN + (H + kv_head) * D)[:, None] + channel[None, :]
    k = tl.load(QKV + key_at, mask=inside, other=0.0)
    v = tl.load(QKV + key_at + VALUE, mask=inside, other=0.0)
    query_at = query[:, None] * TOKEN + channel[None, :]
    grad_at = query[:, None] * (H * D) + channel[None, :]
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    below = tl.minimum((first + BLOCK_N + BLOCK_M - 1) // BLOCK_M * BLOCK_M, seq)
    for head in range(kv_head * (H // K), (kv_head + 1) * (H // K)):  # query heads of this group
        row = (batch * H + head) * seq
        for MASKED in tl.static_range(2):  # last the queries that see every key of this block
            begin = first // BLOCK_M * BLOCK_M if MASKED else below
            end = below if MASKED else seq
            for start in range(begin, end, BLOCK_M):
                token = batch * seq + start
                loaded = (start + query < seq)[:, None] & (channel < D)[None, :]
                q = tl.load(QKV + (token * TOKEN + head * D) + query_at, mask=loaded, other=0.0)
                grad = tl.load(GRAD + (token * H + head) * D + grad_at, mask=loaded, other=0.0)
                at = LOG_SUM_EXP + row + start + query
                log_sum_exp = tl.load(at, mask=start + query < seq, other=0.0)
                # S^T = K Q^T
                scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E)
                scores = scores - log_sum_exp[None, :]
                if MASKED:
                    seen = (start + query)[None, :] >= key[:, None]
                    scores = tl.where(seen, scores, float("-inf"))
                p = tl.exp2(scores)
                # dV += P^T dO
                grad_v = tl.dot(p.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
                # dP^T = V dO^T
                grad_p = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
                delta = tl.load(DELTA + row + start + query, mask=start + query < seq, other=0.0)
                # dS = P * (dP - delta)
                grad_scores = p * (grad_p - delta[None, :])
                # dK += dS^T Q
                grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=PRECISION)
    token_at = (batch * seq + key) * TOKEN + (H + kv_head) * D
    store_unrotated(GRAD_QKV, COS, SIN, grad_k * scale, token_at, key, seq, D, BLOCK_N)
    tl.store(GRAD_QKV + key_at + VALUE, grad_v, mask=inside)


def attention_sizes(qkv: Tensor, num_heads: int) -> dict:
    """Return sizes and scale, and what the three kernels are compiled for besides their blocks."""
    seq, packed, dim = qkv.shape[1:]
    return {
        "seq": seq,
        "scale": dim**-0.5,
        "H": num_heads,
        "K": (packed - num_heads) // 2,
        "D": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "PRECISION": dot_precision(qkv.dtype),
    }


def attention_forward(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return attention [B, S, H, D], and the base-2 logarithm of the softmax's sums [B, H, S]."""
    batch, seq, _, dim = qkv.shape
    chosen = blocks("attention_forward", qkv.dtype)
    out = qkv.new_empty(batch, seq, num_heads, dim)
    log_sum_exp = qkv.new_empty(batch, num_heads, seq, dtype=torch.float32)
    grid = (batch * num_heads, triton.cdiv(seq, chosen["BLOCK_M"]))
    sizes = attention_sizes(qkv, num_heads)
    wrap_triton(attention_forward_kernel)[grid](qkv, out, log_sum_exp, **sizes, **chosen)
    return out, log_sum_exp


def attention_backward(
    qkv: Tensor, out: Tensor, log_sum_exp: Tensor, cos: Tensor, sin: Tensor, grad: Tensor
) -> Tensor:
    """Compute the gradient of qkv, packed as it is."""
    batch, seq, num_heads, _ = out.shape
    sizes = attention_sizes(qkv, num_heads)
    delta = torch.empty_like(log_sum_exp)
    grad_qkv = torch.empty_like(qkv)
    tensors = log_sum_exp, grad, cos, sin, delta, grad_qkv
    chosen = blocks("attention_backward_queries", qkv.dtype)
    grid = batch * num_heads, triton.cdiv(seq, chosen["BLOCK_M"])
    wrap_triton(attention_backward_queries_kernel)[grid](qkv, out, *tensors, **sizes, **chosen)
    chosen = blocks("attention_backward_keys", qkv.dtype)
    grid = batch * sizes["K"], triton.cdiv(seq, chosen["BLOCK_N"])
    wrap_triton(attention_backward_keys_kernel)[grid](qkv, *tensors, **sizes, **chosen)
    return grad_qkv


class CausalAttention(torch.autograd.Function):
    """Compute causal attention [B, S, H, D] of packed heads [B, S, H + 2 K, D].

    Query and key heads are rotated by the angles in cos and sin [S or more, 1, D] first; D is 16,
    32, 64 or 128. Flash attention (Dao 2023): the backward pass computes the scores again from the
    saved sums. Its kernels rotate the gradients back as they store them.
    """

    @staticmethod
    def forward(ctx, qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor):
        qkv = rotary(qkv.contiguous(), cos, sin, (qkv.shape[2] - num_heads) // 2, 1)
        out, log_sum_exp = attention_forward(qkv, num_heads)
        ctx.save_for_backward(qkv, out, log_sum_exp, cos, sin)
        return out

    @without_second_derivative
    def backward(ctx, grad: Tensor):
        return attention_backward(*ctx.saved_tensors, grad.contiguous()), None, None, None


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, [B, S, D] -> [B, S, D]."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.hidden_dim // config.num_heads
        kv_dim = self.num_kv_heads * self.head_dim
        self.fusions = fusions
        if fusions.triton_attention:
            parts = {"q_proj": config.hidden_dim, "k_proj": kv_dim, "v_proj": kv_dim}
            self.qkv_proj = Linear(config.hidden_dim, sum(parts.values()), fusions)
            keep_separate_names(self, "qkv_proj", parts)  # in a state_dict, as in V1
        else:
            self.q_proj = Linear(config.hidden_dim, config.hidden_dim, fusions)
            self.k_proj = Linear(config.hidden_dim, kv_dim, fusions)
            self.v_proj = Linear(config.hidden_dim, kv_dim, fusions)
        self.o_proj = Linear(config.hidden_dim, config.hidden_dim, fusions)
        self.rotary = RotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        if self.fusions.triton_attention:
            qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
            angles = self.rotary.cos, self.rotary.sin
            return self.o_proj(CausalAttention.apply(qkv, self.num_heads, *angles).flatten(2))
        q = self.rotary(self.q_proj(x).view(batch, seq, self.num_heads, self.head_dim))
        k = self.rotary(self.k_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
        group = self.num_heads // self.num_kv_heads  # query heads that share a key/value head
        k, v = (t.repeat_interleave(group, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


# --- swiglu: update = down_proj(silu(gate_proj(x)) * up_proj(x))
@block_sizes({"TILE": 4096, "num_warps": 8})
@triton.jit
def swiglu_forward_kernel(
    GATE_UP, OUT, rows, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Compute out = silu(gate) * up, where silu(gate) = gate * sigmoid(gate).

    GATE_UP [rows, 2 C], a row holds all gates, then all ups; OUT [rows, C]. A program owns ROWS
    rows of BLOCK_C channels.
    """
    UP: tl.constexpr = C  # from a gate to its up
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (channel < C)[None, :]
    gate_at = row[:, None] * (2 * C) + channel[None, :]
    gate = tl.load(GATE_UP + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + gate_at + UP, mask=inside, other=0.0).to(tl.float32)
    at = OUT + row[:, None] * C + channel[None, :]
    tl.store(at, gate * tl.sigmoid(gate) * up, mask=inside)


@block_sizes({"TILE": 4096, "num_warps": 8})
@triton.jit
def swiglu_backward_kernel(
    GRAD, GATE_UP, GRAD_GATE_UP, rows, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Compute the gradients of gate and up; silu is computed again.

        s = sigmoid(gate);  dgate = dout * up * s * (1 + gate * (1 - s));  dup = dout * gate * s

    GRAD [rows, C], GATE_UP and GRAD_GATE_UP [rows, 2 C], all gates of a row first. A program owns
    ROWS rows of BLOCK_C channels.
    """
    UP: tl.constexpr = C  # from a gate to its up
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (channel < C)[None, :]
    gate_at = row[:, None] * (2 * C) + channel[None, :]
    at = GRAD + row[:, None] * C + channel[None, :]
    grad = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(GATE_UP + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + gate_at + UP, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(GRAD_GATE_UP + gate_at, grad * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
    tl.store(GRAD_GATE_UP + gate_at + UP, grad * gate * sigmoid, mask=inside)


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up [..., I] of gate_up [..., 2 I]."""
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    rows, programs, options = row_launch("swiglu_forward", out, whole=False)
    grid = (programs, triton.cdiv(out.shape[-1], options["BLOCK_C"]))
    wrap_triton(swiglu_forward_kernel)[grid](gate_up, out, rows=rows, **options)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Compute the gradient of gate_up, packed as it is."""
    rows, programs, options = row_launch("swiglu_backward", grad, whole=False)
    grad_gate_up = torch.empty_like(gate_up)
    grid = (programs, triton.cdiv(grad.shape[-1], options["BLOCK_C"]))
    tensors = grad, gate_up, grad_gate_up
    wrap_triton(swiglu_backward_kernel)[grid](*tensors, rows=rows, **options)
    return grad_gate_up


class SwiGLUActivation(torch.autograd.Function):
    """Compute silu(gate) * up [..., I] of gate_up [..., 2 I], gates first."""

    @staticmethod
    def forward(ctx, gate_up: Tensor):
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @without_second_derivative
    def backward(ctx, grad: Tensor):
        return swiglu_backward(grad.contiguous(), *ctx.saved_tensors)


class SwiGLU(nn.Module):
    """Gated MLP, [B, S, D] -> [B, S, D]."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.fusions = fusions
        if fusions.triton_swiglu:
            parts = {"gate_proj": config.intermediate_dim, "up_proj": config.intermediate_dim}
            self.gate_up_proj = Linear(config.hidden_dim, sum(parts.values()), fusions)
            keep_separate_names(self, "gate_up_proj", parts)  # in a state_dict, as in V1
        else:
            self.gate_proj = Linear(config.hidden_dim, config.intermediate_dim, fusions)
            self.up_proj = Linear(config.hidden_dim, config.intermediate_dim, fusions)
        self.down_proj = Linear(config.intermediate_dim, config.hidden_dim, fusions)

    def forward(self, x: Tensor) -> Tensor:
        if self.fusions.triton_swiglu:
            return self.down_proj(SwiGLUActivation.apply(self.gate_up_proj(x)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# --- loss: mean over tokens of log(sum(exp(logits))) - logits[next token]
@triton.jit
def next_token(LABELS, row, rows, seq):
    """Return the label of the token after this one; -100 for the last of its sample."""
    known = (row < rows) & (row % seq < seq - 1)
    return tl.load(LABELS + row + 1, mask=known, other=-100)


@block_sizes({"TILE": 4096})
@triton.jit
def cross_entropy_forward_kernel(
    LOGITS, LABELS, LOSSES, LOG_SUM_EXP, rows, seq, VOCAB: tl.constexpr, C: tl.constexpr,
    BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute loss = log(sum(exp(logits))) - logits[target] of each row; 0 for a target of -100.

    The sum is online, as that of attention. LOGITS [rows, C], of which columns from VOCAB on do not
    count, LABELS, LOG_SUM_EXP [rows], LOSSES [2, rows], the second 1 where there is a target. A
    row's target is the next token's label. A program owns ROWS rows, and goes through their columns
    by BLOCK_C.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_max = tl.full([ROWS], -3e38, tl.float32)  # not -inf, which a whole block may be
    row_sum = tl.zeros([ROWS], tl.float32)
    for start in range(0, C, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        inside = (row < rows)[:, None] & (column < C)[None, :]
        at = LOGITS + row[:, None] * C + column[None, :]
        logits = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        logits = tl.where((column < VOCAB)[None, :], logits, float("-inf"))
        new_row_max = tl.maximum(row_max, tl.max(logits, 1))
        rescale = tl.exp(row_max - new_row_max)
        row_sum = row_sum * rescale + tl.sum(tl.exp(logits - new_row_max[:, None]), 1)
        row_max = new_row_max
    log_sum_exp = row_max + tl.log(row_sum)
    target = next_token(LABELS, row, rows, seq)
    valid = (target >= 0) & (target < VOCAB)  # any other label but -100 makes the loss NaN
    logit = tl.load(LOGITS + row * C + target, mask=valid, other=float("nan")).to(tl.float32)
    tl.store(LOSSES + row, tl.where(target == -100, 0.0, log_sum_exp - logit), mask=row < rows)
    tl.store(LOSSES + rows + row, tl.where(target == -100, 0.0, 1.0), mask=row < rows)
    tl.store(LOG_SUM_EXP + row, log_sum_exp, mask=row < rows)


@block_sizes({"TILE": 4096})
@triton.jit
def cross_entropy_backward_kernel(
    GRAD, LOGITS, LABELS, LOG_SUM_EXP, SUMS, GRAD_LOGITS, rows, seq, VOCAB: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute dlogits = (softmax(logits) - onehot(target)) * dloss / n; 0 for a target of -100.

    GRAD (dloss) [], LABELS, LOG_SUM_EXP [rows], SUMS [2] of which n is the second, LOGITS,
    GRAD_LOGITS [rows, C], 0 from column VOCAB on. A program owns ROWS rows, and goes through their
    columns by BLOCK_C.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    target = next_token(LABELS, row, rows, seq)
    log_sum_exp = tl.load(LOG_SUM_EXP + row, mask=row < rows, other=0.0)
    grad = tl.where(target == -100, 0.0, tl.load(GRAD) / tl.load(SUMS + 1))
    for start in range(0, C, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        inside = (row < rows)[:, None] & (column < C)[None, :]
        at = row[:, None] * C + column[None, :]
        logits = tl.load(LOGITS + at, mask=inside, other=0.0).to(tl.float32)
        p = tl.exp(logits - log_sum_exp[:, None])
        p = tl.where((column < VOCAB)[None, :], p, 0.0)
        p -= tl.where(column[None, :] == target[:, None], 1.0, 0.0)
        tl.store(GRAD_LOGITS + at, p * grad[:, None], mask=inside)


class NextTokenLoss(torch.autograd.Function):
    """Compute the mean cross-entropy of the next token, float32, of logits [B, S, V or more].

    labels [B, S] are the same tokens. The kernels shift them, which saves small kernels; a label of
    -100 is ignored. Only the first V = `vocab` columns count.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, vocab: int):
        logits = logits.contiguous()
        labels = labels.contiguous()
        rows, programs, options = row_launch("cross_entropy_forward", logits, whole=False)
        losses = logits.new_empty(2, rows, dtype=torch.float32)
        log_sum_exp = torch.empty_like(losses[0])
        ctx.sizes = {"rows": rows, "seq": labels.shape[-1], "VOCAB": vocab}
        launch = wrap_triton(cross_entropy_forward_kernel)[(programs,)]
        launch(logits, labels, losses, log_sum_exp, **ctx.sizes, **options)
        sums = losses.sum(1)
        ctx.save_for_backward(logits, labels, log_sum_exp, sums)
        return sums[0] / sums[1]

    @without_second_derivative
    def backward(ctx, grad: Tensor):
        logits, *saved = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        _, programs, options = row_launch("cross_entropy_backward", logits, whole=False)
        launch = wrap_triton(cross_entropy_backward_kernel)[(programs,)]
        launch(grad, logits, *saved, grad_logits, **ctx.sizes, **options)
        return grad_logits, None, None


def next_token_loss(logits: Tensor, labels: Tensor, vocab: int, fusions: Fusions) -> Tensor:
    """Return the mean loss of logits [B, S, V]; labels [B, S] are input_ids, not shifted."""
    if fusions.triton_cross_entropy:
        return NextTokenLoss.apply(logits, labels, vocab)
    following = F.pad(labels[:, 1:], (0, 1), value=-100)  # -100: no token follows the last one
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


# --- sums of parts
# No kernel adds atomically: each program writes the sum over its own rows, and this one sums these,
# so that the same input gives the same bits.
@block_sizes({"TILE": 4096, "ROWS": 512, "num_warps": 8})
@triton.jit
def sum_parts_kernel(PARTS, OUT, parts, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the partial results of all programs: out = sum over p of parts[p].

    PARTS [parts, width], OUT [width]. A program owns BLOCK columns, and reads ROWS parts at a time.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < parts)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.load(PARTS + at, mask=inside, other=0.0)
    tl.store(OUT + column, tl.sum(total, 0), mask=column < width)


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """Write the sum of float32 parts [parts, ...], one for each program, into out.

    torch.sum is slower at many short parts.
    """
    chosen = blocks("sum_parts")
    rows = min(chosen.pop("ROWS"), triton.next_power_of_2(len(parts)))
    block = max(8, chosen.pop("TILE") // rows)
    launch = wrap_triton(sum_parts_kernel)[(triton.cdiv(out.numel(), block),)]
    launch(parts, out, parts=len(parts), width=out.numel(), ROWS=rows, BLOCK=block, **chosen)


# --- model
def gemm_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product takes x: that of autocast, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream [B, S, D]."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_dim, config.norm_eps, fusions)
        self.self_attn = Attention(config, fusions)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim, config.norm_eps, fusions)
        self.mlp = SwiGLU(config, fusions)

    def forward(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Take and return the residual stream and an update not yet added to it, both [B, S, D]."""
        normed, x = self.input_layernorm(x, update)
        normed, x = self.post_attention_layernorm(x, self.self_attn(normed))
        return x, self.mlp(normed)


class TinyLlama(nn.Module):
    """Llama (Touvron et al. 2023) with tied embeddings; parameters have Hugging Face's names."""

    TARGETS = ("labels",)  # arguments of forward that only the loss takes

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.config = config
        self.fusions = fusions
        self.side = SideStreams()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(DecoderLayer(config, fusions) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps, fusions)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [B, S, V] of input_ids [B, S]; with labels (the same tokens), the loss.

        Raises ValueError if there is no token, or more than the model's seq_len.
        """
        (batch, seq), longest = input_ids.shape, self.config.seq_len
        if not (batch and 0 < seq <= longest):
            raise ValueError(f"{batch} sequences of {seq} tokens: the model takes 1 to {longest}")
        if seq % 8 and self.fusions.triton_attention:
            # GEMMs are slow at odd numbers of tokens. No token sees those that are added behind it.
            input_ids = F.pad(input_ids, (0, -seq % 8))
            labels = None if labels is None else F.pad(labels, (0, -seq % 8), value=-100)
        weight = self.embed_tokens.weight
        trains = weight.requires_grad and torch.is_grad_enabled()
        self.side.begin_step(self.fusions.overlap and self.fusions.fused_optimizer and trains)
        x = self.embed_tokens(input_ids)
        update = None
        if self.side.active:  # the embedding's gradient comes last, on the main stream
            x.register_hook(self.side.join)
        projects = self.fusions.direct_gradients or self.fusions.fused_optimizer  # by Projection
        dtype = gemm_dtype(x) if projects else x.dtype
        for layer in self.layers:
            weights = (p for p in layer.parameters() if p.ndim == 2)
            with cast_weights(weights, dtype, self.side):
                x, update = layer(x, update)
        # The embedding has the same weight, to whose gradient autograd adds its own.
        multiple = 8 if self.fusions.triton_cross_entropy else 1  # rows at odd addresses are slow
        with cast_weights([weight], dtype, self.side):
            logits = linear(self.norm(x, update)[0], weight, self.fusions, multiple)
        if labels is None:
            return logits[:, :seq, : self.config.vocab_size]
        return next_token_loss(logits, labels, self.config.vocab_size, self.fusions)


def keep_separate_names(parent: nn.Module, fused: str, parts: dict[str, int]) -> None:
    """Have state_dict save and load `parent.<fused>.weight` as its parts: names and their rows."""

    def split(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: dict) -> None:
        weights = state.pop(f"{prefix}{fused}.weight").split(list(parts.values()))
        for part, weight in zip(parts, weights, strict=True):
            state[f"{prefix}{part}.weight"] = weight

    def merge(module: nn.Module, state: dict[str, Tensor], prefix: str, *unused) -> None:
        names = [f"{prefix}{part}.weight" for part in parts]
        if all(name in state for name in names):  # else load_state_dict reports what is missing
            state[f"{prefix}{fused}.weight"] = torch.cat([state.pop(name) for name in names])

    parent.register_state_dict_post_hook(split)
    parent.register_load_state_dict_pre_hook(merge)


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build the model: a seed gives the same weights in every version and fusion setting."""
    fusions = Fusions(**{name: getattr(args, name) for name in Fusions.__dataclass_fields__})
    with device:
        model = TinyLlama(config_of(args), fusions)
    if device.type != "meta":  # where tensors have shapes alone, to count FLOPs
        generator = torch.Generator().manual_seed(args.seed)
        # canonical names, so the order of the draws does not depend on what is fused
        state = model.state_dict()
        for name in sorted(state):
            if "norm" not in name:
                state[name] = torch.empty(state[name].shape).normal_(std=0.02, generator=generator)
        model.load_state_dict(state)
    return model


def join_neighbours(groups: list[list[nn.Parameter]]) -> list[list[nn.Parameter]]:
    """Join neighbouring groups while their float32 gradients take at most 16 MiB together.

    Each group is an all-reduce, which has a fixed cost. But the first group, whose gradients come
    last, has at most 8 MiB: no backward pass is left to hide its all-reduce.
    """
    joined, most = [groups[0]], 2**23
    for group in groups[1:]:
        if 4 * sum(p.numel() for p in (*joined[-1], *group)) <= most:
            joined[-1] = joined[-1] + group
        else:
            joined, most = [*joined, group], 2**24
    return joined


# From PyTorch 2.10 on the gradient of a float32 parameter may have another type. One in float16
# would not do: a gradient scaler refuses to unscale it.
NARROW_GRADIENTS = hasattr(Tensor, "grad_dtype")


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW over all parameters: one kernel, or a few launches of PyTorch's own."""
    if args.fused_optimizer:
        weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        norms = [p for p in model.parameters() if p.ndim == 1]
        groups = [[model.embed_tokens.weight], norms, *([weight] for weight in weights)]
        narrow = args.direct_gradients and NARROW_GRADIENTS and args.amp_dtype == "bfloat16"
        if dist.is_initialized():  # several GPUs sum in float32
            groups = join_neighbours(groups)
        elif narrow:
            for weight in weights:
                weight.grad_dtype = None  # any type
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
    add = parser.add_argument_group("model").add_argument
    for flag, low, default, letter, text in (
        ("vocab-size", 2, None, "V", f"(default: {ModelConfig.vocab_size}; 256 with --text-file)"),
        ("hidden-dim", 1, ModelConfig.hidden_dim, "D", "width of the residual stream"),
        ("num-layers", 1, ModelConfig.num_layers, "L", "transformer layers"),
        ("num-heads", 1, ModelConfig.num_heads, "H", "query heads"),
        ("num-kv-heads", 1, None, "K", "key/value heads (default: half of the heads)"),
        ("intermediate-dim", 1, None, "I", "width of the MLP (default: 4 x hidden)"),
        ("seq-len", 2, ModelConfig.seq_len, "S", "tokens per sample"),
        ("batch-size", 1, 8, "B", "samples per step"),
    ):
        text += "" if default is None else " (default: %(default)s)"
        add(f"--{flag}", type=at_least(low), default=default, metavar=letter, help=text)
    add = parser.add_argument_group("data").add_argument
    add("--text-file", type=Path, metavar="FILE", help="train on the bytes of a real text")
    add = parser.add_argument_group("kernels").add_argument
    text = "other block sizes or warps, powers of two; a wrong name lists all; can be repeated"
    add("--blocks", type=read_blocks, action="append", metavar="KERNEL:NAME=NUMBER,...", help=text)


def without_effect(args: argparse.Namespace) -> dict[str, str]:
    """Return the fusions without effect under these arguments, on or off, and why."""
    idle = {}
    if not args.triton_rms_norm:
        idle["norm_from_output"] = "it changes triton-rms-norm, which is off"
    if not args.use_amp:
        idle["direct_gradients"] = "without --use-amp no gradient is cast"
        idle.setdefault("norm_from_output", "without --use-amp GEMMs take float32, too")
    if not args.fused_optimizer:
        idle["overlap"] = "it needs fused-optimizer, which takes gradients from other streams"
    elif not args.cuda_graph:
        idle["overlap"] = "it needs a graph, and this run has none"
    return idle


@cache
def note_interpreter() -> None:
    """Say once per process, which may train many times, that kernels are interpreted."""
    say("note", "kernels run on the CPU in Triton's interpreter, right but slow: use small sizes")


def check_model_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in defaults that depend on other arguments; refuse sizes that do not fit together."""
    args.num_kv_heads = args.num_kv_heads or max(1, args.num_heads // 2)
    args.intermediate_dim = args.intermediate_dim or 4 * args.hidden_dim
    must = "must be divisible by"
    if args.hidden_dim % (2 * args.num_heads):  # pairs of channels are rotated
        parser.error(f"--hidden-dim {args.hidden_dim} {must} 2 x --num-heads {args.num_heads}")
    if args.num_heads % args.num_kv_heads:
        parser.error(f"--num-heads {args.num_heads} {must} --num-kv-heads {args.num_kv_heads}")
    if args.text_file and args.vocab_size not in (None, 256):
        parser.error(f"--vocab-size {args.vocab_size} does not fit the bytes of --text-file")
    args.vocab_size = args.vocab_size or (256 if args.text_file else ModelConfig.vocab_size)
    if args.text_file:
        read_text(args.text_file, args.seq_len)
    if (channels := args.hidden_dim // args.num_heads) not in (16, 32, 64, 128):
        reason = f"its kernels take 16, 32, 64 or 128 channels per head, not {channels}"
        leave_to_pytorch(args, {"triton_attention": reason})
    if args.torch_compile:
        why = "a compiler does not see what V4 launches"
        parser.error(f"--enable-torch-compile: {why}; tiny_llama_v3.py can be compiled")
    args.blocks = " ".join(args.blocks or ()) or ModelConfig.blocks
    kernels = ("fused_optimizer", *(name for _, name, _ in FUSIONS if name.startswith("triton")))
    if any(getattr(args, name) for name in kernels):
        if INTERPRETED:
            note_interpreter()
        elif args.device == "cpu" or not torch.cuda.is_available():
            remedy = "set TRITON_INTERPRET=1, or --disable-all-fusion"
            fail(f"on a CPU the kernels need Triton's interpreter: {remedy}", 4)


# --- data
# Copied from dev/parts/data_llama.py by dev/sync_parts.py: edit it there.
CONTROL = {*range(9), *range(14, 26), *range(28, 32)}  # bytes that no text has


class TextBatches:
    """Random windows of a text in host memory: {"input_ids": [B, S], "labels": [B, S]}."""

    def __init__(self, text: np.ndarray, args: argparse.Namespace, device: torch.device, seed: int):
        self.windows = np.lib.stride_tricks.sliding_window_view(text, args.seq_len)
        self.batch_size = args.batch_size
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.source: dict = {}  # nothing to report

    def next_batch(self) -> dict[str, Tensor]:
        starts = torch.randint(len(self.windows), (self.batch_size,), generator=self.generator)
        # By NumPy in one thread: PyTorch takes one per core, and on a busy host one is late.
        tokens = torch.from_numpy(self.windows[starts.numpy()]).to(self.device)
        return {"input_ids": tokens, "labels": tokens}


def markov_text(vocab_size: int, length: int, seed: int) -> np.ndarray:
    """Make synthetic text [length] from a fixed order-2 Markov chain.

    The two previous tokens, each taken modulo 8, choose one of 64 contexts; a context has 16
    possible successors with probabilities 1/2, 1/4, 1/8, ..., an entropy of 1.39 nats.
    """
    successors = np.random.default_rng(0).integers(vocab_size, size=(64, 16))  # for every seed
    rng = np.random.default_rng(seed)
    streams = 256  # written side by side, as a chain can only be sampled token after token
    steps = -(-length // streams)
    choices = np.minimum(rng.geometric(0.5, size=(steps, streams)) - 1, 15)
    text = np.empty((steps, streams), dtype=np.int64)
    before, last = rng.integers(vocab_size, size=(2, streams))
    for step in range(steps):
        before, last = last, successors[before % 8 * 8 + last % 8, choices[step]]
        text[step] = last
    return text.T.reshape(-1)[:length]


def read_text(path: Path, seq_len: int) -> np.ndarray:
    """Read the bytes of a text file as tokens [length]."""
    if path.exists() and not path.is_file():  # a pipe can be read only once, /dev/zero has no end
        fail(f"--text-file {path}: {'a folder' if path.is_dir() else 'not a regular file'}")
    try:
        content = path.read_bytes()
    except OSError as error:
        fail(f"--text-file {path}: {error.strerror}")
    if CONTROL & set(content):
        like = "token ids (nanoGPT's train.bin), an archive or UTF-16"
        fail(f"--text-file {path}: it looks like {like}; give plain text (ASCII or UTF-8)")
    if len(content) < seq_len:
        fail(f"--text-file {path}: {len(content)} bytes are fewer than --seq-len {seq_len}")
    return np.frombuffer(content, dtype=np.uint8).astype(np.int64)


def make_batches(args: argparse.Namespace, device: torch.device, seed: int) -> TextBatches:
    """Make the source of training batches: the bytes of --text-file, or synthetic text."""
    if args.text_file:
        text = read_text(args.text_file, args.seq_len)
    else:
        text = markov_text(args.vocab_size, length=max(1_000_000, 4 * args.seq_len), seed=seed)
    return TextBatches(text, args, device, seed)


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


def wrap_triton(kernel: Callable) -> Callable:
    """Return what launches a kernel by `[grid](TENSOR, ..., NAME=value, ...)`: on a GPU itself."""
    return Interpreted(kernel) if INTERPRETED else kernel


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

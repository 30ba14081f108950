#!/usr/bin/env python3
"""TinyLlama V4: what is left to take away when the kernels of V3 are fast.

direct-gradients   weight gradients go from their GEMM to the optimizer, and nothing casts them
fused-optimizer    AdamW as one kernel, which also writes the weights that the next GEMMs take
norm-from-output   a norm's backward pass reads its output, which the next GEMM keeps anyway
tied-embedding     the embedding's gradient is added to that of the output projection, in its place
rotary-fusion      attention's backward kernels rotate gradients of query and key back themselves
swiglu-gemm        SwiGLU in the epilogue of a Triton GEMM, forward and backward
overlap            weight gradients and updates on side streams, beside the backward pass

V3's kernels stay, and the vendor's library multiplies most matrices. The whole step is one graph by
default. A graph keeps what depends on what, not an order: `overlap` makes use of that, so it does
nothing in a step without a graph. `--mode benchmark` is inference: there a whole transformer layer
is a single launch.

Examples:
  python tiny_llama_v4.py --use-amp --compare-fusion                   all off against all on
  python tiny_llama_v4.py --use-amp --disable-overlap                  one kernel after the other
  python tiny_llama_v4.py --mode benchmark --use-amp --batch-size 1    one launch per layer
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import difflib
import gc
import gzip
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

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
    from torch._subclasses import FakeTensor
    from torch.library import triton_op, wrap_triton
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import AdamW
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode
except (ImportError, KeyboardInterrupt) as error:
    missing = isinstance(error, ImportError)
    print(f"{Path(__file__).name}: error: {error if missing else 'interrupted'}", file=sys.stderr)
    sys.exit(4 if missing else 130)

# --- configuration

VERSION = 4
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the kernels run on the CPU, in Python


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the defaults are those of the command line."""

    vocab_size: int = 1000
    hidden_dim: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_dim: int = 2048
    seq_len: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    blocks: str = "default"  # what --blocks replaces


@dataclass(frozen=True)
class Fusions:
    """Which fusions are on."""

    qkv_fusion: bool = True
    flash_attention: bool = True
    swiglu_fusion: bool = True
    triton_rms_norm: bool = True
    triton_rotary: bool = True
    triton_attention: bool = True
    triton_swiglu: bool = True
    triton_cross_entropy: bool = True
    direct_gradients: bool = True
    fused_optimizer: bool = True
    norm_from_output: bool = True
    tied_embedding: bool = True
    rotary_fusion: bool = True
    swiglu_gemm: bool = True
    overlap: bool = True


FUSIONS: tuple[tuple[str, str, str], ...] = (
    ("qkv-fusion", "qkv_fusion", "query, key and value projection as one GEMM"),
    ("flash-attention", "flash_attention", "SDPA of PyTorch instead of materialised scores"),
    ("swiglu-fusion", "swiglu_fusion", "gate and up projection as one GEMM"),
    ("triton-rms-norm", "triton_rms_norm", "residual addition and norm as one kernel"),
    ("triton-rotary", "triton_rotary", "rotary embedding of the packed heads as one kernel"),
    ("triton-attention", "triton_attention", "our own flash attention, which repeats no key"),
    ("triton-swiglu", "triton_swiglu", "silu(gate) * up as one kernel"),
    ("triton-cross-entropy", "triton_cross_entropy", "loss without a float32 copy of the logits"),
    ("direct-gradients", "direct_gradients", "weight gradients reach the optimizer without a cast"),
    ("fused-optimizer", "fused_optimizer", "AdamW as one kernel, which casts weights, too"),
    ("norm-from-output", "norm_from_output", "the norm's backward pass reads its output"),
    ("tied-embedding", "tied_embedding", "embedding gradient added to the output projection's"),
    ("rotary-fusion", "rotary_fusion", "attention's backward kernels rotate gradients back"),
    ("swiglu-gemm", "swiglu_gemm", "SwiGLU in the epilogue of a Triton GEMM, forward and backward"),
    ("overlap", "overlap", "in a graph, weight gradients and updates beside the backward pass"),
)
# Those whose kernels the first step compiles.
TRITON_FUSIONS = tuple(name for _, name, _ in FUSIONS if name.startswith("triton"))
TRITON_FUSIONS += ("fused_optimizer", "tied_embedding", "swiglu_gemm")
MODES: dict[str, Callable[[argparse.Namespace], int]] = {}  # what runs in place of training


def without_effect(args: argparse.Namespace) -> dict[str, str]:
    """Return the fusions that change nothing beside the other arguments, on or off, and why."""
    found, head_dim = {}, args.hidden_dim // args.num_heads
    exact_float32 = not args.use_amp and args.matmul_precision == "highest"
    if args.triton_attention:
        found["flash_attention"] = "triton-attention takes its place"
    if not (args.triton_rotary and args.triton_attention):
        found["rotary_fusion"] = "it joins triton-rotary and triton-attention, of which one is off"
    elif head_dim < 16 or head_dim.bit_count() != 1:
        found["rotary_fusion"] = f"a head has {head_dim} channels, no power of two from 16"
    if not args.triton_rms_norm:
        found["norm_from_output"] = "it changes triton-rms-norm, which is off"
    if not args.use_amp:
        found["direct_gradients"] = "without --use-amp no gradient is cast"
    if not args.swiglu_fusion:
        found["swiglu_gemm"] = "it needs swiglu-fusion"
    elif not (INTERPRETED or (BACKEND == "cuda" and exact_float32)):
        found["swiglu_gemm"] = "in this precision a library's GEMM and a kernel are faster, and run"
    if not args.cuda_graph:
        found["overlap"] = "it needs a graph, which this run has not"
    elif args.num_gpus > 1 and not args.fused_optimizer:
        found["overlap"] = "on several GPUs it needs fused-optimizer, which averages the gradients"
    if args.torch_compile:
        names = ("direct_gradients", "fused_optimizer", "tied_embedding", "swiglu_gemm", "overlap")
        found |= dict.fromkeys(names, "torch.compile does without it")
    if args.swiglu_gemm and "swiglu_gemm" not in found:
        found["triton_swiglu"] = "swiglu-gemm takes its place"
    return found


def use_settings(args: argparse.Namespace) -> None:
    """Make this version's own settings of a run those of the process: block sizes."""
    use_blocks(args.blocks)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only this model has."""
    sizes = ModelConfig()
    add = parser.add_argument_group("model").add_argument
    text = f"(default: {sizes.vocab_size}; 256 with --text-file)"
    add("--vocab-size", type=at_least(2), metavar="V", help=text)
    text = "width of the residual stream"
    add("--hidden-dim", type=at_least(1), default=sizes.hidden_dim, metavar="D", help=text)
    text = "transformer layers"
    add("--num-layers", type=at_least(1), default=sizes.num_layers, metavar="L", help=text)
    text = "query heads"
    add("--num-heads", type=at_least(1), default=sizes.num_heads, metavar="H", help=text)
    text = "key/value heads (default: half of the heads)"
    add("--num-kv-heads", type=at_least(1), metavar="K", help=text)
    text = "width of the MLP (default: 4 x hidden)"
    add("--intermediate-dim", type=at_least(1), metavar="I", help=text)
    add = parser.add_argument_group("data").add_argument
    text = "tokens per sample"
    add("--seq-len", type=at_least(2), default=sizes.seq_len, metavar="S", help=text)
    add("--batch-size", type=at_least(1), default=8, metavar="B", help="samples per step")
    text = "train on the bytes of FILE instead of synthetic text"
    add("--text-file", type=Path, metavar="FILE", help=text)
    text = "benchmark: inference, a layer as one launch"
    add("--mode", choices=("train", "benchmark"), default="train", help=text)
    add = parser.add_argument_group("kernels").add_argument
    text = "other block sizes or warps for a kernel, powers of two; a wrong name lists those there "
    text, form = f"{text}are; can be repeated", "KERNEL:NAME=NUMBER,..."
    add("--blocks", type=read_blocks, action="append", metavar=form, help=text)


@cache
def note_interpreter() -> None:
    """Say it once, however many runs a study has."""
    text = "the kernels run on the CPU in Triton's interpreter, right but slow: use small sizes"
    say("note", text)


def check_model_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in defaults that depend on other arguments; refuse sizes that do not fit together."""
    args.num_kv_heads = args.num_kv_heads or max(1, args.num_heads // 2)
    args.intermediate_dim = args.intermediate_dim or 4 * args.hidden_dim
    if args.hidden_dim % (2 * args.num_heads):
        parser.error(
            f"--hidden-dim {args.hidden_dim} must be divisible by 2 x --num-heads {args.num_heads} "
            "(rotary embedding turns pairs of channels)"
        )
    if args.num_heads % args.num_kv_heads:
        heads = f"--num-heads {args.num_heads}"
        parser.error(f"{heads} must be divisible by --num-kv-heads {args.num_kv_heads}")
    if args.text_file and args.vocab_size not in (None, 256):
        vocabulary = f"--vocab-size {args.vocab_size}"
        parser.error(f"{vocabulary} does not fit --text-file: bytes have a vocabulary of 256")
    args.vocab_size = args.vocab_size or (256 if args.text_file else ModelConfig.vocab_size)
    if args.text_file:
        read_text(args.text_file, args.seq_len)
    if (channels := args.hidden_dim // args.num_heads) > 128:
        reason = f"its kernels take up to 128 channels per head, not {channels}"
        leave_to_pytorch(args, {"triton_attention": reason})
    args.benchmark = args.mode == "benchmark"
    if args.benchmark and (args.compare_fusion or args.verify_accuracy):
        parser.error("--mode benchmark goes without --compare-fusion and --verify-accuracy")
    chosen: dict[str, dict[str, int]] = {}
    for kernel, sizes in args.blocks or ():
        chosen[kernel] = chosen.get(kernel, {}) | sizes
    texts = []
    for kernel, sizes in chosen.items():
        texts.append(f"{kernel}:{','.join(f'{name}={size}' for name, size in sizes.items())}")
    args.blocks = " ".join(texts) or ModelConfig.blocks
    with_kernels = [name for _, name, _ in FUSIONS if name.startswith("triton")]
    with_kernels += ["fused_optimizer", "tied_embedding", "swiglu_gemm", "benchmark"]
    if any(getattr(args, name) for name in with_kernels):
        if INTERPRETED:
            note_interpreter()
        elif args.device == "cpu" or not torch.cuda.is_available():
            remedy = "set TRITON_INTERPRET=1, or --disable-all-fusion"
            fail(f"on a CPU the kernels need Triton's interpreter: {remedy}", 4)


# --- kernels
#
# An operation has a kernel forward and one or more backward. The functions under @operator allocate
# their results and launch them; an autograd.Function ties forward and backward together. No kernel
# adds atomically: each program writes the sum over its own rows, and one more launch adds these up,
# so that the same input gives the same bits.
#
# In kernels, pointers and sizes at compile time are in capitals; `grad_x` is the dx of formulas.

BACKEND = "interpreter" if INTERPRETED else "hip" if torch.version.hip else "cuda"
# Block sizes and warps, as --blocks takes them: for 16 bits on NVIDIA's GPUs, and a line of its own
# for float32, TF32 or AMD's GPUs where they differ. TILE is the number of elements in a block of
# rows, PROGRAMS how many programs share the rows, more if each had more than 16 blocks of them.
BLOCKS: dict[str, str] = {
    "sum_parts": "TILE=4096,ROWS=512,num_warps=8",
    "rms_norm_forward": "TILE=2048,num_warps=2",
    "rms_norm_backward": "TILE=1024,PROGRAMS=1056,num_warps=2",
    "rotary": "TILE=2048,num_warps=4",
    "swiglu_forward": "TILE=4096,num_warps=8",
    "swiglu_backward": "TILE=4096,num_warps=8",
    # three TF32 products need more registers, hence smaller blocks in float32
    "attention_forward": "BLOCK_M=64,BLOCK_N=64,num_warps=4,num_stages=3",
    "attention_forward float32": "BLOCK_M=64,BLOCK_N=32,num_warps=4,num_stages=2",
    "attention_forward hip": "BLOCK_M=64,BLOCK_N=64,num_warps=4,num_stages=1",
    "attention_forward hip float32": "BLOCK_M=64,BLOCK_N=32,num_warps=4,num_stages=1",
    "attention_backward_queries": "BLOCK_M=64,BLOCK_N=64,num_warps=4,num_stages=2",
    "attention_backward_queries float32": "BLOCK_M=64,BLOCK_N=32,num_warps=4,num_stages=2",
    "attention_backward_queries hip": "BLOCK_M=64,BLOCK_N=32,num_warps=4,num_stages=1",
    "attention_backward_keys": "BLOCK_M=64,BLOCK_N=64,num_warps=4,num_stages=3",
    "attention_backward_keys float32": "BLOCK_M=32,BLOCK_N=32,num_warps=4,num_stages=1",
    "attention_backward_keys hip": "BLOCK_M=16,BLOCK_N=64,num_warps=4,num_stages=1",
    "cross_entropy_forward": "TILE=4096,num_warps=4",
    "cross_entropy_backward": "TILE=4096,num_warps=4",
    "mean_loss": "BLOCK=1024,num_warps=8",
    "embedding_backward": "BLOCK_C=128,ROWS=8,num_warps=2",
    "swiglu_gemm_forward": "BLOCK_M=128,BLOCK_N=128,BLOCK_K=32,GROUP=8,num_warps=8,num_stages=4",
    "swiglu_gemm_forward float32": "BLOCK_M=128,BLOCK_N=64,BLOCK_K=32,GROUP=8,"
        "num_warps=8,num_stages=4",
    "swiglu_gemm_forward hip": "BLOCK_M=64,BLOCK_N=64,BLOCK_K=32,GROUP=8,num_warps=4,num_stages=1",
    "swiglu_gemm_backward": "BLOCK_M=64,BLOCK_N=128,BLOCK_K=64,GROUP=8,num_warps=8,num_stages=4",
    "swiglu_gemm_backward float32": "BLOCK_M=128,BLOCK_N=64,BLOCK_K=32,GROUP=8,"
        "num_warps=4,num_stages=4",
    "swiglu_gemm_backward hip": "BLOCK_M=64,BLOCK_N=64,BLOCK_K=32,GROUP=8,num_warps=4,num_stages=2",
    "adamw": "BLOCK=1024,PROGRAMS=1024,num_warps=4",
    # BLOCK_M, BLOCK_N and BLOCK_K of its GEMMs, BLOCK_QUERY and BLOCK_KEY of its attention
    "transformer_block": "BLOCK_M=16,BLOCK_N=64,BLOCK_K=128,BLOCK_QUERY=16,BLOCK_KEY=64,"
        "num_warps=4",
    "transformer_block float32": "BLOCK_M=16,BLOCK_N=32,BLOCK_K=32,BLOCK_QUERY=16,BLOCK_KEY=32,"
        "num_warps=4,num_stages=2",
    "transformer_block hip": "BLOCK_M=16,BLOCK_N=32,BLOCK_K=64,BLOCK_QUERY=16,BLOCK_KEY=32,"
        "num_warps=4,num_stages=2",
    "transformer_block hip float32": "BLOCK_M=16,BLOCK_N=32,BLOCK_K=32,BLOCK_QUERY=16,BLOCK_KEY=16,"
        "num_warps=4,num_stages=2",
    # of 16 bits on NVIDIA's GPUs, with more rows than a tile of the above on each multiprocessor
    "transformer_block many rows": "BLOCK_M=64,BLOCK_N=128,BLOCK_K=64,BLOCK_QUERY=64,BLOCK_KEY=64,"
        "num_warps=8",
}  # fmt: skip
# --- launch
# Copied from common/launch.py by tools/sync_common.py: edit it there.
OVERRIDES: dict[str, dict[str, int]] = {}  # what --blocks replaces, for this run


def read_blocks(text: str) -> tuple[str, dict[str, int]]:
    """Parse "kernel:NAME=number,..." of --blocks (an argparse type): the kernel, its new sizes."""
    kernel, _, settings = text.partition(":")
    pairs = [pair.partition("=")[::2] for pair in settings.split(",")]
    kernels = [name for name in BLOCKS if " " not in name]
    if kernel not in kernels:
        raise argparse.ArgumentTypeError(f"no kernel {kernel!r}; there are {', '.join(kernels)}")
    names = block_sizes(BLOCKS[kernel])
    if wrong := [name for name, _ in pairs if name not in {"num_stages", *names}]:
        message = f"{kernel} has no {wrong[0]!r}; it has {', '.join(names)}"
        raise argparse.ArgumentTypeError(message)
    for name, value in pairs:
        low = 16 if name.startswith("BLOCK") else 1
        if not value.isdecimal() or int(value).bit_count() != 1 or int(value) < low:
            message = f"{kernel}: {name}={value} is not a power of two from {low}"
            raise argparse.ArgumentTypeError(message)
    return kernel, block_sizes(settings)


@cache  # a launch asks for them each time
def block_sizes(settings: str) -> dict[str, int]:
    """Parse "NAME=number,..."."""
    pairs = (pair.split("=") for pair in settings.split(","))
    return {name: int(value) for name, value in pairs}


def use_blocks(text: str) -> None:
    """Make these the block sizes of the process: ModelConfig.blocks, which --blocks fills."""
    OVERRIDES.clear()
    if text != ModelConfig.blocks:
        OVERRIDES.update(read_blocks(part) for part in text.split())


def blocks(kernel: str, dtype: torch.dtype | None = None) -> dict[str, int]:
    """Return block sizes and warps of a kernel that multiplies matrices of this type."""
    precisions = [" float32", ""] if dtype == torch.float32 else [""]
    if dot_precision(dtype) == "tf32":
        precisions = [" TF32", *precisions]
    lines = [f"{kernel}{on}{precision}" for on in (f" {BACKEND}", "") for precision in precisions]
    chosen = block_sizes(next(BLOCKS[line] for line in lines if line in BLOCKS))
    if INTERPRETED and "TILE" in chosen:
        chosen = chosen | {"TILE": 1 << 16}  # its time goes by programs, not by elements
    return chosen | OVERRIDES.get(kernel, {})


def dot_precision(dtype: torch.dtype) -> str:
    """Return how Triton multiplies float32 matrices; other types have no choice.

    TF32 exists on NVIDIA's GPUs only.
    """
    if BACKEND != "cuda" or dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def operator(function: Callable, changes: tuple[str, ...] = ()) -> Callable:
    """Make a function that launches kernels an operator; torch.compile sees the kernels in it.

    It allocates its results, or writes into those of its arguments that `changes` names and
    returns nothing.
    """
    script = re.sub(r"\W|^(?=\d)", "_", Path(__file__).stem, flags=re.ASCII)  # a copy of any name
    name = f"{script}::{function.__name__}"
    if not INTERPRETED:
        return triton_op(name, function, mutates_args=changes)
    opaque = torch.library.custom_op(name, function, mutates_args=changes)
    opaque.register_fake(function)
    return opaque


if INTERPRETED:

    class wrap_triton:  # PyTorch's takes compiled kernels only
        """Run a kernel by `wrap_triton(kernel)[grid](NAME=value, ...)`.

        Where torch.compile only asks for shapes nothing runs. Triton 3 multiplies bfloat16 as
        integers here, without a word: so the kernel gets float32, and its results are rounded.
        """

        def __init__(self, kernel: Callable):
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable:
            def run(**arguments) -> None:
                tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
                if isinstance(tensors[0], FakeTensor):
                    return
                narrow = [tensor for tensor in tensors if tensor.dtype == torch.bfloat16]
                wide = {id(tensor): self.widened(tensor) for tensor in narrow}
                given = {name: wide.get(id(value), value) for name, value in arguments.items()}
                self.kernel[grid](**given)
                for tensor in narrow:
                    # Unseen by autograd, which the inputs among them belong to.
                    tensor.data.copy_(wide[id(tensor)])

            return run

        @staticmethod
        def widened(tensor: Tensor) -> Tensor:
            """Copy to float32 with the same strides."""
            wide = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32)
            return wide.copy_(tensor)


def check_not_empty(kernel: str, x: Tensor) -> None:
    """Raise ValueError for an empty batch, for which there is nothing to launch."""
    if not x.numel():
        raise ValueError(f"{kernel} needs at least one row, not {[*x.shape]}")


def row_launch(kernel: str, x: Tensor, whole: bool = True) -> tuple[int, int, dict[str, int]]:
    """Return how many rows x [..., C] has, how many programs share them, and their block sizes.

    A block is a TILE of rows. A row longer than that is a block with more warps if it must be
    whole, else several.
    """
    check_not_empty(kernel, x)
    chosen, dim = blocks(kernel), x.shape[-1]
    tile, width = chosen.pop("TILE"), triton.next_power_of_2(dim)
    if whole and width > tile:
        chosen["num_warps"] = min(16, chosen["num_warps"] * (width // tile))
    width = width if whole else min(width, tile)
    rows, tile_rows = x.numel() // dim, max(1, tile // width)
    programs = triton.cdiv(rows, tile_rows)
    if "PROGRAMS" in chosen:
        most = max(chosen["PROGRAMS"], triton.cdiv(programs, 16))
        programs = chosen["PROGRAMS"] = min(programs, most)
    return rows, programs, {"C": dim, "BLOCK_C": width, "ROWS": tile_rows, **chosen}


def shared_memory() -> int:
    """Return the bytes of shared memory, AMD's LDS, that a program can have on this GPU."""
    if INTERPRETED or not torch.cuda.device_count():
        return 2**31
    utils, device = triton.runtime.driver.active.utils, torch.cuda.current_device()
    return utils.get_device_properties(device)["max_shared_mem"]  # as Triton asks at a launch


def leave_to_pytorch(args: argparse.Namespace, reasons: dict[str, str]) -> None:
    """Turn off the fusions that these reasons are about, each with one line."""
    for flag, name, _ in FUSIONS:
        if name in reasons and getattr(args, name):
            setattr(args, name, False)
            say("note", f"{flag} is off, PyTorch's own operations run: {reasons[name]}")


# --- end of launch


@triton.jit
def sum_parts_kernel(PARTS, OUT, parts, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up what each program found: out = sum over p of parts[p].

    PARTS [parts, width], OUT [width]. A program owns BLOCK columns, and reads ROWS parts at a time.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.load(
            PARTS + at,
            mask=(row < parts)[:, None] & (column < width)[None, :],
            other=0.0,
        )
    tl.store(OUT + column, tl.sum(total, 0), mask=column < width)


@partial(operator, changes=("out",))
def sum_parts(parts: Tensor, out: Tensor) -> None:
    """Write the sum of float32 parts [parts, ...], what each program found, into out.

    torch.sum is slower at many short parts.
    """
    chosen = blocks("sum_parts")
    rows = min(chosen.pop("ROWS"), triton.next_power_of_2(len(parts)))
    block = max(8, chosen.pop("TILE") // rows)
    wrap_triton(sum_parts_kernel)[(triton.cdiv(out.numel(), block),)](
        PARTS=parts, OUT=out, parts=len(parts), width=out.numel(), ROWS=rows, BLOCK=block, **chosen
    )  # fmt: skip


class SideStreams:
    """Share gradients and cast weights between a model and its optimizer, and overlap their work.

    build_model makes one and gives it to the modules; build_optimizer gives it to FusedAdamW, which
    enters buffers and casts. The streams are for `overlap`, while a step is captured as a graph: a
    graph keeps what depends on what, not the order of the launches, so work on a side stream runs
    where there is room for it. A step, time goes down, an arrow is a wait:

        chain (forward, backward)       gradients                 updates
        begin_step -------------------------------------------->  corrections of the moments
        token ids -------------------->  run: sort them
        grad of layer L's output ----->  run: its weight gradient
        grad of its input
        weight no more needed --------------- finish (both) --->  AdamW, cast of this weight
        KEPT pieces of work later <----  done: its inputs may go
        ... next layer                  ...                       ...
        grad of the embedding <--------  join: all of them
        end of optimizer.step <---------------------------------  all of them

    On several GPUs a third stream averages the gradients of a buffer over them in between: it
    waits as an update does here, the update waits for it, and so does the chain before
    optimizer.step.

    What work on a side stream reads must stay as it is until the chain has waited for that work:
    `pending` keeps it from being freed. Autograd may not add to a gradient on its way from a side
    stream to its parameter: join raises RuntimeError.
    """

    KEPT = 4

    def __init__(self):
        self.buffers: dict[Tensor, GradientBuffer] = {}  # of each parameter
        self.casts: dict[Tensor, Tensor] = {}  # of each parameter, in the type of the GEMMs
        self.versions: dict[Tensor, int] = {}  # of the parameter when it was cast
        self.active = False
        self.begun: torch.cuda.Event | None = None  # of the forward pass
        self.chain: torch.cuda.Stream | None = None
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.pending: collections.deque[tuple[torch.cuda.Event, tuple]] = collections.deque()
        self.written: dict[Tensor, int] = {}  # the address of each parameter's gradient
        self.finished: dict[GradientBuffer, tuple[Tensor, int, tuple[torch.cuda.Event, ...]]] = {}
        self.used: set[Tensor] = set()  # parameters that this step has no more use for

    def __deepcopy__(self, memo: dict) -> SideStreams:
        """Return one without an optimizer, which a copy of a model has not."""
        return SideStreams()

    def begin_step(self, wanted: bool) -> None:
        """Begin a forward pass; from here on work is put beside it, if wanted and captured."""
        # a capture that failed leaves some
        self.written, self.finished, self.used = {}, {}, set()
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        # Without our optimizer DDP averages, and reads each gradient in the chain.
        ours = bool(self.buffers) or not dist.is_initialized()
        self.active = wanted and capturing and ours
        if self.active:
            # GEMMs beside the chain need a workspace of their own; eager steps give theirs back.
            torch._C._cuda_clearCublasWorkspaces()
            self.chain = torch.cuda.current_stream()
            self.begun = self.chain.record_event()

    def stream(self, number: int) -> torch.cuda.Stream:
        """Return the first stream, for gradients, the second, for updates, or that of averages.

        The last one goes first, as the chain does: what is late there nothing hides.
        """
        make = torch.cuda.Stream
        self.streams = self.streams or (make(), make(), make(priority=-1))
        return self.streams[number]

    def run(self, work: Callable, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the result of the work, which reads these inputs, from the stream of gradients."""
        if not self.active:
            return work()
        chain, stream = torch.cuda.current_stream(), self.stream(0)
        stream.wait_stream(chain)
        with torch.cuda.stream(stream):
            result = work()
            self.pending.append((stream.record_event(), inputs))
        if len(self.pending) > self.KEPT:
            chain.wait_event(self.pending.popleft()[0])
        return result

    def finish(self, parameter: Tensor) -> None:
        """Note that this step has no more use for a parameter whose gradient is on its way."""
        buffer = self.buffers.get(parameter)
        if not (self.active and buffer and buffer.given):
            return
        self.used.add(parameter)
        if self.used.issuperset(buffer.parameters):  # with norms it waits for all of the chain
            events = torch.cuda.current_stream().record_event(), self.stream(0).record_event()
            self.finished[buffer] = buffer.tensor, buffer.tensor._version, events

    @contextlib.contextmanager
    def averaging(self, buffer: GradientBuffer) -> Iterator[None]:
        """Average a buffer inside on the stream for that, as soon as its gradients are there.

        Updates that wait for the buffer then wait for that.
        """
        if not self.active:
            yield
            return
        with torch.cuda.stream(self.stream(2)):
            self.wait_for(buffer)
            yield
            events = (self.stream(2).record_event(),)
            self.finished[buffer] = buffer.tensor, buffer.tensor._version, events

    def averaged(self) -> None:
        """Let the chain wait for all averages."""
        if self.active:
            self.chain.wait_stream(self.stream(2))

    @contextlib.contextmanager
    def updating(self, after_chain: bool) -> Iterator[None]:
        """Run updates on their stream, for which the chain waits at the end.

        They begin where the forward pass does, or `after_chain`, at the end of the chain so far.
        """
        if not self.active:
            yield
            return
        updates = self.stream(1)
        with torch.cuda.stream(updates):
            updates.wait_event(self.chain.record_event() if after_chain else self.begun)
            yield
        self.chain.wait_stream(updates)

    def wait_for(self, buffer: GradientBuffer) -> None:
        """Let this stream wait for the gradients in a buffer, and the last use of their weights.

        If they were changed after `finish`, that is the end of the chain.
        """
        if not self.active:
            return
        tensor, version, events = self.finished.pop(buffer, (None, 0, ()))
        if tensor is not buffer.tensor or version != tensor._version:
            events = (self.chain.record_event(),)
        for event in events:
            torch.cuda.current_stream().wait_event(event)

    def join(self) -> None:
        """Let the chain wait for all gradients. Raises RuntimeError if one was added to."""
        torch.cuda.current_stream().wait_stream(self.stream(0))
        self.pending.clear()
        written, self.written = self.written, {}
        if any(p.grad is not None and p.grad.data_ptr() != at for p, at in written.items()):
            wrong = "a weight got more than one gradient in a backward pass"
            raise RuntimeError(f"overlap: {wrong}: use --disable-overlap")

    def cached_cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight in this type, as the optimizer wrote it.

        It is cast here where the optimizer did not, or where others changed the weight since.
        """
        cast = self.casts.get(weight)
        if cast is None or cast.dtype != dtype:
            return weight.detach().to(dtype)
        if self.versions[weight] != weight._version:
            cast.copy_(weight.detach())
            self.versions[weight] = weight._version
        return cast


class JoinSideStreams(torch.autograd.Function):
    """Pass x on; in the backward pass the chain waits here for the gradients on the side stream."""

    @staticmethod
    def forward(ctx, x: Tensor, side: SideStreams):
        ctx.side = side
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.side.join()
        return grad, None


class GradientBuffer:
    """Hold the gradients of some parameters where the optimizer reads them, in one tensor.

    `begins`: where each parameter begins in the buffers of the optimizer, and where the last ends.
    `dtype`: of the gradients. The tensor lives from the first gradient of a step to the end of the
    update. A parameter's first gradient in a step is written here; autograd adds others to it, in
    float32.
    """

    def __init__(self, parameters: list[nn.Parameter], begins: list[int], dtype: torch.dtype):
        self.parameters, self.begin, self.end = parameters, begins[0], begins[-1]
        self.spans = dict(zip(parameters, itertools.pairwise(begins), strict=True))
        self.clear()
        self.set_dtype(dtype)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Have gradients in this type from now on."""
        self.dtype = dtype
        for parameter in self.parameters:
            if dtype != (getattr(parameter, "grad_dtype", None) or parameter.dtype):
                grad, parameter.grad = parameter.grad, None
                parameter.grad_dtype = dtype  # or autograd would cast it
                parameter.grad = grad if grad is None else grad.to(dtype)

    def clear(self) -> None:
        """Let go of the gradients."""
        self.tensor, self.given = None, set()

    def give(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the part for a parameter's first gradient in a step; None for a later one."""
        if parameter.grad is None and parameter not in self.given:
            self.given.add(parameter)
            return self.part(parameter)
        self.set_dtype(torch.float32)
        return None

    def collect(self) -> bool:
        """Bring gradients here that are elsewhere; return whether there are any.

        Those that autograd added up are elsewhere.
        """
        given = [p for p in self.parameters if p.grad is not None]
        if any(p.grad.data_ptr() != self.part(p).data_ptr() for p in given):
            self.tensor = None  # what torch.autograd.grad returned may be there
            torch._foreach_copy_([self.part(p) for p in given], [p.grad for p in given])
        return bool(given)

    def average(self) -> None:
        """Average all gradients over the processes; from then on they are here, nowhere else."""
        for p in self.parameters:
            part = self.part(p)
            if p.grad is not None:
                p.grad = part
        average(self.tensor)

    def part(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter's part of the tensor.

        It is always another object, or autograd would copy it.
        """
        if self.tensor is None:
            size, device = self.end - self.begin, parameter.device
            self.tensor = torch.empty(size, device=device, dtype=self.dtype)
            if len(self.parameters) > 1 and size > sum(p.numel() for p in self.parameters):
                self.tensor.zero_()  # what lies between them
        begin = self.spans[parameter][0] - self.begin
        return self.tensor[begin:][: parameter.numel()].view_as(parameter)


def average(tensor: Tensor) -> None:
    """Average a tensor over all processes, in its place. Gloo, on a CPU, can only add up."""
    if tensor.is_cuda:
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    else:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def gradient_into_buffer(
    side: SideStreams | None, parameter: Tensor, compute: Callable[[Tensor], None], *inputs: Tensor
) -> Tensor:  # fmt: skip
    """Return the gradient of a parameter, which `compute` finds from these inputs.

    `compute` writes it into the tensor that it is given. That is where the optimizer reads it,
    unless there is a gradient already that this one is to be added to. `side` is None under
    torch.compile.
    """
    buffer = side.buffers.get(parameter) if side else None
    part = buffer.give(parameter) if buffer else None

    def work() -> Tensor:
        compute(gradient := torch.empty_like(parameter) if part is None else part)
        return gradient

    if side is None or parameter.grad is not None or (buffer and part is None):
        return work()  # autograd adds it to another one at once
    gradient = side.run(work, *inputs)
    if side.active:
        side.written[parameter] = gradient.data_ptr()
    return gradient


WIDE_RESULTS = "dtype_out" in torch.ops.aten.mm.overloads()  # from PyTorch 2.8 on
# From PyTorch 2.10 on the gradient of a float32 parameter may have another type.
NARROW_GRADIENTS = hasattr(Tensor, "grad_dtype")


def weight_gradient(
    side: SideStreams, weight: Tensor, grad: Tensor, x: Tensor, direct: bool
) -> Tensor:  # fmt: skip
    """Compute the gradient dW = dy^T x of a weight [N, K] from grad [T, N] and x [T, K].

    `direct`: no other kernel casts it.
    """

    def compute(out: Tensor) -> None:
        if out.dtype == x.dtype:
            torch.mm(grad.t(), x, out=out)
        elif direct and WIDE_RESULTS and x.is_cuda:
            torch.mm(grad.t(), x, out_dtype=out.dtype, out=out)
        else:
            out.copy_(grad.t() @ x)

    return gradient_into_buffer(side, weight, compute, grad, x)


class Projection(torch.autograd.Function):
    """Compute x weight^T [..., N] of x [..., K] and weight [N, K].

    The weight is given as a parameter and, `cast`, in the type of x. `embedding`: the node of a
    TiedEmbedding of this weight. If that will run, it gets the gradient and adds its own.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, cast: Tensor, direct: bool,
        embedding: torch.autograd.graph.Node | None, side: SideStreams,
    ):  # fmt: skip
        ctx.save_for_backward(x, cast)
        ctx.weight, ctx.direct, ctx.embedding, ctx.side = weight, direct, embedding, side
        return F.linear(x, cast)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, cast = ctx.saved_tensors
        grad_x, grad_weight = None, None
        if ctx.needs_input_grad[1]:
            rows = grad.flatten(0, -2), x.flatten(0, -2)
            grad_weight = weight_gradient(ctx.side, ctx.weight, *rows, ctx.direct)
        if ctx.needs_input_grad[0]:
            grad_x = grad @ cast
        ctx.side.finish(ctx.weight)
        tied = ctx.embedding and torch._C._will_engine_execute_node(ctx.embedding)
        if grad_weight is not None and tied:
            ctx.embedding.added_to, grad_weight = grad_weight, None
        return grad_x, grad_weight, None, None, None, None


def linear(
    x: Tensor, weight: Tensor, fusions: Fusions, side: SideStreams, embedded: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Compute x weight^T [..., N] of x [..., K] and weight [N, K]; compiled, by PyTorch's own.

    embedded: the result of an embedding with the same weight.
    """
    ours = fusions.direct_gradients or fusions.fused_optimizer or fusions.overlap
    if torch.compiler.is_compiling() or not ours:
        return F.linear(x, weight)
    x, node = x.to(gemm_dtype(x)), getattr(embedded, "grad_fn", None)
    tied = node if hasattr(node, "added_to") else None  # only TiedEmbedding has it
    cast = side.cached_cast(weight, x.dtype)
    return Projection.apply(x, weight, cast, fusions.direct_gradients, tied, side)


LOG2E = tl.constexpr(math.log2(math.e))  # scores are kept to the base 2: hardware computes exp2


@triton.jit
def rms_norm_forward_kernel(
    X, UPDATE, WEIGHT, NORMED, SUMMED, RSTD, rows, eps: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add an update to the residual stream x, and normalise the sum.

        x = x + update;  rstd = 1 / sqrt(mean(x^2) + eps);  normed = x * rstd * weight

    X, UPDATE, NORMED, SUMMED [rows, C], WEIGHT [C], RSTD [rows]. Without an update (None) SUMMED is
    not written. A program owns ROWS whole rows.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (channel < C)[None, :]
    at = row[:, None] * C + channel[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    if UPDATE is not None:
        x += tl.load(UPDATE + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(SUMMED + at, x, mask=inside)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 1) / C + eps)
    weight = tl.load(WEIGHT + channel, mask=channel < C, other=0.0).to(tl.float32)
    tl.store(NORMED + at, x * rstd[:, None] * weight[None, :], mask=inside)
    tl.store(RSTD + row, rstd, mask=row < rows)


@triton.jit
def rms_norm_backward_kernel(
    GRAD_NORMED, GRAD_SUMMED, KEPT, WEIGHT, RSTD, GRAD_X, GRAD_UPDATE, GRAD_WEIGHT, rows,
    FROM_OUTPUT: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a norm's input and weight from those of the norm and of the sum.

        xhat = x * rstd;  g = dnormed * weight;  dweight = sum over rows of dnormed * xhat
        dx = rstd * (g - xhat * mean(g * xhat)) + dsummed;  dupdate = dx

    GRAD_NORMED, GRAD_SUMMED, KEPT, GRAD_X, GRAD_UPDATE [rows, C], WEIGHT [C], RSTD [rows],
    GRAD_WEIGHT [PROGRAMS, C]. KEPT holds x, or FROM_OUTPUT normed, and then xhat = normed / weight.
    Without an update GRAD_SUMMED is None. A program owns every PROGRAMS-th block of ROWS whole
    rows, and a row of GRAD_WEIGHT: its own sum of dweight.
    """
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK_C)
    weight = tl.load(WEIGHT + channel, mask=channel < C, other=1.0).to(tl.float32)
    grad_weight = tl.zeros([ROWS, BLOCK_C], tl.float32)  # summing rows here would cost more
    for start in range(program * ROWS, rows, PROGRAMS * ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (channel < C)[None, :]
        at = row[:, None] * C + channel[None, :]
        rstd = tl.load(RSTD + row, mask=row < rows, other=0.0)[:, None]
        kept = tl.load(KEPT + at, mask=inside, other=0.0).to(tl.float32)
        if FROM_OUTPUT:
            lost = (weight == 0)[None, :]
            xhat = tl.where(lost, 0.0, kept / weight[None, :])
        else:
            xhat = kept * rstd
        grad = tl.load(GRAD_NORMED + at, mask=inside, other=0.0).to(tl.float32)
        grad_weight += grad * xhat
        grad *= weight[None, :]  # g
        grad = (grad - xhat * (tl.sum(grad * xhat, 1) / C)[:, None]) * rstd
        if GRAD_SUMMED is not None:
            grad += tl.load(GRAD_SUMMED + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(GRAD_UPDATE + at, grad, mask=inside)
        tl.store(GRAD_X + at, grad, mask=inside)
    tl.store(GRAD_WEIGHT + program * C + channel, tl.sum(grad_weight, 0), mask=channel < C)


@operator
def rms_norm_forward(
    x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Add x and update [..., D] and normalise the sum.

    Returns the norm in `dtype`, the sum (empty without an update) and 1 / rms [rows].
    """
    rows, programs, options = row_launch("rms_norm_forward", x)
    normed, rstd = torch.empty_like(x, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
    summed = x.new_empty(0) if update is None else torch.empty_like(x)
    wrap_triton(rms_norm_forward_kernel)[(programs,)](
        X=x, UPDATE=update, WEIGHT=weight, NORMED=normed, SUMMED=summed, RSTD=rstd,
        rows=rows, eps=eps, **options,
    )  # fmt: skip
    return normed, summed, rstd


@operator
def rms_norm_backward(
    grad_normed: Tensor, grad_summed: Tensor | None, kept: Tensor, weight: Tensor, rstd: Tensor,
    from_output: bool, dtype: torch.dtype, update_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of x, of the update and, by program, of the weight.

    Those of x and the update are of the types given; without an update the second is empty. kept:
    x + update, or `from_output` the norm's output.
    """
    rows, programs, options = row_launch("rms_norm_backward", kept)
    grad_x = torch.empty_like(kept, dtype=dtype)
    grad_update = kept.new_empty(0)
    if grad_summed is not None:
        grad_update = torch.empty_like(kept, dtype=update_dtype)
    grad_weight = weight.new_empty(programs, len(weight), dtype=torch.float32)
    wrap_triton(rms_norm_backward_kernel)[(programs,)](
        GRAD_NORMED=grad_normed, GRAD_SUMMED=grad_summed, KEPT=kept, WEIGHT=weight, RSTD=rstd,
        GRAD_X=grad_x, GRAD_UPDATE=grad_update, GRAD_WEIGHT=grad_weight, rows=rows,
        FROM_OUTPUT=from_output, **options,
    )  # fmt: skip
    return grad_x, grad_update, grad_weight


class AddRMSNorm(torch.autograd.Function):
    """Compute norm(x + update) * weight in `dtype`, and x + update, of x and update [..., D].

    Without an update (None) the norm is the only result. `from_output`: the norm is kept for the
    backward pass, which divides it by the weight (Apex's memory_efficient). A channel whose weight
    is exactly 0 is lost to it, and its gradients are 0.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype,
        from_output: bool, side: SideStreams | None = None,
    ):  # fmt: skip
        x, weight = x.contiguous(), weight.contiguous()
        update = None if update is None else update.contiguous()
        normed, summed, rstd = rms_norm_forward(x, update, weight, eps, dtype)
        ctx.from_output, ctx.side = from_output, side
        ctx.dtypes = x.dtype, x.dtype if update is None else update.dtype
        kept = normed if from_output else x if update is None else summed
        ctx.save_for_backward(kept, weight, rstd)
        return normed if update is None else (normed, summed)

    @staticmethod
    def backward(ctx, grad_normed: Tensor, grad_summed: Tensor | None = None):
        kept, weight, rstd = ctx.saved_tensors
        grad_normed = grad_normed.contiguous()
        grad_summed = None if grad_summed is None else grad_summed.contiguous()
        grad_x, grad_update, parts = rms_norm_backward(
            grad_normed, grad_summed, kept, weight, rstd, ctx.from_output, *ctx.dtypes
        )
        grad_update = None if grad_summed is None else grad_update
        grad_weight = None
        if ctx.needs_input_grad[2]:
            add_up = partial(sum_parts, parts)
            grad_weight = gradient_into_buffer(ctx.side, weight, add_up, parts)
        return grad_x, grad_update, grad_weight, None, None, None, None


def check_sequences(x: Tensor, longest: int) -> None:
    """Raise ValueError if x [B, S, ...] is empty, or longer than the rotary embedding's tables."""
    batch, seq = x.shape[:2]
    if batch * seq == 0:
        raise ValueError(f"an empty batch: {batch} sequences of {seq} tokens")
    if seq > longest:
        raise ValueError(f"sequences of {seq} tokens, but the model's seq_len is {longest}")


@triton.jit
def rotary_kernel(
    QKV, COS, SIN, ROTATED, rows, seq, HEADS: tl.constexpr, VALUES: tl.constexpr,
    SIGN: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate query and key heads by the angle t of their position, or by -t (SIGN -1, backward).

        y1 = x1 cos(t) - x2 sin(t);  y2 = x2 cos(t) + x1 sin(t)

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


@operator
def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, values: int, sign: int) -> Tensor:
    """Rotate qkv [B, S, heads, head_dim] by `sign` times the angle of its position.

    The last `values` heads are copied.
    """
    check_sequences(qkv, len(cos))
    rows, programs, options = row_launch("rotary", qkv)
    rotated = torch.empty_like(qkv)
    wrap_triton(rotary_kernel)[(programs,)](
        QKV=qkv, COS=cos, SIN=sin, ROTATED=rotated, rows=rows, seq=qkv.shape[1],
        HEADS=qkv.shape[2], VALUES=values, SIGN=sign, **options,
    )  # fmt: skip
    return rotated


class Rotary(torch.autograd.Function):
    """Rotate the query and key heads of qkv [B, S, H + 2 K, head_dim] by their position along S.

    Channel i is rotated with channel i + head_dim / 2. cos and sin [S or more, 1, head_dim] repeat
    their first half.
    """

    @staticmethod
    def forward(ctx, qkv: Tensor, cos: Tensor, sin: Tensor, num_kv_heads: int):
        ctx.save_for_backward(cos, sin)
        ctx.values = num_kv_heads
        return rotary(qkv.contiguous(), cos, sin, num_kv_heads, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return rotary(grad.contiguous(), *ctx.saved_tensors, ctx.values, -1), None, None, None


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


@operator
def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up [..., I] of gate_up [..., 2 I]."""
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    rows, programs, options = row_launch("swiglu_forward", out, whole=False)
    grid = (programs, triton.cdiv(out.shape[-1], options["BLOCK_C"]))
    wrap_triton(swiglu_forward_kernel)[grid](GATE_UP=gate_up, OUT=out, rows=rows, **options)
    return out


@operator
def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Compute the gradient of gate_up, packed as it is."""
    rows, programs, options = row_launch("swiglu_backward", grad, whole=False)
    grad_gate_up = torch.empty_like(gate_up)
    grid = (programs, triton.cdiv(grad.shape[-1], options["BLOCK_C"]))
    wrap_triton(swiglu_backward_kernel)[grid](
        GRAD=grad, GATE_UP=gate_up, GRAD_GATE_UP=grad_gate_up, rows=rows, **options
    )
    return grad_gate_up


class SwiGLUActivation(torch.autograd.Function):
    """Compute silu(gate) * up [..., I] of gate_up [..., 2 I], gates first."""

    @staticmethod
    def forward(ctx, gate_up: Tensor):
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return swiglu_backward(grad.contiguous(), *ctx.saved_tensors)


# Causal attention of packed heads, QKV [B, S, H + 2 K, D]: the H query heads of a token, its K key
# heads, its K value heads. A key head serves a group of H / K query heads.


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
    # programs with the most keys start first
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
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
    """Store the gradient [ROWS, D] of a head before its rotation, given that of the rotated head.

        dx1 = dy1 cos(t) + dy2 sin(t);  dx2 = dy2 cos(t) - dy1 sin(t)

    token_at [ROWS]: where the head is in GRAD. position [ROWS]: of its token, below seq.
    """
    first, second = tl.split(tl.permute(tl.reshape(grad, (ROWS, 2, D // 2)), (0, 2, 1)))
    channel, inside = tl.arange(0, D // 2), (position < seq)[:, None]
    angle = position[:, None] * D + channel[None, :]
    cos = tl.load(COS + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(SIN + angle, mask=inside, other=0.0).to(tl.float32)
    at = token_at[:, None] + channel[None, :]
    tl.store(GRAD + at, first * cos + second * sin, mask=inside)
    tl.store(GRAD + at + D // 2, second * cos - first * sin, mask=inside)


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
    GRAD_QKV as QKV; with COS and SIN (or None) that of QKV before its heads were rotated. A program
    owns BLOCK_M queries of one head, and goes through their keys by
    BLOCK_N.
    """
    TOKEN: tl.constexpr = (H + 2 * K) * D  # elements of a token in QKV
    VALUE: tl.constexpr = K * D  # from a key head to its value head
    batch, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    # programs with the most keys start first
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
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
    if COS is None:
        tl.store(GRAD_QKV + query_at, grad_q * scale, mask=inside)
    else:
        token_at = token * TOKEN + head * D
        store_unrotated(GRAD_QKV, COS, SIN, grad_q * scale, token_at, query, seq, D, BLOCK_M)


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
        for MASKED in tl.static_range(2):  # at last the queries that see every key of this block
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
    if COS is None:
        tl.store(GRAD_QKV + key_at, grad_k * scale, mask=inside)
    else:
        token_at = (batch * seq + key) * TOKEN + (H + kv_head) * D
        store_unrotated(GRAD_QKV, COS, SIN, grad_k * scale, token_at, key, seq, D, BLOCK_N)
    tl.store(GRAD_QKV + key_at + VALUE, grad_v, mask=inside)


def attention_sizes(qkv: Tensor, num_heads: int) -> dict:
    """Return what the three kernels are compiled for, besides their blocks."""
    packed, dim = qkv.shape[2:]
    return {
        "H": num_heads,
        "K": (packed - num_heads) // 2,
        "D": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "PRECISION": dot_precision(qkv.dtype),
    }


@operator
def attention_forward(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Compute causal attention [B, S, H, D] of qkv [B, S, H + 2 K, D].

    Returns it, and the base-2 logarithm of the softmax's sums [B, H, S].
    """
    (batch, seq, _, dim), chosen = qkv.shape, blocks("attention_forward", qkv.dtype)
    out = qkv.new_empty(batch, seq, num_heads, dim)
    log_sum_exp = qkv.new_empty(batch, num_heads, seq, dtype=torch.float32)
    grid = (batch * num_heads, triton.cdiv(seq, chosen["BLOCK_M"]))
    wrap_triton(attention_forward_kernel)[grid](
        QKV=qkv, OUT=out, LOG_SUM_EXP=log_sum_exp, seq=seq, scale=dim**-0.5,
        **attention_sizes(qkv, num_heads), **chosen,
    )  # fmt: skip
    return out, log_sum_exp


@operator
def attention_backward(
    qkv: Tensor, out: Tensor, log_sum_exp: Tensor, grad: Tensor, cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute the gradient of qkv, packed as it is.

    With cos and sin it is that of qkv before its heads were rotated.
    """
    batch, seq, num_heads, dim = out.shape
    sizes = {"seq": seq, "scale": dim**-0.5, **attention_sizes(qkv, num_heads)}
    delta, grad_qkv = torch.empty_like(log_sum_exp), torch.empty_like(qkv)
    chosen = blocks("attention_backward_queries", qkv.dtype)
    grid = (batch * num_heads, triton.cdiv(seq, chosen["BLOCK_M"]))
    wrap_triton(attention_backward_queries_kernel)[grid](
        QKV=qkv, OUT=out, LOG_SUM_EXP=log_sum_exp, GRAD=grad, COS=cos, SIN=sin, DELTA=delta,
        GRAD_QKV=grad_qkv, **sizes, **chosen,
    )  # fmt: skip
    chosen = blocks("attention_backward_keys", qkv.dtype)
    grid = (batch * sizes["K"], triton.cdiv(seq, chosen["BLOCK_N"]))
    wrap_triton(attention_backward_keys_kernel)[grid](
        QKV=qkv, LOG_SUM_EXP=log_sum_exp, GRAD=grad, COS=cos, SIN=sin, DELTA=delta,
        GRAD_QKV=grad_qkv, **sizes, **chosen,
    )  # fmt: skip
    return grad_qkv


class CausalAttention(torch.autograd.Function):
    """Compute causal attention [B, S, H, D] of packed heads [B, S, H + 2 K, D].

    Flash attention (Dao 2023): the backward pass computes the scores again from the sums that the
    forward pass kept. With cos and sin query and key heads are rotated first, and their gradients
    rotated back where they are stored.
    """

    @staticmethod
    def forward(
        ctx, qkv: Tensor, num_heads: int, cos: Tensor | None = None, sin: Tensor | None = None
    ):  # fmt: skip
        qkv = qkv.contiguous()
        if cos is not None:
            qkv = rotary(qkv, cos, sin, (qkv.shape[2] - num_heads) // 2, 1)
        out, log_sum_exp = attention_forward(qkv, num_heads)
        ctx.save_for_backward(qkv, out, log_sum_exp, cos, sin)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        qkv, out, log_sum_exp, cos, sin = ctx.saved_tensors
        grad = attention_backward(qkv, out, log_sum_exp, grad.contiguous(), cos, sin)
        return grad, None, None, None


@triton.jit
def next_token(LABELS, row, rows, seq):
    """Return the label of the token after this one; -100 for the last of its sample."""
    known = (row < rows) & (row % seq < seq - 1)
    return tl.load(LABELS + row + 1, mask=known, other=-100)


@triton.jit
def cross_entropy_forward_kernel(
    LOGITS, LABELS, LOSSES, LOG_SUM_EXP, rows, seq, C: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute loss = log(sum(exp(logits))) - logits[target] of each row; 0 for a target of -100.

    The sum is online, as that of attention. LOGITS [rows, C], LABELS, LOSSES, LOG_SUM_EXP [rows].
    A row's target is the next token's label. A program owns ROWS rows, and goes through their
    columns by BLOCK_C.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_max = tl.full([ROWS], -3e38, tl.float32)  # not -inf, which a whole block may be
    row_sum = tl.zeros([ROWS], tl.float32)
    for start in range(0, C, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        inside = (row < rows)[:, None] & (column < C)[None, :]
        at = LOGITS + row[:, None] * C + column[None, :]
        logits = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        logits = tl.where((column < C)[None, :], logits, float("-inf"))
        new_row_max = tl.maximum(row_max, tl.max(logits, 1))
        rescale = tl.exp(row_max - new_row_max)
        row_sum = row_sum * rescale + tl.sum(tl.exp(logits - new_row_max[:, None]), 1)
        row_max = new_row_max
    log_sum_exp = row_max + tl.log(row_sum)
    target = next_token(LABELS, row, rows, seq)
    known = (target >= 0) & (target < C)  # any other label but -100 makes the loss NaN
    logit = tl.load(LOGITS + row * C + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(LOSSES + row, tl.where(target == -100, 0.0, log_sum_exp - logit), mask=row < rows)
    tl.store(LOG_SUM_EXP + row, log_sum_exp, mask=row < rows)


@triton.jit
def mean_loss_kernel(LOSSES, LABELS, LOSS, rows, seq, BLOCK: tl.constexpr):
    """Compute the mean of the losses of rows that have a target, and how many these are.

    LOSSES, LABELS [rows], LOSS [2]. One program owns all.
    """
    total = tl.zeros([BLOCK], tl.float32)
    known = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(LOSSES + row, mask=row < rows, other=0.0)
        known += (next_token(LABELS, row, rows, seq) != -100).to(tl.int32)
    number = tl.sum(known).to(tl.float32)
    tl.store(LOSS, tl.sum(total) / number)
    tl.store(LOSS + 1, number)


@triton.jit
def cross_entropy_backward_kernel(
    GRAD, LOGITS, LABELS, LOG_SUM_EXP, LOSS, GRAD_LOGITS, rows, seq, C: tl.constexpr,
    BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute dlogits = (softmax(logits) - onehot(target)) * dloss / n; 0 for a target of -100.

    GRAD (dloss) [], LABELS, LOG_SUM_EXP [rows], LOSS [2] of which n is the second, LOGITS,
    GRAD_LOGITS [rows, C]. A program owns ROWS rows, and goes through their columns by BLOCK_C.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    target = next_token(LABELS, row, rows, seq)
    log_sum_exp = tl.load(LOG_SUM_EXP + row, mask=row < rows, other=0.0)
    grad = tl.where(target == -100, 0.0, tl.load(GRAD) / tl.load(LOSS + 1))
    for start in range(0, C, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        inside = (row < rows)[:, None] & (column < C)[None, :]
        at = row[:, None] * C + column[None, :]
        logits = tl.load(LOGITS + at, mask=inside, other=0.0).to(tl.float32)
        p = tl.exp(logits - log_sum_exp[:, None])
        p -= tl.where(column[None, :] == target[:, None], 1.0, 0.0)
        tl.store(GRAD_LOGITS + at, p * grad[:, None], mask=inside)


@operator
def cross_entropy_forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean loss of logits [B, S, V] and labels [B, S], the same tokens.

    Returns it with the number of losses that it is the mean of [2], and log-sum-exp [B S].
    """
    rows, programs, options = row_launch("cross_entropy_forward", logits, whole=False)
    losses, log_sum_exp = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    loss, seq = logits.new_empty(2, dtype=torch.float32), labels.shape[-1]
    wrap_triton(cross_entropy_forward_kernel)[(programs,)](
        LOGITS=logits, LABELS=labels, LOSSES=losses, LOG_SUM_EXP=log_sum_exp,
        rows=rows, seq=seq, **options,
    )  # fmt: skip
    wrap_triton(mean_loss_kernel)[(1,)](
        LOSSES=losses, LABELS=labels, LOSS=loss, rows=rows, seq=seq, **blocks("mean_loss")
    )
    return loss, log_sum_exp


@operator
def cross_entropy_backward(
    grad: Tensor, logits: Tensor, labels: Tensor, log_sum_exp: Tensor, loss: Tensor
) -> Tensor:  # fmt: skip
    """Compute the gradient of the logits, in their type."""
    rows, programs, options = row_launch("cross_entropy_backward", logits, whole=False)
    grad_logits = torch.empty_like(logits)
    wrap_triton(cross_entropy_backward_kernel)[(programs,)](
        GRAD=grad, LOGITS=logits, LABELS=labels, LOG_SUM_EXP=log_sum_exp, LOSS=loss,
        GRAD_LOGITS=grad_logits, rows=rows, seq=labels.shape[-1], **options,
    )  # fmt: skip
    return grad_logits


class NextTokenLoss(torch.autograd.Function):
    """Compute the mean cross-entropy of the next token, float32, of logits [B, S, V] of any type.

    labels [B, S] are the same tokens. The kernels shift them and take the mean, which leaves ten
    small kernels out; a label of -100 is ignored.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor):
        logits, labels = logits.contiguous(), labels.contiguous()
        loss, log_sum_exp = cross_entropy_forward(logits, labels)
        ctx.save_for_backward(logits, labels, log_sum_exp, loss)
        return loss[0]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return cross_entropy_backward(grad, *ctx.saved_tensors), None


@triton.jit
def embedding_backward_kernel(
    GRAD, ORDER, STARTS, OUT, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Add dW[v] += sum of dy[t] over the tokens t that are word v.

    GRAD (dy) [tokens, C], OUT (dW) [words, C]. ORDER [tokens] lists tokens sorted by word, those of
    word v from STARTS[v] to STARTS[v + 1]. A program owns BLOCK_C channels of one word.
    """
    word = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.load(OUT + word * C + channel, mask=channel < C, other=0.0)
    end = tl.load(STARTS + word + 1)
    for start in range(tl.load(STARTS + word), end, ROWS):
        place = start + tl.arange(0, ROWS)
        row = tl.load(ORDER + place, mask=place < end, other=0)
        inside = (place < end)[:, None] & (channel < C)[None, :]
        at = GRAD + row[:, None] * C + channel[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float32), 0)
    tl.store(OUT + word * C + channel, total, mask=channel < C)


@partial(operator, changes=("total",))
def embedding_backward(grad: Tensor, order: Tensor, starts: Tensor, total: Tensor) -> None:
    """Add rows of grad [T, D] to those of total [V, D].

    Row v gets those that `order` names at the places starts[v] to starts[v + 1].
    """
    chosen, dim = blocks("embedding_backward"), grad.shape[-1]
    width = min(chosen.pop("BLOCK_C"), triton.next_power_of_2(dim))
    wrap_triton(embedding_backward_kernel)[(len(total), triton.cdiv(dim, width))](
        GRAD=grad, ORDER=order, STARTS=starts, OUT=total, C=dim, BLOCK_C=width, **chosen
    )


class TiedEmbedding(torch.autograd.Function):
    """Look up rows [..., D] of a weight [V, D] for tokens [...].

    Which tokens look up the same row is found in the forward pass, beside it in a graph. The output
    projection has the same weight, and the backward pass begins there: the gradient that is found
    here is added to that one, `added_to`.
    """

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor, side: SideStreams):
        def sort() -> tuple[Tensor, Tensor]:
            words, order = torch.sort(tokens.flatten(), stable=True)
            wanted = torch.arange(len(weight) + 1, device=words.device)
            return order, torch.searchsorted(words, wanted)

        ctx.save_for_backward(*side.run(sort, tokens))
        ctx.weight, ctx.added_to = weight, None
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        total, ctx.added_to = ctx.added_to, None
        total = torch.zeros_like(ctx.weight) if total is None else total
        embedding_backward(grad.contiguous().flatten(0, -2), *ctx.saved_tensors, total)
        return None, total, None


@triton.jit
def tile(
    rows, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Return the rows [BLOCK_M] and columns [BLOCK_N] of this program's tile of the result.

    GROUP tiles below each other come first, for the L2 cache's sake.
    """
    across: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    group, place = tl.program_id(0) // (GROUP * across), tl.program_id(0) % (GROUP * across)
    height = tl.minimum(tl.cdiv(rows, BLOCK_M) - group * GROUP, GROUP)
    row = (group * GROUP + place % height).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    return row, place // height * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def swiglu_gemm_forward_kernel(
    X, WEIGHT, GATE_UP, OUT, rows, D: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute gate = X Wgate^T, up = X Wup^T and out = silu(gate) * up.

    X [rows, D], WEIGHT [2 INNER, D], the rows of Wgate first, GATE_UP [rows, 2 INNER], OUT
    [rows, INNER]. A program owns a tile [BLOCK_M, BLOCK_N] of gate, up and out, and goes through D
    by BLOCK_K.
    """
    UP: tl.constexpr = INNER  # from a gate to its up, in rows of WEIGHT and columns of GATE_UP
    row, column = tile(rows, INNER, BLOCK_M, BLOCK_N, GROUP)
    channel = tl.arange(0, BLOCK_K)
    # beyond the end: some row, which is not stored
    x_at = X + (row % rows)[:, None] * D + channel[None, :]
    weight_at = WEIGHT + (column % INNER).to(tl.int64)[None, :] * D + channel[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, D, BLOCK_K):
        left = D - start
        x = tl.load(x_at + start, mask=(channel < left)[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=(channel < left)[:, None], other=0.0)
        gate = tl.dot(x, weight, gate, input_precision=PRECISION)
        weight = tl.load(weight_at + UP * D + start, mask=(channel < left)[:, None], other=0.0)
        up = tl.dot(x, weight, up, input_precision=PRECISION)
    inside = (row < rows)[:, None] & (column < INNER)[None, :]
    at = row[:, None] * (2 * INNER) + column[None, :]
    gate, up = gate.to(OUT.dtype.element_ty), up.to(OUT.dtype.element_ty)
    tl.store(GATE_UP + at, gate, mask=inside)
    tl.store(GATE_UP + at + UP, up, mask=inside)
    gate = gate.to(tl.float32)
    out_at = OUT + row[:, None] * INNER + column[None, :]
    tl.store(out_at, gate * tl.sigmoid(gate) * up.to(tl.float32), mask=inside)


@triton.jit
def swiglu_gemm_backward_kernel(
    GRAD, WEIGHT, GATE_UP, GRAD_GATE_UP, rows, D: tl.constexpr, INNER: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of gate and up from dy, that of the result of the last GEMM.

        dout = dy Wdown;  s = sigmoid(gate)
        dgate = dout * up * s * (1 + gate * (1 - s));  dup = dout * gate * s

    GRAD (dy) [rows, D], WEIGHT (Wdown) [D, INNER], GATE_UP, GRAD_GATE_UP [rows, 2 INNER]. A program
    owns a tile [BLOCK_M, BLOCK_N] of dgate and dup, and goes through D by BLOCK_K.
    """
    UP: tl.constexpr = INNER  # from a gate to its up
    row, column = tile(rows, INNER, BLOCK_M, BLOCK_N, GROUP)
    channel = tl.arange(0, BLOCK_K)
    grad_at = GRAD + (row % rows)[:, None] * D + channel[None, :]
    weight_at = WEIGHT + (column % INNER)[None, :] + channel.to(tl.int64)[:, None] * INNER
    grad = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # dout
    for start in range(0, D, BLOCK_K):
        left = D - start
        g = tl.load(grad_at + start, mask=(channel < left)[None, :], other=0.0)
        weight = tl.load(weight_at + start * INNER, mask=(channel < left)[:, None], other=0.0)
        grad = tl.dot(g, weight, grad, input_precision=PRECISION)
    inside = (row < rows)[:, None] & (column < INNER)[None, :]
    at = row[:, None] * (2 * INNER) + column[None, :]
    gate = tl.load(GATE_UP + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + at + UP, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(GRAD_GATE_UP + at, grad * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
    tl.store(GRAD_GATE_UP + at + UP, grad * gate * sigmoid, mask=inside)


def swiglu_gemm_launch(kernel: str, x: Tensor, width: int) -> tuple[tuple[int], dict]:
    """Return grid and block sizes for x [rows, D] and a result of `width` columns."""
    chosen, (rows, dim) = blocks(kernel, x.dtype), x.shape
    tiles = triton.cdiv(rows, chosen["BLOCK_M"]) * triton.cdiv(width, chosen["BLOCK_N"])
    sizes = {"rows": rows, "D": dim, "INNER": width, "PRECISION": dot_precision(x.dtype)}
    return (tiles,), {**sizes, **chosen}


@operator
def swiglu_gemm_forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute x weight^T [T, 2 I] and silu(gate) * up [T, I] of x [T, D] and weight [2 I, D].

    Gates come first.
    """
    (rows, _), width = x.shape, len(weight) // 2
    gate_up, out = x.new_empty(rows, 2 * width), x.new_empty(rows, width)
    grid, options = swiglu_gemm_launch("swiglu_gemm_forward", x, width)
    wrap_triton(swiglu_gemm_forward_kernel)[grid](
        X=x, WEIGHT=weight, GATE_UP=gate_up, OUT=out, **options
    )  # fmt: skip
    return gate_up, out


@operator
def swiglu_gemm_backward(grad: Tensor, weight: Tensor, gate_up: Tensor) -> Tensor:
    """Compute the gradient of gate_up [T, 2 I].

    grad [T, D]: of the result of the MLP. weight [D, I]: of its last GEMM.
    """
    grid, options = swiglu_gemm_launch("swiglu_gemm_backward", grad, weight.shape[1])
    grad_gate_up = torch.empty_like(gate_up)
    wrap_triton(swiglu_gemm_backward_kernel)[grid](
        GRAD=grad, WEIGHT=weight, GATE_UP=gate_up, GRAD_GATE_UP=grad_gate_up, **options
    )
    return grad_gate_up


def our_gemm_wins(dtype: torch.dtype) -> bool:
    """Tell whether a Triton GEMM with SwiGLU in its epilogue beats the vendor's and a kernel.

    Measured on an H100 for x [1024, 512] and [8192, 1024]: in exact float32, as three TF32
    products, it does; in bfloat16 it takes 0.98 to 1.17 of their time forward and 1.05 to 1.10
    backward, in TF32 1.02 and 1.8.
    """
    return INTERPRETED or dot_precision(dtype) == "tf32x3"


class SwiGLUGEMM(torch.autograd.Function):
    """Compute down(silu(gate(x)) * up(x)) [..., D] of x [..., D].

    The weights are given as parameters, and as the GEMMs take them.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, gate_up: Tensor, down: Tensor, gate_up_cast: Tensor, down_cast: Tensor,
        direct: bool, side: SideStreams,
    ):  # fmt: skip
        x = x.contiguous()
        ctx.parameters, ctx.direct, ctx.side = (gate_up, down), direct, side
        gate_up, activation = swiglu_gemm_forward(x.flatten(0, -2), gate_up_cast)
        ctx.save_for_backward(x, gate_up, activation, gate_up_cast, down_cast)
        return F.linear(activation, down_cast).view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, gate_up, activation, gate_up_cast, down_cast = ctx.saved_tensors
        weight, down = ctx.parameters
        grad, side = grad.contiguous().flatten(0, -2), ctx.side
        grad_x, grad_weight, grad_down = None, None, None
        if ctx.needs_input_grad[2]:
            grad_down = weight_gradient(side, down, grad, activation, ctx.direct)
        if any(ctx.needs_input_grad[:2]):
            grad_gate_up = swiglu_gemm_backward(grad, down_cast, gate_up)
        side.finish(down)
        if ctx.needs_input_grad[1]:
            rows = grad_gate_up, x.flatten(0, -2)
            grad_weight = weight_gradient(side, weight, *rows, ctx.direct)
        if ctx.needs_input_grad[0]:
            grad_x = (grad_gate_up @ gate_up_cast).view_as(x)
        side.finish(weight)
        return grad_x, grad_weight, grad_down, None, None, None, None


@triton.jit
def adamw_kernel(
    WEIGHTS, CASTS, GRADS, AVERAGES, SQUARES, CORRECTIONS, LR, SCALE, FOUND_INF, size,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, DECAY: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Update weights w from their gradients g, and write them in the type of the GEMMs, too.

        m += (1 - beta1) * (g - m);  v += (1 - beta2) * (g^2 - v)
        w = w * (1 - lr * decay) - lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)

    WEIGHTS, CASTS (or None), GRADS, AVERAGES (m), SQUARES (v) [size]. CORRECTIONS [2] are
    c = 1 - beta^steps; LR [] is the learning rate. Of a gradient scaler, or None: gradients are
    divided by SCALE [], and FOUND_INF [] leaves the step out. A program owns every PROGRAMS-th
    block of BLOCK elements.
    """
    if FOUND_INF is not None:
        size = tl.where(tl.load(FOUND_INF) > 0, 0, size)
    lr = tl.load(LR).to(tl.float32)
    root_of_correction = tl.sqrt(tl.load(CORRECTIONS + 1)).to(tl.float32)
    rate = lr / tl.load(CORRECTIONS).to(tl.float32)
    for start in range(tl.program_id(0) * BLOCK, size, PROGRAMS * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        inside = at < size
        grad = tl.load(GRADS + at, mask=inside, other=0.0).to(tl.float32)
        if SCALE is not None:
            grad /= tl.load(SCALE)
        average = tl.load(AVERAGES + at, mask=inside, other=0.0)
        average += (1 - BETA1) * (grad - average)
        square = tl.load(SQUARES + at, mask=inside, other=0.0)
        square += (1 - BETA2) * (grad * grad - square)
        weight = tl.load(WEIGHTS + at, mask=inside, other=0.0) * (1 - lr * DECAY)
        weight -= rate * average / (tl.sqrt(square) / root_of_correction + EPS)
        tl.store(AVERAGES + at, average, mask=inside)
        tl.store(SQUARES + at, square, mask=inside)
        tl.store(WEIGHTS + at, weight, mask=inside)
        if CASTS is not None:
            tl.store(CASTS + at, weight, mask=inside)


@partial(operator, changes=("weights", "casts", "averages", "squares"))
def adamw(
    weights: Tensor, casts: Tensor | None, grads: Tensor, averages: Tensor, squares: Tensor,
    corrections: Tensor, lr: Tensor, scale: Tensor | None, found_inf: Tensor | None,
    beta1: float, beta2: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """Update as many weights as there are gradients, and their moments; write casts, too.

    corrections [2]: 1 - beta ** steps in float64; lr []: the learning rate. A scaler's `scale`
    divides gradients, its found_inf stops all.
    """
    options, size = blocks("adamw"), len(grads)
    wanted = triton.next_power_of_2(triton.cdiv(size, options["BLOCK"]))
    options["PROGRAMS"] = min(options["PROGRAMS"], wanted)
    wrap_triton(adamw_kernel)[(options["PROGRAMS"],)](
        WEIGHTS=weights, CASTS=casts, GRADS=grads, AVERAGES=averages, SQUARES=squares,
        CORRECTIONS=corrections, LR=lr, SCALE=scale, FOUND_INF=found_inf, size=size,
        BETA1=beta1, BETA2=beta2, EPS=eps, DECAY=decay, **options,
    )  # fmt: skip


class Options(dict):
    """Hold the options of the optimizer, of which only the learning rate may change.

    The kernel reads the learning rate from the device, and is compiled for the others. So a
    learning rate that is assigned, as some schedulers do, is written there, where a graph of the
    step finds it. Another value for one of the others raises ValueError.
    """

    def __setitem__(self, name: str, value: object) -> None:
        if name == "lr" and name in self:
            self[name].fill_(value)
        elif name in ("betas", "eps", "weight_decay") and value != self.get(name, value):
            wrong = f"{name} was {self[name]} when it was made and cannot become {value}"
            raise ValueError(f"FusedAdamW: {wrong}")
        else:
            super().__setitem__(name, value)


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with all parameters in one buffer, and one kernel for it.

    Weights, their casts to `dtype` for the GEMMs and moments are parts of buffers of the same
    order, so the kernel needs no list of addresses. It is launched once for each of `groups`, which
    share a buffer of gradients; that of a single parameter is in `grad_dtype`. Gradients are
    written anew in every step: there is nothing to clear. `side`: what it shares with the model.

    On several GPUs it takes the place of DistributedDataParallel, which would copy each gradient to
    a buffer of its own: average_gradients comes before every step.
    """

    _step_supports_amp_scaling = True  # the kernel divides by GradScaler's scale and skips a step

    def __init__(
        self, groups: Iterable[list[nn.Parameter]], lr: float, dtype: torch.dtype,
        grad_dtype: torch.dtype = torch.float32, side: SideStreams | None = None,
    ):  # fmt: skip
        groups, self.side = list(groups), side or SideStreams()
        parameters = [parameter for group in groups for parameter in group]
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        super().__init__(parameters, defaults)
        # each parameter begins at a multiple of 128 bytes
        sizes = [triton.cdiv(p.numel(), 64) * 64 for p in parameters]
        begins, device = [0, *itertools.accumulate(sizes)], parameters[0].device
        rate = torch.full((), lr, device=device, dtype=torch.float64)
        self.param_groups = [Options(self.param_groups[0], lr=rate)]
        names = ("weight", "exp_avg", "exp_avg_sq")
        self.buffers = {name: torch.zeros(begins[-1], device=device) for name in names}
        if dtype != torch.float32:
            self.buffers["cast"] = torch.zeros(begins[-1], device=device, dtype=dtype)
        self.steps = torch.zeros(len(parameters), 1, device=device)
        self.together = True  # all parameters have taken as many steps
        self.betas = torch.tensor(self.defaults["betas"], device=device, dtype=torch.float64)
        for parameter, begin, steps in zip(parameters, begins, self.steps, strict=False):
            end, views = begin + parameter.numel(), {}
            for name, buffer in self.buffers.items():
                # .data: or a change of one part would count as a change of all
                views[name] = buffer[begin:end].view_as(parameter).data
            parameter.data = views.pop("weight").copy_(parameter.detach())
            if "cast" in views:
                self.side.casts[parameter] = views["cast"]
                self.side.versions[parameter] = -1  # not written yet
            self.state[parameter] = {"step": steps[0], **views}
        ends = itertools.accumulate(map(len, groups))
        self.gradients = []
        for group, end in zip(groups, ends, strict=True):
            own_dtype = grad_dtype if len(group) == 1 else torch.float32
            buffer = GradientBuffer(group, begins[end - len(group) : end + 1], own_dtype)
            self.gradients.append(buffer)
            self.side.buffers |= dict.fromkeys(group, buffer)
        self.averaged = False  # over several GPUs
        self.with_gradient: list[list[bool]] = []  # of each process, which parameters had one
        if dist.is_initialized():
            # One seed gives one set of weights on equal machines; this makes sure.
            dist.broadcast(self.buffers["weight"], 0)

    def load_state_dict(self, state_dict: dict) -> None:
        """Take options, moments and numbers of steps to where the kernel reads them.

        Raises ValueError if they are in another order.
        """
        given, own = (
            {index: values["exp_avg"].shape for index, values in state["state"].items()}
            for state in (state_dict, self.state_dict())
        )
        if given != own:
            wrong = "the state is of other parameters, or in another order"
            raise ValueError(f"{wrong}, such as that of PyTorch's AdamW")
        kept = {parameter: dict(values) for parameter, values in self.state.items()}
        options = self.param_groups[0]
        for name, value in state_dict["param_groups"][0].items():
            if name != "params":
                options[name] = value
        super().load_state_dict(state_dict)
        self.param_groups = [options]
        for parameter, values in kept.items():
            for name in ("step", "exp_avg", "exp_avg_sq"):
                values[name].copy_(self.state[parameter][name])
            self.state[parameter] = values
        self.together = bool((self.steps == self.steps[0]).all())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients."""
        super().zero_grad(set_to_none)
        self.averaged = False
        for buffer in self.gradients if set_to_none else ():
            buffer.clear()

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over all processes; of one process they are what they should be.

        It comes before a gradient scaler looks at them: an infinity of one process has reached all
        by then, so all skip the same steps. No backward pass may follow before step. Raises
        RuntimeError where not all have gradients of the same parameters, in every step.
        """
        if not dist.is_initialized():
            return
        found = [p.grad is not None for p in self.param_groups[0]["params"]]
        if not self.with_gradient:
            self.with_gradient = [found] * dist.get_world_size()
            dist.all_gather_object(self.with_gradient, found)
        if any(found != theirs for theirs in self.with_gradient):
            wrong = "all processes need gradients of the same parameters, in every step"
            raise RuntimeError(f"FusedAdamW: {wrong}")
        for buffer in reversed(self.gradients):
            if buffer.collect():  # of all processes or of none
                with self.side.averaging(buffer):
                    buffer.average()
        self.side.averaged()
        self.averaged = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient.

        In a graph that has work beside the chain each group is updated as soon as it can be.
        """
        if dist.is_initialized() and not self.averaged:
            raise RuntimeError("FusedAdamW: average_gradients comes before step on several GPUs")
        skipped = getattr(self, "found_inf", None)
        buffers = [buffer for buffer in reversed(self.gradients) if buffer.collect()]
        with self.side.updating(after_chain=skipped is not None):
            taken = 1 if skipped is None else 1 - skipped
            self.steps += taken
            parameters = self.param_groups[0]["params"]
            for parameter in parameters:
                if parameter.grad is None:
                    self.state[parameter]["step"] -= taken
                    self.together = False
            corrections = dict(zip(parameters, 1 - self.betas**self.steps, strict=True))
            for buffer in buffers:
                self.side.wait_for(buffer)
                alone = [[p] for p in buffer.parameters if p.grad is not None]
                for some in [buffer.parameters] if self.together else alone:
                    self.update(some, corrections[some[0]])
        for buffer in self.gradients:
            buffer.clear()
        self.averaged = False

    def update(self, parameters: list[nn.Parameter], corrections: Tensor) -> None:
        """Update these parameters, which lie side by side and have taken as many steps."""
        gradients, group = self.side.buffers[parameters[0]], self.param_groups[0]
        begin, end = gradients.spans[parameters[0]][0], gradients.spans[parameters[-1]][1]
        parts = {name: buffer[begin:end] for name, buffer in self.buffers.items()}
        tensors = parts["weight"], parts.get("cast")
        tensors += (gradients.tensor[begin - gradients.begin : end - gradients.begin],)
        tensors += parts["exp_avg"], parts["exp_avg_sq"], corrections, group["lr"]
        scaler = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        adamw(*tensors, *scaler, *group["betas"], group["eps"], group["weight_decay"])


# Inference with a transformer layer as one launch.
#
# One program per multiprocessor, so that all of them run at the same time, goes through the phases
# of the layer:
#   1  norm, query, key and value projection, rotary embedding      x        -> qkv
#   2  causal attention                                             qkv      -> attended
#   3  output projection, residual addition                         attended -> summed
#   4  norm, gate and up projection, SwiGLU                         summed   -> active
#   5  down projection, residual addition                           active   -> out
# In a phase the programs share out tiles of its result, and before the next they wait for each
# other. What a phase leaves to the next is small enough to stay in the L2 cache.


@triton.jit
def grid_barrier(COUNTER, THREADS: tl.constexpr):
    """Wait until every program of the grid has come here; all see what one has stored before.

    A release publishes stores, an acquire drops what caches hold. On NVIDIA one of THREADS does it
    for the program; on AMD, where no thread waits for the stores of other waves, all do. The
    counter only goes up: each multiple of what the grid adds opens one barrier.
    """
    arrivals = tl.num_programs(0) * THREADS
    counter = COUNTER + tl.zeros([THREADS], tl.int32)
    tl.debug_barrier()  # every thread has stored
    ticket = tl.max(tl.atomic_add(counter, 1, sem="release", scope="gpu"))
    opens = (ticket // arrivals + 1) * arrivals
    while tl.min(tl.atomic_add(counter, 0, sem="acquire", scope="gpu")) < opens:
        pass
    tl.debug_barrier()  # none loads before


@triton.jit
def load_tile(X, row, rows, column, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Load X[row, column], with rows STRIDE apart and zeros beyond its rows and COLUMNS."""
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at = X + row.to(tl.int64)[:, None] * STRIDE + column[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_tile(X, tile, row, rows, column, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Store X[row, column] = tile, with rows STRIDE apart, within its rows and COLUMNS."""
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at = X + row.to(tl.int64)[:, None] * STRIDE + column[None, :]
    tl.store(at, tile, mask=inside)


@triton.jit
def norm_gemm(
    X, NORM, WEIGHT, row, rows, feature, FEATURES: tl.constexpr, APART: tl.constexpr,
    C: tl.constexpr, eps: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return norm(x) W^T in these rows, for these features and for those APART from them.

        norm(x) W^T = rstd * ((x * NORM) W^T)

    A row's rstd scales its products as well as its elements, so the one loop over channels finds
    both. X [rows, C], NORM [C], WEIGHT (W) [FEATURES, C].
    """
    squares = tl.zeros([row.shape[0], BLOCK_K], tl.float32)
    first = tl.zeros([row.shape[0], feature.shape[0]], tl.float32)
    second = tl.zeros([row.shape[0], feature.shape[0]], tl.float32)
    for start in range(0, C, BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        x = load_tile(X, row, rows, channel, C, C).to(tl.float32)
        squares += x * x
        norm = tl.load(NORM + channel, mask=channel < C, other=0.0).to(tl.float32)
        x = (x * norm[None, :]).to(WEIGHT.dtype.element_ty)
        weight = load_tile(WEIGHT, feature, FEATURES, channel, C, C)
        first = tl.dot(x, tl.trans(weight), first, input_precision=PRECISION)
        weight = load_tile(WEIGHT, feature + APART, FEATURES, channel, C, C)
        second = tl.dot(x, tl.trans(weight), second, input_precision=PRECISION)
    rstd = 1 / tl.sqrt(tl.sum(squares, 1) / C + eps)[:, None]
    return first * rstd, second * rstd


@triton.jit
def gemm_residual_tile(
    A, WEIGHT, RESIDUAL, OUT, row, rows, column, C: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store a tile of OUT = A W^T + RESIDUAL.

    A [rows, C], WEIGHT (W) [COLUMNS, C], RESIDUAL, OUT [rows, COLUMNS].
    """
    out = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for start in range(0, C, BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        a = load_tile(A, row, rows, channel, C, C)
        weight = load_tile(WEIGHT, column, COLUMNS, channel, C, C)
        out = tl.dot(a, tl.trans(weight), out, input_precision=PRECISION)
    out += load_tile(RESIDUAL, row, rows, column, COLUMNS, COLUMNS).to(tl.float32)
    store_tile(OUT, out, row, rows, column, COLUMNS, COLUMNS)


@triton.jit
def attention_tile(
    QKV, OUT, batch, head, first, seq, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the causal attention of one head for the queries from `first` on, BLOCK_M of them.

    As attention_forward_kernel, but without the sums, which only a backward pass needs.
    """
    TOKEN: tl.constexpr = (H + 2 * K) * D  # elements of a token in QKV
    VALUE: tl.constexpr = K * D  # from a key head to its value head
    channel, token = tl.arange(0, BLOCK_D), batch * seq + first + tl.arange(0, BLOCK_M)
    end = (batch + 1) * seq
    q = load_tile(QKV + head * D, token, end, channel, D, TOKEN)
    KEYS = QKV + (H + head // (H // K)) * D
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, seq), BLOCK_N):
        key = batch * seq + start + tl.arange(0, BLOCK_N)
        k = load_tile(KEYS, key, end, channel, D, TOKEN)
        v = load_tile(KEYS + VALUE, key, end, channel, D, TOKEN)
        # S = Q K^T
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (D**-0.5 * LOG2E)
        scores = tl.where(token[:, None] >= key[None, :], scores, float("-inf"))
        # online softmax
        new_row_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.exp2(scores - new_row_max[:, None])
        rescale = tl.exp2(row_max - new_row_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        # O += P V
        out = tl.dot(p.to(v.dtype), v, out * rescale[:, None], input_precision=PRECISION)
        row_max = new_row_max
    store_tile(OUT + head * D, out / row_sum[:, None], token, end, channel, D, H * D)


@triton.jit(do_not_specialize=["batches", "seq"])
def transformer_block_kernel(
    X, NORM_1, QKV_WEIGHT, O_WEIGHT, NORM_2, GATE_UP_WEIGHT, DOWN_WEIGHT, COS, SIN,
    QKV, ATTENDED, ACTIVE, SUMMED, OUT, COUNTER, batches, seq, eps: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, THREADS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_QUERY: tl.constexpr, BLOCK_KEY: tl.constexpr,
):  # fmt: skip
    """Compute phases FIRST to LAST of a layer, see above.

        x = x + attention(rotary(norm_1(x) Wqkv^T)) Wo^T
        out = x + (silu(norm_2(x) Wgate^T) * (norm_2(x) Wup^T)) Wdown^T

    X, SUMMED, OUT [B S, H D], weights [out, in], those of query, key and value and those of gate
    and up packed. In a phase program p owns the tiles p, p + programs, ... of its result: of a GEMM
    BLOCK_M x BLOCK_N, which it sums over BLOCK_K channels at a time, of the attention BLOCK_QUERY
    queries of a head, which go through BLOCK_KEY keys at a time.
    """
    C: tl.constexpr = H * D
    HALF: tl.constexpr = D // 2
    PACKED: tl.constexpr = (H + 2 * K) * D
    UP: tl.constexpr = INNER  # from a gate to its up
    rows = batches * seq
    row_tiles = tl.cdiv(rows, BLOCK_M)
    for PHASE in tl.static_range(FIRST, LAST + 1):
        if PHASE > FIRST:
            grid_barrier(COUNTER, THREADS)
        if PHASE == 1:
            tiles = row_tiles * tl.cdiv(PACKED // 2, BLOCK_N)
        elif PHASE == 2:
            tiles = tl.cdiv(seq, BLOCK_QUERY) * batches * H
        elif PHASE == 4:
            tiles = row_tiles * tl.cdiv(INNER, BLOCK_N)
        else:
            tiles = row_tiles * tl.cdiv(C, BLOCK_N)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            row = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
            column = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
            if PHASE == 1:  # a column is a channel of a head's first half, and that HALF from it
                feature = column // HALF * D + column % HALF
                first, second = norm_gemm(
                    X, NORM_1, QKV_WEIGHT, row, rows, feature, PACKED, HALF, C, eps, PRECISION,
                    BLOCK_K,
                )  # fmt: skip
                rotates = (column // HALF < H + K)[None, :]  # a value head's angle is 0
                cos = load_tile(COS, row % seq, seq, column % HALF, HALF, D).to(tl.float32)
                cos = tl.where(rotates, cos, 1.0)
                sin = load_tile(SIN, row % seq, seq, column % HALF, HALF, D).to(tl.float32)
                sin = tl.where(rotates, sin, 0.0)
                rotated = first * cos - second * sin
                store_tile(QKV, rotated, row, rows, feature, PACKED, PACKED)
                rotated = second * cos + first * sin
                store_tile(QKV, rotated, row, rows, feature + HALF, PACKED, PACKED)
            elif PHASE == 2:
                # those with the most keys start first
                start = (tiles - 1 - tile) // (batches * H) * BLOCK_QUERY
                attention_tile(
                    QKV, ATTENDED, tile // H % batches, tile % H, start, seq, H, K, D, BLOCK_D,
                    PRECISION, BLOCK_QUERY, BLOCK_KEY,
                )  # fmt: skip
            elif PHASE == 3:
                gemm_residual_tile(
                    ATTENDED, O_WEIGHT, X, SUMMED, row, rows, column, C, C, PRECISION, BLOCK_K
                )  # fmt: skip
            elif PHASE == 4:
                gate, up = norm_gemm(
                    SUMMED, NORM_2, GATE_UP_WEIGHT, row, rows, column, 2 * INNER, UP, C, eps,
                    PRECISION, BLOCK_K,
                )  # fmt: skip
                active = gate * tl.sigmoid(gate) * up
                store_tile(ACTIVE, active, row, rows, column, INNER, INNER)
            else:
                gemm_residual_tile(
                    ACTIVE, DOWN_WEIGHT, SUMMED, OUT, row, rows, column, INNER, C, PRECISION,
                    BLOCK_K,
                )  # fmt: skip


TOO_OLD = ""  # why a layer cannot be one launch
if not INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
    needed = "Triton 3.3 (PyTorch 2.7) for a cooperative launch"
    TOO_OLD = f"a layer as one launch needs {needed}, not {triton.__version__}"


@operator
def transformer_block(
    x: Tensor, input_norm: Tensor, qkv: Tensor, o: Tensor, post_attention_norm: Tensor,
    gate_up: Tensor, down: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int,
    eps: float, launches: int = 1,
) -> Tensor:  # fmt: skip
    """Return the residual stream x [B, S, D] after the layer with these weights.

    One launch, or 5: one for each phase. Programs of one launch wait for each other, so it is
    cooperative: all run at the same time, or it is an error.
    """
    check_sequences(x, len(cos))
    if launches == 1 and TOO_OLD:
        raise RuntimeError(TOO_OLD)
    (batch, seq, width), (packed, inner), dtype = x.shape, (len(qkv), down.shape[1]), qkv.dtype
    x, dim, chosen = x.contiguous(), width // num_heads, blocks("transformer_block", dtype)
    if batch * seq > 256 and BACKEND == "cuda" and dtype != torch.float32:
        chosen = block_sizes(BLOCKS["transformer_block many rows"])
        chosen |= OVERRIDES.get("transformer_block", {})
    if BACKEND == "cuda":
        chosen["maxnreg"] = 255  # the only program on its multiprocessor
    if launches == 1 and BACKEND != "interpreter":
        chosen["launch_cooperative_grid"] = True
    packed_heads, attended, active = (
        x.new_empty(batch * seq, channels, dtype=dtype) for channels in (packed, width, inner)
    )
    summed = torch.empty_like(x, dtype=torch.float32)
    out, counter = torch.empty_like(x), x.new_zeros(1, dtype=torch.int32)
    # In the interpreter programs run one after the other, so in one launch there is one, which
    # waits for no other.
    programs = launches
    if x.is_cuda:
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    threads = 64 * chosen["num_warps"] if BACKEND == "hip" else 1
    phases = [(1, 5)] if launches == 1 else [(phase, phase) for phase in range(1, 6)]
    for first, last in phases:
        wrap_triton(transformer_block_kernel)[(programs,)](
            X=x, NORM_1=input_norm, QKV_WEIGHT=qkv, O_WEIGHT=o, NORM_2=post_attention_norm,
            GATE_UP_WEIGHT=gate_up, DOWN_WEIGHT=down, COS=cos, SIN=sin, QKV=packed_heads,
            ATTENDED=attended, ACTIVE=active, SUMMED=summed, OUT=out, COUNTER=counter,
            batches=batch, seq=seq, eps=eps, H=num_heads, K=num_kv_heads, D=dim, INNER=inner,
            FIRST=first, LAST=last, THREADS=threads, PRECISION=dot_precision(dtype),
            BLOCK_D=max(16, triton.next_power_of_2(dim)), **chosen,
        )  # fmt: skip
    return out


# --- model


def gemm_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product takes x: that of autocast, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class RMSNorm(nn.Module):
    """Root mean square norm, `x / rms(x) * weight` over the last dimension, computed in float32."""

    def __init__(self, dim: int, eps: float, fusions: Fusions, side: SideStreams):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.fusions, self.side = fusions, side

    def forward(self, x: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return x + update [..., D] normalised, in the type of the next GEMM, and the sum."""
        if self.fusions.triton_rms_norm:
            settings = self.eps, gemm_dtype(x), self.fusions.norm_from_output
            side = None if torch.compiler.is_compiling() else self.side
            result = AddRMSNorm.apply(x, update, self.weight, *settings, side)
            return (result, x) if update is None else result
        x = x if update is None else x + update
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype), x


def renew_cast(module: nn.Module, *unused) -> None:
    """Cast a weight that was loaded anew, as load_state_dict's hook: a graph would not look."""
    if module.weight in module.side.casts:
        module.side.cached_cast(module.weight, module.side.casts[module.weight].dtype)


class Linear(nn.Linear):
    """A projection without bias."""

    def __init__(self, inputs: int, outputs: int, fusions: Fusions, side: SideStreams):
        super().__init__(inputs, outputs, bias=False)
        self.fusions, self.side = fusions, side
        self.register_load_state_dict_post_hook(renew_cast)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., inputs] to [..., outputs]."""
        return linear(x, self.weight, self.fusions, self.side)


class Embedding(nn.Embedding):
    """Token embedding, whose weight the output projection has, too."""

    def __init__(self, words: int, dim: int, fusions: Fusions, side: SideStreams):
        super().__init__(words, dim)
        self.fusions, self.side = fusions, side
        self.register_load_state_dict_post_hook(renew_cast)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, S] to [B, S, D]."""
        ours = self.fusions.tied_embedding and self.weight.requires_grad and torch.is_grad_enabled()
        if ours and not torch.compiler.is_compiling():
            return TiedEmbedding.apply(tokens, self.weight, self.side)
        return super().forward(tokens)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding: channel i is rotated with channel i + head_dim / 2."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        half = config.hidden_dim // config.num_heads // 2
        frequency = config.rope_theta ** (-torch.arange(half) / half)
        angle = torch.outer(torch.arange(config.seq_len), frequency)
        angle = angle.repeat(1, 2)[:, None]  # [S, 1, head_dim]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate x [B, S, heads, head_dim] by its position along S."""
        cos, sin = self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


def keep_separate_names(parent: nn.Module, fused: str, parts: dict[str, int]) -> None:
    """Have state_dict list the rows of `parent.<fused>.weight` under the names of its parts.

    They are loaded from there, too. `parts` maps the name of each projection to its output
    features, in the order of the rows.
    """

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


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, config: ModelConfig, fusions: Fusions, side: SideStreams):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.hidden_dim // config.num_heads
        kv_dim = self.num_kv_heads * self.head_dim
        self.fusions = fusions
        if fusions.qkv_fusion:
            parts = {"q_proj": config.hidden_dim, "k_proj": kv_dim, "v_proj": kv_dim}
            self.qkv_proj = Linear(config.hidden_dim, sum(parts.values()), fusions, side)
            keep_separate_names(self, "qkv_proj", parts)
        else:
            self.q_proj = Linear(config.hidden_dim, config.hidden_dim, fusions, side)
            self.k_proj = Linear(config.hidden_dim, kv_dim, fusions, side)
            self.v_proj = Linear(config.hidden_dim, kv_dim, fusions, side)
        self.o_proj = Linear(config.hidden_dim, config.hidden_dim, fusions, side)
        self.rotary = RotaryEmbedding(config)
        self.fuse_rotary_backward = (
            fusions.rotary_fusion
            and fusions.triton_rotary
            and fusions.triton_attention
            and self.head_dim >= 16
            and self.head_dim.bit_count() == 1  # else a block has channels beyond
        )
        if not (fusions.flash_attention or fusions.triton_attention):
            mask = torch.full((config.seq_len, config.seq_len), -torch.inf)
            mask = mask.triu(1)  # 0 on and below the diagonal
            self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        batch, seq, _ = x.shape
        if self.fusions.triton_rotary:
            if self.fusions.qkv_fusion:
                qkv = self.qkv_proj(x)
            else:
                qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)
            qkv = qkv.view(batch, seq, -1, self.head_dim)
            if self.fuse_rotary_backward:
                out = CausalAttention.apply(qkv, self.num_heads, self.rotary.cos, self.rotary.sin)
                return self.o_proj(out.flatten(2))
            qkv = Rotary.apply(qkv, self.rotary.cos, self.rotary.sin, self.num_kv_heads)
            q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
        elif self.fusions.qkv_fusion:
            qkv = self.qkv_proj(x).view(batch, seq, -1, self.head_dim)
            qk, v = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=2)
            q, k = self.rotary(qk).split([self.num_heads, self.num_kv_heads], dim=2)
        else:
            q = self.q_proj(x).view(batch, seq, self.num_heads, self.head_dim)
            k = self.k_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
            v = self.v_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
            q, k = self.rotary(q), self.rotary(k)

        if self.fusions.triton_attention:
            qkv = qkv if self.fusions.triton_rotary else torch.cat((q, k, v), dim=2)
            return self.o_proj(CausalAttention.apply(qkv, self.num_heads).flatten(2))
        group = self.num_heads // self.num_kv_heads  # query heads that share a key/value head
        k, v = (t.repeat_interleave(group, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.fusions.flash_attention:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # [B, H, S, S]
            scores = scores + self.causal_mask[:seq, :seq]
            out = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


class SwiGLU(nn.Module):
    """Gated MLP, `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, fusions: Fusions, side: SideStreams):
        super().__init__()
        self.fusions, self.side = fusions, side
        if fusions.swiglu_fusion:
            parts = {"gate_proj": config.intermediate_dim, "up_proj": config.intermediate_dim}
            self.gate_up_proj = Linear(config.hidden_dim, sum(parts.values()), fusions, side)
            keep_separate_names(self, "gate_up_proj", parts)
        else:
            self.gate_proj = Linear(config.hidden_dim, config.intermediate_dim, fusions, side)
            self.up_proj = Linear(config.hidden_dim, config.intermediate_dim, fusions, side)
        self.down_proj = Linear(config.intermediate_dim, config.hidden_dim, fusions, side)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        ours = self.fusions.swiglu_gemm and self.fusions.swiglu_fusion
        if ours and not torch.compiler.is_compiling() and our_gemm_wins(gemm_dtype(x)):
            x, weights = x.to(gemm_dtype(x)), (self.gate_up_proj.weight, self.down_proj.weight)
            casts = (self.side.cached_cast(weight, x.dtype) for weight in weights)
            direct = self.fusions.direct_gradients
            return SwiGLUGEMM.apply(x, *weights, *casts, direct, self.side)
        if self.fusions.swiglu_fusion:
            gate_up = self.gate_up_proj(x)
            gate, up = gate_up.chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        if self.fusions.triton_swiglu:
            gate_up = gate_up if self.fusions.swiglu_fusion else torch.cat((gate, up), dim=-1)
            return self.down_proj(SwiGLUActivation.apply(gate_up))
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, fusions: Fusions, side: SideStreams):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_dim, config.norm_eps, fusions, side)
        self.self_attn = Attention(config, fusions, side)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim, config.norm_eps, fusions, side)
        self.mlp = SwiGLU(config, fusions, side)

    def forward(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map the residual stream x and an update not yet added to it, both [B, S, D], likewise."""
        normed, x = self.input_layernorm(x, update)
        normed, x = self.post_attention_layernorm(x, self.self_attn(normed))
        return x, self.mlp(normed)


class TinyLlama(nn.Module):
    """Llama (Touvron et al. 2023) with tied input and output embedding.

    Parameter names are those of Hugging Face.
    """

    TARGETS = ("labels",)

    def __init__(self, config: ModelConfig, fusions: Fusions, side: SideStreams):
        super().__init__()
        self.config, self.fusions, self.side = config, fusions, side
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_dim, fusions, side)
        layers = (DecoderLayer(config, fusions, side) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps, fusions, side)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map input_ids [B, S] to logits [B, S, V], with labels, the same tokens, to the loss."""
        check_sequences(input_ids, self.config.seq_len)
        weight, compiling = self.embed_tokens.weight, torch.compiler.is_compiling()
        if not compiling:
            trains = weight.requires_grad and torch.is_grad_enabled()
            self.side.begin_step(self.fusions.overlap and trains)
        embedded = self.embed_tokens(input_ids)
        x, update = embedded, None
        if not compiling and self.side.active:
            x = JoinSideStreams.apply(embedded, self.side)
        for layer in self.layers:
            x, update = layer(x, update)
        logits = linear(self.norm(x, update)[0], weight, self.fusions, self.side, embedded)
        if labels is None:
            return logits
        if self.fusions.triton_cross_entropy:
            return NextTokenLoss.apply(logits, labels)
        following = F.pad(labels[:, 1:], (0, 1), value=-100)  # -100 is ignored
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build the model of these arguments.

    The same seed gives the same weights in every version and fusion setting.
    """
    names = [name for name in ModelConfig.__dataclass_fields__ if hasattr(args, name)]
    fields = {name: getattr(args, name) for name in names}
    fusions = Fusions(**{attribute: getattr(args, attribute) for _, attribute, _ in FUSIONS})
    with device:
        model = TinyLlama(ModelConfig(**fields), fusions, SideStreams())
    if device.type != "meta":
        generator = torch.Generator().manual_seed(args.seed)
        # canonical names, so the order of the draws does not depend on what is fused
        state = model.state_dict()
        for name in sorted(state):
            if "norm" not in name:
                state[name] = torch.empty(state[name].shape).normal_(std=0.02, generator=generator)
        model.load_state_dict(state)
    return model


def join_neighbours(groups: list[list[nn.Parameter]]) -> list[list[nn.Parameter]]:
    """Join neighbours to groups of up to 16 MiB of gradients, or of one weight.

    GPUs meet once for each group, which has a cost of its own, and a large tensor moves faster. But
    the first group, whose gradients come last, has no more than 8 MiB if it can be: nothing is left
    to hide it behind.
    """
    joined, most = [groups[0]], 2**23
    for group in groups[1:]:
        if 4 * sum(p.numel() for p in (*joined[-1], *group)) <= most:
            joined[-1] = joined[-1] + group
        else:
            joined, most = [*joined, group], 2**24
    return joined


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW over all parameters: one kernel of ours, or a few launches of PyTorch's own."""
    if args.fused_optimizer and not args.torch_compile:
        weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        small = [p for p in model.parameters() if all(p is not weight for weight in weights)]
        groups = [small, *([weight] for weight in weights)]
        dtype = getattr(torch, args.amp_dtype) if args.use_amp else torch.float32
        narrow = args.direct_gradients and NARROW_GRADIENTS
        if dist.is_initialized():
            groups, narrow = join_neighbours(groups), False  # several GPUs add up in float32
        grad_dtype = dtype if narrow else torch.float32
        return FusedAdamW(groups, args.learning_rate, dtype, grad_dtype, model.side)
    rate = args.learning_rate
    if args.device == "cuda":  # a tensor, so that a captured step follows a scheduler
        rate = torch.tensor(rate, device=next(model.parameters()).device)
    return AdamW(model.parameters(), rate, fused=True, capturable=args.cuda_graph)


# --- data
# Copied from common/data_llama.py by tools/sync_common.py: edit it there.


class TextBatches:
    """Random windows of a token stream in host memory: {"input_ids": [B, S], "labels": [B, S]}."""

    def __init__(
        self, stream: np.ndarray, args: argparse.Namespace, device: torch.device, seed: int
    ):  # fmt: skip
        self.windows = np.lib.stride_tricks.sliding_window_view(stream, args.seq_len)
        self.batch_size, self.device = args.batch_size, device
        self.generator = torch.Generator().manual_seed(seed)
        self.source = {}  # nothing of it is in the report

    def next_batch(self) -> dict[str, Tensor]:
        starts = torch.randint(len(self.windows), (self.batch_size,), generator=self.generator)
        # By NumPy, in one thread: from 3000 tokens on PyTorch takes a thread per core, and on a
        # busy host one is late.
        tokens = torch.from_numpy(self.windows[starts.numpy()]).to(self.device)
        return {"input_ids": tokens, "labels": tokens}


def markov_text(vocab_size: int, length: int, seed: int) -> np.ndarray:
    """Make synthetic text [length] from a fixed order-2 Markov chain.

    The two previous tokens, each taken modulo 8, choose one of 64 contexts; a context has 16
    possible successors with probabilities 1/2, 1/4, 1/8, ... So the entropy of the next token is
    1.39 nats, far below ln(vocab_size): a model that has learnt nothing, only the frequencies, or
    the chain are three clearly different losses.
    """
    chain = np.random.default_rng(0)  # the language is the same for every seed, the text is not
    successors = chain.integers(vocab_size, size=(64, 16))
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


# What a file begins with that is no text.
BINARY = {
    b"\x1f\x8b": "a gzip file",
    b"PK\x03\x04": "a zip file",
    b"PAR1": "a Parquet file",
    b"\x93NUMPY": "a NumPy array",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def binary_kind(content: bytes) -> str:
    """Name what a file seems to be if it is no text, otherwise ""."""
    if kind := next((BINARY[magic] for magic in BINARY if content.startswith(magic)), ""):
        return kind
    if not re.search(rb"[\x00-\x08\x0e-\x19\x1c-\x1f]", content):  # no text has these
        return ""
    for bits in (64, 32, 16):
        ids = np.frombuffer(content[: len(content) // 8 * 8], f"<u{bits // 8}")
        if len(ids) and len(content) % (bits // 8) == 0 and ids.max() < 2 ** min(18, bits) - 1e4:
            text = ids.min() >= 9 and (ids.max() < 128 or not (ids % 256).any())
            return "UTF-16" if text else f"uint{bits} token ids, as nanoGPT's train.bin"
    return "a binary file"


def read_text(path: Path, seq_len: int) -> np.ndarray:
    """Read the bytes of a text file as tokens [length]."""
    if path.exists() and not path.is_file():  # a pipe can be read only once, /dev/zero has no end
        fail(f"--text-file {path}: {'a folder' if path.is_dir() else 'not a regular file'}")
    try:
        content = path.read_bytes()
    except OSError as error:
        fail(f"--text-file {path}: {error.strerror}")
    if kind := binary_kind(content):
        fail(f"--text-file {path}: it looks like {kind}; give plain text (ASCII or UTF-8)")
    if len(content) < seq_len:
        fail(f"--text-file {path}: {len(content)} bytes are fewer than --seq-len {seq_len}")
    return np.frombuffer(content, dtype=np.uint8).astype(np.int64)


def make_batches(args: argparse.Namespace, device: torch.device, seed: int) -> TextBatches:
    """Make the source of training batches: the bytes of --text-file, or synthetic text."""
    if args.text_file:
        stream = read_text(args.text_file, args.seq_len)
    else:
        stream = markov_text(args.vocab_size, length=max(1_000_000, 4 * args.seq_len), seed=seed)
    return TextBatches(stream, args, device, seed)


# --- end of data

# --- process
# Copied from common/process.py by tools/sync_common.py: edit it there.
# This process among those of a run: what torchrun says of it, signals, and the others.


def launched(name: str, otherwise: int = 0) -> int:
    """Return a number that torchrun sets; check_environment refuses what is none."""
    text = os.getenv(name, "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else otherwise


LAUNCHED = "RANK" in os.environ  # a plain run is the only process
RANK, WORLD_SIZE = launched("RANK"), launched("WORLD_SIZE", 1)


def check_environment() -> None:
    """Refuse what torchrun would not set: half of it, or what another launcher has left."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = {name: os.environ[name] for name in names if name in os.environ}
    for name, text in found.items():
        if not re.fullmatch("[0-9]{1,9}", text):
            fail(f"{name} is {text!r}, not a whole number")
        for other in names[:2]:
            if other not in found:
                fail(f"{name} is {text}, but {other} is not set")
    rank, size, local_rank = launched("RANK"), launched("WORLD_SIZE", 1), launched("LOCAL_RANK")
    local_size = launched("LOCAL_WORLD_SIZE", size)
    if rank >= size:
        fail(f"RANK is {rank}, but WORLD_SIZE is {size}")
    if local_size > size:
        fail(f"LOCAL_WORLD_SIZE is {local_size}, but WORLD_SIZE is {size}")
    if local_rank >= local_size:
        limit = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in found else "WORLD_SIZE"
        fail(f"LOCAL_RANK is {local_rank}, but {limit} is {local_size}")
    for name, good in (("MASTER_ADDR", r"\S+"), ("MASTER_PORT", "[1-9][0-9]{,4}")):
        if size > 1 and not re.fullmatch(good, text := os.getenv(name, "")):
            fail(f"{name} is {text!r}, but WORLD_SIZE is {size}")


def check_devices(args: argparse.Namespace, gpu: bool, processes: int) -> None:
    """Refuse a run for which there are too few GPUs here, or where it is open which is whose."""
    if args.device == "cuda" and not gpu:
        fail("--device cuda: PyTorch finds no GPU here; use --device cpu or auto", 4)
    found = visible_gpus()
    here = launched("LOCAL_WORLD_SIZE", 1) if LAUNCHED else processes
    if args.device != "cpu" and (gpu or args.num_gpus) and here > max(1, found):
        fail(f"{here} GPUs wanted, PyTorch finds {found}", 4)
    if gpu and WORLD_SIZE > 1 and found > 1:  # who sees one GPU takes that
        if "LOCAL_RANK" not in os.environ:
            fail(f"LOCAL_RANK is not set, and PyTorch finds {found} GPUs")
        if launched("LOCAL_RANK") >= found:
            fail(f"LOCAL_RANK is {launched('LOCAL_RANK')}, but PyTorch finds {found} GPUs", 4)


def visible_gpus() -> int:
    """Count the GPUs that PyTorch finds, as it reads *_VISIBLE_DEVICES."""
    try:
        return torch.cuda.device_count()
    except (RuntimeError, ValueError) as error:
        fail(f"*_VISIBLE_DEVICES: {error}")


def named_gpus() -> int:
    """Count the GPUs of a run that no argument and no torchrun gives any: those named, or one."""
    kinds = ("ROCR", "HIP", "CUDA") if torch.version.hip else ("CUDA",)
    return visible_gpus() if any(os.getenv(f"{kind}_VISIBLE_DEVICES") for kind in kinds) else 1


def start_torchrun(processes: int, argv: list[str]) -> NoReturn:
    """Become torchrun, which starts this script so many times."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ["TINY_LAUNCHED"] = "1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    os.execv(sys.executable, [*torchrun, f"--nproc-per-node={processes}", __file__, *argv])


def interrupt(*_: object) -> NoReturn:
    """Handle the first signal: a process and its group may both get it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def answer_signals() -> None:
    """Have SIGTERM, as from a time limit, end a run as Ctrl-C does: it keeps what was measured.

    One of several processes waits for the others in C++, where Python hears no signal. So a thread
    ends what does not answer. It also takes the signals, or PyTorch's waiting would print a stack.
    """
    signal.signal(signal.SIGTERM, interrupt)
    if WORLD_SIZE == 1:
        return
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, interrupt)
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)

    def watch() -> None:
        os.read(heard, 1)
        time.sleep(1)
        if signal.getsignal(signal.SIGTERM) == interrupt:
            say("error", "interrupted")
            os._exit(130)

    threading.Thread(target=watch, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # of this thread


def join_processes(args: argparse.Namespace) -> None:
    """Meet the other processes; only rank 0 prints from now on."""
    if args.device == "cuda":
        torch.cuda.set_device(launched("LOCAL_RANK") if visible_gpus() > 1 else 0)
    warnings.filterwarnings("ignore", ".*(barrier|broadcast_buffers|AccumulateGrad node's stream)")
    if args.cuda_graph:  # says PyTorch; NCCL then sees no lost rank
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    backend = "gloo" if args.device == "cpu" else None  # None: NCCL/RCCL
    try:
        store = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))[0]
        dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE)
    except (RuntimeError, ValueError) as error:
        fail(f"the {WORLD_SIZE} processes cannot meet: {str(error).splitlines()[0]}", 1)
    everyone = [{}] * WORLD_SIZE
    dist.all_gather_object(everyone, {"script": SCRIPT, **vars(args), "profile_dir": None})
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                if not RANK:
                    option = f"{name.replace('_', '-')} {theirs.get(name)}"
                    say("error", f"rank {rank} was started with {option}, rank 0 with {value}")
                raise SystemExit(2)
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


# --- end of process

# --- harness
# Copied from common/harness.py by tools/sync_common.py: edit it there.
# It knows the model by docstring, VERSION, FUSIONS, TRITON_FUSIONS, MODES, add_model_arguments
# (--batch-size), check_model_arguments, without_effect, use_settings, build_model (.config,
# .TARGETS), build_optimizer, make_batches (.next_batch(), .source); they use at_least, fail, say.
SCRIPT = Path(__file__).stem
PHASES = ("data", "forward", "backward", "optimizer")
GRAPH_PHASES = ("data", "graph")  # with --enable-cuda-graph
OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile
NO_WORK = ("_unsafe_view", "empty", "new_empty", "_record_function")  # and views move no data
SETTINGS = ("batch_size", "num_steps", "warmup_steps", "learning_rate", "seed", "deterministic")
SETTINGS += ("use_amp", "amp_dtype", "matmul_precision")
SETTINGS += ("torch_compile", "torch_compile_mode", "cuda_graph")
# Set by GPU profilers: rocprofv3, nsys, ncu.
PROFILER_SIGNS = ("ROCP_TOOL_LIBRARIES", "NSYS_PROFILING_SESSION_ID")
PROFILER_SIGNS += ("NV_NSIGHT_INJECTION_TRANSPORT_TYPE",)
PATIENCE = 600  # seconds without a step that ends
# A line is printed where all of its values were measured.
REPORT = """\
Average training speed: {timing[samples_per_sec]:.1f} samples/sec
Average batch time: {timing[batch_ms]:.1f} ms \
(median {timing[batch_median_ms]:.1f}, p95 {timing[batch_p95_ms]:.1f})
Average forward time: {timing[forward_ms]:.1f} ms
Average backward time: {timing[backward_ms]:.1f} ms
Average optimizer time: {timing[optimizer_ms]:.1f} ms
Average graph time: {timing[graph_ms]:.1f} ms (the whole step; its phases cannot be told apart)
Warmup step time: {timing[warmup_first_step_ms]:.1f} ms (first step{compiled})
Compilation overhead: {timing[compilation_overhead_ms]:.1f} ms
Final loss: {loss[final]:.4f} (first step {loss[initial]:.4f})
Residues with coordinates: {data[observed]} of {data[residues]}
Peak memory usage: {memory[peak_mb]:.1f} MB
Kernels per step: {kernels[per_step]}{all_off}{kernels[remark]}
Kernel reduction: {kernels[reduction_percent]:.1f} %
Host launches per step: {kernels[host_launches]}
FLOPs per step: {flops[gflop]:.4g} GFLOP, achieved {flops[achieved_tflops]:.3g} TFLOP/s
"""


def say(kind: str, message: str) -> None:
    """Print an "error" of this process on stderr, or a "note" of all processes."""
    if kind == "error" or (not RANK and "TINY_LAUNCHED" not in os.environ):
        rank = f"rank {RANK}: " if RANK else ""
        print(f"{SCRIPT}.py: {kind}: {rank}{message}", file=sys.stderr)


def fail(message: str, status: int = 2) -> NoReturn:
    """End with one line on stderr, about what a user can put right."""
    say("error", message)
    raise SystemExit(status)


def progress(text: str = "") -> None:
    """Say what happens now, on a terminal in one line, cleared in the end."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]}\033[K", end="", flush=True)
    elif text:
        print(text, flush=True)


# The command line


def at_least(low: int) -> Callable[[str], int]:
    """Make an argparse type: a whole number from `low` to 32 bits."""

    def whole_number(text: str) -> int:
        if not low <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"must be {low} or more, not {text}")
        return int(text)

    return whole_number


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Writes N for a number, and defaults."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "N"

    def _get_help_string(self, action: argparse.Action) -> str:
        known = action.default in (None, False, argparse.SUPPRESS)
        return action.help if known else f"{action.help} (default: %(default)s)"


def build_parser() -> argparse.ArgumentParser:
    """Build the command line: arguments of the model, and of all versions."""
    description, _, examples = (__doc__ or "").partition("\nExamples:\n")  # python -OO has none
    parser = argparse.ArgumentParser(
        prog=f"{SCRIPT}.py",
        usage=argparse.SUPPRESS,
        description=description,
        epilog="examples:\n" + examples,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    switch = {"action": "store_true"}

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
    choices = ("default", *OWN_GRAPHS, "max-autotune-no-cudagraphs")
    group.add_argument("--torch-compile-mode", choices=choices, help="compile longer to run faster")

    add = parser.add_argument_group("training").add_argument
    add("--num-steps", type=at_least(1), default=50, help="measured steps")
    add("--warmup-steps", type=at_least(0), help="before those, on several GPUs 12 (default: 5)")
    add("--learning-rate", type=float, default=3e-4, help="of AdamW")
    add("--use-amp", **switch, help="automatic mixed precision")
    add("--amp-dtype", choices=("bfloat16", "float16"), help="(default: bfloat16)")
    choices = ("highest", "high", "medium")
    add("--matmul-precision", choices=choices, default="highest", help="of float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="AMD GPUs: 'cuda', too")
    add("--num-gpus", type=at_least(1), help="share the batch (default: 1, or *_VISIBLE_DEVICES)")
    add("--seed", type=at_least(0), default=42, help="of weights and data")
    add("--deterministic", **switch, help="the same bits in every run")
    add("--log-interval", type=at_least(1), default=10, help="steps between lines")

    add = parser.add_argument_group("profiling").add_argument
    add("--enable-pytorch-profiler", **switch, help="operator tables, trace of 3 steps")
    add("--enable-memory-profiling", **switch, help="memory timeline of one step")
    add("--enable-rocm-profiling", **switch, help="names of phases for a profiler")
    add("--under-profiler", **switch, help="launch nothing but the training steps")
    folder = f"pytorch_profiles_v{VERSION}"
    add("--profile-dir", type=Path, default=folder, metavar="DIR", help="for results")

    group = parser.add_argument_group("modes")
    group.add_argument("--full-report", **switch, help="of each side that is compared")
    add = group.add_mutually_exclusive_group().add_argument
    add("--compare-fusion", **switch, help="all fusions off and as chosen, in turns")
    add("--verify-accuracy", **switch, help="outputs and gradients as with all off?")
    return parser


def check_arguments(args: argparse.Namespace, gpu: bool, processes: int) -> None:
    """Refuse what cannot work; choose warm-up and graph where no flag does."""
    mode = args.torch_compile_mode
    if not FUSIONS and (args.all_fusion or args.compare_fusion):
        fail(f"--enable-all-fusion and --compare-fusion start with V2, {SCRIPT} has no fusions")
    if args.full_report and not args.compare_fusion:
        fail("--full-report needs --compare-fusion")
    if mode and not args.torch_compile:
        fail(f"--torch-compile-mode {mode} needs --enable-torch-compile")
    if args.amp_dtype and not args.use_amp:
        fail(f"--amp-dtype {args.amp_dtype} needs --use-amp")
    if not 0 < args.learning_rate < math.inf:
        fail(f"--learning-rate must be above 0, not {args.learning_rate}")
    if args.num_gpus not in (None, processes):
        fail(f"--num-gpus {args.num_gpus}, but torchrun started {processes}")
    if args.batch_size % processes:
        fail(f"--batch-size {args.batch_size} is not divisible by {processes} GPUs")
    least = 12 if gpu and processes > 1 else 2  # DDP needs 11 before a capture
    if args.warmup_steps is None:
        args.warmup_steps = max(5, least)
    graph, few, own = args.cuda_graph, args.warmup_steps < least, mode in OWN_GRAPHS
    if graph and own:
        fail(f"--enable-cuda-graph: mode {mode} makes graphs of its own")
    if graph and not gpu:
        fail("--enable-cuda-graph: this run has no GPU", 4)
    if graph and few:
        say("note", f"--enable-cuda-graph: {least} warm-up steps, not {args.warmup_steps}")
        args.warmup_steps = least
    if graph is None:
        args.cuda_graph = VERSION > 3 and gpu and not (few or own)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check; what cannot work is one line on stderr and SystemExit (2 or 4)."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = re.findall(r"--[\w-]+", parser.format_help())
        near = difflib.get_close_matches(unknown[0], flags, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    given = {name: on for _, name, _ in FUSIONS if (on := getattr(args, name)) is not None}
    for _, name, _ in FUSIONS:
        setattr(args, name, given.get(name, args.all_fusion is not False))
    check_model_arguments(args, parser)
    check_environment()
    gpu = args.device != "cpu" and torch.cuda.is_available()
    processes = WORLD_SIZE if LAUNCHED else args.num_gpus or (named_gpus() if gpu else 1)
    check_devices(args, gpu, processes)
    check_arguments(args, gpu, processes)

    args.torch_compile = bool(args.torch_compile)
    args.amp_dtype = args.amp_dtype or "bfloat16"
    args.num_gpus = processes
    args.device = "cuda" if gpu else "cpu"
    args.profile_dir /= f"rank{RANK}" if RANK else ""
    signs = [name for name in PROFILER_SIGNS if name in os.environ]
    signs += re.findall("librocprof[^:]*", os.getenv("LD_PRELOAD", ""))
    if signs and not args.under_profiler:
        say("note", f"a GPU profiler started this run ({signs[0]}): --under-profiler is on")
        args.under_profiler = True
    if args.enable_rocm_profiling and not gpu:
        say("note", "--enable-rocm-profiling: no GPU here, so nothing is marked")
    if given and all(given.values()) and len(given) < len(FUSIONS) and args.all_fusion is None:
        say("note", "all fusions are on by default; for single ones add --disable-all-fusion")
    args.without_effect = without_effect(args)
    for flag, name, _ in FUSIONS:
        if name in given and name in args.without_effect:
            switch = "enable" if given[name] else "disable"
            say("note", f"--{switch}-{flag} has no effect: {args.without_effect[name]}")
    return args


def all_off(args: argparse.Namespace, **changes) -> argparse.Namespace:
    """Return these arguments with everything off, and changes."""
    off = {name: False for _, name, _ in FUSIONS}
    off |= {"torch_compile": False, "torch_compile_mode": None, "without_effect": {}}
    return argparse.Namespace(**{**vars(args), **off, **changes})


# The process


def prepare(args: argparse.Namespace) -> torch.device:
    """Apply this run's process-wide settings; return the device."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler writes on stderr
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.deterministic)
    torch.set_float32_matmul_precision(args.matmul_precision)
    use_settings(args)
    return torch.empty(0, device=args.device).device


def environment(device: torch.device) -> dict:
    """Return what the numbers are measured on."""
    names = [torch.cuda.get_device_name(device)] if device.type == "cuda" else []
    if (info := Path("/proc/cpuinfo")).exists():
        names += re.findall(r"model name\t: (.+)", info.read_text())
    with_triton = importlib.util.find_spec("triton")
    return {
        "device": device.type,
        "device_name": [*names, platform.machine()][0],
        "cpu_threads": torch.get_num_threads(),
        "triton": __import__("triton").__version__ if with_triton else None,
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


# One training step


class Trainer:
    """Model, optimizer and data, and their training step."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args = args
        self.device = device
        self.gpu = device.type == "cuda"
        self.synchronize = torch.cuda.synchronize if self.gpu else lambda: None
        dtype = getattr(torch, args.amp_dtype)
        self.autocast = partial(torch.autocast, device.type, dtype, enabled=args.use_amp)
        scaled = args.use_amp and dtype == torch.float16
        self.scaler = torch.amp.GradScaler(device.type, 4096, enabled=scaled)  # 65536 may overflow
        self.batches = make_batches(args, torch.device("cpu"), args.seed)
        self.inputs: dict[str, Tensor] = {}  # on a GPU, where batches are copied
        self.model = self.forward = build_model(args, device)
        self.optimizer = build_optimizer(args, self.model)
        self.stream = torch.cuda.Stream(priority=-1) if args.cuda_graph else None  # before others
        if args.torch_compile:
            self.forward = torch.compile(self.model, mode=args.torch_compile_mode)
        self.average = getattr(self.optimizer, "average_gradients", None)  # in place of DDP
        if WORLD_SIZE > 1 and not self.average:
            with torch.cuda.stream(self.stream):  # where autograd adds gradients up
                self.forward = DistributedDataParallel(
                    self.forward, broadcast_buffers=False, gradient_as_bucket_view=True
                )
        self.graph = None
        self.phases = PHASES
        self.marks = []  # moments: a first one, and after each phase
        self.named = contextlib.nullcontext  # ranges of phases for a profiler

    def next_batch(self) -> dict[str, Tensor]:
        """Return this process's share of the batch, on the device."""
        share = self.args.batch_size // WORLD_SIZE
        batch = {n: t[RANK * share :][:share] for n, t in self.batches.next_batch().items()}
        if not self.gpu:
            return batch
        for name, value in batch.items():
            if name not in self.inputs:
                self.inputs[name] = torch.empty_like(value, device=self.device)
            self.inputs[name].copy_(value.pin_memory(), non_blocking=True)  # nobody waits for it
        return self.inputs

    def step(self) -> Tensor:
        """Take a step; return the loss of the global batch."""
        with self.phase("data"):
            batch = self.next_batch()
        if not self.graph:
            return self.compute(batch)
        with self.phase("graph"):
            self.graph.replay()
        return self.loss

    def compute(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute what a graph captures."""
        with self.phase("forward"), self.autocast():
            if self.args.torch_compile:
                torch.compiler.cudagraph_mark_step_begin()
            loss = self.forward(**batch)
        with self.phase("backward"):
            self.scaler.scale(loss).backward()
        with self.phase("optimizer"):
            if self.average:  # before a scaler looks
                self.average()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            if WORLD_SIZE > 1:
                loss = loss.detach() / WORLD_SIZE
                dist.all_reduce(loss)
        return loss.detach()

    def capture(self) -> None:
        """Capture the step, replayed from now on; one must have run before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.loss = self.compute(self.inputs)
        self.graph, self.phases = graph, GRAPH_PHASES

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a phase of the step in a range, with a mark at its end."""
        with self.named(name):
            yield
        self.mark()

    def mark(self) -> None:
        """Note this moment: an event, or on a CPU the time."""
        moment = torch.cuda.Event(enable_timing=True) if self.gpu else time.perf_counter()
        if self.gpu:
            moment.record()
        self.marks.append(moment)

    def done(self) -> Callable[[], bool]:
        """Return what tells if the device has done all that it has to do by now."""
        return torch.cuda.current_stream().record_event().query if self.gpu else lambda: True

    def times(self, steps: int) -> dict[str, list[float]]:
        """Return milliseconds of each phase in the marked steps."""
        pairs = itertools.pairwise(self.marks[: steps * len(self.phases) + 1])
        gaps = [a.elapsed_time(b) if self.gpu else 1e3 * (b - a) for a, b in pairs]
        return {name: gaps[i :: len(self.phases)] for i, name in enumerate(self.phases)}

    @contextlib.contextmanager
    def ranges(self, named: Callable) -> Iterator[None]:
        """Run phases and modules inside in ranges of their names."""
        modules = [] if self.args.torch_compile else [*self.model.named_modules()][1:]
        for name, module in modules:
            module.forward = named(name)(module.forward)  # a context manager is a decorator, too
        self.named = named
        try:
            yield
        finally:
            self.named = contextlib.nullcontext
            for _, module in modules:
                del module.forward  # that of its class again

    def profile(self, steps: int = 1, **options) -> torch.profiler.profile:
        """Take steps under the PyTorch profiler."""
        profile = torch.profiler.profile(acc_events=True, **options)
        with profile, self.ranges(torch.profiler.record_function):
            if WORLD_SIZE > 1:  # wait for the others' profilers, without a kernel
                dist.all_reduce(torch.zeros(1))
            for _ in range(steps):
                self.step()
            self.synchronize()
        return profile

    def trace(self, profile: torch.profiler.profile) -> dict:
        """Return what the profiler writes as a Chrome trace."""
        with tempfile.TemporaryDirectory() as folder:  # the path stands in the file, not escaped
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            return json.loads(path.read_text())


def wait_until(done: Callable[[], bool]) -> None:
    """Wait where a signal is heard, and a process that is gone is noticed."""
    end = time.perf_counter() + PATIENCE
    while not done():  # raises an error of the device
        if time.perf_counter() > end:
            raise TimeoutError(f"no step ended in {PATIENCE} s: is a process lost?")


# What is counted in extra steps


class OperatorCounter(TorchDispatchMode):
    """Counts ATen operators inside that move data."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.calls += not (function.is_view or name.startswith(NO_WORK))
        return function(*args, **(kwargs or {}))


def count_kernels(trainer: Trainer) -> dict:
    """Count the kernels of a step, on a CPU its operators; {} where none are seen."""
    if not trainer.gpu:  # of two samples: of a single one some copies are views
        two = argparse.Namespace(**{**vars(trainer.args), "batch_size": 2 * WORLD_SIZE})
        trainer = Trainer(two, trainer.device)
        trainer.step()
        batch = trainer.next_batch()
        with OperatorCounter() as counter:
            trainer.compute(batch)
        remark = "; operator calls, counted on a CPU"
        return {"unit": "operator calls", "per_step": counter.calls, "remark": remark}
    trainer.step()  # the first one does more
    events = trainer.trace(trainer.profile())["traceEvents"]
    calls = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    found = {"unit": "kernels", "remark": ""}
    found["per_step"] = sum(e.get("cat") == "kernel" for e in events)
    found["host_launches"] = sum("Launch" in name for name in calls)
    return found if found["per_step"] else {}  # a profiler that may not look sees none


def count_all_off(args: argparse.Namespace, device: torch.device) -> int | None:
    """Count with everything off; None where memory runs out."""
    progress("counting kernels with all fusions off")
    torch.compiler.reset()  # lets go of its graphs
    gc.collect()
    off = all_off(args)
    prepare(off)
    try:
        return count_kernels(Trainer(off, device))["per_step"]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def memory_of_a_step(trainer: Trainer) -> float:
    """Return the peak bytes of tensors in a step; a flag writes their course."""
    gc.collect()  # what is freed in the step was allocated in it
    events = trainer.trace(trainer.profile(profile_memory=True))["traceEvents"]
    kept = [*trainer.model.parameters(), *trainer.model.buffers(), *trainer.inputs.values()]
    kept += [t for state in trainer.optimizer.state.values() for t in state.values()]
    used = sum(tensor.nbytes for tensor in kept)  # between two steps
    events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    events = [e for e in events if e["args"]["Device Type"] == int(trainer.gpu)]
    course = [(e["ts"] - events[0]["ts"], used := used + e["args"]["Bytes"]) for e in events]
    if trainer.args.enable_memory_profiling:
        rows = ["time_us,bytes\n", *(f"{time:.3f},{used:.0f}\n" for time, used in course)]
        (trainer.args.profile_dir / f"{SCRIPT}_memory_timeline.csv").write_text("".join(rows))
    return max((used for _, used in course), default=used)  # a graph allocates nothing


def gpu_memory(device: torch.device, statistic: str = "memory_allocated") -> int:
    """Return bytes by this statistic, with the pools that graphs keep; 0 on a CPU.

    Without the workspaces of cuBLAS outside these pools, which any run may have made.
    """
    if device.type == "cpu":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    pools = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    used = getattr(torch.cuda, statistic)()
    return used + sum(s["total_size"] - s["allocated_size"] for s in pools)


@contextlib.contextmanager
def recorded_region(active: bool) -> Iterator[None]:
    """Have a profiler record what runs inside (cudaProfilerStart, ROCTx)."""
    with contextlib.ExitStack() as at_end:
        if active:
            at_end.enter_context(torch.cuda.profiler.profile())
        if active and torch.version.hip:
            try:
                roctx = ctypes.CDLL("librocprofiler-sdk-roctx.so")
            except OSError as error:
                fail(f"--enable-rocm-profiling needs ROCm's rocprofiler-sdk-roctx: {error}", 4)
            roctx.roctxProfilerResume(0)
            at_end.callback(roctx.roctxProfilerPause, 0)
        yield


# A run


@dataclass(frozen=True)
class Turn:
    """Steps in a row, the device idle before and after."""

    label: str  # the kind of steps
    steps: int
    seconds: float  # of all of them, by the host's clock
    phases: dict[str, list[float]]  # milliseconds of each phase in each step
    losses: list[float]
    peak: int  # bytes of GPU memory

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.steps


def timing(turns: list[Turn], batch_size: int) -> dict:
    """Return speed, mean times of a step and its phases, time per step by turn."""
    if not (steps := sum(turn.steps for turn in turns)):
        return {}
    seconds = sum(turn.seconds for turn in turns)
    phases = {name: np.concatenate([t.phases[name] for t in turns]) for name in turns[0].phases}
    totals = sum(phases.values())
    return {
        "steps": steps,
        "wall_s": seconds,
        "samples_per_sec": batch_size * steps / seconds,
        "batch_ms": 1e3 * seconds / steps,
        "turns_ms": [turn.step_ms for turn in turns if turn.steps],
        "batch_median_ms": float(np.median(totals)),
        "batch_p95_ms": float(np.quantile(totals, 0.95, method="higher")),
        **{f"{name}_ms": float(ms.mean()) for name, ms in phases.items()},
    }


class Run:
    """A run: arguments, trainer, results so far."""

    def __init__(self, args: argparse.Namespace, title: str = ""):
        self.args = args
        self.title = title
        self.device = prepare(args)
        self.model: dict = {"config": {}, "data": {}}
        self.turns: list[Turn] = []
        self.kept = 0  # bytes between two turns
        self.peak = 0  # bytes in a measured step
        self.kernels: dict = {}
        self.flops = 0
        self.status, self.error = 1, "it did not finish"

    def start(self) -> None:
        """Build the trainer, say what it is, warm up."""
        gc.collect()  # earlier runs
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        args, before = self.args, gpu_memory(self.device)
        self.trainer = Trainer(args, self.device)
        config = asdict(self.trainer.model.config)
        parameters = sum(p.numel() for p in self.trainer.model.parameters())
        data = self.trainer.batches.source
        self.model = {"config": config, "parameters": parameters, "data": data}
        several = f" x {WORLD_SIZE}" if WORLD_SIZE > 1 else ""
        sizes = [f"{name} {n}" for name, n in config.items() if isinstance(n, int) and n]
        precision = f"float32 (matmul precision {args.matmul_precision})"
        names = (*(name for _, name, _ in FUSIONS), "torch_compile", "cuda_graph")
        on = [n for n in names if getattr(args, n) and n not in args.without_effect]
        progress()
        print(
            f"{SCRIPT} on {environment(self.device)['device_name']}{several}:",
            f"{parameters:,} parameters, batch_size {args.batch_size}, {', '.join(sizes)};",
            f"{args.amp_dtype if args.use_amp else precision};",
            ", ".join(on or ["nothing fused"]).replace("_", "-"),
            flush=True,
        )
        if args.torch_compile:
            progress("compiling in the first step; this can take minutes")
        elif self.device.type == "cpu" and not args.under_profiler:
            self.forecast(args.warmup_steps + args.num_steps)
        self.plan(args.warmup_steps, "warm-up step")
        self.take(args.warmup_steps - args.cuda_graph)
        if args.cuda_graph:
            self.trainer.capture()
            self.take(1)
        gc.collect()  # what compiling left keeps tensors
        self.kept = gpu_memory(self.device) - before
        self.plan(args.num_steps, "step")

    def forecast(self, steps: int) -> None:
        """Say how long steps take on a CPU if it is long, by its first layer on one sample."""
        if TRITON_FUSIONS:
            progress("measuring one layer, for how long the steps will take")
        model = self.trainer.model
        layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
        batch = make_batches(self.args, self.device, self.args.seed).next_batch()

        def stop(*_: object) -> NoReturn:
            raise EOFError

        hook = layers[0].register_forward_hook(stop)
        for _ in range(2):  # the first time does more
            started = time.perf_counter()
            with contextlib.suppress(EOFError), torch.no_grad(), self.trainer.autocast():
                model(**{name: value[:1] for name, value in batch.items()})
            seconds = time.perf_counter() - started
            if seconds > 5:
                break
        hook.remove()
        samples = steps * self.args.batch_size // WORLD_SIZE
        whole = round(3 * seconds * len(layers) * samples)  # the backward pass takes twice that
        if whole > 10:
            progress(f"the steps will take about {timedelta(seconds=whole)} on this CPU")

    def plan(self, steps: int, label: str) -> None:
        """Reset the progress counter for `steps` steps."""
        self.goal, self.label, self.done = steps, label, 0
        self.started = time.perf_counter()
        self.shown = self.started  # when progress was

    def take(self, steps: int) -> Turn:
        """Take a turn; one that is cut short has its steps until then."""
        prepare(self.args)  # another run may have had a turn
        trainer, losses = self.trainer, []
        trainer.synchronize()
        others = gpu_memory(self.device) - self.kept  # which belongs to runs that rest
        if trainer.gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.marks.clear()
        began = ended = time.perf_counter()
        trainer.mark()
        try:
            for loss in self.losses(steps):
                self.done += 1
                step = f"{self.title}{self.label} {self.done}"
                if not math.isfinite(loss):
                    message = f"the loss became {loss} at {step}; lower --learning-rate"
                    raise FloatingPointError(message)
                losses.append(loss)
                ended = time.perf_counter()
                speed = self.args.batch_size * len(losses) / (ended - began)
                self.show(f"{step}/{self.goal}  loss {loss:.4f}  {speed:.1f} samples/s")
        finally:  # after Ctrl-C, too, without a wait for lost processes
            phases = trainer.times(len(losses))
            peak = gpu_memory(self.device, "max_memory_allocated") - others
            self.turns.append(Turn(self.label, len(losses), ended - began, phases, losses, peak))
            if self.label == "step":
                self.peak = max(peak, self.peak)
        return self.turns[-1]

    def losses(self, steps: int) -> Iterator[float]:
        """Take steps; yield the loss of each once the host has it, at most 100 steps later."""
        trainer, copied = self.trainer, []  # asks for each loss that is under way
        values = torch.empty(steps, pin_memory=trainer.gpu)
        for step in range(steps):
            values[step].copy_(trainer.step(), non_blocking=True)
            copied.append(trainer.done())
            most = 100 if step < steps - 1 else 0  # a host that is far ahead hears no signal
            while copied and (len(copied) > most or copied[0]()):
                wait_until(copied.pop(0))
                yield float(values[step - len(copied)])

    def show(self, text: str) -> None:
        """Show progress now and then, and the time left until the last of the planned steps."""
        now, terminal = time.perf_counter(), sys.stdout.isatty()
        left = (now - self.started) / self.done * (self.goal - self.done)
        due = now > self.shown + (0.1 if terminal else 60)
        due = due or not left or (self.done % self.args.log_interval == 0 and not terminal)
        if due:
            self.shown = now
            progress(text + (f"  {timedelta(seconds=math.ceil(left))} left" if left else ""))

    def count(self) -> None:
        """Count in extra steps what the measured ones did, and profile as flags ask."""
        prepare(self.args)
        trainer, args = self.trainer, self.args
        if trainer.gpu or not args.torch_compile:  # a loop compiled for a CPU is no operator
            progress(f"{self.title}counting kernels")
            self.kernels = count_kernels(trainer)
        if args.enable_memory_profiling or not trainer.gpu:
            progress(f"{self.title}recording the memory of a step")
            memory = memory_of_a_step(trainer)
            self.peak = self.peak or memory
        if args.enable_pytorch_profiler:
            progress(f"{self.title}profiling 3 steps, and writing tables and trace")
            start, profile = args.profile_dir / SCRIPT, trainer.profile(steps=3, record_shapes=True)
            for clock in ("cpu", "device") if trainer.gpu else ("cpu",):
                table = profile.key_averages().table(f"self_{clock}_time_total", row_limit=40)
                path = Path(f"{start}_operators_by_{clock}_time.txt")
                path.write_text(table.replace("time total", "total"))
            with gzip.open(f"{start}_trace.json.gz", "wt") as file:
                json.dump(trainer.trace(profile), file)
        progress(f"{self.title}counting operations")
        model = build_model(all_off(args, checkpoint_blocks=False), torch.device("meta"))
        batch = trainer.batches.next_batch()
        with FlopCounterMode(display=False) as counter:
            model(**{name: value.to("meta") for name, value in batch.items()}).backward()
        self.flops = counter.get_total_flops()

    def result(self) -> dict:
        """Return the results so far."""
        args, kernels, flops = self.args, dict(self.kernels), {}
        curve = [loss for turn in self.turns for loss in turn.losses]
        ends = {"initial": curve[0], "final": curve[-1]} if curve else {}
        times = timing([turn for turn in self.turns if turn.label == "step"], args.batch_size)
        if self.turns and (warmup := self.turns[0]).steps:
            times["warmup_first_step_ms"] = sum(ms[0] for ms in warmup.phases.values())
            times["warmup_ms"] = 1e3 * warmup.seconds
            if args.torch_compile and "batch_ms" in times:
                steady_ms = warmup.steps * times["batch_ms"]
                times["compilation_overhead_ms"] = times["warmup_ms"] - steady_ms
        if kernels.get("all_off"):
            kernels["reduction_percent"] = 100 * (1 - kernels["per_step"] / kernels["all_off"])
        if self.flops:
            rate = self.flops / times["batch_ms"] / 1e9
            flops = {"per_step": self.flops, "gflop": self.flops / 1e9, "achieved_tflops": rate}
        return {
            "schema_version": 1,
            "script": SCRIPT,
            "status": {0: "ok", 3: "oom"}.get(self.status, "failed"),
            "exit_status": self.status,
            "error": self.error,
            "fusions": {name: getattr(args, name) for _, name, _ in FUSIONS},
            "without_effect": args.without_effect,
            "training": {n: getattr(args, n) for n in SETTINGS} | {"processes": WORLD_SIZE},
            "environment": environment(self.device),
            **self.model,
            "timing": times,
            "memory": {"peak_mb": self.peak / 1e6} if self.peak else {},
            "kernels": kernels,
            "flops": flops,
            "loss": {"warmup_steps": args.warmup_steps, "curve": curve, **ends},
        }

    def write(self) -> None:
        """Write or replace <profile-dir>/<script>_summary.json."""
        write_json(self.args.profile_dir / f"{SCRIPT}_summary.json", self.result())


def write_json(path: Path, content: dict) -> None:
    """Write or replace a result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n")
        unfinished.replace(path)
    except OSError:
        for file in (unfinished, path):
            file.unlink(missing_ok=True)
        raise


def measure(runs: list[Run]) -> None:
    """Warm up, take all steps in up to ten alternating turns, then count."""
    args, device = runs[-1].args, runs[-1].device
    for run in runs:
        run.start()
    turns = min(10, args.num_steps) if len(runs) > 1 else 1
    marked = args.enable_rocm_profiling and device.type == "cuda"
    with recorded_region(marked), contextlib.ExitStack() as ranges:
        for run in runs if marked else ():
            ranges.enter_context(run.trainer.ranges(torch.cuda.nvtx.range))
        for turn in range(turns):
            steps = args.num_steps * (turn + 1) // turns - args.num_steps * turn // turns
            for run in runs if turn % 2 == 0 else reversed(runs):
                run.take(steps)
    for run in runs if not args.under_profiler else ():
        run.count()
        del run.trainer  # its memory is wanted for all off
    for run in runs if WORLD_SIZE > 1 else ():
        dist.all_gather_object(peaks := [0.0] * WORLD_SIZE, run.peak)
        run.peak = max(peaks)
    kernels = runs[-1].kernels
    if kernels and args != all_off(args):
        first = runs[0].kernels["per_step"]
        kernels["all_off"] = first if len(runs) > 1 else count_all_off(args, device)


def train_all(runs: list[Run]) -> None:
    """Train all; however it ends, each result is in its JSON file."""
    end = runs[-1].status, runs[-1].error
    try:
        if RANK:
            dist.barrier()  # rank 0 leaves its record before another one can fail
        for run in runs:
            run.write()  # for a run that is killed
        if WORLD_SIZE > 1 and not RANK:
            dist.barrier()
        measure(runs)
        end = 0, None
    except (Exception, KeyboardInterrupt) as error:
        end = 1, str(error)
        end = explain(error, runs[-1].args.profile_dir)
    finally:
        for run in runs:
            run.status, run.error = end
            try:
                run.write()
            except OSError as error:
                run.status, run.error = explain(error, run.args.profile_dir)


def train(args: argparse.Namespace) -> dict:
    """Train, measure and count; the result is also in its JSON file."""
    run = Run(args)
    train_all([run])
    return run.result()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell if it is, or came from that: the end of a capture raises its own error."""
    if error is None or isinstance(error, MemoryError):
        return error is not None
    said = re.search("out of memory|allocate memory|ALLOC_FAILED", str(error))
    return bool(said) or is_out_of_memory(error.__context__)


def explain(error: BaseException, directory: Path) -> tuple[int, str]:
    """Return status and line of an error that a user can mend; raise any other."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    compiler = type(error).__module__.startswith(("torch._", "triton.runtime"))
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if is_out_of_memory(error):
        return 3, f"out of memory: lower --batch-size or --seq-len ({line})"
    if compiler or isinstance(error, (FloatingPointError, TimeoutError)):
        return 1, line
    if isinstance(error, BrokenPipeError):
        raise error
    places = str(directory), tempfile.gettempdir()
    if isinstance(error, OSError) and not str(error.filename or "").startswith(places):
        return 2, f"{error.filename or 'standard output'}: {error.strerror}"
    if isinstance(error, (OSError, json.JSONDecodeError)):  # half a trace is no JSON
        message = f"--profile-dir {directory}: cannot write there or in {places[1]}"
        return 2, f"{message}, is there space left? ({line})"
    raise error


# What is printed


def report(result: dict) -> str:
    """Return the lines of REPORT whose values were measured."""
    acting = {name for name, on in result["fusions"].items() if on} - {*result["without_effect"]}
    triton = acting & {*TRITON_FUSIONS} and result["environment"]["device"] == "cuda"
    compiled = ", includes compilation" if triton or result["training"]["torch_compile"] else ""
    off = result["kernels"].get("all_off", 0)
    all_off = f" (all fusions off: {off or 'out of memory'})" if off != 0 else ""
    text = ""
    for line in REPORT.splitlines(keepends=True):
        if all(key in result[group] for group, key in re.findall(r"{(\w+)\[(\w+)\]", line)):
            text += line.format(**result, all_off=all_off, compiled=compiled)
    return text


def finish(result: dict) -> int:
    """Print report and error of a result; return the exit status."""
    progress()
    print(report(result), end="", flush=True)
    if result["error"]:
        say("error", result["error"])
    return result["exit_status"]


# The program


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - it was closed
    args = parse_args(argv)
    if args.num_gpus > 1 and not LAUNCHED:
        start_torchrun(args.num_gpus, sys.argv[1:] if argv is None else argv)
    if threading.current_thread() is threading.main_thread():
        answer_signals()
    modes = [run for name, run in MODES.items() if getattr(args, name)]
    try:
        if WORLD_SIZE > 1:
            join_processes(args)
        status = modes[0](args) if modes else finish(train(args))
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.filename is None:  # what is left goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # `... | head` has seen enough
            status = 1
        else:
            status, message = explain(error, args.profile_dir)
            say("error", message)
    if WORLD_SIZE > 1:
        if status:  # a tidy end could wait for a process that is gone
            os._exit(status)
        gc.collect()  # what refers to the group keeps its threads alive
        dist.destroy_process_group()
    return status


# --- end of harness
# --- modes
# Copied from common/modes.py by tools/sync_common.py: edit it there.
# What can run in place of training; the harness knows a mode by its entry in MODES alone.


def compare_fusion(args: argparse.Namespace) -> int:
    """Measure everything off (results in <profile-dir>/baseline) and as chosen, in turns."""
    sides = all_off(args, profile_dir=args.profile_dir / "baseline"), args
    runs = [Run(sides[0], "all off: "), Run(sides[1], "as chosen: ")]
    train_all(runs)
    before, after = (run.result() for run in runs)
    compared = before["status"] == "ok"
    if before["status"] == "oom":
        print("Both do not fit into memory side by side: each is measured alone, without ratios.")
        runs.clear()
        before, after = (train(side) for side in sides)
    progress()
    if compared:
        print_comparison(before, after)
    if args.full_report or not compared:
        print(f"\nall off:\n{report(before)}\nas chosen:\n{report(after)}", end="")
    for error in dict.fromkeys([before["error"], after["error"]]):
        if error:
            say("error", error)
    return max(before["exit_status"], after["exit_status"])


def print_comparison(before: dict, after: dict) -> None:
    """Print the table of both sides, and what the ratios of their turns show."""
    turns = zip(before["timing"]["turns_ms"], after["timing"]["turns_ms"], strict=True)
    ratios = sorted(off / on for off, on in turns)
    print(f"\n{'':24}{'all off':>12}{'as chosen':>12}{'ratio':>9}")
    for label, group, key, digits in (
        ("batch time, ms", "timing", "turns_ms", 2),
        ("peak memory, MB", "memory", "peak_mb", 1),
        (f"{after['kernels'].get('unit', 'kernels')} per step", "kernels", "per_step", 0),
        ("final loss", "loss", "final", 4),
    ):
        if key in before[group] and key in after[group]:
            off, on = np.median(before[group][key]), np.median(after[group][key])
            ratio = np.median(ratios) if key == "turns_ms" else off / on
            times = f"{ratio:8.2f}x" if key != "final" else ""
            print(f"{label:24}{off:12.{digits}f}{on:12.{digits}f}{times}")
    low, high = ratios[0], ratios[-1]
    verdict = "no difference seen" if low <= 1 <= high else "all turns agree"
    if len(ratios) < 5:
        verdict = "too few turns to tell"
    print(f"Batch time ratio in {len(ratios)} turns: {low:.2f}x to {high:.2f}x ({verdict})")


class InFloat64(TorchFunctionMode):
    """Inside, what asks for float32 gets float64, so that a model in float64 stays in it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            return args[0].double()

        def wide(value):
            return torch.float64 if value is torch.float32 else value

        kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(wide, args), **kwargs)


def values_of(trainer: Trainer, exact: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Return outputs, loss and gradients by canonical name; a missing gradient is NaN.

    `exact`: in float64. With a `seed` the weights are off by up to a quarter of their last digit,
    so that everything is rounded differently. Afterwards the trainer is of no use.
    """
    batch, model, forward = trainer.next_batch(), trainer.model, trainer.forward
    context = trainer.autocast
    if seed:
        digit, generator = last_digit(trainer.args), torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.data *= (1 + digit / 2 * noise).to(parameter.device)
    if exact:
        model = forward = build_model(trainer.args, trainer.device).double()
        model.load_state_dict(trainer.model.state_dict())
        batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
        context = InFloat64
    with torch.no_grad(), context():
        outputs = forward(**{n: t for n, t in batch.items() if n not in model.TARGETS})
    values = dict(outputs) if isinstance(outputs, dict) else {"outputs": outputs}
    with context():  # anew: PyTorch 2.6 would reuse the weights that it cast without gradients
        values["loss"] = forward(**batch)
    scale = 1024  # a power of two: away from the smallest numbers of float16
    (scale * values["loss"]).backward()
    if trainer.average and not exact:
        trainer.average()
    for parameter in model.parameters():  # state_dict then splits gradients of fused weights
        grad = torch.full_like(parameter, math.nan) if parameter.grad is None else parameter.grad
        if exact and WORLD_SIZE > 1:  # as DDP or the optimizer does
            dist.all_reduce(grad)
            grad /= WORLD_SIZE
        parameter.data = grad.double() / scale
    values |= {f"gradient of {name}": grad for name, grad in model.state_dict().items()}
    return {name: value.detach().double() for name, value in values.items()}


def judge(
    exact: dict, unfused: list[dict], found: dict, least: float
) -> dict[str, tuple[float, float]]:
    """Return each value's relative error and its limit, three times that of the unfused model.

    That is the largest of its runs; or `least` (1e-3 for what is no gradient), if that is more.
    Where an unfused one is a NaN, none is right. No norm counts for less than 1e-5 of that of all
    gradients. Some gradients are zero in theory, as that of a bias which softmax takes out. What is
    found is the noise of sums in another order then, and the norm counts for 1e-3 of that of all,
    or for `least` / 10.
    """
    norms = {name: float(value.norm()) for name, value in exact.items()}
    total = math.hypot(*(norm for name, norm in norms.items() if name.startswith("gradient")))
    judged = {}
    for name, norm in norms.items():
        norm = max(norm, total * (1e-5 if norm > 1e-12 * total else max(1e-3, least / 10)))
        sizes = [float((side[name] - exact[name]).norm()) for side in (found, *unfused)]
        error, *errors = (size / norm if math.isfinite(size) else math.inf for size in sizes)
        rounding = max(errors)
        floor = least if name.startswith("gradient") else min(least, 1e-3)
        judged[name] = error, max(floor, 3 * rounding) if rounding < math.inf else 0.0
    return judged


def least_limit(args: argparse.Namespace) -> float:
    """Return the error below which nothing is judged: a ReLU's argument may round beyond zero.

    That is rare in float32. In TF32 gradients of a model of 60 positions were 4 % off.
    """
    return 0.05 if args.use_amp or args.matmul_precision != "highest" else 1e-3


def last_digit(args: argparse.Namespace) -> float:
    """Return the step between two numbers near 1, as a matrix product takes them."""
    if args.use_amp:
        return torch.finfo(getattr(torch, args.amp_dtype)).eps
    return 2.0 ** (-23 if args.matmul_precision == "highest" else -10)


def unfused_values(args: argparse.Namespace, seeds: range) -> list[dict[str, Tensor]]:
    """Return what the unfused model gives, for each seed rounded differently."""
    off = all_off(args)
    return [values_of(Trainer(off, prepare(off)), seed=seed) for seed in seeds]


def judged_values(args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Judge what these arguments give by the same in float64.

    In a small model a few roundings decide on the unfused one's error. So where one run of it does
    not explain an error, eight more may.
    """
    exact = all_off(args, use_amp=False, matmul_precision="highest")
    right = values_of(Trainer(exact, prepare(exact)), exact=True)
    unfused, found = unfused_values(args, range(1)), values_of(Trainer(args, prepare(args)))
    judged = judge(right, unfused, found, least_limit(args))
    doubt = torch.tensor(any(e > limit for e, limit in judged.values()), device=args.device).int()
    if WORLD_SIZE > 1:  # together, or nobody averages gradients
        dist.all_reduce(doubt)
    if doubt:
        unfused += unfused_values(args, range(1, 9))
        judged = judge(right, unfused, found, least_limit(args))
    return judged


def verify_accuracy(args: argparse.Namespace) -> int:
    """Judge the outputs, loss and gradients of the initial weights by those in float64."""
    progress("outputs and gradients: in float64, with all off, and as chosen")
    judged = judged_values(args)
    progress()
    wrong = [name for name, (error, limit) in judged.items() if error > limit]
    gradients = [name for name in judged if name.startswith("gradient")]
    worst = max(gradients, key=lambda name: judged[name][0] / max(judged[name][1], 1e-300))
    for name, (error, limit) in judged.items():
        if name not in gradients or name in (worst, *wrong):
            label = f" (the worst of {len(gradients)})" if name == worst else ""
            verdict = ": FAIL" if name in wrong else ""
            print(f"{name}{label}: relative error {error:.2e}, limit {limit:.2e}{verdict}")
    if coarse := [name for name in gradients if judged[name][1] > 0.25]:
        some, first = f"{len(coarse)} of {len(gradients)} gradients", coarse[0].split()[-1]
        print(f"Note: rounding could hide an error of a quarter in {some} ({first})")
    print(f"Accuracy check: {'FAIL' if wrong else 'PASS'}")
    return 1 if wrong else 0


MODES |= {"compare_fusion": compare_fusion, "verify_accuracy": verify_accuracy}


# --- end of modes


def first_layer(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build the first layer of the model for inference, the weights of its GEMMs in this type."""
    layer = build_model(args, device).layers[0].requires_grad_(False)
    for module in layer.modules():
        if isinstance(module, nn.Linear):  # in training the optimizer or autocast does that
            module.weight.data = module.weight.data.to(dtype)
    return layer


def in_launches(launches: int, layer: nn.Module, x: Tensor) -> Tensor:
    """Return the residual stream x [B, S, D] after this layer, in 1 launch or 5.

    The layer's projections must be packed.
    """
    attention, mlp = layer.self_attn, layer.mlp
    return transformer_block(
        x,
        input_norm=layer.input_layernorm.weight,
        qkv=attention.qkv_proj.weight,
        o=attention.o_proj.weight,
        post_attention_norm=layer.post_attention_layernorm.weight,
        gate_up=mlp.gate_up_proj.weight,
        down=mlp.down_proj.weight,
        cos=attention.rotary.cos,
        sin=attention.rotary.sin,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        eps=layer.input_layernorm.eps,
        launches=launches,
    )


def benchmark(args: argparse.Namespace) -> int:
    """Run the first layer as one launch and in other ways, and check that they agree.

    On a GPU each is timed. The result is also in <profile-dir>/tiny_llama_v4_benchmark.json.
    """
    if TOO_OLD:
        fail(TOO_OLD, 4)
    device, dtype = prepare(args), getattr(torch, args.amp_dtype) if args.use_amp else torch.float32
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(args.batch_size, args.seq_len, args.hidden_dim, generator=generator)
    x, packed = x.to(device), {"qkv_fusion": True, "swiglu_fusion": True}
    ours = first_layer(argparse.Namespace(**{**vars(args), **packed}), device, dtype)
    library = first_layer(all_off(args, **packed, flash_attention=True), device, dtype)

    def whole(layer: nn.Module) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=args.use_amp):
            return torch.add(*layer(x, None))

    sides = {
        "one launch": partial(in_launches, 1, ours, x),
        "five launches": partial(in_launches, 5, ours, x),
        "kernels of training": partial(whole, ours),
    }
    if device.type == "cuda":
        sides["torch.compile"] = torch.compile(partial(whole, library))
    plain = all_off(args, **packed, use_amp=False, matmul_precision="highest")
    with torch.no_grad():
        with InFloat64():
            layer = first_layer(plain, device, torch.float64).double()
            exact = torch.add(*layer(x.double(), None)) - x
        found = {**{name: side() for name, side in sides.items()}, "library": whole(library)}
        errors = {}
        for name, result in found.items():
            errors[name] = float((result - x - exact).norm() / exact.norm())
        # three times what rounding does to PyTorch's own operators
        limit = max(1e-4, 3 * errors.pop("library"))
        times = in_turns(sides) if device.type == "cuda" else {}
    print(f"One layer, batch_size {args.batch_size}, seq_len {args.seq_len}, {str(dtype)[6:]}")
    for name, error in errors.items():
        taken = f"{times[name]['us']:8.1f} us {times[name]['kernels']:4} kernels" if times else ""
        print(f"{name:22}{taken}  relative error {error:.1e}, limit {limit:.1e}")
    if not times:
        print("Not timed: the kernels run in Triton's interpreter.")
    passed = all(error <= limit for error in errors.values())  # a NaN fails
    print(f"Accuracy check: {'PASS' if passed else 'FAIL'}")
    content = {
        "args": {**vars(args), "profile_dir": None},
        "environment": environment(device),
        "errors": errors,
        "times": times,
    }
    write_json(args.profile_dir / f"{SCRIPT}_benchmark.json", content)
    return 0 if passed else 1


MODES["benchmark"] = benchmark


def in_turns(
    sides: dict[str, Callable[[], Tensor]], rounds: int = 11, calls: int = 20
) -> dict[str, dict]:  # fmt: skip
    """Measure microseconds per call, the median of turns of one graph each, and count kernels."""
    graphs, turns, times = {}, {name: [] for name in sides}, {}
    for name, side in sides.items():
        side()
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            for _ in range(calls):
                side()
        graphs[name] = graph
        graph.replay()
    for turn in range(rounds):
        for name in list(sides) if turn % 2 == 0 else reversed(sides):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            turns[name].append(1e3 * begin.elapsed_time(end) / calls)
    on_gpu, activity = torch.autograd.DeviceType.CUDA, torch.profiler.ProfilerActivity.CUDA
    for name, side in sides.items():
        with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
            side()
            torch.cuda.synchronize()
        kernels = sum(event.device_type == on_gpu for event in profile.events())
        us = float(np.median(turns[name]))
        times[name] = {"us": us, "turns_us": turns[name], "kernels": kernels}
    return times


if __name__ == "__main__":
    sys.exit(main())

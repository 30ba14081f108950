#!/usr/bin/env python3
"""TinyLlama V2: fusions that PyTorch itself offers, each on a flag of its own.

qkv-fusion       query, key and value are one GEMM, and one rotary embedding rotates query and key
flash-attention  scaled_dot_product_attention: scores never reach device memory, which then grows
                 linearly with the length
swiglu-fusion    gate and up projection are one GEMM

Fewer, larger kernels help where launching them or moving their intermediate results takes longer
than the arithmetic. The model, its weights and its loss are those of V1:
`diff tiny_llama_v1.py tiny_llama_v2.py` is the whole lesson.

Examples:
  python tiny_llama_v2.py --compare-fusion                                 all off against all on
  python tiny_llama_v2.py --disable-all-fusion --enable-flash-attention    one fusion alone
  python tiny_llama_v2.py --use-amp --enable-torch-compile --torch-compile-mode reduce-overhead
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
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

VERSION = 2


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


@dataclass(frozen=True)
class Fusions:
    """Which fusions are on."""

    qkv_fusion: bool = True
    flash_attention: bool = True
    swiglu_fusion: bool = True


FUSIONS: tuple[tuple[str, str, str], ...] = (
    ("qkv-fusion", "qkv_fusion", "query, key and value projection as one GEMM"),
    ("flash-attention", "flash_attention", "SDPA of PyTorch instead of materialised scores"),
    ("swiglu-fusion", "swiglu_fusion", "gate and up projection as one GEMM"),
)
MODES: tuple[str, ...] = ()  # functions that run in place of training, besides the harness's own


def without_effect(args: argparse.Namespace) -> dict[str, str]:
    """Return the fusions that change nothing beside the other arguments, on or off, and why."""
    return {}


def use_settings(args: argparse.Namespace) -> None:
    """Make this version's own settings of a run those of the process: there are none."""


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


# --- model


class RMSNorm(nn.Module):
    """Root mean square norm, `x / rms(x) * weight` over the last dimension, computed in float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


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

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.hidden_dim // config.num_heads
        kv_dim = self.num_kv_heads * self.head_dim
        self.fusions = fusions
        if fusions.qkv_fusion:
            parts = {"q_proj": config.hidden_dim, "k_proj": kv_dim, "v_proj": kv_dim}
            self.qkv_proj = nn.Linear(config.hidden_dim, sum(parts.values()), bias=False)
            keep_separate_names(self, "qkv_proj", parts)
        else:
            self.q_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
            self.k_proj = nn.Linear(config.hidden_dim, kv_dim, bias=False)
            self.v_proj = nn.Linear(config.hidden_dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.rotary = RotaryEmbedding(config)
        if not fusions.flash_attention:
            mask = torch.full((config.seq_len, config.seq_len), -torch.inf)
            mask = mask.triu(1)  # 0 on and below the diagonal
            self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        batch, seq, _ = x.shape
        if self.fusions.qkv_fusion:
            qkv = self.qkv_proj(x).view(batch, seq, -1, self.head_dim)
            qk, v = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=2)
            q, k = self.rotary(qk).split([self.num_heads, self.num_kv_heads], dim=2)
        else:
            q = self.q_proj(x).view(batch, seq, self.num_heads, self.head_dim)
            k = self.k_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
            v = self.v_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
            q, k = self.rotary(q), self.rotary(k)

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

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.fusions = fusions
        if fusions.swiglu_fusion:
            parts = {"gate_proj": config.intermediate_dim, "up_proj": config.intermediate_dim}
            self.gate_up_proj = nn.Linear(config.hidden_dim, sum(parts.values()), bias=False)
            keep_separate_names(self, "gate_up_proj", parts)
        else:
            self.gate_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
            self.up_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        if self.fusions.swiglu_fusion:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.self_attn = Attention(config, fusions)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.mlp = SwiGLU(config, fusions)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """Llama (Touvron et al. 2023) with tied input and output embedding.

    Parameter names are those of Hugging Face.
    """

    TARGETS = ("labels",)

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(DecoderLayer(config, fusions) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map input_ids [B, S] to logits [B, S, V], with labels, the same tokens, to the loss."""
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        if labels is None:
            return logits
        # the one place where labels are shifted; -100 is ignored
        following = F.pad(labels[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build the model of these arguments.

    The same seed gives the same weights in every version and fusion setting.
    """
    names = [name for name in ModelConfig.__dataclass_fields__ if hasattr(args, name)]
    fields = {name: getattr(args, name) for name in names}
    fusions = Fusions(**{attribute: getattr(args, attribute) for _, attribute, _ in FUSIONS})
    with device:
        model = TinyLlama(ModelConfig(**fields), fusions)
    if device.type != "meta":
        generator = torch.Generator().manual_seed(args.seed)
        # canonical names, so the order of the draws does not depend on what is fused
        state = model.state_dict()
        for name in sorted(state):
            if "norm" not in name:
                state[name] = torch.empty(state[name].shape).normal_(std=0.02, generator=generator)
        model.load_state_dict(state)
    return model


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters, in a few launches of PyTorch's own kernel."""
    return AdamW(model.parameters(), args.learning_rate, fused=True, capturable=args.cuda_graph)


# --- data


class TextBatches:
    """Random windows of a token stream in host memory: {"input_ids": [B, S], "labels": [B, S]}."""

    def __init__(
        self, stream: np.ndarray, args: argparse.Namespace, device: torch.device, seed: int
    ):  # fmt: skip
        self.windows = np.lib.stride_tricks.sliding_window_view(stream, args.seq_len)
        self.batch_size, self.device = args.batch_size, device
        self.generator = torch.Generator().manual_seed(seed)

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


def read_text(path: Path, seq_len: int) -> np.ndarray:
    """Read the bytes of a text file as tokens [length]."""
    if path.exists() and not path.is_file():  # a pipe can be read only once, /dev/zero has no end
        fail(f"--text-file {path}: not a regular file")
    try:
        content = path.read_bytes()
    except OSError as error:
        fail(f"--text-file {path}: {error.strerror}")
    if b"\0" in content:
        fail(f"--text-file {path}: this is a binary file; give a text file")
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


# --- harness
# The same bytes in every tiny_*_v*.py: edit it in one script, then run `python tools/sync_harness.py THAT_SCRIPT.py`.
# It knows the model as docstring, VERSION, FUSIONS, MODES, add_model_arguments (--batch-size), check_model_arguments,
# without_effect, use_settings, build_model (.config, .TARGETS), build_optimizer and make_batches (.next_batch()); these
# use its at_least, fail, say.
SCRIPT = Path(__file__).stem
MEETING = timedelta(minutes=5)  # for the processes of a run to find each other
PHASES = ("data", "forward", "backward", "optimizer")
GRAPH_PHASES = ("data", "graph")  # with --enable-cuda-graph
OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile that make graphs of their own
NO_WORK = ("_unsafe_view", "empty", "new_empty", "_record_function")  # operators that move no data, besides views
# torchrun sets these, one process per GPU; a plain run is the only one.
LAUNCHED = os.environ.get("RANK", "").isdecimal()
RANK = int(os.environ["RANK"]) if LAUNCHED else 0
LOCAL_RANK = int(os.environ.get("LOCAL_RANK") or 0) if LAUNCHED else 0
WORLD_SIZE = int(os.environ.get("WORLD_SIZE") or 1) if LAUNCHED else 1
# Where a GPU profiler started this process, one of these is set: rocprofv3 (rocprof-compute uses it), nsys, ncu.
PROFILER_SIGNS = ("ROCP_TOOL_LIBRARIES", "NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")
REPORT = """\
Average training speed: {timing[samples_per_sec]:.1f} samples/sec
Average batch time: {timing[batch_ms]:.1f} ms (median {timing[batch_median_ms]:.1f}, p95 {timing[batch_p95_ms]:.1f})
Average forward time: {timing[forward_ms]:.1f} ms
Average backward time: {timing[backward_ms]:.1f} ms
Average optimizer time: {timing[optimizer_ms]:.1f} ms
Average graph time: {timing[graph_ms]:.1f} ms (the whole step is one graph: compare it with runs that have one, too)
Warmup step time: {timing[warmup_first_step_ms]:.1f} ms (first step, includes compilation)
Compilation overhead: {timing[compilation_overhead_ms]:.1f} ms
Final loss: {loss[final]:.4f} (first step {loss[initial]:.4f})
Peak memory usage: {memory[peak_mb]:.1f} MB
Kernels per step: {kernels[per_step]}{all_off}{kernels[remark]}
Kernel reduction: {kernels[reduction_percent]:.1f} %
Host launches per step: {kernels[host_launches]}
FLOPs per step: {flops[gflop]:.4g} GFLOP, achieved {flops[achieved_tflops]:.3g} TFLOP/s"""


def say(kind: str, message: str) -> None:
    """A line on stderr: an "error" of this process, or a "note", of which all processes together give one."""
    if kind == "error" or (RANK == 0 and "TINY_LAUNCHED" not in os.environ):
        print(f"{SCRIPT}.py: {kind}: {f'rank {RANK}: ' if RANK else ''}{message}", file=sys.stderr)


def fail(message: str, status: int = 2) -> NoReturn:
    """End with one line on stderr: something that the user can put right."""
    say("error", message)
    raise SystemExit(status)


def progress(text: str = "") -> None:
    """What happens now: on a terminal one line that is rewritten, and cleared at the end, elsewhere a line each."""
    if sys.stdout.isatty():
        print(f"\r{text[: shutil.get_terminal_size().columns - 1]}\033[K", end="", flush=True)
    elif text:
        print(text, flush=True)


def at_least(low: int) -> Callable[[str], int]:
    """argparse type: a whole number not below `low`, small enough for 32 bits."""

    def whole_number(text: str) -> int:
        if not low <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"must be {low} or more, not {text}")
        return int(text)

    return whole_number


def build_parser() -> argparse.ArgumentParser:
    """The command line: the model's own arguments and those that all versions share."""
    description, _, examples = (__doc__ or "").partition("\nExamples:\n")  # python -OO has none
    texts = {"description": description, "epilog": "examples:\n" + examples, "usage": argparse.SUPPRESS}
    texts["formatter_class"] = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"{SCRIPT}.py", **texts, allow_abbrev=False)
    add_model_arguments(parser)
    group = parser.add_argument_group("fusions", "Single flags win over all-fusion, whatever their order.")
    for flag, attribute, text in (
        (
            "all-fusion",
            "all_fusion",
            "every fusion (the default), but not torch-compile and cuda-graph",
        ),
        *FUSIONS,
        ("torch-compile", "torch_compile", "compile the model with torch.compile"),
        ("cuda-graph", "cuda_graph", "the whole step as one graph after the warm-up (one GPU; the default of V4)"),
    ):
        add = group.add_mutually_exclusive_group().add_argument
        add(f"--enable-{flag}", dest=attribute, action="store_const", const=True, help=text)
        add(f"--disable-{flag}", dest=attribute, action="store_const", const=False)
    choices, text = ("default", *OWN_GRAPHS, "max-autotune-no-cudagraphs"), "how torch.compile spends its time"
    group.add_argument("--torch-compile-mode", choices=choices, help=text)
    add = parser.add_argument_group("training").add_argument
    add("--num-steps", type=at_least(1), default=50, metavar="N", help="measured steps")
    add("--warmup-steps", type=at_least(0), default=5, metavar="N", help="steps before those, not measured")
    add("--learning-rate", type=float, default=3e-4, metavar="X", help="of AdamW")
    add("--use-amp", action="store_true", help="automatic mixed precision")
    add("--amp-dtype", choices=("bfloat16", "float16"), help="(default: bfloat16)")
    add("--matmul-precision", choices=("highest", "high", "medium"), default="highest", help="of float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="AMD GPUs are 'cuda', too")
    add("--num-gpus", type=at_least(1), metavar="N", help="sharing the batch (default: 1, or *_VISIBLE_DEVICES)")
    add("--seed", type=at_least(0), default=42, metavar="N", help="of weights and data")
    add("--deterministic", action="store_true", help="only algorithms that give the same bits every run")
    add("--log-interval", type=at_least(1), default=10, metavar="N", help="steps between lines of progress")
    add = parser.add_argument_group("profiling").add_argument
    add("--enable-pytorch-profiler", action="store_true", help="operator tables and a trace of three steps")
    add("--enable-memory-profiling", action="store_true", help="memory timeline of one step")
    add("--enable-rocm-profiling", action="store_true", help="name phases and modules to a profiler around this run")
    add("--under-profiler", action="store_true", help="launch nothing but the training steps")
    add("--profile-dir", type=Path, default=f"pytorch_profiles_v{VERSION}", metavar="DIR", help="for results")
    group = parser.add_argument_group("modes")
    group.add_argument("--full-report", action="store_true", help="with --compare-fusion: the report of each side, too")
    add = group.add_mutually_exclusive_group().add_argument
    add("--compare-fusion", action="store_true", help="all fusions off and as chosen in alternating turns; one table")
    add("--verify-accuracy", action="store_true", help="same outputs and gradients as with everything off?")
    for action in parser._actions:
        if action.default not in (None, False, argparse.SUPPRESS):
            action.help += " (default: %(default)s)"
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse, fill in and check; what cannot work is one line on stderr and SystemExit with status 2 or 4."""
    args, unknown = (parser := build_parser()).parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0], parser._option_string_actions, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    given = {name: getattr(args, name) for _, name, _ in FUSIONS if getattr(args, name) is not None}
    vars(args).update({name: args.all_fusion is not False for _, name, _ in FUSIONS if name not in given})
    check_model_arguments(args, parser)
    gpu, found = args.device != "cpu" and torch.cuda.is_available(), torch.cuda.device_count()
    named = [os.environ.get(f"{who}_VISIBLE_DEVICES") for who in ("ROCR", "HIP", "CUDA")]
    named_gpus = min((len(text.split(",")) for text in named if text and gpu), default=1)
    processes = WORLD_SIZE if LAUNCHED else args.num_gpus or named_gpus
    here = int(os.getenv("LOCAL_WORLD_SIZE", processes)) if gpu or args.num_gpus else 1  # on this host
    mode, for_fusions = args.torch_compile_mode, not FUSIONS and (args.all_fusion or args.compare_fusion)
    for wrong, status, message in (
        (for_fusions, 2, f"--enable-all-fusion and --compare-fusion start with V2, {SCRIPT} has no fusions"),
        (mode and not args.torch_compile, 2, f"--torch-compile-mode {mode} needs --enable-torch-compile"),
        (args.amp_dtype and not args.use_amp, 2, f"--amp-dtype {args.amp_dtype} needs --use-amp"),
        (args.full_report and not args.compare_fusion, 2, "--full-report needs --compare-fusion"),
        (not 0 < args.learning_rate < math.inf, 2, f"--learning-rate must be above 0, not {args.learning_rate}"),
        (args.num_gpus not in (None, processes), 2, f"--num-gpus {args.num_gpus}, but torchrun started {processes}"),
        (args.batch_size % processes, 2, f"--batch-size {args.batch_size} is not divisible by {processes} GPUs"),
        (args.cuda_graph and processes > 1, 2, f"--enable-cuda-graph is for one GPU, not for {processes}"),
        (args.cuda_graph and args.warmup_steps < 2, 2, "--enable-cuda-graph needs --warmup-steps 2 or more"),
        (args.cuda_graph and mode in OWN_GRAPHS, 2, f"--enable-cuda-graph: mode {mode} makes graphs of its own"),
        (args.cuda_graph and not gpu, 4, "--enable-cuda-graph: a graph needs a GPU, and this run has none"),
        (args.device == "cuda" and not gpu, 4, "--device cuda: PyTorch finds no GPU here; use --device cpu or auto"),
        (args.device != "cpu" and here > max(1, found), 4, f"{here} GPUs wanted, PyTorch finds {found}"),
    ):
        if wrong:
            fail(message, status)
    if args.cuda_graph is None:
        args.cuda_graph = VERSION > 3 and gpu and processes == 1 < args.warmup_steps and mode not in OWN_GRAPHS
    args.torch_compile = bool(args.torch_compile)
    args.amp_dtype, args.num_gpus, args.device = args.amp_dtype or "bfloat16", processes, "cuda" if gpu else "cpu"
    args.profile_dir = args.profile_dir / f"rank{RANK}" if RANK else args.profile_dir
    signs = [n for n in PROFILER_SIGNS if n in os.environ] + re.findall("librocprof[^:]*", os.getenv("LD_PRELOAD", ""))
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


def join_processes(args: argparse.Namespace) -> None:
    """Meet the other processes that torchrun started. Only rank 0 prints; the others' files go to rankN/."""
    if args.device == "cuda":
        torch.cuda.set_device(LOCAL_RANK)
    try:
        store = next(torch.distributed.rendezvous("env://", timeout=MEETING))[0]
        torch.distributed.init_process_group(store=store, rank=RANK, world_size=WORLD_SIZE)  # NCCL (RCCL) and gloo
    except (RuntimeError, ValueError) as error:
        fail(f"the {WORLD_SIZE} processes cannot meet: {str(error).splitlines()[0]}", status=1)
    ours = {name: str(value) for name, value in vars(args).items() if name != "profile_dir"}
    torch.distributed.all_gather_object(everyone := [{}] * WORLD_SIZE, {"script": SCRIPT, **ours})
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                if RANK == 0:
                    option, other = name.replace("_", "-"), theirs.get(name)
                    say("error", f"rank {rank} was started with {option} {other}, rank 0 with {value}")
                raise SystemExit(2)
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open as long as the process


def all_off(args: argparse.Namespace, **changes) -> argparse.Namespace:
    """The same run with every fusion and torch.compile off, and these changes."""
    off = {attribute: False for _, attribute, _ in FUSIONS}
    off |= {"torch_compile": False, "torch_compile_mode": None, "without_effect": {}}
    return argparse.Namespace(**{**vars(args), **off, **changes})


def prepare(args: argparse.Namespace) -> torch.device:
    """Make this run's settings those of the process, as each of its turns does anew; returns the device."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the PyTorch profiler writes lines of its own on stderr
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.deterministic)
    torch.set_float32_matmul_precision(args.matmul_precision)
    use_settings(args)
    return torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")


def environment(device: torch.device) -> dict:
    """What the numbers were measured on."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = (re.findall(r"model name\s*: (.+)", cpu) or [platform.machine()])[0]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    triton = __import__("triton").__version__ if importlib.util.find_spec("triton") else None
    found = {"device": device.type, "device_name": name, "cpu_threads": torch.get_num_threads(), "triton": triton}
    versions = {"torch": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda}
    return {**found, **versions, "python": platform.python_version()}


def name_modules(model: nn.Module, named: Callable[[str], AbstractContextManager]) -> None:
    """Have every module run its forward pass in a range of its name, for a profiler to show."""
    for name, module in model.named_modules():
        if name:
            module.forward = named(name)(module.forward)  # a context manager is a decorator, too


class Trainer:
    """Model, optimizer and data, and the one training step that is measured, counted and profiled."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device, self.gpu = args, device, device.type == "cuda"
        self.autocast = partial(torch.autocast, device.type, getattr(torch, args.amp_dtype), enabled=args.use_amp)
        self.synchronize = torch.cuda.synchronize if self.gpu else lambda: None
        self.batches = make_batches(args, torch.device("cpu"), args.seed)
        self.model = build_model(args, device)
        self.optimizer = build_optimizer(args, self.model)
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.use_amp and args.amp_dtype == "float16")
        self.forward = torch.compile(self.model, mode=args.torch_compile_mode) if args.torch_compile else self.model
        if WORLD_SIZE > 1:  # buffers are constants, so they need no broadcast
            warnings.filterwarnings("ignore", message=".*broadcast_buffers. is deprecated", category=FutureWarning)
            self.forward = DistributedDataParallel(self.forward, broadcast_buffers=False, gradient_as_bucket_view=True)
        self.inputs: dict[str, Tensor] = {}  # on a GPU, where every batch is copied to
        self.graph, self.phases, self.marks = None, PHASES, []
        self.named = torch.cuda.nvtx.range if args.enable_rocm_profiling and self.gpu else contextlib.nullcontext
        if args.enable_rocm_profiling and self.gpu and not args.torch_compile:  # compiled, there are no modules left
            name_modules(self.model, self.named)

    def next_batch(self) -> dict[str, Tensor]:
        """This process's share of the global batch, which is the same for any number of processes, on the device."""
        share = self.args.batch_size // WORLD_SIZE
        batch = {name: value[RANK * share :][:share] for name, value in self.batches.next_batch().items()}
        if not self.gpu:
            return batch
        self.inputs = self.inputs or {n: torch.empty_like(t, device=self.device) for n, t in batch.items()}
        for name, value in batch.items():
            pinned = torch.empty_like(value, pin_memory=True).copy_(value)  # so that nobody waits for the copy
            self.inputs[name].copy_(pinned, non_blocking=True)
        return self.inputs

    def step(self) -> Tensor:
        """One training step; returns the loss of the global batch."""
        with self.phase("data"):
            batch = self.next_batch()
        if not self.graph:
            return self.compute(batch)
        with self.phase("graph"):
            self.graph.replay()
        return self.loss

    def compute(self, batch: dict[str, Tensor]) -> Tensor:
        """The step on the device, which is what a graph captures."""
        with self.phase("forward"), self.autocast():
            if self.args.torch_compile:
                torch.compiler.cudagraph_mark_step_begin()
            loss = self.forward(**batch)
        with self.phase("backward"):
            self.scaler.scale(loss).backward()
        with self.phase("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            loss = loss.detach() / WORLD_SIZE if WORLD_SIZE > 1 else loss.detach()
            if WORLD_SIZE > 1:
                torch.distributed.all_reduce(loss)
        return loss

    def capture(self) -> None:
        """Capture the step as a graph, without running it; from now on it is replayed. A step must have run before."""
        first = torch.cuda.Stream(priority=-1)  # it goes before a script's others, and has its own cuBLAS workspaces
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph(), stream=first):
            self.loss = self.compute(self.inputs)
        self.graph, self.phases = graph, GRAPH_PHASES

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Runs a phase of the step: a range of this name for a profiler, and a mark at its end for the clock."""
        with self.named(name):
            yield
        self.mark()

    def mark(self) -> None:
        """Note this moment: an event in the stream, or on a CPU a clock reading."""
        event = torch.cuda.Event(enable_timing=True) if self.gpu else None
        self.marks.append(torch.cuda.current_stream().record_event(event) if self.gpu else time.perf_counter())

    def profile(self, steps: int = 1, **options) -> torch.profiler.profile:
        """Run training steps under the PyTorch profiler."""
        with torch.profiler.profile(acc_events=True, **options) as profile:
            if WORLD_SIZE > 1:  # otherwise the first step contains waiting for the process whose profiler starts last
                torch.distributed.all_reduce(torch.zeros(1))  # on the host, without a kernel on the device
            self.named = torch.profiler.record_function
            for _ in range(steps):
                self.step()
            self.synchronize()
        return profile

    def trace(self, profile: torch.profiler.profile) -> dict:
        """What the profiler writes as a Chrome trace, for a moment into the folder of the results."""
        with tempfile.TemporaryDirectory(dir=self.args.profile_dir) as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            return json.loads(path.read_text())


class OperatorCounter(TorchDispatchMode):
    """Counts the ATen operators that are dispatched inside, without those that move no data."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += not (function.is_view or function.overloadpacket.__name__.startswith(NO_WORK))
        return function(*args, **(kwargs or {}))


def count_kernels(trainer: Trainer) -> dict:
    """Kernels that the device runs in one training step; on a CPU operators. Nothing where neither can be seen."""
    if not trainer.gpu:  # of two samples: with a single one some copies are views, which would be another count
        pair = Trainer(argparse.Namespace(**{**vars(trainer.args), "batch_size": 2 * WORLD_SIZE}), trainer.device)
        pair.step()
        batch = pair.next_batch()
        with OperatorCounter() as counter:
            pair.compute(batch)
        return {"unit": "operator calls", "per_step": counter.calls, "remark": "; operator calls, counted on a CPU"}
    trainer.step()  # the first one does more
    events = trainer.trace(trainer.profile())["traceEvents"]
    kernels = sum(e.get("cat") == "kernel" for e in events)  # a profiler that may not run sees none
    launches = sum(e.get("cat") in ("cuda_runtime", "cuda_driver") and "Launch" in e["name"] for e in events)
    return {"unit": "kernels", "remark": "", "per_step": kernels, "host_launches": launches} if kernels else {}


def memory_of_a_step(trainer: Trainer) -> float:
    """High-water mark of tensor memory in bytes; with --enable-memory-profiling its course is written, too."""
    gc.collect()  # what is freed in the step was allocated in it
    events = trainer.trace(trainer.profile(profile_memory=True))["traceEvents"]
    kept = (*trainer.model.parameters(), *trainer.model.buffers(), *trainer.inputs.values())  # between two steps
    used = sum(t.nbytes for t in kept) + sum(t.nbytes for e in trainer.optimizer.state.values() for t in e.values())
    changes = (e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == int(trainer.gpu))
    changes = sorted(changes, key=lambda e: e["ts"])
    course = [(e["ts"] - changes[0]["ts"], used := used + e["args"]["Bytes"]) for e in changes]
    if trainer.args.enable_memory_profiling:
        rows = [f"{time:.3f},{used:.0f}\n" for time, used in course]
        (trainer.args.profile_dir / f"{SCRIPT}_memory_timeline.csv").write_text("time_us,bytes\n" + "".join(rows))
    return max((used for _, used in course), default=used)  # a graph allocates nothing


def gpu_memory(statistic: Callable[[], int]) -> int:
    """Bytes by this statistic, with all of the private pools that graphs keep, which nobody else can use."""
    pools = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return statistic() + sum(s["total_size"] - s["allocated_size"] for s in pools)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Is it, or did it follow from that? The end of a capture raises an error of its own."""
    here = isinstance(error, MemoryError) or re.search("out of memory|allocate memory|ALLOC_FAILED", str(error))
    return bool(here) or (error is not None and is_out_of_memory(error.__context__))


@contextlib.contextmanager
def recorded_region(active: bool) -> Iterator[None]:
    """Have an attached profiler record only what runs inside (cudaProfilerStart; under ROCm also ROCTx resume)."""
    with torch.cuda.profiler.profile() if active else contextlib.nullcontext(), contextlib.ExitStack() as at_end:
        if active and torch.version.hip:
            try:
                roctx = ctypes.CDLL("librocprofiler-sdk-roctx.so")
            except OSError as error:
                fail(f"--enable-rocm-profiling needs ROCm's rocprofiler-sdk-roctx: {error}", status=4)
            roctx.roctxProfilerResume(0)
            at_end.callback(roctx.roctxProfilerPause, 0)
        yield


def write_profile(trainer: Trainer, directory: Path) -> None:
    """Operator tables as text, and a trace for ui.perfetto.dev and chrome://tracing."""
    if not trainer.args.torch_compile:
        name_modules(trainer.model, torch.profiler.record_function)
    profile = trainer.profile(steps := 3, record_shapes=True)
    averages = profile.key_averages()
    for clock in ("cpu", "device") if trainer.gpu else ("cpu",):
        total = sum(getattr(entry, f"self_{clock}_time_total") for entry in averages) / 1e3
        table = averages.table(sort_by=f"self_{clock}_time_total", row_limit=40)
        title = f"Self {'CPU' if clock == 'cpu' else 'device'} total: {total:.3f} ms in {steps} steps"
        (directory / f"{SCRIPT}_operators_by_{clock}_time.txt").write_text(f"{title}\n\n{table}\n")
    (directory / f"{SCRIPT}_trace.json.gz").write_bytes(gzip.compress(json.dumps(trainer.trace(profile)).encode()))


def write_json(path: Path, content: dict) -> None:
    """Write or replace a result; a reader never sees half a file, also where several processes write it.

    Where it cannot be written, an earlier one is not left to be taken for this one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise


class Run:
    """One run: its arguments, its trainer with a clock, and `result`, its record, which is filled in as it goes."""

    def __init__(self, args: argparse.Namespace, title: str = ""):
        self.args, self.device, self.title = args, prepare(args), title
        settings = ["batch_size", "num_steps", "warmup_steps", "learning_rate", "seed", "deterministic", "use_amp"]
        settings += ["amp_dtype", "matmul_precision", "torch_compile", "torch_compile_mode", "cuda_graph"]
        self.curve: list[float] = []
        self.result = {
            **{"schema_version": 1, "script": SCRIPT},
            **{"status": "failed", "exit_status": 1, "error": "it did not finish"},
            "fusions": {attribute: getattr(args, attribute) for _, attribute, _ in FUSIONS},
            "without_effect": args.without_effect,
            "training": {**{name: getattr(args, name) for name in settings}, "processes": WORLD_SIZE},
            "environment": environment(self.device),
            **{group: {} for group in ("config", "timing", "memory", "kernels", "flops")},
            "loss": {"warmup_steps": args.warmup_steps, "curve": self.curve},
        }

    def write(self) -> None:
        """Write or replace <profile-dir>/<script>_summary.json."""
        write_json(self.args.profile_dir / f"{SCRIPT}_summary.json", self.result)

    def start(self) -> None:
        """Build what trains, say what it is, and take the warm-up steps; the last one replays the graph."""
        self.trainer, args, result = Trainer(self.args, self.device), self.args, self.result
        result["config"] = asdict(self.trainer.model.config)
        result["parameters"] = sum(p.numel() for p in self.trainer.model.parameters())
        where = result["environment"]["device_name"] + (f" x {WORLD_SIZE}" if WORLD_SIZE > 1 else "")
        sizes = [f"{name} {value}" for name, value in result["config"].items() if isinstance(value, int)]
        precision = args.amp_dtype if args.use_amp else f"float32 (matmul precision {args.matmul_precision})"
        on = [n for n in (*result["fusions"], "torch_compile", "cuda_graph") if getattr(args, n)]
        on = [name for name in on if name not in args.without_effect] or ["nothing fused"]
        progress()
        print(f"{SCRIPT} on {where}: {result['parameters']:,} parameters, batch_size {args.batch_size},", end=" ")
        print(f"{', '.join(sizes)}; {precision}; {', '.join(on).replace('_', '-')}", flush=True)
        if args.torch_compile:
            progress("compiling in the first step; this can take minutes")
        self.plan(args.warmup_steps - args.cuda_graph, "warm-up step")
        self.take(self.goal)
        if self.rows:
            result["timing"] = {"warmup_first_step_ms": sum(self.rows[0]), "warmup_ms": 1e3 * self.wall}
        if args.cuda_graph:
            self.trainer.capture()
            self.plan(1, "first replay of the graph")
            self.take(1)
        self.plan(args.num_steps, "step")

    def plan(self, steps: int, label: str) -> None:
        """Begin to count: so many steps are to be taken, in one turn or several."""
        self.goal, self.label, self.before, self.taken = steps, self.title + label, len(self.curve), 0
        self.losses = torch.full((steps,), -math.inf, pin_memory=self.trainer.gpu)  # -inf: not arrived yet
        self.rows, self.turns = [], []  # milliseconds: of each step a list of its phases; per step in each turn
        self.wall, self.peak, self.shown = 0.0, 0, 0.0  # seconds in all turns, bytes, when progress was shown
        self.started = self.began = time.perf_counter()  # the first turn, this turn

    def take(self, steps: int) -> None:
        """A turn of that many steps, with the device idle before the first and after the last."""
        prepare(self.args)  # another run may have had a turn
        trainer, count = self.trainer, len(self.trainer.phases)
        if trainer.gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.synchronize()
        trainer.marks, self.began = [], time.perf_counter()
        trainer.mark()
        try:
            for _ in range(steps):
                self.losses[self.taken].copy_(trainer.step(), non_blocking=True)
                self.taken += 1
                self.look()
        finally:  # after Ctrl-C, too: the steps until then count
            trainer.synchronize()
            seconds, pairs = time.perf_counter() - self.began, itertools.pairwise(trainer.marks)
            gaps = [a.elapsed_time(b) if trainer.gpu else 1e3 * (b - a) for a, b in pairs]
            self.rows += [gaps[i : i + count] for i in range(0, len(gaps) - count + 1, count)]
            self.peak = max(self.peak, gpu_memory(torch.cuda.max_memory_allocated) if trainer.gpu else 0)
            self.look()
            self.turns.append(1e3 * seconds / max(1, steps))
            self.wall += seconds

    def look(self) -> None:
        """Keep the losses that have arrived; show one every --log-interval steps, on a terminal ten times a second."""
        args, done = self.args, len(self.curve) - self.before
        while done < self.taken and (loss := float(self.losses[done])) != -math.inf:
            done, now = done + 1, time.perf_counter()
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss became {loss} at {self.label} {done}; lower --learning-rate")
            self.curve.append(loss)
            due = now > self.shown + 0.1 if sys.stdout.isatty() else done % args.log_interval == 0
            if due or done == self.goal:
                speed = args.batch_size * done / (self.wall + now - self.began)
                left, self.shown = (now - self.started) / done * (self.goal - done), now
                progress(f"{self.label} {done}/{self.goal}  loss {loss:.4f}  {speed:.1f} samples/s  {left:.0f} s left")

    def timing(self) -> dict:
        """Speed, mean times of the finished steps, and time per step in each turn."""
        if not (steps := len(self.curve) - self.before):
            return {}
        totals = (phases := np.array(self.rows[:steps])).sum(1)
        wall = self.wall if steps == self.goal else float(totals.sum()) / 1e3  # if it was cut short
        return {
            **{"steps": steps, "wall_s": wall, "samples_per_sec": self.args.batch_size * steps / wall},
            **{"batch_ms": 1e3 * wall / steps, "turns_ms": self.turns},
            "batch_median_ms": float(np.median(totals)),
            "batch_p95_ms": float(np.quantile(totals, 0.95, method="higher")),
            **{f"{name}_ms": float(ms) for name, ms in zip(self.trainer.phases, phases.mean(0), strict=True)},
        }

    def count(self) -> None:
        """Extra steps that count what the measured ones did, and those that the profiling flags ask for."""
        prepare(self.args)
        trainer, args, result = self.trainer, self.args, self.result
        progress("counting kernels, memory and operations")
        if trainer.gpu or not args.torch_compile:  # a loop that was compiled for a CPU is no operator
            result["kernels"] = count_kernels(trainer)
        if args.enable_memory_profiling or not trainer.gpu:
            result["memory"] = {"peak_mb": memory_of_a_step(trainer) / 1e6} | result["memory"]  # on a GPU it is known
        if args.enable_pytorch_profiler:
            write_profile(trainer, args.profile_dir)
        model = build_model(all_off(args), torch.device("meta"))  # of the unfused model, which is not run
        with FlopCounterMode(display=False) as counter:
            model(**{name: value.to("meta") for name, value in trainer.batches.next_batch().items()}).backward()
        flops, seconds = counter.get_total_flops(), result["timing"]["batch_ms"] / 1e3
        result["flops"] = {"per_step": flops, "gflop": flops / 1e9, "achieved_tflops": flops / seconds / 1e12}


def measure(runs: list[Run]) -> None:
    """Warm up each run, then take the measured steps of all in up to ten alternating turns, then count."""
    at_rest, args, gpu = [], runs[-1].args, runs[-1].device.type == "cuda"
    if len(runs) > 1:  # cuBLAS keeps workspaces from its first product on, which belong to neither run
        nn.Linear(8, 8, device=args.device)(torch.ones(8, 8, device=args.device)).sum().backward()
    for run in runs:
        before = gpu_memory(torch.cuda.memory_allocated) if gpu else 0
        run.start()
        at_rest.append(gpu_memory(torch.cuda.memory_allocated) - before if gpu else 0)
    turns = min(10, args.num_steps) if len(runs) > 1 else 1
    try:
        with recorded_region(args.enable_rocm_profiling and gpu):
            for turn in range(turns):
                for run in runs if turn % 2 == 0 else reversed(runs):
                    run.take(args.num_steps * (turn + 1) // turns - args.num_steps * turn // turns)
    finally:
        for run, own in zip(runs, at_rest, strict=True):
            run.result["timing"] |= run.timing()
            if gpu:  # without what the other run keeps between its turns
                run.result["memory"] = {"peak_mb": (run.peak - sum(at_rest) + own) / 1e6}
    timing, warmup_steps = runs[-1].result["timing"], args.warmup_steps - args.cuda_graph
    if args.torch_compile and warmup_steps:
        timing["compilation_overhead_ms"] = timing["warmup_ms"] - warmup_steps * timing["batch_ms"]
    for run in runs if not args.under_profiler else ():
        run.count()
        del run.trainer  # its memory is wanted for the model with everything off
    for run in runs if WORLD_SIZE > 1 else ():
        peak = torch.tensor(run.result["memory"].get("peak_mb", 0.0))
        torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
        run.result["memory"] = {"peak_mb": peak.item()} if peak else {}
    kernels = runs[-1].result["kernels"]
    if kernels and args != all_off(args):
        kernels["all_off"] = runs[0].result["kernels"]["per_step"] if len(runs) > 1 else count_all_off(args, run.device)
        if kernels["all_off"]:
            kernels["reduction_percent"] = 100 * (1 - kernels["per_step"] / kernels["all_off"])


def count_all_off(args: argparse.Namespace, device: torch.device) -> int | None:
    """Kernels per step with everything off, on the same shapes; None where that does not fit into memory."""
    progress("counting kernels with all fusions off")
    torch.compiler.reset()  # lets go of the graphs that torch.compile made
    gc.collect()
    try:
        prepare(off := all_off(args))
        return count_kernels(Trainer(off, device))["per_step"]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise


def explain(error: BaseException, directory: Path) -> tuple[int, str]:
    """Exit status and line of an error that the user can do something about; any other one is raised again."""
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if is_out_of_memory(error):
        return 3, f"out of memory: lower --batch-size or --seq-len ({message})"
    if isinstance(error, FloatingPointError) or type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return 1, message
    if isinstance(error, BrokenPipeError):
        raise error
    if isinstance(error, OSError) and not str(error.filename or "").startswith(str(directory)):
        return 2, f"{error.filename or 'standard output'}: {error.strerror}"
    if isinstance(error, (OSError, json.JSONDecodeError)):  # half a trace is no JSON
        return 2, f"--profile-dir {directory}: cannot write there, is there space left? ({message})"
    raise error


def train_all(runs: list[Run]) -> None:
    """Train all, in alternating turns. However that ends, each result is in <profile-dir>/<script>_summary.json."""
    status, message = 1, "it did not finish"
    try:
        if RANK:
            torch.distributed.barrier()  # rank 0 has left its record before another one can fail
        for run in runs:
            run.write()  # what a run leaves that is killed
        if WORLD_SIZE > 1 and not RANK:
            torch.distributed.barrier()
        measure(runs)
        status, message = 0, None
    except (Exception, KeyboardInterrupt) as error:
        message = str(error)
        status, message = explain(error, runs[-1].args.profile_dir)
    finally:
        for run in runs:
            run.result |= {"exit_status": status, "error": message, "status": {0: "ok", 3: "oom"}.get(status, "failed")}
            run.result["loss"] |= {"initial": run.curve[0], "final": run.curve[-1]} if run.curve else {}
            try:
                run.write()
            except OSError as error:
                code, text = explain(error, run.args.profile_dir)
                run.result |= {"exit_status": code, "error": text, "status": "failed"}


def train(args: argparse.Namespace) -> dict:
    """Train, measure and count; the result is also in <profile-dir>/<script>_summary.json."""
    train_all([run := Run(args)])
    return run.result


def report(result: dict) -> str:
    """The lines of REPORT whose values were measured."""
    kernels, text = result["kernels"], ""
    off = f" (all fusions off: {kernels['all_off'] or 'out of memory'})" if "all_off" in kernels else ""
    for line in REPORT.splitlines():
        with contextlib.suppress(KeyError):
            text += line.format_map({**result, "all_off": off}) + "\n"
    return text


def finish(results: dict[str, dict], reports: bool = True) -> int:
    """Print the reports under their titles, and each error once; returns the exit status."""
    progress()
    for title, result in results.items() if reports else ():
        print(title + report(result), end="", flush=True)
    for message in dict.fromkeys(result["error"] for result in results.values() if result["error"]):
        say("error", message)
    return max(result["exit_status"] for result in results.values())


def compare_fusion(args: argparse.Namespace) -> int:
    """Everything off and as chosen, in turns; the result of the first goes to <profile-dir>/baseline."""
    sides = [all_off(args, profile_dir=args.profile_dir / "baseline"), args]
    train_all(runs := [Run(side, title) for side, title in zip(sides, ("all off: ", "as chosen: "), strict=True)])
    before, after = (run.result for run in runs)
    if before["status"] == "oom":
        print("Both do not fit into memory side by side: each is measured alone, so there are no ratios.")
        runs.clear()
        before, after = (train(side) for side in sides)
    elif before["status"] == "ok":
        ratios = sorted(off / on for off, on in zip(runs[0].turns, runs[1].turns, strict=True))
        progress()
        print(f"\n{'':24}{'all off':>12}{'as chosen':>12}{'ratio':>9}")
        for label, group, key, form in (
            ("batch time, ms", "timing", "turns_ms", "12.2f"),
            ("peak memory, MB", "memory", "peak_mb", "12.1f"),
            (f"{after['kernels'].get('unit', 'kernels')} per step", "kernels", "per_step", "12.0f"),
            ("final loss", "loss", "final", "12.4f"),
        ):
            if key in before[group] and key in after[group]:
                off, on = np.median(before[group][key]), np.median(after[group][key])
                ratio = np.median(ratios) if key == "turns_ms" else off / on
                print(f"{label:24}{off:{form}}{on:{form}}" + (f"{ratio:8.2f}x" if key != "final" else ""))
        few, mixed = len(ratios) < 5, ratios[0] <= 1 <= ratios[-1]
        verdict = "too few turns to tell" if few else "no difference seen" if mixed else "all turns agree"
        print(f"Batch time ratio in {len(ratios)} turns: {ratios[0]:.2f}x to {ratios[-1]:.2f}x ({verdict})")
    complete = before["status"] == after["status"] == "ok" and bool(runs)
    return finish({"\nall off:\n": before, "\nas chosen:\n": after}, args.full_report or not complete)


class InFloat64(TorchFunctionMode):
    """Inside, what asks for float32 gets float64, so that a model in float64 stays in it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        wide = {torch.float32: torch.float64}
        args = [wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        kwargs = {n: wide.get(a, a) if isinstance(a, torch.dtype) else a for n, a in (kwargs or {}).items()}
        return function(*args, **kwargs) if function is not Tensor.float else args[0].double()


def values_of(trainer: Trainer, exact: bool = False) -> dict[str, Tensor]:
    """Outputs, loss and gradients by canonical name, of the next batch; afterwards the trainer is of no use.

    A missing gradient is NaN. `exact`: in float64.
    """
    batch, model, forward, context = trainer.next_batch(), trainer.model, trainer.forward, trainer.autocast
    if exact:
        weights, context = model.state_dict(), InFloat64
        model = forward = build_model(trainer.args, trainer.device).double()
        model.load_state_dict(weights)
        batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    with torch.no_grad(), context():
        outputs = forward(**{n: t for n, t in batch.items() if n not in model.TARGETS})
    values = dict(outputs) if isinstance(outputs, dict) else {"outputs": outputs}
    with context():  # anew: PyTorch 2.6 would reuse the weights that it cast without gradients
        values["loss"] = forward(**batch)
    (1024 * values["loss"]).backward()  # a power of two: away from float16's smallest numbers
    for parameter in model.parameters():  # state_dict then splits gradients of fused weights
        grad = torch.full_like(parameter, math.nan) if parameter.grad is None else parameter.grad
        if exact and WORLD_SIZE > 1:  # as DistributedDataParallel does
            torch.distributed.all_reduce(grad)
            grad /= WORLD_SIZE
        parameter.data = grad.double() / 1024
    values |= {f"gradient of {name}": grad for name, grad in model.state_dict().items()}
    return {name: value.detach().double() for name, value in values.items()}


def relative_errors(exact: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """Norm of each error over the norm of the exact value; a NaN is infinite.

    Some gradients are zero in theory, as that of a bias which softmax takes out: no norm counts
    for less than 1e-5 of that of all gradients.
    """
    norms = {name: float(value.norm()) for name, value in exact.items()}
    least = 1e-5 * math.hypot(*(norm for name, norm in norms.items() if name.startswith("gradient")))
    errors = {name: float((found[name] - value).norm()) for name, value in exact.items()}
    return {
        name: error / max(norms[name], least) if math.isfinite(error) else math.inf for name, error in errors.items()
    }


def judge(
    exact: dict[str, Tensor], unfused: dict[str, Tensor], found: dict[str, Tensor], least: float
) -> dict[str, tuple[float, float]]:
    """Relative error of each value by itself, and its limit: three times what rounding does to the unfused model.

    Or `least` (1e-3 for what is no gradient), if that is more. Where the unfused one is a NaN, none is right.
    """
    errors, rounding, judged = relative_errors(exact, found), relative_errors(exact, unfused), {}
    for name, error in errors.items():
        floor = least if name.startswith("gradient") else min(least, 1e-3)
        judged[name] = error, max(floor, 3 * rounding[name]) if rounding[name] < math.inf else 0.0
    return judged


def least_limit(args: argparse.Namespace) -> float:
    """No error below is judged: a ReLU's argument may round to the other side of zero.

    That is rare in float32. In TF32 gradients of a model of 60 positions were 4 % off.
    """
    return 0.05 if args.use_amp or args.matmul_precision != "highest" else 1e-3


def verify_accuracy(args: argparse.Namespace) -> int:
    """Outputs, loss and each gradient of the initial weights against float64, beside those of the unfused model."""
    off = all_off(args)
    exact = all_off(args, use_amp=False, matmul_precision="highest")
    judged = judge(
        *(values_of(Trainer(a, prepare(a)), exact=a is exact) for a in (exact, off, args)), least_limit(args)
    )
    wrong = [name for name, (error, limit) in judged.items() if error > limit]
    gradients = [name for name in judged if name.startswith("gradient")]
    worst = max(gradients, key=lambda name: judged[name][0] / max(judged[name][1], 1e-300))
    for name, (error, limit) in judged.items():
        if name not in gradients or name in (worst, *wrong):
            label = f" (the worst of {len(gradients)})" if name == worst else ""
            print(f"{name}{label}: relative error {error:.2e}, limit {limit:.2e}")
    coarse = [name for name in gradients if judged[name][1] > 0.25]
    if coarse:
        print(f"Note: rounding alone hides errors of a quarter in {len(coarse)} gradients ({coarse[0]})")
    print(f"Accuracy check: {'FAIL' if wrong else 'PASS'}")
    return 1 if wrong else 0


def interrupt(*_: object) -> NoReturn:
    """What SIGTERM does, once: a launcher may send it to a process and to its group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status. For several GPUs this process becomes torchrun."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - it was closed
    args = parse_args(argv)
    if args.num_gpus > 1 and not LAUNCHED:
        os.environ["TINY_LAUNCHED"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.num_gpus)))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.num_gpus}", __file__]
        os.execv(sys.executable, [sys.executable, *torchrun, *(sys.argv[1:] if argv is None else argv)])
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)  # a time limit, which keeps what was measured
    if WORLD_SIZE > 1:
        join_processes(args)
    modes = [name for name in ("compare_fusion", "verify_accuracy", *MODES) if getattr(args, name)]
    try:
        status = globals()[modes[0]](args) if modes else finish({"": train(args)})
        sys.stdout.flush()
    except (KeyboardInterrupt, RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:  # what is left to print goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # `... | head` has seen enough
            status = 1
        else:
            status, message = explain(error, args.profile_dir)
            say("error", message)
    if WORLD_SIZE > 1:
        if status:  # a tidy end could wait for a process that is gone
            os._exit(status)
        gc.collect()  # what still refers to the process group would keep its threads running into the exit
        torch.distributed.destroy_process_group()
    return status


# --- end of harness

if __name__ == "__main__":
    sys.exit(main())

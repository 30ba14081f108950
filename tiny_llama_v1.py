#!/usr/bin/env python3
"""TinyLlama V1: the baseline. A small, complete Llama trained with plain PyTorch operations.

Nothing in the model is fused: each operation starts its own kernels (functions on the GPU). They
read from memory, and write to it. Even the attention scores, one for each pair of tokens, go
through memory: begin with Attention.forward. Later versions train this same model to this same
loss, with fewer kernels that move fewer bytes.

Examples:
  python tiny_llama_v1.py                                        train on synthetic text
  python tiny_llama_v1.py --text-file README.md --seq-len 128    train on the bytes of a file
  python tiny_llama_v1.py --use-amp --enable-torch-compile       bfloat16, compiled
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.utils.flop_counter import FlopCounterMode
except ImportError as error:
    print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
    sys.exit(4)


# --- configuration
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
    """V1 fuses nothing."""


# --- rms norm: y = x / sqrt(mean(x^2) + eps) * weight
class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension of x [..., D], computed in float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


# --- rotary embedding: y1 = x1 cos(t) - x2 sin(t), y2 = x2 cos(t) + x1 sin(t)
class RotaryEmbedding(nn.Module):
    """Rotates x [B, S, heads, head_dim] by position, channel i with channel i + head_dim / 2."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        half = config.hidden_dim // config.num_heads // 2
        frequency = config.rope_theta ** (-torch.arange(half) / half)
        angle = torch.outer(torch.arange(config.seq_len), frequency).repeat(1, 2)[:, None]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


# --- attention: update = o_proj(softmax(q k^T / sqrt(head_dim)) v), each token sees those before it
class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, [B, S, D] -> [B, S, D]."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.hidden_dim // config.num_heads
        kv_dim = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.rotary = RotaryEmbedding(config)
        mask = torch.full((config.seq_len, config.seq_len), -torch.inf).triu(1)
        self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
        q, k = self.rotary(q), self.rotary(k)

        group = self.num_heads // self.num_kv_heads  # query heads that share a key/value head
        k, v = (t.repeat_interleave(group, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # [B, H, S, S]
        scores = scores + self.causal_mask[:seq, :seq]
        out = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


# --- swiglu: update = down_proj(silu(gate_proj(x)) * up_proj(x))
class SwiGLU(nn.Module):
    """Gated MLP, [B, S, D] -> [B, S, D]."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.up_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(F.silu(gate) * up)


# --- loss: mean over tokens of log(sum(exp(logits))) - logits[next token]
def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of logits [B, S, V]; labels [B, S] are the same tokens, not shifted."""
    following = F.pad(labels[:, 1:], (0, 1), value=-100)  # the last token has none: it is ignored
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


# --- model
class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream [B, S, D]."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.self_attn = Attention(config, fusions)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.mlp = SwiGLU(config, fusions)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """Llama (Touvron et al. 2023), both embeddings tied, parameters named as by Hugging Face."""

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
        return logits if labels is None else next_token_loss(logits, labels)


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build the model: a seed gives the same weights in every version and fusion setting."""
    sizes = {n: v for n, v in vars(args).items() if n in ModelConfig.__dataclass_fields__}
    fusions = Fusions(**{attribute: getattr(args, attribute) for _, attribute, _ in FUSIONS})
    with device:
        model = TinyLlama(ModelConfig(**sizes), fusions)
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
    rate = args.learning_rate
    if args.device == "cuda":  # a tensor, so that a captured step follows a scheduler
        rate = torch.tensor(rate, device=next(model.parameters()).device)
    return torch.optim.AdamW(model.parameters(), rate, fused=True, capturable=args.cuda_graph)


# --- arguments of the model
VERSION = 1
FUSIONS: tuple[tuple[str, str, str], ...] = ()  # flag, attribute, help


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


def without_effect(args: argparse.Namespace) -> dict[str, str]:
    """Return the fusions without effect under these arguments, on or off, and why."""
    return {}


def use_settings(args: argparse.Namespace) -> None:
    """Apply this version's process-wide settings of a run: there are none."""


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


# --- data
# Copied from common/data_llama.py by tools/sync_common.py: edit it there.
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


# --- core
# Copied from common/core.py by tools/sync_common.py: edit it there.
# main, at the end, runs in order: arguments, training step, turns, counts, report.
SCRIPT = Path(__file__).stem
OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile
NO_WORK = ("_unsafe_view", "empty", "new_empty", "_record_function")  # like views, move no data
PROFILERS = {"ROCP_TOOL_LIBRARIES", "ROCPROFSYS_MODE", "NSYS_PROFILING_SESSION_ID"}  # variables
PROFILERS |= {"NV_NSIGHT_INJECTION_TRANSPORT_TYPE"}  # of ncu
SETTINGS = ("batch_size", "num_steps", "warmup_steps", "learning_rate", "seed", "deterministic")
SETTINGS += ("use_amp", "amp_dtype", "matmul_precision")
SETTINGS += ("torch_compile", "torch_compile_mode", "cuda_graph")
NOT_YET = -1.0  # in place of a loss that is still on its way to the host


def say(kind: str, message: str) -> None:
    """Print an "error", or a "note" once for all processes, on stderr."""
    if kind == "error" or not (RANK or "TINY_LAUNCHED" in os.environ):
        print(f"{SCRIPT}.py: {kind}: {message}", file=sys.stderr)


def fail(message: str, status: int = 2) -> None:
    """End the program with one line about what the user can put right."""
    say("error", message)
    raise SystemExit(status)


def from_launcher(name: str, default: int) -> int:
    """Return a number that torchrun sets in the environment."""
    if not (text := os.getenv(name, str(default))).isdecimal():
        fail(f"{name} in the environment is no number: {text!r}")
    return int(text)


RANK, WORLD_SIZE = from_launcher("RANK", 0), from_launcher("WORLD_SIZE", 1)


def progress(text: str = "") -> None:
    """Say what happens now; on a terminal in one line, which the next text replaces."""
    terminal = sys.stderr.isatty()
    if not RANK and (text or terminal):
        print(text, end="\033[K\r" if terminal else "\n", file=sys.stderr, flush=True)


def at_least(low: int) -> Callable[[str], int]:
    """Make an argparse type: a whole number from `low`."""

    def number(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) < 2**31):
            raise argparse.ArgumentTypeError(f"must be {low} to {2**31 - 1}, not {text}")
        return int(text)

    return number


def build_parser() -> argparse.ArgumentParser:
    """Build the command line: the arguments of the model, and those of every version."""
    description, _, examples = (__doc__ or "").partition("\nExamples:\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"{SCRIPT}.py", argparse.SUPPRESS, description)
    parser.formatter_class, parser.allow_abbrev = raw, False
    parser.epilog = "examples:\n" + examples
    add_model_arguments(parser)
    switch, default = {"action": "store_true"}, "(default: %(default)s)"

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
    modes = ("default", *OWN_GRAPHS, "max-autotune-no-cudagraphs")
    group.add_argument("--torch-compile-mode", choices=modes, help="compile longer to run faster")

    add = parser.add_argument_group("training").add_argument
    add("--num-steps", type=at_least(1), default=50, help=f"measured steps {default}")
    add("--warmup-steps", type=at_least(0), help="before those (default: 5, on several GPUs 12)")
    add("--learning-rate", type=float, default=3e-4, help=f"of AdamW {default}")
    add("--use-amp", **switch, help="automatic mixed precision")
    add("--amp-dtype", choices=("bfloat16", "float16"), help="(default: bfloat16)")
    precisions = ("highest", "high", "medium")
    add("--matmul-precision", choices=precisions, default="highest", help=f"of float32 {default}")
    devices = ("auto", "cpu", "cuda")
    add("--device", choices=devices, default="auto", help=f"cuda for AMD's GPUs, too {default}")
    add("--num-gpus", type=at_least(1), help="share the batch (default: 1, or *_VISIBLE_DEVICES)")
    add("--seed", type=at_least(0), default=42, help=f"of weights and data {default}")
    add("--deterministic", **switch, help="the same bits in every run")
    add("--log-interval", type=at_least(1), default=10, help=f"steps between lines {default}")

    add = parser.add_argument_group("profiling").add_argument
    add("--enable-pytorch-profiler", **switch, help="operator tables, trace of 3 steps")
    add("--enable-memory-profiling", **switch, help="memory timeline of one step")
    add("--enable-rocm-profiling", **switch, help="names of phases for a profiler")
    add("--under-profiler", **switch, help="launch nothing but the training steps")
    folder = Path(f"pytorch_profiles_v{VERSION}")
    add("--profile-dir", type=Path, default=folder, metavar="DIR", help=f"for results {default}")

    add = parser.add_argument_group("modes").add_mutually_exclusive_group().add_argument
    add("--compare-fusion", **switch, help="all fusions off and as chosen, in turns")
    add("--verify-accuracy", **switch, help="compare outputs and gradients with all off")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check; what cannot work is one line on stderr and SystemExit (2 or 4)."""
    parser = build_parser()
    args = parser.parse_args(argv)
    flags = {name: getattr(args, name) for _, name, _ in FUSIONS}
    for name, on in flags.items():  # a flag of its own wins over all-fusion
        setattr(args, name, args.all_fusion is not False if on is None else on)
    check_model_arguments(args, parser)
    choose_devices(args)
    graph, mode = args.cuda_graph, args.torch_compile_mode
    least = 12 if args.num_gpus > 1 else 2  # DDP needs 11 before a capture
    for wrong, message in (
        (args.batch_size % args.num_gpus, f"--batch-size must divide by {args.num_gpus} GPUs"),
        (not FUSIONS and (args.all_fusion or args.compare_fusion), "V1 has nothing to compare"),
        (mode and not args.torch_compile, "--torch-compile-mode needs --enable-torch-compile"),
        (args.amp_dtype and not args.use_amp, "--amp-dtype needs --use-amp"),
        (not 0 < args.learning_rate < math.inf, "--learning-rate must be above 0"),
        (graph and mode in OWN_GRAPHS, f"--enable-cuda-graph: mode {mode} makes its own graphs"),
        (graph and args.warmup_steps < least, f"a graph needs --warmup-steps {least} or more"),
    ):
        if wrong:
            fail(message)
    args.amp_dtype, args.torch_compile = args.amp_dtype or "bfloat16", bool(args.torch_compile)
    if not args.under_profiler and (found := PROFILERS & {*os.environ}):
        say("note", f"a GPU profiler started this run ({found.pop()}): --under-profiler is on")
        args.under_profiler = True
    if args.under_profiler and (args.enable_pytorch_profiler or args.enable_memory_profiling):
        say("note", "PyTorch's profiles are not written: another profiler is at work")
    args.without_effect = without_effect(args)
    for flag, name, _ in FUSIONS:
        if flags[name] is not None and name in args.without_effect:
            switch = "enable" if flags[name] else "disable"
            say("note", f"--{switch}-{flag} has no effect: {args.without_effect[name]}")
    return args


def choose_devices(args: argparse.Namespace) -> None:
    """Settle device, number of processes, warm-up and graph where no flag does."""
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    listed = any(os.getenv(f"{kind}_VISIBLE_DEVICES") for kind in ("ROCR", "HIP", "CUDA"))
    asked = args.num_gpus or (gpus if listed else 1) or 1
    processes = WORLD_SIZE if "RANK" in os.environ else asked
    if RANK >= WORLD_SIZE or args.num_gpus not in (None, processes):
        fail(f"RANK {RANK}, WORLD_SIZE {WORLD_SIZE} and --num-gpus {args.num_gpus} do not fit")
    needed = args.device == "cuda" or args.cuda_graph or (args.num_gpus and args.device != "cpu")
    if needed and gpus < (1 if "RANK" in os.environ else asked):
        fail(f"{asked} GPUs wanted, PyTorch finds {gpus}", 4)
    args.device, args.num_gpus = "cuda" if gpus else "cpu", processes
    if args.warmup_steps is None:
        args.warmup_steps = 12 if processes > 1 else 5
    if args.cuda_graph is None:
        possible = args.warmup_steps > 1 and args.torch_compile_mode not in OWN_GRAPHS
        args.cuda_graph = VERSION > 3 and gpus > 0 and possible


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


class Trainer:
    """A run: model, optimizer, data and their training step; and what was measured of it."""

    def __init__(self, args: argparse.Namespace, title: str = ""):
        self.args, self.title, self.gpu = args, title, args.device == "cuda"
        self.losses: list[float] = []
        self.turns_ms: list[float] = []  # mean time of a step in each turn
        self.phases: dict[str, list[float]] = {}  # milliseconds of each phase in each step
        self.facts: dict = {"config": {}, "data": {}}  # of the model
        self.timing: dict = {}  # of the warm-up
        self.kernels: dict = {}
        self.peak = self.flops = 0  # bytes and floating-point operations of a step
        self.shown = 0.0  # when progress was last printed
        self.status, self.error = 1, "it did not finish"

    def build(self) -> Trainer:
        """Build model, optimizer and data; return self."""
        args, self.device = self.args, prepare(self.args)
        dtype = getattr(torch, args.amp_dtype)
        self.autocast = lambda: torch.autocast(args.device, dtype, enabled=args.use_amp)
        scaled = args.use_amp and dtype == torch.float16
        self.scaler = torch.amp.GradScaler(args.device, 4096, enabled=scaled)  # 65536 may overflow
        self.batches = make_batches(args, torch.device("cpu"), args.seed)
        self.inputs: dict[str, Tensor] = {}  # on a GPU: where batches are copied to
        self.model = self.forward = build_model(args, self.device)
        self.optimizer = build_optimizer(args, self.model)
        self.average = getattr(self.optimizer, "average_gradients", None)  # in place of DDP
        self.stream = torch.cuda.Stream(priority=-1) if args.cuda_graph else None
        self.graph, self.marks = None, []
        if args.torch_compile:
            self.forward = torch.compile(self.model, mode=args.torch_compile_mode)
        if WORLD_SIZE > 1 and not self.average:
            options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
            with torch.cuda.stream(self.stream):  # where autograd adds gradients up
                self.forward = nn.parallel.DistributedDataParallel(self.forward, **options)
        return self

    def next_batch(self) -> dict[str, Tensor]:
        """Return this process's share of the batch, on the device."""
        share = self.args.batch_size // WORLD_SIZE
        batch = {n: t[RANK * share :][:share] for n, t in self.batches.next_batch().items()}
        if not self.gpu:
            return batch
        for name, value in batch.items():
            if name not in self.inputs:
                self.inputs[name] = torch.empty_like(value, device=self.device)
            self.inputs[name].copy_(value.pin_memory(), non_blocking=True)  # without a wait
        return self.inputs

    def step(self) -> Tensor:
        """Take a step; return the loss of the global batch."""
        batch = self.next_batch()
        self.mark("data")
        if not self.graph:
            return self.compute(batch)
        self.graph.replay()
        self.mark("graph")
        return self.loss

    def compute(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute what a graph captures: forward pass, backward pass, optimizer."""
        if self.args.torch_compile:
            torch.compiler.cudagraph_mark_step_begin()
        with self.autocast():
            loss = self.forward(**batch)
        self.mark("forward")
        self.scaler.scale(loss).backward()
        self.mark("backward")
        if self.average:  # before a scaler looks
            self.average()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss.detach()
        if WORLD_SIZE > 1:
            dist.all_reduce(loss := loss / WORLD_SIZE)
        self.mark("optimizer")
        return loss

    def mark(self, phase: str) -> None:
        """Note the moment at which a phase ends, without a wait."""
        now = torch.cuda.Event(enable_timing=True) if self.gpu else time.perf_counter()
        if self.gpu:
            now.record()
        self.marks.append((phase, now))

    def capture(self) -> None:
        """Capture the step as a graph, replayed from now on; one must have run before."""
        torch.cuda.reset_peak_memory_stats()  # a replay allocates nothing
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.loss = self.compute(self.inputs)
        self.graph = graph

    def start(self) -> None:
        """Build, say what runs, warm up, and see how much memory a step needs."""
        args, before = self.args, torch.cuda.memory_allocated() if self.gpu else 0
        if self.gpu:
            torch._C._cuda_clearCublasWorkspaces()  # of another run
        parameters = sum(p.numel() for p in self.build().model.parameters())
        config, data = asdict(self.model.config), self.batches.source
        self.facts = {"config": config, "parameters": parameters, "data": data}
        print(headline(args, self.facts), flush=True)
        progress(f"{self.title}{'compiling in' if args.torch_compile else 'taking'} the first step")
        if args.warmup_steps:
            first, steps = self.take(1, "first step"), args.warmup_steps - 1
            if self.gpu:
                torch.cuda.reset_peak_memory_stats()  # after what the first step alone needs
            rest = self.take(steps - args.cuda_graph, "warm-up step") if steps else 0.0
            self.timing = {"warmup_first_step_ms": first, "warmup_ms": first + steps * rest}
        if args.cuda_graph:
            self.capture()
            self.take(1, "captured step")  # the first replay does more
        if self.gpu:
            self.peak = torch.cuda.max_memory_allocated() - before
        gc.collect()  # compiling leaves cycles that keep tensors

    def take(self, steps: int, label: str = "step") -> float:
        """Take a turn of steps (Ctrl-C ends it, done ones count); return milliseconds of a step."""
        prepare(self.args)  # another run may have had a turn
        synchronize = torch.cuda.synchronize if self.gpu else lambda: None
        losses = torch.full((steps,), NOT_YET, pin_memory=self.gpu)
        synchronize()
        self.marks, began = [], time.perf_counter()
        self.mark("start")
        try:
            for step in range(steps):
                losses[step].copy_(self.step(), non_blocking=True)
                self.show(losses, step + 1, label, began)
        finally:
            synchronize()
            seconds, known = time.perf_counter() - began, losses[losses != NOT_YET].tolist()
            ms = 1e3 * seconds / max(1, len(known))
            self.losses += filter(math.isfinite, known)
            if label == "step" and known:
                self.turns_ms.append(ms)
                for (_, start), (phase, end) in zip(self.marks, self.marks[1:], strict=False):
                    gap = start.elapsed_time(end) if self.gpu else 1e3 * (end - start)
                    self.phases.setdefault(phase, []).append(gap)
        if not all(map(math.isfinite, known)):
            raise FloatingPointError("the loss is no number any more; lower --learning-rate")
        return ms

    def show(self, losses: Tensor, steps: int, label: str, began: float) -> None:
        """Show now and then how far the device is, of these steps, without waiting for it."""
        earlier, now = len(self.phases.get("data", ())), time.perf_counter()
        often = (earlier + steps) % self.args.log_interval == 0
        if not (now > self.shown + 0.1 if sys.stderr.isatty() else often):
            return
        done = int((losses[:steps] != NOT_YET).sum())
        if done:
            self.shown, pace = now, (now - began) / done
            goal = self.args.num_steps if label == "step" else len(losses)
            text = f"{self.title}{label} {earlier + done}/{goal}  loss {losses[done - 1]:.4f}"
            speed = f"{self.args.batch_size / pace:.1f} samples/s"
            progress(f"{text}  {speed}  {(goal - earlier - done) * pace:.0f} s left")

    def count(self, off: int | None = None) -> None:
        """Count in extra steps; `off`: kernels with all off, if known."""
        args = self.args
        prepare(args)
        progress(f"{self.title}counting kernels")
        if self.gpu or not args.torch_compile:  # a loop compiled for a CPU is no operator
            self.kernels = count_kernels(self)
        if not self.peak:
            progress(f"{self.title}adding up the memory of a step")
            self.peak = max(used for _, used in memory_of_a_step(self))
        progress(f"{self.title}counting floating-point operations")
        self.flops = count_flops(args, self.batches.next_batch())
        self.model = self.forward = self.optimizer = self.average = self.graph = self.loss = None
        if self.kernels and args != all_off(args):
            progress(f"{self.title}counting kernels with all off")
            torch.compiler.reset()  # lets go of its graphs
            gc.collect()
            with contextlib.suppress(torch.OutOfMemoryError):
                off = off or count_kernels(Trainer(all_off(args)).build())["per_step"]
            self.kernels["all_off"] = off
            if off:
                self.kernels["reduction_percent"] = 100 * (1 - self.kernels["per_step"] / off)

    def summary(self) -> dict:
        """Return what is known of the run, as its JSON file has it."""
        args, losses, timing, flops = self.args, self.losses, dict(self.timing), {}
        if self.turns_ms:
            whole = zip(*self.phases.values(), strict=False)  # Ctrl-C may cut the last step short
            ms, steps_ms = np.median(self.turns_ms), [sum(step) for step in whole]
            timing |= {
                "steps": len(steps_ms),
                "batch_ms": ms,  # the median of turns, of which most runs have one
                "turns_ms": self.turns_ms,
                "samples_per_sec": 1e3 * args.batch_size / ms,
                "batch_median_ms": np.median(steps_ms),
                "batch_p95_ms": np.quantile(steps_ms, 0.95, method="higher"),
                **{f"{phase}_ms": np.mean(times) for phase, times in self.phases.items()},
            }
            if args.torch_compile and "warmup_ms" in timing:
                timing["compilation_overhead_ms"] = timing["warmup_ms"] - args.warmup_steps * ms
            if self.flops:
                gflop = self.flops / 1e9
                flops = {"per_step": self.flops, "gflop": gflop, "achieved_tflops": gflop / ms}
        loss = {"initial": losses[0], "final": losses[-1]} if losses else {}
        return {
            "schema_version": 1,
            "script": SCRIPT,
            "status": {0: "ok", 3: "oom"}.get(self.status, "failed"),
            "exit_status": self.status,
            "error": self.error,
            "fusions": {name: getattr(args, name) for _, name, _ in FUSIONS},
            "without_effect": args.without_effect,
            "training": {n: getattr(args, n) for n in SETTINGS} | {"processes": WORLD_SIZE},
            "environment": environment(torch.device(args.device)),
            **self.facts,
            "timing": timing,
            "memory": {"peak_mb": self.peak / 1e6} if self.peak else {},
            "kernels": self.kernels,
            "flops": flops,
            "loss": {"warmup_steps": args.warmup_steps, "curve": losses, **loss},
        }

    def write(self) -> None:
        """Write or replace <profile-dir>/<script>_summary.json, whole or not at all."""
        path = self.args.profile_dir / f"{SCRIPT}_summary.json"
        if RANK:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.summary(), indent=1, default=str) + "\n")
        unfinished.replace(path)


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
        two = argparse.Namespace(**{**vars(trainer.args), "batch_size": 2 * WORLD_SIZE})
        trainer = Trainer(two).build()
        trainer.step()
        batch = trainer.next_batch()
        with OperatorCounter() as counter:
            trainer.compute(batch)
        return {"unit": "operator calls", "per_step": counter.calls}
    events = trace_of_a_step(trainer)
    kernels = sum(event.get("cat") == "kernel" for event in events)
    calls = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = sum("Launch" in name for name in calls)
    counts = {"unit": "kernels", "per_step": kernels, "host_launches": launches}
    return counts if kernels else {}  # a profiler without permission sees none


def memory_of_a_step(trainer: Trainer) -> list[tuple[float, float]]:
    """Return the course of the device's tensor memory in a step: microseconds and bytes."""
    tensors = [*trainer.model.parameters(), *trainer.model.buffers(), *trainer.inputs.values()]
    tensors += [t for state in trainer.optimizer.state.values() for t in state.values()]
    used = sum(tensor.nbytes for tensor in tensors)  # between two steps
    events = trace_of_a_step(trainer, profile_memory=True)
    events = [event for event in events if event["name"] == "[memory]"]
    events = [e for e in events if e["args"]["Device Type"] == int(trainer.gpu)]
    events.sort(key=lambda event: event["ts"])
    return [(e["ts"] - events[0]["ts"], used := used + e["args"]["Bytes"]) for e in events]


def count_flops(args: argparse.Namespace, batch: dict[str, Tensor]) -> int:
    """Count the floating-point operations of a step of the unfused model."""
    model = build_model(all_off(args, checkpoint_blocks=False), torch.device("meta"))
    with FlopCounterMode(display=False) as counter:
        model(**{name: value.to("meta") for name, value in batch.items()}).backward()
    return counter.get_total_flops()


def environment(device: torch.device) -> dict:
    """Return what the numbers are measured on."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    cpu = text.partition("model name\t: ")[2].partition("\n")[0] or os.uname().machine
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else cpu,
        "cpu_threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": getattr(sys.modules.get("triton"), "__version__", None),
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
    }


def headline(args: argparse.Namespace, facts: dict) -> str:
    """Name script, device, sizes, precision and fusions in one line."""
    device = environment(torch.device(args.device))["device_name"]
    device += f" x {WORLD_SIZE}" if WORLD_SIZE > 1 else ""
    sizes = {"batch_size": args.batch_size, **facts["config"]}
    sizes = ", ".join(f"{name} {n}" for name, n in sizes.items() if type(n) is int)
    float32 = f"float32 (matmul precision {args.matmul_precision})"
    precision = args.amp_dtype if args.use_amp else float32
    names = [*(name for _, name, _ in FUSIONS), "torch_compile", "cuda_graph"]
    on = [name for name in names if getattr(args, name) and name not in args.without_effect]
    fused, size = ", ".join(on or ["nothing fused"]).replace("_", "-"), facts["parameters"]
    return f"{SCRIPT} on {device}: {size:,} parameters, {sizes}; {precision}; {fused}"


def report(result: dict) -> str:
    """Return the lines whose values were measured."""
    lines = []
    timing, kernels, off = result["timing"], result["kernels"], result["kernels"].get("all_off", 0)
    remark = "" if off == 0 else f" (all fusions off: {off or 'out of memory'})"
    if kernels.get("unit") == "operator calls":
        remark += "; operator calls, counted on a CPU"
    triton = VERSION > 2 and result["environment"]["device"] == "cuda"
    compiled = ", includes compilation" if triton or result["training"]["torch_compile"] else ""
    one, loss = "{:.1f} ms", result["loss"]
    batch = ("batch_ms", "batch_median_ms", "batch_p95_ms")
    rate = ("gflop", "achieved_tflops")
    for label, group, keys, text in (
        ("Average training speed", timing, ["samples_per_sec"], "{:.1f} samples/sec"),
        ("Average batch time", timing, batch, f"{one} (median {{:.1f}}, p95 {{:.1f}})"),
        ("Average forward time", timing, ["forward_ms"], one),
        ("Average backward time", timing, ["backward_ms"], one),
        ("Average optimizer time", timing, ["optimizer_ms"], one),
        ("Average graph time", timing, ["graph_ms"], f"{one} (its phases cannot be told apart)"),
        ("Warmup step time", timing, ["warmup_first_step_ms"], f"{one} (first step{compiled})"),
        ("Compilation overhead", timing, ["compilation_overhead_ms"], one),
        ("Final loss", loss, ["final", "initial"], "{:.4f} (first step {:.4f})"),
        ("Peak memory usage", result["memory"], ["peak_mb"], "{:.1f} MB"),
        ("Kernels per step", kernels, ["per_step"], "{}" + remark),
        ("Kernel reduction", kernels, ["reduction_percent"], "{:.1f} %"),
        ("Host launches per step", kernels, ["host_launches"], "{}"),
        ("FLOPs per step", result["flops"], rate, "{:.4g} GFLOP, achieved {:.3g} TFLOP/s"),
    ):
        if all(key in group for key in keys):
            lines.append(f"{label}: {text.format(*map(group.get, keys))}")
    return "\n".join(lines)


def compare(before: dict, after: dict) -> None:
    """Print both sides, and what the ratios of their turns show."""
    pairs = zip(before["timing"]["turns_ms"], after["timing"]["turns_ms"], strict=True)
    ratios = [off / on for off, on in pairs]
    print(f"\n{'':24}{'all off':>12}{'as chosen':>12}{'ratio':>9}")
    for label, group, key, digits in (
        ("batch time, ms", "timing", "batch_ms", 2),
        ("peak memory, MB", "memory", "peak_mb", 1),
        (f"{after['kernels'].get('unit')} per step", "kernels", "per_step", 0),
        ("final loss", "loss", "final", 4),
    ):
        if key in before[group] and key in after[group]:
            off, on = before[group][key], after[group][key]
            shown = f"{off / on:8.2f}x" if key != "final" else ""
            print(f"{label:24}{off:12.{digits}f}{on:12.{digits}f}{shown}")
    low, high, median = np.round([min(ratios), max(ratios), np.median(ratios)], 2)
    sizes = "" if high <= 1.25 * low else " on which is faster"
    said = "no difference seen" if low <= 1 <= high else f"all turns agree{sizes}"
    said = said if len(ratios) >= 5 else "too few turns to tell"
    print(f"Batch time ratio in {len(ratios)} turns: {median:.2f}x", end=", ")
    print(f"from {low:.2f}x to {high:.2f}x ({said})")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether it is, or covers, one: the end of a capture raises an error of its own."""
    if error is None or isinstance(error, MemoryError):
        return error is not None
    signs = ("out of memory", "allocate memory", "ALLOC_FAILED")
    return any(sign in str(error) for sign in signs) or is_out_of_memory(error.__context__)


def explain(error: BaseException) -> tuple[int, str]:
    """Return exit status and line for what a user can mend; raise any other error."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if is_out_of_memory(error):
        return 3, f"out of memory: lower --batch-size or --seq-len ({line})"
    if isinstance(error, OSError):
        return 2, f"cannot write {error.filename or 'output or --profile-dir'}: {error.strerror}"
    if isinstance(error, ImportError):
        return 4, f"this flag needs {error.name}: install it, or put it beside this script"
    library = type(error).__module__.startswith(("torch.", "torch._", "triton"))
    if library or isinstance(error, FloatingPointError):
        return 1, line
    raise error


def measure(*trainers: Trainer) -> list[dict]:
    """Train all of these in alternating turns; leave a record of each, however it ends."""
    args = trainers[-1].args
    steps, turns = args.num_steps, 1 if len(trainers) == 1 else min(10, args.num_steps)
    end, region = (1, "it did not finish"), contextlib.nullcontext
    try:
        profiles = args.enable_pytorch_profiler or args.enable_memory_profiling
        if profiles or args.enable_rocm_profiling:
            from lab.profile import steps as profiled  # before time is spent on training
        if args.enable_rocm_profiling:
            region = profiled.recorded_region
        for trainer in trainers:
            trainer.write()  # for a run that is killed
        for trainer in trainers:
            trainer.start()
        with region(trainers):
            for turn in range(turns):
                for trainer in trainers[:: 1 if turn % 2 == 0 else -1]:
                    trainer.take(steps * (turn + 1) // turns - steps * turn // turns)
        for trainer in trainers if not args.under_profiler else ():
            if profiles:
                profiled.write_profile(sys.modules[__name__], trainer)
            trainer.count(trainers[0].kernels.get("per_step"))
        if WORLD_SIZE > 1:
            for trainer in trainers:
                dist.all_gather_object(peaks := [0] * WORLD_SIZE, trainer.peak)
                trainer.peak = max(peaks)
        end = 0, None
    except (Exception, KeyboardInterrupt) as error:
        end = explain(error)
    finally:
        for trainer in trainers:
            trainer.status, trainer.error = end
            trainer.write()
    return [trainer.summary() for trainer in trainers]


def train(args: argparse.Namespace) -> dict:
    """Train, measure and count; the result is in its JSON file, too."""
    return measure(Trainer(args))[0]


def join_processes(args: argparse.Namespace) -> None:
    """Meet the other processes that torchrun started; only the first prints from now on."""
    if args.device == "cuda":
        torch.cuda.set_device(from_launcher("LOCAL_RANK", 0) % torch.cuda.device_count())
    if args.cuda_graph:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # as PyTorch asks
    warnings.filterwarnings("ignore", ".*(broadcast_buffers|AccumulateGrad node's stream)")
    try:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        fail(f"{WORLD_SIZE} processes cannot meet: {str(error).splitlines()[0]}")
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parse_args(argv)
    if args.num_gpus > 1 and "RANK" not in os.environ:
        os.environ["TINY_LAUNCHED"] = "1"  # notes have been printed
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        words = [*torchrun, str(args.num_gpus), __file__, *(sys.argv[1:] if argv is None else argv)]
        os.execv(sys.executable, [sys.executable, *words])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # from a scheduler: as Ctrl-C
    try:
        if WORLD_SIZE > 1:
            join_processes(args)
        if args.verify_accuracy:
            from lab.modes import verify_accuracy

            return verify_accuracy(sys.modules[__name__], args)
        if args.compare_fusion:
            off = all_off(args, profile_dir=args.profile_dir / "baseline")
            before, result = measure(Trainer(off, "all off: "), Trainer(args, "as chosen: "))
        else:
            result = train(args)
        progress()
        if args.compare_fusion and result["status"] == "ok":
            compare(before, result)
        else:
            print(report(result))
        status, message = result["exit_status"], result["error"]
    except (Exception, KeyboardInterrupt) as error:
        status, message = explain(error)
    if message:
        say("error", message)
    if WORLD_SIZE > 1:
        sys.stdout.flush()
        os._exit(status)  # a tidy end could wait for a process that is gone
    return status


# --- end of core


if __name__ == "__main__":
    sys.exit(main())

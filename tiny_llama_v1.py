#!/usr/bin/env python3
"""TinyLlama V1: the baseline. A small, complete Llama trained with plain PyTorch operations.

Nothing is fused here: query, key and value are three projections, the attention scores are materialised as a
[batch, heads, seq, seq] tensor, gate and up projection are two GEMMs. Every later version trains this same model to
this same loss; what they change is how many kernels that takes and how many bytes those kernels move.

Examples:
  python tiny_llama_v1.py                                        train on synthetic text with the default sizes
  python tiny_llama_v1.py --text-file README.md --seq-len 128    train on the bytes of a file
  python tiny_llama_v1.py --use-amp --enable-torch-compile       bfloat16, compiled
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import json
import logging
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- configuration

VERSION = 1


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


FUSIONS: tuple[tuple[str, str, str], ...] = ()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only this model has."""
    add = parser.add_argument_group("model").add_argument
    add("--vocab-size", type=at_least(2), metavar="V", help="(default: 1000; 256 with --text-file)")
    add("--hidden-dim", type=at_least(1), default=512, metavar="D", help="width of the residual stream")
    add("--num-layers", type=at_least(1), default=8, metavar="L", help="transformer layers")
    add("--num-heads", type=at_least(1), default=8, metavar="H", help="query heads")
    add("--num-kv-heads", type=at_least(1), metavar="K", help="key/value heads (default: half of the heads)")
    add("--intermediate-dim", type=at_least(1), metavar="I", help="width of the MLP (default: 4 x hidden)")
    add = parser.add_argument_group("data").add_argument
    add("--seq-len", type=at_least(2), default=256, metavar="S", help="tokens per sample")
    add("--batch-size", type=at_least(1), default=8, metavar="B", help="samples per step")
    add("--text-file", type=Path, metavar="FILE", help="train on the bytes of FILE instead of synthetic text")


def check_model_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in the defaults that depend on other arguments and refuse sizes that do not fit together."""
    args.num_kv_heads = args.num_kv_heads or max(1, args.num_heads // 2)
    args.intermediate_dim = args.intermediate_dim or 4 * args.hidden_dim
    if args.hidden_dim % (2 * args.num_heads):
        parser.error(
            f"--hidden-dim {args.hidden_dim} must be divisible by 2 x --num-heads {args.num_heads} "
            "(rotary embedding turns pairs of channels)"
        )
    if args.num_heads % args.num_kv_heads:
        parser.error(f"--num-heads {args.num_heads} must be divisible by --num-kv-heads {args.num_kv_heads}")
    if args.text_file and args.vocab_size not in (None, 256):
        parser.error(f"--vocab-size {args.vocab_size} does not fit --text-file: bytes have a vocabulary of 256")
    args.vocab_size = args.vocab_size or (256 if args.text_file else 1000)


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
    """Rotary position embedding in the rotate-half convention: channel i turns with channel i + head_dim / 2."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        half = config.hidden_dim // config.num_heads // 2
        frequency = config.rope_theta ** (-torch.arange(half) / half)
        angle = torch.outer(torch.arange(config.seq_len), frequency).repeat(1, 2)[:, None]  # [S, 1, head_dim]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, heads, head_dim], rotated by its position along S."""
        cos, sin = self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

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
        mask = torch.full((config.seq_len, config.seq_len), -torch.inf).triu(1)  # 0 on and below the diagonal
        self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
        q, k = self.rotary(q), self.rotary(k)

        group = self.num_heads // self.num_kv_heads  # query heads that share a key/value head
        q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # [B, H, S, S]
        scores = scores + self.causal_mask[:seq, :seq]
        out = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


class SwiGLU(nn.Module):
    """Gated MLP, `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.up_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
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
        """x [B, S, D] -> [B, S, D]."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """Llama (Touvron et al. 2023) with tied input and output embedding; parameter names as in Hugging Face."""

    TARGETS = ("labels",)

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(DecoderLayer(config, fusions) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """input_ids [B, S] -> logits [B, S, V]; with labels [B, S], the same tokens -> next-token cross-entropy."""
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        if labels is None:
            return logits
        following = F.pad(labels[:, 1:], (0, 1), value=-100)  # the one place where labels are shifted; -100 is ignored
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model of these arguments. The same seed gives the same weights in every version and fusion setting."""
    fields = {name: getattr(args, name) for name in ModelConfig.__dataclass_fields__ if hasattr(args, name)}
    fusions = Fusions(**{attribute: getattr(args, attribute) for _, attribute, _ in FUSIONS})
    with device:
        model = TinyLlama(ModelConfig(**fields), fusions)
    if device.type != "meta":
        generator = torch.Generator().manual_seed(args.seed)
        state = model.state_dict()  # canonical names, so the order of the draws does not depend on what is fused
        for name in sorted(state):
            if "norm" not in name:
                state[name] = torch.empty(state[name].shape).normal_(std=0.02, generator=generator)
        model.load_state_dict(state)
    return model


# --- data


class TextBatches:
    """Random windows of a token stream kept in host memory: {"input_ids": [B, S], "labels": [B, S]}."""

    def __init__(self, stream: Tensor, args: argparse.Namespace, device: torch.device, seed: int):
        self.stream, self.seq_len, self.batch_size, self.device = stream, args.seq_len, args.batch_size, device
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self) -> dict[str, Tensor]:
        starts = torch.randint(len(self.stream) - self.seq_len + 1, (self.batch_size, 1), generator=self.generator)
        tokens = to_device(self.stream[starts + torch.arange(self.seq_len)], self.device)
        return {"input_ids": tokens, "labels": tokens}


def markov_text(vocab_size: int, length: int, seed: int) -> Tensor:
    """Synthetic text [length] from a fixed order-2 Markov chain.

    The two previous tokens, each taken modulo 8, choose one of 64 contexts; a context has 16 possible successors with
    probabilities 1/2, 1/4, 1/8, ... So the entropy of the next token is 1.39 nats, far below ln(vocab_size): a model
    that has learnt nothing, only the frequencies, or the chain are three clearly different losses.
    """
    chain = np.random.default_rng(0)  # the language is the same for every seed; the seed chooses the text
    successors = chain.integers(vocab_size, size=(64, 16))
    rng = np.random.default_rng(seed)
    streams = 256  # written side by side, because a chain can only be sampled one token after the other
    steps = -(-length // streams)
    choices = np.minimum(rng.geometric(0.5, size=(steps, streams)) - 1, 15)
    text = np.empty((steps, streams), dtype=np.int64)
    before, last = rng.integers(vocab_size, size=(2, streams))
    for step in range(steps):
        before, last = last, successors[before % 8 * 8 + last % 8, choices[step]]
        text[step] = last
    return torch.from_numpy(text.T.reshape(-1)[:length].copy())


def read_text(path: Path, seq_len: int) -> Tensor:
    """The bytes of a text file as tokens [length]."""
    content = read_bytes(path, "--text-file")
    if b"\0" in content:
        raise UserError(f"--text-file {path}: this is a binary file; give a text file")
    if len(content) < seq_len:
        raise UserError(f"--text-file {path}: {len(content)} bytes are fewer than --seq-len {seq_len}")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64))


def make_batches(args: argparse.Namespace, device: torch.device, seed: int) -> TextBatches:
    """The source of training batches: the bytes of --text-file, or synthetic text."""
    if args.text_file:
        stream = read_text(args.text_file, args.seq_len)
    else:
        stream = markov_text(args.vocab_size, length=max(1_000_000, 4 * args.seq_len), seed=seed)
    return TextBatches(stream, args, device, seed)


# --- harness
# The same bytes in every tiny_*_v*.py: edit it in one script, then run `python tools/sync_harness.py THAT_SCRIPT.py`.
# It knows the model only as FUSIONS, VERSION, add_model_arguments, check_model_arguments, build_model and make_batches.

SCRIPT = Path(__file__).stem
SCHEMA_VERSION = 1
MB = 1e6
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
PHASES = ("data", "forward", "backward", "optimizer")
# On a CPU operator calls are counted in place of kernels: the innermost ones, without these, which move no data.
VIEW_OPERATORS = (
    *("alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh"),
    *("narrow", "permute", "resize_", "resolve_conj", "resolve_neg", "select", "set_", "slice", "split"),
    *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view"),
    *("_reshape_alias", "_unsafe_view"),
)
# One process per GPU; torchrun sets these, and a plain run is the only one.
RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE, LOCAL_WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
UNFINISHED = "the run did not finish"
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the PyTorch profiler writes lines of its own on stderr


class UserError(Exception):
    """Something the user can put right: one line on stderr and this exit status, no traceback."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


class Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line instead of the whole usage."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message} (--help lists all arguments)\n")


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the line breaks of the description and adds the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def at_least(low: int) -> Callable[[str], int]:
    """argparse type: a whole number not below `low`, small enough for 32 bits."""

    def whole_number(text: str) -> int:
        if not text.isascii() or not text.removeprefix("-").isdigit() or not low <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"must be a whole number, {low} or more, not {text!r}")
        return int(text)

    return whole_number


def positive_number(text: str) -> float:
    """argparse type: a finite number above zero."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")


def build_parser() -> argparse.ArgumentParser:
    """The command line: the model's own arguments and those that all versions share."""
    description, _, examples = __doc__.partition("\nExamples:\n")
    parser = Parser(
        prog=Path(__file__).name,
        usage="%(prog)s [arguments]",
        description=description,
        epilog="examples:\n" + examples,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add_model_arguments(parser)

    def switch(group: argparse._ArgumentGroup, flag: str, attribute: str, text: str) -> None:
        group.add_argument(f"--enable-{flag}", dest=attribute, action="append_const", const=True, help=text)
        group.add_argument(f"--disable-{flag}", dest=attribute, action="append_const", const=False)

    group = parser.add_argument_group("fusions", "Single flags win over all-fusion, whatever their order.")
    switch(group, "all-fusion", "all_fusion", "every fusion of this version, not torch.compile (the default)")
    for fusion in FUSIONS:
        switch(group, *fusion)
    switch(group, "torch-compile", "torch_compile", "compile the model with torch.compile")
    group.add_argument("--torch-compile-mode", choices=COMPILE_MODES, help="(default: default)")

    add = parser.add_argument_group("training").add_argument
    add("--num-steps", type=at_least(1), default=50, metavar="N", help="measured steps")
    add("--warmup-steps", type=at_least(0), default=5, metavar="N", help="steps before those, not measured")
    add("--learning-rate", type=positive_number, default=3e-4, metavar="X", help="of AdamW")
    add("--use-amp", action="store_true", help="automatic mixed precision")
    add("--amp-dtype", choices=("bfloat16", "float16"), help="(default: bfloat16)")
    add("--matmul-precision", choices=("highest", "high", "medium"), default="highest", help="of float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="AMD GPUs are 'cuda' too")
    add(
        "--num-gpus", type=at_least(1), metavar="N", help="GPUs that share the batch (default: 1, or *_VISIBLE_DEVICES)"
    )
    add("--seed", type=at_least(0), default=42, metavar="N", help="of weights and data")
    add("--deterministic", action="store_true", help="only algorithms that give the same bits every run")
    add("--log-interval", type=at_least(1), default=10, metavar="N", help="steps between progress lines")

    add = parser.add_argument_group("profiling").add_argument
    add("--enable-pytorch-profiler", action="store_true", help="operator tables and a trace of three steps")
    add("--enable-memory-profiling", action="store_true", help="memory timeline of one step")
    add("--enable-deepspeed-flops", action="store_true", help="FLOPs per module (needs deepspeed)")
    add(
        "--enable-rocm-profiling", action="store_true", help="name phases and blocks to a GPU profiler, pause it before"
    )
    add("--enable-all-profiling", action="store_true", help="all of these that work here")
    add("--under-profiler", action="store_true", help="launch nothing but the training steps")
    add("--profile-dir", type=Path, default=Path(f"./pytorch_profiles_v{VERSION}"), metavar="DIR", help="for results")

    add = parser.add_argument_group("modes").add_mutually_exclusive_group().add_argument
    add("--validate-setup", action="store_true", help="show what was found, run three steps, say pass or fail")
    add("--compare-fusion", action="store_true", help="all fusions off, then as chosen; one table")
    add("--verify-accuracy", action="store_true", help="same outputs and gradients as with everything off?")
    add("--compare-with-v1", type=Path, metavar="RESULT.json", help="compare with the result of a V1 run")
    add(
        "--compare-with",
        type=Path,
        metavar="RESULT.json",
        help="with another run of this script, on one GPU for instance",
    )
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and validate; anything that cannot work is one line on stderr and exit status 2."""
    parser = build_parser()
    args = parser.parse_args(argv)

    def switch(flag: str, attribute: str, default: bool) -> bool:
        given = set(getattr(args, attribute) or [default])
        if len(given) == 2:
            parser.error(f"--enable-{flag} and --disable-{flag} contradict each other: give one of them")
        return given.pop()

    if not FUSIONS and (args.compare_fusion or True in (args.all_fusion or ())):
        parser.error(f"{SCRIPT} has no fusions: --enable-all-fusion and --compare-fusion start with V2")
    preset = switch("all-fusion", "all_fusion", True)
    for flag, attribute, _ in FUSIONS:
        setattr(args, attribute, switch(flag, attribute, preset))
    args.torch_compile = switch("torch-compile", "torch_compile", False)
    if args.torch_compile_mode and not args.torch_compile:
        parser.error("--torch-compile-mode needs --enable-torch-compile")
    if args.amp_dtype and not args.use_amp:
        parser.error("--amp-dtype needs --use-amp")
    args.torch_compile_mode = args.torch_compile_mode or "default"
    args.amp_dtype = args.amp_dtype or "bfloat16"
    check_model_arguments(args, parser)
    if args.num_gpus and WORLD_SIZE > 1 and args.num_gpus != WORLD_SIZE:
        parser.error(f"--num-gpus {args.num_gpus} contradicts torchrun, which started {WORLD_SIZE} processes")
    if args.batch_size % wanted_processes(args):
        parser.error(f"--batch-size {args.batch_size} is not divisible by {wanted_processes(args)} GPUs")
    return args


def named_gpus() -> int:
    """How many GPUs the user chose with an environment variable, 0 without one."""
    chosen = [os.environ.get(f"{who}_VISIBLE_DEVICES", "") for who in ("ROCR", "HIP", "CUDA")]
    return min((len(text.split(",")) for text in chosen if text), default=0)


def wanted_processes(args: argparse.Namespace) -> int:
    """One process per GPU: what torchrun started, what --num-gpus says, or the GPUs that the environment names."""
    if WORLD_SIZE > 1 or args.num_gpus:
        return args.num_gpus or WORLD_SIZE
    return max(1, named_gpus()) if args.device != "cpu" and torch.cuda.is_available() else 1


def note(message: str) -> None:
    """A remark on stderr, once however many processes there are."""
    if RANK == 0:
        print(message, file=sys.stderr)


def complain(message: str) -> None:
    """The line that says what went wrong. torchrun collects it from each process, and launch() prints the first."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    if WORLD_SIZE == 1:
        print(f"{SCRIPT}.py: error: {message}", file=sys.stderr)
    elif "TINY_LAUNCHED" not in os.environ:
        print(f"{SCRIPT}.py: error: rank {RANK}: {message}", file=sys.stderr)


def launch(args: argparse.Namespace, argv: list[str], processes: int) -> int:
    """Start this script once per GPU, as torchrun does. A process that fails ends the others and is named."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    found = torch.cuda.device_count()
    if args.device != "cpu" and found < processes:
        raise UserError(
            f"{processes} GPUs wanted, PyTorch finds {found}; --device cpu takes processes instead", status=4
        )
    os.environ["TINY_LAUNCHED"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    logging.disable()  # torchrun's own lines; what matters is in the exception
    try:
        torchrun.run(torchrun.parse_args(["--standalone", f"--nproc-per-node={processes}", __file__, *argv]))
        return 0
    except SignalException as error:
        raise KeyboardInterrupt from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        killed = failure.exitcode < 0
        reason = f"killed by {failure.signal_name()}" if killed else failure.message
    message = f"rank {rank}: {reason}"
    complain(message)
    record = args.profile_dir / f"{SCRIPT}_summary.json"
    result = json.loads(record.read_text()) if record.exists() else {}
    if result.get("error") == UNFINISHED:
        write_result({**result, "error": message}, args.profile_dir)
    return 1 if killed else failure.exitcode


def join_processes(args: argparse.Namespace) -> None:
    """Meet the other processes that torchrun started. Only rank 0 prints; the others' files go to rankN/."""
    gpu = args.device != "cpu" and torch.cuda.is_available()
    if gpu and torch.cuda.device_count() < LOCAL_WORLD_SIZE:
        raise UserError(f"{LOCAL_WORLD_SIZE} processes but {torch.cuda.device_count()} GPUs on this host", status=4)
    if gpu:
        torch.cuda.set_device(LOCAL_RANK)
    torch.distributed.init_process_group("nccl" if gpu else "gloo")
    if RANK:
        args.profile_dir = args.profile_dir / f"rank{RANK}"
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open as long as the process


def combine_processes(result: dict) -> None:
    """The loss becomes the mean over all processes, which is that of the global batch; peak memory the maximum."""
    everyone: list = [None] * WORLD_SIZE
    torch.distributed.all_gather_object(everyone, (result["loss"]["curve"], result["memory"].get("peak_mb")))
    curves, peaks = zip(*everyone, strict=True)
    result["loss"]["curve"] = [statistics.fmean(losses) for losses in zip(*curves, strict=True)]
    if None not in peaks:  # on a CPU under a profiler it is not measured
        result["memory"]["peak_mb"] = max(peaks)


def without_fusions(args: argparse.Namespace) -> argparse.Namespace:
    """The same run with every fusion and torch.compile off."""
    off = {attribute: False for _, attribute, _ in FUSIONS}
    return argparse.Namespace(**{**vars(args), **off, "torch_compile": False})


def read_bytes(path: Path, flag: str) -> bytes:
    """The content of an input file named by `flag`; a missing or empty one is a UserError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from error
    if not content:
        raise UserError(f"{flag} {path}: the file is empty")
    return content


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it, by way of pinned memory."""
    if device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def prepare(args: argparse.Namespace) -> torch.device:
    """Check what the run needs before it starts, make the process-wide settings and return the device."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no GPU here; use --device cpu or auto", status=4)
    gpu = args.device != "cpu" and torch.cuda.is_available()
    if gpu and wanted_processes(args) == 1 < torch.cuda.device_count() and not (args.num_gpus or named_gpus()):
        note(f"{torch.cuda.device_count()} GPUs are visible, this run uses one: --num-gpus N uses more")
    if not gpu and named_gpus() > 1 and WORLD_SIZE == 1:
        note(f"the environment names {named_gpus()} GPUs, PyTorch uses none: this run is one process on the CPU")
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    if args.enable_deepspeed_flops and not deepspeed:
        raise UserError("--enable-deepspeed-flops needs the package deepspeed (pip install deepspeed)", status=4)
    if args.enable_all_profiling:
        args.enable_pytorch_profiler = args.enable_memory_profiling = args.enable_rocm_profiling = True
        args.enable_deepspeed_flops = deepspeed
        if not deepspeed:
            note("--enable-all-profiling: skipping deepspeed-flops (pip install deepspeed)")
    if args.enable_rocm_profiling and not gpu:
        note("--enable-rocm-profiling: no GPU here, so nothing is marked")
        args.enable_rocm_profiling = False
    if args.enable_rocm_profiling and torch.version.hip:
        roctx_library()
    try:
        args.profile_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.profile_dir).close()
    except OSError as error:
        raise UserError(f"--profile-dir {args.profile_dir}: cannot write there ({error.strerror})") from error
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.deterministic)
    torch.set_float32_matmul_precision(args.matmul_precision)
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def environment(device: torch.device) -> dict:
    """What the numbers were measured on."""
    name, memory = platform.processor() or platform.machine(), None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory / MB
    elif Path("/proc/cpuinfo").exists():
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = None
    return {
        "device": device.type,
        "device_name": name,
        "device_memory_mb": memory,
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": triton_version,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


class Recorder:
    """Times and losses of a loop, taken without ever making the host wait for the device.

    On a GPU a mark is an event in the stream and a loss is an asynchronous copy to pinned memory, looked at once the
    device has passed it. On a CPU they are clock readings and plain copies. `range` is a context manager that every
    phase runs in, to name it to a profiler.
    """

    def __init__(self, device: torch.device, steps: int, label: str, log_interval: int, range=contextlib.nullcontext):
        self.gpu, self.range = device.type == "cuda", range
        self.steps, self.label, self.log_interval = steps, label, log_interval
        self.buffer = torch.zeros(steps, pin_memory=self.gpu)
        self.marks: list = []  # the start, then the end of each phase of each step
        self.losses: list[float] = []
        self.copied = 0  # losses on their way or arrived
        self.finite = True

    def mark(self) -> None:
        """Note this moment: the start of the loop or the end of a phase."""
        if self.gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Runs one phase of a step."""
        with self.range(name):
            yield
        self.mark()

    def finish_step(self, step: int, loss: Tensor) -> None:
        """Keep the loss and look at those that have arrived; a loss that is not finite is a FloatingPointError."""
        self.buffer[step].copy_(loss, non_blocking=True)
        self.copied = step + 1
        self.look(wait=False)

    def look(self, wait: bool) -> None:
        """Take over the losses that have arrived; with `wait`, after the device has finished, all that were copied."""
        while self.finite and (step := len(self.losses)) < self.copied:
            after_copy = len(PHASES) * (step + 1) + 1  # the first mark behind the copy
            if self.gpu and not wait and not (after_copy < len(self.marks) and self.marks[after_copy].query()):
                return
            loss = float(self.buffer[step])
            self.finite = math.isfinite(loss)
            if not self.finite:
                raise FloatingPointError(f"the loss became {loss} at {self.label} {step + 1}")
            self.losses.append(loss)
            if (step + 1) % self.log_interval == 0 or step + 1 == self.steps:
                print(f"{self.label} {step + 1}/{self.steps}  loss {loss:.4f}", flush=True)

    def milliseconds(self, first: int, last: int) -> float:
        """Device time from one mark to another."""
        start, end = self.marks[first], self.marks[last]
        return start.elapsed_time(end) if self.gpu else 1e3 * (end - start)

    def timing(self, batch_size: int, wall: float | None) -> dict:
        """Means over the finished steps; `wall` is the whole loop's time in seconds, None if it was cut short."""
        steps, count = len(self.losses), len(PHASES)
        if not steps:
            return {}
        wall = wall or self.milliseconds(0, count * steps) / 1e3
        batches = sorted(self.milliseconds(count * step, count * (step + 1)) for step in range(steps))
        phases = {
            f"{phase}_ms": statistics.fmean(self.milliseconds(count * s + i, count * s + i + 1) for s in range(steps))
            for i, phase in enumerate(PHASES)
        }
        return {
            "steps": steps,
            "wall_s": wall,
            "samples_per_sec": batch_size * steps / wall,
            "batch_ms": 1e3 * wall / steps,
            "batch_median_ms": statistics.median(batches),
            "batch_p95_ms": batches[math.ceil(0.95 * steps) - 1],
            **phases,
        }


def name_blocks(model: nn.Module) -> None:
    """Have each block, a member of a ModuleList, run its forward pass in an NVTX (ROCTx) range of its name."""

    def begin(name: str) -> Callable[..., None]:
        def hook(*unused) -> None:  # what a hook returns would replace the block's input
            torch.cuda.nvtx.range_push(name)

        return hook

    def end(*unused) -> None:
        torch.cuda.nvtx.range_pop()

    for list_name, blocks in model.named_modules():
        if isinstance(blocks, nn.ModuleList):
            for name, block in blocks.named_children():
                block.register_forward_pre_hook(begin(f"{list_name}.{name}"))
                block.register_forward_hook(end)


def compile_model(model: nn.Module, mode: str) -> nn.Module:
    """The model under torch.compile, with one ptxas for the processes of Inductor.

    Its workers take the one that comes with PyTorch. If this process took Triton's own, it would find nothing of
    theirs in Triton's cache, and compile every candidate of max-autotune again, one after the other.
    """
    ptxas = Path(torch.__file__).with_name("bin") / "ptxas"
    if ptxas.exists():  # neither ROCm nor a CPU has one
        os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))
    return torch.compile(model, mode=mode)


class Trainer:
    """Model, optimizer and data, and the one training step that is measured, counted and profiled."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        self.batches = make_batches(args, device, args.seed)
        self.model = build_model(args, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.use_amp and args.amp_dtype == "float16")
        self.forward = compile_model(self.model, args.torch_compile_mode) if args.torch_compile else self.model
        if WORLD_SIZE > 1:  # buffers are constants, so they need no broadcast
            warnings.filterwarnings("ignore", message=".*broadcast_buffers. is deprecated", category=FutureWarning)
            ddp = nn.parallel.DistributedDataParallel
            self.forward = ddp(self.forward, broadcast_buffers=False, gradient_as_bucket_view=True)
            self.host_group = torch.distributed.new_group(backend="gloo")  # to meet without a kernel on the device
        if args.enable_rocm_profiling and not args.torch_compile:  # a compiled graph has no blocks left
            name_blocks(self.model)

    def next_batch(self) -> dict[str, Tensor]:
        """This process's share of the global batch, which is the same for any number of processes."""
        share = self.args.batch_size // WORLD_SIZE
        batch = self.batches.next_batch()
        return {name: value[RANK * share : (RANK + 1) * share] for name, value in batch.items()}

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, getattr(torch, self.args.amp_dtype), enabled=self.args.use_amp)

    def step(self, phase: Callable[[str], AbstractContextManager] = contextlib.nullcontext) -> Tensor:
        """One training step, each of its PHASES in a context `phase(name)`. Returns the loss."""
        with phase("data"):
            batch = self.next_batch()
        with phase("forward"), self.autocast():
            if self.args.torch_compile:
                torch.compiler.cudagraph_mark_step_begin()
            loss = self.forward(**batch)
        with phase("backward"):
            self.scaler.scale(loss).backward()
        with phase("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def profile(self, steps: int = 1, **options) -> torch.profiler.profile:
        """Run training steps under the PyTorch profiler."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, acc_events=True, **options) as profile:
            if WORLD_SIZE > 1:  # otherwise the first step contains waiting for the process whose profiler starts last
                torch.distributed.barrier(self.host_group)
            for _ in range(steps):
                self.step(torch.profiler.record_function)
            self.synchronize()
        return profile

    def resident_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state, which stay allocated between steps."""
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers(), *state))


def trace_events(profile: torch.profiler.profile) -> list[dict]:
    """The profiler's events as it writes them to a Chrome trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def count_kernels(events: list[dict], device: torch.device) -> dict:
    """Kernels that one profiled step ran; on a CPU, its innermost operator calls."""
    if device.type == "cuda":
        category = [event.get("cat") for event in events]
        launches = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and "Launch" in e["name"]]
        return {
            "unit": "kernels",
            "per_step": category.count("kernel"),
            "copies_and_memsets": category.count("gpu_memcpy") + category.count("gpu_memset"),
            "host_launches": len(launches),
        }
    calls = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    innermost = [
        call
        for call, following in zip(calls, [*calls[1:], {"tid": None}], strict=True)
        if following["tid"] != call["tid"] or following["ts"] >= call["ts"] + call["dur"]
    ]
    work = [e for e in innermost if e["name"].removeprefix("aten::") not in VIEW_OPERATORS]
    return {"unit": "operator calls", "per_step": len(work)}


def memory_timeline(events: list[dict], device: torch.device, start: float) -> list[tuple[float, float]]:
    """(microseconds, bytes) at each allocation and release of a profiled step that begins with `start` bytes in use."""
    kind = 1 if device.type == "cuda" else 0
    changes = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == kind]
    timeline = []
    for event in sorted(changes, key=lambda e: e["ts"]):
        start += event["args"]["Bytes"]
        timeline.append((event["ts"], start))
    return timeline


def peak_gpu_memory() -> int:
    """High-water mark in bytes since the last reset, with all of the private pools that CUDA graphs keep."""
    pools = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return torch.cuda.max_memory_allocated() + sum(s["total_size"] - s["allocated_size"] for s in pools)


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def count_unfused(args: argparse.Namespace, device: torch.device) -> int | None:
    """Kernels per step with everything off, on the same shapes; None where that does not fit into memory."""
    try:
        trainer = Trainer(without_fusions(args), device)
        trainer.step()
        return count_kernels(trace_events(trainer.profile()), device)["per_step"]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def count_flops(args: argparse.Namespace, batch: dict[str, Tensor]) -> int:
    """Floating-point operations of one forward and backward pass of the unfused model, counted without running it."""
    from torch.utils.flop_counter import FlopCounterMode

    model = build_model(without_fusions(args), torch.device("meta"))
    with FlopCounterMode(display=False) as counter:
        model(**{name: value.to("meta") for name, value in batch.items()}).backward()
    return counter.get_total_flops()


def roctx_library() -> ctypes.CDLL:
    """The library through which an application pauses and resumes a ROCm profiler."""
    try:
        return ctypes.CDLL("librocprofiler-sdk-roctx.so")
    except OSError as error:
        raise UserError(f"--enable-rocm-profiling needs ROCm's rocprofiler-sdk-roctx: {error}", status=4) from error


@contextlib.contextmanager
def recorded_region(active: bool) -> Iterator[None]:
    """Have an attached profiler record only what runs inside (cudaProfilerStart; under ROCm also ROCTx resume)."""
    if not active:
        yield
        return
    roctx = roctx_library() if torch.version.hip else None
    torch.cuda.profiler.start()
    if roctx:
        roctx.roctxProfilerResume(0)
    try:
        yield
    finally:
        if roctx:
            roctx.roctxProfilerPause(0)
        torch.cuda.profiler.stop()


def write_profile(trainer: Trainer, directory: Path) -> None:
    """Operator tables as text, and a trace for ui.perfetto.dev, chrome://tracing and TensorBoard."""
    steps = 3
    profile = trainer.profile(steps, record_shapes=True)
    averages = profile.key_averages()
    for clock in ("cpu", "device") if trainer.device.type == "cuda" else ("cpu",):
        total = sum(getattr(entry, f"self_{clock}_time_total") for entry in averages) / 1e3
        table = averages.table(sort_by=f"self_{clock}_time_total", row_limit=40)
        title = f"Self {'CPU' if clock == 'cpu' else 'device'} total: {total:.3f} ms in {steps} steps"
        (directory / f"{SCRIPT}_operators_by_{clock}_time.txt").write_text(f"{title}\n\n{table}\n")
    trace = directory / f"{SCRIPT}_trace.json.gz"
    profile.export_chrome_trace(str(trace))
    (directory / "tensorboard").mkdir(exist_ok=True)
    shutil.copy(trace, directory / "tensorboard" / f"{SCRIPT}.pt.trace.json.gz")


def write_memory_profile(trainer: Trainer, timeline: list[tuple[float, float]], directory: Path) -> None:
    """The memory in use during one step as CSV; on a GPU also a snapshot for pytorch.org/memory_viz."""
    rows = [f"{time - timeline[0][0]:.3f},{used:.0f}\n" for time, used in timeline]
    (directory / f"{SCRIPT}_memory_timeline.csv").write_text("time_us,bytes\n" + "".join(rows))
    if trainer.device.type == "cuda":
        torch.cuda.memory._record_memory_history()
        trainer.step()
        torch.cuda.memory._dump_snapshot(str(directory / f"{SCRIPT}_memory_snapshot.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)


def write_deepspeed_flops(trainer: Trainer, directory: Path) -> None:
    """DeepSpeed's FLOPs profile of one forward pass, per module."""
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    profiler = FlopsProfiler(trainer.model)
    profiler.start_profile()
    trainer.model(**trainer.next_batch())
    profiler.print_model_profile(output_file=str(directory / f"{SCRIPT}_deepspeed_flops.txt"))
    profiler.end_profile()


def run_steps(trainer: Trainer, recorder: Recorder, result: dict) -> float:
    """Run the recorder's number of steps, waiting for the device at both ends only; returns wall seconds."""
    try:
        trainer.synchronize()
        start = time.perf_counter()
        recorder.mark()
        for step in range(recorder.steps):
            recorder.finish_step(step, trainer.step(recorder.phase))
        trainer.synchronize()
        return time.perf_counter() - start
    finally:
        trainer.synchronize()  # also after Ctrl-C: losses and events must have arrived before they are looked at
        try:
            recorder.look(wait=True)
        finally:
            result["loss"]["curve"] += recorder.losses


def measure(args: argparse.Namespace, device: torch.device, result: dict) -> None:
    """Fill in `result`: warm-up, the measured steps, then the extra steps that count what those did."""
    gpu = device.type == "cuda"
    trainer = Trainer(args, device)
    result["config"] = asdict(trainer.model.config)
    result["parameters"] = sum(p.numel() for p in trainer.model.parameters())
    on = [flag for flag, attribute, _ in (*FUSIONS, ("torch-compile", "torch_compile", "")) if getattr(args, attribute)]
    print(
        f"{SCRIPT} on {result['environment']['device_name']}: {result['parameters']:,} parameters, "
        f"batch size {args.batch_size}{f' on {WORLD_SIZE} processes' if WORLD_SIZE > 1 else ''}, "
        f"{', '.join(on) or 'nothing fused'}",
        flush=True,
    )
    if WORLD_SIZE > 1:  # torchrun ends this process without a word if another one fails
        write_result({**result, "error": UNFINISHED}, args.profile_dir)

    warmup = Recorder(device, args.warmup_steps, "warm-up step", args.log_interval)
    warmup_wall = run_steps(trainer, warmup, result)
    if args.warmup_steps:
        result["timing"]["warmup_first_step_ms"] = warmup.milliseconds(0, len(PHASES))
    ranges = torch.cuda.nvtx.range if args.enable_rocm_profiling else contextlib.nullcontext
    measured = Recorder(device, args.num_steps, "step", args.log_interval, ranges)
    wall = None
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        with recorded_region(args.enable_rocm_profiling):
            wall = run_steps(trainer, measured, result)
    finally:
        result["timing"] |= measured.timing(args.batch_size, wall)
        if gpu:
            result["memory"] = {"peak_mb": peak_gpu_memory() / MB}
    if args.torch_compile and args.warmup_steps:
        overhead = 1e3 * warmup_wall - args.warmup_steps * result["timing"]["batch_ms"]
        result["timing"]["compilation_overhead_ms"] = overhead
    if args.under_profiler:
        return

    resident = torch.cuda.memory_allocated() if gpu else trainer.resident_bytes()
    events = trace_events(trainer.profile(profile_memory=args.enable_memory_profiling or not gpu))
    counts = count_kernels(events, device)
    result["kernels"] = counts if counts["per_step"] else {}  # a GPU profiler that may not run sees none
    timeline = memory_timeline(events, device, resident)
    if not gpu:
        result["memory"] = {"peak_mb": max(used for _, used in timeline) / MB}
    if args.enable_memory_profiling:
        write_memory_profile(trainer, timeline, args.profile_dir)
    if args.enable_pytorch_profiler:
        write_profile(trainer, args.profile_dir)
    if args.enable_deepspeed_flops:
        write_deepspeed_flops(trainer, args.profile_dir)
    flops = count_flops(args, trainer.batches.next_batch())
    result["flops"] = {"per_step": flops, "achieved_tflops": flops / result["timing"]["batch_ms"] / 1e9}

    del trainer
    if args.torch_compile:
        torch.compiler.reset()  # lets go of the graphs' memory
    gc.collect()
    if kernels := result["kernels"]:
        everything_off = vars(without_fusions(args)) == vars(args)
        kernels["all_off"] = kernels["per_step"] if everything_off else count_unfused(args, device)
        if kernels["all_off"]:
            kernels["reduction_percent"] = 100 * (1 - kernels["per_step"] / kernels["all_off"])


def write_result(result: dict, directory: Path) -> None:
    """Write or replace <directory>/<script>_summary.json; a reader never sees half a file."""
    path = directory / f"{SCRIPT}_summary.json"
    path.with_suffix(".tmp").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".tmp").replace(path)


def train(args: argparse.Namespace) -> dict:
    """Train and measure; the result is also written to <profile-dir>/<script>_summary.json, however the run ends."""
    device = prepare(args)
    settings = ["batch_size", "num_steps", "warmup_steps", "learning_rate", "seed", "deterministic", "use_amp"]
    settings += ["amp_dtype", "matmul_precision", "torch_compile", "torch_compile_mode"]
    result = {
        "schema_version": SCHEMA_VERSION,
        "script": SCRIPT,
        "status": "failed",
        "exit_status": 1,
        "error": None,
        "config": {},
        "fusions": {attribute: getattr(args, attribute) for _, attribute, _ in FUSIONS},
        "training": {**{name: getattr(args, name) for name in settings}, "processes": WORLD_SIZE},
        "environment": environment(device),
        "timing": {},
        "memory": {},
        "kernels": {},
        "flops": {},
        "loss": {"warmup_steps": args.warmup_steps, "curve": []},
    }
    bug = None
    try:
        measure(args, device, result)
        if WORLD_SIZE > 1:
            combine_processes(result)
        result.update(status="ok", exit_status=0)
    except UserError:
        raise  # nothing was measured, and an earlier result in this directory stays
    except KeyboardInterrupt:
        result.update(exit_status=130, error=f"interrupted after {len(result['loss']['curve'])} steps")
    except FloatingPointError as error:
        result["error"] = f"{error}; lower --learning-rate"
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if WORLD_SIZE > 1 and ("gloo" in str(error) or isinstance(error, torch.distributed.DistBackendError)):
            time.sleep(20)  # another process failed and broke the connection: torchrun names that one, ends this one
        if is_out_of_memory(error):
            result.update(status="oom", exit_status=3)
            result["error"] = f"out of memory: lower --batch-size or --seq-len ({reason})"
        elif args.torch_compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            result["error"] = f"torch.compile failed: {reason}"
        else:
            result["error"], bug = reason, error
    curve = result["loss"]["curve"]
    result["loss"] |= {"initial": curve[0], "final": curve[-1]} if curve else {}
    write_result(result, args.profile_dir)
    if bug:
        raise bug
    return result


def report(result: dict) -> str:
    """The lines of a result that was measured; what is missing in it is left out."""
    timing, kernels, flops = result["timing"], result["kernels"], result["flops"]
    lines = []
    if "samples_per_sec" in timing:
        lines += [
            f"Average training speed: {timing['samples_per_sec']:.1f} samples/sec",
            f"Average batch time: {timing['batch_ms']:.1f} ms (median {timing['batch_median_ms']:.1f}, "
            f"p95 {timing['batch_p95_ms']:.1f})",
            *(f"Average {phase} time: {timing[f'{phase}_ms']:.1f} ms" for phase in PHASES[1:]),
        ]
    if "warmup_first_step_ms" in timing:
        lines.append(f"Warmup step time: {timing['warmup_first_step_ms']:.1f} ms (first step, includes compilation)")
    if "compilation_overhead_ms" in timing:
        lines.append(f"Compilation overhead: {timing['compilation_overhead_ms']:.1f} ms")
    if result["loss"]["curve"]:
        lines.append(f"Final loss: {result['loss']['final']:.4f} (first step {result['loss']['initial']:.4f})")
    if result["memory"]:
        lines.append(f"Peak memory usage: {result['memory']['peak_mb']:.1f} MB")
    if kernels:
        off, unit = kernels.get("all_off"), kernels["unit"]
        note = "" if unit == "kernels" else f"; these are {unit}, counted on a CPU"
        lines.append(f"Kernels per step: {kernels['per_step']} (all fusions off: {off or 'out of memory'}){note}")
        if off:
            lines.append(f"Kernel reduction: {kernels['reduction_percent']:.1f} %")
    if kernels.get("host_launches"):
        lines.append(f"Host launches per step: {kernels['host_launches']}")
    if flops:
        achieved = f"achieved {flops['achieved_tflops']:.2f} TFLOP/s"
        lines.append(f"FLOPs per step: {flops['per_step'] / 1e9:.1f} GFLOP, {achieved}")
    return "\n".join(lines)


def finish(result: dict) -> int:
    """Print the report, and the error if there was one; returns the exit status."""
    if text := report(result):
        print(text, flush=True)
    if result["error"]:
        complain(result["error"])
    return result["exit_status"]


def comparison(before: dict, after: dict, names: tuple[str, str]) -> str:
    """Two results side by side; the ratio is the second over the first."""
    rows = {
        "samples/sec": ("timing", "samples_per_sec"),
        "batch time, ms": ("timing", "batch_ms"),
        **{f"{phase}, ms": ("timing", f"{phase}_ms") for phase in PHASES[1:]},
        "peak memory, MB": ("memory", "peak_mb"),
        before["kernels"].get("unit", "kernels") + " per step": ("kernels", "per_step"),
        "final loss": ("loss", "final"),
    }
    lines = [f"{'':26}{names[0]:>14}{names[1]:>14}{'ratio':>10}"]
    for label, (group, key) in rows.items():
        first, second = before[group].get(key), after[group].get(key)
        digits = 4 if key == "final" else 1
        cells = ["-" if value is None else f"{value:.{digits}f}" for value in (first, second)]
        lines.append(f"{label:26}{cells[0]:>14}{cells[1]:>14}{second / first if first and second else math.nan:>10.3f}")
    return "\n".join(lines)


def compare_fusion(args: argparse.Namespace) -> int:
    """Everything off, then as chosen, in one process; the first result goes to <profile-dir>/baseline."""
    baseline_args = without_fusions(args)
    baseline_args.profile_dir = args.profile_dir / "baseline"
    # A GPU profiler that has run can slow down later launches, so none may run before the second timing.
    baseline_args.under_profiler = args.under_profiler or (args.device != "cpu" and torch.cuda.is_available())
    baseline = train(baseline_args)
    status = finish(baseline)
    if baseline["status"] == "failed":
        return status
    gc.collect()
    print()
    fused = train(args)
    if not baseline["kernels"] and fused["kernels"].get("all_off"):  # counted the same way in the second run
        baseline["kernels"] = {"unit": fused["kernels"]["unit"], "per_step": fused["kernels"]["all_off"]}
        write_result(baseline, baseline_args.profile_dir)
    status = finish(fused) or status
    print("\n" + comparison(baseline, fused, ("all off", "as chosen")))
    return status


def read_result(path: Path, flag: str, script: str) -> dict:
    """The result file of a finished run of a script."""
    try:
        result = json.loads(read_bytes(path, flag))
        found = result["script"], result["schema_version"], result["status"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{flag} {path}: not a result file; give the {script}_summary.json of a run") from error
    if found != (script, SCHEMA_VERSION, "ok"):
        raise UserError(f"{flag} {path}: need a finished run of {script}, this is {found[0]} with status {found[2]}")
    return result


def compare(args: argparse.Namespace, before: dict, names: tuple[str, str]) -> int:
    """Train, then show the result beside an earlier one, and name every setting that was not the same."""
    result = train(args)
    status = finish(result)
    for group in ("config", "training", "environment"):
        for key, value in before[group].items():
            if result[group].get(key) != value:
                note(f"note: {key} was {value} for {names[0]} and is {result[group].get(key)} here")
    print("\n" + comparison(before, result, names))
    speeds = [r["timing"].get("samples_per_sec") for r in (before, result)]
    times = WORLD_SIZE / before["training"].get("processes", 1)
    if all(speeds) and times != 1:
        speedup = speeds[1] / speeds[0]
        print(f"Scaling efficiency: {100 * speedup / times:.1f} % ({speedup:.2f}x the speed, {times:g}x the GPUs)")
    return status


def compare_with_v1(args: argparse.Namespace) -> int:
    """Beside the result of V1."""
    v1 = read_result(args.compare_with_v1, "--compare-with-v1", f"{SCRIPT.rpartition('_')[0]}_v1")
    return compare(args, v1, ("V1", f"V{VERSION}"))


def compare_with(args: argparse.Namespace) -> int:
    """Beside another result of this script."""
    return compare(args, read_result(args.compare_with, "--compare-with", SCRIPT), ("that run", "this run"))


def relative_error(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over the norm of the reference, or over `floor` where that is larger."""
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).norm() / max(float(reference.norm()), floor, 1e-300))


def outputs_and_gradients(args: argparse.Namespace, device: torch.device) -> tuple[dict, dict]:
    """Loss and outputs of the initial weights on the first batch, and the gradients under their canonical names."""
    trainer = Trainer(args, device)
    torch.set_float32_matmul_precision(args.matmul_precision)
    batch = trainer.next_batch()
    inputs = {name: value for name, value in batch.items() if name not in trainer.model.TARGETS}
    with trainer.autocast():
        with torch.no_grad():
            outputs = trainer.forward(**inputs)
            outputs = outputs if isinstance(outputs, dict) else {"outputs": outputs}
            outputs = {name: value.clone() for name, value in outputs.items()}  # a CUDA graph reuses its outputs
        loss = trainer.forward(**batch)
    loss.backward()
    for parameter in trainer.model.parameters():
        parameter.data = parameter.grad  # state_dict then gives gradients, split where weights are fused
    return {"loss": loss, **outputs}, trainer.model.state_dict()


def verify_accuracy(args: argparse.Namespace) -> int:
    """Compare outputs, loss and gradients with those of the same weights in float32 with everything off."""
    device = prepare(args)
    exact = {"use_amp": False, "matmul_precision": "highest"}
    reference = argparse.Namespace(**{**vars(without_fusions(args)), **exact})
    expected, expected_gradients = outputs_and_gradients(reference, device)
    values, gradients = outputs_and_gradients(args, device)
    full_precision = all(getattr(args, name) == value for name, value in exact.items())
    limit = 1e-4 if full_precision else 1e-1
    errors = {name: relative_error(values[name], expected[name]) for name in expected}
    # A gradient that is zero but for rounding is measured against all gradients together; in less than float32 all are,
    # because rounding alone then changes small ones by as much as their size.
    total = math.sqrt(sum(float(g.double().square().sum()) for g in expected_gradients.values()))
    floor = total * (1e-3 if full_precision else 1.0)
    by_name = {n: relative_error(gradients[n], g, floor) for n, g in expected_gradients.items()}
    worst = max(by_name, key=by_name.__getitem__)
    errors[f"gradient of {worst} (the worst of {len(by_name)})"] = by_name[worst]
    for name, error in errors.items():
        print(f"{name}: relative error {error:.2e}, limit {limit:.0e}")
    passed = all(error <= limit for error in errors.values())  # a NaN fails
    print(f"Accuracy check: {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


def validate_setup(args: argparse.Namespace) -> int:
    """Show what was found here and run three steps."""
    args.num_steps, args.warmup_steps, args.under_profiler = 3, 0, True
    result = train(args)
    for name, value in result["environment"].items():
        print(f"{name:18} {value}")
    for tool in ("rocprofv3", "rocprof-sys-run", "rocprof-compute"):
        print(f"{tool:18} {shutil.which(tool) or 'not found'}")
    status = finish(result)
    print(f"Setup check: {'FAIL' if status else 'PASS'}")
    return status


def run_mode(args: argparse.Namespace) -> int:
    """What the arguments ask for, in this process; returns the exit status."""
    if WORLD_SIZE > 1:
        join_processes(args)
    for mode in (validate_setup, compare_fusion, verify_accuracy, compare_with_v1, compare_with):
        if getattr(args, mode.__name__):
            return mode(args)
    return finish(train(args))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parse_args(argv)
    try:
        if (processes := wanted_processes(args)) > WORLD_SIZE:
            return launch(args, sys.argv[1:] if argv is None else argv, processes)
        status = run_mode(args)
    except UserError as error:
        complain(str(error))
        status = error.status
    except KeyboardInterrupt:
        complain("interrupted")
        status = 130
    if WORLD_SIZE > 1:
        if status:  # a tidy end could wait for a process that is gone
            sys.stdout.flush()
            os._exit(status)
        gc.collect()  # what still refers to the process group would keep its threads running into the exit
        torch.distributed.destroy_process_group()
    return status


# --- end of harness

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""TinyOpenFold V2: fusions that PyTorch itself offers, each on a flag of its own.

qkv-fusion-msa       query, key, value and gate of the two MSA attentions are one GEMM
qkv-fusion-triangle  the same for the two triangle attentions
flash-attention      scaled_dot_product_attention with the pair bias as additive mask: scores never
                     reach device memory
triangle-fusion      the four projections and gates of a triangle multiplication are one GEMM and
                     one GLU

Fewer, larger kernels help where launching them or moving their intermediate results takes longer
than the arithmetic. The model, its weights and its loss are those of V1:
`diff tiny_openfold_v1.py tiny_openfold_v2.py` is the whole lesson.

The Evoformer follows the supplementary information of Jumper et al. 2021 (AF2 SI below), names
follow OpenFold.

Examples:
  python tiny_openfold_v2.py --compare-fusion                                all off, all on
  python tiny_openfold_v2.py --disable-all-fusion --enable-flash-attention   one fusion alone
  python tiny_openfold_v2.py --use-amp --enable-torch-compile --torch-compile-mode reduce-overhead
"""

from __future__ import annotations

import _thread
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
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, NoReturn, get_type_hints

try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint
    from torch.utils.flop_counter import FlopCounterMode
except (ImportError, KeyboardInterrupt) as error:
    missing = isinstance(error, ImportError)
    print(f"{Path(__file__).name}: error: {error if missing else 'interrupted'}", file=sys.stderr)
    sys.exit(4 if missing else 130)

# --- configuration

VERSION = 2


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model and how it runs; the defaults are those of the command line."""

    msa_dim: int = 64
    pair_dim: int = 128
    num_blocks: int = 4
    num_heads_msa: int = 4
    num_heads_pair: int = 4
    num_seqs: int = 16
    seq_len: int = 64
    outer_product_dim: int = 32
    transition_factor: int = 4
    checkpoint_blocks: bool = False


@dataclass(frozen=True)
class Fusions:
    """Which fusions are on. A flag is a field with dashes, its help what stands beside `bool`."""

    qkv_fusion_msa: Annotated[bool, "MSA attention's projections as one GEMM"] = True
    qkv_fusion_triangle: Annotated[bool, "triangle attention's projections as one GEMM"] = True
    flash_attention: Annotated[bool, "scaled_dot_product_attention, which stores no scores"] = True
    triangle_fusion: Annotated[bool, "projections of a triangle product as one GEMM"] = True


FUSIONS = tuple(
    (name.replace("_", "-"), name, hint.__metadata__[0])
    for name, hint in get_type_hints(Fusions, include_extras=True).items()
)
# Those whose kernels the first step compiles.
TRITON_FUSIONS: tuple[str, ...] = ()


def without_effect(args: argparse.Namespace) -> dict[str, str]:
    """Return the fusions without effect under these arguments, on or off, and why."""
    return {}


def use_settings(args: argparse.Namespace) -> None:
    """Apply this version's process-wide settings of a run: there are none."""


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


# --- model

AMINO_ACIDS = "ARNDCQEGHILKMFPSTWYV"
UNKNOWN, GAP, MASK = 20, 21, 22
NUM_TOKENS = 23  # the 20 amino acids, unknown, gap, masked
MAX_OFFSET = 32  # relative positions are clipped at +-32 residues
NUM_BINS, FIRST_EDGE, LAST_EDGE = 64, 2.0, 22.0  # distogram, in Angstrom
BIN_WIDTH = (LAST_EDGE - FIRST_EDGE) / NUM_BINS


def one_hot(tokens: Tensor, classes: int) -> Tensor:
    """Turn tokens [...] into float32 [..., classes], 1 at the token and 0 elsewhere."""
    return (tokens[..., None] == torch.arange(classes, device=tokens.device)).float()


class InputEmbedder(nn.Module):
    """Embed an alignment as MSA and pair representation (AF2 SI, algorithms 3 to 5)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear_tf_z_i = nn.Linear(NUM_TOKENS, config.pair_dim)
        self.linear_tf_z_j = nn.Linear(NUM_TOKENS, config.pair_dim)
        self.linear_tf_m = nn.Linear(NUM_TOKENS, config.msa_dim)
        self.linear_msa_m = nn.Linear(NUM_TOKENS, config.msa_dim)
        self.linear_relpos = nn.Linear(2 * MAX_OFFSET + 1, config.pair_dim)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embed tokens [B, S, N] -> msa [B, S, N, c_m], pair [B, N, N, c_z]."""
        alignment = one_hot(tokens, NUM_TOKENS)
        query = alignment[:, 0]
        position = torch.arange(tokens.shape[-1], device=tokens.device)
        offset = (position[:, None] - position).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
        pair = self.linear_tf_z_i(query)[:, :, None] + self.linear_tf_z_j(query)[:, None]
        pair = pair + self.linear_relpos(one_hot(offset, 2 * MAX_OFFSET + 1))
        return self.linear_msa_m(alignment) + self.linear_tf_m(query)[:, None], pair


def keep_separate_names(
    parent: nn.Module, fused: str, parts: tuple[str, ...], biased: tuple[str, ...], heads: int = 1
) -> None:
    """Have state_dict list the rows of `parent.<fused>` under the names of its parts.

    They are loaded from these, too. The parts are equally wide. Their rows run head by head and,
    within a head, part by part; `biased` are the parts that have a bias.
    """

    def names(prefix: str) -> dict[str, list[str]]:
        owners = {"weight": parts, "bias": biased}
        return {
            f"{prefix}{fused}.{kind}": [f"{prefix}{part}.{kind}" for part in with_kind]
            for kind, with_kind in owners.items()
        }

    def split(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: dict) -> None:
        for merged, separate in names(prefix).items():
            rows = state.pop(merged).unflatten(0, (heads, len(separate), -1))
            state.update({name: rows[:, i].flatten(0, 1) for i, name in enumerate(separate)})

    def merge(module: nn.Module, state: dict[str, Tensor], prefix: str, *unused) -> None:
        for merged, separate in names(prefix).items():
            # Otherwise load_state_dict reports what is missing.
            if all(name in state for name in separate):
                rows = [state.pop(name).unflatten(0, (heads, -1)) for name in separate]
                state[merged] = torch.stack(rows, dim=1).flatten(0, 2)

    parent.register_state_dict_post_hook(split)
    parent.register_load_state_dict_pre_hook(merge)


class QKVGLinear(nn.Module):
    """Query, key, value and gate projection as one GEMM; only the gate has a bias."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(4 * dim, dim))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project x [P, C] -> q, k, v, gate, each [P, H, C / H].

        The four of one head lie side by side in memory.
        """
        q, k, v, gate = F.linear(x, self.weight).view(len(x), self.heads, 4, -1).unbind(2)
        return q, k, v, gate + self.bias.view(self.heads, -1).to(gate.dtype)


def without_padding(bias: Tensor, present: Tensor) -> Tensor:
    """Set a bias [B or 1, H or 1, N or 1, N] where no key is present [B, N].

    Its weight is then 0, and where all keys are padding no NaN arises, in float16 either.
    """
    return bias.masked_fill(~present[:, None, None], -1e4)


class GatedAttention(nn.Module):
    """Attend along one axis in several heads, with a sigmoid gate: the base of four attentions."""

    def __init__(self, dim: int, heads: int, qkv_fusion: bool, fusions: Fusions):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv_fusion, self.flash_attention = qkv_fusion, fusions.flash_attention
        if qkv_fusion:
            parts = ("linear_q", "linear_k", "linear_v", "linear_g")
            self.linear_qkvg = QKVGLinear(dim, heads)
            keep_separate_names(self, "linear_qkvg", parts, biased=("linear_g",), heads=heads)
        else:
            self.linear_q = nn.Linear(dim, dim, bias=False)
            self.linear_k = nn.Linear(dim, dim, bias=False)
            self.linear_v = nn.Linear(dim, dim, bias=False)
            self.linear_g = nn.Linear(dim, dim)
        self.linear_o = nn.Linear(dim, dim)

    def attend(
        self, x: Tensor, bias: Tensor | None = None, present: Tensor | None = None
    ) -> Tensor:
        """Let each of the R rows of x [B, R, N, C] attend to itself.

        bias [B, H, N, N] is the same for all rows, and so is present [B, N], which is False for
        padding, that nobody attends to.
        """
        if present is not None:
            bias = without_padding(x.new_zeros(1) if bias is None else bias, present)
        if self.flash_attention:
            return self.attend_flash(x, bias)
        q, k, v, gate = self.project(x.reshape(-1, x.shape[-1]))
        # Not in five dimensions, at which torch.compile's attention pattern fails (PyTorch 2.11).
        shape = (-1, x.shape[2], self.heads, self.head_dim)
        q, k, v = (t.view(shape).transpose(1, 2) for t in (q, k, v))
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-2, -1)  # [B x R, H, N, N]
        if bias is not None:
            scores = (scores.unflatten(0, x.shape[:2]) + bias[:, None]).flatten(0, 1)
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return self.linear_o(torch.sigmoid(gate.reshape(x.shape)) * out)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project x [P, C] -> q, k, v, gate, each [P, H, C / H]."""
        if self.qkv_fusion:
            return self.linear_qkvg(x)
        linears = (self.linear_q, self.linear_k, self.linear_v, self.linear_g)
        return tuple(linear(x).view(len(x), self.heads, -1) for linear in linears)

    def attend_flash(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Attend as `attend` does, without scores in memory.

        SDPA takes [batch, heads, N, D]. Here its batch are the rows, and its heads are ours of all
        samples: so one bias [B x H, N, N] serves every row by broadcasting, where it would
        otherwise be copied R times, which is as large as the scores are.
        """
        samples, rows, length, dim = x.shape
        if bias is None:  # nothing to share: every row of every sample is a batch of its own
            samples, rows = 1, samples * rows
        else:
            bias = bias.expand(samples, self.heads, length, length).flatten(0, 1)[None]
            x, bias = x.permute(1, 2, 0, 3), bias.contiguous()
        q, k, v, gate = self.project(x.reshape(-1, dim))  # [R x N x B, H, C / H]
        shape = (rows, length, samples * self.heads, -1)
        q, k, v = (t.view(shape).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        out = out.transpose(1, 2).reshape(gate.shape)  # [R x N x B, H, C / H]
        out = self.linear_o((torch.sigmoid(gate) * out).flatten(1)).view(x.shape)
        return out if bias is None else out.permute(2, 0, 1, 3)


class MSARowAttentionWithPairBias(GatedAttention):
    """Let residues attend to each other, biased by their pair (AF2 SI, algorithm 7)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        qkv = fusions.qkv_fusion_msa
        super().__init__(config.msa_dim, config.num_heads_msa, qkv, fusions)
        self.layer_norm_m = nn.LayerNorm(config.msa_dim)
        self.layer_norm_z = nn.LayerNorm(config.pair_dim)
        self.linear_z = nn.Linear(config.pair_dim, config.num_heads_msa, bias=False)

    def forward(self, msa: Tensor, pair: Tensor, residues: Tensor | None = None) -> Tensor:
        """Compute the update of msa [B, S, N, c_m] by pair [B, N, N, c_z] and residues [B, N]."""
        bias = self.linear_z(self.layer_norm_z(pair)).permute(0, 3, 1, 2)
        return self.attend(self.layer_norm_m(msa), bias, residues)


class MSAColumnAttention(GatedAttention):
    """Let sequences attend to each other at one residue (AF2 SI, algorithm 8)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        qkv = fusions.qkv_fusion_msa
        super().__init__(config.msa_dim, config.num_heads_msa, qkv, fusions)
        self.layer_norm_m = nn.LayerNorm(config.msa_dim)

    def forward(self, msa: Tensor, sequences: Tensor | None = None) -> Tensor:
        """Compute the update of msa [B, S, N, c_m]; sequences [B, S] are False for padding."""
        msa = self.layer_norm_m(msa.transpose(1, 2))
        return self.attend(msa, present=sequences).transpose(1, 2)


class Transition(nn.Module):
    """Two-layer perceptron on each position."""

    def __init__(self, dim: int, factor: int):
        super().__init__()
        self.layer_norm = nn.LayerNorm(dim)
        self.linear_1 = nn.Linear(dim, factor * dim)
        self.linear_2 = nn.Linear(factor * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the update of x [..., C]."""
        return self.linear_2(F.relu(self.linear_1(self.layer_norm(x))))


class MSATransition(Transition):
    """AF2 SI, algorithm 9."""


class PairTransition(Transition):
    """AF2 SI, algorithm 15."""


class OuterProductMean(nn.Module):
    """Update the pair representation from pairs of MSA columns (AF2 SI, algorithm 10)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden = config.outer_product_dim
        self.layer_norm = nn.LayerNorm(config.msa_dim)
        self.linear_1 = nn.Linear(config.msa_dim, hidden)
        self.linear_2 = nn.Linear(config.msa_dim, hidden)
        self.linear_out = nn.Linear(hidden * hidden, config.pair_dim)

    def forward(self, msa: Tensor, sequences: Tensor | None = None) -> Tensor:
        """Compute the update of pair [B, N, N, c_z] from msa [B, S, N, c_m], sequences [B, S]."""
        msa, depth = self.layer_norm(msa), msa.shape[1]
        if sequences is not None:
            dtype = torch.promote_types(msa.dtype, torch.float32)
            depth = sequences.sum(1, dtype=dtype)[:, None, None, None]
        a, b = self.linear_1(msa), self.linear_2(msa)
        if sequences is not None:
            a = a * sequences[:, :, None, None]
        outer = torch.einsum("bsic,bsjd->bijcd", a, b).flatten(3)
        # The bias is divided, too, as AlphaFold's code does.
        return self.linear_out(outer) / (depth + 1e-3)


class TriangleMultiplication(nn.Module):
    """Update each edge from the two others of its triangles, multiplied by `equation`."""

    equation: str

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        dim = config.pair_dim
        self.layer_norm_in = nn.LayerNorm(dim)
        self.triangle_fusion = fusions.triangle_fusion
        if fusions.triangle_fusion:
            parts = ("linear_a_p", "linear_b_p", "linear_a_g", "linear_b_g")
            self.linear_ab = nn.Linear(dim, 4 * dim)
            keep_separate_names(self, "linear_ab", parts, biased=parts)
        else:
            self.linear_a_p = nn.Linear(dim, dim)
            self.linear_a_g = nn.Linear(dim, dim)
            self.linear_b_p = nn.Linear(dim, dim)
            self.linear_b_g = nn.Linear(dim, dim)
        self.linear_g = nn.Linear(dim, dim)
        self.linear_z = nn.Linear(dim, dim)
        self.layer_norm_out = nn.LayerNorm(dim)

    def forward(self, pair: Tensor, residues: Tensor | None = None) -> Tensor:
        """Compute the update of pair [B, N, N, c_z]; residues [B, N] are False for padding."""
        pair = self.layer_norm_in(pair)
        if self.triangle_fusion:
            # The GEMM writes channels first: a and b then are batches of N x N matrices, which
            # nobody has to transpose.
            ab = (self.linear_ab.weight @ pair.flatten(0, 2).T).add_(self.linear_ab.bias[:, None])
            samples, length, _, dim = pair.shape
            a, b = F.glu(ab, dim=0).view(2, dim, samples, length, length).unbind()
            if residues is not None:
                a = a * (residues[:, :, None] & residues[:, None])
            a, b = a.flatten(0, 1), b.flatten(0, 1)
            product = self.multiply(a, b).view(dim, samples, length, length).permute(1, 2, 3, 0)
        else:
            a = torch.sigmoid(self.linear_a_g(pair)) * self.linear_a_p(pair)
            b = torch.sigmoid(self.linear_b_g(pair)) * self.linear_b_p(pair)
            if residues is not None:
                a = a * (residues[:, :, None] & residues[:, None])[..., None]
            product = torch.einsum(self.equation, a, b)
        return torch.sigmoid(self.linear_g(pair)) * self.linear_z(self.layer_norm_out(product))


class TriangleMultiplicationOutgoing(TriangleMultiplication):
    """Update edge ij from the edges ik and jk (AF2 SI, algorithm 11)."""

    equation = "bikc,bjkc->bijc"

    @staticmethod
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        """Multiply matrices a and b, one for each channel and sample [C x B, N, N]."""
        return torch.bmm(a, b.mT)


class TriangleMultiplicationIncoming(TriangleMultiplication):
    """Update edge ij from the edges ki and kj (AF2 SI, algorithm 12)."""

    equation = "bkic,bkjc->bijc"

    @staticmethod
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        """Multiply matrices a and b, one for each channel and sample [C x B, N, N]."""
        return torch.bmm(a.mT, b)


class TriangleAttentionStartingNode(GatedAttention):
    """Let edges ij and ik attend to each other, biased by edge jk (AF2 SI, algorithm 13)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        qkv = fusions.qkv_fusion_triangle
        super().__init__(config.pair_dim, config.num_heads_pair, qkv, fusions)
        self.layer_norm = nn.LayerNorm(config.pair_dim)
        self.linear = nn.Linear(config.pair_dim, config.num_heads_pair, bias=False)

    def forward(self, pair: Tensor, residues: Tensor | None = None) -> Tensor:
        """Compute the update of pair [B, N, N, c_z]; residues [B, N] are False for padding."""
        pair = self.layer_norm(pair)
        return self.attend(pair, self.linear(pair).permute(0, 3, 1, 2), residues)


class TriangleAttentionEndingNode(TriangleAttentionStartingNode):
    """Let edges ij and kj attend to each other, biased by edge ki (AF2 SI, algorithm 14)."""

    def forward(self, pair: Tensor, residues: Tensor | None = None) -> Tensor:
        """Compute the update of pair [B, N, N, c_z]; residues [B, N] are False for padding."""
        return super().forward(pair.transpose(1, 2), residues).transpose(1, 2)


class EvoformerBlock(nn.Module):
    """One block of the Evoformer stack, without dropout (AF2 SI, algorithm 6)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.msa_att_row = MSARowAttentionWithPairBias(config, fusions)
        self.msa_att_col = MSAColumnAttention(config, fusions)
        self.msa_transition = MSATransition(config.msa_dim, config.transition_factor)
        self.outer_product_mean = OuterProductMean(config)
        self.tri_mul_out = TriangleMultiplicationOutgoing(config, fusions)
        self.tri_mul_in = TriangleMultiplicationIncoming(config, fusions)
        self.tri_att_start = TriangleAttentionStartingNode(config, fusions)
        self.tri_att_end = TriangleAttentionEndingNode(config, fusions)
        self.pair_transition = PairTransition(config.pair_dim, config.transition_factor)

    def forward(
        self,
        msa: Tensor,
        pair: Tensor,
        sequences: Tensor | None = None,
        residues: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Update msa [B, S, N, c_m] and pair [B, N, N, c_z].

        sequences [B, S] and residues [B, N] are False for padding, which changes nothing elsewhere.
        """
        msa = msa + self.msa_att_row(msa, pair, residues)
        msa = msa + self.msa_att_col(msa, sequences)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer_product_mean(msa, sequences)
        pair = pair + self.tri_mul_out(pair, residues)
        pair = pair + self.tri_mul_in(pair, residues)
        pair = pair + self.tri_att_start(pair, residues)
        pair = pair + self.tri_att_end(pair, residues)
        pair = pair + self.pair_transition(pair)
        return msa, pair


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


class TinyOpenFold(nn.Module):
    """Chain input embedding, Evoformer stack, distogram and masked-MSA heads."""

    TARGETS = ("true_tokens", "masked", "coords", "observed")

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.config = config
        self.input_embedder = InputEmbedder(config)
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
        msa, pair = self.input_embedder(tokens)
        for block in self.blocks:
            inputs = (msa, pair, sequences, residues)
            if self.config.checkpoint_blocks:  # without random numbers: a block draws none
                options = {"use_reentrant": False, "preserve_rng_state": False}
                msa, pair = checkpoint(block, *inputs, **options)
            else:
                msa, pair = block(*inputs)
        outputs = {"masked_msa": self.masked_msa(msa), "distogram": self.distogram(pair)}
        if true_tokens is None:
            return outputs
        distogram = head_loss(outputs["distogram"], *self.distogram.targets(coords, observed))
        masked_msa = head_loss(outputs["masked_msa"], true_tokens, masked)
        return 0.3 * distogram + 2.0 * masked_msa


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build the model: a seed gives the same weights in every version and fusion setting."""
    sizes = {n: v for n, v in vars(args).items() if n in ModelConfig.__dataclass_fields__}
    fusions = Fusions(**{attribute: getattr(args, attribute) for _, attribute, _ in FUSIONS})
    with device:
        model = TinyOpenFold(ModelConfig(**sizes), fusions)
    if device.type != "meta":
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


# --- data
# Copied from common/data_openfold.py by tools/sync_common.py: edit it there.


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
GEOMETRY = np.array([[91, 4, 52, 6], [123, 8, -170, 15], [110, 20, 0, 180]])
KINDS = ("ALEMQK", "VIYFWT", "GPNDSR")
RESIDUES = np.array([[AMINO_ACIDS.index(letter) for letter in kind] for kind in KINDS])
STEP_LENGTH = 3.8  # Angstrom between the C-alpha atoms of successive residues


def synthetic_chains(kinds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Place residues of these kinds [P, N], each after the last three -> coordinates [P, N, 3]."""
    geometry = np.deg2rad(GEOMETRY[kinds]).transpose(2, 0, 1)
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
        shape, choices = (depth, length), RESIDUES.shape[1]
        mutation = rng.integers(1, choices, shape) * (rng.random(shape) < 0.3)
        mutation[0] = 0  # a residue that stays what it is
        partner = np.minimum(np.arange(length), contact_partners(coords))
        mutation = mutation[:, partner]  # partners share theirs
        tokens = RESIDUES[kind, (rng.integers(choices, size=length) + mutation) % choices]
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
    reader = beside("examples.proteins", "--structure")
    try:
        found = reader.read_proteins(args.msa, args.structure)
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

# --- process
# Copied from common/process.py by tools/sync_common.py: edit it there.
# This process: what torchrun says of it, its devices and settings, signals, the other processes.


def launched(name: str, otherwise: int = 0) -> int:
    """Return a number that torchrun sets; check_environment refuses what is none."""
    text = os.getenv(name, "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else otherwise


LAUNCHED = "RANK" in os.environ  # a plain run is the only process
RANK, WORLD_SIZE = launched("RANK"), launched("WORLD_SIZE", 1)


def check_environment() -> None:
    """Refuse what torchrun would not set: half of it, or what another launcher has left."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = {name: os.environ[name] for name in names if name in os.environ}
    numbers = all(launched(name, -1) >= 0 for name in {*names[:2], *texts})
    rank, size = launched("RANK"), launched("WORLD_SIZE")
    fit = rank < size >= launched("LOCAL_WORLD_SIZE", size) > launched("LOCAL_RANK")
    if texts and not (numbers and fit):
        text = ", ".join(f"{name} is {value!r}" for name, value in texts.items())
        fail(f"RANK and WORLD_SIZE must be numbers that fit together: {text}")


def choose_devices(args: argparse.Namespace) -> None:
    """Settle device and number of processes; refuse more than there are GPUs for."""
    gpu = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not gpu:
        fail("--device cuda: PyTorch finds no GPU here; use --device cpu or auto", 4)
    try:
        gpus = torch.cuda.device_count()
    except (RuntimeError, ValueError) as error:
        fail(f"*_VISIBLE_DEVICES: {error}")
    kinds = ("ROCR", "HIP", "CUDA") if torch.version.hip else ("CUDA",)
    listed = gpu and any(os.getenv(f"{kind}_VISIBLE_DEVICES") for kind in kinds)
    processes = WORLD_SIZE if LAUNCHED else args.num_gpus or (gpus if listed else 1)
    if args.num_gpus not in (None, processes):
        fail(f"--num-gpus {args.num_gpus}, but torchrun started {processes}")
    here = launched("LOCAL_WORLD_SIZE", 1) if LAUNCHED else processes
    if args.device != "cpu" and (gpu or args.num_gpus) and here > max(1, gpus):
        fail(f"{here} GPUs wanted, PyTorch finds {gpus}", 4)
    if gpu and WORLD_SIZE > 1 and launched("LOCAL_RANK", gpus) >= gpus > 1:
        rank = os.getenv("LOCAL_RANK", "not set")
        fail(f"LOCAL_RANK is {rank}, but PyTorch finds {gpus} GPUs", 4)
    args.device, args.num_gpus = "cuda" if gpu else "cpu", processes


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
        "device_name": [*names, os.uname().machine][0],
        "cpu_threads": torch.get_num_threads(),
        "triton": __import__("triton").__version__ if with_triton else None,
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def start_torchrun(processes: int, argv: list[str]) -> NoReturn:
    """Become torchrun, which starts this script so many times."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ["TINY_LAUNCHED"] = "1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    os.execv(sys.executable, [*torchrun, f"--nproc-per-node={processes}", __file__, *argv])


def answer_signals() -> None:
    """Have SIGTERM, as from a time limit, end a run as Ctrl-C does: it keeps what was measured."""

    def interrupt(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a process and its group may both get it
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if WORLD_SIZE == 1:
        return
    signals = {signal.SIGTERM}
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in the background of a shell
        signals.add(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # or PyTorch's waiting would print a stack

    def watch() -> None:  # in C++, waiting for other processes, the main thread hears no signal
        signal.sigwait(signals)
        _thread.interrupt_main(signal.SIGTERM)
        time.sleep(1)
        if signal.getsignal(signal.SIGTERM) == interrupt:
            say("error", "interrupted")
            os._exit(130)

    threading.Thread(target=watch, daemon=True).start()


def join_processes(args: argparse.Namespace) -> None:
    """Meet the other processes; only rank 0 prints from now on."""
    if args.device == "cuda":
        torch.cuda.set_device(launched("LOCAL_RANK") if torch.cuda.device_count() > 1 else 0)
    warnings.filterwarnings("ignore", ".*(barrier|broadcast_buffers|AccumulateGrad node's stream)")
    if args.cuda_graph:  # says PyTorch; NCCL then sees no lost rank
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    backend = "gloo" if args.device == "cpu" else None  # None: NCCL/RCCL
    try:
        store = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))[0]
        dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE)
    except (RuntimeError, ValueError) as error:
        said = f"MASTER_ADDR, MASTER_PORT: {str(error).splitlines()[0]}"
        fail(f"{WORLD_SIZE} processes cannot meet: {said}", 2 if type(error) is ValueError else 1)
    everyone = [{}] * WORLD_SIZE
    dist.all_gather_object(everyone, {"script": SCRIPT, **vars(args), "profile_dir": None})
    for name in everyone[0]:
        values = [theirs.get(name) for theirs in everyone]
        if any(value != values[0] for value in values):
            if RANK:  # rank 0 says it
                raise SystemExit(2)
            fail(f"the ranks were started with --{name.replace('_', '-')} {values}")
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


# --- end of process

# --- harness
# Copied from common/harness.py by tools/sync_common.py: edit it there.
# It knows the model by docstring, VERSION, FUSIONS, TRITON_FUSIONS, add_model_arguments
# (--batch-size), check_model_arguments, without_effect, use_settings, build_model (.config,
# .TARGETS), build_optimizer, make_batches (.next_batch(), .source); these use at_least,
# beside, fail and say.
SCRIPT = Path(__file__).stem
# What runs in place of training: functions of these names, in modules beside this script.
MODES = {"compare_fusion": "lab.modes", "verify_accuracy": "lab.modes"}
FORECAST = Path(__file__).resolve().parent / "lab" / "forecast.py"  # of the time on a CPU
PHASES = ("data", "forward", "backward", "optimizer")
GRAPH_PHASES = ("data", "graph")  # with --enable-cuda-graph
OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile
SETTINGS = ("batch_size", "num_steps", "warmup_steps", "learning_rate", "seed", "deterministic")
SETTINGS += ("use_amp", "amp_dtype", "matmul_precision")
SETTINGS += ("torch_compile", "torch_compile_mode", "cuda_graph")
PATIENCE = 600  # seconds without a step that ends
# A line is printed where all of its values were measured.
REPORT = """\
Residues with coordinates: {data[observed]} of {data[residues]}
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
Peak memory usage: {memory[peak_mb]:.1f} MB
Kernels per step: {kernels[per_step]}{all_off}{kernels[remark]}
Kernel reduction: {kernels[reduction_percent]:.1f} %
Host launches per step: {kernels[host_launches]}
FLOPs per step: {flops[gflop]:.4g} GFLOP, achieved {flops[achieved_tflops]:.3g} TFLOP/s
"""


def say(kind: str, message: str) -> None:
    """Print an "error" of this process, or one "note" for all processes, on stderr."""
    if kind == "error" or (not RANK and "TINY_LAUNCHED" not in os.environ):
        rank = f"rank {RANK}: " if RANK else ""
        print(f"{SCRIPT}.py: {kind}: {rank}{message}", file=sys.stderr)


def fail(message: str, status: int = 2) -> NoReturn:
    """Exit with one line on stderr about what the user can put right."""
    say("error", message)
    raise SystemExit(status)


def beside(module: str, flag: str) -> ModuleType:
    """Import a module of the folders beside this script, which a flag asks for."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]
        if package != module.partition(".")[0]:  # which that file imports
            fail(f"{flag} needs the package {package}: pip install {package}", 4)
        fail(f"{flag} needs {module.replace('.', '/')}.py beside this script ({error})", 4)


def progress(text: str = "") -> None:
    """Say what happens now; on a terminal in one line, which is cleared in the end."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]}\033[K", end="", flush=True)
    elif text:
        print(text, flush=True)


def at_least(low: int) -> Callable[[str], int]:
    """Make an argparse type: a whole number from `low` to 32 bits."""

    def whole_number(text: str) -> int:
        if not low <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"must be {low} or more, not {text}")
        return int(text)

    return whole_number


def build_parser() -> argparse.ArgumentParser:
    """Build the command line: arguments of the model, and of all versions."""
    description, _, examples = (__doc__ or "").partition("\nExamples:\n")  # python -OO has none
    parser = argparse.ArgumentParser(
        prog=f"{SCRIPT}.py",
        usage=argparse.SUPPRESS,
        description=description,
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    choices = ("default", *OWN_GRAPHS, "max-autotune-no-cudagraphs")
    group.add_argument("--torch-compile-mode", choices=choices, help="compile longer to run faster")

    add = parser.add_argument_group("training").add_argument
    add("--num-steps", type=at_least(1), default=50, help=f"measured steps {default}")
    add("--warmup-steps", type=at_least(0), help="before those, on several GPUs 12 (default: 5)")
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
    folder = f"pytorch_profiles_v{VERSION}"
    add("--profile-dir", type=Path, default=folder, metavar="DIR", help=f"for results {default}")

    add = parser.add_argument_group("modes").add_mutually_exclusive_group().add_argument
    add("--compare-fusion", **switch, help="all fusions off and as chosen, in turns")
    add("--verify-accuracy", **switch, help="outputs and gradients as with all off?")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check; what cannot work is one line on stderr and SystemExit (2 or 4)."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = re.findall(r"--[\w-]+", parser.format_help())
        near = difflib.get_close_matches(unknown[0], flags, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    flags = choose_fusions(args)
    check_model_arguments(args, parser)
    check_environment()
    choose_devices(args)
    check_training(args)
    notice_profilers(args)
    args.profile_dir /= f"rank{RANK}" if RANK else ""
    args.without_effect = without_effect(args)
    for flag, name, _ in FUSIONS:
        if name in flags and name in args.without_effect:
            switch = "enable" if flags[name] else "disable"
            say("note", f"--{switch}-{flag} has no effect: {args.without_effect[name]}")
    return args


def choose_fusions(args: argparse.Namespace) -> dict[str, bool]:
    """Turn each fusion on or off: by its own flag, which is returned, else by all-fusion."""
    if not FUSIONS and (args.all_fusion or args.compare_fusion):
        fail(f"--enable-all-fusion and --compare-fusion start with V2, {SCRIPT} has no fusions")
    flags = {name: on for _, name, _ in FUSIONS if (on := getattr(args, name)) is not None}
    if flags and all(flags.values()) and len(flags) < len(FUSIONS) and args.all_fusion is None:
        say("note", "all fusions are on by default; for single ones add --disable-all-fusion")
    for _, name, _ in FUSIONS:
        setattr(args, name, flags.get(name, args.all_fusion is not False))
    return flags


def check_training(args: argparse.Namespace) -> None:
    """Refuse what cannot work together; choose graph and warm-up where no flag does."""
    if args.torch_compile_mode and not args.torch_compile:
        fail(f"--torch-compile-mode {args.torch_compile_mode} needs --enable-torch-compile")
    if args.amp_dtype and not args.use_amp:
        fail(f"--amp-dtype {args.amp_dtype} needs --use-amp")
    if not 0 < args.learning_rate < math.inf:
        fail(f"--learning-rate must be above 0, not {args.learning_rate}")
    if args.batch_size % args.num_gpus:
        fail(f"--batch-size {args.batch_size} is not divisible by {args.num_gpus} GPUs")
    args.torch_compile = bool(args.torch_compile)
    args.amp_dtype = args.amp_dtype or "bfloat16"

    gpu, own_graph = args.device == "cuda", args.torch_compile_mode in OWN_GRAPHS
    least = 12 if gpu and args.num_gpus > 1 else 2  # DDP needs 11 before a capture
    if args.warmup_steps is None:
        args.warmup_steps = max(5, least)
    too_few = args.warmup_steps < least
    if args.cuda_graph is None:
        args.cuda_graph = VERSION > 3 and gpu and not (too_few or own_graph)
    if args.cuda_graph and own_graph:
        fail(f"--enable-cuda-graph: mode {args.torch_compile_mode} makes graphs of its own")
    if args.cuda_graph and not gpu:
        fail("--enable-cuda-graph: this run has no GPU", 4)
    if args.cuda_graph and too_few:
        say("note", f"--warmup-steps {args.warmup_steps} raised to {least} for --enable-cuda-graph")
        args.warmup_steps = least


def notice_profilers(args: argparse.Namespace) -> None:
    """Launch training steps alone where rocprofv3, rocprof-sys, nsys or ncu started the run."""
    signs = "ROCP_TOOL_LIBRARIES NSYS_PROFILING_SESSION_ID NV_NSIGHT_INJECTION_TRANSPORT_TYPE"
    signs = [name for name in signs.split() if name in os.environ]
    signs += re.findall("librocprof[^:]*", os.getenv("LD_PRELOAD", ""))
    if signs and not args.under_profiler:
        say("note", f"a GPU profiler started this run ({signs[0]}): --under-profiler is on")
        args.under_profiler = True
    if args.enable_rocm_profiling and args.device == "cpu":
        say("note", "--enable-rocm-profiling: no GPU here, so nothing is marked")
        args.enable_rocm_profiling = False


def all_off(args: argparse.Namespace, **changes) -> argparse.Namespace:
    """Return these arguments with everything off, and changes."""
    off = {name: False for _, name, _ in FUSIONS}
    off |= {"torch_compile": False, "torch_compile_mode": None, "without_effect": {}}
    return argparse.Namespace(**{**vars(args), **off, **changes})


class Trainer:
    """Model, optimizer and data, and their training step."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
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
                options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
                self.forward = nn.parallel.DistributedDataParallel(self.forward, **options)
        self.graph, self.phases = None, PHASES
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
            self.inputs[name].copy_(value.pin_memory(), non_blocking=True)  # without a wait
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
        """Return a function that tells whether the device has done all its work up to now."""
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

    def profile(self, steps: int = 1, **options) -> tuple[torch.profiler.profile, dict]:
        """Take steps under the PyTorch profiler; return it and its Chrome trace."""
        profile = torch.profiler.profile(acc_events=True, **options)
        with profile, self.ranges(torch.profiler.record_function):
            if WORLD_SIZE > 1:  # wait for the others' profilers, without a kernel
                dist.all_reduce(torch.zeros(1))
            for _ in range(steps):
                self.step()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:  # the path stands in the file, not escaped
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            return profile, json.loads(path.read_text())


@dataclass(frozen=True)
class Turn:
    """Steps in a row, the device idle before and after."""

    label: str  # the kind of steps
    seconds: float  # of all of them, by the host's clock
    phases: dict[str, list[float]]  # milliseconds of each phase in each step
    losses: list[float]
    peak: int  # bytes of GPU memory

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / len(self.losses)


def timing(turns: list[Turn], batch_size: int) -> dict:
    """Return speed, mean times of a step and its phases, time per step by turn."""
    if not (steps := sum(len(turn.losses) for turn in turns)):
        return {}
    seconds = sum(turn.seconds for turn in turns)
    phases = {name: np.concatenate([t.phases[name] for t in turns]) for name in turns[0].phases}
    totals = sum(phases.values())
    return {
        "steps": steps,
        "wall_s": seconds,
        "samples_per_sec": batch_size * steps / seconds,
        "batch_ms": 1e3 * seconds / steps,
        "turns_ms": [turn.step_ms for turn in turns if turn.losses],
        "batch_median_ms": float(np.median(totals)),
        "batch_p95_ms": float(np.quantile(totals, 0.95, method="higher")),
        **{f"{name}_ms": float(ms.mean()) for name, ms in phases.items()},
    }


class Run:
    """A run: arguments, trainer, results so far."""

    def __init__(self, args: argparse.Namespace, title: str = ""):
        self.args, self.title = args, title
        self.device = prepare(args)
        self.model: dict = {"config": {}, "data": {}}
        self.turns: list[Turn] = []
        self.held = 0  # bytes of GPU memory that it holds between turns
        self.peak = 0  # bytes in a measured step
        self.kernels: dict = {}
        self.flops = 0
        self.status, self.error = 1, "it did not finish"

    def start(self) -> None:
        """Build the trainer, say what it is, warm up."""
        args, before = self.args, gpu_memory(self.device)
        self.trainer = trainer = Trainer(args, self.device)
        self.model = {
            "config": asdict(trainer.model.config),
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "data": trainer.batches.source,
        }
        progress()
        print(self.headline(), flush=True)
        if args.torch_compile:
            progress("compiling in the first step; this can take minutes")
        elif not (trainer.gpu or args.under_profiler) and FORECAST.exists():
            steps = args.warmup_steps + args.num_steps
            beside("lab.forecast", "a CPU").forecast(sys.modules[__name__], trainer, steps)
        self.plan(args.warmup_steps, "warm-up step")
        self.take(args.warmup_steps - args.cuda_graph)
        if args.cuda_graph:
            trainer.capture()
            self.take(1)
        gc.collect()  # compiling leaves cycles that keep tensors
        self.held = gpu_memory(self.device) - before
        self.plan(args.num_steps, "step")

    def headline(self) -> str:
        """Name script, device, sizes, precision and fusions in one line."""
        args, config = self.args, self.model["config"]
        device = environment(self.device)["device_name"]
        device += f" x {WORLD_SIZE}" if WORLD_SIZE > 1 else ""
        sizes = ", ".join(f"{name} {n}" for name, n in config.items() if isinstance(n, int) and n)
        float32 = f"float32 (matmul precision {args.matmul_precision})"
        precision = args.amp_dtype if args.use_amp else float32
        names = (*(name for _, name, _ in FUSIONS), "torch_compile", "cuda_graph")
        on = [n for n in names if getattr(args, n) and n not in args.without_effect]
        fused = ", ".join(on or ["nothing fused"]).replace("_", "-")
        model = f"{self.model['parameters']:,} parameters, batch_size {args.batch_size}, {sizes}"
        return f"{SCRIPT} on {device}: {model}; {precision}; {fused}"

    def plan(self, steps: int, label: str) -> None:
        """Reset the progress counter for `steps` steps."""
        self.goal, self.label, self.done = steps, label, 0
        self.started = time.perf_counter()
        self.shown = self.started  # when progress was

    def take(self, steps: int) -> Turn:
        """Take steps in a row; a turn that is cut short has those until then."""
        prepare(self.args)  # another run may have had a turn
        trainer, losses = self.trainer, []
        trainer.synchronize()
        others = gpu_memory(self.device) - self.held  # by runs whose turn it is not
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
            self.turns.append(Turn(self.label, ended - began, phases, losses, peak))
            if self.label == "step":
                self.peak = max(peak, self.peak)
        return self.turns[-1]

    def losses(self, steps: int) -> Iterator[float]:
        """Take steps; yield the loss of each once the host has it, at most 100 steps later."""
        trainer, copied = self.trainer, []  # for each loss on its way: has it arrived?
        values = torch.empty(steps, pin_memory=trainer.gpu)
        for step in range(steps):
            values[step].copy_(trainer.step(), non_blocking=True)
            copied.append(trainer.done())
            most = 100 if step < steps - 1 else 0  # further ahead, signals would wait
            while copied and (len(copied) > most or copied[0]()):
                end = time.perf_counter() + PATIENCE
                while not copied[0]():  # in Python, which hears signals
                    if time.perf_counter() > end:
                        raise TimeoutError(f"no step ended in {PATIENCE} s: is a process lost?")
                copied.pop(0)
                yield float(values[step - len(copied)])

    def show(self, text: str) -> None:
        """Show progress now and then, and the time left until the last of the planned steps."""
        now, terminal = time.perf_counter(), sys.stdout.isatty()
        left = (now - self.started) / self.done * (self.goal - self.done)
        due = now > self.shown + (0.1 if terminal else 60) or not left
        if due or (self.done % self.args.log_interval == 0 and not terminal):
            self.shown = now
            progress(text + (f"  {timedelta(seconds=math.ceil(left))} left" if left else ""))

    def count(self, off: int | None = None) -> None:
        """Count in extra steps, and profile as flags ask; `off`: kernels with all off, if known."""
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
            write_profile(trainer)
        progress(f"{self.title}counting operations")
        self.flops = count_flops(args, trainer.batches.next_batch())
        del trainer, self.trainer  # its memory is wanted for all off
        if self.kernels and args != all_off(args):
            self.kernels["all_off"] = off = off or count_all_off(args)
            if off:
                self.kernels["reduction_percent"] = 100 * (1 - self.kernels["per_step"] / off)

    def result(self) -> dict:
        """Return the results so far."""
        args, flops = self.args, {}
        curve = [loss for turn in self.turns for loss in turn.losses]
        ends = {"initial": curve[0], "final": curve[-1]} if curve else {}
        times = timing([turn for turn in self.turns if turn.label == "step"], args.batch_size)
        if self.turns and (warmup := self.turns[0]).losses:
            times["warmup_first_step_ms"] = sum(ms[0] for ms in warmup.phases.values())
            times["warmup_ms"] = 1e3 * warmup.seconds
            if args.torch_compile and "batch_ms" in times:
                steady_ms = len(warmup.losses) * times["batch_ms"]
                times["compilation_overhead_ms"] = times["warmup_ms"] - steady_ms
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
            "kernels": self.kernels,
            "flops": flops,
            "loss": {"warmup_steps": args.warmup_steps, "curve": curve, **ends},
        }

    def write(self) -> None:
        """Write or replace <profile-dir>/<script>_summary.json, whole or not at all."""
        path = self.args.profile_dir / f"{SCRIPT}_summary.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            unfinished.write_text(json.dumps(self.result(), indent=1, default=str) + "\n")
            unfinished.replace(path)
        except OSError:
            for file in (unfinished, path):
                file.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def recorded(*runs: Run) -> Iterator[None]:
    """Write results, however the block ends; an error that the user can mend ends here, too."""
    directory, end = runs[-1].args.profile_dir, (runs[0].status, runs[0].error)
    for run in runs:
        run.write()  # for a run that is killed
    if WORLD_SIZE > 1:
        dist.barrier()
    try:
        yield
        for run in runs if WORLD_SIZE > 1 else ():
            dist.all_gather_object(peaks := [0.0] * WORLD_SIZE, run.peak)
            run.peak = max(peaks)
        end = 0, None
    except (Exception, KeyboardInterrupt) as error:
        end = 1, str(error)  # of a fault of this program, which explain() raises again
        end = explain(error, directory)
    finally:
        for run in runs:
            run.status, run.error = end
            try:
                run.write()
            except OSError as error:
                run.status, run.error = explain(error, directory)


def train(args: argparse.Namespace) -> dict:
    """Train, measure and count; the result is also in its JSON file."""
    run = Run(args)
    with recorded(run):
        run.start()
        with recorded_region([run.trainer] if args.enable_rocm_profiling else []):
            run.take(args.num_steps)
        if not args.under_profiler:
            run.count()
    return run.result()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether it is, or covers, one: the end of a capture raises an error of its own."""
    if error is None or isinstance(error, MemoryError):
        return error is not None
    match = re.search("out of memory|allocate memory|ALLOC_FAILED", str(error))
    return bool(match) or is_out_of_memory(error.__context__)


def explain(error: BaseException, directory: Path) -> tuple[int, str]:
    """Return exit status and message for an error that the user can mend; raise any other."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if is_out_of_memory(error):
        return 3, f"out of memory: lower --batch-size or --seq-len ({line})"
    compiler = type(error).__module__.startswith(("torch._", "triton.runtime"))
    if compiler or isinstance(error, (FloatingPointError, TimeoutError, BrokenPipeError)):
        return 1, line
    if isinstance(error, OSError) and error.filename is None:
        return 2, f"standard output: {error.strerror}"
    if isinstance(error, (OSError, json.JSONDecodeError)):  # half a trace is no JSON
        places = f"--profile-dir {directory}: cannot write there or in {tempfile.gettempdir()}"
        return 2, f"{places}, is there space left? ({line})"
    raise error


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


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - it was closed
    args = parse_args(argv)
    if args.num_gpus > 1 and not LAUNCHED:
        start_torchrun(args.num_gpus, sys.argv[1:] if argv is None else argv)
    if threading.current_thread() is threading.main_thread():
        answer_signals()
    mode = next((name for name in MODES if getattr(args, name)), None)
    try:
        if WORLD_SIZE > 1:
            join_processes(args)
        if mode:
            module = beside(MODES[mode], f"--{mode}".replace("_", "-"))
            status = getattr(module, mode)(sys.modules[__name__], args)
        else:
            status = finish(train(args))
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.filename is None:  # what is left goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status, message = explain(error, args.profile_dir)
        if not isinstance(error, BrokenPipeError):  # `... | head` has seen enough
            say("error", message)
    if WORLD_SIZE > 1:
        if status:  # a tidy end could wait for a process that is gone
            os._exit(status)
        gc.collect()  # what refers to the group keeps its threads alive
        dist.destroy_process_group()
    return status


# --- end of harness

# --- counts
# Copied from common/counts.py by tools/sync_common.py: edit it there.
# What extra steps count and record: kernels, operations, memory, profiles.
NO_WORK = ("_unsafe_view", "empty", "new_empty", "_record_function")  # and views move no data


class OperatorCounter(torch.utils._python_dispatch.TorchDispatchMode):
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
    events = trainer.profile()[1]["traceEvents"]
    kernels = sum(event.get("cat") == "kernel" for event in events)
    calls = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = sum("Launch" in name for name in calls)
    counts = {"unit": "kernels", "per_step": kernels, "remark": "", "host_launches": launches}
    return counts if kernels else {}  # a profiler without permission sees none


def count_all_off(args: argparse.Namespace) -> int | None:
    """Count the kernels with everything off; None where memory runs out."""
    progress("counting kernels with all fusions off")
    torch.compiler.reset()  # lets go of its graphs
    gc.collect()
    try:
        return count_kernels(Trainer(off := all_off(args), prepare(off)))["per_step"]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def count_flops(args: argparse.Namespace, batch: dict[str, Tensor]) -> int:
    """Count the floating-point operations of a step of the unfused model."""
    model = build_model(all_off(args, checkpoint_blocks=False), torch.device("meta"))
    with FlopCounterMode(display=False) as counter:
        model(**{name: value.to("meta") for name, value in batch.items()}).backward()
    return counter.get_total_flops()


def memory_of_a_step(trainer: Trainer) -> float:
    """Return the peak bytes of tensors in a step; a flag writes their course."""
    gc.collect()  # what is freed in the step was allocated in it
    events = trainer.profile(profile_memory=True)[1]["traceEvents"]
    tensors = [*trainer.model.parameters(), *trainer.model.buffers(), *trainer.inputs.values()]
    tensors += [t for state in trainer.optimizer.state.values() for t in state.values()]
    used = sum(tensor.nbytes for tensor in tensors)  # between two steps
    events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    events = [e for e in events if e["args"]["Device Type"] == int(trainer.gpu)]
    course = [(e["ts"] - events[0]["ts"], used := used + e["args"]["Bytes"]) for e in events]
    if trainer.args.enable_memory_profiling:
        rows = ["time_us,bytes\n", *(f"{time:.3f},{used:.0f}\n" for time, used in course)]
        (trainer.args.profile_dir / f"{SCRIPT}_memory_timeline.csv").write_text("".join(rows))
    return max((used for _, used in course), default=used)  # a graph allocates nothing


def gpu_memory(device: torch.device, statistic: str = "memory_allocated") -> int:
    """Return bytes by this statistic, with the pools that graphs keep; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # which any run may have made
    pools = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    used = getattr(torch.cuda, statistic)()
    return used + sum(s["total_size"] - s["allocated_size"] for s in pools)


def write_profile(trainer: Trainer) -> None:
    """Write tables of operators by time, and a trace, of three steps."""
    start = trainer.args.profile_dir / SCRIPT
    profile, trace = trainer.profile(steps=3, record_shapes=True)
    for clock in ("cpu", "device") if trainer.gpu else ("cpu",):
        table = profile.key_averages().table(f"self_{clock}_time_total", row_limit=40)
        path = Path(f"{start}_operators_by_{clock}_time.txt")
        path.write_text(table.replace("time total", "total"))
    with gzip.open(f"{start}_trace.json.gz", "wt") as file:
        json.dump(trace, file)


@contextlib.contextmanager
def recorded_region(trainers: list[Trainer]) -> Iterator[None]:
    """Have a profiler record what these run inside, in ranges (cudaProfilerStart, ROCTx)."""
    with contextlib.ExitStack() as at_end:
        if trainers:
            at_end.enter_context(torch.cuda.profiler.profile())
        if trainers and torch.version.hip:
            try:
                roctx = ctypes.CDLL("librocprofiler-sdk-roctx.so")
            except OSError as error:
                fail(f"--enable-rocm-profiling needs ROCm's rocprofiler-sdk-roctx: {error}", 4)
            roctx.roctxProfilerResume(0)
            at_end.callback(roctx.roctxProfilerPause, 0)
        for trainer in trainers:
            at_end.enter_context(trainer.ranges(torch.cuda.nvtx.range))
        yield


# --- end of counts

if __name__ == "__main__":
    sys.exit(main())

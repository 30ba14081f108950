#!/usr/bin/env python3
"""TinyOpenFold V1: the baseline. A small AlphaFold 2 Evoformer stack trained with plain PyTorch operations.

Nothing is fused here: every projection is a GEMM of its own, attention scores and their pair bias are materialised, and
the triangle multiplication computes its four projections and gates one by one. Every later version trains this same
model to this same loss; what they change is how many kernels that takes and how many bytes those kernels move.

The Evoformer follows the supplementary information of Jumper et al. 2021 (AF2 SI below), names follow OpenFold.

Examples:
  python tiny_openfold_v1.py                                       train on synthetic proteins with the default sizes
  python tiny_openfold_v1.py --msa FILE.a3m --structure FILE.cif   train on a real protein (needs gemmi)
  python tiny_openfold_v1.py --use-amp --enable-torch-compile      bfloat16, compiled
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
import re
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

    msa_dim: int = 64
    pair_dim: int = 128
    num_blocks: int = 4
    num_heads_msa: int = 4
    num_heads_pair: int = 4
    num_seqs: int = 16
    seq_len: int = 64
    outer_product_dim: int = 32
    transition_factor: int = 4


@dataclass(frozen=True)
class Fusions:
    """V1 fuses nothing."""


FUSIONS: tuple[tuple[str, str, str], ...] = ()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only this model has."""
    add = parser.add_argument_group("model").add_argument
    add("--msa-dim", type=at_least(1), default=64, metavar="C", help="channels of the MSA representation")
    add("--pair-dim", type=at_least(1), default=128, metavar="C", help="channels of the pair representation")
    add("--num-blocks", type=at_least(1), default=4, metavar="L", help="Evoformer blocks")
    add("--num-heads-msa", type=at_least(1), default=4, metavar="H", help="heads of the MSA attentions")
    add("--num-heads-pair", type=at_least(1), default=4, metavar="H", help="heads of the triangle attentions")
    add = parser.add_argument_group("data").add_argument
    add("--num-seqs", type=at_least(1), default=16, metavar="S", help="sequences per alignment")
    add("--seq-len", type=at_least(2), default=64, metavar="N", help="residues per sample")
    add("--batch-size", type=at_least(1), default=4, metavar="B", help="samples per step")
    add("--msa", type=Path, metavar="FILE.a3m", help="real alignment, query first (with --structure)")
    add("--structure", type=Path, metavar="FILE", help="its structure, PDB or mmCIF (with --msa)")


def check_model_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse sizes and inputs that do not fit together."""
    for name in ("msa", "pair"):
        dim, heads = getattr(args, f"{name}_dim"), getattr(args, f"num_heads_{name}")
        if dim % heads:
            parser.error(f"--{name}-dim {dim} must be divisible by --num-heads-{name} {heads}")
    if bool(args.msa) != bool(args.structure):
        parser.error("--msa and --structure belong together: give both, or neither for synthetic proteins")


# --- model

AMINO_ACIDS = "ARNDCQEGHILKMFPSTWYV"
UNKNOWN, GAP, MASK = 20, 21, 22
NUM_TOKENS = 23  # the 20 amino acids, unknown, gap, masked
MAX_OFFSET = 32  # relative positions are clipped at +-32 residues
NUM_BINS, FIRST_EDGE, LAST_EDGE = 64, 2.0, 22.0  # distogram, in Angstrom


def one_hot(tokens: Tensor, classes: int) -> Tensor:
    """tokens [...] -> float32 [..., classes]."""
    return (tokens[..., None] == torch.arange(classes, device=tokens.device)).float()


class InputEmbedder(nn.Module):
    """Alignment and residue offsets to the first MSA and pair representation (AF2 SI, algorithms 3 to 5)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear_tf_z_i = nn.Linear(NUM_TOKENS, config.pair_dim)
        self.linear_tf_z_j = nn.Linear(NUM_TOKENS, config.pair_dim)
        self.linear_tf_m = nn.Linear(NUM_TOKENS, config.msa_dim)
        self.linear_msa_m = nn.Linear(NUM_TOKENS, config.msa_dim)
        self.linear_relpos = nn.Linear(2 * MAX_OFFSET + 1, config.pair_dim)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, S, N] -> msa [B, S, N, c_m], pair [B, N, N, c_z]."""
        alignment = one_hot(tokens, NUM_TOKENS)
        query = alignment[:, 0]
        position = torch.arange(tokens.shape[-1], device=tokens.device)
        offset = (position[:, None] - position).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
        pair = self.linear_tf_z_i(query)[:, :, None] + self.linear_tf_z_j(query)[:, None]
        pair = pair + self.linear_relpos(one_hot(offset, 2 * MAX_OFFSET + 1))
        return self.linear_msa_m(alignment) + self.linear_tf_m(query)[:, None], pair


class GatedAttention(nn.Module):
    """Multi-head attention along one axis with a sigmoid gate on the output: what the four attentions share."""

    def __init__(self, dim: int, heads: int, fusions: Fusions):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.linear_q = nn.Linear(dim, dim, bias=False)
        self.linear_k = nn.Linear(dim, dim, bias=False)
        self.linear_v = nn.Linear(dim, dim, bias=False)
        self.linear_g = nn.Linear(dim, dim)
        self.linear_o = nn.Linear(dim, dim)

    def attend(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [B, R, N, C]: each of the R rows attends to itself; bias [B, H, N, N] is the same for all rows."""
        q, k, v, gate = (linear(x) for linear in (self.linear_q, self.linear_k, self.linear_v, self.linear_g))
        # Samples and rows in one dimension: torch.compile's attention pattern (PyTorch 2.11) fails on five dimensions.
        q, k, v = (t.flatten(0, 1).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-2, -1)  # [B x R, H, N, N]
        if bias is not None:
            scores = (scores.unflatten(0, x.shape[:2]) + bias[:, None]).flatten(0, 1)
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return self.linear_o(torch.sigmoid(gate) * out)


class MSARowAttentionWithPairBias(GatedAttention):
    """Residues of one sequence attend to each other, biased by the pair representation (AF2 SI, algorithm 7)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__(config.msa_dim, config.num_heads_msa, fusions)
        self.layer_norm_m = nn.LayerNorm(config.msa_dim)
        self.layer_norm_z = nn.LayerNorm(config.pair_dim)
        self.linear_z = nn.Linear(config.pair_dim, config.num_heads_msa, bias=False)

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        """msa [B, S, N, c_m], pair [B, N, N, c_z] -> update of msa."""
        bias = self.linear_z(self.layer_norm_z(pair)).permute(0, 3, 1, 2)
        return self.attend(self.layer_norm_m(msa), bias)


class MSAColumnAttention(GatedAttention):
    """The sequences attend to each other at one residue (AF2 SI, algorithm 8)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__(config.msa_dim, config.num_heads_msa, fusions)
        self.layer_norm_m = nn.LayerNorm(config.msa_dim)

    def forward(self, msa: Tensor) -> Tensor:
        """msa [B, S, N, c_m] -> update of msa."""
        return self.attend(self.layer_norm_m(msa.transpose(1, 2))).transpose(1, 2)


class Transition(nn.Module):
    """Two-layer perceptron on each position."""

    def __init__(self, dim: int, factor: int):
        super().__init__()
        self.layer_norm = nn.LayerNorm(dim)
        self.linear_1 = nn.Linear(dim, factor * dim)
        self.linear_2 = nn.Linear(factor * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> update of x."""
        return self.linear_2(F.relu(self.linear_1(self.layer_norm(x))))


class MSATransition(Transition):
    """AF2 SI, algorithm 9."""


class PairTransition(Transition):
    """AF2 SI, algorithm 15."""


class OuterProductMean(nn.Module):
    """Update of the pair representation from pairs of MSA columns (AF2 SI, algorithm 10)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden = config.outer_product_dim
        self.layer_norm = nn.LayerNorm(config.msa_dim)
        self.linear_1 = nn.Linear(config.msa_dim, hidden)
        self.linear_2 = nn.Linear(config.msa_dim, hidden)
        self.linear_out = nn.Linear(hidden * hidden, config.pair_dim)

    def forward(self, msa: Tensor) -> Tensor:
        """msa [B, S, N, c_m] -> update of pair [B, N, N, c_z]."""
        msa = self.layer_norm(msa)
        a, b = self.linear_1(msa), self.linear_2(msa) / msa.shape[1]
        return self.linear_out(torch.einsum("bsic,bsjd->bijcd", a, b).flatten(3))


class TriangleMultiplication(nn.Module):
    """What the two triangle multiplications share; they differ in which edges of the triangle they multiply."""

    equation: str

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        dim = config.pair_dim
        self.layer_norm_in = nn.LayerNorm(dim)
        self.linear_a_p = nn.Linear(dim, dim)
        self.linear_a_g = nn.Linear(dim, dim)
        self.linear_b_p = nn.Linear(dim, dim)
        self.linear_b_g = nn.Linear(dim, dim)
        self.linear_g = nn.Linear(dim, dim)
        self.linear_z = nn.Linear(dim, dim)
        self.layer_norm_out = nn.LayerNorm(dim)

    def forward(self, pair: Tensor) -> Tensor:
        """pair [B, N, N, c_z] -> update of pair."""
        pair = self.layer_norm_in(pair)
        a = torch.sigmoid(self.linear_a_g(pair)) * self.linear_a_p(pair)
        b = torch.sigmoid(self.linear_b_g(pair)) * self.linear_b_p(pair)
        product = torch.einsum(self.equation, a, b)
        return torch.sigmoid(self.linear_g(pair)) * self.linear_z(self.layer_norm_out(product))


class TriangleMultiplicationOutgoing(TriangleMultiplication):
    """Edge ij from the edges ik and jk (AF2 SI, algorithm 11)."""

    equation = "bikc,bjkc->bijc"


class TriangleMultiplicationIncoming(TriangleMultiplication):
    """Edge ij from the edges ki and kj (AF2 SI, algorithm 12)."""

    equation = "bkic,bkjc->bijc"


class TriangleAttentionStartingNode(GatedAttention):
    """Edges ij and ik, which start at the same node, attend to each other, biased by edge jk (AF2 SI, algorithm 13)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__(config.pair_dim, config.num_heads_pair, fusions)
        self.layer_norm = nn.LayerNorm(config.pair_dim)
        self.linear = nn.Linear(config.pair_dim, config.num_heads_pair, bias=False)

    def forward(self, pair: Tensor) -> Tensor:
        """pair [B, N, N, c_z] -> update of pair."""
        pair = self.layer_norm(pair)
        return self.attend(pair, self.linear(pair).permute(0, 3, 1, 2))


class TriangleAttentionEndingNode(TriangleAttentionStartingNode):
    """The same for edges that end at the same node: starting node on the transposed pairs (AF2 SI, algorithm 14)."""

    def forward(self, pair: Tensor) -> Tensor:
        """pair [B, N, N, c_z] -> update of pair."""
        return super().forward(pair.transpose(1, 2)).transpose(1, 2)


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

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        """msa [B, S, N, c_m], pair [B, N, N, c_z] -> both, updated."""
        msa = msa + self.msa_att_row(msa, pair)
        msa = msa + self.msa_att_col(msa)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer_product_mean(msa)
        pair = pair + self.tri_mul_out(pair)
        pair = pair + self.tri_mul_in(pair)
        pair = pair + self.tri_att_start(pair)
        pair = pair + self.tri_att_end(pair)
        pair = pair + self.pair_transition(pair)
        return msa, pair


def mean_per_protein(error: Tensor, counted: Tensor) -> Tensor:
    """Mean over the counted positions of each protein, then over the batch; both [B, ...] -> scalar."""
    error, counted = (error * counted).flatten(1), counted.flatten(1)
    return (error.sum(1) / counted.sum(1).clamp(min=1)).mean()


class DistogramHead(nn.Module):
    """Distances between residues as logits over bins (AF2 SI, section 1.9.8)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear = nn.Linear(config.pair_dim, NUM_BINS)

    def forward(self, pair: Tensor) -> Tensor:
        """pair [B, N, N, c_z] -> logits [B, N, N, 64], symmetric in the residues."""
        logits = self.linear(pair)
        return logits + logits.transpose(1, 2)

    @staticmethod
    def loss(logits: Tensor, coords: Tensor, observed: Tensor) -> Tensor:
        """Cross-entropy over the pairs of observed residues; coords [B, N, 3] in Angstrom, observed [B, N]."""
        distance = (coords[:, :, None] - coords[:, None]).norm(dim=-1)
        width = (LAST_EDGE - FIRST_EDGE) / NUM_BINS
        edges = torch.linspace(FIRST_EDGE + width, LAST_EDGE - width, NUM_BINS - 1, device=coords.device)
        bins = torch.bucketize(distance, edges)
        error = F.cross_entropy(logits.flatten(0, 2).float(), bins.flatten(), reduction="none")
        return mean_per_protein(error.view(bins.shape), observed[:, :, None] & observed[:, None])


class MaskedMSAHead(nn.Module):
    """The tokens behind the masked positions of the alignment (AF2 SI, section 1.9.9)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear = nn.Linear(config.msa_dim, NUM_TOKENS)

    def forward(self, msa: Tensor) -> Tensor:
        """msa [B, S, N, c_m] -> logits [B, S, N, 23]."""
        return self.linear(msa)

    @staticmethod
    def loss(logits: Tensor, true_tokens: Tensor, masked: Tensor) -> Tensor:
        """Cross-entropy over the masked positions; true_tokens and masked [B, S, N]."""
        error = F.cross_entropy(logits.flatten(0, 2).float(), true_tokens.flatten(), reduction="none")
        return mean_per_protein(error.view(masked.shape), masked)


class TinyOpenFold(nn.Module):
    """Input embedding, Evoformer stack, distogram and masked-MSA heads."""

    TARGETS = ("true_tokens", "masked", "coords", "observed")

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        self.config = config
        self.input_embedder = InputEmbedder(config)
        self.blocks = nn.ModuleList(EvoformerBlock(config, fusions) for _ in range(config.num_blocks))
        self.distogram = DistogramHead(config)
        self.masked_msa = MaskedMSAHead(config)

    def forward(
        self,
        tokens: Tensor,
        true_tokens: Tensor | None = None,
        masked: Tensor | None = None,
        coords: Tensor | None = None,
        observed: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """tokens [B, S, N] -> {"masked_msa": [B, S, N, 23], "distogram": [B, N, N, 64]}; with the targets -> the loss.

        The loss is 0.3 x distogram + 2.0 x masked MSA (AF2 SI, section 1.9).
        """
        msa, pair = self.input_embedder(tokens)
        for block in self.blocks:
            msa, pair = block(msa, pair)
        outputs = {"masked_msa": self.masked_msa(msa), "distogram": self.distogram(pair)}
        if true_tokens is None:
            return outputs
        distogram = self.distogram.loss(outputs["distogram"], coords, observed)
        return 0.3 * distogram + 2.0 * self.masked_msa.loss(outputs["masked_msa"], true_tokens, masked)


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model of these arguments. The same seed gives the same weights in every version and fusion setting."""
    fields = {name: getattr(args, name) for name in ModelConfig.__dataclass_fields__ if hasattr(args, name)}
    fusions = Fusions(**{attribute: getattr(args, attribute) for _, attribute, _ in FUSIONS})
    with device:
        model = TinyOpenFold(ModelConfig(**fields), fusions)
    if device.type != "meta":
        generator = torch.Generator().manual_seed(args.seed)
        state = model.state_dict()  # canonical names, so the order of the draws does not depend on what is fused
        for name in sorted(state):
            if name.endswith("bias"):
                state[name] = torch.zeros(state[name].shape)
            elif "layer_norm" not in name:
                shape = state[name].shape
                scale = (
                    0.1 if name.startswith(("distogram", "masked_msa")) else 1.0
                )  # near-uniform predictions at first
                state[name] = torch.empty(shape).normal_(std=scale * shape[1] ** -0.5, generator=generator)
        model.load_state_dict(state)
    return model


# --- data


@dataclass(frozen=True)
class Protein:
    """An alignment with the query in its first row, and the query's structure."""

    tokens: np.ndarray  # [depth, length], uint8
    coords: np.ndarray  # [length, 3], Angstrom: C-beta, or C-alpha of glycine
    observed: np.ndarray  # [length], bool: does the structure have this residue?


class ProteinBatches:
    """Random crops of proteins kept in host memory, with 15 % of the alignment masked.

    A batch is {"tokens", "true_tokens", "masked": [B, S, N], "coords": [B, N, 3], "observed": [B, N]}.
    """

    def __init__(self, proteins: list[Protein], args: argparse.Namespace, device: torch.device, seed: int):
        self.proteins, self.device = proteins, device
        self.batch_size, self.num_seqs, self.seq_len = args.batch_size, args.num_seqs, args.seq_len
        self.rng = np.random.default_rng(seed)

    def next_batch(self) -> dict[str, Tensor]:
        crops = [self._crop(self.proteins[i]) for i in self.rng.integers(len(self.proteins), size=self.batch_size)]
        true_tokens, coords, observed = (torch.from_numpy(np.stack(part)) for part in zip(*crops, strict=True))
        masked = torch.from_numpy(self.rng.random(true_tokens.shape, dtype=np.float32) < 0.15)
        masked[:, 0, 0] = True  # so that there is always something to predict
        batch = {
            "tokens": torch.where(masked, MASK, true_tokens),
            "true_tokens": true_tokens,
            "masked": masked,
            "coords": coords,
            "observed": observed,
        }
        return {name: to_device(value, self.device) for name, value in batch.items()}

    def _crop(self, protein: Protein) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        depth, length = protein.tokens.shape
        others = 1 + self.rng.permutation(depth - 1)[: self.num_seqs - 1]
        start = self.rng.integers(length - self.seq_len + 1)
        window = slice(start, start + self.seq_len)
        tokens = protein.tokens[np.concatenate(([0], others)), window].astype(np.int64)
        return tokens, protein.coords[window], protein.observed[window]


# Synthetic proteins: what kind of local structure a residue is in decides its geometry and its possible amino acids.
# Virtual bond angle and torsion between successive residues in degrees, each with its spread; helix, strand, loop.
GEOMETRY = np.array([[91, 4, 52, 6], [123, 8, -170, 15], [110, 20, 0, 180]])
RESIDUES = np.array([[AMINO_ACIDS.index(letter) for letter in kind] for kind in ("ALEMQK", "VIYFWT", "GPNDSR")])
STEP_LENGTH = 3.8  # Angstrom between the C-alpha atoms of successive residues


def synthetic_chains(kinds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Coordinates [P, N, 3] of chains of residues of the given kinds [P, N], each placed after the last three."""
    angle_mean, angle_spread, torsion_mean, torsion_spread = np.deg2rad(GEOMETRY[kinds]).transpose(2, 0, 1)
    angle = angle_mean + angle_spread * rng.uniform(-1, 1, kinds.shape)
    torsion = torsion_mean + torsion_spread * rng.uniform(-1, 1, kinds.shape)
    coords = np.zeros((*kinds.shape, 3))
    before, last = np.array([[0.0, 1, 0], [1, 0, 0]])[:, None].repeat(len(kinds), 1)  # the last two steps, unit length
    for i in range(1, kinds.shape[1]):
        normal = np.cross(before, last)
        normal /= np.linalg.norm(normal, axis=-1, keepdims=True)
        bend, turn = angle[:, i, None], torsion[:, i, None]
        sideways = np.cos(turn) * np.cross(normal, last) + np.sin(turn) * normal
        before, last = last, -np.cos(bend) * last + np.sin(bend) * sideways
        coords[:, i] = coords[:, i - 1] + STEP_LENGTH * last
    return coords


def contact_partners(coords: np.ndarray) -> np.ndarray:
    """For each residue [N] the one it touches (nearest to each other, under 8 Angstrom, 3 or more apart), or itself."""
    index = np.arange(len(coords))
    distance = np.linalg.norm(coords[:, None] - coords, axis=-1)
    distance[np.abs(index[:, None] - index) < 3] = np.inf
    nearest = distance.argmin(1)
    return np.where((nearest[nearest] == index) & (distance.min(1) < 8), nearest, index)


def synthetic_proteins(count: int, depth: int, length: int, seed: int) -> list[Protein]:
    """Proteins with helices, strands and loops, and families in which touching residues mutate together."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(3, size=(count, length))
    stays = rng.random((count, length)) < 0.9  # so that a stretch of one kind is 15 residues long on average
    for i in range(1, length):
        kinds[:, i] = np.where(stays[:, i], kinds[:, i - 1], kinds[:, i])
    proteins = []
    for kind, coords in zip(kinds, synthetic_chains(kinds, rng), strict=True):
        partner = contact_partners(coords)
        shape = (depth, length)
        choices = RESIDUES.shape[1]
        mutation = rng.integers(1, choices, shape) * (rng.random(shape) < 0.3)  # 0: the residue stays what it is
        mutation = mutation[:, np.minimum(np.arange(length), partner)]  # partners share theirs
        mutation[0] = 0
        tokens = RESIDUES[kind, (rng.integers(choices, size=length) + mutation) % choices]
        tokens[1:][rng.random((depth - 1, length)) < 0.03] = GAP
        observed = np.ones(length, dtype=bool)
        proteins.append(Protein(tokens.astype(np.uint8), coords.astype(np.float32), observed))
    return proteins


def read_a3m(path: Path) -> np.ndarray:
    """Tokens [depth, length] of an alignment in A3M format; insertions (lower case) are dropped."""
    content = read_bytes(path, "--msa")
    if b"\0" in content or not content.lstrip().startswith((b">", b"#")):
        raise UserError(f"--msa {path}: not an A3M file (it must begin with a line '>name')")
    rows: list[str] = []
    for line in content.decode("utf-8", "replace").splitlines():
        if line.startswith(">"):
            rows.append("")
        elif rows:
            rows[-1] += "".join(letter for letter in line.strip() if not letter.islower() and letter != ".")
    wrong = [i for i, row in enumerate(rows) if len(row) != len(rows[0])]
    if not rows or not rows[0] or wrong:
        where = f"sequence {wrong[0] + 1} has {len(rows[wrong[0]])} columns, the query" if wrong else "the query"
        raise UserError(f"--msa {path}: {where} has {len(rows[0]) if rows else 0} columns (lower case not counted)")
    code = np.full(128, UNKNOWN, dtype=np.uint8)
    code[[ord(letter) for letter in AMINO_ACIDS]] = np.arange(20)
    code[ord("-")] = GAP
    letters = np.array([[min(ord(letter), 127) for letter in row] for row in rows])
    if not (np.isin(letters, [ord(c) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ-*"])).all():
        raise UserError(f"--msa {path}: it has characters that are neither amino acids nor gaps")
    return code[letters]


def read_structure(path: Path, query: str) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates [length, 3] and observed [length] of the chain of a PDB or mmCIF file that matches the query."""
    try:
        import gemmi
    except ImportError as error:
        raise UserError("--structure needs the package gemmi: pip install gemmi", status=4) from error
    read_bytes(path, "--structure")
    try:
        structure = gemmi.read_structure(str(path))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--structure {path}: not a PDB or mmCIF file ({str(error).splitlines()[0]})") from error
    structure.setup_entities()
    best, best_identity = None, 0.0
    for chain in structure[0] if len(structure) else ():
        residues = list(chain.get_polymer().first_conformer())
        letters = gemmi.one_letter_code([residue.name for residue in residues]).upper()
        alignment = gemmi.align_string_sequences(list(query), list(letters), [])
        pairs = alignment_pairs(alignment.cigar_str())
        identity = sum(query[i] == letters[j] for i, j in pairs) / max(1, len(pairs))
        if len(pairs) * identity > (len(best) if best else 0) * best_identity:
            best, best_identity = [(i, residues[j]) for i, j in pairs], identity
    if not best or best_identity < 0.9 or len(best) < 0.5 * len(query):
        raise UserError(
            f"--structure {path}: no chain matches the query of the alignment (best: {len(best or ())} of {len(query)} "
            f"residues aligned, {100 * best_identity:.0f} % identical; at least half and 90 % are needed)"
        )
    coords, observed = np.zeros((len(query), 3), dtype=np.float32), np.zeros(len(query), dtype=bool)
    for i, residue in best:
        atom = residue.find_atom("CB", "*") or residue.find_atom("CA", "*")
        if atom:
            coords[i], observed[i] = atom.pos.tolist(), True
    return coords, observed


def alignment_pairs(cigar: str) -> list[tuple[int, int]]:
    """Positions (first, second) that a CIGAR string such as 3I70M2D aligns."""
    pairs, first, second = [], 0, 0
    for length, operation in re.findall(r"(\d+)([MID])", cigar):
        if operation == "M":
            pairs += [(first + i, second + i) for i in range(int(length))]
        first += int(length) * (operation in "MI")
        second += int(length) * (operation in "MD")
    return pairs


def read_protein(args: argparse.Namespace) -> Protein:
    """The protein of --msa and --structure. Lowers --num-seqs and --seq-len, and says so, where it has fewer."""
    tokens = read_a3m(args.msa)
    query = "".join((AMINO_ACIDS + "X-")[token] for token in tokens[0])
    coords, observed = read_structure(args.structure, query)
    for name, found in (("num_seqs", tokens.shape[0]), ("seq_len", tokens.shape[1])):
        if found < getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            note(f"{flag} {getattr(args, name)} lowered to {found}: {args.msa} has no more")
            setattr(args, name, found)
    return Protein(tokens, coords, observed)


def make_batches(args: argparse.Namespace, device: torch.device, seed: int) -> ProteinBatches:
    """The source of training batches: the protein of --msa and --structure, or 64 synthetic ones."""
    proteins = [read_protein(args)] if args.msa else synthetic_proteins(64, args.num_seqs, args.seq_len, seed)
    return ProteinBatches(proteins, args, device, seed)


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

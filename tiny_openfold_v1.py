#!/usr/bin/env python3
"""TinyOpenFold V1: the baseline, a small AlphaFold 2 Evoformer stack in plain PyTorch operations.

A protein is a chain of residues (amino acids). The input is an alignment (MSA): rows are related
proteins, columns are residues. Each place in it has a vector. So has each pair of residues ij (an
edge), to predict their distance. A block updates the MSA by attention within rows, then within
columns. In a row, edge ij adds a number to the score of residues i and j (pair bias). The block
updates edge ij by columns i and j (outer product), then by edges ik and jk (triangle multiplication
and attention). Names follow OpenFold; AF2 SI is the supplement of Jumper et al. 2021.

Nothing in the model is fused: each operation starts its own kernels (functions on the GPU). A
kernel reads from memory and writes to it, and this often takes longer than its arithmetic. Begin
with GatedAttention.attend: it stores all attention scores, and then reads them again. Later
versions train this same model to this same loss, with fewer kernels that move fewer bytes.

Examples:
  python tiny_openfold_v1.py                                       train on synthetic proteins
  python tiny_openfold_v1.py --msa FILE.a3m --structure FILE.cif   a real protein (needs gemmi)
  python tiny_openfold_v1.py --use-amp --enable-torch-compile      bfloat16, compiled
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
import threading
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


@dataclass(frozen=True)
class Fusions:
    """Which fusions are on: V1 has none, later versions have a field for each."""


# --- attention: update = linear_o(sigmoid(gate) * softmax(q k^T / sqrt(D) + bias) v)
class GatedAttention(nn.Module):
    """Attend along one axis in several heads, with a sigmoid gate: the base of four attentions."""

    def __init__(self, dim: int, heads: int, fusions: Fusions):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.linear_q = nn.Linear(dim, dim, bias=False)
        self.linear_k = nn.Linear(dim, dim, bias=False)
        self.linear_v = nn.Linear(dim, dim, bias=False)
        self.linear_g = nn.Linear(dim, dim)
        self.linear_o = nn.Linear(dim, dim)

    def attend(
        self, x: Tensor, bias: Tensor | None = None, present: Tensor | None = None
    ) -> Tensor:
        """Let the N vectors in each of the R rows of x [B, R, N, C] attend to each other.

        bias [B, H, N, N] and present [B, N] are the same for all rows. Where present is False there
        is padding, and nothing attends to it.
        """
        if present is not None:
            bias = x.new_zeros(1) if bias is None else bias
            # -1e4 fits float16 and gives a weight of 0; -inf gives NaN if all keys are padding
            bias = bias.masked_fill(~present[:, None, None], -1e4)
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


class MSARowAttentionWithPairBias(GatedAttention):
    """Let residues attend to each other, biased by their pair (AF2 SI, algorithm 7)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__(config.msa_dim, config.num_heads_msa, fusions)
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
        super().__init__(config.msa_dim, config.num_heads_msa, fusions)
        self.layer_norm_m = nn.LayerNorm(config.msa_dim)

    def forward(self, msa: Tensor, sequences: Tensor | None = None) -> Tensor:
        """Compute the update of msa [B, S, N, c_m]; sequences [B, S] are False for padding."""
        msa = self.layer_norm_m(msa.transpose(1, 2))
        return self.attend(msa, present=sequences).transpose(1, 2)


class TriangleAttentionStartingNode(GatedAttention):
    """Let edges ij and ik attend to each other, biased by edge jk (AF2 SI, algorithm 13)."""

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__(config.pair_dim, config.num_heads_pair, fusions)
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


# --- triangle multiplication: update = sigmoid(g) * linear_z(norm(sum_k a_ik * b_jk))
class TriangleMultiplication(nn.Module):
    """Update each edge from the two others of its triangles; `equation` multiplies these."""

    equation: str

    def __init__(self, config: ModelConfig, fusions: Fusions):
        super().__init__()
        dim = config.pair_dim
        self.layer_norm_in = nn.LayerNorm(dim)
        self.linear_a_p = nn.Linear(dim, dim)  # p: projection
        self.linear_a_g = nn.Linear(dim, dim)  # g: its gate
        self.linear_b_p = nn.Linear(dim, dim)
        self.linear_b_g = nn.Linear(dim, dim)
        self.linear_g = nn.Linear(dim, dim)
        self.linear_z = nn.Linear(dim, dim)
        self.layer_norm_out = nn.LayerNorm(dim)

    def forward(self, pair: Tensor, residues: Tensor | None = None) -> Tensor:
        """Compute the update of pair [B, N, N, c_z]; residues [B, N] are False for padding."""
        pair = self.layer_norm_in(pair)
        a = torch.sigmoid(self.linear_a_g(pair)) * self.linear_a_p(pair)
        b = torch.sigmoid(self.linear_b_g(pair)) * self.linear_b_p(pair)
        if residues is not None:
            a = a * (residues[:, :, None] & residues[:, None])[..., None]
        product = torch.einsum(self.equation, a, b)
        return torch.sigmoid(self.linear_g(pair)) * self.linear_z(self.layer_norm_out(product))


class TriangleMultiplicationOutgoing(TriangleMultiplication):
    """Update edge ij from the edges ik and jk (AF2 SI, algorithm 11)."""

    equation = "bikc,bjkc->bijc"


class TriangleMultiplicationIncoming(TriangleMultiplication):
    """Update edge ij from the edges ki and kj (AF2 SI, algorithm 12)."""

    equation = "bkic,bkjc->bijc"


# --- outer product mean: update_ij = linear_out(sum_s a_si (x) b_sj) / number of sequences
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
        a, b = self.linear_1(msa), self.linear_2(msa)
        if sequences is not None:
            a = a * sequences[:, :, None, None]
            dtype = torch.promote_types(msa.dtype, torch.float32)
            depth = sequences.sum(1, dtype=dtype)[:, None, None, None]
        outer = torch.einsum("bsic,bsjd->bijcd", a, b).flatten(3)
        # The bias is divided, too, as AlphaFold's code does.
        return self.linear_out(outer) / (depth + 1e-3)


# --- transition: update = linear_2(relu(linear_1(norm(x))))
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

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.linear_tf_z_i = nn.Linear(NUM_TOKENS, config.pair_dim)
        self.linear_tf_z_j = nn.Linear(NUM_TOKENS, config.pair_dim)
        self.linear_tf_m = nn.Linear(NUM_TOKENS, config.msa_dim)
        self.linear_msa_m = nn.Linear(NUM_TOKENS, config.msa_dim)
        self.linear_relpos = nn.Linear(2 * MAX_OFFSET + 1, config.pair_dim)

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


# --- model
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
        sequences, residues = (m if m is None else m.bool() for m in (sequences, residues))
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
        masked, observed = masked.bool(), observed.bool()  # 0 and 255, for example
        distogram = head_loss(outputs["distogram"], *self.distogram.targets(coords, observed))
        masked_msa = head_loss(outputs["masked_msa"], true_tokens, masked)
        return 0.3 * distogram + 2.0 * masked_msa


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
VERSION = 1
FUSIONS: tuple[tuple[str, str, str], ...] = ()  # flag, attribute, help


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


def without_effect(args: argparse.Namespace) -> dict[str, str]:
    """Return the fusions without effect under these arguments, on or off, and why."""
    return {}


def use_settings(args: argparse.Namespace) -> None:
    """Apply this version's process-wide settings of a run: there are none."""


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

"""Slow float64 reference of the AlphaFold 2 Evoformer block, for tests.

Written from the equations of the AlphaFold 2 supplementary information (algorithms 6 to 15), with
explicit indices, so that it shares no code with a fast implementation. There are no masks and no
dropout.

Every operation takes a flat dict `p` of parameters named relative to its module and returns the
update without the residual. Shapes: msa [B, S, N, c_m], pair [B, N, N, c_z].

Index letters: b batch; s sequences; i, j, k residues; r rows that attend each to itself; h head;
d, e channels inside a head or of a hidden layer; c input channel; o output channel.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Params = dict[str, Tensor]


def layer_norm(p: Params, name: str, x: Tensor) -> Tensor:
    """Normalise the last axis to mean 0 and (biased) variance 1, scale and shift each channel."""
    assert x.dtype == torch.float64, "the reference must be given float64 tensors"
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], eps=1e-5)


def linear(p: Params, name: str, x: Tensor, bias: bool = True) -> Tensor:
    """y_o = sum_c W_oc x_c + bias_o on the last axis."""
    y = torch.einsum("oc,...c->...o", p[f"{name}.weight"], x)
    assert bias == (f"{name}.bias" in p), f"{name}: the paper has it otherwise"
    return y + p[f"{name}.bias"] if bias else y


def transition(p: Params, x: Tensor) -> Tensor:
    """Algorithms 9 and 15, which differ only in what x is: layer norm, linear, relu, linear."""
    a = linear(p, "linear_1", layer_norm(p, "layer_norm", x))
    return linear(p, "linear_2", torch.where(a > 0, a, torch.zeros_like(a)))


def attention(p: Params, x: Tensor, heads: int, bias: Tensor | None = None) -> Tensor:
    """What algorithms 7, 8, 13 and 14 have in common: gated self-attention of each row of x.

    x [b, r, i, c] is normed; bias [b, i, j, h] is the same for every row.
    """

    def of_heads(y: Tensor) -> Tensor:
        return y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads)

    q, k, v = (of_heads(linear(p, f"linear_{name}", x, bias=False)) for name in "qkv")
    gate = of_heads(torch.sigmoid(linear(p, "linear_g", x)))
    logits = torch.einsum("brihd,brjhd->brijh", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        logits = logits + bias[:, None]
    a = torch.softmax(logits, dim=3)
    o = gate * torch.einsum("brijh,brjhd->brihd", a, v)
    return linear(p, "linear_o", o.reshape(*o.shape[:-2], -1))


def msa_att_row(p: Params, msa: Tensor, pair: Tensor, heads: int) -> Tensor:
    """Algorithm 7: residues of a sequence, with pair bias."""
    bias = linear(p, "linear_z", layer_norm(p, "layer_norm_z", pair), bias=False)
    return attention(p, layer_norm(p, "layer_norm_m", msa), heads, bias)


def msa_att_col(p: Params, msa: Tensor, heads: int) -> Tensor:
    """Algorithm 8: sequences at a residue."""
    columns = layer_norm(p, "layer_norm_m", msa).permute(0, 2, 1, 3)
    return attention(p, columns, heads).permute(0, 2, 1, 3)


def tri_att_start(p: Params, pair: Tensor, heads: int) -> Tensor:
    """Algorithm 13: a_ijk = softmax_k(q_ij . k_ik / sqrt(d) + b_jk)."""
    z = layer_norm(p, "layer_norm", pair)
    return attention(p, z, heads, linear(p, "linear", z, bias=False))


def tri_att_end(p: Params, pair: Tensor, heads: int) -> Tensor:
    """Algorithm 14: a_ijk = softmax_k(q_ij . k_kj / sqrt(d) + b_ki), so with columns j as rows."""
    z = layer_norm(p, "layer_norm", pair)
    bias = linear(p, "linear", z, bias=False)  # b_ki, and wanted is [b, i, k, h]
    update = attention(p, z.permute(0, 2, 1, 3), heads, bias.permute(0, 2, 1, 3))
    return update.permute(0, 2, 1, 3)


def outer_product_mean(p: Params, msa: Tensor) -> Tensor:
    """Algorithm 10; the index of the flattened product is (channel of a) * c + (channel of b).

    The mean is taken behind linear_out, bias included, as the code of AlphaFold and OpenFold does.
    """
    m = layer_norm(p, "layer_norm", msa)
    a, b = linear(p, "linear_1", m), linear(p, "linear_2", m)
    total = torch.einsum("bsid,bsje->bijde", a, b)
    return linear(p, "linear_out", total.reshape(*total.shape[:3], -1)) / (1e-3 + msa.shape[1])


def tri_mul(p: Params, pair: Tensor, subscripts: str) -> Tensor:
    """Algorithms 11 and 12, which differ only in the indices of the sum over k."""
    z = layer_norm(p, "layer_norm_in", pair)
    a = torch.sigmoid(linear(p, "linear_a_g", z)) * linear(p, "linear_a_p", z)
    b = torch.sigmoid(linear(p, "linear_b_g", z)) * linear(p, "linear_b_p", z)
    x = torch.einsum(subscripts, a, b)
    return torch.sigmoid(linear(p, "linear_g", z)) * linear(
        p, "linear_z", layer_norm(p, "layer_norm_out", x)
    )


def evoformer_block(
    p: Params, msa: Tensor, pair: Tensor, heads_msa: int, heads_pair: int
) -> tuple[Tensor, Tensor]:
    """Compute algorithm 6, lines 2 to 10, which are one block -> new msa and pair."""

    def of(module: str) -> Params:
        prefix = module + "."
        return {name[len(prefix) :]: value for name, value in p.items() if name.startswith(prefix)}

    msa = msa + msa_att_row(of("msa_att_row"), msa, pair, heads_msa)
    msa = msa + msa_att_col(of("msa_att_col"), msa, heads_msa)
    msa = msa + transition(of("msa_transition"), msa)
    pair = pair + outer_product_mean(of("outer_product_mean"), msa)
    pair = pair + tri_mul(of("tri_mul_out"), pair, "bikd,bjkd->bijd")  # outgoing edges
    pair = pair + tri_mul(of("tri_mul_in"), pair, "bkid,bkjd->bijd")  # incoming
    pair = pair + tri_att_start(of("tri_att_start"), pair, heads_pair)
    pair = pair + tri_att_end(of("tri_att_end"), pair, heads_pair)
    pair = pair + transition(of("pair_transition"), pair)
    return msa, pair


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Compute -log softmax(logits)[target] of [..., classes] and integer [...] -> [...]."""
    assert logits.dtype == torch.float64, "the reference must be given float64 tensors"
    error = F.cross_entropy(logits.flatten(0, -2), target.flatten().long(), reduction="none")
    return error.view(target.shape)


def mean_of_each(error: Tensor, counted: Tensor) -> Tensor:
    """The mean over what counts of each protein, at least one position, then over the proteins."""
    return torch.stack([e[c].mean() for e, c in zip(error, counted, strict=True)]).mean()


def distogram_loss(logits: Tensor, coords: Tensor, pair_valid: Tensor) -> Tensor:
    """Supplement section 1.9.8, of coords [B, N, 3] in Angstrom and the valid pairs [B, N, N].

    There are 63 boundaries between 64 equal bins from 2 to 22 Angstrom. The bin of a pair is the
    number of boundaries that its distance exceeds.
    """
    x = coords.detach().double()
    distance = (x[:, :, None, :] - x[:, None, :, :]).square().sum(dim=-1).sqrt()
    bins = sum((distance > 2.0 + 20.0 * k / 64).long() for k in range(1, 64))
    return mean_of_each(cross_entropy(logits, bins), pair_valid)


def masked_msa_loss(logits: Tensor, true_msa: Tensor, mask: Tensor) -> Tensor:
    """Supplement section 1.9.9: logits [B, S, N, 23], mask [B, S, N]."""
    return mean_of_each(cross_entropy(logits, true_msa), mask)

"""Slow float64 reference of the AlphaFold 2 Evoformer block, for tests.

Written from the equations of the AlphaFold 2 supplementary information (algorithms 6 to 15), with
explicit indices and nothing but elementary torch operations, so that it shares no code with a fast
implementation and can be differentiated by torch.autograd. There are no masks and no dropout.

Every operation takes a flat dict `p` of parameters named relative to its module and returns the
update without the residual. Shapes: msa [B, S, N, c_m], pair [B, N, N, c_z].

Index letters: b batch; s, t sequences; i, j, k residues; h head; d, e channels inside a head or of
a hidden layer; c input channel; o output channel. Weights are [output, input]; of a weight
[heads*d, c], row h*d + i belongs to head h, channel i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Params = dict[str, Tensor]

LAYER_NORM_EPS = 1e-5


def _layer_norm(p: Params, name: str, x: Tensor) -> Tensor:
    """Normalise the last axis to mean 0 and (biased) variance 1, scale and shift each channel."""
    assert x.dtype == torch.float64, "the reference must be given float64 tensors"
    size = x.shape[-1]
    centred = x - x.sum(dim=-1, keepdim=True) / size
    variance = (centred * centred).sum(dim=-1, keepdim=True) / size
    return centred / torch.sqrt(variance + LAYER_NORM_EPS) * p[f"{name}.weight"] + p[f"{name}.bias"]


def _linear_no_bias(p: Params, name: str, x: Tensor) -> Tensor:
    """y_o = sum_c W_oc x_c on the last axis."""
    assert f"{name}.bias" not in p, f"{name} has no bias in the paper"
    return torch.einsum("oc,...c->...o", p[f"{name}.weight"], x)


def _linear(p: Params, name: str, x: Tensor) -> Tensor:
    """y_o = sum_c W_oc x_c + bias_o on the last axis."""
    return torch.einsum("oc,...c->...o", p[f"{name}.weight"], x) + p[f"{name}.bias"]


def _heads(x: Tensor, heads: int) -> Tensor:
    """[..., heads*d] -> [..., heads, d]."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def _concat_heads(x: Tensor) -> Tensor:
    """[..., heads, d] -> [..., heads*d]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); in float64 this is safe for every |x| below 700."""
    return 1.0 / (1.0 + torch.exp(-x))


def _softmax(x: Tensor, dim: int) -> Tensor:
    """Compute exp(x) / sum exp(x).

    The largest entry is subtracted as a constant, which does not change the result.
    """
    e = torch.exp(x - x.amax(dim=dim, keepdim=True).detach())
    return e / e.sum(dim=dim, keepdim=True)


def _transition(p: Params, x: Tensor) -> Tensor:
    """Algorithms 9 and 15, which differ only in what x is: layer norm, linear, relu, linear."""
    x = _layer_norm(p, "layer_norm", x)  # line 1
    a = _linear(p, "linear_1", x)  # line 2
    return _linear(p, "linear_2", torch.where(a > 0, a, torch.zeros_like(a)))  # line 3


def msa_att_row(p: Params, msa: Tensor, pair: Tensor, heads: int) -> Tensor:
    """Compute algorithm 7, MSA row-wise gated self-attention with pair bias: -> [B, S, N, c_m]."""
    m = _layer_norm(p, "layer_norm_m", msa)  # line 1
    q, k, v = (_heads(_linear_no_bias(p, f"linear_{name}", m), heads) for name in "qkv")  # line 2
    # line 3: b_ij^h as [b, i, j, h]
    bias = _linear_no_bias(p, "linear_z", _layer_norm(p, "layer_norm_z", pair))
    g = _heads(_sigmoid(_linear(p, "linear_g", m)), heads)  # line 4
    # line 5: a_sij^h = softmax_j(q_si . k_sj / sqrt(d) + b_ij)
    logits = torch.einsum("bsihd,bsjhd->bsijh", q, k) / math.sqrt(q.shape[-1])
    logits = logits + bias[:, None, :, :, :]  # the same bias for every sequence s
    a = _softmax(logits, dim=3)
    o = g * torch.einsum("bsijh,bsjhd->bsihd", a, v)  # line 6
    return _linear(p, "linear_o", _concat_heads(o))  # line 7


def msa_att_col(p: Params, msa: Tensor, heads: int) -> Tensor:
    """Algorithm 8, MSA column-wise gated self-attention: [B, S, N, c_m] -> the same shape."""
    m = _layer_norm(p, "layer_norm_m", msa)  # line 1
    q, k, v = (_heads(_linear_no_bias(p, f"linear_{name}", m), heads) for name in "qkv")  # line 2
    g = _heads(_sigmoid(_linear(p, "linear_g", m)), heads)  # line 3
    # line 4: a_sti^h = softmax_t(q_si . k_ti / sqrt(d))
    a = _softmax(torch.einsum("bsihd,btihd->bstih", q, k) / math.sqrt(q.shape[-1]), dim=2)
    o = g * torch.einsum("bstih,btihd->bsihd", a, v)  # line 5
    return _linear(p, "linear_o", _concat_heads(o))  # line 6


def outer_product_mean(p: Params, msa: Tensor) -> Tensor:
    """Algorithm 10, outer product mean: msa [B, S, N, c_m] -> pair update [B, N, N, c_z]."""
    m = _layer_norm(p, "layer_norm", msa)  # line 1
    a = _linear(p, "linear_1", m)  # line 2: a_si, b_si
    b = _linear(p, "linear_2", m)
    # line 3: o_ij = flatten(sum_s(a_si outer b_sj)), index (channel of a) * c + (channel of b)
    total = torch.einsum("bsid,bsje->bijde", a, b)
    o = total.reshape(*total.shape[:3], total.shape[3] * total.shape[4])
    # line 4; the mean is taken behind it, bias included, as the code of AlphaFold and OpenFold does
    return _linear(p, "linear_out", o) / (1e-3 + msa.shape[1])


def _tri_mul(p: Params, pair: Tensor, subscripts: str) -> Tensor:
    """Algorithms 11 and 12, which differ only in the indices of the sum over k in line 4."""
    z = _layer_norm(p, "layer_norm_in", pair)  # line 1
    a = _sigmoid(_linear(p, "linear_a_g", z)) * _linear(p, "linear_a_p", z)  # line 2
    b = _sigmoid(_linear(p, "linear_b_g", z)) * _linear(p, "linear_b_p", z)
    g = _sigmoid(_linear(p, "linear_g", z))  # line 3
    x = torch.einsum(subscripts, a, b)  # line 4
    return g * _linear(p, "linear_z", _layer_norm(p, "layer_norm_out", x))


def tri_mul_out(p: Params, pair: Tensor) -> Tensor:
    """Compute algorithm 11, triangle multiplication of outgoing edges: sum_k a_ik * b_jk."""
    return _tri_mul(p, pair, "bikd,bjkd->bijd")


def tri_mul_in(p: Params, pair: Tensor) -> Tensor:
    """Compute algorithm 12, triangle multiplication of incoming edges: sum_k a_ki * b_kj."""
    return _tri_mul(p, pair, "bkid,bkjd->bijd")


def tri_att_start(p: Params, pair: Tensor, heads: int) -> Tensor:
    """Compute algorithm 13, triangle gated self-attention around the starting node."""
    z = _layer_norm(p, "layer_norm", pair)  # line 1
    q, k, v = (_heads(_linear_no_bias(p, f"linear_{name}", z), heads) for name in "qkv")  # line 2
    bias = _linear_no_bias(p, "linear", z)  # line 3: b_ij^h
    g = _heads(_sigmoid(_linear(p, "linear_g", z)), heads)  # line 4
    # line 5: a_ijk^h = softmax_k(q_ij . k_ik / sqrt(d) + b_jk)
    logits = torch.einsum("bijhd,bikhd->bijkh", q, k) / math.sqrt(q.shape[-1])
    logits = logits + bias[:, None, :, :, :]  # the same bias for every i
    a = _softmax(logits, dim=3)
    o = g * torch.einsum("bijkh,bikhd->bijhd", a, v)  # line 6
    return _linear(p, "linear_o", _concat_heads(o))  # line 7


def tri_att_end(p: Params, pair: Tensor, heads: int) -> Tensor:
    """Compute algorithm 14, triangle gated self-attention around the ending node."""
    z = _layer_norm(p, "layer_norm", pair)  # line 1
    q, k, v = (_heads(_linear_no_bias(p, f"linear_{name}", z), heads) for name in "qkv")  # line 2
    bias = _linear_no_bias(p, "linear", z)  # line 3: b_ij^h
    g = _heads(_sigmoid(_linear(p, "linear_g", z)), heads)  # line 4
    # line 5: a_ijk^h = softmax_k(q_ij . k_kj / sqrt(d) + b_ki)
    logits = torch.einsum("bijhd,bkjhd->bijkh", q, k) / math.sqrt(q.shape[-1])
    bias = torch.einsum("bkih->bikh", bias)
    logits = logits + bias[:, :, None, :, :]  # the same bias for every j
    a = _softmax(logits, dim=3)
    o = g * torch.einsum("bijkh,bkjhd->bijhd", a, v)  # line 6
    return _linear(p, "linear_o", _concat_heads(o))  # line 7


def evoformer_block(
    p: Params,
    msa: Tensor,
    pair: Tensor,
    heads_msa: int,
    heads_pair: int,
) -> tuple[Tensor, Tensor]:
    """Compute algorithm 6, lines 2 to 10, which are one block -> new msa and pair."""

    def of(module: str) -> Params:
        prefix = module + "."
        return {name[len(prefix) :]: value for name, value in p.items() if name.startswith(prefix)}

    msa = msa + msa_att_row(of("msa_att_row"), msa, pair, heads_msa)  # line 2
    msa = msa + msa_att_col(of("msa_att_col"), msa, heads_msa)  # line 3
    msa = msa + _transition(of("msa_transition"), msa)  # line 4
    pair = pair + outer_product_mean(of("outer_product_mean"), msa)  # line 5
    pair = pair + tri_mul_out(of("tri_mul_out"), pair)  # line 6
    pair = pair + tri_mul_in(of("tri_mul_in"), pair)  # line 7
    pair = pair + tri_att_start(of("tri_att_start"), pair, heads_pair)  # line 8
    pair = pair + tri_att_end(of("tri_att_end"), pair, heads_pair)  # line 9
    pair = pair + _transition(of("pair_transition"), pair)  # line 10
    return msa, pair


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Compute -log softmax(logits)[target] of [..., classes] and integer [...] -> [...]."""
    assert logits.dtype == torch.float64, "the reference must be given float64 tensors"
    shifted = logits - logits.amax(dim=-1, keepdim=True).detach()
    of_target = shifted.gather(-1, target[..., None].long())[..., 0]
    return torch.log(torch.exp(shifted).sum(dim=-1)) - of_target


def distogram_targets(coords: Tensor) -> Tensor:
    """Find distance bins, 0 to 63 as [B, N, N], of coords [B, N, 3] in Angstrom.

    Supplement section 1.9.8. The 64 bins between 2 and 22 Angstrom are equally wide, so the 63
    boundaries between them are 2 + 20 k / 64 with k from 1 to 63; the first and the last bin also
    take what lies outside. The bin of a pair is the number of boundaries that its distance exceeds.
    """
    x = coords.double()
    difference = x[:, :, None, :] - x[:, None, :, :]
    distance = torch.sqrt((difference * difference).sum(dim=-1))
    bins = torch.zeros_like(distance, dtype=torch.long)
    for k in range(1, 64):
        bins = bins + (distance > 2.0 + 20.0 * k / 64).long()
    return bins


def distogram_loss(logits: Tensor, coords: Tensor, pair_valid: Tensor) -> Tensor:
    """Mean cross entropy over the valid pairs of each protein, then over the proteins.

    logits [B, N, N, 64], pair_valid [B, N, N] bool, at least one true in each protein.
    """
    error = _cross_entropy(logits, distogram_targets(coords.detach()))
    return torch.stack([e[valid].mean() for e, valid in zip(error, pair_valid, strict=True)]).mean()


def masked_msa_loss(logits: Tensor, true_msa: Tensor, mask: Tensor) -> Tensor:
    """Mean cross entropy over the masked positions of each protein, then over the proteins.

    logits [B, S, N, 23], mask [B, S, N] bool, at least one true in each protein.
    """
    error = _cross_entropy(logits, true_msa)
    return torch.stack([e[masked].mean() for e, masked in zip(error, mask, strict=True)]).mean()

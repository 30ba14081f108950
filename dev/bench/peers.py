"""What other libraries offer for our operations and models, each given what its authors would.

That is its own layout where it has one, the types its newest kernels take, weights joined
beforehand, no mask where none is needed, and its settings for this GPU. A side that names no layout
begins with what our projection leaves and ends with what the next one takes, as in a model.

TurboPairFormer's wheel is of Python 3.14 and PyTorch 2.10. Elsewhere it is unpacked into a folder
of PYTHONPATH, and TURBOPAIRFORMER_ALLOW_JIT=1 builds its kernels with nvcc, in minutes. What is
imported of openfold3, `core/kernels/triton`, needs only gemmi.
"""

import importlib
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# cuEquivariance runs PyTorch's operators for up to 100 positions, unless it is told not to; it
# reads this on import.
os.environ.setdefault("CUEQ_TRIATTN_FALLBACK_THRESHOLD", "0")
os.environ.setdefault("CUEQ_TRIMUL_FALLBACK_THRESHOLD", "0")
os.environ.setdefault("OF3_TRITON_EXP2", "1")  # openfold3's faster exponential
Operation = Callable[..., Tensor]


def operation_of(module: str, name: str) -> Operation:
    """An operation of a library; without it, one that raises ImportError."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        return partial(absent, error)


cuequivariance = partial(operation_of, "cuequivariance_torch")
turbopairformer = partial(operation_of, "turbopairformer")
openfold3 = partial(operation_of, "openfold3.core.kernels.triton.evoformer")
LIBRARIES = (
    "cuequivariance-torch",
    "cuequivariance-ops-torch-cu13",
    "openfold3",
    "turbopairformer",
)


def versions() -> dict[str, str | None]:
    """Version of each library; None where it is not installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def absent(error: ImportError, *arguments: object, **options: object) -> NoReturn:
    """What is not installed, as an operation or a step: say so where it is called."""
    raise error


# Attention with pair bias


def gated(out: Tensor, gate: Tensor, gate_bias: Tensor) -> Tensor:
    """out and gate [B, R, H, N, D], gate_bias [H x D] -> sigmoid(gate + gate_bias) * out, [B, R, N,
    H x D]."""
    gate = gate.transpose(2, 3) + gate_bias.view(out.shape[2], -1).to(gate.dtype)
    return (torch.sigmoid(gate) * out.transpose(2, 3)).flatten(3)


def plain_attention(qkvg: Tensor, gate_bias: Tensor, bias: Tensor) -> Tensor:
    """qkvg [B, R, N, H, 4, D], bias [B, H, N, N]: with scores in memory, for torch.compile."""
    q, k, v, gate = qkvg.transpose(2, 3).unbind(4)
    out = (q @ k.mT / math.sqrt(q.shape[-1]) + bias[:, None]).softmax(-1) @ v
    return gated(out, gate, gate_bias)


def library_attention(qkvg: Tensor, gate_bias: Tensor, bias: Tensor) -> Tensor:
    """As V2 does: samples and heads in one dimension, so that the bias is the same for all rows and
    is not copied."""
    samples, rows, length, heads, _, dim = qkvg.shape
    q, k, v, gate = qkvg.permute(4, 1, 0, 3, 2, 5).flatten(2, 3).unbind()  # [R, B x H, N, D]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.flatten(0, 1)[None])
    gate = gate.unflatten(1, (samples, heads)) + gate_bias.view(heads, 1, dim).to(gate.dtype)
    out = torch.sigmoid(gate) * out.unflatten(1, (samples, heads))
    return out.permute(1, 0, 3, 2, 4).reshape(samples, rows, length, heads * dim)


def cuequivariance_attention(qkvg: Tensor, gate_bias: Tensor, bias: Tensor) -> Tensor:
    """NVIDIA's kernel for triangle attention without a mask, with the gate beside it."""
    q, k, v, gate = qkvg.transpose(2, 3).unbind(4)  # [B, R, H, N, D]
    return gated(cuequivariance("triangle_attention")(q, k, v, bias[:, None]), gate, gate_bias)


def turbopairformer_attention(qkvg: Tensor, gate_bias: Tensor, bias: Tensor) -> Tensor:
    """Kernels in CUDA by Stevens Institute, Lambda and OpenFold, with the gate beside them."""
    q, k, v, gate = qkvg.transpose(2, 3).unbind(4)  # [B, R, H, N, D]
    out = unmasked_turbopairformer(q, k, v, bias[:, None])
    return gated(out.transpose(2, 3), gate, gate_bias)


def unmasked_turbopairformer(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """q, k, v [B, R, H, N, D], bias [B, 1, H, N, N] -> [B, R, N, H, D]."""
    return turbopairformer("turbo_attention")(q, k, v, pair_bias=bias)


def openfold3_attention(qkvg: Tensor, gate_bias: Tensor, bias: Tensor) -> Tensor:
    """AMD's kernels in Triton, with the gate beside them."""
    q, k, v, gate = qkvg.unbind(4)  # [B, R, N, H, D]
    out = unmasked_openfold3(q, k, v, bias[:, None])
    return gated(out.transpose(2, 3), gate.transpose(2, 3), gate_bias)


def unmasked_openfold3(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """q, k, v [B, R, N, H, D], bias [B, 1, H, N, N]: the kernel wants a mask, which is 0 here."""
    samples, rows, length = q.shape[:3]
    mask = q.new_zeros(samples, rows, 1, 1, length)
    return openfold3("TritonEvoformer")(q, k, v, mask, bias)


def flexible_attention(rows: int) -> Operation:
    """FlexAttention compiled, whose score function adds the bias and so has its gradient: q, k, v
    [B x R, H, N, D] with this number R of rows, bias [B, H, N, N]."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        def biased(
            score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
        ) -> Tensor:
            return score + bias[batch // rows, head, query, key]

        return flex_attention(q, k, v, score_mod=biased)

    return torch.compile(attend)


def attention_peers(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor
) -> dict[str, tuple[Operation, list[Tensor]]]:
    """Attention alone, from the layout that a library takes to the one it leaves: operation and
    inputs of each. q, k, v [B, R, H, N, D], bias [B, H, N, N]."""
    # [R, B x H, N, D]
    heads_second = [t.transpose(0, 1).flatten(1, 2).contiguous() for t in (q, k, v)]
    rows_first = [t.flatten(0, 1) for t in (q, k, v)]
    heads_fourth = [t.transpose(2, 3).contiguous() for t in (q, k, v)]
    return {
        "SDPA": (F.scaled_dot_product_attention, [*heads_second, bias.flatten(0, 1)[None]]),
        "FlexAttention": (flexible_attention(q.shape[1]), [*rows_first, bias]),
        # before Blackwell its kernel reads the bias in float32
        "cuEquivariance": (cuequivariance("triangle_attention"), [q, k, v, bias[:, None].float()]),
        "TurboPairFormer": (unmasked_turbopairformer, [q, k, v, bias[:, None]]),
        "openfold3": (unmasked_openfold3, [*heads_fourth, bias[:, None]]),
    }


# Triangle multiplication


JOINED = {  # arguments of triangle_multiplicative_update, and the modules of ours that they join
    "norm_in": ("layer_norm_in",),
    "p_in": ("linear_a_p", "linear_b_p"),
    "g_in": ("linear_a_g", "linear_b_g"),
    "norm_out": ("layer_norm_out",),
    "p_out": ("linear_z",),
    "g_out": ("linear_g",),
}


def joined(parameter: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The weights and biases of that operation, out of those of ours by their names."""
    return {
        f"{name}_{kind}": torch.cat([parameter(f"{part}.{kind}") for part in parts])
        for name, parts in JOINED.items()
        for kind in ("weight", "bias")
    }


class JoinedTriangle(nn.Module):
    """A library's fused operation with the weights of our module: joined here and once, as its
    interface wants them.

    `dtype` of the parameters. Without `biased` the projections have no biases. cuEquivariance's
    newest kernels for training run if all is bfloat16, or made so by precision="bfloat16", without
    autocast, and for some lengths. Settings of its other kernels come with the package for this
    GPU; CUEQ_TRITON_TUNING=ONDEMAND tunes them anew, in minutes a shape.
    """

    def __init__(
        self,
        operation: Operation,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        biased: bool = True,
        **options: object,
    ):
        super().__init__()
        self.operation, self.options = operation, options
        for name, value in joined(weights.__getitem__).items():
            if biased or name.startswith("norm") or name.endswith("weight"):
                self.register_parameter(name, nn.Parameter(value.to(dtype)))

    def forward(self, pair: Tensor) -> Tensor:
        """pair [B, N, N, c_z] without padding -> update of pair."""
        return self.operation(pair, **dict(self.named_parameters()), **self.options)


def triangle_peers(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, JoinedTriangle]:
    """What libraries have for the whole module, outgoing, to be run without autocast on a pair of
    this type."""
    update = cuequivariance("triangle_multiplicative_update")
    if dtype != torch.bfloat16:
        return {"cuEquivariance": JoinedTriangle(update, weights, torch.float32)}
    turbo = turbopairformer("turbo_trimul")
    rounded = JoinedTriangle(update, weights, torch.float32, precision="bfloat16")
    return {
        "cuEquivariance": rounded,
        "cuEquivariance, bf16 parameters": JoinedTriangle(update, weights, dtype),
        "TurboPairFormer, no biases": JoinedTriangle(turbo, weights, torch.float32, biased=False),
    }

"""FLOPs of matrix products by their shapes, two for a multiplication and its addition, and the type
that they are computed in.

Most formulas are those of PyTorch's counter. Those here count what it does not know or counts
otherwise: convolutions with groups, recurrent layers, grouped products, products with vectors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache

import torch

from fusion_lab.fusions.call import Call
from fusion_lab.profile.kernels import category
from fusion_lab.profile.roofline import flop_counter

# A product by its name, of which the FLOPs are missing if there is no formula
PRODUCT = re.compile(r"conv(?!ert)|scaled_dot|rnn|attention|transformer")
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
}


def is_product(name: str) -> bool:
    """Does an operator multiply matrices, as its name says?"""
    return bool(PRODUCT.search(name)) or category(f"aten::{name}") == "GEMM"


def type_of(name: str, dtype: torch.dtype) -> str:
    """The type in which a GPU multiplies: TF32 where PyTorch is allowed to."""
    tf32 = torch.backends.cudnn.allow_tf32
    if "conv" not in name and "rnn" not in name:
        tf32 = torch.get_float32_matmul_precision() != "highest"
    return "TF32" if tf32 and dtype == torch.float32 else TYPES.get(dtype, str(dtype)[6:])


def convolution(x: str, out: str) -> Callable:
    """Of one pass: each weight of a filter is used once for each element of the result; of a
    transposed one, for each of the input."""

    def flop(arguments: dict, result) -> int:
        over = arguments[x] if arguments["transposed"] else arguments.get(out, result)
        passes = sum(arguments["output_mask"][:2]) if "output_mask" in arguments else 1
        return passes * 2 * over.numel() * math.prod(arguments["weight"].shape[1:])

    return flop


def recurrent(arguments: dict, result) -> int:
    """Each weight is used once for each time and sample."""
    x = arguments["input"]
    named = [value for name, value in arguments.items() if re.fullmatch(r"weight\d", name)]
    weights = arguments.get("weight") or named  # of a GPU, or oneDNN's
    return 2 * x.numel() // x.shape[-1] * sum(w.numel() for w in weights if w.dim() > 1)


def recurrent_backward(arguments: dict, result) -> int:
    """As much for the gradients of weights, and for those of input and states: also where nobody
    wants that of the first state."""
    return 2 * recurrent(arguments, result)


def grouped(arguments: dict, result) -> int:
    """Products of groups of rows; of two matrices, over groups of what is added up."""
    a = arguments.get("self", arguments.get("mat_a"))
    b = arguments.get("mat2", arguments.get("mat_b"))
    if a.dim() == b.dim() == 2:
        return 2 * a.numel() * b.shape[-1]
    return 2 * result.numel() * a.shape[-1]


def attention(arguments: dict, heads: int) -> int:
    """Each query meets each key, whose heads can be fewer, and each value, whose size can be
    another; backward the scores are computed again, and there are two products for each."""
    query = arguments["query"]
    size = arguments["value"].shape[-1]
    keys = arguments["key"].shape[3 - heads]
    scores, values = (3, 2) if any(name.startswith("grad_out") for name in arguments) else (1, 1)
    rows = query.numel() // query.shape[-1]
    return 2 * rows * keys * (scores * query.shape[-1] + values * size)


def heads_of(name: str, arguments: dict) -> int:
    """The dimension of the heads of an attention whose sequences are equally long; 0 of others."""
    if not {"query", "key", "value"} <= arguments.keys() or arguments["query"].dim() != 4:
        return 0
    ends = arguments.get("cum_seq_q", arguments.get("cu_seqlens_q"))
    return 1 if "scaled_dot" in name else 2 if ends is None else 0


FORMULAS: dict[str, Callable[[dict, object], int]] = {
    "convolution": convolution("input", ""),
    "convolution_backward": convolution("input", "grad_output"),
    "mkldnn_rnn_layer": recurrent,
    "mkldnn_rnn_layer_backward": recurrent_backward,
    "_cudnn_rnn": recurrent,
    "_cudnn_rnn_backward": recurrent_backward,
    "miopen_rnn": recurrent,
    "miopen_rnn_backward": recurrent_backward,
    "_grouped_mm": grouped,
    "_scaled_grouped_mm": grouped,
    "mv": lambda arguments, result: 2 * arguments["self"].numel(),
    "addmv": lambda arguments, result: 2 * arguments["mat"].numel(),
    "dot": lambda arguments, result: 2 * arguments["self"].numel(),
}


@cache
def registry() -> dict:
    """PyTorch's formulas by operator."""
    return flop_counter().flop_registry


def flop_of(call: Call) -> tuple[int | None, str]:
    """FLOPs of a call, None if there is no formula for it; and what is missing, where a formula
    does not take the call."""
    name = call.name
    arguments = call.named
    result = call.result
    formula = registry().get(getattr(call.function, "overloadpacket", call.function))
    try:
        if name in FORMULAS:
            flop = FORMULAS[name](arguments, result)
        elif heads := heads_of(name, arguments):
            flop = attention(arguments, heads)
        elif formula:
            flop = formula(*call.args, **call.kwargs, out_val=result)
        else:
            return None, "FLOPs" if is_product(name) else ""
    except Exception as error:  # a formula of PyTorch's refuses in a way of its own
        return None, f"FLOPs ({type(error).__name__}: {str(error).partition(chr(10))[0]:.80})"
    is_complex = isinstance(result, torch.Tensor) and result.is_complex()
    return (4 if is_complex else 1) * flop, ""  # four real products

"""What torch.compile changes of products beside fusing: pictures have their channels last, so that
no kernel turns them, the bias of a convolution is added by the kernel behind, and matrices are
padded whose rows begin at any element.

When it changes a layout, `decide_layout_opt` in torch/_inductor/graph.py tells. Whether padding
pays it measures; where rows begin at two bytes it does, as asynchronous copies need four.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from fusion_lab.fusions.record import Operator

TURNS = re.compile("nchwToNhwc|nhwcToNchw|tensorTransform")  # cuDNN's kernels that turn a picture
BIAS = re.compile("elementwise_kernel")  # PyTorch's that adds the bias
HALVES = ("bf16", "fp16")  # of two bytes
FEW = 300  # operators to a convolution from which layouts are left as they are


def gone(operator: Operator, kernel: str) -> str:
    """The part of a convolution in a compiled step that one of its kernels is not: turned, biased,
    or none."""
    if "convolution" not in operator.name:
        return ""
    if TURNS.search(kernel):
        return "turned"
    return "biased" if operator.name == "convolution" and BIAS.search(kernel) else ""


def laid_out(operators: Sequence[Operator]) -> list[Operator]:
    """The convolutions of pictures of which a compiler changes the layout."""
    found = [o for o in operators if "convolution" in o.name and len(o.operands[0][1]) == 4]
    weights = [o.operands[1][1] for o in found]
    grouped = any(o.groups > 1 and o.operands[1][1][1] > 1 for o in found)
    shrinks = any(2 * w[0] <= w[1] and w[2] > 1 for w in weights)
    small = all(w[0] <= 64 and w[1] <= 64 for w in weights)
    training = any(o.phase == "backward" for o in operators)
    few = len(operators) >= FEW * len(found)
    if grouped or few or (training and (shrinks or small)):
        return []
    return [o for o in found if o.operands[0][2][1:2] != (1,)]  # that is channels_last


def padding(operator: Operator) -> int:
    """Bytes of those operands of a product of matrices that a compiler copies into longer rows: to
    read and to write them."""
    if operator.name not in ("mm", "addmm") or operator.dtype not in HALVES:
        return 0
    odd = (shape for _, shape, strides in operator.operands if any(s % 2 for s in strides if s > 1))
    return sum(2 * 2 * math.prod(shape) for shape in odd)

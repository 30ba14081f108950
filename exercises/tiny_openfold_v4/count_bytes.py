#!/usr/bin/env python3
"""Bytes that V3 and V4 read and write for one part of the model, forward and backward, in bfloat16.

loss        of a head, and its gradient; the unit is the bytes of the logits
transition  with its residual, and all gradients; the unit is the bytes of x

Examples:
  python exercises/tiny_openfold_v4/count_bytes.py transition
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from fusion_lab.cli import documented_parser

os.environ["TRITON_INTERPRET"] = "1"  # Triton looks at it when it is imported

import torch
from torch import Tensor, nn

import tiny_openfold_v3 as v3
import tiny_openfold_v4 as v4
from fusion_lab.profile.traffic import Traffic

PROG = Path(__file__).name
LARGEST = 8  # operators in a list


def count(title: str, model: nn.Module, step: Callable[[], object], unit: Tensor) -> None:
    """Print what a step of a script's model moves, in the bytes of a tensor."""
    unit.grad = None  # or the backward pass adds to it
    with Traffic(model, {}, v4.NO_WORK) as traffic:
        step()
    print(f"{title}: {sum(traffic.by_operator.values()) / unit.nbytes:.1f} times")
    for name, moved in traffic.by_operator.most_common(LARGEST):
        if moved > unit.nbytes / 20:
            print(f"{moved / unit.nbytes:6.1f}  {name}")


def count_loss() -> None:
    logits = torch.randn(1, 1, 512, 64, dtype=torch.bfloat16, requires_grad=True)
    batch = logits, torch.randint(64, (1, 1, 512)), torch.ones(1, 1, 512)
    head = v3.DistogramHead(v3.ModelConfig(), v3.Fusions())
    count("V3's loss", head, lambda: v3.head_loss(*batch).backward(), logits)
    fused = v4.DistogramHead(v4.ModelConfig())
    count("V4's loss", fused, lambda: v4.HeadLoss.apply(*batch, False, 1.0).backward(), logits)


def count_transition() -> None:
    x = torch.randn(8192, 32, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    layer = v3.PairTransition(32, 4, v3.Fusions()).bfloat16()
    count("V3's transition", layer, lambda: (x + layer(x)).backward(grad), x)
    fused = v4.PairTransition(32, 4, v4.Fusions()).bfloat16()
    count("V4's transition", fused, lambda: fused(x).backward(grad), x)


PARTS = {"loss": count_loss, "transition": count_transition}


def main(argv: list[str] | None = None) -> int:
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("part", choices=PARTS, help="what to count")
    PARTS[parser.parse_args(argv).part]()
    return 0


if __name__ == "__main__":
    sys.exit(main())

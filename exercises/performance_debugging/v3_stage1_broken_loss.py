#!/usr/bin/env python3
"""TinyLlama V3, stage 1: it trains, but its loss begins where no loss should begin.

Takes the arguments of tiny_llama_v3.py. What differs from it is below.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import tiny_llama_v3 as v3

v3.SCRIPT, v3.__file__ = Path(__file__).stem, __file__  # its results bear this name


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model as its layers draw their weights;

    V3 goes on here and draws them again with a deviation of 0.02.
    """
    fields = {
        name: getattr(args, name)
        for name in v3.ModelConfig.__dataclass_fields__
        if hasattr(args, name)
    }
    fusions = v3.Fusions(**{attribute: getattr(args, attribute) for _, attribute, _ in v3.FUSIONS})
    torch.manual_seed(args.seed)
    with device:
        return v3.TinyLlama(v3.ModelConfig(**fields), fusions)


v3.build_model = build_model

if __name__ == "__main__":
    sys.exit(v3.main())

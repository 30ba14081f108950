#!/usr/bin/env python3
"""TinyLlama V3, stage 2: the loss is right, and every step takes too long.

Takes the arguments of tiny_llama_v3.py. What differs from it is below.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

import tiny_llama_v3 as v3

v3.SCRIPT, v3.__file__ = Path(__file__).stem, __file__  # its results bear this name


class CausalAttention:
    """PyTorch's attention in place of V3's kernel, with keys and values repeated for the heads
    of their group."""

    @staticmethod
    def apply(qkv: Tensor, num_heads: int) -> Tensor:
        """Packed heads [B, S, H + 2 K, D] -> causal attention [B, S, H, D]."""
        num_kv_heads = (qkv.shape[2] - num_heads) // 2
        heads = qkv.permute(0, 2, 3, 1).contiguous()  # [B, H + 2 K, D, S], channels first
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        k, v = (t.repeat_interleave(num_heads // num_kv_heads, dim=1) for t in (k, v))
        # [B, H, S, D] by shape, but not in memory: .contiguous()
        q, k, v = (t.transpose(2, 3) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


v3.CausalAttention = CausalAttention

if __name__ == "__main__":
    sys.exit(v3.main())

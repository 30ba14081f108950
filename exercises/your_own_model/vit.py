"""A small vision transformer in plain PyTorch (Dosovitskiy et al. 2021), or the place of a model of
your own.

Functions without arguments return (model, batch), so that model(**batch) is the loss: the form that
`find-fusions --model FILE.py:FUNCTION` takes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-5


def add_norm(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream x [..., C] with an update, and the layer norm of that in the update's
    type, for the next GEMM."""
    x = x + update
    return x, F.layer_norm(x, x.shape[-1:], weight, bias, EPS).to(update.dtype)


class Attention(nn.Module):
    """x, result [B, T, C]."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Take the stream x and an update [B, T, C] still to be added; return both a block later."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        x, normed = add_norm(x, update, self.norm_1.weight, self.norm_1.bias)
        x, normed = add_norm(x, self.attention(normed), self.norm_2.weight, self.norm_2.bias)
        return x, self.mlp(normed)


class VisionTransformer(nn.Module):
    """images [B, 3, size, size], labels [B] -> the loss."""

    def __init__(self, size: int, patch: int, dim: int, depth: int, heads: int, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        update = self.patches(images).flatten(2).mT
        x = self.positions.expand(len(images), -1, -1)
        for block in self.blocks:
            x, update = block(x, update)
        _, normed = add_norm(x, update, self.norm.weight, self.norm.bias)
        return F.cross_entropy(self.head(normed.mean(1)), labels)


def build(
    batch: int, size: int, patch: int, dim: int, depth: int, heads: int, classes: int
) -> tuple[VisionTransformer, dict[str, Tensor]]:
    """The model with random weights, and a random batch."""
    torch.manual_seed(0)
    model = VisionTransformer(size, patch, dim, depth, heads, classes)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))
    return model, {"images": images, "labels": labels}


def small() -> tuple[VisionTransformer, dict[str, Tensor]]:
    """ViT-S/16 without its class token: 128 images, 196 patches each."""
    return build(batch=128, size=224, patch=16, dim=384, depth=12, heads=6, classes=1000)


def tiny() -> tuple[VisionTransformer, dict[str, Tensor]]:
    """For Triton's interpreter."""
    return build(batch=2, size=24, patch=8, dim=48, depth=2, heads=2, classes=10)

"""Training steps that nobody tuned for find_fusions.py: compact models in plain PyTorch.

Each function returns (model, batch) at the sizes of the study, or with `small=True` at sizes for a
laptop, where all of them build and train in seconds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A pre-norm transformer layer; attention in plain operations or by SDPA."""

    def __init__(self, width: int, heads: int, plain: bool, dropout: float = 0.0):
        super().__init__()
        self.heads, self.plain, self.dropout = heads, plain, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        """[B, S, D] to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.plain:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            y = F.dropout(scores.softmax(-1), self.dropout, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        y = self.out(y.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(y, self.dropout, self.training)


class Transformer(nn.Module):
    """Layers between an embedding of tokens or patches and logits."""

    def __init__(self, inputs: nn.Module, layers: list[nn.Module], width: int, classes: int):
        super().__init__()
        self.inputs, self.layers = inputs, nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor, causal: bool = False) -> Tensor:
        """Tokens [B, S] or patches [B, S, P], and a label for each sample or each place."""
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x, causal)
        x = self.norm(x if labels.dim() == 2 else x.mean(1))
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def vision_transformer(small: bool = False):
    width, layers, batch, length = (32, 2, 2, 16) if small else (768, 6, 64, 196)
    blocks = [Block(width, width // 16 if small else 12, plain=True) for _ in range(layers)]
    model = Transformer(nn.Linear(768, width), blocks, width, 1000)
    x, labels = torch.randn(batch, length, 768), torch.randint(1000, (batch,))
    return model, {"x": x, "labels": labels}


def gpt(small: bool = False):
    width, layers, batch, length, words = (32, 2, 2, 16, 100) if small else (768, 6, 8, 1024, 50304)
    blocks = [Block(width, 2 if small else 12, plain=False) for _ in range(layers)]
    model = Transformer(nn.Embedding(words, width), blocks, width, words)
    tokens = torch.randint(words, (batch, length))
    return model, {"x": tokens, "labels": tokens.roll(-1, 1), "causal": True}


def encoder_with_dropout(small: bool = False):
    width, layers, batch, length, words = (32, 2, 2, 16, 100) if small else (768, 6, 32, 256, 30522)
    blocks = [Block(width, 2 if small else 12, plain=True, dropout=0.1) for _ in range(layers)]
    model = Transformer(nn.Embedding(words, width), blocks, width, words)
    tokens = torch.randint(words, (batch, length))
    return model, {"x": tokens, "labels": tokens}


class Residual(nn.Module):
    """A residual block of a diffusion U-Net: group norm, SiLU, convolution, with a time."""

    def __init__(self, channels: int, out: int, time: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, out)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    """Predicts the noise in a noisy picture."""

    def __init__(self, width: int):
        super().__init__()
        wide, self.width = 2 * width, width
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down1, self.down2 = Residual(width, width, width), Residual(width, wide, width)
        self.middle = Residual(wide, wide, width)
        self.up2, self.up1 = Residual(2 * wide, wide, width), Residual(wide + width, width, width)
        self.norm = nn.GroupNorm(8, width)

    def forward(self, picture: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Pictures and noise [B, 3, H, W], times [B] between 0 and 1."""
        mixed = torch.lerp(picture, noise, time[:, None, None, None])
        steps = torch.arange(self.width // 2, device=time.device)
        angles = time[:, None] * torch.exp(-0.3 * steps)
        time = torch.cat([angles.sin(), angles.cos()], 1)
        one = self.down1(self.first(mixed), time)
        two = self.down2(F.avg_pool2d(one, 2), time)
        x = F.interpolate(self.middle(F.avg_pool2d(two, 2), time), scale_factor=2)
        x = F.interpolate(self.up2(torch.cat([x, two], 1), time), scale_factor=2)
        x = self.last(F.silu(self.norm(self.up1(torch.cat([x, one], 1), time))))
        return F.mse_loss(x.float(), noise)


def unet(small: bool = False):
    width, batch, size = (16, 2, 16) if small else (128, 32, 64)
    picture = torch.randn(batch, 3, size, size)
    noise, time = torch.randn_like(picture), torch.rand(batch)
    return UNet(width), {"picture": picture, "noise": noise, "time": time}


class MessagePassing(nn.Module):
    """Rounds of messages along the edges of a graph, added up where they arrive."""

    def __init__(self, width: int, rounds: int):
        super().__init__()
        self.edges = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.nodes = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(rounds))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, y: Tensor) -> Tensor:
        """Nodes [N, D], edges from `source` [E] to `target` [E], a number for each node."""
        for edge, node, norm in zip(self.edges, self.nodes, self.norms, strict=True):
            message = F.silu(edge(torch.cat([x[source], x[target]], 1)))
            total = torch.zeros_like(x).index_add(0, target, message.to(x.dtype))
            x = x + F.silu(node(torch.cat([norm(x), total], 1)))
        return (self.head(x).float()[:, 0] - y).pow(2).mean()


def message_passing(small: bool = False):
    width, rounds, nodes, edges = (16, 2, 50, 200) if small else (128, 4, 50_000, 400_000)
    source, target = torch.randint(nodes, (2, edges))
    batch = {"x": torch.randn(nodes, width), "y": torch.randn(nodes)}
    return MessagePassing(width, rounds), {**batch, "source": source, "target": target}


class Bottleneck(nn.Module):
    """A block of a ResNet."""

    def __init__(self, channels: int, inner: int, out: int, stride: int):
        super().__init__()
        sizes = ((channels, inner, 1, 1), (inner, inner, 3, stride), (inner, out, 1, 1))
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.skip = nn.Sequential()
        if channels != out:
            self.skip = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        y = F.relu(self.norms[1](self.convs[1](y)))
        return F.relu(self.skip(x) + self.norms[2](self.convs[2](y)))


class ResNet(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        blocks, channels = [], width
        for stage in range(4):
            out = 4 * width * 2**stage
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Bottleneck(channels, out // 4, out, stride))
                channels = out
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, 1000)

    def forward(self, picture: Tensor, labels: Tensor) -> Tensor:
        """Pictures [B, 3, H, W]."""
        return F.cross_entropy(self.head(self.blocks(self.first(picture)).mean((2, 3))), labels)


def resnet(small: bool = False):
    width, depth, batch, size = (8, 1, 2, 32) if small else (64, 2, 64, 224)
    picture, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    return ResNet(width, depth), {"picture": picture, "labels": labels}


class StateSpace(nn.Module):
    """A gated linear recurrence, as a scan in log2(S) rounds of whole tensors."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        """[B, S, D] to the same: h(t) = a(t) h(t - 1) + b(t), along S."""
        decay, value, gate, keep = self.into(self.norm(x)).float().chunk(4, -1)
        a = torch.sigmoid(decay)
        h = (1 - a) * torch.tanh(value)
        shift = 1
        while shift < x.shape[1]:
            before = F.pad(h[:, :-shift], (0, 0, shift, 0))
            h = h + a * before
            a = a * F.pad(a[:, :-shift], (0, 0, shift, 0), value=1.0)
            shift *= 2
        return x + self.out(h * F.silu(gate) + torch.sigmoid(keep))


def state_space(small: bool = False):
    width, layers, batch, length, words = (16, 2, 2, 16, 100) if small else (512, 3, 8, 512, 8192)
    blocks = [StateSpace(width) for _ in range(layers)]
    model = Transformer(nn.Embedding(words, width), blocks, width, words)
    tokens = torch.randint(words, (batch, length))
    return model, {"x": tokens, "labels": tokens.roll(-1, 1)}


class Experts(nn.Module):
    """A mixture of experts of fixed capacity: each expert takes the tokens that want it most."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.up = nn.Parameter(0.02 * torch.randn(experts, width, 4 * width))
        self.down = nn.Parameter(0.02 * torch.randn(experts, 2 * width, width))

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        """[B, S, D] to the same."""
        tokens = self.norm(x).flatten(0, 1)
        weight = self.router(tokens).float().softmax(-1)
        share, chosen = weight.topk(2 * len(tokens) // weight.shape[1], 0)
        left, right = (tokens[chosen.t()] @ self.up).chunk(2, -1)
        y = (F.silu(left) * right) @ self.down * share.t()[..., None]
        total = torch.zeros_like(tokens, dtype=torch.float32)
        return x + total.index_add(0, chosen.t().flatten(), y.flatten(0, 1).float()).view_as(x)


def mixture_of_experts(small: bool = False):
    width, layers, batch, length, words = (32, 1, 2, 16, 100) if small else (768, 2, 8, 512, 16384)
    blocks = []
    for _ in range(layers):
        blocks += [Block(width, 2 if small else 12, plain=False), Experts(width, 4 if small else 8)]
    model = Transformer(nn.Embedding(words, width), blocks, width, words)
    tokens = torch.randint(words, (batch, length))
    return model, {"x": tokens, "labels": tokens.roll(-1, 1), "causal": True}


MODELS = {
    "vision transformer": vision_transformer,
    "GPT": gpt,
    "encoder with dropout": encoder_with_dropout,
    "diffusion U-Net": unet,
    "message passing": message_passing,
    "ResNet": resnet,
    "state space": state_space,
    "mixture of experts": mixture_of_experts,
}

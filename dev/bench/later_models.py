"""Steps that find_fusions.py's rules were not written on, as ordinary training files take them. The
first six a graph cannot have: they wait for the device, or bring something from the host.

Each entry of LATER is a function without arguments that returns (model, batch), as in
models_for_find_fusions.py.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dev.bench.models_for_find_fusions import Made, Make, WithLoss, transformer

# --- what waits for the device


class NeRF(nn.Module):
    """Colours of rays through a field of density and colour (Mildenhall et al. 2020). The backward
    pass of cumprod asks whether there are zeros."""

    def __init__(self, width: int, octaves: int = 10):
        super().__init__()
        self.octaves = octaves
        sizes = [6 * octaves, *[width] * 6]
        layers = (
            layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())
        )
        self.field, self.out = nn.Sequential(*layers), nn.Linear(width, 4)

    def forward(self, points: Tensor, colours: Tensor) -> Tensor:
        """Points [R, S, 3] along rays, and the colours [R, 3] that these have in the picture."""
        scales = 2.0 ** torch.arange(self.octaves, device=points.device)
        angles = (points[..., None] * scales).flatten(-2)
        found = self.out(self.field(torch.cat([angles.sin(), angles.cos()], -1))).float()
        alpha = 1 - torch.exp(-F.softplus(found[..., 3]) / points.shape[1])
        seen = torch.cumprod(1 - alpha + 1e-10, 1)
        weights = alpha * torch.cat([torch.ones_like(seen[:, :1]), seen[:, :-1]], 1)
        return F.mse_loss((weights[..., None] * found[..., :3].sigmoid()).sum(1), colours)


def nerf(rays: int, samples: int) -> Made:
    return NeRF(256), {"points": torch.randn(rays, samples, 3), "colours": torch.rand(rays, 3)}


class Encoder(nn.Sequential):
    """Pictures [B, 3, H, W] to vectors [B, D], by convolutions."""

    def __init__(self, width: int, out: int):
        sizes = [3, width, 2 * width, 4 * width]
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, out))


class SimCLR(nn.Module):
    """Two views of a picture are to be alike (Chen et al. 2020); labels and masks are made in the
    loss, on the host."""

    def __init__(self, width: int):
        super().__init__()
        self.encoder = Encoder(width, 128)

    def forward(self, views: Tensor) -> Tensor:
        """Views [2 B, 3, H, W], first all of one kind."""
        z = F.normalize(self.encoder(views).float(), dim=1)
        same = torch.arange(len(z) // 2).repeat(2)
        labels = (same[None] == same[:, None]).to(z.device)
        others = ~torch.eye(len(z), dtype=torch.bool).to(z.device)
        alike = (z @ z.t())[others].view(len(z), -1)
        labels = labels[others].view(len(z), -1)
        logits = torch.cat([alike[labels].view(len(z), -1), alike[~labels].view(len(z), -1)], 1)
        return F.cross_entropy(logits / 0.1, torch.zeros(len(z), dtype=torch.long).to(z.device))


class Masked(nn.Module):
    """Words that are hidden, by a transformer whose head has these alone."""

    def __init__(self, words: int, width: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.1, "gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor, hidden: Tensor) -> Tensor:
        """Words [B, S] and which of them are hidden."""
        x = self.layers(self.embedding(words.masked_fill(hidden, 0)))
        return F.cross_entropy(self.head(x[hidden]).float(), words[hidden])


def masked(batch: int, length: int) -> Made:
    words = torch.randint(8192, (batch, length))
    return Masked(8192, 768, 3), {"words": words, "hidden": torch.rand(batch, length) < 0.15}


class Durations(nn.Module):
    """A spectrogram from sounds, each repeated as long as it lasts (Ren et al. 2019)."""

    def __init__(self, sounds: int, width: int, bands: int):
        super().__init__()
        self.embedding = nn.Embedding(sounds, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.out = nn.Linear(width, bands)

    def forward(self, sounds: Tensor, lasts: Tensor, bands: Tensor) -> Tensor:
        """Sounds and durations [B, S], and the spectrogram [frames, bands] of all of them."""
        x = self.embedding(sounds)
        x = x.flatten(0, 1).repeat_interleave(lasts.flatten(), 0)[None]
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + F.dropout(norm(F.relu(convolution(x.mT)).mT), 0.1)
        return F.l1_loss(self.out(x[0]).float(), bands)


def durations(batch: int, length: int) -> Made:
    lasts = torch.randint(1, 9, (batch, length))
    bands = torch.randn(int(lasts.sum()), 80)
    batch = {"sounds": torch.randint(64, (batch, length)), "lasts": lasts, "bands": bands}
    return Durations(64, 384, 80), batch


class Windows(nn.Module):
    """Windowed attention whose table of distances comes from the host in each step."""

    def __init__(self, width: int, heads: int, window: int):
        super().__init__()
        self.heads, self.window = heads, window
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.bias = nn.Embedding(2 * window, heads)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, S, D]; windows are parts of S."""
        y = x.unflatten(1, (-1, self.window)).flatten(0, 1)
        places = [[self.window + j - i for j in range(self.window)] for i in range(self.window)]
        bias = self.bias(torch.tensor(places, device=x.device)).permute(2, 0, 1)
        q, k, v = self.qkv(self.norm1(y)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT) * q.shape[-1] ** -0.5 + bias
        y = y + self.out((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2))
        y = y + self.mlp(self.norm2(y))
        return self.head(y.unflatten(0, (len(x), -1)).mean((1, 2)))


def windows(batch: int, length: int) -> Made:
    batch = {"labels": torch.randint(10, (batch,)), "x": torch.randn(batch, length, 384)}
    return WithLoss(Windows(384, 6, 64)), batch


# --- what a graph can have


class PointNet(nn.Module):
    """Classes of point clouds: each point alone, then their maximum (Qi et al. 2017)."""

    def __init__(self, classes: int):
        super().__init__()
        self.points = nn.Sequential(*self.layers(nn.Conv1d, (3, 64, 64, 128, 1024)))
        self.cloud = nn.Sequential(*self.layers(nn.Linear, (1024, 512, 256)))
        self.head = nn.Linear(256, classes)

    @staticmethod
    def layers(kind: type[nn.Module], sizes: tuple[int, ...]) -> list[nn.Module]:
        more = (1,) if kind is nn.Conv1d else ()
        pairs = itertools.pairwise(sizes)
        return [m for a, b in pairs for m in (kind(a, b, *more), nn.BatchNorm1d(b), nn.ReLU())]

    def forward(self, x: Tensor) -> Tensor:
        """Points [B, 3, N]."""
        return self.head(self.cloud(self.points(x).max(2)[0]))


def point_net(batch: int, points: int) -> Made:
    labels = torch.randint(40, (batch,))
    return WithLoss(PointNet(40)), {"labels": labels, "x": torch.randn(batch, 3, points)}


class Mixer(nn.Module):
    """MLPs over patches and over channels in turns (Tolstikhin et al. 2021)."""

    def __init__(self, patches: int, width: int, layers: int):
        super().__init__()
        mlp = lambda size, inner: nn.Sequential(  # noqa: E731
            nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, size)
        )
        self.over_patches = nn.ModuleList(mlp(patches, 384) for _ in range(layers))
        self.over_channels = nn.ModuleList(mlp(width, 4 * width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Patches [B, P, D]."""
        for n, (one, two) in enumerate(zip(self.over_patches, self.over_channels, strict=True)):
            x = x + one(self.norms[2 * n](x).mT).mT
            x = x + two(self.norms[2 * n + 1](x))
        return self.head(x.mean(1))


def mixer(batch: int, patches: int, width: int) -> Made:
    labels = torch.randint(10, (batch,))
    return WithLoss(Mixer(patches, width, 4)), {
        "labels": labels,
        "x": torch.randn(batch, patches, width),
    }


class WaveNet(nn.Module):
    """Dilated convolutions with gates, and what each of them adds (van den Oord et al. 2016)."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.first, self.last = nn.Conv1d(1, width, 1), nn.Conv1d(width, 256, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2**n, dilation=2**n) for n in range(layers)
        )
        self.outs = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))

    def forward(self, sound: Tensor, levels: Tensor) -> Tensor:
        """Samples [B, 1, T] and the level [B, T] of each."""
        x, total = self.first(sound), 0
        for gate, out in zip(self.gates, self.outs, strict=True):
            a, b = gate(x).chunk(2, 1)
            residual, skip = out(a.tanh() * b.sigmoid()).chunk(2, 1)
            x, total = (x + residual) * 0.5**0.5, total + skip
        return F.cross_entropy(self.last(F.relu(total)).float(), levels)


def wave_net(batch: int, length: int) -> Made:
    sound, levels = torch.randn(batch, 1, length), torch.randint(256, (batch, length))
    return WaveNet(128, 6), {"sound": sound, "levels": levels}


class RealNVP(nn.Module):
    """The likelihood of vectors under a flow of affine couplings (Dinh et al. 2017)."""

    def __init__(self, width: int, inner: int, layers: int):
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(width // 2, inner), nn.SiLU(), nn.Linear(inner, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Vectors [B, D]."""
        a, b = x.chunk(2, 1)
        total = 0.0
        for net in self.nets:
            scale, shift = net(a).float().chunk(2, 1)
            scale = 2 * torch.tanh(scale / 2)
            a, b = b * scale.exp() + shift, a
            total = total + scale.sum(1)
        return (0.5 * (a.square() + b.square()).sum(1) - total).mean()


class DLRM(nn.Module):
    """Clicks, from numbers and bags of words, and the products of each two (Naumov et al. 2019)."""

    def __init__(self, tables: int, rows: int, width: int):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.numbers = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU()
        )
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("one", pairs[0])
        self.register_buffer("two", pairs[1])
        self.top = nn.Sequential(
            nn.Linear(width + len(pairs[0]), 1024), nn.ReLU(), nn.Linear(1024, 1)
        )

    def forward(self, numbers: Tensor, words: Tensor, clicks: Tensor) -> Tensor:
        """Numbers [B, 13], words [tables, B, W], clicks [B]."""
        x = self.numbers(numbers)
        bags = [bag(each).to(x.dtype) for bag, each in zip(self.bags, words, strict=True)]
        all = torch.stack([x, *bags], 1)
        crossed = (all @ all.mT)[:, self.one, self.two]
        logits = self.top(torch.cat([x, crossed], 1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits.float(), clicks)


def dlrm(batch: int) -> Made:
    words = torch.randint(100_000, (8, batch, 4))
    batch = {"numbers": torch.rand(batch, 13), "words": words, "clicks": torch.rand(batch).round()}
    return DLRM(8, 100_000, 64), batch


class VQVAE(nn.Module):
    """Pictures by the nearest vectors of a table (van den Oord et al. 2017)."""

    def __init__(self, width: int, codes: int):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1)
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )
        self.codes = nn.Embedding(codes, width)

    def forward(self, x: Tensor) -> Tensor:
        """Pictures [B, 3, H, W]."""
        z = self.encoder(x).float().permute(0, 2, 3, 1)
        table = self.codes.weight
        far = z.square().sum(-1, keepdim=True) - 2 * z @ table.t() + table.square().sum(1)
        code = self.codes(far.argmin(-1))
        kept = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        y = self.decoder((z + (code - z).detach()).permute(0, 3, 1, 2))
        return F.mse_loss(y.float(), x) + kept


# --- the table

LATER: dict[str, Make] = {
    "DeBERTa": partial(
        transformer, "MaskedLM", "deberta-v2", 8, 256, hidden_size=768, num_attention_heads=12,
        intermediate_size=3072, relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_buckets=128, vocab_size=32_000, num_hidden_layers=2,
    ),
    "NeRF": partial(nerf, 8192, 64),
    "SimCLR": lambda: (SimCLR(128), {"views": torch.randn(1024, 3, 64, 64)}),
    "masked words": partial(masked, 32, 512),
    "durations": partial(durations, 64, 128),
    "window table": partial(windows, 64, 1024),
    "PointNet": partial(point_net, 64, 2048),
    "Mixer": partial(mixer, 64, 196, 768),
    "WaveNet": partial(wave_net, 16, 8192),
    "RealNVP": lambda: (RealNVP(512, 2048, 8), {"x": torch.randn(16_384, 512)}),
    "DLRM": partial(dlrm, 16_384),
    "VQ-VAE": lambda: (VQVAE(128, 1024), {"x": torch.randn(64, 3, 128, 128)}),
}  # fmt: skip

"""The operators of V3 that only move bytes, with arguments to time them on."""

from collections.abc import Iterator

import torch

from fusion_lab.graph_turns import DEVICE


def row_operators(rows: int) -> Iterator[tuple[str, str, list]]:
    """Script, operator and arguments, at sizes of the models' wider settings, beyond any cache."""
    bf16, make = torch.bfloat16, torch.randn
    x, low = make(rows, 1024, device=DEVICE), make(rows, 1024, device=DEVICE, dtype=bf16)
    weight, sums = torch.ones(1024, device=DEVICE), make(rows, device=DEVICE)
    llama, openfold = "tiny_llama_v3", "tiny_openfold_v3"
    yield llama, "rms_norm_forward", [x, low, weight, 1e-5, bf16]
    yield llama, "rms_norm_backward", [low, x, x.clone(), weight, sums]
    wide, half = make(rows, 2048, device=DEVICE, dtype=bf16), low
    yield llama, "swiglu_forward", [wide]
    yield llama, "swiglu_backward", [half, wide]
    qkv, angle = wide.view(-1, 512, 32, 64), make(512, 1, 64, device=DEVICE)
    yield llama, "rotary", [qkv, angle, angle, 8, 1]
    logits = make(rows, 2000, device=DEVICE, dtype=bf16)
    targets = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    yield llama, "cross_entropy_forward", [logits, targets, 2000]
    yield llama, "cross_entropy_backward", [sums, logits, targets, sums, 2000]
    pair, scale = make(8 * rows, 128, device=DEVICE), torch.ones(128, device=DEVICE)
    yield openfold, "layer_norm_forward", [pair, scale, scale, None, 1e-5, bf16, False]
    inputs = [pair.to(bf16), None, pair, scale, scale, None]
    yield openfold, "layer_norm_backward", [*inputs, 1e-5, False, True]
    yield openfold, "column_sums", [pair.to(bf16), torch.float32]
    yield openfold, "bias_relu_forward", [wide.view(-1, 512), torch.ones(512, device=DEVICE)]
    out = wide.view(-1, 512)
    yield openfold, "bias_relu_backward", [out, out.clone(), torch.float32, True]

"""Steps on which find-fusions is held against torch.compile: models of public libraries with random
weights.

Each entry of MODELS is a function without arguments that returns (model, batch), where
model(**batch) is the loss. Sizes are such that a step keeps an H100 busy and compiles in about a
minute.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ModelAndBatch = tuple[nn.Module, dict[str, Tensor]]


class WithLoss(nn.Module):
    """A classifier and its cross-entropy."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x).float(), labels)


def pictures(name: str, batch: int) -> ModelAndBatch:
    """A model of torchvision on pictures."""
    library = importlib.import_module("torchvision.models")
    model = WithLoss(library.get_model(name, weights=None))
    return model, {"x": torch.randn(batch, 3, 224, 224), "labels": torch.randint(1000, (batch,))}


def words(task: str, kind: str, batch: int, length: int, **sizes: object) -> ModelAndBatch:
    """A model of Hugging Face for a task on words."""
    library = importlib.import_module("transformers")
    config = library.AutoConfig.for_model(kind, **sizes)
    model = getattr(library, f"AutoModelFor{task}").from_config(config).train()
    tokens = torch.randint(5, config.vocab_size, (batch, length))
    return model, {"input_ids": tokens, "labels": tokens}


LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
}
MODELS: dict[str, Callable[[], ModelAndBatch]] = {
    "ResNet-50": partial(pictures, "resnet50", 64),
    "ConvNeXt": partial(pictures, "convnext_tiny", 32),
    "EfficientNet": partial(pictures, "efficientnet_b0", 64),
    "ViT": partial(pictures, "vit_b_16", 32),
    "Swin": partial(pictures, "swin_t", 32),
    "BERT": partial(words, "MaskedLM", "bert", 32, 256, num_hidden_layers=4),
    "ModernBERT": partial(words, "MaskedLM", "modernbert", 16, 512, num_hidden_layers=4),
    "GPT-2": partial(words, "CausalLM", "gpt2", 8, 1024, n_layer=4),
    "Llama": partial(words, "CausalLM", "llama", 4, 1024, **LLAMA),
    "T5": partial(words, "Seq2SeqLM", "t5", 16, 256, num_layers=4, decoder_start_token_id=0),
}

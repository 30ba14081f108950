"""Steps on which find-fusions is held against torch.compile: models of public libraries with random
weights.

Each entry of MODELS is a function without arguments that returns (model, batch), where
model(**batch) is the loss. Sizes are such that a step keeps an H100 busy and compiles in about a
minute. What a module makes is made on the default device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, dict[str, object]]
Make = Callable[[], Made]


class WithLoss(nn.Module):
    """A classifier and its cross-entropy; inputs go to it in their order, but for the labels."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        found = self.model(*inputs.values())
        found = found["out"] if isinstance(found, dict) else found  # a segmentation
        return F.cross_entropy(found.float(), labels)


# --- of libraries


def pictures(name: str, batch: int, *shape: int, **sizes: object) -> Made:
    """A model of torchvision on pictures, or films, of this shape [3, (T,) H, W]."""
    models = importlib.import_module("torchvision.models")
    model = models.get_model(name, weights=None, **sizes)
    shape = shape or (3, 224, 224)
    places = shape[1:] if "raspp" in name else ()  # a class for each
    labels = torch.randint(21, (batch, *places))
    return WithLoss(model), {"labels": labels, "x": torch.randn(batch, *shape)}


def transformer(task: str, kind: str, batch: int, *shape: int, **sizes: object) -> Made:
    """A model of Hugging Face for a task on words [S], pictures [3, H, W] or sounds.

    `words` among the sizes is the length of what is to be said of a sound, `masks` are the names
    of those which the library would make on the host.
    """
    library = importlib.import_module("transformers")
    words, masks, given = sizes.pop("words", None), sizes.pop("masks", ()), {}
    if attention := sizes.pop("attention", None):
        given["attn_implementation"] = attention
    if dtype := sizes.pop("dtype", None):
        given["dtype"] = dtype
    config = library.AutoConfig.for_model(kind, **sizes)
    model = getattr(library, f"AutoModelFor{task}").from_config(config, **given).train()
    name = model.main_input_name
    if name == "input_ids":
        inputs = torch.randint(5, config.vocab_size, (batch, *shape))
        seen = {mask: torch.zeros(batch, 1, *shape, *shape) for mask in masks}
        return model, {name: inputs, "labels": inputs, **seen}
    labels = torch.randint(config.num_labels, (batch,))
    if words:
        labels = torch.randint(5, config.vocab_size, (batch, words))
    elif "Segmentation" in task:
        labels = torch.randint(config.num_labels, (batch, *shape[1:]))
    return model, {name: torch.randn(batch, *shape), "labels": labels}


def graph(name: str, nodes: int, edges: int, width: int, **sizes: object) -> Made:
    """A model of torch_geometric on a random graph, a class for each node."""
    models = importlib.import_module("torch_geometric.nn.models")
    x, labels = torch.randn(nodes, width), torch.randint(10, (nodes,))
    ends = torch.randint(nodes, (2, edges))
    model = getattr(models, name)(width, width, 3, 10, **sizes)
    return WithLoss(model), {"labels": labels, "x": x, "edges": ends}


# --- the list

FOUR = {"num_hidden_layers": 4}
TWO = {"num_hidden_layers": 2}
EXPERTS = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 32_000}
EXPERTS |= {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "dtype": torch.bfloat16,
}
NO_LOOPS = {"add_self_loops": False}  # to look for loops needs values
UNMASKED = {"apply_spec_augment": False, "layerdrop": 0.0}  # both are drawn on the host
MODELS: dict[str, Make] = {
    "ResNet-50": partial(pictures, "resnet50", 64),
    "ConvNeXt": partial(pictures, "convnext_tiny", 32),
    "EfficientNet": partial(pictures, "efficientnet_b0", 64),
    "MobileNet": partial(pictures, "mobilenet_v3_large", 128),
    "RegNet": partial(pictures, "regnet_y_800mf", 64),
    "ShuffleNet": partial(pictures, "shufflenet_v2_x1_0", 128),
    "VGG": partial(pictures, "vgg11_bn", 32),
    "video ResNet": partial(pictures, "r3d_18", 8, 3, 8, 112, 112),
    "segmentation": partial(
        pictures, "lraspp_mobilenet_v3_large", 32, num_classes=21, weights_backbone=None
    ),
    "ViT": partial(pictures, "vit_b_16", 32),
    "Swin": partial(pictures, "swin_t", 32),
    "BERT": partial(transformer, "MaskedLM", "bert", 32, 256, **FOUR),
    "BERT, plain": partial(
        transformer, "MaskedLM", "bert", 32, 256, attention="eager", masks=["attention_mask"],
        **FOUR,
    ),
    "DistilBERT": partial(transformer, "MaskedLM", "distilbert", 32, 256, n_layers=4),
    "ModernBERT": partial(transformer, "MaskedLM", "modernbert", 16, 512, **FOUR),
    "GPT-2": partial(transformer, "CausalLM", "gpt2", 8, 1024, n_layer=4),
    "Llama": partial(
        transformer, "CausalLM", "llama", 4, 1024, hidden_size=1024, intermediate_size=2816,
        num_attention_heads=16, num_key_value_heads=4, **FOUR,
    ),
    "Qwen": partial(
        transformer, "CausalLM", "qwen3", 4, 1024, hidden_size=1024, intermediate_size=3072,
        num_attention_heads=16, num_key_value_heads=8, vocab_size=32_000, **FOUR,
    ),
    "T5": partial(transformer, "Seq2SeqLM", "t5", 16, 256, num_layers=4, decoder_start_token_id=0),
    "BART": partial(
        transformer, "Seq2SeqLM", "bart", 16, 256, d_model=768, encoder_layers=3,
        decoder_layers=3, encoder_attention_heads=12, decoder_attention_heads=12,
        masks=["decoder_attention_mask"],
    ),
    "Mixtral": partial(transformer, "CausalLM", "mixtral", 4, 512, num_local_experts=8, **EXPERTS),
    "OLMoE": partial(transformer, "CausalLM", "olmoe", 4, 512, num_experts=16, **EXPERTS),
    "Mamba": partial(transformer, "CausalLM", "mamba", 256, 16, vocab_size=32_000, **TWO),
    "Mamba-2": partial(
        transformer, "CausalLM", "mamba2", 2, 512, hidden_size=768, num_heads=24, n_groups=1,
        state_size=64, chunk_size=64, vocab_size=32_000, **TWO,
    ),
    "wav2vec 2.0": partial(
        transformer, "AudioClassification", "wav2vec2", 8, 48_000, **UNMASKED, **FOUR
    ),
    "Whisper": partial(
        transformer, "SpeechSeq2Seq", "whisper", 8, 80, 3000, words=64, d_model=512,
        encoder_layers=3, decoder_layers=3, encoder_attention_heads=8, decoder_attention_heads=8,
    ),
    "DINOv2": partial(transformer, "ImageClassification", "dinov2", 32, 3, 224, 224, **FOUR),
    "SegFormer": partial(
        transformer, "SemanticSegmentation", "segformer", 8, 3, 256, 256, num_labels=21
    ),
    "ConvNeXt V2": partial(
        transformer, "ImageClassification", "convnextv2", 32, 3, 224, 224, depths=[1, 1, 3, 1]
    ),
    "GCN": partial(graph, "GCN", 50_000, 400_000, 128, normalize=False, **NO_LOOPS),
    "GAT": partial(graph, "GAT", 30_000, 300_000, 128, v2=True, heads=4, **NO_LOOPS),
    "GraphSAGE": partial(graph, "GraphSAGE", 50_000, 400_000, 128),
    "GIN": partial(graph, "GIN", 50_000, 400_000, 128),
}  # fmt: skip
IN_FP32 = ("video ResNet", "DINOv2", "BERT, plain", "Llama", "GPT-2", "GraphSAGE")

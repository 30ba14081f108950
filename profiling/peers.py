"""Llamas of other libraries with our sizes and weights: beside which our versions are measured."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from profiling.program import ROOT


def hugging_face(ours: nn.Module) -> nn.Module:
    """transformers' Llama of the same sizes and weights, whose names only get the prefix `model.`."""
    from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

    sizes = ours.config
    config = LlamaConfig(
        vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_dim, intermediate_size=sizes.intermediate_dim,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads, num_key_value_heads=sizes.num_kv_heads,
        max_position_embeddings=sizes.seq_len, rms_norm_eps=sizes.norm_eps, tie_word_embeddings=True, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).to(next(ours.parameters()).device).train()
    # To find out whether sequences are packed, which they are not here, it would wait for the device in every step.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    weights = {f"model.{name}": value for name, value in ours.state_dict().items()}
    theirs.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    return theirs


def with_liger(model: nn.Module, **chosen: bool) -> Callable:
    """The model's forward pass with Liger's kernels. What they replace in the library is so only while this runs."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    library, plain = vars(modeling_llama), dict(vars(modeling_llama))
    apply_liger_kernel_to_llama(model=model, **chosen)
    patched = dict(library)
    library.update(plain)

    def forward(**batch: Tensor) -> object:
        library.update(patched)
        try:
            return model(**batch)
        finally:
            library.update(plain)

    return forward


class Peer(nn.Module):
    """Another library's model as the harness calls ours: model(input_ids, labels) -> the loss."""

    def __init__(self, ours: nn.Module, made_fast: Callable[[nn.Module], Callable]):
        super().__init__()
        self.config, self.model = ours.config, hugging_face(ours)
        self.run = made_fast(self.model)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.run(**batch).loss


PEERS = {  # what Hugging Face's Llama is made into; Liger's loss asks the device for a number, which no graph can
    "hugging_face": lambda model: model,
    "hugging_face_compiled": torch.compile,
    "liger": lambda model: with_liger(model, fused_linear_cross_entropy=False),
}


def peer_script(name: str) -> str:
    """A module like TinyLlama V1, with its data, optimizer and clock, whose model is this peer -> the module's name."""
    script = f"tiny_llama_{name}"
    spec = importlib.util.spec_from_file_location(script, ROOT / "tiny_llama_v1.py")
    sys.modules[script] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build, module.SCRIPT = module.build_model, script
    module.build_model = lambda args, device: Peer(build(args, device), PEERS[name])
    return script

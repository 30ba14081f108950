"""TinyLlama is a standard Llama: the same logits as Hugging Face's, causal, and its text can be
learnt."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch
from conftest import (
    CPU,
    VERSIONS,
    batches,
    build,
    gradients,
    load,
    random_state,
    relative_difference,
    run_main,
)
from torch import Tensor

LLAMAS = [
    pytest.param(f"tiny_llama_v{version}", [], id=f"v{version}") for version in VERSIONS["llama"]
]
LLAMAS += [pytest.param("tiny_llama_v2", ["--num-kv-heads", "1"], id="v2-one-kv-head")]
every_version = pytest.mark.parametrize(("script", "argv"), LLAMAS)

LAYER_NAMES = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)


def with_random_weights(script: str, *argv: str) -> torch.nn.Module:
    """The tiny model with weights that make every part matter."""
    model = build(script, *argv)
    model.load_state_dict(random_state(model.state_dict()))
    return model


def tokens(batch: int = 2, length: int = 32, vocabulary: int = 100) -> Tensor:
    """Random tokens [batch, length]."""
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def hugging_face(script: str, *argv: str) -> torch.nn.Module:
    """transformers' Llama with the weights of `with_random_weights`, whose names only get the
    prefix `model.`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = with_random_weights(script, *argv)
    config = LlamaConfig(
        vocab_size=ours.config.vocab_size,
        hidden_size=ours.config.hidden_dim,
        intermediate_size=ours.config.intermediate_dim,
        num_hidden_layers=ours.config.num_layers,
        num_attention_heads=ours.config.num_heads,
        num_key_value_heads=ours.config.num_kv_heads,
        max_position_embeddings=ours.config.seq_len,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    theirs = LlamaForCausalLM(config)
    weights = {f"model.{name}": value.clone() for name, value in ours.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(
        {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    )
    assert not missing
    assert not unexpected
    return theirs


@every_version
def test_logits_equal_hugging_face(script: str, argv: list[str]):
    ids = tokens()
    with torch.no_grad():
        expected = hugging_face(script, *argv)(ids).logits
        found = with_random_weights(script, *argv)(ids)
    assert found.shape == (2, 32, 100)
    assert expected.std() > 0.5, "the comparison would be weak"
    assert relative_difference(found, expected) < 1e-5
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@every_version
def test_loss_and_gradients_equal_hugging_face(script: str, argv: list[str]):
    ids = tokens()
    theirs, ours = hugging_face(script, *argv), with_random_weights(script, *argv)
    expected, found = theirs(ids, labels=ids).loss, ours(ids, ids)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    found.backward()
    wanted = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
    for name, gradient in gradients(ours).items():
        assert relative_difference(gradient, wanted.pop(name)) < 1e-4, name
    assert not wanted, "a parameter of Hugging Face's model has no counterpart"


@every_version
def test_a_later_token_does_not_change_earlier_logits(script: str, argv: list[str]):
    model, ids = with_random_weights(script, *argv), tokens()
    changed = ids.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 100
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.allclose(before[:, :20], after[:, :20], rtol=1e-5, atol=1e-5)
    for position in (20, 25, 31):
        assert relative_difference(after[:, position], before[:, position]) > 1e-3, (
            "the token must matter from here on"
        )


@every_version
def test_a_prefix_gives_the_logits_of_its_positions(script: str, argv: list[str]):
    model, ids = with_random_weights(script, *argv), tokens()
    with torch.no_grad():
        assert torch.allclose(model(ids[:, :11]), model(ids)[:, :11], rtol=1e-4, atol=1e-4)


@every_version
def test_labels_are_shifted_once(script: str, argv: list[str]):
    model, ids = with_random_weights(script, *argv), tokens()
    with torch.no_grad():
        probability = model(ids).double().log_softmax(-1)
        loss = model(ids, ids)
    expected = [-probability[b, t, ids[b, t + 1]] for b in range(2) for t in range(31)]
    assert loss.item() == pytest.approx(float(sum(expected)) / len(expected), rel=1e-5)


@every_version
def test_parameter_names_are_those_of_hugging_face(script: str, argv: list[str]):
    layers = {f"layers.{i}.{name}" for i in range(2) for name in LAYER_NAMES}
    assert set(build(script, *argv).state_dict()) == {"embed_tokens.weight", "norm.weight"} | layers


def test_key_value_heads_are_half_of_the_heads_unless_given():
    state = build("tiny_llama_v1").state_dict()
    assert state["layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    state = build("tiny_llama_v1", "--num-kv-heads", "4").state_dict()
    assert state["layers.0.self_attn.k_proj.weight"].shape == (64, 64)


def test_mlp_is_four_times_as_wide_unless_given():
    assert build("tiny_llama_v1").state_dict()["layers.0.mlp.up_proj.weight"].shape == (256, 64)
    state = build("tiny_llama_v1", "--intermediate-dim", "96").state_dict()
    assert state["layers.0.mlp.up_proj.weight"].shape == (96, 64)


def test_initial_loss_is_that_of_a_guess():
    batch = batches("tiny_llama_v1").next_batch()
    assert build("tiny_llama_v1")(**batch).item() == pytest.approx(math.log(100), abs=0.2)


def test_synthetic_text_is_the_same_for_the_same_seed():
    first, again = batches("tiny_llama_v1"), batches("tiny_llama_v2")
    other = batches("tiny_llama_v1", "--seed", "7")
    for _ in range(3):
        batch, same, different = first.next_batch(), again.next_batch(), other.next_batch()
        assert torch.equal(batch["input_ids"], same["input_ids"])
        assert not torch.equal(batch["input_ids"], different["input_ids"])
        assert torch.equal(batch["input_ids"], batch["labels"]), (
            "the model shifts, the data does not"
        )
        assert batch["input_ids"].shape == (2, 32)


def entropy(counts: Counter) -> float:
    """Nats."""
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


@pytest.mark.parametrize("seed", ["42", "7"])
def test_two_tokens_predict_the_next_of_synthetic_text(seed: str):
    """The entropy of a token falls far when the two before it are known, and less when only one
    is."""
    sizes = ["--vocab-size", "20", "--seq-len", "4000", "--batch-size", "50", "--seed", seed]
    ids = batches("tiny_llama_v1", *sizes).next_batch()["input_ids"]
    columns = [ids[:, i : 3998 + i].flatten().tolist() for i in range(3)]
    single, pair, triple = (
        entropy(Counter(zip(*columns[3 - n :], strict=True))) for n in (1, 2, 3)
    )
    assert single > 2.0
    assert triple - pair < 1.39 + 0.05, "1/2, 1/4, 1/8, ... has 1.386 nats"
    assert pair - single > triple - pair + 0.3, "one token must not be enough"


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_llama_v2"])
def test_loss_on_synthetic_text_falls(script: str, tmp_path):
    """In this short a run the frequencies are learnt, which a model with broken gradients does
    not do."""
    argv = [
        "--num-steps",
        "60",
        "--warmup-steps",
        "0",
        "--learning-rate",
        "3e-3",
        "--under-profiler",
    ]
    result = run_main(script, tmp_path, *argv, "--batch-size", "8")
    curve = result.summary["loss"]["curve"]
    assert curve[0] == pytest.approx(math.log(100), abs=0.2)
    assert sum(curve[-5:]) / 5 < curve[0] - 0.8


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_llama_v2"])
def test_text_file_is_trained_on_as_bytes(script: str, tmp_path):
    text = "".join(f"{i} times {i} is {i * i}, and then é comes. " for i in range(200)).encode()
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    sizes = [
        "--hidden-dim",
        "64",
        "--num-layers",
        "1",
        "--num-heads",
        "2",
        "--seq-len",
        "32",
        "--device",
        "cpu",
    ]
    module, argv = load(script), [*sizes, "--text-file", str(path)]
    args = module.parse_args(argv)
    assert args.vocab_size == 256
    for row in module.make_batches(args, CPU, 0).next_batch()["input_ids"]:
        assert bytes(row.tolist()) in text

    steps = [
        "--num-steps",
        "40",
        "--learning-rate",
        "3e-3",
        "--under-profiler",
        "--profile-dir",
        str(tmp_path),
    ]
    assert module.main([*argv, *steps]) == 0
    curve = json.loads((tmp_path / f"{script}_summary.json").read_text())["loss"]["curve"]
    assert curve[-1] < curve[0] - 1.0

"""TinyLlama is a standard Llama: the same logits, loss and gradients as Hugging Face's.

And its text can be learnt. Later versions are compared with V1 in test_fusions.py.
"""

import math
from collections import Counter

import pytest
import torch
from conftest import (
    CPU,
    assert_same_gradients,
    batches,
    build,
    gradients,
    load,
    parse,
    random_state,
    relative_difference,
    run_main,
    words,
)

V1 = "tiny_llama_v1"


@pytest.mark.parametrize("argv", ["", "--num-kv-heads 1"])
def test_logits_loss_and_gradients_equal_hugging_face(argv: str):
    """transformers' Llama with the same weights, whose names only get the prefix `model.`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = build(V1, *argv.split())
    ours.load_state_dict(random_state(ours.state_dict()))
    config = LlamaConfig(
        vocab_size=ours.config.vocab_size,
        hidden_size=ours.config.hidden_dim,
        intermediate_size=ours.config.intermediate_dim,
        num_hidden_layers=ours.config.num_layers,
        num_attention_heads=ours.config.num_heads,
        num_key_value_heads=ours.config.num_kv_heads,
        max_position_embeddings=ours.config.seq_len,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    theirs = LlamaForCausalLM(config)
    weights = {f"model.{name}": value.clone() for name, value in ours.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    theirs.load_state_dict(weights, strict=True)
    ids = torch.randint(100, (2, 32))
    expected, logits, loss = theirs(ids, labels=ids), ours(ids), ours(ids, ids)
    assert logits.shape == (2, 32, 100)
    assert expected.logits.std() > 0.5, "the comparison would be weak"
    assert relative_difference(logits, expected.logits) < 1e-5
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    expected.loss.backward()
    loss.backward()
    wanted = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
    assert_same_gradients(gradients(ours), wanted, 1e-4)


def entropy(counts: Counter) -> float:
    """Nats."""
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def test_two_tokens_predict_the_next_of_synthetic_text():
    """The entropy of a token falls far when the two before it are known, and less when only one
    is."""
    sizes = words("--vocab-size 20 --seq-len 4000 --batch-size 50 --seed 7")
    ids = batches(V1, *sizes).next_batch()["input_ids"]
    columns = [ids[:, i : 3998 + i].flatten().tolist() for i in range(3)]
    single, pair, triple = (
        entropy(Counter(zip(*columns[3 - n :], strict=True))) for n in (1, 2, 3)
    )
    assert single > 2.0
    assert triple - pair < 1.39 + 0.05, "1/2, 1/4, 1/8, ... has 1.386 nats"
    assert pair - single > triple - pair + 0.3, "one token must not be enough"


def test_text_file_is_trained_on_as_bytes(tmp_path):
    text = "".join(f"{i} times {i} is {i * i}, and then é comes. " for i in range(200)).encode()
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    argv = [*words("--vocab-size 256 --num-layers 1"), "--text-file", str(path)]
    for row in load(V1).make_batches(parse(V1, *argv), CPU, 0).next_batch()["input_ids"]:
        assert bytes(row.tolist()) in text
    assert load(V1).parse_args(["--text-file", str(path)]).vocab_size == 256
    steps = words("--num-steps 40 --learning-rate 3e-3 --under-profiler")
    curve = run_main(V1, tmp_path, *argv, *steps).summary["loss"]["curve"]
    assert curve[-1] < curve[0] - 1.0

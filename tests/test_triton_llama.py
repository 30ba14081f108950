"""What TinyLlama's kernels do with extreme values, and their command line.

A whole step is compared with float64 in test_triton_steps.py, each flag in test_fusions.py.
"""

from collections import defaultdict
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    DEVICE,
    LIMITS,
    assert_one_error,
    both_types,
    check_close,
    load,
    parse,
    randn,
    relative_difference,
    words,
)
from torch import Tensor

from fusion_lab.accuracy import InFloat64

V3, V4 = "tiny_llama_v3", "tiny_llama_v4"
v3, v4 = load(V3), load(V4)
HERE = ["--device", DEVICE.type]
both_scripts = pytest.mark.parametrize("script", [V3, V4])
both = pytest.mark.parametrize("module", [v3, v4], ids=["v3", "v4"])


def build(script: str, *argv: str) -> torch.nn.Module:
    """The tiny model with its initial weights, where the kernels run."""
    return load(script).build_model(parse(script, *HERE, *argv), DEVICE)


def tokens(*argv: str) -> dict[str, Tensor]:
    """A batch for it."""
    args = parse(V3, *HERE, *argv)
    return v3.make_batches(args, DEVICE, args.seed).next_batch()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, S, heads, d], with scores in memory."""
    group, later = q.shape[2] // k.shape[2], torch.ones(2 * q.shape[1:2], dtype=torch.bool).triu(1)
    q, k, v = q.transpose(1, 2), *(t.repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later.to(DEVICE), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@both
@both_types
def test_attention_with_scores_of_several_hundred(module: ModuleType, dtype: torch.dtype):
    q, k, v = (randn(1, 40, heads, 16, dtype=dtype) for heads in (2, 2, 1))
    q, k = 10 * q, 10 * k[:, :, :1]
    assert (q.transpose(1, 2) @ k.transpose(1, 2).mT).abs().max() / 4 > 300
    none = (torch.ones(40, 1, 16, device=DEVICE), torch.zeros(40, 1, 16, device=DEVICE))
    rotated = none if module is v4 else ()  # by no angle
    check_close(
        lambda *qkv: module.CausalAttention.apply(torch.cat(qkv, 2), 2, *rotated),
        attention,
        *(q, k, v),
        limit=10 * LIMITS[dtype],  # a score of 500 is rounded by 3e-5, and the exponential shows it
    )


def next_token_loss(
    module: ModuleType, logits: Tensor, labels: Tensor, vocab: int | None = None
) -> Tensor:
    """V3 has one of each token, V4 their mean."""
    vocab = vocab or logits.shape[-1]
    if module is v4:
        return v4.NextTokenLoss.apply(logits, labels, vocab)
    return v3.CrossEntropy.apply(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), vocab)


@both
@both_types
@pytest.mark.parametrize("banned", [False, True], ids=["any", "banned"])
def test_loss_of_the_next_token(module: ModuleType, banned: bool, dtype, monkeypatch):
    """Of banned tokens the logits are -inf, for whole blocks of a row; some labels do not count."""
    for kernel in ("cross_entropy_forward", "cross_entropy_backward"):
        monkeypatch.setitem(module.OVERRIDES, kernel, {"TILE": 128})
    logits = randn(3, 9, 300, dtype=dtype, scale=1.0 if banned else 300.0)
    labels = torch.randint(300, (9, 3)).T.to(DEVICE)
    labels[:, 2::3] = -100
    if banned:
        labels[0, 1:4] = torch.tensor([299, 150, 7])
        for row, banned_tokens in ((0, slice(290)), (1, slice(150)), (1, slice(151, 300))):
            logits[0, row, banned_tokens] = -torch.inf
        logits[0, 2, 150:] = -torch.inf
    reduction = "mean" if module is v4 else "none"
    check_close(
        lambda logits: next_token_loss(module, logits, labels),
        lambda logits: F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction
        ),
        logits,
        limit=5 * LIMITS[dtype],  # a logit of 900 is rounded by 3e-5
    )


@both
@both_types
def test_columns_behind_the_vocabulary_do_not_count(module: ModuleType, dtype: torch.dtype):
    """Whatever stands there: its gradient is 0, and a label among them makes the loss NaN, as do
    logits of -inf alone."""
    logits, labels = randn(2, 4, 40, dtype=dtype), torch.tensor([[0, 32, 7, -100]] * 2).to(DEVICE)
    logits[..., 33:] = 60.0
    logits.requires_grad_()
    found = next_token_loss(module, logits, labels, 33)
    expected = next_token_loss(module, logits[..., :33], labels)
    grads = [torch.autograd.grad(loss.sum(), logits)[0] for loss in (found, expected)]
    assert torch.equal(found, expected)
    assert relative_difference(*grads) < LIMITS[dtype]
    assert not grads[0][..., 33:].any()
    beyond = labels.masked_fill(labels == 32, 33)
    assert next_token_loss(module, logits, beyond, 33).isnan().any()
    beyond[:, 0] = 33  # which nobody predicts
    beyond[:, 1] = 32
    assert next_token_loss(module, logits, beyond, 33).isfinite().all()
    nothing_possible = logits.detach().index_fill(1, torch.tensor(0, device=DEVICE), -torch.inf)
    assert next_token_loss(module, nothing_possible, labels, 33).isnan().any()


# The model and its command line


@both_scripts
def test_what_the_model_cannot_take_is_refused(script: str):
    """Before a kernel reads beyond the angles, and where there is nothing to launch."""
    model = build(script)
    for batch, seq in ((2, 33), (0, 32), (2, 0)):
        ids = torch.zeros(batch, seq, dtype=torch.int64, device=DEVICE)
        with pytest.raises(ValueError, match=f"{batch} sequences of {seq} tokens: .* 1 to 32"):
            model(ids, ids)


@both_scripts
@pytest.mark.parametrize("vocab", [5, 257])
def test_odd_lengths_and_vocabularies_give_what_v1_gives(script: str, vocab: int):
    """They are rounded up inside. Sequences are shorter than the model's, an optimizer has a place
    for the gradient of the embedding."""
    sizes = words(f"--vocab-size {vocab} --seq-len 27 --hidden-dim 32 --num-heads 2")
    exact, model = build("tiny_llama_v1", *sizes).double(), build(script, *sizes)
    load(script).build_optimizer(parse(script, *HERE, *sizes), model)
    ids = torch.randint(vocab, (3, 21)).to(DEVICE)
    with InFloat64():
        expected = exact(ids)
        exact(ids, ids).backward()
    assert relative_difference(model(ids), expected) < LIMITS[torch.float32]
    model(ids, ids).backward()
    grads = (m.embed_tokens.weight.grad for m in (model, exact))
    assert relative_difference(*grads) < LIMITS[torch.float32]


@pytest.mark.parametrize(
    ("backend", "dtype", "precision", "cases", "chosen"),
    [
        ("cuda", torch.bfloat16, "high", "float32 tf32 hip hip_float32", "any"),
        ("cuda", torch.float32, "highest", "float32 tf32 hip hip_float32", "float32"),
        ("cuda", torch.float32, "high", "float32 tf32 hip hip_float32", "tf32"),
        ("cuda", torch.float32, "high", "hip", "any"),
        ("hip", torch.bfloat16, "high", "float32 tf32 hip hip_float32", "hip"),
        ("hip", torch.float32, "high", "float32 tf32 hip hip_float32", "hip_float32"),
        ("hip", torch.float32, "high", "float32 tf32", "float32"),
        ("interpreter", torch.float32, "high", "float32 tf32 hip hip_float32", "float32"),
    ],
)
def test_a_launch_takes_the_block_sizes_of_its_type_and_device(
    backend: str, dtype: torch.dtype, precision: str, cases: str, chosen: str, monkeypatch
):
    def some_kernel():
        """Registered by its name alone."""

    sizes = {case: {"num_stages": len(case)} for case in cases.split()}
    monkeypatch.setattr(v3, "BACKEND", backend)
    monkeypatch.setattr(v3, "BLOCKS", {})
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert v3.block_sizes({"BLOCK_M": 64}, **sizes)(some_kernel) is some_kernel
    assert v3.blocks("some", dtype) == {"BLOCK_M": 64, "num_warps": 4, **sizes.get(chosen, {})}


def test_blocks_change_what_is_launched_and_nothing_else(monkeypatch):
    changes = words("--blocks attention_forward:BLOCK_M=16,num_warps=2")
    changes += words("--blocks attention_forward:BLOCK_N=16")
    launched, results, qkv = [], [], randn(1, 33, 4, 8)
    recorder = defaultdict(lambda: lambda *_, **arguments: launched.append(arguments))
    for argv in ([], changes, []):  # the next command line starts anew
        v3.prepare(parse(V3, *HERE, *argv))
        results.append(v3.CausalAttention.apply(qkv, 2))
        with monkeypatch.context() as patch:
            patch.setattr(v3, "wrap_triton", lambda kernel: recorder)
            v3.CausalAttention.apply(qkv, 2)
    chosen = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 2}
    before, after, again = ({name: a.get(name) for name in chosen} for a in launched)
    assert before == again != after == chosen
    limit = 1e-6 if v3.INTERPRETED else LIMITS[torch.float32]
    assert relative_difference(results[1], results[0]) < limit


def test_blocks_are_recorded(run):
    """The note of the interpreter is said once in a process."""
    quick = words("--num-steps 1 --warmup-steps 0 --under-profiler --num-layers 1 --batch-size 1")
    asked = "rotary:TILE=128", "rms_norm_forward:num_warps=8,TILE=64"
    v3.note_interpreter.cache_clear()
    result = run(V3, *HERE, *quick, "--blocks", asked[0], "--blocks", asked[1])
    assert result.status == 0, result.stderr
    assert result.summary["config"]["blocks"] == " ".join(asked)
    assert result.stderr.count("Triton's interpreter") == v3.INTERPRETED
    assert "interpreter" not in run(V3, *HERE, *quick).stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense:TILE=64", ["no kernel 'nonsense'", "rms_norm_forward"]),
        ("attention_forward float32:BLOCK_M=64", ["no kernel 'attention_forward float32'"]),
        ("rotary:BLOCK_M=64", ["rotary has no 'BLOCK_M'", "TILE"]),
        ("rotary:TILE=", ["TILE= is not a power of two from 1"]),
        ("attention_forward:BLOCK_M=8", ["BLOCK_M=8 is not a power of two from 16"]),
    ],
)
def test_what_is_wrong_with_blocks_is_one_line(text: str, said: list[str], run):
    assert_one_error(run(V3, "--blocks", text), 2, "--blocks", *said)


@both_scripts
def test_on_a_cpu_without_the_interpreter_nothing_starts(script: str, run, monkeypatch):
    monkeypatch.setattr(load(script), "INTERPRETED", False)
    assert_one_error(run(script), 4, "TRITON_INTERPRET=1", "--disable-all-fusion")
    assert parse(script, "--disable-all-fusion").device == "cpu"
    fused = ["--disable-all-fusion", "--enable-fused-optimizer"]
    if script == V4:
        assert_one_error(run(script, *fused), 4, "TRITON_INTERPRET=1")


@both_scripts
@pytest.mark.parametrize("heads", [20, 130])
def test_heads_of_any_width(script: str, heads: int, run):
    """Those without an attention kernel take PyTorch's."""
    sizes = words(f"--hidden-dim {2 * heads} --num-heads 2 --seq-len 5")
    result = run(script, *HERE, *sizes, "--verify-accuracy")
    assert result.status == 0, result.stdout
    assert ("triton-attention is off" in result.stderr) == (heads > 128 or script == V4)

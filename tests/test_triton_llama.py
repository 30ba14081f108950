"""What TinyLlama's kernels do with extreme values, and their command line.

A whole step is compared with float64 in test_triton_steps.py, each flag in test_fusions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    DEVICE,
    LIMITS,
    assert_one_error,
    assert_same_gradients,
    both_types,
    check_close,
    gradients,
    load,
    parse,
    randn,
    random_state,
    relative_difference,
    words,
)
from torch import Tensor

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


# Extreme values


def test_norm_from_its_output_loses_only_the_channel_with_a_weight_of_zero():
    x, weight = randn(33, 32), randn(32, scale=0.2, shift=1.0)
    weight[5] = 0
    grads = []
    for from_output in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        normed, _ = v4.AddRMSNorm.apply(
            leaves[0], None, leaves[1], 1e-5, torch.float32, from_output
        )
        grads.append(torch.autograd.grad(normed.square().sum(), leaves))
    for found, expected in zip(*grads, strict=True):
        assert not found[..., 5].any()
        found[..., 5] = expected[..., 5]
        assert relative_difference(found, expected) < 1e-5


def angles(seq: int, dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of a model whose sequences may be longer."""
    config = v3.ModelConfig(hidden_dim=dim, num_heads=1, num_kv_heads=1, seq_len=seq + 5)
    tables = v3.RotaryEmbedding(config)
    return tables.cos.to(DEVICE), tables.sin.to(DEVICE)


def rotated(qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, S, heads, d], by multiplication with complex numbers."""
    seq, half = qk.shape[1], qk.shape[3] // 2
    turn = torch.complex(cos[:seq, :, :half].double(), sin[:seq, :, :half].double())
    turned = torch.complex(*qk.chunk(2, dim=-1)) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


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
    check_close(
        lambda *qkv: module.CausalAttention.apply(torch.cat(qkv, 2), 2),
        attention,
        *(q, k, v),
        limit=10 * LIMITS[dtype],  # a score of 500 is rounded by 3e-5, and the exponential shows it
        strided=True,
    )


def next_token_loss(module: ModuleType, logits: Tensor, labels: Tensor) -> Tensor:
    """V3 has one of each token, V4 their mean."""
    if module is v4:
        return v4.NextTokenLoss.apply(logits, labels)
    return v3.CrossEntropy.apply(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@both
@both_types
@pytest.mark.parametrize("banned", [False, True], ids=["any", "banned"])
def test_loss_of_the_next_token(module: ModuleType, banned: bool, dtype, monkeypatch):
    """Of banned tokens the logits are -inf, for whole blocks of a row; some labels do not count."""
    for kernel in ("cross_entropy_forward", "cross_entropy_backward"):
        monkeypatch.setitem(module.OVERRIDES, kernel, {"TILE": 128})
    if module is v4:
        monkeypatch.setitem(v4.OVERRIDES, "mean_loss", {"BLOCK": 16})
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
        strided=not banned,
    )


@both
def test_what_has_no_loss(module: ModuleType):
    """A label outside the vocabulary makes it NaN, as do logits of -inf alone; the first label is
    predicted by nobody."""
    logits, labels = randn(1, 3, 33), torch.tensor([[33, 1, 2]], device=DEVICE)
    assert next_token_loss(module, logits, labels).isfinite().all()
    assert next_token_loss(module, logits, labels.flip(1)).isnan().any()
    logits[0, 1] = -torch.inf
    assert next_token_loss(module, logits, labels).isnan().any()


@pytest.mark.parametrize(("count", "dim", "shape"), [(1, 1, (1,)), (67, 129, (2, 65))])
def test_embedding_adds_to_the_gradient_of_the_output_projection(
    count: int, dim: int, shape: tuple[int, ...]
):
    """In place, so that nobody adds them up."""
    ids = torch.randint(count, shape).to(DEVICE)
    v4.FusedAdamW([[weight := torch.nn.Parameter(randn(count, dim))]], 1e-2, torch.float32)
    embedded = v4.TiedEmbedding.apply(ids, weight)
    v4.linear(embedded, weight, v4.Fusions(), embedded).square().sum().backward()
    wide = weight.detach().double().requires_grad_()
    (F.embedding(ids, wide) @ wide.T).square().sum().backward()
    assert relative_difference(weight.grad, wide.grad) < 1e-5
    assert weight.grad.data_ptr() == weight.slot.buffer.part(weight).data_ptr()


# The model and its command line


@pytest.mark.parametrize(
    ("script", "off", "sizes"),
    [
        (V3, "qkv-fusion swiglu-fusion flash-attention", ""),
        (V3, "qkv-fusion triton-rotary", ""),
        (V3, "triton-attention", ""),
        (V4, "triton-rotary", ""),
        (V4, "triton-attention", ""),
        (V4, "", "--hidden-dim 40 --num-heads 2"),  # heads of 20 channels
    ],
)
def test_fusions_do_without_others_and_with_any_size(script: str, off: str, sizes: str):
    sizes = words("--num-layers 1 --hidden-dim 64 --num-kv-heads 1 --seq-len 9 " + sizes)
    first = build("tiny_llama_v1", *sizes)
    second = build(script, *sizes, *(f"--disable-{flag}" for flag in off.split()))
    weights, losses = random_state(first.state_dict()), []
    for model in (first, second):
        model.load_state_dict(weights)
        losses.append(model(**tokens(*sizes)))
        losses[-1].backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    assert_same_gradients(gradients(second), gradients(first), 1e-4)


@pytest.mark.parametrize("argv", [[], ["--disable-triton-rms-norm"]], ids=["kernel", "pytorch"])
def test_the_residual_stream_stays_float32_under_autocast(argv: list[str]):
    model, seen = build(V3, *argv), {}
    for layer in model.layers:
        layer.register_forward_hook(
            lambda _, __, output: seen.update(stream=output[0].dtype, update=output[1].dtype)
        )
    model.norm.register_forward_hook(lambda _, __, output: seen.update(normed=output[0].dtype))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        model(tokens()["input_ids"])
    assert (seen["stream"], seen["update"]) == (torch.float32, torch.bfloat16)
    assert seen["normed"] == (torch.float32 if argv else torch.bfloat16), "what the next GEMM takes"


def launches(monkeypatch: pytest.MonkeyPatch, operation: Callable, module: ModuleType) -> list:
    """Grid and all named arguments but tensors of every kernel that the operation launches."""
    seen, wrap = [], module.wrap_triton

    class Recorder:
        def __init__(self, kernel: Callable):
            self.launcher = wrap(kernel)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable:
            def launch(*pointers, **arguments) -> None:
                others = {n: a for n, a in arguments.items() if not isinstance(a, Tensor)}
                seen.append((grid, others))
                self.launcher[grid](*pointers, **arguments)

            return launch

    with monkeypatch.context() as patch:
        patch.setattr(module, "wrap_triton", Recorder)
        operation()
    return seen


TOO_MUCH = "33 tokens, but the model's seq_len is 32"
NONE = "an empty batch: {} sequences of {} tokens"


@both_scripts
@pytest.mark.parametrize(
    ("shape", "said"),
    [((2, 33), TOO_MUCH), ((0, 32), NONE.format(0, 32)), ((2, 0), NONE.format(2, 0))],
    ids=["too-long", "no-samples", "no-tokens"],
)
def test_what_the_model_cannot_take_is_refused_before_any_launch(
    script: str, shape: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
):
    model, module = build(script), load(script)
    ids = torch.zeros(shape, dtype=torch.int64, device=DEVICE)

    def forward() -> None:
        with pytest.raises(ValueError, match=said):
            model(ids, ids)
        cos, sin = (table[:32] for table in angles(32, 8))
        with pytest.raises(ValueError, match="33 tokens"):  # behind the angles
            module.Rotary.apply(randn(1, 33, 4, 8), cos, sin, 1)

    assert launches(monkeypatch, forward, module) == []


@both_scripts
def test_nothing_is_launched_for_a_gradient_that_is_not_wanted(
    script: str, monkeypatch: pytest.MonkeyPatch
):
    """Of frozen weights; their gradients stay None, the others are what they were."""
    model, batch = build(script), tokens()

    def backward() -> None:
        model(**batch).backward()

    before = launches(monkeypatch, backward, load(script))
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    frozen = {name for name in expected if "norm" in name or "layers.1.mlp" in name}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
        parameter.grad = None
    after = launches(monkeypatch, backward, load(script))
    # V4's norm leaves out the sum over programs; V3's sums, and drops the result.
    fewer = 0 if script == V3 else sum("norm" in name for name in frozen)
    assert len(after) == len(before) - fewer
    assert {name for name, p in model.named_parameters() if p.grad is None} == frozen
    for name in expected.keys() - frozen:
        assert relative_difference(model.get_parameter(name).grad, expected[name]) < 1e-6, name


def test_blocks_change_what_is_launched_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    qkv = randn(1, 33, 4, 8)

    def attend() -> Tensor:
        return v3.CausalAttention.apply(qkv, 2)

    v3.prepare(parse(V3, *HERE))
    expected, before = attend(), launches(monkeypatch, attend, v3)
    assert before[0][0] == (2, 1)
    changes = words("--blocks attention_forward:BLOCK_M=16,num_warps=2")
    changes += words("--blocks attention_forward:BLOCK_N=16")
    v3.prepare(parse(V3, *HERE, *changes))
    after = launches(monkeypatch, attend, v3)
    assert after[0][0] == (2, 3)
    assert after[0][1] == {**before[0][1], "BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 2}
    limit = 1e-6 if v3.INTERPRETED else LIMITS[torch.float32]
    assert relative_difference(attend(), expected) < limit
    v3.prepare(parse(V3, *HERE))
    assert launches(monkeypatch, attend, v3) == before, "the next command line starts anew"


def test_blocks_are_recorded(run):
    quick = words("--num-steps 1 --warmup-steps 0 --under-profiler --num-layers 1 --batch-size 1")
    asked = "rotary:TILE=128", "rms_norm_forward:num_warps=8,TILE=64"
    chosen = [word for text in asked for word in ("--blocks", text)]
    v3.note_interpreter.cache_clear()
    result = run(V3, *HERE, *quick, *chosen)
    assert result.status == 0, result.stderr
    assert result.summary["config"]["blocks"] == " ".join(asked)
    assert "blocks" not in result.stdout
    assert result.stderr.count("\n") == v3.INTERPRETED
    assert ("Triton's interpreter" in result.stderr) == v3.INTERPRETED
    assert run(V3, *HERE, *quick).stderr == "", "it is said once"


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
def test_heads_too_wide_for_the_attention_kernel_take_pytorchs(script: str, run):
    sizes = words("--hidden-dim 260 --num-heads 2 --seq-len 5")
    result = run(script, *HERE, *sizes, "--verify-accuracy")
    assert result.status == 0, result.stdout
    assert "triton-attention is off" in result.stderr

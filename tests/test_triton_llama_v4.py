"""What TinyLlama V4 adds to V3 gives what float64, and PyTorch's own optimizer, give.

Sizes, limits and helpers are those of the tests of V3, whose kernels V4 keeps.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    assert_one_error,
    assert_same_gradients,
    gradients,
    load,
    parse,
    random_state,
    words,
)
from conftest import relative_difference as difference
from test_triton_llama import (
    DEVICE,
    HERE,
    LIMITS,
    activated,
    add_rms_norm,
    angles,
    banned,
    both_types,
    build,
    check_attention,
    check_close,
    few_columns,
    randn,
    rotated,
    tokens,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from exercises.tiny_llama_v4 import one_launch

V3, V4 = "tiny_llama_v3", "tiny_llama_v4"
v4 = load(V4)
CHANGED = {  # of V3's kernels
    "rms_norm_backward_kernel",
    *("attention_backward_queries_kernel", "attention_backward_keys_kernel"),
    *("cross_entropy_forward_kernel", "cross_entropy_backward_kernel"),
}


def kernels(script: str) -> dict[str, str]:
    """The source of every function under @triton.jit."""
    parts = (ROOT / f"{script}.py").read_text().split("\n\n\n")
    return {
        re.search(r"^def (\w+)", part, re.MULTILINE)[1]: part
        for part in parts
        if part.startswith("@triton.jit")
    }


def test_kernels_of_v3_are_the_same_except_for_those_that_v4_changes():
    before, after = kernels(V3), kernels(V4)
    assert len(before) >= 10
    assert before.keys() < after.keys()
    assert {name for name, source in before.items() if after[name] != source} == CHANGED


@pytest.mark.skipif(not v4.INTERPRETED, reason="a GPU's kernels are counted as such")
@both_types
def test_a_launch_counts_as_one_operator(dtype: torch.dtype):
    parts, out = randn(3, 8), randn(8, dtype=dtype)
    with v4.OperatorCounter() as counter:
        v4.sum_parts(parts, out)
    assert counter.calls == 1


# Norm, projections and attention


@both_types
@pytest.mark.parametrize("with_update", [True, False], ids=["update", "alone"])
@pytest.mark.parametrize("from_output", [True, False], ids=["from-output", "from-input"])
def test_norm(from_output: bool, with_update: bool, dtype: torch.dtype, monkeypatch):
    # a row at a time, several rounds
    monkeypatch.setitem(v4.OVERRIDES, "rms_norm_backward", {"TILE": 64, "PROGRAMS": 2})
    inputs = [randn(2, 9, 33), 1 + 0.2 * randn(33)]
    inputs += [randn(2, 9, 33, size=2.0, dtype=dtype)] if with_update else []
    settings = 1e-5, dtype, from_output
    check_close(
        lambda x, weight, update=None: v4.AddRMSNorm.apply(x, update, weight, *settings),
        lambda x, weight, update=0.0: add_rms_norm(x, 0 * x + update, weight),
        inputs,
        strided=with_update,
        limit=LIMITS[dtype],
    )


def test_norm_from_its_output_loses_only_the_channel_with_a_weight_of_zero():
    x, weight = randn(33, 32), 1 + 0.2 * randn(32)
    weight[5] = 0
    grads = []
    for from_output in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        normed, _ = v4.AddRMSNorm.apply(
            leaves[0], None, leaves[1], 1e-5, torch.float32, from_output
        )
        normed.square().sum().backward()
        grads.append([t.grad for t in leaves])
    for found, expected in zip(*grads, strict=True):
        assert not found[..., 5].any()
        found[..., 5] = expected[..., 5]
        assert difference(found, expected) < LIMITS[torch.float32]


@both_types
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cast"])
def test_projection(direct: bool, dtype: torch.dtype):
    """The weight is a float32 parameter in both types, and so is its gradient."""

    def projection(weight: Tensor, x: Tensor) -> Tensor:
        return v4.linear(x, weight, v4.Fusions(direct_gradients=direct))

    check_close(
        projection, lambda weight, x: x @ weight.T, [randn(35, 33), randn(2, 65, 33, dtype=dtype)]
    )


@both_types
@pytest.mark.parametrize(
    ("batch", "seq", "heads", "group", "dim"),
    [(1, 1, 4, 4, 16), (2, 33, 4, 2, 20), (1, 65, 2, 1, 64)],
)
def test_attention_rotates_gradients_back(
    batch: int, seq: int, heads: int, group: int, dim: int, dtype: torch.dtype
):
    check_attention(batch, seq, heads, group, dim, dtype, strided=seq == 33, module=v4, turned=True)


def test_attention_without_angles():
    check_attention(2, 65, 2, 2, 33, module=v4)


# SwiGLU


@both_types
def test_swiglu(dtype: torch.dtype):
    inputs = [randn(2, 33, 70, dtype=dtype)]
    check_close(v4.SwiGLUActivation.apply, activated, inputs, strided=dtype == torch.float32)


# Loss


@both_types
@pytest.mark.parametrize(
    ("batch", "seq", "vocab", "size"), [(1, 2, 7, 1.0), (2, 17, 100, 300.0), (3, 7, 300, 1.0)]
)
def test_loss_of_the_next_token(
    batch: int, seq: int, vocab: int, size: float, dtype: torch.dtype, monkeypatch
):
    if vocab > 200:  # several blocks of a row, and of rows
        monkeypatch.setitem(v4.OVERRIDES, "mean_loss", {"BLOCK": 16})
        few_columns(monkeypatch, v4)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(vocab, (seq, batch), generator=generator).T.to(DEVICE)
    labels[:, 2::3] = -100

    def reference(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    logits = randn(batch, seq, vocab, dtype=dtype, size=size)
    ours, strided = lambda logits: v4.NextTokenLoss.apply(logits, labels), seq == 17
    check_close(ours, reference, [logits], strided)
    assert not logits.grad[:, 1::3].any()
    assert not logits.grad[:, -1].any()


@both_types
def test_loss_with_banned_tokens(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    few_columns(monkeypatch, v4)
    logits, targets = banned(dtype)
    labels = F.pad(targets, (1, 0))[None]  # the first is predicted by nobody
    padded = F.pad(logits, (0, 0, 0, 1))[None].contiguous()

    def reference(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[0, :-1], targets)

    check_close(lambda logits: v4.NextTokenLoss.apply(logits, labels), reference, [padded])


def test_a_label_outside_the_vocabulary_makes_the_loss_nan():
    logits, labels = randn(1, 3, 33), torch.tensor([[33, 1, 2]], device=DEVICE)
    assert v4.NextTokenLoss.apply(logits, labels).isfinite(), "nothing predicts the first"
    assert v4.NextTokenLoss.apply(logits, labels.flip(1)).isnan()


# Embedding


@pytest.mark.parametrize(
    ("count", "dim", "shape"), [(1, 1, (1,)), (67, 33, (2, 65)), (100, 129, (3, 7))]
)
def test_embedding_adds_to_the_gradient_of_the_output_projection(
    count: int, dim: int, shape: tuple[int, ...]
):
    """In place, so that nobody adds them up."""
    ids = torch.randint(count, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    v4.FusedAdamW([[weight := nn.Parameter(randn(count, dim))]], 1e-2, torch.float32)
    embedded = v4.TiedEmbedding.apply(ids, weight)
    v4.linear(embedded, weight, v4.Fusions(), embedded).square().sum().backward()
    wide = weight.detach().double().requires_grad_()
    (F.embedding(ids, wide) @ wide.T).square().sum().backward()
    assert difference(weight.grad, wide.grad) < 1e-5
    assert weight.grad.data_ptr() == weight.slot.buffer.part(weight).data_ptr()


def test_embedding():
    """Of tokens that do not lie side by side."""
    ids = torch.randint(67, (65, 2), generator=torch.Generator().manual_seed(0)).to(DEVICE).T
    check_close(
        lambda weight: v4.TiedEmbedding.apply(ids, weight),
        lambda weight: F.embedding(ids, weight),
        [randn(67, 33)],
    )


# Optimizer


def parameters() -> list[nn.Parameter]:
    """None fits a block; together they need several."""
    return [nn.Parameter(randn(*shape)) for shape in [(33, 7), (5,), (64, 33), (1,)]]


def fused(
    given: list[nn.Parameter], dtype: torch.dtype = torch.float32, lr: float = 1e-2
) -> torch.optim.Optimizer:
    """Our optimizer, with the parameters in two groups."""
    return v4.FusedAdamW([given[2:], given[:2]], lr, dtype)


def take_steps(optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Each step has gradients of its own."""
    for step in steps:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = randn(step + 1, *parameter.shape)[-1]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def state(optimizer: torch.optim.Optimizer, given: list[nn.Parameter]) -> list[Tensor]:
    """What a step changes: weights, moments, number of steps."""
    own = [optimizer.state[p][name] for p in given for name in ("exp_avg", "exp_avg_sq", "step")]
    return [t.detach().clone() for t in (*given, *own)]


def casts(optimizer: torch.optim.Optimizer, given: list[nn.Parameter]) -> list[Tensor]:
    return [p.slot.cast.clone() for p in given]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_optimizer_takes_the_steps_of_pytorch():
    ours, theirs = parameters(), parameters()
    optimizers = fused(ours), torch.optim.AdamW(theirs, 1e-2)
    for step in range(5):
        for optimizer in optimizers:
            take_steps(optimizer, range(step, step + 1))
        assert max(map(difference, *map(state, optimizers, (ours, theirs)))) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_optimizer_writes_the_rounded_weights_too(dtype: torch.dtype):
    take_steps(optimizer := fused(given := parameters(), dtype), range(2))
    assert equal(casts(optimizer, given), [p.detach().to(dtype) for p in given])


def test_a_scaled_gradient_is_divided_and_a_step_with_an_infinite_one_changes_nothing():
    ours, theirs = parameters(), parameters()
    optimizer, plain = fused(ours, torch.float16), torch.optim.AdamW(theirs, 1e-2)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=512.0)
    for wrong in (True, False, True, False):
        before = state(optimizer, ours) + casts(optimizer, ours)
        for a, b in zip(ours, theirs, strict=True):
            b.grad = randn(*b.shape)
            a.grad = scaler.scale(b.grad)
        if wrong:
            ours[2].grad[3, 2] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if wrong:
            assert equal(state(optimizer, ours) + casts(optimizer, ours), before)
        else:
            plain.step()
    assert scaler.get_scale() == 128
    assert max(map(difference, state(optimizer, ours), state(plain, theirs))) < 1e-6
    assert equal(casts(optimizer, ours), [p.detach().half() for p in ours])


def test_optimizer_resumes_exactly():
    first = parameters()
    take_steps(optimizer := fused(first, torch.bfloat16), range(3))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = fused(second, torch.bfloat16, lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, resumed):
        take_steps(each, range(3, 5))
    ends = [state(o, p) + casts(o, p) for o, p in ((resumed, second), (optimizer, first))]
    assert equal(*ends)


def test_optimizer_leaves_alone_what_has_no_gradient():
    """As PyTorch's, also when it has one again."""
    ours, theirs = parameters(), parameters()
    optimizers = fused(ours), torch.optim.AdamW(theirs, 1e-2)
    for step, missing in enumerate([(), (0,), (2, 3), (1, 3), ()]):
        for given, optimizer in zip((ours, theirs), optimizers, strict=True):
            for number, parameter in enumerate(given):
                found = randn(step + 1, *parameter.shape)[-1]
                parameter.grad = None if number in missing else found
            optimizer.step()
        assert max(map(difference, *map(state, optimizers, (ours, theirs)))) < 1e-6
    third = parameters()
    resumed = fused(third)
    resumed.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for given, optimizer in ((third, resumed), (ours, optimizers[0])):
        for parameter, value in zip(given, ours, strict=True):
            parameter.data.copy_(value)
        take_steps(optimizer, range(1))
    assert equal(state(resumed, third), state(optimizers[0], ours))


def halves(optimizer: torch.optim.Optimizer, assign: bool) -> None:
    """Its learning rate, as a scheduler of PyTorch does, or by hand."""
    if assign:
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * float(group["lr"])
    else:
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("assign", [True, False], ids=["assigned", "scheduler"])
def test_optimizer_follows_the_learning_rate(assign: bool):
    ours, theirs = parameters(), parameters()
    optimizers = fused(ours), torch.optim.AdamW(theirs, 1e-2)
    for step in range(3):
        for optimizer in optimizers:
            take_steps(optimizer, range(step, step + 1))
            halves(optimizer, assign)
    assert float(optimizers[0].param_groups[0]["lr"]) == 1e-2 / 8
    assert max(map(difference, *map(state, optimizers, (ours, theirs)))) < 1e-6


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("how", ["assigned", "scheduler", "loaded"])
def test_what_was_launched_once_follows_the_learning_rate(
    how: str, monkeypatch: pytest.MonkeyPatch
):
    """A graph launches with the same arguments again and again."""
    calls, wrap = [], v4.wrap_triton
    recorder = defaultdict(lambda: lambda *tensors, **sizes: calls.append((tensors, sizes)))
    monkeypatch.setattr(v4, "wrap_triton", lambda kernel: recorder)
    take_steps(optimizer := fused(parameters()), range(1))
    (tensors, sizes), options = calls[0], copy.deepcopy(optimizer.state_dict())
    weights, before = tensors[0], tensors[0].clone()

    def launch() -> Tensor:
        wrap(v4.adamw_kernel)[(sizes["PROGRAMS"],)](*tensors, **sizes)
        return weights - before

    moved = launch()
    tensors[3].zero_(), tensors[4].zero_()
    weights.copy_(before)
    if how == "loaded":
        options["param_groups"][0]["lr"] = 5e-3
        optimizer.load_state_dict(options)
    else:
        halves(optimizer, how == "assigned")
    assert difference(launch(), 0.5 * moved) < 1e-4


def test_options_that_a_kernel_is_compiled_for_cannot_change():
    optimizer = fused(parameters())
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["param_groups"][0]["weight_decay"] = 0.5
    with pytest.raises(ValueError, match=r"weight_decay was 0.01 .* 0.5"):
        optimizer.load_state_dict(wrong)
    with pytest.raises(ValueError, match="betas"):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 10)
    assert copy.deepcopy(optimizer.param_groups)[0]["lr"] == 1e-2


def test_the_state_of_an_optimizer_that_orders_parameters_otherwise_is_refused():
    """That of PyTorch's AdamW has the order of the model, here small parameters come first."""
    other = torch.optim.AdamW(given := parameters())
    take_steps(other, range(1))
    optimizer = fused(mine := parameters())
    before = state(optimizer, mine)
    with pytest.raises(ValueError, match="in another order"):
        optimizer.load_state_dict(other.state_dict())
    assert equal(state(optimizer, mine), before)
    again = torch.optim.AdamW([*given[2:], *given[:2]])
    take_steps(again, range(1))
    optimizer.load_state_dict(again.state_dict())


def test_weights_that_are_loaded_are_used_at_once():
    """In low precision, too, by the forward pass and by the step after it."""
    layer = v4.Linear(33, 7, v4.Fusions()).to(DEVICE)
    x = randn(5, 33, dtype=torch.bfloat16)
    optimizer = v4.FusedAdamW([[layer.weight]], 1e-2, torch.bfloat16)
    for seed in (1, 2):
        layer.load_state_dict(random_state(layer.state_dict(), seed))
        narrow = [layer.weight.to(torch.bfloat16)]
        assert equal(casts(optimizer, [layer.weight]), narrow), "a graph does not look"
        assert torch.equal(layer(x), F.linear(x, layer.weight.to(torch.bfloat16)))
        take_steps(optimizer, range(1))
        assert torch.equal(layer(x), F.linear(x, layer.weight.to(torch.bfloat16)))


# The model

SMALL = words("--num-layers 1 --hidden-dim 64 --num-heads 4 --num-kv-heads 1 --seq-len 9")


@pytest.mark.parametrize("precision", [[], ["--use-amp"]], ids=["float32", "bfloat16"])
def test_gradients_are_found_where_the_optimizer_reads_them_and_add_up(precision: list[str]):
    args = parse(V4, *HERE, *SMALL, *precision)
    model, batch = v4.build_model(args, DEVICE), tokens(*SMALL)
    optimizer = v4.build_optimizer(args, model)

    def backward() -> dict[str, Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=args.use_amp):
            loss = model(**batch)
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    once = backward()
    read = {name: p.slot.buffer.part(p) for name, p in model.named_parameters()}
    assert [n for n, p in model.named_parameters() if p.grad.data_ptr() != read[n].data_ptr()] == []
    narrow = args.use_amp and v4.NARROW_GRADIENTS
    dtype = torch.bfloat16 if narrow else torch.float32
    assert once["layers.0.mlp.down_proj.weight"].dtype == dtype
    twice = backward()
    limit = 4e-3 if narrow else 1e-6  # the second one is not rounded to bfloat16
    assert not [n for n, grad in once.items() if not difference(twice[n], 2 * grad) < limit]
    plain = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for parameter, grad in zip(plain, twice.values(), strict=True):
        parameter.grad = grad.float()
    torch.optim.AdamW(plain, args.learning_rate).step()
    optimizer.step()
    assert max(map(difference, model.parameters(), plain)) < 1e-6


def beside_pytorch(*argv: str, layers: int = 2) -> tuple[nn.Module, nn.Module]:
    """V4's model and V3's with the same weights and the same parameters, of which PyTorch computes
    everything."""
    argv = [*SMALL, "--num-layers", str(layers), *argv]
    packed = ["--disable-all-fusion", "--enable-qkv-fusion", "--enable-swiglu-fusion"]
    pair = build(V4, *argv), build(V3, *argv, *packed)
    for model in pair:
        model.load_state_dict(random_state(model.state_dict()))
    return pair


def share_a_layer(model: nn.Module) -> None:
    model.layers[1] = model.layers[0]


LOSSES = {  # of a model and two batches; a weight is used twice in each
    "two-passes": lambda model, first, second: model(**first) + 2 * model(**second),
    "one-layer-twice": lambda model, first, second: model(**first),
    "a-term-of-its-own": lambda model, first, second: (
        model(**first) + sum(p.square().mean() for p in model.parameters())
    ),
    "an-embedding-alone": lambda model, first, second: (
        model(**first) + model.embed_tokens(second["input_ids"]).square().mean()
    ),
}


@pytest.mark.parametrize(
    ("loss", "precision"), [*((loss, []) for loss in LOSSES), ("two-passes", ["--use-amp"])]
)
def test_a_weight_that_is_used_twice_has_the_sum_of_both_gradients(loss: str, precision: list[str]):
    batches = [tokens(*SMALL, "--seed", seed) for seed in "12"]
    pair, limit = beside_pytorch(), 0.1 if precision else 1e-4
    for model in pair:
        if loss == "one-layer-twice":
            share_a_layer(model)
    optimizer = v4.build_optimizer(parse(V4, *HERE, *SMALL, *precision), pair[0])
    for _ in range(2):
        for model in pair:
            model.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bool(precision)):
                LOSSES[loss](model, *batches).backward()
        expected = {name: parameter.grad for name, parameter in pair[1].named_parameters()}
        found = {name: parameter.grad for name, parameter in pair[0].named_parameters()}
        assert_same_gradients(found, expected, limit)
    grads = {name: parameter.grad.float() for name, parameter in pair[0].named_parameters()}
    optimizer.step()
    for name, parameter in pair[0].named_parameters():
        assert difference(optimizer.state[parameter]["exp_avg"], 0.1 * grads[name]) < 1e-5, name


def test_the_embedding_alone_has_its_gradient():
    """The loss may be of something before the output projection."""
    ids, pair = tokens(*SMALL)["input_ids"], beside_pytorch()
    v4.build_optimizer(parse(V4, *HERE, *SMALL), pair[0])
    for model in pair:
        hidden = []
        model.layers[1].register_forward_hook(lambda *given, kept=hidden: kept.append(given[-1][0]))
        logits = model(ids)
        hidden[0].square().mean().backward(retain_graph=True)
        logits.square().mean().backward(retain_graph=True)
        hidden[0].mean().backward()
    assert difference(*(model.embed_tokens.weight.grad for model in pair)) < 1e-4


def test_gradients_that_are_asked_for_belong_to_who_asked():
    """torch.autograd.grad leaves nothing that a later backward pass or the optimizer writes
    into."""
    batches = [tokens(*SMALL, "--seed", seed) for seed in "123"]
    pair = beside_pytorch()
    optimizer = v4.build_optimizer(parse(V4, *HERE, *SMALL), pair[0])
    expected, found = (
        [torch.autograd.grad(model(**batch), list(model.parameters())) for batch in batches[:2]]
        for model in reversed(pair)
    )
    pair[0](**batches[2]).backward()
    optimizer.step()
    for one, other in zip(found, expected, strict=True):
        assert max(map(difference, one, other)) < 1e-4


def test_micro_batches_are_added_up_in_float32():
    args, model = parse(V4, *HERE, *SMALL, "--use-amp"), build(V4, *SMALL)
    optimizer, alone = v4.build_optimizer(args, model), []

    def backward(seed: str) -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(**tokens(*SMALL, "--seed", seed))
        loss.backward()

    for seed in "123":
        backward(seed)
        alone.append({name: p.grad.double() for name, p in model.named_parameters()})
        optimizer.zero_grad()
    for _ in range(2):
        for seed in "123":
            backward(seed)
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype == torch.float32
            assert difference(parameter.grad, sum(grads[name] for grads in alone)) < 4e-3, name
        optimizer.zero_grad()


@pytest.mark.parametrize("frozen", ["embed_tokens", "mlp.down_proj", "layers.0"])
def test_frozen_parameters_stay_and_the_others_train(frozen: str):
    batch, pair = tokens(*SMALL), beside_pytorch()
    for model in pair:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
    optimizer = v4.build_optimizer(parse(V4, *HERE, *SMALL), pair[0])
    before = {name: parameter.detach().clone() for name, parameter in pair[0].named_parameters()}
    for model in pair:
        model(**batch).backward()
    grads = [{n: p.grad for n, p in model.named_parameters() if frozen not in n} for model in pair]
    assert_same_gradients(*grads, 1e-4)
    optimizer.step()
    after = dict(pair[0].named_parameters())
    same = {name for name, parameter in after.items() if torch.equal(parameter, before[name])}
    assert same == {name for name in before if frozen in name} != set()
    assert all(after[name].grad is None for name in same)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += str(function).startswith("aten.mm")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("wanted", [(1, 0), (0, 1)], ids=["input", "weight"])
def test_a_projection_multiplies_for_no_gradient_that_is_not_wanted(wanted: tuple[int, int]):
    x, weight = (
        t.requires_grad_(bool(w)) for t, w in zip((randn(5, 6), randn(8, 6)), wanted, strict=True)
    )
    out = v4.linear(x, weight, v4.Fusions())
    with Products() as seen:
        out.sum().backward()
    assert (x.grad is None, weight.grad is None, seen.count) == (not wanted[0], not wanted[1], 1)


@pytest.mark.parametrize(
    "argv",
    ["--disable-triton-rotary", "--disable-triton-attention", "--hidden-dim 40 --num-heads 2"],
    ids=["rotary-of-pytorch", "attention-of-pytorch", "heads-of-20-channels"],
)
def test_fusions_do_without_others_and_with_any_size(argv: str):
    argv = [*SMALL, *argv.split()]
    sizes = [word for word in argv if not word.startswith("--disable")]
    first, second = build("tiny_llama_v1", *sizes), build(V4, *argv)
    weights = random_state(first.state_dict())
    for model in (first, second):
        model.load_state_dict(weights)
        model(**tokens(*SMALL)).backward()
    assert_same_gradients(gradients(second), gradients(first), 1e-4)


def test_on_a_cpu_without_the_interpreter_nothing_starts(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(v4, "INTERPRETED", False)
    on = ["--disable-all-fusion", "--enable-fused-optimizer"]
    assert_one_error(run(V4, *on, "--num-steps", "1", "--under-profiler"), 4, "TRITON_INTERPRET=1")


def test_a_compiler_is_refused_in_one_line(run):
    assert_one_error(run(V4, *HERE, "--enable-torch-compile"), 2, "tiny_llama_v3.py")


# A transformer layer in one launch


def layer_of(
    x: Tensor, norm_1: Tensor, qkv: Tensor, o: Tensor, norm_2: Tensor, gate_up: Tensor,
    down: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float,
) -> Tensor:  # fmt: skip
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    packed = (norm(x, norm_1) @ qkv.T).unflatten(-1, (heads + 2 * kv_heads, -1))
    packed = rotated(packed, cos, sin, kv_heads).transpose(1, 2)
    q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ o.T
    gate, up = (norm(x, norm_2) @ gate_up.T).chunk(2, dim=-1)
    return x + (F.silu(gate) * up) @ down.T


def layer_arguments(
    batch: int, seq: int, heads: int, kv_heads: int, dim: int, inner: int, dtype: torch.dtype
) -> tuple:
    """Residual stream, weights in `dtype` (norms in float32), angles and sizes."""
    width, packed = heads * dim, (heads + 2 * kv_heads) * dim
    norms = [1 + 0.3 * randn(1, width)[0], 1 + 0.3 * randn(2, width)[1]]
    shapes = [(packed, width), (width, width), (2 * inner, width), (width, inner)]
    qkv, o, gate_up, down = (randn(*shape, size=shape[1] ** -0.5, dtype=dtype) for shape in shapes)
    x = randn(batch, seq, width, size=2.0)
    return x, norms[0], qkv, o, norms[1], gate_up, down, *angles(seq, dim), heads, kv_heads, 1e-5


@both_types
@pytest.mark.parametrize("launches", [1, 5])
@pytest.mark.parametrize("sizes", [(1, 1, 4, 2, 16, 40), (2, 33, 4, 1, 10, 21)], ids=str)
def test_a_layer_in_one_launch_and_in_five(
    sizes: tuple[int, ...], launches: int, dtype: torch.dtype
):
    """The residual stream is float32; what the layer adds to it is compared."""
    given = layer_arguments(*sizes, dtype)
    x, wide = given[0], [t.double() if isinstance(t, Tensor) else t for t in given]
    found = one_launch.transformer_block(*given, launches)
    assert found.dtype == x.dtype
    assert difference(found - x, layer_of(*wide) - wide[0]) < LIMITS[dtype]


def test_a_layer_is_launched_cooperatively_where_its_programs_wait(monkeypatch: pytest.MonkeyPatch):
    """So that all of them run at the same time; programs of one phase alone need not."""
    given, seen = layer_arguments(1, 7, 4, 1, 24, 33, torch.float32), []
    monkeypatch.setattr(one_launch, "BACKEND", "cuda")
    grids = defaultdict(lambda: lambda *_, **options: seen.append(options))
    monkeypatch.setattr(one_launch, "wrap_triton", lambda kernel: grids)
    for launches in (1, 5):
        one_launch.transformer_block(*given, launches)
    found = [options.get("launch_cooperative_grid", False) for options in seen]
    assert found == [True] + 5 * [False]


def test_a_layer_in_one_launch_is_refused_where_triton_cannot_launch_it(
    run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(one_launch, "TOO_OLD", "a layer as one launch needs Triton 3.3")
    given = layer_arguments(1, 7, 4, 1, 24, 33, torch.float32)
    with pytest.raises(RuntimeError, match=r"needs Triton 3\.3"):
        one_launch.transformer_block(*given)
    assert one_launch.transformer_block(*given, 5).isfinite().all()
    assert_one_error(run(V4, *HERE, *SMALL, "--mode", "benchmark"), 4, "needs Triton 3.3")


def test_a_layer_does_not_read_behind_the_angles():
    given = list(layer_arguments(1, 7, 4, 1, 24, 33, torch.float32))
    given[7], given[8] = given[7][:6], given[8][:6]
    with pytest.raises(ValueError, match="7 tokens, but the model's seq_len is 6"):
        one_launch.transformer_block(*given)


@pytest.mark.parametrize("precision", [[], ["--use-amp"]], ids=["float32", "bfloat16"])
def test_inference_says_that_all_ways_agree(precision: list[str], run):
    result = run(V4, *HERE, *SMALL, "--mode", "benchmark", *precision)
    assert result.status == 0, result.stdout + result.stderr
    assert re.search(r"^one launch .*relative error", result.stdout, re.MULTILINE)
    assert (result.directory / f"{V4}_benchmark.json").is_file()

"""TinyLlama V4's optimizer takes the steps of PyTorch's, and gradients are where it reads them.

Its kernels are tested beside V3's; the optimizer is the same in TinyOpenFold (parts/optimizer.py).
"""

import copy

import pytest
import torch
from conftest import (
    DEVICE,
    SMALLEST,
    assert_one_error,
    assert_same_gradients,
    both_types,
    load,
    parse,
    randn,
    random_state,
)
from conftest import relative_difference as difference
from test_triton_llama import HERE, build, tokens
from torch import Tensor, nn
from torch.nn.utils import prune

V3, V4 = "tiny_llama_v3", "tiny_llama_v4"
v4 = load(V4)


@pytest.mark.skipif(not v4.INTERPRETED, reason="a GPU's kernels are counted as such")
@both_types
def test_a_launch_counts_as_one_operator(dtype: torch.dtype):
    parts, out = randn(3, 8), randn(8, dtype=dtype)
    with v4.OperatorCounter() as counter:
        v4.sum_parts(parts, out)
    assert counter.calls == 1


# Optimizer


def parameters() -> list[nn.Parameter]:
    """The same ones every time. None fits a block; together they need several."""
    torch.manual_seed(0)
    return [nn.Parameter(randn(*shape)) for shape in [(33, 7), (5,), (64, 33), (1,)]]


def fused(given: list[nn.Parameter], lr: float = 1e-2) -> torch.optim.Optimizer:
    """Our optimizer, with the parameters in two groups."""
    return v4.FusedAdamW([given[2:], given[:2]], lr)


def take_step(
    optimizer: torch.optim.Optimizer, given: list[nn.Parameter], seed: int, missing: tuple = ()
) -> None:
    """With gradients of this seed, but for these parameters."""
    torch.manual_seed(seed)
    for number, parameter in enumerate(given):
        grad = randn(*parameter.shape)
        parameter.grad = None if number in missing else grad
    optimizer.step()
    optimizer.zero_grad()


def state(optimizer: torch.optim.Optimizer, given: list[nn.Parameter]) -> list[Tensor]:
    """What a step changes of each parameter: weights and moments."""
    own = [optimizer.state[p][name] for p in given for name in ("exp_avg", "exp_avg_sq")]
    return [t.detach().clone() for t in (*given, *own)]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def halve(optimizer: torch.optim.Optimizer, how: str) -> None:
    """The learning rate: assigned, as PyTorch's schedulers do it, or as an earlier state has it."""
    if how == "assigned":
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * float(group["lr"])
            group.update(betas=(0.5, 0.7), weight_decay=0.5)
    elif how == "scheduler":
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()
    elif how == "loaded":
        earlier = copy.deepcopy(optimizer.state_dict())
        earlier["param_groups"][0]["lr"] = 0.5 * float(earlier["param_groups"][0]["lr"])
        optimizer.load_state_dict(earlier)


MISSING = (), (), (3,), (2,), (1, 2), ()  # gradients in six steps


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("rate", ["assigned", "scheduler", "loaded"])
def test_optimizer_takes_the_steps_of_pytorch(rate: str):
    """What has no gradient stays, and counts its own steps."""
    ours, theirs = parameters(), parameters()
    optimizers = fused(ours), torch.optim.AdamW(theirs, 1e-2)
    place = optimizers[0].param_groups[0]["lr"]
    for seed, missing in enumerate(MISSING):
        for optimizer, given in zip(optimizers, (ours, theirs), strict=True):
            take_step(optimizer, given, seed, missing)
            halve(optimizer, rate)
        assert max(map(difference, *map(state, optimizers, (ours, theirs)))) < 1e-6
    assert float(optimizers[0].param_groups[0]["lr"]) == 1e-2 / 64
    assert optimizers[0].param_groups[0]["lr"] is place, "a graph reads it there"


def test_a_scaled_gradient_is_divided_and_a_step_with_an_infinite_one_changes_nothing():
    ours, theirs = parameters(), parameters()
    optimizer, plain = fused(ours), torch.optim.AdamW(theirs, 1e-2)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=512.0)
    for wrong in (True, False, True, False):
        before = state(optimizer, ours)
        for a, b in zip(ours, theirs, strict=True):
            b.grad = randn(*b.shape)
            a.grad = scaler.scale(b.grad)
        if wrong:
            ours[2].grad[3, 2] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if wrong:
            assert equal(state(optimizer, ours), before)
        else:
            plain.step()
    assert scaler.get_scale() == 128
    assert max(map(difference, state(optimizer, ours), state(plain, theirs))) < 1e-6


def test_a_state_is_loaded_whole_or_refused():
    """PyTorch's AdamW orders parameters as the model does, ours by group; each counts its steps."""
    ours, theirs = parameters(), parameters()
    optimizer = fused(ours, lr=1.0)
    before = state(optimizer, ours)
    take_step(adamw := torch.optim.AdamW(theirs), theirs, 0)
    with pytest.raises(ValueError, match="in another order"):
        optimizer.load_state_dict(adamw.state_dict())
    assert equal(state(optimizer, ours), before)
    take_step(adamw := torch.optim.AdamW([*theirs[2:], *theirs[:2]]), theirs, 0)
    take_step(adamw, theirs, 1, missing=(1,))
    optimizer.load_state_dict(adamw.state_dict())
    for parameter, own in zip(theirs, ours, strict=True):
        own.data.copy_(parameter)
    for each, parameters_of in ((optimizer, ours), (adamw, theirs)):
        take_step(each, parameters_of, 2)
    assert max(map(difference, state(optimizer, ours), state(adamw, theirs))) < 1e-6


def test_what_the_optimizer_does_not_support_is_refused_in_one_line():
    optimizer = fused(given := parameters())
    with pytest.raises(ValueError, match="build a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(given[0])]})
    with pytest.raises(TypeError, match="its state_dict"):
        copy.deepcopy(optimizer)
    given[1].data = given[1].data.half()
    given[1].grad = given[1].data
    with pytest.raises(TypeError, match=r"a parameter is torch\.float16"):
        optimizer.step()


# The model

SMALL = SMALLEST["llama"]
RATE = 3e-3


@pytest.mark.parametrize("precision", [[], ["--use-amp"]], ids=["float32", "bfloat16"])
def test_gradients_reach_the_optimizer_as_a_product_wrote_them(precision: list[str]):
    args = parse(V4, *HERE, *SMALL, *precision)
    model = v4.build_model(args, DEVICE)
    optimizer = v4.build_optimizer(args, model)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=args.use_amp):
        loss = model(**tokens(*SMALL))
    loss.backward()
    weight = model.layers[0].mlp.down_proj.weight
    assert optimizer.collect([weight])[0].data_ptr() == weight.grad.data_ptr()
    narrow = torch.bfloat16 if args.use_amp and v4.NARROW_GRADIENTS else torch.float32
    assert model.layers[0].mlp.down_proj.weight.grad.dtype == narrow


def beside_pytorch(*precision: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """V4's model and V3's with the same weights and the same parameters, of which PyTorch computes
    everything; V4's optimizer."""
    argv = [*SMALL, "--num-layers", "2"]
    packed = ["--disable-all-fusion", "--enable-qkv-fusion", "--enable-swiglu-fusion"]
    pair = build(V4, *argv), build(V3, *argv, *packed)
    for model in pair:
        model.load_state_dict(random_state(model.state_dict()))
        model.norm.weight.data[:4] = 0.0  # by which no kernel may divide
    return *pair, v4.build_optimizer(parse(V4, *HERE, *argv, *precision), pair[0])


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# An ordinary module: what people do with one between two steps


def transpose_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.data = p.data.t().contiguous().t() if p.ndim == 2 else p.data.repeat_interleave(2)[::2]


def scale_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.data.mul_(1.5)


def vector_and_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, model.parameters())


def fail_in_a_pass(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    handle = model.norm.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        one_step(model, optimizer)
    handle.remove()
    scale_data(model, optimizer)


def gradients_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def load_by_assignment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)  # the optimizer has the old ones


def train_a_copy(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """And drop it: the model must not notice."""
    for other in (copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module):
        one_step(other, torch.optim.AdamW(other.parameters(), 1e-2))


def prune_a_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    prune.l1_unstructured(model.layers[0].mlp.down_proj, "weight", 0.5)


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def negate(parameter: Tensor) -> None:
        parameter.grad.neg_()

    for p in model.layers.parameters():
        p.register_hook(lambda grad: 2 * grad)
        p.register_post_accumulate_grad_hook(negate)


BETWEEN_STEPS = [
    fail_in_a_pass,
    gradients_by_hand,
    train_a_copy,
    prune_a_weight,
    vector_and_back,
    transpose_memory,
    load_by_assignment,
    hooks,
]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, amp: bool = False) -> float:
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=amp):
        loss = model(**tokens(*SMALL))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bfloat16"])
def test_a_model_trains_on_as_v1_does_whatever_is_done_between_two_steps(amp: bool):
    curves = []
    for script in ("tiny_llama_v1", V4):
        model = build(script, *SMALL)
        # PyTorch's fused one takes moments and weights in any order of memory for the same
        optimizer = torch.optim.AdamW(model.parameters(), RATE)
        if script == V4:
            optimizer = v4.build_optimizer(
                parse(V4, *HERE, *SMALL, f"--learning-rate={RATE}"), model
            )
        losses = {}
        for act in BETWEEN_STEPS:
            one_step(model, optimizer, amp)
            act(model, optimizer)
            losses[act.__name__] = one_step(model, optimizer, amp)
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=3e-2 if amp else 1e-4)


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bfloat16"])
def test_a_step_between_a_forward_pass_and_its_backward_pass_is_refused(amp: bool):
    model, _, optimizer = beside_pytorch(*(["--use-amp"] if amp else []))
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=amp):
        one, two = (model(**tokens(*SMALL, "--seed", seed)) for seed in "12")
    one.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        two.backward()


def test_second_derivatives_are_refused_in_one_line():
    model = build(V4, *SMALL)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(model(**tokens(*SMALL)), list(model.parameters()), create_graph=True)


# Gradients

LOSSES = {  # of a model and two batches; a weight is used twice in each but the last
    "two-passes": lambda model, first, second: model(**first) + 2 * model(**second),
    "one-layer-twice": lambda model, first, second: model(**first),
    "a-term-of-its-own": lambda model, first, second: (
        model(**first) + sum(p.square().mean() for p in model.parameters())
    ),
    "an-embedding-too": lambda model, first, second: (
        model(**first) + model.embed_tokens(second["input_ids"]).square().mean()
    ),
    "an-embedding-alone": lambda model, first, second: (
        model.embed_tokens(second["input_ids"]).square().mean()
    ),
}


@pytest.mark.parametrize(
    ("loss", "precision"), [*((loss, []) for loss in LOSSES), ("two-passes", ["--use-amp"])]
)
def test_a_weight_that_is_used_twice_has_the_sum_of_both_gradients(loss: str, precision: list[str]):
    batches = [tokens(*SMALL, "--seed", seed) for seed in "12"]
    *pair, optimizer = beside_pytorch(*precision)
    if loss == "one-layer-twice":
        for model in pair:
            model.layers[1] = model.layers[0]
    for _ in range(2):
        for model in pair:
            model.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bool(precision)):
                LOSSES[loss](model, *batches).backward()
        assert_same_gradients(*map(grads_of, pair), 0.1 if precision else 1e-4)
    grads = {name: grad.float() for name, grad in grads_of(pair[0]).items()}
    optimizer.step()
    for name, grad in grads.items():
        average = optimizer.state[pair[0].get_parameter(name)]["exp_avg"]
        assert difference(average, 0.1 * grad) < 1e-5, name


def test_gradients_that_are_asked_for_belong_to_who_asked():
    """torch.autograd.grad leaves nothing that a later backward pass or the optimizer writes
    into."""
    batches = [tokens(*SMALL, "--seed", seed) for seed in "123"]
    *pair, optimizer = beside_pytorch()
    found, expected = (
        [torch.autograd.grad(model(**batch), list(model.parameters())) for batch in batches[:2]]
        for model in pair
    )
    pair[0](**batches[2]).backward()
    optimizer.step()
    for one, other in zip(found, expected, strict=True):
        assert max(map(difference, one, other)) < 1e-4


def test_micro_batches_are_added_up_in_float32():
    model, _, optimizer = beside_pytorch("--use-amp")
    found = {}
    for seeds in ("1", "2", "12"):
        for seed in seeds:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = model(**tokens(*SMALL, "--seed", seed))
            loss.backward()
        found[seeds] = grads_of(model)
        optimizer.zero_grad()
    for name, grad in found["12"].items():
        assert grad.dtype == torch.float32
        assert difference(grad, found["1"][name].double() + found["2"][name].double()) < 4e-3, name


@pytest.mark.parametrize("frozen", ["embed_tokens", "layers.0"])
def test_frozen_parameters_stay_and_the_others_train(frozen: str):
    """Also V3's, which has another optimizer."""
    ours, plain, optimizer = beside_pytorch()
    v3 = build(V3, *SMALL, "--num-layers", "2")
    v3.load_state_dict(plain.state_dict())
    for model in (ours, plain, v3):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        model(**tokens(*SMALL)).backward()
    for model in (ours, v3):
        assert_same_gradients(grads_of(model), grads_of(plain), 1e-4)
    before = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    optimizer.step()
    after = ours.named_parameters()
    same = {name for name, parameter in after if torch.equal(parameter, before[name])}
    assert same == {name for name in before if frozen in name} == before.keys() - grads_of(plain)


def test_a_compiler_is_refused_in_one_line(run):
    assert_one_error(run(V4, *HERE, "--enable-torch-compile"), 2, "tiny_llama_v3.py")

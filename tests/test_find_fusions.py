"""Which operators could be one kernel: bytes, lines and groups of planted chains, and what is not
understood."""

import gc
import json
import linecache
import random
import weakref
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, captured, strict_json
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from dev.bench import find_fusions as study
from fusion_lab.cli import ToolError
from fusion_lab.fusions import command as find_fusions
from fusion_lab.fusions import step as steps
from fusion_lab.fusions.flops import attention as flops_of_attention
from fusion_lab.fusions.flops import registry
from fusion_lab.fusions.groups import Finding, Group
from fusion_lab.fusions.rates import Rates
from fusion_lab.fusions.record import Operator, Recorded, Recorder, Use
from fusion_lab.fusions.step import Step, attribute, compared, record

RATES = Rates("a GPU", 2500.0, 1.0, 0.3, {"bf16": 700.0, "TF32": 400.0, "fp32": 50.0})
N, D = 64, 32  # rows, and numbers in a row
ROW = 4 * N * D  # bytes of a float32 tensor of that size
X, Y, W, SQUARE = torch.randn(N, D), torch.randn(N, D), torch.randn(D, D), torch.randn(N, N)
WIDE, ROWS = torch.randn(4, 100_000), torch.arange(N)
TABLE, PICTURE = torch.randn(1000, D), torch.randn(1, 4, N, D)


def found(take, rates=None) -> Finding:
    """What is found in a step that is really taken, and whose result stays."""
    out = []
    step = Step("test", lambda: out.append(take()))
    step.take()
    return Finding(record(step), rates)


def group_of(finding: Finding, name: str) -> Group:
    return next(group for group in finding.groups if name in group.names)


def code_at(row: dict) -> list[str]:
    """The source of the lines that a chain names."""
    file, _, numbers = row["lines"].rpartition(":")
    return [linecache.getline(str(ROOT / file), int(n)).strip() for n in numbers.split(",")]


# --- bytes and lines of planted chains


def test_a_chain_of_known_bytes_and_lines():
    """Three operators read and write six tensors; as one kernel they read one and write one."""

    def take():
        y = X * 2
        y = y.exp()
        return y + 1

    (row,) = found(take).rows()
    assert (row["chain"], row["pass"], row["places"]) == ("mul, exp, add", "forward", 1)
    assert (row["bytes_now"], row["bytes_fused"]) == (6 * ROW, 2 * ROW)
    assert code_at(row) == ["y = X * 2", "y = y.exp()", "return y + 1"]


def test_a_backward_chain_has_the_lines_of_the_forward_pass():
    """Not those of what runs without a gradient between."""
    x = torch.randn(N, D, requires_grad=True)

    def take():
        x.grad = None
        y = torch.sigmoid(x)
        z = torch.tanh(y)
        with torch.no_grad():
            x.detach().cos()
        z.backward(torch.ones(N, D))

    finding = found(take)
    row = next(row for row in finding.rows() if row["pass"] == "backward")
    assert row["chain"] == "tanh_backward, sigmoid_backward"
    assert code_at(row) == ["y = torch.sigmoid(x)", "z = torch.tanh(y)"]
    # y, z and the ones are computed again: x is read, its gradient is written
    assert (row["bytes_now"], row["bytes_fused"]) == (6 * ROW, 2 * ROW)
    assert group_of(finding, "cos").phase == "forward"


# --- what is one kernel, and what may not be


def of_a_part():
    y = torch.zeros(2 * N, D)
    z = y @ W
    y[:N].copy_(X @ W)
    return y, z


@torch.library.custom_op("find_fusions_test::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.parametrize(
    ("take", "expected"),
    [
        # as one kernel exp and add would wait for the product between, and this for them
        (lambda: (y := SQUARE.exp()) + y @ SQUARE, [["exp"], ["mm"], ["add"]]),
        # a long sum is complete when its kernel has ended, a short one before
        (lambda: X.exp() / X.exp().sum(1, keepdim=True), [["exp", "exp", "sum", "div"]]),
        (lambda: WIDE.exp() / WIDE.exp().sum(1, keepdim=True), [["exp", "div"], ["exp", "sum"]]),
        # what is read before a change in place is another version
        (of_a_part, [["zeros"], ["mm"], ["mm"], ["copy_"]]),
        # a gather needs the whole of its source, and a scatter nothing behind it
        (lambda: X.exp()[ROWS].cos(), [["exp"], ["index", "cos"]]),
        (
            lambda: torch.zeros(N, D).index_add_(0, ROWS, X.exp()).cos(),
            [["zeros"], ["exp", "index_add_"], ["cos"]],
        ),
        (lambda: odd(X.exp()).cos(), [["exp"], ["odd"], ["cos"]]),
        (lambda: F.dropout(X.exp(), 0.1) + 1, [["exp", "bernoulli_", "div_", "mul", "add"]]),
    ],
)
def test_groups(take, expected):
    assert sorted(group.names for group in found(take).groups) == sorted(expected)


# --- what must cross memory


def read_after(change):
    y = WIDE * 2
    total = y.exp().sum()
    change()
    return y + total


@pytest.mark.parametrize(
    ("take", "name", "read", "kept"),
    [
        (of_a_part, "copy_", ROW, ROW),
        (lambda: X[: N // 2] + X[N // 2 :], "add", ROW, ROW // 2),
        # as many rows as it takes, of 32 bytes at least, and their numbers
        (lambda: TABLE.view(-1)[ROWS], "index", 32 * N + ROWS.nbytes, 4 * N),
        # windows overlap, and need all of their source once
        (lambda: PICTURE.unfold(3, 4, 2) + 1, "add", PICTURE.nbytes, 4 * N * 15 * 4 * 4),
        (lambda: F.max_pool2d(PICTURE.exp(), 2), "exp", PICTURE.nbytes, PICTURE.nbytes),
        # nothing is computed again from what has changed by then
        (lambda: read_after(lambda: None), "sum", WIDE.nbytes, 4),
        (lambda: read_after(lambda: WIDE.add_(0)), "sum", WIDE.nbytes, 2 * WIDE.nbytes + 4),
        # a second copy is none
        (lambda: X.bfloat16() @ W.bfloat16() + X.bfloat16() @ W.bfloat16(), "add", ROW, ROW // 2),
    ],
)
def test_bytes_of_a_kernel(take, name, read, kept):
    group = group_of(found(take), name)
    assert (sum(group.reads.values()), sum(group.keeps.values())) == (read, kept)


# --- levels


def attention(*shape):
    q, k, v = (torch.randn(shape) for _ in range(3))
    return lambda: (q @ k.transpose(1, 2)).softmax(-1) @ v


def gradients_of_attention():
    """The gradient of the bias, a sum, is a part of it."""
    q, k, v = (torch.randn(4, 64, 16, requires_grad=True) for _ in range(3))
    bias, ones = torch.randn(64, 64, requires_grad=True), torch.ones(4, 64, 16)

    def take():
        out = (q @ k.transpose(1, 2) + bias).softmax(-1) @ v
        return torch.autograd.grad(out, (q, k, v, bias), ones)

    return take


@pytest.mark.parametrize(
    ("take", "kernels"),
    [
        (lambda: (X @ W).exp(), {"chains": 2, "products": 1}),
        # blocks have parts of long columns, but a kernel that is there now is one
        (lambda: TABLE.exp().sum(0), {"now": 2, "chains": 1}),
        (attention(4, 128, 16), {"products": 3, "attention": 1}),
        (gradients_of_attention(), {"attention": 2}),
    ],
)
def test_kernels_of_a_level(take, kernels):
    levels = found(take).levels
    assert {level: levels[level]["kernels"] for level in kernels} == kernels


# --- what holds for any step


OPTIMIZERS = [
    partial(torch.optim.AdamW, fused=True),
    partial(torch.optim.AdamW, foreach=False),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
]
PARTS = [
    lambda x, w: x @ w,
    lambda x, w: torch.tanh(x) * torch.sigmoid(x) + x,
    lambda x, w: F.layer_norm(x, (D,), w[0], w[1]),
    lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w[0],
    lambda x, w: (x @ x.t()).softmax(-1) @ x,
    lambda x, w: torch.cat([x[:, ::2], x[:, 1::2].exp()], 1) @ w,
    lambda x, w: F.embedding(ROWS % D, w).cumsum(0) + x,
    lambda x, w: F.batch_norm(x @ w, None, None, w[0], w[1], training=True).relu(),
    lambda x, w: x.index_add(0, ROWS // 2, x @ w) + x[ROWS.flip(0)],
    lambda x, w: x.clone().mul_(2).add_(x @ w),
]


def random_step(seed: int):
    """A step of random parts, with one of the optimizers; and what it runs forward."""
    chance = random.Random(seed)
    parts = chance.choices(PARTS, k=chance.randint(2, 6))
    torch.manual_seed(seed)
    weights = [nn.Parameter(torch.randn(D, D) / D) for _ in parts]
    optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)](weights)

    def forward():
        x = X @ weights[0]
        for part, weight in zip(parts, weights, strict=True):
            x = part(x, weight)
        return x.square().mean()

    def loss():
        optimizer.zero_grad()
        out = forward()
        out.backward()
        return out

    def take():
        out = loss()
        optimizer.step()
        return out

    return take, loss, optimizer, forward


@pytest.mark.parametrize("seed", range(12))
def test_totals_of_a_random_step(seed):
    """Nothing rises from level to level, and chains are what the first saves."""
    take, *_ = random_step(seed)
    finding = found(take, rates=RATES)
    levels, rows = finding.levels, finding.rows()
    for key in ("us", "bytes", "kernels"):
        values = [level[key] for level in levels.values()]
        assert values == sorted(values, reverse=True), key
        saved = sum(row[f"{key}_now"] - row[f"{key}_fused"] for row in rows)
        assert saved == pytest.approx(levels["now"][key] - levels["chains"][key]), key


def test_a_step_in_a_closure_is_the_same():
    """What a closure runs is no part of the optimizer that calls it."""

    class Calls(torch.optim.SGD):
        def step(self, closure):
            with torch.enable_grad():
                out = closure()
            super().step()
            return out

    found_levels = []
    for closure in (False, True):
        torch.manual_seed(0)
        _, loss, optimizer, _ = random_step(3)
        weights = optimizer.param_groups[0]["params"]
        if closure:
            take = partial(Calls(weights, 0.1).step, loss)
        else:
            plain = torch.optim.SGD(weights, 0.1)
            take = lambda: (loss(), plain.step())[0]  # noqa: B023, E731
        finding = found(take, rates=RATES)
        phases = [operator.phase for operator in finding.operators]
        found_levels.append((finding.levels, phases))
        assert {*phases} == {"forward", "backward", "optimizer"}
    assert found_levels[0] == found_levels[1]


@pytest.mark.parametrize("seed", range(2))
def test_no_gradients_and_inference_are_the_same(seed):
    """Inference mode hands operators over that are made of others."""
    *_, forward = random_step(seed)
    levels = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            take = lambda: F.linear(forward().view(1, 1), X[:, :1]).softmax(0)  # noqa: E731
            finding = found(take, rates=RATES)
        levels.append((finding.levels["chains"], finding.recorded.flop()))
    assert levels[0] == levels[1]


# --- FLOPs


def trained(part, *inputs):
    """A forward and backward pass of it."""
    return lambda: part(*inputs).square().mean().backward()


LSTM, SEQUENCE = nn.LSTM(16, 32, batch_first=True), torch.randn(4, 8, 16)
IMAGE = torch.randn(1, 4, 16, 16, requires_grad=True)
SIGNAL = torch.randn(2, 16, 10, requires_grad=True)
COMPLEX = torch.randn(N, N, dtype=torch.complex64)
GROUPS = torch.tensor([16, 64], dtype=torch.int32)
EXPERTS = torch.randn(2, D, D).bfloat16()


@pytest.mark.parametrize(
    ("take", "flop"),
    [
        (lambda: X @ X[0], 2 * N * D),
        (lambda: COMPLEX @ COMPLEX, 8 * N**3),
        (lambda: torch._grouped_mm(X.bfloat16(), EXPERTS, GROUPS), 2 * N * D * D),
        # 416 results of four products each, and the same for both gradients
        (trained(nn.Conv1d(16, 16, 4, padding=3, groups=16), SIGNAL), 3 * 2 * 416 * 4),
        (trained(nn.ConvTranspose1d(16, 8, 2, groups=4), SIGNAL), 3 * 2 * 320 * 4),
        (trained(lambda x: LSTM(x)[0], SEQUENCE), 3 * 2 * 32 * 128 * (16 + 32)),
    ],
)
def test_flop_of_a_product(take, flop):
    assert sum(found(take).recorded.flop().values()) == flop


@pytest.mark.parametrize("kind", ["flash_attention", "flash_attention_for_cpu"])
def test_flop_of_attention_with_fewer_heads_of_keys_and_smaller_values(kind):
    """A query and a key meet, and then a value."""
    with FakeTensorMode():
        q, k, v = torch.empty(2, 8, 16, 32), torch.empty(2, 4, 24, 32), torch.empty(2, 4, 24, 16)
        take = partial(getattr(torch.ops.aten, f"_scaled_dot_product_{kind}"), q, k, v)
        flop = found(take).recorded.flop()
    product = 2 * (2 * 8 * 16) * 24
    assert sum(flop.values()) == product * (32 + 16)
    named = {"grad_out": None, "query": q, "key": k, "value": v}
    assert flops_of_attention(named, 1) == product * (3 * 32 + 2 * 16)  # scores are made again


def test_a_formula_that_does_not_take_a_call_ends_nothing():
    """The operator is named, and its FLOPs are said to be missing."""

    def refuses(*args, **kwargs):
        raise AssertionError("shapes are incompatible")

    with mock.patch.dict(registry(), {torch.ops.aten.mm: refuses}):
        finding = found(lambda: ((X @ W).exp(), X @ X[0]))
    (row,) = finding.unknown()
    assert (row["operator"], row["calls"]) == ("mm", 1)
    assert row["lacks"] == "FLOPs (AssertionError: shapes are incompatible)"
    assert sum(finding.recorded.flop().values()) == 2 * N * D


def test_products_have_the_rate_of_their_type():
    """A type without a rate has no time, and neither has the step."""
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(1024, 1024, dtype=dtype)
        finding = found(lambda x=x: (x @ x).exp(), rates=RATES)
        seconds[dtype] = finding.levels["now"]["us"]
        assert finding.without == ({"fp64"} if dtype == torch.float64 else set())
        assert all(row["us_now"] > 0 for row in finding.rows())
    assert seconds[torch.float64] is None
    assert seconds[torch.float32] > 2 * 1024**3 / 50e6 > 2 * seconds[torch.bfloat16]


# --- what is not understood is named


@pytest.mark.parametrize(
    ("take", "operator"),
    [
        (lambda: odd(X.exp()).cos(), "odd"),
        (lambda: torch._int_mm(X.to(torch.int8), W.to(torch.int8)), "_int_mm"),
        (lambda: torch.sparse.mm(SQUARE.to_sparse(), X), "_sparse_addmm"),
        (lambda: torch.fft.rfft(X), "_fft_r2c"),
    ],
)
def test_flop_that_is_missing_is_said_to_be(take, operator):
    """Below, and in the first line."""
    step = Step("s", take)
    result = find_fusions.described("s", record(step), None)
    lacks = {row["operator"]: row["lacks"] for row in result["not_understood"]}
    assert "FLOPs" in lacks[operator]
    first = find_fusions.report(result, 1).splitlines()[0]
    assert f" GFLOP in products without {', '.join(lacks)}; " in first and operator in lacks


def test_a_backward_pass_that_runs_otherwise_when_looked_at():
    x = X.clone().requires_grad_()
    remarks = found(lambda: torch.cumprod(x, 1).sum().backward()).remarks()
    assert "of cumprod at tests/test_find_fusions.py:" in remarks[-1]


def test_what_an_unseen_kernel_writes_and_reads():
    """It is named, and what it may read is kept."""

    def take():
        y, z = X.exp() * 2, torch.empty(N, D)
        z.numpy()[:] = y.numpy()  # behind PyTorch's back
        return z + 1

    finding = found(take)
    (note,) = finding.recorded.unwritten
    assert note.startswith("add at tests/test_find_fusions.py")
    made = finding.groups[0]
    assert (made.names, sum(made.keeps.values())) == (["exp", "mul"], ROW)


# --- no tensor is kept alive


def test_no_tensor_is_kept_alive():
    """So memory does not grow with the batch, and a storage at an earlier one's address is
    another."""
    recorder = Recorder()
    with recorder:
        for _ in range(20):
            seen = weakref.ref(torch.zeros(N, D).untyped_storage())
            gc.collect()
            assert seen() is None
    assert len({o.writes[0].key for o in recorder.operators}) == 20


# --- times


def event(
    name: str, launch: float, start: float, us: float, stream: int, number: int
) -> list[dict]:
    """A kernel in a trace, and its launch."""
    given = {"correlation": number}
    host = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
    device = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "args": given}
    return [{**host, "ts": launch, "dur": 1, "args": given}, {**device, "ts": start, "dur": us}]


def test_the_time_of_kernels_on_several_streams():
    """Of one call it is between that of the busiest and of all, of several that in which any ran;
    a kernel that no call launched is said to lack its bytes."""
    recorded = Recorded([Operator(n, i, "forward", "x.py:1", [], []) for i, n in enumerate("ab")])
    mark = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, "dur": 9}
    events = [
        {**mark, "name": "#0", "ts": 0},
        {**mark, "name": "#1", "ts": 10},
        *event("layer_1", 1, 100, 30, 7, 1),
        *event("layer_1", 2, 140, 30, 7, 2),
        *event("layer_2", 3, 180, 40, 8, 3),  # later only as the host was slow
        *event("beside", 11, 200, 50, 9, 4),  # 20 of it while layer_2 runs
        *event("unseen", 30, 300, 5, 7, 5),
    ]
    attribute(recorded, events)
    assert [(o.name, o.us, o.kernels, o.queued, o.lacks) for o in recorded.operators] == [
        ("a", 80, 3, 2, ""),  # (100 + 60) / 2
        ("b", 30, 1, 1, ""),
        ("kernel unseen", 5, 1, 1, "bytes and FLOPs"),
    ]
    assert recorded.launched == {"layer_1": 60, "layer_2": 40, "beside": 30, "unseen": 5}


SAME = {"aten::mm": 50.0, "aten::exp": 50.0, "aten::matmul": 1.0, "aten::resolve_conj": 0.1}


def exponential() -> torch.Tensor:
    return (SQUARE @ SQUARE).exp()


def fails() -> None:
    raise RuntimeError("this cannot be captured")


def report_of_a_check(profiled_us: dict, take=exponential, compiled=exponential) -> str:
    """On a CPU, where operators stand for kernels."""
    check = compared(Step("s", take, lambda: compiled), profiled_us)
    check["predicted_us"] = {"now": 100.0, "compiled": 100.0}
    return "\n".join(find_fusions.checked(check))


def test_a_check_that_does_not_end_well_is_said_below_the_prediction():
    plain = report_of_a_check(SAME)
    assert "another program" not in plain
    assert plain.count("(nothing is compiled)") == 2
    changed = report_of_a_check(SAME, compiled=lambda: exponential().cos())
    assert "compiled" not in changed.partition("inductor")[2] and changed.count("%)") == 3
    other = report_of_a_check({"flash_fwd_kernel": 90.0, **SAME})
    assert other.count("(another program)") == 3 and "%" not in other
    assert "it runs other kernels for attention than were profiled" in other
    assert "not compared: s, compiled failed at tests/test_find_fusions.py" in report_of_a_check(
        SAME, compiled=fails
    )


def test_a_step_that_cannot_be_a_graph_is_compared_by_its_traces():
    """For the reason that is said; where that ends early, too, as data do, that is said in place of
    times."""

    def waits(*_):
        raise ToolError("now cannot be captured as a graph: it waits") from RuntimeError("it waits")

    few = iter([SQUARE] * 5)  # two calls, and the turns that warm up, but one
    with mock.patch.object(steps, "graphs_in_turns", waits):
        report = report_of_a_check(SAME)
        ends = report_of_a_check(SAME, take=lambda: next(few).exp())
    assert report.startswith("\nin turns, not as graphs: the time in which any of its kernels runs")
    assert "it waits:\n" in report and report.count("measured") == 3
    assert "not compared: s failed at" in ends and "StopIteration" in ends


def test_a_kernel_takes_as_long_as_a_copy_of_its_bytes():
    """A row that no block holds is read by two kernels."""
    assert (RATES.us(0), RATES.us(2_500_000)) == (1.75, pytest.approx(2.75))
    for length, kernels, passes in ((4096, 1, 2), (4097, 2, 3)):
        x = torch.zeros(500, length)
        finding = found(lambda x=x: (x * 2).softmax(-1), rates=RATES)
        moved = passes * x.nbytes + 2 * 8 * 500 * (kernels - 1)
        chains = finding.levels["chains"]
        assert chains["bytes"] == pytest.approx(moved)
        assert chains["us"] == pytest.approx(1.75 * kernels + moved / 2.5e6)


# --- what a compiler changes of products


@pytest.mark.parametrize("streams", [True, False])
def test_a_bias_is_added_by_the_chain_behind(streams):
    first = Operator("convolution", 0, "forward", "?", [Use((0, 0), 0, 4000)], [Use((2, 0), 0, 40)])
    first.operands = [((0, 0), (8, 128, 32, 32), ()), ((1, 0), (128, 128, 3, 3), ())]
    first.kind = "matrix"
    first.us = 100.0
    first.turned = 30.0
    first.biased = 20.0
    behind = Operator("relu", 1, "forward", "?", [Use((2, 0), 0, 40)], [Use((3, 0), 0, 40)])
    behind.kind = "stream" if streams else "library"
    behind.us = 1.0
    recorded = Recorded([first, behind], [4000, 8, 40, 40], {(3, 0)}, run="measured")
    turned = 30 - RATES.us(2 * 4000)  # what the step was given must be turned
    saved = Finding(recorded, RATES).otherwise_us()
    assert saved == pytest.approx(turned + 20 * streams)


@pytest.mark.parametrize(
    ("width", "dtype", "saved"),
    [
        # 2.9 us of arithmetic, and a copy of a million elements
        (1001, "bf16", 50.3 - 2 * 1001**3 / 700e6 - (1.75 + 4 * 1001**2 / 2.5e6)),
        (1002, "bf16", 0.0),
        (1001, "fp32", 0.0),
    ],
)
def test_a_product_of_odd_rows_is_padded(width, dtype, saved):
    """In two bytes; rows that begin at four can be copied asynchronously."""
    odd, even = (width, width), (width, 1008)
    made = Operator("mm", 0, "forward", "?", [Use((0, 0), 0, 8), Use((1, 0), 0, 8)], [])
    made.operands = [((0, 0), odd, (width, 1)), ((1, 0), even, (1008, 1))]
    made.kind, made.dtype, made.us, made.flop = "matrix", dtype, 50.0, 2 * width**3
    recorded = Recorded([made], [8, 8], run="measured")
    assert Finding(recorded, RATES).otherwise_us() == pytest.approx(saved)


def gradient(part, x):
    """The backward pass of it."""
    x = x.clone().requires_grad_()
    return lambda: part(x).exp().sum().backward()


@pytest.mark.parametrize(
    ("take", "name", "kind"),
    [
        # as inductor's own tables tell
        (gradient(lambda x: F.pad(x, [1] * 4, "reflect"), PICTURE), "reflection_pad2d_backward",
         "stream"),
        (gradient(lambda x: x[X > 0], X), "index_put", "library"),
        (lambda: X.bfloat16().index_add(0, ROWS, X.bfloat16()), "index_add", "library"),
        (gradient(F.hardsigmoid, X), "hardsigmoid_backward", "stream"),
    ],
)  # fmt: skip
def test_what_a_compiler_leaves_to_pytorch_is_no_part_of_a_chain(take, name, kind):
    operators = found(take).operators
    assert [operator.kind for operator in operators if operator.name == name] == [kind]


@pytest.mark.parametrize(
    ("take", "words"),
    [
        (trained(lambda x: LSTM(x)[0], SEQUENCE), "1 recurrent layers: torch.compile leaves"),
        (trained(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), IMAGE), "1 grad"),
        (trained(lambda x: F.batch_norm(x, None, None, training=True), SIGNAL), "2 norms add up"),
        (trained(lambda x: F.embedding(ROWS % 4, x.view(-1, D)), SIGNAL), "1 sums at indices"),
        (lambda: (WIDE[:, :1000, None] * WIDE[:, None, :1000]).sum((1, 2)), "1 chains compute"),
    ],
)
def test_why_a_compiled_step_can_be_another_is_said(take, words):
    assert any(remark.startswith(words) for remark in found(take, rates=RATES).remarks())


# --- the program and its study


def judged(shape: str, now: float, part: str = "fitted", **more: object) -> dict:
    """A row whose speed-up is 2, and predicted as 2.5, with values of the constant above 2 as 2."""
    compiled_ms = {f"{value:g}": 5.0 if value > 2 else 4.0 for value in study.VALUES}
    row = {"shape": shape, "precision": "bf16", "part": part, "compiled_ms": compiled_ms, **more}
    row["predicted_ms"] = {"now": now}
    row["sides_ms"] = {"now": [9.0, 10.0, 11.0], "compiled": [5.0] * 3}
    return study.judged(row)


def test_errors_are_of_what_was_not_fitted():
    """The half tells a value above 2, with which all but one are right: that one is not in it."""
    rows = [judged("a", 10.0), judged("b", 10.0), judged("c", 8.0, "held out")]
    rows.append(judged("e", 10.0, "held out", other=["flash_kernel"]))  # another program
    lines = study.errors([*rows, judged("d", 10.0, "KernelBench")]).splitlines()
    half, held, alone, bench = (line.split("|") for line in lines[2:6])
    assert [line[5].strip() for line in (half, held, bench)] == ["0.0 %", "20.0 %", "0.0 %"]
    assert (alone[2].strip(), alone[7].strip()) == ("4", "3 of 3")
    assert "tells 2.25" in lines[-1] and "KernelBench 25.0 %" in lines[-1]
    assert "the speed-ups of 1 steps" in lines[-1]


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x):
        h = self.into(x)
        h = torch.tanh(h) * torch.sigmoid(h)
        return self.out(h).mean()

class Asks(Net):
    def forward(self, x):
        return super().forward(x) * x.abs().max().item()

def build(): return Net(), {"x": torch.randn(8, 16)}
def no_loss(): return nn.Linear(16, 4), {"input": torch.randn(8, 16)}
def one_thing(): return Net()
def fails(): return Net(), {"x": torch.randn(8, 15)}
def asks(): return Asks(), {"x": torch.randn(8, 16)}

def asks_early():
    torch.linspace(0, 1, 4)[1].item()
    return build()

def step():
    net, x = Net(), torch.randn(8, 16)
    return lambda: net(x).backward()

def compiled():
    net, x, part = Net(), torch.randn(8, 16), torch.compile(torch.sin)
    return lambda: part(net(x)).backward()
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("model_of_mine.py").write_text(MODEL)
    return "model_of_mine.py"


def find(*argv: object) -> tuple[int, str, str]:
    return captured(find_fusions.main, [str(word) for word in argv])


def test_a_model_of_ones_own(model):
    status, out, err = find("--model", f"{model}:build", "--json", "f.json")
    assert (status, err) == (0, ""), err
    assert "model_of_mine.py:12" in out
    result = strict_json(Path("f.json").read_text())
    assert (result["schema_version"], result["measured"], result["rates"]) == (2, False, None)
    assert result["levels"]["now"]["us"] is None
    sums = {f"{what}_{when}" for what in ("kernels", "bytes", "us") for when in ("now", "fused")}
    assert set(result["chains"][0]) == {"chain", "pass", "lines", "places", *sums}
    tokens = 2 * 8 * 3  # FLOP of a weight: both passes
    assert result["flop"] == tokens * (16 * 64 + 64) - 2 * 8 * 16 * 64  # no gradient of x


@pytest.mark.parametrize(
    ("function", "note"),
    [
        ("step", ""),
        ("asks", "_local_scalar_dense.default at model_of_mine.py:17: the step is really taken"),
        ("asks_early", ""),
        ("compiled", "what torch.compile makes needs to be run at model_of_mine.py"),
    ],
)
def test_a_step_of_ones_own_and_one_that_asks_for_values(function, note, model):
    """In its step, or while it is built, which leaves the step one of fake tensors."""
    status, out, err = find("--model", f"{model}:{function}")
    assert (status, "tanh" in out) == (0, True)
    assert (note in err) if note else not err
    assert ("two steps were really taken on this CPU" in out) == bool(note)
    named = "Not understood: compiled code (2x) at model_of_mine.py"
    assert (named in out) == ("Not understood" in out) == (function == "compiled")


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ("", 2, "one of the two"),
        ("--model model_of_mine.py", 2, "FILE.py:function"),
        ("--model model_of_mine.py:nothing", 2, "no function 'nothing'"),
        ("--model model_of_mine.py:one_thing", 2, "(model, batch)"),
        ("--model model_of_mine.py:no_loss", 2, "[8, 4]"),
        ("--model model_of_mine.py:fails", 1, "model_of_mine.py:11: RuntimeError"),
        ("--model model_of_mine.py:build --check", 4, "needs a GPU"),
        ("--model model_of_mine.py:build --rates nowhere", 2, "nowhere"),
        ("--model model_of_mine.py:build --no-such", 2, "--no-such"),
        ("tiny_llama_v1.py --enable-torch-compile", 2, "no compiling"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_bad_input_is_one_line(argv, status, words, model):
    try:
        found, out, err = find(*argv.split())
    except SystemExit as end:  # of a parser
        found, out, err = end.code, "", words
    assert (found, out) == (status, "")
    (line,) = (line for line in err.splitlines() if ": note: " not in line)
    assert words in line, err


def test_a_version_script_and_its_arguments():
    few = "--num-layers 1 --vocab-size 50 --hidden-dim 32 --num-heads 2 --batch-size 2"
    status, out, _ = find("--seq-len", "32", "tiny_llama_v1.py", *few.split(), "--device", "cpu")
    assert (status, out.split(",")[0]) == (0, "tiny_llama_v1")


def test_times_without_a_gpu_are_named_as_estimates(model):
    Path("find_fusions.json").write_text(json.dumps({"rates": vars(RATES)}))
    status, out, _ = find("--model", f"{model}:build", "--rates", ".")
    assert status == 0
    assert "estimates with the rates of a GPU" in out
    Path("find_fusions.json").write_text(json.dumps({"rates": {**vars(RATES), "gap_us": None}}))
    status, _, err = find("--model", f"{model}:build", "--rates", ".")
    assert (status, "no rates" in err) == (2, True)

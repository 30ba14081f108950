"""Which operators could be one kernel: bytes, lines and groups of planted chains, and what is not
understood."""

from __future__ import annotations

import gc
import json
import linecache
import tracemalloc
import weakref
from pathlib import Path

import pytest
import torch
from conftest import CPU, ROOT, TINY, captured, strict_json
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from analysis_tools import find_fusions
from bench import find_fusions as study
from lab.fusions.groups import Finding
from lab.fusions.rates import Rates
from lab.fusions.record import Recorder
from lab.fusions.step import Step, attribute, count, from_model, record

RATES = Rates("a GPU", 2500.0, 1.0, 0.3, 700.0)
N, D = 64, 32  # rows, and numbers in a row
ROW = 4 * N * D  # bytes of a float32 tensor of that size


def found(take, weights=(), rates=None) -> Finding:
    """What is found in a step that is really taken."""
    take()
    return Finding(record(Step("test", take, list(weights)), Recorder()), rates)


def chains(finding: Finding) -> dict[str, dict]:
    return {f"{row['pass']}: {row['chain']}": row for row in finding.rows()}


def code_at(row: dict) -> list[str]:
    """The source of the lines that a chain names."""
    file, _, numbers = row["lines"].rpartition(":")
    return [linecache.getline(str(ROOT / file), int(n)).strip() for n in numbers.split(",")]


# --- bytes and lines of planted chains


def test_a_chain_of_known_bytes_and_lines():
    """Three operators read and write five tensors; as one kernel they read one and write one."""
    x, out = torch.randn(N, D), []

    def take():
        y = x * 2
        y = y.exp()
        out.append(y + 1)

    (row,) = found(take).rows()
    assert (row["chain"], row["pass"], row["places"]) == ("mul, exp, add", "forward", 1)
    assert (row["bytes_now"], row["bytes_fused"]) == (6 * ROW, 2 * ROW)
    assert code_at(row) == ["y = x * 2", "y = y.exp()", "out.append(y + 1)"]


def test_a_backward_chain_has_the_lines_of_the_forward_pass():
    x = torch.randn(N, D, requires_grad=True)

    def take():
        x.grad = None
        y = torch.sigmoid(x)
        z = torch.tanh(y)
        z.backward(torch.ones(N, D))

    row = chains(found(take))["backward: tanh_backward, sigmoid_backward"]
    assert code_at(row) == ["y = torch.sigmoid(x)", "z = torch.tanh(y)"]
    # y, z and the ones are computed again: x is read, its gradient is written
    assert (row["bytes_now"], row["bytes_fused"]) == (6 * ROW, 2 * ROW)


def test_a_checkpoint_runs_its_own_lines_again():
    x = torch.randn(N, D, requires_grad=True)

    def inner(x):
        return torch.sigmoid(x).exp()

    def take():
        x.grad = None
        checkpoint(inner, x, use_reentrant=False).sum().backward()

    finding = found(take)
    again = [o for o in finding.recorded.operators if o.name == "sigmoid"]
    assert [o.phase for o in again] == ["forward", "backward"]
    assert again[0].line == again[1].line
    gradient = next(o for o in finding.recorded.operators if o.name == "sigmoid_backward")
    assert gradient.line == again[0].line


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2  # here


def test_a_custom_function_has_the_line_of_its_own_backward():
    x = torch.randn(N, D, requires_grad=True)
    finding = found(lambda: Double.apply(x).exp().sum().backward())
    at = [o.line for o in finding.recorded.operators if o.name == "mul" and o.phase == "backward"]
    lines = [linecache.getline(str(ROOT / p), int(n)) for p, _, n in (a.partition(":") for a in at)]
    assert any("# here" in line for line in lines), at


def test_an_operator_on_a_thread_without_a_node_is_not_lost():
    """no_grad parts are forward, and do not take the lines of nodes."""
    x = torch.randn(N, D, requires_grad=True)

    def take():
        x.grad = None
        y = torch.sigmoid(x)
        with torch.no_grad():
            x.detach().cos()
        y.backward(torch.ones(N, D))

    operators = {o.name: o for o in found(take).recorded.operators}
    line = operators["sigmoid_backward"].line
    assert (operators["cos"].phase, line) == ("forward", operators["sigmoid"].line)


# --- what may not be joined


def groups(finding: Finding) -> list[list[str]]:
    return [group.names for group in finding.groups]


def test_nothing_waits_for_itself():
    """exp and add would be one kernel, but the matrix product between them needs exp."""
    x, w, out = torch.randn(N, N), torch.randn(N, N), []

    def take():
        y = x.exp()
        out.append(y + y @ w)

    assert groups(found(take)) == [["exp"], ["mm"], ["add"]]


def test_long_sums_end_a_kernel_and_short_ones_do_not():
    x, wide, out = torch.randn(N, D), torch.randn(4, 100_000), []
    short = found(lambda: out.append(x.exp() / x.exp().sum(1, keepdim=True)))
    long = found(lambda: out.append(wide.exp() / wide.exp().sum(1, keepdim=True)))
    assert groups(short) == [["exp", "exp", "sum", "div"]]
    assert sorted(groups(long)) == [["exp", "div"], ["exp", "sum"]]


def test_an_in_place_operator_makes_a_new_version():
    """The reader of what was there before goes first, and all of the memory is one storage."""
    x, out = torch.randn(N, D), []

    def take():
        y = x.clone()
        z = y @ torch.ones(D, D)  # of the old y
        y.mul_(2)
        out.extend([y, z])

    finding = found(take)
    assert ["clone", "mul_"] not in groups(finding)
    mul = next(g for g in finding.groups if g.names == ["mul_"])
    assert (sum(mul.reads.values()), sum(mul.keeps.values())) == (ROW, ROW)


def test_what_is_written_into_in_part_is_written_before():
    x, out = torch.randn(N, D), []

    def take():
        y = torch.zeros(2 * N, D)
        z = y @ torch.ones(D, D)
        y[:N].copy_(x @ torch.ones(D, D))
        out.extend([y, z])

    finding = found(take)
    copy = next(g for g in finding.groups if g.names == ["copy_"])
    assert (sum(copy.reads.values()), sum(copy.keeps.values())) == (ROW, ROW)
    zeros = next(g for g in finding.groups if "zeros" in g.names)
    assert sum(zeros.keeps.values()) == 2 * ROW


def test_views_cost_nothing_and_slices_their_part():
    x, out = torch.randn(N, D), []
    finding = found(lambda: out.append(x.t().reshape(N * D)[: N * D // 2].view(N, -1).exp()))
    assert [o.name for o in finding.recorded.operators] == ["clone", "exp"]
    exp = next(o for o in finding.recorded.operators if o.name == "exp")
    assert [use.bytes for use in (*exp.reads, *exp.writes)] == [ROW // 2, ROW // 2]


def test_a_gather_needs_its_source_and_reads_only_what_it_takes():
    table, index, out = torch.randn(1000, D), torch.arange(N), []
    finding = found(lambda: out.append(table.exp()[index].cos()))
    assert groups(finding) == [["exp"], ["index", "cos"]]
    taken = finding.groups[1]
    assert (sum(taken.reads.values()), sum(taken.keeps.values())) == (ROW + index.nbytes, ROW)
    assert finding.levels["chains"]["kernels"] == 1  # of what is not taken nothing is computed


def test_a_scatter_takes_its_source_along_and_nothing_goes_on_behind():
    x, index, out = torch.randn(N, D), torch.arange(N), []
    finding = found(lambda: out.append(torch.zeros(N, D).index_add_(0, index, x.exp()).cos()))
    assert ["exp", "index_add_"] in groups(finding)
    assert ["cos"] in groups(finding)


def test_a_shift_in_every_round_must_lie_in_memory():
    """A scan by doubling reads neighbours of what it has just computed."""
    x, out = torch.randn(N, 4096), []

    def take():
        h = x * 1
        for shift in (1, 2, 4, 8, 16):
            h = h + F.pad(h[:, :-shift], (shift, 0))
        out.append(h)

    assert len(groups(found(take))) > 2


def test_a_data_dependent_size_is_a_barrier():
    x, out = torch.randn(N, D), []
    finding = found(lambda: out.append(x.exp() * len(torch.nonzero(x.exp() > 1e9))))
    assert not any({"exp", "mul"} <= set(names) for names in groups(finding))


def test_a_second_forward_pass_is_another():
    x = torch.randn(N, D, requires_grad=True)

    def take():
        for _ in range(2):
            torch.sigmoid(x).exp().sum().backward()

    names = groups(found(take))
    assert not any(of_group.count("sigmoid") > 1 for of_group in names), names


def test_random_numbers_and_dropout_stream():
    x, out = torch.randn(N, D), []
    finding = found(lambda: out.append(F.dropout(x.exp(), 0.1) + 1))
    assert not finding.unknown()
    assert len(finding.groups) == 1


# --- what is computed again, and copies that are none


def test_what_the_backward_pass_needs_is_computed_again_from_less():
    """A chain of float32 steps from bf16 numbers: nothing of it is kept but its end."""
    x = torch.randn(N, 512).bfloat16().requires_grad_()
    w = torch.randn(512, 512, dtype=torch.bfloat16, requires_grad=True)

    def take():
        x.grad = w.grad = None
        y = torch.tanh(x.float()).sigmoid().bfloat16()
        (y @ w).sum().backward()

    finding = found(take, [w])
    row = chains(finding)["forward: cast x2, tanh, sigmoid"]
    assert row["bytes_fused"] == 2 * x.nbytes


def test_a_second_cast_of_the_same_is_none():
    x, w, out = torch.randn(N, D), torch.randn(D, D).bfloat16(), []
    finding = found(lambda: out.append(x.bfloat16() @ w + x.bfloat16() @ w))
    cast = next(g for g in finding.groups if "_to_copy" in g.names)
    assert sum(cast.keeps.values()) == ROW // 2


def test_attention_as_one_kernel_moves_queries_keys_values_and_the_result():
    q, k, v = (torch.randn(4, 128, 16) for _ in range(3))
    out = []
    finding = found(lambda: out.append((q @ k.transpose(1, 2)).softmax(-1) @ v), rates=RATES)
    assert [*finding.levels["attention"].values()][1:] == [4 * q.nbytes, 1]
    assert finding.levels["products"]["bytes"] > 4 * q.nbytes


def test_a_product_takes_its_epilogue_along():
    x, w, out = torch.randn(N, D), torch.randn(D, D), []
    finding = found(lambda: out.append((x @ w).exp()))
    assert [finding.levels[level]["kernels"] for level in ("chains", "products")] == [2, 1]
    assert finding.levels["now"]["bytes"] - finding.levels["products"]["bytes"] == 2 * ROW


def test_levels_never_grow():
    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D), nn.Linear(D, 1))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x).mean()

    batch = {"x": torch.randn(N, D)}
    step, recorded = count(lambda: from_model("m", Loss(), batch, True, CPU))
    levels = list(Finding(recorded, RATES).levels.values())
    for key in ("us", "bytes", "kernels"):
        values = [level[key] for level in levels]
        assert values == sorted(values, reverse=True)
    assert step.name == "m"


def test_a_model_is_moved_with_its_weights():
    """To a device that every machine has; a copy of a weight could not be trained."""
    batch = {"input": torch.randn(N, D)}
    step = from_model("m", nn.Linear(D, 1), batch, False, torch.device("meta"))
    assert [(w.is_leaf, w.device.type) for w in step.weights] == [(True, "meta")] * 2


def launches(take, *levels: str) -> list[int]:
    finding = found(take)
    return [finding.levels[level]["kernels"] for level in levels]


def test_products_of_one_matrix_are_one_product():
    """Three of x, which is then read once, and not two of which one waits for the other."""
    x, out = torch.randn(N, D), []
    first, *others = (torch.randn(D, D) for _ in range(3))
    finding = found(lambda: out.extend([x @ first, *(x @ w for w in others)]))
    before, after = ([*finding.levels[level].values()] for level in ("optimizer", "joined"))
    assert (before[2], after[2], before[1] - after[1]) == (3, 1, 2 * ROW)
    assert launches(lambda: out.append(x @ first @ first), "joined") == [2]
    square = torch.randn(D, D)  # rows of it in one, columns in the other
    assert launches(lambda: out.extend([square @ first, square.t() @ first.t()]), "joined") == [2]


def test_products_that_are_added_up_are_one_product():
    x, w, out = torch.randn(N, D), torch.randn(D, D), []
    add = lambda: out.append((x @ w + 2 * x @ w.exp()) * 2)  # noqa: E731
    assert launches(add, "optimizer", "joined") == [2, 1]


def test_the_backward_pass_of_attention_with_a_bias_is_one_kernel():
    """The gradient of the bias, a sum, is a part of it."""
    q, k, v = (torch.randn(4, 64, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(64, 64, requires_grad=True)

    def take():
        for tensor in (q, k, v, bias):
            tensor.grad = None
        ((q @ k.transpose(1, 2) + bias).softmax(-1) @ v).backward(torch.ones(4, 64, 16))

    assert launches(take, "attention") == [2]


# --- what is changed in place, or made only once


def kept(finding: Finding, name: str) -> int:
    """Bytes that the kernel of this operator must write."""
    return sum(sum(g.keeps.values()) for g in finding.groups if name in g.names)


def test_what_is_changed_in_part_is_written_as_a_whole():
    x, w, out = torch.randn(N, D), torch.randn(D, D), []

    def take(change):
        y = x.exp()
        change(y)
        out.append(y @ w)

    assert kept(found(lambda: take(lambda y: y[:, :4].zero_())), "exp") == ROW  # by one kernel
    by_index = lambda y: y.index_put_((torch.arange(4),), torch.ones(4, D))  # noqa: E731
    assert kept(found(lambda: take(by_index)), "exp") == ROW  # by two


def test_nothing_is_computed_again_from_what_has_changed():
    x, out = torch.randn(4, 100_000), []

    def take(change):
        y = x * 2
        total = y.exp().sum()
        if change:
            x.add_(1)
        out.append(y + total)

    assert kept(found(lambda: take(False)), "sum") < 10
    assert kept(found(lambda: take(True)), "sum") > 2 * x.nbytes  # with x itself


def test_a_copy_that_changes_is_a_copy():
    x, w, out = torch.randn(N, D), torch.randn(D, D), []

    def take():
        one, two = x.clone(), x.clone()
        one.mul_(2)
        out.extend([one @ w, two @ w])

    assert kept(found(take), "clone") == 2 * ROW


def test_random_numbers_are_made_once():
    wide, out = torch.empty(4, 100_000), []

    def take():
        y = torch.rand_like(wide)
        out.append(y + y.sum())

    assert kept(found(take), "rand_like") >= wide.nbytes


def test_windows_read_all_of_their_source_once():
    x, out = torch.randn(1, 4, N, D), []
    finding = found(lambda: out.append((F.max_pool2d(x, 2), x.unfold(3, 4, 2) + 1)))
    pool, add = (next(o for o in finding.recorded.operators if o.name.startswith(name))
                 for name in ("max_pool2d", "add"))  # fmt: skip
    assert sum(use.bytes for use in pool.reads) == sum(use.bytes for use in add.reads) == x.nbytes


def test_gradients_that_pytorch_does_not_tag_stream():
    x = torch.randn(N, D, requires_grad=True)
    assert not found(lambda: F.hardsigmoid(x).sum().backward()).unknown()


# --- what is not understood is named


@torch.library.custom_op("find_fusions_test::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_an_unknown_operator_keeps_its_time_and_is_named():
    x, out = torch.randn(N, D), []
    finding = found(lambda: out.append(odd(x.exp()).cos()))
    (row,) = finding.unknown()
    assert (row["operator"], row["calls"]) == ("odd", 1)
    assert groups(finding) == [["exp"], ["odd"], ["cos"]]


def test_what_nobody_wrote_is_named():
    """A kernel of one's own that PyTorch does not see wrote it."""

    def take():
        y = torch.empty(N, D)
        y.numpy()[:] = 1  # behind PyTorch's back
        out.append(y + 1)

    out = []
    (note,) = found(take).recorded.unwritten
    assert note.startswith("add at tests/test_find_fusions.py")


def test_what_only_an_unseen_kernel_reads_is_kept():
    x = torch.randn(N, D)

    def take():
        y, z = x.exp() * 2, torch.empty(N, D)
        z.numpy()[:] = y.numpy()  # such a kernel
        out.append(z + 1)

    out = []
    made = found(take).groups[0]
    assert (made.names, sum(made.keeps.values())) == (["exp", "mul"], ROW)


# --- no tensor is kept alive


def test_no_tensor_is_kept_alive():
    seen = []

    def take():
        y = torch.randn(N, D).exp()
        seen.append(weakref.ref(y.untyped_storage()))
        del y
        gc.collect()
        assert seen[-1]() is None

    recorder = Recorder()
    with recorder:
        take()
    assert len(recorder.operators) == 2


def test_what_is_recorded_does_not_grow_with_the_batch():
    def size(rows: int) -> int:
        x = torch.zeros(rows, D)
        take = lambda: [x * 2 + i for i in range(100)]  # noqa: E731
        record(Step("s", take), Recorder())  # fills caches
        tracemalloc.start()
        recorded = record(Step("s", take), Recorder())
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(recorded.operators) == 200
        return used

    assert size(1000) == pytest.approx(size(10), rel=0.05)


def test_a_storage_at_the_address_of_an_earlier_one_is_another():
    recorder = Recorder()
    with recorder:
        for _ in range(20):
            torch.zeros(N, D)
    assert len({o.writes[0].key for o in recorder.operators}) == 20


# --- times


def test_kernels_are_given_to_the_operators_that_launched_them(monkeypatch):
    """On a CPU the operators that an operator calls stand for its kernels."""
    x, w, out = torch.randn(256, 256), torch.randn(256, 256), []
    recorder = Recorder(timed=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        recorded = record(Step("s", lambda: out.append((x @ w).exp())), recorder)
    attribute(recorded, profile, RATES)
    known = [o for o in recorded.operators if o.kind != "unknown"]
    assert [o.name for o in known] == ["mm", "exp"]
    assert all(o.us > 0.3 and o.kernels >= 1 for o in known)


def test_a_kernel_takes_as_long_as_a_copy_of_its_bytes():
    assert RATES.us(0) == 1.75
    assert RATES.us(2_500_000) == pytest.approx(1.75 + 1)


def softmax_us(x: torch.Tensor) -> float:
    out = []
    finding = found(lambda: out.append((x * 2).softmax(-1)))
    finding.rates = RATES
    (group,) = finding.groups
    return finding.time(group, 10_000_000, 1) - RATES.us(0)


def test_where_a_kernel_is_slower_than_a_copy():
    """10 MB are 4 us: rows without vector loads, rows that no block holds."""
    assert softmax_us(torch.zeros(500, 1000)) == pytest.approx(4)
    assert softmax_us(torch.zeros(500, 1001)) == pytest.approx(6)
    long = torch.zeros(500, 8000)
    assert softmax_us(long) == pytest.approx(4 + long.nbytes / 2.5e6)


# --- the program and its study


def test_the_study_counts_without_a_gpu(tmp_path):
    argv = [str(tmp_path / "s.json"), "--small", "--only", "message passing"]
    status, out, _ = captured(study.main, argv)
    assert status == 0
    assert [line.split(" | ")[0].strip("| ") for line in out.splitlines()[2:]] == [
        "message passing, bf16",
        "message passing, fp32",
    ]


def test_the_study_says_how_far_a_prediction_is_off():
    row = {"shape": "m", "precision": "bf16"}
    row["predicted_ms"] = {"now": 10.0, "chains": 4.0, "V3": 3.0}
    row["cost"] = {"seconds": 7.0, "profiled_step_seconds": 1.0}
    row["sides_ms"] = {"now": [9.0, 10.0, 11.0], "compiled": [5.0] * 3, "V3": [3.3] * 3}
    assert study.off(row) == pytest.approx(25)
    assert study.off_v3(row) == pytest.approx(-9.1, abs=0.01)
    table = study.table([row])
    assert "off by 25.0 % (median), 25.0 % (worst); the step now by 0.0 %" in table
    assert "five profiled steps, their traces written, and 2.0 s at most" in table
    assert "|    7.0 s |         1.0 s |" in table


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

def build():
    return Net(), {"x": torch.randn(8, 16)}

def no_loss():
    return nn.Linear(16, 4), {"input": torch.randn(8, 16)}

def one_thing():
    return Net()

def no_dict():
    return Net(), torch.randn(8, 16)

def frozen():
    return Net().requires_grad_(False), {"x": torch.randn(8, 16)}

def fails():
    return Net(), {"x": torch.randn(8, 15)}

def asks():
    class Asks(Net):
        def forward(self, x):
            return super().forward(x) * x.abs().max().item()
    return Asks(), {"x": torch.randn(8, 16)}

def step():
    net, x = Net(), torch.randn(8, 16)
    return lambda: net(x).backward()
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("model_of_mine.py").write_text(MODEL)
    return "model_of_mine.py"


def find(*argv: object) -> tuple[int, str, str]:
    return captured(find_fusions.main, [str(word) for word in argv])


def test_a_model_of_ones_own(model):
    status, out, err = find("--model", f"{model}:build", "--json", "f.json", "--plot", "f.png")
    assert (status, err) == (0, ""), err
    assert "model_of_mine.py:13" in out
    result = strict_json(Path("f.json").read_text())
    assert (result["schema_version"], result["measured"], result["rates"]) == (1, False, None)
    assert result["levels"]["now"]["us"] is None
    assert result["seconds"] > 0
    assert set(result["chains"][0]) == set(
        "chain pass lines places kernels bytes_now bytes_fused us_now us_fused".split()  # noqa: SIM905
    )
    tokens = 2 * 8 * 3  # FLOP of a weight: both passes
    assert result["flop"] == tokens * (16 * 64 + 64) - 2 * 8 * 16 * 64  # no gradient of x
    assert Path("f.png").stat().st_size > 1000


def test_a_step_of_ones_own(model):
    status, out, _ = find("--model", f"{model}:step")
    assert (status, "tanh" in out) == (0, True)


def test_a_step_that_asks_for_values_is_really_taken(model):
    status, out, err = find("--model", f"{model}:asks")
    assert (status, "tanh" in out, "two real ones" in err) == (0, True, True)


def test_a_model_that_asks_while_it_is_built_has_real_weights(tmp_path, monkeypatch):
    """Its file is imported once, and its step is one of fake tensors all the same."""
    monkeypatch.chdir(tmp_path)
    once = f"{MODEL}\nonce = torch.library.Library('find_fusions_once', 'DEF')\n"
    asking = "def build():\n    torch.linspace(0, 1, 4)[1].item()\n"
    Path("asking.py").write_text(once.replace("def build():\n", asking))
    status, out, err = find("--model", "asking.py:build")
    assert (status, "tanh" in out, err) == (0, True, "")
    assert "not understood" not in out


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ([], 2, "one of the two"),
        (["tiny_llama_v1.py", "--model", "x.py:f"], 2, "one of the two"),
        (["--model", "missing.py:build"], 2, "FILE.py:function"),
        (["--model", "model_of_mine.py"], 2, "FILE.py:function"),
        (["--model", "model_of_mine.py:nothing"], 2, "no function 'nothing'"),
        (["--model", "model_of_mine.py:one_thing"], 2, "(model, batch)"),
        (["--model", "model_of_mine.py:no_dict"], 2, "(model, batch)"),
        (["--model", "model_of_mine.py:no_loss"], 2, "[8, 4]"),
        (["--model", "model_of_mine.py:frozen"], 2, "no weight to train"),
        (["--model", "model_of_mine.py:fails"], 1, "model_of_mine.py:11: RuntimeError"),
        (["--model", "model_of_mine.py:build", "--check"], 4, "needs a GPU"),
        (["--model", "model_of_mine.py:build", "--rates", "nowhere"], 2, "nowhere"),
        (["--model", "model_of_mine.py:build", "--no-such"], 2, "--no-such"),
        (["--model", "model_of_mine.py:build", "--versions"], 2, "version script"),
        (["tiny_llama_v1.py", "--enable-torch-compile"], 2, "no compiling"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_bad_input_is_one_line(argv, status, words, model):
    try:
        found, out, err = find(*argv)
    except SystemExit as end:  # of a parser
        found, out, err = end.code, "", words
    assert (found, out) == (status, "")
    assert words in err and len(err.splitlines()) == 1, err


def test_times_without_a_gpu_are_named_as_estimates(model):
    Path("find_fusions.json").write_text(json.dumps({"rates": vars(RATES)}))
    status, out, _ = find("--model", f"{model}:build", "--rates", ".")
    assert status == 0
    assert "estimates with the rates of a GPU" in out
    Path("find_fusions.json").write_text(json.dumps({"rates": {**vars(RATES), "gap_us": None}}))
    status, _, err = find("--model", f"{model}:build", "--rates", ".")
    assert (status, "no rates" in err) == (2, True)


def test_of_a_version_what_is_left_in_later_ones():
    status, out, _ = find("tiny_llama_v2.py", *TINY["llama"], "--use-amp", "--versions")
    header = next(line for line in out.splitlines() if "chain" in line)
    assert (status, "in V3" in header, "in V4" in header, "V4 now" in out) == (0, True, True, True)

"""A step predicted from a trace: the same operators and bytes as of the step itself, times of the
trace, and what the trace does not tell said. Traces are small, in the form that Kineto writes."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from dev.bench import others_traces
from fusion_lab.cli import ToolError
from fusion_lab.fusions import command as find_fusions
from fusion_lab.fusions import rates as rates_of
from fusion_lab.fusions import record, trace
from fusion_lab.fusions.groups import Finding
from fusion_lab.profile.kernels import check_events, complete
from fusion_lab.profile.spans import alone

SHAPE = [1024, 2048]
SIZE = 4 * 1024 * 2048
ROWS = (1, 256, 1024)  # of tensors that are not the same
ALL = sum(4 * rows * 2048 for rows in ROWS)


class Writer:
    """A trace of a process in which each call launches kernels one behind the other."""

    def __init__(self, pid: int = 100, gpu: int = 0):
        self.pid, self.gpu, self.events, self.now = pid, gpu, [], 0.0

    def call(self, name: str, us: float, *inputs: object, gap: float = 0.0, **args: object) -> None:
        """An operator on tensors of shapes (lists) and scalars, whose kernel takes so long."""
        shapes = [x if isinstance(x, list) else [] for x in inputs]
        number = len(self.events) + 1
        told = {
            "External id": number,
            "Concrete Inputs": ["" if isinstance(x, list) else str(x) for x in inputs],
            "Input type": ["float" if isinstance(x, list) else "Scalar" for x in inputs],
            "Input Strides": [torch.empty(shape).stride() for shape in shapes],
            "Input Dims": shapes,
        }
        told = json.loads(json.dumps(told | args))
        self.add("cpu_op", name, self.now, 10, **told)
        self.add("cuda_runtime", "hipLaunchKernel", self.now + 2, 3, correlation=number)
        self.add("kernel", f"kernel of {name}", self.now + 5 + gap, us, correlation=number)
        self.now += max(20, us)

    def add(self, cat: str, name: str, ts: float, dur: float, **args: object) -> None:
        pid = self.gpu if cat == "kernel" else self.pid
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": 7, "ts": ts, "dur": dur}
        self.events.append({**event, "args": args})


def written(path: Path, *writers: Writer) -> Path:
    events = [event for writer in writers for event in writer.events]
    device = {"deviceProperties": [{"id": 0, "name": "AMD Instinct MI300X"}]}
    path.write_bytes(gzip.compress(json.dumps({**device, "traceEvents": events}).encode()))
    return path


def us(size: float) -> float:
    """Kernels of this GPU take 3 us, and their bytes 2000 GB/s."""
    return 3 + size / 2e6


def chain(writer: Writer, shape: list[int] = SHAPE) -> None:
    size = 4 * shape[0] * shape[1]
    writer.call("aten::mul", us(3 * size), shape, shape)
    writer.call("aten::relu", us(2 * size), shape)
    writer.call("aten::add", us(2 * size), shape, 1, 1)


@pytest.fixture
def simple(tmp_path: Path) -> Path:
    writer = Writer()
    for rows in ROWS:
        chain(writer, [rows, 2048])
    writer.call("custom::op", 50.0, SHAPE)
    return written(tmp_path / "trace.json.gz", writer)


def test_a_chain_has_the_bytes_of_its_shapes_and_times_of_the_trace(simple: Path):
    name, recorded, rates = trace.from_trace(simple)
    found = Finding(recorded, rates)
    (row,) = found.rows()
    assert (row["chain"], row["kernels_now"], row["kernels_fused"]) == ("mul, relu, add", 9, 3)
    assert (row["bytes_now"], row["bytes_fused"]) == (7 * ALL, 3 * ALL)
    assert row["us_now"] == pytest.approx(3 * us(3 * ALL / 3) + 6 * us(2 * ALL / 3))
    assert row["us_fused"] == pytest.approx(3 * us(3 * ALL / 3), rel=0.05)
    assert (name, rates.device_name) == ("trace.json.gz", "AMD Instinct MI300X")
    assert any("median error 0 %" in remark for remark in recorded.remarks)
    unknown = {row["operator"]: row for row in found.unknown()}
    assert unknown["custom::op"]["us"] == 50.0 and unknown["custom::op"]["lacks"]


def test_the_report_names_what_a_trace_does_not_tell(simple: Path, capsys):
    assert find_fusions.main(["--trace", str(simple)]) == 0
    report = capsys.readouterr().out
    for text in (
        "measured on AMD Instinct MI300X",
        "mul, relu, add",
        "custom::op",
        "Note: a trace",
    ):
        assert text in report
    assert find_fusions.main(["--trace", str(simple), "tiny_llama_v1.py"]) == 2


def test_only_the_last_whole_step_counts(tmp_path: Path):
    writer = Writer()
    for step in range(3):
        start = writer.now
        for rows in range(1, 2 + step):
            chain(writer, [rows, 2048])
        writer.add("user_annotation", f"ProfilerStep#{step}", start, writer.now - start)
    writer.add("user_annotation", "ProfilerStep#3", writer.now, 5)  # the loop is over
    _, recorded, _ = trace.from_trace(written(tmp_path / "trace.json.gz", writer))
    assert len(recorded.operators) == 9


def test_in_a_backward_pass_the_tensors_of_the_forward_pass_are_read(tmp_path: Path):
    writer = Writer()
    for number in (1, 2):  # both read and make tensors of one form
        writer.call("aten::relu", us(2 * SIZE), SHAPE, **{"Sequence number": number})
    writer.call("aten::mul", us(2 * SIZE), SHAPE, 2.0)  # of this form, and read by nobody
    writer.call("aten::mul", us(SIZE), [1024, 1], [1, 2048])  # the gradient
    for number in (2, 1):
        start, engine = writer.now, "autograd::engine::evaluate_function: ReluBackward0"
        writer.call("aten::threshold_backward", us(3 * SIZE), SHAPE, SHAPE, 0)
        writer.add("cpu_op", engine, start, writer.now - start, **{"Sequence number": number})
    _, recorded, _ = trace.from_trace(written(tmp_path / "t.json.gz", writer))
    first, second, _, gradient, last, before = recorded.operators
    assert last.phase == before.phase == "backward"
    assert gradient.writes[0] in last.reads and second.writes[0] in last.reads
    assert last.writes[0] in before.reads and first.writes[0] in before.reads


def multiply(writer: Writer, m: int, n: int, k: int, slower: float = 1.0) -> None:
    """A product begins as other kernels, and its blocks of 256 x 256 take 2 us each time that they
    fill the 304 units of this GPU; it computes 500 TFLOP/s beside its bytes."""
    waves = -(-(-(-m // 256) * -(-n // 256)) // 304)
    size = 2 * (m * k + k * n + m * n)
    took = us(size) + 2 * waves + 2 * m * n * k / 500e6
    halves = {"Input type": ["c10::BFloat16"] * 2}
    writer.call("aten::mm", slower * took, [m, k], [k, n], **halves)


@pytest.fixture
def others(tmp_path: Path) -> list[str]:
    """Traces of three models, in the last of which a product is thrice as slow."""
    paths = []
    for name, slower in (("one", 1.0), ("two", 1.0), ("three", 3.0)):
        writer = Writer()
        for rows in ROWS:
            chain(writer, [rows, 2048])
        for m, n, k in ((64, 64, 64), (4096, 4096, 512), (8192, 8192, 64), (512, 512, 8192)):
            multiply(writer, m, n, k)
        multiply(writer, 2048, 2048, 2048, slower)
        paths.append(str(written(tmp_path / f"{name}__1.json.gz", writer)))
    return paths


def test_each_model_is_predicted_from_the_others(others: list[str], tmp_path: Path, capsys):
    result = tmp_path / "find_fusions.json"
    assert others_traces.main([str(result), *others]) == 0
    printed = capsys.readouterr().out
    content = json.loads(result.read_text())
    one, two, three = content["rows"]
    assert abs(one["off_percent"]) < 3
    assert abs(two["off_percent"]) < 3
    assert three["off_percent"] < -10
    assert [*three["missed"]] == ["mm 2048x2048 2048x2048"]
    least, per_gb, per_tflop, per_wave = content["rates"]["laws"]["product"]
    assert (least, per_gb) == (pytest.approx(3, rel=0.1), pytest.approx(500, rel=0.2))
    assert (per_tflop, per_wave) == (pytest.approx(2000, rel=0.1), pytest.approx(2, rel=0.2))
    assert others_traces.main([str(result), "--table"]) == 0
    assert capsys.readouterr().out == printed


LAWS = {kind: [3.0, 500.0, 0.0, 0.0] for kind in rates_of.KINDS} | {
    "strided": [3.0, 1000.0, 0.0, 0.0],
    "product": [3.0, 500.0, 2000.0, 2.0],
}
FITTED = rates_of.FittedRates(
    "a GPU of others", 2000.0, 2.0, 0.0, {"bf16": 500.0, "fp32": 50.0}, LAWS,
    {"one": 0.8, "two": 1.1, "three": 0.95}, {"a step": 0.5, "another": 1.25},
)  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "slower"), [(torch.bfloat16, 1), (torch.float32, 10)], ids=["bf16", "fp32"]
)
def test_operators_take_what_the_law_of_their_kind_says(dtype: torch.dtype, slower: int):
    """A type of a tenth of the peak computes ten times as long."""
    a, b = torch.ones(2, 1024, 1024, dtype=dtype)
    with record.Recorder() as recorder:
        (a @ b).t() + b
    matrix, add = Finding(recorder.recorded, FITTED).operators
    size = a.nbytes
    assert matrix.us == pytest.approx(3 + 3 * size / 2e6 + 2 + slower * 2 * 1024**3 / 500e6)
    assert add.us == pytest.approx(3 + 3 * size / 1e6)


def test_a_prediction_from_others_traces_says_so_with_its_error(tmp_path: Path, capsys):
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\n"
        "def build():\n"
        "    net = torch.nn.Linear(64, 8)\n"
        "    return (lambda: net(torch.ones(32, 64)).tanh().sum().backward())\n"
    )
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"rates": vars(FITTED)}))
    assert find_fusions.main(["--model", f"{model}:build", "--rates", str(rates)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "GPU busy" in line)
    assert "predicted from others' traces, not measured" in line
    assert "-20 to +10 %, 2 of them by at most 15 %; 2 training steps" in line
    assert "by -50 to +25 %" in line
    rates.write_text(json.dumps({"rates": vars(FITTED) | {"laws": {"straight": [1, 2, 3, 4]}}}))
    assert find_fusions.main(["--model", f"{model}:build", "--rates", str(rates)]) == 2
    assert "no rates" in capsys.readouterr().err


def test_what_is_no_trace_of_a_gpu_with_shapes_is_one_line(tmp_path: Path):
    writer = Writer()
    chain(writer)
    for event in writer.events:
        event["args"].pop("Input type", None)
    without_shapes = written(tmp_path / "without.json.gz", writer)
    with pytest.raises(ToolError, match=r"without\.json\.gz.*record_shapes=True"):
        trace.from_trace(without_shapes)
    writer.events = [event for event in writer.events if event["cat"] == "cpu_op"]
    with pytest.raises(ToolError, match="no kernels on the GPU"):
        trace.from_trace(written(tmp_path / "cpu.json.gz", writer))
    chain(one := Writer(100, 0))
    chain(other := Writer(200, 1))
    with pytest.raises(ToolError, match="several processes: name the trace of one"):
        trace.from_trace(written(tmp_path / "two.json.gz", one, other))


def test_a_trace_tells_the_same_operators_and_bytes_as_the_step_itself(tmp_path: Path):
    """PyTorch writes a trace of a step on this CPU; its operators get kernels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 8))
    model.append(nn.Softmax(-1))
    x, target, other = torch.randn(32, 64), torch.rand(32, 8), torch.rand(64, 8)

    def step() -> None:
        y = model(x).to(torch.bfloat16).float() * 2 + 1
        nn.functional.mse_loss(torch.cat([y, target]), other).backward()

    step()
    with record.Recorder() as recorder:
        step()
    options = {"record_shapes": True, "with_stack": True}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as p:
        step()
    p.export_chrome_trace(str(tmp_path / "cpu.json"))
    content = json.loads((tmp_path / "cpu.json").read_text())
    events = check_events(content["traceEvents"], "x")
    for number, call in enumerate(complete(events, "cpu_op")):
        inner = {"ph": "X", "pid": call["pid"], "tid": call["tid"], "ts": call["ts"], "dur": 0.001}
        args = {"args": {"correlation": number}}
        launch = {**inner, **args, "cat": "cuda_runtime", "name": "hipLaunchKernel"}
        events += [launch, {**inner, **args, "cat": "kernel", "name": "k", "pid": -1, "dur": 1.0}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    recorded = trace.from_trace(path)[1]

    def moved(operators: list[record.Operator]) -> Counter:
        return Counter((o.name, o.kind, o.phase, o.moved) for o in operators if o.moved)

    direct = moved(recorder.recorded.operators)
    assert direct == moved(o for o in recorded.operators if o.kind != "unknown")
    busy = sum(alone(complete(events, "kernel")).values())
    assert sum(o.us for o in recorded.operators) == pytest.approx(busy)
    assert {o.line.rpartition("/")[2] for o in recorded.operators if o.phase == "forward"} != {"?"}

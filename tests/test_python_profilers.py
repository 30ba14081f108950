"""run_pytorch_profiler.py, run_deepspeed_flops.py, and bytes and FLOPs of modules."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import (
    QUICK,
    ROOT,
    TINY,
    Run,
    assert_one_error,
    batches,
    build,
    captured,
    load,
    model_of,
    read_rows,
)
from test_profiler_files import GPU_TRACE, event
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import run_deepspeed_flops as flops_tool
import run_pytorch_profiler as profiler_tool
from fusion_lab.profile import kernels, reduction, roofline
from fusion_lab.profile.traffic import Traffic, bytes_behind

BOTH_TOOLS = pytest.mark.parametrize(
    "tool", [profiler_tool, flops_tool], ids=lambda tool: tool.PROG
)


def run_tool(tool, directory: Path, *argv: str) -> Run:
    """The tool's main(argv) with results in `directory`."""
    return Run(*captured(tool.main, [*argv, "--profile-dir", str(directory)]), directory, None)


def tiny(script: str, *argv: str) -> list[str]:
    """Arguments of a tool for a tiny run of a script on the CPU."""
    return ["--script", f"{script}.py", "--device", "cpu", *TINY[model_of(script)], *argv]


# --- run_pytorch_profiler.py


def test_profiler_tables_agree_and_a_report_lists_no_files_of_an_earlier_run(tmp_path: Path):
    """And what the profiler does not know is for the script."""
    script = "tiny_openfold_v2"
    tmp_path /= 'x"y\\z'  # characters that PyTorch writes into a trace as they are, or changes
    tmp_path.mkdir()
    earlier = tmp_path / f"{script}_benchmark.json"
    earlier.write_text("of an earlier run")
    argv = tiny(script, *QUICK, "--disable-qkv-fusion-msa", "--seed", "7", "--generate-report")
    result = run_tool(profiler_tool, tmp_path, *argv)
    assert result.status == 0, result.stderr
    profile = json.loads((tmp_path / f"{script}_profile.json").read_text())
    assert (profile["unit"], profile["steps"], profile["script"]) == ("operators", 3, script)
    assert (profile["training"]["seed"], profile["fusions"]["qkv_fusion_msa"]) == (7, False)
    summary = json.loads((tmp_path / f"{script}_summary.json").read_text())
    assert profile["environment"] == summary["environment"]

    rows = kernels.read_statistics(tmp_path / f"{script}_kernels.csv")
    total = sum(row.total_ns for row in rows)
    for parts in (profile["categories"], profile["phases"]):
        assert sum(part["percent"] for part in parts.values()) == pytest.approx(100)
        assert 3e6 * sum(part["ms_per_step"] for part in parts.values()) == pytest.approx(total)
    for name, part in profile["categories"].items():
        members = [row for row in rows if kernels.category(row.name) == name]
        assert 3 * part["kernels_per_step"] == sum(row.calls for row in members)
        assert f"| {name} " in result.stdout
    assert [*profile["phases"]][:4] == ["data", "forward", "backward", "optimizer"]
    operators = {row["name"]: row for row in read_rows(tmp_path / f"{script}_operators.csv")}
    assert sum(int(row["self_ns"]) for row in operators.values()) == total
    assert int(operators["aten::_fused_adamw_"]["calls"]) == 3

    report = (tmp_path / f"{script}_report.md").read_text()
    assert f"Average batch time: {summary['timing']['batch_ms']:.1f} ms" in report
    assert f"Final loss: {summary['loss']['final']:.4f}" in report
    for path in tmp_path.glob(f"{script}_*"):
        assert (f"`{path.name}`" in report) == (path != earlier)

    (tmp_path / f"{script}_kernels.csv").unlink()  # as --enable-pytorch-profiler leaves it
    own = reduction.load_profiles(tmp_path)[""]
    assert (own.unit, own.steps, own.statistics) == ("operators", 3, rows)


def test_a_failed_run_leaves_no_profile(tmp_path: Path, capfd: pytest.CaptureFixture):
    script = "tiny_llama_v2"
    result = run_tool(profiler_tool, tmp_path, *tiny(script, *QUICK, "--learning-rate", "1e30"))
    assert (result.status, result.stderr) == (1, "")
    said = capfd.readouterr().err.splitlines()  # of the script, which is a process of its own
    (line,) = [line for line in said if ": error: " in line]
    assert "lower --learning-rate" in line
    assert [path.name for path in tmp_path.iterdir()] == [f"{script}_summary.json"]


def test_files_of_an_earlier_run_are_not_taken_for_those_of_this_one(tmp_path: Path, monkeypatch):
    """A report does not list them either, see above."""
    for name in ("summary.json", "trace.json.gz", "memory_timeline.csv"):
        (tmp_path / f"tiny_llama_v2_{name}").write_text("of an earlier run")
    monkeypatch.setattr(profiler_tool, "run_script", lambda command: 0)
    result = run_tool(profiler_tool, tmp_path, *tiny("tiny_llama_v2", *QUICK))
    assert_one_error(result, 1, "summary.json", "did not write")


# --- both


@BOTH_TOOLS
def test_what_is_missing_or_in_the_way_is_one_line(tmp_path: Path, tool, monkeypatch):
    other, text = tmp_path / "other_v1.py", (ROOT / "tiny_llama_v1.py").read_text()
    other.write_text(text.replace("import numpy", "import no_such_package, numpy"))
    assert_one_error(run_tool(tool, tmp_path, "--script", str(other)), 4, "no_such_package")
    monkeypatch.chdir(tmp_path)  # a script is found here first, and not run to look at it
    (tmp_path / "tiny_llama_v1.py").write_text("raise SystemExit('was run')\n")
    found = run_tool(tool, tmp_path, "--script", "tiny_llama_v1.py")
    assert_one_error(found, 2, "build_parser")


# --- run_deepspeed_flops.py


@pytest.fixture
def no_deepspeed(monkeypatch):
    """DeepSpeed counts differently; these tests are about torch's counter."""
    monkeypatch.setattr(flops_tool, "find_deepspeed", lambda: None)


def flops_by_hand(rows: dict[str, dict]) -> None:
    """Those of the tiny Llama; its output embedding is tied."""
    layers, tokens, hidden, heads, length, vocabulary = 2, 2 * 32, 64, 4, 32, 100
    assert rows["layers.*.mlp"]["flop"] == layers * 2 * tokens * hidden * 3 * 4 * hidden
    projections = 2 * tokens * hidden * (hidden + 2 * hidden // 2 + hidden)
    attention = 2 * 2 * (2 * heads * length * length * (hidden // heads))
    assert rows["layers.*.self_attn"]["flop"] == layers * (projections + attention)
    assert rows["model (rest)"]["flop"] == 2 * tokens * hidden * vocabulary
    assert rows["layers.*.self_attn"]["blocks"] == layers


def test_flops_of_modules(tmp_path: Path, no_deepspeed):
    script, off = "tiny_llama_v2", "--disable-all-fusion"
    result = run_tool(flops_tool, tmp_path, *tiny(script, off))
    assert result.status == 0, result.stderr
    found = json.loads((tmp_path / f"{script}_flops.json").read_text())
    model = build(script, off)
    with FlopCounterMode(display=False) as counter:
        model(**batches(script).next_batch()).backward()
    assert found["forward_flop"] == sum(row["flop"] for row in found["modules"])
    assert found["forward_backward_flop"] == counter.get_total_flops()
    assert sum(row["share_percent"] for row in found["modules"]) == pytest.approx(100)
    parameters = sum(p.numel() for p in model.parameters())
    assert sum(row["parameters"] for row in found["modules"]) == parameters
    names = [row["module"] for row in found["modules"]]
    assert [row["module"] for row in read_rows(tmp_path / f"{script}_flops.csv")] == names
    assert "FLOPs counted by torch.utils.flop_counter (DeepSpeed" in result.stdout
    (file,) = re.findall(r"requirements-\S+\.txt", result.stdout)
    assert (ROOT / file).is_file()
    flops_by_hand(dict(zip(names, found["modules"], strict=True)))


def test_what_hides_flops_is_said_and_too_large_a_run_is_status_3(
    tmp_path: Path, monkeypatch, no_deepspeed
):
    result = run_tool(flops_tool, tmp_path, *tiny("tiny_llama_v4"))
    assert result.status == 0
    assert "not counted" in result.stderr
    assert "--disable-triton-attention" in result.stderr

    def fail(*unused):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(flops_tool, "count_modules", fail)
    assert_one_error(run_tool(flops_tool, tmp_path, *tiny("tiny_llama_v2")), 3, "--batch-size")


class Small(nn.Module):
    """A block with an embedding and a linear layer, an element-wise product outside of both, and
    views."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 16))])

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.embedding(index)
        for block in self.blocks:
            x = block(x)
        return (x * x).t()[:2].add_(1.0).zero_()


def test_bytes_in_memory_of_each_module_by_hand():
    sizes = (torch.zeros(3, 4), 48), (torch.zeros(3, 1).expand(3, 4), 12), (torch.zeros(0, 4), 0)
    assert all(bytes_behind(tensor) == expected for tensor, expected in sizes)
    model, index = Small(), torch.arange(5)
    kinds = roofline.module_kinds(model)
    with Traffic(model, kinds, load("tiny_llama_v2").NO_WORK) as traffic:
        model(index)
    linear = 4 * (5 * 8 + 8 * 16 + 16 + 5 * 16)  # input, weight, bias, output
    assert dict(traffic.bytes_of) == {
        "embedding": 4 * 2 * 5 * 8 + 8 * 5,  # the five rows, read and written, and the index
        "blocks.0.0": linear,
        # x is read once for its square; of that, two columns are read and written, and in the end
        # only written
        "": 4 * 2 * 5 * 16 + 4 * 2 * 2 * 5 + 4 * 2 * 5,
    }
    flop, moved = Counter({"blocks.*.0": 2 * 5 * 8 * 16}), Counter({"blocks.*.0": linear})
    found = roofline.module_rows(model, kinds, flop, moved, None, None)
    rows = {row["module"]: row for row in found}
    assert rows["blocks.*.0"]["flop_per_byte"] == pytest.approx(2 * 5 * 8 * 16 / linear)
    assert rows["blocks.*.0"]["ms"] is None
    assert traffic.by_operator["aten::zero_"] == 4 * 2 * 5
    assert sum(traffic.by_operator.values()) == sum(traffic.bytes_of.values())


def test_of_a_tensor_that_a_kernel_writes_in_part_this_part_counts():
    q, grad = torch.zeros(2, 4, 8), torch.zeros(2, 4, 8)
    with Traffic(nn.Module(), {}, ()) as traffic:
        named = {"QKV": q, "GRAD_QKV": grad, "H": 6, "K": 1}
        traffic.launched("attention_backward_queries_kernel", named)
        traffic.launched("attention_backward_keys_kernel", named)
        traffic.launched("adamw_kernel", {"WEIGHTS": q, "GRAD": grad, "BLOCK": 64})
    parts = {"queries": 6 / 8, "keys": 2 / 8}
    expected = {f"attention_backward_{of}_kernel": 256 * (1 + p) for of, p in parts.items()}
    assert traffic.by_operator == {**expected, "adamw_kernel": 3 * 256}


def test_a_module_takes_the_time_of_its_kernels_or_without_a_gpu_of_its_range():
    kinds = {f"layers.{n}.mlp": "layers.*.mlp" for n in (0, 1)} | {roofline.WHOLE: "model (rest)"}
    ranges = (roofline.WHOLE, 0, 160), ("layers.0.mlp", 5, 20), ("layers.1.mlp", 40, 10)
    trace = [event("user_annotation", *place) for place in ranges]
    found = roofline.times_in_ranges(trace + GPU_TRACE, kinds)
    assert found == {"layers.*.mlp": 0.008, "model (rest)": pytest.approx(0.0115)}
    found = roofline.times_in_ranges(trace, kinds)
    assert found == pytest.approx({"layers.*.mlp": 0.02 + 0.01, "model (rest)": 0.16 - 0.03})


def test_roofline(tmp_path: Path, no_deepspeed):
    script = "tiny_llama_v2"
    result = run_tool(flops_tool, tmp_path, *tiny(script, "--generate-roofline", "--use-amp"))
    assert result.status == 0, result.stderr
    assert (tmp_path / f"{script}_roofline.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / f"{script}_flops.json").read_text())
    ceilings = found["ceilings"]
    assert ceilings["precision"] == "bfloat16"
    assert f"{ceilings['gemm_tflops']:.3f} TFLOP/s" in result.stdout
    for row in found["modules"]:
        assert row["ms"] > 0, row["module"]
        assert row["bytes"] > 0 or row["module"].endswith("(rest)"), row["module"]
        if row["flop"]:
            assert row["achieved_tflops"] == pytest.approx(row["flop"] / row["ms"] / 1e9)

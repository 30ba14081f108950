"""tools/benchmark.py: what its measurements write, and the tables from it."""

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, load, random_state, relative_difference

sys.path.insert(0, str(ROOT))
from tools import benchmark
from tools import benchmark_kernels as kernels

SMALL = ["--hidden-dim", "32", "--num-layers", "2", "--seq-len", "16", "--batch-size", "2"]
FUSIONS = ("qkv-fusion", "flash-attention", "swiglu-fusion")


def on_a_host_that_slows_down(monkeypatch) -> None:
    """Steps take 10 ms, each fusion saves one; with every turn of a side they take half as long again."""
    script = benchmark.importlib.import_module("tiny_llama_v2")

    def take(run, steps: int) -> None:
        on = sum(getattr(run.args, fusion.replace("-", "_")) for fusion in FUSIONS)
        run.turns.append((10 - on) * (1 + len(run.turns) / 2))

    monkeypatch.setattr(script.Run, "take", take)


def test_ablation_measures_each_fusion_alone_and_all_but_each(tmp_path, monkeypatch):
    on_a_host_that_slows_down(monkeypatch)
    sets = ["none", *(f"{kind} {f}" for kind in ("only", "all but") for f in FUSIONS), "all"]
    monkeypatch.setattr(benchmark, "MODELS", {"tiny_llama": SMALL})
    argv = ["--rounds", "3", "--models", "tiny_llama", "--versions", "v2"]
    assert benchmark.main(["ablation", str(tmp_path), *argv]) == 0

    written = json.loads((tmp_path / "ablation_tiny_llama_v2.json").read_text())
    rows = {(row["precision"], row["fusions"]): row for row in written["rows"]}
    assert sorted(rows) == sorted((precision, name) for precision in ("fp32", "bf16") for name in sets)
    assert written["environment"]["device_name"]

    for precision in ("fp32", "bf16"):
        calls = {name: rows[precision, name]["per_step"] for name in sets}
        for fusion in FUSIONS:
            assert calls["all"] < calls[f"all but {fusion}"] < calls["none"]
            assert calls["all"] < calls[f"only {fusion}"] < calls["none"]
        for name, saved in (("none", 0), ("only swiglu-fusion", 1), ("all but swiglu-fusion", 2), ("all", 3)):
            assert rows[precision, name]["speedup"] == pytest.approx(10 / (10 - saved))
            assert rows[precision, name]["batch_ms"] == pytest.approx(1.5 * (10 - saved)), "the turn in the middle"

    lines = benchmark.table(tmp_path).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == sets
    assert {line.count("|") for line in lines} == {8}


def test_headline_compares_all_versions_turn_by_turn(tmp_path, monkeypatch):
    order = []
    for version in benchmark.VERSIONS:
        script = benchmark.importlib.import_module(f"tiny_llama_{version}")

        def take(run, steps: int, version: str = version) -> None:
            if run.label == "step" and run.goal > 3:
                order.append(version)
            run.turns.append({"v1": 30.0, "v2": 20.0, "v3": 10.0}[version] * (1 + len(run.turns)))

        monkeypatch.setattr(script.Run, "take", take)
    monkeypatch.setattr(benchmark, "SHAPES", {"tiny_llama, small": SMALL})
    argv = ["--rounds", "3", "--shapes", "tiny_llama, small", "--precisions", "fp32", "--modes", "eager"]
    assert benchmark.main(["headline", str(tmp_path), *argv]) == 0
    assert order == [*benchmark.VERSIONS, *reversed(benchmark.VERSIONS), *benchmark.VERSIONS]
    (row,) = json.loads((tmp_path / "headline.json").read_text())["rows"]
    assert [row[version]["batch_ms"] for version in benchmark.VERSIONS] == [60.0, 40.0, 20.0]
    assert benchmark.ratios(row["v1"], row["v2"]) == [1.5, 1.5, 1.5]
    times, kernels = benchmark.table(tmp_path).split("\n\n")
    assert [cell.strip() for cell in times.splitlines()[2].split("|")[1:-1]] == [
        "tiny_llama, small, fp32", "60.00", "40.00", "20.00"
    ]  # fmt: skip
    assert str(row["v2"]["per_step"]) in kernels


def fake_results(monkeypatch, results: list[dict]) -> None:
    """Every version script ends with the next of these results in place of training."""
    monkeypatch.setattr(benchmark, "MODELS", {"tiny_llama": []})
    monkeypatch.setattr(benchmark, "LENGTHS", (16, 32))
    for script in ("tiny_llama_v1", "tiny_llama_v2"):
        monkeypatch.setattr(benchmark.importlib.import_module(script), "train", lambda args: results.pop(0))


def result(status: str = "ok", exit_status: int = 0, batch_ms: float = 10.0, peak_mb: float | None = 100.0) -> dict:
    timing, memory = {"batch_ms": batch_ms}, {"peak_mb": peak_mb}
    error = None if status == "ok" else "why it ended"
    return {"status": status, "exit_status": exit_status, "timing": timing, "memory": memory, "error": error}


def call(capsys, *argv) -> tuple[int, str, str]:
    status = benchmark.main([str(word) for word in argv])
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    ("ending", "status", "line"),
    [(("failed", 130), 130, "benchmark.py: interrupted"), (("failed", 1), 1, "why it ended")],
    ids=["Ctrl-C", "failure"],
)
def test_a_run_that_fails_ends_the_suite_and_keeps_the_earlier_file(
    tmp_path, monkeypatch, capsys, ending, status, line
):
    earlier = tmp_path / "memory.json"
    earlier.write_text("earlier")
    fake_results(monkeypatch, [*(result() for _ in range(3)), result(*ending)])
    ended, _, err = call(capsys, "memory", tmp_path)
    assert ended == status
    assert [part.partition("; ")[0] for part in err.splitlines()[:-1]] == ["1: seq_len 16", "2: seq_len 32"]
    assert line in err.splitlines()[-1]
    assert earlier.read_text() == "earlier"
    assert len(json.loads((tmp_path / "memory.partial.json").read_text())["rows"]) == 1


def test_out_of_memory_is_a_cell_and_its_steps_are_no_measurement(tmp_path, monkeypatch, capsys):
    fast = result("oom", 3, batch_ms=0.1)  # a few quick steps, then no memory
    fake_results(monkeypatch, [result(), result(peak_mb=90.0), fast, result(peak_mb=None)])
    assert call(capsys, "memory", tmp_path)[0] == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in benchmark.table(tmp_path).splitlines()]
    assert rows[2][1:] == ["100", "out of memory"]
    assert rows[3][1:] == ["90", "-"]


@pytest.mark.parametrize(
    ("argv", "content", "line"),
    [
        (["table", "missing"], None, "missing: no result files"),
        (["table", "."], '{"rows": [', "memory.json: not JSON"),
        (
            ["table", "."],
            '{"environment": {"device_name": "x"}, "rows": [{"seq_len": 1}]}',
            "it has no rows[0].scores",
        ),
        (["ddp", "."], None, "torchrun --nproc-per-node N"),
        (["ablation", ".", "--rounds", "0"], None, "1 or more"),
        (["quickest", "."], None, "invalid choice"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, argv, content, line):
    monkeypatch.chdir(tmp_path)
    if content:
        (tmp_path / "memory.json").write_text(content)
    try:
        status = benchmark.main(argv)
    except SystemExit as exit:
        status = exit.code
    err = capsys.readouterr().err
    assert (status, len(err.splitlines())) == (2, 1)
    assert line in err
    assert not (tmp_path / "missing").exists()


# tools/benchmark_kernels.py


@pytest.fixture
def tiny_studies(monkeypatch):
    """Sizes for a CPU; V1's side is not compiled."""
    monkeypatch.setattr(kernels, "ATTENTION", {"N=4": (2, 2, 4, 1, 8)})
    monkeypatch.setattr(kernels, "TRIANGLE", {"N=3": (1, 3)})
    monkeypatch.setattr(kernels, "BLOCK", {"N=3": (1, 2, 3, 8, 2)})
    monkeypatch.setattr(kernels, "CAUSAL", {"S=6": (1, 6, 2, 1, 8)})
    monkeypatch.setattr(kernels.torch, "compile", lambda function: function)


@pytest.mark.parametrize("study", kernels.STUDIES)
def test_all_sides_of_a_study_compute_the_same(study: str, tiny_studies, monkeypatch):
    """The result and the gradient of the first input, or a block's two results; the rest depends on what is merged."""
    found = {}

    def in_turns(sides: dict, rounds: int) -> dict:
        found.update({name: step()[:2] for name, step in sides.items()})
        return {}

    monkeypatch.setattr(kernels, "in_turns", in_turns)
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)  # the same gradient of the result on all sides
    for version in ("v1", "v2", "v3"):  # and the same weights
        module = benchmark.importlib.import_module(f"tiny_openfold_{version}")
        for name in ("TriangleMultiplicationOutgoing", "EvoformerBlock"):
            monkeypatch.setattr(module, name, with_random_weights(getattr(module, name)))
    for _, measure in kernels.STUDIES[study](1, ["fp32"]):
        measure()
    assert len(found) == 3
    ours = found.pop("triton")
    for name, theirs in found.items():
        for a, b in zip(ours, theirs, strict=True):
            assert relative_difference(a, b) < 1e-5, name


def with_random_weights(original):
    """What a version builds, with weights that are the same in each version and make every part matter."""

    def build(*arguments):
        module = original(*arguments)
        module.load_state_dict(random_state(module.state_dict()))
        return module

    return build


def test_a_study_writes_its_turns_and_other_block_sizes_apart(tiny_studies, tmp_path, capsys):
    argv = ["attention", str(tmp_path), "--precisions", "fp32", "--rounds", "2"]
    assert kernels.main(argv) == 0
    (row,) = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert (row["shape"], row["precision"]) == ("N=4", "fp32")
    for side in ("triton", "SDPA", "torch.compile"):
        assert len(row[side]["turns_us"]) == 2
        assert row[side]["us"] == pytest.approx(sum(row[side]["turns_us"]) / 2)
    assert kernels.main([*argv, "--try", "attention_forward:BLOCK_M=16 attention_forward:num_warps=2"]) == 0
    rows = json.loads((tmp_path / "attention_blocks.json").read_text())["rows"]
    assert [row["blocks"] for row in rows] == [
        "as they are",
        "attention_forward:BLOCK_M=16 attention_forward:num_warps=2",
    ]
    assert json.loads((tmp_path / "attention.json").read_text())["rows"] == [row], "and nothing else"
    capsys.readouterr()
    assert kernels.main(["table", str(tmp_path)]) == 0
    assert re.search(r"\| N=4, fp32 +\| +\d+ \|", capsys.readouterr().out)


def test_rows_calls_every_operator_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "in_turns", lambda sides, rounds: {s: {"us": 1.0, "turns_us": [1.0]} for s in sides})
    assert kernels.main(["rows", str(tmp_path), "--rows", "512"]) == 0
    rows = {row["operator"]: row["bytes"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert rows["swiglu_forward"] == 2 * 512 * (2048 + 1024)
    assert "column_sums" in kernels.table(tmp_path)


LLAMA = ["--num-layers", "1", "--hidden-dim", "32", "--num-heads", "4", "--num-kv-heads", "2", "--seq-len", "12"]
LLAMA += ["--batch-size", "2", "--vocab-size", "50", "--warmup-steps", "2"]


def test_the_whole_step_has_its_parts_and_its_floor(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "SHAPES", {"tiny_llama, tiny": LLAMA})
    ceilings = kernels.measure_ceilings
    monkeypatch.setattr(kernels, "measure_ceilings", lambda *given: replace(ceilings(*given), copy_gb_per_s=2.0))
    assert kernels.main(["step", str(tmp_path), "--rounds", "2"]) == 0
    (row,) = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert (row["shape"], row["precision"], row["ceilings"]["precision"]) == ("tiny_llama, tiny", "bf16", "bfloat16")
    assert row["ms"] == pytest.approx(sum(row["turns_ms"]) / 2)
    assert row["floor"]["copy_ms"] == pytest.approx(row["bytes"] / 2e9 * 1e3)
    assert row["floor"]["gemm_ms"] == pytest.approx(row["flop"] / row["ceilings"]["gemm_tflops"] / 1e9)
    assert row["over_floor"] == pytest.approx(row["ms"] / sum(row["floor"].values()))
    calls = {part["name"].rpartition("::")[2]: part["calls"] for part in row["kernels"]}
    rms_norm = next(name for name in calls if name.startswith("rms_norm_backward"))  # the operator's or the kernel's
    assert calls[rms_norm] == 3, "two in the layer and one after it"
    assert 0 < sum(part["us"] for part in row["kernels"]) / 1e3 < 2 * row["ms"], "of one step, not of all"
    capsys.readouterr()
    assert kernels.main(["table", str(tmp_path)]) == 0
    steps, categories, longest = capsys.readouterr().out.split("\n\n")
    assert re.search(rf"\| tiny_llama, tiny, bf16 +\| +{row['ms']:.2f} \|", steps)
    assert {"GEMM", "attention", "normalisation"} < {line.split("|")[1].strip() for line in categories.splitlines()}
    assert row["kernels"][0]["name"] in longest.splitlines()[2]


def test_the_bytes_of_a_step_are_those_of_its_operators_and_of_the_optimizer():
    """A kernel of V3 counts with what it reads and writes, whatever it does inside."""
    v3, x = load("tiny_llama_v3"), torch.randn(8, 64, device=kernels.DEVICE)
    model = torch.nn.Linear(16, 4, bias=False, device=kernels.DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()  # makes its moments

    def compute(batch: torch.Tensor) -> None:
        v3.swiglu_forward(batch)
        optimizer.step()

    trainer = SimpleNamespace(model=model, optimizer=optimizer, next_batch=lambda: x, compute=compute)
    assert kernels.group_bytes(trainer, v3.NO_WORK).total() == 4 * (8 * 64 + 8 * 32) + 7 * 4 * 64


def test_the_optimizer_of_v4_is_an_operator_and_counts_as_one():
    """It reads weights, gradients and two moments, and writes all but the gradients, and weights in bfloat16."""
    v4 = load("tiny_llama_v4")
    model = torch.nn.Linear(16, 4, bias=False, device=kernels.DEVICE)
    optimizer = v4.FusedAdamW([[model.weight]], 1e-3, torch.bfloat16)
    model.weight.grad = torch.ones_like(model.weight)
    trainer = SimpleNamespace(model=model, optimizer=optimizer, next_batch=lambda: None)
    corrections = torch.ones(2, dtype=torch.float64, device=kernels.DEVICE)
    trainer.compute = lambda batch: optimizer.update(optimizer.rooms[0], corrections)
    optimizer.step()
    assert kernels.group_bytes(trainer, v4.NO_WORK).total() == 64 * (7 * 4 + 2) + 2 * 8


def test_llamas_that_are_compared_train_alike(tmp_path, monkeypatch, capsys):
    """All have the same loss at the start and after a step; what does not run is left out."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(kernels, "SHAPES", {"tiny_llama, tiny": LLAMA, "tiny_openfold, default": []})
    losses = {}
    for module in map(load, ("tiny_llama_v2", "tiny_llama_v3", "tiny_llama_v4")):
        monkeypatch.setattr(module, "build_model", with_random_weights(module.build_model))

    def in_turns(sides: dict, rounds: int) -> dict:
        losses.update({name: [step()[0].item() for _ in range(2)] for name, step in sides.items()})
        return {name: {"us": 3e3, "turns_us": [3e3], "extra_mb": None} for name in sides}

    def fails(**batch: torch.Tensor) -> None:
        raise RuntimeError("called a synchronizing CUDA operation\nand more")

    monkeypatch.setattr(kernels, "in_turns", in_turns)
    monkeypatch.setattr(kernels, "optional", lambda package: True)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(kernels, "with_liger", lambda model, **chosen: model if chosen else fails)
    assert kernels.main(["llama", str(tmp_path), "--precisions", "fp32"]) == 0
    assert list(losses) == ["V4", "V3", "V2", "Hugging Face", "Hugging Face compiled", "Liger but its loss"]
    assert losses["V3"][1] < losses["V3"][0]
    for name, found in losses.items():
        assert found == pytest.approx(losses["V3"], rel=1e-4 if kernels.GPU else 1e-5), name
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert "Liger is left out" in note
    assert "synchronizing CUDA operation" in note
    assert kernels.main(["table", str(tmp_path)]) == 0
    assert re.search(r"\| tiny_llama, tiny, fp32 \|( +3\.00 \|){6}( +1\.00x \|){5}", capsys.readouterr().out)

"""What --enable-rocm-profiling tells a profiler: a region around the measured steps, phases and blocks inside.

There is no GPU here, so these tests put a recorder in the place of the three interfaces that only exist with one.
"""

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch
from conftest import QUICK, SCRIPTS, assert_one_error, batches, build, load, parse

every_script = pytest.mark.parametrize("script", SCRIPTS)
PHASES = ["data", "forward", "backward", "optimizer"]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The calls that reach NVTX and the profiler, in order."""
    seen: list[str] = []
    nvtx = torch.cuda.nvtx

    @contextlib.contextmanager
    def nvtx_range(name: str):
        seen.append(f"push {name}")
        yield
        seen.append("pop")

    monkeypatch.setattr(nvtx, "range", nvtx_range)
    monkeypatch.setattr(nvtx, "range_push", lambda name: seen.append(f"push {name}") or 1)
    monkeypatch.setattr(nvtx, "range_pop", lambda: seen.append("pop") or 0)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    return seen


@every_script
def test_the_measured_steps_alone_are_marked_phase_by_phase(script: str, calls, capsys):
    module = load(script)
    args, result = parse(script, *QUICK), {"loss": {"curve": []}}
    trainer = module.Trainer(args, torch.device("cpu"))
    recorder = module.Recorder(trainer.device, 2, "step", 10, torch.cuda.nvtx.range)
    with module.recorded_region(True):
        module.run_steps(trainer, recorder, result)
    step = [call for phase in PHASES for call in (f"push {phase}", "pop")]
    assert calls == ["start", *step, *step, "stop"]
    assert len(result["loss"]["curve"]) == 2


@every_script
def test_each_block_is_a_range_and_computes_what_it_did_before(script: str, calls):
    module = load(script)
    model, batch = build(script), batches(script).next_batch()
    before = model(**batch)
    module.name_blocks(model)
    assert torch.equal(model(**batch), before)
    (name, blocks) = next((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList))
    assert calls == [call for i in range(len(blocks)) for call in (f"push {name}.{i}", "pop")]


@every_script
def test_without_the_flag_nothing_is_marked(script: str, calls, run):
    assert run(script, *QUICK).status == 0
    assert calls == []


@every_script
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_flag_says_that_nothing_is_marked(script: str, calls, run):
    result = run(script, *QUICK, "--under-profiler", "--enable-rocm-profiling")
    assert result.status == 0
    assert "no GPU" in result.stderr
    assert calls == []


@pytest.mark.parametrize("fails", [False, True])
def test_under_rocm_the_profiler_is_resumed_and_paused(calls, monkeypatch, fails: bool):
    library = SimpleNamespace(
        roctxProfilerResume=lambda which: calls.append(f"resume {which}"),
        roctxProfilerPause=lambda which: calls.append(f"pause {which}"),
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library if name == "librocprofiler-sdk-roctx.so" else None)
    with contextlib.suppress(ZeroDivisionError), load("tiny_llama_v2").recorded_region(True):
        calls.append("steps")
        1 / (0 if fails else 1)
    assert calls == ["start", "resume 0", "steps", "pause 0", "stop"]


def test_under_rocm_a_missing_library_is_one_line_before_anything_runs(monkeypatch, run):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    result = run("tiny_llama_v2", *QUICK, "--device", "cuda", "--enable-rocm-profiling")
    assert_one_error(result, 4, "--enable-rocm-profiling", "roctx")


def test_profiled_steps_name_their_phases():
    module = load("tiny_llama_v2")
    profile = module.Trainer(parse("tiny_llama_v2"), torch.device("cpu")).profile(steps=2)
    names = [e["name"] for e in module.trace_events(profile) if e.get("cat") == "user_annotation"]
    assert [name for name in names if name in PHASES] == 2 * PHASES

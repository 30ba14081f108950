"""What --enable-rocm-profiling tells a profiler: a region around the measured steps, phases and
modules inside.

There is no GPU here, so these tests put a recorder in the place of the interfaces that only exist
with one.
"""

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch
from conftest import QUICK, SCRIPT, assert_one_error, load, parse

from fusion_lab.profile import steps


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The calls that reach NVTX and the profiler, in order, and each step of the optimizer."""
    seen: list[str] = []

    @contextlib.contextmanager
    def nvtx_range(name: str):
        seen.append(f"push {name}")
        yield
        seen.append(f"pop {name}")

    def watched(self, *args: object) -> None:
        seen.append("step")
        step(self, *args)

    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: seen.append(name))
    return seen


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> None:
    """The region is marked as with a GPU."""
    region = steps.recorded_region

    @contextlib.contextmanager
    def on_a_gpu(trainers):
        for trainer in trainers:
            trainer.gpu = True
        with region(trainers):
            for trainer in trainers:
                trainer.gpu = False
            yield

    monkeypatch.setattr(steps, "recorded_region", on_a_gpu)


def test_without_a_gpu_nothing_is_marked(run):
    result = run(SCRIPT, *QUICK, "--enable-rocm-profiling", "--under-profiler")
    assert_one_error(result, 0, "no GPU here, so nothing is marked")


@pytest.mark.parametrize("mode", [[], ["--compare-fusion"]], ids=["run", "comparison"])
def test_the_region_holds_the_measured_steps_and_nothing_else(
    mode: list[str], as_on_a_gpu, calls: list[str], run
):
    assert run(SCRIPT, *QUICK, "--enable-rocm-profiling", *mode).status == 0
    begin, end = calls.index("start"), calls.index("stop")
    sides = len(mode) + 1
    assert calls[:begin] == ["step"] * sides, "the warm-up"
    for call in ("step", *(f"push {phase}" for phase in steps.PHASES)):
        assert calls[begin:end].count(call) == 3 * sides
    assert set(calls[end + 1 :]) == {"step"}, "what is counted afterwards is outside"


def test_each_module_is_a_range_of_its_name_and_computes_what_it_did_before(calls: list[str]):
    trainer = load(SCRIPT).Trainer(parse(SCRIPT)).build()
    network, batch, methods = trainer.model, trainer.next_batch(), vars(trainer).copy()
    before = network(**batch)
    with steps.ranges(trainer, torch.cuda.nvtx.range):
        assert torch.equal(network(**batch), before)
        modules = calls[:]
        trainer.step()
    phases = [call for call in calls if call.split()[-1] in steps.PHASES]
    assert phases == [f"{end} {phase}" for phase in steps.PHASES for end in ("push", "pop")]
    own = [module for module in network.modules() if "forward" in vars(module)]
    assert (own, vars(trainer)) == ([], methods), "every method is its own again"
    open_ranges, pushed = [], set()
    for call in modules:
        kind, name = call.split()
        if kind == "push":
            assert name.rpartition(".")[0] in (*open_ranges, "layers", ""), "outside its module"
            open_ranges.append(name)
            pushed.add(name)
        else:
            assert open_ranges.pop() == name
    assert {"embed_tokens", "layers.1.self_attn.rotary", "layers.1.mlp.down_proj"} <= pushed


def test_under_rocm_the_profiler_is_resumed_and_paused(monkeypatch, calls: list[str]):
    """Also where a step fails."""
    library = SimpleNamespace(
        roctxProfilerResume=lambda which: calls.append(f"resume {which}"),
        roctxProfilerPause=lambda which: calls.append(f"pause {which}"),
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(ctypes, "CDLL", {"librocprofiler-sdk-roctx.so": library}.get)
    monkeypatch.setattr(steps, "ranges", lambda *_: contextlib.nullcontext())
    region = steps.recorded_region([SimpleNamespace(gpu=True)])
    with contextlib.suppress(ZeroDivisionError), region:
        calls.append("steps")
        raise ZeroDivisionError
    assert calls == ["start", "resume 0", "steps", "pause 0", "stop"]


def test_under_rocm_a_missing_library_is_one_line(monkeypatch, as_on_a_gpu, calls: list[str], run):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    result = run(SCRIPT, *QUICK, "--enable-rocm-profiling")
    assert_one_error(result, 4, "needs", "librocprofiler-sdk-roctx.so")
    assert result.summary["status"] == "failed"

"""What --enable-rocm-profiling tells a profiler: a region around the measured steps, phases and
modules inside.

There is no GPU here, so these tests put a recorder in the place of the three interfaces that only
exist with one.
"""

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch
from conftest import CPU, MODELS, QUICK, SCRIPT, assert_one_error, load, parse

PHASES = ["data", "forward", "backward", "optimizer"]
LAYER = "input_layernorm post_attention_layernorm self_attn self_attn.qkv_proj self_attn.rotary"
LAYER += " self_attn.o_proj mlp mlp.gate_up_proj mlp.down_proj"
BLOCK = "msa_att_row msa_att_col msa_transition outer_product_mean tri_mul_out tri_mul_in"
BLOCK += " tri_att_start tri_att_end pair_transition pair_transition.linear_1 tri_att_end.linear_o"
# The modules that a participant looks for, as they are named in the model.
PARTS = {
    "llama": {"embed_tokens", "norm", "layers.1", *(f"layers.1.{part}" for part in LAYER.split())},
    "openfold": {"blocks.0", *(f"blocks.0.{part}" for part in BLOCK.split())},
}


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
    """The flag is as active as with a GPU."""
    active = {"enable_rocm_profiling": True}
    monkeypatch.setattr(load(SCRIPT), "notice_profilers", lambda args: vars(args).update(active))


@pytest.mark.parametrize("mode", [[], ["--compare-fusion"]], ids=["run", "comparison"])
def test_the_region_holds_the_measured_steps_and_nothing_else(
    mode: list[str], as_on_a_gpu, calls: list[str], run
):
    assert run(SCRIPT, *QUICK, *mode).status == 0
    begin, end = calls.index("start"), calls.index("stop")
    sides = len(mode) + 1
    assert calls[:begin] == ["step"] * sides, "the warm-up"
    assert calls[begin + 1 : end].count("step") == 3 * sides
    assert calls[begin + 1 : end].count("push forward") == 3 * sides
    assert set(calls[end + 1 :]) == {"step"}, "what is counted afterwards is outside"


@pytest.mark.parametrize("model", MODELS)
def test_each_module_is_a_range_of_its_name_and_computes_what_it_did_before(
    model: str, calls: list[str]
):
    trainer = load(f"tiny_{model}_v2").Trainer(parse(f"tiny_{model}_v2"), CPU)
    network, batch = trainer.model, trainer.next_batch()
    before = network(**batch)
    with trainer.ranges(torch.cuda.nvtx.range):
        assert torch.equal(network(**batch), before)
        modules = calls[:]
        trainer.step()
    phases = [call for call in calls if call.split()[-1] in PHASES]
    assert phases == [f"{end} {phase}" for phase in PHASES for end in ("push", "pop")]
    own = [module for module in network.modules() if "forward" in vars(module)]
    assert own == [], "every module has its own method again"
    open_ranges, pushed = [], set()
    for call in modules:
        kind, name = call.split()
        if kind == "push":
            parent = name.rpartition(".")[0]
            assert parent in (*open_ranges, "layers", "blocks", ""), "outside the module around it"
            open_ranges.append(name)
            pushed.add(name)
        else:
            assert open_ranges.pop() == name
    assert PARTS[model] <= pushed <= {name for name, _ in network.named_modules()}


def test_under_rocm_the_profiler_is_resumed_and_paused(monkeypatch, calls: list[str]):
    """Also where a step fails."""
    library = SimpleNamespace(
        roctxProfilerResume=lambda which: calls.append(f"resume {which}"),
        roctxProfilerPause=lambda which: calls.append(f"pause {which}"),
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(ctypes, "CDLL", {"librocprofiler-sdk-roctx.so": library}.get)
    trainer = SimpleNamespace(ranges=contextlib.nullcontext)
    with contextlib.suppress(ZeroDivisionError), load(SCRIPT).recorded_region([trainer]):
        calls.append("steps")
        raise ZeroDivisionError
    assert calls == ["start", "resume 0", "steps", "pause 0", "stop"]


def test_under_rocm_a_missing_library_is_one_line(monkeypatch, as_on_a_gpu, calls: list[str], run):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    result = run(SCRIPT, *QUICK)
    assert_one_error(result, 4, "--enable-rocm-profiling", "roctx")
    assert result.summary is None or result.summary["status"] == "failed"

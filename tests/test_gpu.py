"""What only a GPU can show: its own kernels compute the same, and there are fewer of them with
fusions."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import (
    ALL_SETTINGS,
    SCRIPTS,
    faults_that_pass,
    load,
    parse,
    relative_difference,
    run_main,
)

from fusion_lab.accuracy import judged_values
from fusion_lab.turns import free_memory

pytestmark = pytest.mark.gpu
PRECISIONS = {
    "fp32": [],
    "TF32": ["--matmul-precision", "high"],
    "bf16": ["--use-amp"],
    "fp16": ["--use-amp", "--amp-dtype", "float16"],
}
GRAPH = ["--device", "cuda", "--enable-cuda-graph"]
EAGER = ["--device", "cuda", "--disable-cuda-graph"]  # V4 makes a graph unless it is told not to
TWENTY = ["--num-steps", "20", "--warmup-steps", "3"]
V4 = "tiny_llama_v4"  # which refuses a compiler
every_fused = pytest.mark.parametrize(
    "script", [script for script in SCRIPTS if not script.endswith("v1")]
)


@pytest.fixture(autouse=True)
def freed():
    """What a test leaves on the device, graphs of torch.compile above all, is not counted in the
    next one's memory."""
    yield
    free_memory()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("script", "argv"), ALL_SETTINGS)
def test_fusions_in_turn_are_right(script: str, argv: list[str], precision: str):
    """By the limits of --verify-accuracy, of which no_wrong_gradient_passes shows that they are
    close."""
    module = load(script)
    args = module.parse_args(["--device", "cuda", *argv, *PRECISIONS[precision]])
    judged = judged_values(module, args)
    assert {name: pair for name, pair in judged.items() if not pair[0] <= pair[1]} == {}


@every_fused
def test_kernels_launches_and_memory_are_counted(script: str, tmp_path: Path):
    """There are fewer kernels with fusions; a graph is one launch of the same ones."""
    argv = ["--num-steps", "3", "--warmup-steps", "2"]
    run = run_main(script, tmp_path / "eager", *argv, *EAGER)
    assert run.status == 0, run.stderr
    eager, peak = run.summary["kernels"], 1e6 * run.summary["memory"]["peak_mb"]
    assert eager["unit"] == "kernels"
    assert 0 < eager["per_step"] < eager["all_off"]
    counted = f"{eager['per_step']} (all fusions off: {eager['all_off']})"
    assert f"Kernels per step: {counted}" in run.stdout
    assert "Host launches per step: " in run.stdout
    assert run.summary["environment"]["device"] == "cuda"
    assert 4 * 4 * run.summary["parameters"] <= peak <= torch.cuda.max_memory_reserved()

    run = run_main(script, tmp_path / "graph", *argv, *GRAPH)
    graph = run.summary["kernels"]
    assert graph["host_launches"] < 10 < eager["host_launches"]
    assert graph["per_step"] == pytest.approx(eager["per_step"], rel=0.02)
    assert "Average graph time: " in run.stdout
    assert "Average forward time: " not in run.stdout


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_no_wrong_gradient_passes_at_real_sizes(script: str, precision: str):
    module = load(script)
    passed, judged = faults_that_pass(
        module, module.parse_args(["--device", "cuda", *PRECISIONS[precision]])
    )
    assert passed == []
    assert judged > 60


# The whole step as a graph


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_graph_trains_bit_for_bit_like_the_same_steps_without(
    script: str, precision: str, tmp_path: Path
):
    """With --deterministic; otherwise two runs without a graph differ, too."""
    argv = [*TWENTY, "--under-profiler", "--deterministic", *PRECISIONS[precision]]
    eager = run_main(script, tmp_path / "eager", *argv, *EAGER)
    graph = run_main(script, tmp_path / "graph", *argv, *GRAPH)
    assert (eager.status, graph.status) == (0, 0), eager.stderr + graph.stderr
    assert len(graph.summary["loss"]["curve"]) == 23
    assert graph.summary["loss"]["curve"] == eager.summary["loss"]["curve"]


@every_fused
def test_the_peak_of_a_graph_includes_its_private_pool(script: str, tmp_path: Path):
    """Both without what there was before: what earlier tests left on the GPU, and cuBLAS's
    workspaces."""
    argv, own = ["--batch-size", "64", "--under-profiler", *TWENTY], {}
    # the first makes the workspaces
    for name, graph in (("first", GRAPH), ("eager", EAGER), ("graph", GRAPH)):
        free_memory()
        result = run_main(script, tmp_path / name, *argv, *graph)
        assert result.status == 0, result.stderr
        own[name] = result.summary["memory"]["peak_mb"]
    # between two steps: the weights and AdamW's two moments
    kept = 3 * 4 * result.summary["parameters"] / 1e6
    assert own["eager"] > 3 * kept, "most of it must be of the step, which a graph has in its pool"
    assert own["graph"] > 0.9 * own["eager"]


# What V4's graph follows, and what it computes when a loop is not that of the core


def trainer_after_a_step(script: str, *argv: str):
    """Model, optimizer and data of a tiny run."""
    args = parse(script, "--device", "cuda", "--deterministic", *argv)
    trainer = load(script).Trainer(args).build()
    trainer.step()
    return trainer


FOLLOWERS = [  # V4's optimizer in each precision, and PyTorch's
    *((V4, argv) for argv in PRECISIONS.values()),
    (V4, ["--disable-fused-optimizer"]),
    ("tiny_llama_v1", []),
    ("tiny_openfold_v3", []),
]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("script", "argv"), FOLLOWERS)
def test_a_graph_follows_the_learning_rate_and_what_is_loaded(script: str, argv: list[str]):
    """Bit for bit as without a graph: a scheduler and, with V4's optimizer, a rate that is
    assigned, weights and moments of earlier. A rate that is a number would be captured."""
    curves, ours = {}, script == V4 and "--disable-fused-optimizer" not in argv
    for side, flags in (("eager", EAGER), ("graph", GRAPH)):
        trainer = trainer_after_a_step(script, *flags, *argv)
        model, optimizer, curve = trainer.model, trainer.optimizer, curves.setdefault(side, [])
        trainer.step()
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict())) if ours else None
        if side == "graph":
            trainer.capture()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
        for _ in range(3):
            curve.append(trainer.step().item())
            scheduler.step()
        if not ours:
            continue
        optimizer.param_groups[0]["lr"] = 1e-2
        curve += [trainer.step().item() for _ in range(3)]
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        curve += [trainer.step().item() for _ in range(3)]
    assert curves["graph"] == curves["eager"]
    assert len(set(curves["eager"])) == (9 if ours else 3)


def micro_batches(model: torch.nn.Module, ids: torch.Tensor) -> None:
    model(ids, ids).backward()
    model(ids.flip(1), ids).backward()


def clipped(model: torch.nn.Module, ids: torch.Tensor) -> None:
    model(ids, ids).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def one_layer_twice(model: torch.nn.Module, ids: torch.Tensor) -> None:
    first, second = model.layers
    model.layers = torch.nn.ModuleList([first, first, second])
    model(ids, ids).backward()
    model.layers = torch.nn.ModuleList([first, second])


def moments_after(backward: Callable, graph: bool, *argv: str) -> dict[str, torch.Tensor]:
    """Of all parameters, after three steps with this backward pass."""
    trainer = trainer_after_a_step(V4, "--use-amp", *argv)
    trainer.model.forward = trainer.autocast()(trainer.model.forward)

    def step() -> None:
        backward(trainer.model, trainer.inputs["labels"])
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    step()
    if graph:
        with torch.cuda.graph(
            captured := torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(priority=-1)
        ):
            step()
    for _ in range(2):
        captured.replay() if graph else step()
    torch.cuda.synchronize()
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    return {names[p]: values["exp_avg"].clone() for p, values in trainer.optimizer.state.items()}


@pytest.mark.parametrize("overlap", ["enable", "disable"])
@pytest.mark.parametrize("backward", [micro_batches, clipped], ids=["micro_batches", "clipped"])
def test_a_graph_of_another_loop_computes_what_its_steps_do(backward: Callable, overlap: str):
    eager = moments_after(backward, graph=False)
    graph = moments_after(backward, True, f"--{overlap}-overlap")
    for name, value in eager.items():
        assert relative_difference(graph[name], value) < 1e-3, name


def test_a_weight_used_twice_beside_the_chain_is_an_error_and_right_without():
    with pytest.raises(RuntimeError, match="--disable-overlap"):
        moments_after(one_layer_twice, graph=True)
    eager, graph = (
        moments_after(one_layer_twice, graph, "--disable-overlap") for graph in (False, True)
    )
    for name, value in eager.items():
        assert relative_difference(graph[name], value) < 1e-3, name

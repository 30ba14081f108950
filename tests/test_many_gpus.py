"""One run on several processes: the same training as one process on the global batch, and a clean
end when one fails.

Here the processes are on the CPU and talk through gloo; on GPUs it is one each and NCCL or RCCL.
"""

import gc
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import (
    ROOT,
    SCRIPT,
    SMALLEST,
    arguments,
    assert_one_error,
    assert_same_gradients,
    captured,
    command_line,
    finished,
    gradients,
    load,
    parse,
    summary_in,
    words,
)

BATCH = ["--batch-size", "2"]
V4 = ("tiny_llama_v4", "tiny_openfold_v4")
# Of TinyOpenFold's kernels the loss alone, a mean over the proteins of all processes.
SIZES = {
    "tiny_llama_v2": [],
    "tiny_llama_v4": SMALLEST["llama"],
    "tiny_openfold_v4": SMALLEST["openfold"]
    + words("--disable-all-fusion --enable-loss-fusion --enable-fused-optimizer --enable-overlap"),
}
UNFUSED = "--disable-all-fusion --enable-fused-optimizer"
MODES = {  # of main(): script, arguments, what is printed
    "comparison": (SCRIPT, "--compare-fusion --use-amp --num-layers 1", "all off   as chosen"),
    # no step is taken there, so the gradients are averaged for it alone, without DDP
    "accuracy": (V4[0], f"--verify-accuracy {UNFUSED}", "check: PASS"),
}
TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


# What two processes do that meet once, as that takes longest: this file is their program


def losses_and_gradients(script: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two steps, and the gradients of the third, under their canonical names."""
    trainer = load(script).Trainer(parse(script, *SIZES[script], *BATCH)).build()
    losses = [float(trainer.step()) for _ in range(2)]
    trainer.forward(**trainer.next_batch()).backward()
    if trainer.average:
        trainer.average()
    return losses, gradients(trainer.model)


def steps_with_an_infinity() -> list[tuple]:
    """Take steps of V4's optimizer in float16 by gradients of rank + 1, in the first one an
    infinity of rank 1 among them; return parameters and the scale after each. One is frozen."""
    rank, found = dist.get_rank(), []
    torch.manual_seed(rank)  # another start: rank 0's counts
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((33, 7), (5,), (3,))]
    parameters[2].requires_grad_(False)
    optimizer = load(V4[0]).FusedAdamW([parameters[:1], parameters[1:]], 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for step in range(3):
        for p in parameters[:2]:
            p.grad = scaler.scale(torch.full_like(p, rank + 1.0))
        if (step, rank) == (0, 1):
            parameters[0].grad[3, 2] = torch.inf
        optimizer.average_gradients()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(([p.detach().clone() for p in parameters], scaler.get_scale()))
    with pytest.raises(RuntimeError, match="call average_gradients before step"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="each parameter needs a gradient"):
        optimizer.average_gradients()
    return found


def printed(script: str, argv: str, folder: Path) -> str:
    """What main() prints that has met the other process before, and does not end this one."""
    module = load(script)
    module.join_processes, os._exit = (lambda args: None), (lambda status: None)
    steps = words("--num-steps 2 --warmup-steps 1")
    argv = [*SIZES[script], *BATCH, *words(argv), *steps]
    status, stdout, stderr = captured(module.main, arguments(script, folder, *argv))
    assert status == 0, stderr
    return stdout


def two_processes(folder: Path) -> None:
    dist.init_process_group("gloo")
    found = {script: losses_and_gradients(script) for script in SIZES}
    found["infinity"] = steps_with_an_infinity()
    found |= {mode: printed(*given[:2], folder) for mode, given in MODES.items()}
    torch.save(found, folder / f"rank{dist.get_rank()}")
    gc.collect()  # what refers to the process group would keep its threads running into the exit
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("two")
    torchrun = words("-m torch.distributed.run --standalone --nproc-per-node=2")
    done = finished(*torchrun, __file__, folder, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank{rank}") for rank in range(2)]


@pytest.mark.parametrize("script", SIZES)
def test_losses_and_gradients_are_those_of_one_process_on_the_global_batch(script: str, found):
    (losses, theirs), (expected, ours) = found[0][script], losses_and_gradients(script)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same_gradients(theirs, ours, limit=1e-5)


def test_an_infinity_in_one_process_makes_all_skip_the_step(found):
    """Else they would train on with different weights and scales, and nothing would tell."""
    torch.manual_seed(0)
    expected = [torch.nn.Parameter(torch.randn(shape)) for shape in ((33, 7), (5,), (3,))]
    adamw = torch.optim.AdamW(expected, 1e-2)
    both = zip(*(of_rank["infinity"] for of_rank in found), strict=True)
    for step, ((first, scale), (second, other_scale)) in enumerate(both):
        if step:
            for p in expected[:2]:
                p.grad = torch.full_like(p, 1.5)
            adamw.step()
        assert scale == other_scale == 256
        assert all(map(torch.equal, first, second))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first, expected, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_have_the_mode(mode: str, found):
    assert MODES[mode][2] in found[0][mode]


def test_two_processes_report_what_one_process_would(tmp_path: Path, run):
    """The first of them reports; its profile tells communication apart."""
    steps = words("--num-steps 4 --warmup-steps 2 --log-interval 1")
    one = run(SCRIPT, *BATCH, *steps)
    argv = arguments(SCRIPT, tmp_path, *BATCH, *steps, "--num-gpus", "2")
    program = ROOT / "run_pytorch_profiler.py"
    done = finished(program, "--script", ROOT / f"{SCRIPT}.py", *argv)
    assert done.returncode == 0, done.stderr
    result = summary_in(tmp_path)
    curve = result["loss"]["curve"]
    assert curve == pytest.approx(one.summary["loss"]["curve"], rel=1e-5)
    shown = [float(loss) for loss in re.findall(r"step \d+/\d+  loss (\S+)", done.stderr)]
    measured = curve[2:]
    assert shown == pytest.approx(measured, abs=6e-5), "progress shows the mean over the processes"
    assert result["training"]["processes"] == 2
    assert done.stdout.count("Average training speed:") == 1
    assert "| communication |" in done.stdout
    profile = json.loads((tmp_path / f"{SCRIPT}_profile.json").read_text())
    assert profile["categories"]["communication"]["ms_per_step"] > 0


def test_the_first_process_alone_writes_the_result(tmp_path: Path, monkeypatch):
    """Two would write the same file at once."""
    trainer = load(SCRIPT).Trainer(parse(SCRIPT, "--profile-dir", str(tmp_path)))
    monkeypatch.setattr(load(SCRIPT), "RANK", 1)
    trainer.write((0, None))
    assert not [*tmp_path.iterdir()]


def test_a_run_of_which_one_process_is_killed_ends(tmp_path: Path):
    argv = words("--num-gpus 2 --num-steps 1000000 --warmup-steps 2 --log-interval 10")
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    launcher = subprocess.Popen(command_line(SCRIPT, tmp_path, *BATCH, *argv), **pipes)
    while not launcher.stderr.readline().startswith("step"):
        assert launcher.poll() is None
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    try:
        stderr = launcher.stderr.read()  # communicate() would lose what was read ahead
        assert launcher.wait(timeout=60) not in (0, None)
        cause = stderr.partition("Root Cause")[2]
        assert re.search(r"rank\s*: 1 ", cause) and "SIGKILL" in cause, stderr
        assert summary_in(tmp_path)["status"] == "failed"
        assert not [pid for pid in children if Path("/proc", pid).exists()]
    finally:
        launcher.kill()


# How many processes, and what each takes


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """`gpus(n)`: PyTorch finds n GPUs."""

    def found(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return found


REFUSED = [  # arguments, environment, what is said
    ("--num-gpus 4 --batch-size 6", {}, "--batch-size must divide by 4 GPUs"),
    ("--num-gpus 2", TWO | {"WORLD_SIZE": "3"}, "--num-gpus is not WORLD_SIZE 3"),
    ("", {"RANK": "1"}, "RANK 1 is not below WORLD_SIZE 1"),
    ("", TWO | {"RANK": "2"}, "RANK 2 is not below WORLD_SIZE 2"),
    ("", {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
]


@pytest.mark.parametrize(("argv", "environment", "said"), REFUSED)
def test_what_cannot_be_is_refused_before_anything_starts(
    argv: str, environment: dict, said: str, run, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in environment.keys() & {"RANK", "WORLD_SIZE"}:
        monkeypatch.setattr(load(SCRIPT), name, int(environment[name]))
    result = run(SCRIPT, *words(argv))
    assert_one_error(result, 2, said)
    assert not result.directory.exists()


CUDA, ROCR = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
CHOICES = [  # arguments, environment, processes; PyTorch finds three GPUs
    ("", {}, 1),
    ("", {CUDA: "GPU-4c3a,GPU-77d0,GPU-8"}, 3),  # whatever it says, PyTorch counts
    ("", {ROCR: "0,1,2"}, 3),
    ("--num-gpus 2", {CUDA: "0,1,2"}, 2),
    ("--device cpu", {CUDA: "0,1,2"}, 1),
    ("--device cpu --num-gpus 2", {CUDA: "0"}, 2),
]


@pytest.mark.parametrize(("argv", "environment", "expected"), CHOICES)
def test_how_many_processes(argv: str, environment: dict, expected: int, gpus, monkeypatch):
    for who in ("ROCR", "HIP", "CUDA"):
        monkeypatch.delenv(f"{who}_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    gpus(3)
    assert load(SCRIPT).parse_args(["--batch-size", "24", *words(argv)]).num_gpus == expected


@pytest.mark.parametrize(("count", "answer"), [(1, 0), (4, 3)])
def test_a_process_takes_the_gpu_that_it_sees(count: int, answer: int, gpus, monkeypatch):
    """srun --gpus-per-task=1: each process sees its own."""
    module, taken = load(SCRIPT), []
    monkeypatch.setenv("LOCAL_RANK", "3")
    gpus(count)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(module.dist, "init_process_group", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):  # there is nobody to meet
        module.join_processes(module.parse_args([]))
    assert taken == [answer]


@pytest.mark.parametrize(("version", "argv"), [(2, ["--enable-cuda-graph"]), (4, [])])
def test_a_graph_on_several_gpus_has_the_eager_steps_that_ddp_needs(version: int, argv, gpus):
    """V4's optimizer needs fewer, but versions are compared after as many steps."""
    gpus(8)
    parse_args = load(f"tiny_llama_v{version}").parse_args
    one, two = (parse_args(["--num-gpus", n, *argv]) for n in "12")
    assert [(args.cuda_graph, args.warmup_steps) for args in (one, two)] == [(True, 5), (True, 12)]
    if version == 4:
        assert "overlap" not in two.without_effect
        without = parse_args(words("--num-gpus 2 --disable-fused-optimizer")).without_effect
        assert "it needs fused-optimizer" in without["overlap"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("script", ["tiny_llama_v2", "tiny_openfold_v3", *V4])
def test_a_graph_of_two_gpus_trains_as_eager_steps_do(script: str, tmp_path: Path):
    """To the bit on the same GPUs; one GPU adds the gradients of the batch up in another order.
    V4 averages gradients by itself, TinyLlama's early in several groups: as DDP does."""
    argv = [
        *BATCH,
        *words("--hidden-dim 512 --num-heads 8 --num-layers 2" if "llama" in script else ""),
        *words("--device cuda --num-steps 5 --warmup-steps 12 --deterministic --under-profiler"),
    ]
    curves = {}
    for name, more in {
        "graph": "--num-gpus 2 --enable-cuda-graph",
        "eager": "--num-gpus 2 --disable-cuda-graph",
        "one": "--num-gpus 1 --enable-cuda-graph",
        "DDP": f"--num-gpus 2 {'--disable-fused-optimizer' * (script in V4)}",
    }.items():
        done = finished(*command_line(script, tmp_path / name, *argv, *words(more))[1:])
        assert done.returncode == 0, done.stderr
        curves[name] = summary_in(tmp_path / name, script)["loss"]["curve"]
    assert curves["graph"] == curves["eager"]
    assert curves["graph"] == pytest.approx(curves["one"], rel=1e-4)
    assert curves["graph"] == pytest.approx(curves["DDP"], rel=1e-4)


if __name__ == "__main__":
    two_processes(Path(sys.argv[1]))

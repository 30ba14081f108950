"""One run on several processes: the same training as one process on the global batch, and a clean
end when one fails.

Here the processes are on the CPU and talk through gloo; on GPUs it is one each and NCCL or RCCL.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import (
    CPU,
    ROOT,
    SCRIPT,
    arguments,
    assert_one_error,
    assert_same_gradients,
    command_line,
    forking_python,
    gradients,
    load,
    needs_compiler,
    parse,
    summary_in,
    words,
)

from lab.profile.kernels import communication_of

BATCH = ["--batch-size", "4"]
RENDEZVOUS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
TORCHRUN = ["-m", "torch.distributed.run"]
# Writes gradients, under their canonical names, as the process of rank 0 sees them, and the losses
# of the steps that follow.
STEPS = """
import gc, sys, torch
sys.path[:0] = [sys.argv[1]]
from conftest import gradients, load
script, steps, out, *argv = sys.argv[2:]
module = load(script)
args = module.parse_args(argv)
module.join_processes(args)
trainer = module.Trainer(args, torch.device("cpu"))
trainer.forward(**trainer.next_batch()).backward()
if trainer.average:
    trainer.average()
found = gradients(trainer.model)
trainer.optimizer.zero_grad()
losses = [float(trainer.step()) for _ in range(int(steps))]
if module.RANK == 0:
    torch.save((losses, found), out)
del trainer
# As main() does: what refers to the process group would keep its threads running into the exit.
gc.collect()
torch.distributed.destroy_process_group()
"""
# Takes steps of V4's optimizer in float16 by gradients of rank + 1, in the first one an infinity
# of rank 1 among them; writes the parameters and the scale after each. The last parameter gets no
# gradient, the one before it two, which autograd adds up.
INFINITY = """
import sys, torch
import torch.distributed as dist
sys.path[:0] = [sys.argv[1]]
from conftest import load
module, out = load(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank, found = dist.get_rank(), []
torch.manual_seed(rank)  # another start: rank 0's counts
parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((33, 7), (5,), (64,), (3,))]
groups = [parameters[:1], parameters[1:]] if "llama" in sys.argv[2] else [parameters]
optimizer = module.FusedAdamW(groups, 1e-2, torch.float16)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for step in range(3):
    for p in parameters[:3]:
        p.grad = scaler.scale(torch.full_like(p, rank + 1.0))
    parameters[2].grad += scaler.scale(torch.ones(64))
    if (step, rank) == (0, 1):
        parameters[0].grad[3, 2] = torch.inf
    before = [p.detach().clone() for p in parameters]
    optimizer.average_gradients()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    found.append((before, [p.detach().clone() for p in parameters], scaler.get_scale()))
torch.save(found, out + str(rank))
dist.destroy_process_group()
"""
V4 = ("tiny_llama_v4", "tiny_openfold_v4")
# Kernels run in Triton's interpreter, so the models are as small as can be.
SMALLEST = {
    "tiny_llama_v2": [],
    "tiny_llama_v4": words("--num-layers 1 --seq-len 16"),
    "tiny_openfold_v4": words("--num-blocks 1 --seq-len 4 --num-seqs 2"),
}


def two_processes(directory: Path, *argv: str, fresh: bool = False) -> list[str]:
    """A tiny run of two processes on the CPU.

    These are forks, too, where the one that starts them is.
    """
    return command_line(SCRIPT, directory, *BATCH, "--num-gpus", "2", *argv, fresh=fresh)


def finished(command: list[str], **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=120
    )


def in_two_processes(program: str, directory: Path, *argv: str) -> None:
    """Run a program of this file, which finds conftest in the first argument."""
    path = directory / "program.py"
    path.write_text(program)
    torchrun = [forking_python(), *TORCHRUN, "--standalone", "--nproc-per-node=2"]
    done = finished([*torchrun, str(path), str(ROOT / "tests"), *argv])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SMALLEST)
def test_losses_and_gradients_are_those_of_one_process_on_the_global_batch(
    script: str, tmp_path: Path
):
    small, found = [*BATCH, *SMALLEST[script]], tmp_path / "found.pt"
    argv = [script, "2", str(found), *arguments(script, tmp_path, *small)]
    in_two_processes(STEPS, tmp_path, *argv)
    losses, theirs = torch.load(found)
    trainer = load(script).Trainer(parse(script, *small), CPU)
    trainer.forward(**trainer.next_batch()).backward()
    assert_same_gradients(theirs, gradients(trainer.model), limit=1e-5)
    trainer.optimizer.zero_grad()
    assert losses == pytest.approx([float(trainer.step()) for _ in losses], rel=1e-5)


@pytest.mark.parametrize("script", V4)
def test_an_infinity_in_one_process_makes_all_skip_the_step(script: str, tmp_path: Path):
    """Else they would train on with different weights and scales, and nothing would tell."""
    in_two_processes(INFINITY, tmp_path, script, str(tmp_path / "rank"))
    found = [torch.load(tmp_path / f"rank{rank}") for rank in range(2)]
    for (before, after, scale), (_, other, other_scale) in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(after, other, strict=True))
        assert scale == other_scale == 256
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert same == ([True] * 4 if before is found[0][0][0] else [False, False, False, True])
    start, plain = found[0][0][0], found[0][1:]
    theirs = [torch.nn.Parameter(p.clone()) for p in start[:3]]
    adamw = torch.optim.AdamW(theirs, 1e-2)
    for _, after, _ in plain:
        for p, mean in zip(theirs, (1.5, 1.5, 2.5), strict=True):
            p.grad = torch.full_like(p, mean)
        adamw.step()
        for p, own in zip(theirs, after, strict=False):
            assert torch.allclose(p, own, atol=1e-6)


@pytest.mark.parametrize("script", V4)
def test_a_gradient_that_one_process_alone_has_ends_the_run(script: str, tmp_path: Path):
    """As does a step before the gradients are averaged."""
    program = INFINITY.replace("in parameters[:3]:", "in parameters[: 3 + rank]:")
    with pytest.raises(AssertionError, match="all processes need gradients of the same parameters"):
        in_two_processes(program, tmp_path, script, str(tmp_path / "rank"))
    program = INFINITY.replace("    optimizer.average_gradients()\n", "")
    with pytest.raises(AssertionError, match="call average_gradients before step"):
        in_two_processes(program, tmp_path, script, str(tmp_path / "rank"))


def test_two_processes_report_what_one_process_would(tmp_path: Path, run):
    steps = words("--num-steps 4 --warmup-steps 2 --log-interval 1")
    one = run(SCRIPT, *BATCH, *steps)
    done = finished(two_processes(tmp_path / "two", *steps, "--enable-pytorch-profiler"))
    assert (done.returncode, done.stderr) == (0, "")
    result = summary_in(tmp_path / "two")
    curve = result["loss"]["curve"]
    assert curve == pytest.approx(one.summary["loss"]["curve"], rel=1e-5)
    shown = [float(loss) for loss in re.findall(r"step \d+/\d+  loss (\S+)", done.stdout)]
    assert shown == pytest.approx(curve, abs=6e-5), "progress shows the mean over the processes"
    assert result["training"]["processes"] == 2
    peaks = [summary_in(tmp_path / "two" / rank)["memory"]["peak_mb"] for rank in ("", "rank1")]
    assert result["memory"]["peak_mb"] == max(peaks)
    assert done.stdout.count("Average training speed:") == 1, "rank 0 alone reports"
    for rank in ("", "rank1"):
        assert (tmp_path / "two" / rank / f"{SCRIPT}_trace.json.gz").exists(), (
            "a profile for each rank"
        )


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--compare-fusion --use-amp", "all off   as chosen"),
        ("--verify-accuracy", "Accuracy check: PASS"),
        pytest.param(
            "--enable-torch-compile",
            "Average training speed",
            marks=[pytest.mark.slow, needs_compiler],
        ),
    ],
    ids=["comparison", "accuracy", "compiled"],
)
def test_two_processes_with(argv: str, line: str, tmp_path: Path):
    small = words("--num-steps 2 --warmup-steps 1 --num-layers 1")
    done = finished(two_processes(tmp_path / "two", *words(argv), *small))
    assert done.returncode == 0, done.stderr
    assert line in done.stdout


@pytest.mark.parametrize("script", V4)
def test_accuracy_of_two_processes_without_ddp(script: str, tmp_path: Path):
    """No step is taken there, so the gradients are averaged for it alone."""
    only = words("--verify-accuracy --num-gpus 2 --disable-all-fusion --enable-fused-optimizer")
    done = finished(command_line(script, tmp_path, *BATCH, *SMALLEST[script], *only))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_note_is_given_once(tmp_path: Path):
    """Not by the process that starts the others, and again by one of these."""
    variables = {"NSYS_PROFILING_SESSION_ID": "4711"}
    done = finished(
        two_processes(tmp_path / "two", *words("--num-steps 2 --warmup-steps 0")), **variables
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note: ") == 1
    assert "Peak memory" not in done.stdout, "nothing is printed that was not measured"


def test_two_nodes_are_one_run(tmp_path: Path):
    """One torchrun per node, as the Slurm file starts them; here both are on this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"--rdzv-endpoint=localhost:{free.getsockname()[1]}"
    torchrun = [sys.executable, *TORCHRUN, *words("--nnodes=2 --nproc-per-node=1")]
    torchrun += ["--rdzv-backend=c10d", endpoint, str(ROOT / f"{SCRIPT}.py")]
    steps = words("--num-steps 2 --warmup-steps 0 --under-profiler")
    command = [*torchrun, *arguments(SCRIPT, tmp_path / "two", *BATCH, *steps)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    nodes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        outputs = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sum(output.count(b"Average training speed:") for output, _ in outputs) == 1, (
        "rank 0 alone reports"
    )
    assert summary_in(tmp_path / "two")["training"]["processes"] == 2


def test_nodes_with_different_arguments_are_refused(tmp_path: Path):
    """They would train on with another curve, or wait for each other for ever."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = RENDEZVOUS | {"MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    steps = words("--num-steps 2 --warmup-steps 0 --under-profiler")
    command = command_line(SCRIPT, tmp_path, *BATCH, *steps)
    nodes = [
        subprocess.Popen(
            [*command, *(["--learning-rate", "1e-2"] if rank else [])],
            env=os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2]
    assert "rank 1 was started with learning-rate 0.01, rank 0 with 0.0003" in errors[0]
    assert errors[1] == ""
    assert summary_in(tmp_path) is None


# How a run ends


def test_a_signal_ends_a_process_that_waits_for_another_one(tmp_path: Path):
    """At once, and without the stack that PyTorch prints when its waiting is interrupted."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        variables = RENDEZVOUS | {"MASTER_PORT": str(free.getsockname()[1])}
    variables |= {"RANK": "0", "WORLD_SIZE": "2"}
    process = subprocess.Popen(
        command_line(SCRIPT, tmp_path, *BATCH, fresh=True),
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )
    status = Path(f"/proc/{process.pid}/status")
    mask = f"{1 << signal.SIGTERM - 1 | 1 << signal.SIGINT - 1:016x}"
    while f"SigBlk:\t{mask}" not in status.read_text():  # from when a thread takes the signals
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=10)[1]
    assert (process.returncode, stderr.count("\n")) == (130, 1), stderr
    assert "interrupted" in stderr


def processes_of(directory: Path) -> dict[int, int]:
    """Rank of each process that works on this directory, by process id; the launcher is rank -1."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(directory).encode() not in (path / "cmdline").read_bytes():
                continue
            variables = dict(
                v.split(b"=", 1) for v in (path / "environ").read_bytes().split(b"\0") if b"=" in v
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(path.name)] = int(variables.get(b"RANK", -1))
    return found


LONG = words("--num-gpus 2 --num-steps 1000000 --log-interval 10")


@pytest.fixture
def long_run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen]:
    """A run of two processes that is in the middle of its steps; a test may say of which script,
    and with which arguments."""
    script, more = getattr(request, "param", (SCRIPT, "--warmup-steps 2"))
    argv = command_line(script, tmp_path / "two", *BATCH, *LONG, *words(more), fresh=True)
    launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in launcher.stdout:
        if line.startswith("step"):
            break
    yield launcher
    for pid in processes_of(tmp_path / "two"):
        os.kill(pid, signal.SIGKILL)
    launcher.wait()


def test_a_killed_process_ends_the_run_and_is_named(long_run: subprocess.Popen, tmp_path: Path):
    kill_and_check(1, long_run, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "long_run", [(script, "--device cuda --enable-cuda-graph") for script in V4], indirect=True
)
def test_a_process_killed_in_a_graph_ends_the_run_and_is_named(
    long_run: subprocess.Popen, tmp_path: Path, request: pytest.FixtureRequest
):
    """The graph of the other one waits for it in an all-reduce, and nothing on the device tells."""
    kill_and_check(1, long_run, tmp_path, request.node.callspec.params["long_run"][0])


def kill_and_check(
    rank: int, long_run: subprocess.Popen, tmp_path: Path, script: str = SCRIPT
) -> None:
    """Kill one process; the run must end at once, and say which one it was."""
    (victim,) = (pid for pid, r in processes_of(tmp_path / "two").items() if r == rank)
    os.kill(victim, signal.SIGKILL)
    _, stderr = long_run.communicate(timeout=60)
    assert long_run.returncode not in (0, None)
    cause = stderr.partition("Root Cause")[2]  # in torchrun's words
    assert re.search(rf"rank\s*: {rank} ", cause), stderr
    assert "SIGKILL" in cause
    assert processes_of(tmp_path / "two") == {}
    assert summary_in(tmp_path / "two", script)["status"] == "failed"


def test_ctrl_c_ends_all_processes(long_run: subprocess.Popen, tmp_path: Path):
    long_run.send_signal(signal.SIGINT)
    _, stderr = long_run.communicate(timeout=60)
    assert long_run.returncode not in (0, None)
    assert "interrupted" in stderr
    assert processes_of(tmp_path / "two") == {}
    assert summary_in(tmp_path / "two")["status"] == "failed"


def test_a_failing_process_is_named_with_its_error(tmp_path: Path):
    """Rank 1 may not write where it wants to."""
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "rank1").write_text("a file")
    done = finished(two_processes(tmp_path / "two", "--num-steps", "1000000"))
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if "error: rank 1: " in line)
    assert f"--profile-dir {tmp_path / 'two' / 'rank1'}: cannot write there" in line
    assert processes_of(tmp_path / "two") == {}
    assert summary_in(tmp_path / "two")["status"] == "failed"


# How many processes


@pytest.mark.parametrize("argv", ["--num-gpus 2 --batch-size 3", "--num-gpus 4 --batch-size 6"])
def test_a_batch_that_cannot_be_split_is_refused_before_anything_starts(argv: str, run):
    _, processes, flag, batch = words(argv)
    result = run(SCRIPT, *words(argv))
    assert_one_error(result, 2, f"{flag} {batch} is not divisible by {processes}")
    assert not result.directory.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_that_are_not_there(run):
    result = run(SCRIPT, *words("--num-gpus 2 --device auto"))
    assert_one_error(result, 4, "2 GPUs wanted, PyTorch finds 0")
    assert not result.directory.exists()


CUDA, ROCR = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
CHOICES = [  # arguments, environment, processes; PyTorch finds three GPUs
    ([], {}, 1),
    ([], {CUDA: ""}, 1),
    ([], {CUDA: "0,1,2,"}, 3),  # whatever it says, PyTorch counts
    ([], {CUDA: "GPU-4c3a,GPU-77d0,GPU-8"}, 3),
    ([], {ROCR: "0,1,2"}, 1),  # means nothing to NVIDIA's
    ([], {ROCR: "0,1,2", "hip": "6.4"}, 3),
    ([], {"HIP_VISIBLE_DEVICES": "0,1,2", "hip": "6.4"}, 3),
    ([], {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "MASTER_PORT": "x"}, 1),
    (["--num-gpus", "2"], {}, 2),
    (["--num-gpus", "1"], {CUDA: "0,1,2"}, 1),
    (["--device", "cpu"], {CUDA: "0,1,2"}, 1),
    (["--device", "cpu", "--num-gpus", "2"], {CUDA: "0"}, 2),
]


@pytest.mark.parametrize(("argv", "environment", "expected"), CHOICES)
def test_how_many_processes(argv: list[str], environment: dict, expected: int, monkeypatch):
    for who in ("ROCR", "HIP", "CUDA"):
        monkeypatch.delenv(f"{who}_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "hip", environment.get("hip"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert load(SCRIPT).parse_args(["--batch-size", "24", *argv]).num_gpus == expected


def test_a_list_of_devices_that_pytorch_cannot_read(run, monkeypatch):
    def refuse() -> int:
        raise RuntimeError("HIP_VISIBLE_DEVICES contains more devices than ROCR_VISIBLE_DEVICES")

    monkeypatch.setattr(torch.cuda, "device_count", refuse)
    assert_one_error(run(SCRIPT), 2, "HIP_VISIBLE_DEVICES contains more")


TWO = {"RANK": "1", "WORLD_SIZE": "2", **RENDEZVOUS}
HALF, UNFIT = "RANK and WORLD_SIZE must both be set: ", "torchrun sets does not fit together: "
BAD_ENVIRONMENTS = [
    ({"RANK": "1"}, f"{HALF}RANK is '1'"),
    ({"WORLD_SIZE": "4"}, f"{HALF}WORLD_SIZE is '4'"),
    ({"LOCAL_RANK": "1"}, f"{HALF}LOCAL_RANK is '1'"),
    ({**TWO, "WORLD_SIZE": "1"}, f"{UNFIT}RANK is '1', WORLD_SIZE is '1'"),
    ({**TWO, "RANK": "3"}, f"{UNFIT}RANK is '3', WORLD_SIZE is '2'"),
    ({**TWO, "LOCAL_WORLD_SIZE": "3"}, f"{UNFIT}RANK is '1', WORLD_SIZE is '2', LOCAL_WORLD_SIZE"),
    ({**TWO, "LOCAL_RANK": "2"}, f"{UNFIT}RANK is '1', WORLD_SIZE is '2', LOCAL_RANK is '2'"),
    ({**TWO, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, f"{UNFIT}RANK is '1'"),
    ({**TWO, "RANK": "-1"}, "not a whole number: RANK is '-1'"),
    ({**TWO, "RANK": ""}, "not a whole number: RANK is ''"),
    ({**TWO, "WORLD_SIZE": "two"}, "not a whole number: RANK is '1', WORLD_SIZE is 'two'"),
]


@pytest.mark.parametrize(("environment", "message"), BAD_ENVIRONMENTS)
def test_a_bad_environment_is_refused_like_an_argument(
    environment: dict, message: str, run, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert_one_error(run(SCRIPT), 2, message)


@pytest.mark.parametrize(("name", "value"), [("MASTER_ADDR", ""), ("MASTER_PORT", "99x")])
def test_an_address_that_is_none_is_refused_like_an_argument(name: str, value: str, tmp_path: Path):
    done = finished(command_line(SCRIPT, tmp_path, *BATCH), **TWO | {name: value})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "2 processes cannot meet: MASTER_ADDR, MASTER_PORT: " in done.stderr
    assert (value or name) in done.stderr


@pytest.mark.parametrize(
    ("gpus", "environment", "message"),
    [
        (1, {"LOCAL_RANK": "3"}, None),  # srun --gpus-per-task=1: each process sees its own
        (1, {}, None),
        (4, {"LOCAL_RANK": "3"}, None),
        (2, {"LOCAL_RANK": "3"}, "LOCAL_RANK is 3, but PyTorch finds 2 GPUs"),
        (2, {}, "LOCAL_RANK is not set, but PyTorch finds 2 GPUs"),
        (1, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "4 GPUs wanted, PyTorch finds 1"),
    ],
)
def test_a_process_takes_the_gpu_that_it_sees(
    gpus: int, environment: dict, message: str | None, monkeypatch, capsys
):
    module, taken = load(SCRIPT), []
    launched = {"RANK": "3", "WORLD_SIZE": "4", **RENDEZVOUS, **environment}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    for name, value in {"LAUNCHED": True, "RANK": 3, "WORLD_SIZE": 4}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(module.dist, "rendezvous", lambda *_, **__: iter(()))
    try:
        args = module.parse_args([])
        with pytest.raises(StopIteration):  # there is nobody to meet
            module.join_processes(args)
    except SystemExit:
        assert message in capsys.readouterr().err
    else:
        assert (taken, message) == ([3 if gpus > 1 else 0], None)


# The step as a graph


@pytest.mark.parametrize(("version", "argv"), [(2, ["--enable-cuda-graph"]), (4, [])])
def test_a_graph_on_several_gpus_has_the_eager_steps_that_ddp_needs(
    version: int, argv: list[str], monkeypatch
):
    """V4's optimizer needs fewer, but versions are compared after as many steps."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    parse_args = load(f"tiny_llama_v{version}").parse_args
    one, two = (parse_args(["--num-gpus", n, *argv]) for n in "12")
    assert [(args.cuda_graph, args.warmup_steps) for args in (one, two)] == [(True, 5), (True, 12)]
    short = parse_args(words("--num-gpus 2 --warmup-steps 11"))
    assert not short.cuda_graph, "the default of V4, where it can be"


@pytest.mark.parametrize("model", ["llama", "openfold"])
def test_overlap_acts_on_several_gpus_where_the_optimizer_averages(model: str, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    parse_args = load(f"tiny_{model}_v4").parse_args
    assert "overlap" not in parse_args(words("--num-gpus 2")).without_effect
    without = parse_args(words("--num-gpus 2 --disable-fused-optimizer")).without_effect
    assert "it needs fused-optimizer" in without["overlap"]


def test_groups_of_gradients_are_large_but_the_last_that_is_averaged():
    """32 layers' weights of 1 to 8 MiB after an embedding, as in TinyLlama's default sizes."""
    sizes = [500_000, *(2**20 // 4 * mib for _ in range(8) for mib in (2, 1, 8, 4))]
    groups = [[torch.nn.Parameter(torch.empty(n, device="meta"))] for n in sizes]
    joined = load("tiny_llama_v4").join_neighbours(groups)
    assert [p for group in joined for p in group] == [p for group in groups for p in group]
    mib = [sum(4 * p.numel() for p in group) / 2**20 for group in joined]
    assert mib == pytest.approx([4.9, *[15] * 7, 12], abs=0.1)


def test_a_loss_that_does_not_arrive_ends_the_run(run, monkeypatch):
    """NCCL inside a graph has no watchdog: the device would wait for ever for a process that is
    gone."""
    module, steps = load(SCRIPT), []

    def step(trainer) -> torch.Tensor:
        steps.append(1)
        return torch.tensor(1.0)

    monkeypatch.setattr(module.Trainer, "step", step)
    monkeypatch.setattr(module.Trainer, "done", lambda trainer: lambda: False)
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    result = run(SCRIPT, *words("--num-steps 500 --warmup-steps 0"))
    assert_one_error(result, 1, "no step ended in 0.1 s: is a process lost?")
    assert result.summary["status"] == "failed"
    assert len(steps) == 101, "the host is at most a hundred steps ahead"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("script", ["tiny_llama_v2", "tiny_openfold_v3", *V4])
def test_a_graph_of_two_gpus_trains_as_eager_steps_do(script: str, tmp_path: Path):
    """To the bit on the same GPUs; one GPU adds the gradients of the batch up in another order.

    V4's optimizer averages gradients by itself: through DDP the losses are the same.

    TinyLlama is so large that V4 has several groups of gradients, which it averages early.
    """
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
        done = finished(command_line(script, tmp_path / name, *argv, *words(more), fresh=True))
        assert done.returncode == 0, done.stderr
        curves[name] = summary_in(tmp_path / name, script)["loss"]["curve"]
    assert curves["graph"] == curves["eager"]
    assert curves["graph"] == pytest.approx(curves["one"], rel=1e-4)
    assert curves["graph"] == pytest.approx(curves["DDP"], rel=1e-4)


# What communication costs


def test_communication_is_told_apart_from_what_hides_it():
    """Two steps of 60 us; an all-reduce from 10 to 50 us of each, until 30 beside a GEMM, then
    alone.

    What comes before the first step, while the processes wait for each other's profilers, is not
    part of them.
    """
    events = [
        {"cat": "kernel", "name": "ncclDevKernel_Generic(ncclArgs)", "ts": -90.0, "dur": 80.0}
    ]
    for start in (0.0, 60.0):
        for index, name in enumerate(load(SCRIPT).PHASES):
            mark = {"cat": "user_annotation", "name": name}
            events.append({**mark, "ts": start + 15 * index, "dur": 15.0})
        events.append({"cat": "kernel", "name": "Cijk_Ailk", "ts": start + 5, "dur": 25.0})
        events.append({**events[0], "ts": start + 10, "dur": 40.0})
    found = communication_of([{"ph": "X", **event} for event in events], load(SCRIPT).PHASES)
    assert (found.step_ms, found.ms, found.exposed_ms) == pytest.approx((0.060, 0.040, 0.020))
    alone = [event for event in events if "nccl" not in event["name"]]
    assert communication_of(alone, load(SCRIPT).PHASES) is None


def test_the_profile_of_two_processes_says_what_communication_costs(tmp_path: Path):
    steps = words("--num-steps 1 --warmup-steps 1")
    python, _, script, *argv = two_processes(tmp_path / "two", *steps)
    done = finished([python, str(ROOT / "run_pytorch_profiler.py"), "--script", script, *argv])
    assert done.returncode == 0, done.stderr
    assert "| communication |" in done.stdout
    profile = json.loads((tmp_path / "two" / f"{SCRIPT}_profile.json").read_text())
    assert 0 < profile["communication"]["ms"] <= profile["communication"]["step_ms"]

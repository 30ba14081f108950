"""One run on several processes: the same training as one process on the global batch, and a clean end when one fails.

Here the processes are on the CPU and talk through gloo; on GPUs it is one each and NCCL or RCCL.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import MODELS, ROOT, TINY, assert_same_gradients, gradients, load, model_of, parse, strict_json, words

sys.path.insert(0, str(ROOT))
from tools.kernels import communication_of

THREADS = {**os.environ, "OMP_NUM_THREADS": "1"}
BATCH = ["--batch-size", "4"]
# Writes the gradients of one step, under their canonical names, as the process of rank 0 sees them.
ONE_STEP = """
import gc, sys, torch
sys.path[:0] = [{tests!r}]
from conftest import gradients, load
module, out, argv = load({script!r}), sys.argv[1], sys.argv[2:]
args = module.parse_args(argv)
module.join_processes(args)
trainer = module.Trainer(args, torch.device("cpu"))
trainer.forward(**trainer.next_batch()).backward()
if module.RANK == 0:
    torch.save(gradients(trainer.model), out)
del trainer
gc.collect()  # as main() does: what refers to the process group would keep its threads running into the exit
torch.distributed.destroy_process_group()
"""


def command(script: str, directory: Path, *argv: str) -> list[str]:
    """A tiny run of two processes on the CPU."""
    sizes = [*TINY[model_of(script)], *BATCH, "--device", "cpu", "--num-gpus", "2", "--profile-dir", str(directory)]
    return [sys.executable, str(ROOT / f"{script}.py"), *sizes, *argv]


def start(script: str, directory: Path, *argv: str, **options) -> subprocess.CompletedProcess:
    options = {"env": THREADS, "timeout": 120, "capture_output": True, "text": True} | options
    return subprocess.run(command(script, directory, *argv), **options)


def summary(directory: Path, script: str) -> dict:
    return strict_json((directory / f"{script}_summary.json").read_text())


@pytest.mark.parametrize("script", [f"tiny_{model}_v2" for model in MODELS])
def test_gradients_are_those_of_one_process_on_the_global_batch(script: str, tmp_path: Path):
    argv = [*TINY[model_of(script)], *BATCH, "--device", "cpu"]
    program = tmp_path / "one_step.py"
    program.write_text(ONE_STEP.format(tests=str(ROOT / "tests"), script=script))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, program, tmp_path / "gradients.pt", *argv], env=THREADS, check=True, timeout=120)
    module, args = load(script), parse(script, *BATCH)
    trainer = module.Trainer(args, torch.device("cpu"))
    trainer.forward(**trainer.next_batch()).backward()
    assert_same_gradients(torch.load(tmp_path / "gradients.pt"), gradients(trainer.model), limit=1e-5)


def test_two_processes_report_what_one_process_would(tmp_path: Path, run):
    script, steps = "tiny_llama_v2", words("--num-steps 4 --warmup-steps 2")
    one = run(script, *BATCH, *steps)
    assert one.status == 0
    reference = one.directory / f"{script}_summary.json"
    done = start(script, tmp_path / "two", *steps, "--enable-pytorch-profiler", "--compare-with", str(reference))
    assert done.returncode == 0, done.stderr
    result = summary(tmp_path / "two", script)
    assert result["loss"]["curve"] == pytest.approx(one.summary["loss"]["curve"], rel=1e-5)
    assert result["training"]["processes"] == 2
    assert result["memory"]["peak_mb"] == max(
        summary(tmp_path / "two" / rank, script)["memory"]["peak_mb"] for rank in ("", "rank1")
    )
    speeds = [r["timing"]["samples_per_sec"] for r in (one.summary, result)]
    assert f"Scaling efficiency: {100 * speeds[1] / speeds[0] / 2:.1f} %" in done.stdout
    assert done.stdout.count("Average training speed:") == 1, "rank 0 alone reports"
    for rank in ("", "rank1"):
        assert (tmp_path / "two" / rank / f"{script}_trace.json.gz").exists(), "a profile for each rank"


@pytest.mark.parametrize("argv", ["--use-amp", "--compare-fusion", "--verify-accuracy", "--enable-torch-compile"])
def test_two_processes_with(argv: str, tmp_path: Path):
    done = start("tiny_llama_v2", tmp_path / "two", argv, *words("--num-steps 2 --warmup-steps 1"))
    assert done.returncode == 0, done.stderr
    expected = {"--verify-accuracy": "Accuracy check: PASS", "--compare-fusion": "all off"}
    assert expected.get(argv, "Average training speed") in done.stdout


def torchrun_command(directory: Path, *options: str) -> list[str]:
    """The same run as `command`, started by torchrun, of which `options` say how many processes."""
    _, script, *argv = command("tiny_llama_v2", directory, *words("--num-steps 2 --warmup-steps 0 --under-profiler"))
    return [sys.executable, "-m", "torch.distributed.run", *options, script, *argv]


def test_torchrun_does_the_same(tmp_path: Path):
    torchrun = torchrun_command(tmp_path / "two", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(torchrun, env=THREADS, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "two", "tiny_llama_v2")["training"]["processes"] == 2
    assert "Peak memory" not in done.stdout, "nothing is printed that was not measured"


def test_two_nodes_are_one_run(tmp_path: Path):
    """One torchrun per node, as the Slurm file starts them; here both are on this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"--rdzv-endpoint=localhost:{free.getsockname()[1]}"
    options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint)
    nodes = [
        subprocess.Popen(
            torchrun_command(tmp_path / "two", *options), env=THREADS, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sum(output.count(b"Average training speed:") for output, _ in outputs) == 1, "rank 0 alone reports"
    assert summary(tmp_path / "two", "tiny_llama_v2")["training"]["processes"] == 2


def processes_of(directory: Path) -> dict[int, int]:
    """Rank of each process that works on this directory, by process id; the launcher is rank -1."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(directory).encode() not in (path / "cmdline").read_bytes():
                continue
            variables = dict(v.split(b"=", 1) for v in (path / "environ").read_bytes().split(b"\0") if b"=" in v)
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(path.name)] = int(variables.get(b"RANK", -1))
    return found


@pytest.fixture
def long_run(tmp_path: Path):
    """A run of two processes that is in the middle of its steps."""
    argv = command("tiny_llama_v2", tmp_path / "two", *words("--num-steps 1000000 --warmup-steps 2 --log-interval 10"))
    launcher = subprocess.Popen(argv, env=THREADS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in launcher.stdout:
        if line.startswith("step"):
            break
    yield launcher
    for pid in processes_of(tmp_path / "two"):
        os.kill(pid, signal.SIGKILL)
    launcher.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run_and_is_named(rank: int, long_run, tmp_path: Path):
    (victim,) = (pid for pid, r in processes_of(tmp_path / "two").items() if r == rank)
    os.kill(victim, signal.SIGKILL)
    before = time.monotonic()
    _, stderr = long_run.communicate(timeout=30)
    assert time.monotonic() - before < 30
    assert long_run.returncode == 1
    assert stderr.splitlines() == [f"tiny_llama_v2.py: error: rank {rank}: killed by SIGKILL"]
    assert processes_of(tmp_path / "two") == {}
    result = summary(tmp_path / "two", "tiny_llama_v2")
    assert (result["status"], result["error"]) == ("failed", f"rank {rank}: killed by SIGKILL")


def test_ctrl_c_ends_all_processes(long_run, tmp_path: Path):
    long_run.send_signal(signal.SIGINT)
    _, stderr = long_run.communicate(timeout=60)
    assert long_run.returncode == 130
    assert stderr.splitlines() == ["tiny_llama_v2.py: error: interrupted"]
    assert processes_of(tmp_path / "two") == {}
    assert summary(tmp_path / "two", "tiny_llama_v2")["status"] == "failed"


def test_a_failing_process_is_named_with_its_error(tmp_path: Path):
    """Rank 1 may not write where it wants to."""
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "rank1").write_text("a file")
    done = start("tiny_llama_v2", tmp_path / "two", "--num-steps", "1000")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "rank 1: --profile-dir" in line
    assert "cannot write" in line
    assert processes_of(tmp_path / "two") == {}


def test_a_batch_that_cannot_be_split_is_refused_before_anything_starts(tmp_path: Path):
    done = start("tiny_llama_v2", tmp_path / "two", "--batch-size", "3")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--batch-size 3 is not divisible by 2" in line
    assert not (tmp_path / "two").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_that_are_not_there(tmp_path: Path):
    done = start("tiny_llama_v2", tmp_path / "two", "--device", "auto")
    assert done.returncode == 4
    assert "2 GPUs wanted, PyTorch finds 0" in done.stderr


CHOICES = [
    ([], {}, 1),
    ([], {"ROCR_VISIBLE_DEVICES": "0"}, 1),
    ([], {"ROCR_VISIBLE_DEVICES": "0,1"}, 2),
    ([], {"HIP_VISIBLE_DEVICES": "0,1,3"}, 3),
    ([], {"CUDA_VISIBLE_DEVICES": "4,5"}, 2),
    ([], {"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "0,1"}, 2),  # HIP chooses among those of ROCr
    (["--num-gpus", "4"], {}, 4),
    (["--num-gpus", "1"], {"ROCR_VISIBLE_DEVICES": "0,1"}, 1),
    (["--device", "cpu"], {"ROCR_VISIBLE_DEVICES": "0,1"}, 1),
    (["--device", "cpu", "--num-gpus", "2"], {"ROCR_VISIBLE_DEVICES": "0"}, 2),
]


@pytest.mark.parametrize(("argv", "environment", "expected"), CHOICES)
def test_how_many_processes(argv: list[str], environment: dict, expected: int, monkeypatch):
    for who in ("ROCR", "HIP", "CUDA"):
        monkeypatch.delenv(f"{who}_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module = load("tiny_llama_v2")
    assert module.wanted_processes(module.parse_args(["--batch-size", "24", *argv])) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_named_where_there_is_none_leave_one_process_and_a_note(monkeypatch, run):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    result = run("tiny_llama_v2", "--device", "auto", *words("--num-steps 1 --warmup-steps 0"))
    assert result.status == 0
    assert "names 2 GPUs" in result.stderr
    assert result.summary["training"]["processes"] == 1


def test_compare_with_names_what_differs_and_gives_no_efficiency_for_one_process(run, tmp_path: Path):
    steps = words("--num-steps 2 --warmup-steps 0")
    first = run("tiny_llama_v2", "--seq-len", "16", *steps)
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(first.summary))
    result = run("tiny_llama_v2", *steps, "--compare-with", str(kept))
    assert result.status == 0
    assert "seq_len was 16" in result.stderr
    assert "this run" in result.stdout
    assert "Scaling efficiency" not in result.stdout


def test_communication_is_told_apart_from_what_hides_it():
    """Two steps of 60 us; an all-reduce from 10 to 50 us of each, until 30 beside a GEMM, then alone.

    What comes before the first step, while the processes wait for each other's profilers, is not part of them.
    """
    events = [{"cat": "kernel", "name": "ncclDevKernel_Generic(ncclArgs)", "ts": -90.0, "dur": 80.0}]
    for start in (0.0, 60.0):
        for index, name in enumerate(load("tiny_llama_v2").PHASES):
            events.append({"cat": "user_annotation", "name": name, "ts": start + 15 * index, "dur": 15.0})
        events.append({"cat": "kernel", "name": "Cijk_Ailk_Bljk_SB", "ts": start + 5, "dur": 25.0})
        events.append({"cat": "kernel", "name": "ncclDevKernel_Generic(ncclArgs)", "ts": start + 10, "dur": 40.0})
    found = communication_of([{"ph": "X", **event} for event in events], load("tiny_llama_v2").PHASES)
    assert (found.step_ms, found.ms, found.exposed_ms) == pytest.approx((0.060, 0.040, 0.020))
    assert communication_of([e for e in events if "nccl" not in e["name"]], load("tiny_llama_v2").PHASES) is None


def test_the_profile_of_two_processes_says_what_communication_costs(tmp_path: Path):
    argv = command("tiny_llama_v2", tmp_path / "two", *words("--num-steps 1 --warmup-steps 1"))
    argv[1:2] = [str(ROOT / "run_pytorch_profiler.py"), "--script", str(ROOT / "tiny_llama_v2.py")]
    done = subprocess.run(argv, env=THREADS, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "| communication |" in done.stdout
    profile = json.loads((tmp_path / "two" / "tiny_llama_v2_profile.json").read_text())
    assert 0 < profile["communication"]["ms"] <= profile["communication"]["step_ms"]

"""What cannot work ends with the right exit status and one line that names the argument or file,
never a traceback."""

import contextlib
import errno
import math
import os
import resource
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    QUICK,
    ROOT,
    SCRIPT,
    Run,
    assert_one_error,
    command_line,
    load,
    parse,
    summary_in,
    words,
)

OPENFOLD = "tiny_openfold_v2"
BPTI = {"--msa": f"{ROOT}/examples/bpti.a3m", "--structure": f"{ROOT}/examples/bpti.cif"}

# Flags with values that are refused; 12 over 4 heads: channels cannot be turned in pairs.
BAD = [(SCRIPT, flag) for flag in words("--batch-size=0,two,1.5 --num-steps=0,1e3 --seq-len=1")]
BAD += [(SCRIPT, flag) for flag in words("--warmup-steps=-1 --seed=-1,99999999999999 --device=tpu")]
BAD += [(SCRIPT, flag) for flag in words("--learning-rate=0,nan,inf,fast --matmul-precision=low")]
BAD += [(SCRIPT, flag) for flag in words("--hidden-dim=0,66,12 --num-heads=3 --num-kv-heads=3,8")]
BAD += [(OPENFOLD, flag) for flag in words("--num-seqs=some --msa-dim=31 --num-heads-pair=3")]


@pytest.mark.parametrize(("script", "flag"), BAD)
def test_bad_values_are_named(script: str, flag: str, run):
    flag, _, values = flag.partition("=")
    for value in values.split(","):
        result = run(script, f"{flag}={value}")
        assert_one_error(result, 2, flag)
        assert result.summary is None


@pytest.mark.parametrize(
    ("script", "argv", "said"),
    [
        (SCRIPT, "--frobnicate", "--frobnicate"),
        (SCRIPT, "--num-step 3", "--num-step"),  # an abbreviation may change its meaning
        (SCRIPT, "--torch-compile-mode default", "--enable-torch-compile"),
        (SCRIPT, "--amp-dtype float16", "--use-amp"),
        (SCRIPT, f"--vocab-size 300 --text-file {ROOT}/pyproject.toml", "--vocab-size 300"),
        (SCRIPT, "--profile-dir /dev/null/below", "/dev/null/below"),
        (OPENFOLD, f"--msa {BPTI['--msa']}", "--structure"),
        (OPENFOLD, f"--structure {BPTI['--structure']}", "--msa"),
    ],
)
def test_bad_flag_is_named(script: str, argv: str, said: str, run):
    assert_one_error(run(script, *QUICK, *words(argv)), 2, said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("argv", ["--device cuda", "--num-gpus 1 --device auto"])
def test_what_needs_a_gpu_where_there_is_none(argv: str, run):
    result = run(SCRIPT, *words(argv))
    assert_one_error(result, 4, "1 GPUs wanted, PyTorch finds 0")
    assert result.summary is None


def test_a_graph_is_off_by_default_and_no_preset_touches_it(run, monkeypatch):
    """A mode with graphs of its own is refused beside ours, and so is too short a warm-up."""
    parse_args = load(SCRIPT).parse_args
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert parse_args(["--enable-all-fusion"]).cuda_graph is False
    graph = "--enable-cuda-graph"
    compiled = [graph, *words("--device auto --enable-torch-compile --torch-compile-mode")]
    assert parse_args([*compiled, "max-autotune-no-cudagraphs"]).cuda_graph is True
    for mode in ("reduce-overhead", "max-autotune"):
        assert_one_error(run(SCRIPT, *compiled, mode), 2, graph, mode)
    short = words(f"{graph} --device auto --warmup-steps 1")
    assert_one_error(run(SCRIPT, *short), 2, "a graph needs --warmup-steps 2")


# Files

TOKENS = np.array([318, 50256, 7, 13, 464], "<u2").tobytes()  # nanoGPT's train.bin
FILES = [(flag, content) for flag in ("--text-file", *BPTI) for content in (None, "folder", TOKENS)]
FILES += [("--text-file", b"ten bytes."), ("--text-file", "pipe")]


@pytest.mark.parametrize(("flag", "content"), FILES)
def test_a_file_that_cannot_be_read_is_named(flag: str, content, run, tmp_path: Path):
    """What test_proteins.py has of formats ends here in one line."""
    path = tmp_path / "train.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        {"folder": os.mkdir, "pipe": os.mkfifo}[content](path)
    if flag == "--text-file":
        result = run(SCRIPT, *words("--seq-len 32 --vocab-size 256"), flag, str(path))
        said = "it looks like token ids (nanoGPT's train.bin)" if content == TOKENS else ""
    else:
        result, said = run(OPENFOLD, *chain(*(BPTI | {flag: str(path)}).items())), ""
    assert_one_error(result, 2, flag, str(path), said)
    assert result.summary is None


def test_alignment_with_less_than_asked_for_is_taken_whole(run):
    argv = words("--num-seqs 100 --seq-len 60 --num-steps 1 --warmup-steps 0 --under-profiler")
    status, _, errors, summary = run(OPENFOLD, *argv, *chain(*BPTI.items()))
    first, second = errors.splitlines()
    assert (status, "--num-seqs 100" in first, "--seq-len 60" in second) == (0, True, True)
    assert (summary["config"]["num_seqs"], summary["config"]["seq_len"]) == (61, 58)


# What goes wrong while running


def assert_record(summary: dict, status: str, exit_status: int) -> None:
    """It was read as strict JSON, without NaN."""
    assert (summary["status"], summary["exit_status"]) == (status, exit_status)
    assert all(map(math.isfinite, summary["loss"]["curve"]))


@pytest.mark.parametrize("mode", [[], ["--compare-fusion"]], ids=["run", "comparison"])
def test_loss_that_is_not_a_number_ends_the_run(mode: list[str], run):
    argv = words("--learning-rate 1e30 --num-steps 9 --warmup-steps 0 --under-profiler")
    result = run(SCRIPT, *argv, *mode)
    assert_one_error(result, 1, "loss", "--learning-rate")
    assert_record(result.summary, "failed", 1)
    assert result.summary["error"] in result.stderr
    if mode:
        assert "ratio" not in result.stdout
        assert_record(summary_in(result.directory / "baseline"), "failed", 1)
    else:
        assert 1 <= len(result.summary["loss"]["curve"]) < 9


def assert_out_of_memory(result: Run) -> None:
    assert_one_error(result, 3, "out of memory", "lower --batch-size")
    assert_record(result.summary, "oom", 3)


def test_weights_that_do_not_fit_into_memory(run):
    huge = words("--hidden-dim 8000000 --num-layers 1 --num-heads 1 --seq-len 2 --vocab-size 2")
    assert_out_of_memory(run(SCRIPT, *huge))
    assert_one_error(run(SCRIPT, *huge, "--verify-accuracy"), 3, "out of memory", "lower")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ZeroDivisionError("an error that nobody foresaw"),
    ],
)
def test_an_error_in_a_later_step_keeps_the_steps_before(error, run, monkeypatch, tmp_path: Path):
    """A bug may show its traceback, but the result file says that the run failed."""
    step, outcomes = torch.optim.AdamW.step, iter([None, None, None, error])

    def fails_the_fourth_time(self, *args: object, **options: object):
        if failure := next(outcomes):
            raise failure
        return step(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", fails_the_fourth_time)
    argv = words("--num-steps 9 --warmup-steps 1 --under-profiler")
    if isinstance(error, ZeroDivisionError):
        with pytest.raises(ZeroDivisionError):
            run(SCRIPT, *argv)
        assert_record(summary_in(tmp_path / "profiles"), "failed", 1)
    else:
        result = run(SCRIPT, *argv)
        assert_out_of_memory(result)
        assert "Average training speed" in result.stdout, "of the steps that were taken"
    assert len(summary_in(tmp_path / "profiles")["loss"]["curve"]) == 3


# A process of its own: signals and full disks


@pytest.fixture
def started(run) -> Iterator[subprocess.Popen]:
    """A run in the middle of its steps, in a directory that has an earlier, good result."""
    earlier = run(SCRIPT, *QUICK, "--under-profiler")
    assert earlier.summary["status"] == "ok"
    argv = words("--num-steps 100000 --warmup-steps 0 --log-interval 1 --num-layers 1")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command_line(SCRIPT, earlier.directory, *argv), **pipes)
    process.first = []  # the lines until the first step
    for line in process.stderr:
        process.first.append(line)
        if line.startswith("step "):
            break
    yield process
    process.kill()
    process.communicate()


def test_an_interrupted_run_keeps_what_was_measured(started: subprocess.Popen, tmp_path: Path):
    """By what `timeout` and a time limit of Slurm send, which the script takes for Ctrl-C."""
    started.terminate()
    # communicate() would lose what was read ahead; stderr is what can fill its pipe
    errors, rest = started.stderr.read(), started.stdout.read()
    assert started.wait(timeout=60) == 130
    *steps, line = [*started.first, *errors.splitlines()]
    assert line == f"{SCRIPT}.py: error: interrupted"
    assert "Average training speed" in rest
    summary = summary_in(tmp_path / "profiles")
    assert_record(summary, "failed", 130)
    shown = [float(line.split()[3]) for line in steps if line.startswith("step ")]
    assert summary["loss"]["curve"][: len(shown)] == pytest.approx(shown, abs=6e-5)


def test_a_killed_run_does_not_leave_the_result_of_an_earlier_one(
    started: subprocess.Popen, tmp_path: Path
):
    started.kill()
    started.wait(timeout=60)
    summary = summary_in(tmp_path / "profiles")
    assert (summary["status"], summary["training"]["num_steps"]) == ("failed", 100000)
    assert summary["error"] == "it did not finish"


@pytest.fixture
def small_files() -> Iterator[None]:
    """A file has no more than 64 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_profile_and_not_the_report(small_files, run):
    """The result fits; the trace from which peak memory is read, some 600 kB, does not."""
    result = run(SCRIPT, *QUICK, "--enable-pytorch-profiler")
    assert_one_error(result, 2, "cannot write")
    assert "Average training speed" in result.stdout and "Final loss" in result.stdout
    assert_record(result.summary, "failed", 2)
    assert result.summary["timing"]["samples_per_sec"] > 0


@pytest.mark.parametrize("mode", [[], ["--compare-fusion"]], ids=["run", "comparison"])
def test_a_full_disk_costs_the_result_and_not_the_report(mode: list[str], run, monkeypatch):
    """The record of a run that began fits; no later one does, and what there is of it goes."""
    write_text, records = Path.write_text, [*mode, "of the run"]

    def write_what_fits(path: Path, text: str) -> None:
        write_text(path, text if records else "")
        if not records:
            raise OSError(errno.ENOSPC, "No space left on device")
        records.pop()

    monkeypatch.setattr(Path, "write_text", write_what_fits)
    result = run(SCRIPT, *QUICK, *mode)
    assert_one_error(result, 2, "cannot write", "No space left on device")
    assert ("Batch time ratio in 3 turns" if mode else "Kernel reduction") in result.stdout
    assert_record(result.summary, "failed", 1)
    assert not [*result.directory.rglob("*.tmp")]


def test_a_graph_is_not_replayed_after_a_parameter_has_moved(monkeypatch):
    """Loading weights in place moves none; the graph would train memory that nobody reads."""
    module, replays = load(SCRIPT), []
    trainer = module.Trainer(parse(SCRIPT)).build()
    trainer.inputs = trainer.next_batch()
    graph = SimpleNamespace(replay=lambda: replays.append("replay"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    trainer.capture()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(weights)
    read = trainer.inputs["labels"]
    before = read.clone()
    trainer.step()
    assert replays == ["replay"]
    assert trainer.inputs["labels"] is read and not torch.equal(read, before), "the next batch"
    parameter = next(trainer.model.parameters())
    parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match="a parameter moved in memory") as refusal:
        trainer.step()
    assert replays == ["replay"]
    assert module.explain(refusal.value, trainer.args) == (1, str(refusal.value))


def test_a_refused_command_line_leaves_an_earlier_result_untouched(run):
    good = run(SCRIPT, *QUICK, "--under-profiler")
    path = good.directory / f"{SCRIPT}_summary.json"
    before = path.read_bytes()
    for argv in ("--batch-size 0", "--text-file nothing"):
        assert_one_error(run(SCRIPT, *words(argv)), 2)
    assert path.read_bytes() == before
    assert [*good.directory.iterdir()] == [path], "and no other file beside it"

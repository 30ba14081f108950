"""What cannot work ends with the right exit status and one line that names the argument or file,
never a traceback."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    QUICK,
    ROOT,
    SCRIPT,
    Run,
    arguments,
    assert_one_error,
    command_line,
    load,
    summary_in,
    words,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals and resource limits")
OPENFOLD = "tiny_openfold_v2"
BPTI = {
    "--msa": str(ROOT / "examples" / "bpti.a3m"),
    "--structure": str(ROOT / "examples" / "bpti.cif"),
}

BAD_VALUES = {  # 12 over 4 heads: three channels cannot be turned in pairs
    SCRIPT: """\
--batch-size 0 two 1.5
--seq-len 1
--num-steps 0 1e3
--warmup-steps -1
--log-interval 0
--seed -1 99999999999999999999999
--learning-rate 0 nan inf fast
--matmul-precision low
--amp-dtype int8
--torch-compile-mode fastest
--device tpu
--num-gpus 0
--vocab-size 1
--hidden-dim 0 66 12
--num-layers 0
--num-heads 0 3
--num-kv-heads 0 3 8
--intermediate-dim 0""",
    OPENFOLD: """\
--num-blocks 0
--num-seqs 0 some
--msa-dim 0 31
--pair-dim -32 33
--num-heads-msa 5
--num-heads-pair 3""",
}


@pytest.mark.parametrize(
    ("script", "line"),
    [(script, line) for script in BAD_VALUES for line in BAD_VALUES[script].splitlines()],
)
def test_bad_values_are_named(script: str, line: str, run):
    flag, *values = line.split()
    for value in values:
        result = run(script, flag, value)
        assert_one_error(result, 2, flag, value)
        assert result.summary is None


@pytest.mark.parametrize(
    ("script", "argv", "said"),
    [
        (SCRIPT, "--num-steps", "--num-steps"),
        (SCRIPT, "--frobnicate", "--frobnicate"),
        (SCRIPT, "--num-step 3", "--num-step"),  # an abbreviation may change its meaning
        (SCRIPT, "--enable-swiglu", "--enable-swiglu (did you mean --enable-swiglu-fusion?)"),
        (SCRIPT, f"--vocab-size 300 --text-file {ROOT}/pyproject.toml", "--vocab-size 300"),
        (SCRIPT, "--profile-dir /dev/null/below", "--profile-dir /dev/null/below"),
        (OPENFOLD, f"--msa {BPTI['--msa']}", "--structure"),
        (OPENFOLD, f"--structure {BPTI['--structure']}", "--msa"),
    ],
)
def test_bad_flag_is_named(script: str, argv: str, said: str, run):
    assert_one_error(run(script, *QUICK, *words(argv)), 2, said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("argv", ["--device cuda", "--device auto --enable-cuda-graph"])
def test_what_needs_a_gpu_where_there_is_none(argv: str, run):
    result = run(SCRIPT, *words(argv))
    assert_one_error(result, 4, argv.removeprefix("--device auto "), "GPU")
    assert result.summary is None


def test_a_graph_is_off_by_default_no_preset_touches_it_and_it_takes_the_warm_up_that_it_needs(
    run, monkeypatch, capsys
):
    """A mode with graphs of its own is refused beside ours."""
    parse_args = load(SCRIPT).parse_args
    assert parse_args(["--enable-all-fusion"]).cuda_graph is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    graph = "--enable-cuda-graph"
    compiled = [graph, *words("--device auto --enable-torch-compile --torch-compile-mode")]
    for others in ([graph, "--disable-all-fusion"], [*compiled, "max-autotune-no-cudagraphs"]):
        assert parse_args(others).cuda_graph is True
    for mode in ("reduce-overhead", "max-autotune"):
        assert_one_error(run(SCRIPT, *compiled, mode), 2, graph, mode)
    for argv, given, steps in (("", 0, 2), ("--num-gpus 2", 11, 12)):
        capsys.readouterr()
        args = parse_args(words(f"{graph} --warmup-steps {given} {argv}"))
        said = f"note: --warmup-steps {given} raised to {steps} for --enable-cuda-graph"
        assert (args.warmup_steps, said in capsys.readouterr().err) == (steps, True)


# Files

IDS = np.array([318, 50256, 7, 13, 464])
CONTROL = "it looks like token ids (nanoGPT's train.bin)"
NO_TEXT = {  # what is in the file, and what is said of it
    "missing": (None, ""),
    "directory": (None, ""),
    "pipe": (None, ""),
    "short": (b"ten bytes.", ""),
    "binary": (bytes(range(1, 256)) * 3, CONTROL),  # without a zero
    "16 bits": (IDS.astype("<u2").tobytes(), CONTROL),  # nanoGPT's train.bin
    "utf-16": ("text\n".encode("utf-16") * 20, CONTROL),
}
FILES = [("--text-file", kind) for kind in NO_TEXT]
FILES += [(flag, kind) for flag in BPTI for kind in ("missing", "directory", "binary")]


@pytest.mark.parametrize(("flag", "kind"), FILES)
def test_a_file_that_cannot_be_read_is_named(flag: str, kind: str, run, tmp_path: Path):
    """What test_proteins.py has of formats ends here in one line."""
    path, (content, said) = tmp_path / "train.bin", NO_TEXT[kind]
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif content:
        path.write_bytes(content)
    if flag == "--text-file":
        result = run(SCRIPT, *words("--seq-len 32 --vocab-size 256"), flag, str(path))
        assert_one_error(result, 2, f"{flag} {path}", said)
    else:
        result = run(OPENFOLD, *chain(*(BPTI | {flag: str(path)}).items()))
        assert_one_error(result, 2, flag, str(path))
    assert result.summary is None


def test_an_alignment_needs_gemmi(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "gemmi", None)
    monkeypatch.delitem(sys.modules, "examples.proteins", raising=False)
    said = "--structure needs the package gemmi: pip install gemmi"
    assert_one_error(run(OPENFOLD, *chain(*BPTI.items())), 4, said)


def test_alignment_with_less_than_asked_for_is_taken_whole(run):
    argv = words("--num-seqs 100 --seq-len 60 --num-steps 1 --warmup-steps 0 --under-profiler")
    status, _, errors, summary = run(OPENFOLD, *argv, *chain(*BPTI.items()))
    first, second = errors.splitlines()
    assert (status, "--num-seqs 100" in first, "--seq-len 60" in second) == (0, True, True)
    assert (summary["config"]["num_seqs"], summary["config"]["seq_len"]) == (61, 58)


# What goes wrong while running

SHORT = words("--num-steps 1 --warmup-steps 0 --under-profiler --num-layers 1")
NAN = words("--learning-rate 1e30 --num-steps 9 --warmup-steps 0 --under-profiler")


@pytest.mark.parametrize("mode", [[], ["--compare-fusion"]], ids=["run", "comparison"])
def test_loss_that_is_not_a_number_ends_the_run(mode: list[str], run):
    result = run(SCRIPT, *NAN, *mode)
    assert_one_error(result, 1, "loss", "step", "--learning-rate")
    summary = result.summary  # which was read as strict JSON, without NaN
    assert (summary["status"], summary["exit_status"]) == ("failed", 1)
    assert summary["error"] in result.stderr
    if mode:
        assert "ratio" not in result.stdout
        assert summary_in(result.directory / "baseline")["status"] == "failed"
        return
    curve = summary["loss"]["curve"]
    assert 1 <= len(curve) < 9
    assert all(math.isfinite(loss) for loss in curve)
    assert f"step {len(curve) + 1}" in result.stderr, "the step after those that were good"
    assert summary["loss"]["final"] == curve[-1]


def assert_out_of_memory(result: Run, *words: str) -> None:
    assert_one_error(result, 3, "out of memory", *words)
    assert (result.summary["status"], result.summary["exit_status"]) == ("oom", 3)


def test_weights_that_do_not_fit_into_memory(run):
    huge = words("--hidden-dim 8000000 --num-layers 1 --num-heads 1 --seq-len 2 --vocab-size 2")
    assert_out_of_memory(run(SCRIPT, *huge), "lower")
    assert_one_error(run(SCRIPT, *huge, "--verify-accuracy"), 3, "out of memory", "lower")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines."),
        # another process has nearly all of it
        RuntimeError("CUDA error: out of memory\nMore lines."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_out_of_memory_in_a_later_step_keeps_the_steps_before(error, run, monkeypatch):
    step, outcomes = torch.optim.AdamW.step, iter([None, None, None, error])

    def fails_the_fourth_time(self, *args: object, **options: object):
        if failure := next(outcomes):
            raise failure
        return step(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", fails_the_fourth_time)
    result = run(SCRIPT, "--num-steps", "9", "--warmup-steps", "1", "--under-profiler")
    assert_out_of_memory(result, "--batch-size")
    curve = result.summary["loss"]["curve"]
    assert len(curve) == 3
    assert all(math.isfinite(loss) for loss in curve)
    assert "Average training speed" in result.stdout, "of the steps that were taken"


def test_a_bug_leaves_its_record(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch):
    """An error that nobody foresaw may show its traceback, at once, but the result file says
    that the run failed."""
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: 1 // 0)
    monkeypatch.setattr("time.sleep", None)
    with pytest.raises(ZeroDivisionError):
        run(SCRIPT, *QUICK)
    summary = summary_in(tmp_path / "profiles")
    assert (summary["status"], summary["exit_status"]) == ("failed", 1)
    assert "division" in summary["error"]


def test_a_result_that_cannot_be_written_does_not_leave_an_earlier_one(
    run, monkeypatch: pytest.MonkeyPatch
):
    """As on a full disk, where files can still be removed."""
    earlier = run(SCRIPT, *QUICK, "--under-profiler")
    assert earlier.summary["status"] == "ok"

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    result = run(SCRIPT, *QUICK, "--under-profiler")
    assert_one_error(result, 2, "No space left on device")
    assert result.summary is None
    assert list(result.directory.iterdir()) == []


# A process of its own: signals, pipes, full disks, other names


@pytest.fixture
def started(run) -> Iterator[subprocess.Popen]:
    """A run in the middle of its steps, in a directory that has an earlier, good result."""
    earlier = run(SCRIPT, *QUICK, "--under-profiler")
    assert earlier.summary["status"] == "ok"
    argv = words("--num-steps 100000 --warmup-steps 0 --log-interval 1 --num-layers 1")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command_line(SCRIPT, earlier.directory, *argv), **pipes)
    process.first = []  # the lines until the first step
    for line in process.stdout:
        process.first.append(line)
        if line.startswith("step "):
            break
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_was_measured(
    sent: signal.Signals, started: subprocess.Popen, tmp_path: Path
):
    """Ctrl-C, and what `timeout` and a time limit of Slurm send."""
    started.send_signal(sent)
    # communicate() would lose what was read ahead
    rest, errors = started.stdout.read(), started.stderr.read()
    assert started.wait(timeout=60) == 130
    (line,) = errors.splitlines()
    assert "interrupted" in line
    assert "Average training speed" in rest
    summary = summary_in(tmp_path / "profiles")
    assert (summary["status"], summary["exit_status"]) == ("failed", 130)
    shown = [
        float(line.split()[3])
        for line in [*started.first, *rest.splitlines()]
        if line.startswith("step ")
    ]
    assert summary["loss"]["curve"][: len(shown)] == pytest.approx(shown, abs=6e-5)
    assert summary["timing"]["steps"] == len(summary["loss"]["curve"]) >= len(shown)


def test_a_killed_run_does_not_leave_the_result_of_an_earlier_one(
    started: subprocess.Popen, tmp_path: Path
):
    started.kill()
    started.wait(timeout=60)
    summary = summary_in(tmp_path / "profiles")
    assert (summary["status"], summary["training"]["num_steps"]) == ("failed", 100000)
    assert summary["error"] == "it did not finish"


def test_a_reader_that_has_seen_enough_ends_the_run_quietly(
    started: subprocess.Popen, tmp_path: Path
):
    started.stdout.close()  # as `| head -1` does
    assert started.stderr.read() == ""
    assert started.wait(timeout=60) not in (0, 120)  # 120: Python could not write what was left
    assert summary_in(tmp_path / "profiles")["status"] == "failed"


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
    assert_one_error(result, 2, str(result.directory))
    assert "Average training speed" in result.stdout
    assert "Final loss" in result.stdout
    assert result.summary["status"] == "failed"
    assert result.summary["error"] in result.stderr
    assert result.summary["timing"]["samples_per_sec"] > 0


@pytest.mark.parametrize("argv", ["--batch-size 0", "--text-file nothing"])
def test_a_refused_command_line_leaves_an_earlier_result_untouched(argv: str, run):
    good = run(SCRIPT, *QUICK, "--under-profiler")
    assert good.status == 0
    path = good.directory / f"{SCRIPT}_summary.json"
    before = path.read_bytes()
    assert_one_error(run(SCRIPT, *words(argv)), 2)
    assert path.read_bytes() == before
    assert [*good.directory.iterdir()] == [path], "and no other file beside it"


def run_copy(script: str, copy: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of a script, beside which there is nothing else."""
    shutil.copy(ROOT / f"{script}.py", copy)
    command = command_line(script, copy.parent, *argv)
    command[command.index(str(ROOT / f"{script}.py"))] = str(copy)
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": copy.parent}
    return subprocess.run(command, **options)


@pytest.mark.parametrize(("script", "name"), [(SCRIPT, "x (1)"), ("tiny_llama_v3", "3-mine")])
def test_a_copy_with_any_name_runs(script: str, name: str, tmp_path: Path):
    """V3's operators have a namespace, which takes letters, digits and underscores alone."""
    done = run_copy(script, tmp_path / f"{name}.py", *SHORT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{name}_summary.json").is_file()


@pytest.mark.parametrize(("script", "package"), [(SCRIPT, "torch"), ("tiny_openfold_v3", "triton")])
def test_a_missing_package_is_one_line(script: str, package: str, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / f"{script}.py"))
    output, error = capsys.readouterr()
    (line,) = error.splitlines()
    assert (end.value.code, output) == (4, "")
    assert line.startswith(f"{script}.py: error: ") and package in line


def test_an_output_that_is_closed(tmp_path: Path):
    """The run goes on and leaves its record."""
    argv = arguments(SCRIPT, tmp_path, *SHORT)
    with contextlib.redirect_stdout(None):  # as Python has it
        assert load(SCRIPT).main(argv) == 0
    assert summary_in(tmp_path)["status"] == "ok"


def test_an_output_that_is_full(tmp_path: Path):
    with open("/dev/full", "w") as full:
        pipes = {"stdout": full, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command_line(SCRIPT, tmp_path, *SHORT), **pipes)
    assert done.returncode == 2
    assert done.stderr == f"{SCRIPT}.py: error: standard output: No space left on device\n"


def test_python_without_docstrings(monkeypatch):
    monkeypatch.setattr(load(SCRIPT), "__doc__", None)
    assert "--hidden-dim" in load(SCRIPT).build_parser().format_help()


@pytest.mark.parametrize(
    ("script", "argv", "file"),
    [
        (SCRIPT, "--compare-fusion", "lab/modes.py"),
        ("tiny_llama_v4", "--mode benchmark", "exercises/tiny_llama_v4/one_launch.py"),
        (OPENFOLD, "--msa a --structure b", "examples/proteins.py"),
    ],
)
def test_a_copy_says_which_file_a_flag_needs(script: str, argv: str, file: str, tmp_path: Path):
    done = run_copy(script, tmp_path / "copy.py", *words(argv))
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr
    said = rf"copy\.py: error: --.+ needs {file} beside this script .*"
    assert re.fullmatch(said, done.stderr.splitlines()[-1])

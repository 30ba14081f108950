"""What cannot work ends with the right exit status and one line that names the argument or file,
never a traceback."""

from __future__ import annotations

import errno
import gzip
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    ("argv", "said"),
    [
        ("--num-steps", "--num-steps"),
        ("--frobnicate", "--frobnicate"),
        ("--num-step 3", "--num-step"),  # an abbreviation may change its meaning
        ("--enable-swiglu", "--enable-swiglu (did you mean --enable-swiglu-fusion?)"),
    ],
)
def test_bad_flag_is_named(argv: str, said: str, run):
    assert_one_error(run(SCRIPT, *words(argv)), 2, said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("argv", ["--device cuda", "--device auto --enable-cuda-graph"])
def test_what_needs_a_gpu_where_there_is_none(argv: str, run):
    result = run(SCRIPT, *words(argv))
    assert_one_error(result, 4, argv.removeprefix("--device auto "), "GPU")
    assert result.summary is None


def test_a_mode_with_graphs_of_its_own_is_refused_beside_ours(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    argv = words("--device auto --enable-cuda-graph --enable-torch-compile --torch-compile-mode")
    for mode in ("reduce-overhead", "max-autotune"):
        assert_one_error(run(SCRIPT, *argv, mode), 2, "--enable-cuda-graph", mode)


@pytest.mark.parametrize(
    ("argv", "steps"), [("--warmup-steps 0", 2), ("--num-gpus 2 --warmup-steps 11", 12)]
)
def test_a_graph_takes_the_warm_up_that_it_needs(argv: str, steps: int, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = load(SCRIPT).parse_args(["--enable-cuda-graph", *words(argv)])
    assert (args.cuda_graph, args.warmup_steps) == (True, steps)
    (line,) = capsys.readouterr().err.splitlines()
    given = argv.removeprefix("--num-gpus 2 ")
    assert f"note: {given} raised to {steps} for --enable-cuda-graph" in line


def test_a_graph_of_the_step_is_off_by_default_and_no_preset_touches_it(monkeypatch):
    parse_args = load(SCRIPT).parse_args
    assert parse_args(["--enable-all-fusion"]).cuda_graph is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    mode = words("--enable-torch-compile --torch-compile-mode max-autotune-no-cudagraphs")
    for others in (["--disable-all-fusion"], mode):
        assert parse_args(["--enable-cuda-graph", *others]).cuda_graph is True
    assert parse_args(["--disable-cuda-graph"]).cuda_graph is False


def test_profile_directory_that_cannot_be_written(run, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    for path in (f"{tmp_path}/file", f"{tmp_path}/file/below"):
        assert_one_error(run(SCRIPT, *QUICK, "--profile-dir", path), 2, "--profile-dir", path)


# Text

IDS = np.array([318, 50256, 7, 13, 464])
CONTROL = "it has control characters"
NO_TEXT = {  # what is in the file, and what is said of it
    "missing": (None, ""),
    "directory": (None, ""),
    "pipe": (None, ""),
    "empty": (b"", ""),
    "short": (b"ten bytes.", ""),
    "binary": (bytes(range(1, 256)) * 3, CONTROL),  # without a zero
    "16 bits": (IDS.astype("<u2").tobytes(), CONTROL),  # nanoGPT's train.bin
    "64 bits": (IDS.astype("<i8").tobytes(), CONTROL),
    "gzip": (gzip.compress(b"text " * 99), CONTROL),
    "utf-16": ("text\n".encode("utf-16") * 20, CONTROL),
}


def file_of(kind: str, content: bytes | None, tmp_path: Path) -> str:
    """The path of what has this content, or is of this kind."""
    path = tmp_path / "train.bin"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "missing":
        path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize("kind", NO_TEXT)
def test_bad_text_file(kind: str, run, tmp_path: Path):
    content, said = NO_TEXT[kind]
    path = file_of(kind, content, tmp_path)
    sizes = words("--num-layers 1 --seq-len 32 --vocab-size 256")
    result = run(SCRIPT, *sizes, "--text-file", path)
    assert_one_error(result, 2, f"--text-file {path}", said)
    assert result.summary is None


def test_vocabulary_that_does_not_fit_bytes(run):
    result = run(SCRIPT, "--vocab-size", "300", "--text-file", str(ROOT / "pyproject.toml"))
    assert_one_error(result, 2, "--vocab-size 300", "--text-file")


# Alignment and structure


def with_files(**files: str) -> list[str]:
    """The example protein, but for these files."""
    chosen = BPTI | {f"--{name}": path for name, path in files.items()}
    return [argument for pair in chosen.items() for argument in pair]


@pytest.mark.parametrize("kind", ["missing", "binary", "directory"])
def test_bad_alignment_or_structure(kind: str, run, tmp_path: Path):
    """What test_proteins.py has of their formats ends here in one line."""
    path = file_of(kind, bytes(range(256)) * 8, tmp_path)
    for name in ("msa", "structure"):
        assert_one_error(run(OPENFOLD, *with_files(**{name: path})), 2, f"--{name}", path)


def test_structure_of_another_protein(run, tmp_path: Path):
    path = tmp_path / "other.a3m"
    path.write_text(">query\n" + "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQ\n")
    assert_one_error(
        run(OPENFOLD, *with_files(msa=str(path))), 2, "--structure", BPTI["--structure"], "query"
    )


def test_alignment_and_structure_belong_together_and_need_gemmi(run, monkeypatch):
    for flag, path in BPTI.items():
        assert_one_error(run(OPENFOLD, flag, path), 2, "--msa", "--structure")
    monkeypatch.setitem(sys.modules, "gemmi", None)
    monkeypatch.delitem(sys.modules, "examples.proteins", raising=False)
    said = "--structure needs the package gemmi: pip install gemmi"
    assert_one_error(run(OPENFOLD, *with_files()), 4, said)


def test_alignment_with_less_than_asked_for_is_taken_whole(run):
    argv = words("--num-seqs 100 --seq-len 60 --num-steps 1 --warmup-steps 0 --under-profiler")
    status, _, errors, summary = run(OPENFOLD, *argv, *with_files())
    first, second = errors.splitlines()
    assert (status, "--num-seqs 100" in first, "--seq-len 60" in second) == (0, True, True)
    assert (summary["config"]["num_seqs"], summary["config"]["seq_len"]) == (61, 58)


# What goes wrong while running

NAN = words("--learning-rate 1e30 --num-steps 9 --warmup-steps 0 --under-profiler")


def test_loss_that_is_not_a_number_ends_the_run(run):
    result = run(SCRIPT, *NAN)
    assert_one_error(result, 1, "loss", "step", "--learning-rate")
    summary = result.summary  # which was read as strict JSON, without NaN
    assert (summary["status"], summary["exit_status"]) == ("failed", 1)
    curve = summary["loss"]["curve"]
    assert 1 <= len(curve) < 9
    assert all(math.isfinite(loss) for loss in curve)
    assert f"step {len(curve) + 1}" in result.stderr, "the step after those that were good"
    assert summary["loss"]["final"] == curve[-1]
    assert summary["error"] in result.stderr


def test_loss_that_is_not_a_number_in_a_comparison(run):
    result = run(SCRIPT, *NAN, "--compare-fusion")
    assert_one_error(result, 1, "loss", "step", "--learning-rate")
    assert "ratio" not in result.stdout
    assert {summary_in(result.directory / side)["status"] for side in ("", "baseline")} == {
        "failed"
    }


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
def test_out_of_memory_in_a_later_step_keeps_the_steps_before(
    error, run, monkeypatch: pytest.MonkeyPatch
):
    step, calls = torch.optim.AdamW.step, []

    def fails_the_fourth_time(self, *args: object, **options: object):
        calls.append(1)
        if len(calls) == 4:
            raise error
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

    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("gloo")

    def no_waiting(seconds: float) -> None:
        raise AssertionError(f"sleeps for {seconds} s")

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    monkeypatch.setattr("time.sleep", no_waiting)
    with pytest.raises(ZeroDivisionError):
        run(SCRIPT, *QUICK)
    summary = summary_in(tmp_path / "profiles")
    assert (summary["status"], summary["exit_status"]) == ("failed", 1)
    assert "gloo" in summary["error"]


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
    process = subprocess.Popen(
        command_line(SCRIPT, earlier.directory, *argv, fresh=True),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
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


def test_a_full_disk_costs_the_profile_and_not_the_report(tmp_path: Path):
    """The result fits; the trace from which peak memory is read, some 600 kB, does not."""
    done = subprocess.run(
        command_line(SCRIPT, tmp_path, *QUICK, "--enable-pytorch-profiler", fresh=True),
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64_000, 64_000)),
    )
    assert done.returncode not in (0, 1)
    (line,) = done.stderr.splitlines()
    assert str(tmp_path) in line
    assert "Average training speed" in done.stdout
    assert "Final loss" in done.stdout
    summary = summary_in(tmp_path)
    assert summary["status"] == "failed"
    assert summary["error"] in line
    assert summary["timing"]["samples_per_sec"] > 0


@pytest.mark.parametrize("argv", ["--batch-size 0", "--text-file nothing"])
def test_a_refused_command_line_leaves_an_earlier_result_untouched(argv: str, run):
    good = run(SCRIPT, *QUICK, "--under-profiler")
    assert good.status == 0
    path = good.directory / f"{SCRIPT}_summary.json"
    before = path.read_bytes()
    assert_one_error(run(SCRIPT, *words(argv)), 2)
    assert path.read_bytes() == before
    assert [*good.directory.iterdir()] == [path], "and no other file beside it"


@pytest.mark.parametrize(("script", "name"), [(SCRIPT, "x (1).py"), ("tiny_llama_v3", "3-mine.py")])
def test_a_copy_with_any_name_runs(script: str, name: str, tmp_path: Path):
    """V3's operators have a namespace, which takes letters, digits and underscores alone."""
    shutil.copy(ROOT / f"{script}.py", tmp_path / name)
    argv = words("--num-steps 1 --warmup-steps 0 --under-profiler --num-layers 1")
    command = command_line(script, tmp_path, *argv)
    command[command.index(str(ROOT / f"{script}.py"))] = str(tmp_path / name)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{name.removesuffix('.py')}_summary.json").is_file()


@pytest.mark.parametrize(("script", "package"), [(SCRIPT, "torch"), ("tiny_openfold_v3", "triton")])
def test_a_missing_package_is_one_line(script: str, package: str, tmp_path: Path):
    (tmp_path / f"{package}.py").write_text(
        f"raise ModuleNotFoundError({f'No module named {package!r}'!r})"
    )
    command = [sys.executable, str(ROOT / f"{script}.py"), "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == f"{script}.py: error: No module named {package!r}\n"


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
def test_an_output_that_cannot_be_written(redirection: str, tmp_path: Path):
    """Closed, the run goes on and leaves its record; full, it ends with one line."""
    short = words("--num-steps 1 --warmup-steps 0 --under-profiler --num-layers 1")
    command = f"{shlex.join(command_line(SCRIPT, tmp_path, *short))} {redirection}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120)
    if redirection == ">&-":
        assert (done.returncode, done.stderr) == (0, "")
        assert summary_in(tmp_path)["status"] == "ok"
    else:
        assert done.returncode == 2
        assert done.stderr == f"{SCRIPT}.py: error: standard output: No space left on device\n"


def test_python_without_docstrings(tmp_path: Path):
    command = [sys.executable, "-OO", str(ROOT / f"{SCRIPT}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--hidden-dim" in done.stdout


@pytest.mark.parametrize(
    ("script", "argv", "file"),
    [
        (SCRIPT, "--compare-fusion", "lab/modes.py"),
        (SCRIPT, "--verify-accuracy", "lab/modes.py"),
        ("tiny_llama_v4", "--mode benchmark", "exercises/tiny_llama_v4/one_launch.py"),
        (OPENFOLD, "--msa a --structure b", "examples/proteins.py"),
    ],
)
def test_a_copy_says_which_file_a_flag_needs(script: str, argv: str, file: str, tmp_path: Path):
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    command = command_line(script, tmp_path, *words(argv))
    command[command.index(str(ROOT / f"{script}.py"))] = str(tmp_path / f"{script}.py")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    said = rf"{script}\.py: error: --.+ needs {file} beside this script .*"
    assert re.fullmatch(said, done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr

"""What cannot work ends with the right exit status and one line that names the argument or file, never a traceback."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import MODELS, QUICK, ROOT, SCRIPTS, TINY, Run, assert_one_error, model_of, strict_json, words

every_script = pytest.mark.parametrize("script", SCRIPTS)
BPTI = {"--msa": str(ROOT / "examples" / "bpti.a3m"), "--structure": str(ROOT / "examples" / "bpti.cif")}
QUERY = "RPDFCLEPPYTGPCKARIIRYFYNAKAGLCQTFVYGGCRAKRNNFKSAEDCMRTCGGA"

COMMON = [
    ("--batch-size", "0"),
    ("--batch-size", "-2"),
    ("--batch-size", "two"),
    ("--batch-size", "1.5"),
    ("--batch-size", ""),
    ("--seq-len", "1"),
    ("--seq-len", "-16"),
    ("--num-steps", "0"),
    ("--num-steps", "1e3"),
    ("--warmup-steps", "-1"),
    ("--log-interval", "0"),
    ("--seed", "-1"),
    ("--seed", "1.0"),
    ("--seed", "99999999999999999999999"),
    ("--learning-rate", "0"),
    ("--learning-rate", "-0.001"),
    ("--learning-rate", "nan"),
    ("--learning-rate", "inf"),
    ("--learning-rate", "fast"),
    ("--matmul-precision", "low"),
    ("--device", "tpu"),
    ("--num-steps",),
    ("--frobnicate",),
    ("--enable-magic-fusion",),
    ("--num-step", "3"),  # no abbreviations: they would change their meaning with each new flag
    ("--use-amp", "--amp-dtype", "int8"),
    ("--enable-torch-compile", "--torch-compile-mode", "fastest"),
]
OF_LLAMA = [
    ("--vocab-size", "1"),
    ("--vocab-size", "many"),
    ("--hidden-dim", "0"),
    ("--hidden-dim", "-64"),
    ("--hidden-dim", "66"),
    ("--hidden-dim", "12"),  # three channels per head cannot be turned in pairs
    ("--num-layers", "0"),
    ("--num-heads", "0"),
    ("--num-heads", "3"),
    ("--num-kv-heads", "3"),
    ("--num-kv-heads", "8"),
    ("--num-kv-heads", "0"),
    ("--intermediate-dim", "0"),
]
OF_OPENFOLD = [
    ("--num-blocks", "0"),
    ("--num-seqs", "0"),
    ("--num-seqs", "some"),
    ("--msa-dim", "30"),
    ("--msa-dim", "0"),
    ("--pair-dim", "-32"),
    ("--pair-dim", "33"),
    ("--num-heads-msa", "5"),
    ("--num-heads-pair", "3"),
    ("--num-heads-pair", "0"),
]
BAD_ARGUMENTS = [
    pytest.param(script, argv, id=f"{script}-{'='.join(argv)}")
    for script in SCRIPTS
    for argv in [*COMMON, *(OF_LLAMA if model_of(script) == "llama" else OF_OPENFOLD)]
]


@pytest.mark.parametrize(("script", "argv"), BAD_ARGUMENTS)
def test_bad_argument_is_named(script: str, argv: tuple[str, ...], run):
    flag = [argument for argument in argv if argument.startswith("--")][-1]
    result = run(script, *argv)
    assert_one_error(result, 2, flag, *(argument for argument in argv[1:] if argument and argument[0] != "-"))
    assert result.summary is None


@every_script
def test_two_modes_are_refused(script: str, run):
    assert_one_error(run(script, "--validate-setup", "--verify-accuracy"), 2, "--validate-setup", "--verify-accuracy")


@every_script
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_cuda_without_a_gpu(script: str, run):
    result = run(script, "--device", "cuda")
    assert_one_error(result, 4, "--device cuda")
    assert result.summary is None


@every_script
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_deepspeed_that_is_not_installed(script: str, run):
    assert_one_error(run(script, *QUICK, "--enable-deepspeed-flops"), 4, "--enable-deepspeed-flops", "deepspeed")


@every_script
@pytest.mark.parametrize("where", ["below-a-file", "a-file"])
def test_profile_directory_that_cannot_be_written(where: str, script: str, run, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    path = str(tmp_path / "file" / "below" if where == "below-a-file" else tmp_path / "file")
    assert_one_error(run(script, *QUICK, "--profile-dir", path), 2, "--profile-dir", path)


# Text


def file_of(kind: str, tmp_path: Path) -> str:
    """The path of a file that is wrong in the way of its name."""
    path = tmp_path / f"{kind}.input"
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(
            {"empty": b"", "binary": bytes(range(256)) * 8, "short": b"ten bytes.", "prose": b"Hi!\n" * 90}[kind]
        )
    return str(path)


LLAMA_SIZES = ["--hidden-dim", "64", "--num-layers", "1", "--num-heads", "2", "--seq-len", "32", "--vocab-size", "256"]


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_llama_v2"])
@pytest.mark.parametrize("kind", ["missing", "empty", "binary", "short", "directory"])
def test_bad_text_file(kind: str, script: str, run, tmp_path: Path):
    path = file_of(kind, tmp_path)
    result = run(script, *LLAMA_SIZES, "--text-file", path)
    assert_one_error(result, 2, "--text-file", path)
    assert result.summary is None


def test_short_text_file_says_how_short(run, tmp_path: Path):
    result = run("tiny_llama_v1", *LLAMA_SIZES, "--text-file", file_of("short", tmp_path))
    assert_one_error(result, 2, "10 bytes", "--seq-len 32")


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_llama_v2"])
def test_vocabulary_that_does_not_fit_bytes(script: str, run):
    result = run(script, "--vocab-size", "300", "--text-file", str(ROOT / "pyproject.toml"))
    assert_one_error(result, 2, "--vocab-size 300", "--text-file")


# Alignment and structure

OPENFOLDS = pytest.mark.parametrize("script", ["tiny_openfold_v1", "tiny_openfold_v2"])


def with_files(**files: str) -> list[str]:
    """The example protein, but for these files."""
    chosen = BPTI | {f"--{name}": path for name, path in files.items()}
    return [argument for pair in chosen.items() for argument in pair]


@OPENFOLDS
@pytest.mark.parametrize("kind", ["missing", "empty", "binary", "prose", "directory"])
def test_bad_alignment_file(kind: str, script: str, run, tmp_path: Path):
    path = file_of(kind, tmp_path)
    result = run(script, *with_files(msa=path))
    assert_one_error(result, 2, "--msa", path)
    assert result.summary is None


@OPENFOLDS
@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f">query\n{QUERY}\n>short\n{QUERY[:-3]}\n", "sequence 2"),
        (f">query\n{QUERY}\n>good\n{QUERY}\n>long\n{QUERY}A\n", "sequence 3"),
        (">query\n>other\n", "columns"),
        (f">query\n{QUERY}\n>digits\n{'1' * len(QUERY)}\n", "characters"),
    ],
    ids=["short-row", "long-row", "no-letters", "digits"],
)
def test_alignment_with_wrong_rows(text: str, word: str, script: str, run, tmp_path: Path):
    path = tmp_path / "rows.a3m"
    path.write_text(text)
    assert_one_error(run(script, *with_files(msa=str(path))), 2, "--msa", str(path), word)


@OPENFOLDS
@pytest.mark.parametrize("kind", ["missing", "empty", "binary", "prose", "directory"])
def test_bad_structure_file(kind: str, script: str, run, tmp_path: Path):
    path = file_of(kind, tmp_path)
    result = run(script, *with_files(structure=path))
    assert_one_error(result, 2, "--structure", path)
    assert result.summary is None


@OPENFOLDS
@pytest.mark.parametrize("ending", ["pdb", "cif"])
def test_text_named_like_a_structure(ending: str, script: str, run, tmp_path: Path):
    path = tmp_path / f"prose.{ending}"
    path.write_text("This is a letter, not a protein.\n" * 5)
    assert_one_error(run(script, *with_files(structure=str(path))), 2, "--structure", str(path))


@OPENFOLDS
def test_structure_of_another_protein(script: str, run, tmp_path: Path):
    path = tmp_path / "other.a3m"
    path.write_text(">query\n" + "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQ\n")
    assert_one_error(run(script, *with_files(msa=str(path))), 2, "--structure", BPTI["--structure"], "query")


@OPENFOLDS
@pytest.mark.parametrize("flag", ["--msa", "--structure"])
def test_alignment_and_structure_belong_together(flag: str, script: str, run):
    assert_one_error(run(script, flag, BPTI[flag]), 2, "--msa", "--structure")


@OPENFOLDS
def test_structure_without_gemmi(script: str, run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gemmi", None)
    assert_one_error(run(script, *with_files()), 4, "gemmi")


@OPENFOLDS
def test_alignment_with_less_than_asked_for_is_taken_whole(script: str, run):
    sizes = ["--num-seqs", "100", "--seq-len", "60", "--num-steps", "1", "--warmup-steps", "0", "--under-profiler"]
    status, _, errors, summary = run(script, *sizes, *with_files())
    assert status == 0
    lines = errors.splitlines()
    assert len(lines) == 2
    assert "--num-seqs 100" in lines[0]
    assert "61" in lines[0]
    assert "--seq-len 60" in lines[1]
    assert "58" in lines[1]
    assert (summary["config"]["num_seqs"], summary["config"]["seq_len"]) == (61, 58)


# What goes wrong while running


@every_script
def test_loss_that_is_not_a_number_ends_the_run(script: str, run):
    result = run(script, "--learning-rate", "1e30", "--num-steps", "9", "--warmup-steps", "0", "--under-profiler")
    assert_one_error(result, 1, "loss", "step", "--learning-rate")
    summary = result.summary  # which was read as strict JSON, without NaN
    assert (summary["status"], summary["exit_status"]) == ("failed", 1)
    curve = summary["loss"]["curve"]
    assert 1 <= len(curve) < 9
    assert all(math.isfinite(loss) for loss in curve)
    assert f"step {len(curve) + 1}" in result.stderr, "the step after those that were good"
    assert summary["loss"]["final"] == curve[-1]
    assert summary["error"] in result.stderr


@every_script
def test_loss_that_is_not_a_number_in_warmup(script: str, run):
    result = run(script, "--learning-rate", "1e30", "--num-steps", "9", "--warmup-steps", "8", "--under-profiler")
    assert_one_error(result, 1, "warm-up step")
    assert result.summary["timing"].get("samples_per_sec") is None, "nothing was measured"


def assert_out_of_memory(result: Run, *words: str) -> None:
    assert_one_error(result, 3, "out of memory", *words)
    assert (result.summary["status"], result.summary["exit_status"]) == ("oom", 3)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_llama_v2"])
def test_scores_that_do_not_fit_into_memory(script: str, run, tmp_path: Path):
    """[S, S] float32 scores of 256 TB are more than any process can address: the allocation fails at once."""
    path = tmp_path / "long.txt"
    path.write_bytes(b"a" * 8_000_000)
    sizes = words("--hidden-dim 2 --num-layers 1 --num-heads 1 --seq-len 8000000 --batch-size 1 --vocab-size 256")
    result = run(script, *sizes, "--text-file", str(path), "--disable-all-fusion")
    assert_out_of_memory(result, "--batch-size", "--seq-len")


@every_script
def test_weights_that_do_not_fit_into_memory(script: str, run):
    sizes = {
        "llama": "--hidden-dim 8000000 --num-layers 1 --num-heads 1 --seq-len 2 --vocab-size 2",
        "openfold": "--pair-dim 400000000 --num-heads-pair 1 --seq-len 2",
    }
    assert_out_of_memory(run(script, *words(sizes[model_of(script)])), "lower")


@every_script
def test_out_of_memory_in_a_later_step_keeps_the_steps_before(script: str, run, monkeypatch: pytest.MonkeyPatch):
    step, calls = torch.optim.AdamW.step, []

    def fails_the_fourth_time(self, *args: object, **options: object):
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")
        return step(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", fails_the_fourth_time)
    result = run(script, "--num-steps", "9", "--warmup-steps", "1", "--under-profiler")
    assert_out_of_memory(result, "--batch-size")
    curve = result.summary["loss"]["curve"]
    assert len(curve) == 3
    assert all(math.isfinite(loss) for loss in curve)


@every_script
def test_a_bug_leaves_its_record(script: str, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch):
    """An error that nobody foresaw may show its traceback, but the result file says that the run failed."""

    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("something unforeseen")

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    with pytest.raises(ZeroDivisionError):
        run(script, *QUICK)
    summary = strict_json((tmp_path / "profiles" / f"{script}_summary.json").read_text())
    assert (summary["status"], summary["exit_status"]) == ("failed", 1)
    assert "something unforeseen" in summary["error"]


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("model", MODELS)
def test_ctrl_c_keeps_what_was_measured(model: str, tmp_path: Path):
    script = f"tiny_{model}_v2"
    options = ["--num-steps", "100000", "--warmup-steps", "0", "--log-interval", "1", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-B", str(ROOT / f"{script}.py"), *TINY[model], *options, "--profile-dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        shown = []
        for line in process.stdout:
            if line.startswith("step "):
                shown.append(float(line.split()[-1]))
                break
        assert shown, process.stderr.read()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1
    assert "interrupted" in errors
    assert "Traceback" not in rest + errors
    summary = strict_json((tmp_path / f"{script}_summary.json").read_text())
    assert summary["exit_status"] == 130
    assert summary["status"] == "failed"
    curve = summary["loss"]["curve"]
    assert len(curve) >= 1 + sum(line.startswith("step ") for line in rest.splitlines())
    assert curve[0] == pytest.approx(shown[0], abs=6e-5)
    assert summary["timing"]["steps"] == len(curve)


@pytest.mark.parametrize(
    ("script", "argv"),
    [
        ("tiny_llama_v1", ["--batch-size", "0"]),
        ("tiny_llama_v2", [*LLAMA_SIZES, "--text-file", "no such file"]),
        ("tiny_openfold_v1", with_files(msa="no such file")),
        ("tiny_openfold_v2", with_files(structure="no such file")),
        ("tiny_llama_v2", ["--compare-with-v1", "no such file"]),
    ],
)
def test_bad_input_leaves_an_earlier_result_untouched(script: str, argv: list[str], run):
    good = run(script, *QUICK, "--under-profiler")
    assert good.status == 0
    path = good.directory / f"{script}_summary.json"
    before = path.read_bytes()
    assert_one_error(run(script, *argv), 2)
    assert path.read_bytes() == before
    assert [entry.name for entry in good.directory.iterdir()] == [path.name], "and no other file beside it"

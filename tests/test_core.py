"""The scripts share one core, byte for byte and within its budget, and one file is enough."""

import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import (
    CPU,
    MODELS,
    QUICK,
    ROOT,
    SCRIPT,
    SCRIPTS,
    TINY,
    TRITON,
    arguments,
    finished,
    load,
    parse,
    summary_in,
    words,
)

from fusion_lab import host

ALL_SCRIPTS = sorted(ROOT.glob("tiny_*_v*.py"))
CORE = (ROOT / "dev/parts/core.py").read_text()
END = "# --- end of core\n"
MOST_LINES, MOST_IMPORTS = 734, 15


# One file


def run_copy(copy: Path, *argv: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    """Run a copy of a script beside which there is nothing else, with results below it."""
    shutil.copy(ROOT / f"{script}.py", copy)
    argv = arguments(script, copy.parent / "profiles", *argv)
    return finished("-B", copy.name, *argv, cwd=copy.parent)


def test_a_copied_file_compares_by_itself(tmp_path: Path):
    argv = words("--compare-fusion --num-steps 6 --warmup-steps 1")
    done = run_copy(tmp_path / f"{SCRIPT}.py", *argv)
    assert done.returncode == 0, done.stderr
    assert "all off   as chosen    ratio\nbatch time, ms" in done.stdout
    assert re.search(r"\nBatch time ratio in 6 turns: .*x to .*x \(.+\)\n$", done.stdout)
    baseline, fused = (summary_in(tmp_path / "profiles" / side) for side in ("baseline", ""))
    assert (baseline["status"], fused["status"]) == ("ok", "ok")
    assert {*baseline["fusions"].values()} == {False} != {*fused["fusions"].values()}


@pytest.mark.parametrize(
    ("script", "argv", "needed"),
    [
        (SCRIPT, "--verify-accuracy", "needs the folder fusion_lab of this repository"),
        (SCRIPT, "--enable-memory-profiling", "needs the folder fusion_lab of this repository"),
        ("tiny_openfold_v2", "--msa a --structure b", "needs examples"),
    ],
)
def test_a_copied_file_says_what_a_flag_needs(script: str, argv: str, needed: str, tmp_path: Path):
    for ours in ("fusion_lab", "examples"):
        (tmp_path / f"{ours}.py").touch()  # hides what the tests have installed
    done = run_copy(tmp_path / "mine.py", *words(argv), script=script)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mine.py: ")]
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr
    flag = [word for word in words(argv) if word.startswith("--")][-1]
    assert line.startswith(f"mine.py: error: {flag} {needed}")


def test_a_copy_with_any_name_runs(tmp_path: Path):
    """V3's operators have a namespace, which takes letters, digits and underscores alone."""
    argv = words("--num-steps 1 --warmup-steps 0 --under-profiler --num-layers 1 --seq-len 8")
    done = run_copy(tmp_path / "3 (mine).py", *argv, script="tiny_llama_v3")
    assert done.returncode == 0, done.stderr
    assert summary_in(tmp_path / "profiles", "3 (mine)")["status"] == "ok"


@pytest.mark.parametrize(("script", "package"), [(SCRIPT, "torch"), ("tiny_openfold_v3", "triton")])
def test_a_missing_package_is_one_line(script: str, package: str, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / f"{script}.py"))
    output, error = capsys.readouterr()
    (line,) = error.splitlines()
    assert (end.value.code, output) == (4, "")
    assert line.startswith(f"{script}.py: error: ") and package in line


# One core


def test_the_core_is_the_same_in_every_script_and_within_its_budget():
    assert {path.stem for path in ALL_SCRIPTS} == set(SCRIPTS)
    assert all(path.read_text().count("\n# --- core\n") == 1 for path in ALL_SCRIPTS)
    assert finished(ROOT / "dev/sync_parts.py", "--check").returncode == 0
    assert len(CORE.splitlines()) <= MOST_LINES
    assert max(map(len, CORE.splitlines())) <= 100


@pytest.mark.parametrize("path", ALL_SCRIPTS, ids=lambda path: path.stem)
def test_a_script_needs_pytorch_numpy_and_triton_alone_and_v1_has_few_imports(path: Path):
    head = path.read_text().partition("\n# ---")[0]
    found = {*re.findall(r"(?m)^(?:    )?(?:import|from) (\S+)", head)} - {"__future__"}
    standard = {name for name in found if name.partition(".")[0] in sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in found - standard} <= {"numpy", "torch", "triton"}
    assert path.stem != "tiny_llama_v1" or 5 < len(standard) <= MOST_IMPORTS


def test_what_tools_have_a_second_time_is_the_same():
    """No module of fusion_lab may import a script."""
    module = load(SCRIPT)
    assert host.environment(CPU) == module.environment(CPU)
    ours, theirs = (inspect.getsource(of.is_out_of_memory) for of in (host, module))
    assert ours.partition('"""\n')[2] == theirs.partition('"""\n')[2] != ""


def test_sync_tool_names_the_script_that_differs_and_repairs_it(tmp_path: Path):
    shutil.copytree(ROOT / "dev", tmp_path / "dev")
    for path in ALL_SCRIPTS:
        shutil.copy(path, tmp_path)
    path, original = tmp_path / "tiny_openfold_v2.py", (ROOT / "tiny_openfold_v2.py").read_text()
    path.write_text(changed := original.replace(END, "# one more line\n" + END))
    sync = tmp_path / "dev/sync_parts.py"
    done = finished(sync, "--check")
    assert (done.returncode, done.stderr.count("\n"), path.name in done.stderr) == (1, 1, True)
    assert path.read_text() == changed, "--check only looks"
    assert (finished(sync).returncode, path.read_text()) == (0, original)


# Results


def test_an_earlier_result_is_kept_and_a_run_that_did_not_finish_has_its_sizes(tmp_path, capsys):
    module = load(SCRIPT)
    argv = [*TINY["llama"], *QUICK, "--device", "cpu", "--profile-dir", str(tmp_path)]
    for seed in ("1", "2", "3"):
        assert module.main([*argv, "--seed", seed]) == 0
    assert "tiny_llama_v2_summary.2.json now" in capsys.readouterr().err
    kept = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert {name: result["training"]["seed"] for name, result in kept.items()} == {
        f"{SCRIPT}_summary.1.json": 1,
        f"{SCRIPT}_summary.2.json": 2,
        f"{SCRIPT}_summary.json": 3,
    }
    killed = module.Trainer(module.parse_args([*argv, "--seq-len", "16"]))
    killed.write(module.UNFINISHED)
    begun = summary_in(tmp_path)
    assert (begun["status"], begun["config"]["seq_len"]) == ("failed", 16)
    assert begun["config"] == {**kept[f"{SCRIPT}_summary.json"]["config"], "seq_len": 16}
    assert module.main(argv) == 0  # nothing was measured that could be lost
    assert len([*tmp_path.iterdir()]) == 4


def test_a_fusion_that_is_on_anyway_is_said(capsys):
    enable = ["--enable-swiglu-fusion", "--enable-qkv-fusion"]
    parse(SCRIPT, *enable)
    assert "--enable-qkv-fusion changes nothing" in capsys.readouterr().err
    parse(SCRIPT, "--disable-all-fusion", *enable)
    assert not capsys.readouterr().err


def test_what_takes_long_is_said_again(monkeypatch, capsys):
    module = load(SCRIPT)
    clock = iter((0.0, 12.0))
    monkeypatch.setattr(module, "time", Mock(monotonic=lambda: next(clock)))
    module.progress("compiling")
    module.repeat_progress(Mock(wait=Mock(side_effect=[False, True])))
    assert capsys.readouterr().err == "compiling\ncompiling (for 12 s)\n"


# Order


@pytest.mark.parametrize(
    ("script", "word", "most"),
    [
        ("tiny_llama_v1", "(nn.Module)", 75),
        ("tiny_llama_v2", "(nn.Module)", 75),
        ("tiny_llama_v3", "_kernel(", 150),
        ("tiny_llama_v4", "_kernel(", 150),
    ],
)
def test_a_reader_soon_meets_the_operations_in_the_order_of_v1(script: str, word: str, most: int):
    lines = (ROOT / f"{script}.py").read_text().splitlines()
    definitions = [n for n, line in enumerate(lines, 1) if re.match(r"(class|def) ", line)]
    assert next(n for n in definitions if word in lines[n - 1]) <= most
    own, first = (
        re.findall(r"(?m)^# --- ([\w ]+)", (ROOT / f"{name}.py").read_text())
        for name in (script, "tiny_llama_v1")
    )
    assert len(first) > 10
    assert [section for section in own if section in first] == first


# Kernels

CHANGED = {  # of V3's kernels in V4
    "llama": {
        *("rms_norm_forward_kernel", "rms_norm_backward_kernel"),
        *("attention_backward_queries_kernel", "attention_backward_keys_kernel"),
        *("cross_entropy_forward_kernel", "cross_entropy_backward_kernel"),
    },
    "openfold": set(),
}
REPLACED = {
    "llama": (),
    "openfold": ("layer_norm", "bias_relu", "outer_product_backward"),
}


@pytest.mark.parametrize("model", MODELS)
def test_kernels_of_v3_stay_to_the_byte_in_v4(model: str):
    """But for those that it changes, and for what it has other kernels for."""
    before, after = (
        dict(re.findall(r"(?ms)^@triton\.jit\ndef (\w+)(.*?)\n\n\n", path.read_text()))
        for path in ALL_SCRIPTS
        if path.stem in (f"tiny_{model}_v3", f"tiny_{model}_v4")
    )
    stay = {name: code for name, code in before.items() if not name.startswith(REPLACED[model])}
    assert len(stay) >= 10
    assert {*before} - {*after} == {*before} - {*stay}
    assert {name for name in stay if after[name] != stay[name]} == CHANGED[model]


@pytest.mark.parametrize("script", TRITON)
def test_every_kernel_has_block_sizes_and_each_case_the_same_names(script: str):
    module = load(script)
    names = {name.removesuffix("_kernel") for name in vars(module) if name.endswith("_kernel")}
    assert names == module.BLOCKS.keys()
    for kernel, cases in module.BLOCKS.items():
        for case, sizes in cases.items():
            assert sizes.keys() <= {*cases["any"], "num_warps", "num_stages"}, (kernel, case)

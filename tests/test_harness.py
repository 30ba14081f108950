"""The scripts share one harness, byte for byte and within its budget."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MODELS, ROOT, SCRIPTS, TRITON, load

ALL_SCRIPTS = sorted(ROOT.glob("tiny_*_v*.py"))
HARNESS = (ROOT / "common/harness.py").read_text()
END = "# --- end of harness\n"
every_script = pytest.mark.parametrize("path", ALL_SCRIPTS, ids=lambda path: path.stem)


def sync(root: Path, *argv: str) -> subprocess.CompletedProcess:
    """Run tools/sync_common.py of a copy of the repository."""
    command = [sys.executable, str(root / "tools" / "sync_common.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_harness_is_the_same_in_every_script_and_within_its_budget():
    assert {path.stem for path in ALL_SCRIPTS} == set(SCRIPTS)
    assert all(path.read_text().count("\n# --- harness\n") == 1 for path in ALL_SCRIPTS)
    assert sync(ROOT, "--check").returncode == 0
    assert 20_000 < len(HARNESS) <= 36_000
    assert max(map(len, HARNESS.splitlines())) <= 100


def test_sync_tool_names_the_script_that_differs_and_repairs_it(tmp_path: Path):
    for folder in ("tools", "common"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for path in ALL_SCRIPTS:
        shutil.copy(path, tmp_path)
    path, original = tmp_path / "tiny_openfold_v2.py", (ROOT / "tiny_openfold_v2.py").read_text()
    path.write_text(changed := original.replace(END, "# one more line\n" + END))
    done = sync(tmp_path, "--check")
    assert (done.returncode, done.stderr.count("\n"), path.name in done.stderr) == (1, 1, True)
    assert path.read_text() == changed, "--check only looks"
    assert (sync(tmp_path).returncode, path.read_text()) == (0, original)


# What each side may use of the other; the harness begins with a comment that says so.
OF_THE_MODEL = {"VERSION", "FUSIONS", "TRITON_FUSIONS", "add_model_arguments"}
OF_THE_MODEL |= {"check_model_arguments", "without_effect", "build_model", "build_optimizer"}
OF_THE_MODEL |= {"make_batches"}
OF_THE_HARNESS = {"at_least", "beside", "fail", "say"}


def names(code: str) -> tuple[set[str], set[str]]:
    """Those that are defined at module level, and those that are used."""
    defined = re.findall(r"^(?:def |class )?(\w+)(?:\(| = |: )", code, re.MULTILINE)
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name))
    return {*defined}, {node.id for node in nodes if type(node.ctx) is ast.Load}


@every_script
def test_harness_and_model_use_of_each_other_what_the_comment_says(path: Path):
    model_defines, model_uses = names(path.read_text().partition("# --- process\n")[0])
    defines, uses = names(HARNESS)
    assert uses & model_defines == OF_THE_MODEL
    assert model_uses & defines <= OF_THE_HARNESS
    comment = re.match(r"(#.*\n)+", HARNESS)[0]
    assert set(re.findall(r"\w+", comment)) >= OF_THE_MODEL | OF_THE_HARNESS


# Kernels

CHANGED = {  # of V3's kernels in V4
    "llama": (
        "rms_norm_backward_kernel attention_backward_queries_kernel attention_backward_keys_kernel"
        " cross_entropy_forward_kernel cross_entropy_backward_kernel"
    ),
    "openfold": "",
}
REPLACED = {"llama": (), "openfold": ("layer_norm", "bias_relu", "outer_product_backward")}


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
    assert {name for name in stay if after[name] != stay[name]} == set(CHANGED[model].split())


@pytest.mark.parametrize("script", TRITON)
def test_every_kernel_has_blocks_and_no_line_of_them_another_name(script: str):
    module = load(script)
    names = {name.removesuffix("_kernel") for name in vars(module) if name.endswith("_kernel")}
    assert names == {name for name in module.BLOCKS if " " not in name}
    for line, settings in module.BLOCKS.items():
        whole = module.BLOCKS[line.partition(" ")[0]]
        assert settings.keys() <= {*whole, "num_warps", "num_stages"}, line

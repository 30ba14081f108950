"""The scripts share one harness, byte for byte and within its budget, and need nothing but torch
and numpy."""

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
BEGIN, END = "# --- harness\n", "# --- end of harness\n"
every_script = pytest.mark.parametrize("path", ALL_SCRIPTS, ids=lambda path: path.stem)


def split(path: Path) -> tuple[str, str, str]:
    """The harness with its two marks, each of which must be there once, and what comes before
    and after it."""
    lines = path.read_text().splitlines(keepends=True)
    assert (lines.count(BEGIN), lines.count(END)) == (1, 1), path.name
    begin, end = lines.index(BEGIN), lines.index(END) + 1
    return "".join(lines[begin:end]), "".join(lines[:begin]), "".join(lines[end:])


@every_script
def test_harness_is_the_same_in_every_script_and_within_its_budget(path: Path):
    assert {path.stem for path in ALL_SCRIPTS} >= set(SCRIPTS)
    harness = split(path)[0]
    assert harness == split(ALL_SCRIPTS[0])[0]
    assert 20_000 < len(harness) <= 36_000
    assert max(map(len, harness.splitlines())) <= 100


# What each side may use of the other; the harness begins with a comment that says so.
OF_THE_MODEL = {"VERSION", "FUSIONS", "TRITON_FUSIONS", "add_model_arguments"}
OF_THE_MODEL |= {"check_model_arguments", "without_effect", "build_model", "build_optimizer"}
OF_THE_MODEL |= {"make_batches"}
OF_THE_PROCESS = {"LAUNCHED", "RANK", "WORLD_SIZE", "check_environment", "choose_devices"}
OF_THE_PROCESS |= {"prepare", "environment", "start_torchrun", "answer_signals", "join_processes"}
OF_THE_COUNTS = {"count_kernels", "count_all_off", "count_flops", "memory_of_a_step", "gpu_memory"}
OF_THE_COUNTS |= {"write_profile", "recorded_region"}
OF_THE_HARNESS = {"at_least", "beside", "fail", "say"}


def definitions(code: str) -> set[str]:
    """Names of functions, classes and variables of the module, apart from imports."""
    found = set()
    for node in ast.parse(code).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (name for target in targets for name in ast.walk(target))
            names = (name for name in names if isinstance(name, ast.Name))
            found |= {name.id for name in names if type(name.ctx) is ast.Store}
    return found


def uses(code: str) -> set[str]:
    return {
        node.id
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Name) and type(node.ctx) is ast.Load
    }


@every_script
def test_harness_and_model_use_of_each_other_what_the_comment_says(path: Path):
    """A mode of a script's own comes after the harness, which it may use."""
    harness, before, after = split(path)
    theirs = definitions(before) | definitions(after)
    assert uses(harness) & theirs == OF_THE_MODEL | OF_THE_PROCESS | OF_THE_COUNTS
    model = before.partition("# --- process\n")[0]
    assert uses(model) & definitions(harness) <= OF_THE_HARNESS
    comment = re.match(r"(#.*\n)+", harness)[0]
    assert set(re.findall(r"\w+", comment)) >= OF_THE_MODEL | OF_THE_HARNESS


@every_script
def test_script_imports_only_the_standard_library_torch_numpy_and_triton(path: Path):
    """At module level, also inside `if` and `try`.

    What a flag asks for is imported in a function.
    """
    allowed = {*sys.stdlib_module_names, "torch", "numpy", "triton"}
    pending, found = list(ast.parse(path.read_text()).body), set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import needs a package"
            found.add(node.module.partition(".")[0])
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += list(ast.iter_child_nodes(node))
    assert "torch" in found
    assert found <= allowed


# Kernels

CHANGED = {  # of V3's kernels in V4
    "llama": (
        "rms_norm_backward_kernel attention_backward_queries_kernel attention_backward_keys_kernel"
        " cross_entropy_forward_kernel cross_entropy_backward_kernel"
    ),
    "openfold": "",
}
REPLACED = {"llama": (), "openfold": ("layer_norm", "bias_relu", "outer_product_backward")}


def kernels(script: str) -> dict[str, str]:
    """The source of every function under @triton.jit."""
    parts = (ROOT / f"{script}.py").read_text().split("\n\n\n")
    jitted = [part for part in parts if part.startswith("@triton.jit")]
    return {re.search(r"^def (\w+)", part, re.MULTILINE)[1]: part for part in jitted}


@pytest.mark.parametrize("model", MODELS)
def test_kernels_of_v3_stay_to_the_byte_in_v4(model: str):
    """But for those that it changes, and for what it has other kernels for."""
    before, after = (kernels(f"tiny_{model}_v{version}") for version in (3, 4))
    stay = {name: part for name, part in before.items() if not name.startswith(REPLACED[model])}
    assert len(stay) >= 10
    assert {*before} - {*after} == {*before} - {*stay}
    assert {name for name in stay if after[name] != stay[name]} == set(CHANGED[model].split())


@pytest.mark.parametrize("script", TRITON)
def test_every_kernel_has_blocks_and_every_line_of_them_is_complete(script: str):
    """What a backend or precision gets is read off one line, and no line has a name too many."""
    module = load(script)
    names = {name.removesuffix("_kernel") for name in vars(module) if name.endswith("_kernel")}
    assert names == {name for name in module.BLOCKS if " " not in name}
    for line, settings in module.BLOCKS.items():
        whole = module.BLOCKS[line.partition(" ")[0]]
        assert module.block_sizes(settings).keys() == module.block_sizes(whole).keys(), line


# tools/sync_common.py


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Scripts and tools in a directory where they may be broken."""
    for folder in ("tools", "common"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for path in ALL_SCRIPTS:
        shutil.copy(path, tmp_path)
    return tmp_path


def sync(root: Path, *argv: str) -> subprocess.CompletedProcess:
    """Run the tool of the copy of the repository at `root`."""
    command = [sys.executable, str(root / "tools" / "sync_common.py"), *argv]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)


def test_sync_tool_names_the_script_that_differs_and_repairs_it(copy: Path):
    assert sync(copy, "--check").returncode == 0
    path = copy / "tiny_openfold_v2.py"
    original = path.read_text()
    path.write_text(original.replace(END, "# one more line\n" + END))
    done = sync(copy, "--check")
    assert done.returncode == 1
    assert path.name in done.stderr
    assert "# one more line" in path.read_text(), "--check only looks"
    assert sync(copy).returncode == 0
    assert path.read_text() == original, "only what is common is copied"


def test_sync_tool_carries_a_change_to_every_script(copy: Path):
    with (copy / "common" / "harness.py").open("a") as file:
        file.write("# one more line\n")
    assert sync(copy).returncode == 0
    for original in ALL_SCRIPTS:
        text = (copy / original.name).read_text()
        assert text == original.read_text().replace("\n\n" + END, "# one more line\n\n\n" + END)

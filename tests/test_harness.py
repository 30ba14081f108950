"""The scripts share one harness, byte for byte, and need nothing but torch and numpy."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

ALL_SCRIPTS = sorted(ROOT.glob("tiny_*_v*.py"))
BEGIN, END = "# --- harness\n", "# --- end of harness\n"


def harness(path: Path) -> str:
    """The text between the two marks, each of which must be there once."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    assert (lines.count(BEGIN), lines.count(END)) == (1, 1), path.name
    return "".join(lines[lines.index(BEGIN) : lines.index(END) + 1])


def sync(root: Path, *argv: str) -> subprocess.CompletedProcess:
    """Run the tool of the copy of the repository at `root`."""
    command = [sys.executable, str(root / "tools" / "sync_harness.py"), *argv]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Scripts and tools in a directory where they may be broken."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for path in ALL_SCRIPTS:
        shutil.copy(path, tmp_path)
    return tmp_path


def test_all_scripts_are_looked_at():
    assert {path.stem for path in ALL_SCRIPTS} >= {f"tiny_{m}_v{v}" for m in ("llama", "openfold") for v in (1, 2)}


@pytest.mark.parametrize("path", ALL_SCRIPTS, ids=lambda path: path.stem)
def test_harness_is_the_same_in_every_script(path: Path):
    assert harness(path) == harness(ALL_SCRIPTS[0])
    assert len(harness(path).splitlines()) > 300, "the marks must enclose it"


def test_sync_tool_finds_nothing_to_do():
    done = sync(ROOT, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["tiny_llama_v1.py", "tiny_openfold_v2.py"])
def test_sync_tool_names_the_script_that_differs_and_repairs_it(name: str, copy: Path):
    path = copy / name
    original = path.read_text()
    path.write_text(original.replace(END, "# one more line\n" + END))
    done = sync(copy, "--check")
    assert done.returncode == 1
    assert name in done.stdout + done.stderr
    assert "# one more line" in path.read_text(), "--check only looks"

    source = next(p.name for p in ALL_SCRIPTS if p.name != name)
    assert sync(copy, source).returncode == 0
    assert path.read_text() == original, "only the harness is copied"
    assert sync(copy, "--check").returncode == 0


def test_sync_tool_carries_a_change_to_every_script(copy: Path):
    path = copy / "tiny_openfold_v1.py"
    path.write_text(path.read_text().replace(END, "# one more line\n" + END))
    assert sync(copy, path.name).returncode == 0
    for original in ALL_SCRIPTS:
        text = (copy / original.name).read_text()
        assert text == original.read_text().replace(END, "# one more line\n" + END)


@pytest.mark.parametrize("path", ALL_SCRIPTS, ids=lambda path: path.stem)
def test_script_imports_only_the_standard_library_torch_numpy_and_triton(path: Path):
    """At module level, also inside `if` and `try`; what a flag asks for is imported in a function."""
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


@pytest.mark.parametrize("path", ALL_SCRIPTS, ids=lambda path: path.stem)
def test_script_offers_the_interface(path: Path):
    functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert functions >= {"build_parser", "parse_args", "build_model", "make_batches", "train", "main"}

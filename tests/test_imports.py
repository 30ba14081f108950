"""The house has floors: what stands higher imports what stands lower, and never the other way."""

import ast
import graphlib
from pathlib import Path

import pytest
from conftest import ROOT

FLOORS = (
    ("host", "files", "cli", "show"),
    ("turns", "graph_turns", "study", "records", "provenance", "script"),
    ("accuracy", "modes"),
    *((room,) for room in ("profile", "rocm", "fusions", "amd")),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
OURS = ("fusion_lab", "dev", "exercises", "examples", "analysis_tools", "slides", "setup")
ALLOWED = {
    "fusion_lab": {"fusion_lab"},
    "analysis_tools": {"fusion_lab"},
    "setup": {"fusion_lab"},
    "exercises": {"fusion_lab", "exercises"},
    "examples": {"examples"},
}


def imports(path: Path, top: bool = False) -> set[str]:
    """Our modules that a file imports; `top`: those that it imports as soon as it is imported."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.partition(".")[0] in OURS or name.startswith("tiny_")}


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_those_below_it_alone(folder: str):
    for path in (ROOT / folder).rglob("*.py"):
        names = {name.partition(".")[0] for name in imports(path)}
        scripts = {name for name in names if name.startswith("tiny_") and folder == "exercises"}
        assert names - scripts <= ALLOWED[folder], path


@pytest.mark.parametrize("path", sorted(ROOT.glob("tiny_*.py")), ids=lambda path: path.stem)
def test_a_script_imports_nothing_of_ours_before_a_flag_asks_for_it(path: Path):
    assert not imports(path, top=True)


def test_no_module_imports_upwards_or_in_a_circle():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "fusion_lab").rglob("*.py")
    }
    graph = {module: imports(path) & modules.keys() - {module} for module, path in modules.items()}
    for module, needed in graph.items():
        for name in needed:
            rooms = module.split(".")[1], name.split(".")[1]
            assert FLOOR[rooms[1]] <= FLOOR[rooms[0]], f"{module} imports {name}"
    graphlib.TopologicalSorter(graph).prepare()

"""The house has floors: a room imports what stands below it, and no module in a circle."""

import graphlib
from pathlib import Path

import pytest
from conftest import ROOT

from dev.house import ROOMS, arrows, imports, room_of

PARTICIPANTS = ("analysis_tools", "setup", "exercises", "examples")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_stands_below_it(room: str):
    needed = arrows()[room]
    assert all(ROOMS.index(other) < ROOMS.index(room) for other in needed)
    assert room not in PARTICIPANTS or not needed & {"dev", "slides", "analysis_tools", "setup"}
    assert room == "exercises" or room not in PARTICIPANTS or "scripts" not in needed


@pytest.mark.parametrize("path", sorted(ROOT.glob("tiny_*.py")), ids=lambda path: path.stem)
def test_a_script_imports_nothing_of_ours_before_a_flag_asks_for_it(path: Path):
    assert not any(map(room_of, imports(path, top=True)))


def test_fusion_lab_names_no_script_and_has_no_circle():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "fusion_lab").rglob("*.py")
    }
    graph = {module: imports(path) & modules.keys() - {module} for module, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()
    assert all(room_of(name) != "scripts" for path in modules.values() for name in imports(path))

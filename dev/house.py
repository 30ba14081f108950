"""The rooms of this repository and what each imports, read from the code.

A room is a folder of programs, or a floor of fusion_lab: the modules that may import each other. A
room imports what stands below it. tests/test_imports.py holds that; docs/figures/house.svg shows
it (dev/draw_figures.py).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from fusion_lab.files import ROOT

FLOORS = {  # of fusion_lab, the lowest first: modules and folders
    "ground": ("host", "files", "cli", "show"),
    "measure": (
        *("turns", "graph_turns", "study", "sweep", "batch_size", "records", "runs", "plot"),
        *("provenance", "script"),
    ),
    "check": ("accuracy", "modes"),
    "profile": ("profile",),
    "rocm": ("rocm",),
    "fusions": ("fusions",),
    "amd": ("amd",),
}
PROGRAMS = ("analysis_tools", "setup", "examples", "exercises", "dev", "slides")  # above them
ROOMS = ("scripts", *FLOORS, *PROGRAMS)
FLOOR_OF = {module: floor for floor, modules in FLOORS.items() for module in modules}


def room_of(module: str) -> str | None:
    """Return the room of a module by its full name; None where it is not ours."""
    top, _, rest = module.partition(".")
    if top == "fusion_lab":
        return FLOOR_OF.get(rest.partition(".")[0])
    return "scripts" if top.startswith("tiny_") else top if top in PROGRAMS else None


def imports(path: Path, top: bool = False) -> set[str]:
    """Return what a file imports; `top`: as soon as it is imported itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def files() -> Iterator[tuple[str, Path]]:
    """Yield each file with its room."""
    for path in sorted(ROOT.glob("tiny_*.py")):
        yield "scripts", path
    for top in ("fusion_lab", *PROGRAMS):
        for path in sorted((ROOT / top).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if room := room_of(module):
                yield room, path


def arrows() -> dict[str, set[str]]:
    """Return the other rooms from which each room imports."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for room, path in files():
        needed = map(room_of, imports(path, top=room == "scripts"))
        found[room] |= {other for other in needed if other not in (None, room)}
    return found

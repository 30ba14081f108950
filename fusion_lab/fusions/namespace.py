"""What `python FILE.py` would give to a user's file: its folder on the path, its command line, and
modules of which none is hidden by one of ours."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType

from fusion_lab.files import ROOT
from fusion_lab.script import import_file

# Where our modules were found, if on the path: those of a clone. Installed, fusion_lab lies beside
# the user's own packages.
OURS = (str(ROOT), str(ROOT / "analysis_tools")) if (ROOT / "pyproject.toml").exists() else ()


def find_runs(module: ModuleType) -> str:
    """The folder of the path in which a module was found; "" of one that lies in none."""
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None) or ""]
    return os.path.dirname(os.path.realpath(places[0])) if places[0] else ""


class Namespace:
    """The path, command line and modules of a user's file, in place while its code runs: `with
    namespace:`. What the file changes of them stays changed for it, and for nobody else."""

    def __init__(self, file: str, argv: Sequence[str] = ()):
        self.file = Path(file).resolve()
        others = [place for place in sys.path if os.path.realpath(place) not in OURS]
        self.path, self.argv = [str(self.file.parent), *others], [file, *argv]
        self.modules: dict[str, ModuleType] = {}  # those that have a name of ours, and its own main
        tops = {name for name in sys.modules if "." not in name} - {"__main__"}
        self.taken = {name for name in tops if find_runs(sys.modules[name]) in OURS}
        self.kept: list = []
        with self:
            self.taken -= {name for name in self.taken if self.finds_ours(name)}

    def finds_ours(self, name: str) -> bool:
        """Does the user's path lead to our module of this name, too?"""
        spec = importlib.util.find_spec(name)
        ours = self.kept[-1][name]
        return spec is not None and spec.origin == getattr(ours, "__file__", None)

    def swap(self, modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
        """Put modules in the place of those with a taken name; returns these."""
        names = [n for n in sys.modules if n == "__main__" or n.partition(".")[0] in self.taken]
        before = {name: sys.modules.pop(name) for name in names}
        sys.modules.update(modules)
        return before

    def __enter__(self) -> None:
        self.kept = [sys.path[:], sys.argv, self.swap(self.modules)]
        sys.modules.setdefault("__main__", self.kept[-1]["__main__"])
        sys.path[:], sys.argv = self.path, self.argv

    def __exit__(self, *error: object) -> None:
        self.path, self.argv = sys.path[:], sys.argv
        sys.path[:], sys.argv, ours = self.kept
        self.modules = self.swap(ours)

    def around(self, function: Callable) -> Callable:
        """The same function, run in this namespace."""

        @wraps(function)
        def run(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return run

    def run(self) -> ModuleType:
        """The file, imported under its own name as its own main module: what was pickled in a run
        of it finds its classes, and workers that are spawned begin with it."""
        name = self.file.stem
        with self:
            if name in sys.modules or name in sys.stdlib_module_names:
                name = f"{name} of the user"
            return import_file(self.file, name, "__main__")

"""Checksums that tell of which kernel a result is: of its source, and of the machine code that it
became. A result of another is stale, and must not stand for it."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from pathlib import Path

from fusion_lab.files import ROOT

# of the text that LLVM writes: what says where in the source something is, and labels of that
NO_CODE = re.compile(r"\s*(\.loc\b|\.file\b|\.Ltmp\d+:|\.Lfunc_|\.cfi_|$)")


def short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def of_code(assembly: str) -> str:
    """Of a kernel's instructions and of what the GPU is told of its start."""
    kernel = assembly.partition(".end_amdhsa_kernel")[0]
    lines = (line.partition(";")[0].rstrip() for line in kernel.splitlines())
    return short("\n".join(line for line in lines if not NO_CODE.match(line)))


def definitions(path: Path) -> dict[str, ast.stmt]:
    """What a file calls by a name: functions, constants, and those of its files that it imports."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node):
                node.body = node.body[1:]
            # block sizes belong to a launch, not to the kernel below them
            node.decorator_list = [d for d in node.decorator_list if "jit" in ast.unparse(d)]
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            for target in node.targets:  # not what a comprehension sets
                names = (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
                found |= dict.fromkeys(names, node)
        elif isinstance(node, ast.ImportFrom):
            other = ROOT / f"{(node.module or '').replace('.', '/')}.py"
            if other.is_file() and other != path:
                there = definitions(other)
                found |= {n.asname or n.name: there[n.name] for n in node.names if n.name in there}
    return found


@functools.cache
def of_kernels(path: Path) -> dict[str, str]:
    """Of each function under @triton.jit in a file, none if there is no such file: its statements,
    and those of the functions and constants that it needs. Comments and docstrings do not count."""
    known = definitions(path) if path.is_file() else {}

    def needed(name: str, seen: dict[str, str]) -> dict[str, str]:
        if name in known and name not in seen:
            seen[name] = ast.unparse(known[name])
            for node in ast.walk(known[name]):
                if isinstance(node, ast.Name):
                    needed(node.id, seen)
        return seen

    return {
        name: short("\n".join(needed(name, {}).values()))
        for name, node in known.items()
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    }


def of_program(path: Path) -> str:
    """Of all statements of a file; comments do not count."""
    return short(ast.unparse(ast.parse(path.read_text(encoding="utf-8"))))

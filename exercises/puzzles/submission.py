"""What a checker takes of a file that a reader wrote: its kernels, and no other code.

Leaderboards list times that no kernel had: of outputs kept from an earlier call, PyTorch called in
the wrapper, a patched clock or checker, work left on another stream. All of that is Python around a
kernel. So a file is looked at before it is imported, and refused unless all of it but the kernels
is as it was given. And a kernel is Triton and nothing else: other Python in it would run while it
is compiled or interpreted.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch

from exercises.explain import explained

GIVEN = {  # `fingerprint` of each file as it was given
    "puzzle_01_add": "2e26d95c56c89690",
    "puzzle_02_mask": "b275f25608d5d017",
    "puzzle_03_row_sum": "9ab8161beda88b20",
    "puzzle_04_softmax": "0850c2c332ea4910",
    "puzzle_05_rms_norm": "2cece9589e84e37c",
    "puzzle_06_rms_norm_backward": "9bd5a9473cd04594",
    "puzzle_07_swiglu": "79c3802394a9fd9b",
    "puzzle_08_matmul": "43b9ee02aa6f4e76",
    "puzzle_09_matmul_bias_relu": "4be02130155e865b",
    "puzzle_10_online_softmax": "2674da69b20fcfa0",
    "puzzle_11_flash_attention": "650d830d26e4601e",
    "puzzle_12_bias_gradient": "dea22160884057b6",
    "swiglu_backward": "85a7dc6f42414169",
}
BUILTINS = {"abs", "bool", "float", "int", "len", "max", "min", "print", "range", "sum"}
OF_TRITON = {"cdiv", "language", "next_power_of_2"}
OTHER_PYTHON = (
    ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.ClassDef, ast.FunctionDef,
    ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.Yield, ast.YieldFrom, ast.Try, ast.With,
)  # fmt: skip


# --- the file


def is_kernel(node: ast.AST) -> bool:
    """A function with @triton.jit, forgotten or not, whose definition runs nothing else."""
    if not isinstance(node, ast.FunctionDef):
        return False
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    annotations = [argument.annotation for argument in arguments if argument.annotation]
    defaults = [value for value in (*node.args.defaults, *node.args.kw_defaults) if value]
    return (
        (decorators == ["triton.jit"] or (not decorators and node.name.endswith("_kernel")))
        and all(ast.unparse(annotation) == "tl.constexpr" for annotation in annotations)
        and all(isinstance(value, ast.Constant) for value in defaults)
        and node.returns is None
    )


def names_set(nodes: list[ast.stmt]) -> Iterator[str]:
    """What statements define, and all names of Python."""
    yield from dir(builtins)
    for node in itertools.chain.from_iterable(map(ast.walk, nodes)):
        if isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and is_store(node):
            yield node.id


def launches(node: ast.AST, kernels: set[str]) -> bool:
    """Is it kernel[grid](...)?"""
    subscript = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    return subscript and getattr(node.func.value, "id", "") in kernels


def structure(node: object) -> object:
    """A syntax tree as nested lists, without what is empty: some only newer Pythons have."""
    if isinstance(node, list):
        return [structure(one) for one in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [field for field in ast.iter_fields(node) if field[1] is not None and field[1] != []]
    return [type(node).__name__, [(name, structure(value)) for name, value in fields]]


def fingerprint(text: str) -> str:
    """Of a file without its kernels, comments and docstring, and the numbers of its launch."""
    body = ast.parse(text).body
    kernels = {node.name for node in body if is_kernel(node)}
    rest = [node for node in body if not is_kernel(node)] or [ast.Pass()]
    if isinstance(rest[0], ast.Expr) and isinstance(rest[0].value, ast.Constant):
        rest = rest[1:]  # the docstring
    if kernels & {*names_set(rest)}:
        return "a kernel takes the place of something else"
    for node in rest:
        parts = [*ast.walk(node)]
        if isinstance(node, ast.FunctionDef) and any(launches(part, kernels) for part in parts):
            for part in parts:
                if isinstance(part, ast.Constant) and isinstance(part.value, int | float):
                    part.value = 0
    return hashlib.sha256(repr(structure(rest)).encode()).hexdigest()[:16]


def why_not_taken(path: Path) -> str:
    """Why a file is not imported, or nothing."""
    if fingerprint(path.read_text()) == GIVEN.get(path.stem):
        return ""
    return (
        f"{path.name} is not as it was given outside of its kernels (`git diff` shows where): "
        "yours are the functions with @triton.jit and the numbers of the launch"
    )


# --- the kernels


def foreign(kernel: Callable) -> str:
    """The first thing in a kernel that is not Triton's: 'line 12: ' and what it is, or nothing."""
    lines, first = inspect.getsourcelines(kernel)
    definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    nodes = [node for statement in definition.body for node in ast.walk(statement)]
    own = {node.id for node in nodes if isinstance(node, ast.Name) and is_store(node)}
    own |= {node.arg for node in ast.walk(definition.args) if isinstance(node, ast.arg)}
    scope = {**vars(builtins), **kernel.__globals__}
    scope = {name: value for name, value in scope.items() if name not in own}
    roots = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if said := not_of_triton(node, scope, id(node) in roots):
            return f"line {first + node.lineno - 1}: {said}"
    return ""


def is_store(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def not_of_triton(node: ast.AST, scope: dict[str, object], is_root: bool) -> str:
    """What is wrong with a node, or nothing. `scope`: values of names that the kernel does not set;
    `is_root`: is it what stands before a dot?"""
    if isinstance(node, OTHER_PYTHON):
        return f"a kernel has no `{ast.unparse(node).splitlines()[0]}`: it is Triton, not Python"
    if not isinstance(node, ast.Name | ast.Attribute) or isinstance(node.ctx, ast.Store):
        return ""
    text, value = ast.unparse(node), value_of(node, scope)
    if isinstance(node, ast.Attribute) and not isinstance(value_of(node.value, scope), ModuleType):
        return "" if node.attr in attributes_of_blocks() else no_attribute(node.attr)
    if value is None:  # not known: Triton says so
        return ""
    if isinstance(value, torch.dtype):
        return explained(TypeError("'torch.dtype' object"), set())
    if isinstance(value, ModuleType):
        name = value.__name__
        allowed = is_root and (name == "triton" or name.startswith("triton.language"))
    elif isinstance(node, ast.Name):
        allowed = node.id in BUILTINS or hasattr(value, "fn") or is_constexpr(value)
    elif value_of(node.value, scope).__name__ == "triton":
        allowed = node.attr in OF_TRITON
    else:
        module = getattr(value, "__module__", type(value).__module__)
        allowed = not node.attr.startswith("_") and module.startswith("triton")
    return "" if allowed else f"`{text}` is not of Triton's language, tl"


def value_of(node: ast.expr, scope: dict[str, object]) -> object:
    """What a name or a name in a module stands for; None if that is not known."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        module = value_of(node.value, scope)
        return getattr(module, node.attr, None) if isinstance(module, ModuleType) else None
    return None


def is_constexpr(value: object) -> bool:
    return type(value).__name__ == "constexpr"


def attributes_of_blocks() -> set[str]:
    """Names that may stand behind the dot of a block, an address or a dtype."""
    import triton.language as tl

    types = tl.tensor, tl.dtype, tl.pointer_type, tl.constexpr
    public = {name for one in types for name in dir(one) if not name.startswith("_")}
    return public - {"handle"} | {"dtype", "element_ty", "shape", "type", "value"}


def no_attribute(name: str) -> str:
    """What is said of a block that has no such attribute."""
    return explained(AttributeError(f"'tensor' object has no attribute '{name}'"), set())

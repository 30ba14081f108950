"""What a mistake in a kernel means and what to do next, in one sentence: shared by all checkers.

Triton's interpreter and its compiler answer the same mistake with different errors, and the
interpreter lets some pass. Here both lead to the same sentence.
"""

import ast
import contextlib
import difflib
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
from torch import Tensor

from exercises.memory import BEYOND, RACE, Memory
from fusion_lab.cli import ToolError

CONDITION = "Boolean value of Tensor with more than one value is ambiguous"  # as the compiler says
PRECEDENCE = "& is applied before <: write (a < b) & (c < d)"
HELPER = "{} is a function of Python: @triton.jit above its `def` makes it one for kernels"
MODULE = "PyTorch, numpy and math do not work on blocks: take the function from tl, as in tl.exp(x)"
IN_16_BITS = "`{}` begins in 16 bits, and loses a digit at each step: add up in float32"
PRINT = 'print in a kernel takes a fixed text and then the blocks: print("x", x)'
GLOBAL = "`{}` is a global variable: pass it as an argument (a function needs @triton.jit)"
OTHER_PYTHON = (
    ast.Import | ast.ImportFrom | ast.Global | ast.ClassDef | ast.FunctionDef | ast.Lambda
    | ast.GeneratorExp | ast.ListComp | ast.DictComp | ast.Try | ast.With
)  # fmt: skip
PYTHON = "a kernel has no `{}`: it is Triton, not Python"
RETURN = "a kernel returns nothing: tl.store(OUT + at, value) writes the result"
BUILTIN = (
    "Python's own sum, max and min do not work on blocks: tl.sum(x, 0) and tl.max(x, 0) "
    "reduce one, tl.maximum(a, b) takes two"
)


# How a mistake is answered, by a pattern in 'TypeError: the first line of the message' or that and
# one in the line of code: what to say. Groups of the first pattern fill the {} of the sentence.
MISTAKES = {
    "ambiguous|Ternary expression with dynamic": (
        "a condition must be one truth value, and this is a block of them: use a mask or "
        "tl.where(condition, a, b), and `&` in place of `and`"
    ),
    BEYOND: (
        "this goes beyond the end of a tensor: give it a mask, such as at < n; or is a stride "
        "wrong?"
    ),
    RACE: (
        "this is a race: another program stores there, too, and programs run in any order; is a "
        "mask missing, or a stride wrong? If all add up, give each a place of its own"
    ),
    "'function' object": "@triton.jit is missing in the line above `def`",
    "'torch.dtype' object": "in a kernel a dtype is tl.float32, not torch.float32",
    ("", r"(?<![\w.])(sum|max|min)\((?!.*,.*\))"): BUILTIN,
    "Unsupported function referenced": MODULE,
    ("", r"(?<![\w.])(torch|np|numpy|math)\.\w+\("): MODULE,
    ("AssertionError: *$|pointer|cast", r"tl\.rand"): (
        "a seed is a number, and SEED an address: tl.rand(tl.load(SEED), numbers)"
    ),
    ("TypeError|AttributeError|ValueError", r"(?<![\w.])(float|int)\((?!['\"])"): (
        "float() and int() take one number: x.to(tl.float32) converts a block"
    ),
    "item assignment|__setitem__": (
        "no element of a block can be set: tl.where(condition, a, b) chooses element by element, "
        "and tl.store(OUT + at, value) writes to memory"
    ),
    (
        "not iterable|forget to add @triton.jit|unsupported tensor index|not subscriptable",
        r"\w\[(?!:|None)",
    ): (
        "X is an address, not a tensor: tl.load(X + at) reads numbers, tl.store(OUT + at, value) "
        "writes them"
    ),
    "add pointers together": "X and Y are addresses: tl.load(X + at) has the numbers",
    r"cannot cast (pointer|\[\d)": (
        "this stores addresses: tl.load(X + at) has the numbers that stand there"
    ),
    "[Uu]nsupported ptr type .*tl.load": (
        "tl.load takes addresses, X + at, and what it is given here are numbers"
    ),
    "[Uu]nsupported ptr type .*tl.store": (
        "tl.store takes first the addresses and then the values: tl.store(OUT + at, value)"
    ),
    "invalid operands of type pointer": (
        "an address moves by whole numbers only: `//` divides them, `/` gives a fraction"
    ),
    "program_id axis": "a grid has the axes 0, 1 and 2",
    "must be a power of 2": (
        "the size of a block is a power of two: take the next larger one, and a mask"
    ),
    "must be of type tl.constexpr": (
        "a block's size must be known when the kernel is compiled: write BLOCK: tl.constexpr among"
        " the arguments, unless it is there. tl.arange(0, BLOCK) with a mask leaves out what lies"
        " beyond; a number that is known later is added, start + tl.arange(0, BLOCK)"
    ),
    r"arange\(\) missing": "tl.arange needs both ends: tl.arange(0, BLOCK)",
    "'range' object": "range is for loops: tl.arange(0, BLOCK) is a block of numbers",
    "[Mm]ask must have bool": "a mask is a block of true and false, such as at < n",
    "`other` cannot be": "`other` stands where the mask is false: give it a mask= as well",
    "[Mm]ask argument cannot be block": (
        "addresses are one sum, tl.load(X + at): what follows a comma is the mask"
    ),
    r"axis -?\d+ out of bounds|invalid axis": (
        "the block has no such axis: its first is 0, and [rows, columns] has a second, 1"
    ),
    "[Vv]alue argument cannot be block": (
        "a block of values needs a block of addresses: OUT + at, or reduce it, tl.sum(x, 0)"
    ),
    (
        "IndexError|no len|has no attribute",
        r"^(?!.*\w\[.*\]\().*(\.(shape|stride|size|numel)\b|len\()",
    ): ("an address knows neither shape nor strides: pass the sizes to the kernel as arguments"),
    "has no attribute '(float|half|long|int|double)'": (
        ".{}() is PyTorch's: x.to(tl.float32) converts a block"
    ),
    "attribute 'mean'": "Triton has no mean: tl.sum(x, 0) / C, with C the real size",
    "'tensor' object has no attribute '(\\w+)'": "a block is no tensor and has no .{}()",
    "local variable '(\\w+)'": "`{}` gets a value in one branch only: give it one before the `if`",
    r"global variable (\w+)": GLOBAL,
    "NameError.*?'?(\\w+)'? is not defined": (
        "`{}` is not known here: a kernel has its arguments, the variables set before on every "
        "way, tl, and other functions with @triton.jit"
    ),
    r"\*\*": "there is no ** for blocks: x * x is the square, tl.sqrt(x) the root",
    "for @|MatMult": "the product of two tiles is tl.dot(a, b)",
    "argument: '?dtype": "tl.zeros needs a shape and a dtype: tl.zeros((BLOCK,), tl.float32)",
    "accumulator shape": "the third argument of tl.dot is a tile [M, N]: begin it with tl.zeros",
    ("AssertionError: *$", r"tl\.dot"): (  # of Triton 3.7 and older, without a word
        "the third argument of tl.dot is a tile [M, N]: begin it with tl.zeros, and add up in "
        "float32"
    ),
    "equal ranks >= 2|must be either 2D|inputs must be 2D": (
        "tl.dot takes tiles with two axes: their addresses are of the form m[:, None] * K + "
        "k[None, :]"
    ),
    "should have M|K >= 16": (
        "tl.dot takes tiles with at least 16 elements along each axis: make the blocks larger"
    ),
    (
        "[Ff]irst input shape|[Rr]eduction dimension|incompatible dimensions at index -?[12]",
        "dot",
    ): ("the second axis of the first tile must be the first of the second one: [M, K] and [K, N]"),
    "incompatible|broadcast|must be compatible|make_shape": (
        "blocks of different sizes do not go together: give each an axis of its own, m[:, None] "
        "and n[None, :]"
    ),
    "Loop-carried variable (\\w+)": (
        "`{}` changes its type or shape in the loop: begin it with that of the sum, as "
        "tl.zeros((BLOCK,), tl.float32)"
    ),
    r"Expected dtype \['fp32'": (
        "exp, log, sqrt and sigmoid take float32: convert behind the load, .to(tl.float32)"
    ),
    "unexpected type fp": "`//` and `%` are for whole numbers: `/` divides fractions",
    "argument 'dim'": "the argument is called axis, not dim",
    r"store\(\) missing": "tl.store(OUT + at, value) needs addresses and values",
    r"where\(\) missing": "tl.where(condition, a, b) needs both values",
    "is not string|f-string": PRINT,
    "outside of the scope of a kernel|missing .* 'grid'|argument 'num_warps'": (
        "a kernel is launched with its grid: kernel[(programs,)](x, out, ...)"
    ),
    ("grid|object of type 'int' has no len|'int' and 'tuple'", r"\w\[.*\]\("): (
        "the grid is a tuple, one number of programs for each axis: kernel[(programs,)](...)"
    ),
    r"number of gradients \(expected (\d+), got (\d+)": (
        "backward returns {1} values for the {0} arguments of forward: None for those without a "
        "gradient"
    ),
    ("missing .*argument|unexpected keyword|multiple values|got an unexpected", r"\w\[.*\]\("): (
        "the launch must name each argument of the kernel once, in its order"
    ),
    "only 0-dimensional arrays": (
        "Triton older than 3.7 does not know NumPy 2.4: python -m pip install 'numpy<2.4'"
    ),
}


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    while error:
        yield error
        error = error.__cause__


def place_of(error: BaseException, files: set[str]) -> tuple[str, str]:
    """Where in these files it happened, 'line 12: ' or nothing, and that line."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: ", error.text or ""
    for one in causes(error):
        if hasattr(one, "node") and hasattr(one, "src"):  # of Triton's compiler
            lines = (one.src or "").splitlines()[one.node.lineno - 1 : one.node.lineno]
            return f"`{''.join(lines).strip()}`: ", "".join(lines)
    frames = [
        frame
        for one in causes(error)
        for frame in traceback.extract_tb(one.__traceback__)
        if frame.filename in files
    ]
    return (f"line {frames[-1].lineno}: ", frames[-1].line or "") if frames else ("", "")


def message_of(error: BaseException) -> str:
    """'TypeError: ' and what is said of it, in a line."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}"
    *_, first = causes(error)
    name, lines = type(first).__name__, str(first).splitlines() or [""]
    # a compiler's error quotes the code first, and names the error that it comes from
    return lines[-1] if hasattr(first, "src") else f"{name}: {lines[0]}"


def explained(error: BaseException, files: set[str]) -> str:
    """An error in what the reader wrote, in these files, as one line: the place, the mistake and
    the next step; of an error that is not known here, what Python says."""
    where, code = place_of(error, files)
    message = message_of(error)
    code = code.partition("#")[0]
    if unknown := re.search(r"module 'triton.language' has no attribute '(\w+)'", message):
        return where + unknown_function(unknown[1])
    for pattern, sentence in () if isinstance(error, SyntaxError) else MISTAKES.items():
        raised, in_code = (pattern, "") if isinstance(pattern, str) else pattern
        found = re.search(raised, message)
        if found and re.search(in_code, code):
            return where + sentence.format(*found.groups())
    return where + message


def unknown_function(name: str) -> str:
    """What to call in place of tl.name."""
    if name == "mean":
        return "Triton has no mean: tl.sum(x, 0) / C, with C the real size"
    import triton.language as tl

    near = difflib.get_close_matches(name, dir(tl), 1)
    return f"there is no tl.{name}" + (f": did you mean tl.{near[0]}?" if near else "")


def visible_mistake(function: Callable) -> str:
    """What can be seen in the code of a kernel, and the interpreter takes: 'line 12: ' and the next
    step, or nothing."""
    lines, first = inspect.getsourcelines(function)
    definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    names = [node for node in ast.walk(definition) if isinstance(node, ast.Name)]
    own = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    own |= {argument.arg for argument in definition.args.args}
    loops = [node for node in ast.walk(definition) if isinstance(node, ast.For)]
    in_loops = [name for loop in loops for name in ast.walk(loop) if isinstance(name, ast.Name)]
    changed = {name.id for name in in_loops if isinstance(name.ctx, ast.Store)}
    for statement in definition.body:
        for node in ast.walk(statement):
            if sentence := seen_in(node, function, own) or seen_in_sum(node, changed):
                return f"line {first + node.lineno - 1}: {sentence}"
    return ""


def seen_in_sum(node: ast.AST, changed: set[str]) -> str:
    """What is wrong with the first value of a variable that a loop changes, or nothing."""
    match node:
        case ast.Assign([ast.Name(name)], value) if name in changed:
            in_16_bits = re.search(r"tl\.(zeros|full)\(.*tl\.b?float16", ast.unparse(value))
            return IN_16_BITS.format(name) if in_16_bits else ""
    return ""


def seen_in(node: ast.AST, kernel: Callable, own: set[str]) -> str:
    """What is wrong with this node of a kernel with these variables, or nothing."""
    match node:
        case _ if isinstance(node, OTHER_PYTHON):
            return PYTHON.format(ast.unparse(node).splitlines()[0])
        case ast.Return(value=ast.AST()) if kernel.__name__.endswith("_kernel"):
            return RETURN
        case ast.Compare(ops=[_, _, *_]) if any(
            isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitAnd)
            for part in node.comparators
        ):
            return PRECEDENCE
        case ast.Call(func=ast.Name("print"), args=[first, *_]):
            return "" if isinstance(first, ast.Constant) else PRINT
        case ast.Call(func=ast.Name("sum" | "max" | "min"), args=[_]):
            return BUILTIN
        case ast.Call(func=ast.Name(name)) if inspect.isfunction(kernel.__globals__.get(name)):
            return HELPER.format(name)
        case ast.Call(func=ast.Attribute(value=ast.Name(name))) if name not in own:
            module = kernel.__globals__.get(name)
            foreign = isinstance(module, ModuleType) and not module.__name__.startswith("triton")
            return MODULE if foreign else ""
        case ast.Name(name, ast.Load()) if name not in own:
            value = kernel.__globals__.get(name)
            return GLOBAL.format(name) if isinstance(value, int | float | str | Tensor) else ""
    return ""


def kernels_of(module: ModuleType) -> list[Callable]:
    """The functions with @triton.jit that a module defines."""
    functions = [getattr(value, "fn", None) for value in vars(module).values()]
    return [f for f in functions if getattr(f, "__module__", None) == module.__name__]


@contextlib.contextmanager
def explaining(file: Path, *kernels: Callable) -> Iterator[Memory]:
    """ToolError, in one line, for an error in this file, which the reader wrote, and for what can
    be seen in its kernels. What is still to be written stays a NotImplementedError."""
    for kernel in kernels:
        if text := visible_mistake(kernel):
            raise ToolError(text, status=1)
    try:
        with strictly_interpreted() as memory:
            yield memory
    except ToolError as error:
        if "NaN" in str(error) and memory.without_other:
            text = f"{memory.without_other} loads without `other`: does it reach the result?"
            raise ToolError(f"{error}; {text}", error.status) from error
        raise
    except NotImplementedError:
        raise
    except Exception as error:
        text = explained(error, {str(file)})
        if text == message_of(error):
            raise  # neither in the file nor known: the tool's own fault
        raise ToolError(text, status=1) from error


@contextlib.contextmanager
def strictly_interpreted() -> Iterator[Memory]:
    """Let Triton's interpreter refuse what its compiler refuses, a block as a condition, and tiles
    for tl.dot that are too small; addresses beyond the tensors, which would crash it; races."""
    import triton
    from triton.runtime import interpreter

    own = str(Path(triton.__file__).parent)  # which asks for it, too: is there a mask?
    patch_tensor = interpreter._patch_lang_tensor

    def one_truth_value(self) -> bool:
        if self.handle.data.size == 1:
            return bool(self.handle.data)
        if sys._getframe(1).f_code.co_filename.startswith(own):
            return True
        raise ValueError(CONDITION)

    def patched(tensor: type, *scope: object) -> None:
        patch_tensor(tensor, *scope)
        tensor.__bool__ = one_truth_value

    sizes = {"min_dot_size": lambda *types: (1, 1, 16)}
    with (
        np.errstate(all="ignore"),  # NaN and inf are looked for in results
        Memory().watched(interpreter) as memory,
        mock.patch.object(interpreter, "_patch_lang_tensor", patched),
        mock.patch.dict(interpreter.interpreter_builder.codegen_fns, sizes),
    ):
        yield memory

"""Mistakes of beginners, a table: the wrong code, and the sentence that names it and the next step.

Most were taken from public questions about Triton. Each is a solution of a puzzle with some words
replaced. Triton's interpreter runs them all; those that its compiler refuses are compiled as well,
for a GPU that need not be there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT, captured

from lab.explain import explaining, pattern
from lab.files import read_json
from lab.script import import_file

FILES = sorted((ROOT / "exercises/puzzles").glob("puzzle_*.py"))
ADDRESS = "X is an address, not a tensor: tl.load(X + at) reads numbers"
SIZE = "a block's size must be known when the kernel is compiled: write BLOCK: tl.constexpr"
CONDITION = "a condition must be one truth value, and this is a block of them: use a mask"
FOREIGN = "PyTorch, numpy and math do not work on blocks: take the function from tl"
SIZES = "an address knows neither shape nor strides: pass the sizes to the kernel as arguments"
BUILTIN = "Python's own sum, max and min do not work on blocks: tl.sum(x, 0)"
BROADCAST = "blocks of different sizes do not go together: give each an axis of its own"
PRINT = 'print in a kernel takes a fixed text and then the blocks: print("x", x)'
GRID = "both wrote out[{}]: a program begins at tl.program_id(axis) * BLOCK"
TRITON, LOADS = "import triton\n", "tl.load(X + at) + tl.load(Y + at)"


class Mistake(NamedTuple):
    """`code` is what stands in the solution of a puzzle, what is put in its place, and so on."""

    puzzle: int
    code: tuple[str, ...]
    sentence: str
    compiled: bool = False  # is it refused, with this sentence, by the compiler, too?


MISTAKES = {
    # addresses
    "index": Mistake(1, (f"tl.store(OUT + at, {LOADS})", "OUT[at] = X[at] + Y[at]"), ADDRESS, True),
    "index read": Mistake(1, (LOADS, "X[at] + Y[at]"), ADDRESS, True),
    "add addresses": Mistake(1, (LOADS, "X + Y"), "X and Y are addresses: tl.load(X + at)", True),
    "store addresses": Mistake(
        1, (LOADS, "X + at"), "this stores addresses: tl.load(X + at)", True
    ),
    "load twice": Mistake(1, ("tl.load(X + at)", "tl.load(tl.load(X + at))"), "are numbers", True),
    "divide address": Mistake(
        1, ("* BLOCK +", "* BLOCK / 1 +"), "`//` divides them, `/` gives a fraction", True
    ),
    "store turned": Mistake(
        3, ("OUT + row, tl.sum(x, 0)", "tl.sum(x, 0), OUT + row"), "first the addresses", True
    ),
    "store without value": Mistake(
        3, ("OUT + row, tl.sum(x, 0)", "OUT + row"), "needs addresses and values", True
    ),
    "comma for plus": Mistake(
        3,
        ("tl.load(X + row * C + column, mask=column < C, other=0.0)", "tl.load(X, column)"),
        "addresses are one sum, tl.load(X + at): what follows a comma is the mask",
        True,
    ),
    "shape": Mistake(3, ("row * C", "row * X.shape[1]"), SIZES, True),
    "stride": Mistake(3, ("row * C", "row * X.stride(0)"), SIZES, True),
    "len": Mistake(2, ("at < n", "at < len(X)"), SIZES, True),
    # which program, which block
    "no program": Mistake(1, ("tl.program_id(0) * BLOCK + ", ""), GRID.format(0)),
    "wrong axis of grid": Mistake(1, ("program_id(0)", "program_id(1)"), GRID.format(0)),
    "no BLOCK": Mistake(1, ("tl.program_id(0) * BLOCK", "tl.program_id(0)"), GRID.format(1)),
    "axis 3": Mistake(1, ("program_id(0)", "program_id(3)"), "axes 0, 1 and 2", True),
    "half": Mistake(1, ("(0, BLOCK)", "(0, BLOCK // 2)"), "is the block whole, is the grid large"),
    "one end": Mistake(1, ("(0, BLOCK)", "(BLOCK)"), "needs both ends: tl.arange(0, BLOCK)", True),
    "no power": Mistake(1, ("(0, BLOCK)", "(0, BLOCK - 1)"), "block is a power of two", True),
    "arange n": Mistake(2, ("(0, BLOCK)", "(0, n)"), SIZE, True),
    "no constexpr": Mistake(1, ("BLOCK: tl.constexpr", "BLOCK"), SIZE, True),
    "range": Mistake(1, ("tl.arange", "range"), "range is for loops: tl.arange(0, BLOCK)", True),
    "no jit": Mistake(1, ("@triton.jit\n", ""), "@triton.jit is missing in the line above"),
    # masks and conditions
    "if": Mistake(2, ("    tl.store(", "    if at < n:\n        tl.store("), CONDITION, True),
    "while": Mistake(
        3, ("    tl.store(", "    while x > 0:\n        x -= 1\n    tl.store("), CONDITION
    ),
    "ternary": Mistake(
        2, ("tl.load(X + at, mask=inside)", "(tl.load(X + at) if at < n else 0.0)"), CONDITION, True
    ),
    "and": Mistake(7, ("[:, None] & (", "[:, None] and ("), CONDITION),
    "precedence": Mistake(
        7,
        ("(row < rows)[:, None] & (column < C)[None, :]", "row[:, None] < rows & column < C"),
        "& is applied before <: write (a < b) & (c < d)",
    ),
    "no mask, store": Mistake(2, ("x + y, mask=inside", "x + y"), "the store has no mask; give it"),
    "no mask, load": Mistake(2, ("X + at, mask=inside", "X + at"), "the load has no mask; give it"),
    "mask n": Mistake(2, ("mask=inside", "mask=n"), "a mask is a block of true and false", True),
    "mask too long": Mistake(2, ("at < n", "at <= n"), "are mask and stride those of this tensor?"),
    "mask too short": Mistake(2, ("at < n", "at < n - 1"), "its mask is false there"),
    "other alone": Mistake(3, ("mask=column < C, ", ""), "give it a mask= as well", True),
    "no other": Mistake(3, (", other=0.0", ""), "other=0.0 adds nothing to a sum"),
    "other of a maximum": Mistake(
        4, ('-float("inf")', "0.0"), "does what the mask leaves out take"
    ),
    # rows, strides, reductions
    "stride BLOCK": Mistake(3, ("row * C", "row * BLOCK"), "with 13 elements in a row?"),
    "columns first": Mistake(
        3, ("row * C + column", "row + column * C"), "with 16 elements in a row"
    ),
    "no stride": Mistake(3, ("row * C", "row"), "the first row is right and no other"),
    "half a row": Mistake(7, ("(2 * C)", "C"), "the first row is right and no other"),
    "exchanged": Mistake(
        7, ("* C + column[None, :], swiglu", "+ column[None, :] * rows, swiglu"), "are exchanged"
    ),
    "no such axis": Mistake(
        3, ("tl.sum(x, 0)", "tl.sum(x, 1)"), "the block has no such axis", True
    ),
    "dim": Mistake(4, ("tl.max(x, 0)", "tl.max(x, dim=0)"), "is called axis, not dim", True),
    "block to one address": Mistake(
        3, ("tl.sum(x, 0)", "x"), "a block of values needs a block of addresses", True
    ),
    "one axis for two": Mistake(
        7,
        ("(row < rows)[:, None] & (column < C)[None, :]", "(row < rows) & (column < C)"),
        BROADCAST,
    ),
    "element": Mistake(
        3, ("    tl.store(", "    x[0] = 0.0\n    tl.store("), "no element of a", True
    ),
    # functions that a kernel does not have
    "torch": Mistake(4, (TRITON, "import torch\n" + TRITON, "tl.exp", "torch.exp"), FOREIGN, True),
    "torch unknown": Mistake(4, ("tl.exp", "torch.exp"), FOREIGN, True),
    "math": Mistake(4, (TRITON, "import math\n" + TRITON, "tl.exp", "math.exp"), FOREIGN, True),
    "numpy": Mistake(
        4, (TRITON, "import numpy as np\n" + TRITON, "tl.exp", "np.exp"), FOREIGN, True
    ),
    "sum": Mistake(3, ("tl.sum(x, 0)", "sum(x)"), BUILTIN, True),
    "max": Mistake(4, ("tl.max(x, 0)", "max(x)"), BUILTIN, True),
    "mean": Mistake(3, ("tl.sum(x, 0)", "x.mean()"), "Triton has no mean: tl.sum(x, 0) / C", True),
    "tl.mean": Mistake(3, ("tl.sum", "tl.mean"), "Triton has no mean: tl.sum(x, 0) / C", True),
    "spelling": Mistake(3, ("tl.sum", "tl.sun"), "there is no tl.sun: did you mean tl.sum?", True),
    "unknown": Mistake(3, ("column < C", "columns < C"), "`columns` is not known here", True),
    "one branch": Mistake(
        3,
        (
            "    tl.store(",
            "    if row > 0:\n        z = 1.0\n    tl.store(",
            "(x, 0)",
            "(x, 0) + z",
        ),
        "`z` gets a value in one branch only",
    ),
    "global": Mistake(
        1, (TRITON, TRITON + "WIDTH = 8\n", "(0, BLOCK)", "(0, WIDTH)"), "`WIDTH` is a global", True
    ),
    "helper": Mistake(
        4,
        (
            "tl.exp(x",
            "stable(x",
            "@triton.jit",
            "def stable(x):\n    return tl.exp(x)\n\n\n@triton.jit",
        ),
        "stable is a function of Python: @triton.jit above its `def`",
    ),
    "return": Mistake(
        3, ("tl.store(OUT + row, tl.sum(x, 0))", "return tl.sum(x, 0)"), "a kernel returns nothing"
    ),
    "print": Mistake(3, ("    tl.store(", "    print(x)\n    tl.store("), PRINT, True),
    "f-string": Mistake(3, ("    tl.store(", '    print(f"{x}")\n    tl.store('), PRINT, True),
    # types
    "float()": Mistake(
        4,
        ("tl.load(X", "float(tl.load(X", '"inf"))', '"inf")))'),
        "float() and int() take one",
        True,
    ),
    ".float()": Mistake(5, (".to(tl.float32)", ".float()"), ".float() is PyTorch's", True),
    "torch.float32": Mistake(
        5,
        (TRITON, "import torch\n" + TRITON, "tl.float32", "torch.float32"),
        "tl.float32, not",
        True,
    ),
    "power": Mistake(5, ("x * x", "x ** 2"), "there is no ** for blocks: x * x", True),
    "//": Mistake(5, ("/ C + eps", "// C + eps"), "are for whole numbers: `/` divides", True),
    "16 bits": Mistake(5, ("other=0.0).to(tl.float32)", "other=0.0)"), "directly behind the load"),
    "sum in 16 bits": Mistake(8, ("N), tl.float32", "N), tl.float16"), "add up in float32"),
    # tiles
    "@": Mistake(8, ("total = tl.dot(a, b, total)", "total += a @ b"), "is tl.dot(a, b)", True),
    "no tile": Mistake(
        8, ("m[:, None] * K + k[None, :]", "m * K + k"), "tiles with two axes", True
    ),
    "no dtype": Mistake(8, (", BLOCK_N), tl.float32", ", BLOCK_N)"), "a shape and a dtype", True),
    "begin with 0": Mistake(
        8,
        ("tl.zeros((BLOCK_M, BLOCK_N), tl.float32)", "0.0"),
        "is a tile [M, N]: begin it with",
        True,
    ),
    # values
    "not stable": Mistake(4, ("x - tl.max(x, 0)", "x"), "is there inf - inf, inf / inf or 0 / 0?"),
    "sign": Mistake(4, ("e / tl", "-e / tl"), "each is -1 times what it should be"),
    "zero": Mistake(4, ("e / tl", "0.0 * e / tl"), "all is 0: does the result reach the store?"),
    "another formula": Mistake(
        7, ("X + at + C", "X + at + 1"), "compare the code with the formula"
    ),
    # who owns what
    "race": Mistake(6, ("PARTS + program * C", "PARTS"), "its number must be part of the address"),
    "atomic": Mistake(3, ("tl.store(", "tl.atomic_add("), "write to a place of its own"),
}


@pytest.fixture(scope="module")
def checker():
    """The module, in the interpreter: it asks for that when it is imported."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles in this process")
    from exercises.puzzles import checker

    return checker


def write(checker, mistake: Mistake, file: Path):
    """The puzzle with the mistake in place of its kernel, which is written to this file."""
    puzzle = checker.load(FILES[mistake.puzzle - 1]).PUZZLE
    text = checker.solution_of(puzzle).read_text()
    for old, new in zip(mistake.code[::2], mistake.code[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    checker.use_kernels_of(puzzle, file)
    return puzzle


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained_in_one_sentence(checker, name, tmp_path):
    mistake = MISTAKES[name]
    right, text, _ = checker.verdict(write(checker, mistake, tmp_path / "wrong.py"))
    assert not right
    assert mistake.sentence in text
    assert len(text.splitlines()) == 1


# Compiles each file for an H100, as far as it gets, and prints what is said of it.
COMPILE = """
import json, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lab.explain import explained
from lab.script import import_file

for name, file in json.load(sys.stdin).items():
    try:
        [kernel] = [v for v in vars(import_file(Path(file))).values() if hasattr(v, "params")]
        tile = "BLOCK_K" in kernel.arg_names
        sizes = {"n", "rows", "M", "N", "K"} | ({"C"} if not tile else set())
        signature, constants = {}, {}
        for number, parameter in enumerate(kernel.params):
            kind = "i32" if parameter.name in sizes | {"BLOCK"} else "*fp16" if tile else "*fp32"
            signature[parameter.name] = "fp32" if parameter.name == "eps" else kind
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[(number,)] = 16
        source = ASTSource(kernel, signature, constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(json.dumps([name, "it compiles"]))
    except Exception as error:
        print(json.dumps([name, explained(error, {file})]))
"""


def test_the_compiler_gets_the_same_sentences(checker, tmp_path):
    files = {}
    for number, (name, mistake) in enumerate(MISTAKES.items()):
        if mistake.compiled:
            files[name] = str(tmp_path / f"wrong_{number}.py")
            write(checker, mistake, Path(files[name]))
    settings = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(files),
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    said = dict(map(json.loads, done.stdout.splitlines()))
    assert said.keys() == files.keys(), done.stderr
    assert {name: text for name, text in said.items() if MISTAKES[name].sentence not in text} == {}
    assert all(len(text.splitlines()) == 1 for text in said.values())


def test_a_tile_that_is_too_small_for_the_compiler_is_so_in_the_interpreter(checker):
    puzzle = checker.load(FILES[7]).PUZZLE
    checker.use_kernels_of(puzzle, checker.solution_of(puzzle))
    _, text, _ = checker.verdict(replace(puzzle, blocks=puzzle.blocks | {"BLOCK_K": 8}))
    assert "tl.dot takes tiles with at least 16 elements along each axis" in text


def test_nothing_is_said_of_a_right_result():
    right = torch.arange(6.0).view(2, 3)
    assert pattern(right + 1, right, torch.ones(2, 3, dtype=torch.bool)) == ""


# --- other checkers

RANDOM = "[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]"
RETURN = "return grad, grad_update, sum_parts(parts, scale.dtype), None, None"


@pytest.mark.parametrize(
    ("line", "mistake", "sentence"),
    [
        ("seed = tl.load(SEED)", "seed = SEED", "a seed is a number, and SEED an address"),
        ("seed = tl.load(SEED)", "seed = 1", "tl.load(SEED) is the seed"),
        (RANDOM, "[:, None] * 0 + tl.arange(0, BLOCK_C)", "rows or columns have equal"),
        (
            RANDOM,
            "[:, None] * BLOCK_C + tl.zeros((1, BLOCK_C), tl.int32)",
            "rows or columns have equal",
        ),
        (
            RANDOM,
            "[:, None] + tl.arange(0, BLOCK_C)",
            "[0, 1] and [1, 0] have equal random numbers",
        ),
        (RANDOM, "[:, None] * BLOCK_C + column", "`column` is not known here"),
        ("random >= p", "random < p", "% are kept, not 75 %; an element is dropped where"),
        ("[(programs,)](x", "[programs](x", "the grid is a tuple"),
        ("_kernel[(programs,)](x", "_kernel(x", "a kernel is launched with its grid"),
        ("seed, out, rows, **sizes", "seed, out, **sizes", "must name each argument"),
        ("        return out\n", "", "does forward end in `return out`?"),
        (RETURN, "return grad, grad_update", "returns 2 values for the 5 arguments of forward"),
        ("def options(", "def options((", "SyntaxError: "),
    ],
)
def test_a_mistake_in_a_kernel_of_ones_own(checker, line, mistake, sentence, tmp_path):
    from exercises.tiny_llama_v3 import check_custom_kernel

    folder = Path(check_custom_kernel.__file__).parent
    text = (folder / "custom_kernel_solution.py").read_text()
    assert line in text
    (tmp_path / "wrong.py").write_text(text.replace(line, mistake))
    status, _, err = captured(check_custom_kernel.main, [str(tmp_path / "wrong.py")])
    assert status == 1
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_an_error_of_the_tool_itself_stays_one(tmp_path):
    with pytest.raises(ZeroDivisionError), explaining(tmp_path / "module.py"):
        1 / 0  # noqa: B018


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("return values.eror > 1e-5", "'Values' object has no attribute 'eror'"),
        ("return True", "it returns True; return what is wrong as one line, or nothing"),
    ],
)
def test_a_mistake_in_a_probe(code, sentence, tmp_path):
    from exercises.performance_debugging import check_benchmark

    (tmp_path / "probes.py").write_text(f"def probe(claim, calls, values):\n    {code}\n")
    probes = import_file(tmp_path / "probes.py", "probes_with_a_mistake")
    probes.PROBES = (probes.probe,)
    h100 = read_json(ROOT / "results/h100/sheets/performance_debugging/benchmarks.json")
    evidence = check_benchmark.examine.Evidence.of(h100["benchmarks"][0])
    [line] = check_benchmark.judge(evidence, probes)
    assert line.startswith("probe: ")
    assert sentence in line

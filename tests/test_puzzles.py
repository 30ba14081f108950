"""Puzzles and the fusion built with them: solutions are right, what is missing is said, each
kind of fault is named."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, captured, with_mistakes

FOLDER = ROOT / "exercises/puzzles"
FILES = sorted(FOLDER.glob("puzzle_*.py"))
by_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def said(checker, file: Path, *argv: str) -> tuple[int, list[str]]:
    """Status and lines of a puzzle's program."""
    puzzle = checker.load(file).PUZZLE
    status, out, err = captured(lambda argv: checker.main(puzzle, argv), [*argv])
    assert err == ""
    return status, out.splitlines()


@by_file
def test_a_solution_is_right_and_drawn(checker, file):
    status, lines = said(checker, file, "--solution")
    assert status == 0, lines
    assert lines[-1].startswith(f"{file.stem}: solved (")
    assert any(": written by program" in line for line in lines)  # a sheet shows how


def test_what_is_still_to_be_written_is_said_in_one_line(checker):
    from exercises.puzzles import all_puzzles

    status, out, err = captured(all_puzzles.main, [])
    *lines, last = out.splitlines()
    assert (status, last, err) == (1, "0 of 12 solved", "")
    for file, line in zip(FILES, lines, strict=True):
        assert line.startswith(f"{file.stem}: not solved yet: nothing is written to ")
    assert said(checker, FILES[0]) == (1, lines[:1])


OUTSIDE, ODD = "out of bounds", "wrong at odd sizes only"
FAULTS = [
    (1, "OUT + at", "OUT + at + 1", f"writes {OUTSIDE}", "line 11: program 1 goes to out + 16"),
    (1, "X + at", "X + at - 1", f"reads {OUTSIDE}", "line 11: program 0 goes to x - 1, but x [16]"),
    (2, "OUT + at", "X + at", "writes to an input", "line 14: x is only to be read"),
    (3, ", other=0.0", "", "mask", "line 11 loads without `other`"),
    (5, "/ C + eps", "/ BLOCK + eps", ODD, "right with rows = 4, C = 16: out[0, 0]"),
    (8, "tl.dot(a, b, total)", "tl.dot(a, b, total).to(tl.float16)",
     ("dtype, the errors", "error: line 18: the third argument of tl.dot"), "float32"),
    (2, "inside = at < n", "inside = at < n - 1", "never written", "out[15], 1 of 16 elements"),
    (6, "PARTS + program * C", "PARTS", "race", "program 1 writes parts[0, 0], and so did"),
    (3, "tl.sum(x, 0))", "tl.sum(x, 0) + tl.load(OUT + row * 0))", "race", "program 1 reads"),
    (3, "OUT + row, ", "OUT + row, tl.load(OUT + row + 1, mask=row < 2) + ", "race",
     "which another program reads"),
    (12, "tl.store(", "tl.atomic_add(", "atomic operation", "line 35: "),
    (4, "x - tl.max(x, 0)", "x", "wrong: ", " is nan and should be "),
    (11, "(key < n)[None, :], scores", "True, scores", ODD, "out[0, 0, 0]"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "line", "fault", "kind", "where"), FAULTS)
def test_a_fault_is_named_with_its_place(checker, number, line, fault, kind, where, tmp_path):
    right, text, _ = checker.verdict(
        with_mistakes(checker, number, [(line, fault)], tmp_path / "wrong.py")
    )
    assert not right
    assert text.startswith(kind) and where in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "line", "fault", "named"),
    [
        (1, "OUT + at", "OUT + at + 1", "writes out of bounds: beside out [16]"),
        (1, "X + at", "X + at - 1", "reads out of bounds, or computes NaN: out[0] is nan"),
        (2, "inside = at < n", "inside = at < n - 1", "never written: out[15], 1 of 16 elements"),
        (1, "tl.load(X + at)", "1", "wrong on this device: out[0] is "),
    ],
)
def test_guard_zones_show_a_fault_where_nobody_looks_at_loads_and_stores(
    checker, number, line, fault, named, tmp_path
):
    """As on a GPU."""
    from exercises.puzzles import scoreboard

    puzzle = with_mistakes(checker, number, [(line, fault)], tmp_path / "wrong.py")
    with pytest.raises(checker.Fault, match=re.escape(named)):
        scoreboard.check_between_guards(puzzle, puzzle.even, puzzle.blocks, checker.CPU)


@pytest.mark.gpu
def test_all_solutions_are_right_on_the_gpu_and_timed(tmp_path):
    argv = [sys.executable, FOLDER / "all_puzzles.py", "--solution", "--scoreboard"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {file.stem} " in done.stdout for file in FILES)


# --- build one fusion yourself


@pytest.fixture
def swiglu(checker):
    """The program, its kernels those of the reader."""
    for name in ("puzzles.puzzle_07_swiglu", "build_a_fusion.swiglu_backward"):
        sys.modules.pop(f"exercises.{name}", None)
    sys.modules.pop("exercises.build_a_fusion.swiglu", None)
    return importlib.import_module("exercises.build_a_fusion.swiglu")


def test_each_step_checks_what_the_reader_has(swiglu):
    status, _, err = captured(swiglu.main, ["kernels"])
    assert (status, "step 3, puzzle_07_swiglu.py: not solved yet" in err) == (1, True)
    right = "your kernels: output and gradient are right\n"
    assert captured(swiglu.main, ["kernels", "--solution"]) == (0, right, "")
    assert captured(swiglu.main, ["--scoreboard"])[0] == 4
    assert captured(swiglu.main, [])[0] == 2

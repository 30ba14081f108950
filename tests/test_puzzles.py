"""Puzzles and the fusion built with them: solutions are right, what is missing and what was not
practised is said. Wrong kernels are those of test_explain.py."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, captured, finished, mistakes, puzzle_file, replaced, with_mistakes

FOLDER = ROOT / "exercises/puzzles"
FILES = [puzzle_file(number) for number in range(1, 13)]
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
    (solved,) = [line for line in lines if line.startswith(f"{file.stem}: ")]
    assert solved.startswith(f"{file.stem}: solved (")
    assert lines[lines.index(solved) + 1].startswith("moved: read ")
    assert any(": written by program" in line for line in lines)  # a sheet shows how


@pytest.mark.parametrize(
    ("number", "right", "other", "moved"),
    [
        (1, "", "", "read 2.00 and wrote 1.00 times x, needed 2.00 and 1.00: no byte more"),
        (1, "tl.load(Y + at)", "tl.load(Y + at) + 0 * tl.load(X + at)",
         "read 3.00 and wrote 1.00 times x, needed 2.00 and 1.00: a program loads x 2 times"),
        (5, "", "", "3 programs load weight"),
    ],
)  # fmt: skip
def test_a_solved_kernel_says_what_it_moved(checker, number, right, other, moved, tmp_path):
    file = puzzle_file(number)
    puzzle = checker.load(file).PUZZLE
    text = (file.parent / "solutions" / file.name).read_text()
    changed = tmp_path / file.name
    changed.write_text(text.replace(right, other, 1) if right else text)
    checker.use_kernels_of(puzzle, changed)
    _, out, _ = captured(lambda argv: checker.main(puzzle, argv), [])
    line = next(line for line in out.splitlines() if line.startswith("moved: "))
    assert moved in line


def test_what_is_still_to_be_written_is_said_in_one_line(checker):
    from exercises.puzzles import all_puzzles

    status, out, err = captured(all_puzzles.main, [*map(str, FILES)])
    *lines, last = out.splitlines()
    assert (status, last, err) == (1, "0 of 12 solved", "")
    for file, line in zip(FILES, lines, strict=True):
        assert line.startswith(f"{file.stem}: not solved yet: nothing is written to ")
    assert said(checker, FILES[0]) == (1, lines[:1])


@pytest.mark.parametrize(
    ("number", "line", "fault", "named"),
    [
        (1, "OUT + at", "OUT + at + 1", "writes out of bounds: beside out [16]"),
        (1, "X + at", "X + at - 1", "reads out of bounds, or computes NaN: out[0] is nan"),
        (2, "inside = at < n", "inside = at < n - 1", "never written: out[15], 1 of 16 elements"),
        (1, "tl.load(X + at)", "1", "wrong on this device: out[0] is "),
        (1, "tl.store(", "tl.store(X + at, 0.0)\n    tl.store(", "writes to an input: x [16]"),
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


def test_a_result_that_pytorch_computes_around_the_kernel_is_not_solved(checker, tmp_path):
    file = tmp_path / FILES[0].name
    around = [("    add_kernel[grid]", "    out[:] = x + y\n    add_kernel[grid]")]
    file.write_text(replaced(FILES[0].read_text(), around))
    right, text, _ = checker.verdict(checker.load(file).PUZZLE)
    assert not right
    assert text.startswith("not solved yet: nothing is written to out")


# --- what is right, and what was not the puzzle

RIGHT = r"""
one by one | 3 | blocks: line 14 loads one element after the other |
    tl.store(OUT + row, tl.sum(x, 0)) -> total = 0.0\n    for c in range(C):\n        total +=
    tl.load(X + row * C + c)\n    tl.store(OUT + row, total)
tl.softmax | 4 | the maximum, exp and the sum, which tl.softmax has in it |
    tl.exp(x - tl.max(x, 0)) -> tl.softmax(x) | e / tl.sum(e, 0) -> e
float64 | 5 | float32, which is enough | .to(tl.float32) -> .to(tl.float64)
no tl.dot | 8 | the units for matrices, which tl.dot uses | tl.dot(a, b, total) -> total +
    tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
stored twice | 1 | store once: line 12 stores out[0] again |
    tl.store(OUT + at, -> tl.store(OUT + at, 0.0 * at)\n    tl.store(OUT + at,
through memory | 2 | load once: line 15 loads what it has stored, out |
    tl.store(OUT + at, x + y, mask=inside) -> tl.store(OUT + at, x, mask=inside)\n    tl.store(OUT
    + at, y + tl.load(OUT + at, mask=inside), mask=inside)
loaded twice | 7 | load once: line 15 loads x[0, 0] again |
    tl.sigmoid(gate) -> tl.sigmoid(tl.load(X + at, mask=inside))
three loads | 10 | load once: line 22 loads x[0, 0] 3 times |
    x = tl.load(X + row * C + column, mask=inside) -> x = tl.load(X + row * C + column,
    mask=inside)\n        x = tl.load(X + row * C + column, mask=inside)
loaded in the loop | 11 | load once: line 28 loads q[0, 0, 0] again | scores = tl.dot(q ->
    q = tl.load(Q + q_at, mask=(query < n)[:, None], other=0.0)\n        scores = tl.dot(q
"""


@pytest.mark.parametrize("mistake", mistakes(RIGHT).values(), ids=mistakes(RIGHT))
def test_what_is_right_and_goes_around_the_puzzle_is_accepted_with_a_line(
    checker, mistake, tmp_path
):
    puzzle = with_mistakes(checker, mistake.puzzle, mistake.changes, tmp_path / "other.py")
    solved, text, _ = checker.verdict(puzzle)
    said = f". Not practised: {mistake.sentence}"
    assert (solved, said in text, len(text.splitlines())) == (True, True, 1), text


@pytest.mark.gpu
def test_all_solutions_are_right_on_the_gpu_and_timed(tmp_path):
    done = finished(FOLDER / "all_puzzles.py", *FILES, "--solution", "--scoreboard")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {file.stem} " in done.stdout for file in FILES)


# --- build one fusion yourself


@pytest.fixture
def swiglu(checker, monkeypatch):
    """The program, with nothing written in the files of its kernels."""
    sys.modules.pop("exercises.build_a_fusion.swiglu", None)
    module = importlib.import_module("exercises.build_a_fusion.swiglu")
    monkeypatch.setattr(module, "FORWARD", puzzle_file(7))
    monkeypatch.setattr(module, "BACKWARD", puzzle_file(0))
    monkeypatch.setattr(module, "FILES", (puzzle_file(7), puzzle_file(0)))
    return module


def test_each_step_checks_what_the_reader_has(swiglu):
    status, _, err = captured(swiglu.main, ["kernels"])
    assert (status, "puzzle_07_swiglu.py: not solved yet" in err) == (1, True)
    right = "your kernels: output and gradient are right\n"
    assert captured(swiglu.main, ["kernels", "--solution"]) == (0, right, "")
    assert captured(swiglu.main, ["--scoreboard"])[0] == 4
    assert captured(swiglu.main, [])[0] == 2

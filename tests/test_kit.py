"""The instructor's kit: the key has the numbers of its files, the plan's times add up, and the
board reads what run_sheet.py --ask leaves."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, assert_refused, call

from dev.tables import printed_by
from exercises import progress_board

KEY = (ROOT / "docs/INSTRUCTOR_KEY.md").read_text()
PLAN = (ROOT / "docs/INSTRUCTOR.md").read_text()
START = 10  # minutes


# --- the key


def entries() -> Iterator[tuple[str, str]]:
    """Each piece of the key, and what it names as its source; a row of the table is one."""
    for line in re.findall(r"^\|.*$", KEY, re.MULTILINE):
        yield line, line
    for section in re.split(r"^## ", KEY, flags=re.MULTILINE)[1:]:
        begin = 0
        for match in re.finditer(r"[Ff]rom:(?:[^`]*`[^`]+`)+\.", section):
            yield section[begin : match.end()], section[begin : match.end()]
            begin = match.end()
        yield section[begin:], ""


def numbers_in(value: object) -> Iterator[float]:
    """All numbers of a result file."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, (int, float)):
        yield value


def is_in(number: str, source: str) -> bool:
    """Whether a file has this number; a result file in these digits, or in thousands of them."""
    text = printed_by(source) if source.startswith("python ") else (ROOT / source).read_text()
    if re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d)", text):
        return True
    if not source.endswith(".json"):
        return False
    digits = len(number.partition(".")[2])
    values = numbers_in(json.loads(text))
    units = (1, 1e-3)
    return any(f"{value * unit:.{digits}f}" == number for value in values for unit in units)


def test_each_bold_number_of_the_key_stands_in_its_files():
    checked = 0
    for text, named in entries():
        sources = [
            " ".join(name.split()) for name in re.findall(r"`((?:results/|python )[^`]+)`", named)
        ]
        for number in re.findall(r"\*\*(\d[\d,]*(?:\.\d+)?)\*\*", text):
            assert any(is_in(number, source) for source in sources), (number, sources)
            checked += 1
    assert checked > 100


# --- the plan


def rows(header: str) -> dict[str, list[str]]:
    """The lines of each row of a table of the plan, by its first cell."""
    table = PLAN.partition(f"| {header} |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| ([^-|][^|]*?) +\| (.*?) +\|", table, re.MULTILINE)
    return {name: lines.split("<br>") for name, lines in cells}


SESSIONS = rows("session")
LENGTH = {
    f"Session {name[0]}": sum(int(line.split()[0]) for line in lines)
    for name, lines in SESSIONS.items()
}


def core(page: Path) -> int:
    """Minutes of a sheet's core."""
    return int(re.search(r"\*\*Core\*\*: (\d+)", page.read_text())[1])


FOLDERS = {
    "TinyLlama ": "tiny_llama_",
    "TinyOpenFold ": "tiny_openfold_",
    "AMD's machine code": "amd",
    " ": "_",
}


def sheet(step: str, title: str) -> Path:
    """The sheet with this title in the folder of a step."""
    for words, folder in FOLDERS.items():
        step = step.replace(words, folder)
    pages = (ROOT / "exercises" / step.lower()).glob("exercise_*.md")
    return next(page for page in pages if f": {title}\n" in page.read_text())


def needed(what: str) -> float:
    """Minutes that a line of an agenda takes at least."""
    puzzle = core(ROOT / "exercises/puzzles/README.md") / 6
    if what in LENGTH:
        return LENGTH[what]
    if what.startswith("START"):
        return START + 3 * puzzle
    if what.startswith("puzzles"):
        return len(re.findall(r"\d+", what)) * puzzle
    if what == "Build one fusion yourself":
        return core(ROOT / "exercises/build_a_fusion/README.md")
    if ", " in what:
        return core(sheet(*what.split(", ", 1)))
    return {"break": 10, "lunch": 60, "exit questions": 10}[what]


@pytest.mark.parametrize("agenda", rows("agenda"))
def test_each_line_of_an_agenda_has_the_minutes_that_it_needs(agenda: str):
    lines = [re.match(r"(\d+):(\d+) (.*)", line).groups() for line in rows("agenda")[agenda]]
    starts = [60 * int(hour) + int(minute) for hour, minute, _ in lines]
    assert lines[-1][2] == "end"
    for (*_, what), begin, end in zip(lines, starts, starts[1:], strict=False):
        assert end - begin >= needed(what), what


@pytest.mark.parametrize("session", SESSIONS)
def test_sheets_of_a_session_fit_their_slots(session: str):
    for line in SESSIONS[session]:
        slot = int(line.split()[0])
        if found := re.search(r"\(\.\./(exercises/[^)]+)\)", line):
            assert core(ROOT / found[1]) <= slot, line


# --- the board

PAGE = """# My answers: exercises/tiny_llama_v1/exercise_1_baseline_analysis.md

### Task 1: Read a report

**Predict**: backward takes **{0}** times as long as forward.

| blank | predicted | measured |
| --- | --- | --- |
| [1] | {0} | 1.9 |

Reason: two GEMMs

"""


def test_the_board_counts_tasks_and_who_predicted_what(tmp_path: Path):
    for person, answer in (("anna", 2), ("bela", 1), ("chris", 2)):
        (tmp_path / person).mkdir()
        (tmp_path / person / "tiny_llama_v1-exercise_1.md").write_text(PAGE.format(answer))
    (tmp_path / "anna/lessons.md").write_text("Count bytes.\n")
    status, printed, errors = call(progress_board, tmp_path)
    assert (status, errors) == (0, "")
    assert re.search(r"\| tasks done +\| anna \| bela \| chris \|", printed)
    assert re.search(r"\| \[1\] +\| 2 \(2x\); 1 +\| 1.9 \(3x\) +\|", printed)
    assert_refused(call(progress_board, tmp_path / "none"), "no such folder", "--ask")
    (tmp_path / "empty").mkdir()
    assert_refused(call(progress_board, tmp_path / "empty"), "no answers", "empty")

"""The commands of README and exercise sheets run as they stand, as does the notebook, and the
tables of the answers are current.

Sheets run with small models and with stand-ins for ROCm's tools. The programs of dev/ that do it
(run_sheet.py, tables.py) are tested with made-up sheets.
"""

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, assert_refused, call, finished

from dev import tables
from exercises import ask, pick, run_sheet
from exercises.run_sheet import parse_sheet


def files_with(mark: str, *patterns: str) -> list[str]:
    """The files of these patterns that have a line of this form, as paths from the repository's
    root."""
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    found = [path for path in paths if re.search(mark, path.read_text(), re.M)]
    return sorted(str(path.relative_to(ROOT)) for path in found)


PAGES = ("README.md", *(f"docs/{name}.md" for name in ("START", "ROCM", "MANY_GPUS", "INSTRUCTOR")))
PAGES += ("exercises/*/*.md",)
SHEETS = files_with("^```(bash|python)", *PAGES)
# All sheets run by hand, `python exercises/run_sheet.py SHEET`; this one here, those that are slow
# by .ci/run, among them one that runs a file in which readers write.
SAMPLE = ("docs/ROCM.md",)
SLOW = (
    "README.md",
    "exercises/puzzles/README.md",
    "exercises/tiny_llama_v1/exercise_1_baseline_analysis.md",
)
# What no test may start: an installation, or the tests.
NOT_HERE = re.compile(
    r"^[^#\n]*(?:\bpip install|\bvenv\b|environment_setup\.sh|\bpytest\b|\.ci/run)", re.MULTILINE
)
TIMEOUT = 900


@dataclass(frozen=True)
class Done:
    """What run_sheet.py printed and left behind."""

    status: int
    stdout: str
    stderr: str
    logs: Path

    @property
    def blocks(self) -> list[dict]:
        return json.loads((self.logs / "summary.json").read_text())["blocks"]

    @property
    def statuses(self) -> list[str]:
        return [block["status"] for block in self.blocks]

    def log(self, number: int) -> str:
        """The output of a block, from 0."""
        return (self.logs / self.blocks[number]["log"]).read_text()


def start(sheet: Path, logs: Path, *argv: object) -> subprocess.Popen:
    """Run a sheet in a process of its own."""
    command = [sys.executable, ROOT / "exercises" / "run_sheet.py", sheet, "--log", logs, *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, **pipes)


def end(process: subprocess.Popen, logs: Path) -> Done:
    """Wait for it."""
    try:
        printed = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # so that it ends what it has started
        printed = process.communicate()
    return Done(process.returncode, *printed, logs)


# --- the sheets


@pytest.mark.parametrize("sheet", SHEETS)
def test_a_sheet_keeps_the_rules_and_what_installs_says_why_ci_does_not_run_it(sheet: str):
    blocks = parse_sheet((ROOT / sheet).read_text())
    installs = [block for block in blocks if NOT_HERE.search(block.text)]
    assert not [block.line for block in installs if "not run in CI" not in block.marks]


@pytest.mark.parametrize(
    "sheet", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_every_block_of_a_sheet_runs_and_prints_what_it_should(sheet: str, tmp_path: Path):
    options = ["--shrink", "--with-standins", "--ci", "--keep-going"]
    done = end(start(ROOT / sheet, tmp_path, *options), tmp_path)
    assert done.status == 0, done.stdout + done.stderr
    assert set(done.statuses) <= {"ok", "not run in CI", "needs a GPU"}, done.stdout


def test_tables_are_what_their_commands_print():
    files = files_with("^<!-- tables?: ", "README.md", "docs/*.md", "exercises/*/*.md")
    assert call(tables, "--check", *(ROOT / file for file in files)) == (0, "", "")


def tracked(*patterns: str) -> list[str]:
    """The files that git has, from the root."""
    return subprocess.check_output(["git", "ls-files", *patterns], cwd=ROOT, text=True).split()


def test_links_between_pages_lead_somewhere():
    """To files and folders that git has, and to headings, which code blocks do not have."""

    def anchor(heading: str) -> str:  # as GitHub makes it
        return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")

    texts = {
        ROOT / name: re.sub(r"(?ms)^```.*?^```", "", (ROOT / name).read_text())
        for name in tracked("*.md")
    }
    headings = {
        page: {anchor(h) for h in re.findall("^#+ (.*)", text, re.MULTILINE)}
        for page, text in texts.items()
    }
    files = {ROOT / name for name in tracked()}
    there = files | {folder for file in files for folder in file.parents}
    for page, text in texts.items():
        for link in re.findall(r"(?:\]\(\s*|(?:src|href)=\")(?!https?:)([^)\"\s]+)", text):
            path, _, part = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target in there, f"{page.name}: {link}"
            assert not part or part in headings[target], f"{page.name}: {link}"


def ignored(names: Iterable[str]) -> set[str]:
    """Those that git ignores."""
    command = ["git", "check-ignore", "--stdin"]
    given = "\n".join(names)
    done = subprocess.run(command, cwd=ROOT, input=given, capture_output=True, text=True)
    return set(done.stdout.split())


def test_files_that_pages_and_comments_name_are_there():
    """Or git ignores them, because a command writes them; capitals are to be filled in."""
    folders = "|".join({name.split("/")[0] for name in tracked("*/*")})
    in_root = r"tiny_\w+\.py|run_\w+\.sh"
    named = re.compile(rf"(?<![\w./$}}{{-])(?:(?:{folders})/[\w./*-]+\.[a-z]+|{in_root})\b(?!/)")
    missing: dict[tuple[str, str], set[str]] = {}
    for file in tracked("*.md", "*.py", "*.sh", ":!tests"):
        for name in named.findall((ROOT / file).read_text()):
            found = any([*folder.glob(name)] for folder in (ROOT, (ROOT / file).parent))
            if not found and not re.search(r"(?<![A-Z])[A-Z]{3,}", name):
                missing[file, name] = {name, str(Path(file).parent / name)}
    written = ignored(path for places in missing.values() for path in places)
    assert not [where for where, places in missing.items() if not places & written]


# --- the notebook: it runs as it stands, and its outputs say whose they are

NOTEBOOK = ROOT / "exercises/first_kernel.ipynb"


def printed(notebook) -> list[str]:
    """What each cell with code prints."""
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]


@pytest.fixture(scope="module")
def notebook():
    """exercises/first_kernel.ipynb."""
    nbformat = pytest.importorskip("nbformat")
    found = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(found)
    return found


def test_it_runs_where_it_is_opened_and_its_solution_is_right(notebook, tmp_path):
    """It needs nothing of the repository."""
    nbformat, nbclient = map(pytest.importorskip, ("nbformat", "nbclient"))
    cells = notebook.cells
    place = {"metadata": {"path": str(tmp_path)}}
    solution = re.search(r"```python\n(.*?)```", cells[-1].source, re.DOTALL)[1]
    not_written = re.sub(r"(?s):\n.*", ":\n    pass\n", solution)
    own_turn = (
        "\n\nx, y = " + cells[-2].source.rpartition("\nx, y = ")[2]
    )  # a reader's kernel apart
    both = [nbformat.v4.new_code_cell(kernel + own_turn) for kernel in (not_written, solution)]
    longer = {**notebook, "cells": [*cells[:-2], *both]}
    done = nbclient.NotebookClient(
        nbformat.from_dict(longer), timeout=300, resources=place
    ).execute()
    *_, checked, not_yet, right = printed(done)
    assert "predicted: 1.67x" in "".join(printed(done))
    right_one, _, wrong_one = checked.partition("without the condition:\n")
    assert re.findall("is (right|wrong)", right_one) == ["right"] * 3
    assert re.findall("is (right|wrong)", wrong_one) == ["right", "wrong", "wrong"]
    assert (not_yet.startswith("the output is wrong"), right[:19]) == (True, "the output is right")


# --- START


def test_the_ratio_of_turns_and_their_range_are_said(monkeypatch, capsys):
    from exercises.start import add_relu

    slow = [15.1, 17.6, 17.2, 17.2, 17.2]
    times = itertools.chain.from_iterable((ms, 10.0) for ms in slow)
    monkeypatch.setattr(add_relu, "milliseconds", lambda work, calls: next(times))
    monkeypatch.setattr(add_relu, "one_kernel", lambda x, y, z: z.copy_((x + y).relu()))
    assert add_relu.measure(1000, len(slow)) == 0
    assert capsys.readouterr().out.endswith("1.72x (1.51x to 1.76x)\n")


# --- exercises/run_sheet.py


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Done]:
    """`run(text, *argv)` runs a made-up sheet in the folder `work`."""
    sheet, logs, directory = tmp_path / "sheet.md", tmp_path / "logs", tmp_path / "work"
    directory.mkdir()

    def run_text(text: str, *argv: object) -> Done:
        sheet.write_text(text)
        answer = call(run_sheet, sheet, "--log", logs, "--directory", directory, *argv)
        return Done(*answer, logs)

    return run_text


def sheet_of(*parts: str) -> str:
    """A sheet of one exercise. Parts are commands of a bash block each, or Markdown."""
    markdown = ("Prints:", "##", "<!--", "```")
    blocks = (part if part.startswith(markdown) else f"```bash\n{part}\n```\n" for part in parts)
    return "\n".join(("## Exercise 1: made up\n", *blocks))


def test_directory_variables_and_functions_carry_over(run, tmp_path: Path):
    first = "mkdir -p 'a b'\ncd 'a b'\nTEXT=\"it's \\$two\nlines\"\nLIST=(1 '2 3')\n"
    first += 'export SEEN=yes\nf() { echo "f $1"; }'
    second = 'pwd\necho "$TEXT"\necho "${LIST[1]}"\nf 7'
    python = "import os\nprint(os.getcwd()[-3:], os.environ['SEEN'], 'TEXT' in os.environ)"
    done = run(sheet_of(first, second, f"```python\n{python}\n```\n", "cd ..\npwd"))
    assert done.statuses == ["ok"] * 4
    work = tmp_path / "work"
    assert done.log(1).splitlines() == [f"{work}/a b", "it's $two", "lines", "2 3", "f 7"]
    assert done.log(2) == "a b yes False\n"
    assert done.log(3) == f"{work}\n"


def test_failures_end_their_block_and_name_the_line_and_phrases_that_are_missing(run):
    wrong = ("false", "ls nothing | cat; grep x /dev/null", "f() { false; }\nf", "(exit 3)")
    wrong += ("echo 'error: matplotlib not found' >&2; exit 4",)
    text = sheet_of(
        *(f"{command}\necho after" for command in wrong),
        "```python\nx = 1\nraise ValueError('no')\n```\n",
        *("echo 'Peak memory: 3 MB'\necho warning >&2", "Prints: `Peak\nmemory:`, `warning`, so\n"),
        *("echo 'Peak memory: 3 MB'", "Prints: `Peak`, `Final loss:`\n"),
    )
    done, lines = run(text, "--keep-going"), text.splitlines()
    assert (done.status, done.statuses) == (1, [*["failed"] * 6, "ok", "failed"])
    assert not [number for number in range(len(wrong)) if "after" in done.log(number)]
    assert f"line {lines.index('(exit 3)') + 1}: status 3" in done.stdout
    place = lines.index("raise ValueError('no')") + 1
    assert f'File "<stdin>", line {place}, in <module>' in done.stdout
    assert "ValueError: no" in done.stdout
    assert [block["exit_status"] for block in done.blocks][3:6] == [3, 4, 1]
    assert "does not print: Final loss:\n" in done.stdout
    done = run(sheet_of("echo begin", "false", "echo never"))
    assert (done.status, done.statuses) == (1, ["ok", "failed", "not reached"])
    assert "1 ok, 1 failed, 1 not reached" in done.stdout


def test_blocks_that_ci_or_a_machine_without_gpus_cannot_run(run, tmp_path: Path, monkeypatch):
    comment = "<!-- not run in CI: needs\n     a screen -->\n"
    done = run(sheet_of(comment, "touch one", "touch two"), "--ci")
    assert (done.status, done.statuses) == (0, ["not run in CI", "ok"])
    assert done.blocks[0]["remark"] == "needs a screen"
    assert os.listdir(tmp_path / "work") == ["two"]
    apart = sheet_of(comment + "\nOnly directly before a block.\n", "true")
    assert run(apart, "--ci").statuses == ["ok"]

    text = sheet_of("<!-- needs a GPU: times it -->\n", "true", "true")
    python = tmp_path / "python"
    monkeypatch.setattr(run_sheet.sys, "executable", str(python))
    for sees, status in ((0, "needs a GPU"), (1, "ok")):
        python.write_text(f"#!/bin/sh\necho {sees}\n")
        python.chmod(0o755)
        done = run(text)
        assert (done.status, done.statuses) == (0, [status, "ok"]), done.stdout + done.stderr


ASKED = """### Task 1: count

Three words.

**Predict**: `echo a b c` prints ____ letters, in ____ lines.

```bash
echo "asked" >> ran
echo "letters: 3 in all"
echo "lines: 2 / 4"
```

<!-- answer 1: letters: -->
<!-- answer 2: lines: #2 -->

<details>
<summary>Why</summary>

Because.

</details>

### Task 2: go on

**Predict** the next: ____.

```bash
echo "next: $NEXT"
```

<!-- answer 1: next: -->
"""


def test_ask_compares_predictions_with_the_output_opens_the_fold_and_goes_on(tmp_path: Path):
    """The first run ends in Task 2, the second begins with it and has the shell's variables."""
    sheet = tmp_path / "sheet.md"
    sheet.write_text(sheet_of("NEXT=7", ASKED))

    def typed(text: str) -> subprocess.CompletedProcess:
        program = ROOT / "exercises/run_sheet.py"
        return finished(program, sheet, "--ask", "--directory", tmp_path, stdin=text)

    first = typed("\n4\n|two\n\nmy reason\n")
    assert first.returncode == 130
    before, _, after = first.stdout.partition("Why?")
    assert ("Because." in before, "Because." in after) == (False, True)
    page = tmp_path / "my_answers" / f"{tmp_path.name}-sheet.md"
    assert "prints **4** letters, in **|two** lines" in page.read_text()
    assert "| [1] | 4 | 3 |\n| [2] | /two | 4 |\n\nReason: my reason\n" in page.read_text()
    assert typed("8\n\nno idea\n").returncode == 0
    assert (tmp_path / "ran").read_text() == "asked\n"
    assert "| [1] | 8 | 7 |\n\nReason: no idea\n" in page.read_text()


@pytest.mark.parametrize("sheet", SHEETS)
def test_each_answer_that_a_sheet_names_is_of_a_blank(sheet: str):
    numbers: list[int] = []
    blanks = 0
    for piece in ask.pieces((ROOT / sheet).read_text() + "\n\n## end\n"):
        if piece.text.startswith(("## ", "### ")):
            assert max(numbers, default=0) <= blanks, piece.text
            numbers, blanks = [], 0
        elif piece.language not in ("bash", "python") and not piece.is_fold:
            numbers += [int(number) for number, _ in ask.ANSWER.findall(piece.text)]
            lines = piece.text.splitlines()
            if piece.language is None:
                blanks += len(ask.BLANK.findall(piece.text))
            else:
                blanks += sum(bool(ask.BLANK.search(line)) for line in lines)


def test_without_rocm_a_section_is_skipped(run, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    wrapper = f"{ROOT}/run_rocprofv3.sh --output-dir ."
    parts = ("### A\n", wrapper, "cat stats.csv", "### B\n", "rocm-smi", "### C\n", "echo there")
    done = run(sheet_of(*parts))
    assert (done.status, done.statuses) == (0, ["skipped", "skipped", "skipped", "ok"])
    assert "rocprofv3 not found" in done.blocks[0]["remark"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("## E\n", "no bash or python block"),
        ("## E\ntext\n\nPrints: `x`\n", "line 4"),
        ("## E\n```bash\necho\n```\nPrints: x\n", "line 5"),
        ("## E\n```bash\necho\n```\n\n```text\n```\n\nPrints: `x`\n", "line 9"),
        ("## E\n```bash\necho\n", "line 2"),
        ("## E\n```bash\necho\n```\n\nIn between.\n\nPrints: `x`\n", "line 8"),
        ("## E\n- list\n\n  ```bash\n  echo\n  ```\n", "line 4"),
    ],
)
def test_sheets_that_break_the_rules(tmp_path: Path, text: str, words: str):
    (tmp_path / "sheet.md").write_text(text)
    assert_refused(call(run_sheet, tmp_path / "sheet.md"), words, "sheet.md")


# Waits for Ctrl-C and leaves its record; its name is that of a version script.
WAITS = """
import os, sys, time
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
try:
    time.sleep(60)
except KeyboardInterrupt:
    open("record", "w").close()
    sys.exit(130)
"""


@pytest.mark.parametrize(("number", "argv"), [(signal.SIGINT, ("--shrink",)), (signal.SIGTERM, ())])
def test_an_interrupt_ends_all_that_was_started(tmp_path: Path, number: int, argv: tuple[str, ...]):
    (tmp_path / "tiny_waits_v1.py").write_text(WAITS)
    sheet, logs, file = tmp_path / "sheet.md", tmp_path / "logs", tmp_path / "pids"
    text = "sleep 60 & echo $! >>pids\nfor i in 1 2; do\n    python tiny_waits_v1.py || true\ndone"
    sheet.write_text(sheet_of("echo before", text, "echo never"))
    process = start(sheet, logs, "--directory", tmp_path, *argv)
    limit, pids = time.monotonic() + 60, []
    while len(pids) < 2 and time.monotonic() < limit:
        time.sleep(0.05)
        pids = file.read_text().splitlines() if file.exists() else []
    process.send_signal(number)
    done = end(process, logs)
    assert (done.status, done.stderr) == (130, "run_sheet.py: interrupted\n")
    assert f"logs: {logs}" in done.stdout
    assert done.statuses == ["ok", "interrupted", "not reached"]
    assert (tmp_path / "record").exists(), "the script had no time to leave its record"
    states = [place.read_text() for pid in pids if (place := Path(f"/proc/{pid}/stat")).exists()]
    assert all(" Z " in state for state in states), "some still run"
    assert "Traceback" not in done.log(1)
    assert len(file.read_text().splitlines()) == 2, "the loop went on"


# --- exercises/pick.py


def test_pick_takes_rows_by_words_and_columns_by_the_end_of_their_headings(monkeypatch):
    text = "| ms | fp32 V1 | V2 |\n| - | -: | -: |\n| a, 16 | 1 | 2 |\n| b | 3 | 4 |\n"
    for argv, printed in (
        (["a", "--columns", "V1"], ["ms     fp32 V1", "a, 16        1"]),
        (["--table", "ms", "--columns", "V2"], ["ms     V2", "a, 16   2", "b       4"]),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        status, out, _ = call(pick, *argv)
        assert (status, out.splitlines()) == (0, printed)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert_refused(call(pick, "c"), "no table")


# --- dev/tables.py


def table_of(command: str, text: str = "") -> str:
    return f"Before.\n\n<!-- table: {command} -->\n{text}<!-- end of table -->\n\nAfter.\n"


THREE = r"printf '| time    | V1 |\n| - | - |\n\n| time | V2 |\n| - | - |\n\n| MB |\n| - |\n'"
WIDE = (
    r"printf 'Of a GPU:\n\n| ms | V1 | V2 |\n| - | -: | -: |\n| a, 16 | 1 | 2 |\n| b | 3 | 4 |\n'"
)


@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("python -c 'print(\"| a |\\n| - |\")'", "| a |\n| - |\n"),
        (f'{THREE}, only "MB" "time | V1"', "| MB |\n| - |\n\n| time    | V1 |\n| - | - |\n"),
        (
            f'{WIDE}, columns "V2", rows "a"',
            "| ms    |  V2 |\n| ----- | --: |\n| a, 16 |   2 |\n",
        ),
    ],
)
def test_tables_are_written_and_checked(tmp_path: Path, command: str, written: str):
    file = tmp_path / "x.md"
    old = table_of("echo '| b |'", "old\n") + table_of(command, "old\n")
    file.write_text(old)
    status, _, err = call(tables, "--check", file)
    assert (status, len(err.splitlines())) == (1, 2)
    assert f"{file}:3: " in err and f"{file}:10: " in err
    assert file.read_text() == old
    assert call(tables, file)[0] == 0
    assert file.read_text() == table_of("echo '| b |'", "| b |\n") + table_of(command, written)
    assert call(tables, "--check", file) == (0, "", "")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f'{THREE}, only "time"', "one table that begins with 'time'"),
        (f'{THREE}, only "watts"', "one table that begins with 'watts'"),
        (f'{WIDE}, columns "V3"', "prints no 'V3'"),
        (f'{WIDE}, rows "c"', "prints no 'c'"),
        *((wrong, "") for wrong in ("sh -c 'echo x; exit 3'", "true", "echo 'x", "  ", "no_such")),
    ],
)
def test_a_command_without_its_table_changes_nothing(tmp_path: Path, command: str, said: str):
    file = tmp_path / "x.md"
    text = table_of("echo '| b |'", "old\n") + table_of(command, "old\n")
    file.write_text(text)
    for argv in ([file], ["--check", file]):
        status, _, err = call(tables, *argv)
        assert (status, said in err, f"{file}:10: " in err.splitlines()[-1]) == (1, True, True)
        assert file.read_text() == text

"""A sheet as a conversation, `run_sheet.py SHEET --ask`: a task asks for its predictions, runs its
blocks, puts predictions and output side by side, asks for the reason, then opens the fold.

`____` in a sheet is a blank. A comment behind a block names the line of the output that answers it:
  <!-- answer 2: WORDS -->           the first number behind WORDS
  <!-- answer 2: WORDS #3 -->        the third number behind them
  <!-- answer 2: WORDS / WORDS -->   one such number over another
Blanks are counted from 1 in each task, those of a line in a block of text as one. What was answered
is kept as a Markdown page.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

BLANK = re.compile(r"_{3,}")
FENCE = re.compile(r"(`{3,}|~{3,})[ ]*(\w*)")
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
ANSWER = re.compile(r"<!--[ ]*answer[ ]+(\d+):\s*(.*?)\s*-->", re.DOTALL)
SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)
FIGURE = re.compile(r"!\[(.*?)\]\((.*?)\)|<img src=\"(.*?)\".*?alt=\"(.*?)\">")
TAGS = re.compile(r"</?(?:details|summary)>|<!--.*?-->", re.DOTALL)
HINT = re.compile(r"(?:small|medium|large)?\s*hint|more\b", re.IGNORECASE)


@dataclass
class Piece:
    """A paragraph, a fenced block, or a whole fold of a sheet."""

    line: int  # of its first line, from 1
    text: str

    @property
    def is_fold(self) -> bool:
        return self.text.startswith("<details>")

    @property
    def language(self) -> str | None:
        """Of a fenced block; "" if it names none."""
        match = FENCE.match(self.text)
        return match[2] if match else None


def is_table(piece: Piece) -> bool:
    """A block to be filled in."""
    return piece.language not in (None, "bash", "python") and bool(BLANK.search(piece.text))


def pieces(text: str) -> Iterator[Piece]:
    """The parts of a sheet in order; folds inside a fold stay in it."""
    collected: list[str] = []
    fence = ""
    depth = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        opens = FENCE.match(line)
        if opens and not fence and not depth and collected:
            yield Piece(number - len(collected), "\n".join(collected))
            collected = []
        if line or fence or depth:
            collected.append(line)
        if fence:
            fence = "" if line.strip() == fence else fence
        elif opens:
            fence = opens[1]
        else:
            depth += line.count("<details>") - line.count("</details>")
        if collected and not fence and not depth and (not line or line.startswith(("```", "</de"))):
            # an empty line is no part of the piece that it ends
            yield Piece(number - len(collected) + bool(line), "\n".join(collected))
            collected = []


def plain(text: str) -> str:
    """Markdown as a terminal shows it: figures by their names, without tags and comments."""
    text = FIGURE.sub(lambda match: f"(figure: {match[1] or match[4]})", text)
    return TAGS.sub("", text).strip()


def number_behind(words: str, output: str) -> float | None:
    """A number behind these words, in the first line that has both; `WORDS #3` is the third."""
    words, _, place = words.partition(" #")
    for line in output.splitlines():
        _, found, rest = line.partition(words)
        numbers = NUMBER.findall(rest) if found else []
        if len(numbers) >= int(place or 1):
            return float(numbers[int(place or 1) - 1].replace(",", ""))
    return None


def measured(answer: str, output: str) -> float | None:
    """What the output answers; None where it has no such line."""
    numbers = [number_behind(words.strip(), output) for words in answer.split(" / ")]
    if None in numbers:
        return None
    if len(numbers) == 1:
        return numbers[0]
    over, under = numbers
    return over / under if under else None


@dataclass
class Task:
    """A section of a sheet, below a `## ` or `### `, while it is worked on."""

    title: str
    predictions: list[str] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)  # blank: words of the output
    output: str = ""
    filled: list[str] = field(default_factory=list)  # the paragraphs with the predictions in them
    reason: str = ""
    compared: bool = False

    def rows(self) -> list[tuple[str, str, str]]:
        """Of each blank its number, what was predicted, and what was measured."""
        rows = []
        for number, predicted in enumerate(self.predictions, 1):
            value = measured(self.answers[number], self.output) if number in self.answers else None
            rows.append((f"[{number}]", predicted or "-", "" if value is None else f"{value:.4g}"))
        return rows

    def page(self) -> str:
        """Its part of the page that is kept."""
        text = f"### {self.title}\n\n"
        if self.predictions:
            text += "\n\n".join(self.filled)
            text += "\n\n| blank | predicted | measured |\n| --- | --- | --- |\n"
            cells = ([cell.replace("|", "/") for cell in row] for row in self.rows())
            text += "".join(f"| {' | '.join(row)} |\n" for row in cells)
        return text + (f"\nReason: {self.reason}\n" if self.reason else "") + "\n"


class Conversation:
    """Walks through a sheet with a reader.

    `run(line)` runs the block whose first command is in that line and returns what it printed;
    `ask(prompt)` returns what the reader types.
    """

    def __init__(self, run: Callable[[int], str], ask: Callable[[str], str], page: Path):
        self.run = run
        self.ask = ask
        self.page = page

    def hold(self, sheet: str) -> None:
        """Go on behind the last task of the page, to the end of the sheet."""
        exercise = ""
        tasks: list[tuple[Task, list[Piece]]] = []
        intro: list[Piece] = []
        for piece in pieces(sheet):
            if piece.text.startswith("## "):
                exercise = piece.text.removeprefix("## ").strip()
                tasks.append((Task(exercise), []))
            elif piece.text.startswith("### "):
                title = piece.text.removeprefix("### ").strip()
                tasks.append((Task(f"{exercise}, {title}" if exercise else title), []))
            else:
                (tasks[-1][1] if tasks else intro).append(piece)
        kept = self.page.read_text() if self.page.exists() else ""
        finished = [n for n, (task, _) in enumerate(tasks) if f"### {task.title}\n" in kept]
        if finished:
            begin = finished[-1] + 1
            print(f"{self.page} has {len(finished)} tasks; delete it to begin again.")
        else:
            begin = 0
            self.walk(Task(""), intro)
        for task, parts in tasks[begin:]:
            print(f"\n### {task.title}\n", flush=True)
            self.walk(task, parts)
            if task.predictions or task.reason:
                self.page.parent.mkdir(exist_ok=True)
                with self.page.open("a") as file:
                    file.write(task.page())

    def walk(self, task: Task, parts: list[Piece]) -> None:
        """One section: all that it shows, asks and runs."""
        for piece in parts:
            for number, words in ANSWER.findall(piece.text):
                task.answers[int(number)] = " ".join(words.split())
        for piece, follower in itertools.zip_longest(parts, parts[1:]):
            if piece.language in ("bash", "python"):
                code = "\n".join(piece.text.splitlines()[1:-1])
                print(f"\n{code}\n")
                self.ask("Enter runs this ... ")
                task.output += self.run(piece.line + 1)
                print(flush=True)
            elif piece.is_fold:
                self.open(task, piece)
            elif not piece.text.startswith("Prints:"):
                self.show(task, piece, follower)
        if task.predictions and not task.compared:
            self.compare(task)

    def show(self, task: Task, piece: Piece, follower: Piece | None) -> None:
        """A paragraph, or a block that does not run; its blanks are asked for."""
        if not (text := plain(piece.text)):
            return
        if piece.language is not None:
            self.show_block(task, text)
            return
        if "**Predict" in text and not BLANK.search(text) and not (follower and is_table(follower)):
            text += " ____"  # in words
        if not BLANK.search(text):
            print(f"{text}\n", flush=True)
            return
        first = len(task.predictions) + 1
        numbers = itertools.count(first)
        shown, blanks = BLANK.subn(lambda _: f"[{next(numbers)}]____", text)
        print(f"{shown}\n", flush=True)
        own = self.predictions(first, blanks)
        task.predictions += own
        words = iter(own)
        task.filled.append(BLANK.sub(lambda _: f"**{next(words) or '-'}**", text))
        task.compared = False

    def show_block(self, task: Task, text: str) -> None:
        """A block of text. All blanks of a line are one prediction."""
        number = first = len(task.predictions) + 1
        lines = []
        for line in text.splitlines():
            tag = ""
            if BLANK.search(line):
                tag = f"[{number}] "
                number += 1
            lines.append(tag + line)
        print("\n".join(lines) + "\n", flush=True)
        if number > first:
            own = self.predictions(first, number - first)
            task.predictions += own
            words = [f"[{first + n}] {word or '-'}" for n, word in enumerate(own)]
            task.filled.append("\n".join([*lines[:-1], *words, lines[-1]]))
            task.compared = False

    def predictions(self, first: int, count: int) -> list[str]:
        return [self.ask(f"[{first + n}] ").strip() for n in range(count)]

    def compare(self, task: Task) -> None:
        """Predictions and output side by side, then the reader's reason."""
        print("\n      predicted      measured")
        for number, predicted, value in task.rows():
            print(f"{number:5} {predicted:14} {value or '(see above)'}")
        task.reason = f"{task.reason} {self.ask('Why? ').strip()}".strip()
        task.compared = True

    def open(self, task: Task, piece: Piece) -> None:
        """A fold: an answer behind the reader's own, a hint only where it is wanted."""
        summary = SUMMARY.search(piece.text)
        title = plain(summary[1]) if summary else ""
        if task.predictions and not task.compared and not HINT.match(title):
            self.compare(task)
        elif self.ask(f"Open '{title}'? [y/N] ").strip().lower() not in ("y", "yes"):
            return
        print(f"\n{plain(piece.text)}\n", flush=True)

#!/usr/bin/env python3
"""Run the commands of an exercise sheet in order, and check that they print what the sheet says.

All ```bash and ```python blocks of a Markdown file run one after the other, as a reader would type
them: the working directory, variables and functions carry over from block to block. `python` is the
interpreter of this tool. A block fails if one of its commands fails, or if a phrase of the line
`Prints: ...` behind it is missing from its output. On a machine without ROCm a block that stops for
want of a ROCm tool is skipped, not failed, and so is the rest of its section. Nothing that a block
has started outlives it.

A comment directly before a block says when it does not run:
  <!-- needs a GPU: REASON -->     where PyTorch sees no GPU
  <!-- not run in CI: REASON -->   with --ci

The commands run in a scratch copy of the repository, which is removed at the end, or in --directory
as it is. The output of each block stays in a folder that the last line names.

With --ask you do a sheet: it takes your predictions before a block runs, and opens an answer behind
yours. It works in the repository, keeps your answers in my_answers/, and goes on where you stopped.

Examples:
  python exercises/run_sheet.py exercises/tiny_llama_v1/exercise_1_baseline_analysis.md --ask
  python exercises/run_sheet.py exercises/tiny_llama_v2/exercise_2_flash_attention.md
  python exercises/run_sheet.py docs/START.md --directory . --log logs --keep-going
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from exercises import small_runs
from exercises.ask import Conversation
from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.files import ROOT, write_text

TAIL = 20  # lines shown of what a failed block printed
SILENCE = 10  # seconds without output, then a block of --ask says that it runs
PATIENCE = 15  # seconds after Ctrl-C, for the scripts to leave their records
OK, FAILED, SKIPPED, INTERRUPTED = "ok", "failed", "skipped", "interrupted"
NOT_IN_CI, NEEDS_GPU = MARKERS = "not run in CI", "needs a GPU"


@dataclass
class Block:
    """One fenced block of commands, and what became of it."""

    exercise: str  # the `## ` heading above
    section: str  # the `### ` heading above
    language: str  # bash or python
    line: int  # of the first command in the sheet, from 1
    text: str
    marks: dict[str, str]  # the markers before it, each with its reason
    phrases: list[str] = field(default_factory=list)  # what its output must contain
    status: str = "not reached"
    seconds: float = 0.0
    exit_status: int | None = None
    remark: str = ""  # why it failed or did not run
    log: str = ""  # name of the file with its output

    def __str__(self) -> str:
        """The first line that is not a comment."""
        lines = [line.strip() for line in self.text.splitlines()]
        return next((line for line in lines if line and not line.startswith("#")), "")


TOKEN = re.compile(
    rf"""^(?P<fence>`{{3,}}|~{{3,}})[ ]*(?P<language>\w*)[^\n]*\n (?P<text>.*?)^(?P=fence)[ ]*$
    | ^(?P<level>\#{{1,6}})[ ]+(?P<title>[^\n]*)$
    | ^<!--[ ]*(?P<marker>{"|".join(MARKERS).replace(" ", "[ ]")}):\s*(?P<reason>.*?)\s*-->
    | ^Prints:(?P<prints>.*?)(?=\n\s*\n|\Z)""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
ANY_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[ ]*(?:bash|python)\b", re.MULTILINE)


def parse_sheet(text: str) -> list[Block]:
    """The runnable blocks of a sheet in order; ToolError names a line that breaks the rules."""
    blocks: list[Block] = []
    exercise = section = ""
    before = None  # what stands directly before, with blank lines between at most
    marks: dict[str, str] = {}  # the reasons of the markers that stand there
    for match in TOKEN.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if before and text[before.end() : match.start()].strip():
            before, marks = None, {}
        if match["marker"]:
            marks[match["marker"]] = " ".join(match["reason"].split())
        elif match["language"] in ("bash", "python"):
            place = exercise, section, match["language"], line + 1
            blocks.append(Block(*place, match["text"], marks))
        elif match["title"] and len(match["level"]) <= 2:
            exercise, section = match["title"], ""
        elif match["title"] and len(match["level"]) == 3:
            section = match["title"]
        elif match["prints"] is not None:
            phrases = re.findall(r"`([^`]+)`", match["prints"].replace("\n", " "))
            if not (phrases and before and before["language"] in ("bash", "python")):
                needs = "needs a bash or python block before it and `phrases`"
                raise ToolError(f"line {line}: 'Prints:' {needs}")
            blocks[-1].phrases = phrases
        before, marks = match, marks if match["marker"] else {}
    lines = {block.line - 1 for block in blocks}
    for match in ANY_FENCE.finditer(text):
        if (line := text.count("\n", 0, match.start()) + 1) not in lines:
            what = "this block is indented, inside another one, or has no end"
            raise ToolError(f"line {line}: {what}")
    if not blocks:
        raise ToolError("no bash or python block")
    return blocks


# Stands before each block, in one line. It restores what the block before has left and notes what
# this one leaves; bash says that its own read-only variables cannot be set, which does not matter.
PREAMBLE = """\
trap '{ declare -p; declare -f; } >"$0.state"' EXIT; trap 'exit 130' INT; \
if [[ -e $0.state ]]; then source "$0.state" 2>/dev/null || true; cd "$PWD"; fi; \
trap 'echo "line $LINENO: status $?" >&2' ERR
"""
MISSING_TOOL = re.compile(
    r"^.*error: .* not found: it comes with ROCm.*|\broc[\w-]*: command not found", re.MULTILINE
)


@dataclass
class Session:
    """Where and with which variables blocks run. `files` is for what nobody looks at."""

    directory: Path
    environment: dict[str, str]
    files: Path
    logs: Path
    show: bool  # what a block prints, while it runs

    def run(self, block: Block) -> None:
        """Run one block and judge it."""
        file = self.files / "block"
        above = "\n" * (block.line - 2)  # messages then name the lines of the sheet
        text = block.text
        if block.language == "python":
            text = f"python - <<'END OF BLOCK'\n{above}\n{text}END OF BLOCK\n"
        file.write_text(PREAMBLE + above + text)
        block.status, block.log = INTERRUPTED, f"line_{block.line:04}.log"
        start = time.perf_counter()
        try:
            block.exit_status = self.run_bash(block, file)
        finally:
            block.seconds = time.perf_counter() - start
        output = (self.logs / block.log).read_text(errors="replace")
        missing = [phrase for phrase in block.phrases if phrase not in output]
        if block.exit_status in (4, 127) and (match := MISSING_TOOL.search(output)):
            block.status, block.remark = SKIPPED, match[0]
        elif block.exit_status:
            block.status, block.remark = FAILED, f"status {block.exit_status}"
        elif missing:
            block.status, block.remark = FAILED, "does not print: " + ", ".join(missing)
        else:
            block.status = OK

    def run_bash(self, block: Block, file: Path) -> int:
        """Run a block's file in a process group of its own, of which nothing is left; returns the
        status."""
        log = self.logs / block.log
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-e", str(file)],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp,
            )
        try:
            if self.show:
                show_output(process, log)
            elif sys.stdout.isatty():
                show_seconds(process, block)
            return process.wait()
        except KeyboardInterrupt:
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(PATIENCE)
                    break
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def show_output(process: subprocess.Popen, log: Path) -> None:
    """Copy to the screen what a process writes into its log, until it ends."""
    start = last = time.monotonic()
    with log.open("rb") as output:
        ended = False
        while not ended:
            ended = process.poll() is not None  # before the last look
            text = output.read()
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
            now = time.monotonic()
            if text:
                last = now
            elif now - last > SILENCE:
                print(f"  (runs for {now - start:.0f} s)", flush=True)
                last = now
            if not (text or ended):
                time.sleep(0.1)


def show_seconds(process: subprocess.Popen, block: Block) -> None:
    """A line with the seconds that a block has taken, which `report` writes over in the end."""
    start = time.perf_counter()
    while process.poll() is None:
        seconds = time.perf_counter() - start
        line = f"  line {block.line:4}  {'runs':13}  {seconds:7.0f} s  {block}"
        print(line[: shutil.get_terminal_size().columns - 1], end="\r", flush=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)


def make_environment(files: Path, args: argparse.Namespace) -> dict[str, str]:
    """That of the blocks: this interpreter is `python`; its programs and the stand-ins are on
    PATH."""
    shims = files / "bin"
    shims.mkdir(parents=True, exist_ok=True)
    scripts, program = "|".join(small_runs.SCRIPTS), shlex.quote(small_runs.__file__)
    small = f'case ${{1##*/}} in\n{scripts}) set -- {program} "$@" ;;\nesac\n'
    small = small if args.shrink else ""
    for name in ("python", "python3"):
        (shims / name).write_text(f'#!/bin/sh\n{small}exec {shlex.quote(sys.executable)} "$@"\n')
        (shims / name).chmod(0o755)
    if args.with_standins:
        subprocess.run([sys.executable, ROOT / "tests/standins/rocm.py", shims], check=True)
    places = [shims, Path(sys.executable).parent, os.environ.get("PATH", os.defpath)]
    environment = {**os.environ, "PATH": os.pathsep.join(map(str, places)), "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHON", None)  # the wrappers would prefer it to python3
    return environment


def report(block: Block, logs: Path) -> None:
    """One line for a block, more if it did not simply succeed."""
    print(f"  line {block.line:4}  {block.status:13}  {block.seconds:7.1f} s  {block}")
    if block.remark:
        print(f"             {block.remark}")
    if block.status == FAILED:
        for line in (logs / block.log).read_text(errors="replace").splitlines()[-TAIL:]:
            print(f"             | {line}")
    sys.stdout.flush()


def markers_left_out(args: argparse.Namespace, blocks: list[Block]) -> set[str]:
    """Blocks with one of these markers do not run."""
    left_out = {NOT_IN_CI} if args.ci else set()
    if any(NEEDS_GPU in block.marks for block in blocks):
        count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
        gpus = subprocess.run(count, capture_output=True, text=True).stdout.strip()
        left_out |= {NEEDS_GPU} if gpus in ("", "0") else set()  # "": there is no PyTorch
    return left_out


def run_blocks(args: argparse.Namespace, blocks: list[Block], session: Session) -> None:
    left_out = markers_left_out(args, blocks)
    exercise = skipped = None
    for block in blocks:
        if block.exercise != exercise:
            exercise = block.exercise
            print(exercise, flush=True)
        try:
            if why := [mark for mark in MARKERS if mark in left_out and mark in block.marks]:
                block.status, block.remark = why[0], block.marks[why[0]]
            elif skipped == (block.exercise, block.section):
                block.status, block.remark = SKIPPED, "follows a block that was skipped"
            else:
                session.run(block)
        finally:
            summary = {"sheet": str(args.sheet), "blocks": [asdict(block) for block in blocks]}
            write_text(session.logs / "summary.json", json.dumps(summary, indent=2) + "\n")
        report(block, session.logs)
        if block.status == SKIPPED:
            skipped = block.exercise, block.section
        if block.status == FAILED and not args.keep_going:
            break


def page_of(sheet: Path) -> Path:
    """Where the answers to a sheet are kept: its name begins with that of its folder."""
    sheet = sheet.resolve()
    return Path("my_answers", f"{sheet.parent.name}-{sheet.name}")


def converse(args: argparse.Namespace, blocks: list[Block], text: str) -> int:
    """Do a sheet with a reader. What a shell remembers from block to block is kept beside the
    page."""
    directory = (args.directory or ROOT).resolve()
    page = directory / page_of(args.sheet)
    files = page.with_name(f".{page.stem}")
    if not page.exists():
        shutil.rmtree(files, ignore_errors=True)
    logs = Path(args.log or files / "logs").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    session = Session(directory, make_environment(files, args), files, logs, show=True)
    left_out = markers_left_out(args, blocks)
    at = {block.line: block for block in blocks}

    def run(line: int) -> str:
        block = at[line]
        if why := [mark for mark in MARKERS if mark in left_out and mark in block.marks]:
            print(f"Left out, {why[0]}: {block.marks[why[0]]}")
            return ""
        session.run(block)
        if block.remark:
            print(f"({block.status}: {block.remark})")
        return (logs / block.log).read_text(errors="replace")

    def ask(prompt: str) -> str:
        print(prompt, end="", flush=True)
        if not (line := sys.stdin.readline()):
            raise KeyboardInterrupt
        return line

    if not page.exists():
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"# My answers: {args.sheet}\n\n")
    try:
        Conversation(run, ask, page).hold(text)
    except KeyboardInterrupt:
        print(f"\nThe same command goes on behind the last task in {page}.", flush=True)
        raise
    print(f"Your answers: {page}")
    return int(any(block.status == FAILED for block in blocks))


def copy_repository(directory: Path) -> None:
    """What git tracks, and what it would: new files that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    options = {"capture_output": True, "text": True, "check": True}
    try:
        listed = subprocess.run(command, cwd=ROOT, **options).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolError(f"git cannot list what to copy ({error}); give --directory") from error
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)


def run_sheet(args: argparse.Namespace) -> int:
    # even where SIGINT was ignored; `timeout` sends the other one
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        text = args.sheet.read_text(encoding="utf-8")
        blocks = parse_sheet(text)
    except (UnicodeDecodeError, ToolError) as error:
        raise ToolError(f"{args.sheet}: {error}") from error
    if args.directory and not args.directory.is_dir():
        raise ToolError(f"--directory {args.directory}: no such directory")
    if args.log and args.log.exists() and not args.log.is_dir():
        raise ToolError(f"--log {args.log}: not a directory")
    if args.ask:
        return converse(args, blocks, text)
    with tempfile.TemporaryDirectory(prefix="run_sheet_") as name:
        files, copy = Path(name) / "files", Path(name) / "copy"
        environment = make_environment(files, args)
        if not args.directory:
            copy_repository(copy)
        directory = (args.directory or copy).resolve()
        logs = Path(args.log or tempfile.mkdtemp(prefix="run_sheet_logs_")).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        try:
            run_blocks(args, blocks, Session(directory, environment, files, logs, show=False))
        except KeyboardInterrupt:
            print(f"logs: {logs}", flush=True)
            raise
    count = Counter(block.status for block in blocks)
    print(f"{len(blocks)} blocks: {', '.join(f'{n} {status}' for status, n in count.items())}")
    print(f"logs: {logs}")
    return int(count[FAILED] > 0)


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    add = parser.add_argument
    add("sheet", type=Path, metavar="SHEET.md")
    add("--directory", type=Path, metavar="DIR", help="run there, not in a scratch copy")
    text = "keep the output of each block, and summary.json, there "
    add("--log", type=Path, metavar="DIR", help=f"{text}(default: a new temporary folder)")
    text = "do the sheet: predict at the prompt, see the output beside it, give your reason, then "
    text += "read the sheet's; your answers stay in my_answers/"
    parser.add_flag("--ask", text)
    parser.add_flag("--keep-going", "run the blocks behind a failed one")
    text = "for tests only: other sizes than the sheet's (exercises/small_runs.py), so that its "
    text += "commands run, but what they print teaches nothing"
    parser.add_flag("--shrink", text)
    parser.add_flag("--with-standins", "tests/standins in place of ROCm's tools")
    parser.add_flag("--ci", "leave out blocks behind <!-- not run in CI: REASON -->")
    return parser


main = program(build_parser, run_sheet)

if __name__ == "__main__":
    sys.exit(main())

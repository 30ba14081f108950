#!/usr/bin/env python3
"""Plant faults, one after the other, and see which tests notice each.

dev/faults.txt lists them. A fault is a name, a file and what pytest is to run, the text that
stands in the file and, in its place, the wrong one. It is planted in a copy of the repository as
it is now, committed or not, and taken out again. A change of dev/parts/ is copied into the scripts.

The exit status is 1 if nobody notices a fault, or if it cannot be planted any more.

Examples:
  python dev/plant_faults.py                     # each with its own tests, up to one that fails
  python dev/plant_faults.py --only "mask|fusion_lab/"  # those with this in their name or file
  python dev/plant_faults.py --whole             # each with all tests
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fusion_lab.cli import Parser, ToolError, documented_parser, program
from fusion_lab.files import ROOT

TABLE = ROOT / "tools" / "faults.txt"
LIMIT = 900  # seconds for the tests of one fault; a fault may hang them
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """What is planted where, and the arguments of pytest for the tests that should notice it."""

    name: str
    file: str
    tests: str
    right: str
    wrong: str

    def plant(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        if self.right not in text:
            raise ToolError(f"{self.file} has no {self.right!r}")
        path.write_text(text.replace(self.right, self.wrong, 1))
        if path.parent.name == "common":
            command = [sys.executable, "dev/sync_parts.py"]
            subprocess.run(command, cwd=root, check=True, capture_output=True)


def read_faults(path: Path) -> list[Fault]:
    """The faults of a table: paragraphs of `name`, `file | tests`, `- right`, `+ wrong` lines."""
    faults = []
    for part in path.read_text().strip().split("\n\n"):
        lines = [line for line in part.splitlines() if not line.startswith("#")]
        if not lines:
            continue
        name, place, *texts = lines
        file, _, tests = place.partition(" | ")
        right, wrong = ("\n".join(t[2:] for t in texts if t[0] == sign) for sign in "-+")
        if not right or right == wrong:
            raise ToolError(f"{path}: {name}: not a text and another one")
        faults.append(Fault(name, file, tests, right, wrong))
    return faults


@contextmanager
def copy_of_repository() -> Iterator[Path]:
    """A worktree of what is here now; new files only if git knows them."""

    def git(*command: str) -> str:
        options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
        return subprocess.run(["git", *command], **options).stdout.strip()

    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        root = Path(folder) / "copy"
        git("worktree", "add", "--detach", str(root), git("stash", "create") or "HEAD")
        try:
            yield root
        finally:
            git("worktree", "remove", "--force", str(root))


def who_notices(root: Path, fault: Fault, whole: bool) -> list[str]:
    tests = [] if whole else ["-n", "0", "-x", *shlex.split(fault.tests)]
    command = [sys.executable, "-B", "-m", "pytest", "-m", "", "-q", "-ra", *tests]
    try:
        fault.plant(root)
        with tempfile.TemporaryFile("w+") as output:
            options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(command, cwd=root, **options)
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                return ["all, as they do not end"]
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and whatever a test has left
                process.wait()
            output.seek(0)
            text = output.read()
    finally:
        subprocess.run(["git", "checkout", "--quiet", "."], cwd=root, check=True)
    if process.returncode < 0:
        return [f"the process, by signal {-process.returncode}"]
    if process.returncode not in (0, 1):
        raise ToolError(f"pytest ended with {process.returncode}: {text.strip().splitlines()[-1:]}")
    return [name.rpartition("/")[2] for name in FAILED.findall(text)]


def plant(args: argparse.Namespace) -> int:
    faults = [f for f in read_faults(TABLE) if re.search(args.only, f"{f.name} {f.file}")]
    missed = []
    with copy_of_repository() as root:
        for fault in faults:
            started = time.monotonic()
            try:
                found = who_notices(root, fault, args.whole)
                answer = ", ".join(found) or "NOBODY"
            except ToolError as error:
                found, answer = [], f"CANNOT SAY: {error}"
            seconds = f"{time.monotonic() - started:4.0f} s"
            print(f"{seconds}  {fault.name}: {answer}", flush=True)
            missed += [] if found else [fault.name]
    print(f"\n{len(faults) - len(missed)} of {len(faults)} noticed")
    return int(bool(missed))


def build_parser() -> Parser:
    parser = documented_parser(__file__, __doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="plant these")
    parser.add_flag("--whole", "run all tests for each fault")
    return parser


main = program(build_parser, plant)

if __name__ == "__main__":
    sys.exit(main())

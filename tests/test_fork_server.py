"""A program that is forked does what a fresh process does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import forking_python

SHOWS = """
import json, os, sys
what = [sys.argv, os.getcwd(), os.environ.get("NOTE"), sys.stdin.read(), sys.path[0], __name__]
import neighbour
print(json.dumps([*what, neighbour.NAME, "torch" in sys.modules]))
print("to stderr", file=sys.stderr)
"""
STARTS = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path):
    """`program(text)` is the path of a program of this text, with a space in it."""

    def write(text: str) -> Path:
        path = tmp_path / "a program.py"
        path.write_text(text)
        return path

    return write


def shown(path: Path, cwd: Path, **environment: str) -> list:
    """What SHOWS prints of itself."""
    options = {"cwd": cwd, "env": os.environ | environment, "capture_output": True, "text": True}
    done = subprocess.run([forking_python(), "-B", path, "a b"], input="in", **options)
    assert (done.returncode, done.stderr) == (0, "to stderr\n")
    return json.loads(done.stdout)


def test_a_fork_gets_what_a_fresh_process_gets(program, tmp_path: Path):
    path = program(SHOWS)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "neighbour.py").write_text("NAME = 'found'")
    expected = [[str(path), "a b"], str(tmp_path), "x", "in", str(tmp_path), "__main__", "found"]
    assert shown(path, tmp_path, NOTE="x", PYTHONPATH="lib") == [*expected, True]
    fresh = shown(path, tmp_path, NOTE="x", PYTHONPATH="lib", OMP_NUM_THREADS="2")
    assert fresh == [*expected, False], "a variable that PyTorch reads when it is imported"


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('no')", 1),
        ("raise ValueError('no')", 1),
        ("import os; os._exit(5)", 5),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_end_is_that_of_the_program(program, end: str, status: int):
    text = f"import atexit\natexit.register(print, 'at exit')\nprint('out')\n{end}\n"
    done = subprocess.run([forking_python(), program(text)], capture_output=True, text=True)
    assert done.returncode == status
    assert (done.stdout == "out\nat exit\n") == (status not in (5, -signal.SIGKILL))
    assert ("no" in done.stderr) == ("'no'" in end)


@pytest.mark.parametrize("how", ["its end", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_a_program_or_its_caller(program, how: str):
    command = [forking_python(), program(STARTS), "0" if how == "its end" else "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = Path("/proc", process.stdout.readline().strip(), "stat")
        if how != "its end":
            process.send_signal(signal.Signals[how])
        process.wait(60)
    assert process.returncode == (0 if how == "its end" else -signal.Signals[how])
    deadline = time.monotonic() + 10
    while child.exists() and " Z " not in child.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)

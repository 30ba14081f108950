"""A program that is forked does what a fresh process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import forking_python

SHOWS = """
import atexit, os, signal, sys
import neighbour
print(sys.argv, os.getcwd(), os.environ["NOTE"], sys.stdin.read(), sys.path[0], __name__)
print("to stderr", file=sys.stderr)
atexit.register(print, "at exit")
"""
ENDS = """raise SystemExit(3)
raise SystemExit('no')
raise ValueError('no')
os._exit(5)
os.kill(os.getpid(), signal.SIGKILL)
"""
STARTS = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The path of a program that is still to be written, with a space in it."""
    return tmp_path / "a program.py"


@pytest.mark.parametrize("end", ENDS.split("\n"))
def test_a_fork_gets_what_a_fresh_process_gets_and_ends_as_it_does(program: Path, end: str):
    program.write_text(SHOWS + end)
    (program.parent / "lib").mkdir()
    (program.parent / "lib" / "neighbour.py").touch()
    options = {"cwd": program.parent, "env": os.environ | {"NOTE": "x", "PYTHONPATH": "lib"}}
    fork, fresh = (
        subprocess.run(
            [python, "-B", program, "a b"], input="in", capture_output=True, text=True, **options
        )
        for python in (forking_python(), sys.executable)
    )
    assert (fork.returncode, fork.stdout) == (fresh.returncode, fresh.stdout)
    assert fork.stderr.splitlines()[-1] == fresh.stderr.splitlines()[-1]


@pytest.mark.parametrize(("variable", "forked"), [("NOTE", "True"), ("OMP_NUM_THREADS", "False")])
def test_a_variable_that_pytorch_reads_when_it_is_imported_needs_a_fresh_process(variable, forked):
    command = [forking_python(), "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.check_output(command, env=os.environ | {variable: "2"}, text=True) == (
        f"{forked}\n"
    )


@pytest.mark.parametrize("how", ["its end", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_a_program_or_its_caller(program: Path, how: str):
    program.write_text(STARTS)
    command = [forking_python(), program, "0" if how == "its end" else "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = Path("/proc", process.stdout.readline().strip(), "stat")
        if how != "its end":
            process.send_signal(signal.Signals[how])
        process.wait(60)
    assert process.returncode == (0 if how == "its end" else -signal.Signals[how])
    deadline = time.monotonic() + 30
    while child.exists() and " Z " not in child.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)

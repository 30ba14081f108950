"""What the validation scripts and environment_setup.sh share: finding tools, asking PyTorch, and
the table of results. Only the standard library is imported: it works before anything is installed.

For environment_setup.sh:
  python checks.py track               the track of this machine, and why
  python checks.py torch TRACK         the version of PyTorch, or nothing; status 1 and why if it
                                       cannot be used
  python checks.py cpu-build BOUND...  the newest CPU build of PyTorch that pip finds within these
                                       bounds, as a requirement, or nothing
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OLDEST_TORCH = "2.6"  # as in requirements.txt
TRACKS = ("cpu", "nvidia", "rocm")
ROCM = Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
KFD = Path("/dev/kfd")  # the device file of AMD's compute driver
TOOL_TIMEOUT = 60  # seconds; tools that only print what they find
CHILD_TIMEOUT = 300  # seconds; importing PyTorch from a network file system can take a minute
ANSWER = "ANSWER "  # starts the lines by which a child process answers

# What a child process answers: for each name a value, and why there is none, or ''.
Answers = dict[str, tuple[object, str]]


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what follows them ('+rocm6.4', 'a0+git123')."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"\d*(?:\.\d+)*", version)[0])))


def newest_cpu_build(bounds: list[str]) -> str:
    """The newest CPU build of PyTorch that pip's indexes have within `torch>=A`, `torch<B`."""
    text, _ = run_program([sys.executable, "-m", "pip", "index", "versions", "torch"])
    builds = re.findall(r"(?<![\w.])\d[\d.]*\+cpu\b", text)
    for sign, bound in re.findall(r"torch(>=|<)([\d.]+)", " ".join(bounds)):
        at_least = sign == ">="
        builds = [b for b in builds if (release(b) >= release(bound)) == at_least]
    return f"torch=={max(builds, key=release)}" if builds else ""


# Programs


def one_line(text: object, width: int = 100) -> str:
    """The text on one line, without control characters, cut to the width."""
    letters = (letter if letter.isprintable() else " " for letter in str(text))
    line = " ".join("".join(letters).split())
    return line if len(line) <= width else line[: width - 3] + "..."


def run_program(command: list[str], timeout: float = TOOL_TIMEOUT) -> tuple[str, str]:
    """Run a program without input -> what it printed, and how it failed in one line, or ''.

    Its output goes to a file: where a GPU hangs it may not die, and would keep a pipe open.
    """
    with tempfile.TemporaryFile() as output:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        try:
            process = subprocess.Popen(command, **files)
            failure = f"exit status {process.wait(timeout)}"
        except OSError as error:
            return "", f"cannot be started: {error.strerror}"
        except subprocess.TimeoutExpired:
            process.kill()
            return "", f"no answer within {timeout:g} s"
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode == 0:
        return text, ""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(ANSWER)]
    return text, one_line(lines[-1]) if lines else failure


def find_tool(name: str) -> str | None:
    """The path of a program on PATH or among ROCm's own."""
    return shutil.which(name) or shutil.which(name, path=str(ROCM / "bin"))


def package_command(package: str) -> str:
    """How a package of AMD's repositories gets here."""
    return f"sudo apt (or dnf, zypper) install {package}, or load your site's module of ROCm"


def here(path: Path) -> str:
    """A path in the repository as it is written in a command given here."""
    return shlex.quote(os.path.relpath(path))


def detect_track() -> tuple[str, str]:
    """The track of this machine and what tells so."""
    if tool := find_tool("rocminfo"):
        return "rocm", f"found {tool}"
    tool = shutil.which("nvidia-smi")
    if tool and "GPU 0:" in run_program([tool, "-L"])[0]:
        return "nvidia", f"found a GPU with {tool}"
    for path in (ROCM, KFD):
        if path.exists():
            return "rocm", f"found {path}"
    return "cpu", "found neither ROCm nor an NVIDIA GPU"


# PyTorch is asked in a child process, which a broken build or driver can end or block


def answer(name: str, function: Callable[[], object]) -> None:
    """In the child: pass on what the function returns, or why it failed."""
    value = None
    problem = ""
    try:
        value = function()
    except (Exception, SystemExit) as error:
        problem = one_line(f"{type(error).__name__}: {error}")
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            problem = "missing"
    print("\n" + ANSWER + json.dumps({name: [value, problem]}), flush=True)


def in_child(function: Callable, *arguments: object) -> Answers:
    """Call a function of one of these modules in a new Python process."""
    module = Path(function.__code__.co_filename)
    code = f"import sys; sys.path.insert(0, {str(module.parent)!r}); import {module.stem} as m; "
    code += f"m.{function.__name__}(*{arguments!r})"
    text, failure = run_program([sys.executable, "-c", code], CHILD_TIMEOUT)
    answers = defaultdict(lambda: (None, failure or "not reached"))
    for line in re.findall(rf"^{ANSWER}(.*)", text, re.MULTILINE):
        answers |= json.loads(line)
    return answers


def describe_torch() -> tuple[str, str]:
    """Version and build of PyTorch: 'ROCm 6.4.43482', 'CUDA 13.0' or 'CPU'."""
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    return torch.__version__, f"ROCm {torch.version.hip}" if torch.version.hip else cuda


def probe_torch() -> None:
    """In the child: which PyTorch is there."""
    answer("torch", describe_torch)


def torch_problem(answers: Answers, track: str) -> str:
    """Why the PyTorch that a child process found cannot be used on this track, or ''."""
    torch, problem = answers["torch"]
    if problem:
        return problem if problem == "missing" else f"does not import: {problem}"
    version, build = torch
    if release(version) < release(OLDEST_TORCH):
        return f"{version} is older than {OLDEST_TORCH}"
    if not build.startswith({"rocm": "ROCm", "nvidia": "CUDA", "cpu": ""}[track]):
        return f"{version} is a {build} build, which the {track} track cannot use"
    return ""


def torch_command(problem: str, track: str) -> str:
    """The command that gives a usable PyTorch, never into the environment of one that is not."""
    fresh = "" if problem == "missing" else "python3 -m venv fresh && source fresh/bin/activate && "
    return f"{fresh}bash {here(ROOT / 'setup/environment_setup.sh')} --track {track}"


# The table


class Check(NamedTuple):
    """One row. `state` is ok, MISSING (the track needs it) or optional (absent, but not needed)."""

    what: str
    state: str
    found: str
    purpose: str
    mend: str = ""


def check(
    what: str, found: object, purpose: str, problem: str = "", mend: str = "", needed: bool = True
) -> Check:
    """A row; `mend` is the command that puts the problem right."""
    if not problem:
        return Check(what, "ok", one_line(found), purpose)
    return Check(what, "MISSING" if needed else "optional", one_line(problem), purpose, mend)


def torch_check(answers: Answers, track: str) -> Check:
    """The row of the PyTorch that a child process found."""
    problem = torch_problem(answers, track)
    found = "" if problem else "{}, {} build".format(*answers["torch"][0])
    return check("torch", found, "everything", problem, torch_command(problem, track))


def table(rows: list[Check]) -> str:
    """The rows in columns, then the command for each that is not there."""
    width = max(len(row.what) for row in rows)
    lines = [f"{row.state:8}  {row.what:{width}}  {row.found}  ({row.purpose})" for row in rows]
    titles = {"MISSING": "To mend what is missing:", "optional": "If you want what is optional:"}
    for state, title in titles.items():
        if absent := [row for row in rows if row.state == state]:
            lines += ["", title, *(f"  {row.what}:  {row.mend}" for row in absent)]
    return "\n".join(lines)


def validate(
    title: str, gather: Callable[[str], list[Check]], description: str, argv: list[str] | None
) -> int:
    """Print the table of a validation script; 0 if all that the track needs is there, else 1."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    what = "what to check for (default: what is detected)"
    parser.add_argument("--track", choices=TRACKS, help=what)
    asked = parser.parse_args(argv).track
    track, reason = (asked, "as asked for") if asked else detect_track()
    rows = gather(track)
    missing = sum(row.state == "MISSING" for row in rows)
    print(f"{title} check, {track} track ({reason})\n\n{table(rows)}\n")
    print(f"{title} check: {f'FAIL ({missing} missing)' if missing else 'PASS'}")
    return int(missing > 0)


if __name__ == "__main__":
    question, *about = sys.argv[1:]
    if question == "track":
        print(*detect_track())
    elif question == "cpu-build":
        print(newest_cpu_build(about))
    elif question == "torch":
        answers = in_child(probe_torch)
        problem = torch_problem(answers, *about)
        print(answers["torch"][0][0] if not problem else "" if problem == "missing" else problem)
        sys.exit(problem not in ("", "missing"))

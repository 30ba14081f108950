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
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST_TORCH = "2.6"  # as in requirements.txt
TRACKS = ("cpu", "nvidia", "rocm")
ROCM = Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
KFD = Path("/dev/kfd")  # the device file of AMD's compute driver
TOOL_TIMEOUT = 60  # seconds; tools that only print what they find
TORCH_TIMEOUT = 300  # seconds; importing PyTorch from a network file system can take a minute
PACKAGE = "sudo apt (or dnf, zypper) install {}, or load your site's module of ROCm"
# Prints version and build: 'ROCm 6.4.43482', 'CUDA 13.0' or 'CPU'.
DESCRIBE_TORCH = """import torch
cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
print(torch.__version__, f"ROCm {torch.version.hip}" if torch.version.hip else cuda, sep=", ")"""


class Problem(Exception):
    """What is wrong, and the command that puts it right."""

    def __init__(self, text: str, mend: str = ""):
        super().__init__(text)
        self.mend = mend


# Programs


def one_line(text: object, width: int = 100) -> str:
    """The text on one line, without control characters, cut to the width."""
    letters = (letter if letter.isprintable() else " " for letter in str(text))
    line = " ".join("".join(letters).split())
    return line if len(line) <= width else line[: width - 3] + "..."


def output_of(command: list[str], timeout: float = TOOL_TIMEOUT) -> str:
    """What a program prints; a Problem with its last words if it fails.

    Its output goes to a file: where a GPU hangs it may not die, and would keep a pipe open.
    """
    with tempfile.TemporaryFile() as output:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, **files)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Problem(f"no answer within {timeout:g} s") from None
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status:
        raise Problem((text.strip().splitlines() or [f"exit status {status}"])[-1])
    return text


def find_tool(name: str) -> str | None:
    """The path of a program on PATH or among ROCm's own."""
    return shutil.which(name) or shutil.which(name, path=str(ROCM / "bin"))


def detect_track() -> tuple[str, str]:
    """The track of this machine and what tells so."""
    if tool := find_tool("rocminfo"):
        return "rocm", f"found {tool}"
    tool = shutil.which("nvidia-smi")
    if tool and subprocess.run([tool, "-L"], capture_output=True).returncode == 0:
        return "nvidia", f"found a GPU with {tool}"
    for path in (ROCM, KFD):
        if path.exists():
            return "rocm", f"found {path}"
    return "cpu", "found neither ROCm nor an NVIDIA GPU"


# PyTorch


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what follows them ('+rocm6.4', 'a0+git123')."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"\d*(?:\.\d+)*", version)[0])))


def newest_cpu_build(bounds: list[str]) -> str:
    """The newest CPU build of PyTorch that pip's indexes have within `torch>=A`, `torch<B`."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    builds = re.findall(r"(?<![\w.])\d[\d.]*\+cpu\b", text)
    for sign, bound in re.findall(r"torch(>=|<)([\d.]+)", " ".join(bounds)):
        at_least = sign == ">="
        builds = [b for b in builds if (release(b) >= release(bound)) == at_least]
    return f"torch=={max(builds, key=release)}" if builds else ""


def describe_torch(track: str) -> str:
    """Version and build of PyTorch; a Problem if it cannot be used on this track.

    It is asked in a process of its own, which a broken build or driver can end or block.
    """
    setup = f"bash {shlex.quote(str(ROOT / 'setup/environment_setup.sh'))} --track {track}"
    # never into the environment of one that is broken
    fresh = f"python3 -m venv fresh && source fresh/bin/activate && {setup}"
    try:
        printed = output_of([sys.executable, "-c", DESCRIBE_TORCH], TORCH_TIMEOUT)
    except Problem as problem:
        if "No module named 'torch'" in str(problem):
            raise Problem("missing", setup) from None
        raise Problem(f"does not import: {problem}", fresh) from None
    version, build = printed.strip().split(", ")
    if release(version) < release(OLDEST_TORCH):
        raise Problem(f"{version} is older than {OLDEST_TORCH}", fresh)
    if not build.startswith({"rocm": "ROCm", "nvidia": "CUDA", "cpu": ""}[track]):
        reason = f"{version} is a {build} build, which the {track} track cannot use"
        raise Problem(reason, fresh)
    return f"{version}, {build} build"


# The table


class Table:
    """Rows that are printed as they are found: ok, MISSING (the track needs it) or optional."""

    def __init__(self) -> None:
        self.mends: dict[str, list[str]] = {"MISSING": [], "optional": []}

    def row(
        self, what: str, find: Callable[[], object], purpose: str, mend: str, needed: bool = True
    ) -> bool:
        """Whether `find` finds it, or raises why not; `mend` is the command that then helps."""
        print(f"{what:28}", end=" ", flush=True)  # first: where it hangs, this says what does
        state = "ok"
        try:
            found = find()
        except Exception as error:
            state = "MISSING" if needed else "optional"
            found = error if isinstance(error, Problem) else f"{type(error).__name__}: {error}"
            self.mends[state].append(f"  {what}:  {getattr(error, 'mend', '') or mend}")
        print(f"{state:8} {one_line(found)}  ({purpose})")
        return state == "ok"


def validate(
    title: str,
    fill: Callable[[Table, str], None],
    description: str,
    argv: list[str] | None = None,
) -> int:
    """Print the table of a validation script; 0 if all that the track needs is there, else 1."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    what = "what to check for (default: what is detected)"
    parser.add_argument("--track", choices=TRACKS, help=what)
    asked = parser.parse_args(argv).track
    track, reason = (asked, "as asked for") if asked else detect_track()
    print(f"{title} check, {track} track ({reason}), {sys.executable}\n")
    table = Table()
    fill(table, track)
    titles = {"MISSING": "To mend what is missing:", "optional": "If you want what is optional:"}
    for state, mends in table.mends.items():
        if mends:
            print("", titles[state], *mends, sep="\n")
    missing = len(table.mends["MISSING"])
    print(f"\n{title} check: {f'FAIL ({missing} missing)' if missing else 'PASS'}")
    return int(missing > 0)


if __name__ == "__main__":
    question, *about = sys.argv[1:]
    if question == "track":
        print(*detect_track())
    elif question == "cpu-build":
        print(newest_cpu_build(about))
    elif question == "torch":
        try:
            print(describe_torch(*about).partition(",")[0])
        except Problem as problem:
            if str(problem) != "missing":
                print(one_line(problem))
                sys.exit(1)

"""What the validation scripts and environment_setup.sh share: finding tools and packages, and the
table of results.

Only the standard library is imported, so that it works where PyTorch is missing. PyTorch is asked
in a process of its own (`in_child`), because a broken build or driver can end or block the process
that imports it.

For environment_setup.sh:
  python checks.py track           the track of this machine, and why
  python checks.py torch TRACK     the version of PyTorch, or nothing; status 1 if it cannot be used
  python checks.py missing FILE    what FILE requires and this Python does not meet, a line each
  python checks.py cpu-build FILE  the newest CPU build of PyTorch that pip finds and FILE allows,
                                   as a requirement, or nothing
  python checks.py diverts         which setting makes pip install elsewhere or nothing, and what to
                                   do; or nothing
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import operator
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fusion_lab.cli import Parser, documented_parser, program
from fusion_lab.files import ROOT
from fusion_lab.show import Column, render

REQUIREMENTS = ROOT / "requirements.txt"
# Oldest and newest release that the tests ran with (docs/CONTRIBUTING.md); others pass with a note.
TRIED = {"torch": ("2.6", "2.15"), "triton": ("3.2", "3.9")}
TRACKS = ("cpu", "nvidia", "rocm")
KFD = Path("/dev/kfd")  # the device file of AMD's compute driver
TOOL_TIMEOUT = 30  # seconds; tools that only print what they find
INDEX_TIMEOUT = 60  # seconds; pip asks its package indexes
CHILD_TIMEOUT = 300  # seconds; importing PyTorch from a network file system can take a minute
COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne}
COMPARE |= {">": operator.gt, "<": operator.lt}
# Settings with which pip's packages do not arrive in the environment that it belongs to, those of
# the second line where they are true; where pip looks for them, the last one counts
PLACES = ("target", "prefix", "root", "python")
SWITCHES = ("user", "dry-run", "no-deps")
SECTIONS = ("global", "install", ":env:")
PROBE = "PROBE "  # starts the lines by which a child process answers


# Requirements files


class Requirement(NamedTuple):
    """One line of a requirements file: `text` as pip takes it, its parts."""

    text: str
    name: str
    bounds: tuple[tuple[str, str], ...]  # operator and version


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version without trailing zeros.

    What follows them ('+rocm6.4', 'a0+git123') is ignored.
    """
    numbers = [int(part) for part in re.match(r"\d*(?:\.\d+)*", version).group().split(".") if part]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def in_bounds(version: str, bounds: tuple[tuple[str, str], ...]) -> bool:
    """Whether the version meets all bounds; one that is not known ('') is taken to."""
    if not version:
        return True
    return all(COMPARE[sign](release(version), release(bound)) for sign, bound in bounds)


def read_requirements(path: Path) -> list[Requirement]:
    """The requirements that apply to this system, those of files named by `-r` included."""
    requirements = []
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            requirements += read_requirements(path.parent / line[3:].strip())
        elif line:
            text, _, marker = (part.strip() for part in line.partition(";"))
            match = re.fullmatch(r"([\w.-]+)\s*((?:[<>=!]=?\s*[\w.]+\s*,?\s*)*)", text)
            wanted = re.fullmatch(r"platform_system == ['\"](\w+)['\"]", marker) if marker else None
            if not match or (marker and not wanted):
                raise ValueError(f"{path}: cannot read the line {line!r}")
            if not wanted or wanted.group(1) == platform.system():
                bounds = tuple(re.findall(r"([<>=!]=?)\s*([\w.]+)", match.group(2)))
                requirements.append(Requirement(text, match.group(1), bounds))
    return requirements


def installed_version(name: str) -> str | None:
    """The version that pip knows, '' if the module is there under another name, None if it is
    missing.

    The other name matters: PyTorch's ROCm builds bring Triton as triton-rocm or
    pytorch-triton-rocm, and pip would install triton over it.
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None if importlib.util.find_spec(name.replace("-", "_")) is None else ""


def missing_requirements(path: Path) -> list[str]:
    """The requirements of the file that this Python does not meet, as pip takes them."""
    missing = []
    for need in read_requirements(path):
        version = installed_version(need.name)
        if version is None or not in_bounds(version, need.bounds):
            missing.append(need.text)
    return missing


def requirement(name: str) -> Requirement:
    """The line of requirements.txt for this package."""
    return next(need for need in read_requirements(REQUIREMENTS) if need.name == name)


def not_tried(name: str, version: str) -> str:
    """A note on a release of torch or triton outside of those that were tried, '' for one of
    them."""
    oldest, newest = TRIED[name]
    minor = release(version)[:2]
    if not minor or release(oldest) <= minor <= release(newest):
        return ""
    return f" (not tried: {oldest} to {newest} were)"


def newest_cpu_build(path: Path) -> str:
    """The newest CPU build of PyTorch that pip's indexes have and the file allows, as pip takes it;
    '' without one, or where pip cannot tell."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    text, _ = run_program(command, INDEX_TIMEOUT)
    needs = [need for need in read_requirements(path) if need.name == "torch"]
    builds = [
        build
        for build in re.findall(r"(?<![\w.])\d[\d.]*\+cpu\b", text)
        if all(in_bounds(build, need.bounds) for need in needs)
    ]
    return f"torch=={max(builds, key=release)}" if builds else ""


# Tools and child processes


def one_line(text: object, width: int = 100) -> str:
    """The text on one line, without control characters, cut to the width."""
    letters = (letter if letter.isprintable() else " " for letter in str(text))
    line = " ".join("".join(letters).split())
    return line if len(line) <= width else line[: width - 3] + "..."


def rocm_path() -> Path:
    """Where ROCm is installed, if it is: $ROCM_PATH or /opt/rocm."""
    return Path(os.environ.get("ROCM_PATH") or "/opt/rocm")


def rocm_version() -> tuple[int, ...] | None:
    """ROCm's version as numbers, None if it cannot be told."""
    try:
        version = (rocm_path() / ".info" / "version").read_text(errors="replace")
    except OSError:
        return None
    return release(version.strip()) or None


def run_program(command: list[str], timeout: float | None = None) -> tuple[str, str]:
    """Run a program without input -> what it printed, and how it failed in one line, '' if it did
    not. One that does not end in time is killed together with what it started.

    Its output goes to a file, not a pipe: a process that cannot be killed, as happens when a GPU
    hangs, would keep a pipe open and this program waiting.
    """
    timeout = timeout or TOOL_TIMEOUT
    with tempfile.TemporaryFile() as output:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        try:
            process = subprocess.Popen(command, **files, start_new_session=True)
        except OSError as error:
            return "", f"cannot be started: {error.strerror}"
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        text = output.read(1_000_000).decode(errors="replace")
    if status is None:
        return text, f"no answer within {timeout:g} s"
    if status < 0:
        return text, f"ended by signal {-status}"
    lines = (line for line in map(one_line, text.splitlines()) if line)
    said = [line for line in lines if not line.startswith(PROBE.strip())]
    return text, (said or [f"exit status {status}"])[-1] if status else ""


def answer_with(name: str, function: Callable[[], object]) -> None:
    """In a child process: pass on what the function returns, or why it failed."""
    try:
        value = function()
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        value = {"error": one_line(f"{type(error).__name__}: {error}"), "missing": missing}
    print("\n" + PROBE + json.dumps({name: value}), flush=True)


def in_child(function: Callable, *arguments: object) -> dict:
    """Call a function of one of these modules in a new Python process; returns what it passed to
    `answer_with`.

    If the process did not end well, the key 'failure' says how; answers until then are kept.
    """
    module = Path(function.__code__.co_filename)
    code = f"import sys; sys.path.insert(0, {str(module.parent)!r}); import {module.stem} as m; "
    code += f"m.{function.__name__}(*{arguments!r})"
    text, failure = run_program([sys.executable, "-c", code], CHILD_TIMEOUT)
    answers = {}
    for line in text.splitlines():
        if line.startswith(PROBE):
            try:
                answers |= json.loads(line[len(PROBE) :])
            except ValueError:
                continue  # another process wrote into the line
    return answers | {"failure": failure} if failure else answers


def problem_of(answers: dict, name: str) -> str:
    """Why there is no such answer, "missing" if it is a module that is not there; '' if there
    is."""
    value = answers.get(name, {"error": answers.get("failure", "not reached"), "missing": None})
    if not isinstance(value, dict) or "error" not in value:
        return ""
    return "missing" if value["missing"] == name else value["error"]


def find_tool(name: str) -> str | None:
    """The path of a program on PATH or among ROCm's own."""
    return shutil.which(name) or shutil.which(name, path=str(rocm_path() / "bin"))


def tool_command(name: str, package: str) -> str:
    """The command that makes a ROCm tool available: on PATH if it is installed, otherwise its
    package."""
    if find_tool(name):
        return f'export PATH="{rocm_path()}/bin:$PATH"'
    return package_command(package)


def package_command(package: str) -> str:
    """The command that installs a package of AMD's repositories, or loads ROCm where a site has
    modules."""
    if os.environ.get("MODULEPATH"):
        return "module load rocm"
    manager = next((name for name in ("apt", "dnf", "zypper") if shutil.which(name)), "apt")
    return f"sudo {manager} install {package}"


def here(path: Path) -> str:
    """A path in the repository as it is written in a command given here."""
    return shlex.quote(os.path.relpath(path))


def setup_command(track: str) -> str:
    """The command that installs what is missing."""
    return f"bash {here(ROOT / 'setup' / 'environment_setup.sh')} --track {track}"


def torch_command(problem: str, track: str) -> str:
    """The command that gives a usable PyTorch: never into the environment that has one which is
    not."""
    fresh = "" if problem == "missing" else "python3 -m venv fresh && source fresh/bin/activate && "
    return fresh + setup_command(track)


# The machine


def detect_track() -> tuple[str, str]:
    """The track of this machine and what tells so."""
    if tool := find_tool("rocminfo"):
        return "rocm", f"found {tool}"
    nvidia = "found neither ROCm nor an NVIDIA GPU"
    if tool := shutil.which("nvidia-smi"):
        if re.search(r"^GPU \d+:", run_program([tool, "-L"])[0], re.MULTILINE):
            return "nvidia", f"found a GPU with {tool}"
        nvidia = f"{tool} lists no GPU"
    for path in (rocm_path(), KFD):
        if path.exists():
            return "rocm", f"found {path}"
    return "cpu", nvidia


def gpu_architectures(text: str) -> list[str]:
    """The gfx names of the GPU agents in the output of rocminfo."""
    return re.findall(r"^\s*Name:\s*(gfx[0-9a-f]+)\s*$", text, re.MULTILINE)


def hiding_variable(names: tuple[str, ...], gpus: int | None = None) -> str | None:
    """The name of a `*_VISIBLE_DEVICES` variable that leaves no GPU visible.

    The first entry decides: devices after one that does not exist are ignored. Entries may be
    numbers or GPU-<uuid>. `gpus` is what rocminfo lists; ROCR_VISIBLE_DEVICES has already been
    applied to that, the others count within it.
    """
    for name in names:
        if name in os.environ:
            first = os.environ[name].split(",")[0].strip()
            number = int(first) if re.fullmatch(r"[+-]?\d+", first) else 0
            beyond = gpus and number >= gpus and name != "ROCR_VISIBLE_DEVICES"
            if not first or number < 0 or beyond:
                return name
    return None


def describe_torch() -> dict:
    """Version and build of PyTorch (imports it: call it in a child process)."""
    import torch

    return {"version": str(torch.__version__), "hip": torch.version.hip, "cuda": torch.version.cuda}


def probe_torch() -> None:
    """In a child process: which PyTorch is there."""
    answer_with("torch", describe_torch)


def build_name(torch: dict) -> str:
    """'ROCm 6.4.43482', 'CUDA 13.0' or 'CPU'."""
    if torch["hip"]:
        return f"ROCm {torch['hip']}"
    return f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU"


def torch_problem(answers: dict, track: str) -> str:
    """Why the PyTorch that a child process found cannot be used on this track; '' if it can."""
    if error := problem_of(answers, "torch"):
        return error if error == "missing" else f"does not import: {error}"
    torch = answers["torch"]
    if not in_bounds(torch["version"], requirement("torch").bounds):
        return f"{torch['version']} is out of range, {requirement('torch').text} is needed"
    if {"rocm": not torch["hip"], "nvidia": not torch["cuda"], "cpu": False}[track]:
        build = f"{torch['version']} is a {build_name(torch)} build"
        return f"{build}, which the {track} track cannot use"
    return ""


# The table


class Check(NamedTuple):
    """One row. `state` is ok, MISSING (the track needs it), optional (absent, but not needed), or -
    for what was not looked at: this track has no use for it, or it depends on something missing."""

    what: str
    state: str
    found: str
    needed_for: str
    mend: str = ""


def check(
    what: str, good: bool, found: object, needed_for: str, mend: str = "", required: bool = True
) -> Check:
    """A row; `mend` is the command that would put it right."""
    state = "ok" if good else "MISSING" if required else "optional"
    return Check(what, state, one_line(found), needed_for, "" if good else mend)


def torch_found(torch: dict) -> str:
    """'2.9.1+rocm6.4, ROCm 6.4.43484 build', with a note if that release was not tried."""
    version = torch["version"]
    return f"{version}, {build_name(torch)} build{not_tried('torch', version)}"


def torch_check(answers: dict, track: str) -> Check:
    """The row of the PyTorch that a child process found."""
    problem = torch_problem(answers, track)
    found = problem or torch_found(answers["torch"])
    return check("torch", not problem, found, "everything", torch_command(problem, track))


def answer_check(
    answers: dict, name: str, what: str, needed_for: str, mend: str, required: bool = True
) -> Check:
    """The row of what a child process was asked for."""
    error = problem_of(answers, name)
    return check(what, not error, error or answers.get(name), needed_for, mend, required)


def package_check(name: str, needed_for: str, required: bool = False) -> Check:
    """The row of a Python package; some have a requirements file of their own."""
    own = ROOT / f"requirements-{name}.txt"
    mend = f"python -m pip install {f'-r {here(own)}' if own.is_file() else name}"
    version = installed_version(name)
    return check(name, version is not None, version or "missing", needed_for, mend, required)


def unchecked(what: str, reason: str, needed_for: str) -> Check:
    """A row for something that was not looked at."""
    return Check(what, "-", reason, needed_for)


def unneeded(what: str, needed_for: str, track: str) -> Check:
    """A row for something that this track has no use for."""
    return unchecked(what, f"not needed on the {track} track", needed_for)


def table(checks: list[Check]) -> str:
    """The rows in columns, then the command for each that is not there."""
    columns = [
        Column("", "state"),
        Column("what", "what", text=True),
        Column("found", "found", text=True),
        Column("needed for", "needed_for", text=True),
    ]
    lines = [render(columns, checks, "text")]
    titles = {
        "MISSING": "To mend what is missing:",
        "optional": "If you want what is optional:",
    }
    for state, title in titles.items():
        if mended := [check for check in checks if check.state == state and check.mend]:
            width = max(len(check.what) for check in mended)
            lines += ["", title, *(f"  {check.what:{width}}  {check.mend}" for check in mended)]
    return "\n".join(lines)


def validation(
    title: str, gather: Callable[[str], list[Check]], description: str | None
) -> Callable[[list[str] | None], int]:
    """The `main` of a validation script: returns 0 if all that the track needs is there, otherwise
    1."""

    def validate(args: argparse.Namespace) -> int:
        track, reason = (args.track, "as asked for") if args.track else detect_track()
        checks = gather(track)
        missing = sum(check.state == "MISSING" for check in checks)
        print(f"{title} check, {track} track ({reason})\n\n{table(checks)}\n")
        print(f"{title} check: {f'FAIL ({missing} missing)' if missing else 'PASS'}")
        return 1 if missing else 0

    def build_parser() -> Parser:
        parser = documented_parser(Path(sys.argv[0]).name, description)
        what = "what to check for (default: what is detected)"
        parser.add_argument("--track", choices=TRACKS, help=what)
        return parser

    return program(build_parser, validate)


def usable_torch(track: str) -> int:
    """Print the version of PyTorch, or nothing without one; or why it cannot be used, and status
    1."""
    answers = in_child(probe_torch)
    if (problem := torch_problem(answers, track)) not in ("", "missing"):
        print(problem)
        return 1
    # pip's version for pip: PyPI's 2.9.0 calls itself 2.9.0+cu128
    print("" if problem else installed_version("torch") or answers["torch"]["version"])
    return 0


def diverting_setting() -> str:
    """What to do where pip is set to install elsewhere, or nothing; '' where it is not."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
    settings = {}
    for section in SECTIONS:
        # an empty value is none to pip
        pattern = rf"^{section}\.([\w-]+)=(['\"])(.+)\2$"
        settings |= {m[1]: (section, m[3]) for m in re.finditer(pattern, listed, re.MULTILINE)}
    for name, (section, value) in settings.items():
        is_on = value.lower() in ("1", "y", "yes", "t", "true", "on")
        if name in PLACES or (name in SWITCHES and is_on):
            if section == ":env:":
                return "unset PIP_" + name.upper().replace("-", "_")
            files = shlex.join([sys.executable, "-m", "pip", "config", "debug"])
            return f"take {section}.{name} out of pip's configuration ({files} lists its files)"
    return ""


def main(question: str, about: str = "") -> int:
    """What environment_setup.sh asks."""
    if question == "torch":
        return usable_torch(about)
    if question == "cpu-build":
        print(newest_cpu_build(Path(about)), end="")
        return 0
    if question == "diverts":
        print(diverting_setting())
        return 0
    found = detect_track() if question == "track" else missing_requirements(Path(about))
    print(*found, sep=" " if question == "track" else "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

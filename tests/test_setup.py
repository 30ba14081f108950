"""environment_setup.sh and the validation scripts: what they would install, and what they say of
odd machines.

The setup script runs in a copy of the repository that has a check that only says how it was called,
with a PATH of our own: a Python that sees a stand-in for PyTorch, or none, and whichever ROCm or
NVIDIA tools a test writes. A stand-in for pip says what it was asked for; nothing is installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, words

VALIDATION = ROOT / "setup" / "validation_scripts"
BASE_PYTHON = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
VARIABLES = ("VIRTUAL_ENV", "PYTHONPATH", "ROCM_PATH", "MODULEPATH")
VARIABLES += ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
ROCM_TOOLS = ("rocprofv3", "rocprof-sys-run", "rocprof-compute", "rocpd")
ROCTX = "librocprofiler-sdk-roctx.so"
ROCMINFO = """cat <<END
  Name:                    AMD EPYC 7A53 64-Core Processor
  Name:                    gfx90a
      Name:                    amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-
END"""
TORCH = "torch>=2.6"
REST = ["numpy", "matplotlib>=3.8"]
HIP, CUDA = ("2.9.1+rocm6.4", "6.4.43484", None), ("2.9.1+cu128", None, "12.8")
CPU = ("2.9.1", None, None)
BAD_TORCH = [  # a build, or the code of one that cannot be imported; the track; what is said of it
    (("2.5.1", None, None), "cpu", f"2.5.1 is out of range, {TORCH} is needed"),
    (CPU, "rocm", "CPU build, which the rocm track cannot use"),
    (HIP, "nvidia", "ROCm 6.4.43484 build, which the nvidia track cannot use"),
    ("raise OSError('libx.so:\\nno such object')", "cpu", "OSError: libx.so: no such object"),
    ("import os; os.abort()", "cpu", "signal 6"),
    ("raise ImportError('x\\x1b[31m')", "cpu", "ImportError: x"),
]
NO_TORCH = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
PIP = """import os, sys
if "--constraint" in sys.argv:
    print("pip", *sys.argv[4:], open(sys.argv[3]).read(), end="")
    sys.exit(int(os.environ.get("PIP_STATUS", "0")))
"""
CHECK = (
    "import os, sys; print('Check:', *sys.argv[1:]); sys.exit(int(os.environ.get('CHECK', '0')))"
)


def write_program(path: Path, text: str) -> None:
    """An executable file; text without `#!` is for the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def link_coreutils(directory: Path) -> None:
    """What shell scripts need on PATH."""
    directory.mkdir(parents=True)
    for name in words("bash cat dirname env grep mkdir readlink rm"):
        (directory / name).symlink_to(shutil.which(name))


def write_torch(
    directory: Path, build: tuple[str, str | None, str | None] | str, pip_version: str = ""
) -> Path:
    """A stand-in for PyTorch that says which build it is, or has this code.

    Returns the directory for PYTHONPATH.
    """
    version, hip, cuda = CPU if isinstance(build, str) else build
    code = f"from . import version\n__version__ = {version!r}\n"
    pip_version = pip_version or version
    info = directory / f"torch-{pip_version}.dist-info"
    texts = {
        "torch/__init__.py": build if isinstance(build, str) else code,
        "torch/version.py": f"hip = {hip!r}\ncuda = {cuda!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {pip_version}\n",
    }
    for name, text in {**texts, f"{info}/RECORD": ""}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def assert_refused(result: subprocess.CompletedProcess[str], status: int, *texts: str) -> None:
    """One line on stderr that has all of the texts."""
    assert result.returncode == status, result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert [text for text in texts if text not in result.stderr] == [], result.stderr


# --- environment_setup.sh


class Machine:
    """A place to run the setup script in: `bin` is all of PATH, `repository` has the script."""

    def __init__(self, path: Path):
        self.path, self.bin, self.site = path, path / "bin", path / "site"
        self.repository = path / "repository"
        ignore = shutil.ignore_patterns("__pycache__")
        for folder in ("setup", "fusion_lab"):
            shutil.copytree(ROOT / folder, self.repository / folder, ignore=ignore)
        for name in ("requirements.txt", "requirements-dev.txt"):
            shutil.copy(ROOT / name, self.repository / name)
        (self.repository / "setup/validation_scripts/test_environment.py").write_text(CHECK)
        link_coreutils(self.bin)

    def add_python(self, site: Path | None = None) -> None:
        """Put python3 on PATH: without packages (-S) but for a PyTorch that comes as with a
        site's module."""
        variable = f"PYTHONPATH={shlex.quote(str(site))} " if site else ""
        write_program(
            self.bin / "python3", f'{variable}exec {shlex.quote(str(BASE_PYTHON))} -S "$@"'
        )

    def setup(self, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run environment_setup.sh."""
        kept = {k: v for k, v in os.environ.items() if k not in VARIABLES and "CONDA" not in k}
        ours = {"PATH": str(self.bin), "ROCM_PATH": str(self.path / "rocm")}
        ours |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
        options = {"env": {**kept, **ours, **variables}, "cwd": self.path, "timeout": 120}
        command = [shutil.which("bash"), str(self.repository / "setup/environment_setup.sh"), *argv]
        return subprocess.run(command, capture_output=True, text=True, **options)

    def files(self) -> set[Path]:
        """All files, caches left out."""
        return {path for path in self.path.rglob("*") if "__pycache__" not in path.parts}

    def commands(self, *argv: str, **variables: str) -> list[list[str]]:
        """The commands that a dry run prints, without the last, which is the check."""
        before = self.files()
        result = self.setup(*argv, "--dry-run", **variables)
        assert result.returncode == 0, result.stderr
        assert self.files() == before
        lines = re.findall(r"^\+ (.*)", result.stdout, re.MULTILINE)
        lines = [shlex.split(line) for line in lines]
        assert Path(lines[-1][1]).name == "test_environment.py"
        return lines[:-1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without Python, PyTorch or GPU."""
    return Machine(tmp_path / "machine")


def test_cpu_track_installs_the_requirements_file_or_takes_pytorch_from_an_index(machine):
    machine.add_python()
    venv, repository = machine.repository / ".venv", machine.repository
    install = [str(venv / "bin/python"), "-m", "pip", "install", "-r"]
    made = [str(machine.bin / "python3"), "-m", "venv", str(venv)]
    assert machine.commands() == [made, [*install, str(repository / "setup/requirements.txt")]]
    assert machine.commands("--dev") == [made, [*install, str(repository / "requirements-dev.txt")]]
    # nvidia is found where nvidia-smi lists a GPU
    write_program(machine.bin / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'")
    assert "Track: nvidia" in machine.setup("--dry-run").stdout
    write_program(machine.bin / "nvidia-smi", "echo 'Failed to initialize NVML'; exit 9")
    assert "Track: cpu" in machine.setup("--dry-run").stdout
    _, torch, rest = machine.commands("--index-url", "https://example.org/whl")
    assert torch[3:] == ["install", "--index-url", "https://example.org/whl", TORCH]
    assert rest[-3:] == ["triton", *REST]


def test_cpu_track_takes_the_newest_cpu_build_of_the_index(machine):
    """Not the CUDA build, however new, and with --dev one that the tests run with."""
    versions = "2.15.0, 2.14.1+cpu, 2.14.1, 2.13.0+cpu, 2.9.1+cpu, 2.5.1+cpu"
    for name, text in (("__init__", ""), ("__main__", f"print('Available versions: {versions}')")):
        write_program(machine.site / f"pip/{name}.py", text)
    machine.add_python(machine.site)
    assert machine.commands()[-1][-1] == "torch==2.14.1+cpu"
    assert machine.commands("--dev")[-1][-1] == "torch==2.13.0+cpu"
    assert machine.commands("--track", "nvidia")[-1][-1].endswith("requirements.txt")


@pytest.mark.parametrize(("track", "build"), [("rocm", HIP), ("nvidia", CUDA), ("cpu", HIP)])
def test_pytorch_of_a_site_is_kept(machine, track, build):
    # PyPI's wheels call themselves otherwise than pip does
    version = build[0].replace("+cu128", "")
    machine.add_python(write_torch(machine.site, build, version))
    venv, install = machine.commands("--track", track)
    assert venv[1:4] == ["-m", "venv", "--system-site-packages"]
    constraint = ["--constraint", "<(echo", f"torch=={version})"]
    assert install[3:] == ["install", *constraint, "triton", *REST]
    if track == "rocm":
        # such a build's has the module's name, but not the package's
        (machine.site / "triton.py").touch()
        assert machine.commands("--track", track)[-1][-3:] == [f"torch=={version})", *REST]


def test_only_what_is_missing_is_installed_and_pytorch_never_changes(machine):
    site, venv = machine.path / "site", machine.path / "venv"
    write_torch(site, CPU)
    (machine.repository / "setup/requirements.txt").write_text(f"{TORCH}\nabsent  # why\nnumpy\n")
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", venv], check=True)
    assert "has no pip" in machine.setup("--venv", str(venv)).stderr.splitlines()[-1]
    library = venv / f"lib/python3.{sys.version_info.minor}/site-packages"
    (library / "others.pth").write_text(f"{site}\n")
    for name, text in (("numpy/__init__.py", ""), ("pip/__main__.py", PIP)):
        (site / name).parent.mkdir()
        (site / name).write_text(text)
    active = {"VIRTUAL_ENV": str(venv)}
    result = machine.setup(**active, PIP_STATUS="1")
    assert (result.returncode, "Check:" in result.stdout) == (1, False)
    assert "environment_setup.sh: error: pip failed" in result.stderr.splitlines()[-1]
    result = machine.setup(**active)
    lines = result.stdout.splitlines()
    assert lines[lines.index("pip absent torch==2.9.1") - 1].endswith(
        "-m pip install --constraint <(echo torch==2.9.1) absent"
    )
    assert (result.returncode, lines[-1]) == (0, "Check: --track cpu")
    assert machine.setup(**active, CHECK="1").returncode == 1, "the status is that of the check"


@pytest.mark.parametrize(
    ("variables", "configuration", "advice"),
    [
        ({"PIP_TARGET": "/elsewhere"}, "", "unset PIP_TARGET"),
        ({"PIP_PREFIX": "/elsewhere"}, "", "unset PIP_PREFIX"),
        ({"PIP_ROOT": "/elsewhere"}, "", "unset PIP_ROOT"),
        ({"PIP_USER": "yes"}, "", "unset PIP_USER"),
        ({"PIP_DRY_RUN": "1"}, "", "unset PIP_DRY_RUN"),
        ({}, "[global]\ntarget = /it's", "take global.target out of pip's configuration"),
        ({"PIP_TARGET": ""}, "[install]\nprefix = /elsewhere", "take install.prefix out"),
        ({"PIP_TARGET": "", "PIP_USER": "0"}, "[install]\nuser = true", ""),
        ({}, "[global]\nindex-url = https://example.org/target", ""),
    ],
)
def test_pip_that_is_set_to_install_elsewhere_is_refused(machine, variables, configuration, advice):
    """pip's own, which knows where its settings are and which of them counts."""
    pip = importlib.util.find_spec("pip").submodule_search_locations[0]
    machine.site.mkdir()
    (machine.site / "pip").symlink_to(pip)
    machine.add_python(machine.site)
    file = machine.path / "pip.conf"
    file.write_text(f"{configuration}\n")
    before = machine.files()
    result = machine.setup("--track", "nvidia", "--dry-run", **variables, PIP_CONFIG_FILE=str(file))
    assert machine.files() == before
    if advice:
        assert_refused(result, 1, advice, str(machine.repository / ".venv"))
    else:
        assert result.returncode == 0, result.stderr


def test_an_interrupted_setup_goes_on_at_the_next_call(machine):
    """The process is killed while the environment is made, as by a power cut: no program of its
    own can clean up."""
    half = f"mkdir -p .venv/bin; ln -s {BASE_PYTHON} .venv/bin/python; kill -9 $PPID; exit"
    half = f'test "$2" != venv || {{ {half}; }}'
    write_program(machine.bin / "python3", f'{half}; exec {BASE_PYTHON} -S "$@"')
    (machine.bin / "ln").symlink_to(shutil.which("ln"))
    (machine.repository / "setup/requirements.txt").write_text(f"{TORCH}\n")
    variables = {"PYTHONPATH": str(write_torch(machine.site, CPU))}
    assert machine.setup("--venv", ".venv", **variables).returncode == -9
    python = f'test "$2" != venv || set -- "$@" --without-pip; exec {BASE_PYTHON} -S "$@"'
    write_program(machine.bin / "python3", python)
    result = machine.setup("--venv", ".venv", **variables)
    assert result.returncode == 0, result.stderr
    assert "Nothing to install" in result.stdout
    assert "Activate it with: source .venv/bin/activate" in result.stdout
    settings = (machine.path / ".venv/pyvenv.cfg").read_text()
    assert "include-system-site-packages = true" in settings, "it sees the site's PyTorch"
    assert [path.name for path in machine.path.glob(".venv*")] == [".venv"]
    (machine.path / ".venv/mine").touch()
    assert machine.setup("--venv", ".venv", **variables).returncode == 0
    assert (machine.path / ".venv/mine").exists(), "a finished one is not made anew"


def test_what_is_wrong_or_missing_is_one_line_and_nothing_is_made(machine):
    """Called by a link, of which it finds the parts."""
    script, python = machine.repository / "setup/environment_setup.sh", machine.bin / "python3"
    script.symlink_to(script.rename(script.with_name("x.sh")).name)
    for argv in ("--gpu", "now", "--track tpu", "--venv"):
        assert_refused(machine.setup(*words(argv)), 2, words(argv)[0], words(argv)[-1])
    text = machine.setup("--help").stdout
    assert all(option in text for option in words("--track --venv --index-url --dev --dry-run"))
    assert_refused(machine.setup(), 1, "no Python 3.10 or newer")
    write_program(python, "exit 1")  # as an older one answers
    assert_refused(machine.setup(), 1, "no Python 3.10 or newer")
    write_program(python, f'case $2 in *ensurepip*) exit 1;; esac; exec {BASE_PYTHON} "$@"')
    assert_refused(machine.setup(), 1, "no venv module")
    machine.add_python()
    for build, track, reason in BAD_TORCH[1:6:2]:
        write_torch(machine.site, build)
        refusal = machine.setup("--track", track, PYTHONPATH=str(machine.site))
        assert_refused(refusal, 1, reason)
    assert not (machine.repository / ".venv").exists()
    (machine.repository / ".venv").mkdir()
    assert_refused(machine.setup(), 1, "is not a Python environment")
    assert_refused(machine.setup(VIRTUAL_ENV="/no/such"), 1, "/no/such does not exist")
    (machine.repository / "setup/validation_scripts/checks.py").unlink()
    assert_refused(machine.setup(), 4, "checks.py is not there")


# --- the validation scripts


@dataclasses.dataclass
class Report:
    """What a validation script found."""

    status: int
    text: str
    rows: dict[str, dict]

    def has(self, state: str, *what: str) -> Report:
        """These rows have this state, and the exit status goes with it."""
        assert [self.rows[row]["state"] for row in what] == [state] * len(what), self.text
        assert self.status == (state == "MISSING"), self.text
        return self


class Site:
    """A place to validate: PATH is only `path/bin`, ROCm is in `path/rocm`."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
        self.path, self.patch, self.capsys = path, patch, capsys
        patch.syspath_prepend(VALIDATION)
        for name in (*VARIABLES, "CUDA_VISIBLE_DEVICES"):
            patch.delenv(name, raising=False)
        link_coreutils(path / "bin")
        patch.setenv("PATH", str(path / "bin"))
        patch.setenv("ROCM_PATH", str(path / "rocm"))
        patch.chdir(path)

    def set(self, module: str, name: str, value: object) -> None:
        self.patch.setattr(importlib.import_module(module), name, value)

    def torch(self, build: str | tuple) -> None:
        """Processes started from here find this code, or a stand-in of this build, as PyTorch."""
        place = self.path / f"torch{time.monotonic_ns()}"
        self.patch.setenv("PYTHONPATH", str(write_torch(place, build)))

    def validate(self, script: str, track: str | None) -> Report:
        """Run a validation script in this process, and keep its rows."""
        checks, rows = importlib.import_module("checks"), []
        table = checks.table
        with self.patch.context() as patch:
            patch.setattr(checks, "table", lambda found: rows.extend(found) or table(found))
            status = importlib.import_module(script).main(["--track", track] if track else [])
        text = self.capsys.readouterr().out
        assert re.search(r" check: (PASS|FAIL .*)\n$", text)[1].startswith(
            "FAIL" if status else "PASS"
        )
        rows = {row.what: row._asdict() for row in rows}
        for row in rows.values():
            assert row["what"] in text and row["mend"] in text
            assert row["mend"] or row["state"] in ("ok", "-"), row
        return Report(status, text, rows)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Site:
    return Site(tmp_path, monkeypatch, capsys)


def test_this_machine_can_run_the_scripts(site):
    """With the real PyTorch, on the CPU."""
    found = site.validate("test_environment", "cpu")
    rows = found.has("ok", "torch", "numpy", "current directory").rows
    assert rows["version scripts"]["found"] == "8 answer --help"
    assert rows["training step"]["found"] == "right on cpu"
    site.patch.chdir("/proc")  # where nobody can write
    site.torch(NO_TORCH)
    site.validate("test_environment", "cpu").has("MISSING", "current directory")


@pytest.mark.parametrize(
    ("build", "track", "reason"), [*BAD_TORCH, (NO_TORCH, "nvidia", "missing")]
)
def test_torch_that_cannot_be_used_is_a_row(site, build, track, reason):
    site.torch(build)
    site.set("test_environment", "version_scripts", list)  # looking at none is quicker
    report = site.validate("test_environment", track).has("MISSING", "torch")
    assert reason in report.rows["torch"]["found"]
    assert "\x1b" not in report.text
    again = f"bash .*environment_setup.sh --track {track}"
    mend = again if build == NO_TORCH else "python3 -m venv .*"  # a PyTorch that is there stays
    assert re.fullmatch(mend, report.rows["torch"]["mend"])
    states = [report.rows[name]["state"] for name in ("training step", "numpy")]
    assert states == ["-", "ok"], "the rest is still looked at"
    site.validate("test_profiling_tools", track).has("MISSING", "torch.profiler")


def test_a_release_that_was_not_tried_passes_with_a_note(site):
    """CONTRIBUTING.md has the list of those that were."""
    checks = importlib.import_module("checks")
    rows = re.findall(
        r"^\| ([\d.]+) \| ([\d.]+)", (ROOT / "docs/CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    for name, releases in zip(("torch", "triton"), zip(*rows, strict=True), strict=True):
        releases = sorted(releases, key=checks.release)
        tried = tuple(".".join(map(str, checks.release(release)[:2])) for release in releases)
        assert checks.TRIED[name] == (tried[0], tried[-1])
    answers = {"torch": {"version": "2.99.0+rocm9.1", "hip": "9.1", "cuda": None}}
    row = checks.torch_check(answers, "rocm")
    assert (row.state, row.mend) == ("ok", "")
    assert row.found.endswith("ROCm 9.1 build (not tried: 2.6 to 2.15 were)")
    assert checks.not_tried("triton", "3.6.0") == "" == checks.not_tried("torch", "2.15.1")


@pytest.fixture
def rocm(site: Site) -> Site:
    """A machine with an AMD GPU and all of ROCm, as far as files, tools and PyTorch tell."""
    for name in words(
        "dev/kfd dev/dri/renderD128 rocm/.info/version rocm/bin/a "
        "rocm/libexec/rocprofiler-compute/a"
    ):
        (site.path / name).parent.mkdir(parents=True, exist_ok=True)
        (site.path / name).write_text("7.0.1")
    for name in ("amd-smi", *ROCM_TOOLS):
        write_program(site.path / "bin" / name, "echo usage")
    write_program(site.path / "bin/rocminfo", ROCMINFO)
    site.set("checks", "KFD", site.path / "dev/kfd")
    site.set("test_rocm_installation", "DRI", site.path / "dev/dri")
    answers = {"torch": dict(zip(("version", "hip", "cuda"), HIP, strict=True)), "gpus": 1}
    answers |= {"roctx": "loads", "profile": {"events": 5, "kernels": 1}}
    site.set("checks", "in_child", lambda *_: answers)
    site.answers = answers
    return site


def test_rocm_that_is_complete_passes_but_not_a_profiler_without_kernels_or_markers(rocm):
    found = rocm.validate("test_rocm_installation", None)
    rows = found.has("ok", "torch", "amd-smi or rocm-smi").rows
    assert rows["rocminfo"]["found"] == "1 x gfx90a"
    assert rows["ROCm"]["found"].startswith("7.0.1 in")
    rocm.validate("test_profiling_tools", None).has("ok", *ROCM_TOOLS, ROCTX, "torch.profiler")
    rocm.answers["profile"] = {"events": 5, "kernels": 0}
    rocm.answers["roctx"] = {"error": "OSError: no", "missing": None}
    rocm.validate("test_profiling_tools", "rocm").has("MISSING", "torch.profiler", ROCTX)


# What is done to that machine, the row, its state, and what it says is found or mends it.
SMI, RENAMED = "amd-smi or rocm-smi", "rm bin/rocprof-compute; sed -i s/gfx90a/gfx{}/ bin/rocminfo"
NEEDS = "rocm/libexec/rocprofiler-compute/requirements.txt"
HIDING = "HIP_VISIBLE_DEVICES=-1 ROCR_VISIBLE_DEVICES= CUDA_VISIBLE_DEVICES=7,0"
CHOOSING = "HIP_VISIBLE_DEVICES=0,7 ROCR_VISIBLE_DEVICES=GPU-4b2c1a9f ROCR_VISIBLE_DEVICES=2"
TOOL, TOOLS = "bin/rocprof-compute", "pip install -r"
ROCM_ROWS = [
    ("rm dev/kfd", "kfd", "MISSING", "sudo modprobe amdgpu"),
    ("sed -i '2i exit 1' bin/amd-smi", SMI, "MISSING", ""),
    ("sed -i '2i echo Permission denied; exit 1' bin/rocminfo", "rocminfo", "MISSING", "denied"),
    (RENAMED.format(1100), "rocprof-compute", "-", "gfx1100"),
    (f"echo pandas > {NEEDS}; sed -i '2i exit 1' {TOOL}", "rocprof-compute", "MISSING", TOOLS),
    ("rm bin/rocprofv3", "rocprofv3", "MISSING", "sudo apt install rocprofiler-"),
    *((setting, "*_VISIBLE_DEVICES", "MISSING", "unset ") for setting in words(HIDING)),
    *((setting, "*_VISIBLE_DEVICES", "ok", "") for setting in words(CHOOSING)),
]


@pytest.mark.parametrize(("damage", "what", "state", "text"), ROCM_ROWS)
def test_what_is_wrong_with_rocm_is_a_row(rocm, damage, what, state, text):
    if what == "*_VISIBLE_DEVICES":
        rocm.patch.setenv(*damage.split("="))
    else:
        command, environment = ["bash", "-euc", damage], {"PATH": os.defpath}
        subprocess.run(command, cwd=rocm.path, env=environment, check=True)
    what = str(rocm.path / "dev/kfd") if what == "kfd" else what
    script = "test_profiling_tools" if what in ROCM_TOOLS else "test_rocm_installation"
    report = rocm.validate(script, "rocm").has(state, what)
    assert text in report.rows[what]["found"] + report.rows[what]["mend"]
    others = {row["state"] for row in report.rows.values() if row["what"] != what}
    assert "MISSING" not in others, "the rest is still looked at"


def test_rocminfo_that_hangs_is_ended_with_what_it_has_started(rocm):
    sleep = shutil.which("sleep", path=os.defpath)
    write_program(rocm.path / "bin/rocminfo", f"{sleep} 60 & echo $! > child; wait")
    rocm.set("checks", "TOOL_TIMEOUT", 0.5)
    rows = rocm.validate("test_rocm_installation", "rocm").has("MISSING", "rocminfo").rows
    assert "no answer within 0.5 s" in rows["rocminfo"]["found"]
    assert rows[SMI]["state"] == "ok", "the rest is still looked at"
    deadline = time.monotonic() + 30
    # the child is gone, or waits only for its exit status to be read
    stat = Path(f"/proc/{(rocm.path / 'child').read_text().strip()}/stat")
    with contextlib.suppress(OSError):
        while ") Z " not in stat.read_text():
            assert time.monotonic() < deadline, "what the tool had started still runs"

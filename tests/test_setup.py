"""environment_setup.sh and the validation scripts: what they would install, and what they say of odd machines.

The setup script runs in a copy of the repository that has small requirements files, with a PATH of our own: a Python
that sees a stand-in for PyTorch, or none, and whichever ROCm or NVIDIA tools a test writes. What pip installs comes
from wheels made here; no test needs a network.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT, words

VALIDATION = ROOT / "setup" / "validation_scripts"
BASE_PYTHON = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
PACKAGES = Path(sysconfig.get_path("purelib"))
COREUTILS = ("bash", "cat", "dirname", "env", "grep", "rm")
VARIABLES = ("VIRTUAL_ENV", "PYTHONPATH", "ROCM_PATH", "MODULEPATH", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
ROCM_TOOLS = ("rocprofv3", "rocprof-sys-run", "rocprof-compute", "rocpd")
ROCTX = "librocprofiler-sdk-roctx.so"
ROCMINFO = """
Agent 1
  Name:                    AMD EPYC 7A53 64-Core Processor
Agent 2
  Name:                    gfx90a
  Marketing Name:          AMD Instinct MI250X
    ISA 1
      Name:                    amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-
"""
HIP, CUDA, CPU = ("2.9.1+rocm6.4", "6.4.43484", None), ("2.9.1+cu128", None, "12.8"), ("2.9.1", None, None)
NO_TORCH = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"


def write_program(path: Path, text: str) -> Path:
    """An executable file; text without `#!` is for the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def printing(text: str, status: int = 0) -> str:
    """A program that prints the text."""
    return f"cat <<'END'\n{text}\nEND\nexit {status}"


def write_torch(directory: Path, build: tuple[str, str | None, str | None] = CPU, pip_version: str = "") -> Path:
    """A stand-in for PyTorch that says which build it is; returns the directory for PYTHONPATH."""
    version, hip, cuda = build
    (directory / "torch").mkdir(parents=True)
    (directory / "torch/__init__.py").write_text(f"from . import version\n__version__ = {version!r}\n")
    (directory / "torch/version.py").write_text(f"hip = {hip!r}\ncuda = {cuda!r}\n")
    info = directory / f"torch-{pip_version or version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {pip_version or version}\n")
    (info / "RECORD").write_text("")
    return directory


def write_wheel(directory: Path, name: str, requires: str = "") -> None:
    """A wheel of an empty module."""
    directory.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def assert_refused(result: subprocess.CompletedProcess[str], status: int, *texts: str) -> None:
    """One line on stderr that has all of the texts."""
    assert result.returncode == status, result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert [text for text in texts if text not in result.stderr] == [], result.stderr


# --- environment_setup.sh: what it would do


@dataclass
class Machine:
    """A place to run the setup script in: `bin` is all of PATH, `repository` has the script."""

    path: Path

    def __post_init__(self) -> None:
        self.bin, self.repository, self.site = (self.path / name for name in ("bin", "repository", "site"))

    def add_python(self, site: Path | None = None) -> None:
        """Put python3 on PATH: without packages (-S) but for a PyTorch that comes as with a site's module."""
        variable = f"PYTHONPATH={shlex.quote(str(site))} " if site else ""
        write_program(self.bin / "python3", f'{variable}exec {shlex.quote(str(BASE_PYTHON))} -S "$@"')

    def setup(self, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run environment_setup.sh."""
        environment = {key: value for key, value in os.environ.items() if key not in VARIABLES and "CONDA" not in key}
        environment |= {"PATH": str(self.bin), "ROCM_PATH": str(self.path / "rocm"), "PIP_NO_INDEX": "1", **variables}
        command = [shutil.which("bash"), str(self.repository / "setup/environment_setup.sh"), *argv]
        return subprocess.run(command, env=environment, cwd=self.path, capture_output=True, text=True, timeout=120)

    def commands(self, *argv: str, **variables: str) -> list[list[str]]:
        """The commands that a dry run prints, without the last, which is the check."""
        before = sorted(files(self.path))
        result = self.setup(*argv, "--dry-run", **variables)
        assert result.returncode == 0, result.stderr
        assert sorted(files(self.path)) == before
        lines = [shlex.split(line[2:]) for line in result.stdout.splitlines() if line.startswith("+ ")]
        assert Path(lines[-1][1]).name == "test_environment.py"
        return lines[:-1]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without Python, PyTorch or GPU."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    machine = Machine(tmp_path / "machine")
    shutil.copytree(ROOT / "setup", machine.repository / "setup", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("requirements.txt", "requirements-dev.txt", "profiling/program.py"):
        (machine.repository / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, machine.repository / name)
    for name in COREUTILS:
        write_program(machine.bin / name, f'exec {shutil.which(name)} "$@"')
    return machine


def environment_with_packages(path: Path, *site_packages: Path) -> Path:
    """A virtual environment, made quickly: pip and all else come from directories that are there."""
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", path], check=True)
    library = path / f"lib/python3.{sys.version_info.minor}/site-packages"
    (library / "others.pth").write_text("".join(f"{directory}\n" for directory in site_packages))
    return path


def files(directory: Path) -> dict[Path, int]:
    """All files and when they were changed, caches left out."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if "__pycache__" not in path.parts}


def test_cpu_track_installs_the_requirements_file(machine):
    machine.add_python()
    venv, repository = machine.repository / ".venv", machine.repository
    install = [str(venv / "bin/python"), "-m", "pip", "install", "-r"]
    made = [str(machine.bin / "python3"), "-m", "venv", str(venv)]
    assert machine.commands() == [made, [*install, str(repository / "requirements.txt")]]
    assert machine.commands("--dev") == [made, [*install, str(repository / "requirements-dev.txt")]]


def test_nvidia_is_found_where_nvidia_smi_lists_a_gpu(machine):
    machine.add_python()
    write_program(machine.bin / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'")
    assert "Track: nvidia" in machine.setup("--dry-run").stdout
    write_program(machine.bin / "nvidia-smi", "echo 'Failed to initialize NVML'; exit 9")
    assert "Track: cpu" in machine.setup("--dry-run").stdout


@pytest.mark.parametrize(
    ("installed", "index"), [("6.0.2-115", "6.1"), ("6.2.1", "6.2.4"), ("6.4.1-83", "6.4"), ("8.0.0", "7.2")]
)
def test_rocm_track_takes_pytorch_from_the_index_of_that_rocm(machine, installed, index):
    machine.add_python()
    assert_refused(machine.setup("--track", "rocm"), 1, "--index-url", str(machine.path / "rocm/.info/version"))
    assert not (machine.repository / ".venv").exists()
    write_program(machine.bin / "rocminfo", printing(ROCMINFO))
    (machine.path / "rocm/.info").mkdir(parents=True)
    (machine.path / "rocm/.info/version").write_text(installed + "\n")
    _, torch, rest = machine.commands()
    url = f"https://download.pytorch.org/whl/rocm{index}"
    assert torch[3:] == ["install", "--index-url", url, "torch>=2.6,<2.14"]
    # Without triton: PyPI's would be installed over that of the ROCm build.
    assert rest[3:] == ["install", "--constraint", "<(echo", "torch==VERSION_INSTALLED_ABOVE)", "numpy"]


def test_index_can_be_given(machine):
    machine.add_python()
    _, torch, rest = machine.commands("--track", "cpu", "--index-url", "https://example.org/whl")
    assert torch[3:] == ["install", "--index-url", "https://example.org/whl", "torch>=2.6,<2.14"]
    assert rest[-2:] == ["triton", "numpy"]


@pytest.mark.parametrize(("track", "build"), [("rocm", HIP), ("nvidia", CUDA), ("cpu", CPU), ("cpu", HIP)])
def test_pytorch_of_a_site_is_kept(machine, track, build):
    version = build[0].replace("+cu128", "")  # PyPI's wheels call themselves otherwise than pip does
    machine.add_python(write_torch(machine.site, build, version))
    venv, install = machine.commands("--track", track)
    assert venv[1:4] == ["-m", "venv", "--system-site-packages"]
    assert install[3:] == ["install", "--constraint", "<(echo", f"torch=={version})", "triton", "numpy"]
    (machine.site / "triton.py").touch()  # a ROCm build's has the module's name, but not the package's
    assert machine.commands("--track", track)[-1][-2:] == [f"torch=={version})", "numpy"]


@pytest.mark.parametrize(
    ("build", "track", "reason"),
    [
        (("2.5.1", None, None), "cpu", "2.5.1 is out of range, torch>=2.6,<2.14 is needed"),
        (("2.14.0a0+git1", None, None), "cpu", "out of range"),
        (CPU, "rocm", "CPU build, which the rocm track cannot use"),
        (HIP, "nvidia", "ROCm 6.4.43484 build, which the nvidia track cannot use"),
        ("raise OSError('libc10.so: bad')", "cpu", "does not import: OSError: libc10.so: bad"),
        ("import os; os.abort()", "cpu", "signal 6"),
    ],
)
def test_pytorch_that_cannot_be_used_stops_the_setup(machine, build, track, reason):
    machine.add_python(write_torch(machine.site, build if isinstance(build, tuple) else CPU))
    if isinstance(build, str):
        (machine.site / "torch/__init__.py").write_text(build)
    assert_refused(machine.setup("--track", track), 1, reason)
    assert not (machine.repository / ".venv").exists()


def test_conda_environment_is_used_but_not_base(machine):
    machine.add_python()
    conda = machine.path / "conda"
    (conda / "conda-meta").mkdir(parents=True)
    write_program(conda / "bin/python", f'exec {BASE_PYTHON} -S "$@"')
    name = {"CONDA_PREFIX": str(conda)}
    assert [command[0] for command in machine.commands(**name, CONDA_DEFAULT_ENV="work")] == [str(conda / "bin/python")]
    assert machine.commands(**name, CONDA_DEFAULT_ENV="base")[0][2] == "venv"


# --- environment_setup.sh: what it does


def test_second_run_changes_nothing(machine):
    """Here with the real packages, and with the real check at the end."""
    venv = environment_with_packages(machine.path / "venv", PACKAGES)
    machine.add_python()
    shutil.copy(ROOT / "tiny_llama_v1.py", machine.repository)
    before = files(venv)
    result = machine.setup("--venv", str(venv), "--track", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Nothing to install" in result.stdout
    assert "Environment check: PASS" in result.stdout
    assert files(venv) == before


def assert_refused_by_pip(result: subprocess.CompletedProcess[str]) -> None:
    """pip's own message, then one line of the script; no check after it."""
    assert result.returncode == 1
    assert "ERROR:" in result.stderr
    assert "environment_setup.sh: error: pip failed" in result.stderr.splitlines()[-1]
    assert "Environment check" not in result.stdout


def test_only_what_is_missing_is_installed_and_pytorch_never_changes(machine):
    site, wheels = write_torch(machine.site), machine.path / "wheels"
    write_wheel(wheels, "absent")
    write_wheel(wheels, "torch")
    write_wheel(wheels, "greedy", requires="torch<2")
    (machine.repository / "requirements.txt").write_text("torch>=2.6,<2.14\nabsent  # why\npytest\n")
    (machine.repository / "requirements-dev.txt").write_text("-r requirements.txt\ngreedy\n")
    venv = environment_with_packages(machine.path / "venv", site, PACKAGES)
    find = {"PIP_FIND_LINKS": str(wheels), "VIRTUAL_ENV": str(venv)}
    torch_files = files(site)

    assert_refused_by_pip(machine.setup("--dev", **find))
    assert not list(venv.rglob("absent*"))
    result = machine.setup(**find)
    command = next(line for line in result.stdout.splitlines() if "pip install" in line)
    assert command.endswith("install --constraint <(echo torch==2.9.1) absent")
    assert list(venv.rglob("absent.py"))
    assert result.returncode == 1, "this PyTorch cannot run a training step, and the check must say so"
    assert "Environment check: FAIL" in result.stdout
    assert "Nothing to install" in machine.setup(**find).stdout
    assert files(site) == torch_files
    assert not list(venv.rglob("torch*"))


def test_without_network_pip_says_so(machine):
    venv = environment_with_packages(machine.path / "venv", machine.path / "pip")
    (machine.path / "pip").mkdir()
    (machine.path / "pip/pip").symlink_to(PACKAGES / "pip")
    assert_refused_by_pip(machine.setup("--venv", str(venv), PIP_FIND_LINKS=""))


def test_environment_is_made(machine):
    """A real one, which sees the site's PyTorch."""
    (machine.repository / "requirements.txt").write_text("torch>=2.6,<2.14\n")
    machine.add_python()
    result = machine.setup("--venv", "new one", PYTHONPATH=str(write_torch(machine.site)))
    assert "Nothing to install" in result.stdout, result.stderr
    assert "include-system-site-packages = true" in (machine.path / "new one/pyvenv.cfg").read_text()
    assert "source new one/bin/activate" in result.stdout.replace("'", "")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("--gpu", "unknown option --gpu"),
        ("now", "unknown option now"),
        ("--track tpu", "auto, cpu, nvidia or rocm, not tpu"),
        ("--venv", "--venv needs a value"),
    ],
)
def test_wrong_options(machine, argv, text):
    assert_refused(machine.setup(*words(argv)), 2, text)


def test_help(machine):
    result = machine.setup("--help")
    assert result.returncode == 0
    assert all(option in result.stdout for option in words("--track --venv --index-url --dev --dry-run"))


def test_python_that_cannot_be_used(machine):
    assert_refused(machine.setup(), 1, "no Python 3.10 or newer")
    write_program(machine.bin / "python3", "exit 1")  # as an older one answers
    assert_refused(machine.setup(), 1, "no Python 3.10 or newer")
    write_program(machine.bin / "python3", f'case $2 in *ensurepip*) exit 1;; esac; exec {BASE_PYTHON} "$@"')
    assert_refused(machine.setup(), 1, "no venv module")
    machine.add_python()
    (machine.repository / ".venv").mkdir()
    assert_refused(machine.setup(), 1, "is not a Python environment")
    assert_refused(machine.setup(VIRTUAL_ENV="/no/such"), 1, "/no/such does not exist")


# --- the validation scripts


@dataclass
class Report:
    """What a validation script found."""

    status: int
    text: str
    rows: dict[str, dict]

    def state(self, what: str) -> str:
        return self.rows[what]["state"]


class Site:
    """A place to validate: PATH is only `path/bin`, ROCm is in `path/rocm`."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
        self.path, self.patch, self.capsys = path, patch, capsys
        patch.syspath_prepend(VALIDATION)
        for name in (*VARIABLES, "CUDA_VISIBLE_DEVICES"):
            patch.delenv(name, raising=False)
        for name in COREUTILS:
            self.program(name, f'exec {shutil.which(name)} "$@"')
        patch.setenv("PATH", str(path / "bin"))
        patch.setenv("ROCM_PATH", str(path / "rocm"))
        patch.chdir(path)
        self.checks = importlib.import_module("checks")

    def program(self, name: str, text: str) -> None:
        write_program(self.path / "bin" / name, text)

    def torch(self, build: str | tuple) -> None:
        """Processes started from here find this code, or a stand-in of this build, as PyTorch."""
        directory = self.path / f"torch{time.monotonic_ns()}"
        if isinstance(build, str):
            directory.mkdir()
            (directory / "torch.py").write_text(build)
        else:
            write_torch(directory, build)
        self.patch.setenv("PYTHONPATH", str(directory))

    def answers(self, module: ModuleType, build: tuple, **answers: object) -> None:
        """What the process that imports PyTorch found."""
        answers["torch"] = dict(zip(("version", "hip", "cuda"), build, strict=True))
        self.patch.setattr(module, "in_child", lambda *_: answers)

    def rocm(self, version: str = "7.0.1") -> None:
        """Tools of ROCm that answer as they should."""
        (self.path / "rocm/.info").mkdir(parents=True)
        (self.path / "rocm/.info/version").write_text(version)
        self.program("rocminfo", printing(ROCMINFO))
        for name in ("amd-smi", *ROCM_TOOLS):
            self.program(name, printing(f"usage: {name}"))

    def validate(self, script: str, track: str | None) -> Report:
        """Run a validation script, in this process, once as a table and once as JSON."""
        module = importlib.import_module(script)
        argv = ["--track", track] if track else []
        with self.patch.context() as patch:
            patch.setattr(module, "gather", functools.cache(module.gather))  # looks once for both
            status = module.main(argv)
            text = self.capsys.readouterr().out
            assert module.main([*argv, "--json"]) == status
        record = json.loads(self.capsys.readouterr().out)
        assert record["passed"] == (status == 0)
        assert text.splitlines()[-1].startswith(f"{record['check']} check: {'FAIL' if status else 'PASS'}")
        for row in record["checks"]:
            assert row["what"] in text
            assert row["mend"] in text
            assert row["mend"] or row["state"] in ("ok", "-"), row
        return Report(status, text, {row["what"]: row for row in record["checks"]})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Site:
    return Site(tmp_path, monkeypatch, capsys)


def test_this_machine_can_run_the_scripts(site):
    """With the real PyTorch, on the CPU."""
    report = site.validate("test_environment", "cpu")
    assert report.status == 0, report.text
    assert report.rows["version scripts"]["found"] == f"{len(list(ROOT.glob('tiny_*_v*.py')))} answer --help"
    assert report.rows["training step"]["found"] == "right on cpu"
    site.patch.chdir("/proc")  # where nobody can write
    site.torch(NO_TORCH)
    row = site.validate("test_environment", "cpu").rows["current directory"]
    assert (row["state"], row["found"].partition(":")[0]) == ("MISSING", "cannot write")


def test_the_profiler_works_on_this_machine(site):
    report = site.validate("test_profiling_tools", "cpu")
    assert report.status == 0, report.text
    assert re.fullmatch(r"sees [1-9]\d* events, 0 GPU kernels", report.rows["torch.profiler"]["found"])
    assert {report.rows[tool]["found"] for tool in (*ROCM_TOOLS, ROCTX)} == {"not needed on the cpu track"}
    report = site.validate("test_rocm_installation", "cpu")
    assert (report.status, "not needed on the cpu track" in report.text) == (0, True)


@pytest.mark.parametrize("track", ["cpu", "nvidia", "rocm"])
@pytest.mark.parametrize("script", ["test_environment", "test_profiling_tools"])
def test_missing_torch_is_a_row(site, script, track):
    site.torch(NO_TORCH)
    report = site.validate(script, track)
    assert report.status == 1
    row = report.rows["torch" if script == "test_environment" else "torch.profiler"]
    assert (row["state"], row["found"].removeprefix("torch: ")) == ("MISSING", "missing")
    assert re.fullmatch(rf"bash .*environment_setup\.sh --track {track}", row["mend"])


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise OSError('libamdhip64.so.6: cannot open\\nshared object')", "so.6: cannot open shared object"),
        ("import os; os.abort()", "signal 6"),
        ("raise SystemExit('no licence')", "no licence"),
        ("__version__ = '2.9.0'", "AttributeError"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\x00'); raise ImportError('x\\x1b[31m')", "ImportError: x"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
    ],
)
def test_broken_torch_is_a_row(site, code, text):
    site.torch(code)
    if "sleep" in code:
        site.patch.setattr(site.checks, "CHILD_TIMEOUT", 0.5)
    report = site.validate("test_environment", "cpu")
    assert (report.status, report.state("torch"), report.state("training step")) == (1, "MISSING", "-")
    assert text in report.rows["torch"]["found"]
    assert "\x1b" not in report.text
    assert report.state("numpy") == "ok", "the rest is still looked at"


@pytest.mark.parametrize(("build", "track"), [(CPU, "rocm"), (HIP, "nvidia"), (("2.3.0", None, None), "cpu")])
def test_torch_of_the_wrong_build_is_a_row(site, build, track):
    site.torch(build)
    report = site.validate("test_environment", track)
    assert (report.status, report.state("torch")) == (1, "MISSING")
    assert report.rows["torch"]["mend"].startswith("python3 -m venv"), "the PyTorch that is there stays"


def test_gpu_that_is_missing_or_hidden_is_named(site):
    site.torch(HIP)
    report = site.validate("test_environment", "rocm")
    assert report.state("GPU") == "MISSING"
    assert "test_rocm_installation.py" in report.rows["GPU"]["mend"]
    site.patch.setenv("HIP_VISIBLE_DEVICES", "-1")
    assert site.validate("test_environment", "rocm").rows["GPU"]["mend"] == "unset HIP_VISIBLE_DEVICES"


def test_scripts_that_fail_are_rows(site):
    good = "def main(argv):\n    print('usage')\n    raise SystemExit(0)\n"
    sources = {"tiny_a_v1": good, "tiny_b_v1": "import no_such_module", "tiny_c_v1": good.replace("0", "4")}
    for name, source in {**sources, "tiny_d_v3": "import triton_kernels_missing"}.items():
        (site.path / f"{name}.py").write_text(source)
    module = importlib.import_module("test_environment")
    site.patch.setattr(module, "version_scripts", lambda: sorted(site.path.glob("tiny_*.py")))
    (site.path / "hide").mkdir()
    (site.path / "hide/triton.py").write_text(NO_TORCH.replace("torch", "triton"))
    site.patch.setenv("PYTHONPATH", str(site.path / "hide"))
    report = site.validate("test_environment", "cpu")
    assert report.status == 1
    assert report.rows["version scripts"]["found"] == "1 answer --help"
    assert "no_such_module" in report.rows["tiny_b_v1.py"]["found"]
    assert report.state("tiny_c_v1.py") == "MISSING"
    assert report.state("triton") == report.state("tiny_d_v3.py") == "optional", "the cpu track needs no triton"


@pytest.fixture
def rocm(site: Site) -> Site:
    """A machine with an AMD GPU, as far as files and tools tell."""
    module = importlib.import_module("test_rocm_installation")
    site.rocm()
    for name in ("kfd", "dri/renderD128"):
        (site.path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (site.path / "dev" / name).touch()
    site.patch.setattr(site.checks, "KFD", site.path / "dev/kfd")
    site.patch.setattr(module, "DRI", site.path / "dev/dri")
    site.answers(module, HIP, gpus=1)
    return site


def test_rocm_that_is_complete_passes_with_either_smi(rocm):
    report = rocm.validate("test_rocm_installation", None)
    assert report.status == 0, report.text
    assert report.rows["rocminfo"]["found"] == "1 x gfx90a"
    assert report.rows["ROCm"]["found"].startswith("7.0.1 in")
    rocm.program("amd-smi", "exit 1")
    assert rocm.validate("test_rocm_installation", "rocm").state("amd-smi or rocm-smi") == "MISSING"
    rocm.program("rocm-smi", "exit 0")
    assert rocm.validate("test_rocm_installation", "rocm").rows["amd-smi or rocm-smi"]["found"].endswith("rocm-smi")


def test_rocm_device_files(rocm):
    kfd = rocm.checks.KFD
    kfd.unlink()
    kfd.mkdir()  # cannot be opened, not even by root
    row = rocm.validate("test_rocm_installation", "rocm").rows[str(kfd)]
    assert (row["state"], row["found"]) == ("MISSING", "Is a directory")
    assert row["mend"].startswith("sudo usermod -a -G render,video $USER")
    kfd.rmdir()
    report = rocm.validate("test_rocm_installation", "rocm")
    assert report.status == 1
    assert report.rows[str(kfd)]["mend"].startswith("sudo modprobe amdgpu")


@pytest.mark.parametrize(
    ("variable", "value", "hides"),
    [
        ("HIP_VISIBLE_DEVICES", "-1", True),
        ("ROCR_VISIBLE_DEVICES", "", True),
        ("CUDA_VISIBLE_DEVICES", "7,0", True),
        ("HIP_VISIBLE_DEVICES", "0,7", False),
        ("ROCR_VISIBLE_DEVICES", "GPU-4b2c1a9f", False),
        ("ROCR_VISIBLE_DEVICES", "2", False),
    ],
)
def test_variables_that_hide_every_gpu(rocm, variable, value, hides):
    rocm.patch.setenv(variable, value)
    report = rocm.validate("test_rocm_installation", "rocm")
    assert report.status == hides
    assert report.rows["*_VISIBLE_DEVICES"]["mend"] == (f"unset {variable}" if hides else "")


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (printing("Unable to open /dev/kfd read-write: Permission denied", 1), "Permission denied"),
        (printing(ROCMINFO.replace("gfx90a", "gfx")), "lists no GPU"),
        ("printf '\\377\\376\\000 Name: gfx'; exit 0", "lists no GPU"),
        ("kill -SEGV $$", "signal 11"),
        ("#!/no/such/interpreter", "cannot be started"),
        ("sleep 60 & echo $! >child; wait", "no answer within 0.5 s"),
    ],
    ids=["denied", "no GPU", "not text", "crash", "no interpreter", "hang"],
)
def test_rocminfo_that_misbehaves_is_a_row(rocm, program, text):
    rocm.program("sleep", f'exec {shutil.which("sleep", path=os.defpath)} "$@"')
    rocm.program("rocminfo", program)
    rocm.patch.setattr(rocm.checks, "TOOL_TIMEOUT", 0.5 if "sleep" in program else 20)
    report = rocm.validate("test_rocm_installation", "rocm")
    assert (report.status, report.state("rocminfo")) == (1, "MISSING")
    assert text in report.rows["rocminfo"]["found"]
    assert report.state("amd-smi or rocm-smi") == "ok", "the rest is still looked at"
    if "sleep" in program:
        assert has_ended(int((rocm.path / "child").read_text())), "what the tool had started still runs"


def has_ended(process: int) -> bool:
    """Whether a process that was killed is gone, or waits only for its exit status to be read."""
    for _ in range(100):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def profilers(site: Site) -> Site:
    """ROCm's profilers as stand-ins, and a PyTorch that sees kernels."""
    site.rocm()
    working = {"profile": {"events": 5, "kernels": 1}, "roctx": "loads"}
    site.answers(importlib.import_module("test_profiling_tools"), HIP, **working)
    return site


def check_profilers(site: Site) -> Report:
    return site.validate("test_profiling_tools", "rocm")


def test_profilers_that_are_complete_pass(profilers):
    report = check_profilers(profilers)
    assert report.status == 0, report.text
    (profilers.path / "bin/rocprof-sys-run").rename(profilers.path / "bin/omnitrace-run")
    assert check_profilers(profilers).rows["rocprof-sys-run"]["found"].endswith("omnitrace-run")


@pytest.mark.parametrize("tool", ROCM_TOOLS)
def test_profiler_that_is_missing_or_not_on_path(profilers, tool):
    elsewhere = profilers.path / "rocm/bin"
    elsewhere.mkdir()
    (profilers.path / "bin" / tool).rename(elsewhere / tool)
    report = check_profilers(profilers)
    assert (report.status, report.rows[tool]["mend"]) == (1, f'export PATH="{elsewhere}:$PATH"')
    (elsewhere / tool).unlink()
    assert check_profilers(profilers).rows[tool]["mend"].startswith("sudo apt install rocprofiler-")


def test_rocpd_comes_with_rocm_7(profilers):
    (profilers.path / "bin/rocpd").unlink()
    (profilers.path / "rocm/.info/version").write_text("6.4.1-83")
    report = check_profilers(profilers)
    assert (report.status, report.state("rocpd")) == (0, "-")


def test_rocprof_compute_needs_a_data_centre_gpu(profilers):
    (profilers.path / "bin/rocprof-compute").unlink()
    profilers.program("rocminfo", printing(ROCMINFO.replace("gfx90a", "gfx1100")))
    report = check_profilers(profilers)
    assert (report.status, report.state("rocprof-compute")) == (0, "-")
    assert "gfx1100" in report.rows["rocprof-compute"]["found"]
    profilers.program("rocminfo", printing(ROCMINFO.replace("gfx90a", "gfx950")))
    assert check_profilers(profilers).state("rocprof-compute") == "MISSING"


def test_rocprof_compute_without_its_python_packages(profilers):
    requirements = profilers.path / "rocm/libexec/rocprofiler-compute/requirements.txt"
    requirements.parent.mkdir(parents=True)
    requirements.write_text("pandas\n")
    profilers.program("rocprof-compute", printing("ModuleNotFoundError: No module named 'pandas'", 1))
    row = check_profilers(profilers).rows["rocprof-compute"]
    assert (row["state"], row["mend"]) == ("MISSING", f"python3 -m pip install -r {requirements}")


def test_gpu_profiler_that_sees_no_kernels_fails_and_so_does_a_marker_library_that_does_not_load(profilers):
    broken = {"profile": {"events": 5, "kernels": 0}, "roctx": {"error": "OSError: no"}}
    profilers.answers(importlib.import_module("test_profiling_tools"), HIP, **broken)
    report = check_profilers(profilers)
    assert report.status == 1
    assert report.state("torch.profiler") == report.state(ROCTX) == "MISSING"


@pytest.mark.parametrize("script", ["test_environment", "test_rocm_installation", "test_profiling_tools"])
def test_wrong_track_is_one_line(script, tmp_path):
    command = [sys.executable, str(VALIDATION / f"{script}.py"), "--track", "tpu"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert_refused(result, 2, f"{script}.py: error", "tpu")


# Notes its arguments, leaves a file where results go, and ends with the last of them.
TRAINS = """
import pathlib, sys
directory = pathlib.Path(sys.argv[sys.argv.index("--profile-dir") + 1])
(directory / "result").write_text("")
print(*sys.argv[1:])
sys.exit(int(sys.argv[-1]))
"""


def check_training(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "tiny_a_v1.py").write_text(TRAINS)
    command = [sys.executable, str(VALIDATION / "test_training.py"), *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_three_training_steps_of_a_script(tmp_path):
    result = check_training("tiny_a_v1.py", "--batch-size", "7", "0", cwd=tmp_path)
    received, verdict = result.stdout.splitlines()
    arguments = received.split()
    assert (result.returncode, verdict, result.stderr) == (0, "Training check: PASS", "")
    assert {"--num-steps=3", "--under-profiler"} <= set(arguments)
    assert arguments[-3:] == ["--batch-size", "7", "0"], "what the user gives wins"
    assert not Path(arguments[arguments.index("--profile-dir") + 1]).exists()


def test_a_script_that_does_not_train_fails_the_check(tmp_path):
    result = check_training("tiny_a_v1.py", "3", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "Training check: FAIL (tiny_a_v1.py ended with status 3)"
    assert_refused(check_training("tiny_b_v1.py", cwd=tmp_path), 2, "tiny_b_v1.py: no such file")
    result = check_training("tiny_llama_v1.py", "--seq-len", "many", cwd=tmp_path)  # found in the repository
    assert_refused(result, 1, "tiny_llama_v1.py: error: argument --seq-len")

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT, words

VALIDATION = ROOT / "setup" / "validation_scripts"
SCRIPTS = ("test_environment", "test_rocm_installation", "test_profiling_tools")
BASE_PYTHON = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
COREUTILS = ("bash", "cat", "dirname", "env", "grep", "rm")
VARIABLES = ("VIRTUAL_ENV", "PYTHONPATH", "ROCM_PATH", "MODULEPATH", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
ROCMINFO = """
ROCk module is loaded
*******
Agent 1
*******
  Name:                    AMD EPYC 7A53 64-Core Processor
*******
Agent 2
*******
  Name:                    gfx90a
  Marketing Name:          AMD Instinct MI250X
    ISA 1
      Name:                    amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-
"""
HIP, CUDA, CPU = ("2.9.1+rocm6.4", "'6.4.43484'", "None"), ("2.9.1+cu128", "None", "'12.8'"), ("2.9.1", "None", "None")


def write_program(path: Path, text: str) -> Path:
    """An executable file; text without `#!` is for the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def printing(text: str, status: int = 0) -> str:
    """A program that prints the text."""
    return f"cat <<'END'\n{text}\nEND\nexit {status}"


def write_torch(directory: Path, build: tuple[str, str, str] = CPU, metadata: str | None = None) -> Path:
    """A stand-in for PyTorch that says which build it is; returns the directory for PYTHONPATH."""
    version, hip, cuda = build
    (directory / "torch").mkdir(parents=True)
    (directory / "torch/__init__.py").write_text(f"from . import version\n__version__ = {version!r}\n")
    (directory / "torch/version.py").write_text(f"hip = {hip}\ncuda = {cuda}\n")
    info = directory / f"torch-{metadata or version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {metadata or version}\n")
    (info / "RECORD").write_text("")
    (info / "INSTALLER").write_text("pip\n")
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


@dataclass
class Machine:
    """A place to run the setup script in: `bin` is all of PATH, `repository` has the script."""

    path: Path

    @property
    def bin(self) -> Path:
        return self.path / "bin"

    @property
    def repository(self) -> Path:
        return self.path / "repository"

    def add_python(self, pythonpath: Path | None = None) -> None:
        """Put python3 on PATH: without packages (-S) but for a PyTorch that comes as with a site's module."""
        variable = f"PYTHONPATH={shlex.quote(str(pythonpath))} " if pythonpath else ""
        write_program(self.bin / "python3", f'{variable}exec {shlex.quote(str(BASE_PYTHON))} -S "$@"')

    def setup(self, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run environment_setup.sh."""
        environment = {key: value for key, value in os.environ.items() if key not in VARIABLES and "CONDA" not in key}
        environment |= {"PATH": str(self.bin), "ROCM_PATH": str(self.path / "rocm"), "PIP_NO_INDEX": "1"}
        return subprocess.run(
            [shutil.which("bash"), str(self.repository / "setup/environment_setup.sh"), *argv],
            env=environment | variables,
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def commands(self, *argv: str, **variables: str) -> list[list[str]]:
        """The commands that a dry run prints, without the last, which is the check."""
        before = sorted(self.path.rglob("*"))
        result = self.setup(*argv, "--dry-run", **variables)
        assert result.returncode == 0, result.stderr
        assert sorted(path for path in self.path.rglob("*") if "__pycache__" not in str(path)) == before
        lines = [shlex.split(line[2:]) for line in result.stdout.splitlines() if line.startswith("+ ")]
        assert Path(lines[-1][1]).name == "test_environment.py"
        return lines[:-1]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without Python, PyTorch or GPU."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    machine = Machine(tmp_path / "machine")
    shutil.copytree(ROOT / "setup", machine.repository / "setup", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, machine.repository)
    for name in COREUTILS:
        write_program(machine.bin / name, f'exec {shutil.which(name)} "$@"')
    return machine


def environment_with_packages(path: Path, *site_packages: Path | str) -> Path:
    """A virtual environment, made quickly: pip and all else come from directories that are there."""
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", path], check=True)
    library = path / f"lib/python3.{sys.version_info.minor}/site-packages"
    (library / "others.pth").write_text("".join(f"{directory}\n" for directory in site_packages))
    return path


def files(directory: Path) -> dict[Path, int]:
    """All files and when they were changed, caches left out."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if "__pycache__" not in str(path)}


def assert_refused(result: subprocess.CompletedProcess[str], status: int, *texts: str) -> None:
    """One line on stderr that has all of the texts."""
    assert result.returncode == status, result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for text in texts:
        assert text in result.stderr


# environment_setup.sh: what it would do


def test_cpu_track_installs_the_requirements_file(machine: Machine) -> None:
    machine.add_python()
    venv = machine.repository / ".venv"
    assert machine.commands() == [
        [str(machine.bin / "python3"), "-m", "venv", str(venv)],
        [str(venv / "bin/python"), "-m", "pip", "install", "-r", str(machine.repository / "requirements.txt")],
    ]
    assert machine.commands("--dev")[1][-1] == str(machine.repository / "requirements-dev.txt")


def test_nvidia_is_found_where_nvidia_smi_lists_a_gpu(machine: Machine) -> None:
    machine.add_python()
    write_program(machine.bin / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'")
    assert "Track: nvidia" in machine.setup("--dry-run").stdout
    write_program(machine.bin / "nvidia-smi", "echo 'Failed to initialize NVML'; exit 9")
    assert "Track: cpu" in machine.setup("--dry-run").stdout


@pytest.mark.parametrize(
    ("installed", "index"),
    [
        ("6.0.2-115", "6.1"),
        ("6.2.1", "6.2.4"),
        ("6.4.1-83", "6.4"),
        ("7.0.2", "7.0"),
        ("7.9.0", "7.2"),
        ("8.0.0", "7.2"),
    ],
)
def test_rocm_track_takes_pytorch_from_the_index_of_that_rocm(machine: Machine, installed: str, index: str) -> None:
    machine.add_python()
    write_program(machine.bin / "rocminfo", printing(ROCMINFO))
    (machine.path / "rocm/.info").mkdir(parents=True)
    (machine.path / "rocm/.info/version").write_text(installed + "\n")
    _, torch, rest = machine.commands()
    url = f"https://download.pytorch.org/whl/rocm{index}"
    assert torch[3:] == ["install", "--index-url", url, "torch>=2.6,<2.14"]
    # Without triton: PyPI's would be installed over that of the ROCm build.
    assert rest[3:] == ["install", "--constraint", "<(echo", "torch==VERSION_INSTALLED_ABOVE)", "numpy"]


def test_index_can_be_given(machine: Machine) -> None:
    machine.add_python()
    url = "https://download.pytorch.org/whl/cpu"
    _, torch, rest = machine.commands("--track", "cpu", "--index-url", url)
    assert torch[3:] == ["install", "--index-url", url, "torch>=2.6,<2.14"]
    assert rest[-2:] == ["triton", "numpy"]


def test_rocm_of_unknown_version_needs_an_index(machine: Machine) -> None:
    machine.add_python()
    assert_refused(machine.setup("--track", "rocm"), 1, "--index-url", str(machine.path / "rocm/.info/version"))
    assert not (machine.repository / ".venv").exists()


@pytest.mark.parametrize(("track", "build"), [("rocm", HIP), ("nvidia", CUDA), ("cpu", CPU), ("cpu", HIP)])
def test_pytorch_of_a_site_is_kept(machine: Machine, track: str, build: tuple[str, str, str]) -> None:
    version = build[0].replace("+cu128", "")  # PyPI's wheels call themselves otherwise than pip does
    machine.add_python(pythonpath=write_torch(machine.path / "site", build, version))
    venv, *installs = machine.commands("--track", track)
    assert venv[1:4] == ["-m", "venv", "--system-site-packages"]
    assert [command[3:] for command in installs] == [
        ["install", "--constraint", "<(echo", f"torch=={version})", "triton", "numpy"],
    ]


def test_triton_of_a_rocm_build_is_kept(machine: Machine) -> None:
    """It has the module's name, but not the package's."""
    site = write_torch(machine.path / "site", HIP)
    (site / "triton").mkdir()
    (site / "triton/__init__.py").touch()
    machine.add_python(pythonpath=site)
    assert machine.commands("--track", "rocm")[-1][-2:] == [f"torch=={HIP[0]})", "numpy"]


@pytest.mark.parametrize(
    ("build", "track", "reason"),
    [
        (("2.5.1", "None", "None"), "cpu", "2.5.1 is out of range, torch>=2.6,<2.14 is needed"),
        (("2.14.0a0+git1", "None", "None"), "cpu", "out of range"),
        (CPU, "rocm", "CPU build, which the rocm track cannot use"),
        (HIP, "nvidia", "ROCm 6.4.43484 build, which the nvidia track cannot use"),
    ],
)
def test_pytorch_that_cannot_be_used_stops_the_setup(machine: Machine, build: tuple, track: str, reason: str) -> None:
    machine.add_python(pythonpath=write_torch(machine.path / "site", build))
    assert_refused(machine.setup("--track", track), 1, reason)
    assert not (machine.repository / ".venv").exists()


def test_broken_pytorch_stops_the_setup(machine: Machine) -> None:
    site = write_torch(machine.path / "site")
    machine.add_python(pythonpath=site)
    for code, reason in {"raise OSError('libc10.so: bad')": "libc10.so", "import os; os.abort()": "signal 6"}.items():
        (site / "torch/__init__.py").write_text(code)
        assert_refused(machine.setup(), 1, "does not import", reason)
    assert not (machine.repository / ".venv").exists()


def test_conda_environment_is_used_but_not_base(machine: Machine) -> None:
    machine.add_python()
    conda = machine.path / "conda"
    (conda / "conda-meta").mkdir(parents=True)
    write_program(conda / "bin/python", f'exec {BASE_PYTHON} -S "$@"')
    name = {"CONDA_PREFIX": str(conda)}
    assert [command[0] for command in machine.commands(**name, CONDA_DEFAULT_ENV="work")] == [str(conda / "bin/python")]
    assert machine.commands(**name, CONDA_DEFAULT_ENV="base")[0][2] == "venv"


# environment_setup.sh: what it does


def test_second_run_changes_nothing(machine: Machine) -> None:
    """Here with the real packages, and with the real check at the end."""
    venv = environment_with_packages(machine.path / "venv", sysconfig.get_path("purelib"))
    machine.add_python()
    shutil.copy(ROOT / "tiny_llama_v1.py", machine.repository)
    before = files(venv)
    result = machine.setup("--venv", str(venv), "--track", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Nothing to install" in result.stdout
    assert "Environment check: PASS" in result.stdout
    assert files(venv) == before


def test_only_what_is_missing_is_installed_and_pytorch_never_changes(machine: Machine) -> None:
    site, wheels = write_torch(machine.path / "site"), machine.path / "wheels"
    write_wheel(wheels, "absent")
    write_wheel(wheels, "torch")
    write_wheel(wheels, "greedy", requires="torch<2")
    (machine.repository / "requirements.txt").write_text("torch>=2.6,<2.14\nabsent\npytest\n")
    (machine.repository / "requirements-dev.txt").write_text("-r requirements.txt\ngreedy\n")
    venv = environment_with_packages(machine.path / "venv", site, sysconfig.get_path("purelib"))
    find = {"PIP_FIND_LINKS": str(wheels), "VIRTUAL_ENV": str(venv)}
    torch_files = files(site)

    result = machine.setup("--dev", **find)
    assert_refused_by_pip(result)
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


def assert_refused_by_pip(result: subprocess.CompletedProcess[str]) -> None:
    """pip's own message, then one line of the script; no check after it."""
    assert result.returncode == 1
    assert "ERROR:" in result.stderr
    assert "environment_setup.sh: error: pip failed" in result.stderr.splitlines()[-1]
    assert "Environment check" not in result.stdout


def test_without_network_pip_says_so(machine: Machine) -> None:
    venv = environment_with_packages(machine.path / "venv", machine.path / "pip")
    (machine.path / "pip").mkdir()
    (machine.path / "pip/pip").symlink_to(Path(sysconfig.get_path("purelib")) / "pip")
    assert_refused_by_pip(machine.setup("--venv", str(venv), PIP_FIND_LINKS=""))


def test_environment_is_made(machine: Machine) -> None:
    """A real one, which sees the site's PyTorch."""
    (machine.repository / "requirements.txt").write_text("torch>=2.6,<2.14\n")
    machine.add_python()
    result = machine.setup("--venv", "new one", PYTHONPATH=str(write_torch(machine.path / "site")))
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
def test_wrong_options(machine: Machine, argv: str, text: str) -> None:
    assert_refused(machine.setup(*words(argv)), 2, text)


def test_help(machine: Machine) -> None:
    result = machine.setup("--help")
    assert result.returncode == 0
    for option in ("--track", "--venv", "--index-url", "--dev", "--dry-run"):
        assert option in result.stdout


def test_python_that_cannot_be_used(machine: Machine) -> None:
    assert_refused(machine.setup(), 1, "no Python 3.10 or newer")
    write_program(machine.bin / "python3", "exit 1")  # as an older one answers
    assert_refused(machine.setup(), 1, "no Python 3.10 or newer")
    write_program(machine.bin / "python3", f'case $2 in *ensurepip*) exit 1;; esac; exec {BASE_PYTHON} "$@"')
    assert_refused(machine.setup(), 1, "no venv module")
    machine.add_python()
    (machine.repository / ".venv").mkdir()
    assert_refused(machine.setup(), 1, "is not a Python environment")
    assert_refused(machine.setup(VIRTUAL_ENV="/no/such"), 1, "/no/such does not exist")


# The validation scripts


@dataclass
class Report:
    """What a validation script found."""

    status: int
    text: str
    rows: dict[str, dict]

    def state(self, what: str) -> str:
        return self.rows[what]["state"]


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Report]:
    """`validate(script, track)`, in this process, with PATH only `tmp_path/bin` and ROCm in `tmp_path/rocm`."""
    monkeypatch.syspath_prepend(VALIDATION)
    for name in (*VARIABLES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in COREUTILS:
        write_program(tmp_path / "bin" / name, f'exec {shutil.which(name)} "$@"')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.chdir(tmp_path)

    def run(script: str, track: str | None) -> Report:
        module = importlib.import_module(script)
        argv = ["--track", track] if track else []
        with monkeypatch.context() as patch:
            patch.setattr(module, "gather", functools.cache(module.gather))  # looks once for both kinds of output
            return both_outputs(module, argv)

    def both_outputs(module: ModuleType, argv: list[str]) -> Report:
        status = module.main(argv)
        text = capsys.readouterr().out
        assert module.main([*argv, "--json"]) == status
        record = json.loads(capsys.readouterr().out)
        assert record["passed"] == (status == 0)
        assert text.splitlines()[-1].startswith(f"{record['check']} check: {'FAIL' if status else 'PASS'}")
        for row in record["checks"]:
            assert row["what"] in text
            assert row["mend"] in text
            assert row["mend"] or row["state"] in ("ok", "-"), row
        return Report(status, text, {row["what"]: row for row in record["checks"]})

    return run


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(VALIDATION)
    return importlib.import_module("checks")


@pytest.fixture
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from here find no PyTorch."""
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    monkeypatch.setenv("PYTHONPATH", str(missing))


def fake_torch(directory: Path, monkeypatch: pytest.MonkeyPatch, build: tuple[str, str, str]) -> None:
    """Processes started from here find a stand-in for PyTorch."""
    monkeypatch.setenv("PYTHONPATH", str(write_torch(directory / f"torch{time.monotonic_ns()}", build)))


def fake_rocm(directory: Path, version: str = "7.0.1") -> None:
    """Tools of ROCm that answer as they should."""
    (directory / "rocm/.info").mkdir(parents=True)
    (directory / "rocm/.info/version").write_text(version)
    write_program(directory / "bin/rocminfo", printing(ROCMINFO))
    for name in ("amd-smi", "rocprofv3", "rocprof-sys-run", "rocprof-compute", "rocpd"):
        write_program(directory / "bin" / name, printing(f"usage: {name}"))


def test_this_machine_can_run_the_scripts(validate: Callable[..., Report]) -> None:
    """With the real PyTorch, on the CPU."""
    report = validate("test_environment", "cpu")
    assert report.status == 0, report.text
    assert report.rows["version scripts"]["found"] == f"{len(list(ROOT.glob('tiny_*_v*.py')))} answer --help"
    assert report.rows["training step"]["found"] == "right on cpu"


def test_the_profiler_works_on_this_machine(validate: Callable[..., Report]) -> None:
    report = validate("test_profiling_tools", "cpu")
    assert report.status == 0, report.text
    assert re.fullmatch(r"sees [1-9]\d* events, 0 GPU kernels", report.rows["torch.profiler"]["found"])
    for tool in ("rocprofv3", "rocprof-sys-run", "rocprof-compute", "rocpd", "librocprofiler-sdk-roctx.so"):
        assert report.rows[tool]["found"] == "not needed on the cpu track"


@pytest.mark.parametrize("track", ["cpu", "nvidia"])
def test_rocm_is_not_needed_elsewhere(validate: Callable[..., Report], track: str) -> None:
    report = validate("test_rocm_installation", track)
    assert report.status == 0
    assert f"not needed on the {track} track" in report.text


@pytest.mark.parametrize("track", ["cpu", "nvidia", "rocm"])
@pytest.mark.parametrize("script", ["test_environment", "test_profiling_tools"])
def test_missing_torch_is_a_row(validate: Callable[..., Report], no_torch: None, script: str, track: str) -> None:
    report = validate(script, track)
    assert report.status == 1
    row = report.rows["torch" if script == "test_environment" else "torch.profiler"]
    assert (row["state"], row["found"].removeprefix("torch: ")) == ("MISSING", "missing")
    assert row["mend"].endswith(f"environment_setup.sh --track {track}")
    assert row["mend"].startswith("bash ")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "raise OSError('libamdhip64.so.6: cannot open\\nshared object')",
            "libamdhip64.so.6: cannot open shared object",
        ),
        ("import os; os.abort()", "signal 6"),
        ("raise SystemExit('no licence')", "no licence"),
        ("__version__ = '2.9.0'", "AttributeError"),
        (
            "import sys; sys.stdout.buffer.write(b'\\xff\\x00PROBE {}'); raise ImportError('x\\x1b[31m')",
            "ImportError: x",
        ),
    ],
)
def test_broken_torch_is_a_row(
    validate: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, text: str
) -> None:
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = validate("test_environment", "cpu")
    assert report.status == 1
    assert report.state("torch") == "MISSING"
    assert text in report.rows["torch"]["found"]
    assert "\x1b" not in report.text
    assert report.state("training step") == "-"
    assert report.state("numpy") == "ok", "the rest is still looked at"


def test_torch_that_hangs_is_a_row(
    validate: Callable[..., Report], checks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(checks, "CHILD_TIMEOUT", 0.5)
    report = validate("test_environment", "cpu")
    assert report.status == 1
    assert "no answer within 0.5 s" in report.rows["torch"]["found"]


def test_torch_of_the_wrong_build_is_a_row(
    validate: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for build, track in ((CPU, "rocm"), (HIP, "nvidia"), (("2.3.0", "None", "None"), "cpu")):
        fake_torch(tmp_path, monkeypatch, build)
        report = validate("test_environment", track)
        assert report.status == 1
        assert report.state("torch") == "MISSING"
        assert report.rows["torch"]["mend"].startswith("python3 -m venv"), "the PyTorch that is there stays"


def test_gpu_that_is_missing_or_hidden_is_named(
    validate: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(tmp_path, monkeypatch, HIP)
    report = validate("test_environment", "rocm")
    assert report.state("GPU") == "MISSING"
    assert "test_rocm_installation.py" in report.rows["GPU"]["mend"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    assert validate("test_environment", "rocm").rows["GPU"]["mend"] == "unset HIP_VISIBLE_DEVICES"


def test_scripts_that_fail_are_rows(
    validate: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("test_environment")
    good = "def main(argv):\n    print('usage')\n    raise SystemExit(0)\n"
    sources = {
        "tiny_a_v1": good,
        "tiny_b_v1": "import no_such_module",
        "tiny_c_v1": good.replace("0", "4"),
        "tiny_d_v3": "import triton_kernels_missing",
        "tiny_e_v1": good,
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setattr(module, "version_scripts", lambda: sorted(tmp_path.glob("tiny_*.py")))
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "triton.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')")
    monkeypatch.setenv("PYTHONPATH", str(hide))
    report = validate("test_environment", "cpu")
    assert report.status == 1
    assert report.rows["version scripts"]["found"] == "2 answer --help"
    assert "no_such_module" in report.rows["tiny_b_v1.py"]["found"]
    assert report.state("tiny_c_v1.py") == "MISSING"
    assert report.state("triton") == report.state("tiny_d_v3.py") == "optional", (
        "V3 needs triton, the cpu track does not"
    )


def test_directory_that_cannot_be_written(
    validate: Callable[..., Report], no_torch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("test_environment")

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(module, "in_child", lambda *_: {"failure": "not of interest here"})
    row = validate("test_environment", "cpu").rows["current directory"]
    assert (row["state"], row["found"]) == ("MISSING", "cannot write: Permission denied")


def rocm_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: ModuleType) -> ModuleType:
    """A machine with an AMD GPU, as far as files and tools tell."""
    module = importlib.import_module("test_rocm_installation")
    fake_rocm(tmp_path)
    for name in ("kfd", "dri/renderD128"):
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr(checks, "KFD", tmp_path / "dev/kfd")
    monkeypatch.setattr(module, "DRI", tmp_path / "dev/dri")
    monkeypatch.setattr(module, "in_child", lambda *_: {"torch": torch_record(HIP), "gpus": 1})
    return module


def torch_record(build: tuple[str, str, str]) -> dict:
    """What a child process says of this build."""
    return {"version": build[0], "hip": None if build[1] == "None" else build[1], "cuda": None}


def test_rocm_that_is_complete_passes(
    validate: Callable[..., Report], checks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm_machine(tmp_path, monkeypatch, checks)
    report = validate("test_rocm_installation", None)
    assert report.status == 0, report.text
    assert report.rows["rocminfo"]["found"] == "1 x gfx90a"
    assert report.rows["ROCm"]["found"].startswith("7.0.1 in")


def test_rocm_device_files(
    validate: Callable[..., Report], checks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = rocm_machine(tmp_path, monkeypatch, checks)
    kfd = str(checks.KFD)
    real_open = os.open

    def refuse(path: Path, flags: int, *more: object, **named: object) -> int:
        if Path(path) == checks.KFD and flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real_open(path, flags, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "open", refuse)
        row = validate("test_rocm_installation", "rocm").rows[kfd]
    assert (row["state"], row["found"]) == ("MISSING", "Permission denied")
    assert row["mend"].startswith("sudo usermod -a -G render,video $USER")
    checks.KFD.unlink()
    report = validate("test_rocm_installation", "rocm")
    assert report.status == 1
    assert report.rows[kfd]["mend"].startswith("sudo modprobe amdgpu")


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
def test_variables_that_hide_every_gpu(
    validate: Callable[..., Report],
    checks: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    hides: bool,
) -> None:
    rocm_machine(tmp_path, monkeypatch, checks)
    monkeypatch.setenv(variable, value)
    report = validate("test_rocm_installation", "rocm")
    assert report.status == hides
    assert report.rows["*_VISIBLE_DEVICES"]["mend"] == (f"unset {variable}" if hides else "")


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (printing("Unable to open /dev/kfd read-write: Permission denied", 1), "Permission denied"),
        (printing(ROCMINFO.replace("gfx90a", "gfx")), "lists no GPU"),
        ("printf '\\377\\376\\000 Name: gfx'; exit 0", "lists no GPU"),
        ("yes Name: 2>/dev/null | head -c 3000000; exit 3", "Name"),
        ("kill -SEGV $$", "signal 11"),
        ("#!/no/such/interpreter", "cannot be started"),
        ("env sleep 60 & echo $! >child; wait", "no answer within 0.5 s"),
    ],
    ids=["denied", "no GPU", "not text", "endless", "crash", "no interpreter", "hang"],
)
def test_rocminfo_that_misbehaves_is_a_row(
    validate: Callable[..., Report],
    checks: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    text: str,
) -> None:
    rocm_machine(tmp_path, monkeypatch, checks)
    for name in ("sleep", "yes", "head"):
        write_program(tmp_path / "bin" / name, f'exec {shutil.which(name, path=os.defpath)} "$@"')
    write_program(tmp_path / "bin/rocminfo", program)
    monkeypatch.setattr(checks, "TOOL_TIMEOUT", 0.5 if "sleep" in program else 20)
    report = validate("test_rocm_installation", "rocm")
    assert report.status == 1
    assert report.state("rocminfo") == "MISSING"
    assert text in report.rows["rocminfo"]["found"]
    assert report.state("amd-smi or rocm-smi") == "ok", "the rest is still looked at"
    if "sleep" in program:
        assert has_ended(int((tmp_path / "child").read_text())), "what the tool had started still runs"


def has_ended(process: int) -> bool:
    """Whether a process that was killed is gone, or waits only for its exit status to be read."""
    status = Path(f"/proc/{process}/stat")
    for _ in range(100):
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_either_smi_is_enough(
    validate: Callable[..., Report], checks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm_machine(tmp_path, monkeypatch, checks)
    write_program(tmp_path / "bin/amd-smi", "exit 1")
    assert validate("test_rocm_installation", "rocm").state("amd-smi or rocm-smi") == "MISSING"
    write_program(tmp_path / "bin/rocm-smi", "exit 0")
    assert validate("test_rocm_installation", "rocm").rows["amd-smi or rocm-smi"]["found"].endswith("rocm-smi")


# Notes its arguments, leaves a file where results go, and ends with the last of them.
TRAINS = """
import pathlib, sys
directory = pathlib.Path(sys.argv[sys.argv.index("--profile-dir") + 1])
(directory / "result").write_text("")
print(*sys.argv[1:])
sys.exit(int(sys.argv[-1]))
"""


def check_training(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(VALIDATION / "test_training.py"), *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_three_training_steps_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "tiny_a_v1.py").write_text(TRAINS)
    result = check_training("tiny_a_v1.py", "--batch-size", "7", "0", cwd=tmp_path)
    received, verdict = result.stdout.splitlines()
    arguments = received.split()
    assert (result.returncode, verdict, result.stderr) == (0, "Training check: PASS", "")
    assert {"--num-steps=3", "--under-profiler"} <= set(arguments)
    assert arguments[-3:] == ["--batch-size", "7", "0"], "what the user gives wins"
    assert not Path(arguments[arguments.index("--profile-dir") + 1]).exists()


def test_a_script_that_does_not_train_fails_the_check(tmp_path: Path) -> None:
    (tmp_path / "tiny_a_v1.py").write_text(TRAINS)
    result = check_training("tiny_a_v1.py", "3", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "Training check: FAIL (tiny_a_v1.py ended with status 3)"
    assert_refused(check_training("tiny_b_v1.py", cwd=tmp_path), 2, "tiny_b_v1.py: no such file")
    result = check_training("tiny_llama_v1.py", "--seq-len", "many", cwd=tmp_path)  # found in the repository
    assert_refused(result, 1, "tiny_llama_v1.py: error: argument --seq-len")


@pytest.fixture
def profilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate: Callable) -> Callable[[], Report]:
    """ROCm's profilers as stand-ins, a PyTorch that sees kernels; call it for the report."""
    module = importlib.import_module("test_profiling_tools")
    fake_rocm(tmp_path)
    answers = {"torch": torch_record(HIP), "profile": {"events": 5, "kernels": 1}, "roctx": "loads"}
    monkeypatch.setattr(module, "in_child", lambda *_: answers)
    return lambda: validate("test_profiling_tools", "rocm")


def test_profilers_that_are_complete_pass(profilers: Callable[[], Report], tmp_path: Path) -> None:
    report = profilers()
    assert report.status == 0, report.text
    (tmp_path / "bin/rocprof-sys-run").rename(tmp_path / "bin/omnitrace-run")
    assert profilers().rows["rocprof-sys-run"]["found"].endswith("omnitrace-run")


@pytest.mark.parametrize("tool", ["rocprofv3", "rocprof-sys-run", "rocprof-compute", "rocpd"])
def test_profiler_that_is_missing_or_not_on_path(profilers: Callable[[], Report], tmp_path: Path, tool: str) -> None:
    program = tmp_path / "bin" / tool
    (tmp_path / "rocm/bin").mkdir()
    program.rename(tmp_path / "rocm/bin" / tool)
    report = profilers()
    assert report.status == 1
    assert report.rows[tool]["mend"] == f'export PATH="{tmp_path}/rocm/bin:$PATH"'
    (tmp_path / "rocm/bin" / tool).unlink()
    assert profilers().rows[tool]["mend"].startswith("sudo apt install rocprofiler-")


def test_rocpd_comes_with_rocm_7(profilers: Callable[[], Report], tmp_path: Path) -> None:
    (tmp_path / "bin/rocpd").unlink()
    assert profilers().state("rocpd") == "MISSING"
    (tmp_path / "rocm/.info/version").write_text("6.4.1-83")
    report = profilers()
    assert (report.status, report.state("rocpd")) == (0, "-")


def test_rocprof_compute_needs_a_data_centre_gpu(profilers: Callable[[], Report], tmp_path: Path) -> None:
    (tmp_path / "bin/rocprof-compute").unlink()
    write_program(tmp_path / "bin/rocminfo", printing(ROCMINFO.replace("gfx90a", "gfx1100")))
    report = profilers()
    assert (report.status, report.state("rocprof-compute")) == (0, "-")
    assert "gfx1100" in report.rows["rocprof-compute"]["found"]
    for name in ("gfx908", "gfx942", "gfx950"):
        write_program(tmp_path / "bin/rocminfo", printing(ROCMINFO.replace("gfx90a", name)))
        assert profilers().state("rocprof-compute") == "MISSING"


def test_rocprof_compute_without_its_python_packages(profilers: Callable[[], Report], tmp_path: Path) -> None:
    requirements = tmp_path / "rocm/libexec/rocprofiler-compute/requirements.txt"
    requirements.parent.mkdir(parents=True)
    requirements.write_text("pandas\n")
    write_program(tmp_path / "bin/rocprof-compute", printing("ModuleNotFoundError: No module named 'pandas'", 1))
    row = profilers().rows["rocprof-compute"]
    assert (row["state"], row["mend"]) == ("MISSING", f"python3 -m pip install -r {requirements}")


def test_marker_library_that_cannot_be_loaded(checks: ModuleType, tmp_path: Path) -> None:
    """In a real child process: no machine without ROCm has the library, and one with it has the function."""
    answers = checks.in_child(importlib.import_module("test_profiling_tools").probe, "rocm")
    assert answers["roctx"] == "loads" or "librocprofiler-sdk-roctx.so" in answers["roctx"]["error"]


def test_gpu_profiler_that_sees_no_kernels_fails(
    profilers: Callable[[], Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("test_profiling_tools")
    answers = {"torch": torch_record(HIP), "profile": {"events": 5, "kernels": 0}, "roctx": {"error": "OSError: no"}}
    monkeypatch.setattr(module, "in_child", lambda *_: answers)
    report = profilers()
    assert report.status == 1
    assert report.state("torch.profiler") == report.state("librocprofiler-sdk-roctx.so") == "MISSING"


def test_wrong_track_is_one_line(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(VALIDATION)
    for script in SCRIPTS:
        with pytest.raises(SystemExit) as end:
            importlib.import_module(script).main(["--track", "tpu"])
        assert end.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


# The rest of the shared module


def test_versions_are_compared_by_number(checks: ModuleType) -> None:
    bounds = ((">=", "2.6"), ("<", "2.14"))
    for version in ("2.6", "2.6.0", "2.9.1+rocm6.4", "2.13.9", ""):
        assert checks.in_bounds(version, bounds), version
    for version in ("2.5.9", "2.14", "2.14.0a0+git1", "2.100", "1.13"):
        assert not checks.in_bounds(version, bounds), version
    assert checks.in_bounds("3.0.0", (("==", "3"),))


def test_the_requirements_files_can_be_read(checks: ModuleType, tmp_path: Path) -> None:
    names = [need.name for need in checks.read_requirements(ROOT / "requirements-dev.txt")]
    assert {"torch", "triton", "numpy", "pytest"} <= set(names)
    assert checks.missing_requirements(ROOT / "requirements.txt") == []
    file = tmp_path / "requirements.txt"
    file.write_text('no_such_package>=2  # why\npytest<1\nother; platform_system == "Plan9"\n')
    assert checks.missing_requirements(file) == ["no_such_package>=2", "pytest<1"]
    file.write_text("torch @ https://example.org/torch.whl\n")
    with pytest.raises(ValueError, match="cannot read the line"):
        checks.read_requirements(file)

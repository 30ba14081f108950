"""environment_setup.sh and the validation scripts: what they would install, and what they say of
odd machines.

The setup script runs in a copy of its folder, with a PATH of our own: a Python that sees a stand-in
for PyTorch and pip, or none, and whichever tools a test writes. Nothing is installed.
"""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT, words

VALIDATION = ROOT / "setup/validation_scripts"
BASE_PYTHON = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
VARIABLES = ("VIRTUAL_ENV", "PYTHONPATH", "ROCM_PATH", "HIP_VISIBLE_DEVICES")
ROCM_TOOLS = ("rocprofv3", "rocprof-sys-run", "rocprof-compute", "rocpd")
REST = ["numpy", "matplotlib>=3.8", "msgspec>=0.19"]
HIP = ("2.9.1+rocm6.4", "6.4.43484", None)
CPU = ("2.9.1", None, None)
BAD_TORCH = [  # a build, or the code of one that cannot be imported; the track; what is said of it
    (("2.5.1", None, None), "cpu", "2.5.1 is older than 2.6"),
    (CPU, "rocm", "CPU build, which the rocm track cannot use"),
    (HIP, "nvidia", "ROCm 6.4.43484 build, which the nvidia track cannot use"),
    ("raise OSError('libx.so: no \\x1b[31msuch object')", "cpu", "libx.so: no [31msuch object"),
]
NO_TORCH = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def link_coreutils(directory: Path) -> None:
    """What shell scripts need on PATH."""
    directory.mkdir(parents=True)
    for name in words("bash cat dirname head sort"):
        (directory / name).symlink_to(shutil.which(name))


def write_torch(directory: Path, build: tuple[str, str | None, str | None] | str) -> Path:
    """A stand-in for PyTorch that says which build it is, or has this code; its directory."""
    version, hip, cuda = CPU if isinstance(build, str) else build
    code = f"from . import version\n__version__ = {version!r}\n"
    (directory / "torch").mkdir(parents=True, exist_ok=True)
    (directory / "torch/__init__.py").write_text(build if isinstance(build, str) else code)
    (directory / "torch/version.py").write_text(f"hip = {hip!r}\ncuda = {cuda!r}\n")
    return directory


# --- environment_setup.sh


class Machine:
    """A place to run the setup script in: `bin` is all of PATH, `repository` has the script."""

    def __init__(self, path: Path):
        self.path = path
        self.bin = path / "bin"
        self.site = path / "site"
        self.repository = path / "repository"
        self.venv = self.repository / ".venv"
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "setup", self.repository / "setup", ignore=ignore)
        for name in ("requirements.txt", "requirements-dev.txt"):
            shutil.copy(ROOT / name, self.repository / name)
        link_coreutils(self.bin)

    def add_python(self, site: Path | None = None) -> None:
        """Put python3 on PATH: without packages but for those that come as with a site's module."""
        path = f"PYTHONPATH={shlex.quote(str(site))} " if site else ""
        write_program(self.bin / "python3", f'{path}exec {shlex.quote(str(BASE_PYTHON))} -S "$@"')

    def setup(self, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run environment_setup.sh."""
        kept = {k: v for k, v in os.environ.items() if k not in VARIABLES and "CONDA" not in k}
        ours = {"PATH": str(self.bin), "ROCM_PATH": str(self.path / "rocm")}
        ours |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
        command = [shutil.which("bash"), str(self.repository / "setup/environment_setup.sh"), *argv]
        options = {"env": {**kept, **ours, **variables}, "cwd": self.path, "timeout": 120}
        return subprocess.run(command, capture_output=True, text=True, **options)

    def refuses(self, text: str, *argv: str, status: int = 1, **variables: str) -> None:
        """It ends with one line on stderr that has this text, and makes no environment."""
        result = self.setup(*argv, **variables)
        assert result.returncode == status, result.stdout + result.stderr
        assert len(result.stderr.splitlines()) == 1 and text in result.stderr, result.stderr
        assert not (self.venv / "bin").exists()

    def commands(self, *argv: str) -> list[list[str]]:
        """What pip would be asked for, after an environment is made and before it is checked."""
        result = self.setup(*argv, "--dry-run")
        assert result.returncode == 0, result.stderr
        assert not self.venv.exists()
        lines = re.findall(r"^\+ (.*)", result.stdout, re.MULTILINE)
        made, *installed, checked = map(shlex.split, lines)
        assert made[1:3] == ["-m", "venv"] and made[-1] == str(self.venv)
        assert ("--system-site-packages" in made) == ("PyTorch: missing" not in result.stdout)
        assert Path(checked[1]).name == "test_environment.py"
        start = [str(self.venv / "bin/python"), "-m", "pip", "install"]
        assert all(command[:4] == start for command in installed)
        *packages, project = [command[4:] for command in installed]
        assert project == ["-e", str(self.repository), "--no-deps"], "the project comes last"
        return packages


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without Python, PyTorch or GPU."""
    return Machine(tmp_path / "a machine")


def test_the_tracks_take_pytorch_from_their_index(machine):
    machine.add_python()
    every = ["triton", *REST]
    assert machine.commands() == [[*every, "torch>=2.6"]]
    (developer,) = machine.commands("--dev")
    assert {*every, "torch>=2.6", "torch<2.14", "pytest>=8"} <= {*developer}
    write_program(machine.bin / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'")
    assert "Track: nvidia" in machine.setup("--dry-run").stdout
    write_program(machine.bin / "nvidia-smi", "echo 'Failed to initialize NVML'; exit 9")
    assert "Track: cpu" in machine.setup("--dry-run").stdout
    url = "https://example.org/whl"
    assert machine.commands("--index-url", url) == [["--index-url", url, "torch>=2.6"], every]
    version = machine.path / "rocm/.info/version"
    machine.refuses("no ROCm version", "--track", "rocm")
    version.parent.mkdir(parents=True)
    for installed, index in (("6.3.1", "6.3"), ("7.1.0", "7.1"), ("10.2.0", "7.2")):
        version.write_text(installed)
        torch, rest = machine.commands()  # finds ROCm, whose PyTorch brings its own Triton
        assert torch[1] == f"https://download.pytorch.org/whl/rocm{index}" and rest == REST


def test_cpu_track_takes_the_newest_cpu_build_of_the_index(machine):
    """Not the CUDA build, however new, and with --dev one that the tests run with."""
    versions = "2.15.0, 2.14.1+cpu, 2.14.1, 2.13.0+cpu, 2.9.1+cpu, 2.5.1+cpu"
    write_program(machine.site / "pip/__init__.py", "")
    (machine.site / "pip/__main__.py").write_text(f"print('Available versions: {versions}')")
    machine.add_python(machine.site)
    assert machine.commands()[0][-1] == "torch==2.14.1+cpu"
    assert machine.commands("--dev")[0][-1] == "torch==2.13.0+cpu"
    assert machine.commands("--track", "nvidia")[0][-1] == "torch>=2.6"


def test_pytorch_of_a_site_is_kept(machine):
    machine.add_python(write_torch(machine.site, HIP))
    assert machine.commands("--track", "rocm") == [["triton", *REST]]
    (machine.site / "triton.py").touch()  # a ROCm build's has the module's name, not the package's
    assert machine.commands("--track", "rocm") == [REST]
    assert not [name for name in machine.commands("--dev")[0] if name.startswith("torch")]


def test_an_active_environment_is_used_whatever_pips_settings_say(machine):
    """A stand-in for pip says what it was asked for."""
    venv = machine.path / "venv"
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", venv], check=True)
    write_program(machine.bin / "python3", f'exec {shlex.quote(str(venv))}/bin/python "$@"')
    (library,) = venv.glob("lib/*/site-packages")
    write_torch(library, CPU)
    settings = "', '".join(["PIP_TARGET", "PIP_USER"])
    (library / "pip.py").write_text(
        f"import os, sys\nprint('pip', *sys.argv[1:], *map(os.environ.get, ['{settings}']))\n"
        "sys.exit(int(os.environ.get('STATUS', '0')))"
    )
    check = machine.repository / "setup/validation_scripts/test_environment.py"
    check.write_text("import sys; print('Check:', *sys.argv[1:]); sys.exit(5)")
    result = machine.setup(PIP_TARGET="/elsewhere", PIP_USER="1")
    lines = [line for line in result.stdout.splitlines() if line.startswith("pip ")]
    assert lines == [
        f"pip install triton {' '.join(REST)} None 0",
        f"pip install -e {machine.repository} --no-deps None 0",
    ]
    assert (result.returncode, result.stdout.splitlines()[-1]) == (5, "Check: --track cpu")
    machine.refuses("pip failed", STATUS="1")
    machine.refuses("is in a virtual environment", "--venv", "another")


def test_what_is_wrong_or_missing_is_one_line_and_nothing_is_made(machine):
    python = machine.bin / "python3"
    for argv in ("--gpu", "now", "--track tpu", "--venv"):
        machine.refuses(words(argv)[-1], *words(argv), status=2)
    text = machine.setup("--help").stdout
    assert all(option in text for option in words("--track --venv --index-url --dev --dry-run"))
    machine.refuses("no Python 3.10 or newer")
    write_program(python, "exit 1")  # as an older one answers
    machine.refuses("no Python 3.10 or newer")
    write_program(python, f'case $2 in *ensurepip*) exit 1;; esac; exec {BASE_PYTHON} "$@"')
    machine.refuses("no venv module")
    for build, track, reason in BAD_TORCH:
        machine.add_python(write_torch(machine.site, build))
        machine.refuses(reason, "--track", track)
    machine.venv.mkdir()
    machine.refuses("is not a Python environment")


# --- the validation scripts


class Site:
    """A place to validate: PATH is only `path/bin`, ROCm is in `path/rocm`."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
        self.path, self.patch, self.capsys = path, patch, capsys
        patch.syspath_prepend(VALIDATION)
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        link_coreutils(path / "bin")
        patch.setenv("PATH", str(path / "bin"))
        self.checks: ModuleType = importlib.import_module("checks")
        patch.setattr(self.checks, "ROCM", path / "rocm")

    def states(self, script: str, track: str) -> dict[str, tuple[str, str]]:
        """The state of each row, with what it says; the last line and the status go with them."""
        fill = importlib.import_module(script).fill
        status = self.checks.validate("This", fill, "", ["--track", track])
        text = self.capsys.readouterr().out
        states = {}
        rows = re.findall(r"^(\S.*?) +(ok|MISSING|optional) +(.*\))$", text, re.MULTILINE)
        for what, state, found in rows:
            mend = re.search(rf"^  {re.escape(what)}:  (.+)$", text, re.MULTILINE)
            assert bool(mend) == (state != "ok")
            states[what] = (state, f"{found} {mend[1] if mend else ''}")
        missing = [what for what, (state, _) in states.items() if state == "MISSING"]
        assert status == bool(missing)
        assert re.search(r" check: (\w+).*\n$", text)[1] == ("FAIL" if missing else "PASS")
        return states


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Site:
    return Site(tmp_path, monkeypatch, capsys)


def test_this_machine_can_run_the_scripts(site):
    """With the real PyTorch, on the CPU."""
    states = site.states("test_environment", "cpu")
    assert "right on cpu" in states["training step"][1]
    assert {states[name][0] for name in ("torch", "numpy", "triton", "fusion_lab")} == {"ok"}
    assert "sees" in site.states("test_profiling_tools", "cpu")["torch.profiler"][1]
    oldest = f"torch>={site.checks.OLDEST_TORCH}"
    assert oldest in (ROOT / "requirements.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("build", "track", "reason"), [*BAD_TORCH, (NO_TORCH, "nvidia", "missing")]
)
def test_torch_that_cannot_be_used_is_a_row(site, build, track, reason):
    site.patch.setenv("PYTHONPATH", str(write_torch(site.path / "torch", build)))
    states = site.states("test_environment", track)
    state, text = states["torch"]
    assert state == "MISSING" and reason in text
    assert ("-m venv fresh" in text) == (build != NO_TORCH), "a PyTorch that is there stays"
    assert states["numpy"][0] == "ok", "the rest is still looked at"
    assert site.states("test_profiling_tools", track)["torch.profiler"][0] == "MISSING"


@pytest.fixture
def rocm(site: Site) -> Site:
    """A machine with an AMD GPU and all of ROCm, as far as files, tools and PyTorch tell."""
    for name in words("dev/kfd dev/dri/renderD128 rocm/.info/version"):
        (site.path / name).parent.mkdir(parents=True, exist_ok=True)
        (site.path / name).write_text("7.0.1")
    for name in ROCM_TOOLS:
        write_program(site.path / "bin" / name, "echo usage")
    write_program(site.path / "bin/rocminfo", "echo 'Name: AMD EPYC'; echo '  Name:   gfx1151'")
    site.patch.setattr(site.checks, "KFD", site.path / "dev/kfd")
    site.patch.setattr(site.checks.output_of, "__defaults__", (2,))
    site.patch.setattr("test_rocm_installation.DRI", site.path / "dev/dri")
    site.patch.setattr("test_profiling_tools.profile_matmul", lambda track: "sees 5 kernels")
    site.patch.setenv("PYTHONPATH", str(write_torch(site.path / "torch", HIP)))
    return site


def test_rocm_that_is_complete_passes_but_not_where_pytorch_sees_no_gpu(rocm):
    installation = rocm.states("test_rocm_installation", "rocm")
    assert {state for state, _ in installation.values()} == {"ok"}
    assert "1 x gfx1151" in installation["rocminfo"][1] and "7.0.1" in installation["ROCm"][1]
    tools = rocm.states("test_profiling_tools", "rocm")
    assert {state for state, _ in tools.values()} == {"ok"} and {*ROCM_TOOLS} <= {*tools}
    rocm.patch.setenv("HIP_VISIBLE_DEVICES", "-1")
    rocm.patch.setattr("torch.cuda.is_available", lambda: False)
    state, text = rocm.states("test_environment", "rocm")["GPU"]
    assert state == "MISSING" and "unset HIP_VISIBLE_DEVICES" in text


NEEDS = "rocm/libexec/rocprofiler-compute/requirements.txt"
FAILS = "printf '#!/bin/sh\\n%s\\nexit 1\\n' 'echo Permission denied' >"
ROCM_ROWS = [  # what is done to that machine, the row, what it says is found or mends it
    ("rm dev/kfd", "kfd", "sudo modprobe amdgpu"),
    (f"{FAILS} bin/rocminfo", "rocminfo", "denied"),
    ("printf '#!/bin/sh\\nexec /bin/sleep 60\\n' > bin/rocminfo", "rocminfo", "no answer within"),
    ("rm bin/rocprofv3", "rocprofv3", "install rocprofiler-sdk"),
    ("mkdir rocm/bin; mv bin/rocpd rocm/bin", "rocpd", "export PATH="),
    (f"install -D /dev/null {NEEDS}; {FAILS} bin/rocprof-compute", "rocprof-compute", NEEDS),
]


@pytest.mark.parametrize(("damage", "what", "text"), ROCM_ROWS)
def test_what_is_wrong_with_rocm_is_a_row(rocm, damage, what, text):
    command = ["/bin/bash", "-euc", damage]
    subprocess.run(command, cwd=rocm.path, env={"PATH": os.defpath}, check=True)
    script = "test_profiling_tools" if what in ROCM_TOOLS else "test_rocm_installation"
    states = rocm.states(script, "rocm")
    ((name, row),) = [(name, row) for name, row in states.items() if row[0] != "ok"]
    assert name.endswith(what) and text in row[1]
    assert len(states) > 3, "the rest is still looked at"

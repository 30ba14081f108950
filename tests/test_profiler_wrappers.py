"""The run_*.sh wrappers, and the exercises' scripts that call them, with stand-ins for ROCm's profilers.

The stand-ins (tests/standins) take the options of the real tools, refuse all others, and write files of the same
formats. Most tests profile a small script that notes its arguments, so that they take no longer than a few processes.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import ROOT, TINY, strict_json

STANDINS = ROOT / "tests" / "standins"
SYSTEM_PATH = "/usr/bin:/bin"
TOOLS = ("rocprofv3", "rocpd", "rocpd2csv", "rocprof-sys-run", "rocprof-compute", "rocminfo", "rocm-smi")
ROCPROFV3, SYS, COMPUTE = "run_rocprofv3.sh", "run_rocprof_sys.sh", "run_rocprof_compute.sh"
TOOL_OF = {ROCPROFV3: "rocprofv3", SYS: "rocprof-sys-run", COMPUTE: "rocprof-compute"}
FOLDER_OF = {ROCPROFV3: "rocprofv3_results_fused", SYS: "rocprof_sys_results", COMPUTE: "rocprof_compute_results"}
ADDED = ["--under-profiler", "--enable-rocm-profiling"]
STATS_HEADER = ["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev"]
FUSED, BASELINE = (6, 73), (8, 139)  # what the stand-ins report: distinct kernels and dispatches of one process
AWKWARD = ["two words", ";", "$(touch injected)", "`touch injected`", "it's", '"', "\\", "", "two\nlines", "*", "~"]

# Notes its arguments and leaves a result; fails, or waits for Ctrl-C, if asked to.
SCRIPT = """
import json, os, pathlib, sys, time
def value(name, default):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps(sys.argv[1:]) + "\\n")
if directory := value("--profile-dir", None):
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    name, steps = pathlib.Path(sys.argv[0]).stem, int(value("--num-steps", "1"))
    result = {group: {} for group in ("config", "training", "environment", "timing", "memory", "kernels", "loss")}
    result |= {"schema_version": 1, "script": name, "status": "ok", "timing": {"steps": steps}}
    result["config"] = {"seq_len": int(value("--seq-len", "64"))}
    result["training"] = {"num_steps": steps, "use_amp": "--use-amp" in sys.argv, "amp_dtype": "bfloat16"}
    result["environment"] = {"device": "cuda", "device_name": os.environ.get("DEVICE", "MI300A")}
    (directory / f"{name}_summary.json").write_text(json.dumps(result))
if "WAIT" in os.environ:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
sys.exit(int(os.environ.get("STATUS", "0")))
"""

every_wrapper = pytest.mark.parametrize("wrapper", TOOL_OF)
both_releases = pytest.mark.parametrize("rocm", ["6", "7"])


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    def succeeded(self) -> Done:
        assert self.status == 0, self.stderr
        return self

    def failed(self, *words: str, status: int | None = None, lines: int | None = None) -> Done:
        """It ended with an error whose last line has all of the words, and is no message of Python or bash."""
        assert self.status != 0 if status is None else self.status == status, (self.status, self.stderr)
        found = self.stderr.splitlines()
        assert found, self.stdout
        assert lines in (None, len(found)), self.stderr
        assert [word for word in words if word not in found[-1]] == [], self.stderr
        assert "Traceback" not in self.stderr
        assert ".sh: line " not in found[-1], self.stderr
        return self


@dataclass
class Bench:
    """A directory to work in, a PATH with chosen tools on it, and what these were called with."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work, self.bin = self.directory / "work", self.directory / "bin"
        self.script = self.directory / "tiny_note_v2.py"

    def install(self, *tools: str, name: str | None = None) -> None:
        """Have these tools, and no others, on PATH."""
        for old in self.bin.iterdir():
            if old.name != "python3":
                old.unlink()
        for tool in tools:
            (self.bin / (name or tool)).symlink_to(STANDINS / tool)

    def start(self, command: list[str], cwd: Path | None = None, **environment: str) -> subprocess.Popen:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**self.environment, **environment}
        # A shell that starts the tests in the background has them, and so these, ignore SIGINT; a terminal does not.
        unignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        options = {"cwd": cwd or self.work, "env": environment, "start_new_session": True, "preexec_fn": unignore}
        return subprocess.Popen(command, **options, **pipes)

    def call(self, command: list[str], cwd: Path | None = None, **environment: str) -> Done:
        process = self.start(command, cwd, **environment)
        stdout, stderr = process.communicate(timeout=120)
        return Done(process.returncode, stdout, stderr)

    def command(self, wrapper: str, *argv: str) -> list[str]:
        """A wrapper's command line for the script that notes its arguments."""
        return [str(ROOT / wrapper), "--script", str(self.script), *argv]

    def run(self, wrapper: str, *argv: str, cwd: Path | None = None, **environment: str) -> Done:
        return self.call(self.command(wrapper, *argv), cwd, **environment)

    def tool(self, name: str, *argv: str, **environment: str) -> Done:
        """Call a stand-in itself."""
        return self.call([str(self.bin / name), *argv], **environment)

    def calls(self, tool: str) -> list[dict]:
        """The calls of a tool so far: argv, application."""
        log = self.directory / "log"
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [call for call in calls if call["tool"] == tool]

    def options(self, tool: str) -> str:
        """The options of the last call of a tool, without the application and the output directory."""
        argv = self.calls(tool)[-1]["argv"]
        argv = argv[: argv.index("--")]
        place = argv.index("-d" if "-d" in argv else "-o")
        return " ".join(argv[:place] + argv[place + 2 :])

    def received(self) -> list[list[str]]:
        """The arguments of every run of the script so far."""
        record = self.directory / "record"
        return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []

    def results(self, wrapper: str = ROCPROFV3) -> Path:
        return self.work / FOLDER_OF[wrapper]

    def nothing_happened(self) -> bool:
        """The script did not run, and no file was made."""
        return not self.received() and not list(self.work.iterdir())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """All stand-ins on a PATH that has nothing else but python3 and the system's own programs."""
    for name in ("work", "bin", "home"):
        (tmp_path / name).mkdir()
    python = tmp_path / "bin" / "python3"  # a link to it would lose the virtual environment
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{SYSTEM_PATH}",
        "HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "STANDIN_LOG": str(tmp_path / "log"),
        "RECORD": str(tmp_path / "record"),
    }
    bench = Bench(tmp_path, environment)
    bench.script.write_text(SCRIPT)
    bench.install(*TOOLS)
    return bench


def read_csv(path: Path) -> list[dict[str, str]]:
    """Its rows."""
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def files(directory: Path) -> dict[str, bytes]:
    """All files below a directory with their content."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def unchanged(before: dict[str, bytes], directory: Path) -> bool:
    """All of these files are still there as they were; there may be more."""
    return before.items() <= files(directory).items()


def shell_words(line: str) -> list[str]:
    """The words that bash makes of a printed command."""
    output = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    return output.stdout.split("\0")[:-1]


def skip_if_installed(*tools: str) -> None:
    """A test of a missing tool means nothing where the system has it."""
    if any(shutil.which(tool, path=SYSTEM_PATH) for tool in tools):
        pytest.skip(f"this machine has ROCm's tools in {SYSTEM_PATH}")


# --- the stand-ins themselves: they must be as strict as the tools are


@pytest.mark.parametrize(
    "command",
    [
        "rocprofv3 --kernel-trace --metrics SQ_WAVES -- touch ran",
        "rocprofv3 --stats -- touch ran",
        "rocprofv3 --kernel-trace --output-format xml -- touch ran",
        "rocprofv3 --kernel-tra -- touch ran",
        "rocprofv3 --kernel-trace touch ran",
        "rocprof-sys-run --perfetto -- touch ran",
        "rocprof-sys-run -P -F -- touch ran",
        "rocprof-sys-run -T touch ran",
        "rocprof-compute profile -- touch ran",
        "rocprof-compute profile -n a --roof-only --no-roof -- touch ran",
        "rocprof-compute profile -n a touch ran",
        "rocprof-compute analyze -p x -n name",
    ],
)
def test_standin_refuses_what_the_tool_refuses(bench, command):
    bench.tool(*command.split()).failed(status=2)
    assert not list(bench.work.iterdir())


# --- what all three wrappers do

OWN_OPTIONS = {
    ROCPROFV3: "--mode --hsa --compare --from-db --counters",
    SYS: "--sample",
    COMPUTE: "--roof-only --mode --dispatch --list-stats",
    "run_all_profilers.sh": "--enable-rocm-tools --profile-dir",
}


@pytest.mark.parametrize("wrapper", OWN_OPTIONS)
def test_help_names_every_option(bench, wrapper):
    bench.install()
    text = bench.run(wrapper, "--help").succeeded().stdout
    common = ["--script", "--help", *(["--dry-run", "--output-dir", "--result-dir"] if wrapper in TOOL_OF else [])]
    assert [option for option in [*common, *OWN_OPTIONS[wrapper].split()] if option not in text] == []
    assert bench.nothing_happened()


@every_wrapper
def test_arguments_arrive_unchanged_and_results_go_to_the_result_folder(bench, wrapper):
    argv = ["--note", *AWKWARD, "--num-steps", "3", "--warmup-steps", "0"]
    bench.run(wrapper, *argv).succeeded()
    for received in bench.received():
        *added, folder = received[: -len(argv)]
        assert received[-len(argv) :] == argv
        assert sorted(added) == sorted(["--profile-dir", *ADDED])
        assert bench.results(wrapper) in (bench.work / folder, *(bench.work / folder).parents)
    assert not list(bench.directory.rglob("injected"))


@every_wrapper
@pytest.mark.parametrize("given", [["--profile-dir", "my dir"], ["--profile-dir=my dir"]], ids=["two words", "one"])
def test_a_profile_dir_of_the_user_stays_the_only_one(bench, wrapper, given):
    bench.run(wrapper, *given).succeeded()
    for received in bench.received():
        assert [word for word in received if word.startswith("--profile-dir")] == given[:1]
        assert set(given) <= set(received)


@pytest.mark.parametrize(
    "words",
    [
        *TOOL_OF,
        "run_rocprofv3.sh --mode trace",
        "run_rocprofv3.sh --mode trace --hsa",
        "run_rocprofv3.sh --mode kernels",
        "run_rocprofv3.sh --mode counters",
        "run_rocprofv3.sh --compare",
        "run_rocprof_sys.sh --sample",
        "run_rocprof_compute.sh --roof-only",
    ],
)
def test_dry_run_prints_the_commands_that_are_then_run(bench, words):
    wrapper, *options = words.split()
    options += ["--output-dir", "my results", "--note", *AWKWARD]
    bench.install()
    dry = bench.run(wrapper, "--dry-run", *options).succeeded()
    assert bench.nothing_happened()
    bench.install(*TOOLS)
    bench.run(wrapper, *options).succeeded()
    commands = [shell_words(line) for line in dry.stdout.splitlines() if line]
    assert commands == [[TOOL_OF[wrapper], *call["argv"]] for call in bench.calls(TOOL_OF[wrapper])]
    assert len(commands) == 1 + ("--compare" in options)


@every_wrapper
def test_missing_tool_is_one_line(bench, wrapper):
    skip_if_installed(TOOL_OF[wrapper])
    bench.install("rocminfo")
    bench.run(wrapper).failed(TOOL_OF[wrapper], "run_pytorch_profiler.py", status=4, lines=1)
    assert bench.nothing_happened()


@every_wrapper
def test_output_dir_from_another_working_directory_with_another_python(bench, wrapper):
    parent, home = bench.directory / "a place; with $(odd) name", bench.directory / "home"
    other = shutil.copy(bench.bin / "python3", bench.directory / "my python")
    bench.run(wrapper, "--output-dir", str(parent), cwd=home, PYTHON=str(other)).succeeded()
    assert bench.calls(TOOL_OF[wrapper])[0]["application"][0] == str(other)
    assert [path.name for path in parent.iterdir()] == [FOLDER_OF[wrapper]]
    assert files(parent)
    assert not [*bench.work.iterdir(), *home.iterdir()]


COMMON_MISTAKES = ["--script missing.py", "--script ", "--script", "--output-dir ", "--result-dir /"]
COMMON_MISTAKES += ["--output-dir file/below"]
OWN_MISTAKES = [
    "run_rocprofv3.sh --mode metrics",
    "run_rocprofv3.sh --mode",
    "run_rocprofv3.sh --from-db",
    "run_rocprofv3.sh --from-db missing.db",
    "run_rocprofv3.sh --mode counters --counters",
    "run_rocprofv3.sh --hsa",
    "run_rocprofv3.sh --compare --result-dir out",
    "run_rocprofv3.sh --compare --mode trace",
    "run_rocprofv3.sh --compare --disable-all-fusion",
    "run_rocprofv3.sh --compare --enable-flash-attention",
    "run_rocprofv3.sh --compare=yes",
    "run_rocprof_compute.sh --mode roofline",
    "run_rocprof_compute.sh --mode analyze --dispatch",
    "run_rocprof_compute.sh --dispatch 7",
    "run_rocprof_compute.sh --mode analyze --seq-len 64",
    "run_all_profilers.sh --script missing.py",
    "run_all_profilers.sh --profile-dir",
    "run_all_profilers.sh --output-dir out",
    "run_all_profilers.sh --profile-dir file/below",
]


MISTAKES = [f"{wrapper} {words}" for wrapper in TOOL_OF for words in COMMON_MISTAKES] + OWN_MISTAKES


@pytest.mark.parametrize("words", MISTAKES)
def test_a_bad_option_is_one_line(bench, words):
    wrapper, *argv = words.split(" ")
    (bench.work / "file").write_text("not a directory")
    option = [word for word in argv if word.startswith("--")][-1].partition("=")[0]
    if option == "--result-dir" and argv[-1] == "/":
        argv.append("--dry-run")  # lest it writes there
    expected = "file/below" if "file/below" in argv else option
    bench.run(wrapper, *argv).failed(expected, status=2, lines=1)
    assert not bench.received()
    assert files(bench.work) == {"file": b"not a directory"}


@pytest.mark.parametrize("option", ["", "run_rocprofv3.sh --mode trace", "run_rocprof_compute.sh --mode profile"])
def test_an_option_and_its_value_may_be_one_word(bench, option):
    wrapper, *own = option.split() or [SYS]
    argv = ["--script", "tiny_llama_v2.py", "--output-dir", "out", *own]
    joined = [f"{name}={value}" for name, value in zip(argv[::2], argv[1::2], strict=True)]
    dry = [bench.run(wrapper, "--dry-run", *words, "--seq-len=8").succeeded().stdout for words in (argv, joined)]
    assert dry[0] == dry[1]
    assert "tiny_llama_v2.py" in dry[0]
    assert "--seq-len=8" in dry[0]


# --- failures: one line, and what was there before stays


@pytest.mark.parametrize(
    ("words", "modes"),
    [
        ("run_rocprofv3.sh", "status killed nothing truncated truncated-line noformat"),
        ("run_rocprofv3.sh --mode kernels", "status nothing truncated noformat"),
        ("run_rocprofv3.sh --mode trace", "status nothing truncated"),
        ("run_rocprofv3.sh --mode counters", "status nothing truncated noformat"),
        ("run_rocprof_sys.sh", "status killed nothing truncated"),
        ("run_rocprof_compute.sh", "status killed nothing truncated noformat"),
        ("run_rocprof_compute.sh --roof-only", "noplots"),
    ],
)
def test_a_failing_tool_leaves_earlier_results(bench, words, modes):
    wrapper, *options = words.split()
    before = None
    for mode in (modes.split()[-1], "", *modes.split()):  # the first one with no earlier results
        result = bench.run(wrapper, *options, STANDIN_FAIL=mode)
        if not mode:
            before = files(result.succeeded() and bench.work)
            continue
        line = result.failed().stderr.splitlines()[-1]
        assert TOOL_OF[wrapper] in line or FOLDER_OF[wrapper] in line
        for word in line.split():
            assert FOLDER_OF[wrapper] not in word or (bench.work / word.rstrip(":,;")).exists(), line
        assert "Dispatches:" not in result.stdout
        if before:
            assert unchanged(before, bench.work), mode
        else:
            assert not [*bench.work.rglob("stats.csv"), *bench.work.rglob("roofline_analysis.csv")]
            shutil.rmtree(bench.results(wrapper), ignore_errors=True)


@every_wrapper
def test_a_failing_script_is_a_failure(bench, wrapper):
    result = bench.run(wrapper, STATUS="3").failed(status=3)
    assert "Dispatches:" not in result.stdout
    assert not [*bench.work.rglob("stats.csv"), *bench.work.rglob("roofline_analysis.csv")]


def interrupt(process: subprocess.Popen, bench: Bench, runs: int) -> str:
    """Ctrl-C once the script runs, of which there were `runs` runs before; returns what stderr got."""
    deadline = time.monotonic() + 30
    while len(bench.received()) == runs and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)  # until the script sleeps
    os.killpg(process.pid, signal.SIGINT)
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode in (130, -signal.SIGINT), stderr
    return stderr


@every_wrapper
def test_ctrl_c_leaves_earlier_results(bench, wrapper):
    bench.run(wrapper).succeeded()
    before = files(bench.work)
    interrupt(bench.start(bench.command(wrapper), WAIT="1"), bench, runs=len(bench.received()))
    assert unchanged(before, bench.work)
    bench.run(wrapper).succeeded()


@every_wrapper
def test_a_result_folder_must_be_new(bench, wrapper):
    """Else a directory of the user would be replaced."""
    bench.run(wrapper, "--result-dir", "a/new one/").succeeded()
    before = files(bench.work)
    if wrapper != COMPUTE:  # whose profiles have folders of their own in it
        bench.run(wrapper, "--result-dir", "a/new one").failed("a/new one", "exists", status=2, lines=1)
    assert {Path(name).parts[:2] for name in before} == {("a", "new one")}
    assert files(bench.work) == before


# --- run_rocprofv3.sh


def reduction(before: float, after: float, per: str = "per step") -> str:
    """What the wrapper prints of the comparison."""
    return f"- Kernels {per}: {before:.10g} -> {after:.10g}\n- Kernel reduction: {100 * (1 - after / before):.1f} %\n"


@both_releases
def test_hotspots(bench, rocm):
    result = bench.run(ROCPROFV3, "--batch-size", "4", STANDIN_ROCM=rocm).succeeded()
    expected = "--kernel-trace --stats --marker-trace --output-format csv --selected-regions -o %pid%"
    assert bench.options("rocprofv3") == expected
    rows = read_csv(bench.results() / "stats.csv")
    assert list(rows[0]) == STATS_HEADER
    assert (len(rows), sum(int(row["Calls"]) for row in rows)) == FUSED
    assert sum(float(row["Percentage"]) for row in rows) == pytest.approx(100, abs=0.1)
    totals = [int(row["TotalDurationNs"]) for row in rows]
    assert totals == sorted(totals, reverse=True)
    assert any(row["Name"].startswith("void at::native::vectorized_elementwise_kernel<4, at::") for row in rows)
    assert {f"Distinct kernels: {FUSED[0]}", f"Dispatches: {FUSED[1]}"} <= set(result.stdout.splitlines())
    assert "Cijk_Ailk_Bljk" in result.stdout
    assert "Kernel reduction" not in result.stdout  # there is no other side yet


def test_compare_runs_both_sides(bench):
    bench.run(ROCPROFV3, "--seq-len", "8", STANDIN_PROCESSES="2").succeeded()  # an earlier run, which is replaced
    result = bench.run(ROCPROFV3, "--compare", "--note", "a b").succeeded()
    sides = [[word for word in words if "all-fusion" in word] for words in bench.received()[1:]]
    assert sides == [["--disable-all-fusion"], ["--enable-all-fusion"]]
    assert all(words[-2:] == ["--note", "a b"] for words in bench.received()[1:])
    rows = read_csv(bench.work / "rocprofv3_results_baseline" / "stats.csv")
    assert (len(rows), sum(int(row["Calls"]) for row in rows)) == BASELINE
    assert any('masked_fill_kernel("float")' in row["Name"] for row in rows)
    assert result.stdout.count("Kernel reduction") == 1
    assert reduction(BASELINE[1], FUSED[1]) in result.stdout
    assert "differs" not in result.stdout + result.stderr


def test_the_comparison_is_per_step_and_names_what_differs(bench):
    bench.run(ROCPROFV3, "--disable-all-fusion", "--num-steps", "2", DEVICE="MI210").succeeded()
    result = bench.run(ROCPROFV3, "--num-steps", "5", "--seq-len", "8", "--use-amp").succeeded()
    assert reduction(BASELINE[1] / 2, FUSED[1] / 5) in result.stdout
    top = result.stdout.partition("- Kernels per step")[0]
    assert "- baseline: `rocprofv3_results_baseline` (tiny_note_v2, 2 steps" in top
    assert "- note: seq_len differs: 64 for baseline; 8 for fused" in top
    assert "- note: precision differs: float32 for" in top
    assert "- note: device_name differs" in top
    assert "steps differs" not in result.stdout


def test_totals_of_unknown_steps_are_said_to_be_totals(bench):
    bench.run(ROCPROFV3, "--disable-all-fusion").succeeded()
    result = bench.run(ROCPROFV3, "--profile-dir", "elsewhere").succeeded()
    assert reduction(BASELINE[1], FUSED[1], "in all") in result.stdout
    assert "- note: the number of steps is not known" in result.stdout
    assert "sizes and steps of fused are not checked" in result.stdout


def test_different_models_are_not_compared(bench):
    bench.run(ROCPROFV3, "--disable-all-fusion").succeeded()
    baseline = files(bench.work)
    bench.script = bench.script.rename(bench.directory / "tiny_other_v2.py")
    result = bench.run(ROCPROFV3, "--enable-all-fusion")
    result.failed("baseline is a run of tiny_note, fused of tiny_other", status=2, lines=1)
    assert f"Dispatches: {FUSED[1]}" in result.stdout.splitlines()
    assert "Kernel reduction" not in result.stdout
    assert (bench.results() / "hotspots" / "tiny_other_v2_summary.json").exists()
    assert unchanged(baseline, bench.work)
    bench.run(ROCPROFV3, "--compare").succeeded()  # replaces both sides


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("--enable-flash-attention", "fused"),
        ("--enable-torch-compile --enable-cuda-graph", "fused"),
        ("--disable-all-fusion --disable-flash-attention", "baseline"),
        ("--disable-all-fusion --enable-torch-compile --enable-cuda-graph --enable-memory-profiling", "baseline"),
        ("--disable-all-fusion --enable-flash-attention", "partial"),
        ("--disable-qkv-fusion --enable-cuda-graph", "partial"),
        ("--enable-a --disable-triton-b", "partial"),
    ],
)
def test_sides_have_folders_and_a_part_of_the_fusions_has_its_own(bench, words, folder):
    bench.run(ROCPROFV3, *words.split()).succeeded()
    assert [path.name for path in bench.work.iterdir()] == [f"rocprofv3_results_{folder}"]
    if folder == "partial":  # is compared with nothing
        bench.run(ROCPROFV3, "--compare").succeeded()
        assert "Kernel reduction" not in bench.run(ROCPROFV3, *words.split()).succeeded().stdout


def test_statistics_are_merged_over_processes(bench):
    bench.run(ROCPROFV3).succeeded()
    alone = read_csv(bench.results() / "stats.csv")
    result = bench.run(ROCPROFV3, STANDIN_PROCESSES="3").succeeded()
    merged = read_csv(bench.results() / "stats.csv")
    assert {f"Distinct kernels: {FUSED[0]}", f"Dispatches: {3 * FUSED[1]}"} <= set(result.stdout.splitlines())
    for one, three in zip(alone, merged, strict=True):
        assert (three["Name"], three["MinNs"], three["MaxNs"]) == (one["Name"], one["MinNs"], one["MaxNs"])
        for name, factor in {"Calls": 3, "TotalDurationNs": 3, "AverageNs": 1}.items():
            assert float(three[name]) == pytest.approx(factor * float(one[name]))
        assert float(three["Percentage"]) == pytest.approx(float(one["Percentage"]), abs=0.01)


@pytest.mark.parametrize(("rocm", "suffix"), [("6", "_kernel_trace.csv"), ("7", "_results.db")])
def test_kernels_in_the_format_of_the_release(bench, rocm, suffix):
    result = bench.run(ROCPROFV3, "--mode", "kernels", STANDIN_ROCM=rocm, STANDIN_PROCESSES="2").succeeded()
    assert bench.options("rocprofv3") == "--kernel-trace --stats --marker-trace --selected-regions -o %pid%"
    assert f"Dispatches: {2 * FUSED[1]}" in result.stdout.splitlines()
    assert len(list((bench.results() / "kernels").glob(f"*{suffix}"))) == 2


def test_trace(bench):
    result = bench.run(ROCPROFV3, "--mode", "trace").succeeded()
    assert bench.options("rocprofv3") == "--runtime-trace --output-format pftrace --selected-regions -o %pid%"
    (trace,) = (bench.results() / "trace").glob("*.pftrace")
    assert f"rocprofv3_results_fused/trace/{trace.name}" in result.stdout
    assert "ui.perfetto.dev" in result.stdout


@both_releases
def test_counters(bench, rocm):
    argv = ["--mode", "counters", "--counters", "SQ_WAVES GRBM_COUNT"]
    result = bench.run(ROCPROFV3, *argv, STANDIN_ROCM=rocm).succeeded()
    expected = "--pmc SQ_WAVES GRBM_COUNT --marker-trace --output-format csv --selected-regions -o %pid%"
    assert bench.options("rocprofv3") == expected
    (table,) = (bench.results() / "counters").glob("*_counter_collection.csv")
    assert f"rocprofv3_results_fused/counters/{table.name}" in result.stdout
    assert {row["Counter_Name"] for row in read_csv(table)} == {"SQ_WAVES", "GRBM_COUNT"}
    bench.run(ROCPROFV3, "--mode", "counters", "--counters", "NO_SUCH").failed("rocprofv3")


def make_database(bench: Bench, **environment: str) -> str:
    """A database as rocprofv3 of ROCm 7 writes it by default."""
    options = ["--kernel-trace", "-d", "db dir", "-o", "run", "--", "true"]
    bench.tool("rocprofv3", *options, **environment).succeeded()
    return str(bench.work / "db dir" / "run_results.db")


def test_from_database_with_and_without_rocpd(bench):
    skip_if_installed("rocpd")
    database = make_database(bench)
    found = []
    for tools in (["rocpd"], []):
        bench.install(*tools)
        result = bench.run(ROCPROFV3, "--from-db", database).succeeded()
        assert f"Dispatches: {FUSED[1]}" in result.stdout.splitlines()
        found.append(read_csv(bench.results() / "stats.csv"))
        shutil.rmtree(bench.results())
    assert found[0] == found[1]
    assert len(bench.calls("rocpd")) == 1
    assert not bench.received()  # a database is read without running anything
    bench.install(*TOOLS)
    bench.run(ROCPROFV3).succeeded()
    traced = read_csv(bench.results() / "stats.csv")
    for column in ("Name", "Calls", "TotalDurationNs", "MinNs", "MaxNs"):
        assert [row[column] for row in found[0]] == [row[column] for row in traced]


@pytest.mark.parametrize("tools", [["rocpd"], []], ids=["rocpd", "sqlite"])
def test_from_a_damaged_database(bench, tools):
    database = make_database(bench)
    bench.run(ROCPROFV3, "--from-db", database).succeeded()
    before = files(bench.results())
    for mode in ("truncated", "noformat"):
        bench.install("rocprofv3")
        make_database(bench, STANDIN_FAIL=mode)
        bench.install(*tools)
        bench.run(ROCPROFV3, "--from-db", database).failed("run_results.db")
        assert files(bench.results()) == before
    Path(database).write_text("hello")
    bench.run(ROCPROFV3, "--from-db", database).failed("run_results.db")


@pytest.mark.parametrize("mode", ["status", "killed", "nothing", "truncated"])
def test_a_failing_rocpd(bench, mode):
    database = make_database(bench)
    bench.run(ROCPROFV3, "--from-db", database, STANDIN_FAIL=mode).failed("run_results.db")
    assert not list(bench.work.rglob("stats.csv"))


# --- run_rocprof_sys.sh


@pytest.mark.parametrize("time_output", ["ON", "OFF"])
def test_rocprof_sys(bench, time_output):
    result = bench.run(SYS, "--seq-len", "64", ROCPROFSYS_TIME_OUTPUT=time_output).succeeded()
    assert bench.options("rocprof-sys-run") == "--trace --profile"
    (trace,) = bench.results(SYS).rglob("*.proto")
    assert str(trace.relative_to(bench.work)) in result.stdout
    assert "ui.perfetto.dev" in result.stdout
    assert list(bench.results(SYS).rglob("wall_clock-*.txt"))


def test_rocprof_sys_sampling_and_by_its_older_name(bench):
    bench.install("rocprof-sys-run", name="omnitrace-run")
    bench.run(SYS, "--sample", "--seq-len", "64").succeeded()
    assert "--sample" in bench.options("omnitrace-run")
    assert "--sample" not in bench.received()[0]
    assert list(bench.results(SYS).rglob("sampling_wall_clock-*.txt"))


# --- run_rocprof_compute.sh


def test_rocprof_compute(bench):
    result = bench.run(COMPUTE).succeeded()
    assert bench.calls("rocprof-compute")[0]["argv"][0] == "profile"
    for received in bench.received():  # several runs, so few steps unless told otherwise
        assert received[-4:] == ["--num-steps", "2", "--warmup-steps", "1"]
    rows = read_csv(bench.results(COMPUTE) / "roofline_analysis.csv")
    assert list(rows[0]) == ["Dispatch_ID", "Category", "TimeNs", "Kernel_Name"]
    assert {int(row["Dispatch_ID"]) for row in rows} == set(range(FUSED[1]))
    assert all(int(row["TimeNs"]) > 0 for row in rows)
    assert "roofline_analysis.csv" in result.stdout
    for row in rows:
        assert ("gemm" in row["Category"].lower()) == row["Kernel_Name"].startswith("Cijk")
    bench.run(COMPUTE, "--num-steps=9").succeeded()
    assert [word for word in bench.received()[-1] if word.startswith("--num-steps")] == ["--num-steps=9"]


def test_roof_only(bench):
    result = bench.run(COMPUTE, "--roof-only", "--batch-size", "4").succeeded()
    (call,) = bench.calls("rocprof-compute")
    assert "--roof-only" in call["argv"]
    assert "--roof-only" not in call["application"]
    assert len(read_csv(bench.results(COMPUTE) / "roofline_analysis.csv")) == FUSED[1]
    plots = list(bench.results(COMPUTE).rglob("empirRoof_*.pdf"))
    assert plots
    assert all(str(plot.relative_to(bench.work)) in result.stdout for plot in plots)


def test_analyze_works_on_the_last_profile(bench):
    bench.run(COMPUTE).succeeded()
    rows = read_csv(bench.results(COMPUTE) / "roofline_analysis.csv")
    before = files(bench.work)
    argv = ["--mode", "analyze", "--dispatch", next(r["Dispatch_ID"] for r in rows if "attn_fwd" in r["Kernel_Name"])]
    dry = bench.run(COMPUTE, "--dry-run", *argv).succeeded()
    result = bench.run(COMPUTE, *argv).succeeded()
    assert "attn_fwd.kd" in result.stdout
    assert "VALU instructions" in result.stdout
    call = bench.calls("rocprof-compute")[-1]
    assert [call["argv"][0], *call["argv"][-2:]] == ["analyze", *argv[-2:]]
    assert shell_words(dry.stdout)[1:] == call["argv"]
    assert "Speed-of-Light" in bench.run(COMPUTE, "--mode", "analyze").succeeded().stdout
    stats = bench.run(COMPUTE, "--list-stats").succeeded()
    assert "Dispatch List" in stats.stdout
    assert "Speed-of-Light" not in stats.stdout
    for unknown in ("99999", "seven"):
        result = bench.run(COMPUTE, "--mode", "analyze", "--dispatch", unknown).failed("rocprof-compute")
        assert unknown in result.stderr
    assert len(bench.received()) == 2  # nothing ran again
    assert files(bench.work) == before


@pytest.mark.parametrize("argv", [["--mode", "analyze", "--dispatch", "1"], ["--list-stats"]])
def test_analyze_without_a_profile(bench, argv):
    bench.run(COMPUTE, *argv).failed("rocprof_compute_results", status=2, lines=1)
    assert bench.nothing_happened()


@pytest.mark.parametrize("gpu", ["gfx1030", "gfx1201", "gfx908", "gfx950", "gfx1036,gfx942"])
def test_consumer_gpus_are_refused_but_not_beside_another_one(bench, gpu):
    result = bench.run(COMPUTE, STANDIN_GPU=gpu)
    if "gfx9" in gpu:
        result.succeeded()
    else:
        result.failed(gpu, status=4, lines=1)
        assert bench.nothing_happened()


def test_rocprof_compute_without_rocminfo(bench):
    bench.install("rocprof-compute")
    bench.run(COMPUTE).succeeded()
    bench.run(COMPUTE, STANDIN_GPU="gfx1100").failed("rocprof-compute")


# --- exercises/tiny_llama_v4/get_*.sh

# Of each script: tool, result folder, options, a file that it leaves there, and the commands it says to type next.
GET = {
    "get_trace.sh": ("rocprofv3", "traces/trace", "--sys-trace", "*_results.pftrace", []),
    "get_counters.sh": (
        *("rocprofv3", "counters/counter", "--kernel-trace", "*_results.db"),
        ["rocpd summary", "rocpd2csv -i", "rocpd convert"],
    ),
    "get_hotspots.sh": ("rocprofv3", "hotspots/hotspot", "--kernel-trace --stats", "stats.csv", []),
    "get_rocprof_compute.sh": (
        *("rocprof-compute", "rocprof_compute/profile", "profile"),
        *("workloads/tiny_llama_v4_fused/rocprof/pmc_perf.csv", ["rocprof-compute analyze"]),
    ),
    "get_rocprof_sys.sh": (
        *("rocprof-sys-run", "rocprof_sys/profile", "--trace --sample", "*/perfetto-trace-*.proto", []),
    ),
}


@pytest.fixture
def sheet(bench) -> Path:
    """The folder of the scripts, in a copy where tiny_llama_v4.py is the script that notes its arguments."""
    tree = bench.directory / "a copy"
    for path in [*ROOT.glob("run_*.sh"), *ROOT.glob("profiling/*.*"), *ROOT.glob("exercises/tiny_llama_v4/*.sh")]:
        place = tree / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    shutil.copy(bench.script, tree / "tiny_llama_v4.py")
    return tree / "exercises" / "tiny_llama_v4"


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "by path"])
@pytest.mark.parametrize("script", GET)
def test_get_scripts(bench, sheet, script, inside):
    tool, folder, options, file, commands = GET[script]
    cwd = sheet if inside else None
    argv = ["--mode", "benchmark", "--num-steps", "3", "two words", "*"]  # --mode is an option of the wrappers, too
    result = bench.call([f"./{script}" if inside else str(sheet / script), *argv], cwd).succeeded()
    assert set(options.split()) <= set(bench.calls(tool)[0]["argv"])
    assert all(received[-len(argv) :] == argv for received in bench.received())
    (results,) = sheet.glob(f"{folder}_*")
    assert re.fullmatch(r"\w+_\d{8}_\d{6}", results.name)
    assert list(results.glob(file))
    assert not list(bench.work.iterdir())
    # What it says to do next can be typed.
    typed = [line for line in result.stdout.splitlines() if re.match("rocpd|rocprof-compute analyze", line)]
    assert [" ".join(line.split()[:2]) for line in typed] == commands
    for line in typed:
        name, *words = [re.sub("^N$", "1", word) for word in shell_words(line)]
        assert bench.call([str(bench.bin / name), *words], cwd).succeeded().stderr == ""
    assert typed or "ui.perfetto.dev" in result.stdout or "Next:" in result.stdout


@pytest.mark.parametrize("script", GET)
def test_get_scripts_that_fail(bench, sheet, script):
    tool, folder, *_ = GET[script]
    result = bench.call([f"./{script}"], sheet, STANDIN_FAIL="status").failed(tool)
    assert not re.search("Next|next|Open with|Every launch", result.stdout)
    assert [path for path in (sheet / folder).parent.rglob("*.failed") if path.is_dir()]
    shutil.rmtree((sheet / folder).parent)
    bench.install()
    if not shutil.which(tool, path=SYSTEM_PATH):
        bench.call([f"./{script}"], sheet).failed(tool, status=4, lines=1)
    dry = bench.call([f"./{script}", "--dry-run", "--seq-len", "8"], sheet).succeeded()
    assert shell_words(dry.stdout)[-2:] == ["--seq-len", "8"]
    assert "--dry-run" in bench.call([f"./{script}", "--help"], sheet).succeeded().stdout
    assert not (sheet / folder).parent.exists()


def test_ctrl_c_leaves_what_a_get_script_has_written(bench, sheet):
    stderr = interrupt(bench.start(["./get_trace.sh"], sheet, WAIT="1"), bench, runs=0)
    (results,) = sheet.glob("traces/*")
    assert results.name.endswith(".failed")
    assert results.name in stderr
    assert (results / "tiny_llama_v4_summary.json").exists()


# --- run_all_profilers.sh


def all_steps(folder: Path) -> dict[str, dict]:
    """The steps of summary.json by name, after a look at their form."""
    steps = strict_json((folder / "summary.json").read_text())["steps"]
    text = (folder / "summary.md").read_text()
    for step in steps:
        assert {"name", "status", "exit_status", "seconds", "reason", "files"} <= step.keys()
        assert step["status"] == {0: "ok", 4: "skipped"}.get(step["exit_status"], "failed")
        assert bool(step["reason"]) == (step["status"] != "ok")
        assert all((folder / file).is_file() for file in step["files"])
        assert all(words in text for words in (step["name"], step["status"], step["reason"] or ""))
    return {step["name"]: step for step in steps}


@pytest.fixture
def all_profilers(bench) -> Callable[..., Done]:
    """`all_profilers(*argv)`, where a stand-in replaces our two Python profilers: it notes its arguments."""
    python = bench.directory / "python"
    python.write_text(
        f"""#!{sys.executable}
import json, os, pathlib, sys
name = pathlib.Path(sys.argv[1]).stem
if name not in ("run_pytorch_profiler", "run_deepspeed_flops"):
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
with open(os.environ["RECORD"] + "_ours", "a") as record:
    record.write(json.dumps(sys.argv[2:]) + "\\n")
print(name, "says why", file=sys.stderr)
sys.exit(int(os.environ.get(name, "0")))
"""
    )
    python.chmod(0o755)
    bench.environment["PYTHON"] = str(python)
    return functools.partial(bench.run, "run_all_profilers.sh")


def test_all_profilers_pass_the_arguments_on(bench, all_profilers):
    argv = ["--note", *AWKWARD, "--num-steps", "3", "--warmup-steps", "0"]
    all_profilers("--enable-rocm-tools", "--profile-dir", "all results", *argv).succeeded()
    assert {step["status"] for step in all_steps(bench.work / "all results").values()} == {"ok"}
    ours = [json.loads(line) for line in (bench.directory / "record_ours").read_text().splitlines()]
    received = [*ours, *bench.received()]
    assert len(received) == 2 + 4  # rocprof-compute runs the script twice
    assert all(words[-len(argv) :] == argv for words in received)
    assert [path.name for path in bench.work.iterdir()] == ["all results"]


def test_all_profilers_without_rocm(bench, all_profilers):
    report = bench.work / "out" / "pytorch" / "tiny_llama_v1_report.md"
    report.parent.mkdir(parents=True)
    report.write_text("of an earlier run\n")
    os.utime(report, (1, 1))
    all_profilers("--script=tiny_llama_v2.py", "--profile-dir=out").succeeded()
    assert strict_json((bench.work / "out" / "summary.json").read_text())["script"] == "tiny_llama_v2.py"
    steps = all_steps(bench.work / "out")
    assert list(steps) == ["pytorch_profiler", "flops"]
    assert steps["pytorch_profiler"]["files"] == []  # what an earlier run left is not listed
    assert not bench.received()


def test_all_profilers_dry_run(bench, all_profilers):
    dry = all_profilers("--dry-run", "--enable-rocm-tools", "--seq-len", "8").succeeded()
    names = [next(word for word in shell_words(line) if "run_" in word) for line in dry.stdout.splitlines()]
    ours = ["run_pytorch_profiler.py", "run_deepspeed_flops.py", ROCPROFV3, SYS, COMPUTE]
    assert [Path(name).name for name in names] == ours
    assert all(shell_words(line)[-2:] == ["--seq-len", "8"] for line in dry.stdout.splitlines())
    assert bench.nothing_happened()


def test_all_profilers_skip_what_is_missing(bench, all_profilers):
    skip_if_installed(*TOOLS)
    bench.install("rocprofv3")
    all_profilers("--enable-rocm-tools", "--profile-dir", "out", run_deepspeed_flops="4").succeeded()
    steps = all_steps(bench.work / "out")
    assert [step["status"] for step in steps.values()] == ["ok", "skipped", "ok", "skipped", "skipped"]
    assert "rocprof-sys-run" in steps["rocprof_sys"]["reason"]
    assert steps["flops"]["reason"] == "run_deepspeed_flops says why"
    assert steps["rocprofv3"]["files"] == ["rocprofv3_results_fused/stats.csv"]


def test_all_profilers_go_on_after_a_failure(bench, all_profilers):
    environment = {"run_pytorch_profiler": "3", "STANDIN_FAIL": "rocprofv3:status"}
    all_profilers("--enable-rocm-tools", "--profile-dir", "out", **environment).failed("pytorch_profiler", "rocprofv3")
    steps = all_steps(bench.work / "out")
    assert [step["status"] for step in steps.values()] == ["failed", "ok", "failed", "ok", "ok"]
    assert steps["pytorch_profiler"]["exit_status"] == 3
    assert not steps["rocprofv3"]["files"]


def test_all_profilers_interrupted(bench, all_profilers):
    command = bench.command("run_all_profilers.sh", "--enable-rocm-tools", "--profile-dir", "out")
    interrupt(bench.start(command, WAIT="1"), bench, runs=0)
    assert list(all_steps(bench.work / "out"))[:2] == ["pytorch_profiler", "flops"]
    assert len(bench.received()) == 1  # nothing else was started


def analyze(bench: Bench, baseline: str, fused: str) -> Done:
    """The comparison of two folders."""
    tool = str(ROOT / "analysis_tools" / "analyze_kernel_reduction.py")
    return bench.call([sys.executable, tool, "--baseline", baseline, "--fused", fused, "--top", "0"])


def test_what_all_profilers_wrote_can_be_compared(bench, all_profilers):
    """Where the PyTorch profiler left nothing, rocprofv3's statistics; test_analysis_tools.py has its profiles."""
    bench.install("rocprofv3")
    run = ["--enable-rocm-tools", "--profile-dir"]
    all_profilers(*run, "off", "--disable-all-fusion", "--num-steps", "2").succeeded()
    all_profilers(*run, "on", "--seq-len", "8").succeeded()
    result = analyze(bench, "off", "on").succeeded()
    assert reduction(BASELINE[1] / 2, FUSED[1]) in result.stdout
    assert "- note: seq_len differs: 64 for baseline; 8 for fused" in result.stdout.partition("- Kernels")[0]
    assert "- fused: `on/rocprofv3_results_fused` (tiny_note_v2, 1 steps" in result.stdout
    all_profilers(*run, "on", "--disable-all-fusion").succeeded()
    analyze(bench, "off", "on").failed("several profiles", "rocprofv3_results_fused", status=2, lines=1)
    bench.script = bench.script.rename(bench.script.with_name("tiny_other_v2.py"))
    all_profilers(*run, "other").succeeded()
    analyze(bench, "off", "other").failed("fused of tiny_other", status=2, lines=1)


# --- with a real training run


def test_all_profilers_with_a_real_script(bench):
    bench.script = Path("tiny_llama_v2.py")
    bench.install("rocprofv3", "rocpd")
    argv = ["--enable-rocm-tools", "--profile-dir", "all results", "--num-steps", "2", "--warmup-steps", "1"]
    bench.run("run_all_profilers.sh", *argv, "--device", "cpu", *TINY["llama"]).succeeded()
    folder = bench.work / "all results"
    steps = all_steps(folder)
    assert [step["status"] for step in steps.values()] == ["ok", "ok", "ok", "skipped", "skipped"]
    assert [bool(step["files"]) for step in steps.values()] == [True, True, True, False, False]
    (summary,) = (folder / "rocprofv3_results_fused").rglob("tiny_llama_v2_summary.json")
    summary = strict_json(summary.read_text())
    assert summary["status"] == "ok"
    assert summary["kernels"] == {}  # nothing but the training steps ran
    result = analyze(bench, "all results", "all results").succeeded()
    assert "- fused: `all results/pytorch` (tiny_llama_v2, 3 steps, run_pytorch_profiler.py)" in result.stdout

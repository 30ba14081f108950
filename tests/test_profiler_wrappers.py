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
TOOL_OF = {
    "run_rocprofv3.sh": "rocprofv3",
    "run_rocprof_sys.sh": "rocprof-sys-run",
    "run_rocprof_compute.sh": "rocprof-compute",
}
FOLDER_OF = {
    "run_rocprofv3.sh": "rocprofv3_results_fused",
    "run_rocprof_sys.sh": "rocprof_sys_results",
    "run_rocprof_compute.sh": "rocprof_compute_results",
}
WRAPPERS = tuple(TOOL_OF)
ADDED = ["--under-profiler", "--enable-rocm-profiling"]
STATS_HEADER = ["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev"]
# What the stand-ins report: distinct kernels and dispatches of one process.
FUSED, BASELINE = (6, 73), (8, 139)
AWKWARD = (
    "two words",
    ";",
    "$(touch injected)",
    "`touch injected`",
    "it's",
    '"',
    "\\",
    "",
    "two\nlines",
    "*",
    "~",
    "-x=1",
)

# Notes its arguments and leaves a result, another one in every run; fails, or waits for Ctrl-C, if asked to.
SCRIPT = """
import json, os, pathlib, sys, time
def value(name, default):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([sys.argv[1:], os.getcwd()]) + "\\n")
if "--profile-dir" in sys.argv:
    directory = pathlib.Path(sys.argv[sys.argv.index("--profile-dir") + 1])
    directory.mkdir(parents=True, exist_ok=True)
    name, steps = pathlib.Path(sys.argv[0]).stem, int(value("--num-steps", "1"))
    result = {group: {} for group in ("config", "training", "environment", "timing", "memory", "kernels", "loss")}
    result |= {"schema_version": 1, "script": name, "status": "ok", "process": os.getpid(), "timing": {"steps": steps}}
    result["config"] = {"seq_len": int(value("--seq-len", "64"))}
    result["training"] = {"num_steps": steps, "use_amp": "--use-amp" in sys.argv, "amp_dtype": "bfloat16"}
    result["environment"] = {"device": "cuda", "device_name": os.environ.get("DEVICE", "MI300A")}
    (directory / f"{name}_summary.json").write_text(json.dumps(result))
if "WAIT" in os.environ:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
print("Average training speed: 1.0 samples/sec")
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    def succeeded(self) -> Done:
        assert self.status == 0, self.stderr
        return self

    def failed(self, *words: str, status: int | None = None, lines: int | None = None) -> None:
        """It ended with an error whose last line has all of the words."""
        assert self.status != 0 if status is None else self.status == status, (self.status, self.stderr)
        found = self.stderr.splitlines()
        assert found, self.stdout
        assert lines in (None, len(found)), self.stderr
        for word in words:
            assert word in found[-1], self.stderr
        assert "Traceback" not in self.stderr
        assert "line " not in found[-1] or ".sh: line" not in found[-1], self.stderr


@dataclass
class Bench:
    """A directory to work in, a PATH with chosen tools on it, and what these were called with."""

    directory: Path
    bin: Path
    script: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        return self.directory / "work"

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

    def command(self, wrapper: str, *argv: str) -> list[str]:
        """A wrapper's command line for the script that notes its arguments."""
        return [str(ROOT / wrapper), "--script", str(self.script), *argv]

    def run(self, wrapper: str, *argv: str, cwd: Path | None = None, **environment: str) -> Done:
        process = self.start(self.command(wrapper, *argv), cwd, **environment)
        stdout, stderr = process.communicate(timeout=120)
        return Done(process.returncode, stdout, stderr)

    def tool(self, name: str, *argv: str, **environment: str) -> Done:
        """Call a stand-in itself."""
        process = self.start([str(self.bin / name), *argv], **environment)
        stdout, stderr = process.communicate(timeout=60)
        return Done(process.returncode, stdout, stderr)

    def calls(self, tool: str) -> list[dict]:
        """The calls of a tool so far: argv, application, environment."""
        log = self.directory / "log"
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [call for call in calls if call["tool"] == tool]

    def received(self) -> list[list[str]]:
        """The arguments of every run of the script so far."""
        record = self.directory / "record"
        return [json.loads(line)[0] for line in record.read_text().splitlines()] if record.exists() else []

    def results(self, wrapper: str = "run_rocprofv3.sh") -> Path:
        return self.work / FOLDER_OF[wrapper]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """All stand-ins on a PATH that has nothing else but python3 and the system's own programs."""
    for name in ("work", "bin", "home"):
        (tmp_path / name).mkdir()
    python = tmp_path / "bin" / "python3"  # a link to it would lose the virtual environment
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "tiny_note_v2.py"
    script.write_text(SCRIPT)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{SYSTEM_PATH}",
        "HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "STANDIN_LOG": str(tmp_path / "log"),
        "RECORD": str(tmp_path / "record"),
    }
    bench = Bench(tmp_path, tmp_path / "bin", script, environment)
    bench.install(*TOOLS)
    return bench


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows."""
    with path.open(newline="") as lines:
        reader = csv.DictReader(lines)
        return list(reader.fieldnames or ()), list(reader)


def files(directory: Path) -> dict[str, bytes]:
    """All files below a directory with their content."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def shell_words(line: str) -> list[str]:
    """The words that bash makes of a printed command."""
    output = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    return output.stdout.split("\0")[:-1]


# --- the stand-ins themselves: they must be as strict as the tools are


@pytest.mark.parametrize(
    "command",
    [
        "rocprofv3 --kernel-trace --metrics SQ_WAVES",
        "rocprofv3 --kernel-trace --trace-gpu-memory",
        "rocprofv3 --stats",
        "rocprofv3 --kernel-trace --output-format xml",
        "rocprofv3 --pmc",
        "rocprofv3 --kernel-tra",
        "rocprof-sys-run --perfetto",
        "rocprof-sys-run -P -F",
        "rocprof-compute profile",
        "rocprof-compute profile -n a --roofline",
        "rocprof-compute profile -n a --roof-only --no-roof",
    ],
)
def test_standin_refuses_what_the_tool_refuses(bench, command):
    name, *options = command.split()
    bench.tool(name, *options, "--", "touch", "ran").failed(name, status=2)
    assert not list(bench.work.iterdir())


@pytest.mark.parametrize("command", ["rocprofv3 --kernel-trace", "rocprof-sys-run -T", "rocprof-compute profile -n a"])
def test_standin_needs_two_dashes(bench, command):
    name, *options = command.split()
    bench.tool(name, *options, "touch", "ran").failed(status=2)
    assert not list(bench.work.iterdir())


def test_standin_analyze_has_no_name_option(bench):
    bench.tool("rocprof-compute", "analyze", "-p", "x", "-n", "name").failed("unrecognized arguments", status=2)


@pytest.mark.parametrize("options", ["rocprofv3 --kernel-trace", "rocprof-sys-run -T", "rocprof-compute profile -n a"])
def test_standin_ends_as_the_application_ends(bench, options):
    name, *options = options.split()
    assert bench.tool(name, *options, "--", "sh", "-c", "exit 7").status == 7
    assert bench.tool(name, *options, "--", "sh", "-c", "kill -9 $$").status == -signal.SIGKILL


# --- what all three wrappers do


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_help_names_every_option(bench, wrapper):
    bench.install()
    result = bench.run(wrapper, "--help").succeeded()
    own = {"run_rocprofv3.sh": "--mode --hsa --compare --from-db --counters", "run_rocprof_sys.sh": "--sample"}
    own["run_rocprof_compute.sh"] = "--roof-only --mode --dispatch --list-stats"
    for option in ["--help", "--dry-run", "--script", "--output-dir", "--result-dir", *own[wrapper].split()]:
        assert option in result.stdout
    assert not list(bench.work.iterdir())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_arguments_arrive_unchanged_and_in_order(bench, wrapper):
    argv = ["--note", *AWKWARD, "--num-steps", "3", "--warmup-steps", "0"]
    bench.run(wrapper, *argv).succeeded()
    (call,) = bench.calls(TOOL_OF[wrapper])
    for received in (call["application"][2:], *bench.received()):
        place = received.index("--note")
        assert received[place : place + len(argv)] == argv
        rest = received[:place] + received[place + len(argv) :]
        assert sorted(rest[: rest.index("--profile-dir")] + rest[rest.index("--profile-dir") + 2 :]) == sorted(ADDED)
    assert not list(bench.directory.rglob("injected"))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("given", [["--profile-dir", "my dir"], ["--profile-dir=my dir"]], ids=["two words", "one"])
def test_a_profile_dir_of_the_user_stays_the_only_one(bench, wrapper, given):
    bench.run(wrapper, *given).succeeded()
    for received in bench.received():
        assert [word for word in received if word.startswith("--profile-dir")] == given[:1]
        assert set(given) <= set(received)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_profile_dir_is_the_result_folder(bench, wrapper):
    bench.run(wrapper).succeeded()
    for received in bench.received():
        folder = Path(bench.work, received[received.index("--profile-dir") + 1])
        assert bench.results(wrapper) in (folder, *folder.parents)


DRY = [
    *([wrapper] for wrapper in WRAPPERS),
    ["run_rocprofv3.sh", "--mode", "trace"],
    ["run_rocprofv3.sh", "--mode", "kernels"],
    ["run_rocprofv3.sh", "--mode", "counters", "--counters", "SQ_WAVES GRBM_COUNT"],
    ["run_rocprof_sys.sh", "--sample"],
    ["run_rocprof_compute.sh", "--roof-only"],
]


@pytest.mark.parametrize("words", DRY, ids=" ".join)
def test_dry_run_prints_the_command_that_is_then_run(bench, words):
    wrapper, *options = words
    options += ["--output-dir", "my results", "--note", *AWKWARD]
    bench.install()
    dry = bench.run(wrapper, "--dry-run", *options).succeeded()
    assert not list(bench.work.iterdir())
    assert not bench.received()
    bench.install(*TOOLS)
    bench.run(wrapper, *options).succeeded()
    (call,) = bench.calls(TOOL_OF[wrapper])
    commands = [shell_words(line) for line in dry.stdout.splitlines() if TOOL_OF[wrapper] in line]
    assert len(commands) == 1, dry.stdout
    assert commands[0][commands[0].index(TOOL_OF[wrapper]) + 1 :] == call["argv"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_missing_tool_is_one_line(bench, wrapper):
    tool = TOOL_OF[wrapper]
    if shutil.which(tool, path=SYSTEM_PATH):
        pytest.skip(f"this machine has {tool} in {SYSTEM_PATH}")
    bench.install("rocminfo")
    bench.run(wrapper).failed(tool, "run_pytorch_profiler.py", status=4, lines=1)
    assert not list(bench.work.iterdir())
    assert not bench.received()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_output_dir_and_another_working_directory(bench, wrapper):
    parent = bench.directory / "a place; with $(odd) name"
    bench.run(wrapper, "--output-dir", str(parent), cwd=bench.directory / "home").succeeded()
    assert [p.name for p in parent.iterdir()] == [FOLDER_OF[wrapper]]
    assert files(parent)
    assert not list(bench.work.iterdir())
    assert not list((bench.directory / "home").iterdir())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_output_dir_that_cannot_be_written(bench, wrapper):
    (bench.work / "file").write_text("not a directory")
    bench.run(wrapper, "--output-dir", "file/below").failed("file/below", status=2, lines=1)
    assert not bench.received()
    assert files(bench.work) == {"file": b"not a directory"}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "argv",
    [["--script", "missing.py"], ["--script", ""], ["--script"], ["--output-dir", ""], ["--result-dir", "/"]],
    ids=["no such script", "empty script", "no script", "empty directory", "no new directory"],
)
def test_bad_common_option(bench, wrapper, argv):
    bench.run(wrapper, "--dry-run", *argv).failed(argv[0], status=2, lines=1)  # a dry run lest it writes into /
    assert not bench.received()
    assert not list(bench.work.iterdir())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_option_and_its_value_may_be_one_word(bench, wrapper):
    apart = bench.run(wrapper, "--dry-run", "--script", "tiny_llama_v2.py", "--output-dir", "out", "--seq-len", "8")
    joined = bench.run(wrapper, "--dry-run", "--script=tiny_llama_v2.py", "--output-dir=out", "--seq-len", "8")
    assert joined.succeeded().stdout == apart.succeeded().stdout
    assert "tiny_llama_v2.py" in joined.stdout


@pytest.mark.parametrize("words", ["run_rocprofv3.sh --mode trace", "run_rocprof_compute.sh --mode profile"])
def test_an_own_option_and_its_value_may_be_one_word(bench, words):
    wrapper, option, value = words.split()
    apart = bench.run(wrapper, "--dry-run", option, value, "--seq-len=8").succeeded().stdout
    assert bench.run(wrapper, "--dry-run", f"{option}={value}", "--seq-len=8").succeeded().stdout == apart
    assert "--seq-len=8" in apart


@pytest.mark.parametrize(
    "words",
    [
        "run_rocprofv3.sh --mode metrics",
        "run_rocprofv3.sh --mode",
        "run_rocprofv3.sh --from-db",
        "run_rocprofv3.sh --from-db missing.db",
        "run_rocprofv3.sh --mode counters --counters",
        "run_rocprof_compute.sh --mode roofline",
        "run_rocprof_compute.sh --mode analyze --dispatch",
        "run_rocprof_compute.sh --dispatch 7",
        "run_rocprof_compute.sh --mode analyze --seq-len 64",
        "run_rocprofv3.sh --hsa",
        "run_rocprofv3.sh --compare --result-dir out",
        "run_rocprofv3.sh --compare --mode trace",
        "run_rocprofv3.sh --compare --disable-all-fusion",
        "run_rocprofv3.sh --compare --enable-flash-attention",
        "run_rocprofv3.sh --compare=yes",
    ],
)
def test_bad_option_of_one_wrapper(bench, words):
    wrapper, *argv = words.split()
    option = [word for word in argv if word.startswith("--")][-1].partition("=")[0]
    bench.run(wrapper, *argv).failed(option, status=2, lines=1)
    assert not list(bench.work.iterdir())
    assert not bench.received()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_python_can_be_chosen(bench, wrapper):
    other = bench.directory / "my python"
    shutil.copy(bench.bin / "python3", other)
    bench.run(wrapper, PYTHON=str(other)).succeeded()
    assert bench.calls(TOOL_OF[wrapper])[0]["application"][0] == str(other)


# --- failures: one line, and what was there before stays


def failing(
    wrapper: str, *options: str, modes: str = "status killed nothing truncated truncated-line noformat"
) -> list:
    return [pytest.param([wrapper, *options], mode, id=" ".join((wrapper, *options, mode))) for mode in modes.split()]


FAILING = [
    *failing("run_rocprofv3.sh"),
    *failing("run_rocprofv3.sh", "--mode", "kernels", modes="status killed nothing truncated noformat"),
    *failing("run_rocprofv3.sh", "--mode", "trace", modes="status killed nothing truncated"),
    *failing("run_rocprofv3.sh", "--mode", "counters", modes="status killed nothing truncated noformat"),
    *failing("run_rocprof_sys.sh", modes="status killed nothing truncated"),
    *failing("run_rocprof_compute.sh", modes="status killed nothing truncated noformat"),
    *failing("run_rocprof_compute.sh", "--roof-only", modes="noplots"),
]


@pytest.mark.parametrize(("words", "mode"), FAILING)
def test_a_failing_tool_leaves_earlier_results(bench, words, mode):
    wrapper, *options = words
    result = bench.run(wrapper, *options, STANDIN_FAIL=mode)
    result.failed()
    line = result.stderr.splitlines()[-1]
    assert TOOL_OF[wrapper] in line or FOLDER_OF[wrapper] in line
    for word in line.split():
        assert FOLDER_OF[wrapper] not in word or (bench.work / word.rstrip(":,;")).exists(), line
    assert not list(bench.work.rglob("stats.csv"))
    assert not list(bench.work.rglob("roofline_analysis.csv"))
    shutil.rmtree(bench.results(wrapper), ignore_errors=True)

    bench.run(wrapper, *options).succeeded()
    before = files(bench.work)
    result = bench.run(wrapper, *options, STANDIN_FAIL=mode)
    result.failed()
    assert "Dispatches:" not in result.stdout
    after = files(bench.work)
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_failing_script_is_a_failure(bench, wrapper):
    result = bench.run(wrapper, STATUS="3")
    result.failed(status=3)
    assert "Dispatches:" not in result.stdout
    assert not list(bench.work.rglob("stats.csv"))
    assert not list(bench.work.rglob("roofline_analysis.csv"))


def interrupt(process: subprocess.Popen, bench: Bench, runs: int) -> str:
    """Ctrl-C once the script runs, of which there were `runs` runs before; returns what stderr got."""
    deadline = time.monotonic() + 30
    while len(bench.received()) == runs and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)  # until the script sleeps
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=30)[1]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ctrl_c_leaves_earlier_results(bench, wrapper):
    bench.run(wrapper).succeeded()
    before, runs = files(bench.work), len(bench.received())
    process = bench.start(bench.command(wrapper), WAIT="1")
    stderr = interrupt(process, bench, runs)
    assert process.returncode in (130, -signal.SIGINT), stderr
    after = files(bench.work)
    assert {name: after.get(name) for name in before} == before
    bench.run(wrapper).succeeded()


# --- run_rocprofv3.sh


def rocprofv3_options(bench: Bench) -> list[list[str]]:
    """The options of each call so far, without the directory, which is checked to be in the results."""
    found = []
    for call in bench.calls("rocprofv3"):
        options = call["argv"][: call["argv"].index("--")]
        place = options.index("-d")
        found.append(options[:place] + options[place + 2 :])
    return found


@pytest.mark.parametrize("rocm", ["6", "7"])
def test_hotspots(bench, rocm):
    result = bench.run("run_rocprofv3.sh", "--batch-size", "4", STANDIN_ROCM=rocm).succeeded()
    expected = "--kernel-trace --stats --marker-trace --output-format csv --selected-regions -o %pid%"
    assert rocprofv3_options(bench) == [expected.split()]
    (call,) = bench.calls("rocprofv3")
    assert call["application"][:2] == ["python3", str(bench.script)]
    header, rows = read_csv(bench.results() / "stats.csv")
    assert header == STATS_HEADER
    assert (len(rows), sum(int(row["Calls"]) for row in rows)) == FUSED
    assert float(sum(float(row["Percentage"]) for row in rows)) == pytest.approx(100, abs=0.1)
    totals = [int(row["TotalDurationNs"]) for row in rows]
    assert totals == sorted(totals, reverse=True)
    assert any(row["Name"].startswith("void at::native::vectorized_elementwise_kernel<4, at::") for row in rows)
    lines = result.stdout.splitlines()
    assert f"Distinct kernels: {FUSED[0]}" in lines
    assert f"Dispatches: {FUSED[1]}" in lines
    assert "Cijk_Ailk_Bljk" in result.stdout
    assert "Kernel reduction" not in result.stdout  # there is no other side yet
    assert list((bench.results() / "hotspots").glob("*_kernel_trace.csv"))


def reduction(before: float, after: float, per: str = "per step") -> str:
    """What the wrapper prints of the comparison."""
    return f"- Kernels {per}: {before:.10g} -> {after:.10g}\n- Kernel reduction: {100 * (1 - after / before):.1f} %\n"


def test_kernel_reduction_when_both_sides_exist(bench):
    bench.run("run_rocprofv3.sh", "--disable-all-fusion").succeeded()
    _, rows = read_csv(bench.work / "rocprofv3_results_baseline" / "stats.csv")
    assert (len(rows), sum(int(row["Calls"]) for row in rows)) == BASELINE
    assert any('masked_fill_kernel("float")' in row["Name"] for row in rows)
    result = bench.run("run_rocprofv3.sh", "--enable-all-fusion").succeeded()
    assert reduction(BASELINE[1], FUSED[1]) in result.stdout
    assert "differs" not in result.stdout + result.stderr


def test_compare_runs_both_sides(bench):
    bench.run("run_rocprofv3.sh", "--seq-len", "8").succeeded()  # an earlier fused run, which is not compared with
    result = bench.run("run_rocprofv3.sh", "--compare", "--note", "a b").succeeded()
    first, second = bench.received()[1:]
    assert "--disable-all-fusion" in first
    assert "--enable-all-fusion" not in first
    assert "--enable-all-fusion" in second
    assert "--disable-all-fusion" not in second
    for received in (first, second):
        assert received[received.index("--note") + 1] == "a b"
    sides = [sum(int(row["Calls"]) for row in read_csv(path / "stats.csv")[1]) for path in sorted(bench.work.iterdir())]
    assert sides == [BASELINE[1], FUSED[1]]
    assert result.stdout.count("Kernel reduction") == 1
    assert reduction(BASELINE[1], FUSED[1]) in result.stdout
    assert "differs" not in result.stdout + result.stderr


def test_the_comparison_is_per_step_and_names_what_differs(bench):
    bench.run("run_rocprofv3.sh", "--disable-all-fusion", "--num-steps", "2", DEVICE="MI210").succeeded()
    argv = ["--num-steps", "5", "--seq-len", "8", "--use-amp"]
    result = bench.run("run_rocprofv3.sh", *argv).succeeded()
    assert reduction(BASELINE[1] / 2, FUSED[1] / 5) in result.stdout
    top = result.stdout.partition("- Kernels per step")[0]
    for note in (
        "seq_len differs: 64 for baseline; 8 for fused",
        "precision differs: float32 for",
        "device_name differs",
    ):
        assert f"- note: {note}" in top
    assert "steps differs" not in result.stdout
    assert "- baseline: `rocprofv3_results_baseline` (tiny_note_v2, 2 steps" in top


def test_totals_of_unknown_steps_are_said_to_be_totals(bench):
    bench.run("run_rocprofv3.sh", "--disable-all-fusion").succeeded()
    result = bench.run("run_rocprofv3.sh", "--profile-dir", "elsewhere").succeeded()
    assert reduction(BASELINE[1], FUSED[1], "in all") in result.stdout
    assert "- note: the number of steps is not known" in result.stdout
    assert "sizes and steps of fused are not checked" in result.stdout


def test_different_models_are_not_compared(bench):
    bench.run("run_rocprofv3.sh", "--disable-all-fusion").succeeded()
    baseline = files(bench.work)
    bench.script = bench.script.rename(bench.directory / "tiny_other_v2.py")
    result = bench.run("run_rocprofv3.sh", "--enable-all-fusion")
    result.failed("baseline is a run of tiny_note, fused of tiny_other", status=2, lines=1)
    assert f"Dispatches: {FUSED[1]}" in result.stdout.splitlines()
    assert "Kernel reduction" not in result.stdout
    assert (bench.results() / "hotspots" / "tiny_other_v2_summary.json").exists()
    after = files(bench.work)
    assert {name: after[name] for name in baseline} == baseline
    bench.run("run_rocprofv3.sh", "--compare").succeeded()  # replaces both sides
    bench.run("run_rocprofv3.sh", "--mode", "trace", "--disable-all-fusion").succeeded()  # nothing to compare


PARTIAL = ["--disable-all-fusion --enable-flash-attention", "--disable-qkv-fusion", "--enable-a --disable-triton-b"]


@pytest.mark.parametrize("words", PARTIAL)
def test_a_part_of_the_fusions_has_a_folder_of_its_own(bench, words):
    bench.run("run_rocprofv3.sh", "--compare").succeeded()
    before = files(bench.work)
    result = bench.run("run_rocprofv3.sh", *words.split(), "--enable-cuda-graph").succeeded()
    assert "Kernel reduction" not in result.stdout
    assert "rocprofv3_results_partial/stats.csv" in result.stdout
    after = files(bench.work)
    assert {name: after[name] for name in before} == before
    assert {Path(name).parts[0] for name in after.keys() - before.keys()} == {"rocprofv3_results_partial"}


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("--enable-flash-attention", "fused"),
        ("--enable-torch-compile --enable-cuda-graph", "fused"),
        ("--disable-all-fusion --disable-flash-attention", "baseline"),
        ("--disable-all-fusion --enable-torch-compile --enable-cuda-graph --enable-memory-profiling", "baseline"),
    ],
)
def test_all_on_and_all_off_are_the_two_sides(bench, words, folder):
    bench.run("run_rocprofv3.sh", *words.split()).succeeded()
    assert [path.name for path in bench.work.iterdir()] == [f"rocprofv3_results_{folder}"]


def test_compare_dry_run_prints_both_commands(bench):
    dry = bench.run("run_rocprofv3.sh", "--compare", "--dry-run").succeeded()
    commands = [shell_words(line) for line in dry.stdout.splitlines() if "rocprofv3 " in line]
    bench.run("run_rocprofv3.sh", "--compare").succeeded()
    assert [words[1:] for words in commands] == [call["argv"] for call in bench.calls("rocprofv3")]


def test_statistics_are_merged_over_processes(bench):
    bench.run("run_rocprofv3.sh").succeeded()
    _, alone = read_csv(bench.results() / "stats.csv")
    result = bench.run("run_rocprofv3.sh", STANDIN_PROCESSES="3").succeeded()
    _, merged = read_csv(bench.results() / "stats.csv")
    assert f"Dispatches: {3 * FUSED[1]}" in result.stdout.splitlines()
    assert f"Distinct kernels: {FUSED[0]}" in result.stdout.splitlines()
    assert [row["Name"] for row in merged] == [row["Name"] for row in alone]
    for one, three in zip(alone, merged, strict=True):
        assert int(three["Calls"]) == 3 * int(one["Calls"])
        assert int(three["TotalDurationNs"]) == 3 * int(one["TotalDurationNs"])
        assert (three["MinNs"], three["MaxNs"]) == (one["MinNs"], one["MaxNs"])
        assert float(three["AverageNs"]) == pytest.approx(float(one["AverageNs"]))
        assert float(three["Percentage"]) == pytest.approx(float(one["Percentage"]), abs=0.01)


@pytest.mark.parametrize(("rocm", "suffix"), [("6", "_kernel_trace.csv"), ("7", "_results.db")])
def test_kernels_in_the_format_of_the_release(bench, rocm, suffix):
    argv = ["--mode", "kernels"]
    result = bench.run("run_rocprofv3.sh", *argv, STANDIN_ROCM=rocm, STANDIN_PROCESSES="2").succeeded()
    expected = "--kernel-trace --stats --marker-trace --selected-regions -o %pid%"
    assert rocprofv3_options(bench) == [expected.split()]
    assert f"Dispatches: {2 * FUSED[1]}" in result.stdout.splitlines()
    assert len(list((bench.results() / "kernels").glob(f"*{suffix}"))) == 2


def test_a_second_run_replaces_the_first(bench):
    bench.run("run_rocprofv3.sh", STANDIN_PROCESSES="2").succeeded()
    result = bench.run("run_rocprofv3.sh").succeeded()
    assert f"Dispatches: {FUSED[1]}" in result.stdout.splitlines()
    assert sum(int(row["Calls"]) for row in read_csv(bench.results() / "stats.csv")[1]) == FUSED[1]
    assert len(list((bench.results() / "hotspots").glob("*_kernel_stats.csv"))) == 1


@pytest.mark.parametrize("rocm", ["6", "7"])
def test_trace(bench, rocm):
    result = bench.run("run_rocprofv3.sh", "--mode", "trace", STANDIN_ROCM=rocm).succeeded()
    expected = "--runtime-trace --output-format pftrace --selected-regions -o %pid%"
    assert rocprofv3_options(bench) == [expected.split()]
    (trace,) = (bench.results() / "trace").glob("*.pftrace")
    assert f"rocprofv3_results_fused/trace/{trace.name}" in result.stdout
    assert "ui.perfetto.dev" in result.stdout


@pytest.mark.parametrize("rocm", ["6", "7"])
def test_counters(bench, rocm):
    argv = ["--mode", "counters", "--counters", "SQ_WAVES GRBM_COUNT"]
    result = bench.run("run_rocprofv3.sh", *argv, STANDIN_ROCM=rocm).succeeded()
    expected = "--pmc SQ_WAVES GRBM_COUNT --marker-trace --output-format csv --selected-regions -o %pid%"
    assert rocprofv3_options(bench) == [expected.split()]
    (table,) = (bench.results() / "counters").glob("*_counter_collection.csv")
    assert f"rocprofv3_results_fused/counters/{table.name}" in result.stdout
    assert {row["Counter_Name"] for row in read_csv(table)[1]} == {"SQ_WAVES", "GRBM_COUNT"}


def test_default_counters_exist(bench):
    bench.run("run_rocprofv3.sh", "--mode", "counters").succeeded()


def test_unknown_counter(bench):
    bench.run("run_rocprofv3.sh", "--mode", "counters", "--counters", "NO_SUCH").failed("rocprofv3")


def make_database(bench: Bench, *argv: str) -> Path:
    """A database as rocprofv3 of ROCm 7 writes it by default."""
    bench.tool("rocprofv3", "--kernel-trace", "-d", "db dir", "-o", "run", "--", "true", *argv).succeeded()
    return bench.work / "db dir" / "run_results.db"


def test_from_database_with_and_without_rocpd(bench):
    database = make_database(bench)
    found = []
    for tools in (["rocpd"], []):
        bench.install(*tools)
        if not tools and shutil.which("rocpd", path=SYSTEM_PATH):
            pytest.skip(f"this machine has rocpd in {SYSTEM_PATH}")
        result = bench.run("run_rocprofv3.sh", "--from-db", str(database)).succeeded()
        assert f"Dispatches: {FUSED[1]}" in result.stdout.splitlines()
        found.append((bench.results() / "stats.csv").read_text())
        shutil.rmtree(bench.results())
    assert found[0] == found[1]
    assert len(bench.calls("rocpd")) == 1
    bench.install(*TOOLS)
    bench.run("run_rocprofv3.sh").succeeded()
    _, traced = read_csv(bench.results() / "stats.csv")
    rows = list(csv.DictReader(found[0].splitlines()))
    assert list(rows[0]) == STATS_HEADER
    for column in ("Name", "Calls", "TotalDurationNs", "MinNs", "MaxNs"):
        assert [row[column] for row in rows] == [row[column] for row in traced]
    assert len(bench.received()) == 1  # only that last run; a database is read without running anything


@pytest.mark.parametrize("mode", ["truncated", "noformat"])
@pytest.mark.parametrize("tools", [["rocpd"], []], ids=["rocpd", "sqlite"])
def test_from_a_damaged_database(bench, mode, tools):
    database = make_database(bench)
    bench.run("run_rocprofv3.sh", "--from-db", str(database)).succeeded()
    before = files(bench.results())
    options = ["--kernel-trace", "-d", "db dir", "-o", "run", "--", "true"]
    bench.tool("rocprofv3", *options, STANDIN_FAIL=mode).succeeded()
    bench.install(*tools)
    bench.run("run_rocprofv3.sh", "--from-db", str(database)).failed("run_results.db")
    assert files(bench.results()) == before


def test_from_a_file_that_is_no_database(bench):
    (bench.work / "notes.db").write_text("hello")
    bench.install()
    bench.run("run_rocprofv3.sh", "--from-db", "notes.db").failed("notes.db", lines=1)
    assert not list(bench.work.rglob("stats.csv"))


@pytest.mark.parametrize("mode", ["status", "killed", "nothing", "truncated"])
def test_a_failing_rocpd(bench, mode):
    database = make_database(bench)
    bench.run("run_rocprofv3.sh", "--from-db", str(database), STANDIN_FAIL=mode).failed("run_results.db")
    assert not list(bench.work.rglob("stats.csv"))


@pytest.mark.parametrize("wrapper", ["run_rocprofv3.sh", "run_rocprof_sys.sh"])
def test_a_result_folder_must_be_new(bench, wrapper):
    """Else a directory of the user would be replaced."""
    bench.run(wrapper, "--result-dir", "a/new one/").succeeded()
    before = files(bench.work)
    bench.run(wrapper, "--result-dir", "a/new one").failed("a/new one", "exists", status=2, lines=1)
    assert before
    assert files(bench.work) == before


# --- run_rocprof_sys.sh


@pytest.mark.parametrize("time_output", [None, "ON", "OFF"])
def test_rocprof_sys(bench, time_output):
    environment = {"ROCPROFSYS_TIME_OUTPUT": time_output} if time_output else {}
    result = bench.run("run_rocprof_sys.sh", "--seq-len", "64", **environment).succeeded()
    (call,) = bench.calls("rocprof-sys-run")
    options = call["argv"][: call["argv"].index("--")]
    assert {"--profile", "--trace", "-o"} <= set(options)
    assert "--sample" not in options
    (trace,) = bench.results("run_rocprof_sys.sh").rglob("*.proto")
    assert str(trace.relative_to(bench.work)) in result.stdout
    assert "ui.perfetto.dev" in result.stdout
    assert list(bench.results("run_rocprof_sys.sh").rglob("wall_clock-*.txt"))


def test_rocprof_sys_sampling(bench):
    bench.run("run_rocprof_sys.sh", "--sample", "--seq-len", "64").succeeded()
    (call,) = bench.calls("rocprof-sys-run")
    assert "--sample" in call["argv"][: call["argv"].index("--")]
    assert "--sample" not in call["application"]
    assert list(bench.results("run_rocprof_sys.sh").rglob("sampling_wall_clock-*.txt"))


def test_rocprof_sys_by_its_older_name(bench):
    bench.install("rocprof-sys-run", name="omnitrace-run")
    bench.run("run_rocprof_sys.sh", "--seq-len", "64").succeeded()
    assert len(bench.calls("omnitrace-run")) == 1


# --- run_rocprof_compute.sh


def test_rocprof_compute(bench):
    result = bench.run("run_rocprof_compute.sh", "--seq-len", "64").succeeded()
    (call,) = bench.calls("rocprof-compute")
    assert call["argv"][0] == "profile"
    assert len(bench.received()) == 2  # the tool runs the script once for each set of counters
    header, rows = read_csv(bench.results("run_rocprof_compute.sh") / "roofline_analysis.csv")
    assert header == ["Dispatch_ID", "Category", "TimeNs", "Kernel_Name"]
    assert len(rows) == FUSED[1]
    assert {int(row["Dispatch_ID"]) for row in rows} == set(range(FUSED[1]))
    assert all(int(row["TimeNs"]) > 0 for row in rows)
    assert "roofline_analysis.csv" in result.stdout
    gemms = [row for row in rows if "gemm" in ",".join(row.values()).lower()]
    assert {row["Dispatch_ID"] for row in gemms} == {
        row["Dispatch_ID"] for row in rows if row["Kernel_Name"].startswith("Cijk")
    }


def test_roof_only(bench):
    result = bench.run("run_rocprof_compute.sh", "--roof-only", "--batch-size", "4").succeeded()
    (call,) = bench.calls("rocprof-compute")
    assert "--roof-only" in call["argv"][: call["argv"].index("--")]
    assert "--roof-only" not in call["application"]
    folder = bench.results("run_rocprof_compute.sh")
    assert len(read_csv(folder / "roofline_analysis.csv")[1]) == FUSED[1]
    plots = list(folder.rglob("empirRoof_*.pdf"))
    assert plots
    assert all(str(plot.relative_to(bench.work)) in result.stdout for plot in plots)


def test_analyze_works_on_the_last_profile(bench):
    bench.run("run_rocprof_compute.sh").succeeded()
    _, rows = read_csv(bench.results("run_rocprof_compute.sh") / "roofline_analysis.csv")
    chosen = next(row for row in rows if "attn_fwd" in row["Kernel_Name"])
    before = files(bench.work)
    result = bench.run("run_rocprof_compute.sh", "--mode", "analyze", "--dispatch", chosen["Dispatch_ID"]).succeeded()
    assert "attn_fwd.kd" in result.stdout
    assert "VALU instructions" in result.stdout
    call = bench.calls("rocprof-compute")[-1]
    assert call["argv"][0] == "analyze"
    assert call["argv"][call["argv"].index("--dispatch") + 1] == chosen["Dispatch_ID"]
    assert call["application"] is None
    assert len(bench.received()) == 2  # nothing ran again
    everything = bench.run("run_rocprof_compute.sh", "--mode", "analyze").succeeded()
    assert "Speed-of-Light" in everything.stdout
    stats = bench.run("run_rocprof_compute.sh", "--list-stats").succeeded()
    assert "Dispatch List" in stats.stdout
    assert "Speed-of-Light" not in stats.stdout
    assert files(bench.work) == before


def test_analyze_dry_run(bench):
    bench.run("run_rocprof_compute.sh").succeeded()
    argv = ["--mode", "analyze", "--dispatch", "3"]
    dry = bench.run("run_rocprof_compute.sh", "--dry-run", *argv).succeeded()
    bench.run("run_rocprof_compute.sh", *argv).succeeded()
    assert shell_words(dry.stdout.splitlines()[-1])[1:] == bench.calls("rocprof-compute")[-1]["argv"]


def test_analyze_an_unknown_dispatch(bench):
    bench.run("run_rocprof_compute.sh").succeeded()
    for dispatch in ("99999", "seven"):
        result = bench.run("run_rocprof_compute.sh", "--mode", "analyze", "--dispatch", dispatch)
        result.failed("rocprof-compute")
        assert dispatch in result.stderr


@pytest.mark.parametrize("argv", [["--mode", "analyze", "--dispatch", "1"], ["--list-stats"]])
def test_analyze_without_a_profile(bench, argv):
    bench.run("run_rocprof_compute.sh", *argv).failed("rocprof_compute_results", status=2, lines=1)
    assert not list(bench.work.iterdir())


@pytest.mark.parametrize("gpu", ["gfx1030", "gfx1100", "gfx1201"])
def test_consumer_gpus_are_refused(bench, gpu):
    bench.run("run_rocprof_compute.sh", STANDIN_GPU=gpu).failed(gpu, status=4, lines=1)
    assert not bench.received()


@pytest.mark.parametrize("gpu", ["gfx908", "gfx90a", "gfx942", "gfx950"])
def test_data_centre_gpus_are_not(bench, gpu):
    bench.run("run_rocprof_compute.sh", STANDIN_GPU=gpu).succeeded()


def test_a_data_centre_gpu_beside_another_one_is_not_refused(bench):
    bench.run("run_rocprof_compute.sh", STANDIN_GPU="gfx1036,gfx942").succeeded()


def test_rocprof_compute_runs_few_steps_unless_told_otherwise(bench):
    bench.run("run_rocprof_compute.sh").succeeded()
    bench.run("run_rocprof_compute.sh", "--num-steps=9").succeeded()
    default, told = bench.received()[0], bench.received()[-1]
    assert default[default.index("--num-steps") + 1] == "2"
    assert default[default.index("--warmup-steps") + 1] == "1"
    assert "--num-steps" not in told
    assert "--num-steps=9" in told


def test_rocprof_compute_without_rocminfo(bench):
    bench.install("rocprof-compute")
    bench.run("run_rocprof_compute.sh").succeeded()
    bench.run("run_rocprof_compute.sh", STANDIN_GPU="gfx1100").failed("rocprof-compute")


# --- with a real training run


@pytest.fixture
def tiny_llama(bench) -> Callable[..., Done]:
    """`tiny_llama(wrapper, *argv)`: as a user calls it, a few steps of the smallest model."""
    bench.script = Path("tiny_llama_v2.py")
    quick = ["--num-steps", "2", "--warmup-steps", "1", "--device", "cpu", *TINY["llama"]]
    return lambda wrapper, *argv: bench.run(wrapper, *argv, *quick)


def test_real_script_under_rocprofv3(bench, tiny_llama):
    result = tiny_llama("run_rocprofv3.sh", "--disable-all-fusion").succeeded()
    folder = bench.work / "rocprofv3_results_baseline"
    (summary,) = (strict_json(path.read_text()) for path in folder.rglob("tiny_llama_v2_summary.json"))
    assert summary["status"] == "ok"
    assert not any(summary["fusions"].values())
    assert summary["kernels"] == {}  # nothing but the training steps ran
    assert f"Dispatches: {BASELINE[1]}" in result.stdout.splitlines()


# --- exercises/tiny_llama_v4/get_*.sh

# Of each script: tool, result folder, options, and a file that it leaves there.
GET = {
    "get_trace.sh": ("rocprofv3", "traces/trace", "--sys-trace", "*_results.pftrace"),
    "get_counters.sh": ("rocprofv3", "counters/counter", "--kernel-trace", "*_results.db"),
    "get_hotspots.sh": ("rocprofv3", "hotspots/hotspot", "--kernel-trace --stats", "stats.csv"),
    "get_rocprof_compute.sh": (
        *("rocprof-compute", "rocprof_compute/profile", "profile"),
        "workloads/tiny_llama_v4_fused/rocprof/pmc_perf.csv",
    ),
    "get_rocprof_sys.sh": ("rocprof-sys-run", "rocprof_sys/profile", "--trace --sample", "*/perfetto-trace-*.proto"),
}


@pytest.fixture
def sheet(bench) -> Path:
    """The folder of the scripts, in a copy where tiny_llama_v4.py is the script that notes its arguments."""
    tree = bench.directory / "a copy"
    folder = tree / "exercises" / "tiny_llama_v4"
    folder.mkdir(parents=True)
    for path in [*ROOT.glob("run_*.sh"), *ROOT.glob("profiling/*.*"), *ROOT.glob("exercises/tiny_llama_v4/*.sh")]:
        place = tree / path.relative_to(ROOT)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(path, place)
    shutil.copy(bench.script, tree / "tiny_llama_v4.py")
    return folder


def get(bench: Bench, sheet: Path, script: str, *argv: str, inside: bool = True, **environment: str) -> Done:
    """Run a script, standing in its folder or elsewhere."""
    command = f"./{script}" if inside else str(sheet / script)
    process = bench.start([command, *argv], sheet if inside else None, **environment)
    stdout, stderr = process.communicate(timeout=120)
    return Done(process.returncode, stdout, stderr)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "by path"])
@pytest.mark.parametrize("script", GET)
def test_get_scripts(bench, sheet, script, inside):
    tool, folder, options, file = GET[script]
    argv = ["--mode", "benchmark", "--num-steps", "3", "two words", "*"]  # --mode is an option of the wrappers, too
    result = get(bench, sheet, script, *argv, inside=inside).succeeded()
    (call,) = bench.calls(tool)
    assert set(options.split()) <= set(call["argv"][: call["argv"].index("--")])
    assert all(received[-len(argv) :] == argv for received in bench.received())
    (results,) = sheet.glob(f"{folder}_*")
    assert re.fullmatch(r"\w+_\d{8}_\d{6}", results.name)
    assert list(results.glob(file))
    assert not list(bench.work.iterdir())
    # What it says to do next can be typed.
    typed = [line for line in result.stdout.splitlines() if re.match("rocpd|rocprof-compute analyze", line)]
    for line in typed:
        words = [re.sub("^N$", "1", word) for word in shell_words(line)]
        process = bench.start([str(bench.bin / words[0]), *words[1:]], sheet if inside else None)
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 0
    assert [line.split()[:2] for line in typed] == {
        "get_counters.sh": [["rocpd", "summary"], ["rocpd2csv", "-i"], ["rocpd", "convert"]],
        "get_rocprof_compute.sh": [["rocprof-compute", "analyze"]],
    }.get(script, [])
    assert typed or "ui.perfetto.dev" in result.stdout or "Next:" in result.stdout


@pytest.mark.parametrize("script", GET)
def test_get_scripts_that_fail(bench, sheet, script):
    tool, folder, *_ = GET[script]
    result = get(bench, sheet, script, STANDIN_FAIL="status")
    result.failed(tool)
    assert not re.search("Next|next|Open with|Every launch", result.stdout)
    found = [path.name for path in (sheet / folder).parent.rglob("*") if path.is_dir()]
    assert any(name.endswith(".failed") for name in found)
    shutil.rmtree((sheet / folder).parent)
    bench.install()
    if not shutil.which(tool, path=SYSTEM_PATH):
        get(bench, sheet, script).failed(tool, status=4, lines=1)
    dry = get(bench, sheet, script, "--dry-run", "--seq-len", "8").succeeded()
    assert shell_words(dry.stdout)[-2:] == ["--seq-len", "8"]
    assert "--dry-run" in get(bench, sheet, script, "--help").succeeded().stdout
    assert not (sheet / folder).parent.exists()


def test_ctrl_c_leaves_what_a_get_script_has_written(bench, sheet):
    process = bench.start(["./get_trace.sh"], sheet, WAIT="1")
    stderr = interrupt(process, bench, runs=0)
    assert process.returncode in (130, -signal.SIGINT), stderr
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
        assert step["name"] in text
        assert step["status"] in text
        assert (step["reason"] or "") in text
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
with open(os.environ["RECORD"] + "_" + name, "a") as record:
    record.write(json.dumps(sys.argv[2:]) + "\\n")
print(name, "says why", file=sys.stderr)
sys.exit(int(os.environ.get(name, "0")))
"""
    )
    python.chmod(0o755)
    return lambda *argv, **environment: bench.run("run_all_profilers.sh", *argv, PYTHON=str(python), **environment)


def test_all_profilers_pass_the_arguments_on(bench, all_profilers):
    argv = ["--note", *AWKWARD, "--num-steps", "3", "--warmup-steps", "0"]
    all_profilers("--enable-rocm-tools", "--profile-dir", "all results", *argv).succeeded()
    assert {step["status"] for step in all_steps(bench.work / "all results").values()} == {"ok"}
    ours = [bench.directory / f"record_{name}" for name in ("run_pytorch_profiler", "run_deepspeed_flops")]
    received = [json.loads(path.read_text()) for path in ours] + bench.received()
    assert len(received) == 2 + 4  # rocprof-compute runs the script twice
    for words in received:
        assert words[words.index("--note") :][: len(argv)] == argv
    assert [path.name for path in bench.work.iterdir()] == ["all results"]


def test_all_profilers_without_rocm(bench, all_profilers):
    all_profilers("--profile-dir", "out").succeeded()
    assert list(all_steps(bench.work / "out")) == ["pytorch_profiler", "flops"]
    assert not bench.received()


def test_all_profilers_skip_what_is_missing(bench, all_profilers):
    if any(shutil.which(tool, path=SYSTEM_PATH) for tool in TOOLS):
        pytest.skip(f"this machine has ROCm's tools in {SYSTEM_PATH}")
    bench.install("rocprofv3")
    all_profilers("--enable-rocm-tools", "--profile-dir", "out", run_deepspeed_flops="4").succeeded()
    steps = all_steps(bench.work / "out")
    assert [step["status"] for step in steps.values()] == ["ok", "skipped", "ok", "skipped", "skipped"]
    assert "rocprof-sys-run" in steps["rocprof_sys"]["reason"]
    assert steps["flops"]["reason"] == "run_deepspeed_flops says why"
    assert steps["rocprofv3"]["files"] == ["rocprofv3_results_fused/stats.csv"]


def analyze(bench: Bench, baseline: str, fused: str) -> Done:
    """The comparison of two folders."""
    tool = str(ROOT / "analysis_tools" / "analyze_kernel_reduction.py")
    process = bench.start([sys.executable, tool, "--baseline", baseline, "--fused", fused, "--top", "0"])
    stdout, stderr = process.communicate(timeout=60)
    return Done(process.returncode, stdout, stderr)


def test_what_all_profilers_wrote_can_be_compared(bench, all_profilers):
    """Where the PyTorch profiler left nothing, rocprofv3's statistics; test_analysis_tools.py has its profiles."""
    bench.install("rocprofv3")
    run = ["--enable-rocm-tools", "--profile-dir"]
    all_profilers(*run, "off", "--disable-all-fusion", "--num-steps", "2").succeeded()
    all_profilers(*run, "on", "--seq-len", "8").succeeded()
    note, other = bench.script, bench.script.with_name("tiny_other_v2.py")
    bench.script = shutil.copy(note, other)
    all_profilers(*run, "other").succeeded()
    bench.script = note
    result = analyze(bench, "off", "on").succeeded()
    assert reduction(BASELINE[1] / 2, FUSED[1]) in result.stdout
    assert "- note: seq_len differs: 64 for baseline; 8 for fused" in result.stdout.partition("- Kernels")[0]
    assert "- fused: `on/rocprofv3_results_fused` (tiny_note_v2, 1 steps" in result.stdout
    analyze(bench, "off", "other").failed("fused of tiny_other", status=2, lines=1)
    all_profilers(*run, "on", "--disable-all-fusion").succeeded()
    analyze(bench, "off", "on").failed("several profiles", "rocprofv3_results_fused", status=2, lines=1)


def test_all_profilers_go_on_after_a_failure(bench, all_profilers):
    environment = {"run_pytorch_profiler": "3", "STANDIN_FAIL": "rocprofv3:status"}
    all_profilers("--enable-rocm-tools", "--profile-dir", "out", **environment).failed("pytorch_profiler", "rocprofv3")
    steps = all_steps(bench.work / "out")
    assert [step["status"] for step in steps.values()] == ["failed", "ok", "failed", "ok", "ok"]
    assert steps["pytorch_profiler"]["exit_status"] == 3
    assert not steps["rocprofv3"]["files"]


def test_all_profilers_interrupted(bench, all_profilers):
    python = str(bench.directory / "python")
    command = bench.command("run_all_profilers.sh", "--enable-rocm-tools", "--profile-dir", "out")
    process = bench.start(command, WAIT="1", PYTHON=python)
    interrupt(process, bench, runs=0)
    assert process.returncode in (130, -signal.SIGINT)
    assert list(all_steps(bench.work / "out"))[:2] == ["pytorch_profiler", "flops"]
    assert len(bench.received()) == 1  # nothing else was started


@pytest.mark.parametrize("argv", [["--script", "missing.py"], ["--profile-dir", "file/below"], ["--profile-dir"]])
def test_all_profilers_bad_option(bench, all_profilers, argv):
    (bench.work / "file").write_text("")
    all_profilers(*argv).failed(argv[0], status=2, lines=1)


def test_all_profilers_take_an_option_and_its_value_as_one_word(bench, all_profilers):
    all_profilers("--script=tiny_llama_v2.py", "--profile-dir=out").succeeded()
    assert strict_json((bench.work / "out" / "summary.json").read_text())["script"] == "tiny_llama_v2.py"
    assert [path.name for path in bench.work.iterdir()] == ["out"]


def test_all_profilers_do_not_list_what_an_earlier_run_left(bench, all_profilers):
    report = bench.work / "out" / "pytorch" / "tiny_llama_v1_report.md"
    report.parent.mkdir(parents=True)
    report.write_text("of an earlier run\n")
    os.utime(report, (1, 1))
    all_profilers("--profile-dir", "out").succeeded()
    assert all_steps(bench.work / "out")["pytorch_profiler"]["files"] == []
    assert report.exists()


def test_all_profilers_help(bench, all_profilers):
    text = all_profilers("--help").succeeded().stdout
    assert all(option in text for option in ("--enable-rocm-tools", "--profile-dir", "--script"))
    assert not list(bench.work.iterdir())


def test_all_profilers_with_the_real_script(bench, tiny_llama):
    missing = "rocprof-sys-run"
    bench.install(*(tool for tool in TOOLS if tool != missing))
    tiny_llama("run_all_profilers.sh", "--enable-rocm-tools", "--profile-dir", "all results").succeeded()
    steps = all_steps(bench.work / "all results")
    for name in ("pytorch_profiler", "flops", "rocprofv3", "rocprof_compute"):
        assert steps[name]["status"] == "ok"
        assert steps[name]["files"]
    assert steps["rocprof_sys"]["status"] == "skipped"
    assert missing in steps["rocprof_sys"]["reason"]
    result = analyze(bench, "all results", "all results").succeeded()
    assert "- fused: `all results/pytorch` (tiny_llama_v2, 3 steps, run_pytorch_profiler.py)" in result.stdout

"""The run_*.sh wrappers with stand-ins for ROCm's profilers (tests/standins/rocm.py) around a small
script that notes its arguments. With real scripts, and from the exercises' get_*.sh, they run in
the sheets, see test_exercises.py.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT, read_rows, strict_json, words

STANDIN = ROOT / "tests/standins/rocm.py"
TOOLS = ("rocprofv3", "rocprof-sys-run", "rocprof-compute", "rocminfo")
ROCPROFV3, SYS, COMPUTE = "run_rocprofv3.sh", "run_rocprof_sys.sh", "run_rocprof_compute.sh"
ALL = "run_all_profilers.sh"
TOOL_OF = {ROCPROFV3: "rocprofv3", SYS: "rocprof-sys-run", COMPUTE: "rocprof-compute"}
FOLDER_OF = {
    ROCPROFV3: "rocprofv3_results_fused",
    SYS: "rocprof_sys_results",
    COMPUTE: "rocprof_compute_results",
}
FUSED = (3, 48)  # distinct kernels and dispatches of one process that the stand-ins report
REDUCTION = "- Kernels {}: 96 -> 48\n- Kernel reduction: 50.0 %\n"
ADDED = ["--under-profiler", "--enable-rocm-profiling"]
AWKWARD = ["two words", ";", "$(touch injected)", "`touch injected`", "it's", '"', "\\", ""]
AWKWARD += ["two\nlines", "*", "~"]

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
    result = {group: {} for group in ("training", "environment", "memory", "kernels", "loss")}
    result |= {"schema_version": 1, "script": name, "status": "ok", "timing": {"steps": steps}}
    result["environment"] = {"device_name": "a stand-in"}
    result["config"] = {"seq_len": int(value("--seq-len", "64"))}
    unfinished = directory / f"{name}_summary.json.tmp"
    unfinished.write_text(json.dumps(result))
    unfinished.rename(directory / f"{name}_summary.json")  # whole or not at all, as our scripts
time.sleep(int(os.environ.get("WAIT", "0")))
sys.exit(int(os.environ.get("STATUS", "0")))
"""

# In place of our two Python profilers: ends as the variable of its name says.
PYTHON = f"""#!/bin/bash
name=${{1##*/}}
case $name in run_pytorch_profiler.py | run_deepspeed_flops.py)
    printf '%s\\0' "${{@:2}}" > "$RECORD.$name"
    echo "$name says why" >&2
    name=${{name%.py}}
    exit "${{!name:-0}}" ;;
esac
exec "{sys.executable}" "$@"
"""


class Done(NamedTuple):
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    def succeeded(self) -> Done:
        assert self.status == 0, self.stderr
        return self

    def failed(self, *texts: str, status: int | None = None) -> Done:
        """Its last line has all of the texts, and is no message of Python or bash."""
        assert self.status and status in (None, self.status), (self.status, self.stderr)
        last = self.stderr.splitlines()[-1]
        assert all(text in last for text in texts), self.stderr
        assert "Traceback" not in self.stderr and ".sh: line " not in last, self.stderr
        return self


class Bench:
    """A directory to work in, a PATH with chosen tools on it, and what these were called with."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.work = directory / "work"
        self.bin = directory / "bin"
        self.work.mkdir()
        self.bin.mkdir()
        self.script = self.write("tiny_note_v2.py", SCRIPT)
        self.write("bin/python3", PYTHON)  # a link would lose the environment
        self.environment = {
            "PATH": f"{self.bin}:{os.defpath}",
            "HOME": str(directory),
            "PYTHONDONTWRITEBYTECODE": "1",
            "STANDIN_LOG": str(directory / "log"),
            "RECORD": str(directory / "record"),
        }
        self.install(*TOOLS)

    def write(self, name: str, text: str) -> Path:
        """An executable file."""
        path = self.directory / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def install(self, *tools: str) -> None:
        """Have these tools, and no others, on PATH."""
        for old in TOOLS:
            (self.bin / old).unlink(missing_ok=True)
        for tool in tools:
            (self.bin / tool).symlink_to(STANDIN)

    def start(self, *command: object, **more: str) -> subprocess.Popen:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        pipes |= {"text": True, "cwd": self.work, "env": {**self.environment, **more}}
        # in the background of a shell Ctrl-C is ignored, and so it would be here
        unignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        command = list(map(str, command))
        return subprocess.Popen(command, **pipes, start_new_session=True, preexec_fn=unignore)

    def call(self, *command: object, **environment: str) -> Done:
        process = self.start(*command, **environment)
        stdout, stderr = process.communicate(timeout=120)
        return Done(process.returncode, stdout, stderr)

    def run(self, wrapper: str, *argv: str, **environment: str) -> Done:
        """A wrapper around the script that notes its arguments."""
        return self.call(ROOT / wrapper, "--script", self.script, *argv, **environment)

    def calls(self, tool: str) -> list[dict]:
        """The calls of a tool so far: argv, application."""
        return [call for call in self.lines("log") if call["tool"] == tool]

    def received(self) -> list[list[str]]:
        """The arguments of every run of the script so far."""
        return self.lines("record")

    def lines(self, name: str) -> list:
        path = self.directory / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def results(self, wrapper: str = ROCPROFV3) -> Path:
        return self.work / FOLDER_OF[wrapper]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def files(directory: Path) -> dict[str, bytes]:
    """All files below a directory with their content."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def shell_words(line: str) -> list[str]:
    """The words that bash makes of a printed command."""
    command = ["bash", "-c", f"printf '%s\\0' {line}"]
    return subprocess.check_output(command, text=True).split("\0")[:-1]


# --- what all wrappers do

TABLES = "--marker-trace --output-format csv --selected-regions"
# a wrapper with options of its own, the options of the tool, and a file that it makes and names
COMMANDS = {
    ROCPROFV3: (f"--kernel-trace --stats {TABLES} -o %pid%", "stats.csv"),
    f"{ROCPROFV3} --mode=trace --hsa": (
        "--sys-trace --output-format pftrace --selected-regions -o %pid%",
        "*_results.pftrace",
    ),
    f"{ROCPROFV3} --mode counters --enable-cuda-graph": (
        f"--pmc SQ_WAVES SQ_INSTS_VALU GRBM_GUI_ACTIVE {TABLES} --hip-graph-trace -o %pid%",
        "*_counter_collection.csv",
    ),
    f"{SYS} --sample": ("--trace --profile --sample cputime", "perfetto-trace-*.proto"),
    COMPUTE: ("profile -n tiny_note_v2_fused", "roofline_analysis.csv"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_printed_command_is_the_one_that_is_run(bench, command):
    """With awkward arguments, into a folder that is named like an option, by another Python."""
    (wrapper, *own), (options, file) = words(command), COMMANDS[command]
    tool, parent = TOOL_OF[wrapper], bench.work / '--a "place\\"; with\n $(odd) name'
    python = str(shutil.copy(bench.bin / "python3", bench.directory / "my python"))
    argv = ["--note", *AWKWARD, "--seq-len=8", "--num-steps", "3", "--warmup-steps", "0"]
    own += [f"--output-dir={parent.name}", *argv]
    dry = bench.run(wrapper, *own, "--dry-run", PYTHON=python).succeeded()
    assert not bench.received() and not parent.exists()
    result = bench.run(wrapper, *own, PYTHON=python).succeeded()
    (call,) = (call for call in bench.calls(tool) if call["application"])
    assert shell_words(dry.stdout) == [tool, *call["argv"]]
    found = call["argv"][: call["argv"].index("--")]
    place = next(found.index(name) for name in ("-d", "-p", "-o") if name in found)
    assert " ".join(found[:place] + found[place + 2 :]) == options
    assert call["application"][0] == python
    for received in bench.received():
        added = received[: -len(argv)]
        assert received[-len(argv) :] == argv and {*ADDED} <= {*added}
        assert parent in (bench.work / added[added.index("--profile-dir") + 1]).parents
    (path,) = (parent / FOLDER_OF[wrapper]).rglob(file)
    assert str(path.relative_to(bench.work)) in result.stdout
    assert [*bench.work.iterdir()] == [parent] and not [*bench.directory.rglob("injected")]


MISTAKES = {
    ROCPROFV3: "--mode metrics; --mode; --from-db missing.db; --mode=counters --counters=; --hsa;"
    " --hsa=yes",
    SYS: "--script missing.py; --script=; --output-dir=; --output-dir file/below",
    COMPUTE: "--mode roofline; --mode analyze --seq-len 64; --mode analyze; --dispatch 7",
    ALL: "--profile-dir; --output-dir out; --profile-dir file/below",
}


@pytest.mark.parametrize("wrapper", MISTAKES)
def test_help_and_mistakes_name_the_option_and_run_nothing(bench, wrapper):
    (bench.work / "file").write_text("not a directory")
    text = bench.run(wrapper, "--help").succeeded().stdout
    own = re.findall('^(?:flags|values)="(.*)"', (ROOT / wrapper).read_text(), re.MULTILINE)
    assert own and all(option in text for option in ("--script", *words(" ".join(own))))
    for options in MISTAKES[wrapper].split(";"):
        named = re.findall("--[a-z-]+|file", options)[-1]
        result = bench.run(wrapper, *words(options)).failed(named, status=2)
        assert len(result.stderr.splitlines()) == 1
    assert not bench.received()
    assert files(bench.work) == {"file": b"not a directory"}


# --- failures: one line, and what was there before stays


@pytest.mark.parametrize(
    ("command", "modes"),
    [
        (ROCPROFV3, "script nothing truncated"),
        (f"{ROCPROFV3} --mode counters", "truncated"),
        (SYS, "nothing"),
        (f"{COMPUTE} --roof-only", "nothing"),
        (COMPUTE, "truncated"),
    ],
)
def test_a_failure_leaves_earlier_results(bench, command, modes):
    """Of the tool, as STANDIN_FAIL has it, or of the script."""
    wrapper, *own = words(command)
    before: dict[str, bytes] = {}
    # the first one without earlier results, then with some
    for mode in [*words(modes), words(modes)[0]]:
        environment = {"STATUS": "3"} if mode == "script" else {"STANDIN_FAIL": mode}
        result = bench.run(wrapper, *own, **environment)
        result.failed(status=3 if mode == "script" else None)
        line = result.stderr.splitlines()[-1]
        assert TOOL_OF[wrapper] in line or FOLDER_OF[wrapper] in line
        for word in (word for word in words(line) if FOLDER_OF[wrapper] in word):
            assert (bench.work / word.rstrip(":,;")).exists(), line
        assert "Dispatches:" not in result.stdout
        if not before:
            bench.run(wrapper, *own).succeeded()
            before = {n: text for n, text in files(bench.work).items() if ".failed/" not in n}
        assert before.items() <= files(bench.work).items()


def test_a_folder_has_one_owner_and_a_signal_leaves_earlier_results_and_what_was_written(bench):
    bench.run(ROCPROFV3).succeeded()
    earlier = files(bench.work)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        runs = len(bench.received())
        process = bench.start(ROOT / ROCPROFV3, "--script", bench.script, WAIT="60")
        deadline = time.monotonic() + 30
        while not [*bench.work.rglob("hotspots/*_summary.json")] or len(bench.received()) == runs:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        before = files(bench.work)
        bench.run(ROCPROFV3).failed("another profiler is writing there", status=2)
        assert files(bench.work) == before
        os.killpg(process.pid, number)  # as a terminal does it
        stderr = process.communicate(timeout=30)[1]
        assert process.returncode == 128 + number, stderr
        assert len(bench.received()) == runs + 1 and earlier.items() <= files(bench.work).items()
        (summary,) = bench.work.rglob("*.failed/tiny_note_v2_summary.json")
        assert summary.parent.name in stderr
        with pytest.raises(ProcessLookupError):  # nothing of it still runs
            os.killpg(process.pid, 0)


def test_two_rocprofiler_sdk_in_one_process_are_said_before_the_run(bench):
    """Of a PyTorch that brings its own, alone (pytorch.org) or with ROCm (TheRock), beside that of
    the tool."""
    site, rocm = bench.directory / "site", bench.directory / "rocm"
    for package in (rocm, site / "torch", site / "_rocm_sdk_core"):
        (package / "lib").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "lib/librocprofiler-sdk.so.1").touch()
    (rocm / "bin").mkdir()
    shutil.copy(STANDIN, rocm / "bin/rocprofv3")
    path = {"PATH": f"{rocm}/bin:{bench.bin}:{os.defpath}", "PYTHONPATH": str(site)}
    stderr = bench.run(ROCPROFV3, **path).succeeded().stderr
    assert f"{rocm}/lib/" in stderr and f"export PATH={site}/_rocm_sdk_core/bin:$PATH" in stderr
    shutil.rmtree(site / "_rocm_sdk_core")
    assert "AMD's containers" in bench.run(ROCPROFV3, **path).succeeded().stderr
    (site / "torch/lib/librocprofiler-sdk.so.1").unlink()
    assert "rocprofiler-sdk" not in bench.run(ROCPROFV3, **path).succeeded().stderr


# --- run_rocprofv3.sh


@pytest.mark.parametrize(("mode", "rocm"), [("hotspots", "6"), ("kernels", "7")])
def test_statistics_are_those_of_all_processes(bench, mode, rocm):
    environment = {"STANDIN_ROCM": rocm, "STANDIN_PROCESSES": "3"}
    result = bench.run(ROCPROFV3, "--mode", mode, **environment).succeeded()
    assert f"Distinct kernels: {FUSED[0]}\nDispatches: {3 * FUSED[1]}\n" in result.stdout
    gemm = read_rows(next(bench.results().rglob("stats.csv")))[0]
    assert (gemm["Name"].partition("_")[0], int(gemm["Calls"])) == ("Cijk", 3 * 24)
    assert int(gemm["TotalDurationNs"]) == 3 * 24 * 41_000


def test_both_sides_are_compared_and_a_part_of_the_fusions_with_nothing(bench):
    """How two runs are compared is tested with analyze_kernel_reduction.py."""
    run = functools.partial(bench.run, ROCPROFV3, "--num-steps", "2")
    assert "Kernel reduction" not in run().succeeded().stdout
    result = run("--disable-all-fusion").succeeded()
    assert REDUCTION.format("per step").replace("96 -> 48", "48 -> 24") in result.stdout
    before = files(bench.work)
    assert "Kernel reduction" not in run("--disable-qkv-fusion").succeeded().stdout
    assert before.items() <= files(bench.work).items()
    # of a profile directory of the user the number of steps is not known
    result = run("--profile-dir", "my dir").succeeded()
    assert REDUCTION.format("in all") in result.stdout
    bench.script = bench.script.rename(bench.directory / "tiny_other_v2.py")
    run().failed("baseline is a run of tiny_note, fused of tiny_other", status=2)
    assert (bench.results() / "hotspots" / "tiny_other_v2_summary.json").exists()


def test_rocm_6_records_the_warm_up_too_so_nothing_is_divided_by_steps(bench):
    """Its rocprofv3 has no --selected-regions."""
    run = functools.partial(bench.run, ROCPROFV3, STANDIN_ROCM="6")
    run("--disable-all-fusion", "--num-steps", "2").succeeded()
    result = run("--num-steps", "2").succeeded()
    assert REDUCTION.format("in all") in result.stdout
    assert "baseline, fused have the warm-up" in result.stdout
    run("--mode", "counters").failed("rocprofv3 does not know --pmc", status=4)


SIDES = {
    "--enable-flash-attention --enable-torch-compile --enable-cuda-graph": "fused",
    "--disable-all-fusion --disable-a --enable-cuda-graph --enable-x-profiling": "baseline",
    "--script tiny_llama_v1.py": "baseline",
    "--disable-all-fusion --enable-flash-attention": "partial",
    "--enable-a --disable-triton-b": "partial",
}


def test_sides_and_a_part_of_the_fusions_have_folders(bench):
    bench.install()
    for options, folder in SIDES.items():
        dry = bench.run(ROCPROFV3, "--dry-run", *words(options)).succeeded().stdout
        assert f"/rocprofv3_results_{folder}/" in dry, options


def test_statistics_of_a_database(bench):
    """A damaged one changes nothing."""
    bench.call(*words("rocprofv3 --kernel-trace -o run -- date")).succeeded()
    argv = [ROCPROFV3, "--from-db", "run_results.db"]
    assert f"Dispatches: {FUSED[1]}\n" in bench.run(*argv).succeeded().stdout
    before = files(bench.results())
    with sqlite3.connect(bench.work / "run_results.db") as connection:
        connection.execute("DROP VIEW kernels")
    bench.run(*argv).failed("run_results.db")
    assert files(bench.results()) == before


# --- run_rocprof_compute.sh


def test_rocprof_compute_and_analyze_of_its_last_profile(bench):
    result = bench.run(COMPUTE, "--output-dir", "two\nlines").succeeded()
    next_command = shell_words(result.stdout.rpartition("next: ")[2])
    assert "Dispatch List" in bench.call(*next_command).succeeded().stdout
    bench.run(COMPUTE).succeeded()
    for received in bench.received():  # several runs, so few steps unless told otherwise
        assert received[-4:] == words("--num-steps 2 --warmup-steps 1")
    rows = read_rows(bench.results(COMPUTE) / "roofline_analysis.csv")
    assert {int(row["Dispatch_ID"]) for row in rows} == {*range(FUSED[1])}
    for row in rows:
        assert ("gemm" in row["Category"]) == row["Kernel_Name"].startswith("Cijk")

    bench.run(COMPUTE, STANDIN_FAIL="nothing").failed()  # this newer profile is not taken
    before, runs = files(bench.work), len(bench.received())
    attention = next(r["Dispatch_ID"] for r in rows if "attn_fwd" in r["Kernel_Name"])
    argv = ["--mode", "analyze", "--dispatch", attention]
    dry = bench.run(COMPUTE, "--dry-run", *argv).succeeded()
    result = bench.run(COMPUTE, *argv).succeeded()
    assert all(text in result.stdout for text in ("attn_fwd.kd", "Speed-of-Light"))
    assert shell_words(dry.stdout)[1:] == bench.calls("rocprof-compute")[-1]["argv"]
    bench.run(COMPUTE, *argv[:-1], "99999").failed("rocprof-compute")
    assert (files(bench.work), len(bench.received())) == (before, runs)
    bench.run(COMPUTE, "--roof-only").succeeded()
    assert "is of --roof-only" in bench.run(COMPUTE, "--mode=analyze").succeeded().stderr


def test_the_installed_rocprof_compute_says_what_it_takes_and_which_gpus_it_knows(bench):
    """Later releases name the folder otherwise, draw nothing, and leave databases."""
    bench.run(COMPUTE, STANDIN_GPU="gfx1151").failed("gfx1151", "run_rocprofv3.sh", status=4)
    bench.run(COMPUTE, STANDIN_GPU="gfx1036,gfx942").succeeded()  # one is beside a consumer's
    new = {"STANDIN_ROCM": "10", "STANDIN_GPU": "gfx1151"}
    bench.run(COMPUTE, **new).succeeded()
    assert "--output-directory" in bench.calls("rocprof-compute")[-1]["argv"]
    rows = read_rows(bench.results(COMPUTE) / "roofline_analysis.csv")
    assert {int(row["Dispatch_ID"]) for row in rows} == {*range(1, FUSED[1] + 1)}
    argv = ["--mode", "analyze", "--dispatch", rows[0]["Dispatch_ID"]]
    assert rows[0]["Kernel_Name"] in bench.run(COMPUTE, *argv, **new).succeeded().stdout
    assert "draws rooflines when it analyzes" in bench.run(COMPUTE, "--roof-only", **new).stderr
    folder = bench.work / "mine"
    result = bench.run(COMPUTE, "--result-dir", folder, **new).succeeded()
    (link,) = folder.glob("workloads/*/rocprof")
    assert [*link.glob("out/*/*/*.db")] and str(link) in result.stdout
    before = files(folder)
    bench.run(COMPUTE, "--result-dir", folder, **new).failed("mine", "exists", status=2)
    assert files(folder) == before
    bench.run(COMPUTE, STANDIN_FAIL="truncated", **new).failed("_results.db")


# --- run_all_profilers.sh


def all_steps(folder: Path) -> dict[str, dict]:
    """The steps of summary.json by name; summary.md says the same."""
    steps = strict_json((folder / "summary.json").read_text())["steps"]
    text = (folder / "summary.md").read_text()
    for step in steps:
        assert all((folder / file).is_file() for file in step["files"])
        assert all(part in text for part in (step["name"], step["status"], step["reason"] or ""))
    return {step["name"]: step for step in steps}


def test_all_profilers_get_the_arguments_and_skip_what_is_missing(bench):
    """What an earlier run left is not listed."""
    own = ["--enable-rocm-tools", "--profile-dir", "all results"]
    argv = ["--note", *AWKWARD, "--num-steps", "3", "--warmup-steps", "0"]
    dry = bench.run(ALL, "--dry-run", *own, *argv).succeeded()
    bench.run(ALL, *own, *argv).succeeded()
    folder = bench.work / "all results"
    assert [step["status"] for step in all_steps(folder).values()] == ["ok"] * 5
    assert [*bench.work.iterdir()] == [folder]
    ours = [path.read_text() for path in bench.directory.glob("record.*")]
    received = [*bench.received(), *(text.split("\0")[:-1] for text in ours)]
    received += map(shell_words, dry.stdout.splitlines())
    assert len(received) == 2 + 4 + 5  # rocprof-compute runs the script twice
    assert all(line[-len(argv) :] == argv for line in received)

    (folder / "pytorch").mkdir()
    report = folder / "pytorch/tiny_note_v2_report.md"
    report.write_text("of an earlier run\n")
    os.utime(report, (1, 1))
    bench.install("rocprofv3")
    bench.run(ALL, *own, run_deepspeed_flops="4").succeeded()
    steps = all_steps(folder)
    assert [s["status"] for s in steps.values()] == words("ok skipped ok skipped skipped")
    assert steps["pytorch_profiler"]["files"] == []
    assert steps["flops"]["reason"] == "run_deepspeed_flops.py says why"
    assert steps["rocprofv3"]["files"] == ["rocprofv3_results_fused/stats.csv"]
    assert "rocprof-sys-run" in steps["rocprof_sys"]["reason"]
    bench.run(ALL, *own, run_pytorch_profiler="3").failed("pytorch_profiler", status=1)
    missing = {"run_pytorch_profiler": "4", "run_deepspeed_flops": "4"}
    bench.run(ALL, *own[1:], **missing).failed("nothing ran", status=4)

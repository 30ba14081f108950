"""The run_*.sh wrappers, and the exercises' scripts that call them, with stand-ins for ROCm's
profilers.

The stand-ins (tests/standins) take the options of the real tools, refuse all others, and write
files of the same formats. They profile a small script that notes its arguments; with real scripts
the wrappers run in the sheets, see test_exercises.py.
"""

from __future__ import annotations

import contextlib
import csv
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
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, strict_json, words

STANDINS = ROOT / "tests" / "standins"
PROGRAMS = words(
    "bash basename cat cut date dirname find flock grep ln mkdir mv readlink rm sed sleep sort "
    "tail touch tr true"
)
TOOLS = ("rocprofv3", "rocpd", "rocpd2csv", "rocprof-sys-run", "rocprof-compute", "rocminfo")
ROCPROFV3, SYS, COMPUTE = "run_rocprofv3.sh", "run_rocprof_sys.sh", "run_rocprof_compute.sh"
ALL = "run_all_profilers.sh"
TOOL_OF = {ROCPROFV3: "rocprofv3", SYS: "rocprof-sys-run", COMPUTE: "rocprof-compute"}
FOLDER_OF = {
    ROCPROFV3: "rocprofv3_results_fused",
    SYS: "rocprof_sys_results",
    COMPUTE: "rocprof_compute_results",
}
# what the stand-ins report: distinct kernels and dispatches of one process
FUSED, BASELINE = (3, 48), (4, 96)
ADDED = ["--under-profiler", "--enable-rocm-profiling"]
AWKWARD = [
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
]

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
    (directory / f"{name}_summary.json").write_text(json.dumps(result))
if "WAIT" in os.environ:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
sys.exit(int(os.environ.get("STATUS", "0")))
"""

# In place of our two Python profilers: notes its arguments, and ends as the variable of its name
# says.
OURS = """
import json, os, pathlib, sys
name = pathlib.Path(sys.argv[1]).stem
with open(os.environ["RECORD"] + "_ours", "a") as record:
    record.write(json.dumps(sys.argv[2:]) + "\\n")
print(name, "says why", file=sys.stderr)
sys.exit(int(os.environ.get(name, "0")))
"""
PYTHON = f"""#!/bin/sh
case ${{1##*/}} in run_pytorch_profiler.py | run_deepspeed_flops.py) set -- "$OURS" "$@" ;; esac
exec "{sys.executable}" "$@"
"""

every_wrapper = pytest.mark.parametrize("wrapper", TOOL_OF)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    def succeeded(self) -> Done:
        assert self.status == 0, self.stderr
        return self

    def failed(self, *texts: str, status: int | None = None, lines: int | None = None) -> Done:
        """It ended with an error whose last line has all of the texts, and is no message of
        Python or bash."""
        assert self.status != 0 if status is None else self.status == status, (
            self.status,
            self.stderr,
        )
        found = self.stderr.splitlines()
        assert found, self.stdout
        assert lines in (None, len(found)), self.stderr
        assert [text for text in texts if text not in found[-1]] == [], self.stderr
        assert "Traceback" not in self.stderr
        assert ".sh: line " not in found[-1], self.stderr
        return self


def unignore_signals() -> None:
    """Tests in the background of a shell ignore Ctrl-C, those of nohup the end of the terminal, and
    so would what they start; bash cannot trap a signal that it was told to ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Bench:
    """A directory to work in, a PATH with chosen tools on it, and what these were called with."""

    def __init__(self, directory: Path):
        self.directory, self.work, self.bin = directory, directory / "work", directory / "bin"
        for name in ("work", "bin", "home"):
            (directory / name).mkdir()
        for name in PROGRAMS:
            (self.bin / name).symlink_to(shutil.which(name))
        self.script = self.write("tiny_note_v2.py", SCRIPT)
        self.write("bin/python3", PYTHON)  # a link would lose the environment
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(directory / "home"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "STANDIN_LOG": str(directory / "log"),
            "RECORD": str(directory / "record"),
            "OURS": str(self.write("ours.py", OURS)),
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
            (self.bin / tool).symlink_to(STANDINS / tool)

    def start(
        self, *command: object, cwd: Path | None = None, **environment: str
    ) -> subprocess.Popen:
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        pipes |= {"cwd": cwd or self.work, "env": {**self.environment, **environment}}
        return subprocess.Popen(
            list(map(str, command)), start_new_session=True, preexec_fn=unignore_signals, **pipes
        )

    def call(self, *command: object, cwd: Path | None = None, **environment: str) -> Done:
        process = self.start(*command, cwd=cwd, **environment)
        stdout, stderr = process.communicate(timeout=120)
        return Done(process.returncode, stdout, stderr)

    def run(self, wrapper: str, *argv: str, cwd: Path | None = None, **environment: str) -> Done:
        """A wrapper around the script that notes its arguments."""
        return self.call(ROOT / wrapper, "--script", self.script, *argv, cwd=cwd, **environment)

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

    def nothing_happened(self) -> bool:
        """The script did not run, and no file was made."""
        return not self.received() and not list(self.work.iterdir())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """All stand-ins on a PATH that has nothing else but python3 and what shells need."""
    return Bench(tmp_path)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Its rows."""
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def files(directory: Path) -> dict[str, bytes]:
    """All files below a directory with their content."""
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def shell_words(line: str) -> list[str]:
    """The words that bash makes of a printed command."""
    output = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True
    )
    return output.stdout.split("\0")[:-1]


def counted(result: Done, kernels: int, dispatches: int) -> bool:
    """Whether it printed these numbers."""
    return {f"Distinct kernels: {kernels}", f"Dispatches: {dispatches}"} <= set(
        result.stdout.splitlines()
    )


REFUSED_6 = (
    "--selected-regions",
    "--pmc SQ_WAVES",
    "--collection-period 1:2:1",
    "--output-format rocpd",
)


@pytest.mark.parametrize("options", REFUSED_6)
def test_rocprofv3_of_rocm_6_refuses_what_came_later(bench, options):
    command = words(f"rocprofv3 --kernel-trace {options} -- true")
    bench.call(*command).succeeded()
    bench.call(*command, STANDIN_ROCM="6").failed(status=2)


REFUSED = "rocprofv3 --kernel-trace --metrics X -- true; rocprofv3 --stats -- true"
REFUSED += "; rocprofv3 --kernel-tra -- true"
REFUSED += (
    "; rocprof-sys-run -P -F -- true; rocprof-sys-run -T true; rocprof-compute profile -- true"
)


@pytest.mark.parametrize("command", REFUSED.split("; "))
def test_a_standin_refuses_what_the_tool_refuses(bench, command):
    bench.call(*words(command)).failed(status=2)


# --- what all wrappers do

OWN_OPTIONS = {
    ROCPROFV3: "--mode --hsa --compare --from-db --counters",
    SYS: "--sample",
    COMPUTE: "--roof-only --mode --dispatch --list-stats",
    ALL: "--enable-rocm-tools --profile-dir",
}


@pytest.mark.parametrize("wrapper", OWN_OPTIONS)
def test_help_names_every_option(bench, wrapper):
    bench.install()
    text = bench.run(wrapper, "--help").succeeded().stdout
    common = "--script --help --dry-run" + " --output-dir --result-dir" * (wrapper in TOOL_OF)
    assert [
        option for option in words(f"{common} {OWN_OPTIONS[wrapper]}") if option not in text
    ] == []
    assert bench.nothing_happened()


COUNTERS = "SQ_WAVES SQ_INSTS_VALU GRBM_GUI_ACTIVE"
REGIONS = "--selected-regions -o %pid%"
TABLES = f"--marker-trace --output-format csv {REGIONS}"
# a wrapper with options of its own, the options of the tool, and a file that it makes and names
COMMANDS = {
    ROCPROFV3: (f"--kernel-trace --stats {TABLES}", "stats.csv"),
    f"{ROCPROFV3} --compare": (f"--kernel-trace --stats {TABLES}", "stats.csv"),
    f"{ROCPROFV3} --mode kernels": (
        f"--kernel-trace --stats --marker-trace {REGIONS}",
        "kernels/stats.csv",
    ),
    f"{ROCPROFV3} --mode=trace": (
        f"--runtime-trace --output-format pftrace {REGIONS}",
        "*_results.pftrace",
    ),
    f"{ROCPROFV3} --mode trace --hsa": (
        f"--sys-trace --output-format pftrace {REGIONS}",
        "*_results.pftrace",
    ),
    f"{ROCPROFV3} --mode counters --counters=FETCH_SIZE": (
        f"--pmc FETCH_SIZE {TABLES}",
        "*_counter_collection.csv",
    ),
    f"{ROCPROFV3} --mode counters": (f"--pmc {COUNTERS} {TABLES}", "*_counter_collection.csv"),
    SYS: ("--trace --profile", "perfetto-trace-*.proto"),
    f"{SYS} --sample": ("--trace --profile --sample cputime", "perfetto-trace-*.proto"),
    COMPUTE: ("profile -n tiny_note_v2_fused", "roofline_analysis.csv"),
    f"{COMPUTE} --roof-only": (
        "profile --roof-only --kernel-names -n tiny_note_v2_fused_roof",
        "empirRoof_*.pdf",
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_printed_command_is_the_one_that_is_run(bench, command):
    """With awkward arguments, from another directory, into another one, by another Python."""
    (wrapper, *own), (options, file) = words(command), COMMANDS[command]
    tool, home, parent = (
        TOOL_OF[wrapper],
        bench.directory / "home",
        bench.directory / 'a "place\\"; with\n $(odd) name',
    )
    python = str(shutil.copy(bench.bin / "python3", bench.directory / "my python"))
    argv = ["--note", *AWKWARD, "--seq-len=8", "--num-steps", "3", "--warmup-steps", "0"]
    run = functools.partial(
        bench.run, wrapper, *own, f"--output-dir={parent}", *argv, cwd=home, PYTHON=python
    )
    bench.install()
    dry = run("--dry-run").succeeded()
    assert bench.nothing_happened()
    assert not parent.exists()
    bench.install(*TOOLS)
    result = run().succeeded()
    calls = bench.calls(tool)
    assert [shell_words(line) for line in dry.stdout.splitlines() if line] == [
        [tool, *call["argv"]] for call in calls
    ]
    assert len(calls) == 1 + ("--compare" in own)
    for call in calls:
        found = call["argv"][: call["argv"].index("--")]
        place = next(found.index(name) for name in ("-d", "-p", "-o") if name in found)
        assert " ".join(found[:place] + found[place + 2 :]) == options
        assert call["application"][0] == python
    for received in bench.received():
        added = received[: -len(argv)]
        assert received[-len(argv) :] == argv
        assert set(ADDED) <= set(added)
        assert parent in Path(added[added.index("--profile-dir") + 1]).parents
    (path,) = (parent / FOLDER_OF[wrapper]).rglob(file)
    assert str(path) in result.stdout
    assert not [*bench.work.iterdir(), *home.iterdir(), *bench.directory.rglob("injected")]


@pytest.mark.parametrize("wrapper", OWN_OPTIONS)
def test_a_wrapper_finds_its_parts_through_links_or_says_which_is_missing(bench, wrapper):
    """Through a link to a link that lies elsewhere; a copy has no parts."""
    (bench.directory / "first").symlink_to(ROOT / wrapper)
    link = bench.directory / "a link"
    link.symlink_to("first")
    dry = bench.call(link, "--script", bench.script, "--dry-run").succeeded()
    assert dry.stdout == bench.run(wrapper, "--dry-run").succeeded().stdout
    copy = shutil.copy(ROOT / wrapper, bench.directory / "copy")
    done = bench.call(copy, "--script", bench.script)
    assert (done.status, done.stdout, done.stderr.count("\n")) == (4, "", 1)
    assert "lab/rocm/common.sh: No such file" in done.stderr


@pytest.mark.parametrize("wrapper", OWN_OPTIONS)
def test_an_interpreter_that_is_not_there_is_one_line(bench, wrapper):
    bench.run(wrapper, PYTHON="/nonexistent").failed("/nonexistent", status=4, lines=1)
    assert bench.nothing_happened()


@every_wrapper
def test_a_folder_may_be_named_like_an_option(bench, wrapper):
    bench.run(wrapper, "--output-dir", "--").succeeded()
    assert [path.name for path in bench.work.iterdir()] == ["--"]


@every_wrapper
def test_missing_tool_is_one_line(bench, wrapper):
    bench.install("rocminfo")
    bench.run(wrapper).failed(TOOL_OF[wrapper], "run_pytorch_profiler.py", status=4, lines=1)
    assert bench.nothing_happened()


MISTAKES = {
    ROCPROFV3: "--mode metrics; --mode; --from-db; --from-db missing.db; --mode=counters "
    "--counters=; --hsa;"
    " --compare --result-dir out; --compare --mode trace; --compare --disable-all-fusion;"
    " --compare --enable-flash-attention; --script tiny_llama_v1.py --compare; --compare=yes",
    SYS: "--script missing.py; --script=; --script; --output-dir=; --output-dir file/below; "
    "--result-dir / --dry-run",
    COMPUTE: "--mode roofline; --mode analyze --seq-len 64; --mode analyze; --dispatch 7",
    ALL: "--script missing.py; --profile-dir; --output-dir out; --profile-dir file/below",
}


@pytest.mark.parametrize(
    ("wrapper", "options"), [(w, o) for w, text in MISTAKES.items() for o in text.split("; ")]
)
def test_a_mistake_is_one_line(bench, wrapper, options):
    (bench.work / "file").write_text("not a directory")
    result = bench.run(wrapper, *words(options))
    result.failed(re.findall("--(?!dry)[a-z-]+|file", options)[-1], status=2, lines=1)
    assert not bench.received()
    assert files(bench.work) == {"file": b"not a directory"}


# --- failures: one line, and what was there before stays


@pytest.mark.parametrize(
    ("command", "modes"),
    [
        (ROCPROFV3, "noformat script status killed nothing truncated truncated-line"),
        (f"{ROCPROFV3} --mode kernels", "nothing"),
        (f"{ROCPROFV3} --mode trace", "nothing truncated"),
        (f"{ROCPROFV3} --mode counters", "noformat nothing truncated"),
        (SYS, "truncated script status nothing"),
        (COMPUTE, "noformat script status nothing truncated"),
        (f"{COMPUTE} --roof-only", "noplots"),
    ],
)
def test_a_failure_leaves_earlier_results(bench, command, modes):
    """Of the tool, as STANDIN_FAIL has it, or of the script."""
    wrapper, *own = words(command)
    before: dict[str, bytes] = {}
    # the first one without earlier results, then with some
    for mode in [*words(modes), words(modes)[0]]:
        environment = {"STATUS": "3"} if mode == "script" else {"STANDIN_FAIL": mode}
        result = bench.run(wrapper, *own, **environment).failed(
            status=3 if mode == "script" else None
        )
        line = result.stderr.splitlines()[-1]
        assert TOOL_OF[wrapper] in line or FOLDER_OF[wrapper] in line
        for word in words(line):
            assert FOLDER_OF[wrapper] not in word or (bench.work / word.rstrip(":,;")).exists(), (
                line
            )
        assert "Dispatches:" not in result.stdout
        if not before:
            assert not [*bench.work.rglob("stats.csv"), *bench.work.rglob("roofline_analysis.csv")]
            bench.run(wrapper, *own).succeeded()
            before = {
                name: text for name, text in files(bench.work).items() if ".failed/" not in name
            }
        assert before.items() <= files(bench.work).items()


def wait_for_the_script(bench: Bench, runs: int) -> None:
    """Until it runs, of which there were `runs` runs before."""
    deadline = time.monotonic() + 30
    while len(bench.received()) == runs and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)  # until the script sleeps


def interrupt(
    process: subprocess.Popen, bench: Bench, runs: int, number: int = signal.SIGINT
) -> str:
    """Send the wrapper a signal once the script runs.

    Returns what stderr got, when nothing runs any more.
    """
    wait_for_the_script(bench, runs)
    os.kill(process.pid, number)
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + number, stderr
    assert len(bench.received()) == runs + 1  # nothing else was started
    assert not running(bench.script)
    return stderr


def running(script: Path) -> list[str]:
    """The processes that have this script on their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            found += [process.name] * (str(script).encode() in (process / "cmdline").read_bytes())
    return found


@pytest.mark.parametrize(
    ("wrapper", "number"),
    [
        *((wrapper, signal.SIGINT) for wrapper in TOOL_OF),
        (ROCPROFV3, signal.SIGTERM),
        (ROCPROFV3, signal.SIGHUP),
    ],
)
def test_a_signal_leaves_earlier_results_and_what_was_written(bench, wrapper, number):
    bench.run(wrapper).succeeded()
    before = files(bench.work)
    process = bench.start(ROOT / wrapper, "--script", bench.script, WAIT="1")
    stderr = interrupt(process, bench, len(bench.received()), number)
    assert before.items() <= files(bench.work).items()
    (summary,) = bench.work.rglob("*.failed/tiny_note_v2_summary.json")
    assert summary.parent.name in stderr
    bench.run(wrapper).succeeded()


def test_a_folder_has_one_owner_at_a_time(bench):
    """A second one would put its files among those of the first, and count them as its own."""
    process = bench.start(ROOT / ROCPROFV3, "--script", bench.script, WAIT="1")
    wait_for_the_script(bench, 0)
    before = files(bench.work)
    bench.run(ROCPROFV3).failed(
        "_results_fused", "another profiler is writing there", status=2, lines=1
    )
    assert files(bench.work) == before
    bench.run(ROCPROFV3, "--output-dir", "other").succeeded()
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=30)
    bench.run(ROCPROFV3).succeeded()


def test_a_result_folder_must_be_new(bench):
    """Else a directory of the user would be replaced."""
    bench.run(SYS, "--result-dir", "a/new one/").succeeded()
    before = files(bench.work)
    assert {Path(name).parts[:2] for name in before} == {("a", "new one")}
    bench.run(SYS, "--result-dir", "a/new one").failed("a/new one", "exists", status=2, lines=1)
    assert files(bench.work) == before


# --- run_rocprofv3.sh


def reduction(before: float, after: float, per: str = "per step") -> str:
    """What the wrapper prints of the comparison."""
    reduction = f"{100 * (1 - after / before):.1f} %"
    return f"- Kernels {per}: {before:.10g} -> {after:.10g}\n- Kernel reduction: {reduction}\n"


@pytest.mark.parametrize(
    ("mode", "rocm", "suffix"),
    [
        ("hotspots", "7", "_stats.csv"),
        ("kernels", "6", "_trace.csv"),
        ("kernels", "7", "_results.db"),
    ],
)
def test_statistics_of_one_process_and_merged_over_three(bench, mode, rocm, suffix):
    tables = []
    for processes in (1, 3):
        result = bench.run(
            ROCPROFV3, "--mode", mode, STANDIN_ROCM=rocm, STANDIN_PROCESSES=str(processes)
        ).succeeded()
        assert len(list((bench.results() / mode).glob(f"*{suffix}"))) == processes
        assert counted(result, FUSED[0], FUSED[1] * processes)
        assert "Kernel reduction" not in result.stdout  # there is no other side yet
        rows = read_csv(next(bench.results().rglob("stats.csv")))
        assert (
            " ".join(rows[0])
            == "Name Calls TotalDurationNs AverageNs Percentage MinNs MaxNs StdDev"
        )
        assert sum(float(row["Percentage"]) for row in rows) == pytest.approx(100, abs=0.1)
        totals = [int(row["TotalDurationNs"]) for row in rows]
        assert totals == sorted(totals, reverse=True)
        tables.append(rows)
    assert any(
        row["Name"].startswith("void at::native::vectorized_elementwise_kernel<4, at::")
        for row in rows
    )
    for one, three in zip(*tables, strict=True):
        assert (three["Name"], three["MinNs"], three["MaxNs"]) == (
            one["Name"],
            one["MinNs"],
            one["MaxNs"],
        )
        for name, factor in {"Calls": 3, "TotalDurationNs": 3, "AverageNs": 1}.items():
            assert float(three[name]) == pytest.approx(factor * float(one[name]))


def test_compare_runs_both_sides_and_a_part_of_the_fusions_is_compared_with_nothing(bench):
    # an earlier run, which is replaced
    bench.run(ROCPROFV3, "--seq-len", "8", STANDIN_PROCESSES="2").succeeded()
    result = bench.run(ROCPROFV3, "--compare", "--note", "a b").succeeded()
    sides = [
        [word for word in received if "all-fusion" in word] for received in bench.received()[1:]
    ]
    assert sides == [["--disable-all-fusion"], ["--enable-all-fusion"]]
    rows = read_csv(bench.work / "rocprofv3_results_baseline" / "stats.csv")
    assert (len(rows), sum(int(row["Calls"]) for row in rows)) == BASELINE
    assert any('masked_fill_kernel("float")' in row["Name"] for row in rows)
    assert result.stdout.count("Kernel reduction") == 1
    assert reduction(BASELINE[1], FUSED[1]) in result.stdout
    assert "differs" not in result.stdout + result.stderr
    before = files(bench.work)
    assert "Kernel reduction" not in bench.run(ROCPROFV3, "--disable-qkv-fusion").succeeded().stdout
    assert before.items() <= files(bench.work).items()
    assert (bench.work / "rocprofv3_results_partial" / "stats.csv").exists()


def test_the_comparison_is_per_step_names_what_differs_and_is_of_one_model(bench):
    bench.run(ROCPROFV3, "--disable-all-fusion", "--num-steps", "2").succeeded()
    baseline = files(bench.work)
    result = bench.run(ROCPROFV3, "--num-steps", "5", "--seq-len", "8").succeeded()
    assert reduction(BASELINE[1] / 2, FUSED[1] / 5) in result.stdout
    top = result.stdout.partition("- Kernels per step")[0]
    assert "- baseline: `rocprofv3_results_baseline` (tiny_note_v2, 2 steps" in top
    assert "- note: seq_len differs: 64 for baseline; 8 for fused" in top
    assert "steps differs" not in result.stdout
    bench.script = bench.script.rename(bench.directory / "tiny_other_v2.py")
    result = bench.run(ROCPROFV3, "--enable-all-fusion")
    result.failed("baseline is a run of tiny_note, fused of tiny_other", status=2, lines=1)
    assert "Kernel reduction" not in result.stdout
    assert (bench.results() / "hotspots" / "tiny_other_v2_summary.json").exists()
    assert baseline.items() <= files(bench.work).items()
    bench.run(ROCPROFV3, "--compare").succeeded()  # replaces both sides


def test_rocm_6_records_the_warm_up_too_so_nothing_is_divided_by_steps(bench):
    """Its rocprofv3 has no --selected-regions.

    How many of the dispatches are of measured steps is not known.
    """
    run = functools.partial(bench.run, ROCPROFV3, STANDIN_ROCM="6")
    dry = run("--dry-run", "--num-steps", "2").succeeded().stdout
    assert "--selected-regions" not in dry
    run("--disable-all-fusion", "--num-steps", "2").succeeded()
    result = run("--num-steps", "2").succeeded()
    assert [shell_words(dry)[1:]] == [
        call["argv"] for call in bench.calls("rocprofv3") if "-d" in call["argv"]
    ][1:]
    assert reduction(BASELINE[1], FUSED[1], "in all") in result.stdout
    assert "baseline, fused have the warm-up" in result.stdout
    assert run("--mode", "trace", "--hsa").succeeded()
    run("--mode", "counters").failed("rocprofv3 does not know --pmc", status=4, lines=1)


def test_a_profile_dir_of_the_user_stays_the_only_one(bench):
    """So the number of steps is not known, and totals are compared."""
    for given in (["--disable-all-fusion", "--profile-dir=my dir"], ["--profile-dir", "my dir"]):
        result = bench.run(ROCPROFV3, *given).succeeded()
        assert bench.received()[-1] == [*ADDED, *given]
    assert reduction(BASELINE[1], FUSED[1], "in all") in result.stdout
    assert "- note: the number of steps is not known" in result.stdout


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ("--enable-flash-attention --enable-torch-compile --enable-cuda-graph", "fused"),
        (
            "--disable-all-fusion --disable-a --enable-torch-compile --enable-cuda-graph "
            "--enable-x-profiling",
            "baseline",
        ),
        ("--disable-all-fusion --enable-flash-attention", "partial"),
        ("--disable-qkv-fusion --enable-cuda-graph", "partial"),
        ("--enable-a --disable-triton-b", "partial"),
        ("--script tiny_llama_v1.py", "baseline"),
    ],
)
def test_sides_and_a_part_of_the_fusions_have_folders(bench, options, folder):
    dry = bench.run(ROCPROFV3, "--dry-run", *words(options)).succeeded().stdout
    assert f"/rocprofv3_results_{folder}/" in dry


@pytest.fixture
def database(bench) -> Path:
    """As rocprofv3 of ROCm 7 writes it by default."""
    bench.call("rocprofv3", "--kernel-trace", "-d", "db dir", "-o", "run", "--", "true").succeeded()
    return bench.work / "db dir" / "run_results.db"


def test_from_database_with_and_without_rocpd(bench, database):
    found = []
    for tools in (["rocpd"], []):
        bench.install(*tools)
        assert counted(bench.run(ROCPROFV3, "--from-db", str(database)).succeeded(), *FUSED)
        found.append(read_csv(bench.results() / "stats.csv"))
        shutil.rmtree(bench.results())
    assert found[0] == found[1]
    assert len(bench.calls("rocpd")) == 1
    assert not bench.received()  # a database is read without running anything
    bench.install(*TOOLS)
    bench.run(ROCPROFV3).succeeded()
    traced = read_csv(bench.results() / "stats.csv")
    for column in words("Name Calls TotalDurationNs MinNs MaxNs"):
        assert [row[column] for row in found[0]] == [row[column] for row in traced]


@pytest.mark.parametrize("tools", [["rocpd"], []], ids=["rocpd", "sqlite"])
def test_a_damaged_database_and_a_failing_rocpd(bench, database, tools):
    good = database.read_bytes()
    bench.run(ROCPROFV3, "--from-db", str(database)).succeeded()
    before = files(bench.results())
    bench.install(*tools)
    with sqlite3.connect(database) as connection:
        connection.execute("DROP VIEW kernels")
    failures = [(content, "") for content in (database.read_bytes(), good[:5000], b"hello")]
    for content, mode in failures + [
        (good, mode) for mode in ("status", "nothing", "truncated") if tools
    ]:
        database.write_bytes(content)
        bench.run(ROCPROFV3, "--from-db", str(database), STANDIN_FAIL=mode).failed("run_results.db")
        assert files(bench.results()) == before


# --- run_rocprof_sys.sh and run_rocprof_compute.sh


def test_rocprof_sys_by_its_older_name(bench):
    bench.install()
    (bench.bin / "omnitrace-run").symlink_to(STANDINS / "rocprof-sys-run")
    bench.run(SYS, "--sample").succeeded()
    for name in ("perfetto-trace-*.proto", "wall_clock-*.txt", "sampling_wall_clock-*.txt"):
        assert list(bench.results(SYS).rglob(name))


def test_rocprof_compute_and_analyze_of_its_last_profile(bench):
    result = bench.run(COMPUTE, "--output-dir", "two\nlines").succeeded()
    next_command = shell_words(result.stdout.rpartition("next: ")[2])
    assert "Dispatch List" in bench.call(*next_command).succeeded().stdout
    shutil.rmtree(bench.work / "two\nlines")
    for name in ("log", "record"):
        (bench.directory / name).unlink()
    result = bench.run(COMPUTE).succeeded()
    for received in bench.received():  # several runs, so few steps unless told otherwise
        assert received[-4:] == words("--num-steps 2 --warmup-steps 1")
    table = bench.results(COMPUTE) / "roofline_analysis.csv"
    assert str(table.relative_to(bench.work)) in result.stdout
    rows = read_csv(table)
    assert list(rows[0]) == words("Dispatch_ID Category TimeNs Kernel_Name")
    assert {int(row["Dispatch_ID"]) for row in rows} == set(range(FUSED[1]))
    for row in rows:
        assert int(row["TimeNs"]) > 0
        assert ("gemm" in row["Category"]) == row["Kernel_Name"].startswith("Cijk")

    bench.run(COMPUTE, STANDIN_FAIL="noformat").failed()  # this newer profile is not taken
    before, runs = files(bench.work), len(bench.received())
    argv = [
        "--mode",
        "analyze",
        "--dispatch",
        next(r["Dispatch_ID"] for r in rows if "attn_fwd" in r["Kernel_Name"]),
    ]
    dry = bench.run(COMPUTE, "--dry-run", *argv).succeeded()
    result = bench.run(COMPUTE, *argv).succeeded()
    assert all(text in result.stdout for text in ("attn_fwd.kd", "Speed-of-Light"))
    assert [shell_words(dry.stdout)[1:]] == [
        call["argv"] for call in bench.calls("rocprof-compute")[2:]
    ]
    stats = bench.run(COMPUTE, "--list-stats").succeeded().stdout
    assert ("Dispatch List" in stats, "Speed-of-Light" in stats) == (True, False)
    assert "99999" in bench.run(COMPUTE, *argv[:-1], "99999").failed("rocprof-compute").stderr
    assert len(bench.received()) == runs  # nothing ran again
    assert files(bench.work) == before
    bench.run(COMPUTE, "--roof-only").succeeded()
    (said,) = bench.run(COMPUTE, "--list-stats").succeeded().stderr.splitlines()
    assert "is of --roof-only: it has the counters of the roofline and no others" in said


@pytest.mark.parametrize(
    ("gpu", "good"), [("gfx1201", 0), ("gfx1036,gfx942", 1), ("gfx90a", 1), (None, 1)]
)
def test_consumer_gpus_are_refused_but_not_beside_another_one(bench, gpu, good):
    if not gpu:
        bench.install("rocprof-compute")  # without rocminfo nothing tells the GPU
    result = bench.run(COMPUTE, STANDIN_GPU=gpu or "gfx1201")
    if good:
        result.succeeded()
    else:
        result.failed(gpu, status=4, lines=1)
        assert bench.nothing_happened()


# --- exercises/tiny_llama_v4/get_*.sh

# Of each script: tool, result folder, options, a file that it leaves there, and the commands it
# says to type next.
NEXT = "rocpd summary, rocpd2csv -i, rocpd convert"
DATA = "workloads/tiny_llama_v4_fused/rocprof/pmc_perf.csv"
GET = {
    "get_trace.sh": ("rocprofv3", "traces/trace", "--sys-trace", "*_results.pftrace", ""),
    "get_counters.sh": ("rocprofv3", "counters/counter", "--kernel-trace", "*_results.db", NEXT),
    "get_hotspots.sh": ("rocprofv3", "hotspots/hotspot", "--kernel-trace --stats", "stats.csv", ""),
    "get_rocprof_compute.sh": (
        "rocprof-compute",
        "rocprof_compute/profile",
        "",
        DATA,
        "rocprof-compute analyze",
    ),
    "get_rocprof_sys.sh": (
        "rocprof-sys-run",
        "rocprof_sys/profile",
        "--sample",
        "*/perfetto-trace-*.proto",
        "",
    ),
}


@pytest.fixture
def sheet(bench) -> Path:
    """The folder of the scripts, in a copy where tiny_llama_v4.py is the script that notes its
    arguments."""
    tree = bench.directory / "a copy"
    for path in [
        *ROOT.glob("run_*.sh"),
        *ROOT.glob("lab/**/*.*"),
        *ROOT.glob("exercises/tiny_llama_v4/*.sh"),
    ]:
        place = tree / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    shutil.copy(bench.script, tree / "tiny_llama_v4.py")
    return tree / "exercises" / "tiny_llama_v4"


@pytest.mark.parametrize(
    ("script", "inside"), [*((script, True) for script in GET), ("get_counters.sh", False)]
)
def test_get_scripts(bench, sheet, script, inside):
    tool, folder, options, file, commands = GET[script]
    cwd = sheet if inside else None
    # --mode is an option of the wrappers, too
    argv = ["--mode", "benchmark", "--num-steps", "3", "two words", "*"]
    result = bench.call(f"./{script}" if inside else sheet / script, *argv, cwd=cwd).succeeded()
    assert set(words(options)) <= set(bench.calls(tool)[0]["argv"])
    assert all(received[-len(argv) :] == argv for received in bench.received())
    (results,) = sheet.glob(f"{folder}_*")
    assert re.fullmatch(r"\w+_\d{8}_\d{6}", results.name)
    assert list(results.glob(file))
    assert not list(bench.work.iterdir())
    # What it says to do next can be typed.
    typed = [
        line
        for line in result.stdout.splitlines()
        if re.match("rocpd|rocprof-compute analyze", line)
    ]
    assert ", ".join(" ".join(words(line)[:2]) for line in typed) == commands
    for line in typed:
        next_command = [re.sub("^N$", "1", word) for word in shell_words(line)]
        assert bench.call(*next_command, cwd=cwd).succeeded().stderr == ""
    assert typed or "ui.perfetto.dev" in result.stdout or "Next:" in result.stdout


def test_a_get_script_that_fails_and_one_that_only_prints(bench, sheet):
    result = bench.call("./get_counters.sh", cwd=sheet, STANDIN_FAIL="status").failed("rocprofv3")
    assert "Every launch" not in result.stdout
    (results,) = (sheet / "counters").iterdir()
    assert results.name.endswith(".failed")
    shutil.rmtree(sheet / "counters")
    dry = bench.call("./get_counters.sh", "--dry-run", "--seq-len", "8", cwd=sheet).succeeded()
    assert shell_words(dry.stdout)[-2:] == ["--seq-len", "8"]
    link = bench.directory / "a link"
    link.symlink_to(sheet / "get_counters.sh")
    bench.call(link, "--dry-run").succeeded()
    assert "--dry-run" in bench.call("./get_counters.sh", "--help", cwd=sheet).succeeded().stdout
    assert not (sheet / "counters").exists()


# --- run_all_profilers.sh


def all_steps(folder: Path) -> dict[str, dict]:
    """The steps of summary.json by name, after a look at their form."""
    steps = strict_json((folder / "summary.json").read_text())["steps"]
    text = (folder / "summary.md").read_text()
    for step in steps:
        assert step["status"] == {0: "ok", 4: "skipped"}.get(step["exit_status"], "failed")
        assert bool(step["reason"]) == (step["status"] != "ok")
        assert step["seconds"] >= 0
        assert all((folder / file).is_file() for file in step["files"])
        assert all(part in text for part in (step["name"], step["status"], step["reason"] or ""))
    return {step["name"]: step for step in steps}


def test_all_profilers_get_the_arguments(bench):
    argv = ["--note", *AWKWARD, "--num-steps", "3", "--warmup-steps", "0"]
    dry = bench.run(ALL, "--dry-run", "--enable-rocm-tools", *argv).succeeded()
    assert bench.nothing_happened()
    bench.run(ALL, "--enable-rocm-tools", "--profile-dir", "all results", *argv).succeeded()
    steps = all_steps(bench.work / "all results")
    assert [step["status"] for step in steps.values()] == ["ok"] * 5
    assert [path.name for path in bench.work.iterdir()] == ["all results"]
    received = [
        *bench.lines("record_ours"),
        *bench.received(),
        *map(shell_words, dry.stdout.splitlines()),
    ]
    assert len(received) == 2 + 4 + 5  # rocprof-compute runs the script twice
    assert all(line[-len(argv) :] == argv for line in received)


def test_all_profilers_without_rocm(bench):
    report = bench.work / "out" / "pytorch" / "tiny_llama_v1_report.md"
    report.parent.mkdir(parents=True)
    report.write_text("of an earlier run\n")
    os.utime(report, (1, 1))
    bench.run(
        ALL, "--script=tiny_llama_v2.py", "--profile-dir=out", run_deepspeed_flops="4"
    ).succeeded()
    assert (
        strict_json((bench.work / "out" / "summary.json").read_text())["script"]
        == "tiny_llama_v2.py"
    )
    steps = all_steps(bench.work / "out")
    assert list(steps) == ["pytorch_profiler", "flops"]
    assert steps["pytorch_profiler"]["files"] == []  # what an earlier run left is not listed
    assert steps["flops"]["reason"] == "run_deepspeed_flops says why"


def test_all_profilers_of_which_none_ran(bench):
    variables = {"run_pytorch_profiler": "4", "run_deepspeed_flops": "4"}
    bench.run(ALL, "--profile-dir", "out", **variables).failed("nothing ran", status=4, lines=1)


def test_all_profilers_go_on_after_a_failure_and_skip_what_is_missing(bench):
    bench.install("rocprofv3")
    result = bench.run(ALL, "--enable-rocm-tools", "--profile-dir", "out", run_pytorch_profiler="3")
    result.failed("pytorch_profiler", status=1)
    steps = all_steps(bench.work / "out")
    assert [step["status"] for step in steps.values()] == [
        "failed",
        "ok",
        "ok",
        "skipped",
        "skipped",
    ]
    assert steps["rocprofv3"]["files"] == ["rocprofv3_results_fused/stats.csv"]
    assert "rocprof-sys-run" in steps["rocprof_sys"]["reason"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_all_profilers_interrupted(bench, number):
    argv = ["--script", bench.script, "--enable-rocm-tools", "--profile-dir", "out"]
    process = bench.start(ROOT / ALL, *argv, WAIT="1")
    wait_for_the_script(bench, 0)
    bench.run(ALL, "--profile-dir", "out").failed(
        "out", "another profiler is writing there", status=2, lines=1
    )
    assert "what ran until then is in out/summary.md" in interrupt(process, bench, 0, number)
    assert list(all_steps(bench.work / "out"))[:2] == ["pytorch_profiler", "flops"]


def test_what_all_profilers_wrote_can_be_compared(bench):
    """Where the PyTorch profiler left nothing, rocprofv3's statistics.

    Test_analysis_tools.py has its profiles.
    """
    bench.install("rocprofv3")
    run = ["--enable-rocm-tools", "--profile-dir"]
    bench.run(ALL, *run, "off", "--disable-all-fusion", "--num-steps", "2").succeeded()
    bench.run(ALL, *run, "on", "--seq-len", "8").succeeded()
    tool = ROOT / "analysis_tools" / "analyze_kernel_reduction.py"
    analyze = functools.partial(
        bench.call, sys.executable, tool, *words("--baseline off --fused on --top 0")
    )
    result = analyze().succeeded()
    assert reduction(BASELINE[1] / 2, FUSED[1]) in result.stdout
    assert "- note: seq_len differs: 64 for baseline; 8 for fused" in result.stdout
    assert "- fused: `on/rocprofv3_results_fused` (tiny_note_v2, 1 steps" in result.stdout
    shutil.copytree(
        bench.work / "off" / "rocprofv3_results_baseline",
        bench.work / "on" / "rocprofv3_results_baseline",
    )
    analyze().failed("several profiles", "rocprofv3_results_fused", status=2, lines=1)

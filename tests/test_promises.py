"""What every program here promises about its results (docs/CONTRIBUTING.md): whole, its own,
never over its input."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT, captured, run_main

import run_deepspeed_flops
import run_pytorch_profiler
from analysis_tools import (
    compare_runs,
    fusion_ablation_study,
    optimize_batch_size,
    plot_runs,
    regression_tester,
    roofline_analysis,
)
from exercises.performance_debugging import compare_stages
from lab.cli import ToolError
from lab.files import write_file, write_text
from lab.script import DEFAULT_SCRIPT
from lab.show import Column, render, write_csv

RUN = ROOT / "results/cpu/tiny_llama_v2_readme.json"
STAGES = ROOT / "results/h100/performance_debugging.json"


def call(tool, *argv: object) -> tuple[int, str, str]:
    return captured(tool.main, [str(word) for word in argv])


def run_at(folder: Path, ms: float = 10.0) -> Path:
    """The directory of a run, with a step of so many milliseconds."""
    result = json.loads(RUN.read_text())
    result["timing"] |= {
        "batch_ms": ms,
        "batch_median_ms": ms,
        "batch_p95_ms": ms,
        "samples_per_sec": 8e3 / ms,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny_llama_v2_summary.json").write_text(json.dumps(result))
    return folder


# --- what was saved is what is read


def test_what_was_saved_is_read_and_not_what_is_there_now(tmp_path):
    """Runs of the same name are saved under their paths, here absolute ones."""
    folders = [run_at(tmp_path / part / "run") for part in "ab"]
    assert call(compare_runs, *folders, "--save", tmp_path / "before.json")[0] == 0
    for folder in folders:
        run_at(folder, ms=1000.0)
    assert call(compare_runs, *folders, "--save", tmp_path / "after.json")[0] == 0
    argv = [
        "--baseline-results",
        tmp_path / "before.json",
        "--current-results",
        tmp_path / "after.json",
    ]
    status, out, _ = call(regression_tester, *argv)
    assert (status, "A regression: 2 of 2" in out) == (1, True), out


def test_two_runs_are_not_saved_under_one_name(tmp_path):
    one, two = (run_at(tmp_path / part) for part in "ab")
    status, _, err = call(compare_runs, f"x={one}", f"x/={two}", "--save", tmp_path / "saved.json")
    assert (status, "another NAME=PATH" in err, (tmp_path / "saved.json").exists()) == (
        2,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("argv", "status", "outcome"),
    [
        ("--learning-rate 1e30 --warmup-steps 0", 1, "failed"),
        ("--text-file README.md --vocab-size 256", 0, "1.00x"),
    ],
)
def test_what_a_script_leaves_is_read(argv, status, outcome, tmp_path):
    """Also of a run that failed, which has no turns and no rates."""
    run_main(
        "tiny_llama_v2",
        tmp_path,
        "--num-steps",
        "9",
        *argv.replace("README", f"{ROOT}/README").split(),
    )
    found, out, _ = call(compare_runs, tmp_path)
    assert (found, outcome in out.splitlines()[2]) == (status, True), out


# --- never over an input, never half a file


@pytest.mark.parametrize(
    ("tool", "source", "argv"),
    [
        (compare_runs, RUN, ["./in.json", "--save", "link.json"]),
        (plot_runs, RUN, ["memory", "x=in.svg", "--output", "in.svg"]),
        (compare_stages, STAGES, ["in.json", "--output", "in.json"]),
    ],
)
def test_an_input_is_not_written_on(tool, source, argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("in.json", "in.svg"):
        Path(name).write_bytes(source.read_bytes())
    Path("link.json").symlink_to("in.json")
    status, _, err = call(tool, *argv)
    assert (status, "is an input" in err.splitlines()[-1]) == (2, True), err
    assert Path("in.json").read_bytes() == Path("in.svg").read_bytes() == source.read_bytes()
    assert Path("link.json").is_symlink()


def test_writers_at_once_leave_a_whole_file_each(tmp_path):
    """With one temporary name for all, a second writer truncates what the first one moves into
    place."""
    path, wrong = tmp_path / "result.json", []
    first, second = threading.Event(), threading.Event()

    def slow(temporary: Path) -> None:
        temporary.write_text("slow, first half, ")
        first.set()
        second.wait(10)
        with temporary.open("a") as file:
            file.write("second half")

    def write() -> None:
        try:
            write_file(path, slow)
        except ToolError as error:
            wrong.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    first.wait(10)
    write_text(path, "quick")
    assert path.read_text() == "quick"
    second.set()
    thread.join()
    assert (wrong, path.read_text()) == ([], "slow, first half, second half")
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_failure_while_writing_leaves_what_was_there(tmp_path):
    path = tmp_path / "result.json"
    write_text(path, "earlier")

    def fails(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ToolError, match="No space left"):
        write_file(path, fails)
    assert (path.read_text(), os.listdir(tmp_path)) == ("earlier", ["result.json"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ToolError, match="not a file"):
        write_text(tmp_path / "pipe", "text")


# --- tables and the terminal


def test_a_name_is_no_formula_and_breaks_no_table(tmp_path):
    rows = [{"name": text, "value": -1.5} for text in ("=1+1", "+x", "-x", "@x", "x=1", "")]
    write_csv(tmp_path / "table.csv", rows)
    with (tmp_path / "table.csv").open(newline="") as file:
        found = [row["name"] for row in csv.DictReader(file)]
    assert found == ["'=1+1", "'+x", "'-x", "'@x", "x=1", ""]
    assert "-1.5" in (tmp_path / "table.csv").read_text()
    table = render([Column("a", str)], ["two\nlines\r\nor\u2028three"])
    assert len(table.splitlines()) == 3


def test_a_table_is_the_same_as_markdown_text_and_csv():
    columns = [
        Column("side", "name"),
        Column("ms", "ms", ".2f"),
        Column("gain", lambda row: row["gain"], ".1f", "x"),
    ]
    rows = [{"name": "a|b", "ms": 1.005, "gain": 2}, {"name": "c", "ms": None, "gain": "none"}]
    assert render(columns, rows).splitlines() == [
        "| side |   ms | gain |",
        "| ---- | ---: | ---: |",
        "| a\\|b | 1.00 | 2.0x |",
        "| c    |    - | none |",
    ]
    assert render(columns, rows, "text").splitlines() == [
        "side    ms  gain",
        "a|b   1.00  2.0x",
        "c        -  none",
    ]
    assert render(columns, rows, "csv").splitlines() == ["side,ms,gain", "a|b,1.005,2", "c,,none"]


TOOL = "analysis_tools/compare_runs.py"


def test_a_pipe_that_is_closed_is_no_error():
    command = f"'{sys.executable}' {TOOL} {RUN} {'x=' + str(RUN)} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip() in ("0", "141"), done.stderr) == (True, "")


def test_a_full_device_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, TOOL, RUN], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert (done.returncode, done.stderr.count("\n"), "No space left" in done.stderr) == (
        2,
        1,
        True,
    )


# --- what is missing, and odd ways to start

PROGRAMS = [
    *sorted((ROOT / "analysis_tools").glob("*.py")),
    *sorted(ROOT.glob("run_*.py")),
    *(ROOT / name for name in ("bench/versions.py", "tools/tables.py", "tools/run_sheet.py")),
    ROOT / "exercises/performance_debugging/check_step.py",
    ROOT / "exercises/performance_debugging/compare_stages.py",
    ROOT / "exercises/tiny_openfold_v2/gemms_of_a_trace.py",
]
BLOCK = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "triton", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.fixture
def without_packages(tmp_path) -> dict[str, str]:
    """The environment of a process in which there is nothing but the standard library."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_help_needs_no_package_and_no_docstring(program, without_packages):
    command = [sys.executable, "-OO", program, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=without_packages)
    assert (done.returncode, done.stderr) == (0, "")


def test_programs_in_folders_find_the_root_in_one_way():
    hidden = (".*", "tests")  # .venv and what else a participant keeps here
    rooms = [path for path in ROOT.iterdir() if not any(map(path.match, hidden))]
    programs = [file for path in rooms for file in (path, *path.rglob("*")) if file.suffix == ".py"]
    line = r"sys\.path\.insert\(0, str\(Path\(__file__\)\.resolve\(\)\.parents\[(\d)\]\)\)"
    for file in programs:
        changes = re.findall(r"^sys\.path.*", file.read_text(), re.MULTILINE)
        for change in changes:
            assert file.parents[int(re.match(line, change)[1])] == ROOT, file
        assert len(changes) <= 1, file


TRAINS = {
    "run_pytorch_profiler.py": "",
    "run_deepspeed_flops.py": "",
    "analysis_tools/benchmark_suite.py": "",
    "analysis_tools/compare_versions.py": "",
    "analysis_tools/find_fusions.py": "tiny_llama_v1.py",
    "analysis_tools/fusion_ablation_study.py": "",
    "analysis_tools/measure_energy.py": "--scripts tiny_llama_v1.py",
    "analysis_tools/optimize_batch_size.py": "",
    "analysis_tools/roofline_analysis.py": "",
    "analysis_tools/validate_numerical_accuracy.py": (
        "--baseline tiny_llama_v1.py --optimized tiny_llama_v2.py"
    ),
    "bench/versions.py": "counts .",
    "bench/operations.py": "table .",
    "tools/compile_for_amd.py": "--help",
    "bench/find_fusions.py": "study.json",
    "exercises/performance_debugging/check_step.py": f"{ROOT}/tiny_llama_v1.py",
    **{
        path.relative_to(ROOT).as_posix(): ""
        for path in sorted(ROOT.glob("exercises/*/*.py"))
        if path not in PROGRAMS and path.read_text().startswith("#!")  # else it is no program
    },
}


@pytest.mark.parametrize("program", TRAINS)
def test_a_package_that_is_missing_is_one_line(program, without_packages, tmp_path):
    command = [sys.executable, ROOT / program, *TRAINS[program].split()]
    done = subprocess.run(
        command, capture_output=True, text=True, env=without_packages, cwd=tmp_path
    )
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert " error: " in lines[-1]
    assert any(package in lines[-1] for package in ("torch", "numpy", "matplotlib"))
    assert not [line for line in lines[:-1] if ": note: " not in line]


# --- what was run is named


@pytest.mark.parametrize(
    "tool",
    [
        run_pytorch_profiler,
        run_deepspeed_flops,
        fusion_ablation_study,
        optimize_batch_size,
        roofline_analysis,
    ],
)
def test_a_tool_names_the_script_that_nobody_gave(tool):
    default = getattr(tool, "SCRIPT", DEFAULT_SCRIPT)
    for given, notes in ([], 1), (["--script", default], 0):
        # the script refuses it, so nothing is measured
        status, _, err = call(tool, *given, "--no-such-flag")
        assert (status, err.count(f"note: no --script is given, {default} is taken")) == (2, notes)


@pytest.mark.parametrize(
    "wrapper", ["run_rocprofv3", "run_rocprof_sys", "run_rocprof_compute", "run_all_profilers"]
)
def test_a_wrapper_names_the_script_that_nobody_gave(wrapper):
    for given, notes in ([], 1), (["--script", "tiny_openfold_v2.py"], 0):
        command = [ROOT / f"{wrapper}.sh", "--dry-run", *given]
        err = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
        assert err.count("note: no --script is given, tiny_openfold_v2.py is taken") == notes

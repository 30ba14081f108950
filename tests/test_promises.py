"""What every program here promises about its results (docs/CONTRIBUTING.md): whole, its own;
damaged files are read or named, and odd arguments refused.

`MUTATIONS=2000 python -m pytest -n0 tests/test_promises.py -k damaged` tries so many damages for
each tool and file.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT, assert_refused, call, finished, read_rows

import run_deepspeed_flops
import run_pytorch_profiler
from analysis_tools import (
    analyze_kernel_reduction,
    benchmark_suite,
    compare_runs,
    compare_versions,
    fusion_ablation_study,
    optimize_batch_size,
    performance_dashboard,
    plot_runs,
    regression_tester,
    report_generator,
    roofline_analysis,
    validate_numerical_accuracy,
)
from dev.bench import versions
from exercises.performance_debugging import check_step, compare_stages
from exercises.tiny_llama_v3 import add_relu, check_custom_kernel, measure
from fusion_lab.cli import ToolError, missing
from fusion_lab.files import printable, write_file, write_text
from fusion_lab.script import MODES
from fusion_lab.show import Column, render, write_csv

RESULTS = ROOT / "results"
H100, RUN = RESULTS / "h100", RESULTS / "cpu/tiny_llama_v2_readme.json"
STAGES = H100 / "performance_debugging.json"


# --- what was saved is what is read


def test_what_was_saved_is_read_and_not_what_is_there_now(tmp_path):
    """Runs of the same name are saved under their paths, here absolute ones; no two under one."""
    folders, result = [tmp_path / part / "run" for part in "ab"], json.loads(RUN.read_text())
    for name, ms in (("before", 10.0), ("after", 1000.0)):
        result["timing"] |= dict.fromkeys(("batch_ms", "batch_median_ms", "batch_p95_ms"), ms)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "tiny_llama_v2_summary.json").write_text(json.dumps(result))
        assert call(compare_runs, *folders, "--save", tmp_path / f"{name}.json")[0] == 0
    argv = ["--baseline-results", tmp_path / "before.json"]
    argv += ["--current-results", tmp_path / "after.json"]
    status, out, _ = call(regression_tester, *argv)
    assert (status, "A regression: 2 of 2" in out) == (1, True), out
    twice = [f"x={folders[0]}", f"x/={folders[1]}", "--save", tmp_path / "saved.json"]
    status, _, err = call(compare_runs, *twice)
    assert (status, "another NAME=PATH" in err) == (2, True)
    assert not (tmp_path / "saved.json").exists()


# --- never half a file


def test_a_writer_leaves_a_whole_file_or_what_was_there(tmp_path):
    """With one temporary name for all, a second writer takes away what the first has written."""
    path = tmp_path / "result.json"

    def slow(temporary: Path) -> None:
        temporary.write_text("first half, ")
        write_text(path, "quick")
        assert path.read_text() == "quick"
        with temporary.open("a") as file:
            file.write("second half")

    def fails(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    write_file(path, slow)
    with pytest.raises(ToolError, match="No space left"):
        write_file(path, fails)
    assert path.read_text() == "first half, second half"
    assert os.listdir(tmp_path) == ["result.json"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ToolError, match="not a file"):
        write_text(tmp_path / "pipe", "text")


# --- tables and the terminal


def test_a_table_is_markdown_or_csv_and_a_name_is_no_formula(tmp_path):
    columns = [
        Column("side", "name"),
        Column("ms", "ms", ".2f"),
        Column("gain", "gain", ".1f", "x"),
    ]
    rows = [{"name": "a|b", "ms": 1.005, "gain": 2}, {"name": "two\nlines\u2028", "gain": "none"}]
    assert render(columns, rows).splitlines() == [
        "| side      |   ms | gain |",
        "| --------- | ---: | ---: |",
        "| a\\|b      | 1.00 | 2.0x |",
        "| two lines |    - | none |",
    ]
    assert render(columns, rows[:1], "csv").splitlines() == ["side,ms,gain", "a|b,1.005,2"]
    path = tmp_path / "table.csv"
    write_csv(
        path, [{"name": text, "value": -1.5} for text in ("=1+1", "+x", "-x", "@x", "x=1", "")]
    )
    found = read_rows(path)
    assert [row["name"] for row in found] == ["'=1+1", "'+x", "'-x", "'@x", "x=1", ""]
    assert {row["value"] for row in found} == {"-1.5"}


@pytest.mark.parametrize("name", [b"lat\xe9n", b"a$b^$"], ids=["Latin-1", "mathematics"])
def test_a_folder_may_have_any_name(name: bytes, tmp_path: Path):
    """The wrappers get its bytes as they are."""
    folder = tmp_path / os.fsdecode(name)
    shutil.copytree(ROOT / "examples/rocm_format_samples/rocprof_compute", folder)
    shutil.copy(RUN, folder / "tiny_llama_v2_summary.json")
    named = f"{folder.name}={folder}"
    picture, page = folder / "memory.png", folder / "page.html"
    table, saved = folder / "table.csv", folder / "saved.json"
    for tool, *argv in (
        (plot_runs, "memory", named, "--output", picture),
        (compare_runs, named, "--csv", table, "--save", saved),
        (performance_dashboard, folder, "--output", page),
        (roofline_analysis, "--from-rocprof-compute", folder, "--output", folder),
    ):
        status, _, err = call(tool, *argv)
        assert status == 0, err
    assert read_rows(table)[0]["configuration"] == printable(folder.name)
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, ROOT / "fusion_lab/rocm/files.py", "newest", folder]
    done = subprocess.run(command, capture_output=True, env=strict)
    assert (done.returncode, name in done.stdout) == (0, True), done.stderr


def test_a_pipe_that_is_closed_is_no_error_and_a_full_device_is_one_line():
    tool = ROOT / "analysis_tools/compare_runs.py"
    command = f"'{sys.executable}' {tool} {RUN} x={RUN} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout.strip() in ("0", "141"), done.stderr) == (True, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, tool, RUN], stdout=full, stderr=-1, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left" in done.stderr


# --- what is missing

TRAINS = """\
run_pytorch_profiler.py
run_deepspeed_flops.py
analysis_tools/compare_versions.py
analysis_tools/find_fusions.py tiny_llama_v1.py
analysis_tools/validate_numerical_accuracy.py --baseline tiny_llama_v1.py --optimized x.py
dev/bench/versions.py overview .""".splitlines()


@pytest.mark.parametrize("line", TRAINS)
def test_a_package_that_is_missing_is_one_line(line: str, tmp_path):
    error = "ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    program, *argv = line.split()
    done = finished(ROOT / program, *argv, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    *notes, said = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert " error: " in said and "torch" in said
    assert all(": note: " in note for note in notes)


@pytest.mark.parametrize("module", ["fusion_lab", "dev.bench.peers", "yaml"])
def test_no_package_of_a_stranger_is_advised(module: str):
    """PyPI has a lab and a bench, and what is imported as yaml is called otherwise there."""
    error = ModuleNotFoundError(f"No module named {module!r}", name=module)
    assert missing(error) == f"No module named {module!r}"


# --- odd arguments are one line, and nothing is written

ABLATION, BATCH = fusion_ablation_study, optimize_batch_size
ROOFLINE, VALIDATE = roofline_analysis, validate_numerical_accuracy
BOTH = "--baseline tiny_llama_v1.py --optimized"
V2 = "--script tiny_llama_v2.py"
ODD = [
    (compare_runs, "nothing", "no run in any of these"),
    (compare_runs, f"{RUN} --csv other.json/x.csv", "cannot write there"),
    (analyze_kernel_reduction, "--baseline nothing --fused nothing --top -1", "0 or more"),
    (ABLATION, f"{V2} --fusions overlap", "tiny_llama_v2.py has qkv-fusion, flash-attention"),
    (ABLATION, "--table other.json", "another study"),
    (benchmark_suite, "--models v1,v9", "llama has v1, v2, v3, v4"),
    (benchmark_suite, "--table other.json --seq-len 8", "takes no arguments"),
    (BATCH, f"{V2} --target-memory-usage 80", "not above 1"),
    (ROOFLINE, f"{V2} --enable-torch-compile --output nothing", "--enable-torch-compile"),
    (ROOFLINE, "--from-rocprof-compute nothing", "pmc_perf.csv"),
    *(
        (tool, f"--profile-dir nothing --script {argv}", argv.split()[-1])
        for tool in (run_pytorch_profiler, run_deepspeed_flops)
        for argv in (
            "dev/sync_parts.py",
            *(f"tiny_llama_v2.py --{mode.replace('_', '-')}" for mode in MODES),
            "tiny_llama_v2.py --no-such-flag",
        )
    ),
    (check_step, f"{ROOT}/fusion_lab/cli.py", "neither a stage nor a version of TinyLlama"),
    (add_relu, "--block 3", "must be a power of two"),
    (check_custom_kernel, "none.py", "none.py: no such module"),
    (measure, "other.json", "no file of these programs"),
    (versions, "table missing", "missing: no result files"),
    (VALIDATE, f"{BOTH} tiny_openfold_v1.py", "different models"),
    (VALIDATE, f"{BOTH} tiny_llama_v2.py --tolerance nan", "--tolerance: must be above 0"),
    (VALIDATE, f"{BOTH} tiny_llama_v2.py --verify-accuracy", "--verify-accuracy does not fit here"),
]


@pytest.mark.parametrize(("tool", "argv", "line"), ODD)
def test_odd_arguments_are_one_line_and_nothing_is_written(tool, argv, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nothing").mkdir()
    other = {"environment": {"device_name": "x"}, "rows": [{"batch_size": 1}]}
    Path("other.json").write_text(json.dumps(other))
    before = sorted(tmp_path.rglob("*"))
    status, out, err = call(tool, *argv.split(" "))
    (error,) = (said for said in err.splitlines() if ": note: " not in said)
    assert (status, line in error) == (2, True), err
    assert "--csv" in argv or not out, "a table is printed before it is saved"
    assert sorted(tmp_path.rglob("*")) == before


# --- damaged files: a tool ends with a result, or with one line that names the file

MUTATIONS = int(os.environ.get("MUTATIONS", "8"))
VALUES = (None, True, 0, -1, 7, 1.5, 1e308, float("nan"), "", "x", "=1", "a\nb")
VALUES += ([], [1], ["x"], [[]], {}, {"x": 1})
# it is a file of something else now, or some of its rows are
REFUSED = (
    "cannot be compared",
    "is a run of",
    "folder: ",
    "no run in any",
    "have no run of the same",
)
REFUSED += ("no results in there", "no difference", "there is no tiny", "one run is wanted")
SETS, SUITE = H100 / "ablation_tiny_llama_v2.json", H100 / "suite_llama.json"
READERS = [  # each way in which a file is read; a folder has it under the name of a run's result
    (RUN, compare_runs, "FILE"),
    (SUITE, compare_runs, "FILE"),
    (RUN, compare_versions, "--v2 FOLDER --family llama"),
    (RUN, regression_tester, f"--baseline-results {RUN} --current-results FILE"),
    (SETS, fusion_ablation_study, "--table FILE"),
    (RUN, report_generator, "--baseline FOLDER --fused FOLDER"),
    (STAGES, compare_stages, "FILE"),
    (H100 / "headline_v3.json", performance_dashboard, "FILE --output FILE.html"),
    (H100 / "trunk.json", versions, "table FOLDER"),
]


def read(tool: ModuleType, argv: str, path: Path) -> tuple[int, str, str]:
    """Have a tool read a file, given itself or as the only one of a folder."""
    folder = path.parent / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(path, folder / path.name.replace("readme", "summary"))
    return call(tool, *argv.replace("FILE", str(path)).replace("FOLDER", str(folder)).split())


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The way to each value of a file."""
    items = value if isinstance(value, dict) else {}
    items = dict(enumerate(value)) if isinstance(value, list) else items
    for key, item in items.items():
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.mark.parametrize(("source", "tool", "argv"), READERS)
def test_a_damaged_file_is_read_or_named(source: Path, tool, argv: str, tmp_path: Path):
    """With another value somewhere, or none."""
    rng = random.Random(f"{source.name} {tool.__name__}")
    everywhere = list(places(json.loads(source.read_text())))
    path = tmp_path / source.name
    wrong = []
    for _ in range(MUTATIONS):
        content, place = json.loads(source.read_text()), rng.choice(everywhere)
        inner = reduce(getitem, place[:-1], content)
        inner[place[-1]] = rng.choice(VALUES)
        if rng.random() < 0.25:
            del inner[place[-1]]
        path.write_text(json.dumps(content))
        try:
            status, _, err = read(tool, argv, path)
        except Exception as error:
            wrong.append(f"{place}: {type(error).__name__}: {error}")
            continue
        lines = [line for line in err.splitlines() if ": error: " in line]
        wanted = (path.name, "folder/", *REFUSED)
        if status == 2 and not (len(lines) == 1 and any(words in lines[0] for words in wanted)):
            wrong.append(f"{place}: {err}")
    assert not wrong, f"{len(wrong)} of {MUTATIONS}: " + "\n".join(wrong[:40])


STUDY = {"environment": {"device_name": "GPU"}, "rows": []}
ROW = {"model": "tiny_llama", "side": "none"}
UNEQUAL = {"rows": [ROW | {"turns_ms": count * [1.0]} for count in (5, 7)]}
BROKEN = {  # a file's name and text, and what every reader says of it
    "cut": ('{"schema_version": 1,', "cut off"),
    "list": ("[1]", "not a JSON object"),
    "bytes": ("\udcff\udcfe", "not JSON"),
    "deep": ("[" * 100_000, "not JSON"),
    "later": ('{"schema_version": 2}', "schema_version: Invalid enum value 2"),
    "other": ('{"schema_version": 1, "config": {}}', "missing required field `script`"),
    "empty": (json.dumps(STUDY), "without a row"),
    "package": ("{}", "another kind of file"),
    "turns": (json.dumps(STUDY | UNEQUAL), "has 7 turns, others have 5"),
    **{
        name: (re.sub(r'"final": [^,}]+', f'"final": {value}', RUN.read_text()), said)
        for name, value, said in (
            ("text", '"fast"', "loss.final: Expected"),
            ("nan", "NaN", "NaN is no number"),
            ("huge", "1" + "0" * 400, "loss.final: Number out of range"),
        )
    },
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_line(name: str, tmp_path: Path):
    text, said = BROKEN[name]
    path = tmp_path / f"{name}_summary.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert_refused(call(compare_runs, path), str(path), said)
    assert [*tmp_path.iterdir()] == [path]

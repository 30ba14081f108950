"""The analysis tools: their numbers are those of the result files, and what they cannot use they
say in one line."""

from __future__ import annotations

import builtins
import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from conftest import QUICK, ROOT, TINY, captured, strict_json, table_of

import run_pytorch_profiler as profiler_tool
from analysis_tools import analyze_kernel_reduction, compare_runs, plot_runs

Answer = tuple[int, str, str]


def call(tool: ModuleType, *argv: object) -> Answer:
    """Exit status, stdout and stderr of a command line."""
    return captured(tool.main, [str(argument) for argument in argv])


def assert_refused(answer: Answer, *words: str, status: int = 2) -> None:
    """One line on stderr with these words, nothing that looks like a result on stdout."""
    assert answer[0] == status, answer
    assert answer[1] == ""
    assert len(answer[2].splitlines()) == 1, answer[2]
    for word in words:
        assert word in answer[2]


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Runs:
    """Directories of real tiny runs: V1 and V2 under the PyTorch profiler."""

    v1: Path
    v2: Path


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directories = []
    for version in (1, 2):
        directory = tmp_path_factory.mktemp("analysis") / f"v{version}"
        script = f"tiny_llama_v{version}.py"
        answer = call(
            *(
                profiler_tool,
                "--script",
                script,
                *TINY["llama"],
                *QUICK,
                "--device",
                "cpu",
                "--profile-dir",
                directory,
            )
        )
        assert answer[0] == 0, answer
        directories.append(directory)
    return Runs(*directories)


def summary(directory: Path) -> dict:
    (path,) = directory.glob("*_summary.json")
    return strict_json(path.read_text())


@pytest.fixture
def make(runs: Runs, tmp_path: Path) -> Callable[..., Path]:
    """`make(name, speed=, peak=, seq_len=, ...)`: the directory of a hand-made result, otherwise
    that of the V2 run."""

    def write(
        name: str, *, speed: float = 100.0, peak: float = 50.0, seq_len: int = 32, **more
    ) -> Path:
        result = summary(runs.v2)
        result["config"]["seq_len"] = seq_len
        result["timing"]["samples_per_sec"], result["memory"]["peak_mb"] = speed, peak
        for key, value in more.items():
            result[key] = {**result[key], **value} if isinstance(value, dict) and value else value
        directory = tmp_path / name
        directory.mkdir()
        (directory / "tiny_llama_v2_summary.json").write_text(json.dumps(result))
        return directory

    return write


def out_of_memory() -> dict:
    return {
        "status": "oom",
        "error": "out of memory: lower --batch-size",
        "timing": {},
        "memory": {},
        "kernels": {},
    }


# compare_runs.py


def test_comparison_has_the_numbers_of_the_result_files(runs, tmp_path):
    status, out, err = call(
        compare_runs, f"base={runs.v1}", runs.v2, "--csv", tmp_path / "deep" / "table.csv"
    )
    assert (status, err) == (0, "")
    first, second = summary(runs.v1), summary(runs.v2)
    rows = table_of(out)
    assert [row["configuration"] for row in rows] == ["base", "v2"]
    for row, result in zip(rows, (first, second), strict=True):
        assert float(row["samples/sec"]) == pytest.approx(
            result["timing"]["samples_per_sec"], abs=0.051
        )
        assert row["ms per step"] == f"{result['timing']['batch_ms']:.2f}"
        for phase in ("forward", "backward", "optimizer"):
            assert row[f"{phase} ms"] == f"{result['timing'][f'{phase}_ms']:.2f}"
        assert row["peak MB"] == f"{result['memory']['peak_mb']:.1f}"
        assert row["operator calls per step"] == str(result["kernels"]["per_step"])
        assert row["final loss"] == f"{result['loss']['curve'][-1]:.4f}"
    speedup = second["timing"]["samples_per_sec"] / first["timing"]["samples_per_sec"]
    change = 100 * (second["memory"]["peak_mb"] / first["memory"]["peak_mb"] - 1)
    assert rows[1]["speed-up"] == f"{speedup:.2f}x"
    assert rows[1]["memory change"] == f"{change:+.1f} %"
    (_, exact) = read_rows(tmp_path / "deep" / "table.csv")
    assert float(exact["speedup"]) == pytest.approx(speedup)
    assert float(exact["memory_change_percent"]) == pytest.approx(change)
    assert exact["script"] == "tiny_llama_v2"


def test_the_baseline_can_be_any_run_and_gets_a_row_of_its_own(make):
    slow, fast, half = (
        make("slow", speed=50, peak=80),
        make("fast", speed=200),
        make("half", speed=25, peak=40),
    )
    by_name = {
        row["configuration"]: row
        for row in table_of(call(compare_runs, slow, fast, "--baseline", fast)[1])
    }
    assert {name: row["speed-up"] for name, row in by_name.items()} == {
        "slow": "0.25x",
        "fast": "1.00x",
    }
    assert by_name["slow"]["memory change"] == "+60.0 %"
    rows = table_of(call(compare_runs, slow, fast, "--baseline", f"unfused={half}")[1])
    assert [(row["configuration"], row["speed-up"]) for row in rows] == [
        ("unfused", "1.00x"),
        ("slow", "2.00x"),
        ("fast", "8.00x"),
    ]


def test_out_of_memory_is_a_row_and_no_failure(make):
    gone = make("gone", **out_of_memory())
    status, out, err = call(compare_runs, make("good"), gone)
    row = table_of(out)[1]
    assert (status, err) == (0, "")
    assert row["samples/sec"] == "out of memory"
    assert {row[name] for name in ("speed-up", "ms per step", "peak MB", "memory change")} == {"-"}
    status, out, err = call(compare_runs, gone, make("other"))
    assert table_of(out)[1]["speed-up"] == "-"
    assert "baseline gone did not finish" in err


def test_without_times_there_is_what_is_the_same_in_every_run(make):
    status, out, _ = call(compare_runs, "--no-times", make("good"), make("gone", **out_of_memory()))
    rows = table_of(out)
    assert status == 0
    counted = "operator calls per step"
    names = ["configuration", "peak MB", "memory change", counted, "final loss"]
    assert [*rows[0]] == names
    assert rows[1]["peak MB"] == "out of memory"


def test_a_failed_run_is_named_and_what_it_measured_is_not_compared(make):
    bad = make("bad", status="failed", error="the loss became nan at step 3")
    status, out, err = call(compare_runs, make("good"), bad)
    assert status == 1
    assert table_of(out)[1]["samples/sec"] == "failed"
    assert table_of(out)[1]["speed-up"] == "-"
    assert "bad failed: the loss became nan at step 3" in err


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"seq_len": 64}, "seq_len differs: 32 for a; 64 for b"),
        ({"training": {"num_steps": 9}}, "num_steps differs: 3 for a; 9 for b"),
        ({"training": {"batch_size": 7}}, "batch_size differs: 2 for a; 7 for b"),
        ({"training": {"processes": 2}}, "processes differs: 1 for a; 2 for b"),
        ({"training": {"cuda_graph": True}}, "cuda_graph differs: False for a; True for b"),
        ({"environment": {"cpu_threads": 99}}, "cpu_threads differs:"),
        ({"environment": {"device_name": "MI300X"}}, "device_name differs:"),
    ],
)
def test_runs_that_cannot_be_compared_get_a_note(make, more, line):
    status, out, err = call(compare_runs, make("a"), make("b", **more))
    assert (status, len(table_of(out)), len(err.splitlines())) == (0, 2, 1)
    assert line in err


def test_scaling_efficiency_where_the_numbers_of_processes_differ(make, tmp_path):
    one, two = make("one", speed=100), make("two", speed=180, training={"processes": 2})
    four = make("four", speed=300, training={"processes": 4})
    column = "scaling efficiency"
    out = call(compare_runs, one, two, four, "--csv", tmp_path / "table.csv")[1]
    assert [row[column] for row in table_of(out)] == ["100.0 %", "90.0 %", "75.0 %"]
    assert [
        float(row["scaling_efficiency_percent"]) for row in read_rows(tmp_path / "table.csv")
    ] == [100, 90, 75]
    assert [
        row[column] for row in table_of(call(compare_runs, four, two, "--baseline", two)[1])
    ] == [
        "83.3 %",
        "100.0 %",
    ]
    assert (
        column not in call(compare_runs, two, make("again", speed=90, training={"processes": 2}))[1]
    )
    assert (
        column
        not in call(compare_runs, one, make("gone", **out_of_memory(), training={"processes": 2}))[
            1
        ]
    )
    odd = make("odd", training={"processes": "two"})
    assert_refused(call(compare_runs, one, odd), "training.processes is 'two', not a whole number")


def test_a_step_that_is_one_graph_has_a_column_of_its_own(make):
    eager, graph = make("eager"), make("graph", training={"cuda_graph": True})
    path = graph / "tiny_llama_v2_summary.json"
    result = json.loads(path.read_text())
    for phase in ("forward", "backward", "optimizer"):
        del result["timing"][f"{phase}_ms"]
    result["timing"]["graph_ms"] = 1.25
    path.write_text(json.dumps(result))
    rows = table_of(call(compare_runs, eager, graph)[1])
    assert [row["graph ms"] for row in rows] == ["-", "1.25"]
    assert [row["backward ms"] == "-" for row in rows] == [False, True]
    (row,) = table_of(call(compare_runs, graph)[1])
    assert "backward ms" not in row
    assert "graph ms" not in table_of(call(compare_runs, eager)[1])[0]


def test_files_of_an_earlier_harness_ran_in_one_process_and_without_a_graph(make):
    old = make("old")
    path = old / "tiny_llama_v2_summary.json"
    result = json.loads(path.read_text())
    del result["training"]["processes"], result["training"]["cuda_graph"]
    path.write_text(json.dumps(result))
    assert call(compare_runs, old, make("new"))[2] == ""


def test_what_runs_are_compared_for_is_named_above_the_table(make):
    """On a terminal: both streams in the order in which they were written."""
    other = make("b", training={"use_amp": True, "torch_compile": True})
    command = [sys.executable, ROOT / "analysis_tools" / "compare_runs.py", make("a"), other]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines()
    assert lines[0].endswith("precision differs: float32 for a; bfloat16 for b")
    assert lines[1].endswith("torch_compile differs: False for a; True for b")
    assert lines[2].startswith("| configuration")


@pytest.mark.parametrize("tool", ["compare", "plot"])
def test_different_models_are_refused(make, tool):
    """Their ratio would be a number without a meaning."""
    runs = f"a={make('llama')}", f"b={make('openfold', script='tiny_openfold_v2')}"
    answer = call(compare_runs, *runs) if tool == "compare" else call(plot_runs, "speedup", *runs)
    assert_refused(answer, "is a run of tiny_llama", "of tiny_openfold", "cannot be compared")


def test_a_sweep_is_a_row_for_each_run_whatever_its_outcome(make, tmp_path):
    """A loop in the shell and --csv: every size and fusion as a column, also of what failed."""
    more = {
        "fusions": {"qkv_fusion": True, "flash_attention": False},
        "kernels": {"host_launches": 700},
    }
    good = make("good", seq_len=64, **more)
    bad = make("bad", status="failed", error="the loss became nan at step 3", fusions={})
    gone = make(
        "gone",
        training={"use_amp": True, "torch_compile": True, "torch_compile_mode": "default"},
        **out_of_memory(),
    )
    assert call(compare_runs, good, bad, gone, "--csv", tmp_path / "sweep.csv")[0] == 1
    rows = {row["configuration"]: row for row in read_rows(tmp_path / "sweep.csv")}
    assert [row["status"] for row in rows.values()] == ["ok", "failed", "oom"]
    first = rows["good"]
    assert (first["seq_len"], first["qkv_fusion"], first["flash_attention"]) == ("64", "1", "0")
    assert (first["precision"], first["torch_compile"], first["cuda_graph"]) == ("float32", "", "0")
    assert (first["device"], first["processes"], first["host_launches"]) == ("cpu", "1", "700")
    assert float(first["final_loss"]) == summary(good)["loss"]["final"]
    assert (rows["bad"]["error"], rows["bad"]["samples_per_sec"]) == (
        "the loss became nan at step 3",
        "",
    )
    assert rows["bad"]["qkv_fusion"] == "0", "a fusion that a version does not have is off"
    assert (rows["gone"]["precision"], rows["gone"]["torch_compile"]) == ("bfloat16", "default")
    assert rows["gone"]["hidden_dim"] == rows["good"]["hidden_dim"]


def test_runs_from_directories_with_the_same_name_are_told_apart(make, tmp_path):
    paths = [make(name).rename(tmp_path / f"x{name}") / "run" for name in ("a", "b")]
    for path in paths:
        path.mkdir()
        (path.parent / "tiny_llama_v2_summary.json").rename(path / "tiny_llama_v2_summary.json")
    assert [row["configuration"] for row in table_of(call(compare_runs, *paths)[1])] == [
        str(p) for p in paths
    ]
    assert_refused(call(compare_runs, f"n={paths[0]}", f"n={paths[1]}"), "two runs are named n")


BROKEN = {
    "cut off": ('{"schema_version": 1,', "cut off"),
    "empty": ("", "cut off"),
    "a list": ("[1]", "not a JSON object"),
    "binary": ("\udcff\udcfe", "not JSON"),
    "another schema": ('{"schema_version": 2}', "schema_version is 2, not 1"),
    "no schema": ('{"status": "ok"}', "no schema_version"),
    "not a result": ('{"schema_version": 1, "config": {}}', "it has no script"),
    "nested too deep": ("[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("tool", ["compare", "plot"])
def test_a_broken_result_file_is_one_line(kind, tool, make, tmp_path):
    content, word = BROKEN[kind]
    directory = make("broken")
    path = directory / "tiny_llama_v2_summary.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    good = make("good")
    if tool == "compare":
        answer = call(compare_runs, good, directory)
    else:
        answer = call(plot_runs, "memory", f"a={good}", directory, "--output", tmp_path / "a.png")
    assert_refused(answer, word, str(path))


@pytest.mark.parametrize("value", ['"fast"', "NaN", "true", "[1]", "1" + "0" * 400])
def test_a_value_that_is_no_number_is_one_line(value, make):
    path = make("run") / "tiny_llama_v2_summary.json"
    path.write_text(
        re.sub(r'"samples_per_sec": [^,]+', f'"samples_per_sec": {value}', path.read_text())
    )
    assert_refused(call(compare_runs, path), "timing.samples_per_sec is", "not a number")


def test_a_median_that_is_no_number_is_one_line_too(make):
    status, _, err = call(compare_runs, make("run", timing={"batch_median_ms": "fast"}))
    assert status == 2
    assert len(err.splitlines()) == 1
    assert "timing.batch_median_ms is 'fast', not a number" in err


def test_directories_that_do_not_hold_one_result_are_one_line(make, tmp_path):
    (tmp_path / "nothing").mkdir()
    assert_refused(call(compare_runs, tmp_path / "nothing"), "no result file")
    assert_refused(call(compare_runs, tmp_path / "missing"), "no such file or directory")
    assert_refused(call(compare_runs, f"={tmp_path}"), "is not NAME=PATH")
    several = make("several")
    (several / "tiny_llama_v1_summary.json").write_text("{}")
    assert_refused(
        call(compare_runs, several), "tiny_llama_v1_summary.json, tiny_llama_v2_summary.json"
    )
    odd = make("odd", status="done")
    assert_refused(call(compare_runs, odd), "status is 'done', not")
    assert_refused(
        call(compare_runs, make("unit", kernels={"unit": 5})), "kernels.unit is 5, not text"
    )
    assert_refused(call(compare_runs, make("script", script=None)), "script is None, not text")


def test_paths_that_the_system_refuses_are_one_line(make, tmp_path):
    assert_refused(call(compare_runs, "a" * 300), "File name too long")
    run = make("run")
    for target in ("", "/"):
        status, _, err = call(compare_runs, run, "--csv", target)
        assert (status, len(err.splitlines())) == (2, 1)
        assert "not the name of a file" in err


def test_a_file_that_cannot_be_written_leaves_nothing(make, tmp_path):
    (tmp_path / "table.csv").mkdir()
    status, _, err = call(compare_runs, make("run"), "--csv", tmp_path / "table.csv")
    assert (status, len(err.splitlines())) == (2, 1)
    assert not [path.name for path in tmp_path.iterdir() if "tmp" in path.name]


def test_tables_are_not_written_over_a_directory_or_below_a_file(make, tmp_path):
    run = make("run")
    for target in (tmp_path, run / "tiny_llama_v2_summary.json" / "x.csv"):
        status, _, err = call(compare_runs, run, "--csv", target)
        assert status == 2
        assert len(err.splitlines()) == 1
        assert "cannot write there" in err


def test_disturbed_runs_are_named(make):
    quiet = make(
        "quiet",
        timing={"steps": 20, "samples_per_sec": 100.0, "batch_ms": 20.2, "batch_median_ms": 20.0},
    )
    disturbed = make(
        "disturbed",
        timing={"steps": 20, "samples_per_sec": 80.0, "batch_ms": 26.0, "batch_median_ms": 20.0},
    )
    line = "disturbed, its mean step took 1.30 times the median"
    for answer in (
        call(compare_runs, quiet, disturbed),
        call(plot_runs, "speedup", f"quiet={quiet}", f"disturbed={disturbed}"),
    ):
        assert answer[0] == 0
        assert len(answer[2].splitlines()) == 1
        assert line in answer[2]
    few = make("few", timing={"steps": 3, "batch_ms": 26.0, "batch_median_ms": 20.0})
    assert call(compare_runs, quiet, few)[2] == ""  # a median of three says little
    # memory is exact
    assert call(plot_runs, "memory", f"quiet={quiet}", f"disturbed={disturbed}")[2] == ""


def test_runs_kept_in_one_file_are_read_as_from_their_directories(make, tmp_path):
    directories = [make(f"batch_{n}", speed=100.0 * n, training={"batch_size": n}) for n in (1, 4)]
    file = tmp_path / "sweep.json"
    status, table, _ = call(compare_runs, *directories, "--save", file)
    assert status == 0
    assert call(compare_runs, file / "batch_1", file / "batch_4")[:2] == (0, table)
    plotted = (
        call(plot_runs, "memory", f"a={path}/batch_*", "--x", "batch_size")
        for path in (file, tmp_path)
    )
    assert len({answer[:2] for answer in plotted}) == 1
    assert_refused(call(compare_runs, file / "batch_2"), "batch_2: no such run", "batch_1, batch_4")
    assert_refused(call(plot_runs, "memory", f"a={file}/x_*"), "matches none of batch_1, batch_4")
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert_refused(call(compare_runs, other / "batch_1"), "other.json", "--save")


# plot_runs.py


def test_memory_plot_table_and_csv(make, tmp_path):
    pytest.importorskip("matplotlib")
    for length, scores, flash in ((128, 90, 60), (256, 200, 80)):
        make(f"scores_{length}", peak=scores, seq_len=length)
        make(f"flash_{length}", peak=flash, seq_len=length)
    make("scores_512", seq_len=512, **out_of_memory())
    make("flash_512", peak=120, seq_len=512)
    (tmp_path / "scores_128.log").write_text(
        "a log beside the directories, which the pattern matches too"
    )
    picture = tmp_path / "plots" / "memory.png"
    status, out, err = call(
        *(
            plot_runs,
            "memory",
            f"scores={tmp_path}/scores_*",
            f"flash={tmp_path}/flash_*",
            "--output",
            picture,
        )
    )
    assert (status, err) == (0, "")
    assert [list(row.values()) for row in table_of(out)] == [
        ["128", "90.0", "60.0", "0.67"],
        ["256", "200.0", "80.0", "0.40"],
        ["512", "out of memory", "120.0", "-"],
    ]
    rows = {(row["name"], row["seq_len"]): row for row in read_rows(picture.with_suffix(".csv"))}
    assert len(rows) == 6
    assert rows["scores", "512"]["status"] == "oom"
    assert rows["scores", "512"]["peak_mb"] == ""
    assert float(rows["flash", "256"]["ratio_over_scores"]) == pytest.approx(80 / 200)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_any_number_of_the_settings_can_be_the_axis(make, tmp_path):
    runs = [make(f"b{size}", peak=10 * size, training={"batch_size": size}) for size in (4, 1, 16)]
    status, out, err = call(
        plot_runs,
        "memory",
        f"v2={runs[0]}",
        *runs[1:],
        "--x",
        "batch_size",
        "--output",
        tmp_path / "m.png",
    )
    assert (status, err) == (0, "")
    assert [(row["batch size"], row["v2, MB"]) for row in table_of(out)] == [
        ("1", "10.0"),
        ("4", "40.0"),
        ("16", "160.0"),
    ]
    assert [row["batch_size"] for row in read_rows(tmp_path / "m.csv")] == ["1", "4", "16"]
    assert_refused(
        call(plot_runs, "memory", f"v2={runs[0]}", "--x", "colour"),
        "colour is no number in this result",
    )


def test_speedup_is_over_the_first_name(make, tmp_path):
    pytest.importorskip("matplotlib")
    off = [
        make(f"off{length}", speed=speed, seq_len=length)
        for length, speed in ((64, 100), (128, 50))
    ]
    on = [
        make(f"on{length}", speed=speed, seq_len=length)
        for length, speed in ((64, 150), (128, 200))
    ]
    status, out, _ = call(
        *(
            plot_runs,
            "speedup",
            f"off={off[0]}",
            off[1],
            f"on={on[0]}",
            on[1],
            "--output",
            tmp_path / "speed.svg",
        )
    )
    assert status == 0
    assert [(row["sequence length"], row["on / off"]) for row in table_of(out)] == [
        ("64", "1.50"),
        ("128", "4.00"),
    ]
    assert "<svg" in (tmp_path / "speed.svg").read_text()


def test_speedups_are_joined_only_where_turns_give_their_range(make, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn, subplots = [], pyplot.subplots
    monkeypatch.setattr(
        pyplot, "subplots", lambda **options: drawn.append(subplots(**options)) or drawn[-1]
    )
    for length in (64, 128):
        make(f"{length}", seq_len=length, timing={"turns_ms": [1.0, 2.0, 3.0]})
        make(f"{length}/baseline", seq_len=length, timing={"turns_ms": [2.0, 6.0, 15.0]})
        make(f"alone{length}", seq_len=length)
    sides = [
        f"{name}={tmp_path}/{pattern}"
        for name, pattern in (("off", "[0-9]*/baseline"), ("on", "[0-9]*"))
    ]
    status, out, _ = call(
        plot_runs, "speedup", *sides, f"alone={tmp_path}/alone*", "--output", tmp_path / "m.svg"
    )
    assert status == 0
    assert [row["on / off"] for row in table_of(out)] == ["3.00 (2.00 to 5.00)"] * 2
    assert [
        (row["lowest_of_turns"], row["highest_of_turns"]) for row in read_rows(tmp_path / "m.csv")
    ][2] == (
        "2.0",
        "5.0",
    )
    axes = drawn[0][1]
    styles = {line.get_label(): line.get_linestyle() for line in axes.lines}
    assert (styles["on"], styles["alone, single runs"]) == ("-", "None")
    assert [list(line.get_ydata()) for line in axes.lines if line.get_marker() == "_"] == [
        [2, 5]
    ] * 2
    assert axes.get_title().startswith("tiny_llama_v2 on ")
    assert axes.get_title().endswith(", float32")


def test_studies_of_fusions_are_plotted_over_the_length(tmp_path):
    """Each speed-up is over none of its own group; out of memory is a hole, not an error."""
    pytest.importorskip("matplotlib")

    def study(length: int, groups: list[dict[str, dict]]) -> Path:
        common = {"script": "tiny_openfold_v2", "precision": "fp32", "seed": 42, "argv": []}
        common |= {"batch_size": 2, "seq_len": length, "batch_ms": 1.0, "peak_mb": 100.0}
        rows = [
            {**common, "group": number, "side": name, "on": [], **row}
            for number, group in enumerate(groups)
            for name, row in group.items()
        ]
        path = tmp_path / f"length_{length}.json"
        path.write_text(json.dumps({"environment": {"device_name": "GPU"}, "rows": rows}))
        return path

    paths = [
        study(
            64,
            [
                {"none": {"turns_ms": [4.0, 4.0]}, "only a": {"turns_ms": [2.0, 1.0]}},
                {"none": {"turns_ms": [9.0, 9.0]}, "only b": {"turns_ms": [3.0, 3.0]}},
            ],
        ),
        study(
            128,
            [
                {
                    "none": {"turns_ms": [8.0, 8.0]},
                    "only a": {"status": "oom", "error": "no memory"},
                    "only b": {"turns_ms": [2.0, 2.0]},
                }
            ],
        ),
    ]
    status, out, err = call(plot_runs, "speedup", *paths, "--output", tmp_path / "m.svg")
    assert (status, err) == (0, "")
    assert [(row["only a / none"], row["only b / none"]) for row in table_of(out)] == [
        ("3.00 (2.00 to 4.00)", "3.00 (3.00 to 3.00)"),
        ("-", "4.00 (4.00 to 4.00)"),
    ]
    assert "GPU, fp32" in (tmp_path / "m.svg").read_text()
    other = json.loads(paths[0].read_text())
    other["rows"] = [row | {"side": "x"} for row in other["rows"]]
    paths[1].write_text(json.dumps(other))
    assert_refused(call(plot_runs, "speedup", paths[1]), "no ablation")


def test_the_picture_shows_what_the_table_says(make, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    subplots = pyplot.subplots
    monkeypatch.setattr(
        pyplot, "subplots", lambda **options: drawn.append(subplots(**options)) or drawn[-1]
    )
    make("a_64", peak=10, seq_len=64)
    make("a_128", peak=30, seq_len=128)
    make("b_64", peak=5, seq_len=64)
    make("b_128", seq_len=128, **out_of_memory())
    output = tmp_path / "m.png"
    assert (
        call(plot_runs, "memory", f"a={tmp_path}/a_*", f"b={tmp_path}/b_*", "--output", output)[0]
        == 0
    )
    lines = {
        line.get_label(): [list(map(float, data)) for data in line.get_data()]
        for line in drawn[0][1].lines
    }
    assert lines["a"] == [[64, 128], [10, 30]]
    assert lines["b"] == [[64], [5]]
    assert lines["b: out of memory"][0] == [128]
    assert drawn[0][1].get_ylim()[0] == 0


def test_failed_runs_and_other_batch_sizes_are_named(make, tmp_path):
    pytest.importorskip("matplotlib")
    make("a_64", seq_len=64)
    make("a_128", seq_len=128, training={"batch_size": 9})
    make("a_256", seq_len=256, status="failed", error="no luck")
    make("a_lost", status="failed", error="no model", config={})
    status, out, err = call(
        plot_runs, "memory", f"a={tmp_path}/a_*", "--output", tmp_path / "m.png"
    )
    assert status == 1
    assert [row["a, MB"] for row in table_of(out)] == ["50.0", "50.0", "failed"]
    assert "batch_size differs" in err
    assert "seq_len differs" not in err
    assert "a failed: no luck" in err
    assert "a failed: no model" in err


def test_without_matplotlib_the_numbers_are_there_all_the_same(make, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name: str, *rest, **more) -> ModuleType:
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    status, out, err = call(plot_runs, "memory", f"a={make('run')}", "--output", tmp_path / "m.png")
    assert (status, len(err.splitlines())) == (4, 1)
    assert "pip install matplotlib" in err
    assert table_of(out)[0]["a, MB"] == "50.0"
    assert len(read_rows(tmp_path / "m.csv")) == 1
    assert not (tmp_path / "m.png").exists()


def test_what_cannot_be_plotted_is_one_line(make, tmp_path):
    run, twin = make("run"), make("twin")
    output = ("--output", tmp_path / "m.png")
    assert_refused(call(plot_runs, "memory", run, *output), "is not NAME=PATH")
    assert_refused(call(plot_runs, "memory", f"a={run}", twin, *output), "two runs with seq_len 32")
    assert_refused(
        call(plot_runs, "memory", f"a={tmp_path}/none_*", *output), "the pattern matches no"
    )
    assert_refused(
        call(plot_runs, "memory", f"a={run}", "--output", tmp_path / "m.gif"), "must end in .png"
    )
    assert_refused(call(plot_runs, "colour", f"a={run}", *output), "invalid choice")
    lost = make("lost", **{**out_of_memory(), "config": {}})
    assert_refused(call(plot_runs, "memory", f"a={lost}", *output), "none of these runs")
    assert not list(tmp_path.glob("m.*"))


# analyze_kernel_reduction.py


def test_reduction_of_real_profiles(runs, tmp_path):
    status, out, err = call(
        *(
            analyze_kernel_reduction,
            "--baseline",
            runs.v1,
            "--fused",
            runs.v2,
            "--output",
            tmp_path / "out",
        )
    )
    assert (status, err) == (0, "")
    profiles = [json.loads(next(d.glob("*_profile.json")).read_text()) for d in (runs.v1, runs.v2)]
    before, after = (summary(d)["kernels"]["per_step"] for d in (runs.v1, runs.v2))
    assert after < before
    assert f"Operator calls, as the script counts, per step: {before} -> {after}" in out
    assert f"Kernel reduction: {100 * (1 - after / before):.1f} % (of operator calls)" in out
    rows = {row["category"]: row for row in table_of(out)}  # and of the phases below
    for name, share in (profiles[1]["categories"] | profiles[1]["phases"]).items():
        assert rows[name]["fused launches"] == f"{share['kernels_per_step']:.10g}"
        assert float(rows[name]["fused ms"]) == pytest.approx(share["ms_per_step"], abs=1e-3)
        assert float(rows[name]["fused share, %"]) == pytest.approx(share["percent"], abs=0.06)
    rows = {row["name"]: row for row in read_rows(tmp_path / "out" / "kernel_reduction.csv")}
    assert rows["aten::_softmax"]["found_in"] == "baseline"
    assert rows["aten::split_with_sizes"]["found_in"] == "fused"
    assert rows["aten::mm"]["found_in"] == "both"
    calls = sum(float(row["baseline_launches"]) for row in rows.values())
    # with views and operators that call others
    assert calls == pytest.approx(profiles[0]["operators_per_step"])
    # Projections, forward and the two GEMMs of backward: three become one, two become one, in each
    # of two layers.
    difference = float(rows["aten::mm"]["baseline_launches"]) - float(
        rows["aten::mm"]["fused_launches"]
    )
    assert difference == 3 * 2 * (2 + 1)
    written = (tmp_path / "out" / "kernel_reduction.md").read_text()
    assert out.startswith(written)


HEADER = "Name,Calls,TotalDurationNs,AverageNs,Percentage,MinNs,MaxNs,StdDev"
GEMM, ADD, COPY = (
    "Cijk_Ailk_Bljk_SB_MT64x64x16",
    "add_elementwise_kernel",
    "Memcpy HtoD (Pinned -> Device)",
)


def statistics_text(rows: dict[str, tuple[int, int]]) -> str:
    total = sum(time for _, time in rows.values())
    lines = [f'"{n}",{c},{t},{t / c},{100 * t / total},1,{t},0' for n, (c, t) in rows.items()]
    return "\n".join([HEADER, *lines]) + "\n"


@pytest.fixture
def gpu_profile(runs: Runs, tmp_path: Path) -> Callable[..., Path]:
    """`gpu_profile(name, rows, steps)`: what run_pytorch_profiler.py writes on a GPU, from
    {name: (calls, ns)}."""

    def write(name: str, rows: dict[str, tuple[int, int]], steps: int, **more) -> Path:
        profile = json.loads((runs.v2 / "tiny_llama_v2_profile.json").read_text())
        directory = tmp_path / name
        directory.mkdir()
        (directory / "x_kernels.csv").write_text(statistics_text(rows))
        calls = sum(calls for name, (calls, _) in rows.items() if name != COPY)
        profile |= {
            "unit": "kernels",
            "steps": steps,
            "kernels_per_step": calls / steps if steps else 0,
        }
        (directory / "x_profile.json").write_text(json.dumps({**profile, **more}))
        return directory

    return write


@pytest.fixture
def rocprof_profile(runs: Runs, tmp_path: Path) -> Callable[..., Path]:
    """`rocprof_profile(name, rows, steps)`: what run_rocprofv3.sh writes.

    Without `steps`, from a database alone.
    """

    def write(name: str, rows: dict[str, tuple[int, int]], steps: int | None = None) -> Path:
        directory = tmp_path / name
        (directory / "hotspots").mkdir(parents=True)
        (directory / "stats.csv").write_text(statistics_text(rows))
        if steps:
            (directory / "hotspots" / "7_kernel_stats.csv").write_text(statistics_text(rows))
            result = summary(runs.v2)
            result["timing"]["steps"] = result["training"]["num_steps"] = steps
            (directory / "hotspots" / "tiny_llama_v2_summary.json").write_text(json.dumps(result))
        return directory

    return write


def test_copies_are_no_kernels_and_counts_are_per_step(gpu_profile):
    before = gpu_profile(
        "off", {GEMM: (12, 8_000_000), ADD: (4, 1_000_000), COPY: (6, 1_000_000)}, steps=2
    )
    after = gpu_profile("on", {GEMM: (12, 6_000_000), COPY: (3, 3_000_000)}, steps=3)
    status, out, err = call(analyze_kernel_reduction, "--baseline", before, "--fused", after)
    assert (status, err) == (0, "")
    assert "Kernels per step: 8 -> 4" in out
    assert "Kernel reduction: 50.0 %" in out
    assert "Kernel time per step: 5.000 ms -> 3.000 ms (-40.0 %)" in out
    assert "Distinct names: 2 -> 1" in out
    rows = {row["category"]: row for row in table_of(out)}
    assert (rows["copies"]["baseline launches"], rows["copies"]["fused launches"]) == ("3", "1")
    assert (rows["element-wise"]["fused launches"], rows["element-wise"]["change"]) == (
        "0",
        "-100.0 %",
    )


def test_rocprofv3_folders_count_the_measured_steps(rocprof_profile):
    before = rocprof_profile(
        "rocprofv3_results_baseline", {GEMM: (40, 2_000_000), ADD: (20, 1_000_000)}, steps=10
    )
    after = rocprof_profile(
        "rocprofv3_results_fused", {GEMM: (10, 500_000), "attn_fwd.kd": (5, 500_000)}, steps=5
    )
    status, out, err = call(analyze_kernel_reduction, "--baseline", before, "--fused", after)
    assert (status, err) == (0, "")
    assert "Kernels per step: 6 -> 3" in out
    vanished, new = (
        out.partition(f"## {title}")[2].partition("\n## ")[0] for title in ("Vanished", "New")
    )
    assert "add_elementwise_kernel" in vanished
    assert "attn_fwd" in new
    assert "1 launches and 0.100 ms per step" in new


def test_without_the_steps_totals_are_compared_and_said_to_be(rocprof_profile):
    before = rocprof_profile("a", {GEMM: (40, 2_000_000)})
    after = rocprof_profile("b", {GEMM: (10, 500_000)}, steps=5)
    # Statistics made from another run's database beside the files of an earlier run: their steps
    # mean nothing.
    stale = rocprof_profile("c", {GEMM: (10, 500_000)}, steps=5)
    (stale / "stats.csv").write_text(statistics_text({GEMM: (30, 500_000)}))
    for baseline, fused, counts in ((before, after, "40 -> 10"), (stale, after, "30 -> 10")):
        status, out, err = call(analyze_kernel_reduction, "--baseline", baseline, "--fused", fused)
        assert status == 0
        assert f"Kernels in all: {counts}" in out
        assert "the number of steps is not known" in err


def test_a_name_that_is_listed_twice_counts_twice(rocprof_profile):
    before, after = (
        rocprof_profile("a", {GEMM: (10, 500_000)}),
        rocprof_profile("b", {GEMM: (10, 500_000)}),
    )
    row = f'"{GEMM}",10,500000,50000,50,1,1,0\n'
    (before / "stats.csv").write_text(f"{HEADER}\n{row}{row}")
    out = call(analyze_kernel_reduction, "--baseline", before, "--fused", after)[1]
    assert "Kernels in all: 20 -> 10" in out
    assert "1.000 ms -> 0.500 ms" in out


def test_long_tables_are_cut_and_the_csv_is_not(gpu_profile, tmp_path):
    rows = {f"kernel_{i}_elementwise": (1, 1000 * (i + 1)) for i in range(20)}
    before, after = gpu_profile("off", rows, 1), gpu_profile("on", {GEMM: (1, 1000)}, 1)
    argv = ("--baseline", before, "--fused", after, "--output", tmp_path / "out", "--top", 3)
    out = call(analyze_kernel_reduction, *argv)[1]
    assert re.findall(r"`kernel_(\d+)_", out) == ["19", "18", "17"]
    assert "The first 3;" in out
    assert len(read_rows(tmp_path / "out" / "kernel_reduction.csv")) == 21
    out = call(analyze_kernel_reduction, "--baseline", before, "--fused", after, "--top", 0)[1]
    assert "Kernel reduction: 95.0 %" in out
    assert "kernel_19_" not in out


def test_profiles_of_other_sizes_or_tools_get_a_note(gpu_profile, rocprof_profile, runs):
    config = {**summary(runs.v2)["config"], "seq_len": 999}
    before, after = (
        gpu_profile("off", {GEMM: (2, 10)}, 1, config=config),
        gpu_profile("on", {GEMM: (1, 10)}, 1),
    )
    err = call(analyze_kernel_reduction, "--baseline", before, "--fused", after)[2]
    assert "seq_len differs: 999 for baseline; 32 for fused" in err
    err = call(
        analyze_kernel_reduction,
        "--baseline",
        after,
        "--fused",
        rocprof_profile("r", {GEMM: (1, 10)}, 1),
    )[2]
    assert "two profilers may write the name" in err


def test_broken_profiles_are_one_line(runs, gpu_profile, rocprof_profile, tmp_path):
    good = gpu_profile("good", {GEMM: (2, 10)}, 1)

    def refused(directory: Path, *words: str) -> None:
        assert_refused(
            call(analyze_kernel_reduction, "--baseline", good, "--fused", directory), *words
        )

    (tmp_path / "nothing").mkdir()
    refused(tmp_path / "missing", "no such directory")
    refused(
        tmp_path / "nothing", "neither <script>_kernels.csv (run_pytorch_profiler.py) nor stats.csv"
    )
    refused(runs.v1, "one side has kernels, the other operators")
    refused(gpu_profile("steps", {GEMM: (2, 10)}, 0), "steps is 0, not")
    refused(gpu_profile("copies", {COPY: (2, 10)}, 1), "the profile has no kernels")
    refused(gpu_profile("schema", {GEMM: (2, 10)}, 1, schema_version=7), "schema_version is 7")
    mixed = gpu_profile("mixed", {GEMM: (2, 10)}, 1)
    (mixed / "x_kernels.csv").write_text(statistics_text({GEMM: (3, 10)}))
    refused(mixed, "3 calls do not belong to x_profile.json, 1 steps of 2.0 kernels")
    odd = shutil.copytree(runs.v1, tmp_path / "odd") / "tiny_llama_v1_profile.json"
    odd.write_text(re.sub(r'"per_step": \d+', '"per_step": "many"', odd.read_text()))
    refused(odd.parent, "kernels.per_step is 'many', not")
    alone = gpu_profile("alone", {GEMM: (2, 10)}, 1)
    (alone / "x_profile.json").unlink()
    refused(alone, "x_profile.json")
    cut = rocprof_profile("cut", {GEMM: (2, 10), ADD: (2, 10)})
    (cut / "stats.csv").write_text("\n".join((cut / "stats.csv").read_text().splitlines()[:2]))
    refused(cut, "is the file cut off?")
    (cut / "stats.csv").write_text("Kernel,Time\n")
    refused(cut, "the header lacks")
    assert_refused(
        call(analyze_kernel_reduction, "--baseline", good, "--fused", good, "--top", "-1"),
        "0 or more",
    )


# As users call them


@pytest.mark.parametrize("tool", ["compare_runs", "plot_runs", "analyze_kernel_reduction"])
def test_tools_run_from_anywhere_without_an_installation(tool, tmp_path):
    command = [sys.executable, "-S", str(ROOT / "analysis_tools" / f"{tool}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"python analysis_tools/{tool}.py" in done.stdout
    assert done.stderr == ""


def test_committed_results_can_be_compared(tmp_path):
    paths = [
        ROOT / "results" / "h100" / "exercises.json" / "llama_v2" / version
        for version in ("v1", "v2")
    ]
    status, out, err = call(compare_runs, *paths)
    assert (status, err) == (0, "")
    assert [row["kernels per step"] for row in table_of(out)] == ["1072", "759"]
    assert [row["configuration"] for row in table_of(out)] == ["v1", "v2"]

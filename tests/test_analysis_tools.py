"""The analysis tools: their numbers are those of the result files, and what they cannot use they
say in one line. What any of them does with a damaged file is in test_damaged_files.py."""

from __future__ import annotations

import builtins
import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
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


def assert_refused(answer: Answer, *words: str) -> None:
    """One line on stderr with these words, nothing that looks like a result on stdout."""
    assert (*answer[:2], len(answer[2].splitlines())) == (2, "", 1), answer
    for word in words:
        assert word in answer[2]


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of real tiny runs, V1 and V2 under the PyTorch profiler."""
    folder = tmp_path_factory.mktemp("analysis")
    for version in ("v1", "v2"):
        argv = ["--script", f"tiny_llama_{version}.py", *TINY["llama"], *QUICK, "--device", "cpu"]
        answer = call(profiler_tool, *argv, "--profile-dir", folder / version)
        assert answer[0] == 0, answer
    return folder / "v1", folder / "v2"


def summary(directory: Path) -> dict:
    (path,) = directory.glob("*_summary.json")
    return strict_json(path.read_text())


@pytest.fixture
def make(runs, tmp_path: Path) -> Callable[..., Path]:
    """`make(name, speed=, peak=, seq_len=, ...)`: the directory of a hand-made result, otherwise
    that of the V2 run."""

    def write(name: str, *, speed=100.0, peak=50.0, seq_len=32, **more) -> Path:
        result = summary(runs[1])
        result["config"]["seq_len"] = seq_len
        result["timing"]["samples_per_sec"], result["memory"]["peak_mb"] = speed, peak
        for key, value in more.items():
            result[key] = {**result[key], **value} if isinstance(value, dict) and value else value
        directory = tmp_path / name
        directory.mkdir()
        (directory / "tiny_llama_v2_summary.json").write_text(json.dumps(result))
        return directory

    return write


OOM = {"status": "oom", "error": "out of memory", "timing": {}, "memory": {}, "kernels": {}}
FAILED = {"status": "failed", "error": "the loss became nan at step 3"}


# compare_runs.py


def test_comparison_has_the_numbers_of_the_result_files(runs, tmp_path):
    argv = [f"base={runs[0]}", runs[1], "--csv", tmp_path / "deep" / "table.csv"]
    status, out, err = call(compare_runs, *argv)
    assert (status, err) == (0, "")
    first, second = map(summary, runs)
    rows = table_of(out)
    assert [row["configuration"] for row in rows] == ["base", "v2"]
    for row, result in zip(rows, (first, second), strict=True):
        timing = result["timing"]
        assert float(row["samples/sec"]) == pytest.approx(timing["samples_per_sec"], abs=0.051)
        assert row["ms per step"] == f"{timing['batch_ms']:.2f}"
        for phase in ("forward", "backward", "optimizer"):
            assert row[f"{phase} ms"] == f"{timing[f'{phase}_ms']:.2f}"
        assert row["peak MB"] == f"{result['memory']['peak_mb']:.1f}"
        assert row["operator calls per step"] == str(result["kernels"]["per_step"])
        assert row["final loss"] == f"{result['loss']['curve'][-1]:.4f}"
    speedup = second["timing"]["samples_per_sec"] / first["timing"]["samples_per_sec"]
    change = 100 * (second["memory"]["peak_mb"] / first["memory"]["peak_mb"] - 1)
    assert rows[1]["speed-up"] == f"{speedup:.2f}x"
    assert rows[1]["memory change"] == f"{change:+.1f} %"
    (_, exact) = read_rows(tmp_path / "deep" / "table.csv")
    assert float(exact["speedup"]) == pytest.approx(speedup)


def test_the_baseline_can_be_any_run_and_gets_a_row_of_its_own(make):
    slow, fast, half = make("slow", speed=50), make("fast", speed=200), make("half", speed=25)
    rows = table_of(call(compare_runs, slow, fast, "--baseline", fast)[1])
    assert [row["speed-up"] for row in rows] == ["0.25x", "1.00x"]
    rows = table_of(call(compare_runs, slow, fast, "--baseline", f"unfused={half}")[1])
    found = [(row["configuration"], row["speed-up"]) for row in rows]
    assert found == [("unfused", "1.00x"), ("slow", "2.00x"), ("fast", "8.00x")]


def test_runs_that_did_not_finish_are_rows_without_ratios(make):
    good, gone, bad = make("good"), make("gone", **OOM), make("bad", **FAILED)
    status, out, err = call(compare_runs, good, gone)
    row = table_of(out)[1]
    assert (status, err, row["samples/sec"]) == (0, "", "out of memory")
    assert {row[name] for name in ("speed-up", "ms per step", "peak MB", "memory change")} == {"-"}
    _, out, err = call(compare_runs, gone, good)
    assert table_of(out)[1]["speed-up"] == "-" and "baseline gone did not finish" in err
    status, out, err = call(compare_runs, good, bad)
    row = table_of(out)[1]
    assert (status, row["samples/sec"], row["speed-up"]) == (1, "failed", "-")
    assert "bad failed: the loss became nan at step 3" in err
    rows = table_of(call(compare_runs, "--no-times", good, gone)[1])
    assert "speed-up" not in rows[0] and rows[1]["peak MB"] == "out of memory"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"seq_len": 64}, "seq_len differs: 32 for a; 64 for b"),
        ({"training": {"batch_size": 7}}, "batch_size differs: 2 for a; 7 for b"),
        ({"training": {"cuda_graph": True}}, "cuda_graph differs: False for a; True for b"),
        ({"environment": {"device_name": "MI300X"}}, "device_name differs:"),
        ({"training": {"use_amp": True}}, "precision differs: float32 for a; bfloat16 for b"),
    ],
)
def test_runs_that_cannot_be_compared_get_a_note(make, more, line):
    status, out, err = call(compare_runs, make("a"), make("b", **more))
    assert (status, len(table_of(out)), len(err.splitlines())) == (0, 2, 1)
    assert line in err


def test_notes_are_above_the_table_on_a_terminal(make):
    command = [sys.executable, ROOT / "analysis_tools/compare_runs.py"]
    command += [make("a"), make("b", training={"use_amp": True})]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert [line[:3] for line in done.stdout.splitlines()[:2]] == ["com", "| c"]


def test_scaling_efficiency_where_the_numbers_of_processes_differ(make):
    one, two = make("one", speed=100), make("two", speed=180, training={"processes": 2})
    four, column = make("four", speed=300, training={"processes": 4}), "scaling efficiency"
    rows = table_of(call(compare_runs, one, two, four)[1])
    assert [row[column] for row in rows] == ["100.0 %", "90.0 %", "75.0 %"]
    rows = table_of(call(compare_runs, four, two, "--baseline", two)[1])
    assert [row[column] for row in rows] == ["83.3 %", "100.0 %"]
    again = make("again", speed=90, training={"processes": 2})
    assert column not in call(compare_runs, two, again)[1]


def edit(directory: Path, change: Callable[[dict], object]) -> Path:
    """The directory with a changed result."""
    (path,) = directory.glob("*_summary.json")
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))
    return directory


def test_a_step_that_is_one_graph_has_a_column_of_its_own(make):
    def one_graph(result: dict) -> None:
        for phase in ("forward", "backward", "optimizer"):
            del result["timing"][f"{phase}_ms"]
        result["timing"]["graph_ms"] = 1.25

    graph = edit(make("graph", training={"cuda_graph": True}), one_graph)
    rows = table_of(call(compare_runs, make("eager"), graph)[1])
    assert [row["graph ms"] for row in rows] == ["-", "1.25"]
    assert [row["backward ms"] == "-" for row in rows] == [False, True]
    assert "backward ms" not in call(compare_runs, graph)[1]


def test_files_of_an_earlier_harness_ran_in_one_process_and_without_a_graph(make):
    def older(result: dict) -> None:
        del result["training"]["processes"], result["training"]["cuda_graph"]

    assert call(compare_runs, edit(make("old"), older), make("new"))[2] == ""


def test_different_models_are_refused(make):
    """Their ratio would be a number without a meaning."""
    runs = f"a={make('llama')}", f"b={make('openfold', script='tiny_openfold_v2')}"
    for answer in (call(compare_runs, *runs), call(plot_runs, "memory", *runs)):
        assert_refused(answer, "is a run of tiny_llama", "of tiny_openfold", "cannot be compared")


def test_a_sweep_is_a_row_for_each_run_whatever_its_outcome(make, tmp_path):
    """Every size and fusion is a column, also of what failed."""
    fusions = {"qkv_fusion": True, "flash_attention": False}
    good, bad = make("good", seq_len=64, fusions=fusions), make("bad", **FAILED, fusions={})
    compiled = {"use_amp": True, "torch_compile": True, "torch_compile_mode": "default"}
    gone = make("gone", training=compiled, **OOM)
    assert call(compare_runs, good, bad, gone, "--csv", tmp_path / "sweep.csv")[0] == 1
    first, second, third = read_rows(tmp_path / "sweep.csv")
    assert [row["status"] for row in (first, second, third)] == ["ok", "failed", "oom"]
    assert (first["seq_len"], first["qkv_fusion"], first["flash_attention"]) == ("64", "1", "0")
    assert (first["precision"], first["torch_compile"], first["cuda_graph"]) == ("float32", "", "0")
    assert (second["error"], second["samples_per_sec"]) == (FAILED["error"], "")
    assert second["qkv_fusion"] == "0", "a fusion that a version does not have is off"
    assert (third["precision"], third["torch_compile"]) == ("bfloat16", "default")
    assert third["hidden_dim"] == first["hidden_dim"]


def test_runs_from_directories_with_the_same_name_are_told_apart(make, tmp_path):
    paths = [tmp_path / part / "run" for part in "ab"]
    for path in paths:
        path.parent.mkdir()
        make(path.parent.name * 2).rename(path)
    rows = table_of(call(compare_runs, *paths)[1])
    assert [row["configuration"] for row in rows] == [*map(str, paths)]
    assert_refused(call(compare_runs, f"n={paths[0]}", f"n={paths[1]}"), "two runs are named n")


BROKEN = {
    '{"schema_version": 1,': "cut off",
    "[1]": "not a JSON object",
    "\udcff\udcfe": "not JSON",
    '{"schema_version": 2}': "schema_version is 2, not 1",
    '{"status": "ok"}': "no schema_version",
    '{"schema_version": 1, "config": {}}': "it has no script",
    "[" * 100_000: "not JSON",
}


@pytest.mark.parametrize("content", BROKEN, ids=BROKEN.values())
def test_a_broken_result_file_is_one_line(content, make):
    path = make("broken") / "tiny_llama_v2_summary.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert_refused(call(compare_runs, path), BROKEN[content], str(path))


@pytest.mark.parametrize("value", ['"fast"', "NaN", "true", "[1]", "1" + "0" * 400])
def test_a_value_that_is_no_number_is_one_line(value, make):
    path = make("run") / "tiny_llama_v2_summary.json"
    path.write_text(re.sub(r'"final": [^,}]+', f'"final": {value}', path.read_text()))
    assert_refused(call(compare_runs, path), "loss.final is", "not a number")


def test_paths_that_cannot_be_used_are_one_line(make, tmp_path):
    run, nothing = make("run"), tmp_path / "nothing"
    nothing.mkdir()
    assert_refused(call(compare_runs, nothing), "no result file")
    assert_refused(call(compare_runs, tmp_path / "missing"), "no such file or directory")
    assert_refused(call(compare_runs, f"={tmp_path}"), "is not NAME=PATH")
    assert_refused(call(compare_runs, "a" * 300), "File name too long")
    (make("several") / "tiny_llama_v1_summary.json").write_text("{}")
    names = "tiny_llama_v1_summary.json, tiny_llama_v2_summary.json"
    assert_refused(call(compare_runs, tmp_path / "several"), names)
    before = sorted(tmp_path.rglob("*"))
    below = run / "tiny_llama_v2_summary.json" / "x.csv"
    for target, said in ((nothing, "cannot write there"), (below, "cannot write there"),
                         ("", "not the name of a file")):  # fmt: skip
        status, _, err = call(compare_runs, run, "--csv", target)
        assert (status, len(err.splitlines()), said in err) == (2, 1, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_disturbed_runs_are_named(make):
    times = {"steps": 20, "batch_median_ms": 20.0}
    quiet = make("quiet", timing={**times, "batch_ms": 20.2})
    disturbed = make("disturbed", timing={**times, "batch_ms": 26.0})
    (line,) = call(compare_runs, quiet, disturbed)[2].splitlines()
    assert "disturbed, its mean step took 1.30 times the median" in line
    few = make("few", timing={**times, "steps": 3, "batch_ms": 26.0})
    assert call(compare_runs, quiet, few)[2] == "", "a median of three says little"


def test_runs_kept_in_one_file_are_read_as_from_their_directories(make, tmp_path):
    directories = [make(f"batch_{n}", speed=100.0 * n, training={"batch_size": n}) for n in (1, 4)]
    file = tmp_path / "sweep.json"
    status, table, _ = call(compare_runs, *directories, "--save", file)
    assert status == 0
    assert call(compare_runs, file / "batch_1", file / "batch_4")[:2] == (0, table)
    plotted = (call(plot_runs, "memory", f"a={path}/batch_*", "--x", "batch_size")
               for path in (file, tmp_path))  # fmt: skip
    assert len({answer[:2] for answer in plotted}) == 1
    assert_refused(call(compare_runs, file / "batch_2"), "no such run", "batch_1, batch_4")
    assert_refused(call(plot_runs, "memory", f"a={file}/x_*"), "matches none of batch_1, batch_4")
    (tmp_path / "other.json").write_text("{}")
    assert_refused(call(compare_runs, tmp_path / "other.json" / "batch_1"), "--save")


def test_committed_results_can_be_compared():
    folder = ROOT / "results/h100/exercises.json/llama_v2"
    status, out, err = call(compare_runs, folder / "v1", folder / "v2")
    assert (status, err) == (0, "")
    assert [row["kernels per step"] for row in table_of(out)] == ["1072", "759"]


# plot_runs.py


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The axes of what is drawn."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    found, subplots = [], pyplot.subplots

    def watched(**options):
        figure, axes = subplots(**options)
        found.append(axes)
        return figure, axes

    monkeypatch.setattr(pyplot, "subplots", watched)
    return found


def test_memory_plot_table_and_csv_show_the_same(make, tmp_path, drawn):
    for length, scores, flash in ((128, 90, 60), (256, 200, 80)):
        make(f"scores_{length}", peak=scores, seq_len=length)
        make(f"flash_{length}", peak=flash, seq_len=length)
    make("scores_512", seq_len=512, **OOM)
    make("flash_512", peak=120, seq_len=512)
    (tmp_path / "scores_128.log").write_text("a log, which the pattern matches, too")
    sides = [f"{name}={tmp_path}/{name}_*" for name in ("scores", "flash")]
    picture = tmp_path / "plots" / "memory.png"
    status, out, err = call(plot_runs, "memory", *sides, "--output", picture)
    assert (status, err) == (0, "")
    assert [list(row.values()) for row in table_of(out)] == [
        ["128", "90.0", "60.0", "0.67"],
        ["256", "200.0", "80.0", "0.40"],
        ["512", "out of memory", "120.0", "-"],
    ]
    rows = {(row["name"], row["seq_len"]): row for row in read_rows(picture.with_suffix(".csv"))}
    assert (len(rows), rows["scores", "512"]["peak_mb"]) == (6, "")
    assert float(rows["flash", "256"]["over_first"]) == pytest.approx(80 / 200)
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = {line.get_label(): [*map(list, line.get_data())] for line in drawn[0].lines}
    assert lines["flash"] == [[128, 256, 512], [60, 80, 120]]
    assert lines["scores: out of memory"][0] == [512]
    assert drawn[0].get_title().endswith(", float32")


def test_any_setting_is_the_axis_and_ratios_are_over_the_first_name(make):
    off, on = ([make(f"{name}{size}", peak=peak, training={"batch_size": size})
                for size, peak in zip((4, 1), peaks, strict=True)]
               for name, peaks in (("off", (100, 50)), ("on", (150, 200))))  # fmt: skip
    sides = [f"off={off[0]}", off[1], f"on={on[0]}", on[1]]
    status, out, _ = call(plot_runs, "memory", *sides, "--x", "batch_size")
    assert status == 0
    rows = [(row["batch size"], row["on / off"]) for row in table_of(out)]
    assert rows == [("1", "4.00"), ("4", "1.50")]
    answer = call(plot_runs, "memory", sides[0], "--x", "colour")
    assert_refused(answer, "colour is no number in this result")
    assert_refused(call(plot_runs, "speedup", *sides), "compare_runs.py")


def test_studies_of_fusions_are_plotted_over_the_length(tmp_path, drawn):
    """Each speed-up is over none of its own group; out of memory is a hole, not an error."""

    def study(length: int, *groups: dict[str, list[float] | None]) -> Path:
        common = {"script": "tiny_openfold_v2", "precision": "fp32", "seed": 42, "argv": []}
        common |= {"batch_size": 2, "seq_len": length, "batch_ms": 1.0, "peak_mb": 100.0, "on": []}
        rows = []
        for number, group in enumerate(groups):
            for side, turns in group.items():
                found = {"turns_ms": turns} if turns else {"status": "oom", "error": "no memory"}
                rows.append({**common, "group": number, "side": side, **found})
        path = tmp_path / f"length_{length}.json"
        path.write_text(json.dumps({"environment": {"device_name": "GPU"}, "rows": rows}))
        return path

    first = study(64, {"none": [4.0, 4.0], "only a": [2.0, 1.0]},
                  {"none": [9.0, 9.0], "only b": [3.0, 3.0]})  # fmt: skip
    second = study(128, {"none": [8.0, 8.0], "only a": None, "only b": [2.0, 2.0]})
    status, out, err = call(plot_runs, "speedup", first, second)
    assert (status, err) == (0, "")
    assert [(row["only a / none"], row["only b / none"]) for row in table_of(out)] == [
        ("3.00 (2.00 to 4.00)", "3.00 (3.00 to 3.00)"),
        ("-", "4.00 (4.00 to 4.00)"),
    ]
    assert call(plot_runs, "speedup", first, second, "--output", tmp_path / "m.svg")[0] == 0
    ranges = [path.vertices[:, 1].tolist() for path in drawn[0].collections[1].get_paths()]
    assert ranges == [[2, 4]]
    assert_refused(call(plot_runs, "speedup", study(32, {"x": [1.0]})), "no ablation")


def test_failed_runs_and_other_batch_sizes_are_named(make, tmp_path):
    make("a_64", seq_len=64)
    make("a_128", seq_len=128, training={"batch_size": 9})
    make("a_256", seq_len=256, **FAILED)
    make("a_lost", status="failed", error="no model", config={})
    status, out, err = call(plot_runs, "memory", f"a={tmp_path}/a_*")
    assert (status, [row["a, MB"] for row in table_of(out)]) == (1, ["50.0", "50.0", "failed"])
    for said in ("batch_size differs", "a failed: the loss became nan", "a failed: no model"):
        assert said in err
    assert "seq_len differs" not in err


def test_without_matplotlib_the_numbers_are_there_all_the_same(make, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name: str, *rest, **more) -> ModuleType:
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    status, out, err = call(plot_runs, "memory", f"a={make('run')}", "--output", tmp_path / "m.png")
    assert (status, len(err.splitlines()), "pip install matplotlib" in err) == (4, 1, True)
    assert table_of(out)[0]["a, MB"] == "50.0"
    assert len(read_rows(tmp_path / "m.csv")) == 1
    assert not (tmp_path / "m.png").exists()


def test_what_cannot_be_plotted_is_one_line(make, tmp_path):
    run, twin, lost = make("run"), make("twin"), make("lost", **{**OOM, "config": {}})
    for argv, said in (
        ([run], "is not NAME=PATH"),
        ([f"a={run}", twin], "two runs with seq_len 32"),
        ([f"a={tmp_path}/none_*"], "the pattern matches no"),
        ([f"a={lost}"], "none of these runs"),
        ([f"a={run}", "--output", tmp_path / "m.gif"], "must end in .png"),
    ):
        assert_refused(call(plot_runs, "memory", "--output", tmp_path / "m.png", *argv), said)
    assert not list(tmp_path.glob("m.*"))


# analyze_kernel_reduction.py


def analyze(baseline: Path, fused: Path, *argv: object) -> Answer:
    return call(analyze_kernel_reduction, "--baseline", baseline, "--fused", fused, *argv)


def test_reduction_of_real_profiles(runs, tmp_path):
    status, out, err = analyze(*runs, "--output", tmp_path / "out")
    assert (status, err) == (0, "")
    profiles = [json.loads(next(d.glob("*_profile.json")).read_text()) for d in runs]
    before, after = (summary(directory)["kernels"]["per_step"] for directory in runs)
    assert after < before
    assert f"Operator calls, as the script counts, per step: {before} -> {after}" in out
    assert f"Kernel reduction: {100 * (1 - after / before):.1f} % (of operator calls)" in out
    rows = {row["category"]: row for row in table_of(out)}  # and of the phases below
    for name, share in (profiles[1]["categories"] | profiles[1]["phases"]).items():
        assert rows[name]["fused launches"] == f"{share['kernels_per_step']:.10g}"
        assert float(rows[name]["fused ms"]) == pytest.approx(share["ms_per_step"], abs=1e-3)
        assert float(rows[name]["fused share, %"]) == pytest.approx(share["percent"], abs=0.06)
    rows = {row["name"]: row for row in read_rows(tmp_path / "out" / "kernel_reduction.csv")}
    for name, side in (("_softmax", "baseline"), ("split_with_sizes", "fused"), ("mm", "both")):
        assert rows[f"aten::{name}"]["found_in"] == side
    # Projections, forward and the two GEMMs of backward: three become one, two become one, in each
    # of two layers.
    gemms = [float(rows["aten::mm"][f"{side}_launches"]) for side in ("baseline", "fused")]
    assert gemms[0] - gemms[1] == 3 * 2 * (2 + 1)
    assert out.startswith((tmp_path / "out" / "kernel_reduction.md").read_text())


HEADER = "Name,Calls,TotalDurationNs,AverageNs,Percentage,MinNs,MaxNs,StdDev"
GEMM, ADD = "Cijk_Ailk_Bljk_SB_MT64x64x16", "add_elementwise_kernel"
COPY = "Memcpy HtoD (Pinned -> Device)"
Rows = dict[str, tuple[int, int]]  # of each name: calls, ns


def statistics_text(rows: Rows) -> str:
    total = sum(time for _, time in rows.values())
    lines = [f'"{n}",{c},{t},{t / c},{100 * t / total},1,{t},0' for n, (c, t) in rows.items()]
    return "\n".join([HEADER, *lines]) + "\n"


@pytest.fixture
def gpu_profile(runs, tmp_path: Path) -> Callable[..., Path]:
    """`gpu_profile(name, rows, steps)`: what run_pytorch_profiler.py writes on a GPU."""

    def write(name: str, rows: Rows, steps: int, **more) -> Path:
        profile = json.loads((runs[1] / "tiny_llama_v2_profile.json").read_text())
        directory = tmp_path / name
        directory.mkdir()
        (directory / "x_kernels.csv").write_text(statistics_text(rows))
        calls = sum(calls for name, (calls, _) in rows.items() if name != COPY)
        per_step = calls / steps if steps else 0
        profile |= {"unit": "kernels", "steps": steps, "kernels_per_step": per_step, **more}
        (directory / "x_profile.json").write_text(json.dumps(profile))
        return directory

    return write


@pytest.fixture
def rocprof_profile(runs, tmp_path: Path) -> Callable[..., Path]:
    """`rocprof_profile(name, rows, steps)`: what run_rocprofv3.sh writes; without `steps`, from a
    database alone."""

    def write(name: str, rows: Rows, steps: int | None = None) -> Path:
        directory = tmp_path / name
        (directory / "hotspots").mkdir(parents=True)
        (directory / "stats.csv").write_text(statistics_text(rows))
        if steps:
            (directory / "hotspots" / "7_kernel_stats.csv").write_text(statistics_text(rows))
            result = summary(runs[1])
            result["timing"]["steps"] = result["training"]["num_steps"] = steps
            (directory / "hotspots" / "tiny_llama_v2_summary.json").write_text(json.dumps(result))
        return directory

    return write


def test_copies_are_no_kernels_and_counts_are_per_step(gpu_profile):
    rows = {GEMM: (12, 8_000_000), ADD: (4, 1_000_000), COPY: (6, 1_000_000)}
    before = gpu_profile("off", rows, steps=2)
    after = gpu_profile("on", {GEMM: (12, 6_000_000), COPY: (3, 3_000_000)}, steps=3)
    status, out, err = analyze(before, after)
    assert (status, err) == (0, "")
    for line in ("Kernels per step: 8 -> 4", "Kernel reduction: 50.0 %", "Distinct names: 2 -> 1",
                 "Kernel time per step: 5.000 ms -> 3.000 ms (-40.0 %)"):  # fmt: skip
        assert line in out
    rows = {row["category"]: row for row in table_of(out)}
    assert (rows["copies"]["baseline launches"], rows["copies"]["fused launches"]) == ("3", "1")
    assert rows["element-wise"]["change"] == "-100.0 %"


def test_rocprofv3_folders_count_the_measured_steps(rocprof_profile):
    before = rocprof_profile("a", {GEMM: (40, 2_000_000), ADD: (20, 1_000_000)}, steps=10)
    after = rocprof_profile("b", {GEMM: (10, 500_000), "attn_fwd.kd": (5, 500_000)}, steps=5)
    status, out, err = analyze(before, after)
    assert (status, err, "Kernels per step: 6 -> 3" in out) == (0, "", True)
    vanished, new = (out.partition(f"## {title}")[2].partition("\n## ")[0]
                     for title in ("Vanished", "New"))  # fmt: skip
    assert ADD in vanished and "attn_fwd" in new
    assert "1 launches and 0.100 ms per step" in new


def test_without_the_steps_totals_are_compared_and_said_to_be(rocprof_profile):
    before = rocprof_profile("a", {GEMM: (40, 2_000_000)})
    after = rocprof_profile("b", {GEMM: (10, 500_000)}, steps=5)
    # Statistics made from another run's database beside the files of an earlier run: their steps
    # mean nothing.
    stale = rocprof_profile("c", {GEMM: (10, 500_000)}, steps=5)
    row = f'"{GEMM}",15,250000,1,50,1,1,0\n'  # a name that is listed twice counts twice
    (stale / "stats.csv").write_text(f"{HEADER}\n{row}{row}")
    for baseline, counts in ((before, "40 -> 10"), (stale, "30 -> 10")):
        status, out, err = analyze(baseline, after)
        assert (status, f"Kernels in all: {counts}" in out) == (0, True)
        assert "the number of steps is not known" in err


def test_long_tables_are_cut_and_the_csv_is_not(gpu_profile, tmp_path):
    rows = {f"kernel_{i}_elementwise": (1, 1000 * (i + 1)) for i in range(20)}
    sides = gpu_profile("off", rows, 1), gpu_profile("on", {GEMM: (1, 1000)}, 1)
    out = analyze(*sides, "--output", tmp_path / "out", "--top", 3)[1]
    assert re.findall(r"`kernel_(\d+)_", out) == ["19", "18", "17"]
    assert len(read_rows(tmp_path / "out" / "kernel_reduction.csv")) == 21
    assert "kernel_19_" not in analyze(*sides, "--top", 0)[1]


def test_profiles_of_other_sizes_or_tools_get_a_note(gpu_profile, rocprof_profile, runs):
    config = {**summary(runs[1])["config"], "seq_len": 999}
    before = gpu_profile("off", {GEMM: (2, 10)}, 1, config=config)
    after = gpu_profile("on", {GEMM: (1, 10)}, 1)
    assert "seq_len differs: 999 for baseline; 32 for fused" in analyze(before, after)[2]
    other = rocprof_profile("r", {GEMM: (1, 10)}, 1)
    assert "two profilers may write the name" in analyze(after, other)[2]


def test_broken_profiles_are_one_line(runs, gpu_profile, rocprof_profile, tmp_path):
    rows = {GEMM: (2, 10)}
    good, mixed, alone = (gpu_profile(name, rows, 1) for name in ("good", "mixed", "alone"))
    (mixed / "x_kernels.csv").write_text(statistics_text({GEMM: (3, 10)}))
    (alone / "x_profile.json").unlink()
    cut = rocprof_profile("cut", {GEMM: (2, 10), ADD: (2, 10)})
    (cut / "stats.csv").write_text("\n".join((cut / "stats.csv").read_text().splitlines()[:2]))
    odd = edit(shutil.copytree(runs[0], tmp_path / "odd"), lambda result: None)
    path = odd / "tiny_llama_v1_profile.json"
    path.write_text(re.sub(r'"per_step": \d+', '"per_step": "many"', path.read_text()))
    (tmp_path / "nothing").mkdir()
    for directory, said in (
        (tmp_path / "missing", "no such directory"),
        (tmp_path / "nothing", "neither <script>_kernels.csv (run_pytorch_profiler.py) nor stats"),
        (runs[0], "one side has kernels, the other operators"),
        (gpu_profile("steps", rows, 0), "steps is 0, not"),
        (gpu_profile("copies", {COPY: (2, 10)}, 1), "the profile has no kernels"),
        (gpu_profile("schema", rows, 1, schema_version=7), "schema_version is 7"),
        (mixed, "3 calls do not belong to x_profile.json, 1 steps of 2.0 kernels"),
        (odd, "kernels.per_step is 'many', not"),
        (alone, "x_profile.json"),
        (cut, "is the file cut off?"),
    ):
        assert_refused(analyze(good, directory), said)
    assert_refused(analyze(good, good, "--top", "-1"), "0 or more")


@pytest.mark.parametrize("tool", ["compare_runs", "plot_runs", "analyze_kernel_reduction"])
def test_tools_run_from_anywhere_without_an_installation(tool, tmp_path):
    command = [sys.executable, "-S", str(ROOT / "analysis_tools" / f"{tool}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"python analysis_tools/{tool}.py" in done.stdout

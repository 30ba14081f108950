"""The analysis tools: their numbers are those of the result files, and what cannot be compared is
said. What any of them does with damaged files and odd arguments is in test_promises.py."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, assert_refused, call, finished, read_rows, strict_json, table_of
from matplotlib import pyplot

from analysis_tools import (
    analyze_kernel_reduction,
    compare_runs,
    compare_versions,
    plot_runs,
    regression_tester,
    report_generator,
)
from fusion_lab.files import read_json
from fusion_lab.profile.kernels import statistics_of, write_statistics

RUN = ROOT / "results/cpu/tiny_llama_v2_readme.json"
H100 = ROOT / "results/h100"
PROFILES = H100 / "profiles"
OOM = {"status": "oom", "error": "out of memory", "timing": {}, "memory": {}, "kernels": {}}
FAILED = {"status": "failed", "error": "the loss became nan at step 3"}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """`make(name, speed=, peak=, seq_len=, ...)`: the directory of a hand-made result, otherwise a
    committed one; None takes a value away."""

    def write(name: str, *, speed=100.0, peak=50.0, seq_len=32, **more) -> Path:
        result = read_json(RUN)
        result["config"]["seq_len"] = seq_len
        result["timing"] |= {"samples_per_sec": speed, "batch_ms": 80.0, "batch_median_ms": 80.0}
        result["memory"]["peak_mb"] = peak
        for key, value in more.items():
            if isinstance(value, dict) and value:
                value = {k: v for k, v in (result[key] | value).items() if v is not None}
            result[key] = value
        directory = tmp_path / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tiny_llama_v2_summary.json").write_text(json.dumps(result))
        return directory

    return write


# compare_runs.py


def test_comparison_has_the_numbers_of_the_result_files(make):
    first, second = make("v1", speed=50.0, peak=80.0), make("v2", speed=200.0, peak=60.0)
    status, out, err = call(compare_runs, f"base={first}", second)
    assert (status, err) == (0, "")
    (name, row), result = [(row["configuration"], row) for row in table_of(out)][1], read_json(RUN)
    timing = result["timing"]
    assert (name, row["samples/sec"], row["ms per step"]) == ("v2", "200.0", "80.00")
    for phase in ("forward", "backward", "optimizer"):
        assert row[f"{phase} ms"] == f"{timing[f'{phase}_ms']:.2f}"
    assert row["operator calls per step"] == str(result["kernels"]["per_step"])
    assert row["final loss"] == f"{result['loss']['curve'][-1]:.4f}"
    found = row["peak MB"], row["speed-up"], row["memory change"]
    assert found == ("60.0", "4.00x", "-25.0 %")


def test_the_share_of_the_peak_is_shown_where_the_gpu_is_known(make):
    half = {"achieved_tflops": 989.4, "gflop": 1.0}
    more = {"environment": {"device_name": "NVIDIA H200"}, "flops": half}
    training = {"use_amp": True, "amp_dtype": "bfloat16", "processes": 2}
    (row,) = table_of(call(compare_runs, make("a", training=training, **more))[1])
    assert row["MFU"] == "50.0 %"
    (row,) = table_of(call(compare_runs, make("b", flops=half))[1])
    assert "MFU" not in row


def test_a_run_is_beside_the_baseline_that_it_took_turns_with(make):
    """As --compare-fusion leaves them, whose folder alone shows both sides; by the means of the
    steps it would be 1.91x."""
    sides = (("a/baseline", [20.0, 20.0, 90.0]), ("a", [10.0, 10.0, 48.0]), ("alone", [5.0]))
    before, after, alone = (
        make(name, speed=3e3 / sum(turns), timing={"turns_ms": turns}) for name, turns in sides
    )
    for argv in ([alone, before, after], [after]):
        *_, own, row = table_of(call(compare_runs, *argv)[1])
        assert own["speed-up"] == "1.00x", "a baseline is its own"
        assert (row["speed-up"], row["in turns"]) == ("2.00x", "1.88x to 2.00x")


def test_runs_that_did_not_finish_are_rows_without_ratios(make):
    good, gone, bad = make("good"), make("gone", **OOM), make("bad", **FAILED)
    status, out, err = call(compare_runs, gone, good, bad)
    gone, _, bad = table_of(out)
    assert (status, gone["samples/sec"], bad["samples/sec"]) == (1, "out of memory", "failed")
    for row in (gone, bad):
        assert {row[name] for name in ("speed-up", "ms per step", "peak MB")} == {"-"}
    assert "baseline gone did not finish" in err
    assert "bad failed: the loss became nan at step 3" in err


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"seq_len": 64}, "note: seq_len differs: 32 for a; 64 for b"),
        ({"training": {"use_amp": True}}, "note: precision differs: fp32 for a; bf16 for b"),
        ({"timing": {"batch_ms": 104.0}}, "b was disturbed, its mean step took 1.30 times the"),
        ({"training": {"processes": None, "cuda_graph": None}}, ""),  # of an earlier harness
    ],
)
def test_runs_that_cannot_be_compared_get_a_note(make, more, line):
    status, _, err = call(compare_runs, make("a"), make("b", **more))
    assert (status, err.count("\n"), line in err) == (0, bool(line), True), err


def test_scaling_efficiency_where_the_numbers_of_processes_differ(make):
    two = make("two", speed=180, training={"processes": 2})
    four = make("four", speed=300, training={"processes": 4})
    rows = table_of(call(compare_runs, make("one", speed=100), two, four)[1])
    assert [row["scaling efficiency"] for row in rows] == ["100.0 %", "90.0 %", "75.0 %"]


def test_a_sweep_is_a_row_for_each_run_whatever_its_outcome(make, tmp_path):
    """Every size and fusion is a column, also of what failed; all are kept in one file."""
    fusions = {"qkv_fusion": True, "flash_attention": False}
    good, bad = make("good", seq_len=64, fusions=fusions), make("bad", **FAILED, fusions={})
    compiled = {"use_amp": True, "torch_compile": True, "torch_compile_mode": "default"}
    phases = {f"{phase}_ms": None for phase in ("forward", "backward", "optimizer")}
    graph = make("graph", training={"cuda_graph": True}, timing={**phases, "graph_ms": 1.25})
    runs, saved = [good, bad, make("gone", training=compiled, **OOM), graph], tmp_path / "all.json"
    status, table, _ = call(compare_runs, *runs, "--csv", tmp_path / "all.csv", "--save", saved)
    assert (status, [row["graph ms"] for row in table_of(table)]) == (1, ["-", "-", "-", "1.25"])
    assert call(compare_runs, *(saved / run.name for run in runs))[:2] == (1, table)
    assert "| graph" in call(compare_runs, f"{saved}/gr*")[1]
    first, second, third, _ = read_rows(tmp_path / "all.csv")
    assert [row["status"] for row in (first, second, third)] == ["ok", "failed", "oom"]
    assert (first["seq_len"], first["qkv_fusion"], first["flash_attention"]) == ("64", "1", "0")
    assert (second["error"], second["samples_per_sec"]) == (FAILED["error"], "")
    assert second["qkv_fusion"] == "0", "a fusion that a version does not have is off"
    assert (third["precision"], third["torch_compile"]) == ("bf16", "default")


def test_each_length_has_its_own_baseline_and_several_runs_of_a_name_are_repeats(make):
    for length, speeds in ((32, (100, 200, 400)), (64, (50, 75, 300))):
        before, *after = (
            make(
                f"sweep/{length}/{n}", speed=speed, seq_len=length, timing={"batch_ms": 1e3 / speed}
            )
            for n, speed in enumerate(speeds)
        )
        assert before.is_dir() and len(after) == 2
    sweep = before.parent.parent
    status, out, err = call(compare_runs, sweep, "--by", "seq_len")
    assert status == 0 and out.count("| configuration") == 2
    assert "speed-ups are over sweep/32/0" in err and "speed-ups are over sweep/64/0" in err
    assert [row["speed-up"] for row in table_of(out.partition("seq_len 64")[2])] == [
        *("1.00x", "1.50x", "6.00x")
    ]
    sides = ["--by", "seq_len", f"before={sweep}/*/0", f"after={sweep}/*/[12]"]
    found = [row["of repeats"] for row in table_of(call(compare_runs, *sides)[1])]
    assert found[:2] == ["-", "2.50 to 5.00 in 2"]
    assert "3.33 to 13.33 in 2" in found
    argv = ["--baseline", sweep / "32/2", sweep / "32"]
    first = table_of(call(compare_runs, *argv)[1])[0]
    assert (first["configuration"], first["speed-up"]) == ("2", "1.00x")


def test_a_tree_may_hold_several_models_and_folders_without_a_run(make, tmp_path):
    make("tree/llama")
    fold = make("tree/openfold", script="tiny_openfold_v2")
    shutil.copy(fold / "tiny_llama_v2_summary.json", fold / "tiny_llama_v2_summary.1.json")
    (tmp_path / "tree/empty").mkdir()
    (tmp_path / "tree/other.json").write_text("[1]")
    status, out, err = call(compare_runs, tmp_path / "tree", tmp_path / "tree/empty")
    assert (status, out.count("| configuration")) == (0, 2), err
    assert out.count("\n| tree/") == 2, "an earlier run of a folder is one to be named"
    assert "empty: no runs in there" in err and "passed over" in err
    assert "tiny_openfold:" in out


def test_trees_of_several_sizes_models_and_repeats_are_compared_at_the_same_sizes(make, tmp_path):
    for name, speed in (("v1", 100), ("v2", 200)):
        top = f"pytorch_profiles_{name}"
        for seq_len in (32, 64):
            for seed in (1, 2, 3):
                training = {"seed": seed}
                timing = {"batch_ms": 1e3 * seed / speed}
                more = {"script": f"tiny_llama_{name}", "training": training, "timing": timing}
                make(f"{top}/{seq_len}_{seed}", seq_len=seq_len, **more)
        make(f"{top}/fold", seq_len=8, script=f"tiny_openfold_{name}")
        make(f"{top}/fold/baseline", seq_len=8, script=f"tiny_openfold_{name}", fusions={})
    before, after = (tmp_path / f"pytorch_profiles_{name}" for name in ("v1", "v2"))

    status, out, _ = call(compare_versions, "--v1", before, "--v2", after)
    rows = [row for row in table_of(out) if row["tiny_llama"] == "V2"]
    assert (status, [row["length"] for row in rows]) == (0, ["32", "64"])
    assert [row["of repeats"].endswith("in 3") for row in rows] == [True, True]
    assert "| tiny_openfold" in out
    assert call(compare_versions, "--v1", before, "--v2", tmp_path)[1] == out, "what is around it"
    assert_refused(call(compare_versions, "--v1", after), "no tiny_llama_v1_summary.json in")

    status, out, _ = call(
        regression_tester, "--baseline-results", before, "--current-results", after
    )
    times = [row for row in table_of(out) if row["what"] == "ms per step"]
    assert (status, len(times)) == (0, 3)

    status, out, _ = call(report_generator, "--baseline", before, "--fused", after)
    assert (status, out.count("### tiny_llama, "), out.count("### tiny_openfold, ")) == (0, 2, 1)


def test_a_run_interrupted_behind_its_steps_has_its_speed_and_a_killed_one_its_sizes(
    make, tmp_path
):
    done = {"status": "failed", "error": "interrupted", "exit_status": 130}
    steps = {"steps": read_json(RUN)["training"]["num_steps"]}
    whole = make("whole", speed=50.0, **done, timing=steps)
    half = make("half", **done, timing={"steps": 1})
    nothing = {key: {} for key in ("timing", "memory", "kernels", "loss", "config")}
    killed = make("killed", **FAILED, training={"seq_len": 64}, **nothing)
    table = tmp_path / "all.csv"
    status, out, _ = call(compare_runs, whole, half, killed, "--csv", table)
    assert (status, [r["samples/sec"] for r in table_of(out)]) == (1, ["50.0", "failed", "failed"])
    assert [row["seq_len"] for row in read_rows(table)] == ["32", "32", "64"]


def test_the_rows_of_a_study_are_runs(tmp_path):
    study = H100 / "suite_llama.json"
    status, out, _ = call(compare_runs, study, "--by", "seq_len", "--csv", tmp_path / "rows.csv")
    rows = json.loads(study.read_text())["rows"]
    assert (status, len(read_rows(tmp_path / "rows.csv"))) == (0, len(rows))
    named = {row["configuration"]: row for row in table_of(out)}
    v4 = named["batch_size 8, seq_len 128, bf16, graph, v4"]
    assert v4["speed-up"] == "3.16x" and v4["in turns"] == "3.16x to 3.39x"
    picture = tmp_path / "speedup.svg"
    assert call(plot_runs, "speedup", f"s={study}", "--output", picture)[0] == 0
    assert picture.stat().st_size > 5_000


# plot_runs.py


def test_speed_up_is_plotted_over_what_took_turns(make, tmp_path):
    for length, turns in ((32, [20.0, 30.0]), (64, [30.0, 50.0])):
        make(f"len_{length}/baseline", seq_len=length, timing={"turns_ms": turns})
        make(f"len_{length}", seq_len=length, timing={"turns_ms": [10.0, 10.0]})
    picture = tmp_path / "speedup.png"
    status, out, _ = call(plot_runs, "speedup", f"all={tmp_path}/len_*", "--output", picture)
    found = [(row["sequence length"], row["all"]) for row in table_of(out)]
    assert (status, found) == (0, [("32", "2.50x"), ("64", "4.00x")])
    assert picture.stat().st_size > 5_000
    alone = f"all={make('alone', timing={'turns_ms': [10.0]})}"
    assert_refused(call(plot_runs, "speedup", alone), "no baseline took turns with it")


def test_memory_plot_and_table_show_the_same(make, tmp_path, monkeypatch):
    figure, axes = pyplot.subplots()
    monkeypatch.setattr(pyplot, "subplots", lambda *args, **more: (figure, [[axes]]))
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
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = {line.get_label(): [*map(list, line.get_data())] for line in axes.lines}
    assert lines["flash"] == [[128, 256, 512], [60, 80, 120]]
    assert lines["scores: out of memory"][0] == [512]


def test_what_is_missing_in_a_plot_is_named(make, tmp_path):
    make("a_64", seq_len=64)
    make("a_128", seq_len=128, training={"batch_size": 9})
    make("a_256", seq_len=256, **FAILED)
    make("a_lost", status="failed", error="no model", config={})
    (row, _) = table_of(call(plot_runs, "memory", tmp_path / "a_64", tmp_path / "a_128")[1])
    assert [*row][1:3] == [f"{tmp_path}/a_{size}, MB" for size in (64, 128)]
    status, out, err = call(plot_runs, "memory", f"a={tmp_path}/a_*")
    assert (status, [row["a, MB"] for row in table_of(out)]) == (1, ["50.0", "50.0", "failed"])
    for said in ("batch_size differs", "a failed: the loss became nan", "a failed: no model"):
        assert said in err
    run = make("run")
    for argv, said in (
        ([f"={run}"], "is not NAME=PATH"),
        ([f"a={tmp_path}/a_lost"], "none of these runs"),
        ([f"a={run}", "--output", tmp_path / "m.gif"], "must end in .png"),
    ):
        assert_refused(call(plot_runs, "memory", "--output", tmp_path / "m.png", *argv), said)
    assert not list(tmp_path.glob("m.*"))


# analyze_kernel_reduction.py


def analyze(baseline: Path, fused: Path, *argv: object) -> tuple[int, str, str]:
    return call(analyze_kernel_reduction, "--baseline", baseline, "--fused", fused, *argv)


def test_reduction_of_real_profiles(tmp_path):
    sides = [PROFILES / f"tiny_llama_v{version}" for version in (1, 2)]
    status, out, err = analyze(*sides, "--output", tmp_path, "--top", 3)
    assert (status, err) == (0, "")
    profiles = [strict_json(next(side.glob("*_profile.json")).read_text()) for side in sides]
    before, after = (profile["kernels_per_step"] for profile in profiles)
    assert f"Kernels per step: {before:.10g} -> {after:.10g}" in out
    assert f"Kernel reduction: {100 * (1 - after / before):.1f} %" in out
    rows = {row["category"]: row for row in table_of(out)}  # and of the phases below
    for name, share in (profiles[1]["categories"] | profiles[1]["phases"]).items():
        launches = share["kernels_per_step"] + share["copies_per_step"]
        assert float(rows[name]["fused launches"]) == launches, name
        assert float(rows[name]["fused ms"]) == pytest.approx(share["ms_per_step"], abs=1e-3)
    rows = read_rows(tmp_path / "kernel_reduction.csv")
    assert {row["found_in"] for row in rows} == {"baseline", "fused", "both"}
    assert out.startswith((tmp_path / "kernel_reduction.md").read_text())
    listed = out.partition("## Vanished")[2].partition("\n## ")[0]
    assert listed.count("\n| ") == 2 + 3 < len(rows), "long tables are cut, the csv file is not"


GEMM, ADD = "Cijk_Ailk_Bljk_SB_MT64x64x16", "add_elementwise_kernel"
COPY = "Memcpy HtoD (Pinned -> Device)"
Rows = dict[str, list[int]]  # the ns of each call, by name


@pytest.fixture
def gpu_profile(tmp_path: Path) -> Callable[..., Path]:
    """`gpu_profile(name, rows, steps)`: what run_pytorch_profiler.py writes on a GPU."""

    def write(name: str, rows: Rows, steps: int, **more) -> Path:
        profile = read_json(PROFILES / "tiny_llama_v2/tiny_llama_v2_profile.json")
        directory = tmp_path / name
        directory.mkdir()
        write_statistics(directory / "x_kernels.csv", statistics_of(rows))
        calls = sum(len(times) for name, times in rows.items() if name != COPY)
        profile |= {"steps": steps, "kernels_per_step": calls / steps, **more}
        (directory / "x_profile.json").write_text(json.dumps(profile))
        return directory

    return write


def rocprof_profile(make: Callable, name: str, rows: Rows) -> Path:
    """What run_rocprofv3.sh writes of five steps."""
    hotspots = make(f"{name}/hotspots", timing={"steps": 5}, training={"num_steps": 5})
    write_statistics(hotspots / "7_kernel_stats.csv", statistics_of(rows))
    write_statistics(hotspots.parent / "stats.csv", statistics_of(rows))
    return hotspots.parent


def test_copies_are_no_kernels_and_counts_are_per_step(gpu_profile):
    rows = {GEMM: 10 * [800_000], ADD: 6 * [250_000], COPY: 4 * [125_000]}
    before = gpu_profile("off", rows, steps=2)
    rows = {GEMM: 12 * [500_000], "attn_fwd.kd": 3 * [100_000], COPY: 3 * [900_000]}
    after = gpu_profile("on", rows, steps=3)
    status, out, err = analyze(before, after)
    assert (status, err) == (0, "")
    assert "Kernels per step: 8 -> 5" in out
    assert "Kernel time per step: 5.000 ms -> 3.000 ms (-40.0 %)" in out
    rows = {row["category"]: row for row in table_of(out)}
    assert (rows["copies"]["baseline launches"], rows["copies"]["fused launches"]) == ("2", "1")
    assert rows["element-wise"]["change"] == "-100.0 %"
    _, vanished, new, *_ = re.split("## (?:Vanished|New)", out)
    assert ADD in vanished and "attn_fwd" in new
    assert "Names: 1; 1 launches, 0.100 ms." in new


def test_of_plain_runs_the_counts_of_the_scripts_are_compared(make, gpu_profile):
    before, after = (make(name, kernels={"per_step": n}) for name, n in (("v1", 262), ("v2", 194)))
    status, out, _ = analyze(before, after)
    assert (status, "per step: 262 -> 194" in out) == (0, True)
    assert "Kernel reduction: 26.0 %" in out
    assert_refused(analyze(before, gpu_profile("on", {GEMM: [1]}, steps=1)), "one side has")


def test_folders_with_runs_of_both_models_are_compared_by_model(make, tmp_path):
    for side, calls in (("v1", 300), ("v2", 200)):
        summary = make(side, kernels={"per_step": calls}) / "tiny_llama_v2_summary.json"
        other = json.loads(summary.read_text()) | {"script": "tiny_openfold_v2"}
        other["kernels"] |= {"per_step": 10 * calls}
        (tmp_path / side / "tiny_openfold_v2_summary.json").write_text(json.dumps(other))
    status, out, err = analyze(tmp_path / "v1", tmp_path / "v2")
    assert (status, err) == (0, "")
    assert "per step: 300 -> 200" in out and "per step: 3000 -> 2000" in out
    (tmp_path / "v2/tiny_openfold_v2_summary.json").unlink()
    (tmp_path / "v1/tiny_llama_v2_summary.json").unlink()
    assert_refused(analyze(tmp_path / "v1", tmp_path / "v2"), "different models")


def test_without_the_steps_totals_are_compared_and_said_to_be(make):
    after = rocprof_profile(make, "b", {GEMM: 10 * [50_000]})
    # statistics of another run's database beside files of an earlier run, whose steps mean nothing
    stale = rocprof_profile(make, "c", {GEMM: 10 * [50_000]})
    half = [replace(row, percentage=50) for row in statistics_of({GEMM: 15 * [50_000]})]
    write_statistics(stale / "stats.csv", 2 * half)  # a name that is listed twice counts twice
    status, out, err = analyze(stale, after)
    assert (status, "Kernels in all: 30 -> 10" in out) == (0, True), err
    assert "the number of steps is not known" in err


# report_generator.py: one report of two folders has what is in them, and names what is not


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """What run_all_profilers.sh leaves of V1 and V2, baseline and fused, by default."""
    sides = tmp_path / "profiles_tiny_llama_v1", tmp_path / "profiles_tiny_llama_v2"
    for side, script in zip(sides, ("tiny_llama_v1", "tiny_llama_v2"), strict=True):
        shutil.copytree(PROFILES / script, side / "pytorch")
        profile = read_json(side / f"pytorch/{script}_profile.json")
        run = read_json(RUN)
        run |= {name: profile[name] for name in ("script", "config", "fusions", "environment")}
        (side / f"pytorch/{script}_summary.json").write_text(json.dumps(run))
        (side / "flops").mkdir()
        flops = read_json(H100 / "flops_tiny_llama_v2.json") | {"script": script}
        flops |= {name: profile[name] for name in ("config", "training")}
        (side / f"flops/{script}_flops.json").write_text(json.dumps(flops))
    return sides


def report(folders: tuple[Path, Path], *argv: object) -> tuple[int, str, str]:
    return call(report_generator, "--baseline", folders[0], "--fused", folders[1], *argv)


def sections(text: str) -> list[str]:
    return re.findall(r"^## (.+)", text, re.MULTILINE)


def test_the_report_has_what_the_files_have(folders, tmp_path):
    """Under its other name, and with the default folders."""
    for side, calls in zip(folders, (4, 2), strict=True):
        place = side / f"rocprofv3_results_{side.name}"
        place.mkdir()
        write_statistics(place / "stats.csv", statistics_of({"Cijk_Ailk": [1000] * calls}))
    program = ROOT / "analysis_tools" / "generate_fusion_report.py"
    done = finished(program, "--output-dir", "./deep/report", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "deep/report/fusion_report.md").read_text()
    kernels = ["Kernels by the PyTorch profiler", "Kernels by rocprofv3"]
    assert sections(text) == ["Runs", *kernels, "FLOPs of modules"]
    counts = []
    for label, side in zip(("baseline", "fused"), folders, strict=True):
        run = read_json(next(side.glob("pytorch/*_summary.json")))
        row = next(line for line in text.splitlines() if line.startswith(f"| {label} "))
        assert f" {run['timing']['batch_ms']:.2f} |" in row
        counts.append(read_json(next(side.glob("pytorch/*_profile.json")))["kernels_per_step"])
    assert "Kernels per step: {:.10g} -> {:.10g}".format(*counts) in text
    assert "- Kernels in all: 4 -> 2" in text
    modules = read_json(folders[1] / "flops" / "tiny_llama_v2_flops.json")["modules"]
    row = next(line for line in text.splitlines() if line.startswith("| layers.*.self_attn "))
    attention = next(row for row in modules if row["module"] == "layers.*.self_attn")
    assert row.endswith(f" {attention['flop_per_byte']:.2f} |")
    assert "Not in this report" not in text


def test_what_is_missing_is_named_with_its_reason(folders):
    """The files of an earlier run are not taken."""
    step = {"name": "flops", "status": "skipped", "reason": "no such package"}
    summary = {"script": "tiny_llama_v2.py", "steps": [step]}
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    status, out, err = report(folders)
    assert (status, err) == (0, "")
    assert sections(out) == ["Runs", "Kernels by the PyTorch profiler"]
    last = out.splitlines()[-1]
    missing = "Kernels by rocprofv3 (baseline, fused: nothing there); "
    assert last.startswith(f"Not in this report: {missing}")
    assert "FLOPs of modules (fused: no such package)" in last


def test_what_cannot_be_reported_is_one_line(folders, tmp_path):
    path, output = next(folders[0].rglob("*_flops.json")), tmp_path / "report.md"
    path.write_text(path.read_text().replace("tiny_llama_v1", "tiny_openfold_v1"))
    assert_refused(report(folders, "--output", output), "is a run of tiny_")
    assert not output.exists()
    assert_refused(report((tmp_path, folders[1])), "two runs of baseline at the same sizes")
    (tmp_path / "empty").mkdir()
    assert_refused(report((tmp_path / "empty", folders[1])), "nothing that both have")
    assert_refused(report((tmp_path / "none", folders[1])), "no such directory; ./run_all_prof")

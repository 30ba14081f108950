"""The report's lines, the result file, --compare-fusion and the files that profiling leaves."""

import csv
import gzip
import json
import re
import shlex
import statistics
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import (
    CPU,
    QUICK,
    ROOT,
    SCRIPT,
    SCRIPTS,
    Run,
    build,
    command_line,
    load,
    parse,
    run_main,
    summary_in,
    words,
)

from fusion_lab import runs
from fusion_lab.profile.roofline import group_flops
from fusion_lab.turns import ratios, verdict

STEPS = words("--num-steps 6 --warmup-steps 2 --log-interval 2")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing else is asked of."""
    return run_main(SCRIPT, tmp_path_factory.mktemp("plain"), *STEPS)


# Lines that other people search for

LINES = """\
Average training speed: {timing[samples_per_sec]:.1f} samples/sec
Average batch time: {timing[batch_ms]:.1f} ms (median {timing[batch_median_ms]:.1f}, p95 {timing[batch_p95_ms]:.1f})
Average forward time: {timing[forward_ms]:.1f} ms
Average backward time: {timing[backward_ms]:.1f} ms
Average optimizer time: {timing[optimizer_ms]:.1f} ms
Warmup step time: {timing[warmup_first_step_ms]:.1f} ms (first step, includes any compilation)
Final loss: {loss[final]:.4f} (first step {loss[initial]:.4f})
Peak memory usage: {memory[peak_mb]:.1f} MB
Kernels per step: {kernels[per_step]} (all fusions off: {kernels[all_off]}); operator calls, counted on a CPU
Kernel reduction: {kernels[reduction_percent]:.1f} %
FLOPs per step: {flops[gflop]:.4g} GFLOP, achieved {flops[achieved_tflops]:.3g} TFLOP/s
"""  # noqa: E501


def test_lines_have_the_numbers_of_the_result(plain: Run):
    """The first one says what ran."""
    assert plain.stdout.endswith(LINES.format(**plain.summary))
    parameters = sum(p.numel() for p in build(SCRIPT).parameters())
    assert plain.summary["parameters"] == parameters
    named = (SCRIPT, "batch_size 2", "hidden_dim 64", "float32", "qkv-fusion")
    named += (f"{parameters:,} parameters",)
    assert not [part for part in named if part not in plain.stdout.splitlines()[0]]


def test_numbers_agree_with_each_other(plain: Run):
    timing, loss, flops, kernels = (
        plain.summary[group] for group in ("timing", "loss", "flops", "kernels")
    )
    assert timing["steps"] == 6
    assert timing["samples_per_sec"] == pytest.approx(1e3 * 2 / timing["batch_ms"])
    assert timing["turns_ms"] == [timing["batch_ms"]], "a plain run is one turn"
    phases = [timing[f"{phase}_ms"] for phase in ("data", "forward", "backward", "optimizer")]
    assert min(phases) > 0
    assert sum(phases) <= timing["batch_ms"] * 1.001, "phases are parts of the whole loop"
    assert len(loss["curve"]) == loss["warmup_steps"] + 6 == 8
    assert (loss["initial"], loss["final"]) == (loss["curve"][0], loss["curve"][-1])
    saved = 100 * (1 - kernels["per_step"] / kernels["all_off"])
    assert kernels["reduction_percent"] == pytest.approx(saved)
    # which test_roofline.py has by hand
    assert flops["per_step"] == group_flops(load(SCRIPT), parse(SCRIPT), CPU).total()
    assert flops["achieved_tflops"] == pytest.approx(flops["gflop"] / timing["batch_ms"])


def test_times_of_known_steps():
    """Of turns the median, as in the table of a comparison; of steps median and 95th percentile."""
    trainer = load(SCRIPT).Trainer(parse(SCRIPT, "--batch-size", "8"))
    trainer.turns_ms = [2.0, 10.0, 4.0]
    trainer.phases = {"forward": [8.0, *18 * [0.5], 3.0], "backward": [1.0, *18 * [0.5], 2.0]}
    found = trainer.summary()["timing"]
    assert [found[f"batch_{key}ms"] for key in ("", "median_", "p95_")] == [4.0, 1.0, 9.0]
    assert (found["samples_per_sec"], found["forward_ms"], found["steps"]) == (2000.0, 1.0, 20)


def test_progress_is_apart_from_the_report(plain: Run):
    """On stderr, with the loss of the step; what takes long is said before it begins."""
    first, *between = plain.progress.splitlines()
    between, counting = between[:3], between[3:]
    shown = [re.match(r"step (\d)/6  loss (\S+)  \S+ samples/s", line).groups() for line in between]
    assert [int(step) for step, _ in shown] == [2, 4, 6]
    losses = [plain.summary["loss"]["curve"][i] for i in (3, 5, 7)]
    assert [float(loss) for _, loss in shown] == pytest.approx(losses, abs=6e-5)
    assert first == "taking the first step"
    assert all(re.match("counting ", line) for line in counting) and counting


def test_progress_on_a_terminal_is_one_line_that_is_rewritten(plain: Run, tmp_path: Path):
    command = shlex.join(command_line(SCRIPT, tmp_path, *STEPS))
    terminal = ["script", "--quiet", "--return", "--command", command, "/dev/null"]
    written = subprocess.run(terminal, capture_output=True, check=True).stdout.decode()
    _, rewritten, *rest = written.replace("\r\n", "\n").split("\n")
    *shown, stays = rewritten.split("\033[K\r")
    begin, *_, counting, nothing = shown
    assert (begin, nothing) == ("taking the first step", "")
    assert counting.startswith("counting ")
    assert max(map(len, shown)) < 80, "a longer one would go on in the next line"
    labels = [line.partition(":")[0] for line in plain.stdout.split("\n")]
    assert [line.partition(":")[0] for line in [stays, *rest]] == labels[1:], "no rest of a line"


# What is counted


def test_what_moves_no_data_is_no_operator():
    matrix = torch.ones(2, 3)
    with load(SCRIPT).OperatorCounter() as counter:
        row = matrix.t()[0].view(2, 1).expand(2, 4)
        torch.empty_like(row)
        row + row
    assert counter.calls == 1


def test_operator_calls_do_not_depend_on_the_batch_size(plain: Run, run):
    """Where nothing is fused, no reduction is claimed."""
    found = plain.summary["kernels"]
    assert run(SCRIPT, *QUICK, "--batch-size", "1").summary["kernels"] == found
    assert found["unit"] == "operator calls"
    assert found["per_step"] < 0.9 * found["all_off"], "fusions need fewer"
    for off in run(SCRIPT, *QUICK, "--disable-all-fusion"), run("tiny_llama_v1", *QUICK):
        assert off.summary["kernels"] == {"unit": found["unit"], "per_step": found["all_off"]}
        assert "Kernel reduction" not in off.stdout and "all fusions off" not in off.stdout


def test_peak_memory_of_one_big_weight_is_known(run):
    """Where one weight dwarfs all else: itself, two AdamW moments, gradients of its two uses and
    maybe their sum."""
    sizes = words("--vocab-size 50000 --hidden-dim 32 --num-layers 1 --num-heads 1 --seq-len 2")
    sizes += ["--batch-size", "1"]
    peak = run("tiny_llama_v1", *QUICK, *sizes).summary["memory"]["peak_mb"]
    weight = 50_000 * 32 * 4 / 1e6
    assert 4 * weight < peak < 6.1 * weight


# The result file


def test_result_file_has_what_readers_look_for(plain: Run):
    run, known = runs.load_run(plain.directory), {**runs.MEASURED, "speedup": ()}
    assert (run.result["script"], run.result["status"]) == (SCRIPT, "ok")
    assert run.result["config"] == asdict(build(SCRIPT).config)
    assert run.result["fusions"] == {name: True for _, name, _ in load(SCRIPT).FUSIONS}
    on_a_gpu, found = {"graph_ms", "compilation_ms", "host_launches"}, runs.beside(run, run)
    assert {key for key in known if found[key] is None} == on_a_gpu
    assert [*plain.directory.iterdir()] == [run.path], "and nothing else"


# --under-profiler, and the variable of one of the profilers that the scripts know
@pytest.mark.parametrize("variable", [None, "NSYS_PROFILING_SESSION_ID"])
def test_under_a_profiler_nothing_runs_but_training_steps(variable: str | None, run, monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", None)  # would be a traceback
    if variable:
        monkeypatch.setenv(variable, "x")
    result = run(SCRIPT, *QUICK, *([] if variable else ["--under-profiler"]))
    assert result.status == 0
    said = result.stderr.count("--under-profiler is on"), result.stderr.count("\n")
    assert said == (bool(variable), bool(variable))
    assert result.summary["kernels"] == result.summary["flops"] == {}
    assert "Average training speed: " in result.stdout and "Final loss: " in result.stdout
    for absent in ("Kernel", "FLOPs", "Host launches", "counting"):
        assert absent not in result.stdout + result.progress


# --compare-fusion


def test_compare_fusion_prints_one_table_of_two_results(run, tmp_path: Path):
    """Each is that of the run it would be alone; what it takes beside the other one is in turns."""
    argv = words("--num-steps 10 --warmup-steps 1")
    alone = [run(SCRIPT, *argv, *off).summary for off in (["--disable-all-fusion"], [])]
    status, text, errors, fused = run(SCRIPT, *argv, "--compare-fusion")
    assert (status, errors.count("\n")) == (0, 1), "the result of the run before is kept"
    assert "Average training speed" not in text, "no report is printed with it"
    baseline = summary_in(tmp_path / "profiles" / "baseline")
    times = ratios(baseline["timing"], fused["timing"])
    assert len(times) == 10
    range_of = f"from {min(times):.2f}x to {max(times):.2f}x ({verdict(times)})"
    said = f"Batch time ratio in 10 turns: {statistics.median(times):.2f}x, {range_of}"
    assert text.endswith(f"\n{said}\n")
    table = text.partition("all off   as chosen    ratio\n")[2].splitlines()
    rows = {label: cells for label, *cells in (re.split(r"\s{2,}", line) for line in table)}
    for label, group, key, digits in (
        ("batch time, ms", "timing", "batch_ms", 2),
        ("peak memory, MB", "memory", "peak_mb", 1),
        ("operator calls per step", "kernels", "per_step", 0),
        ("final loss", "loss", "final", 4),
    ):
        off, on = (result[group][key] for result in (baseline, fused))
        ratio = [f"{off / on:.2f}x"] * (group != "loss")
        assert rows[label] == [f"{off:.{digits}f}", f"{on:.{digits}f}", *ratio], "of this row"
    assert baseline["kernels"]["per_step"] == fused["kernels"]["all_off"]
    for side, result, on in zip((baseline, fused), alone, (False, True), strict=True):
        assert set(side["fusions"].values()) == {on}
        assert side["memory"]["peak_mb"] == pytest.approx(result["memory"]["peak_mb"], rel=1e-6)
        assert side["kernels"]["per_step"] == result["kernels"]["per_step"]
        assert side["loss"] == result["loss"]


def test_sides_change_their_order_from_turn_to_turn(run, monkeypatch):
    order, trainer = [], load(SCRIPT).Trainer
    take = trainer.take
    monkeypatch.setattr(
        trainer, "take", lambda self, steps: order.append(self.title) or take(self, steps)
    )
    argv = words("--compare-fusion --num-steps 3 --warmup-steps 0 --under-profiler")
    assert run(SCRIPT, *argv).status == 0
    off, on = "all off: ", "as chosen: "
    assert order == [off, on, on, off, off, on]


# Files of profiling


def test_profiling_writes_tables_a_trace_and_a_timeline_that_reaches_the_peak(run):
    result = run(SCRIPT, *QUICK, "--enable-pytorch-profiler", "--enable-memory-profiling")
    assert result.status == 0, result.stderr
    names = ("memory_timeline.csv", "operators_by_cpu_time.txt", "summary.json", "trace.json.gz")
    timeline, table, _, trace = sorted(result.directory.iterdir())
    assert {path.name for path in result.directory.iterdir()} == {f"{SCRIPT}_{n}" for n in names}
    assert "aten::mm" in table.read_text() and "\nSelf CPU total:" in table.read_text()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    for name in ("data", "forward", "backward", "optimizer", "layers.1.self_attn.o_proj"):
        assert ranges.count(name) == 3, f"{name} is in each of the three steps"
    header, *rows = csv.reader(timeline.read_text().splitlines())
    times, used = ([float(row[column]) for row in rows] for column in (0, 1))
    assert (header, times[0], times) == (["time_us", "bytes"], 0, sorted(times))
    assert len(rows) > 100 and min(used) > 0
    assert max(used) / 1e6 == pytest.approx(result.summary["memory"]["peak_mb"], rel=1e-3)


# Help


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_has_groups_defaults_and_examples_that_can_be_given(script: str, run, monkeypatch):
    status, text, errors, _ = run(script, "--help")
    assert (status, errors) == (0, "")
    for group in ("model:", "data:", "fusions:", "training:", "profiling:", "modes:", "examples:"):
        assert f"\n{group}" in text
    spaces = " ".join(text.split())
    for flag, default in (("num-steps", "50"), ("learning-rate", "0.0003")):
        assert re.search(rf"--{flag} [^-]*\(default: {default}\)", spaces), flag
    for flag in [*(flag for flag, _, _ in load(script).FUSIONS), "torch-compile", "cuda-graph"]:
        assert f"--enable-{flag}" in text and f"--disable-{flag}" in text
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.chdir(ROOT)
    commands = re.findall(rf"python {script}\.py(.*)", text.partition("\nexamples:\n")[2])
    assert len(commands) >= 3
    for command in commands:
        command = command.replace("FILE.", f"{ROOT}/examples/bpti.")
        load(script).parse_args(re.split(r"\s{2,}", command.rstrip())[0].split())

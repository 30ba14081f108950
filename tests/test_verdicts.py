"""Tools that compare results and say pass or fail: accuracy across versions, regressions, all
versions of a model."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest
from conftest import ROOT, TINY, assert_refused, call, read_rows, strict_json

from analysis_tools import compare_versions, regression_tester, validate_numerical_accuracy
from fusion_lab import accuracy, sweep
from fusion_lab.turns import short_run

TINY_LLAMA = [*TINY["llama"], "--device", "cpu"]
V1, V2 = ROOT / "tiny_llama_v1.py", ROOT / "tiny_llama_v2.py"
RUN = ROOT / "results/cpu/tiny_llama_v2_readme.json"


def validate(optimized: Path, *argv: str, baseline: Path = V1) -> tuple[int, str, str]:
    sides = ["--baseline", baseline, "--optimized", optimized, "--steps", "3"]
    return call(validate_numerical_accuracy, *sides, *TINY_LLAMA, *argv)


def changed(path: Path, before: str, after: str) -> Path:
    """A copy of V2 with an error in it."""
    text = V2.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    return path


def test_versions_agree(tmp_path):
    status, out, _ = validate(V2, "--tolerance", "1e-3", "--csv", tmp_path / "table.csv")
    assert (status, out.count("pass"), out.count("20 gradients")) == (0, 7, 2), out
    assert len(read_rows(tmp_path / "table.csv")) == 7
    assert out.endswith("tiny_llama_v2.py against tiny_llama_v1.py: PASS\n")


def test_a_tolerance_tightens_the_limit_of_every_value(tmp_path):
    """An error of 1e-4 in float32 passes by default; the loss curve has limits of its own."""
    assert validate(V2, "--use-amp", "--tolerance", "1e-9")[0] == 1
    wrong = changed(tmp_path / "tiny_llama_v2.py", "self.norm(x)", "1.0001 * self.norm(x)")
    found = []
    for argv in ([], ["--tolerance", "1e-5"]):
        status, out, _ = validate(wrong, *argv)
        (outputs,) = [line for line in out.splitlines() if "outputs at first" in line]
        found.append((status, "FAIL" in outputs))
    assert found == [(0, False), (1, True)]


@pytest.mark.parametrize("place", range(3))
def test_what_is_no_number_fails_wherever_it_stands(place: int):
    judged = {f"step {n}": (math.nan if n == place else 0.5, 1.0) for n in range(3)}
    row = accuracy.row_of("losses", judged)
    assert (row["worst"], row["passed"]) == (f"step {place}", False)


def test_a_gradient_that_is_missing_is_named(tmp_path):
    """Also where both lack it; what comes after is not tried."""
    without = "return self.weight.detach() * wide"
    wrong = changed(tmp_path / "tiny_llama_v2.py", "return self.weight * wide", without)
    norm = r"gradient of layers\.0\.input_layernorm\.weight, gradient of"
    for baseline in (V1, wrong):
        status, out, _ = validate(wrong, baseline=baseline)
        assert (status, "steps" in out) == (1, False), out
        assert re.search(rf"20 gradients at first +\| {norm}.* inf \|", out), out


# regression_tester.py


def regression(before: Path, after: Path, *argv: str) -> tuple[int, str, str]:
    argv = ["--baseline-results", before, "--current-results", after, *argv]
    return call(regression_tester, *argv)


def study(
    path: Path, *turns: float, name: str = "default", argv: str = "--seq-len 32", **more
) -> Path:
    """A study with one row, in which V2 takes these milliseconds."""
    side = {"model": "tiny_llama", "script": "tiny_llama_v2", "argv": argv.split()}
    side |= {"shape": name, "side": "V2", **({"turns_ms": turns} if turns else {}), **more}
    environment = {"device": "cuda", "device_name": "one"}
    path.write_text(json.dumps({"environment": environment, "rows": [side]}))
    return path


@pytest.mark.parametrize(
    ("turns", "argv", "status", "words"),
    [
        ((9, 9.9, 10, 10.1, 11), [], 0, "no difference seen"),
        ((11, 12, 12, 13, 14), [], 1, "slower"),
        ((11, 12, 12, 13, 14), ["--min-speedup", "0.8"], 0, "slower, 0.8x as fast"),
        ((5, 8, 8, 8, 20), ["--min-speedup", "1.25"], 0, "1.25x (0.45x to 2.18x)"),
        ((5, 6, 6, 7, 8), ["--min-speedup", "1.7"], 1, "faster, not 1.7x as fast"),
    ],
)
def test_verdicts_follow_from_the_ranges_of_the_turns(tmp_path, turns, argv, status, words):
    before = study(tmp_path / "a.json", 9, 9.5, 10, 10.5, 10.9)
    after = study(tmp_path / "b.json", *turns)
    found, out, err = regression(before, after, *argv)
    assert (found, err, "default, V2" in out) == (status, "", True)
    assert words in out


def test_studies_that_cannot_be_compared_are_refused(tmp_path):
    good, other = study(tmp_path / "a.json", 9, 10), tmp_path / "b.json"
    assert_refused(regression(good, study(other, 9, 10, argv="--seq-len 64")), "arguments differs")
    assert_refused(
        regression(good, study(other, 9, 10, name="large")), "shape differs: default and"
    )
    assert_refused(regression(good, RUN), "device_name differs: one and AMD EPYC")
    other.write_text(good.read_text().replace('"one"', '"two"'))
    assert_refused(regression(good, other), "device_name differs: one and two")
    status, out, _ = regression(good, study(other, status="oom", error="out of memory"))
    assert (status, "did not finish" in out) == (1, True)
    assert_refused(regression(other, good), "the baseline did not finish (out of memory)")


def test_runs_are_compared_with_the_range_of_their_steps(tmp_path):
    """A file of its own, with whatever name, as one in a folder."""
    result = strict_json(RUN.read_text())
    times = {"batch_median_ms": 10.0, "batch_ms": 10.5, "batch_p95_ms": 12.0, "turns_ms": None}
    result["timing"] |= times
    other, before = tmp_path / "after.json", tmp_path / "tiny_llama_v2_summary.json"
    before.write_text(json.dumps(result))
    for median, status, verdict in ((11.9, 0, "no difference seen"), (12.1, 1, "slower")):
        times = {"batch_median_ms": median, "batch_ms": 12.5, "batch_p95_ms": 13.0}
        other.write_text(json.dumps(result | {"timing": result["timing"] | times}))
        found, out, err = regression(tmp_path, other)
        assert (found, verdict in out, "fewer than 5 turns" in err) == (status, True, True)
        named = {line.split("|")[2].strip() for line in out.splitlines()[:6]}
        assert {"peak MB", "operator calls per step", "final loss"} < named
    for change, words in (
        ({"config": result["config"] | {"seq_len": 64}}, "seq_len differs: 256 and 64"),
        ({"training": result["training"] | {"use_amp": True}}, "precision differs: fp32 and"),
    ):
        other.write_text(json.dumps(result | change))
        assert_refused(regression(tmp_path, other), words)
    other.write_text(json.dumps(result | {"status": "failed", "error": "nan"}))
    assert_refused(regression(other, tmp_path), "the baseline did not finish (nan)")


# compare_versions.py


def test_versions_are_measured_once_and_reported(tmp_path, monkeypatch):
    argv = [*["--family", "llama", "--versions", "v1", "v2", "--rounds", "2"], *TINY_LLAMA]
    argv += ["--output-dir", tmp_path]
    status, out, err = call(compare_versions, *argv)
    assert (status, "| V2" in out, "too few turns to tell" in out) == (0, True, True), err
    v1, v2 = strict_json((tmp_path / "versions.json").read_text())["rows"]
    alone = short_run("tiny_llama_v1", [*sweep.LOSS_STEPS, *TINY_LLAMA])
    assert v1["final_loss"] == pytest.approx(alone["loss"]["final"], rel=1e-5)
    assert v2["per_step"] < v1["per_step"]
    over_v1 = statistics.median(a / b for a, b in zip(v1["turns_ms"], v2["turns_ms"], strict=True))
    assert f" {over_v1:.2f}x |" in out
    monkeypatch.setattr(sweep, "in_turns", None)  # nothing is measured again
    status, again, err = call(compare_versions, *argv, "--generate-report")
    assert (status, again.startswith(out.rstrip())) == (0, True), err
    assert f"{v2['batch_ms']:.2f}" in (tmp_path / "version_comparison.md").read_text()
    assert regression(tmp_path / "versions.json", tmp_path / "versions.json")[0] == 0
    assert "other settings" in call(compare_versions, *argv, "--seed", "1")[2]

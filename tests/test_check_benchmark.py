"""exercises/performance_debugging/check_benchmark.py: each fault is flagged by its probe, an honest
benchmark and our own results are not."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, captured

from exercises.performance_debugging import check_benchmark, probes
from exercises.performance_debugging.benchmarks import examine
from exercises.performance_debugging.benchmarks.common import Measured
from exercises.performance_debugging.solutions import probes as solution

FOLDER = ROOT / "exercises/performance_debugging"
H100 = ROOT / "results/h100"
HONEST = examine.Evidence(
    "honest",
    examine.Claim("", Measured(first=0.2, seconds=2e-4), unfinished=1e-5),
    examine.Calls(first=0.3, cold=2.2e-4, warm=2e-4),
    examine.Values(error=3e-7, error_after_change=3e-7),
)


def flagged_by(evidence: examine.Evidence) -> list[str]:
    """The names of the probes that flag it."""
    return [line.partition(":")[0] for line in check_benchmark.judge(evidence, solution)]


def test_each_probe_flags_its_fault_alone_and_none_an_honest_benchmark():
    claim, calls, values = HONEST.claim, HONEST.calls, HONEST.values
    early = replace(claim, measured=Measured(0.2, 2e-6))
    faults = {
        "precision": replace(HONEST, values=replace(values, error=3e-3)),
        "new_values": replace(HONEST, values=replace(values, error_after_change=1.1)),
        "finished": replace(HONEST, claim=replace(claim, unfinished=4e-3)),
        "first_call": replace(HONEST, calls=replace(calls, first=3.0)),
        "all_work": replace(HONEST, claim=early),
        "cache": replace(HONEST, calls=replace(calls, warm=8e-5)),
    }
    assert flagged_by(HONEST) == []
    assert {name: flagged_by(fault) for name, fault in faults.items()} == {
        name: [name] for name in faults
    }
    assert [probe.__name__ for probe in solution.PROBES] == [*faults]
    assert [probe.__name__ for probe in probes.PROBES] == [*faults]


def test_work_that_is_left_behind_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A device that still works when the benchmark has read its clock, as that of a GPU's other
    stream."""
    file = tmp_path / "late.py"
    text = (FOLDER / "benchmarks/benchmark_b.py").read_text()
    text = text.replace("import Benchmark", "import Benchmark, Measured")
    late = "Benchmark(operation, lambda *_: Measured(0.2, 2e-4))"
    file.write_text(text.replace("Benchmark(operation, timed)", late))
    monkeypatch.setattr(examine, "synchronize", lambda: time.sleep(0.05))
    claim = examine.as_its_author(file)
    assert claim.unfinished >= 0.05
    claim = replace(HONEST.claim, unfinished=claim.unfinished)
    assert flagged_by(replace(HONEST, claim=claim)) == ["finished"]


def test_what_is_not_written_yet_is_said(tmp_path: Path):
    file = tmp_path / "evidence.json"
    file.write_text(json.dumps({"benchmarks": [HONEST.row()]}))
    status, printed, _ = captured(check_benchmark.main, [str(file)])
    assert (status, printed.count(": not written yet")) == (1, 6)
    assert printed.endswith("0 of 1 flagged; 6 of 6 probes are not written yet\n")
    assert captured(check_benchmark.main, ["--solution", str(file)])[0] == 0


def test_the_h100s_benchmarks_are_flagged_and_the_honest_one_is_not():
    rows = json.loads((H100 / "sheets/performance_debugging/benchmarks.json").read_text())
    found = {row["name"][-1]: flagged_by(examine.Evidence.of(row)) for row in rows["benchmarks"]}
    assert found == {
        "a": ["cache"],
        "b": [],
        "c": ["all_work"],
        "d": ["precision"],
        "e": ["first_call"],
        "f": ["new_values"],
        "g": ["finished"],
    }


def test_our_own_results_are_not_flagged_and_a_fake_clock_and_an_impossible_rate_are(tmp_path):
    ours = [H100 / "puzzles.json", *sorted((H100 / "exercises_v3").glob("*.json"))]
    status, printed, _ = captured(check_benchmark.main, ["--solution", *map(str, ours)])
    assert (status, printed.count("nothing found")) == (0, len(ours))
    study, rate = H100 / "performance_debugging.json", tmp_path / "rate.json"
    rows = [{"what": "x", "bytes": 4e9, "us": 1e3}]
    rate.write_text(json.dumps({"copy": {"bytes": 3e9, "us": 1000.0}, "rows": rows}))
    for file, said in ((study, "step: stage3"), (rate, "rate: x has 4000 GB/s")):
        status, printed, _ = captured(check_benchmark.main, ["--solution", str(file)])
        flagged = printed.count("step: ") + printed.count("rate: ")
        assert (status, flagged, said in printed) == (1, 1, True)

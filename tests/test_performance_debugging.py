"""exercises/performance_debugging: each stage has its symptom and no other, each benchmark that
lies is flagged by its probe, an honest one is not."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT, captured, load, strict_json, words

from exercises.performance_debugging import (
    check_benchmark,
    check_step,
    compare_stages,
)
from exercises.performance_debugging.benchmarks import examine
from exercises.performance_debugging.benchmarks.common import Measured
from exercises.performance_debugging.solutions import probes as solution
from fusion_lab.profile.kernels import PHASES

FOLDER = ROOT / "exercises" / "performance_debugging"
FINAL = ROOT / "tiny_llama_v3.py"
H100 = ROOT / "results/h100"
SIZES = words(
    "--hidden-dim 32 --num-layers 1 --num-heads 2 --intermediate-dim 8 --vocab-size 100 --seq-len "
    "4 --batch-size 2"
    " --num-steps 2 --warmup-steps 1 --log-interval 1 --device cpu"
)


def path_of(stage: int) -> Path:
    """The file of a stage; 5 is the final version."""
    return FINAL if stage == 5 else next(FOLDER.glob(f"v3_stage{stage}_*.py"))


@pytest.fixture
def v3() -> Iterator[ModuleType]:
    """TinyLlama V3; what a stage replaces there is put back."""
    module = load("tiny_llama_v3")
    before = dict(vars(module))
    yield module
    vars(module).update(before)  # what is new stays: Triton's interpreter leaves names of its own


def run(main: Callable, stage: int, folder: Path) -> dict:
    """Its result; kernels are counted where there are more than in the final version."""
    count = [] if stage in (2, 5) else ["--under-profiler"]
    status, _, stderr = captured(main, [*SIZES, "--profile-dir", str(folder), *count])
    assert status == 0, stderr
    return strict_json((folder / f"{path_of(stage).stem}_summary.json").read_text())


@pytest.fixture
def train(v3: ModuleType, tmp_path: Path) -> Callable[[int], dict]:
    """`train(stage)` runs a stage and returns its result; V3 stays changed."""
    return lambda stage: run(check_step.load(path_of(stage)).main, stage, tmp_path)


@pytest.fixture(scope="module")
def final(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The result of the final version."""
    return run(load(FINAL.stem).main, 5, tmp_path_factory.mktemp("final"))


def test_stage_1_begins_far_above_equal_probabilities(train, final: dict):
    knows_nothing = math.log(100)
    assert final["loss"]["initial"] == pytest.approx(knows_nothing, rel=0.1)
    assert train(1)["loss"]["initial"] > 3 * knows_nothing


@pytest.mark.parametrize("stage", [2, 3, 4])
def test_slow_stages_learn_what_the_final_version_learns(v3, train, final: dict, stage: int):
    slow = train(stage)
    assert slow["loss"]["curve"] == pytest.approx(final["loss"]["curve"], rel=1e-5)
    assert stage != 2 or slow["kernels"]["per_step"] > final["kernels"]["per_step"]
    if stage != 3:  # which only measures otherwise
        argv = [*SIZES, "--verify-accuracy", "--use-amp"]
        status, stdout, _ = captured(v3.main, argv)
        assert (status, "Accuracy check: PASS" in stdout) == (0, True), stdout


def test_stage_3_does_not_wait_for_the_device(v3: ModuleType, train, monkeypatch, tmp_path):
    """Waiting for the last loss takes 0.2 s: V3's time contains it, that of stage 3 does not."""

    def progress(text: str = "") -> None:
        time.sleep(0.2 * text.startswith("step"))

    monkeypatch.setattr(v3, "progress", progress)
    for stage, waits in ((5, True), (3, False)):
        timing = (train(stage) if stage == 3 else run(v3.main, 5, tmp_path))["timing"]
        phases = sum(timing[f"{name}_ms"] for name in PHASES)
        assert (timing["batch_ms"] > phases + 80) == waits
        assert timing["batch_ms"] == pytest.approx(phases) or waits


@pytest.mark.parametrize("stage", [1, 5, 6])
def test_the_gradient_check_finds_parameters_that_do_not_train(
    v3: ModuleType, tmp_path: Path, stage: int
):
    argv = [str(path_of(stage)), *SIZES, "--profile-dir", str(tmp_path)]
    status, stdout, _ = captured(check_step.main, argv)
    found = strict_json((tmp_path / f"{path_of(stage).stem}_gradients.json").read_text())
    rows = {line.split()[1]: line for line in stdout.splitlines() if ".weight" in line}
    with_gradient = [name for name, line in rows.items() if not line.endswith(" - |")]
    if stage == 6:
        assert with_gradient == ["embed_tokens.weight"]
        assert found["elements_with_gradient"] == 100 * 32
    else:
        assert len(with_gradient) == len(rows) == 8
        assert found["elements_with_gradient"] == found["elements"]
    assert found["percent"] == 100 * found["elements_with_gradient"] / found["elements"]
    assert (status, "Gradient check: FAIL" in stdout) == (int(stage == 6), stage == 6)


def test_the_table_has_a_row_for_each_stage_of_an_h100():
    stages = compare_stages.read_study(H100 / "performance_debugging.json")
    rows = compare_stages.table(stages).splitlines()[2:]
    assert [row.split()[1] for row in rows] == ["baseline", *(f"stage{n}" for n in range(1, 7))]
    cells = {row.split()[1]: [cell.strip() for cell in row.split("|")] for row in rows}
    assert cells["stage1"][3:5] == ["473.3457", "10.2802"]
    assert cells["stage6"][-2] == "1.6 %"


# check_benchmark.py

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

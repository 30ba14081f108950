"""What is measured in turns and kept in studies, and the analysis tools that do it: ablation of
fusions, benchmark suite, best batch size."""

import json
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import call, load, read_rows, table_of, words

from analysis_tools import benchmark_suite, fusion_ablation_study, optimize_batch_size
from fusion_lab import batch_size, cli, records, runs, study, sweep, turns
from fusion_lab.cli import ToolError, sign_of_life
from fusion_lab.turns import Turns, compare_in_turns, in_turns, spread

SMALL = words(
    "--hidden-dim 32 --num-layers 1 --num-heads 2 --seq-len 8 --batch-size 2 --vocab-size 50"
    " --device cpu --warmup-steps 1"
)
GAINS = {"qkv-fusion": 1.25, "flash-attention": 2.0, "swiglu-fusion": 1.1}


def test_what_takes_long_says_so_although_its_own_lines_are_silenced(monkeypatch, capsys):
    monkeypatch.setattr(cli, "SIGN_SECONDS", 0.01)
    with sign_of_life("2 of 3"), sweep.silence():
        time.sleep(0.3)
    assert "2 of 3: at work since 0 s" in capsys.readouterr().err
    time.sleep(0.1)
    assert capsys.readouterr().err == "", "it ends with the work"


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(turns, "TURN_MS", 1)


# fusion_lab/turns.py, and studies that go on where they were interrupted


def fails_where(when, monkeypatch, script: str) -> None:
    """The script's model does not fit into memory where `when(args)` says so."""
    module = load(script)
    build = module.build_model

    def build_or_fail(args, device):
        if when(args):
            raise MemoryError("no room")
        return build(args, device)

    monkeypatch.setattr(module, "build_model", build_or_fail)


def test_a_side_that_fails_is_a_row_and_the_others_go_on(monkeypatch):
    fails_where(lambda args: args.hidden_dim == 64, monkeypatch, "tiny_llama_v2")
    nan = [*SMALL, "--learning-rate", "1e30"]
    sides = {"good": SMALL, "large": [*SMALL, "--hidden-dim", "64"], "nan": nan}
    sides = {name: ("tiny_llama_v2", argv) for name, argv in sides.items()}
    rows = in_turns(sides, 3)
    assert [rows[name].get("status") for name in sides] == [None, "oom", "failed"]
    assert (len(rows["good"]["turns_ms"]), rows["good"]["unit"]) == (3, "operator calls")
    assert "learning-rate" in rows["nan"]["error"]
    assert "batch_ms" not in rows["large"] | rows["nan"]
    assert rows["large"]["error"] == "MemoryError: no room"


def test_each_turn_has_the_settings_of_its_own_side(monkeypatch):
    """Block sizes and the precision of products hold for the process: parsing or measuring
    another side took them."""
    script, seen = load("tiny_llama_v3"), {"16": set(), "32": set()}

    def settings(trainer) -> torch.Tensor:
        blocks = script.blocks("attention_forward")["BLOCK_M"]
        seen[trainer.args.blocks[-2:]].add((blocks, torch.get_float32_matmul_precision()))
        return torch.zeros(())

    monkeypatch.setattr(script.Trainer, "step", settings)
    sides = {
        m: ("tiny_llama_v3", [*SMALL, *words(f"--blocks attention_forward:BLOCK_M={m} {more}")])
        for m, more in ((16, "--matmul-precision high"), (32, ""))
    }
    in_turns(sides, 2, counted=False)
    assert seen == {"16": {(16, "high")}, "32": {(32, "highest")}}


def test_functions_take_turns_in_changing_order():
    calls: list[str] = []
    sides = {name: partial(calls.append, name) for name in "ab"}
    found = compare_in_turns(sides, turns=5, ms=0.0)
    assert {name: len(ms) for name, ms in found.ms.items()} == {"a": 5, "b": 5}
    assert "".join(calls[-12:]) == 3 * "abba"


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([5, 5, 5, 5, 4], "2.00x to 2.50x in 5 turns, 25 % wide (all turns agree)"),
        ([5, 5, 5, 5, 3], "to 3.33x in 5 turns, 67 % wide (all turns agree on which is faster)"),
        ([5, 5, 5, 5, 20], "0.50x to 2.00x in 5 turns, 300 % wide (no difference seen)"),
        ([5, 5], "2.00x to 2.00x in 2 turns, 0 % wide (too few turns to tell)"),
        ([5, 4, 5], "2.00x to 2.50x in 3 turns, 25 % wide (all turns agree)"),
        ([5, 5, 2], "2.00x to 5.00x in 3 turns, 150 % wide (too few turns to tell)"),
        ([20, 21, 20], "0.48x to 0.50x in 3 turns, 5 % wide (all turns agree)"),
    ],
)
def test_a_comparison_says_how_wide_its_turns_lie_apart(after, said):
    found = Turns({"before": [10.0] * len(after), "after": after})
    first, _, verdict = str(found).splitlines()
    assert first == "before: 10 ms"
    assert said in verdict
    assert found.us["after"][0] == 1000 * after[0]
    agree = "(all turns agree)" in said  # a table then says no more
    assert spread(found.ratios("after")).count(",") == (not agree)


def counting(done: list[int], fails_at: int = -1) -> Iterable[tuple[dict, Callable[[], dict]]]:
    """Parts of a study that note that they were measured."""

    def measure(n: int) -> dict:
        if n == fails_at:
            raise KeyboardInterrupt
        done.append(n)
        return {"group": n * n}

    return [({"seed": n}, lambda n=n: measure(n)) for n in range(4)]


def test_a_study_goes_on_where_it_was_interrupted(tmp_path, capsys):
    done, path = [], tmp_path / "study.json"
    with pytest.raises(KeyboardInterrupt):
        study.measure_study(path, counting(done, fails_at=2), rounds=3)
    with pytest.raises(ToolError, match="not finished"):
        records.read_rows(path)
    assert study.heading(json.loads(path.read_text()), "x").endswith("the same command goes on")
    with pytest.raises(ToolError, match="other settings"):
        study.measure_study(path, counting(done), rounds=4)
    rows = study.measure_study(path, counting(done), rounds=3, cost=lambda names: 100.0)
    assert done == [0, 1, 2, 3], "none is measured twice"
    assert rows == [{"seed": n, "group": n * n} for n in range(4)]
    written = json.loads(path.read_text())
    assert (written["rows"], written["rounds"]) == (rows, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["study.json"]
    before, first, second = capsys.readouterr().err.splitlines()[-3:]
    assert before == "about 3 min for 2 points to measure"
    assert (first, second) == ("1 of 2: seed 2", "2 of 2: seed 3; about 1 s left")


def test_what_failed_is_tried_again_and_nothing_else(tmp_path):
    done = []

    def parts(status: dict) -> list:
        def measure(n: int) -> dict:
            done.append(n)
            return {"script": "x"} | (status if n == 1 else {"batch_ms": 1.0})

        return [({"seed": n}, partial(measure, n)) for n in range(3)]

    path = tmp_path / "study.json"
    for status in ({"status": "failed", "error": "why"}, {"status": "oom", "error": "why"}, {}):
        rows = study.measure_study(path, parts(status))
    assert done == [0, 1, 2, 1]
    assert sorted(row["seed"] for row in rows) == [0, 1, 2]


# The tools


def test_a_gain_within_that_of_the_control_is_none_seen():
    """In each group over all of the same turns, however slow the host was for another group.

    Memory is over the control's, as the first side's may be more than it needs.
    """
    common = {"shape": "small", "precision": "bf16", "seed": 42, "script": "x", "batch_size": 1}
    rows = [
        {
            **common,
            **{"group": group, "side": side, "on": [*on], "batch_ms": group * ms},
            **{"turns_ms": [group * ms, 3 * group * ms, 2 * group * ms], "peak_mb": mb},
        }
        for group, side, on, ms, mb in (
            *((1, "all", "abc", 10.0, 110.0), (2, "all", "abc", 10.0, 100.0)),
            *((group, "none", "", 20.0, 300.0) for group in (1, 2)),
            *((1, sweep.CONTROL, "abc", 10.1, 100.0), (2, sweep.CONTROL, "abc", 9.8, 100.0)),
            (1, "all but a", "bc", 11.0, 100.0),
            (1, "all but b", "ac", 10.15, 150.0),
            (2, "all but c", "ab", 9.7, 100.0),
        )
    ]
    assert sweep.noise(rows) == pytest.approx(0.02)
    study_of = {"environment": {"device_name": "x"}, "rows": rows}
    measured = runs.of_study(Path("x.json"), study_of)
    (table, worth), *_ = sweep.tables_of(measured)
    shown = {row["what each fusion gains"]: row for row in table_of(worth)}
    found = [(row["added last"], row["MB without it"]) for row in shown.values()]
    none = "no difference seen"
    assert found == [
        *(("1.10x", "+0.0 %"), ("1.02x", "+50.0 %"), ("0.97x", "+0.0 %")),
        ("within 2.0 %", "-"),
    ]
    agree = "all turns agree"
    assert [shown[name]["what that shows"] for name in "abc"] == [agree, none, agree]
    said = "At these sizes: saves time: a (1.10x); no difference seen: b; takes longer: c (0.97x)."
    assert sweep.conclusion(measured) == said
    firsts = [row["turns of group"] for row in table_of(table) if row["x"] == "none"]
    assert firsts == ["1", "2"], "each group has its own none, as its rows come from it"


@pytest.fixture
def steady(monkeypatch):
    """Steps of V1 take 20 ms, those of V2 that over the gains of its fusions.

    No step is taken in a turn, and none for its memory, which is 10 MB.
    """
    for version in (1, 2):
        script = load(f"tiny_llama_v{version}")

        def take(trainer, steps: int, measured: bool = True) -> float:
            given = {name: getattr(trainer.args, name.replace("-", "_"), False) for name in GAINS}
            gain = math.prod(GAINS[name] for name, on in given.items() if on)
            turn = len(trainer.turns_ms)  # 0 is the trial
            ms = 20.0 / gain * (1 + (turn - 1) / 10)
            trainer.turns_ms += [ms] * measured
            return ms

        monkeypatch.setattr(script.Trainer, "take", take)
        monkeypatch.setattr(script, "memory_of_a_step", lambda trainer: [(0.0, 1e7)])


def test_an_ablation_has_the_effect_of_each_fusion(steady, tmp_path):
    path = tmp_path / "study.json"
    argv = ["--script", "tiny_llama_v2.py", *SMALL, "--all-combinations"]
    argv += [*words("--group-size 4 --rounds 5 --output"), path]
    status, out, err = call(fusion_ablation_study, *argv)
    assert (status, "6 of 6" in err) == (0, True)
    assert max(map(len, err.splitlines())) < 100, "a point is one short line"
    rows = {row["tiny_llama_v2"]: row for row in table_of(out)}
    assert (len(rows), rows["all but swiglu-fusion"]["speed-up"]) == (9, "2.50x")
    assert "flash-attention (2.00x)" in out.splitlines()[-1]
    assert call(fusion_ablation_study, "--table", path)[1] == out
    assert call(fusion_ablation_study, *argv)[1] == out, "nothing is left to measure"


def test_the_suite_compares_the_models_of_each_cell(steady, monkeypatch, tmp_path):
    fails_where(lambda args: args.batch_size == 4, monkeypatch, "tiny_llama_v1")

    def short_run(script: str, argv: list[str]) -> dict:
        return {"status": "ok", "loss": {"final": 4.0 + (script[-1] == "2")}}

    monkeypatch.setattr(sweep, "short_run", short_run)
    argv = [*SMALL, *words("--batch-sizes 2,4 --seq-lengths 8 --rounds 5 --output")]
    argv += [tmp_path / "suite.json", "--csv", tmp_path / "s.csv", "--plot", tmp_path / "s.png"]
    status, out, _ = call(benchmark_suite, *argv)
    assert status == 0
    first, second, third, fourth = table_of(out)
    assert [first[key] for key in ("tiny_llama", "batch size", "samples/sec")] == [
        "V1",
        "2",
        "83.3",
    ]
    found = [second[key] for key in ("samples/sec", "speed-up", "in turns", "loss change")]
    assert found == ["229.2", "2.75x", "2.75x to 2.75x", "+2.5e-01"]
    assert (third["samples/sec"], third["ms per step"]) == ("out of memory", "-")
    assert fourth["speed-up"] == "-", "there is nothing to compare with"
    assert "batch size 2: saves time: V2 (2.75x).\n" in out
    shown = call(benchmark_suite, "--table", tmp_path / "suite.json")[1]
    assert shown == out.partition("\nWritten")[0]
    assert [row["speedup"] for row in read_rows(tmp_path / "s.csv")] == ["1.0", "2.75", "", ""]
    assert (tmp_path / "s.png").stat().st_size > 5_000
    more = call(benchmark_suite, *argv, "--seq-lengths", "8,16")
    assert "for 2 points to measure" in more[2], "what was measured stays"


def test_without_sizes_a_cpu_gets_small_ones_and_says_so(steady, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "SMALL", {"tiny_llama": " ".join(SMALL[:-4])})
    argv = words("--device cpu --rounds 1 --warmup-steps 1 --fusions qkv-fusion")
    status, _, err = call(fusion_ablation_study, *argv)
    assert (status, "no size is given: tiny_llama_v2 gets --hidden-dim 32" in err) == (0, True)
    (row, *_) = json.loads((tmp_path / "ablation_tiny_llama_v2.json").read_text())["rows"]
    assert row["seq_len"] == 8


def test_batch_sizes_grow_until_one_is_too_large():
    sizes = batch_size.sizes_up_to(40)
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]
    rows = [{"batch_size": size, "peak_mb": float(size)} for size in (1, 2, 4)]
    too_large = partial(batch_size.is_too_large, 8, limit_mb=100.0)
    assert not too_large(rows)
    assert too_large(rows, limit_mb=3.0)
    assert too_large(rows, host_mb=7.0), "never more than the machine has"
    assert too_large([*rows, {"batch_size": 6, "status": "oom"}])
    assert not too_large([*rows, {"batch_size": 8, "status": "failed"}]), "it is tried again"


def test_the_best_batch_size_is_below_the_limit(steady, monkeypatch, tmp_path):
    fails_where(lambda args: args.batch_size > 4, monkeypatch, "tiny_llama_v2")
    at, path = SMALL.index("--batch-size"), tmp_path / "search.json"
    argv = ["--script", "tiny_llama_v2.py", *SMALL[:at], *SMALL[at + 2 :]]
    argv += words("--rounds 2 --output")
    picture = tmp_path / "sizes.png"
    status, out, err = call(optimize_batch_size, *argv, path, "--plot", picture)
    assert (status, picture.stat().st_size > 5_000) == (0, True), err
    rows = table_of(out)
    assert [row["batch size"] for row in rows] == ["1", "2", "3", "4", "6"]
    assert [row["samples/sec"] for row in rows[3:]] == ["523.8", "out of memory"]
    assert "Best for throughput: batch size 4" in out
    again = call(optimize_batch_size, *argv, path, "--optimization-target", "latency")
    assert "Best for latency: batch size 1" in again[1]
    assert "batch_size 2" not in again[2], "it was measured before"
    monkeypatch.setattr(optimize_batch_size, "memory_mb", lambda device: 1.0)
    status, _, err = call(optimize_batch_size, *argv, tmp_path / "none.json")
    assert (status, "even batch size 1 takes more than 80%" in err) == (3, True)

"""lab/turns.py: runs that fail beside others, and studies that go on where they were
interrupted."""

import json
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from conftest import load, words

from lab.cli import ToolError
from lab.study import measure_study
from lab.turns import (
    GRAPH,
    Turns,
    all_measured,
    compare_in_turns,
    graph_of,
    in_turns,
    on_gpu,
    speedup,
    spread,
)

SMALL = words(
    "--hidden-dim 32 --num-layers 1 --num-heads 2 --seq-len 8 --batch-size 2 --vocab-size 50"
)


def test_a_side_that_fails_is_a_row_and_the_others_go_on(monkeypatch):
    script = load("tiny_llama_v2")
    build = script.build_model

    def too_large(args, device):
        if args.hidden_dim == 64:
            raise MemoryError("can't allocate memory")
        return build(args, device)

    monkeypatch.setattr(script, "build_model", too_large)
    nan = [*SMALL, "--learning-rate", "1e30"]
    sides = {"good": SMALL, "large": [*SMALL, "--hidden-dim", "64"], "nan": nan}
    sides = {name: ("tiny_llama_v2", argv) for name, argv in sides.items()}
    rows = in_turns(sides, 3)
    assert [rows[name].get("status") for name in sides] == [None, "oom", "failed"]
    assert (len(rows["good"]["turns_ms"]), rows["good"]["unit"]) == (3, "operator calls")
    assert "learning-rate" in rows["nan"]["error"]
    assert "batch_ms" not in rows["large"] | rows["nan"]
    with pytest.raises(ToolError, match="allocate memory") as error:
        all_measured(sides, 3)
    assert error.value.status == 3


def test_each_turn_has_the_settings_of_its_own_side(monkeypatch):
    """Block sizes and the precision of products hold for the process: parsing or measuring
    another side took them."""
    script, seen = load("tiny_llama_v3"), {"small": [], "large": []}
    step = script.Trainer.step

    def watched(trainer):
        blocks = script.blocks("attention_forward")["BLOCK_M"]
        seen["small" if "16" in trainer.args.blocks else "large"].append(
            (blocks, torch.get_float32_matmul_precision())
        )
        return step(trainer)

    monkeypatch.setattr(script.Trainer, "step", watched)
    blocks = "--disable-all-fusion --enable-triton-attention --blocks attention_forward:BLOCK_M="
    sides = {
        "small": ("tiny_llama_v3", [*SMALL, *words(f"{blocks}16 --matmul-precision high")]),
        "large": ("tiny_llama_v3", [*SMALL, *words(f"{blocks}32")]),
    }
    in_turns(sides, 2)
    assert set(seen["small"]) == {(16, "high")}
    assert set(seen["large"]) == {(32, "highest")}


@pytest.mark.parametrize(
    "argv", [["--device", "cpu"], ["--device=cpu"], [], ["--disable-cuda-graph"]]
)
def test_a_step_is_a_graph_on_a_gpu_only(argv, monkeypatch):
    assert GRAPH not in graph_of(argv) or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert on_gpu(argv) == ("cpu" not in " ".join(argv))
    assert graph_of(argv) == ([GRAPH] if argv == [] else argv)


def test_speedup_is_the_median_over_the_turns():
    first, second = {"turns_ms": [10.0, 60.0, 20.0]}, {"turns_ms": [5.0, 10.0, 20.0]}
    assert speedup(first, second) == 2.0


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
    ],
)
def test_a_comparison_says_how_wide_its_turns_lie_apart(after, said):
    turns = Turns({"before": [10.0] * len(after), "after": after})
    first, _, verdict = str(turns).splitlines()
    assert first == "before: 10 ms"
    assert "2.00x as fast as before: " in verdict
    assert said in verdict
    assert turns.us["after"][0] == 5000
    agree = "(all turns agree)" in said  # a table then says no more
    assert spread(turns.ratios("after")).count(",") == (not agree)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [lambda x: x.sum().item(), lambda x: None], ids=["waits", "host"])
def test_a_function_that_cannot_be_a_graph_is_named(step):
    x = torch.ones(9, device="cuda")
    with pytest.raises(ToolError, match="b cannot be captured as a graph"):
        compare_in_turns({"a": lambda: x + 1, "b": lambda: step(x)})
    assert compare_in_turns({"a": lambda: x + 1}, ms=0.1).ms["a"][0] > 0


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
        measure_study(path, counting(done, fails_at=2), rounds=3)
    assert not path.exists()
    with pytest.raises(ToolError, match="other settings"):
        measure_study(path, counting(done), rounds=4)
    rows = measure_study(path, counting(done), rounds=3)
    assert done == [0, 1, 2, 3], "none is measured twice"
    assert rows == [{"seed": n, "group": n * n} for n in range(4)]
    written = json.loads(path.read_text())
    assert (written["rows"], written["rounds"]) == (rows, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["study.json"]
    assert "4 of 4: seed 3" in capsys.readouterr().err


def test_rows_are_renewed_and_the_others_stay(tmp_path):
    """The rows of a whole earlier file, once: after an interruption the new ones stay, too."""
    done, path = [], tmp_path / "study.json"
    measure_study(path, counting([]), rounds=3)
    two = counting(done, fails_at=2)[1:3]
    with pytest.raises(KeyboardInterrupt):
        measure_study(path, two, renew=True, rounds=3)
    rows = measure_study(path, counting(done)[1:3], renew=True, rounds=3)
    assert done == [1, 2]
    assert sorted(row["seed"] for row in rows) == [0, 1, 2, 3]
    with pytest.raises(ToolError, match="other settings"):
        measure_study(path, counting(done)[1:3], renew=True, rounds=4)

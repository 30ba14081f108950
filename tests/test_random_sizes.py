"""tools/random_sizes.py: what it says of cases that pass, are refused, fail or hang."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import pytest
from conftest import captured, load, words

from tools import random_sizes


def test_cases_run_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(random_sizes, "flags_of", lambda *_: ["--disable-all-fusion"])  # quick ones
    first, again, other = (random_sizes.families(60, seed, "cuda") for seed in (3, 3, 4))
    assert first == again != other
    argv = words("--device cpu --cases 4 --seed 0 --processes 1 --seconds 200")
    output = tmp_path / "sizes.json"
    status, stdout, _ = captured(random_sizes.main, [*argv, "--output", str(output)])
    assert status == 0, stdout
    assert stdout.endswith("4 of 4 cases ran\n")
    rows = json.loads(output.read_text())["rows"]
    assert sum(row["outcomes"]["passed"] for row in rows) == 4


def test_a_case_that_hangs_fails_and_its_command_is_printed(tmp_path: Path):
    argv = words("--device cpu --cases 1 --processes 1 --limit 1")
    status, _, errors = captured(random_sizes.main, [*argv, "--output", f"{tmp_path}/sizes.json"])
    assert status == 1
    assert "no end within the limit\n  python tiny_" in errors


def test_what_ran_is_kept_if_somebody_ends_it(monkeypatch: pytest.MonkeyPatch):
    class Queue(deque):
        def get(self):
            if not self:
                raise KeyboardInterrupt
            return self.popleft()

    monkeypatch.setattr(random_sizes.signal, "signal", lambda *_: None)
    monkeypatch.setattr(random_sizes, "drive", lambda *_: None)
    monkeypatch.setattr(random_sizes, "SimpleQueue", lambda: Queue(["what ran"]))
    args = random_sizes.build_parser().parse_args(words("--output x.json"))
    assert [*random_sizes.run_cases(args)] == ["what ran"]


def test_what_a_command_is_judged_to_be(monkeypatch: pytest.MonkeyPatch):
    sizes = words("--msa-dim 16 --num-heads-msa 2 --pair-dim 16 --seq-len 4 --device cpu")

    def attempt(kind: str, argv: str) -> tuple[str, str]:
        case = random_sizes.Case(kind, "tiny_openfold", "V2", "fp32", sizes, words(argv))
        outcome = random_sizes.attempt(case)
        return outcome.verdict, outcome.line

    assert attempt("accuracy", "--verify-accuracy") == ("passed", "")
    verdict, line = attempt("accuracy", "--learning-rate 0 --verify-accuracy")
    assert (verdict, "--learning-rate" in line) == ("refused", True)
    sizes += words("--num-steps 2 --warmup-steps 1")
    assert "losses differ" in attempt("curve", "--batch-size 2 --seed 1")[1]
    monkeypatch.setattr(load("tiny_openfold_v2"), "build_optimizer", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in attempt("curve", "--batch-size 2")[1]

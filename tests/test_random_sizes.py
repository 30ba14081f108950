"""dev/random_sizes.py: what it says of cases that pass, fail or hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import captured, words

from dev import random_sizes


def test_cases_follow_from_the_seed_and_one_that_hangs_fails(tmp_path: Path):
    first, again, other = ([*random_sizes.cases(9, seed, "cuda")] for seed in (3, 3, 4))
    assert first == again != other
    output = tmp_path / "sizes.json"
    argv = words("--device cpu --cases 1 --processes 1 --limit 1 --output")
    status, stdout, errors = captured(random_sizes.main, [*argv, str(output)])
    assert (status, stdout.endswith("1 of 1 cases ran\n")) == (1, True)
    assert "no end within the limit\n  python tiny_" in errors
    assert json.loads(output.read_text())["rows"][0]["outcomes"] == {"failed": 1}


@pytest.mark.parametrize(
    ("other", "verdict"), [(1.0005, "passed"), (1.003, "passed"), (1.01, "failed")]
)
def test_a_curve_may_be_three_times_as_far_from_v1s_as_v2s_is(monkeypatch, other, verdict):
    losses = {"V1": (2.0, 1.0), "V2": (2.0, 1.002), "V4": (2.0, other)}

    def run_script(case, version, argv, limit):
        return random_sizes.Outcome("passed", losses=losses[version])

    monkeypatch.setattr(random_sizes, "run_script", run_script)
    curve = random_sizes.Case("curve", "tiny_openfold", "V4", "fp32", [], [])
    assert random_sizes.attempt(curve, 300).verdict == verdict

"""analysis_tools/measure_energy.py: on made-up power, since there is none to be read on a CPU."""

import json
import time
import types

import pytest
import torch
from conftest import TINY, words

from analysis_tools import measure_energy
from lab import provenance


def test_energy_is_power_times_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(provenance, "reading", lambda: (200.0, 1500.0))
    monkeypatch.setattr(provenance, "SETTLE", 0.0)
    monkeypatch.setattr(provenance, "PERIOD", 0.001)
    output, scripts = tmp_path / "energy.json", ["tiny_llama_v1.py", "tiny_llama_v2.py"]
    argv = ["--scripts", *scripts, *words("--seconds 3 --rounds 1 --device cpu")]
    assert measure_energy.main([*argv, "--output", str(output), *TINY["llama"]]) == 0
    first, second = json.loads(output.read_text())["rows"]
    for row in (first, second):
        assert (row["watts"], row["mhz"]) == (200.0, 1500.0)
        assert row["joules_per_step"] == pytest.approx(0.2 * row["batch_ms"])
        assert row["mj_per_sample"] == pytest.approx(500 * row["joules_per_step"]), (
            "of two samples a step"
        )
    part = second["joules_per_step"] / first["joules_per_step"]
    assert f"{part:.2f} |" in capsys.readouterr().out.splitlines()[-1]


def test_readings_of_the_turn_before_do_not_count():
    samples = [(10.5, 900.0, 1980.0), (12.5, 100.0, 1000.0), (13.0, 300.0, 1200.0)]
    assert provenance.means(samples, 10.0) == (200.0, 1100.0)
    with pytest.raises(provenance.ToolError, match="--seconds"):
        provenance.means(samples[:1], 10.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has power")
def test_without_power_nothing_is_shown(tmp_path, capsys, monkeypatch):
    """Nor where a reading fails in a turn."""
    output = tmp_path / "energy.json"
    assert measure_energy.main(["--scripts", "tiny_llama_v1.py", "--output", str(output)]) == 4
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines()), output.exists()) == ("", 1, False)
    monkeypatch.setattr(provenance, "PERIOD", 0.001)
    with pytest.raises(provenance.ToolError, match="there is none here"):
        provenance.take_with_readings(types.SimpleNamespace(take=lambda steps: time.sleep(0.1)), 1)

"""What a GPU says of itself, by a stand-in for nvidia-smi, and energy from made-up power: there is
none to be read on a CPU."""

import json
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import TINY, words

from analysis_tools import measure_energy
from lab import provenance

LOG = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>580.95.05</driver_version>
  <gpu id="00000000:04:00.0">
    <clocks_event_reasons_counters>
      <clocks_event_reasons_counters_sw_power_cap>{} us</clocks_event_reasons_counters_sw_power_cap>
      <clocks_event_reasons_counters_hw_thermal_slowdown
      >7 us</clocks_event_reasons_counters_hw_thermal_slowdown>
    </clocks_event_reasons_counters>
    <temperature><gpu_temp>41 C</gpu_temp></temperature>
    <gpu_power_readings><current_power_limit>700.00 W</current_power_limit></gpu_power_readings>
    <clocks><sm_clock>1980 MHz</sm_clock><mem_clock>N/A</mem_clock></clocks>
  </gpu>
</nvidia_smi_log>
"""


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A PATH with nothing but a stand-in nvidia-smi, which prints the file `log`."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SOURCE_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "this_gpu", lambda: "GPU-1")
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\n[ "$*" = "-q -x -i GPU-1" ] && while read -r line; do echo "$line"; done < '
        f"{tmp_path}/log\n"
    )
    program.chmod(0o755)
    (tmp_path / "log").write_text(LOG.format(100))
    return tmp_path


def test_what_the_gpu_says_of_itself_and_what_throttling_was_added_meanwhile(machine):
    with provenance.watched() as found:
        (machine / "log").write_text(LOG.format(350))
    assert (found["driver"], found["sm_clock"]) == ("580.95.05", "1980 MHz")
    assert (found["power_limit"], found["temperature"]) == ("700.00 W", "41 C")
    assert found["memory_clock"] == "N/A", "not every GPU says all"
    assert found["throttled_us"] == {"sw_power_cap": 250, "hw_thermal_slowdown": 0}


def test_without_tools_there_are_reasons(machine):
    (machine / "nvidia-smi").unlink()
    with provenance.watched() as found:
        pass
    names = {"commit", "dirty", "driver", "sm_clock", "temperature", "temperature_after"}
    assert found.keys() == names | {"seconds", "throttled_us"}
    assert not [name for name in names if not found[name].startswith("not read: ")], found


def test_the_commit_of_a_copy_without_history(machine, monkeypatch):
    monkeypatch.setenv("SOURCE_COMMIT", "abc123")
    assert provenance.commit()["commit"] == "abc123"


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

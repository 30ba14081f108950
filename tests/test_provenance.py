"""What a GPU says of itself, by a stand-in for nvidia-smi."""

from pathlib import Path

import pytest

from fusion_lab import provenance

LOG = """<?xml version="1.0" ?>
<nvidia_smi_log>
  <driver_version>580.95.05</driver_version>
  <gpu id="00000000:04:00.0">
    <clocks_event_reasons_counters>
      <clocks_event_reasons_counters_sw_power_cap>{} us</clocks_event_reasons_counters_sw_power_cap>
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
    assert found["throttled_us"] == {"sw_power_cap": 250}


def test_without_tools_there_are_reasons(machine):
    (machine / "nvidia-smi").unlink()
    with provenance.watched() as found:
        pass
    names = {"commit", "dirty", "driver", "sm_clock", "temperature", "temperature_after"}
    assert found.keys() == names | {"seconds", "throttled_us"}
    assert not [name for name in names if not found[name].startswith("not read: ")], found

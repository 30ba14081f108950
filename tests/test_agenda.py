"""tools/agenda.py: sessions and days from one file, the sheets' own minutes, and rehearsals."""

import json
import re

import pytest
from conftest import ROOT, captured

from tools import agenda, run_sheet

GUIDE = (ROOT / agenda.GUIDE).read_text()


def test_every_sheet_on_an_agenda_has_a_core_path_of_25_minutes_at_most():
    assert {path for path in agenda.sheets() if agenda.core_minutes(path) > 25} == set()


def test_agendas_are_as_long_as_their_names_say():
    hours = {}
    for name, lines in agenda.plan()["agendas"].items():
        hours[name] = sum(agenda.item_of(line).minutes for line in lines) / 60
    assert hours["half a day"] <= 4
    assert hours["a day"] <= 7
    assert hours["two days"] <= 14


def test_each_demonstration_has_a_recording_of_the_same_commands():
    sessions = [block for block in run_sheet.parse_sheet(GUIDE) if "Session" in block.exercise]
    assert {block.exercise for block in sessions} == set(agenda.plan()["sessions"])
    for block in sessions:
        version = re.search(r"Session (\d)", block.exercise)[1]
        recorded = (ROOT / f"results/h100/demonstrations/v{version}.txt").read_text()
        assert f"$ {block.text}" in recorded
        assert all(phrase in recorded for phrase in block.phrases)


def test_a_rehearsal_adds_the_seconds_of_what_runs_and_fails_with_the_rest(tmp_path):
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("# Good\n\n```bash\necho fine\n```\n\nPrints: `fine`\n")
    bad.write_text("# Bad\n\n```bash\nfalse\n```\n")
    file = tmp_path / "rehearsal.json"
    assert captured(agenda.main, ["rehearse", str(file), str(good)])[0] == 0
    assert captured(agenda.main, ["rehearse", str(file), str(bad)])[0] == 1
    assert set(json.loads(file.read_text())["seconds"]) == {str(good)}


def test_measured_minutes_are_those_of_the_rehearsal():
    seconds = json.loads((ROOT / "results/h100/rehearsal.json").read_text())["seconds"]
    name = "Session 4: Mastery"
    (demonstration,) = (i for i in agenda.session(name) if i.what.startswith("demonstration"))
    assert agenda.measured("h100", demonstration, name) == seconds[name] / 60


def test_a_sheet_without_its_minutes_is_named(tmp_path, monkeypatch):
    (tmp_path / "sheet.md").write_text("# A sheet\n\nCore: 25 minutes\n")
    monkeypatch.setattr(agenda, "ROOT", tmp_path)
    with pytest.raises(agenda.ToolError, match=r"sheet.md: no line '\*\*Core\*\*: N minutes'"):
        agenda.core_minutes("sheet.md")

"""report_generator.py: one report of two folders has what is in them, and names what is not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, assert_refused, call, forking_python

from analysis_tools import report_generator
from lab.files import read_json
from lab.profile.kernels import statistics_of, write_statistics

H100 = ROOT / "results/h100"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """What run_all_profilers.sh leaves of V1 and V2, baseline and fused, by default."""
    sides = tmp_path / "profiles_tiny_llama_v1", tmp_path / "profiles_tiny_llama_v2"
    for side, script in zip(sides, ("tiny_llama_v1", "tiny_llama_v2"), strict=True):
        shutil.copytree(H100 / "profiles" / script, side / "pytorch")
        profile = read_json(side / f"pytorch/{script}_profile.json")
        run = read_json(ROOT / "results/cpu/tiny_llama_v2_readme.json")
        run |= {name: profile[name] for name in ("script", "config", "fusions", "environment")}
        (side / f"pytorch/{script}_summary.json").write_text(json.dumps(run))
        (side / "flops").mkdir()
        flops = read_json(H100 / "flops_tiny_llama_v2.json") | {"script": script}
        flops |= {name: profile[name] for name in ("config", "training")}
        (side / f"flops/{script}_flops.json").write_text(json.dumps(flops))
    return sides


def report(folders: tuple[Path, Path], *argv: object) -> tuple[int, str, str]:
    return call(report_generator, "--baseline", folders[0], "--fused", folders[1], *argv)


def sections(text: str) -> list[str]:
    return re.findall(r"^## (.+)", text, re.MULTILINE)


def test_the_report_has_what_the_files_have(folders, tmp_path):
    """Under its other name, and with the default folders."""
    for side, calls in zip(folders, (4, 2), strict=True):
        place = side / f"rocprofv3_results_{side.name}"
        place.mkdir()
        write_statistics(place / "stats.csv", statistics_of({"Cijk_Ailk": [1000] * calls}))
    roofline = folders[1] / "flops" / "tiny_llama_v2_roofline.png"
    roofline.write_bytes(b"")
    program = ROOT / "analysis_tools" / "generate_fusion_report.py"
    command = [forking_python(), str(program), "--output-dir", "./deep/report"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    path = tmp_path / "deep" / "report" / "fusion_report.md"
    assert (done.returncode, done.stderr) == (0, "")
    text = path.read_text()
    kernels = ["Kernels by the PyTorch profiler", "Kernels by rocprofv3"]
    assert sections(text) == ["Runs", *kernels, "FLOPs of modules", "Rooflines"]
    for label, side in zip(("baseline", "fused"), folders, strict=True):
        run = read_json(next(side.glob("pytorch/*_summary.json")))
        row = next(line for line in text.splitlines() if line.startswith(f"| {label} "))
        assert f" {run['timing']['batch_ms']:.2f} |" in row
        assert f" {run['loss']['final']:.4f} |" in row
    profiles = [read_json(next(side.glob("pytorch/*_profile.json"))) for side in folders]
    before, after = (f"{profile['kernels_per_step']:.10g}" for profile in profiles)
    assert f"Kernels per step: {before} -> {after}" in text
    assert "- Kernels in all: 4 -> 2" in text
    modules = read_json(folders[1] / "flops" / "tiny_llama_v2_flops.json")["modules"]
    row = next(line for line in text.splitlines() if line.startswith("| layers.*.self_attn "))
    attention = next(row for row in modules if row["module"] == "layers.*.self_attn")
    assert row.endswith(f" {attention['flop_per_byte']:.2f} |")
    (link,) = re.findall(r"!\[fused: .+\]\(<(.+)>\)", text)
    assert (path.parent / link).resolve() == roofline.resolve()
    assert "Not in this report" not in text


def test_what_is_missing_is_named_with_its_reason(folders):
    """The files of an earlier run are not taken."""
    step = {"name": "flops", "status": "skipped", "reason": "no such package"}
    summary = {"script": "tiny_llama_v2.py", "steps": [step]}
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    status, out, err = report(folders)
    assert (status, err) == (0, "")
    assert sections(out) == ["Runs", "Kernels by the PyTorch profiler"]
    last = out.splitlines()[-1]
    missing = "Kernels by rocprofv3 (baseline, fused: nothing there); "
    assert last.startswith(f"Not in this report: {missing}")
    assert "FLOPs of modules (fused: no such package)" in last


def test_other_sizes_are_named_and_a_failed_run_is_a_row_and_status_1(folders):
    path = folders[1] / "pytorch" / "tiny_llama_v2_summary.json"
    run = read_json(path) | {key: {} for key in ("timing", "memory", "kernels", "loss")}
    run["config"]["seq_len"] = 999
    path.write_text(json.dumps(run | {"status": "failed", "error": "the loss became nan"}))
    status, out, err = report(folders)
    assert (status, "fused failed: the loss became nan" in err) == (1, True)
    assert "- note: seq_len differs: 128 for baseline; 999 for fused" in out.partition("## ")[0]
    assert re.search(r"^\| fused +\| +failed \|", out, re.MULTILINE)
    assert "- note: fused did not finish: the loss became nan" in out


OTHER_MODEL = ("tiny_llama_v1", "tiny_openfold_v1")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("*_kernels.csv", lambda text: text[:-40], "_kernels.csv"),
        ("*_flops.json", lambda text: text.replace(*OTHER_MODEL), "is a run of tiny_"),
        ("summary.json", lambda text: "{}", "it has no steps"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    name: str, change: Callable[[str], str], said: str, folders, tmp_path
):
    path = next(folders[0].rglob(name), folders[0] / name)
    path.write_text(change(path.read_text() if path.exists() else ""))
    output = tmp_path / "report.md"
    assert_refused(report(folders, "--output", output), said)
    assert not output.exists()


def test_folders_with_nothing_in_them_are_one_line(folders, tmp_path):
    (tmp_path / "empty").mkdir()
    assert_refused(report((tmp_path / "empty", folders[1])), "nothing that both have")
    assert_refused(report((tmp_path / "none", folders[1])), "no such directory; ./run_all_prof")

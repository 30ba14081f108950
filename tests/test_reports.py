"""report_generator.py: one report of two folders has what is in them, and names what is not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, assert_refused, call

from analysis_tools import report_generator
from lab.files import read_json
from lab.profile.kernels import statistics_of, write_statistics

H100 = ROOT / "results/h100"


def report(*argv: object) -> tuple[int, str, str]:
    return call(report_generator, *argv)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """What run_all_profilers.sh leaves of V1 and V2: baseline and fused."""
    sides = tmp_path / "v1", tmp_path / "v2"
    for side, version in zip(sides, (1, 2), strict=True):
        script = f"tiny_llama_v{version}"
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


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def sections(text: str) -> list[str]:
    return re.findall(r"^## (.+)", text, re.MULTILINE)


def test_the_report_has_what_the_files_have(folders, tmp_path):
    baseline, fused = folders
    for side, calls in ((baseline, 4), (fused, 2)):
        place = side / f"rocprofv3_results_{side.name}"
        place.mkdir()
        write_statistics(place / "stats.csv", statistics_of({"Cijk_Ailk": [1000] * calls}))
    roofline = fused / "flops" / "tiny_llama_v2_roofline.png"
    roofline.write_bytes(b"")
    path = tmp_path / "deep" / "report.md"
    status, out, err = report("--baseline", baseline, "--fused", fused, "--output", path)
    assert (status, out, err) == (0, f"Written: {path}\n", "")
    text = path.read_text()
    kernels = ["Kernels by the PyTorch profiler", "Kernels by rocprofv3"]
    assert sections(text) == ["Runs", *kernels, "FLOPs of modules", "Rooflines"]
    runs = [read_json(next(side.glob("pytorch/*_summary.json"))) for side in folders]
    for label, run in zip(("baseline", "fused"), runs, strict=True):
        row = next(line for line in text.splitlines() if line.startswith(f"| {label} "))
        assert f" {run['timing']['batch_ms']:.2f} |" in row
        assert f" {run['loss']['final']:.4f} |" in row
    profiles = [read_json(next(side.glob("pytorch/*_profile.json"))) for side in folders]
    before, after = (f"{profile['kernels_per_step']:.10g}" for profile in profiles)
    assert f"Kernels per step: {before} -> {after}" in text
    assert "- Kernels in all: 4 -> 2" in text
    modules = read_json(fused / "flops" / "tiny_llama_v2_flops.json")["modules"]
    row = next(line for line in text.splitlines() if line.startswith("| layers.*.self_attn "))
    attention = next(row for row in modules if row["module"] == "layers.*.self_attn")
    assert row.endswith(f" {attention['flop_per_byte']:.2f} |")
    (link,) = re.findall(r"!\[fused: .+\]\(<(.+)>\)", text)
    assert (path.parent / link).resolve() == roofline.resolve()
    assert "Not in this report" not in text


def test_what_is_missing_is_named_with_its_reason(folders):
    baseline, fused = folders
    step = {"name": "flops", "status": "skipped", "reason": "no such package"}
    (fused / "summary.json").write_text(json.dumps({"script": "tiny_llama_v2.py", "steps": [step]}))
    status, out, err = report("--baseline", baseline, "--fused", fused)
    assert (status, err) == (0, "")
    assert sections(out) == ["Runs", "Kernels by the PyTorch profiler"], (
        "the files of an earlier run are not taken"
    )
    last = out.splitlines()[-1]
    assert last.startswith(
        "Not in this report: Kernels by rocprofv3 (baseline, fused: nothing there); "
    )
    assert "FLOPs of modules (fused: no such package)" in last


def test_the_other_name_is_the_same_program_and_has_default_folders(folders, tmp_path):
    for folder, version in zip(folders, (1, 2), strict=True):
        folder.rename(tmp_path / f"profiles_tiny_llama_v{version}")
    program = ROOT / "analysis_tools" / "generate_fusion_report.py"
    command = [sys.executable, str(program), "--output-dir", "./optimization_analysis"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "optimization_analysis" / "fusion_report.md").read_text()
    assert sections(text)[0] == "Runs"


def test_other_sizes_are_named_and_a_failed_run_is_a_row_and_status_1(folders):
    baseline, fused = folders
    failed = {"status": "failed", "error": "the loss became nan"}
    failed |= {group: {} for group in ("timing", "memory", "kernels", "loss")}

    def change(run: dict) -> None:
        run["config"]["seq_len"] = 999
        run.update(failed)

    edit(fused / "pytorch" / "tiny_llama_v2_summary.json", change)
    status, out, err = report("--baseline", baseline, "--fused", fused)
    assert (status, "the loss became nan" in err) == (1, True)
    assert "- note: seq_len differs: 128 for baseline; 999 for fused" in out.partition("## ")[0]
    assert re.search(r"^\| fused +\| +failed \|", out, re.MULTILINE)
    assert "- note: fused did not finish: the loss became nan" in out


def test_what_cannot_be_reported_is_one_line(folders, tmp_path):
    """Files that are cut off, of other models, folders with nothing in common."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "profiles_tiny_openfold_v2").mkdir()  # as run_all_profilers.sh leaves by default
    made = "no such directory; ./run_all_profilers.sh --script tiny_llama_v1.py makes profiles_"
    wrong = [
        (tmp_path / "empty", "nothing"),
        (tmp_path / "none", "no such directory"),
        (tmp_path / "profiles_tiny_llama_v1", made),
    ]

    def damaged(name: str, change: Callable[[str], str]) -> Path:
        folder = shutil.copytree(folders[0], tmp_path / f"copy_{len(wrong)}")
        path = next(folder.rglob(name), folder / name)
        path.write_text(change(path.read_text() if path.exists() else ""))
        return folder

    for name in ("*_summary.json", "*_kernels.csv", "*_profile.json", "*_flops.json"):
        wrong.append((damaged(name, lambda text: text[:-40]), name[1:]))
    other = damaged("*_flops.json", lambda text: text.replace("tiny_llama_v1", "tiny_openfold_v1"))
    wrong.append((other, "is a run of tiny_"))
    wrong.append((damaged("summary.json", lambda text: "{}"), "it has no steps"))
    empty = damaged(
        "*_flops.json", lambda text: re.sub(r'"modules": \[{.*?}', '"modules": [{}', text)
    )
    wrong.append((empty, "it has no modules[0].flop"))
    output = tmp_path / "report.md"
    for folder, said in wrong:
        argv = "--baseline", folder, "--fused", folders[1], "--output", output
        assert_refused(report(*argv), said)
        assert not output.exists()

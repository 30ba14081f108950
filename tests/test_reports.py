"""report_generator.py: one report of two folders has what is in them, and names what is not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import QUICK, ROOT, TINY, captured, forking_python

import run_deepspeed_flops as flops_tool
import run_pytorch_profiler as profiler_tool
from analysis_tools import report_generator
from lab.profile.kernels import statistics_of, write_statistics


def report(*argv: object) -> tuple[int, str, str]:
    return captured(report_generator.main, [str(argument) for argument in argv])


def assert_refused(answer: tuple[int, str, str], *words: str) -> None:
    assert (answer[0], answer[1], len(answer[2].splitlines())) == (2, "", 1), answer
    for word in words:
        assert word in answer[2]


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What run_all_profilers.sh leaves of tiny runs of V1 and V2, in v1/ and v2/."""
    folder = tmp_path_factory.mktemp("report")
    for version in (1, 2):
        argv = ["--script", f"tiny_llama_v{version}.py", *TINY["llama"], "--device", "cpu"]
        place = folder / f"v{version}"
        for tool, name, more in (
            (profiler_tool, "pytorch", QUICK),
            (flops_tool, "flops", ["--computational-intensity"]),
        ):
            answer = captured(tool.main, [*argv, *more, "--profile-dir", str(place / name)])
            assert answer[0] == 0, answer
    return folder


@pytest.fixture
def folders(measured: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy that a test may change: baseline and fused."""
    shutil.copytree(measured, tmp_path / "runs")
    return tmp_path / "runs" / "v1", tmp_path / "runs" / "v2"


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
    (fused / "flops" / "tiny_llama_v2_roofline.png").write_bytes(b"")
    path = tmp_path / "deep" / "report.md"
    status, out, err = report("--baseline", baseline, "--fused", fused, "--output", path)
    assert (status, err) == (0, "")
    assert out == f"Written: {path}\n"
    text = path.read_text()
    kernels = ["Kernels by the PyTorch profiler", "Kernels by rocprofv3"]
    assert sections(text) == ["Runs", *kernels, "FLOPs of modules", "Rooflines"]
    runs = [json.loads(next(side.glob("pytorch/*_summary.json")).read_text()) for side in folders]
    for label, run in zip(("baseline", "fused"), runs, strict=True):
        row = next(line for line in text.splitlines() if line.startswith(f"| {label} "))
        assert (
            f" {run['timing']['batch_ms']:.2f} |" in row and f" {run['loss']['final']:.4f} |" in row
        )
    assert f"per step: {runs[0]['kernels']['per_step']} -> {runs[1]['kernels']['per_step']}" in text
    assert "- Kernels in all: 4 -> 2" in text
    modules = json.loads((fused / "flops" / "tiny_llama_v2_flops.json").read_text())["modules"]
    row = next(line for line in text.splitlines() if line.startswith("| layers.*.self_attn "))
    attention = next(row for row in modules if row["module"] == "layers.*.self_attn")
    assert row.endswith(f" {attention['flop_per_byte']:.2f} |")
    (link,) = re.findall(r"!\[fused: .+\]\(<(.+)>\)", text)
    assert (path.parent / link).resolve() == (
        fused / "flops" / "tiny_llama_v2_roofline.png"
    ).resolve()
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
    command = [forking_python(), str(program), "--output-dir", "./optimization_analysis"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "optimization_analysis" / "fusion_report.md").read_text()
    assert sections(text)[0] == "Runs"


def test_other_sizes_are_named_and_other_models_refused(folders, tmp_path):
    baseline, fused = folders
    edit(
        fused / "pytorch" / "tiny_llama_v2_summary.json",
        lambda run: run["config"].update(seq_len=999),
    )
    status, out, _ = report("--baseline", baseline, "--fused", fused)
    assert status == 0
    assert "- note: seq_len differs: 32 for baseline; 999 for fused" in out.partition("## ")[0]
    edit(
        fused / "flops" / "tiny_llama_v2_flops.json",
        lambda content: content.update(script="tiny_openfold_v2"),
    )
    answer = report("--baseline", baseline, "--fused", fused, "--output", tmp_path / "report.md")
    assert_refused(answer, "tiny_openfold", "tiny_llama")
    assert not (tmp_path / "report.md").exists()


def test_a_failed_run_is_a_row_and_status_1(folders):
    baseline, fused = folders
    failed = {
        "status": "failed",
        "error": "the loss became nan",
        "timing": {},
        "memory": {},
        "kernels": {},
        "loss": {},
    }
    edit(fused / "pytorch" / "tiny_llama_v2_summary.json", lambda run: run.update(failed))
    status, out, err = report("--baseline", baseline, "--fused", fused)
    assert status == 1
    assert "the loss became nan" in err
    assert re.search(r"^\| fused +\| +failed \|", out, re.MULTILINE)
    assert "- note: fused did not finish: the loss became nan" in out


@pytest.mark.parametrize(
    "name", ["*_summary.json", "*_kernels.csv", "*_profile.json", "*_flops.json"]
)
def test_a_file_that_is_cut_off_is_one_line(folders, tmp_path, name):
    (path,) = folders[1].rglob(name)
    path.write_text(path.read_text()[:-40])
    answer = report(
        "--baseline", folders[0], "--fused", folders[1], "--output", tmp_path / "report.md"
    )
    assert_refused(answer, path.name)
    assert not (tmp_path / "report.md").exists()


def test_folders_with_nothing_in_common_are_refused(folders, tmp_path):
    (tmp_path / "empty").mkdir()
    assert_refused(
        report("--baseline", tmp_path / "empty", "--fused", folders[1]),
        "nothing",
        "Runs (baseline:",
    )
    assert_refused(
        report("--baseline", tmp_path / "none", "--fused", folders[1]), "no such directory"
    )
    (tmp_path / "profiles_tiny_openfold_v2").mkdir()  # as run_all_profilers.sh leaves by default
    assert_refused(
        report("--baseline", tmp_path / "profiles_tiny_llama_v1", "--fused", folders[1]),
        "no such directory; ./run_all_profilers.sh --script tiny_llama_v1.py makes it; here is",
        "profiles_tiny_openfold_v2",
    )
    (folders[1] / "summary.json").write_text("{}")
    assert_refused(report("--baseline", *folders[:1], "--fused", folders[1]), "it has no steps")
    (folders[1] / "summary.json").unlink()
    edit(
        folders[1] / "flops" / "tiny_llama_v2_flops.json",
        lambda content: content.update(modules=[{}]),
    )
    assert_refused(
        report("--baseline", *folders[:1], "--fused", folders[1]), "it has no modules[0].flop"
    )

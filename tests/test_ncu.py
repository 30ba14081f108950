"""NVIDIA's Nsight Compute: what it writes is read, and run_ncu.sh asks for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, captured

from fusion_lab.profile import ncu

SAMPLE = ROOT / "tests/standins/ncu.csv"  # as ncu 2025.3 wrote it on an H200, fewer columns
STAND_IN = f"""#!{sys.executable}
import shutil, sys
assert sys.argv[sys.argv.index("--cache-control") + 1] == "all"
shutil.copy({str(SAMPLE)!r}, sys.argv[sys.argv.index("--log-file") + 1])
"""


def test_launches_are_read_and_summed_by_kernel():
    launches = ncu.read_ncu(SAMPLE)
    rows = {row["name"]: row for row in ncu.by_kernel(launches)}
    swiglu = rows["swiglu_forward_kernel"]
    each = [launch for launch in launches if launch["name"] == "swiglu_forward_kernel"]
    assert swiglu["calls"] == len(each) > 1
    assert swiglu["dram_read_mb"] == pytest.approx(sum(x["dram_read"] for x in each) / 1e6)
    # 1024 tokens, gate and up of 2048 channels in bfloat16, are read once each time
    assert swiglu["dram_read_mb"] / len(each) == pytest.approx(1024 * 4096 * 2 / 1e6, rel=0.01)
    assert swiglu["registers"] == 32


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("dram__bytes_read.sum", "dram__bytes.sum", "it has no column dram__bytes_read.sum"),
        ("==PROF== Connected", "==ERROR== ERR_NVGPUCTRPERM", "may not read the counters"),
        ('"Kernel Name"', '"Name"', "no kernel was counted"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, old: str, new: str, said: str):
    path = tmp_path / "ncu.csv"
    path.write_text(SAMPLE.read_text().replace(old, new))
    status, out, err = captured(ncu.main, ["show", str(path)])
    assert (status != 0, out, err.count("\n"), said in err) == (True, "", 1, True), err


def test_the_wrapper_leaves_launches_and_statistics(tmp_path: Path):
    (tmp_path / "ncu").write_text(STAND_IN)
    (tmp_path / "ncu").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [ROOT / "run_ncu.sh", "--script", "tiny_llama_v4.py", "--disable-all-fusion"]
    environment = {**os.environ, "PATH": path, "PYTHON": sys.executable}
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    assert "swiglu_forward_kernel" in done.stdout and "DRAM read" in done.stdout
    names = {file.name for file in (tmp_path / "ncu_results/baseline").iterdir()}
    assert names == {"ncu.csv", "stats.csv"}
    (tmp_path / "ncu").unlink()
    environment["PATH"] = path.replace(os.environ["PATH"], "/usr/bin:/bin")
    again = subprocess.run(command, **options)
    assert (again.returncode, "ncu not found" in again.stderr) == (4, True)

"""The kernels compile for AMD's GPUs, without spills and within their LDS, as the scripts would
launch them there.

Here once for each script, as COVERED says; on every target, in every precision and with odd sizes
by python dev/compile_for_amd.py, which takes minutes.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TRITON, triton_before

from fusion_lab.amd import checksums

pytestmark = pytest.mark.skipif(
    triton_before("3.5"), reason="Triton has no linker for AMD of its own before 3.5"
)

SCRIPTS = [ROOT / f"{script}.py" for script in TRITON]
COVERED = "--target gfx942 --dtype bfloat16 --size default"
LDS = 65536  # bytes that a workgroup can have there


def run(folder: Path, *command: object) -> subprocess.CompletedProcess:
    """In a process that interprets, as those of the other tests do."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def compile_for_amd(script: Path, options: str) -> subprocess.CompletedProcess:
    return run(script.parent, ROOT / "dev/compile_for_amd.py", script, *options.split())


def kernels(script: Path) -> set[str]:
    """The names of a script's kernels, as in the tables."""
    text = script.read_text()
    if script.stem == "tiny_llama_v4":  # and those of its inference
        text += (ROOT / "exercises/tiny_llama_v4/one_launch.py").read_text()
    return set(re.findall(r"^@triton\.jit.*\ndef (\w+)_kernel\(", text, re.MULTILINE))


def in_tables(text: str) -> set[str]:
    return set(re.findall(r"^\| (\w+) +\|", text, re.MULTILINE)) - {"kernel"}


HEADER = (
    "script,target,kernel,precisions,constants,"
    "vgprs,agprs,sgprs,lds,spills,sgpr_spills,waves,source,code\n"
)
CALLS = """
import sys
from dev.compile_for_amd import Needs, main, problem
for spills, sgpr_spills, lds in ((0, 0, 1024), (2, 0, 1024), (0, 3, 1024), (0, 0, 65537)):
    print(problem("gfx942", Needs(9, 0, 9, lds, spills, sgpr_spills, 8)))
for argv in (["--summary", "whole.csv"], ["--summary", "cut_off.csv"], [sys.argv[1]]):
    print("--- status", main(argv), file=sys.stderr)
"""


def test_what_spills_or_does_not_fit_is_a_problem_and_a_summary_has_what_needs_most(tmp_path: Path):
    """A row is stale if its kernel is gone or has changed, and executed if its machine code was. A
    file that is cut off and a script without kernels are one line."""
    source = checksums.of_kernels(ROOT / "tiny_llama_v3.py")["rotary_kernel"]
    executed = json.loads((ROOT / "results/amd/executed.json").read_text())["rows"]
    code = next(code for row in executed for code in row["codes"])
    (tmp_path / "whole.csv").write_text(
        HEADER
        + "tiny_llama_v3,gfx942,small,bfloat16,C=1,20,0,8,65536,0,0,8,abc,def\n"
        + f"tiny_llama_v3,gfx942,rotary,bfloat16,C=1,200,60,8,1024,0,0,1,{source},{code}\n"
    )
    (tmp_path / "cut_off.csv").write_text(HEADER + "tiny_x_v3,gfx942,small\n")
    done = run(tmp_path, "-c", CALLS, ROOT / "tiny_llama_v2.py")
    problems, _, summary = done.stdout.partition("spills 3 SGPRs\nneeds 65537 bytes of LDS\n")
    assert problems == "\nspills 2 VGPRs\n"
    cells = re.sub(r" +", " ", summary.splitlines()[-1].strip("| "))
    assert cells == (
        "tiny_llama_v3 | gfx942 | 2 | 2 | 1 | 1 | 0 | 64 of 64 (small) | 260 of 512 (rotary) | 1"
    )
    whole, cut_off, cut_off_status, no_kernels, status = done.stderr.splitlines()
    assert [line[-1] for line in (whole, cut_off_status, status)] == ["0", "2", "2"]
    assert "cut_off.csv" in cut_off
    assert "tiny_llama_v2" in no_kernels


@pytest.mark.parametrize(
    "script",
    [SCRIPTS[0], *(pytest.param(script, marks=pytest.mark.slow) for script in SCRIPTS[1:])],
    ids=lambda path: path.stem,
)
def test_every_kernel_compiles_without_spills_and_fits(script: Path):
    # V4 of TinyOpenFold has kernels for wide rows.
    more = " wide" if script.stem == "tiny_openfold_v4" else ""
    done = compile_for_amd(script, COVERED + more)
    assert done.returncode == 0, done.stderr
    assert in_tables(done.stdout) == kernels(script) != set()
    _, _, header, _, *lines = done.stdout.strip().splitlines()
    names = [name.strip() for name in header.split("|")]
    for line in lines:
        row = dict(zip(names, map(str.strip, line.split("|")), strict=True))
        assert (row["spills"], row["SGPR spills"]) == ("0", "0"), line
        assert int(row["LDS"]) <= LDS, line


def test_the_result_file_has_every_kernel_on_every_target():
    with (ROOT / "results/amd/registers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for target in ("gfx90a", "gfx942", "gfx950"):
        found = {}
        for row in rows:
            if row["target"] == target:
                found.setdefault(row["script"], set()).add(row["kernel"])
        assert found == {script.stem: kernels(script) for script in SCRIPTS}
    assert {(row["spills"], row["sgpr_spills"]) for row in rows} == {("0", "0")}

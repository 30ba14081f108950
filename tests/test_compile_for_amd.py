"""The kernels compile for AMD's GPUs, without spills and within their LDS, as the scripts would
launch them there.

Here once for each script, as COVERED says; on every target, in every precision and with odd sizes
by python tools/compile_for_amd.py, which takes minutes.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TRITON

SCRIPTS = [ROOT / f"{script}.py" for script in TRITON]
COVERED = "--target gfx942 --dtype bfloat16 --size default"
LDS = 65536  # bytes that a workgroup can have there


def compile_for_amd(script: Path | str, options: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        str(ROOT / "tools/compile_for_amd.py"),
        str(script),
        *options.split(),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"}
    )


def kernels(script: Path) -> set[str]:
    """The names of a script's kernels, as in the tables."""
    text = script.read_text()
    if script.stem == "tiny_llama_v4":  # and those of its inference
        text += (ROOT / "exercises/tiny_llama_v4/one_launch.py").read_text()
    return set(re.findall(r"^@triton\.jit.*\ndef (\w+)_kernel\(", text, re.MULTILINE))


def in_tables(text: str) -> set[str]:
    return set(re.findall(r"^\| (\w+) +\|", text, re.MULTILINE)) - {"kernel"}


HEADER = (
    "script,target,kernel,precisions,constants,vgprs,agprs,sgprs,lds,spills,sgpr_spills,waves\n"
)
CALLS = """
import sys
from tools.compile_for_amd import Needs, main, problem
for spills, sgpr_spills, lds in ((0, 0, 1024), (2, 0, 1024), (0, 3, 1024), (0, 0, 65537)):
    print(problem("gfx942", Needs(9, 0, 9, lds, spills, sgpr_spills, 8)))
for argv in (["--summary", "whole.csv"], ["--summary", "cut_off.csv"], [sys.argv[1]]):
    print("\\n--- status", main(argv), flush=True)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[str]:
    """What the tool says in one process, call by call: here Triton interprets."""
    folder = tmp_path_factory.mktemp("amd")
    (folder / "whole.csv").write_text(
        HEADER
        + "tiny_x_v3,gfx942,small,bfloat16,C=1,20,0,8,65536,0,0,8\n"
        + "tiny_x_v3,gfx942,large,bfloat16,C=1,200,60,8,1024,0,0,1\n"
    )
    (folder / "cut_off.csv").write_text(HEADER + "tiny_x_v3,gfx942,small\n")
    done = subprocess.run(
        [sys.executable, "-c", CALLS, str(ROOT / "tiny_llama_v2.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return done.stdout.split("\n--- status ")


def test_what_spills_or_needs_too_much_lds_is_a_problem(said):
    problems = ["", "spills 2 VGPRs", "spills 3 SGPRs", "needs 65537 bytes of LDS"]
    assert said[0].splitlines()[:4] == problems


def test_the_summary_names_the_kernel_that_needs_most(said):
    cells = [cell.strip() for cell in said[0].splitlines()[-1].strip("|").split("|")]
    assert cells == (
        ["tiny_x_v3", "gfx942", "2", "0", "64 of 64 (small)", "260 of 512 (large)", "1"]
    )


def test_a_file_that_is_cut_off_and_a_script_without_kernels_are_one_line(said):
    assert [status[:1] for status in said[1:]] == ["0", "2", "2"]
    for before, word in zip(said[1:], ("cut_off.csv", "tiny_llama_v2"), strict=False):
        _, *lines = before.splitlines()
        assert (len(lines), word in lines[0]) == (1, True)


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


def test_what_does_not_fit_and_what_is_never_launched_is_named(tmp_path: Path):
    """Appended, so that Triton has the other kernels in its cache."""
    script = tmp_path / "tiny_llama_v3.py"
    wrong = """

BLOCKS["attention_forward hip"] = "BLOCK_M=64,BLOCK_N=128,num_warps=8,num_stages=3"


@triton.jit
def forgotten_kernel(X):
    tl.store(X, 0)
"""
    script.write_text((ROOT / script.name).read_text() + wrong)
    done = compile_for_amd(script, COVERED)
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"attention_forward_kernel in .*BLOCK_N=128.*\): gfx942 needs \d+ bytes of LDS", done.stderr
    )
    assert "forgotten_kernel is never launched" in done.stderr
    assert "Traceback" not in done.stderr


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

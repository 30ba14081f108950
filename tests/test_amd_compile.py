"""The kernels compile for AMD's GPUs, without spills and within their LDS, as the scripts would
launch them there.

Here for an MI300X at the default sizes; for others and with wide layers by
python dev/amd_results.py registers.
"""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TRITON, triton_before

pytestmark = pytest.mark.skipif(
    triton_before("3.5"), reason="Triton has no linker for AMD of its own before 3.5"
)

SCRIPTS = [ROOT / f"{script}.py" for script in TRITON]
WIDE = "--msa-dim 256 --num-heads-msa 8 --num-seqs 128 --seq-len 256 --batch-size 1"
LDS = 65536  # bytes that a workgroup can have there


def run(*command: object) -> subprocess.CompletedProcess:
    """In a process that interprets, as those of the other tests do."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def kernels(*files: Path) -> set[str]:
    """The names of kernels in scripts, as in the tables."""
    text = "".join(file.read_text() for file in files)
    return set(re.findall(r"^@triton\.jit.*\ndef (\w+)_kernel\(", text, re.MULTILINE))


def rows_of(printed: str) -> list[dict[str, str]]:
    """The rows of a table."""
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    header, _, *cells = ([cell.strip() for cell in line.split("|")] for line in lines)
    return [dict(zip(header, row, strict=True)) for row in cells]


CALLS = """
from fusion_lab.amd.compile import Needs, problem
for spills, sgpr_spills, lds in ((0, 0, 1024), (2, 0, 1024), (0, 3, 1024), (0, 0, 65537)):
    print(problem("gfx942", Needs(9, 0, 9, lds, spills, sgpr_spills, 8)))
"""


def test_what_spills_or_does_not_fit_is_a_problem():
    done = run("-c", CALLS)
    problems = ["", "spills 2 VGPRs", "spills 3 SGPRs", "needs 65537 bytes of LDS"]
    assert done.stdout.splitlines() == problems


@pytest.mark.parametrize(
    "script",
    [SCRIPTS[0], *(pytest.param(script, marks=pytest.mark.slow) for script in SCRIPTS[1:])],
    ids=lambda path: path.stem,
)
def test_every_kernel_compiles_without_spills_and_fits(script: Path):
    # V4 of TinyOpenFold has kernels for wide rows
    sizes = ["", WIDE] if script.stem == "tiny_openfold_v4" else [""]
    found = []
    for size in sizes:
        done = run("-m", "fusion_lab.amd", "compile", script, "--use-amp", *size.split())
        assert done.returncode == 0, done.stderr
        found += rows_of(done.stdout)
    assert {row["kernel"] for row in found} == kernels(script) != set()
    for row in found:
        assert (row["spills"], row["SGPR spills"]) == ("0", "0"), row
        assert int(row["LDS"]) <= LDS, row


def test_a_script_without_kernels_is_one_line():
    done = run("-m", "fusion_lab.amd", "compile", ROOT / "tiny_llama_v2.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().splitlines()[-1].endswith("tiny_llama_v2.py launches no kernel")


def test_the_result_file_has_every_kernel_on_every_target():
    with (ROOT / "results/amd/registers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for script in SCRIPTS:
        for target in ("gfx90a", "gfx942", "gfx950"):
            of_script = (r for r in rows if (r["script"], r["target"]) == (script.stem, target))
            assert {row["kernel"] for row in of_script} == kernels(script)
    assert {(row["spills"], row["sgpr_spills"]) for row in rows} == {("0", "0")}

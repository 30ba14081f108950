"""Rooflines of whole training steps:

FLOPs, bytes and times by group, rates, and what rocprof-compute's files give.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from conftest import CPU, ROOT, captured, load, parse, strict_json, words

from analysis_tools import roofline_analysis
from lab.profile.ceilings import Ceilings
from lab.profile.kernels import kernels_of
from lab.profile.roofline import group_bytes, group_flops, rates, times_of_operators
from lab.profile.traffic import Traffic
from lab.rocm.counters import BYTE_COUNTERS, FLOP_COUNTERS

SMALL = words(
    "--hidden-dim 32 --num-layers 1 --num-heads 2 --seq-len 8 --batch-size 2 --vocab-size 50"
)
CEILINGS = Ceilings("float32, highest", 1024, gemm_tflops=2.0, copy_bytes=1, copy_gb_per_s=100.0)


def analyse(*argv: object) -> tuple[int, str, str]:
    return captured(roofline_analysis.main, [str(argument) for argument in argv])


def assert_refused(answer: tuple[int, str, str], *expected: str) -> None:
    assert (answer[0], answer[1], len(answer[2].splitlines())) == (2, "", 1), answer
    for word in expected:
        assert word in answer[2]


def test_rates_by_hand():
    row = rates(4_000_000, 400_000, 0.01, CEILINGS)  # 10 FLOP per byte, below the ridge at 20
    assert CEILINGS.ridge == 20
    assert row["flop_per_byte"] == 10
    assert row["achieved_tflops"] == pytest.approx(0.4)
    assert row["roof_tflops"] == pytest.approx(1.0)
    assert row["percent_of_roof"] == pytest.approx(40)
    assert CEILINGS.roof(200) == 2.0
    assert set(rates(0).values()) == {None}
    copying = rates(0, 2_000_000, 0.05, CEILINGS)  # 40 GB/s
    assert copying["achieved_tflops"] is None
    assert copying["percent_of_roof"] == pytest.approx(40)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_all_versions_have_the_same_products_in_their_groups(version):
    """Also those of our own kernels, which no counter sees: V3's attention and V4's SwiGLU."""
    script = f"tiny_llama_v{version}"
    flop = group_flops(load(script), parse(script, *SMALL), CPU)
    tokens, hidden, heads, length, vocabulary = 2 * 8, 32, 2, 8, 50
    projections = (
        hidden * (hidden + 2 * hidden // 2 + hidden) + 3 * hidden * 4 * hidden + hidden * vocabulary
    )
    # forward, and twice that backward
    attention = 3 * 2 * 2 * (2 * heads * length * length * (hidden // heads))
    gemm = 3 * 2 * tokens * projections
    assert flop == (
        {"GEMM": gemm + attention} if version == 1 else {"GEMM": gemm, "attention": attention}
    )


def test_a_kernel_belongs_to_the_operator_that_launched_it():
    def event(cat: str, name: str, start: float, duration: float, **args) -> dict:
        when = {"pid": 1, "tid": 1, "ts": start, "dur": duration, "args": args}
        return {"ph": "X", "cat": cat, "name": name, **when}

    trace = [
        event("cpu_op", "tiny_llama_v3::rms_norm_backward", 0, 9, **{"External id": 1}),
        event("cpu_op", "aten::mm", 10, 9, **{"External id": 2}),
        event("cpu_op", "aten::view", 20, 1),
        event("kernel", "sum_parts_kernel", 100, 3, **{"External id": 1}),
        event("kernel", "void elementwise_kernel<1>()", 110, 5, **{"External id": 2}),
        event("kernel", "attn_fwd", 120, 7),
    ]
    assert len(kernels_of(trace)) == 3
    assert times_of_operators(trace) == pytest.approx(
        {"normalisation": 0.003, "GEMM": 0.005, "attention": 0.007}
    )


def test_bytes_of_groups_are_those_of_all_operators():
    script = load("tiny_llama_v2")
    trainer = script.Trainer(parse("tiny_llama_v2", *SMALL), CPU)
    trainer.step()
    moved = group_bytes(trainer, script.NO_WORK)
    batch = trainer.next_batch()
    with Traffic(trainer.model, {}, script.NO_WORK) as traffic:
        trainer.compute(batch)
    parameters = sum(p.nbytes for p in trainer.model.parameters())
    assert moved["optimizer"] == 7 * parameters
    assert moved.total() == sum(traffic.bytes_of.values()) + 7 * parameters
    assert moved["GEMM"] and moved["attention"] and moved["copies"] and moved["element-wise"]


def test_scripts_side_by_side(tmp_path: Path):
    pytest.importorskip("matplotlib")
    scripts = ["tiny_llama_v1.py", "tiny_llama_v2.py"]
    argv = ["--scripts", *scripts, *SMALL, "--device", "cpu", "--output", tmp_path]
    status, out, err = analyse(*argv)
    assert status == 0, err
    text = (tmp_path / "roofline_analysis.csv").read_text()
    assert len([line for line in text.splitlines() if "gemm" in line]) == 2, "what grep finds"
    rows = list(csv.DictReader(text.splitlines()))
    content = strict_json((tmp_path / "roofline_analysis.json").read_text())
    of_csv, of_json = (
        [(row["script"], row["group"]) for row in r] for r in (rows, content["rows"])
    )
    assert of_csv == of_json
    ceilings = Ceilings(**content["runs"][0]["ceilings"])
    for script in ("tiny_llama_v1", "tiny_llama_v2"):
        mine = {row["group"]: row for row in content["rows"] if row["script"] == script}
        assert {"gemm", "attention", "element-wise", "copies", "optimizer"} <= {*mine}
        assert sum(row["share_percent"] for row in mine.values()) == pytest.approx(100)
        gemm = mine["gemm"]
        assert gemm["achieved_tflops"] == pytest.approx(gemm["flop"] / gemm["ms"] / 1e9)
        assert gemm["roof_tflops"] == pytest.approx(ceilings.roof(gemm["flop_per_byte"]))
        optimizer = mine["optimizer"]
        assert optimizer["percent_of_roof"] == pytest.approx(optimizer["percent_of_copy"])
    assert "counted on the unfused model" in out
    assert (tmp_path / "roofline_analysis.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--script", "no_such.py"], ["no_such.py"]),
        (["--script", "tiny_llama_v1.py", "--scripts", "tiny_llama_v2.py"], ["--script"]),
        (["--script", "tiny_llama_v2.py", "--no-such-flag"], ["--no-such-flag"]),
        (["--script", "tiny_llama_v2.py", "--enable-torch-compile"], ["--enable-torch-compile"]),
        (["--script", "tiny_llama_v2.py", "--verify-accuracy"], ["--verify-accuracy"]),
        (["--from-rocprof-compute", "no_such_folder"], ["no_such_folder"]),
        (["--from-rocprof-compute", "docs"], ["pmc_perf.csv"]),
        (["--from-rocprof-compute", "docs", "--batch-size", "2"], ["--batch-size"]),
    ],
)
def test_what_cannot_be_measured_is_one_line(tmp_path: Path, monkeypatch, argv, expected):
    monkeypatch.chdir(ROOT)
    assert_refused(analyse(*argv, "--output", tmp_path), *expected)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def profile(tmp_path: Path):
    """`profile(gpu, **counters)`: a folder with two dispatches of a GEMM in rocprof-compute's
    format."""

    def write(gpu: str, **counters: int) -> Path:
        place = tmp_path / "profile" / "workloads" / "name" / "MI"
        place.mkdir(parents=True)
        names = [*FLOP_COUNTERS, *BYTE_COUNTERS[gpu]]
        with (place / "pmc_perf.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            head = ["Dispatch_ID", "Kernel_Name", "Start_Timestamp", "End_Timestamp"]
            writer.writerow([*head, *names])
            for dispatch in range(2):
                values = [counters.get(name, 0) for name in names]
                start = 1000 * dispatch
                writer.writerow([dispatch, "Cijk_Ailk_Bljk", start, start + 500, *values])
        header = "device,HBMBw,HBMBwLow,FP32Flops,MFMABF16Flops"
        (place / "roofline.csv").write_text(f"{header}\n0,4000,3990,100000,600000\n")
        return tmp_path / "profile"

    return write


@pytest.mark.parametrize(
    ("gpu", "counters", "moved"),
    [
        (
            "MI200",
            {"TCC_EA_RDREQ_sum": 10, "TCC_EA_RDREQ_32B_sum": 4, "TCC_EA_WRREQ_sum": 5},
            6 * 64 + 4 * 32 + 5 * 32,
        ),
        (
            "MI300",
            {"TCC_EA0_RDREQ_sum": 10, "TCC_BUBBLE_sum": 3, "TCC_EA0_RDREQ_32B_sum": 1},
            3 * 128 + 6 * 64 + 32,
        ),
        (
            "MI350",
            {
                f"TCC_EA0_{name}_sum": n
                for name, n in {"RDREQ": 10, "RDREQ_128B": 3, "WRREQ_64B": 2, "WRREQ": 2}.items()
            },
            3 * 128 + 7 * 64 + 2 * 64,
        ),
    ],
)
def test_counters_of_amd_gpus_by_hand(profile, tmp_path: Path, gpu, counters, moved):
    pytest.importorskip("matplotlib")
    flops = {"MFMA_MOPS_BF16": 100, "FMA_F32": 3, "ADD_F32": 1}
    flops = {f"SQ_INSTS_VALU_{name}": count for name, count in flops.items()}
    folder = profile(gpu, **flops, **counters)
    status, out, err = analyse("--from-rocprof-compute", folder, "--output", tmp_path / "out")
    assert status == 0, err
    content = json.loads((tmp_path / "out" / "roofline_analysis.json").read_text())
    (row,) = content["rows"]
    assert (row["group"], row["calls"]) == ("gemm", 2)
    assert (row["flop"], row["bytes"]) == (2 * (512 * 100 + 64 * (2 * 3 + 1)), 2 * moved)
    assert row["achieved_tflops"] == pytest.approx(row["flop"] / 1000 / 1e3)  # two times 500 ns
    assert (content["ceilings"]["gemm_tflops"], content["ceilings"]["copy_gb_per_s"]) == (600, 4000)
    assert f"counters of {gpu}" in out


@pytest.mark.parametrize(
    ("file", "change", "word"),
    [
        ("pmc_perf.csv", lambda text: text.replace("TCC_BUBBLE_sum", "other"), "TCC_BUBBLE_sum"),
        ("pmc_perf.csv", lambda text: text[:-20], "cut off"),
        ("pmc_perf.csv", lambda text: text.splitlines()[0], "no dispatches"),
        ("pmc_perf.csv", lambda text: text.replace(",500,", ",soon,"), "'soon'"),
        ("roofline.csv", lambda text: text.replace("HBMBw,", "Bw,"), "HBMBw"),
        ("roofline.csv", lambda text: text.replace("4000", "0"), "no ceilings"),
        ("roofline.csv", lambda text: text.splitlines()[0], "no ceilings"),
    ],
)
def test_a_damaged_profile_is_one_line(profile, tmp_path: Path, file, change, word):
    folder = profile("MI300", SQ_INSTS_VALU_MFMA_MOPS_BF16=1)
    (path,) = folder.rglob(file)
    path.write_text(change(path.read_text()))
    answer = analyse("--from-rocprof-compute", folder, "--output", tmp_path / "out")
    assert_refused(answer, file, word)
    assert not (tmp_path / "out").exists()

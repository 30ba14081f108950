"""Rooflines of whole training steps:

FLOPs, bytes and times by group, rates, and what rocprof-compute's files give.
"""

import gzip
import json
import sqlite3
from pathlib import Path

import pytest
from conftest import CPU, assert_refused, call, load, parse, read_rows, strict_json, words
from test_profiler_files import event

from analysis_tools import roofline_analysis
from fusion_lab.cli import ToolError
from fusion_lab.profile.ceilings import Ceilings
from fusion_lab.profile.dispatches import read_counters
from fusion_lab.profile.roofline import group_flops, rates, times_of_operators
from fusion_lab.rocm.counters import BYTE_COUNTERS, FLOP_COUNTERS, read_rocprof_compute

SMALL = words(
    "--hidden-dim 32 --num-layers 1 --num-heads 2 --seq-len 8 --batch-size 2 --vocab-size 50"
)
CEILINGS = Ceilings("float32, highest", 1024, gemm_tflops=2.0, copy_bytes=1, copy_gb_per_s=100.0)


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
    trace = [
        event("cpu_op", "tiny_llama_v3::rms_norm_backward", 0, 9, **{"External id": 1}),
        event("cpu_op", "aten::mm", 10, 9, **{"External id": 2}),
        event("kernel", "sum_parts_kernel", 100, 3, **{"External id": 1}),
        event("kernel", "void elementwise_kernel<1>()", 110, 5, **{"External id": 2}),
        event("kernel", "attn_fwd", 120, 7),
    ]
    times = {"normalisation": 0.003, "GEMM": 0.005, "attention": 0.007}
    assert times_of_operators(trace) == pytest.approx(times)


def test_a_script_is_measured(tmp_path: Path):
    argv = ["--script", "tiny_llama_v2.py", *SMALL, "--device", "cpu", "--output", tmp_path]
    status, out, err = call(roofline_analysis, *argv)
    assert status == 0, err
    rows = {row["group"]: row for row in read_rows(tmp_path / "roofline_analysis.csv")}
    content = strict_json((tmp_path / "roofline_analysis.json").read_text())
    mine = {row["group"]: row for row in content["rows"]}
    assert {"gemm", "attention", "element-wise", "copies", "optimizer"} <= {*mine} == {*rows}
    assert sum(row["share_percent"] for row in mine.values()) == pytest.approx(100)
    gemm, optimizer = mine["gemm"], mine["optimizer"]
    ceilings = Ceilings(**content["runs"][0]["ceilings"])
    assert gemm["achieved_tflops"] == pytest.approx(gemm["flop"] / gemm["ms"] / 1e9)
    assert gemm["roof_tflops"] == pytest.approx(ceilings.roof(gemm["flop_per_byte"]))
    assert optimizer["percent_of_roof"] == pytest.approx(optimizer["percent_of_copy"])
    assert "counted on the unfused model" in out
    assert (tmp_path / "roofline_analysis.png").read_bytes()[:4] == b"\x89PNG"


# --- rocprof-compute's rooflines

OF_MI200 = "HBMBw,FP32Flops,FP64Flops,MFMAF16Flops,MFMAF32Flops"  # as its roofline.csv begins


def profile(folder: Path, gpu: str, header: str = OF_MI200, **counters: int) -> Path:
    """A folder with two dispatches of a GEMM in rocprof-compute's format; the ceilings are 1000,
    2000, ... in the order of the header."""
    place = folder / "profile" / "workloads" / "name" / "MI"
    place.mkdir(parents=True)
    names = [*FLOP_COUNTERS, *BYTE_COUNTERS[gpu]]
    values = "".join(f",{counters.get(name, 0)}" for name in names)
    lines = [f"Dispatch_ID,Kernel_Name,Start_Timestamp,End_Timestamp,{','.join(names)}"]
    lines += [f"{i},Cijk_Ailk_Bljk,{1000 * i},{1000 * i + 500}{values}" for i in range(2)]
    (place / "pmc_perf.csv").write_text("\n".join([*lines, ""]))
    ceilings = ",".join(str(1000 * (i + 1)) for i in range(header.count(",") + 1))
    (place / "roofline.csv").write_text(f"device,{header}\n0,{ceilings}\n")
    return folder / "profile"


@pytest.mark.parametrize(
    ("gpu", "counters", "moved"),
    [
        ("MI200", "EA_RDREQ=10 EA_RDREQ_32B=4 EA_WRREQ=5", 6 * 64 + 4 * 32 + 5 * 32),
        ("MI300", "EA0_RDREQ=10 BUBBLE=3 EA0_RDREQ_32B=1", 3 * 128 + 6 * 64 + 32),
        ("MI350", "EA0_RDREQ=10 EA0_RDREQ_128B=3 EA0_WRREQ_64B=2 EA0_WRREQ=2", 960),
    ],
)
def test_counters_of_amd_gpus_by_hand(tmp_path: Path, gpu, counters, moved):
    """And what lacks one of them is refused."""
    counts = {"MFMA_MOPS_BF16": 100, "FMA_F32": 3, "ADD_F32": 1}
    counts = {f"SQ_INSTS_VALU_{name}": count for name, count in counts.items()}
    for name, count in (pair.split("=") for pair in counters.split()):
        counts[f"TCC_{name}_sum"] = int(count)
    folder = profile(tmp_path, gpu, "HBMBw,HBMBwLow,FP32Flops,MFMABF16Flops", **counts)
    argv = "--from-rocprof-compute", folder, "--output", tmp_path / "out"
    status, out, err = call(roofline_analysis, *argv)
    assert status == 0, err
    content = json.loads((tmp_path / "out" / "roofline_analysis.json").read_text())
    (row,) = content["rows"]
    assert (row["group"], row["calls"]) == ("gemm", 2)
    assert (row["flop"], row["bytes"]) == (2 * (512 * 100 + 64 * (2 * 3 + 1)), 2 * moved)
    assert row["achieved_tflops"] == pytest.approx(row["flop"] / 1000 / 1e3)  # two times 500 ns
    assert (content["ceilings"]["gemm_tflops"], content["ceilings"]["copy_gb_per_s"]) == (4, 1000)
    assert f"counters of {gpu}" in out
    missing = "TCC_BUBBLE_sum" if gpu == "MI300" else "SQ_INSTS_VALU_FMA_F32"
    for file, right, wrong, word in (
        ("roofline.csv", "\n0,1000", "\n0,0", "no ceilings"),
        ("pmc_perf.csv", missing, "other", missing),
        ("pmc_perf.csv", "\n", " ", "no dispatches"),
    ):
        (path,) = folder.rglob(file)
        text = path.read_text()
        path.write_text(text.replace(right, wrong))
        assert_refused(call(roofline_analysis, *argv), file, word)
        path.write_text(text)


def in_rows(folder: Path) -> tuple[Path, list[str], list[list[str]]]:
    """The counters of a profile as releases of 2026 have them, a row for each; which passes count
    them is up to the caller."""
    (path,) = folder.rglob("pmc_perf.csv")
    header = ["GPU_ID", "Dispatch_ID", "Kernel_Name", "Start_Timestamp", "End_Timestamp"]
    header += ["Counter_Name", "Counter_Value"]
    rows = []
    for dispatch in read_counters([path])[1]:
        cells = dispatch.row.cells
        known = ["4", cells["Dispatch_ID"], dispatch.name, str(dispatch.start), str(dispatch.end)]
        rows += [[*known, n, cells[n]] for n in (*FLOP_COUNTERS, *BYTE_COUNTERS["MI200"])]
    path.unlink()
    return path.parent, header, rows


def write_table(path: Path, header: list[str], rows: list[list[str]]) -> None:
    text = "\n".join(",".join(row) for row in [header, *rows]).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def test_a_table_of_each_pass_is_the_table_of_all(tmp_path: Path):
    """And an older one beside is not read."""
    folder = profile(tmp_path, "MI200", SQ_INSTS_VALU_FMA_F32=1000, TCC_EA_RDREQ_sum=1000)
    expected = read_rocprof_compute(folder)
    place, header, rows = in_rows(folder)
    write_table(place / "pmc_perf.csv", header, rows)
    assert read_rocprof_compute(folder) == expected
    write_table(place / "pmc_perf.csv", header, [[*row[:-1], "7"] for row in rows])
    passes = [[row for row in rows if ("TCC" in row[5]) == (number == 1)] for number in range(2)]
    for number, own in enumerate(passes):
        later = [[*r[:3], f"{int(r[3]) + 5}", f"{int(r[4]) + 9 * number + 5}", *r[5:]] for r in own]
        write_table(place / f"results_pmc_perf_{number}.csv.gz", header, later)
    assert read_rocprof_compute(folder) == expected
    other = [[*row[:2], "other", *row[3:]] for row in passes[1]]
    write_table(place / "results_pmc_perf_1.csv.gz", header, other)
    with pytest.raises(ToolError, match="it is other, but dispatch 0 is Cijk_Ailk_Bljk in another"):
        read_rocprof_compute(folder)


def test_counters_that_a_dispatch_lacks_are_refused(tmp_path: Path):
    """Because the file is cut off, or of --iteration-multiplexing."""
    folder = profile(tmp_path, "MI200", SQ_INSTS_VALU_FMA_F32=1000, TCC_EA_RDREQ_sum=1000)
    place, header, rows = in_rows(folder)
    kept = [row for row in rows if row[1] == "0" or row[5][:2] == "SQ"]
    write_table(place / "pmc_perf.csv", header, kept)
    with pytest.raises(ToolError, match=r"row \d+: it lacks the counters TCC.*multiplexing"):
        read_rocprof_compute(folder)


@pytest.mark.parametrize("beside", [True, False])
def test_a_database_of_each_process_and_pass_is_the_table_of_all(beside: bool, tmp_path: Path):
    """Processes count their dispatches from one; their counters are beside, or in the database."""
    folder = profile(tmp_path, "MI200", SQ_INSTS_VALU_FMA_F32=1000, TCC_EA_RDREQ_sum=1000)
    gpu, ceilings, (row,) = read_rocprof_compute(folder)
    place, _, rows = in_rows(folder)
    for number, pid in ((number, pid) for number in range(2) for pid in (99, 100)):
        own = [row for row in rows if ("TCC" in row[5]) == (number == 1)]
        path = place / f"out/pmc_perf_{number}/host/{pid + 10 * number}_results.db"
        path.parent.mkdir(parents=True, exist_ok=True)
        with sqlite3.connect(path) as database:
            columns = "agent_absolute_index, dispatch_id, {}name, start int, end int"
            database.execute(f"create table kernels ({columns.format('')})")
            columns = f"{columns.format('kernel_')}, counter_name, value"
            database.execute(f"create table counters_collection ({columns})")
            for kernel in dict.fromkeys(tuple(row[:5]) for row in own):
                database.execute("insert into kernels values (?, ?, ?, ?, ?)", kernel)
            if not beside:
                fill = "insert into counters_collection values (?, ?, ?, ?, ?, ?, ?)"
                database.executemany(fill, own)
        if beside:
            name = f"{pid + 10 * number}_native_counter_collection.csv.gz"
            header = ["dispatch_id", "counter_name", "counter_value"]
            table = [[row[1], *row[5:]] for row in own]
            write_table((path.parent if pid == 99 else path.parent.parent) / name, header, table)
    found_gpu, found_ceilings, (found,) = read_rocprof_compute(folder)
    assert (found_gpu, found_ceilings, found["calls"]) == (gpu, ceilings, 2 * row["calls"])
    assert (found["flop"], found["bytes"]) == (2 * row["flop"], 2 * row["bytes"])
    assert found["ms"] == pytest.approx(2 * row["ms"])

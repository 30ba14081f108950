"""Names of kernels, and files of profilers: what is in them, and what is wrong with them, is found
by every reader.

The inputs are small and written here, in the form of the real ones. The readers were also tried on
files that the tools themselves wrote, in public repositories (none is copied here): 137 folders of
ROCm/rocprofiler-compute and ROCm/rocm-systems, the data of rocprofiler-sdk's pages, 58 traces of
facebookresearch/HolisticTraceAnalysis and AMD-AGI/TraceLens. They are read, but for times rounded
to 1e9 ns and what is no trace of kernels, which are refused.
"""

import gzip
import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
from conftest import ROOT, TRITON

import run_pytorch_profiler
from fusion_lab.cli import ToolError
from fusion_lab.profile import kernels
from fusion_lab.profile.dispatches import read_counters, read_kernel_trace, valid_ends
from fusion_lab.rocm import files

T = 13_386_710_965_731_450  # nanoseconds since boot: more than a float64 counts exactly
PHASES = ("data", "forward", "backward", "optimizer")

# --- what each source has for the same dispatches: (name, start, end), all in one stream

Dispatches = list[tuple[str, object, object]]


def kernel_trace(folder: Path, dispatches: Dispatches) -> Path:
    """rocprofv3's table of one process."""
    lines = [f'"KERNEL_DISPATCH","Agent 4",1,1,"{n}",{a},{b}' for n, a, b in dispatches]
    header = "Kind,Agent_Id,Queue_Id,Stream_Id,Kernel_Name,Start_Timestamp,End_Timestamp"
    (folder / "7_kernel_trace.csv").write_text("\n".join([header, *lines, ""]))
    return folder


def database(folder: Path, dispatches: Dispatches) -> Path:
    with sqlite3.connect(folder / "7_results.db") as connection:
        columns = 'name text, "start" bigint, "end" bigint, queue_id integer, stream_id integer'
        columns += ", graph_exec_id integer, graph_node_id integer"  # since schema 3.0.4
        connection.execute(f"create table kernels ({columns})")
        connection.executemany("insert into kernels values (?, ?, ?, 1, 1, 0, 0)", dispatches)
    return folder


def counters(folder: Path, dispatches: Dispatches, more: str = "", values: str = "") -> Path:
    header = f"Dispatch_ID,GPU_ID,Kernel_Name,Start_Timestamp,End_Timestamp{more}"
    lines = [f'{i},4,"{n}",{a},{b}{values}' for i, (n, a, b) in enumerate(dispatches)]
    (folder / "pmc_perf.csv").write_text("\n".join([header, *lines, ""]))
    return folder


def ns_of_rocprofv3(folder: Path) -> dict[str, int]:
    files.statistics(folder, folder / "stats.csv")
    return {row.name: row.total_ns for row in kernels.read_statistics(folder / "stats.csv")}


def ns_of_counters(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for dispatch in read_counters([folder / "pmc_perf.csv"])[1]:
        found[dispatch.name] = found.get(dispatch.name, 0) + dispatch.end - dispatch.start
    return found


def event(cat: str, name: str, ts: object, dur: object, tid: int = 1, **args: object) -> dict:
    place = {"pid": 0, "tid": 7} if cat in ("kernel", "gpu_memcpy") else {"pid": 1, "tid": tid}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args, **place}


def trace(folder: Path, dispatches: Dispatches) -> Path:
    """A trace of the PyTorch profiler; its clock counts microseconds."""
    events = [event("user_annotation", "forward", 0, 40), event("cpu_op", "aten::mm", 5, 35)]
    for name, start, end in dispatches:
        known = None not in (start, end)
        start = None if start is None else (start - T) / 1e3
        events.append(event("kernel", name, start, (end - T) / 1e3 - start if known else None))
    (folder / "x_trace.json").write_text(json.dumps({"traceEvents": events}))
    return folder


def ns_of_trace(folder: Path) -> dict[str, int]:
    profile = run_pytorch_profiler.analyse(kernels.load_trace(folder / "x_trace.json"), PHASES)
    return {row.name: row.total_ns for row in profile.statistics}


SOURCES: dict[str, tuple[Callable, Callable]] = {
    "rocprofv3 csv": (kernel_trace, ns_of_rocprofv3),
    "rocpd database": (database, ns_of_rocprofv3),
    "rocprof-compute": (counters, ns_of_counters),
    "trace": (trace, ns_of_trace),
}
GOOD = [("a", T + 9_001, T + 14_001), ("b", T + 20_001, T + 23_008)]
every_source = pytest.mark.parametrize("source", SOURCES)


@every_source
@pytest.mark.parametrize(
    ("third", "expected", "said"),
    [
        (("b", T + 30_001, T + 32_001), {"a": 5000, "b": 5007}, None),
        (("b", T + 30_001, 0), {"a": 5000, "b": 3007}, "left out: 1 of 3"),  # the end never came
        (("b", T + 30_001, None), {"a": 5000, "b": 3007}, "left out: 1 of 3"),
        # a late end, into the next one of the stream
        (("b", T + 15_001, T + 10**12), {"a": 5000, "b": 8007}, "shortened: 1 of 3"),
    ],
)
def test_times_are_checked_in_every_source(
    source: str, third: tuple, expected: dict, said: str | None, tmp_path: Path, capsys
):
    write, read = SOURCES[source]
    if third[2] is None and write is not trace and write is not database:
        third = (*third[:2], "")
    assert read(write(tmp_path, [*GOOD, third])) == expected
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(said), lines
    assert not said or (said in lines[0] and str(tmp_path) in lines[0])
    (none := tmp_path / "none").mkdir()
    with pytest.raises(ToolError, match="none of its kernels has a valid start"):
        read(write(none, [("a", T + 1000, 0), ("b", T + 2000, T + 1500)]))


def test_streams_may_overlap_and_nothing_ends_behind_the_last():
    spans = [(0, 50, "x"), (10, 70, "y"), (40, 60, "x"), (None, 5, "x"), (9, 3, "y"), (90, 99, "y")]
    assert valid_ends(spans, last=65) == [40, 65, 60, None, None, None]
    assert valid_ends(spans[:3], slack=10) == [50, 70, 60]
    assert valid_ends([(0, 10, "x")], longest=9) == [None]
    assert valid_ends([(0, 50, None), (10, 70, None)], last=65) == [50, 65]  # on one queue
    assert valid_ends([(5, 9, "x"), (5, 6, "x"), (8, 9, "x")]) == [8, 6, 9]


def test_a_kernel_lies_within_its_trace(tmp_path: Path):
    """The profiler marks the end."""
    late = event("kernel", "a", 20, 1_600_000.0)
    mark = {"ph": "i", "name": "Record Window End", "ts": 90.5}
    assert kernels.check_events([late, mark], "x")[0]["dur"] == 70.5
    assert kernels.check_events([late], "x") == [late]  # nothing says that it ended before


@pytest.mark.parametrize("streams", ["", ",Stream_Id"])
def test_a_queue_is_no_stream(streams: str, tmp_path: Path):
    """Of several streams on one hardware queue, kernels run side by side."""
    spans = [("nccl", 0, 10_000_000)] + [("gemm", 600_000 * i + 9, 500_000) for i in range(3)]
    lines = [f"Kernel_Name,Queue_Id{streams},Start_Timestamp,End_Timestamp"]
    for name, start, ns in spans:
        stream = f",{name == 'nccl':d}" if streams else ""
        lines.append(f"{name},3{stream},{T + start},{T + start + ns}")
    (tmp_path / "7_kernel_trace.csv").write_text("\n".join(lines))
    found = read_kernel_trace(tmp_path / "7_kernel_trace.csv")
    assert sum(d.end - d.start for d in found) == 11_500_000
    for launch, us in (("hipLaunchKernel", 11_500), ("cudaLaunchKernel", 1_500.009)):
        events = [event("kernel", n, a / 1e3, ns / 1e3) for n, a, ns in spans]
        events.append(event("cuda_runtime", launch, 0, 1))
        assert sum(e["dur"] for e in kernels.check_events(events, "x")[:-1]) == us


# --- names

# Real names, shortened inside their template arguments; "at::" stands for "void
# at::native::(anonymous namespace)::".
NAMES = {
    "GEMM": """
        sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_execute_kernel__5x_cublas
        nvjet_sm90_tst_64x64_64x13_2x1_v_bz_NNT
        Cijk_Ailk_Bljk_SB_MT128x128x16_MI32x32x1x2_SN_1LDSB0
        aten::baddbmm""",
    "attention": """
        attn_fwd.kd
        void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>()
        void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>()
        at::cunn_SoftMaxForward<4, float, float, at::SoftMaxForwardEpilogue>(float*)
        aten::_softmax_backward_data""",
    "normalisation": """
        at::vectorized_layer_norm_kernel<float, float, false>(int)
        at::GammaBetaBackwardCUDAKernelTemplate<float, float, 32u>(l)
        aten::native_layer_norm_backward""",
    "element-wise": """
        at::vectorized_elementwise_kernel<4, at::CUDAFunctor_add<float>, std::array<char*, 3>>(int)
        tiny_llama_v3::rotary
        aten::__and__""",
    "copies": """
        at::vectorized_elementwise_kernel<4, at::FillFunctor<float>, std::array<char*, 1ul> >()
        at::CatArrayBatchedCopy<at::OpaqueType<4u>, unsigned int, 4, 64, 64>()
        __amd_rocclr_fillBufferAligned.kd
        Memcpy HtoD (Pinned -> Device)
        aten::cat""",
    "reductions": """
        at::reduce_kernel<512, 1, at::ReduceOp<float, at::MeanOps<float, float, float> > >()
        block_all_reduce_sum_f32_kernel(float*, float*, int)
        aten::mean""",
    "optimizer": """
        at::multi_tensor_apply_kernel<at::FusedOptimizerTensorListMetadata<4>>()
        aten::_fused_adamw_""",
    "generated": """
        triton_poi_fused__unsafe_view_mul_silu_split_9
        triton_poi_fused_all_gather_into_tensor_wait_tensor_0""",
    "communication": """
        ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        rcclKernel
        mscclKernel_Sum_half_LL128_false(ncclDevComm*, mscclAlgo*, mscclWork*)
        void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>()
        c10d::allreduce_
        _c10d_functional::wait_tensor
        gloo:all_reduce""",
    "other": """
        void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>()
        at::cunn_SoftMaxForward<4, float, float, at::LogSoftMaxForwardEpilogue>(float*)
        at::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>()
        aten::_log_softmax_backward_data
        aten::view""",
}


@pytest.mark.parametrize("kind", kernels.CATEGORIES)
def test_category(kind: str):
    for line in NAMES[kind].strip().splitlines():
        name = re.sub("^at::", "void at::native::(anonymous namespace)::", line.strip())
        assert kernels.category(name) == kind, name


@pytest.mark.parametrize("script", TRITON)
def test_every_triton_kernel_has_a_category(script: str):
    """By the name of its function; losses are something else."""
    text = (ROOT / f"{script}.py").read_text()
    names = re.findall(r"^@triton\.jit.*\ndef (\w+_kernel)\(", text, re.MULTILINE)
    assert len(names) >= 10
    assert {name for name in names if kernels.category(name) == "other"} <= {
        *("cross_entropy_forward_kernel", "cross_entropy_backward_kernel"),
        *("head_loss_kernel", "head_loss_backward_kernel"),
    }


# --- numbers, tables

STATISTICS = """"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"
"Cijk_Ailk, MT64",2,600,300.000000,60.000000,200,400,141.421356
"copy",1,400,400.000000,4.000000e+01,400,400,0.00000000e+00
"""


def test_a_process_without_kernels_beside_another(tmp_path: Path):
    (none := tmp_path / "none").mkdir()
    with pytest.raises(ToolError, match="it has no kernel dispatches"):
        ns_of_rocprofv3(kernel_trace(none, []))
    kernel_trace(tmp_path, GOOD)
    assert ns_of_rocprofv3(tmp_path) == {"a": 5000, "b": 3007}


def test_rounded_times_and_a_wrong_cell_are_named_with_their_row(tmp_path: Path):
    for bad, words in (
        (("b", "1.62068E+14", "1.62068E+14"), "row 3: the times 1.62068E.14 .* 1e.09 ns"),
        (("b", T, "soon"), "row 3: 'soon' is no number"),
    ):
        with pytest.raises(ToolError, match=f"pmc_perf.csv: {words}"):
            ns_of_counters(counters(tmp_path, [GOOD[0], bad]))
    exact = ("b", "1.62068000000000E+14", "1.62068000005001E+14")
    assert ns_of_counters(counters(tmp_path, [exact])) == {"b": 5001}


def test_statistics_by_hand():
    *_, row = kernels.statistics_of({"a": [100, 300], "b": [1000]})
    _, *numbers = astuple(row)
    assert numbers == pytest.approx([2, 400, 200, 40000 / 1400, 100, 300, 20000**0.5])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty"),
        (STATISTICS.replace("Calls", "Count"), "lacks Calls"),
        (STATISTICS[:-30], "row 3 has"),
        (STATISTICS.replace("600", "inf"), "no number"),
        ("\n".join(STATISTICS.splitlines()[:2]) + "\n", "add up to 60.0"),
        (STATISTICS.replace("60.000000", "nan"), "row 2: Percentage: 'nan' is no number"),
        (STATISTICS.replace(",400,400,0.0", ",-400,400,0.0"), "row 3: .*no kernel runs like that"),
        (STATISTICS.replace(",400,400,0.0", ",400,18446744073709551615,0.0"), "row 3: 1 calls of"),
    ],
)
def test_a_broken_statistics_file_is_one_sentence_with_its_name(
    tmp_path: Path, content: str, words: str
):
    path = tmp_path / "x_kernel_stats.csv"
    path.write_text(STATISTICS)
    assert [row.total_ns for row in kernels.read_statistics(path)] == [600, 400]
    path.write_text(content)
    with pytest.raises(ToolError, match=words) as error:
        kernels.read_statistics(path)
    assert str(path) in str(error.value)


# --- traces


def of(operator: int) -> dict[str, int]:
    """The number of the operator that launched something."""
    return {"External id": operator}


# Two phases; a copy, a kernel launched by the thread of the autograd engine, and a graph of two
# kernels.
GPU_TRACE = [
    event("user_annotation", "forward", 0, 100),
    event("user_annotation", "backward", 100, 100),
    event("user_annotation", "Optimizer.step#AdamW.step", 10, 20),
    event("cpu_op", "aten::mm", 5, 20, **of(1)),
    event("cpu_op", "aten::copy_", 30, 10, **of(2)),
    event("cpu_op", "aten::mul", 110, 10, tid=2, **of(3)),
    event("cuda_runtime", "cudaLaunchKernel", 10, 1, correlation=11),
    event("cuda_runtime", "cudaMemcpyAsync", 35, 1, correlation=12),
    event("cuda_driver", "cuLaunchKernelEx", 115, 1, tid=2, correlation=13),
    event("cuda_runtime", "cudaGraphLaunch", 150, 1, correlation=14),
    event("kernel", "Cijk_Ailk", 300, 8, correlation=11, **of(1)),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 320, 2, correlation=12, **of(2)),
    event("kernel", "void elementwise_kernel<4>()", 330, 3, correlation=13, **of(3)),
    event("kernel", "triton_poi_fused_0", 400, 5, correlation=14),
    event("kernel", "triton_poi_fused_1", 410, 1.5, correlation=14),
    event("kernel", "attn_fwd", 450, 0.5, correlation=999),  # its launch is not in the trace
]


def test_a_kernel_belongs_to_the_phase_that_launched_it():
    profile = run_pytorch_profiler.analyse(GPU_TRACE, ("data", "forward", "backward", "optimizer"))
    assert profile.unit == "kernels"
    found = {
        name: (part.kernels_per_step, part.copies_per_step, part.ms_per_step)
        for name, part in profile.phases.items()
    }
    assert found == {"forward": (1, 1, 0.01), "backward": (3, 0, 0.0095), "outside": (1, 0, 0.0005)}
    assert profile.categories["generated"].percent == pytest.approx(100 * 6.5 / 20)
    assert {row["name"]: row["device_ns"] for row in profile.operators} == {
        "aten::mm": 8000, "aten::copy_": 2000, "aten::mul": 3000,
    }  # fmt: skip
    with pytest.raises(ToolError, match="no ranges named graph"):  # of a step that is one graph
        run_pytorch_profiler.analyse(GPU_TRACE, ("data", "graph"))


def test_without_a_gpu_an_operator_counts_without_those_it_calls():
    events = [
        event("cpu_op", "aten::linear", 0, 10),
        event("cpu_op", "aten::t", 1, 2),
        event("cpu_op", "aten::transpose", 1, 2),  # starts and ends with the one that calls it
        event("cpu_op", "aten::mm", 4, 5.5),
        event("cpu_op", "aten::mul", 2, 3, tid=2),  # another thread
        event("cpu_op", "aten::add", 10, 1),  # starts where the first ends
    ]
    found = {kernel.name: kernel.duration_ns for kernel in kernels.kernels_of(events)}
    assert found == {
        "aten::linear": 2500,
        "aten::t": 0,
        "aten::transpose": 2000,
        "aten::mm": 5500,
        "aten::mul": 3000,
        "aten::add": 1000,
    }


def test_the_innermost_of_nested_ranges_counts():
    ranges = [
        kernels.Range(*r)
        for r in (("block", 0, 10), ("mlp", 2, 4), ("attention", 5, 8), ("next", 10, 12))
    ]
    times = [9, 0, 3, 6, 4.5, 11, 13, None]
    launched = [kernels.Kernel("k", 1, time, "other") for time in times]
    names = ["block", "block", "mlp", "attention", "block", "next", None, None]
    assert kernels.range_of_each(launched, ranges) == names


def test_a_broken_trace_is_one_line_with_its_name(tmp_path: Path):
    path = tmp_path / "x_trace.json.gz"
    for content in (b"", b"[1]", b'{"traceEvents": [', gzip.compress(b"{" * 999, mtime=0)[:20]):
        path.write_bytes(content)
        with pytest.raises(ToolError, match=f"{path}.*cut off"):
            kernels.load_trace(path)


def test_events_that_lack_something_are_counted(capsys):
    good = event("kernel", "a", 1, 2, correlation=3)
    lacking = [{**good, "dur": "soon"}, {**good, "ts": float("nan")}, {"ph": "X", "cat": "cpu_op"}]
    assert kernels.check_events([good, *lacking, {"ph": "M"}], "x.json") == [
        good,
        {"ph": "M", "args": {}},
    ]
    first, second = capsys.readouterr().err.splitlines()
    assert "x.json: without a valid start and end, left out: 2 of 3 kernels" in first
    assert "x.json: other events left out, which lack a name, a place or a time: 1" in second

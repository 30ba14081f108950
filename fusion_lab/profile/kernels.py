"""GPU kernels by name: what they do, how long they took, and which phase of a training step
launched them.

Three sources give the same things: traces of the PyTorch profiler (`load_trace`, `kernels_of`),
statistics files of rocprofv3 (`read_statistics`), and what these tools write themselves
(`write_statistics`, in rocprofv3's format). On a CPU there are no kernels; there operators take
their place, each with the time spent in itself and not in operators that it calls. Only the
standard library is needed.
"""

import csv
import json
import math
import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from fusion_lab.cli import ToolError, note
from fusion_lab.files import write_file
from fusion_lab.profile.dispatches import (
    HOUR_NS,
    Dispatch,
    read_table,
    say_changes,
    unzipped,
    valid_ends,
)

PHASES = ("data", "forward", "backward", "optimizer")  # of a step
GRAPH_PHASES = ("data", "graph")
CATEGORIES = (
    "GEMM",
    "attention",
    "normalisation",
    "element-wise",
    "copies",
    "reductions",
    "optimizer",
    "generated",
    "communication",
    "other",
)
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # what a trace calls these events
CALLS = ("cuda_runtime", "cuda_driver")  # and calls of CUDA, or of HIP
WINDOW_END = "Record Window End"  # the profiler's mark of the end, one for each process
NO_KERNELS = "the profiler saw no kernels on the GPU: may this user profile it?"

# The first pattern that is found in the name decides, so what is specific comes first. Upper and
# lower case are alike.
KERNELS = (
    # nodes of the autograd graph: the time between operators
    ("other", r"^autograd::|backward\d+$|accumulategrad$"),
    # named after what they fuse, which can be a collective's neighbour
    ("generated", r"^triton_|^cpp_fused|compiledfxgraph|^compiledfunction|^torch-compiled region"),
    ("reductions", r"(block|warp)_?all_?reduce"),  # within one GPU
    # NCCL, RCCL, MSCCL, oneCCL; PyTorch's own, also of symmetric memory; NVSHMEM, rocSHMEM
    ("communication", r"[nrsexu]ccl|c10d|symm_mem|multimem_|shmem|_on_stream_kernel"),
    ("communication", r"cross_device|all_?(reduce|gather(?!_copy)|to_?all)|reduce_?scatter"),
    ("communication", r"^(gloo|mpi|ucc):"),
    # AOTriton (attn_fwd, bwd_kernel_*), composable kernel (Fmha), CUTLASS (MemEffAttention), cuDNN
    # (sdpa), V3's own
    ("attention", r"flash|fmha|attn_fwd|attn_bwd|bwd_kernel_|bwd_preprocess|attention|sdpa"),
    ("attention", r"dot_do_o|convert_dq_"),
    # The loss. The fifth template argument of softmax_warp_* is is_log_softmax.
    ("other", r"cross_entropy|log_?softmax|softmax_warp_\w+<[^,]+,[^,]+,[^,]+, *\d+, *true"),
    ("attention", r"softmax"),
    ("normalisation", r"(layer|rms|batch|group)_?norm|rowwisemoments|gammabeta|computegradinput"),
    ("copies", r"multi_tensor_apply.*copyfunctor"),  # a cast of many tensors
    # only optimizers work on lists of tensors
    ("optimizer", r"adam|multi_tensor_apply|amp_(update|foreach|non_finite)"),
    # V3's kernels that add up what programs or a product left in parts
    ("reductions", r"(sum|add)_(two_)?parts|(^|_)sums?(_kernel|$)|_finish_kernel"),
    # V3's, and V4's: they multiply matrices, whatever else they do beside it.
    ("GEMM", r"triangle_|outer_product|transformer_block|transition_|project_"),
    # Cijk: rocBLAS and hipBLASLt name kernels by their index equation. nvjet, xmma, cutlass,
    # splitK, dot: cuBLAS.
    ("GEMM", r"cijk_|gemm|gemv|nvjet|xmma|cutlass|splitk|dot_kernel|reduce_1block|rocblas_dot"),
    ("copies", r"memcpy|memset|copy_kernel|copy_device|batchedcopy|fillfunctor|fill_kernel"),
    ("copies", r"(copy|fill)buffer"),
    ("other", r"head_loss"),  # V4's
    ("other", r"embedding|index|gather|scatter|nll_loss|searchsorted|bucketize|distribution"),
    ("other", r"sort|scan_"),
    ("reductions", r"reduce"),
    ("element-wise", r"elementwise|element_wise|pointwise|triu_tril|unrolled_kernel|arange"),
    ("element-wise", r"glu_|relu_|rotary|(^|_)rope"),
)

# Operators of a CPU, by their whole name without "aten::"; a trailing underscore (in place) makes
# no difference.
OPERATORS = (
    ("attention", r".*scaled_dot_product.*|.*_attention_.*"),
    ("attention", r"_?softmax|_softmax_backward_data|_safe_softmax"),
    ("GEMM", r"mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|linear|matmul|einsum|outer"),
    ("GEMM", r"_addmm_activation|.*_linear"),
    ("normalisation", r".*(layer|rms|batch|group|instance)_norm.*"),
    ("optimizer", r"_fused_adam.*|_fused_sgd.*|_fused_adagrad.*|_foreach_.*|_amp_.*"),
    ("copies", r"_?copy|_to_copy|to|_?cat|stack|clone|contiguous|fill|zero"),
    ("copies", r"(new_)?(zeros|ones|full)|(zeros|ones|full)_like|repeat|repeat_interleave"),
    ("copies", r"pad|constant_pad_nd|_?pin_memory|roll|flip|tril|triu"),
    ("copies", r"(select|slice)_(backward|scatter)"),  # a gradient written into zeros
    ("reductions", r"sum|mean|prod|amax|amin|max|min|argmax|argmin|any|all|var|std|norm|cumsum"),
    ("reductions", r"linalg_vector_norm|logsumexp|var_mean|std_mean|sum_to_size|count_nonzero"),
    ("element-wise", r"add|sub|mul|div|rsub|neg|abs|sign|pow|square|sqrt|rsqrt|reciprocal"),
    ("element-wise", r"exp|log|log2|log1p|sin|cos|addcmul|addcdiv|lerp|where|_s_where|masked_fill"),
    ("element-wise", r"(relu|gelu|silu|sigmoid|tanh|glu|threshold|softplus)(_backward)?"),
    ("element-wise", r"(hardtanh|elu|dropout)(_backward)?|eq|ne|lt|le|gt|ge|remainder|fmod"),
    ("element-wise", r"clamp(_min|_max)?|maximum|minimum|round|floor|ceil|is(nan|(neg)?inf)"),
    ("element-wise", r"(bitwise|logical)_\w+|__(and|or|xor)_"),
)
_KERNELS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KERNELS]
_OPERATORS = [(kind, re.compile(pattern)) for kind, pattern in OPERATORS]


def category(name: str) -> str:
    """What a kernel (CUDA or ROCm) or a CPU operator (`aten::...`) does: one of CATEGORIES."""
    if name.startswith("aten::"):
        operator = name.removeprefix("aten::").removesuffix("_")
        return next((kind for kind, pattern in _OPERATORS if pattern.fullmatch(operator)), "other")
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), "other")


# What tells instances of a generic kernel apart, somewhere in its template arguments, and what only
# wraps it.
COMPUTES = re.compile(
    r"cutlass_\w+|\w*functor\w*|\b[A-Z]\w+Ops\b|\w+?(?=_kernel(?:_cuda|_impl)?[(<])", re.IGNORECASE
)
WRAPPERS = re.compile(r"(A|B)?(Unary|Binary)Functor$|gpu$")


def short_name(name: str, width: int = 60) -> str:
    """The name for a table: no template arguments, parameters, namespaces; at most `width` long.

    Generic kernels keep the functor that tells them apart: `vectorized_elementwise_kernel
    [MulFunctor]`.
    """
    # C++, not a copy "Memcpy HtoD (...)" or an operator
    if "<" in name or re.match(r"void |[\w:]+\(", name):
        plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
        depth, kept = 0, ""
        for letter in plain:
            if letter == "(" and depth == 0:
                break  # the parameters
            depth += (letter == "<") - (letter == ">")
            kept += letter if depth == 0 and letter != ">" else ""
        functors = [f for f in COMPUTES.findall(plain.partition("<")[2]) if not WRAPPERS.match(f)]
        name = kept.strip().rpartition("::")[2] + (f" [{functors[-1]}]" if functors else "")
    return name if len(name) <= width else name[: width - 3] + "..."


@dataclass(frozen=True)
class KernelStatistics:
    """All calls of one kernel; one row of a `*_kernel_stats.csv`."""

    name: str
    calls: int
    total_ns: int
    average_ns: float
    percentage: float
    min_ns: int
    max_ns: int
    std_dev_ns: float


# a file of run_rocprofv3.sh: the profile has more than the measured steps (ROCm 6)
WITH_WARM_UP = "with_warm_up"
HEADER = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev")


def statistics_of(durations: Mapping[str, Sequence[int]]) -> list[KernelStatistics]:
    """Statistics of kernels from the durations in nanoseconds of their calls, the longest first."""
    everything = sum(map(sum, durations.values()))
    rows = []
    for name, times in durations.items():
        total = sum(times)
        share = 100 * total / everything if everything else 100 / len(durations)
        deviation = statistics.stdev(times) if len(times) > 1 else 0.0
        ends = min(times), max(times)
        average = total / len(times)
        rows.append(KernelStatistics(name, len(times), total, average, share, *ends, deviation))
    return sorted(rows, key=lambda row: (-row.total_ns, row.name))


def write_statistics(path: Path, rows: Sequence[KernelStatistics]) -> None:
    """Write rows in the format of rocprofv3's `*_kernel_stats.csv`."""

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
            writer.writerow(HEADER)
            writer.writerows(astuple(row) for row in rows)

    write_file(path, write)


def read_statistics(path: Path) -> list[KernelStatistics]:
    """The rows of a `*_kernel_stats.csv`; none for a process without kernels. ToolError says what
    is wrong with the file."""
    rows = []
    for row in read_table(path, *HEADER)[1]:
        calls, total, average, share, low, high = map(row.number, HEADER[1:7])
        deviation = row.number(HEADER[7]) if calls > 1 else 0.0
        if calls < 1 or total < 0 or not 0 <= low <= high <= HOUR_NS:
            what = f"{calls:g} calls of {low:g} to {high:g} ns, {total:g} ns in all"
            raise ToolError(f"{row.place}: {what}: no kernel runs like that")
        numbers = int(calls), int(total), average, share, int(low), int(high)
        rows.append(KernelStatistics(row.cells["Name"], *numbers, deviation))
    total_percentage = math.fsum(row.percentage for row in rows)
    if rows and not abs(total_percentage - 100) <= 1:
        found = f"{total_percentage:.1f}, not to 100"
        raise ToolError(f"{path}: percentages add up to {found}, is the file cut off?")
    return rows


def statistics_of_dispatches(dispatches: Iterable[Dispatch]) -> list[KernelStatistics]:
    """The statistics of dispatches by the names of their kernels, the longest first."""
    durations: dict[str, list[int]] = defaultdict(list)
    for dispatch in dispatches:
        durations[dispatch.name].append(dispatch.end - dispatch.start)
    return statistics_of(durations)


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or memset of a GPU; in a trace without one, a call of an operator."""

    name: str
    duration_ns: int  # of an operator: without the operators that it called
    # when the host launched it, on the trace's clock; None if the trace does not tell
    launch_us: float | None
    category: str
    is_copy: bool = False  # a memcpy or memset, which does not count as a kernel
    operator: Hashable = None  # "External id" of the operator that launched it
    stream: Hashable = None


def load_trace(path: Path) -> list[dict]:
    """The events, checked, of a trace of the PyTorch profiler; ToolError if it is none."""
    return read_trace(path)["traceEvents"]


def read_trace(path: Path) -> dict:
    """What is in a trace of the PyTorch profiler, its events checked; ToolError if it is none."""
    try:
        content = json.loads(unzipped(path).decode("utf-8-sig", "replace"))
        events = content["traceEvents"]
        if not all(isinstance(event, dict) for event in events):
            raise TypeError("its events are no objects")
    except (ValueError, LookupError, TypeError) as error:
        what = "not a trace of the PyTorch profiler, or cut off"
        raise ToolError(f"{path}: {what} ({error})") from error
    return content | {"traceEvents": check_events(events, path)}


def check_events(events: Sequence[dict], source: object) -> list[dict]:
    """The events of a Chrome trace, those with a duration only if they have a name, a place and a
    valid time; no kernel or copy runs over the next one of its stream.

    A note on stderr counts what is left out or shortened; ToolError if that is every kernel, or if
    there are several processes, each of which counts its calls from one.
    """
    placed = [event for event in events if has_place(event)]
    good = [{**event, "args": event.get("args") or {}} for event in placed]
    marks = [event for event in good if event.get("name") == WINDOW_END]
    hosts = {call["pid"] for call in complete(good, *CALLS)}
    if len(marks) > 1 or len(hosts) > 1:
        raise ToolError(f"{source}: it is of several processes: name the trace of one of them")
    work = complete(good, *ON_GPU)
    ends = ends_of_work(work, good)
    late = 0
    for event, end in zip(work, ends, strict=True):
        if end not in (None, event["ts"] + event["dur"]):
            event["dur"] = end - event["ts"]
            late += 1
    gone = {id(event) for event, end in zip(work, ends, strict=True) if end is None}
    lacking = sum(event.get("cat") in ON_GPU for event in events if not has_place(event))
    total, left_out = len(work) + lacking, len(gone) + lacking
    say_changes(source, total, left_out, late)
    if total and left_out == total:
        raise ToolError(f"{source}: none of its kernels has a valid start and duration")
    if others := len(events) - len(good) - lacking:
        note(f"{source}: other events left out, which lack a name, a place or a time: {others}")
    return [event for event in good if id(event) not in gone]


def ends_of_work(work: Sequence[dict], events: Sequence[dict]) -> list[float | None]:
    """When the work on a GPU ended, None where its time is not valid: not behind the profiler's
    mark of the end. What a trace of HIP calls a stream is a hardware queue."""
    hip = any(call["name"].startswith("hip") for call in complete(events, *CALLS))
    hip |= any(event["args"].get("kind") == "Dispatch Kernel" for event in work)
    places = [None if hip else (str(event["pid"]), str(event["tid"])) for event in work]
    spans = [(e["ts"], e["ts"] + e["dur"], at) for e, at in zip(work, places, strict=True)]
    marks = [event.get("ts") for event in events if event.get("name") == WINDOW_END]
    last = max(filter(is_number, marks), default=math.inf)
    # One microsecond is the clock of older traces, and what kernels of Hopper may overlap by.
    return valid_ends(spans, last, HOUR_NS / 1e3, slack=1.0)


def has_place(event: dict) -> bool:
    """Does an event with a duration have what tells where and when it was? Others need nothing."""
    if event.get("ph") != "X":
        return True
    timed = is_number(event.get("ts")) and is_number(event.get("dur")) and event["dur"] >= 0
    named = isinstance(event.get("name"), str) and isinstance(event.get("args", {}), dict)
    return timed and named and {"pid", "tid"} <= event.keys()


def is_number(value: object) -> bool:
    """Is it a number that a clock can show?"""
    return isinstance(value, (int, float)) and abs(value) < 2**63


def complete(events: Iterable[dict], *categories: str) -> list[dict]:
    """Events that have a duration and one of these values of "cat"."""
    return [event for event in events if event.get("ph") == "X" and event.get("cat") in categories]


def has_gpu(events: Iterable[dict]) -> bool:
    """Does the trace contain anything that ran on a GPU?"""
    return any(event.get("cat") in ON_GPU for event in events)


def operators_of(events: Iterable[dict]) -> list[Kernel]:
    """Every call of an operator with its self time: its duration without its children."""
    calls = complete(events, "cpu_op")

    def order(call: dict) -> tuple:
        thread = str(call["pid"]), str(call["tid"])
        return *thread, call["ts"], -call["dur"], call.get("args", {}).get("Ev Idx", 0)

    calls.sort(key=order)
    spans = [((call["pid"], call["tid"]), call["ts"], call["dur"]) for call in calls]
    operators = []
    for call, us in zip(calls, self_times(spans), strict=True):
        duration, name = max(0, round(1e3 * us)), call["name"]
        number = call.get("args", {}).get("External id")
        operators.append(Kernel(name, duration, call["ts"], category(name), operator=number))
    return operators


def self_times(spans: Sequence[tuple[Hashable, float, float]]) -> list[float]:
    """The duration of each (thread, start, duration) without those inside of it, which begin in the
    same thread before it ends; they are sorted by thread and start, the outer one first."""
    times = [duration for *_, duration in spans]
    around: list[int] = []  # those that are open, outermost first

    def is_inside(index: int, outer: int) -> bool:
        (thread, start, _), (its, began, took) = spans[index], spans[outer]
        return thread == its and start < began + took

    for index, (_, _, duration) in enumerate(spans):
        while around and not is_inside(index, around[-1]):
            around.pop()
        if around:
            times[around[-1]] -= duration
        around.append(index)
    return times


def kernels_of(events: Sequence[dict]) -> list[Kernel]:
    """What ran on the GPU; in a trace without a GPU, the operators. A launch is found by its
    correlation id, which all kernels of a CUDA or HIP graph share."""
    if not has_gpu(events):
        return operators_of(events)
    calls = complete(events, *CALLS)  # Kineto's names for HIP's calls, too
    # should a correlation be shared, the launch is the one
    calls.sort(key=lambda call: "Launch" in call["name"])
    known = [call for call in calls if "correlation" in call.get("args", {})]
    launches = {call["args"]["correlation"]: call["ts"] for call in known}
    kernels = []
    for event in complete(events, *ON_GPU):
        name, arguments, is_copy = event["name"], event.get("args", {}), event["cat"] != "kernel"
        launch, duration = launches.get(arguments.get("correlation")), round(1e3 * event["dur"])
        kind, operator = "copies" if is_copy else category(name), arguments.get("External id")
        kernels.append(Kernel(name, duration, launch, kind, is_copy, operator, event["tid"]))
    return kernels


@dataclass(frozen=True)
class Range:
    """A marked region of the host's time (record_function), in microseconds of its clock."""

    name: str
    start: float
    end: float


def ranges_of(events: Iterable[dict], names: Iterable[str]) -> list[Range]:
    """The marked regions of these names, in the order of time, outer ones first."""
    wanted = set(names)
    found = [event for event in complete(events, "user_annotation") if event["name"] in wanted]
    ranges = [Range(event["name"], event["ts"], event["ts"] + event["dur"]) for event in found]
    return sorted(ranges, key=lambda r: (r.start, -r.end))


def range_of_each(kernels: Sequence[Kernel], ranges: Sequence[Range]) -> list[str | None]:
    """For each kernel the name of the innermost range in which it was launched; None outside.
    Ranges are nested or apart, in the order of `ranges_of`: the innermost around a moment began
    last."""
    starts = [each.start for each in ranges]

    def innermost(time: float | None) -> str | None:
        begun = 0 if time is None else bisect_right(starts, time)
        around = (ranges[i] for i in reversed(range(begun)) if ranges[i].end >= time)
        return next((each.name for each in around), None)

    return [innermost(kernel.launch_us) for kernel in kernels]

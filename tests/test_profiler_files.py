"""Files of other tools: what is in them, and what is wrong with them, is found by every reader.

The inputs are small and written here, in the form of the real ones. The readers were also tried on
files that the tools themselves wrote, in public repositories (none of them is copied here):
ROCm/rocprofiler-compute and ROCm/rocm-systems, 137 folders of tests/workloads from MI100 to MI350:
read, but for vcopy of MI300A and MI300X, whose times are rounded to 1e9 and 1e10 ns, and for what
lacks counters or roofline.csv, which the message names; rocprofiler-sdk's source/docs/data; a
database made with the tool's own tables and views; facebookresearch/HolisticTraceAnalysis, 32
traces, and AMD-AGI/TraceLens, 26: read, with up to 18 kernels shortened, but for those that are no
traces of kernels, which are refused.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import run_pytorch_profiler
from lab.cli import ToolError
from lab.profile import kernels
from lab.profile.dispatches import decimal_of, read_counters, valid_ends
from lab.rocm import files

T = 13_386_710_965_731_450  # nanoseconds since boot: more than a float64 counts exactly
PHASES = ("data", "forward", "backward", "optimizer")

# --- what each source has for the same dispatches: (name, start, end), all in one stream

Dispatches = list[tuple[str, object, object]]


def kernel_trace(folder: Path, dispatches: Dispatches) -> Path:
    """rocprofv3's csv files of one process; the statistics are those of the bad times."""
    lines = [f'"KERNEL_DISPATCH","Agent 4",1,1,"{n}",{a},{b}' for n, a, b in dispatches]
    header = "Kind,Agent_Id,Queue_Id,Stream_Id,Kernel_Name,Start_Timestamp,End_Timestamp"
    (folder / "7_kernel_trace.csv").write_text("\n".join([header, *lines, ""]))
    stats = f"a,{len(dispatches)},18446744073709551615,1,100,1,18446744073709551615,0"
    (folder / "7_kernel_stats.csv").write_text(f"{','.join(kernels.HEADER)}\n{stats}\n")
    return folder


def database(folder: Path, dispatches: Dispatches) -> Path:
    with sqlite3.connect(folder / "7_results.db") as connection:
        columns = 'name text, "start" bigint, "end" bigint, queue_id integer, stream_id integer'
        connection.execute(f"create table kernels ({columns})")
        connection.executemany("insert into kernels values (?, ?, ?, 1, 1)", dispatches)
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
    for dispatch in read_counters(folder / "pmc_perf.csv")[1]:
        found[dispatch.name] = found.get(dispatch.name, 0) + dispatch.end - dispatch.start
    return found


def event(cat: str, name: str, ts: object, dur: object, **args: object) -> dict:
    place = {"pid": 0, "tid": 7} if cat == "kernel" else {"pid": 1, "tid": 1}
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


@every_source
def test_without_a_valid_time_there_is_nothing_to_read(source: str, tmp_path: Path):
    write, read = SOURCES[source]
    with pytest.raises(ToolError, match="none of its kernels has a valid start"):
        read(write(tmp_path, [("a", T + 1000, 0), ("b", T + 2000, T + 1500)]))


def test_streams_may_overlap_and_nothing_ends_behind_the_last():
    spans = [(0, 50, "x"), (10, 70, "y"), (40, 60, "x"), (None, 5, "x"), (9, 3, "y"), (90, 99, "y")]
    assert valid_ends(spans, last=65) == [40, 65, 60, None, None, None]
    assert valid_ends(spans[:3], slack=10) == [50, 70, 60]
    assert valid_ends([(0, 10, "x")], longest=9) == [None]
    assert valid_ends([(5, 9, "x"), (5, 6, "x"), (8, 9, "x")]) == [8, 6, 9]


def test_a_kernel_lies_within_its_trace(tmp_path: Path):
    """The profiler marks the end; without a mark no last kernel takes longer than all the rest."""
    late = event("kernel", "a", 20, 1_600_000.0)
    mark = {"ph": "i", "name": "Record Window End", "ts": 90.5}
    host = event("cpu_op", "aten::mm", 0, 80)
    for events, expected in (([host, late, mark], 70.5), ([host, late], 60)):
        assert kernels.check_events(events, "x")[1]["dur"] == expected
    plausible = [host, event("kernel", "a", 20, 100)]
    assert kernels.check_events(plausible, "x") == plausible


# --- numbers, tables


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1.62068E+03", 1620.68), (" 12 ", 12), ('"12"', 12), ("1,234,567.5", 1234567.5)],
        *[("1 234", 1234), ("", None), ("nan", None), ("-inf", None), ("13386710965731450", T)],
    ],
)
def test_numbers_in_any_form(text: str, value: object):
    found = decimal_of(text)
    assert found == value if value is None or isinstance(value, int) else float(found) == value


STATISTICS = (
    '"Name", "Calls" ,"TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"\r\n'
    '"copy ""x"", y",2, "1,000",5.0E+02,100.0,400,600, 141.4 \r\n'
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_table_as_editors_and_spreadsheets_leave_it(encoding: str, tmp_path: Path):
    path = tmp_path / "7_kernel_stats.csv"
    path.write_bytes(STATISTICS.encode(encoding))
    (row,) = kernels.read_statistics(path)
    assert (row.name, row.calls, row.total_ns, row.average_ns) == ('copy "x", y', 2, 1000, 500)


def test_a_header_without_rows_is_a_process_without_kernels(tmp_path: Path):
    header = STATISTICS.splitlines()[0] + "\n"
    (tmp_path / "2_kernel_stats.csv").write_text(header)
    with pytest.raises(ToolError, match="no process has launched a kernel"):
        files.statistics(tmp_path, tmp_path / "stats.csv")
    (tmp_path / "1_kernel_stats.csv").write_text(STATISTICS)
    assert ns_of_rocprofv3(tmp_path) == {'copy "x", y': 1000}


def test_rounded_times_and_a_wrong_cell_are_named_with_their_row(tmp_path: Path):
    for bad, words in (
        (("b", "1.62068E+14", "1.62068E+14"), "row 3: the times 1.62068E.14 .* 1e.09 ns"),
        (("b", T, "soon"), "row 3: 'soon' is no number"),
    ):
        with pytest.raises(ToolError, match=f"pmc_perf.csv: {words}"):
            ns_of_counters(counters(tmp_path, [GOOD[0], bad]))
    exact = ("b", "1.62068000000000E+14", "1.62068000005001E+14")
    assert ns_of_counters(counters(tmp_path, [exact])) == {"b": 5001}


# --- traces


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

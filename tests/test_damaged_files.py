"""Result files in which one value was changed, taken away or given another type: each tool reads
them, or says so.

A tool that is given such a file ends with a result, or with one line that names the file; there is
no third way. `MUTATIONS=2000 python -m pytest -n0 tests/test_damaged_files.py` tries so many for
each tool and file.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import getitem
from pathlib import Path

import pytest
from conftest import ROOT, assert_refused, call, captured

from analysis_tools import (
    analyze_kernel_reduction,
    benchmark_suite,
    compare_runs,
    compare_versions,
    fusion_ablation_study,
    optimize_batch_size,
    performance_dashboard,
    plot_runs,
    regression_tester,
    report_generator,
)
from bench import versions as benchmark
from exercises.performance_debugging import compare_stages
from lab.cli import run_tool
from lab.study import SEARCH, measure_study, next_size, read_study

RESULTS = ROOT / "results"
MUTATIONS = int(os.environ.get("MUTATIONS", "8"))
VALUES = (None, True, 0, -1, 7, 1.5, 1e308, float("nan"), "", "x", "=1", "a\nb")
VALUES += ([], [1], ["x"], [[]], {}, {"x": 1})
# It is a file of something else now, or some of its rows are.
REFUSED = ("cannot be compared", "is a run of", "folder: ")
Answer = tuple[int, str, str]
Reader = Callable[[Path], Answer]


def search(path: Path) -> Answer:
    """How optimize_batch_size.py reads a search, which it refuses as a whole if it was made on
    another device."""

    def body() -> int:
        rows = read_study(path, *SEARCH)["rows"]
        next_size(rows, 1e5, 1024)
        found = [optimize_batch_size.beside_memory(row, 1e5) for row in rows]
        print(optimize_batch_size.table(found, 0.8))
        if fitting := [row for row in found if row["part"]]:
            for target in optimize_batch_size.TARGETS:
                print(optimize_batch_size.answer(fitting, target))
        return 0

    return captured(lambda argv: run_tool("optimize_batch_size.py", body), [])


def unfinished(path: Path) -> Answer:
    """How every study goes on from what an interrupted one has left."""
    partial_file = path.with_suffix(".partial.json")
    shutil.copy(path, partial_file)
    measure = lambda: bool(measure_study(path, []))  # noqa: E731
    status, out, err = captured(lambda argv: run_tool("study", measure), [])
    return status, out, err.replace(".partial.json", ".json")


def in_folder(path: Path, name: str) -> Path:
    """The file under the name that a tool looks for, in a folder of its own."""
    folder = path.parent / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return shutil.copy(path, folder / name).parent


def profile(path: Path) -> Answer:
    folder = in_folder(path, "tiny_llama_v1_profile.json")
    profiles = RESULTS / "h100/profiles"
    shutil.copy(profiles / "tiny_llama_v1/tiny_llama_v1_kernels.csv", folder)
    argv = "--baseline", folder, "--fused", profiles / "tiny_llama_v2"
    return call(analyze_kernel_reduction, *argv)


def report(name: str, path: Path) -> Answer:
    folder = in_folder(path, name)
    return call(report_generator, "--baseline", folder, "--fused", folder)


def versions(path: Path) -> Answer:
    folder = in_folder(path, "tiny_llama_v2_summary.json")
    return call(compare_versions, "--v2", folder, "--family", "llama")


def regression(source: Path, path: Path) -> Answer:
    return call(regression_tester, "--baseline-results", source, "--current-results", path)


def tables(name: str, path: Path) -> Answer:
    return call(benchmark, "table", in_folder(path, name))


def dashboard(path: Path) -> Answer:
    return call(performance_dashboard, path, "--output", path.with_suffix(".html"))


H100 = RESULTS / "h100"
RUN, RUNS = RESULTS / "cpu/tiny_llama_v2_readme.json", RESULTS / "cpu/exercises.json"
ABLATION, SUITE = H100 / "ablation_tiny_llama_v2.json", H100 / "suite_llama.json"
STUDIES = ("headline_v3", "inference", "memory", "counts", "ablation_tiny_llama_v3")
SHOWN = ("suite_llama", "headline_v3", "memory", "step", "profile_tiny_llama_v1")
SHOWN += ("roofline_llama_v1_v4",)
READERS: dict[str, tuple[Path, Reader]] = {
    "compare_runs": (RUN, lambda path: call(compare_runs, RUN, path)),
    "compare_runs, several": (RUNS, lambda path: call(compare_runs, path / "baseline")),
    "compare_versions": (RUN, versions),
    "plot_runs": (RUN, lambda path: call(plot_runs, "memory", f"x={path}")),
    "regression_tester, run": (RUN, partial(regression, RUN)),
    "regression_tester, study": (SUITE, partial(regression, SUITE)),
    "fusion_ablation_study": (ABLATION, partial(call, fusion_ablation_study, "--table")),
    "benchmark_suite": (SUITE, partial(call, benchmark_suite, "--table")),
    "optimize_batch_size": (H100 / "batch_size_tiny_llama_v4.json", search),
    "unfinished study": (H100 / "energy.json", unfinished),
    "analyze_kernel_reduction": (H100 / "profile_tiny_llama_v1.json", profile),
    "report_generator, run": (RUN, partial(report, RUN.name.replace("readme", "summary"))),
    "report_generator, FLOPs": (
        H100 / "flops_tiny_llama_v2.json",
        partial(report, "tiny_llama_v2_flops.json"),
    ),
    "compare_stages": (H100 / "performance_debugging.json", partial(call, compare_stages)),
    "dashboard, run": (RUN, dashboard),
    **{f"dashboard, {name}": (H100 / f"{name}.json", dashboard) for name in SHOWN},
    **{
        f"benchmark, {name}": (H100 / f"{name}.json", partial(tables, f"{name}.json"))
        for name in STUDIES
    },
}


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The way to each value of a file, but not to each of many like numbers."""
    several = isinstance(value, list)
    items = value if isinstance(value, dict) else dict(enumerate(value)) if several else {}
    for key, item in items.items():
        yield (*path, key)
        yield from places(item, (*path, key))


def mutated(content: dict, place: tuple, rng: random.Random) -> dict:
    """The content with another value there, or with none."""
    content = copy.deepcopy(content)
    inner = reduce(getitem, place[:-1], content)
    if rng.random() < 0.25:
        del inner[place[-1]]
    else:
        inner[place[-1]] = rng.choice(VALUES)
    return content


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_named(name: str, tmp_path: Path):
    source, read = READERS[name]
    content, rng, wrong = json.loads(source.read_text()), random.Random(name), []
    everywhere = list(places(content))
    path = tmp_path / source.name
    for _ in range(MUTATIONS):
        place = rng.choice(everywhere)
        damaged = mutated(content, place, rng)
        path.write_text(json.dumps(damaged))
        what = ".".join(map(str, place))
        try:
            status, _, err = read(path)
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
            continue
        lines = [line for line in err.splitlines() if ": error: " in line]
        wanted = (path.name, "folder/", *REFUSED)
        named = len(lines) == 1 and any(words in lines[0] for words in wanted)
        if status == 2 and not named:
            wrong.append(f"{what}: {err}")
    assert not wrong, f"{len(wrong)} of {MUTATIONS}: " + "\n".join(wrong[:40])


ROW = {"model": "tiny_llama", "side": "none", "on": [], "speedup": 1.0}
STUDY = {"environment": {"device_name": "GPU"}, "rows": [ROW]}
UNEQUAL = [ROW | {"turns_ms": count * [1.0]} for count in (5, 7)]
BROKEN = {  # a file's name and text, and what every reader says of it
    "cut": ('{"schema_version": 1,', "cut off"),
    "list": ("[1]", "not a JSON object"),
    "bytes": ("\udcff\udcfe", "not JSON"),
    "deep": ("[" * 100_000, "not JSON"),
    "later": ('{"schema_version": 2, "rows": []}', "schema_version is 2, not 1"),
    "other": ('{"schema_version": 1, "config": {}}', "it has no script"),
    "empty": (json.dumps(STUDY | {"rows": []}), "without a row"),
    "study": (json.dumps(STUDY), "it has no 'mode'"),
    "package": ("{}", "no chart shows"),
    "turns": (json.dumps(STUDY | {"rows": UNEQUAL}), "has 7 turns, others have 5"),
    **{
        name: (re.sub(r'"final": [^,}]+', f'"final": {value}', RUN.read_text()), "loss.final is")
        for name, value in (("text", '"fast"'), ("nan", "NaN"), ("huge", "1" + "0" * 400))
    },
}
OF_STUDIES = ("empty", "study", "package", "turns")  # compare_runs reads runs


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_line(name: str, tmp_path: Path):
    text, said = BROKEN[name]
    path = tmp_path / f"{name}_summary.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert_refused(dashboard(path), str(path), said)
    if name not in OF_STUDIES:
        assert_refused(call(compare_runs, path), str(path), said)
    assert [*tmp_path.iterdir()] == [path]


def test_a_field_that_no_program_writes_is_named(tmp_path: Path):
    content, path = json.loads(ABLATION.read_text()), tmp_path / "study.json"
    content["rows"][3]["batch ms"] = 1.5
    path.write_text(json.dumps(content))
    answer = call(fusion_ablation_study, "--table", path)
    assert_refused(answer, f"{path}: rows[3].batch ms is not a field")

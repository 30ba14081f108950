"""performance_dashboard.py: what is on the page is what the files have, and the page works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from pathlib import Path

import pytest
from conftest import ROOT, captured

from analysis_tools import performance_dashboard as dashboard

RESULTS = ROOT / "results"
HERE = {"device": "cuda", "device_name": "GPU", "torch": "2"}
LLAMA = {"fusions": {}, "training": {"batch_size": 8}, "environment": HERE, "config": {"seq_len": 128}}


def build(*argv: object) -> tuple[int, str, str]:
    return captured(dashboard.main, [str(word) for word in argv])


def page_in(path: Path) -> dict:
    """The charts that a page has, by their id."""
    data = re.search(r"const PAGE = (.*);\n", path.read_text()).group(1)
    return {chart["id"]: chart for chart in json.loads(data)["charts"]}


def panel(chart: dict, *choice: str) -> dict:
    return next(p for p in chart["panels"] if {*choice} <= {*p["choice"], p["study"]})


def written(folder: Path, name: str, content: dict) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder / name


def side(script: str, *turns: float, **more) -> dict:
    row = {"script": script, "argv": ["--batch-size", "4", "--use-amp"], "turns_ms": [*turns], "per_step": 10}
    return {**row, "batch_ms": statistics.median(turns), "peak_mb": 10 * turns[0], "unit": "kernels", **more}


def test_the_committed_results_fill_the_page(tmp_path):
    status, out, _ = build(RESULTS, "--output", tmp_path / "page.html")
    assert (status, out.count("Written:")) == (0, 1)
    charts = page_in(tmp_path / "page.html")
    assert [*charts] == ["versions", "ablation", "memory", "kernels", "roofline"]
    assert all(chart["panels"] for chart in charts.values())
    rows = json.loads((RESULTS / "h100/headline_v3.json").read_text())["rows"]
    row = next(r for r in rows if (r["shape"], r["precision"], r["mode"]) == ("tiny_llama, small", "bf16", "graph"))
    shown = panel(charts["versions"], "tiny_llama", "bf16", "h100/headline_v3.json")
    bars = next(trace for trace in shown["figure"][0] if (trace["name"], trace["yaxis"]) == ("V3", "y"))
    faster = statistics.median(a / b for a, b in zip(row["v1"]["turns_ms"], row["v3"]["turns_ms"], strict=True))
    assert bars["y"][bars["x"].index("small, graph")] == pytest.approx(1 / faster)
    (profile,) = (
        trace for trace in panel(charts["kernels"], "tiny_llama", "fp32")["figure"][0] if trace["name"] == "GEMM"
    )
    content = json.loads((RESULTS / "h100/profile_tiny_llama_v1.json").read_text())
    assert profile["x"][0] == content["categories"]["GEMM"]["ms_per_step"]
    devices = {p["choice"][1] for chart in charts.values() for p in chart["panels"]}
    assert {"NVIDIA H100 80GB HBM3", "2 x NVIDIA H200", "AMD EPYC"} <= devices


def test_studies_as_the_tools_write_them(tmp_path):
    slow, fast = side("tiny_llama_v1", 8, 10, 12), side("tiny_llama_v2", 4, 5, 8)
    gone = {"script": "tiny_llama_v1", "argv": slow["argv"], "status": "oom", "error": "no room"}
    rows = [{"model": "v1", **slow, "batch_size": 4, "seq_len": n} for n in (128, 256)]
    rows += [{"model": "v1", **gone, "batch_size": 4, "seq_len": 512}]
    written(tmp_path, "suite.json", {"environment": HERE, "family": "llama", "rows": rows})
    versions = [{"model": "tiny_llama", "v1": slow, "v2": fast}]
    written(tmp_path, "versions.json", {"environment": HERE, "rounds": 3, "argv": [], "rows": versions})
    sets = [{"fusions": "none", "speedup": 1.0, **slow}, {"fusions": "only x", "speedup": 2.0, **fast}]
    sets += [{"fusions": "all", "speedup": None, **gone}]
    written(tmp_path, "sets.json", {"environment": HERE, "rows": [{"group": 1, "seed": 1, **row} for row in sets]})
    row = {"script": "tiny_llama_v2", "group": "gemm", "flop": 8e9, "bytes": 1e9, "flop_per_byte": 8.0, "ms": 1.0}
    ceilings = {"precision": "bfloat16", "gemm_tflops": 100.0, "copy_gb_per_s": 2000.0}
    run = {**LLAMA, "script": "tiny_llama_v2", "ceilings": ceilings}
    run["training"] = {"batch_size": 8, "use_amp": True}
    written(tmp_path, "roofline_analysis.json", {"schema_version": 1, "runs": [run], "rows": [row]})
    assert build(tmp_path, "--output", tmp_path / "page.html")[::2] == (0, "")
    charts = page_in(tmp_path / "page.html")
    found = {name: panel(chart, "tiny_llama", "GPU", "bf16") for name, chart in charts.items() if chart["panels"]}
    bars = [(t["name"], t["x"], t["y"], t["text"]) for t in found["versions"]["figure"][0] if t["yaxis"] == "y"]
    assert bars == [("V1", ["batch 4, eager"], [1.0], ["10.00"]), ("V2", ["batch 4, eager"], [0.5], ["5.00"])]
    ((line,), memory) = found["memory"]["figure"][0], found["memory"]
    assert (line["x"], line["y"]) == ([128, 256], [80, 80])
    assert memory["note"] == "Batch size 4. Out of memory: V1 at 512."
    (points,) = found["ablation"]["figure"][0]
    assert (points["y"], points["x"], points["text"]) == (["only x", "all"], [2.0, 1.0], ["2.00x", "out of memory"])
    assert (points["error_x"]["array"], points["error_x"]["arrayminus"]) == ([0, 0], [0.5, 0])
    gemm = found["roofline"]["figure"][0][-1]
    assert (gemm["name"], gemm["x"], gemm["y"]) == ("gemm", [8.0], [8.0])
    assert not charts["kernels"]["panels"]


def test_runs_have_no_ratios_and_sizes_do_not_mix(tmp_path):
    run = json.loads((RESULTS / "cpu/tiny_llama_v2_readme.json").read_text())
    failed = {**run, "status": "failed", "error": "the loss became nan"}
    small, other = ({**run, "config": {**run["config"], **size}} for size in ({"seq_len": 64}, {"num_heads": 4}))
    for name, content in {"a": run, "b": small, "c": failed, "d": other}.items():
        (tmp_path / name).mkdir()
        written(tmp_path / name, "tiny_llama_v2_summary.json", content)
    status, _, err = build(tmp_path, "--output", tmp_path / "page.html")
    assert (status, "c failed: the loss became nan" in err) == (1, True)
    charts = page_in(tmp_path / "page.html")
    ms, name = run["timing"]["batch_ms"], "single runs: batch 8, length {}, layers 8, hidden dim 512, heads {}"
    sizes = [(256, 8), (64, 8), (256, 4)]
    shown = {p["study"]: p["figure"][0][0]["y"] for p in charts["versions"]["panels"]}
    assert shown == {name.format(length, heads): [ms] for length, heads in sizes}
    (memory,) = charts["memory"]["panels"]
    assert memory["figure"][0][0]["x"] == [64, 256]


STUDY = {"environment": HERE, "rows": [{"fusions": "none", "speedup": 1.0, "argv": [], "precision": "fp32"}]}


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("cut.json", '{"rows": [', "not JSON, or cut off"),
        ("old.json", '{"schema_version": 0, "rows": []}', "schema_version is 0, not 1"),
        ("other_summary.json", '{"schema_version": 1}', "it has no script"),
        ("package.json", "{}", "no chart shows"),
        ("rows.json", '{"environment": {"device_name": "x"}, "rows": []}', "without a row"),
        ("study.json", json.dumps(STUDY), "it names no model"),
        ("tiny_llama_v2.json", json.dumps(STUDY).replace("1.0", '"fast"').replace("none", "all"), "not a number"),
        ("tiny_llama_v2.json", json.dumps(STUDY).replace("1.0", "NaN").replace("none", "all"), "not a number"),
        (None, "", "no results in there"),
    ],
)
def test_bad_input_is_one_line(name, text, line, tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / (name or "")
    if name:
        path.write_text(text)
    status, out, err = build(path, "--output", tmp_path / "page.html")
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert line in err
    assert str(path) in err
    assert not (tmp_path / "page.html").exists()


def test_bad_arguments_and_a_missing_package(tmp_path, monkeypatch):
    assert "must end in .html" in build(RESULTS, "--output", tmp_path / "page.txt")[2]
    assert "no such file" in build(tmp_path / "none", "--output", tmp_path / "page.html")[2]
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    status, _, err = build(RESULTS, "--output", tmp_path / "page.html")
    assert (status, len(err.splitlines()), "pip install plotly" in err) == (4, 1, True)


def test_in_a_browser(tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (requirements-dev.txt)")
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    if not all(programs):
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    run = json.loads((RESULTS / "cpu/tiny_llama_v2_readme.json").read_text())
    run["environment"]["device_name"] = "Intel(R)  Xeon(R) "  # as processors name themselves
    odd = written(tmp_path, "run.json", run)
    assert build(RESULTS / "h100", odd, "--output", tmp_path / "page.html")[0] == 0
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    quiet = ("background-networking", "component-update", "sync", "gpu", "dev-shm-usage")
    for flag in (
        "headless=new",
        "no-sandbox",
        "no-first-run",
        "window-size=1400,1000",
        *(f"disable-{q}" for q in quiet),
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    try:
        browser.get((tmp_path / "page.html").as_uri())

        def shown(chart: str) -> list:
            script = "const plot = document.getElementById(arguments[0]);"
            script += "return (plot.data ?? []).map(trace => [trace.name, trace.x, trace.y])"
            return browser.execute_script(script, f"chart-{chart}")

        def choose(select: str, text: str) -> None:
            browser.find_element("xpath", f"//select[@id='{select}']/option[text()='{text}']").click()

        before = {chart: shown(chart) for chart in dashboard.CHARTS}
        assert all(before.values())
        for chart in dashboard.CHARTS:
            assert browser.find_element("css selector", f"#chart-{chart} svg.main-svg").is_displayed()
        choose("model", "tiny_openfold")
        after = {chart: shown(chart) for chart in dashboard.CHARTS}
        assert all(after[chart] and after[chart] != before[chart] for chart in before)
        choose("precision", "TF32")
        assert shown("versions") not in (after["versions"], [])
        assert shown("roofline") == []
        note = browser.find_element("id", "note-roofline").text
        assert "--script tiny_openfold_v2.py --matmul-precision high" in note
        first = shown("versions")
        choose("study-versions", "headline.json")
        assert shown("versions") != first
        choose("model", "tiny_llama")
        choose("precision", "fp32")
        browser.find_element("xpath", "//select[@id='device']/option[starts-with(text(), 'Intel')]").click()
        assert shown("versions") != []
        assert browser.get_log("browser") == []
        events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        assert asked
        assert all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked
    finally:
        browser.quit()

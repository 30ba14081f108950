"""performance_dashboard.py: what is on the page is what the files have, and the page works in a
browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import statistics
from pathlib import Path

import pytest
from conftest import ROOT, call

from analysis_tools import performance_dashboard as dashboard
from lab.script import model_and_version
from lab.study import by_side
from lab.turns import speedup

RESULTS = ROOT / "results"
HERE = {"device": "cuda", "device_name": "GPU", "torch": "2"}
LLAMA = {"fusions": {}, "environment": HERE, "config": {"seq_len": 128}}


def page_in(path: Path) -> list[dict]:
    """The panels of a page."""
    return json.loads(re.search(r"const PAGE = (.*);\n", path.read_text()).group(1))["panels"]


def panel(panels: list[dict], chart: str, *choice: str) -> dict:
    return next(
        p for p in panels if p["chart"] == chart and {*choice} <= {*p["choice"], p["study"]}
    )


def words(panel: dict) -> list[str]:
    """What a reader sees, one item for each piece of text."""
    found = re.findall(r">([^<>]+)<", panel["html"])
    return [html.unescape(text).strip() for text in found if text.strip()]


def written(folder: Path, name: str, content: dict) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder / name


def side(script: str, *turns: float, **more) -> dict:
    model, version = model_and_version(script)
    row = {"model": model, "version": version, "batch_size": 4, "precision": "bf16"}
    row |= {"mode": "eager", "script": script, "argv": ["--use-amp"], "turns_ms": [*turns]}
    row |= {"batch_ms": statistics.median(turns), "peak_mb": 10 * turns[0]}
    return {**row, "per_step": 10, "unit": "kernels", **more}


def test_the_committed_results_fill_the_page(tmp_path):
    status, out, _ = call(dashboard, RESULTS, "--output", tmp_path / "page.html")
    assert (status, out.count("Written:")) == (0, 1)
    page = (tmp_path / "page.html").read_text()
    assert len(page) < 2e6
    panels = page_in(tmp_path / "page.html")
    assert {p["chart"] for p in panels} == {*dashboard.CHARTS}
    rows = json.loads((RESULTS / "h100/headline_v3.json").read_text())["rows"]
    row = by_side(rows, "shape", "precision", "mode")["tiny_llama, small", "bf16", "graph"]
    shown = words(panel(panels, "versions", "tiny_llama", "bf16", "h100/headline_v3.json"))
    after = shown[shown.index("small, graph") :]
    v3 = after.index("V3")
    assert after[v3 + 1] == f"{row['V3']['batch_ms']:.2f}"
    assert after[v3 + 2].startswith(f"{speedup(row['V1'], row['V3']):.2f}x")
    steps = [p for p in panels if p["study"].startswith("h100/step.json: small")]
    assert [words(p).count("V4, whole step") for p in steps] == [1, 1]  # not "newest version"
    devices = {p["choice"][1] for p in panels}
    assert {"NVIDIA H100 80GB HBM3", "2 x NVIDIA H200", "AMD EPYC"} <= devices
    assert re.search(r'\["precision", \["bf16", .*?\], "bf16"\]', page), "it begins with bf16"


def test_studies_as_the_tools_write_them(tmp_path):
    slow, fast = side("tiny_llama_v1", 8, 10, 12), side("tiny_llama_v2", 4, 5, 8)
    names = ("model", "version", "batch_size", "precision", "mode", "script", "argv")
    gone = {**{key: slow[key] for key in names}, "status": "oom", "error": "no room"}
    rows = [{"side": "v1", **slow, "seq_len": n} for n in (128, 256)]
    rows += [{"side": "v1", **gone, "seq_len": 512}]
    written(tmp_path, "suite.json", {"environment": HERE, "family": "llama", "rows": rows})
    versions = [{"side": "V1", **slow}, {"side": "V2", **fast}]
    study = {"environment": HERE, "rounds": 3, "argv": [], "rows": versions}
    written(tmp_path, "versions.json", study)
    sets = [
        {"side": "none", "on": [], "speedup": 1.0, **slow},
        {"side": "only x", "on": ["x"], "speedup": 2.0, **fast},
        {"side": "all", "on": ["x", "y"], "speedup": None, **gone},
    ]
    rows = [{"group": 1, "seed": 1, **row} for row in sets]
    written(tmp_path, "sets.json", {"environment": HERE, "rows": rows})
    row = {"script": "tiny_llama_v2", "group": "gemm", "flop": 8e9, "bytes": 1e9, "ms": 1.0}
    row["flop_per_byte"] = 8.0
    ceilings = {"precision": "bfloat16", "gemm_tflops": 100.0, "copy_gb_per_s": 2000.0}
    run = {**LLAMA, "script": "tiny_llama_v2", "ceilings": ceilings}
    run["training"] = {"batch_size": 8, "use_amp": True}
    written(tmp_path, "roofline_analysis.json", {"schema_version": 1, "runs": [run], "rows": [row]})
    assert call(dashboard, tmp_path, "--output", tmp_path / "page.html")[::2] == (0, "")
    panels = page_in(tmp_path / "page.html")
    found = {p["chart"]: words(p) for p in panels if p["choice"] == ["tiny_llama", "GPU", "bf16"]}
    time = ["ms per step", "kernels per step", "batch 4, eager", "V1", "10.00", "10", "V2", "5.00"]
    assert found["versions"] == [*time, "2.00x (1.50x to 2.00x, too few turns to tell)", "10"]
    (suite,) = (words(p) for p in panels if p["chart"] == "memory" and p["study"] == "suite.json")
    sizes = [f"batch 4, length {n}, eager" for n in (128, 256, 512)]
    assert suite == ["peak MB", "V1", sizes[0], "80", sizes[1], "80", sizes[2], "out of memory"]
    gains = ["2.00x", "1.50x to 2.00x, too few turns to tell"]
    assert found["ablation"] == ["as fast as with none", "only x", *gains, "all", "out of memory"]
    assert {"gemm", "copy 2000 GB/s", "GEMM 100 TFLOP/s (bfloat16)"} <= {*found["roofline"]}
    assert "kernels" not in found


def test_runs_have_no_ratios_sizes_do_not_mix_and_alike_runs_are_one_bar(tmp_path):
    run = json.loads((RESULTS / "cpu/tiny_llama_v2_readme.json").read_text())
    runs = [{**run, "timing": {"batch_ms": ms}} for ms in (30.0, 10.0, 20.0)]
    runs += [
        {**run, "config": run["config"] | size} for size in ({"seq_len": 64}, {"num_heads": 4})
    ]
    runs += [{**run, "status": "failed", "error": "the loss became nan"}]
    for number, content in enumerate(runs):
        (tmp_path / f"{number}").mkdir()
        written(tmp_path / f"{number}", "tiny_llama_v2_summary.json", content)
    status, _, err = call(dashboard, tmp_path, "--output", tmp_path / "page.html")
    assert (status, "5 failed: the loss became nan" in err) == (1, True)
    names = [f"batch 8, length {length}, layers 8, hidden dim 512, heads {heads}"
             for length, heads in ((64, 8), (256, 4), (256, 8))]  # fmt: skip
    shown = words(panel(page_in(tmp_path / "page.html"), "versions", "single runs"))
    assert [text for text in shown if text.startswith("batch")] == names
    assert shown.count(f"{run['timing']['batch_ms']:,.2f}") == 2
    assert not [text for text in shown if re.search(r"\dx", text)]
    assert shown[shown.index("3 runs: 10.00 to 30.00") - 1] == "20.00"


def test_what_took_turns_is_a_pair_with_its_ratio_and_not_one_of_several_runs(tmp_path):
    run = json.loads((RESULTS / "cpu/tiny_llama_v2_readme.json").read_text())
    sides = {"a/baseline": (20.0, 30.0), "a": (10.0, 10.0), "b/baseline": (40.0, 40.0), "b": (8, 8)}
    for folder, turns in sides.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        timing = {"batch_ms": statistics.median(turns), "turns_ms": [*map(float, turns)]}
        written(tmp_path / folder, "tiny_llama_v2_summary.json", {**run, "timing": timing})
    assert call(dashboard, tmp_path, "--output", tmp_path / "page.html")[::2] == (0, "")
    pairs = [p for p in page_in(tmp_path / "page.html") if p["chart"] == "versions"]
    assert [p["study"] for p in pairs] == ["pairs", "pairs"]
    for shown, ratio in zip(map(words, pairs), ("2.50x (2.00x to 3.00x", "5.00x"), strict=True):
        assert shown.index("all off") < next(i for i, s in enumerate(shown) if s.startswith(ratio))


@pytest.fixture
def browser():
    """Chromium without a window, which notes what it is asked for."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="requirements-dev.txt has it")
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    if not all(programs):
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    flags = ["headless=new", "no-sandbox", "no-first-run", "window-size=1400,1000"]
    quiet = ("background-networking", "component-update", "sync", "gpu", "dev-shm-usage")
    for flag in (*flags, *(f"disable-{what}" for what in quiet)):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1])) as started:
        yield started


def test_in_a_browser(browser, tmp_path):
    run = json.loads((RESULTS / "cpu/tiny_llama_v2_readme.json").read_text())
    run["environment"]["device_name"] = "Intel(R)  Xeon(R) "  # as processors name themselves
    odd = written(tmp_path, "run.json", run)
    assert call(dashboard, RESULTS / "h100", odd, "--output", tmp_path / "page.html")[0] == 0
    browser.get((tmp_path / "page.html").as_uri())

    def shown(place: str = "chart-versions") -> str:
        return browser.find_element("id", place).text

    def choose(select: str, text: str) -> None:
        option = f"//select[@id='{select}']/option[starts-with(text(), '{text}')]"
        browser.find_element("xpath", option).click()

    before = {chart: shown(f"chart-{chart}") for chart in dashboard.CHARTS}
    assert all(before.values())
    choose("model", "tiny_openfold")
    after = {chart: shown(f"chart-{chart}") for chart in before}
    assert all(after[chart] and after[chart] != before[chart] for chart in before)
    choose("precision", "TF32")
    assert (first := shown()) not in (after["versions"], "")
    assert shown("chart-roofline") == ""
    assert "--script tiny_openfold_v2.py --matmul-precision high" in shown("note-roofline")
    choose("study-versions", "headline.json")
    assert shown() != first
    for select, text in (("model", "tiny_llama"), ("precision", "fp32"), ("device", "Intel")):
        choose(select, text)
    assert shown() != ""
    choose("device", "NVIDIA H100 80GB HBM3")
    phone = {"width": 400, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 400
    assert browser.get_log("browser") == []
    log = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    events = [event for event in log if event["method"] == "Network.requestWillBeSent"]
    asked = [event["params"]["request"]["url"] for event in events]
    assert asked and all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked

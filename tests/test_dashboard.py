"""performance_dashboard.py: what is on the page is what the files have, and it is for the right
machine."""

import html
import json
import re
import statistics
from pathlib import Path

from conftest import ROOT, call, read_rows

from analysis_tools import performance_dashboard as dashboard
from fusion_lab.study import by_side
from fusion_lab.turns import speedup

RESULTS = ROOT / "results"
HERE = {"device": "cuda", "device_name": "GPU", "torch": "2"}


def page_in(path: Path) -> list[dict]:
    """The tables of a page."""
    panels = []
    for part in path.read_text().split("<summary>")[1:]:
        choice, _, rest = part.partition("</summary>")
        for title, table in re.findall("<section><h2>(.*?)</h2>(.*?)</section>", rest, re.DOTALL):
            panels.append({"choice": choice.split(", "), "title": title, "html": table})
    return panels


def cells(panel: dict) -> list[list[str]]:
    """The cells of a table, row by row."""
    rows = re.findall("<tr>(.*?)</tr>", panel["html"])
    return [[html.unescape(text) for text in re.findall(">([^<]*)</t", row)] for row in rows]


def written(folder: Path, name: str, content: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder / name


def side(version: str, *turns: float, **more) -> dict:
    row = {"model": "tiny_llama", "version": version, "batch_size": 4, "precision": "bf16"}
    row |= {"script": f"tiny_llama_{version.lower()}", "turns_ms": [*turns], "side": version}
    return row | {"batch_ms": statistics.median(turns), "peak_mb": 10 * turns[0], **more}


def test_the_committed_results_fill_the_page(tmp_path):
    table = tmp_path / "runs.csv"
    status, out, _ = call(dashboard, RESULTS, "--output", tmp_path / "page.html", "--csv", table)
    assert len(read_rows(table)) > 500
    assert (status, out.count("Written:")) == (0, 1)
    panels = page_in(tmp_path / "page.html")
    rows = json.loads((RESULTS / "h100/headline_v3.json").read_text())["rows"]
    row = by_side(rows, "shape", "precision", "mode")["tiny_llama, small", "bf16", "graph"]
    title = "h100/headline_v3.json: tiny_llama, tiny_llama, small, bf16, graph"
    (panel,) = (p for p in panels if p["title"] == title and "bf16" in p["choice"])
    shown = {name: line for name, *line in cells(panel)}
    assert shown["V3"][1] == f"{speedup(row['V1'], row['V3']):.2f}x"
    assert shown["V3"][3] == f"{row['V3']['batch_ms']:.2f}"
    devices = {p["choice"][1] for p in panels}
    assert {"NVIDIA H100 80GB HBM3", "2 x NVIDIA H200", "AMD EPYC"} <= devices


def test_a_study_has_a_table_for_each_size_and_group(tmp_path):
    gone = side("V2", 1.0) | {"status": "oom", "error": "no room"}
    gone = {k: v for k, v in gone.items() if k not in ("batch_ms", "turns_ms", "peak_mb")}
    rows = [side("V1", 8, 10, 12), side("V2", 4, 5, 8), side("V1", 8, 8, 8, seq_len=512)]
    rows += [gone | {"seq_len": 512}, side("V1", 8, 8, 8, group=2)]
    written(tmp_path, "study.json", {"environment": HERE, "rows": rows})
    assert call(dashboard, tmp_path, "--output", tmp_path / "page.html")[::2] == (0, "")
    first, second, third = page_in(tmp_path / "page.html")
    assert first["choice"] == ["tiny_llama", "GPU", "bf16"]
    found = cells(first)[2]
    assert found[:5] == ["V2", "800.0", "2.00x", "1.50x to 2.00x, too few turns to tell", "5.00"]
    assert second["title"] == "study.json: tiny_llama, batch_size 4, seq_len 512, bf16"
    assert cells(second)[2][1] == "out of memory"
    assert third["title"].startswith("single runs")


def test_what_took_turns_is_a_pair_with_its_ratio_and_a_run_that_failed_fails(tmp_path):
    run = json.loads((RESULTS / "cpu/tiny_llama_v2_readme.json").read_text())
    for folder, turns in (("a", [10.0, 10.0]), ("a/baseline", [20.0, 30.0])):
        timing = {"batch_ms": 10.0, "turns_ms": turns}
        written(tmp_path / folder, "tiny_llama_v2_summary.json", {**run, "timing": timing})
    failed = {"status": "failed", "error": "the loss became nan"}
    written(tmp_path / "b", "tiny_llama_v2_summary.json", run | failed)
    status, _, err = call(dashboard, tmp_path, "--output", tmp_path / "page.html")
    assert (status, "b failed: the loss became nan" in err) == (1, True)
    pair, single = page_in(tmp_path / "page.html")
    assert pair["title"].endswith("in turns, by --compare-fusion")
    assert cells(pair)[2][0] == "as chosen" and "2.50x" in cells(pair)[2]
    assert "in turns" not in cells(single)[0] and cells(single)[1][1] == "failed"

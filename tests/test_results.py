"""The committed result files: complete runs that name their device and learn."""

import contextlib
import itertools
import json
import re

import pytest
import torch
from conftest import ROOT, load
from torch.utils.flop_counter import FlopCounterMode

from bench import operations, versions
from bench.sizes import MODES, PRECISIONS, SHAPES
from lab.cli import ToolError
from lab.study import by_side
from tools.tables import CELLS, TABLE

RUNS = sorted((ROOT / "results").glob("*/tiny_*.json"))
STUDIES = sorted((ROOT / "results").glob("*/*.json"))
EXERCISES = [
    pytest.param(path.parent.name, result, id=f"{path.parent.name}/{name}")
    for path in sorted((ROOT / "results").glob("*/exercises.json"))
    for name, result in json.loads(path.read_text())["runs"].items()
]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_committed_runs_finished_and_name_their_device(path):
    result = json.loads(path.read_text())
    assert result["status"] == "ok"
    assert result["environment"]["device_name"]
    assert (
        len(result["loss"]["curve"])
        == result["training"]["warmup_steps"] + result["training"]["num_steps"]
    )
    assert result["loss"]["final"] < 0.7 * result["loss"]["initial"]


@pytest.mark.parametrize(("device", "result"), EXERCISES)
def test_the_runs_behind_the_answers_finished_on_the_device_they_lie_under(device, result):
    assert result["status"] == "ok"
    if device == "cpu":
        assert result["environment"]["device"] == "cpu"
    else:
        assert device.partition("x")[0].upper() in result["environment"]["device_name"]
    assert result["loss"]["final"] < result["loss"]["initial"]


def test_the_headline_table_is_whole_and_of_one_run():
    study = json.loads((ROOT / "results/h100/headline.json").read_text())
    assert "H100" in study["environment"]["device_name"]
    rows = by_side(study["rows"], "shape", "precision", "mode")
    assert sorted(rows) == sorted(itertools.product(SHAPES, PRECISIONS, MODES))
    for (shape, precision, mode), row in rows.items():
        for version in ("V1", "V2"):
            argv = [*SHAPES[shape].argv, *PRECISIONS[precision], *MODES[mode]]
            assert (row[version]["argv"], len(row[version]["turns_ms"])) == (argv, study["rounds"])
        assert row["V2"]["per_step"] < row["V1"]["per_step"]


def rows_in(printed: str) -> list[dict[str, str]]:
    """The rows of Markdown tables, the cells that are not empty by their columns."""
    rows = []
    for table in re.findall(r"(?:^\|.*\n?)+", printed, re.MULTILINE):
        header, _, *lines = (
            [c.strip() for c in CELLS.split(line)[1:-1]] for line in table.splitlines()
        )
        cells = (zip(header, line, strict=True) for line in lines)
        rows += [{label: text for label, text in row if text not in ("", "-")} for row in cells]
    return rows


@pytest.mark.parametrize("device", sorted({path.parent for path in STUDIES}), ids=lambda d: d.name)
@pytest.mark.parametrize("program", [versions, operations], ids=lambda p: p.PROG)
def test_each_row_of_a_table_is_of_one_file(program, device, tmp_path):
    """What a study prints by itself has each row of the tables that all studies print."""
    alone = []
    for path in device.glob("*.json"):
        (tmp_path / path.stem).mkdir()
        (tmp_path / path.stem / path.name).symlink_to(path)
        with contextlib.suppress(ToolError):  # of other programs
            alone += rows_in(program.table(tmp_path / path.stem))
    try:
        rows = rows_in(program.table(device))
    except ToolError:
        rows = []
    assert len(rows) > (20 if device.name == "h100" else -1)
    assert not [row for row in rows if not any(row.items() <= one.items() for one in alone)]


def test_other_tables_on_pages_name_one_file():
    pages = [p for p in ROOT.glob("**/*.md") if not p.is_relative_to(ROOT / ".venv")]
    commands = [match[2] for page in pages for match in TABLE.finditer(page.read_text())]
    assert len(commands) > 12
    files = [set(re.findall(r"results/[\w/]+\.\w+", command)) for command in commands]
    assert not [command for command, named in zip(commands, files, strict=True) if len(named) > 1]


@pytest.mark.parametrize("script", ["tiny_llama_v1", "tiny_openfold_v1"])
def test_the_totals_in_architecture_are_counted(script):
    """Parameters, and GFLOP forward and of the whole step, at the default sizes on the meta
    device."""
    module, meta = load(script), torch.device("meta")
    args = module.parse_args(["--device", "cpu"])
    model = module.build_model(args, meta)
    batch = {
        name: value.to(meta)
        for name, value in module.make_batches(args, torch.device("cpu"), 1).next_batch().items()
    }
    with FlopCounterMode(display=False) as counter:
        loss = model(**batch)
        forward = counter.get_total_flops()
        loss.backward()
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    assert f"**{sum(parameter.numel() for parameter in model.parameters()):,}**" in text
    totals = re.compile(
        rf"\*\*{forward / 1e9:.3f}\*\* \| \*\*{counter.get_total_flops() / 1e9:.3f}\*\*"
    )
    assert totals.search(text)

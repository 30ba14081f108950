"""The committed result files: complete runs that name their device and learn."""

import contextlib
import json
import re

import pytest
import torch
from conftest import ROOT, load
from torch.utils.flop_counter import FlopCounterMode

from bench import operations, versions
from lab.cli import ToolError
from tools.tables import CELLS, TABLE

RUNS = sorted((ROOT / "results").glob("*/tiny_*.json"))
STUDIES = sorted((ROOT / "results").glob("*/*.json"))


def test_committed_runs_finished_where_they_lie_and_learn():
    runs = {path: json.loads(path.read_text()) for path in RUNS}
    for path in (ROOT / "results").glob("*/exercises.json"):
        runs |= {path / name: run for name, run in json.loads(path.read_text())["runs"].items()}
    assert len(runs) > 30
    for path, result in runs.items():
        loss, training, here = (result[name] for name in ("loss", "training", "environment"))
        device = path.relative_to(ROOT / "results").parts[0]
        assert result["status"] == "ok", path
        assert len(loss["curve"]) == training["warmup_steps"] + training["num_steps"], path
        assert loss["final"] < (0.7 if path in RUNS else 1.0) * loss["initial"], path
        named = here["device"] if device == "cpu" else here["device_name"].lower()
        assert device.partition("x")[0] in named, path


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
@pytest.mark.parametrize("program", [versions, operations], ids=lambda p: p.__name__)
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
    batch = module.make_batches(args, torch.device("cpu"), 1).next_batch()
    batch = {name: value.to(meta) for name, value in batch.items()}
    with FlopCounterMode(display=False) as counter:
        loss = model(**batch)
        forward = counter.get_total_flops()
        loss.backward()
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    assert f"**{sum(parameter.numel() for parameter in model.parameters()):,}**" in text
    whole = counter.get_total_flops() / 1e9
    assert f"**{forward / 1e9:.3f}** | **{whole:.3f}**" in text

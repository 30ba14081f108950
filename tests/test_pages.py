"""Pages for readers:

START.md shows what its programs measure, the tables of claims and of names name what exists.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from conftest import ROOT, captured, needs_compiler

from exercises.start import add_relu, attention_memory

PAGE = (ROOT / "docs/START.md").read_text()


def test_fused_attention_is_the_same_and_its_memory_grows_with_the_length_alone():
    q, k, v = torch.randn(3, attention_memory.HEADS, 40, attention_memory.HEAD_DIM)
    torch.testing.assert_close(
        attention_memory.fused(q, k, v), attention_memory.with_scores(q, k, v)
    )
    scores, fused = (
        [attention_memory.peak_bytes(way, length) for length in (512, 1024)]
        for way in (attention_memory.with_scores, attention_memory.fused)
    )
    # float32 scores, their softmax, a gradient
    assert scores[1] > 3 * attention_memory.HEADS * 1024**2 * 4
    assert scores[1] > 3.5 * scores[0]
    assert fused[1] < 3 * fused[0]


def test_the_page_shows_what_its_commands_printed_and_the_table_that_the_figure_draws():
    run = json.loads((ROOT / "results/cpu/start.json").read_text())
    assert sum(run["seconds"].values()) < 180
    for lines in run["printed"].values():
        assert not [line for line in lines if line not in PAGE and not line.startswith("drawn:")]
    for row in json.loads((ROOT / "results/cpu/attention_memory.json").read_text())["rows"]:
        mb = [f"{row[way] / 1e6:.1f} |" for way in ("scores", "fused")]
        assert any(
            line.startswith(f"| {row['length']} ") and all(n in line for n in mb)
            for line in PAGE.splitlines()
        )


@needs_compiler
def test_add_relu_predicts_by_bytes_then_measures(monkeypatch):
    status, printed, errors = captured(add_relu.main, ["--n", "1000", "--turns", "3"])
    assert (status, errors) == (0, "")
    assert "predicted by bytes: 1.67x" in printed
    assert "made 1 kernel, the results are equal" in printed
    assert "measured in 3 turns" in printed


def test_without_a_compiler_add_relu_says_so_in_one_line(monkeypatch):
    def refuse(*_: torch.Tensor) -> None:
        raise RuntimeError("no C++ compiler\nmany lines more")

    monkeypatch.setattr(add_relu, "one_kernel", refuse)
    status, printed, errors = captured(add_relu.main, ["--n", "1000"])
    assert status == 4
    assert errors == "add_relu.py: error: torch.compile does not work here (no C++ compiler)\n"
    assert "measured" not in printed


@pytest.mark.parametrize(
    "word", ["kernel", "host", "register", "stream", "graph", "GEMM", "turn", "program", "crop"]
)
def test_words_in_italics_are_in_the_table(word):
    text, _, table = PAGE.partition("## Words")
    assert f"*{word}" in text
    assert f"| {word} |" in table


def test_every_result_file_behind_a_claim_is_there():
    text = (ROOT / "docs/CLAIMS.md").read_text()
    files = set(re.findall(r"`([\w/.*]+\.(?:json|csv))`", text))
    assert len(files) > 10
    assert not [name for name in files if not [*(ROOT / "results/h100").glob(name)]]


def test_what_an_older_name_became_is_there():
    section = (ROOT / "docs/CLAIMS.md").read_text().partition("## Names of other editions")[2]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", section, re.MULTILINE)
    named = {word for _, here in rows for word in re.findall(r"[\w/.-]+\.(?:py|sh|md|txt)", here)}
    assert len(named) > 15
    assert not [
        name for name in named if not (ROOT / name).exists() and not (ROOT / "docs" / name).exists()
    ]

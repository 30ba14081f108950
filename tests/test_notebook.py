"""exercises/first_kernel.ipynb runs as it stands, and its outputs say whose they are."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
FILE = ROOT / "exercises/first_kernel.ipynb"


def printed(notebook) -> list[str]:
    """What each cell with code prints."""
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]


@pytest.fixture(scope="module")
def notebook():
    found = nbformat.read(FILE, as_version=4)
    nbformat.validate(found)
    return found


def test_it_has_twenty_cells_whose_outputs_are_an_h100s(notebook):
    assert len(notebook.cells) == 20
    said = [text for text in printed(notebook) if text]
    assert not said or re.match(r"These outputs are of NVIDIA H100", said[0])


def test_it_runs_in_the_folder_where_it_is_opened_and_its_solution_is_right(notebook):
    cells, place = notebook.cells, {"metadata": {"path": str(FILE.parent)}}
    solution = re.search(r"```python\n(.*?)```", cells[-1].source, re.DOTALL)[1]
    own_turn = cells[-2].source.partition("pass  # your code\n")[2]
    solved = nbformat.v4.new_code_cell(solution + own_turn)
    longer = {**notebook, "cells": [*cells, solved]}
    done = nbclient.NotebookClient(
        nbformat.from_dict(longer), timeout=300, resources=place
    ).execute()
    *_, wrong, not_yet, right = printed(done)
    assert "predicted: 1.67x" in "".join(printed(done))
    assert "the gradient of y is right" in wrong
    assert "the gradient of x is wrong" in wrong
    assert not_yet.startswith("not yet: the output is wrong")
    assert right == "right\n"

"""The tables of dev/bench/operations.py, from the result files of a device."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from typing_extensions import TypedDict

from dev.bench.version_tables import best_over, joined, read_lines
from fusion_lab.cli import ToolError
from fusion_lab.profile.kernels import CATEGORIES
from fusion_lab.records import Ceilings, Count, Number, Positive, Row, read_rows
from fusion_lab.show import Column, ended, render, side_columns
from fusion_lab.turns import speedup

OPERATIONS = ("attention", "triangle", "block", "causal", "optimizer")
OURS = ("V4", "V3", "triton")  # sides with our kernels: the newest is held against others


class Traffic(Row):
    gb: Positive  # that the operators of a step read and write


class Kernel(TypedDict):
    name: str
    category: str
    calls: Number
    us: Number


class WholeStep(Row):
    """A step by its kernels, beside a GEMM of its FLOPs and a copy of its bytes."""

    gemm_ms: Positive
    copy_ms: Positive
    over_reference: Positive
    kernels: list[Kernel]
    ceilings: Ceilings
    flop: Count
    bytes: Count | None


def memory_of(side: Mapping) -> str:
    """MB at the peak, and held for the backward pass; or how the side ended."""
    mb = (side[key] for key in ("extra_mb", "held_mb") if side.get(key) is not None)
    return " / ".join(dict.fromkeys(f"{value:.0f}" for value in mb)) or ended(side) or ""


def sides_tables(directory: Path, study: str) -> str:
    """Time of each side, then memory."""
    rows, sides = read_lines(directory / f"{study}.json")
    work = "a step" if study == "optimizer" else "forward + backward"
    times = [
        Column(f"{study}, {work}, warm L2", "name"),
        *side_columns("{}, us", sides, "us", ".0f", ends=True),
    ]
    memory = side_columns("{}", sides, memory_of)
    known = rows if any(column.of(row) for row in rows for column in memory) else []
    memory.insert(0, Column(f"{study}, MB at the peak / held", "name"))
    return joined(render(times, rows), render(memory, known))


def fastest_table(directory: Path) -> str:
    """Ours beside the fastest of all others, for each operation and size."""
    lines = []
    for study in OPERATIONS:
        rows, sides = read_lines(directory / f"{study}.json")
        ours = next((side for side in OURS if side in sides), "")
        others = [side for side in sides if side not in OURS]
        for row in rows:
            row["name"] = f"{study}, {row['name']}"
            row["ratio"], row["best"] = best_over(others, ours, row) or (None, None)
        lines += [row for row in rows if row["best"]]
    ours = [side for side in OURS if any(side in line for line in lines)]
    columns = [
        Column("ours and the fastest of the others", "name"),
        *side_columns("{}, us", ours, "us", ".0f"),
        Column("fastest other, us", lambda row: row[row["best"]]["us"], ".0f"),
        Column("which", "best", text=True),
        Column("other / ours", "ratio", ".2f", "x"),
    ]
    return render(columns, lines)


def step_tables(directory: Path) -> str:
    """The whole step beside its reference, the time of each category, the ten longest kernels."""
    keys = ("shape", "precision", "batch_ms")
    rows = read_rows(directory / "step.json", keys, keys, kind=WholeStep)
    for row in rows:
        row |= {"name": f"{row['shape']}, {row['precision']}", "spent": Counter()}
        for kernel in row["kernels"]:
            row["spent"][kernel["category"]] += kernel["us"]
    whole = [
        Column("whole step", "name"),
        Column("ms", "batch_ms", ".2f"),
        Column("in kernels, ms", lambda row: row["spent"].total() / 1e3, ".2f"),
        Column("FLOPs as a large GEMM, ms", "gemm_ms", ".2f"),
        Column("bytes as a copy, ms", "copy_ms", ".2f"),
        Column("step / both", "over_reference", ".2f", "x"),
    ]
    by_category = [Column("us per step", str)]
    by_category += [Column(row["name"], row["spent"].__getitem__, ".0f") for row in rows]
    categories = [name for name in CATEGORIES if any(name in row["spent"] for row in rows)]
    tables = [render(whole, rows), render(by_category, categories)]
    for row in rows:
        longest = [
            Column(row["name"], "name"),
            Column("what it does", "category", text=True),
            Column("calls", "calls", "g"),
            Column("us per step", "us", ".0f"),
            Column("of the step", lambda k, ms=row["batch_ms"]: k["us"] / ms / 10, ".1f", " %"),
        ]
        tables.append(render(longest, row["kernels"][:10]))
    return joined(*tables)


def llama_table(directory: Path) -> str:
    rows, sides = read_lines(directory / "llama.json")

    def milliseconds(side: Mapping) -> float | None:
        return side["us"] / 1e3 if "us" in side else None

    def over_first(name: str, row: Mapping) -> object:
        return speedup(row.get(name), row.get(sides[0])) or ""

    columns = [
        Column("whole step", "name"),
        *side_columns("{}, ms", sides, milliseconds, ".2f", ends=True),
        *(
            Column(f"{name} / {sides[0]}", partial(over_first, name), ".2f", "x")
            for name in sides[1:]
        ),
        *side_columns("{}, MB", sides, "extra_mb", ".0f", ends=True),
    ]
    return render(columns, rows)


def traffic_table(directory: Path) -> str:
    rows, _ = read_lines(directory / "traffic.json", kind=Traffic)

    def left(row: Mapping) -> float | None:
        return 100 * row["V4"]["gb"] / row["V1"]["gb"] if "V4" in row else None

    columns = [
        Column("GB read and written per step", "name"),
        *side_columns("{}", ("V1", "V2", "V3", "V4"), "gb", ".2f"),
        Column("V4 of V1", left, ".0f", " %"),
    ]
    return render(columns, rows)


def table(directory: Path) -> str:
    tables = [sides_tables(directory, study) for study in OPERATIONS]
    of_steps = fastest_table, step_tables, llama_table, traffic_table
    found = joined(*tables, *(tables_of(directory) for tables_of in of_steps))
    if not found:
        raise ToolError(f"{directory}: no result files of these studies")
    return found

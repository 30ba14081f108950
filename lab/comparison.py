"""Runs side by side: the numbers of each, beside those of a baseline."""

from __future__ import annotations

from collections.abc import Sequence

from lab.results import Run
from lab.show import Column, ended, rate, render

PHASES = ("forward", "backward", "optimizer", "graph")
MEASURED = {
    "samples_per_sec": ("timing", "samples_per_sec"),
    "batch_ms": ("timing", "batch_ms"),
    **{f"{phase}_ms": ("timing", f"{phase}_ms") for phase in PHASES},
    "compilation_ms": ("timing", "compilation_overhead_ms"),
    "peak_mb": ("memory", "peak_mb"),
    "kernels_per_step": ("kernels", "per_step"),
    "host_launches": ("kernels", "host_launches"),
    "final_loss": ("loss", "final"),
    "processes": ("training", "processes"),
}


def beside(run: Run, baseline: Run) -> dict:
    """The numbers of a run as a row, None where there is none or the run did not finish."""
    row: dict = {
        "configuration": run.name,
        "script": run.result.get("script"),
        "status": run.status,
    }
    row |= {key: run.number(*place) for key, place in MEASURED.items()}

    def ratio(key: str) -> float | None:
        base = baseline.number(*MEASURED[key])
        return row[key] / base if row[key] is not None and base else None

    speedup, memory = ratio("samples_per_sec"), ratio("peak_mb")
    row["speedup"] = speedup
    row["processes"] = row["processes"] or 1  # files of an earlier harness do not say
    alone = baseline.number("training", "processes") or 1
    row["scaling_efficiency_percent"] = speedup and 100 * speedup * alone / row["processes"]
    row["memory_change_percent"] = None if memory is None else 100 * (memory - 1)
    return {**row, "path": str(run.path)}


def runs_table(runs: Sequence[Run], rows: Sequence[dict], times: bool = True) -> str:
    """The rows of these runs in Markdown, without columns that no run has anything in.

    Without `times` only memory, kernels and the loss, which are the same in every run.
    """
    units = sorted(
        {run.result["kernels"]["unit"] for run in runs if run.result["kernels"].get("unit")}
    )
    scaled = len({row["processes"] for row in rows if row["speedup"]}) > 1

    def where_measured(*columns: Column) -> list[Column]:
        return [column for column in columns if any(column.of(row) is not None for row in rows)]

    of_times = [
        Column("samples/sec", lambda row: ended(row) or rate(row["samples_per_sec"])),
        Column("speed-up", "speedup", ".2f", "x"),
        *[Column("scaling efficiency", "scaling_efficiency_percent", ".1f", " %")] * scaled,
        Column("ms per step", "batch_ms", ".2f"),
        *where_measured(*(Column(f"{phase} ms", f"{phase}_ms", ".2f") for phase in PHASES)),
        *where_measured(Column("compilation ms", "compilation_ms", ".0f")),
    ]
    peak = Column("peak MB", "peak_mb", ".1f")
    columns = [
        Column("configuration", "configuration"),
        *(of_times if times else []),
        peak if times else peak.or_ended(),
        Column("memory change", "memory_change_percent", "+.1f", " %"),
        Column(f"{' or '.join(units) or 'kernels'} per step", "kernels_per_step", ".10g"),
        Column("final loss", "final_loss", ".4f"),
    ]
    return render(columns, rows)

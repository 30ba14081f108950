"""Side by side: rows of a study beside the first of them, and runs beside a baseline."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import partial

from lab.results import Run
from lab.script import load_script, script_arguments
from lab.show import Column, ended, rate, render
from lab.study import Part, as_rows
from lab.turns import graph_of, in_turns, ratios, short_run, speeds, spread

Sides = dict[str, tuple[str, list[str]]]  # script and arguments of each side, by its name

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


def versions_part(names: dict, sides: Sides, rounds: int, **more: object) -> Part:
    """A part of a study: `versions_in_turns` of these sides, as graphs where there is a GPU.

    What does not fit in the arguments of a script is said now, before anything is measured.
    """
    sides = {name: (script, graph_of(argv)) for name, (script, argv) in sides.items()}
    for script, argv in sides.values():  # one that is no file is loaded already
        module = sys.modules[script] if script in sys.modules else load_script(f"{script}.py")
        script_arguments(module, argv, None)
    return names, partial(versions_in_turns, sides, rounds, **more)


def versions_in_turns(
    sides: Sides, rounds: int, losses: bool = True, more: Sequence[str] = ()
) -> list[dict]:
    """A row for each side of `in_turns`; with `losses` it has the last loss of a run by itself, for
    which `more` stands before the arguments of the side."""
    rows = in_turns(sides, rounds)
    for name, (script, argv) in sides.items() if losses else ():
        if "error" not in rows[name]:
            try:
                result = short_run(script, [*more, *argv])
                rows[name]["final_loss"] = result["loss"].get("final")
                if result["status"] == "oom":
                    rows[name] |= {"status": "oom", "error": result["error"]}
            except Exception as error:  # a row, as in turns
                rows[name] |= {"status": "failed", "error": str(error).partition("\n")[0]}
    return as_rows(rows)


def beside_first(rows: Iterable[dict]) -> list[dict]:
    """Rows with their rates, and what they are beside the first of them: `over_first`, how many
    times as fast, with the range of turns where they took turns, and parts of memory and loss.

    None where there is nothing to compare, as in the first.
    """
    first, *others = rows
    found = []
    for row in (first, *others):

        def ratio(key: str, row: dict = row) -> float | None:
            known = row is not first and row.get(key) and first.get(key)
            return row[key] / first[key] if known else None

        turns = row is not first and "turns_ms" in row and "turns_ms" in first
        over = ratios(first, row) if turns else []
        slower, loss = ratio("batch_ms"), ratio("final_loss")
        beside = {
            "over_first": statistics.median(over) if over else slower and 1 / slower,
            "over_first_in_turns": spread(over) if over else None,
            "memory_of_first": ratio("peak_mb"),
            "loss_beside_first": None if loss is None else loss - 1,
        }
        found.append({**row, **(speeds(row) if "turns_ms" in row else {}), **beside})
    return found


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

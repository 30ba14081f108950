"""The tables of dev/bench/versions.py, from the result files of a device."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import Formatter

from dev.bench.several_gpus import scaling_tables
from dev.bench.sizes import ALL_VERSIONS, MODES, VERSIONS, script_of
from fusion_lab.cli import ToolError
from fusion_lab.profile.kernels import CATEGORIES
from fusion_lab.records import Profile, Row, read, read_rows
from fusion_lab.runs import of_study
from fusion_lab.script import load_script
from fusion_lab.show import Column, render, side_columns
from fusion_lab.study import by_side
from fusion_lab.sweep import worth_table
from fusion_lab.turns import speedup

FINISHED = ("batch_ms", "turns_ms", "per_step")  # what a side has that finished
FASTEST = {"tiny_llama": "fastest", "tiny_openfold": "fastest_openfold"}  # file of each model


class Trunk(Row):
    checkpointed: bool  # with --checkpoint-blocks


def read_lines(
    path: Path,
    name: str = "{shape}, {precision}",
    column: str = "{side}",
    measured: Iterable[str] = (),
    kind: type = Row,
) -> tuple[list[dict], list[str]]:
    """The rows of a study as lines of a table, and what its columns are called: rows of the same
    `name` are one line, in which each stands under its `column`. All have what is `measured`."""
    keys = [key for _, key, *_ in Formatter().parse(name + column) if key]
    lines, columns = {}, {}
    for row in read_rows(path, (*keys, *measured), measured, kind=kind):
        place, label = name.format(**row), column.format(**row)
        lines.setdefault(place, {"name": place})[label] = row
        columns[label] = None
    return [*lines.values()], [*columns]


def over(before: str, after: str, label: str) -> Column:
    return Column(label, lambda sides: speedup(sides.get(before), sides.get(after)), ".2f", "x")


def best_over(
    others: Iterable[str], ours: str, sides: Mapping[str, dict]
) -> tuple[float, str] | None:
    """How many times as long the fastest of the others takes, and its name; None without both."""
    there = {name: sides[name] for name in others if name in sides}
    times = {name: row.get("batch_ms") or row.get("us") for name, row in there.items()}
    best = min(filter(times.get, times), key=times.get, default=None)
    ratio = speedup(sides.get(best), sides.get(ours))
    return (ratio, best) if ratio else None


def best_column(label: str, others: Iterable[str], ours: str) -> Column:
    def value(sides: Mapping[str, dict]) -> str | None:
        best = best_over(others, ours, sides)
        return best and "{:.2f}x ({})".format(*best)

    return Column(label, value)


def share_table(directory: Path) -> str:
    """What the kernels of a step do, a row for each profile of run_pytorch_profiler.py."""
    profiles = [read(Profile, path) for path in sorted(directory.glob("profile_tiny_*.json"))]
    columns = [Column("share of kernel time", "script"), Column("ms", "ms_per_step", ".2f")]

    def share(category: str, profile: Mapping) -> float | None:
        return profile["categories"].get(category, {}).get("percent")

    for name in CATEGORIES:
        if any(name in profile["categories"] for profile in profiles):
            columns.append(Column(name, partial(share, name), ".1f", " %"))
    return render(columns, profiles)


def versions_of(path: Path, *keys: str) -> dict[tuple, dict[str, dict]]:
    """The sides of a study of versions, all of which finished, by shape, precision and keys."""
    names = ("shape", "precision", *keys)
    rows = read_rows(path, (*names, "side", *FINISHED), FINISHED)
    return by_side(rows, *names)


def headline_tables(path: Path) -> str:
    """Milliseconds per step of each size, precision and mode, ratios as graphs; kernels, memory."""
    lines, there = read_lines(path, column="{mode} {side}", measured=FINISHED)

    def columns(modes: Iterable[str], key: str, form: str = "", label: str = "{}") -> list[Column]:
        names = (f"{mode} {version}" for mode, version in itertools.product(modes, VERSIONS))
        return side_columns(label, [name for name in names if name in there], key, form)

    times = columns(MODES, "batch_ms", ".2f")
    times += [
        over(f"graph {before}", f"graph {after}", f"{after} over {before}, graph")
        for before, after in itertools.pairwise(VERSIONS)
        if f"graph {after}" in there
    ]
    # A graph replays what its mode launches.
    kernels = columns(("eager", "compiled"), "per_step")
    kernels = kernels or columns(("graph", "compiled graph"), "per_step")
    peaks = columns(("eager", "graph", "compiled graph"), "peak_mb", ".0f", "{}, MB")
    title = "kernels per step, then peak memory in MB"
    return joined(
        render([Column("ms per step", "name"), *times], lines),
        render([Column(title, "name"), *kernels, *peaks], lines),
    )


def joined(*tables: str) -> str:
    """Tables below each other, without those that have no rows."""
    return "\n\n".join(filter(None, tables))


def as_graphs(directory: Path) -> dict[tuple, dict[str, dict]]:
    """The versions as graphs by shape and precision, of the study of all or else that of V1 to
    V3."""
    older = versions_of(directory / "headline_v3.json", "mode")
    rows = {tuple(place): sides for (*place, mode), sides in older.items() if mode == "graph"}
    return rows | versions_of(directory / "overview.json")


def model_table(directory: Path, model: str) -> str:
    """Of a model, as graphs: ms of each version, its kernels and memory."""
    rows = [
        {"name": f"{shape.removeprefix(f'{model}, ')}, {precision}", **sides}
        for (shape, precision), sides in as_graphs(directory).items()
        if sides["V1"]["model"] == model
    ]

    def each(key: str, row: Mapping[str, dict]) -> str:
        return " / ".join(f"{row[name][key]:.0f}" for name in ("V1", "V3", "V4") if name in row)

    columns = [
        Column(model, "name"),
        *side_columns("{}, ms", ALL_VERSIONS, "batch_ms", ".2f"),
        over("V1", "V3", "V3 over V1"),
        over("V3", "V4", "V4 over V3"),
        Column("kernels, V1 / V3 / V4", partial(each, "per_step")),
        Column("peak MB, V1 / V3 / V4", partial(each, "peak_mb")),
    ]
    return render(columns, rows)


def overview_table(directory: Path) -> str:
    """Milliseconds and peak GB of a step of each version, in bf16 as a graph."""

    def cost(side: Mapping) -> str:
        ms, mb = side.get("batch_ms"), side.get("peak_mb")
        return f"{ms:#.3g} ms<br>{mb / 1e3:.{2 if mb < 1e3 else 1}f} GB" if ms else ""

    rows = [
        {"name": shape, **sides}
        for (shape, precision), sides in as_graphs(directory).items()
        if precision == "bf16"
    ]
    columns = [Column("bf16, as graphs", "name"), *side_columns("{}", ALL_VERSIONS, cost)]
    return render(columns, rows)


COMPILED = [f"{version} compiled" for version in ALL_VERSIONS]


def fastest_table(directory: Path, model: str) -> str:
    """Milliseconds per step of V4 and the others, the best compiled one's over V4's, memory."""
    lines, names = read_lines(directory / f"{FASTEST[model]}.json", measured=FINISHED)
    columns = [
        Column(f"{model} as graphs", "name"),
        *side_columns("{}, ms", names, "batch_ms", ".2f"),
        *([best_column("best compiled / V4", COMPILED, "V4")] if {*names} & {*COMPILED} else []),
        *side_columns("{}, MB", names, "peak_mb", ".0f"),
    ]
    return render(columns, lines)


def trunk_table(directory: Path) -> str:
    """Milliseconds per step and peak memory of each side, without and with checkpoints."""
    path = directory / "trunk.json"
    lines, _ = read_lines(path, "{shape}, {side}", "{checkpointed}", kind=Trunk)
    columns = [Column("48 blocks, bf16", "name")]
    for label, key in (("ms", "batch_ms"), ("MB", "peak_mb")):
        columns += side_columns(label, ["False"], key, ".0f", ends=True)
        columns += side_columns(f"{label}, checkpointed", ["True"], key, ".0f", ends=True)
    return render(columns, lines)


def flags_named(side: str) -> list[str]:
    """['x'] of 'only x' and of 'all but x', none of 'all' and 'none'."""
    return re.findall(r"^(?:only|all but) (.+)", side)


def ablation_tables(directory: Path, script: str) -> str:
    """What is gained by each set of a version's fusions, and what each costs if it is left out;
    without the fusions that are no flag of it any longer."""
    path = directory / f"ablation_{script}.json"
    rows = read_rows(path, ("precision", "side", "on"))
    flags = {flag for flag, *_ in load_script(f"{script}.py").FUSIONS} if rows else ()
    rows = [row for row in rows if all(flag in flags for flag in flags_named(row["side"]))]
    shapes = dict.fromkeys(row.get("shape", "") for row in rows)
    tables = [sets_table(script, shape, rows) for shape in shapes]
    runs = of_study(path, {"environment": {}, "rows": rows})
    return joined(*tables, *([worth_table(runs)] if runs else []))


def sets_table(script: str, shape: str, rows: Iterable[Mapping]) -> str:
    """Kernels, time and speed-up over none of each set of fusions, in each precision."""
    lines: dict[str, dict] = {}
    for row in sorted(rows, key=lambda row: len(row["on"])):
        if row.get("shape", "") == shape:
            line = lines.setdefault(row["side"], {"name": row["side"]})
            line.setdefault(row["precision"], row)
    precisions = dict.fromkeys(key for line in lines.values() for key in line if key != "name")
    columns = [Column(", ".join(filter(None, (script, shape.partition(", ")[2]))), "name")]
    for precision in precisions:
        if any(line.get(precision, {}).get("per_step") for line in lines.values()):
            columns += side_columns("{} kernels", [precision], lambda row: row.get("per_step"))
        columns += side_columns("{} ms per step", [precision], "batch_ms", ".2f", ends=True)
        gain = "speedup", ".2f"
        columns += [
            replace(column, unit="x")
            for column in side_columns("{} speed-up", [precision], *gain, ends=True)
        ]
    return render(columns, [*lines.values()])


ABLATIONS = [script_of(model, version) for version in ALL_VERSIONS[1:] for model in FASTEST]
OF_ABLATIONS = {
    f"ablation_{script}": partial(ablation_tables, script=script) for script in ABLATIONS
}
TABLES: dict[str, Callable[[Path], str]] = {
    "headline": lambda where: headline_tables(where / "headline.json"),  # V1 and V2, all modes
    "versions": lambda where: headline_tables(where / "headline_v3.json"),  # V1 to V3, as graphs
    "ablation": lambda where: joined(*(tables(where) for tables in OF_ABLATIONS.values())),
    "overview": overview_table,
    "llama": partial(model_table, model="tiny_llama"),
    "openfold": partial(model_table, model="tiny_openfold"),
    "fastest": lambda where: joined(*(fastest_table(where, model) for model in FASTEST)),
    "trunk": trunk_table,
    "share": share_table,
    "scaling": scaling_tables,
}


def table(directory: Path, names: Iterable[str] = TABLES) -> str:
    """Tables of one device as Markdown: those of them whose result files lie in the directory."""
    tables = []
    for name in names:
        try:
            tables.append((TABLES | OF_ABLATIONS)[name](directory))
        except (LookupError, TypeError, ValueError) as error:
            what = f"rows of the table {name} do not belong together ({error!r})"
            raise ToolError(f"{directory}: {what}") from error
    if not any(tables):
        raise ToolError(f"{directory}: no result files of these measurements")
    return joined(*tables)

"""The tables of bench/versions.py, from the result files of a device."""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from string import Formatter

from bench.several_gpus import ddp_table, scaling_tables
from bench.sizes import ALL_VERSIONS, MODES, VERSIONS, script_of
from lab.cli import ToolError
from lab.profile.kernels import CATEGORIES
from lab.records import FLAG, NULL, NUMBER, TEXT, WHOLE, Profile, Row, read
from lab.script import load_script
from lab.show import Column, render, side_columns
from lab.study import (
    Ablated,
    by_shape,
    by_side,
    costs_table,
    read_rows,
    read_study,
    sets_table,
    unit_of,
)
from lab.turns import speedup

FINISHED = ("batch_ms", "turns_ms", "per_step")  # what a side has that finished
PADDED = ", padded"  # at the end of a side's name
FASTEST = {"tiny_llama": "fastest", "tiny_openfold": "fastest_openfold"}  # file of each model


Trunk = Row | {"checkpointed": FLAG}  # with --checkpoint-blocks
Layer = Row | {"kernels": WHOLE, "error_of_output": NUMBER}  # of V4, in one of several ways
Errors = {  # how far a side is from float64, or why it failed
    "outputs?": (NUMBER, NULL),
    "loss?": (NUMBER, NULL),
    "parameters?": {"*": NUMBER},
    "lines?": {"*": [(NUMBER, TEXT)]},  # the worst row or column of each, and which
    "equal_bits?": (FLAG, NULL),
    "failed?": TEXT,
}
Compared = Row | {"subject": TEXT, "case": TEXT, "precision": TEXT, "sides": {"*": Errors}}


def read_lines(
    path: Path,
    name: str = "{shape}, {precision}",
    column: str = "{side}",
    measured: Iterable[str] = (),
    kind: dict = Row,
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


def untuned_table(directory: Path) -> str:
    """Milliseconds per step and peak memory of each side, and its time over V4's."""
    lines, names = read_lines(directory / "untuned.json")

    def over_v4(name: str, sides: Mapping[str, dict]) -> float | None:
        ms, v4 = (sides.get(side, {}).get("batch_ms") for side in (name, "V4"))
        return ms / v4 if ms and v4 else None

    columns = [
        Column("as graphs, one after the other", "name"),
        *side_columns("{}, ms", names, "batch_ms", ".2f", ends=True),
        *(Column(f"{name} / V4", partial(over_v4, name), ".2f", "x") for name in names[1:]),
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


def inference_table(directory: Path) -> str:
    """Microseconds of a layer in each way, and how many kernels these are."""
    name = "batch size {batch_size}, length {seq_len}"
    lines, ways = read_lines(directory / "inference.json", name, measured=["us"], kind=Layer)
    columns = [Column("one layer, bf16", "name")]
    for way in ways:
        label = f"{{}}, us ({lines[0][way]['kernels']} kernels)"
        columns += side_columns(label, [way], "us", ".1f")
    return render(columns, lines)


def flags_named(side: str) -> list[str]:
    """['x'] of 'only x' and of 'all but x', none of 'all' and 'none'."""
    return re.findall(r"^(?:only|all but) (.+)", side)


def ablation_tables(directory: Path, script: str) -> str:
    """What is gained by each set of a version's fusions, and what each costs if it is left out;
    without the fusions that are no flag of it any longer."""
    rows = read_rows(directory / f"ablation_{script}.json", ("precision", "side"), kind=Ablated)
    flags = {flag for flag, *_ in load_script(f"{script}.py").FUSIONS} if rows else ()
    rows = [row for row in rows if all(flag in flags for flag in flags_named(row["side"]))]
    tables = [
        sets_table(", ".join(filter(None, (script, shape.partition(", ")[2]))), same)
        for shape, same in by_shape(rows).items()
    ]
    return joined(*tables, costs_table(script, rows) if rows else "")


def padding_table(directory: Path) -> str:
    """Milliseconds per step of each version, and how much longer it takes with masks."""

    def longer(version: str, sides: Mapping[str, dict]) -> float:
        return 100 * speedup(sides[f"{version}{PADDED}"], sides[version]) - 100

    lines, sides = read_lines(directory / "padding.json", measured=FINISHED)
    names = sorted(name for name in sides if PADDED not in name)
    columns = [
        Column("as graphs", "name"),
        *side_columns("{}, ms", names, "batch_ms", ".2f"),
        *(Column(f"{name} padded", partial(longer, name), "+.1f", " %") for name in names),
    ]
    return render(columns, lines)


def counts_table(directory: Path) -> str:
    """Kernels per step at each batch size."""
    name, measured = "{script} {shape}", ("unit", "per_step")
    lines, sizes = read_lines(directory / "counts.json", name, "{batch_size}", measured)
    unit = unit_of(line[size] for line in lines for size in sizes)
    counts = side_columns("batch size {}", sizes, "per_step")
    return render([Column(f"{unit} per step", "name"), *counts], lines)


def memory_table(directory: Path) -> str:
    """Peak memory of TinyLlama V2 at each length."""
    lines, lengths = read_lines(directory / "memory.json", "{side}", "{seq_len}")
    names = {"scores": "materialised scores, MB", "flash": "flash attention, MB"}
    columns = [Column("sequence length", lambda line: names[line["name"]])]
    columns += side_columns("{}", lengths, "peak_mb", ".0f", ends=True)
    return render(columns, lines)


def furthest(sides: dict[str, dict]) -> str:
    """The parameter in whose gradient one of our versions is furthest above V1, by their worst rows
    and columns."""
    before = sides["V1"]["lines"]
    ours = [side for side, found in sides.items() if side.startswith("V") and "lines" in found]
    ratios = [
        (sides[side]["lines"][name][0] / worst, side, name + sides[side]["lines"][name][1])
        for side in ours
        for name, (worst, _) in before.items()
        if worst and side != "V1"
    ]
    ratio, side, name = max(ratios)
    return f"{ratio:.1f}x {side}: {name}"


def worst(found: dict | None) -> str:
    """Of a side: its worst errors of outputs, of parameters, and of their rows and columns."""
    if found is None or "failed" in found:
        return "failed" if found else ""
    line = max(error for error, _ in found["lines"].values())
    errors = found["outputs"], max(found["parameters"].values()), line
    return " / ".join(f"{error:.1e}" for error in errors)


def accuracy_table(directory: Path) -> str:
    """A line for each subject, case and precision; then whether bits were equal."""
    if not (path := directory / "accuracy.json").exists():
        return ""
    study, equal, lines = read_study(path, kind=Compared), defaultdict(set), []
    for row in study["rows"]:
        name = f"{row['subject']}, {row['case']}, {row['precision']}"
        errors = {side: worst(found) for side, found in row["sides"].items()}
        lines.append({"name": name, "furthest": furthest(row["sides"]), **errors})
        for side, found in row["sides"].items():
            equal[side].add(found.get("equal_bits"))
    answers = {s: "no" if False in a else "yes" if True in a else "" for s, a in equal.items()}
    asked = f"equal bits in {study.get('runs')} runs, bf16"
    lines.append({"name": asked, "furthest": "", **answers})
    columns = [
        Column("outputs / worst parameter / worst row or column", "name"),
        *(Column(side, lambda line, side=side: line.get(side, "")) for side in equal),
        Column("furthest above V1", "furthest"),
    ]
    return render(columns, lines)


ABLATIONS = [script_of(model, version) for version in ALL_VERSIONS[1:] for model in FASTEST]
OF_ABLATIONS = {
    f"ablation_{script}": partial(ablation_tables, script=script) for script in ABLATIONS
}
TABLES: dict[str, Callable[[Path], str]] = {
    "headline": lambda where: headline_tables(where / "headline.json"),  # V1 and V2, all modes
    "versions": lambda where: headline_tables(where / "headline_v3.json"),  # V1 to V3, as graphs
    "ablation": lambda where: joined(*(tables(where) for tables in OF_ABLATIONS.values())),
    "padding": padding_table,
    "overview": overview_table,
    "llama": partial(model_table, model="tiny_llama"),
    "openfold": partial(model_table, model="tiny_openfold"),
    "inference": inference_table,
    "fastest": lambda where: joined(*(fastest_table(where, model) for model in FASTEST)),
    "untuned": untuned_table,
    "trunk": trunk_table,
    "share": share_table,
    "memory": memory_table,
    "counts": counts_table,
    "scaling": scaling_tables,
    "ddp": ddp_table,
}
# only where they are named: a long one, and those that come together
SINGLE = {"accuracy": accuracy_table, **OF_ABLATIONS}


def table(directory: Path, names: Iterable[str] = TABLES) -> str:
    """Tables of one device as Markdown: those of them whose result files lie in the directory."""
    tables = []
    for name in names:
        try:
            tables.append((TABLES | SINGLE)[name](directory))
        except (LookupError, TypeError, ValueError) as error:
            what = f"rows of the table {name} do not belong together ({error!r})"
            raise ToolError(f"{directory}: {what}") from error
    if not any(tables):
        raise ToolError(f"{directory}: no result files of these measurements")
    return joined(*tables)

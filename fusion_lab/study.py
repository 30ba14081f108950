"""Studies: rows that are measured one after the other, kept from the first on, and read again; and
what they show: versions side by side, and what each fusion is worth alone, last and on the whole.

In an ablation a set is what is on of the fusions that vary. Sets take turns in groups, each of
which also has none, all, and all a second time: how far that control is from all tells which
differences are none. Gains are ratios of times in the same turn, above 1 where time is saved.
"""

import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from types import ModuleType

from fusion_lab.cli import Parser, ToolError
from fusion_lab.files import read_json, write_text
from fusion_lab.host import environment
from fusion_lab.provenance import watched
from fusion_lab.records import NOTHING, NULL, POSITIVE, TEXT, WHOLE, Row, checked_study, read_rows
from fusion_lab.script import interpret_without_gpu, load_script, script_arguments, script_named
from fusion_lab.show import Column, ended, rate, render
from fusion_lab.turns import graph_of, in_turns, on_gpu, ratios, short_run, speed, speedup, spread

# what names a row, and what measures the rest of it, or of several
Part = tuple[dict, Callable[[], dict | list[dict]]]
Sides = dict[str, tuple[str, list[str]]]  # script and arguments of each side, by its name
GROUP = 8  # sides that are in memory together
SMALLEST_GROUP = 4  # none, all, the control and one more
TIMES = ("batch_ms", "turns_ms")  # what a row has that was measured in turns
CONTROL = "all again"  # all of the fusions, built and captured a second time
Set = tuple[str, ...]  # the fusions that are on
Gains = dict[frozenset, dict[tuple[int, int], float]]  # over none, of a set by seed and turn


Ablated = Row | {  # a set of fusions, as a side of a group that took turns
    "seed?": WHOLE,
    "group?": WHOLE,
    "on": [TEXT],  # of those that vary
    "speedup": (POSITIVE, NULL),  # over the side `none`
    "*": NOTHING,
}


def check_failed(rows: Iterable[dict]) -> None:
    """ToolError if one of these runs failed; out of memory is a result."""
    if failed := [row for row in rows if row.get("status") == "failed"]:
        command = " ".join([failed[0]["script"], *failed[0].get("argv", ())])
        first = f"first {command}: {failed[0]['error']}"
        raise ToolError(f"{len(failed)} of the runs failed, {first}", status=1)


def measure_study(
    path: Path, parts: Iterable[Part], keep: bool = False, **settings: object
) -> list[dict]:
    """Measure what is not measured yet, and write the rows with what they were measured on; of
    several processes, one.

    Rows are in NAME.partial.json until the last one is there, so that an earlier result is replaced
    by a whole one. The same command goes on from there after an interruption; with other settings,
    or on another device, it is refused. To `keep` an earlier result is to treat it in the same way:
    what it has is not measured again. On a GPU each session leaves its `provenance`: see `watched`.
    """
    import torch

    if path.suffix != ".json":
        raise ToolError(f"{path}: the name of a study must end in .json")
    interpret_without_gpu()
    device = torch.device("cuda" if on_gpu(settings.get("argv", ())) else "cpu")
    is_first = os.environ.get("RANK", "0") == "0"
    content = {"environment": environment(device)}
    content |= json.loads(json.dumps(settings))  # as they are read back
    unfinished, rows, sessions = path.with_suffix(".partial.json"), [], []
    for file in (path, unfinished) if keep else (unfinished,):
        if file.exists():
            earlier = checked_study(read_json(file), file)
            rows, sessions = earlier.pop("rows"), earlier.pop("provenance", [])
            if earlier != content:
                way_out = "name another file, or delete it" if keep else "delete it first"
                reason = "begun with other settings or on another device"
                raise ToolError(f"{file}: {reason}; {way_out}")

    def write(file: Path) -> None:
        if is_first:
            whole = {**content, **({"provenance": sessions} if sessions else {}), "rows": rows}
            write_text(file, json.dumps(whole, indent=1) + "\n", replace=True)

    seconds = []
    with watched() if device.type == "cuda" else contextlib.nullcontext() as session:
        sessions += [session] if session else []
        write(unfinished)  # a place where nothing can be written shows before anything is measured
        for number, (names, measure) in enumerate(parts):
            if any(all(row.get(key) == value for key, value in names.items()) for row in rows):
                continue
            if is_first:
                # what comes next may follow from the rows
                whole = len(parts) if isinstance(parts, Sized) else None
                words = (
                    f"{k} {' '.join(v) if isinstance(v, list) else v}" for k, v in names.items()
                )
                line = f"{number + 1}{f' of {whole}' if whole else ''}: {', '.join(words)}"
                if whole and seconds:
                    left = math.ceil(statistics.fmean(seconds) * (whole - number))
                    line += f"; about {left} s left"
                print(line, file=sys.stderr)
            started = time.monotonic()
            with contextlib.redirect_stdout(sys.stderr):  # the lines of the runs
                found = measure()
            seconds.append(time.monotonic() - started)
            rows += [names | row | names for row in (found if isinstance(found, list) else [found])]
            write(unfinished)
    write(path)
    if is_first:
        unfinished.unlink(missing_ok=True)
    return rows


def chosen(parts: Sequence[Part], words: Sequence[str]) -> list[Part]:
    """The parts whose names have one of the words wherever a word can stand; ToolError for a word
    that stands nowhere."""
    places = {
        value: key for names, _ in parts for key, value in names.items() if isinstance(value, str)
    }
    if unknown := [word for word in words if word not in places]:
        there = ", ".join(map(repr, places))
        raise ToolError(f"no part of this suite is of {unknown[0]!r}; there are {there}")
    keys = {places[word] for word in words}
    return [part for part in parts if all(part[0][key] in words for key in keys)]


def by_side(rows: Iterable[dict], *keys: str) -> dict[tuple, dict[str, dict]]:
    """Rows that took turns, under the names of their sides, for each of the values that they share
    of these keys."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), {})[row["side"]] = row
    return groups


def unit_of(rows: Iterable[dict]) -> str:
    """What is counted per step: kernels, or operator calls on a CPU."""
    return next((row["unit"] for row in rows if row.get("unit")), "kernels")


def as_rows(sides: Mapping[str, dict]) -> list[dict]:
    """What was measured of each side as rows that have its name."""
    return [{"side": name, **row} for name, row in sides.items()]


def study_asked_for(table: Path | None, argv: Sequence[str]) -> Path | None:
    """The study that --table names; ToolError if arguments of a script are beside it."""
    if table and argv:
        reason = "--table measures nothing, so it takes no arguments of a script"
        raise ToolError(f"{reason}: {' '.join(argv)}")
    return table


def add_study(parser: Parser, rounds: int, sides: str, default: str) -> None:
    """Add the options of a program that measures a study, or prints the tables of one."""
    parser.add_count("--rounds", rounds, f"turns of each {sides}")
    parser.add_path("--output", "FILE.json", f"the study (default: {default} here)")
    parser.add_path("--table", "FILE.json", "measure nothing, print the tables of this study")


def heading(study: dict, script: str) -> str:
    """What was measured, on what and how, in a line above the tables of a study."""
    environment, given = study["environment"], " ".join([script, *study.get("argv", [])])
    where = f"{environment.get('device_name')}, PyTorch {environment.get('torch')}"
    return f"{given} on {where}, {study.get('rounds')} turns"


# --- versions


def versions_part(names: dict, sides: Sides, rounds: int, **more: object) -> Part:
    """A part: versions in turns, as graphs on a GPU. What does not fit their arguments is said
    now."""
    sides = {name: (script, graph_of(argv)) for name, (script, argv) in sides.items()}
    for script, argv in sides.values():
        script_arguments(script_named(script), argv, None)
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
    """Rows with their rates, and what they are beside the first: `over_first`, how many times as
    fast, with the range of turns, and parts of memory and loss; None where there is nothing to
    compare."""
    first, *others = rows
    found = []
    for row in (first, *others):
        both = first if row is not first else {}  # what there is to compare with
        slower, memory, loss = (
            row[key] / both[key] if row.get(key) and both.get(key) else None
            for key in ("batch_ms", "peak_mb", "final_loss")
        )
        beside = {
            "samples_per_sec": speed(row) or row.get("samples_per_sec"),
            "over_first": speedup(both, row) or (slower and 1 / slower),
            "over_first_in_turns": range_of(ratios(both, row)),
            "memory_of_first": memory,
            "loss_beside_first": None if loss is None else loss - 1,
        }
        found.append({**row, **beside})
    return found


def versions_columns(title: str, rows: Sequence[dict], ratios: bool = True) -> list[Column]:
    """The columns of `beside_first`'s rows; speed-ups are over the first of these, turn by turn
    where they took turns."""
    over_first = Column(f"over {rows[0]['side']}", "over_first", ".2f", "x")
    return [
        Column(title, "side"),
        Column("samples/sec", lambda row: rate(row.get("samples_per_sec"))).or_ended(),
        Column("ms per step", "batch_ms", ".2f"),
        *([over_first, Column("in turns", "over_first_in_turns")] if ratios else []),
        Column("peak MB", "peak_mb", ".1f"),
        Column(f"{unit_of(rows)} per step", "per_step", ".10g"),
        Column("host launches", "host_launches", ".10g"),
        Column("final loss", "final_loss", ".4f"),
    ]


# --- ablation of fusions


def new_fusions(module: ModuleType) -> list[str]:
    """Flags that a version adds to the one before, in the same folder; all without one."""
    path = Path(module.__file__)
    before = path.with_name(f"{path.stem.removesuffix(str(module.VERSION))}{module.VERSION - 1}.py")
    known = {flag for flag, *_ in load_script(str(before)).FUSIONS} if before.is_file() else set()
    return [flag for flag, *_ in module.FUSIONS if flag not in known]


def fusion_sets(fusions: Sequence[str], every: bool = False) -> list[Set]:
    """None, each alone, all but each, and all; or every combination."""
    number, sets = len(fusions), []
    few = {0, min(1, number), max(0, number - 1), number}
    for size in range(number + 1) if every else sorted(few):
        found = list(itertools.combinations(fusions, size))
        # the first one first lacks the first fusion
        sets += reversed(found) if 1 < size == number - 1 else found
    return sets


def set_name(on: Set, fusions: Sequence[str]) -> str:
    if len(on) in (0, len(fusions)):
        return "all" if on else "none"
    if len(on) == 1:
        return f"only {on[0]}"
    off = [fusion for fusion in fusions if fusion not in on]
    return f"all but {off[0]}" if len(off) == 1 else " + ".join(on)


def ablation(
    script: str,
    arguments: Mapping[str, Sequence[str]],
    fusions: Sequence[str],
    sets: Sequence[Set],
    rounds: int,
    seed: int = 42,
    group: int = GROUP,
    counted: bool = True,
) -> list[Part]:
    """Parts of a study: these sets in each precision that has arguments. The at most `group` sides
    of a part take turns, among them none of the fusions, all, and the control."""
    others, size = [on for on in sets if 0 < len(on) < len(fusions)], group - 3
    groups, parts = [others[i : i + size] for i in range(0, len(others), size)] or [[]], []
    numbered = enumerate(groups, 1)
    for (precision, argv), (number, chosen) in itertools.product(arguments.items(), numbered):
        names = {"precision": precision, "seed": seed, "group": number}
        sides = {}
        for on in (tuple(fusions), *chosen, ()):
            flags = [f"--{'enable' if fusion in on else 'disable'}-{fusion}" for fusion in fusions]
            sides[set_name(on, fusions)] = on, (script, [*argv, "--seed", str(seed), *flags])
        sides[CONTROL] = sides["all"]  # last: as far from the first as any
        parts.append((names, partial(speedups_over_unfused, sides, rounds, counted)))
    return parts


def speedups_over_unfused(
    sides: dict[str, tuple[Set, tuple[str, list[str]]]], rounds: int, counted: bool
) -> list[dict]:
    """Measure each set in turns with none; a row has its speed-up over none, if both finished."""
    measured = in_turns({name: side for name, (_, side) in sides.items()}, rounds, counted)
    rows = []
    for name, (on, _) in sides.items():
        gain = speedup(measured["none"], measured[name])
        rows.append({"side": name, "on": [*on], **measured[name], "speedup": gain})
    return rows


def gains_over_none(rows: Iterable[dict]) -> Gains:
    """Of each set and turn, its speed-up over none of its own group."""
    rows = [row for row in rows if "turns_ms" in row and row.get("side") != CONTROL]
    found = defaultdict(dict)
    none = {(row.get("seed"), row.get("group")): row for row in rows if not row["on"]}
    for row in rows:
        if reference := none.get((row.get("seed"), row.get("group"))):
            for turn, gain in enumerate(ratios(reference, row)):
                found[frozenset(row["on"])][row.get("seed"), turn] = gain
    return dict(found)


def over_all(rows: Iterable[dict], side: str, key: str = "turns_ms") -> list[float]:
    """Times of a side over those of all fusions in the same turns; peaks of memory over the
    control's: what compiling leaves may count as the first side's."""
    reference = CONTROL if key == "peak_mb" else "all"
    found = []
    for sides in by_side(rows, "seed", "group").values():
        pair = [sides.get(name, {}).get(key) for name in (side, reference)]
        if all(pair):
            pair = [value if isinstance(value, list) else [value] for value in pair]
            found += [one / other for one, other in zip(*pair, strict=True)]
    return found


def noise(rows: Iterable[dict]) -> float | None:
    """How far the control was from all at most, as a part of the time; None without a control."""
    return max((abs(ratio - 1) for ratio in over_all(rows, CONTROL)), default=None)


def main_effect(gains: Gains, fusion: str) -> list[float]:
    """What a fusion gains, turn by turn: the median, on log times, of all pairs of sets that differ
    in it alone."""
    found = [(on, on | {fusion}) for on in gains if fusion not in on]
    pairs = [(gains[on], gains[both]) for on, both in found if both in gains]
    turns = sorted(set.intersection(*map(set, itertools.chain(*pairs)))) if pairs else []
    logs = [[math.log(after[turn] / before[turn]) for before, after in pairs] for turn in turns]
    return [math.exp(statistics.median(of_turn)) for of_turn in logs]


def varying(rows: Iterable[dict]) -> list[str]:
    return max((row["on"] for row in rows), key=len)


def sets_table(script: str, rows: Sequence[dict], wide: bool = False) -> str:
    """Kernels, time and speed-up over none of each set; `wide`: memory and the range of turns,
    too."""
    rows = sorted(rows, key=lambda row: len(row["on"]))
    lines = {row["side"]: {"name": row["side"]} for row in rows}
    columns = [Column(script, "name")]
    for precision in dict.fromkeys(row["precision"] for row in rows):
        sets = defaultdict(list)
        for row in rows:
            if row["precision"] == precision:
                sets[row["side"]].append(row)
        gains = gains_over_none(itertools.chain(*sets.values()))
        for side, same in sets.items():
            cells = {key: median(known(same, key)) for key in ("peak_mb", "per_step", "batch_ms")}
            ends = filter(None, map(ended, same))
            cells["gain"] = next(ends, None) or median(known(same, "speedup"))
            turns = gains.get(frozenset(same[0]["on"]), {}) if same[0]["on"] else {}
            cells["turns"] = range_of([*turns.values()])
            lines[side] |= {(precision, key): value for key, value in cells.items()}
        counted = any(known(same, "per_step") for same in sets.values())
        peak = Column(f"{precision} peak MB", (precision, "peak_mb"), ".1f")
        count = Column(f"{precision} {unit_of(rows)}", (precision, "per_step"), ".10g")
        columns += [
            *[peak] * wide,
            *[count] * counted,
            Column(f"{precision} ms per step", (precision, "batch_ms"), ".2f"),
            Column(f"{precision} speed-up", (precision, "gain"), ".2f", "x"),
            *[Column(f"{precision} in turns", (precision, "turns"))] * wide,
        ]
    return render(columns, [*lines.values()])


def known(rows: Iterable[dict], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def costs_table(title: str, rows: Sequence[dict]) -> str:
    """What the step takes longer, and more memory, without each fusion, in each shape and
    precision; the control's noise. Empty without a control."""
    cells = {
        ", ".join(filter(None, (shape.partition(", ")[2] or shape, precision))): [
            row for row in same if row["precision"] == precision
        ]
        for shape, same in by_shape(rows).items()
        for precision in dict.fromkeys(row["precision"] for row in same)
    }
    if not any(map(noise, cells.values())):
        return ""
    fusions = varying(rows)

    def more(key: str, cell: str, fusion: str) -> str | None:
        if fusion == CONTROL:
            limit = noise(cells[cell]) if key == "turns_ms" else None
            return f"within {100 * limit:.1f}" if limit is not None else None
        side = set_name(tuple(name for name in fusions if name != fusion), fusions)
        found = median(over_all(cells[cell], side, key))
        if found is None:
            return next(filter(None, (ended(r) for r in cells[cell] if r["side"] == side)), None)
        seen = key != "turns_ms" or abs(found - 1) > noise(cells[cell])
        percent = round(100 * (found - 1), 1) + 0.0  # and no -0.0
        return f"{percent:.1f}" + ("" if seen else ", none seen")

    columns = [Column(f"% more without it, {title}", str)]
    kinds = (("time", "turns_ms"), ("MB", "peak_mb"))
    for cell, (what, key) in itertools.product(cells, kinds):
        columns.append(Column(f"{cell}, {what}", partial(more, key, cell)))
    return render(columns, [*fusions, CONTROL])


def by_shape(rows: Iterable[dict]) -> dict[str, list[dict]]:
    """Rows by the name of their sizes, which is empty in a study of one size."""
    found = defaultdict(list)
    for row in rows:
        found[row.get("shape", "")].append(row)
    return dict(found)


def effects_tables(rows: Sequence[dict]) -> list[str]:
    """In each precision what each fusion gains, and below which gain there is none."""
    fusions, found = varying(rows), []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        same = [row for row in rows if row["precision"] == precision]
        gains = gains_over_none(same)
        columns = [
            Column(f"{precision}, fusion", "name"),
            Column("alone", "alone", ".2f", "x"),
            Column("added last", "last", ".2f", "x"),
            Column("main effect", "main", ".2f", "x"),
            Column("in turns", "turns"),
        ]
        lines = [{"name": fusion, **gains_of(same, gains, fusion)} for fusion in fusions]
        found.append(render(columns, lines))
        limit = noise(same)
        if limit is not None:
            what = f"{CONTROL} was within {100 * limit:.1f} % of all"
            found.append(f"{precision}: {what}: a smaller gain of a fusion added last is none.")
    return found


def gains_of(rows: Sequence[dict], gains: Gains, fusion: str) -> dict[str, object]:
    """What a fusion gains alone, added last, and on the whole with its range; None where not
    measured."""
    fusions = varying(rows)
    rest = tuple(name for name in fusions if name != fusion)
    turns = main_effect(gains, fusion)
    last = over_all(rows, set_name(rest, fusions))
    if not last:  # studies without all in each group
        whole, without = (gains.get(frozenset(on), {}) for on in (fusions, rest))
        last = [whole[turn] / without[turn] for turn in whole.keys() & without.keys()]
    return {
        "alone": median([*gains.get(frozenset([fusion]), {}).values()]),
        "last": median(last),
        "main": median(turns),
        "turns": range_of(turns),
    }


def median(ratios: Sequence[float]) -> float | None:
    """None where nothing was measured."""
    return statistics.median(ratios) if ratios else None


def range_of(ratios: Sequence[float]) -> str | None:
    """The range of ratios turn by turn, None where there are none."""
    return spread(ratios) if ratios else None


# --- the largest batch size that fits: it doubles, and then the gap is halved

SEARCH = ("batch_size", "script", "argv"), ("batch_ms", "turns_ms", "peak_mb")


def next_size(
    rows: Sequence[dict], limit_mb: float, most: int, host_mb: float | None = None
) -> int | None:
    """The batch size to measure after these rows, up to `most` and `limit_mb`; None at the end.
    What would by its samples take more than `host_mb` counts as too large."""
    if any(row.get("status") == "failed" for row in rows):
        return None
    fitting = [row for row in rows if "status" not in row and row["peak_mb"] <= limit_mb]
    good, peak = max(((row["batch_size"], row["peak_mb"]) for row in fitting), default=(0, 0.0))
    bad = min((row["batch_size"] for row in rows if row not in fitting), default=None)
    while good < most:
        step = 1 << max(0, good.bit_length() - 4)  # a power of two, about an eighth
        size = min(max(1, 2 * good), most) if bad is None else (good + bad) // 2 // step * step
        if not good < size < (bad or size + 1):
            return None
        if host_mb is None or not good or peak * size / good <= host_mb:
            return size
        bad = size
    return None


def search(path: Path, script: str, argv: Sequence[str], rounds: int, **limits) -> Iterator[Part]:
    """Parts of the study; which comes next follows from the rows that are there."""
    unfinished = path.with_suffix(".partial.json")
    while size := next_size(read_rows(path, *SEARCH) or read_rows(unfinished, *SEARCH), **limits):
        side = (script, [*argv, "--batch-size", str(size)])
        yield {"batch_size": size}, partial(measured_alone, side, rounds)


def measured_alone(side: tuple[str, list[str]], rounds: int) -> dict:
    """The row of a batch size; ToolError where peak memory cannot be told."""
    row = in_turns({"": side}, rounds)[""]
    if "status" not in row and row["peak_mb"] is None:
        reason = "graphs of torch.compile share their memory, so no peak is known"
        raise ToolError(f"{reason}: use another mode")
    return row

"""Ablation of fusions: which sets of them are measured, how, and what each is worth alone, last and on the whole.

A set is what is on of the fusions that vary. Effects are computed on the logarithms of times, where gains that multiply
add up, and turn by turn; so they are ratios, above 1 where time is saved (two-level factorial design).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from workshop.script import load_script
from workshop.show import NOT_FINISHED, cell, markdown_table
from workshop.study import Part
from workshop.turns import in_turns, ratios, spread

GROUP = 8  # sides that are in memory together
Set = tuple[str, ...]  # the fusions that are on
Logs = dict[frozenset, dict[tuple[int, int], float]]  # of a set, by seed and turn


def new_fusions(module: ModuleType) -> list[str]:
    """Flags of the fusions that a version adds to the one beside it in its folder; all, where there is none before."""
    path = Path(module.__file__)
    before = path.with_name(f"{path.stem.removesuffix(str(module.VERSION))}{module.VERSION - 1}.py")
    known = {flag for flag, *_ in load_script(str(before)).FUSIONS} if before.is_file() else set()
    return [flag for flag, *_ in module.FUSIONS if flag not in known]


def fusion_sets(fusions: Sequence[str], every: bool = False) -> list[Set]:
    """None, each alone, all but each, and all; or every combination."""
    number, sets = len(fusions), []
    for size in range(number + 1) if every else sorted({0, min(1, number), max(0, number - 1), number}):
        found = list(itertools.combinations(fusions, size))
        sets += reversed(found) if 1 < size == number - 1 else found  # the first one first lacks the first fusion
    return sets


def set_name(on: Set, fusions: Sequence[str]) -> str:
    """A set in words."""
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
    seeds: Sequence[int] = (42,),
    group: int = GROUP,
) -> list[Part]:
    """Parts of a study: these sets in each precision, for which there are arguments, and with each seed.

    The sides of a part take turns; it has at most `group` of them, of which one has none of the fusions.
    """
    others, parts = [on for on in sets if on], []
    groups = [((), *others[i : i + group - 1]) for i in range(0, len(others), group - 1)]
    for (precision, argv), seed, (number, chosen) in itertools.product(arguments.items(), seeds, enumerate(groups, 1)):
        names = {"precision": precision, "seed": seed, "group": number}
        sides = {}
        for on in chosen:
            flags = [f"--{'enable' if fusion in on else 'disable'}-{fusion}" for fusion in fusions]
            sides[on] = (set_name(on, fusions), (script, [*argv, "--seed", str(seed), *flags]))
        parts.append((names, partial(speedups_over_unfused, sides, rounds)))
    return parts


def speedups_over_unfused(sides: dict[Set, tuple[str, tuple[str, list[str]]]], rounds: int) -> list[dict]:
    """Measure each set in turns with none; a row has its speed-up over none, if both finished."""
    measured, rows = in_turns(dict(sides.values()), rounds), []
    for on, (name, _) in sides.items():
        row = measured[name]
        finished = "turns_ms" in row and "turns_ms" in measured["none"]
        gain = statistics.median(ratios(measured["none"], row)) if finished else None
        rows.append({"side": name, "on": [*on], **row, "speedup": gain})
    return rows


def log_speedups(rows: Iterable[dict]) -> Logs:
    """Of each set and turn, the logarithm of its speed-up over none of its own group."""
    rows, logs = [row for row in rows if "turns_ms" in row], defaultdict(dict)
    none = {(row["seed"], row["group"]): row for row in rows if not row["on"]}
    for row in rows:
        if reference := none.get((row["seed"], row["group"])):
            gains = enumerate(ratios(reference, row))
            logs[frozenset(row["on"])] |= {(row["seed"], turn): math.log(gain) for turn, gain in gains}
    return dict(logs)


def effect(logs: Logs, contrasts: Iterable[Mapping[frozenset, int]]) -> tuple[list[float], list[float]]:
    """Ratios turn by turn, each the median of these contrasts (signs of sets), and the median of each contrast.

    Contrasts with a set that was not measured are left out; if none is left, both lists are empty.
    """
    contrasts = [contrast for contrast in contrasts if contrast.keys() <= logs.keys()]
    turns = sorted(set.intersection(*(set(logs[on]) for contrast in contrasts for on in contrast))) if contrasts else []
    values = [[sum(sign * logs[on][turn] for on, sign in c.items()) for turn in turns] for c in contrasts]
    by_turn = [math.exp(statistics.median(column)) for column in zip(*values, strict=True)]
    return by_turn, [math.exp(statistics.median(value)) for value in values] if turns else []


def main_effect(logs: Logs, fusion: str) -> tuple[list[float], list[float]]:
    """What a fusion gains: over all pairs of sets that differ in it alone."""
    return effect(logs, [{on | {fusion}: 1, on: -1} for on in logs if fusion not in on])


def interaction(logs: Logs, first: str, second: str) -> tuple[list[float], list[float]]:
    """What two fusions gain together over the product of what each gains: above 1 they help each other."""
    without = [on for on in logs if not on & {first, second}]
    corners = [{on | {first, second}: 1, on | {first}: -1, on | {second}: -1, on: 1} for on in without]
    return effect(logs, corners)


def additivity(logs: Logs, fusions: Sequence[str]) -> str:
    """One line: is the product of the gains of each fusion alone what all of them gain together?"""
    alone, everything = [frozenset([fusion]) for fusion in fusions], frozenset(fusions)
    gains = [effect(logs, [{on: 1}])[0] for on in (*alone, everything)]
    over_product = effect(logs, [{everything: 1} | dict.fromkeys(alone, -1)])[0]
    if len(fusions) < 2 or not over_product:
        return "Whether the gains are additive cannot be said: it takes two fusions, each alone, and all of them."
    low, high = min(over_product), max(over_product)
    answer = "are additive within the spread" if low <= 1 <= high else "are not additive"
    answer = "may be additive or not, the turns are too few to tell" if len(over_product) < 5 else answer
    *singles, together = map(statistics.median, gains)
    found = f"each alone {math.prod(singles):.2f}x as a product, all together {together:.2f}x"
    return f"The gains {answer} (on log times): {found}; all over the product {low:.2f}x to {high:.2f}x in turns."


def sets_table(script: str, rows: Sequence[dict], wide: bool = False) -> str:
    """Kernels, time and speed-up over none of each set in each precision; wide: memory and the range of turns, too."""
    unit = next((row["unit"] for row in rows if "unit" in row), "kernels")
    columns = {
        "per_step": (unit, ".10g", ""),
        "batch_ms": ("ms per step", ".2f", ""),
        "speedup": ("speed-up", ".2f", "x"),
    }
    if wide:
        columns = {"peak_mb": ("peak MB", ".1f", "")} | columns
    precisions, lines = list(dict.fromkeys(row["precision"] for row in rows)), []
    logs = {
        precision: log_speedups(r for r in rows if r["precision"] == precision) if wide else {}
        for precision in precisions
    }
    for name in dict.fromkeys(row["side"] for row in rows):
        lines.append([name])
        for precision in precisions:
            same = [row for row in rows if (row["side"], row["precision"]) == (name, precision)]
            ended = next((NOT_FINISHED[row["status"]] for row in same if "status" in row), None)
            for key, (_, form, suffix) in columns.items():
                values = [row[key] for row in same if row.get(key) is not None]
                lines[-1].append(cell(statistics.median(values) if values else None, form, suffix))
            if ended:
                lines[-1][-1] = ended
            if wide:
                on = same[0]["on"] if same else ()
                turns = [math.exp(log) for log in logs[precision].get(frozenset(on), {}).values()]
                lines[-1].append(spread(turns) if turns and name != "none" else "-")
    header = [*(label for label, *_ in columns.values()), *(["in turns"] if wide else [])]
    return markdown_table([script, *(f"{precision} {label}" for precision in precisions for label in header)], lines)


def effects_tables(rows: Sequence[dict]) -> list[str]:
    """In each precision what each fusion gains, how pairs of them interact, and whether their gains are additive."""
    fusions, found = max((row["on"] for row in rows), key=len), []

    def cells(ratios: Sequence[float]) -> list[str]:
        return [f"{statistics.median(ratios):.2f}x", spread(ratios)] if ratios else ["-", "-"]

    for precision in dict.fromkeys(row["precision"] for row in rows):
        logs, lines = log_speedups(row for row in rows if row["precision"] == precision), []
        for fusion in fusions:
            alone = effect(logs, [{frozenset([fusion]): 1}])[0]
            last = effect(logs, [{frozenset(fusions): 1, frozenset(fusions) - {fusion}: -1}])[0]
            turns, pairs = main_effect(logs, fusion)
            lines.append([fusion, cells(alone)[0], cells(last)[0], *cells(turns)])
            lines[-1].append(f"{min(pairs):.2f}x to {max(pairs):.2f}x in {len(pairs)}" if pairs else "-")
        header = [f"{precision}, fusion", "alone", "added last", "main effect", "in turns", "between pairs of sets"]
        found.append(markdown_table(header, lines))
        lines = [
            [f"{first}, {second}", *cells(interaction(logs, first, second)[0])]
            for first, second in itertools.combinations(fusions, 2)
        ]
        if any(line[1] != "-" for line in lines):
            found.append(
                markdown_table([f"{precision}, two fusions", "together over their product", "in turns"], lines)
            )
        found.append(f"{precision}: {additivity(logs, fusions)}")
    return found

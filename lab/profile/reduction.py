"""Two profiles compared by kernel name: what vanished, what is new, what that saved.

A profile is what run_pytorch_profiler.py or run_rocprofv3.sh left in a folder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lab import records
from lab.cli import ToolError
from lab.profile.kernels import (
    CATEGORIES,
    WITH_WARM_UP,
    KernelStatistics,
    category,
    read_statistics,
    short_name,
)
from lab.records import check_family, collected, differences, load_run, only_file
from lab.show import Column, render

SIDES = ("baseline", "fused")


@dataclass(frozen=True)
class Profile:
    """The kernels of one side."""

    directory: Path
    source: str  # the tool that wrote it
    unit: str  # "kernels", or "operators" on a CPU
    steps: int | None  # None if not known
    statistics: list[KernelStatistics]
    settings: dict | None  # config, training, environment and kernels of the run


@dataclass(frozen=True)
class Kernel:
    """A kernel, or several; launches and milliseconds are (baseline, fused), per step if known."""

    name: str
    category: str
    is_copy: bool
    launches: tuple[float, float]
    ms: tuple[float, float]

    @property
    def found(self) -> str:
        """'both', 'baseline' (it vanished) or 'fused' (it is new)."""
        return "both" if all(self.launches) else SIDES[not self.launches[0]]


# --- from folders


def load_pytorch(directory: Path) -> Profile:
    """What run_pytorch_profiler.py wrote."""
    kernels = only_file(directory, "*_kernels.csv", "no <script>_kernels.csv")
    path = kernels.with_name(kernels.name.removesuffix("_kernels.csv") + "_profile.json")
    content = records.read(records.Profile, path)
    steps, unit = content["steps"], content["unit"]
    rows, per_step = read_statistics(kernels), content.get(f"{unit}_per_step", 0)
    calls = sum(row.calls for row in rows if not is_copy(row.name))
    if abs(calls - steps * per_step) > 0.5:
        there = f"{path.name}, {steps} steps of {per_step} {unit}"
        raise ToolError(f"{kernels}: {calls} calls do not belong to {there}")
    return Profile(directory, "run_pytorch_profiler.py", unit, steps, rows, content)


def load_rocprofv3(directory: Path) -> Profile:
    """What run_rocprofv3.sh wrote.

    The script's own result beside it tells the steps, if the statistics are of it: stats.csv may
    have been made from a database of another run, which the files of this one do not add up to.
    """
    rows = read_statistics(directory / "stats.csv")
    hotspots = directory / "hotspots"
    parts = [read_statistics(path) for path in sorted(hotspots.rglob("*_kernel_stats.csv"))]
    summaries = sorted(hotspots.glob("*_summary.json"))
    steps = settings = None
    if len(summaries) == 1 and total_of(rows) == total_of([row for part in parts for row in part]):
        settings = load_run(summaries[0]).result
        if not (hotspots / WITH_WARM_UP).exists():
            steps = settings["timing"].get("steps")
    return Profile(directory, "run_rocprofv3.sh", "kernels", steps, rows, settings)


FILES = {
    "pytorch/*_kernels.csv": load_pytorch,
    "rocprofv3_results_*/stats.csv": load_rocprofv3,
}


def total_of(rows: Sequence[KernelStatistics]) -> tuple[int, int]:
    """All calls and all nanoseconds."""
    return sum(row.calls for row in rows), sum(row.total_ns for row in rows)


def load_profile(directory: Path) -> Profile:
    """The profile in a folder, of whichever tool, also below what run_all_profilers.sh wrote."""
    for files, load in FILES.items():
        if isinstance(folder := collected(directory, files), Path):
            return load(folder)
    lacking = "neither <script>_kernels.csv (run_pytorch_profiler.py) nor"
    raise ToolError(f"{directory}: no profile: {lacking} stats.csv (run_rocprofv3.sh)")


def is_copy(name: str) -> bool:
    """A copy or memset of the PyTorch profiler. rocprofv3 has only kernels."""
    return name.startswith(("Memcpy", "Memset"))


# --- side by side


def match(sides: Sequence[Profile], steps: Sequence[int]) -> list[Kernel]:
    """Kernels by name, those with the longest time on either side first."""
    rows = [{row.name: row for row in side.statistics} for side in sides]

    def per_step(name: str, value: Callable[[KernelStatistics], float]) -> tuple[float, float]:
        both = zip(rows, steps, strict=True)
        return tuple(value(side[name]) / n if name in side else 0 for side, n in both)

    kernels = []
    for name in rows[0] | rows[1]:
        launches = per_step(name, lambda row: row.calls)
        ms = per_step(name, lambda row: row.total_ns / 1e6)
        kernels.append(Kernel(name, category(name), is_copy(name), launches, ms))
    return sorted(kernels, key=lambda kernel: (-max(kernel.ms), kernel.name))


def total(name: str, kernels: Sequence[Kernel], copies: bool = True) -> Kernel:
    """The sum of kernels under a name; copies count as launches if asked for, their time always."""
    counted = [kernel.launches for kernel in kernels if copies or not kernel.is_copy]
    launches = tuple(sum(each[side] for each in counted) for side in (0, 1))
    ms = tuple(sum(kernel.ms[side] for kernel in kernels) for side in (0, 1))
    return Kernel(name, name, False, launches, ms)


def change(before: float, after: float) -> str:
    """After over before, as a signed percentage."""
    return f"{100 * (after / before - 1):+.1f} %" if before else "-"


def launches_and_ms(labels: dict[int, str]) -> tuple[list[Column], list[Column]]:
    """Columns for the sides with these labels."""
    launches, ms = [], []
    for i, label in labels.items():
        launches.append(Column(f"{label}launches", lambda k, i=i: k.launches[i], ".10g"))
        ms.append(Column(f"{label}ms", lambda k, i=i: k.ms[i], ".3f"))
    return launches, ms


BOTH = {side: f"{name} " for side, name in enumerate(SIDES)}


def share_table(what: str, rows: Sequence[Kernel], everything: Kernel) -> str:
    """What each part of a step does on both sides, and its share of the time there."""
    launches, ms = launches_and_ms(BOTH)
    columns = [Column(what, "name"), *launches]
    columns += [Column("change", lambda k: change(*k.launches)), *ms]
    columns += [Column("change of time", lambda k: change(*k.ms))]

    def share(kernel: Kernel, side: int) -> float | None:
        return 100 * kernel.ms[side] / everything.ms[side] if everything.ms[side] else None

    for i, side in enumerate(SIDES):
        columns.append(Column(f"{side} share, %", partial(share, side=i), ".1f"))
    return render(columns, rows)


def categories(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The sum of each category, then of all."""
    members = {name: [k for k in kernels if k.category == name] for name in CATEGORIES}
    found = [total(name, several) for name, several in members.items() if several]
    return [*found, total("all", kernels)]


def phases(sides: Sequence[Profile]) -> list[Kernel]:
    """The phases of a step, where both profiles have them: rocprofv3's have none, a graph has
    others."""
    both = [(side.settings or {}).get("phases", {}) for side in sides]
    if both[0].keys() != both[1].keys():
        return []

    def of(name: str) -> Kernel:
        parts = [phase[name] for phase in both]
        launches = [part["kernels_per_step"] + part["copies_per_step"] for part in parts]
        ms = [part["ms_per_step"] for part in parts]
        return Kernel(name, name, False, tuple(launches), tuple(ms))

    return [of(name) for name in both[0]]


def section(
    title: str, kernels: Sequence[Kernel], labels: dict[int, str], top: int, per: str
) -> list[str]:
    """A section with a table of at most `top` kernels and its columns for one side or both."""
    everything = total(title, kernels)
    count = " -> ".join(f"{everything.launches[side]:.10g}" for side in labels)
    time = " -> ".join(f"{everything.ms[side]:.3f}" for side in labels)
    lines = ["", f"## {title}", ""]
    lines.append(f"Kernel names: {len(kernels)}; {count} launches and {time} ms{per}.")
    if not kernels:
        return lines
    columns = [
        Column("kernel", lambda k: f"`{short_name(k.name)}`"),
        Column("category", "category", text=True),
    ]
    launches, ms = launches_and_ms(labels)
    lines += ["", render([*columns, *launches, *ms], kernels[:top])]
    if len(kernels) > top:
        more = "--top of analyze_kernel_reduction.py shows more, --output writes all of them as CSV"
        lines += ["", f"The first {top}; {more}."]
    return lines


def report(
    sides: Sequence[Profile], kernels: Sequence[Kernel], notes: list[str], per_step: bool, top: int
) -> str:
    """The whole comparison in Markdown; without kernels by name and headings where `top` is 0."""
    per = " per step" if per_step else " in all"
    cpu = sides[0].unit == "operators"
    everything = total("all", kernels, copies=False)
    before, after = everything.launches
    lines = ["# Kernels, baseline and fused", ""] if top else []
    for label, side in zip(SIDES, sides, strict=True):
        script = f"{side.settings['script']}, " if side.settings else ""
        steps = f"{side.steps} steps" if side.steps else "an unknown number of steps"
        lines.append(f"- {label}: `{side.directory}` ({script}{steps}, {side.source})")
    lines += [f"- note: {note}" for note in notes]
    if cpu:
        table = "The table has all calls of operators, views and outer ones too."
        lines += ["", f"On a CPU there are no kernels. {table}"]
        before, after = (side.settings.get("kernels", {}).get("per_step") for side in sides)
    lines.append("")
    if before and after:
        what = "Operator calls, as the script counts," if cpu else "Kernels"
        of = " (of operator calls)" if cpu else ""
        lines.append(f"- {what}{per}: {before:.10g} -> {after:.10g}")
        lines.append(f"- Kernel reduction: {100 * (1 - after / before):.1f} %{of}")
    names = [sum(1 for k in kernels if k.launches[side] and not k.is_copy) for side in (0, 1)]
    clock = "Self time of operators" if cpu else "Kernel time"
    before_ms, after_ms = everything.ms
    lines += [
        f"- {clock}{per}: {before_ms:.3f} ms -> {after_ms:.3f} ms ({change(before_ms, after_ms)})",
        f"- Distinct names: {names[0]} -> {names[1]}",
        *(["", "## By category", ""] if top else [""]),
        share_table("category", categories(kernels), everything),
    ]
    if parts := phases(sides):
        lines += ["", share_table("phase", parts, everything)]
    if any(kernel.is_copy for kernel in kernels):
        lines += ["", "Launches here contain copies and memsets, the numbers above do not."]
    both = [k for k in kernels if k.found == "both"]
    same = [k for k in both if k.launches[0] == k.launches[1]]
    moved = [k for k in both if k.launches[0] != k.launches[1]]
    moved.sort(key=lambda k: -abs(k.ms[1] - k.ms[0]))
    for title, several, labels in (
        ("Vanished", [k for k in kernels if k.found == "baseline"], {0: ""}),
        ("New", [k for k in kernels if k.found == "fused"], {1: ""}),
        ("In both, with another number of launches", moved, BOTH),
        ("In both, launched as often", same, BOTH),
    ):
        lines += section(title, several, labels, top, per) if top else []
    return "\n".join(lines) + "\n"


def compare(sides: Sequence[Profile], top: int) -> tuple[list[Kernel], list[str], str]:
    """The kernels of both sides, what differs beside them, and the report; ToolError if they do not
    fit."""
    of = dict(zip(SIDES, sides, strict=True))
    known = [(label, side.settings) for label, side in of.items() if side.settings]
    check_family(known)
    per_step = all(side.steps for side in sides)
    notes = differences(known, ignore=("num_steps", "warmup_steps") if per_step else ())
    if sides[0].unit != sides[1].unit:
        units = f"one side has {sides[0].unit}, the other {sides[1].unit}"
        raise ToolError(f"{units}: profile both on the same device")
    kernels = match(sides, [side.steps if per_step else 1 for side in sides])
    for side, launches in zip(sides, total("all", kernels, copies=False).launches, strict=True):
        if not launches:
            raise ToolError(f"{side.directory}: the profile has no kernels")
    if not per_step:
        note = "the number of steps is not known for both sides, so these are totals"
        if unknown := ", ".join(label for label, side in of.items() if not side.settings):
            note += f"; model, sizes and steps of {unknown} are not checked: "
            note += "no result file belongs to the profile"
        if whole := ", ".join(label for label, s in of.items() if s.settings and not s.steps):
            note += f"; {whole} have the warm-up, too, which rocprofv3 of ROCm 6 cannot leave out"
        notes.append(note)
    if sides[0].source != sides[1].source:
        notes.append("two profilers may write the name of one kernel in two ways")
    return kernels, notes, report(sides, kernels, notes, per_step, top)

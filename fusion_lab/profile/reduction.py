"""Two profiles compared by kernel name: what vanished, what is new, what that saved.

A profile is what run_pytorch_profiler.py, run_rocprofv3.sh or a script with
--enable-pytorch-profiler left in a folder.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from fusion_lab import records
from fusion_lab.cli import ToolError
from fusion_lab.profile.kernels import (
    CATEGORIES,
    GRAPH_PHASES,
    NO_KERNELS,
    PHASES,
    WITH_WARM_UP,
    KernelStatistics,
    category,
    has_gpu,
    load_trace,
    read_statistics,
    short_name,
)
from fusion_lab.profile.tables import analyse
from fusion_lab.runs import (
    Run,
    check_family,
    collected,
    differences,
    file_of_runs,
    find_runs,
    load_run,
    only_file,
    point_of,
)
from fusion_lab.script import model_and_version
from fusion_lab.show import Column, render

SIDES = ("baseline", "fused")
# what is known of a kernel, or of several, beside its name; per step if the steps are known
NUMBERS = [f"{side} {what}" for what in ("launches", "ms") for side in SIDES]


@dataclass(frozen=True)
class Profile:
    """The kernels of one side."""

    directory: Path
    source: str  # the tool that wrote it
    unit: str  # "kernels", or "operators" on a CPU
    steps: int | None  # None if not known
    statistics: list[KernelStatistics]
    settings: dict | None  # config, training, environment and kernels of the run


# --- from folders


def load_pytorch(directory: Path) -> Profile:
    """What run_pytorch_profiler.py wrote, or else a script itself."""
    if not any(directory.glob("*_kernels.csv")):
        return load_own_trace(directory)
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
    """What run_rocprofv3.sh wrote. The script's own result tells the steps, if the statistics are
    of it: stats.csv may be of a database of another run, which these files do not add up to."""
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


def load_own_trace(directory: Path) -> Profile:
    """What a script wrote itself with --enable-pytorch-profiler."""
    trace = only_file(directory, "*_trace.json.gz", "no <script>_trace.json.gz")
    name = trace.name.removesuffix("_trace.json.gz")
    settings = records.read(records.Summary, trace.with_name(f"{name}_summary.json"))
    events = load_trace(trace)
    if settings["environment"].get("device") == "cuda" and not has_gpu(events):
        raise ToolError(f"{trace}: {NO_KERNELS}")
    of_graph = settings["training"].get("cuda_graph")
    found = analyse(events, GRAPH_PHASES if of_graph else PHASES)
    settings["phases"] = {phase: asdict(share) for phase, share in found.phases.items()}
    source = "--enable-pytorch-profiler"
    return Profile(directory, source, found.unit, found.steps, found.statistics, settings)


FILES = {
    "pytorch/*_kernels.csv": load_pytorch,
    "rocprofv3_results_*/stats.csv": load_rocprofv3,
    "pytorch/*_trace.json.gz": load_own_trace,
}


def total_of(rows: Sequence[KernelStatistics]) -> tuple[int, int]:
    """All calls and all nanoseconds."""
    return sum(row.calls for row in rows), sum(row.total_ns for row in rows)


def load_profiles(directory: Path) -> dict[str, Profile]:
    """The profile in a folder, of whichever tool, also below what run_all_profilers.sh wrote, under
    an empty name; or by model the counts of runs in the folder or file, which know no names."""
    of_runs = directory.is_file() or file_of_runs(directory)
    for files, load in () if of_runs else FILES.items():
        if isinstance(folder := collected(directory, files), Path):
            return {"": load(folder)}
    runs = find_runs(directory)
    fused = [run for run in runs if not run.is_first]
    counted = [run for run in fused or runs if run.number("kernels", "per_step")]
    if not counted:
        lacking = "neither <script>_kernels.csv (run_pytorch_profiler.py) nor"
        wanted = "stats.csv (run_rocprofv3.sh), nor a run that counted"
        raise ToolError(f"{directory}: no profile: {lacking} {wanted}")
    by_model: dict[str, list[Run]] = {}
    for run in counted:
        by_model.setdefault(model_and_version(run.result["script"])[0], []).append(run)
    for same in by_model.values():
        if len({point_of(run) for run in same}) > 1:  # no repeats
            names = ", ".join(run.name for run in same)
            raise ToolError(f"{directory}: several runs ({names}), name one of them")
    return {model: of_run(directory, same[0]) for model, same in by_model.items()}


def pairs(baseline: Path, fused: Path) -> list[tuple[Profile, Profile]]:
    """What to compare: the one profile of each folder, or those of each model that both have."""
    before = load_profiles(baseline)
    after = load_profiles(fused)
    if len(before) == len(after) == 1:
        return [(*before.values(), *after.values())]
    if not (both := [model for model in before if model in after]):
        models = [" and ".join(filter(None, side)) or "a profile" for side in (before, after)]
        raise ToolError(f"no model has two sides: {baseline} has {models[0]}, {fused} {models[1]}")
    return [(before[model], after[model]) for model in both]


def of_run(directory: Path, run: Run) -> Profile:
    """What a script counted itself."""
    unit = "operators" if run.result["kernels"].get("unit") == "operator calls" else "kernels"
    return Profile(directory, "the script itself", unit, 1, [], run.result)


def is_copy(name: str) -> bool:
    """A copy or memset of the PyTorch profiler. rocprofv3 has only kernels."""
    return name.startswith(("Memcpy", "Memset"))


# --- side by side


def match(sides: Sequence[Profile], steps: Sequence[int]) -> list[dict]:
    """Kernels by name with `NUMBERS`, those with the longest time on either side first."""
    kernels: dict[str, dict] = {}
    for label, side, n in zip(SIDES, sides, steps, strict=True):
        for row in side.statistics:
            new = {"name": row.name, "category": category(row.name), **dict.fromkeys(NUMBERS, 0)}
            kernel = kernels.setdefault(row.name, new)
            kernel[f"{label} launches"] += row.calls / n  # a name may be listed twice
            kernel[f"{label} ms"] += row.total_ns / 1e6 / n
    return sorted(
        kernels.values(), key=lambda k: (-max(k["baseline ms"], k["fused ms"]), k["name"])
    )


def found_in(kernel: dict) -> str:
    """'both', 'baseline' (it vanished) or 'fused' (it is new)."""
    there = [side for side in SIDES if kernel[f"{side} launches"]]
    return there[0] if len(there) == 1 else "both"


def total(name: str, kernels: Iterable[dict]) -> dict:
    """The sum of kernels under a name."""
    kernels = list(kernels)
    return {"name": name} | {key: sum(kernel[key] for kernel in kernels) for key in NUMBERS}


def without_copies(kernels: Iterable[dict]) -> list[dict]:
    return [kernel for kernel in kernels if not is_copy(kernel["name"])]


def change(row: dict, what: str) -> str:
    """After over before, as a signed percentage."""
    before, after = (row[f"{side} {what}"] for side in SIDES)
    return f"{100 * (after / before - 1):+.1f} %" if before else "-"


def share_table(what: str, rows: Sequence[dict], everything: dict) -> str:
    """What each part of a step does on both sides, and its share of the time there."""

    def share(key: str, row: dict) -> float | None:
        return 100 * row[key] / everything[key] if everything[key] else None

    columns = [
        Column(what, "name"),
        *(Column(f"{side} launches", f"{side} launches", ".10g") for side in SIDES),
        Column("change", lambda row: change(row, "launches")),
        *(Column(f"{side} ms", f"{side} ms", ".3f") for side in SIDES),
        Column("change of time", lambda row: change(row, "ms")),
        *(Column(f"{side} share, %", partial(share, f"{side} ms"), ".1f") for side in SIDES),
    ]
    return render(columns, rows)


def phases(sides: Sequence[Profile]) -> list[dict]:
    """The phases of a step, where both profiles have them: rocprofv3's have none, a graph has
    others."""
    both = [(side.settings or {}).get("phases", {}) for side in sides]
    if both[0].keys() != both[1].keys():
        return []
    rows = {name: {"name": name} for name in both[0]}
    for side, parts in zip(SIDES, both, strict=True):
        for name, part in parts.items():
            launches = part["kernels_per_step"] + part["copies_per_step"]
            rows[name] |= {f"{side} launches": launches, f"{side} ms": part["ms_per_step"]}
    return [*rows.values()]


def section(title: str, kernels: Sequence[dict], sides: Sequence[str], top: int) -> list[str]:
    """A section with a table of at most `top` kernels and its columns for one side or both."""
    sums = total(title, kernels)
    count = " -> ".join(f"{sums[f'{side} launches']:.10g}" for side in sides)
    time = " -> ".join(f"{sums[f'{side} ms']:.3f}" for side in sides)
    lines = ["", f"## {title}", "", f"Names: {len(kernels)}; {count} launches, {time} ms."]
    columns = [Column("kernel", lambda k: f"`{short_name(k['name'])}`")]
    columns += [Column("category", "category", text=True)]
    columns += [Column(f"{side} launches", f"{side} launches", ".10g") for side in sides]
    columns += [Column(f"{side} ms", f"{side} ms", ".3f") for side in sides]
    lines += ["", render(columns, kernels[:top])] if kernels else []
    if len(kernels) > top:
        more = "--top of analyze_kernel_reduction.py shows more, --output writes all of them as CSV"
        lines += ["", f"The first {top}; {more}."]
    return lines


def report(
    sides: Sequence[Profile], kernels: Sequence[dict], notes: list[str], per_step: bool, top: int
) -> str:
    """The whole comparison in Markdown; without kernels by name and headings where `top` is 0."""
    lines = ["# Kernels, baseline and fused", ""] if top else []
    for label, side in zip(SIDES, sides, strict=True):
        script = f"{side.settings['script']}, " if side.settings else ""
        steps = f"{side.steps} steps" if side.steps else "an unknown number of steps"
        lines.append(f"- {label}: `{side.directory}` ({script}{steps}, {side.source})")
    lines += [f"- note: {note}" for note in notes]
    lines += [*counts(sides, kernels, " per step" if per_step else " in all"), ""]
    if not kernels:
        return "\n".join(lines)
    lines += ["## By category", ""] if top else []
    everything = total("all", kernels)
    groups = {name: [k for k in kernels if k["category"] == name] for name in CATEGORIES}
    rows = [total(name, several) for name, several in groups.items() if several]
    lines.append(share_table("category", [*rows, everything], everything))
    if parts := phases(sides):
        lines += ["", share_table("phase", parts, everything)]
    if any(is_copy(kernel["name"]) for kernel in kernels):
        lines += ["", "Launches here contain copies and memsets, the numbers above do not."]
    parts = {where: [k for k in kernels if found_in(k) == where] for where in (*SIDES, "both")}
    if top:
        lines += section("Vanished", parts["baseline"], ["baseline"], top)
        lines += section("New", parts["fused"], ["fused"], top)
        lines += section("In both", parts["both"], SIDES, top)
    return "\n".join(lines) + "\n"


def counts(sides: Sequence[Profile], kernels: Sequence[dict], per: str) -> list[str]:
    """Launches, their reduction, and time, in a line each; without kernels by name the counts of
    the scripts themselves."""
    cpu = sides[0].unit == "operators"
    counted = without_copies(kernels)
    before, after = (sum(k[f"{side} launches"] for k in counted) for side in SIDES)
    if cpu or not kernels:
        before, after = ((side.settings or {}).get("kernels", {}).get("per_step") for side in sides)
    lines = [""]
    if cpu and kernels:
        table = "The table has all calls of operators, views and outer ones too."
        lines += [f"On a CPU there are no kernels. {table}", ""]
    if before and after:
        what = "Operator calls, as the script counts," if cpu else "Kernels"
        of = " (of operator calls)" if cpu else ""
        lines.append(f"- {what}{per}: {before:.10g} -> {after:.10g}")
        lines.append(f"- Kernel reduction: {100 * (1 - after / before):.1f} %{of}")
    if not kernels:
        return [*lines, "- Names and times are in profiles (run_pytorch_profiler.py)."]
    everything = total("all", kernels)
    clock = "Self time of operators" if cpu else "Kernel time"
    ms = "{baseline ms:.3f} ms -> {fused ms:.3f} ms".format(**everything)
    return [*lines, f"- {clock}{per}: {ms} ({change(everything, 'ms')})"]


def compare(sides: Sequence[Profile], top: int) -> tuple[list[dict], list[str], str]:
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
    if not all(side.statistics for side in sides):
        if not all((side.settings or {}).get("kernels", {}).get("per_step") for side in sides):
            raise ToolError("one side has only its count, of which the other has none")
        return [], notes, report(sides, [], notes, per_step, top)
    kernels = match(sides, [side.steps if per_step else 1 for side in sides])
    for label, side in of.items():
        if not any(kernel[f"{label} launches"] for kernel in without_copies(kernels)):
            raise ToolError(f"{side.directory}: the profile has no kernels")
    if not per_step:
        notes.append("the number of steps is not known for both sides, so these are totals")
    if unknown := ", ".join(label for label, side in of.items() if not side.settings):
        lacking = "no result file belongs to the profile"
        notes.append(f"model, sizes and steps of {unknown} are not checked: {lacking}")
    if whole := ", ".join(label for label, s in of.items() if s.settings and not s.steps):
        ends = "have the warm-up, too, which rocprofv3 of ROCm 6 cannot leave out"
        notes.append(f"{whole} {ends}")
    if sides[0].source != sides[1].source:
        notes.append("two profilers may write the name of one kernel in two ways")
    return kernels, notes, report(sides, kernels, notes, per_step, top)

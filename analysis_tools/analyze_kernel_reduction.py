#!/usr/bin/env python3
"""Which kernels fusion removed, which ones it brought, and what that saved: two profiles compared by kernel name.

A profile is a directory that run_pytorch_profiler.py wrote (<script>_kernels.csv, <script>_profile.json), one of
run_rocprofv3.sh (rocprofv3_results_*, with stats.csv), or one of run_all_profilers.sh: from it the PyTorch profiler's
is taken, else rocprofv3's. Profiles of different models are refused; different sizes, precision or devices are named
at the top. Launches are counted, per training step wherever the number of steps is known. Copies and memsets that the
PyTorch profiler saw are no kernels; their time counts. On a CPU there are no kernels. There the reduction is that of
the operators that the scripts themselves counted; the tables have all that the profiler saw: views, operators that
only call others, nodes of the autograd graph, inner steps of a matrix product.

The tables go to stdout as Markdown. With --output they are also written to kernel_reduction.md in that directory,
beside kernel_reduction.csv with every kernel under its full name.

Examples:
  python analysis_tools/analyze_kernel_reduction.py --baseline ./v1_analysis --fused ./v2_analysis
  python analysis_tools/analyze_kernel_reduction.py --baseline rocprofv3_results_baseline \\
      --fused rocprofv3_results_fused --output ./kernel_analysis
  python analysis_tools/analyze_kernel_reduction.py --baseline profiles_tiny_llama_v1 --fused profiles_tiny_llama_v2
"""

from __future__ import annotations

import _root

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop import records
from workshop.cli import ToolError, at_least, documented_parser, print_notes, run_tool
from workshop.files import write_csv, write_text
from workshop.profile.kernels import CATEGORIES, WITH_WARM_UP, KernelStatistics, category, read_statistics, short_name
from workshop.results import check_family, differences, load_result, only_file
from workshop.show import markdown_table

PROG = Path(__file__).name
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
    """One kernel name on both sides; calls and milliseconds as (baseline, fused), per step if the steps are known."""

    name: str
    category: str
    is_copy: bool
    calls: tuple[float, float]
    ms: tuple[float, float]

    @property
    def found(self) -> str:
        """'both', 'baseline' (it vanished) or 'fused' (it is new)."""
        return "both" if all(self.calls) else SIDES[not self.calls[0]]


def statistics_in(path: Path) -> list[KernelStatistics]:
    """The rows of a statistics file; ToolError says what is wrong with it."""
    try:
        return read_statistics(path)
    except ValueError as error:
        raise ToolError(str(error)) from error
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror}") from error


def load_pytorch(directory: Path) -> Profile:
    """What run_pytorch_profiler.py wrote."""
    kernels = only_file(directory, "*_kernels.csv", "no <script>_kernels.csv")
    path = kernels.with_name(kernels.name.removesuffix("_kernels.csv") + "_profile.json")
    content = records.read(records.Profile, path)
    steps, unit = content["steps"], content["unit"]
    rows, per_step = statistics_in(kernels), content.get(f"{unit}_per_step", 0)
    calls = sum(row.calls for row in rows if not is_copy(row.name))
    if abs(calls - steps * per_step) > 0.5:
        raise ToolError(f"{kernels}: {calls} calls do not belong to {path.name}, {steps} steps of {per_step} {unit}")
    return Profile(directory, "run_pytorch_profiler.py", unit, steps, rows, content)


def load_rocprofv3(directory: Path) -> Profile:
    """What run_rocprofv3.sh wrote. The script's own result beside it tells the steps, if the statistics are of it."""
    rows = statistics_in(directory / "stats.csv")
    # stats.csv may also have been made from a database of another run, which these files then do not add up to.
    parts = [statistics_in(path) for path in sorted((directory / "hotspots").rglob("*_kernel_stats.csv"))]
    summaries = sorted((directory / "hotspots").glob("*_summary.json"))
    steps = settings = None
    if len(summaries) == 1 and total_of(rows) == total_of([row for part in parts for row in part]):
        settings = load_result(summaries[0])
        steps = settings["timing"].get("steps")
        if (summaries[0].parent / WITH_WARM_UP).exists():
            steps = None
    return Profile(directory, "run_rocprofv3.sh", "kernels", steps, rows, settings)


def total_of(rows: Sequence[KernelStatistics]) -> tuple[int, int]:
    """All calls and all nanoseconds."""
    return sum(row.calls for row in rows), sum(row.total_ns for row in rows)


def pytorch_folder(directory: Path) -> Path | None:
    """Where run_pytorch_profiler.py left a profile, also below what run_all_profilers.sh wrote."""
    folders = (directory, directory / "pytorch")
    return next((folder for folder in folders if any(folder.glob("*_kernels.csv"))), None)


def rocprofv3_folder(directory: Path) -> Path | None:
    """Where run_rocprofv3.sh left statistics, also below what run_all_profilers.sh wrote."""
    if (directory / "stats.csv").is_file():
        return directory
    folders = sorted(path.parent for path in directory.glob("rocprofv3_results_*/stats.csv"))
    if len(folders) > 1:
        raise ToolError(f"{directory}: several profiles ({', '.join(p.name for p in folders)}), name one of them")
    return folders[0] if folders else None


def load_profile(directory: Path) -> Profile:
    """The profile in a directory, of whichever tool."""
    if not directory.is_dir():
        raise ToolError(f"{directory}: no such directory")
    if folder := pytorch_folder(directory):
        return load_pytorch(folder)
    if folder := rocprofv3_folder(directory):
        return load_rocprofv3(folder)
    raise ToolError(f"{directory}: no profile: neither <script>_kernels.csv (run_pytorch_profiler.py) nor stats.csv "
                    "(run_rocprofv3.sh)")  # fmt: skip


def is_copy(name: str) -> bool:
    """A copy or memset of the PyTorch profiler. rocprofv3 lists only kernels, and some of them copy."""
    return name.startswith(("Memcpy", "Memset"))


def match(sides: Sequence[Profile], divisors: Sequence[int]) -> list[Kernel]:
    """Kernels by name, those with the longest time on either side first."""
    rows = [{row.name: row for row in side.statistics} for side in sides]

    def values(name: str, of: Callable[[KernelStatistics], float]) -> tuple[float, float]:
        first, second = (of(side[name]) / d if name in side else 0 for side, d in zip(rows, divisors, strict=True))
        return first, second

    kernels = [
        Kernel(
            name,
            category(name),
            is_copy(name),
            values(name, lambda row: row.calls),
            values(name, lambda row: row.total_ns / 1e6),
        )
        for name in rows[0] | rows[1]
    ]
    return sorted(kernels, key=lambda kernel: (-max(kernel.ms), kernel.name))


def sums(kernels: Sequence[Kernel], copies: bool = False) -> tuple[list[float], list[float]]:
    """Launches, without copies unless asked for, and milliseconds on each side."""
    counted = [kernel for kernel in kernels if copies or not kernel.is_copy]
    return (
        [sum(kernel.calls[side] for kernel in counted) for side in (0, 1)],
        [sum(kernel.ms[side] for kernel in kernels) for side in (0, 1)],
    )


def change(before: float, after: float) -> str:
    """After over before, as a signed percentage."""
    return f"{100 * (after / before - 1):+.1f} %" if before else "-"


def kernel_lines(title: str, kernels: Sequence[Kernel], sides: Sequence[int], top: int, per: str) -> list[str]:
    """A section with a table of kernels and its columns for one side or both; at most `top` rows."""
    launches, milliseconds = sums(kernels, copies=True)
    total = " -> ".join(f"{launches[side]:.10g}" for side in sides)
    time = " -> ".join(f"{milliseconds[side]:.3f}" for side in sides)
    lines = ["", f"## {title}", "", f"Kernel names: {len(kernels)}; {total} launches and {time} ms{per}."]
    if not kernels:
        return lines
    labels = [""] if len(sides) == 1 else [f"{SIDES[side]} " for side in sides]
    header = ["kernel", "category", *(f"{label}launches" for label in labels), *(f"{label}ms" for label in labels)]
    rows = [
        [
            f"`{short_name(kernel.name)}`",
            kernel.category,
            *(f"{kernel.calls[side]:.10g}" for side in sides),
            *(f"{kernel.ms[side]:.3f}" for side in sides),
        ]
        for kernel in kernels[:top]
    ]
    lines += ["", markdown_table(header, rows, text_columns=2)]
    if len(kernels) > top:
        lines += ["", f"The first {top}; --top shows more, --output of {PROG} writes all of them as CSV."]
    return lines


def report(sides: Sequence[Profile], kernels: Sequence[Kernel], notes: Sequence[str], per_step: bool, top: int) -> str:
    """The whole comparison in Markdown."""
    per = " per step" if per_step else " in all"
    cpu = sides[0].unit == "operators"
    launches, times = sums(kernels)
    (before, after), (before_ms, after_ms) = launches, times
    names = [sum(1 for kernel in kernels if kernel.calls[side] and not kernel.is_copy) for side in (0, 1)]
    clock = "Self time of operators" if cpu else "Kernel time"
    lines = ["# Kernels, baseline and fused", ""] if top else []
    for label, side in zip(SIDES, sides, strict=True):
        script = f"{side.settings['script']}, " if side.settings else ""
        steps = f"{side.steps} steps" if side.steps else "an unknown number of steps"
        lines.append(f"- {label}: `{side.directory}` ({script}{steps}, {side.source})")
    lines += [f"- note: {note}" for note in notes]
    if cpu:
        lines += ["", "On a CPU there are no kernels. The table has all calls of operators, views and outer ones too."]
        before, after = (side.settings.get("kernels", {}).get("per_step") for side in sides)
    lines.append("")
    if before and after:
        lines += [
            f"- {'Operator calls, as the script counts,' if cpu else 'Kernels'}{per}: {before:.10g} -> {after:.10g}",
            f"- Kernel reduction: {100 * (1 - after / before):.1f} %{' (of operator calls)' if cpu else ''}",
        ]
    lines += [
        f"- {clock}{per}: {before_ms:.3f} ms -> {after_ms:.3f} ms ({change(before_ms, after_ms)})",
        f"- Distinct names: {names[0]} -> {names[1]}",
    ]
    rows = []
    for name in CATEGORIES:
        if members := [kernel for kernel in kernels if kernel.category == name]:
            rows.append(category_row(name, members))
    lines += ["", "## By category", ""] if top else [""]
    header = ["category", *(f"{side} launches" for side in SIDES), "change", *(f"{side} ms" for side in SIDES)]
    lines.append(markdown_table([*header, "change of time"], [*rows, category_row("all", kernels)]))
    if any(kernel.is_copy for kernel in kernels):
        lines += ["", "Launches here contain copies and memsets, the numbers above do not."]
    if not top:
        return "\n".join(lines) + "\n"
    lines += kernel_lines("Vanished", [k for k in kernels if k.found == "baseline"], [0], top, per)
    lines += kernel_lines("New", [k for k in kernels if k.found == "fused"], [1], top, per)
    both = [k for k in kernels if k.found == "both"]
    moved = sorted((k for k in both if k.calls[0] != k.calls[1]), key=lambda k: -abs(k.ms[1] - k.ms[0]))
    lines += kernel_lines("In both, with another number of launches", moved, [0, 1], top, per)
    same = [k for k in both if k.calls[0] == k.calls[1]]
    lines += kernel_lines("In both, launched as often", same, [0, 1], top, per)
    return "\n".join(lines) + "\n"


def category_row(name: str, kernels: Sequence[Kernel]) -> list[str]:
    """One row of the table of categories."""
    launches, times = sums(kernels, copies=True)
    return [
        name,
        *(f"{value:.10g}" for value in launches),
        change(*launches),
        *(f"{value:.3f}" for value in times),
        change(*times),
    ]


def as_row(kernel: Kernel) -> dict:
    """A row of the CSV file."""
    return {
        "name": kernel.name,
        "category": kernel.category,
        "found_in": kernel.found,
        **{f"{side}_launches": kernel.calls[i] for i, side in enumerate(SIDES)},
        **{f"{side}_ms": kernel.ms[i] for i, side in enumerate(SIDES)},
    }


def compare(sides: Sequence[Profile], top: int) -> tuple[list[Kernel], list[str], str]:
    """The kernels of both sides, what differs beside them, and the report; ToolError where they do not compare."""
    known = [(label, side.settings) for label, side in zip(SIDES, sides, strict=True) if side.settings]
    check_family(known)
    if sides[0].unit != sides[1].unit:
        raise ToolError(f"one side has {sides[0].unit}, the other {sides[1].unit}: profile both on the same device")
    per_step = all(side.steps for side in sides)
    kernels = match(sides, [side.steps if per_step else 1 for side in sides])
    for side, launches in zip(sides, sums(kernels)[0], strict=True):
        if not launches:
            raise ToolError(f"{side.directory}: the profile has no kernels")
    notes = differences(known, ignore=("num_steps", "warmup_steps") if per_step else ())
    if not per_step:
        of = dict(zip(SIDES, sides, strict=True))
        unknown = ", ".join(label for label, side in of.items() if not side.settings)
        whole = ", ".join(label for label, side in of.items() if side.settings and not side.steps)
        notes.append("the number of steps is not known for both sides, so these are totals")
        if unknown:
            notes[-1] += f"; model, sizes and steps of {unknown} are not checked: no result file belongs to the profile"
        if whole:
            notes[-1] += f"; {whole} have the warm-up, too, which rocprofv3 of ROCm 6 cannot leave out"
    if sides[0].source != sides[1].source:
        notes.append("two profilers may write the name of one kernel in two ways")
    return kernels, notes, report(sides, kernels, notes, per_step, top)


def analyse(args: argparse.Namespace) -> int:
    """Print and write the comparison; returns the exit status."""
    kernels, notes, text = compare([load_profile(args.baseline), load_profile(args.fused)], args.top)
    print_notes(PROG, *notes)
    print(text, end="")
    if args.output:
        write_csv(args.output / "kernel_reduction.csv", [as_row(kernel) for kernel in kernels])
        write_text(args.output / "kernel_reduction.md", text)
        print(f"\nWritten: {args.output}/kernel_reduction.csv, kernel_reduction.md")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = documented_parser(PROG, __doc__)
    parser.add_argument("--baseline", type=Path, required=True, metavar="DIR", help="profile without fusion")
    parser.add_argument("--fused", type=Path, required=True, metavar="DIR", help="profile with fusion")
    parser.add_argument("--output", type=Path, metavar="DIR", help="also write CSV and Markdown there")
    parser.add_argument(
        "--top",
        type=at_least(0),
        default=10,
        metavar="N",
        help="kernels per table; 0: only totals and categories (default: 10)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = build_parser().parse_args(argv)
    return run_tool(PROG, lambda: analyse(args))


if __name__ == "__main__":
    sys.exit(main())

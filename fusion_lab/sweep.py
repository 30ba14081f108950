"""Sweeps: versions or sets of fusions in turns at each size and precision, as a study that goes on
where it stopped; its tables, CSV, picture, and a sentence that says what matters.

What shares sizes, precision and group took turns together and is a team; ratios are within teams
alone. In an ablation a side is a set of the fusions that vary. Sets take turns in groups, each of
which also has none, all, and all a second time: how far that control is from all tells which
differences are none. Gains are ratios of times in the same turn, above 1 where time is saved.
"""

import argparse
import contextlib
import io
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

from fusion_lab.cli import Parser, ToolError, at_least, note, several
from fusion_lab.files import write_text
from fusion_lab.host import free_memory
from fusion_lab.plot import QUANTITIES, draw_lines, points_of, values_of
from fusion_lab.records import read_study
from fusion_lab.runs import (
    CELL,
    SIZES,
    Run,
    baseline_in_turns,
    baseline_of,
    beside,
    cell_columns,
    csv_rows,
    of_study,
    report_failed,
    runs_table,
)
from fusion_lab.script import (
    load_script,
    model_and_version,
    parser_around,
    script_arguments,
    script_named,
)
from fusion_lab.show import Column, ended, render, write_csv
from fusion_lab.study import as_rows, by_side, heading, measure_study, median
from fusion_lab.turns import (
    TURN_MS,
    graph_of,
    in_turns,
    make_trainer,
    named,
    on_gpu,
    ratios,
    short_run,
    speedup,
    verdict,
    words_of,
)

CONTROL = "all again"  # all of the fusions, built and captured a second time
GROUP = 12  # sets of fusions that are in memory together
SMALLEST_GROUP = 4  # none, all, the control and one more
LOSS_STEPS = ("--warmup-steps", "2", "--num-steps", "8")
PRECISIONS = {
    "fp32": [],
    "TF32": ["--matmul-precision", "high"],
    "bf16": ["--use-amp"],
    "fp16": ["--use-amp", "--amp-dtype", "float16"],
}
# on a CPU where no size is asked for: an ablation then takes about three minutes on two cores
SMALL = {
    "tiny_llama": "--hidden-dim 128 --num-layers 2 --num-heads 4 --seq-len 64 --batch-size 2",
    "tiny_openfold": "--num-blocks 1 --num-seqs 8 --seq-len 24 --batch-size 1",
}
Set = tuple[str, ...]  # the fusions that are on


@dataclass(frozen=True)
class Side:
    """What takes turns: a script with arguments, and which of the fusions that vary are on."""

    script: str
    argv: list[str]
    on: Set | None = None


Point = tuple[dict, dict[str, Side]]  # what names a team, and its sides


# --- what is measured


def new_fusions(module: ModuleType) -> list[str]:
    """Flags that a version adds to the one before, in the same folder; all without one."""
    path = Path(module.__file__)
    before = path.with_name(f"{path.stem.removesuffix(str(module.VERSION))}{module.VERSION - 1}.py")
    known = {flag for flag, *_ in load_script(str(before)).FUSIONS} if before.is_file() else set()
    return [flag for flag, *_ in module.FUSIONS if flag not in known]


def fusion_sets(fusions: Sequence[str], every: bool = False) -> list[Set]:
    """None, each alone, all but each, and all; or every combination."""
    number = len(fusions)
    few = {0, min(1, number), max(0, number - 1), number}
    sets = []
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


def fusion_teams(
    side: Side, fusions: Sequence[str], sets: Sequence[Set], group: int
) -> Iterator[Point]:
    """These sets in groups of at most so many, each with none of the fusions, all, and the
    control."""
    others = [on for on in sets if 0 < len(on) < len(fusions)]
    size = group - 3
    groups = [others[i : i + size] for i in range(0, len(others), size)] or [[]]
    for number, chosen in enumerate(groups, 1):
        sides = {}
        for on in (tuple(fusions), *chosen, ()):
            flags = [f"--disable-{fusion}" for fusion in fusions if fusion not in on]
            if "--disable-all-fusion" in side.argv:  # else they are on
                flags = [f"--enable-{fusion}" for fusion in on]
            sides[set_name(on, fusions)] = Side(side.script, [*side.argv, *flags], on)
        sides[CONTROL] = sides["all"]  # last: as far from the first as any
        yield {"group": number}, sides


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Without the lines of the runs: a point is one line."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def measured(
    sides: Mapping[str, Side], rounds: int, counted: bool = True, loss: Sequence[str] | None = None
) -> list[dict]:
    """A row for each side. With `loss` it has the last loss of a run by itself, for which these
    arguments stand before those of the side; a set of fusions has its speed-up over none."""
    pairs = {name: (side.script, side.argv) for name, side in sides.items()}
    with silence():
        rows = in_turns(pairs, rounds, counted)
        for name, (script, argv) in pairs.items() if loss is not None else ():
            if "error" not in rows[name]:
                rows[name] |= last_loss(script, [*loss, *argv])
    for name, side in sides.items():
        if side.on is not None:
            gain = speedup(rows["none"], rows[name])
            rows[name] |= {"on": [*side.on], "speedup": gain}
    return as_rows(rows)


def last_loss(script: str, argv: Sequence[str]) -> dict:
    """The last loss of a short run, or how it ended."""
    try:
        result = short_run(script, argv)
    except Exception as error:  # a row, as in turns
        return {"status": "failed", "error": str(error).partition("\n")[0]}
    if result["status"] == "oom":
        return {"status": "oom", "error": result["error"]}
    return {"final_loss": result["loss"].get("final")}


class Cost:
    """About how many seconds a point takes: by steps of the first side of its script that trains,
    and by the FLOPs of each."""

    def __init__(self, points: Sequence[Point], rounds: int, loss: Sequence[str] | None):
        self.points = {str(names): sides for names, sides in points}
        self.rounds = rounds
        self.loss = loss
        self.trials: dict[str, tuple[float, float]] = {}  # of each script, see `tried`

    def __call__(self, names: dict) -> float:
        sides = self.points[str(names)].values()
        for side in sides:
            with contextlib.suppress(Exception), silence():  # what does not train is a row
                if side.script not in self.trials:
                    self.trials[side.script] = self.tried(side)
                start, per_flop = self.trials[side.script]
                flops, args = self.flops(side)
                step = per_flop * flops
                turn = max(TURN_MS / 1e3, 2 * step)
                seconds = start + (args.warmup_steps + 6) * step + self.rounds * turn
                if self.loss is not None:
                    seconds += start + (args.warmup_steps + args.num_steps) * step
                return seconds * len(sides)
            free_memory()
        return 0.0

    def tried(self, side: Side) -> tuple[float, float]:
        """Seconds until a first step is done, and seconds of a step per FLOP."""
        began = time.monotonic()
        trainer = make_trainer(script_named(side.script), side.argv)
        trainer.take(1, measured=False)
        start = time.monotonic() - began
        step = min(trainer.take(1, measured=False) for _ in range(3)) / 1e3  # of a busy machine
        trainer = None  # and its memory
        free_memory()
        return start, step / self.flops(side)[0]

    def flops(self, side: Side) -> tuple[int, argparse.Namespace]:
        import torch

        module = script_named(side.script)
        args = module.parse_args([*(self.loss or ()), *side.argv])
        batch = module.make_batches(args, torch.device("cpu"), args.seed).next_batch()
        return module.count_flops(args, batch), args


# --- the arguments


def sweep_parser(prog: str, documentation: str | None, script: str, rounds: int) -> Parser:
    """The parser of a program that measures a sweep, or shows what one has measured."""
    parser = parser_around(prog, documentation, script, "the scripts")
    add = parser.add_argument
    sizes = {"type": several(at_least(1)), "metavar": "N,N", "default": [None]}
    one = "(default: as the arguments say)"
    add("--seq-lengths", **sizes, help=f"sequence lengths {one}")
    add("--batch-sizes", **sizes, help=one)
    choices = {"type": several(among=[*PRECISIONS]), "metavar": "P,P", "default": [None]}
    add("--precisions", **choices, help=f"of {', '.join(PRECISIONS)} {one}")
    compilers = "modes of torch.compile that take turns, or none (default: as the arguments say)"
    add("--compilers", type=several(), metavar="M,M", default=[None], help=compilers)
    parser.add_count("--rounds", rounds, "turns of each side")
    study = {"type": Path, "dest": "output", "metavar": "FILE.json"}
    add("--output", "--json", **study, help="the study (default: a name of its own here)")
    parser.add_path("--table", "FILE.json", "measure nothing, show this study")
    parser.add_path("--csv", "FILE.csv", "also write the rows there")
    parser.add_path("--plot", "FILE.png", "also draw the speed-ups with the ranges of their turns")
    return parser


def names_sizes(argv: Sequence[str], module: ModuleType) -> bool:
    """Is a size of the model or of its batches among these arguments?"""
    sizes = {f"--{field.name.replace('_', '-')}" for field in fields(module.ModelConfig)}
    return bool((sizes | {"--batch-size", "--seq-len"}) & words_of(argv))


def small_sizes(args: argparse.Namespace, argv: Sequence[str], module: ModuleType) -> list[str]:
    """Sizes that take little time on a CPU, where none is asked for; none elsewhere."""
    axes = [*args.seq_lengths, *args.batch_sizes] != [None, None]
    small = SMALL.get(model_and_version(module.SCRIPT)[0])
    if axes or not small or on_gpu(argv) or names_sizes(argv, module):
        return []
    note(f"a CPU, and no size is given: {module.SCRIPT} gets {small}")
    return small.split()


def sweep_points(
    args: argparse.Namespace,
    argv: Sequence[str],
    teams: Iterable[Sequence[str]],
    sets_of: Callable[[ModuleType], tuple[list[str], list[Set]]] | None = None,
    grid: Mapping[bool, tuple[list[int], list[int]]] | None = None,
) -> list[Point]:
    """The points of a sweep: scripts of each team in turns, at each size and in each precision.

    What does not fit a script is said now.

    Args:
        sets_of: gives the fusions of a script that vary, and their sets: these take turns, and not
            the scripts.
        grid: sequence lengths and batch sizes with a GPU and without one, where none are given.
    """
    points = []
    for team in teams:
        small = small_sizes(args, argv, script_named(team[0]))
        lengths, batches = args.seq_lengths, args.batch_sizes
        if grid and [*lengths, *batches] == [None, None]:
            lengths, batches = grid[on_gpu(argv)]
        for length, batch, precision in itertools.product(lengths, batches, args.precisions):
            asked = [*small, *argv, *PRECISIONS.get(precision, ())]
            asked += ["--seq-len", str(length)] if length else []
            asked += ["--batch-size", str(batch)] if batch else []
            sides = sides_of(team, asked, args.compilers)
            found = [(names_of(sides), sides)]
            if sets_of:
                found = [
                    (names_of({name: side}, "version", "mode") | group, of_group)
                    for name, side in sides.items()
                    for group, of_group in fusion_teams(
                        side, *sets_of(script_named(side.script)), args.group_size
                    )
                ]
            points += found
    for _, sides in points:
        names_of(sides)
    return points


def sides_of(
    team: Sequence[str], argv: Sequence[str], compilers: Iterable[str | None]
) -> dict[str, Side]:
    """Versions as they are, and under each mode of torch.compile."""
    sides = {}
    for mode, script in itertools.product(compilers, team):
        name = model_and_version(script)[1] or script
        compiled = []
        if mode not in (None, "none"):
            name += f" compiled {mode}"
            compiled = ["--enable-torch-compile", "--torch-compile-mode", mode]
        sides[name] = Side(script, graph_of([*argv, *compiled]))
    return sides


def names_of(sides: Mapping[str, Side], *more: str) -> dict:
    """What the sides of a team share; a script ends the program if its arguments do not fit."""
    for side in reversed(sides.values()):
        args = script_arguments(script_named(side.script), side.argv, None)[1]
        row = named(side.script, side.argv, args)
    return {key: row[key] for key in (*CELL, *more) if key in row}


# --- what each fusion is worth


def over(reference: str, rows: Iterable[dict], side: str, key: str = "turns_ms") -> list[float]:
    """Times of a side over the reference's in the same turns of a group, or its peaks of memory."""
    found = []
    for sides in by_side(rows, "seed", "group").values():
        pair = [sides.get(name, {}).get(key) for name in (side, reference)]
        if all(pair):
            pair = [value if isinstance(value, list) else [value] for value in pair]
            found += [one / other for one, other in zip(*pair, strict=True)]
    return found


def noise(rows: Iterable[dict]) -> float | None:
    """How far the control was from all at most, as a part of the time; None without a control."""
    return max((abs(ratio - 1) for ratio in over("all", rows, CONTROL)), default=None)


def worth_of(rows: Sequence[dict], fusions: Sequence[str]) -> list[dict]:
    """What each fusion gains in a cell, alone and added last with its range, and what that shows
    beside the control. None where it was not measured."""
    limit = noise(rows)
    found = []
    for fusion in fusions:
        without = set_name(tuple(name for name in fusions if name != fusion), fusions)
        last = over("all", rows, without)
        if not last:  # older studies have all in another group, with a none of its own
            both = (over("none", rows, side) for side in (without, "all"))
            last = [one / other for one, other in zip(*both, strict=False)]
        shown = verdict(last) if last else None
        if last and limit and abs(median(last) - 1) <= limit:
            shown = "no difference seen"
        ends = [ended(row) for row in rows if row["side"] == without and ended(row)]
        # over the control's: what compiling leaves may count as the first side's
        memory = over(CONTROL, rows, without, "peak_mb")
        found.append(
            {
                "fusion": fusion,
                "alone": median(over(set_name((fusion,), fusions), rows, "none")),
                "last": ends[0] if ends else median(last),
                "range": last and f"{min(last):.2f}x to {max(last):.2f}x",
                "memory": median([100 * (ratio - 1) for ratio in memory]),
                "shown": shown,
            }
        )
    found = [line for line in found if line["alone"] or line["last"]]
    if limit is not None and found:
        control = {"last": f"within {100 * limit:.1f} %"}
        found.append({**dict.fromkeys(found[0]), "fusion": CONTROL, **control})
    return found


def cells_of(rows: Iterable[dict]) -> list[list[dict]]:
    """Rows of an ablation that share all but their group."""
    found = defaultdict(list)
    for row in rows:
        keys = [key for key in (*CELL, "script", "mode") if key != "group"]
        found[tuple(row.get(key) for key in keys)].append(row)
    return [*found.values()]


def varying(rows: Iterable[dict]) -> list[str]:
    return max((row["on"] for row in rows), key=len)


def worth_table(runs: Sequence[Run]) -> str:
    """What each fusion gains at each size, and what that shows."""
    lines = []
    for cell in cells_of(run.asked for run in runs):
        lines += [{"asked": cell[0], **line} for line in worth_of(cell, varying(cell))]
    of_cell = [
        replace(column, value=lambda row, column=column: column.of(SimpleNamespace(**row)))
        for column in cell_columns(runs)
        if column.label != CELL["group"]
    ]
    columns = [
        Column("what each fusion gains", "fusion"),
        *of_cell,
        Column("alone", "alone", ".2f", "x"),
        Column("added last", "last", ".2f", "x"),
        Column("in turns", lambda row: row["range"] or None),
        Column("MB without it", "memory", "+.1f", " %"),
        Column("what that shows", "shown", text=True),
    ]
    return render(columns, lines)


def conclusion(runs: Sequence[Run]) -> str:
    """At each size in a sentence: what makes a difference, and what shows none."""
    rows = [run.asked for run in runs]
    fusions = any("on" in row for row in rows)
    names = [column for column in cell_columns(runs) if column.label != CELL["group"]]
    teams = defaultdict(list)
    for run in sorted((r for r in runs if r.side), key=lambda run: not run.is_first):
        teams[run.team].append(run.asked)
    sentences = []
    for cell in cells_of(rows) if fusions else teams.values():
        where = ", ".join(f"{c.label} {c.of(SimpleNamespace(asked=cell[0]))}" for c in names)
        if fusions:
            found = {line["fusion"]: line for line in worth_of(cell, varying(cell))}
            over = {n: (line["last"], line["shown"]) for n, line in found.items() if line["shown"]}
        else:
            first, *others = cell
            turns = {row["side"]: ratios(first, row) for row in others}
            over = {name: (median(r), verdict(r)) for name, r in turns.items() if r}
        if over:
            sentences.append(f"{where or 'At these sizes'}: {in_a_sentence(over)}.")
    return "\n".join(sentences)


def in_a_sentence(over: Mapping[str, tuple[float, str]]) -> str:
    parts = defaultdict(list)
    for name, (ratio, shown) in over.items():
        if shown in ("no difference seen", "too few turns to tell"):
            parts[shown].append(name)
        else:
            parts["saves time" if ratio > 1 else "takes longer"].append(f"{name} ({ratio:.2f}x)")
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items())


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Speed-ups over the first side of a team, or samples per second where no two took turns,
    against the size that varies, with the ranges of the turns; a part for each model and each of
    the other sizes and precisions."""
    varied = [
        key
        for key in SIZES
        if len({(run.asked.get("model"), run.asked.get(key)) for run in runs})
        > len({run.asked.get("model") for run in runs})
    ]
    x = varied[-1] if varied else "seq_len"
    columns = [c for c in cell_columns(runs) if c.label not in (CELL[x], CELL["group"])]
    beside_first = [run for run in runs if baseline_in_turns(run, runs)]
    quantity = QUANTITIES["speedup" if beside_first else "throughput"]
    drawn = defaultdict(list)
    for run in beside_first or [run for run in runs if run.measured]:
        if run.side != CONTROL:
            part = ", ".join(f"{column.label} {column.of(run)}" for column in columns)
            drawn[part].append(replace(run, name=run.side or run.name))
    if not drawn:
        raise ToolError("there is nothing to draw: nothing was measured", status=1)
    parts = {}
    for part, shown in drawn.items():
        points = points_of(shown, x)
        parts[part] = points, values_of(points, quantity, runs)
    draw_lines(path, parts, CELL[x], quantity)


# --- the programs


def measure_points(
    args: argparse.Namespace,
    argv: Sequence[str],
    points: Sequence[Point],
    path: Path,
    loss: Sequence[str] | None = None,
    **settings: object,
) -> Path:
    """Measure what is not measured yet; returns where the study is."""
    parts = [(names, partial(measured, sides, args.rounds, True, loss)) for names, sides in points]
    cost = Cost(points, args.rounds, loss)
    settings |= {"rounds": args.rounds, "argv": [*argv]}
    measure_study(path, parts, cost=cost, **settings)
    return path


def show(args: argparse.Namespace, path: Path, report: Path | None = None) -> int:
    """Print the tables of a study and what it shows, and write what is asked for; returns the exit
    status."""
    content = read_study(path, ("script", "argv", "batch_size", "precision"))
    scripts = dict.fromkeys(row.get("model", row["script"]) for row in content["rows"])
    return show_runs(args, of_study(path, content), heading(content, " and ".join(scripts)), report)


def tables_of(
    runs: Sequence[Run], more: Sequence[Column] = ()
) -> tuple[list[str], list[dict], list[Run]]:
    """A table for each model, and of sets of fusions what each gains; the rows and their runs."""
    tables, rows, shown = [], [], []
    for model in dict.fromkeys(model_and_version(run.result["script"])[0] for run in runs):
        of_model = [r for r in runs if model_and_version(r.result["script"])[0] == model]
        same = [replace(run, name=run.side or run.name) for run in of_model]
        found = [beside(run, baseline_of(run, same)) for run in same]
        scripts = [*dict.fromkeys(run.result["script"] for run in same)]
        label = scripts[0] if len(scripts) == 1 else model
        tables.append(runs_table(same, found, title=label, cells=True, more=more))
        tables += [worth_table(same)] if any("on" in run.asked for run in same) else []
        rows += found
        shown += same
    return tables, rows, shown


def show_runs(
    args: argparse.Namespace,
    runs: Sequence[Run],
    title: str,
    report: Path | None = None,
    more: Sequence[Column] = (),
) -> int:
    """The same of runs."""
    tables, rows, shown = tables_of(runs, more)
    text = "\n\n".join(filter(None, [title, *tables, conclusion(shown)]))
    print(text, flush=True)
    if report:
        write_text(report, f"# Versions compared\n\n{text}\n")
    if args.csv:
        write_csv(args.csv, csv_rows(rows, shown))
    if args.plot:
        draw(args.plot, shown)
    if written := [str(path) for path in (report, args.csv, args.plot) if path]:
        print(f"\nWritten: {', '.join(written)}")
    if any(run.status == "oom" and "on" in run.asked for run in runs):
        beside_others = "out of memory beside the other sets of a group"
        note(f"{beside_others}: a smaller --group-size takes less")
    return report_failed(runs)

"""Runs: result files found, named and put side by side.

Several runs may be in one file, as `compare_runs.py --save` writes it; FILE.json/NAME is then the
path of one of them.
"""

import glob
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from fusion_lab.cli import ToolError, note, say
from fusion_lab.files import read_json
from fusion_lab.records import Steps, Summary, checked, checked_study, read
from fusion_lab.script import model_and_version, named_run, precision_of
from fusion_lab.show import Column, ended, rate, render
from fusion_lab.turns import ratios, spread

# What is named where it is not the same; with the value where a file of an earlier core has
# none.
SAME_TRAINING = {
    **dict.fromkeys(("batch_size", "num_steps", "warmup_steps", "learning_rate", "seed")),
    "processes": 1,
    "torch_compile": False,
    "cuda_graph": False,
}
SAME_ENVIRONMENT = ("device_name", "torch")
SIZES = ("batch_size", "seq_len")  # what names a row of a study, with
NAMES = ("precision", "mode", "seed", "group", "side")
# mean over median step, from which a run was disturbed; 67 of the 71 in exercises.json are below
UNSTEADY = 1.1
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


@dataclass(frozen=True)
class Run:
    """One result file under the name that its row or line gets."""

    name: str
    path: Path
    result: dict

    @property
    def status(self) -> str:
        return self.result["status"]

    def number(self, group: str, key: str) -> float | list[float] | None:
        """A measured value, None if the run does not have it or did not finish."""
        return self.result.get(group, {}).get(key) if self.status == "ok" else None

    @property
    def settings(self) -> dict:
        return self.result

    @property
    def peak_mb(self) -> float | None:
        """Peak memory, None if it was not measured or the run did not finish."""
        return self.number("memory", "peak_mb")

    def row(self, alone: bool = False) -> dict:
        """What was measured, as a row of a study has it, with the final loss, or how it ended;
        `alone`: without its turns. Peak memory may be null, else what was not measured is left
        out."""
        result = self.result
        row = named_run(result["script"], result["training"])
        row |= {"fusions": fused_in(result), "peak_mb": self.peak_mb}
        if self.status != "ok":
            return {**row, "status": self.status, "error": self.result.get("error")}
        times = ("samples_per_sec", "batch_ms", "batch_median_ms", "batch_p95_ms")
        measured = {key: self.number("timing", key) for key in times}
        measured |= {key: self.number("kernels", key) for key in ("per_step", "host_launches")}
        measured["unit"] = result["kernels"].get("unit")
        measured["turns_ms"] = None if alone else result["timing"].get("turns_ms")
        measured["final_loss"] = self.number("loss", "final")
        return row | {key: value for key, value in measured.items() if value is not None}


def fused_in(result: Mapping) -> list[str]:
    """The flags of the fusions that were on."""
    fusions = result.get("fusions") or {}
    return [name.replace("_", "-") for name, on in fusions.items() if on]


def by_name(named: Iterable[tuple[str, dict]]) -> dict[str, dict]:
    """Results for one file, by their names as a path below the file has them: 'a//b/' is 'a/b',
    '/a' is 'a'."""
    runs: dict[str, dict] = {}
    for name, result in named:
        key = PurePosixPath(name.strip("/")).as_posix()
        if key in runs or key == ".":
            raise ToolError(f"{name!r} names no run, or two: give it another NAME=PATH")
        runs[key] = result
    return runs


def runs_in(file: Path, content: dict) -> dict[str, Run]:
    """The results in a file of several, by their names."""
    runs = content.get("runs")
    if not isinstance(runs, dict):
        raise ToolError(f"{file}: not a file of several runs, as compare_runs.py --save writes it")
    named = by_name(runs.items()).items()
    return {n: Run(n, file / n, checked(Summary, result, file / n)) for n, result in named}


def file_of_runs(path: Path) -> tuple[dict[str, Run], str] | None:
    """The runs in the file that this path goes through, and the rest of the path; None without
    one."""
    files = (parent for parent in path.parents if parent.suffix == ".json" and parent.is_file())
    file = next(files, None)
    return file and (runs_in(file, read_json(file)), path.relative_to(file).as_posix())


def only_file(directory: Path, pattern: str, what: str) -> Path:
    """The one file in a directory that matches."""
    paths = sorted(directory.glob(pattern))
    if not paths:
        raise ToolError(f"{directory}: {what} in this directory")
    if len(paths) > 1:
        several = f"several files {pattern} ({', '.join(path.name for path in paths)})"
        raise ToolError(f"{directory}: {several}, name one of them")
    return paths[0]


def collected(top: Path, files: str, step: str | None = None) -> Path | str:
    """Where such files are, as FOLDER/FILES has them below what run_all_profilers.sh wrote, or as
    FILES in a folder of their own; or why there are none that this `step` of it left."""
    if not top.is_dir():
        made = "./run_all_profilers.sh --script tiny_llama_v1.py makes profiles_tiny_llama_v1"
        raise ToolError(f"{top}: no such directory; {made}")
    steps = read(Steps, top / "summary.json")["steps"] if (top / "summary.json").is_file() else []
    for found in steps:  # what is there is of an earlier run then
        if found["name"] == step and found["status"] != "ok":
            return found["reason"] or "nothing there"
    own = [*top.glob(files.rpartition("/")[2])]
    folders = sorted({path.parent for path in own or top.glob(files)})
    if len(folders) > 1:
        names = ", ".join(path.name for path in folders)
        raise ToolError(f"{top}: several profiles ({names}), name one of them")
    return folders[0] if folders else "nothing there"


def load_run(path: Path, name: str | None = None) -> Run:
    """The result in a file or directory, or one of several in a file. It is called after the
    directory unless it has a name."""
    if path.is_dir():
        path = only_file(path, "*_summary.json", "no result file (*_summary.json)")
    if inside := file_of_runs(path):
        runs, key = inside
        if key not in runs:
            raise ToolError(f"{path}: no such run; there are {', '.join(runs)}")
        result = runs[key].result
    elif not path.exists():
        raise ToolError(f"{path}: no such file or directory")
    else:
        result = read(Summary, path)
    if name is None:
        alone = path.name.endswith("_summary.json")
        name = path.resolve().parent.name if alone else path.name.removesuffix(".json")
    return Run(name, path, result)


def runs_of(tops: Mapping[str, Path], model: str) -> list[Run]:
    """Results of a model's versions that are in the folders of these, under their names."""
    runs = []
    for version, top in tops.items():
        name = f"{model}_{version}_summary.json"
        place = collected(top, f"pytorch_profiles_{version}/{name}")
        runs += [load_run(place / name, version.upper())] if isinstance(place, Path) else []
    return runs


def versions_in(tops: Mapping[str, Path], models: Iterable[str]) -> list[dict]:
    """The results in the folders of these versions as rows, of the models that have more than one;
    notes on stderr what differs."""
    rows = []
    wanted = []
    for model in models:
        runs = runs_of(tops, model)
        wanted += [f"{model}_{version}_summary.json in {top}" for version, top in tops.items()]
        if len(runs) >= min(2, len(tops)):
            note(*differences((run.result["script"], run.result) for run in runs))
            rows += [{"side": run.name, **run.row(alone=True)} for run in runs]
    if not rows:
        raise ToolError(f"there is no {' or '.join(wanted)}")
    return rows


def split_name(argument: str) -> tuple[str | None, str]:
    """NAME=PATH as (NAME, PATH), and PATH as (None, PATH), also with an equals sign in it."""
    name, sign, path = argument.partition("=")
    if not sign or Path(argument).exists():
        return None, argument
    if not name or not path:
        raise ToolError(f"{argument!r} is not NAME=PATH")
    return name, path


def matching(path: str) -> list[Path]:
    """The path itself, or the runs that a pattern matches, also in a file of several."""
    if Path(path).exists() or not glob.has_magic(path):
        return [Path(path)]
    if inside := file_of_runs(Path(path)):
        runs, pattern = inside
        file = Path(path.removesuffix(pattern))
        found = [file / name for name in sorted(runs) if fnmatch(name, pattern)]
    else:
        matches = (Path(match) for match in sorted(glob.glob(path)))
        found = [match for match in matches if match.is_dir() or match.suffix == ".json"]
    if not found:
        raise ToolError(f"{path}: the pattern matches no directory and no result")
    return found


def load_runs(arguments: Iterable[str], lines: bool = False) -> list[Run]:
    """Runs of one model, given as PATH or NAME=PATH; a PATH can be a pattern. Where names are
    alike, paths take their place; as `lines`, a NAME= is also that of the paths after it."""
    given, name = [], None
    for argument in arguments:
        own, path = split_name(argument)
        name = own or (name if lines else None)
        if lines and name is None:
            raise ToolError(f"{argument!r} is not NAME=PATH")
        given += [(name, place) for place in matching(path)]
    runs = [load_run(place, name) for name, place in given]
    count = Counter(run.name for run in runs)
    for index, (name, place) in enumerate(given):
        if not lines and count[runs[index].name] > 1:
            if name is not None:
                raise ToolError(f"two runs are named {name}")
            runs[index] = replace(runs[index], name=str(place))
    check_family((run.name, run.result) for run in runs)
    return runs


def check_family(named: Iterable[tuple[str, dict]]) -> None:
    """ToolError if the (name, result) pairs are of different models, which do not compare."""
    models = {model_and_version(result["script"])[0]: name for name, result in reversed([*named])}
    if len(models) > 1:
        (first, name), (second, other) = [*models.items()][-1:-3:-1]
        both = f"{name} is a run of {first}, {other} of {second}"
        raise ToolError(f"{both}: different models cannot be compared")


def described(result: dict, fused: bool = False) -> str:
    """Script, device and precision of a run, and what is fused in it."""
    line = f"{result['script']} on {result['environment']['device_name']}"
    line += f", {precision_of(result['training'])}"
    return f"{line}, fused: {', '.join(fused_in(result)) or 'nothing'}" if fused else line


def settings(result: dict) -> dict:
    """What is to be the same in two runs, but for what they are compared for."""
    training, environment = result["training"], result["environment"]
    names = (*SAME_ENVIRONMENT, *(["cpu_threads"] if environment.get("device") == "cpu" else []))
    return {
        **result["config"],
        "precision": precision_of(training),
        **{name: training.get(name, default) for name, default in SAME_TRAINING.items()},
        **{name: environment.get(name) for name in names},
    }


def differences(named: Iterable[tuple[str, dict]], ignore: Sequence[str] = ()) -> list[str]:
    """One line for each setting that is not the same in all (name, result) pairs. A run that ended
    before it had built its model has no say."""
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, result in named:
        if result["config"]:
            for key, value in settings(result).items():
                values[key][str(value)].append(name)
    lines = []
    for key, by_value in values.items():
        if len(by_value) > 1 and key not in ignore:
            found = (f"{value} for {', '.join(names)}" for value, names in by_value.items())
            lines.append(f"{key} differs: {'; '.join(found)}")
    return lines


def unsteady(runs: Iterable[Run]) -> list[str]:
    """One line for each run whose mean step is much longer than its median."""
    lines = []
    for run in runs:
        keys = ("batch_ms", "batch_median_ms", "steps")
        mean, median, steps = (run.number("timing", key) for key in keys)
        if mean and median and steps and steps >= 5 and mean > UNSTEADY * median:
            longer = f"its mean step took {mean / median:.2f} times the median"
            lines.append(f"{run.name} was disturbed, {longer}: run it again")
    return lines


@dataclass(frozen=True)
class Entry:
    """A run, or a row of a study that took turns: what was measured, and what a comparison wants to
    be the same."""

    path: Path
    row: dict
    settings: dict

    def times(self) -> tuple[float, float, float]:
        """ms per step: median, shortest and longest turn; without turns median step, up to the 95th
        percentile."""
        found = self.row.get("turns_ms") or []
        if len(found) > 1:
            return statistics.median(found), min(found), max(found)
        times = map(self.row.get, ("batch_median_ms", "batch_ms", "batch_p95_ms"))
        if not (found := [ms for ms in times if ms]):
            raise ToolError(f"{self.path}: it has no times of a step")
        return found[0], min(found), max(found)


def entries_of_study(path: Path, study: dict) -> dict[str, Entry]:
    """The rows of a study that were measured in turns, by their names."""
    environment, found = study["environment"], {}
    same = {key: environment.get(key) for key in SAME_ENVIRONMENT}
    if environment.get("device") == "cpu":
        same["cpu_threads"] = environment.get("cpu_threads")
    for row in study["rows"]:
        if {"turns_ms", "status"} & row.keys() and {"script", "model"} <= row.keys():
            sizes = next(((key,) for key in ("shape", "name") if key in row), SIZES)
            names = {key: row[key] for key in (*sizes, *NAMES) if key in row}
            names = names or {"script": row["script"]}
            name = ", ".join(v if isinstance(v, str) else f"{k} {v}" for k, v in names.items())
            if name in found:
                raise ToolError(f"{path}: two rows are named {name}")
            flags = ("--enable-", "--disable-")
            argv = [word for word in row.get("argv", ()) if not word.startswith(flags)]
            asked = {"model": row["model"], "arguments": " ".join(argv) or "none"}
            found[name] = Entry(path, row, {"kind": "row of a study"} | same | asked)
    if not found:
        raise ToolError(f"{path}: no row of this study was measured in turns")
    return found


def load_entries(path: Path) -> dict[str, Entry]:
    """What a file or directory holds, by name: a run, several, or the rows of a study."""
    content = read_json(path) if path.is_file() else {}
    if isinstance(content.get("rows"), list):
        return entries_of_study(path, checked_study(content, path))
    several = isinstance(content.get("runs"), dict)
    found = {}
    for run in runs_in(path, content).values() if several else [load_run(path)]:
        row, environment = run.row(), run.result["environment"]
        first = {"kind": "run", "model": row["model"], "device_name": environment["device_name"]}
        found[run.name] = Entry(run.path, row, first | settings(run.result))
    return found


def report_failed(runs: Iterable[Run]) -> int:
    """Name runs that failed on stderr; returns 1 if there are any: out of memory is a result."""
    failed = [run for run in runs if run.status == "failed"]
    for run in failed:
        say(f"{run.name} failed: {run.result.get('error') or 'no message'} ({run.path})")
    return 1 if failed else 0


def baseline_in_turns(run: Run, runs: Iterable[Run]) -> Run | None:
    """The run that --compare-fusion measured in turns with this one, in its folder `baseline`."""
    place = (run.path.parent / "baseline" / run.path.name).resolve()

    def turns(one: Run) -> int:
        return len(one.number("timing", "turns_ms") or ())

    found = (other for other in runs if other.path.resolve() == place)
    return next((other for other in found if turns(other) == turns(run) > 1), None)


def baseline_of(run: Run, runs: Sequence[Run]) -> Run:
    """The one that it was measured in turns with, otherwise the first; a baseline is its own."""
    own = run if any(baseline_in_turns(other, [run]) for other in runs) else runs[0]
    return baseline_in_turns(run, runs) or own


def beside(run: Run, baseline: Run) -> dict:
    """The numbers of a run as a row, None where there is none or the run did not finish. Where both
    took turns the speed-up is the median of theirs, as --compare-fusion prints it."""
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
    row["in_turns"] = None
    if speedup and baseline_in_turns(run, [baseline]):
        turns = ratios(baseline.result["timing"], run.result["timing"])
        speedup, row["in_turns"] = statistics.median(turns), spread(turns)
    row["speedup"] = speedup
    row["processes"] = row["processes"] or 1  # files of an earlier core do not say
    alone = baseline.number("training", "processes") or 1
    row["scaling_efficiency_percent"] = speedup and 100 * speedup * alone / row["processes"]
    row["memory_change_percent"] = None if memory is None else 100 * (memory - 1)
    return {**row, "path": str(run.path)}


def renamed(sides: Mapping[str, Run]) -> list[Run]:
    return [replace(run, name=label) for label, run in sides.items()]


def runs_section(sides: Mapping[str, Run]) -> str:
    """The table of these runs beside the first of them, and what to know about it."""
    runs = renamed(sides)
    rows = [beside(run, baseline_of(run, runs)) for run in runs]
    bad = [run for run in runs if run.status != "ok"]
    notes = [*unsteady(runs), *(f"{r.name} did not finish: {r.result.get('error')}" for r in bad)]
    parts = [runs_table(runs, rows)]
    parts += ["\n".join(f"- note: {note}" for note in notes)] if notes else []
    if not any(row["in_turns"] for row in rows):
        alone = "Each run was measured by itself."
        parts.append(f"{alone} `--compare-fusion` of a script measures both sides in turns.")
    return "\n\n".join(parts)


def runs_table(runs: Sequence[Run], rows: Sequence[dict], times: bool = True) -> str:
    """A table of these runs; without `times` only memory, kernels and loss, the same in every
    run."""
    units = sorted(
        {run.result["kernels"]["unit"] for run in runs if run.result["kernels"].get("unit")}
    )
    scaled = len({row["processes"] for row in rows if row["speedup"]}) > 1

    def where_measured(*columns: Column) -> list[Column]:
        return [column for column in columns if any(column.of(row) is not None for row in rows)]

    of_times = [
        Column("samples/sec", lambda row: ended(row) or rate(row["samples_per_sec"])),
        Column("speed-up", "speedup", ".2f", "x"),
        *where_measured(Column("in turns", "in_turns")),
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

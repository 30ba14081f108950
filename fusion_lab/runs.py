"""Runs: what result files hold, in whatever file or folder, named and put side by side.

A run is a result of a script, or a row of a study. Several runs may be in one file, as
`compare_runs.py --save` writes it; FILE.json/NAME is then the path of one of them.
"""

import glob
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from fusion_lab.cli import ToolError, note, say
from fusion_lab.files import below, read_json
from fusion_lab.host import PEAK_TFLOPS
from fusion_lab.records import Steps, Summary, checked, checked_study, read
from fusion_lab.script import mode_of, model_and_version, precision_of
from fusion_lab.show import Column, rate, render
from fusion_lab.study import in_words, launch_of
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
# of runs that a profiler slowed down, and what a script kept of an earlier one in its folder
PASSED_OVER = r"(^|/)rocprof.*_summary\.json$|_summary\.\d+\.json$"
OTHER_FILES = {"rows", "modules", "categories", "chains", "stages"}  # fields of other programs
NAMES = ("precision", "mode", "seed", "group", "side", "version")
# mean over median step, from which a run was disturbed; 67 of the 71 in exercises.json are below
UNSTEADY = 1.1
CELL = {  # what rows that took turns share, and what tables call it
    "model": "model",
    "shape": "size",
    "batch_size": "batch size",
    "seq_len": "length",
    "precision": "precision",
    "group": "turns of group",
}
ASKED = ("batch_size", "num_steps", "warmup_steps", "learning_rate", "seed", "deterministic")
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
    """One result under the name that its row or line gets."""

    name: str
    path: Path
    result: dict
    team: str = ""  # what took turns together
    is_first: bool = False  # of its team, which the others are compared with
    asked: dict = field(default_factory=dict)  # what a row of a study says of itself
    repeats: tuple[float, ...] = ()  # ms per step of the runs of which this is the median

    @property
    def status(self) -> str:
        return self.result["status"]

    @property
    def measured(self) -> bool:
        """Did it finish, or was it interrupted when all its steps were done?"""
        interrupted = self.result.get("exit_status") == 130
        done = self.result.get("timing", {}).get("steps")
        whole = done is not None and done == self.result["training"].get("num_steps")
        return self.status == "ok" or (interrupted and whole)

    def number(self, group: str, key: str) -> float | list[float] | None:
        """A measured value, None if the run does not have it or was not `measured`."""
        return self.result.get(group, {}).get(key) if self.measured else None

    def times(self) -> tuple[float, float, float]:
        """ms per step: median, shortest and longest turn or repeat; without them median step, up to
        the 95th percentile."""
        found = self.repeats or self.number("timing", "turns_ms") or []
        if len(found) > 1:
            return statistics.median(found), min(found), max(found)
        keys = ("batch_median_ms", "batch_ms", "batch_p95_ms")
        times = (self.number("timing", key) for key in keys)
        if not (found := [ms for ms in times if ms]):
            raise ToolError(f"{self.path}: it has no times of a step")
        return found[0], min(found), max(found)

    @property
    def side(self) -> str:
        return self.asked.get("side", "")

    @property
    def settings(self) -> dict:
        return self.result

    @property
    def peak_mb(self) -> float | None:
        """Peak memory, None if it was not measured or the run did not finish."""
        return self.number("memory", "peak_mb")


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
    """The results in a file of several, by their names; of a study by those of its rows."""
    runs = content.get("runs")
    if isinstance(content.get("rows"), list):
        return {run.name: run for run in of_file(file, file.stem) or ()}
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


def load_run(path: Path) -> Run:
    """The one run in a file or folder; ToolError if there are several."""
    found = find_runs(path)
    if len(found) != 1:
        several = ", ".join(run.name for run in found) or "none"
        raise ToolError(f"{path}: one run is wanted, there are {several}")
    return found[0]


def of_summary(path: Path, result: dict, name: str) -> Run:
    """A run of a script; --compare-fusion leaves both of a pair, one in the folder `baseline`."""
    folder = path.resolve().parent
    is_first = folder.name == "baseline"
    team = folder.parent if is_first else folder
    return Run(name, path, result, str(team / path.name), is_first)


def is_run(row: Mapping) -> bool:
    """Is a row of a study of a script that trained?"""
    return bool(
        {"batch_ms", "turns_ms", "status"} & row.keys() and {"script", "model"} & row.keys()
    )


def of_study(path: Path, study: dict) -> list[Run]:
    """The rows of a study that trained a model, under their names."""
    found = []
    count: Counter[str] = Counter()
    firsts: dict[str, dict] = {}  # of each team
    for row in filter(is_run, study["rows"]):
        sizes = next(((key,) for key in ("shape", "name") if key in row), SIZES)
        shared = {key: row[key] for key in (*sizes, "precision", "seed", "group") if key in row}
        shared["launch"] = launch_of(row)
        size = {key: value for key, value in shared.items() if value}
        team = f"{path}: {in_words({'model': row.get('model', ''), **size})}"
        if team not in firsts or row.get("side") == "none":
            firsts[team] = row
        names = {key: row[key] for key in (*sizes, *NAMES) if key in row}
        if "side" in row:
            names.pop("version", None)
        name = in_words(names)
        count[name] += 1
        found.append((f"{name} ({count[name]})" if count[name] > 1 else name, row, team))
    environment = study["environment"]
    return [
        Run(name, path, result_of(row, environment), team, firsts[team] is row, row)
        for name, row, team in found
    ]


def result_of(row: Mapping, environment: Mapping) -> dict:
    """A row of a study in the form of a script's result."""
    mode = row.get("mode", "")
    precision = row.get("precision", "fp32")
    flags = ("--enable-", "--disable-")
    argv = [word for word in row.get("argv", ()) if not word.startswith(flags)]
    config = {key: row[key] for key in ("seq_len", "shape") if key in row}
    keys = ("batch_ms", "turns_ms", "samples_per_sec", "batch_median_ms", "batch_p95_ms")
    timing = {key: row[key] for key in keys if row.get(key)}
    if "batch_ms" in timing and row.get("batch_size"):
        timing.setdefault("samples_per_sec", 1e3 * row["batch_size"] / timing["batch_ms"])
    return {
        "script": row.get("script", row.get("model")),
        "status": row.get("status", "ok"),
        "error": row.get("error"),
        "config": {**config, "arguments": " ".join(argv) or "none"},
        "fusions": {name.replace("-", "_"): True for name in row.get("fusions", ())},
        "training": {
            "batch_size": row.get("batch_size"),
            "use_amp": precision in ("bf16", "fp16"),
            "amp_dtype": "float16" if precision == "fp16" else "bfloat16",
            "matmul_precision": {"TF32": "high"}.get(precision, "highest"),
            "torch_compile": "compiled" in mode,
            "cuda_graph": "graph" in mode,
            "processes": row.get("processes", 1),
        },
        "environment": environment,
        "timing": timing,
        "memory": {"peak_mb": row.get("peak_mb")},
        "kernels": {key: row.get(key) for key in ("unit", "per_step", "host_launches")},
        "loss": {"final": row.get("final_loss")},
    }


def of_file(path: Path, name: str) -> list[Run] | None:
    """The runs in a file; None if it is a file of something else."""
    content = read_json(path)
    if isinstance(content.get("runs"), dict):
        return [*runs_in(path, content).values()]
    if isinstance(content.get("rows"), list) and isinstance(content.get("environment"), dict):
        if not content["rows"]:
            raise ToolError(f"{path}: a study without a row")
        rows = [row for row in content["rows"] if isinstance(row, dict)]
        if not any(is_run(row) for row in rows):
            return None  # of operations
        if not content.get("complete", True):
            note(f"{path}: the study is not finished; its command goes on with it")
        return of_study(path, checked_study(content, path)) or None
    if OTHER_FILES & content.keys() or "schema_version" not in content:
        return None
    return [of_summary(path, checked(Summary, content, path), name)]


def find_runs(path: Path, everything: bool = False) -> list[Run]:
    """All runs in a file, or in a folder: its own results, else its other files, else those below;
    `everything`: all of these.

    Runs that a profiler slowed down, and what was kept of an earlier run, are not among them. A
    folder without runs, and files in it that are of something else, are passed over; a file that is
    named itself has to be of runs.
    """
    if inside := file_of_runs(path):
        runs, key = inside
        if key not in runs:
            raise ToolError(f"{path}: no such run; there are {', '.join(runs)}")
        return [runs[key]]
    if not path.exists():
        raise ToolError(f"{path}: no such file or directory")
    if not path.is_dir():
        short = path.name.removesuffix(".json")
        alone = path.name.endswith("_summary.json")
        found = of_file(path, path.resolve().parent.name if alone else short)
        if found is None:
            raise ToolError(f"{path}: no runs: another kind of file, or damaged")
        return found
    own = sorted(path.glob("*_summary.json")), sorted(path.glob("*.json"))
    for files in (*([] if everything else own), below(path, "*.json")):
        found = []
        for file in files:
            place = f"{path.resolve().name}/{file.relative_to(path)}"
            if re.search(PASSED_OVER, place):
                continue
            try:
                found += of_file(file, name_below(path, file)) or []
            except ToolError as error:
                if file.name.endswith("_summary.json"):
                    raise
                note(f"passed over, {error}")  # whatever else lies in the folder
        if found:
            return distinct(found)
    note(f"{path}: no runs in there")
    return []


def name_below(top: Path, file: Path) -> str:
    folder = file.parent.relative_to(top)
    return (Path(top.resolve().name) / folder).as_posix()


def distinct(runs: Sequence[Run]) -> list[Run]:
    """Runs of which those of one name have their script in it, too."""
    count = Counter(run.name for run in runs)
    return [
        replace(run, name=f"{run.name}/{run.result['script']}") if count[run.name] > 1 else run
        for run in runs
    ]


def with_baseline(run: Run) -> list[Run]:
    """The run behind the baseline in its folder that --compare-fusion left, if there is one."""
    before = run.path.parent / "baseline" / run.path.name
    alone = run.path.name.endswith("_summary.json")  # in a file of several runs there is none
    return [load_run(before), run] if alone and before.is_file() else [run]


def versions_in(tops: Mapping[str, Path], models: Iterable[str]) -> list[Run]:
    """The results in the folders or files of these versions, of the models that have more than one,
    as `matched` has them; what took turns in one study stays a team. A folder may be that around
    what a script or run_all_profilers.sh wrote."""
    chosen = []
    every = {}
    for version, top in tops.items():
        places = (top / f"pytorch_profiles_{version}", top / "pytorch")
        every[version] = find_runs(next(filter(Path.is_dir, places), top))
    for model in models:
        sides = {
            version.upper(): [run for run in runs if run.result["script"] == f"{model}_{version}"]
            for version, runs in every.items()
        }
        for number, cell in enumerate(matched(sides)):
            named = [replace(run, name=name) for name, run in cell.items()]
            if all(run.asked for run in named) and len({run.team for run in named}) == 1:
                chosen += named
                continue
            note(*differences((run.result["script"], run.result) for run in named))
            team = f"{model} {number}"
            chosen += [replace(apart(r), team=team, is_first=r is named[0]) for r in named]
    if not chosen:
        wanted = (
            f"{m}_{version}_summary.json in {tops[version]}" for m in models for version in tops
        )
        raise ToolError(f"there is no {' or '.join(wanted)}")
    return chosen


def matched(sides: Mapping[str, Sequence[Run]], exact: bool = False) -> list[dict[str, Run]]:
    """Runs of the sides that are compared with each other: of one model at the same sizes and in
    one precision and mode, `exact` also of one script with the same fusions; or the only run of
    each side. Repeats are their median. What one side alone has is noted, and left out.

    Raises:
        ToolError: a side has two runs to compare that are no repeats.
    """
    found = {label: to_compare(runs) for label, runs in sides.items() if runs}
    alone = all(len(runs) == 1 for runs in found.values())
    cells: dict[str, dict[str, Run]] = defaultdict(dict)
    for label, runs in found.items():
        for run in runs:
            cell = cells["" if alone else cell_of(run, exact)]
            if label in cell:
                both = " and ".join(dict.fromkeys((str(cell[label].path), str(run.path))))
                raise ToolError(f"{both}: two runs of {label} at the same sizes, name one of them")
            cell[label] = run
    wanted = min(2, len(sides))
    whole = [cell for cell in cells.values() if len(cell) >= wanted]
    lonely = [run for cell in cells.values() if len(cell) < wanted for run in cell.values()]
    if whole:
        note(*(f"left out, one side alone has it: {run.path}" for run in lonely))
    return whole


def to_compare(runs: Sequence[Run]) -> list[Run]:
    """Repeats as their median; without what --compare-fusion measured beside one of the runs."""
    return medians([run for run in runs if run.asked or not run.is_first] or runs, named=False)


def cell_of(run: Run, exact: bool) -> str:
    """What runs have in common that are compared, see `matched`."""
    training = run.result["training"]
    model, _ = model_and_version(run.result["script"])
    same = {**run.result["config"], "model": model, "batch_size": training.get("batch_size")}
    same |= {"precision": precision_of(training), "mode": mode_of(training)}
    same |= {"script": run.result["script"], "fused": fused_in(run.result)} if exact else {}
    return str(sorted(same.items()))


def apart(run: Run) -> Run:
    """The run without its turns, which it did not take with those that it now stands beside, and
    with its sizes for a table."""
    timing = {key: value for key, value in run.result["timing"].items() if key != "turns_ms"}
    sizes = {key: settings(run.result).get(key) for key in (*SIZES, "precision")}
    return replace(run, result={**run.result, "timing": timing}, asked=run.asked or sizes)


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
    """Runs given as PATH or NAME=PATH, of which each is taken once; a PATH can be a pattern. Where
    names are alike, paths take their place; as `lines`, a NAME= is also that of the paths after
    it, and a path before any NAME= has its own."""
    runs = []
    line = None
    seen = set()
    given = set()
    for argument in arguments:
        own, path = split_name(argument)
        line = own or line
        name = (line or path) if lines else own
        given.add(name)
        for place in matching(path):
            for run in find_runs(place):
                key = (run.path.resolve(), run.name, name)
                if key not in seen:
                    seen.add(key)
                    runs.append(replace(run, name=name) if name else run)
    if not runs:
        raise ToolError("there is no run in any of these")
    if lines:
        scripts = {(run.name, run.result["script"]) for run in runs}
        several = Counter(name for name, _ in scripts)
        return [
            replace(run, name=f"{run.name} {run.side or run.result['script']}")
            if run.side or several[run.name] > 1
            else run
            for run in runs
        ]
    count = Counter(run.name for run in runs if run.name not in given)
    return medians(replace(r, name=place_of(r)) if count[r.name] > 1 else r for r in runs)


def place_of(run: Run) -> str:
    """The folder of a run, or the file, with its name in there."""
    if run.path.name.endswith("_summary.json"):
        return str(run.path.parent)
    return str(run.path if run.path.name == run.name else run.path / run.name)


def point_of(run: Run) -> str:
    """What repeats of a run share: script, fusions and all settings but the seed."""
    same = {"script": run.result["script"], "fused": fused_in(run.result), "seed": None}
    return str(settings(run.result) | same)


def medians(runs: Iterable[Run], named: bool = True) -> list[Run]:
    """Of runs that are repeats, and have one name if these are `named`, that with the median time,
    which knows the times of all."""
    groups: dict[tuple, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.name if named else "", point_of(run)].append(run)
    found = []
    for same in groups.values():
        finished = [run for run in same if run.number("timing", "batch_ms")]
        finished.sort(key=lambda run: run.number("timing", "batch_ms"))
        if len(finished) < 2:
            found += same
            continue
        times = tuple(run.number("timing", "batch_ms") for run in finished)
        middle = finished[(len(finished) - 1) // 2]
        note(*differences((str(run.path), run.result) for run in same))
        found += [replace(middle, repeats=times), *(run for run in same if run.status != "ok")]
    return found


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
        if len(by_value) > 1 and key not in (*ignore, "arguments"):
            found = (f"{value} for {some(names)}" for value, names in by_value.items())
            lines.append(f"{key} differs: {'; '.join(found)}")
    return lines


def some(names: Sequence[str]) -> str:
    """The first of several names, and how many there are more."""
    more = f" and {len(names) - 3} more" if len(names) > 4 else ""
    return ", ".join(names[:3] if more else names) + more


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


def report_failed(runs: Iterable[Run]) -> int:
    """Name runs that failed on stderr; returns 1 if there are any: out of memory is a result."""
    failed = [run for run in runs if run.status == "failed"]
    for run in failed:
        say(f"{run.name} failed: {run.result.get('error') or 'no message'} ({run.path})")
    return 1 if failed else 0


def baseline_in_turns(run: Run, runs: Iterable[Run]) -> Run | None:
    """The run that took turns with this one and that it is compared with."""

    def turns(one: Run) -> int:
        return len(one.number("timing", "turns_ms") or ())

    if run.is_first or not run.team:
        return None
    found = (other for other in runs if other.team == run.team and other.is_first)
    return next((other for other in found if turns(other) == turns(run) > 1), None)


def baseline_of(run: Run, runs: Sequence[Run]) -> Run:
    """The one that it was measured in turns with, otherwise the first; a baseline is its own. Of a
    study it is the first of the team, whether that finished or not."""
    of_team = [other for other in runs if run.asked and other.team == run.team and other.is_first]
    if of_team:
        return of_team[0]
    own = run if any(baseline_in_turns(other, [run]) for other in runs) else runs[0]
    return baseline_in_turns(run, runs) or own


def beside(run: Run, baseline: Run) -> dict:
    """The numbers of a run as a row, None where there is none or the run did not finish. Where both
    took turns the speed-up is the median of theirs, as --compare-fusion prints it."""
    row = {"configuration": run.name, "script": run.result["script"], "status": run.status}
    row |= {key: run.number(*place) for key, place in MEASURED.items()}
    row["repeats"] = len(run.repeats) or None
    ranged = run.repeats or run.number("timing", "turns_ms") or ()
    row["lowest_ms"] = min(ranged, default=None)
    row["highest_ms"] = max(ranged, default=None)

    def ratio(key: str) -> float | None:
        base = baseline.number(*MEASURED[key])
        return row[key] / base if row[key] and base else None

    row["speedup"] = ratio("samples_per_sec")
    turns = []
    if baseline_in_turns(run, [baseline]):
        turns = ratios(baseline.result["timing"], run.result["timing"])
        row["speedup"] = statistics.median(turns)
    row["in_turns"] = spread(turns) if turns else None
    row["lowest_ratio"] = min(turns, default=None)
    row["highest_ratio"] = max(turns, default=None)
    row["processes"] = row["processes"] or 1  # files of an earlier core do not say
    alone = baseline.number("training", "processes") or 1
    efficiency = row["speedup"] and 100 * row["speedup"] * alone / row["processes"]
    row["scaling_efficiency_percent"] = efficiency
    row["mfu_percent"] = mfu_percent(run)
    memory = ratio("peak_mb")
    row["memory_change_percent"] = None if memory is None else 100 * (memory - 1)
    loss = ratio("final_loss")
    row["loss_change"] = None if loss is None or run is baseline else loss - 1
    return {**row, "over": baseline.name, "path": str(run.path)}


def mfu_percent(run: Run) -> float | None:
    """Model FLOPs utilisation: the TFLOP/s of a step over what the data sheets of its GPUs promise
    for its type; None where these are not known."""
    achieved = run.number("flops", "achieved_tflops")
    of_device = PEAK_TFLOPS.get(run.result["environment"].get("device_name"), {})
    peak = of_device.get(precision_of(run.result["training"]))
    processes = run.number("training", "processes") or 1
    return 100 * achieved / (peak * processes) if achieved and peak else None


def csv_rows(rows: Sequence[dict], runs: Sequence[Run]) -> list[dict]:
    """Rows with what each run was asked to do; a fusion that a version lacks is off."""
    sizes = dict.fromkeys(key for run in runs for key in run.result["config"])
    fusions = dict.fromkeys(key for run in runs for key in run.result.get("fusions", ()))
    wide = []
    for row, run in zip(rows, runs, strict=True):
        result, training = run.result, run.result["training"]
        first = {key: row[key] for key in ("configuration", "script", "status")}
        # a run that ended before it had a model has its sizes among its arguments
        asked = {key: result["config"].get(key, training.get(key)) for key in sizes}
        asked |= {key: training.get(key) for key in ASKED}
        asked |= {key: int(bool(result.get("fusions", {}).get(key))) for key in fusions}
        asked["precision"] = precision_of(training)
        compiled = training.get("torch_compile")
        asked["torch_compile"] = (training.get("torch_compile_mode") or "yes") if compiled else ""
        asked["cuda_graph"] = int(bool(training.get("cuda_graph")))
        asked |= {key: result["environment"].get(key) for key in ("device", "device_name", "torch")}
        wide.append({**first, **asked, **row, "error": result.get("error")})
    return wide


def runs_section(sides: Mapping[str, Run]) -> str:
    """The table of these runs beside the first of them, and what to know about it."""
    runs = [replace(run, name=label) for label, run in sides.items()]
    rows = [beside(run, baseline_of(run, runs)) for run in runs]
    bad = [run for run in runs if run.status != "ok"]
    notes = [*unsteady(runs), *(f"{r.name} did not finish: {r.result.get('error')}" for r in bad)]
    parts = [runs_table(runs, rows)]
    parts += ["\n".join(f"- note: {note}" for note in notes)] if notes else []
    if not any(row["in_turns"] for row in rows):
        alone = "Each run was measured by itself."
        parts.append(f"{alone} `--compare-fusion` of a script measures both sides in turns.")
    return "\n\n".join(parts)


def range_of_repeats(row: Mapping) -> str | None:
    if not row["repeats"]:
        return None
    return f"{row['lowest_ms']:.2f} to {row['highest_ms']:.2f} in {row['repeats']}"


def cell_columns(runs: Sequence[Run]) -> list[Column]:
    """Columns of sizes, precision and group, of which not all are the same, for rows that know
    their run."""
    labels = {**CELL, "version": "version"} if any("on" in r.asked for r in runs) else CELL
    if all("shape" in run.asked for run in runs):
        labels = {key: label for key, label in labels.items() if key not in SIZES}
    return [
        Column(label, lambda run, key=key: str(run.asked.get(key, "-")), text=True)
        for key, label in labels.items()
        if len({str(run.asked.get(key)) for run in runs}) > 1
    ]


def runs_table(
    runs: Sequence[Run],
    rows: Sequence[dict],
    times: bool = True,
    title: str = "configuration",
    cells: bool = False,
    more: Sequence[Column] = (),
) -> str:
    """A table of these runs; without `times` only memory, kernels and loss, the same in every run;
    with `cells` their sizes."""
    units = {run.result["kernels"].get("unit") for run in runs} - {None}
    # sides that took no turns with another have nothing to compare
    compared = not cells or any(row["speedup"] != 1 for row in rows if row["speedup"])
    scaled = len({row["processes"] for row in rows if row["speedup"]}) > 1
    of_row = {id(row): run for row, run in zip(rows, runs, strict=True)}

    def where_measured(*columns: Column) -> list[Column]:
        return [column for column in columns if any(column.of(row) is not None for row in rows)]

    def with_run(column: Column) -> Column:
        return replace(column, value=lambda row: column.of(of_row[id(row)]))

    def speed(row: Mapping) -> str | None:
        return row["samples_per_sec"] and rate(row["samples_per_sec"])

    of_times = [
        Column("samples/sec", speed).or_ended(),
        *[Column("speed-up", "speedup", ".2f", "x")] * compared,
        *where_measured(Column("in turns", "in_turns")),
        *[Column("scaling efficiency", "scaling_efficiency_percent", ".1f", " %")] * scaled,
        Column("ms per step", "batch_ms", ".2f"),
        *where_measured(Column("of repeats", range_of_repeats)),
        *where_measured(*(Column(f"{phase} ms", f"{phase}_ms", ".2f") for phase in PHASES)),
        *where_measured(Column("compilation ms", "compilation_ms", ".0f")),
        *([] if cells else where_measured(Column("MFU", "mfu_percent", ".1f", " %"))),
    ]
    peak = Column("peak MB", "peak_mb", ".1f")
    counted = Column(
        f"{' or '.join(sorted(units)) or 'kernels'} per step", "kernels_per_step", ".10g"
    )
    loss = Column("final loss", "final_loss", ".4f")
    columns = [
        Column(title, "configuration"),
        *(map(with_run, cell_columns(runs)) if cells else []),
        *(of_times if times else []),
        peak if times else peak.or_ended(),
        *[Column("memory change", "memory_change_percent", "+.1f", " %")] * compared,
        *(where_measured(counted, loss) if cells else [counted, loss]),
        *(where_measured(Column("loss change", "loss_change", "+.1e")) if cells else []),
        *map(with_run, more),
    ]
    return render(columns, rows)

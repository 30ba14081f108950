"""Result files of the version scripts, `<script>_summary.json`: find, read and check them.

Several may be in one file, as `compare_runs.py --save` writes it; FILE.json/NAME is then the path
of one of them.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from lab.cli import ToolError
from lab.files import read_json
from lab.records import Study, Summary, checked, read
from lab.script import model_and_version, named_run

# What is named where it is not the same; with the value where a file of an earlier harness has
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


@dataclass(frozen=True)
class Run:
    """One result file under the name that its row or line gets."""

    name: str
    path: Path
    result: dict

    @property
    def status(self) -> str:
        """'ok', 'oom' or 'failed'."""
        return self.result["status"]

    def number(self, group: str, key: str) -> float | None:
        """A measured value, None if the run does not have it or did not finish."""
        return self.result.get(group, {}).get(key) if self.status == "ok" else None

    def row(self) -> dict:
        """What was measured, as a row of a study has it (lab/turns.py), with the final loss;
        or how it ended.

        Its peak memory is null where there is none; else what was not measured is left out.
        """
        result = self.result
        fusions = [name for name, on in (result.get("fusions") or {}).items() if on]
        row = named_run(result["script"], result["training"])
        row["fusions"] = [name.replace("_", "-") for name in fusions]
        row["peak_mb"] = self.number("memory", "peak_mb")
        if self.status != "ok":
            return {**row, "status": self.status, "error": self.result.get("error")}
        times = ("samples_per_sec", "batch_ms", "batch_median_ms", "batch_p95_ms")
        measured = {key: self.number("timing", key) for key in times}
        measured |= {key: self.number("kernels", key) for key in ("per_step", "host_launches")}
        measured["unit"] = result["kernels"].get("unit")
        measured["turns_ms"] = result["timing"].get("turns_ms")
        measured["final_loss"] = self.number("loss", "final")
        return row | {key: value for key, value in measured.items() if value is not None}


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


def runs_in(file: Path, content: dict) -> dict[str, dict]:
    """The results in a file of several, by their names."""
    runs = content.get("runs")
    if not isinstance(runs, dict):
        raise ToolError(f"{file}: not a file of several runs, as compare_runs.py --save writes it")
    named = by_name(runs.items()).items()
    return {name: checked(Summary, result, file / name) for name, result in named}


def file_of_runs(path: Path) -> tuple[dict[str, dict], str] | None:
    """The runs in the file that this path goes through, and the rest of the path.

    None if it goes through none.
    """
    files = (parent for parent in path.parents if parent.suffix == ".json" and parent.is_file())
    file = next(files, None)
    return file and (runs_in(file, read_json(file)), path.relative_to(file).as_posix())


def load_result(path: Path) -> dict:
    """A checked result, from a file of its own or of several runs."""
    if not (found := file_of_runs(path)):
        return read(Summary, path)
    runs, name = found
    if name not in runs:
        raise ToolError(f"{path}: no such run; there are {', '.join(runs)}")
    return runs[name]


def only_file(directory: Path, pattern: str, what: str) -> Path:
    """The one file in a directory that matches."""
    paths = sorted(directory.glob(pattern))
    if not paths:
        raise ToolError(f"{directory}: {what} in this directory")
    if len(paths) > 1:
        several = f"several files {pattern} ({', '.join(path.name for path in paths)})"
        raise ToolError(f"{directory}: {several}, name one of them")
    return paths[0]


def load_run(path: Path, name: str | None = None) -> Run:
    """The result in a file or directory. It is called after the directory unless it has a name."""
    if path.is_dir():
        path = only_file(path, "*_summary.json", "no result file (*_summary.json)")
    elif not path.exists() and not file_of_runs(path):
        raise ToolError(f"{path}: no such file or directory")
    result = load_result(path)
    if name is None:
        alone = path.name.endswith("_summary.json")
        name = path.resolve().parent.name if alone else path.name.removesuffix(".json")
    return Run(name, path, result)


def split_name(argument: str) -> tuple[str | None, str]:
    """NAME=PATH as (NAME, PATH), and PATH as (None, PATH), also with an equals sign in it."""
    name, sign, path = argument.partition("=")
    if not sign or Path(argument).exists():
        return None, argument
    if not name or not path:
        raise ToolError(f"{argument!r} is not NAME=PATH")
    return name, path


def load_runs(arguments: Iterable[str]) -> list[Run]:
    """Runs given as PATH or NAME=PATH. Where names are alike, paths take their place."""
    given = [split_name(argument) for argument in arguments]
    runs = [load_run(Path(path), name) for name, path in given]
    count = Counter(run.name for run in runs)
    for index, (name, path) in enumerate(given):
        if count[runs[index].name] > 1:
            if name is not None:
                raise ToolError(f"two runs are named {name}")
            runs[index] = replace(runs[index], name=path)
    return runs


def check_family(named: Iterable[tuple[str, dict]]) -> None:
    """ToolError if the (name, result) pairs are of different models, which do not compare."""
    models = {model_and_version(result["script"])[0]: name for name, result in reversed([*named])}
    if len(models) > 1:
        (first, name), (second, other) = [*models.items()][-1:-3:-1]
        both = f"{name} is a run of {first}, {other} of {second}"
        raise ToolError(f"{both}: different models cannot be compared")


def precision(result: dict) -> str:
    """The type of the matrix products, and how float32 ones are computed where not exactly."""
    training = result["training"]
    if training.get("use_amp"):
        return str(training.get("amp_dtype"))
    how = training.get("matmul_precision", "highest")
    return "float32" if how == "highest" else f"float32 ({how})"


def settings(result: dict) -> dict:
    """What is to be the same in two runs, but for what they are compared for."""
    training, environment = result["training"], result["environment"]
    names = (*SAME_ENVIRONMENT, *(["cpu_threads"] if environment.get("device") == "cpu" else []))
    return {
        **result["config"],
        "precision": precision(result),
        **{name: training.get(name, default) for name, default in SAME_TRAINING.items()},
        **{name: environment.get(name) for name in names},
    }


def differences(named: Iterable[tuple[str, dict]], ignore: Sequence[str] = ()) -> list[str]:
    """One line for each setting that is not the same in all (name, result) pairs: what it is for
    which of them.

    A run that ended before it had built its model has no configuration, and no say.
    """
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


def unsteady(named: Iterable[tuple[str, Run]]) -> list[str]:
    """One line for each (name, run) pair whose mean step is much longer than its median."""
    lines = []
    for name, run in named:
        keys = ("batch_ms", "batch_median_ms", "steps")
        mean, median, steps = (run.number("timing", key) for key in keys)
        if mean and median and steps and steps >= 5 and mean > UNSTEADY * median:
            longer = f"its mean step took {mean / median:.2f} times the median"
            lines.append(f"{name} was disturbed, {longer}: run it again")
    return lines


@dataclass(frozen=True)
class Entry:
    """A run, or a row of a study that took turns: what was measured, and what a comparison wants to
    be the same."""

    path: Path
    row: dict
    settings: dict
    of_run: bool

    def times(self) -> tuple[float, float, float]:
        """Milliseconds per step: the median, the shortest and the longest.

        In fewer than two turns these are the median step, and up to the 95th percentile.
        """
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
            found[name] = Entry(path, row, same | asked, of_run=False)
    if not found:
        raise ToolError(f"{path}: no row of this study was measured in turns")
    return found


def load_entries(path: Path) -> dict[str, Entry]:
    """What a file or directory holds, by name: a run, several, or the rows of a study."""
    content = read_json(path) if path.is_file() else {}
    if isinstance(content.get("rows"), list):
        return entries_of_study(path, checked(Study, content, path))
    if isinstance(content.get("runs"), dict):
        runs = [Run(name, path, result) for name, result in runs_in(path, content).items()]
    else:
        runs = [load_run(path)]
    found = {}
    for run in runs:
        row, environment = run.row(), run.result["environment"]
        first = {"model": row["model"], "device_name": environment.get("device_name")}
        found[run.name] = Entry(run.path, row, first | settings(run.result), of_run=True)
    return found


def report_failed(prog: str, runs: Iterable[Run]) -> int:
    """Name runs that failed on stderr; returns the exit status, 1 if there are any.

    Out of memory is a result.
    """
    failed = [run for run in runs if run.status == "failed"]
    for run in failed:
        reason = run.result.get("error") or "no message"
        print(f"{prog}: {run.name} failed: {reason} ({run.path})", file=sys.stderr)
    return 1 if failed else 0

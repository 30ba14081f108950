"""Result files: their fields by name and type, one check of all of it when a file is read, and the
runs in them: found, read, named and put side by side.

A `Record` is an object of JSON. A field without a default has to be there. What a program reads has
these types, whatever happened to the file; ToolError names the file and the field that does not.

Several runs may be in one file, as `compare_runs.py --save` writes it; FILE.json/NAME is then the
path of one of them.
"""

import glob
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Annotated, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from lab.cli import ToolError, say
from lab.files import read_json
from lab.script import model_and_version, named_run, precision_of
from lab.show import Column, ended, rate, render

HUGE = 1e300  # numbers from here on, infinity and NaN are no measurements
WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}
UNIONS = (Union, UnionType)  # of Annotated types, and of all others
Positive = Annotated[float, "a number above 0"]
Count = Annotated[int, "a whole number above 0"]
Turns = Annotated[list[Positive], "a list that is not empty"]
Outcome = Literal["ok", "oom", "failed"]
OfPeer = Literal["ok", "oom", "failed", "missing"]  # of a library that may not be installed
Value = str | float | bool | None
NONE = Literal["no other fields"]


class Record:
    """An object of JSON: its fields by name and type."""

    others: ClassVar = None  # what further fields may be: anything, a type, or NONE


class Environment(Record):
    """On what something was measured."""

    device_name: str
    device: str | None = None
    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None
    hip: str | None = None
    cpu_threads: Count | None = None


class Training(Record):
    """How a script trained."""

    batch_size: Count | None = None
    num_steps: int | None = None
    use_amp: bool = False
    amp_dtype: str | None = None
    matmul_precision: str | None = None
    torch_compile: bool = False
    torch_compile_mode: str | None = None
    cuda_graph: bool = False
    processes: Count = 1
    others = Value


class Settings(Record):
    """What a script was run with, in every file that it or a profiler of it writes."""

    schema_version: Literal[1]
    script: str
    config: dict[str, Value]
    training: Training
    environment: Environment
    fusions: dict[str, bool] = None


class Timing(Record):
    """Times of a run, in milliseconds where the name says so."""

    steps: Count | None = None
    samples_per_sec: Positive | None = None
    batch_ms: Positive | None = None
    batch_median_ms: Positive | None = None
    batch_p95_ms: Positive | None = None
    turns_ms: list[Positive] | None = None  # empty where a run failed before the first one ended
    others = float | None


# parts of a run; kernels and FLOPs are those of a step


class Memory(Record):
    peak_mb: Positive | None = None


class Kernels(Record):
    unit: str = None
    per_step: Count | None = None
    host_launches: int | None = None


class Loss(Record):
    initial: float | None = None
    final: float | None = None
    curve: list[float] = None


class Flops(Record):
    achieved_tflops: float | None = None


class Summary(Settings):
    """A run: <script>_summary.json. Of one that did not finish, groups may be empty."""

    status: Outcome
    timing: Timing
    memory: Memory
    kernels: Kernels
    loss: Loss
    flops: Flops = None
    error: str | None = None


class Ceilings(Record):
    precision: str
    gemm_tflops: Positive
    copy_gb_per_s: Positive


class Share(Record):
    """A category or phase of a profile."""

    kernels_per_step: float
    copies_per_step: float
    ms_per_step: float
    percent: float


class Profile(Settings):
    """<script>_profile.json of run_pytorch_profiler.py."""

    unit: Literal["kernels", "operators"]
    steps: Count
    kernels: Kernels = None
    kernels_per_step: float = None
    operators_per_step: float = None
    ms_per_step: float
    categories: dict[str, Share]
    phases: dict[str, Share]


class Part(Record):
    """A module, a group of operators or a kernel, beside what the device reaches."""

    flop: float
    bytes: float | None
    flop_per_byte: float | None
    ms: float | None
    others = Value  # shares and rates


class Module(Part):
    module: str


class ForwardFlops(Settings):
    """<script>_flops.json of run_deepspeed_flops.py."""

    modules: list[Module]
    ceilings: Ceilings | None
    flops_counted_by: str


class Measured(Settings):
    """A run of roofline_analysis.py."""

    schema_version: Literal[1] = 1  # the file has it
    ceilings: Ceilings


class Group(Part):
    """A row of roofline_analysis.py."""

    group: str
    script: str = None
    kernel: str = None  # where rocprof-compute counted


class Rooflines(Record):
    """roofline_analysis.json."""

    schema_version: Literal[1]
    rows: Annotated[list[Group], "a list that is not empty"]
    runs: list[Measured] = None


class Row(Record):
    """One side of a study: what it is, and what came out, or how it ended.

    Rows that have the same model, shape, precision and so on are sides, which took turns; ratios
    are between them. A study that has more fields than these has a class of its own.
    """

    # what was measured
    model: str = None  # tiny_llama or tiny_openfold
    version: str = None  # V1 to V4; a library has none
    # its name among the sides: V1, V3 compiled, cuEquivariance, none, only overlap
    side: str = None
    shape: str = None  # a name for the sizes
    batch_size: Count = None
    seq_len: Count = None
    precision: str = None  # fp32, TF32, bf16, fp16
    mode: str = None  # eager, graph, compiled, compiled graph
    fusions: list[str] = None  # flags of those in effect
    script: str = None
    argv: list[str] = None
    # how it ended, unless it finished
    status: OfPeer = None
    error: str = None
    # time, in milliseconds or microseconds per step: the median, and that of each turn
    batch_ms: Positive | None = None
    batch_median_ms: Positive | None = None
    batch_p95_ms: Positive | None = None
    turns_ms: Turns = None
    us: Positive = None
    turns_us: Turns = None
    samples_per_sec: Positive = None
    # memory, in MB: at the peak, of it beside what was there, held for the backward pass
    peak_mb: Positive | None = None
    extra_mb: float | None = None
    held_mb: float | None = None
    # of a step
    per_step: Count = None
    unit: str = None  # of per_step: kernels or operator calls
    host_launches: int | None = None
    final_loss: float | None = None


class StepKernel(Record):
    name: str
    category: str
    calls: float
    us: float


class WholeStep(Row):
    """A step by its kernels, beside a GEMM of its FLOPs and a copy of its bytes."""

    model: str
    version: str
    shape: str
    precision: str
    batch_ms: Positive
    kernels: list[StepKernel]
    ceilings: Ceilings
    flop: Count
    bytes: Count | None
    gemm_ms: Positive
    copy_ms: Positive
    over_reference: Positive


class Study(Record):
    """Rows that were measured on one device, and with what settings."""

    environment: Environment
    rows: list[Row]
    provenance: list[dict] = None  # of each session, as provenance.py reads it
    script: str = None
    argv: list[str] = None
    rounds: Count = None
    processes: Count = 1
    family: str = None  # of benchmark_suite.py, as `metrics`
    metrics: list[str] = None


class Gradients(Record):
    """<script>_gradients.json of exercises/performance_debugging/check_step.py."""

    percent: float


class Stage(Record):
    """A stage of exercises/performance_debugging."""

    stage: str
    gradient_percent: float | None
    kernel_ms: float | None
    result: Summary


class Stages(Record):
    """What compare_stages.py --output writes."""

    stages: Annotated[list[Stage], "a list that is not empty"]


class Step(Record):
    """A step of run_all_profilers.sh."""

    name: str
    status: Literal["ok", "skipped", "failed"]
    reason: str | None


class Steps(Record):
    """summary.json of run_all_profilers.sh."""

    steps: list[Step]


def read(kind: type, path: Path) -> dict:
    """The object in a file; ToolError if it is not of this kind."""
    return checked(kind, read_json(path), path)


def checked(kind: type, value: object, path: Path) -> dict:
    """The value, an object of this kind; ToolError names the file and the field where it is not."""
    _check(kind, value, path, "")
    if kind is Study:
        check_turns(value["rows"], path)
    return value


def check_rows(
    path: Path,
    rows: Sequence[dict],
    keys: Iterable[str] = (),
    measured: Iterable[str] = (),
    kind: type[Row] = Row,
) -> Sequence[dict]:
    """Return the rows of a study; ToolError names what is wrong with one: another kind, without one
    of the keys, or neither a status and an error nor all that is to be `measured`."""
    for number, row in enumerate(rows):
        _check(kind, row, path, f"rows[{number}]")
        found = ("error",) if "status" in row else measured
        missing = [key for key in keys if key not in row]
        missing += [key for key in found if row.get(key) is None]
        if missing:
            reason = "another study, or of an older version"
            raise ToolError(f"{path}: rows[{number}] has no {missing[0]}: {reason}")
    return rows


def check_turns(rows: Iterable[dict], path: Path) -> None:
    """ToolError unless rows of the same shape and precision that were measured in turns have
    equally many, in which they are compared."""
    turns: dict[tuple, int] = {}
    for number, row in enumerate(rows):
        for key in ("turns_ms", "turns_us"):
            same = row.get("shape"), row.get("precision")
            if key in row and len(row[key]) != (first := turns.setdefault(same, len(row[key]))):
                there = f"{len(row[key])} turns, others have {first}"
                raise ToolError(f"{path}: rows[{number}].{key} has {there}")


@cache
def _fields(kind: type[Record]) -> dict[str, tuple[object, bool]]:
    """The type of each field, and whether it has to be there."""
    hints, required = get_type_hints(kind, include_extras=True), {}
    for base in reversed(kind.__mro__):
        required |= {name: name not in vars(base) for name in vars(base).get("__annotations__", ())}
    return {name: (hints[name], required[name]) for name in hints if name != "others"}


def _check(kind: object, value: object, path: Path, where: str) -> None:
    """ToolError if the value is not of this kind."""
    origin, inner = get_origin(kind), get_args(kind)
    looks = _shape(type(value))
    fits = _shape(kind) is looks
    if origin in UNIONS:
        options = [option for option in inner if _shape(option) is looks]
        if fits := bool(options):
            _check(options[0], value, path, where)
    elif origin is Literal:
        fits = value in inner and not isinstance(value, bool)
    elif origin is Annotated:
        _check(inner[0], value, path, where)
        fits = (len(value) if isinstance(value, list) else value) > 0
    elif fits and isinstance(value, list):
        for number, item in enumerate(value):
            _check(inner[0], item, path, f"{where}[{number}]")
    elif fits and _is_record(kind):
        _check_fields(kind, value, path, f"{where}." if where else "")
    elif fits and inner:
        for name, item in value.items():
            _check(inner[1], item, path, f"{where}.{name}")
    elif isinstance(value, (int, float)):
        fits = fits and abs(value) < HUGE and not (kind is int and isinstance(value, float))
    if not fits:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ToolError(f"{path}: {where or 'the file'} is {shown}, not {_words(kind)}")


def _check_fields(kind: type[Record], value: dict, path: Path, place: str) -> None:
    """ToolError if the fields of the object at this place are not those of this kind."""
    known = _fields(kind)
    for name, (of, required) in known.items():
        if name in value:
            _check(of, value[name], path, f"{place}{name}")
        elif required:
            raise ToolError(f"{path}: it has no {place}{name}: another kind of file, or damaged")
    for name in sorted(value.keys() - known.keys()) if kind.others else ():
        if kind.others is NONE:
            raise ToolError(f"{path}: {place}{name} is not a field of this kind of file")
        _check(kind.others, value[name], path, f"{place}{name}")


def _is_record(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Record)


def _shape(kind: object) -> type:
    """How values of this kind look in JSON, where a whole number is a number."""
    if get_origin(kind) is Annotated:
        return _shape(get_args(kind)[0])
    return dict if _is_record(kind) else float if kind is int else get_origin(kind) or kind


def _words(kind: object) -> str:
    """What is expected."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return inner[1]
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in UNIONS:
        return " or ".join(map(_words, inner))
    return WORDS.get(kind) or ("a list" if origin is list else "an object")


# --- runs

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

    def number(self, group: str, key: str) -> float | None:
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
        """What was measured, as a row of a study has it (lab/turns.py), with the final loss;
        or how it ended. Without its turns, if nothing else took a turn: `alone`.

        Its peak memory is null where there is none; else what was not measured is left out.
        """
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
    """Runs of one model, given as PATH or NAME=PATH; a PATH can be a pattern.

    Where names are alike, paths take their place. As `lines`, a NAME= is also that of the paths
    after it.
    """
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
        return entries_of_study(path, checked(Study, content, path))
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


def beside(run: Run, baseline: Run) -> dict:
    """The numbers of a run as a row, None where there is none or the run did not finish."""
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
    row["speedup"] = speedup
    row["processes"] = row["processes"] or 1  # files of an earlier harness do not say
    alone = baseline.number("training", "processes") or 1
    row["scaling_efficiency_percent"] = speedup and 100 * speedup * alone / row["processes"]
    row["memory_change_percent"] = None if memory is None else 100 * (memory - 1)
    return {**row, "path": str(run.path)}


def renamed(sides: Mapping[str, Run]) -> list[Run]:
    return [replace(run, name=label) for label, run in sides.items()]


def runs_section(sides: Mapping[str, Run]) -> str:
    """The table of these runs beside the first of them, and what to know about it."""
    runs, alone = renamed(sides), "Each run was measured by itself."
    bad = [run for run in runs if run.status != "ok"]
    notes = [*unsteady(runs), *(f"{r.name} did not finish: {r.result.get('error')}" for r in bad)]
    parts = [runs_table(runs, [beside(run, runs[0]) for run in runs])]
    parts += ["\n".join(f"- note: {note}" for note in notes)] if notes else []
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

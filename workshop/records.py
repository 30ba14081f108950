"""What result files hold: their fields by name and type, and one check of all of it when a file is read.

A class here is an object of JSON. A field without a default has to be there. Others than those that the class names are
let through, or have the type `others` where the class has one. So what a program reads has these types, whatever
happened to the file; ToolError names the file and the field that does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from workshop.cli import ToolError
from workshop.files import read_json

HUGE = 1e300  # numbers from here on, infinity and NaN are no measurements
WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
UNIONS = (Union, UnionType)  # of Annotated types, and of all others
Positive = Annotated[float, "above 0"]
Count = Annotated[int, "above 0"]
Turns = Annotated[list[Positive], "above 0"]  # at least one
Outcome = Literal["ok", "oom", "failed"]
OfPeer = Literal["ok", "oom", "failed", "missing"]  # of a library that may not be installed
Value = str | float | bool | None


@dataclass(kw_only=True)
class Environment:
    """On what something was measured."""

    device_name: str
    device: str | None = None
    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None
    hip: str | None = None
    cpu_threads: Count | None = None


@dataclass(kw_only=True)
class Training:
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
    others: ClassVar = Value


@dataclass(kw_only=True)
class Settings:
    """What a script was run with, in every file that it or a profiler of it writes."""

    schema_version: Literal[1]
    script: str
    config: dict[str, Value]
    training: Training
    environment: Environment
    fusions: dict[str, bool] = None


@dataclass(kw_only=True)
class Timing:
    """Times of a run, in milliseconds where the name says so."""

    steps: Count | None = None
    samples_per_sec: Positive | None = None
    batch_ms: Positive | None = None
    batch_median_ms: Positive | None = None
    batch_p95_ms: Positive | None = None
    turns_ms: list[Positive] | None = None  # empty where a run failed before the first one ended
    others: ClassVar = float | None


@dataclass(kw_only=True)
class Memory:
    """Of a run, in MB."""

    peak_mb: Positive | None = None


@dataclass(kw_only=True)
class Kernels:
    """Of a step of a run."""

    unit: str = None
    per_step: Count | None = None
    host_launches: int | None = None


@dataclass(kw_only=True)
class Loss:
    """Of a run."""

    initial: float | None = None
    final: float | None = None
    curve: list[float] = None


@dataclass(kw_only=True)
class Flops:
    """Of a step of a run."""

    achieved_tflops: float | None = None


@dataclass(kw_only=True)
class Summary(Settings):
    """A run: <script>_summary.json. Of one that did not finish, groups may be empty."""

    status: Outcome
    timing: Timing
    memory: Memory
    kernels: Kernels
    loss: Loss
    flops: Flops = None
    error: str | None = None


@dataclass(kw_only=True)
class Ceilings:
    """What the device reaches."""

    precision: str
    gemm_tflops: Positive
    copy_gb_per_s: Positive


@dataclass(kw_only=True)
class Share:
    """A category or phase of a profile."""

    ms_per_step: float
    percent: float


@dataclass(kw_only=True)
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


@dataclass(kw_only=True)
class Part:
    """A module, a group of operators or a kernel, beside what the device reaches."""

    flop: float
    bytes: float | None
    flop_per_byte: float | None
    ms: float | None
    share_percent: float | None = None
    achieved_tflops: float | None = None
    roof_tflops: float | None = None
    percent_of_roof: float | None = None
    gb_per_s: float | None = None
    percent_of_copy: float | None = None


@dataclass(kw_only=True)
class Module(Part):
    """A kind of module in a forward pass."""

    module: str


@dataclass(kw_only=True)
class ForwardFlops(Settings):
    """<script>_flops.json of run_deepspeed_flops.py."""

    modules: list[Module]
    ceilings: Ceilings | None
    flops_counted_by: str


@dataclass(kw_only=True)
class Measured(Settings):
    """A run of roofline_analysis.py."""

    schema_version: Literal[1] = 1  # the file has it
    ceilings: Ceilings


@dataclass(kw_only=True)
class Group(Part):
    """A row of roofline_analysis.py."""

    group: str
    script: str = None
    kernel: str = None  # where rocprof-compute counted


@dataclass(kw_only=True)
class Rooflines:
    """roofline_analysis.json."""

    schema_version: Literal[1]
    rows: Annotated[list[Group], "above 0"]
    runs: list[Measured] = None


@dataclass(kw_only=True)
class StepKernel:
    """A kernel of a whole step."""

    name: str
    category: str
    calls: float
    us: float


@dataclass(kw_only=True)
class Side:
    """What was measured of one side of a row, in turns; or how it ended."""

    script: str = None
    argv: list[str] = None
    status: OfPeer = None
    error: str = None
    unit: str = None
    batch_ms: Positive | None = None
    turns_ms: Turns = None
    us: Positive = None
    turns_us: Turns = None
    turns_joules: Turns = None
    peak_mb: Positive | None = None
    extra_mb: float | None = None
    held_mb: float | None = None
    per_step: Count = None
    host_launches: int | None = None
    kernels: list[StepKernel] | int | str = None
    samples_per_sec: Positive = None
    final_loss: float | None = None
    loss_steps: int = None
    speedup: Positive | None = None


@dataclass(kw_only=True)
class Row(Side):
    """A row of a study: what it was measured for, and the sides, under their names; or the one side that it is."""

    model: str = None
    shape: str = None
    precision: str = None
    mode: str = None
    name: str = None
    version: str = None
    operator: str = None
    what: str = None
    batch_size: Count = None
    seq_len: Count = None
    seed: int = None
    group: int = None
    fusions: str = None
    on: list[str] = None
    flop: Count = None
    bytes: Count | None = None
    ms: Positive = None
    over_floor: float = None
    of_copy: float = None
    floor: dict[str, float] = None
    gb_per_s: dict[str, float] = None
    errors: dict[str, float] = None
    times: dict[str, Side] = None
    ceilings: Ceilings = None
    watts: float = None
    mhz: float = None
    joules_per_step: float = None
    mj_per_sample: float = None
    alone_ms: float = None
    together_ms: float = None
    slowest_ms: float = None
    ddp_ms: float = None
    others: ClassVar = Side | str | float | list[float] | None


# Rows of the studies of bench/versions.py, whose tables need all of this: field() makes a field that has to be there.


@dataclass(kw_only=True)
class Timed(Side):
    """A side that finished its turns, of a study in which all have to."""

    batch_ms: Positive = field()
    turns_ms: Turns = field()
    per_step: Count = field()
    peak_mb: Positive | None = field()


@dataclass(kw_only=True)
class Versions(Row):
    """A row of `versions.py headline`."""

    shape: str = field()
    precision: str = field()
    mode: str = field()
    v1: Timed = field()
    v2: Timed = field()
    v3: Timed = None
    others: ClassVar = None


@dataclass(kw_only=True)
class Fastest(Row):
    """A row of `versions.py fastest`; the other sides are under their names."""

    shape: str = field()
    precision: str = field()
    V4: Timed = field()
    V3: Timed = field()
    others: ClassVar = Timed


@dataclass(kw_only=True)
class Layer:
    """A way to run a layer."""

    us: Positive = field()
    kernels: int = field()


@dataclass(kw_only=True)
class Inference(Row):
    """A row of `versions.py inference`."""

    batch_size: Count = field()
    seq_len: Count = field()
    times: dict[str, Layer] = field()


@dataclass(kw_only=True)
class Counted(Row):
    """A row of `versions.py counts`."""

    script: str = field()
    argv: Annotated[list[str], "above 0"] = field()
    unit: str = field()
    per_step: Count = field()


@dataclass(kw_only=True)
class Peak(Side):
    """How much memory a run took."""

    status: Outcome = field()
    peak_mb: Positive | None = field()


@dataclass(kw_only=True)
class Memories(Row):
    """A row of `versions.py memory`."""

    seq_len: Count = field()
    scores: Peak = field()
    flash: Peak = field()


@dataclass(kw_only=True)
class Ablated(Row):
    """A row of `versions.py ablation`."""

    precision: str = field()
    fusions: str = field()


@dataclass(kw_only=True)
class Study:
    """Rows that were measured on one device."""

    environment: Environment
    rows: list[Row]
    argv: list[str] = None
    rounds: Count = None
    script: str = None
    family: str = None
    models: list[str] = None
    metrics: list[str] = None
    processes: Count = 1


@dataclass(kw_only=True)
class Gradients:
    """<script>_gradients.json of exercises/performance_debugging/check_step.py."""

    percent: float


@dataclass(kw_only=True)
class Stage:
    """A stage of exercises/performance_debugging."""

    stage: str
    gradient_percent: float | None
    kernel_ms: float | None
    result: Summary


@dataclass(kw_only=True)
class Stages:
    """What compare_stages.py --output writes."""

    stages: Annotated[list[Stage], "above 0"]


@dataclass(kw_only=True)
class Step:
    """A step of run_all_profilers.sh."""

    name: str
    status: Literal["ok", "skipped", "failed"]
    reason: str | None


@dataclass(kw_only=True)
class Steps:
    """summary.json of run_all_profilers.sh."""

    steps: list[Step]


def read(kind: type, path: Path) -> dict:
    """The object in a file; ToolError if it is not of this kind."""
    return checked(kind, read_json(path), path)


def checked(kind: type, value: object, path: Path, where: str = "") -> dict:
    """The value, an object of this kind, `where` in a file. ToolError names the file and the field where it is not."""
    _check(kind, value, path, where)
    if kind is Study:
        check_turns(value["rows"], path)
    return value


def check_turns(rows: Iterable[dict], path: Path) -> None:
    """ToolError unless all rows and sides that were measured in turns have equally many, in which they are compared."""
    first = None
    for number, row in enumerate(rows):
        for name, side in [("", row), *((f".{name}", side) for name, side in row.items() if isinstance(side, dict))]:
            for key in ("turns_ms", "turns_us"):
                if key in side and len(side[key]) != (first := first or len(side[key])):
                    place = f"rows[{number}]{name}.{key}"
                    raise ToolError(f"{path}: {place} has {len(side[key])} turns, others have {first}")


@cache
def _fields(kind: type) -> list[tuple[str, object, bool]]:
    """Name and type of each field, and whether it has to be there."""
    hints = get_type_hints(kind, include_extras=True)
    return [(each.name, hints[each.name], each.default is MISSING) for each in fields(kind)]


def _check(kind: object, value: object, path: Path, where: str) -> None:
    """ToolError if the value is not of this kind."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        place = f"{where}." if where else ""
        known = _fields(kind)
        for name, of, required in known:
            if name in value:
                _check(of, value[name], path, f"{place}{name}")
            elif required:
                raise ToolError(f"{path}: it has no {place}{name}: another kind of file, or damaged")
        if others := getattr(kind, "others", None):
            for name in value.keys() - {name for name, *_ in known}:
                _check(others, value[name], path, f"{place}{name}")
    elif origin is list and isinstance(value, list):
        for number, item in enumerate(value):
            _check(arguments[0], item, path, f"{where}[{number}]")
    elif origin is dict and isinstance(value, dict):
        for name, item in value.items():
            _check(arguments[1], item, path, f"{where}.{name}")
    elif origin is Annotated:
        _check(arguments[0], value, path, where)
        if not (len(value) if isinstance(value, list) else value) > 0:
            raise _wrong(kind, value, path, where)
    elif origin in UNIONS:
        options = [option for option in arguments if _shape(option) is _shape_of(value)]
        if not options:
            raise _wrong(kind, value, path, where)
        _check(options[0], value, path, where)
    elif origin is Literal:
        if value not in arguments or isinstance(value, bool):
            raise _wrong(kind, value, path, where)
    else:
        fits = _shape(kind) is _shape_of(value) and not (kind is int and isinstance(value, float))
        if not fits or (isinstance(value, (int, float)) and not abs(value) < HUGE):
            raise _wrong(kind, value, path, where)


def _shape(kind: object) -> type:
    """How values of this kind look in JSON; a whole number is a number."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _shape(get_args(kind)[0])
    if is_dataclass(kind):
        return dict
    return float if kind is int else origin or kind


def _shape_of(value: object) -> type:
    """How a value looks in JSON."""
    return float if type(value) is int else type(value)


def _words(kind: object) -> str:
    """What is expected."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{_words(arguments[0])} {arguments[1] if _shape(kind) is float else 'that is not empty'}"
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in UNIONS:
        return " or ".join(map(_words, arguments))
    return WORDS.get(kind) or ("a list" if origin is list else "an object")


def _wrong(kind: object, value: object, path: Path, where: str) -> ToolError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return ToolError(f"{path}: {where or 'the file'} is {shown}, not {_words(kind)}")

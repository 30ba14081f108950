"""What result files hold: their fields by name and type, and one check of all of it when a file is
read.

A class here is an object of JSON. A field without a default has to be there. What other fields may
be says `others` of a class: of any kind unless it says otherwise, a type, or NONE. So what a
program reads has these types, whatever happened to the file; ToolError names the file and the field
that does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from lab.cli import ToolError
from lab.files import read_json

HUGE = 1e300  # numbers from here on, infinity and NaN are no measurements
WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}
UNIONS = (Union, UnionType)  # of Annotated types, and of all others
Positive = Annotated[float, "above 0"]
Count = Annotated[int, "above 0"]
Turns = Annotated[list[Positive], "above 0"]  # at least one
Outcome = Literal["ok", "oom", "failed"]
OfPeer = Literal["ok", "oom", "failed", "missing"]  # of a library that may not be installed
Value = str | float | bool | None
NONE = Literal["no other fields"]


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

    kernels_per_step: float
    copies_per_step: float
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
class Errors:
    """How far a side of the accuracy atlas is from float64, or why it failed."""

    outputs: float | None = None
    loss: float | None = None
    parameters: dict[str, float] = None
    lines: dict[str, list[float | str]] = None  # the worst row or column of each, and which
    equal_bits: bool | None = None
    failed: str = None
    others: ClassVar = NONE


@dataclass(kw_only=True)
class Row:
    """One side that was measured: what it is, and what came out, or how it ended.

    Rows of a study that have the same model, shape, precision and so on are its sides, which took
    turns. Ratios are between them. Lists whose names begin with `turns` have a value for each turn.
    """

    # what was measured
    model: str = None  # tiny_llama or tiny_openfold
    version: str = None  # V1 to V4; a library has none
    # its name among the sides: V1, V3 compiled, cuEquivariance, none, only overlap
    side: str = None
    checkpointed: bool = None  # of a trunk: with --checkpoint-blocks
    shape: str = None  # a name for the sizes
    batch_size: Count = None
    seq_len: Count = None
    processes: Count = None  # that shared the batch, on a GPU each
    precision: str = None  # fp32, TF32, bf16, fp16
    mode: str = None  # eager, graph, compiled, compiled graph
    fusions: list[str] = None  # flags of those in effect
    on: list[str] = None  # of an ablation: of those that vary
    seed: int = None
    group: int = None  # of an ablation: which sides took turns
    operator: str = None
    script: str = None
    argv: list[str] = None
    # how it ended, unless it finished
    status: OfPeer = None
    error: str = None
    # time, in milliseconds or microseconds per step
    batch_ms: Positive | None = None
    batch_median_ms: Positive | None = None
    batch_p95_ms: Positive | None = None
    turns_ms: Turns = None
    us: Positive = None
    turns_us: Turns = None
    cold_us: float = None  # with an empty L2 cache
    cold_turns_us: Turns = None
    samples_per_sec: Positive = None
    speedup: Positive | None = None  # over the side `none`
    # memory, in MB
    peak_mb: Positive | None = None
    extra_mb: float | None = None
    held_mb: float | None = None
    # counts of a step
    per_step: Count = None
    unit: str = None  # of per_step: kernels or operator calls
    host_launches: int | None = None
    flop: Count = None
    bytes: Count | None = None
    gb: Positive = None
    gb_per_s: Positive = None
    of_copy: Positive = None  # of the rate of a copy
    kernels: list[StepKernel] | int | str = None
    parts: dict[str, int] = None  # bytes by what they are for
    peak_bytes: int | None = None
    # power and energy
    watts: float = None
    mhz: float = None
    turns_watts: Turns = None
    turns_mhz: Turns = None
    turns_joules: Turns = None
    joules_per_step: float = None
    mj_per_sample: float = None
    # beside a reference
    gemm_ms: Positive = None
    copy_ms: Positive = None
    over_reference: Positive = None
    ceilings: Ceilings = None
    # of bench/several_gpus.py
    name: str = None  # of a size in SCALING
    alone_ms: Positive = None
    together_ms: Positive = None
    slowest_ms: Positive = None
    ddp_ms: Positive = None
    backward_ms: Positive = None
    ratio: Positive = None
    # of --compare-fusion, as it was printed
    load: str = None  # of the host
    all_off_ms: Positive = None
    as_chosen_ms: Positive = None
    lowest: Positive = None
    highest: Positive = None
    verdict: str = None
    # of exercises
    what: str = None
    more: dict[str, str] = None  # columns of this exercise alone
    # of tools/random_sizes.py
    outcomes: dict[str, int] = None  # cases by how they ended
    difference: float = None  # of losses from V1's, at most
    # of bench/find_fusions.py, by level of fusion and by side
    predicted_ms: dict[str, float] = None
    moved: dict[str, int] = None  # bytes
    launched: dict[str, int] = None
    sides_ms: dict[str, Turns] = None
    chains: list[dict] = None
    rates: dict = None
    # other
    final_loss: float | None = None
    loss_steps: int = None
    error_of_output: float = None
    subject: str = None  # of the accuracy atlas
    case: str = None
    sides: dict[str, Errors] = None
    others: ClassVar = NONE


@dataclass(kw_only=True)
class Study:
    """Rows that were measured on one device, and with what settings."""

    environment: Environment
    rows: list[Row]
    provenance: list[dict] = None  # of each session, as provenance.py reads it
    argv: list[str] = None
    rounds: Count = None
    script: str = None
    scripts: list[str] = None
    processes: Count = 1
    # compare_versions.py, benchmark_suite.py, fusion_ablation_study.py
    versions: list[str] = None
    family: str = None
    models: list[str] = None
    metrics: list[str] = None
    fusions: list[str] = None
    sets: Count = None
    seeds: list[int] = None
    group: Count = None
    # optimize_batch_size.py, measure_energy.py
    limit_mb: Positive = None
    most: Count = None
    host_mb: Positive | None = None
    seconds: Count = None
    # bench/: versions.py, accuracy_atlas.py
    batch_size: Count = None
    subjects: list[str] = None
    precisions: list[str] = None
    runs: Count = None
    sizes: str = None
    others: ClassVar = NONE


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
    """The value, an object of this kind, `where` in a file.

    ToolError names the file and the field where it is not.
    """
    _check(kind, value, path, where)
    if kind is Study:
        check_turns(value["rows"], path)
    return value


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
                reason = "another kind of file, or damaged"
                raise ToolError(f"{path}: it has no {place}{name}: {reason}")
        others = getattr(kind, "others", None)
        for name in sorted(value.keys() - {name for name, *_ in known}) if others else ():
            if others is NONE:
                raise ToolError(f"{path}: {place}{name} is not a field of this kind of file")
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
        which = arguments[1] if _shape(kind) is float else "that is not empty"
        return f"{_words(arguments[0])} {which}"
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in UNIONS:
        return " or ".join(map(_words, arguments))
    return WORDS.get(kind) or ("a list" if origin is list else "an object")


def _wrong(kind: object, value: object, path: Path, where: str) -> ToolError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return ToolError(f"{path}: {where or 'the file'} is {shown}, not {_words(kind)}")
